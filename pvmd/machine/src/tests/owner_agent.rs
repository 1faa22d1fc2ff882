//! Deaths of owner agents. The death of an agent must not resume guests while the owner of their
//! host is present.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, limit_guests_request, list_events, spawn, spawn_on,
    stop_guests_request, welcome_guests_request,
};
use super::sim::{Sim, host, seeds};
use crate::HostId;
use crate::owner_agent::OWNER_AGENT_TIMEOUT;
use sempa_proto::event::EventKind;
use sempa_proto::load::{GuestLimits, LOAD_WATCHER_PROGRAM};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, PvmError};

const SIGTERM: i32 = 15;
/// Longer than every timeout of the daemon.
const LONG_WAIT: Micros = Micros::from_secs(120);

/// A host with a load watcher and two guests. The watcher's directive pauses the guests.
struct WatchedHost {
    sim: Sim,
    console: usize,
    watcher: usize,
    guests: Vec<usize>,
}

fn running_watcher(sim: &Sim) -> Option<usize> {
    let is_watcher = |p: &usize| {
        sim.procs[*p]
            .welcome
            .as_ref()
            .is_some_and(|w| w.parent.raw() == -35)
    };
    (0..sim.procs.len())
        .filter(is_watcher)
        .find(|p| !sim.procs[*p].exited)
}

impl WatchedHost {
    fn new(seed: u64) -> Self {
        let mut sim = Sim::with_config(seed, |c| {
            c.rm_command = Some(vec![LOAD_WATCHER_PROGRAM.into()])
        });
        sim.run_until("it runs", |s| running_watcher(s).is_some());
        let watcher = running_watcher(&sim).expect("it runs");
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

/// When the load watcher dies, guests stay paused. They resume on a directive of the new watcher
/// that the daemon has started.
#[test]
fn guests_stay_paused_until_new_watcher_resumes_them() {
    for seed in seeds(20) {
        let mut watched_host = WatchedHost::new(seed);
        let old_watcher = watched_host.watcher;
        watched_host.sim.exit_proc(old_watcher, SIGTERM);
        watched_host
            .sim
            .advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
        assert_eq!(
            running_watcher(&watched_host.sim),
            None,
            "its starter may start it again first"
        );
        watched_host.assert_paused();
        watched_host
            .sim
            .run_until("another one runs", |s| running_watcher(s).is_some());
        watched_host.sim.advance(LONG_WAIT);
        watched_host.assert_paused();
        let new_watcher = running_watcher(&watched_host.sim).expect("it runs");
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

/// A load watcher that dies while the owner is away is started again. A load watcher that exits
/// successfully is not started again.
#[test]
fn watcher_is_restarted_unless_it_exits_successfully() {
    let mut watched_host = WatchedHost::new(2);
    let first_watcher = watched_host.watcher;
    assert_eq!(
        watched_host
            .sim
            .ask(first_watcher, welcome_guests_request()),
        Reply::Done
    );
    watched_host.run_until_guests_resume();
    watched_host.sim.exit_proc(first_watcher, SIGTERM);
    watched_host
        .sim
        .run_until("another one runs", |s| running_watcher(s).is_some());
    let second_watcher = running_watcher(&watched_host.sim).expect("it runs");
    assert_eq!(
        watched_host.sim.ask(second_watcher, stop_guests_request()),
        Reply::Done
    );
    watched_host.sim.advance(GUEST_PAUSE_MAX);
    watched_host.assert_paused();
    watched_host.sim.exit_proc(second_watcher, 0);
    watched_host
        .sim
        .advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
    watched_host.assert_paused();
    watched_host.run_until_guests_resume();
    watched_host.sim.advance(LONG_WAIT);
    assert_eq!(running_watcher(&watched_host.sim), None);
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
    watched_host.sim.run_until("another one runs", |s| {
        running_watcher(s).is_some_and(|new_watcher| new_watcher != first_watcher)
    });
    watched_host.sim.advance(LONG_WAIT);
    assert!(
        !may_start_guest(&mut watched_host),
        "the next one has not spoken"
    );
    let new_watcher = running_watcher(&watched_host.sim).expect("it runs");
    assert_eq!(
        watched_host.sim.ask(new_watcher, limit_directive(3)),
        Reply::Done
    );
    assert!(may_start_guest(&mut watched_host));
    assert!(!may_start_guest(&mut watched_host), "three are there");
    // The watcher exits successfully. No new watcher is started that could cancel the limit.
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
