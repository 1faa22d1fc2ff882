//! The event log: events in the virtual machine and their reasons, for users and for programs.

use crate::engine::Engine;
use crate::ids::{HostId, Micros, MigrationId, Tid};
use crate::migration::{Cause, Failure, Step, Usage};
use crate::suspend;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of events that the master keeps; it drops the oldest.
pub const EVENTS_MAX: usize = 65_536;

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Assigned by the master, ascending without gaps.
    pub number: u64,
    /// Time of the event by the clock of `host`, in microseconds since 1970.
    pub at: Micros,
    /// The host on which it happened.
    pub host: HostId,
    pub kind: EventKind,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum EventKind {
    HostAdded {
        host: HostId,
        name: String,
    },
    /// A host could not be added.
    HostRefused {
        /// The name that the user gave.
        name: String,
        why: String,
    },
    /// All lines of the host file have been processed.
    HostFileDone {
        /// Hosts of the file that joined.
        added: u32,
        /// Lines with errors and hosts that did not join.
        refused: u32,
    },
    /// A host left or was lost.
    HostGone {
        host: HostId,
        name: String,
        why: String,
    },
    /// A task was started or connected.
    TaskStarted {
        tid: Tid,
        parent: Tid,
        /// Its program; empty for a task from a command line.
        name: String,
        /// The user whose daemon serves it.
        user: u32,
    },
    TaskEnded {
        tid: Tid,
        /// Wait status of its process.
        status: i32,
        /// Resources that it used.
        used: Usage,
    },
    /// A resource manager registered.
    RmRegistered {
        tid: Tid,
    },
    /// The resource manager is gone; daemons place tasks round robin.
    RmGone {
        tid: Tid,
    },
    /// The tasks of a spawn were placed.
    Placed {
        /// The program that was spawned.
        name: String,
        /// One host per task, in the order of the tasks.
        hosts: Vec<HostId>,
        /// The resource manager's reason, in one sentence.
        why: String,
    },
    /// The owner of a host is present.
    OwnerPresent {
        host: HostId,
        /// Time of the owner's activity (for a login: of its record), in microseconds since 1970.
        since: Micros,
        /// Time at which the load watcher detected it.
        seen: Micros,
        /// The reason in one sentence.
        why: String,
    },
    /// The owner of a host is absent; guests may use it again.
    OwnerAbsent {
        host: HostId,
        /// The reason in one sentence.
        why: String,
    },
    /// All foreign tasks have left a host.
    HostClean {
        host: HostId,
    },
    /// A migration uses an engine other than CRIU.
    MovesBy {
        id: MigrationId,
        tid: Tid,
        engine: Engine,
    },
    /// A migration completed a step.
    Moving {
        id: MigrationId,
        tid: Tid,
        from: HostId,
        to: HostId,
        step: Step,
        /// Size of the images, for dump and transfer.
        bytes: u64,
    },
    /// A migration is complete: the task runs at the target.
    Moved {
        id: MigrationId,
        tid: Tid,
        from: HostId,
        to: HostId,
        cause: Cause,
        /// Size of the images.
        bytes: u64,
        /// Task memory that was transferred, in the images or by post-copy; 0 if the program saved
        /// its own state.
        resident: u64,
        /// From the library's quiesce until the task runs again.
        frozen: Micros,
        /// From the library's quiesce until all memory is at the target, plus the duration of
        /// pre-copy.
        whole: Micros,
    },
    /// A migration failed; the task continues at `from`, unless the failure is its exit.
    MoveFailed {
        id: MigrationId,
        tid: Tid,
        from: HostId,
        to: HostId,
        cause: Cause,
        /// The step that failed.
        step: Step,
        why: Failure,
    },
    /// All guests of a host are paused for its owner.
    GuestsStopped {
        host: HostId,
        guests: Vec<Tid>,
        /// From the load watcher's directive until the last guest was stopped.
        took: Micros,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// The guests of a host continue.
    GuestsContinued {
        host: HostId,
        /// The tasks that were paused.
        guests: Vec<Tid>,
        why: String,
    },
    /// The guests of a host are being ended, as its owner's policy requires.
    GuestsEnded {
        host: HostId,
        guests: Vec<Tid>,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// A task was suspended until a request resumes it.
    Suspended {
        tid: Tid,
        cause: suspend::Cause,
    },
    /// A suspended task was resumed. It runs unless its host's owner is present.
    Resumed {
        tid: Tid,
        cause: suspend::Cause,
    },
    /// A whole job was suspended, including tasks that it spawns later.
    JobSuspended {
        /// First task of the job.
        job: Tid,
        /// The task that requested it.
        by: Tid,
    },
    /// A suspended job was resumed.
    JobResumed {
        /// First task of the job.
        job: Tid,
        /// The task that requested it.
        by: Tid,
    },
    /// A drain of a host was requested: its tasks leave, and no others are placed there.
    DrainBegun {
        host: HostId,
        /// The task that requested it.
        by: Tid,
        /// Deadline for the host to be empty, as time of day.
        until: Option<Micros>,
    },
    /// A drained host accepts tasks again.
    DrainEnded {
        host: HostId,
        /// The task that requested it.
        by: Tid,
    },
    /// A checkpoint of a job is complete.
    Checkpointed {
        /// Name of the checkpoint.
        set: String,
        /// First task of the job.
        job: Tid,
        /// Number of tasks in it.
        tasks: u32,
        /// Size in the store.
        bytes: u64,
        /// Time for which the job's tasks were stopped.
        frozen: Micros,
        /// The resource manager vacated the job: it was ended and will be restarted when there is
        /// room.
        parked: bool,
    },
    /// A checkpoint of a job failed; the job continues.
    CheckpointFailed {
        /// First task of the job.
        job: Tid,
        why: String,
    },
    /// The tasks of a checkpoint run again.
    Restarted {
        /// Name of the checkpoint.
        set: String,
        /// First task of the job.
        job: Tid,
        /// The tasks and their hosts.
        tasks: Vec<(Tid, HostId)>,
        /// Reason for the restart.
        why: String,
    },
    /// The restart of a checkpoint failed.
    RestartFailed {
        /// Name of the checkpoint.
        set: String,
        /// Reason for the attempt.
        cause: String,
        /// Reason for the failure.
        why: String,
    },
    /// Any other event of interest.
    Note {
        text: String,
    },
    SetsRemoved {
        /// Names of the checkpoints.
        sets: Vec<String>,
        /// Reason for the removal.
        why: String,
    },
    /// A checkpoint was copied to the stores of all or some of the intended hosts.
    SetCopied {
        /// Name of the checkpoint.
        set: String,
        /// First task of the job.
        job: Tid,
        /// Hosts that have a copy.
        hosts: Vec<HostId>,
        /// Number of copies that are missing.
        missing: u32,
        /// The hosts that did not store a copy, with reasons.
        why: String,
    },
    /// The tasker of a host has ended, and with it all tasks that it had started. Another tasker
    /// starts.
    TaskerGone {
        host: HostId,
        why: String,
    },
    /// The owner's policy closes a host to guests, whether or not anyone uses it.
    HostClosed {
        host: HostId,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// A closed host accepts guests again.
    HostOpened {
        host: HostId,
    },
}

impl EventKind {
    /// Returns the sentence of [`Display`](fmt::Display) with host names in place of host numbers,
    /// also within text from other programs. A host without a known name keeps its number.
    pub fn told<'a>(&self, name: impl Fn(HostId) -> Option<&'a str>) -> String {
        match self {
            // Their sentences already contain the name.
            EventKind::HostAdded { .. } | EventKind::HostGone { .. } => self.to_string(),
            EventKind::Placed {
                name: program,
                hosts,
                why,
            } => {
                let one = |host: &HostId| {
                    name(*host).map_or_else(|| host.index().to_string(), str::to_string)
                };
                let hosts: Vec<String> = hosts.iter().map(one).collect();
                format!(
                    "{program} placed on {}: {}",
                    hosts.join(" "),
                    with_names(why, name)
                )
            }
            _ => with_names(&self.to_string(), name),
        }
    }
}

/// Replaces hosts as [`HostId`] prints them by their names.
fn with_names<'a>(text: &str, name: impl Fn(HostId) -> Option<&'a str>) -> String {
    const SIGN: &str = "host ";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(SIGN) {
        let (before, behind) = (&rest[..at], &rest[at + SIGN.len()..]);
        let digits = behind.bytes().take_while(u8::is_ascii_digit).count();
        let is_word = !before.ends_with(|last: char| last.is_alphanumeric());
        let host = behind[..digits]
            .parse()
            .ok()
            .and_then(HostId::new)
            .filter(|_| is_word);
        out.push_str(before);
        match host.and_then(&name) {
            Some(name) => out.push_str(name),
            None => out.push_str(&rest[at..at + SIGN.len() + digits]),
        }
        rest = &behind[digits..];
    }
    out + rest
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EventKind::HostAdded { host, name } => write!(f, "{name} joined as {host}"),
            EventKind::HostRefused { name, why } => write!(f, "{name} was not added: {why}"),
            EventKind::HostFileDone { added, refused } => {
                write!(
                    f,
                    "the host file is done: hosts that joined {added}, lines that came to nothing {refused}"
                )
            }
            EventKind::HostGone { host, name, why } => write!(f, "{name} ({host}) is gone: {why}"),
            EventKind::TaskStarted {
                tid, parent, name, ..
            } => write_start(f, *tid, *parent, name),
            EventKind::TaskEnded { tid, status, used } => write_end(f, *tid, *status, used),
            EventKind::RmRegistered { tid } => write!(f, "{tid} is the resource manager"),
            EventKind::RmGone { tid } => write!(
                f,
                "resource manager {tid} is gone; spawns are placed round robin"
            ),
            EventKind::Placed { name, hosts, why } => {
                let hosts: Vec<String> = hosts.iter().map(|h| h.index().to_string()).collect();
                write!(f, "{name} placed on hosts {}: {why}", hosts.join(" "))
            }
            EventKind::OwnerPresent { host, why, .. } => {
                write!(f, "owner of {host} present: {why}")
            }
            EventKind::OwnerAbsent { host, why } => write!(f, "owner of {host} absent: {why}"),
            EventKind::HostClean { host } => {
                write!(f, "{host} is clean: no foreign task is left on it")
            }
            EventKind::GuestsStopped {
                host,
                guests,
                took,
                why,
            } => {
                write!(
                    f,
                    "guests of {host} stopped: {} within {:.1} ms: {why}",
                    tasks(guests),
                    millis(*took)
                )
            }
            EventKind::GuestsContinued { host, guests, why } => {
                write!(f, "guests of {host} go on: {}: {why}", tasks(guests))
            }
            EventKind::GuestsEnded { host, guests, why } => {
                write!(f, "guests of {host} are ended: {}: {why}", tasks(guests))
            }
            EventKind::MovesBy { id, tid, engine } => write_way(f, *id, *tid, engine),
            EventKind::Moving {
                id,
                tid,
                from,
                to,
                step,
                bytes,
            } => {
                write!(f, "{id}: {tid} from {from} to {to}: {step} done")?;
                if *bytes > 0 {
                    write!(f, ", {bytes} bytes")
                } else {
                    Ok(())
                }
            }
            EventKind::Moved {
                id,
                tid,
                from,
                to,
                cause,
                bytes,
                resident,
                frozen,
                whole,
            } => {
                let stood = millis(*frozen);
                write!(
                    f,
                    "{id}: {tid} moved from {from} to {to} ({cause}): {bytes} bytes, frozen {stood:.1} ms"
                )?;
                if whole > frozen {
                    write_memory(f, *resident, *whole)
                } else {
                    Ok(())
                }
            }
            EventKind::MoveFailed {
                id,
                tid,
                from,
                to,
                cause,
                step,
                why,
            } => {
                write!(
                    f,
                    "{id}: {tid} was not moved from {from} to {to} ({cause}): {step} failed: {why}"
                )
            }
            EventKind::Suspended { tid, cause } => write!(f, "{tid} suspended: {cause}"),
            EventKind::Resumed { tid, cause } => write!(f, "{tid} resumed: {cause}"),
            EventKind::JobSuspended { job, by } => {
                write!(f, "job {job} suspended: {by} asked for it")
            }
            EventKind::JobResumed { job, by } => write!(f, "job {job} resumed: {by} asked for it"),
            EventKind::DrainBegun { host, by, .. } => {
                write!(
                    f,
                    "{host} is being emptied, and takes no tasks: {by} asked for it"
                )
            }
            EventKind::DrainEnded { host, by } => {
                write!(f, "{host} takes tasks again: {by} asked for it")
            }
            EventKind::Checkpointed {
                set,
                job,
                tasks,
                bytes,
                frozen,
                parked,
            } => {
                let frozen = millis(*frozen);
                write!(
                    f,
                    "checkpoint {set} of job {job}: {tasks} tasks, {bytes} bytes, frozen {frozen:.1} ms"
                )?;
                if *parked {
                    f.write_str("; it ends, and goes on when there is room")
                } else {
                    Ok(())
                }
            }
            EventKind::CheckpointFailed { job, why } => {
                write!(f, "no checkpoint of job {job}: {why}")
            }
            EventKind::Restarted {
                set,
                job,
                tasks,
                why,
            } => {
                write!(f, "job {job} goes on from checkpoint {set} ({why}):")?;
                tasks
                    .iter()
                    .try_for_each(|(tid, host)| write!(f, " {tid} on {host}"))
            }
            EventKind::RestartFailed { set, cause, why } => {
                write!(f, "checkpoint {set} was not started again ({cause}): {why}")
            }
            EventKind::Note { text } => f.write_str(text),
            EventKind::SetsRemoved { sets, why } => {
                write!(f, "checkpoints removed: {} ({why})", sets.join(" "))
            }
            EventKind::SetCopied {
                set,
                job,
                hosts,
                missing,
                why,
            } => {
                let hosts: Vec<String> = hosts.iter().map(HostId::to_string).collect();
                let on = if hosts.is_empty() {
                    "nobody".into()
                } else {
                    hosts.join(", ")
                };
                write!(f, "checkpoint {set} of job {job}: {on} has a copy")?;
                if *missing == 0 {
                    Ok(())
                } else {
                    write!(f, ", {missing} missing: {why}")
                }
            }
            EventKind::TaskerGone { host, why } => {
                write!(
                    f,
                    "the tasker of {host} has ended ({why}); its tasks are dead"
                )
            }
            EventKind::HostClosed { host, why } => write!(f, "{host} takes no guests: {why}"),
            EventKind::HostOpened { host } => write!(f, "{host} takes guests again"),
        }
    }
}

fn write_start(f: &mut fmt::Formatter<'_>, tid: Tid, parent: Tid, name: &str) -> fmt::Result {
    let name = if name.is_empty() {
        "from a command line"
    } else {
        name
    };
    write!(f, "{tid} started: {name}")?;
    if parent.is_task() {
        write!(f, ", child of {parent}")
    } else {
        Ok(())
    }
}

fn write_end(f: &mut fmt::Formatter<'_>, tid: Tid, status: i32, used: &Usage) -> fmt::Result {
    let (status, seconds) = (
        describe_status(status),
        (used.user + used.system).0 as f64 / 1e6,
    );
    write!(f, "{tid} ended: {status}, {seconds:.2} s of processor time")
}

/// Writes the duration of a post-copy migration.
fn write_memory(f: &mut fmt::Formatter<'_>, resident: u64, whole: Micros) -> fmt::Result {
    write!(
        f,
        ", its memory of {resident} bytes there after {:.1} ms",
        millis(whole)
    )
}

/// Writes the engine of a migration and what it does with the task's process.
fn write_way(
    f: &mut fmt::Formatter<'_>,
    id: MigrationId,
    tid: Tid,
    engine: &Engine,
) -> fmt::Result {
    write!(f, "{id}: {tid} goes by {engine}")?;
    match engine {
        Engine::Criu => Ok(()),
        Engine::Own { asked, exit, wait } => {
            write!(
                f,
                ": it is asked {asked}, and has {wait} s to end with exit status {exit}"
            )
        }
        Engine::Restart { wait } => write!(f, ": it is ended, within {wait} s, and started again"),
    }
}

fn millis(time: Micros) -> f64 {
    time.0 as f64 / 1e3
}

/// Formats a list of tasks for a sentence.
fn tasks(tids: &[Tid]) -> String {
    let names: Vec<String> = tids.iter().map(Tid::to_string).collect();
    if names.is_empty() {
        "none were there".into()
    } else {
        names.join(" ")
    }
}

/// Describes a wait status in words.
pub fn describe_status(status: i32) -> String {
    match (status & 0x7f, (status >> 8) & 0xff) {
        (0, code) => format!("exit status {code}"),
        (signal, _) => format!("killed by signal {signal}"),
    }
}

impl suspend::Holds {
    /// Returns the event for the change that a request caused; `None` if the task stays suspended
    /// or stays running.
    #[must_use]
    pub fn change(self, after: suspend::Holds, order: &suspend::Order) -> Option<EventKind> {
        let suspend::Order { tid, cause, .. } = order.clone();
        match (self.any(), after.any()) {
            (false, true) => Some(EventKind::Suspended { tid, cause }),
            (true, false) => Some(EventKind::Resumed { tid, cause }),
            // The preemption has ended, but the task stays suspended by request.
            (true, true) if self.gives_way && !after.gives_way => {
                after.asked.map(|by| EventKind::Suspended {
                    tid,
                    cause: suspend::Cause::Asked { by },
                })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(index: u16) -> HostId {
        HostId::new(index).expect("an index")
    }

    fn name(of: HostId) -> Option<&'static str> {
        [None, None, Some("leo"), Some("max")][usize::from(of.index())]
    }

    /// Host names replace host numbers in every part of a sentence.
    #[test]
    fn sentences_contain_host_names() {
        let why = "zoe is logged in on host 2".to_string();
        let present = EventKind::OwnerPresent {
            host: host(2),
            since: Micros(0),
            seen: Micros(0),
            why,
        };
        assert_eq!(
            present.told(name),
            "owner of leo present: zoe is logged in on leo"
        );
        let placed = EventKind::Placed {
            name: "x".into(),
            hosts: vec![host(1), host(3)],
            why: "first host 3".into(),
        };
        assert_eq!(placed.told(name), "x placed on 1 max: first max");
        let gone = EventKind::HostGone {
            host: host(2),
            name: "leo".into(),
            why: "lost".into(),
        };
        assert_eq!(gone.told(name), "leo (host 2) is gone: lost");
        let closed = EventKind::HostClosed {
            host: host(2),
            why: "the owner wants no guests always".into(),
        };
        assert_eq!(
            closed.told(name),
            "leo takes no guests: the owner wants no guests always"
        );
        assert_eq!(
            EventKind::HostOpened { host: host(3) }.told(name),
            "max takes guests again"
        );
        let unknown = EventKind::HostClean { host: host(1) };
        assert_eq!(
            unknown.told(name),
            "host 1 is clean: no foreign task is left on it"
        );
    }

    #[test]
    fn text_that_resembles_a_host_is_kept() {
        for text in [
            "a ghost 2",
            "host",
            "host 5000",
            "host x",
            "host 99999999999",
            "hosts 2 3",
            "the host  2",
        ] {
            assert_eq!(with_names(text, |_| Some("leo")), text);
        }
        assert_eq!(with_names("host 2, host 3.", name), "leo, max.");
        assert_eq!(with_names("Zürich's host 2", name), "Zürich's leo");
    }
}
