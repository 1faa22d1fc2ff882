//! Spawn requests that are being carried out. A request is placed, its orders are sent to the
//! hosts, the hosts acknowledge them, and the request is answered. Pure; the service carries out
//! the output of [`Spawns::poll`].
//!
//! No request waits forever. If a host is lost or does not acknowledge in time, its tasks are
//! placed on other hosts, unless the request names the host. Tasks that such a host starts too late
//! are terminated. A failure on one host is handled as in PVM: if a program is not found there, all
//! tasks of that host fail.
//!
//! A request that finds no free host, or that exceeds a limit, may wait for a time that the
//! administrator sets. After every change, waiting requests are retried in the order of the Up-Down
//! scheme.

mod placing;
pub mod refusals;
mod wait_queue;

use crate::decide::{Colocation, Constraints, FairShare, Limits};
use crate::recent::RecentSet;
use crate::store::history::ATTEMPTS_MAX;
use bytes::Bytes;
use refusals::RefusalLog;
use sempa_proto::event::EventKind;
use sempa_proto::owner::GUEST_REFUSED;
use sempa_proto::rm::{DecisionKind, PlacementAttempt};
use sempa_proto::sm::pack_tids;
use sempa_proto::task::{SPAWN_NO_PARENT, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use wait_queue::Reservation;

pub use crate::decide::SPAWN_TASKS_MAX;

/// Maximum number of pending requests; further ones are refused with `OutOfRes`.
pub const PENDING_SPAWNS_MAX: usize = 1024;
/// Timeout for a host's acknowledgement of an order.
pub const START_ACK_TIMEOUT: Micros = Micros::from_secs(20);
/// Timeout of a request, in addition to its waiting time. Tasks that have not started by then have
/// failed.
pub const SPAWN_TIMEOUT: Micros = Micros::from_secs(60);
/// Time for which a host that declined tasks of a request gets no other task of that request. The
/// load watcher's report, which explains the refusal, arrives within this time.
const DECLINED_WINDOW: Micros = Micros::from_secs(5);
/// Maximum number of placement attempts that are recorded per request. Beyond it, the second oldest
/// attempt is dropped, so that the first one is kept.
const KEPT_ATTEMPTS_MAX: usize = 2 * ATTEMPTS_MAX;
/// Maximum number of abandoned orders whose wait id is remembered, to recognize a late
/// acknowledgement.
const LATE_ORDERS_MAX: usize = 4096;

/// Identifies an order to one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StartOrderId(u64);

/// A spawn request as it arrived.
#[derive(Clone, Debug, PartialEq)]
pub struct SpawnIncoming {
    pub requester: Tid,
    /// Wait id of the request.
    pub wid: i32,
    /// Host of the requesting task.
    pub caller: HostId,
    pub user: u32,
    pub job: Tid,
    pub request: SpawnRequest,
    /// Time for which the request had already waited at an earlier resource manager.
    pub waited: Micros,
}

impl SpawnIncoming {
    /// Returns the output that records the result of the request in the history.
    fn decision_output(
        &self,
        started: Vec<(Tid, String)>,
        error: Option<PvmError>,
        waited: Micros,
        attempts: Vec<PlacementAttempt>,
    ) -> SpawnOutput {
        let (program, by, count) = (
            self.request.file.clone(),
            self.requester,
            self.request.count,
        );
        let (job, user) = (self.job, self.user);
        SpawnOutput::RecordDecision(DecisionKind::Spawn {
            program,
            requested_by: by,
            job,
            user,
            count,
            started,
            error,
            waited,
            attempts,
        })
    }

    /// Returns the event for a request that failed before any task was started.
    fn failure_event(&self, error: PvmError, why: &str) -> EventKind {
        EventKind::Note {
            text: format!(
                "{} was not started for {}: {error} ({why})",
                self.request.file, self.requester
            ),
        }
    }
}

/// Action that the service must carry out.
#[derive(Clone, Debug, PartialEq)]
pub enum SpawnOutput {
    /// Send an order to a host, then call [`Spawns::order_sent`].
    StartTasks {
        order: StartOrderId,
        host: HostId,
        /// Parent of the new tasks.
        parent: Tid,
        request: SpawnRequest,
        /// Memory in bytes that all of these tasks need in total.
        memory: u64,
    },
    /// Notify the requesting task that its request waits for a host, or that it stops waiting. None
    /// of its tasks has started while it waits, so the task may send the request again to another
    /// resource manager.
    NotifyWait {
        to: Tid,
        /// Wait id of the request.
        wid: i32,
        /// Time for which the request has waited; `None` if it stops waiting.
        waited: Option<Micros>,
    },
    /// Send the answer to a request.
    Reply {
        to: Tid,
        /// Wait id of the request.
        wid: i32,
        body: Bytes,
    },
    /// All tasks of a request were started by its first placement, without waiting.
    FullyAnswered(SpawnIncoming),
    /// A task runs on a host.
    Started {
        tid: Tid,
        host: HostId,
        /// True if the request named the host.
        host_named: bool,
        /// True if the request pins the task to its host.
        pinned: bool,
        /// Constraints of the request.
        constraints: Constraints,
        /// User and job of the requesting task.
        by: (u32, Tid),
        /// True if the requesting task is the new task's parent, so that the new task belongs to
        /// the same job.
        child: bool,
    },
    /// Terminate a task that was started too late for its request.
    Terminate { tid: Tid },
    /// Add an event to the event log.
    LogEvent(EventKind),
    /// Record a decision in the history.
    RecordDecision(DecisionKind),
}

/// A task that was started by a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedTask {
    pub tid: Tid,
    pub host: HostId,
    /// Name of the host.
    pub host_name: String,
}

#[derive(Debug)]
struct PendingSpawn {
    from: SpawnIncoming,
    deadline: Micros,
    began_at: Micros,
    /// When the request was last placed or refused.
    placed_at: Micros,
    /// Time until which the request may wait for a host.
    wait_until: Micros,
    /// True if the requesting task was notified that its request waits.
    wait_notified: bool,
    results: Vec<Option<PvmResult<Tid>>>,
    hosts: Vec<Option<HostId>>,
    unplaced: Vec<usize>,
    lost_hosts: Vec<HostId>,
    /// Hosts that declined tasks of this request, with the time from which they may be used again.
    declined_until: BTreeMap<HostId, Micros>,
    attempts: Vec<PlacementAttempt>,
    /// Reason why the request waits, for users.
    wait_reason: String,
    /// Names of the hosts chosen for tasks of this request.
    host_names: BTreeMap<HostId, String>,
}

#[derive(Debug)]
struct StartOrder {
    spawn: u64,
    host: HostId,
    tasks: Vec<usize>,
    deadline: Micros,
    wid: Option<i32>,
}

/// All pending spawn requests, the task limits, and the Up-Down state of the users.
#[derive(Debug)]
pub struct Spawns {
    last_number: u64,
    pending: BTreeMap<u64, PendingSpawn>,
    orders: BTreeMap<StartOrderId, StartOrder>,
    placement_queue: VecDeque<u64>,
    late_orders: RecentSet<i32>,
    outputs: VecDeque<SpawnOutput>,
    rules: SpawnRules,
    fair: FairShare,
    /// Requests that wait for a host.
    waiting: BTreeSet<u64>,
    /// Reservation for a waiting request, if there is one.
    reservation: Option<Reservation>,
    /// User and job of each running task that counts against the limits.
    tasks: BTreeMap<Tid, (u32, Tid)>,
    jobs: BTreeMap<Tid, u32>,
    /// Suspended tasks with their users. They count against limits but hold no processor.
    suspended: BTreeMap<Tid, u32>,
    refusals: RefusalLog,
}

/// Waiting time of requests, and limits on the number of tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRules {
    /// Maximum time for which a request may wait for a free host. Zero: a request that finds no
    /// host is refused immediately.
    pub wait: Micros,
    pub limits: Limits,
}

impl Default for Spawns {
    fn default() -> Spawns {
        Spawns::new(SpawnRules::default())
    }
}

impl Spawns {
    pub fn new(rules: SpawnRules) -> Spawns {
        Spawns {
            last_number: 0,
            pending: BTreeMap::new(),
            orders: BTreeMap::new(),
            placement_queue: VecDeque::new(),
            late_orders: RecentSet::new(LATE_ORDERS_MAX),
            outputs: VecDeque::new(),
            rules,
            fair: FairShare::default(),
            waiting: BTreeSet::new(),
            reservation: None,
            tasks: BTreeMap::new(),
            jobs: BTreeMap::new(),
            suspended: BTreeMap::new(),
            refusals: RefusalLog::default(),
        }
    }

    /// Replaces the rules. The new waiting time applies to new requests only; new limits apply to
    /// waiting requests, too.
    pub fn set_rules(&mut self, rules: SpawnRules) {
        self.rules = rules;
    }

    /// Accepts a request. The next [`Spawns::place_next`] places it, unless it is refused
    /// immediately.
    pub fn accept(&mut self, now: Micros, from: SpawnIncoming) {
        let count = from.request.count;
        let refusal = match count {
            0 => Some((PvmError::BadParam, "it requests no tasks".to_string())),
            n if n > SPAWN_TASKS_MAX => Some((
                PvmError::OutOfRes,
                format!("a spawn may request at most {SPAWN_TASKS_MAX} tasks"),
            )),
            _ if self.pending.len() >= PENDING_SPAWNS_MAX => Some((
                PvmError::OutOfRes,
                format!("{PENDING_SPAWNS_MAX} spawns are in progress or waiting already"),
            )),
            _ => None,
        };
        if let Some((error, why)) = refusal {
            return self.refuse_and_log(now, &from, error, why);
        }
        let count = count as usize;
        self.last_number += 1;
        self.placement_queue.push_back(self.last_number);
        let wait = Micros(self.rules.wait.0.saturating_sub(from.waited.0));
        let spawn = PendingSpawn {
            from,
            deadline: now + wait + SPAWN_TIMEOUT,
            began_at: now,
            placed_at: now,
            wait_until: now + wait,
            wait_notified: false,
            results: vec![None; count],
            hosts: vec![None; count],
            unplaced: (0..count).collect(),
            lost_hosts: Vec::new(),
            declined_until: BTreeMap::new(),
            attempts: Vec::new(),
            wait_reason: String::new(),
            host_names: BTreeMap::new(),
        };
        self.pending.insert(self.last_number, spawn);
    }

    /// True if a request is queued for [`Spawns::place_next`].
    pub fn has_unplaced(&self) -> bool {
        !self.placement_queue.is_empty()
    }

    /// Counts a running task for its user and job.
    pub fn task_started(&mut self, now: Micros, tid: Tid, by: (u32, Tid)) {
        if self.tasks.insert(tid, by).is_none() {
            self.fair.acquire(now, by.0, 1);
            *self.jobs.entry(by.1).or_default() += 1;
        }
    }

    /// Records that a task was suspended or resumed. A suspended task holds no processor.
    pub fn task_suspended(&mut self, now: Micros, tid: Tid, suspend: bool) {
        let Some((user, _)) = self.tasks.get(&tid) else {
            return;
        };
        if suspend && self.suspended.insert(tid, *user).is_none() {
            self.fair.release(now, *user, 1);
        } else if !suspend && self.suspended.remove(&tid).is_some() {
            self.fair.acquire(now, *user, 1);
        }
    }

    /// Returns the number of pending requests of a job. Requests of the task `except` do not count.
    pub fn pending_spawns_of(&self, job: Tid, except: Tid) -> usize {
        self.pending
            .values()
            .filter(|spawn| spawn.from.job == job && spawn.from.requester != except)
            .count()
    }

    /// Returns the hosts on which tasks are being started.
    pub fn hosts_starting_tasks(&self) -> BTreeSet<HostId> {
        self.orders.values().map(|order| order.host).collect()
    }

    /// Returns the number of tasks that are being started, by host. Pinned tasks do not count.
    pub fn starting_tasks(&self) -> BTreeMap<HostId, u32> {
        let mut starting = BTreeMap::new();
        let is_load = |order: &&StartOrder| {
            self.pending
                .get(&order.spawn)
                .is_some_and(|spawn| spawn.from.request.flags & SPAWN_PINNED == 0)
        };
        for order in self.orders.values().filter(is_load) {
            *starting.entry(order.host).or_default() += order.tasks.len() as u32;
        }
        starting
    }

    /// True if the task counts against the limits.
    pub fn is_counted(&self, tid: Tid) -> bool {
        self.tasks.contains_key(&tid)
    }

    /// Returns the indices and holdings of the users.
    pub fn fair_share(&self) -> &FairShare {
        &self.fair
    }

    /// Restores a user's index from the history. `ago`: time since it was stored.
    pub fn restore_index(&mut self, now: Micros, user: u32, index: f64, ago: Micros) {
        self.fair.restore_index(now, user, index, ago);
    }

    /// Removes tasks for which `is_known` is false from the limits. Their end may have been missed.
    pub fn forget_tasks(&mut self, now: Micros, is_known: impl Fn(Tid) -> bool) {
        let gone: Vec<Tid> = self
            .tasks
            .keys()
            .copied()
            .filter(|tid| !is_known(*tid))
            .collect();
        gone.into_iter().for_each(|tid| self.task_ended(now, tid));
    }

    /// Records the end of a task: releases its processor, and drops its waiting requests.
    pub fn task_ended(&mut self, now: Micros, tid: Tid) {
        if let Some((user, job)) = self.tasks.remove(&tid) {
            if self.suspended.remove(&tid).is_none() {
                self.fair.release(now, user, 1);
            }
            if let Some(count) = self.jobs.get_mut(&job) {
                *count -= 1;
                if *count == 0 {
                    self.jobs.remove(&job);
                }
            }
        }
        let asked = |n: &u64| {
            self.pending
                .get(n)
                .filter(|s| s.from.requester == tid)
                .map(|s| (*n, s.from.user))
        };
        let gone: Vec<(u64, u32)> = self.waiting.iter().filter_map(asked).collect();
        for (number, user) in gone {
            self.stop_waiting(now, user, number);
            self.pending.remove(&number);
        }
    }

    /// Records the wait id of an order that was sent; `None` if it could not be sent.
    pub fn order_sent(&mut self, order: StartOrderId, wid: Option<i32>) {
        match (self.orders.get_mut(&order), wid) {
            (Some(order), Some(wid)) => order.wid = Some(wid),
            (Some(_), None) => self.abandon_order(order),
            // The order was abandoned before it was sent. The tasks that it starts must be
            // terminated.
            (None, Some(wid)) => self.late_orders.insert(wid),
            (None, None) => {}
        }
    }

    /// Handles a host's acknowledgement of an order. False if no order has this wait id.
    pub fn order_acknowledged(
        &mut self,
        now: Micros,
        wid: i32,
        started: PvmResult<Vec<PvmResult<Tid>>>,
    ) -> bool {
        let found = self
            .orders
            .iter()
            .find(|(_, o)| o.wid == Some(wid))
            .map(|(id, _)| *id);
        let Some(id) = found else {
            if !self.late_orders.contains(wid) {
                return false;
            }
            let tids = started.into_iter().flatten().flatten();
            self.outputs
                .extend(tids.map(|tid| SpawnOutput::Terminate { tid }));
            return true;
        };
        let order = self.orders.remove(&id).expect("found a moment ago");
        let Some(spawn) = self.pending.get_mut(&order.spawn) else {
            return true;
        };
        let missing_error = match &started {
            Ok(_) => PvmError::DSysErr,
            Err(error) => *error,
        };
        let results = started
            .unwrap_or_default()
            .into_iter()
            .chain(std::iter::repeat(Err(missing_error)));
        let results: Vec<PvmResult<Tid>> = results.take(order.tasks.len()).collect();
        let (may_retry, mut declined_tasks) = (spawn.may_retry_elsewhere(&results), Vec::new());
        for (task, result) in order.tasks.into_iter().zip(results) {
            if may_retry && result == Err(GUEST_REFUSED) {
                declined_tasks.push(task);
                continue;
            }
            spawn.results[task] = Some(result);
            spawn.hosts[task] = result.is_ok().then_some(order.host);
            self.outputs.extend(
                result
                    .ok()
                    .map(|tid| started_output(&spawn.from, tid, order.host)),
            );
        }
        if declined_tasks.is_empty() {
            self.finish_if_complete(order.spawn);
        } else {
            spawn
                .declined_until
                .insert(order.host, now + DECLINED_WINDOW);
            self.queue_for_placement(order.spawn, declined_tasks);
        }
        true
    }

    /// Handles the loss of a host: tasks that were to start there are placed on other hosts.
    pub fn host_gone(&mut self, host: HostId) {
        let lost: Vec<StartOrderId> = self
            .orders
            .iter()
            .filter(|(_, o)| o.host == host)
            .map(|(id, _)| *id)
            .collect();
        lost.into_iter().for_each(|order| self.abandon_order(order));
    }

    /// Abandons orders and requests whose timeout has expired.
    pub fn tick(&mut self, now: Micros) {
        let slow: Vec<StartOrderId> = self
            .orders
            .iter()
            .filter(|(_, o)| o.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        slow.into_iter().for_each(|order| self.abandon_order(order));
        let waited = |n: &u64| {
            self.pending
                .get(n)
                .filter(|s| s.wait_until <= now)
                .map(|s| (*n, s.from.user))
        };
        let waited: Vec<(u64, u32)> = self.waiting.iter().filter_map(waited).collect();
        for (number, user) in waited {
            self.stop_waiting(now, user, number);
            self.placement_queue.push_back(number);
        }
        let out_of_time: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, s)| s.deadline <= now)
            .map(|(n, _)| *n)
            .collect();
        for number in out_of_time {
            if let Some(spawn) = self.pending.get_mut(&number) {
                spawn.unplaced.clear();
                for result in spawn.results.iter_mut().filter(|r| r.is_none()) {
                    *result = Some(Err(PvmError::HostFail));
                }
            }
            self.placement_queue.retain(|n| *n != number);
            self.finish_if_complete(number);
        }
    }

    /// Returns when [`Spawns::tick`] is due.
    pub fn next_deadline(&self) -> Option<Micros> {
        let waits = self
            .waiting
            .iter()
            .filter_map(|n| self.pending.get(n))
            .map(|s| s.wait_until);
        self.orders
            .values()
            .map(|o| o.deadline)
            .chain(self.pending.values().map(|s| s.deadline))
            .chain(waits)
            .min()
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<SpawnOutput> {
        self.outputs.pop_front()
    }

    /// Abandons an order that its host has not acknowledged in time. Its tasks are placed on other
    /// hosts, or fail if the request names the host.
    fn abandon_order(&mut self, order: StartOrderId) {
        let Some(order) = self.orders.remove(&order) else {
            return;
        };
        if let Some(wid) = order.wid {
            self.late_orders.insert(wid);
        }
        let Some(spawn) = self.pending.get_mut(&order.spawn) else {
            return;
        };
        spawn.lost_hosts.push(order.host);
        if spawn.from.request.has_fixed_place() {
            for task in order.tasks {
                spawn.results[task] = Some(Err(PvmError::HostFail));
            }
            return self.finish_if_complete(order.spawn);
        }
        self.queue_for_placement(order.spawn, order.tasks);
    }

    /// Queues tasks of a request for another placement.
    fn queue_for_placement(&mut self, number: u64, tasks: Vec<usize>) {
        let Some(spawn) = self.pending.get_mut(&number) else {
            return;
        };
        if spawn.unplaced.is_empty() {
            self.placement_queue.push_back(number);
        }
        spawn.unplaced.extend(tasks);
    }

    /// Answers and records a request if all its tasks have a result.
    fn finish_if_complete(&mut self, number: u64) {
        if self
            .pending
            .get(&number)
            .is_none_or(|s| s.results.contains(&None))
        {
            return;
        }
        let Some(spawn) = self.pending.remove(&number) else {
            return;
        };
        let results: Vec<PvmResult<Tid>> = spawn.results.into_iter().flatten().collect();
        let at_once =
            !spawn.wait_notified && spawn.from.waited == Micros(0) && spawn.attempts.len() == 1;
        let whole = at_once && results.iter().all(Result::is_ok);
        let answered = whole.then(|| SpawnOutput::FullyAnswered(spawn.from.clone()));
        let from = spawn.from;
        self.outputs.push_back(SpawnOutput::Reply {
            to: from.requester,
            wid: from.wid,
            body: pack_tids(&results),
        });
        let hosts: Vec<HostId> = spawn.hosts.into_iter().flatten().collect();
        let why = spawn
            .attempts
            .iter()
            .map(|a| a.reason.as_str())
            .collect::<Vec<_>>()
            .join("; then ");
        let failed = results.iter().filter_map(|r| r.as_ref().err()).next();
        let with_tids = results.iter().filter_map(|r| r.ok()).zip(&hosts);
        let name = |host: &HostId| {
            spawn
                .host_names
                .get(host)
                .cloned()
                .unwrap_or_else(|| host.to_string())
        };
        let started = with_tids.map(|(tid, host)| (tid, name(host))).collect();
        let waited = from.waited + spawn.placed_at.since(spawn.began_at);
        self.outputs.push_back(from.decision_output(
            started,
            failed.copied(),
            waited,
            spawn.attempts,
        ));
        let event = match (failed, hosts.is_empty()) {
            (Some(error), true) => from.failure_event(*error, &why),
            (Some(error), false) => {
                let missing = results.len() - hosts.len();
                let why = format!("{why}; {missing} of {} failed: {error}", results.len());
                EventKind::Placed {
                    name: from.request.file,
                    hosts,
                    why,
                }
            }
            (None, _) => EventKind::Placed {
                name: from.request.file,
                hosts,
                why,
            },
        };
        self.outputs.push_back(SpawnOutput::LogEvent(event));
        self.outputs.extend(answered);
    }

    /// Records tasks that were started by a grant, for which no request arrived here. Their daemon
    /// has reported their start to the event log.
    pub fn record_granted(
        &mut self,
        from: SpawnIncoming,
        started: Vec<GrantedTask>,
        attempt: PlacementAttempt,
    ) {
        self.outputs.extend(
            started
                .iter()
                .map(|one| started_output(&from, one.tid, one.host)),
        );
        let SpawnIncoming {
            requester: src,
            request,
            job,
            user,
            ..
        } = from;
        self.outputs
            .push_back(SpawnOutput::RecordDecision(DecisionKind::Spawn {
                program: request.file,
                requested_by: src,
                job,
                user,
                count: started.len() as u32,
                started: started
                    .into_iter()
                    .map(|one| (one.tid, one.host_name))
                    .collect(),
                error: None,
                waited: Micros(0),
                attempts: vec![attempt],
            }));
    }
}

impl PendingSpawn {
    /// True if tasks that a host declined may be placed on other hosts. Tasks that must share a
    /// host, or whose number per host is limited, may be only if all tasks of the request were
    /// declined.
    fn may_retry_elsewhere(&self, results: &[PvmResult<Tid>]) -> bool {
        if self.from.request.has_fixed_place() || !results.contains(&Err(GUEST_REFUSED)) {
            return false;
        }
        let apart = Constraints::from_request(&self.from.request)
            .is_ok_and(|constraints| constraints.colocation == Colocation::Any);
        apart
            || (results.len() == self.results.len()
                && results.iter().all(|one| *one == Err(GUEST_REFUSED)))
    }
}

/// Adds an attempt. If there are too many, drops the second oldest one.
fn add_attempt(attempts: &mut Vec<PlacementAttempt>, attempt: PlacementAttempt) {
    attempts.push(attempt);
    if attempts.len() > KEPT_ATTEMPTS_MAX {
        attempts.remove(1);
    }
}

/// Returns the output that reports a task of this request as started.
fn started_output(from: &SpawnIncoming, tid: Tid, host: HostId) -> SpawnOutput {
    let constraints = Constraints::from_request(&from.request).unwrap_or_default();
    let (named, pinned) = (
        from.request.names_one_host(),
        from.request.flags & SPAWN_PINNED != 0,
    );
    let child = from.request.flags & SPAWN_NO_PARENT == 0;
    SpawnOutput::Started {
        tid,
        host,
        host_named: named,
        pinned,
        constraints,
        by: (from.user, from.job),
        child,
    }
}

/// Returns the number of tasks of a user, and the number of tasks of a job. Suspended tasks count.
fn tasks_held(
    fair: &FairShare,
    suspended: &BTreeMap<Tid, u32>,
    jobs: &BTreeMap<Tid, u32>,
    (user, job): (u32, Tid),
) -> (u32, u32) {
    let suspended = suspended.values().filter(|of| **of == user).count();
    let suspended = u32::try_from(suspended).unwrap_or(u32::MAX);
    (
        fair.held(user).saturating_add(suspended),
        jobs.get(&job).copied().unwrap_or(0),
    )
}
