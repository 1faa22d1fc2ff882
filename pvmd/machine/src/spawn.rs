//! Spawns tasks: choice of hosts without a resource manager, and the start of the tasks on the
//! executing host.
//!
//! 1. The spawner's daemon divides the tasks among the permitted hosts round robin, or among the
//!    hosts of a placement lease.
//! 2. Each host starts its part and answers with one result per task.
//! 3. If a host fails or its owner refuses the tasks, they are assigned to other hosts, unless the
//!    request names a host or an architecture or uses a lease.
//! 4. When all results are there, the spawner gets the reply.

use super::deferred::DeferredAction;
use super::rpc::{ReplyAddress, RpcPurpose};
use super::tasks::{ConnectionPhase, Task};
use super::{Machine, World, restart_engine};
use sempa_proto::engine::LaunchInfo;
use sempa_proto::event::EventKind;
use sempa_proto::host::{HostReply, HostRequest};
use sempa_proto::load::is_load_watcher;
use sempa_proto::owner::GUEST_REFUSED;
use sempa_proto::sm::{
    LEASE_TASKS_MAX, PlacementLeaseUse, SM_EXECACK, TaskerStartRequest, pack_tids,
};
use sempa_proto::table::TASK_FORKED;
use sempa_proto::task::{
    LeasedSpawn, Reply, SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT,
    SPAWN_PINNED, SpawnRequest,
};
use sempa_proto::tasker::{StartTask, ToTasker};
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Largest number of tasks in one spawn.
pub(super) const SPAWN_COUNT_MAX: u32 = 65_536;
/// Debugger under which a task is started on request, unless `PVM_DEBUGGER` names another one.
const DEFAULT_DEBUGGER: &str = "/usr/lib/pvm3/lib/debugger";

/// Interval in which the same reason for not starting tasks is logged only once.
const REFUSAL_LOG_INTERVAL: Micros = Micros::from_secs(10);

type SpawnResults = Vec<Result<Tid, PvmError>>;

/// Hosts, each with the positions of its tasks in the result of a spawn.
type TaskPositionsByHost = Vec<(HostId, Vec<usize>)>;

#[derive(Debug)]
struct PendingSpawn {
    tid: Tid,
    id: RequestId,
    request: SpawnRequest,
    results: Vec<Option<Result<Tid, PvmError>>>,
    /// For each part without an answer: its host and the positions of its tasks in the result.
    open_parts: BTreeMap<u64, (HostId, Vec<usize>)>,
    last_part: u64,
    /// Hosts that have failed or refused; they get no further task of this spawn.
    excluded_hosts: Vec<HostId>,
    /// The placement lease that determines the hosts.
    lease: Option<LeasedSpawn>,
}

/// Spawns whose tasks are being started, and the position of the round robin.
#[derive(Debug, Default)]
pub(super) struct PendingSpawns {
    pending: BTreeMap<u64, PendingSpawn>,
    last_number: u64,
    /// The host that got the last task.
    last_host: Option<HostId>,
    /// The last logged refusal of this host's owner, and its time.
    last_refusal: Option<(Micros, String)>,
}

/// The requester of a start of tasks on this host.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExecRequester {
    Answer(ReplyAddress),
    /// A resource manager, with the wait id of its request.
    Rm {
        rm: Tid,
        wid: i32,
    },
    /// No requester: a command from this daemon's configuration.
    Startup,
}

/// Tasks to start at the end of the current event, when [`World`] is available.
#[derive(Debug)]
pub(super) struct ExecJob {
    parent: Tid,
    request: SpawnRequest,
    requester: ExecRequester,
}

impl ExecJob {
    /// True for tasks that the daemon or the resource manager starts for its own purposes. The
    /// policy of the host's owner does not apply to them.
    fn is_service(&self) -> bool {
        let own = match self.requester {
            ExecRequester::Startup => true,
            ExecRequester::Rm { rm, .. } => self.parent == rm,
            ExecRequester::Answer(_) => false,
        };
        own && self.request.flags & SPAWN_PINNED != 0
    }

    pub(super) fn request(&self) -> &SpawnRequest {
        &self.request
    }
}

/// Splits `place` into its host part and its directory part.
fn split_place(place: &str) -> (&str, Option<&str>) {
    match place.split_once(':') {
        Some((host, dir)) => (host, Some(dir).filter(|dir| !dir.is_empty())),
        None => (place, None),
    }
}

impl Machine {
    /// Handles a spawn on the hosts of a placement lease.
    pub(super) fn spawn_leased(
        &mut self,
        tid: Tid,
        id: RequestId,
        request: SpawnRequest,
        grant: LeasedSpawn,
    ) {
        let reason = if self.rm.current().is_none_or(|rm| rm.tid != grant.rm) {
            format!(
                "{} is not the resource manager any more; its placement lease is void",
                grant.rm
            )
        } else if request.count as usize != grant.hosts.len() {
            format!(
                "the placement lease is for {} tasks, not for {}",
                grant.hosts.len(),
                request.count
            )
        } else if grant.hosts.len() > LEASE_TASKS_MAX {
            format!(
                "a placement lease does not cover {} tasks in one request; {LEASE_TASKS_MAX} is the most",
                request.count
            )
        } else {
            return self.spawn(tid, id, request, Some(grant));
        };
        self.reply_error(tid, id, PvmError::Denied, reason);
    }

    /// Handles a spawn. Without a lease its tasks are placed round robin.
    pub(super) fn spawn(
        &mut self,
        tid: Tid,
        id: RequestId,
        request: SpawnRequest,
        lease: Option<LeasedSpawn>,
    ) {
        if request.count == 0 {
            return self.reply_error(
                tid,
                id,
                PvmError::BadParam,
                "a spawn must request at least one task",
            );
        }
        if request.count > SPAWN_COUNT_MAX {
            let reason = format!(
                "{} tasks were requested in one spawn; {SPAWN_COUNT_MAX} is the most",
                request.count
            );
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        if let Err(why) = restart_engine::launch_info_of(&request) {
            return self.reply_error(tid, id, PvmError::BadParam, why);
        }
        let count = request.count as usize;
        self.spawns.last_number += 1;
        let number = self.spawns.last_number;
        let spawn = PendingSpawn {
            tid,
            id,
            request,
            results: vec![None; count],
            open_parts: BTreeMap::new(),
            last_part: 0,
            excluded_hosts: Vec::new(),
            lease,
        };
        self.spawns.pending.insert(number, spawn);
        self.assign_hosts(number, (0..count).collect(), PvmError::NoHost);
    }

    /// Returns the hosts that the request permits, in the order of the table.
    fn candidates(&self, request: &SpawnRequest) -> Vec<HostId> {
        let (place, _) = split_place(&request.place);
        let own = &self.config.name;
        let chosen = |host: &sempa_proto::table::HostEntry| {
            if request.flags & SPAWN_HOST != 0 {
                host.name == place || (place == "." && host.name == *own)
            } else if request.flags & SPAWN_ARCH != 0 {
                host.arch == place
            } else {
                true
            }
        };
        let complement = request.flags & SPAWN_COMPLEMENT != 0;
        // Without a restriction the complement is empty, as in PVM.
        self.table
            .hosts
            .iter()
            .filter(|h| chosen(h) != complement)
            .map(|h| h.id)
            .collect()
    }

    /// Assigns tasks of a spawn to the hosts of its lease, or in blocks to the permitted hosts.
    /// Tasks without a host fail with the error `error_without_host`.
    fn assign_hosts(&mut self, number: u64, indices: Vec<usize>, error_without_host: PvmError) {
        let Some(spawn) = self.spawns.pending.get(&number) else {
            return;
        };
        if let Some(grant) = &spawn.lease {
            let mut blocks: BTreeMap<HostId, Vec<usize>> = BTreeMap::new();
            indices
                .iter()
                .for_each(|index| blocks.entry(grant.hosts[*index]).or_default().push(*index));
            let (available, gone): (TaskPositionsByHost, TaskPositionsByHost) = blocks
                .into_iter()
                .partition(|(host, _)| self.table.get(*host).is_some());
            return self.request_parts(
                number,
                available,
                gone.into_iter().flat_map(|(_, block)| block),
                error_without_host,
            );
        }
        let mut hosts = self.candidates(&spawn.request);
        hosts.retain(|host| !spawn.excluded_hosts.contains(host));
        let from = self.spawns.last_host.unwrap_or(self.config.host);
        let start = hosts.iter().position(|host| *host > from).unwrap_or(0);
        hosts.rotate_left(start);
        hosts.truncate(indices.len());
        if hosts.is_empty() {
            return self.request_parts(number, Vec::new(), indices, error_without_host);
        }
        // A request that names a host does not advance the round robin, as in PVM.
        if !spawn.request.names_one_host() {
            self.spawns.last_host = hosts.last().copied();
        }
        let (each, more) = (indices.len() / hosts.len(), indices.len() % hosts.len());
        let mut rest = indices.into_iter();
        let mut block = |n: usize| rest.by_ref().take(each + usize::from(n < more)).collect();
        let blocks = hosts
            .into_iter()
            .enumerate()
            .map(|(n, host)| (host, block(n)))
            .collect();
        self.request_parts(number, blocks, [], error_without_host);
    }

    /// Requests each host to start its tasks of a spawn. The tasks at the positions `failed` fail
    /// with `error`.
    fn request_parts(
        &mut self,
        number: u64,
        blocks: TaskPositionsByHost,
        failed: impl IntoIterator<Item = usize>,
        error: PvmError,
    ) {
        let Some(spawn) = self.spawns.pending.get_mut(&number) else {
            return;
        };
        for index in failed {
            spawn.results[index] = Some(Err(error));
        }
        let mut questions = Vec::new();
        for (host, block) in blocks {
            spawn.last_part += 1;
            let request = SpawnRequest {
                count: block.len() as u32,
                ..spawn.request.clone()
            };
            questions.push((
                host,
                spawn.last_part,
                HostRequest::Exec {
                    parent: spawn.tid,
                    request,
                },
            ));
            spawn.open_parts.insert(spawn.last_part, (host, block));
        }
        if questions.is_empty() {
            return self.reply_if_spawned(number);
        }
        for (host, part, question) in questions {
            self.call_host(
                host,
                question,
                RpcPurpose::Spawn {
                    spawn: number,
                    part,
                },
            );
        }
    }

    /// Handles the results of one part, or the loss of its host.
    pub(super) fn handle_part_spawned(
        &mut self,
        number: u64,
        part: u64,
        results: Result<SpawnResults, PvmError>,
    ) {
        let Some(spawn) = self.spawns.pending.get_mut(&number) else {
            return;
        };
        let Some((host, block)) = spawn.open_parts.remove(&part) else {
            return;
        };
        // With a lease, only the resource manager may choose another host.
        let may_reassign = spawn.lease.is_none() && !spawn.request.has_fixed_place();
        let started = match results {
            Ok(started) => started,
            Err(_) if may_reassign => {
                spawn.excluded_hosts.push(host);
                return self.assign_hosts(number, block, PvmError::HostFail);
            }
            Err(error) => vec![Err(error); block.len()],
        };
        let (mut started, mut reassigned) = (started.into_iter(), Vec::new());
        for index in block {
            match started.next().unwrap_or(Err(PvmError::DSysErr)) {
                Err(GUEST_REFUSED) if may_reassign => reassigned.push(index),
                result => spawn.results[index] = Some(result),
            }
        }
        if reassigned.is_empty() {
            return self.reply_if_spawned(number);
        }
        spawn.excluded_hosts.push(host);
        self.assign_hosts(number, reassigned, GUEST_REFUSED);
    }

    /// Replies to the spawner if all results are there.
    fn reply_if_spawned(&mut self, number: u64) {
        if self
            .spawns
            .pending
            .get(&number)
            .is_none_or(|s| !s.open_parts.is_empty() || s.results.contains(&None))
        {
            return;
        }
        let Some(PendingSpawn {
            tid,
            id,
            request,
            results,
            lease,
            ..
        }) = self.spawns.pending.remove(&number)
        else {
            return;
        };
        let results: SpawnResults = results.into_iter().flatten().collect();
        let (mut output, mut trace) = (request.output, request.trace);
        self.apply_tracer_sinks(&mut output, &mut trace);
        for child in results.iter().flatten() {
            let parent = visible_parent(tid, request.flags);
            self.report_output_requested(*child, parent, output);
            self.trace_task_request(trace, *child, parent);
        }
        let granted = lease.map(|LeasedSpawn { rm, wid, hosts }| {
            let tasks = hosts
                .into_iter()
                .zip(&results)
                .filter_map(|(host, result)| Some((host, (*result).ok()?)));
            (rm, wid, tasks.collect::<Vec<_>>())
        });
        self.reply(tid, id, Reply::Spawned(results));
        if let Some((rm, wid, tasks)) = granted.filter(|(_, _, tasks)| !tasks.is_empty()) {
            let hosts = tasks.iter().map(|(host, _)| *host).collect();
            self.defer(DeferredAction::ReportLeaseUse {
                rm,
                wid,
                lease_use: PlacementLeaseUse {
                    spawner: tid,
                    tasks,
                },
            });
            // Only the resource manager knows why it chose these hosts.
            let why = "by a placement lease of the resource manager".to_string();
            self.record_deferred(EventKind::Placed {
                name: request.file,
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

    /// Starts tasks on this host and answers the requester.
    pub(super) fn start_tasks(&mut self, world: &mut dyn World, mut job: ExecJob) {
        self.apply_tracer_sinks(&mut job.request.output, &mut job.request.trace);
        let count = job.request.count.min(SPAWN_COUNT_MAX);
        let launch = restart_engine::launch_info_of(&job.request);
        let places = self.permitted_count(&job);
        let program = if let Err(why) = &launch {
            // A request of the resource manager has not been checked before.
            self.log_warning_and_record(format!("{} was not started: {why}", job.request.file));
            Err(PvmError::BadParam)
        } else if self.tasker_gone || self.shutdown.is_some() {
            Err(PvmError::DSysErr)
        } else if places == 0 {
            Err(GUEST_REFUSED)
        } else {
            find_program(world, &job.request)
        };
        let mut orders = Vec::new();
        let started: SpawnResults = match program {
            Ok((path, argv)) => {
                let base = StartTask {
                    tid: Tid::NONE,
                    path,
                    argv,
                    env: self.environment(world, &job.request),
                    working_dir: world.work_dir(split_place(&job.request.place).1),
                    pinned: job.request.flags & SPAWN_PINNED != 0,
                };
                let launch = launch.unwrap_or_default();
                let start = |n| match (n as usize) < places {
                    true => {
                        self.start_task(world, &job, n, (base.clone(), launch.clone()), &mut orders)
                    }
                    false => Err(GUEST_REFUSED),
                };
                (0..count).map(start).collect()
            }
            Err(error) => vec![Err(error); count as usize],
        };
        if started.contains(&Err(GUEST_REFUSED))
            && let Some(refusal) = self.guest_refusal(Tid::NONE, &job.request.file)
        {
            self.log_refusal(format!("{} not started: {refusal}", job.request.file));
        }
        match job.requester {
            ExecRequester::Answer(back) => {
                self.send_host_reply(back, HostReply::Reply(Reply::Spawned(started.clone())))
            }
            ExecRequester::Rm { rm, wid } => {
                self.send_daemon_message(rm, 0, SM_EXECACK, wid, pack_tids(&started))
            }
            ExecRequester::Startup => {
                let file = &job.request.file;
                if let Some(Err(error)) = started.first().filter(|_| is_load_watcher(file)) {
                    self.handle_watcher_start_failure(*error);
                } else if let Some(Err(error)) = started.first() {
                    let text = format!(
                        "{file} could not be started: {error}; this daemon does its work itself"
                    );
                    self.log_warning_and_record(text);
                }
            }
        }
        // After the answer: the tasker has a higher priority. On the same processor it would delay
        // the answer until the first process exists.
        orders
            .into_iter()
            .for_each(|order| self.send_to_tasker(order));
        let (parent, user) = (
            visible_parent(job.parent, job.request.flags),
            self.config.uid,
        );
        for tid in started.into_iter().flatten() {
            self.record_deferred(EventKind::TaskStarted {
                tid,
                parent,
                name: job.request.file.clone(),
                user,
            });
        }
    }

    /// Returns the number of tasks of this job that the owner of this host permits at present.
    fn permitted_count(&self, job: &ExecJob) -> usize {
        match job.is_service() {
            true => usize::MAX,
            false => self
                .free_slots_for(Tid::NONE, &job.request.file)
                .unwrap_or(0),
        }
    }

    /// Logs why tasks were not started. A repeated reason is logged at most once in
    /// [`REFUSAL_LOG_INTERVAL`].
    fn log_refusal(&mut self, text: String) {
        let last = &self.spawns.last_refusal;
        if last.as_ref().is_none_or(|(at, before)| {
            *before != text || self.now.since(*at) >= REFUSAL_LOG_INTERVAL
        }) {
            self.spawns.last_refusal = Some((self.now, text.clone()));
            self.log_and_record(text);
        }
    }

    fn start_task(
        &mut self,
        world: &mut dyn World,
        job: &ExecJob,
        instance: u32,
        (mut start, begin): (StartTask, Option<Box<LaunchInfo>>),
        orders: &mut Vec<ToTasker>,
    ) -> Result<Tid, PvmError> {
        let tid = self
            .tasks
            .allocate(self.config.host)
            .ok_or(PvmError::OutOfRes)?;
        let mut spawn_token = world.random_secret();
        while self.tasks.by_spawn_token.contains_key(&spawn_token) {
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
        task.name = request.file.clone();
        task.spawn_token = Some(spawn_token);
        task.pinned = request.flags & SPAWN_PINNED != 0;
        task.debugged = request.flags & SPAWN_DEBUG != 0;
        task.is_service = job.is_service();
        task.launch = begin;
        (task.output, task.trace) = (request.output, request.trace);
        // The daemon starts its own programs itself.
        let tasker = self
            .service_tasks
            .tasker()
            .filter(|_| !matches!(job.requester, ExecRequester::Startup));
        task.tasker = tasker;
        task.flags = if tasker.is_some() { 0 } else { TASK_FORKED };
        let by_rm = match job.requester {
            ExecRequester::Rm { rm, .. } => Some(rm),
            _ => None,
        };
        task.rm = by_rm;
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
                    position: [instance as i32, request.count as i32, request.count as i32],
                };
                self.request_task_start(tasker, &task, order);
            }
            None => orders.push(ToTasker::Start(start)),
        }
        self.trace_task_start(&task);
        self.tasks.insert(task);
        if by_rm.is_some() {
            // The spawner's daemon does not know this task.
            self.report_output_requested(tid, parent, request.output);
        }
        self.report_output_started(tid, parent, request.output);
        Ok(tid)
    }

    /// Returns the variables that this daemon sets for a new task.
    pub(super) fn daemon_environment(&self, request: &SpawnRequest) -> Vec<Vec<u8>> {
        let mut own = vec![
            format!("PVMSOCK={}", self.config.paths.daemon_socket().display()).into_bytes(),
            format!("PVM_ARCH={}", self.config.arch).into_bytes(),
        ];
        if let (_, Some(dir)) = split_place(&request.place) {
            own.push(format!("PVMSPAWNWD={dir}").into_bytes());
        }
        own
    }

    /// Returns the environment of a new task except its `PVMEPID`: the variables of the host, the
    /// spawner and this daemon. The last entry for a name counts.
    pub(super) fn environment(&self, world: &dyn World, request: &SpawnRequest) -> Vec<Vec<u8>> {
        let own = self.daemon_environment(request);
        let name = |entry: &[u8]| entry.iter().position(|b| *b == b'=').unwrap_or(entry.len());
        let all: Vec<Vec<u8>> = world
            .base_env()
            .into_iter()
            .chain(request.env.iter().cloned())
            .chain(own)
            .collect();
        let last: HashMap<&[u8], usize> = all
            .iter()
            .enumerate()
            .map(|(n, entry)| (&entry[..name(entry)], n))
            .collect();
        let is_last = |n: usize, entry: &[u8]| last.get(&entry[..name(entry)]) == Some(&n);
        let is_kept: Vec<bool> = all
            .iter()
            .enumerate()
            .map(|(n, entry)| is_last(n, entry) && &entry[..name(entry)] != SPAWN_TOKEN_VARIABLE)
            .collect();
        all.into_iter()
            .zip(is_kept)
            .filter_map(|(entry, is_kept)| is_kept.then_some(entry))
            .collect()
    }

    /// Handles the report that the tasker could not create a process. To other tasks it appears as
    /// a task that has ended immediately.
    pub(super) fn handle_start_failure(&mut self, tid: Tid, why: &str) {
        self.log_warning_and_record(format!("{tid} could not be started: {why}"));
        let used = self
            .tasks
            .get(tid)
            .map(|task| task.earlier_usage)
            .unwrap_or_default();
        self.end_task(tid, 0x100, used);
    }
}

/// Name of the environment variable with the spawn token of a process. The children of a process
/// must not inherit it.
const SPAWN_TOKEN_VARIABLE: &[u8] = b"PVMEPID";

/// Returns the parent that a child is permitted to know.
fn visible_parent(parent: Tid, flags: i32) -> Tid {
    if flags & SPAWN_NO_PARENT != 0 {
        Tid::from_raw(PvmError::ParentNotSet.code())
    } else {
        parent
    }
}

/// Returns the program to run and its arguments; for a debugged task the debugger precedes them.
pub(super) fn find_program(
    world: &dyn World,
    request: &SpawnRequest,
) -> Result<(std::path::PathBuf, Vec<Vec<u8>>), PvmError> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let path = world.find_program(&request.file, split_place(&request.place).1)?;
    let mut argv = vec![bytes(&path)];
    argv.extend(request.args.iter().cloned());
    if request.flags & SPAWN_DEBUG == 0 {
        return Ok((path, argv));
    }
    let named = world
        .base_env()
        .into_iter()
        .find_map(|e| e.strip_prefix(b"PVM_DEBUGGER=").map(<[u8]>::to_vec));
    let debugger = named.map_or_else(
        || DEFAULT_DEBUGGER.to_string(),
        |d| String::from_utf8_lossy(&d).into_owned(),
    );
    let debugger = world.find_program(&debugger, None)?;
    argv.insert(0, bytes(&debugger));
    Ok((debugger, argv))
}
