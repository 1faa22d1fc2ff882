//! Migrations of tasks whose programs are restarted at the target.

use super::scenario::stop_guests_request;
use super::sim::{Received, Sim, host, seeds};
use crate::HostId;
use sempa_proto::checkpoint::CheckpointFailure;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request, SpawnRequest};
use sempa_proto::{Micros, PvmError, RequestId, Tid};

pub(super) const OWN_ENGINE: Engine = Engine::SelfCheckpoint {
    ask_method: AskMethod::Signal(10),
    exit_status: 85,
    timeout_s: 3,
};

pub(super) fn spawn_request(program: &str, engine: &str, host_name: &str) -> SpawnRequest {
    let env = vec![
        format!("SEMPA_ENGINE={engine}").into_bytes(),
        b"COLOUR=blue".to_vec(),
    ];
    SpawnRequest {
        program: program.into(),
        args: vec![b"7".to_vec()],
        env,
        where_arg: host_name.into(),
        flags: 1,
        task_count: 1,
        ..SpawnRequest::default()
    }
}

/// Spawns one task and waits until it has enrolled.
pub(super) fn spawn(sim: &mut Sim, console: usize, request: SpawnRequest) -> Tid {
    let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
        panic!("no task")
    };
    let tid = results[0].expect("started");
    sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
    tid
}

pub(super) fn request_exit_notification(sim: &mut Sim, console: usize, tid: Tid) {
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
}

pub(super) fn begin_migration(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    target_name: &str,
) -> RequestId {
    sim.request(
        console,
        Request::Migrate {
            tid,
            target: target_name.into(),
            cause: None,
            wait_for_end: true,
        },
    )
}

pub(super) fn await_migration(
    sim: &mut Sim,
    console: usize,
    migration_request: RequestId,
) -> Result<Engine, (Step, Failure)> {
    sim.run_until("the end of the move", |s| {
        s.procs[console].replies.contains_key(&migration_request)
    });
    match sim.procs[console].replies[&migration_request].clone() {
        Reply::Migrated(Ok(report)) => Ok(report.engine),
        Reply::Migrated(Err(error)) => Err((error.step, error.failure)),
        other => panic!("{other:?}"),
    }
}

pub(super) fn migrate(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    target_name: &str,
) -> Result<Engine, (Step, Failure)> {
    let migration_request = begin_migration(sim, console, tid, target_name);
    await_migration(sim, console, migration_request)
}

pub(super) fn list_task(sim: &mut Sim, console: usize, tid: Tid) -> Vec<TaskInfo> {
    match sim.ask(console, Request::Tasks { selector: tid }) {
        Reply::Tasks(tasks) => tasks,
        // The task was on a host that is lost.
        Reply::Failed {
            error: PvmError::NoHost,
            ..
        } => Vec::new(),
        other => panic!("no list: {other:?}"),
    }
}

/// Returns the numbers in the messages that a process has received.
pub(super) fn received_numbers(sim: &Sim, proc: usize) -> Vec<i32> {
    let number = |item: &Received| match item {
        Received::Message(_, body) => Some(i32::from_be_bytes(
            body[..4].try_into().expect("four bytes"),
        )),
        Received::Notification(_) => None,
    };
    sim.procs[proc].received.iter().filter_map(number).collect()
}

/// Asserts that the newest process of the task receives a message from the console.
pub(super) fn assert_reachable(sim: &mut Sim, console: usize, tid: Tid) {
    sim.run_until("it is connected", |s| {
        s.procs[s.proc_of(tid)].welcome.is_some()
    });
    let proc = sim.proc_of(tid);
    let message_count = received_numbers(sim, proc).len();
    sim.send_message(console, tid, &4711i32.to_be_bytes());
    sim.run_until("it hears", |s| {
        received_numbers(s, proc).len() > message_count
    });
    assert_eq!(
        received_numbers(sim, proc).last(),
        Some(&4711),
        "seed {}",
        sim.seed
    );
}

/// A program that is restarted on another host keeps its tid, arguments and environment. It
/// receives the messages that were sent during the restart.
#[test]
fn restarted_program_keeps_tid_env_and_messages() {
    for (engine, expected_engine) in [
        ("own:wait=3", OWN_ENGINE),
        ("restart", Engine::Restart { timeout_s: 5 }),
    ] {
        for seed in seeds(60) {
            let (mut sim, console) = Sim::cluster(seed, 3);
            let tid = spawn(&mut sim, console, spawn_request("child", engine, "h2"));
            request_exit_notification(&mut sim, console, tid);
            let old_proc = sim.proc_of(tid);
            let (first_number, count) = (sim.rng.below(5) as i32, 25);
            (0..first_number).for_each(|n| sim.send_message(console, tid, &n.to_be_bytes()));
            sim.run_until("what came before", |s| {
                received_numbers(s, old_proc).len() == first_number as usize
            });
            sim.advance(Micros::from_millis(30));
            let migration_request = begin_migration(&mut sim, console, tid, "h3");
            for n in first_number..first_number + count {
                let delay = Micros(sim.rng.below(4_000));
                sim.advance(delay);
                sim.send_message(console, tid, &n.to_be_bytes());
            }
            assert_eq!(
                await_migration(&mut sim, console, migration_request),
                Ok(expected_engine),
                "seed {seed}"
            );
            let new_proc = sim.proc_of(tid);
            assert_ne!(old_proc, new_proc);
            sim.run_until("all of it", |s| {
                received_numbers(s, new_proc).last() == Some(&(first_number + count - 1))
            });
            // The new process receives the messages that the old process has not received, once and
            // in order.
            let (old_numbers, new_numbers) = (
                received_numbers(&sim, old_proc),
                received_numbers(&sim, new_proc),
            );
            let all_numbers = old_numbers
                .into_iter()
                .chain(new_numbers)
                .collect::<Vec<i32>>();
            assert_eq!(
                all_numbers,
                (0..first_number + count).collect::<Vec<i32>>(),
                "seed {seed}"
            );
            let p = &sim.procs[new_proc];
            assert_eq!((p.tid(), p.host), (tid, host(3)));
            // The new process has reported a process id of its own.
            let (new_pid, listed_task) = (p.namespace_pid, list_task(&mut sim, console, tid));
            assert_eq!(listed_task[0].namespace_pid, new_pid, "seed {seed}");
            let p = &sim.procs[new_proc];
            assert!(
                p.env.contains(&"SEMPA_AGAIN=1".into()) && p.env.contains(&"COLOUR=blue".into()),
                "{:?}",
                p.env
            );
            assert_eq!(
                (
                    sim.procs[console].notifications(1).len(),
                    list_task(&mut sim, console, tid).len()
                ),
                (0, 1)
            );
            // The task migrates back to h2, so it is restarted a second time.
            assert_eq!(migrate(&mut sim, console, tid, "h2"), Ok(expected_engine));
            assert_reachable(&mut sim, console, tid);
            assert!(
                sim.procs[sim.proc_of(tid)]
                    .env
                    .contains(&"SEMPA_AGAIN=2".into())
            );
        }
    }
}

/// Messages of the old process arrive before messages of the new process, whatever their delays
/// are.
#[test]
fn old_process_messages_arrive_before_new_ones() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        let (old_proc, receiver_tid) = (sim.proc_of(tid), sim.procs[console].tid());
        // The console must accept the task's first incarnation before the restart.
        sim.send_message(old_proc, receiver_tid, &0i32.to_be_bytes());
        sim.run_until("a first word", |s| received_numbers(s, console).len() == 1);
        (1..10i32).for_each(|n| sim.send_message(old_proc, receiver_tid, &n.to_be_bytes()));
        sim.delay_data(host(2), HostId::MASTER, Micros::from_millis(400));
        assert_eq!(migrate(&mut sim, console, tid, "h3"), Ok(OWN_ENGINE));
        sim.run_until("it is back", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        let new_proc = sim.proc_of(tid);
        (10..20i32).for_each(|n| sim.send_message(new_proc, receiver_tid, &n.to_be_bytes()));
        sim.run_until("all", |s| received_numbers(s, console).len() >= 20);
        assert_eq!(
            received_numbers(&sim, console),
            (0..20).collect::<Vec<i32>>(),
            "seed {seed}"
        );
    }
}

/// The new process receives no replies to requests of the old process.
#[test]
fn new_process_gets_no_replies_to_old_requests() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        let old_proc = sim.proc_of(tid);
        let old_request = sim.request(
            old_proc,
            Request::AddHosts {
                host_file_lines: vec!["h4".into()],
            },
        );
        let delay = Micros(sim.rng.below(40_000));
        sim.advance(delay);
        assert_eq!(migrate(&mut sim, console, tid, "h3"), Ok(OWN_ENGINE));
        assert_reachable(&mut sim, console, tid);
        let new_proc = sim.proc_of(tid);
        assert!(
            matches!(
                sim.ask(new_proc, Request::Tasks { selector: tid }),
                Reply::Tasks(_)
            ),
            "seed {seed}"
        );
        sim.advance(Micros::from_secs(2));
        let only_old_replies = sim.procs[new_proc]
            .replies
            .keys()
            .all(|id| *id == old_request);
        assert!(
            only_old_replies,
            "{:?} (seed {seed})",
            sim.procs[new_proc].replies
        );
    }
}

/// A program that does not exit within its timeout continues. If it later exits with the agreed
/// status, it is restarted at the source.
#[test]
fn late_exit_restarts_program_at_source() {
    let (mut sim, console) = Sim::cluster(5, 3);
    let tid = spawn(&mut sim, console, spawn_request("deaf", "own:wait=3", "h2"));
    request_exit_notification(&mut sim, console, tid);
    let Err((Step::Quiesce, Failure::Engine(why))) = migrate(&mut sim, console, tid, "h3") else {
        panic!("it moved")
    };
    assert!(
        why.contains("asked by signal 10") && why.contains("within 3 s"),
        "{why}"
    );
    let old_proc = sim.proc_of(tid);
    assert_eq!(sim.exit_ignoring_procs, [old_proc]);
    assert_reachable(&mut sim, console, tid);
    sim.exit_gracefully(old_proc, 85 << 8);
    sim.run_until("it is back", |s| {
        s.proc_of(tid) != old_proc && s.procs[s.proc_of(tid)].conn.is_some()
    });
    assert_reachable(&mut sim, console, tid);
    assert_eq!(
        (
            sim.procs[sim.proc_of(tid)].host,
            sim.procs[console].notifications(1).len()
        ),
        (host(2), 0)
    );
    // The program has exited because of the request, so its next exit ends the task.
    let new_proc = sim.proc_of(tid);
    sim.exit_proc(new_proc, 85 << 8);
    sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
}

/// A program is not checkpointed while it may still exit because of an earlier request.
#[test]
fn program_with_open_exit_request_is_not_checkpointed() {
    let (mut sim, console) = Sim::cluster(5, 3);
    let tid = spawn(&mut sim, console, spawn_request("deaf", "own:wait=3", "h2"));
    assert!(
        migrate(&mut sim, console, tid, "h3").is_err(),
        "it does not end"
    );
    let reply = sim.ask(
        console,
        Request::Checkpoint {
            job: tid,
            schedule: None,
            end_job: false,
            wait_for_end: true,
        },
    );
    let expected_failure = Failure::Refused(vec![Refusal::SelfCheckpointPending]);
    let Reply::Checkpointed(Err(CheckpointFailure::Task {
        tid: failed_tid,
        failure: reported_failure,
        ..
    })) = reply
    else {
        panic!("{reply:?}")
    };
    assert_eq!((failed_tid, reported_failure), (tid, expected_failure));
    assert_reachable(&mut sim, console, tid);
}

/// If a program exits with another status than the agreed one, the task has ended.
#[test]
fn unagreed_exit_status_ends_task() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, spawn_request("done", "own:wait=3", "h2"));
        request_exit_notification(&mut sim, console, tid);
        assert_eq!(
            migrate(&mut sim, console, tid, "h3"),
            Err((Step::Quiesce, Failure::TaskEnded))
        );
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        assert_eq!(list_task(&mut sim, console, tid), []);
    }
}

/// The first engine that both hosts support is chosen. A placement query names the same engine.
#[test]
fn first_engine_usable_by_both_hosts_is_chosen() {
    let (mut sim, console) = Sim::cluster(7, 3);
    let no_engine = vec![Refusal::NoEngine {
        host: host(3),
        why: "none".into(),
    }];
    sim.verdicts.insert(host(3), no_engine);
    let restart_only_engine = Engine::Restart { timeout_s: 5 };
    for (engine_list, expected_engine) in [
        ("criu,own:wait=3", OWN_ENGINE),
        ("own:wait=3,criu", OWN_ENGINE),
        ("restart", restart_only_engine),
        ("criu,restart,own", restart_only_engine),
    ] {
        let tid = spawn(&mut sim, console, spawn_request("child", engine_list, "h2"));
        let Reply::MigrationTargets(Ok(targets)) = sim.ask(
            console,
            Request::FindMigrationTargets {
                tid,
                target: Some("h3".into()),
            },
        ) else {
            panic!("no survey")
        };
        assert_eq!(
            (
                targets.verdicts.len(),
                targets.nearest_host(),
                targets.engine(host(3))
            ),
            (1, Some(host(3)), expected_engine),
            "{engine_list}"
        );
        assert_eq!(
            migrate(&mut sim, console, tid, "h3"),
            Ok(expected_engine),
            "{engine_list}"
        );
    }
    let tid = spawn(&mut sim, console, spawn_request("child", "criu,own", "h2"));
    assert_eq!(
        migrate(&mut sim, console, tid, "h1"),
        Ok(Engine::Criu),
        "both can"
    );
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            events_max: 1000,
        },
    ) else {
        panic!("no events")
    };
    let engine_events = events
        .iter()
        .filter(|e| matches!(e.kind, EventKind::MigrationEngine { .. }))
        .count();
    assert_eq!(engine_events, 4, "by CRIU nothing is said");
}

/// A guest that is paused for an owner can migrate by its own checkpoint.
#[test]
fn paused_guest_leaves_by_own_checkpoint() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        let owner_agent = sim.enrol(host(2));
        sim.ask(owner_agent, stop_guests_request());
        let delay = Micros(sim.rng.below(60_000));
        sim.advance(delay);
        let old_proc = sim.proc_of(tid);
        (0..5i32).for_each(|n| sim.send_message(console, tid, &n.to_be_bytes()));
        assert_eq!(
            migrate(&mut sim, console, tid, "h3"),
            Ok(OWN_ENGINE),
            "seed {seed}"
        );
        let new_proc = sim.proc_of(tid);
        sim.run_until("all of it", |s| {
            received_numbers(s, old_proc).len() + received_numbers(s, new_proc).len() >= 5
        });
        let all_numbers: Vec<i32> = received_numbers(&sim, old_proc)
            .into_iter()
            .chain(received_numbers(&sim, new_proc))
            .collect();
        assert_eq!(all_numbers, (0..5).collect::<Vec<i32>>(), "seed {seed}");
        assert_reachable(&mut sim, console, tid);
        assert_eq!(sim.procs[new_proc].host, host(3));
    }
}

/// A suspended task cannot write its own checkpoint. A suspended task that is restarted on another
/// host stays suspended.
#[test]
fn suspended_task_is_restarted_suspended() {
    for seed in seeds(30) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let own_engine_tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        let restart_tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own,restart", "h2"),
        );
        for tid in [own_engine_tid, restart_tid] {
            assert_eq!(
                sim.ask(
                    console,
                    Request::Suspend {
                        tid,
                        suspend: true,
                        cause: None
                    }
                ),
                Reply::Done
            );
        }
        sim.advance(Micros::from_secs(1));
        let expected_refusal = Err((Step::Inspect, Failure::Refused(vec![Refusal::Suspended])));
        assert_eq!(
            migrate(&mut sim, console, own_engine_tid, "h3"),
            expected_refusal
        );
        assert_eq!(
            migrate(&mut sim, console, restart_tid, "h3"),
            Ok(Engine::Restart { timeout_s: 5 })
        );
        sim.advance(Micros::from_secs(5));
        let tasks = list_task(&mut sim, console, restart_tid);
        assert!(tasks[0].suspended && tasks[0].host == host(3), "{tasks:?}");
        assert!(
            sim.procs[sim.proc_of(restart_tid)].conn.is_none(),
            "it has not run (seed {seed})"
        );
        sim.ask(
            console,
            Request::Suspend {
                tid: restart_tid,
                suspend: false,
                cause: None,
            },
        );
        assert_reachable(&mut sim, console, restart_tid);
    }
}

#[test]
fn invalid_engine_list_fails_spawn() {
    let (mut sim, console) = Sim::cluster(8, 2);
    let invalid_request = spawn_request("child", "own:exit=300", "h2");
    let Reply::Failed {
        error: PvmError::BadParam,
        reason,
    } = sim.ask(console, Request::Spawn(invalid_request))
    else {
        panic!("it began")
    };
    assert!(
        reason.contains("\"own:exit=300\" is not understood"),
        "{reason}"
    );
}

/// The value of [`outcome_index`] for a dead task.
const DEAD_OUTCOME: usize = 2;

/// Returns 0 if the task has migrated, 1 if it has stayed at the source, and [`DEAD_OUTCOME`] if it
/// is dead. `has_migrated` is the result of the migration. Asserts that the task exists at most
/// once, and that a live task receives messages.
fn outcome_index(sim: &mut Sim, console: usize, tid: Tid, has_migrated: bool) -> usize {
    let (tasks, exit_count) = (
        list_task(sim, console, tid),
        sim.procs[console].notifications(1).len(),
    );
    assert_eq!(
        tasks.len() + exit_count,
        1,
        "listed {tasks:?}, {exit_count} notes, moved {has_migrated} (seed {})",
        sim.seed
    );
    if exit_count > 0 {
        return DEAD_OUTCOME;
    }
    assert_reachable(sim, console, tid);
    usize::from(!has_migrated)
}

/// If a host is lost during a restart, the task runs once or is reported dead.
#[test]
fn lost_host_during_restart_never_doubles_task() {
    let mut outcome_counts = [0; 3];
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        request_exit_notification(&mut sim, console, tid);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(40_000));
        sim.advance(delay);
        let lost_host = host(2 + sim.rng.below(3) as u16);
        sim.kill_host(lost_host);
        let has_migrated = await_migration(&mut sim, console, migration_request).is_ok();
        sim.advance(Micros::from_secs(10));
        let index = outcome_index(&mut sim, console, tid, has_migrated);
        outcome_counts[index] += 1;
        if index != DEAD_OUTCOME {
            assert_ne!(list_task(&mut sim, console, tid)[0].host, lost_host);
        }
    }
    assert!(
        outcome_counts.iter().all(|count| *count > 20),
        "{outcome_counts:?} moved, stayed, died"
    );
}

/// If a tasker dies or a step fails during a restart, the task runs once or is reported dead.
#[test]
fn tasker_death_during_restart_never_doubles_task() {
    let mut outcome_counts = [0; 3];
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let engine = if seed % 3 == 0 {
            "restart:wait=3"
        } else {
            "own:wait=3"
        };
        let tid = spawn(&mut sim, console, spawn_request("child", engine, "h2"));
        request_exit_notification(&mut sim, console, tid);
        sim.random_faults.failed_steps_percent = if seed % 2 == 0 { 40 } else { 0 };
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(25_000));
        sim.advance(delay);
        if seed % 2 == 1 {
            let victim = host(2 + sim.rng.below(2) as u16);
            sim.kill_tasker(victim);
        }
        let has_migrated = await_migration(&mut sim, console, migration_request).is_ok();
        sim.advance(Micros::from_secs(10));
        outcome_counts[outcome_index(&mut sim, console, tid, has_migrated)] += 1;
    }
    assert!(
        outcome_counts.iter().all(|count| *count > 20),
        "{outcome_counts:?} moved, stayed, died"
    );
}

#[test]
fn killed_task_during_restart_ends_once() {
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        request_exit_notification(&mut sim, console, tid);
        let migration_request = begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(25_000));
        sim.advance(delay);
        sim.ask(console, Request::Signal { tid, signal: 9 });
        let _ = await_migration(&mut sim, console, migration_request);
        sim.advance(Micros::from_secs(5));
        if !list_task(&mut sim, console, tid).is_empty() {
            // The migration had ended before the signal was sent, so the signal may not have ended
            // the task. The signal is repeated.
            sim.ask(console, Request::Signal { tid, signal: 9 });
        }
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        sim.advance(Micros::from_secs(5));
        assert_eq!(
            (
                sim.procs[console].notifications(1).len(),
                list_task(&mut sim, console, tid).len()
            ),
            (1, 0),
            "seed {seed}"
        );
    }
}

/// The virtual machine halts although a task is being restarted.
#[test]
fn halt_completes_during_restart() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(
            &mut sim,
            console,
            spawn_request("child", "own:wait=3", "h2"),
        );
        begin_migration(&mut sim, console, tid, "h3");
        let delay = Micros(sim.rng.below(25_000));
        sim.advance(delay);
        let halt_time = sim.now;
        sim.request(console, Request::Halt);
        sim.run_until("all have ended", |s| {
            s.nodes.values().all(|node| !node.is_alive)
        });
        assert!(
            sim.now.since(halt_time) < Micros::from_secs(4),
            "seed {seed}"
        );
    }
}
