//! Decisions on fixed snapshots, and properties that hold for any snapshot.

mod idle;

use idle::{NOW, h, idle, sampled};
use proptest::prelude::*;
use pvm_rm::decide::{
    Ask, HostView, Leaving, MOVES_AT_ONCE_MAX, Owner, Policy, Reason, SETTLE, Sampled, Snapshot,
    Stay, StayReason, TaskView, Until, moves, place,
};
use sempa_proto::load::{GuestLimits, LoadSample};
use sempa_proto::migration::MigrationCause;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::sync::Arc;

fn t(host: u16, local: u32) -> Tid {
    Tid::task(h(host), local).expect("a task")
}

fn task(tid: Tid) -> TaskView {
    TaskView::new(tid, Micros::default())
}

/// A host with two processors.
fn host(index: u16) -> HostView {
    idle(index, 2, 0)
}

fn pool(hosts: u16, policy: Policy) -> Snapshot {
    Snapshot::new(NOW, policy, (1..=hosts).map(host).collect())
}

fn present() -> Owner {
    Owner::Present {
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

fn ask(request: &SpawnRequest) -> Ask<'_> {
    Ask::of(0, request, request.count, h(1))
}

fn indices(hosts: &[Result<HostId, PvmError>]) -> Vec<u16> {
    hosts
        .iter()
        .map(|r| r.as_ref().map_or(0, |id| id.index()))
        .collect()
}

/// Round-robin assigns blocks of tasks and begins after the host used last.
#[test]
fn round_robin_assigns_blocks_in_rotation() {
    let mut snapshot = pool(3, Policy::RoundRobin);
    let first = place(&snapshot, &ask(&request(0, "", 7)));
    assert_eq!(indices(&first.hosts), [2, 2, 2, 3, 3, 1, 1]);
    snapshot.rotation = first.rotation;
    let second = place(&snapshot, &ask(&request(0, "", 1)));
    assert_eq!(indices(&second.hosts), [2]);
    snapshot.rotation = second.rotation;
    assert_eq!(
        indices(&place(&snapshot, &ask(&request(0, "", 2))).hosts),
        [3, 1]
    );
}

/// The place of a spawn names a host, a directory or an architecture.
#[test]
fn place_names_host_directory_or_architecture() {
    let mut snapshot = pool(3, Policy::Load);
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
        let placed = place(&snapshot, &ask(&request(flags, place_, 2)));
        assert_eq!(indices(&placed.hosts), expected, "{flags} {place_}");
    }
}

/// A request whose place matches nothing fails for each task with `NoHost`.
#[test]
fn unknown_place_fails_with_no_host() {
    let snapshot = pool(3, Policy::Load);
    for (flags, place_) in [
        (SPAWN_HOST, "h9"),
        (SPAWN_HOST, "H1"),
        (SPAWN_HOST, ""),
        (SPAWN_ARCH, "SUN4"),
        (SPAWN_COMPLEMENT, ""),
        (SPAWN_ARCH | SPAWN_COMPLEMENT, "LINUX64"),
    ] {
        let placed = place(&snapshot, &ask(&request(flags, place_, 2)));
        assert_eq!(placed.hosts, [Err(PvmError::NoHost); 2], "{flags} {place_}");
        assert_eq!(placed.excluded.len(), 3);
    }
}

/// A host whose owner is present is not used, even by name.
#[test]
fn host_with_owner_is_never_used() {
    for policy in [Policy::Load, Policy::RoundRobin] {
        let mut snapshot = pool(2, policy);
        snapshot.hosts[1].owner = present();
        let placed = place(&snapshot, &ask(&request(0, "", 3)));
        assert_eq!(indices(&placed.hosts), [1, 1, 1]);
        let told = placed.sentence(&snapshot);
        assert!(
            told.contains("h2: owner present (alice on pts/0)"),
            "{told}"
        );
        let named = place(&snapshot, &ask(&request(SPAWN_HOST, "h2", 2)));
        assert_eq!(named.hosts, [Err(PvmError::OutOfRes); 2]);
        assert_eq!(
            named.sentence(&snapshot),
            "no host is free: h2: owner present (alice on pts/0)"
        );
        // A request for any host except h1 does not name h2.
        let other = place(
            &snapshot,
            &ask(&request(SPAWN_HOST | SPAWN_COMPLEMENT, "h1", 1)),
        );
        assert_eq!(other.hosts, [Err(PvmError::OutOfRes)]);
        let told = other.sentence(&snapshot);
        assert!(told.contains("no host is free: "), "{told}");
    }
}

/// Of many excluded hosts the first are listed with their reasons and the others are counted.
#[test]
fn many_exclusions_are_listed_then_counted() {
    let mut snapshot = pool(1000, Policy::Load);
    for host in snapshot.hosts.iter_mut() {
        host.owner = present();
    }
    snapshot.hosts[499].tasks = vec![task(t(500, 1))];
    snapshot.hosts[0].tasks = vec![task(t(1, 1))];
    let refused = place(&snapshot, &ask(&request(0, "", 1)));
    assert_eq!(
        (refused.hosts[0], refused.excluded.len()),
        (Err(PvmError::OutOfRes), 256)
    );
    let told = refused.sentence(&snapshot);
    assert!(
        told.contains("h16: owner present (alice on pts/0); and 984 more"),
        "{told}"
    );
    let out = moves(&snapshot);
    for (stay, first) in out.stay.iter().zip([h(2), h(1)]) {
        let StayReason::NoHost { excluded } = &stay.why else {
            panic!("{stay:?}")
        };
        assert_eq!(excluded[0].0, first, "not the host where it is");
        let told = stay.sentence(&snapshot);
        assert!(told.ends_with("; and 983 more)"), "{told}");
    }
    assert_eq!(out.stay.len(), 2);
    // A requested host is always listed, however many others are excluded.
    let named = place(
        &snapshot,
        &Ask {
            without: &[h(900)],
            ..ask(&request(SPAWN_HOST, "h900", 1))
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
    let mut snapshot = pool(3, Policy::Load);
    snapshot.hosts[1].cores = 4;
    // Each host can give one whole processor to each of `cores` tasks.
    let placed = place(&snapshot, &ask(&request(0, "", 8)));
    let mut seen = indices(&placed.hosts);
    seen.sort_unstable();
    assert_eq!(seen, [1, 1, 2, 2, 2, 2, 3, 3]);
}

/// The load policy counts external demand once.
#[test]
fn external_load_counts_once() {
    let mut snapshot = pool(2, Policy::Load);
    let busy = LoadSample {
        cores: 2,
        running: 3,
        load1: 3.0,
        busy: 1.0,
        ..LoadSample::default()
    };
    // Both hosts are equally busy, h2 because of three tasks of ours, h1 because of external load.
    snapshot.hosts[0].sample = Some(Sampled {
        sample: busy,
        at: NOW,
        own: 0,
    });
    snapshot.hosts[1].sample = Some(Sampled {
        sample: busy,
        at: NOW,
        own: 3,
    });
    snapshot.hosts[1].tasks = (1..=3).map(|n| task(t(2, n))).collect();
    assert_eq!(
        indices(&place(&snapshot, &ask(&request(0, "", 1))).hosts),
        [1],
        "equal shares, fewer tasks of ours"
    );
    snapshot.hosts[1].tasks.truncate(1);
    assert_eq!(
        indices(&place(&snapshot, &ask(&request(0, "", 1))).hosts),
        [2],
        "our tasks there have ended"
    );
}

/// An expired sample counts as unknown load, and the decision reports that.
#[test]
fn expired_sample_counts_as_unknown_load() {
    let mut snapshot = pool(2, Policy::Load);
    let busy = LoadSample {
        cores: 2,
        running: 9,
        load1: 9.0,
        busy: 1.0,
        ..LoadSample::default()
    };
    snapshot.hosts[0].sample = Some(Sampled {
        sample: busy,
        at: Micros::from_secs(970),
        own: 0,
    });
    snapshot.hosts[1].sample = None;
    let placed = place(&snapshot, &ask(&request(0, "", 2)));
    assert_eq!(indices(&placed.hosts), [1, 2]);
    let told = placed.sentence(&snapshot);
    assert!(
        told.contains("load unknown: h1 (sample 30 s old), h2 (no sample)"),
        "{told}"
    );
}

/// A lost host is excluded, and a request bound to it fails.
#[test]
fn lost_host_is_excluded() {
    let snapshot = pool(2, Policy::Load);
    let (free, bound) = (request(0, "", 2), request(SPAWN_HOST, "h2", 2));
    let without = [h(2)];
    assert_eq!(
        indices(
            &place(
                &snapshot,
                &Ask {
                    without: &without,
                    ..ask(&free)
                }
            )
            .hosts
        ),
        [1, 1]
    );
    assert_eq!(
        place(
            &snapshot,
            &Ask {
                without: &without,
                ..ask(&bound)
            }
        )
        .hosts,
        [Err(PvmError::HostFail); 2]
    );
}

/// All tasks leave a present owner and spread over the best hosts.
#[test]
fn evicted_tasks_spread_over_best_hosts() {
    let mut snapshot = pool(4, Policy::Load);
    snapshot.hosts[1].owner = present();
    snapshot.hosts[1].tasks = (1..=4).map(|n| task(t(2, n))).collect();
    snapshot.hosts[1].tasks[3].pinned = true;
    snapshot.hosts[2].tasks = vec![task(t(3, 1)), task(t(3, 2))];
    let out = moves(&snapshot);
    let went: Vec<_> = out
        .go
        .iter()
        .map(|m| (m.tid, m.from.index(), m.to.index()))
        .collect();
    assert_eq!(went, [(t(2, 1), 2, 1), (t(2, 2), 2, 4), (t(2, 3), 2, 1)]);
    assert_eq!(
        out.go[0].cause,
        MigrationCause::Owner {
            why: "alice on pts/0".into()
        }
    );
    assert!(out.stay.is_empty());
}

/// An evicted task migrates to a host near the other tasks of its job.
#[test]
fn evicted_task_stays_near_its_job() {
    let mut snapshot = pool(4, Policy::Load);
    let of_job = |tid| TaskView {
        job: t(1, 1),
        ..task(tid)
    };
    snapshot.hosts[0].owner = present();
    snapshot.hosts[0].tasks = vec![of_job(t(1, 1))];
    // The fourth host is a little faster but in another network.
    (snapshot.hosts[3].zone, snapshot.hosts[3].speed) = (7, 1050);
    let goes = |snapshot: &Snapshot| moves(snapshot).go[0].to;
    assert_eq!(goes(&snapshot), h(4), "alone it goes where it gets most");
    snapshot.hosts[1].tasks = vec![of_job(t(2, 1))];
    assert_eq!(goes(&snapshot), h(3));
    snapshot.hosts[1].tasks = vec![task(t(2, 1))];
    assert_eq!(goes(&snapshot), h(4), "the other one is of another job");
}

/// Tasks without a target stay, with a reason for each host.
#[test]
fn tasks_without_target_stay_with_reasons() {
    let mut snapshot = pool(4, Policy::Load);
    snapshot.hosts[0].owner = present();
    snapshot.hosts[0].tasks = vec![task(t(1, 1))];
    snapshot.hosts[1].owner = present();
    snapshot.hosts[2].arch = "LINUXPPC64".into();
    let until = |s| Until {
        at: Micros::from_secs(s),
        why: "its engine is broken".into(),
    };
    snapshot.hosts[3].no_moves = Some(until(1060));
    let out = moves(&snapshot);
    assert!(out.go.is_empty());
    let StayReason::NoHost { excluded } = &out.stay[0].why else {
        panic!("{:?}", out.stay)
    };
    assert_eq!(excluded.len(), 3);
    assert_eq!(
        excluded[1].1,
        Reason::OtherArch {
            has: "LINUXPPC64".into()
        }
    );
    assert_eq!(out.again(), Some(Micros::from_secs(1060)));
    let sentence = out.stay[0].sentence(&snapshot);
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
    let mut snapshot = pool(3, Policy::Load);
    snapshot.hosts[0].owner = present();
    let refused = Until {
        at: Micros::from_secs(1030),
        why: "kernels differ".into(),
    };
    snapshot.hosts[0].tasks = vec![TaskView {
        refused: vec![(h(2), refused)],
        ..task(t(1, 1))
    }];
    assert_eq!(moves(&snapshot).go[0].to, h(3));
    snapshot.now = Micros::from_secs(1030);
    assert_eq!(moves(&snapshot).go[0].to, h(2), "the refusal has aged out");
}

/// A host whose owner has just left is the last choice.
#[test]
fn host_just_left_by_owner_is_last_choice() {
    let mut snapshot = pool(3, Policy::Load);
    snapshot.hosts[0].owner = present();
    snapshot.hosts[0].tasks = vec![task(t(1, 1))];
    snapshot.hosts[1].owner = Owner::Absent {
        left: Some(Micros::from_secs(999)),
    };
    snapshot.hosts[2].tasks = (1..=9).map(|n| task(t(3, n))).collect();
    assert_eq!(moves(&snapshot).go[0].to, h(3));
    snapshot.hosts[2].owner = present();
    snapshot.hosts[2].tasks.clear();
    assert_eq!(moves(&snapshot).go[0].to, h(2), "but better than none");
}

/// A task is evicted however often it was evicted recently.
#[test]
fn recent_evictions_do_not_prevent_another() {
    let mut snapshot = pool(2, Policy::Load);
    snapshot.hosts[0].owner = present();
    let recent = (0..20).map(|i| Micros::from_secs(950 + 2 * i)).collect();
    snapshot.hosts[0].tasks = vec![TaskView {
        moves: recent,
        ..task(t(1, 1))
    }];
    let out = moves(&snapshot);
    assert_eq!((out.go.len(), out.stay.len()), (1, 0));
}

/// The number of concurrent migrations is limited, and other tasks wait for their turn.
#[test]
fn concurrent_migrations_are_limited() {
    let mut snapshot = pool(2, Policy::Load);
    snapshot.hosts[0].owner = present();
    let many = MOVES_AT_ONCE_MAX as u32 + 5;
    snapshot.hosts[0].tasks = (1..=many).map(|n| task(t(1, n))).collect();
    snapshot.hosts[0].tasks[0].moving = Some(Some(h(2)));
    let out = moves(&snapshot);
    assert_eq!(out.go.len(), MOVES_AT_ONCE_MAX - 1);
    assert!(out.stay.iter().all(|s| s.why == StayReason::Turn) && out.stay.len() == 5);
}

/// A guest that no host has memory for does not keep a smaller guest of the same program from
/// leaving.
#[test]
fn small_guest_leaves_although_large_one_cannot() {
    let mut snapshot = pool(2, Policy::Load);
    snapshot.hosts[0].owner = present();
    let sized = |n, bytes| TaskView {
        bytes,
        ..task(t(1, n))
    };
    snapshot.hosts[0].tasks = vec![sized(1, 8 << 30), sized(2, 6 << 30), sized(3, 1 << 20)];
    snapshot.hosts[1].sample = sampled(2, 4 << 30);
    snapshot.hosts[1].terms.limits = Arc::new(GuestLimits {
        memory_free: 1 << 30,
        ..GuestLimits::default()
    });
    let out = moves(&snapshot);
    assert_eq!(out.go.iter().map(|m| m.tid).collect::<Vec<_>>(), [t(1, 3)]);
    let keeps = |stay: &Stay| match &stay.why {
        StayReason::NoHost { excluded } => matches!(excluded[0], (_, Reason::Memory { .. })),
        _ => false,
    };
    assert!(
        out.stay.len() == 2 && out.stay.iter().all(keeps),
        "{:?}",
        out.stay
    );
}

/// The reasons for which a guest stays are decided for each guest separately.
#[test]
fn stay_reasons_are_decided_per_guest() {
    let mut snapshot = pool(4, Policy::Load);
    let waits = [
        Leaving::Now,
        Leaving::Never,
        Leaving::At(NOW + Micros::from_secs(1)),
        Leaving::At(NOW),
    ];
    for (i, leaving) in waits.into_iter().enumerate() {
        let host = &mut snapshot.hosts[i];
        (host.owner, host.terms.leaving) = (present(), leaving);
        host.tasks = vec![task(t(i as u16 + 1, 1))];
    }
    let until = |why: &str| Until {
        at: NOW + Micros::from_secs(9),
        why: why.into(),
    };
    snapshot.hosts[0].tasks.push(TaskView {
        held: Some(until("held")),
        ..task(t(1, 2))
    });
    snapshot.hosts[0].tasks.push(TaskView {
        refused: vec![(h(5), until("refused"))],
        ..task(t(1, 3))
    });
    let out = moves(&snapshot);
    let whys: Vec<&str> = out
        .stay
        .iter()
        .map(|stay| match stay.why {
            StayReason::Waits => "waits",
            StayReason::Grace => "grace",
            StayReason::NoHost { .. } => "no host",
            StayReason::Held { .. } => "held",
            _ => "else",
        })
        .collect();
    assert_eq!(
        (out.go.len(), whys),
        (
            0,
            vec!["no host", "held", "no host", "waits", "grace", "no host"]
        )
    );
    snapshot.hosts.put(host(5));
    snapshot.hosts.refresh(NOW);
    let out = moves(&snapshot);
    let gone: Vec<Tid> = out.go.iter().map(|m| m.tid).collect();
    assert_eq!((gone, out.stay.len()), (vec![t(1, 1), t(4, 1)], 4));
}

fn any_owner() -> impl Strategy<Value = Owner> {
    prop_oneof![
        Just(Owner::Unknown),
        Just(Owner::Absent { left: None }),
        (900_u64..1000).prop_map(|s| Owner::Absent {
            left: Some(Micros::from_secs(s))
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
                    sample: Some(Sampled {
                        sample,
                        at: Micros::from_secs(at),
                        own: tasks / 2,
                    }),
                    tasks: (1..=tasks)
                        .map(|n| TaskView {
                            pinned: n == 5,
                            ..task(t(index, n))
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
            Policy::Load
        } else {
            Policy::RoundRobin
        };
        Snapshot {
            rotation: h(rotation),
            ..Snapshot::new(NOW, policy, hosts.into_iter().collect())
        }
    })
}

proptest! {
    /// No task is placed on or migrated to a host with a present owner.
    #[test]
    fn no_task_goes_to_present_owner(
        snapshot in any_pool(), flags in 0..64_i32, to in 0_u16..8, count in 1_u32..40,
    ) {
        let request = request(flags, &format!("h{to}"), count);
        let ask = ask(&request);
        let placed = place(&snapshot, &ask);
        prop_assert_eq!(placed.hosts.len(), count as usize);
        for id in placed.hosts.iter().flatten() {
            let there = snapshot.host(*id).expect("only hosts of the snapshot are used");
            prop_assert!(!there.owner.is_present());
        }
        for step in moves(&snapshot).go {
            let there = snapshot.host(step.to).expect("only hosts of the snapshot are used");
            let from = snapshot.host(step.from).expect("tasks are on hosts of the snapshot");
            prop_assert!(!there.owner.is_present() && there.arch == from.arch && step.from != step.to);
        }
    }

    /// Every task that can migrate and is next to an owner migrates or has a reason to stay.
    #[test]
    fn every_guest_migrates_or_has_a_reason(snapshot in any_pool()) {
        let out = moves(&snapshot);
        let mut told: Vec<Tid> = out.go.iter().map(|m| m.tid).chain(out.stay.iter().map(|s| s.tid)).collect();
        told.sort_unstable();
        let with_owner = snapshot.hosts.iter().filter(|h| h.owner.is_present());
        let mut must: Vec<Tid> = with_owner.flat_map(|h| &h.tasks).filter(|t| !t.pinned).map(|t| t.tid).collect();
        must.sort_unstable();
        prop_assert_eq!(told, must);
    }

    /// Without present owners no task migrates.
    #[test]
    fn pool_without_owners_is_not_disturbed(mut snapshot in any_pool()) {
        for host in snapshot.hosts.iter_mut().filter(|h| h.owner.is_present()) {
            host.owner = Owner::Unknown;
        }
        let out = moves(&snapshot);
        prop_assert!(out.go.is_empty() && out.stay.is_empty());
    }

    /// On idle equal hosts the numbers of placed tasks differ by at most one.
    #[test]
    fn idle_equal_hosts_get_equal_numbers(
        hosts in 1_u16..9, count in 1_u32..60, load in any::<bool>(),
    ) {
        let snapshot = pool(hosts, if load { Policy::Load } else { Policy::RoundRobin });
        let placed = place(&snapshot, &ask(&request(0, "", count)));
        let on = |i| placed.hosts.iter().filter(|r| **r == Ok(h(i))).count();
        let counts: Vec<usize> = (1..=hosts).map(on).collect();
        prop_assert!(counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0) <= 1);
    }

    /// For up to ten minutes owners come and go at random; migrations succeed at once.
    #[test]
    fn owner_changes_evict_without_flapping(
        toggles in prop::collection::vec((0_usize..4, 1_u64..5000), 1..400),
    ) {
        let mut snapshot = pool(4, Policy::Load);
        for (i, host) in snapshot.hosts.iter_mut().enumerate() {
            host.tasks = (1..=2).map(|n| task(t(i as u16 + 1, n))).collect();
        }
        for (who, wait_ms) in toggles {
            snapshot.now = snapshot.now + Micros::from_millis(wait_ms);
            let now = snapshot.now;
            let owner = &mut snapshot.hosts[who].owner;
            *owner = if owner.is_present() { Owner::Absent { left: Some(now) } } else { present() };
            let out = moves(&snapshot);
            let somewhere = snapshot.hosts.iter().any(|h| !h.owner.is_present());
            let nowhere = |stay: &Stay| !somewhere && matches!(stay.why, StayReason::NoHost { .. });
            prop_assert!(out.stay.iter().all(nowhere));
            for step in out.go {
                let from = snapshot.hosts.iter_mut().find(|h| h.id == step.from).expect("known");
                prop_assert!(from.owner.is_present());
                let at = from.tasks.iter().position(|t| t.tid == step.tid).expect("known");
                let mut moved = from.tasks.remove(at);
                moved.moves.push(now);
                let settled = |h: &HostView| match h.owner {
                    Owner::Present { .. } => false,
                    Owner::Absent { left: Some(left) } => now.since(left) >= SETTLE,
                    _ => true,
                };
                let choice = snapshot.hosts.iter().any(|h| h.id != step.from && settled(h));
                let to = snapshot.hosts.iter_mut().find(|h| h.id == step.to).expect("known");
                prop_assert!(settled(to) || !choice);
                to.tasks.push(moved);
            }
            // No further migration is decided until something changes.
            prop_assert!(moves(&snapshot).go.is_empty());
        }
    }
}
