//! Decisions that the resource manager records, and the events on which they are based. New
//! variants must be added at the end, because the stored history contains the variant numbers.

use super::{Attempt, Excluded, Expected, NotUsed};
use crate::error::PvmError;
use crate::ids::{Micros, Tid};
use crate::migration::{Cause, Step};
use crate::suspend;
use serde::{Deserialize, Serialize};
use std::fmt;

const BEGAN_AGAIN: &str =
    "the resource manager began again with what was known; meanwhile spawns were placed in turn";

/// The content of a decision or event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decided {
    /// A spawn was answered.
    Spawn {
        program: String,
        by: Tid,
        /// Job of the requesting task.
        job: Tid,
        /// User id of the requesting task.
        user: u32,
        /// Number of requested tasks.
        count: u32,
        /// Started tasks with their hosts.
        started: Vec<(Tid, String)>,
        /// Why the other tasks were not started.
        error: Option<PvmError>,
        /// Time from the request to the last placement attempt.
        waited: Micros,
        attempts: Vec<Attempt>,
    },
    /// A migration was ordered.
    Go {
        tid: Tid,
        from: String,
        to: String,
        cause: Cause,
        /// Expected benefit and cost.
        expected: Expected,
        /// Why it did not begin; `None`: it began.
        refused: Option<String>,
    },
    /// A migration is complete.
    Moved {
        tid: Tid,
        from: String,
        to: String,
        cause: Cause,
        /// Size of the images.
        bytes: u64,
        /// Time for which the task was stopped.
        frozen: Micros,
    },
    /// A migration failed; the task continued at the source.
    NotMoved {
        tid: Tid,
        from: String,
        to: String,
        /// Reason for the migration.
        cause: Cause,
        /// The step that failed.
        step: Step,
        /// Reason for the failure.
        why: String,
    },
    /// A task stays although the owner of its host is present.
    Stays {
        tid: Tid,
        host: String,
        why: String,
        /// Hosts that would not accept it.
        not_used: Vec<NotUsed>,
    },
    /// The owner of a host returned.
    OwnerCame {
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
    /// A host is gone, with the tasks on it.
    HostGone {
        host: String,
        why: String,
    },
    /// A task was suspended.
    Suspended {
        tid: Tid,
        host: String,
        cause: suspend::Cause,
    },
    /// A suspended task was resumed.
    Resumed {
        tid: Tid,
        host: String,
        cause: suspend::Cause,
    },
    /// A whole job was suspended or resumed.
    JobSuspended {
        job: Tid,
        /// False: it was resumed.
        suspend: bool,
        /// The task that requested it.
        by: Tid,
    },
    /// A drain of a host began or ended.
    Drain {
        host: String,
        /// False: it ended, and the host accepts tasks again.
        begun: bool,
        /// The task that requested it.
        by: Tid,
    },
    /// The resource manager started.
    Began {
        /// True if it continues with the state of a predecessor.
        again: bool,
    },
    /// A job was vacated: one of its tasks must leave its host and no other host accepts it, so the
    /// job was checkpointed and ended. It will be restarted when there is room.
    Parked {
        /// First task of the job.
        job: Tid,
        /// The task that must leave.
        tid: Tid,
        /// The host that it must leave.
        host: String,
        /// Why it cannot migrate.
        why: String,
    },
    /// A job was restarted from a checkpoint.
    Restarted {
        job: Tid,
        /// Name of the checkpoint.
        set: String,
        /// Its tasks with their hosts.
        tasks: Vec<(Tid, String)>,
        why: String,
    },
    /// The benefit of a load migration is known: the task has ended, or has run long enough on the
    /// target.
    CameOut {
        tid: Tid,
        from: String,
        to: String,
        /// Expected benefit and cost.
        expected: Expected,
        /// Actual benefit and cost, estimated from the task's progress on the target.
        came: Expected,
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
        set: String,
        /// Reason for the attempt.
        cause: String,
        /// Reason for the failure.
        why: String,
    },
    /// The tasker of a host has ended, and with it the tasks that it had started.
    TaskerGone {
        host: String,
        tasks: Vec<Tid>,
        why: String,
    },
    /// A host could not be added.
    HostRefused {
        /// The name that the user gave.
        host: String,
        why: String,
    },
}

impl Decided {
    /// True if the decision concerns a task for which `is_so` returns true.
    pub fn is_about(&self, is_so: impl Fn(Tid) -> bool) -> bool {
        match self {
            Decided::Spawn { job, started, .. } => {
                is_so(*job) || started.iter().any(|(tid, _)| is_so(*tid))
            }
            Decided::Go { tid, .. }
            | Decided::Moved { tid, .. }
            | Decided::NotMoved { tid, .. }
            | Decided::Stays { tid, .. }
            | Decided::CameOut { tid, .. }
            | Decided::Suspended { tid, .. }
            | Decided::Resumed { tid, .. } => is_so(*tid),
            Decided::JobSuspended { job, .. } | Decided::CheckpointFailed { job, .. } => {
                is_so(*job)
            }
            Decided::RestartFailed { job, .. } => job.is_some_and(is_so),
            Decided::GuestsEnded { tasks, .. } | Decided::TaskerGone { tasks, .. } => {
                tasks.iter().any(|tid| is_so(*tid))
            }
            Decided::Parked { job, tid, .. } => is_so(*job) || is_so(*tid),
            Decided::Restarted { job, tasks, .. } => {
                is_so(*job) || tasks.iter().any(|(tid, _)| is_so(*tid))
            }
            _ => false,
        }
    }

    /// True if the decision concerns this host as source or target, or because the host was
    /// rejected.
    pub fn is_about_host(&self, name: &str) -> bool {
        let not_used = |list: &[NotUsed]| {
            list.iter()
                .any(|n| n.host == name && n.why != Excluded::NotAsked)
        };
        match self {
            Decided::Restarted { tasks, .. } => tasks.iter().any(|(_, host)| host == name),
            Decided::Spawn {
                started, attempts, ..
            } => {
                started.iter().any(|(_, host)| host == name)
                    || attempts.iter().any(|a| not_used(&a.not_used))
            }
            Decided::Go { from, to, .. }
            | Decided::Moved { from, to, .. }
            | Decided::NotMoved { from, to, .. }
            | Decided::CameOut { from, to, .. } => from == name || to == name,
            Decided::Stays {
                host,
                not_used: list,
                ..
            } => host == name || not_used(list),
            Decided::OwnerCame { host, .. }
            | Decided::OwnerLeft { host, .. }
            | Decided::HostJoined { host }
            | Decided::HostGone { host, .. }
            | Decided::Drain { host, .. }
            | Decided::Parked { host, .. }
            | Decided::Suspended { host, .. }
            | Decided::Resumed { host, .. }
            | Decided::HostClosed { host, .. }
            | Decided::HostOpened { host }
            | Decided::GuestsEnded { host, .. }
            | Decided::TaskerGone { host, .. }
            | Decided::HostRefused { host, .. } => host == name,
            Decided::JobSuspended { .. }
            | Decided::Began { .. }
            | Decided::CheckpointFailed { .. }
            | Decided::RestartFailed { .. } => false,
        }
    }
}

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

/// Describes a cause, for example "the owner of h2 is there (olga on pts/1)".
fn because(cause: &Cause, from: &str) -> String {
    match cause {
        Cause::Asked { by } => format!("{by} asked for it"),
        Cause::Owner { why } => format!("the owner of {from} is there ({why})"),
        Cause::Load { why } => format!("the load is uneven: {why}"),
        Cause::Drain { by } => format!("{by} has {from} emptied"),
        Cause::Checkpoint | Cause::Restart => cause.to_string(),
    }
}

fn tell_spawn(
    f: &mut fmt::Formatter<'_>,
    (program, by, count): (&str, Tid, u32),
    started: &[(Tid, String)],
    error: Option<PvmError>,
    attempts: &[Attempt],
) -> fmt::Result {
    let mut hosts: Vec<&str> = started.iter().map(|(_, host)| host.as_str()).collect();
    hosts.dedup();
    let hosts = hosts.join(" ");
    let why: Vec<&str> = attempts.iter().map(|a| a.sentence.as_str()).collect();
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

fn tell_expected(f: &mut fmt::Formatter<'_>, Expected { gain, cost }: &Expected) -> fmt::Result {
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

fn tell_tasks(f: &mut fmt::Formatter<'_>, tasks: &[Tid]) -> fmt::Result {
    tasks.iter().try_for_each(|tid| write!(f, " {tid}"))
}

impl fmt::Display for Decided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decided::Spawn {
                program,
                by,
                count,
                started,
                error,
                waited,
                attempts,
                ..
            } => {
                tell_spawn(f, (program, *by, *count), started, *error, attempts)?;
                if waited.0 > 0 {
                    write!(f, "; it waited {:.1} s", seconds(*waited))
                } else {
                    Ok(())
                }
            }
            Decided::Go {
                tid,
                from,
                to,
                cause,
                expected,
                refused,
            } => {
                write!(
                    f,
                    "{tid} was told to go from {from} to {to} because {}",
                    because(cause, from)
                )?;
                tell_expected(f, expected)?;
                refused
                    .as_ref()
                    .map_or(Ok(()), |why| write!(f, "; it did not begin: {why}"))
            }
            Decided::Moved {
                tid,
                from,
                to,
                cause,
                bytes,
                frozen,
            } => write!(
                f,
                "{tid} moved from {from} to {to} because {}: {bytes} bytes, it stood still for {:.1} ms",
                because(cause, from),
                frozen.0 as f64 / 1e3
            ),
            Decided::NotMoved {
                tid,
                from,
                to,
                step,
                why,
                ..
            } => {
                write!(
                    f,
                    "{tid} was not moved from {from} to {to}: {step} failed: {why}"
                )
            }
            Decided::Stays {
                tid,
                host,
                why,
                not_used,
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
            Decided::OwnerCame { host, why } => write!(f, "the owner of {host} came: {why}"),
            Decided::OwnerLeft { host, why } => write!(f, "the owner of {host} left: {why}"),
            Decided::HostJoined { host } => write!(f, "{host} joined"),
            Decided::HostGone { host, why } => write!(f, "{host} is gone: {why}"),
            Decided::Suspended { tid, host, cause } => {
                write!(f, "{tid} was suspended on {host}: {cause}")
            }
            Decided::Resumed { tid, host, cause } => {
                write!(f, "{tid} was resumed on {host}: {cause}")
            }
            Decided::JobSuspended { job, suspend, by } => {
                let what = if *suspend { "suspended" } else { "resumed" };
                write!(f, "job {job} was {what}: {by} asked for it")
            }
            Decided::Drain {
                host,
                begun: true,
                by,
            } => write!(f, "{host} is being emptied: {by} asked for it"),
            Decided::Drain {
                host,
                begun: false,
                by,
            } => write!(f, "{host} takes tasks again: {by} asked for it"),
            Decided::Parked {
                job,
                tid,
                host,
                why,
            } => write!(
                f,
                "job {job} is checkpointed and ended, and goes on when there is room: {tid} has to leave {host}, and {why}"
            ),
            Decided::Restarted {
                job,
                set,
                tasks,
                why,
            } => {
                write!(f, "job {job} goes on from checkpoint {set} ({why}):")?;
                tasks
                    .iter()
                    .try_for_each(|(tid, host)| write!(f, " {tid} on {host}"))
            }
            Decided::CameOut {
                tid,
                from,
                to,
                expected,
                came,
            } => {
                write!(
                    f,
                    "the move of {tid} from {from} to {to} was expected to save "
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
            Decided::HostClosed { host, why } => write!(f, "{host} takes no guests: {why}"),
            Decided::HostOpened { host } => write!(f, "{host} takes guests again"),
            Decided::GuestsEnded { host, tasks, why } => {
                write!(
                    f,
                    "the owner of {host} has guests ended, and so it was with"
                )?;
                tell_tasks(f, tasks)?;
                write!(f, ": {why}")
            }
            Decided::CheckpointFailed { job, why } => {
                write!(f, "job {job} was not checkpointed: {why}")
            }
            Decided::RestartFailed {
                set, cause, why, ..
            } => {
                write!(f, "checkpoint {set} was not started again ({cause}): {why}")
            }
            Decided::TaskerGone { host, tasks, why } => {
                write!(f, "the tasker of {host} has ended ({why}), and with it")?;
                if tasks.is_empty() {
                    f.write_str(" no task")
                } else {
                    tell_tasks(f, tasks)
                }
            }
            Decided::HostRefused { host, why } => write!(f, "{host} was not added: {why}"),
            Decided::Began { again: false } => f.write_str("the resource manager began"),
            Decided::Began { again: true } => f.write_str(BEGAN_AGAIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::to_bytes;

    /// Variants keep their numbers, so that stored decisions stay readable.
    #[test]
    fn variant_numbers_are_stable() {
        let number = |what: Decided| to_bytes(&what).expect("it can be written")[0];
        let host = || "h2".to_string();
        assert_eq!(number(Decided::HostJoined { host: host() }), 7);
        assert_eq!(number(Decided::Began { again: true }), 13);
        assert_eq!(
            number(Decided::HostClosed {
                host: host(),
                why: String::new()
            }),
            17
        );
        assert_eq!(
            number(Decided::HostRefused {
                host: host(),
                why: String::new()
            }),
            23
        );
    }

    #[test]
    fn ended_and_lost_guests_are_described() {
        let tasks = vec![Tid::from_raw(0x80001), Tid::from_raw(0x80002)];
        let ended = Decided::GuestsEnded {
            host: "h2".into(),
            tasks: tasks.clone(),
            why: "olga on pts/1".into(),
        };
        let dead = Decided::TaskerGone {
            host: "h2".into(),
            tasks: tasks.clone(),
            why: "signal 9".into(),
        };
        for what in [&ended, &dead] {
            assert!(
                what.is_about(|tid| tid == tasks[1]) && what.is_about_host("h2"),
                "{what}"
            );
            assert!(
                !what.is_about(|tid| tid == Tid::from_raw(0x80003)) && !what.is_about_host("h3"),
                "{what}"
            );
        }
        assert_eq!(
            ended.to_string(),
            "the owner of h2 has guests ended, and so it was with t80001 t80002: olga on pts/1"
        );
        assert_eq!(
            dead.to_string(),
            "the tasker of h2 has ended (signal 9), and with it t80001 t80002"
        );
    }
}
