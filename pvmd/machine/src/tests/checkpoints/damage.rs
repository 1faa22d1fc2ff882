//! Checkpoints that the store finds damaged.

use super::JobScenario;
use crate::tests::scenario::list_events;
use crate::tests::sim::{host, seeds};
use sempa_proto::Micros;
use sempa_proto::event::EventKind;

/// A job with three checkpoints, the oldest first.
fn job_with_checkpoints(seed: u64) -> (JobScenario, Vec<String>) {
    let mut scenario = JobScenario::new(seed, 4, 6);
    let checkpoints = (0..3).map(|_| {
        scenario.exchange_messages(20);
        let result = scenario.checkpoint(Some(Micros::from_secs(1000)));
        result
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name
    });
    let checkpoints = checkpoints.collect();
    (scenario, checkpoints)
}

/// Damages a checkpoint: one of the job's images, or what is read first.
fn damage(scenario: &mut JobScenario, checkpoint: &str) {
    let image = (scenario.sim.rng.below(2) == 0).then(|| scenario.random_task());
    scenario
        .sim
        .image_store
        .damage
        .insert(checkpoint.to_string(), image);
}

/// Returns the damaged checkpoints that the event log names, each with its replacement, and the
/// number of failed restarts.
fn damage_events(scenario: &mut JobScenario) -> (Vec<(String, Option<String>)>, usize) {
    let events = list_events(&mut scenario.sim, scenario.console);
    let is_failure = |event: &&EventKind| matches!(event, EventKind::RestartFailed { .. });
    let failure_count = events.iter().filter(is_failure).count();
    let damaged = events.into_iter().filter_map(|event| match event {
        EventKind::CheckpointDamaged {
            checkpoint,
            replacement,
            ..
        } => Some((checkpoint, replacement)),
        _ => None,
    });
    (damaged.collect(), failure_count)
}

/// A job whose newest checkpoints are damaged rolls back to the newest intact one. Each damaged
/// checkpoint is tried once.
#[test]
fn rollback_skips_damaged_checkpoints() {
    for seed in seeds(40) {
        let (mut scenario, checkpoints) = job_with_checkpoints(seed);
        let damaged_count = 1 + scenario.sim.rng.below(2) as usize;
        for checkpoint in &checkpoints[3 - damaged_count..] {
            damage(&mut scenario, checkpoint);
        }
        let process_count = scenario.sim.procs.len();
        let lost_host = host(2 + scenario.sim.rng.below(3) as u16);
        scenario.sim.kill_host(lost_host);
        scenario.run_until_restarted(process_count);
        let expected_events: Vec<(String, Option<String>)> = (1..=damaged_count)
            .map(|n| (checkpoints[3 - n].clone(), Some(checkpoints[2 - n].clone())))
            .collect();
        assert_eq!(
            damage_events(&mut scenario),
            (expected_events, damaged_count),
            "seed {seed}"
        );
        let marked_checkpoints = scenario.sim.image_store.marked_checkpoints.iter();
        assert!(
            marked_checkpoints.eq(&checkpoints[3 - damaged_count..]),
            "seed {seed}"
        );
    }
}

/// A store that cannot be read for a time does not end the rollback.
#[test]
fn rollback_waits_for_a_store_that_cannot_be_read() {
    for seed in seeds(20) {
        let (mut scenario, checkpoints) = job_with_checkpoints(seed);
        damage(&mut scenario, &checkpoints[2]);
        scenario.sim.image_store.failing_search_count = 3;
        let process_count = scenario.sim.procs.len();
        scenario.sim.kill_host(host(3));
        scenario.run_until_restarted(process_count);
        let (events, failure_count) = damage_events(&mut scenario);
        let expected_event = (checkpoints[2].clone(), Some(checkpoints[1].clone()));
        assert_eq!(
            (events, failure_count),
            (vec![expected_event], 4),
            "seed {seed}"
        );
    }
}

/// A job that rolls back waits for a store that contains no checkpoint of the job: the file system
/// may not be mounted.
#[test]
fn rollback_waits_for_a_store_that_is_empty() {
    for seed in seeds(20) {
        let (mut scenario, checkpoints) = job_with_checkpoints(seed);
        let real_store = std::mem::take(&mut scenario.sim.image_store);
        let process_count = scenario.sim.procs.len();
        scenario.sim.kill_host(host(3));
        scenario.sim.advance(Micros::from_secs(60));
        scenario.sim.image_store.adopt_checkpoints(real_store);
        scenario.run_until_restarted(process_count);
        let (events, failure_count) = damage_events(&mut scenario);
        assert!(events.is_empty() && failure_count > 0, "seed {seed}");
        assert!(!checkpoints.is_empty());
    }
}

/// A checkpoint that does not exist is refused, but is not called damaged: the user may have
/// mistyped its name.
#[test]
fn missing_checkpoint_is_not_called_damaged() {
    let (mut scenario, _) = job_with_checkpoints(1);
    scenario.restart("set-99", &[]).expect_err("it is missing");
    assert_eq!(damage_events(&mut scenario), (Vec::new(), 1));
    assert!(scenario.sim.image_store.marked_checkpoints.is_empty());
}

/// If no checkpoint of a job is intact, the rollback ends with this reason.
#[test]
fn rollback_ends_if_all_checkpoints_are_damaged() {
    for seed in seeds(5) {
        let (mut scenario, checkpoints) = job_with_checkpoints(seed);
        for checkpoint in &checkpoints {
            damage(&mut scenario, checkpoint);
        }
        let process_count = scenario.sim.procs.len();
        let lost_host = host(2 + scenario.sim.rng.below(3) as u16);
        scenario.sim.kill_host(lost_host);
        scenario.sim.advance(Micros::from_secs(3600));
        let (events, failure_count) = damage_events(&mut scenario);
        assert_eq!(
            (events.len(), failure_count, scenario.sim.procs.len()),
            (3, 3, process_count),
            "seed {seed}"
        );
        assert_eq!(events[2], (checkpoints[0].clone(), None), "seed {seed}");

        // The user can restart the job when the checkpoint is repaired.
        scenario.sim.image_store.damage.clear();
        let restarted_tasks = scenario.restart(&checkpoints[1], &[]);
        let restarted_tasks = restarted_tasks.unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert_eq!(restarted_tasks.len(), scenario.tids.len(), "seed {seed}");
        scenario.run_until_all_connected();
    }
}

/// A damaged checkpoint that a user restarts is refused and marked, and nothing of it runs. The
/// user chooses which other one to use.
#[test]
fn requested_restart_of_damaged_checkpoint_is_refused() {
    for seed in seeds(20) {
        let (mut scenario, checkpoints) = job_with_checkpoints(seed);
        damage(&mut scenario, &checkpoints[2]);
        scenario.kill_all_tasks();
        for _ in 0..3 {
            scenario
                .restart(&checkpoints[2], &[])
                .expect_err("it is damaged");
        }
        let (events, failure_count) = damage_events(&mut scenario);
        let expected_event = (checkpoints[2].clone(), None);
        assert_eq!(
            (events, failure_count),
            (vec![expected_event; 3], 3),
            "seed {seed}"
        );
        scenario.restart_and_exchange(&checkpoints[1]);
    }
}
