//! Constraints of spawns on their hosts, placement by an external chooser, and large virtual
//! machines.

mod idle;

use idle::{NOW, host_id, idle_host, idle_sample};
use proptest::prelude::*;
use pvm_rm::decide::{
    ActualValue, Chooser, EXPLAINED_HOSTS_MAX, ExclusionReason, HostList, HostOffer, HostPair,
    HostView, MigrationSample, Obstacle, OwnerState, Placement, PlacementPolicy, PlacementReason,
    PlacementRequest, SAMPLE_AGE_MAX, Snapshot, TaskView, TimedSample, place, place_with_chooser,
    plan_evictions,
};
use sempa_proto::load::HEADROOM_BYTES_PER_TASK;
use sempa_proto::load::LoadSample;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Returns a host with `index` processors and `index` gigabytes of memory.
fn host(index: u16) -> HostView {
    idle_host(index, u32::from(index), u64::from(index) << 30)
}

fn task(host: u16, local: u32) -> TaskView {
    TaskView::new(
        Tid::task(host_id(host), local).expect("a task"),
        Micros::default(),
    )
}

fn pool(hosts: u16) -> Snapshot {
    Snapshot::new(NOW, PlacementPolicy::Load, (1..=hosts).map(host).collect())
}

fn request(place: &str, count: u32) -> SpawnRequest {
    SpawnRequest {
        file: "worker".into(),
        place: place.into(),
        count,
        ..SpawnRequest::default()
    }
}

fn placed(snapshot: &Snapshot, request: &SpawnRequest) -> Placement {
    place(
        snapshot,
        &PlacementRequest::new(0, request, request.count, host_id(1)),
    )
}

fn indices(placement: &Placement) -> Vec<u16> {
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
        for (text, expected) in [
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
            let placement = placed(&snapshot, &request(text, 2));
            assert_eq!(
                indices(&placement),
                expected,
                "{policy} {text}: {}",
                placement.sentence(&snapshot)
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
    let placement = placed(&snapshot, &request("?arch = LINUX64; memory >= 2.5G", 1));
    assert_eq!(placement.hosts, [Err(PvmError::OutOfRes)]);
    assert_eq!(
        placement.sentence(&snapshot),
        "no host is free: h4: owner present (alice); arch = LINUX64 excludes h1 (LINUXARM); memory >= 2.5G excludes h2 \
         (2.0G), h3 (unknown)"
    );
    let ExclusionReason::Unmet { condition, has } = &placement.excluded[1].1 else {
        panic!("{:?}", placement.excluded)
    };
    assert_eq!(
        (condition.to_string().as_str(), has.to_string().as_str()),
        ("memory >= 2.5G", "2.0G")
    );
    let never = placed(&snapshot, &request("?cores >= 99", 2));
    assert_eq!(never.hosts, [Err(PvmError::NoHost); 2], "no waiting helps");
}

/// If a constraint cannot be parsed, no task is placed, and the error names the invalid part.
#[test]
fn invalid_constraint_places_nothing() {
    let placement = placed(&pool(2), &request("?memory >= much", 2));
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
        indices(&placed(&snapshot, &request("?spread", 3))),
        [3, 2, 1]
    );
    let short = placed(&snapshot, &request("?spread = 1", 5));
    assert_eq!(indices(&short), [3, 2, 1, 0, 0]);
    assert_eq!(short.hosts[4], Err(PvmError::OutOfRes));
    assert!(
        short.sentence(&snapshot).contains("; room for 3 of 5"),
        "{}",
        short.sentence(&snapshot)
    );
    // Six tasks of one gigabyte each fit on three hosts with one, two and three gigabytes.
    let mut where_to = indices(&placed(&snapshot, &request("?memory >= 1G", 7)));
    where_to.sort_unstable();
    assert_eq!(where_to, [0, 1, 2, 2, 3, 3, 3]);
    let together = placed(&snapshot, &request("?same-host; memory >= 1G", 4));
    assert_eq!(together.hosts, [Err(PvmError::OutOfRes); 4]);
}

/// Constraints in `where` do not change the documented meaning of its other parts.
#[test]
fn constraints_keep_meaning_of_plain_places() {
    let snapshot = pool(3);
    let of = |flags, place: &str| {
        indices(&placed(
            &snapshot,
            &SpawnRequest {
                flags,
                ..request(place, 1)
            },
        ))
    };
    assert_eq!(of(SPAWN_HOST, "h2"), [2]);
    assert_eq!(of(SPAWN_HOST, "?cores >= 3"), [0], "no host has this name");
    assert_eq!(of(SPAWN_ARCH, "LINUX64"), [3]);
    assert_eq!(of(0, "anything at all"), [3]);
}

/// A host with too little free memory is used only after all others.
#[test]
fn host_without_spare_memory_comes_last() {
    let mut snapshot = pool(2);
    snapshot.hosts[1].sample = idle_sample(2, HEADROOM_BYTES_PER_TASK - 1);
    assert_eq!(indices(&placed(&snapshot, &request("", 1))), [1]);
    snapshot.hosts[1].sample = idle_sample(2, HEADROOM_BYTES_PER_TASK * 2);
    assert_eq!(
        indices(&placed(&snapshot, &request("", 6))),
        [2, 1, 2, 1, 1, 1],
        "it has room for two"
    );
}

/// A host with an expired sample meets no constraint on memory or idle processors.
#[test]
fn expired_sample_meets_no_numeric_constraint() {
    for text in [
        "?memory >= 1G",
        "?cores >= 1",
        "?free >= 0.01",
        "?memory <= 100G",
    ] {
        let mut snapshot = pool(2);
        let mut both = indices(&placed(&snapshot, &request(text, 2)));
        both.sort_unstable();
        assert_eq!(both, [1, 2], "{text}");
        let old = snapshot.hosts[0].sample.as_mut().expect("it has one");
        old.received_at = Micros(snapshot.now.0 - SAMPLE_AGE_MAX.0 - 1);
        let placement = placed(&snapshot, &request(text, 2));
        assert_eq!(indices(&placement), [2, 2], "{text}");
        let has = placement
            .excluded
            .iter()
            .find_map(|(id, reason)| match reason {
                ExclusionReason::Unmet { has, .. } if *id == host_id(1) => Some(has.clone()),
                _ => None,
            });
        assert_eq!(has, Some(ActualValue::Unknown), "{text}");
    }
}

/// A host that is throttled by a processor limit does not count as idle.
#[test]
fn throttled_host_does_not_count_as_idle() {
    let mut snapshot = pool(2);
    for (i, pressure) in [(0, 0.0), (1, 0.9)] {
        let sample = LoadSample {
            cores: 4,
            busy: 0.25,
            cpu_pressure: pressure,
            ..LoadSample::default()
        };
        snapshot.hosts[i].sample = Some(TimedSample {
            sample,
            received_at: NOW,
            own_tasks: 0,
        });
        snapshot.hosts[i].cores = 4;
    }
    assert_eq!(indices(&placed(&snapshot, &request("", 3))), [1, 1, 1]);
}

/// A host near the peers is preferred to a slightly better one in another network.
#[test]
fn near_host_beats_slightly_better_far_one() {
    let mut snapshot = pool(3);
    for (i, zone) in [(0, 7), (1, 7), (2, 8)] {
        (snapshot.hosts[i].zone, snapshot.hosts[i].cores) = (zone, 1);
    }
    snapshot.hosts[2].speed = 1050;
    let ask = |peers: &[HostId], without: &[HostId]| {
        let request = request("", 1);
        indices(&place(
            &snapshot,
            &PlacementRequest {
                peers,
                lost_hosts: without,
                ..PlacementRequest::new(0, &request, 1, host_id(1))
            },
        ))
    };
    assert_eq!(ask(&[], &[]), [3], "nobody to talk to");
    assert_eq!(ask(&[host_id(1)], &[]), [1]);
    assert_eq!(ask(&[host_id(1)], &[host_id(1)]), [2]);
    assert_eq!(ask(&[host_id(3)], &[]), [3]);
    assert_eq!(
        ask(&[host_id(1)], &[host_id(1), host_id(2)]),
        [3],
        "but far is better than nowhere"
    );
    let job = task(1, 1).tid;
    snapshot.hosts[2].tasks = [1, 2]
        .map(|number| TaskView {
            job,
            ..task(3, number)
        })
        .into();
    assert_eq!(
        snapshot.peer_hosts(host_id(1), job),
        [host_id(1), host_id(3)],
        "the spawner and the tasks of the job"
    );
    assert_eq!(snapshot.peer_hosts(host_id(3), job), [host_id(3)]);
    assert_eq!(
        snapshot.peer_hosts(host_id(1), task(1, 2).tid),
        [host_id(1)]
    );
}

/// Records the migration of a gigabyte between two hosts in `seconds` seconds.
fn record_migration(snapshot: &mut Snapshot, from: usize, to: usize, seconds: u64) {
    let way = Some(HostPair::between(
        &snapshot.hosts[from],
        &snapshot.hosts[to],
    ));
    let (resident, whole) = (1 << 30, Micros::from_secs(seconds));
    let frozen = Micros::from_secs(0);
    snapshot.estimates.record_migration(&MigrationSample {
        pair: way,
        slowness: 1.0,
        image_bytes: 0,
        resident_bytes: resident,
        frozen,
        complete_after: whole,
    });
}

/// The weight of a host in another network follows the transfer times of earlier migrations.
#[test]
fn network_distance_is_learned_from_migrations() {
    let chosen = |over: Option<u64>| {
        let mut snapshot = pool(4);
        for (i, zone, speed) in [(0, 7, 500), (1, 7, 1000), (2, 8, 1150), (3, 8, 1150)] {
            (
                snapshot.hosts[i].zone,
                snapshot.hosts[i].cores,
                snapshot.hosts[i].speed,
            ) = (zone, 1, speed);
        }
        if let Some(seconds) = over {
            record_migration(&mut snapshot, 0, 1, 2);
            record_migration(&mut snapshot, 1, 2, seconds);
        }
        let request = request("", 1);
        let peers = &[host_id(1)];
        indices(&place(
            &snapshot,
            &PlacementRequest {
                peers,
                ..PlacementRequest::new(0, &request, 1, host_id(1))
            },
        ))[0]
    };
    assert_eq!(
        chosen(None),
        3,
        "nobody knows: a tenth less than in the own network"
    );
    assert_eq!(chosen(Some(2)), 3, "as fast as the own one");
    assert_eq!(
        chosen(Some(40)),
        2,
        "hosts there are a little faster, and far behind a slow link"
    );
}

/// A chooser for a batch system with reserved slots, as (host name, number of slots).
struct Reserved(Vec<(&'static str, usize)>);

impl Chooser for Reserved {
    fn name(&self) -> &str {
        "the batch system"
    }

    fn choose(
        &self,
        _: &SpawnRequest,
        offers: &[HostOffer<'_>],
        count: usize,
    ) -> Result<Vec<usize>, String> {
        let mut chosen = Vec::new();
        for (name, places) in &self.0 {
            let at = offers
                .iter()
                .position(|o| o.host.name == *name)
                .ok_or(format!("{name} is not free"))?;
            chosen.extend(std::iter::repeat_n(at, *places));
        }
        chosen.truncate(count);
        Ok(chosen)
    }
}

/// The selection of an external chooser is used and checked.
#[test]
fn external_choice_is_checked() {
    let snapshot = pool(3);
    let chosen = |text: &str, reserved: Reserved, count| {
        let request = request(text, count);
        let ask = PlacementRequest::new(0, &request, count, host_id(1));
        place_with_chooser(&snapshot, &ask, Some(&reserved))
    };
    let good = chosen("", Reserved(vec![("h1", 2), ("h3", 1)]), 4);
    assert_eq!(indices(&good), [1, 1, 3, 0]);
    assert_eq!(
        good.reason,
        PlacementReason::ChooserSelected {
            by: "the batch system".into()
        }
    );
    let gone = chosen("?host != h1", Reserved(vec![("h1", 2)]), 2);
    assert_eq!(gone.hosts, [Err(PvmError::OutOfRes); 2]);
    assert_eq!(
        gone.reason.to_string(),
        "the batch system chose no host: h1 is not free"
    );
    let full = chosen("?spread", Reserved(vec![("h1", 2)]), 2);
    assert!(
        full.reason.to_string().ends_with("h1 has no more room"),
        "{}",
        full.reason
    );
}

fn many_hosts() -> impl Strategy<Value = Vec<HostView>> {
    let one = (
        1_u32..9,
        0.0_f32..=1.0,
        0_u32..4,
        0_u32..3,
        prop::bool::weighted(0.3),
        980_u64..1000,
        500_i32..3000,
    );
    prop::collection::vec(one, EXPLAINED_HOSTS_MAX + 1..200).prop_map(|all| {
        let view = |(i, (cores, busy, tasks, zone, present, at, speed)): (usize, _)| {
            let index = i as u16 + 1;
            let sample = LoadSample {
                cores,
                busy,
                available_bytes: 4 << 30,
                ..LoadSample::default()
            };
            let sample = Some(TimedSample {
                sample,
                received_at: Micros::from_secs(at),
                own_tasks: 0,
            });
            let why = "alice".to_string();
            let owner = if present {
                OwnerState::Present { why }
            } else {
                OwnerState::Unknown
            };
            let mut tasks: Vec<TaskView> = (1..=tasks).map(|n| task(index, n)).collect();
            if let Some(first) = tasks.first_mut().filter(|_| i % 7 == 0) {
                first.migrating = Some(HostId::new(index / 2));
            }
            for (n, task) in tasks.iter_mut().enumerate() {
                (task.user, task.memory_bytes) = (i as u32 % 3, [0, 1 << 20, 1 << 30][(i + n) % 3]);
                task.obstacle = (i % 11 == 0).then(|| Obstacle {
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
        all.into_iter().enumerate().map(view).collect()
    })
}

proptest! {
    /// The decisions are the same with an index that is updated change by change, with a new index,
    /// and with a scan of all hosts.
    #[test]
    fn updated_index_decides_like_a_new_one(
        before in many_hosts(), after in many_hosts(), order in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..4), 1..60),
        count in 1_u32..90, later in 0_u64..30,
    ) {
        let mut kept: HostList = before.iter().cloned().collect();
        kept.refresh(NOW);
        for (which, what) in order {
            let new = &after[which.index(after.len())];
            match what {
                0 => kept.remove(new.id),
                1 => kept.insert(new.clone()),
                2 => if let Some(host) = kept.edit(new.id) {
                    (host.owner, host.sample) = (new.owner.clone(), new.sample.clone());
                },
                _ => if let Some(host) = kept.edit(new.id) {
                    host.tasks = new.tasks.clone();
                },
            }
            kept.refresh(NOW);
        }
        let now = NOW + Micros::from_secs(later);
        kept.refresh(now);
        let anew: HostList = kept.iter().cloned().collect();
        let snapshot = |hosts| Snapshot::new(now, PlacementPolicy::Load, hosts);
        let (kept, anew) = (snapshot(kept), snapshot(anew));
        for text in ["", "?cores >= 3", "?spread", "?memory >= 1G; speed > 900"] {
            let request = request(text, count);
            let peers: Vec<HostId> = kept.hosts.first().map(|h| h.id).into_iter().collect();
            let ask = PlacementRequest { peers: &peers, ..PlacementRequest::new(0, &request, count, host_id(1)) };
            prop_assert_eq!(place(&kept, &ask), place(&anew, &ask));
        }
        prop_assert_eq!(plan_evictions(&kept), plan_evictions(&anew));
        let (mut kept, mut anew) = (kept, anew);
        for snapshot in [&mut kept, &mut anew] {
            for (i, host) in snapshot.hosts.iter_mut().enumerate() {
                // Owners are present on most hosts, so that many classes of guests have no target
                // and some have one.
                if i % 50 != 7 {
                    host.owner = OwnerState::Present { why: "alice".into() };
                }
            }
        }
        kept.hosts.refresh(now);
        prop_assert_eq!(plan_evictions(&kept), plan_evictions(&anew));
    }

    /// Every host that gets a task meets the constraints, and no host gets more tasks than its
    /// capacity.
    #[test]
    fn placed_tasks_meet_the_conditions(
        hosts in many_hosts(), few in 1_usize..200, count in 1_u32..90, cores in 1_u32..9, spread in 1_u32..4, rank in 0_u8..4,
    ) {
        let hosts: HostList = hosts.into_iter().take(few).collect();
        let snapshot = Snapshot::new(NOW, PlacementPolicy::Load, hosts);
        let rank = ["", "; rank = speed", "; rank = -free", "; same-host"][usize::from(rank)];
        let text = format!("?spread = {spread}; cores >= {cores}; memory >= 1G{rank}");
        let placement = placed(&snapshot, &request(&text, count));
        let mut on = BTreeMap::<HostId, u32>::new();
        for id in placement.hosts.iter().flatten() {
            *on.entry(*id).or_default() += 1;
            let host = snapshot.host(*id).expect("only hosts of the snapshot are used");
            prop_assert!(!host.owner.excludes_guests());
            prop_assert!(host.sample.as_ref().is_some_and(|s| s.sample.cores >= cores));
        }
        let most = if rank == "; same-host" { 4 } else { spread };
        prop_assert!(on.values().all(|n| *n <= most), "{:?}", on);
    }
}
