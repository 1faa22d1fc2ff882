//! Migrations with failing steps, lost hosts and killed tasks.

use super::rng::Rng;
use super::{CopyState, Faults, host, simulate};
use sempa_proto::migration::Step;

/// If a step fails or stalls, exactly one copy of the task runs afterwards.
#[test]
fn failed_step_leaves_exactly_one_running_copy() {
    let mut failure_count = 0;
    for seed in 1..20_000 {
        let simulation = simulate(
            seed,
            Faults {
                step_fails_percent: 12,
                step_stalls_percent: 5,
                ..Faults::default()
            },
        );
        match &simulation.result {
            Some(Ok(_)) => {
                assert_eq!(
                    simulation.copies,
                    (CopyState::Dead, CopyState::Running),
                    "seed {seed}"
                );
                assert_eq!(simulation.location, host(3), "seed {seed}");
            }
            Some(Err(_)) => {
                failure_count += 1;
                assert_eq!(
                    simulation.copies.0,
                    CopyState::Running,
                    "seed {seed}: {:?}",
                    simulation.result
                );
                assert_ne!(simulation.copies.1, CopyState::Running, "seed {seed}");
                assert_eq!(simulation.location, host(2), "seed {seed}");
                assert!(
                    !simulation.source_is_buffering,
                    "seed {seed}: messages are kept for ever"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(
        failure_count > 1000,
        "the faults must bite: {failure_count}"
    );
}

/// If any step fails or stalls, or the target is lost, pre-copied memory is either used by the
/// target or discarded.
#[test]
fn failed_migration_discards_pre_copied_memory() {
    let (mut migrated_count, mut failed_count) = (0, 0);
    for seed in 1..20_000 {
        let lost_host = (seed % 4 == 0).then(|| (host(3), Rng(seed * 35 + 1).below(60_000)));
        let (step_fails_percent, stalls_percent) = (8, 3);
        let (post_copy, pre_copy) = (true, true);
        let faults = Faults {
            uses_post_copy: post_copy,
            uses_pre_copy: pre_copy,
            step_fails_percent,
            step_stalls_percent: stalls_percent,
            lost_host,
            ..Faults::default()
        };
        let simulation = simulate(seed, faults);
        match &simulation.result {
            Some(Ok(_)) => {
                migrated_count += u32::from(simulation.target_receives_pre_copy);
                let (_, stopped_duration, transfer_time) =
                    simulation.final_event_values.expect("it has moved");
                assert!(
                    transfer_time > stopped_duration || !simulation.target_receives_pre_copy,
                    "seed {seed}: the time for which memory went ahead counts"
                );
                assert!(!simulation.pre_copy_discarded, "seed {seed}");
                // The target may have been lost after the migration.
                assert!(
                    simulation.copies == (CopyState::Dead, CopyState::Running)
                        || !simulation.lost_hosts.is_empty(),
                    "seed {seed}"
                );
            }
            // After the step KillSource has begun, the pre-copied memory may outlive the source's
            // copy.
            Some(Err(error)) if error.step >= Step::KillSource => {}
            Some(Err(_)) => {
                assert!(
                    !simulation.source_is_buffering,
                    "seed {seed}: messages are kept for ever"
                );
                assert_eq!(
                    simulation.copies.0,
                    CopyState::Running,
                    "seed {seed}: {:?}",
                    simulation.result
                );
                assert_eq!(
                    simulation.pre_copy_discarded,
                    simulation.is_memory_stream_open && simulation.target_receives_pre_copy,
                    "seed {seed}: {:?}",
                    simulation.result
                );
                failed_count += u32::from(simulation.pre_copy_discarded);
                assert!(
                    simulation.images_dropped || !simulation.is_memory_stream_open,
                    "seed {seed}: a way is left"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(
        migrated_count > 1000 && failed_count > 1000,
        "{migrated_count} {failed_count}"
    );
}

/// With post-copy exactly one copy of the task continues if all memory arrives. If memory is lost,
/// the task ends, and the migration fails in the step Arrive.
#[test]
fn lost_post_copy_memory_ends_the_task() {
    let (mut migrated_count, mut ended_count, mut failed_count) = (0, 0, 0);
    for seed in 1..30_000 {
        let lost_host = (seed % 4 == 0).then(|| (host(2), Rng(seed * 33 + 1).below(60_000)));
        let faults = Faults {
            uses_post_copy: true,
            step_fails_percent: 8,
            lost_host,
            ..Faults::default()
        };
        let simulation = simulate(seed, faults);
        let is_host_lost = !simulation.lost_hosts.is_empty();
        match &simulation.result {
            Some(Ok(_)) => {
                migrated_count += 1;
                assert_eq!(
                    simulation.copies,
                    (CopyState::Dead, CopyState::Running),
                    "seed {seed}"
                );
            }
            Some(Err(error)) if error.step == Step::Arrive => {
                ended_count += 1;
                assert_eq!(
                    simulation.copies,
                    (CopyState::Dead, CopyState::Dead),
                    "seed {seed}"
                );
                assert!(
                    simulation.ownership_transferred || is_host_lost,
                    "seed {seed}"
                );
            }
            Some(Err(_)) if is_host_lost => {
                assert_ne!(simulation.copies.0, CopyState::Running, "seed {seed}")
            }
            Some(Err(_)) => {
                failed_count += 1;
                assert_eq!(
                    simulation.copies.0,
                    CopyState::Running,
                    "seed {seed}: {:?}",
                    simulation.result
                );
                assert_ne!(simulation.copies.1, CopyState::Running, "seed {seed}");
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(
        migrated_count > 1000 && ended_count > 500 && failed_count > 1000,
        "{migrated_count} {ended_count} {failed_count}"
    );
}

/// If the source receives no acknowledgement of the transfer, its copy is still dead before the
/// target's copy runs.
#[test]
fn unacknowledged_transfer_leaves_one_copy() {
    let (mut migrated_count, mut failed_count) = (0, 0);
    for seed in 1..20_000 {
        let simulation = simulate(
            seed,
            Faults {
                lost_ack_percent: 100,
                ..Faults::default()
            },
        );
        match &simulation.result {
            Some(Ok(_)) => {
                migrated_count += 1;
                assert_eq!(
                    simulation.copies,
                    (CopyState::Dead, CopyState::Running),
                    "seed {seed}"
                );
                assert!(
                    simulation.ownership_transferred && simulation.source.is_none(),
                    "seed {seed}"
                );
            }
            Some(Err(error)) => {
                failed_count += 1;
                assert_eq!(error.step, Step::Transfer, "seed {seed}");
                assert_eq!(simulation.copies.0, CopyState::Running, "seed {seed}");
                assert!(
                    !simulation.source_is_buffering,
                    "seed {seed}: messages are kept for ever"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(
        migrated_count > 1000 && failed_count > 1000,
        "{migrated_count} {failed_count}"
    );
}

/// The loss of a host leaves at most one copy. The loss of the target before the source has
/// released the task does not end the task.
#[test]
fn lost_host_leaves_at_most_one_copy() {
    for seed in 1..20_000 {
        let lost_host = host(2 + (seed % 2) as u16);
        let loss_us = Rng(seed * 77 + 1).below(60_000);
        let simulation = simulate(
            seed,
            Faults {
                lost_host: Some((lost_host, loss_us)),
                step_fails_percent: 3,
                ..Faults::default()
            },
        );
        if lost_host == host(2) {
            assert_ne!(simulation.copies.0, CopyState::Running, "seed {seed}");
        } else if !simulation.ownership_transferred && simulation.copies.0 != CopyState::Dead {
            assert_eq!(
                simulation.copies.0,
                CopyState::Running,
                "seed {seed}: {:?}",
                simulation.result
            );
            assert_eq!(simulation.location, host(2), "seed {seed}");
        }
        assert!(simulation.result.is_some(), "seed {seed}");
    }
}

/// A task that is killed during its migration ends, unless the migration was already committed.
#[test]
fn killed_task_ends_unless_committed() {
    for seed in 1..10_000 {
        let kill_us = Rng(seed * 91 + 3).below(60_000);
        let simulation = simulate(
            seed,
            Faults {
                task_killed_at_us: Some(kill_us),
                step_fails_percent: 3,
                ..Faults::default()
            },
        );
        let runs_at_target = simulation.copies.1 == CopyState::Running;
        match &simulation.result {
            Some(Ok(_)) => assert!(
                runs_at_target && simulation.location == host(3),
                "seed {seed}"
            ),
            Some(Err(error)) => assert!(!runs_at_target, "seed {seed}: {error:?}"),
            None => panic!("seed {seed}: the move never ended"),
        }
        assert!(
            !simulation.source_is_buffering || simulation.ownership_transferred,
            "seed {seed}: messages are kept for ever"
        );
    }
}
