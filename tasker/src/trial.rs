//! A real dump and restore of a tiny process at the tasker's start, in the background: the only way to know that the
//! engine works on this kernel with these rights. Its version number says nothing about that. An engine that does not work, or is
//! not there, is tried again now and then: somebody may have put a better one in its place, or a full disk was in the way.

use crate::moves::{EngineState, limits_for};
use crate::namespace::Namespace;
use crate::supervisor::Supervisor;
use crate::task::Output;
use crate::workers::Outcome;
use checkpoint::criu::{Criu, HOW_TO_GET};
use checkpoint::engine::{DumpJob, Engine, Held, Outside, RestoreJob};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{DumpReport, FromTasker};
use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause before an engine that does not work is tried again: at first, and, as it doubles, at most.
const AGAIN_MIN: Duration = Duration::from_secs(10);
const AGAIN_MAX: Duration = Duration::from_secs(300);
/// Beginning of the name of its directory.
const DIR_NAME: &str = "sempa-trial-";
/// A trial is over long before this; an older directory was left by a tasker that was killed.
const LEFT_BEHIND_AGE: Duration = Duration::from_secs(120);

/// What the trial has made. Dropping it ends the process and removes the images.
pub(crate) struct Trial {
    namespace: Namespace,
    /// Its process.
    pid: i32,
    output: Output,
    dir: PathBuf,
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.namespace.kill();
        // If it is gone already there is nothing to do, and nobody is left to be told of anything else.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Supervisor {
    /// Begins the trial if there is an engine to try.
    pub(crate) fn begin_trial(&mut self) {
        match &self.moves.state {
            EngineState::Trying(_) => {}
            EngineState::Broken(why) if self.namespaces => {
                let why = why.clone();
                match Criu::locate(|name| std::env::var_os(name)) {
                    Ok(criu) => self.moves.engine = Some(Arc::new(criu)),
                    Err(none) => return self.engine_is_broken(&why, none),
                }
                self.moves.state = EngineState::TryingAgain(why);
            }
            _ => return,
        }
        if let Err(why) = self.start_trial() {
            self.end_trial(Err(why));
        }
    }

    /// The engine cannot be used, as before or for another reason, which is said aloud.
    fn engine_is_broken(&mut self, before: &str, why: String) {
        self.trial_at = Some(Instant::now() + pause_before(self.moves.trials_failed));
        self.moves.trials_failed = self.moves.trials_failed.saturating_add(1);
        self.moves.engine = None;
        let is_news = why != before;
        self.moves.state = EngineState::Broken(why);
        if is_news {
            self.say(&FromTasker::Ready(self.capabilities()));
        }
    }

    fn start_trial(&mut self) -> Result<(), Failure> {
        let io = |e: std::io::Error| Failure::Io(e.to_string());
        let temp = std::env::temp_dir();
        remove_old(&temp);
        let template = temp.join(format!("{DIR_NAME}XXXXXX"));
        let dir = nix::unistd::mkdtemp(&template)
            .map_err(|e| Failure::Io(format!("{}: {e}", template.display())))?;
        let cwd =
            CString::new(dir.as_os_str().as_bytes()).map_err(|e| Failure::Io(e.to_string()))?;
        let (output, theirs) = Output::new().map_err(io)?;
        let mut trial = Trial {
            namespace: Namespace::new(None).map_err(io)?,
            pid: 0,
            output,
            dir: dir.clone(),
        };
        let stdin = File::open("/dev/null").map_err(io)?;
        trial.pid = trial
            .namespace
            .start_sleeper(&cwd, &stdin, &theirs)
            .map_err(io)?
            .pid;
        let engine = self.moves.engine.clone().ok_or_else(|| self.broken())?;
        let (checking, limits) = (engine.start_check(&dir)?, limits_for(0)?);
        self.moves.trial = Some(trial);
        let (cancel, pid) = (limits.cancel.clone(), checking.engine_pid());
        self.moves.workers.start(&cancel, Some(pid), move || {
            Outcome::TrialChecked(checking.finish(&limits))
        })?;
        Ok(())
    }

    /// It is known whether memory can follow tasks; the dump comes next.
    pub(crate) fn trial_checked(&mut self, result: Result<(), Failure>) {
        self.moves.following.possible =
            result.map_err(|why| format!("nobody can deal with missing memory here: {why}"));
        if let Err(why) = self.dump_trial() {
            self.end_trial(Err(why));
        }
    }

    fn dump_trial(&mut self) -> Result<(), Failure> {
        let (Some(trial), Some(engine)) = (&self.moves.trial, &self.moves.engine) else {
            return Err(Failure::CalledOff("the tasker ends".into()));
        };
        let (pid, dir, pid_namespace) = (trial.pid, trial.dir.clone(), trial.namespace.inode());
        let dumping = engine.start_dump(DumpJob {
            pid,
            processes: Vec::new(),
            dir,
            pid_namespace,
            asked_on: None,
            sent: None,
        })?;
        let limits = limits_for(0)?;
        let (cancel, pid) = (limits.cancel.clone(), dumping.engine_pid());
        let work = move || Outcome::TrialDumped(dumping.finish(&limits).map(|(report, _)| report));
        self.moves.workers.start(&cancel, Some(pid), work)?;
        Ok(())
    }

    /// The dump is over; the restore follows.
    pub(crate) fn trial_dumped(&mut self, result: Result<DumpReport, Failure>) {
        if let Err(why) = result.and_then(|_| self.restore_trial()) {
            self.end_trial(Err(why));
        }
    }

    fn restore_trial(&mut self) -> Result<(), Failure> {
        let io = |e: std::io::Error| Failure::Io(e.to_string());
        let (Some(trial), Some(engine)) = (&mut self.moves.trial, &self.moves.engine) else {
            return Err(Failure::CalledOff("the tasker ends".into()));
        };
        let source = std::mem::replace(&mut trial.namespace, Namespace::new(None).map_err(io)?);
        let outside = Outside {
            output_pipe: trial.output.inode(),
        };
        let (output, theirs) = Output::new().map_err(io)?;
        trial.output = output;
        let pid_namespace = trial.namespace.open().map_err(io)?;
        let job = RestoreJob {
            dir: trial.dir.clone(),
            outside,
            pid_namespace,
            output: theirs,
            memory_follows: false,
        };
        let restoring = engine.start_restore(job)?;
        let limits = limits_for(0)?;
        let (cancel, pid) = (limits.cancel.clone(), restoring.engine_pid());
        self.moves.workers.start(&cancel, Some(pid), move || {
            Outcome::TrialHeld(restoring.hold(&limits))
        })?;
        self.when_ended(source, Vec::new());
        Ok(())
    }

    /// The restore is over; nothing of it is wanted.
    pub(crate) fn trial_held(&mut self, result: Result<Box<dyn Held>, Failure>) {
        let result = result.map(|held| held.refuse());
        self.end_trial(result);
    }

    /// Says aloud if the engine turned out not to work, and takes up what waited for this.
    fn end_trial(&mut self, result: Result<(), Failure>) {
        let dir = self
            .moves
            .trial
            .take()
            .map(|trial| trial.dir.display().to_string());
        // The same failure is the same words, whatever the name of its directory.
        let failed = |why: Failure| {
            let why = why
                .to_string()
                .replace(dir.as_deref().unwrap_or(DIR_NAME), "its directory");
            format!("the dump engine failed its trial here: {why}; {HOW_TO_GET}")
        };
        match (self.moves.state.clone(), result) {
            (EngineState::Trying(version), Ok(())) => {
                self.moves.state = EngineState::Works(version)
            }
            (EngineState::Trying(_), Err(why)) => self.engine_is_broken("", failed(why)),
            (EngineState::TryingAgain(before), result) => {
                let probed = |engine: &Arc<dyn Engine>| engine.probe();
                let version = result.map_err(failed).and_then(|()| {
                    self.moves
                        .engine
                        .as_ref()
                        .map_or_else(|| Err(before.clone()), probed)
                });
                match version {
                    Ok(version) => {
                        self.moves.trials_failed = 0;
                        self.moves.state = EngineState::Works(version);
                        self.say(&FromTasker::Ready(self.capabilities()));
                    }
                    Err(why) => self.engine_is_broken(&before, why),
                }
            }
            _ => {}
        }
        self.take_up_deferred();
    }
}

/// How long until an engine is tried again that has failed so many times before.
fn pause_before(failed: u32) -> Duration {
    AGAIN_MIN.saturating_mul(1 << failed.min(16)).min(AGAIN_MAX)
}

/// Removes our own directories that killed taskers left.
fn remove_old(temp: &Path) {
    let uid = nix::unistd::geteuid().as_raw();
    for entry in std::fs::read_dir(temp).into_iter().flatten().flatten() {
        let old = |meta: std::fs::Metadata| {
            let age = meta.modified().ok().and_then(|at| at.elapsed().ok());
            meta.is_dir() && meta.uid() == uid && age.is_some_and(|age| age > LEFT_BEHIND_AGE)
        };
        if entry.file_name().to_string_lossy().starts_with(DIR_NAME)
            && entry.metadata().is_ok_and(old)
        {
            // Somebody else may be removing it too.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
