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

/// The content of a decision or recorded event, by its kind.
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
        /// The reason why not all tasks were started; `None` if all were started.
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
        /// The reason why the migration did not begin; `None` if the migration began.
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
        rejected_hosts: Vec<RejectedHost>,
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
    /// A job was suspended or resumed, including the tasks that the job spawns later.
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
        /// True if the drain began; false if the drain ended and the host accepts tasks again.
        #[serde(rename = "begun")]
        is_start: bool,
        /// The task that requested the drain or its end.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// The resource manager started.
    #[serde(rename = "Began")]
    RmStarted {
        /// True if the resource manager continues with the state of a previous resource manager.
        #[serde(rename = "again")]
        continues_state: bool,
    },
    /// A job was vacated: one of its tasks must leave its host and no other host accepts the task,
    /// so the job was checkpointed and ended. The job will be restarted when hosts accept the job.
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
    /// The actual benefit of a load migration was measured, when the task had ended or had run long
    /// enough on the target.
    #[serde(rename = "CameOut")]
    BenefitMeasured {
        tid: Tid,
        from: String,
        to: String,
        /// Expected benefit and cost of the migration.
        expected: MigrationBenefit,
        /// Actual benefit and cost, estimated from the task's progress on the target.
        #[serde(rename = "came")]
        actual_benefit: MigrationBenefit,
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
        /// Reason for the attempt to restart the job.
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
            Self::Spawn { job, started, .. } => {
                matches(*job) || started.iter().any(|(tid, _)| matches(*tid))
            }
            Self::MigrationOrdered { tid, .. }
            | Self::Migrated { tid, .. }
            | Self::MigrationFailed { tid, .. }
            | Self::CannotLeave { tid, .. }
            | Self::BenefitMeasured { tid, .. }
            | Self::Suspended { tid, .. }
            | Self::Resumed { tid, .. } => matches(*tid),
            Self::JobSuspended { job, .. } | Self::CheckpointFailed { job, .. } => matches(*job),
            Self::RestartFailed { job, .. } => job.is_some_and(matches),
            Self::GuestsEnded { tasks, .. } | Self::TaskerGone { tasks, .. } => {
                tasks.iter().any(|tid| matches(*tid))
            }
            Self::Vacated { job, tid, .. } => matches(*job) || matches(*tid),
            Self::Restarted { job, tasks, .. } => {
                matches(*job) || tasks.iter().any(|(tid, _)| matches(*tid))
            }
            _ => false,
        }
    }

    /// True if the decision concerns the host with this name, for example as source, target or
    /// rejected host. A host that was rejected only because the request names another host does not
    /// count.
    pub fn concerns_host(&self, name: &str) -> bool {
        let is_rejected = |rejections: &[RejectedHost]| {
            rejections
                .iter()
                .any(|n| n.host == name && n.why != RejectionReason::OtherHostRequested)
        };
        match self {
            Self::Restarted { tasks, .. } => tasks.iter().any(|(_, host)| host == name),
            Self::Spawn {
                started, attempts, ..
            } => {
                started.iter().any(|(_, host)| host == name)
                    || attempts.iter().any(|a| is_rejected(&a.rejected_hosts))
            }
            Self::MigrationOrdered { from, to, .. }
            | Self::Migrated { from, to, .. }
            | Self::MigrationFailed { from, to, .. }
            | Self::BenefitMeasured { from, to, .. } => from == name || to == name,
            Self::CannotLeave {
                host,
                rejected_hosts: rejections,
                ..
            } => host == name || is_rejected(rejections),
            Self::OwnerReturned { host, .. }
            | Self::OwnerLeft { host, .. }
            | Self::HostJoined { host }
            | Self::HostGone { host, .. }
            | Self::Drain { host, .. }
            | Self::Vacated { host, .. }
            | Self::Suspended { host, .. }
            | Self::Resumed { host, .. }
            | Self::HostClosed { host, .. }
            | Self::HostOpened { host }
            | Self::GuestsEnded { host, .. }
            | Self::TaskerGone { host, .. }
            | Self::HostRefused { host, .. } => host == name,
            Self::JobSuspended { .. }
            | Self::RmStarted { .. }
            | Self::CheckpointFailed { .. }
            | Self::RestartFailed { .. } => false,
        }
    }
}

fn to_seconds(duration: Micros) -> f64 {
    duration.0 as f64 / 1e6
}

/// Describes the cause of a migration from host `from`, for example "the owner of h2 is present
/// (olga on pts/1)".
fn describe_cause(cause: &MigrationCause, from: &str) -> String {
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
    (program, requested_by, count): (&str, Tid, u32),
    started: &[(Tid, String)],
    error: Option<PvmError>,
    attempts: &[PlacementAttempt],
) -> fmt::Result {
    let mut host_list: Vec<&str> = started.iter().map(|(_, host)| host.as_str()).collect();
    host_list.dedup();
    let host_list = host_list.join(" ");
    let reason_list: Vec<&str> = attempts.iter().map(|a| a.reason.as_str()).collect();
    let reason_list = reason_list.join("; then ");
    match (error, started.len()) {
        (Some(error), 0) => write!(
            f,
            "{program} was not started for {requested_by}: {error} ({reason_list})"
        ),
        (Some(error), n) => {
            write!(
                f,
                "{n} of {count} {program} started for {requested_by} on {host_list}: {reason_list}; the others failed: {error}"
            )
        }
        (None, _) => write!(
            f,
            "{program} started for {requested_by} on {host_list}: {reason_list}"
        ),
    }
}

fn write_expected_benefit(
    f: &mut fmt::Formatter<'_>,
    MigrationBenefit { gain, cost }: &MigrationBenefit,
) -> fmt::Result {
    match gain.0 {
        0 => write!(f, "; expected cost {:.1} s", to_seconds(*cost)),
        _ => write!(
            f,
            "; expected to save {:.1} s and to cost {:.1} s",
            to_seconds(*gain),
            to_seconds(*cost)
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
            Self::Spawn {
                program,
                requested_by: requester,
                count,
                started,
                error,
                waited,
                attempts,
                ..
            } => {
                write_spawn(f, (program, *requester, *count), started, *error, attempts)?;
                if waited.0 > 0 {
                    write!(f, "; it waited {:.1} s", to_seconds(*waited))
                } else {
                    Ok(())
                }
            }
            Self::MigrationOrdered {
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
                    describe_cause(cause, from)
                )?;
                write_expected_benefit(f, expected)?;
                refused
                    .as_ref()
                    .map_or(Ok(()), |why| write!(f, "; it did not begin: {why}"))
            }
            Self::Migrated {
                tid,
                from,
                to,
                cause,
                bytes,
                frozen,
            } => write!(
                f,
                "{tid} migrated from {from} to {to} because {}: {bytes} bytes, frozen {:.1} ms",
                describe_cause(cause, from),
                frozen.0 as f64 / 1e3
            ),
            Self::MigrationFailed {
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
            Self::CannotLeave {
                tid,
                host,
                why,
                rejected_hosts: rejections,
            } => {
                write!(f, "{tid} stays on {host}, which it should leave: {why}")?;
                let host_reasons: Vec<String> = rejections
                    .iter()
                    .map(|n| format!("{}: {}", n.host, n.why))
                    .collect();
                if host_reasons.is_empty() {
                    Ok(())
                } else {
                    write!(f, " ({})", host_reasons.join("; "))
                }
            }
            Self::OwnerReturned { host, why } => {
                write!(f, "the owner of {host} returned: {why}")
            }
            Self::OwnerLeft { host, why } => write!(f, "the owner of {host} left: {why}"),
            Self::HostJoined { host } => write!(f, "{host} joined"),
            Self::HostGone { host, why } => write!(f, "{host} is gone: {why}"),
            Self::Suspended { tid, host, cause } => {
                write!(f, "{tid} was suspended on {host}: {cause}")
            }
            Self::Resumed { tid, host, cause } => {
                write!(f, "{tid} was resumed on {host}: {cause}")
            }
            Self::JobSuspended {
                job,
                suspend,
                requested_by,
            } => {
                let change = if *suspend { "suspended" } else { "resumed" };
                write!(f, "job {job} was {change}: requested by {requested_by}")
            }
            Self::Drain {
                host,
                is_start: true,
                requested_by: requester,
            } => write!(f, "{host} is being drained: requested by {requester}"),
            Self::Drain {
                host,
                is_start: false,
                requested_by: requester,
            } => write!(f, "{host} accepts tasks again: requested by {requester}"),
            Self::Vacated {
                job,
                tid,
                host,
                why,
            } => write!(
                f,
                "job {job} is checkpointed and ended, and will be restarted when there is room: {tid} must leave \
                 {host}, and {why}"
            ),
            Self::Restarted {
                job,
                checkpoint,
                tasks,
                why,
            } => {
                write!(
                    f,
                    "job {job} restarted from checkpoint {checkpoint} ({why}):"
                )?;
                tasks
                    .iter()
                    .try_for_each(|(tid, host)| write!(f, " {tid} on {host}"))
            }
            Self::BenefitMeasured {
                tid,
                from,
                to,
                expected,
                actual_benefit: benefit,
            } => {
                write!(
                    f,
                    "the migration of {tid} from {from} to {to} was expected to save "
                )?;
                write!(
                    f,
                    "{:.1} s and to cost {:.1} s",
                    to_seconds(expected.gain),
                    to_seconds(expected.cost)
                )?;
                write!(
                    f,
                    "; it saved {:.1} s and cost {:.1} s",
                    to_seconds(benefit.gain),
                    to_seconds(benefit.cost)
                )
            }
            Self::HostClosed { host, why } => write!(f, "{host} accepts no guests: {why}"),
            Self::HostOpened { host } => write!(f, "{host} accepts guests again"),
            Self::GuestsEnded { host, tasks, why } => {
                write!(f, "guests ended for the owner of {host}:")?;
                write_tasks(f, tasks)?;
                write!(f, ": {why}")
            }
            Self::CheckpointFailed { job, why } => {
                write!(f, "job {job} was not checkpointed: {why}")
            }
            Self::RestartFailed {
                checkpoint,
                cause,
                why,
                ..
            } => {
                write!(
                    f,
                    "checkpoint {checkpoint} was not restarted ({cause}): {why}"
                )
            }
            Self::TaskerGone { host, tasks, why } => {
                write!(f, "the tasker of {host} has ended ({why}), and with it")?;
                if tasks.is_empty() {
                    f.write_str(" no task")
                } else {
                    write_tasks(f, tasks)
                }
            }
            Self::HostRefused { host, why } => write!(f, "{host} was not added: {why}"),
            Self::RmStarted {
                continues_state: false,
            } => f.write_str("the resource manager started"),
            Self::RmStarted {
                continues_state: true,
            } => f.write_str(RM_RESTARTED_SENTENCE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::to_bytes;

    /// Stored decisions contain the variant numbers, so these numbers must never change.
    #[test]
    fn variant_numbers_are_stable() {
        let variant_number =
            |decision: DecisionKind| to_bytes(&decision).expect("it can be written")[0];
        let host = || "h2".to_string();
        assert_eq!(variant_number(DecisionKind::HostJoined { host: host() }), 7);
        assert_eq!(
            variant_number(DecisionKind::RmStarted {
                continues_state: true
            }),
            13
        );
        assert_eq!(
            variant_number(DecisionKind::HostClosed {
                host: host(),
                why: String::new()
            }),
            17
        );
        assert_eq!(
            variant_number(DecisionKind::HostRefused {
                host: host(),
                why: String::new()
            }),
            23
        );
    }

    #[test]
    fn ended_and_lost_guests_are_described() {
        let tasks = vec![Tid::from_raw(0x80001), Tid::from_raw(0x80002)];
        let guests_decision = DecisionKind::GuestsEnded {
            host: "h2".into(),
            tasks: tasks.clone(),
            why: "olga on pts/1".into(),
        };
        let tasker_decision = DecisionKind::TaskerGone {
            host: "h2".into(),
            tasks: tasks.clone(),
            why: "signal 9".into(),
        };
        for decision in [&guests_decision, &tasker_decision] {
            assert!(
                decision.concerns_task(|tid| tid == tasks[1]) && decision.concerns_host("h2"),
                "{decision}"
            );
            assert!(
                !decision.concerns_task(|tid| tid == Tid::from_raw(0x80003))
                    && !decision.concerns_host("h3"),
                "{decision}"
            );
        }
        assert_eq!(
            guests_decision.to_string(),
            "guests ended for the owner of h2: t80001 t80002: olga on pts/1"
        );
        assert_eq!(
            tasker_decision.to_string(),
            "the tasker of h2 has ended (signal 9), and with it t80001 t80002"
        );
    }
}
