//! The event log: numbered entries about events in the virtual machine and their reasons, for users
//! and programs.

use crate::engine::Engine;
use crate::ids::{HostId, Micros, MigrationId, Tid};
use crate::library_fault::{ForeignLibrary, LoadFailure};
use crate::migration::{Failure, MigrationCause, Step, Usage};
use crate::suspend;
use crate::text::{self, replace_host_numbers};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum number of events that the master stores; the oldest are dropped.
pub const EVENTS_MAX: usize = 65_536;

/// One entry of the event log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Number assigned by the master; ascending without gaps.
    pub number: u64,
    /// Time of the event by the clock of `host`, in microseconds since 1970.
    pub at: Micros,
    /// The host on which the event happened.
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
        /// Host name as the user passed it.
        name: String,
        why: String,
    },
    /// All lines of the host file have been processed.
    #[serde(rename = "HostFileDone")]
    HostFileProcessed {
        /// Number of hosts in the host file that joined.
        added: u32,
        /// Number of faulty lines plus number of hosts that did not join.
        refused: u32,
    },
    /// A host left the virtual machine or was lost.
    HostGone {
        host: HostId,
        name: String,
        why: String,
        /// The tasks that ended with the host.
        lost_tasks: LostTasks,
    },
    /// A task was spawned, or a program connected as a task.
    TaskStarted {
        tid: Tid,
        parent: Tid,
        /// The task's program; empty for a task from a command line.
        name: String,
        /// User id under which the task's daemon runs.
        user: u32,
    },
    TaskEnded {
        tid: Tid,
        /// Wait status of the task's process.
        status: i32,
        /// Resources that the task used.
        used: Usage,
    },
    /// A resource manager registered.
    RmRegistered {
        tid: Tid,
    },
    /// The resource manager has ended; from now on daemons place tasks round robin.
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
        /// Time of the owner's activity, in microseconds since 1970. For a login, the time of the
        /// login record.
        since: Micros,
        /// Time at which the load watcher detected the owner.
        #[serde(rename = "seen")]
        detected_at: Micros,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// The owner of a host is absent; guests may use the host again.
    OwnerAbsent {
        host: HostId,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// The last guest has left a host.
    #[serde(rename = "HostClean")]
    HostVacated {
        host: HostId,
    },
    /// A migration uses an engine other than CRIU.
    #[serde(rename = "MovesBy")]
    MigrationEngine {
        id: MigrationId,
        tid: Tid,
        engine: Engine,
    },
    /// A migration completed a step.
    #[serde(rename = "Moving")]
    MigrationStep {
        id: MigrationId,
        tid: Tid,
        from: HostId,
        to: HostId,
        step: Step,
        /// Size of the images in bytes, for the steps dump and transfer.
        bytes: u64,
    },
    /// A migration is complete: the task runs at the target.
    #[serde(rename = "Moved")]
    Migrated {
        id: MigrationId,
        tid: Tid,
        from: HostId,
        to: HostId,
        cause: MigrationCause,
        /// Size of the images in bytes.
        bytes: u64,
        /// Bytes of task memory that were transferred, in the images or by post-copy; 0 if the
        /// program wrote its own checkpoint.
        resident: u64,
        /// Time from the quiesce of the task's library until the task runs again.
        frozen: Micros,
        /// Time from the quiesce of the task's library until all memory is at the target, plus the
        /// duration of pre-copy.
        #[serde(rename = "whole")]
        transfer_time: Micros,
    },
    /// A migration failed. The task continues at `from`, unless the migration failed because the
    /// task exited.
    #[serde(rename = "MoveFailed")]
    MigrationFailed {
        id: MigrationId,
        tid: Tid,
        from: HostId,
        to: HostId,
        cause: MigrationCause,
        /// The step that failed.
        step: Step,
        why: Failure,
    },
    /// All guests of a host are paused for its owner.
    #[serde(rename = "GuestsStopped")]
    GuestsPaused {
        host: HostId,
        guests: Vec<Tid>,
        /// Time from the load watcher's directive until the last guest was stopped.
        #[serde(rename = "took")]
        duration: Micros,
        /// The load watcher's reason, in one sentence.
        why: String,
        /// Ended tasks whose leftover processes were stopped.
        leftovers: Vec<LeftoverCount>,
    },
    /// The guests of a host were resumed.
    #[serde(rename = "GuestsContinued")]
    GuestsResumed {
        host: HostId,
        /// The guests that had been paused.
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
    /// A task was suspended. The task stays stopped until a request resumes it.
    Suspended {
        tid: Tid,
        cause: suspend::SuspendCause,
    },
    /// A suspended task was resumed. The task runs unless the owner of its host is present.
    Resumed {
        tid: Tid,
        cause: suspend::SuspendCause,
    },
    /// A whole job was suspended, including tasks that the job spawns later.
    JobSuspended {
        /// First task of the job.
        job: Tid,
        /// The task that requested the suspension.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// A suspended job was resumed.
    JobResumed {
        /// First task of the job.
        job: Tid,
        /// The task that requested the end of the suspension.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// A drain of a host was requested: the host's tasks migrate to other hosts, and no tasks are
    /// placed on the host.
    #[serde(rename = "DrainBegun")]
    DrainStarted {
        host: HostId,
        /// The task that requested the drain.
        #[serde(rename = "by")]
        requested_by: Tid,
        /// Deadline for the host to be empty, in microseconds since 1970; `None` if the drain has
        /// no time limit.
        #[serde(rename = "until")]
        deadline: Option<Micros>,
    },
    /// A drained host accepts tasks again.
    DrainEnded {
        host: HostId,
        /// The task that requested the end of the drain.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// A checkpoint of a job is complete.
    Checkpointed {
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// First task of the job.
        job: Tid,
        /// Number of tasks in the checkpoint.
        tasks: u32,
        /// Size in the store, in bytes.
        bytes: u64,
        /// Time for which the job's tasks were stopped.
        frozen: Micros,
        /// True if the resource manager vacated the job: the job's tasks were ended, and the job
        /// will be restarted when a host accepts it.
        #[serde(rename = "parked")]
        vacated: bool,
    },
    /// A checkpoint of a job failed; the job continues.
    CheckpointFailed {
        /// First task of the job.
        job: Tid,
        why: String,
    },
    /// The tasks of a checkpoint were restarted.
    Restarted {
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// First task of the job.
        job: Tid,
        /// The restarted tasks with their hosts.
        tasks: Vec<(Tid, HostId)>,
        /// Reason for the restart.
        why: String,
    },
    /// The restart of a checkpoint failed.
    RestartFailed {
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// Reason for the attempt to restart the job.
        cause: String,
        /// Reason for the failure.
        why: String,
    },
    /// An event without a variant of its own, described in one sentence.
    Note {
        text: String,
    },
    #[serde(rename = "SetsRemoved")]
    CheckpointsRemoved {
        /// Names of the checkpoints.
        #[serde(rename = "sets")]
        checkpoints: Vec<String>,
        /// Reason for the removal.
        why: String,
    },
    /// A checkpoint was copied to other hosts; some of the intended copies may have failed.
    #[serde(rename = "SetCopied")]
    CheckpointCopied {
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// First task of the job.
        job: Tid,
        /// Hosts that have stored a copy of the checkpoint.
        hosts: Vec<HostId>,
        /// Number of intended hosts without a copy.
        missing: u32,
        /// The hosts that did not store a copy, with reasons; empty if every copy was stored.
        why: String,
    },
    /// The tasker of a host has ended, and all tasks that it had started have ended with it. The
    /// daemon starts another tasker.
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
    /// A checkpoint is damaged and is not used any more.
    #[serde(rename = "SetDamaged")]
    CheckpointDamaged {
        /// Name of the checkpoint.
        #[serde(rename = "set")]
        checkpoint: String,
        /// First task of the job; [`Tid::NONE`] if the damage hides it.
        job: Tid,
        /// How the damage was detected.
        why: String,
        /// True if the job was rolling back to this checkpoint.
        rolls_back: bool,
        /// Name of the earlier checkpoint to which the job rolls back instead; `None` if there is
        /// no other one, or if the job was not rolling back.
        #[serde(rename = "instead")]
        replacement: Option<String>,
    },
    /// Another virtual machine has taken over a job. The tasks of this virtual machine's copy of
    /// the job are ended.
    JobTakenOver {
        /// First task of the job.
        job: Tid,
        /// The other virtual machine.
        by: String,
    },
    /// Guests of a host must stop for its owner, and it was not confirmed in time that they have
    /// stopped.
    #[serde(rename = "GuestsNotStopped")]
    GuestsNotPaused {
        host: HostId,
        guests: Vec<Tid>,
        why: String,
    },
    /// A task has ended and has left processes behind. These processes remain guests of the host.
    ProcessesLeft {
        host: HostId,
        left: LeftoverCount,
    },
    /// The last process that a task had left behind has ended.
    LeftProcessesEnded {
        host: HostId,
        tid: Tid,
    },
    /// Processes of guests still run, although they were ordered to stop some time ago.
    GuestsStillRun {
        host: HostId,
        /// The task, which may have ended, to which the processes belong.
        tid: Tid,
        /// Process ids on the host.
        pids: Vec<i32>,
    },
    /// The task that starts with the next event of its host is a console.
    ConsoleJoined {
        tid: Tid,
    },
    /// A host has started no tasks of a spawn.
    SpawnRefused {
        host: HostId,
        /// The task that requested the spawn.
        spawner: Tid,
        /// Name of the program in the request.
        name: String,
        why: String,
    },
    /// A process of a task uses the library of another PVM; its PVM calls fail.
    ForeignLibrary {
        host: HostId,
        tid: Tid,
        fault: ForeignLibrary,
    },
    /// The program of a task did not start, because a shared library could not be loaded.
    LibraryMissing {
        host: HostId,
        tid: Tid,
        failure: LoadFailure,
    },
}

/// Maximum number of tasks that the event of a lost host names.
pub const LOST_TASKS_NAMED_MAX: usize = 1000;

/// The tasks that ended with their host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostTasks {
    /// Tids and program names, at most [`LOST_TASKS_NAMED_MAX`].
    pub named: Vec<(Tid, String)>,
    /// Number of further tasks.
    pub others: u32,
}

impl fmt::Display for LostTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self
            .named
            .iter()
            .map(|(tid, program)| format!("{tid} {program}"))
            .collect();
        match (&names[..], self.others) {
            ([], 0) => Ok(()),
            (names, 0) => write!(f, "; lost with it: {}", names.join(", ")),
            (names, others) => {
                write!(f, "; lost with it: {} and {others} more", names.join(", "))
            }
        }
    }
}

/// Number of processes that an ended task has left behind on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftoverCount {
    pub tid: Tid,
    pub processes: u32,
}

impl fmt::Display for LeftoverCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count_text = text::process_count(self.processes);
        write!(f, "{count_text} left by {} (ended)", self.tid)
    }
}

impl EventKind {
    /// Returns the sentence of [`Display`](fmt::Display) with host names in place of host numbers,
    /// also within reasons that other programs supplied. `name` returns the name of a host; a host
    /// without a known name keeps its number.
    pub fn with_host_names<'a>(&self, name: impl Fn(HostId) -> Option<&'a str>) -> String {
        match self {
            // The sentences of these events already contain the host's name.
            Self::HostAdded { .. } | Self::HostGone { .. } => self.to_string(),
            Self::Placed {
                name: program,
                hosts,
                why,
            } => {
                let format_host = |host: &HostId| {
                    name(*host).map_or_else(|| host.index().to_string(), str::to_string)
                };
                let hosts: Vec<String> = hosts.iter().map(format_host).collect();
                format!(
                    "{program} placed on {}: {}",
                    hosts.join(" "),
                    replace_host_numbers(why, name)
                )
            }
            _ => replace_host_numbers(&self.to_string(), name),
        }
    }
}

impl fmt::Display for EventKind {
    // tidy: long because the match is a table with one sentence for each event
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostAdded { host, name } => write!(f, "{name} joined as {host}"),
            Self::HostRefused { name, why } => {
                write!(f, "{name} was not added: {why}", why = text::reason(why))
            }
            Self::HostFileProcessed { added, refused } => {
                write!(
                    f,
                    "the host file is processed: {added} hosts joined, {refused} lines failed"
                )
            }
            Self::HostGone {
                host,
                name,
                why,
                lost_tasks,
            } => write!(
                f,
                "{name} ({host}) is gone: {why}{lost_tasks}",
                why = text::reason(why)
            ),
            Self::TaskStarted {
                tid, parent, name, ..
            } => write_task_start(f, *tid, *parent, name),
            Self::TaskEnded { tid, status, used } => write_task_end(f, *tid, *status, used),
            Self::RmRegistered { tid } => write!(f, "{tid} is the resource manager"),
            Self::RmGone { tid } => write!(
                f,
                "resource manager {tid} is gone; spawns are placed round robin"
            ),
            Self::Placed { name, hosts, why } => {
                let hosts: Vec<String> = hosts.iter().map(|h| h.index().to_string()).collect();
                write!(
                    f,
                    "{name} placed on hosts {}: {why}",
                    hosts.join(" "),
                    why = text::reason(why)
                )
            }
            Self::OwnerPresent { host, why, .. } => {
                write!(f, "owner of {host} present: {why}", why = text::reason(why))
            }
            Self::OwnerAbsent { host, why } => {
                write!(f, "owner of {host} absent: {why}", why = text::reason(why))
            }
            Self::HostVacated { host } => {
                write!(f, "{host} is clean: no guest is left on it")
            }
            Self::GuestsPaused {
                host,
                guests,
                duration,
                why,
                leftovers,
            } => {
                write!(
                    f,
                    "guests of {host} paused: {} within {:.1} ms: {why}",
                    join_guests(guests, leftovers),
                    as_millis(*duration),
                    why = text::reason(why)
                )
            }
            Self::ProcessesLeft { host, left } => {
                let LeftoverCount { tid, processes } = left;
                let count_text = text::process_count(*processes);
                write!(
                    f,
                    "{tid} (ended) left {count_text} on {host}, which remain guests"
                )
            }
            Self::LeftProcessesEnded { host, tid } => {
                write!(f, "the processes that {tid} left on {host} have ended")
            }
            Self::GuestsStillRun { host, tid, pids } => {
                let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
                write!(
                    f,
                    "guests of {host} still run: processes {} of {tid} have not stopped yet",
                    pids.join(" ")
                )
            }
            Self::ConsoleJoined { tid } => write!(f, "{tid} is a console"),
            Self::SpawnRefused {
                host, name, why, ..
            } => write!(f, "{name} was not started on {host}: {why}"),
            Self::ForeignLibrary { host, tid, fault } => write!(f, "{tid} on {host}: {fault}"),
            Self::LibraryMissing { host, tid, failure } => write!(f, "{tid} on {host}: {failure}"),
            Self::GuestsResumed { host, guests, why } => {
                write!(
                    f,
                    "guests of {host} resumed: {}: {why}",
                    join_tids(guests),
                    why = text::reason(why)
                )
            }
            Self::GuestsEnded { host, guests, why } => {
                write!(
                    f,
                    "guests of {host} are being ended: {}: {why}",
                    join_tids(guests),
                    why = text::reason(why)
                )
            }
            Self::MigrationEngine { id, tid, engine } => write_engine(f, *id, *tid, engine),
            Self::MigrationStep {
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
            Self::Migrated {
                id,
                tid,
                from,
                to,
                cause,
                bytes,
                resident,
                frozen,
                transfer_time,
            } => {
                let frozen_ms = as_millis(*frozen);
                write!(
                    f,
                    "{id}: {tid} migrated from {from} to {to} ({cause}): {bytes} bytes, frozen {frozen_ms:.1} ms"
                )?;
                if transfer_time > frozen {
                    write_transfer_time(f, *resident, *transfer_time)
                } else {
                    Ok(())
                }
            }
            Self::MigrationFailed {
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
                    "{id}: {tid} was not migrated from {from} to {to} ({cause}): {step} failed: {why}"
                )
            }
            Self::Suspended { tid, cause } => write!(f, "{tid} suspended: {cause}"),
            Self::Resumed { tid, cause } => write!(f, "{tid} resumed: {cause}"),
            Self::JobSuspended { job, requested_by } => {
                write!(f, "job {job} suspended: requested by {requested_by}")
            }
            Self::JobResumed { job, requested_by } => {
                write!(f, "job {job} resumed: requested by {requested_by}")
            }
            Self::DrainStarted {
                host,
                requested_by: requester,
                ..
            } => {
                write!(
                    f,
                    "{host} is being drained and accepts no tasks: requested by {requester}"
                )
            }
            Self::DrainEnded { host, requested_by } => {
                write!(f, "{host} accepts tasks again: requested by {requested_by}")
            }
            Self::Checkpointed {
                checkpoint: checkpoint_name,
                job,
                tasks,
                bytes,
                frozen,
                vacated,
            } => {
                let frozen = as_millis(*frozen);
                write!(
                    f,
                    "checkpoint {checkpoint_name} of job {job}: {tasks} tasks, {bytes} bytes, frozen {frozen:.1} ms"
                )?;
                if *vacated {
                    f.write_str("; the job ends now and will be restarted when there is room")
                } else {
                    Ok(())
                }
            }
            Self::CheckpointFailed { job, why } => {
                write!(
                    f,
                    "no checkpoint of job {job}: {why}",
                    why = text::reason(why)
                )
            }
            Self::Restarted {
                checkpoint: checkpoint_name,
                job,
                tasks,
                why,
            } => {
                write!(
                    f,
                    "job {job} restarted from checkpoint {checkpoint_name} ({why}):",
                    why = text::reason(why)
                )?;
                tasks
                    .iter()
                    .try_for_each(|(tid, host)| write!(f, " {tid} on {host}"))
            }
            Self::RestartFailed {
                checkpoint,
                cause,
                why,
            } => {
                write!(
                    f,
                    "checkpoint {checkpoint} was not restarted ({cause}): {why}",
                    cause = text::reason(cause),
                    why = text::reason(why)
                )
            }
            Self::Note { text } => f.write_str(text::reason(text)),
            Self::CheckpointsRemoved { checkpoints, why } => {
                write!(
                    f,
                    "checkpoints removed: {} ({why})",
                    checkpoints.join(" "),
                    why = text::reason(why)
                )
            }
            Self::CheckpointCopied {
                checkpoint: checkpoint_name,
                job,
                hosts,
                missing,
                why,
            } => {
                let hosts: Vec<String> = hosts.iter().map(HostId::to_string).collect();
                let host_list = if hosts.is_empty() {
                    "no host".into()
                } else {
                    hosts.join(", ")
                };
                write!(
                    f,
                    "checkpoint {checkpoint_name} of job {job} copied to: {host_list}"
                )?;
                if *missing == 0 {
                    Ok(())
                } else {
                    write!(f, ", {missing} missing: {why}", why = text::reason(why))
                }
            }
            Self::TaskerGone { host, why } => {
                write!(
                    f,
                    "the tasker of {host} has ended ({why}); its tasks were killed",
                    why = text::reason(why)
                )
            }
            Self::HostClosed { host, why } => write!(
                f,
                "{host} accepts no guests: {why}",
                why = text::reason(why)
            ),
            Self::HostOpened { host } => write!(f, "{host} accepts guests again"),
            Self::CheckpointDamaged {
                checkpoint,
                job,
                why,
                rolls_back,
                replacement,
            } => {
                write!(f, "checkpoint {checkpoint}")?;
                if job.is_task() {
                    write!(f, " of job {job}")?;
                }
                write!(f, " is damaged ({why})", why = text::reason(why))?;
                match (rolls_back, replacement) {
                    (false, _) => Ok(()),
                    (true, Some(replacement)) => write!(f, "; the job rolls back to {replacement}"),
                    (true, None) => f.write_str(
                        "; there is no earlier one that is intact, and the job has ended; a copy on another host may \
                         be intact",
                    ),
                }
            }
            Self::JobTakenOver { job, by } => write!(
                f,
                "job {job} was restarted in {by}: its tasks here are ended, so that it does not run twice"
            ),
            Self::GuestsNotPaused { host, guests, why } => {
                write!(
                    f,
                    "guests of {host} not stopped: {}: {why}",
                    join_tids(guests),
                    why = text::reason(why)
                )
            }
        }
    }
}

fn write_task_start(f: &mut fmt::Formatter<'_>, tid: Tid, parent: Tid, name: &str) -> fmt::Result {
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

fn write_task_end(f: &mut fmt::Formatter<'_>, tid: Tid, status: i32, usage: &Usage) -> fmt::Result {
    let (status, seconds) = (
        describe_status(status),
        (usage.user + usage.system).0 as f64 / 1e6,
    );
    write!(f, "{tid} ended: {status}, {seconds:.2} s of processor time")
}

/// Writes the duration of a post-copy migration, with the size of the transferred memory.
fn write_transfer_time(
    f: &mut fmt::Formatter<'_>,
    memory_bytes: u64,
    transfer_time: Micros,
) -> fmt::Result {
    write!(
        f,
        ", all {memory_bytes} bytes of memory at the target after {:.1} ms",
        as_millis(transfer_time)
    )
}

/// Writes the engine of a migration and what the engine does with the task's process.
fn write_engine(
    f: &mut fmt::Formatter<'_>,
    id: MigrationId,
    tid: Tid,
    engine: &Engine,
) -> fmt::Result {
    write!(f, "{id}: {tid} migrates by {engine}")?;
    match engine {
        Engine::Criu => Ok(()),
        Engine::SelfCheckpoint {
            ask_method,
            exit_status,
            timeout_s: limit_s,
        } => {
            write!(
                f,
                ": it is asked {ask_method} and must exit with status {exit_status} within {limit_s} s"
            )
        }
        Engine::Restart { timeout_s } => {
            write!(f, ": it is ended within {timeout_s} s and restarted")
        }
    }
}

fn as_millis(time: Micros) -> f64 {
    time.0 as f64 / 1e3
}

/// Joins the tids with spaces; "no guests" for an empty list.
fn join_tids(tids: &[Tid]) -> String {
    let names: Vec<String> = tids.iter().map(Tid::to_string).collect();
    match tids {
        [] => "no guests".into(),
        _ => names.join(" "),
    }
}

/// Joins the tids of paused guests and what ended tasks have left behind; "no guests" if both lists
/// are empty.
fn join_guests(guests: &[Tid], leftovers: &[LeftoverCount]) -> String {
    let texts: Vec<String> = leftovers.iter().map(LeftoverCount::to_string).collect();
    match (guests, leftovers) {
        (_, []) => join_tids(guests),
        ([], _) => texts.join(", "),
        _ => format!("{}, {}", join_tids(guests), texts.join(", ")),
    }
}

/// Describes a wait status by the exit status or the number of the signal.
pub fn describe_status(status: i32) -> String {
    match (status & 0x7f, (status >> 8) & 0xff) {
        (0, code) => format!("exit status {code}"),
        (signal, _) => format!("killed by signal {signal}"),
    }
}

impl suspend::Suspensions {
    /// Returns the event that logs a change of a task's suspensions from `self` to
    /// `new_suspensions` by the request `order`. If only a preemption ended, the event states that
    /// the task is still suspended by request. `None` for any other change that neither suspends
    /// nor resumes the task.
    #[must_use]
    pub fn change_event(
        self,
        new_suspensions: Self,
        order: &suspend::SuspendOrder,
    ) -> Option<EventKind> {
        let suspend::SuspendOrder { tid, cause, .. } = order.clone();
        match (self.is_suspended(), new_suspensions.is_suspended()) {
            (false, true) => Some(EventKind::Suspended { tid, cause }),
            (true, false) => Some(EventKind::Resumed { tid, cause }),
            // The preemption has ended, but the task stays suspended by request.
            (true, true) if self.preempted && !new_suspensions.preempted => new_suspensions
                .requested_by
                .map(|requester| EventKind::Suspended {
                    tid,
                    cause: suspend::SuspendCause::Requested {
                        requested_by: requester,
                    },
                }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
