//! Probes the engine in the background, by dumping and restoring a tiny process.
//!
//! Only a real dump shows that the engine works on this kernel with the tasker's rights; the
//! version number does not. An engine that fails or is missing is probed again at increasing
//! intervals: it may have been replaced, or the failure may have been caused by a full disk.

use crate::IDLE_ARGUMENT;
use crate::idle_engines::{EnginePlace, IdleRestoreWithOutput, start_restore_engine};
use crate::image_vault::{ImageDir, ImageVault};
use crate::migrations::{EngineStatus, engine_limits};
use crate::namespace::{Namespace, NamespaceKind};
use crate::post_copy::PostCopyUnavailable;
use crate::supervisor::Supervisor;
use crate::task::{self, Output};
use crate::task_user::with_own_file_rights;
use crate::workers::WorkerResult;
use checkpoint::criu::Criu;
use checkpoint::engine::{
    DumpParams, Engine, EngineFailure, ExternalResources, RestoreParams, RestoredTask,
};
use sempa_proto::Tid;
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{DumpReport, FromTasker, TaskStart};
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

/// Tid of the process of a probe, which is no task.
const PROBE_TID: Tid = Tid::NONE;
/// Path of a directory that does not exist: the images of a probe are not handed out.
const NO_DIR: &str = "/nonexistent";

/// The process and the images of a running probe. Dropping this value kills the process and removes
/// the images.
pub(crate) struct EngineProbe {
    namespace: Namespace,
    process_pid: i32,
    output: Output,
    image_dir: ProbeDir,
}

/// The directory in which a probe writes its images. Dropping this value removes the directory.
enum ProbeDir {
    Temporary(PathBuf),
    OfVault(ImageDir),
}

impl ProbeDir {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(path) => path,
            Self::OfVault(dir) => dir.path(),
        }
    }
}

impl Drop for ProbeDir {
    fn drop(&mut self) {
        if let Self::Temporary(path) = self {
            // The directory may have been removed already, and no caller could handle another
            // error.
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

impl Drop for EngineProbe {
    fn drop(&mut self) {
        self.namespace.kill_processes();
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
                let key_result = self
                    .image_vault
                    .as_mut()
                    .map_or(Ok(()), ImageVault::reload_keys);
                if let Err(key_error) = key_result {
                    return self.mark_engine_unusable(&why, key_error);
                }
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
        let probe = match &self.image_vault {
            Some(vault) => {
                let dir = vault.new_image_dir(PROBE_TID, Path::new(NO_DIR))?;
                self.start_probe_program(ProbeDir::OfVault(dir))?
            }
            None => start_idle_probe(create_probe_dir()?).map_err(io_failure)?,
        };
        let dir = probe.image_dir.path().to_path_buf();
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let (running_check, limits) = (
            with_own_file_rights(|| engine.start_post_copy_check(&dir))?,
            engine_limits(0)?,
        );
        self.migrations.running_probe = Some(probe);
        let (cancel, engine_pid) = (limits.cancel.clone(), running_check.engine_pid());
        self.migrations
            .workers
            .start_worker(&cancel, Some(engine_pid), move || {
                WorkerResult::ProbeChecked(with_own_file_rights(|| {
                    running_check.wait_for_result(&limits)
                }))
            })?;
        Ok(())
    }

    /// Starts this program as the process of a probe for another user's tasks: it has the rights of
    /// that user, and must not contain a copy of the tasker's memory with the site keys.
    fn start_probe_program(&mut self, image_dir: ProbeDir) -> Result<EngineProbe, Failure> {
        let io_failure = |e: std::io::Error| Failure::Io(e.to_string());
        let namespace = Namespace::new(self.spare_namespaces.kind(), None).map_err(io_failure)?;
        let program = std::env::current_exe().map_err(io_failure)?;
        let order = TaskStart {
            tid: PROBE_TID,
            argv: vec![
                program.as_os_str().as_bytes().to_vec(),
                IDLE_ARGUMENT.into(),
            ],
            path: program,
            env: Vec::new(),
            working_dir: "/".into(),
            pinned: false,
        };
        let mut task = task::start_task_process(
            &order,
            Some((namespace, None)),
            &self.task_start_state,
            &self.start_guard,
            self.exec_time_limit(),
        )
        .map_err(|why| Failure::Io(why.to_string()))?;
        let namespace = task.namespace.take().expect("it was started in one");
        Ok(EngineProbe {
            namespace,
            process_pid: task.process.pid,
            output: task.output,
            image_dir,
        })
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
            probe.image_dir.path().to_path_buf(),
            probe.namespace.namespace_inode(),
        );
        let inside = self.engine_place(&probe.namespace)?;
        let dump_params = DumpParams {
            root_pid: pid,
            processes: Vec::new(),
            dir,
            pid_namespace,
            inside,
            page_stream: None,
            sent_pages: None,
        };
        let running_dump = with_own_file_rights(|| engine.start_dump(dump_params))?;
        let limits = engine_limits(0)?;
        let (cancel, pid) = (limits.cancel.clone(), running_dump.engine_pid());
        let work = move || {
            let dump_result = with_own_file_rights(|| running_dump.wait_until_dumped(&limits));
            WorkerResult::ProbeDumped(dump_result.map(|(report, _)| report))
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
        let namespace_kind = self.spare_namespaces.kind();
        let (Some(probe), Some(engine)) =
            (&mut self.migrations.running_probe, &self.migrations.engine)
        else {
            return Err(Failure::Cancelled("the tasker ends".into()));
        };
        let source_namespace = std::mem::replace(
            &mut probe.namespace,
            Namespace::new(namespace_kind, None).map_err(io_failure)?,
        );
        let external_resources = ExternalResources {
            output_pipe: probe.output.pipe_inode(),
        };
        let place = EnginePlace {
            namespace: &probe.namespace,
            vault: self.image_vault.as_ref(),
            pid_numbering: self.pid_numbering,
        };
        let restore_params = RestoreParams {
            dir: probe.image_dir.path().to_path_buf(),
            external_resources,
            post_copy: false,
        };
        let IdleRestoreWithOutput {
            engine: idle_restore,
            output,
            ..
        } = start_restore_engine(engine.as_ref(), &place)?;
        probe.output = output;
        let running_restore = with_own_file_rights(|| idle_restore.start(restore_params))?;
        let limits = engine_limits(0)?;
        let (cancel, engine_pid) = (limits.cancel.clone(), running_restore.engine_pid());
        self.migrations
            .workers
            .start_worker(&cancel, Some(engine_pid), move || {
                WorkerResult::ProbeRestored(with_own_file_rights(|| {
                    running_restore.wait_until_restored(&limits)
                }))
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
            .map(|probe| probe.image_dir.path().display().to_string());
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

/// Creates the temporary directory of a probe.
fn create_probe_dir() -> Result<ProbeDir, Failure> {
    let temp_path = std::env::temp_dir();
    remove_stale_dirs(&temp_path);
    let template = temp_path.join(format!("{PROBE_DIR_PREFIX}XXXXXX"));
    nix::unistd::mkdtemp(&template)
        .map(ProbeDir::Temporary)
        .map_err(|e| Failure::Io(format!("{}: {e}", template.display())))
}

/// Starts an idle process with its working directory in `image_dir`.
fn start_idle_probe(image_dir: ProbeDir) -> std::io::Result<EngineProbe> {
    let cwd = CString::new(image_dir.path().as_os_str().as_bytes())?;
    let (output, output_writer) = Output::new()?;
    let namespace = Namespace::new(NamespaceKind::Pid, None)?;
    let stdin = File::open("/dev/null")?;
    let process_pid = namespace
        .start_idle_process(&cwd, &stdin, &output_writer)?
        .pid;
    Ok(EngineProbe {
        namespace,
        process_pid,
        output,
        image_dir,
    })
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
