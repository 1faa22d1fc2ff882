//! Migrations of tasks that exchange messages.

use super::sim::{Received, Sim, host, seeds};
use crate::{Event, HostId};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{
    MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request, SPAWN_DEBUG, SPAWN_HOST,
    SPAWN_PINNED, SendWatermark, Sink, SpawnRequest,
};
use sempa_proto::{Micros, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

fn migrate_request(tid: Tid, target_name: &str) -> Request {
    Request::Migrate {
        tid,
        target: target_name.into(),
        cause: None,
        wait_for_end: true,
    }
}

fn spawn(sim: &mut Sim, console: usize, request: SpawnRequest) -> Vec<usize> {
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

fn children_request(count: u32) -> SpawnRequest {
    SpawnRequest {
        program: "child".into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

/// Begins to migrate a task from h2 to h3, then advances the time by less than `delay_max_us`
/// microseconds. The console is notified of the task's exit with tag 1. Returns the simulation, the
/// processes of console and task, and the migration request.
fn migrating_task(seed: u64, hosts: usize, delay_max_us: u64) -> (Sim, usize, usize, RequestId) {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let task_proc = spawn(
        &mut sim,
        console,
        SpawnRequest {
            where_arg: "h2".into(),
            flags: 1,
            ..children_request(1)
        },
    )[0];
    let tid = sim.procs[task_proc].tid();
    let subjects = NotifySubjects::TaskExit(vec![tid]);
    sim.ask(
        console,
        Request::Notify(NotifyRequest {
            subjects,
            ctx: 0,
            tag: 1,
            is_cancellation: false,
        }),
    );
    let migration_request = sim.request(console, migrate_request(tid, "h3"));
    let delay = Micros(sim.rng.below(delay_max_us));
    sim.advance(delay);
    (sim, console, task_proc, migration_request)
}

/// Waits until a migration has ended. Returns the task's entries in the task list, the number of
/// exit notifications, and true if the task has migrated.
fn await_migration(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    migration_request: RequestId,
) -> (Vec<TaskInfo>, usize, bool) {
    sim.run_until("the end of the move", |s| {
        s.procs[console].replies.contains_key(&migration_request)
    });
    sim.advance(Micros::from_secs(10));
    let tasks = match sim.ask(console, Request::Tasks { selector: tid }) {
        Reply::Tasks(tasks) => tasks,
        // The task was on a host that is lost.
        Reply::Failed {
            error: PvmError::NoHost,
            ..
        } => Vec::new(),
        other => panic!("no list: {other:?}"),
    };
    let has_migrated = matches!(
        sim.procs[console].replies[&migration_request],
        Reply::Migrated(Ok(_))
    );
    (
        tasks,
        sim.procs[console].notifications(1).len(),
        has_migrated,
    )
}

/// Asserts that the messages of every sender to every receiver arrived once and in order. Returns
/// the number of messages.
fn assert_in_order(sim: &Sim, procs: &[usize]) -> usize {
    let mut message_count = 0;
    for p in procs {
        let mut next_numbers: BTreeMap<Tid, i32> = BTreeMap::new();
        for item in &sim.procs[*p].received {
            if let Received::Message(src, body) = item {
                let number = i32::from_be_bytes(body[..4].try_into().expect("four bytes"));
                let next_number = next_numbers.entry(*src).or_default();
                assert_eq!(number, *next_number, "from {src} (seed {})", sim.seed);
                *next_number += 1;
                message_count += 1;
            }
        }
    }
    message_count
}

/// No message is lost, repeated or reordered by random migrations of its sender and its receiver.
#[test]
fn random_migrations_keep_message_order() {
    let mut migrated_total = 0;
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let procs = spawn(&mut sim, console, children_request(6));
        let tids: Vec<Tid> = procs.iter().map(|p| sim.procs[*p].tid()).collect();
        sim.random_faults.failed_steps_percent = if seed % 2 == 0 { 15 } else { 0 };
        let (mut message_count, mut migration_count, mut open_requests) = (0, 0, Vec::new());
        let mut next_numbers: BTreeMap<(usize, Tid), u32> = BTreeMap::new();
        for round in 0..400 {
            let (from, to) = (
                procs[sim.rng.below(6) as usize],
                tids[sim.rng.below(6) as usize],
            );
            if sim.procs[from].tid() != to {
                let number = next_numbers.entry((from, to)).or_default();
                let body = number.to_be_bytes();
                *number += 1;
                message_count += 1;
                sim.send_message(from, to, &body);
            }
            if round % 10 == 0 {
                let (tid, to) = (tids[sim.rng.below(6) as usize], 1 + sim.rng.below(4));
                open_requests.push(sim.request(console, migrate_request(tid, &format!("h{to}"))));
                migration_count += 1;
            }
            let delay = Micros(sim.rng.below(8_000));
            sim.advance(delay);
        }
        sim.run_until("all messages", |s| {
            assert_in_order(s, &procs) == message_count
        });
        sim.run_until("all moves", |s| {
            open_requests
                .iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        let migrated_count = open_requests
            .iter()
            .filter(|id| matches!(sim.procs[console].replies[id], Reply::Migrated(Ok(_))))
            .count();
        assert!(
            migrated_count > 0,
            "none of {migration_count} moves happened (seed {seed})"
        );
        migrated_total += migrated_count;
        assert!(
            sim.opened_lane_count() > 0,
            "all went down one stream (seed {seed})"
        );
        sim.advance(Micros::from_secs(1));
        let Reply::Tasks(tasks) = sim.ask(
            console,
            Request::Tasks {
                selector: Tid::NONE,
            },
        ) else {
            panic!("no list")
        };
        assert_eq!(tasks.len(), 7, "seed {seed}");
        for task in tasks.iter().filter(|t| tids.contains(&t.tid)) {
            assert_eq!(
                task.host,
                sim.procs[sim.proc_of(task.tid)].host,
                "seed {seed}"
            );
            assert!(!task.migrating);
            // The process that runs keeps the number that it had before all migrations.
            let proc = &sim.procs[sim.proc_of(task.tid)];
            assert_eq!(task.namespace_pid, proc.namespace_pid, "seed {seed}");
        }
    }
    assert!(migrated_total > 160, "only {migrated_total} moves happened");
}

fn notify_request(subjects: NotifySubjects, tag: i32) -> Request {
    Request::Notify(NotifyRequest {
        subjects,
        ctx: 0,
        tag,
        is_cancellation: false,
    })
}

fn mailbox_put_request() -> Request {
    let message = sempa_proto::Message {
        src: Tid::NONE,
        dst: Tid::NONE,
        ctx: 0,
        tag: 0,
        wid: 0,
        enc: 0,
        body: bytes::Bytes::from_static(b"here"),
    };
    Request::Mailbox(MailboxRequest::Put {
        name: "x".into(),
        flags: 0,
        message,
    })
}

/// Returns a request to remove the entry `x`. The request waits until the entry exists.
fn mailbox_take_request() -> Request {
    Request::Mailbox(MailboxRequest::Take {
        name: "x".into(),
        index: 0,
        flags: 32,
    })
}

/// Asserts that each notification of an exit (tag 1) follows the five messages of the ended task.
fn assert_messages_precede_exits(sim: &Sim, task_proc: usize, seed: u64) {
    for (src, position) in
        sim.procs[task_proc]
            .received
            .iter()
            .enumerate()
            .filter_map(|(position, s)| match s {
                Received::Notification(m) if m.tag == 1 => Some((
                    Tid::from_raw(i32::from_be_bytes(m.body[..4].try_into().ok()?)),
                    position,
                )),
                _ => None,
            })
    {
        let earlier_count = sim.procs[task_proc].received[..position]
            .iter()
            .filter(|s| matches!(s, Received::Message(t, _) if *t == src));
        assert_eq!(
            earlier_count.count(),
            5,
            "its last messages came first (seed {seed})"
        );
    }
}

/// Deletes the source host after the migration, and asserts that output, exit notification and
/// messages of the task arrive.
fn assert_delivery_without_source(sim: &mut Sim, console: usize, task_proc: usize) {
    let tid = sim.procs[task_proc].tid();
    assert_eq!(
        sim.ask(
            console,
            Request::DelHosts {
                host_names: vec!["h2".into()]
            }
        ),
        Reply::HostsDeleted(vec![Ok(())])
    );
    sim.send_message(console, tid, &0i32.to_be_bytes());
    sim.run_until("a message", |s| {
        matches!(
            s.procs[task_proc].received.last(),
            Some(Received::Message(..))
        )
    });
    sim.ask(
        console,
        notify_request(NotifySubjects::TaskExit(vec![tid]), 3),
    );
    sim.exit_proc(task_proc, 0);
    sim.run_until("its end", |s| {
        s.procs[console].notifications(3).len() == 1
            && s.procs[console].notifications(44).len() == 3
    });
}

/// Replies, notifications and output of a task arrive while the task migrates.
#[test]
fn replies_notifications_and_output_follow_task() {
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let output_sink = Sink {
            tid: sim.procs[console].tid(),
            ctx: 0,
            tag: 44,
        };
        let host_name = "h2".to_string();
        let task_proc = spawn(
            &mut sim,
            console,
            SpawnRequest {
                output_sink,
                where_arg: host_name,
                flags: 1,
                ..children_request(1)
            },
        )[0];
        let tid = sim.procs[task_proc].tid();
        let exiting_procs = spawn(&mut sim, console, children_request(2));
        let exiting_tids: Vec<Tid> = exiting_procs.iter().map(|p| sim.procs[*p].tid()).collect();
        sim.ask(
            task_proc,
            notify_request(NotifySubjects::TaskExit(exiting_tids.clone()), 1),
        );
        sim.ask(
            task_proc,
            notify_request(NotifySubjects::HostAdd { messages_max: -1 }, 2),
        );
        let mailbox_request = sim.request(task_proc, mailbox_take_request());
        sim.advance(Micros::from_millis(20));
        // The new host may join before, during or after the migration.
        let add_request = sim.request(
            console,
            Request::AddHosts {
                host_file_lines: vec!["h4".to_string()],
            },
        );
        let delay = Micros(sim.rng.below(330_000));
        sim.advance(delay);
        let migration_request = sim.request(console, migrate_request(tid, "t40000"));
        let delay = Micros(sim.rng.below(40_000));
        sim.advance(delay);
        // The tasks send their messages and exit at a random time of the migration.
        for (n, p) in exiting_procs.iter().enumerate() {
            for number in 0..5i32 {
                sim.send_message(*p, tid, &number.to_be_bytes());
            }
            sim.exit_proc(*p, n as i32);
        }
        sim.request(console, mailbox_put_request());
        sim.run_until("the move, the hosts", |s| {
            [migration_request, add_request]
                .iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        assert!(
            matches!(
                sim.procs[console].replies[&migration_request],
                Reply::Migrated(Ok(_))
            ),
            "seed {seed}"
        );
        sim.run_until("what was asked before", |s| {
            s.procs[task_proc].replies.contains_key(&mailbox_request)
        });
        sim.run_until("both ends", |s| {
            s.procs[task_proc].notifications(1).len() == 2
        });
        sim.run_until("the new host", |s| {
            s.procs[task_proc].notifications(2).len() == 1
        });
        sim.advance(Micros::from_secs(1));
        assert_eq!(
            (
                sim.procs[task_proc].notifications(1).len(),
                sim.procs[task_proc].notifications(2).len()
            ),
            (2, 1),
            "seed {seed}"
        );
        assert_messages_precede_exits(&sim, task_proc, seed);
        assert_delivery_without_source(&mut sim, console, task_proc);
    }
}

/// A task that cannot migrate is not migrated; the reply contains the reason.
#[test]
fn immovable_task_is_refused_with_reason() {
    let (mut sim, console) = Sim::cluster(2, 3);
    let request_on_h2 = |flags: i32| SpawnRequest {
        flags: flags | SPAWN_HOST,
        where_arg: "h2".into(),
        ..children_request(1)
    };
    let pinned_task = spawn(&mut sim, console, request_on_h2(SPAWN_PINNED))[0];
    let pinned_task = sim.procs[pinned_task].tid();
    let debugged_task = spawn(&mut sim, console, request_on_h2(SPAWN_DEBUG))[0];
    let debugged_task = sim.procs[debugged_task].tid();
    let console_tid = sim.procs[console].tid();
    let refusal_of = |sim: &mut Sim, tid: Tid, target_name: &str| match sim
        .ask(console, migrate_request(tid, target_name))
    {
        Reply::Migrated(Err(error)) => match (error.step, error.failure) {
            (Step::Inspect, Failure::Refused(why)) => why[0].clone(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal_of(&mut sim, console_tid, "h2"), Refusal::NotSpawned);
    assert_eq!(refusal_of(&mut sim, pinned_task, "h1"), Refusal::Pinned);
    assert_eq!(refusal_of(&mut sim, debugged_task, "h3"), Refusal::Debugged);
    assert_eq!(
        refusal_of(&mut sim, pinned_task, "h2"),
        Refusal::AlreadyThere
    );
    assert_eq!(refusal_of(&mut sim, pinned_task, "h7"), Refusal::NoSuchHost);
    assert_eq!(
        refusal_of(&mut sim, Tid::from_raw(0x40999), "h2"),
        Refusal::NoSuchTask
    );
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            events_max: 100,
        },
    ) else {
        panic!("no events")
    };
    assert_eq!(
        events
            .iter()
            .filter(|e| matches!(e.kind, EventKind::MigrationFailed { .. }))
            .count(),
        4
    );
}

/// If a host is lost during a migration, the task runs once or is reported dead.
#[test]
fn lost_host_during_migration_never_doubles_task() {
    let (mut migration_count, mut death_count, mut stay_count) = (0, 0, 0);
    for seed in seeds(400) {
        let (mut sim, console, task_proc, migration_request) = migrating_task(seed, 4, 60_000);
        let tid = sim.procs[task_proc].tid();
        let lost_host = host(2 + sim.rng.below(3) as u16);
        sim.kill_host(lost_host);
        let (tasks, exit_count, has_migrated) =
            await_migration(&mut sim, console, tid, migration_request);
        assert_eq!(
            tasks.len() + exit_count,
            1,
            "listed {tasks:?}, {exit_count} notes, moved {has_migrated}, lost {lost_host} (seed {seed})"
        );
        *if has_migrated && exit_count == 0 {
            &mut migration_count
        } else if exit_count > 0 {
            &mut death_count
        } else {
            &mut stay_count
        } += 1;
        if let Some(task) = tasks.first() {
            assert_ne!(task.host, lost_host);
            sim.send_message(console, tid, &0i32.to_be_bytes());
            sim.run_until("it answers", |s| s.procs[task_proc].received.len() == 1);
        }
    }
    assert!(
        migration_count > 20 && death_count > 20 && stay_count > 20,
        "{migration_count} moved, {death_count} died, {stay_count} stayed"
    );
}

/// If a tasker dies during a migration, the task runs once or is reported dead.
#[test]
fn tasker_death_during_migration_never_doubles_task() {
    let (mut migration_count, mut death_count, mut stay_count) = (0, 0, 0);
    for seed in seeds(300) {
        let (mut sim, console, task_proc, migration_request) = migrating_task(seed, 3, 40_000);
        let tid = sim.procs[task_proc].tid();
        let victim = host(2 + sim.rng.below(2) as u16);
        sim.kill_tasker(victim);
        let (tasks, exit_count, has_migrated) =
            await_migration(&mut sim, console, tid, migration_request);
        assert_eq!(
            tasks.len() + exit_count,
            1,
            "listed {tasks:?}, {exit_count} notes, moved {has_migrated}, lost {victim} (seed {seed})"
        );
        if exit_count > 0 {
            death_count += 1;
        } else {
            *if has_migrated {
                &mut migration_count
            } else {
                &mut stay_count
            } += 1;
            sim.send_message(console, tid, &0i32.to_be_bytes());
            sim.run_until("it answers", |s| s.procs[task_proc].received.len() == 1);
        }
    }
    assert!(
        migration_count > 10 && death_count > 20 && stay_count > 10,
        "{migration_count} moved, {death_count} died, {stay_count} stayed"
    );
}

#[test]
fn killed_task_during_migration_ends_once() {
    let mut migration_count = 0;
    for seed in seeds(200) {
        let (mut sim, console, task_proc, migration_request) = migrating_task(seed, 3, 40_000);
        let tid = sim.procs[task_proc].tid();
        assert_eq!(
            sim.ask(console, Request::Signal { tid, signal: 15 }),
            Reply::Done
        );
        sim.run_until("the end of the move", |s| {
            s.procs[console].replies.contains_key(&migration_request)
        });
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        sim.advance(Micros::from_secs(5));
        assert_eq!(sim.procs[console].notifications(1).len(), 1, "seed {seed}");
        migration_count += usize::from(matches!(
            sim.procs[console].replies[&migration_request],
            Reply::Migrated(Ok(_))
        ));
    }
    assert!(
        migration_count > 20,
        "{migration_count} moves came to their end"
    );
}

/// A task that exits in an orderly way reports its watermarks. Watchers are notified when they have
/// the messages up to the watermarks, or after a timeout.
#[test]
fn exit_watermarks_delay_notification() {
    let (mut sim, console) = Sim::cluster(3, 2);
    let watcher = sim.enrol(host(2));
    let exiting_proc = sim.enrol(HostId::MASTER);
    let tid = sim.procs[exiting_proc].tid();
    let subjects = NotifySubjects::TaskExit(vec![tid]);
    sim.ask(
        watcher,
        Request::Notify(NotifyRequest {
            subjects,
            ctx: 0,
            tag: 1,
            is_cancellation: false,
        }),
    );
    let watermarks = vec![SendWatermark {
        peer: sim.procs[watcher].tid(),
        end_seq: 5,
    }];
    sim.ask(exiting_proc, Request::Exit { watermarks });
    sim.advance(Micros::from_secs(5));
    assert!(
        sim.procs[watcher].notifications(1).is_empty(),
        "what it sent is not here yet"
    );
    // The announced messages never arrive, so the watcher is notified after the timeout.
    sim.run_until("the note", |s| s.procs[watcher].notifications(1).len() == 1);
    let _ = console;
}

/// If the session of source and target breaks during a migration, the task is not lost and can
/// migrate again.
#[test]
fn broken_session_does_not_strand_task() {
    let mut migration_count = 0;
    for seed in seeds(200) {
        let (mut sim, console, task_proc, migration_request) = migrating_task(seed, 4, 12_000);
        let tid = sim.procs[task_proc].tid();
        sim.send_message(console, tid, &0u32.to_be_bytes());
        let outage = Micros(1_000 + sim.rng.below(400_000));
        // With every third seed, the session of h2 and h4 breaks instead of the session of source
        // and target.
        let peer_host = if seed % 3 == 0 { 4 } else { 3 };
        sim.separate_hosts(host(2), host(peer_host), outage);
        sim.send_message(console, tid, &1u32.to_be_bytes());
        let (tasks, exit_count, has_migrated) =
            await_migration(&mut sim, console, tid, migration_request);
        assert_eq!((tasks.len(), exit_count), (1, 0), "seed {seed}");
        assert!(
            !tasks[0].migrating,
            "it has not arrived (seed {seed}): {tasks:?}"
        );
        assert_eq!(assert_in_order(&sim, &[task_proc]), 2, "seed {seed}");
        migration_count += usize::from(has_migrated);
        let second_reply = sim.ask(console, migrate_request(tid, "h4"));
        assert!(
            matches!(second_reply, Reply::Migrated(Ok(_))),
            "seed {seed}: {second_reply:?}"
        );
    }
    assert!(migration_count > 100, "{migration_count} moves");
}

/// A migration fails immediately if the target's tasker dies before it has sent its verdict.
#[test]
fn tasker_death_at_target_fails_migration_at_once() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let task_proc = spawn(
            &mut sim,
            console,
            SpawnRequest {
                where_arg: "h2".into(),
                flags: 1,
                ..children_request(1)
            },
        )[0];
        let tid = sim.procs[task_proc].tid();
        sim.nodes
            .get_mut(&host(3))
            .expect("in the table")
            .is_tasker_dead = true;
        let (start_time, migration_request) =
            (sim.now, sim.request(console, migrate_request(tid, "h3")));
        sim.advance(Micros::from_millis(100));
        assert!(
            !sim.procs[console].replies.contains_key(&migration_request),
            "nobody has judged it (seed {seed})"
        );
        let (now, why) = (sim.now, "killed by signal 9".to_string());
        sim.schedule_event(now, Event::TaskerEnded { why }, host(3));
        sim.run_until("the end of the move", |s| {
            s.procs[console].replies.contains_key(&migration_request)
        });
        let Reply::Migrated(Err(why)) = &sim.procs[console].replies[&migration_request] else {
            panic!("it moved (seed {seed})")
        };
        assert!(
            why.to_string()
                .contains("its tasker has ended: killed by signal 9"),
            "{why} (seed {seed})"
        );
        assert!(
            sim.now.since(start_time) < Micros::from_secs(1),
            "not by its deadline (seed {seed})"
        );
    }
}
