//! Snapshots of virtual machines of any size, half of whose hosts have an owner, and every decision
//! that is made on them.

use crate::desktop::{desktop, h};
use pvm_rm::decide::{
    Ask, Fair, HostView, Hosts, Moves, Owner, Policy, Snapshot, TaskView, UpDown, Wants, balance,
    give_way, go_on, moves, place,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::Arc;

/// Largest simulated number of hosts: more than twice the limit of a virtual machine.
pub(crate) const HOSTS_MAX: u16 = 10_000;

/// Callback for each decision. It gets the decision's name and a function that makes the decision.
/// That function may be called repeatedly; it takes the number of earlier calls and asserts the
/// expected result.
pub(crate) type Visit<'a> = dyn FnMut(&'static str, &mut dyn FnMut(usize)) + 'a;

/// Returns the task with this number on this host.
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
    Owner::Present {
        why: "at the keyboard".into(),
    }
}

/// Half of the hosts have an owner and pinned tasks; nearly all have a task that has run for an
/// hour.
pub(crate) fn large(hosts: u16) -> Snapshot {
    let view = |i: u16| {
        let pinned = i.is_multiple_of(2);
        let owner = if pinned {
            present()
        } else {
            Owner::Absent { left: None }
        };
        // Some hosts are crowded and some are empty, so that there is something to balance.
        let tasks = match i % 50 {
            1 => 0,
            11 => 3,
            _ => 1,
        };
        let tasks = (1..=tasks)
            .map(|n| TaskView {
                pinned,
                ..old(i, n)
            })
            .collect();
        HostView {
            tasks,
            speed: 1000 + i32::from(i % 97),
            ..desktop(i, owner)
        }
    };
    let hosts: Hosts = (1..=hosts).map(view).collect();
    Snapshot::new(Micros::from_secs(7200), Policy::Load, hosts)
}

/// Changes hosts of a snapshot.
fn change(
    snapshot: &mut Snapshot,
    hosts: impl IntoIterator<Item = u16>,
    act: impl Fn(u16, &mut HostView),
) {
    for i in hosts {
        act(i, snapshot.hosts.edit(h(i)).expect("a host"));
    }
    snapshot.hosts.refresh(snapshot.now);
}

fn change_all(snapshot: &mut Snapshot, act: impl Fn(u16, &mut HostView)) {
    change(snapshot, 1..=snapshot.hosts.len() as u16, act);
}

fn change_tasks(snapshot: &mut Snapshot, act: impl Fn(u16, &mut TaskView)) {
    change_all(snapshot, |i, host| {
        host.tasks.iter_mut().for_each(|task| act(i, task))
    });
}

fn request(count: u32, wants: &str) -> SpawnRequest {
    SpawnRequest {
        count,
        place: wants.into(),
        ..SpawnRequest::default()
    }
}

fn ask(request: &SpawnRequest) -> Ask<'_> {
    Ask {
        peers: &[HostId::MASTER],
        ..Ask::of(2, request, request.count, HostId::MASTER)
    }
}

/// A decision that places tasks with these requirements, all of them or none.
fn places(snapshot: &Snapshot, count: u32, wants: &str, fits: bool) -> impl FnMut(usize) {
    let request = request(count, wants);
    move |_| {
        assert!(
            place(snapshot, &ask(&request))
                .hosts
                .iter()
                .all(|r| r.is_ok() == fits)
        )
    }
}

fn balances(snapshot: &Snapshot) -> impl FnMut(usize) {
    |_| assert!(!balance(snapshot).is_empty())
}

/// A decision when the owner of a host with a guest arrives: the guest migrates or stays. Then the
/// owner leaves.
fn comes_and_goes(snapshot: &mut Snapshot, goes: bool) -> impl FnMut(usize) {
    move |_| {
        change(snapshot, [3], |_, host| host.owner = present());
        let decided = moves(snapshot);
        assert_eq!(
            (decided.go.len(), decided.stay.len()),
            if goes { (1, 0) } else { (0, 1) }
        );
        change(snapshot, [3], |_, host| {
            host.owner = Owner::Absent { left: None }
        });
        assert_eq!(moves(snapshot), Moves::default());
    }
}

/// Decisions that look at some hosts only, whatever the size of the virtual machine: those that
/// have changed, and the best ones.
pub(crate) fn looks_at_some(hosts: u16, visit: &mut Visit<'_>) {
    let mut free = large(hosts);
    visit("update", &mut |n| {
        let (host, speed) = (1 + n % usize::from(hosts / 2) * 2, 1000 + (n % 101) as i32);
        change(&mut free, [host as u16], |_, host| host.speed = speed);
    });
    visit("place 1", &mut places(&free, 1, "", true));
    visit("place 61", &mut places(&free, 61, "", true));
    visit(
        "an owner comes and goes",
        &mut comes_and_goes(&mut free, true),
    );
    visit("balance", &mut balances(&free));
    let mut waits = free.clone();
    waits.barriers = waits
        .hosts
        .iter()
        .flat_map(|host| &host.tasks)
        .map(|task| task.job)
        .collect();
    visit("balance jobs that wait", &mut balances(&waits));
}

/// Migrations of jobs that have declared their work. These decisions simulate the hosts they look
/// at, whose number does not grow with the virtual machine. First each task is a job, then all
/// tasks are one job.
pub(crate) fn plans(hosts: u16, visit: &mut Visit<'_>) {
    let mut free = large(hosts);
    let work = Arc::new(Wants::parse("work = 2h").expect("it says so"));
    change_tasks(&mut free, |_, task| task.wants = Some(work.clone()));
    visit("plan for jobs that tell", &mut balances(&free));
    change_tasks(&mut free, |_, task| task.job = t(1, 1));
    visit("plan for one that tells", &mut balances(&free));
}

/// Decisions that look at every host, or at every task of a job.
pub(crate) fn looks_at_all(hosts: u16, visit: &mut Visit<'_>) {
    let free = large(hosts);
    visit(
        "place 61 by speed",
        &mut places(&free, 61, "?rank = speed", true),
    );
    visit(
        "place 61 on one host",
        &mut places(&free, 61, "?same-host", true),
    );
    let in_turn = Snapshot {
        policy: Policy::RoundRobin,
        ..free.clone()
    };
    visit("place 61 in turn", &mut places(&in_turn, 61, "", true));
    visit(
        "refuse by number",
        &mut places(&free, 1, "?cores > 99", false),
    );
    visit(
        "refuse by name",
        &mut places(&free, 1, "?host = nobody", false),
    );
    all_come(&free, visit);
    let mut unknown = free.clone();
    change_all(&mut unknown, |_, host| host.sample = None);
    visit("balance with unknown load", &mut |_| {
        assert_eq!(balance(&unknown), [])
    });
    let mut one_waits = free.clone();
    change_tasks(&mut one_waits, |_, task| task.job = t(1, 1));
    one_waits.barriers = [t(1, 1)].into();
    visit("balance one that waits", &mut |_| {
        black_box(balance(&one_waits));
    });
    users_take_turns(&free, visit);
}

/// Owners arrive on all hosts.
fn all_come(free: &Snapshot, visit: &mut Visit<'_>) {
    let hosts = free.hosts.len() as u16;
    let mut full = free.clone();
    change_all(&mut full, |i, host| {
        if i != 3 {
            host.owner = present();
        }
        host.tasks.iter_mut().for_each(|task| task.pinned = i != 3);
    });
    let mut stuck = full.clone();
    change_all(&mut stuck, |_, host| {
        host.owner = present();
        host.tasks.iter_mut().for_each(|task| task.pinned = false);
    });
    visit("refuse by owners", &mut places(&stuck, 1, "", false));
    visit(
        "an owner visits, no host is free",
        &mut comes_and_goes(&mut full, false),
    );
    let guests: usize = stuck.hosts.iter().map(|host| host.tasks.len()).sum();
    visit("owners on all hosts", &mut |_| {
        assert_eq!(moves(&stuck).stay.len(), guests)
    });
    let mut rush = free.clone();
    change(&mut rush, (1..=hosts).filter(|i| i % 4 == 3), |_, host| {
        host.owner = present()
    });
    visit("owners on many hosts", &mut |_| {
        assert!(!moves(&rush).go.is_empty())
    });
}

/// Each processor has a task of a user who has used much; another user requests some.
fn users_take_turns(free: &Snapshot, visit: &mut Visit<'_>) {
    let hosts = free.hosts.len() as u16;
    let mut greedy = free.clone();
    change_all(&mut greedy, |i, host| {
        host.tasks = vec![old(i, 1)];
        host.owner = Owner::Absent { left: None };
    });
    let mut fair = Fair::new(UpDown::default());
    fair.takes(Micros(0), 1, u32::from(hosts));
    fair.recall(greedy.now, 1, 100.0, Micros(0));
    let wide = request(61, "?free >= 1; spread");
    visit("preempt", &mut |_| {
        assert_eq!(give_way(&greedy, &fair, &ask(&wide)).len(), 61)
    });
    let mut quiet = greedy.clone();
    change_all(&mut quiet, |_, host| host.tasks[0].suspended = true);
    let since = quiet
        .hosts
        .iter()
        .take(usize::from(hosts / 32))
        .map(|host| (host.tasks[0].tid, Micros(0)))
        .collect();
    visit("resume preempted", &mut |_| {
        assert!(!go_on(&quiet, &since, &BTreeSet::new()).is_empty())
    });
}
