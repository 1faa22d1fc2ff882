//! Tasks that migrate by restarting their programs at the target.

use super::scenario::stop_guests;
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

pub(super) fn request(program: &str, engine: &str, place: &str) -> SpawnRequest {
    let env = vec![
        format!("SEMPA_ENGINE={engine}").into_bytes(),
        b"COLOUR=blue".to_vec(),
    ];
    SpawnRequest {
        file: program.into(),
        args: vec![b"7".to_vec()],
        env,
        place: place.into(),
        flags: 1,
        count: 1,
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

pub(super) fn notify_exit(sim: &mut Sim, console: usize, tid: Tid) {
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
}

pub(super) fn begin_migration(sim: &mut Sim, console: usize, tid: Tid, to: &str) -> RequestId {
    sim.request(
        console,
        Request::Migrate {
            tid,
            to: to.into(),
            cause: None,
            wait: true,
        },
    )
}

pub(super) fn await_migration(
    sim: &mut Sim,
    console: usize,
    moving: RequestId,
) -> Result<Engine, (Step, Failure)> {
    sim.run_until("the end of the move", |s| {
        s.procs[console].replies.contains_key(&moving)
    });
    match sim.procs[console].replies[&moving].clone() {
        Reply::Migrated(Ok(report)) => Ok(report.engine),
        Reply::Migrated(Err(error)) => Err((error.step, error.why)),
        other => panic!("{other:?}"),
    }
}

pub(super) fn migrate(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    to: &str,
) -> Result<Engine, (Step, Failure)> {
    let moving = begin_migration(sim, console, tid, to);
    await_migration(sim, console, moving)
}

pub(super) fn list_task(sim: &mut Sim, console: usize, tid: Tid) -> Vec<TaskInfo> {
    match sim.ask(console, Request::Tasks { selector: tid }) {
        Reply::Tasks(list) => list,
        // The host is lost, and the task with it.
        Reply::Failed {
            error: PvmError::NoHost,
            ..
        } => Vec::new(),
        other => panic!("no list: {other:?}"),
    }
}

/// Returns the numbers in the messages that a process has received.
pub(super) fn received_numbers(sim: &Sim, proc: usize) -> Vec<i32> {
    let number = |seen: &Received| match seen {
        Received::Message(_, body) => Some(i32::from_be_bytes(
            body[..4].try_into().expect("four bytes"),
        )),
        Received::Notification(_) => None,
    };
    sim.procs[proc].received.iter().filter_map(number).collect()
}

/// Asserts that the newest process of the task receives a message.
pub(super) fn assert_reachable(sim: &mut Sim, console: usize, tid: Tid) {
    sim.run_until("it is connected", |s| {
        s.procs[s.proc_of(tid)].welcome.is_some()
    });
    let proc = sim.proc_of(tid);
    let before = received_numbers(sim, proc).len();
    sim.send_message(console, tid, &4711i32.to_be_bytes());
    sim.run_until("it hears", |s| received_numbers(s, proc).len() > before);
    assert_eq!(
        received_numbers(sim, proc).last(),
        Some(&4711),
        "seed {}",
        sim.seed
    );
}

/// A program that is restarted on another host has its tid, arguments and environment, and the
/// messages sent meanwhile.
#[test]
fn restarted_program_keeps_tid_env_and_messages() {
    for (engine, by) in [
        ("own:wait=3", OWN_ENGINE),
        ("restart", Engine::Restart { timeout_s: 5 }),
    ] {
        for seed in seeds(60) {
            let (mut sim, console) = Sim::cluster(seed, 3);
            let tid = spawn(&mut sim, console, request("child", engine, "h2"));
            notify_exit(&mut sim, console, tid);
            let old = sim.proc_of(tid);
            let (first, count) = (sim.rng.below(5) as i32, 25);
            (0..first).for_each(|n| sim.send_message(console, tid, &n.to_be_bytes()));
            sim.run_until("what came before", |s| {
                received_numbers(s, old).len() == first as usize
            });
            sim.advance(Micros::from_millis(30));
            let moving = begin_migration(&mut sim, console, tid, "h3");
            for n in first..first + count {
                let wait = Micros(sim.rng.below(4_000));
                sim.advance(wait);
                sim.send_message(console, tid, &n.to_be_bytes());
            }
            assert_eq!(
                await_migration(&mut sim, console, moving),
                Ok(by),
                "seed {seed}"
            );
            let new = sim.proc_of(tid);
            assert_ne!(old, new);
            sim.run_until("all of it", |s| {
                received_numbers(s, new).last() == Some(&(first + count - 1))
            });
            // The new process receives the messages that the old process had not received, once and
            // in order.
            let (had, has) = (received_numbers(&sim, old), received_numbers(&sim, new));
            let both = had.into_iter().chain(has).collect::<Vec<i32>>();
            assert_eq!(
                both,
                (0..first + count).collect::<Vec<i32>>(),
                "seed {seed}"
            );
            let p = &sim.procs[new];
            assert_eq!((p.tid(), p.host), (tid, host(3)));
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
            // The task migrates back and is restarted once more.
            assert_eq!(migrate(&mut sim, console, tid, "h2"), Ok(by));
            assert_reachable(&mut sim, console, tid);
            assert!(
                sim.procs[sim.proc_of(tid)]
                    .env
                    .contains(&"SEMPA_AGAIN=2".into())
            );
        }
    }
}

/// Messages of the old process arrive before those of the new one, however long they are in flight.
#[test]
fn old_process_messages_arrive_before_new_ones() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        let (old, to) = (sim.proc_of(tid), sim.procs[console].tid());
        // The console must know the task's first incarnation.
        sim.send_message(old, to, &0i32.to_be_bytes());
        sim.run_until("a first word", |s| received_numbers(s, console).len() == 1);
        (1..10i32).for_each(|n| sim.send_message(old, to, &n.to_be_bytes()));
        sim.delay_data(host(2), HostId::MASTER, Micros::from_millis(400));
        assert_eq!(migrate(&mut sim, console, tid, "h3"), Ok(OWN_ENGINE));
        sim.run_until("it is back", |s| s.procs[s.proc_of(tid)].welcome.is_some());
        let new = sim.proc_of(tid);
        (10..20i32).for_each(|n| sim.send_message(new, to, &n.to_be_bytes()));
        sim.run_until("all", |s| received_numbers(s, console).len() >= 20);
        assert_eq!(
            received_numbers(&sim, console),
            (0..20).collect::<Vec<i32>>(),
            "seed {seed}"
        );
    }
}

/// Replies to requests of the old process do not affect the new one.
#[test]
fn new_process_gets_no_replies_to_old_requests() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        let old = sim.proc_of(tid);
        let open = sim.request(
            old,
            Request::AddHosts {
                lines: vec!["h4".into()],
            },
        );
        let wait = Micros(sim.rng.below(40_000));
        sim.advance(wait);
        assert_eq!(migrate(&mut sim, console, tid, "h3"), Ok(OWN_ENGINE));
        assert_reachable(&mut sim, console, tid);
        let new = sim.proc_of(tid);
        assert!(
            matches!(
                sim.ask(new, Request::Tasks { selector: tid }),
                Reply::Tasks(_)
            ),
            "seed {seed}"
        );
        sim.advance(Micros::from_secs(2));
        let late = sim.procs[new].replies.keys().all(|id| *id == open);
        assert!(late, "{:?} (seed {seed})", sim.procs[new].replies);
    }
}

/// A program that does not exit within its timeout continues; if it exits later as requested, it is
/// restarted at the source.
#[test]
fn late_exit_restarts_program_at_source() {
    let (mut sim, console) = Sim::cluster(5, 3);
    let tid = spawn(&mut sim, console, request("deaf", "own:wait=3", "h2"));
    notify_exit(&mut sim, console, tid);
    let Err((Step::Quiesce, Failure::Engine(why))) = migrate(&mut sim, console, tid, "h3") else {
        panic!("it moved")
    };
    assert!(
        why.contains("asked by signal 10") && why.contains("within 3 s"),
        "{why}"
    );
    let old = sim.proc_of(tid);
    assert_eq!(sim.exit_ignored_by, [old]);
    assert_reachable(&mut sim, console, tid);
    sim.exit_gracefully(old, 85 << 8);
    sim.run_until("it is back", |s| {
        s.proc_of(tid) != old && s.procs[s.proc_of(tid)].conn.is_some()
    });
    assert_reachable(&mut sim, console, tid);
    assert_eq!(
        (
            sim.procs[sim.proc_of(tid)].host,
            sim.procs[console].notifications(1).len()
        ),
        (host(2), 0)
    );
    // The request to exit is fulfilled: the next exit ends the task.
    let again = sim.proc_of(tid);
    sim.exit(again, 85 << 8);
    sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
}

/// A program that may still exit because of an earlier request is not checkpointed.
#[test]
fn program_with_open_exit_request_is_not_checkpointed() {
    let (mut sim, console) = Sim::cluster(5, 3);
    let tid = spawn(&mut sim, console, request("deaf", "own:wait=3", "h2"));
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
            wait: true,
        },
    );
    let why = Failure::Refused(vec![Refusal::SelfCheckpointPending]);
    let Reply::Checkpointed(Err(CheckpointFailure::Task {
        tid: of, why: told, ..
    })) = reply
    else {
        panic!("{reply:?}")
    };
    assert_eq!((of, told), (tid, why));
    assert_reachable(&mut sim, console, tid);
}

/// A program that exits with another status than the requested one has ended.
#[test]
fn unagreed_exit_status_ends_task() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, request("done", "own:wait=3", "h2"));
        notify_exit(&mut sim, console, tid);
        assert_eq!(
            migrate(&mut sim, console, tid, "h3"),
            Err((Step::Quiesce, Failure::TaskEnded))
        );
        sim.run_until("its end", |s| s.procs[console].notifications(1).len() == 1);
        assert_eq!(list_task(&mut sim, console, tid), []);
    }
}

/// The first engine that both hosts support is chosen and is named by a placement query.
#[test]
fn first_engine_usable_by_both_hosts_is_chosen() {
    let (mut sim, console) = Sim::cluster(7, 3);
    let no_engine = vec![Refusal::NoEngine {
        host: host(3),
        why: "none".into(),
    }];
    sim.verdicts.insert(host(3), no_engine);
    let restart = Engine::Restart { timeout_s: 5 };
    for (list, taken) in [
        ("criu,own:wait=3", OWN_ENGINE),
        ("own:wait=3,criu", OWN_ENGINE),
        ("restart", restart),
        ("criu,restart,own", restart),
    ] {
        let tid = spawn(&mut sim, console, request("child", list, "h2"));
        let Reply::MigrationTargets(Ok(targets)) = sim.ask(
            console,
            Request::FindMigrationTargets {
                tid,
                to: Some("h3".into()),
            },
        ) else {
            panic!("no survey")
        };
        assert_eq!(
            (
                targets.verdicts.len(),
                targets.nearest(),
                targets.engine(host(3))
            ),
            (1, Some(host(3)), taken),
            "{list}"
        );
        assert_eq!(migrate(&mut sim, console, tid, "h3"), Ok(taken), "{list}");
    }
    let tid = spawn(&mut sim, console, request("child", "criu,own", "h2"));
    assert_eq!(
        migrate(&mut sim, console, tid, "h1"),
        Ok(Engine::Criu),
        "both can"
    );
    let Reply::Events(events) = sim.ask(
        console,
        Request::Events {
            first_number: 0,
            limit: 1000,
        },
    ) else {
        panic!("no events")
    };
    let said = events
        .iter()
        .filter(|e| matches!(e.kind, EventKind::MigrationEngine { .. }))
        .count();
    assert_eq!(said, 4, "by CRIU nothing is said");
}

/// A guest that is paused for an owner can leave by its own checkpoint.
#[test]
fn paused_guest_leaves_by_own_checkpoint() {
    for seed in seeds(60) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        let speaker = sim.enrol(host(2));
        sim.ask(speaker, stop_guests());
        let wait = Micros(sim.rng.below(60_000));
        sim.advance(wait);
        let old = sim.proc_of(tid);
        (0..5i32).for_each(|n| sim.send_message(console, tid, &n.to_be_bytes()));
        assert_eq!(
            migrate(&mut sim, console, tid, "h3"),
            Ok(OWN_ENGINE),
            "seed {seed}"
        );
        let new = sim.proc_of(tid);
        sim.run_until("all of it", |s| {
            received_numbers(s, old).len() + received_numbers(s, new).len() >= 5
        });
        let both: Vec<i32> = received_numbers(&sim, old)
            .into_iter()
            .chain(received_numbers(&sim, new))
            .collect();
        assert_eq!(both, (0..5).collect::<Vec<i32>>(), "seed {seed}");
        assert_reachable(&mut sim, console, tid);
        assert_eq!(sim.procs[new].host, host(3));
    }
}

/// A suspended task cannot write its own checkpoint. A suspended task that is restarted on another
/// host stays suspended.
#[test]
fn suspended_task_is_restarted_suspended() {
    for seed in seeds(30) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let own = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        let other = spawn(&mut sim, console, request("child", "own,restart", "h2"));
        for tid in [own, other] {
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
        let refused = Err((Step::Inspect, Failure::Refused(vec![Refusal::Suspended])));
        assert_eq!(migrate(&mut sim, console, own, "h3"), refused);
        assert_eq!(
            migrate(&mut sim, console, other, "h3"),
            Ok(Engine::Restart { timeout_s: 5 })
        );
        sim.advance(Micros::from_secs(5));
        let list = list_task(&mut sim, console, other);
        assert!(list[0].suspended && list[0].host == host(3), "{list:?}");
        assert!(
            sim.procs[sim.proc_of(other)].conn.is_none(),
            "it has not run (seed {seed})"
        );
        sim.ask(
            console,
            Request::Suspend {
                tid: other,
                suspend: false,
                cause: None,
            },
        );
        assert_reachable(&mut sim, console, other);
    }
}

#[test]
fn invalid_engine_list_fails_spawn() {
    let (mut sim, console) = Sim::cluster(8, 2);
    let bad = request("child", "own:exit=300", "h2");
    let Reply::Failed {
        error: PvmError::BadParam,
        reason,
    } = sim.ask(console, Request::Spawn(bad))
    else {
        panic!("it began")
    };
    assert!(
        reason.contains("\"own:exit=300\" is not understood"),
        "{reason}"
    );
}

/// Index of the outcome "dead" in the results of [`outcome`].
const DEAD_OUTCOME: usize = 2;

/// Returns 0 if the task has migrated, 1 if it has stayed at the source, and [`DEAD_OUTCOME`] if it
/// is dead. Asserts that the task exists at most once, and that it answers if it lives.
fn outcome(sim: &mut Sim, console: usize, tid: Tid, moved: bool) -> usize {
    let (list, dead) = (
        list_task(sim, console, tid),
        sim.procs[console].notifications(1).len(),
    );
    assert_eq!(
        list.len() + dead,
        1,
        "listed {list:?}, {dead} notes, moved {moved} (seed {})",
        sim.seed
    );
    if dead > 0 {
        return DEAD_OUTCOME;
    }
    assert_reachable(sim, console, tid);
    usize::from(!moved)
}

/// When a host is lost during a restart, the task runs once or is reported dead.
#[test]
fn lost_host_during_restart_never_doubles_task() {
    let mut counts = [0; 3];
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        notify_exit(&mut sim, console, tid);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(40_000));
        sim.advance(wait);
        let lost = host(2 + sim.rng.below(3) as u16);
        sim.kill_host(lost);
        let moved = await_migration(&mut sim, console, moving).is_ok();
        sim.advance(Micros::from_secs(10));
        let fate = outcome(&mut sim, console, tid, moved);
        counts[fate] += 1;
        if fate != DEAD_OUTCOME {
            assert_ne!(list_task(&mut sim, console, tid)[0].host, lost);
        }
    }
    assert!(
        counts.iter().all(|count| *count > 20),
        "{counts:?} moved, stayed, died"
    );
}

/// When a tasker dies or a step fails during a restart, the task runs once or is reported dead.
#[test]
fn tasker_death_during_restart_never_doubles_task() {
    let mut counts = [0; 3];
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let engine = if seed % 3 == 0 {
            "restart:wait=3"
        } else {
            "own:wait=3"
        };
        let tid = spawn(&mut sim, console, request("child", engine, "h2"));
        notify_exit(&mut sim, console, tid);
        sim.random_faults.failed_steps_percent = if seed % 2 == 0 { 40 } else { 0 };
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(25_000));
        sim.advance(wait);
        if seed % 2 == 1 {
            let victim = host(2 + sim.rng.below(2) as u16);
            sim.kill_tasker(victim);
        }
        let moved = await_migration(&mut sim, console, moving).is_ok();
        sim.advance(Micros::from_secs(10));
        counts[outcome(&mut sim, console, tid, moved)] += 1;
    }
    assert!(
        counts.iter().all(|count| *count > 20),
        "{counts:?} moved, stayed, died"
    );
}

#[test]
fn killed_task_during_restart_ends_once() {
    for seed in seeds(200) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        notify_exit(&mut sim, console, tid);
        let moving = begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(25_000));
        sim.advance(wait);
        sim.ask(console, Request::Signal { tid, signal: 9 });
        let _ = await_migration(&mut sim, console, moving);
        sim.advance(Micros::from_secs(5));
        if !list_task(&mut sim, console, tid).is_empty() {
            // The task had just migrated, as a task that migrates by CRIU may have.
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
        let tid = spawn(&mut sim, console, request("child", "own:wait=3", "h2"));
        begin_migration(&mut sim, console, tid, "h3");
        let wait = Micros(sim.rng.below(25_000));
        sim.advance(wait);
        let begun = sim.now;
        sim.request(console, Request::Halt);
        sim.run_until("all have ended", |s| {
            s.nodes.values().all(|node| !node.is_alive)
        });
        assert!(sim.now.since(begun) < Micros::from_secs(4), "seed {seed}");
    }
}
