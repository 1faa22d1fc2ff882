//! Spawn requests that are being carried out: placed, sent to the hosts, acknowledged, answered.
//! Pure; the service carries out the output of [`Spawns::poll`].
//!
//! No request waits forever. If a host is lost or does not acknowledge in time, its tasks are
//! placed elsewhere (unless the request names the place), and tasks that it starts too late are
//! terminated. Single failures are handled as in PVM: a program that is not found on a host fails
//! for all tasks of that host.
//!
//! A request that finds no free host, or that exceeds a limit, may wait for a time that the
//! administrator sets. Whenever something changes, waiting requests are tried again, in the order
//! of the Up-Down scheme.

pub mod refusals;
mod waits;

use crate::decide::{Ask, Choice, Fair, Limits, Snapshot, Together, Wants, Why, place_by, reserve};
use crate::recent::Recent;
use crate::store::books::ATTEMPTS_MAX;
use crate::store::record;
use bytes::Bytes;
use refusals::Refusals;
use sempa_proto::event::EventKind;
use sempa_proto::owner::GUEST_REFUSED;
use sempa_proto::rm::{DecisionKind, PlacementAttempt};
use sempa_proto::sm::pack_tids;
use sempa_proto::task::{SPAWN_NO_PARENT, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, PvmResult, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use waits::Kept;

pub use crate::decide::SPAWN_TASKS_MAX;

/// Maximum number of pending requests; further ones are refused with `OutOfRes`.
pub const SPAWNS_OPEN_MAX: usize = 1024;
/// Timeout for a host's acknowledgement of an order.
pub const EXEC_TIME_MAX: Micros = Micros::from_secs(20);
/// Time that a request may take. Tasks that have not started by then have failed.
pub const SPAWN_TIME_MAX: Micros = Micros::from_secs(60);
/// Time for which a host that declined tasks of a request is not asked again for it. Meanwhile the
/// load watcher's report arrives here, too.
const DECLINED_SPAN: Micros = Micros::from_secs(5);
/// Maximum number of placement attempts that are remembered per request. Beyond it, the second one
/// is dropped for each new one.
const SEARCHES_MAX: usize = 2 * ATTEMPTS_MAX;
/// Maximum number of abandoned orders whose late acknowledgement is recognized.
const LATE_MAX: usize = 4096;

/// Id of an order to one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OrderId(u64);

/// A spawn request as it arrived.
#[derive(Clone, Debug, PartialEq)]
pub struct Incoming {
    pub src: Tid,
    /// Wait id of the request.
    pub wid: i32,
    /// Host of the requesting task.
    pub caller: HostId,
    pub user: u32,
    pub job: Tid,
    pub request: SpawnRequest,
    /// Time that the request has already waited under an earlier resource manager.
    pub waited: Micros,
}

impl Incoming {
    /// Returns the output that records the result in the history.
    fn decided(
        &self,
        started: Vec<(Tid, String)>,
        error: Option<PvmError>,
        waited: Micros,
        attempts: Vec<PlacementAttempt>,
    ) -> Output {
        let (program, by, count) = (self.request.file.clone(), self.src, self.request.count);
        let (job, user) = (self.job, self.user);
        Output::Decided(DecisionKind::Spawn {
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

    /// Returns the event for a request of which nothing was started.
    fn not_started(&self, error: PvmError, why: &str) -> EventKind {
        EventKind::Note {
            text: format!(
                "{} was not started for {}: {error} ({why})",
                self.request.file, self.src
            ),
        }
    }
}

/// Action for the service.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send an order to a host, then call [`Spawns::sent`].
    Exec {
        order: OrderId,
        host: HostId,
        /// Parent of the new tasks.
        parent: Tid,
        request: SpawnRequest,
        /// Memory promised to all of these tasks together, in bytes.
        memory: u64,
    },
    /// Notify a task that its request waits for a host, or stops waiting. While it waits nothing of
    /// it has started, so the task may repeat it to another resource manager.
    Waits {
        to: Tid,
        /// Wait id of the request.
        wid: i32,
        /// How long the request has waited; `None`: it stops waiting.
        waited: Option<Micros>,
    },
    /// Send the answer to a request.
    Reply {
        to: Tid,
        /// Wait id of the request.
        wid: i32,
        body: Bytes,
    },
    /// A request was answered with all its tasks by the first attempt, without waiting.
    Answered(Incoming),
    /// A task runs on a host.
    Started {
        tid: Tid,
        host: HostId,
        /// The request named the host.
        named: bool,
        /// The request pins the task to its host.
        pinned: bool,
        /// Constraints of the request.
        wants: Wants,
        /// User and job of the requesting task.
        by: (u32, Tid),
        /// The requesting task is the parent, so the new task belongs to its job.
        child: bool,
    },
    /// Terminate a task that was started too late for its request.
    End { tid: Tid },
    /// Add an event to the event log.
    Record(EventKind),
    /// Record a decision in the history.
    Decided(DecisionKind),
}

/// A task that was started by a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    pub tid: Tid,
    pub host: HostId,
    /// Name of the host.
    pub name: String,
}

#[derive(Debug)]
struct Spawn {
    from: Incoming,
    until: Micros,
    began: Micros,
    /// When the request was last placed or refused.
    placed: Micros,
    /// Until then the request may wait for a host.
    wait_until: Micros,
    /// The requesting task was notified that the request waits.
    told: bool,
    results: Vec<Option<PvmResult<Tid>>>,
    hosts: Vec<Option<HostId>>,
    unplaced: Vec<usize>,
    lost: Vec<HostId>,
    /// Hosts that declined its tasks, and when they may be asked again.
    declined: BTreeMap<HostId, Micros>,
    attempts: Vec<PlacementAttempt>,
    /// Why the request waits.
    waits_for: String,
    /// Names of the chosen hosts.
    names: BTreeMap<HostId, String>,
}

#[derive(Debug)]
struct Order {
    spawn: u64,
    host: HostId,
    tasks: Vec<usize>,
    until: Micros,
    wid: Option<i32>,
}

/// All pending requests, with users and limits.
#[derive(Debug)]
pub struct Spawns {
    last: u64,
    open: BTreeMap<u64, Spawn>,
    orders: BTreeMap<OrderId, Order>,
    to_place: VecDeque<u64>,
    late: Recent<i32>,
    out: VecDeque<Output>,
    rules: Rules,
    fair: Fair,
    /// Requests that wait for a host.
    waiting: BTreeSet<u64>,
    /// Reservation for one of the waiting requests.
    kept: Option<Kept>,
    /// User and job of each running task that was started here.
    tasks: BTreeMap<Tid, (u32, Tid)>,
    jobs: BTreeMap<Tid, u32>,
    /// Suspended tasks with their users. They count against limits but hold no processor.
    suspended: BTreeMap<Tid, u32>,
    refusals: Refusals,
}

/// How long requests may wait, and how many tasks are allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// How long a request may wait for a free host. Zero: it is refused immediately.
    pub wait: Micros,
    pub limits: Limits,
}

impl Default for Spawns {
    fn default() -> Spawns {
        Spawns::new(Rules::default())
    }
}

impl Spawns {
    pub fn new(rules: Rules) -> Spawns {
        Spawns {
            last: 0,
            open: BTreeMap::new(),
            orders: BTreeMap::new(),
            to_place: VecDeque::new(),
            late: Recent::new(LATE_MAX),
            out: VecDeque::new(),
            rules,
            fair: Fair::default(),
            waiting: BTreeSet::new(),
            kept: None,
            tasks: BTreeMap::new(),
            jobs: BTreeMap::new(),
            suspended: BTreeMap::new(),
            refusals: Refusals::default(),
        }
    }

    /// Replaces the rules. Requests that wait already keep their waiting time, unless waiting has
    /// become useless.
    pub fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Accepts a request. The next [`Spawns::place`] places it, unless it is refused immediately.
    pub fn begin(&mut self, now: Micros, from: Incoming) {
        let count = from.request.count;
        let refusal = match count {
            0 => Some((PvmError::BadParam, "it requests no tasks".to_string())),
            n if n > SPAWN_TASKS_MAX => Some((
                PvmError::OutOfRes,
                format!("a spawn may request at most {SPAWN_TASKS_MAX} tasks"),
            )),
            _ if self.open.len() >= SPAWNS_OPEN_MAX => Some((
                PvmError::OutOfRes,
                format!("{SPAWNS_OPEN_MAX} spawns are in progress or waiting already"),
            )),
            _ => None,
        };
        if let Some((error, why)) = refusal {
            return self.refuse_and_tell(now, &from, error, why);
        }
        let count = count as usize;
        self.last += 1;
        self.to_place.push_back(self.last);
        let wait = Micros(self.rules.wait.0.saturating_sub(from.waited.0));
        let spawn = Spawn {
            from,
            until: now + wait + SPAWN_TIME_MAX,
            began: now,
            placed: now,
            wait_until: now + wait,
            told: false,
            results: vec![None; count],
            hosts: vec![None; count],
            unplaced: (0..count).collect(),
            lost: Vec::new(),
            declined: BTreeMap::new(),
            attempts: Vec::new(),
            waits_for: String::new(),
            names: BTreeMap::new(),
        };
        self.open.insert(self.last, spawn);
    }

    /// True if [`Spawns::place`] has something to place.
    pub fn wants_place(&self) -> bool {
        !self.to_place.is_empty()
    }

    /// Places the first request in the queue. `choice`: external chooser, if the policy names one.
    /// Returns the new round-robin position.
    pub fn place(
        &mut self,
        now: Micros,
        snapshot: &Snapshot,
        choice: Option<&dyn Choice>,
    ) -> HostId {
        let Some(number) = self
            .to_place
            .pop_front()
            .filter(|n| !self.is_limited(now, *n))
        else {
            return snapshot.rotation;
        };
        let Some(spawn) = self.open.get_mut(&number) else {
            return snapshot.rotation;
        };
        let tasks = std::mem::take(&mut spawn.unplaced);
        let Incoming {
            src,
            caller,
            request,
            user,
            job,
            ..
        } = &spawn.from;
        let kept = self
            .kept
            .as_ref()
            .filter(|kept| kept.is_kept_from(now, &self.fair, (number, *user)));
        let (user, peers) = (*user, &snapshot.peers_of(*caller, *job));
        let hosts = kept.map_or(&[][..], |kept| &kept.hosts);
        spawn.declined.retain(|_, until| now < *until);
        let declined: Vec<HostId> = spawn.declined.keys().copied().collect();
        let (without, declined) = (&spawn.lost, &declined);
        let ask = Ask {
            user,
            request,
            count: tasks.len() as u32,
            caller: *caller,
            peers,
            without,
            declined,
            kept: hosts,
        };
        let choice = choice.filter(|_| !request.names_one_host());
        let placement = place_by(snapshot, &ask, choice);
        let none_free = placement.why == Why::NoneFree
            && placement.hosts.first() == Some(&Err(PvmError::OutOfRes));
        if none_free && now < spawn.wait_until {
            let before = self
                .kept
                .as_ref()
                .filter(|kept| kept.number == number)
                .map_or(&[][..], |kept| &kept.hosts);
            let hosts = reserve(snapshot, &ask, before);
            self.wait(now, number, tasks, placement.sentence(snapshot));
            self.keep(now, number, None, || hosts);
            return snapshot.rotation;
        }
        self.kept.take_if(|kept| kept.number == number);
        searched(&mut spawn.attempts, record::attempt(&placement, snapshot));
        spawn.placed = now;
        let mut parts: BTreeMap<HostId, Vec<usize>> = BTreeMap::new();
        for (task, host) in tasks.into_iter().zip(&placement.hosts) {
            match host {
                Ok(host) => parts.entry(*host).or_default().push(task),
                Err(error) => spawn.results[task] = Some(Err(*error)),
            }
        }
        if std::mem::take(&mut spawn.told) && !parts.is_empty() {
            self.out.push_back(Output::Waits {
                to: *src,
                wid: spawn.from.wid,
                waited: None,
            });
        }
        let memory = Wants::of(request)
            .ok()
            .and_then(|wants| wants.memory())
            .unwrap_or(0);
        for (host, tasks) in parts {
            spawn.names.insert(host, snapshot.name(host));
            let dir = request
                .place
                .find(':')
                .map_or(String::new(), |at| request.place[at..].to_string());
            let memory = memory.saturating_mul(tasks.len() as u64);
            let part = SpawnRequest {
                count: tasks.len() as u32,
                place: dir,
                ..request.clone()
            };
            self.last += 1;
            let order = OrderId(self.last);
            self.out.push_back(Output::Exec {
                order,
                host,
                parent: *src,
                request: part,
                memory,
            });
            let until = (now + EXEC_TIME_MAX).min(spawn.until);
            self.orders.insert(
                order,
                Order {
                    spawn: number,
                    host,
                    tasks,
                    until,
                    wid: None,
                },
            );
        }
        self.finish(number);
        placement.rotation
    }

    /// Counts a running task for its user and job.
    pub fn task_started(&mut self, now: Micros, tid: Tid, by: (u32, Tid)) {
        if self.tasks.insert(tid, by).is_none() {
            self.fair.takes(now, by.0, 1);
            *self.jobs.entry(by.1).or_default() += 1;
        }
    }

    /// Records that a task was suspended or resumed.
    pub fn task_suspended(&mut self, now: Micros, tid: Tid, suspend: bool) {
        let Some((user, _)) = self.tasks.get(&tid) else {
            return;
        };
        if suspend && self.suspended.insert(tid, *user).is_none() {
            self.fair.gives(now, *user, 1);
        } else if !suspend && self.suspended.remove(&tid).is_some() {
            self.fair.takes(now, *user, 1);
        }
    }

    /// Returns the number of pending requests of a job, except those of the task `but`.
    pub fn starting_for(&self, job: Tid, but: Tid) -> usize {
        self.open
            .values()
            .filter(|spawn| spawn.from.job == job && spawn.from.src != but)
            .count()
    }

    /// Returns the hosts on which tasks are being started.
    pub fn starting_on(&self) -> BTreeSet<HostId> {
        self.orders.values().map(|order| order.host).collect()
    }

    /// Returns the number of tasks that are being started on each host.
    pub fn starting(&self) -> BTreeMap<HostId, u32> {
        let mut starting = BTreeMap::new();
        let is_load = |order: &&Order| {
            self.open
                .get(&order.spawn)
                .is_some_and(|spawn| spawn.from.request.flags & SPAWN_PINNED == 0)
        };
        for order in self.orders.values().filter(is_load) {
            *starting.entry(order.host).or_default() += order.tasks.len() as u32;
        }
        starting
    }

    /// True for a task that counts against the limits.
    pub fn counts(&self, tid: Tid) -> bool {
        self.tasks.contains_key(&tid)
    }

    /// Returns the indices and holdings of the users.
    pub fn fair(&self) -> &Fair {
        &self.fair
    }

    /// Restores a user's index as it was `ago`.
    pub fn recall_index(&mut self, now: Micros, user: u32, index: f64, ago: Micros) {
        self.fair.recall(now, user, index, ago);
    }

    /// Stops counting tasks that are not known. They may have ended unnoticed, with a host or while
    /// events were missed.
    pub fn forget_tasks(&mut self, now: Micros, is_known: impl Fn(Tid) -> bool) {
        let gone: Vec<Tid> = self
            .tasks
            .keys()
            .copied()
            .filter(|tid| !is_known(*tid))
            .collect();
        gone.into_iter().for_each(|tid| self.task_ended(now, tid));
    }

    /// Records the end of a task: its processor is free, and its waiting requests are dropped.
    pub fn task_ended(&mut self, now: Micros, tid: Tid) {
        if let Some((user, job)) = self.tasks.remove(&tid) {
            if self.suspended.remove(&tid).is_none() {
                self.fair.gives(now, user, 1);
            }
            if let Some(count) = self.jobs.get_mut(&job) {
                *count -= 1;
                if *count == 0 {
                    self.jobs.remove(&job);
                }
            }
        }
        let asked = |n: &u64| {
            self.open
                .get(n)
                .filter(|s| s.from.src == tid)
                .map(|s| (*n, s.from.user))
        };
        let gone: Vec<(u64, u32)> = self.waiting.iter().filter_map(asked).collect();
        for (number, user) in gone {
            self.wait_no_longer(now, user, number);
            self.open.remove(&number);
        }
    }

    /// Records that an order was sent with this wait id, or could not be sent (`None`).
    pub fn sent(&mut self, order: OrderId, wid: Option<i32>) {
        match (self.orders.get_mut(&order), wid) {
            (Some(order), Some(wid)) => order.wid = Some(wid),
            (Some(_), None) => self.give_up(order),
            // The order was abandoned before; the tasks that it starts are terminated.
            (None, Some(wid)) => self.late.put(wid),
            (None, None) => {}
        }
    }

    /// Handles a host's acknowledgement. False if the wait id is unknown.
    pub fn ack(&mut self, now: Micros, wid: i32, started: PvmResult<Vec<PvmResult<Tid>>>) -> bool {
        let found = self
            .orders
            .iter()
            .find(|(_, o)| o.wid == Some(wid))
            .map(|(id, _)| *id);
        let Some(id) = found else {
            if !self.late.has(wid) {
                return false;
            }
            let tids = started.into_iter().flatten().flatten();
            self.out.extend(tids.map(|tid| Output::End { tid }));
            return true;
        };
        let order = self.orders.remove(&id).expect("found a moment ago");
        let Some(spawn) = self.open.get_mut(&order.spawn) else {
            return true;
        };
        let short = match &started {
            Ok(_) => PvmError::DSysErr,
            Err(error) => *error,
        };
        let results = started
            .unwrap_or_default()
            .into_iter()
            .chain(std::iter::repeat(Err(short)));
        let results: Vec<PvmResult<Tid>> = results.take(order.tasks.len()).collect();
        let (elsewhere_too, mut elsewhere) = (spawn.may_go_elsewhere(&results), Vec::new());
        for (task, result) in order.tasks.into_iter().zip(results) {
            if elsewhere_too && result == Err(GUEST_REFUSED) {
                elsewhere.push(task);
                continue;
            }
            spawn.results[task] = Some(result);
            spawn.hosts[task] = result.is_ok().then_some(order.host);
            self.out.extend(
                result
                    .ok()
                    .map(|tid| started_by(&spawn.from, tid, order.host)),
            );
        }
        if elsewhere.is_empty() {
            self.finish(order.spawn);
        } else {
            spawn.declined.insert(order.host, now + DECLINED_SPAN);
            self.place_again(order.spawn, elsewhere);
        }
        true
    }

    /// Places tasks elsewhere that were to start on a lost host.
    pub fn host_gone(&mut self, host: HostId) {
        let lost: Vec<OrderId> = self
            .orders
            .iter()
            .filter(|(_, o)| o.host == host)
            .map(|(id, _)| *id)
            .collect();
        lost.into_iter().for_each(|order| self.give_up(order));
    }

    /// Abandons orders and requests that have taken too long.
    pub fn tick(&mut self, now: Micros) {
        let slow: Vec<OrderId> = self
            .orders
            .iter()
            .filter(|(_, o)| o.until <= now)
            .map(|(id, _)| *id)
            .collect();
        slow.into_iter().for_each(|order| self.give_up(order));
        let waited = |n: &u64| {
            self.open
                .get(n)
                .filter(|s| s.wait_until <= now)
                .map(|s| (*n, s.from.user))
        };
        let waited: Vec<(u64, u32)> = self.waiting.iter().filter_map(waited).collect();
        for (number, user) in waited {
            self.wait_no_longer(now, user, number);
            self.to_place.push_back(number);
        }
        let out_of_time: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, s)| s.until <= now)
            .map(|(n, _)| *n)
            .collect();
        for number in out_of_time {
            if let Some(spawn) = self.open.get_mut(&number) {
                spawn.unplaced.clear();
                for result in spawn.results.iter_mut().filter(|r| r.is_none()) {
                    *result = Some(Err(PvmError::HostFail));
                }
            }
            self.to_place.retain(|n| *n != number);
            self.finish(number);
        }
    }

    /// Returns when [`Spawns::tick`] is due.
    pub fn next_deadline(&self) -> Option<Micros> {
        let waits = self
            .waiting
            .iter()
            .filter_map(|n| self.open.get(n))
            .map(|s| s.wait_until);
        self.orders
            .values()
            .map(|o| o.until)
            .chain(self.open.values().map(|s| s.until))
            .chain(waits)
            .min()
    }

    /// Returns the next action.
    pub fn poll(&mut self) -> Option<Output> {
        self.out.pop_front()
    }

    /// Abandons an order whose host does not answer.
    fn give_up(&mut self, order: OrderId) {
        let Some(order) = self.orders.remove(&order) else {
            return;
        };
        if let Some(wid) = order.wid {
            self.late.put(wid);
        }
        let Some(spawn) = self.open.get_mut(&order.spawn) else {
            return;
        };
        spawn.lost.push(order.host);
        if spawn.from.request.has_fixed_place() {
            for task in order.tasks {
                spawn.results[task] = Some(Err(PvmError::HostFail));
            }
            return self.finish(order.spawn);
        }
        self.place_again(order.spawn, order.tasks);
    }

    /// Queues tasks of a request for another placement.
    fn place_again(&mut self, number: u64, tasks: Vec<usize>) {
        let Some(spawn) = self.open.get_mut(&number) else {
            return;
        };
        if spawn.unplaced.is_empty() {
            self.to_place.push_back(number);
        }
        spawn.unplaced.extend(tasks);
    }

    /// Answers and records a request if all its tasks have a result.
    fn finish(&mut self, number: u64) {
        if self
            .open
            .get(&number)
            .is_none_or(|s| s.results.contains(&None))
        {
            return;
        }
        let Some(spawn) = self.open.remove(&number) else {
            return;
        };
        let results: Vec<PvmResult<Tid>> = spawn.results.into_iter().flatten().collect();
        let at_once = !spawn.told && spawn.from.waited == Micros(0) && spawn.attempts.len() == 1;
        let whole = at_once && results.iter().all(Result::is_ok);
        let answered = whole.then(|| Output::Answered(spawn.from.clone()));
        let from = spawn.from;
        self.out.push_back(Output::Reply {
            to: from.src,
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
                .names
                .get(host)
                .cloned()
                .unwrap_or_else(|| host.to_string())
        };
        let started = with_tids.map(|(tid, host)| (tid, name(host))).collect();
        let waited = from.waited + spawn.placed.since(spawn.began);
        self.out
            .push_back(from.decided(started, failed.copied(), waited, spawn.attempts));
        let event = match (failed, hosts.is_empty()) {
            (Some(error), true) => from.not_started(*error, &why),
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
        self.out.push_back(Output::Record(event));
        self.out.extend(answered);
    }

    /// Records tasks that a grant started, without a request here. Their daemon has reported them
    /// to the event log.
    pub fn granted(&mut self, from: Incoming, started: Vec<Started>, attempt: PlacementAttempt) {
        self.out.extend(
            started
                .iter()
                .map(|one| started_by(&from, one.tid, one.host)),
        );
        let Incoming {
            src,
            request,
            job,
            user,
            ..
        } = from;
        self.out.push_back(Output::Decided(DecisionKind::Spawn {
            program: request.file,
            requested_by: src,
            job,
            user,
            count: started.len() as u32,
            started: started.into_iter().map(|one| (one.tid, one.name)).collect(),
            error: None,
            waited: Micros(0),
            attempts: vec![attempt],
        }));
    }
}

impl Spawn {
    /// True if tasks that one host declined may be tried on other hosts. Tasks that must share a
    /// host, or that are limited per host, may only while none of them has a host.
    fn may_go_elsewhere(&self, results: &[PvmResult<Tid>]) -> bool {
        if self.from.request.has_fixed_place() || !results.contains(&Err(GUEST_REFUSED)) {
            return false;
        }
        let apart =
            Wants::of(&self.from.request).is_ok_and(|wants| wants.together == Together::Any);
        apart
            || (results.len() == self.results.len()
                && results.iter().all(|one| *one == Err(GUEST_REFUSED)))
    }
}

/// Adds an attempt. Beyond the maximum, the second one is dropped.
fn searched(attempts: &mut Vec<PlacementAttempt>, attempt: PlacementAttempt) {
    attempts.push(attempt);
    if attempts.len() > SEARCHES_MAX {
        attempts.remove(1);
    }
}

/// Returns the action for a started task of this request.
fn started_by(from: &Incoming, tid: Tid, host: HostId) -> Output {
    let wants = Wants::of(&from.request).unwrap_or_default();
    let (named, pinned) = (
        from.request.names_one_host(),
        from.request.flags & SPAWN_PINNED != 0,
    );
    let child = from.request.flags & SPAWN_NO_PARENT == 0;
    Output::Started {
        tid,
        host,
        named,
        pinned,
        wants,
        by: (from.user, from.job),
        child,
    }
}

/// Returns the number of tasks that a user and a job have, including suspended ones.
fn held(
    fair: &Fair,
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
