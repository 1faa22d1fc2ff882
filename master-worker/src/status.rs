//! Answers to questions about a run, as JSON.

use crate::master::{Master, RunState};
use crate::raw::RawDriver;
use sempa_work_dispatch::TaskId;
use serde_json::{Value, json};

fn text(value: &Value) -> String {
    value.to_string()
}

/// Returns the state of the run, its progress, its workers by class and its statistics.
pub(crate) fn status<D: RawDriver>(master: &Master<D>) -> String {
    text(&status_value(master))
}

pub(crate) fn status_value<D: RawDriver>(master: &Master<D>) -> Value {
    let dispatcher = &master.run.dispatcher;
    let classes: Vec<Value> = dispatcher
        .class_status()
        .into_iter()
        .map(|(class, status)| {
            json!({
                "class": class.0,
                "program": master.run.programs.get(&class).map(|program| &program.program),
                "target": status.target,
                "requested": status.requested,
                "present": status.present,
            })
        })
        .collect();
    let progress = master.run.progress();
    json!({
        "run": master.run_name,
        "state": match master.state {
            RunState::Running => "running",
            RunState::Finished => "finished",
            RunState::Stopped => "stopped",
        },
        "summary": progress.to_string(),
        "progress": progress,
        "classes": classes,
        "best_waiting_key": master.run.best_waiting_key(),
        "best_running_key": master.run.best_running_key(),
        "master_busy_share": master.busy_share(),
        "master_callback_share": master.callback_share(),
        "has_journal": master.journal.is_some(),
        "init_bytes_sent": master.init_bytes_sent(),
        "statistics": master.report(),
    })
}

/// Returns what is known about each worker.
pub(crate) fn workers<D: RawDriver>(master: &Master<D>) -> String {
    let views = master.run.dispatcher.workers(master.run.now);
    text(&json!({ "run": master.run_name, "workers": views }))
}

/// Returns the quarantined tasks with the history of their attempts, each reason as a sentence.
pub(crate) fn quarantine<D: RawDriver>(master: &Master<D>) -> String {
    let tasks: Vec<Value> = master
        .run
        .quarantined_tasks()
        .into_iter()
        .map(|quarantined| {
            let attempts: Vec<Value> = quarantined
                .history
                .iter()
                .map(|record| {
                    json!({
                        "attempt": record.attempt.to_string(),
                        "worker": format!("t{:x}", record.worker.0),
                        "host": record.host,
                        "seconds": record.ended_at.saturating_sub(record.started_at) as f64 / 1e6,
                        "reason": record.reason.to_string(),
                        "counts": record.is_counted,
                    })
                })
                .collect();
            json!({ "task": quarantined.task.0, "attempts": attempts })
        })
        .collect();
    text(&json!({ "run": master.run_name, "quarantined": tasks }))
}

pub(crate) fn stopped<D: RawDriver>(master: &Master<D>) -> String {
    let open = master.run.dispatcher.open_task_count();
    text(&json!({
        "run": master.run_name,
        "stopped": true,
        "open_tasks": open,
        "has_journal": master.journal.is_some(),
    }))
}

pub(crate) fn retried(task: TaskId, is_retried: bool) -> String {
    text(&json!({ "task": task.0, "retried": is_retried }))
}
