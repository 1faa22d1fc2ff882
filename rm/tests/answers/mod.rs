//! Replies of the resource manager to queries, also after its restart.

use crate::common::{Bed, client, h, request, spawned, t, world};
use crate::{ask, with_books, with_conduct};
use bytes::Bytes;
use pvm_rm::decide::Limits;
use pvm_rm::policy::Conduct;
use pvm_rm::service::Options;
use pvm_rm::spawns::Rules;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    self, CTX_RM, DecisionKind, HostState, RejectionReason, RmQuery, RmReply, TAG_QUERY,
    TaskOutcome, WaitingSpawn,
};
use sempa_proto::{Micros, PvmError, Tid};

/// Enrols the client and lets it spawn two workers, which are acknowledged and logged.
pub(crate) fn two_workers(bed: &mut Bed) -> Vec<Tid> {
    bed.world().event(
        h(1),
        EventKind::TaskStarted {
            tid: client(),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    bed.world().spawn(5, &request(2));
    bed.settle();
    let execs = bed.world().took_execs();
    let mut tids = Vec::new();
    for exec in execs {
        let started = bed.world().ack(&exec);
        for tid in started {
            let kind = EventKind::TaskStarted {
                tid,
                parent: client(),
                name: "worker".into(),
                user: 0,
            };
            bed.world().event(exec.host, kind);
            bed.world().tasks.push(spawned(tid, exec.host.index()));
            tids.push(tid);
        }
    }
    bed.settle();
    tids
}

/// A query for a task names its placement and the excluded hosts.
#[test]
fn why_query_names_placement_and_excluded_hosts() {
    let vm = world(3);
    let mut bed = Bed::quiet(&vm);
    bed.owner_comes(3);
    bed.world().event(
        h(3),
        EventKind::OwnerPresent {
            host: h(3),
            since: Micros(1),
            detected_at: Micros(2),
            why: "x".into(),
        },
    );
    let tids = two_workers(&mut bed);
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = ask(&mut bed, &RmQuery::TaskDecisions(tids[1]))
    else {
        panic!()
    };
    assert_eq!(
        (task.job, task.counts_toward_limits, task.host.as_str()),
        (client(), true, "h2")
    );
    let DecisionKind::Spawn {
        started,
        attempts,
        error: None,
        ..
    } = &decisions[0].kind
    else {
        panic!("{decisions:?}")
    };
    assert_eq!(
        started[..],
        [(tids[0], "h1".to_string()), (tids[1], "h2".to_string())]
    );
    let left_out: Vec<_> = attempts[0]
        .rejected
        .iter()
        .map(|n| (n.host.as_str(), n.why.clone()))
        .collect();
    assert_eq!(
        left_out,
        [(
            "h3",
            RejectionReason::Owner {
                why: "alice on pts/0".into()
            }
        )]
    );
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::HostDecisions("h3".into()))
    else {
        panic!()
    };
    let kinds: Vec<bool> = decisions
        .iter()
        .map(|d| matches!(d.kind, DecisionKind::OwnerReturned { .. }))
        .collect();
    assert_eq!(
        kinds,
        [true, false],
        "its owner came, then it was left out: {decisions:?}"
    );
    assert_eq!(
        ask(&mut bed, &RmQuery::TaskDecisions(t(1, 999))),
        RmReply::NotFound
    );
}

/// A query of another protocol version is answered with the resource manager's own version.
#[test]
fn query_of_other_version_gets_own_version() {
    let vm = world(1);
    let mut bed = Bed::start(&vm, false).expect("no other");
    bed.world().post(
        client(),
        CTX_RM,
        TAG_QUERY,
        1,
        Bytes::from_static(&[0xff, 0xff, 1, 2, 3]),
    );
    bed.settle();
    let body = bed.world().answers[0].3.clone();
    assert_eq!(
        rm::decode(&body),
        Ok(Some(RmReply::UnsupportedVersion(rm::RM_VERSION)))
    );
}

/// A restarted resource manager restores usage, limits and jobs, and catches up with the events it
/// missed.
#[test]
fn restarted_rm_restores_usage_jobs_and_missed_events() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let limits = Limits {
        user_tasks: Some(3),
        job_tasks: None,
    };
    let conduct = Conduct {
        rules: Rules {
            wait: Micros(0),
            limits,
        },
        ..Conduct::default()
    };
    let options = Options {
        conduct,
        ..with_books(dir.path())
    };
    let mut bed = Bed::with(&vm, options.clone()).expect("no other");
    let tids = two_workers(&mut bed);
    bed.pass(Micros::from_secs(1));
    // The resource manager is killed and writes nothing more. Meanwhile a worker ends.
    drop(bed);
    let used = Usage {
        user: Micros::from_secs(7),
        ..Usage::default()
    };
    vm.0.borrow_mut().event(
        h(1),
        EventKind::TaskEnded {
            tid: tids[0],
            status: 0x300,
            used,
        },
    );
    vm.0.borrow_mut().tasks.retain(|task| task.tid != tids[0]);
    vm.0.borrow_mut().forget_mail();
    let mut bed = Bed::with(&vm, options).expect("no other");
    let RmReply::Job { job, tasks } = ask(&mut bed, &RmQuery::Job(tids[1])) else {
        panic!("no job")
    };
    assert_eq!(
        (
            job.job,
            job.totals.tasks,
            job.totals.running,
            job.totals.used
        ),
        (client(), 3, 2, used)
    );
    assert_eq!(
        tasks[1].ended.map(|(_, how)| how),
        Some(TaskOutcome::Status(0x300))
    );
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::TaskDecisions(tids[1]))
    else {
        panic!("forgotten")
    };
    assert!(
        matches!(decisions[0].kind, DecisionKind::Spawn { .. }),
        "{decisions:?}"
    );
    // One task of the user still counts.
    bed.world().spawn(8, &request(3));
    bed.settle();
    assert_eq!(
        bed.world().answer(8),
        Some(Ok(vec![Err(PvmError::OutOfRes); 3]))
    );
    bed.world().spawn(9, &request(2));
    bed.settle();
    assert_eq!(
        bed.world()
            .took_execs()
            .iter()
            .map(|e| e.request.count)
            .sum::<u32>(),
        2
    );
}

/// Returns the current state of h2.
fn now(bed: &mut Bed) -> HostState {
    let RmReply::Decisions {
        host_state: Some(now),
        ..
    } = ask(bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("it is known")
    };
    now
}

/// Closes h2 for guests by its owner's rules, or opens it again.
fn close(bed: &mut Bed, why: Option<&str>) {
    bed.world().closed = why.map(String::from);
    bed.owner_leaves(2);
}

fn left_out(why: Option<RejectionReason>) -> HostState {
    HostState::Excluded { why, drained: None }
}

const NIGHT: &str = "the owner wants no guests always";

fn at_night() -> Option<RejectionReason> {
    Some(RejectionReason::Other {
        why: format!("no guests now ({NIGHT})"),
    })
}

/// A query for a host reports why placement currently excludes it.
#[test]
fn host_query_reports_current_exclusion() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    assert_eq!(now(&mut bed), HostState::Used(Vec::new()));
    bed.owner_comes(2);
    let owner = Some(RejectionReason::Owner {
        why: "alice on pts/0".into(),
    });
    assert_eq!(now(&mut bed), left_out(owner.clone()));
    close(&mut bed, Some(NIGHT));
    assert_eq!(
        now(&mut bed),
        left_out(at_night()),
        "she left, and it is not used all the same"
    );
    bed.world().spawn(1, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .took_execs()
            .iter()
            .all(|exec| exec.host == h(1))
    );
    ask(
        &mut bed,
        &RmQuery::Drain {
            host: "h2".into(),
            within: None,
        },
    );
    let both = HostState::Excluded {
        why: at_night(),
        drained: Some(client()),
    };
    assert_eq!(now(&mut bed), both);
    close(&mut bed, None);
    assert_eq!(
        now(&mut bed),
        HostState::Excluded {
            why: None,
            drained: Some(client())
        }
    );
    ask(&mut bed, &RmQuery::Undrain { host: "h2".into() });
    assert_eq!(now(&mut bed), HostState::Used(Vec::new()));
    bed.world().limits = GuestLimits {
        guests_max: Some(0),
        programs: vec!["miner".into()],
        users: vec![7],
        ..GuestLimits::default()
    };
    bed.owner_leaves(2);
    assert_eq!(
        now(&mut bed),
        left_out(Some(RejectionReason::Other {
            why: "its owner allows no tasks".into()
        }))
    );
    bed.world().limits.guests_max = None;
    bed.owner_leaves(2);
    let blocked = [
        "its owner blocks the program \"miner\"",
        "its owner blocks user 7",
    ]
    .map(String::from);
    assert_eq!(now(&mut bed), HostState::Used(blocked.to_vec()));
}

/// A query reports the load of a host without a watcher as unknown, and a lost host as gone.
#[test]
fn host_query_reports_unknown_load_and_lost_host() {
    let vm = world(2);
    let mut bed = Bed::start(&vm, false).expect("no other");
    assert_eq!(
        now(&mut bed),
        HostState::Used(vec!["its load is not known (no sample)".into()])
    );
    bed.world().hosts.pop();
    bed.world().event(
        h(1),
        EventKind::HostGone {
            host: h(2),
            name: "h2".into(),
            why: "lost".into(),
        },
    );
    bed.settle();
    assert_eq!(now(&mut bed), HostState::Gone);
}

/// Each change between a present owner, closed rules and neither is recorded and remembered.
#[test]
fn owner_and_rule_changes_are_recorded() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    bed.owner_comes(2);
    close(&mut bed, Some(NIGHT));
    close(&mut bed, Some(NIGHT));
    bed.owner_comes(2);
    close(&mut bed, Some(NIGHT));
    close(&mut bed, None);
    let records = bed.world().records.clone();
    let told: Vec<String> = records
        .iter()
        .filter(|kind| !matches!(kind, EventKind::HostVacated { .. }))
        .map(EventKind::to_string)
        .collect();
    let (here, shut) = (
        "owner of host 2 present: alice on pts/0",
        format!("host 2 accepts no guests: {NIGHT}"),
    );
    assert_eq!(
        told,
        [here, &shut, here, &shut, "host 2 accepts guests again"]
    );
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("nothing")
    };
    let told: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    let shut = format!("h2 accepts no guests: {NIGHT}");
    assert_eq!(
        told,
        [&shut, &shut, "h2 accepts guests again"],
        "the owner's coming is not in this log"
    );
}

/// Waiting spawns are listed with their turn, their waiting time and the reason.
#[test]
fn waiting_spawns_are_listed_with_turn_and_reason() {
    let vm = world(1);
    let limits = Limits {
        user_tasks: Some(2),
        job_tasks: None,
    };
    let rules = Rules {
        wait: Micros::from_secs(600),
        limits,
    };
    let mut bed = Bed::quiet_with(
        &vm,
        with_conduct(Conduct {
            rules,
            ..Conduct::default()
        }),
    );
    let waiting = |bed: &mut Bed, user| match ask(bed, &RmQuery::WaitingSpawns { user }) {
        RmReply::WaitingSpawns(all) => all,
        other => panic!("{other:?}"),
    };
    assert_eq!(waiting(&mut bed, None), []);
    two_workers(&mut bed);
    bed.world().spawn(6, &request(1));
    bed.pass(Micros::from_secs(5));
    bed.owner_comes(1);
    let wall = Micros::from_secs(1_700_000_000 + 100);
    let why = "the user has 2 tasks, and 2 are allowed".to_string();
    let (program, by, job) = ("worker".to_string(), client(), client());
    let first = WaitingSpawn {
        program,
        count: 1,
        requested_by: by,
        job,
        user: 0,
        since: wall,
        queue_position: 1,
        why,
    };
    assert_eq!(waiting(&mut bed, None), [first]);
    assert_eq!(waiting(&mut bed, Some(7)), []);
    // When no limit is exceeded any more, the owner is the reason.
    for task in [t(1, 100), t(1, 101)] {
        bed.world().event(
            h(1),
            EventKind::TaskEnded {
                tid: task,
                status: 0,
                used: Usage::default(),
            },
        );
    }
    bed.world().spawn(7, &request(2));
    bed.settle();
    let all = waiting(&mut bed, Some(0));
    assert_eq!(
        all.iter()
            .map(|w| (w.count, w.queue_position))
            .collect::<Vec<_>>(),
        [(1, 1), (2, 2)]
    );
    let owner = "no host is free: h1: owner present (alice on pts/0)";
    assert!(all.iter().all(|waits| waits.why == owner), "{all:?}");
    bed.owner_leaves(1);
    assert!(
        waiting(&mut bed, None).len() < 2,
        "who has a place waits no more"
    );
}
