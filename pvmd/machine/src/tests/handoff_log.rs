//! Processes that exit to be restarted on another host: their messages and notifications, and
//! faults and requests during the restart.

use super::restart_engine::{
    OWN_ENGINE, assert_reachable, await_migration, begin_migration, list_task, migrate,
    notify_exit, received_numbers, request, spawn,
};
use super::scenario::{stop_guests, welcome_guests};
use super::sim::{EXIT_REQUEST_TAG, Received, Sim, host, seeds};
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::{Failure, Step};
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request};
use sempa_proto::{Micros, Tid};

/// Wait status of a program that exits as requested.
const REQUESTED_EXIT_STATUS: i32 = 85 << 8;

fn procs_of(sim: &Sim, tid: Tid) -> Vec<usize> {
    (0..sim.procs.len())
        .filter(|p| sim.procs[*p].welcome.as_ref().is_some_and(|w| w.tid == tid))
        .collect()
}

/// Returns the numbers that all processes of a task have received, in order.
fn all_received(sim: &Sim, tid: Tid) -> Vec<i32> {
    procs_of(sim, tid)
        .into_iter()
        .flat_map(|proc| received_numbers(sim, proc))
        .collect()
}

/// Sends a number from the newest process of a task to another task, if the process is connected.
/// True if the number was sent.
fn send_if_connected(sim: &mut Sim, tid: Tid, to: Tid, n: i32) -> bool {
    let proc = sim.proc_of(tid);
    let p = &sim.procs[proc];
    let can = p.welcome.is_some() && p.conn.is_some() && !p.exited && !p.is_frozen();
    if can {
        sim.send_message(proc, to, &n.to_be_bytes());
    }
    can
}

fn notify(sim: &mut Sim, proc: usize, tid: Tid) {
    let what = NotifySubjects::TaskExit(vec![tid]);
    sim.ask(
        proc,
        Request::Notify(NotifyRequest {
            subjects: what,
            ctx: 0,
            tag: 9,
            cancel: false,
        }),
    );
}

/// Two tasks that exchange messages and are restarted at the same time lose and repeat no message.
#[test]
fn concurrent_restarts_lose_and_repeat_nothing() {
    let mut both = 0;
    for seed in seeds(150) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let engine = if seed % 2 == 0 {
            "own:wait=3"
        } else {
            "restart:wait=3"
        };
        let a = spawn(&mut sim, console, request("child", engine, "h2"));
        let near = if seed % 3 == 0 { "h2" } else { "h3" };
        let b = spawn(&mut sim, console, request("child", engine, near));
        let (mut from_a, mut from_b) = (0, 0);
        for round in 0..3 {
            let targets = if round % 2 == 0 {
                ["h4", "h1"]
            } else {
                ["h2", "h3"]
            };
            let moving = [a, b].map(|tid| (tid, sim.rng.below(30_000)));
            let mut open = Vec::new();
            let begun = sim.now;
            while open.len() < 2
                || open
                    .iter()
                    .any(|id| !sim.procs[console].replies.contains_key(id))
            {
                for (n, (tid, at)) in moving.into_iter().enumerate() {
                    if open.len() == n && sim.now.since(begun) >= Micros(at) {
                        open.push(begin_migration(&mut sim, console, tid, targets[n]));
                    }
                }
                from_a += i32::from(send_if_connected(&mut sim, a, b, from_a));
                from_b += i32::from(send_if_connected(&mut sim, b, a, from_b));
                let wait = Micros(sim.rng.below(1_500));
                sim.advance(wait);
            }
            let moved = open
                .into_iter()
                .filter(|id| await_migration(&mut sim, console, *id).is_ok())
                .count();
            both += usize::from(moved == 2);
        }
        for tid in [a, b] {
            sim.run_until("it is back", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        }
        from_a += i32::from(send_if_connected(&mut sim, a, b, from_a));
        from_b += i32::from(send_if_connected(&mut sim, b, a, from_b));
        sim.run_until("all that a said", |s| {
            all_received(s, b).last() == Some(&(from_a - 1))
        });
        sim.run_until("all that b said", |s| {
            all_received(s, a).last() == Some(&(from_b - 1))
        });
        assert_eq!(
            all_received(&sim, b),
            (0..from_a).collect::<Vec<i32>>(),
            "seed {seed}"
        );
        assert_eq!(
            all_received(&sim, a),
            (0..from_b).collect::<Vec<i32>>(),
            "seed {seed}"
        );
    }
    assert!(both > 100, "{both}");
}

/// Spawns a task on h2 that is slow to exit, and begins its migration. Returns the task, the
/// process that was asked to exit, and the request.
fn begin_exit(sim: &mut Sim, console: usize, to: &str) -> (Tid, usize, sempa_proto::RequestId) {
    let tid = spawn(sim, console, request("deaf", "own:wait=3", "h2"));
    let old_proc = sim.proc_of(tid);
    let moving = begin_migration(sim, console, tid, to);
    sim.run_until("it is asked", |s| s.exit_ignored_by.contains(&old_proc));
    (tid, old_proc, moving)
}

/// Messages of a task that ends while its peer is restarted reach the peer's new process.
#[test]
fn new_process_gets_messages_of_ended_sender() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let from = if seed % 2 == 0 { "h2" } else { "h3" };
        let talker = spawn(&mut sim, console, request("child", "own:wait=3", from));
        let (tid, old, moving) = begin_exit(&mut sim, console, "h3");
        let said = sim.proc_of(talker);
        (0..5i32).for_each(|n| sim.send_message(said, tid, &n.to_be_bytes()));
        let again = seed % 3 == 0;
        if again {
            // The sender is restarted, too.
            let to = if from == "h2" { "h1" } else { "h2" };
            assert_eq!(migrate(&mut sim, console, talker, to), Ok(OWN_ENGINE));
        } else {
            sim.exit_gracefully(said, 0);
            sim.advance(Micros::from_millis(200));
        }
        assert_eq!(
            received_numbers(&sim, old),
            [] as [i32; 0],
            "it is for the next one"
        );
        sim.exit_gracefully(old, REQUESTED_EXIT_STATUS);
        assert_eq!(await_migration(&mut sim, console, moving), Ok(OWN_ENGINE));
        sim.run_until("all of it", |s| all_received(s, tid).len() == 5);
        assert_reachable(&mut sim, console, tid);
        assert_eq!(
            all_received(&sim, tid),
            [0, 1, 2, 3, 4, 4711],
            "seed {seed}"
        );
    }
}

/// A notification of an exit during a restart reaches the new process after the last messages of
/// the exited task.
#[test]
fn exit_notification_follows_last_messages() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let dying = spawn(
            &mut sim,
            console,
            request("child", "own", if seed % 2 == 0 { "h3" } else { "h1" }),
        );
        let last = sim.proc_of(dying);
        let tid = spawn(&mut sim, console, request("deaf", "own:wait=3", "h2"));
        let old = sim.proc_of(tid);
        notify(&mut sim, old, dying);
        sim.send_message(last, tid, &7i32.to_be_bytes());
        if seed % 3 == 0 {
            sim.run_until("it hears", |s| received_numbers(s, old) == [7]);
        }
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(40_000));
        sim.advance(wait);
        (0..3i32).for_each(|n| sim.send_message(last, tid, &n.to_be_bytes()));
        sim.exit_gracefully(last, 0);
        sim.run_until("it is asked", |s| s.exit_ignored_by.contains(&old));
        sim.advance(Micros::from_millis(200));
        let noted = sim.procs[old].notifications(9).len();
        sim.exit_gracefully(old, REQUESTED_EXIT_STATUS);
        assert_eq!(await_migration(&mut sim, console, moving), Ok(OWN_ENGINE));
        sim.run_until("it has gone on", |s| {
            s.procs[s.proc_of(tid)].welcome.is_some()
        });
        let new = sim.proc_of(tid);
        sim.run_until("it is told", |s| {
            noted + s.procs[new].notifications(9).len() == 1
        });
        assert_eq!(all_received(&sim, tid), [7, 0, 1, 2], "seed {seed}");
        let seen = &sim.procs[if noted == 1 { old } else { new }].received;
        assert!(
            matches!(seen.last(), Some(Received::Notification(_))),
            "{seen:?} (seed {seed})"
        );
    }
}

/// A process that is killed while it sends has delivered exactly the messages that its successor
/// counts as sent.
#[test]
fn killed_process_and_successor_agree_on_messages() {
    for seed in seeds(80) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, request("deaf", "restart:wait=3", "h2"));
        let (old, to) = (sim.proc_of(tid), sim.procs[console].tid());
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let mut n = 0;
        while !sim.procs[old].exited {
            let mut body = vec![0; 4 + sim.rng.below(200_000) as usize];
            body[..4].copy_from_slice(&i32::to_be_bytes(n));
            sim.send_message(old, to, &body);
            n += 1;
            let wait = Micros(sim.rng.below(300_000));
            sim.advance(wait);
        }
        await_migration(&mut sim, console, moving).expect("moved");
        sim.run_until("it is back", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        let new = sim.proc_of(tid);
        (1000..1003).for_each(|n: i32| sim.send_message(new, to, &n.to_be_bytes()));
        sim.run_until("the last word", |s| {
            received_numbers(s, console).last() == Some(&1002)
        });
        let got = received_numbers(&sim, console);
        let before = got.len() as i32 - 3;
        assert!(before >= n - 1, "{before} of {n} (seed {seed})");
        assert_eq!(
            got,
            (0..before).chain(1000..1003).collect::<Vec<i32>>(),
            "seed {seed}"
        );
    }
}

/// An owner may arrive and leave at any moment: the task migrates, or resumes when the owner has
/// left.
#[test]
fn owner_changes_do_not_break_restart() {
    let mut moved = 0;
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let deaf = seed % 2 == 0;
        let tid = spawn(
            &mut sim,
            console,
            request(if deaf { "deaf" } else { "child" }, "own:wait=1", "h2"),
        );
        let speaker = sim.enrol(host(2));
        if seed % 3 > 0 {
            sim.ask(speaker, stop_guests());
            let wait = Micros(sim.rng.below(60_000));
            sim.advance(wait);
        }
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(if deaf { 1_500_000 } else { 30_000 }));
        sim.advance(wait);
        sim.request(
            speaker,
            if seed % 3 == 1 {
                welcome_guests()
            } else {
                stop_guests()
            },
        );
        let result = await_migration(&mut sim, console, moving);
        assert_eq!(result.is_ok(), !deaf, "{result:?} (seed {seed})");
        moved += u32::from(!deaf);
        sim.advance(Micros::from_secs(2));
        if deaf && seed % 3 != 1 {
            let proc = sim.proc_of(tid);
            assert!(
                sim.procs[proc].is_frozen(),
                "the owner is there (seed {seed})"
            );
        }
        sim.ask(speaker, welcome_guests());
        assert_reachable(&mut sim, console, tid);
        assert_eq!(
            list_task(&mut sim, console, tid)[0].host,
            if deaf { host(2) } else { host(3) }
        );
    }
    assert!(moved > 50);
}

/// A task that is suspended while it is asked to exit stays suspended, whether it migrates or not.
#[test]
fn suspension_during_exit_request_takes_effect() {
    for seed in seeds(100) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let deaf = seed % 2 == 0;
        let tid = spawn(
            &mut sim,
            console,
            request(if deaf { "deaf" } else { "child" }, "own:wait=1", "h2"),
        );
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(if deaf { 1_500_000 } else { 20_000 }));
        sim.advance(wait);
        let suspended = sim.request(
            console,
            Request::Suspend {
                tid,
                suspend: true,
                cause: None,
            },
        );
        let _ = await_migration(&mut sim, console, moving);
        sim.run_until("it is suspended", |s| {
            s.procs[console].replies.contains_key(&suspended)
        });
        sim.advance(Micros::from_secs(3));
        assert!(
            list_task(&mut sim, console, tid)[0].suspended,
            "seed {seed}"
        );
        let proc = sim.proc_of(tid);
        assert!(sim.procs[proc].is_frozen(), "seed {seed}");
        assert_eq!(
            sim.ask(
                console,
                Request::Suspend {
                    tid,
                    suspend: false,
                    cause: None
                }
            ),
            Reply::Done
        );
        assert_reachable(&mut sim, console, tid);
    }
}

/// A program that ignored a request to exit can leave the virtual machine normally later.
#[test]
fn expired_exit_request_has_no_effect() {
    let (mut sim, console) = Sim::cluster(3, 3);
    let (tid, old, moving) = begin_exit(&mut sim, console, "h3");
    notify_exit(&mut sim, console, tid);
    assert!(await_migration(&mut sim, console, moving).is_err());
    sim.advance(Micros::from_secs(120));
    sim.ask(old, Request::Exit { watermarks: vec![] });
    sim.exit(old, REQUESTED_EXIT_STATUS);
    sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
    sim.advance(Micros::from_secs(2));
    assert_eq!(
        (sim.proc_of(tid), list_task(&mut sim, console, tid).len()),
        (old, 0)
    );
}

/// A program that disconnects on request and exits late with the agreed status is restarted.
#[test]
fn disconnected_program_is_restarted_after_late_exit() {
    for (seed, again) in (0..20).map(|seed| (seed, seed % 2 == 0)) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let (tid, old, moving) = begin_exit(&mut sim, console, "h3");
        notify_exit(&mut sim, console, tid);
        sim.send_message(console, tid, &5i32.to_be_bytes());
        sim.ask(old, Request::Exit { watermarks: vec![] });
        sim.close(old);
        assert!(
            await_migration(&mut sim, console, moving).is_err(),
            "it has not ended in its time"
        );
        sim.advance(Micros::from_secs(1));
        if again {
            sim.exit(old, REQUESTED_EXIT_STATUS);
            sim.run_until("it is back", |s| {
                s.proc_of(tid) != old && s.procs[s.proc_of(tid)].welcome.is_some()
            });
            sim.run_until("what came meanwhile", |s| all_received(s, tid) == [5]);
            assert_reachable(&mut sim, console, tid);
            assert_eq!(all_received(&sim, tid), [5, 4711]);
        } else {
            sim.advance(Micros::from_secs(120));
            assert_eq!(
                sim.procs[console].notifications(1).len(),
                0,
                "its end is told when its process has ended"
            );
            sim.exit(old, 0);
            sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        }
    }
}

/// No program is asked to exit after its migration has failed.
#[test]
fn failed_migration_withdraws_exit_request() {
    let (mut before, mut after) = (0, 0);
    for seed in seeds(150) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(&mut sim, console, request("deaf", "own:wait=3", "h2"));
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(12_000));
        sim.advance(wait);
        sim.kill_host(host(3));
        assert!(await_migration(&mut sim, console, moving).is_err());
        sim.advance(Micros::from_millis(20));
        let asked = sim.exit_ignored_by.len();
        sim.advance(Micros::from_secs(20));
        assert_eq!(sim.exit_ignored_by.len(), asked, "seed {seed}");
        *if asked == 0 { &mut before } else { &mut after } += 1;
        assert_reachable(&mut sim, console, tid);
        // The task can still be asked to migrate elsewhere.
        let Err((Step::Quiesce, Failure::Engine(_))) = migrate(&mut sim, console, tid, "h4") else {
            panic!("it is deaf (seed {seed})")
        };
        assert_reachable(&mut sim, console, tid);
    }
    assert!(
        before > 5 && after > 5,
        "{before} were not asked, {after} were"
    );
}

/// A program that was asked to exit is restarted at the source when the target is lost.
#[test]
fn lost_target_restarts_program_at_source() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(&mut sim, console, request("deaf", "restart:wait=3", "h2"));
        notify_exit(&mut sim, console, tid);
        let old = sim.proc_of(tid);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        sim.run_until("it is asked", |s| s.exit_ignored_by.contains(&old));
        sim.send_message(console, tid, &1i32.to_be_bytes());
        sim.kill_host(host(3));
        assert!(await_migration(&mut sim, console, moving).is_err());
        if seed % 2 == 0 {
            sim.exit(old, 15);
        }
        sim.run_until("it is back", |s| {
            s.proc_of(tid) != old && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        sim.run_until("what came meanwhile", |s| all_received(s, tid) == [1]);
        assert_reachable(&mut sim, console, tid);
        assert_eq!(all_received(&sim, tid), [1, 4711], "seed {seed}");
        assert_eq!(
            (
                sim.procs[sim.proc_of(tid)].host,
                sim.procs[console].notifications(1).len()
            ),
            (host(2), 0)
        );
        assert_eq!(
            migrate(&mut sim, console, tid, "h4").map(|_| ()),
            Ok(()),
            "seed {seed}"
        );
        assert_reachable(&mut sim, console, tid);
    }
}

/// A task that exits before it is asked to exit has ended, with any status.
#[test]
fn exit_before_request_ends_task() {
    let mut ended = 0;
    for seed in seeds(150) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let engine = if seed % 2 == 0 {
            "own:wait=3"
        } else {
            "restart"
        };
        let tid = spawn(&mut sim, console, request("deaf", engine, "h2"));
        notify_exit(&mut sim, console, tid);
        let old = sim.proc_of(tid);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(12_000));
        sim.advance(wait);
        let asked = sim.handed_off_links(old);
        sim.exit(old, REQUESTED_EXIT_STATUS);
        let moved = await_migration(&mut sim, console, moving);
        if !asked {
            ended += 1;
            assert!(moved.is_err());
            sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
            assert_eq!(sim.proc_of(tid), old, "seed {seed}");
        }
    }
    assert!(ended > 20, "{ended}");
}

/// A reset also ends a task that is being restarted.
#[test]
fn reset_ends_task_during_restart() {
    let mut away = 0;
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let engine = if seed % 2 == 0 {
            "own:wait=3"
        } else {
            "restart"
        };
        let tid = spawn(&mut sim, console, request("child", engine, "h2"));
        notify_exit(&mut sim, console, tid);
        let old = sim.proc_of(tid);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(20_000));
        sim.advance(wait);
        let gone = sim.procs[old].exited;
        sim.ask(console, Request::Reset { kill: true });
        let moved = await_migration(&mut sim, console, moving);
        sim.advance(Micros::from_secs(3));
        if !list_task(&mut sim, console, tid).is_empty() {
            // The task had just migrated, as a task that migrates by CRIU may have.
            assert!(moved.is_ok(), "{moved:?} (seed {seed})");
            sim.ask(console, Request::Reset { kill: true });
        } else {
            away += u32::from(gone && moved.is_err());
        }
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        assert_eq!(list_task(&mut sim, console, tid), []);
    }
    assert!(away > 5, "{away} were away");
}

/// A session that breaks while a task is restarted loses no messages.
#[test]
fn broken_session_during_restart_loses_no_messages() {
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        let peer = sim.enrol(host(3 + (seed % 2) as u16));
        let (old, to) = (sim.proc_of(tid), sim.procs[peer].tid());
        let mut sent_count = 0;
        let moving = begin_migration(&mut sim, console, tid, "h3");
        (0..20i32).for_each(|n| sim.send_message(peer, tid, &n.to_be_bytes()));
        let until = Micros(sim.rng.below(12_000));
        let begun = sim.now;
        while sim.now.since(begun) < until && !sim.procs[old].exited {
            sim.send_message(old, to, &i32::to_be_bytes(sent_count));
            sent_count += 1;
            sim.advance(Micros(500));
        }
        let long = Micros(1_000 + sim.rng.below(400_000));
        sim.separate(host(2), host(3 + (seed % 3 == 0) as u16), long);
        let _ = await_migration(&mut sim, console, moving);
        // A migration that fails late restarts the program shortly after the failure is reported.
        let is_back = |s: &Sim| {
            Some(&s.procs[s.proc_of(tid)]).is_some_and(|p| p.welcome.is_some() && !p.exited)
        };
        sim.run_until("it is back", is_back);
        let new = sim.proc_of(tid);
        while sent_count < 25 {
            sim.send_message(new, to, &i32::to_be_bytes(sent_count));
            sent_count += 1;
        }
        sim.run_until("all of it", |s| {
            all_received(s, tid).len() >= 20
                && received_numbers(s, peer).len() >= sent_count as usize
        });
        assert_eq!(
            all_received(&sim, tid),
            (0..20).collect::<Vec<i32>>(),
            "seed {seed}"
        );
        assert_eq!(
            received_numbers(&sim, peer),
            (0..sent_count).collect::<Vec<i32>>(),
            "seed {seed}"
        );
    }
}

/// After the loss of a host during a restart, the messages of the old and the new process arrive
/// without a gap.
#[test]
fn lost_host_during_restart_leaves_no_message_gap() {
    let (mut went_on, mut of_source) = (0, 0);
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let to = sim.procs[console].tid();
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        let mut sent_count = 0;
        let mut send_numbers = |sim: &mut Sim, count: i32| {
            for _ in 0..count {
                sent_count += i32::from(send_if_connected(sim, tid, to, sent_count));
            }
            sent_count
        };
        send_numbers(&mut sim, 5);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        for _ in 0..8 {
            let (wait, count) = (Micros(sim.rng.below(4_000)), sim.rng.below(3) as i32);
            sim.advance(wait);
            send_numbers(&mut sim, count);
        }
        let lost = host(2 + sim.rng.below(2) as u16);
        sim.kill_host(lost);
        let moved = await_migration(&mut sim, console, moving).is_ok();
        sim.advance(Micros::from_secs(10));
        if list_task(&mut sim, console, tid).is_empty() {
            continue;
        }
        went_on += 1;
        of_source += u32::from(moved && lost == host(2));
        assert_reachable(&mut sim, console, tid);
        let before = send_numbers(&mut sim, 1) - 1;
        sim.run_until("it is heard", |s| {
            received_numbers(s, console).last() == Some(&before)
        });
        let heard = received_numbers(&sim, console);
        assert_eq!(
            heard,
            (0..=before).collect::<Vec<i32>>(),
            "moved {moved}, lost {lost} (seed {seed})"
        );
    }
    assert!(
        went_on > 100 && of_source > 20,
        "{went_on} went on, {of_source} without their source"
    );
}

/// A task that is terminated during a migration by restart ends and is not restarted.
#[test]
fn terminated_task_is_not_restarted() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            request("deaf and stubborn", "restart:wait=1", "h2"),
        );
        notify_exit(&mut sim, console, tid);
        let old = sim.proc_of(tid);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        sim.run_until("it is asked", |s| s.exit_ignored_by.contains(&old));
        let wait = Micros(sim.rng.below(900_000));
        sim.advance(wait);
        sim.ask(console, Request::Signal { tid, signal: 15 });
        assert!(await_migration(&mut sim, console, moving).is_err());
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        assert_eq!(
            (sim.proc_of(tid), list_task(&mut sim, console, tid).len()),
            (old, 0),
            "seed {seed}"
        );
    }
}

/// A program that exits because of a first request is restarted, although a second migration failed
/// before it asked the program to exit.
#[test]
fn first_exit_request_survives_failed_second_one() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let (tid, old, moving) = begin_exit(&mut sim, console, "h3");
        notify_exit(&mut sim, console, tid);
        assert!(
            await_migration(&mut sim, console, moving).is_err(),
            "it has not ended in its time"
        );
        let again = begin_migration(&mut sim, console, tid, "h4");
        let wait = Micros(sim.rng.below(12_000));
        sim.advance(wait);
        sim.kill_host(host(4));
        assert!(await_migration(&mut sim, console, again).is_err());
        sim.advance(Micros::from_secs(1));
        let asked = sim.exit_ignored_by.len();
        sim.exit_gracefully(old, REQUESTED_EXIT_STATUS);
        assert_eq!(
            sim.exit_ignored_by.len(),
            asked,
            "who is ending is not asked to (seed {seed})"
        );
        sim.run_until("it is back", |s| {
            s.proc_of(tid) != old && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        assert_reachable(&mut sim, console, tid);
        assert_eq!(sim.procs[console].notifications(1).len(), 0, "seed {seed}");
    }
}

/// The window for a late exit counts only the time in which the program runs.
#[test]
fn late_exit_window_excludes_paused_time() {
    let (mut sim, console) = Sim::cluster(5, 3);
    let (tid, old, moving) = begin_exit(&mut sim, console, "h3");
    assert!(await_migration(&mut sim, console, moving).is_err());
    let speaker = sim.enrol(host(2));
    sim.ask(speaker, stop_guests());
    sim.advance(Micros::from_secs(600));
    sim.ask(speaker, welcome_guests());
    assert_reachable(&mut sim, console, tid);
    sim.advance(Micros::from_secs(50));
    sim.exit_gracefully(old, REQUESTED_EXIT_STATUS);
    sim.run_until("it is back", |s| {
        s.proc_of(tid) != old && s.procs[s.proc_of(tid)].welcome.is_some()
    });
    assert_reachable(&mut sim, console, tid);
}

/// A program that is restarted on a host whose owner has just arrived can migrate again
/// immediately.
#[test]
fn restarted_program_can_leave_arriving_owner() {
    let (mut arrived, mut spared) = (0, 0);
    for seed in seeds(100) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(&mut sim, console, request("child", "restart:wait=3", "h2"));
        let speaker = sim.enrol(host(3));
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(15_000));
        sim.advance(wait);
        sim.request(speaker, stop_guests());
        if await_migration(&mut sim, console, moving).is_err() {
            continue;
        }
        arrived += 1;
        if sim.procs[sim.proc_of(tid)].welcome.is_none() {
            // The new process cannot have installed a signal handler yet.
            let begins = sim.proc_of(tid);
            sim.ask(console, Request::Signal { tid, signal: 10 });
            if sim.procs[begins].exited {
                // The process had started before the signal arrived.
                assert!(sim.procs[begins].welcome.is_some(), "seed {seed}");
                continue;
            }
            spared += 1;
        }
        assert_eq!(
            migrate(&mut sim, console, tid, "h4").map(|_| ()),
            Ok(()),
            "seed {seed}"
        );
        assert_reachable(&mut sim, console, tid);
        assert_eq!(
            list_task(&mut sim, console, tid)[0].host,
            host(4),
            "seed {seed}"
        );
    }
    assert!(
        arrived > 20 && spared > 5,
        "{arrived} arrived, {spared} were spared a signal"
    );
}

/// A program that is asked by a message receives it once; its successor does not receive it.
#[test]
fn exit_request_message_is_delivered_once() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            request("child", "own:message=77:wait=3", "h2"),
        );
        notify_exit(&mut sim, console, tid);
        let old = sim.proc_of(tid);
        let moved = migrate(&mut sim, console, tid, "h3");
        assert!(
            matches!(
                moved,
                Ok(Engine::SelfCheckpoint {
                    ask_method: AskMethod::Message(EXIT_REQUEST_TAG),
                    ..
                })
            ),
            "{moved:?}"
        );
        sim.run_until("it is there", |s| {
            s.proc_of(tid) != old && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        assert_reachable(&mut sim, console, tid);
        let asked = procs_of(&sim, tid)
            .into_iter()
            .map(|proc| sim.procs[proc].notifications(EXIT_REQUEST_TAG).len());
        assert_eq!(asked.collect::<Vec<usize>>(), [1, 0], "seed {seed}");
        assert_eq!(sim.procs[console].notifications(1).len(), 0);
    }
}

/// A request message that a program left unread does not reach its successor.
#[test]
fn unread_exit_request_is_not_passed_on() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(
            &mut sim,
            console,
            request("deaf", "own:message=77:wait=3", "h2"),
        );
        notify_exit(&mut sim, console, tid);
        let old = sim.proc_of(tid);
        let times = 1 + seed as usize % 2;
        for _ in 0..times {
            let moving = begin_migration(&mut sim, console, tid, "h3");
            assert!(
                await_migration(&mut sim, console, moving).is_err(),
                "it has not ended in its time"
            );
        }
        sim.advance(Micros::from_millis(100));
        assert_eq!(sim.procs[old].notifications(EXIT_REQUEST_TAG).len(), times);
        sim.exit_gracefully(old, REQUESTED_EXIT_STATUS);
        sim.run_until("it is back", |s| {
            s.proc_of(tid) != old && s.procs[s.proc_of(tid)].welcome.is_some()
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
