//! Owner agents may die. Guests must not resume on the host of a present owner because of that.

use super::scene::{PROMISE, Scene, events, on, spawn, stopped, welcome, welcome_with};
use super::sim::{Sim, host, seeds};
use crate::HostId;
use crate::speaker::SPEAKER_TIME;
use sempa_proto::event::EventKind;
use sempa_proto::load::{GuestLimits, LOAD_WATCHER_PROGRAM};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, PvmError};

const SIGTERM: i32 = 15;
/// Longer than every timeout of the daemon.
const LONG: Micros = Micros::from_secs(120);

/// A host with a load watcher and two guests, which are paused by its directive.
struct Guarded {
    sim: Sim,
    console: usize,
    watcher: usize,
    guests: Vec<usize>,
}

/// Returns the running load watcher.
fn watcher(sim: &Sim) -> Option<usize> {
    let is = |p: &usize| {
        sim.procs[*p]
            .welcome
            .as_ref()
            .is_some_and(|w| w.parent.raw() == -35)
    };
    (0..sim.procs.len())
        .filter(is)
        .find(|p| !sim.procs[*p].exited)
}

impl Guarded {
    fn new(seed: u64) -> Guarded {
        let mut sim = Sim::with(seed, |c| {
            c.rm_command = Some(vec![LOAD_WATCHER_PROGRAM.into()])
        });
        sim.until("it runs", |s| watcher(s).is_some());
        let watcher = watcher(&sim).expect("it runs");
        let console = sim.enrol(HostId::MASTER);
        let guests = spawn(&mut sim, console, on("h1", "child", 2));
        let mut guarded = Guarded {
            sim,
            console,
            watcher,
            guests,
        };
        assert_eq!(guarded.sim.ask(watcher, stopped()), Reply::Done);
        guarded.sim.pass(PROMISE);
        guarded.assert_still();
        guarded
    }

    fn assert_still(&self) {
        assert!(
            self.guests.iter().all(|p| self.sim.procs[*p].is_frozen()),
            "seed {}",
            self.sim.seed
        );
    }

    fn until_they_go_on(&mut self) {
        let guests = self.guests.clone();
        let go_on = |s: &Sim| {
            guests
                .iter()
                .all(|p| !s.procs[*p].is_frozen() && s.procs[*p].conn.is_some())
        };
        self.sim.until("they go on", go_on);
    }

    fn notes(&mut self, what: &str) -> usize {
        let is = |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains(what));
        events(&mut self.sim, self.console)
            .iter()
            .filter(|kind| is(kind))
            .count()
    }
}

/// Guests stay paused when the load watcher dies, until the watcher that the daemon has started
/// resumes them.
#[test]
fn guests_stay_paused_until_new_watcher_resumes_them() {
    for seed in seeds(20) {
        let mut guarded = Guarded::new(seed);
        let dead = guarded.watcher;
        guarded.sim.exit(dead, SIGTERM);
        guarded.sim.pass(Micros(SPEAKER_TIME.0 * 9 / 10));
        assert_eq!(
            watcher(&guarded.sim),
            None,
            "whoever has started it may do so again"
        );
        guarded.assert_still();
        guarded
            .sim
            .until("another one runs", |s| watcher(s).is_some());
        guarded.sim.pass(LONG);
        guarded.assert_still();
        let next = watcher(&guarded.sim).expect("it runs");
        assert_eq!(guarded.sim.ask(next, stopped()), Reply::Done);
        guarded.sim.pass(LONG);
        guarded.assert_still();
        assert_eq!(guarded.sim.ask(next, welcome()), Reply::Done);
        guarded.until_they_go_on();
        assert_eq!(guarded.notes("starts another one"), 1);
    }
}

/// A load watcher that dies while the owner is away is started again; one that exits successfully
/// is not.
#[test]
fn dead_watcher_is_restarted_unless_it_exited_well() {
    let mut guarded = Guarded::new(2);
    let first = guarded.watcher;
    assert_eq!(guarded.sim.ask(first, welcome()), Reply::Done);
    guarded.until_they_go_on();
    guarded.sim.exit(first, SIGTERM);
    guarded
        .sim
        .until("another one runs", |s| watcher(s).is_some());
    let second = watcher(&guarded.sim).expect("it runs");
    assert_eq!(guarded.sim.ask(second, stopped()), Reply::Done);
    guarded.sim.pass(PROMISE);
    guarded.assert_still();
    guarded.sim.exit(second, 0);
    guarded.sim.pass(Micros(SPEAKER_TIME.0 * 9 / 10));
    guarded.assert_still();
    guarded.until_they_go_on();
    guarded.sim.pass(LONG);
    assert_eq!(watcher(&guarded.sim), None);
}

/// Guests stay paused while no load watcher can be started, and the log reports that once.
#[test]
fn guests_stay_paused_without_a_watcher() {
    let mut guarded = Guarded::new(3);
    guarded
        .sim
        .remove_program(HostId::MASTER, LOAD_WATCHER_PROGRAM);
    let dead = guarded.watcher;
    guarded.sim.exit(dead, SIGTERM);
    guarded.sim.pass(LONG);
    guarded.assert_still();
    let says = format!(
        "could not be started on h1: {}; its owner is not guarded; guests stay stopped",
        PvmError::NoFile
    );
    assert_eq!(guarded.notes(&says), 1);
    // The user's own program may send a directive in this case.
    let program = guarded.sim.enrol(HostId::MASTER);
    assert_eq!(guarded.sim.ask(program, welcome()), Reply::Done);
    guarded.until_they_go_on();
}

/// An owner's limits apply until a load watcher sends a new directive; other programs cannot lift
/// them.
#[test]
fn watcher_limits_outlive_the_watcher() {
    let mut guarded = Guarded::new(4);
    let allows = |most| {
        welcome_with(GuestLimits {
            guests_max: Some(most),
            ..GuestLimits::default()
        })
    };
    let may_start = |guarded: &mut Guarded| {
        let reply = guarded
            .sim
            .ask(guarded.console, Request::Spawn(on("h1", "child", 1)));
        let Reply::Spawned(results) = reply else {
            panic!("{reply:?}")
        };
        results[0].is_ok()
    };
    let first = guarded.watcher;
    assert_eq!(guarded.sim.ask(first, allows(2)), Reply::Done);
    assert!(!may_start(&mut guarded), "two are there");
    let program = guarded.sim.enrol(HostId::MASTER);
    assert_eq!(guarded.sim.ask(program, welcome()), Reply::Done);
    assert!(
        !may_start(&mut guarded),
        "who says nothing of it takes nothing back"
    );
    guarded.sim.exit(program, 0);
    guarded.sim.pass(LONG);
    assert!(!may_start(&mut guarded));
    guarded.sim.exit(first, SIGTERM);
    guarded.sim.until("another one runs", |s| {
        watcher(s).is_some_and(|next| next != first)
    });
    guarded.sim.pass(LONG);
    assert!(!may_start(&mut guarded), "the next one has not spoken");
    let next = watcher(&guarded.sim).expect("it runs");
    assert_eq!(guarded.sim.ask(next, allows(3)), Reply::Done);
    assert!(may_start(&mut guarded));
    assert!(!may_start(&mut guarded), "three are there");
    // The watcher exits successfully, and no other agent will lift the limit.
    guarded.sim.exit(next, 0);
    guarded.sim.pass(LONG);
    assert!(may_start(&mut guarded));
}

/// The last directive of a program applies for a grace period after the program's exit.
#[test]
fn directive_outlives_its_program_for_a_while() {
    let mut scene = Scene::new(4);
    scene.say(1, stopped());
    scene.sim.pass(PROMISE);
    scene.assert_still();
    let speaker = scene.speakers[1];
    scene.sim.close(speaker);
    scene.sim.pass(Micros(SPEAKER_TIME.0 * 9 / 10));
    scene.assert_still();
    let theirs = scene.procs[2..4].to_vec();
    scene.sim.until("they go on", |s| {
        theirs
            .iter()
            .all(|p| !s.procs[*p].is_frozen() && s.procs[*p].conn.is_some())
    });
    scene.speakers[1] = scene.sim.enrol(host(2));
    scene.stopped_at.clear();
    scene.end();
}

/// When an owner agent exits, the directive of another agent still applies.
#[test]
fn other_agents_directive_remains() {
    let mut scene = Scene::new(5);
    scene.say(1, stopped());
    let first = scene.speakers[1];
    scene.speakers[1] = scene.sim.enrol(host(2));
    scene.say(1, stopped());
    let second = scene.speakers[1];
    scene.sim.close(second);
    scene.sim.pass(LONG);
    scene.assert_still();
    scene.speakers[1] = first;
    scene.say(1, welcome());
    scene.end();
}
