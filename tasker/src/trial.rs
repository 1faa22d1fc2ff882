//! Probes the engine by a real dump and restore of a tiny process, in the background.
//!
//! Only this shows that the engine works on this kernel with these rights; its version number does
//! not. An engine that fails or is missing is probed again from time to time: it may have been
//! replaced, or a full disk may have been the cause.

use crate::moves::{EngineState, limits_for};
use crate::namespace::Namespace;
use crate::supervisor::Supervisor;
use crate::task::Output;
use crate::workers::Outcome;
use checkpoint::criu::{Criu, INSTALL_HINT};
use checkpoint::engine::{DumpJob, Engine, ExternalResources, RestoreJob, RestoredTask};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{DumpReport, FromTasker};
use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First and longest delay before a failed engine is probed again; the delay doubles.
const AGAIN_MIN: Duration = Duration::from_secs(10);
const AGAIN_MAX: Duration = Duration::from_secs(300);
/// Prefix of the name of the probe's directory.
const DIR_NAME: &str = "sempa-trial-";
/// Age from which a directory was left by a killed tasker: a probe takes much less time.
const LEFT_BEHIND_AGE: Duration = Duration::from_secs(120);

/// What the probe has created. Dropping it ends the process and removes the images.
pub(crate) struct Trial {
    namespace: Namespace,
    pid: i32,
    output: Output,
    dir: PathBuf,
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.namespace.kill();
        // The directory may already be gone; other errors cannot be reported to anyone here.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Supervisor {
    /// Starts the probe if there is an engine to probe.
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

    /// Marks the engine as unusable. Reports that to the daemon if the reason is new.
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
        let (checking, limits) = (engine.start_post_copy_check(&dir)?, limits_for(0)?);
        self.moves.trial = Some(trial);
        let (cancel, pid) = (limits.cancel.clone(), checking.engine_pid());
        self.moves.workers.start(&cancel, Some(pid), move || {
            Outcome::TrialChecked(checking.finish(&limits))
        })?;
        Ok(())
    }

    /// Handles the result of the post-copy check; the dump follows.
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
            page_stream: None,
            pre_copied: None,
        })?;
        let limits = limits_for(0)?;
        let (cancel, pid) = (limits.cancel.clone(), dumping.engine_pid());
        let work = move || Outcome::TrialDumped(dumping.finish(&limits).map(|(report, _)| report));
        self.moves.workers.start(&cancel, Some(pid), work)?;
        Ok(())
    }

    /// Handles the result of the dump; the restore follows.
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
        let outside = ExternalResources {
            output_pipe: trial.output.inode(),
        };
        let (output, theirs) = Output::new().map_err(io)?;
        trial.output = output;
        let pid_namespace = trial.namespace.open().map_err(io)?;
        let job = RestoreJob {
            dir: trial.dir.clone(),
            external: outside,
            pid_namespace,
            output: theirs,
            post_copy: false,
        };
        let restoring = engine.start_restore(job)?;
        let limits = limits_for(0)?;
        let (cancel, pid) = (limits.cancel.clone(), restoring.engine_pid());
        self.moves.workers.start(&cancel, Some(pid), move || {
            Outcome::TrialHeld(restoring.wait_until_restored(&limits))
        })?;
        self.when_ended(source, Vec::new());
        Ok(())
    }

    /// Handles the result of the restore; the restored process is not needed.
    pub(crate) fn trial_held(&mut self, result: Result<Box<dyn RestoredTask>, Failure>) {
        let result = result.map(|held| held.abort());
        self.end_trial(result);
    }

    /// Ends the probe, reports an engine that turned out to be unusable, and handles the orders
    /// that waited.
    fn end_trial(&mut self, result: Result<(), Failure>) {
        let dir = self
            .moves
            .trial
            .take()
            .map(|trial| trial.dir.display().to_string());
        // Equal failures must have equal texts, so the directory's name is replaced.
        let failed = |why: Failure| {
            let why = why
                .to_string()
                .replace(dir.as_deref().unwrap_or(DIR_NAME), "its directory");
            format!("the dump engine failed its trial here: {why}; {INSTALL_HINT}")
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

/// Returns the delay before the next probe after `failed` failures.
fn pause_before(failed: u32) -> Duration {
    AGAIN_MIN.saturating_mul(1 << failed.min(16)).min(AGAIN_MAX)
}

/// Removes directories that killed taskers of this user left.
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
            // Another tasker may be removing it, too.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
