//! Decisions on fixed snapshots, and properties that hold for any snapshot.

mod idle;

use idle::{NOW, host_id, idle_host, idle_sample};
use proptest::prelude::*;
use pvm_rm::decide::{
    CONCURRENT_MIGRATIONS_MAX, ExclusionReason, HostView, LeaveTime, OWNER_RETURN_WINDOW, Obstacle,
    OwnerState, PlacementPolicy, PlacementRequest, Snapshot, StayDecision, StayReason, TaskView,
    TimedSample, place, plan_evictions,
};
use sempa_proto::load::{GuestLimits, LoadSample};
use sempa_proto::migration::MigrationCause;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::sync::Arc;

fn task_id(host: u16, local: u32) -> Tid {
    Tid::task(host_id(host), local).expect("a task")
}

fn task(tid: Tid) -> TaskView {
    TaskView::new(tid, Micros::default())
}

/// Returns an idle host with two processors.
fn host(index: u16) -> HostView {
    idle_host(index, 2, 0)
}

fn pool(hosts: u16, policy: PlacementPolicy) -> Snapshot {
    Snapshot::new(NOW, policy, (1..=hosts).map(host).collect())
}

fn present() -> OwnerState {
    OwnerState::Present {
        why: "alice on pts/0".into(),
    }
}

fn request(flags: i32, place: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        file: "worker".into(),
        flags,
        place: place.into(),
        count,
        ..SpawnRequest::default()
    }
}

fn ask_for(request: &SpawnRequest) -> PlacementRequest<'_> {
    PlacementRequest::new(0, request, request.count, host_id(1))
}

fn indices(hosts: &[Result<HostId, PvmError>]) -> Vec<u16> {
    hosts
        .iter()
        .map(|r| r.as_ref().map_or(0, |id| id.index()))
        .collect()
}

/// Round robin assigns blocks of tasks and starts after the last host used.
#[test]
fn round_robin_assigns_blocks_in_rotation() {
    let mut snapshot = pool(3, PlacementPolicy::RoundRobin);
    let first = place(&snapshot, &ask_for(&request(0, "", 7)));
    assert_eq!(indices(&first.hosts), [2, 2, 2, 3, 3, 1, 1]);
    snapshot.round_robin_last = first.round_robin_last;
    let second = place(&snapshot, &ask_for(&request(0, "", 1)));
    assert_eq!(indices(&second.hosts), [2]);
    snapshot.round_robin_last = second.round_robin_last;
    assert_eq!(
        indices(&place(&snapshot, &ask_for(&request(0, "", 2))).hosts),
        [3, 1]
    );
}

/// The `where` of a spawn names a host, a directory or an architecture.
#[test]
fn place_names_host_directory_or_architecture() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[2].arch = "LINUXPPC64".into();
    for (flags, place_, expected) in [
        (SPAWN_HOST, "h2", [2, 2].as_slice()),
        (SPAWN_HOST, "h2:/var", &[2, 2]),
        (SPAWN_HOST, ".", &[1, 1]),
        (SPAWN_HOST, ".:/tmp", &[1, 1]),
        (SPAWN_ARCH, "LINUXPPC64", &[3, 3]),
        (SPAWN_ARCH, "LINUX64:/x", &[1, 2]),
        (SPAWN_HOST | SPAWN_ARCH, "h1", &[1, 1]),
        (SPAWN_HOST | SPAWN_COMPLEMENT, "h1", &[2, 3]),
        (SPAWN_ARCH | SPAWN_COMPLEMENT, "LINUX64", &[3, 3]),
        (0, ":/dir", &[1, 2]),
    ] {
        let placed = place(&snapshot, &ask_for(&request(flags, place_, 2)));
        assert_eq!(indices(&placed.hosts), expected, "{flags} {place_}");
    }
}

/// If no host matches a request, each of its tasks fails with `NoHost`.
#[test]
fn unknown_place_fails_with_no_host() {
    let snapshot = pool(3, PlacementPolicy::Load);
    for (flags, place_) in [
        (SPAWN_HOST, "h9"),
        (SPAWN_HOST, "H1"),
        (SPAWN_HOST, ""),
        (SPAWN_ARCH, "SUN4"),
        (SPAWN_COMPLEMENT, ""),
        (SPAWN_ARCH | SPAWN_COMPLEMENT, "LINUX64"),
    ] {
        let placed = place(&snapshot, &ask_for(&request(flags, place_, 2)));
        assert_eq!(placed.hosts, [Err(PvmError::NoHost); 2], "{flags} {place_}");
        assert_eq!(placed.excluded.len(), 3);
    }
}

/// A host whose owner is present is not used, even if the spawn names it.
#[test]
fn host_with_owner_is_never_used() {
    for policy in [PlacementPolicy::Load, PlacementPolicy::RoundRobin] {
        let mut snapshot = pool(2, policy);
        snapshot.hosts[1].owner = present();
        let placed = place(&snapshot, &ask_for(&request(0, "", 3)));
        assert_eq!(indices(&placed.hosts), [1, 1, 1]);
        let told = placed.sentence(&snapshot);
        assert!(
            told.contains("h2: owner present (alice on pts/0)"),
            "{told}"
        );
        let named = place(&snapshot, &ask_for(&request(SPAWN_HOST, "h2", 2)));
        assert_eq!(named.hosts, [Err(PvmError::OutOfRes); 2]);
        assert_eq!(
            named.sentence(&snapshot),
            "no host is free: h2: owner present (alice on pts/0)"
        );
        // A request for any host except h1 does not count as naming h2.
        let other = place(
            &snapshot,
            &ask_for(&request(SPAWN_HOST | SPAWN_COMPLEMENT, "h1", 1)),
        );
        assert_eq!(other.hosts, [Err(PvmError::OutOfRes)]);
        let told = other.sentence(&snapshot);
        assert!(told.contains("no host is free: "), "{told}");
    }
}

/// Of many excluded hosts the first are listed with their reasons and the others are counted.
#[test]
fn many_exclusions_are_listed_then_counted() {
    let mut snapshot = pool(1000, PlacementPolicy::Load);
    for host in snapshot.hosts.iter_mut() {
        host.owner = present();
    }
    snapshot.hosts[499].tasks = vec![task(task_id(500, 1))];
    snapshot.hosts[0].tasks = vec![task(task_id(1, 1))];
    let refused = place(&snapshot, &ask_for(&request(0, "", 1)));
    assert_eq!(
        (refused.hosts[0], refused.excluded.len()),
        (Err(PvmError::OutOfRes), 256)
    );
    let told = refused.sentence(&snapshot);
    assert!(
        told.contains("h16: owner present (alice on pts/0); and 984 more"),
        "{told}"
    );
    let out = plan_evictions(&snapshot);
    for (stay, first) in out.staying.iter().zip([host_id(2), host_id(1)]) {
        let StayReason::NoHost { excluded } = &stay.reason else {
            panic!("{stay:?}")
        };
        assert_eq!(excluded[0].0, first, "not the host where it is");
        let told = stay.sentence(&snapshot);
        assert!(told.ends_with("; and 983 more)"), "{told}");
    }
    assert_eq!(out.staying.len(), 2);
    // A host that the request names is always listed, however many other hosts are excluded.
    let named = place(
        &snapshot,
        &PlacementRequest {
            lost_hosts: &[host_id(900)],
            ..ask_for(&request(SPAWN_HOST, "h900", 1))
        },
    );
    assert_eq!(
        named.sentence(&snapshot),
        "no host is free: h900: no answer"
    );
}

/// The load policy considers all tasks of a request together.
#[test]
fn load_policy_places_all_tasks_of_request_together() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[1].cores = 4;
    // Each host offers a whole processor to as many tasks as it has processors.
    let placed = place(&snapshot, &ask_for(&request(0, "", 8)));
    let mut seen = indices(&placed.hosts);
    seen.sort_unstable();
    assert_eq!(seen, [1, 1, 2, 2, 2, 2, 3, 3]);
}

/// External demand is counted only once by the load policy.
#[test]
fn external_load_counts_once() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    let busy = LoadSample {
        cores: 2,
        running: 3,
        load1: 3.0,
        busy: 1.0,
        ..LoadSample::default()
    };
    // Both hosts are equally busy: h1 with external load, h2 with three tasks of the virtual
    // machine.
    snapshot.hosts[0].sample = Some(TimedSample {
        sample: busy,
        received_at: NOW,
        own_tasks: 0,
    });
    snapshot.hosts[1].sample = Some(TimedSample {
        sample: busy,
        received_at: NOW,
        own_tasks: 3,
    });
    snapshot.hosts[1].tasks = (1..=3).map(|n| task(task_id(2, n))).collect();
    assert_eq!(
        indices(&place(&snapshot, &ask_for(&request(0, "", 1))).hosts),
        [1],
        "equal shares, fewer tasks of ours"
    );
    snapshot.hosts[1].tasks.truncate(1);
    assert_eq!(
        indices(&place(&snapshot, &ask_for(&request(0, "", 1))).hosts),
        [2],
        "our tasks there have ended"
    );
}

/// An expired sample counts as unknown load, and the decision reports that.
#[test]
fn expired_sample_counts_as_unknown_load() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    let busy = LoadSample {
        cores: 2,
        running: 9,
        load1: 9.0,
        busy: 1.0,
        ..LoadSample::default()
    };
    snapshot.hosts[0].sample = Some(TimedSample {
        sample: busy,
        received_at: Micros::from_secs(970),
        own_tasks: 0,
    });
    snapshot.hosts[1].sample = None;
    let placed = place(&snapshot, &ask_for(&request(0, "", 2)));
    assert_eq!(indices(&placed.hosts), [1, 2]);
    let told = placed.sentence(&snapshot);
    assert!(
        told.contains("load unknown: h1 (sample 30 s old), h2 (no sample)"),
        "{told}"
    );
}

/// A lost host is excluded, and a request that names it fails.
#[test]
fn lost_host_is_excluded() {
    let snapshot = pool(2, PlacementPolicy::Load);
    let (free, bound) = (request(0, "", 2), request(SPAWN_HOST, "h2", 2));
    let without = [host_id(2)];
    assert_eq!(
        indices(
            &place(
                &snapshot,
                &PlacementRequest {
                    lost_hosts: &without,
                    ..ask_for(&free)
                }
            )
            .hosts
        ),
        [1, 1]
    );
    assert_eq!(
        place(
            &snapshot,
            &PlacementRequest {
                lost_hosts: &without,
                ..ask_for(&bound)
            }
        )
        .hosts,
        [Err(PvmError::HostFail); 2]
    );
}

/// All tasks leave a host whose owner is present, and are distributed over the best hosts.
#[test]
fn evicted_tasks_spread_over_best_hosts() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    snapshot.hosts[1].owner = present();
    snapshot.hosts[1].tasks = (1..=4).map(|n| task(task_id(2, n))).collect();
    snapshot.hosts[1].tasks[3].pinned = true;
    snapshot.hosts[2].tasks = vec![task(task_id(3, 1)), task(task_id(3, 2))];
    let out = plan_evictions(&snapshot);
    let went: Vec<_> = out
        .evictions
        .iter()
        .map(|m| (m.tid, m.from.index(), m.to.index()))
        .collect();
    assert_eq!(
        went,
        [
            (task_id(2, 1), 2, 1),
            (task_id(2, 2), 2, 4),
            (task_id(2, 3), 2, 1)
        ]
    );
    assert_eq!(
        out.evictions[0].cause,
        MigrationCause::Owner {
            why: "alice on pts/0".into()
        }
    );
    assert!(out.staying.is_empty());
}

/// The target of an evicted task is near the other tasks of its job.
#[test]
fn evicted_task_stays_near_its_job() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    let of_job = |tid| TaskView {
        job: task_id(1, 1),
        ..task(tid)
    };
    snapshot.hosts[0].owner = present();
    snapshot.hosts[0].tasks = vec![of_job(task_id(1, 1))];
    // The fourth host is slightly faster but in another network.
    (snapshot.hosts[3].zone, snapshot.hosts[3].speed) = (7, 1050);
    let goes = |snapshot: &Snapshot| plan_evictions(snapshot).evictions[0].to;
    assert_eq!(
        goes(&snapshot),
        host_id(4),
        "alone it goes where it gets most"
    );
    snapshot.hosts[1].tasks = vec![of_job(task_id(2, 1))];
    assert_eq!(goes(&snapshot), host_id(3));
    snapshot.hosts[1].tasks = vec![task(task_id(2, 1))];
    assert_eq!(
        goes(&snapshot),
        host_id(4),
        "the other one is of another job"
    );
}

/// Tasks without a target stay, with a reason for each host.
#[test]
fn tasks_without_target_stay_with_reasons() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present();
    snapshot.hosts[0].tasks = vec![task(task_id(1, 1))];
    snapshot.hosts[1].owner = present();
    snapshot.hosts[2].arch = "LINUXPPC64".into();
    let until = |s| Obstacle {
        until: Micros::from_secs(s),
        reason: "its engine is broken".into(),
    };
    snapshot.hosts[3].migration_obstacle = Some(until(1060));
    let out = plan_evictions(&snapshot);
    assert!(out.evictions.is_empty());
    let StayReason::NoHost { excluded } = &out.staying[0].reason else {
        panic!("{:?}", out.staying)
    };
    assert_eq!(excluded.len(), 3);
    assert_eq!(
        excluded[1].1,
        ExclusionReason::OtherArch {
            has: "LINUXPPC64".into()
        }
    );
    assert_eq!(out.retry_at(), Some(Micros::from_secs(1060)));
    let sentence = out.staying[0].sentence(&snapshot);
    assert!(
        sentence.starts_with(
            "t40001 stays on h1 although its owner is present: no host accepts it (h2: "
        ),
        "{sentence}"
    );
    assert!(
        sentence.ends_with("h4: its engine is broken)"),
        "{sentence}"
    );
}

/// A target that refused a task is skipped until the refusal expires.
#[test]
fn refusing_target_is_skipped_for_a_while() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present();
    let refused = Obstacle {
        until: Micros::from_secs(1030),
        reason: "kernels differ".into(),
    };
    snapshot.hosts[0].tasks = vec![TaskView {
        refused_by: vec![(host_id(2), refused)],
        ..task(task_id(1, 1))
    }];
    assert_eq!(plan_evictions(&snapshot).evictions[0].to, host_id(3));
    snapshot.now = Micros::from_secs(1030);
    assert_eq!(
        plan_evictions(&snapshot).evictions[0].to,
        host_id(2),
        "the refusal has aged out"
    );
}

/// A host whose owner has just left is used as a target only if there is no other.
#[test]
fn host_just_left_by_owner_is_last_choice() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present();
    snapshot.hosts[0].tasks = vec![task(task_id(1, 1))];
    snapshot.hosts[1].owner = OwnerState::Absent {
        left_at: Some(Micros::from_secs(999)),
    };
    snapshot.hosts[2].tasks = (1..=9).map(|n| task(task_id(3, n))).collect();
    assert_eq!(plan_evictions(&snapshot).evictions[0].to, host_id(3));
    snapshot.hosts[2].owner = present();
    snapshot.hosts[2].tasks.clear();
    assert_eq!(
        plan_evictions(&snapshot).evictions[0].to,
        host_id(2),
        "but better than none"
    );
}

/// A task is evicted even if it was evicted several times recently.
#[test]
fn recent_evictions_do_not_prevent_another() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present();
    let recent = (0..20).map(|i| Micros::from_secs(950 + 2 * i)).collect();
    snapshot.hosts[0].tasks = vec![TaskView {
        recent_migrations: recent,
        ..task(task_id(1, 1))
    }];
    let out = plan_evictions(&snapshot);
    assert_eq!((out.evictions.len(), out.staying.len()), (1, 0));
}

/// The number of concurrent migrations is limited, and further tasks wait.
#[test]
fn concurrent_migrations_are_limited() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present();
    let many = CONCURRENT_MIGRATIONS_MAX as u32 + 5;
    snapshot.hosts[0].tasks = (1..=many).map(|n| task(task_id(1, n))).collect();
    snapshot.hosts[0].tasks[0].migrating = Some(Some(host_id(2)));
    let out = plan_evictions(&snapshot);
    assert_eq!(out.evictions.len(), CONCURRENT_MIGRATIONS_MAX - 1);
    assert!(
        out.staying
            .iter()
            .all(|s| s.reason == StayReason::MigrationLimit)
            && out.staying.len() == 5
    );
}

/// If no host has enough memory for a guest, a smaller guest of the same program can still migrate.
#[test]
fn small_guest_leaves_although_large_one_cannot() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present();
    let sized = |n, bytes| TaskView {
        memory_bytes: bytes,
        ..task(task_id(1, n))
    };
    snapshot.hosts[0].tasks = vec![sized(1, 8 << 30), sized(2, 6 << 30), sized(3, 1 << 20)];
    snapshot.hosts[1].sample = idle_sample(2, 4 << 30);
    snapshot.hosts[1].guest_policy.limits = Arc::new(GuestLimits {
        memory_free: 1 << 30,
        ..GuestLimits::default()
    });
    let out = plan_evictions(&snapshot);
    assert_eq!(
        out.evictions.iter().map(|m| m.tid).collect::<Vec<_>>(),
        [task_id(1, 3)]
    );
    let keeps = |stay: &StayDecision| match &stay.reason {
        StayReason::NoHost { excluded } => {
            matches!(excluded[0], (_, ExclusionReason::MemoryKept { .. }))
        }
        _ => false,
    };
    assert!(
        out.staying.len() == 2 && out.staying.iter().all(keeps),
        "{:?}",
        out.staying
    );
}

/// The reason why a guest stays is determined for each guest separately.
#[test]
fn stay_reasons_are_decided_per_guest() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    let waits = [
        LeaveTime::Now,
        LeaveTime::Never,
        LeaveTime::At(NOW + Micros::from_secs(1)),
        LeaveTime::At(NOW),
    ];
    for (i, leaving) in waits.into_iter().enumerate() {
        let host = &mut snapshot.hosts[i];
        (host.owner, host.guest_policy.leave_time) = (present(), leaving);
        host.tasks = vec![task(task_id(i as u16 + 1, 1))];
    }
    let until = |why: &str| Obstacle {
        until: NOW + Micros::from_secs(9),
        reason: why.into(),
    };
    snapshot.hosts[0].tasks.push(TaskView {
        obstacle: Some(until("held")),
        ..task(task_id(1, 2))
    });
    snapshot.hosts[0].tasks.push(TaskView {
        refused_by: vec![(host_id(5), until("refused"))],
        ..task(task_id(1, 3))
    });
    let out = plan_evictions(&snapshot);
    let whys: Vec<&str> = out
        .staying
        .iter()
        .map(|stay| match stay.reason {
            StayReason::PausedForOwner => "waits",
            StayReason::GracePeriod => "grace",
            StayReason::NoHost { .. } => "no host",
            StayReason::CannotMigrate { .. } => "held",
            _ => "else",
        })
        .collect();
    assert_eq!(
        (out.evictions.len(), whys),
        (
            0,
            vec!["no host", "held", "no host", "waits", "grace", "no host"]
        )
    );
    snapshot.hosts.insert(host(5));
    snapshot.hosts.refresh(NOW);
    let out = plan_evictions(&snapshot);
    let gone: Vec<Tid> = out.evictions.iter().map(|m| m.tid).collect();
    assert_eq!(
        (gone, out.staying.len()),
        (vec![task_id(1, 1), task_id(4, 1)], 4)
    );
}

fn any_owner() -> impl Strategy<Value = OwnerState> {
    prop_oneof![
        Just(OwnerState::Unknown),
        Just(OwnerState::Absent { left_at: None }),
        (900_u64..1000).prop_map(|s| OwnerState::Absent {
            left_at: Some(Micros::from_secs(s))
        }),
        Just(present()),
    ]
}

fn any_host(index: u16) -> impl Strategy<Value = HostView> {
    let load = (
        1_u32..9,
        0_u32..12,
        0.0_f32..12.0,
        0.0_f32..=1.0,
        970_u64..1000,
    );
    (
        any_owner(),
        load,
        0_u32..6,
        prop::bool::weighted(0.1),
        1_i32..4000,
    )
        .prop_map(
            move |(owner, (cores, running, load1, busy, at), tasks, other_arch, speed)| {
                let sample = LoadSample {
                    cores,
                    running,
                    load1,
                    busy,
                    ..LoadSample::default()
                };
                HostView {
                    arch: if other_arch {
                        "OTHER".into()
                    } else {
                        "LINUX64".into()
                    },
                    owner,
                    cores,
                    speed,
                    sample: Some(TimedSample {
                        sample,
                        received_at: Micros::from_secs(at),
                        own_tasks: tasks / 2,
                    }),
                    tasks: (1..=tasks)
                        .map(|n| TaskView {
                            pinned: n == 5,
                            ..task(task_id(index, n))
                        })
                        .collect(),
                    ..host(index)
                }
            },
        )
}

fn any_pool() -> impl Strategy<Value = Snapshot> {
    let hosts = (1_u16..8).prop_flat_map(|n| (1..=n).map(any_host).collect::<Vec<_>>());
    (hosts, any::<bool>(), 1_u16..8).prop_map(|(hosts, load, rotation)| {
        let policy = if load {
            PlacementPolicy::Load
        } else {
            PlacementPolicy::RoundRobin
        };
        Snapshot {
            round_robin_last: host_id(rotation),
            ..Snapshot::new(NOW, policy, hosts.into_iter().collect())
        }
    })
}

proptest! {
    /// A host whose owner is present is never the target of a placement or a migration.
    #[test]
    fn no_task_goes_to_present_owner(
        snapshot in any_pool(), flags in 0..64_i32, to in 0_u16..8, count in 1_u32..40,
    ) {
        let request = request(flags, &format!("h{to}"), count);
        let ask = ask_for(&request);
        let placed = place(&snapshot, &ask);
        prop_assert_eq!(placed.hosts.len(), count as usize);
        for id in placed.hosts.iter().flatten() {
            let there = snapshot.host(*id).expect("only hosts of the snapshot are used");
            prop_assert!(!there.owner.excludes_guests());
        }
        for step in plan_evictions(&snapshot).evictions {
            let there = snapshot.host(step.to).expect("only hosts of the snapshot are used");
            let from = snapshot.host(step.from).expect("tasks are on hosts of the snapshot");
            prop_assert!(!there.owner.excludes_guests() && there.arch == from.arch && step.from != step.to);
        }
    }

    /// Every task that is not pinned, on a host whose owner is present, migrates or stays with a
    /// reason.
    #[test]
    fn every_guest_migrates_or_has_a_reason(snapshot in any_pool()) {
        let out = plan_evictions(&snapshot);
        let mut told: Vec<Tid> = out.evictions.iter().map(|m| m.tid).chain(out.staying.iter().map(|s| s.tid)).collect();
        told.sort_unstable();
        let with_owner = snapshot.hosts.iter().filter(|h| h.owner.excludes_guests());
        let mut must: Vec<Tid> = with_owner.flat_map(|h| &h.tasks).filter(|t| !t.pinned).map(|t| t.tid).collect();
        must.sort_unstable();
        prop_assert_eq!(told, must);
    }

    /// If no owner is present, no task is evicted.
    #[test]
    fn pool_without_owners_is_not_disturbed(mut snapshot in any_pool()) {
        for host in snapshot.hosts.iter_mut().filter(|h| h.owner.excludes_guests()) {
            host.owner = OwnerState::Unknown;
        }
        let out = plan_evictions(&snapshot);
        prop_assert!(out.evictions.is_empty() && out.staying.is_empty());
    }

    /// On idle equal hosts the numbers of placed tasks differ by at most one between hosts.
    #[test]
    fn idle_equal_hosts_get_equal_numbers(
        hosts in 1_u16..9, count in 1_u32..60, load in any::<bool>(),
    ) {
        let snapshot = pool(hosts, if load { PlacementPolicy::Load } else { PlacementPolicy::RoundRobin });
        let placed = place(&snapshot, &ask_for(&request(0, "", count)));
        let on = |i| placed.hosts.iter().filter(|r| **r == Ok(host_id(i))).count();
        let counts: Vec<usize> = (1..=hosts).map(on).collect();
        prop_assert!(counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0) <= 1);
    }

    /// For up to ten minutes owners arrive and leave at random; every migration succeeds
    /// immediately.
    #[test]
    fn owner_changes_evict_without_flapping(
        toggles in prop::collection::vec((0_usize..4, 1_u64..5000), 1..400),
    ) {
        let mut snapshot = pool(4, PlacementPolicy::Load);
        for (i, host) in snapshot.hosts.iter_mut().enumerate() {
            host.tasks = (1..=2).map(|n| task(task_id(i as u16 + 1, n))).collect();
        }
        for (who, wait_ms) in toggles {
            snapshot.now = snapshot.now + Micros::from_millis(wait_ms);
            let now = snapshot.now;
            let owner = &mut snapshot.hosts[who].owner;
            *owner = if owner.excludes_guests() { OwnerState::Absent { left_at: Some(now) } } else { present() };
            let out = plan_evictions(&snapshot);
            let somewhere = snapshot.hosts.iter().any(|h| !h.owner.excludes_guests());
            let nowhere = |stay: &StayDecision| !somewhere && matches!(stay.reason, StayReason::NoHost { .. });
            prop_assert!(out.staying.iter().all(nowhere));
            for step in out.evictions {
                let from = snapshot.hosts.iter_mut().find(|h| h.id == step.from).expect("known");
                prop_assert!(from.owner.excludes_guests());
                let at = from.tasks.iter().position(|t| t.tid == step.tid).expect("known");
                let mut moved = from.tasks.remove(at);
                moved.recent_migrations.push(now);
                let settled = |h: &HostView| match h.owner {
                    OwnerState::Present { .. } => false,
                    OwnerState::Absent { left_at: Some(left) } => now.since(left) >= OWNER_RETURN_WINDOW,
                    _ => true,
                };
                let choice = snapshot.hosts.iter().any(|h| h.id != step.from && settled(h));
                let to = snapshot.hosts.iter_mut().find(|h| h.id == step.to).expect("known");
                prop_assert!(settled(to) || !choice);
                to.tasks.push(moved);
            }
            // No further migration is decided until something changes.
            prop_assert!(plan_evictions(&snapshot).evictions.is_empty());
        }
    }
}
