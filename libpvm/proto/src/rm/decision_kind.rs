//! The kinds of decisions and events that the resource manager records. New variants must be added
//! at the end, because the stored history contains the variant numbers.

use super::{MigrationBenefit, PlacementAttempt, RejectedHost, RejectionReason};
use crate::error::PvmError;
use crate::ids::{Micros, Tid};
use crate::migration::{MigrationCause, Step};
use crate::suspend;
use serde::{Deserialize, Serialize};
use std::fmt;

const RM_RESTARTED_SENTENCE: &str = "the resource manager restarted with its recorded state; in the meantime spawns were \
                                  placed round robin";

/// The content of a decision or event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DecisionKind {
    /// A spawn request was answered.
    Spawn {
        program: String,
        #[serde(rename = "by")]
        requested_by: Tid,
        /// Job of the requesting task.
        job: Tid,
        /// User id of the requesting task.
        user: u32,
        /// Number of requested tasks.
        count: u32,
        /// The started tasks with the names of their hosts.
        started: Vec<(Tid, String)>,
        /// The reason why the remaining tasks were not started; `None` if all were started.
        error: Option<PvmError>,
        /// Time from the request to the last placement attempt; 0 if the request did not wait.
        waited: Micros,
        attempts: Vec<PlacementAttempt>,
    },
    /// A migration was ordered.
    #[serde(rename = "Go")]
    MigrationOrdered {
        tid: Tid,
        from: String,
        to: String,
        cause: MigrationCause,
        /// Expected benefit and cost of the migration.
        expected: MigrationBenefit,
        /// The reason why the migration did not begin; `None` if it began.
        refused: Option<String>,
    },
    /// A migration is complete.
    #[serde(rename = "Moved")]
    Migrated {
        tid: Tid,
        from: String,
        to: String,
        cause: MigrationCause,
        /// Size of the images in bytes.
        bytes: u64,
        /// Time for which the task was stopped.
        frozen: Micros,
    },
    /// A migration failed; the task continued at the source.
    #[serde(rename = "NotMoved")]
    MigrationFailed {
        tid: Tid,
        from: String,
        to: String,
        /// Reason for the migration.
        cause: MigrationCause,
        /// The step that failed.
        step: Step,
        /// Reason for the failure.
        why: String,
    },
    /// A task cannot leave a host although the host's owner is present.
    #[serde(rename = "Stays")]
    CannotLeave {
        tid: Tid,
        host: String,
        why: String,
        /// Hosts that did not accept the task.
        #[serde(rename = "not_used")]
        rejected: Vec<RejectedHost>,
    },
    /// The owner of a host returned.
    #[serde(rename = "OwnerCame")]
    OwnerReturned {
        host: String,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// The owner of a host left.
    OwnerLeft {
        host: String,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    HostJoined {
        host: String,
    },
    /// A host has left the virtual machine or was lost, with all tasks on it.
    HostGone {
        host: String,
        why: String,
    },
    /// A task was suspended.
    Suspended {
        tid: Tid,
        host: String,
        cause: suspend::SuspendCause,
    },
    /// A suspended task was resumed.
    Resumed {
        tid: Tid,
        host: String,
        cause: suspend::SuspendCause,
    },
    /// A job was suspended or resumed, with all tasks that it spawns later.
    JobSuspended {
        job: Tid,
        /// True if the job was suspended, false if it was resumed.
        suspend: bool,
        /// The task that requested the change.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// A drain of a host began or ended.
    Drain {
        host: String,
        /// True if the drain began; false if it ended and the host accepts tasks again.
        #[serde(rename = "begun")]
        started: bool,
        /// The task that requested the drain or its end.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// The resource manager started.
    #[serde(rename = "Began")]
    RmStarted {
        /// True if the resource manager continues with the state of a previous one.
        #[serde(rename = "again")]
        resumed: bool,
    },
    /// A job was vacated: one of its tasks must leave its host and no other host accepts the task,
    /// so the job was checkpointed and ended. The job will be restarted when hosts accept it.
    #[serde(rename = "Parked")]
    Vacated {
        /// First task of the job.
        job: Tid,
        /// The task that must leave.
        tid: Tid,
        /// Name of the host that the task must leave.
        host: String,
        /// The reason why the task cannot migrate.
        why: String,
    },
    /// A job was restarted from a checkpoint.
    Restarted {
        job: Tid,
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// The restarted tasks with the names of their hosts.
        tasks: Vec<(Tid, String)>,
        why: String,
    },
    /// The benefit of a load migration was measured, after the task ended or had run long enough on
    /// the target.
    #[serde(rename = "CameOut")]
    BenefitMeasured {
        tid: Tid,
        from: String,
        to: String,
        /// Expected benefit and cost.
        expected: MigrationBenefit,
        /// Actual benefit and cost, estimated from the task's progress on the target.
        #[serde(rename = "came")]
        actual: MigrationBenefit,
    },
    /// The owner's policy closes a host to guests, whether or not anyone uses it.
    HostClosed {
        host: String,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// A closed host accepts guests again.
    HostOpened {
        host: String,
    },
    /// The guests of a host were ended, as its owner's policy requires.
    GuestsEnded {
        host: String,
        tasks: Vec<Tid>,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// A checkpoint of a job failed.
    CheckpointFailed {
        /// First task of the job.
        job: Tid,
        why: String,
    },
    /// The restart of a checkpoint failed.
    RestartFailed {
        /// First task of the job, if known.
        job: Option<Tid>,
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// Reason for the attempt.
        cause: String,
        /// Reason for the failure.
        why: String,
    },
    /// The tasker of a host has ended, and the tasks that it had started have ended with it.
    TaskerGone {
        host: String,
        tasks: Vec<Tid>,
        why: String,
    },
    /// A host could not be added.
    HostRefused {
        /// Host name as the user passed it.
        host: String,
        why: String,
    },
}

impl DecisionKind {
    /// True if the decision concerns a task for which `matches` returns true.
    pub fn concerns_task(&self, matches: impl Fn(Tid) -> bool) -> bool {
        match self {
            DecisionKind::Spawn { job, started, .. } => {
                matches(*job) || started.iter().any(|(tid, _)| matches(*tid))
            }
            DecisionKind::MigrationOrdered { tid, .. }
            | DecisionKind::Migrated { tid, .. }
            | DecisionKind::MigrationFailed { tid, .. }
            | DecisionKind::CannotLeave { tid, .. }
            | DecisionKind::BenefitMeasured { tid, .. }
            | DecisionKind::Suspended { tid, .. }
            | DecisionKind::Resumed { tid, .. } => matches(*tid),
            DecisionKind::JobSuspended { job, .. } | DecisionKind::CheckpointFailed { job, .. } => {
                matches(*job)
            }
            DecisionKind::RestartFailed { job, .. } => job.is_some_and(matches),
            DecisionKind::GuestsEnded { tasks, .. } | DecisionKind::TaskerGone { tasks, .. } => {
                tasks.iter().any(|tid| matches(*tid))
            }
            DecisionKind::Vacated { job, tid, .. } => matches(*job) || matches(*tid),
            DecisionKind::Restarted { job, tasks, .. } => {
                matches(*job) || tasks.iter().any(|(tid, _)| matches(*tid))
            }
            _ => false,
        }
    }

    /// True if the decision concerns the host with this name, for example as source, target or
    /// rejected host. A host that was rejected only because the request names another host does not
    /// count.
    pub fn concerns_host(&self, name: &str) -> bool {
        let not_used = |list: &[RejectedHost]| {
            list.iter()
                .any(|n| n.host == name && n.why != RejectionReason::OtherHostRequested)
        };
        match self {
            DecisionKind::Restarted { tasks, .. } => tasks.iter().any(|(_, host)| host == name),
            DecisionKind::Spawn {
                started, attempts, ..
            } => {
                started.iter().any(|(_, host)| host == name)
                    || attempts.iter().any(|a| not_used(&a.rejected))
            }
            DecisionKind::MigrationOrdered { from, to, .. }
            | DecisionKind::Migrated { from, to, .. }
            | DecisionKind::MigrationFailed { from, to, .. }
            | DecisionKind::BenefitMeasured { from, to, .. } => from == name || to == name,
            DecisionKind::CannotLeave {
                host,
                rejected: list,
                ..
            } => host == name || not_used(list),
            DecisionKind::OwnerReturned { host, .. }
            | DecisionKind::OwnerLeft { host, .. }
            | DecisionKind::HostJoined { host }
            | DecisionKind::HostGone { host, .. }
            | DecisionKind::Drain { host, .. }
            | DecisionKind::Vacated { host, .. }
            | DecisionKind::Suspended { host, .. }
            | DecisionKind::Resumed { host, .. }
            | DecisionKind::HostClosed { host, .. }
            | DecisionKind::HostOpened { host }
            | DecisionKind::GuestsEnded { host, .. }
            | DecisionKind::TaskerGone { host, .. }
            | DecisionKind::HostRefused { host, .. } => host == name,
            DecisionKind::JobSuspended { .. }
            | DecisionKind::RmStarted { .. }
            | DecisionKind::CheckpointFailed { .. }
            | DecisionKind::RestartFailed { .. } => false,
        }
    }
}

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

/// Describes the cause of a migration from host `from`, for example "the owner of h2 is there (olga
/// on pts/1)".
fn cause_phrase(cause: &MigrationCause, from: &str) -> String {
    match cause {
        MigrationCause::Requested { requested_by } => format!("{requested_by} requested it"),
        MigrationCause::Owner { why } => format!("the owner of {from} is present ({why})"),
        MigrationCause::Load { why } => format!("the load is uneven: {why}"),
        MigrationCause::Drain { requested_by } => format!("{requested_by} drains {from}"),
        MigrationCause::Checkpoint | MigrationCause::Restart => cause.to_string(),
    }
}

fn write_spawn(
    f: &mut fmt::Formatter<'_>,
    (program, by, count): (&str, Tid, u32),
    started: &[(Tid, String)],
    error: Option<PvmError>,
    attempts: &[PlacementAttempt],
) -> fmt::Result {
    let mut hosts: Vec<&str> = started.iter().map(|(_, host)| host.as_str()).collect();
    hosts.dedup();
    let hosts = hosts.join(" ");
    let why: Vec<&str> = attempts.iter().map(|a| a.reason.as_str()).collect();
    let why = why.join("; then ");
    match (error, started.len()) {
        (Some(error), 0) => write!(f, "{program} was not started for {by}: {error} ({why})"),
        (Some(error), n) => {
            write!(
                f,
                "{n} of {count} {program} started for {by} on {hosts}: {why}; the others failed: {error}"
            )
        }
        (None, _) => write!(f, "{program} started for {by} on {hosts}: {why}"),
    }
}

fn write_expected_benefit(
    f: &mut fmt::Formatter<'_>,
    MigrationBenefit { gain, cost }: &MigrationBenefit,
) -> fmt::Result {
    match gain.0 {
        0 => write!(f, "; expected cost {:.1} s", seconds(*cost)),
        _ => write!(
            f,
            "; expected to save {:.1} s and to cost {:.1} s",
            seconds(*gain),
            seconds(*cost)
        ),
    }
}

fn write_tasks(f: &mut fmt::Formatter<'_>, tasks: &[Tid]) -> fmt::Result {
    tasks.iter().try_for_each(|tid| write!(f, " {tid}"))
}

impl fmt::Display for DecisionKind {
    // tidy: long because the match is a table with one sentence for each decision
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecisionKind::Spawn {
                program,
                requested_by: by,
                count,
                started,
                error,
                waited,
                attempts,
                ..
            } => {
                write_spawn(f, (program, *by, *count), started, *error, attempts)?;
                if waited.0 > 0 {
                    write!(f, "; it waited {:.1} s", seconds(*waited))
                } else {
                    Ok(())
                }
            }
            DecisionKind::MigrationOrdered {
                tid,
                from,
                to,
                cause,
                expected,
                refused,
            } => {
                write!(
                    f,
                    "migration of {tid} from {from} to {to} ordered because {}",
                    cause_phrase(cause, from)
                )?;
                write_expected_benefit(f, expected)?;
                refused
                    .as_ref()
                    .map_or(Ok(()), |why| write!(f, "; it did not begin: {why}"))
            }
            DecisionKind::Migrated {
                tid,
                from,
                to,
                cause,
                bytes,
                frozen,
            } => write!(
                f,
                "{tid} migrated from {from} to {to} because {}: {bytes} bytes, frozen {:.1} ms",
                cause_phrase(cause, from),
                frozen.0 as f64 / 1e3
            ),
            DecisionKind::MigrationFailed {
                tid,
                from,
                to,
                step,
                why,
                ..
            } => {
                write!(
                    f,
                    "{tid} was not migrated from {from} to {to}: {step} failed: {why}"
                )
            }
            DecisionKind::CannotLeave {
                tid,
                host,
                why,
                rejected: not_used,
            } => {
                write!(f, "{tid} stays on {host}, which it should leave: {why}")?;
                let list: Vec<String> = not_used
                    .iter()
                    .map(|n| format!("{}: {}", n.host, n.why))
                    .collect();
                if list.is_empty() {
                    Ok(())
                } else {
                    write!(f, " ({})", list.join("; "))
                }
            }
            DecisionKind::OwnerReturned { host, why } => {
                write!(f, "the owner of {host} returned: {why}")
            }
            DecisionKind::OwnerLeft { host, why } => write!(f, "the owner of {host} left: {why}"),
            DecisionKind::HostJoined { host } => write!(f, "{host} joined"),
            DecisionKind::HostGone { host, why } => write!(f, "{host} is gone: {why}"),
            DecisionKind::Suspended { tid, host, cause } => {
                write!(f, "{tid} was suspended on {host}: {cause}")
            }
            DecisionKind::Resumed { tid, host, cause } => {
                write!(f, "{tid} was resumed on {host}: {cause}")
            }
            DecisionKind::JobSuspended {
                job,
                suspend,
                requested_by,
            } => {
                let what = if *suspend { "suspended" } else { "resumed" };
                write!(f, "job {job} was {what}: requested by {requested_by}")
            }
            DecisionKind::Drain {
                host,
                started: true,
                requested_by: by,
            } => write!(f, "{host} is being drained: requested by {by}"),
            DecisionKind::Drain {
                host,
                started: false,
                requested_by: by,
            } => write!(f, "{host} accepts tasks again: requested by {by}"),
            DecisionKind::Vacated {
                job,
                tid,
                host,
                why,
            } => write!(
                f,
                "job {job} is checkpointed and ended, and will be restarted when there is room: {tid} must leave \
                 {host}, and {why}"
            ),
            DecisionKind::Restarted {
                job,
                checkpoint: set,
                tasks,
                why,
            } => {
                write!(f, "job {job} restarted from checkpoint {set} ({why}):")?;
                tasks
                    .iter()
                    .try_for_each(|(tid, host)| write!(f, " {tid} on {host}"))
            }
            DecisionKind::BenefitMeasured {
                tid,
                from,
                to,
                expected,
                actual: came,
            } => {
                write!(
                    f,
                    "the migration of {tid} from {from} to {to} was expected to save "
                )?;
                write!(
                    f,
                    "{:.1} s and to cost {:.1} s",
                    seconds(expected.gain),
                    seconds(expected.cost)
                )?;
                write!(
                    f,
                    "; it saved {:.1} s and cost {:.1} s",
                    seconds(came.gain),
                    seconds(came.cost)
                )
            }
            DecisionKind::HostClosed { host, why } => write!(f, "{host} accepts no guests: {why}"),
            DecisionKind::HostOpened { host } => write!(f, "{host} accepts guests again"),
            DecisionKind::GuestsEnded { host, tasks, why } => {
                write!(f, "guests ended for the owner of {host}:")?;
                write_tasks(f, tasks)?;
                write!(f, ": {why}")
            }
            DecisionKind::CheckpointFailed { job, why } => {
                write!(f, "job {job} was not checkpointed: {why}")
            }
            DecisionKind::RestartFailed {
                checkpoint: set,
                cause,
                why,
                ..
            } => {
                write!(f, "checkpoint {set} was not restarted ({cause}): {why}")
            }
            DecisionKind::TaskerGone { host, tasks, why } => {
                write!(f, "the tasker of {host} has ended ({why}), and with it")?;
                if tasks.is_empty() {
                    f.write_str(" no task")
                } else {
                    write_tasks(f, tasks)
                }
            }
            DecisionKind::HostRefused { host, why } => write!(f, "{host} was not added: {why}"),
            DecisionKind::RmStarted { resumed: false } => {
                f.write_str("the resource manager started")
            }
            DecisionKind::RmStarted { resumed: true } => f.write_str(RM_RESTARTED_SENTENCE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::to_bytes;

    /// The variants keep their numbers, so that stored decisions stay readable.
    #[test]
    fn variant_numbers_are_stable() {
        let number = |what: DecisionKind| to_bytes(&what).expect("it can be written")[0];
        let host = || "h2".to_string();
        assert_eq!(number(DecisionKind::HostJoined { host: host() }), 7);
        assert_eq!(number(DecisionKind::RmStarted { resumed: true }), 13);
        assert_eq!(
            number(DecisionKind::HostClosed {
                host: host(),
                why: String::new()
            }),
            17
        );
        assert_eq!(
            number(DecisionKind::HostRefused {
                host: host(),
                why: String::new()
            }),
            23
        );
    }

    #[test]
    fn ended_and_lost_guests_are_described() {
        let tasks = vec![Tid::from_raw(0x80001), Tid::from_raw(0x80002)];
        let ended = DecisionKind::GuestsEnded {
            host: "h2".into(),
            tasks: tasks.clone(),
            why: "olga on pts/1".into(),
        };
        let dead = DecisionKind::TaskerGone {
            host: "h2".into(),
            tasks: tasks.clone(),
            why: "signal 9".into(),
        };
        for what in [&ended, &dead] {
            assert!(
                what.concerns_task(|tid| tid == tasks[1]) && what.concerns_host("h2"),
                "{what}"
            );
            assert!(
                !what.concerns_task(|tid| tid == Tid::from_raw(0x80003))
                    && !what.concerns_host("h3"),
                "{what}"
            );
        }
        assert_eq!(
            ended.to_string(),
            "guests ended for the owner of h2: t80001 t80002: olga on pts/1"
        );
        assert_eq!(
            dead.to_string(),
            "the tasker of h2 has ended (signal 9), and with it t80001 t80002"
        );
    }
}
