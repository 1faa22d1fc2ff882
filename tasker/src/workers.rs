//! Threads for work that may take long: driving an engine or reading files. They report to the loop
//! through a channel.
//!
//! Workers create no processes except the engine and reap only the engine, so the loop remains the
//! parent of all other processes.

use crate::feasibility::Requester;
use crate::file_transfer::PlacedFiles;
use checkpoint::engine::{Cancel, MemoryServer, ReceivedPages, RestoredTask, SentPages, UffdGuard};
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::DumpReport;
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Most concurrent threads; more work is refused.
pub(crate) const WORKERS_MAX: usize = 64;

/// The result of a worker's work.
pub(crate) enum WorkerResult {
    /// A dump has ended.
    Dumped {
        migration: MigrationId,
        tid: Tid,
        /// The report, and the server of memory that is not in the images.
        result: Result<(DumpReport, Option<Box<dyn MemoryServer>>), Failure>,
    },
    /// Pre-copying the memory of a running task has ended, at the source.
    PreCopied {
        migration: MigrationId,
        /// What has been sent to the target.
        result: Result<SentPages, Failure>,
    },
    /// Receiving pre-copied memory has ended, at the target.
    PreCopyReceived {
        migration: MigrationId,
        /// All memory that was received.
        result: Result<ReceivedPages, Failure>,
    },
    /// Serving the memory of a dumped task has ended.
    Served {
        migration: MigrationId,
        tid: Tid,
        result: Result<(), Failure>,
    },
    /// The post-copied memory of a restored task is complete, or the rest will not arrive.
    MemoryArrived {
        migration: MigrationId,
        result: Result<(), (Failure, UffdGuard)>,
    },
    /// Processes that were killed because their memory is lost are dead.
    KilledProcessesGone,
    /// The delay before another dump attempt is over.
    RetryDelayOver {
        migration: MigrationId,
        tid: Tid,
        /// Why the previous attempt failed.
        failure: Failure,
    },
    /// Files transferred with a task have been placed.
    FilesPlaced {
        migration: MigrationId,
        /// The placed files; on an error none of them exists.
        result: Result<PlacedFiles, Failure>,
    },
    /// A restore has ended. The task is stopped.
    Restored {
        migration: MigrationId,
        /// The task's first process.
        result: Result<i32, Failure>,
    },
    /// The processes of a restored task have joined their control group, or failed to.
    JoinedCgroup { migration: MigrationId, done: bool },
    /// A task was inspected.
    Inspected {
        requester: Requester,
        result: Result<TaskFacts, Refusal>,
    },
    /// A task's facts were compared with this host.
    Judged {
        requester: Requester,
        verdict: Verdict,
    },
    /// The check for post-copy support, the first part of the probe.
    ProbeChecked(Result<(), Failure>),
    /// The dump of the probe.
    ProbeDumped(Result<DumpReport, Failure>),
    /// The restore of the probe.
    ProbeRestored(Result<Box<dyn RestoredTask>, Failure>),
}

/// A running worker as the loop knows it.
#[derive(Debug)]
struct Worker {
    cancel: Cancel,
    /// The engine process that the thread waits for.
    engine: Option<i32>,
}

/// All worker threads of the tasker.
pub(crate) struct Workers {
    running: BTreeMap<u64, Worker>,
    next: u64,
    sender: Sender<(u64, WorkerResult)>,
    receiver: Receiver<(u64, WorkerResult)>,
    wake: Arc<EventFd>,
}

impl Workers {
    /// Creates a pool without threads.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn new() -> io::Result<Workers> {
        let (sender, receiver) = channel();
        let wake = Arc::new(EventFd::from_flags(
            EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
        )?);
        Ok(Workers {
            running: BTreeMap::new(),
            next: 1,
            sender,
            receiver,
            wake,
        })
    }

    /// Becomes readable when results are available.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// True if no thread is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// True if a thread waits for this engine process.
    pub(crate) fn has_engine(&self, pid: i32) -> bool {
        self.running
            .values()
            .any(|worker| worker.engine == Some(pid))
    }

    /// True if another thread may be started.
    pub(crate) fn has_room(&self) -> bool {
        self.running.len() < WORKERS_MAX
    }

    /// Starts a thread and returns its number.
    ///
    /// # Errors
    /// The limit is reached or the system refused; `work` is dropped.
    pub(crate) fn start(
        &mut self,
        cancel: &Cancel,
        engine: Option<i32>,
        work: impl FnOnce() -> WorkerResult + Send + 'static,
    ) -> Result<u64, Failure> {
        if !self.has_room() {
            return Err(Failure::Engine(format!(
                "{WORKERS_MAX} migration steps are running on this host already, the limit"
            )));
        }
        let number = self.next;
        self.next += 1;
        let (sender, wake) = (self.sender.clone(), self.wake.clone());
        std::thread::Builder::new()
            .name(format!("worker-{number}"))
            .spawn(move || {
                let result = work();
                // Fails only at the end of the tasker, when the result is not needed.
                let _ = sender.send((number, result));
                let _ = wake.write(1);
            })
            .map_err(|e| Failure::Io(format!("cannot start a thread for a migration step: {e}")))?;
        self.running.insert(
            number,
            Worker {
                cancel: cancel.clone(),
                engine,
            },
        );
        Ok(number)
    }

    /// Returns the results since the last call.
    pub(crate) fn take_results(&mut self) -> Vec<WorkerResult> {
        // The eventfd is not readable if no worker has finished.
        let _ = self.wake.read();
        let mut results = Vec::new();
        while let Ok((number, result)) = self.receiver.try_recv() {
            self.running.remove(&number);
            results.push(result);
        }
        results
    }

    /// Cancels the work of a thread.
    pub(crate) fn cancel(&self, number: u64) {
        if let Some(worker) = self.running.get(&number) {
            worker.cancel.fire();
        }
    }

    /// Cancels the work of all threads.
    pub(crate) fn cancel_all(&self) {
        for worker in self.running.values() {
            worker.cancel.fire();
        }
    }
}
