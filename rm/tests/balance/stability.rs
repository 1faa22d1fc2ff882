//! Noise in the measurements causes no migrations, and periodic load causes only few.

use crate::{DECISION_INTERVAL_S, JobSim, SimHost, next_random};
use proptest::prelude::*;
use pvm_rm::decide::{IDLE_TARGET_COOLDOWN, PlacementPolicy, REBALANCES_MAX};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Tasks with equal amounts of work that were placed by load never migrate, whatever the
    /// numbers and speeds of processors are.
    #[test]
    fn balanced_hosts_get_no_migrations(
        hosts in prop::collection::vec((1_u32..5, 500_i32..2000), 1..8), task_count in 1_usize..30,
    ) {
        let hosts: Vec<SimHost> = hosts.into_iter().map(|(cores, speed)| SimHost { cores, speed }).collect();
        let mut sim = JobSim::new(&hosts, &vec![1e9; task_count], PlacementPolicy::Load);
        let external_threads = vec![0.0; hosts.len()];
        for _ in 0..600 {
            if sim.now_s.is_multiple_of(DECISION_INTERVAL_S) {
                sim.rebalance(&external_threads);
            }
            sim.advance_second(&external_threads);
        }
        prop_assert!(sim.rebalances.is_empty(), "{:?}", sim.rebalances);
    }

    /// Noise in the measurements causes no migration. The external load uses a part of a processor
    /// constantly, and a whole processor briefly from time to time.
    #[test]
    fn noise_causes_no_migration(
        hosts in prop::collection::vec((1_u32..5, 500_i32..2000), 1..8),
        works_s in prop::collection::vec(1e8_f64..1e9, 1..30), seed in any::<u64>(),
    ) {
        let hosts: Vec<SimHost> = hosts.into_iter().map(|(cores, speed)| SimHost { cores, speed }).collect();
        let (mut sim, mut seed) = (JobSim::new(&hosts, &works_s, PlacementPolicy::Load), seed | 1);
        for _ in 0..600 {
            let mut noise = || if next_random(&mut seed) < 0.05 { 1.0 } else { 0.2 * next_random(&mut seed) };
            let external_threads: Vec<f64> = hosts.iter().map(|_| noise()).collect();
            if sim.now_s.is_multiple_of(DECISION_INTERVAL_S) {
                sim.rebalance(&external_threads);
            }
            sim.advance_second(&external_threads);
        }
        prop_assert!(sim.rebalances.is_empty(), "{:?}", sim.rebalances);
    }

    /// External load that starts and stops periodically for two hours causes only few migrations,
    /// whatever its period and its phases on the hosts are ([`assert_no_flapping`]).
    #[test]
    fn oscillating_load_does_not_make_tasks_flap(
        period_s in 5_u64..600, phase_s in 0_u64..600, thread_count in 1_u32..6, host_count in 2_usize..5, is_work_declared in any::<bool>(),
    ) {
        assert_no_flapping(period_s, phase_s, thread_count, host_count, is_work_declared)?;
    }
}

/// Load periods that caused many migrations in earlier versions cause only few. In those versions
/// the load was sampled only briefly, always in the same phase, or when it differed most from the
/// mean.
#[test]
fn known_load_periods_cause_no_flapping() {
    let cases = [
        (15, 40, 4, 4),
        (26, 470, 4, 3),
        (5, 4, 5, 4),
        (5, 3, 2, 3),
        (15, 4, 5, 4),
        (19, 12, 5, 4),
        (22, 0, 5, 4),
        (27, 2, 5, 4),
    ];
    for (period_s, phase_s, thread_count, host_count) in cases {
        for is_work_declared in [false, true] {
            assert_no_flapping(
                period_s,
                phase_s,
                thread_count,
                host_count,
                is_work_declared,
            )
            .unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

/// Asserts that external load that alternates between hosts for two hours causes only few
/// migrations: each task makes at most [`REBALANCES_MAX`] migrations per hour, with a cooldown
/// between them. If the period is at most a minute, the number of all migrations is at most the
/// number of hosts.
fn assert_no_flapping(
    period_s: u64,
    phase_s: u64,
    thread_count: u32,
    host_count: usize,
    is_work_declared: bool,
) -> Result<(), TestCaseError> {
    let sim_hosts = vec![
        SimHost {
            cores: 2,
            speed: 1000
        };
        host_count
    ];
    let mut sim = JobSim::new(&sim_hosts, &vec![1e9; host_count], PlacementPolicy::Load);
    if is_work_declared {
        sim = sim.with_declared_work();
    }
    for _ in 0..7200 {
        let has_load = |i: usize| (sim.now_s + phase_s * i as u64) / period_s % 2 == i as u64 % 2;
        let external_threads: Vec<f64> = (0..host_count)
            .map(|i| {
                if has_load(i) {
                    f64::from(thread_count)
                } else {
                    0.0
                }
            })
            .collect();
        if sim.now_s.is_multiple_of(DECISION_INTERVAL_S) {
            sim.rebalance(&external_threads);
        }
        sim.advance_second(&external_threads);
    }
    let mut times_by_task = BTreeMap::<Tid, Vec<u64>>::new();
    for (time_s, rebalance) in &sim.rebalances {
        times_by_task
            .entry(rebalance.tid)
            .or_default()
            .push(*time_s);
    }
    for times in times_by_task.values() {
        let count_in_hour = |time_s: &u64| {
            times
                .iter()
                .filter(|t| (*time_s..*time_s + 3600).contains(t))
                .count()
        };
        prop_assert!(
            times
                .iter()
                .all(|time_s| count_in_hour(time_s) <= REBALANCES_MAX),
            "{:?}",
            times
        );
        prop_assert!(
            times
                .windows(2)
                .all(|w| Micros::from_secs(w[1] - w[0]) >= IDLE_TARGET_COOLDOWN),
            "{:?}",
            times
        );
    }
    if period_s <= 60 {
        prop_assert!(
            sim.rebalances.len() <= host_count,
            "{} moves: {:?}",
            sim.rebalances.len(),
            times_by_task
        );
    }
    Ok(())
}
