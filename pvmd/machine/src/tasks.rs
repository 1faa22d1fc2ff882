//! The tasks of this host: what is known of each, how tids are given out, and how a task ends.

use super::checkpoints::Ends;
use super::engines::{Away, Ending};
use super::guests::Still;
use super::pairs::sender_of;
use super::parting::Parting;
use super::suspend::Suspended;
use super::{ConnId, Machine, Output};
use checkpoint_protocol::Source;
use sempa_proto::engine::Begin;
use sempa_proto::event::EventKind;
use sempa_proto::host::{Carried, Held, HostMsg, TaskRecord, Watch, WatchKind};
use sempa_proto::link::RETAINED_BYTES_MAX;
use sempa_proto::migration::Usage;
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TASK_RM, TaskInfo};
use sempa_proto::task::{AtEnd, LinkMark, RedirectAt, Restart, Sink, Successor, ToTask};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Tasks alive on one host at most.
pub(super) const TASKS_MAX: usize = 65_536;
/// Bytes of link frames kept for one task that cannot take them now; more are dropped. Tasks that live hold themselves to
/// their links' windows; what is beyond are the last words of tasks that have ended, which nobody would send again.
pub(super) const HELD_LINK_BYTES_MAX: usize = RETAINED_BYTES_MAX;
/// Words about routes kept for one task that cannot take them now; more are dropped, as if a move had come between.
pub(super) const HELD_WORDS_MAX: usize = 4096;
/// Tasks that have ended and are remembered with their marks.
pub(super) const DEAD_MAX: usize = 4096;
/// How long the socket of an ended process may stay open (a child of it may have it) before its end is made to come.
const DRAIN_TIME: Micros = Micros::from_secs(2);

/// What waits for a task, in order.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) queue: VecDeque<Held>,
    link_bytes: usize,
    words: usize,
}

impl Inbox {
    /// Adds something; a link frame or a word over the limit is dropped.
    pub(super) fn push(&mut self, held: Held) {
        match &held {
            Held::Link(frame) if self.link_bytes + frame.len() > HELD_LINK_BYTES_MAX => return,
            Held::Link(frame) => self.link_bytes += frame.len(),
            Held::Item(ToTask::Route { .. }) if self.words >= HELD_WORDS_MAX => return,
            Held::Item(ToTask::Route { .. }) => self.words += 1,
            Held::Item(_) => {}
        }
        self.queue.push_back(held);
    }

    /// What lies in it.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Held> {
        self.queue.iter()
    }

    /// Takes all.
    pub(super) fn drain(&mut self) -> VecDeque<Held> {
        (self.link_bytes, self.words) = (0, 0);
        std::mem::take(&mut self.queue)
    }
}

/// Where a task stands with its daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its process was ordered; it has not connected.
    Expected,
    /// It talks to us.
    Connected(ConnId),
    /// It has let go for a move and will connect again.
    Detached,
    /// It has left the virtual machine; its process lives on.
    Left,
}

/// One task.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) tid: Tid,
    pub(super) parent: Tid,
    pub(super) name: String,
    pub(super) flags: i32,
    pub(super) pid: i32,
    pub(super) epid: Option<i32>,
    pub(super) pinned: bool,
    /// It was spawned to be debugged.
    pub(super) debugged: bool,
    /// The virtual machine needs it here: what the daemon or the resource manager started for itself.
    pub(super) servant: bool,
    pub(super) output: Sink,
    pub(super) trace: Sink,
    /// The task that was asked to start it, when it was not our tasker.
    pub(super) by_tasker: Option<Tid>,
    /// What it wants when this daemon ends, if nobody started it for us.
    pub(super) at_end: AtEnd,
    /// The resource manager to be told of its end.
    pub(super) rm: Option<Tid>,
    pub(super) phase: Phase,
    /// Everything for it is kept, though it may be connected.
    pub(super) hold: bool,
    /// It has said that nothing leads out of it any more.
    pub(super) quiesced: bool,
    /// Where its library looks for news while it has let go.
    pub(super) redirect_at: RedirectAt,
    /// It was told to let go for the owner of this host, or because it is suspended, and has not come back since.
    pub(super) still: Option<Still>,
    /// It is suspended.
    pub(super) suspended: Option<Suspended>,
    pub(super) inbox: Inbox,
    /// Per peer, the number after the last fragment that it sent.
    pub(super) marks: BTreeMap<Tid, u64>,
    pub(super) requests: BTreeSet<RequestId>,
    /// Requests by which it waits for others: a meeting may be long, and can be asked for again.
    pub(super) meetings: BTreeSet<RequestId>,
    /// The part of a checkpoint that waits until all other requests are answered.
    pub(super) settling: Option<MigrationId>,
    /// Others that have ended, whose last words are to be here before it is written.
    pub(super) awaits: BTreeSet<Tid>,
    /// For that nothing but these may be open any more.
    pub(super) closing: Option<BTreeSet<RequestId>>,
    /// What its library has to be told when it comes back: it was started again.
    pub(super) restart: Option<Restart>,
    /// The same of a new process: what the one before it has left.
    pub(super) successor: Option<Box<Successor>>,
    /// What its process leaves.
    pub(super) parting: Option<Box<Parting>>,
    /// How it was started, if it may be taken elsewhere by being started again.
    pub(super) begin: Option<Box<Begin>>,
    /// It does not handle the signal by which it was to be asked for this checkpoint.
    pub(super) unheeding: Option<MigrationId>,
    /// It was asked to end for that.
    pub(super) ending: Option<Ending>,
    /// Its process has ended for that.
    pub(super) away: Option<Away>,
    /// It was started again, and has not connected.
    pub(super) returning: bool,
    /// What processes of it had used that ended for that.
    pub(super) used_before: Usage,
    pub(super) watches: Vec<Watch>,
    /// Its process has ended; only what it wrote last is waited for.
    pub(super) exited: Option<(i32, Usage)>,
    /// Its images are on the way in this move: whether its end here is its end, the coordinator says.
    pub(super) leaving: Option<MigrationId>,
    /// That move is committed; its copy here is being killed.
    pub(super) killing: bool,
    /// Who has nothing more on the way to its old place, per epoch of its new one.
    pub(super) passed: BTreeSet<(Epoch, HostId)>,
    /// Who may have something on the way to its old place: the hosts that were in the table when it got a new one.
    pub(super) awaiting: Vec<HostId>,
}

impl Task {
    /// A task in its first moment.
    pub(super) fn new(tid: Tid, parent: Tid, phase: Phase) -> Task {
        Task {
            tid,
            parent,
            name: String::new(),
            flags: 0,
            pid: 0,
            epid: None,
            pinned: false,
            debugged: false,
            servant: false,
            output: Sink::default(),
            trace: Sink::default(),
            by_tasker: None,
            at_end: AtEnd::default(),
            rm: None,
            phase,
            hold: false,
            quiesced: false,
            redirect_at: RedirectAt::default(),
            still: None,
            suspended: None,
            inbox: Inbox::default(),
            marks: BTreeMap::new(),
            requests: BTreeSet::new(),
            meetings: BTreeSet::new(),
            settling: None,
            awaits: BTreeSet::new(),
            closing: None,
            restart: None,
            successor: None,
            parting: None,
            begin: None,
            unheeding: None,
            ending: None,
            away: None,
            returning: false,
            used_before: Usage::default(),
            watches: Vec::new(),
            exited: None,
            leaving: None,
            killing: false,
            passed: BTreeSet::new(),
            awaiting: Vec::new(),
        }
    }

    /// A task that came from another host; it is not connected yet.
    pub(super) fn from_record(record: TaskRecord) -> Task {
        Task {
            name: record.name,
            flags: record.flags,
            epid: record.epid,
            output: record.output,
            trace: record.trace,
            rm: record.rm,
            marks: record.marks.iter().map(|m| (m.peer, m.end)).collect(),
            requests: record.requests.into_iter().collect(),
            meetings: record.meetings.into_iter().collect(),
            restart: record.restart,
            begin: record.begin,
            successor: record.successor,
            watches: record.watches,
            redirect_at: record.redirect_at,
            ..Task::new(record.tid, record.parent, Phase::Detached)
        }
    }

    /// True when our tasker started it.
    pub(super) fn spawned(&self) -> bool {
        self.flags & TASK_FORKED != 0
    }

    /// Its connection, if it has one.
    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.phase {
            Phase::Connected(conn) => Some(conn),
            _ => None,
        }
    }

    /// True when everything that it has asked for is answered, but for meetings that may stay open.
    pub(super) fn is_settled(&self) -> bool {
        self.awaits.is_empty()
            && self
                .requests
                .is_subset(self.closing.as_ref().unwrap_or(&self.meetings))
    }

    /// What waited for that, if it is so now.
    pub(super) fn take_settled(&mut self) -> Option<MigrationId> {
        if self.is_settled() {
            self.settling.take()
        } else {
            None
        }
    }

    /// A request has its answer.
    pub(super) fn answered(&mut self, id: RequestId) {
        self.requests.remove(&id);
        self.meetings.remove(&id);
    }

    /// Its links have sent at least this far.
    pub(super) fn mark(&mut self, marks: impl IntoIterator<Item = LinkMark>) {
        for LinkMark { peer, end } in marks {
            let seen = self.marks.entry(peer).or_default();
            *seen = end.max(*seen);
        }
    }

    /// All marks.
    pub(super) fn link_marks(&self) -> Vec<LinkMark> {
        self.marks
            .iter()
            .map(|(&peer, &end)| LinkMark { peer, end })
            .collect()
    }
}

/// The task table of this host.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    pub(super) live: BTreeMap<Tid, Task>,
    /// Numbers by which processes that were ordered may claim their tids.
    pub(super) expected: BTreeMap<i32, Tid>,
    last_local: u32,
    spared: bool,
    /// The dead, oldest first, with what they had sent.
    dead: VecDeque<(Tid, Vec<LinkMark>)>,
    /// Tasks of all hosts whose ends are known here.
    pub(super) ends: Ends,
}

impl Tasks {
    /// Numbers up to this one belong to tasks in checkpoints, or to tasks that came from one.
    pub(super) fn spare(&mut self, local: u32) {
        self.last_local = self.last_local.max(local);
        self.spared |= local > 0;
    }

    /// True when there are checkpoints of which numbers are spared.
    pub(super) fn are_spared(&self) -> bool {
        self.spared
    }

    /// A tid that was never used, or `None` when there are none left.
    pub(super) fn allocate(&mut self, host: HostId) -> Option<Tid> {
        if self.live.len() >= TASKS_MAX {
            return None;
        }
        let tid = Tid::task(host, self.last_local + 1)?;
        self.last_local += 1;
        Some(tid)
    }

    pub(super) fn get(&self, tid: Tid) -> Option<&Task> {
        self.live.get(&tid)
    }

    pub(super) fn get_mut(&mut self, tid: Tid) -> Option<&mut Task> {
        self.live.get_mut(&tid)
    }

    pub(super) fn insert(&mut self, task: Task) {
        if let (Some(epid), Phase::Expected) = (task.epid, task.phase) {
            self.expected.insert(epid, task.tid);
        }
        self.live.insert(task.tid, task);
    }

    /// Remembers how far a task that has ended had sent.
    pub(super) fn bury(&mut self, tid: Tid, marks: Vec<LinkMark>) {
        if self.dead.len() >= DEAD_MAX {
            self.dead.pop_front();
        }
        self.dead.push_back((tid, marks));
    }

    /// How far a dead task had sent to this peer.
    pub(super) fn dead_mark(&self, tid: Tid, peer: Tid) -> Option<LinkMark> {
        let marks = &self.dead.iter().rev().find(|(dead, _)| *dead == tid)?.1;
        mark_of(tid, marks, peer)
    }
}

/// The mark by which `watcher` knows that it has everything from `dead`.
pub(super) fn mark_of(dead: Tid, marks: &[LinkMark], watcher: Tid) -> Option<LinkMark> {
    marks.iter().find(|m| m.peer == watcher).map(|m| LinkMark {
        peer: dead,
        end: m.end,
    })
}

impl Machine {
    /// The tasks here, for `pvm_tasks`.
    pub(super) fn list_tasks(&self, only: Option<Tid>) -> Vec<TaskInfo> {
        let info = |task: &Task, moving: bool, stopped: bool, suspended: bool| TaskInfo {
            tid: task.tid,
            parent: task.parent,
            host: self.config.host,
            flags: task.flags,
            name: task.name.clone(),
            pid: task.pid,
            uid: self.config.uid,
            moving,
            stopped: stopped && self.hosting.is_stopped(),
            suspended,
        };
        let wanted = |tid: Tid| only.is_none_or(|only| only == tid);
        let here = self.tasks.live.values().filter(|t| wanted(t.tid)).map(|t| {
            let source = self.moves.sources.values().find(|s| s.of().tid == t.tid);
            let moving = source.is_some_and(Source::leaves)
                || (t.hold && (t.still.is_none() || source.is_some()));
            info(t, moving, t.still.is_some(), t.suspended.is_some())
        });
        let coming = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.located && wanted(a.tid));
        let coming = coming.filter_map(|a| {
            Some(info(
                &Task::from_record(a.record.clone()?),
                true,
                a.held,
                a.suspended.is_some(),
            ))
        });
        here.chain(coming).collect()
    }

    /// Everything that the next daemon has to know of a task.
    pub(super) fn record_of(&self, task: &Task) -> TaskRecord {
        TaskRecord {
            tid: task.tid,
            parent: task.parent,
            name: task.name.clone(),
            flags: task.flags,
            epid: task.epid,
            output: task.output,
            trace: task.trace,
            rm: task.rm,
            marks: task.link_marks(),
            requests: task.requests.iter().copied().collect(),
            meetings: task.meetings.iter().copied().collect(),
            restart: task.restart.clone(),
            begin: task.begin.clone(),
            successor: task.successor.clone(),
            watches: task.watches.clone(),
            redirect_at: task.redirect_at,
            hosts: self.table.hosts.iter().map(|h| h.id).collect(),
            epoch: self.table.epoch,
        }
    }

    /// The task asks to leave (`pvm_exit`).
    pub(super) fn leave(&mut self, tid: Tid, id: RequestId, marks: Vec<LinkMark>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.mark(marks);
        match task.ending {
            // It was asked to end, to begin again, and takes leave before it does.
            Some(ending) if ending.is_agreed() && task.is_ending() => {
                return self.reply(tid, id, sempa_proto::task::Reply::Done);
            }
            // Its work is done: it does not begin again.
            _ => {}
        }
        self.asked_no_more(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.parting = None;
        let own: Vec<Watch> = task
            .watches
            .extract_if(.., |w| w.kind == WatchKind::TaskExit(tid))
            .collect();
        for watch in own {
            self.send_exit_note(tid, tid, &watch, None);
        }
        self.reply(tid, id, sempa_proto::task::Reply::Done);
        self.detach(tid);
    }

    /// The task's connection counts no more: it has left, or its socket closed. A task from a command line ends by
    /// that; a spawned one when its process has ended.
    pub(super) fn detach(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if let Some((status, used)) = task.exited {
            return self.end_task(tid, status, used);
        }
        if !task.spawned() {
            return self.end_task(tid, 0, Usage::default());
        }
        if task.phase == Phase::Left {
            return;
        }
        if let Phase::Connected(conn) = task.phase {
            self.conns.retire(conn);
        }
        task.phase = Phase::Left;
        task.flags &= !(TASK_CONNECTED | TASK_RM);
        task.watches.clear();
        let held = task.inbox.drain();
        self.return_to_senders(tid, held);
        self.rings_end(tid);
        self.move_task_ended(tid);
        for host in self.other_hosts() {
            self.tell_host(host, HostMsg::Left { tid });
        }
        self.task_left(tid);
    }

    /// The process of a spawned task has ended. What it wrote before may still be on its way through the socket.
    pub(super) fn process_exited(&mut self, tid: Tid, status: i32, used: Usage) {
        if let Some(arrival) = self.moves.arrivals.get_mut(&tid).filter(|a| a.ran) {
            arrival.exited = Some((status, used));
            return self.arrival_step(tid);
        }
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let used = used.plus(task.used_before);
        task.exited = Some((status, used));
        let epid = task.epid;
        if task.conn().is_some() && self.stop.is_none() {
            self.timer(DRAIN_TIME, super::Timer::Drain(tid, epid));
        } else {
            self.end_task(tid, status, used);
        }
    }

    /// The socket of a process that has ended is still open: somebody else holds it, or this daemon is behind and what the
    /// process has written waits to be taken. That is not to be lost, so its end is waited for, and made to come.
    pub(super) fn drain_over(&mut self, tid: Tid, epid: Option<i32>) {
        // Its next process is another matter.
        let Some(task) = self.tasks.get(tid).filter(|task| task.epid == epid) else {
            return;
        };
        match (task.exited, task.conn()) {
            (Some(_), Some(conn)) => self.out.push_back(Output::HearOut { conn }),
            (Some((status, used)), None) => self.end_task(tid, status, used),
            (None, _) => {}
        }
    }

    /// The end of a task: everybody who has to know is told, behind all that it sent.
    pub(super) fn end_task(&mut self, tid: Tid, status: i32, used: Usage) {
        if self.comes_again(tid, status, used) || self.defer_end(tid, status, used) {
            return;
        }
        let Some(mut task) = self.tasks.live.remove(&tid) else {
            return;
        };
        self.tasks.expected.retain(|_, expected| *expected != tid);
        if let Some(conn) = task.conn() {
            self.conns.retire(conn);
            self.out.push_back(Output::CloseTask { conn });
        }
        self.move_task_ended(tid);
        self.guest_gone(&task);
        if task.spawned() || task.by_tasker.is_some() {
            self.output_end(tid, task.output);
        }
        let marks = task.link_marks();
        self.tell_rm_of_end(&task, &marks, status, used);
        self.trace_end(&task, status, used);
        let held = task.inbox.drain();
        self.return_to_senders(tid, held);
        self.rings_end(tid);
        self.tasks.bury(tid, marks.clone());
        if self.stop.is_none() {
            for host in self.other_hosts() {
                let carried = Carried::Ended {
                    dst: tid,
                    marks: marks.clone(),
                };
                self.out.push_back(Output::Carry { host, carried });
            }
        }
        self.record(EventKind::TaskEnded { tid, status, used });
        self.task_ended_somewhere(tid, &marks);
        self.rm_command_ended(&task, status);
        self.watcher_ended(&task, status);
        self.stop_step();
    }

    /// A task has ended, here or elsewhere.
    pub(super) fn task_ended_somewhere(&mut self, tid: Tid, marks: &[LinkMark]) {
        self.end_is_known(tid);
        self.notify_task_exit(tid, marks);
        self.contexts.retain(|_, owner| *owner != tid);
        self.task_left(tid);
    }

    /// A task takes no part any more: nothing on the master belongs to it, and it does nothing for any daemon.
    pub(super) fn task_left(&mut self, tid: Tid) {
        self.rm_gone(tid);
        self.speaker_gone(tid);
        self.server_gone(tid);
        if let Some(master) = &mut self.master {
            master.events.unsubscribe(tid);
            master.mailbox.owner_gone(tid);
        }
        self.member_ended(tid);
    }

    /// What will never be taken: those that sent it need not keep anything for this task.
    pub(super) fn return_to_senders(&mut self, tid: Tid, held: VecDeque<Held>) {
        let senders: BTreeSet<Tid> = held
            .iter()
            .filter_map(sender_of)
            .filter(|src| *src != tid)
            .collect();
        for src in senders {
            self.deliver(src, ToTask::PeerGone { tid });
        }
    }
}
