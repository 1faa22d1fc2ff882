//! Simulates a pool of desktop machines in virtual time. Owners arrive and leave. Jobs of equal
//! processes wait, run and migrate according to the decisions under test.
//!
//! The durations of migrations are drawn from measurements, independent of the predictions in the
//! decisions. The seed determines the whole run.

use crate::desktop::{desktop, h};
use crate::random::Random;
use pvm_rm::decide::{
    Ask, Fair, Hosts, Limits, Owner, Policy, Snapshot, TaskView, UpDown, Waiting, balance,
    give_way, moves, place,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

pub(crate) const HOUR: f64 = 3600.0;
pub(crate) const DAY: f64 = 24.0 * HOUR;
/// Interval between two rebalancing decisions, in seconds.
const BALANCE: f64 = 300.0;
/// Memory size of a process in bytes.
const BYTES: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Owner(u16),
    Ends { task: Tid, version: u64 },
    Arrives { task: Tid },
    Balance,
    Decide,
    Job(usize),
}

struct Task {
    host: u16,
    left: f64,
    at: f64,
    rate: f64,
    version: u64,
    job: usize,
    /// Total work in seconds.
    work: f64,
    /// Target of the migration that stops the task at present.
    moving: Option<u16>,
    /// True if the task was preempted for another user's task on its host.
    suspended: bool,
}

/// A job of equal processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) user: u32,
    pub(crate) arrives: f64,
    pub(crate) processes: u32,
    /// Mean seconds of work of each process.
    pub(crate) work: f64,
    pub(crate) started: Option<f64>,
    pub(crate) ended: Option<f64>,
    running: u32,
}

impl Job {
    pub(crate) fn new(user: u32, arrives: f64, processes: u32, work: f64) -> Job {
        Job {
            user,
            arrives,
            processes,
            work,
            started: None,
            ended: None,
            running: 0,
        }
    }
}

/// Durations measured on real hosts, in seconds. The simulation draws from them at random.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    /// Time from the record of an owner's login until a guest is stopped.
    pub(crate) stops: Vec<f64>,
    /// Time from the record of an owner's login until no guest is left on the host.
    pub(crate) clears: Vec<f64>,
    /// Time for which a rebalancing migration stops its task.
    pub(crate) freezes: Vec<f64>,
    /// Duration of a rebalancing migration.
    pub(crate) moves: Vec<f64>,
}

/// Statistics of a run.
#[derive(Default)]
pub(crate) struct Seen {
    /// Time for which each guest ran after its host's owner had arrived, in seconds.
    pub(crate) stalls: Vec<f64>,
    /// Time from an owner's first activity until the eviction of each guest, in seconds.
    pub(crate) untold: Vec<f64>,
    /// Time from an owner's first activity until the last guest had left, for each host with
    /// guests, in seconds.
    pub(crate) clean: Vec<f64>,
    pub(crate) evictions: usize,
    pub(crate) shifts: usize,
    /// Total time for which tasks were paused by migrations, in seconds.
    pub(crate) standing: f64,
    /// Total time for which tasks were paused because of owners before a migration began, because
    /// no host had room, in seconds.
    pub(crate) stuck: f64,
    /// Completed work in seconds.
    pub(crate) work: f64,
    /// Total time for which hosts had no owner present, in seconds: an upper bound of the work.
    pub(crate) free: f64,
    pub(crate) free_max: usize,
    pub(crate) moves_by_hour: BTreeMap<u64, usize>,
    /// (mean number of free hosts, mean number of running tasks), by hour.
    pub(crate) by_hour: BTreeMap<u64, (f64, f64)>,
}

pub(crate) struct Pool {
    pub(crate) now: f64,
    pub(crate) snapshot: Snapshot,
    pub(crate) jobs: Vec<Job>,
    pub(crate) fair: Fair,
    pub(crate) seen: Seen,
    random: Random,
    tasks: BTreeMap<Tid, Task>,
    on: Vec<Vec<Tid>>,
    owned_since: Vec<Option<f64>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    free: usize,
    empty: usize,
    running: usize,
    last_tid: u32,
    /// Probability that the owner of a host is present at a time. `None` means that the owner is
    /// always present.
    presence: fn(u16, f64) -> Option<f64>,
    times: Times,
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6) as u64)
}

/// Mean duration of an owner's presence in seconds.
const VISIT: f64 = 75.0 * 60.0;

impl Pool {
    pub(crate) fn new(
        hosts: u16,
        seed: u64,
        presence: fn(u16, f64) -> Option<f64>,
        jobs: Vec<Job>,
        times: Times,
    ) -> Pool {
        let mut random = Random::new(seed);
        let here: Vec<bool> = (1..=hosts)
            .map(|i| presence(i, 0.0).is_none_or(|p| random.unit() < p))
            .collect();
        let owner = |here: bool| match here {
            true => Owner::Present {
                why: "at the keyboard".into(),
            },
            false => Owner::Absent { left: None },
        };
        let views: Hosts = (1..=hosts)
            .zip(&here)
            .map(|(i, here)| desktop(i, owner(*here)))
            .collect();
        let free = here.iter().filter(|here| !**here).count();
        let mut pool = Pool {
            now: 0.0,
            snapshot: Snapshot::new(Micros(0), Policy::Load, views),
            jobs,
            fair: Fair::new(UpDown::default()),
            seen: Seen::default(),
            random,
            tasks: BTreeMap::new(),
            on: vec![Vec::new(); usize::from(hosts) + 1],
            owned_since: here.iter().map(|here| here.then_some(0.0)).collect(),
            events: BinaryHeap::new(),
            count: 0,
            free,
            empty: free,
            running: 0,
            last_tid: 0,
            presence,
            times,
        };
        for host in 1..=hosts {
            pool.next_visit(host);
        }
        for job in 0..pool.jobs.len() {
            pool.at(pool.jobs[job].arrives, Event::Job(job));
        }
        pool.at(BALANCE, Event::Balance);
        pool
    }

    fn at(&mut self, time: f64, event: Event) {
        self.count += 1;
        self.events
            .push(Reverse((micros(time).0, self.count, event)));
    }

    fn is_owned(&self, host: u16) -> bool {
        self.owned_since[usize::from(host) - 1].is_some()
    }

    /// Returns the number of tasks that do not migrate although their host's owner is present.
    pub(crate) fn left_beside_owners(&self) -> usize {
        self.tasks
            .values()
            .filter(|task| self.is_owned(task.host) && task.moving.is_none())
            .count()
    }

    /// Schedules the next arrival or departure of a host's owner.
    fn next_visit(&mut self, host: u16) {
        let Some(present) = (self.presence)(host, self.now) else {
            return;
        };
        let mean = if self.is_owned(host) {
            VISIT
        } else {
            VISIT * (1.0 - present) / present.max(0.01)
        };
        // The next event is at most one hour later, because the probability depends on the time of
        // day.
        let wait = self.random.waits(mean);
        let at = self.now + wait.min(HOUR);
        self.at(
            at,
            Event::Owner(if wait > HOUR { host | 1 << 15 } else { host }),
        );
    }

    /// Updates the progress and the rates of the tasks of a host, after its tasks have changed.
    fn settle(&mut self, host: u16) {
        self.resume(host);
        let works = |t: &&Tid| self.tasks[*t].moving.is_none() && !self.tasks[*t].suspended;
        let working = self.on[usize::from(host)].iter().filter(works).count();
        let rate = if self.is_owned(host) {
            0.0
        } else {
            1.0 / working.max(1) as f64
        };
        for tid in self.on[usize::from(host)].clone() {
            let now = self.now;
            let task = self.tasks.get_mut(&tid).expect("on a host");
            let done = task.rate * (now - task.at);
            task.left -= done;
            self.seen.work += done;
            (task.at, task.rate) = (
                now,
                if task.moving.is_some() || task.suspended {
                    0.0
                } else {
                    rate
                },
            );
            task.version += 1;
            if task.rate > 0.0 {
                let (ends, event) = (
                    now + task.left.max(0.0) / task.rate,
                    Event::Ends {
                        task: tid,
                        version: task.version,
                    },
                );
                self.at(ends, event);
            }
        }
        let views = self.on[usize::from(host)]
            .iter()
            .map(|tid| self.view(*tid))
            .collect();
        self.snapshot
            .hosts
            .edit(h(host))
            .expect("a host of the pool")
            .tasks = views;
    }

    /// Resumes a preempted task on a host when no other task runs there.
    fn resume(&mut self, host: u16) {
        let tasks = &self.on[usize::from(host)];
        if tasks.iter().any(|t| !self.tasks[t].suspended) {
            return;
        }
        for tid in tasks {
            let task = self.tasks.get_mut(tid).expect("on a host");
            task.suspended = false;
            self.fair
                .takes(micros(self.now), self.jobs[task.job].user, 1);
        }
    }

    /// Preempts tasks of users with a higher index so that a request gets slots. Returns true if
    /// tasks were preempted.
    fn make_room(&mut self, ask: &Ask<'_>) -> bool {
        let gives = give_way(&self.snapshot, &self.fair, ask);
        for tid in gives.iter().map(|gives| gives.tid) {
            let task = self.tasks.get_mut(&tid).expect("it runs");
            task.suspended = true;
            self.fair
                .gives(micros(self.now), self.jobs[task.job].user, 1);
            let host = self
                .snapshot
                .hosts
                .edit(h(task.host))
                .expect("a host of the pool");
            host.tasks
                .iter_mut()
                .find(|t| t.tid == tid)
                .expect("it runs there")
                .suspended = true;
        }
        self.snapshot.hosts.refresh(self.snapshot.now);
        !gives.is_empty()
    }

    fn view(&self, tid: Tid) -> TaskView {
        let task = &self.tasks[&tid];
        let job = Tid::task(h(1), task.job as u32 + 1).expect("few jobs");
        let before = self
            .snapshot
            .host(h(task.host))
            .and_then(|h| h.tasks.iter().find(|t| t.tid == tid))
            .cloned();
        let fresh = TaskView {
            job,
            name: Arc::from("worker"),
            bytes: BYTES,
            ..TaskView::new(tid, micros(self.now))
        };
        let moving = task.moving.map(|to| Some(h(to)));
        let (done, user, suspended) = (
            micros(task.work - task.left),
            self.jobs[task.job].user,
            task.suspended,
        );
        TaskView {
            moving,
            done,
            user,
            suspended,
            ..before.unwrap_or(fresh)
        }
    }

    fn put(&mut self, tid: Tid, host: u16) {
        let on = &mut self.on[usize::from(host)];
        if on.is_empty() && self.owned_since[usize::from(host) - 1].is_none() {
            self.empty -= 1;
        }
        on.push(tid);
    }

    fn take(&mut self, tid: Tid, host: u16) {
        let on = &mut self.on[usize::from(host)];
        on.retain(|other| *other != tid);
        if on.is_empty() {
            match self.owned_since[usize::from(host) - 1] {
                None => self.empty += 1,
                Some(since) => self.seen.clean.push(self.now - since),
            }
        }
    }

    fn owner_changes(&mut self, host: u16) {
        let i = usize::from(host) - 1;
        let owned = self.owned_since[i].is_none();
        self.owned_since[i] = owned.then_some(self.now);
        let empty = usize::from(self.on[usize::from(host)].is_empty());
        let owner = if owned {
            (self.free, self.empty) = (self.free - 1, self.empty - empty);
            Owner::Present {
                why: "at the keyboard".into(),
            }
        } else {
            (self.free, self.empty) = (self.free + 1, self.empty + empty);
            Owner::Absent {
                left: Some(micros(self.now)),
            }
        };
        self.snapshot
            .hosts
            .edit(h(host))
            .expect("a host of the pool")
            .owner = owner;
        self.settle(host);
    }

    /// Returns a randomly drawn measurement.
    fn draw(&mut self, of: fn(&Times) -> &Vec<f64>) -> f64 {
        let at = self.random.unit();
        let all = of(&self.times);
        all[((all.len() as f64 * at) as usize).min(all.len() - 1)]
    }

    /// Begins the migration of a task, because of an owner or for rebalancing.
    fn begin_move(&mut self, tid: Tid, to: HostId) {
        let task = self
            .tasks
            .get_mut(&tid)
            .expect("only tasks that run are moved");
        task.moving = Some(to.index());
        let (host, runs) = (task.host, !task.suspended);
        let span = match self.owned_since[usize::from(host) - 1] {
            Some(since) => {
                let (clear, stop) = (self.draw(|t| &t.clears), self.draw(|t| &t.stops));
                // A preempted task was already paused, so it did not run after the owner's arrival.
                self.seen.stalls.extend(runs.then_some(stop));
                self.seen.stuck += self.now - since;
                self.seen.untold.push(self.now - since);
                // The task counts as paused until the end of the migration, although a real task
                // resumes slightly earlier.
                self.seen.standing += (clear - stop).max(0.0);
                clear
            }
            None => {
                self.seen.standing += self.draw(|t| &t.freezes);
                self.draw(|t| &t.moves)
            }
        };
        *self
            .seen
            .moves_by_hour
            .entry((self.now / HOUR) as u64)
            .or_default() += 1;
        self.settle(host);
        self.at(self.now + span, Event::Arrives { task: tid });
    }

    fn arrives(&mut self, tid: Tid) {
        let task = self
            .tasks
            .get_mut(&tid)
            .expect("a task on its way does not end");
        let (from, to) = (task.host, task.moving.take().expect("it was on its way"));
        if std::mem::take(&mut self.tasks.get_mut(&tid).expect("as before").suspended) {
            self.fair
                .takes(micros(self.now), self.jobs[self.tasks[&tid].job].user, 1);
        }
        let mut view = self.view(tid);
        view.moving = None;
        view.moves
            .retain(|at| micros(self.now).since(*at) < Micros::from_secs(60));
        view.moves.push(micros(self.now));
        self.tasks.get_mut(&tid).expect("as before").host = to;
        self.take(tid, from);
        self.put(tid, to);
        self.snapshot
            .hosts
            .edit(h(to))
            .expect("a host of the pool")
            .tasks
            .push(view);
        self.settle(from);
        self.settle(to);
    }

    fn ends(&mut self, tid: Tid) {
        let host = self.tasks[&tid].host;
        self.settle(host);
        let task = self.tasks.remove(&tid).expect("it was running");
        self.take(tid, host);
        self.settle(host);
        self.running -= 1;
        let job = &mut self.jobs[task.job];
        job.running -= 1;
        let user = job.user;
        if job.running == 0 {
            job.ended = Some(self.now);
        }
        self.fair.gives(micros(self.now), user, 1);
    }

    /// Starts waiting jobs in the order of service, as long as there is a free host for each
    /// process. `may_stop`: tasks may be preempted for them.
    fn start_jobs(&mut self, may_stop: bool) {
        while self.fair.waiting() > 0 {
            let now = micros(self.now);
            let turn = self
                .fair
                .turns(now)
                .first()
                .map(|(_, waiting)| *waiting)
                .expect("somebody waits");
            let number = turn.number as usize;
            let Job {
                processes, user, ..
            } = self.jobs[number];
            let request = SpawnRequest {
                count: processes,
                place: "?spread; free >= 1".into(),
                ..SpawnRequest::default()
            };
            let ask = Ask::of(user, &request, processes, h(1));
            if self.empty < processes as usize && !(may_stop && self.make_room(&ask)) {
                return;
            }
            let placed = place(&self.snapshot, &ask).hosts;
            if placed.iter().any(Result::is_err)
                || Limits::default()
                    .allow(self.fair.held(user), 0, processes)
                    .is_err()
            {
                return;
            }
            let hosts: Vec<u16> = placed.into_iter().flatten().map(HostId::index).collect();
            self.start(number, turn.number, &hosts);
        }
    }

    /// Starts a job on these hosts.
    fn start(&mut self, number: usize, waiting: u64, hosts: &[u16]) {
        let Job { work, user, .. } = self.jobs[number];
        let now = micros(self.now);
        self.fair.leave(now, user, waiting);
        self.fair.takes(now, user, hosts.len() as u32);
        for host in hosts.iter().copied() {
            self.last_tid += 1;
            let tid = Tid::task(h(1), self.last_tid).expect("few tasks");
            let work = work * (0.75 + 0.5 * self.random.unit());
            let (job, at) = (number, self.now);
            let task = Task {
                host,
                left: work,
                at,
                rate: 0.0,
                version: 0,
                job,
                work,
                moving: None,
                suspended: false,
            };
            self.tasks.insert(tid, task);
            self.put(tid, host);
            self.settle(host);
        }
        self.running += hosts.len();
        (self.jobs[number].started, self.jobs[number].running) =
            (Some(self.now), hosts.len() as u32);
        self.snapshot.hosts.refresh(now);
    }

    fn decide(&mut self) {
        let decided = moves(&self.snapshot);
        if let Some(again) = decided.again() {
            self.at(again.0 as f64 / 1e6, Event::Decide);
        }
        self.seen.evictions += decided.go.len();
        for step in decided.go {
            self.begin_move(step.tid, step.to);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Owner(host) => {
                let (host, same) = (host & !(1 << 15), host >> 15 == 1);
                if !same {
                    self.owner_changes(host);
                }
                self.next_visit(host);
            }
            Event::Ends { task, version } => {
                if self.tasks.get(&task).is_some_and(|t| t.version == version) {
                    self.ends(task);
                }
            }
            Event::Arrives { task } => self.arrives(task),
            Event::Balance => {
                self.at(self.now + BALANCE, Event::Balance);
                for shift in balance(&self.snapshot) {
                    let host = self
                        .snapshot
                        .hosts
                        .edit(shift.from)
                        .expect("a host of the pool");
                    let task = host
                        .tasks
                        .iter_mut()
                        .find(|t| t.tid == shift.tid)
                        .expect("it runs there");
                    task.shifts.push(micros(self.now));
                    self.seen.shifts += 1;
                    self.begin_move(shift.tid, shift.to);
                }
            }
            Event::Decide => {}
            Event::Job(number) => {
                let user = self.jobs[number].user;
                let job = Tid::task(h(1), number as u32 + 1).expect("few jobs");
                let waiting = Waiting {
                    number: number as u64,
                    user,
                    job,
                    since: micros(self.now),
                };
                self.fair
                    .wait(micros(self.now), waiting)
                    .expect("there is room in the queue");
            }
        }
    }

    /// Runs the simulation until the time `end`, in seconds.
    pub(crate) fn run(&mut self, end: f64) {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            let at = (at as f64 / 1e6).min(end);
            let span = at - self.now;
            self.seen.free += span * self.free as f64;
            self.seen.free_max = self.seen.free_max.max(self.free);
            let hour = self
                .seen
                .by_hour
                .entry((self.now / HOUR) as u64)
                .or_default();
            (hour.0, hour.1) = (
                hour.0 + span * self.free as f64 / HOUR,
                hour.1 + span * self.running as f64 / HOUR,
            );
            self.now = at;
            if self.now >= end {
                return;
            }
            let may_stop = matches!(event, Event::Job(_) | Event::Balance);
            self.handle(event);
            self.snapshot.now = micros(self.now);
            self.snapshot.hosts.refresh(self.snapshot.now);
            self.decide();
            self.snapshot.hosts.refresh(self.snapshot.now);
            self.start_jobs(may_stop);
        }
    }
}
