//! A week of a thousand desktops, a day of three users, and decisions with ten thousand hosts. Run with `--no-capture` to see
//! the tables. How long a decision takes is no test: `cargo xtask bench decide`.

mod counting;
mod day;
mod desktop;
mod large;
mod pool;
mod random;
mod week;

use counting::{Taken, bytes_kept, taken};
use day::{Both, Compared, Day, ROOMY, SEEDS, TIGHT};
use desktop::desktop;
use large::{HOSTS_MAX, Visit, large, looks_at_all, looks_at_some, plans};
use pool::Times;
use pvm_rm::decide::{Owner, Policy, Snapshot};
use sempa_proto::{HostId, Micros};
use std::collections::BTreeSet;
use week::Week;

/// Some of the times that `cargo xtask bench owners` and `cargo xtask bench migrate` have measured, over their whole range: on the
/// next measurement no test depends.
fn usual() -> Times {
    let ms = |all: &[u32]| all.iter().map(|ms| f64::from(*ms) / 1e3).collect();
    Times {
        stops: ms(&[0, 1, 4, 7, 9, 12, 15, 18, 20, 41]),
        clears: ms(&[137, 182, 225, 247, 257, 302, 330, 390, 431, 476, 533, 636]),
        freezes: ms(&[67, 69, 91, 96]),
        moves: ms(&[271, 278, 305, 313]),
    }
}

#[test]
fn a_week_of_a_thousand_desktops() {
    let week = Week::of(1, usual());
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
    // One that arrives where an owner has come meanwhile has been on its way.
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

/// Waiting is all the time from asking until the last process of the job is there, as the service lets people wait who ask for
/// whole processors. The greedy one asked for twice as much as there is, two hours before; see [`day`].
fn nobody_notices(day: &Day) {
    let compared = |seed: u64| {
        let Both { alone, beside } = day.run(seed);
        Compared::of(day, seed, &alone, &beside)
    };
    // Of those that 'cargo xtask bench sim' looks at.
    let all: Vec<Compared> = SEEDS.into_iter().take(2).map(compared).collect();
    print!("{}", Compared::table(&all));
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

#[test]
fn light_users_wait_no_longer_beside_a_greedy_one_where_they_never_wait_alone() {
    nobody_notices(&ROOMY);
}

#[test]
fn light_users_wait_no_longer_beside_a_greedy_one_than_for_each_other() {
    nobody_notices(&TIGHT);
}

/// No host may need more memory.
const HOST_BYTES_MAX: usize = 4096;
#[test]
fn decisions_are_what_is_expected_with_few_hosts_and_with_ten_thousand() {
    for hosts in [64, HOSTS_MAX] {
        let mut names = BTreeSet::new();
        let mut once = |name, decide: &mut dyn FnMut(usize)| {
            assert!(names.insert(name), "{name} is there twice");
            decide(0);
        };
        looks_at_some(hosts, &mut once);
        plans(hosts, &mut once);
        looks_at_all(hosts, &mut once);
        assert_eq!(names.len(), 21);
    }
}

/// What each decision of these allocates, whether it keeps that or not.
fn allocated(hosts: u16, decisions: fn(u16, &mut Visit<'_>)) -> Vec<(&'static str, Taken)> {
    let mut all = Vec::new();
    decisions(hosts, &mut |name, decide| {
        all.push((name, taken(|| decide(0))))
    });
    all
}

#[test]
fn decisions_that_look_at_some_hosts_make_no_list_of_all_hosts() {
    // A thousand are more than they look at. With nine thousand more they take less memory more than the numbers of those
    // would need, and hardly more blocks; what grows is a list of the zones of the network.
    let few = 1024;
    let list = usize::from(HOSTS_MAX - few) * size_of::<HostId>();
    for ((name, few), (_, many)) in allocated(few, looks_at_some)
        .into_iter()
        .zip(allocated(HOSTS_MAX, looks_at_some))
    {
        println!("{name:34}{few:?} {many:?}");
        assert!(
            many.bytes < few.bytes + list && many.blocks < 2 * few.blocks,
            "{name}: {few:?} {many:?}"
        );
    }
}

#[test]
fn a_host_needs_less_than_four_kibibytes_however_many_there_are() {
    for hosts in [64, 1024, HostId::INDEX_MAX, HOSTS_MAX] {
        let (snapshot, bytes) = bytes_kept(|| large(hosts));
        let tasks: usize = snapshot.hosts.iter().map(|host| host.tasks.len()).sum();
        let empty = |i: u16| desktop(i, Owner::Absent { left: None });
        let (_, alone) =
            bytes_kept(|| Snapshot::new(Micros(0), Policy::Load, (1..=hosts).map(empty).collect()));
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
