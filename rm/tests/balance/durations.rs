//! Completion times of jobs, compared with the best assignment of their tasks.

use crate::{JobSim, SimHost, UNEQUAL_HOSTS, random};
use pvm_rm::decide::PlacementPolicy;
use sempa_tests::assignment::{HostSpeed, best_seconds, uninformed_seconds};

fn speeds(machines: &[SimHost]) -> Vec<HostSpeed> {
    let speed = |m: &SimHost| HostSpeed {
        work_per_second: f64::from(m.speed) / 1e3,
        processors: f64::from(m.cores),
    };
    machines.iter().map(speed).collect()
}

/// Hosts in which tasks get only a fraction of a processor.
const FRACTIONAL_HOSTS: [SimHost; 4] = [
    SimHost {
        cores: 1,
        speed: 100,
    },
    SimHost {
        cores: 1,
        speed: 100,
    },
    SimHost {
        cores: 1,
        speed: 200,
    },
    SimHost {
        cores: 1,
        speed: 400,
    },
];

/// Results of one job, relative to each other.
struct DurationRatios {
    /// Completion time without declared work, relative to the best assignment.
    over_best: f64,
    /// Completion time without declared work, relative to the best schedule without knowledge of
    /// the sizes, in which all tasks progress equally.
    over_blind: f64,
    /// Completion time with declared work, relative to the best assignment.
    declared_over_best: f64,
    /// Completion time with round-robin placement, relative to placement by load and rebalancing
    /// without declared work.
    speedup: f64,
}

/// Simulates `rounds` jobs of twelve tasks, each with `least` to `most` seconds of work.
fn ratios(rounds: usize, least: f64, most: f64) -> Vec<DurationRatios> {
    ratios_on(&UNEQUAL_HOSTS, rounds, least, most)
}

fn ratios_on(machines: &[SimHost], rounds: usize, least: f64, most: f64) -> Vec<DurationRatios> {
    let (mut seed, speeds) = (20_261_121, speeds(machines));
    let round = |_| {
        let sizes: Vec<f64> = (0..12)
            .map(|_| least + (most - least) * random(&mut seed))
            .collect();
        let ours = JobSim::new(machines, &sizes, PlacementPolicy::Load).finish(true) as f64;
        let declared = JobSim::new(machines, &sizes, PlacementPolicy::Load)
            .with_declared_work()
            .finish(true) as f64;
        let in_turn =
            JobSim::new(machines, &sizes, PlacementPolicy::RoundRobin).finish(false) as f64;
        let (best, blind) = (
            best_seconds(&speeds, &sizes),
            uninformed_seconds(&speeds, &sizes),
        );
        let (over_best, over_blind) = (ours / best, ours / blind);
        DurationRatios {
            over_best,
            over_blind,
            declared_over_best: declared / best,
            speedup: in_turn / ours,
        }
    };
    (0..rounds).map(round).collect()
}

fn mean(all: &[DurationRatios], of: impl Fn(&DurationRatios) -> f64) -> f64 {
    all.iter().map(of).sum::<f64>() / all.len() as f64
}

fn worst(all: &[DurationRatios], of: impl Fn(&DurationRatios) -> f64) -> f64 {
    all.iter().map(of).fold(0.0, f64::max)
}

/// On unequal hosts a job finishes within 15 % of the best assignment and 1.5 times faster than
/// with round-robin.
#[test]
fn unequal_hosts_finish_near_best_assignment() {
    // The best assignment knows the sizes of the tasks, the decisions do not. If the sizes differ
    // by at most a factor of three, every job is near the best assignment.
    for DurationRatios {
        over_best,
        speedup: faster,
        ..
    } in ratios(20, 300.0, 900.0)
    {
        assert!(
            over_best <= 1.15 && faster >= 1.5,
            "{over_best:.2} of the best, {faster:.2} times faster"
        );
    }
    // If the sizes differ by up to a factor of ten, a large task may share its processor for a long
    // time before its size is known. So only the average is near the best assignment.
    let wide = ratios(20, 100.0, 1000.0);
    assert!(
        mean(&wide, |r| r.over_best) <= 1.15,
        "{:.2}",
        mean(&wide, |r| r.over_best)
    );
    assert!(wide.iter().all(|r| r.speedup >= 1.5));
}

/// With declared work a job finishes within 15 % of the best assignment, however much its tasks
/// differ.
#[test]
fn declared_work_finishes_near_best_assignment() {
    for all in [
        ratios(100, 300.0, 900.0),
        ratios(100, 100.0, 1000.0),
        ratios(100, 20.0, 1000.0),
    ] {
        let (mean, worst) = (
            mean(&all, |r| r.declared_over_best),
            worst(&all, |r| r.declared_over_best),
        );
        println!("work declared: {mean:.3} of the best assignment on average, {worst:.3} at worst");
        assert!(worst <= 1.15 && mean <= 1.05, "{worst:.3} {mean:.3}");
    }
}

/// Without declared work the completion time of a job is near the best possible without knowledge
/// of the sizes.
#[test]
fn undeclared_work_finishes_near_the_possible() {
    for all in [
        ratios(100, 300.0, 900.0),
        ratios(100, 100.0, 1000.0),
        ratios(100, 20.0, 1000.0),
    ] {
        let (mean, worst) = (mean(&all, |r| r.over_blind), worst(&all, |r| r.over_blind));
        let (mean_best, worst_best) = (
            self::mean(&all, |r| r.over_best),
            self::worst(&all, |r| r.over_best),
        );
        println!(
            "nothing declared: {mean:.3} of what is possible on average, {worst:.3} at worst; {mean_best:.3} and {worst_best:.3} of the best"
        );
        assert!(worst <= 1.2 && mean <= 1.06, "{worst:.3} {mean:.3}");
    }
}

/// Each task migrates at most twice, because the tasks are short: a migration takes a hundredth of
/// the job's completion time.
#[test]
fn short_job_finishes_near_best_despite_cooldown() {
    let all = ratios_on(&FRACTIONAL_HOSTS, 200, 2.5, 14.5);
    let of = |of: fn(&DurationRatios) -> f64| (mean(&all, of), worst(&all, of));
    let (untold, declared) = (of(|r| r.over_best), of(|r| r.declared_over_best));
    let slow = all.iter().filter(|r| r.over_best > 1.15).count();
    println!(
        "nothing declared: {untold:.3?} of the best assignment on average and at worst; work declared: {declared:.3?}"
    );
    println!(
        "{slow} of {} of which nothing was declared took more than 1.15 times the best",
        all.len()
    );
    assert!(untold.0 <= 1.08 && untold.1 <= 1.25, "{untold:.3?}");
    assert!(declared.0 <= 1.06 && declared.1 <= 1.25, "{declared:.3?}");
}
