//! The task table of this host: the state of each task, allocation of tids, and the end of tasks.
//!
//! A task may leave the virtual machine (`pvm_exit`, or its socket closes) while its process
//! continues. A spawned task then stays in the table until its process exits. When the process
//! exits, the daemon first reads the data that the process has written to its socket. Then the
//! daemon ends the task and notifies all hosts. The notification follows everything that the task
//! has sent.

use super::checkpoints::KnownExits;
use super::guests::Pause;
use super::handoff_log::HandoffLog;
use super::restart_engine::{GracefulExit, RespawnState};
use super::ring_peers::sender_of;
use super::suspension::TaskSuspension;
use super::{ConnId, Machine, Output};
use checkpoint_protocol::Source;
use sempa_proto::causal::{Past, STAMP_BYTES, STAMP_MAX};
use sempa_proto::engine::LaunchInfo;
use sempa_proto::event::EventKind;
use sempa_proto::host::{
    DataMsg, HostMsg, NotifySubject, PendingItem, PendingNotification, TaskRecord,
};
use sempa_proto::library_fault::LoadFailure;
use sempa_proto::link::{LinkFrame, RETAINED_BYTES_MAX};
use sempa_proto::migration::Usage;
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TASK_HIDDEN, TASK_RM, TaskInfo};
use sempa_proto::task::{
    OnDaemonExit, ProcessHandoff, RedirectAddress, RestartInfo, SendWatermark, Sink, ToTask,
};
use sempa_proto::{Epoch, HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Largest number of running tasks on one host.
pub(super) const TASKS_MAX: usize = 65_536;
/// Largest total size in bytes of the link frames in the inbox of one task; further frames are
/// dropped. Running peers limit themselves by the windows of their links. Frames beyond the limit
/// can only be the last messages of ended tasks, which are then lost.
pub(super) const INBOX_FRAME_BYTES_MAX: usize = RETAINED_BYTES_MAX;
/// Largest number of route messages in the inbox of one task. Further messages are dropped, as if
/// the task had migrated in between.
pub(super) const INBOX_ROUTE_MESSAGES_MAX: usize = 4096;
/// Largest number of ended tasks whose positions are remembered.
pub(super) const EXIT_POSITIONS_MAX: usize = 4096;
/// Time that the socket of an exited process may stay open, for example in a child process, before
/// the daemon drains and closes the socket.
const SOCKET_DRAIN_TIMEOUT: Micros = Micros::from_secs(2);

/// Frames and items that wait for a task, in order.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) items: VecDeque<PendingItem>,
    frame_bytes: usize,
    route_message_count: usize,
}

impl Inbox {
    /// Adds a frame or an item. A link frame or a route message above its limit is dropped.
    pub(super) fn push(&mut self, item: PendingItem) {
        match &item {
            PendingItem::Frame(frame) if self.frame_bytes + frame.len() > INBOX_FRAME_BYTES_MAX => {
                return;
            }
            PendingItem::Frame(frame) => self.frame_bytes += frame.len(),
            PendingItem::Control(ToTask::Route { .. })
                if self.route_message_count >= INBOX_ROUTE_MESSAGES_MAX =>
            {
                return;
            }
            PendingItem::Control(ToTask::Route { .. }) => self.route_message_count += 1,
            PendingItem::Control(_) => {}
        }
        self.items.push_back(item);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PendingItem> {
        self.items.iter()
    }

    pub(super) fn drain(&mut self) -> VecDeque<PendingItem> {
        (self.frame_bytes, self.route_message_count) = (0, 0);
        std::mem::take(&mut self.items)
    }
}

/// State of a task's connection to this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionPhase {
    /// The start of the task's process was requested; the process has not connected yet.
    Expected,
    Connected(ConnId),
    /// The task has quiesced, or its process has exited for a restart. A process of the task will
    /// connect again.
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
    /// Process id on this host; 0 if not known.
    pub(super) pid: i32,
    /// Process id that `getpid()` returns in the task; 0 if not known.
    pub(super) namespace_pid: i32,
    pub(super) spawn_token: Option<i32>,
    pub(super) pinned: bool,
    /// True if the task was spawned under a debugger.
    pub(super) debugged: bool,
    /// True if the daemon or the resource manager started the task to serve the virtual machine.
    /// The task must stay on this host.
    pub(super) is_service: bool,
    /// True for the load watcher that this daemon has started by itself. PVM does not have such a
    /// task, so it has a tid that no spawn gets, and leaves no events and no trace.
    pub(super) is_own_watcher: bool,
    pub(super) output_sink: Sink,
    pub(super) trace_sink: Sink,
    /// The task that has started this task as its tasker; `None` if the daemon's own tasker or a
    /// user has started it.
    pub(super) tasker: Option<Tid>,
    /// Behavior of a task from a command line when this daemon ends.
    pub(super) on_daemon_exit: OnDaemonExit,
    /// The resource manager to which the task's end is reported.
    pub(super) exit_rm: Option<Tid>,
    pub(super) connection_phase: ConnectionPhase,
    /// True if items for the task stay in its inbox, even if the task is connected.
    pub(super) holds_items: bool,
    /// True if the task's library has reported that it is quiesced.
    pub(super) has_quiesced: bool,
    /// Address in the task's memory at which its quiesced library reads a redirect.
    pub(super) redirect_address: RedirectAddress,
    /// State of a pause; `None` if the task was not requested to quiesce for the owner of this host
    /// or for a suspension, or has reconnected since.
    pub(super) pause: Option<Pause>,
    pub(super) suspension: Option<TaskSuspension>,
    pub(super) inbox: Inbox,
    /// Watermark of the task's link to each peer: the number after the last fragment that the task
    /// sent.
    pub(super) watermarks: BTreeMap<Tid, u64>,
    /// Position up to which each peer has acknowledged, as far as this daemon has carried
    /// acknowledgements.
    pub(super) acked_positions: BTreeMap<Tid, u64>,
    /// Peers to which this daemon has carried a part of a message.
    pub(super) partial_receivers: BTreeSet<Tid>,
    /// Incarnation of the task's links.
    pub(super) link_incarnation: u16,
    /// Clock of the task, and the messages in its past that are in transit, as the task has told
    /// last.
    pub(super) past: Past,
    /// The past of the task's spawn.
    pub(super) initial_past: Past,
    pub(super) open_requests: BTreeSet<RequestId>,
    /// Requests that wait for other tasks without a time limit. They can be repeated after a
    /// restart.
    pub(super) untimed_requests: BTreeSet<RequestId>,
    /// The part of a checkpoint that waits until the requests of the task are answered.
    pub(super) settling_part: Option<MigrationId>,
    /// Ended tasks whose exit notices must arrive on this host before this task is dumped.
    pub(super) awaited_exits: BTreeSet<Tid>,
    /// The only requests that may be unanswered when the task is dumped; `None` if the other tasks
    /// of the job are not stopped yet.
    pub(super) permitted_open_requests: Option<BTreeSet<RequestId>>,
    /// Information for the task's library after a restore from a checkpoint.
    pub(super) restart_info: Option<RestartInfo>,
    /// Information for the library of the task's next process about the previous process.
    pub(super) handoff: Option<Box<ProcessHandoff>>,
    /// The handoff log of the task's process, which is about to exit.
    pub(super) handoff_log: Option<Box<HandoffLog>>,
    /// Launch information; `None` if the task permits only CRIU.
    pub(super) launch_info: Option<Box<LaunchInfo>>,
    /// The checkpoint for which the task could not be asked to exit, because its program does not
    /// handle the signal.
    pub(super) ignores_checkpoint_signal: Option<MigrationId>,
    /// State of a requested exit of the task's program; `None` if no exit was requested for a
    /// restart.
    pub(super) graceful_exit: Option<GracefulExit>,
    /// State of the restart of the task's program; `None` if no process of the task has exited for
    /// a restart.
    pub(super) respawn_state: Option<RespawnState>,
    /// True if the task's program was started again and has not connected yet.
    pub(super) awaits_restarted_process: bool,
    /// Resource usage of the task's earlier processes.
    pub(super) earlier_usage: Usage,
    pub(super) notifications: Vec<PendingNotification>,
    /// Wait status and usage of the task's process; `None` while the process runs. The task ends
    /// when its socket is drained, or when the coordinator of its migration decides that the task
    /// has ended.
    pub(super) exit_report: Option<(i32, Usage)>,
    /// The migration that is transferring the task's images. If the process exits on this host, the
    /// coordinator decides whether the task has ended.
    pub(super) transferring_migration: Option<MigrationId>,
    /// True if the migration that transfers the images is committed, and the process on this host
    /// is being killed.
    pub(super) is_being_killed: bool,
    /// Hosts that send no more items to the task's old location, each with the epoch of the new
    /// location.
    pub(super) drained_hosts: BTreeSet<(Epoch, HostId)>,
    /// Hosts that may still send items to the task's old location: those that were in the host
    /// table when the new location became known.
    pub(super) undrained_hosts: Vec<HostId>,
    /// True if a process of the task was reported to use the library of another PVM.
    pub(super) has_foreign_library: bool,
    /// The dynamic loader's last message in the output of the task, if the task has not connected
    /// yet.
    pub(super) load_failure: Option<LoadFailure>,
}

impl Task {
    pub(super) fn new(tid: Tid, parent: Tid, phase: ConnectionPhase) -> Self {
        Self {
            tid,
            parent,
            name: String::new(),
            flags: 0,
            pid: 0,
            namespace_pid: 0,
            spawn_token: None,
            pinned: false,
            debugged: false,
            is_service: false,
            is_own_watcher: false,
            output_sink: Sink::default(),
            trace_sink: Sink::default(),
            tasker: None,
            on_daemon_exit: OnDaemonExit::default(),
            exit_rm: None,
            connection_phase: phase,
            holds_items: false,
            has_quiesced: false,
            redirect_address: RedirectAddress::default(),
            pause: None,
            suspension: None,
            inbox: Inbox::default(),
            watermarks: BTreeMap::new(),
            acked_positions: BTreeMap::new(),
            partial_receivers: BTreeSet::new(),
            link_incarnation: 0,
            past: Default::default(),
            initial_past: Default::default(),
            open_requests: BTreeSet::new(),
            untimed_requests: BTreeSet::new(),
            settling_part: None,
            awaited_exits: BTreeSet::new(),
            permitted_open_requests: None,
            restart_info: None,
            handoff: None,
            handoff_log: None,
            launch_info: None,
            ignores_checkpoint_signal: None,
            graceful_exit: None,
            respawn_state: None,
            awaits_restarted_process: false,
            earlier_usage: Usage::default(),
            notifications: Vec::new(),
            exit_report: None,
            transferring_migration: None,
            is_being_killed: false,
            drained_hosts: BTreeSet::new(),
            undrained_hosts: Vec::new(),
            has_foreign_library: false,
            load_failure: None,
        }
    }

    /// Creates a task from the record of another host. The task has no connection yet.
    pub(super) fn from_record(record: TaskRecord) -> Self {
        Self {
            name: record.name,
            flags: record.flags,
            spawn_token: record.spawn_token,
            output_sink: record.output_sink,
            trace_sink: record.trace_sink,
            exit_rm: record.exit_rm,
            watermarks: record
                .watermarks
                .iter()
                .map(|m| (m.peer, m.end_seq))
                .collect(),
            open_requests: record.open_requests.into_iter().collect(),
            untimed_requests: record.untimed_requests.into_iter().collect(),
            restart_info: record.restart_info,
            launch_info: record.launch,
            handoff: record.handoff,
            notifications: record.notifications,
            redirect_address: record.redirect_address,
            namespace_pid: record.namespace_pid,
            ..Self::new(record.tid, record.parent, ConnectionPhase::Detached)
        }
    }

    /// True if this daemon's tasker has started the task.
    pub(super) fn is_spawned(&self) -> bool {
        self.flags & TASK_FORKED != 0
    }

    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.connection_phase {
            ConnectionPhase::Connected(conn) => Some(conn),
            _ => None,
        }
    }

    /// True if the task can be dumped: the exits it waits for are known, and all its requests are
    /// answered, except those that may stay open in a checkpoint.
    pub(super) fn has_settled(&self) -> bool {
        self.awaited_exits.is_empty()
            && self.open_requests.is_subset(
                self.permitted_open_requests
                    .as_ref()
                    .unwrap_or(&self.untimed_requests),
            )
    }

    /// True if daemons owe the task a reply that does not depend on what other tasks do.
    pub(super) fn awaits_timed_reply(&self) -> bool {
        !self.open_requests.is_subset(&self.untimed_requests)
    }

    /// If the task has settled ([`Task::has_settled`]), removes and returns the part of a
    /// checkpoint that has waited for the task to settle.
    pub(super) fn take_settled_part(&mut self) -> Option<MigrationId> {
        if self.has_settled() {
            self.settling_part.take()
        } else {
            None
        }
    }

    pub(super) fn remove_request(&mut self, id: RequestId) {
        self.open_requests.remove(&id);
        self.untimed_requests.remove(&id);
    }

    /// Raises the watermarks of the task's links to at least the values in `watermarks`.
    pub(super) fn raise_watermarks(&mut self, watermarks: impl IntoIterator<Item = SendWatermark>) {
        for SendWatermark { peer, end_seq } in watermarks {
            let known_end_seq = self.watermarks.entry(peer).or_default();
            *known_end_seq = end_seq.max(*known_end_seq);
        }
    }

    /// Raises the task's clock to the stamp of a new message that this daemon carries. Otherwise a
    /// task that is notified of this task's end would have a smaller clock than its messages.
    pub(super) fn record_stamp(&mut self, frame: &LinkFrame, is_last: bool) {
        let known_end_seq = self.watermarks.get(&frame.dst).copied().unwrap_or(1);
        if frame.seq != known_end_seq {
            return;
        }
        let is_first = if is_last {
            !self.partial_receivers.remove(&frame.dst)
        } else {
            self.partial_receivers.insert(frame.dst)
        };
        if let Some(stamp_bytes) = frame.payload.first_chunk::<STAMP_BYTES>()
            && is_first
        {
            let stamp = u64::from_le_bytes(*stamp_bytes).min(STAMP_MAX);
            self.past.clock = self.past.clock.max(stamp);
        }
    }

    pub(super) fn link_watermarks(&self) -> Vec<SendWatermark> {
        self.watermarks
            .iter()
            .map(|(&peer, &end_seq)| SendWatermark { peer, end_seq })
            .collect()
    }
}

/// How far an ended task had sent.
#[derive(Clone, Debug, Default)]
pub(super) struct ExitPositions {
    /// Watermark of the task's link to each peer.
    pub(super) watermarks: Vec<SendWatermark>,
    /// Clock of the task, and the messages in its past that were in transit.
    pub(super) past: Past,
}

#[derive(Debug, Default)]
pub(super) struct Tasks {
    pub(super) live_tasks: BTreeMap<Tid, Task>,
    /// Tids that are reserved for started processes, by the spawn token with which the process
    /// claims its tid.
    pub(super) tids_by_spawn_token: BTreeMap<i32, Tid>,
    last_task_number: u32,
    /// Number of tids that were given to load watchers of this daemon, from the highest downward.
    watcher_tid_count: u32,
    has_reserved_ids: bool,
    /// Ended tasks with their positions, oldest first.
    exit_positions: VecDeque<(Tid, ExitPositions)>,
    /// Tasks of all hosts whose ends are known on this host.
    pub(super) known_exits: KnownExits,
}

impl Tasks {
    /// Reserves the task numbers up to `task_number`, which belong to tasks in checkpoints or to
    /// restarted tasks.
    pub(super) fn reserve_ids_up_to(&mut self, task_number: u32) {
        self.last_task_number = self.last_task_number.max(task_number);
        self.has_reserved_ids |= task_number > 0;
    }

    /// True if any task number was reserved.
    pub(super) fn has_reserved_ids(&self) -> bool {
        self.has_reserved_ids
    }

    /// Returns a tid that was never used; `None` if there is none or the host runs [`TASKS_MAX`]
    /// tasks.
    pub(super) fn allocate_tid(&mut self, host: HostId) -> Option<Tid> {
        let task_number = self.last_task_number + 1;
        if self.live_tasks.len() >= TASKS_MAX
            || task_number > Tid::LOCAL_PART_MAX - self.watcher_tid_count
        {
            return None;
        }
        let tid = Tid::for_task(host, task_number)?;
        self.last_task_number = task_number;
        Some(tid)
    }

    /// Returns a tid that was never used, for a load watcher of this daemon. Such tids count
    /// downward from the highest one, so that programs get the same tids as in PVM.
    pub(super) fn allocate_watcher_tid(&mut self, host: HostId) -> Option<Tid> {
        let task_number = Tid::LOCAL_PART_MAX - self.watcher_tid_count;
        if task_number <= self.last_task_number {
            return None;
        }
        let tid = Tid::for_task(host, task_number)?;
        self.watcher_tid_count += 1;
        Some(tid)
    }

    pub(super) fn get(&self, tid: Tid) -> Option<&Task> {
        self.live_tasks.get(&tid)
    }

    pub(super) fn get_mut(&mut self, tid: Tid) -> Option<&mut Task> {
        self.live_tasks.get_mut(&tid)
    }

    /// Returns the task whose current process has this spawn token.
    pub(super) fn get_by_spawn_token(&mut self, spawn_token: i32) -> Option<&mut Task> {
        self.live_tasks
            .values_mut()
            .find(|task| task.spawn_token == Some(spawn_token))
    }

    pub(super) fn insert(&mut self, task: Task) {
        if let (Some(spawn_token), ConnectionPhase::Expected) =
            (task.spawn_token, task.connection_phase)
        {
            self.tids_by_spawn_token.insert(spawn_token, task.tid);
        }
        self.live_tasks.insert(task.tid, task);
    }

    /// Remembers the positions of an ended task, instead of those of the oldest task if there are
    /// too many.
    pub(super) fn record_exit(&mut self, tid: Tid, positions: ExitPositions) {
        if self.exit_positions.len() >= EXIT_POSITIONS_MAX {
            self.exit_positions.pop_front();
        }
        self.exit_positions.push_back((tid, positions));
    }

    /// Returns the positions of an ended task's links; empty if they are not remembered.
    pub(super) fn exit_positions(&self, tid: Tid) -> ExitPositions {
        let mut newest_first = self.exit_positions.iter().rev();
        newest_first
            .find(|(exited_tid, _)| *exited_tid == tid)
            .map(|(_, positions)| positions.clone())
            .unwrap_or_default()
    }
}

/// Returns the watermark up to which `watcher` must receive the messages of `exited_tid` before the
/// notification of its end; `None` if `exited_tid` has sent no message to `watcher`. `watermarks`
/// are the watermarks of `exited_tid`.
pub(super) fn watermark_for(
    exited_tid: Tid,
    watermarks: &[SendWatermark],
    watcher: Tid,
) -> Option<SendWatermark> {
    watermarks
        .iter()
        .find(|m| m.peer == watcher)
        .map(|m| SendWatermark {
            peer: exited_tid,
            end_seq: m.end_seq,
        })
}

impl Machine {
    /// Lists the tasks of this host, or only the task `selected_tid`, for `pvm_tasks`.
    pub(super) fn list_tasks(&self, selected_tid: Option<Tid>) -> Vec<TaskInfo> {
        let hides_watcher = self
            .rm_state
            .current()
            .is_none_or(|rm| rm.services.vm_requests);
        let hidden_flag = |task: &Task| match task.is_own_watcher && hides_watcher {
            true => TASK_HIDDEN,
            false => 0,
        };
        let task_info =
            |task: &Task, is_migrating: bool, is_stopped: bool, is_suspended: bool| TaskInfo {
                tid: task.tid,
                parent: task.parent,
                host: self.config.host,
                flags: task.flags | hidden_flag(task),
                name: task.name.clone(),
                pid: task.pid,
                namespace_pid: task.namespace_pid,
                uid: self.config.uid,
                migrating: is_migrating,
                paused: is_stopped
                    && self.owner_control.pauses_guests()
                    && self.owner_control.stopped_tasks.contains(task.tid),
                suspended: is_suspended,
                stopping: is_stopped && !self.owner_control.stopped_tasks.contains(task.tid),
                leftover_processes: 0,
            };
        let is_selected = |tid: Tid| selected_tid.is_none_or(|selected_tid| selected_tid == tid);
        let local_tasks = self
            .tasks
            .live_tasks
            .values()
            .filter(|t| is_selected(t.tid))
            .map(|t| {
                let source = self
                    .migrations
                    .sources
                    .values()
                    .find(|s| s.migration().tid == t.tid);
                let is_migrating = source.is_some_and(Source::is_departing)
                    || (t.holds_items && (t.pause.is_none() || source.is_some()));
                task_info(t, is_migrating, t.pause.is_some(), t.suspension.is_some())
            });
        let arriving_tasks = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.is_located && is_selected(a.tid));
        let arriving_tasks = arriving_tasks.filter_map(|a| {
            Some(task_info(
                &Task::from_record(a.record.clone()?),
                true,
                a.pause_ordered,
                a.suspension.is_some(),
            ))
        });
        local_tasks.chain(arriving_tasks).collect()
    }

    /// Returns the state that another daemon needs to continue the task.
    pub(super) fn task_record(&self, task: &Task) -> TaskRecord {
        TaskRecord {
            tid: task.tid,
            parent: task.parent,
            name: task.name.clone(),
            flags: task.flags,
            spawn_token: task.spawn_token,
            output_sink: task.output_sink,
            trace_sink: task.trace_sink,
            exit_rm: task.exit_rm,
            watermarks: task.link_watermarks(),
            open_requests: task.open_requests.iter().copied().collect(),
            untimed_requests: task.untimed_requests.iter().copied().collect(),
            restart_info: task.restart_info.clone(),
            launch: task.launch_info.clone(),
            handoff: task.handoff.clone(),
            notifications: task.notifications.clone(),
            redirect_address: task.redirect_address,
            known_hosts: self.table.hosts.iter().map(|h| h.id).collect(),
            hosts_epoch: self.table.epoch,
            namespace_pid: task.namespace_pid,
        }
    }

    /// Handles a task's request to leave the virtual machine (`pvm_exit`).
    pub(super) fn handle_leave_request(
        &mut self,
        tid: Tid,
        id: RequestId,
        watermarks: Vec<SendWatermark>,
    ) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.raise_watermarks(watermarks);
        match task.graceful_exit {
            // A program that was asked to exit for a restart leaves the virtual machine before it
            // exits.
            Some(graceful_exit) if graceful_exit.is_self_checkpoint() && task.is_exiting() => {
                return self.reply(tid, id, sempa_proto::task::Reply::Done);
            }
            // The program leaves without such a request, so it is not started again.
            _ => {}
        }
        self.withdraw_exit_request(tid);
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.handoff_log = None;
        let own_watches: Vec<PendingNotification> = task
            .notifications
            .extract_if(.., |w| w.subject == NotifySubject::TaskExit(tid))
            .collect();
        for watch in own_watches {
            self.send_exit_notification(tid, tid, &watch, None);
        }
        self.reply(tid, id, sempa_proto::task::Reply::Done);
        self.end_connection(tid);
    }

    /// Handles a task that has left the virtual machine or whose socket has closed. A task from a
    /// command line then ends; a spawned task ends when its process exits.
    pub(super) fn end_connection(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        if let Some((status, usage)) = task.exit_report {
            return self.end_task(tid, status, usage);
        }
        if !task.is_spawned() {
            return self.end_task(tid, 0, Usage::default());
        }
        if task.connection_phase == ConnectionPhase::Left {
            return;
        }
        if let ConnectionPhase::Connected(conn) = task.connection_phase {
            self.conns.retire(conn);
        }
        task.connection_phase = ConnectionPhase::Left;
        task.flags &= !(TASK_CONNECTED | TASK_RM);
        task.notifications.clear();
        let inbox_items = task.inbox.drain();
        self.notify_senders_of_end(tid, inbox_items);
        self.end_peer_routes(tid);
        self.notify_sources_ended(tid);
        for host in self.other_hosts() {
            self.send_to_host(host, HostMsg::TaskLeft { tid });
        }
        self.remove_from_services(tid);
    }

    /// Handles the exit of a spawned task's process. If the process was connected, the daemon may
    /// not have read everything that the process has written to its socket, so the task ends later.
    pub(super) fn handle_process_exit(&mut self, tid: Tid, status: i32, usage: Usage) {
        if let Some(arrival) = self.migrations.arrivals.get_mut(&tid).filter(|a| a.has_run) {
            arrival.exit_report = Some((status, usage));
            return self.advance_arrival(tid);
        }
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        let usage = usage.merged_with(task.earlier_usage);
        task.exit_report = Some((status, usage));
        let spawn_token = task.spawn_token;
        if task.conn().is_some() && self.shutdown.is_none() {
            self.set_timer(
                SOCKET_DRAIN_TIMEOUT,
                super::Timer::SocketDrainTimeout(tid, spawn_token),
            );
        } else {
            self.end_task(tid, status, usage);
        }
    }

    /// Called some time after a process has exited. If its socket is still open, another process
    /// holds the socket or this daemon has not read everything; the shell then reads the remaining
    /// data, so that no message is lost, and closes the socket. If the socket is closed, ends the
    /// task.
    pub(super) fn handle_socket_drain_timeout(&mut self, tid: Tid, spawn_token: Option<i32>) {
        // If the spawn token differs, the task has another process by now.
        let Some(task) = self
            .tasks
            .get(tid)
            .filter(|task| task.spawn_token == spawn_token)
        else {
            return;
        };
        match (task.exit_report, task.conn()) {
            (Some(_), Some(conn)) => self.outputs.push_back(Output::DrainConnection { conn }),
            (Some((status, usage)), None) => self.end_task(tid, status, usage),
            (None, _) => {}
        }
    }

    /// Ends a task, unless its program is started again or the coordinator must decide. Notifies
    /// other tasks and hosts after everything that the task has sent.
    pub(super) fn end_task(&mut self, tid: Tid, status: i32, usage: Usage) {
        if self.handle_exit_for_restart(tid, status, usage) || self.defer_exit(tid, status, usage) {
            return;
        }
        let Some(mut task) = self.tasks.live_tasks.remove(&tid) else {
            return;
        };
        self.tasks
            .tids_by_spawn_token
            .retain(|_, reserved_tid| *reserved_tid != tid);
        if let Some(conn) = task.conn() {
            self.conns.retire(conn);
            self.outputs.push_back(Output::CloseTask { conn });
        }
        self.notify_sources_ended(tid);
        self.forget_guest(&task);
        self.report_load_failure(&task, status);
        if task.is_spawned() || task.tasker.is_some() {
            self.report_output_ended(tid, Some(status), task.output_sink);
        }
        let watermarks = task.link_watermarks();
        let past = Past {
            clock: task.past.clock,
            marks: self.marks_at_end(&task, &watermarks),
        };
        let positions = ExitPositions {
            watermarks: watermarks.clone(),
            past,
        };
        self.report_exit_to_rm(&task, &watermarks, status, usage);
        self.trace_task_end(&task, status, usage);
        let inbox_items = task.inbox.drain();
        self.notify_senders_of_end(tid, inbox_items);
        self.end_peer_routes(tid);
        self.tasks.record_exit(tid, positions.clone());
        if self.shutdown.is_none() {
            for host in self.other_hosts() {
                let message = DataMsg::TaskEnded {
                    tid,
                    watermarks: positions.watermarks.clone(),
                    past: positions.past.clone(),
                };
                self.outputs.push_back(Output::SendData { host, message });
            }
        }
        if !task.is_own_watcher {
            self.record_event(EventKind::TaskEnded {
                tid,
                status,
                used: usage,
            });
        }
        self.handle_task_end(tid, &positions);
        self.handle_rm_command_end(&task, status);
        self.handle_watcher_end(&task, status);
        self.advance_stop();
    }

    /// Handles the end of a task of any host: sends the requested notifications to the tasks of
    /// this host, frees the contexts of the ended task, and removes the ended task from all
    /// services.
    pub(super) fn handle_task_end(&mut self, tid: Tid, positions: &ExitPositions) {
        self.handle_exit_notice(tid);
        self.notify_watchers_of_exit(tid, positions);
        self.context_owners.retain(|_, owner| *owner != tid);
        self.remove_from_services(tid);
    }

    /// Removes an ended task from the state of the master, and from its services for daemons.
    pub(super) fn remove_from_services(&mut self, tid: Tid) {
        self.forget_service(tid);
        self.owner_control.stopped_tasks.remove(tid);
        self.handle_rm_exit(tid);
        self.handle_owner_agent_end(tid);
        self.handle_service_task_end(tid);
        if let Some(master) = &mut self.master {
            master.events.unsubscribe(tid);
            master.mailbox.remove_owner(tid);
            master.service_pasts.handle_task_end(tid);
        }
        self.remove_ended_member(tid);
    }

    /// Notifies the senders of undeliverable frames and messages of the end of the task, so that
    /// their libraries need not retain anything for it.
    pub(super) fn notify_senders_of_end(&mut self, tid: Tid, inbox_items: VecDeque<PendingItem>) {
        let senders: BTreeSet<Tid> = inbox_items
            .iter()
            .filter_map(sender_of)
            .filter(|src| *src != tid)
            .collect();
        for src in senders {
            self.deliver(src, ToTask::PeerGone { tid });
        }
    }
}
