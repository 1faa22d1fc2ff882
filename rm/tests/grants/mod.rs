//! Tasks that spawn again and again are told beforehand where the next ones go.

use crate::common::{Bed, client, h, info, request, rm as own, spawned, t, world};
use crate::{ask, ended, with_conduct};
use pvm_rm::decide::{Limits, Policy};
use pvm_rm::grants::{GRANT_SPAN, GRANTED_MAX, REVIEW_PAUSE};
use pvm_rm::policy::Conduct;
use pvm_rm::service::TAG_POLICY;
use pvm_rm::spawns::Rules;
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::{Answer, CTX_RM, Choice, Decided, Question};
use sempa_proto::sm::{
    GRANT_COUNT_MAX, GRANT_HOSTS_MAX, Grant, SM_GRANT, SM_GRANT_TAKEN, Taken, pack_taken,
    unpack_grant,
};
use sempa_proto::table::TASK_CONNECTED;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// Every host answers what it is asked; all tasks that were started.
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

/// The client spawns so often in the same way.
fn spawns(bed: &mut Bed, wids: std::ops::RangeInclusive<i32>, request: &SpawnRequest) -> Vec<Tid> {
    wids.flat_map(|wid| {
        bed.world().spawn(wid, request);
        serve(bed)
    })
    .collect()
}

/// What a task was given, with the wait ids.
fn given(bed: &Bed, task: Tid) -> Vec<(i32, Grant)> {
    let world = bed.world();
    let to_it = world
        .sent
        .iter()
        .filter(|(to, tag, ..)| (*to, *tag) == (task, SM_GRANT));
    to_it
        .map(|(_, _, wid, body)| (*wid, unpack_grant(body.clone()).expect("a grant")))
        .collect()
}

/// A daemon says that the client has started this task by a grant.
fn taken(bed: &mut Bed, wid: i32, host: u16, tid: Tid) {
    all_taken(bed, wid, &[(host, tid)]);
}

/// The same of several tasks, by one request.
fn all_taken(bed: &mut Bed, wid: i32, tasks: &[(u16, Tid)]) {
    bed.world()
        .tasks
        .extend(tasks.iter().map(|(host, tid)| spawned(*tid, *host)));
    let tasks = tasks.iter().map(|(host, tid)| (h(*host), *tid)).collect();
    let body = pack_taken(&Taken {
        by: client(),
        tasks,
    });
    bed.world()
        .post(h(1).daemon(), CTX_BASE, SM_GRANT_TAKEN, wid, body);
    bed.settle();
}

#[test]
fn who_spawns_twice_in_the_same_way_is_told_where_the_next_tasks_go() {
    let vm = world(3);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=1, &request(1));
    assert_eq!(given(&bed, client()), [], "once is not a habit");
    spawns(&mut bed, 2..=2, &request(1));
    let [(wid, Grant { hosts, span })] = &given(&bed, client())[..] else {
        panic!("{:?}", given(&bed, client()))
    };
    assert_eq!((*wid, *span, hosts.len()), (2, GRANT_SPAN, GRANT_HOSTS_MAX));
    // One each is there already on two of the three: as one by one, the third comes first, and none gets more than its share.
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

#[test]
fn a_task_that_was_started_by_a_grant_is_known_and_explained_like_any_other() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    let named = SpawnRequest {
        flags: SPAWN_HOST,
        place: "h2".into(),
        ..request(1)
    };
    spawns(&mut bed, 1..=2, &named);
    assert_eq!(given(&bed, client())[0].1.hosts, [h(2); GRANT_HOSTS_MAX]);
    taken(&mut bed, 2, 2, t(2, 900));
    assert!(bed.service.model().is_guest(t(2, 900)));
    let Answer::Why { decisions, .. } = ask(&mut bed, &Question::WhyTask(t(2, 900))) else {
        panic!("nothing is known")
    };
    let spawn = |d: &Decided| match d {
        Decided::Spawn {
            by,
            count: 1,
            started,
            attempts,
            ..
        } => {
            let why = (&attempts[0].choice, attempts[0].sentence.as_str());
            *by == client()
                && started[..] == [(t(2, 900), "h2".to_string())]
                && why == (&Choice::Asked, "said beforehand: h2 was asked for")
        }
        _ => false,
    };
    assert!(decisions.iter().any(|d| spawn(&d.what)), "{decisions:?}");
    // An owner who comes sends it away, and one who was there when it was named does not.
    bed.owner_comes(2);
    assert_eq!(bed.world().took_migrations().len(), 3);
}

#[test]
fn who_spawns_several_tasks_in_one_call_again_and_again_is_told_where_the_next_ones_go() {
    let vm = world(3);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(3));
    let (wid, grant) = given(&bed, client()).pop().expect("a grant");
    assert_eq!(
        (given(&bed, client()).len(), wid, grant.hosts.len()),
        (1, 2, GRANT_HOSTS_MAX)
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
        let Answer::Why { decisions, .. } = ask(&mut bed, &Question::WhyTask(tid)) else {
            panic!("nothing is known")
        };
        let together = |d: &Decided| match d {
            Decided::Spawn {
                by,
                count: 3,
                started,
                attempts,
                ..
            } => {
                let named = tids.map(|(host, tid)| (tid, format!("h{host}")));
                *by == client()
                    && started[..] == named
                    && attempts[0].sentence.starts_with("said beforehand: ")
            }
            _ => false,
        };
        assert!(decisions.iter().any(|d| together(&d.what)), "{decisions:?}");
    }
}

#[test]
fn a_grant_follows_what_is_known_of_its_hosts_and_holds_as_long_as_spawns_follow_each_other() {
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
        (2, vec![h(2); GRANT_HOSTS_MAX])
    );
    for n in 0..5 {
        bed.pass(Micros(GRANT_SPAN.0 / 2));
        let before = given(&bed, client()).len();
        taken(&mut bed, 2, 2, t(2, 900 + n));
        assert_eq!(given(&bed, client()).len(), before, "it holds");
    }
    // One who spawns no more is left alone.
    bed.pass(GRANT_SPAN + REVIEW_PAUSE);
    let before = given(&bed, client()).len();
    bed.owner_leaves(1);
    bed.pass(Micros(3 * REVIEW_PAUSE.0));
    assert_eq!(given(&bed, client()).len(), before);
}

#[test]
fn who_has_ended_or_takes_nothing_keeps_no_places_from_others() {
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
        [GRANT_HOSTS_MAX, GRANT_HOSTS_MAX, 0]
    );
    bed.world().event(h(1), ended(others[0]));
    bed.settle();
    assert_eq!(twice(&mut bed, others[2]), GRANT_HOSTS_MAX);
    assert_eq!(twice(&mut bed, others[3]), 0);
    bed.pass(REVIEW_PAUSE);
    assert_eq!(twice(&mut bed, others[3]), GRANT_HOSTS_MAX);
    for idle in [others[1], others[2]] {
        assert_eq!(
            given(&bed, idle).pop().map(|(_, grant)| grant.hosts),
            Some(vec![]),
            "it is told"
        );
    }
}

#[test]
fn when_half_of_the_places_are_taken_others_are_given_for_what_is_known_by_then() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    let hosts = given(&bed, client())[0].1.hosts.clone();
    let last = GRANT_HOSTS_MAX / 2 - 1;
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

#[test]
fn where_tasks_go_in_turn_are_counted_or_may_wait_each_request_is_decided_by_itself() {
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

#[test]
fn requests_that_differ_fail_come_late_or_are_for_too_many_tasks_lead_to_no_grant() {
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
    spawns(&mut bed, 40..=44, &request(GRANT_COUNT_MAX as u32 + 1));
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

#[test]
fn what_was_given_is_taken_back_when_a_place_of_it_is_emptied_or_the_policy_changes() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    assert!(given(&bed, client())[0].1.hosts.contains(&h(2)));
    assert!(matches!(
        ask(
            &mut bed,
            &Question::Drain {
                host: "h2".into(),
                within: None
            }
        ),
        Answer::Drain { .. }
    ));
    let (wid, grant) = given(&bed, client()).pop().expect("another word");
    assert_eq!(
        (given(&bed, client()).len(), wid, grant.hosts),
        (2, 2, vec![])
    );
    // Asked again, it is told of the other host alone.
    spawns(&mut bed, 3..=3, &request(1));
    assert_eq!(given(&bed, client())[2].1.hosts, [h(1); GRANT_HOSTS_MAX]);
    // Also one who seems to have taken all may have places yet.
    let before = given(&bed, client()).len();
    bed.owner_comes(1);
    for first in [700, 750, 800] {
        let tids = (first..).take(GRANT_COUNT_MAX).map(|n| (1, t(1, n)));
        all_taken(&mut bed, 3, &tids.collect::<Vec<_>>());
    }
    assert!(matches!(
        ask(
            &mut bed,
            &Question::Drain {
                host: "h1".into(),
                within: None
            }
        ),
        Answer::Drain { .. }
    ));
    assert_eq!(
        given(&bed, client())[before..],
        [(
            3,
            Grant {
                hosts: vec![],
                span: GRANT_SPAN
            }
        )]
    );
    for host in ["h1", "h2"] {
        assert!(matches!(
            ask(&mut bed, &Question::Undrain { host: host.into() }),
            Answer::Drain { .. }
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
            Grant {
                hosts: vec![],
                span: GRANT_SPAN
            }
        )]
    );
    spawns(&mut bed, 21..=26, &request(1));
    assert_eq!(given(&bed, client()).len(), before + 1);
}

#[test]
fn a_job_that_is_being_ended_keeps_no_grant_and_gets_none() {
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
        ask(&mut bed, &Question::Kill(spawner)),
        Answer::Killed { left: 1.., .. }
    ));
    assert_eq!(
        given(&bed, spawner)[1..],
        [(
            2,
            Grant {
                hosts: vec![],
                span: GRANT_SPAN
            }
        )]
    );
    // What it took before it heard of that is told behind it.
    bed.world().tasks.push(spawned(t(2, 900), 2));
    let body = pack_taken(&Taken {
        by: spawner,
        tasks: vec![(h(2), t(2, 900))],
    });
    bed.world()
        .post(h(1).daemon(), CTX_BASE, SM_GRANT_TAKEN, 2, body);
    bed.settle();
    assert!(bed.service.model().knows(t(2, 900)));
    assert_eq!(given(&bed, spawner).len(), 2);
}

#[test]
fn what_a_task_took_is_told_behind_its_end_and_leads_to_no_other_grant() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    bed.world().event(h(1), ended(client()));
    bed.settle();
    for n in 0..GRANT_HOSTS_MAX as u32 {
        taken(&mut bed, 2, 2, t(2, 900 + n));
        assert!(
            bed.service.model().is_guest(t(2, 900 + n)),
            "it is known all the same"
        );
    }
    assert_eq!(given(&bed, client()).len(), 1);
}

#[test]
fn a_task_that_ends_while_its_request_is_answered_gets_no_grant() {
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

#[test]
fn who_asks_for_something_else_has_given_up_the_places_it_had() {
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
        GRANT_HOSTS_MAX,
        "nobody has to give any back"
    );
    assert_eq!(given(&bed, client()).len(), 2);
}

#[test]
fn a_request_with_a_large_environment_is_not_kept() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    let large = SpawnRequest {
        env: vec![vec![b'x'; 1 << 20]],
        ..request(1)
    };
    assert_eq!(spawns(&mut bed, 1..=4, &large).len(), 4);
    assert_eq!(given(&bed, client()), []);
}

#[test]
fn all_that_is_given_is_bounded_until_it_holds_no_more() {
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

#[test]
fn what_cannot_be_read_or_belongs_to_no_grant_changes_nothing() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    spawns(&mut bed, 1..=2, &request(1));
    let before = bed.world().records.len();
    taken(&mut bed, 77, 2, t(2, 900));
    assert!(!bed.service.model().knows(t(2, 900)));
    bed.world().post(
        h(1).daemon(),
        CTX_BASE,
        SM_GRANT_TAKEN,
        2,
        bytes::Bytes::from_static(b"rubbish"),
    );
    let body = pack_taken(&Taken {
        by: client(),
        tasks: vec![(h(2), t(2, 901))],
    });
    bed.world()
        .post(t(2, 50), CTX_BASE, SM_GRANT_TAKEN, 2, body);
    bed.settle();
    assert_eq!(bed.world().records.len(), before);
    assert!(!bed.service.model().knows(t(2, 901)), "only daemons say so");
}
