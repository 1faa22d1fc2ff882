//! Tasks migrate while they exchange messages.

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

fn migrate_request(tid: Tid, to: &str) -> Request {
    Request::Migrate {
        tid,
        to: to.into(),
        cause: None,
        wait: true,
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

fn children(count: u32) -> SpawnRequest {
    SpawnRequest {
        file: "child".into(),
        count,
        ..SpawnRequest::default()
    }
}

/// Begins to migrate a task from h2 to h3 and lets a random time pass, at most `max_micros`
/// microseconds. The console is notified of the task's exit with tag 1. Returns the simulation, the
/// processes of console and task, and the request.
fn migrating_task(seed: u64, hosts: usize, max_micros: u64) -> (Sim, usize, usize, RequestId) {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let task_proc = spawn(
        &mut sim,
        console,
        SpawnRequest {
            place: "h2".into(),
            flags: 1,
            ..children(1)
        },
    )[0];
    let tid = sim.procs[task_proc].tid();
    let what = NotifySubjects::TaskExit(vec![tid]);
    sim.ask(
        console,
        Request::Notify(NotifyRequest {
            subjects: what,
            ctx: 0,
            tag: 1,
            cancel: false,
        }),
    );
    let moving = sim.request(console, migrate_request(tid, "h3"));
    let wait = Micros(sim.rng.below(max_micros));
    sim.advance(wait);
    (sim, console, task_proc, moving)
}

/// Waits until a migration is over. Returns the task's list entries, the number of exit
/// notifications, and true if the task migrated.
fn await_migration(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    moving: RequestId,
) -> (Vec<TaskInfo>, usize, bool) {
    sim.run_until("the end of the move", |s| {
        s.procs[console].replies.contains_key(&moving)
    });
    sim.advance(Micros::from_secs(10));
    let list = match sim.ask(console, Request::Tasks { selector: tid }) {
        Reply::Tasks(list) => list,
        // The host is lost, and the task with it.
        Reply::Failed {
            error: PvmError::NoHost,
            ..
        } => Vec::new(),
        other => panic!("no list: {other:?}"),
    };
    let moved = matches!(sim.procs[console].replies[&moving], Reply::Migrated(Ok(_)));
    (list, sim.procs[console].notifications(1).len(), moved)
}

/// Asserts that the messages of every pair arrived once and in order. Returns their number.
fn assert_in_order(sim: &Sim, procs: &[usize]) -> usize {
    let mut total = 0;
    for p in procs {
        let mut next: BTreeMap<Tid, i32> = BTreeMap::new();
        for seen in &sim.procs[*p].received {
            if let Received::Message(src, body) = seen {
                let number = i32::from_be_bytes(body[..4].try_into().expect("four bytes"));
                let expected = next.entry(*src).or_default();
                assert_eq!(number, *expected, "from {src} (seed {})", sim.seed);
                *expected += 1;
                total += 1;
            }
        }
    }
    total
}

/// Tasks that migrate at random lose, repeat and reorder no messages.
#[test]
fn random_migrations_keep_message_order() {
    let mut all_done = 0;
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let procs = spawn(&mut sim, console, children(6));
        let tids: Vec<Tid> = procs.iter().map(|p| sim.procs[*p].tid()).collect();
        sim.random_faults.failed_steps_percent = if seed % 2 == 0 { 15 } else { 0 };
        let (mut sent, mut moves, mut open) = (0, 0, Vec::new());
        let mut numbers: BTreeMap<(usize, Tid), u32> = BTreeMap::new();
        for round in 0..400 {
            let (from, to) = (
                procs[sim.rng.below(6) as usize],
                tids[sim.rng.below(6) as usize],
            );
            if sim.procs[from].tid() != to {
                let number = numbers.entry((from, to)).or_default();
                let body = number.to_be_bytes();
                *number += 1;
                sent += 1;
                sim.send_message(from, to, &body);
            }
            if round % 10 == 0 {
                let (tid, to) = (tids[sim.rng.below(6) as usize], 1 + sim.rng.below(4));
                open.push(sim.request(console, migrate_request(tid, &format!("h{to}"))));
                moves += 1;
            }
            let wait = Micros(sim.rng.below(8_000));
            sim.advance(wait);
        }
        sim.run_until("all messages", |s| assert_in_order(s, &procs) == sent);
        sim.run_until("all moves", |s| {
            open.iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        let done = open
            .iter()
            .filter(|id| matches!(sim.procs[console].replies[id], Reply::Migrated(Ok(_))))
            .count();
        assert!(done > 0, "none of {moves} moves happened (seed {seed})");
        all_done += done;
        assert!(
            sim.lanes_opened() > 0,
            "all went down one stream (seed {seed})"
        );
        sim.advance(Micros::from_secs(1));
        let Reply::Tasks(list) = sim.ask(
            console,
            Request::Tasks {
                selector: Tid::NONE,
            },
        ) else {
            panic!("no list")
        };
        assert_eq!(list.len(), 7, "seed {seed}");
        for task in list.iter().filter(|t| tids.contains(&t.tid)) {
            assert_eq!(
                task.host,
                sim.procs[sim.proc_of(task.tid)].host,
                "seed {seed}"
            );
            assert!(!task.migrating);
        }
    }
    assert!(all_done > 160, "only {all_done} moves happened");
}

fn notify_request(subjects: NotifySubjects, tag: i32) -> Request {
    Request::Notify(NotifyRequest {
        subjects,
        ctx: 0,
        tag,
        cancel: false,
    })
}

fn put_in_mailbox() -> Request {
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

/// A request that waits until the entry exists.
fn take_from_mailbox() -> Request {
    Request::Mailbox(MailboxRequest::Take {
        name: "x".into(),
        index: 0,
        flags: 32,
    })
}

/// Each notification of an exit (tag 1) follows the five messages of the ended task.
fn assert_messages_precede_exits(sim: &Sim, mover: usize, seed: u64) {
    for (src, at) in sim.procs[mover]
        .received
        .iter()
        .enumerate()
        .filter_map(|(at, s)| match s {
            Received::Notification(m) if m.tag == 1 => Some((
                Tid::from_raw(i32::from_be_bytes(m.body[..4].try_into().ok()?)),
                at,
            )),
            _ => None,
        })
    {
        let before = sim.procs[mover].received[..at]
            .iter()
            .filter(|s| matches!(s, Received::Message(t, _) if *t == src));
        assert_eq!(
            before.count(),
            5,
            "its last messages came first (seed {seed})"
        );
    }
}

/// The source host can be deleted after the migration; output, exit and messages still arrive.
fn check_delivery_without_source(sim: &mut Sim, console: usize, mover: usize) {
    let tid = sim.procs[mover].tid();
    assert_eq!(
        sim.ask(
            console,
            Request::DelHosts {
                names: vec!["h2".into()]
            }
        ),
        Reply::HostsDeleted(vec![Ok(())])
    );
    sim.send_message(console, tid, &0i32.to_be_bytes());
    sim.run_until("a message", |s| {
        matches!(s.procs[mover].received.last(), Some(Received::Message(..)))
    });
    sim.ask(
        console,
        notify_request(NotifySubjects::TaskExit(vec![tid]), 3),
    );
    sim.exit(mover, 0);
    sim.run_until("its end", |s| {
        s.procs[console].notifications(3).len() == 1
            && s.procs[console].notifications(44).len() == 3
    });
}

/// Replies, notifications and output follow a task that migrates.
#[test]
fn replies_notifications_and_output_follow_task() {
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let output = Sink {
            tid: sim.procs[console].tid(),
            ctx: 0,
            tag: 44,
        };
        let place = "h2".to_string();
        let mover = spawn(
            &mut sim,
            console,
            SpawnRequest {
                output,
                place,
                flags: 1,
                ..children(1)
            },
        )[0];
        let tid = sim.procs[mover].tid();
        let dying = spawn(&mut sim, console, children(2));
        let dying_tids: Vec<Tid> = dying.iter().map(|p| sim.procs[*p].tid()).collect();
        sim.ask(
            mover,
            notify_request(NotifySubjects::TaskExit(dying_tids.clone()), 1),
        );
        sim.ask(
            mover,
            notify_request(NotifySubjects::HostAdd { count: -1 }, 2),
        );
        let open = sim.request(mover, take_from_mailbox());
        sim.advance(Micros::from_millis(20));
        // The new host may join before, during or after the migration.
        let adding = sim.request(
            console,
            Request::AddHosts {
                lines: vec!["h4".to_string()],
            },
        );
        let wait = Micros(sim.rng.below(330_000));
        sim.advance(wait);
        let moving = sim.request(console, migrate_request(tid, "t40000"));
        let wait = Micros(sim.rng.below(40_000));
        sim.advance(wait);
        // The following messages and exits happen at a random moment of the migration.
        for (n, p) in dying.iter().enumerate() {
            for k in 0..5i32 {
                sim.send_message(*p, tid, &k.to_be_bytes());
            }
            sim.exit(*p, n as i32);
        }
        sim.request(console, put_in_mailbox());
        sim.run_until("the move, the hosts", |s| {
            [moving, adding]
                .iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        assert!(
            matches!(sim.procs[console].replies[&moving], Reply::Migrated(Ok(_))),
            "seed {seed}"
        );
        sim.run_until("what was asked before", |s| {
            s.procs[mover].replies.contains_key(&open)
        });
        sim.run_until("both ends", |s| s.procs[mover].notifications(1).len() == 2);
        sim.run_until("the new host", |s| {
            s.procs[mover].notifications(2).len() == 1
        });
        sim.advance(Micros::from_secs(1));
        assert_eq!(
            (
                sim.procs[mover].notifications(1).len(),
                sim.procs[mover].notifications(2).len()
            ),
            (2, 1),
            "seed {seed}"
        );
        assert_messages_precede_exits(&sim, mover, seed);
        check_delivery_without_source(&mut sim, console, mover);
    }
}

/// The migration of a task that cannot migrate is refused with the reason.
#[test]
fn immovable_task_is_refused_with_reason() {
    let (mut sim, console) = Sim::cluster(2, 3);
    let on_h2 = |flags: i32| SpawnRequest {
        flags: flags | SPAWN_HOST,
        place: "h2".into(),
        ..children(1)
    };
    let pinned = spawn(&mut sim, console, on_h2(SPAWN_PINNED))[0];
    let pinned = sim.procs[pinned].tid();
    let debugged = spawn(&mut sim, console, on_h2(SPAWN_DEBUG))[0];
    let debugged = sim.procs[debugged].tid();
    let shell = sim.procs[console].tid();
    let refused =
        |sim: &mut Sim, tid: Tid, to: &str| match sim.ask(console, migrate_request(tid, to)) {
            Reply::Migrated(Err(error)) => match (error.step, error.why) {
                (Step::Inspect, Failure::Refused(why)) => why[0].clone(),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
    assert_eq!(refused(&mut sim, shell, "h2"), Refusal::NotSpawned);
    assert_eq!(refused(&mut sim, pinned, "h1"), Refusal::Pinned);
    assert_eq!(refused(&mut sim, debugged, "h3"), Refusal::Debugged);
    assert_eq!(refused(&mut sim, pinned, "h2"), Refusal::AlreadyThere);
    assert_eq!(refused(&mut sim, pinned, "h7"), Refusal::NoSuchHost);
    assert_eq!(
        refused(&mut sim, Tid::from_raw(0x40999), "h2"),
        Refusal::NoSuchTask
    );
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            limit: 100,
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

/// When a host is lost during a migration, the task runs once or is reported dead.
#[test]
fn lost_host_during_migration_never_doubles_task() {
    let (mut moves, mut deaths, mut stays) = (0, 0, 0);
    for seed in seeds(400) {
        let (mut sim, console, mover, moving) = migrating_task(seed, 4, 60_000);
        let tid = sim.procs[mover].tid();
        let lost = host(2 + sim.rng.below(3) as u16);
        sim.kill_host(lost);
        let (list, dead, moved) = await_migration(&mut sim, console, tid, moving);
        assert_eq!(
            list.len() + dead,
            1,
            "listed {list:?}, {dead} notes, moved {moved}, lost {lost} (seed {seed})"
        );
        *if moved && dead == 0 {
            &mut moves
        } else if dead > 0 {
            &mut deaths
        } else {
            &mut stays
        } += 1;
        if let Some(task) = list.first() {
            assert_ne!(task.host, lost);
            sim.send_message(console, tid, &0i32.to_be_bytes());
            sim.run_until("it answers", |s| s.procs[mover].received.len() == 1);
        }
    }
    assert!(
        moves > 20 && deaths > 20 && stays > 20,
        "{moves} moved, {deaths} died, {stays} stayed"
    );
}

/// When a tasker dies during a migration, the task runs once or is reported dead.
#[test]
fn tasker_death_during_migration_never_doubles_task() {
    let (mut moves, mut deaths, mut stays) = (0, 0, 0);
    for seed in seeds(300) {
        let (mut sim, console, mover, moving) = migrating_task(seed, 3, 40_000);
        let tid = sim.procs[mover].tid();
        let victim = host(2 + sim.rng.below(2) as u16);
        sim.kill_tasker(victim);
        let (list, dead, moved) = await_migration(&mut sim, console, tid, moving);
        assert_eq!(
            list.len() + dead,
            1,
            "listed {list:?}, {dead} notes, moved {moved}, lost {victim} (seed {seed})"
        );
        if dead > 0 {
            deaths += 1;
        } else {
            *if moved { &mut moves } else { &mut stays } += 1;
            sim.send_message(console, tid, &0i32.to_be_bytes());
            sim.run_until("it answers", |s| s.procs[mover].received.len() == 1);
        }
    }
    assert!(
        moves > 10 && deaths > 20 && stays > 10,
        "{moves} moved, {deaths} died, {stays} stayed"
    );
}

#[test]
fn killed_task_during_migration_ends_once() {
    let mut moves = 0;
    for seed in seeds(200) {
        let (mut sim, console, mover, moving) = migrating_task(seed, 3, 40_000);
        let tid = sim.procs[mover].tid();
        assert_eq!(
            sim.ask(console, Request::Signal { tid, signal: 15 }),
            Reply::Done
        );
        sim.run_until("the end of the move", |s| {
            s.procs[console].replies.contains_key(&moving)
        });
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        sim.advance(Micros::from_secs(5));
        assert_eq!(sim.procs[console].notifications(1).len(), 1, "seed {seed}");
        moves += usize::from(matches!(
            sim.procs[console].replies[&moving],
            Reply::Migrated(Ok(_))
        ));
    }
    assert!(moves > 20, "{moves} moves came to their end");
}

/// The watermarks of an orderly exit delay its notification until the messages have arrived.
#[test]
fn exit_watermarks_delay_notification() {
    let (mut sim, console) = Sim::cluster(3, 2);
    let watcher = sim.enrol(host(2));
    let leaver = sim.enrol(HostId::MASTER);
    let tid = sim.procs[leaver].tid();
    let what = NotifySubjects::TaskExit(vec![tid]);
    sim.ask(
        watcher,
        Request::Notify(NotifyRequest {
            subjects: what,
            ctx: 0,
            tag: 1,
            cancel: false,
        }),
    );
    let marks = vec![SendWatermark {
        peer: sim.procs[watcher].tid(),
        end_seq: 5,
    }];
    sim.ask(leaver, Request::Exit { watermarks: marks });
    sim.advance(Micros::from_secs(5));
    assert!(
        sim.procs[watcher].notifications(1).is_empty(),
        "what it sent is not here yet"
    );
    // The announced message never arrives; the watcher is notified after a timeout.
    sim.run_until("the note", |s| s.procs[watcher].notifications(1).len() == 1);
    let _ = console;
}

/// A task arrives although the session of source and target breaks during its migration.
#[test]
fn broken_session_does_not_strand_task() {
    let mut moves = 0;
    for seed in seeds(200) {
        let (mut sim, console, mover, moving) = migrating_task(seed, 4, 12_000);
        let tid = sim.procs[mover].tid();
        sim.send_message(console, tid, &0u32.to_be_bytes());
        let long = Micros(1_000 + sim.rng.below(400_000));
        // With every third seed, messages of another host are in flight to the source.
        let other = if seed % 3 == 0 { 4 } else { 3 };
        sim.separate(host(2), host(other), long);
        sim.send_message(console, tid, &1u32.to_be_bytes());
        let (list, told, moved) = await_migration(&mut sim, console, tid, moving);
        assert_eq!((list.len(), told), (1, 0), "seed {seed}");
        assert!(
            !list[0].migrating,
            "it has not arrived (seed {seed}): {list:?}"
        );
        assert_eq!(assert_in_order(&sim, &[mover]), 2, "seed {seed}");
        moves += usize::from(moved);
        let again = sim.ask(console, migrate_request(tid, "h4"));
        assert!(
            matches!(again, Reply::Migrated(Ok(_))),
            "seed {seed}: {again:?}"
        );
    }
    assert!(moves > 100, "{moves} moves");
}

/// A migration fails at once when the target's tasker dies before it has judged the task.
#[test]
fn tasker_death_at_target_fails_migration_at_once() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let mover = spawn(
            &mut sim,
            console,
            SpawnRequest {
                place: "h2".into(),
                flags: 1,
                ..children(1)
            },
        )[0];
        let tid = sim.procs[mover].tid();
        sim.nodes
            .get_mut(&host(3))
            .expect("in the table")
            .tasker_dead = true;
        let (begun, moving) = (sim.now, sim.request(console, migrate_request(tid, "h3")));
        sim.advance(Micros::from_millis(100));
        assert!(
            !sim.procs[console].replies.contains_key(&moving),
            "nobody has judged it (seed {seed})"
        );
        let (now, why) = (sim.now, "killed by signal 9".to_string());
        sim.schedule_event(now, Event::TaskerGone { why }, host(3));
        sim.run_until("the end of the move", |s| {
            s.procs[console].replies.contains_key(&moving)
        });
        let Reply::Migrated(Err(why)) = &sim.procs[console].replies[&moving] else {
            panic!("it moved (seed {seed})")
        };
        assert!(
            why.to_string()
                .contains("its tasker has ended: killed by signal 9"),
            "{why} (seed {seed})"
        );
        assert!(
            sim.now.since(begun) < Micros::from_secs(1),
            "not by its deadline (seed {seed})"
        );
    }
}
