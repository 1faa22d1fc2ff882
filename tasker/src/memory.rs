//! Memory that follows a task (post-copy): at the source it is handed out after the images are written, also when the task has
//! been killed; at the target it comes while the task runs already. It passes through the daemons, each of which has a
//! socket for it.

use crate::stop;
use crate::supervisor::Supervisor;
use crate::target::Stage;
use crate::task::{Phase, Task};
use crate::workers::Outcome;
use checkpoint::engine::{Cancel, Limits, Missing, ReceivedPages, ServedMemory, Serving, Whole};
use nix::sys::socket::{Shutdown, shutdown};
use sempa_proto::migration::{Failure, TaskFacts};
use sempa_proto::tasker::FromTasker;
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Resident memory from which on it follows a task: below it a task stands still hardly longer when it takes its memory along.
const FOLLOWS_FROM_BYTES: u64 = 16 << 20;
/// Says when memory follows: `never`, `always`; if not set, from [`FOLLOWS_FROM_BYTES`] on.
const SETTING: &str = "SEMPA_POST_COPY";
/// After a failure tasks take their memory along for so long.
const FAILED_PAUSE: Duration = Duration::from_secs(600);
/// Processes that are killed end long before this.
const END_ALLOWED: Duration = Duration::from_secs(60);
const LOOK_PAUSE: Duration = Duration::from_millis(2);
/// No transfer takes so long. One that has stopped is noticed by the daemons.
const TRANSFER_ALLOWED: Duration = Duration::from_secs(7 * 24 * 3600);

/// When memory follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Never,
    Large,
    Always,
}

/// What somebody has said of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Never,
    Always,
}

/// What a setting says, if it is there. Who has written something else wanted another way than the usual one, and gets the one
/// that can lose nothing: then `so` is said.
pub(crate) fn said(setting: &str, so: &str) -> Option<Said> {
    read_setting(&std::env::var_os(setting)?.to_string_lossy()).unwrap_or_else(|value| {
        eprintln!("{setting}={value:?} is neither never nor always: {so}");
        Some(Said::Never)
    })
}

fn read_setting(value: &str) -> Result<Option<Said>, &str> {
    match value {
        "" => Ok(None),
        "never" => Ok(Some(Said::Never)),
        "always" => Ok(Some(Said::Always)),
        other => Err(other),
    }
}

/// Memory that comes.
#[derive(Debug)]
struct Coming {
    worker: u64,
    /// Whether nothing of it is missing.
    whole: Whole,
    /// The task, as soon as it runs.
    runs: Option<Tid>,
    /// All of it is here.
    complete: bool,
    /// Why the rest of it will not come.
    lost: Option<Failure>,
    /// The task has ended and needs no more.
    over: bool,
    /// Processes that were killed for want of it.
    needs: Vec<i32>,
}

/// Memory under way, from here and to here.
#[derive(Debug)]
pub(crate) struct Following {
    setting: Setting,
    /// Whether it is possible here; known after the engine's trial.
    pub(crate) possible: Result<(), String>,
    /// When it failed last.
    failed: Option<Instant>,
    going: BTreeMap<MigrationId, ServedMemory>,
    coming: BTreeMap<MigrationId, Coming>,
}

impl Following {
    /// Nothing is under way.
    pub(crate) fn new() -> Following {
        let setting = match said(SETTING, "tasks take their memory along") {
            Some(Said::Never) => Setting::Never,
            Some(Said::Always) => Setting::Always,
            None => Setting::Large,
        };
        let (going, coming) = (BTreeMap::new(), BTreeMap::new());
        Following {
            setting,
            possible: Err("the engine has not been tried".into()),
            failed: None,
            going,
            coming,
        }
    }

    /// Whether memory can follow tasks from here and to here.
    pub(crate) fn can(&self) -> bool {
        let is_out = self.failed.is_some_and(|at| at.elapsed() < FAILED_PAUSE);
        self.setting != Setting::Never && self.possible.is_ok() && !is_out
    }

    /// Whether the memory of this task should.
    pub(crate) fn should(&self, facts: &TaskFacts) -> bool {
        self.can()
            && (self.setting == Setting::Always || facts.resident_bytes >= FOLLOWS_FROM_BYTES)
    }

    /// True while memory for this move is on its way, or all of it is here and the task does not run yet.
    pub(crate) fn comes(&self, migration: MigrationId) -> bool {
        self.coming.contains_key(&migration)
    }

    /// It may be this host or this engine that cannot: for a while tasks take their memory along.
    pub(crate) fn has_failed(&mut self, why: Option<&Failure>) {
        if let Some(why @ (Failure::Engine(_) | Failure::Io(_) | Failure::Deadline { .. })) = why {
            eprintln!(
                "tasks take their memory along for {} minutes: {why}",
                FAILED_PAUSE.as_secs() / 60
            );
            self.failed = Some(Instant::now());
        }
    }

    /// The task is about to be killed because it runs elsewhere: its memory outlives it.
    pub(crate) fn outlive(&self, migration: MigrationId) {
        if let Some(memory) = self.going.get(&migration) {
            memory.outlive();
        }
    }

    /// Nobody gets any more; for the end of the tasker.
    pub(crate) fn withhold_all(&self) {
        self.going.values().for_each(ServedMemory::withhold);
    }
}

/// Connects to the socket on which the daemon passes memory on.
pub(crate) fn connect(way: &Path) -> Result<OwnedFd, Failure> {
    let failed = |e| Failure::Io(format!("no way for its memory: {}: {e}", way.display()));
    UnixStream::connect(way).map(OwnedFd::from).map_err(failed)
}

/// Nothing passes on this way any more.
pub(crate) fn shut(way: &OwnedFd) {
    // The other end may have done so.
    let _ = shutdown(way.as_raw_fd(), Shutdown::Both);
}

fn limits() -> Result<Limits, Failure> {
    let cancel = Cancel::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(Limits {
        allowed: TRANSFER_ALLOWED,
        cancel,
    })
}

impl Supervisor {
    // ---- source

    /// The images are written; what is not in them is handed out from now on.
    pub(crate) fn hand_out(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        serving: Box<dyn Serving>,
    ) -> Result<(), Failure> {
        let (limits, memory) = (limits()?, serving.memory());
        let cancel = limits.cancel.clone();
        let work = move || Outcome::Served {
            migration,
            tid,
            result: serving.finish(&limits),
        };
        let worker = self.moves.workers.start(&cancel, None, work)?;
        self.moves.following.going.insert(migration, memory);
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.phase = Phase::Serving {
                migration,
                worker,
                called_off: false,
            };
        }
        Ok(())
    }

    /// The move is off, or its task has ended: nobody gets any more of the memory.
    pub(crate) fn withhold(&self, migration: MigrationId, worker: u64) {
        if let Some(memory) = self.moves.following.going.get(&migration) {
            memory.withhold();
        }
        self.moves.workers.cancel(worker);
    }

    /// Nothing is handed out any more.
    pub(crate) fn served(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        result: &Result<(), Failure>,
    ) {
        self.moves.following.going.remove(&migration);
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let Phase::Serving {
            migration: of,
            called_off,
            ..
        } = task.phase
        else {
            return;
        };
        if of != migration {
            return;
        }
        task.phase = Phase::Stopped { migration };
        if result.is_err() {
            task.be_still();
        }
        if called_off {
            self.continue_task(migration, tid);
        }
    }

    // ---- target

    /// Begins to fetch the memory of a task that is about to be restored.
    pub(crate) fn fetch(
        &mut self,
        migration: MigrationId,
        dir: &Path,
        way: &Path,
    ) -> Result<(), Failure> {
        let came = self.moves.pre_copies.take_store(migration)?;
        let engine = self.moves.engine.as_ref().ok_or_else(|| self.broken())?;
        let (stream, store) = match came {
            Some((stream, store)) => {
                let stream = stream
                    .try_clone()
                    .map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
                (stream, store)
            }
            None => (connect(way)?, ReceivedPages::empty()),
        };
        let arriving = engine.start_arrival(dir, stream, store)?;
        let (limits, pid, whole) = (limits()?, arriving.engine_pid(), arriving.whole());
        let cancel = limits.cancel.clone();
        let work = move || Outcome::Arrived {
            migration,
            result: arriving.finish(&limits),
        };
        let worker = self.moves.workers.start(&cancel, Some(pid), work)?;
        let coming = Coming {
            worker,
            whole,
            runs: None,
            complete: false,
            lost: None,
            over: false,
            needs: Vec::new(),
        };
        self.moves.following.coming.insert(migration, coming);
        Ok(())
    }

    /// The task of this move runs.
    pub(crate) fn memory_follows_to(&mut self, migration: MigrationId, tid: Tid) {
        let Some(coming) = self.moves.following.coming.get_mut(&migration) else {
            return;
        };
        coming.runs = Some(tid);
        if coming.complete {
            self.moves.following.coming.remove(&migration);
            self.say(&FromTasker::Arrived {
                migration,
                result: Ok(()),
            });
        }
    }

    /// The copy is thrown away.
    pub(crate) fn fetch_no_more(&mut self, migration: MigrationId) {
        self.moves.pre_copies.end_coming(migration);
        if let Some(coming) = self.moves.following.coming.remove(&migration) {
            self.moves.workers.cancel(coming.worker);
        }
    }

    /// The task has ended: what has not come yet is of no use to it. Whom it has left behind would need it, and ends with it.
    pub(crate) fn memory_unneeded(&mut self, task: &Task) {
        let tid = task.tid;
        for coming in self
            .moves
            .following
            .coming
            .values_mut()
            .filter(|coming| coming.runs == Some(tid))
        {
            // One that was killed for want of it has not ended by itself.
            coming.over = coming.lost.is_none();
            task.kill_all();
            coming.needs = task.crowd().pids();
            self.moves.workers.cancel(coming.worker);
        }
    }

    /// The daemon says that no more will come. If some of it is missing, nothing may run that needs it, first of all.
    pub(crate) fn memory_lost(&mut self, migration: MigrationId, why: String) {
        if self.moves.pre_copies.lose_coming(migration) {
            self.say(&FromTasker::PreCopyLost {
                migration,
                why: Failure::Images(why.clone()),
            });
        }
        let coming = self.moves.following.coming.get_mut(&migration);
        let Some(coming) = coming.filter(|coming| !coming.whole.without_more()) else {
            return;
        };
        coming.lost = Some(Failure::Images(why));
        let (runs, worker) = (coming.runs, coming.worker);
        if let Some(task) = runs.and_then(|tid| self.tasks.get(&tid)) {
            coming.needs = task.crowd().pids();
            task.kill_all();
        }
        self.moves.workers.cancel(worker);
    }

    /// All memory is here, or no more of it will come.
    pub(crate) fn arrived(
        &mut self,
        migration: MigrationId,
        result: Result<(), (Failure, Missing)>,
    ) {
        let Some(mut coming) = self.moves.following.coming.remove(&migration) else {
            return;
        };
        let (result, missing) = match result {
            Ok(()) => (Ok(()), None),
            Err((why, missing)) => (Err(why), Some(missing)),
        };
        let task = coming.runs.and_then(|tid| self.tasks.get(&tid));
        // The engine may have noticed its end before we have.
        coming.over |= coming.lost.is_none() && task.is_some_and(Task::has_ended);
        let result = match (coming.lost.take(), result) {
            (None, _) if coming.over => Ok(()),
            (None, result) => {
                self.moves.following.has_failed(result.as_ref().err());
                result
            }
            // Its processes were killed already.
            (Some(lost), _) => Err(lost),
        };
        if let (Some(task), true) = (task, missing.is_some()) {
            coming.needs.extend(task.crowd().pids());
            task.kill_all();
        }
        match (result, coming.runs) {
            (Ok(()), None) => {
                coming.complete = true;
                self.moves.following.coming.insert(migration, coming);
                return;
            }
            (result, Some(_)) => self.say(&FromTasker::Arrived { migration, result }),
            (Err(why), None) => self.copy_lost(migration, why),
        }
        if let Some(missing) = missing {
            self.keep_until_dead(missing, coming.needs);
        }
    }

    /// A killed process may be in the middle of a long system call: what keeps it from zeros stays until it is dead.
    fn keep_until_dead(&mut self, missing: Missing, needs: Vec<i32>) {
        let Ok(cancel) = Cancel::new() else { return };
        let work = move || {
            let until = Instant::now() + END_ALLOWED;
            while !needs.iter().all(|pid| stop::has_ended(*pid)) && Instant::now() < until {
                std::thread::sleep(LOOK_PAUSE);
            }
            drop(missing);
            Outcome::Outlived
        };
        // Without a thread it is dropped now, behind the kill.
        let _ = self.moves.workers.start(&cancel, None, work);
    }

    /// A copy that does not run yet will never be whole.
    fn copy_lost(&mut self, migration: MigrationId, why: Failure) {
        match self.moves.stage_of(migration) {
            Some(Stage::Restoring { worker, lost, .. }) => {
                *lost = Some(why);
                let worker = *worker;
                self.moves.workers.cancel(worker);
            }
            Some(stage @ (Stage::Prepared | Stage::Held { .. })) => {
                let word = stage.lost_word(migration, why);
                self.clear_target(migration, vec![word]);
            }
            // What is built when its files are there finds that out.
            Some(Stage::Placing { .. }) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_is_none_is_told_from_one_that_is_not_there() {
        assert_eq!(read_setting(""), Ok(None));
        assert_eq!(read_setting("never"), Ok(Some(Said::Never)));
        assert_eq!(read_setting("always"), Ok(Some(Said::Always)));
        assert_eq!(read_setting("no"), Err("no"));
    }
}
