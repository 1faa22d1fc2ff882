//! Puts the messages that arrive from several memories of the host into causal order.
//!
//! Each message carries the Lamport clock of its sender, its *stamp*. A reader *looks* at its rings
//! one after the other. A message in a ring that was looked at early may precede a message in a
//! ring that was looked at late, or the other way round. Therefore a message is delivered only
//! after a whole look that began when the message had been seen. That look finds every message that
//! precedes it:
//!
//! - A chain of messages leads from the earlier message to the later one. Each task of the chain
//!   had read before it wrote, so the earlier message is visible to a reader that has seen the
//!   later one.
//! - Stamps rise along the chain and within each ring. So the earlier message has a smaller stamp,
//!   and everything before it in its ring has a smaller stamp still.
//!
//! A look can find messages that are younger than all others and have small stamps nevertheless,
//! because their sender has received little. They do not wait for each other: a message waits for
//! smaller stamps only if these were seen in the look that ripens it.

use crate::ids::Tid;
use std::collections::VecDeque;

/// Capacity, in messages, that emptied queues keep. A burst does not occupy its memory permanently.
const RETAINED_CAPACITY: usize = 1024;

#[derive(Clone, Debug)]
struct Arrival<M> {
    stamp: u64,
    message: M,
}

/// Messages that have arrived and are not in causal order yet.
#[derive(Clone, Debug)]
pub struct Arrivals<M> {
    /// Messages of the batch that is delivered next.
    batch: Vec<Arrival<M>>,
    /// Largest stamp among the messages of the batch that no whole look has followed yet; `None` if
    /// there are none.
    unripe_stamp_max: Option<u64>,
    /// Messages that no message of the batch follows.
    later: Vec<Arrival<M>>,
    /// Messages that have arrived since the look in progress began, or since the last look ended.
    fresh: Vec<Arrival<M>>,
    fresh_sender: FreshSender,
    deliverable: VecDeque<M>,
}

/// The senders of the fresh messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FreshSender {
    None,
    One(Tid),
    Several,
}

impl<M> Default for Arrivals<M> {
    fn default() -> Self {
        Self {
            batch: Vec::new(),
            unripe_stamp_max: None,
            later: Vec::new(),
            fresh: Vec::new(),
            fresh_sender: FreshSender::None,
            deliverable: VecDeque::new(),
        }
    }
}

impl<M> Arrivals<M> {
    /// Adds a message that has arrived. The stamps of one sender must not fall.
    #[inline]
    pub fn push(&mut self, sender: Tid, stamp: u64, message: M) {
        self.fresh_sender = match self.fresh_sender {
            FreshSender::None => FreshSender::One(sender),
            FreshSender::One(known_sender) if known_sender == sender => self.fresh_sender,
            _ => FreshSender::Several,
        };
        self.fresh.push(Arrival { stamp, message });
    }

    /// Returns the sender of all messages that wait; `None` if there are several, or if a look has
    /// begun since they arrived.
    #[inline]
    pub fn only_sender(&self) -> Option<Tid> {
        match self.fresh_sender {
            FreshSender::One(sender) if self.batch.is_empty() && self.later.is_empty() => {
                Some(sender)
            }
            _ => None,
        }
    }

    /// True if messages wait for another look.
    pub fn is_waiting(&self) -> bool {
        !(self.batch.is_empty() && self.later.is_empty() && self.fresh.is_empty())
    }

    /// True if [`Arrivals::pop`] returns a message.
    #[inline]
    pub fn has_deliverable(&self) -> bool {
        !self.deliverable.is_empty()
    }

    /// Removes and returns the next message in causal order.
    #[inline]
    pub fn pop(&mut self) -> Option<M> {
        let message = self.deliverable.pop_front();
        if message.is_none() && self.deliverable.capacity() > RETAINED_CAPACITY {
            self.deliverable.shrink_to(RETAINED_CAPACITY);
        }
        message
    }

    /// Begins a look at all rings that are marked as readable.
    pub fn begin_look(&mut self) {
        self.sort_fresh_in();
    }

    /// Ends the look that [`Arrivals::begin_look`] has begun. Everything that was visible when it
    /// began must have been added.
    pub fn end_look(&mut self) {
        let unripe_stamp_max = self.unripe_stamp_max.take();
        let Some(limit) = unripe_stamp_max else {
            // There was no batch. The messages of this look are the next batch.
            self.sort_fresh_in();
            return;
        };
        self.fresh_sender = FreshSender::None;
        for arrival in self.fresh.drain(..) {
            // Only a message with a smaller stamp can precede one of the batch.
            if arrival.stamp < limit {
                self.unripe_stamp_max = self.unripe_stamp_max.max(Some(arrival.stamp));
                self.batch.push(arrival);
            } else {
                self.later.push(arrival);
            }
        }
        if self.unripe_stamp_max.is_none() {
            self.deliver_batch();
            self.fresh.append(&mut self.later);
            self.sort_fresh_in();
        }
    }

    /// Makes all messages deliverable without a further look, because no ring is left.
    pub fn deliver_all(&mut self) {
        if self.only_sender().is_some() {
            self.deliverable
                .extend(self.fresh.drain(..).map(|arrival| arrival.message));
            self.fresh.shrink_to(RETAINED_CAPACITY);
            self.fresh_sender = FreshSender::None;
            return;
        }
        self.fresh_sender = FreshSender::None;
        self.batch.append(&mut self.later);
        self.batch.append(&mut self.fresh);
        self.unripe_stamp_max = None;
        self.deliver_batch();
    }

    /// Sorts the fresh messages into the batch or behind it. No look has followed them.
    fn sort_fresh_in(&mut self) {
        self.fresh_sender = FreshSender::None;
        let limit = match self.unripe_stamp_max {
            Some(limit) => limit,
            None => {
                let Some(stamp_max) = self.fresh.iter().map(|arrival| arrival.stamp).max() else {
                    return;
                };
                self.unripe_stamp_max = Some(stamp_max);
                self.batch.append(&mut self.fresh);
                return;
            }
        };
        for arrival in self.fresh.drain(..) {
            if arrival.stamp < limit {
                self.batch.push(arrival);
            } else {
                self.later.push(arrival);
            }
        }
    }

    fn deliver_batch(&mut self) {
        // The sort is stable, so messages of one sender keep their order in any case.
        if self.batch.len() > 1 {
            self.batch.sort_by_key(|arrival| arrival.stamp);
        }
        self.deliverable
            .extend(self.batch.drain(..).map(|arrival| arrival.message));
        self.batch.shrink_to(RETAINED_CAPACITY);
        self.fresh.shrink_to(RETAINED_CAPACITY);
    }
}
