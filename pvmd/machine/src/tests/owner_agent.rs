//! Deaths of owner agents. The death of an agent must not resume guests while the owner of their
//! host is present.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, limit_guests_request, list_events, list_tasks, spawn, spawn_on,
    stop_guests_request, welcome_guests_request,
};
use super::sim::{Sim, host, seeds};
use super::tasks::send_to_daemon;
use crate::HostId;
use crate::owner_agent::{OWNER_AGENT_TIMEOUT, SWITCHED_OFF_CHECK_INTERVAL};
use sempa_proto::event::EventKind;
use sempa_proto::load::{GuestLimits, LOAD_WATCHER_PROGRAM};
use sempa_proto::owner::GUEST_REFUSED_ERROR;
use sempa_proto::sm::{SM_EXEC, pack_exec};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{Reply, Request, RmServices, SPAWN_NO_PARENT, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeSet;

const SIGTERM: i32 = 15;
/// Longer than every timeout of the daemon.
const LONG_WAIT: Micros = Micros::from_secs(120);
/// Longest time in which a load watcher that has died is replaced, if it ran for some time.
const QUICK_START_MAX: Micros = Micros::from_secs(1);

/// A host with a load watcher and two guests. The watcher's directive pauses the guests.
struct WatchedHost {
    sim: Sim,
    console: usize,
    watcher: usize,
    guests: Vec<usize>,
}

/// Returns the connected load watchers that run.
fn running_watchers(sim: &Sim) -> Vec<usize> {
    let is_running = |p: &usize| {
        let process = &sim.procs[*p];
        process.is_program(LOAD_WATCHER_PROGRAM) && process.welcome.is_some() && !process.exited
    };
    (0..sim.procs.len()).filter(is_running).collect()
}

fn running_watcher(sim: &Sim) -> Option<usize> {
    running_watchers(sim).first().copied()
}

/// Runs until a load watcher runs on the master. The load watcher announces that it answers.
fn await_watcher(sim: &mut Sim) -> usize {
    sim.run_until("it runs", |s| running_watcher(s).is_some());
    let watcher = running_watcher(sim).expect("it runs");
    sim.announce_alive(watcher);
    watcher
}

/// Creates a master whose daemon starts a load watcher.
fn watched_master(seed: u64) -> Sim {
    Sim::with_config(seed, |c| c.starts_watcher = true)
}

impl WatchedHost {
    fn new(seed: u64) -> Self {
        let mut sim = watched_master(seed);
        let watcher = await_watcher(&mut sim);
        let console = sim.enrol(HostId::MASTER);
        let guests = spawn(&mut sim, console, spawn_on("h1", "child", 2));
        let mut watched_host = Self {
            sim,
            console,
            watcher,
            guests,
        };
        assert_eq!(
            watched_host.sim.ask(watcher, stop_guests_request()),
            Reply::Done
        );
        watched_host.sim.advance(GUEST_PAUSE_MAX);
        watched_host.assert_paused();
        watched_host
    }

    fn assert_paused(&self) {
        assert!(
            self.guests.iter().all(|p| self.sim.procs[*p].is_frozen()),
            "seed {}",
            self.sim.seed
        );
    }

    fn run_until_guests_resume(&mut self) {
        let guests = self.guests.clone();
        let are_all_running = |s: &Sim| {
            guests
                .iter()
                .all(|p| !s.procs[*p].is_frozen() && s.procs[*p].conn.is_some())
        };
        self.sim.run_until("they go on", are_all_running);
    }

    fn count_notes(&mut self, pattern: &str) -> usize {
        let is_matching_note =
            |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains(pattern));
        list_events(&mut self.sim, self.console)
            .iter()
            .filter(|kind| is_matching_note(kind))
            .count()
    }
}

/// When the load watcher dies, guests stay paused, and the daemon starts another one at once. They
/// resume on a directive of the new load watcher.
#[test]
fn guests_stay_paused_until_new_watcher_resumes_them() {
    for seed in seeds(20) {
        let mut watched_host = WatchedHost::new(seed);
        let old_watcher = watched_host.watcher;
        watched_host.sim.exit_proc(old_watcher, SIGTERM);
        let died_at = watched_host.sim.now;
        let new_watcher = await_watcher(&mut watched_host.sim);
        assert!(watched_host.sim.now.since(died_at) < QUICK_START_MAX);
        watched_host.sim.advance(LONG_WAIT);
        watched_host.assert_paused();
        assert_eq!(running_watchers(&watched_host.sim), [new_watcher]);
        assert_eq!(
            watched_host.sim.ask(new_watcher, stop_guests_request()),
            Reply::Done
        );
        watched_host.sim.advance(LONG_WAIT);
        watched_host.assert_paused();
        assert_eq!(
            watched_host.sim.ask(new_watcher, welcome_guests_request()),
            Reply::Done
        );
        watched_host.run_until_guests_resume();
        assert_eq!(watched_host.count_notes("starts another one"), 1);
    }
}

/// A load watcher that ends with status 0 has found that the owner's side wants none: its directive
/// expires, and another one looks again later.
#[test]
fn switched_off_watcher_is_started_again_later() {
    let mut watched_host = WatchedHost::new(2);
    let watcher = watched_host.watcher;
    watched_host.sim.exit_proc(watcher, 0);
    watched_host
        .sim
        .advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
    watched_host.assert_paused();
    watched_host.run_until_guests_resume();
    watched_host.sim.advance(LONG_WAIT);
    assert_eq!(running_watcher(&watched_host.sim), None);
    let next_watcher = await_watcher(&mut watched_host.sim);
    // The setting is gone, so this one stays.
    watched_host.sim.advance(SWITCHED_OFF_CHECK_INTERVAL);
    assert_eq!(running_watchers(&watched_host.sim), [next_watcher]);
    assert_eq!(watched_host.count_notes("has died"), 0);
}

/// The daemon starts a load watcher on every host, and programs do not notice: tids, task lists and
/// events are as without it.
#[test]
fn own_watcher_is_invisible_to_programs() {
    let observe = |starts_watcher: bool| {
        let mut sim = Sim::with_config(7, |c| c.starts_watcher = starts_watcher);
        if starts_watcher {
            await_watcher(&mut sim);
        }
        let console = sim.enrol(HostId::MASTER);
        let children = spawn(&mut sim, console, spawn_on("h1", "child", 3));
        let mut tids: Vec<Tid> = children.iter().map(|p| sim.procs[*p].tid()).collect();
        tids.push(sim.procs[console].tid());
        sim.advance(LONG_WAIT);
        let tasks = list_tasks(&mut sim, console);
        let events = list_events(&mut sim, console);
        (sim, tids, tasks, events)
    };
    let (_, expected_tids, expected_tasks, expected_events) = observe(false);
    let (mut sim, tids, tasks, events) = observe(true);
    assert_eq!(tids, expected_tids);
    let (hidden_tasks, visible_tasks): (Vec<_>, Vec<_>) =
        tasks.into_iter().partition(TaskInfo::is_hidden);
    let names =
        |tasks: &[TaskInfo]| -> Vec<_> { tasks.iter().map(|t| (t.tid, t.name.clone())).collect() };
    assert_eq!(names(&visible_tasks), names(&expected_tasks));
    let watcher = running_watcher(&sim).expect("it runs");
    let watcher_tid = sim.procs[watcher].tid();
    assert_eq!(
        names(&hidden_tasks),
        [(watcher_tid, LOAD_WATCHER_PROGRAM.to_string())]
    );
    assert_eq!(watcher_tid.local_part(), Tid::LOCAL_PART_MAX);
    assert_eq!(events.len(), expected_events.len(), "{events:?}");
    // The next one has another tid, and its predecessor's end leaves no event about a task.
    sim.exit_proc(watcher, SIGTERM);
    let next_watcher = await_watcher(&mut sim);
    assert_ne!(sim.procs[next_watcher].tid(), watcher_tid);
    let console = sim.enrol(HostId::MASTER);
    let is_about_watcher = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid, .. } | EventKind::TaskStarted { tid, .. } if *tid == watcher_tid);
    assert!(!list_events(&mut sim, console).iter().any(is_about_watcher));
}

/// A configured resource manager has time to start a load watcher. If it does not, the daemon
/// starts one.
#[test]
fn resource_manager_starts_its_watcher_first() {
    let mut sim = Sim::with_config(8, |c| {
        c.starts_watcher = true;
        c.rm_command = Some(vec!["rm".into()]);
    });
    sim.advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
    assert_eq!(running_watcher(&sim), None);
    await_watcher(&mut sim);
    let console = sim.enrol(HostId::MASTER);
    let is_death =
        |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains("has died"));
    assert!(!list_events(&mut sim, console).iter().any(is_death));
}

/// A slave starts its load watcher when it joins.
#[test]
fn each_host_has_a_watcher() {
    let mut sim = Sim::with_config(9, |c| c.starts_watcher = true);
    let console = sim.enrol(HostId::MASTER);
    for name in ["h2", "h3"] {
        let request = Request::AddHosts {
            host_file_lines: vec![name.into()],
        };
        assert!(matches!(sim.ask(console, request), Reply::HostsAdded(_)));
    }
    sim.run_until("each has one", |s| running_watchers(s).len() == 3);
    let hosts: BTreeSet<HostId> = running_watchers(&sim)
        .into_iter()
        .map(|p| sim.procs[p].host)
        .collect();
    assert_eq!(hosts.len(), 3);
}

/// A load watcher that hangs before it has begun to watch is replaced, too.
#[test]
fn watcher_that_hangs_at_its_start_is_replaced() {
    let mut sim = watched_master(10);
    sim.run_until("it runs", |s| running_watcher(s).is_some());
    let first_watcher = running_watcher(&sim).expect("it runs");
    sim.procs[first_watcher].stop();
    sim.run_until("it is dead", |s| s.procs[first_watcher].exited);
    await_watcher(&mut sim);
    let console = sim.enrol(HostId::MASTER);
    let is_report = |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains("has not begun to watch"));
    assert!(list_events(&mut sim, console).iter().any(is_report));
}

/// A load watcher that dies again and again is started at growing intervals, and an event reports
/// once that the owner is not protected.
#[test]
fn dying_watcher_is_started_at_growing_intervals() {
    let mut sim = watched_master(11);
    let mut pauses = Vec::new();
    for _ in 0..5 {
        sim.run_until("it runs", |s| running_watcher(s).is_some());
        let watcher = running_watcher(&sim).expect("it runs");
        let died_at = sim.now;
        sim.exit_proc(watcher, SIGTERM);
        sim.run_until("another one runs", |s| running_watcher(s).is_some());
        pauses.push(sim.now.since(died_at));
    }
    assert!(pauses[0] < QUICK_START_MAX, "{pauses:?}");
    assert!(pauses.windows(2).all(|w| w[1] > w[0]), "{pauses:?}");
    let console = sim.enrol(HostId::MASTER);
    let is_report = |kind: &&EventKind| matches!(kind, EventKind::Note { text } if text.contains("3 times in a row"));
    assert_eq!(
        list_events(&mut sim, console)
            .iter()
            .filter(is_report)
            .count(),
        1
    );
}

/// If a resource manager starts a load watcher, the daemon's own one ends when the other one has
/// sent its first directive, and not before. At every moment the last directive is in force.
#[test]
fn watcher_of_resource_manager_replaces_own_one() {
    for seed in seeds(20) {
        let mut watched_host = WatchedHost::new(seed);
        let own_watcher = watched_host.watcher;
        let sim = &mut watched_host.sim;
        let rm = sim.enrol(HostId::MASTER);
        let services = RmServices {
            placement: true,
            vm_requests: false,
            task_exits: false,
        };
        sim.ask(rm, Request::RegisterRm(services));
        let rm_tid = sim.procs[rm].tid();
        // A resource manager can see the load watcher, and ask it for reports.
        let tasks = list_tasks(sim, rm);
        assert!(!tasks.iter().any(TaskInfo::is_hidden), "{tasks:?}");
        let request = SpawnRequest {
            program: LOAD_WATCHER_PROGRAM.into(),
            flags: SPAWN_PINNED | SPAWN_NO_PARENT,
            task_count: 1,
            ..SpawnRequest::default()
        };
        let order = pack_exec(rm_tid, &request, 0, 1);
        send_to_daemon(sim, rm, Tid::MY_DAEMON, SM_EXEC, 5, order);
        sim.run_until("both run", |s| running_watchers(s).len() == 2);
        let new_watcher = running_watchers(sim)
            .into_iter()
            .find(|p| *p != own_watcher)
            .expect("both run");
        sim.announce_alive(new_watcher);
        sim.advance(LONG_WAIT);
        assert!(!sim.procs[own_watcher].exited, "seed {seed}");
        assert_eq!(sim.ask(new_watcher, stop_guests_request()), Reply::Done);
        sim.run_until("one remains", |s| running_watchers(s) == [new_watcher]);
        sim.advance(LONG_WAIT);
        watched_host.assert_paused();
        assert_eq!(running_watchers(&watched_host.sim), [new_watcher]);
        let reply = watched_host.sim.ask(new_watcher, welcome_guests_request());
        assert_eq!(reply, Reply::Done);
        watched_host.run_until_guests_resume();
        assert_eq!(watched_host.count_notes("load watcher"), 0);
    }
}

/// While guests must stop on this host and no resource manager places tasks, new tasks are placed
/// on other hosts, and a spawn that names this host is refused with the reason.
#[test]
fn no_task_is_placed_on_a_host_whose_owner_refuses_guests() {
    for seed in seeds(10) {
        let mut watched_host = WatchedHost::new(seed);
        let (sim, console) = (&mut watched_host.sim, watched_host.console);
        let request = Request::AddHosts {
            host_file_lines: vec!["h2".into()],
        };
        assert!(matches!(sim.ask(console, request), Reply::HostsAdded(_)));
        let request = SpawnRequest {
            program: "child".into(),
            task_count: 4,
            ..SpawnRequest::default()
        };
        let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
            panic!("not spawned")
        };
        let hosts: Vec<_> = results
            .iter()
            .map(|result| result.expect("h2 is free").birth_host())
            .collect();
        assert_eq!(hosts, [Some(host(2)); 4], "seed {seed}");
        let refused = sim.ask(console, Request::Spawn(spawn_on("h1", "child", 1)));
        assert_eq!(refused, Reply::Spawned(vec![Err(GUEST_REFUSED_ERROR)]));
        let console = watched_host.console;
        let console_tid = watched_host.sim.procs[console].tid();
        let is_refusal = |kind: &EventKind| {
            matches!(
                kind,
                EventKind::SpawnRefused { spawner, why, .. }
                    if *spawner == console_tid
                        && why.contains("accepts no guests")
            )
        };
        let events = list_events(&mut watched_host.sim, console);
        assert!(events.iter().any(is_refusal), "{events:?}");
    }
}

/// Guests stay paused while no load watcher can be started. The log reports the failure once.
#[test]
fn guests_stay_paused_without_a_watcher() {
    let mut watched_host = WatchedHost::new(3);
    watched_host
        .sim
        .remove_program(HostId::MASTER, LOAD_WATCHER_PROGRAM);
    let old_watcher = watched_host.watcher;
    watched_host.sim.exit_proc(old_watcher, SIGTERM);
    watched_host.sim.advance(LONG_WAIT);
    watched_host.assert_paused();
    let expected_note = format!(
        "could not be started on h1: {}; its owner is not protected; guests stay paused",
        PvmError::NoFile
    );
    assert_eq!(watched_host.count_notes(&expected_note), 1);
    // Without a load watcher, another program of the user may send a directive.
    let program = watched_host.sim.enrol(HostId::MASTER);
    assert_eq!(
        watched_host.sim.ask(program, welcome_guests_request()),
        Reply::Done
    );
    watched_host.run_until_guests_resume();
}

/// The limits of a dead load watcher apply until a new load watcher sends a directive. Other
/// programs cannot cancel the limits.
#[test]
fn watcher_limits_outlive_the_watcher() {
    let mut watched_host = WatchedHost::new(4);
    let limit_directive = |guests_max| {
        limit_guests_request(GuestLimits {
            guests_max: Some(guests_max),
            ..GuestLimits::default()
        })
    };
    let may_start_guest = |watched_host: &mut WatchedHost| {
        let reply = watched_host.sim.ask(
            watched_host.console,
            Request::Spawn(spawn_on("h1", "child", 1)),
        );
        let Reply::Spawned(results) = reply else {
            panic!("{reply:?}")
        };
        results[0].is_ok()
    };
    let first_watcher = watched_host.watcher;
    assert_eq!(
        watched_host.sim.ask(first_watcher, limit_directive(2)),
        Reply::Done
    );
    assert!(!may_start_guest(&mut watched_host), "two are there");
    let program = watched_host.sim.enrol(HostId::MASTER);
    assert_eq!(
        watched_host.sim.ask(program, welcome_guests_request()),
        Reply::Done
    );
    assert!(
        !may_start_guest(&mut watched_host),
        "a directive without limits lifts none"
    );
    watched_host.sim.exit_proc(program, 0);
    watched_host.sim.advance(LONG_WAIT);
    assert!(!may_start_guest(&mut watched_host));
    watched_host.sim.exit_proc(first_watcher, SIGTERM);
    let new_watcher = await_watcher(&mut watched_host.sim);
    watched_host.sim.advance(LONG_WAIT);
    assert!(
        !may_start_guest(&mut watched_host),
        "the next one has not spoken"
    );
    assert_eq!(
        watched_host.sim.ask(new_watcher, limit_directive(3)),
        Reply::Done
    );
    assert!(may_start_guest(&mut watched_host));
    assert!(!may_start_guest(&mut watched_host), "three are there");
    // The owner's side wants no load watcher any more.
    watched_host.sim.exit_proc(new_watcher, 0);
    watched_host.sim.advance(LONG_WAIT);
    assert!(may_start_guest(&mut watched_host));
}

/// When a program has sent a directive and exits, its directive applies for a grace period.
#[test]
fn directive_applies_for_grace_period_after_exit() {
    let mut scenario = Scenario::new(4);
    scenario.send_directive(1, stop_guests_request());
    scenario.sim.advance(GUEST_PAUSE_MAX);
    scenario.assert_paused();
    let owner_agent = scenario.owner_agents[1];
    scenario.sim.close_connection(owner_agent);
    scenario.sim.advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
    scenario.assert_paused();
    let guest_procs = scenario.procs[2..4].to_vec();
    scenario.sim.run_until("they go on", |s| {
        guest_procs
            .iter()
            .all(|p| !s.procs[*p].is_frozen() && s.procs[*p].conn.is_some())
    });
    scenario.owner_agents[1] = scenario.sim.enrol(host(2));
    scenario.guest_stop_times.clear();
    scenario.resume_all_and_check();
}

/// When an owner agent exits, the directives of all other agents still apply.
#[test]
fn other_agents_directive_remains() {
    let mut scenario = Scenario::new(5);
    scenario.send_directive(1, stop_guests_request());
    let first_agent = scenario.owner_agents[1];
    scenario.owner_agents[1] = scenario.sim.enrol(host(2));
    scenario.send_directive(1, stop_guests_request());
    let second_agent = scenario.owner_agents[1];
    scenario.sim.close_connection(second_agent);
    scenario.sim.advance(LONG_WAIT);
    scenario.assert_paused();
    scenario.owner_agents[1] = first_agent;
    scenario.send_directive(1, welcome_guests_request());
    scenario.resume_all_and_check();
}
