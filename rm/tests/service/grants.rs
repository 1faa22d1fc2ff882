//! Placement leases: tasks that spawn repeatedly get hosts for their next spawns in advance.

use crate::common::{
    TestBed, client, host_id, request, rm_tid as own, spawned_task_info, task_id, task_info, world,
};
use crate::{options_with_policy, query, task_ended};
use pvm_rm::decide::{Limits, PlacementPolicy};
use pvm_rm::grants::{GRANT_WINDOW, GRANTED_SLOTS_MAX, REVIEW_INTERVAL};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::TAG_POLICY;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::{CTX_RM, DecisionKind, PlacementRule, RmQuery, RmReply};
use sempa_proto::sm::{
    LEASE_HOSTS_MAX, LEASE_TASKS_MAX, PlacementLease, PlacementLeaseUse, SM_PLACEMENT_LEASE,
    SM_PLACEMENT_LEASE_USED, pack_placement_lease_use, unpack_placement_lease,
};
use sempa_proto::table::TASK_CONNECTED;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// Lets every host carry out its orders to start tasks. Returns all started tasks.
fn carry_out_orders(bed: &mut TestBed) -> Vec<Tid> {
    bed.settle();
    let mut all = Vec::new();
    loop {
        let execs = bed.world().take_start_orders();
        if execs.is_empty() {
            return all;
        }
        for exec in execs {
            let tids = bed.world().ack(&exec);
            bed.world().tasks.extend(
                tids.iter()
                    .map(|tid| spawned_task_info(*tid, exec.host.index())),
            );
            all.extend(tids);
        }
        bed.settle();
    }
}

/// Sends the same spawn of the client once for each wait id. Returns the started tasks.
fn spawn_repeatedly(
    bed: &mut TestBed,
    wids: std::ops::RangeInclusive<i32>,
    request: &SpawnRequest,
) -> Vec<Tid> {
    wids.flat_map(|wid| {
        bed.world().spawn(wid, request);
        carry_out_orders(bed)
    })
    .collect()
}

/// Returns the leases that were sent to a task, each with the wait id of its request.
fn leases_of(bed: &TestBed, task: Tid) -> Vec<(i32, PlacementLease)> {
    let world = bed.world();
    let to_it = world
        .sent
        .iter()
        .filter(|(to, tag, ..)| (*to, *tag) == (task, SM_PLACEMENT_LEASE));
    to_it
        .map(|(_, _, wid, body)| (*wid, unpack_placement_lease(body.clone()).expect("a grant")))
        .collect()
}

/// Reports that the client has used a lease to start this task.
fn report_use(bed: &mut TestBed, wid: i32, host: u16, tid: Tid) {
    report_uses(bed, wid, &[(host, tid)]);
}

/// Reports that the client has used a lease to start several tasks in one request.
fn report_uses(bed: &mut TestBed, wid: i32, tasks: &[(u16, Tid)]) {
    bed.world().tasks.extend(
        tasks
            .iter()
            .map(|(host, tid)| spawned_task_info(*tid, *host)),
    );
    let tasks = tasks
        .iter()
        .map(|(host, tid)| (host_id(*host), *tid))
        .collect();
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner: client(),
        tasks,
    });
    bed.world().post(
        host_id(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        wid,
        body,
    );
    bed.settle();
}

/// A task that sends the same spawn twice gets a placement lease.
#[test]
fn second_equal_spawn_gets_lease() {
    let vm = world(3);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=1, &request(1));
    assert_eq!(leases_of(&bed, client()), [], "once is not a habit");
    spawn_repeatedly(&mut bed, 2..=2, &request(1));
    let [
        (
            wid,
            PlacementLease {
                hosts,
                valid_for: span,
            },
        ),
    ] = &leases_of(&bed, client())[..]
    else {
        panic!("{:?}", leases_of(&bed, client()))
    };
    assert_eq!(
        (*wid, *span, hosts.len()),
        (2, GRANT_WINDOW, LEASE_HOSTS_MAX)
    );
    // Two of the three hosts run one task each. As with single placements, the third host comes
    // first, and no host is used more often than its share allows.
    assert_eq!(
        hosts
            .iter()
            .take(4)
            .filter(|host| **host == hosts[0])
            .count(),
        2
    );
    for host in 1..=3 {
        assert!(hosts.contains(&host_id(host)), "{hosts:?}");
    }
}

/// A task that was started by a lease is listed and explained like any other task.
#[test]
fn task_started_by_lease_is_known_and_explained() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    let named = SpawnRequest {
        flags: SPAWN_HOST,
        place: "h2".into(),
        ..request(1)
    };
    spawn_repeatedly(&mut bed, 1..=2, &named);
    assert_eq!(
        leases_of(&bed, client())[0].1.hosts,
        [host_id(2); LEASE_HOSTS_MAX]
    );
    report_use(&mut bed, 2, 2, task_id(2, 900));
    assert!(bed.service.model().is_guest(task_id(2, 900)));
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::TaskDecisions(task_id(2, 900)))
    else {
        panic!("nothing is known")
    };
    let spawn = |d: &DecisionKind| match d {
        DecisionKind::Spawn {
            requested_by: by,
            count: 1,
            started,
            attempts,
            ..
        } => {
            let why = (&attempts[0].rule, attempts[0].reason.as_str());
            *by == client()
                && started[..] == [(task_id(2, 900), "h2".to_string())]
                && why
                    == (
                        &PlacementRule::HostRequested,
                        "granted in advance: the request names h2",
                    )
        }
        _ => false,
    };
    assert!(decisions.iter().any(|d| spawn(&d.kind)), "{decisions:?}");
    // Three tasks run on h2. All of them are evicted when its owner arrives.
    bed.report_owner_present(2);
    assert_eq!(bed.world().take_migrations().len(), 3);
}

/// A task that repeatedly spawns several tasks in one request gets a lease.
#[test]
fn repeated_group_spawns_get_lease() {
    let vm = world(3);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(3));
    let (wid, grant) = leases_of(&bed, client()).pop().expect("a grant");
    assert_eq!(
        (leases_of(&bed, client()).len(), wid, grant.hosts.len()),
        (1, 2, LEASE_HOSTS_MAX)
    );
    for host in 1..=3 {
        assert_eq!(
            grant
                .hosts
                .iter()
                .take(3)
                .filter(|h| h.index() == host)
                .count(),
            1,
            "as those before: {grant:?}"
        );
    }
    let tids = [
        (1, task_id(1, 900)),
        (2, task_id(2, 900)),
        (3, task_id(3, 900)),
    ];
    report_uses(&mut bed, 2, &tids);
    for (_, tid) in tids {
        assert!(bed.service.model().is_guest(tid));
        let RmReply::Decisions { decisions, .. } = query(&mut bed, &RmQuery::TaskDecisions(tid))
        else {
            panic!("nothing is known")
        };
        let together = |d: &DecisionKind| match d {
            DecisionKind::Spawn {
                requested_by: by,
                count: 3,
                started,
                attempts,
                ..
            } => {
                let named = tids.map(|(host, tid)| (tid, format!("h{host}")));
                *by == client()
                    && started[..] == named
                    && attempts[0].reason.starts_with("granted in advance: ")
            }
            _ => false,
        };
        assert!(decisions.iter().any(|d| together(&d.kind)), "{decisions:?}");
    }
}

/// A lease is replaced when its hosts change. It stays valid as long as the task continues to
/// spawn.
#[test]
fn lease_follows_host_changes_while_used() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    let places = |bed: &TestBed| leases_of(bed, client()).pop().expect("a grant").1.hosts;
    assert!(places(&bed).contains(&host_id(1)) && places(&bed).contains(&host_id(2)));
    bed.advance(REVIEW_INTERVAL);
    assert_eq!(leases_of(&bed, client()).len(), 1, "nothing has changed");
    bed.report_owner_present(1);
    bed.advance(REVIEW_INTERVAL);
    assert_eq!(
        (leases_of(&bed, client()).len(), places(&bed)),
        (2, vec![host_id(2); LEASE_HOSTS_MAX])
    );
    for n in 0..5 {
        bed.advance(Micros(GRANT_WINDOW.0 / 2));
        let before = leases_of(&bed, client()).len();
        report_use(&mut bed, 2, 2, task_id(2, 900 + n));
        assert_eq!(leases_of(&bed, client()).len(), before, "it holds");
    }
    // The task spawns nothing more, so its lease is not renewed.
    bed.advance(GRANT_WINDOW + REVIEW_INTERVAL);
    let before = leases_of(&bed, client()).len();
    bed.report_owner_absent(1);
    bed.advance(Micros(3 * REVIEW_INTERVAL.0));
    assert_eq!(leases_of(&bed, client()).len(), before);
}

/// Tasks that have ended, or that spawn nothing more, do not reduce the number of slots for others.
#[test]
fn unused_leases_are_released() {
    let vm = world(3);
    let others: Vec<Tid> = (20..24).map(|n| task_id(1, n)).collect();
    vm.0.borrow_mut().tasks.extend(
        others
            .iter()
            .map(|tid| task_info(*tid, 1, TASK_CONNECTED, "")),
    );
    let mut bed = TestBed::quiet(&vm);
    let twice = |bed: &mut TestBed, task: Tid| {
        for wid in 1..=2 {
            bed.world().spawn_by(task, wid, &request(1));
            carry_out_orders(bed);
        }
        leases_of(bed, task)
            .pop()
            .map_or(0, |(_, grant)| grant.hosts.len())
    };
    assert_eq!(
        [0, 1, 2].map(|n| twice(&mut bed, others[n])),
        [LEASE_HOSTS_MAX, LEASE_HOSTS_MAX, 0]
    );
    bed.world().event(host_id(1), task_ended(others[0]));
    bed.settle();
    assert_eq!(twice(&mut bed, others[2]), LEASE_HOSTS_MAX);
    assert_eq!(twice(&mut bed, others[3]), 0);
    bed.advance(REVIEW_INTERVAL);
    assert_eq!(twice(&mut bed, others[3]), LEASE_HOSTS_MAX);
    for idle in [others[1], others[2]] {
        assert_eq!(
            leases_of(&bed, idle).pop().map(|(_, grant)| grant.hosts),
            Some(vec![]),
            "it is told"
        );
    }
}

/// When half of a lease is used, a new lease is made from the current state.
#[test]
fn half_used_lease_is_renewed() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    let hosts = leases_of(&bed, client())[0].1.hosts.clone();
    let last = LEASE_HOSTS_MAX / 2 - 1;
    for (n, host) in hosts.iter().take(last).enumerate() {
        report_use(
            &mut bed,
            2,
            host.index(),
            task_id(host.index(), 900 + n as u32),
        );
    }
    assert_eq!(leases_of(&bed, client()).len(), 1);
    bed.report_owner_present(1);
    report_use(
        &mut bed,
        2,
        hosts[last].index(),
        task_id(hosts[last].index(), 950),
    );
    let (wid, grant) = leases_of(&bed, client()).pop().expect("more");
    assert_eq!((leases_of(&bed, client()).len(), wid), (2, 2));
    assert!(
        grant.hosts.iter().all(|host| *host == host_id(2)),
        "{grant:?}"
    );
}

/// With round robin, task limits or waiting requests there are no leases, because each request must
/// be decided separately.
#[test]
fn no_leases_with_round_robin_limits_or_waiting() {
    let limits = Limits {
        user_tasks: Some(100),
        job_tasks: None,
    };
    let conducts = [
        EffectivePolicy {
            placing: PlacementPolicy::RoundRobin,
            ..EffectivePolicy::default()
        },
        EffectivePolicy {
            rules: SpawnRules {
                limits,
                ..SpawnRules::default()
            },
            ..EffectivePolicy::default()
        },
        EffectivePolicy {
            rules: SpawnRules {
                wait: Micros::from_secs(60),
                ..SpawnRules::default()
            },
            ..EffectivePolicy::default()
        },
    ];
    for conduct in conducts {
        let vm = world(2);
        let mut bed = TestBed::quiet_with(&vm, options_with_policy(conduct));
        assert_eq!(spawn_repeatedly(&mut bed, 1..=5, &request(1)).len(), 5);
        assert_eq!(leases_of(&bed, client()), [], "{conduct}");
    }
}

/// A request gets no lease if it differs from the previous one, fails, arrives too late, or asks
/// for too many tasks.
#[test]
fn unsuitable_requests_get_no_lease() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    let other = SpawnRequest {
        file: "other".into(),
        ..request(1)
    };
    for n in 0..3 {
        spawn_repeatedly(&mut bed, 10 * n..=10 * n, &request(1));
        spawn_repeatedly(&mut bed, 10 * n + 1..=10 * n + 1, &other);
    }
    spawn_repeatedly(&mut bed, 40..=44, &request(LEASE_TASKS_MAX as u32 + 1));
    let nowhere = SpawnRequest {
        flags: SPAWN_HOST,
        place: "nowhere".into(),
        ..request(1)
    };
    spawn_repeatedly(&mut bed, 50..=54, &nowhere);
    assert_eq!(
        bed.world().spawn_reply(54),
        Some(Ok(vec![Err(PvmError::NoHost)]))
    );
    bed.world().available_bytes = 1 << 40;
    bed.report_owner_absent(1);
    for wants in ["?same-host", "?rank = speed", "?spread", "?memory >= 1K"] {
        let ranked = SpawnRequest {
            place: wants.into(),
            ..request(1)
        };
        assert_eq!(
            spawn_repeatedly(&mut bed, 60..=63, &ranked).len(),
            4,
            "{wants}"
        );
    }
    for n in 70..75 {
        spawn_repeatedly(&mut bed, n..=n, &request(1));
        bed.advance(GRANT_WINDOW);
    }
    assert_eq!(leases_of(&bed, client()), []);
}

/// Leases are revoked when one of their hosts is drained or the policy changes.
#[test]
fn drain_or_policy_change_revokes_leases() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    assert!(leases_of(&bed, client())[0].1.hosts.contains(&host_id(2)));
    assert!(matches!(
        query(
            &mut bed,
            &RmQuery::Drain {
                host: "h2".into(),
                within: None
            }
        ),
        RmReply::Drain { .. }
    ));
    let (wid, grant) = leases_of(&bed, client()).pop().expect("another word");
    assert_eq!(
        (leases_of(&bed, client()).len(), wid, grant.hosts),
        (2, 2, vec![])
    );
    // The lease for the task's next request contains only the other host.
    spawn_repeatedly(&mut bed, 3..=3, &request(1));
    assert_eq!(
        leases_of(&bed, client())[2].1.hosts,
        [host_id(1); LEASE_HOSTS_MAX]
    );
    // A lease that counts as used up is revoked, too, because it may have unused slots.
    let before = leases_of(&bed, client()).len();
    bed.report_owner_present(1);
    for first in [700, 750, 800] {
        let tids = (first..).take(LEASE_TASKS_MAX).map(|n| (1, task_id(1, n)));
        report_uses(&mut bed, 3, &tids.collect::<Vec<_>>());
    }
    assert!(matches!(
        query(
            &mut bed,
            &RmQuery::Drain {
                host: "h1".into(),
                within: None
            }
        ),
        RmReply::Drain { .. }
    ));
    assert_eq!(
        leases_of(&bed, client())[before..],
        [(
            3,
            PlacementLease {
                hosts: vec![],
                valid_for: GRANT_WINDOW
            }
        )]
    );
    for host in ["h1", "h2"] {
        assert!(matches!(
            query(&mut bed, &RmQuery::Undrain { host: host.into() }),
            RmReply::Drain { .. }
        ));
    }
    bed.report_owner_absent(1);
    spawn_repeatedly(&mut bed, 20..=20, &request(1));
    let before = leases_of(&bed, client()).len();
    let content = bytes::Bytes::from_static(b"user_tasks = 50");
    bed.world().post(own(), CTX_RM, TAG_POLICY, 0, content);
    bed.settle();
    assert_eq!(
        leases_of(&bed, client())[before..],
        [(
            20,
            PlacementLease {
                hosts: vec![],
                valid_for: GRANT_WINDOW
            }
        )]
    );
    spawn_repeatedly(&mut bed, 21..=26, &request(1));
    assert_eq!(leases_of(&bed, client()).len(), before + 1);
}

/// A job that is being killed loses its leases and gets no new one.
#[test]
fn job_being_killed_gets_no_lease() {
    let vm = world(2);
    let spawner = task_id(1, 20);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(spawner, 1, TASK_CONNECTED, ""));
    let mut bed = TestBed::quiet(&vm);
    for wid in 1..=2 {
        bed.world().spawn_by(spawner, wid, &request(1));
        carry_out_orders(&mut bed);
    }
    assert_eq!(leases_of(&bed, spawner).len(), 1);
    assert!(matches!(
        query(&mut bed, &RmQuery::Kill(spawner)),
        RmReply::KillProgress { left: 1.., .. }
    ));
    assert_eq!(
        leases_of(&bed, spawner)[1..],
        [(
            2,
            PlacementLease {
                hosts: vec![],
                valid_for: GRANT_WINDOW
            }
        )]
    );
    // A report of tasks that were started before the revocation arrives after it.
    bed.world()
        .tasks
        .push(spawned_task_info(task_id(2, 900), 2));
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner,
        tasks: vec![(host_id(2), task_id(2, 900))],
    });
    bed.world().post(
        host_id(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        2,
        body,
    );
    bed.settle();
    assert!(bed.service.model().has_task(task_id(2, 900)));
    assert_eq!(leases_of(&bed, spawner).len(), 2);
}

/// Used slots that are reported after the end of the task are counted, and cause no new lease.
#[test]
fn lease_use_after_exit_is_counted() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    bed.world().event(host_id(1), task_ended(client()));
    bed.settle();
    for n in 0..LEASE_HOSTS_MAX as u32 {
        report_use(&mut bed, 2, 2, task_id(2, 900 + n));
        assert!(
            bed.service.model().is_guest(task_id(2, 900 + n)),
            "it is known all the same"
        );
    }
    assert_eq!(leases_of(&bed, client()).len(), 1);
}

/// A task gets no lease if it ends while its request is carried out.
#[test]
fn exited_requester_gets_no_lease() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=1, &request(1));
    bed.world().spawn(2, &request(1));
    bed.settle();
    bed.world().event(host_id(1), task_ended(client()));
    bed.settle();
    assert_eq!(carry_out_orders(&mut bed).len(), 1);
    assert_eq!(leases_of(&bed, client()), []);
}

/// A different request of the task closes its lease.
#[test]
fn different_request_gives_up_lease() {
    let vm = world(3);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(task_id(1, 20), 1, TASK_CONNECTED, ""));
    let mut bed = TestBed::quiet(&vm);
    let other = SpawnRequest {
        file: "other".into(),
        ..request(1)
    };
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    spawn_repeatedly(&mut bed, 3..=4, &other);
    assert_eq!(leases_of(&bed, client()).len(), 2);
    for wid in 1..=2 {
        bed.world().spawn_by(task_id(1, 20), wid, &request(1));
        carry_out_orders(&mut bed);
    }
    assert_eq!(
        leases_of(&bed, task_id(1, 20))[0].1.hosts.len(),
        LEASE_HOSTS_MAX,
        "nobody has to give any back"
    );
    assert_eq!(leases_of(&bed, client()).len(), 2);
}

/// A request with a large environment is not remembered and gets no lease.
#[test]
fn large_request_gets_no_lease() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    let large = SpawnRequest {
        env: vec![vec![b'x'; 1 << 20]],
        ..request(1)
    };
    assert_eq!(spawn_repeatedly(&mut bed, 1..=4, &large).len(), 4);
    assert_eq!(leases_of(&bed, client()), []);
}

/// The total of leased slots is bounded until leases expire.
#[test]
fn total_of_leased_slots_is_bounded() {
    let vm = world(3);
    let others: Vec<Tid> = (20..24).map(|n| task_id(1, n)).collect();
    vm.0.borrow_mut().tasks.extend(
        others
            .iter()
            .map(|tid| task_info(*tid, 1, TASK_CONNECTED, "")),
    );
    let mut bed = TestBed::quiet(&vm);
    for wid in 1..=2 {
        for task in &others {
            bed.world().spawn_by(*task, wid, &request(1));
            carry_out_orders(&mut bed);
        }
    }
    let places = |bed: &TestBed| {
        others
            .iter()
            .flat_map(|task| leases_of(bed, *task))
            .map(|(_, g)| g.hosts.len())
            .sum::<usize>()
    };
    assert_eq!(places(&bed), GRANTED_SLOTS_MAX);
    bed.advance(GRANT_WINDOW);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    assert_eq!(
        leases_of(&bed, client()).len(),
        1,
        "what nobody took holds no more"
    );
}

/// Reports about used slots that cannot be decoded or belong to no lease are ignored.
#[test]
fn invalid_lease_reports_are_ignored() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    let before = bed.world().records.len();
    report_use(&mut bed, 77, 2, task_id(2, 900));
    assert!(!bed.service.model().has_task(task_id(2, 900)));
    bed.world().post(
        host_id(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        2,
        bytes::Bytes::from_static(b"rubbish"),
    );
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner: client(),
        tasks: vec![(host_id(2), task_id(2, 901))],
    });
    bed.world()
        .post(task_id(2, 50), CTX_BASE, SM_PLACEMENT_LEASE_USED, 2, body);
    bed.settle();
    assert_eq!(bed.world().records.len(), before);
    assert!(
        !bed.service.model().has_task(task_id(2, 901)),
        "only daemons say so"
    );
}
