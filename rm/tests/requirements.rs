//! Constraints of spawns on their hosts, placement by an external chooser, and placement in large
//! virtual machines.

mod idle;

use idle::{NOW, host_id, idle_host, idle_sample};
use proptest::prelude::*;
use pvm_rm::decide::{
    ActualValue, Chooser, EXPLAINED_HOSTS_MAX, ExclusionReason, HostList, HostOffer, HostPair,
    HostView, MigrationSample, Obstacle, OwnerState, Placement, PlacementPolicy, PlacementReason,
    PlacementRequest, SAMPLE_AGE_MAX, Snapshot, TaskView, TimedSample, place, place_with_chooser,
    plan_evictions,
};
use sempa_proto::load::FREE_BYTES_PER_TASK_MIN;
use sempa_proto::load::LoadSample;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Returns a host with `index` processors and `index` gibibytes of memory.
fn host(index: u16) -> HostView {
    idle_host(index, u32::from(index), u64::from(index) << 30)
}

fn task(host: u16, local_number: u32) -> TaskView {
    TaskView::new(
        Tid::for_task(host_id(host), local_number).expect("a task"),
        Micros::default(),
    )
}

fn pool(hosts: u16) -> Snapshot {
    Snapshot::new(NOW, PlacementPolicy::Load, (1..=hosts).map(host).collect())
}

fn request(place: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        program: "worker".into(),
        where_arg: place.into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

fn place_request(snapshot: &Snapshot, request: &SpawnRequest) -> Placement {
    place(
        snapshot,
        &PlacementRequest::new(0, request, request.task_count, host_id(1)),
    )
}

fn host_indices(placement: &Placement) -> Vec<u16> {
    placement
        .hosts
        .iter()
        .map(|r| r.as_ref().map_or(0, |id| id.index()))
        .collect()
}

/// Constraints restrict the hosts under every placement policy.
#[test]
fn constraints_apply_under_every_policy() {
    let mut snapshot = pool(5);
    snapshot.hosts[4].labels = Arc::new(BTreeMap::from([("disk".into(), "ssd".into())]));
    snapshot.hosts[3].arch = "LINUXARM".into();
    snapshot.hosts[2].speed = 2000;
    for policy in [PlacementPolicy::Load, PlacementPolicy::RoundRobin] {
        snapshot.policy = policy;
        for (text, expected_indices) in [
            ("?memory >= 5G", [5, 0].as_slice()),
            ("?disk = ssd", &[5, 5]),
            ("?disk != ssd; cores <= 1", &[1, 1]),
            ("?arch = LINUXARM|SUN4:/tmp", &[4, 4]),
            ("?host != h1|h2|h4|h5", &[3, 3]),
            ("?speed > 1000, free >= 2.5", &[3, 3]),
            ("?same-host; host = h2|h1", &[2, 2]),
            ("?rank = cores; cores < 5", &[4, 4]),
            ("?rank = -memory", &[1, 2]),
            ("?rank = speed; spread; cores < 4", &[3, 1]),
        ] {
            let placement = place_request(&snapshot, &request(text, 2));
            assert_eq!(
                host_indices(&placement),
                expected_indices,
                "{policy} {text}: {}",
                placement.describe(&snapshot)
            );
        }
    }
}

/// If no host meets the constraints, the explanation states which condition excludes which hosts.
#[test]
fn unmeetable_request_lists_exclusions() {
    let mut snapshot = pool(4);
    snapshot.hosts[0].arch = "LINUXARM".into();
    snapshot.hosts[3].owner = OwnerState::Present {
        why: "alice".into(),
    };
    snapshot.hosts[2].sample = None;
    let placement = place_request(&snapshot, &request("?arch = LINUX64; memory >= 2.5G", 1));
    assert_eq!(placement.hosts, [Err(PvmError::OutOfRes)]);
    assert_eq!(
        placement.describe(&snapshot),
        "no host is free: h4: owner present (alice); arch = LINUX64 excludes h1 (LINUXARM); memory >= 2.5G excludes h2 \
         (2.0G), h3 (unknown)"
    );
    let ExclusionReason::UnmetCondition {
        condition,
        actual: found_value,
    } = &placement.exclusions[1].1
    else {
        panic!("{:?}", placement.exclusions)
    };
    assert_eq!(
        (
            condition.to_string().as_str(),
            found_value.to_string().as_str()
        ),
        ("memory >= 2.5G", "2.0G")
    );
    let impossible_placement = place_request(&snapshot, &request("?cores >= 99", 2));
    assert_eq!(
        impossible_placement.hosts,
        [Err(PvmError::NoHost); 2],
        "no waiting helps"
    );
}

/// If a constraint cannot be parsed, no task is placed. The error names the invalid part.
#[test]
fn invalid_constraint_places_nothing() {
    let placement = place_request(&pool(2), &request("?memory >= much", 2));
    assert_eq!(placement.hosts, [Err(PvmError::BadParam); 2]);
    assert_eq!(
        placement.reason.to_string(),
        "\"much\" is not a number for memory"
    );
}

/// Spread and memory constraints limit the number of tasks per host.
#[test]
fn spread_and_memory_limit_tasks_per_host() {
    let snapshot = pool(3);
    assert_eq!(
        host_indices(&place_request(&snapshot, &request("?spread", 3))),
        [3, 2, 1]
    );
    let spread_placement = place_request(&snapshot, &request("?spread = 1", 5));
    assert_eq!(host_indices(&spread_placement), [3, 2, 1, 0, 0]);
    assert_eq!(spread_placement.hosts[4], Err(PvmError::OutOfRes));
    assert!(
        spread_placement
            .describe(&snapshot)
            .contains("; room for 3 of 5"),
        "{}",
        spread_placement.describe(&snapshot)
    );
    // Seven tasks of one gibibyte each are requested. Six of them fit on three hosts with one, two
    // and three gibibytes.
    let mut target_indices = host_indices(&place_request(&snapshot, &request("?memory >= 1G", 7)));
    target_indices.sort_unstable();
    assert_eq!(target_indices, [0, 1, 2, 2, 3, 3, 3]);
    let same_host_placement = place_request(&snapshot, &request("?same-host; memory >= 1G", 4));
    assert_eq!(same_host_placement.hosts, [Err(PvmError::OutOfRes); 4]);
}

/// A `where` that names a host contains no constraints: `?cores >= 3` is then a host name. A
/// `where` of which no part is a constraint has the meaning that PVM documents.
#[test]
fn constraints_keep_meaning_of_plain_places() {
    let snapshot = pool(3);
    let place_indices = |flags, place_text: &str| {
        host_indices(&place_request(
            &snapshot,
            &SpawnRequest {
                flags,
                ..request(place_text, 1)
            },
        ))
    };
    assert_eq!(place_indices(SPAWN_HOST, "h2"), [2]);
    assert_eq!(
        place_indices(SPAWN_HOST, "?cores >= 3"),
        [0],
        "no host has this name"
    );
    assert_eq!(place_indices(SPAWN_ARCH, "LINUX64"), [3]);
    assert_eq!(place_indices(0, "anything at all"), [3]);
}

/// A host with too little free memory gets tasks only if no other host is left.
#[test]
fn host_without_spare_memory_comes_last() {
    let mut snapshot = pool(2);
    snapshot.hosts[1].sample = idle_sample(2, FREE_BYTES_PER_TASK_MIN - 1);
    assert_eq!(
        host_indices(&place_request(&snapshot, &request("", 1))),
        [1]
    );
    snapshot.hosts[1].sample = idle_sample(2, FREE_BYTES_PER_TASK_MIN * 2);
    assert_eq!(
        host_indices(&place_request(&snapshot, &request("", 6))),
        [2, 1, 2, 1, 1, 1],
        "it has room for two"
    );
}

/// A host with an expired sample meets no constraint with a number, whatever the number is.
#[test]
fn expired_sample_meets_no_numeric_constraint() {
    for text in [
        "?memory >= 1G",
        "?cores >= 1",
        "?free >= 0.01",
        "?memory <= 100G",
    ] {
        let mut snapshot = pool(2);
        let mut used_hosts = host_indices(&place_request(&snapshot, &request(text, 2)));
        used_hosts.sort_unstable();
        assert_eq!(used_hosts, [1, 2], "{text}");
        let expired_sample = snapshot.hosts[0].sample.as_mut().expect("it has one");
        expired_sample.received_at = Micros(snapshot.now.0 - SAMPLE_AGE_MAX.0 - 1);
        let placement = place_request(&snapshot, &request(text, 2));
        assert_eq!(host_indices(&placement), [2, 2], "{text}");
        let actual_value = placement
            .exclusions
            .iter()
            .find_map(|(id, reason)| match reason {
                ExclusionReason::UnmetCondition {
                    actual: actual_value,
                    ..
                } if *id == host_id(1) => Some(actual_value.clone()),
                _ => None,
            });
        assert_eq!(actual_value, Some(ActualValue::Unknown), "{text}");
    }
}

/// A host that is throttled by a processor limit does not count as idle.
#[test]
fn throttled_host_does_not_count_as_idle() {
    let mut snapshot = pool(2);
    for (i, pressure) in [(0, 0.0), (1, 0.9)] {
        let sample = LoadSample {
            cores: 4,
            busy_share: 0.25,
            cpu_pressure: pressure,
            ..LoadSample::default()
        };
        snapshot.hosts[i].sample = Some(TimedSample {
            sample,
            received_at: NOW,
            vm_task_count: 0,
        });
        snapshot.hosts[i].cores = 4;
    }
    assert_eq!(
        host_indices(&place_request(&snapshot, &request("", 3))),
        [1, 1, 1]
    );
}

/// A host in the network of the peers is preferred to a slightly better host in another network.
#[test]
fn near_host_beats_slightly_better_far_one() {
    let mut snapshot = pool(3);
    for (i, zone) in [(0, 7), (1, 7), (2, 8)] {
        (snapshot.hosts[i].zone, snapshot.hosts[i].cores) = (zone, 1);
    }
    snapshot.hosts[2].speed = 1050;
    let place_near = |peers: &[HostId], lost_hosts: &[HostId]| {
        let request = request("", 1);
        host_indices(&place(
            &snapshot,
            &PlacementRequest {
                peer_hosts: peers,
                lost_hosts,
                ..PlacementRequest::new(0, &request, 1, host_id(1))
            },
        ))
    };
    assert_eq!(place_near(&[], &[]), [3], "nobody to talk to");
    assert_eq!(place_near(&[host_id(1)], &[]), [1]);
    assert_eq!(place_near(&[host_id(1)], &[host_id(1)]), [2]);
    assert_eq!(place_near(&[host_id(3)], &[]), [3]);
    assert_eq!(
        place_near(&[host_id(1)], &[host_id(1), host_id(2)]),
        [3],
        "but far is better than nowhere"
    );
    let job_tid = task(1, 1).tid;
    snapshot.hosts[2].tasks = [1, 2]
        .map(|number| TaskView {
            job: job_tid,
            ..task(3, number)
        })
        .into();
    assert_eq!(
        snapshot.peer_hosts(host_id(1), job_tid),
        [host_id(1), host_id(3)],
        "the spawner and the tasks of the job"
    );
    assert_eq!(snapshot.peer_hosts(host_id(3), job_tid), [host_id(3)]);
    assert_eq!(
        snapshot.peer_hosts(host_id(1), task(1, 2).tid),
        [host_id(1)]
    );
}

/// Records a migration that transferred a gibibyte of memory in `duration_s` seconds. `source` and
/// `target` are positions of hosts in the snapshot.
fn record_migration(snapshot: &mut Snapshot, source: usize, target: usize, duration_s: u64) {
    let host_pair = Some(HostPair::between(
        &snapshot.hosts[source],
        &snapshot.hosts[target],
    ));
    let (resident_bytes, total_time) = (1 << 30, Micros::from_secs(duration_s));
    let freeze_duration = Micros::from_secs(0);
    snapshot.estimates.record_migration(&MigrationSample {
        pair: host_pair,
        slowness: 1.0,
        image_bytes: 0,
        resident_bytes,
        freeze_time: freeze_duration,
        time_until_complete: total_time,
    });
}

/// The weight of a host in another network depends on the transfer times of earlier migrations to
/// that network.
#[test]
fn network_distance_is_learned_from_migrations() {
    let target_index = |transfer_s: Option<u64>| {
        let mut snapshot = pool(4);
        for (i, zone, speed) in [(0, 7, 500), (1, 7, 1000), (2, 8, 1150), (3, 8, 1150)] {
            (
                snapshot.hosts[i].zone,
                snapshot.hosts[i].cores,
                snapshot.hosts[i].speed,
            ) = (zone, 1, speed);
        }
        if let Some(seconds) = transfer_s {
            record_migration(&mut snapshot, 0, 1, 2);
            record_migration(&mut snapshot, 1, 2, seconds);
        }
        let request = request("", 1);
        let peers = &[host_id(1)];
        host_indices(&place(
            &snapshot,
            &PlacementRequest {
                peer_hosts: peers,
                ..PlacementRequest::new(0, &request, 1, host_id(1))
            },
        ))[0]
    };
    assert_eq!(
        target_index(None),
        3,
        "nobody knows: a tenth less than in the own network"
    );
    assert_eq!(target_index(Some(2)), 3, "as fast as the own one");
    assert_eq!(
        target_index(Some(40)),
        2,
        "hosts there are a little faster, and far behind a slow link"
    );
}

/// A chooser for a batch system that has reserved slots on hosts, as (host name, number of slots).
struct ReservedSlots(Vec<(&'static str, usize)>);

impl Chooser for ReservedSlots {
    fn name(&self) -> &str {
        "the batch system"
    }

    fn choose(
        &self,
        _: &SpawnRequest,
        offers: &[HostOffer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String> {
        let mut selection = Vec::new();
        for (name, slot_count) in &self.0 {
            let offer_index = offers
                .iter()
                .position(|o| o.host.name == *name)
                .ok_or(format!("{name} is not free"))?;
            selection.extend(std::iter::repeat_n(offer_index, *slot_count));
        }
        selection.truncate(count);
        Ok(selection)
    }
}

/// If an external chooser selects hosts, its selection is used unless a host is excluded or has no
/// more room.
#[test]
fn external_choice_is_checked() {
    let snapshot = pool(3);
    let place_with = |text: &str, chooser: ReservedSlots, count| {
        let request = request(text, count);
        let placement_request = PlacementRequest::new(0, &request, count, host_id(1));
        place_with_chooser(&snapshot, &placement_request, Some(&chooser))
    };
    let partial_placement = place_with("", ReservedSlots(vec![("h1", 2), ("h3", 1)]), 4);
    assert_eq!(host_indices(&partial_placement), [1, 1, 3, 0]);
    assert_eq!(
        partial_placement.reason,
        PlacementReason::ChooserSelected {
            chooser: "the batch system".into()
        }
    );
    let excluded_placement = place_with("?host != h1", ReservedSlots(vec![("h1", 2)]), 2);
    assert_eq!(excluded_placement.hosts, [Err(PvmError::OutOfRes); 2]);
    assert_eq!(
        excluded_placement.reason.to_string(),
        "the batch system chose no host: h1 is not free"
    );
    let full_placement = place_with("?spread", ReservedSlots(vec![("h1", 2)]), 2);
    assert!(
        full_placement
            .reason
            .to_string()
            .ends_with("h1 has no more room"),
        "{}",
        full_placement.reason
    );
}

fn any_hosts() -> impl Strategy<Value = Vec<HostView>> {
    let host_tuple = (
        1_u32..9,
        0.0_f32..=1.0,
        0_u32..4,
        0_u32..3,
        prop::bool::weighted(0.3),
        980_u64..1000,
        500_i32..3000,
    );
    prop::collection::vec(host_tuple, EXPLAINED_HOSTS_MAX + 1..200).prop_map(|host_tuples| {
        let view =
            |(i, (cores, busy_fraction, tasks, zone, has_owner, received_s, speed)): (usize, _)| {
                let index = i as u16 + 1;
                let sample = LoadSample {
                    cores,
                    busy_share: busy_fraction,
                    available_bytes: 4 << 30,
                    ..LoadSample::default()
                };
                let sample = Some(TimedSample {
                    sample,
                    received_at: Micros::from_secs(received_s),
                    vm_task_count: 0,
                });
                let reason = "alice".to_string();
                let owner = if has_owner {
                    OwnerState::Present { why: reason }
                } else {
                    OwnerState::Unknown
                };
                let mut tasks: Vec<TaskView> = (1..=tasks).map(|n| task(index, n)).collect();
                if let Some(first_task) = tasks.first_mut().filter(|_| i % 7 == 0) {
                    first_task.migration = Some(HostId::new(index / 2));
                }
                for (n, task) in tasks.iter_mut().enumerate() {
                    (task.user, task.memory_bytes) =
                        (i as u32 % 3, [0, 1 << 20, 1 << 30][(i + n) % 3]);
                    task.migration_obstacle = (i % 11 == 0).then(|| Obstacle {
                        until: NOW,
                        reason: "held".into(),
                    });
                }
                HostView {
                    cores,
                    sample,
                    owner,
                    tasks,
                    zone,
                    speed,
                    ..host(index)
                }
            };
        host_tuples.into_iter().enumerate().map(view).collect()
    })
}

proptest! {
    /// The decisions are the same with an index that was updated after each change, with a new
    /// index, and with a scan of all hosts.
    #[test]
    fn updated_index_decides_like_a_new_one(
        old_hosts in any_hosts(), changed_hosts in any_hosts(), changes in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..4), 1..60),
        count in 1_u32..90, delay_s in 0_u64..30,
    ) {
        let mut updated_state: HostList = old_hosts.iter().cloned().collect();
        updated_state.refresh(NOW);
        for (host_choice, change_kind) in changes {
            let changed_host = &changed_hosts[host_choice.index(changed_hosts.len())];
            match change_kind {
                0 => updated_state.remove(changed_host.id),
                1 => updated_state.insert(changed_host.clone()),
                2 => if let Some(host) = updated_state.edit(changed_host.id) {
                    (host.owner, host.sample) = (changed_host.owner.clone(), changed_host.sample.clone());
                },
                _ => if let Some(host) = updated_state.edit(changed_host.id) {
                    host.tasks = changed_host.tasks.clone();
                },
            }
            updated_state.refresh(NOW);
        }
        let now = NOW + Micros::from_secs(delay_s);
        updated_state.refresh(now);
        let rebuilt_state: HostList = updated_state.iter().cloned().collect();
        let snapshot = |hosts| Snapshot::new(now, PlacementPolicy::Load, hosts);
        let (updated_state, rebuilt_state) = (snapshot(updated_state), snapshot(rebuilt_state));
        for text in ["", "?cores >= 3", "?spread", "?memory >= 1G; speed > 900"] {
            let request = request(text, count);
            let peers: Vec<HostId> = updated_state.hosts.first().map(|h| h.id).into_iter().collect();
            let placement_request = PlacementRequest { peer_hosts: &peers, ..PlacementRequest::new(0, &request, count, host_id(1)) };
            prop_assert_eq!(place(&updated_state, &placement_request), place(&rebuilt_state, &placement_request));
        }
        prop_assert_eq!(plan_evictions(&updated_state), plan_evictions(&rebuilt_state));
        let (mut updated_state, mut rebuilt_state) = (updated_state, rebuilt_state);
        for snapshot in [&mut updated_state, &mut rebuilt_state] {
            for (i, host) in snapshot.hosts.iter_mut().enumerate() {
                // Owners are present on most hosts. Therefore many classes of guests have no
                // target, and some have one.
                if i % 50 != 7 {
                    host.owner = OwnerState::Present { why: "alice".into() };
                }
            }
        }
        updated_state.hosts.refresh(now);
        prop_assert_eq!(plan_evictions(&updated_state), plan_evictions(&rebuilt_state));
    }

    /// Every host that gets a task meets the constraints. No host gets more tasks than the
    /// constraints and its memory allow.
    #[test]
    fn placed_tasks_meet_the_conditions(
        hosts in any_hosts(), host_count in 1_usize..200, count in 1_u32..90, cores in 1_u32..9, spread in 1_u32..4, rank in 0_u8..4,
    ) {
        let hosts: HostList = hosts.into_iter().take(host_count).collect();
        let snapshot = Snapshot::new(NOW, PlacementPolicy::Load, hosts);
        let rank = ["", "; rank = speed", "; rank = -free", "; same-host"][usize::from(rank)];
        let text = format!("?spread = {spread}; cores >= {cores}; memory >= 1G{rank}");
        let placement = place_request(&snapshot, &request(&text, count));
        let mut counts_by_host = BTreeMap::<HostId, u32>::new();
        for id in placement.hosts.iter().flatten() {
            *counts_by_host.entry(*id).or_default() += 1;
            let host = snapshot.host(*id).expect("only hosts of the snapshot are used");
            prop_assert!(!host.owner.excludes_guests());
            prop_assert!(host.sample.as_ref().is_some_and(|s| s.sample.cores >= cores));
        }
        let host_tasks_max = if rank == "; same-host" { 4 } else { spread };
        prop_assert!(counts_by_host.values().all(|n| *n <= host_tasks_max), "{:?}", counts_by_host);
    }
}
