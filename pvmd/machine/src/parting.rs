//! Records the links of a process that is about to exit, so that the next process of the same task
//! can continue them.
//!
//! 1. The library sends the state of each link ([`LinkState`]) and repeats all frames that its peers
//!    have not acknowledged. From then on all its frames pass through this daemon.
//! 2. The daemon keeps a copy of everything that the process sends, and forwards only complete
//!    messages. So the peers and the log agree at any moment at which the process may exit, even in
//!    the middle of a message.
//! 3. Items for the task wait in its inbox. Only replies are still delivered to the old process.
//! 4. The next process receives the recorded state and frames as its [`ProcessHandoff`], followed by the
//!    items that waited.

use super::engines::Stage;
use super::tasks::Task;
use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::host::PendingItem;
use sempa_proto::link::{LinkFrame, LinkKind, LinkState};
use sempa_proto::task::{ProcessHandoff, SendWatermark, ToTask};
use sempa_proto::{Message, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// The log of a process that is about to exit.
#[derive(Debug, Default)]
pub(super) struct Parting {
    line: u16,
    talks: BTreeMap<Tid, LinkState>,
    /// Fragments of messages that the process has received only partially.
    halves: Vec<Bytes>,
    /// Notifications that wait for the last messages of peers.
    later: Vec<(SendWatermark, Message)>,
    /// Frames of complete messages that the process has sent and no peer is known to have received.
    said: Vec<Bytes>,
    /// Per receiver, the first fragments of a message whose last one has not arrived.
    open: BTreeMap<Tid, Vec<Bytes>>,
}

/// Returns the notifications as items for the task.
fn item(later: Vec<(SendWatermark, Message)>) -> impl Iterator<Item = PendingItem> {
    later.into_iter().map(|(mark, message)| {
        PendingItem::Control(ToTask::Deliver {
            message,
            after: Some(mark),
        })
    })
}

impl Parting {
    /// Appends a frame of the task to the log. Returns the frames that can be forwarded: those of a
    /// complete message. A retransmission is forwarded, but not logged a second time.
    fn say(&mut self, frame: &LinkFrame, bytes: Bytes) -> Vec<Bytes> {
        let LinkKind::Data { last } = frame.kind else {
            return vec![bytes];
        };
        let open = self.open.entry(frame.dst).or_default();
        open.push(bytes);
        if !last {
            return Vec::new();
        }
        let whole = self.open.remove(&frame.dst).unwrap_or_default();
        let talk = self
            .talks
            .entry(frame.dst)
            .or_insert_with(|| LinkState::new(frame.dst, frame.incarnation));
        if frame.seq + 1 == talk.end_seq + whole.len() as u64 {
            talk.end_seq = frame.seq + 1;
            self.said.extend(whole.iter().cloned());
        }
        whole
    }

    /// Returns the state for the next process, the items that the old process has left for it, and
    /// the rest of the items that waited. The left ones must be delivered first.
    pub(super) fn inherit(
        self,
        count: u32,
        waited: VecDeque<PendingItem>,
    ) -> (ProcessHandoff, Vec<PendingItem>, Vec<PendingItem>) {
        // The process that made the requests has ended.
        let waited = waited
            .into_iter()
            .filter(|held| !matches!(held, PendingItem::Control(ToTask::Reply { .. })));
        let first = self
            .said
            .into_iter()
            .chain(self.halves)
            .map(PendingItem::Frame);
        let left = first.chain(item(self.later)).collect();
        (
            ProcessHandoff {
                incarnation: self.line,
                restart_count: count,
                links: self.talks.into_values().collect(),
            },
            left,
            waited.collect(),
        )
    }
}

impl Task {
    /// True for an item that the old process may still receive.
    pub(super) fn passes(&self, held: &PendingItem) -> bool {
        // A library that must reconnect first has quiesced, or is about to.
        let listens = self
            .ending
            .is_some_and(|ending| ending.stage != Stage::Waking)
            && self.is_ending();
        listens && matches!(held, PendingItem::Control(ToTask::Reply { .. }))
    }
}

impl Machine {
    /// Requests the handoff of a task's library. From now on items for the task are kept.
    pub(super) fn ask_to_part(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let (Some(conn), Some(ending)) = (task.conn(), task.ending.as_mut()) else {
            return;
        };
        ending.stage = Stage::Hearing;
        let by = Some(ending.migration);
        task.parting = None;
        // The program must have received everything that arrived before its exit was requested.
        task.hold = false;
        self.open_inbox(tid);
        if let Some(task) = self.tasks.get_mut(tid) {
            task.hold = true;
        }
        self.out.push_back(Output::ToTask {
            conn,
            message: ToTask::PrepareExit { migration: by },
        });
    }

    /// Starts the log with the state that a library has sent.
    pub(super) fn parts(
        &mut self,
        tid: Tid,
        by: MigrationId,
        parting: (u16, Vec<LinkState>, Vec<(SendWatermark, Message)>),
    ) {
        let (line, talks, later) = parting;
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if task
            .ending
            .is_none_or(|ending| ending.migration != by || !task.is_ending())
        {
            // The migration that requested the handoff has been aborted.
            return later.into_iter().for_each(|(mark, message)| {
                self.deliver(
                    tid,
                    ToTask::Deliver {
                        message,
                        after: Some(mark),
                    },
                );
            });
        }
        let talks: BTreeMap<Tid, LinkState> =
            talks.into_iter().map(|talk| (talk.peer, talk)).collect();
        task.parting = Some(Box::new(Parting {
            line,
            talks,
            later,
            ..Parting::default()
        }));
    }

    /// Stores a link frame in the name of another task: a partial message that the next process
    /// must receive. Returns false if the frame is not such a fragment.
    pub(super) fn is_half(&mut self, tid: Tid, frame: &LinkFrame, bytes: &Bytes) -> bool {
        let is_half = frame.dst == tid && frame.src != tid;
        if is_half
            && let Some(parting) = self
                .tasks
                .get_mut(tid)
                .and_then(|task| task.parting.as_mut())
        {
            parting.halves.push(bytes.clone());
        }
        is_half
    }

    /// Forwards a link frame of a task of this host: immediately, or, during a handoff, with the
    /// rest of its message.
    pub(super) fn said(&mut self, tid: Tid, frame: &LinkFrame, bytes: Bytes) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        match &mut task.parting {
            None => self.mark_and_forward(frame, bytes),
            Some(parting) => parting
                .say(frame, bytes)
                .into_iter()
                .for_each(|bytes| self.forward_said(bytes)),
        }
    }

    /// Ends a handoff whose process continues. The fragments that it has sent are forwarded to its
    /// peers.
    pub(super) fn part_no_more(&mut self, tid: Tid) {
        let Some(parting) = self.tasks.get_mut(tid).and_then(|task| task.parting.take()) else {
            return;
        };
        let Parting { open, later, .. } = *parting;
        open.into_values()
            .flatten()
            .for_each(|bytes| self.forward_said(bytes));
        if let Some(task) = self.tasks.get_mut(tid) {
            let waited = task.inbox.drain();
            item(later)
                .chain(waited)
                .for_each(|held| task.inbox.push(held));
        }
    }

    /// Forwards a frame that was kept in the log.
    fn forward_said(&mut self, bytes: Bytes) {
        if let Some(frame) = LinkFrame::decode(bytes.clone()) {
            self.mark_and_forward(&frame, bytes);
        }
    }

    fn mark_and_forward(&mut self, frame: &LinkFrame, bytes: Bytes) {
        if let (LinkKind::Data { .. }, Some(task)) = (frame.kind, self.tasks.get_mut(frame.src)) {
            task.mark([SendWatermark {
                peer: frame.dst,
                end_seq: frame.seq.saturating_add(1),
            }]);
        }
        self.forward_link(frame.src, frame.dst, bytes);
    }
}
