//! Replies of the resource manager to queries, before and after its restart.

use crate::common::{TestBed, client_tid, fake_vm, host_id, request, spawned_task_info, task_id};
use crate::{options_with_history, options_with_policy, query};
use bytes::Bytes;
use pvm_rm::decide::TaskLimits;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::Options;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::{EventKind, LostTasks};
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    self, CTX_RM, DecisionKind, HostState, RejectionReason, RmQuery, RmReply, TAG_QUERY,
    TaskOutcome, WaitingSpawn,
};
use sempa_proto::{Micros, PvmError, Tid};

/// Reports the start of the client, which spawns two workers. Their starts are acknowledged and
/// logged. Returns the tids of the workers.
pub(crate) fn start_two_workers(bed: &mut TestBed) -> Vec<Tid> {
    bed.state().log_event(
        host_id(1),
        EventKind::TaskStarted {
            tid: client_tid(),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    bed.state().request_spawn(5, &request(2));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    let mut tids = Vec::new();
    for order in orders {
        let started_tids = bed.state().acknowledge(&order);
        for tid in started_tids {
            let kind = EventKind::TaskStarted {
                tid,
                parent: client_tid(),
                name: "worker".into(),
                user: 0,
            };
            bed.state().log_event(order.host, kind);
            bed.state()
                .tasks
                .push(spawned_task_info(tid, order.host.index()));
            tids.push(tid);
        }
    }
    bed.process_inbox();
    tids
}

/// The reply to a query for a task contains the hosts of its placement and the excluded hosts.
#[test]
fn why_query_names_placement_and_excluded_hosts() {
    let vm = fake_vm(3);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.report_owner_present(3);
    bed.state().log_event(
        host_id(3),
        EventKind::OwnerPresent {
            host: host_id(3),
            since: Micros(1),
            detected_at: Micros(2),
            why: "x".into(),
        },
    );
    let tids = start_two_workers(&mut bed);
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
        (client_tid(), true, "h2")
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
    let excluded_hosts: Vec<_> = attempts[0]
        .rejected_hosts
        .iter()
        .map(|n| (n.host.as_str(), n.why.clone()))
        .collect();
    assert_eq!(
        excluded_hosts,
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
    let are_owner_returns: Vec<bool> = decisions
        .iter()
        .map(|d| matches!(d.kind, DecisionKind::OwnerReturned { .. }))
        .collect();
    assert_eq!(
        are_owner_returns,
        [true, false],
        "its owner came, then it was left out: {decisions:?}"
    );
    assert_eq!(
        query(&mut bed, &RmQuery::TaskDecisions(task_id(1, 999))),
        RmReply::NotFound
    );
}

/// The reply to a query in another protocol version contains the version of the resource manager.
#[test]
fn query_of_other_version_gets_own_version() {
    let vm = fake_vm(1);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().post_message(
        client_tid(),
        CTX_RM,
        TAG_QUERY,
        1,
        Bytes::from_static(&[0xff, 0xff, 1, 2, 3]),
    );
    bed.process_inbox();
    let body = bed.state().rm_messages[0].3.clone();
    assert_eq!(
        rm::decode(&body),
        Ok(Some(RmReply::UnsupportedVersion(rm::RM_VERSION)))
    );
}

/// A restarted resource manager restores usage, limits and jobs. It processes the events that it
/// has missed.
#[test]
fn restarted_rm_restores_usage_jobs_and_missed_events() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = fake_vm(2);
    let limits = TaskLimits {
        user_tasks_max: Some(3),
        job_tasks_max: None,
    };
    let policy = EffectivePolicy {
        spawn_rules: SpawnRules {
            wait_max: Micros(0),
            task_limits: limits,
        },
        ..EffectivePolicy::default()
    };
    let options = Options {
        policy,
        ..options_with_history(dir.path())
    };
    let mut bed = TestBed::try_start_with(&vm, options.clone()).expect("no other");
    let tids = start_two_workers(&mut bed);
    bed.advance(Micros::from_secs(1));
    // The resource manager is killed, so it writes nothing more. Before its restart a worker ends.
    drop(bed);
    let usage = Usage {
        user: Micros::from_secs(7),
        ..Usage::default()
    };
    vm.0.borrow_mut().log_event(
        host_id(1),
        EventKind::TaskEnded {
            tid: tids[0],
            status: 0x300,
            used: usage,
        },
    );
    vm.0.borrow_mut().tasks.retain(|task| task.tid != tids[0]);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::try_start_with(&vm, options).expect("no other");
    let RmReply::Job { job, tasks } = query(&mut bed, &RmQuery::Job(tids[1])) else {
        panic!("no job")
    };
    assert_eq!(
        (
            job.job,
            job.totals.task_count,
            job.totals.running_tasks,
            job.totals.usage
        ),
        (client_tid(), 3, 2, usage)
    );
    assert_eq!(
        tasks[1].end.map(|(_, outcome)| outcome),
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
    bed.state().request_spawn(8, &request(3));
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(8),
        Some(Ok(vec![Err(PvmError::OutOfRes); 3]))
    );
    bed.state().request_spawn(9, &request(2));
    bed.process_inbox();
    assert_eq!(
        bed.state()
            .take_start_orders()
            .iter()
            .map(|e| e.request.task_count)
            .sum::<u32>(),
        2
    );
}

/// Returns the current state of h2 in placement decisions.
fn query_h2_state(bed: &mut TestBed) -> HostState {
    let RmReply::Decisions {
        host_state: Some(state),
        ..
    } = query(bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("it is known")
    };
    state
}

/// Sets the reason why the rules of h2's owner exclude guests. `None` lets h2 accept guests.
fn set_closing_reason(bed: &mut TestBed, reason: Option<&str>) {
    bed.state().closing_reason = reason.map(String::from);
    bed.report_owner_absent(2);
}

fn excluded_state(reason: Option<RejectionReason>) -> HostState {
    HostState::Excluded {
        why: reason,
        drain_requested_by: None,
    }
}

const CLOSING_REASON: &str = "the owner wants no guests always";

fn closed_exclusion() -> Option<RejectionReason> {
    Some(RejectionReason::Other {
        why: format!("no guests now ({CLOSING_REASON})"),
    })
}

/// The reply to a query for a host contains the reason why placement excludes it now.
#[test]
fn host_query_reports_current_exclusion() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    assert_eq!(query_h2_state(&mut bed), HostState::Used(Vec::new()));
    bed.report_owner_present(2);
    let owner_reason = Some(RejectionReason::Owner {
        why: "alice on pts/0".into(),
    });
    assert_eq!(
        query_h2_state(&mut bed),
        excluded_state(owner_reason.clone())
    );
    set_closing_reason(&mut bed, Some(CLOSING_REASON));
    assert_eq!(
        query_h2_state(&mut bed),
        excluded_state(closed_exclusion()),
        "she left, and it is not used all the same"
    );
    bed.state().request_spawn(1, &request(2));
    bed.process_inbox();
    assert!(
        bed.state()
            .take_start_orders()
            .iter()
            .all(|order| order.host == host_id(1))
    );
    query(
        &mut bed,
        &RmQuery::Drain {
            host: "h2".into(),
            time_limit: None,
        },
    );
    let closed_and_drained_state = HostState::Excluded {
        why: closed_exclusion(),
        drain_requested_by: Some(client_tid()),
    };
    assert_eq!(query_h2_state(&mut bed), closed_and_drained_state);
    set_closing_reason(&mut bed, None);
    assert_eq!(
        query_h2_state(&mut bed),
        HostState::Excluded {
            why: None,
            drain_requested_by: Some(client_tid())
        }
    );
    query(&mut bed, &RmQuery::Undrain { host: "h2".into() });
    assert_eq!(query_h2_state(&mut bed), HostState::Used(Vec::new()));
    bed.state().guest_limits = GuestLimits {
        guests_max: Some(0),
        blocked_programs: vec!["miner".into()],
        blocked_users: vec![7],
        ..GuestLimits::default()
    };
    bed.report_owner_absent(2);
    assert_eq!(
        query_h2_state(&mut bed),
        excluded_state(Some(RejectionReason::Other {
            why: "its owner allows no tasks".into()
        }))
    );
    bed.state().guest_limits.guests_max = None;
    bed.report_owner_absent(2);
    let blocking_rules = [
        "its owner blocks the program \"miner\"",
        "its owner blocks user 7",
    ]
    .map(String::from);
    assert_eq!(
        query_h2_state(&mut bed),
        HostState::Used(blocking_rules.to_vec())
    );
}

/// A query reports that the load of a host without a load watcher is unknown, and reports a lost
/// host as [`HostState::Gone`].
#[test]
fn host_query_reports_unknown_load_and_lost_host() {
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    assert_eq!(
        query_h2_state(&mut bed),
        HostState::Used(vec!["its load is not known (no sample)".into()])
    );
    bed.state().host_indices.pop();
    bed.state().log_event(
        host_id(1),
        EventKind::HostGone {
            host: host_id(2),
            name: "h2".into(),
            why: "lost".into(),
            lost_tasks: LostTasks::default(),
        },
    );
    bed.process_inbox();
    assert_eq!(query_h2_state(&mut bed), HostState::Gone);
}

/// The history contains each change between these states of a host: owner present, closed by rules,
/// and open.
#[test]
fn owner_and_rule_changes_are_recorded() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.report_owner_present(2);
    set_closing_reason(&mut bed, Some(CLOSING_REASON));
    set_closing_reason(&mut bed, Some(CLOSING_REASON));
    bed.report_owner_present(2);
    set_closing_reason(&mut bed, Some(CLOSING_REASON));
    set_closing_reason(&mut bed, None);
    let records = bed.state().recorded_events.clone();
    let texts: Vec<String> = records
        .iter()
        .filter(|kind| !matches!(kind, EventKind::HostVacated { .. }))
        .map(EventKind::to_string)
        .collect();
    let (present_text, closed_text) = (
        "owner of host 2 present: alice on pts/0",
        format!("host 2 accepts no guests: {CLOSING_REASON}"),
    );
    assert_eq!(
        texts,
        [
            present_text,
            &closed_text,
            present_text,
            &closed_text,
            "host 2 accepts guests again"
        ]
    );
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("nothing")
    };
    let texts: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    let closed_text = format!("h2 accepts no guests: {CLOSING_REASON}");
    assert_eq!(
        texts,
        [&closed_text, &closed_text, "h2 accepts guests again"],
        "the owner's coming is not in this log"
    );
}

/// The list of waiting spawns contains their positions in the queue, their waiting times and the
/// reasons.
#[test]
fn waiting_spawns_are_listed_with_position_and_reason() {
    let vm = fake_vm(1);
    let limits = TaskLimits {
        user_tasks_max: Some(2),
        job_tasks_max: None,
    };
    let rules = SpawnRules {
        wait_max: Micros::from_secs(600),
        task_limits: limits,
    };
    let mut bed = TestBed::start_with_options(
        &vm,
        options_with_policy(EffectivePolicy {
            spawn_rules: rules,
            ..EffectivePolicy::default()
        }),
    );
    let query_waiting_spawns =
        |bed: &mut TestBed, user| match query(bed, &RmQuery::WaitingSpawns { user }) {
            RmReply::WaitingSpawns(spawns) => spawns,
            other => panic!("{other:?}"),
        };
    assert_eq!(query_waiting_spawns(&mut bed, None), []);
    start_two_workers(&mut bed);
    bed.state().request_spawn(6, &request(1));
    bed.advance(Micros::from_secs(5));
    bed.report_owner_present(1);
    let since = Micros::from_secs(1_700_000_000 + 100);
    let reason =
        "the limit --user-tasks of the resource manager is 2, and the user has 2 tasks".to_string();
    let (program, requester, job) = ("worker".to_string(), client_tid(), client_tid());
    let first_spawn = WaitingSpawn {
        program,
        task_count: 1,
        requested_by: requester,
        job,
        user: 0,
        since,
        queue_position: 1,
        last_result: reason,
    };
    assert_eq!(query_waiting_spawns(&mut bed, None), [first_spawn]);
    assert_eq!(query_waiting_spawns(&mut bed, Some(7)), []);
    // When the limit is no longer exceeded, the listed reason is the present owner.
    for task in [task_id(1, 100), task_id(1, 101)] {
        bed.state().log_event(
            host_id(1),
            EventKind::TaskEnded {
                tid: task,
                status: 0,
                used: Usage::default(),
            },
        );
    }
    bed.state().request_spawn(7, &request(2));
    bed.process_inbox();
    let spawns = query_waiting_spawns(&mut bed, Some(0));
    assert_eq!(
        spawns
            .iter()
            .map(|w| (w.task_count, w.queue_position))
            .collect::<Vec<_>>(),
        [(1, 1), (2, 2)]
    );
    let owner_text = "no host is free: h1: owner present (alice on pts/0)";
    assert!(
        spawns.iter().all(|spawn| spawn.last_result == owner_text),
        "{spawns:?}"
    );
    bed.report_owner_absent(1);
    assert!(
        query_waiting_spawns(&mut bed, None).len() < 2,
        "who has a place waits no more"
    );
}
