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
        file: "farm/worker".into(),
        flags,
        place: place.into(),
        count,
        ..SpawnRequest::default()
    }
}

fn placed(snapshot: &Snapshot, request: &SpawnRequest) -> Placement {
    place(
        snapshot,
        &PlacementRequest::new(7, request, request.count, host_id(1)),
    )
}

fn count_on(placement: &Placement, index: u16) -> usize {
    placement
        .hosts
        .iter()
        .filter(|host| **host == Ok(host_id(index)))
        .count()
}

/// Returns a snapshot with one guest on h1, whose owner is present.
fn guest(leaving: LeaveTime) -> Snapshot {
    let mut snapshot = pool(2);
    let host = &mut snapshot.hosts[0];
    host.owner = OwnerState::Present {
        why: "alice".into(),
    };
    host.guest_policy.leave_time = leaving;
    host.tasks = vec![TaskView {
        user: 7,
        ..TaskView::new(Tid::task(host_id(1), 1).expect("a task"), Micros::default())
    }];
    snapshot
}

fn stay_reason(moves: &EvictionPlan) -> (&StayReason, Option<Micros>) {
    assert!(moves.evictions.is_empty(), "{moves:?}");
    (&moves.staying[0].reason, moves.staying[0].retry_at)
}

/// Guests leave at the time that the owner's terms specify, and not before.
#[test]
fn guests_leave_when_owner_requires() {
    assert_eq!(plan_evictions(&guest(LeaveTime::Now)).evictions.len(), 1);
    let later = NOW + Micros::from_secs(30);
    let mut snapshot = guest(LeaveTime::At(later));
    assert_eq!(
        stay_reason(&plan_evictions(&snapshot)),
        (&StayReason::GracePeriod, Some(later))
    );
    snapshot.now = later;
    assert_eq!(plan_evictions(&snapshot).evictions.len(), 1);
    assert_eq!(
        stay_reason(&plan_evictions(&guest(LeaveTime::Never))),
        (&StayReason::PausedForOwner, None)
    );
    assert_eq!(
        stay_reason(&plan_evictions(&guest(LeaveTime::Terminated))),
        (&StayReason::Terminated, None)
    );
}

/// If the owner lets guests stay, that is reported only if the time is unlimited.
#[test]
fn only_unlimited_stays_are_reported() {
    for (leaving, told) in [
        (LeaveTime::At(NOW + Micros(1)), false),
        (LeaveTime::Terminated, false),
        (LeaveTime::Never, true),
    ] {
        let snapshot = guest(leaving);
        let stay = plan_evictions(&snapshot).staying.remove(0);
        assert_eq!(stay.is_logged(NOW), told, "{}", stay.sentence(&snapshot));
    }
}

/// A host gets no more guests than its owner allows, even if the spawn names it.
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
    let all = placed(&snapshot, &request(0, "", 20));
    assert_eq!((count_on(&all, 1), count_on(&all, 2)), (17, 3));
    let named = placed(&snapshot, &request(SPAWN_HOST, "h2", 5));
    assert_eq!(count_on(&named, 2), 3);
    assert_eq!(named.hosts[3..], [Err(PvmError::OutOfRes); 2]);
    let task = |n| TaskView::new(Tid::task(host_id(2), n).expect("a task"), Micros::default());
    snapshot.hosts[1].tasks = (1..=3).map(task).collect();
    let full = placed(&snapshot, &request(SPAWN_HOST, "h2", 1));
    assert_eq!(full.hosts, [Err(PvmError::OutOfRes)]);
    let said = full.sentence(&snapshot);
    assert!(
        said.contains("h2: its owner allows 3 tasks, and as many are present"),
        "{said}"
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
            memory_free: 4 << 30,
            ..GuestLimits::default()
        },
    );
    let all = placed(&snapshot, &request(0, "", 8));
    assert_eq!(count_on(&all, 2), 0);
    let keeps = ExclusionReason::MemoryKept {
        keeps: 4 << 30,
        has: 4 << 30,
    };
    assert_eq!(
        keeps.to_string(),
        "4.0G of memory are free, and its owner reserves 4.0G"
    );
    assert!(all.excluded.contains(&(host_id(2), keeps)), "{all:?}");
}

/// A task does not migrate to a host where it would use memory that the owner reserves.
#[test]
fn migration_respects_reserved_memory() {
    let target = |bytes: u64| {
        let mut snapshot = guest(LeaveTime::Now);
        snapshot.hosts[0].tasks[0].memory_bytes = bytes;
        set_limits(
            &mut snapshot,
            2,
            GuestLimits {
                memory_free: 3 << 30,
                ..GuestLimits::default()
            },
        );
        plan_evictions(&snapshot)
    };
    assert_eq!(target(1 << 30).evictions.len(), 1, "there is room for it");
    let out = target((1 << 30) + 1);
    let StayReason::NoHost { excluded } = stay_reason(&out).0 else {
        panic!("{out:?}")
    };
    assert_eq!(
        excluded.iter().next(),
        Some(&(
            host_id(2),
            ExclusionReason::MemoryKept {
                keeps: 3 << 30,
                has: 4 << 30
            }
        ))
    );
}

/// Programs and users that the owner excludes are neither placed on the host nor migrated to it.
#[test]
fn blocked_programs_and_users_are_excluded() {
    let program = GuestLimits {
        programs: vec!["work*".into()],
        ..GuestLimits::default()
    };
    let user = GuestLimits {
        users: vec![7],
        ..GuestLimits::default()
    };
    for (limits, says) in [
        (program, "blocks the program \"work*\""),
        (user, "blocks user 7"),
    ] {
        let mut snapshot = pool(2);
        set_limits(&mut snapshot, 2, limits.clone());
        assert_eq!(count_on(&placed(&snapshot, &request(0, "", 9)), 2), 0);
        let named = placed(&snapshot, &request(SPAWN_HOST, "h2", 1));
        assert_eq!(named.hosts, [Err(PvmError::NoHost)]);
        let said = named.sentence(&snapshot);
        assert!(said.contains(says), "{said}");
        let mut snapshot = guest(LeaveTime::Now);
        snapshot.hosts[0].tasks[0].name = Arc::from("worker");
        set_limits(&mut snapshot, 2, limits);
        let out = plan_evictions(&snapshot);
        assert!(
            matches!(stay_reason(&out).0, StayReason::NoHost { excluded } if excluded.len() == 1),
            "{out:?}"
        );
    }
}

/// A host whose owner may be present is used only if there is no other. Guests on it stay.
#[test]
fn host_with_idle_owner_is_last_choice() {
    let mut snapshot = pool(2);
    let host = snapshot.hosts.edit(host_id(2)).expect("a host");
    host.owner = OwnerState::PossiblyPresent {
        why: "alice is idle".into(),
        idle_login: true,
    };
    host.tasks = vec![TaskView::new(
        Tid::task(host_id(2), 1).expect("a task"),
        Micros::default(),
    )];
    assert_eq!(count_on(&placed(&snapshot, &request(0, "", 5)), 2), 0);
    assert_eq!(plan_evictions(&snapshot), EvictionPlan::default());
    for place in ["?rank = cores", "?same-host"] {
        assert_eq!(
            count_on(&placed(&snapshot, &request(0, place, 2)), 2),
            0,
            "{place}"
        );
    }
    let in_turn = Snapshot {
        policy: PlacementPolicy::RoundRobin,
        ..snapshot.clone()
    };
    assert_eq!(count_on(&placed(&in_turn, &request(0, "", 5)), 2), 0);
    assert_eq!(
        count_on(&placed(&snapshot, &request(SPAWN_HOST, "h2", 1)), 2),
        1,
        "who names it gets it"
    );
    snapshot.hosts.edit(host_id(1)).expect("a host").owner =
        OwnerState::Present { why: "bob".into() };
    assert_eq!(
        count_on(&placed(&snapshot, &request(0, "", 5)), 2),
        5,
        "better than no place"
    );
}

/// External load counts only as load, and not as presence of an owner.
#[test]
fn external_load_is_only_load() {
    let mut snapshot = pool(2);
    let why = "other programs".to_string();
    snapshot.hosts.edit(host_id(2)).expect("a host").owner = OwnerState::PossiblyPresent {
        why,
        idle_login: false,
    };
    assert_eq!(count_on(&placed(&snapshot, &request(0, "", 4)), 2), 2);
}

/// No task is placed on a host that is closed for guests, even if the spawn names it. Its guests
/// leave.
#[test]
fn closed_host_gets_no_tasks() {
    let mut snapshot = guest(LeaveTime::Now);
    snapshot.hosts.edit(host_id(1)).expect("a host").owner = OwnerState::Closed {
        why: "not mon-fri 9-17".into(),
    };
    let named = placed(&snapshot, &request(SPAWN_HOST, "h1", 1));
    assert_eq!(named.hosts, [Err(PvmError::OutOfRes)]);
    let said = named.sentence(&snapshot);
    assert!(
        said.contains("h1: no guests now (not mon-fri 9-17)"),
        "{said}"
    );
    assert_eq!(
        plan_evictions(&snapshot).evictions.len(),
        1,
        "who is there leaves"
    );
}

proptest! {
    /// In a random pool with random limits, no host gets more guests than its owner allows or an
    /// excluded program, and a host gets none if it is closed or its owner reserves all memory.
    #[test]
    fn owner_limits_are_never_exceeded(
        limits in prop::collection::vec((prop::option::of(0_u32..5), 0_u64..5, any::<bool>(), 0_u8..4), 1..8),
        count in 1_u32..40,
        load in any::<bool>(),
    ) {
        let mut snapshot = pool(limits.len() as u16);
        snapshot.policy = if load { PlacementPolicy::Load } else { PlacementPolicy::RoundRobin };
        for (i, (cores, gigabytes, blocked, owner)) in limits.iter().enumerate() {
            let programs = if *blocked { vec!["worker".to_string()] } else { Vec::new() };
            let (cores, memory_free) = (*cores, gigabytes << 30);
            set_limits(&mut snapshot, i as u16 + 1, GuestLimits { guests_max: cores, memory_free, programs, users: Vec::new() });
            let why = String::new();
            snapshot.hosts[i].owner = match owner {
                0 => OwnerState::Closed { why },
                1 => OwnerState::PossiblyPresent { why, idle_login: true },
                _ => OwnerState::Absent { left_at: None },
            };
        }
        let placement = placed(&snapshot, &request(0, "", count));
        for (i, (cores, gigabytes, blocked, owner)) in limits.iter().enumerate() {
            let here = count_on(&placement, i as u16 + 1);
            prop_assert!(here as u32 <= cores.unwrap_or(u32::MAX));
            prop_assert!(here == 0 || (!blocked && *gigabytes < 4 && *owner != 0));
        }
    }
}
