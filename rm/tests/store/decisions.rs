//! Queries for decisions: the reply contains the decisions about the task, job or host of the
//! query.

use crate::{
    StoredEntries, apply_batch, build_history, example_log, host_id, query_decision_texts,
    read_history, task_id,
};
use sempa_proto::event::EventKind;
use sempa_proto::rm::{RmQuery, RmReply};

/// A query for a job or a host reports each failure that concerns the job or the host.
#[test]
fn failures_are_attributed_to_jobs_and_hosts() {
    let mut log = example_log();
    let reason = || "no room".to_string();
    log.append(
        30,
        1,
        EventKind::CheckpointFailed {
            job: task_id(1, 2),
            why: reason(),
        },
    );
    let (checkpoint, cause) = (
        format!("{}-20261122T141503-1", task_id(1, 2)),
        "h1 was lost".to_string(),
    );
    log.append(
        31,
        1,
        EventKind::RestartFailed {
            checkpoint: checkpoint.clone(),
            cause: cause.clone(),
            why: reason(),
        },
    );
    log.append(
        32,
        1,
        EventKind::RestartFailed {
            checkpoint: "nonsense".into(),
            cause,
            why: reason(),
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
    log.append_end(34, task_id(3, 3), 9, 1_000);
    log.append(
        35,
        1,
        EventKind::HostRefused {
            name: "h4".into(),
            why: "no route to it".into(),
        },
    );
    let mut history = build_history(&log);
    let job = query_decision_texts(&history, RmQuery::TaskDecisions(task_id(1, 2)));
    let tasker_text = format!(
        "the tasker of h3 has ended (signal 9), and with it {}",
        task_id(3, 3)
    );
    let restart_text = format!("checkpoint {checkpoint} was not restarted (h1 was lost): no room");
    let last_texts = [
        format!("job {} was not checkpointed: no room", task_id(1, 2)),
        restart_text,
        tasker_text.clone(),
    ];
    assert_eq!(job[job.len() - 3..], last_texts);
    assert_eq!(
        query_decision_texts(&history, RmQuery::HostDecisions("h3".into())).last(),
        Some(&tasker_text)
    );
    assert_eq!(
        query_decision_texts(&history, RmQuery::HostDecisions("h4".into())),
        ["h4 was not added: no route to it"]
    );
    let mut tables = StoredEntries::new();
    apply_batch(&mut tables, history.take_batch());
    assert_eq!(read_history(&tables), history);
}

/// A query for a task or a host reports each decision that concerns the task or the host.
#[test]
fn decisions_are_reported_for_their_subject() {
    let history = build_history(&example_log());
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = history.answer_query(&RmQuery::TaskDecisions(task_id(2, 3)))
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
    let RmReply::Decisions { decisions, .. } =
        history.answer_query(&RmQuery::HostDecisions("h2".into()))
    else {
        panic!()
    };
    assert!(
        matches!(decisions[..], [_, _]),
        "it joined, and a task left it: {decisions:?}"
    );
    assert_eq!(
        history.answer_query(&RmQuery::TaskDecisions(task_id(1, 99))),
        RmReply::NotFound
    );
    assert_eq!(
        history.answer_query(&RmQuery::HostDecisions("nobody".into())),
        RmReply::NotFound
    );
}
