//! Jobs, tasks and their usage in the history, as they follow from the event log.

use crate::{
    EventLog, Tables, USER, apply_batch, example_log, history_of, host_id, job, owner, reported,
    reread, task_id, time_at,
};
use pvm_rm::store::{History, LogPosition};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply, TaskOutcome, UsageTotals};
use sempa_proto::table::TaskInfo;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

/// A job consists of a top task and all its descendants, and its usage is the sum of theirs.
#[test]
fn job_sums_usage_of_its_tasks() {
    let history = history_of(&example_log());
    let (job, tasks) = job(&history, task_id(3, 3));
    assert_eq!(
        (job.job, job.user, job.program.as_str(), job.ended),
        (task_id(1, 2), USER, "", None)
    );
    let used = Usage {
        user: Micros::from_secs(24),
        system: Micros(0),
        resident_max_bytes: 15_000,
    };
    let wall = Micros::from_secs(30);
    assert_eq!(
        job.totals,
        UsageTotals {
            tasks: 4,
            running: 2,
            failed: 1,
            used,
            wall_time: wall,
            migrations: 1,
            evictions: 1
        }
    );
    let told: Vec<_> = tasks
        .iter()
        .map(|t| (t.tid, t.host.as_str(), t.ended.map(|(_, how)| how)))
        .collect();
    let expected = [
        (task_id(1, 2), "h1", None),
        (task_id(1, 3), "h1", Some(TaskOutcome::Status(0))),
        (task_id(2, 3), "h3", Some(TaskOutcome::Status(9))),
        (task_id(3, 3), "h3", None),
    ];
    assert_eq!(told, expected);
    let RmReply::Users(users) = history.answer(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!((users.len(), users[0].totals), (1, job.totals));
    assert_eq!(
        history.answer(&RmQuery::Users { user: Some(7) }),
        RmReply::Users(Vec::new())
    );
}

/// Appends the restart of a job: each host reports the start of its tasks, and then the master
/// reports the restart.
fn append_restart(log: &mut EventLog, at: u64, all: &[(Tid, Tid, u16)]) {
    for (tid, parent, host) in all {
        log.append(
            at,
            *host,
            EventKind::TaskStarted {
                tid: *tid,
                parent: *parent,
                name: "worker".into(),
                user: USER,
            },
        );
    }
    let tasks = all
        .iter()
        .map(|(tid, _, host)| (*tid, host_id(*host)))
        .collect();
    let why = "h1 was lost".to_string();
    log.append(
        at + 1,
        1,
        EventKind::Restarted {
            checkpoint: "s".into(),
            job: task_id(1, 3),
            tasks,
            why,
        },
    );
}

/// Task number and birth host of a top task, its child and its grandchild.
const FAMILY: [(u32, u16); 3] = [(3, 1), (4, 2), (5, 2)];

fn family(parent: Tid) -> [(Tid, Tid, u16); 3] {
    let [top, child, last] = FAMILY.map(|(local, host)| task_id(host, local));
    [(top, parent, 3), (child, top, 3), (last, child, 2)]
}

/// Returns the log of a job that restarts, with its tasks reported in this order. `same_machine`:
/// the job also ran in this virtual machine before.
fn restarted_log(order: [usize; 3], same_machine: bool) -> EventLog {
    let mut log = EventLog::default();
    for host in 1..=3 {
        log.append(
            0,
            1,
            EventKind::HostAdded {
                host: host_id(host),
                name: format!("h{host}"),
            },
        );
    }
    if same_machine {
        family(Tid::NONE)
            .iter()
            .for_each(|(tid, parent, _)| log.started(2, *tid, *parent, "worker"));
        log.moved(8, task_id(2, 4), 2, 3, owner());
        family(Tid::NONE)
            .iter()
            .for_each(|(tid, ..)| log.ended(12, *tid, 9, 1_000));
    }
    append_restart(&mut log, 20, &order.map(|at| family(Tid::NONE)[at]));
    log
}

/// Asserts that decisions about the tasks of the restarted job are reported, also those from before
/// the restart.
fn assert_decisions_are_reported(history: &History, same_machine: bool) {
    let RmReply::Decisions { decisions, .. } =
        history.answer(&RmQuery::TaskDecisions(task_id(2, 4)))
    else {
        panic!("nothing")
    };
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Restarted { .. })),
        "{decisions:?}"
    );
    let early = decisions
        .iter()
        .any(|d| matches!(d.kind, DecisionKind::Migrated { .. }));
    assert_eq!(
        early, same_machine,
        "what was decided before it went back is about the same task: {decisions:?}"
    );
    let RmReply::Decisions { decisions, .. } =
        history.answer(&RmQuery::TaskDecisions(task_id(1, 3)))
    else {
        panic!("nothing")
    };
    let moved = decisions
        .iter()
        .any(|d| matches!(d.kind, DecisionKind::Migrated { tid, .. } if tid == task_id(2, 4)));
    assert_eq!(
        moved, same_machine,
        "what was decided about a task is about its job: {decisions:?}"
    );
}

/// After a restart all tasks belong to one job, in whatever order their starts are reported.
#[test]
fn restarted_job_is_complete_in_any_report_order() {
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for (order, same_machine) in orders
        .into_iter()
        .flat_map(|order| [(order, true), (order, false)])
    {
        let mut history = history_of(&restarted_log(order, same_machine));
        let (job, tasks) = job(&history, task_id(2, 5));
        assert_eq!(
            (job.job, job.program.as_str(), job.ended),
            (task_id(1, 3), "worker", None),
            "{order:?}"
        );
        assert_eq!(
            (job.totals.tasks, job.totals.running, job.totals.failed),
            (3, 3, 0),
            "{order:?}"
        );
        let members: BTreeSet<_> = tasks
            .iter()
            .map(|t| (t.tid, t.host.clone(), t.ended.is_none()))
            .collect();
        assert_eq!(
            members,
            family(Tid::NONE)
                .map(|(tid, _, host)| (tid, format!("h{host}"), true))
                .into(),
            "{order:?}"
        );
        let RmReply::Jobs(jobs) = history.answer(&RmQuery::Jobs { user: None }) else {
            panic!("no jobs")
        };
        let alive: Vec<_> = jobs
            .iter()
            .filter(|job| job.ended.is_none())
            .map(|job| job.job)
            .collect();
        assert_eq!(
            (alive, jobs.len()),
            (vec![task_id(1, 3)], 1 + usize::from(same_machine)),
            "{order:?}"
        );
        assert_decisions_are_reported(&history, same_machine);
        let mut tables = Tables::new();
        apply_batch(&mut tables, history.take_batch());
        assert_eq!(reread(&tables), history);
    }
}

/// A task that was ended for an owner is reported with the reason, and counts as evicted.
#[test]
fn task_killed_by_owner_counts_as_eviction() {
    let mut log = example_log();
    let (guests, why) = (
        vec![task_id(3, 3), task_id(3, 99)],
        "olga is logged in on pts/1".to_string(),
    );
    log.append(
        30,
        3,
        EventKind::GuestsEnded {
            host: host_id(3),
            guests,
            why: why.clone(),
        },
    );
    log.ended(31, task_id(3, 3), 15, 1_000);
    log.append(
        40,
        3,
        EventKind::GuestsEnded {
            host: host_id(3),
            guests: vec![],
            why,
        },
    );
    let history = history_of(&log);
    let (one, other) = (task_id(3, 3), task_id(3, 99));
    let ended =
        format!("guests ended for the owner of h3: {one} {other}: olga is logged in on pts/1");
    for question in [
        RmQuery::TaskDecisions(task_id(3, 3)),
        RmQuery::TaskDecisions(task_id(1, 2)),
        RmQuery::HostDecisions("h3".into()),
    ] {
        let told = reported(&history, question);
        assert_eq!(
            told.iter().filter(|told| **told == ended).count(),
            1,
            "{told:?}"
        );
        assert!(
            told.iter()
                .all(|told| !told.contains("guests ended for the owner") || *told == ended),
            "{told:?}"
        );
    }
    let (job, tasks) = job(&history, task_id(3, 3));
    assert_eq!((job.totals.migrations, job.totals.evictions), (1, 2));
    assert_eq!(
        (tasks[3].tid, tasks[3].migrations, tasks[3].evictions),
        (task_id(3, 3), 0, 1)
    );
    let RmReply::Users(users) = history.answer(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.evictions, 2);
}

/// Each task of a job that was vacated for an owner counts as evicted.
#[test]
fn vacating_counts_as_eviction_of_each_task() {
    let mut log = EventLog::default();
    let tasks = family(Tid::NONE);
    tasks
        .iter()
        .for_each(|(tid, parent, _)| log.started(2, *tid, *parent, "worker"));
    let parked = |parked, set: &str| {
        let (set, job, bytes, frozen) = (set.to_string(), task_id(1, 3), 9, Micros(5));
        EventKind::Checkpointed {
            checkpoint: set,
            job,
            tasks: 3,
            bytes,
            frozen,
            vacated: parked,
        }
    };
    log.append(5, 1, parked(false, "t40003-20261122T141503-1"));
    assert_eq!(
        job(&history_of(&log), task_id(1, 3)).0.totals.evictions,
        0,
        "it goes on"
    );
    log.append(6, 1, parked(true, "t40003-20261122T141504-1"));
    tasks
        .iter()
        .for_each(|(tid, ..)| log.ended(7, *tid, 9, 1_000));
    assert_eq!(job(&history_of(&log), task_id(1, 3)).0.totals.evictions, 3);
}

/// A restarted job still belongs to the job of the task that had spawned it.
#[test]
fn restarted_job_keeps_its_parent() {
    let mut log = example_log();
    family(task_id(1, 2))
        .iter()
        .for_each(|(tid, parent, _)| log.started(30, *tid, *parent, "worker"));
    family(task_id(1, 2))
        .iter()
        .for_each(|(tid, ..)| log.ended(31, *tid, 9, 1_000));
    let [top, child, last] = family(task_id(1, 2));
    append_restart(&mut log, 40, &[last, child, top]);
    let (job, _) = job(&history_of(&log), task_id(2, 5));
    assert_eq!(
        (job.job, job.totals.tasks, job.totals.running),
        (task_id(1, 2), 10, 5)
    );
}

/// Tasks that serve the virtual machine, and consoles without children, do not count as jobs.
#[test]
fn service_tasks_and_consoles_are_no_jobs() {
    let mut log = example_log();
    log.started(30, task_id(1, 77), Tid::NONE, "");
    log.ended(31, task_id(1, 77), 0, 1);
    let RmReply::Jobs(jobs) = history_of(&log).answer(&RmQuery::Jobs { user: None }) else {
        panic!("no jobs")
    };
    assert_eq!(
        jobs.iter().map(|j| j.job).collect::<Vec<_>>(),
        [task_id(1, 2)]
    );
}

/// When a host is lost, its tasks end. Tasks that are missing in a task list end, too.
#[test]
fn lost_host_or_reconciliation_ends_tasks() {
    let mut log = example_log();
    log.append(
        40,
        1,
        EventKind::HostGone {
            host: host_id(3),
            name: "h3".into(),
            why: "silent".into(),
        },
    );
    let mut history = history_of(&log);
    assert_eq!(
        job(&history, task_id(1, 2)).1[3].ended,
        Some((time_at(40), TaskOutcome::Lost))
    );
    let info = TaskInfo {
        tid: task_id(1, 77),
        parent: Tid::NONE,
        host: host_id(1),
        flags: 0,
        name: String::new(),
        pid: 1,
        uid: USER,
        migrating: false,
        paused: false,
        suspended: false,
    };
    history.reconcile(time_at(50), &[info]);
    let (job, _) = job(&history, task_id(1, 2));
    assert_eq!((job.ended, job.totals.running), (Some(time_at(50)), 0));
}

/// In a new virtual machine the totals of users remain, and tids may be reused.
#[test]
fn new_virtual_machine_keeps_sums_and_reuses_tids() {
    let mut history = history_of(&example_log());
    history.start_new_vm();
    assert_eq!(history.log_position(), LogPosition::default());
    assert_eq!(history.running().count(), 0);
    let mut log = EventLog::default();
    log.started(100, task_id(1, 2), Tid::NONE, "");
    log.started(101, task_id(1, 3), task_id(1, 2), "other");
    log.0.iter().for_each(|event| history.apply_event(event));
    let (job, tasks) = job(&history, task_id(1, 3));
    assert_eq!(
        (tasks.len(), job.totals.tasks),
        (2, 2),
        "the former job of that tid is another one"
    );
    let RmReply::Users(users) = history.answer(&RmQuery::Users { user: None }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.tasks, 6);
}
