//! Handoff of a task to a new process: the program is asked to exit and is started again, and the
//! new process continues the links of the old process.
//!
//! 1. The daemon announces that the program will be asked to exit
//!    ([`Core::handle_exit_announcement`]). The old process sends its state: the position of each
//!    link, the unacknowledged fragments, and deferred notifications. After that the daemon
//!    delivers no messages to the old process.
//! 2. If the request is withdrawn, the old process accepts messages again.
//! 3. If the process exits after the request was withdrawn, it first notifies the daemon
//!    ([`Core::begin_exit`]).
//! 4. The new process takes over the links ([`Core::take_over_links`]). The daemon sends the new
//!    process the unacknowledged fragments of the old process ([`Core::restore_unacked_fragment`]).

use super::Core;
use bytes::Bytes;
use sempa_proto::frame::{FrameError, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame};
use sempa_proto::task::{ProcessHandoff, SendWatermark, ToDaemon, Welcome};
use sempa_proto::{Message, Micros, MigrationId, RequestId};
use std::collections::VecDeque;

/// Sequence number in the watermark of an unread message. The next process can deliver the message
/// immediately, because every link has reached this number.
const DELIVER_IMMEDIATELY_SEQ: u64 = 0;
/// Bit position, in a request id, of the number of predecessor processes. Because of this number,
/// no two processes of a task use the same request id.
const REQUEST_ID_SHIFT: u32 = 40;

/// Returns the incarnation of a new process, and the request id that precedes the first request id
/// of this process. Replies to requests of a predecessor process match no request id of the new
/// process.
pub(super) fn initial_ids(welcome: &Welcome) -> (u16, RequestId) {
    let handoff = welcome.handoff.as_deref();
    (
        handoff.map_or(0, |s| s.incarnation),
        RequestId(handoff.map_or(0, |s| u64::from(s.restart_count) << REQUEST_ID_SHIFT)),
    )
}

impl Core {
    /// Creates the links that the predecessor process has handed off.
    pub(super) fn take_over_links(&mut self, handoff: &ProcessHandoff) {
        self.order.accept_spawn(handoff.past.clone());
        for link_state in &handoff.links {
            let mut link = Link::resume_from(self.own_tid, link_state);
            link.handle_event(Micros(0), LinkEvent::RouteUp(self.daemon_route));
            self.take_over_received_messages(&link);
            self.links.insert(link_state.peer, link);
            self.record_retained_messages(link_state.peer);
            self.queue_for_pump(link_state.peer);
            if link_state.peer_gone {
                self.ended_peers.push_back(link_state.peer);
            }
        }
    }

    /// Queues an unacknowledged fragment of the predecessor process again, on the link to the
    /// receiver of the fragment.
    pub(super) fn restore_unacked_fragment(&mut self, now: Micros, frame: &LinkFrame) {
        if let Some(link) = self.links.get_mut(&frame.dst) {
            link.accept_returned_frame(frame);
            self.pump_link(now, frame.dst);
        }
    }

    /// Handles the announcement that the program will be asked to exit for migration
    /// `migration_id`: hands off the complete state to the daemon. The program can still receive
    /// the messages that have arrived. `None` means that the exit request was withdrawn; the
    /// process then accepts messages again, unless it is already exiting.
    pub(super) fn handle_exit_announcement(
        &mut self,
        now: Micros,
        migration_id: Option<MigrationId>,
    ) {
        if !self.is_connected() {
            return;
        }
        match migration_id {
            Some(migration_id) => self.hand_off_state(now, migration_id),
            // The process is already exiting, which cannot be undone.
            None if self.is_exiting => {}
            None => {
                self.windows_disabled = false;
                self.links.values_mut().for_each(Link::restore_window);
                let frame = self.handoff_migration.take().map(|migration_id| {
                    encode_control(&ToDaemon::ExitCancelled {
                        migration: migration_id,
                    })
                });
                self.queue_frames(frame);
            }
        }
        self.event_seq += 1;
    }

    /// Records that the process is exiting. Returns true if the caller must first notify the daemon
    /// with [`sempa_proto::task::Request::AnnounceExit`]: the program was asked to exit earlier,
    /// but its state is not handed off at present.
    pub(crate) fn begin_exit(&mut self) -> bool {
        self.is_exiting = true;
        self.was_exit_requested && self.handoff_migration.is_none()
    }

    fn queue_frames(&mut self, frames: impl IntoIterator<Item = Result<Bytes, FrameError>>) {
        frames
            .into_iter()
            .flatten()
            .for_each(|frame| self.outbox.push_frame(frame));
    }

    /// Removes and returns the messages and deferred notifications that the next process must
    /// receive, in order. Includes the messages in the inbox only if this process is already
    /// exiting. Before the exit begins, the program can still receive the messages in its inbox.
    fn take_unread_messages(&mut self) -> Vec<(SendWatermark, Message)> {
        let mut unread_messages = VecDeque::new();
        if self.is_exiting {
            self.inbox.drain_into(&mut unread_messages);
        }
        let add_watermark = |message: Message| {
            (
                SendWatermark {
                    peer: message.src,
                    end_seq: DELIVER_IMMEDIATELY_SEQ,
                },
                message,
            )
        };
        unread_messages
            .into_iter()
            .map(add_watermark)
            .chain(std::mem::take(&mut self.deferred_deliveries))
            .collect()
    }

    fn hand_off_state(&mut self, now: Micros, migration_id: MigrationId) {
        (self.handoff_migration, self.was_exit_requested) = (Some(migration_id), true);
        self.close_all_rings(now);
        self.close_all_direct_routes(now);
        // The next process does not know what was held back.
        self.deliver_unordered();
        self.send_order_answers(now);
        self.windows_disabled = true;
        self.daemon_route = self.daemon_route.next();
        let (mut link_states, mut frames) = (Vec::new(), Vec::new());
        for link in self.links.values_mut() {
            // Fragments that were sent on other routes may still be in transit.
            link.handle_event(now, LinkEvent::RouteUp(self.daemon_route));
            let (link_state, unacked_frames) = link.hand_off(now);
            link_states.push(link_state);
            frames.extend(unacked_frames);
        }
        self.pump_queue.clear();
        self.pump_queue_peers.clear();
        let handoff = ToDaemon::Handoff {
            migration: migration_id,
            incarnation: self.incarnation,
            links: link_states,
            past: self.order.past_for_successor(),
            deferred_notifications: self.take_unread_messages(),
        };
        let (Ok(first_frame), Ok(last_frame)) = (
            encode_control(&handoff),
            encode_control(&ToDaemon::ReadyToExit {
                migration: migration_id,
            }),
        ) else {
            // The state is too large for a frame. Nothing is handed off, and the daemon does not
            // ask the program to exit.
            if let ToDaemon::Handoff {
                deferred_notifications: unread_messages,
                ..
            } = handoff
            {
                unread_messages
                    .into_iter()
                    .for_each(|(watermark, message)| match watermark.end_seq {
                        DELIVER_IMMEDIATELY_SEQ => self.inbox.push(message),
                        _ => self.deferred_deliveries.push_back((watermark, message)),
                    });
            }
            return;
        };
        self.outbox.push_frame(first_frame);
        for frame in &frames {
            self.outbox.push_link(frame);
        }
        self.outbox.push_frame(last_frame);
        let peers: Vec<_> = self.links.keys().copied().collect();
        peers
            .into_iter()
            .for_each(|peer| self.schedule_link_timer(peer));
    }
}
