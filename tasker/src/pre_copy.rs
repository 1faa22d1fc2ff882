//! Pre-copy: sends memory to the target while the task still runs at the source. The target stores
//! the memory until post-copy requests the remaining memory on the same socket
//! ([`crate::post_copy`]).

use crate::migrations::resident_bytes;
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

/// Minimum resident memory in bytes for pre-copy. Post-copy alone transfers less memory faster.
const PRE_COPY_BYTES_MIN: u64 = 64 << 20;
/// Transfer rate in bytes per second above which pre-copy stops.
///
/// After the transfer, pre-copied memory is inserted into the task at about 370 MB/s. At the rate
/// of this limit the whole migration takes two fifths longer than without pre-copy, at higher rates
/// up to twice as long.
const PRE_COPY_RATE_MAX_BYTES_PER_SECOND: u64 = 150_000_000;
/// Environment variable that selects when pre-copy is used before a post-copy: `never` or `always`.
/// If it is not set, pre-copy is used from [`PRE_COPY_BYTES_MIN`] on, and up to the rate
/// [`PRE_COPY_RATE_MAX_BYTES_PER_SECOND`].
const PRE_COPY_VARIABLE: &str = "SEMPA_PRE_COPY";
/// Maximum number of bytes that a pre-copy may send in addition to the task's memory at the
/// feasibility check. Memory beyond it is post-copied.
const ACCEPTED_GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Time limit of a pre-copy of a task without memory. The limit is well within the time limit of
/// the migration step. After it the remaining memory is post-copied.
const PRE_COPY_TIMEOUT_BASE: Duration = Duration::from_secs(300);
/// Additional time limit of a pre-copy for each GiB of memory.
const PRE_COPY_TIMEOUT_PER_GIB: Duration = Duration::from_secs(300);

/// A pre-copy from this host.
#[derive(Debug)]
struct OutgoingPreCopy {
    tid: Tid,
    stream: Arc<OwnedFd>,
    stop: PreCopyStopCondition,
    /// The pages that were sent; `None` until all of them are at the target.
    sent: Option<Arc<SentPages>>,
}

/// A pre-copy to this host.
#[derive(Debug)]
struct IncomingPreCopy {
    stream: Arc<OwnedFd>,
    /// The received pages; `None` until all of them have arrived.
    received: Option<ReceivedPages>,
}

/// The state of all pre-copies from this host and to it. Their number is bounded by the limits on
/// workers and on migrations.
#[derive(Debug)]
pub(crate) struct PreCopies {
    /// Minimum resident memory for pre-copy; `None` if pre-copy is disabled.
    bytes_min: Option<u64>,
    /// Tasks of this host whose pre-copy has failed. Their next migration does not use pre-copy.
    failed_tasks: BTreeSet<Tid>,
    outgoing: BTreeMap<MigrationId, OutgoingPreCopy>,
    incoming: BTreeMap<MigrationId, IncomingPreCopy>,
}

impl PreCopies {
    /// Reads the mode of pre-copy from the environment.
    pub(crate) fn new() -> PreCopies {
        let bytes_min = match mode_override(PRE_COPY_VARIABLE, "no memory goes ahead") {
            Some(ModeOverride::Never) => None,
            Some(ModeOverride::Always) => Some(0),
            None => Some(PRE_COPY_BYTES_MIN),
        };
        PreCopies::with_bytes_min(bytes_min)
    }

    fn with_bytes_min(bytes_min: Option<u64>) -> PreCopies {
        PreCopies {
            bytes_min,
            failed_tasks: BTreeSet::new(),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
        }
    }

    /// True if pre-copy should be used for this task, provided that post-copy is used.
    pub(crate) fn applies_to(&self, tid: Tid, facts: &TaskFacts) -> bool {
        !self.failed_tasks.contains(&tid)
            && self
                .bytes_min
                .is_some_and(|from| facts.resident_bytes >= from)
    }

    /// True if pre-copy is used even at rates above [`PRE_COPY_RATE_MAX_BYTES_PER_SECOND`].
    fn ignores_rate(&self) -> bool {
        self.bytes_min == Some(0)
    }

    /// Removes and returns the socket of a completed pre-copy at the source and the record of the
    /// sent pages, for the dump.
    pub(crate) fn take_sent(
        &mut self,
        migration: MigrationId,
    ) -> Option<(Arc<OwnedFd>, Arc<SentPages>)> {
        let pre_copy = self.outgoing.remove(&migration)?;
        Some((pre_copy.stream, pre_copy.sent?))
    }

    /// Removes and returns the socket of a pre-copy at the target and the received memory, for the
    /// restore. `None` if the migration has no pre-copy.
    ///
    /// # Errors
    /// The pre-copied memory was expected and has not arrived.
    pub(crate) fn take_received(
        &mut self,
        migration: MigrationId,
    ) -> Result<Option<(Arc<OwnedFd>, ReceivedPages)>, Failure> {
        let Some(IncomingPreCopy {
            stream,
            received: store,
        }) = self.incoming.remove(&migration)
        else {
            return Ok(None);
        };
        let store = store.ok_or_else(|| {
            Failure::Images("the memory that was to come ahead of it is not here".into())
        })?;
        Ok(Some((stream, store)))
    }

    /// Stops the pre-copies of this task early, because they no longer shorten its migration.
    pub(crate) fn stop_early(&self, tid: Tid) {
        self.outgoing
            .values()
            .filter(|pre_copy| pre_copy.tid == tid)
            .for_each(|pre_copy| pre_copy.stop.request());
    }

    /// Aborts the pre-copy of this migration at the source. The sent pages become void.
    pub(crate) fn abort_outgoing(&mut self, migration: MigrationId) {
        if let Some(pre_copy) = self.outgoing.remove(&migration) {
            pre_copy.stop.request();
            shut_down_socket(&pre_copy.stream);
        }
    }

    /// Aborts the pre-copies of a task that has exited.
    pub(crate) fn on_task_exit(&mut self, tid: Tid) {
        self.failed_tasks.remove(&tid);
        let of_task = self
            .outgoing
            .iter()
            .filter(|(_, pre_copy)| pre_copy.tid == tid)
            .map(|(migration, _)| *migration);
        for migration in of_task.collect::<Vec<_>>() {
            self.abort_outgoing(migration);
        }
    }

    /// Aborts the pre-copy of this migration at the target. The received pages become void, and a
    /// later restore of the task fails. Returns false if the migration has no pre-copy.
    pub(crate) fn abort_incoming(&mut self, migration: MigrationId) -> bool {
        let Some(pre_copy) = self.incoming.get_mut(&migration) else {
            return false;
        };
        if let Some(store) = pre_copy.received.take() {
            free_in_background(store);
        }
        shut_down_socket(&pre_copy.stream);
        true
    }

    /// Aborts the pre-copy of a migration whose restored task is discarded.
    pub(crate) fn remove_incoming(&mut self, migration: MigrationId) {
        self.abort_incoming(migration);
        self.incoming.remove(&migration);
    }

    /// Aborts all pre-copies. Called when the tasker ends.
    pub(crate) fn abort_all(&mut self) {
        for pre_copy in self.outgoing.values() {
            pre_copy.stop.request();
            shut_down_socket(&pre_copy.stream);
        }
        self.incoming
            .values()
            .for_each(|coming| shut_down_socket(&coming.stream));
    }
}

impl Supervisor {
    /// Starts the pre-copy of a running task. Reports an error to the daemon.
    pub(crate) fn start_pre_copy_or_report(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        path: &Path,
    ) {
        if let Err(why) = self.start_pre_copy(migration, tid, path) {
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
        path: &Path,
    ) -> Result<(), Failure> {
        let task = self.tasks.get(&tid).ok_or(Failure::TaskEnded)?;
        if !matches!(task.phase, TaskPhase::Running) {
            return Err(Failure::Cancelled(
                "another move of the task is under way on this host".into(),
            ));
        }
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let processes = task.processes().pids();
        let gib = resident_bytes(&processes) >> 30;
        let stop = PreCopyStopCondition::at_deadline(
            Instant::now() + PRE_COPY_TIMEOUT_BASE + PRE_COPY_TIMEOUT_PER_GIB * gib as u32,
        );
        let stop = if self.migrations.pre_copies.ignores_rate() {
            stop
        } else {
            stop.with_rate_limit(PRE_COPY_RATE_MAX_BYTES_PER_SECOND)
        };
        // A paused task does not change its memory, so pre-copying it has no advantage.
        if !task.pause.is_inactive() {
            stop.request();
        }
        let stream = Arc::new(connect_memory_socket(path)?);
        let work = {
            let (stream, stop) = (stream.clone(), stop.clone());
            move || WorkerResult::PreCopied {
                migration,
                result: engine.send_pre_copy(&processes, &stream, &stop),
            }
        };
        // The worker ends when the socket is shut down.
        self.start_uncancelled(work)?;
        self.migrations.pre_copies.outgoing.insert(
            migration,
            OutgoingPreCopy {
                tid,
                stream,
                stop,
                sent: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the source, and reports it to the daemon.
    pub(crate) fn on_pre_copied(
        &mut self,
        migration: MigrationId,
        result: Result<SentPages, Failure>,
    ) {
        // The pre-copy has been aborted.
        let Some(pre_copy) = self.migrations.pre_copies.outgoing.get_mut(&migration) else {
            return;
        };
        let result = result.map(|sent| {
            let bytes = sent.sent_bytes();
            pre_copy.sent = Some(Arc::new(sent));
            bytes
        });
        if result.is_err() {
            let (here, tid) = (&self.tasks, pre_copy.tid);
            self.migrations
                .pre_copies
                .failed_tasks
                .retain(|failed| here.contains_key(failed));
            self.migrations.pre_copies.failed_tasks.insert(tid);
            self.migrations.pre_copies.abort_outgoing(migration);
        }
        self.send(&FromTasker::PreCopied { migration, result });
    }

    /// Starts to receive a pre-copy. Reports an error to the daemon.
    pub(crate) fn receive_pre_copy(&mut self, migration: MigrationId, path: &Path) {
        if let Err(why) = self.start_receiving(migration, path) {
            self.send(&FromTasker::PreCopyLost { migration, why });
        }
    }

    fn start_receiving(&mut self, migration: MigrationId, path: &Path) -> Result<(), Failure> {
        if !self.migrations.targets.contains_key(&migration) {
            return Err(Failure::Cancelled(
                "there is no room for its task any more".into(),
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
            .reserved_for(migration)
            .saturating_add(ACCEPTED_GROWTH_BYTES_MAX);
        let stream = Arc::new(connect_memory_socket(path)?);
        let worker_stream = stream.clone();
        let work = move || WorkerResult::PreCopyReceived {
            migration,
            result: engine.receive_pre_copy(&worker_stream, bytes_max),
        };
        self.start_uncancelled(work)?;
        self.migrations.pre_copies.incoming.insert(
            migration,
            IncomingPreCopy {
                stream,
                received: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the target. The source is notified only after the
    /// reservation is updated, because the source proceeds when it is notified.
    pub(crate) fn on_pre_copy_received(
        &mut self,
        migration: MigrationId,
        result: Result<ReceivedPages, Failure>,
    ) {
        let Some(pre_copy) = self.migrations.pre_copies.incoming.get_mut(&migration) else {
            return result.map_or((), free_in_background);
        };
        let kept = result.and_then(|store| {
            let unheard = |e| Failure::Io(format!("the source does not listen: {e}"));
            acknowledge_pre_copy(&store, &pre_copy.stream).map_err(unheard)?;
            Ok(store)
        });
        match kept {
            Ok(store) => {
                self.migrations
                    .reservations
                    .record_pre_copied(migration, store.stored_bytes());
                pre_copy.received = Some(store);
            }
            Err(why) => {
                self.migrations.pre_copies.abort_incoming(migration);
                self.send(&FromTasker::PreCopyLost { migration, why });
            }
        }
    }
}

/// Frees received pages on another thread: freeing gigabytes takes long, and during that time the
/// main thread could not stop tasks.
fn free_in_background(store: ReceivedPages) {
    // If no thread can be started, the pages are freed on this thread.
    let _ = std::thread::Builder::new()
        .name("gives back".into())
        .spawn(move || drop(store));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const ONE: MigrationId = MigrationId(1);

    #[test]
    fn large_tasks_are_pre_copied_unless_disabled() {
        let of = |resident_bytes| TaskFacts {
            resident_bytes,
            ..TaskFacts::default()
        };
        let (tid, other) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let should = |from| {
            [0, PRE_COPY_BYTES_MIN - 1, PRE_COPY_BYTES_MIN]
                .map(|bytes| PreCopies::with_bytes_min(from).applies_to(tid, &of(bytes)))
        };
        assert_eq!(should(Some(PRE_COPY_BYTES_MIN)), [false, false, true]);
        assert_eq!((should(None), should(Some(0))), ([false; 3], [true; 3]));
        let mut all = PreCopies::with_bytes_min(Some(0));
        all.failed_tasks.insert(tid);
        assert_eq!(
            [tid, other].map(|tid| all.applies_to(tid, &of(0))),
            [false, true],
            "not again where it went in vain"
        );
    }

    /// A pre-copy that was expected and lost is an error. Without a pre-copy the result is empty.
    #[test]
    fn missing_expected_pre_copy_is_an_error() {
        let mut all = PreCopies::with_bytes_min(None);
        assert!(
            all.take_received(ONE)
                .expect("nothing was to come")
                .is_none()
        );
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (stream, store) = (Arc::new(OwnedFd::from(ours)), Some(ReceivedPages::empty()));
        all.incoming.insert(
            ONE,
            IncomingPreCopy {
                stream,
                received: store,
            },
        );
        assert!(all.abort_incoming(ONE));
        assert!(matches!(all.take_received(ONE), Err(Failure::Images(_))));
        assert_eq!(
            std::io::Read::read(&mut &theirs, &mut [0]).expect("it is shut"),
            0
        );
    }

    #[test]
    fn exit_aborts_the_pre_copies_of_the_task() {
        let mut all = PreCopies::with_bytes_min(None);
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (tid, stop) = (
            Tid::from_raw(0x40001),
            PreCopyStopCondition::at_deadline(Instant::now()),
        );
        all.outgoing.insert(
            ONE,
            OutgoingPreCopy {
                tid,
                stream: Arc::new(ours.into()),
                stop,
                sent: None,
            },
        );
        all.on_task_exit(Tid::from_raw(0x40002));
        assert_eq!(all.outgoing.len(), 1);
        all.on_task_exit(tid);
        assert!(all.take_sent(ONE).is_none() && all.outgoing.is_empty());
        assert_eq!(
            std::io::Read::read(&mut &theirs, &mut [0]).expect("it is shut"),
            0
        );
    }
}
