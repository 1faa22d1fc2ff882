//! What is known of a process that is about to end, so that the next one can go on with its conversations.
//!
//! The library says where each of its links stands, and says again what its peers have not acknowledged; from then on nothing
//! goes by this daemon. It keeps a copy of all that the process says, and passes on whole messages only: whenever the process
//! ends, be it in the middle of a word, what its peers have got and what the next process knows is the same. What comes for
//! the task waits.

use super::engines::Stage;
use super::tasks::Task;
use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::host::Held;
use sempa_proto::link::{LinkFrame, LinkKind, Talk};
use sempa_proto::task::{LinkMark, Successor, ToTask};
use sempa_proto::{Message, MigrationId, Tid};
use std::collections::{BTreeMap, VecDeque};

/// What a process leaves.
#[derive(Debug, Default)]
pub(super) struct Parting {
    line: u16,
    talks: BTreeMap<Tid, Talk>,
    /// Halves of messages from others.
    halves: Vec<Bytes>,
    /// Notifications that wait for the last messages of others.
    later: Vec<(LinkMark, Message)>,
    /// What it has sent and nobody is known to have.
    said: Vec<Bytes>,
    /// Beginnings of messages whose ends have not come.
    open: BTreeMap<Tid, Vec<Bytes>>,
}

/// A notification as it comes to a task.
fn item(later: Vec<(LinkMark, Message)>) -> impl Iterator<Item = Held> {
    later.into_iter().map(|(mark, message)| {
        Held::Item(ToTask::Deliver {
            message,
            after: Some(mark),
        })
    })
}

impl Parting {
    /// Takes a frame of the task. Answers what can be passed on.
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
            .or_insert_with(|| Talk::new(frame.dst, frame.line));
        if frame.seq + 1 == talk.end + whole.len() as u64 {
            talk.end = frame.seq + 1;
            self.said.extend(whole.iter().cloned());
        }
        whole
    }

    /// What the next process has to know, what this one has left for it, which comes first, and of this that waited the rest.
    pub(super) fn inherit(
        self,
        count: u32,
        waited: VecDeque<Held>,
    ) -> (Successor, Vec<Held>, Vec<Held>) {
        // Whoever asked is no more.
        let waited = waited
            .into_iter()
            .filter(|held| !matches!(held, Held::Item(ToTask::Reply { .. })));
        let first = self.said.into_iter().chain(self.halves).map(Held::Link);
        let left = first.chain(item(self.later)).collect();
        (
            Successor {
                line: self.line,
                count,
                talks: self.talks.into_values().collect(),
            },
            left,
            waited.collect(),
        )
    }
}

impl Task {
    /// True for what its old process may still have.
    pub(super) fn passes(&self, held: &Held) -> bool {
        // One that is to come back has let go, or is about to.
        let listens = self
            .ending
            .is_some_and(|ending| ending.stage != Stage::Waking)
            && self.is_ending();
        listens && matches!(held, Held::Item(ToTask::Reply { .. }))
    }
}

impl Machine {
    /// Has the library of a task say all, and keeps what comes from now on.
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
        // A process that sees the signal has all that has come for it so far.
        task.hold = false;
        self.open_inbox(tid);
        if let Some(task) = self.tasks.get_mut(tid) {
            task.hold = true;
        }
        self.out.push_back(Output::ToTask {
            conn,
            message: ToTask::TakeNothing { by },
        });
    }

    /// A library says where it stands.
    pub(super) fn parts(
        &mut self,
        tid: Tid,
        by: MigrationId,
        parting: (u16, Vec<Talk>, Vec<(LinkMark, Message)>),
    ) {
        let (line, talks, later) = parting;
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if task
            .ending
            .is_none_or(|ending| ending.migration != by || !task.is_ending())
        {
            // It had been asked for a move that is off.
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
        let talks: BTreeMap<Tid, Talk> = talks.into_iter().map(|talk| (talk.peer, talk)).collect();
        task.parting = Some(Box::new(Parting {
            line,
            talks,
            later,
            ..Parting::default()
        }));
    }

    /// A link frame in the name of another task: half a message that the next process is to have. False if it is not.
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

    /// A link frame of a task here goes its way, at once or, of one that parts, with the rest of its message.
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

    /// A process goes on that was to part. What it has said on the way is its peers'.
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

    /// Passes on a frame that was kept for a while.
    fn forward_said(&mut self, bytes: Bytes) {
        if let Some(frame) = LinkFrame::decode(bytes.clone()) {
            self.mark_and_forward(&frame, bytes);
        }
    }

    fn mark_and_forward(&mut self, frame: &LinkFrame, bytes: Bytes) {
        if let (LinkKind::Data { .. }, Some(task)) = (frame.kind, self.tasks.get_mut(frame.src)) {
            task.mark([LinkMark {
                peer: frame.dst,
                end: frame.seq.saturating_add(1),
            }]);
        }
        self.forward_link(frame.src, frame.dst, bytes);
    }
}
