//! Snapshots of large virtual machines in which half of the hosts have an owner, and all decisions
//! that can be made about them.

use crate::desktop::{desktop, host_id};
use pvm_rm::decide::{
    Constraints, EvictionPlan, FairShare, HostList, HostView, OwnerState, PlacementPolicy,
    PlacementRequest, Snapshot, TaskView, UpDownRates, place, plan_evictions, plan_rebalances,
    select_resumable, select_victims,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::Arc;

/// Largest simulated number of hosts: more than twice the limit of a virtual machine.
pub(crate) const HOSTS_MAX: u16 = 10_000;

/// Function that is called for each decision, with its name and a function that makes the decision
/// and asserts the expected result. The latter may be called repeatedly; its argument is the number
/// of earlier calls.
pub(crate) type Visit<'a> = dyn FnMut(&'static str, &mut dyn FnMut(usize)) + 'a;

/// Returns the tid of the task with this number on this host.
fn task_id(host: u16, number: u32) -> Tid {
    Tid::task(HostId::MASTER, u32::from(host) * 8 + number).expect("a task")
}

/// Returns a task that has run for an hour.
fn long_running_task(host: u16, number: u32) -> TaskView {
    TaskView {
        work_done: Micros::from_secs(3600),
        user: 1,
        name: "worker".into(),
        ..TaskView::new(task_id(host, number), Micros(0))
    }
}

fn present() -> OwnerState {
    OwnerState::Present {
        why: "at the keyboard".into(),
    }
}

/// Returns a snapshot. Half of the hosts have an owner and pinned tasks. Nearly all hosts have one
/// task that has run for an hour.
pub(crate) fn large_snapshot(hosts: u16) -> Snapshot {
    let view = |i: u16| {
        let pinned = i.is_multiple_of(2);
        let owner = if pinned {
            present()
        } else {
            OwnerState::Absent { left_at: None }
        };
        // Some hosts have several tasks and some have none, so that rebalancing finds migrations.
        let tasks = match i % 50 {
            1 => 0,
            11 => 3,
            _ => 1,
        };
        let tasks = (1..=tasks)
            .map(|n| TaskView {
                pinned,
                ..long_running_task(i, n)
            })
            .collect();
        HostView {
            tasks,
            speed: 1000 + i32::from(i % 97),
            ..desktop(i, owner)
        }
    };
    let hosts: HostList = (1..=hosts).map(view).collect();
    Snapshot::new(Micros::from_secs(7200), PlacementPolicy::Load, hosts)
}

/// Changes these hosts of a snapshot by `act`, and refreshes the index.
fn change(
    snapshot: &mut Snapshot,
    hosts: impl IntoIterator<Item = u16>,
    act: impl Fn(u16, &mut HostView),
) {
    for i in hosts {
        act(i, snapshot.hosts.edit(host_id(i)).expect("a host"));
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

fn ask(request: &SpawnRequest) -> PlacementRequest<'_> {
    PlacementRequest {
        peers: &[HostId::MASTER],
        ..PlacementRequest::new(2, request, request.count, HostId::MASTER)
    }
}

/// Returns a decision that places `count` tasks with these constraints. It asserts that all
/// tasks are placed if `fits` is true, and none otherwise.
fn decide_placement(snapshot: &Snapshot, count: u32, wants: &str, fits: bool) -> impl FnMut(usize) {
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

fn decide_balancing(snapshot: &Snapshot) -> impl FnMut(usize) {
    |_| assert!(!plan_rebalances(snapshot).is_empty())
}

/// Returns a decision for the arrival of an owner on a host with a guest, and for the owner's
/// departure. It asserts that the guest migrates if `goes` is true, and stays otherwise.
fn decide_owner_visit(snapshot: &mut Snapshot, goes: bool) -> impl FnMut(usize) {
    move |_| {
        change(snapshot, [3], |_, host| host.owner = present());
        let decided = plan_evictions(snapshot);
        assert_eq!(
            (decided.evictions.len(), decided.staying.len()),
            if goes { (1, 0) } else { (0, 1) }
        );
        change(snapshot, [3], |_, host| {
            host.owner = OwnerState::Absent { left_at: None }
        });
        assert_eq!(plan_evictions(snapshot), EvictionPlan::default());
    }
}

/// Visits the decisions that examine only some hosts, independent of the size of the virtual
/// machine: the changed hosts and the best ones.
pub(crate) fn visit_local_decisions(hosts: u16, visit: &mut Visit<'_>) {
    let mut free = large_snapshot(hosts);
    visit("update", &mut |n| {
        let (host, speed) = (1 + n % usize::from(hosts / 2) * 2, 1000 + (n % 101) as i32);
        change(&mut free, [host as u16], |_, host| host.speed = speed);
    });
    visit("place 1", &mut decide_placement(&free, 1, "", true));
    visit("place 61", &mut decide_placement(&free, 61, "", true));
    visit(
        "an owner comes and goes",
        &mut decide_owner_visit(&mut free, true),
    );
    visit("balance", &mut decide_balancing(&free));
    let mut waits = free.clone();
    waits.barrier_jobs = waits
        .hosts
        .iter()
        .flat_map(|host| &host.tasks)
        .map(|task| task.job)
        .collect();
    visit("balance jobs that wait", &mut decide_balancing(&waits));
}

/// Visits the planning of migrations for jobs with declared work. The number of simulated hosts
/// does not grow with the virtual machine. First each task is a job; then all tasks are one job.
pub(crate) fn visit_work_plans(hosts: u16, visit: &mut Visit<'_>) {
    let mut free = large_snapshot(hosts);
    let work = Arc::new(Constraints::parse("work = 2h").expect("it says so"));
    change_tasks(&mut free, |_, task| task.constraints = Some(work.clone()));
    visit("plan for jobs that tell", &mut decide_balancing(&free));
    change_tasks(&mut free, |_, task| task.job = task_id(1, 1));
    visit("plan for one that tells", &mut decide_balancing(&free));
}

/// Visits the decisions that examine every host, or every task of a job.
pub(crate) fn visit_global_decisions(hosts: u16, visit: &mut Visit<'_>) {
    let free = large_snapshot(hosts);
    visit(
        "place 61 by speed",
        &mut decide_placement(&free, 61, "?rank = speed", true),
    );
    visit(
        "place 61 on one host",
        &mut decide_placement(&free, 61, "?same-host", true),
    );
    let in_turn = Snapshot {
        policy: PlacementPolicy::RoundRobin,
        ..free.clone()
    };
    visit(
        "place 61 in turn",
        &mut decide_placement(&in_turn, 61, "", true),
    );
    visit(
        "refuse by number",
        &mut decide_placement(&free, 1, "?cores > 99", false),
    );
    visit(
        "refuse by name",
        &mut decide_placement(&free, 1, "?host = nobody", false),
    );
    visit_owner_arrivals(&free, visit);
    let mut unknown = free.clone();
    change_all(&mut unknown, |_, host| host.sample = None);
    visit("balance with unknown load", &mut |_| {
        assert_eq!(plan_rebalances(&unknown), [])
    });
    let mut one_waits = free.clone();
    change_tasks(&mut one_waits, |_, task| task.job = task_id(1, 1));
    one_waits.barrier_jobs = [task_id(1, 1)].into();
    visit("balance one that waits", &mut |_| {
        black_box(plan_rebalances(&one_waits));
    });
    visit_preemption(&free, visit);
}

/// Visits the decision after owners have arrived on all hosts.
fn visit_owner_arrivals(free: &Snapshot, visit: &mut Visit<'_>) {
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
    visit(
        "refuse by owners",
        &mut decide_placement(&stuck, 1, "", false),
    );
    visit(
        "an owner visits, no host is free",
        &mut decide_owner_visit(&mut full, false),
    );
    let guests: usize = stuck.hosts.iter().map(|host| host.tasks.len()).sum();
    visit("owners on all hosts", &mut |_| {
        assert_eq!(plan_evictions(&stuck).staying.len(), guests)
    });
    let mut rush = free.clone();
    change(&mut rush, (1..=hosts).filter(|i| i % 4 == 3), |_, host| {
        host.owner = present()
    });
    visit("owners on many hosts", &mut |_| {
        assert!(!plan_evictions(&rush).evictions.is_empty())
    });
}

/// Visits the preemption decisions in which one user has a task on each processor and a high index,
/// and another user requests hosts.
fn visit_preemption(free: &Snapshot, visit: &mut Visit<'_>) {
    let hosts = free.hosts.len() as u16;
    let mut greedy = free.clone();
    change_all(&mut greedy, |i, host| {
        host.tasks = vec![long_running_task(i, 1)];
        host.owner = OwnerState::Absent { left_at: None };
    });
    let mut fair = FairShare::new(UpDownRates::default());
    fair.acquire(Micros(0), 1, u32::from(hosts));
    fair.restore_index(greedy.now, 1, 100.0, Micros(0));
    let wide = request(61, "?free >= 1; spread");
    visit("preempt", &mut |_| {
        assert_eq!(select_victims(&greedy, &fair, &ask(&wide)).len(), 61)
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
        assert!(!select_resumable(&quiet, &since, &BTreeSet::new()).is_empty())
    });
}
