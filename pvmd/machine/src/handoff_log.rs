//! Records the links of a process that is about to exit, so that the next process of the same task
//! can continue them.
//!
//! 1. The library sends the state of each link ([`LinkState`]) and repeats all frames that its
//!    peers have not acknowledged. From then on all frames of the process pass through this daemon.
//! 2. The daemon keeps a copy of everything that the process sends, and forwards only complete
//!    messages. This makes the peers and the log agree at any moment at which the process may exit,
//!    even in the middle of a message.
//! 3. Items for the task wait in its inbox. Only replies are still delivered to the old process.
//! 4. The next process receives the recorded state and frames as its [`ProcessHandoff`], followed
//!    by the items that waited.

use super::restart_engine::ExitStage;
use super::tasks::Task;
use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::causal::Past;
use sempa_proto::host::PendingItem;
use sempa_proto::link::{LinkFrame, LinkKind, LinkState};
use sempa_proto::task::{ProcessHandoff, SendWatermark, ToTask};
use sempa_proto::{Message, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// The log of a process that is about to exit.
#[derive(Debug, Default)]
pub(super) struct HandoffLog {
    incarnation: u16,
    links: BTreeMap<Tid, LinkState>,
    past: Past,
    /// Fragments of messages that the process has received only partially.
    partial_messages: Vec<Bytes>,
    /// Notifications that wait for the last messages of peers.
    deferred_notifications: Vec<(SendWatermark, Message)>,
    /// Frames of complete messages that the process has sent and that no peer has acknowledged, as
    /// far as this daemon knows.
    unacknowledged_frames: Vec<Bytes>,
    /// First fragments of a message whose last fragment has not arrived, by receiver.
    incomplete_messages: BTreeMap<Tid, Vec<Bytes>>,
}

/// Turns deferred notifications into items for the task. Each item is delivered after the messages
/// up to its watermark.
fn notification_items(
    notifications: Vec<(SendWatermark, Message)>,
) -> impl Iterator<Item = PendingItem> {
    notifications.into_iter().map(|(watermark, message)| {
        PendingItem::Control(ToTask::Deliver {
            message,
            deliver_after: Some(watermark),
        })
    })
}

impl HandoffLog {
    /// Appends a frame of the task to the log. Returns the frames that can be forwarded: when the
    /// last fragment of a message arrives, all frames of that message. A retransmission is
    /// forwarded, but not logged a second time.
    fn append(&mut self, frame: &LinkFrame, bytes: Bytes) -> Vec<Bytes> {
        let LinkKind::Data { is_last } = frame.kind else {
            return vec![bytes];
        };
        let fragments = self.incomplete_messages.entry(frame.dst).or_default();
        fragments.push(bytes);
        if !is_last {
            return Vec::new();
        }
        let message_frames = self
            .incomplete_messages
            .remove(&frame.dst)
            .unwrap_or_default();
        let link = self
            .links
            .entry(frame.dst)
            .or_insert_with(|| LinkState::new(frame.dst, frame.incarnation));
        if frame.seq + 1 == link.end_seq + message_frames.len() as u64 {
            link.end_seq = frame.seq + 1;
            self.unacknowledged_frames
                .extend(message_frames.iter().cloned());
        }
        message_frames
    }

    /// Splits the log into the handoff for the next process, the items that the log contains for
    /// that process, and the remaining items of the inbox (`inbox_items`). The items of the log
    /// must be delivered first.
    pub(super) fn into_handoff(
        self,
        restart_count: u32,
        inbox_items: VecDeque<PendingItem>,
    ) -> (ProcessHandoff, Vec<PendingItem>, Vec<PendingItem>) {
        // Replies are for the previous process, which made the requests.
        let inbox_items = inbox_items
            .into_iter()
            .filter(|item| !matches!(item, PendingItem::Control(ToTask::Reply { .. })));
        let frames = self
            .unacknowledged_frames
            .into_iter()
            .chain(self.partial_messages)
            .map(PendingItem::Frame);
        let logged_items = frames
            .chain(notification_items(self.deferred_notifications))
            .collect();
        (
            ProcessHandoff {
                incarnation: self.incarnation,
                restart_count,
                links: self.links.into_values().collect(),
                past: self.past,
            },
            logged_items,
            inbox_items.collect(),
        )
    }
}

impl Task {
    /// True if the old process may still receive the item.
    pub(super) fn accepts_during_handoff(&self, item: &PendingItem) -> bool {
        // A library that must reconnect first has quiesced, or is about to quiesce.
        let is_connected = self
            .graceful_exit
            .is_some_and(|graceful_exit| graceful_exit.stage != ExitStage::Reconnecting)
            && self.is_exiting();
        is_connected && matches!(item, PendingItem::Control(ToTask::Reply { .. }))
    }
}

impl Machine {
    /// Requests that a task's library hand off its links. From now on items for the task are held
    /// back.
    pub(super) fn request_handoff(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let (Some(conn), Some(graceful_exit)) = (task.conn(), task.graceful_exit.as_mut()) else {
            return;
        };
        graceful_exit.stage = ExitStage::AwaitingHandoff;
        let migration = Some(graceful_exit.migration);
        task.handoff_log = None;
        // The program must have received everything that arrived before its exit was requested.
        task.holds_items = false;
        self.flush_inbox(tid);
        if let Some(task) = self.tasks.get_mut(tid) {
            task.holds_items = true;
        }
        self.outputs.push_back(Output::SendToTask {
            conn,
            message: ToTask::PrepareExit { migration },
        });
    }

    /// Starts the log with the state and the deferred notifications that a library has sent.
    pub(super) fn start_handoff_log(
        &mut self,
        tid: Tid,
        migration: MigrationId,
        handoff: ProcessHandoff,
        deferred_notifications: Vec<(SendWatermark, Message)>,
    ) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if task
            .graceful_exit
            .is_none_or(|graceful_exit| graceful_exit.migration != migration || !task.is_exiting())
        {
            // The migration that requested the handoff has been aborted.
            return deferred_notifications
                .into_iter()
                .for_each(|(watermark, message)| {
                    self.deliver(
                        tid,
                        ToTask::Deliver {
                            message,
                            deliver_after: Some(watermark),
                        },
                    );
                });
        }
        let links = handoff.links.into_iter().map(|link| (link.peer, link));
        task.handoff_log = Some(Box::new(HandoffLog {
            incarnation: handoff.incarnation,
            links: links.collect(),
            past: handoff.past,
            deferred_notifications,
            ..HandoffLog::default()
        }));
    }

    /// Handles a link frame that the process sends on behalf of another task. If the frame is a
    /// fragment of a partial message that the next process must receive, stores it and returns
    /// true.
    pub(super) fn store_partial_fragment(
        &mut self,
        tid: Tid,
        frame: &LinkFrame,
        bytes: &Bytes,
    ) -> bool {
        let is_partial_fragment = frame.dst == tid && frame.src != tid;
        if is_partial_fragment
            && let Some(log) = self
                .tasks
                .get_mut(tid)
                .and_then(|task| task.handoff_log.as_mut())
        {
            log.partial_messages.push(bytes.clone());
        }
        is_partial_fragment
    }

    /// Forwards a link frame of a task of this host: immediately, or, during a handoff, when its
    /// message is complete.
    pub(super) fn forward_or_log(&mut self, tid: Tid, frame: &LinkFrame, bytes: Bytes) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match &mut task.handoff_log {
            None => self.record_and_forward(frame, bytes),
            Some(log) => log
                .append(frame, bytes)
                .into_iter()
                .for_each(|bytes| self.forward_logged(bytes)),
        }
    }

    /// Ends a handoff because the process continues to run. The logged fragments of incomplete
    /// messages are forwarded to their receivers.
    pub(super) fn cancel_handoff(&mut self, tid: Tid) {
        let Some(log) = self
            .tasks
            .get_mut(tid)
            .and_then(|task| task.handoff_log.take())
        else {
            return;
        };
        let HandoffLog {
            incomplete_messages,
            deferred_notifications,
            ..
        } = *log;
        incomplete_messages
            .into_values()
            .flatten()
            .for_each(|bytes| self.forward_logged(bytes));
        if let Some(task) = self.tasks.get_mut(tid) {
            let inbox_items = task.inbox.drain();
            notification_items(deferred_notifications)
                .chain(inbox_items)
                .for_each(|item| task.inbox.push(item));
        }
    }

    /// Forwards a frame from the log.
    fn forward_logged(&mut self, bytes: Bytes) {
        if let Some(frame) = LinkFrame::decode(bytes.clone()) {
            self.record_and_forward(&frame, bytes);
        }
    }

    fn record_and_forward(&mut self, frame: &LinkFrame, bytes: Bytes) {
        if let (LinkKind::Data { is_last }, Some(task)) =
            (frame.kind, self.tasks.get_mut(frame.src))
        {
            task.record_stamp(frame, is_last);
            task.raise_watermarks([SendWatermark {
                peer: frame.dst,
                end_seq: frame.seq.saturating_add(1),
            }]);
            task.link_incarnation = frame.incarnation;
        }
        self.record_acknowledgement(frame);
        self.forward_link(frame.src, frame.dst, bytes);
    }
}
