//! Replies of the resource manager to queries, before and after its restart.

use crate::common::{TestBed, client, host_id, request, spawned_task_info, task_id, world};
use crate::{options_with_history, options_with_policy, query};
use bytes::Bytes;
use pvm_rm::decide::Limits;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::Options;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    self, CTX_RM, DecisionKind, HostState, RejectionReason, RmQuery, RmReply, TAG_QUERY,
    TaskOutcome, WaitingSpawn,
};
use sempa_proto::{Micros, PvmError, Tid};

/// Enrols the client, which spawns two workers. Their start is acknowledged and logged. Returns the
/// workers.
pub(crate) fn two_workers(bed: &mut TestBed) -> Vec<Tid> {
    bed.world().event(
        host_id(1),
        EventKind::TaskStarted {
            tid: client(),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    bed.world().spawn(5, &request(2));
    bed.settle();
    let execs = bed.world().take_start_orders();
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
            bed.world()
                .tasks
                .push(spawned_task_info(tid, exec.host.index()));
            tids.push(tid);
        }
    }
    bed.settle();
    tids
}

/// The reply to a query for a task contains its placement and the excluded hosts.
#[test]
fn why_query_names_placement_and_excluded_hosts() {
    let vm = world(3);
    let mut bed = TestBed::quiet(&vm);
    bed.report_owner_present(3);
    bed.world().event(
        host_id(3),
        EventKind::OwnerPresent {
            host: host_id(3),
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
    } = query(&mut bed, &RmQuery::TaskDecisions(tids[1]))
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
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::HostDecisions("h3".into()))
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
        query(&mut bed, &RmQuery::TaskDecisions(task_id(1, 999))),
        RmReply::NotFound
    );
}

/// The reply to a query in another protocol version states the resource manager's own version.
#[test]
fn query_of_other_version_gets_own_version() {
    let vm = world(1);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
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
    let conduct = EffectivePolicy {
        rules: SpawnRules {
            wait: Micros(0),
            limits,
        },
        ..EffectivePolicy::default()
    };
    let options = Options {
        policy: conduct,
        ..options_with_history(dir.path())
    };
    let mut bed = TestBed::with(&vm, options.clone()).expect("no other");
    let tids = two_workers(&mut bed);
    bed.advance(Micros::from_secs(1));
    // The resource manager is killed, so it writes nothing more. Before its restart a worker ends.
    drop(bed);
    let used = Usage {
        user: Micros::from_secs(7),
        ..Usage::default()
    };
    vm.0.borrow_mut().event(
        host_id(1),
        EventKind::TaskEnded {
            tid: tids[0],
            status: 0x300,
            used,
        },
    );
    vm.0.borrow_mut().tasks.retain(|task| task.tid != tids[0]);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::with(&vm, options).expect("no other");
    let RmReply::Job { job, tasks } = query(&mut bed, &RmQuery::Job(tids[1])) else {
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
    let RmReply::Decisions { decisions, .. } = query(&mut bed, &RmQuery::TaskDecisions(tids[1]))
    else {
        panic!("forgotten")
    };
    assert!(
        matches!(decisions[0].kind, DecisionKind::Spawn { .. }),
        "{decisions:?}"
    );
    // The user still has one task that counts against the limit.
    bed.world().spawn(8, &request(3));
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(8),
        Some(Ok(vec![Err(PvmError::OutOfRes); 3]))
    );
    bed.world().spawn(9, &request(2));
    bed.settle();
    assert_eq!(
        bed.world()
            .take_start_orders()
            .iter()
            .map(|e| e.request.count)
            .sum::<u32>(),
        2
    );
}

/// Returns the current state of h2.
fn host_state(bed: &mut TestBed) -> HostState {
    let RmReply::Decisions {
        host_state: Some(now),
        ..
    } = query(bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("it is known")
    };
    now
}

/// Closes h2 for guests by its owner's rules, or opens it (`None`).
fn set_closed(bed: &mut TestBed, why: Option<&str>) {
    bed.world().closed_reason = why.map(String::from);
    bed.report_owner_absent(2);
}

fn excluded_state(why: Option<RejectionReason>) -> HostState {
    HostState::Excluded {
        why,
        drain_requested_by: None,
    }
}

const CLOSED_REASON: &str = "the owner wants no guests always";

fn closed_exclusion() -> Option<RejectionReason> {
    Some(RejectionReason::Other {
        why: format!("no guests now ({CLOSED_REASON})"),
    })
}

/// The reply to a query for a host contains the reason why placement excludes it at present.
#[test]
fn host_query_reports_current_exclusion() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    assert_eq!(host_state(&mut bed), HostState::Used(Vec::new()));
    bed.report_owner_present(2);
    let owner = Some(RejectionReason::Owner {
        why: "alice on pts/0".into(),
    });
    assert_eq!(host_state(&mut bed), excluded_state(owner.clone()));
    set_closed(&mut bed, Some(CLOSED_REASON));
    assert_eq!(
        host_state(&mut bed),
        excluded_state(closed_exclusion()),
        "she left, and it is not used all the same"
    );
    bed.world().spawn(1, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .take_start_orders()
            .iter()
            .all(|exec| exec.host == host_id(1))
    );
    query(
        &mut bed,
        &RmQuery::Drain {
            host: "h2".into(),
            within: None,
        },
    );
    let both = HostState::Excluded {
        why: closed_exclusion(),
        drain_requested_by: Some(client()),
    };
    assert_eq!(host_state(&mut bed), both);
    set_closed(&mut bed, None);
    assert_eq!(
        host_state(&mut bed),
        HostState::Excluded {
            why: None,
            drain_requested_by: Some(client())
        }
    );
    query(&mut bed, &RmQuery::Undrain { host: "h2".into() });
    assert_eq!(host_state(&mut bed), HostState::Used(Vec::new()));
    bed.world().limits = GuestLimits {
        guests_max: Some(0),
        programs: vec!["miner".into()],
        users: vec![7],
        ..GuestLimits::default()
    };
    bed.report_owner_absent(2);
    assert_eq!(
        host_state(&mut bed),
        excluded_state(Some(RejectionReason::Other {
            why: "its owner allows no tasks".into()
        }))
    );
    bed.world().limits.guests_max = None;
    bed.report_owner_absent(2);
    let blocked = [
        "its owner blocks the program \"miner\"",
        "its owner blocks user 7",
    ]
    .map(String::from);
    assert_eq!(host_state(&mut bed), HostState::Used(blocked.to_vec()));
}

/// A query reports the load of a host without a watcher as unknown, and a lost host as gone.
#[test]
fn host_query_reports_unknown_load_and_lost_host() {
    let vm = world(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    assert_eq!(
        host_state(&mut bed),
        HostState::Used(vec!["its load is not known (no sample)".into()])
    );
    bed.world().hosts.pop();
    bed.world().event(
        host_id(1),
        EventKind::HostGone {
            host: host_id(2),
            name: "h2".into(),
            why: "lost".into(),
        },
    );
    bed.settle();
    assert_eq!(host_state(&mut bed), HostState::Gone);
}

/// The history contains each change between three states: owner present, closed by rules, and open.
#[test]
fn owner_and_rule_changes_are_recorded() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    bed.report_owner_present(2);
    set_closed(&mut bed, Some(CLOSED_REASON));
    set_closed(&mut bed, Some(CLOSED_REASON));
    bed.report_owner_present(2);
    set_closed(&mut bed, Some(CLOSED_REASON));
    set_closed(&mut bed, None);
    let records = bed.world().records.clone();
    let told: Vec<String> = records
        .iter()
        .filter(|kind| !matches!(kind, EventKind::HostVacated { .. }))
        .map(EventKind::to_string)
        .collect();
    let (here, shut) = (
        "owner of host 2 present: alice on pts/0",
        format!("host 2 accepts no guests: {CLOSED_REASON}"),
    );
    assert_eq!(
        told,
        [here, &shut, here, &shut, "host 2 accepts guests again"]
    );
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("nothing")
    };
    let told: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    let shut = format!("h2 accepts no guests: {CLOSED_REASON}");
    assert_eq!(
        told,
        [&shut, &shut, "h2 accepts guests again"],
        "the owner's coming is not in this log"
    );
}

/// Waiting spawns are listed with their position in the queue, their waiting time and the reason.
#[test]
fn waiting_spawns_are_listed_with_turn_and_reason() {
    let vm = world(1);
    let limits = Limits {
        user_tasks: Some(2),
        job_tasks: None,
    };
    let rules = SpawnRules {
        wait: Micros::from_secs(600),
        limits,
    };
    let mut bed = TestBed::quiet_with(
        &vm,
        options_with_policy(EffectivePolicy {
            rules,
            ..EffectivePolicy::default()
        }),
    );
    let waiting = |bed: &mut TestBed, user| match query(bed, &RmQuery::WaitingSpawns { user }) {
        RmReply::WaitingSpawns(all) => all,
        other => panic!("{other:?}"),
    };
    assert_eq!(waiting(&mut bed, None), []);
    two_workers(&mut bed);
    bed.world().spawn(6, &request(1));
    bed.advance(Micros::from_secs(5));
    bed.report_owner_present(1);
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
    // When the limit is no longer exceeded, the listed reason is the owner.
    for task in [task_id(1, 100), task_id(1, 101)] {
        bed.world().event(
            host_id(1),
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
    bed.report_owner_absent(1);
    assert!(
        waiting(&mut bed, None).len() < 2,
        "who has a place waits no more"
    );
}
