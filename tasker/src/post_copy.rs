//! Post-copy: transfers memory after its task has migrated.
//!
//! - At the source the memory is served after the images are written, even after the task was
//!   killed.
//! - At the target the memory arrives while the task already runs.
//! - The two daemons forward the memory. Each has a socket for it, to which its tasker connects.

use crate::stop;
use crate::supervisor::Supervisor;
use crate::target::TargetStage;
use crate::task::{Task, TaskPhase};
use crate::workers::WorkerResult;
use checkpoint::engine::{
    CallLimits, CancelHandle, FetchCompletion, MemoryServer, ReceivedPages, ServedMemory, UffdGuard,
};
use nix::sys::socket::{Shutdown, shutdown};
use sempa_proto::migration::{Failure, TaskFacts};
use sempa_proto::tasker::FromTasker;
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Minimum resident memory in bytes for post-copy. A smaller task is stopped hardly longer without
/// post-copy.
const POST_COPY_BYTES_MIN: u64 = 16 << 20;
/// Environment variable that selects when post-copy is used: `never` or `always`. If it is not set,
/// post-copy is used from [`POST_COPY_BYTES_MIN`] on.
const POST_COPY_VARIABLE: &str = "SEMPA_POST_COPY";
/// Time after a failure during which post-copy is not used.
const FAILURE_BACKOFF: Duration = Duration::from_secs(600);
/// Time limit for killed processes to exit. They need much less.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Time limit of a transfer, which no real transfer reaches. The daemons detect a stalled transfer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Condition for the use of post-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostCopyMode {
    Never,
    Large,
    Always,
}

/// The value of the environment variable that selects when post-copy or pre-copy is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModeOverride {
    Never,
    Always,
}

/// Reads a mode from an environment variable; `None` if the variable is not set. An invalid value
/// counts as `never`, the mode that cannot lose memory; then a warning is printed that ends with
/// `consequence`.
pub(crate) fn mode_override(variable: &str, consequence: &str) -> Option<ModeOverride> {
    parse_mode(&std::env::var_os(variable)?.to_string_lossy()).unwrap_or_else(|value| {
        tracing::warn!("{variable}={value:?} is neither never nor always: {consequence}");
        Some(ModeOverride::Never)
    })
}

fn parse_mode(value: &str) -> Result<Option<ModeOverride>, &str> {
    match value {
        "" => Ok(None),
        "never" => Ok(Some(ModeOverride::Never)),
        "always" => Ok(Some(ModeOverride::Always)),
        other => Err(other),
    }
}

/// The state of post-copied memory that is arriving at this host.
#[derive(Debug)]
struct ArrivingMemory {
    /// Id of the worker thread that waits for the memory.
    worker: u64,
    /// Reports whether memory is still missing.
    completeness: FetchCompletion,
    /// The task, when it runs; `None` before.
    running_tid: Option<Tid>,
    complete: bool,
    /// Why the missing memory will not arrive, if it is lost.
    lost_reason: Option<Failure>,
    /// True if the task has exited and needs no more memory.
    task_exited: bool,
    /// Processes that were killed because their memory is lost.
    killed_pids: Vec<i32>,
}

/// Why post-copy is not possible on this host; tasks migrate with their whole memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PostCopyUnavailable {
    #[error("the engine has not been tried")]
    NotProbed,
    #[error("this host cannot handle missing memory (userfaultfd): {0}")]
    CheckFailed(Failure),
}

/// The state of all post-copies from this host and to it.
#[derive(Debug)]
pub(crate) struct PostCopies {
    mode: PostCopyMode,
    /// Whether this host supports post-copy; `Err` has the reason. Known after the probe of the
    /// engine.
    pub(crate) support: Result<(), PostCopyUnavailable>,
    /// Time of the last failure of a post-copy.
    failed_at: Option<Instant>,
    served_memory: BTreeMap<MigrationId, ServedMemory>,
    arriving: BTreeMap<MigrationId, ArrivingMemory>,
}

impl PostCopies {
    /// Reads the mode of post-copy from the environment.
    pub(crate) fn new() -> PostCopies {
        let mode = match mode_override(POST_COPY_VARIABLE, "post-copy is not used") {
            Some(ModeOverride::Never) => PostCopyMode::Never,
            Some(ModeOverride::Always) => PostCopyMode::Always,
            None => PostCopyMode::Large,
        };
        let (outgoing, arriving) = (BTreeMap::new(), BTreeMap::new());
        PostCopies {
            mode,
            support: Err(PostCopyUnavailable::NotProbed),
            failed_at: None,
            served_memory: outgoing,
            arriving,
        }
    }

    /// True if post-copy may be used on this host: it is supported, not disabled, and has not
    /// failed recently.
    pub(crate) fn is_available(&self) -> bool {
        let is_backing_off = self
            .failed_at
            .is_some_and(|at| at.elapsed() < FAILURE_BACKOFF);
        self.mode != PostCopyMode::Never && self.support.is_ok() && !is_backing_off
    }

    /// True if post-copy should be used for a task with these facts.
    pub(crate) fn applies_to(&self, facts: &TaskFacts) -> bool {
        self.is_available()
            && (self.mode == PostCopyMode::Always || facts.resident_bytes >= POST_COPY_BYTES_MIN)
    }

    /// True while post-copied memory of this migration is arriving, or has arrived while the task
    /// does not run yet.
    pub(crate) fn is_arriving(&self, migration: MigrationId) -> bool {
        self.arriving.contains_key(&migration)
    }

    /// Disables post-copy for [`FAILURE_BACKOFF`] if this host or its engine may have caused the
    /// failure.
    pub(crate) fn on_failure(&mut self, why: Option<&Failure>) {
        if let Some(why @ (Failure::Engine(_) | Failure::Io(_) | Failure::Deadline { .. })) = why {
            tracing::warn!(
                "post-copy is disabled for {} minutes: {why}",
                FAILURE_BACKOFF.as_secs() / 60
            );
            self.failed_at = Some(Instant::now());
        }
    }

    /// Retains the memory of a task that is about to be killed because it runs on another host.
    pub(crate) fn keep_after_kill(&self, migration: MigrationId) {
        if let Some(memory) = self.served_memory.get(&migration) {
            memory.retain_memory_after_kill();
        }
    }

    /// Stops serving memory for all migrations. Called when the tasker ends.
    pub(crate) fn stop_serving_all(&self) {
        self.served_memory
            .values()
            .for_each(ServedMemory::stop_serving);
    }
}

/// Connects to the socket at `path` through which the daemon forwards memory.
pub(crate) fn connect_memory_socket(path: &Path) -> Result<OwnedFd, Failure> {
    let failed = |e| {
        Failure::Io(format!(
            "no connection for its memory: {}: {e}",
            path.display()
        ))
    };
    UnixStream::connect(path).map(OwnedFd::from).map_err(failed)
}

/// Ends all traffic on this socket in both directions.
pub(crate) fn shut_down_socket(socket: &OwnedFd) {
    // Fails if the peer has closed the socket.
    let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
}

fn transfer_limits() -> Result<CallLimits, Failure> {
    let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(CallLimits {
        timeout: TRANSFER_TIMEOUT,
        cancel,
    })
}

impl Supervisor {
    // ---- The source

    /// Starts to serve the memory of a dumped task that is not in the images.
    pub(crate) fn serve_memory(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        serving: Box<dyn MemoryServer>,
    ) -> Result<(), Failure> {
        let (limits, memory) = (transfer_limits()?, serving.handle());
        let cancel = limits.cancel.clone();
        let work = move || WorkerResult::Served {
            migration,
            tid,
            result: serving.finish(&limits),
        };
        let worker = self.migrations.workers.start(&cancel, None, work)?;
        self.migrations
            .post_copies
            .served_memory
            .insert(migration, memory);
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.phase = TaskPhase::Serving {
                migration,
                worker,
                aborted: false,
            };
        }
        Ok(())
    }

    /// Stops serving memory, because the migration was aborted or its task has exited.
    pub(crate) fn stop_serving(&self, migration: MigrationId, worker: u64) {
        if let Some(memory) = self.migrations.post_copies.served_memory.get(&migration) {
            memory.stop_serving();
        }
        self.migrations.workers.cancel(worker);
    }

    /// Handles the end of serving memory.
    pub(crate) fn on_served(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        result: &Result<(), Failure>,
    ) {
        self.migrations.post_copies.served_memory.remove(&migration);
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let TaskPhase::Serving {
            migration: of,
            aborted,
            ..
        } = task.phase
        else {
            return;
        };
        if of != migration {
            return;
        }
        task.phase = TaskPhase::Stopped { migration };
        if result.is_err() {
            task.stop_stragglers();
        }
        if aborted {
            self.continue_task(migration, tid);
        }
    }

    // ---- The target

    /// Starts to fetch the memory of a task that is about to be restored. `dir` is the image
    /// directory, `path` the daemon's socket for the memory.
    pub(crate) fn start_fetch(
        &mut self,
        migration: MigrationId,
        dir: &Path,
        path: &Path,
    ) -> Result<(), Failure> {
        let pre_copied = self.migrations.pre_copies.take_received(migration)?;
        let engine = self
            .migrations
            .engine
            .as_ref()
            .ok_or_else(|| self.engine_failure())?;
        let (stream, store) = match pre_copied {
            Some((stream, store)) => {
                let stream = stream
                    .try_clone()
                    .map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
                (stream, store)
            }
            None => (connect_memory_socket(path)?, ReceivedPages::empty()),
        };
        let arriving = engine.start_fetch(dir, stream, store)?;
        let (limits, pid, completeness) = (
            transfer_limits()?,
            arriving.engine_pid(),
            arriving.completion(),
        );
        let cancel = limits.cancel.clone();
        let work = move || WorkerResult::MemoryArrived {
            migration,
            result: arriving.finish(&limits),
        };
        let worker = self.migrations.workers.start(&cancel, Some(pid), work)?;
        let arriving_memory = ArrivingMemory {
            worker,
            completeness,
            running_tid: None,
            complete: false,
            lost_reason: None,
            task_exited: false,
            killed_pids: Vec::new(),
        };
        self.migrations
            .post_copies
            .arriving
            .insert(migration, arriving_memory);
        Ok(())
    }

    /// Records that the restored task of this migration runs.
    pub(crate) fn on_restored_task_runs(&mut self, migration: MigrationId, tid: Tid) {
        let Some(arriving) = self.migrations.post_copies.arriving.get_mut(&migration) else {
            return;
        };
        arriving.running_tid = Some(tid);
        if arriving.complete {
            self.migrations.post_copies.arriving.remove(&migration);
            self.send(&FromTasker::MemoryArrived {
                migration,
                result: Ok(()),
            });
        }
    }

    /// Cancels the fetch for a restored task that is discarded.
    pub(crate) fn cancel_fetch(&mut self, migration: MigrationId) {
        self.migrations.pre_copies.remove_incoming(migration);
        if let Some(arriving) = self.migrations.post_copies.arriving.remove(&migration) {
            self.migrations.workers.cancel(arriving.worker);
        }
    }

    /// Cancels the fetch for a task that has exited. Remaining processes of the task would need the
    /// memory, so they are killed.
    pub(crate) fn cancel_fetch_of_exited(&mut self, task: &Task) {
        let tid = task.tid;
        for arriving in self
            .migrations
            .post_copies
            .arriving
            .values_mut()
            .filter(|arriving| arriving.running_tid == Some(tid))
        {
            // If memory was lost, the task did not exit by itself: it was killed.
            arriving.task_exited = arriving.lost_reason.is_none();
            task.kill_all();
            arriving.killed_pids = task.processes().pids();
            self.migrations.workers.cancel(arriving.worker);
        }
    }

    /// Handles the daemon's report that no more memory will arrive. If memory is missing, first
    /// kills all processes that need it.
    pub(crate) fn on_memory_lost(&mut self, migration: MigrationId, why: String) {
        if self.migrations.pre_copies.abort_incoming(migration) {
            self.send(&FromTasker::PreCopyLost {
                migration,
                why: Failure::Images(why.clone()),
            });
        }
        let arriving = self.migrations.post_copies.arriving.get_mut(&migration);
        let Some(arriving) = arriving.filter(|arriving| !arriving.completeness.close_if_complete())
        else {
            return;
        };
        arriving.lost_reason = Some(Failure::Images(why));
        let (runs, worker) = (arriving.running_tid, arriving.worker);
        if let Some(task) = runs.and_then(|tid| self.tasks.get(&tid)) {
            arriving.killed_pids = task.processes().pids();
            task.kill_all();
        }
        self.migrations.workers.cancel(worker);
    }

    /// Handles the completion or failure of a fetch.
    pub(crate) fn on_fetch_ended(
        &mut self,
        migration: MigrationId,
        result: Result<(), (Failure, UffdGuard)>,
    ) {
        let Some(mut arriving) = self.migrations.post_copies.arriving.remove(&migration) else {
            return;
        };
        let (result, missing) = match result {
            Ok(()) => (Ok(()), None),
            Err((why, missing)) => (Err(why), Some(missing)),
        };
        let task = arriving.running_tid.and_then(|tid| self.tasks.get(&tid));
        // The engine may detect the task's exit before this thread does.
        arriving.task_exited |= arriving.lost_reason.is_none() && task.is_some_and(Task::has_ended);
        let result = match (arriving.lost_reason.take(), result) {
            (None, _) if arriving.task_exited => Ok(()),
            (None, result) => {
                self.migrations
                    .post_copies
                    .on_failure(result.as_ref().err());
                result
            }
            // The task's processes are already killed.
            (Some(lost), _) => Err(lost),
        };
        if let (Some(task), true) = (task, missing.is_some()) {
            arriving.killed_pids.extend(task.processes().pids());
            task.kill_all();
        }
        match (result, arriving.running_tid) {
            (Ok(()), None) => {
                arriving.complete = true;
                self.migrations
                    .post_copies
                    .arriving
                    .insert(migration, arriving);
                return;
            }
            (result, Some(_)) => self.send(&FromTasker::MemoryArrived { migration, result }),
            (Err(why), None) => self.on_copy_lost(migration, why),
        }
        if let Some(missing) = missing {
            self.keep_until_dead(missing, arriving.killed_pids);
        }
    }

    /// Keeps the guard `missing` until these killed processes have exited. A killed process may
    /// still be in a long system call, and must not read zeros in place of the missing memory.
    fn keep_until_dead(&mut self, missing: UffdGuard, pids: Vec<i32>) {
        let Ok(cancel) = CancelHandle::new() else {
            return;
        };
        let work = move || {
            let deadline = Instant::now() + EXIT_TIMEOUT;
            while !pids.iter().all(|pid| stop::has_ended(*pid)) && Instant::now() < deadline {
                std::thread::sleep(POLL_INTERVAL);
            }
            drop(missing);
            WorkerResult::KilledProcessesGone
        };
        // If no thread can be started, the guard is dropped immediately, after the kill.
        let _ = self.migrations.workers.start(&cancel, None, work);
    }

    /// Discards a restored task that does not run yet, because its memory will never be complete.
    fn on_copy_lost(&mut self, migration: MigrationId, why: Failure) {
        match self.migrations.stage_of(migration) {
            Some(TargetStage::Restoring {
                worker,
                lost_reason,
                ..
            }) => {
                *lost_reason = Some(why);
                let worker = *worker;
                self.migrations.workers.cancel(worker);
            }
            Some(stage @ (TargetStage::Prepared | TargetStage::Restored { .. })) => {
                let reply = stage.lost_reply(migration, why);
                self.remove_target(migration, vec![reply]);
            }
            // The restore that follows the writing of files will detect the loss.
            Some(TargetStage::PlacingFiles { .. }) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unset_and_invalid_settings_are_distinguished() {
        assert_eq!(parse_mode(""), Ok(None));
        assert_eq!(parse_mode("never"), Ok(Some(ModeOverride::Never)));
        assert_eq!(parse_mode("always"), Ok(Some(ModeOverride::Always)));
        assert_eq!(parse_mode("no"), Err("no"));
    }
}
