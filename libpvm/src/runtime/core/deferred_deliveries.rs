//! Deferred deliveries: a notification of a task's end is delivered after the last messages of that
//! task.
//!
//! The daemon sends a watermark with each such notification: the sequence number up to which the
//! ended task had sent. The notification is deferred until the link has received everything below
//! the watermark.

use super::{Core, DEFERRED_DELIVERIES_MAX};
use sempa_proto::Message;
use sempa_proto::task::SendWatermark;
use sempa_proto::{Micros, Tid};

impl Core {
    fn has_reached(&self, watermark: SendWatermark) -> bool {
        // A direct connection delivers all its fragments before it closes. The daemon's watermark
        // does not count these fragments.
        if self.direct.has_route(watermark.peer) {
            return false;
        }
        match self.links.get(&watermark.peer) {
            Some(link) => link.is_peer_gone() || link.expected_seq() >= watermark.end_seq,
            None => watermark.end_seq <= 1,
        }
    }

    /// Handles a message from a daemon: delivers it immediately, or defers it until the messages
    /// below the watermark `after` have arrived.
    pub(super) fn handle_delivery(
        &mut self,
        now: Micros,
        message: Message,
        after: Option<SendWatermark>,
    ) {
        // The watermark counts only fragments that the daemon carried. Messages in the ring are
        // older than the notification, so the ring is read first.
        if let Some(watermark) = after {
            self.drain_peer(now, watermark.peer);
        }
        match after {
            Some(watermark) if watermark.peer != self.own_tid && !self.has_reached(watermark) => {
                self.deferred_deliveries.push_back((watermark, message));
                if self.deferred_deliveries.len() > DEFERRED_DELIVERIES_MAX {
                    let (_, oldest) = self.deferred_deliveries.pop_front().expect("just seen");
                    self.deliver(oldest);
                }
            }
            _ => self.deliver(message),
        }
    }

    /// Delivers the notifications whose watermark the link with this peer has reached.
    pub(in crate::runtime) fn release_deferred(&mut self, peer: Tid) {
        if !self
            .deferred_deliveries
            .iter()
            .any(|(watermark, _)| watermark.peer == peer)
        {
            return;
        }
        for (watermark, message) in std::mem::take(&mut self.deferred_deliveries) {
            if watermark.peer == peer && self.has_reached(watermark) {
                self.deliver(message);
            } else {
                self.deferred_deliveries.push_back((watermark, message));
            }
        }
    }
}
