//! Threads that do what may take long (drive an engine, read files) and report to the loop through a channel.
//!
//! They make no process and reap none but the engine's own, so the loop stays the only parent.

use crate::files::Made;
use crate::verdict::For;
use checkpoint::criu::{SentAhead, Store};
use checkpoint::engine::{Cancel, Held, Missing, Serving};
use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::DumpReport;
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Threads at once; more work is refused.
pub(crate) const WORKERS_MAX: usize = 64;

/// What a thread did.
pub(crate) enum Outcome {
    /// A dump.
    Dumped {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// How it went, and what has the memory that is not in the images.
        result: Result<(DumpReport, Option<Box<dyn Serving>>), Failure>,
    },
    /// Memory of a running task went ahead, or did not.
    PreCopied {
        /// The move.
        migration: MigrationId,
        /// What the target has.
        result: Result<SentAhead, Failure>,
    },
    /// Memory came ahead of a task, or does not.
    PreCopyCame {
        /// The move.
        migration: MigrationId,
        /// All of it.
        result: Result<Store, Failure>,
    },
    /// The memory of a dumped task was handed out, or is not handed out any more.
    Served {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// What the engine says of it.
        result: Result<(), Failure>,
    },
    /// The memory of a restored task is here, or will not come.
    Arrived {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<(), (Failure, Missing)>,
    },
    /// Processes that were killed because their memory does not come are dead.
    Outlived,
    /// The pause behind a dump that is to be begun again.
    Rested {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// How the dump went.
        failure: Failure,
    },
    /// Files that are carried along were put where they belong.
    Placed {
        /// The move.
        migration: MigrationId,
        /// What was made, or why nothing was.
        result: Result<Made, Failure>,
    },
    /// A restore. The task stands still.
    Restored {
        /// The move.
        migration: MigrationId,
        /// Its first process, or why there is none.
        result: Result<i32, Failure>,
    },
    /// The processes of a restored task were brought into its control group, or not.
    BroughtIn {
        /// The move.
        migration: MigrationId,
        /// Whether they were.
        done: bool,
    },
    /// A task was looked at.
    Seen {
        /// Who wants to know.
        by: For,
        /// The answer.
        result: Result<TaskFacts, Refusal>,
    },
    /// A task's facts were compared with this host.
    Judged {
        /// Who wants to know.
        by: For,
        /// The answer.
        verdict: Verdict,
    },
    /// Whether memory can follow tasks, the first part of the trial.
    TrialChecked(Result<(), Failure>),
    /// The dump of the trial.
    TrialDumped(Result<DumpReport, Failure>),
    /// The restore of the trial.
    TrialHeld(Result<Box<dyn Held>, Failure>),
}

/// One thread as the loop knows it.
#[derive(Debug)]
struct Worker {
    cancel: Cancel,
    /// The engine process that the thread waits for.
    engine: Option<i32>,
}

/// All threads.
pub(crate) struct Workers {
    running: BTreeMap<u64, Worker>,
    next: u64,
    sender: Sender<(u64, Outcome)>,
    receiver: Receiver<(u64, Outcome)>,
    wake: Arc<EventFd>,
}

impl Workers {
    /// None yet.
    ///
    /// # Errors
    /// When there is no descriptor left.
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

    /// Readable when outcomes wait.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// True when no thread runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// True if a thread waits for this process.
    pub(crate) fn waits_for(&self, pid: i32) -> bool {
        self.running
            .values()
            .any(|worker| worker.engine == Some(pid))
    }

    /// True if another thread may be started.
    pub(crate) fn has_room(&self) -> bool {
        self.running.len() < WORKERS_MAX
    }

    /// Starts a thread; its number.
    ///
    /// # Errors
    /// When there are too many or the system has none; `work` is dropped.
    pub(crate) fn start(
        &mut self,
        cancel: &Cancel,
        engine: Option<i32>,
        work: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Result<u64, Failure> {
        if !self.has_room() {
            return Err(Failure::Engine(format!(
                "{WORKERS_MAX} steps of moves run on this host already, the limit"
            )));
        }
        let number = self.next;
        self.next += 1;
        let (sender, wake) = (self.sender.clone(), self.wake.clone());
        std::thread::Builder::new()
            .name(format!("worker-{number}"))
            .spawn(move || {
                let outcome = work();
                // The loop outlives its workers but for the very end, when nobody needs the outcome.
                let _ = sender.send((number, outcome));
                let _ = wake.write(1);
            })
            .map_err(|e| Failure::Io(format!("no thread for a step of a move: {e}")))?;
        self.running.insert(
            number,
            Worker {
                cancel: cancel.clone(),
                engine,
            },
        );
        Ok(number)
    }

    /// Outcomes since the last call.
    pub(crate) fn finished(&mut self) -> Vec<Outcome> {
        // Nothing written yet is no error here.
        let _ = self.wake.read();
        let mut outcomes = Vec::new();
        while let Ok((number, outcome)) = self.receiver.try_recv() {
            self.running.remove(&number);
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Calls a thread's work off.
    pub(crate) fn cancel(&self, number: u64) {
        if let Some(worker) = self.running.get(&number) {
            worker.cancel.fire();
        }
    }

    /// Calls everything off.
    pub(crate) fn cancel_all(&self) {
        for worker in self.running.values() {
            worker.cancel.fire();
        }
    }
}
