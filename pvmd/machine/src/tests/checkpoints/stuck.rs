//! Jobs that must be restarted and that no host accepts.

use super::{JobScenario, host};
use crate::tests::scenario::list_events;
use crate::{Event, HostId};
use sempa_proto::checkpoint::CheckpointSchedule;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Refusal;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, Tid};

/// Creates a job that has lost a host and that no other host accepts. Returns also the number of
/// processes at the loss.
fn unplaceable_job(seed: u64) -> (JobScenario, usize) {
    let mut scene = JobScenario::new(seed, 4, 6);
    scene
        .checkpoint(Some(Micros::from_millis(600)))
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
    for at in [HostId::MASTER, host(2), host(3), host(4)] {
        scene.sim.verdicts.insert(
            at,
            vec![Refusal::NoEngine {
                host: at,
                why: "none".into(),
            }],
        );
    }
    let before = scene.sim.procs.len();
    scene.sim.kill_host(host(3));
    (scene, before)
}

/// Returns the times at which a restart has failed.
fn restart_failure_times(scene: &mut JobScenario) -> Vec<Micros> {
    let Reply::Events(events) = scene.sim.ask(
        scene.console,
        Request::Events {
            first_number: 0,
            limit: 65_536,
        },
    ) else {
        panic!("no events")
    };
    let failed = events
        .iter()
        .filter(|event| matches!(event.kind, EventKind::RestartFailed { .. }));
    failed.map(|event| event.at).collect()
}

fn cancel_checkpointing(scene: &mut JobScenario, job: Tid) {
    let request = Request::Checkpoint {
        job,
        schedule: Some(CheckpointSchedule::Never),
        end_job: false,
        wait: false,
    };
    assert_eq!(scene.sim.ask(scene.console, request), Reply::Done);
}

/// Restarts of a job that no host accepts are repeated at growing intervals, and at once when a
/// host joins.
#[test]
fn restart_retries_back_off_until_a_host_joins() {
    for seed in 0..2 {
        let (mut scene, before) = unplaceable_job(seed);
        scene.sim.advance(Micros::from_secs(2 * 3600));
        let failed = restart_failure_times(&mut scene);
        let pauses: Vec<u64> = failed
            .windows(2)
            .map(|pair| pair[1].since(pair[0]).0 / 1_000_000)
            .collect();
        assert!(
            pauses[..9].iter().all(|pause| (2..4).contains(pause)),
            "{pauses:?} (seed {seed})"
        );
        assert!(
            pauses[20..].iter().all(|pause| (600..603).contains(pause)),
            "{pauses:?} (seed {seed})"
        );
        scene.sim.verdicts.clear();
        let come = scene.sim.now;
        let reply = scene.sim.ask(
            scene.console,
            Request::AddHosts {
                lines: vec!["h5".into()],
            },
        );
        assert!(
            matches!(&reply, Reply::HostsAdded(added) if added[0].result.is_ok()),
            "{reply:?}"
        );
        scene.run_until_restarted(before);
        assert!(
            scene.sim.now.since(come) < Micros::from_secs(60),
            "it was not tried at once (seed {seed})"
        );
    }
}

/// Restarts of a job that no host accepts stop when its checkpointing is cancelled.
#[test]
fn cancelled_checkpointing_stops_restart_retries() {
    let (mut scene, before) = unplaceable_job(1);
    let job = scene.job();
    scene.sim.advance(Micros::from_secs(60));
    cancel_checkpointing(&mut scene, job);
    let failed = restart_failure_times(&mut scene).len();
    assert!(failed > 10, "{failed} times");
    scene.sim.verdicts.clear();
    scene.sim.advance(Micros::from_secs(3600));
    assert_eq!(
        (
            restart_failure_times(&mut scene).len(),
            scene.sim.procs.len()
        ),
        (failed, before)
    );
}

/// A checkpoint that is completed only after its job has begun to roll back is removed.
#[test]
fn checkpoint_completed_after_rollback_is_removed() {
    let mut late = 0;
    for seed in 0..20 {
        let mut scene = JobScenario::new(seed, 4, 6);
        scene
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let (before, procs) = (scene.sim.image_store.count(), scene.sim.procs.len());
        while scene.sim.image_store.count() == before {
            assert!(scene.sim.step(), "no other checkpoint (seed {seed})");
        }
        // The store has the checkpoint, but the master does not know that yet.
        scene.sim.kill_host(host(3));
        scene.sim.handle(
            HostId::MASTER,
            Event::HostLost {
                host: host(3),
                why: "it was killed".into(),
            },
        );
        scene.run_until_restarted(procs);
        let events = list_events(&mut scene.sim, scene.console);
        let told: Vec<&String> = events
            .iter()
            .filter_map(|kind| match kind {
                EventKind::Checkpointed {
                    checkpoint: set, ..
                } => Some(set),
                _ => None,
            })
            .collect();
        let there: Vec<String> = scene
            .list_checkpoints()
            .into_iter()
            .map(|entry| entry.name)
            .collect();
        assert!(
            there.iter().all(|set| told.contains(&set)),
            "{there:?} are there, {told:?} were told (seed {seed})"
        );
        late += usize::from(
            events
                .iter()
                .any(|kind| matches!(kind, EventKind::Restarted { .. })),
        );
    }
    assert!(late > 10, "the job went back {late} times only");
}
