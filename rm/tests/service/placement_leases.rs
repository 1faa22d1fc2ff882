//! Placement leases: a task that spawns repeatedly gets hosts for its next spawns in advance.

use crate::common::{
    TestBed, client_tid, fake_vm, host_id, request, rm_tid, spawned_task_info, task_id, task_info,
};
use crate::{options_with_policy, query, task_ended_event};
use pvm_rm::decide::{PlacementPolicy, TaskLimits};
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

/// Acknowledges all orders to start tasks until there are no more. Returns all started tasks.
fn acknowledge_all_orders(bed: &mut TestBed) -> Vec<Tid> {
    bed.process_inbox();
    let mut started_tids = Vec::new();
    loop {
        let orders = bed.state().take_start_orders();
        if orders.is_empty() {
            return started_tids;
        }
        for order in orders {
            let tids = bed.state().acknowledge(&order);
            bed.state().tasks.extend(
                tids.iter()
                    .map(|tid| spawned_task_info(*tid, order.host.index())),
            );
            started_tids.extend(tids);
        }
        bed.process_inbox();
    }
}

/// Sends the same spawn of the client once for each wait id, and carries out the orders. Returns
/// the started tasks.
fn spawn_repeatedly(
    bed: &mut TestBed,
    wids: std::ops::RangeInclusive<i32>,
    request: &SpawnRequest,
) -> Vec<Tid> {
    wids.flat_map(|wid| {
        bed.state().request_spawn(wid, request);
        acknowledge_all_orders(bed)
    })
    .collect()
}

/// Returns the leases that were sent to a task. Each lease has the wait id of the request for which
/// it was made.
fn leases_sent_to(bed: &TestBed, task: Tid) -> Vec<(i32, PlacementLease)> {
    let state = bed.state();
    let messages = state
        .base_messages
        .iter()
        .filter(|(receiver, tag, ..)| (*receiver, *tag) == (task, SM_PLACEMENT_LEASE));
    messages
        .map(|(_, _, wid, body)| (*wid, unpack_placement_lease(body.clone()).expect("a grant")))
        .collect()
}

/// Reports that the client has used a lease to start a task on a host.
fn report_lease_use(bed: &mut TestBed, wid: i32, host: u16, tid: Tid) {
    report_lease_uses(bed, wid, &[(host, tid)]);
}

/// Reports that the client has used a lease to start several tasks in one request.
fn report_lease_uses(bed: &mut TestBed, wid: i32, tasks: &[(u16, Tid)]) {
    bed.state().tasks.extend(
        tasks
            .iter()
            .map(|(host, tid)| spawned_task_info(*tid, *host)),
    );
    let tasks = tasks
        .iter()
        .map(|(host, tid)| (host_id(*host), *tid))
        .collect();
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner: client_tid(),
        tasks,
    });
    bed.state().post_message(
        host_id(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        wid,
        body,
    );
    bed.process_inbox();
}

/// A task that sends the same spawn twice gets a placement lease.
#[test]
fn second_equal_spawn_gets_lease() {
    let vm = fake_vm(3);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=1, &request(1));
    assert_eq!(
        leases_sent_to(&bed, client_tid()),
        [],
        "once is not a habit"
    );
    spawn_repeatedly(&mut bed, 2..=2, &request(1));
    let [
        (
            wid,
            PlacementLease {
                hosts,
                validity_time: lease_validity,
            },
        ),
    ] = &leases_sent_to(&bed, client_tid())[..]
    else {
        panic!("{:?}", leases_sent_to(&bed, client_tid()))
    };
    assert_eq!(
        (*wid, *lease_validity, hosts.len()),
        (2, GRANT_WINDOW, LEASE_HOSTS_MAX)
    );
    // Two of the three hosts run one task each. As with single placements, the third host is the
    // first of the lease. No host is used more often than its share allows.
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

/// A query for a task that was started by a lease reports a placement, as for any other task.
#[test]
fn task_started_by_lease_is_known_and_explained() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    let named_request = SpawnRequest {
        flags: SPAWN_HOST,
        where_arg: "h2".into(),
        ..request(1)
    };
    spawn_repeatedly(&mut bed, 1..=2, &named_request);
    assert_eq!(
        leases_sent_to(&bed, client_tid())[0].1.hosts,
        [host_id(2); LEASE_HOSTS_MAX]
    );
    report_lease_use(&mut bed, 2, 2, task_id(2, 900));
    assert!(bed.service.model().is_guest(task_id(2, 900)));
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::TaskDecisions(task_id(2, 900)))
    else {
        panic!("nothing is known")
    };
    let is_lease_spawn = |d: &DecisionKind| match d {
        DecisionKind::Spawn {
            requested_by: requester,
            count: 1,
            started,
            attempts,
            ..
        } => {
            let rule_and_reason = (&attempts[0].rule, attempts[0].reason.as_str());
            *requester == client_tid()
                && started[..] == [(task_id(2, 900), "h2".to_string())]
                && rule_and_reason
                    == (
                        &PlacementRule::HostRequested,
                        "granted in advance: the request names h2",
                    )
        }
        _ => false,
    };
    assert!(
        decisions.iter().any(|d| is_lease_spawn(&d.kind)),
        "{decisions:?}"
    );
    // Three tasks run on h2. All of them are evicted when its owner arrives.
    bed.report_owner_present(2);
    assert_eq!(bed.state().take_migrations().len(), 3);
}

/// A task that repeatedly spawns several tasks in one request gets a lease.
#[test]
fn repeated_group_spawns_get_lease() {
    let vm = fake_vm(3);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(3));
    let (wid, lease) = leases_sent_to(&bed, client_tid()).pop().expect("a grant");
    assert_eq!(
        (
            leases_sent_to(&bed, client_tid()).len(),
            wid,
            lease.hosts.len()
        ),
        (1, 2, LEASE_HOSTS_MAX)
    );
    for host in 1..=3 {
        assert_eq!(
            lease
                .hosts
                .iter()
                .take(3)
                .filter(|h| h.index() == host)
                .count(),
            1,
            "as those before: {lease:?}"
        );
    }
    let tids = [
        (1, task_id(1, 900)),
        (2, task_id(2, 900)),
        (3, task_id(3, 900)),
    ];
    report_lease_uses(&mut bed, 2, &tids);
    for (_, tid) in tids {
        assert!(bed.service.model().is_guest(tid));
        let RmReply::Decisions { decisions, .. } = query(&mut bed, &RmQuery::TaskDecisions(tid))
        else {
            panic!("nothing is known")
        };
        let is_group_spawn = |d: &DecisionKind| match d {
            DecisionKind::Spawn {
                requested_by: requester,
                count: 3,
                started,
                attempts,
                ..
            } => {
                let expected_hosts = tids.map(|(host, tid)| (tid, format!("h{host}")));
                *requester == client_tid()
                    && started[..] == expected_hosts
                    && attempts[0].reason.starts_with("granted in advance: ")
            }
            _ => false,
        };
        assert!(
            decisions.iter().any(|d| is_group_spawn(&d.kind)),
            "{decisions:?}"
        );
    }
}

/// A lease is replaced when its hosts change. The lease does not expire while the task continues to
/// use it.
#[test]
fn lease_follows_host_changes_while_used() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    let leased_hosts = |bed: &TestBed| {
        leases_sent_to(bed, client_tid())
            .pop()
            .expect("a grant")
            .1
            .hosts
    };
    assert!(leased_hosts(&bed).contains(&host_id(1)) && leased_hosts(&bed).contains(&host_id(2)));
    bed.advance(REVIEW_INTERVAL);
    assert_eq!(
        leases_sent_to(&bed, client_tid()).len(),
        1,
        "nothing has changed"
    );
    bed.report_owner_present(1);
    bed.advance(REVIEW_INTERVAL);
    assert_eq!(
        (leases_sent_to(&bed, client_tid()).len(), leased_hosts(&bed)),
        (2, vec![host_id(2); LEASE_HOSTS_MAX])
    );
    for n in 0..5 {
        bed.advance(Micros(GRANT_WINDOW.0 / 2));
        let lease_count = leases_sent_to(&bed, client_tid()).len();
        report_lease_use(&mut bed, 2, 2, task_id(2, 900 + n));
        assert_eq!(
            leases_sent_to(&bed, client_tid()).len(),
            lease_count,
            "it holds"
        );
    }
    // The task spawns nothing more, so its lease is not renewed.
    bed.advance(GRANT_WINDOW + REVIEW_INTERVAL);
    let lease_count = leases_sent_to(&bed, client_tid()).len();
    bed.report_owner_absent(1);
    bed.advance(Micros(3 * REVIEW_INTERVAL.0));
    assert_eq!(leases_sent_to(&bed, client_tid()).len(), lease_count);
}

/// Leases of tasks that have ended or that spawn nothing more do not reduce the number of slots for
/// other tasks.
#[test]
fn unused_leases_are_released() {
    let vm = fake_vm(3);
    let spawners: Vec<Tid> = (20..24).map(|n| task_id(1, n)).collect();
    vm.0.borrow_mut().tasks.extend(
        spawners
            .iter()
            .map(|tid| task_info(*tid, 1, TASK_CONNECTED, "")),
    );
    let mut bed = TestBed::start_with_watchers(&vm);
    let spawn_twice = |bed: &mut TestBed, task: Tid| {
        for wid in 1..=2 {
            bed.state().request_spawn_by(task, wid, &request(1));
            acknowledge_all_orders(bed);
        }
        leases_sent_to(bed, task)
            .pop()
            .map_or(0, |(_, lease)| lease.hosts.len())
    };
    assert_eq!(
        [0, 1, 2].map(|n| spawn_twice(&mut bed, spawners[n])),
        [LEASE_HOSTS_MAX, LEASE_HOSTS_MAX, 0]
    );
    bed.state()
        .log_event(host_id(1), task_ended_event(spawners[0]));
    bed.process_inbox();
    assert_eq!(spawn_twice(&mut bed, spawners[2]), LEASE_HOSTS_MAX);
    assert_eq!(spawn_twice(&mut bed, spawners[3]), 0);
    bed.advance(REVIEW_INTERVAL);
    assert_eq!(spawn_twice(&mut bed, spawners[3]), LEASE_HOSTS_MAX);
    for idle_spawner in [spawners[1], spawners[2]] {
        assert_eq!(
            leases_sent_to(&bed, idle_spawner)
                .pop()
                .map(|(_, lease)| lease.hosts),
            Some(vec![]),
            "it is told"
        );
    }
}

/// When half of a lease has been used, a new lease is made from the current state.
#[test]
fn half_used_lease_is_renewed() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    let hosts = leases_sent_to(&bed, client_tid())[0].1.hosts.clone();
    let half_count = LEASE_HOSTS_MAX / 2 - 1;
    for (n, host) in hosts.iter().take(half_count).enumerate() {
        report_lease_use(
            &mut bed,
            2,
            host.index(),
            task_id(host.index(), 900 + n as u32),
        );
    }
    assert_eq!(leases_sent_to(&bed, client_tid()).len(), 1);
    bed.report_owner_present(1);
    report_lease_use(
        &mut bed,
        2,
        hosts[half_count].index(),
        task_id(hosts[half_count].index(), 950),
    );
    let (wid, lease) = leases_sent_to(&bed, client_tid()).pop().expect("more");
    assert_eq!((leases_sent_to(&bed, client_tid()).len(), wid), (2, 2));
    assert!(
        lease.hosts.iter().all(|host| *host == host_id(2)),
        "{lease:?}"
    );
}

/// If the policy uses round robin, limits the number of tasks or lets requests wait, there are no
/// leases, because each request needs its own decision.
#[test]
fn no_leases_with_round_robin_limits_or_waiting() {
    let limits = TaskLimits {
        user_tasks_max: Some(100),
        job_tasks_max: None,
    };
    let policies = [
        EffectivePolicy {
            placement: PlacementPolicy::RoundRobin,
            ..EffectivePolicy::default()
        },
        EffectivePolicy {
            spawn_rules: SpawnRules {
                task_limits: limits,
                ..SpawnRules::default()
            },
            ..EffectivePolicy::default()
        },
        EffectivePolicy {
            spawn_rules: SpawnRules {
                wait_max: Micros::from_secs(60),
                ..SpawnRules::default()
            },
            ..EffectivePolicy::default()
        },
    ];
    for policy in policies {
        let vm = fake_vm(2);
        let mut bed = TestBed::start_with_options(&vm, options_with_policy(policy));
        assert_eq!(spawn_repeatedly(&mut bed, 1..=5, &request(1)).len(), 5);
        assert_eq!(leases_sent_to(&bed, client_tid()), [], "{policy}");
    }
}

/// A request gets no lease if it differs from the previous request, fails, arrives too late,
/// requests too many tasks, or has constraints on memory, on the order of hosts or on shared hosts.
#[test]
fn unsuitable_requests_get_no_lease() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    let other_request = SpawnRequest {
        program: "other".into(),
        ..request(1)
    };
    for n in 0..3 {
        spawn_repeatedly(&mut bed, 10 * n..=10 * n, &request(1));
        spawn_repeatedly(&mut bed, 10 * n + 1..=10 * n + 1, &other_request);
    }
    spawn_repeatedly(&mut bed, 40..=44, &request(LEASE_TASKS_MAX as u32 + 1));
    let unplaceable_request = SpawnRequest {
        flags: SPAWN_HOST,
        where_arg: "nowhere".into(),
        ..request(1)
    };
    spawn_repeatedly(&mut bed, 50..=54, &unplaceable_request);
    assert_eq!(
        bed.state().spawn_reply(54),
        Some(Ok(vec![Err(PvmError::NoHost)]))
    );
    bed.state().available_bytes = 1 << 40;
    bed.report_owner_absent(1);
    for place_text in ["?same-host", "?rank = speed", "?spread", "?memory >= 1K"] {
        let constrained_request = SpawnRequest {
            where_arg: place_text.into(),
            ..request(1)
        };
        assert_eq!(
            spawn_repeatedly(&mut bed, 60..=63, &constrained_request).len(),
            4,
            "{place_text}"
        );
    }
    for n in 70..75 {
        spawn_repeatedly(&mut bed, n..=n, &request(1));
        bed.advance(GRANT_WINDOW);
    }
    assert_eq!(leases_sent_to(&bed, client_tid()), []);
}

/// A lease is revoked when one of its hosts is drained or the policy changes.
#[test]
fn drain_or_policy_change_revokes_leases() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    assert!(
        leases_sent_to(&bed, client_tid())[0]
            .1
            .hosts
            .contains(&host_id(2))
    );
    assert!(matches!(
        query(
            &mut bed,
            &RmQuery::Drain {
                host: "h2".into(),
                time_limit: None
            }
        ),
        RmReply::Drain { .. }
    ));
    let (wid, lease) = leases_sent_to(&bed, client_tid())
        .pop()
        .expect("another word");
    assert_eq!(
        (leases_sent_to(&bed, client_tid()).len(), wid, lease.hosts),
        (2, 2, vec![])
    );
    // The lease for the task's next request contains only the host that is not drained.
    spawn_repeatedly(&mut bed, 3..=3, &request(1));
    assert_eq!(
        leases_sent_to(&bed, client_tid())[2].1.hosts,
        [host_id(1); LEASE_HOSTS_MAX]
    );
    // A lease that counts as used up is revoked, too, because it may still have unused slots.
    let lease_count = leases_sent_to(&bed, client_tid()).len();
    bed.report_owner_present(1);
    for first_number in [700, 750, 800] {
        let tids = (first_number..)
            .take(LEASE_TASKS_MAX)
            .map(|n| (1, task_id(1, n)));
        report_lease_uses(&mut bed, 3, &tids.collect::<Vec<_>>());
    }
    assert!(matches!(
        query(
            &mut bed,
            &RmQuery::Drain {
                host: "h1".into(),
                time_limit: None
            }
        ),
        RmReply::Drain { .. }
    ));
    assert_eq!(
        leases_sent_to(&bed, client_tid())[lease_count..],
        [(
            3,
            PlacementLease {
                hosts: vec![],
                validity_time: GRANT_WINDOW
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
    let lease_count = leases_sent_to(&bed, client_tid()).len();
    let content = bytes::Bytes::from_static(b"user_tasks = 50");
    bed.state()
        .post_message(rm_tid(), CTX_RM, TAG_POLICY, 0, content);
    bed.process_inbox();
    assert_eq!(
        leases_sent_to(&bed, client_tid())[lease_count..],
        [(
            20,
            PlacementLease {
                hosts: vec![],
                validity_time: GRANT_WINDOW
            }
        )]
    );
    spawn_repeatedly(&mut bed, 21..=26, &request(1));
    assert_eq!(leases_sent_to(&bed, client_tid()).len(), lease_count + 1);
}

/// A job that is being killed loses its leases and gets no new one.
#[test]
fn job_being_killed_gets_no_lease() {
    let vm = fake_vm(2);
    let spawner = task_id(1, 20);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(spawner, 1, TASK_CONNECTED, ""));
    let mut bed = TestBed::start_with_watchers(&vm);
    for wid in 1..=2 {
        bed.state().request_spawn_by(spawner, wid, &request(1));
        acknowledge_all_orders(&mut bed);
    }
    assert_eq!(leases_sent_to(&bed, spawner).len(), 1);
    assert!(matches!(
        query(&mut bed, &RmQuery::Kill(spawner)),
        RmReply::KillProgress {
            remaining_tasks: 1..,
            ..
        }
    ));
    assert_eq!(
        leases_sent_to(&bed, spawner)[1..],
        [(
            2,
            PlacementLease {
                hosts: vec![],
                validity_time: GRANT_WINDOW
            }
        )]
    );
    // A report about tasks that were started before the revocation arrives after the revocation.
    bed.state()
        .tasks
        .push(spawned_task_info(task_id(2, 900), 2));
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner,
        tasks: vec![(host_id(2), task_id(2, 900))],
    });
    bed.state().post_message(
        host_id(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        2,
        body,
    );
    bed.process_inbox();
    assert!(bed.service.model().has_task(task_id(2, 900)));
    assert_eq!(leases_sent_to(&bed, spawner).len(), 2);
}

/// If the use of a slot is reported after the end of the task, the use is counted and causes no new
/// lease.
#[test]
fn lease_use_after_exit_is_counted() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    bed.state()
        .log_event(host_id(1), task_ended_event(client_tid()));
    bed.process_inbox();
    for n in 0..LEASE_HOSTS_MAX as u32 {
        report_lease_use(&mut bed, 2, 2, task_id(2, 900 + n));
        assert!(
            bed.service.model().is_guest(task_id(2, 900 + n)),
            "it is known all the same"
        );
    }
    assert_eq!(leases_sent_to(&bed, client_tid()).len(), 1);
}

/// A task gets no lease if it ends while its request is being carried out.
#[test]
fn exited_requester_gets_no_lease() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=1, &request(1));
    bed.state().request_spawn(2, &request(1));
    bed.process_inbox();
    bed.state()
        .log_event(host_id(1), task_ended_event(client_tid()));
    bed.process_inbox();
    assert_eq!(acknowledge_all_orders(&mut bed).len(), 1);
    assert_eq!(leases_sent_to(&bed, client_tid()), []);
}

/// If a task sends a different request, its lease ends. The slots of the lease are then available
/// for leases of other tasks.
#[test]
fn different_request_ends_lease() {
    let vm = fake_vm(3);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(task_id(1, 20), 1, TASK_CONNECTED, ""));
    let mut bed = TestBed::start_with_watchers(&vm);
    let other_request = SpawnRequest {
        program: "other".into(),
        ..request(1)
    };
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    spawn_repeatedly(&mut bed, 3..=4, &other_request);
    assert_eq!(leases_sent_to(&bed, client_tid()).len(), 2);
    for wid in 1..=2 {
        bed.state()
            .request_spawn_by(task_id(1, 20), wid, &request(1));
        acknowledge_all_orders(&mut bed);
    }
    assert_eq!(
        leases_sent_to(&bed, task_id(1, 20))[0].1.hosts.len(),
        LEASE_HOSTS_MAX,
        "nobody has to give any back"
    );
    assert_eq!(leases_sent_to(&bed, client_tid()).len(), 2);
}

/// A request with an environment of a mebibyte is not stored for comparison. Therefore equal
/// requests get no lease.
#[test]
fn large_request_gets_no_lease() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    let large_request = SpawnRequest {
        env: vec![vec![b'x'; 1 << 20]],
        ..request(1)
    };
    assert_eq!(spawn_repeatedly(&mut bed, 1..=4, &large_request).len(), 4);
    assert_eq!(leases_sent_to(&bed, client_tid()), []);
}

/// The total of leased slots is bounded until leases expire.
#[test]
fn total_of_leased_slots_is_bounded() {
    let vm = fake_vm(3);
    let spawners: Vec<Tid> = (20..24).map(|n| task_id(1, n)).collect();
    vm.0.borrow_mut().tasks.extend(
        spawners
            .iter()
            .map(|tid| task_info(*tid, 1, TASK_CONNECTED, "")),
    );
    let mut bed = TestBed::start_with_watchers(&vm);
    for wid in 1..=2 {
        for task in &spawners {
            bed.state().request_spawn_by(*task, wid, &request(1));
            acknowledge_all_orders(&mut bed);
        }
    }
    let count_leased_slots = |bed: &TestBed| {
        spawners
            .iter()
            .flat_map(|task| leases_sent_to(bed, *task))
            .map(|(_, g)| g.hosts.len())
            .sum::<usize>()
    };
    assert_eq!(count_leased_slots(&bed), GRANTED_SLOTS_MAX);
    bed.advance(GRANT_WINDOW);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    assert_eq!(
        leases_sent_to(&bed, client_tid()).len(),
        1,
        "what nobody took holds no more"
    );
}

/// A report about used slots is ignored if it cannot be decoded or belongs to no lease.
#[test]
fn invalid_lease_reports_are_ignored() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    spawn_repeatedly(&mut bed, 1..=2, &request(1));
    let record_count = bed.state().recorded_events.len();
    report_lease_use(&mut bed, 77, 2, task_id(2, 900));
    assert!(!bed.service.model().has_task(task_id(2, 900)));
    bed.state().post_message(
        host_id(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        2,
        bytes::Bytes::from_static(b"rubbish"),
    );
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner: client_tid(),
        tasks: vec![(host_id(2), task_id(2, 901))],
    });
    bed.state()
        .post_message(task_id(2, 50), CTX_BASE, SM_PLACEMENT_LEASE_USED, 2, body);
    bed.process_inbox();
    assert_eq!(bed.state().recorded_events.len(), record_count);
    assert!(
        !bed.service.model().has_task(task_id(2, 901)),
        "only daemons say so"
    );
}
