//! The owner's terms: when guests leave, how many guests are allowed, and which guests are
//! excluded.

mod idle;

use idle::{NOW, host_id, idle_host};
use proptest::prelude::*;
use pvm_rm::decide::{
    EvictionPlan, ExclusionReason, LeaveTime, OwnerState, Placement, PlacementPolicy,
    PlacementRequest, Snapshot, StayReason, TaskView, place, plan_evictions,
};
use sempa_proto::load::GuestLimits;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};
use std::sync::Arc;

/// Returns hosts with two processors and 4 GiB of free memory, without owners.
fn pool(hosts: u16) -> Snapshot {
    Snapshot::new(
        NOW,
        PlacementPolicy::Load,
        (1..=hosts)
            .map(|index| idle_host(index, 2, 4 << 30))
            .collect(),
    )
}

fn set_limits(snapshot: &mut Snapshot, index: u16, limits: GuestLimits) {
    snapshot
        .hosts
        .edit(host_id(index))
        .expect("a host")
        .guest_policy
        .limits = Arc::new(limits);
}

fn request(flags: i32, place: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        program: "farm/worker".into(),
        flags,
        where_arg: place.into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

fn place_request(snapshot: &Snapshot, request: &SpawnRequest) -> Placement {
    place(
        snapshot,
        &PlacementRequest::new(7, request, request.task_count, host_id(1)),
    )
}

fn task_count_on(placement: &Placement, index: u16) -> usize {
    placement
        .hosts
        .iter()
        .filter(|host| **host == Ok(host_id(index)))
        .count()
}

/// Returns a snapshot of two hosts with one guest on h1, whose owner is present. `leave_time`: time
/// at which the guest must leave.
fn snapshot_with_guest(leave_time: LeaveTime) -> Snapshot {
    let mut snapshot = pool(2);
    let host = &mut snapshot.hosts[0];
    host.owner = OwnerState::Present {
        why: "alice".into(),
    };
    host.guest_policy.leave_time = leave_time;
    host.tasks = vec![TaskView {
        user: 7,
        ..TaskView::new(
            Tid::for_task(host_id(1), 1).expect("a task"),
            Micros::default(),
        )
    }];
    snapshot
}

fn stay_reason(plan: &EvictionPlan) -> (&StayReason, Option<Micros>) {
    assert!(plan.evictions.is_empty(), "{plan:?}");
    (&plan.stays[0].reason, plan.stays[0].retry_at)
}

/// A guest leaves at the time that the owner's terms specify, and not earlier.
#[test]
fn guests_leave_when_owner_requires() {
    assert_eq!(
        plan_evictions(&snapshot_with_guest(LeaveTime::Now))
            .evictions
            .len(),
        1
    );
    let leave_at = NOW + Micros::from_secs(30);
    let mut snapshot = snapshot_with_guest(LeaveTime::At(leave_at));
    assert_eq!(
        stay_reason(&plan_evictions(&snapshot)),
        (&StayReason::GracePeriod, Some(leave_at))
    );
    snapshot.now = leave_at;
    assert_eq!(plan_evictions(&snapshot).evictions.len(), 1);
    assert_eq!(
        stay_reason(&plan_evictions(&snapshot_with_guest(LeaveTime::Never))),
        (&StayReason::PausedForOwner, None)
    );
    assert_eq!(
        stay_reason(&plan_evictions(&snapshot_with_guest(LeaveTime::Terminated))),
        (&StayReason::Terminated, None)
    );
}

/// If the owner lets a guest stay, the stay is logged only if its time is unlimited.
#[test]
fn only_unlimited_stays_are_reported() {
    for (leave_time, is_reported) in [
        (LeaveTime::At(NOW + Micros(1)), false),
        (LeaveTime::Terminated, false),
        (LeaveTime::Never, true),
    ] {
        let snapshot = snapshot_with_guest(leave_time);
        let stay_decision = plan_evictions(&snapshot).stays.remove(0);
        assert_eq!(
            stay_decision.is_logged(NOW),
            is_reported,
            "{}",
            stay_decision.describe_stay(&snapshot)
        );
    }
}

/// A host gets no more guests than its owner allows, even if the spawn names the host.
#[test]
fn host_enforces_owners_task_limit() {
    let mut snapshot = pool(2);
    set_limits(
        &mut snapshot,
        2,
        GuestLimits {
            guests_max: Some(3),
            ..GuestLimits::default()
        },
    );
    let placement = place_request(&snapshot, &request(0, "", 20));
    assert_eq!(
        (task_count_on(&placement, 1), task_count_on(&placement, 2)),
        (17, 3)
    );
    let named_placement = place_request(&snapshot, &request(SPAWN_HOST, "h2", 5));
    assert_eq!(task_count_on(&named_placement, 2), 3);
    assert_eq!(named_placement.hosts[3..], [Err(PvmError::OutOfRes); 2]);
    let task = |n| {
        TaskView::new(
            Tid::for_task(host_id(2), n).expect("a task"),
            Micros::default(),
        )
    };
    snapshot.hosts[1].tasks = (1..=3).map(task).collect();
    let failed_placement = place_request(&snapshot, &request(SPAWN_HOST, "h2", 1));
    assert_eq!(failed_placement.hosts, [Err(PvmError::OutOfRes)]);
    let explanation = failed_placement.describe(&snapshot);
    assert!(
        explanation.contains("h2: its owner allows 3 tasks, and as many are present"),
        "{explanation}"
    );
}

/// Placement does not use memory that the owner reserves.
#[test]
fn memory_reserved_by_owner_stays_free() {
    let mut snapshot = pool(2);
    set_limits(
        &mut snapshot,
        2,
        GuestLimits {
            free_memory_bytes: 4 << 30,
            ..GuestLimits::default()
        },
    );
    let placement = place_request(&snapshot, &request(0, "", 8));
    assert_eq!(task_count_on(&placement, 2), 0);
    let memory_exclusion = ExclusionReason::MemoryReserved {
        reserved_bytes: 4 << 30,
        free_bytes: 4 << 30,
    };
    assert_eq!(
        memory_exclusion.to_string(),
        "4.0G of memory are free, and its owner reserves 4.0G"
    );
    assert!(
        placement
            .exclusions
            .contains(&(host_id(2), memory_exclusion)),
        "{placement:?}"
    );
}

/// A task does not migrate to a host if it would use memory that the owner reserves there.
#[test]
fn migration_respects_reserved_memory() {
    let plan_for_guest = |guest_bytes: u64| {
        let mut snapshot = snapshot_with_guest(LeaveTime::Now);
        snapshot.hosts[0].tasks[0].memory_bytes = guest_bytes;
        set_limits(
            &mut snapshot,
            2,
            GuestLimits {
                free_memory_bytes: 3 << 30,
                ..GuestLimits::default()
            },
        );
        plan_evictions(&snapshot)
    };
    assert_eq!(
        plan_for_guest(1 << 30).evictions.len(),
        1,
        "there is room for it"
    );
    let plan = plan_for_guest((1 << 30) + 1);
    let StayReason::NoTargetHost {
        exclusions: excluded_hosts,
    } = stay_reason(&plan).0
    else {
        panic!("{plan:?}")
    };
    assert_eq!(
        excluded_hosts.iter().next(),
        Some(&(
            host_id(2),
            ExclusionReason::MemoryReserved {
                reserved_bytes: 3 << 30,
                free_bytes: 4 << 30
            }
        ))
    );
}

/// No task of a program or user that the owner excludes is placed on the host or migrates to it.
#[test]
fn blocked_programs_and_users_are_excluded() {
    let program_limits = GuestLimits {
        blocked_programs: vec!["work*".into()],
        ..GuestLimits::default()
    };
    let user_limits = GuestLimits {
        blocked_users: vec![7],
        ..GuestLimits::default()
    };
    for (limits, expected_text) in [
        (program_limits, "blocks the program \"work*\""),
        (user_limits, "blocks user 7"),
    ] {
        let mut snapshot = pool(2);
        set_limits(&mut snapshot, 2, limits.clone());
        assert_eq!(
            task_count_on(&place_request(&snapshot, &request(0, "", 9)), 2),
            0
        );
        let named_placement = place_request(&snapshot, &request(SPAWN_HOST, "h2", 1));
        assert_eq!(named_placement.hosts, [Err(PvmError::NoHost)]);
        let explanation = named_placement.describe(&snapshot);
        assert!(explanation.contains(expected_text), "{explanation}");
        let mut snapshot = snapshot_with_guest(LeaveTime::Now);
        snapshot.hosts[0].tasks[0].name = Arc::from("worker");
        set_limits(&mut snapshot, 2, limits);
        let plan = plan_evictions(&snapshot);
        assert!(
            matches!(stay_reason(&plan).0, StayReason::NoTargetHost { exclusions: excluded_hosts } if excluded_hosts.len() == 1),
            "{plan:?}"
        );
    }
}

/// A host whose owner may be present gets tasks only if no other host is free. Guests on the host
/// stay.
#[test]
fn host_with_idle_owner_is_last_choice() {
    let mut snapshot = pool(2);
    let host = snapshot.hosts.edit(host_id(2)).expect("a host");
    host.owner = OwnerState::PossiblyPresent {
        why: "alice is idle".into(),
        idle_login: true,
    };
    host.tasks = vec![TaskView::new(
        Tid::for_task(host_id(2), 1).expect("a task"),
        Micros::default(),
    )];
    assert_eq!(
        task_count_on(&place_request(&snapshot, &request(0, "", 5)), 2),
        0
    );
    assert_eq!(plan_evictions(&snapshot), EvictionPlan::default());
    for place_text in ["?rank = cores", "?same-host"] {
        assert_eq!(
            task_count_on(&place_request(&snapshot, &request(0, place_text, 2)), 2),
            0,
            "{place_text}"
        );
    }
    let round_robin_snapshot = Snapshot {
        policy: PlacementPolicy::RoundRobin,
        ..snapshot.clone()
    };
    assert_eq!(
        task_count_on(&place_request(&round_robin_snapshot, &request(0, "", 5)), 2),
        0
    );
    assert_eq!(
        task_count_on(&place_request(&snapshot, &request(SPAWN_HOST, "h2", 1)), 2),
        1,
        "who names it gets it"
    );
    snapshot.hosts.edit(host_id(1)).expect("a host").owner =
        OwnerState::Present { why: "bob".into() };
    assert_eq!(
        task_count_on(&place_request(&snapshot, &request(0, "", 5)), 2),
        5,
        "better than no place"
    );
}

/// External load counts only as load; it does not count as the presence of an owner.
#[test]
fn external_load_is_only_load() {
    let mut snapshot = pool(2);
    let reason = "other programs".to_string();
    snapshot.hosts.edit(host_id(2)).expect("a host").owner = OwnerState::PossiblyPresent {
        why: reason,
        idle_login: false,
    };
    assert_eq!(
        task_count_on(&place_request(&snapshot, &request(0, "", 4)), 2),
        2
    );
}

/// A host that is closed for guests gets no task, even if the spawn names the host. Its guests
/// leave.
#[test]
fn closed_host_gets_no_tasks() {
    let mut snapshot = snapshot_with_guest(LeaveTime::Now);
    snapshot.hosts.edit(host_id(1)).expect("a host").owner = OwnerState::Closed {
        why: "not mon-fri 9-17".into(),
    };
    let named_placement = place_request(&snapshot, &request(SPAWN_HOST, "h1", 1));
    assert_eq!(named_placement.hosts, [Err(PvmError::OutOfRes)]);
    let explanation = named_placement.describe(&snapshot);
    assert!(
        explanation.contains("h1: no guests now (not mon-fri 9-17)"),
        "{explanation}"
    );
    assert_eq!(
        plan_evictions(&snapshot).evictions.len(),
        1,
        "who is there leaves"
    );
}

proptest! {
    /// In a random pool with random limits, no host gets more guests than its owner allows, and no
    /// host gets an excluded program. A host gets no guest if it is closed or its owner reserves
    /// all memory.
    #[test]
    fn owner_limits_are_never_exceeded(
        limits in prop::collection::vec((prop::option::of(0_u32..5), 0_u64..5, any::<bool>(), 0_u8..4), 1..8),
        count in 1_u32..40,
        is_load_policy in any::<bool>(),
    ) {
        let mut snapshot = pool(limits.len() as u16);
        snapshot.policy = if is_load_policy { PlacementPolicy::Load } else { PlacementPolicy::RoundRobin };
        for (i, (guests_max, reserved_gib, is_blocked, owner)) in limits.iter().enumerate() {
            let programs = if *is_blocked { vec!["worker".to_string()] } else { Vec::new() };
            let (guests_max, free_bytes) = (*guests_max, reserved_gib << 30);
            set_limits(&mut snapshot, i as u16 + 1, GuestLimits { guests_max, other_guests: 0, free_memory_bytes: free_bytes, blocked_programs: programs, blocked_users: Vec::new() });
            let reason = String::new();
            snapshot.hosts[i].owner = match owner {
                0 => OwnerState::Closed { why: reason },
                1 => OwnerState::PossiblyPresent { why: reason, idle_login: true },
                _ => OwnerState::Absent { left_at: None },
            };
        }
        let placement = place_request(&snapshot, &request(0, "", count));
        for (i, (guests_max, reserved_gib, is_blocked, owner)) in limits.iter().enumerate() {
            let guest_count = task_count_on(&placement, i as u16 + 1);
            prop_assert!(guest_count as u32 <= guests_max.unwrap_or(u32::MAX));
            prop_assert!(guest_count == 0 || (!is_blocked && *reserved_gib < 4 && *owner != 0));
        }
    }
}
