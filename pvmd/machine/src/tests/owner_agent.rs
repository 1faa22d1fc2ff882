//! Deaths of owner agents. While an owner is present, the death of an agent must not resume guests
//! on the owner's host.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, list_events, spawn, spawn_on, stop_guests, welcome_guests,
    welcome_guests_with,
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

/// A host with a load watcher and two guests, which are paused by the watcher's directive.
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
    fn new(seed: u64) -> WatchedHost {
        let mut sim = Sim::with(seed, |c| {
            c.rm_command = Some(vec![LOAD_WATCHER_PROGRAM.into()])
        });
        sim.run_until("it runs", |s| running_watcher(s).is_some());
        let watcher = running_watcher(&sim).expect("it runs");
        let console = sim.enrol(HostId::MASTER);
        let guests = spawn(&mut sim, console, spawn_on("h1", "child", 2));
        let mut guarded = WatchedHost {
            sim,
            console,
            watcher,
            guests,
        };
        assert_eq!(guarded.sim.ask(watcher, stop_guests()), Reply::Done);
        guarded.sim.advance(GUEST_PAUSE_MAX);
        guarded.assert_paused();
        guarded
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
        let all_run = |s: &Sim| {
            guests
                .iter()
                .all(|p| !s.procs[*p].is_frozen() && s.procs[*p].conn.is_some())
        };
        self.sim.run_until("they go on", all_run);
    }

    fn count_notes(&mut self, what: &str) -> usize {
        let is_match =
            |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains(what));
        list_events(&mut self.sim, self.console)
            .iter()
            .filter(|kind| is_match(kind))
            .count()
    }
}

/// Guests stay paused when the load watcher dies, until the watcher that the daemon has started
/// resumes them.
#[test]
fn guests_stay_paused_until_new_watcher_resumes_them() {
    for seed in seeds(20) {
        let mut guarded = WatchedHost::new(seed);
        let dead = guarded.watcher;
        guarded.sim.exit(dead, SIGTERM);
        guarded.sim.advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
        assert_eq!(
            running_watcher(&guarded.sim),
            None,
            "whoever has started it may do so again"
        );
        guarded.assert_paused();
        guarded
            .sim
            .run_until("another one runs", |s| running_watcher(s).is_some());
        guarded.sim.advance(LONG_WAIT);
        guarded.assert_paused();
        let next = running_watcher(&guarded.sim).expect("it runs");
        assert_eq!(guarded.sim.ask(next, stop_guests()), Reply::Done);
        guarded.sim.advance(LONG_WAIT);
        guarded.assert_paused();
        assert_eq!(guarded.sim.ask(next, welcome_guests()), Reply::Done);
        guarded.run_until_guests_resume();
        assert_eq!(guarded.count_notes("starts another one"), 1);
    }
}

/// A load watcher that dies while the owner is away is started again; one that exits successfully
/// is not.
#[test]
fn dead_watcher_is_restarted_unless_it_exited_well() {
    let mut guarded = WatchedHost::new(2);
    let first = guarded.watcher;
    assert_eq!(guarded.sim.ask(first, welcome_guests()), Reply::Done);
    guarded.run_until_guests_resume();
    guarded.sim.exit(first, SIGTERM);
    guarded
        .sim
        .run_until("another one runs", |s| running_watcher(s).is_some());
    let second = running_watcher(&guarded.sim).expect("it runs");
    assert_eq!(guarded.sim.ask(second, stop_guests()), Reply::Done);
    guarded.sim.advance(GUEST_PAUSE_MAX);
    guarded.assert_paused();
    guarded.sim.exit(second, 0);
    guarded.sim.advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
    guarded.assert_paused();
    guarded.run_until_guests_resume();
    guarded.sim.advance(LONG_WAIT);
    assert_eq!(running_watcher(&guarded.sim), None);
}

/// Guests stay paused while no load watcher can be started, and the log reports that once.
#[test]
fn guests_stay_paused_without_a_watcher() {
    let mut guarded = WatchedHost::new(3);
    guarded
        .sim
        .remove_program(HostId::MASTER, LOAD_WATCHER_PROGRAM);
    let dead = guarded.watcher;
    guarded.sim.exit(dead, SIGTERM);
    guarded.sim.advance(LONG_WAIT);
    guarded.assert_paused();
    let says = format!(
        "could not be started on h1: {}; its owner is not guarded; guests stay stopped",
        PvmError::NoFile
    );
    assert_eq!(guarded.count_notes(&says), 1);
    // The user's own program may send a directive in this case.
    let program = guarded.sim.enrol(HostId::MASTER);
    assert_eq!(guarded.sim.ask(program, welcome_guests()), Reply::Done);
    guarded.run_until_guests_resume();
}

/// An owner's limits apply until a load watcher sends a new directive; other programs cannot cancel
/// them.
#[test]
fn watcher_limits_outlive_the_watcher() {
    let mut guarded = WatchedHost::new(4);
    let allows = |most| {
        welcome_guests_with(GuestLimits {
            guests_max: Some(most),
            ..GuestLimits::default()
        })
    };
    let may_start = |guarded: &mut WatchedHost| {
        let reply = guarded
            .sim
            .ask(guarded.console, Request::Spawn(spawn_on("h1", "child", 1)));
        let Reply::Spawned(results) = reply else {
            panic!("{reply:?}")
        };
        results[0].is_ok()
    };
    let first = guarded.watcher;
    assert_eq!(guarded.sim.ask(first, allows(2)), Reply::Done);
    assert!(!may_start(&mut guarded), "two are there");
    let program = guarded.sim.enrol(HostId::MASTER);
    assert_eq!(guarded.sim.ask(program, welcome_guests()), Reply::Done);
    assert!(
        !may_start(&mut guarded),
        "who says nothing of it takes nothing back"
    );
    guarded.sim.exit(program, 0);
    guarded.sim.advance(LONG_WAIT);
    assert!(!may_start(&mut guarded));
    guarded.sim.exit(first, SIGTERM);
    guarded.sim.run_until("another one runs", |s| {
        running_watcher(s).is_some_and(|next| next != first)
    });
    guarded.sim.advance(LONG_WAIT);
    assert!(!may_start(&mut guarded), "the next one has not spoken");
    let next = running_watcher(&guarded.sim).expect("it runs");
    assert_eq!(guarded.sim.ask(next, allows(3)), Reply::Done);
    assert!(may_start(&mut guarded));
    assert!(!may_start(&mut guarded), "three are there");
    // The watcher exits successfully, and no other agent will cancel the limit.
    guarded.sim.exit(next, 0);
    guarded.sim.advance(LONG_WAIT);
    assert!(may_start(&mut guarded));
}

/// The last directive of a program applies for a grace period after the program's exit.
#[test]
fn directive_outlives_its_program_for_a_while() {
    let mut scene = Scenario::new(4);
    scene.send_directive(1, stop_guests());
    scene.sim.advance(GUEST_PAUSE_MAX);
    scene.assert_paused();
    let speaker = scene.owner_agents[1];
    scene.sim.close(speaker);
    scene.sim.advance(Micros(OWNER_AGENT_TIMEOUT.0 * 9 / 10));
    scene.assert_paused();
    let theirs = scene.procs[2..4].to_vec();
    scene.sim.run_until("they go on", |s| {
        theirs
            .iter()
            .all(|p| !s.procs[*p].is_frozen() && s.procs[*p].conn.is_some())
    });
    scene.owner_agents[1] = scene.sim.enrol(host(2));
    scene.stopped_at.clear();
    scene.finish();
}

/// When an owner agent exits, the directive of another agent still applies.
#[test]
fn other_agents_directive_remains() {
    let mut scene = Scenario::new(5);
    scene.send_directive(1, stop_guests());
    let first = scene.owner_agents[1];
    scene.owner_agents[1] = scene.sim.enrol(host(2));
    scene.send_directive(1, stop_guests());
    let second = scene.owner_agents[1];
    scene.sim.close(second);
    scene.sim.advance(LONG_WAIT);
    scene.assert_paused();
    scene.owner_agents[1] = first;
    scene.send_directive(1, welcome_guests());
    scene.finish();
}
