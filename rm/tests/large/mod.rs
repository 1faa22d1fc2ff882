//! Snapshots of large virtual machines in which half of the hosts have an owner, and all decisions
//! that the resource manager can make about them.

use crate::desktop::{desktop_host, host_id};
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

/// Function that is called once for each decision. Its arguments are the name of the decision, and
/// a function that makes the decision and asserts the expected result. The function that makes the
/// decision may be called repeatedly; its argument is the number of earlier calls.
pub(crate) type VisitDecisionFn<'a> = dyn FnMut(&'static str, &mut dyn FnMut(usize)) + 'a;

/// Returns the tid of the task with this number (less than 8) on this host.
fn task_id(host: u16, number: u32) -> Tid {
    Tid::for_task(HostId::MASTER, u32::from(host) * 8 + number).expect("a task")
}

/// Returns a task of user 1 that has run for an hour.
fn long_running_task(host: u16, number: u32) -> TaskView {
    TaskView {
        work_done: Micros::from_secs(3600),
        user: 1,
        name: "worker".into(),
        ..TaskView::new(task_id(host, number), Micros(0))
    }
}

fn present_owner() -> OwnerState {
    OwnerState::Present {
        why: "at the keyboard".into(),
    }
}

/// Returns a snapshot of `hosts` hosts. Every second host has an owner and pinned tasks. Nearly all
/// hosts have one task that has run for an hour.
pub(crate) fn large_snapshot(hosts: u16) -> Snapshot {
    let host_view = |i: u16| {
        let has_owner = i.is_multiple_of(2);
        let owner = if has_owner {
            present_owner()
        } else {
            OwnerState::Absent { left_at: None }
        };
        // In each group of fifty hosts, one has no task and one has three, so that rebalancing
        // finds migrations.
        let task_count = match i % 50 {
            1 => 0,
            11 => 3,
            _ => 1,
        };
        let task_count = (1..=task_count)
            .map(|n| TaskView {
                pinned: has_owner,
                ..long_running_task(i, n)
            })
            .collect();
        HostView {
            tasks: task_count,
            speed: 1000 + i32::from(i % 97),
            ..desktop_host(i, owner)
        }
    };
    let hosts: HostList = (1..=hosts).map(host_view).collect();
    Snapshot::new(Micros::from_secs(7200), PlacementPolicy::Load, hosts)
}

/// Calls `edit_host` for each of these hosts of a snapshot, and refreshes the index of the hosts.
fn change_hosts(
    snapshot: &mut Snapshot,
    hosts: impl IntoIterator<Item = u16>,
    edit_host: impl Fn(u16, &mut HostView),
) {
    for i in hosts {
        edit_host(i, snapshot.hosts.edit(host_id(i)).expect("a host"));
    }
    snapshot.hosts.refresh(snapshot.now);
}

fn change_all_hosts(snapshot: &mut Snapshot, edit_host: impl Fn(u16, &mut HostView)) {
    change_hosts(snapshot, 1..=snapshot.hosts.len() as u16, edit_host);
}

fn change_all_tasks(snapshot: &mut Snapshot, edit_task: impl Fn(u16, &mut TaskView)) {
    change_all_hosts(snapshot, |i, host| {
        host.tasks.iter_mut().for_each(|task| edit_task(i, task))
    });
}

fn request(count: u32, place: &str) -> SpawnRequest {
    SpawnRequest {
        task_count: count,
        where_arg: place.into(),
        ..SpawnRequest::default()
    }
}

fn to_placement_request(request: &SpawnRequest) -> PlacementRequest<'_> {
    PlacementRequest {
        peer_hosts: &[HostId::MASTER],
        ..PlacementRequest::new(2, request, request.task_count, HostId::MASTER)
    }
}

/// Returns a decision that places `count` tasks with these constraints. The decision asserts that
/// all tasks are placed if `is_placeable` is true, and none otherwise.
fn decide_placement(
    snapshot: &Snapshot,
    count: u32,
    constraints: &str,
    is_placeable: bool,
) -> impl FnMut(usize) {
    let request = request(count, constraints);
    move |_| {
        assert!(
            place(snapshot, &to_placement_request(&request))
                .hosts
                .iter()
                .all(|r| r.is_ok() == is_placeable)
        )
    }
}

fn decide_rebalancing(snapshot: &Snapshot) -> impl FnMut(usize) {
    |_| assert!(!plan_rebalances(snapshot).is_empty())
}

/// Returns a function that makes two decisions: after the owner of h3, which has a guest, has
/// arrived, and after the owner has left. It asserts that the guest migrates if `can_migrate` is
/// true, and stays otherwise.
fn decide_owner_visit(snapshot: &mut Snapshot, can_migrate: bool) -> impl FnMut(usize) {
    move |_| {
        change_hosts(snapshot, [3], |_, host| host.owner = present_owner());
        let plan = plan_evictions(snapshot);
        assert_eq!(
            (plan.evictions.len(), plan.stays.len()),
            if can_migrate { (1, 0) } else { (0, 1) }
        );
        change_hosts(snapshot, [3], |_, host| {
            host.owner = OwnerState::Absent { left_at: None }
        });
        assert_eq!(plan_evictions(snapshot), EvictionPlan::default());
    }
}

/// Visits the decisions that examine only the changed hosts and the best ones. The number of
/// examined hosts does not depend on the size of the virtual machine.
pub(crate) fn visit_local_decisions(hosts: u16, visit: &mut VisitDecisionFn<'_>) {
    let mut snapshot = large_snapshot(hosts);
    visit("update", &mut |n| {
        let (host, speed) = (1 + n % usize::from(hosts / 2) * 2, 1000 + (n % 101) as i32);
        change_hosts(&mut snapshot, [host as u16], |_, host| host.speed = speed);
    });
    visit("place 1", &mut decide_placement(&snapshot, 1, "", true));
    visit("place 61", &mut decide_placement(&snapshot, 61, "", true));
    visit(
        "an owner comes and goes",
        &mut decide_owner_visit(&mut snapshot, true),
    );
    visit("balance", &mut decide_rebalancing(&snapshot));
    let mut barrier_snapshot = snapshot.clone();
    barrier_snapshot.barrier_jobs = barrier_snapshot
        .hosts
        .iter()
        .flat_map(|host| &host.tasks)
        .map(|task| task.job)
        .collect();
    visit(
        "balance jobs that wait",
        &mut decide_rebalancing(&barrier_snapshot),
    );
}

/// Visits the planning of migrations for jobs with declared work. The number of simulated hosts
/// does not grow with the virtual machine. In the first plan each task is a job; in the second all
/// tasks belong to one job.
pub(crate) fn visit_work_plans(hosts: u16, visit: &mut VisitDecisionFn<'_>) {
    let mut snapshot = large_snapshot(hosts);
    let work_constraint = Arc::new(Constraints::parse("work = 2h").expect("it says so"));
    change_all_tasks(&mut snapshot, |_, task| {
        task.constraints = Some(work_constraint.clone())
    });
    visit(
        "plan for jobs that tell",
        &mut decide_rebalancing(&snapshot),
    );
    change_all_tasks(&mut snapshot, |_, task| task.job = task_id(1, 1));
    visit(
        "plan for one that tells",
        &mut decide_rebalancing(&snapshot),
    );
}

/// Visits the decisions that examine every host, or every task of a job.
pub(crate) fn visit_global_decisions(hosts: u16, visit: &mut VisitDecisionFn<'_>) {
    let snapshot = large_snapshot(hosts);
    visit(
        "place 61 by speed",
        &mut decide_placement(&snapshot, 61, "?rank = speed", true),
    );
    visit(
        "place 61 on one host",
        &mut decide_placement(&snapshot, 61, "?same-host", true),
    );
    let round_robin_snapshot = Snapshot {
        policy: PlacementPolicy::RoundRobin,
        ..snapshot.clone()
    };
    visit(
        "place 61 in turn",
        &mut decide_placement(&round_robin_snapshot, 61, "", true),
    );
    visit(
        "refuse by number",
        &mut decide_placement(&snapshot, 1, "?cores > 99", false),
    );
    visit(
        "refuse by name",
        &mut decide_placement(&snapshot, 1, "?host = nobody", false),
    );
    visit_owner_arrivals(&snapshot, visit);
    let mut unknown_load_snapshot = snapshot.clone();
    change_all_hosts(&mut unknown_load_snapshot, |_, host| host.sample = None);
    visit("balance with unknown load", &mut |_| {
        assert_eq!(plan_rebalances(&unknown_load_snapshot), [])
    });
    let mut barrier_snapshot = snapshot.clone();
    change_all_tasks(&mut barrier_snapshot, |_, task| task.job = task_id(1, 1));
    barrier_snapshot.barrier_jobs = [task_id(1, 1)].into();
    visit("balance one that waits", &mut |_| {
        black_box(plan_rebalances(&barrier_snapshot));
    });
    visit_preemption(&snapshot, visit);
}

/// Visits the decisions in which owners are present on all hosts or on many hosts.
fn visit_owner_arrivals(snapshot: &Snapshot, visit: &mut VisitDecisionFn<'_>) {
    let host_count = snapshot.hosts.len() as u16;
    let mut snapshot_with_one_free_host = snapshot.clone();
    change_all_hosts(&mut snapshot_with_one_free_host, |i, host| {
        if i != 3 {
            host.owner = present_owner();
        }
        host.tasks.iter_mut().for_each(|task| task.pinned = i != 3);
    });
    let mut snapshot_without_free_host = snapshot_with_one_free_host.clone();
    change_all_hosts(&mut snapshot_without_free_host, |_, host| {
        host.owner = present_owner();
        host.tasks.iter_mut().for_each(|task| task.pinned = false);
    });
    visit(
        "refuse by owners",
        &mut decide_placement(&snapshot_without_free_host, 1, "", false),
    );
    visit(
        "an owner visits, no host is free",
        &mut decide_owner_visit(&mut snapshot_with_one_free_host, false),
    );
    let guest_count: usize = snapshot_without_free_host
        .hosts
        .iter()
        .map(|host| host.tasks.len())
        .sum();
    visit("owners on all hosts", &mut |_| {
        assert_eq!(
            plan_evictions(&snapshot_without_free_host).stays.len(),
            guest_count
        )
    });
    let mut snapshot_with_many_owners = snapshot.clone();
    change_hosts(
        &mut snapshot_with_many_owners,
        (1..=host_count).filter(|i| i % 4 == 3),
        |_, host| host.owner = present_owner(),
    );
    visit("owners on many hosts", &mut |_| {
        assert!(
            !plan_evictions(&snapshot_with_many_owners)
                .evictions
                .is_empty()
        )
    });
}

/// Visits the preemption and the resume of tasks. One user has a task on each processor and a high
/// index, and another user requests hosts.
fn visit_preemption(snapshot: &Snapshot, visit: &mut VisitDecisionFn<'_>) {
    let host_count = snapshot.hosts.len() as u16;
    let mut occupied_snapshot = snapshot.clone();
    change_all_hosts(&mut occupied_snapshot, |i, host| {
        host.tasks = vec![long_running_task(i, 1)];
        host.owner = OwnerState::Absent { left_at: None };
    });
    let mut fair_share = FairShare::new(UpDownRates::default());
    fair_share.add_processors(Micros(0), 1, u32::from(host_count));
    fair_share.restore_index(occupied_snapshot.now, 1, 100.0, Micros(0));
    let wide_request = request(61, "?free >= 1; spread");
    visit("preempt", &mut |_| {
        assert_eq!(
            select_victims(
                &occupied_snapshot,
                &fair_share,
                &to_placement_request(&wide_request)
            )
            .len(),
            61
        )
    });
    let mut suspended_snapshot = occupied_snapshot.clone();
    change_all_hosts(&mut suspended_snapshot, |_, host| {
        host.tasks[0].suspended = true
    });
    let preemption_times = suspended_snapshot
        .hosts
        .iter()
        .take(usize::from(host_count / 32))
        .map(|host| (host.tasks[0].tid, Micros(0)))
        .collect();
    visit("resume preempted", &mut |_| {
        assert!(
            !select_resumable(&suspended_snapshot, &preemption_times, &BTreeSet::new()).is_empty()
        )
    });
}
