//! Spawns tasks: choice of hosts without a resource manager, and the start of the tasks on the
//! executing host.
//!
//! 1. The spawner's daemon divides the tasks among the permitted hosts round robin, or among the
//!    hosts of a placement lease.
//! 2. Each host starts its share of the tasks and replies with one result per task.
//! 3. If a host fails or its owner refuses the tasks, the tasks are assigned to other hosts, unless
//!    the request names a host or an architecture or uses a lease.
//! 4. When all hosts have replied, the spawner gets the reply.

use super::deferred::DeferredAction;
use super::rpc::{ReplyAddress, RpcPurpose};
use super::tasks::{ConnectionPhase, Task};
use super::{Machine, World, restart_engine};
use sempa_proto::engine::LaunchInfo;
use sempa_proto::event::EventKind;
use sempa_proto::host::{HostReply, HostRequest};
use sempa_proto::owner::GUEST_REFUSED_ERROR;
use sempa_proto::sm::{
    LEASE_TASKS_MAX, PlacementLeaseUse, SM_EXECACK, TaskerStartRequest, pack_tids,
};
use sempa_proto::table::TASK_FORKED;
use sempa_proto::task::{
    LeasedSpawn, Reply, SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT,
    SPAWN_PINNED, SPAWN_STRICT_DIR, SpawnRequest,
};
use sempa_proto::tasker::{TaskStart, ToTasker};
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Largest number of tasks in one spawn.
pub(super) const SPAWN_COUNT_MAX: u32 = 65_536;
/// Debugger under which a task is started on request, unless `PVM_DEBUGGER` names another debugger.
const DEFAULT_DEBUGGER: &str = "/usr/lib/pvm3/lib/debugger";

/// Interval in which a repeated reason for not starting tasks is not logged again.
const REFUSAL_LOG_INTERVAL: Micros = Micros::from_secs(10);

type SpawnResults = Vec<Result<Tid, PvmError>>;

/// Hosts, each with the positions of its tasks in the result of a spawn.
type TaskPositionsByHost = Vec<(HostId, Vec<usize>)>;

#[derive(Debug)]
struct PendingSpawn {
    spawner: Tid,
    request_id: RequestId,
    request: SpawnRequest,
    results: Vec<Option<Result<Tid, PvmError>>>,
    /// For each part without an answer, by the number of the part: its host, and the positions of
    /// its tasks in the result.
    open_parts: BTreeMap<u64, (HostId, Vec<usize>)>,
    last_part_number: u64,
    /// Hosts that have failed or refused; they get no further task of this spawn.
    excluded_hosts: Vec<HostId>,
    /// The placement lease that determines the hosts.
    lease: Option<LeasedSpawn>,
}

/// Spawns whose tasks are being started, and the state of the round robin.
#[derive(Debug, Default)]
pub(super) struct PendingSpawns {
    open_spawns: BTreeMap<u64, PendingSpawn>,
    last_spawn_number: u64,
    /// Host to which the round robin assigned the last task.
    last_host: Option<HostId>,
    /// The last logged refusal of this host's owner, and its time.
    last_refusal: Option<(Micros, String)>,
}

/// The requester of a start of tasks on this host.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExecRequester {
    Daemon(ReplyAddress),
    /// A resource manager, with the wait id of its request.
    Rm {
        rm: Tid,
        wid: i32,
    },
    /// No requester: a command from this daemon's configuration.
    Startup,
    /// No requester: this daemon starts its own load watcher.
    OwnWatcher,
}

/// Tasks to start at the end of the current event, when [`World`] is available.
#[derive(Debug)]
pub(super) struct ExecJob {
    parent: Tid,
    request: SpawnRequest,
    requester: ExecRequester,
}

impl ExecJob {
    /// True for tasks that the daemon or the resource manager starts to serve the virtual machine.
    /// The policy of the host's owner does not apply to such tasks.
    fn is_service(&self) -> bool {
        let is_own_request = match self.requester {
            ExecRequester::Startup | ExecRequester::OwnWatcher => true,
            ExecRequester::Rm { rm, .. } => self.parent == rm,
            ExecRequester::Daemon(_) => false,
        };
        is_own_request && self.request.flags & SPAWN_PINNED != 0
    }

    fn is_own_watcher(&self) -> bool {
        matches!(self.requester, ExecRequester::OwnWatcher)
    }

    pub(super) fn request(&self) -> &SpawnRequest {
        &self.request
    }
}

/// Splits the `place` of a request into its host part and its directory part. An empty directory
/// part counts as missing.
fn split_place(place: &str) -> (&str, Option<&str>) {
    match place.split_once(':') {
        Some((host, dir)) => (host, Some(dir).filter(|dir| !dir.is_empty())),
        None => (place, None),
    }
}

impl Machine {
    /// Handles a spawn on the hosts of a placement lease. The spawn fails if the lease is not
    /// valid.
    pub(super) fn spawn_leased(
        &mut self,
        tid: Tid,
        id: RequestId,
        request: SpawnRequest,
        lease: LeasedSpawn,
    ) {
        let reason = if self.rm_state.current().is_none_or(|rm| rm.tid != lease.rm) {
            format!(
                "{} is not the resource manager any more; its placement lease is void",
                lease.rm
            )
        } else if request.task_count as usize != lease.hosts.len() {
            format!(
                "the placement lease is for {} tasks, not for {}",
                lease.hosts.len(),
                request.task_count
            )
        } else if lease.hosts.len() > LEASE_TASKS_MAX {
            format!(
                "a placement lease does not cover {} tasks in one request; {LEASE_TASKS_MAX} is the most",
                request.task_count
            )
        } else {
            return self.spawn(tid, id, request, Some(lease));
        };
        self.reply_error(tid, id, PvmError::Denied, reason);
    }

    /// Handles a spawn. Without a lease its tasks are placed round robin.
    pub(super) fn spawn(
        &mut self,
        tid: Tid,
        id: RequestId,
        mut request: SpawnRequest,
        lease: Option<LeasedSpawn>,
    ) {
        if request.task_count == 0 {
            return self.reply_error(
                tid,
                id,
                PvmError::BadParam,
                "a spawn must request at least one task",
            );
        }
        if request.task_count > SPAWN_COUNT_MAX {
            let reason = format!(
                "{} tasks were requested in one spawn; {SPAWN_COUNT_MAX} is the most",
                request.task_count
            );
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        if let Err(why) = restart_engine::launch_info_of(&request) {
            return self.reply_error(tid, id, PvmError::BadParam, why.to_string());
        }
        request.past = self.past_of(tid);
        let count = request.task_count as usize;
        self.spawns.last_spawn_number += 1;
        let spawn_number = self.spawns.last_spawn_number;
        let spawn = PendingSpawn {
            spawner: tid,
            request_id: id,
            request,
            results: vec![None; count],
            open_parts: BTreeMap::new(),
            last_part_number: 0,
            excluded_hosts: Vec::new(),
            lease,
        };
        self.spawns.open_spawns.insert(spawn_number, spawn);
        self.assign_hosts(spawn_number, (0..count).collect(), PvmError::NoHost);
    }

    /// Returns the hosts that the request permits, in the order of the host table.
    fn permitted_hosts(&self, request: &SpawnRequest) -> Vec<HostId> {
        let (host_part, _) = split_place(&request.where_arg);
        let own_name = &self.config.host_name;
        let fits_request = |host: &sempa_proto::table::HostEntry| {
            if request.flags & SPAWN_HOST != 0 {
                host.name == host_part || (host_part == "." && host.name == *own_name)
            } else if request.flags & SPAWN_ARCH != 0 {
                host.arch == host_part
            } else {
                true
            }
        };
        let is_complement = request.flags & SPAWN_COMPLEMENT != 0;
        // Without a restriction the complement is empty, as in PVM.
        self.table
            .hosts
            .iter()
            .filter(|h| fits_request(h) != is_complement)
            .map(|h| h.id)
            .collect()
    }

    /// Assigns tasks of a spawn to the hosts of its lease, or in blocks to the permitted hosts.
    /// Tasks without a host fail with the error `error_without_host`.
    fn assign_hosts(
        &mut self,
        spawn_number: u64,
        indices: Vec<usize>,
        error_without_host: PvmError,
    ) {
        let Some(spawn) = self.spawns.open_spawns.get(&spawn_number) else {
            return;
        };
        if let Some(lease) = &spawn.lease {
            let mut blocks: BTreeMap<HostId, Vec<usize>> = BTreeMap::new();
            indices
                .iter()
                .for_each(|index| blocks.entry(lease.hosts[*index]).or_default().push(*index));
            let (available_blocks, unavailable_blocks): (TaskPositionsByHost, TaskPositionsByHost) =
                blocks
                    .into_iter()
                    .partition(|(host, _)| self.table.get(*host).is_some());
            return self.request_task_starts(
                spawn_number,
                available_blocks,
                unavailable_blocks
                    .into_iter()
                    .flat_map(|(_, next_block)| next_block),
                error_without_host,
            );
        }
        let mut hosts = self.permitted_hosts(&spawn.request);
        hosts.retain(|host| !spawn.excluded_hosts.contains(host));
        let previous_host = self.spawns.last_host.unwrap_or(self.config.host);
        let start_position = hosts
            .iter()
            .position(|host| *host > previous_host)
            .unwrap_or(0);
        hosts.rotate_left(start_position);
        hosts.truncate(indices.len());
        if hosts.is_empty() {
            return self.request_task_starts(spawn_number, Vec::new(), indices, error_without_host);
        }
        // A request that names a host does not advance the round robin, as in PVM.
        if !spawn.request.names_one_host() {
            self.spawns.last_host = hosts.last().copied();
        }
        let (block_len, larger_block_count) =
            (indices.len() / hosts.len(), indices.len() % hosts.len());
        let mut remaining_indices = indices.into_iter();
        let mut next_block = |n: usize| {
            remaining_indices
                .by_ref()
                .take(block_len + usize::from(n < larger_block_count))
                .collect()
        };
        let blocks = hosts
            .into_iter()
            .enumerate()
            .map(|(n, host)| (host, next_block(n)))
            .collect();
        self.request_task_starts(spawn_number, blocks, [], error_without_host);
    }

    /// Requests each host to start its tasks of a spawn. The tasks at the positions
    /// `failed_indices` fail with `error`.
    fn request_task_starts(
        &mut self,
        spawn_number: u64,
        blocks: TaskPositionsByHost,
        failed_indices: impl IntoIterator<Item = usize>,
        error: PvmError,
    ) {
        let Some(spawn) = self.spawns.open_spawns.get_mut(&spawn_number) else {
            return;
        };
        for index in failed_indices {
            spawn.results[index] = Some(Err(error));
        }
        let mut exec_requests = Vec::new();
        for (host, block) in blocks {
            spawn.last_part_number += 1;
            let request = SpawnRequest {
                task_count: block.len() as u32,
                ..spawn.request.clone()
            };
            exec_requests.push((
                host,
                spawn.last_part_number,
                HostRequest::Exec {
                    parent: spawn.spawner,
                    request,
                },
            ));
            spawn
                .open_parts
                .insert(spawn.last_part_number, (host, block));
        }
        if exec_requests.is_empty() {
            return self.reply_if_complete(spawn_number);
        }
        for (host, part, exec_request) in exec_requests {
            self.call_host(
                host,
                exec_request,
                RpcPurpose::Spawn {
                    spawn_number,
                    part_number: part,
                },
            );
        }
    }

    /// Handles the results of one part, or the loss of the part's host. Tasks that the host did not
    /// start because it is lost, or because its owner refuses them, are assigned to other hosts if
    /// the request permits this.
    pub(super) fn handle_part_spawned(
        &mut self,
        spawn_number: u64,
        part_number: u64,
        results: Result<SpawnResults, PvmError>,
    ) {
        let Some(spawn) = self.spawns.open_spawns.get_mut(&spawn_number) else {
            return;
        };
        let Some((host, block)) = spawn.open_parts.remove(&part_number) else {
            return;
        };
        // With a lease, only the resource manager may choose another host.
        let may_reassign = spawn.lease.is_none() && !spawn.request.names_host_or_arch();
        let part_results = match results {
            Ok(part_results) => part_results,
            Err(_) if may_reassign => {
                spawn.excluded_hosts.push(host);
                return self.assign_hosts(spawn_number, block, PvmError::HostFail);
            }
            Err(error) => vec![Err(error); block.len()],
        };
        let (mut part_results, mut reassigned_indices) = (part_results.into_iter(), Vec::new());
        for index in block {
            match part_results.next().unwrap_or(Err(PvmError::DSysErr)) {
                Err(GUEST_REFUSED_ERROR) if may_reassign => reassigned_indices.push(index),
                result => spawn.results[index] = Some(result),
            }
        }
        if reassigned_indices.is_empty() {
            return self.reply_if_complete(spawn_number);
        }
        spawn.excluded_hosts.push(host);
        self.assign_hosts(spawn_number, reassigned_indices, GUEST_REFUSED_ERROR);
    }

    /// Replies to the spawner if no part is open.
    fn reply_if_complete(&mut self, spawn_number: u64) {
        if self
            .spawns
            .open_spawns
            .get(&spawn_number)
            .is_none_or(|s| !s.open_parts.is_empty() || s.results.contains(&None))
        {
            return;
        }
        let Some(PendingSpawn {
            spawner: tid,
            request_id: id,
            request,
            results,
            lease,
            ..
        }) = self.spawns.open_spawns.remove(&spawn_number)
        else {
            return;
        };
        let results: SpawnResults = results.into_iter().flatten().collect();
        let (mut output_sink, mut trace_sink) = (request.output_sink, request.trace_sink);
        self.apply_tracer_sinks(&mut output_sink, &mut trace_sink);
        for child in results.iter().flatten() {
            let parent = visible_parent(tid, request.flags);
            self.report_output_requested(*child, parent, output_sink);
            self.trace_task_request(trace_sink, *child, parent);
        }
        let leased_tasks = lease.map(
            |LeasedSpawn {
                 rm,
                 lease_wid: wid,
                 hosts,
             }| {
                let tasks = hosts
                    .into_iter()
                    .zip(&results)
                    .filter_map(|(host, result)| Some((host, (*result).ok()?)));
                (rm, wid, tasks.collect::<Vec<_>>())
            },
        );
        self.reply(tid, id, Reply::Spawned(results));
        if let Some((rm, wid, tasks)) = leased_tasks.filter(|(_, _, tasks)| !tasks.is_empty()) {
            let hosts = tasks.iter().map(|(host, _)| *host).collect();
            self.defer_action(DeferredAction::ReportLeaseUse {
                rm,
                wid,
                lease_use: PlacementLeaseUse {
                    spawner: tid,
                    tasks,
                },
            });
            // Only the resource manager knows why it chose the hosts of the lease.
            let why = "by a placement lease of the resource manager".to_string();
            self.record_deferred(EventKind::Placed {
                name: request.program,
                hosts,
                why,
            });
        }
    }

    /// Queues a start of tasks on this host for the end of the current event.
    pub(super) fn queue_exec(
        &mut self,
        parent: Tid,
        request: SpawnRequest,
        requester: ExecRequester,
    ) {
        self.pending_execs.push_back(ExecJob {
            parent,
            request,
            requester,
        });
    }

    /// Starts tasks on this host and sends the results to the requester.
    pub(super) fn start_tasks(&mut self, world: &mut dyn World, mut job: ExecJob) {
        if !job.is_own_watcher() {
            self.apply_tracer_sinks(&mut job.request.output_sink, &mut job.request.trace_sink);
        }
        let count = job.request.task_count.min(SPAWN_COUNT_MAX);
        let launch = restart_engine::launch_info_of(&job.request);
        let permitted_count = self.permitted_count(&job);
        let program = if let Err(why) = &launch {
            // A request of the resource manager is queued without this check.
            self.log_warning_and_record(format!("{} was not started: {why}", job.request.program));
            Err(PvmError::BadParam)
        } else if self.tasker_has_ended || self.shutdown.is_some() {
            Err(PvmError::DSysErr)
        } else if permitted_count == 0 {
            Err(GUEST_REFUSED_ERROR)
        } else if self.refuses_working_dir(world, &job) {
            Err(PvmError::NoFile)
        } else {
            find_program(world, &job.request)
        };
        let mut orders = Vec::new();
        let results: SpawnResults = match program {
            Ok((path, argv)) => {
                let start_template = TaskStart {
                    tid: Tid::NONE,
                    path,
                    argv,
                    env: self.task_environment(world, &job.request),
                    working_dir: world.work_dir(split_place(&job.request.where_arg).1),
                    pinned: job.request.flags & SPAWN_PINNED != 0,
                };
                let launch = launch.unwrap_or_default();
                let start = |n| match (n as usize) < permitted_count {
                    true => self.start_task(
                        world,
                        &job,
                        n,
                        (start_template.clone(), launch.clone()),
                        &mut orders,
                    ),
                    false => Err(GUEST_REFUSED_ERROR),
                };
                (0..count).map(start).collect()
            }
            Err(error) => vec![Err(error); count as usize],
        };
        if results.contains(&Err(GUEST_REFUSED_ERROR))
            && let Some(refusal) = self.guest_refusal(Tid::NONE, &job.request.program)
        {
            self.record_guest_refusal(&job, refusal.to_string());
        }
        self.report_exec_results(&job, &results);
        // The tasker gets its orders after the requester has its answer. The tasker has a higher
        // priority: on the same processor it would delay the answer until the first process exists.
        orders
            .into_iter()
            .for_each(|order| self.send_to_tasker(order));
        let (parent, user) = (
            visible_parent(job.parent, job.request.flags),
            self.config.uid,
        );
        if job.is_own_watcher() {
            return;
        }
        for tid in results.into_iter().flatten() {
            self.record_deferred(EventKind::TaskStarted {
                tid,
                parent,
                name: job.request.program.clone(),
                user,
            });
        }
    }

    /// Sends the results of a start to its requester. A failure at the start of the daemon is
    /// recorded.
    fn report_exec_results(&mut self, job: &ExecJob, results: &SpawnResults) {
        match job.requester {
            ExecRequester::Daemon(reply_to) => {
                self.send_host_reply(reply_to, HostReply::Reply(Reply::Spawned(results.clone())))
            }
            ExecRequester::Rm { rm, wid } => {
                self.send_daemon_message(rm, 0, SM_EXECACK, wid, pack_tids(results))
            }
            ExecRequester::Startup => {
                let file = &job.request.program;
                if let Some(Err(error)) = results.first() {
                    let text = format!(
                        "{file} could not be started: {error}; this daemon does its work itself"
                    );
                    self.log_warning_and_record(text);
                }
            }
            ExecRequester::OwnWatcher => match results.first() {
                Some(Ok(tid)) => self.handle_watcher_started(*tid),
                Some(Err(error)) => self.handle_watcher_start_failure(*error),
                None => {}
            },
        }
    }

    /// True if the working directory of the request does not exist on this host and the request
    /// requires it. Records the reason. Without the requirement, records that the tasks start
    /// elsewhere.
    fn refuses_working_dir(&mut self, world: &dyn World, job: &ExecJob) -> bool {
        let Some(dir) = split_place(&job.request.where_arg)
            .1
            .filter(|dir| restart_engine::lacks_dir(world, dir))
        else {
            return false;
        };
        let name = &job.request.program;
        let why = format!("the directory {dir} does not exist there, or cannot be entered");
        let must_refuse = job.request.flags & SPAWN_STRICT_DIR != 0;
        if must_refuse {
            self.record_event(EventKind::SpawnRefused {
                host: self.config.host,
                spawner: job.parent,
                name: name.clone(),
                why,
            });
        } else {
            let default_dir = world.work_dir(None);
            self.log_refusal(format!("{name} starts in {}: {why}", default_dir.display()));
        }
        must_refuse
    }

    /// Returns the number of tasks of this request that the owner of this host permits at present.
    fn permitted_count(&self, job: &ExecJob) -> usize {
        match job.is_service() {
            true => usize::MAX,
            false => self
                .free_slots_for(Tid::NONE, &job.request.program)
                .unwrap_or(0),
        }
    }

    /// Logs that this host's owner refuses the tasks, and records it for the spawner. The same text
    /// is recorded at most once in [`REFUSAL_LOG_INTERVAL`].
    fn record_guest_refusal(&mut self, job: &ExecJob, why: String) {
        let (name, spawner) = (job.request.program.clone(), job.parent);
        if self.is_new_refusal(format!("{name} not started for {spawner}: {why}")) {
            self.record_event(EventKind::SpawnRefused {
                host: self.config.host,
                spawner,
                name,
                why,
            });
        }
    }

    /// Logs why tasks were not started as intended. The same text is logged at most once in
    /// [`REFUSAL_LOG_INTERVAL`].
    fn log_refusal(&mut self, text: String) {
        if self.is_new_refusal(text.clone()) {
            self.log_and_record(text);
        }
    }

    /// Returns false if the last refusal had the same text and is younger than
    /// [`REFUSAL_LOG_INTERVAL`].
    fn is_new_refusal(&mut self, text: String) -> bool {
        let last_refusal = &self.spawns.last_refusal;
        let is_new = last_refusal.as_ref().is_none_or(|(logged_at, last_text)| {
            *last_text != text || self.now.since(*logged_at) >= REFUSAL_LOG_INTERVAL
        });
        if is_new {
            self.spawns.last_refusal = Some((self.now, text));
        }
        is_new
    }

    fn start_task(
        &mut self,
        world: &mut dyn World,
        job: &ExecJob,
        instance: u32,
        (mut start, launch): (TaskStart, Option<Box<LaunchInfo>>),
        orders: &mut Vec<ToTasker>,
    ) -> Result<Tid, PvmError> {
        let tid = match job.is_own_watcher() {
            true => self.tasks.allocate_watcher_tid(self.config.host),
            false => self.tasks.allocate_tid(self.config.host),
        };
        let tid = tid.ok_or(PvmError::OutOfRes)?;
        let mut spawn_token = world.random_secret();
        while self.tasks.tids_by_spawn_token.contains_key(&spawn_token) {
            spawn_token = world.random_secret();
        }
        start.tid = tid;
        start
            .env
            .push(format!("PVMEPID={spawn_token}").into_bytes());
        let request = &job.request;
        let mut task = Task::new(
            tid,
            visible_parent(job.parent, request.flags),
            ConnectionPhase::Expected,
        );
        task.name = request.program.clone();
        task.spawn_token = Some(spawn_token);
        task.pinned = request.flags & SPAWN_PINNED != 0;
        task.debugged = request.flags & SPAWN_DEBUG != 0;
        task.is_service = job.is_service();
        task.is_own_watcher = job.is_own_watcher();
        task.launch_info = launch;
        task.initial_past.clone_from(&request.past);
        (task.output_sink, task.trace_sink) = (request.output_sink, request.trace_sink);
        // Without a tasker task that has taken over the start of tasks, the daemon's own tasker
        // starts the program.
        let tasker = self.service_tasks.tasker().filter(|_| {
            !matches!(
                job.requester,
                ExecRequester::Startup | ExecRequester::OwnWatcher
            )
        });
        task.tasker = tasker;
        task.flags = if tasker.is_some() { 0 } else { TASK_FORKED };
        let requesting_rm = match job.requester {
            ExecRequester::Rm { rm, .. } => Some(rm),
            _ => None,
        };
        task.exit_rm = requesting_rm;
        let parent = task.parent;
        match tasker {
            Some(tasker) => {
                use std::os::unix::ffi::OsStrExt;
                let order = TaskerStartRequest {
                    tid,
                    flags: request.flags,
                    path: start.path.as_os_str().as_bytes().to_vec(),
                    argv: start.argv,
                    env: self.tasker_environment(job, spawn_token),
                    spawn_position: [
                        instance as i32,
                        request.task_count as i32,
                        request.task_count as i32,
                    ],
                };
                self.request_task_start(tasker, &task, order);
            }
            None => orders.push(ToTasker::Start(start)),
        }
        self.trace_task_start(&task);
        self.tasks.insert(task);
        if requesting_rm.is_some() {
            // The daemon of the spawner does not know a task that a resource manager starts, so it
            // cannot report the task to the collector.
            self.report_output_requested(tid, parent, request.output_sink);
        }
        self.report_output_started(tid, parent, request.output_sink);
        Ok(tid)
    }

    /// Returns the variables that this daemon sets for a new task.
    pub(super) fn daemon_environment(&self, request: &SpawnRequest) -> Vec<Vec<u8>> {
        let mut variables = vec![
            format!(
                "PVMSOCK={}",
                self.config.paths.daemon_socket_path().display()
            )
            .into_bytes(),
            format!("PVM_ARCH={}", self.config.arch).into_bytes(),
        ];
        if let (_, Some(dir)) = split_place(&request.where_arg) {
            variables.push(format!("PVMSPAWNWD={dir}").into_bytes());
        }
        variables
    }

    /// Returns the environment of a new task except its `PVMEPID`: the variables of the host, the
    /// spawner and this daemon. Of several entries with the same name only the last is returned.
    pub(super) fn task_environment(
        &self,
        world: &dyn World,
        request: &SpawnRequest,
    ) -> Vec<Vec<u8>> {
        let daemon_variables = self.daemon_environment(request);
        let name_len = |entry: &[u8]| entry.iter().position(|b| *b == b'=').unwrap_or(entry.len());
        let entries: Vec<Vec<u8>> = world
            .base_environment()
            .into_iter()
            .chain(request.env.iter().cloned())
            .chain(daemon_variables)
            .collect();
        let last_index_by_name: HashMap<&[u8], usize> = entries
            .iter()
            .enumerate()
            .map(|(n, entry)| (&entry[..name_len(entry)], n))
            .collect();
        let is_last =
            |n: usize, entry: &[u8]| last_index_by_name.get(&entry[..name_len(entry)]) == Some(&n);
        let is_kept: Vec<bool> = entries
            .iter()
            .enumerate()
            .map(|(n, entry)| {
                is_last(n, entry) && &entry[..name_len(entry)] != SPAWN_TOKEN_VARIABLE
            })
            .collect();
        entries
            .into_iter()
            .zip(is_kept)
            .filter_map(|(entry, is_kept)| is_kept.then_some(entry))
            .collect()
    }

    /// Handles the report that the tasker could not create a process. Other tasks see a task that
    /// has ended immediately.
    pub(super) fn handle_start_failure(&mut self, tid: Tid, why: &str) {
        self.log_warning_and_record(format!("{tid} could not be started: {why}"));
        let usage = self
            .tasks
            .get(tid)
            .map(|task| task.earlier_usage)
            .unwrap_or_default();
        self.end_task(tid, 0x100, usage);
    }
}

/// Name of the environment variable with the spawn token of a process. The children of a process
/// must not inherit it.
const SPAWN_TOKEN_VARIABLE: &[u8] = b"PVMEPID";

/// Returns the parent that a child may know: `parent`, or the code [`PvmError::ParentNotSet`] as a
/// tid if the spawn has no parent.
fn visible_parent(parent: Tid, flags: i32) -> Tid {
    if flags & SPAWN_NO_PARENT != 0 {
        Tid::from_raw(PvmError::ParentNotSet.code())
    } else {
        parent
    }
}

/// Returns the path of the program to run, and its arguments. A debugged task runs the debugger,
/// with the program as an argument.
pub(super) fn find_program(
    world: &dyn World,
    request: &SpawnRequest,
) -> Result<(std::path::PathBuf, Vec<Vec<u8>>), PvmError> {
    use std::os::unix::ffi::OsStrExt;
    let path_bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let path = world.find_program(&request.program, split_place(&request.where_arg).1)?;
    let mut argv = vec![path_bytes(&path)];
    argv.extend(request.args.iter().cloned());
    if request.flags & SPAWN_DEBUG == 0 {
        return Ok((path, argv));
    }
    let configured_debugger = world
        .base_environment()
        .into_iter()
        .find_map(|e| e.strip_prefix(b"PVM_DEBUGGER=").map(<[u8]>::to_vec));
    let debugger = configured_debugger.map_or_else(
        || DEFAULT_DEBUGGER.to_string(),
        |d| String::from_utf8_lossy(&d).into_owned(),
    );
    let debugger = world.find_program(&debugger, None)?;
    argv.insert(0, path_bytes(&debugger));
    Ok((debugger, argv))
}
