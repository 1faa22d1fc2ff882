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
//!    process the unacknowledged fragments of the old process ([`Core::restore_unacked`]).

use super::Core;
use bytes::Bytes;
use sempa_proto::frame::{FrameError, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame};
use sempa_proto::task::{ProcessHandoff, SendWatermark, ToDaemon, Welcome};
use sempa_proto::{Message, Micros, MigrationId, RequestId};
use std::collections::VecDeque;

/// Sequence number in the watermark of an unread message: the next process can deliver the message
/// immediately, because every link has reached 0.
const DELIVER_IMMEDIATELY_SEQ: u64 = 0;
/// Bit position, within a request id, of the number of predecessor processes. This number makes the
/// ids of different processes of a task distinct.
const REQUEST_ID_SHIFT: u32 = 40;

/// Returns the incarnation of a new process, and the request id that precedes its first one.
/// Replies to requests of a predecessor process match no id of the new process.
pub(super) fn initial_ids(welcome: &Welcome) -> (u16, RequestId) {
    let successor = welcome.handoff.as_deref();
    (
        successor.map_or(0, |s| s.incarnation),
        RequestId(successor.map_or(0, |s| u64::from(s.restart_count) << REQUEST_ID_SHIFT)),
    )
}

impl Core {
    /// Creates the links that the predecessor process has handed off.
    pub(super) fn take_over_links(&mut self, successor: &ProcessHandoff) {
        for link_state in &successor.links {
            let mut link = Link::resume_from(self.own_tid, link_state);
            link.handle(Micros(0), LinkEvent::RouteUp(self.route));
            self.links.insert(link_state.peer, link);
            self.queue_for_pump(link_state.peer);
            if link_state.peer_gone {
                self.ended_peers.push_back(link_state.peer);
            }
        }
    }

    /// Queues an unacknowledged fragment of the predecessor process on its link again.
    pub(super) fn restore_unacked(&mut self, now: Micros, frame: &LinkFrame) {
        if let Some(link) = self.links.get_mut(&frame.dst) {
            link.accept_returned_frame(frame);
            self.pump_link(now, frame.dst);
        }
    }

    /// Handles the announcement that the program will be asked to exit for migration `by`: hands
    /// off the complete state to the daemon. The program can still receive the messages that have
    /// arrived. `None` means that the request was withdrawn.
    pub(super) fn handle_exit_announcement(&mut self, now: Micros, by: Option<MigrationId>) {
        if !self.is_connected() {
            return;
        }
        match by {
            Some(by) => self.hand_off(now, by),
            // The process is already exiting, which cannot be undone.
            None if self.exiting => {}
            None => {
                self.windows_disabled = false;
                self.links.values_mut().for_each(Link::restore_window);
                let frame = self
                    .handed_off_for
                    .take()
                    .map(|by| encode_control(&ToDaemon::ExitCancelled { migration: by }));
                self.queue_frames(frame);
            }
        }
        self.event_seq += 1;
    }

    /// Records that the process is exiting. Returns true if the daemon must first be notified with
    /// [`sempa_proto::task::Request::AboutToExit`]: the program was asked to exit earlier, but its
    /// state is not handed off at present.
    pub(crate) fn begin_exit(&mut self) -> bool {
        self.exiting = true;
        self.exit_was_requested && self.handed_off_for.is_none()
    }

    fn queue_frames(&mut self, frames: impl IntoIterator<Item = Result<Bytes, FrameError>>) {
        frames
            .into_iter()
            .flatten()
            .for_each(|word| self.outbox.push(word));
    }

    /// Removes and returns, in order, the messages and deferred notifications that the next process
    /// must receive. Messages in the inbox are included only if this process is already exiting;
    /// before that, the program can still receive them.
    fn take_unread(&mut self) -> Vec<(SendWatermark, Message)> {
        let mut unread = VecDeque::new();
        if self.exiting {
            self.inbox.drain_into(&mut unread);
        }
        let with_watermark = |message: Message| {
            (
                SendWatermark {
                    peer: message.src,
                    end_seq: DELIVER_IMMEDIATELY_SEQ,
                },
                message,
            )
        };
        unread
            .into_iter()
            .map(with_watermark)
            .chain(std::mem::take(&mut self.deferred_deliveries))
            .collect()
    }

    fn hand_off(&mut self, now: Micros, by: MigrationId) {
        (self.handed_off_for, self.exit_was_requested) = (Some(by), true);
        self.end_rings(now);
        self.end_direct(now);
        self.windows_disabled = true;
        self.route = self.route.next();
        let (mut link_states, mut frames) = (Vec::new(), Vec::new());
        for link in self.links.values_mut() {
            // Fragments that were sent on other routes may still be in transit.
            link.handle(now, LinkEvent::RouteUp(self.route));
            let (link_state, unacked) = link.hand_off(now);
            link_states.push(link_state);
            frames.extend(unacked);
        }
        self.pump_queue.clear();
        self.in_pump_queue.clear();
        let handoff = ToDaemon::Handoff {
            migration: by,
            incarnation: self.incarnation,
            links: link_states,
            deferred_notifications: self.take_unread(),
        };
        let (Ok(first), Ok(last)) = (
            encode_control(&handoff),
            encode_control(&ToDaemon::ReadyToExit { migration: by }),
        ) else {
            // The state is too large for a frame: nothing is handed off, and the program is not
            // asked to exit.
            if let ToDaemon::Handoff {
                deferred_notifications: later,
                ..
            } = handoff
            {
                later
                    .into_iter()
                    .for_each(|(mark, message)| match mark.end_seq {
                        DELIVER_IMMEDIATELY_SEQ => self.inbox.push(message),
                        _ => self.deferred_deliveries.push_back((mark, message)),
                    });
            }
            return;
        };
        self.outbox.push(first);
        for frame in &frames {
            self.outbox.push_link(frame);
        }
        self.outbox.push(last);
        let peers: Vec<_> = self.links.keys().copied().collect();
        peers
            .into_iter()
            .for_each(|peer| self.schedule_link_timer(peer));
    }
}
