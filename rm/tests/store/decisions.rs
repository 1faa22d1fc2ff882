//! Queries for decisions: each decision is reported for its subjects.

use crate::{Tables, apply_batch, example_log, history_of, host_id, reported, reread, task_id};
use sempa_proto::event::EventKind;
use sempa_proto::rm::{RmQuery, RmReply};

/// Each failure is reported in queries for the job or the host that it concerns.
#[test]
fn failures_are_attributed_to_jobs_and_hosts() {
    let mut log = example_log();
    let why = || "no room".to_string();
    log.append(
        30,
        1,
        EventKind::CheckpointFailed {
            job: task_id(1, 2),
            why: why(),
        },
    );
    let (set, cause) = (
        format!("{}-20261122T141503-1", task_id(1, 2)),
        "h1 was lost".to_string(),
    );
    log.append(
        31,
        1,
        EventKind::RestartFailed {
            checkpoint: set.clone(),
            cause: cause.clone(),
            why: why(),
        },
    );
    log.append(
        32,
        1,
        EventKind::RestartFailed {
            checkpoint: "nonsense".into(),
            cause,
            why: why(),
        },
    );
    log.append(
        33,
        3,
        EventKind::TaskerGone {
            host: host_id(3),
            why: "signal 9".into(),
        },
    );
    log.ended(34, task_id(3, 3), 9, 1_000);
    log.append(
        35,
        1,
        EventKind::HostRefused {
            name: "h4".into(),
            why: "no route to it".into(),
        },
    );
    let mut history = history_of(&log);
    let job = reported(&history, RmQuery::TaskDecisions(task_id(1, 2)));
    let tasker = format!(
        "the tasker of h3 has ended (signal 9), and with it {}",
        task_id(3, 3)
    );
    let failed = format!("checkpoint {set} was not restarted (h1 was lost): no room");
    let last = [
        format!("job {} was not checkpointed: no room", task_id(1, 2)),
        failed,
        tasker.clone(),
    ];
    assert_eq!(job[job.len() - 3..], last);
    assert_eq!(
        reported(&history, RmQuery::HostDecisions("h3".into())).last(),
        Some(&tasker)
    );
    assert_eq!(
        reported(&history, RmQuery::HostDecisions("h4".into())),
        ["h4 was not added: no route to it"]
    );
    let mut tables = Tables::new();
    apply_batch(&mut tables, history.take_batch());
    assert_eq!(reread(&tables), history);
}

/// Each decision is reported in queries for the task and the host that it concerns.
#[test]
fn decisions_are_reported_for_their_subject() {
    let history = history_of(&example_log());
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = history.answer(&RmQuery::TaskDecisions(task_id(2, 3)))
    else {
        panic!()
    };
    assert_eq!((task.migrations, task.evictions), (1, 1));
    assert_eq!(
        decisions
            .iter()
            .map(|d| d.kind.to_string())
            .collect::<Vec<_>>(),
        [
            "t80003 migrated from h2 to h3 because the owner of h2 is present (olga is logged in on pts/1): 4096 \
             bytes, frozen 50.0 ms"
        ]
    );
    let RmReply::Decisions { decisions, .. } = history.answer(&RmQuery::HostDecisions("h2".into()))
    else {
        panic!()
    };
    assert!(
        matches!(decisions[..], [_, _]),
        "it joined, and a task left it: {decisions:?}"
    );
    assert_eq!(
        history.answer(&RmQuery::TaskDecisions(task_id(1, 99))),
        RmReply::NotFound
    );
    assert_eq!(
        history.answer(&RmQuery::HostDecisions("nobody".into())),
        RmReply::NotFound
    );
}
