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
    /// True if no message may wait for another one or be an answer for a thread of the library.
    #[inline]
    pub(in crate::runtime) fn has_no_deferred_work(&self) -> bool {
        self.daemon_hold.is_idle()
            && self.deferred_deliveries.is_empty()
            && self.rm_calls.is_empty()
            && self.handoff_migration.is_none()
    }

    fn has_reached_watermark(&self, watermark: SendWatermark) -> bool {
        // A direct connection delivers all its fragments before its route ends. The daemon's
        // watermark does not count these fragments, so the notification waits for the end of the
        // route.
        if self.direct_routes.has_route(watermark.peer) || self.order.is_holding(watermark.peer) {
            return false;
        }
        match self.links.get(&watermark.peer) {
            Some(link) => link.is_peer_gone() || link.expected_seq() >= watermark.end_seq,
            None => watermark.end_seq <= 1,
        }
    }

    /// Handles a message from a daemon. Delivers the message immediately, or defers the message
    /// until all fragments below the watermark `watermark_to_reach` have arrived.
    pub(super) fn handle_delivery(
        &mut self,
        now: Micros,
        message: Message,
        watermark_to_reach: Option<SendWatermark>,
    ) {
        // The watermark counts only fragments that the daemon carried. Messages in the ring are
        // older than the notification, so the ring is read first.
        if let Some(watermark) = watermark_to_reach {
            self.drain_peer(now, watermark.peer);
        }
        match watermark_to_reach {
            Some(watermark)
                if watermark.peer != self.own_tid && !self.has_reached_watermark(watermark) =>
            {
                self.deferred_deliveries.push_back((watermark, message));
                if self.deferred_deliveries.len() > DEFERRED_DELIVERIES_MAX {
                    let (_, oldest_message) =
                        self.deferred_deliveries.pop_front().expect("just seen");
                    self.order.accept_notice(oldest_message);
                }
            }
            _ => self.order.accept_notice(message),
        }
        self.complete_arrivals(now);
    }

    /// Delivers the notifications whose watermark the link with `peer` has reached.
    pub(in crate::runtime) fn deliver_deferred(&mut self, peer: Tid) {
        if !self
            .deferred_deliveries
            .iter()
            .any(|(watermark, _)| watermark.peer == peer)
        {
            return;
        }
        for (watermark, message) in std::mem::take(&mut self.deferred_deliveries) {
            if watermark.peer == peer && self.has_reached_watermark(watermark) {
                self.order.accept_notice(message);
            } else {
                self.deferred_deliveries.push_back((watermark, message));
            }
        }
    }

    /// Delivers the notifications that waited for messages that were held back.
    pub(super) fn deliver_deferred_of_released(&mut self) {
        for (watermark, message) in std::mem::take(&mut self.deferred_deliveries) {
            if self.has_reached_watermark(watermark) {
                self.order.accept_notice(message);
            } else {
                self.deferred_deliveries.push_back((watermark, message));
            }
        }
    }
}
