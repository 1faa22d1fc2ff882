//! Pre-copy: memory that is sent to the target while the task still runs at the source. The target
//! keeps it until the rest is requested on the same socket ([`crate::memory`]).

use crate::memory::{Said, connect, said, shut};
use crate::moves::resident_bytes;
use crate::supervisor::Supervisor;
use crate::task::Phase;
use crate::workers::Outcome;
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
const FROM_BYTES: u64 = 64 << 20;
/// Transfer rate in bytes per second above which pre-copy stops.
///
/// The task gets pre-copied memory at about 370 MB/s, after the transfer: at the rate of this limit
/// the whole migration takes two fifths longer, at higher rates up to twice as long.
const FAST: u64 = 150_000_000;
/// Variable that selects when pre-copy is used before a post-copy: `never`, `always`; if not set,
/// from [`FROM_BYTES`] on, and up to the rate [`FAST`].
const SETTING: &str = "SEMPA_PRE_COPY";
/// Growth since the check up to which memory is accepted by pre-copy; the rest is post-copied.
const GROWN_BYTES_MAX: u64 = 64 << 20;
/// Time limit of a pre-copy, plus a time for each gigabyte: well within the time limit of the step.
/// The rest is post-copied.
const ALLOWED_BASE: Duration = Duration::from_secs(300);
const ALLOWED_PER_GIB: Duration = Duration::from_secs(300);

/// A pre-copy from this host.
#[derive(Debug)]
struct Going {
    tid: Tid,
    stream: Arc<OwnedFd>,
    hurry: PreCopyStop,
    /// Set when all of it is at the target.
    sent: Option<Arc<SentPages>>,
}

/// A pre-copy to this host.
#[derive(Debug)]
struct Coming {
    stream: Arc<OwnedFd>,
    /// Set when all of it has arrived.
    store: Option<ReceivedPages>,
}

/// The pre-copies from this host and to it. Their number is bounded by the limits on workers and on
/// migrations.
#[derive(Debug)]
pub(crate) struct PreCopies {
    from_bytes: Option<u64>,
    /// Tasks of this host whose pre-copy failed: their next migration uses only post-copy.
    failed: BTreeSet<Tid>,
    going: BTreeMap<MigrationId, Going>,
    coming: BTreeMap<MigrationId, Coming>,
}

impl PreCopies {
    /// Reads the setting from the environment.
    pub(crate) fn new() -> PreCopies {
        let from_bytes = match said(SETTING, "no memory goes ahead") {
            Some(Said::Never) => None,
            Some(Said::Always) => Some(0),
            None => Some(FROM_BYTES),
        };
        PreCopies::from(from_bytes)
    }

    fn from(from_bytes: Option<u64>) -> PreCopies {
        PreCopies {
            from_bytes,
            failed: BTreeSet::new(),
            going: BTreeMap::new(),
            coming: BTreeMap::new(),
        }
    }

    /// True if pre-copy should be used for this task, provided that post-copy is.
    pub(crate) fn should(&self, tid: Tid, facts: &TaskFacts) -> bool {
        !self.failed.contains(&tid)
            && self
                .from_bytes
                .is_some_and(|from| facts.resident_bytes >= from)
    }

    /// True if pre-copy must be used even at rates above [`FAST`].
    fn always(&self) -> bool {
        self.from_bytes == Some(0)
    }

    /// Hands the socket of a pre-copy and the record of what was sent over to the dump.
    pub(crate) fn take_sent(
        &mut self,
        migration: MigrationId,
    ) -> Option<(Arc<OwnedFd>, Arc<SentPages>)> {
        let going = self.going.remove(&migration)?;
        Some((going.stream, going.sent?))
    }

    /// Hands the socket of a pre-copy and the received memory over to the restore.
    ///
    /// # Errors
    /// The pre-copied memory was expected and has not arrived.
    pub(crate) fn take_store(
        &mut self,
        migration: MigrationId,
    ) -> Result<Option<(Arc<OwnedFd>, ReceivedPages)>, Failure> {
        let Some(Coming { stream, store }) = self.coming.remove(&migration) else {
            return Ok(None);
        };
        let store = store.ok_or_else(|| {
            Failure::Images("the memory that was to come ahead of it is not here".into())
        })?;
        Ok(Some((stream, store)))
    }

    /// Ends the pre-copies of this task soon: waiting for them gains nothing any more.
    pub(crate) fn hurry_up(&self, tid: Tid) {
        self.going
            .values()
            .filter(|going| going.tid == tid)
            .for_each(|going| going.hurry.request());
    }

    /// Aborts the pre-copy of this migration at the source; what was sent is void.
    pub(crate) fn end_going(&mut self, migration: MigrationId) {
        if let Some(going) = self.going.remove(&migration) {
            going.hurry.request();
            shut(&going.stream);
        }
    }

    /// Aborts the pre-copies of a task that has exited.
    pub(crate) fn ended(&mut self, tid: Tid) {
        self.failed.remove(&tid);
        let its = self
            .going
            .iter()
            .filter(|(_, going)| going.tid == tid)
            .map(|(migration, _)| *migration);
        for migration in its.collect::<Vec<_>>() {
            self.end_going(migration);
        }
    }

    /// Aborts the pre-copy of this migration at the target; what has arrived is void. A later
    /// restore of the task fails. Returns false if there is no such pre-copy.
    pub(crate) fn lose_coming(&mut self, migration: MigrationId) -> bool {
        let Some(coming) = self.coming.get_mut(&migration) else {
            return false;
        };
        if let Some(store) = coming.store.take() {
            give_back(store);
        }
        shut(&coming.stream);
        true
    }

    /// Aborts the pre-copy of a copy that is discarded.
    pub(crate) fn end_coming(&mut self, migration: MigrationId) {
        self.lose_coming(migration);
        self.coming.remove(&migration);
    }

    /// Aborts all pre-copies; called when the tasker ends.
    pub(crate) fn end_all(&mut self) {
        for going in self.going.values() {
            going.hurry.request();
            shut(&going.stream);
        }
        self.coming.values().for_each(|coming| shut(&coming.stream));
    }
}

impl Supervisor {
    /// Starts the pre-copy of a running task.
    pub(crate) fn pre_copy(&mut self, migration: MigrationId, tid: Tid, way: &Path) {
        if let Err(why) = self.start_pre_copy(migration, tid, way) {
            self.say(&FromTasker::PreCopied {
                migration,
                result: Err(why),
            });
        }
    }

    fn start_pre_copy(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        way: &Path,
    ) -> Result<(), Failure> {
        let task = self.tasks.get(&tid).ok_or(Failure::TaskEnded)?;
        if !matches!(task.phase, Phase::Running) {
            return Err(Failure::CalledOff(
                "another move of the task is under way on this host".into(),
            ));
        }
        let engine = self.moves.engine.clone().ok_or_else(|| self.broken())?;
        let processes = task.crowd().pids();
        let gib = resident_bytes(&processes) >> 30;
        let hurry = PreCopyStop::at(Instant::now() + ALLOWED_BASE + ALLOWED_PER_GIB * gib as u32);
        let hurry = if self.moves.pre_copies.always() {
            hurry
        } else {
            hurry.or_above_rate(FAST)
        };
        // A paused task does not change its memory, so sending it before the dump gains nothing.
        if !task.hold.is_free() {
            hurry.request();
        }
        let stream = Arc::new(connect(way)?);
        let work = {
            let (stream, hurry) = (stream.clone(), hurry.clone());
            move || Outcome::PreCopied {
                migration,
                result: engine.send_pre_copy(&processes, &stream, &hurry),
            }
        };
        // The worker ends when the socket is shut down; the same holds below.
        self.begin_uncancelled(work)?;
        self.moves.pre_copies.going.insert(
            migration,
            Going {
                tid,
                stream,
                hurry,
                sent: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the source.
    pub(crate) fn pre_copied(
        &mut self,
        migration: MigrationId,
        result: Result<SentPages, Failure>,
    ) {
        // The pre-copy was aborted meanwhile.
        let Some(going) = self.moves.pre_copies.going.get_mut(&migration) else {
            return;
        };
        let result = result.map(|sent| {
            let bytes = sent.bytes();
            going.sent = Some(Arc::new(sent));
            bytes
        });
        if result.is_err() {
            let (here, tid) = (&self.tasks, going.tid);
            self.moves
                .pre_copies
                .failed
                .retain(|failed| here.contains_key(failed));
            self.moves.pre_copies.failed.insert(tid);
            self.moves.pre_copies.end_going(migration);
        }
        self.say(&FromTasker::PreCopied { migration, result });
    }

    /// Starts to receive a pre-copy.
    pub(crate) fn take_pre_copy(&mut self, migration: MigrationId, way: &Path) {
        if let Err(why) = self.start_to_take(migration, way) {
            self.say(&FromTasker::PreCopyLost { migration, why });
        }
    }

    fn start_to_take(&mut self, migration: MigrationId, way: &Path) -> Result<(), Failure> {
        if !self.moves.targets.contains_key(&migration) {
            return Err(Failure::CalledOff(
                "there is no room for its task any more".into(),
            ));
        }
        let engine = self.moves.engine.clone().ok_or_else(|| self.broken())?;
        let bytes_max = self
            .moves
            .promised
            .of(migration)
            .saturating_add(GROWN_BYTES_MAX);
        let stream = Arc::new(connect(way)?);
        let comes = stream.clone();
        let work = move || Outcome::PreCopyCame {
            migration,
            result: engine.receive_pre_copy(&comes, bytes_max),
        };
        self.begin_uncancelled(work)?;
        self.moves.pre_copies.coming.insert(
            migration,
            Coming {
                stream,
                store: None,
            },
        );
        Ok(())
    }

    /// Handles the end of a pre-copy at the target. The source is notified only after the
    /// reservation is updated, because the source then proceeds.
    pub(crate) fn pre_copy_came(
        &mut self,
        migration: MigrationId,
        result: Result<ReceivedPages, Failure>,
    ) {
        let Some(coming) = self.moves.pre_copies.coming.get_mut(&migration) else {
            return result.map_or((), give_back);
        };
        let kept = result.and_then(|store| {
            let unheard = |e| Failure::Io(format!("the source does not listen: {e}"));
            acknowledge_pre_copy(&store, &coming.stream).map_err(unheard)?;
            Ok(store)
        });
        match kept {
            Ok(store) => {
                self.moves.promised.came_ahead(migration, store.bytes());
                coming.store = Some(store);
            }
            Err(why) => {
                self.moves.pre_copies.lose_coming(migration);
                self.say(&FromTasker::PreCopyLost { migration, why });
            }
        }
    }
}

/// Frees the memory on a thread: that takes a while for gigabytes, during which no task could be
/// stopped.
fn give_back(store: ReceivedPages) {
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
            [0, FROM_BYTES - 1, FROM_BYTES]
                .map(|bytes| PreCopies::from(from).should(tid, &of(bytes)))
        };
        assert_eq!(should(Some(FROM_BYTES)), [false, false, true]);
        assert_eq!((should(None), should(Some(0))), ([false; 3], [true; 3]));
        let mut all = PreCopies::from(Some(0));
        all.failed.insert(tid);
        assert_eq!(
            [tid, other].map(|tid| all.should(tid, &of(0))),
            [false, true],
            "not again where it went in vain"
        );
    }

    /// A pre-copy that was expected and lost is an error; without one there is nothing to take.
    #[test]
    fn missing_expected_pre_copy_is_an_error() {
        let mut all = PreCopies::from(None);
        assert!(all.take_store(ONE).expect("nothing was to come").is_none());
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (stream, store) = (Arc::new(OwnedFd::from(ours)), Some(ReceivedPages::empty()));
        all.coming.insert(ONE, Coming { stream, store });
        assert!(all.lose_coming(ONE));
        assert!(matches!(all.take_store(ONE), Err(Failure::Images(_))));
        assert_eq!(
            std::io::Read::read(&mut &theirs, &mut [0]).expect("it is shut"),
            0
        );
    }

    #[test]
    fn exit_aborts_the_pre_copies_of_the_task() {
        let mut all = PreCopies::from(None);
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (tid, hurry) = (Tid::from_raw(0x40001), PreCopyStop::at(Instant::now()));
        all.going.insert(
            ONE,
            Going {
                tid,
                stream: Arc::new(ours.into()),
                hurry,
                sent: None,
            },
        );
        all.ended(Tid::from_raw(0x40002));
        assert_eq!(all.going.len(), 1);
        all.ended(tid);
        assert!(all.take_sent(ONE).is_none() && all.going.is_empty());
        assert_eq!(
            std::io::Read::read(&mut &theirs, &mut [0]).expect("it is shut"),
            0
        );
    }
}
