//! The owner's rules: when guests leave, how many there may be, and which are excluded.

mod idle;

use idle::{NOW, h, idle};
use proptest::prelude::*;
use pvm_rm::decide::{
    Ask, Leaving, Moves, Owner, Placement, Policy, Reason, Snapshot, StayReason, TaskView, moves,
    place,
};
use sempa_proto::load::GuestLimits;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};
use std::sync::Arc;

/// Hosts with two processors and 4 GiB of free memory, without owners.
fn pool(hosts: u16) -> Snapshot {
    Snapshot::new(
        NOW,
        Policy::Load,
        (1..=hosts).map(|index| idle(index, 2, 4 << 30)).collect(),
    )
}

fn limited(snapshot: &mut Snapshot, index: u16, limits: GuestLimits) {
    snapshot.hosts.edit(h(index)).expect("a host").terms.limits = Arc::new(limits);
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
    place(snapshot, &Ask::of(7, request, request.count, h(1)))
}

fn on(placement: &Placement, index: u16) -> usize {
    placement
        .hosts
        .iter()
        .filter(|host| **host == Ok(h(index)))
        .count()
}

/// One guest on h1, whose owner is present.
fn guest(leaving: Leaving) -> Snapshot {
    let mut snapshot = pool(2);
    let host = &mut snapshot.hosts[0];
    host.owner = Owner::Present {
        why: "alice".into(),
    };
    host.terms.leaving = leaving;
    host.tasks = vec![TaskView {
        user: 7,
        ..TaskView::new(Tid::task(h(1), 1).expect("a task"), Micros::default())
    }];
    snapshot
}

fn stays(moves: &Moves) -> (&StayReason, Option<Micros>) {
    assert!(moves.go.is_empty(), "{moves:?}");
    (&moves.stay[0].why, moves.stay[0].again)
}

/// Guests leave when the owner requires it, and not before.
#[test]
fn guests_leave_when_owner_requires() {
    assert_eq!(moves(&guest(Leaving::Now)).go.len(), 1);
    let later = NOW + Micros::from_secs(30);
    let mut snapshot = guest(Leaving::At(later));
    assert_eq!(stays(&moves(&snapshot)), (&StayReason::Grace, Some(later)));
    snapshot.now = later;
    assert_eq!(moves(&snapshot).go.len(), 1);
    assert_eq!(
        stays(&moves(&guest(Leaving::Never))),
        (&StayReason::Waits, None)
    );
    assert_eq!(
        stays(&moves(&guest(Leaving::Ended))),
        (&StayReason::Ended, None)
    );
}

/// A stay that the owner grants is reported only if it has no end.
#[test]
fn only_unlimited_stays_are_reported() {
    for (leaving, told) in [
        (Leaving::At(NOW + Micros(1)), false),
        (Leaving::Ended, false),
        (Leaving::Never, true),
    ] {
        let snapshot = guest(leaving);
        let stay = moves(&snapshot).stay.remove(0);
        assert_eq!(stay.is_news(NOW), told, "{}", stay.sentence(&snapshot));
    }
}

/// A host gets no more tasks than its owner allows, even by name.
#[test]
fn host_enforces_owners_task_limit() {
    let mut snapshot = pool(2);
    limited(
        &mut snapshot,
        2,
        GuestLimits {
            guests_max: Some(3),
            ..GuestLimits::default()
        },
    );
    let all = placed(&snapshot, &request(0, "", 20));
    assert_eq!((on(&all, 1), on(&all, 2)), (17, 3));
    let named = placed(&snapshot, &request(SPAWN_HOST, "h2", 5));
    assert_eq!(on(&named, 2), 3);
    assert_eq!(named.hosts[3..], [Err(PvmError::OutOfRes); 2]);
    let task = |n| TaskView::new(Tid::task(h(2), n).expect("a task"), Micros::default());
    snapshot.hosts[1].tasks = (1..=3).map(task).collect();
    let full = placed(&snapshot, &request(SPAWN_HOST, "h2", 1));
    assert_eq!(full.hosts, [Err(PvmError::OutOfRes)]);
    let said = full.sentence(&snapshot);
    assert!(
        said.contains("h2: its owner allows 3 tasks, and as many are present"),
        "{said}"
    );
}

/// Memory that the owner reserves stays free.
#[test]
fn memory_reserved_by_owner_stays_free() {
    let mut snapshot = pool(2);
    limited(
        &mut snapshot,
        2,
        GuestLimits {
            memory_free: 4 << 30,
            ..GuestLimits::default()
        },
    );
    let all = placed(&snapshot, &request(0, "", 8));
    assert_eq!(on(&all, 2), 0);
    let keeps = Reason::Memory {
        keeps: 4 << 30,
        has: 4 << 30,
    };
    assert_eq!(
        keeps.to_string(),
        "4.0G of memory are free, and its owner reserves 4.0G"
    );
    assert!(all.excluded.contains(&(h(2), keeps)), "{all:?}");
}

/// A task does not migrate where it would use memory that the owner reserves.
#[test]
fn migration_respects_reserved_memory() {
    let target = |bytes: u64| {
        let mut snapshot = guest(Leaving::Now);
        snapshot.hosts[0].tasks[0].bytes = bytes;
        limited(
            &mut snapshot,
            2,
            GuestLimits {
                memory_free: 3 << 30,
                ..GuestLimits::default()
            },
        );
        moves(&snapshot)
    };
    assert_eq!(target(1 << 30).go.len(), 1, "there is room for it");
    let out = target((1 << 30) + 1);
    let StayReason::NoHost { excluded } = stays(&out).0 else {
        panic!("{out:?}")
    };
    assert_eq!(
        excluded.iter().next(),
        Some(&(
            h(2),
            Reason::Memory {
                keeps: 3 << 30,
                has: 4 << 30
            }
        ))
    );
}

/// Blocked programs and users are excluded from spawns and migrations.
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
        limited(&mut snapshot, 2, limits.clone());
        assert_eq!(on(&placed(&snapshot, &request(0, "", 9)), 2), 0);
        let named = placed(&snapshot, &request(SPAWN_HOST, "h2", 1));
        assert_eq!(named.hosts, [Err(PvmError::NoHost)]);
        let said = named.sentence(&snapshot);
        assert!(said.contains(says), "{said}");
        let mut snapshot = guest(Leaving::Now);
        snapshot.hosts[0].tasks[0].name = Arc::from("worker");
        limited(&mut snapshot, 2, limits);
        let out = moves(&snapshot);
        assert!(
            matches!(stays(&out).0, StayReason::NoHost { excluded } if excluded.len() == 1),
            "{out:?}"
        );
    }
}

/// A host whose owner may be present is the last choice, and tasks there stay.
#[test]
fn host_with_idle_owner_is_last_choice() {
    let mut snapshot = pool(2);
    let host = snapshot.hosts.edit(h(2)).expect("a host");
    host.owner = Owner::Maybe {
        why: "alice is idle".into(),
        idle: true,
    };
    host.tasks = vec![TaskView::new(
        Tid::task(h(2), 1).expect("a task"),
        Micros::default(),
    )];
    assert_eq!(on(&placed(&snapshot, &request(0, "", 5)), 2), 0);
    assert_eq!(moves(&snapshot), Moves::default());
    for place in ["?rank = cores", "?same-host"] {
        assert_eq!(
            on(&placed(&snapshot, &request(0, place, 2)), 2),
            0,
            "{place}"
        );
    }
    let in_turn = Snapshot {
        policy: Policy::RoundRobin,
        ..snapshot.clone()
    };
    assert_eq!(on(&placed(&in_turn, &request(0, "", 5)), 2), 0);
    assert_eq!(
        on(&placed(&snapshot, &request(SPAWN_HOST, "h2", 1)), 2),
        1,
        "who names it gets it"
    );
    snapshot.hosts.edit(h(1)).expect("a host").owner = Owner::Present { why: "bob".into() };
    assert_eq!(
        on(&placed(&snapshot, &request(0, "", 5)), 2),
        5,
        "better than no place"
    );
}

/// External load counts as load only, not as the presence of an owner.
#[test]
fn external_load_is_only_load() {
    let mut snapshot = pool(2);
    let why = "other programs".to_string();
    snapshot.hosts.edit(h(2)).expect("a host").owner = Owner::Maybe { why, idle: false };
    assert_eq!(on(&placed(&snapshot, &request(0, "", 4)), 2), 2);
}

/// A host that is closed for guests gets no tasks, even by name, and its guests leave.
#[test]
fn closed_host_gets_no_tasks() {
    let mut snapshot = guest(Leaving::Now);
    snapshot.hosts.edit(h(1)).expect("a host").owner = Owner::Closed {
        why: "not mon-fri 9-17".into(),
    };
    let named = placed(&snapshot, &request(SPAWN_HOST, "h1", 1));
    assert_eq!(named.hosts, [Err(PvmError::OutOfRes)]);
    let said = named.sentence(&snapshot);
    assert!(
        said.contains("h1: no guests now (not mon-fri 9-17)"),
        "{said}"
    );
    assert_eq!(moves(&snapshot).go.len(), 1, "who is there leaves");
}

proptest! {
    /// A random pool with random limits: no host gets more tasks, or a blocked program, than its
    /// owner allows, and none if it is closed or keeps all memory.
    #[test]
    fn owner_limits_are_never_exceeded(
        limits in prop::collection::vec((prop::option::of(0_u32..5), 0_u64..5, any::<bool>(), 0_u8..4), 1..8),
        count in 1_u32..40,
        load in any::<bool>(),
    ) {
        let mut snapshot = pool(limits.len() as u16);
        snapshot.policy = if load { Policy::Load } else { Policy::RoundRobin };
        for (i, (cores, gigabytes, blocked, owner)) in limits.iter().enumerate() {
            let programs = if *blocked { vec!["worker".to_string()] } else { Vec::new() };
            let (cores, memory_free) = (*cores, gigabytes << 30);
            limited(&mut snapshot, i as u16 + 1, GuestLimits { guests_max: cores, memory_free, programs, users: Vec::new() });
            let why = String::new();
            snapshot.hosts[i].owner = match owner {
                0 => Owner::Closed { why },
                1 => Owner::Maybe { why, idle: true },
                _ => Owner::Absent { left: None },
            };
        }
        let placement = placed(&snapshot, &request(0, "", count));
        for (i, (cores, gigabytes, blocked, owner)) in limits.iter().enumerate() {
            let here = on(&placement, i as u16 + 1);
            prop_assert!(here as u32 <= cores.unwrap_or(u32::MAX));
            prop_assert!(here == 0 || (!blocked && *gigabytes < 4 && *owner != 0));
        }
    }
}
