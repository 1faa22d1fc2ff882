//! Jobs with programs that write their own checkpoints, alone or together with other programs.

use super::services::rebuild_virtual_machine;
use super::{JobScenario, spawn_as};
use crate::tests::scenario::{stop_guests_until, welcome_guests};
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::checkpoint::CheckpointFailure;
use sempa_proto::engine::Engine;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::owner::EvictionMode;
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{HostId, Micros, Tid};

/// A spawn request with these environment entries.
fn request(file: &str, env: &[&str]) -> SpawnRequest {
    let env = env.iter().map(|entry| entry.as_bytes().to_vec()).collect();
    SpawnRequest {
        file: file.into(),
        env,
        count: 1,
        ..SpawnRequest::default()
    }
}

/// Returns a spawn request for a program that saves its received and sent messages in a file.
fn state_keeper() -> SpawnRequest {
    request(
        "keeper",
        &["SEMPA_ENGINE=own:wait=3", "SEMPA_STATE=state-{tid}"],
    )
}

/// Spawns a job of these programs. The first task spawns all others.
fn spawn_job(seed: u64, hosts: usize, requests: Vec<SpawnRequest>) -> JobScenario {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let mut tids: Vec<Tid> = Vec::new();
    for request in requests {
        let by = tids.first().map_or(console, |root| sim.proc_of(*root));
        tids.extend(spawn_as(&mut sim, by, request));
    }
    JobScenario { sim, console, tids }
}

/// Spawns a job in which at least one task keeps its own state. Returns the job and these tasks.
fn mixed_job(seed: u64, hosts: usize, tasks: usize) -> (JobScenario, Vec<Tid>) {
    let keeps_state = |n: usize| n as u64 == seed % tasks as u64 || (seed >> n) & 1 == 1;
    let requests = (0..tasks)
        .map(|n| {
            if keeps_state(n) {
                state_keeper()
            } else {
                request("child", &[])
            }
        })
        .collect();
    let scene = spawn_job(seed, hosts, requests);
    let mut keepers: Vec<Tid> = scene
        .tids
        .iter()
        .enumerate()
        .filter(|(n, _)| keeps_state(*n))
        .map(|(_, tid)| *tid)
        .collect();
    keepers.sort_unstable();
    (scene, keepers)
}

/// A job of programs that write their own checkpoints continues from them without a lost or
/// repeated message.
#[test]
fn own_checkpoints_restart_without_message_loss() {
    for seed in seeds(80) {
        let (mut scene, keepers) = mixed_job(seed, 4, 6);
        scene.exchange_messages(60);
        let asked = scene.begin_checkpoint(None);
        scene.exchange_messages(120);
        let report = scene
            .await_checkpoint(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(
            (report.tasks.len(), &report.self_checkpointed),
            (6, &keepers),
            "seed {seed}"
        );
        // The job continues and has lost nothing.
        scene.run_until_all_connected();
        scene.exchange_messages(40);
        scene.run_until_all_connected();
        scene.run_until_all_received();
        // The restart undoes all messages that the tasks send after the checkpoint.
        scene.exchange_messages(40);
        scene.kill_all();
        let mut scene = if seed % 2 == 0 {
            scene
        } else {
            rebuild_virtual_machine(scene)
        };
        scene.restart_and_exchange(&report.name);
    }
}

/// After a checkpoint that fails at any step, the programs that were asked to exit run, and no
/// files are left.
#[test]
fn failed_own_checkpoint_leaves_programs_running() {
    let (mut good, mut bad) = (0, 0);
    for seed in seeds(100) {
        let (mut scene, _) = mixed_job(seed, 3, 5);
        *(if scene.checkpoint_with_faults() {
            &mut good
        } else {
            &mut bad
        }) += 1;
    }
    assert!(good > 5 && bad > 5, "{good} went well, {bad} failed");
}

/// A restart of a job with own states that fails at any step leaves no task running and can be
/// repeated.
#[test]
fn failed_restart_with_own_states_is_repeatable() {
    let mut bad = 0;
    for seed in seeds(60) {
        let (mut scene, _) = mixed_job(seed, 3, 4);
        scene.exchange_messages(30);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        scene.kill_all();
        bad += scene.restart_with_faults(&report.name);
        scene.run_until_all_connected();
        scene.exchange_messages(60);
        scene.run_until_all_connected();
        scene.run_until_all_received();
        scene.sim.advance(Micros::from_secs(2));
        assert_eq!(scene.sim.image_store.leftovers(), (0, 0), "seed {seed}");
    }
    assert!(bad > 10, "{bad} restarts failed");
}

/// A job with programs that keep their own state continues after hosts are lost at any moment.
#[test]
fn job_with_own_states_survives_host_losses() {
    for seed in seeds(80) {
        let (mut scene, _) = mixed_job(seed, 5, 6);
        let first = scene.checkpoint(Some(Micros::from_millis(500)));
        first.unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut hosts: Vec<u16> = (2..=5).collect();
        for _ in 0..3 {
            let rounds = scene.sim.rng.below(300);
            scene.exchange_messages(rounds);
            let which = scene.sim.rng.below(hosts.len() as u64) as usize;
            scene.sim.kill_host(host(hosts.remove(which)));
        }
        scene.sim.advance(Micros::from_secs(8));
        let job = scene.job();
        let never = Request::Checkpoint {
            job,
            schedule: Some(sempa_proto::checkpoint::CheckpointSchedule::Never),
            end_job: false,
            wait: true,
        };
        assert_eq!(scene.sim.ask(scene.console, never), Reply::Done);
        scene.sim.advance(Micros::from_secs(8));
        scene.run_until_all_connected();
        scene.exchange_messages(60);
        scene.run_until_all_connected();
        scene.run_until_all_received();
        scene.sim.advance(Micros::from_secs(2));
        let is_alive = |at: HostId| scene.sim.nodes[&at].is_alive;
        assert_eq!(
            scene.sim.image_store.leftovers_on(is_alive),
            0,
            "seed {seed}"
        );
    }
}

/// Messages that resumed tasks send before another program has written its checkpoint are not in
/// the checkpoint of the job.
#[test]
fn messages_sent_after_snapshot_are_not_included() {
    for seed in seeds(80) {
        let at = |request: SpawnRequest, host: &str| SpawnRequest {
            flags: 1,
            place: host.into(),
            ..request
        };
        let mut scene = spawn_job(
            seed,
            3,
            vec![at(request("child", &[]), "h2"), at(state_keeper(), "h3")],
        );
        let [root, own] = scene.tids[..] else {
            panic!("two")
        };
        scene.exchange_messages(20);
        let asked = scene.begin_checkpoint(None);
        scene
            .sim
            .run_until("it is asked", |sim| sim.procs[sim.proc_of(own)].exited);
        scene.sim.run_until("the other one stands", |sim| {
            sim.procs[sim.proc_of(root)].is_frozen()
        });
        let moment = Micros(scene.sim.rng.below(8_000));
        scene.sim.advance(moment);
        scene.sim.delay_orders(host(3), Micros::from_millis(100));
        let console = scene.console;
        while !scene.sim.procs[console].replies.contains_key(&asked) {
            scene.send_number(root, own);
            scene.sim.advance(Micros::from_millis(2));
        }
        let report = scene
            .await_checkpoint(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        scene.run_until_all_received();
        scene.kill_all();
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        // The checkpoint does not contain the messages sent meanwhile.
        scene.sim.advance(Micros::from_millis(500));
        scene.run_until_all_received();
    }
}

/// An owner may arrive and leave at any moment of a checkpoint with own states.
#[test]
fn owner_may_come_and_go_during_own_checkpoint() {
    let (mut good, mut bad) = (0, 0);
    for seed in seeds(120) {
        let (mut scene, _) = mixed_job(seed, 3, 5);
        scene.exchange_messages(20);
        let speaker = scene.sim.enrol(host(2));
        let asked = scene.begin_checkpoint(None);
        let moment = Micros(scene.sim.rng.below(60_000));
        scene.sim.advance(moment);
        assert_eq!(
            scene
                .sim
                .ask(speaker, stop_guests_until(None, EvictionMode::Checkpoint)),
            Reply::Done
        );
        let owner_stay = Micros(scene.sim.rng.below(9_000_000));
        scene.sim.advance(owner_stay);
        assert_eq!(scene.sim.ask(speaker, welcome_guests()), Reply::Done);
        let result = scene.await_checkpoint(asked);
        scene.run_until_all_connected();
        scene.exchange_messages(40);
        scene.run_until_all_connected();
        scene.run_until_all_received();
        let Ok(report) = result else {
            bad += 1;
            continue;
        };
        good += 1;
        scene.kill_all();
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        scene.exchange_messages(40);
        scene.run_until_all_connected();
        scene.run_until_all_received();
    }
    assert!(good > 20, "{good} went well, {bad} failed");
}

/// Requests a checkpoint that must fail. Returns the task, the step and the reason.
fn checkpoint_error(scene: &mut JobScenario) -> (Tid, Step, Failure) {
    match scene.checkpoint(None) {
        Err(CheckpointFailure::Task { tid, step, why }) => (tid, step, why),
        other => panic!("{other:?}"),
    }
}

/// Reasons against a checkpoint are reported before any program is asked to exit.
#[test]
fn obstacles_are_reported_before_programs_are_asked() {
    let restart = request("child", &["SEMPA_ENGINE=restart"]);
    let no_files = request("keeper", &["SEMPA_ENGINE=own"]);
    let heedless = request(
        "heedless-keeper",
        &["SEMPA_ENGINE=own:signal=12", "SEMPA_STATE=state-{tid}"],
    );
    let by_restart = Refusal::NoCheckpointEngine {
        engine: Engine::Restart { timeout_s: 5 },
    };
    let signal_not_handled = Refusal::SignalNotHandled { signal: 12 };
    for (request, refusal) in [
        (restart, by_restart),
        (no_files, Refusal::NoStateFiles),
        (heedless, signal_not_handled),
    ] {
        let mut scene = spawn_job(3, 2, vec![state_keeper(), request]);
        let second = scene.tids[1];
        assert_eq!(
            checkpoint_error(&mut scene),
            (second, Step::Inspect, Failure::Refused(vec![refusal]))
        );
        let asked = scene
            .tids
            .iter()
            .filter(|tid| scene.sim.handed_off_links(scene.sim.proc_of(**tid)));
        assert_eq!(asked.count(), 0);
    }
    let mut scene = spawn_job(3, 2, vec![state_keeper()]);
    let job = scene.job();
    let hold = Request::Suspend {
        tid: job,
        suspend: true,
        cause: None,
    };
    assert_eq!(scene.sim.ask(scene.console, hold), Reply::Done);
    assert_eq!(
        checkpoint_error(&mut scene),
        (
            job,
            Step::Inspect,
            Failure::Refused(vec![Refusal::Suspended])
        )
    );
}

/// The first engine that can write a task's checkpoint is used.
#[test]
fn first_usable_engine_is_chosen() {
    for (engines, is_self_checkpointed) in [
        ("own,criu", true),
        ("criu,own", false),
        ("own,restart", true),
        ("restart,criu", false),
    ] {
        let env = [
            &*format!("SEMPA_ENGINE={engines}"),
            "SEMPA_STATE=state-{tid}",
        ];
        let mut scene = spawn_job(4, 2, vec![request("keeper", &env)]);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{engines}: {why}"));
        assert_eq!(
            report.self_checkpointed == report.tasks,
            is_self_checkpointed,
            "{engines}"
        );
        scene.run_until_all_connected();
    }
}

/// A program that does not exit within its timeout fails the checkpoint, and all tasks continue.
#[test]
fn exit_timeout_fails_checkpoint_and_all_continue() {
    let deaf = SpawnRequest {
        file: "deaf".into(),
        ..state_keeper()
    };
    let mut scene = spawn_job(5, 3, vec![state_keeper(), request("child", &[]), deaf]);
    scene.exchange_messages(30);
    let (tid, step, why) = checkpoint_error(&mut scene);
    assert_eq!((tid, step), (scene.tids[2], Step::Quiesce));
    assert!(why.to_string().contains("within 3 s"), "{why}");
    scene.run_until_all_connected();
    scene.exchange_messages(60);
    scene.run_until_all_connected();
    scene.run_until_all_received();
    // The program may still exit later: it is asked again when the first request has expired.
    let before = scene.sim.now;
    let (tid, _, why) = checkpoint_error(&mut scene);
    assert_eq!(tid, scene.tids[2]);
    assert!(scene.sim.now.since(before) > Micros::from_secs(50), "{why}");
}

/// After a failed attempt, a checkpoint is made when the slow program has exited.
#[test]
fn checkpoint_succeeds_after_slow_program_exits() {
    for seed in seeds(20) {
        let deaf = SpawnRequest {
            file: "deaf keeper".into(),
            ..state_keeper()
        };
        let mut scene = spawn_job(seed, 3, vec![state_keeper(), deaf]);
        let slow = scene.sim.proc_of(scene.tids[1]);
        let first = checkpoint_error(&mut scene);
        assert_eq!(first.1, Step::Quiesce);
        let asked = scene.begin_checkpoint(None);
        scene.sim.advance(Micros::from_secs(8));
        // The program exits late, with the agreed status. It is started again, and the next process
        // exits at once.
        scene.sim.exit_gracefully(slow, 85 << 8);
        scene
            .sim
            .run_until("another process", |sim| sim.proc_of(scene.tids[1]) != slow);
        let new = scene.sim.proc_of(scene.tids[1]);
        scene.sim.set_program(new, "keeper");
        let report = scene
            .await_checkpoint(asked)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(report.self_checkpointed.len(), 2, "seed {seed}");
        scene.run_until_all_connected();
    }
}

/// A program that waits in a barrier when it exits fails the checkpoint.
#[test]
fn program_in_barrier_fails_checkpoint() {
    let mut scene = spawn_job(6, 2, vec![state_keeper(), request("child", &[])]);
    for tid in scene.tids.clone() {
        let proc = scene.sim.proc_of(tid);
        scene.sim.ask(
            proc,
            Request::Group(GroupRequest::Join {
                group: b"us".into(),
            }),
        );
    }
    let (root, other) = (
        scene.sim.proc_of(scene.tids[0]),
        scene.sim.proc_of(scene.tids[1]),
    );
    let barrier = || {
        Request::Group(GroupRequest::Barrier {
            group: b"us".into(),
            count: 2,
        })
    };
    scene.sim.request(root, barrier());
    scene.sim.advance(Micros::from_millis(20));
    let (tid, step, why) = checkpoint_error(&mut scene);
    assert_eq!((tid, step), (scene.tids[0], Step::Dump));
    assert!(why.to_string().contains("barrier"), "{why}");
    scene.run_until_all_connected();
    // The task's barrier entry stays, as in a migration.
    assert!(matches!(
        scene.sim.ask(other, barrier()),
        Reply::Group(GroupReply::Number(_))
    ));
}

/// A program that has written none of the files named at its spawn is reported.
#[test]
fn missing_state_files_are_reported() {
    let mut scene = spawn_job(
        7,
        2,
        vec![
            state_keeper(),
            SpawnRequest {
                file: "forgetful".into(),
                ..state_keeper()
            },
        ],
    );
    scene.checkpoint(None).expect("nothing stands in the way");
    scene.run_until_all_connected();
    let log = scene.sim.nodes[&HostId::MASTER].log.join("\n") + &scene.sim.history();
    let told = format!(
        "{} reported that it wrote its own checkpoint, but none of the files",
        scene.tids[1]
    );
    assert!(
        log.contains(&told)
            && !log.contains(&told.replace(&scene.tids[1].to_string(), &scene.tids[0].to_string())),
        "{log}"
    );
}

/// A program that has written its checkpoint can migrate as soon as it runs again, and the
/// checkpoint can be restarted.
#[test]
fn written_program_may_migrate_and_restart() {
    for seed in seeds(30) {
        let (mut scene, keepers) = mixed_job(seed, 4, 4);
        scene.exchange_messages(30);
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let moving = Request::Migrate {
            tid: keepers[0],
            to: "h4".into(),
            cause: None,
            wait: true,
        };
        let reply = scene.sim.ask(scene.console, moving);
        let there = scene.sim.procs[scene.sim.proc_of(keepers[0])].host;
        assert!(
            matches!(reply, Reply::Migrated(Ok(_))) || there == host(4),
            "{reply:?} (seed {seed})"
        );
        scene.run_until_all_connected();
        scene.exchange_messages(30);
        scene.run_until_all_connected();
        scene.run_until_all_received();
        scene.kill_all();
        let places = scene
            .restart(&report.name, &["h1", "h2"])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            places
                .iter()
                .all(|(_, at)| [HostId::MASTER, host(2)].contains(at)),
            "{places:?}"
        );
        scene.run_until_all_connected();
        scene.exchange_messages(60);
        scene.run_until_all_connected();
        scene.run_until_all_received();
    }
}
