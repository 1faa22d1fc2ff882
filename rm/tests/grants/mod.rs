//! Placement leases: tasks that spawn repeatedly get hosts for their next spawns in advance.

use crate::common::{Bed, client, h, info, request, rm as own, spawned, t, world};
use crate::{ask, ended, with_conduct};
use pvm_rm::decide::{Limits, Policy};
use pvm_rm::grants::{GRANT_SPAN, GRANTED_MAX, REVIEW_PAUSE};
use pvm_rm::policy::Conduct;
use pvm_rm::service::TAG_POLICY;
use pvm_rm::spawns::Rules;
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::{CTX_RM, DecisionKind, PlacementRule, RmQuery, RmReply};
use sempa_proto::sm::{
    LEASE_HOSTS_MAX, LEASE_TASKS_MAX, PlacementLease, PlacementLeaseUse, SM_PLACEMENT_LEASE,
    SM_PLACEMENT_LEASE_USED, pack_placement_lease_use, unpack_placement_lease,
};
use sempa_proto::table::TASK_CONNECTED;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// Lets every host carry out its start orders. Returns all started tasks.
fn serve(bed: &mut Bed) -> Vec<Tid> {
    bed.settle();
    let mut all = Vec::new();
    loop {
        let execs = bed.world().took_execs();
        if execs.is_empty() {
            return all;
        }
        for exec in execs {
            let tids = bed.world().ack(&exec);
            bed.world()
                .tasks
                .extend(tids.iter().map(|tid| spawned(*tid, exec.host.index())));
            all.extend(tids);
        }
        bed.settle();
    }
}

/// Lets the client send the same spawn once per wait id. Returns the started tasks.
fn spawns(bed: &mut Bed, wids: std::ops::RangeInclusive<i32>, request: &SpawnRequest) -> Vec<Tid> {
    wids.flat_map(|wid| {
        bed.world().spawn(wid, request);
        serve(bed)
    })
    .collect()
}

/// Returns the leases that a task has got, with the wait ids of their requests.
fn given(bed: &Bed, task: Tid) -> Vec<(i32, PlacementLease)> {
    let world = bed.world();
    let to_it = world
        .sent
        .iter()
        .filter(|(to, tag, ..)| (*to, *tag) == (task, SM_PLACEMENT_LEASE));
    to_it
        .map(|(_, _, wid, body)| (*wid, unpack_placement_lease(body.clone()).expect("a grant")))
        .collect()
}

/// Reports that the client has started this task by a lease.
fn taken(bed: &mut Bed, wid: i32, host: u16, tid: Tid) {
    all_taken(bed, wid, &[(host, tid)]);
}

/// Reports that the client has started several tasks by one request and a lease.
fn all_taken(bed: &mut Bed, wid: i32, tasks: &[(u16, Tid)]) {
    bed.world()
        .tasks
        .extend(tasks.iter().map(|(host, tid)| spawned(*tid, *host)));
    let tasks = tasks.iter().map(|(host, tid)| (h(*host), *tid)).collect();
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner: client(),
        tasks,
    });
    bed.world().post(
        h(1).daemon_tid(),
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
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=1, &request(1));
    assert_eq!(given(&bed, client()), [], "once is not a habit");
    spawns(&mut bed, 2..=2, &request(1));
    let [
        (
            wid,
            PlacementLease {
                hosts,
                valid_for: span,
            },
        ),
    ] = &given(&bed, client())[..]
    else {
        panic!("{:?}", given(&bed, client()))
    };
    assert_eq!((*wid, *span, hosts.len()), (2, GRANT_SPAN, LEASE_HOSTS_MAX));
    // Two of the three hosts have one task each. As with single placements, the third host comes
    // first, and no host gets more than its share.
    assert_eq!(
        hosts
            .iter()
            .take(4)
            .filter(|host| **host == hosts[0])
            .count(),
        2
    );
    for host in 1..=3 {
        assert!(hosts.contains(&h(host)), "{hosts:?}");
    }
}

/// A task that was started by a lease is known and explained like any other.
#[test]
fn task_started_by_lease_is_known_and_explained() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    let named = SpawnRequest {
        flags: SPAWN_HOST,
        place: "h2".into(),
        ..request(1)
    };
    spawns(&mut bed, 1..=2, &named);
    assert_eq!(given(&bed, client())[0].1.hosts, [h(2); LEASE_HOSTS_MAX]);
    taken(&mut bed, 2, 2, t(2, 900));
    assert!(bed.service.model().is_guest(t(2, 900)));
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::TaskDecisions(t(2, 900)))
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
                && started[..] == [(t(2, 900), "h2".to_string())]
                && why
                    == (
                        &PlacementRule::HostRequested,
                        "granted in advance: the request names h2",
                    )
        }
        _ => false,
    };
    assert!(decisions.iter().any(|d| spawn(&d.kind)), "{decisions:?}");
    // Three tasks are on h2: an owner who arrives evicts all of them.
    bed.owner_comes(2);
    assert_eq!(bed.world().took_migrations().len(), 3);
}

/// A task that repeatedly spawns several tasks in one request gets a lease.
#[test]
fn repeated_group_spawns_get_lease() {
    let vm = world(3);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(3));
    let (wid, grant) = given(&bed, client()).pop().expect("a grant");
    assert_eq!(
        (given(&bed, client()).len(), wid, grant.hosts.len()),
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
    let tids = [(1, t(1, 900)), (2, t(2, 900)), (3, t(3, 900))];
    all_taken(&mut bed, 2, &tids);
    for (_, tid) in tids {
        assert!(bed.service.model().is_guest(tid));
        let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::TaskDecisions(tid))
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

/// A lease is updated when its hosts change and is valid while spawns follow each other.
#[test]
fn lease_follows_host_changes_while_used() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    let places = |bed: &Bed| given(bed, client()).pop().expect("a grant").1.hosts;
    assert!(places(&bed).contains(&h(1)) && places(&bed).contains(&h(2)));
    bed.pass(REVIEW_PAUSE);
    assert_eq!(given(&bed, client()).len(), 1, "nothing has changed");
    bed.owner_comes(1);
    bed.pass(REVIEW_PAUSE);
    assert_eq!(
        (given(&bed, client()).len(), places(&bed)),
        (2, vec![h(2); LEASE_HOSTS_MAX])
    );
    for n in 0..5 {
        bed.pass(Micros(GRANT_SPAN.0 / 2));
        let before = given(&bed, client()).len();
        taken(&mut bed, 2, 2, t(2, 900 + n));
        assert_eq!(given(&bed, client()).len(), before, "it holds");
    }
    // The lease of a task that spawns nothing more is not renewed.
    bed.pass(GRANT_SPAN + REVIEW_PAUSE);
    let before = given(&bed, client()).len();
    bed.owner_leaves(1);
    bed.pass(Micros(3 * REVIEW_PAUSE.0));
    assert_eq!(given(&bed, client()).len(), before);
}

/// Tasks that have ended or spawn nothing more keep no slots from others.
#[test]
fn unused_leases_are_released() {
    let vm = world(3);
    let others: Vec<Tid> = (20..24).map(|n| t(1, n)).collect();
    vm.0.borrow_mut()
        .tasks
        .extend(others.iter().map(|tid| info(*tid, 1, TASK_CONNECTED, "")));
    let mut bed = Bed::quiet(&vm);
    let twice = |bed: &mut Bed, task: Tid| {
        for wid in 1..=2 {
            bed.world().spawn_by(task, wid, &request(1));
            serve(bed);
        }
        given(bed, task)
            .pop()
            .map_or(0, |(_, grant)| grant.hosts.len())
    };
    assert_eq!(
        [0, 1, 2].map(|n| twice(&mut bed, others[n])),
        [LEASE_HOSTS_MAX, LEASE_HOSTS_MAX, 0]
    );
    bed.world().event(h(1), ended(others[0]));
    bed.settle();
    assert_eq!(twice(&mut bed, others[2]), LEASE_HOSTS_MAX);
    assert_eq!(twice(&mut bed, others[3]), 0);
    bed.pass(REVIEW_PAUSE);
    assert_eq!(twice(&mut bed, others[3]), LEASE_HOSTS_MAX);
    for idle in [others[1], others[2]] {
        assert_eq!(
            given(&bed, idle).pop().map(|(_, grant)| grant.hosts),
            Some(vec![]),
            "it is told"
        );
    }
}

/// When half of a lease is used, it is renewed from the current state.
#[test]
fn half_used_lease_is_renewed() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    let hosts = given(&bed, client())[0].1.hosts.clone();
    let last = LEASE_HOSTS_MAX / 2 - 1;
    for (n, host) in hosts.iter().take(last).enumerate() {
        taken(&mut bed, 2, host.index(), t(host.index(), 900 + n as u32));
    }
    assert_eq!(given(&bed, client()).len(), 1);
    bed.owner_comes(1);
    taken(
        &mut bed,
        2,
        hosts[last].index(),
        t(hosts[last].index(), 950),
    );
    let (wid, grant) = given(&bed, client()).pop().expect("more");
    assert_eq!((given(&bed, client()).len(), wid), (2, 2));
    assert!(grant.hosts.iter().all(|host| *host == h(2)), "{grant:?}");
}

/// With round-robin placement, limits or waiting there are no leases: each request is decided
/// separately.
#[test]
fn no_leases_with_round_robin_limits_or_waiting() {
    let limits = Limits {
        user_tasks: Some(100),
        job_tasks: None,
    };
    let conducts = [
        Conduct {
            placing: Policy::RoundRobin,
            ..Conduct::default()
        },
        Conduct {
            rules: Rules {
                limits,
                ..Rules::default()
            },
            ..Conduct::default()
        },
        Conduct {
            rules: Rules {
                wait: Micros::from_secs(60),
                ..Rules::default()
            },
            ..Conduct::default()
        },
    ];
    for conduct in conducts {
        let vm = world(2);
        let mut bed = Bed::quiet_with(&vm, with_conduct(conduct));
        assert_eq!(spawns(&mut bed, 1..=5, &request(1)).len(), 5);
        assert_eq!(given(&bed, client()), [], "{conduct}");
    }
}

/// Requests that differ, fail, come late or ask for too many tasks get no lease.
#[test]
fn unsuitable_requests_get_no_lease() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    let other = SpawnRequest {
        file: "other".into(),
        ..request(1)
    };
    for n in 0..3 {
        spawns(&mut bed, 10 * n..=10 * n, &request(1));
        spawns(&mut bed, 10 * n + 1..=10 * n + 1, &other);
    }
    spawns(&mut bed, 40..=44, &request(LEASE_TASKS_MAX as u32 + 1));
    let nowhere = SpawnRequest {
        flags: SPAWN_HOST,
        place: "nowhere".into(),
        ..request(1)
    };
    spawns(&mut bed, 50..=54, &nowhere);
    assert_eq!(
        bed.world().answer(54),
        Some(Ok(vec![Err(PvmError::NoHost)]))
    );
    bed.world().memory = 1 << 40;
    bed.owner_leaves(1);
    for wants in ["?same-host", "?rank = speed", "?spread", "?memory >= 1K"] {
        let ranked = SpawnRequest {
            place: wants.into(),
            ..request(1)
        };
        assert_eq!(spawns(&mut bed, 60..=63, &ranked).len(), 4, "{wants}");
    }
    for n in 70..75 {
        spawns(&mut bed, n..=n, &request(1));
        bed.pass(GRANT_SPAN);
    }
    assert_eq!(given(&bed, client()), []);
}

/// Leases are revoked when one of their hosts is drained or the policy changes.
#[test]
fn drain_or_policy_change_revokes_leases() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    assert!(given(&bed, client())[0].1.hosts.contains(&h(2)));
    assert!(matches!(
        ask(
            &mut bed,
            &RmQuery::Drain {
                host: "h2".into(),
                within: None
            }
        ),
        RmReply::Drain { .. }
    ));
    let (wid, grant) = given(&bed, client()).pop().expect("another word");
    assert_eq!(
        (given(&bed, client()).len(), wid, grant.hosts),
        (2, 2, vec![])
    );
    // On its next request the task gets the other host only.
    spawns(&mut bed, 3..=3, &request(1));
    assert_eq!(given(&bed, client())[2].1.hosts, [h(1); LEASE_HOSTS_MAX]);
    // A lease that seems to be used up may still have unused slots.
    let before = given(&bed, client()).len();
    bed.owner_comes(1);
    for first in [700, 750, 800] {
        let tids = (first..).take(LEASE_TASKS_MAX).map(|n| (1, t(1, n)));
        all_taken(&mut bed, 3, &tids.collect::<Vec<_>>());
    }
    assert!(matches!(
        ask(
            &mut bed,
            &RmQuery::Drain {
                host: "h1".into(),
                within: None
            }
        ),
        RmReply::Drain { .. }
    ));
    assert_eq!(
        given(&bed, client())[before..],
        [(
            3,
            PlacementLease {
                hosts: vec![],
                valid_for: GRANT_SPAN
            }
        )]
    );
    for host in ["h1", "h2"] {
        assert!(matches!(
            ask(&mut bed, &RmQuery::Undrain { host: host.into() }),
            RmReply::Drain { .. }
        ));
    }
    bed.owner_leaves(1);
    spawns(&mut bed, 20..=20, &request(1));
    let before = given(&bed, client()).len();
    let content = bytes::Bytes::from_static(b"user_tasks = 50");
    bed.world().post(own(), CTX_RM, TAG_POLICY, 0, content);
    bed.settle();
    assert_eq!(
        given(&bed, client())[before..],
        [(
            20,
            PlacementLease {
                hosts: vec![],
                valid_for: GRANT_SPAN
            }
        )]
    );
    spawns(&mut bed, 21..=26, &request(1));
    assert_eq!(given(&bed, client()).len(), before + 1);
}

/// A job that is being killed loses its leases and gets no new one.
#[test]
fn job_being_killed_gets_no_lease() {
    let vm = world(2);
    let spawner = t(1, 20);
    vm.0.borrow_mut()
        .tasks
        .push(info(spawner, 1, TASK_CONNECTED, ""));
    let mut bed = Bed::quiet(&vm);
    for wid in 1..=2 {
        bed.world().spawn_by(spawner, wid, &request(1));
        serve(&mut bed);
    }
    assert_eq!(given(&bed, spawner).len(), 1);
    assert!(matches!(
        ask(&mut bed, &RmQuery::Kill(spawner)),
        RmReply::KillProgress { left: 1.., .. }
    ));
    assert_eq!(
        given(&bed, spawner)[1..],
        [(
            2,
            PlacementLease {
                hosts: vec![],
                valid_for: GRANT_SPAN
            }
        )]
    );
    // The report of tasks started before the revocation arrives later.
    bed.world().tasks.push(spawned(t(2, 900), 2));
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner,
        tasks: vec![(h(2), t(2, 900))],
    });
    bed.world().post(
        h(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        2,
        body,
    );
    bed.settle();
    assert!(bed.service.model().knows(t(2, 900)));
    assert_eq!(given(&bed, spawner).len(), 2);
}

/// Uses of a lease that are reported after the task's exit are counted and lead to no new lease.
#[test]
fn lease_use_after_exit_is_counted() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    bed.world().event(h(1), ended(client()));
    bed.settle();
    for n in 0..LEASE_HOSTS_MAX as u32 {
        taken(&mut bed, 2, 2, t(2, 900 + n));
        assert!(
            bed.service.model().is_guest(t(2, 900 + n)),
            "it is known all the same"
        );
    }
    assert_eq!(given(&bed, client()).len(), 1);
}

/// A task that ends while its request is carried out gets no lease.
#[test]
fn exited_requester_gets_no_lease() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=1, &request(1));
    bed.world().spawn(2, &request(1));
    bed.settle();
    bed.world().event(h(1), ended(client()));
    bed.settle();
    assert_eq!(serve(&mut bed).len(), 1);
    assert_eq!(given(&bed, client()), []);
}

/// A different request gives up the slots of the earlier lease.
#[test]
fn different_request_gives_up_lease() {
    let vm = world(3);
    vm.0.borrow_mut()
        .tasks
        .push(info(t(1, 20), 1, TASK_CONNECTED, ""));
    let mut bed = Bed::quiet(&vm);
    let other = SpawnRequest {
        file: "other".into(),
        ..request(1)
    };
    spawns(&mut bed, 1..=2, &request(1));
    spawns(&mut bed, 3..=4, &other);
    assert_eq!(given(&bed, client()).len(), 2);
    for wid in 1..=2 {
        bed.world().spawn_by(t(1, 20), wid, &request(1));
        serve(&mut bed);
    }
    assert_eq!(
        given(&bed, t(1, 20))[0].1.hosts.len(),
        LEASE_HOSTS_MAX,
        "nobody has to give any back"
    );
    assert_eq!(given(&bed, client()).len(), 2);
}

/// A request with a large environment is not remembered and gets no lease.
#[test]
fn large_request_gets_no_lease() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    let large = SpawnRequest {
        env: vec![vec![b'x'; 1 << 20]],
        ..request(1)
    };
    assert_eq!(spawns(&mut bed, 1..=4, &large).len(), 4);
    assert_eq!(given(&bed, client()), []);
}

/// The total of leased slots is bounded until leases expire.
#[test]
fn total_of_leased_slots_is_bounded() {
    let vm = world(3);
    let others: Vec<Tid> = (20..24).map(|n| t(1, n)).collect();
    vm.0.borrow_mut()
        .tasks
        .extend(others.iter().map(|tid| info(*tid, 1, TASK_CONNECTED, "")));
    let mut bed = Bed::quiet(&vm);
    for wid in 1..=2 {
        for task in &others {
            bed.world().spawn_by(*task, wid, &request(1));
            serve(&mut bed);
        }
    }
    let places = |bed: &Bed| {
        others
            .iter()
            .flat_map(|task| given(bed, *task))
            .map(|(_, g)| g.hosts.len())
            .sum::<usize>()
    };
    assert_eq!(places(&bed), GRANTED_MAX);
    bed.pass(GRANT_SPAN);
    spawns(&mut bed, 1..=2, &request(1));
    assert_eq!(
        given(&bed, client()).len(),
        1,
        "what nobody took holds no more"
    );
}

/// Reports that cannot be decoded or belong to no lease change nothing.
#[test]
fn invalid_lease_reports_are_ignored() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    let before = bed.world().records.len();
    taken(&mut bed, 77, 2, t(2, 900));
    assert!(!bed.service.model().knows(t(2, 900)));
    bed.world().post(
        h(1).daemon_tid(),
        CTX_BASE,
        SM_PLACEMENT_LEASE_USED,
        2,
        bytes::Bytes::from_static(b"rubbish"),
    );
    let body = pack_placement_lease_use(&PlacementLeaseUse {
        spawner: client(),
        tasks: vec![(h(2), t(2, 901))],
    });
    bed.world()
        .post(t(2, 50), CTX_BASE, SM_PLACEMENT_LEASE_USED, 2, body);
    bed.settle();
    assert_eq!(bed.world().records.len(), before);
    assert!(!bed.service.model().knows(t(2, 901)), "only daemons say so");
}
