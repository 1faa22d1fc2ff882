//! A common scenario: tasks exchange messages and migrate, owners of their hosts arrive and leave,
//! and a user suspends some tasks.

use super::sim::{Received, Sim, host};
use crate::HostId;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::owner::{EvictionMode, GuestAccess, GuestDirective};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request, SpawnRequest};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// Time after which every guest must be paused in the simulation. It includes up to 2 ms until a
/// simulated tasker receives an order.
pub(super) const GUEST_PAUSE_MAX: Micros = Micros::from_millis(50);
/// Time after which a suspended task must be paused. It is longer than [`GUEST_PAUSE_MAX`], because
/// a suspension has no owner who waits.
const SUSPEND_PAUSE_MAX: Micros = Micros::from_millis(220);

pub(super) fn stop_guests_request() -> Request {
    evict_guests_request(None, EvictionMode::Move)
}

pub(super) fn evict_guests_request(evict_at: Option<Micros>, eviction: EvictionMode) -> Request {
    let access = GuestAccess::Paused { evict_at, eviction };
    Request::SetGuestDirective(GuestDirective {
        access,
        reason: "olga is there".into(),
        limits: GuestLimits::default(),
    })
}

pub(super) fn welcome_guests_request() -> Request {
    limit_guests_request(GuestLimits::default())
}

/// Returns a request of an owner agent: the owner has left and sets these limits for guests.
pub(super) fn limit_guests_request(limits: GuestLimits) -> Request {
    Request::SetGuestDirective(GuestDirective {
        access: GuestAccess::Welcome,
        reason: "olga has left".into(),
        limits,
    })
}

pub(super) fn migrate_request(tid: Tid, target_name: &str) -> Request {
    Request::Migrate {
        tid,
        target: target_name.into(),
        cause: None,
        wait_for_end: true,
    }
}

pub(super) fn spawn_on(host_name: &str, file: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        program: file.into(),
        task_count: count,
        where_arg: host_name.into(),
        flags: 1,
        ..SpawnRequest::default()
    }
}

pub(super) fn spawn(sim: &mut Sim, console: usize, request: SpawnRequest) -> Vec<usize> {
    let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
        panic!("no tasks")
    };
    let tids: Vec<Tid> = results.into_iter().flatten().collect();
    sim.run_until("all are there", |s| {
        tids.iter()
            .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
    });
    tids.iter().map(|t| sim.proc_of(*t)).collect()
}

pub(super) fn list_tasks(sim: &mut Sim, console: usize) -> Vec<TaskInfo> {
    match sim.ask(
        console,
        Request::Tasks {
            selector: Tid::NONE,
        },
    ) {
        Reply::Tasks(tasks) => tasks,
        reply => panic!("no list: {reply:?}"),
    }
}

pub(super) fn list_events(sim: &mut Sim, console: usize) -> Vec<EventKind> {
    match sim.ask(
        console,
        Request::Events {
            first_number: 0,
            events_max: 1000,
        },
    ) {
        Reply::Events(events) => events.into_iter().map(|event| event.kind).collect(),
        reply => panic!("no events: {reply:?}"),
    }
}

/// Sends the next number of this pair from one process to a task, if the sending program runs.
pub(super) fn send_number_if_running(
    sim: &mut Sim,
    sent_counts: &mut BTreeMap<(usize, Tid), u32>,
    from: usize,
    to: Tid,
) {
    if sim.procs[from].is_frozen() || sim.procs[from].exited {
        return;
    }
    let number = sent_counts.entry((from, to)).or_default();
    sim.send_message(from, to, &number.to_be_bytes());
    *number += 1;
}

/// Asserts that the messages of every sender to every receiver arrived once and in order. Returns
/// the number of messages.
pub(super) fn assert_in_order(sim: &Sim, procs: &[usize]) -> u32 {
    let mut message_count = 0;
    for p in procs {
        let mut next_numbers: BTreeMap<Tid, u32> = BTreeMap::new();
        for (src, body) in sim.procs[*p].received.iter().filter_map(|s| match s {
            Received::Message(src, body) => Some((*src, body)),
            Received::Notification(_) => None,
        }) {
            let next_number = next_numbers.entry(src).or_default();
            assert_eq!(
                body[..],
                next_number.to_be_bytes(),
                "from {src} (seed {})",
                sim.seed
            );
            *next_number += 1;
            message_count += 1;
        }
    }
    message_count
}

/// A simulation with two tasks on each of three hosts, and an owner agent on each host.
pub(super) struct Scenario {
    pub(super) sim: Sim,
    pub(super) console: usize,
    pub(super) procs: Vec<usize>,
    pub(super) tids: Vec<Tid>,
    pub(super) owner_agents: Vec<usize>,
    pub(super) sent_counts: BTreeMap<(usize, Tid), u32>,
    /// Times from which the guests of a host must be paused, by host. Hosts that welcome guests
    /// have no entry.
    pub(super) guest_stop_times: BTreeMap<HostId, Micros>,
    /// Times from which a task is suspended, by task. Other tasks have no entry.
    pub(super) suspend_times: BTreeMap<Tid, Micros>,
    pub(super) open_migrations: Vec<(Tid, RequestId)>,
}

impl Scenario {
    pub(super) fn new(seed: u64) -> Self {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let procs: Vec<usize> = (1..=3)
            .flat_map(|n| spawn(&mut sim, console, spawn_on(&format!("h{n}"), "child", 2)))
            .collect();
        let tids = procs.iter().map(|p| sim.procs[*p].tid()).collect();
        let owner_agents = (1..=3).map(|n| sim.enrol(host(n))).collect();
        let (sent_counts, guest_stop_times, suspend_times, open_migrations) = Default::default();
        Self {
            sim,
            console,
            procs,
            tids,
            owner_agents,
            sent_counts,
            guest_stop_times,
            suspend_times,
            open_migrations,
        }
    }

    /// Creates a scenario in which quiescing is slow. With every second seed, steps of migrations
    /// may fail.
    pub(super) fn with_faults(seed: u64) -> Self {
        let mut scenario = Self::new(seed);
        scenario.sim.random_faults.slow_quiesce_percent = 25;
        scenario.sim.random_faults.failed_steps_percent =
            if seed.is_multiple_of(2) { 8 } else { 0 };
        scenario
    }

    pub(super) fn send_directive(&mut self, n: usize, directive: Request) {
        let (sim, host_id) = (&mut self.sim, host(n as u16 + 1));
        match &directive {
            Request::SetGuestDirective(GuestDirective {
                access: GuestAccess::Welcome,
                ..
            }) => drop(self.guest_stop_times.remove(&host_id)),
            _ => drop(self.guest_stop_times.entry(host_id).or_insert(sim.now)),
        }
        assert_eq!(sim.ask(self.owner_agents[n], directive), Reply::Done);
    }

    pub(super) fn set_suspended(&mut self, tid: Tid, must_suspend: bool) {
        let reply = self.sim.ask(
            self.console,
            Request::Suspend {
                tid,
                suspend: must_suspend,
                cause: None,
            },
        );
        assert_eq!(reply, Reply::Done, "{tid} (seed {})", self.sim.seed);
        if must_suspend {
            self.suspend_times.entry(tid).or_insert(self.sim.now);
        } else {
            self.suspend_times.remove(&tid);
        }
    }

    /// Sends five messages between random tasks, then advances the time by less than 10 ms.
    pub(super) fn exchange_messages(&mut self) {
        for _ in 0..5 {
            let (from, to) = (
                self.sim.rng.below(6) as usize,
                self.sim.rng.below(6) as usize,
            );
            send_number_if_running(
                &mut self.sim,
                &mut self.sent_counts,
                self.procs[from],
                self.tids[to],
            );
        }
        let delay = Micros(self.sim.rng.below(10_000));
        self.sim.advance(delay);
    }

    /// Creates a scenario in which the console is notified of exits of the tasks of h2 with tag 1.
    /// The tasks have exchanged some messages.
    pub(super) fn with_exit_notification(seed: u64) -> Self {
        let mut scenario = Self::new(seed);
        scenario.sim.random_faults.slow_quiesce_percent = 25;
        let subjects = NotifySubjects::TaskExit(scenario.tids[2..4].to_vec());
        scenario.sim.ask(
            scenario.console,
            Request::Notify(NotifyRequest {
                subjects,
                ctx: 0,
                tag: 1,
                is_cancellation: false,
            }),
        );
        scenario.exchange_messages();
        scenario
    }

    /// Advances the time by less than `delay_max_us` microseconds. With every second seed, also
    /// requests a migration.
    pub(super) fn wait_and_maybe_migrate(&mut self, delay_max_us: u64) {
        let delay = Micros(self.sim.rng.below(delay_max_us));
        self.sim.advance(delay);
        if self.sim.seed.is_multiple_of(2) {
            self.request_random_migration();
        }
    }

    /// Waits 20 s and asserts that each task of h2 is either listed or reported dead, exactly once.
    /// Returns the task list.
    pub(super) fn assert_exits_reported_once(&mut self) -> Vec<TaskInfo> {
        self.sim.advance(Micros::from_secs(20));
        let tasks = list_tasks(&mut self.sim, self.console);
        for tid in &self.tids[2..4] {
            let list_count = tasks.iter().filter(|t| t.tid == *tid).count();
            let exit_count = self.sim.procs[self.console].notifications(1);
            let exit_count = exit_count
                .iter()
                .filter(|m| m.body[..4] == tid.raw().to_be_bytes())
                .count();
            assert_eq!(list_count + exit_count, 1, "{tid} (seed {})", self.sim.seed);
        }
        tasks
    }

    /// Waits 3 s and asserts that every process of a task that has not exited runs.
    pub(super) fn assert_all_run(&mut self) {
        self.sim.advance(Micros::from_secs(3));
        for p in &self.procs {
            let proc = &self.sim.procs[*p];
            assert!(
                proc.exited || (!proc.is_frozen() && proc.conn.is_some()),
                "seed {}",
                self.sim.seed
            );
        }
    }

    pub(super) fn request_random_migration(&mut self) {
        let (tid, to) = (
            self.tids[self.sim.rng.below(6) as usize],
            1 + self.sim.rng.below(3),
        );
        let id = self
            .sim
            .request(self.console, migrate_request(tid, &format!("h{to}")));
        self.open_migrations.push((tid, id));
    }

    /// Asserts that a task is paused if the owner of its host or a suspension requires that and its
    /// time limit has passed. Migrating tasks are excluded.
    pub(super) fn assert_paused(&mut self) {
        let replies = &self.sim.procs[self.console].replies;
        let migrating_tids: Vec<Tid> = self
            .open_migrations
            .iter()
            .filter(|(_, id)| !replies.contains_key(id))
            .map(|(tid, _)| *tid)
            .collect();
        for (p, tid) in self
            .procs
            .iter()
            .zip(&self.tids)
            .filter(|(_, tid)| !migrating_tids.contains(tid))
        {
            let proc = &self.sim.procs[*p];
            let guest_stop_time = self
                .guest_stop_times
                .get(&proc.host)
                .filter(|guest_stop_time| **guest_stop_time + GUEST_PAUSE_MAX < self.sim.now);
            let suspend_time = self
                .suspend_times
                .get(tid)
                .filter(|guest_stop_time| **guest_stop_time + SUSPEND_PAUSE_MAX < self.sim.now);
            let may_run = guest_stop_time.is_none() && suspend_time.is_none();
            assert!(
                may_run || proc.is_frozen() || proc.exited,
                "{tid} runs (seed {})",
                self.sim.seed
            );
        }
    }

    /// Makes all owners leave, asserts that suspended tasks stay paused, and resumes them. Then
    /// asserts that all tasks run and that no message was lost. Returns the number of successful
    /// migrations.
    pub(super) fn resume_all_and_check(&mut self) -> usize {
        let (console, migrations) = (self.console, std::mem::take(&mut self.open_migrations));
        self.sim.run_until("all moves", |s| {
            migrations
                .iter()
                .all(|(_, id)| s.procs[console].replies.contains_key(id))
        });
        for n in 0..3 {
            self.send_directive(n, welcome_guests_request());
        }
        self.sim.advance(Micros::from_secs(1));
        self.assert_paused();
        for task in list_tasks(&mut self.sim, console)
            .iter()
            .filter(|t| self.tids.contains(&t.tid))
        {
            let is_suspended = self.suspend_times.contains_key(&task.tid);
            assert_eq!(
                task.suspended, is_suspended,
                "{} (seed {})",
                task.tid, self.sim.seed
            );
        }
        while let Some(tid) = self.suspend_times.keys().next().copied() {
            self.set_suspended(tid, false);
        }
        let (procs, message_count) = (self.procs.clone(), self.sent_counts.values().sum::<u32>());
        self.sim.run_until("everybody", |s| {
            procs.iter().all(|p| s.procs[*p].conn.is_some())
        });
        self.sim.run_until("all messages", |s| {
            assert_in_order(s, &procs) == message_count
        });
        self.sim.advance(Micros::from_secs(3));
        let tasks = list_tasks(&mut self.sim, console);
        for tid in &self.tids {
            let proc = &self.sim.procs[self.sim.proc_of(*tid)];
            assert!(
                !proc.is_frozen() && !proc.exited,
                "{tid} (seed {})",
                self.sim.seed
            );
            let task = tasks.iter().find(|t| t.tid == *tid).expect("it is there");
            assert_eq!(
                (task.host, task.migrating),
                (proc.host, false),
                "seed {}",
                self.sim.seed
            );
            assert!(
                !task.paused && !task.suspended,
                "{tid} (seed {})",
                self.sim.seed
            );
        }
        assert_eq!(self.sim.resume_token_count(), 0, "seed {}", self.sim.seed);
        migrations
            .iter()
            .filter(|(_, id)| matches!(self.sim.procs[console].replies[id], Reply::Migrated(Ok(_))))
            .count()
    }
}
