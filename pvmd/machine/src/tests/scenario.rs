//! Tasks that exchange messages and migrate while the owners of their hosts arrive and leave and a
//! user suspends some of the tasks.

use super::sim::{Received, Sim, host};
use crate::HostId;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::owner::{EvictionMode, GuestAccess, GuestDirective};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request, SpawnRequest};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// Time after which every guest must be paused in the simulation. The simulated taskers take up to
/// 2 ms to receive an order.
pub(super) const GUEST_PAUSE_MAX: Micros = Micros::from_millis(50);
/// Time after which a suspended task must be paused. Longer than [`GUEST_PAUSE_MAX`], because no
/// owner waits for it.
const SUSPEND_PAUSE_MAX: Micros = Micros::from_millis(220);

pub(super) fn stop_guests() -> Request {
    stop_guests_until(None, EvictionMode::Move)
}

pub(super) fn stop_guests_until(leave_at: Option<Micros>, then: EvictionMode) -> Request {
    let guests = GuestAccess::Paused {
        evict_at: leave_at,
        eviction: then,
    };
    Request::SetGuestDirective(GuestDirective {
        access: guests,
        reason: "olga is there".into(),
        limits: GuestLimits::default(),
    })
}

pub(super) fn welcome_guests() -> Request {
    welcome_guests_with(GuestLimits::default())
}

/// Returns the directive of an owner who has left and sets these limits for guests.
pub(super) fn welcome_guests_with(limits: GuestLimits) -> Request {
    Request::SetGuestDirective(GuestDirective {
        access: GuestAccess::Welcome,
        reason: "olga has left".into(),
        limits,
    })
}

pub(super) fn migrate_request(tid: Tid, to: &str) -> Request {
    Request::Migrate {
        tid,
        to: to.into(),
        cause: None,
        wait: true,
    }
}

pub(super) fn spawn_on(place: &str, file: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        file: file.into(),
        count,
        place: place.into(),
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
        Reply::Tasks(list) => list,
        reply => panic!("no list: {reply:?}"),
    }
}

pub(super) fn list_events(sim: &mut Sim, console: usize) -> Vec<EventKind> {
    match sim.ask(
        console,
        Request::Events {
            first_number: 0,
            limit: 1000,
        },
    ) {
        Reply::Events(events) => events.into_iter().map(|event| event.kind).collect(),
        reply => panic!("no events: {reply:?}"),
    }
}

/// Sends a numbered message from one process to another, if its program runs.
pub(super) fn send_numbered(
    sim: &mut Sim,
    sent: &mut BTreeMap<(usize, Tid), u32>,
    from: usize,
    to: Tid,
) {
    if sim.procs[from].is_frozen() || sim.procs[from].exited {
        return;
    }
    let number = sent.entry((from, to)).or_default();
    sim.send_message(from, to, &number.to_be_bytes());
    *number += 1;
}

/// Asserts that every message arrived once and in order. Returns the number of messages.
pub(super) fn assert_in_order(sim: &Sim, procs: &[usize]) -> u32 {
    let mut total = 0;
    for p in procs {
        let mut next: BTreeMap<Tid, u32> = BTreeMap::new();
        for (src, body) in sim.procs[*p].received.iter().filter_map(|s| match s {
            Received::Message(src, body) => Some((*src, body)),
            Received::Notification(_) => None,
        }) {
            let expected = next.entry(src).or_default();
            assert_eq!(
                body[..],
                expected.to_be_bytes(),
                "from {src} (seed {})",
                sim.seed
            );
            *expected += 1;
            total += 1;
        }
    }
    total
}

/// A simulation with two tasks on each of three hosts, and an owner agent on each host.
pub(super) struct Scenario {
    pub(super) sim: Sim,
    pub(super) console: usize,
    pub(super) procs: Vec<usize>,
    pub(super) tids: Vec<Tid>,
    pub(super) owner_agents: Vec<usize>,
    pub(super) sent_counts: BTreeMap<(usize, Tid), u32>,
    /// Time since when the guests of a host must be paused, by host.
    pub(super) stopped_at: BTreeMap<HostId, Micros>,
    /// Time since when a task is suspended, by task.
    pub(super) suspended_at: BTreeMap<Tid, Micros>,
    pub(super) open_migrations: Vec<(Tid, RequestId)>,
}

impl Scenario {
    pub(super) fn new(seed: u64) -> Scenario {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let procs: Vec<usize> = (1..=3)
            .flat_map(|n| spawn(&mut sim, console, spawn_on(&format!("h{n}"), "child", 2)))
            .collect();
        let tids = procs.iter().map(|p| sim.procs[*p].tid()).collect();
        let owner_agents = (1..=3).map(|n| sim.enrol(host(n))).collect();
        let (sent_counts, stopped_at, suspended_at, open_migrations) = Default::default();
        Scenario {
            sim,
            console,
            procs,
            tids,
            owner_agents,
            sent_counts,
            stopped_at,
            suspended_at,
            open_migrations,
        }
    }

    /// Creates a scenario in which quiescing is slow; with every second seed, steps of migrations
    /// fail.
    pub(super) fn with_faults(seed: u64) -> Scenario {
        let mut scene = Scenario::new(seed);
        scene.sim.random_faults.slow_quiesce_percent = 25;
        scene.sim.random_faults.failed_steps_percent = if seed.is_multiple_of(2) { 8 } else { 0 };
        scene
    }

    pub(super) fn send_directive(&mut self, n: usize, directive: Request) {
        let (sim, host_id) = (&mut self.sim, host(n as u16 + 1));
        match &directive {
            Request::SetGuestDirective(GuestDirective {
                access: GuestAccess::Welcome,
                ..
            }) => drop(self.stopped_at.remove(&host_id)),
            _ => drop(self.stopped_at.entry(host_id).or_insert(sim.now)),
        }
        assert_eq!(sim.ask(self.owner_agents[n], directive), Reply::Done);
    }

    pub(super) fn suspend(&mut self, tid: Tid, suspend: bool) {
        let done = self.sim.ask(
            self.console,
            Request::Suspend {
                tid,
                suspend,
                cause: None,
            },
        );
        assert_eq!(done, Reply::Done, "{tid} (seed {})", self.sim.seed);
        if suspend {
            self.suspended_at.entry(tid).or_insert(self.sim.now);
        } else {
            self.suspended_at.remove(&tid);
        }
    }

    /// Sends some messages and lets some time pass.
    pub(super) fn exchange_messages(&mut self) {
        for _ in 0..5 {
            let (from, to) = (
                self.sim.rng.below(6) as usize,
                self.sim.rng.below(6) as usize,
            );
            send_numbered(
                &mut self.sim,
                &mut self.sent_counts,
                self.procs[from],
                self.tids[to],
            );
        }
        let wait = Micros(self.sim.rng.below(10_000));
        self.sim.advance(wait);
    }

    /// Creates a scenario in which the console is notified when tasks of h2 exit, and exchanges
    /// some messages.
    pub(super) fn with_exit_notification(seed: u64) -> Scenario {
        let mut scene = Scenario::new(seed);
        scene.sim.random_faults.slow_quiesce_percent = 25;
        let what = NotifySubjects::TaskExit(scene.tids[2..4].to_vec());
        scene.sim.ask(
            scene.console,
            Request::Notify(NotifyRequest {
                subjects: what,
                ctx: 0,
                tag: 1,
                cancel: false,
            }),
        );
        scene.exchange_messages();
        scene
    }

    /// Waits a random time and, with every second seed, starts a migration.
    pub(super) fn wait_randomly(&mut self, max_micros: u64) {
        let wait = Micros(self.sim.rng.below(max_micros));
        self.sim.advance(wait);
        if self.sim.seed.is_multiple_of(2) {
            self.migrate_one();
        }
    }

    /// Waits and asserts that each task of h2 is either listed or reported dead, exactly once.
    /// Returns the list of tasks.
    pub(super) fn assert_exits_reported_once(&mut self) -> Vec<TaskInfo> {
        self.sim.advance(Micros::from_secs(20));
        let list = list_tasks(&mut self.sim, self.console);
        for tid in &self.tids[2..4] {
            let alive = list.iter().filter(|t| t.tid == *tid).count();
            let dead = self.sim.procs[self.console].notifications(1);
            let dead = dead
                .iter()
                .filter(|m| m.body[..4] == tid.raw().to_be_bytes())
                .count();
            assert_eq!(alive + dead, 1, "{tid} (seed {})", self.sim.seed);
        }
        list
    }

    /// Waits and asserts that every task that has not exited runs.
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

    pub(super) fn migrate_one(&mut self) {
        let (tid, to) = (
            self.tids[self.sim.rng.below(6) as usize],
            1 + self.sim.rng.below(3),
        );
        let id = self
            .sim
            .request(self.console, migrate_request(tid, &format!("h{to}")));
        self.open_migrations.push((tid, id));
    }

    /// Asserts that each task that is not migrating is paused if the owner of its host or a
    /// suspension requires that.
    pub(super) fn assert_paused(&mut self) {
        let replies = &self.sim.procs[self.console].replies;
        let moving: Vec<Tid> = self
            .open_migrations
            .iter()
            .filter(|(_, id)| !replies.contains_key(id))
            .map(|(tid, _)| *tid)
            .collect();
        for (p, tid) in self
            .procs
            .iter()
            .zip(&self.tids)
            .filter(|(_, tid)| !moving.contains(tid))
        {
            let proc = &self.sim.procs[*p];
            let since = self
                .stopped_at
                .get(&proc.host)
                .filter(|since| **since + GUEST_PAUSE_MAX < self.sim.now);
            let suspended = self
                .suspended_at
                .get(tid)
                .filter(|since| **since + SUSPEND_PAUSE_MAX < self.sim.now);
            let may_run = since.is_none() && suspended.is_none();
            assert!(
                may_run || proc.is_frozen() || proc.exited,
                "{tid} runs (seed {})",
                self.sim.seed
            );
        }
    }

    /// Lets all owners leave, checks that suspended tasks stay paused, and resumes them. Then
    /// asserts that all tasks run and that no message was lost. Returns the number of successful
    /// migrations.
    pub(super) fn finish(&mut self) -> usize {
        let (console, open) = (self.console, std::mem::take(&mut self.open_migrations));
        self.sim.run_until("all moves", |s| {
            open.iter()
                .all(|(_, id)| s.procs[console].replies.contains_key(id))
        });
        for n in 0..3 {
            self.send_directive(n, welcome_guests());
        }
        self.sim.advance(Micros::from_secs(1));
        self.assert_paused();
        for task in list_tasks(&mut self.sim, console)
            .iter()
            .filter(|t| self.tids.contains(&t.tid))
        {
            let suspended = self.suspended_at.contains_key(&task.tid);
            assert_eq!(
                task.suspended, suspended,
                "{} (seed {})",
                task.tid, self.sim.seed
            );
        }
        while let Some(tid) = self.suspended_at.keys().next().copied() {
            self.suspend(tid, false);
        }
        let (procs, total) = (self.procs.clone(), self.sent_counts.values().sum::<u32>());
        self.sim.run_until("everybody", |s| {
            procs.iter().all(|p| s.procs[*p].conn.is_some())
        });
        self.sim
            .run_until("all messages", |s| assert_in_order(s, &procs) == total);
        self.sim.advance(Micros::from_secs(3));
        let list = list_tasks(&mut self.sim, console);
        for tid in &self.tids {
            let proc = &self.sim.procs[self.sim.proc_of(*tid)];
            assert!(
                !proc.is_frozen() && !proc.exited,
                "{tid} (seed {})",
                self.sim.seed
            );
            let task = list.iter().find(|t| t.tid == *tid).expect("it is there");
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
        assert_eq!(self.sim.tokens_left(), 0, "seed {}", self.sim.seed);
        open.iter()
            .filter(|(_, id)| matches!(self.sim.procs[console].replies[id], Reply::Migrated(Ok(_))))
            .count()
    }
}
