//! Migrations in which a program exits and is started again: messages and notifications of the old
//! and the new process, and faults and requests during the migration.

use super::restart_engine::{
    OWN_ENGINE, assert_reachable, await_migration, begin_migration, list_task, migrate,
    received_numbers, request_exit_notification, spawn, spawn_request,
};
use super::scenario::{stop_guests_request, welcome_guests_request};
use super::sim::{Received, Sim, host, seeds};
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request};
use sempa_proto::{Micros, Tid};

/// Wait status of a program that exits with the agreed exit status 85.
pub(super) const REQUESTED_EXIT_STATUS: i32 = 85 << 8;

pub(super) fn procs_of(sim: &Sim, tid: Tid) -> Vec<usize> {
    (0..sim.procs.len())
        .filter(|p| sim.procs[*p].welcome.as_ref().is_some_and(|w| w.tid == tid))
        .collect()
}

/// Returns the numbers that all processes of a task have received, from the oldest process to the
/// newest.
fn all_received_numbers(sim: &Sim, tid: Tid) -> Vec<i32> {
    procs_of(sim, tid)
        .into_iter()
        .flat_map(|proc| received_numbers(sim, proc))
        .collect()
}

/// Sends a number from the newest process of a task to another task, if the process is connected
/// and runs. Returns true if the number was sent.
fn send_if_connected(sim: &mut Sim, tid: Tid, receiver_tid: Tid, n: i32) -> bool {
    let proc = sim.proc_of(tid);
    let p = &sim.procs[proc];
    let can_send = p.welcome.is_some() && p.conn.is_some() && !p.exited && !p.is_frozen();
    if can_send {
        sim.send_message(proc, receiver_tid, &n.to_be_bytes());
    }
    can_send
}

fn subscribe_to_exit(sim: &mut Sim, proc: usize, tid: Tid) {
    let subjects = NotifySubjects::TaskExit(vec![tid]);
    sim.ask(
        proc,
        Request::Notify(NotifyRequest {
            subjects,
            ctx: 0,
            tag: 9,
            is_cancellation: false,
        }),
    );
}

/// Two tasks that send consecutive numbers to each other.
struct NumberExchange {
    tids: [Tid; 2],
    /// Number of messages that each task has sent.
    sent_counts: [i32; 2],
}

impl NumberExchange {
    /// Sends the next number of each task whose process is connected and runs.
    fn send_next(&mut self, sim: &mut Sim) {
        let [first_tid, second_tid] = self.tids;
        for (n, (tid, to)) in [(first_tid, second_tid), (second_tid, first_tid)]
            .into_iter()
            .enumerate()
        {
            let was_sent = send_if_connected(sim, tid, to, self.sent_counts[n]);
            self.sent_counts[n] += i32::from(was_sent);
        }
    }

    /// Migrates each task after a random delay and sends numbers until both migrations have ended.
    /// Returns the number of successful migrations.
    fn migrate_both(&mut self, sim: &mut Sim, console: usize, targets: [&str; 2]) -> usize {
        let start_delays = self.tids.map(|tid| (tid, sim.rng.below(30_000)));
        let mut open_requests = Vec::new();
        let start_time = sim.now;
        while open_requests.len() < 2
            || open_requests
                .iter()
                .any(|id| !sim.procs[console].replies.contains_key(id))
        {
            for (n, (tid, start_delay)) in start_delays.into_iter().enumerate() {
                if open_requests.len() == n && sim.now.since(start_time) >= Micros(start_delay) {
                    open_requests.push(begin_migration(sim, console, tid, targets[n]));
                }
            }
            self.send_next(sim);
            let delay = Micros(sim.rng.below(1_500));
            sim.advance(delay);
        }
        open_requests
            .into_iter()
            .filter(|id| await_migration(sim, console, *id).is_ok())
            .count()
    }

    /// Waits for the last number of each task. Checks that the other task has received all numbers
    /// once and in order.
    fn assert_all_received(&self, sim: &mut Sim) {
        let ([first_tid, second_tid], [first_sent_count, second_sent_count]) =
            (self.tids, self.sent_counts);
        sim.run_until("all that a said", |s| {
            all_received_numbers(s, second_tid).last() == Some(&(first_sent_count - 1))
        });
        sim.run_until("all that b said", |s| {
            all_received_numbers(s, first_tid).last() == Some(&(second_sent_count - 1))
        });
        for (receiver, sent_count) in [
            (second_tid, first_sent_count),
            (first_tid, second_sent_count),
        ] {
            assert_eq!(
                all_received_numbers(sim, receiver),
                (0..sent_count).collect::<Vec<i32>>(),
                "seed {}",
                sim.seed
            );
        }
    }
}

/// Two tasks exchange messages and are restarted at the same time. No message is lost or repeated.
#[test]
fn concurrent_restarts_lose_and_repeat_nothing() {
    let mut both_count = 0;
    for seed in seeds(150) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let engine = if seed % 2 == 0 {
            "own:wait=3"
        } else {
            "restart:wait=3"
        };
        let other_host = if seed % 3 == 0 { "h2" } else { "h3" };
        let tids = ["h2", other_host]
            .map(|host_name| spawn(&mut sim, console, spawn_request("child", engine, host_name)));
        let mut exchange = NumberExchange {
            tids,
            sent_counts: [0, 0],
        };
        for round in 0..3 {
            let targets = if round % 2 == 0 {
                ["h4", "h1"]
            } else {
                ["h2", "h3"]
            };
            let migrated_count = exchange.migrate_both(&mut sim, console, targets);
            both_count += usize::from(migrated_count == 2);
        }
        for tid in tids {
            sim.run_until("it is back", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        }
        exchange.send_next(&mut sim);
        exchange.assert_all_received(&mut sim);
    }
    assert!(both_count > 100, "{both_count}");
}

/// Spawns a task on h2 that ignores requests to exit, and begins its migration. Returns the task,
/// the process that was asked to exit, and the migration request.
pub(super) fn begin_exit(
    sim: &mut Sim,
    console: usize,
    target_name: &str,
) -> (Tid, usize, sempa_proto::RequestId) {
    let tid = spawn(sim, console, spawn_request("deaf", "own:wait=3", "h2"));
    let old_proc = sim.proc_of(tid);
    let migration_request = begin_migration(sim, console, tid, target_name);
    sim.run_until("it is asked", |s| s.exit_ignoring_procs.contains(&old_proc));
    (tid, old_proc, migration_request)
}

/// A task ends while its peer is restarted. Its messages reach the peer's new process.
#[test]
fn new_process_gets_messages_of_ended_sender() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let sender_host_name = if seed % 2 == 0 { "h2" } else { "h3" };
        let sender_tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", sender_host_name),
        );
        let (tid, old_proc, migration_request) = begin_exit(&mut sim, console, "h3");
        let sender_proc = sim.proc_of(sender_tid);
        (0..5i32).for_each(|n| sim.send_message(sender_proc, tid, &n.to_be_bytes()));
        let restarts_sender = seed % 3 == 0;
        if restarts_sender {
            // The sender is restarted, too.
            let target_name = if sender_host_name == "h2" { "h1" } else { "h2" };
            assert_eq!(
                migrate(&mut sim, console, sender_tid, target_name),
                Ok(OWN_ENGINE)
            );
        } else {
            sim.exit_gracefully(sender_proc, 0);
            sim.advance(Micros::from_millis(200));
        }
        assert_eq!(
            received_numbers(&sim, old_proc),
            [] as [i32; 0],
            "it is for the next one"
        );
        sim.exit_gracefully(old_proc, REQUESTED_EXIT_STATUS);
        assert_eq!(
            await_migration(&mut sim, console, migration_request),
            Ok(OWN_ENGINE)
        );
        sim.run_until("all of it", |s| all_received_numbers(s, tid).len() == 5);
        assert_reachable(&mut sim, console, tid);
        assert_eq!(
            all_received_numbers(&sim, tid),
            [0, 1, 2, 3, 4, 4711],
            "seed {seed}"
        );
    }
}

/// A task exits during the restart of its peer. The peer's new process receives the notification
/// after the last messages of the exited task.
#[test]
fn exit_notification_follows_last_messages() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let ending_tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own", if seed % 2 == 0 { "h3" } else { "h1" }),
        );
        let ending_proc = sim.proc_of(ending_tid);
        let tid = spawn(&mut sim, console, spawn_request("deaf", "own:wait=3", "h2"));
        let old_proc = sim.proc_of(tid);
        subscribe_to_exit(&mut sim, old_proc, ending_tid);
        sim.send_message(ending_proc, tid, &7i32.to_be_bytes());
        if seed % 3 == 0 {
            sim.run_until("it hears", |s| received_numbers(s, old_proc) == [7]);
        }
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(40_000));
        sim.advance(delay);
        (0..3i32).for_each(|n| sim.send_message(ending_proc, tid, &n.to_be_bytes()));
        sim.exit_gracefully(ending_proc, 0);
        sim.run_until("it is asked", |s| s.exit_ignoring_procs.contains(&old_proc));
        sim.advance(Micros::from_millis(200));
        let notification_count = sim.procs[old_proc].notifications(9).len();
        sim.exit_gracefully(old_proc, REQUESTED_EXIT_STATUS);
        assert_eq!(
            await_migration(&mut sim, console, migration_request),
            Ok(OWN_ENGINE)
        );
        sim.run_until("it has gone on", |s| {
            s.procs[s.proc_of(tid)].welcome.is_some()
        });
        let new_proc = sim.proc_of(tid);
        sim.run_until("it is told", |s| {
            notification_count + s.procs[new_proc].notifications(9).len() == 1
        });
        assert_eq!(all_received_numbers(&sim, tid), [7, 0, 1, 2], "seed {seed}");
        let received_items = &sim.procs[if notification_count == 1 {
            old_proc
        } else {
            new_proc
        }]
        .received;
        assert!(
            matches!(received_items.last(), Some(Received::Notification(_))),
            "{received_items:?} (seed {seed})"
        );
    }
}

/// A process is killed while it sends. The receiver gets exactly the messages that the successor
/// counts as sent.
#[test]
fn killed_process_and_successor_agree_on_messages() {
    for seed in seeds(80) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("deaf", "restart:wait=3", "h2"),
        );
        let (old_proc, receiver_tid) = (sim.proc_of(tid), sim.procs[console].tid());
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let mut sent_count = 0;
        while !sim.procs[old_proc].exited {
            let mut body = vec![0; 4 + sim.rng.below(200_000) as usize];
            body[..4].copy_from_slice(&i32::to_be_bytes(sent_count));
            sim.send_message(old_proc, receiver_tid, &body);
            sent_count += 1;
            let delay = Micros(sim.rng.below(300_000));
            sim.advance(delay);
        }
        await_migration(&mut sim, console, migration_request).expect("moved");
        sim.run_until("it is back", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        let new_proc = sim.proc_of(tid);
        (1000..1003).for_each(|sent_count: i32| {
            sim.send_message(new_proc, receiver_tid, &sent_count.to_be_bytes())
        });
        sim.run_until("the last word", |s| {
            received_numbers(s, console).last() == Some(&1002)
        });
        let numbers = received_numbers(&sim, console);
        let old_count = numbers.len() as i32 - 3;
        assert!(
            old_count >= sent_count - 1,
            "{old_count} of {sent_count} (seed {seed})"
        );
        assert_eq!(
            numbers,
            (0..old_count).chain(1000..1003).collect::<Vec<i32>>(),
            "seed {seed}"
        );
    }
}

/// An owner may arrive and leave at any time of a restart. The task migrates, or resumes when the
/// owner has left.
#[test]
fn owner_changes_do_not_break_restart() {
    let mut migrated_count = 0;
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let ignores_exit = seed % 2 == 0;
        let tid = spawn(
            &mut sim,
            console,
            spawn_request(
                if ignores_exit { "deaf" } else { "child" },
                "own:wait=1",
                "h2",
            ),
        );
        let owner_agent = sim.enrol(host(2));
        if seed % 3 > 0 {
            sim.ask(owner_agent, stop_guests_request());
            let delay = Micros(sim.rng.below(60_000));
            sim.advance(delay);
        }
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(if ignores_exit { 1_500_000 } else { 30_000 }));
        sim.advance(delay);
        sim.request(
            owner_agent,
            if seed % 3 == 1 {
                welcome_guests_request()
            } else {
                stop_guests_request()
            },
        );
        let result = await_migration(&mut sim, console, migration_request);
        assert_eq!(result.is_ok(), !ignores_exit, "{result:?} (seed {seed})");
        migrated_count += u32::from(!ignores_exit);
        sim.advance(Micros::from_secs(2));
        if ignores_exit && seed % 3 != 1 {
            let proc = sim.proc_of(tid);
            assert!(
                sim.procs[proc].is_frozen(),
                "the owner is present (seed {seed})"
            );
        }
        sim.ask(owner_agent, welcome_guests_request());
        assert_reachable(&mut sim, console, tid);
        assert_eq!(
            list_task(&mut sim, console, tid)[0].host,
            if ignores_exit { host(2) } else { host(3) }
        );
    }
    assert!(migrated_count > 50);
}

/// A task that is suspended during a request to exit stays suspended, with or without a migration.
#[test]
fn suspension_during_exit_request_takes_effect() {
    for seed in seeds(100) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let ignores_exit = seed % 2 == 0;
        let tid = spawn(
            &mut sim,
            console,
            spawn_request(
                if ignores_exit { "deaf" } else { "child" },
                "own:wait=1",
                "h2",
            ),
        );
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(if ignores_exit { 1_500_000 } else { 20_000 }));
        sim.advance(delay);
        let suspend_request = sim.request(
            console,
            Request::Suspend {
                tid,
                suspend: true,
                cause: None,
            },
        );
        let _ = await_migration(&mut sim, console, migration_request);
        sim.run_until("it is suspended", |s| {
            s.procs[console].replies.contains_key(&suspend_request)
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

/// A program leaves the virtual machine on request and exits late. If it exits with the agreed
/// status in time, it is started again; otherwise the task ends with the process.
#[test]
fn disconnected_program_is_restarted_after_late_exit() {
    for (seed, exits_as_agreed) in (0..20).map(|seed| (seed, seed % 2 == 0)) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let (tid, old_proc, migration_request) = begin_exit(&mut sim, console, "h3");
        request_exit_notification(&mut sim, console, tid);
        sim.send_message(console, tid, &5i32.to_be_bytes());
        sim.ask(old_proc, Request::Exit { watermarks: vec![] });
        sim.close_connection(old_proc);
        assert!(
            await_migration(&mut sim, console, migration_request).is_err(),
            "it has not ended in its time"
        );
        sim.advance(Micros::from_secs(1));
        if exits_as_agreed {
            sim.exit_proc(old_proc, REQUESTED_EXIT_STATUS);
            sim.run_until("it is back", |s| {
                s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].welcome.is_some()
            });
            sim.run_until("what came meanwhile", |s| {
                all_received_numbers(s, tid) == [5]
            });
            assert_reachable(&mut sim, console, tid);
            assert_eq!(all_received_numbers(&sim, tid), [5, 4711]);
        } else {
            sim.advance(Micros::from_secs(120));
            assert_eq!(
                sim.procs[console].notifications(1).len(),
                0,
                "its end is told when its process has ended"
            );
            sim.exit_proc(old_proc, 0);
            sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        }
    }
}

/// A program that was asked to exit is restarted at the source when the target is lost.
#[test]
fn lost_target_restarts_program_at_source() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("deaf", "restart:wait=3", "h2"),
        );
        request_exit_notification(&mut sim, console, tid);
        let old_proc = sim.proc_of(tid);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        sim.run_until("it is asked", |s| s.exit_ignoring_procs.contains(&old_proc));
        sim.send_message(console, tid, &1i32.to_be_bytes());
        sim.kill_host(host(3));
        assert!(await_migration(&mut sim, console, migration_request).is_err());
        if seed % 2 == 0 {
            sim.exit_proc(old_proc, 15);
        }
        sim.run_until("it is back", |s| {
            s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].welcome.is_some()
        });
        sim.run_until("what came meanwhile", |s| {
            all_received_numbers(s, tid) == [1]
        });
        assert_reachable(&mut sim, console, tid);
        assert_eq!(all_received_numbers(&sim, tid), [1, 4711], "seed {seed}");
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

/// A reset also ends a task that is being restarted.
#[test]
fn reset_ends_task_during_restart() {
    let mut restarting_count = 0;
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let engine = if seed % 2 == 0 {
            "own:wait=3"
        } else {
            "restart"
        };
        let tid = spawn(&mut sim, console, spawn_request("child", engine, "h2"));
        request_exit_notification(&mut sim, console, tid);
        let old_proc = sim.proc_of(tid);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(20_000));
        sim.advance(delay);
        let old_exited = sim.procs[old_proc].exited;
        sim.ask(console, Request::Reset { kill_tasks: true });
        let result = await_migration(&mut sim, console, migration_request);
        sim.advance(Micros::from_secs(3));
        if !list_task(&mut sim, console, tid).is_empty() {
            // The migration had succeeded before the reset, so the reset may not have ended the
            // task. The reset is repeated.
            assert!(result.is_ok(), "{result:?} (seed {seed})");
            sim.ask(console, Request::Reset { kill_tasks: true });
        } else {
            restarting_count += u32::from(old_exited && result.is_err());
        }
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        assert_eq!(list_task(&mut sim, console, tid), []);
    }
    assert!(restarting_count > 5, "{restarting_count} were away");
}

/// A session that breaks while a task is restarted loses no messages.
#[test]
fn broken_session_during_restart_loses_no_messages() {
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        let peer = sim.enrol(host(3 + (seed % 2) as u16));
        let (old_proc, receiver_tid) = (sim.proc_of(tid), sim.procs[peer].tid());
        let mut sent_count = 0;
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        (0..20i32).for_each(|n| sim.send_message(peer, tid, &n.to_be_bytes()));
        let send_duration = Micros(sim.rng.below(12_000));
        let start_time = sim.now;
        while sim.now.since(start_time) < send_duration && !sim.procs[old_proc].exited {
            sim.send_message(old_proc, receiver_tid, &i32::to_be_bytes(sent_count));
            sent_count += 1;
            sim.advance(Micros(500));
        }
        let outage = Micros(1_000 + sim.rng.below(400_000));
        sim.separate_hosts(host(2), host(3 + (seed % 3 == 0) as u16), outage);
        let _ = await_migration(&mut sim, console, migration_request);
        // After a late failure of the migration, the program is restarted shortly after the report
        // of the failure.
        let is_connected = |s: &Sim| {
            Some(&s.procs[s.proc_of(tid)]).is_some_and(|p| p.welcome.is_some() && !p.exited)
        };
        sim.run_until("it is back", is_connected);
        let new_proc = sim.proc_of(tid);
        while sent_count < 25 {
            sim.send_message(new_proc, receiver_tid, &i32::to_be_bytes(sent_count));
            sent_count += 1;
        }
        sim.run_until("all of it", |s| {
            all_received_numbers(s, tid).len() >= 20
                && received_numbers(s, peer).len() >= sent_count as usize
        });
        assert_eq!(
            all_received_numbers(&sim, tid),
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

/// A host is lost during a restart. The messages of the old and the new process arrive without a
/// gap.
#[test]
fn lost_host_during_restart_leaves_no_message_gap() {
    let (mut survival_count, mut source_lost_count) = (0, 0);
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let receiver_tid = sim.procs[console].tid();
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        let mut sent_count = 0;
        let mut send_numbers = |sim: &mut Sim, count: i32| {
            for _ in 0..count {
                sent_count += i32::from(send_if_connected(sim, tid, receiver_tid, sent_count));
            }
            sent_count
        };
        send_numbers(&mut sim, 5);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        for _ in 0..8 {
            let (delay, count) = (Micros(sim.rng.below(4_000)), sim.rng.below(3) as i32);
            sim.advance(delay);
            send_numbers(&mut sim, count);
        }
        let lost_host = host(2 + sim.rng.below(2) as u16);
        sim.kill_host(lost_host);
        let has_migrated = await_migration(&mut sim, console, migration_request).is_ok();
        sim.advance(Micros::from_secs(10));
        if list_task(&mut sim, console, tid).is_empty() {
            continue;
        }
        survival_count += 1;
        source_lost_count += u32::from(has_migrated && lost_host == host(2));
        assert_reachable(&mut sim, console, tid);
        let last_number = send_numbers(&mut sim, 1) - 1;
        sim.run_until("it is heard", |s| {
            received_numbers(s, console).last() == Some(&last_number)
        });
        let numbers = received_numbers(&sim, console);
        assert_eq!(
            numbers,
            (0..=last_number).collect::<Vec<i32>>(),
            "moved {has_migrated}, lost {lost_host} (seed {seed})"
        );
    }
    assert!(
        survival_count > 100 && source_lost_count > 20,
        "{survival_count} went on, {source_lost_count} without their source"
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
            spawn_request("deaf and stubborn", "restart:wait=1", "h2"),
        );
        request_exit_notification(&mut sim, console, tid);
        let old_proc = sim.proc_of(tid);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        sim.run_until("it is asked", |s| s.exit_ignoring_procs.contains(&old_proc));
        let delay = Micros(sim.rng.below(900_000));
        sim.advance(delay);
        sim.ask(console, Request::Signal { tid, signal: 15 });
        assert!(await_migration(&mut sim, console, migration_request).is_err());
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        assert_eq!(
            (sim.proc_of(tid), list_task(&mut sim, console, tid).len()),
            (old_proc, 0),
            "seed {seed}"
        );
    }
}

/// A task is restarted on a host whose owner has just arrived. It can immediately migrate again.
#[test]
fn restarted_program_can_leave_arriving_owner() {
    let (mut arrival_count, mut survival_count) = (0, 0);
    for seed in seeds(100) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "restart:wait=3", "h2"),
        );
        let owner_agent = sim.enrol(host(3));
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(15_000));
        sim.advance(delay);
        sim.request(owner_agent, stop_guests_request());
        if await_migration(&mut sim, console, migration_request).is_err() {
            continue;
        }
        arrival_count += 1;
        if sim.procs[sim.proc_of(tid)].welcome.is_none() {
            // The new process cannot have installed a signal handler yet, so the signal must not
            // reach it.
            let starting_proc = sim.proc_of(tid);
            sim.ask(console, Request::Signal { tid, signal: 10 });
            if sim.procs[starting_proc].exited {
                // The process connected before the signal arrived, so the signal could end it.
                assert!(sim.procs[starting_proc].welcome.is_some(), "seed {seed}");
                continue;
            }
            survival_count += 1;
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
        arrival_count > 20 && survival_count > 5,
        "{arrival_count} arrived, {survival_count} were spared a signal"
    );
}
