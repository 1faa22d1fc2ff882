//! Jobs, tasks and their usage, which the history computes from the event log.

use crate::{
    EventLog, StoredEntries, USER, apply_batch, build_history, event_time, example_log, host_id,
    owner_cause, query_decision_texts, query_job, read_history, task_id,
};
use pvm_rm::store::{History, LogPosition};
use sempa_proto::event::{EventKind, LostTasks};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply, TaskOutcome, UsageTotals};
use sempa_proto::table::TaskInfo;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

/// A job consists of its first task and all descendants of this task. The usage of the job is the
/// sum over these tasks.
#[test]
fn job_sums_usage_of_its_tasks() {
    let history = build_history(&example_log());
    let (job, tasks) = query_job(&history, task_id(3, 3));
    assert_eq!(
        (job.job, job.user, job.program.as_str(), job.ended_at),
        (task_id(1, 2), USER, "", None)
    );
    let usage = Usage {
        user: Micros::from_secs(24),
        system: Micros(0),
        resident_max_bytes: 15_000,
    };
    let wall_time = Micros::from_secs(30);
    assert_eq!(
        job.totals,
        UsageTotals {
            task_count: 4,
            running_tasks: 2,
            failed_tasks: 1,
            usage,
            wall_time,
            migrations: 1,
            evictions: 1
        }
    );
    let outcomes: Vec<_> = tasks
        .iter()
        .map(|t| (t.tid, t.host.as_str(), t.end.map(|(_, outcome)| outcome)))
        .collect();
    let expected_outcomes = [
        (task_id(1, 2), "h1", None),
        (task_id(1, 3), "h1", Some(TaskOutcome::Status(0))),
        (task_id(2, 3), "h3", Some(TaskOutcome::Status(9))),
        (task_id(3, 3), "h3", None),
    ];
    assert_eq!(outcomes, expected_outcomes);
    let RmReply::Users(users) = history.answer_query(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!((users.len(), users[0].totals), (1, job.totals));
    assert_eq!(
        history.answer_query(&RmQuery::Users { user: Some(7) }),
        RmReply::Users(Vec::new())
    );
}

/// Appends the restart of a job with these tasks, as (tid, parent, host). Each host reports the
/// start of its tasks, and then the master reports the restart.
fn append_restart(log: &mut EventLog, second: u64, restarted_tasks: &[(Tid, Tid, u16)]) {
    for (tid, parent, host) in restarted_tasks {
        log.append(
            second,
            *host,
            EventKind::TaskStarted {
                tid: *tid,
                parent: *parent,
                name: "worker".into(),
                user: USER,
            },
        );
    }
    let tasks = restarted_tasks
        .iter()
        .map(|(tid, _, host)| (*tid, host_id(*host)))
        .collect();
    let reason = "h1 was lost".to_string();
    log.append(
        second + 1,
        1,
        EventKind::Restarted {
            checkpoint: "s".into(),
            job: task_id(1, 3),
            tasks,
            why: reason,
        },
    );
}

/// Task numbers and birth hosts of the first task of a job, its child and its grandchild.
const JOB_TASKS: [(u32, u16); 3] = [(3, 1), (4, 2), (5, 2)];

/// Returns the tasks of [`JOB_TASKS`] as (tid, parent, current host). `parent`: parent of the first
/// task.
fn job_tasks(parent: Tid) -> [(Tid, Tid, u16); 3] {
    let [first_task, child, grandchild] = JOB_TASKS.map(|(local, host)| task_id(host, local));
    [
        (first_task, parent, 3),
        (child, first_task, 3),
        (grandchild, child, 2),
    ]
}

/// Returns the log of a job that restarts. The starts of its tasks are reported in `report_order`.
/// `same_machine`: the job also ran in this virtual machine before the restart.
fn restarted_log(report_order: [usize; 3], same_machine: bool) -> EventLog {
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
        job_tasks(Tid::NONE)
            .iter()
            .for_each(|(tid, parent, _)| log.append_start(2, *tid, *parent, "worker"));
        log.append_migration(8, task_id(2, 4), 2, 3, owner_cause());
        job_tasks(Tid::NONE)
            .iter()
            .for_each(|(tid, ..)| log.append_end(12, *tid, 9, 1_000));
    }
    append_restart(
        &mut log,
        20,
        &report_order.map(|position| job_tasks(Tid::NONE)[position]),
    );
    log
}

/// Asserts that queries for tasks of the restarted job report the restart. If `same_machine` is
/// true, they must also report the migration before the restart.
fn assert_decisions_are_reported(history: &History, same_machine: bool) {
    let RmReply::Decisions { decisions, .. } =
        history.answer_query(&RmQuery::TaskDecisions(task_id(2, 4)))
    else {
        panic!("nothing")
    };
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Restarted { .. })),
        "{decisions:?}"
    );
    let has_task_migration = decisions
        .iter()
        .any(|d| matches!(d.kind, DecisionKind::Migrated { .. }));
    assert_eq!(
        has_task_migration, same_machine,
        "what was decided before it went back is about the same task: {decisions:?}"
    );
    let RmReply::Decisions { decisions, .. } =
        history.answer_query(&RmQuery::TaskDecisions(task_id(1, 3)))
    else {
        panic!("nothing")
    };
    let has_job_migration = decisions
        .iter()
        .any(|d| matches!(d.kind, DecisionKind::Migrated { tid, .. } if tid == task_id(2, 4)));
    assert_eq!(
        has_job_migration, same_machine,
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
        let mut history = build_history(&restarted_log(order, same_machine));
        let (job, tasks) = query_job(&history, task_id(2, 5));
        assert_eq!(
            (job.job, job.program.as_str(), job.ended_at),
            (task_id(1, 3), "worker", None),
            "{order:?}"
        );
        assert_eq!(
            (
                job.totals.task_count,
                job.totals.running_tasks,
                job.totals.failed_tasks
            ),
            (3, 3, 0),
            "{order:?}"
        );
        let members: BTreeSet<_> = tasks
            .iter()
            .map(|t| (t.tid, t.host.clone(), t.end.is_none()))
            .collect();
        assert_eq!(
            members,
            job_tasks(Tid::NONE)
                .map(|(tid, _, host)| (tid, format!("h{host}"), true))
                .into(),
            "{order:?}"
        );
        let RmReply::Jobs(jobs) = history.answer_query(&RmQuery::Jobs { user: None }) else {
            panic!("no jobs")
        };
        let running_jobs: Vec<_> = jobs
            .iter()
            .filter(|job| job.ended_at.is_none())
            .map(|job| job.job)
            .collect();
        assert_eq!(
            (running_jobs, jobs.len()),
            (vec![task_id(1, 3)], 1 + usize::from(same_machine)),
            "{order:?}"
        );
        assert_decisions_are_reported(&history, same_machine);
        let mut tables = StoredEntries::new();
        apply_batch(&mut tables, history.take_batch());
        assert_eq!(read_history(&tables), history);
    }
}

/// If a task was ended for an owner, queries report the reason, and the task counts as evicted.
#[test]
fn task_killed_by_owner_counts_as_eviction() {
    let mut log = example_log();
    let (guests, reason) = (
        vec![task_id(3, 3), task_id(3, 99)],
        "olga is logged in on pts/1".to_string(),
    );
    log.append(
        30,
        3,
        EventKind::GuestsEnded {
            host: host_id(3),
            guests,
            why: reason.clone(),
        },
    );
    log.append_end(31, task_id(3, 3), 15, 1_000);
    log.append(
        40,
        3,
        EventKind::GuestsEnded {
            host: host_id(3),
            guests: vec![],
            why: reason,
        },
    );
    let history = build_history(&log);
    let (killed_task, other_guest) = (task_id(3, 3), task_id(3, 99));
    let expected_text = format!(
        "guests ended for the owner of h3: {killed_task} {other_guest}: olga is logged in on pts/1"
    );
    for query in [
        RmQuery::TaskDecisions(task_id(3, 3)),
        RmQuery::TaskDecisions(task_id(1, 2)),
        RmQuery::HostDecisions("h3".into()),
    ] {
        let texts = query_decision_texts(&history, query);
        assert_eq!(
            texts
                .iter()
                .filter(|texts| **texts == expected_text)
                .count(),
            1,
            "{texts:?}"
        );
        assert!(
            texts
                .iter()
                .all(|texts| !texts.contains("guests ended for the owner")
                    || *texts == expected_text),
            "{texts:?}"
        );
    }
    let (job, tasks) = query_job(&history, task_id(3, 3));
    assert_eq!((job.totals.migrations, job.totals.evictions), (1, 2));
    assert_eq!(
        (tasks[3].tid, tasks[3].migrations, tasks[3].evictions),
        (task_id(3, 3), 0, 1)
    );
    let RmReply::Users(users) = history.answer_query(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.evictions, 2);
}

/// Each task of a job that was vacated for an owner counts as evicted.
#[test]
fn vacating_counts_as_eviction_of_each_task() {
    let mut log = EventLog::default();
    let tasks = job_tasks(Tid::NONE);
    tasks
        .iter()
        .for_each(|(tid, parent, _)| log.append_start(2, *tid, *parent, "worker"));
    let vacated = |vacated, checkpoint: &str| {
        let (checkpoint, job, bytes, frozen) =
            (checkpoint.to_string(), task_id(1, 3), 9, Micros(5));
        EventKind::Checkpointed {
            checkpoint,
            job,
            tasks: 3,
            bytes,
            frozen,
            vacated,
        }
    };
    log.append(5, 1, vacated(false, "t40003-20261122T141503-1"));
    assert_eq!(
        query_job(&build_history(&log), task_id(1, 3))
            .0
            .totals
            .evictions,
        0,
        "it goes on"
    );
    log.append(6, 1, vacated(true, "t40003-20261122T141504-1"));
    tasks
        .iter()
        .for_each(|(tid, ..)| log.append_end(7, *tid, 9, 1_000));
    assert_eq!(
        query_job(&build_history(&log), task_id(1, 3))
            .0
            .totals
            .evictions,
        3
    );
}

/// A restarted job whose first task was spawned by a task outside the job still belongs to the job
/// of that task.
#[test]
fn restarted_job_keeps_its_parent() {
    let mut log = example_log();
    job_tasks(task_id(1, 2))
        .iter()
        .for_each(|(tid, parent, _)| log.append_start(30, *tid, *parent, "worker"));
    job_tasks(task_id(1, 2))
        .iter()
        .for_each(|(tid, ..)| log.append_end(31, *tid, 9, 1_000));
    let [top_task, child, grandchild] = job_tasks(task_id(1, 2));
    append_restart(&mut log, 40, &[grandchild, child, top_task]);
    let (job, _) = query_job(&build_history(&log), task_id(2, 5));
    assert_eq!(
        (job.job, job.totals.task_count, job.totals.running_tasks),
        (task_id(1, 2), 10, 5)
    );
}

/// Tasks that serve the virtual machine, and consoles without children, do not count as jobs.
#[test]
fn service_tasks_and_consoles_are_no_jobs() {
    let mut log = example_log();
    log.append_start(30, task_id(1, 77), Tid::NONE, "");
    log.append_end(31, task_id(1, 77), 0, 1);
    let RmReply::Jobs(jobs) = build_history(&log).answer_query(&RmQuery::Jobs { user: None })
    else {
        panic!("no jobs")
    };
    assert_eq!(
        jobs.iter().map(|job| job.job).collect::<Vec<_>>(),
        [task_id(1, 2)]
    );
}

/// The loss of a host ends its tasks. A task that is missing in a task list ends, too.
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
            lost_tasks: LostTasks::default(),
        },
    );
    let mut history = build_history(&log);
    assert_eq!(
        query_job(&history, task_id(1, 2)).1[3].end,
        Some((event_time(40), TaskOutcome::Lost))
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
        namespace_pid: 1,
        stopping: false,
        leftover_processes: 0,
    };
    history.reconcile_tasks(event_time(50), &[info]);
    let (job, _) = query_job(&history, task_id(1, 2));
    assert_eq!(
        (job.ended_at, job.totals.running_tasks),
        (Some(event_time(50)), 0)
    );
}

/// In a new virtual machine the totals of users remain, and tids of the old one may be reused.
#[test]
fn new_virtual_machine_keeps_totals_and_reuses_tids() {
    let mut history = build_history(&example_log());
    history.start_new_vm();
    assert_eq!(history.log_position(), LogPosition::default());
    assert_eq!(history.running_tasks().count(), 0);
    let mut log = EventLog::default();
    log.append_start(100, task_id(1, 2), Tid::NONE, "");
    log.append_start(101, task_id(1, 3), task_id(1, 2), "other");
    log.0.iter().for_each(|event| history.apply_event(event));
    let (job, tasks) = query_job(&history, task_id(1, 3));
    assert_eq!(
        (tasks.len(), job.totals.task_count),
        (2, 2),
        "the former job of that tid is another one"
    );
    let RmReply::Users(users) = history.answer_query(&RmQuery::Users { user: None }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.task_count, 6);
}
