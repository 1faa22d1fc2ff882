//! Tasks that exit shortly before a checkpoint of their job, with their last messages in flight.

use super::{JobScenario, spawn_as};
use crate::tests::restart_engine::received_numbers;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::Micros;
use sempa_proto::task::{Reply, Request, SpawnRequest};

/// The last messages of a task that has exited are in the checkpoint, however late they arrive.
#[test]
fn checkpoint_includes_last_messages() {
    seeds(120).for_each(|seed| check_last_messages(seed, true));
}

/// The last messages of a task that has exited are in the first checkpoint of its job.
#[test]
fn first_checkpoint_includes_last_messages() {
    seeds(120).for_each(|seed| check_last_messages(seed, false));
}

/// A spawn request for one task on this host.
fn spawn_on(file: &str, place: &str) -> SpawnRequest {
    SpawnRequest {
        file: file.into(),
        count: 1,
        flags: 1,
        place: place.into(),
        ..SpawnRequest::default()
    }
}

/// A worker sends messages and exits while they are in flight. If `before` is true, its job already
/// has a checkpoint.
fn check_last_messages(seed: u64, before: bool) {
    let (mut sim, console) = Sim::cluster(seed, 3);
    let env = if seed.is_multiple_of(2) {
        vec![
            b"SEMPA_ENGINE=own".to_vec(),
            b"SEMPA_STATE=state-{tid}".to_vec(),
        ]
    } else {
        Vec::new()
    };
    let with_env = |request: SpawnRequest| SpawnRequest {
        env: env.clone(),
        ..request
    };
    let root = spawn_as(&mut sim, console, with_env(spawn_on("keeper", "h2")))[0];
    let proc = sim.proc_of(root);
    let worker = spawn_as(&mut sim, proc, with_env(spawn_on("child", "h3")))[0];
    let other = spawn_as(&mut sim, proc, with_env(spawn_on("keeper", "h1")))[0];
    let mut scene = JobScenario {
        sim,
        console,
        tids: vec![root, other],
    };
    if before {
        let first = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(first.tasks.len(), 3);
        scene.sim.advance(Micros::from_millis(300));
    }
    let sim = &mut scene.sim;
    let (proc, late) = (sim.proc_of(worker), Micros(sim.rng.below(900_000)));
    sim.delay_data(host(3), host(2), late);
    for n in 0..5i32 {
        sim.send_message(proc, root, &n.to_be_bytes());
    }
    sim.advance(Micros::from_millis(5));
    sim.exit(proc, 0);
    let moment = Micros(10_000 + sim.rng.below(600_000));
    sim.advance(moment);
    let report = scene
        .checkpoint(None)
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    assert_eq!(report.tasks.len(), 2, "seed {seed}");
    scene.sim.advance(Micros::from_secs(2));
    scene.kill_all();
    scene
        .restart(&report.name, &[])
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    scene.run_until_all_connected();
    scene.sim.advance(Micros::from_secs(2));
    let received = received_numbers(&scene.sim, scene.sim.proc_of(root));
    assert_eq!(received, [0, 1, 2, 3, 4], "seed {seed}");
}

/// A checkpoint does not wait for a host that joined after the exit of a task.
#[test]
fn host_added_after_exit_causes_no_wait() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let gone = spawn_as(&mut sim, console, spawn_on("keeper", "h2"))[0];
        let proc = sim.proc_of(gone);
        sim.exit(proc, 0);
        let moment = Micros(sim.rng.below(200_000));
        sim.advance(moment);
        let reply = sim.ask(
            console,
            Request::AddHosts {
                lines: vec!["h3".into()],
            },
        );
        assert!(
            matches!(&reply, Reply::HostsAdded(added) if added[0].result.is_ok()),
            "{reply:?}"
        );
        let root = spawn_as(&mut sim, console, spawn_on("keeper", "h3"))[0];
        let mut scene = JobScenario {
            sim,
            console,
            tids: vec![root],
        };
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            report.frozen < Micros::from_secs(1),
            "it was frozen for {} us (seed {seed})",
            report.frozen.0
        );
    }
}
