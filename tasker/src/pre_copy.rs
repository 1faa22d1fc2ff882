//! Pre-copy: sends memory to the target while the task still runs at the source. The target stores
//! the memory until post-copy requests the remaining memory on the same socket
//! ([`crate::post_copy`]).

use crate::migrations::total_memory_bytes;
use crate::post_copy::{ModeOverride, connect_memory_socket, mode_override, shut_down_socket};
use crate::supervisor::Supervisor;
use crate::task::TaskPhase;
use crate::workers::WorkerResult;
use checkpoint::criu::acknowledge_pre_copy;
use checkpoint::engine::{PreCopyStopCondition, ReceivedPages, SentPages};
use sempa_proto::migration::{Failure, TaskFacts};
use sempa_proto::tasker::FromTasker;
use sempa_proto::{MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum resident memory in bytes of a task for pre-copy. Smaller tasks migrate faster by
/// post-copy alone.
const PRE_COPY_BYTES_MIN: u64 = 64 << 20;
/// Transfer rate in bytes per second above which pre-copy stops.
///
/// After the transfer, pre-copied memory is inserted into the task at about 370 MB/s. At this rate
/// limit, the whole migration takes two fifths longer than without pre-copy; at higher rates it
/// takes up to twice as long.
const PRE_COPY_RATE_MAX_BYTES_PER_SECOND: u64 = 150_000_000;
/// Environment variable that selects when a post-copy is preceded by a pre-copy: `never` or
/// `always`. If the variable is not set, pre-copy is used for tasks of at least
/// [`PRE_COPY_BYTES_MIN`] bytes, up to the rate [`PRE_COPY_RATE_MAX_BYTES_PER_SECOND`].
const PRE_COPY_VARIABLE: &str = "SEMPA_PRE_COPY";
/// Maximum number of bytes that a pre-copy may send beyond the task's memory at the feasibility
/// check. Further memory is post-copied.
const ACCEPTED_GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Time limit of a pre-copy of a task without memory. It is far below the time limit of the
/// migration step. When it has passed, the remaining memory is post-copied.
const PRE_COPY_TIMEOUT_BASE: Duration = Duration::from_secs(300);
/// Additional time limit of a pre-copy for each GiB of memory.
const PRE_COPY_TIMEOUT_PER_GIB: Duration = Duration::from_secs(300);

/// A pre-copy from this host.
#[derive(Debug)]
struct OutgoingPreCopy {
    tid: Tid,
    stream: Arc<OwnedFd>,
    stop_condition: PreCopyStopCondition,
    /// The pages that were sent; `None` until all of them are at the target.
    sent_pages: Option<Arc<SentPages>>,
}

/// A pre-copy to this host.
#[derive(Debug)]
struct IncomingPreCopy {
    stream: Arc<OwnedFd>,
    /// The received pages; `None` until all of them have arrived.
    received_pages: Option<ReceivedPages>,
}

/// The state of all pre-copies from this host and to it. The limits on workers and on migrations
/// bound their number.
#[derive(Debug)]
pub(crate) struct PreCopies {
    /// Minimum resident memory in bytes for pre-copy; `None` if pre-copy is disabled.
    bytes_min: Option<u64>,
    /// Tasks of this host whose last pre-copy has failed. They migrate without pre-copy.
    failed_tasks: BTreeSet<Tid>,
    outgoing: BTreeMap<MigrationId, OutgoingPreCopy>,
    incoming_pre_copies: BTreeMap<MigrationId, IncomingPreCopy>,
}

impl PreCopies {
    /// Reads the mode of pre-copy from the environment.
    pub(crate) fn new() -> Self {
        let bytes_min = match mode_override(PRE_COPY_VARIABLE, "pre-copy is not used") {
            Some(ModeOverride::Never) => None,
            Some(ModeOverride::Always) => Some(0),
            None => Some(PRE_COPY_BYTES_MIN),
        };
        Self::with_bytes_min(bytes_min)
    }

    fn with_bytes_min(bytes_min: Option<u64>) -> Self {
        Self {
            bytes_min,
            failed_tasks: BTreeSet::new(),
            outgoing: BTreeMap::new(),
            incoming_pre_copies: BTreeMap::new(),
        }
    }

    /// True if pre-copy must precede the post-copy of this task. Post-copy itself is a condition
    /// that the caller checks.
    pub(crate) fn is_used_for(&self, tid: Tid, facts: &TaskFacts) -> bool {
        !self.failed_tasks.contains(&tid)
            && self
                .bytes_min
                .is_some_and(|bytes_min| facts.memory_bytes >= bytes_min)
    }

    /// True if pre-copy is used even at rates above [`PRE_COPY_RATE_MAX_BYTES_PER_SECOND`].
    fn ignores_rate_limit(&self) -> bool {
        self.bytes_min == Some(0)
    }

    /// Removes a completed pre-copy at the source. Returns its socket and the record of the sent
    /// pages, for the dump; `None` if the migration has no completed pre-copy.
    pub(crate) fn take_sent_pages(
        &mut self,
        migration: MigrationId,
    ) -> Option<(Arc<OwnedFd>, Arc<SentPages>)> {
        let pre_copy = self.outgoing.remove(&migration)?;
        Some((pre_copy.stream, pre_copy.sent_pages?))
    }

    /// Removes the pre-copy of this migration at the target. Returns its socket and the received
    /// memory, for the restore; `None` if the migration has no pre-copy.
    ///
    /// # Errors
    /// The pre-copied memory was expected and has not arrived.
    pub(crate) fn take_received_pages(
        &mut self,
        migration: MigrationId,
    ) -> Result<Option<(Arc<OwnedFd>, ReceivedPages)>, Failure> {
        let Some(IncomingPreCopy {
            stream,
            received_pages,
        }) = self.incoming_pre_copies.remove(&migration)
        else {
            return Ok(None);
        };
        let received_pages = received_pages
            .ok_or_else(|| Failure::Images("its pre-copied memory has not arrived".into()))?;
        Ok(Some((stream, received_pages)))
    }

    /// Stops the pre-copies of this task early, because they no longer shorten its migration. The
    /// pages that were sent stay valid.
    pub(crate) fn stop_early_for_task(&self, tid: Tid) {
        self.outgoing
            .values()
            .filter(|pre_copy| pre_copy.tid == tid)
            .for_each(|pre_copy| pre_copy.stop_condition.request_stop());
    }

    /// Aborts the pre-copy of this migration at the source. The sent pages become void.
    pub(crate) fn abort_outgoing(&mut self, migration: MigrationId) {
        if let Some(pre_copy) = self.outgoing.remove(&migration) {
            pre_copy.stop_condition.request_stop();
            shut_down_socket(&pre_copy.stream);
        }
    }

    /// Aborts the pre-copies of a task that has exited.
    pub(crate) fn on_task_exit(&mut self, tid: Tid) {
        self.failed_tasks.remove(&tid);
        let task_migrations = self
            .outgoing
            .iter()
            .filter(|(_, pre_copy)| pre_copy.tid == tid)
            .map(|(migration, _)| *migration);
        for migration in task_migrations.collect::<Vec<_>>() {
            self.abort_outgoing(migration);
        }
    }

    /// Aborts the pre-copy of this migration at the target. The received pages become void, and a
    /// later restore of the task fails. Returns false if the migration has no pre-copy.
    pub(crate) fn abort_incoming_pre_copy(&mut self, migration: MigrationId) -> bool {
        let Some(pre_copy) = self.incoming_pre_copies.get_mut(&migration) else {
            return false;
        };
        if let Some(aborted_pages) = pre_copy.received_pages.take() {
            free_in_background(aborted_pages);
        }
        shut_down_socket(&pre_copy.stream);
        true
    }

    /// Aborts and removes the pre-copy of a migration whose restored task is discarded.
    pub(crate) fn remove_incoming_pre_copy(&mut self, migration: MigrationId) {
        self.abort_incoming_pre_copy(migration);
        self.incoming_pre_copies.remove(&migration);
    }

    /// Aborts all pre-copies. Called when the tasker ends.
    pub(crate) fn abort_all(&mut self) {
        for pre_copy in self.outgoing.values() {
            pre_copy.stop_condition.request_stop();
            shut_down_socket(&pre_copy.stream);
        }
        self.incoming_pre_copies
            .values()
            .for_each(|incoming_pre_copy| shut_down_socket(&incoming_pre_copy.stream));
    }
}

impl Supervisor {
    /// Starts the pre-copy of a running task. Reports a failure to the daemon.
    pub(crate) fn start_pre_copy_or_report(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        socket_path: &Path,
    ) {
        if let Err(why) = self.start_pre_copy(migration, tid, socket_path) {
            self.send(&FromTasker::PreCopied {
                migration,
                result: Err(why),
            });
        }
    }

    fn start_pre_copy(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        socket_path: &Path,
    ) -> Result<(), Failure> {
        let task = self.tasks.get(&tid).ok_or(Failure::TaskEnded)?;
        if !matches!(task.phase, TaskPhase::Running) {
            return Err(Failure::Cancelled(
                "another migration of the task is in progress on this host".into(),
            ));
        }
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let processes = task.processes().pids();
        let memory_gib = total_memory_bytes(&processes) >> 30;
        let stop_condition = PreCopyStopCondition::at_deadline(
            Instant::now() + PRE_COPY_TIMEOUT_BASE + PRE_COPY_TIMEOUT_PER_GIB * memory_gib as u32,
        );
        let stop_condition = if self.migrations.pre_copies.ignores_rate_limit() {
            stop_condition
        } else {
            stop_condition.with_rate_limit(PRE_COPY_RATE_MAX_BYTES_PER_SECOND)
        };
        // A paused task does not change its memory, so pre-copying it has no advantage.
        if !task.pause.is_inactive() {
            stop_condition.request_stop();
        }
        let stream = Arc::new(connect_memory_socket(socket_path)?);
        let work = {
            let (stream, stop_condition) = (stream.clone(), stop_condition.clone());
            move || WorkerResult::PreCopied {
                migration,
                result: engine.send_pre_copy(&processes, &stream, &stop_condition),
            }
        };
        // The worker needs no cancellation handle: it ends when the socket is shut down.
        self.start_uncancellable(work)?;
        self.migrations.pre_copies.outgoing.insert(
            migration,
            OutgoingPreCopy {
                tid,
                stream,
                stop_condition,
                sent_pages: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the source, and reports the result to the daemon. After a
    /// failure the task's next migrations use no pre-copy.
    pub(crate) fn on_pre_copied(
        &mut self,
        migration: MigrationId,
        result: Result<SentPages, Failure>,
    ) {
        // Without a record, the pre-copy has been aborted.
        let Some(pre_copy) = self.migrations.pre_copies.outgoing.get_mut(&migration) else {
            return;
        };
        let pre_copy_tid = pre_copy.tid;
        let result = result.map(|sent_pages| {
            let bytes = sent_pages.sent_bytes();
            pre_copy.sent_pages = Some(Arc::new(sent_pages));
            bytes
        });
        if result.is_err() {
            let (tasks, tid) = (&self.tasks, pre_copy.tid);
            self.migrations
                .pre_copies
                .failed_tasks
                .retain(|failed_tid| tasks.contains_key(failed_tid));
            self.migrations.pre_copies.failed_tasks.insert(tid);
            self.migrations.pre_copies.abort_outgoing(migration);
        }
        let completed_tid = result.is_ok().then_some(pre_copy_tid);
        self.send(&FromTasker::PreCopied { migration, result });
        if let Some(tid) = completed_tid {
            self.start_idle_dump(migration, tid);
        }
    }

    /// Starts to receive a pre-copy. Reports a failure to the daemon.
    pub(crate) fn receive_pre_copy(&mut self, migration: MigrationId, socket_path: &Path) {
        if let Err(why) = self.start_receiving_pre_copy(migration, socket_path) {
            self.send(&FromTasker::PreCopyLost {
                migration,
                failure: why,
            });
        }
    }

    fn start_receiving_pre_copy(
        &mut self,
        migration: MigrationId,
        socket_path: &Path,
    ) -> Result<(), Failure> {
        if !self.migrations.incoming_tasks.contains_key(&migration) {
            return Err(Failure::Cancelled(
                "the target no longer has a place for the task".into(),
            ));
        }
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let bytes_max = self
            .migrations
            .reservations
            .bytes_reserved_for(migration)
            .saturating_add(ACCEPTED_GROWTH_BYTES_MAX);
        let stream = Arc::new(connect_memory_socket(socket_path)?);
        let worker_stream = stream.clone();
        let work = move || WorkerResult::PreCopyReceived {
            migration,
            result: engine.receive_pre_copy(&worker_stream, bytes_max),
        };
        self.start_uncancellable(work)?;
        self.migrations.pre_copies.incoming_pre_copies.insert(
            migration,
            IncomingPreCopy {
                stream,
                received_pages: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the target: confirms the received pages to the source and
    /// records them in the reservation. The main thread handles both before any further order of
    /// the source. After a failure the pre-copy is aborted and its loss is reported to the daemon.
    pub(crate) fn on_pre_copy_received(
        &mut self,
        migration: MigrationId,
        result: Result<ReceivedPages, Failure>,
    ) {
        let Some(pre_copy) = self
            .migrations
            .pre_copies
            .incoming_pre_copies
            .get_mut(&migration)
        else {
            return result.map_or((), free_in_background);
        };
        let confirmed_pages = result.and_then(|received_pages| {
            let confirm_failure =
                |e| Failure::Io(format!("cannot confirm the memory to the source: {e}"));
            acknowledge_pre_copy(&received_pages, &pre_copy.stream).map_err(confirm_failure)?;
            Ok(received_pages)
        });
        match confirmed_pages {
            Ok(received_pages) => {
                self.migrations
                    .reservations
                    .record_pre_copied_bytes(migration, received_pages.stored_bytes());
                pre_copy.received_pages = Some(received_pages);
            }
            Err(why) => {
                self.migrations
                    .pre_copies
                    .abort_incoming_pre_copy(migration);
                self.send(&FromTasker::PreCopyLost {
                    migration,
                    failure: why,
                });
            }
        }
    }
}

/// Frees received pages on another thread. Freeing gigabytes takes long, and the main thread must
/// remain free to stop tasks.
fn free_in_background(received_pages: ReceivedPages) {
    // If no thread can be started, the pages are freed on this thread.
    let _ = std::thread::Builder::new()
        .name("gives back".into())
        .spawn(move || drop(received_pages));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const MIGRATION: MigrationId = MigrationId(1);

    #[test]
    fn large_tasks_are_pre_copied_unless_disabled() {
        let facts_with = |resident_bytes| TaskFacts {
            memory_bytes: resident_bytes,
            ..TaskFacts::default()
        };
        let (tid, other_tid) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let uses_pre_copy = |bytes_min| {
            [0, PRE_COPY_BYTES_MIN - 1, PRE_COPY_BYTES_MIN].map(|bytes| {
                PreCopies::with_bytes_min(bytes_min).is_used_for(tid, &facts_with(bytes))
            })
        };
        assert_eq!(
            uses_pre_copy(Some(PRE_COPY_BYTES_MIN)),
            [false, false, true]
        );
        assert_eq!(
            (uses_pre_copy(None), uses_pre_copy(Some(0))),
            ([false; 3], [true; 3])
        );
        let mut pre_copies = PreCopies::with_bytes_min(Some(0));
        pre_copies.failed_tasks.insert(tid);
        assert_eq!(
            [tid, other_tid].map(|tid| pre_copies.is_used_for(tid, &facts_with(0))),
            [false, true],
            "not again where it went in vain"
        );
    }

    /// With a pre-copy whose pages are lost, `take_received_pages` returns an error; without a
    /// pre-copy it returns `None`.
    #[test]
    fn missing_expected_pre_copy_is_an_error() {
        let mut pre_copies = PreCopies::with_bytes_min(None);
        assert!(
            pre_copies
                .take_received_pages(MIGRATION)
                .expect("nothing was to come")
                .is_none()
        );
        let (local_socket, peer_socket) = UnixStream::pair().expect("descriptors");
        let (stream, received_pages) = (
            Arc::new(OwnedFd::from(local_socket)),
            Some(ReceivedPages::empty()),
        );
        pre_copies.incoming_pre_copies.insert(
            MIGRATION,
            IncomingPreCopy {
                stream,
                received_pages,
            },
        );
        assert!(pre_copies.abort_incoming_pre_copy(MIGRATION));
        assert!(matches!(
            pre_copies.take_received_pages(MIGRATION),
            Err(Failure::Images(_))
        ));
        assert_eq!(
            std::io::Read::read(&mut &peer_socket, &mut [0]).expect("it is shut"),
            0
        );
    }

    #[test]
    fn exit_aborts_the_pre_copies_of_the_task() {
        let mut pre_copies = PreCopies::with_bytes_min(None);
        let (local_socket, peer_socket) = UnixStream::pair().expect("descriptors");
        let (tid, stop_condition) = (
            Tid::from_raw(0x40001),
            PreCopyStopCondition::at_deadline(Instant::now()),
        );
        pre_copies.outgoing.insert(
            MIGRATION,
            OutgoingPreCopy {
                tid,
                stream: Arc::new(local_socket.into()),
                stop_condition,
                sent_pages: None,
            },
        );
        pre_copies.on_task_exit(Tid::from_raw(0x40002));
        assert_eq!(pre_copies.outgoing.len(), 1);
        pre_copies.on_task_exit(tid);
        assert!(pre_copies.take_sent_pages(MIGRATION).is_none() && pre_copies.outgoing.is_empty());
        assert_eq!(
            std::io::Read::read(&mut &peer_socket, &mut [0]).expect("it is shut"),
            0
        );
    }
}
