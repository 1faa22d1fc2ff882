//! Jobs with programs that write their own checkpoints. Other programs of the job may be dumped by
//! CRIU.

use super::services::rebuild_virtual_machine;
use super::{JobScenario, spawn_as};
use crate::tests::scenario::{evict_guests_request, welcome_guests_request};
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::checkpoint::CheckpointFailure;
use sempa_proto::engine::Engine;
use sempa_proto::group::{GroupReply, GroupRequest};
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::owner::EvictionMode;
use sempa_proto::task::{Reply, Request, SpawnRequest};
use sempa_proto::{HostId, Micros, Tid};

/// Returns a request to spawn one task with these environment entries.
fn spawn_request_with_env(file: &str, env: &[&str]) -> SpawnRequest {
    let env = env.iter().map(|entry| entry.as_bytes().to_vec()).collect();
    SpawnRequest {
        program: file.into(),
        env,
        task_count: 1,
        ..SpawnRequest::default()
    }
}

/// Returns a spawn request for a program that saves its received messages and its counts of sent
/// messages in a file.
fn state_keeper() -> SpawnRequest {
    spawn_request_with_env(
        "keeper",
        &["SEMPA_ENGINE=own:wait=3", "SEMPA_STATE=state-{tid}"],
    )
}

/// Spawns a job of these programs. The first task spawns all other tasks.
fn spawn_job(seed: u64, hosts: usize, requests: Vec<SpawnRequest>) -> JobScenario {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let mut tids: Vec<Tid> = Vec::new();
    for request in requests {
        let spawner = tids
            .first()
            .map_or(console, |root_tid| sim.proc_of(*root_tid));
        tids.extend(spawn_as(&mut sim, spawner, request));
    }
    JobScenario { sim, console, tids }
}

/// Spawns a job in which at least one task keeps its own state. Returns the job and the tasks that
/// keep their own state.
fn mixed_job(seed: u64, hosts: usize, tasks: usize) -> (JobScenario, Vec<Tid>) {
    let keeps_state = |n: usize| n as u64 == seed % tasks as u64 || (seed >> n) & 1 == 1;
    let requests = (0..tasks)
        .map(|n| {
            if keeps_state(n) {
                state_keeper()
            } else {
                spawn_request_with_env("child", &[])
            }
        })
        .collect();
    let scenario = spawn_job(seed, hosts, requests);
    let mut state_keepers: Vec<Tid> = scenario
        .tids
        .iter()
        .enumerate()
        .filter(|(n, _)| keeps_state(*n))
        .map(|(_, tid)| *tid)
        .collect();
    state_keepers.sort_unstable();
    (scenario, state_keepers)
}

/// A job of programs that write their own checkpoints is restarted from the checkpoints. No message
/// is lost or repeated.
#[test]
fn own_checkpoints_restart_without_message_loss() {
    for seed in seeds(80) {
        let (mut scenario, state_keepers) = mixed_job(seed, 4, 6);
        scenario.exchange_messages(60);
        let checkpoint_request = scenario.begin_checkpoint(None);
        scenario.exchange_messages(120);
        let report = scenario
            .await_checkpoint(checkpoint_request)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(
            (report.tasks.len(), &report.self_checkpointed_tasks),
            (6, &state_keepers),
            "seed {seed}"
        );
        // The job continues after the checkpoint and has lost no message.
        scenario.run_until_all_connected();
        scenario.exchange_messages(40);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
        // The restart undoes the messages that the tasks send after the checkpoint.
        scenario.exchange_messages(40);
        scenario.kill_all_tasks();
        let mut scenario = if seed % 2 == 0 {
            scenario
        } else {
            rebuild_virtual_machine(scenario)
        };
        scenario.restart_and_exchange(&report.name);
    }
}

/// If any step of a checkpoint fails, the programs that were asked to exit run again, and no files
/// remain.
#[test]
fn failed_own_checkpoint_leaves_programs_running() {
    let (mut success_count, mut failure_count) = (0, 0);
    for seed in seeds(100) {
        let (mut scenario, _) = mixed_job(seed, 3, 5);
        *(if scenario.checkpoint_with_faults() {
            &mut success_count
        } else {
            &mut failure_count
        }) += 1;
    }
    assert!(
        success_count > 5 && failure_count > 5,
        "{success_count} went well, {failure_count} failed"
    );
}

/// If any step of a restart with own states fails, no task runs, and the restart can be repeated.
#[test]
fn failed_restart_with_own_states_is_repeatable() {
    let mut failure_count = 0;
    for seed in seeds(60) {
        let (mut scenario, _) = mixed_job(seed, 3, 4);
        scenario.exchange_messages(30);
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        scenario.kill_all_tasks();
        failure_count += scenario.restart_with_faults(&report.name);
        scenario.run_until_all_connected();
        scenario.exchange_messages(60);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
        scenario.sim.advance(Micros::from_secs(2));
        assert_eq!(
            scenario.sim.image_store.leftover_counts(),
            (0, 0),
            "seed {seed}"
        );
    }
    assert!(failure_count > 10, "{failure_count} restarts failed");
}

/// A job with programs that keep their own state continues after three host losses at random times.
#[test]
fn job_with_own_states_survives_host_losses() {
    for seed in seeds(80) {
        let (mut scenario, _) = mixed_job(seed, 5, 6);
        let first_checkpoint = scenario.checkpoint(Some(Micros::from_millis(500)));
        first_checkpoint.unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut hosts: Vec<u16> = (2..=5).collect();
        for _ in 0..3 {
            let rounds = scenario.sim.rng.below(300);
            scenario.exchange_messages(rounds);
            let host_index = scenario.sim.rng.below(hosts.len() as u64) as usize;
            scenario.sim.kill_host(host(hosts.remove(host_index)));
        }
        scenario.sim.advance(Micros::from_secs(8));
        let job = scenario.job_tid();
        let cancel_request = Request::Checkpoint {
            job,
            schedule: Some(sempa_proto::checkpoint::CheckpointSchedule::Disabled),
            end_job: false,
            wait_for_end: true,
        };
        assert_eq!(
            scenario.sim.ask(scenario.console, cancel_request),
            Reply::Done
        );
        scenario.sim.advance(Micros::from_secs(8));
        scenario.run_until_all_connected();
        scenario.exchange_messages(60);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
        scenario.sim.advance(Micros::from_secs(2));
        let is_alive = |host_id: HostId| scenario.sim.nodes[&host_id].is_alive;
        assert_eq!(
            scenario.sim.image_store.leftover_count_on(is_alive),
            0,
            "seed {seed}"
        );
    }
}

/// A resumed task may send messages before another program has written its checkpoint. The
/// checkpoint of the job does not contain these messages.
#[test]
fn messages_sent_after_snapshot_are_not_included() {
    for seed in seeds(80) {
        let place_on = |request: SpawnRequest, host: &str| SpawnRequest {
            flags: 1,
            where_arg: host.into(),
            ..request
        };
        let mut scenario = spawn_job(
            seed,
            3,
            vec![
                place_on(spawn_request_with_env("child", &[]), "h2"),
                place_on(state_keeper(), "h3"),
            ],
        );
        let [root_tid, own_state_tid] = scenario.tids[..] else {
            panic!("two")
        };
        scenario.exchange_messages(20);
        let checkpoint_request = scenario.begin_checkpoint(None);
        scenario.sim.run_until("it is asked", |sim| {
            sim.procs[sim.proc_of(own_state_tid)].exited
        });
        scenario.sim.run_until("the other one stands", |sim| {
            sim.procs[sim.proc_of(root_tid)].is_frozen()
        });
        let send_delay = Micros(scenario.sim.rng.below(8_000));
        scenario.sim.advance(send_delay);
        scenario.sim.delay_orders(host(3), Micros::from_millis(100));
        let console = scenario.console;
        while !scenario.sim.procs[console]
            .replies
            .contains_key(&checkpoint_request)
        {
            scenario.send_number(root_tid, own_state_tid);
            scenario.sim.advance(Micros::from_millis(2));
        }
        let report = scenario
            .await_checkpoint(checkpoint_request)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
        scenario.kill_all_tasks();
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        // The checkpoint does not contain the messages that were sent while the checkpoint was
        // written.
        scenario.sim.advance(Micros::from_millis(500));
        scenario.run_until_all_received();
    }
}

/// An owner may arrive and leave at any time of a checkpoint with own states.
#[test]
fn owner_may_come_and_go_during_own_checkpoint() {
    let (mut success_count, mut failure_count) = (0, 0);
    for seed in seeds(120) {
        let (mut scenario, _) = mixed_job(seed, 3, 5);
        scenario.exchange_messages(20);
        let owner_agent = scenario.sim.enrol(host(2));
        let checkpoint_request = scenario.begin_checkpoint(None);
        let arrival_delay = Micros(scenario.sim.rng.below(60_000));
        scenario.sim.advance(arrival_delay);
        assert_eq!(
            scenario.sim.ask(
                owner_agent,
                evict_guests_request(None, EvictionMode::Checkpoint)
            ),
            Reply::Done
        );
        let stay_duration = Micros(scenario.sim.rng.below(9_000_000));
        scenario.sim.advance(stay_duration);
        assert_eq!(
            scenario.sim.ask(owner_agent, welcome_guests_request()),
            Reply::Done
        );
        let result = scenario.await_checkpoint(checkpoint_request);
        scenario.run_until_all_connected();
        scenario.exchange_messages(40);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
        let Ok(report) = result else {
            failure_count += 1;
            continue;
        };
        success_count += 1;
        scenario.kill_all_tasks();
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        scenario.exchange_messages(40);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
    }
    assert!(
        success_count > 20,
        "{success_count} went well, {failure_count} failed"
    );
}

/// Requests a checkpoint that must fail. Returns the task that failed, the step and the reason.
fn fail_checkpoint(scenario: &mut JobScenario) -> (Tid, Step, Failure) {
    match scenario.checkpoint(None) {
        Err(CheckpointFailure::Task {
            tid,
            step,
            failure: why,
        }) => (tid, step, why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn obstacles_are_reported_before_programs_are_asked() {
    let restart_request = spawn_request_with_env("child", &["SEMPA_ENGINE=restart"]);
    let no_files_request = spawn_request_with_env("keeper", &["SEMPA_ENGINE=own"]);
    let ignoring_request = spawn_request_with_env(
        "heedless-keeper",
        &["SEMPA_ENGINE=own:signal=12", "SEMPA_STATE=state-{tid}"],
    );
    let no_engine_refusal = Refusal::NoCheckpointEngine {
        engine: Engine::Restart { timeout_s: 5 },
    };
    let signal_refusal = Refusal::SignalNotHandled { signal: 12 };
    for (request, refusal) in [
        (restart_request, no_engine_refusal),
        (no_files_request, Refusal::NoStateFiles),
        (ignoring_request, signal_refusal),
    ] {
        let mut scenario = spawn_job(3, 2, vec![state_keeper(), request]);
        let second_tid = scenario.tids[1];
        assert_eq!(
            fail_checkpoint(&mut scenario),
            (second_tid, Step::Inspect, Failure::Refused(vec![refusal]))
        );
        let asked_tids = scenario.tids.iter().filter(|tid| {
            scenario
                .sim
                .has_handed_off_links(scenario.sim.proc_of(**tid))
        });
        assert_eq!(asked_tids.count(), 0);
    }
    let mut scenario = spawn_job(3, 2, vec![state_keeper()]);
    let job = scenario.job_tid();
    let suspend_request = Request::Suspend {
        tid: job,
        suspend: true,
        cause: None,
    };
    assert_eq!(
        scenario.sim.ask(scenario.console, suspend_request),
        Reply::Done
    );
    assert_eq!(
        fail_checkpoint(&mut scenario),
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
        let mut scenario = spawn_job(4, 2, vec![spawn_request_with_env("keeper", &env)]);
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{engines}: {why}"));
        assert_eq!(
            report.self_checkpointed_tasks == report.tasks,
            is_self_checkpointed,
            "{engines}"
        );
        scenario.run_until_all_connected();
    }
}

/// A program that does not exit within its timeout fails the checkpoint, and all tasks continue.
#[test]
fn exit_timeout_fails_checkpoint_and_all_continue() {
    let deaf_request = SpawnRequest {
        program: "deaf".into(),
        ..state_keeper()
    };
    let mut scenario = spawn_job(
        5,
        3,
        vec![
            state_keeper(),
            spawn_request_with_env("child", &[]),
            deaf_request,
        ],
    );
    scenario.exchange_messages(30);
    let (tid, step, why) = fail_checkpoint(&mut scenario);
    assert_eq!((tid, step), (scenario.tids[2], Step::Quiesce));
    assert!(why.to_string().contains("within 3 s"), "{why}");
    scenario.run_until_all_connected();
    scenario.exchange_messages(60);
    scenario.run_until_all_connected();
    scenario.run_until_all_received();
    // The program may still exit because of the first request, so a second checkpoint waits until
    // the first request has expired.
    let start_time = scenario.sim.now;
    let (tid, _, why) = fail_checkpoint(&mut scenario);
    assert_eq!(tid, scenario.tids[2]);
    assert!(
        scenario.sim.now.since(start_time) > Micros::from_secs(50),
        "{why}"
    );
}

/// A checkpoint that failed because of a slow program succeeds after the program has exited.
#[test]
fn checkpoint_succeeds_after_slow_program_exits() {
    for seed in seeds(20) {
        let slow_request = SpawnRequest {
            program: "deaf keeper".into(),
            ..state_keeper()
        };
        let mut scenario = spawn_job(seed, 3, vec![state_keeper(), slow_request]);
        let slow_proc = scenario.sim.proc_of(scenario.tids[1]);
        let first_error = fail_checkpoint(&mut scenario);
        assert_eq!(first_error.1, Step::Quiesce);
        let checkpoint_request = scenario.begin_checkpoint(None);
        scenario.sim.advance(Micros::from_secs(8));
        // The program exits late with the agreed status and is started again. The new process exits
        // immediately on request.
        scenario.sim.exit_gracefully(slow_proc, 85 << 8);
        scenario.sim.run_until("another process", |sim| {
            sim.proc_of(scenario.tids[1]) != slow_proc
        });
        let new_proc = scenario.sim.proc_of(scenario.tids[1]);
        scenario.sim.set_program(new_proc, "keeper");
        let report = scenario
            .await_checkpoint(checkpoint_request)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(report.self_checkpointed_tasks.len(), 2, "seed {seed}");
        scenario.run_until_all_connected();
    }
}

/// A checkpoint fails if a program waits in a barrier when it exits.
#[test]
fn program_in_barrier_fails_checkpoint() {
    let mut scenario = spawn_job(
        6,
        2,
        vec![state_keeper(), spawn_request_with_env("child", &[])],
    );
    for tid in scenario.tids.clone() {
        let proc = scenario.sim.proc_of(tid);
        scenario.sim.ask(
            proc,
            Request::Group(GroupRequest::Join {
                group: b"us".into(),
            }),
        );
    }
    let (root_proc, other_proc) = (
        scenario.sim.proc_of(scenario.tids[0]),
        scenario.sim.proc_of(scenario.tids[1]),
    );
    let barrier = || {
        Request::Group(GroupRequest::Barrier {
            group: b"us".into(),
            required_members: 2,
        })
    };
    scenario.sim.request(root_proc, barrier());
    scenario.sim.advance(Micros::from_millis(20));
    let (tid, step, why) = fail_checkpoint(&mut scenario);
    assert_eq!((tid, step), (scenario.tids[0], Step::Dump));
    assert!(why.to_string().contains("barrier"), "{why}");
    scenario.run_until_all_connected();
    // As in a migration, the failed checkpoint does not end the task's wait in the barrier.
    assert!(matches!(
        scenario.sim.ask(other_proc, barrier()),
        Reply::Group(GroupReply::Number(_))
    ));
}

/// A program that has written none of the files named at its spawn is reported in the log.
#[test]
fn missing_state_files_are_reported() {
    let mut scenario = spawn_job(
        7,
        2,
        vec![
            state_keeper(),
            SpawnRequest {
                program: "forgetful".into(),
                ..state_keeper()
            },
        ],
    );
    scenario
        .checkpoint(None)
        .expect("nothing stands in the way");
    scenario.run_until_all_connected();
    let log = scenario.sim.nodes[&HostId::MASTER].log.join("\n") + &scenario.sim.state_report();
    let expected_line = format!(
        "{} reported that it wrote its own checkpoint, but none of the files",
        scenario.tids[1]
    );
    assert!(
        log.contains(&expected_line)
            && !log.contains(
                &expected_line
                    .replace(&scenario.tids[1].to_string(), &scenario.tids[0].to_string())
            ),
        "{log}"
    );
}

/// A program that has written its checkpoint can migrate as soon as it runs again. The checkpoint
/// can be restarted.
#[test]
fn written_program_may_migrate_and_restart() {
    for seed in seeds(30) {
        let (mut scenario, state_keepers) = mixed_job(seed, 4, 4);
        scenario.exchange_messages(30);
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let migration_request = Request::Migrate {
            tid: state_keepers[0],
            target: "h4".into(),
            cause: None,
            wait_for_end: true,
        };
        let reply = scenario.sim.ask(scenario.console, migration_request);
        let task_host = scenario.sim.procs[scenario.sim.proc_of(state_keepers[0])].host;
        assert!(
            matches!(reply, Reply::Migrated(Ok(_))) || task_host == host(4),
            "{reply:?} (seed {seed})"
        );
        scenario.run_until_all_connected();
        scenario.exchange_messages(30);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
        scenario.kill_all_tasks();
        let task_hosts = scenario
            .restart(&report.name, &["h1", "h2"])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            task_hosts
                .iter()
                .all(|(_, host_id)| [HostId::MASTER, host(2)].contains(host_id)),
            "{task_hosts:?}"
        );
        scenario.run_until_all_connected();
        scenario.exchange_messages(60);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
    }
}
