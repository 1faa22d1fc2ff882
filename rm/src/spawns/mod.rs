//! Spawn requests that are being carried out. A request is placed, its orders are sent to the
//! hosts, the hosts acknowledge the orders, and the request is answered. The module does no input
//! or output: the service carries out the output of [`Spawns::poll`].
//!
//! No request waits forever. If a host is lost or does not acknowledge in time, its tasks are
//! placed on other hosts, unless the request names the host. Tasks that such a host starts too late
//! are terminated. A failure on one host is handled as in PVM: if a program is not found there, all
//! tasks of the host fail.
//!
//! A request that finds no free host, or that exceeds a limit, may wait for a time that the
//! administrator sets. After every change, waiting requests are retried in the order of the Up-Down
//! scheme.

mod placing;
pub mod refusals;
mod wait_queue;

use crate::decide::{Colocation, Constraints, FairShare, TaskLimits};
use crate::recent_set::RecentSet;
use crate::store::history::ATTEMPTS_MAX;
use bytes::Bytes;
use refusals::RefusalLog;
use sempa_proto::event::EventKind;
use sempa_proto::owner::GUEST_REFUSED_ERROR;
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
/// Timeout of a request, in addition to its waiting time. Tasks that have not started when the
/// timeout expires have failed.
pub const SPAWN_TIMEOUT: Micros = Micros::from_secs(60);
/// Time for which a host that declined tasks of a request gets no other task of that request. The
/// load watcher's report, which explains the refusal, arrives within this time.
const DECLINED_WINDOW: Micros = Micros::from_secs(5);
/// Maximum number of placement attempts that are recorded per request. If there are more, the
/// second oldest attempt is removed, so that the first one remains.
const RECORDED_ATTEMPTS_MAX: usize = 2 * ATTEMPTS_MAX;
/// Maximum number of abandoned orders whose wait id is remembered, in order to recognize a late
/// acknowledgement.
const ABANDONED_ORDERS_MAX: usize = 4096;

/// Id of an order to one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StartOrderId(u64);

/// A spawn request as it arrived at the resource manager.
#[derive(Clone, Debug, PartialEq)]
pub struct IncomingSpawn {
    pub requester: Tid,
    /// Wait id of the request.
    pub wait_id: i32,
    /// Host of the requesting task.
    pub caller_host: HostId,
    pub user: u32,
    pub job: Tid,
    pub request: SpawnRequest,
    /// Time for which the request had already waited at an earlier resource manager.
    pub earlier_wait: Micros,
}

impl IncomingSpawn {
    /// Returns the output that records the result of the request in the history.
    fn decision_output(
        &self,
        started_tasks: Vec<(Tid, String)>,
        error: Option<PvmError>,
        wait_time: Micros,
        attempts: Vec<PlacementAttempt>,
    ) -> SpawnOutput {
        let (program, requesting_task, count) = (
            self.request.program.clone(),
            self.requester,
            self.request.task_count,
        );
        let (job, user) = (self.job, self.user);
        SpawnOutput::RecordDecision(DecisionKind::Spawn {
            program,
            requested_by: requesting_task,
            job,
            user,
            count,
            started: started_tasks,
            error,
            waited: wait_time,
            attempts,
        })
    }

    /// Returns the event for a request that failed before any task was started.
    fn failure_event(&self, error: PvmError, reason: &str) -> EventKind {
        EventKind::Note {
            text: format!(
                "{} was not started for {}: {error} ({reason})",
                self.request.program, self.requester
            ),
        }
    }
}

/// Action that the service must carry out.
#[derive(Clone, Debug, PartialEq)]
pub enum SpawnOutput {
    /// Send an order to a host, then call [`Spawns::record_order_sent`].
    StartTasks {
        order: StartOrderId,
        host: HostId,
        /// Parent of the new tasks.
        parent: Tid,
        request: SpawnRequest,
        /// Memory in bytes that all tasks of the order need in total; 0 if the request states no
        /// minimum.
        memory_bytes: u64,
    },
    /// Notify the requesting task that its request waits for a host, or that the request no longer
    /// waits. None of the requested tasks has started while the request waits. The requesting task
    /// may therefore send the request again to another resource manager.
    NotifyWait {
        requester: Tid,
        /// Wait id of the request.
        wid: i32,
        /// Time for which the request has waited; `None` if the request stops waiting.
        waited: Option<Micros>,
    },
    /// Send the reply to a request.
    Reply {
        requester: Tid,
        /// Wait id of the request.
        wid: i32,
        body: Bytes,
    },
    /// Consider a grant for the requesting task. All tasks of its request were started by the first
    /// placement, without waiting.
    ConsiderGrant(IncomingSpawn),
    /// Report that a task of a request runs on a host.
    ReportStarted {
        tid: Tid,
        host: HostId,
        /// True if the request named the host.
        host_named: bool,
        /// True if the request pins the task to its host.
        pinned: bool,
        /// Constraints of the request.
        constraints: Constraints,
        /// User and job of the requesting task, as (user, job).
        user_and_job: (u32, Tid),
        /// True if the requesting task is the new task's parent, so that the new task belongs to
        /// the same job.
        is_child: bool,
    },
    /// Terminate a task that was started too late for its request.
    Terminate { tid: Tid },
    /// Add an event to the event log.
    LogEvent(EventKind),
    /// Record a decision in the history.
    RecordDecision(DecisionKind),
}

/// A task that was started under a placement lease (a grant).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedTask {
    pub tid: Tid,
    pub host: HostId,
    pub host_name: String,
}

#[derive(Debug)]
struct PendingSpawn {
    incoming: IncomingSpawn,
    deadline: Micros,
    accepted_at: Micros,
    /// Time at which the request was last placed or refused.
    placed_at: Micros,
    /// Time until which the request may wait for a host.
    wait_until: Micros,
    /// True if the requesting task was notified that its request waits.
    wait_notified: bool,
    task_results: Vec<Option<PvmResult<Tid>>>,
    task_hosts: Vec<Option<HostId>>,
    unplaced_tasks: Vec<usize>,
    lost_hosts: Vec<HostId>,
    /// Hosts that declined tasks of this request, each with the end of the time in which it is not
    /// used.
    decline_ends: BTreeMap<HostId, Micros>,
    attempts: Vec<PlacementAttempt>,
    /// Reason why the request waits, as a text for users.
    wait_reason: String,
    /// Names of the hosts chosen for tasks of this request.
    host_names: BTreeMap<HostId, String>,
}

#[derive(Debug)]
struct StartOrder {
    spawn_number: u64,
    host: HostId,
    tasks: Vec<usize>,
    deadline: Micros,
    wid: Option<i32>,
}

/// All pending spawn requests, the task limits, and the Up-Down state of the users.
#[derive(Debug)]
pub struct Spawns {
    last_number: u64,
    pending_spawns: BTreeMap<u64, PendingSpawn>,
    start_orders: BTreeMap<StartOrderId, StartOrder>,
    placement_queue: VecDeque<u64>,
    abandoned_orders: RecentSet<i32>,
    outputs: VecDeque<SpawnOutput>,
    rules: SpawnRules,
    fair_share: FairShare,
    /// Requests that wait for a host.
    waiting_numbers: BTreeSet<u64>,
    /// Reservation for a waiting request, if there is one.
    reservation: Option<Reservation>,
    /// User and job of each running task that counts against the limits.
    counted_tasks: BTreeMap<Tid, (u32, Tid)>,
    tasks_per_job: BTreeMap<Tid, u32>,
    /// Suspended tasks with their users. They count against limits but hold no processor.
    suspended_tasks: BTreeMap<Tid, u32>,
    refusals: RefusalLog,
}

/// Waiting time of requests, and limits on the number of tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRules {
    /// Maximum time for which a request may wait for a free host. Zero: a request that finds no
    /// host is refused immediately.
    pub wait_max: Micros,
    pub task_limits: TaskLimits,
}

impl Default for Spawns {
    fn default() -> Self {
        Self::new(SpawnRules::default())
    }
}

impl Spawns {
    pub fn new(rules: SpawnRules) -> Self {
        Self {
            last_number: 0,
            pending_spawns: BTreeMap::new(),
            start_orders: BTreeMap::new(),
            placement_queue: VecDeque::new(),
            abandoned_orders: RecentSet::new(ABANDONED_ORDERS_MAX),
            outputs: VecDeque::new(),
            rules,
            fair_share: FairShare::default(),
            waiting_numbers: BTreeSet::new(),
            reservation: None,
            counted_tasks: BTreeMap::new(),
            tasks_per_job: BTreeMap::new(),
            suspended_tasks: BTreeMap::new(),
            refusals: RefusalLog::default(),
        }
    }

    /// Replaces the rules. The new waiting time applies to new requests only; new limits apply to
    /// waiting requests, too.
    pub fn set_rules(&mut self, rules: SpawnRules) {
        self.rules = rules;
    }

    /// Accepts a request. [`Spawns::place_next_request`] places the request later, unless the
    /// request is refused immediately.
    pub fn accept_request(&mut self, now: Micros, incoming_spawn: IncomingSpawn) {
        let task_count = incoming_spawn.request.task_count;
        let refusal = match task_count {
            0 => Some((PvmError::BadParam, "it requests no tasks".to_string())),
            n if n > SPAWN_TASKS_MAX => Some((
                PvmError::OutOfRes,
                format!("a spawn may request at most {SPAWN_TASKS_MAX} tasks"),
            )),
            _ if self.pending_spawns.len() >= PENDING_SPAWNS_MAX => Some((
                PvmError::OutOfRes,
                format!("{PENDING_SPAWNS_MAX} spawns are in progress or waiting already"),
            )),
            _ => None,
        };
        if let Some((error, refusal_reason)) = refusal {
            return self.reply_error_and_log(now, &incoming_spawn, error, refusal_reason);
        }
        let task_count = task_count as usize;
        self.last_number += 1;
        self.placement_queue.push_back(self.last_number);
        let remaining_wait = Micros(
            self.rules
                .wait_max
                .0
                .saturating_sub(incoming_spawn.earlier_wait.0),
        );
        let spawn = PendingSpawn {
            incoming: incoming_spawn,
            deadline: now + remaining_wait + SPAWN_TIMEOUT,
            accepted_at: now,
            placed_at: now,
            wait_until: now + remaining_wait,
            wait_notified: false,
            task_results: vec![None; task_count],
            task_hosts: vec![None; task_count],
            unplaced_tasks: (0..task_count).collect(),
            lost_hosts: Vec::new(),
            decline_ends: BTreeMap::new(),
            attempts: Vec::new(),
            wait_reason: String::new(),
            host_names: BTreeMap::new(),
        };
        self.pending_spawns.insert(self.last_number, spawn);
    }

    /// True if at least one request is queued for [`Spawns::place_next_request`].
    pub fn has_unplaced_requests(&self) -> bool {
        !self.placement_queue.is_empty()
    }

    /// Counts a running task for its user and job.
    pub fn count_task(&mut self, now: Micros, tid: Tid, user_and_job: (u32, Tid)) {
        if self.counted_tasks.insert(tid, user_and_job).is_none() {
            self.fair_share.add_processors(now, user_and_job.0, 1);
            *self.tasks_per_job.entry(user_and_job.1).or_default() += 1;
        }
    }

    /// Records that a task was suspended (`is_suspended` is true) or resumed. A suspended task
    /// holds no processor.
    pub fn record_suspension(&mut self, now: Micros, tid: Tid, is_suspended: bool) {
        let Some((user, _)) = self.counted_tasks.get(&tid) else {
            return;
        };
        if is_suspended && self.suspended_tasks.insert(tid, *user).is_none() {
            self.fair_share.remove_processors(now, *user, 1);
        } else if !is_suspended && self.suspended_tasks.remove(&tid).is_some() {
            self.fair_share.add_processors(now, *user, 1);
        }
    }

    /// Returns the number of pending requests of a job, without those of the task
    /// `excluded_requester`.
    pub fn pending_spawn_count(&self, job: Tid, excluded_requester: Tid) -> usize {
        self.pending_spawns
            .values()
            .filter(|spawn| {
                spawn.incoming.job == job && spawn.incoming.requester != excluded_requester
            })
            .count()
    }

    /// Returns the hosts on which tasks are being started.
    pub fn hosts_starting_tasks(&self) -> BTreeSet<HostId> {
        self.start_orders.values().map(|order| order.host).collect()
    }

    /// Returns the number of tasks that are being started, by host. Pinned tasks do not count.
    pub fn starting_task_counts(&self) -> BTreeMap<HostId, u32> {
        let mut counts = BTreeMap::new();
        let counts_as_load = |order: &&StartOrder| {
            self.pending_spawns
                .get(&order.spawn_number)
                .is_some_and(|spawn| spawn.incoming.request.flags & SPAWN_PINNED == 0)
        };
        for order in self.start_orders.values().filter(counts_as_load) {
            *counts.entry(order.host).or_default() += order.tasks.len() as u32;
        }
        counts
    }

    /// True if the task is running and counts against the limits.
    pub fn is_counted(&self, tid: Tid) -> bool {
        self.counted_tasks.contains_key(&tid)
    }

    /// Returns the Up-Down state: the indices and held processors of the users.
    pub fn fair_share(&self) -> &FairShare {
        &self.fair_share
    }

    /// Restores a user's index from the history. `stored_age`: time since the index was stored.
    pub fn restore_index(&mut self, now: Micros, user: u32, index: f64, stored_age: Micros) {
        self.fair_share.restore_index(now, user, index, stored_age);
    }

    /// Removes tasks for which `is_known` is false from the limits. The resource manager may have
    /// missed the events of their end.
    pub fn remove_unknown_tasks(&mut self, now: Micros, is_known: impl Fn(Tid) -> bool) {
        let unknown_tids: Vec<Tid> = self
            .counted_tasks
            .keys()
            .copied()
            .filter(|tid| !is_known(*tid))
            .collect();
        unknown_tids
            .into_iter()
            .for_each(|tid| self.record_task_end(now, tid));
    }

    /// Records the end of a task. Releases its processor and removes its waiting requests.
    pub fn record_task_end(&mut self, now: Micros, tid: Tid) {
        if let Some((user, job)) = self.counted_tasks.remove(&tid) {
            if self.suspended_tasks.remove(&tid).is_none() {
                self.fair_share.remove_processors(now, user, 1);
            }
            if let Some(count) = self.tasks_per_job.get_mut(&job) {
                *count -= 1;
                if *count == 0 {
                    self.tasks_per_job.remove(&job);
                }
            }
        }
        let waiting_request = |n: &u64| {
            self.pending_spawns
                .get(n)
                .filter(|s| s.incoming.requester == tid)
                .map(|s| (*n, s.incoming.user))
        };
        let withdrawn_requests: Vec<(u64, u32)> = self
            .waiting_numbers
            .iter()
            .filter_map(waiting_request)
            .collect();
        for (number, user) in withdrawn_requests {
            self.stop_waiting(now, user, number);
            self.pending_spawns.remove(&number);
        }
    }

    /// Records the wait id of an order that was sent. `None`: the order could not be sent; its
    /// tasks are placed on other hosts or fail.
    pub fn record_order_sent(&mut self, order: StartOrderId, wid: Option<i32>) {
        match (self.start_orders.get_mut(&order), wid) {
            (Some(order), Some(wid)) => order.wid = Some(wid),
            (Some(_), None) => self.abandon_order(order),
            // The order was abandoned before it was sent. The tasks that the host starts must be
            // terminated.
            (None, Some(wid)) => self.abandoned_orders.insert(wid),
            (None, None) => {}
        }
    }

    /// Handles a host's acknowledgement of an order. Returns false if no order has this wait id.
    pub fn handle_acknowledgement(
        &mut self,
        now: Micros,
        wid: i32,
        start_results: PvmResult<Vec<PvmResult<Tid>>>,
    ) -> bool {
        let matching_order = self
            .start_orders
            .iter()
            .find(|(_, o)| o.wid == Some(wid))
            .map(|(id, _)| *id);
        let Some(id) = matching_order else {
            if !self.abandoned_orders.contains(wid) {
                return false;
            }
            let tids = start_results.into_iter().flatten().flatten();
            self.outputs
                .extend(tids.map(|tid| SpawnOutput::Terminate { tid }));
            return true;
        };
        let order = self.start_orders.remove(&id).expect("found a moment ago");
        let Some(spawn) = self.pending_spawns.get_mut(&order.spawn_number) else {
            return true;
        };
        let missing_error = match &start_results {
            Ok(_) => PvmError::DSysErr,
            Err(error) => *error,
        };
        let results = start_results
            .unwrap_or_default()
            .into_iter()
            .chain(std::iter::repeat(Err(missing_error)));
        let results: Vec<PvmResult<Tid>> = results.take(order.tasks.len()).collect();
        let (may_retry, mut declined_tasks) = (spawn.may_use_other_hosts(&results), Vec::new());
        for (task, result) in order.tasks.into_iter().zip(results) {
            if may_retry && result == Err(GUEST_REFUSED_ERROR) {
                declined_tasks.push(task);
                continue;
            }
            spawn.task_results[task] = Some(result);
            spawn.task_hosts[task] = result.is_ok().then_some(order.host);
            self.outputs.extend(
                result
                    .ok()
                    .map(|tid| started_output(&spawn.incoming, tid, order.host)),
            );
        }
        if declined_tasks.is_empty() {
            self.finish_if_complete(order.spawn_number);
        } else {
            spawn.decline_ends.insert(order.host, now + DECLINED_WINDOW);
            self.queue_for_placement(order.spawn_number, declined_tasks);
        }
        true
    }

    /// Handles the loss of a host. The tasks of its unacknowledged orders are placed on other
    /// hosts, or fail if the request names the host.
    pub fn handle_host_loss(&mut self, host: HostId) {
        let affected_orders: Vec<StartOrderId> = self
            .start_orders
            .iter()
            .filter(|(_, o)| o.host == host)
            .map(|(id, _)| *id)
            .collect();
        affected_orders
            .into_iter()
            .for_each(|order| self.abandon_order(order));
    }

    /// Abandons orders whose timeout has expired, ends expired waiting times, and fails requests
    /// whose timeout has expired.
    pub fn handle_timeouts(&mut self, now: Micros) {
        let overdue_orders: Vec<StartOrderId> = self
            .start_orders
            .iter()
            .filter(|(_, o)| o.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        overdue_orders
            .into_iter()
            .for_each(|order| self.abandon_order(order));
        let expired_waits = |n: &u64| {
            self.pending_spawns
                .get(n)
                .filter(|s| s.wait_until <= now)
                .map(|s| (*n, s.incoming.user))
        };
        let expired_waits: Vec<(u64, u32)> = self
            .waiting_numbers
            .iter()
            .filter_map(expired_waits)
            .collect();
        for (number, user) in expired_waits {
            self.stop_waiting(now, user, number);
            self.placement_queue.push_back(number);
        }
        let expired_requests: Vec<u64> = self
            .pending_spawns
            .iter()
            .filter(|(_, s)| s.deadline <= now)
            .map(|(n, _)| *n)
            .collect();
        for number in expired_requests {
            if let Some(spawn) = self.pending_spawns.get_mut(&number) {
                spawn.unplaced_tasks.clear();
                for result in spawn.task_results.iter_mut().filter(|r| r.is_none()) {
                    *result = Some(Err(PvmError::HostFail));
                }
            }
            self.placement_queue.retain(|n| *n != number);
            self.finish_if_complete(number);
        }
    }

    /// Returns the time at which [`Spawns::handle_timeouts`] is due; `None` if nothing is pending.
    pub fn next_deadline(&self) -> Option<Micros> {
        let wait_ends = self
            .waiting_numbers
            .iter()
            .filter_map(|n| self.pending_spawns.get(n))
            .map(|s| s.wait_until);
        self.start_orders
            .values()
            .map(|o| o.deadline)
            .chain(self.pending_spawns.values().map(|s| s.deadline))
            .chain(wait_ends)
            .min()
    }

    /// Removes the next action from the queue of outputs and returns it; `None` if the queue is
    /// empty.
    pub fn poll(&mut self) -> Option<SpawnOutput> {
        self.outputs.pop_front()
    }

    /// Abandons an order that its host has not acknowledged. The tasks of the order are placed on
    /// other hosts, or fail if the request names the host.
    fn abandon_order(&mut self, order: StartOrderId) {
        let Some(order) = self.start_orders.remove(&order) else {
            return;
        };
        if let Some(wid) = order.wid {
            self.abandoned_orders.insert(wid);
        }
        let Some(spawn) = self.pending_spawns.get_mut(&order.spawn_number) else {
            return;
        };
        spawn.lost_hosts.push(order.host);
        if spawn.incoming.request.names_host_or_arch() {
            for task in order.tasks {
                spawn.task_results[task] = Some(Err(PvmError::HostFail));
            }
            return self.finish_if_complete(order.spawn_number);
        }
        self.queue_for_placement(order.spawn_number, order.tasks);
    }

    /// Queues tasks of a request for another placement.
    fn queue_for_placement(&mut self, number: u64, tasks: Vec<usize>) {
        let Some(spawn) = self.pending_spawns.get_mut(&number) else {
            return;
        };
        if spawn.unplaced_tasks.is_empty() {
            self.placement_queue.push_back(number);
        }
        spawn.unplaced_tasks.extend(tasks);
    }

    /// Replies to a request and records it if all its tasks have a result. Otherwise has no effect.
    fn finish_if_complete(&mut self, number: u64) {
        if self
            .pending_spawns
            .get(&number)
            .is_none_or(|s| s.task_results.contains(&None))
        {
            return;
        }
        let Some(spawn) = self.pending_spawns.remove(&number) else {
            return;
        };
        let results: Vec<PvmResult<Tid>> = spawn.task_results.into_iter().flatten().collect();
        let placed_at_once = !spawn.wait_notified
            && spawn.incoming.earlier_wait == Micros(0)
            && spawn.attempts.len() == 1;
        let all_started = placed_at_once && results.iter().all(Result::is_ok);
        let grant_output = all_started.then(|| SpawnOutput::ConsiderGrant(spawn.incoming.clone()));
        let incoming_spawn = spawn.incoming;
        self.outputs.push_back(SpawnOutput::Reply {
            requester: incoming_spawn.requester,
            wid: incoming_spawn.wait_id,
            body: pack_tids(&results),
        });
        let hosts: Vec<HostId> = spawn.task_hosts.into_iter().flatten().collect();
        let reason_text = spawn
            .attempts
            .iter()
            .map(|a| a.reason.as_str())
            .collect::<Vec<_>>()
            .join("; then ");
        let first_error = results.iter().filter_map(|r| r.as_ref().err()).next();
        let started_tasks = results.iter().filter_map(|r| r.ok()).zip(&hosts);
        let name_of_host = |host: &HostId| {
            spawn
                .host_names
                .get(host)
                .cloned()
                .unwrap_or_else(|| host.to_string())
        };
        let started_hosts = started_tasks
            .map(|(tid, host)| (tid, name_of_host(host)))
            .collect();
        let total_wait = incoming_spawn.earlier_wait + spawn.placed_at.since(spawn.accepted_at);
        self.outputs.push_back(incoming_spawn.decision_output(
            started_hosts,
            first_error.copied(),
            total_wait,
            spawn.attempts,
        ));
        let event = match (first_error, hosts.is_empty()) {
            (Some(error), true) => incoming_spawn.failure_event(*error, &reason_text),
            (Some(error), false) => {
                let failed_count = results.len() - hosts.len();
                let reason_text = format!(
                    "{reason_text}; {failed_count} of {} failed: {error}",
                    results.len()
                );
                EventKind::Placed {
                    name: incoming_spawn.request.program,
                    hosts,
                    why: reason_text,
                }
            }
            (None, _) => EventKind::Placed {
                name: incoming_spawn.request.program,
                hosts,
                why: reason_text,
            },
        };
        self.outputs.push_back(SpawnOutput::LogEvent(event));
        self.outputs.extend(grant_output);
    }

    /// Records tasks that were started by a grant. The resource manager has received no request for
    /// them. Their daemon has reported their start to the event log.
    pub fn record_granted(
        &mut self,
        incoming_spawn: IncomingSpawn,
        granted_tasks: Vec<GrantedTask>,
        attempt: PlacementAttempt,
    ) {
        self.outputs
            .extend(granted_tasks.iter().map(|granted_task| {
                started_output(&incoming_spawn, granted_task.tid, granted_task.host)
            }));
        let IncomingSpawn {
            requester: spawner,
            request,
            job,
            user,
            ..
        } = incoming_spawn;
        self.outputs
            .push_back(SpawnOutput::RecordDecision(DecisionKind::Spawn {
                program: request.program,
                requested_by: spawner,
                job,
                user,
                count: granted_tasks.len() as u32,
                started: granted_tasks
                    .into_iter()
                    .map(|granted_task| (granted_task.tid, granted_task.host_name))
                    .collect(),
                error: None,
                waited: Micros(0),
                attempts: vec![attempt],
            }));
    }
}

impl PendingSpawn {
    /// True if tasks that a host declined may be placed on other hosts. If the tasks of the request
    /// must share a host, or if their number per host is limited, this is allowed only if all tasks
    /// of the request were declined.
    fn may_use_other_hosts(&self, results: &[PvmResult<Tid>]) -> bool {
        if self.incoming.request.names_host_or_arch()
            || !results.contains(&Err(GUEST_REFUSED_ERROR))
        {
            return false;
        }
        let places_separately = Constraints::from_request(&self.incoming.request)
            .is_ok_and(|constraints| constraints.colocation == Colocation::Any);
        places_separately
            || (results.len() == self.task_results.len()
                && results
                    .iter()
                    .all(|result| *result == Err(GUEST_REFUSED_ERROR)))
    }
}

/// Adds an attempt. If there are more than [`RECORDED_ATTEMPTS_MAX`], removes the second oldest
/// one.
fn add_attempt(attempts: &mut Vec<PlacementAttempt>, attempt: PlacementAttempt) {
    attempts.push(attempt);
    if attempts.len() > RECORDED_ATTEMPTS_MAX {
        attempts.remove(1);
    }
}

/// Returns the output that reports a task of this request as started.
fn started_output(incoming_spawn: &IncomingSpawn, tid: Tid, host: HostId) -> SpawnOutput {
    let constraints = Constraints::from_request(&incoming_spawn.request).unwrap_or_default();
    let (names_host, pinned) = (
        incoming_spawn.request.names_one_host(),
        incoming_spawn.request.flags & SPAWN_PINNED != 0,
    );
    let has_parent = incoming_spawn.request.flags & SPAWN_NO_PARENT == 0;
    SpawnOutput::ReportStarted {
        tid,
        host,
        host_named: names_host,
        pinned,
        constraints,
        user_and_job: (incoming_spawn.user, incoming_spawn.job),
        is_child: has_parent,
    }
}

/// Returns the number of tasks of a user and the number of tasks of a job, including suspended
/// tasks.
fn task_counts(
    fair_share: &FairShare,
    suspended: &BTreeMap<Tid, u32>,
    jobs: &BTreeMap<Tid, u32>,
    (user, job): (u32, Tid),
) -> (u32, u32) {
    let suspended = suspended
        .values()
        .filter(|owner_uid| **owner_uid == user)
        .count();
    let suspended = u32::try_from(suspended).unwrap_or(u32::MAX);
    (
        fair_share.held_processors(user).saturating_add(suspended),
        jobs.get(&job).copied().unwrap_or(0),
    )
}
