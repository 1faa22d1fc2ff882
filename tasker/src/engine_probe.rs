//! Probes the engine by dumping and restoring a tiny process, in the background.
//!
//! Only a real dump shows that the engine works on this kernel with the tasker's rights; the
//! version number does not. An engine that fails or is missing is probed again at increasing
//! intervals, because it may have been replaced, or the failure may have been caused by a full
//! disk.

use crate::migrations::{EngineStatus, engine_limits};
use crate::namespace::Namespace;
use crate::post_copy::PostCopyUnavailable;
use crate::supervisor::Supervisor;
use crate::task::Output;
use crate::workers::WorkerResult;
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

/// Delay after the first failure until the engine is probed again. The delay doubles with each
/// failure.
const RETRY_INTERVAL_MIN: Duration = Duration::from_secs(10);
/// Maximum delay until a failed engine is probed again.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(300);
/// Prefix of the name of the directory in which a probe writes its images.
const PROBE_DIR_PREFIX: &str = "sempa-trial-";
/// Age from which the directory of a probe belongs to a killed tasker. A probe takes much less
/// time.
const STALE_DIR_AGE: Duration = Duration::from_secs(120);

/// The process and the images of a running probe. Dropping this value ends the process and removes
/// the images.
pub(crate) struct EngineProbe {
    namespace: Namespace,
    pid: i32,
    output: Output,
    dir: PathBuf,
}

impl Drop for EngineProbe {
    fn drop(&mut self) {
        self.namespace.kill();
        // The directory may already be removed; no caller could handle other errors.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Supervisor {
    /// Starts a probe if the engine was found. If it was missing before, looks for it again.
    pub(crate) fn start_probe(&mut self) {
        match &self.migrations.engine_status {
            EngineStatus::Probing(_) => {}
            EngineStatus::Unusable(why) if self.uses_namespaces => {
                let why = why.clone();
                match Criu::locate(|name| std::env::var_os(name)) {
                    Ok(criu) => self.migrations.engine = Some(Arc::new(criu)),
                    Err(none) => return self.mark_engine_unusable(&why, none.to_string()),
                }
                self.migrations.engine_status = EngineStatus::Reprobing(why);
            }
            _ => return,
        }
        if let Err(why) = self.start_probe_process() {
            self.finish_probe(Err(why));
        }
    }

    /// Marks the engine as unusable because of `why`, and schedules the next probe. Notifies the
    /// daemon if `why` differs from the previous reason `before`.
    fn mark_engine_unusable(&mut self, before: &str, why: String) {
        self.probe_at = Some(Instant::now() + retry_delay(self.migrations.failed_probes));
        self.migrations.failed_probes = self.migrations.failed_probes.saturating_add(1);
        self.migrations.engine = None;
        let reason_changed = why != before;
        self.migrations.engine_status = EngineStatus::Unusable(why);
        if reason_changed {
            self.send(&FromTasker::Ready(self.capabilities()));
        }
    }

    fn start_probe_process(&mut self) -> Result<(), Failure> {
        let io = |e: std::io::Error| Failure::Io(e.to_string());
        let temp = std::env::temp_dir();
        remove_stale_dirs(&temp);
        let template = temp.join(format!("{PROBE_DIR_PREFIX}XXXXXX"));
        let dir = nix::unistd::mkdtemp(&template)
            .map_err(|e| Failure::Io(format!("{}: {e}", template.display())))?;
        let cwd =
            CString::new(dir.as_os_str().as_bytes()).map_err(|e| Failure::Io(e.to_string()))?;
        let (output, theirs) = Output::new().map_err(io)?;
        let mut probe = EngineProbe {
            namespace: Namespace::new(None).map_err(io)?,
            pid: 0,
            output,
            dir: dir.clone(),
        };
        let stdin = File::open("/dev/null").map_err(io)?;
        probe.pid = probe
            .namespace
            .start_idle_process(&cwd, &stdin, &theirs)
            .map_err(io)?
            .pid;
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let (checking, limits) = (engine.start_post_copy_check(&dir)?, engine_limits(0)?);
        self.migrations.probe = Some(probe);
        let (cancel, pid) = (limits.cancel.clone(), checking.engine_pid());
        self.migrations.workers.start(&cancel, Some(pid), move || {
            WorkerResult::ProbeChecked(checking.finish(&limits))
        })?;
        Ok(())
    }

    /// Handles the result of the post-copy check, and starts the probe's dump.
    pub(crate) fn on_probe_checked(&mut self, result: Result<(), Failure>) {
        self.migrations.post_copies.support = result.map_err(PostCopyUnavailable::CheckFailed);
        if let Err(why) = self.dump_probe() {
            self.finish_probe(Err(why));
        }
    }

    fn dump_probe(&mut self) -> Result<(), Failure> {
        let (Some(probe), Some(engine)) = (&self.migrations.probe, &self.migrations.engine) else {
            return Err(Failure::Cancelled("the tasker ends".into()));
        };
        let (pid, dir, pid_namespace) = (probe.pid, probe.dir.clone(), probe.namespace.inode());
        let dumping = engine.start_dump(DumpJob {
            pid,
            processes: Vec::new(),
            dir,
            pid_namespace,
            page_stream: None,
            pre_copied: None,
        })?;
        let limits = engine_limits(0)?;
        let (cancel, pid) = (limits.cancel.clone(), dumping.engine_pid());
        let work =
            move || WorkerResult::ProbeDumped(dumping.finish(&limits).map(|(report, _)| report));
        self.migrations.workers.start(&cancel, Some(pid), work)?;
        Ok(())
    }

    /// Handles the result of the probe's dump, and starts the restore.
    pub(crate) fn on_probe_dumped(&mut self, result: Result<DumpReport, Failure>) {
        if let Err(why) = result.and_then(|_| self.restore_probe()) {
            self.finish_probe(Err(why));
        }
    }

    fn restore_probe(&mut self) -> Result<(), Failure> {
        let io = |e: std::io::Error| Failure::Io(e.to_string());
        let (Some(probe), Some(engine)) = (&mut self.migrations.probe, &self.migrations.engine)
        else {
            return Err(Failure::Cancelled("the tasker ends".into()));
        };
        let source = std::mem::replace(&mut probe.namespace, Namespace::new(None).map_err(io)?);
        let outside = ExternalResources {
            output_pipe: probe.output.inode(),
        };
        let (output, theirs) = Output::new().map_err(io)?;
        probe.output = output;
        let pid_namespace = probe.namespace.open().map_err(io)?;
        let job = RestoreJob {
            dir: probe.dir.clone(),
            external: outside,
            pid_namespace,
            output: theirs,
            post_copy: false,
        };
        let restoring = engine.start_restore(job)?;
        let limits = engine_limits(0)?;
        let (cancel, pid) = (limits.cancel.clone(), restoring.engine_pid());
        self.migrations.workers.start(&cancel, Some(pid), move || {
            WorkerResult::ProbeRestored(restoring.wait_until_restored(&limits))
        })?;
        self.kill_namespace(source, Vec::new());
        Ok(())
    }

    /// Handles the result of the probe's restore, and discards the restored process.
    pub(crate) fn on_probe_restored(&mut self, result: Result<Box<dyn RestoredTask>, Failure>) {
        let result = result.map(|held| held.abort());
        self.finish_probe(result);
    }

    /// Ends the probe. Notifies the daemon if the engine is unusable, and handles the orders that
    /// were deferred until the end of the probe.
    fn finish_probe(&mut self, result: Result<(), Failure>) {
        let dir = self
            .migrations
            .probe
            .take()
            .map(|probe| probe.dir.display().to_string());
        // Replace the directory's name, so that equal failures have equal texts.
        let failed = |why: Failure| {
            let why = why
                .to_string()
                .replace(dir.as_deref().unwrap_or(PROBE_DIR_PREFIX), "its directory");
            format!("the dump engine failed its trial here: {why}; {INSTALL_HINT}")
        };
        match (self.migrations.engine_status.clone(), result) {
            (EngineStatus::Probing(version), Ok(())) => {
                self.migrations.engine_status = EngineStatus::Usable(version)
            }
            (EngineStatus::Probing(_), Err(why)) => self.mark_engine_unusable("", failed(why)),
            (EngineStatus::Reprobing(before), result) => {
                let probed =
                    |engine: &Arc<dyn Engine>| engine.probe().map_err(|why| why.to_string());
                let version = result.map_err(failed).and_then(|()| {
                    self.migrations
                        .engine
                        .as_ref()
                        .map_or_else(|| Err(before.clone()), probed)
                });
                match version {
                    Ok(version) => {
                        self.migrations.failed_probes = 0;
                        self.migrations.engine_status = EngineStatus::Usable(version);
                        self.send(&FromTasker::Ready(self.capabilities()));
                    }
                    Err(why) => self.mark_engine_unusable(&before, why),
                }
            }
            _ => {}
        }
        self.handle_deferred_orders();
    }
}

/// Returns the delay before the next probe after `failed` consecutive failures.
fn retry_delay(failed: u32) -> Duration {
    RETRY_INTERVAL_MIN
        .saturating_mul(1 << failed.min(16))
        .min(RETRY_INTERVAL_MAX)
}

/// Removes probe directories in `temp` that killed taskers of this user have not removed.
fn remove_stale_dirs(temp: &Path) {
    let uid = nix::unistd::geteuid().as_raw();
    for entry in std::fs::read_dir(temp).into_iter().flatten().flatten() {
        let old = |meta: std::fs::Metadata| {
            let age = meta.modified().ok().and_then(|at| at.elapsed().ok());
            meta.is_dir() && meta.uid() == uid && age.is_some_and(|age| age > STALE_DIR_AGE)
        };
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(PROBE_DIR_PREFIX)
            && entry.metadata().is_ok_and(old)
        {
            // Another tasker may be removing the directory at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
