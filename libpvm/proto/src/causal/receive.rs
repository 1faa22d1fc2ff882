//! Receiving in causal order: lists of marks, and messages that are held back behind them.

use super::mark::{Mark, OrderMessage, fold};
use super::order::{CausalOrder, find_mark};
use super::peers::{Held, Hold, NO_LIST_ID, Position};
use super::unsettled::UnsettledMarks;
use super::{LIST_MARKS_MAX, MARKS_MAX, STAMP_MAX};
use crate::ids::Tid;
use crate::link::is_later_incarnation;
use std::collections::VecDeque;

impl<M> CausalOrder<M> {
    /// Accepts a message from the link with `peer`. `position` is the end of the message.
    pub fn accept_message(&mut self, peer: Tid, position: Position, stamp: u64, message: M) {
        if let Some(hold) = &mut self.peers.entry(peer).hold {
            hold.queue
                .push_back((position, Held::Message { stamp, message }));
            self.held_count += 1;
            return;
        }
        self.pass_to_arrivals(peer, position, stamp, message);
        if !self.holding_peers.is_empty() {
            self.release_held();
        }
    }

    /// True if a message that has passed the second look may be delivered at once: no message
    /// waits, no message of this task is in transit, and no peer awaits an answer.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.is_settled() && !self.has_waiting_message() && !self.arrivals.has_deliverable()
    }

    /// True if a message or an answer waits for its delivery.
    #[inline]
    pub(super) fn has_waiting_message(&self) -> bool {
        self.arrivals.is_waiting()
            || !self.answers.is_empty()
            || self.was_released
            || self.is_awaiting()
    }

    /// Records that a message is delivered at once. The order must be quiet, and a look that began
    /// when the message was visible must have found nothing else. `peer_index` is any number at
    /// first; the call changes it so that the next one finds the peer without a search.
    #[inline]
    pub fn pass_message(
        &mut self,
        peer: Tid,
        peer_index: &mut usize,
        position: Position,
        stamp: u64,
    ) {
        let peer_state = self.peers.entry_at(peer_index, peer);
        self.clock = self.clock.max(peer_state.pass_message(position, stamp));
    }

    #[inline]
    fn pass_to_arrivals(&mut self, peer: Tid, position: Position, stamp: u64, message: M) {
        let stamp = self.peers.entry(peer).pass_message(position, stamp);
        self.clock = self.clock.max(stamp);
        self.arrivals.push(peer, stamp, message);
    }

    /// Accepts a message of the peer's runtime from the link with `peer`. `stamp` is that of a
    /// list.
    pub fn accept_order_message(
        &mut self,
        peer: Tid,
        position: Position,
        stamp: u64,
        message: OrderMessage,
    ) {
        let held = match message {
            OrderMessage::Marks { id, marks } => Held::List { id, stamp, marks },
            // These concern what was sent before, so they wait for nothing.
            OrderMessage::Arrived { id } => {
                self.handle_answer(peer, id);
                Held::Handled
            }
            OrderMessage::Ask { stamp, wants_list } => {
                self.answer(peer, stamp, wants_list);
                Held::Handled
            }
            OrderMessage::AllSent { stamp, clock } => {
                self.handle_all_sent(peer, stamp, clock);
                Held::Handled
            }
        };
        if let Some(hold) = &mut self.peers.entry(peer).hold {
            hold.queue.push_back((position, held));
            self.held_count += 1;
        } else {
            self.pass(peer, position, held);
        }
        self.release_held();
    }

    /// Accepts a message that comes from this task's host and concerns everything that has
    /// arrived: it is delivered behind these messages.
    pub fn accept_notice(&mut self, message: M) {
        self.arrivals.push(Tid::NONE, self.clock, message);
    }

    /// Returns the task's clock.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Records that the predecessor of this process has received everything that `peer` had sent up
    /// to `position`.
    pub fn take_over_peer(&mut self, peer: Tid, position: Position) {
        let peer_state = self.peers.entry(peer);
        (peer_state.passed, peer_state.link_incarnation) = (position, position.incarnation);
    }

    /// Passes on a message of a peer whose messages are not held back. A list of marks may begin to
    /// hold back the messages that follow.
    fn pass(&mut self, peer: Tid, position: Position, held: Held<M>) {
        match held {
            Held::Message { stamp, message } => {
                self.pass_to_arrivals(peer, position, stamp, message);
            }
            Held::List { id, stamp, marks } => self.handle_list(peer, position, id, stamp, marks),
            Held::Handled => self.peers.entry(peer).passed = position,
            Held::Reset => {
                self.peers.entry(peer).pass_reset(position);
                self.has_stamp_floors = true;
                self.drop_stamp_floors();
                self.orphan_marks_of(peer);
            }
        }
    }

    fn handle_answer(&mut self, peer: Tid, id: u64) {
        let peer_state = self.peers.entry(peer);
        if peer_state.unanswered_list_id == Some(id) {
            peer_state.unanswered_list_id = None;
            let arrived_marks = std::mem::take(&mut peer_state.unanswered_marks);
            self.unanswered_count -= 1;
            for mark in arrived_marks.iter() {
                self.remember_settled(&mark);
            }
        }
    }

    /// Answers the question whether everything was sent up to a stamp. The answer follows it.
    fn answer(&mut self, peer: Tid, stamp: u64, wants_list: bool) {
        // More copies of a message that is sent to several tasks may follow.
        let clock = self.multicast_stamp.map_or(self.clock, |stamp| stamp - 1);
        self.answers
            .push_back((peer, OrderMessage::AllSent { stamp, clock }));
        if wants_list {
            self.requested_lists.insert(peer);
        }
    }

    /// Forgets that a list to this peer is unanswered, because no answer will come. Returns the
    /// marks of such lists that name the peer.
    pub(super) fn drop_unanswered_list(&mut self, peer: Tid) -> UnsettledMarks {
        let peer_state = self.peers.entry(peer);
        if peer_state.unanswered_list_id.take().is_some() {
            self.unanswered_count -= 1;
        }
        std::mem::take(&mut peer_state.unanswered_marks)
    }

    fn handle_list(
        &mut self,
        peer: Tid,
        position: Position,
        id: u64,
        stamp: u64,
        marks: Vec<Mark>,
    ) {
        // The list is later than what it names, and what this task sends now is later still.
        self.clock = self.clock.max(stamp.min(STAMP_MAX));
        let own_marks = self.hear(peer, stamp, marks);
        if own_marks.is_empty() {
            self.peers.entry(peer).passed = position;
            return;
        }
        self.raise_stamp_above(peer, &own_marks);
        let awaited_marks = self.keep_awaited(own_marks);
        if awaited_marks.is_empty() {
            self.peers.entry(peer).passed = position;
            return self.answer_list(peer, id);
        }
        self.holding_peers.insert(peer);
        self.peers.entry(peer).hold = Some(Hold {
            list_id: id,
            list_stamp: stamp,
            list_position: position,
            awaited_marks,
            age: 0,
            queue: VecDeque::new(),
        });
    }

    /// Sorts the next messages of a peer behind those that these marks name, even if these were
    /// sorted with larger stamps than their own: behind messages of an earlier incarnation.
    fn raise_stamp_above(&mut self, peer: Tid, marks: &[Mark]) {
        if !self.has_stamp_floors {
            return;
        }
        let senders = marks.iter().filter_map(|mark| self.peers.get(&mark.sender));
        let raised_senders = senders.filter(|sender| sender.has_stamp_floor);
        if let Some(stamp_min) = raised_senders.map(|sender| sender.last_stamp).max() {
            let peer_state = self.peers.entry(peer);
            peer_state.last_stamp = peer_state.last_stamp.max(stamp_min);
            peer_state.has_stamp_floor = true;
        }
    }

    fn answer_list(&mut self, peer: Tid, id: u64) {
        if id != NO_LIST_ID {
            self.answers.push_back((peer, OrderMessage::Arrived { id }));
        }
    }

    /// Replaces the marks that `teller` has told. Returns those that may name messages to this task
    /// that the teller's link does not order.
    pub(super) fn hear(&mut self, teller: Tid, stamp: u64, mut marks: Vec<Mark>) -> Vec<Mark> {
        let own_tid = self.own_tid;
        marks.truncate(LIST_MARKS_MAX);
        marks.retain(|mark| {
            let names_tasks =
                mark.sender.is_task() && (mark.is_folded() || mark.receiver.is_task());
            names_tasks && mark.sender != own_tid
        });
        let concerns_task = |mark: &&Mark| {
            mark.may_concern(own_tid) && !(mark.is_folded() && mark.sender == teller)
        };
        let own_marks: Vec<Mark> = marks.iter().filter(concerns_task).copied().collect();
        marks.retain(|mark| mark.is_folded() || mark.receiver != own_tid);
        marks.sort_by_key(Mark::key);
        if self.marks.len() + marks.len() > MARKS_MAX {
            marks = fold(marks, 1);
        }
        let teller_state = self.peers.entry(teller);
        let heard_marks = std::mem::replace(&mut teller_state.heard_marks, marks.clone());
        // The teller no longer names a mark: the message has arrived, or is covered by another one.
        for heard in heard_marks {
            if find_mark(&marks, &heard).is_none() {
                self.settle(&heard);
            }
        }
        if teller.is_task() {
            self.settle_unnamed(teller, stamp, &marks);
        }
        for mark in marks {
            let sender = self.peers.get(&mark.sender);
            let is_settled =
                mark.sender != teller && sender.is_some_and(|sender| sender.has_settled(&mark));
            if !is_settled && (mark.is_folded() || !self.has_ended(mark.receiver)) {
                self.marks.add(mark);
            }
        }
        own_marks
    }

    /// Settles the messages of a task that are older than its list and that the list does not name,
    /// even if others have told of them.
    fn settle_unnamed(&mut self, teller: Tid, stamp: u64, list: &[Mark]) {
        let teller_state = self.peers.entry(teller);
        teller_state.list_stamp = stamp;
        let link_incarnation = teller_state.link_incarnation;
        let is_settled = |mark: &&Mark| {
            mark.stamp <= stamp
                && !is_later_incarnation(mark.incarnation, link_incarnation)
                && find_mark(list, mark).is_none()
        };
        let settled_marks = self.marks.of_sender(teller).filter(is_settled);
        let settled_marks: Vec<Mark> = settled_marks.copied().collect();
        for mark in settled_marks {
            self.marks.remove(&mark);
        }
    }

    /// Settles a mark, and remembers it if its sender has ended.
    fn settle(&mut self, mark: &Mark) {
        self.marks.settle(mark);
        self.remember_settled(mark);
    }

    fn remember_settled(&mut self, mark: &Mark) {
        if let Some(sender) = self.peers.get_mut(&mark.sender) {
            sender.remember_settled(mark);
        }
    }

    /// Nobody says any more whether the messages have arrived of which this peer has told.
    pub(super) fn orphan_marks_of(&mut self, teller: Tid) {
        let teller_state = self.peers.entry(teller);
        let mut heard_marks = std::mem::take(&mut teller_state.heard_marks);
        self.orphaned_marks.append(&mut heard_marks);
    }

    pub(super) fn has_ended(&self, peer: Tid) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.has_ended)
    }

    /// Passes on the messages whose marks have arrived.
    pub(super) fn release_held(&mut self) {
        while let Some(peer) = self.find_releasable() {
            self.holding_peers.remove(&peer);
            let Some(hold) = self.peers.entry(peer).hold.take() else {
                continue;
            };
            self.was_released = true;
            self.raise_stamp_above(peer, &hold.awaited_marks);
            self.peers.entry(peer).passed = hold.list_position;
            self.answer_list(peer, hold.list_id);
            let mut queue = hold.queue;
            while let Some((position, held)) = queue.pop_front() {
                self.held_count -= 1;
                self.pass(peer, position, held);
                if let Some(next_hold) = self.peers.get_mut(&peer).and_then(|p| p.hold.as_mut()) {
                    next_hold.queue = queue;
                    break;
                }
            }
        }
    }

    fn find_releasable(&self) -> Option<Tid> {
        let is_releasable = |peer: &&Tid| {
            let hold = self.peers.get(peer).and_then(|peer| peer.hold.as_ref());
            hold.is_none_or(|hold| hold.awaited_marks.iter().all(|mark| self.has_passed(mark)))
        };
        self.holding_peers.iter().find(is_releasable).copied()
    }

    /// Records that `peer` has ended, and that nothing of it can arrive any more.
    pub fn handle_peer_end(&mut self, peer: Tid) {
        self.marks.remove_receiver(peer);
        self.drop_unanswered_list(peer);
        let peer_state = self.peers.entry(peer);
        peer_state.has_ended = true;
        peer_state.told_marks = Vec::new();
        self.has_stale_lists = true;
        self.orphan_marks_of(peer);
        self.release_held();
    }

    /// Drops the state of a peer that has ended. The caller forgets the peer, too.
    pub fn forget_peer(&mut self, peer: Tid) {
        let is_held = self.holding_peers.contains(&peer);
        if !is_held {
            self.peers.remove(&peer);
        }
    }

    /// Returns the next message to send to a peer's runtime, on the link with that peer.
    pub fn next_answer(&mut self) -> Option<(Tid, OrderMessage)> {
        self.answers.pop_front()
    }

    /// True if messages of this peer are held back.
    pub fn is_holding(&self, peer: Tid) -> bool {
        self.holding_peers.contains(&peer)
    }

    /// True if messages that were held back were passed on since the last call.
    pub fn take_released(&mut self) -> bool {
        std::mem::take(&mut self.was_released)
    }

    /// Returns the number of messages that are held back.
    pub fn held_count(&self) -> usize {
        self.held_count
    }

    /// Passes on everything that is held back, because nothing else can arrive.
    pub fn release_all(&mut self) {
        self.end_waits();
        while let Some(peer) = self.holding_peers.pop_first() {
            let Some(hold) = self.peers.get_mut(&peer).and_then(|peer| peer.hold.take()) else {
                continue;
            };
            self.answer_list(peer, hold.list_id);
            for (position, held) in hold.queue {
                self.held_count -= 1;
                match held {
                    Held::List { id, .. } => self.answer_list(peer, id),
                    held => self.pass(peer, position, held),
                }
            }
        }
        self.arrivals.deliver_all();
    }
}
