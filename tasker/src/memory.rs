//! Post-copy: memory that is transferred after its task has migrated.
//!
//! - At the source the memory is served after the images are written, even after the task was
//!   killed.
//! - At the target the memory arrives while the task already runs.
//! - It passes through the two daemons, each of which has a socket for it.

use crate::stop;
use crate::supervisor::Supervisor;
use crate::target::Stage;
use crate::task::{Phase, Task};
use crate::workers::Outcome;
use checkpoint::engine::{
    CallLimits, Cancel, FetchCompletion, MemoryServer, ReceivedPages, ServedMemory, UffdGuard,
};
use nix::sys::socket::{Shutdown, shutdown};
use sempa_proto::migration::{Failure, TaskFacts};
use sempa_proto::tasker::FromTasker;
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Resident memory from which post-copy is used: below it, a task is stopped hardly longer without
/// post-copy.
const FOLLOWS_FROM_BYTES: u64 = 16 << 20;
/// Variable that selects when post-copy is used: `never`, `always`; if not set, from
/// [`FOLLOWS_FROM_BYTES`] on.
const SETTING: &str = "SEMPA_POST_COPY";
/// Time without post-copy after a failure.
const FAILED_PAUSE: Duration = Duration::from_secs(600);
/// Time limit for killed processes to end; they need much less.
const END_ALLOWED: Duration = Duration::from_secs(60);
const LOOK_PAUSE: Duration = Duration::from_millis(2);
/// Longer than any transfer. The daemons notice a transfer that has stalled.
const TRANSFER_ALLOWED: Duration = Duration::from_secs(7 * 24 * 3600);

/// When post-copy is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Never,
    Large,
    Always,
}

/// A value of a setting for post-copy or pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Never,
    Always,
}

/// Reads a setting from the environment; `None` if it is not set. An invalid value counts as
/// `never`, the mode that cannot lose anything, and `so` is printed as the consequence.
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

/// Post-copied memory that is arriving at this host.
#[derive(Debug)]
struct Coming {
    worker: u64,
    /// Whether any of it is missing.
    whole: FetchCompletion,
    /// The task, once it runs.
    runs: Option<Tid>,
    complete: bool,
    /// Why the rest of it will not arrive.
    lost: Option<Failure>,
    /// The task has exited and needs no more memory.
    over: bool,
    /// Processes that were killed because their memory is missing.
    needs: Vec<i32>,
}

/// The post-copies from this host and to it.
#[derive(Debug)]
pub(crate) struct Following {
    setting: Setting,
    /// Whether post-copy is possible here; known after the probe of the engine.
    pub(crate) possible: Result<(), String>,
    /// When post-copy last failed.
    failed: Option<Instant>,
    going: BTreeMap<MigrationId, ServedMemory>,
    coming: BTreeMap<MigrationId, Coming>,
}

impl Following {
    /// Reads the setting from the environment.
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

    /// True if post-copy is possible from this host and to it.
    pub(crate) fn can(&self) -> bool {
        let is_out = self.failed.is_some_and(|at| at.elapsed() < FAILED_PAUSE);
        self.setting != Setting::Never && self.possible.is_ok() && !is_out
    }

    /// True if post-copy should be used for this task.
    pub(crate) fn should(&self, facts: &TaskFacts) -> bool {
        self.can()
            && (self.setting == Setting::Always || facts.resident_bytes >= FOLLOWS_FROM_BYTES)
    }

    /// True while memory for this migration is arriving, or is complete and the task does not run
    /// yet.
    pub(crate) fn comes(&self, migration: MigrationId) -> bool {
        self.coming.contains_key(&migration)
    }

    /// Disables post-copy for a while if the failure may be due to this host or engine.
    pub(crate) fn has_failed(&mut self, why: Option<&Failure>) {
        if let Some(why @ (Failure::Engine(_) | Failure::Io(_) | Failure::Deadline { .. })) = why {
            eprintln!(
                "tasks take their memory along for {} minutes: {why}",
                FAILED_PAUSE.as_secs() / 60
            );
            self.failed = Some(Instant::now());
        }
    }

    /// Keeps the memory of a task that is about to be killed because it runs on another host.
    pub(crate) fn outlive(&self, migration: MigrationId) {
        if let Some(memory) = self.going.get(&migration) {
            memory.keep_after_kill();
        }
    }

    /// Stops serving all memory; called when the tasker ends.
    pub(crate) fn withhold_all(&self) {
        self.going.values().for_each(ServedMemory::stop_serving);
    }
}

/// Connects to the socket through which the daemon forwards memory.
pub(crate) fn connect(way: &Path) -> Result<OwnedFd, Failure> {
    let failed = |e| Failure::Io(format!("no way for its memory: {}: {e}", way.display()));
    UnixStream::connect(way).map(OwnedFd::from).map_err(failed)
}

/// Ends all traffic on this socket.
pub(crate) fn shut(way: &OwnedFd) {
    // Fails if the other end has closed it.
    let _ = shutdown(way.as_raw_fd(), Shutdown::Both);
}

fn limits() -> Result<CallLimits, Failure> {
    let cancel = Cancel::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(CallLimits {
        timeout: TRANSFER_ALLOWED,
        cancel,
    })
}

impl Supervisor {
    // ---- source

    /// Starts to serve the memory that is not in the written images.
    pub(crate) fn hand_out(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        serving: Box<dyn MemoryServer>,
    ) -> Result<(), Failure> {
        let (limits, memory) = (limits()?, serving.handle());
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

    /// Stops serving memory, because the migration was aborted or its task has exited.
    pub(crate) fn withhold(&self, migration: MigrationId, worker: u64) {
        if let Some(memory) = self.moves.following.going.get(&migration) {
            memory.stop_serving();
        }
        self.moves.workers.cancel(worker);
    }

    /// Handles the end of serving memory.
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

    /// Starts to fetch the memory of a task that is about to be restored.
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
        let arriving = engine.start_fetch(dir, stream, store)?;
        let (limits, pid, whole) = (limits()?, arriving.engine_pid(), arriving.completion());
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

    /// Records that the task of this migration runs.
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

    /// Cancels the fetch for a copy that is discarded.
    pub(crate) fn fetch_no_more(&mut self, migration: MigrationId) {
        self.moves.pre_copies.end_coming(migration);
        if let Some(coming) = self.moves.following.coming.remove(&migration) {
            self.moves.workers.cancel(coming.worker);
        }
    }

    /// Cancels the fetch for a task that has exited. Its remaining processes would need the memory,
    /// so they are killed.
    pub(crate) fn memory_unneeded(&mut self, task: &Task) {
        let tid = task.tid;
        for coming in self
            .moves
            .following
            .coming
            .values_mut()
            .filter(|coming| coming.runs == Some(tid))
        {
            // A task that was killed because its memory is lost has not exited on its own.
            coming.over = coming.lost.is_none();
            task.kill_all();
            coming.needs = task.crowd().pids();
            self.moves.workers.cancel(coming.worker);
        }
    }

    /// Handles the daemon's report that no more memory will arrive. If any is missing, first kills
    /// all processes that need it.
    pub(crate) fn memory_lost(&mut self, migration: MigrationId, why: String) {
        if self.moves.pre_copies.lose_coming(migration) {
            self.say(&FromTasker::PreCopyLost {
                migration,
                why: Failure::Images(why.clone()),
            });
        }
        let coming = self.moves.following.coming.get_mut(&migration);
        let Some(coming) = coming.filter(|coming| !coming.whole.close_if_complete()) else {
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

    /// Handles the completion or failure of a fetch.
    pub(crate) fn arrived(
        &mut self,
        migration: MigrationId,
        result: Result<(), (Failure, UffdGuard)>,
    ) {
        let Some(mut coming) = self.moves.following.coming.remove(&migration) else {
            return;
        };
        let (result, missing) = match result {
            Ok(()) => (Ok(()), None),
            Err((why, missing)) => (Err(why), Some(missing)),
        };
        let task = coming.runs.and_then(|tid| self.tasks.get(&tid));
        // The engine may notice the task's exit before this thread does.
        coming.over |= coming.lost.is_none() && task.is_some_and(Task::has_ended);
        let result = match (coming.lost.take(), result) {
            (None, _) if coming.over => Ok(()),
            (None, result) => {
                self.moves.following.has_failed(result.as_ref().err());
                result
            }
            // Its processes are already killed.
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

    /// Keeps `missing` until these killed processes are dead. One of them may be in a long system
    /// call, and must not read zeros in place of the missing memory.
    fn keep_until_dead(&mut self, missing: UffdGuard, needs: Vec<i32>) {
        let Ok(cancel) = Cancel::new() else { return };
        let work = move || {
            let until = Instant::now() + END_ALLOWED;
            while !needs.iter().all(|pid| stop::has_ended(*pid)) && Instant::now() < until {
                std::thread::sleep(LOOK_PAUSE);
            }
            drop(missing);
            Outcome::Outlived
        };
        // Without a thread it is dropped now, after the kill.
        let _ = self.moves.workers.start(&cancel, None, work);
    }

    /// Clears a copy that does not run yet and will never be complete.
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
            // The build that follows the placing of files will notice it.
            Some(Stage::Placing { .. }) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unset_and_invalid_settings_are_distinguished() {
        assert_eq!(read_setting(""), Ok(None));
        assert_eq!(read_setting("never"), Ok(Some(Said::Never)));
        assert_eq!(read_setting("always"), Ok(Some(Said::Always)));
        assert_eq!(read_setting("no"), Err("no"));
    }
}
