//! Simulates runs under faults: workers that are killed, paused and migrated, and masters that
//! crash. Every task must be accepted exactly once.

mod world;

use proptest::prelude::*;
use sempa_work_dispatch::{PausePolicy, RetryPolicy, Settings};
use world::{Scenario, World};

const SECOND: u64 = 1_000_000;

fn scenario() -> Scenario {
    Scenario {
        first_tasks: 300,
        children: 2,
        workers: 8,
        hosts: 4,
        duration_max: 100_000,
        poison_every: 0,
        kills: 0,
        pauses: 0,
        pause_max: 3 * SECOND,
        migrations: 0,
        crashes: 0,
        settings: Settings::default(),
    }
}

#[test]
fn undisturbed_run_dispatches_each_task_once() {
    let settings = Settings {
        second_copies: false,
        ..Settings::default()
    };
    let mut world = World::new(
        Scenario {
            settings,
            ..scenario()
        },
        1,
    );
    let statistics = world.run();
    assert_eq!(
        statistics.counts.attempts - statistics.counts.tasks_recalled,
        900
    );
    assert_eq!(statistics.counts.results_discarded, 0);
}

#[test]
fn tasks_of_lost_workers_run_again() {
    let faulty = Scenario {
        kills: 50_000,
        ..scenario()
    };
    let mut world = World::new(faulty, 2);
    let statistics = world.run();
    assert!(world.kills > 10);
    assert!(statistics.counts.attempts_lost >= 10);
    assert_eq!(statistics.counts.attempts_failed, 0, "no such loss counts");
}

#[test]
fn tasks_that_kill_workers_are_quarantined_with_few_losses() {
    let poisonous = Scenario {
        poison_every: 50,
        ..scenario()
    };
    let attempts_max = u64::from(RetryPolicy::default().attempts_max);
    let mut world = World::new(poisonous, 3);
    let statistics = world.run();
    // A loss with several suspects blames none of them.
    assert!(world.kills >= 6 * attempts_max && world.kills <= 6 * (attempts_max + 1));
    assert_eq!(statistics.counts.attempts_failed, 6 * attempts_max);
}

#[test]
fn crashed_masters_lose_nothing_that_was_stored() {
    let crashing = Scenario {
        crashes: 20_000,
        kills: 10_000,
        ..scenario()
    };
    let mut world = World::new(crashing, 4);
    world.run();
    assert!(world.crashes > 3);
}

/// A pool of 500 workers on desktops whose owners come and go for a week. Each worker is paused or
/// lost several times a day.
#[test]
fn week_of_owners_with_500_workers() {
    let week = 7 * 24 * 3_600 * SECOND;
    let owners = Scenario {
        first_tasks: 40_000,
        children: 0,
        workers: 500,
        hosts: 250,
        duration_max: 2 * week * 500 / 40_000,
        kills: 30_000,
        pauses: 60_000,
        pause_max: 4 * 3_600 * SECOND,
        migrations: 60_000,
        crashes: 100,
        poison_every: 10_000,
        ..scenario()
    };
    let mut world = World::new(owners, 5);
    let statistics = world.run();
    let days = world.now as f64 / (24.0 * 3_600.0 * SECOND as f64);
    println!(
        "{days:.1} days, {} losses, {} crashes, {} migrations, {:?}",
        world.kills, world.crashes, world.migrations, statistics.counts
    );
    assert!(days > 6.0 && world.kills > 500 && world.crashes > 0);
}

fn pause_policies() -> impl Strategy<Value = PausePolicy> {
    prop_oneof![
        Just(PausePolicy::Keep),
        Just(PausePolicy::Move),
        Just(PausePolicy::Duplicate),
        (0..2 * SECOND).prop_map(|after| PausePolicy::Reassign { after }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Each task is accepted exactly once under any mixture of faults and policies.
    #[test]
    fn every_task_counts_once(
        seed in any::<u64>(),
        pause_policy in pause_policies(),
        second_copies in any::<bool>(),
        look_ahead in prop_oneof![Just(0), Just(20_000u64), Just(500_000u64)],
        duration_max in prop_oneof![Just(50u64), Just(5_000u64), Just(3 * SECOND)],
        rates in (0..60_000u64, 0..60_000u64, 0..60_000u64, 0..20_000u64),
        poison_every in prop_oneof![Just(0u64), Just(40u64)],
        attempt_timeout in prop_oneof![Just(None), Just(Some(20 * SECOND))],
    ) {
        let settings = Settings {
            pause_policy,
            second_copies,
            look_ahead,
            attempt_timeout,
            ..Settings::default()
        };
        let (kills, pauses, migrations, crashes) = rates;
        let faulty = Scenario {
            first_tasks: 120,
            kills,
            pauses,
            migrations,
            crashes,
            duration_max,
            poison_every,
            settings,
            ..scenario()
        };
        World::new(faulty, seed).run();
    }
}
