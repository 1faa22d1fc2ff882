//! Processes that ended tasks have left behind are guests of their host.

use super::scenario::{
    Scenario, evict_guests_request, list_events, list_tasks, migrate_request, spawn, spawn_on,
    stop_guests_request, welcome_guests_request,
};
use super::sim::{host, seeds};
use sempa_proto::event::{EventKind, LeftoverCount};
use sempa_proto::owner::EvictionMode;
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{Reply, Request, RmServices};
use sempa_proto::tasker::FromTasker;
use sempa_proto::{Micros, Tid};

const PROCESS_COUNT: u32 = 2;
/// Time in which the messages between all parts have arrived.
const SETTLE_TIME: Micros = Micros::from_secs(2);

/// Ends a guest on host 2, which leaves processes behind. Returns its tid.
fn end_guest(scenario: &mut Scenario) -> Tid {
    let (proc, tid) = (scenario.procs[2], scenario.tids[2]);
    scenario.sim.exit_and_leave_processes(proc, PROCESS_COUNT);
    scenario.sim.advance(SETTLE_TIME);
    tid
}

fn leftovers_of(scenario: &mut Scenario) -> Vec<TaskInfo> {
    let console = scenario.console;
    let mut tasks = list_tasks(&mut scenario.sim, console);
    tasks.retain(TaskInfo::is_leftover);
    tasks
}

fn pause_events(scenario: &mut Scenario) -> Vec<Vec<LeftoverCount>> {
    let console = scenario.console;
    let events = list_events(&mut scenario.sim, console).into_iter();
    let pauses = events.filter_map(|kind| match kind {
        EventKind::GuestsPaused { leftovers, .. } => Some(leftovers),
        _ => None,
    });
    pauses.collect()
}

/// What a task leaves behind is listed and named. It stops when the owner comes, and runs when the
/// owner has left.
#[test]
fn leftovers_stop_for_owner_and_are_named() {
    for seed in seeds(50) {
        let mut scenario = Scenario::new(seed);
        let tid = end_guest(&mut scenario);
        let left = LeftoverCount {
            tid,
            processes: PROCESS_COUNT,
        };
        let listed = leftovers_of(&mut scenario);
        assert_eq!(listed.len(), 1, "seed {seed}");
        assert_eq!((listed[0].tid, listed[0].host), (tid, host(2)));
        assert_eq!(listed[0].leftover_processes, PROCESS_COUNT);
        assert!(!listed[0].paused);
        let console = scenario.console;
        assert!(
            list_events(&mut scenario.sim, console).contains(&EventKind::ProcessesLeft {
                host: host(2),
                left
            })
        );
        scenario.send_directive(1, stop_guests_request());
        scenario.sim.advance(SETTLE_TIME);
        assert!(scenario.sim.leftovers[&(host(2), tid)]);
        assert_eq!(pause_events(&mut scenario), [vec![left]]);
        assert!(leftovers_of(&mut scenario)[0].paused);
        scenario.send_directive(1, welcome_guests_request());
        scenario.sim.advance(SETTLE_TIME);
        assert!(!scenario.sim.leftovers[&(host(2), tid)]);
        assert!(!leftovers_of(&mut scenario)[0].paused);
    }
}

/// What a paused task leaves behind stays stopped until the owner has left.
#[test]
fn leftovers_of_paused_guest_stay_stopped() {
    let mut scenario = Scenario::new(4);
    scenario.send_directive(1, stop_guests_request());
    scenario.sim.advance(SETTLE_TIME);
    let tid = end_guest(&mut scenario);
    assert!(scenario.sim.leftovers[&(host(2), tid)]);
    assert!(leftovers_of(&mut scenario)[0].paused);
    scenario.send_directive(1, welcome_guests_request());
    scenario.sim.advance(SETTLE_TIME);
    assert!(!scenario.sim.leftovers[&(host(2), tid)]);
}

/// A paused guest that has quiesced ends although its child holds the socket.
#[test]
fn quiesced_guest_ends_if_its_child_holds_the_socket() {
    for seed in seeds(20) {
        let mut scenario = Scenario::new(seed);
        let (proc, tid) = (scenario.procs[2], scenario.tids[2]);
        scenario.sim.procs[proc].child_holds_socket = true;
        scenario.send_directive(1, stop_guests_request());
        scenario.sim.advance(SETTLE_TIME);
        assert!(scenario.sim.procs[proc].has_quiesced(), "seed {seed}");
        scenario.sim.exit_with_open_socket(proc, 9);
        scenario.sim.advance(Micros(3 * SETTLE_TIME.0));
        let console = scenario.console;
        let tasks = list_tasks(&mut scenario.sim, console);
        assert!(tasks.iter().all(|task| task.tid != tid), "seed {seed}");
    }
}

/// What a suspended task leaves behind runs, because the suspension ends with the task.
#[test]
fn leftovers_of_suspended_task_run() {
    let mut scenario = Scenario::new(5);
    let tid = scenario.tids[2];
    scenario.set_suspended(tid, true);
    scenario.sim.advance(SETTLE_TIME);
    end_guest(&mut scenario);
    assert!(!scenario.sim.leftovers[&(host(2), tid)]);
}

/// Processes that an ended service has left behind are no guests, however often the tasker reports
/// their number.
#[test]
fn leftovers_of_services_are_no_guests() {
    let mut scenario = Scenario::new(7);
    let console = scenario.console;
    let rm = spawn(&mut scenario.sim, console, spawn_on("h2", "rm", 1))[0];
    let services = RmServices {
        placement: true,
        vm_requests: false,
        task_exits: false,
    };
    scenario.sim.ask(rm, Request::RegisterRm(services));
    let tid = scenario.sim.procs[rm].tid();
    let report = |scenario: &mut Scenario, process_count| {
        let message = FromTasker::LeftBehind {
            tid,
            process_count,
            pids: vec![7000],
        };
        scenario.sim.send_from_tasker(host(2), message);
        scenario.sim.advance(SETTLE_TIME);
    };
    report(&mut scenario, PROCESS_COUNT);
    scenario.sim.exit_proc(rm, 0);
    scenario.sim.advance(SETTLE_TIME);
    report(&mut scenario, PROCESS_COUNT + 1);
    assert!(leftovers_of(&mut scenario).is_empty());
}

/// While a process that was left behind runs, nothing says that the guests have stopped.
#[test]
fn unstopped_leftovers_are_not_called_stopped() {
    let mut scenario = Scenario::new(6);
    let tid = end_guest(&mut scenario);
    scenario.sim.leftovers_never_stop = true;
    scenario.send_directive(1, stop_guests_request());
    scenario.sim.advance(SETTLE_TIME);
    assert!(pause_events(&mut scenario).is_empty());
    let left = &leftovers_of(&mut scenario)[0];
    assert_eq!((left.paused, left.stopping), (false, true));
    let pids = vec![7000];
    let report = FromTasker::NotStopped {
        tid,
        pids: pids.clone(),
    };
    scenario.sim.send_from_tasker(host(2), report);
    scenario.sim.advance(SETTLE_TIME);
    let event = EventKind::GuestsStillRun {
        host: host(2),
        tid,
        pids,
    };
    let console = scenario.console;
    assert!(list_events(&mut scenario.sim, console).contains(&event));
    scenario.sim.leftovers_never_stop = false;
    let report = FromTasker::LeftoversStopped { tid };
    scenario.sim.send_from_tasker(host(2), report);
    scenario.sim.advance(SETTLE_TIME);
    assert_eq!(pause_events(&mut scenario).len(), 1);
}

/// A guest that runs again after it was confirmed as stopped is listed as stopping, and an event
/// has its processes, until its stop is confirmed again.
#[test]
fn guest_that_runs_again_is_not_called_stopped() {
    let mut scenario = Scenario::new(10);
    let tid = scenario.tids[2];
    let states = |scenario: &mut Scenario| {
        let console = scenario.console;
        let tasks = list_tasks(&mut scenario.sim, console);
        let task = tasks.iter().find(|task| task.tid == tid).expect("alive");
        (task.paused, task.stopping)
    };
    scenario.send_directive(1, stop_guests_request());
    scenario.sim.advance(SETTLE_TIME);
    assert_eq!(states(&mut scenario), (true, false));
    let pids = vec![7000];
    let report = FromTasker::NotStopped {
        tid,
        pids: pids.clone(),
    };
    scenario.sim.send_from_tasker(host(2), report);
    scenario.sim.advance(SETTLE_TIME);
    assert_eq!(states(&mut scenario), (false, true));
    let event = EventKind::GuestsStillRun {
        host: host(2),
        tid,
        pids,
    };
    let console = scenario.console;
    assert!(list_events(&mut scenario.sim, console).contains(&event));
    let report = FromTasker::Paused { tid };
    scenario.sim.send_from_tasker(host(2), report);
    scenario.sim.advance(SETTLE_TIME);
    assert_eq!(states(&mut scenario), (true, false));
}

/// When guests are evicted, leftover processes are killed if the owner's policy ends guests or
/// vacates their jobs. They stay stopped if the policy only moves guests.
#[test]
fn eviction_kills_leftovers_unless_guests_only_move() {
    for (eviction, is_killed) in [
        (EvictionMode::Kill, true),
        (EvictionMode::Checkpoint, true),
        (EvictionMode::Move, false),
    ] {
        for ends_before_owner in [true, false] {
            let mut scenario = Scenario::new(7);
            let tid = scenario.tids[2];
            if ends_before_owner {
                end_guest(&mut scenario);
            }
            let evict_at = Some(Micros(scenario.sim.now.0 + 1_000_000));
            scenario.send_directive(1, evict_guests_request(evict_at, eviction));
            if !ends_before_owner {
                end_guest(&mut scenario);
            }
            scenario.sim.advance(SETTLE_TIME);
            let is_left = scenario.sim.leftovers.contains_key(&(host(2), tid));
            assert_eq!(is_left, !is_killed, "{eviction} {ends_before_owner}");
            assert_eq!(leftovers_of(&mut scenario).is_empty(), is_killed);
            let console = scenario.console;
            let end_event = EventKind::LeftProcessesEnded { host: host(2), tid };
            let events = list_events(&mut scenario.sim, console);
            assert_eq!(events.contains(&end_event), is_killed);
        }
    }
}

/// If the first process of a task dies during its migration, what it leaves behind does not run
/// while its copies run at the target: it is killed if the task continues there, and runs
/// otherwise.
#[test]
fn leftovers_never_run_beside_their_copies() {
    let (mut moved_count, mut ended_count) = (0, 0);
    for seed in seeds(100) {
        let mut scenario = Scenario::new(seed);
        let (proc, tid, key) = (
            scenario.procs[2],
            scenario.tids[2],
            (host(2), scenario.tids[2]),
        );
        let console = scenario.console;
        let sim = &mut scenario.sim;
        sim.request(console, migrate_request(tid, "h3"));
        sim.run_until("it is stopped", |s| s.procs[proc].is_frozen());
        let delay = Micros(sim.rng.below(10_000));
        sim.advance(delay);
        if sim.procs[proc].host != host(2) || sim.injection.source_was_killed() {
            continue;
        }
        sim.exit_and_leave_processes(proc, PROCESS_COUNT);
        let mut has_run = false;
        for _ in 0..5000 {
            sim.advance(Micros::from_millis(1));
            has_run |= sim.leftovers.get(&key) == Some(&false);
        }
        if sim.procs[proc].host == host(3) {
            moved_count += 1;
            assert!(!has_run, "seed {seed}");
            assert!(!sim.leftovers.contains_key(&key), "seed {seed}");
        } else {
            ended_count += 1;
            assert_eq!(sim.leftovers.get(&key), Some(&false), "seed {seed}");
        }
    }
    assert!(
        moved_count > 0 && ended_count > 0,
        "{moved_count} {ended_count}"
    );
}

/// A request from any host ends what a task has left behind.
#[test]
fn leftovers_are_killed_on_request() {
    let mut scenario = Scenario::new(8);
    let tid = end_guest(&mut scenario);
    let console = scenario.console;
    let reply = scenario.sim.ask(console, Request::KillLeftovers { tid });
    assert_eq!(reply, Reply::Done);
    scenario.sim.advance(SETTLE_TIME);
    assert!(scenario.sim.leftovers.is_empty());
    assert!(leftovers_of(&mut scenario).is_empty());
}

/// When the tasker dies, nothing is left behind.
#[test]
fn leftovers_end_with_their_tasker() {
    let mut scenario = Scenario::new(9);
    end_guest(&mut scenario);
    scenario.sim.kill_tasker(host(2));
    scenario.sim.advance(SETTLE_TIME);
    assert!(leftovers_of(&mut scenario).is_empty());
}
