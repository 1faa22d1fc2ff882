//! Post-copy: transfers memory after its task has migrated.
//!
//! - The source serves the memory after the images are written, and continues to serve it after the
//!   task was killed.
//! - The target receives the memory while the task already runs.
//! - The two daemons forward the memory. Each has a socket for the memory, to which its tasker
//!   connects.

use crate::census::Census;
use crate::image_vault::ImageDir;
use crate::stop;
use crate::supervisor::Supervisor;
use crate::target::TargetStage;
use crate::task::{Task, TaskPhase};
use crate::task_user::with_own_file_rights;
use crate::workers::WorkerResult;
use checkpoint::engine::{
    CallLimits, CancelHandle, EngineFailure, FailedPart, FetchCompletion, MemoryServer,
    ReceivedPages, ServedMemory, UffdGuard,
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

/// Minimum resident memory in bytes of a task for post-copy. For a smaller task, post-copy hardly
/// shortens the time for which the task is stopped.
const POST_COPY_BYTES_MIN: u64 = 16 << 20;
/// Environment variable that selects when post-copy is used: `never` or `always`. If the variable
/// is not set, post-copy is used for tasks of at least [`POST_COPY_BYTES_MIN`] bytes.
const POST_COPY_VARIABLE: &str = "SEMPA_POST_COPY";
/// Time after a failure during which post-copy is not used.
const FAILURE_BACKOFF: Duration = Duration::from_secs(600);
/// Time limit for killed processes to exit. Usually they exit much sooner.
const KILLED_EXIT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Time limit of a transfer, far above the duration of any real transfer. The daemons, not this
/// limit, detect a stalled transfer.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// The tasks for which post-copy is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PostCopyMode {
    Never,
    LargeTasks,
    AllTasks,
}

/// The value of an environment variable that overrides when post-copy or pre-copy is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModeOverride {
    Never,
    Always,
}

/// Reads a mode from an environment variable; `None` if the variable is not set. An invalid value
/// counts as `never`, the mode that cannot lose memory; then a warning that ends with `consequence`
/// is logged.
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

/// The post-copied memory of one task that is arriving at this host.
#[derive(Debug)]
struct ArrivingMemory {
    /// Id of the worker thread that waits for the memory.
    worker_id: u64,
    /// Reports whether memory is still missing.
    fetch_completion: FetchCompletion,
    /// Tid of the task; `None` until the task runs.
    running_tid: Option<Tid>,
    is_complete: bool,
    /// Why the missing memory will not arrive; `None` if no memory is lost.
    lost_reason: Option<Failure>,
    /// True if the task has exited and needs no more memory.
    task_exited: bool,
    /// PIDs of the processes that were killed because their memory is lost.
    killed_pids: Vec<i32>,
}

/// Why post-copy is not possible on this host. Tasks then migrate with their whole memory in the
/// images.
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
    /// Whether this host supports post-copy; `Err` contains the reason why not. The probe of the
    /// engine sets this field.
    pub(crate) support: Result<(), PostCopyUnavailable>,
    /// Time of the last failure of a post-copy.
    failed_at: Option<Instant>,
    served_memory: BTreeMap<MigrationId, ServedMemory>,
    arriving_memory: BTreeMap<MigrationId, ArrivingMemory>,
}

impl PostCopies {
    /// Reads the mode of post-copy from the environment.
    pub(crate) fn new() -> Self {
        let mode = match mode_override(POST_COPY_VARIABLE, "post-copy is not used") {
            Some(ModeOverride::Never) => PostCopyMode::Never,
            Some(ModeOverride::Always) => PostCopyMode::AllTasks,
            None => PostCopyMode::LargeTasks,
        };
        let (served_memory, incoming_memory) = (BTreeMap::new(), BTreeMap::new());
        Self {
            mode,
            support: Err(PostCopyUnavailable::NotProbed),
            failed_at: None,
            served_memory,
            arriving_memory: incoming_memory,
        }
    }

    /// True if post-copy may be used on this host: it is supported, not disabled, and has not
    /// failed recently.
    pub(crate) fn is_available(&self) -> bool {
        let has_failed_recently = self
            .failed_at
            .is_some_and(|failed_at| failed_at.elapsed() < FAILURE_BACKOFF);
        self.mode != PostCopyMode::Never && self.support.is_ok() && !has_failed_recently
    }

    /// True if post-copy must be used for a task with these facts.
    pub(crate) fn is_used_for(&self, facts: &TaskFacts) -> bool {
        self.is_available()
            && (self.mode == PostCopyMode::AllTasks || facts.memory_bytes >= POST_COPY_BYTES_MIN)
    }

    /// True from the start of the fetch of this migration's memory, until all memory has arrived
    /// and the task runs.
    pub(crate) fn is_memory_arriving(&self, migration: MigrationId) -> bool {
        self.arriving_memory.contains_key(&migration)
    }

    /// Disables post-copy for [`FAILURE_BACKOFF`] if the failure is about missing memory, and this
    /// host or its engine may have caused it. After any other failure a migration without post-copy
    /// would be no more likely to succeed.
    pub(crate) fn back_off_after_failure(&mut self, failure: Option<&EngineFailure>) {
        if let Some(EngineFailure {
            failure: failure @ (Failure::Engine(_) | Failure::Io(_) | Failure::Deadline { .. }),
            failed_part: FailedPart::MissingMemory,
        }) = failure
        {
            tracing::warn!(
                "post-copy is disabled for {} minutes: {failure}",
                FAILURE_BACKOFF.as_secs() / 60
            );
            self.failed_at = Some(Instant::now());
        }
    }

    /// Keeps the memory of a task that is about to be killed, because it runs on another host and
    /// still needs the memory.
    pub(crate) fn keep_memory_after_kill(&self, migration: MigrationId) {
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
    let connect_failure = |e| {
        Failure::Io(format!(
            "no connection for its memory: {}: {e}",
            path.display()
        ))
    };
    UnixStream::connect(path)
        .map(OwnedFd::from)
        .map_err(connect_failure)
}

/// Shuts this socket down in both directions. Blocked reads and writes of other threads return.
pub(crate) fn shut_down_socket(socket: &OwnedFd) {
    // Fails only if the peer has closed the socket.
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

    /// Starts a worker that serves the part of a dumped task's memory that is not in the images.
    pub(crate) fn serve_memory(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        memory_server: Box<dyn MemoryServer>,
    ) -> Result<(), Failure> {
        let (limits, memory) = (transfer_limits()?, memory_server.handle());
        let cancel = limits.cancel.clone();
        let work = move || WorkerResult::MemoryServed {
            migration,
            tid,
            result: memory_server.wait_until_served(&limits),
        };
        let worker_id = self.migrations.workers.start_worker(&cancel, None, work)?;
        self.migrations
            .post_copies
            .served_memory
            .insert(migration, memory);
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.phase = TaskPhase::ServingMemory {
                migration,
                worker_id,
                aborted: false,
            };
        }
        Ok(())
    }

    /// Stops serving memory, because the migration was aborted or its task has exited.
    pub(crate) fn stop_serving(&self, migration: MigrationId, worker_id: u64) {
        if let Some(memory) = self.migrations.post_copies.served_memory.get(&migration) {
            memory.stop_serving();
        }
        self.migrations.workers.cancel_worker(worker_id);
    }

    /// Handles the end of serving the memory of a task. Continues the task if its migration was
    /// aborted.
    pub(crate) fn on_memory_served(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        result: &Result<(), Failure>,
    ) {
        self.migrations.post_copies.served_memory.remove(&migration);
        let Some(task) = self.tasks.get_mut(&tid) else {
            return self.stop_leftover_stragglers(tid);
        };
        let TaskPhase::ServingMemory {
            migration: phase_migration,
            aborted,
            ..
        } = task.phase
        else {
            return;
        };
        if phase_migration != migration {
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

    /// Starts to fetch the memory of a task that is about to be restored from `image_dir`.
    /// `socket_path` is the daemon's socket for the memory.
    pub(crate) fn start_fetch(
        &mut self,
        migration: MigrationId,
        image_dir: &ImageDir,
        socket_path: &Path,
    ) -> Result<(), Failure> {
        let completed_pre_copy = self.migrations.pre_copies.take_received_pages(migration)?;
        let engine = self
            .migrations
            .engine
            .as_ref()
            .ok_or_else(|| self.engine_failure())?;
        let (stream, received_pages) = match completed_pre_copy {
            Some((stream, received_pages)) => {
                let stream = stream
                    .try_clone()
                    .map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
                (stream, received_pages)
            }
            None => (connect_memory_socket(socket_path)?, ReceivedPages::empty()),
        };
        let running_fetch =
            with_own_file_rights(|| engine.start_fetch(image_dir.path(), stream, received_pages))?;
        let (limits, pid, memory_completion) = (
            transfer_limits()?,
            running_fetch.engine_pid(),
            running_fetch.completion(),
        );
        let cancel = limits.cancel.clone();
        // The engine reads the images until all memory has arrived.
        let image_dir = image_dir.clone();
        let work = move || {
            let result = with_own_file_rights(|| running_fetch.wait_until_fetched(&limits));
            drop(image_dir);
            WorkerResult::MemoryArrived { migration, result }
        };
        let worker_id = self
            .migrations
            .workers
            .start_worker(&cancel, Some(pid), work)?;
        let arriving_memory = ArrivingMemory {
            worker_id,
            fetch_completion: memory_completion,
            running_tid: None,
            is_complete: false,
            lost_reason: None,
            task_exited: false,
            killed_pids: Vec::new(),
        };
        self.migrations
            .post_copies
            .arriving_memory
            .insert(migration, arriving_memory);
        Ok(())
    }

    /// Records that the restored task of this migration runs. If all its memory has arrived,
    /// reports that to the daemon.
    pub(crate) fn on_restored_task_runs(&mut self, migration: MigrationId, tid: Tid) {
        let Some(memory_state) = self
            .migrations
            .post_copies
            .arriving_memory
            .get_mut(&migration)
        else {
            return;
        };
        memory_state.running_tid = Some(tid);
        if memory_state.is_complete {
            self.migrations
                .post_copies
                .arriving_memory
                .remove(&migration);
            self.send(&FromTasker::MemoryArrived {
                migration,
                result: Ok(()),
            });
        }
    }

    /// Cancels the pre-copy and the fetch of memory for a restored task that is discarded.
    pub(crate) fn cancel_fetch(&mut self, migration: MigrationId) {
        self.migrations
            .pre_copies
            .remove_incoming_pre_copy(migration);
        if let Some(arriving) = self
            .migrations
            .post_copies
            .arriving_memory
            .remove(&migration)
        {
            self.migrations.workers.cancel_worker(arriving.worker_id);
        }
    }

    /// Cancels the fetch of memory for a task that has exited. Kills the remaining processes of the
    /// task, because they would need the memory.
    pub(crate) fn cancel_fetch_of_exited(&mut self, task: &Task) {
        let tid = task.tid;
        for memory_state in self
            .migrations
            .post_copies
            .arriving_memory
            .values_mut()
            .filter(|memory_state| memory_state.running_tid == Some(tid))
        {
            // If memory was lost, the task did not exit by itself: the tasker has killed it.
            memory_state.task_exited = memory_state.lost_reason.is_none();
            task.kill_immediately(&Census::default());
            memory_state.killed_pids = task.processes().pids();
            self.migrations
                .workers
                .cancel_worker(memory_state.worker_id);
        }
    }

    /// Handles the daemon's report that no more memory will arrive. Aborts a pre-copy and reports
    /// its loss to the daemon. If a fetch lacks memory, kills all processes that need the memory
    /// and then cancels the fetch.
    pub(crate) fn on_memory_lost(&mut self, migration: MigrationId, why: String) {
        if self
            .migrations
            .pre_copies
            .abort_incoming_pre_copy(migration)
        {
            self.send(&FromTasker::PreCopyLost {
                migration,
                failure: Failure::Images(why.clone()),
            });
        }
        let memory_state = self
            .migrations
            .post_copies
            .arriving_memory
            .get_mut(&migration);
        let Some(memory_state) =
            memory_state.filter(|memory_state| !memory_state.fetch_completion.close_if_complete())
        else {
            return;
        };
        memory_state.lost_reason = Some(Failure::Images(why));
        let (running_tid, worker_id) = (memory_state.running_tid, memory_state.worker_id);
        if let Some(task) = running_tid.and_then(|tid| self.tasks.get(&tid)) {
            let census = Census::default();
            memory_state.killed_pids = task.processes().pids_in(&census);
            task.kill_immediately(&census);
        }
        self.migrations.workers.cancel_worker(worker_id);
    }

    /// Handles the completion or failure of a fetch. If memory is missing, kills the task, or
    /// discards it if it does not run yet. Reports the result for a running task to the daemon; the
    /// result for a task that does not run yet is reported later.
    pub(crate) fn on_fetch_ended(
        &mut self,
        migration: MigrationId,
        result: Result<(), (Failure, UffdGuard)>,
    ) {
        let Some(mut memory_state) = self
            .migrations
            .post_copies
            .arriving_memory
            .remove(&migration)
        else {
            return;
        };
        let (result, missing_memory) = match result {
            Ok(()) => (Ok(()), None),
            Err((why, missing_memory)) => (Err(why), Some(missing_memory)),
        };
        let task = memory_state
            .running_tid
            .and_then(|tid| self.tasks.get(&tid));
        // The engine may detect the task's exit before this thread does.
        memory_state.task_exited |=
            memory_state.lost_reason.is_none() && task.is_some_and(Task::has_first_process_ended);
        let result = match (memory_state.lost_reason.take(), result) {
            (None, _) if memory_state.task_exited => Ok(()),
            (None, result) => {
                let failure = result.as_ref().err().cloned();
                let failure = failure.map(EngineFailure::missing_memory);
                // The fetch also ends when the engine that restores the task fails. The end of the
                // restore tells which of the two failed first.
                if memory_state.running_tid.is_some() || !self.migrations.is_restoring(migration) {
                    self.migrations
                        .post_copies
                        .back_off_after_failure(failure.as_ref());
                }
                result
            }
            // The task's processes are already killed.
            (Some(lost_reason), _) => Err(lost_reason),
        };
        if let (Some(task), true) = (task, missing_memory.is_some()) {
            let census = Census::default();
            let pids = task.processes().pids_in(&census);
            memory_state.killed_pids.extend(pids);
            task.kill_immediately(&census);
        }
        match (result, memory_state.running_tid) {
            (Ok(()), None) => {
                memory_state.is_complete = true;
                self.migrations
                    .post_copies
                    .arriving_memory
                    .insert(migration, memory_state);
                return;
            }
            (result, Some(_)) => self.send(&FromTasker::MemoryArrived { migration, result }),
            (Err(why), None) => self.discard_incomplete_copy(migration, why),
        }
        if let Some(missing_memory) = missing_memory {
            self.keep_guard_until_exit(missing_memory, memory_state.killed_pids);
        }
    }

    /// Keeps the guard `missing_memory` until the killed processes `pids` have exited, but at most
    /// [`KILLED_EXIT_TIMEOUT`]. A killed process may still be in a long system call, and must not
    /// read zeros in place of the missing memory.
    fn keep_guard_until_exit(&mut self, missing_memory: UffdGuard, pids: Vec<i32>) {
        let Ok(cancel) = CancelHandle::new() else {
            return;
        };
        let work = move || {
            let deadline = Instant::now() + KILLED_EXIT_TIMEOUT;
            while !pids.iter().all(|pid| stop::has_ended(*pid)) && Instant::now() < deadline {
                std::thread::sleep(POLL_INTERVAL);
            }
            drop(missing_memory);
            WorkerResult::KilledProcessesEnded
        };
        // If no thread can be started, the guard is dropped immediately. The processes are already
        // killed.
        let _ = self.migrations.workers.start_worker(&cancel, None, work);
    }

    /// Discards a restored task that does not run yet and whose memory is lost.
    fn discard_incomplete_copy(&mut self, migration: MigrationId, why: Failure) {
        match self.migrations.incoming_stage(migration) {
            Some(TargetStage::Restoring {
                worker_id: active_worker_id,
                lost_reason,
                ..
            }) => {
                *lost_reason = Some(why);
                let active_worker_id = *active_worker_id;
                self.migrations.workers.cancel_worker(active_worker_id);
            }
            Some(stage @ (TargetStage::Prepared | TargetStage::Restored { .. })) => {
                let reply = stage.lost_reply(migration, why);
                self.remove_incoming_task(migration, vec![reply]);
            }
            // The images are still being checked, or the files written. The restore that follows
            // detects the loss.
            Some(TargetStage::TakingImagesIn { .. } | TargetStage::PlacingFiles { .. }) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Post-copy is disabled after a failure that is about missing memory, and after no other.
    #[test]
    fn only_missing_memory_disables_post_copy() {
        let is_available_after = |failure: EngineFailure| {
            let mut post_copies = PostCopies {
                mode: PostCopyMode::LargeTasks,
                support: Ok(()),
                failed_at: None,
                served_memory: BTreeMap::new(),
                arriving_memory: BTreeMap::new(),
            };
            post_copies.back_off_after_failure(Some(&failure));
            post_copies.is_available()
        };
        let traced = Failure::Engine("the namespace's init is traced".into());
        assert!(is_available_after(traced.clone().into()));
        assert!(!is_available_after(EngineFailure::missing_memory(traced)));
        // The other host has given the transfer up.
        let lost = Failure::Images("lost".into());
        assert!(is_available_after(EngineFailure::missing_memory(lost)));
    }

    #[test]
    fn unset_and_invalid_settings_are_distinguished() {
        assert_eq!(parse_mode(""), Ok(None));
        assert_eq!(parse_mode("never"), Ok(Some(ModeOverride::Never)));
        assert_eq!(parse_mode("always"), Ok(Some(ModeOverride::Always)));
        assert_eq!(parse_mode("no"), Err("no"));
    }
}
