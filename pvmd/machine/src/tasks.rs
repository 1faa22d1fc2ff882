//! The task table of this host: the state of each task, allocation of tids, and the end of tasks.
//!
//! A task ends in two ways. It may leave the virtual machine (`pvm_exit`, or its socket closes)
//! while its process continues; a spawned task then stays in the table until its process exits.
//! When the process exits, the daemon first reads the data that the process has written to its
//! socket, then ends the task and notifies all hosts. The notification follows everything that the
//! task has sent.

use super::checkpoints::KnownExits;
use super::guests::Pause;
use super::handoff_log::HandoffLog;
use super::restart_engine::{GracefulExit, Respawning};
use super::ring_peers::sender_of;
use super::suspension::TaskSuspension;
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
pub(super) const INBOX_FRAME_BYTES_MAX: usize = RETAINED_BYTES_MAX;
/// Largest number of route messages that are kept for one task. Further ones are dropped, as if the
/// task had migrated in between.
pub(super) const INBOX_ROUTE_MESSAGES_MAX: usize = 4096;
/// Largest number of ended tasks whose watermarks are remembered.
pub(super) const EXITED_WATERMARKS_MAX: usize = 4096;
/// Time that the socket of an exited process may stay open, for example in a child of it, before
/// the daemon drains and closes it.
const SOCKET_DRAIN_TIMEOUT: Micros = Micros::from_secs(2);

/// Frames and items that wait for a task, in order.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) queue: VecDeque<PendingItem>,
    frame_bytes: usize,
    route_messages: usize,
}

impl Inbox {
    /// Adds a frame or an item. A link frame or route message above the limit is dropped.
    pub(super) fn push(&mut self, held: PendingItem) {
        match &held {
            PendingItem::Frame(frame) if self.frame_bytes + frame.len() > INBOX_FRAME_BYTES_MAX => {
                return;
            }
            PendingItem::Frame(frame) => self.frame_bytes += frame.len(),
            PendingItem::Control(ToTask::Route { .. })
                if self.route_messages >= INBOX_ROUTE_MESSAGES_MAX =>
            {
                return;
            }
            PendingItem::Control(ToTask::Route { .. }) => self.route_messages += 1,
            PendingItem::Control(_) => {}
        }
        self.queue.push_back(held);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PendingItem> {
        self.queue.iter()
    }

    pub(super) fn drain(&mut self) -> VecDeque<PendingItem> {
        (self.frame_bytes, self.route_messages) = (0, 0);
        std::mem::take(&mut self.queue)
    }
}

/// State of a task's connection to this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionPhase {
    /// The start of the task's process was requested; the process has not connected.
    Expected,
    Connected(ConnId),
    /// The task has quiesced, or its process has exited for a restart. It will connect again.
    Detached,
    /// The task has left the virtual machine; its process continues.
    Left,
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) tid: Tid,
    pub(super) parent: Tid,
    pub(super) name: String,
    pub(super) flags: i32,
    pub(super) pid: i32,
    pub(super) spawn_token: Option<i32>,
    pub(super) pinned: bool,
    /// True if the task was spawned under a debugger.
    pub(super) debugged: bool,
    /// True if the daemon or the resource manager started the task for its own purposes. The task
    /// must stay on this host.
    pub(super) is_service: bool,
    pub(super) output: Sink,
    pub(super) trace: Sink,
    /// The task that has started this task as its tasker; `None` if the daemon's own tasker has.
    pub(super) tasker: Option<Tid>,
    /// Behavior of a task from a command line when this daemon ends.
    pub(super) on_daemon_exit: OnDaemonExit,
    /// The resource manager to notify of the task's end.
    pub(super) rm: Option<Tid>,
    pub(super) phase: ConnectionPhase,
    /// True if items for the task stay in its inbox, even if the task is connected.
    pub(super) holds_items: bool,
    /// True if the task's library has reported that it is quiesced.
    pub(super) quiesced: bool,
    /// Address at which the task's quiesced library looks for a redirect.
    pub(super) redirect_address: RedirectAddress,
    /// Set if the task was requested to quiesce for the owner of this host or for a suspension, and
    /// has not reconnected since.
    pub(super) pause: Option<Pause>,
    pub(super) suspension: Option<TaskSuspension>,
    pub(super) inbox: Inbox,
    /// Watermark of the task's link to each peer: the number after the last fragment that the task
    /// sent.
    pub(super) watermarks: BTreeMap<Tid, u64>,
    pub(super) requests: BTreeSet<RequestId>,
    /// Requests that wait for other tasks without a time limit. They can be repeated after a
    /// restart.
    pub(super) untimed_requests: BTreeSet<RequestId>,
    /// The part of a checkpoint that waits until all other requests of the task are answered.
    pub(super) settling_part: Option<MigrationId>,
    /// Ended tasks whose ends must be known on this host before this task is dumped.
    pub(super) awaited_exits: BTreeSet<Tid>,
    /// If set, only these requests may be unanswered when the task is dumped.
    pub(super) permitted_open_requests: Option<BTreeSet<RequestId>>,
    /// Information for the task's library after a restore from a checkpoint.
    pub(super) restart: Option<RestartInfo>,
    /// Information for the library of the task's next process about the previous process.
    pub(super) handoff: Option<Box<ProcessHandoff>>,
    /// The handoff log of the task's process, which is about to exit.
    pub(super) handoff_log: Option<Box<HandoffLog>>,
    /// Launch information, if the task permits engines that restart its program.
    pub(super) launch: Option<Box<LaunchInfo>>,
    /// The checkpoint for which the task could not be asked to exit, because its program does not
    /// handle the signal.
    pub(super) ignores_checkpoint_signal: Option<MigrationId>,
    /// Set if the task's program was asked to exit, for a restart.
    pub(super) graceful_exit: Option<GracefulExit>,
    /// Set if the task's process has exited for a restart.
    pub(super) respawning: Option<Respawning>,
    /// True if the task's program was restarted and has not connected.
    pub(super) awaits_restarted_process: bool,
    /// Resource usage of the task's earlier processes.
    pub(super) earlier_usage: Usage,
    pub(super) notifications: Vec<PendingNotify>,
    /// Exit status and usage of the task's process, if it has exited. The task ends when its socket
    /// is drained, or when the coordinator of its migration decides.
    pub(super) exit_report: Option<(i32, Usage)>,
    /// The migration that is transferring the task's images. If the process exits on this host, the
    /// coordinator decides whether the task has ended.
    pub(super) transferring_migration: Option<MigrationId>,
    /// True if the migration that transfers the images is committed: the process on this host is
    /// being killed.
    pub(super) is_being_killed: bool,
    /// Hosts that have nothing in flight to the task's old location any more, each with the epoch
    /// of the new location.
    pub(super) drained_hosts: BTreeSet<(Epoch, HostId)>,
    /// Hosts that may have something in flight to the task's old location: those in the table when
    /// the new location became known.
    pub(super) undrained_hosts: Vec<HostId>,
}

impl Task {
    pub(super) fn new(tid: Tid, parent: Tid, phase: ConnectionPhase) -> Task {
        Task {
            tid,
            parent,
            name: String::new(),
            flags: 0,
            pid: 0,
            spawn_token: None,
            pinned: false,
            debugged: false,
            is_service: false,
            output: Sink::default(),
            trace: Sink::default(),
            tasker: None,
            on_daemon_exit: OnDaemonExit::default(),
            rm: None,
            phase,
            holds_items: false,
            quiesced: false,
            redirect_address: RedirectAddress::default(),
            pause: None,
            suspension: None,
            inbox: Inbox::default(),
            watermarks: BTreeMap::new(),
            requests: BTreeSet::new(),
            untimed_requests: BTreeSet::new(),
            settling_part: None,
            awaited_exits: BTreeSet::new(),
            permitted_open_requests: None,
            restart: None,
            handoff: None,
            handoff_log: None,
            launch: None,
            ignores_checkpoint_signal: None,
            graceful_exit: None,
            respawning: None,
            awaits_restarted_process: false,
            earlier_usage: Usage::default(),
            notifications: Vec::new(),
            exit_report: None,
            transferring_migration: None,
            is_being_killed: false,
            drained_hosts: BTreeSet::new(),
            undrained_hosts: Vec::new(),
        }
    }

    /// Creates a task from the record of another host. It is not connected yet.
    pub(super) fn from_record(record: TaskRecord) -> Task {
        Task {
            name: record.name,
            flags: record.flags,
            spawn_token: record.spawn_token,
            output: record.output,
            trace: record.trace,
            rm: record.exit_rm,
            watermarks: record
                .watermarks
                .iter()
                .map(|m| (m.peer, m.end_seq))
                .collect(),
            requests: record.requests.into_iter().collect(),
            untimed_requests: record.untimed_requests.into_iter().collect(),
            restart: record.restart,
            launch: record.launch,
            handoff: record.handoff,
            notifications: record.notifications,
            redirect_address: record.redirect_address,
            ..Task::new(record.tid, record.parent, ConnectionPhase::Detached)
        }
    }

    /// True if this daemon's tasker has started the task.
    pub(super) fn is_spawned(&self) -> bool {
        self.flags & TASK_FORKED != 0
    }

    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.phase {
            ConnectionPhase::Connected(conn) => Some(conn),
            _ => None,
        }
    }

    /// True if all requests of the task are answered, except those that may stay open in a
    /// checkpoint.
    pub(super) fn has_settled(&self) -> bool {
        self.awaited_exits.is_empty()
            && self.requests.is_subset(
                self.permitted_open_requests
                    .as_ref()
                    .unwrap_or(&self.untimed_requests),
            )
    }

    /// Removes and returns the part of a checkpoint that has waited for [`Task::has_settled`], if
    /// that is true.
    pub(super) fn take_settled_part(&mut self) -> Option<MigrationId> {
        if self.has_settled() {
            self.settling_part.take()
        } else {
            None
        }
    }

    pub(super) fn remove_request(&mut self, id: RequestId) {
        self.requests.remove(&id);
        self.untimed_requests.remove(&id);
    }

    /// Raises the watermarks of the task's links to at least these values.
    pub(super) fn raise_watermarks(&mut self, marks: impl IntoIterator<Item = SendWatermark>) {
        for SendWatermark { peer, end_seq: end } in marks {
            let seen = self.watermarks.entry(peer).or_default();
            *seen = end.max(*seen);
        }
    }

    pub(super) fn link_watermarks(&self) -> Vec<SendWatermark> {
        self.watermarks
            .iter()
            .map(|(&peer, &end)| SendWatermark { peer, end_seq: end })
            .collect()
    }
}

#[derive(Debug, Default)]
pub(super) struct Tasks {
    pub(super) live: BTreeMap<Tid, Task>,
    /// Tids that are reserved for started processes, by the spawn token with which the process
    /// claims its tid.
    pub(super) by_spawn_token: BTreeMap<i32, Tid>,
    last_task_number: u32,
    has_reserved_ids: bool,
    /// Ended tasks with their watermarks, oldest first.
    exited_watermarks: VecDeque<(Tid, Vec<SendWatermark>)>,
    /// Tasks of all hosts whose ends are known on this host.
    pub(super) known_exits: KnownExits,
}

impl Tasks {
    /// Reserves the task numbers up to `local`: they belong to tasks in checkpoints, or to
    /// restarted tasks.
    pub(super) fn reserve_ids_up_to(&mut self, local: u32) {
        self.last_task_number = self.last_task_number.max(local);
        self.has_reserved_ids |= local > 0;
    }

    /// True if numbers are reserved for tasks in checkpoints.
    pub(super) fn has_reserved_ids(&self) -> bool {
        self.has_reserved_ids
    }

    /// Returns a tid that was never used, or `None` if there is none.
    pub(super) fn allocate(&mut self, host: HostId) -> Option<Tid> {
        if self.live.len() >= TASKS_MAX {
            return None;
        }
        let tid = Tid::task(host, self.last_task_number + 1)?;
        self.last_task_number += 1;
        Some(tid)
    }

    pub(super) fn get(&self, tid: Tid) -> Option<&Task> {
        self.live.get(&tid)
    }

    pub(super) fn get_mut(&mut self, tid: Tid) -> Option<&mut Task> {
        self.live.get_mut(&tid)
    }

    pub(super) fn insert(&mut self, task: Task) {
        if let (Some(spawn_token), ConnectionPhase::Expected) = (task.spawn_token, task.phase) {
            self.by_spawn_token.insert(spawn_token, task.tid);
        }
        self.live.insert(task.tid, task);
    }

    /// Remembers the watermarks of an ended task.
    pub(super) fn record_exit(&mut self, tid: Tid, marks: Vec<SendWatermark>) {
        if self.exited_watermarks.len() >= EXITED_WATERMARKS_MAX {
            self.exited_watermarks.pop_front();
        }
        self.exited_watermarks.push_back((tid, marks));
    }

    /// Returns the watermark of an ended task's link to a peer.
    pub(super) fn exited_watermark(&self, tid: Tid, peer: Tid) -> Option<SendWatermark> {
        let marks = &self
            .exited_watermarks
            .iter()
            .rev()
            .find(|(dead, _)| *dead == tid)?
            .1;
        watermark_for(tid, marks, peer)
    }
}

/// Returns the watermark up to which `watcher` must receive messages of `exited` before a
/// notification of its end.
pub(super) fn watermark_for(
    exited: Tid,
    marks: &[SendWatermark],
    watcher: Tid,
) -> Option<SendWatermark> {
    marks
        .iter()
        .find(|m| m.peer == watcher)
        .map(|m| SendWatermark {
            peer: exited,
            end_seq: m.end_seq,
        })
}

impl Machine {
    /// Lists the tasks of this host, for `pvm_tasks`.
    pub(super) fn list_tasks(&self, selected: Option<Tid>) -> Vec<TaskInfo> {
        let info = |task: &Task, migrating: bool, stopped: bool, suspended: bool| TaskInfo {
            tid: task.tid,
            parent: task.parent,
            host: self.config.host,
            flags: task.flags,
            name: task.name.clone(),
            pid: task.pid,
            uid: self.config.uid,
            migrating,
            paused: stopped && self.owner_control.pauses_guests(),
            suspended,
        };
        let wanted = |tid: Tid| selected.is_none_or(|selected| selected == tid);
        let here = self.tasks.live.values().filter(|t| wanted(t.tid)).map(|t| {
            let source = self
                .migrations
                .sources
                .values()
                .find(|s| s.migration().tid == t.tid);
            let migrating = source.is_some_and(Source::is_departing)
                || (t.holds_items && (t.pause.is_none() || source.is_some()));
            info(t, migrating, t.pause.is_some(), t.suspension.is_some())
        });
        let arriving = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.is_located && wanted(a.tid));
        let arriving = arriving.filter_map(|a| {
            Some(info(
                &Task::from_record(a.record.clone()?),
                true,
                a.pause_ordered,
                a.suspension.is_some(),
            ))
        });
        here.chain(arriving).collect()
    }

    /// Returns the state of a task that another daemon needs to continue it.
    pub(super) fn task_record(&self, task: &Task) -> TaskRecord {
        TaskRecord {
            tid: task.tid,
            parent: task.parent,
            name: task.name.clone(),
            flags: task.flags,
            spawn_token: task.spawn_token,
            output: task.output,
            trace: task.trace,
            exit_rm: task.rm,
            watermarks: task.link_watermarks(),
            requests: task.requests.iter().copied().collect(),
            untimed_requests: task.untimed_requests.iter().copied().collect(),
            restart: task.restart.clone(),
            launch: task.launch.clone(),
            handoff: task.handoff.clone(),
            notifications: task.notifications.clone(),
            redirect_address: task.redirect_address,
            known_hosts: self.table.hosts.iter().map(|h| h.id).collect(),
            hosts_epoch: self.table.epoch,
        }
    }

    /// Handles a task's request to leave the virtual machine (`pvm_exit`).
    pub(super) fn leave_vm(&mut self, tid: Tid, id: RequestId, marks: Vec<SendWatermark>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.raise_watermarks(marks);
        match task.graceful_exit {
            // The program was asked to exit for a restart, and leaves the virtual machine before it
            // exits.
            Some(ending) if ending.is_self_checkpoint() && task.is_exiting() => {
                return self.reply(tid, id, sempa_proto::task::Reply::Done);
            }
            // The program has finished its work and is not restarted.
            _ => {}
        }
        self.withdraw_exit_request(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.handoff_log = None;
        let own: Vec<PendingNotify> = task
            .notifications
            .extract_if(.., |w| w.subject == NotifySubject::TaskExit(tid))
            .collect();
        for watch in own {
            self.send_exit_notification(tid, tid, &watch, None);
        }
        self.reply(tid, id, sempa_proto::task::Reply::Done);
        self.detach(tid);
    }

    /// Ends a task's connection, because the task has left or its socket has closed. A task from a
    /// command line ends with its connection, a spawned task when its process exits.
    pub(super) fn detach(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if let Some((status, used)) = task.exit_report {
            return self.end_task(tid, status, used);
        }
        if !task.is_spawned() {
            return self.end_task(tid, 0, Usage::default());
        }
        if task.phase == ConnectionPhase::Left {
            return;
        }
        if let ConnectionPhase::Connected(conn) = task.phase {
            self.conns.retire(conn);
        }
        task.phase = ConnectionPhase::Left;
        task.flags &= !(TASK_CONNECTED | TASK_RM);
        task.notifications.clear();
        let held = task.inbox.drain();
        self.notify_senders_of_end(tid, held);
        self.end_peer_routes(tid);
        self.notify_sources_ended(tid);
        for host in self.other_hosts() {
            self.send_to_host(host, HostMsg::TaskLeft { tid });
        }
        self.remove_from_services(tid);
    }

    /// Handles the exit of a spawned task's process. Its last output to the socket may not have
    /// been read yet.
    pub(super) fn handle_process_exit(&mut self, tid: Tid, status: i32, used: Usage) {
        if let Some(arrival) = self.migrations.arrivals.get_mut(&tid).filter(|a| a.has_run) {
            arrival.exit_report = Some((status, used));
            return self.advance_arrival(tid);
        }
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let used = used.plus(task.earlier_usage);
        task.exit_report = Some((status, used));
        let spawn_token = task.spawn_token;
        if task.conn().is_some() && self.shutdown.is_none() {
            self.set_timer(
                SOCKET_DRAIN_TIMEOUT,
                super::Timer::SocketDrain(tid, spawn_token),
            );
        } else {
            self.end_task(tid, status, used);
        }
    }

    /// Drains the socket of an exited process that is still open, because another process holds it
    /// or this daemon has not read everything yet. No written message may be lost, so the shell
    /// reads the rest and then closes the socket.
    pub(super) fn handle_socket_drain_timeout(&mut self, tid: Tid, spawn_token: Option<i32>) {
        // The task has another process by now.
        let Some(task) = self
            .tasks
            .get(tid)
            .filter(|task| task.spawn_token == spawn_token)
        else {
            return;
        };
        match (task.exit_report, task.conn()) {
            (Some(_), Some(conn)) => self.outputs.push_back(Output::DrainConnection { conn }),
            (Some((status, used)), None) => self.end_task(tid, status, used),
            (None, _) => {}
        }
    }

    /// Ends a task and notifies other tasks and hosts, after everything that the task has sent.
    pub(super) fn end_task(&mut self, tid: Tid, status: i32, used: Usage) {
        if self.handle_exit_for_restart(tid, status, used) || self.defer_exit(tid, status, used) {
            return;
        }
        let Some(mut task) = self.tasks.live.remove(&tid) else {
            return;
        };
        self.tasks
            .by_spawn_token
            .retain(|_, expected| *expected != tid);
        if let Some(conn) = task.conn() {
            self.conns.retire(conn);
            self.outputs.push_back(Output::CloseTask { conn });
        }
        self.notify_sources_ended(tid);
        self.forget_guest(&task);
        if task.is_spawned() || task.tasker.is_some() {
            self.report_output_ended(tid, task.output);
        }
        let marks = task.link_watermarks();
        self.report_exit_to_rm(&task, &marks, status, used);
        self.trace_task_end(&task, status, used);
        let held = task.inbox.drain();
        self.notify_senders_of_end(tid, held);
        self.end_peer_routes(tid);
        self.tasks.record_exit(tid, marks.clone());
        if self.shutdown.is_none() {
            for host in self.other_hosts() {
                let message = DataMsg::Ended {
                    tid,
                    watermarks: marks.clone(),
                };
                self.outputs.push_back(Output::SendData { host, message });
            }
        }
        self.record(EventKind::TaskEnded { tid, status, used });
        self.handle_task_end(tid, &marks);
        self.handle_rm_command_end(&task, status);
        self.handle_watcher_end(&task, status);
        self.advance_stop();
    }

    /// Handles the end of a task of any host.
    pub(super) fn handle_task_end(&mut self, tid: Tid, marks: &[SendWatermark]) {
        self.handle_exit_notice(tid);
        self.notify_watchers_of_exit(tid, marks);
        self.contexts.retain(|_, owner| *owner != tid);
        self.remove_from_services(tid);
    }

    /// Removes an ended task from the state of the master, and from the services that it provides
    /// for daemons.
    pub(super) fn remove_from_services(&mut self, tid: Tid) {
        self.handle_rm_exit(tid);
        self.handle_owner_agent_end(tid);
        self.service_task_ended(tid);
        if let Some(master) = &mut self.master {
            master.events.unsubscribe(tid);
            master.mailbox.remove_owner(tid);
        }
        self.remove_ended_member(tid);
    }

    /// Notifies the senders of undeliverable frames and messages, so that they need not retain
    /// anything for this task.
    pub(super) fn notify_senders_of_end(&mut self, tid: Tid, held: VecDeque<PendingItem>) {
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
