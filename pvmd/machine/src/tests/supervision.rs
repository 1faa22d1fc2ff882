//! Programs that hang: load watchers, resource managers and taskers.

use super::scenario::{list_events, list_tasks, spawn, spawn_on, stop_guests_request};
use super::sim::fault_injection::{Fault, LONG_OUTAGE, Victim};
use super::sim::{Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::load::LOAD_WATCHER_PROGRAM;
use sempa_proto::task::{Reply, Request, RmServices};
use sempa_proto::{HostId, Micros, Tid};

/// Longest time from the moment at which a program hangs until this is noticed: the time to
/// the next check, and two seconds.
const NOTICE_MAX: Micros = Micros::from_millis(3100);
/// The same for a load watcher of a host without guests.
const IDLE_NOTICE_MAX: Micros = Micros::from_millis(8100);
/// Time in which a program that runs is asked several times.
const SOME_CHECKS: Micros = Micros::from_secs(10);

fn has_note(sim: &mut Sim, console: usize, part: &str) -> bool {
    let is_match =
        |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains(part));
    list_events(sim, console).iter().any(is_match)
}

/// Spawns a task on h1 that registers as resource manager and announces that it answers.
fn spawn_rm(sim: &mut Sim, console: usize) -> usize {
    let rm = spawn(sim, console, spawn_on("h1", "rm", 1))[0];
    register(sim, rm);
    rm
}

fn register(sim: &mut Sim, rm: usize) {
    let services = RmServices {
        placement: true,
        vm_requests: false,
        task_exits: false,
    };
    sim.ask(rm, Request::RegisterRm(services));
    sim.announce_alive(rm);
}

fn knows_rm(sim: &Sim, proc: usize, tid: Tid) -> bool {
    sim.procs[proc].rm_info.is_some_and(|rm| rm.tid == tid)
}

/// A resource manager that hangs is no longer the resource manager, on any host, and is
/// killed. One that answers stays.
#[test]
fn silent_resource_manager_is_replaced() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let remote_proc = sim.enrol(host(2));
        let rm = spawn_rm(&mut sim, console);
        let rm_tid = sim.procs[rm].tid();
        sim.advance(SOME_CHECKS);
        assert!(knows_rm(&sim, console, rm_tid) && knows_rm(&sim, remote_proc, rm_tid));
        sim.procs[rm].stop();
        let stopped_at = sim.now;
        sim.run_until("nobody asks it any more", |s| {
            s.procs[console].rm_info.is_none() && s.procs[remote_proc].rm_info.is_none()
        });
        assert!(sim.now.since(stopped_at) < NOTICE_MAX, "seed {seed}");
        sim.run_until("it is dead", |s| s.procs[rm].exited);
        assert!(has_note(&mut sim, console, "has not answered"));
    }
}

/// A resource manager that reads the question late, because it has many other messages to handle,
/// is not silent while it sends requests.
#[test]
fn busy_resource_manager_stays() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let rm = spawn_rm(&mut sim, console);
        let rm_tid = sim.procs[rm].tid();
        sim.procs[rm].answers_pings = false;
        for _ in 0..20 {
            sim.advance(Micros::from_millis(500));
            let request = Request::TaskStatus { tid: rm_tid };
            assert_eq!(sim.ask(rm, request), Reply::Done, "seed {seed}");
        }
        assert!(knows_rm(&sim, console, rm_tid), "seed {seed}");
        sim.run_until("it is dead", |s| s.procs[rm].exited);
    }
}

/// A resource manager that waits for the reply to its own request, which concerns a host that
/// hangs, is not blamed. It answers again when it has the reply.
#[test]
fn resource_manager_that_awaits_a_reply_stays() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = spawn_rm(&mut sim, console);
        let rm_tid = sim.procs[rm].tid();
        sim.advance(SOME_CHECKS);
        let all_tasks = Request::Tasks {
            selector: Tid::NONE,
        };
        let request = sim.request(rm, all_tasks);
        // Host 2 hangs: its reply never arrives. The steps are shorter than almost all latencies.
        for _ in 0..8_000 {
            sim.advance(Micros(1));
            sim.drop_in_flight(host(2), HostId::MASTER);
        }
        // The only thread of the resource manager waits for the reply.
        sim.procs[rm].stop();
        sim.advance(SOME_CHECKS);
        assert!(!sim.procs[rm].exited, "seed {seed}");
        assert!(knows_rm(&sim, console, rm_tid), "seed {seed}");
        sim.kill_host(host(2));
        sim.continue_proc(rm);
        sim.run_until("it has the reply", |s| {
            s.procs[rm].replies.contains_key(&request)
        });
        sim.advance(SOME_CHECKS);
        assert!(!sim.procs[rm].exited, "seed {seed}");
        assert!(!has_note(&mut sim, console, "resource manager"));
        // One that hangs without such a request is noticed.
        sim.procs[rm].stop();
        sim.run_until("it is dead", |s| s.procs[rm].exited);
    }
}

/// A resource manager from a command line that hangs is not killed. When it answers, it is
/// the resource manager again.
#[test]
fn silent_unspawned_resource_manager_is_registered_again() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let rm = sim.enrol(HostId::MASTER);
        register(&mut sim, rm);
        let rm_tid = sim.procs[rm].tid();
        sim.run_until("it is known", |s| knows_rm(s, console, rm_tid));
        sim.procs[rm].stop();
        sim.run_until("nobody asks it any more", |s| {
            s.procs[console].rm_info.is_none()
        });
        sim.advance(SOME_CHECKS);
        assert!(!sim.procs[rm].exited && sim.sent_signals.is_empty());
        sim.continue_proc(rm);
        sim.run_until("it is asked again", |s| knows_rm(s, console, rm_tid));
        sim.advance(SOME_CHECKS);
        assert!(knows_rm(&sim, console, rm_tid));
    }
}

/// A resource manager that has not announced that it answers, as one written for PVM, is not asked.
#[test]
fn resource_manager_of_pvm_is_not_supervised() {
    let (mut sim, console) = Sim::cluster(1, 2);
    let rm = sim.enrol(HostId::MASTER);
    sim.ask(
        rm,
        Request::RegisterRm(RmServices {
            placement: true,
            vm_requests: true,
            task_exits: true,
        }),
    );
    sim.procs[rm].stop();
    sim.advance(SOME_CHECKS);
    assert!(!has_note(&mut sim, console, "has not answered"));
}

/// A load watcher that hangs is killed and started again within seconds. Without guests it is asked
/// less often.
#[test]
fn silent_load_watcher_is_replaced() {
    for seed in seeds(20) {
        let mut sim = Sim::with_config(seed, |c| c.starts_watcher = true);
        let running_watcher = |s: &Sim| {
            s.procs.iter().position(|p| {
                p.is_program(LOAD_WATCHER_PROGRAM) && p.welcome.is_some() && !p.exited
            })
        };
        sim.run_until("it runs", |s| running_watcher(s).is_some());
        let console = sim.enrol(HostId::MASTER);
        for (has_guests, notice_max) in [(false, IDLE_NOTICE_MAX), (true, NOTICE_MAX)] {
            let watcher = running_watcher(&sim).expect("it runs");
            sim.announce_alive(watcher);
            if has_guests {
                spawn(&mut sim, console, spawn_on("h1", "child", 1));
            }
            sim.advance(SOME_CHECKS);
            sim.procs[watcher].stop();
            let stopped_at = sim.now;
            sim.run_until("it is dead", |s| s.procs[watcher].exited);
            sim.run_until("another one runs", |s| running_watcher(s).is_some());
            let notice_time = sim.now.since(stopped_at);
            assert!(notice_time < notice_max, "seed {seed}: {notice_time:?}");
        }
        assert!(has_note(&mut sim, console, "has not answered"));
    }
}

/// If the tasker hangs when guests must stop, nothing says that they are stopped, an event
/// says that they are not, and they end with their tasker.
#[test]
fn guests_of_silent_tasker_are_ended() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let guest = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
        let agent = sim.enrol(host(2));
        sim.inject_fault(Victim::SourceTasker, Fault::Stop(LONG_OUTAGE));
        assert_eq!(sim.ask(agent, stop_guests_request()), Reply::Done);
        let ordered_at = sim.now;
        let is_unconfirmed = list_tasks(&mut sim, console)
            .iter()
            .any(|task| task.stopping && !task.paused);
        assert!(is_unconfirmed, "seed {seed}");
        sim.run_until("the guest has ended", |s| s.procs[guest].exited);
        assert!(sim.now.since(ordered_at) < NOTICE_MAX, "seed {seed}");
        sim.advance(Micros::from_millis(50));
        let events = list_events(&mut sim, console);
        let position = |is_match: &dyn Fn(&EventKind) -> bool| events.iter().position(is_match);
        let not_stopped = position(&|e| matches!(e, EventKind::GuestsNotPaused { .. }));
        let tasker_gone = position(&|e| matches!(e, EventKind::TaskerGone { .. }));
        assert!(
            not_stopped.is_some() && not_stopped < tasker_gone,
            "{events:?}"
        );
    }
}

/// A tasker that hangs for a moment, or while no guest must stop, keeps its tasks.
#[test]
fn tasker_that_continues_keeps_its_tasks() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let guest = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
        sim.inject_fault(Victim::SourceTasker, Fault::Stop(LONG_OUTAGE));
        sim.advance(LONG_OUTAGE + SOME_CHECKS);
        assert!(!sim.procs[guest].exited, "seed {seed}");
        assert!(has_note(
            &mut sim,
            console,
            "the tasker of h2 has not answered"
        ));
        let agent = sim.enrol(host(2));
        sim.inject_fault(Victim::SourceTasker, Fault::Stop(Micros::from_secs(1)));
        assert_eq!(sim.ask(agent, stop_guests_request()), Reply::Done);
        sim.run_until("the guest has stopped", |s| s.procs[guest].is_frozen());
        sim.advance(SOME_CHECKS);
        assert!(!sim.procs[guest].exited, "seed {seed}");
        let tasks = list_tasks(&mut sim, console);
        assert!(tasks.iter().any(|task| task.paused && !task.stopping));
    }
}

/// The task list says that a guest is stopped only after the tasker has confirmed it, whatever
/// stops it, and no longer when it runs again.
#[test]
fn stop_is_reported_when_confirmed() {
    let (mut sim, console) = Sim::cluster(3, 2);
    let guest = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
    let tid = sim.procs[guest].tid();
    for (suspend, is_suspended) in [(true, true), (false, false)] {
        if suspend {
            // The tasker confirms nothing before it continues.
            let pause = Fault::Stop(Micros::from_millis(100));
            sim.inject_fault(Victim::SourceTasker, pause);
        }
        let request = Request::Suspend {
            tid,
            suspend,
            cause: None,
        };
        assert_eq!(sim.ask(console, request), Reply::Done);
        let state = |sim: &mut Sim| {
            let tasks = list_tasks(sim, console);
            let task = tasks.iter().find(|task| task.tid == tid).expect("alive");
            (task.suspended, task.stopping)
        };
        assert_eq!(state(&mut sim), (is_suspended, is_suspended));
        sim.advance(Micros::from_secs(1));
        assert_eq!(state(&mut sim), (is_suspended, false));
    }
}
