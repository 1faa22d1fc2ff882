//! The event log: what happened in the virtual machine and why, for people and for programs.

use crate::engine::Engine;
use crate::ids::{HostId, Micros, MigrationId, Tid};
use crate::migration::{Cause, Failure, Step, Usage};
use crate::suspend;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Events kept by the master; the oldest go first.
pub const EVENTS_MAX: usize = 65_536;

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Rising without gaps, given by the master.
    pub number: u64,
    /// When it happened, in microseconds since 1970, by the clock of `host`.
    pub at: Micros,
    /// The host where it happened.
    pub host: HostId,
    /// What happened.
    pub kind: EventKind,
}

/// What can happen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum EventKind {
    /// A host joined.
    HostAdded {
        /// Its index.
        host: HostId,
        /// Its name.
        name: String,
    },
    /// A host could not be added.
    HostRefused {
        /// The name given.
        name: String,
        /// Why.
        why: String,
    },
    /// Nothing more comes of the host file.
    HostFileDone {
        /// Hosts of it that joined.
        added: u32,
        /// Lines that were not understood and hosts that did not join.
        refused: u32,
    },
    /// A host left or was lost.
    HostGone {
        /// Its index.
        host: HostId,
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// A task was started or connected.
    TaskStarted {
        /// The task.
        tid: Tid,
        /// Its parent.
        parent: Tid,
        /// Its program; empty for a task from a command line.
        name: String,
        /// The user of the daemon that serves it.
        user: u32,
    },
    /// A task ended.
    TaskEnded {
        /// The task.
        tid: Tid,
        /// Wait status.
        status: i32,
        /// What it used.
        used: Usage,
    },
    /// A resource manager registered.
    RmRegistered {
        /// Its task.
        tid: Tid,
    },
    /// The resource manager is gone; daemons place round robin.
    RmGone {
        /// Its task.
        tid: Tid,
    },
    /// A spawn was placed.
    Placed {
        /// The program.
        name: String,
        /// Hosts in the order of the tasks.
        hosts: Vec<HostId>,
        /// The resource manager's sentence.
        why: String,
    },
    /// The owner of a host is there.
    OwnerPresent {
        /// The host.
        host: HostId,
        /// Time of the sign of life (for a login: of its record), in microseconds since 1970.
        since: Micros,
        /// When the watcher learned of it.
        seen: Micros,
        /// One plain sentence.
        why: String,
    },
    /// The owner of a host has left; it is used again.
    OwnerAbsent {
        /// The host.
        host: HostId,
        /// One plain sentence.
        why: String,
    },
    /// All foreign tasks have left a host.
    HostClean {
        /// The host.
        host: HostId,
    },
    /// A task is taken elsewhere by another way than CRIU.
    MovesBy {
        /// The attempt.
        id: MigrationId,
        /// The task.
        tid: Tid,
        /// The way.
        engine: Engine,
    },
    /// A move reached the end of a step.
    Moving {
        /// The attempt.
        id: MigrationId,
        /// The task.
        tid: Tid,
        /// Source.
        from: HostId,
        /// Target.
        to: HostId,
        /// The step that ended.
        step: Step,
        /// Image bytes, for dump and transfer.
        bytes: u64,
    },
    /// A move is complete: the task runs at the target.
    Moved {
        /// The attempt.
        id: MigrationId,
        /// The task.
        tid: Tid,
        /// Source.
        from: HostId,
        /// Target.
        to: HostId,
        /// Why it moved.
        cause: Cause,
        /// Image bytes.
        bytes: u64,
        /// The task's memory that went with it, with the images or behind them; 0 when its program took along what it needs.
        resident: u64,
        /// From the library's letting go to running again.
        frozen: Micros,
        /// From the library's letting go until all of its memory was there, and the time for which memory went ahead before.
        whole: Micros,
    },
    /// A move failed; the task goes on at `from` unless the failure is its end.
    MoveFailed {
        /// The attempt.
        id: MigrationId,
        /// The task.
        tid: Tid,
        /// Source.
        from: HostId,
        /// Target.
        to: HostId,
        /// Why it was to move.
        cause: Cause,
        /// The step that failed.
        step: Step,
        /// Why.
        why: Failure,
    },
    /// Nothing of the guests of a host runs any more, as its owner wants it.
    GuestsStopped {
        /// The host.
        host: HostId,
        /// The tasks.
        guests: Vec<Tid>,
        /// From the load watcher's word to its daemon until the last of them had stopped.
        took: Micros,
        /// The load watcher's sentence.
        why: String,
    },
    /// The guests of a host go on.
    GuestsContinued {
        /// The host.
        host: HostId,
        /// The tasks that had been stopped.
        guests: Vec<Tid>,
        /// Why.
        why: String,
    },
    /// The guests of a host are ended, as its owner wants it.
    GuestsEnded {
        /// The host.
        host: HostId,
        /// The tasks.
        guests: Vec<Tid>,
        /// The load watcher's sentence.
        why: String,
    },
    /// A task is suspended: it stands still until somebody lets it go on.
    Suspended {
        /// The task.
        tid: Tid,
        /// Why.
        cause: suspend::Cause,
    },
    /// A task that was suspended goes on, unless the owner of its host is there.
    Resumed {
        /// The task.
        tid: Tid,
        /// Why.
        cause: suspend::Cause,
    },
    /// A whole job is suspended: its tasks, and those that it will have.
    JobSuspended {
        /// The task at its top.
        job: Tid,
        /// Who asked for it.
        by: Tid,
    },
    /// A job that was suspended goes on.
    JobResumed {
        /// The task at its top.
        job: Tid,
        /// Who asked for it.
        by: Tid,
    },
    /// Somebody has a host emptied: its tasks leave, and none comes.
    DrainBegun {
        /// The host.
        host: HostId,
        /// Who asked for it.
        by: Tid,
        /// When it is to be empty, as time of day.
        until: Option<Micros>,
    },
    /// A host that was emptied takes tasks again.
    DrainEnded {
        /// The host.
        host: HostId,
        /// Who asked for it.
        by: Tid,
    },
    /// A checkpoint of a job is complete.
    Checkpointed {
        /// Its name.
        set: String,
        /// The task at the job's top.
        job: Tid,
        /// Tasks in it.
        tasks: u32,
        /// Bytes in the store.
        bytes: u64,
        /// How long its tasks stood still.
        frozen: Micros,
        /// It was ended with that, and goes on when there is room: the resource manager wanted it so.
        parked: bool,
    },
    /// A job was not checkpointed; it goes on.
    CheckpointFailed {
        /// The task at the job's top.
        job: Tid,
        /// Why.
        why: String,
    },
    /// The tasks of a checkpoint run again.
    Restarted {
        /// Its name.
        set: String,
        /// The task at the job's top.
        job: Tid,
        /// The tasks and where they run.
        tasks: Vec<(Tid, HostId)>,
        /// Why it was started again.
        why: String,
    },
    /// A checkpoint was not started again.
    RestartFailed {
        /// Its name.
        set: String,
        /// Why it was to be started again.
        cause: String,
        /// Why it was not.
        why: String,
    },
    /// Anything else worth knowing.
    Note {
        /// The sentence.
        text: String,
    },
    /// Checkpoints are no more.
    SetsRemoved {
        /// Their names.
        sets: Vec<String>,
        /// Why they went.
        why: String,
    },
    /// A checkpoint has been copied into the stores of other hosts, or of some of those that were to have it.
    SetCopied {
        /// Its name.
        set: String,
        /// The task at the job's top.
        job: Tid,
        /// Who has a copy.
        hosts: Vec<HostId>,
        /// So many copies are missing.
        missing: u32,
        /// Who did not take one, and why.
        why: String,
    },
    /// The tasker of a host has ended, and with it all tasks that it had started. Another one begins.
    TaskerGone {
        /// The host.
        host: HostId,
        /// Why.
        why: String,
    },
    /// The rules of a host's owner let no guests in any more, whoever uses it.
    HostClosed {
        /// The host.
        host: HostId,
        /// The load watcher's sentence.
        why: String,
    },
    /// A host that was closed takes guests again.
    HostOpened {
        /// The host.
        host: HostId,
    },
}

impl EventKind {
    /// The sentence with names of hosts where [`Display`](fmt::Display) has only their numbers, also in what other programs
    /// have said; a host without a known name keeps its number.
    pub fn told<'a>(&self, name: impl Fn(HostId) -> Option<&'a str>) -> String {
        match self {
            // These tell the name already.
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

/// Puts names in the place of hosts as [`HostId`] prints them.
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

/// That a task's memory came behind it.
fn write_memory(f: &mut fmt::Formatter<'_>, resident: u64, whole: Micros) -> fmt::Result {
    write!(
        f,
        ", its memory of {resident} bytes there after {:.1} ms",
        millis(whole)
    )
}

/// By which engine a task goes, and what is done with its process.
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

/// Tasks in a sentence.
fn tasks(tids: &[Tid]) -> String {
    let names: Vec<String> = tids.iter().map(Tid::to_string).collect();
    if names.is_empty() {
        "none were there".into()
    } else {
        names.join(" ")
    }
}

/// A wait status in words.
pub fn describe_status(status: i32) -> String {
    match (status & 0x7f, (status >> 8) & 0xff) {
        (0, code) => format!("exit status {code}"),
        (signal, _) => format!("killed by signal {signal}"),
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

    #[test]
    fn sentences_tell_hosts_by_name_wherever_they_stand() {
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
    fn what_only_looks_like_a_host_is_left_alone() {
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
