//! Migrations with failing steps, lost hosts and killed tasks.

use super::rng::Rng;
use super::{Copy, Faults, host, simulate};
use sempa_proto::migration::Step;

/// If a step fails or stalls, exactly one copy of the task runs afterwards.
#[test]
fn failed_step_leaves_exactly_one_running_copy() {
    let mut failures = 0;
    for seed in 1..20_000 {
        let world = simulate(
            seed,
            Faults {
                step_fails_percent: 12,
                stalls_percent: 5,
                ..Faults::default()
            },
        );
        match &world.result {
            Some(Ok(_)) => {
                assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
                assert_eq!(world.location, host(3), "seed {seed}");
            }
            Some(Err(_)) => {
                failures += 1;
                assert_eq!(
                    world.copies.0,
                    Copy::Running,
                    "seed {seed}: {:?}",
                    world.result
                );
                assert_ne!(world.copies.1, Copy::Running, "seed {seed}");
                assert_eq!(world.location, host(2), "seed {seed}");
                assert!(
                    !world.source_is_buffering,
                    "seed {seed}: messages are kept for ever"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(failures > 1000, "the faults must bite: {failures}");
}

/// If any step fails or stalls, or the target is lost, pre-copied memory is either used by the
/// target or discarded.
#[test]
fn failed_migration_discards_pre_copied_memory() {
    let (mut moved, mut stayed) = (0, 0);
    for seed in 1..20_000 {
        let lost_host = (seed % 4 == 0).then(|| (host(3), Rng(seed * 35 + 1).below(60_000)));
        let (step_fails_percent, stalls_percent) = (8, 3);
        let (post_copy, pre_copy) = (true, true);
        let faults = Faults {
            post_copy,
            pre_copy,
            step_fails_percent,
            stalls_percent,
            lost_host,
            ..Faults::default()
        };
        let world = simulate(seed, faults);
        match &world.result {
            Some(Ok(_)) => {
                moved += u32::from(world.target_receives_pre_copy);
                let (_, frozen, whole) = world.final_event_values.expect("it has moved");
                assert!(
                    whole > frozen || !world.target_receives_pre_copy,
                    "seed {seed}: the time for which memory went ahead counts"
                );
                assert!(!world.pre_copy_discarded, "seed {seed}");
                // The target may have been lost after the migration.
                assert!(
                    world.copies == (Copy::Dead, Copy::Running) || !world.lost_hosts.is_empty(),
                    "seed {seed}"
                );
            }
            // From this step on the pre-copied memory outlives the source's copy.
            Some(Err(error)) if error.step >= Step::KillSource => {}
            Some(Err(_)) => {
                assert!(
                    !world.source_is_buffering,
                    "seed {seed}: messages are kept for ever"
                );
                assert_eq!(
                    world.copies.0,
                    Copy::Running,
                    "seed {seed}: {:?}",
                    world.result
                );
                assert_eq!(
                    world.pre_copy_discarded,
                    world.memory_stream_open && world.target_receives_pre_copy,
                    "seed {seed}: {:?}",
                    world.result
                );
                stayed += u32::from(world.pre_copy_discarded);
                assert!(
                    world.images_dropped || !world.memory_stream_open,
                    "seed {seed}: a way is left"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(moved > 1000 && stayed > 1000, "{moved} {stayed}");
}

/// With post-copy exactly one copy of the task continues if all memory arrives. If memory is lost,
/// the task ends, and the migration fails in the step Arrive.
#[test]
fn lost_post_copy_memory_ends_the_task() {
    let (mut moved, mut died, mut stayed) = (0, 0, 0);
    for seed in 1..30_000 {
        let lost_host = (seed % 4 == 0).then(|| (host(2), Rng(seed * 33 + 1).below(60_000)));
        let faults = Faults {
            post_copy: true,
            step_fails_percent: 8,
            lost_host,
            ..Faults::default()
        };
        let world = simulate(seed, faults);
        let lost = !world.lost_hosts.is_empty();
        match &world.result {
            Some(Ok(_)) => {
                moved += 1;
                assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
            }
            Some(Err(error)) if error.step == Step::Arrive => {
                died += 1;
                assert_eq!(world.copies, (Copy::Dead, Copy::Dead), "seed {seed}");
                assert!(world.ownership_transferred || lost, "seed {seed}");
            }
            Some(Err(_)) if lost => assert_ne!(world.copies.0, Copy::Running, "seed {seed}"),
            Some(Err(_)) => {
                stayed += 1;
                assert_eq!(
                    world.copies.0,
                    Copy::Running,
                    "seed {seed}: {:?}",
                    world.result
                );
                assert_ne!(world.copies.1, Copy::Running, "seed {seed}");
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(
        moved > 1000 && died > 500 && stayed > 1000,
        "{moved} {died} {stayed}"
    );
}

/// If the source receives no acknowledgement of the transfer, its copy is still dead before the
/// target's copy runs.
#[test]
fn unacknowledged_transfer_leaves_one_copy() {
    let (mut moved, mut stayed) = (0, 0);
    for seed in 1..20_000 {
        let world = simulate(
            seed,
            Faults {
                lost_ack_percent: 100,
                ..Faults::default()
            },
        );
        match &world.result {
            Some(Ok(_)) => {
                moved += 1;
                assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
                assert!(
                    world.ownership_transferred && world.source.is_none(),
                    "seed {seed}"
                );
            }
            Some(Err(error)) => {
                stayed += 1;
                assert_eq!(error.step, Step::Transfer, "seed {seed}");
                assert_eq!(world.copies.0, Copy::Running, "seed {seed}");
                assert!(
                    !world.source_is_buffering,
                    "seed {seed}: messages are kept for ever"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(moved > 1000 && stayed > 1000, "{moved} {stayed}");
}

/// The loss of a host leaves at most one copy. The loss of the target before the source has
/// released the task does not end the task.
#[test]
fn lost_host_leaves_at_most_one_copy() {
    for seed in 1..20_000 {
        let lost = host(2 + (seed % 2) as u16);
        let at = Rng(seed * 77 + 1).below(60_000);
        let world = simulate(
            seed,
            Faults {
                lost_host: Some((lost, at)),
                step_fails_percent: 3,
                ..Faults::default()
            },
        );
        if lost == host(2) {
            assert_ne!(world.copies.0, Copy::Running, "seed {seed}");
        } else if !world.ownership_transferred && world.copies.0 != Copy::Dead {
            assert_eq!(
                world.copies.0,
                Copy::Running,
                "seed {seed}: {:?}",
                world.result
            );
            assert_eq!(world.location, host(2), "seed {seed}");
        }
        assert!(world.result.is_some(), "seed {seed}");
    }
}

/// A task that is killed during its migration ends, unless the migration was already committed.
#[test]
fn killed_task_ends_unless_committed() {
    for seed in 1..10_000 {
        let at = Rng(seed * 91 + 3).below(60_000);
        let world = simulate(
            seed,
            Faults {
                task_killed_at: Some(at),
                step_fails_percent: 3,
                ..Faults::default()
            },
        );
        let runs_there = world.copies.1 == Copy::Running;
        match &world.result {
            Some(Ok(_)) => assert!(runs_there && world.location == host(3), "seed {seed}"),
            Some(Err(error)) => assert!(!runs_there, "seed {seed}: {error:?}"),
            None => panic!("seed {seed}: the move never ended"),
        }
        assert!(
            !world.source_is_buffering || world.ownership_transferred,
            "seed {seed}: messages are kept for ever"
        );
    }
}
