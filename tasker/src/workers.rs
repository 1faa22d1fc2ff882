//! Worker threads for operations that may take long: controlling an engine or reading files.
//! Workers report to the main loop through a channel.
//!
//! Workers create and reap no processes except engines, so the main loop remains the parent of all
//! other processes.

use crate::dump_work::DumpResult;
use crate::feasibility::Requester;
use crate::file_transfer::PlacedFiles;
use crate::image_vault::ImageDir;
use checkpoint::engine::{
    CancelHandle, EngineFailure, ReceivedPages, RestoredTask, SentPages, UffdGuard,
};
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::DumpReport;
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Maximum number of concurrent workers. A further operation fails.
pub(crate) const WORKERS_MAX: usize = 64;

/// The result of a worker.
pub(crate) enum WorkerResult {
    /// A dump has ended, successfully or not.
    Dumped {
        migration: MigrationId,
        tid: Tid,
        result: DumpResult,
    },
    /// The source's part of a pre-copy has ended: sending the memory of a running task.
    PreCopied {
        migration: MigrationId,
        /// The record of the pages that were sent to the target.
        result: Result<SentPages, Failure>,
    },
    /// The target's part of a pre-copy has ended: receiving the memory.
    PreCopyReceived {
        migration: MigrationId,
        /// The pages that were received.
        result: Result<ReceivedPages, Failure>,
    },
    /// Serving the memory of a dumped task has ended.
    MemoryServed {
        migration: MigrationId,
        tid: Tid,
        result: Result<(), Failure>,
    },
    /// Post-copy of a restored task has ended: all its memory has arrived, or some memory will not
    /// arrive.
    MemoryArrived {
        migration: MigrationId,
        result: Result<(), (Failure, UffdGuard)>,
    },
    /// Processes that were killed because their memory was lost have ended.
    KilledProcessesEnded,
    /// The delay before another dump attempt is over.
    RetryDelayOver {
        migration: MigrationId,
        tid: Tid,
        /// Why the previous attempt failed.
        failure: Failure,
    },
    /// The seal of the images of an arriving task was checked.
    ImagesTakenIn {
        migration: MigrationId,
        /// The directory with the images.
        result: Result<ImageDir, Failure>,
    },
    /// The files that were transferred with a task have been written.
    FilesPlaced {
        migration: MigrationId,
        /// The written files. On an error no written file remains.
        result: Result<PlacedFiles, Failure>,
    },
    /// A restore has ended, successfully or not. A restored task is stopped.
    Restored {
        migration: MigrationId,
        /// PID of the task's first process.
        result: Result<i32, EngineFailure>,
    },
    /// The worker that adds the processes of a restored task to their control group has ended.
    JoinedControlGroup {
        migration: MigrationId,
        succeeded: bool,
    },
    /// The worker that adds the engine of a prepared restore to the task's control group has ended.
    EngineJoinedGroup {
        migration: MigrationId,
        succeeded: bool,
    },
    /// A task was inspected for a migration or a query.
    Inspected {
        requester: Requester,
        result: Result<TaskFacts, Refusal>,
    },
    /// This host has been checked against the facts of a task.
    FeasibilityChecked {
        requester: Requester,
        verdict: Verdict,
    },
    /// The first step of the engine's probe, the check for post-copy support, has ended.
    ProbeChecked(Result<(), Failure>),
    /// The dump of the engine's probe has ended.
    ProbeDumped(Result<DumpReport, EngineFailure>),
    /// The restore of the engine's probe has ended.
    ProbeRestored(Result<Box<dyn RestoredTask>, EngineFailure>),
}

impl WorkerResult {
    /// Returns the migration that the result belongs to; `None` for queries and probes.
    pub(crate) fn migration_id(&self) -> Option<MigrationId> {
        match self {
            Self::Dumped { migration, .. }
            | Self::PreCopied { migration, .. }
            | Self::PreCopyReceived { migration, .. }
            | Self::MemoryServed { migration, .. }
            | Self::MemoryArrived { migration, .. }
            | Self::RetryDelayOver { migration, .. }
            | Self::ImagesTakenIn { migration, .. }
            | Self::FilesPlaced { migration, .. }
            | Self::Restored { migration, .. }
            | Self::JoinedControlGroup { migration, .. }
            | Self::EngineJoinedGroup { migration, .. } => Some(*migration),
            Self::Inspected { requester, .. } | Self::FeasibilityChecked { requester, .. } => {
                match requester {
                    Requester::Migration { migration, .. } => Some(*migration),
                    _ => None,
                }
            }
            Self::KilledProcessesEnded
            | Self::ProbeChecked(_)
            | Self::ProbeDumped(_)
            | Self::ProbeRestored(_) => None,
        }
    }
}

/// The main loop's record of a running worker.
#[derive(Debug)]
struct RunningWorker {
    cancel: CancelHandle,
    /// PID of the engine process that the worker waits for, if any.
    engine_pid: Option<i32>,
}

/// All worker threads of the tasker.
pub(crate) struct Workers {
    running: BTreeMap<u64, RunningWorker>,
    next_id: u64,
    sender: Sender<(u64, WorkerResult)>,
    receiver: Receiver<(u64, WorkerResult)>,
    results_event: Arc<EventFd>,
}

impl Workers {
    /// Creates a pool without workers.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(crate) fn new() -> io::Result<Self> {
        let (sender, receiver) = channel();
        let results_event = Arc::new(EventFd::from_flags(
            EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
        )?);
        Ok(Self {
            running: BTreeMap::new(),
            next_id: 1,
            sender,
            receiver,
            results_event,
        })
    }

    /// Returns a descriptor that becomes readable when results are available.
    pub(crate) fn results_fd(&self) -> BorrowedFd<'_> {
        self.results_event.as_fd()
    }

    /// True if no worker is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// True if a worker waits for this engine process.
    pub(crate) fn owns_engine(&self, pid: i32) -> bool {
        self.running
            .values()
            .any(|worker| worker.engine_pid == Some(pid))
    }

    /// True if another worker may be started.
    pub(crate) fn can_start_worker(&self) -> bool {
        self.running.len() < WORKERS_MAX
    }

    /// Starts a worker that executes `work`, and returns the worker's id. `engine_pid` is the PID
    /// of the engine process that the worker waits for.
    ///
    /// # Errors
    /// [`WORKERS_MAX`] workers are running, or no thread can be created; `work` is dropped.
    pub(crate) fn start_worker(
        &mut self,
        cancel: &CancelHandle,
        engine_pid: Option<i32>,
        work: impl FnOnce() -> WorkerResult + Send + 'static,
    ) -> Result<u64, Failure> {
        if !self.can_start_worker() {
            return Err(Failure::Engine(format!(
                "{WORKERS_MAX} migration steps are running on this host already, the limit"
            )));
        }
        let worker_id = self.next_id;
        self.next_id += 1;
        let (sender, results_event) = (self.sender.clone(), self.results_event.clone());
        let log_span = tracing::Span::current();
        std::thread::Builder::new()
            .name(format!("worker-{worker_id}"))
            .spawn(move || {
                let result = log_span.in_scope(work);
                // Sending fails only when the tasker ends and does not need the result.
                let _ = sender.send((worker_id, result));
                let _ = results_event.write(1);
            })
            .map_err(|e| Failure::Io(format!("cannot start a thread for a migration step: {e}")))?;
        self.running.insert(
            worker_id,
            RunningWorker {
                cancel: cancel.clone(),
                engine_pid,
            },
        );
        Ok(worker_id)
    }

    /// Returns the results of the workers that have finished since the last call.
    pub(crate) fn take_results(&mut self) -> Vec<WorkerResult> {
        // Reading clears the event. The event is not set if no worker has finished.
        let _ = self.results_event.read();
        let mut results = Vec::new();
        while let Ok((number, result)) = self.receiver.try_recv() {
            self.running.remove(&number);
            results.push(result);
        }
        results
    }

    /// Cancels the work of one worker.
    pub(crate) fn cancel_worker(&self, worker_id: u64) {
        if let Some(worker) = self.running.get(&worker_id) {
            worker.cancel.fire();
        }
    }

    /// Cancels the work of all workers.
    pub(crate) fn cancel_all(&self) {
        for worker in self.running.values() {
            worker.cancel.fire();
        }
    }
}
