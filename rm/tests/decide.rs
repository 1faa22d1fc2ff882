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

fn task_id(host: u16, local_number: u32) -> Tid {
    Tid::for_task(host_id(host), local_number).expect("a task")
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

fn present_owner() -> OwnerState {
    OwnerState::Present {
        why: "alice on pts/0".into(),
    }
}

fn request(flags: i32, place: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        program: "worker".into(),
        flags,
        where_arg: place.into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

fn to_placement_request(request: &SpawnRequest) -> PlacementRequest<'_> {
    PlacementRequest::new(0, request, request.task_count, host_id(1))
}

fn indices(hosts: &[Result<HostId, PvmError>]) -> Vec<u16> {
    hosts
        .iter()
        .map(|r| r.as_ref().map_or(0, |id| id.index()))
        .collect()
}

/// Round robin assigns consecutive tasks of a request to one host in blocks. The next placement
/// starts after the last host of the previous one.
#[test]
fn round_robin_assigns_blocks_in_rotation() {
    let mut snapshot = pool(3, PlacementPolicy::RoundRobin);
    let first_placement = place(&snapshot, &to_placement_request(&request(0, "", 7)));
    assert_eq!(indices(&first_placement.hosts), [2, 2, 2, 3, 3, 1, 1]);
    snapshot.last_round_robin_host = first_placement.last_round_robin_host;
    let second_placement = place(&snapshot, &to_placement_request(&request(0, "", 1)));
    assert_eq!(indices(&second_placement.hosts), [2]);
    snapshot.last_round_robin_host = second_placement.last_round_robin_host;
    assert_eq!(
        indices(&place(&snapshot, &to_placement_request(&request(0, "", 2))).hosts),
        [3, 1]
    );
}

/// The `where` of a spawn names a host, a directory or an architecture.
#[test]
fn place_names_host_directory_or_architecture() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[2].arch = "LINUXPPC64".into();
    for (flags, place_text, expected_indices) in [
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
        let placement = place(
            &snapshot,
            &to_placement_request(&request(flags, place_text, 2)),
        );
        assert_eq!(
            indices(&placement.hosts),
            expected_indices,
            "{flags} {place_text}"
        );
    }
}

/// If no host matches a request, each of its tasks fails with `NoHost`.
#[test]
fn unknown_place_fails_with_no_host() {
    let snapshot = pool(3, PlacementPolicy::Load);
    for (flags, place_text) in [
        (SPAWN_HOST, "h9"),
        (SPAWN_HOST, "H1"),
        (SPAWN_HOST, ""),
        (SPAWN_ARCH, "SUN4"),
        (SPAWN_COMPLEMENT, ""),
        (SPAWN_ARCH | SPAWN_COMPLEMENT, "LINUX64"),
    ] {
        let placement = place(
            &snapshot,
            &to_placement_request(&request(flags, place_text, 2)),
        );
        assert_eq!(
            placement.hosts,
            [Err(PvmError::NoHost); 2],
            "{flags} {place_text}"
        );
        assert_eq!(placement.exclusions.len(), 3);
    }
}

/// A host whose owner is present gets no task, even if the spawn names the host.
#[test]
fn host_with_owner_is_never_used() {
    for policy in [PlacementPolicy::Load, PlacementPolicy::RoundRobin] {
        let mut snapshot = pool(2, policy);
        snapshot.hosts[1].owner = present_owner();
        let placement = place(&snapshot, &to_placement_request(&request(0, "", 3)));
        assert_eq!(indices(&placement.hosts), [1, 1, 1]);
        let explanation = placement.describe(&snapshot);
        assert!(
            explanation.contains("h2: owner present (alice on pts/0)"),
            "{explanation}"
        );
        let named_placement = place(
            &snapshot,
            &to_placement_request(&request(SPAWN_HOST, "h2", 2)),
        );
        assert_eq!(named_placement.hosts, [Err(PvmError::OutOfRes); 2]);
        assert_eq!(
            named_placement.describe(&snapshot),
            "no host is free: h2: owner present (alice on pts/0)"
        );
        // A request for any host except h1 does not count as naming h2.
        let complement_placement = place(
            &snapshot,
            &to_placement_request(&request(SPAWN_HOST | SPAWN_COMPLEMENT, "h1", 1)),
        );
        assert_eq!(complement_placement.hosts, [Err(PvmError::OutOfRes)]);
        let explanation = complement_placement.describe(&snapshot);
        assert!(explanation.contains("no host is free: "), "{explanation}");
    }
}

/// If many hosts are excluded, the explanation lists the first ones with their reasons and counts
/// the others.
#[test]
fn many_exclusions_are_listed_then_counted() {
    let mut snapshot = pool(1000, PlacementPolicy::Load);
    for host in snapshot.hosts.iter_mut() {
        host.owner = present_owner();
    }
    snapshot.hosts[499].tasks = vec![task(task_id(500, 1))];
    snapshot.hosts[0].tasks = vec![task(task_id(1, 1))];
    let failed_placement = place(&snapshot, &to_placement_request(&request(0, "", 1)));
    assert_eq!(
        (failed_placement.hosts[0], failed_placement.exclusions.len()),
        (Err(PvmError::OutOfRes), 256)
    );
    let explanation = failed_placement.describe(&snapshot);
    assert!(
        explanation.contains("h16: owner present (alice on pts/0); and 984 more"),
        "{explanation}"
    );
    let plan = plan_evictions(&snapshot);
    for (stay_decision, first_host) in plan.stays.iter().zip([host_id(2), host_id(1)]) {
        let StayReason::NoTargetHost {
            exclusions: excluded_hosts,
        } = &stay_decision.reason
        else {
            panic!("{stay_decision:?}")
        };
        assert_eq!(excluded_hosts[0].0, first_host, "not the host where it is");
        let explanation = stay_decision.describe_stay(&snapshot);
        assert!(explanation.ends_with("; and 983 more)"), "{explanation}");
    }
    assert_eq!(plan.stays.len(), 2);
    // A host that the request names is always listed, however many hosts are excluded.
    let named_placement = place(
        &snapshot,
        &PlacementRequest {
            lost_hosts: &[host_id(900)],
            ..to_placement_request(&request(SPAWN_HOST, "h900", 1))
        },
    );
    assert_eq!(
        named_placement.describe(&snapshot),
        "no host is free: h900: no answer"
    );
}

/// A task that the request has already placed counts as load of its host.
#[test]
fn load_policy_places_all_tasks_of_request_together() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[1].cores = 4;
    // Each host accepts as many tasks at full speed as it has processors: two, four and two.
    let placement = place(&snapshot, &to_placement_request(&request(0, "", 8)));
    let mut host_indices = indices(&placement.hosts);
    host_indices.sort_unstable();
    assert_eq!(host_indices, [1, 1, 2, 2, 2, 2, 3, 3]);
}

/// Load that tasks of the virtual machine cause counts only as tasks, and not again as external
/// load.
#[test]
fn external_load_counts_once() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    let busy_sample = LoadSample {
        cores: 2,
        runnable_threads: 3,
        one_minute_load: 3.0,
        busy_share: 1.0,
        ..LoadSample::default()
    };
    // Both hosts are equally busy: h1 with external load, h2 with three tasks of the virtual
    // machine.
    snapshot.hosts[0].sample = Some(TimedSample {
        sample: busy_sample,
        received_at: NOW,
        vm_task_count: 0,
    });
    snapshot.hosts[1].sample = Some(TimedSample {
        sample: busy_sample,
        received_at: NOW,
        vm_task_count: 3,
    });
    snapshot.hosts[1].tasks = (1..=3).map(|n| task(task_id(2, n))).collect();
    assert_eq!(
        indices(&place(&snapshot, &to_placement_request(&request(0, "", 1))).hosts),
        [1],
        "equal shares, fewer tasks of ours"
    );
    snapshot.hosts[1].tasks.truncate(1);
    assert_eq!(
        indices(&place(&snapshot, &to_placement_request(&request(0, "", 1))).hosts),
        [2],
        "our tasks there have ended"
    );
}

/// A host whose sample has expired counts as a host with unknown load, and the explanation says so.
#[test]
fn expired_sample_counts_as_unknown_load() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    let busy_sample = LoadSample {
        cores: 2,
        runnable_threads: 9,
        one_minute_load: 9.0,
        busy_share: 1.0,
        ..LoadSample::default()
    };
    snapshot.hosts[0].sample = Some(TimedSample {
        sample: busy_sample,
        received_at: Micros::from_secs(970),
        vm_task_count: 0,
    });
    snapshot.hosts[1].sample = None;
    let placement = place(&snapshot, &to_placement_request(&request(0, "", 2)));
    assert_eq!(indices(&placement.hosts), [1, 2]);
    let explanation = placement.describe(&snapshot);
    assert!(
        explanation.contains("load unknown: h1 (sample 30 s old), h2 (no sample)"),
        "{explanation}"
    );
}

/// No task is placed on a lost host. A request that names the host fails.
#[test]
fn lost_host_is_excluded() {
    let snapshot = pool(2, PlacementPolicy::Load);
    let (unbound_request, named_request) = (request(0, "", 2), request(SPAWN_HOST, "h2", 2));
    let lost_hosts = [host_id(2)];
    assert_eq!(
        indices(
            &place(
                &snapshot,
                &PlacementRequest {
                    lost_hosts: &lost_hosts,
                    ..to_placement_request(&unbound_request)
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
                lost_hosts: &lost_hosts,
                ..to_placement_request(&named_request)
            }
        )
        .hosts,
        [Err(PvmError::HostFail); 2]
    );
}

/// All tasks are evicted from a host whose owner is present. Their targets are the best hosts, not
/// only one.
#[test]
fn evicted_tasks_spread_over_best_hosts() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    snapshot.hosts[1].owner = present_owner();
    snapshot.hosts[1].tasks = (1..=4).map(|n| task(task_id(2, n))).collect();
    snapshot.hosts[1].tasks[3].pinned = true;
    snapshot.hosts[2].tasks = vec![task(task_id(3, 1)), task(task_id(3, 2))];
    let plan = plan_evictions(&snapshot);
    let migrations: Vec<_> = plan
        .evictions
        .iter()
        .map(|m| (m.tid, m.source.index(), m.target.index()))
        .collect();
    assert_eq!(
        migrations,
        [
            (task_id(2, 1), 2, 1),
            (task_id(2, 2), 2, 4),
            (task_id(2, 3), 2, 1)
        ]
    );
    assert_eq!(
        plan.evictions[0].cause,
        MigrationCause::Owner {
            why: "alice on pts/0".into()
        }
    );
    assert!(plan.stays.is_empty());
}

/// An evicted task migrates to the network of the other tasks of its job.
#[test]
fn evicted_task_stays_near_its_job() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    let job_task = |tid| TaskView {
        job: task_id(1, 1),
        ..task(tid)
    };
    snapshot.hosts[0].owner = present_owner();
    snapshot.hosts[0].tasks = vec![job_task(task_id(1, 1))];
    // The fourth host is slightly faster, but it is in another network.
    (snapshot.hosts[3].zone, snapshot.hosts[3].speed) = (7, 1050);
    let eviction_target = |snapshot: &Snapshot| plan_evictions(snapshot).evictions[0].target;
    assert_eq!(
        eviction_target(&snapshot),
        host_id(4),
        "alone it goes where it gets most"
    );
    snapshot.hosts[1].tasks = vec![job_task(task_id(2, 1))];
    assert_eq!(eviction_target(&snapshot), host_id(3));
    snapshot.hosts[1].tasks = vec![task(task_id(2, 1))];
    assert_eq!(
        eviction_target(&snapshot),
        host_id(4),
        "the other one is of another job"
    );
}

/// If a task has no target, it stays. The decision contains the reason why each host is excluded.
#[test]
fn tasks_without_target_stay_with_reasons() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present_owner();
    snapshot.hosts[0].tasks = vec![task(task_id(1, 1))];
    snapshot.hosts[1].owner = present_owner();
    snapshot.hosts[2].arch = "LINUXPPC64".into();
    let broken_engine_until = |s| Obstacle {
        until: Micros::from_secs(s),
        reason: "its engine is broken".into(),
    };
    snapshot.hosts[3].migration_obstacle = Some(broken_engine_until(1060));
    let plan = plan_evictions(&snapshot);
    assert!(plan.evictions.is_empty());
    let StayReason::NoTargetHost {
        exclusions: excluded_hosts,
    } = &plan.stays[0].reason
    else {
        panic!("{:?}", plan.stays)
    };
    assert_eq!(excluded_hosts.len(), 3);
    assert_eq!(
        excluded_hosts[1].1,
        ExclusionReason::OtherArch {
            arch: "LINUXPPC64".into()
        }
    );
    assert_eq!(plan.retry_at(), Some(Micros::from_secs(1060)));
    let explanation = plan.stays[0].describe_stay(&snapshot);
    assert!(
        explanation.starts_with(
            "t40001 stays on h1 although its owner is present: no host accepts it (h2: "
        ),
        "{explanation}"
    );
    assert!(
        explanation.ends_with("h4: its engine is broken)"),
        "{explanation}"
    );
}

/// A target that refused a task gets no migration of the task until the refusal expires.
#[test]
fn refusing_target_is_skipped_for_a_while() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present_owner();
    let refusal = Obstacle {
        until: Micros::from_secs(1030),
        reason: "kernels differ".into(),
    };
    snapshot.hosts[0].tasks = vec![TaskView {
        target_obstacles: vec![(host_id(2), refusal)],
        ..task(task_id(1, 1))
    }];
    assert_eq!(plan_evictions(&snapshot).evictions[0].target, host_id(3));
    snapshot.now = Micros::from_secs(1030);
    assert_eq!(
        plan_evictions(&snapshot).evictions[0].target,
        host_id(2),
        "the refusal has aged out"
    );
}

/// A host whose owner left one second ago becomes a target only if no other host is free.
#[test]
fn host_just_left_by_owner_is_last_choice() {
    let mut snapshot = pool(3, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present_owner();
    snapshot.hosts[0].tasks = vec![task(task_id(1, 1))];
    snapshot.hosts[1].owner = OwnerState::Absent {
        left_at: Some(Micros::from_secs(999)),
    };
    snapshot.hosts[2].tasks = (1..=9).map(|n| task(task_id(3, n))).collect();
    assert_eq!(plan_evictions(&snapshot).evictions[0].target, host_id(3));
    snapshot.hosts[2].owner = present_owner();
    snapshot.hosts[2].tasks.clear();
    assert_eq!(
        plan_evictions(&snapshot).evictions[0].target,
        host_id(2),
        "but better than none"
    );
}

/// A task is evicted even if it was evicted several times recently.
#[test]
fn recent_evictions_do_not_prevent_another() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present_owner();
    let migration_times = (0..20).map(|i| Micros::from_secs(950 + 2 * i)).collect();
    snapshot.hosts[0].tasks = vec![TaskView {
        recent_migrations: migration_times,
        ..task(task_id(1, 1))
    }];
    let plan = plan_evictions(&snapshot);
    assert_eq!((plan.evictions.len(), plan.stays.len()), (1, 0));
}

/// At most [`CONCURRENT_MIGRATIONS_MAX`] migrations run at a time. Further tasks stay until a
/// migration ends.
#[test]
fn concurrent_migrations_are_limited() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present_owner();
    let task_count = CONCURRENT_MIGRATIONS_MAX as u32 + 5;
    snapshot.hosts[0].tasks = (1..=task_count).map(|n| task(task_id(1, n))).collect();
    snapshot.hosts[0].tasks[0].migration = Some(Some(host_id(2)));
    let plan = plan_evictions(&snapshot);
    assert_eq!(plan.evictions.len(), CONCURRENT_MIGRATIONS_MAX - 1);
    assert!(
        plan.stays
            .iter()
            .all(|s| s.reason == StayReason::MigrationLimit)
            && plan.stays.len() == 5
    );
}

/// If no host has enough memory for a guest, a smaller guest of the same program can still migrate.
#[test]
fn small_guest_leaves_although_large_one_cannot() {
    let mut snapshot = pool(2, PlacementPolicy::Load);
    snapshot.hosts[0].owner = present_owner();
    let sized_task = |n, bytes| TaskView {
        memory_bytes: bytes,
        ..task(task_id(1, n))
    };
    snapshot.hosts[0].tasks = vec![
        sized_task(1, 8 << 30),
        sized_task(2, 6 << 30),
        sized_task(3, 1 << 20),
    ];
    snapshot.hosts[1].sample = idle_sample(2, 4 << 30);
    snapshot.hosts[1].guest_policy.limits = Arc::new(GuestLimits {
        free_memory_bytes: 1 << 30,
        ..GuestLimits::default()
    });
    let plan = plan_evictions(&snapshot);
    assert_eq!(
        plan.evictions.iter().map(|m| m.tid).collect::<Vec<_>>(),
        [task_id(1, 3)]
    );
    let lacks_memory = |stay_decision: &StayDecision| match &stay_decision.reason {
        StayReason::NoTargetHost {
            exclusions: excluded_hosts,
        } => {
            matches!(
                excluded_hosts[0],
                (_, ExclusionReason::MemoryReserved { .. })
            )
        }
        _ => false,
    };
    assert!(
        plan.stays.len() == 2 && plan.stays.iter().all(lacks_memory),
        "{:?}",
        plan.stays
    );
}

/// The reason why a guest stays is determined for each guest separately.
#[test]
fn stay_reasons_are_decided_per_guest() {
    let mut snapshot = pool(4, PlacementPolicy::Load);
    let leave_times = [
        LeaveTime::Now,
        LeaveTime::Never,
        LeaveTime::At(NOW + Micros::from_secs(1)),
        LeaveTime::At(NOW),
    ];
    for (i, leave_time) in leave_times.into_iter().enumerate() {
        let host = &mut snapshot.hosts[i];
        (host.owner, host.guest_policy.leave_time) = (present_owner(), leave_time);
        host.tasks = vec![task(task_id(i as u16 + 1, 1))];
    }
    let obstacle = |reason: &str| Obstacle {
        until: NOW + Micros::from_secs(9),
        reason: reason.into(),
    };
    snapshot.hosts[0].tasks.push(TaskView {
        migration_obstacle: Some(obstacle("held")),
        ..task(task_id(1, 2))
    });
    snapshot.hosts[0].tasks.push(TaskView {
        target_obstacles: vec![(host_id(5), obstacle("refused"))],
        ..task(task_id(1, 3))
    });
    let plan = plan_evictions(&snapshot);
    let reasons: Vec<&str> = plan
        .stays
        .iter()
        .map(|stay_decision| match stay_decision.reason {
            StayReason::PausedForOwner => "waits",
            StayReason::GracePeriod => "grace",
            StayReason::NoTargetHost { .. } => "no host",
            StayReason::CannotMigrate { .. } => "held",
            _ => "else",
        })
        .collect();
    assert_eq!(
        (plan.evictions.len(), reasons),
        (
            0,
            vec!["no host", "held", "no host", "waits", "grace", "no host"]
        )
    );
    snapshot.hosts.insert(host(5));
    snapshot.hosts.refresh(NOW);
    let plan = plan_evictions(&snapshot);
    let evicted_tids: Vec<Tid> = plan.evictions.iter().map(|m| m.tid).collect();
    assert_eq!(
        (evicted_tids, plan.stays.len()),
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
        Just(present_owner()),
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
            move |(
                owner,
                (cores, runnable_count, load1, busy_fraction, received_s),
                tasks,
                has_other_arch,
                speed,
            )| {
                let sample = LoadSample {
                    cores,
                    runnable_threads: runnable_count,
                    one_minute_load: load1,
                    busy_share: busy_fraction,
                    ..LoadSample::default()
                };
                HostView {
                    arch: if has_other_arch {
                        "OTHER".into()
                    } else {
                        "LINUX64".into()
                    },
                    owner,
                    cores,
                    speed,
                    sample: Some(TimedSample {
                        sample,
                        received_at: Micros::from_secs(received_s),
                        vm_task_count: tasks / 2,
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

fn any_snapshot() -> impl Strategy<Value = Snapshot> {
    let hosts = (1_u16..8).prop_flat_map(|n| (1..=n).map(any_host).collect::<Vec<_>>());
    (hosts, any::<bool>(), 1_u16..8).prop_map(|(hosts, is_load_policy, last_host_index)| {
        let policy = if is_load_policy {
            PlacementPolicy::Load
        } else {
            PlacementPolicy::RoundRobin
        };
        Snapshot {
            last_round_robin_host: host_id(last_host_index),
            ..Snapshot::new(NOW, policy, hosts.into_iter().collect())
        }
    })
}

proptest! {
    /// No placement and no migration has a host with a present owner as its target.
    #[test]
    fn no_task_goes_to_present_owner(
        snapshot in any_snapshot(), flags in 0..64_i32, to in 0_u16..8, count in 1_u32..40,
    ) {
        let request = request(flags, &format!("h{to}"), count);
        let placement_request = to_placement_request(&request);
        let placement = place(&snapshot, &placement_request);
        prop_assert_eq!(placement.hosts.len(), count as usize);
        for id in placement.hosts.iter().flatten() {
            let target = snapshot.host(*id).expect("only hosts of the snapshot are used");
            prop_assert!(!target.owner.excludes_guests());
        }
        for eviction in plan_evictions(&snapshot).evictions {
            let target = snapshot.host(eviction.target).expect("only hosts of the snapshot are used");
            let source = snapshot.host(eviction.source).expect("tasks are on hosts of the snapshot");
            prop_assert!(!target.owner.excludes_guests() && target.arch == source.arch && eviction.source != eviction.target);
        }
    }

    /// Every task that is not pinned, on a host whose owner is present, either migrates or stays
    /// with a reason.
    #[test]
    fn every_guest_migrates_or_has_a_reason(snapshot in any_snapshot()) {
        let plan = plan_evictions(&snapshot);
        let mut planned_tids: Vec<Tid> = plan.evictions.iter().map(|m| m.tid).chain(plan.stays.iter().map(|s| s.tid)).collect();
        planned_tids.sort_unstable();
        let owned_hosts = snapshot.hosts.iter().filter(|h| h.owner.excludes_guests());
        let mut guest_tids: Vec<Tid> = owned_hosts.flat_map(|h| &h.tasks).filter(|t| !t.pinned).map(|t| t.tid).collect();
        guest_tids.sort_unstable();
        prop_assert_eq!(planned_tids, guest_tids);
    }

    /// If no owner is present, the plan contains neither an eviction nor a task that stays.
    #[test]
    fn pool_without_owners_evicts_no_task(mut snapshot in any_snapshot()) {
        for host in snapshot.hosts.iter_mut().filter(|h| h.owner.excludes_guests()) {
            host.owner = OwnerState::Unknown;
        }
        let plan = plan_evictions(&snapshot);
        prop_assert!(plan.evictions.is_empty() && plan.stays.is_empty());
    }

    /// The numbers of tasks on any two idle equal hosts differ by at most one.
    #[test]
    fn idle_equal_hosts_get_equal_numbers(
        hosts in 1_u16..9, count in 1_u32..60, is_load_policy in any::<bool>(),
    ) {
        let snapshot = pool(hosts, if is_load_policy { PlacementPolicy::Load } else { PlacementPolicy::RoundRobin });
        let placement = place(&snapshot, &to_placement_request(&request(0, "", count)));
        let tasks_on_host = |i| placement.hosts.iter().filter(|r| **r == Ok(host_id(i))).count();
        let task_counts: Vec<usize> = (1..=hosts).map(tasks_on_host).collect();
        prop_assert!(task_counts.iter().max().unwrap_or(&0) - task_counts.iter().min().unwrap_or(&0) <= 1);
    }

    /// Owners arrive and leave at random, and every migration succeeds immediately. No evicted task
    /// migrates to a host whose owner has just left if there is a better one, and a second decision
    /// at the same time evicts nothing.
    #[test]
    fn owner_changes_evict_without_flapping(
        toggles in prop::collection::vec((0_usize..4, 1_u64..5000), 1..400),
    ) {
        let mut snapshot = pool(4, PlacementPolicy::Load);
        for (i, host) in snapshot.hosts.iter_mut().enumerate() {
            host.tasks = (1..=2).map(|n| task(task_id(i as u16 + 1, n))).collect();
        }
        for (host_position, wait_ms) in toggles {
            snapshot.now = snapshot.now + Micros::from_millis(wait_ms);
            let now = snapshot.now;
            let owner = &mut snapshot.hosts[host_position].owner;
            *owner = if owner.excludes_guests() { OwnerState::Absent { left_at: Some(now) } } else { present_owner() };
            let plan = plan_evictions(&snapshot);
            let has_free_host = snapshot.hosts.iter().any(|h| !h.owner.excludes_guests());
            let has_no_target = |stay_decision: &StayDecision| !has_free_host && matches!(stay_decision.reason, StayReason::NoTargetHost { .. });
            prop_assert!(plan.stays.iter().all(has_no_target));
            for eviction in plan.evictions {
                let source = snapshot.hosts.iter_mut().find(|h| h.id == eviction.source).expect("known");
                prop_assert!(source.owner.excludes_guests());
                let task_position = source.tasks.iter().position(|t| t.tid == eviction.tid).expect("known");
                let mut migrated_task = source.tasks.remove(task_position);
                migrated_task.recent_migrations.push(now);
                let is_long_absent = |h: &HostView| match h.owner {
                    OwnerState::Present { .. } => false,
                    OwnerState::Absent { left_at: Some(left_time) } => now.since(left_time) >= OWNER_RETURN_WINDOW,
                    _ => true,
                };
                let has_settled_target = snapshot.hosts.iter().any(|h| h.id != eviction.source && is_long_absent(h));
                let target = snapshot.hosts.iter_mut().find(|h| h.id == eviction.target).expect("known");
                prop_assert!(is_long_absent(target) || !has_settled_target);
                target.tasks.push(migrated_task);
            }
            // The second decision at the same time must evict nothing.
            prop_assert!(plan_evictions(&snapshot).evictions.is_empty());
        }
    }
}
