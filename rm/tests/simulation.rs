//! A week of a thousand desktops, a day of three users, and decisions with ten thousand hosts. Run with `--no-capture` to see
//! the tables. How long a decision takes is no test: `cargo xtask bench decide`.

mod counting;
mod large;
mod pool;

use counting::{Taken, bytes_kept, taken};
use large::{HOSTS_MAX, Visit, desktop, large, looks_at_all, looks_at_some, plans};
use pool::{DAY, HOUR, Job, Pool, Random};
use pvm_rm::decide::{Owner, Policy, Snapshot};
use sempa_proto::{HostId, Micros};
use std::collections::BTreeSet;

/// How likely the owner is there: 186 of 1,000 machines are never free; of the others about half are, more at night and on
/// Sundays.
fn office(host: u16, now: f64) -> Option<f64> {
    if host > 814 {
        return None;
    }
    let (day, hour) = ((now / DAY) as u64 % 7, (now / HOUR) as u64 % 24);
    let weekend = day >= 5;
    Some(match (weekend, hour) {
        (false, 8..=18) => 0.82,
        (false, 19..) => 0.55,
        (false, _) => 0.27,
        (true, 10..=19) => 0.50,
        (true, 4..=6) if day == 6 => 0.01,
        (true, _) => 0.17,
    })
}

fn percentile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * part) as usize).copied().unwrap_or(0.0)
}

/// Nobody sits at these machines.
fn cluster(_: u16, _: f64) -> Option<f64> {
    Some(0.0)
}

#[test]
fn a_week_of_a_thousand_desktops() {
    let jobs = (0..600).map(|n| Job::new(n % 5, f64::from(n) * 0.28 * HOUR, 61, 2.0 * HOUR)).collect();
    let mut pool = Pool::new(1000, 1, office, jobs);
    pool.run(7.0 * DAY);
    let (hours, seen) = (7.0 * 24.0, &mut pool.seen);
    let ended = pool.jobs.iter().filter(|j| j.ended.is_some()).count();
    let mean_free = seen.free / (7.0 * DAY);
    let visits = seen.clean.len();
    let (middle, worst) = (percentile(&mut seen.clean, 0.5), percentile(&mut seen.clean, 1.0));
    let moves = (seen.evictions + seen.shifts) as f64 / hours;
    let busiest = seen.moves_by_hour.values().max().copied().unwrap_or(0);
    let (lost, work) = (seen.standing / seen.work, seen.work / seen.free);
    println!("free hosts              {mean_free:.0} on average, {} at most", seen.free_max);
    println!("jobs of 61 processes    {ended} ended, {} wait", pool.fair.waiting());
    println!(
        "owner finds guests      {visits} times; they are gone after {middle:.2} s (median), {worst:.2} s (worst)"
    );
    println!("moves                   {} for owners, {} for the load", seen.evictions, seen.shifts);
    println!("moves in an hour        {moves:.0} on average, {busiest} in the worst");
    println!("lost in moves           {:.1} h of {:.0} h of work", seen.standing / HOUR, seen.work / HOUR);
    println!("work against an oracle  {:.1} % (all free hosts, all the time)", 100.0 * work);
    for (hour, (free, running)) in seen.by_hour.iter().filter(|(hour, _)| **hour % 4 == 0) {
        let bar = |hosts: f64, with: &str| with.repeat((hosts.max(0.0) / 12.0) as usize);
        println!("{hour:4} h {}{}", bar(running.min(*free), "#"), bar(free - running, "."));
    }
    assert!((380.0..=420.0).contains(&mean_free) && seen.free_max <= 814, "{mean_free} {}", seen.free_max);
    assert!(worst <= 2.0, "an owner had guests for {worst} s");
    assert!(lost <= 0.001, "{lost} of the work was lost in moves");
    assert!(work >= 0.88, "{work} of what an oracle does");
}

/// Mean and worst of wait and run, in seconds, of the jobs of a user.
fn response(pool: &Pool, user: u32) -> (f64, f64) {
    let of_user = pool.jobs.iter().filter(|j| j.user == user);
    let times: Vec<f64> = of_user.map(|j| j.ended.expect("light jobs end") - j.arrives).collect();
    (times.iter().sum::<f64>() / times.len() as f64, times.iter().copied().fold(0.0, f64::max))
}

#[test]
fn light_users_do_not_notice_a_greedy_one() {
    let mut random = Random::new(7);
    let light: Vec<Job> =
        (0..24).map(|n| Job::new(1 + n % 2, f64::from(n) * HOUR + random.waits(600.0), 16, 0.5 * HOUR)).collect();
    let greedy = (0..200).map(|_| Job::new(0, 0.0, 50, 4.0 * HOUR));
    let mut empty = Pool::new(200, 3, cluster, light.clone());
    let mut full = Pool::new(200, 3, cluster, light.iter().copied().chain(greedy).collect());
    empty.run(1.2 * DAY);
    full.run(1.2 * DAY);
    assert!(full.fair.held(0) >= 150, "the greedy one has all the rest");
    for user in [1, 2] {
        let ((mean, worst), (mean_full, worst_full)) = (response(&empty, user), response(&full, user));
        println!(
            "user {user}: {mean:.0} s and {worst:.0} s at worst alone, {mean_full:.0} and {worst_full:.0} s beside a greedy one"
        );
        assert!(mean_full <= mean * 1.2 && worst_full <= worst * 1.2);
    }
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
    decisions(hosts, &mut |name, decide| all.push((name, taken(|| decide(0)))));
    all
}

#[test]
fn decisions_that_look_at_some_hosts_make_no_list_of_all_hosts() {
    // A thousand are more than they look at. With nine thousand more they take less memory more than the numbers of those
    // would need, and hardly more blocks; what grows is a list of the zones of the network.
    let few = 1024;
    let list = usize::from(HOSTS_MAX - few) * size_of::<HostId>();
    for ((name, few), (_, many)) in allocated(few, looks_at_some).into_iter().zip(allocated(HOSTS_MAX, looks_at_some)) {
        println!("{name:34}{few:?} {many:?}");
        assert!(many.bytes < few.bytes + list && many.blocks < 2 * few.blocks, "{name}: {few:?} {many:?}");
    }
}

#[test]
fn a_host_needs_less_than_four_kibibytes_however_many_there_are() {
    for hosts in [64, 1024, HostId::INDEX_MAX, HOSTS_MAX] {
        let (snapshot, bytes) = bytes_kept(|| large(hosts));
        let tasks: usize = snapshot.hosts.iter().map(|host| host.tasks.len()).sum();
        let empty = |i: u16| desktop(i, Owner::Absent { left: None });
        let (_, alone) = bytes_kept(|| Snapshot::new(Micros(0), Policy::Load, (1..=hosts).map(empty).collect()));
        let (hosts_, alone) = (usize::from(hosts), alone / usize::from(hosts));
        let each = (bytes - alone * hosts_) / tasks;
        println!("{hosts:6} hosts: {alone} bytes for each, and {each} for each task");
        assert!(bytes / hosts_ <= HOST_BYTES_MAX, "{} bytes for each of {hosts} hosts", bytes / hosts_);
    }
}
