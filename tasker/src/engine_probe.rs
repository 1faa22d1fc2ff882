//! Probes the engine in the background, by dumping and restoring a tiny process.
//!
//! Only a real dump shows that the engine works on this kernel with the tasker's rights; the
//! version number does not. An engine that fails or is missing is probed again at increasing
//! intervals: it may have been replaced, or the failure may have been caused by a full disk.

use crate::migrations::{EngineStatus, engine_limits};
use crate::namespace::Namespace;
use crate::post_copy::PostCopyUnavailable;
use crate::supervisor::Supervisor;
use crate::task::Output;
use crate::workers::WorkerResult;
use checkpoint::criu::Criu;
use checkpoint::engine::{
    DumpParams, Engine, EngineFailure, ExternalResources, RestoreParams, RestoreResources,
    RestoredTask,
};
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
const RETRY_DELAY_MIN: Duration = Duration::from_secs(10);
/// Maximum delay from a failure until the engine is probed again.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(300);
/// Prefix of the name of the directory in which a probe writes its images.
const PROBE_DIR_PREFIX: &str = "sempa-trial-";
/// Minimum age at which the directory of a probe is considered stale, that is, left by a killed
/// tasker. A probe takes much less time.
const STALE_DIR_AGE_MIN: Duration = Duration::from_secs(120);

/// The process and the images of a running probe. Dropping this value kills the process and removes
/// the images.
pub(crate) struct EngineProbe {
    namespace: Namespace,
    process_pid: i32,
    output: Output,
    image_dir: PathBuf,
}

impl Drop for EngineProbe {
    fn drop(&mut self) {
        self.namespace.kill_processes();
        // The directory may have been removed already, and no caller could handle another error.
        let _ = std::fs::remove_dir_all(&self.image_dir);
    }
}

impl Supervisor {
    /// Starts the first probe of the engine, or another probe if the engine is unusable. Before
    /// another probe the engine is located again, because it may have been installed or replaced.
    /// Does nothing if the engine is usable or is being probed again.
    pub(crate) fn start_probe(&mut self) {
        match &self.migrations.engine_status {
            EngineStatus::Probing(_) => {}
            EngineStatus::Unusable(why) if self.uses_namespaces() => {
                let why = why.clone();
                match Criu::locate(|name| std::env::var_os(name)) {
                    Ok(criu) => self.migrations.engine = Some(Arc::new(criu)),
                    Err(locate_error) => {
                        return self.mark_engine_unusable(&why, locate_error.to_string());
                    }
                }
                self.migrations.engine_status = EngineStatus::Reprobing(why);
            }
            _ => return,
        }
        if let Err(why) = self.start_probe_process() {
            self.finish_probe(Err(why));
        }
    }

    /// Marks the engine as unusable because of `reason`, and schedules the next probe. Notifies the
    /// daemon if `reason` differs from the previous reason `previous_reason`.
    fn mark_engine_unusable(&mut self, previous_reason: &str, reason: String) {
        self.probe_at =
            Some(Instant::now() + retry_delay(self.migrations.consecutive_probe_failures));
        self.migrations.consecutive_probe_failures =
            self.migrations.consecutive_probe_failures.saturating_add(1);
        self.migrations.engine = None;
        let reason_changed = reason != previous_reason;
        self.migrations.engine_status = EngineStatus::Unusable(reason);
        if reason_changed {
            self.send(&FromTasker::Ready(self.capabilities()));
        }
    }

    fn start_probe_process(&mut self) -> Result<(), Failure> {
        let io_failure = |e: std::io::Error| Failure::Io(e.to_string());
        let temp_path = std::env::temp_dir();
        remove_stale_dirs(&temp_path);
        let template = temp_path.join(format!("{PROBE_DIR_PREFIX}XXXXXX"));
        let dir = nix::unistd::mkdtemp(&template)
            .map_err(|e| Failure::Io(format!("{}: {e}", template.display())))?;
        let cwd =
            CString::new(dir.as_os_str().as_bytes()).map_err(|e| Failure::Io(e.to_string()))?;
        let (output, output_writer) = Output::new().map_err(io_failure)?;
        let mut probe = EngineProbe {
            namespace: Namespace::new(self.spare_namespaces.kind(), None).map_err(io_failure)?,
            process_pid: 0,
            output,
            image_dir: dir.clone(),
        };
        let stdin = File::open("/dev/null").map_err(io_failure)?;
        probe.process_pid = probe
            .namespace
            .start_idle_process(&cwd, &stdin, &output_writer)
            .map_err(io_failure)?
            .pid;
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let (running_check, limits) = (engine.start_post_copy_check(&dir)?, engine_limits(0)?);
        self.migrations.running_probe = Some(probe);
        let (cancel, engine_pid) = (limits.cancel.clone(), running_check.engine_pid());
        self.migrations
            .workers
            .start_worker(&cancel, Some(engine_pid), move || {
                WorkerResult::ProbeChecked(running_check.wait_for_result(&limits))
            })?;
        Ok(())
    }

    /// Handles the result of the post-copy check, which determines whether this host supports
    /// post-copy, and starts the probe's dump.
    pub(crate) fn on_probe_checked(&mut self, result: Result<(), Failure>) {
        self.migrations.post_copies.support = result.map_err(PostCopyUnavailable::CheckFailed);
        if let Err(why) = self.dump_probe() {
            self.finish_probe(Err(why));
        }
    }

    fn dump_probe(&mut self) -> Result<(), Failure> {
        let (Some(probe), Some(engine)) = (&self.migrations.running_probe, &self.migrations.engine)
        else {
            return Err(Failure::Cancelled("the tasker ends".into()));
        };
        let (pid, dir, pid_namespace) = (
            probe.process_pid,
            probe.image_dir.clone(),
            probe.namespace.namespace_inode(),
        );
        let running_dump = engine.start_dump(DumpParams {
            root_pid: pid,
            processes: Vec::new(),
            dir,
            pid_namespace,
            page_stream: None,
            sent_pages: None,
        })?;
        let limits = engine_limits(0)?;
        let (cancel, pid) = (limits.cancel.clone(), running_dump.engine_pid());
        let work = move || {
            WorkerResult::ProbeDumped(
                running_dump
                    .wait_until_dumped(&limits)
                    .map(|(report, _)| report),
            )
        };
        self.migrations
            .workers
            .start_worker(&cancel, Some(pid), work)?;
        Ok(())
    }

    /// Handles the result of the probe's dump, and starts the restore.
    pub(crate) fn on_probe_dumped(&mut self, result: Result<DumpReport, EngineFailure>) {
        if let Err(why) = result
            .map_err(Failure::from)
            .and_then(|_| self.restore_probe())
        {
            self.finish_probe(Err(why));
        }
    }

    fn restore_probe(&mut self) -> Result<(), Failure> {
        let io_failure = |e: std::io::Error| Failure::Io(e.to_string());
        let (Some(probe), Some(engine)) =
            (&mut self.migrations.running_probe, &self.migrations.engine)
        else {
            return Err(Failure::Cancelled("the tasker ends".into()));
        };
        let source_namespace = std::mem::replace(
            &mut probe.namespace,
            Namespace::new(self.spare_namespaces.kind(), None).map_err(io_failure)?,
        );
        let external_resources = ExternalResources {
            output_pipe: probe.output.pipe_inode(),
        };
        let (output, output_writer) = Output::new().map_err(io_failure)?;
        probe.output = output;
        let pid_namespace = probe.namespace.open().map_err(io_failure)?;
        let restore_params = RestoreParams {
            dir: probe.image_dir.clone(),
            external_resources,
            post_copy: false,
        };
        let resources = RestoreResources {
            pid_namespace,
            output: output_writer,
        };
        let running_restore = engine.start_restore(resources, restore_params)?;
        let limits = engine_limits(0)?;
        let (cancel, engine_pid) = (limits.cancel.clone(), running_restore.engine_pid());
        self.migrations
            .workers
            .start_worker(&cancel, Some(engine_pid), move || {
                WorkerResult::ProbeRestored(running_restore.wait_until_restored(&limits))
            })?;
        self.kill_namespace(source_namespace, Vec::new());
        Ok(())
    }

    /// Handles the result of the probe's restore, and discards the restored process.
    pub(crate) fn on_probe_restored(
        &mut self,
        result: Result<Box<dyn RestoredTask>, EngineFailure>,
    ) {
        let result = result
            .map(|restored_task| restored_task.abort_restore())
            .map_err(Failure::from);
        self.finish_probe(result);
    }

    /// Ends the probe and sets the status of the engine. Notifies the daemon of a change, and
    /// handles the orders that were deferred until the end of the probe.
    fn finish_probe(&mut self, result: Result<(), Failure>) {
        let dir = self
            .migrations
            .running_probe
            .take()
            .map(|probe| probe.image_dir.display().to_string());
        // Equal failures must have equal texts, so the name of the directory is replaced.
        let failure_reason = |why: Failure| {
            let why = why
                .to_string()
                .replace(dir.as_deref().unwrap_or(PROBE_DIR_PREFIX), "its directory");
            format!(
                "the dump engine is there, but failed its trial here: {why}; it is tried again \
                 within {} minutes; if it never succeeds, name another one in SEMPA_CRIU",
                RETRY_DELAY_MAX.as_secs() / 60
            )
        };
        match (self.migrations.engine_status.clone(), result) {
            (EngineStatus::Probing(version), Ok(())) => {
                self.migrations.engine_status = EngineStatus::Usable(version)
            }
            (EngineStatus::Probing(_), Err(why)) => {
                self.mark_engine_unusable("", failure_reason(why))
            }
            (EngineStatus::Reprobing(reason_before), result) => {
                let query_probed_version = |engine: &Arc<dyn Engine>| {
                    engine.query_version().map_err(|why| why.to_string())
                };
                let version = result.map_err(failure_reason).and_then(|()| {
                    self.migrations
                        .engine
                        .as_ref()
                        .map_or_else(|| Err(reason_before.clone()), query_probed_version)
                });
                match version {
                    Ok(version) => {
                        self.migrations.consecutive_probe_failures = 0;
                        self.migrations.engine_status = EngineStatus::Usable(version);
                        self.send(&FromTasker::Ready(self.capabilities()));
                    }
                    Err(why) => self.mark_engine_unusable(&reason_before, why),
                }
            }
            _ => {}
        }
        self.handle_deferred_orders();
    }
}

/// Returns the delay from a failed probe to the next probe. `failure_count` is the number of
/// consecutive failures before this one.
fn retry_delay(failure_count: u32) -> Duration {
    RETRY_DELAY_MIN
        .saturating_mul(1 << failure_count.min(16))
        .min(RETRY_DELAY_MAX)
}

/// Removes from the directory `temp_dir` the probe directories that killed taskers of this user
/// have left.
fn remove_stale_dirs(temp_dir: &Path) {
    let uid = nix::unistd::geteuid().as_raw();
    for entry in std::fs::read_dir(temp_dir).into_iter().flatten().flatten() {
        let is_stale = |metadata: std::fs::Metadata| {
            let age = metadata
                .modified()
                .ok()
                .and_then(|modified_at| modified_at.elapsed().ok());
            metadata.is_dir()
                && metadata.uid() == uid
                && age.is_some_and(|age| age > STALE_DIR_AGE_MIN)
        };
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(PROBE_DIR_PREFIX)
            && entry.metadata().is_ok_and(is_stale)
        {
            // Fails if another tasker removes the directory at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
