//! Tasks that exit shortly before a checkpoint of their job, with their last messages in flight.

use super::{Scene, spawn_as};
use crate::tests::engines::heard;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::Micros;
use sempa_proto::task::{Reply, Request, SpawnRequest};

/// The last messages of a task that has exited are in the checkpoint, however late they arrive.
#[test]
fn checkpoint_includes_last_messages() {
    seeds(120).for_each(|seed| last_words_are_kept(seed, true));
}

/// The last messages of a task that has exited are in the first checkpoint of its job.
#[test]
fn first_checkpoint_includes_last_messages() {
    seeds(120).for_each(|seed| last_words_are_kept(seed, false));
}

/// A spawn request for one task on this host.
fn at(file: &str, place: &str) -> SpawnRequest {
    SpawnRequest {
        file: file.into(),
        count: 1,
        flags: 1,
        place: place.into(),
        ..SpawnRequest::default()
    }
}

/// A worker sends messages and exits while they are in flight. If `before` is set, its job already
/// has a checkpoint.
fn last_words_are_kept(seed: u64, before: bool) {
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
    let root = spawn_as(&mut sim, console, with_env(at("keeper", "h2")))[0];
    let proc = sim.proc_of(root);
    let worker = spawn_as(&mut sim, proc, with_env(at("child", "h3")))[0];
    let other = spawn_as(&mut sim, proc, with_env(at("keeper", "h1")))[0];
    let mut scene = Scene {
        sim,
        console,
        tids: vec![root, other],
    };
    if before {
        let first = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(first.tasks.len(), 3);
        scene.sim.pass(Micros::from_millis(300));
    }
    let sim = &mut scene.sim;
    let (proc, late) = (sim.proc_of(worker), Micros(sim.dice.below(900_000)));
    sim.slow_down(host(3), host(2), late);
    for n in 0..5i32 {
        sim.tell(proc, root, &n.to_be_bytes());
    }
    sim.pass(Micros::from_millis(5));
    sim.exit(proc, 0);
    let moment = Micros(10_000 + sim.dice.below(600_000));
    sim.pass(moment);
    let report = scene
        .checkpoint(None)
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    assert_eq!(report.tasks.len(), 2, "seed {seed}");
    scene.sim.pass(Micros::from_secs(2));
    scene.end_all();
    scene
        .restart(&report.name, &[])
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    scene.until_all_are_back();
    scene.sim.pass(Micros::from_secs(2));
    let words = heard(&scene.sim, scene.sim.proc_of(root));
    assert_eq!(words, [0, 1, 2, 3, 4], "seed {seed}");
}

/// A checkpoint does not wait for a host that joined after the exit of a task.
#[test]
fn host_added_after_exit_causes_no_wait() {
    for seed in seeds(40) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let gone = spawn_as(&mut sim, console, at("keeper", "h2"))[0];
        let proc = sim.proc_of(gone);
        sim.exit(proc, 0);
        let moment = Micros(sim.dice.below(200_000));
        sim.pass(moment);
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
        let root = spawn_as(&mut sim, console, at("keeper", "h3"))[0];
        let mut scene = Scene {
            sim,
            console,
            tids: vec![root],
        };
        let report = scene
            .checkpoint(None)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            report.frozen < Micros::from_secs(1),
            "it stood still for {} us (seed {seed})",
            report.frozen.0
        );
    }
}
