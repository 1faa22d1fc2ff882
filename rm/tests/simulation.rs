//! Simulations of a week of a thousand desktop machines and of a day of three users, and decisions
//! with ten thousand hosts. Use `--no-capture` to print the tables. These tests do not check the
//! time of a decision; `cargo xtask bench decide` does.

mod counting;
mod day;
mod desktop;
mod large;
mod pool;
mod random;
mod week;

use counting::{Allocations, bytes_kept, count_allocations};
use day::{DayComparison, DayResults, DayScenario, ROOMY, SEEDS, TIGHT};
use desktop::desktop;
use large::{
    HOSTS_MAX, Visit, large_snapshot, visit_global_decisions, visit_local_decisions,
    visit_work_plans,
};
use pool::MeasuredTimes;
use pvm_rm::decide::{OwnerState, PlacementPolicy, Snapshot};
use sempa_proto::{HostId, Micros};
use std::collections::BTreeSet;
use week::WeekResults;

/// Returns a selection of the times measured by `cargo xtask bench owners` and `cargo xtask bench
/// migrate`, over their whole range. They are constants, so that the tests do not depend on new
/// measurements.
fn sample_times() -> MeasuredTimes {
    let ms = |all: &[u32]| all.iter().map(|ms| f64::from(*ms) / 1e3).collect();
    MeasuredTimes {
        stops: ms(&[0, 1, 4, 7, 9, 12, 15, 18, 20, 41]),
        clears: ms(&[137, 182, 225, 247, 257, 302, 330, 390, 431, 476, 533, 636]),
        freezes: ms(&[67, 69, 91, 96]),
        moves: ms(&[271, 278, 305, 313]),
    }
}

/// In a week of a thousand desktop machines, guests leave soon after an owner's arrival, and little
/// work is lost.
#[test]
fn week_of_desktops_meets_its_targets() {
    let week = WeekResults::simulate(1, sample_times());
    print!("{}", week.text());
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
    // Guests that remain on a host with an owner were still migrating to it when the owner arrived.
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

/// Asserts that light users hardly wait longer if there is a greedy user.
///
/// A wait lasts from the request until the last process of the job has started. Two hours before
/// the first light job, the greedy user has requested twice the capacity of the pool; see [`day`].
fn assert_fair(day: &DayScenario) {
    let compared = |seed: u64| {
        let DayResults {
            alone,
            contended: beside,
        } = day.run(seed);
        DayComparison::of(day, seed, &alone, &beside)
    };
    // The first two of the seeds that `cargo xtask bench sim` uses.
    let all: Vec<DayComparison> = SEEDS.into_iter().take(2).map(compared).collect();
    print!("{}", DayComparison::table(&all));
    for day in &all {
        let busy = day.greedy.unanswered > 0 && day.greedy.answered > 0;
        assert!(
            busy,
            "the greedy one has not always something to do: {:?}",
            day.greedy
        );
        assert!(day.is_fair(), "{day:?}");
    }
}

/// In a pool where light users alone never wait, they hardly wait if there is a greedy user.
#[test]
fn greedy_user_does_not_delay_others_in_roomy_pool() {
    assert_fair(&ROOMY);
}

/// In a small pool where light users wait for each other, they hardly wait longer if there is a
/// greedy user.
#[test]
fn greedy_user_does_not_delay_others_in_tight_pool() {
    assert_fair(&TIGHT);
}

/// Maximum memory per host in bytes.
const HOST_BYTES_MAX: usize = 4096;
/// All decisions have the expected results with few hosts and with ten thousand.
#[test]
fn decisions_are_correct_at_any_scale() {
    for hosts in [64, HOSTS_MAX] {
        let mut names = BTreeSet::new();
        let mut once = |name, decide: &mut dyn FnMut(usize)| {
            assert!(names.insert(name), "{name} is there twice");
            decide(0);
        };
        visit_local_decisions(hosts, &mut once);
        visit_work_plans(hosts, &mut once);
        visit_global_decisions(hosts, &mut once);
        assert_eq!(names.len(), 21);
    }
}

/// Returns the allocations of each of these decisions by name, including freed ones.
fn allocations_of(
    hosts: u16,
    decisions: fn(u16, &mut Visit<'_>),
) -> Vec<(&'static str, Allocations)> {
    let mut all = Vec::new();
    decisions(hosts, &mut |name, decide| {
        all.push((name, count_allocations(|| decide(0))))
    });
    all
}

/// Decisions that examine only some hosts allocate no list of all hosts.
#[test]
fn local_decisions_do_not_list_all_hosts() {
    // A thousand hosts are more than these decisions examine. With nine thousand more, the
    // additional bytes must be fewer than a list of their ids needs, and the number of blocks must
    // hardly grow. Only a list of the network's zones grows.
    let few = 1024;
    let list = usize::from(HOSTS_MAX - few) * size_of::<HostId>();
    for ((name, few), (_, many)) in allocations_of(few, visit_local_decisions)
        .into_iter()
        .zip(allocations_of(HOSTS_MAX, visit_local_decisions))
    {
        println!("{name:34}{few:?} {many:?}");
        assert!(
            many.bytes < few.bytes + list && many.blocks < 2 * few.blocks,
            "{name}: {few:?} {many:?}"
        );
    }
}

/// The memory per host is less than four kibibytes, independent of the number of hosts.
#[test]
fn host_needs_less_than_four_kibibytes() {
    for hosts in [64, 1024, HostId::INDEX_MAX, HOSTS_MAX] {
        let (snapshot, bytes) = bytes_kept(|| large_snapshot(hosts));
        let tasks: usize = snapshot.hosts.iter().map(|host| host.tasks.len()).sum();
        let empty = |i: u16| desktop(i, OwnerState::Absent { left_at: None });
        let (_, alone) = bytes_kept(|| {
            Snapshot::new(
                Micros(0),
                PlacementPolicy::Load,
                (1..=hosts).map(empty).collect(),
            )
        });
        let (hosts_, alone) = (usize::from(hosts), alone / usize::from(hosts));
        let each = (bytes - alone * hosts_) / tasks;
        println!("{hosts:6} hosts: {alone} bytes for each, and {each} for each task");
        assert!(
            bytes / hosts_ <= HOST_BYTES_MAX,
            "{} bytes for each of {hosts} hosts",
            bytes / hosts_
        );
    }
}
