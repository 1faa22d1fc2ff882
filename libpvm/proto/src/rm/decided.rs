//! What the resource manager remembers of decisions, and of what happened on which they rest. New kinds go to the end: those that are
//! written in books keep their numbers.

use super::{Attempt, Excluded, Expected, NotUsed};
use crate::error::PvmError;
use crate::ids::{Micros, Tid};
use crate::migration::{Cause, Step};
use crate::suspend;
use serde::{Deserialize, Serialize};
use std::fmt;

const BEGAN_AGAIN: &str =
    "the resource manager began again with what was known; meanwhile spawns were placed in turn";

/// What can be decided, or happen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decided {
    /// A spawn was answered.
    Spawn {
        /// The program.
        program: String,
        /// The task that asked.
        by: Tid,
        /// Its job.
        job: Tid,
        /// Its user.
        user: u32,
        /// Tasks that were asked for.
        count: u32,
        /// Those that were started, and where.
        started: Vec<(Tid, String)>,
        /// Why the others were not.
        error: Option<PvmError>,
        /// From the request to the last search for a place.
        waited: Micros,
        /// The searches.
        attempts: Vec<Attempt>,
    },
    /// A task was told to go.
    Go {
        /// The task.
        tid: Tid,
        /// Where it was.
        from: String,
        /// Where it is to go.
        to: String,
        /// Why.
        cause: Cause,
        /// What is expected of it.
        expected: Expected,
        /// Why it did not begin, if it did not.
        refused: Option<String>,
    },
    /// A move is complete.
    Moved {
        /// The task.
        tid: Tid,
        /// Where it was.
        from: String,
        /// Where it is.
        to: String,
        /// Why.
        cause: Cause,
        /// Bytes of its image.
        bytes: u64,
        /// How long it stood still.
        frozen: Micros,
    },
    /// A move has failed; the task went on where it was.
    NotMoved {
        /// The task.
        tid: Tid,
        /// Where it was.
        from: String,
        /// Where it was to go.
        to: String,
        /// Why it was to go.
        cause: Cause,
        /// The step that failed.
        step: Step,
        /// Why.
        why: String,
    },
    /// A task stays although the owner of its host is there.
    Stays {
        /// The task.
        tid: Tid,
        /// Where.
        host: String,
        /// Why.
        why: String,
        /// Hosts that would not take it.
        not_used: Vec<NotUsed>,
    },
    /// The owner of a host came.
    OwnerCame {
        /// The host.
        host: String,
        /// The watcher's sentence.
        why: String,
    },
    /// The owner of a host left.
    OwnerLeft {
        /// The host.
        host: String,
        /// The watcher's sentence.
        why: String,
    },
    /// A host joined.
    HostJoined {
        /// The host.
        host: String,
    },
    /// A host is gone, with the tasks on it.
    HostGone {
        /// The host.
        host: String,
        /// Why.
        why: String,
    },
    /// A task was suspended.
    Suspended {
        /// The task.
        tid: Tid,
        /// Where.
        host: String,
        /// Why.
        cause: suspend::Cause,
    },
    /// A task that was suspended goes on.
    Resumed {
        /// The task.
        tid: Tid,
        /// Where.
        host: String,
        /// Why.
        cause: suspend::Cause,
    },
    /// A whole job was suspended, or goes on.
    JobSuspended {
        /// The job.
        job: Tid,
        /// False: it goes on.
        suspend: bool,
        /// Who asked for it.
        by: Tid,
    },
    /// A host is being emptied, or takes tasks again.
    Drain {
        /// The host.
        host: String,
        /// False: it takes tasks again.
        begun: bool,
        /// Who asked for it.
        by: Tid,
    },
    /// The resource manager began to work.
    Began {
        /// It goes on with what one before it knew.
        again: bool,
    },
    /// A job is checkpointed and ended, because a task of it has to leave and no host takes it; it goes on when there is room.
    Parked {
        /// The first task of it.
        job: Tid,
        /// The task.
        tid: Tid,
        /// The host that it has to leave.
        host: String,
        /// Why it cannot move.
        why: String,
    },
    /// A job goes on from a checkpoint.
    Restarted {
        /// The job.
        job: Tid,
        /// Name of the set.
        set: String,
        /// Its tasks, and where they are now.
        tasks: Vec<(Tid, String)>,
        /// Why.
        why: String,
    },
    /// What a move for the sake of the load has brought is known: its task has ended, or worked there for long.
    CameOut {
        /// The task.
        tid: Tid,
        /// Where it was.
        from: String,
        /// Where it went.
        to: String,
        /// What was expected.
        expected: Expected,
        /// What came, as far as what the task got and did there tells.
        came: Expected,
    },
    /// The rules of a host's owner let no guests in any more, whoever uses it.
    HostClosed {
        /// The host.
        host: String,
        /// The watcher's sentence.
        why: String,
    },
    /// A host that was closed takes guests again.
    HostOpened {
        /// The host.
        host: String,
    },
    /// The guests of a host were ended, as its owner wants it.
    GuestsEnded {
        /// The host.
        host: String,
        /// The tasks.
        tasks: Vec<Tid>,
        /// The watcher's sentence.
        why: String,
    },
    /// A job was not checkpointed.
    CheckpointFailed {
        /// The first task of it.
        job: Tid,
        /// Why.
        why: String,
    },
    /// A checkpoint was not started again.
    RestartFailed {
        /// The first task of the job, if it is known.
        job: Option<Tid>,
        /// Name of the set.
        set: String,
        /// Why it was to be started again.
        cause: String,
        /// Why it was not.
        why: String,
    },
    /// The tasker of a host has ended, and with it the tasks that it had started.
    TaskerGone {
        /// The host.
        host: String,
        /// The tasks.
        tasks: Vec<Tid>,
        /// Why.
        why: String,
    },
    /// A host was not added.
    HostRefused {
        /// The name given.
        host: String,
        /// Why.
        why: String,
    },
}

impl Decided {
    /// True when it speaks of a task of which this is so.
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

    /// True when it speaks of this host: something came, went, or was kept from there.
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

/// "the owner of h2 is there: olga on pts/1".
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

    #[test]
    fn kinds_of_decisions_keep_their_numbers_so_that_older_books_are_read() {
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
    fn tasks_that_an_owner_has_ended_and_those_that_died_with_their_tasker_are_told_so() {
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
