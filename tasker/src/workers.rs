//! Worker threads for operations that may take long: controlling an engine or reading files.
//! Workers report to the main loop through a channel.
//!
//! Workers create no processes except the engine and reap only the engine, so the main loop remains
//! the parent of all other processes.

use crate::feasibility::Requester;
use crate::file_transfer::PlacedFiles;
use checkpoint::engine::{
    CancelHandle, MemoryServer, ReceivedPages, RestoredTask, SentPages, UffdGuard,
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

/// Maximum number of concurrent workers. Further work is refused.
pub(crate) const WORKERS_MAX: usize = 64;

/// The result of a worker.
pub(crate) enum WorkerResult {
    /// A dump has ended, successfully or not.
    Dumped {
        migration: MigrationId,
        tid: Tid,
        /// The report of the dump, and with post-copy the server of the memory that is not in the
        /// images.
        result: Result<(DumpReport, Option<Box<dyn MemoryServer>>), Failure>,
    },
    /// Pre-copying the memory of a running task has ended, at the source.
    PreCopied {
        migration: MigrationId,
        /// The pages that were sent to the target.
        result: Result<SentPages, Failure>,
    },
    /// Receiving pre-copied memory has ended, at the target.
    PreCopyReceived {
        migration: MigrationId,
        /// The pages that were received.
        result: Result<ReceivedPages, Failure>,
    },
    /// Serving the memory of a dumped task has ended.
    Served {
        migration: MigrationId,
        tid: Tid,
        result: Result<(), Failure>,
    },
    /// All post-copied memory of a restored task has arrived, or some memory will not arrive.
    MemoryArrived {
        migration: MigrationId,
        result: Result<(), (Failure, UffdGuard)>,
    },
    /// Processes that were killed because their memory is lost have exited.
    KilledProcessesGone,
    /// The delay before another dump attempt is over.
    RetryDelayOver {
        migration: MigrationId,
        tid: Tid,
        /// Why the previous attempt failed.
        failure: Failure,
    },
    /// The files that were transferred with a task have been written.
    FilesPlaced {
        migration: MigrationId,
        /// The written files. On an error none of the files exists.
        result: Result<PlacedFiles, Failure>,
    },
    /// A restore has ended, successfully or not. A restored task is stopped.
    Restored {
        migration: MigrationId,
        /// PID of the task's first process.
        result: Result<i32, Failure>,
    },
    /// The processes of a restored task were added to their control group (`done`), or adding them
    /// failed.
    JoinedCgroup {
        migration: MigrationId,
        succeeded: bool,
    },
    /// A task was inspected for a migration or a query.
    Inspected {
        requester: Requester,
        result: Result<TaskFacts, Refusal>,
    },
    /// This host was checked against the facts of a task.
    Judged {
        requester: Requester,
        verdict: Verdict,
    },
    /// The first step of the engine's probe, the check for post-copy support, has ended.
    ProbeChecked(Result<(), Failure>),
    /// The dump of the engine's probe has ended.
    ProbeDumped(Result<DumpReport, Failure>),
    /// The restore of the engine's probe has ended.
    ProbeRestored(Result<Box<dyn RestoredTask>, Failure>),
}

impl WorkerResult {
    /// Returns the migration that the work was done for.
    pub(crate) fn migration(&self) -> Option<MigrationId> {
        match self {
            WorkerResult::Dumped { migration, .. }
            | WorkerResult::PreCopied { migration, .. }
            | WorkerResult::PreCopyReceived { migration, .. }
            | WorkerResult::Served { migration, .. }
            | WorkerResult::MemoryArrived { migration, .. }
            | WorkerResult::RetryDelayOver { migration, .. }
            | WorkerResult::FilesPlaced { migration, .. }
            | WorkerResult::Restored { migration, .. }
            | WorkerResult::JoinedCgroup { migration, .. } => Some(*migration),
            WorkerResult::Inspected { requester, .. } | WorkerResult::Judged { requester, .. } => {
                match requester {
                    Requester::Migration { migration, .. } => Some(*migration),
                    _ => None,
                }
            }
            WorkerResult::KilledProcessesGone
            | WorkerResult::ProbeChecked(_)
            | WorkerResult::ProbeDumped(_)
            | WorkerResult::ProbeRestored(_) => None,
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
    pub(crate) fn new() -> io::Result<Workers> {
        let (sender, receiver) = channel();
        let wake = Arc::new(EventFd::from_flags(
            EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
        )?);
        Ok(Workers {
            running: BTreeMap::new(),
            next_id: 1,
            sender,
            receiver,
            results_event: wake,
        })
    }

    /// Returns a descriptor that becomes readable when results are available.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.results_event.as_fd()
    }

    /// True if no worker is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// True if a worker waits for this engine process.
    pub(crate) fn has_engine(&self, pid: i32) -> bool {
        self.running
            .values()
            .any(|worker| worker.engine_pid == Some(pid))
    }

    /// True if another worker may be started.
    pub(crate) fn can_start_worker(&self) -> bool {
        self.running.len() < WORKERS_MAX
    }

    /// Starts a worker that executes `work`, and returns the worker's id. `engine` is the engine
    /// process that the worker waits for.
    ///
    /// # Errors
    /// The limit is reached or the system refused; `work` is dropped.
    pub(crate) fn start(
        &mut self,
        cancel: &CancelHandle,
        engine: Option<i32>,
        work: impl FnOnce() -> WorkerResult + Send + 'static,
    ) -> Result<u64, Failure> {
        if !self.can_start_worker() {
            return Err(Failure::Engine(format!(
                "{WORKERS_MAX} migration steps are running on this host already, the limit"
            )));
        }
        let number = self.next_id;
        self.next_id += 1;
        let (sender, wake) = (self.sender.clone(), self.results_event.clone());
        let span = tracing::Span::current();
        std::thread::Builder::new()
            .name(format!("worker-{number}"))
            .spawn(move || {
                let result = span.in_scope(work);
                // Fails only when the tasker ends, when the result is not needed.
                let _ = sender.send((number, result));
                let _ = wake.write(1);
            })
            .map_err(|e| Failure::Io(format!("cannot start a thread for a migration step: {e}")))?;
        self.running.insert(
            number,
            RunningWorker {
                cancel: cancel.clone(),
                engine_pid: engine,
            },
        );
        Ok(number)
    }

    /// Returns the results since the last call.
    pub(crate) fn take_results(&mut self) -> Vec<WorkerResult> {
        // Clears the event. It is not set if no worker has finished.
        let _ = self.results_event.read();
        let mut results = Vec::new();
        while let Ok((number, result)) = self.receiver.try_recv() {
            self.running.remove(&number);
            results.push(result);
        }
        results
    }

    /// Cancels the work of one worker.
    pub(crate) fn cancel(&self, number: u64) {
        if let Some(worker) = self.running.get(&number) {
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
