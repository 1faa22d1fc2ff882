//! A week of a thousand desktops, a day of three users, and what decisions cost with ten thousand hosts. Run with
//! `--no-capture` to see the tables.

mod counting;
mod pool;

use counting::bytes_kept;
use pool::{DAY, HOUR, Job, Pool, Random, desktop};
use pvm_rm::decide::{
    Ask, Fair, HostView, Hosts, Moves, Owner, Policy, Snapshot, TaskView, UpDown, Wants, balance, give_way, go_on,
    moves, place,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// As many hosts as a virtual machine is simulated with: more than twice as many as there can be.
const HOSTS_MAX: u16 = 10_000;
/// No decision may take longer, and no host may need more memory.
const DECISION_MAX: Duration = Duration::from_millis(1);
const HOST_BYTES_MAX: usize = 4096;

fn h(index: u16) -> HostId {
    HostId::simulated(index).expect("an index")
}

/// The task with this number on this host.
fn t(host: u16, number: u32) -> Tid {
    Tid::task(HostId::MASTER, u32::from(host) * 8 + number).expect("a task")
}

/// A task that has run for an hour.
fn old(host: u16, number: u32) -> TaskView {
    TaskView {
        done: Micros::from_secs(3600),
        user: 1,
        name: "worker".into(),
        ..TaskView::new(t(host, number), Micros(0))
    }
}

fn present() -> Owner {
    Owner::Present { why: "at the keyboard".into() }
}

/// As many hosts, half of them with an owner, nearly all with a task that has run for an hour.
fn large(hosts: u16) -> Snapshot {
    let view = |i: u16| {
        let asked = i.is_multiple_of(2);
        let owner = if asked { present() } else { Owner::Absent { left: None } };
        // Some are crowded, some are empty, so that there is something to balance.
        let tasks = match i % 50 {
            1 => 0,
            11 => 3,
            _ => 1,
        };
        let tasks = (1..=tasks).map(|n| TaskView { asked, ..old(i, n) }).collect();
        HostView { tasks, speed: 1000 + i32::from(i % 97), ..desktop(i, owner) }
    };
    let hosts: Hosts = (1..=hosts).map(view).collect();
    Snapshot::new(Micros::from_secs(7200), Policy::Load, hosts)
}

/// Changes hosts of a snapshot.
fn change(snapshot: &mut Snapshot, hosts: impl IntoIterator<Item = u16>, act: impl Fn(u16, &mut HostView)) {
    for i in hosts {
        act(i, snapshot.hosts.edit(h(i)).expect("a host"));
    }
    snapshot.hosts.refresh(snapshot.now);
}

fn request(count: u32, wants: &str) -> SpawnRequest {
    SpawnRequest { count, place: wants.into(), ..SpawnRequest::default() }
}

fn ask(request: &SpawnRequest) -> Ask<'_> {
    Ask { user: 2, request, count: request.count, caller: HostId::MASTER, peers: &[HostId::MASTER], without: &[] }
}

/// The best of some attempts, because the machine may be busy with other things.
fn best_of(times: usize, mut act: impl FnMut(usize)) -> Duration {
    let timed = (0..times).map(|n| {
        let begin = Instant::now();
        act(n);
        begin.elapsed()
    });
    timed.min().unwrap_or_default()
}

/// One host has other numbers. A thousand times, because once is too short to be timed.
fn update(snapshot: &mut Snapshot) -> Duration {
    let hosts = snapshot.hosts.len() as u16;
    let all = best_of(20, |round| {
        for n in 0..1000_u16 {
            let speed = 1000 + i32::from((n + round as u16) % 101);
            change(snapshot, [1 + n % (hosts / 2) * 2], |_, host| host.speed = speed);
        }
    });
    all / 1000
}

/// So many tasks with these requirements get their places, or none does.
fn placing(snapshot: &Snapshot, count: u32, wants: &str, fits: bool) -> Duration {
    let request = request(count, wants);
    best_of(50, |_| assert!(place(snapshot, &ask(&request)).hosts.iter().all(|r| r.is_ok() == fits)))
}

/// The owner of a host with a guest comes, and `leave` tasks go or as many stay; then he goes.
fn coming_and_going(snapshot: &mut Snapshot, goes: bool) -> Duration {
    best_of(50, |_| {
        change(snapshot, [3], |_, host| host.owner = present());
        let decided = moves(snapshot);
        assert_eq!((decided.go.len(), decided.stay.len()), if goes { (1, 0) } else { (0, 1) });
        change(snapshot, [3], |_, host| host.owner = Owner::Absent { left: None });
        assert_eq!(moves(snapshot), Moves::default());
    })
}

/// Moves for jobs that have told their work: plans that let time pass on the hosts that are looked at, which are as many in
/// every virtual machine. First each task is a job, then all are one.
fn plans(hosts: u16) -> [Duration; 2] {
    let mut told = large(hosts);
    let work = Arc::new(Wants::parse("work = 2h").expect("it says so"));
    change(&mut told, 1..=hosts, |_, host| host.tasks.iter_mut().for_each(|task| task.wants = Some(work.clone())));
    let many = best_of(20, |_| assert!(!balance(&told).is_empty()));
    change(&mut told, 1..=hosts, |_, host| host.tasks.iter_mut().for_each(|task| task.job = t(1, 1)));
    [many, best_of(20, |_| assert!(!balance(&told).is_empty()))]
}

/// Every decision with its name and its time.
fn decisions(hosts: u16) -> Vec<(&'static str, Duration)> {
    let mut free = large(hosts);
    let mut full = free.clone();
    change(&mut full, 1..=hosts, |i, host| {
        if i != 3 {
            host.owner = present();
        }
        host.tasks.iter_mut().for_each(|task| task.asked = i != 3);
    });
    let mut stuck = full.clone();
    change(&mut stuck, 1..=hosts, |_, host| {
        host.owner = present();
        host.tasks.iter_mut().for_each(|task| task.asked = false);
    });
    let guests = stuck.hosts.iter().map(|host| host.tasks.len()).sum();
    let mut rush = free.clone();
    change(&mut rush, (1..=hosts).filter(|i| i % 4 == 3), |_, host| host.owner = present());
    let mut unknown = free.clone();
    change(&mut unknown, 1..=hosts, |_, host| host.sample = None);
    let mut in_turn = free.clone();
    in_turn.policy = Policy::RoundRobin;
    let mut waits = free.clone();
    waits.barriers = waits.hosts.iter().flat_map(|host| &host.tasks).map(|task| task.job).collect();
    let mut one_waits = free.clone();
    change(&mut one_waits, 1..=hosts, |_, host| host.tasks.iter_mut().for_each(|task| task.job = t(1, 1)));
    one_waits.barriers = [t(1, 1)].into();
    // One processor for each task of a user who has held many.
    let mut greedy = free.clone();
    change(&mut greedy, 1..=hosts, |i, host| {
        host.tasks = vec![old(i, 1)];
        host.owner = Owner::Absent { left: None };
    });
    let mut fair = Fair::new(UpDown::default());
    fair.takes(Micros(0), 1, u32::from(hosts));
    fair.recall(greedy.now, 1, 100.0, Micros(0));
    let mut quiet = greedy.clone();
    change(&mut quiet, 1..=hosts, |_, host| host.tasks[0].suspended = true);
    let since = quiet.hosts.iter().take(usize::from(hosts / 32)).map(|host| (host.tasks[0].tid, Micros(0))).collect();
    let wide = request(61, "?free >= 1; spread");
    let balanced = |snapshot: &Snapshot| best_of(50, |_| assert!(!balance(snapshot).is_empty()));
    vec![
        ("update", update(&mut free)),
        ("place 1", placing(&free, 1, "", true)),
        ("place 61", placing(&free, 61, "", true)),
        ("place 61 by speed", placing(&free, 61, "?rank = speed", true)),
        ("place 61 on one host", placing(&free, 61, "?same-host", true)),
        ("place 61 in turn", placing(&in_turn, 61, "", true)),
        ("refuse by number", placing(&free, 1, "?cores > 99", false)),
        ("refuse by name", placing(&free, 1, "?host = nobody", false)),
        ("refuse by owners", placing(&stuck, 1, "", false)),
        ("an owner comes and goes", coming_and_going(&mut free, true)),
        ("he comes, there is no place, he goes", coming_and_going(&mut full, false)),
        ("all have come", best_of(50, |_| assert_eq!(moves(&stuck).stay.len(), guests))),
        ("many have come", best_of(50, |_| assert!(!moves(&rush).go.is_empty()))),
        ("balance", balanced(&free)),
        ("balance what nobody knows", best_of(50, |_| assert_eq!(balance(&unknown), []))),
        ("balance jobs that wait", balanced(&waits)),
        (
            "balance one that waits",
            best_of(50, |_| {
                black_box(balance(&one_waits));
            }),
        ),
        ("give way", best_of(50, |_| assert_eq!(give_way(&greedy, &fair, &ask(&wide)).len(), 61))),
        ("go on", best_of(50, |_| assert!(!go_on(&quiet, &since, &BTreeSet::new()).is_empty()))),
    ]
}

#[test]
fn with_ten_thousand_hosts_a_decision_takes_less_than_a_millisecond() {
    let sizes = [64, 1024, HostId::INDEX_MAX, HOSTS_MAX];
    let all: Vec<Vec<(&str, Duration)>> = sizes.iter().map(|hosts| decisions(*hosts)).collect();
    println!("{:34}{}", "microseconds with so many hosts", sizes.map(|hosts| format!("{hosts:9}")).join(" "));
    for (i, (name, _)) in all[0].iter().enumerate() {
        let times: Vec<String> = all.iter().map(|d| format!("{:9.1}", d[i].1.as_secs_f64() * 1e6)).collect();
        println!("{name:34}{}", times.join(" "));
    }
    let told: Vec<[Duration; 2]> = sizes.iter().map(|hosts| plans(*hosts)).collect();
    for (i, name) in ["plan for jobs that tell", "plan for one that tells"].iter().enumerate() {
        let times: Vec<String> = told.iter().map(|t| format!("{:9.1}", t[i].as_secs_f64() * 1e6)).collect();
        println!("{name:34}{}", times.join(" "));
    }
    let slow: Vec<_> = all.iter().flatten().filter(|(_, time)| *time >= DECISION_MAX).collect();
    assert!(slow.is_empty(), "{slow:?}");
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
