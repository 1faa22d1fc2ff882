//! Simulations of a week of a thousand desktop machines and of a day of three users, and decisions
//! with ten thousand hosts. Use `--no-capture` to print the tables. These tests do not check the
//! time of a decision; `cargo xtask bench decide` does.

mod counting;
mod day;
mod desktop;
mod desktop_pool;
mod large;
mod rng;
mod week;

use counting::{Allocations, count_allocations, measure_live_bytes};
use day::{DayComparison, DayResults, DayScenario, ROOMY_POOL, SEEDS, TIGHT_POOL};
use desktop::desktop_host;
use desktop_pool::MeasuredTimes;
use large::{
    HOSTS_MAX, VisitDecisionFn, large_snapshot, visit_global_decisions, visit_local_decisions,
    visit_work_plans,
};
use pvm_rm::decide::{OwnerState, PlacementPolicy, Snapshot};
use sempa_proto::{HostId, Micros};
use std::collections::BTreeSet;
use week::WeekResults;

/// Returns a selection of the times that `cargo xtask bench owners` and `cargo xtask bench migrate`
/// have measured. The selection covers their whole range. The times are constants, so that the
/// tests do not depend on new measurements.
fn sample_times() -> MeasuredTimes {
    let ms = |times_ms: &[u32]| times_ms.iter().map(|ms| f64::from(*ms) / 1e3).collect();
    MeasuredTimes {
        stop_s: ms(&[0, 1, 4, 7, 9, 12, 15, 18, 20, 41]),
        clear_s: ms(&[137, 182, 225, 247, 257, 302, 330, 390, 431, 476, 533, 636]),
        freeze_s: ms(&[67, 69, 91, 96]),
        migration_s: ms(&[271, 278, 305, 313]),
    }
}

/// In a week of a thousand desktop machines, no guest is left on a host two seconds after the
/// arrival of the host's owner. Migrations cost at most 0.1 % of the work.
#[test]
fn week_of_desktops_meets_its_targets() {
    let week = WeekResults::simulate(1, sample_times());
    print!("{}", week.format_text());
    assert!(
        (380.0..=420.0).contains(&week.free_mean) && week.free_max <= 814,
        "{} {}",
        week.free_mean,
        week.free_max
    );
    assert!(
        week.clean_s.most <= 2.0,
        "an owner had guests for {} s",
        week.clean_s.most
    );
    assert!(
        week.untold_s.count > 1000 && week.left_beside == 0,
        "{} were left beside an owner",
        week.left_beside
    );
    // A guest that is still migrating to a host when the owner arrives there is evicted only after
    // that migration. The delay can therefore exceed zero.
    assert!(
        week.untold_s.most <= 1.0,
        "a guest was told to leave {} s after its owner had come",
        week.untold_s.most
    );
    assert!(
        week.lost <= 0.001,
        "{} of the work was lost in moves",
        week.lost
    );
    assert!(week.work >= 0.88, "{} of what an oracle does", week.work);
}

/// Asserts that a greedy user does not prolong the waits of light users by more than
/// [`DayComparison::is_fair`] allows.
///
/// A wait lasts from the request until the last process of the job has started. Two hours before
/// the first light job, the greedy user has requested twice the capacity of the pool; see [`day`].
fn assert_fair(day: &DayScenario) {
    let compare_day = |seed: u64| {
        let DayResults {
            without_greedy,
            with_greedy,
        } = day.run(seed);
        DayComparison::from_runs(day, seed, &without_greedy, &with_greedy)
    };
    // `cargo xtask bench sim` uses all seeds. This test uses only the first two.
    let comparisons: Vec<DayComparison> = SEEDS.into_iter().take(2).map(compare_day).collect();
    print!("{}", DayComparison::format_table(&comparisons));
    for day in &comparisons {
        let is_greedy_active = day.greedy.unanswered > 0 && day.greedy.answered > 0;
        assert!(
            is_greedy_active,
            "the greedy one has not always something to do: {:?}",
            day.greedy
        );
        assert!(day.is_fair(), "{day:?}");
    }
}

/// In a pool where light users alone never wait, they hardly wait if there is a greedy user.
#[test]
fn greedy_user_does_not_delay_others_in_roomy_pool() {
    assert_fair(&ROOMY_POOL);
}

/// In a small pool where light users wait for each other, they hardly wait longer if there is a
/// greedy user.
#[test]
fn greedy_user_does_not_delay_others_in_tight_pool() {
    assert_fair(&TIGHT_POOL);
}

/// Maximum memory of a snapshot per host, in bytes.
const HOST_BYTES_MAX: usize = 4096;
/// The same 21 decisions have the expected results with 64 and with [`HOSTS_MAX`] hosts.
#[test]
fn decisions_are_correct_at_any_scale() {
    for hosts in [64, HOSTS_MAX] {
        let mut names = BTreeSet::new();
        let mut check_decision = |name, decide: &mut dyn FnMut(usize)| {
            assert!(names.insert(name), "{name} is there twice");
            decide(0);
        };
        visit_local_decisions(hosts, &mut check_decision);
        visit_work_plans(hosts, &mut check_decision);
        visit_global_decisions(hosts, &mut check_decision);
        assert_eq!(names.len(), 21);
    }
}

/// Returns the name and the allocations of each decision that `decisions` visits. The allocations
/// include freed memory.
fn decision_allocations(
    host_count: u16,
    decisions: fn(u16, &mut VisitDecisionFn<'_>),
) -> Vec<(&'static str, Allocations)> {
    let mut named_allocations = Vec::new();
    decisions(host_count, &mut |name, decide| {
        named_allocations.push((name, count_allocations(|| decide(0))))
    });
    named_allocations
}

#[test]
fn local_decisions_do_not_list_all_hosts() {
    // These decisions examine fewer than a thousand hosts. With nine thousand more hosts, the
    // additional bytes must be fewer than a list of the ids of those hosts needs. The number of
    // blocks must be less than twice as large. Only a list of the network's zones grows.
    let few = 1024;
    let id_list_bytes = usize::from(HOSTS_MAX - few) * size_of::<HostId>();
    for ((name, few), (_, many)) in decision_allocations(few, visit_local_decisions)
        .into_iter()
        .zip(decision_allocations(HOSTS_MAX, visit_local_decisions))
    {
        println!("{name:34}{few:?} {many:?}");
        assert!(
            many.bytes < few.bytes + id_list_bytes && many.block_count < 2 * few.block_count,
            "{name}: {few:?} {many:?}"
        );
    }
}

/// A snapshot needs at most [`HOST_BYTES_MAX`] bytes per host, including the tasks of the host, for
/// every number of hosts.
#[test]
fn host_needs_less_than_four_kibibytes() {
    for hosts in [64, 1024, HostId::INDEX_MAX, HOSTS_MAX] {
        let (snapshot, bytes) = measure_live_bytes(|| large_snapshot(hosts));
        let task_total: usize = snapshot.hosts.iter().map(|host| host.tasks.len()).sum();
        let empty_host = |i: u16| desktop_host(i, OwnerState::Absent { left_at: None });
        let (_, empty_host_bytes) = measure_live_bytes(|| {
            Snapshot::new(
                Micros(0),
                PlacementPolicy::Load,
                (1..=hosts).map(empty_host).collect(),
            )
        });
        let (host_count, empty_host_bytes) =
            (usize::from(hosts), empty_host_bytes / usize::from(hosts));
        let bytes_per_task = (bytes - empty_host_bytes * host_count) / task_total;
        println!(
            "{hosts:6} hosts: {empty_host_bytes} bytes for each, and {bytes_per_task} for each task"
        );
        assert!(
            bytes / host_count <= HOST_BYTES_MAX,
            "{} bytes for each of {hosts} hosts",
            bytes / host_count
        );
    }
}
