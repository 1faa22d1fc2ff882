//! The task table of this host: the state of each task, allocation of tids, and the end of tasks.
//!
//! A task ends in two ways. It may leave the virtual machine (`pvm_exit`, or its socket closes)
//! while its process continues; a spawned task then stays in the table until its process exits.
//! When the process exits, the daemon first reads what it has written to its socket, then ends the
//! task and notifies all hosts. The notification follows everything that the task has sent.

use super::checkpoints::Ends;
use super::engines::{Away, Ending};
use super::guests::Still;
use super::pairs::sender_of;
use super::parting::Parting;
use super::suspend::Suspended;
use super::{ConnId, Machine, Output};
use checkpoint_protocol::Source;
use sempa_proto::engine::LaunchInfo;
use sempa_proto::event::EventKind;
use sempa_proto::host::{DataMsg, HostMsg, NotifySubject, PendingItem, PendingNotify, TaskRecord};
use sempa_proto::link::RETAINED_BYTES_MAX;
use sempa_proto::migration::Usage;
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TASK_RM, TaskInfo};
use sempa_proto::task::{
    OnDaemonExit, ProcessHandoff, RedirectAddress, RestartInfo, SendWatermark, Sink, ToTask,
};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Largest number of running tasks on one host.
pub(super) const TASKS_MAX: usize = 65_536;
/// Largest total size of the link frames that are kept for one task; further ones are dropped.
/// Running peers limit themselves by the windows of their links. Frames beyond the limit can only
/// be the last messages of ended tasks, which are then lost.
pub(super) const HELD_LINK_BYTES_MAX: usize = RETAINED_BYTES_MAX;
/// Largest number of route messages that are kept for one task. Further ones are dropped, as if the
/// task had migrated in between.
pub(super) const HELD_WORDS_MAX: usize = 4096;
/// Largest number of ended tasks whose watermarks are remembered.
pub(super) const DEAD_MAX: usize = 4096;
/// Time that the socket of an exited process may stay open, for example in a child of it, before
/// the daemon drains and closes it.
const DRAIN_TIME: Micros = Micros::from_secs(2);

/// Frames and items that wait for a task, in order.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) queue: VecDeque<PendingItem>,
    link_bytes: usize,
    words: usize,
}

impl Inbox {
    /// Adds a frame or an item. A link frame or route message above the limit is dropped.
    pub(super) fn push(&mut self, held: PendingItem) {
        match &held {
            PendingItem::Frame(frame) if self.link_bytes + frame.len() > HELD_LINK_BYTES_MAX => {
                return;
            }
            PendingItem::Frame(frame) => self.link_bytes += frame.len(),
            PendingItem::Control(ToTask::Route { .. }) if self.words >= HELD_WORDS_MAX => return,
            PendingItem::Control(ToTask::Route { .. }) => self.words += 1,
            PendingItem::Control(_) => {}
        }
        self.queue.push_back(held);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PendingItem> {
        self.queue.iter()
    }

    pub(super) fn drain(&mut self) -> VecDeque<PendingItem> {
        (self.link_bytes, self.words) = (0, 0);
        std::mem::take(&mut self.queue)
    }
}

/// State of a task's connection to this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The start of its process was requested; it has not connected.
    Expected,
    Connected(ConnId),
    /// It has quiesced or its process has exited for a restart; it will connect again.
    Detached,
    /// It has left the virtual machine; its process continues.
    Left,
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) tid: Tid,
    pub(super) parent: Tid,
    pub(super) name: String,
    pub(super) flags: i32,
    pub(super) pid: i32,
    pub(super) epid: Option<i32>,
    pub(super) pinned: bool,
    /// It was spawned under a debugger.
    pub(super) debugged: bool,
    /// Started by the daemon or the resource manager for its own purposes. It must stay on this
    /// host.
    pub(super) servant: bool,
    pub(super) output: Sink,
    pub(super) trace: Sink,
    /// The task that has started it, if it was not the daemon's own tasker.
    pub(super) by_tasker: Option<Tid>,
    /// Behavior of a task from a command line when this daemon ends.
    pub(super) at_end: OnDaemonExit,
    /// The resource manager to notify of its end.
    pub(super) rm: Option<Tid>,
    pub(super) phase: Phase,
    /// Items for it stay in its inbox, even if it is connected.
    pub(super) hold: bool,
    /// Its library has reported that it is quiesced.
    pub(super) quiesced: bool,
    /// Address at which its quiesced library looks for a redirect.
    pub(super) redirect_at: RedirectAddress,
    /// It was requested to quiesce for the owner of this host or for a suspension, and has not
    /// reconnected since.
    pub(super) still: Option<Still>,
    pub(super) suspended: Option<Suspended>,
    pub(super) inbox: Inbox,
    /// Watermark of its link to each peer: the number after the last fragment that it sent.
    pub(super) marks: BTreeMap<Tid, u64>,
    pub(super) requests: BTreeSet<RequestId>,
    /// Requests that wait for other tasks without a time limit. They can be repeated after a
    /// restart.
    pub(super) meetings: BTreeSet<RequestId>,
    /// The part of a checkpoint that waits until all other requests are answered.
    pub(super) settling: Option<MigrationId>,
    /// Ended tasks. Their ends must be known here before this task is dumped.
    pub(super) awaits: BTreeSet<Tid>,
    /// If set, only these requests may be unanswered when the task is dumped.
    pub(super) closing: Option<BTreeSet<RequestId>>,
    /// Information for its library after a restore from a checkpoint.
    pub(super) restart: Option<RestartInfo>,
    /// Information for the library of its next process about the previous one.
    pub(super) successor: Option<Box<ProcessHandoff>>,
    /// The log of its process, which is about to exit.
    pub(super) parting: Option<Box<Parting>>,
    /// How it was started, if it permits engines that restart the program.
    pub(super) begin: Option<Box<LaunchInfo>>,
    /// The checkpoint for which it could not be asked to exit, because it does not handle the
    /// signal.
    pub(super) unheeding: Option<MigrationId>,
    /// Its program was asked to exit, for a restart.
    pub(super) ending: Option<Ending>,
    /// Its process has exited for a restart.
    pub(super) away: Option<Away>,
    /// Its program was restarted and has not connected.
    pub(super) returning: bool,
    /// Resource usage of its earlier processes.
    pub(super) used_before: Usage,
    pub(super) watches: Vec<PendingNotify>,
    /// Exit status and usage of its process. The task ends when its socket is drained, or when the
    /// coordinator of its migration decides.
    pub(super) exited: Option<(i32, Usage)>,
    /// The migration that is transferring its images. If its process exits here, the coordinator
    /// decides whether the task has ended.
    pub(super) leaving: Option<MigrationId>,
    /// That migration is committed; the copy here is being killed.
    pub(super) killing: bool,
    /// Hosts that have nothing in flight to its old location any more, with the epoch of the new
    /// location.
    pub(super) passed: BTreeSet<(Epoch, HostId)>,
    /// Hosts that may have something in flight to its old location: those in the table when the new
    /// location became known.
    pub(super) awaiting: Vec<HostId>,
}

impl Task {
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
            at_end: OnDaemonExit::default(),
            rm: None,
            phase,
            hold: false,
            quiesced: false,
            redirect_at: RedirectAddress::default(),
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

    /// Creates a task from the record of another host. It is not connected yet.
    pub(super) fn from_record(record: TaskRecord) -> Task {
        Task {
            name: record.name,
            flags: record.flags,
            epid: record.spawn_token,
            output: record.output,
            trace: record.trace,
            rm: record.rm,
            marks: record
                .watermarks
                .iter()
                .map(|m| (m.peer, m.end_seq))
                .collect(),
            requests: record.requests.into_iter().collect(),
            meetings: record.untimed_requests.into_iter().collect(),
            restart: record.restart,
            begin: record.launch,
            successor: record.handoff,
            watches: record.notifications,
            redirect_at: record.redirect_address,
            ..Task::new(record.tid, record.parent, Phase::Detached)
        }
    }

    /// True if this daemon's tasker has started it.
    pub(super) fn spawned(&self) -> bool {
        self.flags & TASK_FORKED != 0
    }

    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.phase {
            Phase::Connected(conn) => Some(conn),
            _ => None,
        }
    }

    /// True if all its requests are answered, except those that may stay open in a checkpoint.
    pub(super) fn is_settled(&self) -> bool {
        self.awaits.is_empty()
            && self
                .requests
                .is_subset(self.closing.as_ref().unwrap_or(&self.meetings))
    }

    /// Returns the part of a checkpoint that has waited for [`Task::is_settled`], if that is true.
    pub(super) fn take_settled(&mut self) -> Option<MigrationId> {
        if self.is_settled() {
            self.settling.take()
        } else {
            None
        }
    }

    pub(super) fn answered(&mut self, id: RequestId) {
        self.requests.remove(&id);
        self.meetings.remove(&id);
    }

    /// Raises the watermarks of its links to at least these values.
    pub(super) fn mark(&mut self, marks: impl IntoIterator<Item = SendWatermark>) {
        for SendWatermark { peer, end_seq: end } in marks {
            let seen = self.marks.entry(peer).or_default();
            *seen = end.max(*seen);
        }
    }

    pub(super) fn link_marks(&self) -> Vec<SendWatermark> {
        self.marks
            .iter()
            .map(|(&peer, &end)| SendWatermark { peer, end_seq: end })
            .collect()
    }
}

#[derive(Debug, Default)]
pub(super) struct Tasks {
    pub(super) live: BTreeMap<Tid, Task>,
    /// Numbers by which started processes may claim their tids.
    pub(super) expected: BTreeMap<i32, Tid>,
    last_local: u32,
    spared: bool,
    /// Ended tasks with their watermarks, oldest first.
    dead: VecDeque<(Tid, Vec<SendWatermark>)>,
    /// Tasks of all hosts whose ends are known here.
    pub(super) ends: Ends,
}

impl Tasks {
    /// Reserves the task numbers up to `local`: they belong to tasks in checkpoints, or to
    /// restarted ones.
    pub(super) fn spare(&mut self, local: u32) {
        self.last_local = self.last_local.max(local);
        self.spared |= local > 0;
    }

    /// True if numbers are reserved for tasks in checkpoints.
    pub(super) fn are_spared(&self) -> bool {
        self.spared
    }

    /// Returns a tid that was never used, or `None` if there is none.
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

    /// Remembers the watermarks of an ended task.
    pub(super) fn bury(&mut self, tid: Tid, marks: Vec<SendWatermark>) {
        if self.dead.len() >= DEAD_MAX {
            self.dead.pop_front();
        }
        self.dead.push_back((tid, marks));
    }

    /// Returns the watermark of an ended task towards a peer.
    pub(super) fn dead_mark(&self, tid: Tid, peer: Tid) -> Option<SendWatermark> {
        let marks = &self.dead.iter().rev().find(|(dead, _)| *dead == tid)?.1;
        mark_of(tid, marks, peer)
    }
}

/// Returns the watermark up to which `watcher` must receive messages of `dead` before a
/// notification of its end.
pub(super) fn mark_of(dead: Tid, marks: &[SendWatermark], watcher: Tid) -> Option<SendWatermark> {
    marks
        .iter()
        .find(|m| m.peer == watcher)
        .map(|m| SendWatermark {
            peer: dead,
            end_seq: m.end_seq,
        })
}

impl Machine {
    /// Lists the tasks of this host, for `pvm_tasks`.
    pub(super) fn list_tasks(&self, only: Option<Tid>) -> Vec<TaskInfo> {
        let info = |task: &Task, moving: bool, stopped: bool, suspended: bool| TaskInfo {
            tid: task.tid,
            parent: task.parent,
            host: self.config.host,
            flags: task.flags,
            name: task.name.clone(),
            pid: task.pid,
            uid: self.config.uid,
            migrating: moving,
            paused: stopped && self.hosting.is_stopped(),
            suspended,
        };
        let wanted = |tid: Tid| only.is_none_or(|only| only == tid);
        let here = self.tasks.live.values().filter(|t| wanted(t.tid)).map(|t| {
            let source = self
                .moves
                .sources
                .values()
                .find(|s| s.migration().tid == t.tid);
            let moving = source.is_some_and(Source::is_departing)
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

    /// Returns everything that the next daemon must know of a task.
    pub(super) fn record_of(&self, task: &Task) -> TaskRecord {
        TaskRecord {
            tid: task.tid,
            parent: task.parent,
            name: task.name.clone(),
            flags: task.flags,
            spawn_token: task.epid,
            output: task.output,
            trace: task.trace,
            rm: task.rm,
            watermarks: task.link_marks(),
            requests: task.requests.iter().copied().collect(),
            untimed_requests: task.meetings.iter().copied().collect(),
            restart: task.restart.clone(),
            launch: task.begin.clone(),
            handoff: task.successor.clone(),
            notifications: task.watches.clone(),
            redirect_address: task.redirect_at,
            known_hosts: self.table.hosts.iter().map(|h| h.id).collect(),
            hosts_epoch: self.table.epoch,
        }
    }

    /// Handles a task's request to leave the virtual machine (`pvm_exit`).
    pub(super) fn leave(&mut self, tid: Tid, id: RequestId, marks: Vec<SendWatermark>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.mark(marks);
        match task.ending {
            // It was asked to exit for a restart, and leaves before it does.
            Some(ending) if ending.is_agreed() && task.is_ending() => {
                return self.reply(tid, id, sempa_proto::task::Reply::Done);
            }
            // It has finished its work and is not restarted.
            _ => {}
        }
        self.asked_no_more(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.parting = None;
        let own: Vec<PendingNotify> = task
            .watches
            .extract_if(.., |w| w.kind == NotifySubject::TaskExit(tid))
            .collect();
        for watch in own {
            self.send_exit_note(tid, tid, &watch, None);
        }
        self.reply(tid, id, sempa_proto::task::Reply::Done);
        self.detach(tid);
    }

    /// Ends a task's connection: it has left, or its socket has closed. A task from a command line
    /// ends by that, a spawned one when its process exits.
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
            self.tell_host(host, HostMsg::TaskLeft { tid });
        }
        self.task_left(tid);
    }

    /// Handles the exit of a spawned task's process. Its last output to the socket may not have
    /// been read yet.
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

    /// The socket of an exited process is still open: another process holds it, or this daemon has
    /// not read everything yet. No written message may be lost, so the shell reads the rest and
    /// then closes the socket.
    pub(super) fn drain_over(&mut self, tid: Tid, epid: Option<i32>) {
        // The task has another process by now.
        let Some(task) = self.tasks.get(tid).filter(|task| task.epid == epid) else {
            return;
        };
        match (task.exited, task.conn()) {
            (Some(_), Some(conn)) => self.out.push_back(Output::HearOut { conn }),
            (Some((status, used)), None) => self.end_task(tid, status, used),
            (None, _) => {}
        }
    }

    /// Ends a task and notifies all concerned, after everything that the task has sent.
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
                let carried = DataMsg::Ended {
                    dst: tid,
                    watermarks: marks.clone(),
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

    /// Handles the end of a task of any host.
    pub(super) fn task_ended_somewhere(&mut self, tid: Tid, marks: &[SendWatermark]) {
        self.end_is_known(tid);
        self.notify_task_exit(tid, marks);
        self.contexts.retain(|_, owner| *owner != tid);
        self.task_left(tid);
    }

    /// Removes a task from all functions: its entries on the master, and the services that it
    /// provides for daemons.
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

    /// Notifies the senders of undeliverable frames and messages, so that they need not retain
    /// anything for this task.
    pub(super) fn return_to_senders(&mut self, tid: Tid, held: VecDeque<PendingItem>) {
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
