//! Exits of tasks shortly before a checkpoint of their job, while their last messages are in
//! flight.

use super::{JobScenario, spawn_as};
use crate::tests::restart_engine::received_numbers;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::Micros;
use sempa_proto::task::{Reply, Request, SpawnRequest};

/// A second checkpoint of a job contains the last messages of a task that has exited, even if these
/// messages arrive late.
#[test]
fn checkpoint_includes_last_messages() {
    seeds(120).for_each(|seed| check_last_messages(seed, true));
}

/// The first checkpoint of a job contains the last messages of a task that has exited.
#[test]
fn first_checkpoint_includes_last_messages() {
    seeds(120).for_each(|seed| check_last_messages(seed, false));
}

/// Returns a spawn request for one task on the host `host_name`.
fn spawn_on(file: &str, host_name: &str) -> SpawnRequest {
    SpawnRequest {
        program: file.into(),
        task_count: 1,
        flags: 1,
        where_arg: host_name.into(),
        ..SpawnRequest::default()
    }
}

/// A worker sends messages and exits while its messages are in flight. Then its job is checkpointed
/// and restarted. If `has_checkpoint` is true, the job already has a checkpoint.
fn check_last_messages(seed: u64, has_checkpoint: bool) {
    let (mut sim, console) = Sim::cluster(seed, 3);
    let env = if seed.is_multiple_of(2) {
        vec![
            b"SEMPA_ENGINE=own".to_vec(),
            b"SEMPA_STATE=state-{tid}".to_vec(),
        ]
    } else {
        Vec::new()
    };
    let add_env = |request: SpawnRequest| SpawnRequest {
        env: env.clone(),
        ..request
    };
    let root_tid = spawn_as(&mut sim, console, add_env(spawn_on("keeper", "h2")))[0];
    let proc = sim.proc_of(root_tid);
    let worker_tid = spawn_as(&mut sim, proc, add_env(spawn_on("child", "h3")))[0];
    let other_tid = spawn_as(&mut sim, proc, add_env(spawn_on("keeper", "h1")))[0];
    let mut scenario = JobScenario {
        sim,
        console,
        tids: vec![root_tid, other_tid],
    };
    if has_checkpoint {
        let first_checkpoint = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(first_checkpoint.tasks.len(), 3);
        scenario.sim.advance(Micros::from_millis(300));
    }
    let sim = &mut scenario.sim;
    let (proc, message_delay) = (sim.proc_of(worker_tid), Micros(sim.rng.below(900_000)));
    sim.delay_data(host(3), host(2), message_delay);
    for n in 0..5i32 {
        sim.send_message(proc, root_tid, &n.to_be_bytes());
    }
    sim.advance(Micros::from_millis(5));
    sim.exit_proc(proc, 0);
    let delay = Micros(10_000 + sim.rng.below(600_000));
    sim.advance(delay);
    let report = scenario
        .checkpoint(None)
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    assert_eq!(report.tasks.len(), 2, "seed {seed}");
    scenario.sim.advance(Micros::from_secs(2));
    scenario.kill_all_tasks();
    scenario
        .restart(&report.name, &[])
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    scenario.run_until_all_connected();
    scenario.sim.advance(Micros::from_secs(2));
    let received_by_root = received_numbers(&scenario.sim, scenario.sim.proc_of(root_tid));
    assert_eq!(received_by_root, [0, 1, 2, 3, 4], "seed {seed}");
}

/// A checkpoint does not wait for last messages from a host that joined after the task's exit.
#[test]
fn host_added_after_exit_causes_no_wait() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let exited_tid = spawn_as(&mut sim, console, spawn_on("keeper", "h2"))[0];
        let proc = sim.proc_of(exited_tid);
        sim.exit_proc(proc, 0);
        let delay = Micros(sim.rng.below(200_000));
        sim.advance(delay);
        let reply = sim.ask(
            console,
            Request::AddHosts {
                host_file_lines: vec!["h3".into()],
            },
        );
        assert!(
            matches!(&reply, Reply::HostsAdded(results) if results[0].result.is_ok()),
            "{reply:?}"
        );
        let root_tid = spawn_as(&mut sim, console, spawn_on("keeper", "h3"))[0];
        let mut scenario = JobScenario {
            sim,
            console,
            tids: vec![root_tid],
        };
        let report = scenario
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            report.frozen_time < Micros::from_secs(1),
            "it was frozen for {} us (seed {seed})",
            report.frozen_time.0
        );
    }
}
