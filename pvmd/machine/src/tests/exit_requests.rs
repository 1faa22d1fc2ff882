//! Requests to exit: programs that exit before a request, ignore it, or exit late, and requests
//! that reach a program as messages.

use super::handoff_log::{REQUESTED_EXIT_STATUS, begin_exit, procs_of};
use super::restart_engine::{
    assert_reachable, await_migration, begin_migration, list_task, migrate,
    request_exit_notification, spawn, spawn_request,
};
use super::scenario::{stop_guests_request, welcome_guests_request};
use super::sim::{EXIT_REQUEST_TAG, Sim, host, seeds};
use sempa_proto::Micros;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::{Failure, Step};
use sempa_proto::task::Request;

/// A task that exits before it is asked to exit has ended, even with the agreed status.
#[test]
fn exit_before_request_ends_task() {
    let mut ended_count = 0;
    for seed in seeds(150) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let engine = if seed % 2 == 0 {
            "own:wait=3"
        } else {
            "restart"
        };
        let tid = spawn(&mut sim, console, spawn_request("deaf", engine, "h2"));
        request_exit_notification(&mut sim, console, tid);
        let old_proc = sim.proc_of(tid);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(12_000));
        sim.advance(delay);
        let was_asked = sim.has_handed_off_links(old_proc);
        sim.exit_proc(old_proc, REQUESTED_EXIT_STATUS);
        let result = await_migration(&mut sim, console, migration_request);
        if !was_asked {
            ended_count += 1;
            assert!(result.is_err());
            sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
            assert_eq!(sim.proc_of(tid), old_proc, "seed {seed}");
        }
    }
    assert!(ended_count > 20, "{ended_count}");
}

/// After the time for a late exit, a program that has ignored a request to exit can leave the
/// virtual machine normally. Its exit with the agreed status then ends the task.
#[test]
fn expired_exit_request_has_no_effect() {
    let (mut sim, console) = Sim::cluster(3, 3);
    let (tid, old_proc, migration_request) = begin_exit(&mut sim, console, "h3");
    request_exit_notification(&mut sim, console, tid);
    assert!(await_migration(&mut sim, console, migration_request).is_err());
    sim.advance(Micros::from_secs(120));
    sim.ask(old_proc, Request::Exit { watermarks: vec![] });
    sim.exit_proc(old_proc, REQUESTED_EXIT_STATUS);
    sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
    sim.advance(Micros::from_secs(2));
    assert_eq!(
        (sim.proc_of(tid), list_task(&mut sim, console, tid).len()),
        (old_proc, 0)
    );
}

/// No program is asked to exit after its migration has failed.
#[test]
fn failed_migration_withdraws_exit_request() {
    let (mut unasked_count, mut asked_count) = (0, 0);
    for seed in seeds(150) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(&mut sim, console, spawn_request("deaf", "own:wait=3", "h2"));
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(12_000));
        sim.advance(delay);
        sim.kill_host(host(3));
        assert!(await_migration(&mut sim, console, migration_request).is_err());
        sim.advance(Micros::from_millis(20));
        let ignored_count = sim.exit_ignoring_procs.len();
        sim.advance(Micros::from_secs(20));
        assert_eq!(sim.exit_ignoring_procs.len(), ignored_count, "seed {seed}");
        *if ignored_count == 0 {
            &mut unasked_count
        } else {
            &mut asked_count
        } += 1;
        assert_reachable(&mut sim, console, tid);
        // Another migration can still ask the task to exit.
        let Err((Step::Quiesce, Failure::Engine(_))) = migrate(&mut sim, console, tid, "h4") else {
            panic!("it is deaf (seed {seed})")
        };
        assert_reachable(&mut sim, console, tid);
    }
    assert!(
        unasked_count > 5 && asked_count > 5,
        "{unasked_count} were not asked, {asked_count} were"
    );
}

/// A first request asks a program to exit. A second migration fails before it asks the program.
/// When the program exits because of the first request, it is restarted.
#[test]
fn first_exit_request_survives_failed_second_one() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let (tid, old_proc, migration_request) = begin_exit(&mut sim, console, "h3");
        request_exit_notification(&mut sim, console, tid);
        assert!(
            await_migration(&mut sim, console, migration_request).is_err(),
            "it has not ended in its time"
        );
        let second_request = begin_migration(&mut sim, console, tid, "h4");
        let delay = Micros(sim.rng.below(12_000));
        sim.advance(delay);
        sim.kill_host(host(4));
        assert!(await_migration(&mut sim, console, second_request).is_err());
        sim.advance(Micros::from_secs(1));
        let ignored_count = sim.exit_ignoring_procs.len();
        sim.exit_gracefully(old_proc, REQUESTED_EXIT_STATUS);
        assert_eq!(
            sim.exit_ignoring_procs.len(),
            ignored_count,
            "an exiting program is not asked to exit (seed {seed})"
        );
        sim.run_until("it is back", |s| {
            s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        assert_reachable(&mut sim, console, tid);
        assert_eq!(sim.procs[console].notifications(1).len(), 0, "seed {seed}");
    }
}

/// Only the time in which the program runs counts for the timeout of a late exit.
#[test]
fn late_exit_window_excludes_paused_time() {
    let (mut sim, console) = Sim::cluster(5, 3);
    let (tid, old_proc, migration_request) = begin_exit(&mut sim, console, "h3");
    assert!(await_migration(&mut sim, console, migration_request).is_err());
    let owner_agent = sim.enrol(host(2));
    sim.ask(owner_agent, stop_guests_request());
    sim.advance(Micros::from_secs(600));
    sim.ask(owner_agent, welcome_guests_request());
    assert_reachable(&mut sim, console, tid);
    sim.advance(Micros::from_secs(50));
    sim.exit_gracefully(old_proc, REQUESTED_EXIT_STATUS);
    sim.run_until("it is back", |s| {
        s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].welcome.is_some()
    });
    assert_reachable(&mut sim, console, tid);
}

/// A program that is asked to exit by a message receives the message once. The next process of the
/// task does not receive the message.
#[test]
fn exit_request_message_is_delivered_once() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:message=77:wait=3", "h2"),
        );
        request_exit_notification(&mut sim, console, tid);
        let old_proc = sim.proc_of(tid);
        let result = migrate(&mut sim, console, tid, "h3");
        assert!(
            matches!(
                result,
                Ok(Engine::SelfCheckpoint {
                    ask_method: AskMethod::Message(EXIT_REQUEST_TAG),
                    ..
                })
            ),
            "{result:?}"
        );
        sim.run_until("it is there", |s| {
            s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        assert_reachable(&mut sim, console, tid);
        let request_count = procs_of(&sim, tid)
            .into_iter()
            .map(|proc| sim.procs[proc].notifications(EXIT_REQUEST_TAG).len());
        assert_eq!(request_count.collect::<Vec<usize>>(), [1, 0], "seed {seed}");
        assert_eq!(sim.procs[console].notifications(1).len(), 0);
    }
}

/// A request message that a program has not read is not passed on to the next process of the task.
#[test]
fn unread_exit_request_is_not_passed_on() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("deaf", "own:message=77:wait=3", "h2"),
        );
        request_exit_notification(&mut sim, console, tid);
        let old_proc = sim.proc_of(tid);
        let request_count = 1 + seed as usize % 2;
        for _ in 0..request_count {
            let migration_request = begin_migration(&mut sim, console, tid, "h3");
            assert!(
                await_migration(&mut sim, console, migration_request).is_err(),
                "it has not ended in its time"
            );
        }
        sim.advance(Micros::from_millis(100));
        assert_eq!(
            sim.procs[old_proc].notifications(EXIT_REQUEST_TAG).len(),
            request_count
        );
        sim.exit_gracefully(old_proc, REQUESTED_EXIT_STATUS);
        sim.run_until("it is back", |s| {
            s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        assert_reachable(&mut sim, console, tid);
        assert_eq!(
            sim.procs[sim.proc_of(tid)]
                .notifications(EXIT_REQUEST_TAG)
                .len(),
            0,
            "seed {seed}"
        );
        assert_eq!(sim.procs[console].notifications(1).len(), 0);
    }
}
