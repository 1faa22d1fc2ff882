//! Memory that goes ahead of a task (pre-copy): sent at the source while the task runs, and kept at the target until the rest of it is
//! asked for, on the same way ([`crate::memory`]).

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

/// Resident memory from which on it goes ahead: less of it follows sooner than anybody could have sent it before.
const FROM_BYTES: u64 = 64 << 20;
/// On a way on which memory passes faster than so many bytes per second it goes ahead no further. The task gets what has gone ahead at
/// some 370 MB/s, after it has passed: on a way like this the whole move takes two fifths longer, on a faster one up to twice as long.
const FAST: u64 = 150_000_000;
/// Says when memory goes ahead of a task that it is to follow: `never`, `always`; if not set, from [`FROM_BYTES`] on, and on ways
/// that are not [`FAST`].
const SETTING: &str = "SEMPA_PRE_COPY";
/// So much more than a task had when it was accepted is taken, if it has grown since; the rest follows.
const GROWN_BYTES_MAX: u64 = 64 << 20;
/// Memory goes ahead for so long, and for so much longer for each gigabyte of it: well within the time of the step. The rest follows.
const ALLOWED_BASE: Duration = Duration::from_secs(300);
const ALLOWED_PER_GIB: Duration = Duration::from_secs(300);

/// What goes ahead from here.
#[derive(Debug)]
struct Going {
    tid: Tid,
    stream: Arc<OwnedFd>,
    hurry: PreCopyStop,
    /// All of it is at the target.
    sent: Option<Arc<SentPages>>,
}

/// What comes ahead to here.
#[derive(Debug)]
struct Coming {
    stream: Arc<OwnedFd>,
    /// All of it.
    store: Option<ReceivedPages>,
}

/// Memory that goes ahead, from here and to here. There are no more than workers, and tasks that are to leave or to come.
#[derive(Debug)]
pub(crate) struct PreCopies {
    from_bytes: Option<u64>,
    /// Tasks of this host of which it went ahead in vain: when they leave, all of it follows.
    failed: BTreeSet<Tid>,
    going: BTreeMap<MigrationId, Going>,
    coming: BTreeMap<MigrationId, Coming>,
}

impl PreCopies {
    /// Nothing is under way.
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

    /// Whether memory of this task should go ahead, if it is to follow.
    pub(crate) fn should(&self, tid: Tid, facts: &TaskFacts) -> bool {
        !self.failed.contains(&tid)
            && self
                .from_bytes
                .is_some_and(|from| facts.resident_bytes >= from)
    }

    /// Also where it would follow soon enough.
    fn always(&self) -> bool {
        self.from_bytes == Some(0)
    }

    /// The way on which memory of this task went ahead, and what did. It is the dump's from now on.
    pub(crate) fn take_sent(
        &mut self,
        migration: MigrationId,
    ) -> Option<(Arc<OwnedFd>, Arc<SentPages>)> {
        let going = self.going.remove(&migration)?;
        Some((going.stream, going.sent?))
    }

    /// The way on which memory came ahead, and what did. It is the restore's from now on.
    ///
    /// # Errors
    /// It should have come, and has not.
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

    /// Nobody waits any longer for memory of this task that goes ahead.
    pub(crate) fn hurry_up(&self, tid: Tid) {
        self.going
            .values()
            .filter(|going| going.tid == tid)
            .for_each(|going| going.hurry.request());
    }

    /// Nothing goes ahead of this task any more, and what has is of no use.
    pub(crate) fn end_going(&mut self, migration: MigrationId) {
        if let Some(going) = self.going.remove(&migration) {
            going.hurry.request();
            shut(&going.stream);
        }
    }

    /// The task has ended.
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

    /// Nothing comes ahead any more, and what has is of no use. If the task is to be restored all the same, that fails. False if
    /// nothing was to come.
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

    /// The copy is thrown away.
    pub(crate) fn end_coming(&mut self, migration: MigrationId) {
        self.lose_coming(migration);
        self.coming.remove(&migration);
    }

    /// Everything ends; for the end of the tasker.
    pub(crate) fn end_all(&mut self) {
        for going in self.going.values() {
            going.hurry.request();
            shut(&going.stream);
        }
        self.coming.values().for_each(|coming| shut(&coming.stream));
    }
}

impl Supervisor {
    /// Begins to send memory of a running task ahead.
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
        // One that stands still changes nothing: what is not sent now is not sent any sooner later.
        if !task.hold.is_free() {
            hurry.request();
        }
        let stream = Arc::new(connect(way)?);
        let work = {
            let (stream, hurry) = (stream.clone(), hurry.clone());
            move || Outcome::PreCopied {
                migration,
                result: engine.send_ahead(&processes, &stream, &hurry),
            }
        };
        // It ends when its stream is shut, likewise below.
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

    /// Memory has gone ahead, or has not.
    pub(crate) fn pre_copied(
        &mut self,
        migration: MigrationId,
        result: Result<SentPages, Failure>,
    ) {
        // It was ended meanwhile.
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

    /// Begins to take memory that comes ahead.
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
            result: engine.take_ahead(&comes, bytes_max),
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

    /// All memory that goes ahead has come, or will not. The source hears of it only when it is known here, because it goes on then.
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

/// That takes a moment for gigabytes, in which nobody would be told to stand still.
fn give_back(store: ReceivedPages) {
    // Without a thread it is given back here.
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
    fn memory_goes_ahead_of_large_tasks_unless_it_is_never_to() {
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

    #[test]
    fn what_was_to_come_ahead_and_did_not_is_an_error_and_what_was_not_to_is_none() {
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
    fn nothing_goes_ahead_of_a_task_that_has_ended() {
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
