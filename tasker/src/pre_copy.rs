//! Pre-copy: memory that is sent to the target while the task still runs at the source. The target
//! keeps it until the rest is requested on the same socket ([`crate::post_copy`]).

use crate::migrations::resident_bytes;
use crate::post_copy::{ModeOverride, connect, mode_override, shut_down_socket};
use crate::supervisor::Supervisor;
use crate::task::TaskPhase;
use crate::workers::WorkerResult;
use checkpoint::criu::acknowledge_pre_copy;
use checkpoint::engine::{PreCopyStop, ReceivedPages, SentPages};
use sempa_proto::migration::{Failure, TaskFacts};
use sempa_proto::tasker::FromTasker;
use sempa_proto::{MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Resident memory from which pre-copy is used: post-copy transfers less than this faster than
/// pre-copy could have sent it.
const PRE_COPY_BYTES_MIN: u64 = 64 << 20;
/// Transfer rate in bytes per second above which pre-copy stops.
///
/// The task gets pre-copied memory at about 370 MB/s, after the transfer: at the rate of this limit
/// the whole migration takes two fifths longer, at higher rates up to twice as long.
const FAST_BYTES_PER_SECOND: u64 = 150_000_000;
/// Variable that selects when pre-copy is used before a post-copy: `never`, `always`; if not set,
/// from [`PRE_COPY_BYTES_MIN`] on, and up to the rate [`FAST_BYTES_PER_SECOND`].
const PRE_COPY_VARIABLE: &str = "SEMPA_PRE_COPY";
/// Growth since the check up to which memory is accepted by pre-copy; the rest is post-copied.
const GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Time limit of a pre-copy, plus a time for each gigabyte: well within the time limit of the step.
/// The rest is post-copied.
const TIMEOUT_BASE: Duration = Duration::from_secs(300);
const TIMEOUT_PER_GIB: Duration = Duration::from_secs(300);

/// A pre-copy from this host.
#[derive(Debug)]
struct OutgoingPreCopy {
    tid: Tid,
    stream: Arc<OwnedFd>,
    stop: PreCopyStop,
    /// Set when all of it is at the target.
    sent: Option<Arc<SentPages>>,
}

/// A pre-copy to this host.
#[derive(Debug)]
struct IncomingPreCopy {
    stream: Arc<OwnedFd>,
    /// Set when all of it has arrived.
    store: Option<ReceivedPages>,
}

/// The pre-copies from this host and to it. Their number is bounded by the limits on workers and on
/// migrations.
#[derive(Debug)]
pub(crate) struct PreCopies {
    bytes_min: Option<u64>,
    /// Tasks of this host whose pre-copy failed: their next migration uses only post-copy.
    failed: BTreeSet<Tid>,
    outgoing: BTreeMap<MigrationId, OutgoingPreCopy>,
    incoming: BTreeMap<MigrationId, IncomingPreCopy>,
}

impl PreCopies {
    /// Reads the setting from the environment.
    pub(crate) fn new() -> PreCopies {
        let bytes_min = match mode_override(PRE_COPY_VARIABLE, "pre-copy is not used") {
            Some(ModeOverride::Never) => None,
            Some(ModeOverride::Always) => Some(0),
            None => Some(PRE_COPY_BYTES_MIN),
        };
        PreCopies::with_bytes_min(bytes_min)
    }

    fn with_bytes_min(bytes_min: Option<u64>) -> PreCopies {
        PreCopies {
            bytes_min,
            failed: BTreeSet::new(),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
        }
    }

    /// True if pre-copy should be used for this task, provided that post-copy is.
    pub(crate) fn applies_to(&self, tid: Tid, facts: &TaskFacts) -> bool {
        !self.failed.contains(&tid)
            && self
                .bytes_min
                .is_some_and(|from| facts.resident_bytes >= from)
    }

    /// True if pre-copy must be used even at rates above [`FAST_BYTES_PER_SECOND`].
    fn ignores_rate(&self) -> bool {
        self.bytes_min == Some(0)
    }

    /// Hands the socket of a pre-copy and the record of what was sent over to the dump.
    pub(crate) fn take_sent(
        &mut self,
        migration: MigrationId,
    ) -> Option<(Arc<OwnedFd>, Arc<SentPages>)> {
        let pre_copy = self.outgoing.remove(&migration)?;
        Some((pre_copy.stream, pre_copy.sent?))
    }

    /// Hands the socket of a pre-copy and the received memory over to the restore.
    ///
    /// # Errors
    /// The pre-copied memory was expected and has not arrived.
    pub(crate) fn take_store(
        &mut self,
        migration: MigrationId,
    ) -> Result<Option<(Arc<OwnedFd>, ReceivedPages)>, Failure> {
        let Some(IncomingPreCopy { stream, store }) = self.incoming.remove(&migration) else {
            return Ok(None);
        };
        let store =
            store.ok_or_else(|| Failure::Images("its pre-copied memory has not arrived".into()))?;
        Ok(Some((stream, store)))
    }

    /// Ends the pre-copies of this task soon: waiting for them gains nothing any more.
    pub(crate) fn stop_soon(&self, tid: Tid) {
        self.outgoing
            .values()
            .filter(|pre_copy| pre_copy.tid == tid)
            .for_each(|pre_copy| pre_copy.stop.request());
    }

    /// Aborts the pre-copy of this migration at the source; what was sent is void.
    pub(crate) fn abort_outgoing(&mut self, migration: MigrationId) {
        if let Some(pre_copy) = self.outgoing.remove(&migration) {
            pre_copy.stop.request();
            shut_down_socket(&pre_copy.stream);
        }
    }

    /// Aborts the pre-copies of a task that has exited.
    pub(crate) fn on_task_exit(&mut self, tid: Tid) {
        self.failed.remove(&tid);
        let of_task = self
            .outgoing
            .iter()
            .filter(|(_, pre_copy)| pre_copy.tid == tid)
            .map(|(migration, _)| *migration);
        for migration in of_task.collect::<Vec<_>>() {
            self.abort_outgoing(migration);
        }
    }

    /// Aborts the pre-copy of this migration at the target; what has arrived is void. A later
    /// restore of the task fails. Returns false if there is no such pre-copy.
    pub(crate) fn abort_incoming(&mut self, migration: MigrationId) -> bool {
        let Some(pre_copy) = self.incoming.get_mut(&migration) else {
            return false;
        };
        if let Some(store) = pre_copy.store.take() {
            free_in_background(store);
        }
        shut_down_socket(&pre_copy.stream);
        true
    }

    /// Aborts the pre-copy of a copy that is discarded.
    pub(crate) fn remove_incoming(&mut self, migration: MigrationId) {
        self.abort_incoming(migration);
        self.incoming.remove(&migration);
    }

    /// Aborts all pre-copies; called when the tasker ends.
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
    /// Starts the pre-copy of a running task.
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
                "another migration of the task is in progress on this host".into(),
            ));
        }
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let processes = task.processes().pids();
        let gib = resident_bytes(&processes) >> 30;
        let stop = PreCopyStop::at(Instant::now() + TIMEOUT_BASE + TIMEOUT_PER_GIB * gib as u32);
        let stop = if self.migrations.pre_copies.ignores_rate() {
            stop
        } else {
            stop.or_above_rate(FAST_BYTES_PER_SECOND)
        };
        // A paused task does not change its memory, so sending it before the dump gains nothing.
        if !task.pause.is_not_paused() {
            stop.request();
        }
        let stream = Arc::new(connect(path)?);
        let work = {
            let (stream, stop) = (stream.clone(), stop.clone());
            move || WorkerResult::PreCopied {
                migration,
                result: engine.send_pre_copy(&processes, &stream, &stop),
            }
        };
        // The worker ends when the socket is shut down; the same holds below.
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

    /// Handles the end of a pre-copy at the source.
    pub(crate) fn on_pre_copied(
        &mut self,
        migration: MigrationId,
        result: Result<SentPages, Failure>,
    ) {
        // The pre-copy was aborted meanwhile.
        let Some(pre_copy) = self.migrations.pre_copies.outgoing.get_mut(&migration) else {
            return;
        };
        let result = result.map(|sent| {
            let bytes = sent.bytes();
            pre_copy.sent = Some(Arc::new(sent));
            bytes
        });
        if result.is_err() {
            let (here, tid) = (&self.tasks, pre_copy.tid);
            self.migrations
                .pre_copies
                .failed
                .retain(|failed| here.contains_key(failed));
            self.migrations.pre_copies.failed.insert(tid);
            self.migrations.pre_copies.abort_outgoing(migration);
        }
        self.send(&FromTasker::PreCopied { migration, result });
    }

    /// Starts to receive a pre-copy.
    pub(crate) fn receive_pre_copy(&mut self, migration: MigrationId, path: &Path) {
        if let Err(why) = self.start_receiving(migration, path) {
            self.send(&FromTasker::PreCopyLost { migration, why });
        }
    }

    fn start_receiving(&mut self, migration: MigrationId, path: &Path) -> Result<(), Failure> {
        if !self.migrations.targets.contains_key(&migration) {
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
            .reserved_for(migration)
            .saturating_add(GROWTH_BYTES_MAX);
        let stream = Arc::new(connect(path)?);
        let comes = stream.clone();
        let work = move || WorkerResult::PreCopyReceived {
            migration,
            result: engine.receive_pre_copy(&comes, bytes_max),
        };
        self.start_uncancelled(work)?;
        self.migrations.pre_copies.incoming.insert(
            migration,
            IncomingPreCopy {
                stream,
                store: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the target. The source is notified only after the
    /// reservation is updated, because the source then proceeds.
    pub(crate) fn on_pre_copy_received(
        &mut self,
        migration: MigrationId,
        result: Result<ReceivedPages, Failure>,
    ) {
        let Some(pre_copy) = self.migrations.pre_copies.incoming.get_mut(&migration) else {
            return result.map_or((), free_in_background);
        };
        let kept = result.and_then(|store| {
            let unheard = |e| Failure::Io(format!("cannot confirm the memory to the source: {e}"));
            acknowledge_pre_copy(&store, &pre_copy.stream).map_err(unheard)?;
            Ok(store)
        });
        match kept {
            Ok(store) => {
                self.migrations
                    .reservations
                    .record_pre_copied(migration, store.bytes());
                pre_copy.store = Some(store);
            }
            Err(why) => {
                self.migrations.pre_copies.abort_incoming(migration);
                self.send(&FromTasker::PreCopyLost { migration, why });
            }
        }
    }
}

/// Frees the memory on a thread: that takes a while for gigabytes, during which no task could be
/// stopped.
fn free_in_background(store: ReceivedPages) {
    // Without a thread it is freed here.
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
        all.failed.insert(tid);
        assert_eq!(
            [tid, other].map(|tid| all.applies_to(tid, &of(0))),
            [false, true],
            "not again where it went in vain"
        );
    }

    /// A pre-copy that was expected and lost is an error; without one there is nothing to take.
    #[test]
    fn missing_expected_pre_copy_is_an_error() {
        let mut all = PreCopies::with_bytes_min(None);
        assert!(all.take_store(ONE).expect("nothing was to come").is_none());
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (stream, store) = (Arc::new(OwnedFd::from(ours)), Some(ReceivedPages::empty()));
        all.incoming.insert(ONE, IncomingPreCopy { stream, store });
        assert!(all.abort_incoming(ONE));
        assert!(matches!(all.take_store(ONE), Err(Failure::Images(_))));
        assert_eq!(
            std::io::Read::read(&mut &theirs, &mut [0]).expect("it is shut"),
            0
        );
    }

    #[test]
    fn exit_aborts_the_pre_copies_of_the_task() {
        let mut all = PreCopies::with_bytes_min(None);
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (tid, stop) = (Tid::from_raw(0x40001), PreCopyStop::at(Instant::now()));
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
