//! CRIU as the dump engine. It dumps and restores any process tree; programs need not link a
//! library.
//!
//! Each dump or restore is one `criu swrk` process (RPC mode), driven over a socket pair with the
//! messages of `rust-criu`. The process runs in its own process group; the whole group is killed at
//! a deadline or when the call is canceled. The process may be started before its request is known,
//! because its start takes several milliseconds. The options (see `options`):
//!
//! - the task at the source stays stopped after the dump (`leave_stopped`),
//! - the network is not locked (`network_lock: SKIP`),
//! - the PID namespace is external,
//! - the restored root is a child of the caller (`rst_sibling`).
//!
//! CRIU itself is unmodified, but must be linked dynamically: libraries of this crate are loaded
//! into CRIU by `LD_PRELOAD`.
//!
//! For a task of an ordinary user CRIU runs inside the task's PID and mount namespaces
//! ([`TaskNamespaces`]). Neither is then dumped, and the PIDs that CRIU sees are those of the
//! images; `ptrace_relay` translates them.
//!
//! | problem of CRIU | solution here |
//! | --- | --- |
//! | A CRIU that is killed during a dump leaves a trap that kills the task | `ptrace_relay`: a thread of the tasker is the tracer; `trap_cleanup` restores registers and code |
//! | As root, CRIU opens files that the task's user may not open | `file_rights`: CRIU accesses files with the user's rights |
//! | Dumps of tasks with the same working directory disturb each other | `dump_lock`: one dump at a time per directory |
//! | For a lazy dump the stopped task splices its pages into pipes, which takes time | `lazy_pages_filter` hides these pages from CRIU; `page_server` reads them from the stopped processes |
//! | `criu lazy-pages` requests one range at a time | `prefetch`: a proxy requests pages before CRIU does |
//! | `criu lazy-pages` loses requests when the task unmaps memory or forks | `uffd_batching.c`: events are read only when no request is open |
//! | Missing pages become zeros when `criu lazy-pages` dies | `uffd_keeper`: copies of the userfaultfd descriptors |
//! | CRIU may report success although its images are truncated | `image_check` |
//! | CRIU restores what images contain with the rights of its own user | `image_policy` refuses images that give a user anything more |
//! | Restores on hosts that share a file system create files with the same temporary names | `ghost_names` |

mod criu_log;
mod dump_lock;
mod file_rights;
mod ghost_names;
mod image_check;
mod image_owner;
pub mod image_policy;
mod images;
mod kdat;
mod lazy_pages_daemon;
mod lazy_pages_filter;
mod options;
mod page_server;
mod page_server_wire;
mod pagemap;
mod pre_copy;
mod prefetch;
mod process;
mod process_memory;
mod ptrace;
mod ptrace_relay;
mod smaps_reader;
mod thread_freezer;
mod trap_cleanup;
mod uffd_keeper;

pub use image_check::highest_pid;
pub use image_owner::check_owner;
pub use pagemap::check_page_scan;
pub use pre_copy::acknowledge as acknowledge_pre_copy;
pub use thread_freezer::FrozenThreads;

use crate::engine::{
    CallLimits, DumpParams, Engine, EngineFailure, EngineUnusable, IdleDump, IdleRestore,
    MemoryFetch, MemoryServer, PostCopyCheck, PreCopyStopCondition, ReceivedPages, RestoreParams,
    RestoreResources, RestoredTask, RunningDump, RunningRestore, SentPages, TaskNamespaces,
};
use crate::proc;
use file_rights::FileRights;
use lazy_pages_filter::LazyPages;
use nix::fcntl::{FallocateFlags, fallocate};
use process::{CriuCommand, Swrk, SwrkMessage};
use ptrace_relay::TracedTask;
use sempa_proto::migration::Failure;
use sempa_proto::tasker::DumpReport;
use smaps_reader::SmapsReaders;
use std::ffi::OsString;
use std::fs::File;
use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Paths that are searched for CRIU, after SEMPA_CRIU and before PATH.
const DEFAULT_CRIU_PATHS: [&str; 3] = [
    "/opt/sempa/criu/sbin/criu",
    "/usr/lib/sempa/criu/sbin/criu",
    "/opt/criu/sbin/criu",
];
/// Advice in error messages: how to install a working engine.
pub const INSTALL_HINT: &str = "install the package sempa-criu, or get one with `cargo xtask criu` (the \
                                daemon finds it within five minutes), or start the daemon with \
                                SEMPA_CRIU set to the path of a working criu";

/// Time for a canceled dump to end regularly. After this time CRIU is killed.
const CANCEL_GRACE_TIMEOUT: Duration = Duration::from_secs(2);

const DUMP_LOG: &str = "dump.log";
const RESTORE_LOG: &str = "restore.log";
const CHECK_LOG: &str = "check.log";
/// Name of the file that receives CRIU's standard error. CRIU writes to its standard error until
/// its log is open.
const STDERR_FILE: &str = "criu.stderr";
/// Name of a temporary file that tests whether the file system can punch holes.
const HOLE_TEST_FILE_NAME: &str = "hole";

/// The reason why no CRIU program is used. No process was started.
#[derive(Debug, Error)]
pub enum NoEngine {
    #[error(
        "there is no dump engine at SEMPA_CRIU={}: install one there (the daemon finds it within five \
         minutes), or get one with `cargo xtask criu` and start the daemon without SEMPA_CRIU",
        program.display()
    )]
    NotAtSetPath { program: PathBuf },
    #[error("no dump engine in {} or PATH: {}", DEFAULT_CRIU_PATHS.join(", "), INSTALL_HINT)]
    NotFound,
}

/// The path of an installed CRIU program, with which tasks are dumped and restored.
#[derive(Clone, Debug)]
pub struct Criu {
    program: PathBuf,
}

impl Criu {
    /// Finds the CRIU program: in SEMPA_CRIU, the default paths, or PATH, in this order. `env`
    /// returns the value of an environment variable.
    ///
    /// # Errors
    /// No program was found. The error text names the searched paths and explains how to install
    /// CRIU.
    pub fn locate(env: impl Fn(&str) -> Option<OsString>) -> Result<Self, NoEngine> {
        if let Some(set_path) = env("SEMPA_CRIU").filter(|v| !v.is_empty()) {
            let program = PathBuf::from(set_path);
            return match program.is_file() {
                true => Ok(Self { program }),
                false => Err(NoEngine::NotAtSetPath { program }),
            };
        }
        let search_path = env("PATH").unwrap_or_default();
        let path_candidates = std::env::split_paths(&search_path).map(|dir| dir.join("criu"));
        DEFAULT_CRIU_PATHS
            .iter()
            .map(PathBuf::from)
            .chain(path_candidates)
            .find(|program| program.is_file())
            .map(|program| Self { program })
            .ok_or(NoEngine::NotFound)
    }

    pub fn program(&self) -> &Path {
        &self.program
    }
}

impl Engine for Criu {
    fn query_version(&self) -> Result<String, EngineUnusable> {
        process::query_version(&self.program).map_err(|cause| EngineUnusable {
            program: self.program.clone(),
            install_hint: INSTALL_HINT,
            cause,
        })
    }

    fn start_idle_dump(
        &self,
        inside: Option<&TaskNamespaces>,
    ) -> Result<Box<dyn IdleDump>, Failure> {
        // Without the relay the dump succeeds as well, but then an engine that is killed may damage
        // the task.
        let (relay, criu_descriptors) = ptrace_relay::IdleRelay::new().ok().unzip();
        let mut inherited_fds = criu_descriptors
            .as_ref()
            .map_or(Vec::new(), |criu_descriptors| {
                criu_descriptors.descriptors().to_vec()
            });
        let mut variables = criu_descriptors
            .as_ref()
            .map_or(Vec::new(), ptrace_relay::CriuDescriptors::environment);
        let filter_file = LazyPages::create_filter_file()
            .map_err(|e| Failure::Io(format!("no memory file for the engine: {e}")))?;
        inherited_fds.push(&filter_file);
        variables.push(ptrace_relay::hidden_areas_variable(&filter_file));
        let inherited_fds: Vec<BorrowedFd<'_>> =
            inherited_fds.iter().map(|fd| fd.as_fd()).collect();
        variables.extend(inside.map(|inside| file_rights::task_ids_variable(&inside.user)));
        let swrk = Swrk::start(&self.program, &inherited_fds, &variables, inside)?;
        Ok(Box::new(IdleCriuDump {
            swrk,
            relay,
            filter_file,
        }))
    }

    fn start_post_copy_check(&self, dir: &Path) -> Result<Box<dyn PostCopyCheck>, Failure> {
        let scan_failure =
            |e| Failure::Engine(format!("the kernel does not support PAGEMAP_SCAN: {e}"));
        kdat::remove_stale_temporary();
        lazy_pages_filter::check_pagemap_scan().map_err(scan_failure)?;
        let no_descriptor_failure =
            |e: std::io::Error| Failure::Io(format!("no descriptor for the engine: {e}"));
        let (load_report_reader, load_report_writer) =
            std::io::pipe().map_err(no_descriptor_failure)?;
        let (library, load_report_writer) = (
            ptrace_relay::library_file().map_err(no_descriptor_failure)?,
            OwnedFd::from(load_report_writer),
        );
        let arguments = ["check", "--feature", "uffd-noncoop"]
            .into_iter()
            .map(AsRef::as_ref);
        let inherited_fds = [library.as_fd(), load_report_writer.as_fd()];
        let check_command = CriuCommand::start(
            &self.program,
            arguments,
            dir,
            &inherited_fds,
            &ptrace_relay::load_report_variables(&library, &load_report_writer),
        )?;
        Ok(Box::new(CriuPostCopyCheck {
            command: check_command,
            log_path: dir.join(CHECK_LOG),
            library_loaded: load_report_reader,
        }))
    }

    fn prepare_retry(&self, root_pid: i32, failure: &Failure) -> bool {
        dump_lock::prepare_retry(root_pid, failure)
    }

    fn start_idle_restore(
        &self,
        resources: RestoreResources,
    ) -> Result<Box<dyn IdleRestore>, Failure> {
        let mut inherited_fds = vec![resources.pid_namespace.as_fd(), resources.output.as_fd()];
        let file_rights = resources
            .inside
            .as_ref()
            .map(FileRights::new)
            .transpose()
            .map_err(|e| Failure::Io(format!("no memory file for the engine: {e}")))?;
        inherited_fds.extend(file_rights.as_ref().map(FileRights::library));
        let variables = file_rights
            .as_ref()
            .map_or(Vec::new(), FileRights::variables);
        let inside = resources.inside.as_ref();
        let swrk = Swrk::start(&self.program, &inherited_fds, &variables, inside)?;
        drop(inherited_fds);
        Ok(Box::new(IdleCriuRestore { swrk, resources }))
    }

    fn send_pre_copy(
        &self,
        processes: &[i32],
        stream: &OwnedFd,
        stop_condition: &PreCopyStopCondition,
    ) -> Result<SentPages, Failure> {
        pre_copy::send(processes, stream, stop_condition)
    }

    fn receive_pre_copy(&self, stream: &OwnedFd, bytes_max: u64) -> Result<ReceivedPages, Failure> {
        pre_copy::receive(stream, bytes_max)
    }

    fn start_fetch(
        &self,
        dir: &Path,
        page_stream: OwnedFd,
        received_pages: ReceivedPages,
    ) -> Result<Box<dyn MemoryFetch>, Failure> {
        Ok(Box::new(lazy_pages_daemon::LazyPagesDaemon::start(
            &self.program,
            dir,
            page_stream,
            received_pages,
        )?))
    }
}

struct CriuPostCopyCheck {
    command: CriuCommand,
    log_path: PathBuf,
    /// Receives one byte when CRIU has loaded the relay library. End of file means that CRIU has
    /// exited.
    library_loaded: PipeReader,
}

impl PostCopyCheck for CriuPostCopyCheck {
    fn engine_pid(&self) -> i32 {
        self.command.pid()
    }

    fn wait_for_result(mut self: Box<Self>, limits: &CallLimits) -> Result<(), Failure> {
        self.command.wait_until_exit(limits, &self.log_path)?;
        match self.library_loaded.read(&mut [0]) {
            Ok(1) => Ok(()),
            _ => Err(Failure::Engine(
                "the engine does not load the libraries for post-copy: is it linked statically?"
                    .into(),
            )),
        }
    }
}

/// A CRIU that waits for the request to dump a task.
struct IdleCriuDump {
    // Field order matters: CRIU must have ended before the relay is dropped.
    swrk: Swrk,
    relay: Option<ptrace_relay::IdleRelay>,
    /// Receives the memory areas to hide from CRIU. CRIU reads the file during the dump.
    filter_file: OwnedFd,
}

impl IdleDump for IdleCriuDump {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn has_ended(&self) -> bool {
        self.swrk.has_exited()
    }

    fn start(
        mut self: Box<Self>,
        params: DumpParams,
    ) -> Result<Box<dyn RunningDump>, EngineFailure> {
        let smaps_readers = SmapsReaders::start(&params.processes);
        // Without the recorded state the dump succeeds as well, but then an engine that is killed
        // may damage the task.
        let saved_state = trap_cleanup::SavedTaskState::record(&params.processes).ok();
        let scan_failure = |e| {
            EngineFailure::missing_memory(Failure::Engine(format!(
                "cannot determine the memory for post-copy: {e}"
            )))
        };
        let post_copy = params
            .page_stream
            .as_ref()
            .map(|_| LazyPages::choose(&params.processes))
            .transpose()
            .map_err(scan_failure)?;
        let is_inside = params.inside.is_some();
        if let Some(lazy_pages) = &post_copy {
            lazy_pages
                .write_filter_file(&self.filter_file, is_inside)
                .map_err(scan_failure)?;
        }
        let root_pid = match is_inside {
            true => proc::innermost_pid(params.root_pid).ok_or(Failure::TaskEnded)?,
            false => params.root_pid,
        };
        let traced_task = TracedTask {
            root_pid: params.root_pid,
            processes: params.processes.clone(),
            is_criu_inside: is_inside,
        };
        let relay = self
            .relay
            .map(|relay| relay.start_tracer(traced_task, smaps_readers))
            .transpose()
            .map_err(|e| Failure::Io(format!("no thread to trace the task: {e}")))?;
        self.swrk.raise_priority();
        self.swrk.set_cancel_timeout(CANCEL_GRACE_TIMEOUT);
        let request = options::encode_dump_request(&params, root_pid);
        self.swrk
            .send_request(&request, params.dir.join(DUMP_LOG))?;
        Ok(Box::new(CriuDump {
            swrk: self.swrk,
            relay,
            dir: params.dir,
            saved_state,
            post_copy: post_copy.zip(params.page_stream.map(Arc::new)),
            sent_pages: params.sent_pages,
        }))
    }
}

/// A CRIU that waits for the request to restore a task.
struct IdleCriuRestore {
    swrk: Swrk,
    /// The descriptors that CRIU has inherited.
    resources: RestoreResources,
}

impl IdleRestore for IdleCriuRestore {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn has_ended(&self) -> bool {
        self.swrk.has_exited()
    }

    fn start(
        mut self: Box<Self>,
        params: RestoreParams,
    ) -> Result<Box<dyn RunningRestore>, Failure> {
        ghost_names::make_unique(&params.dir)?;
        // With hole punching CRIU frees each page of the image after reading it. Then images in a
        // memory file system and the restored task together never need twice the memory.
        let consume_images = can_punch_holes(&params.dir);
        // CRIU gives each restored thread the priority that it had.
        self.swrk.raise_priority();
        let request = options::encode_restore_request(&params, &self.resources, consume_images);
        self.swrk
            .send_request(&request, params.dir.join(RESTORE_LOG))?;
        let inside = self.resources.inside;
        Ok(Box::new(CriuRestore {
            swrk: self.swrk,
            inside,
        }))
    }
}

struct CriuDump {
    // Field order matters: CRIU must have ended before the relay is dropped.
    swrk: Swrk,
    relay: Option<ptrace_relay::Relay>,
    dir: PathBuf,
    /// State of the task before the dump, to undo CRIU's changes.
    saved_state: Option<trap_cleanup::SavedTaskState>,
    /// With post-copy: the memory that is not in the images, and the stream on which the target
    /// will request that memory.
    post_copy: Option<(LazyPages, Arc<OwnedFd>)>,
    /// Pages that the target has already received by pre-copy.
    sent_pages: Option<Arc<SentPages>>,
}

impl CriuDump {
    /// Waits until CRIU has exited, then completes and checks the images.
    fn finish_images(&mut self, limits: &CallLimits) -> Result<(), EngineFailure> {
        self.swrk.wait_until_finished(limits).map_err(|failure| {
            let lazy_pages = self.post_copy.as_ref().map(|(lazy_pages, _)| lazy_pages);
            lazy_pages.map_or(failure.clone(), |pages| pages.explain_failure(failure))
        })?;
        if let Some((lazy_pages, _)) = &self.post_copy {
            lazy_pages
                .add_to_images(&self.dir)
                .map_err(EngineFailure::missing_memory)?;
        }
        Ok(image_check::check_images(&self.dir)?)
    }
}

impl RunningDump for CriuDump {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn wait_until_dumped(
        mut self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<(DumpReport, Option<Box<dyn MemoryServer>>), EngineFailure> {
        let result = self.finish_images(limits);
        if result.is_err() {
            self.swrk.kill();
        }
        // Dropping the relay removes the traps that are pending for the task, and leaves the task
        // stopped.
        drop(self.relay.take());
        if let (Err(failure), Some(saved_state)) = (&result, &self.saved_state) {
            saved_state.restore_after_failure(&failure.failure);
        }
        result?;
        let report = count_files(&self.dir);
        let report =
            report.map_err(|e| Failure::Io(format!("cannot read {}: {e}", self.dir.display())))?;
        let sent_pages = self.sent_pages.take();
        let start_server = |(lazy_pages, page_stream)| {
            page_server::PageServer::start(lazy_pages, page_stream, sent_pages)
                .map(|server| Box::new(server) as Box<dyn MemoryServer>)
                .map_err(EngineFailure::missing_memory)
        };
        Ok((report, self.post_copy.take().map(start_server).transpose()?))
    }
}

/// True if ranges of files in this directory can be freed (`FALLOC_FL_PUNCH_HOLE`). If the file
/// system cannot do so, CRIU fails when it is ordered to punch holes.
fn can_punch_holes(dir: &Path) -> bool {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let path = dir.join(HOLE_TEST_FILE_NAME);
    let can_punch = File::create(&path).is_ok_and(|file| fallocate(&file, flags, 0, 1).is_ok());
    let _ = std::fs::remove_file(path);
    can_punch
}

/// Returns the number of the files in a directory and their total size in bytes.
fn count_files(dir: &Path) -> std::io::Result<DumpReport> {
    let mut report = DumpReport::default();
    for entry in std::fs::read_dir(dir)? {
        let meta = entry?.metadata()?;
        if meta.is_file() {
            report.image_files += 1;
            report.image_bytes += meta.len();
        }
    }
    Ok(report)
}

struct CriuRestore {
    swrk: Swrk,
    /// The namespaces inside which CRIU runs; `None` if it runs in those of the caller.
    inside: Option<TaskNamespaces>,
}

impl CriuRestore {
    /// Returns the PID of the restored root in the caller's PID namespace. `reported_pid` is the
    /// PID that CRIU has reported.
    fn caller_pid(&self, reported_pid: i32) -> Result<i32, Failure> {
        let Some(inside) = &self.inside else {
            return Ok(reported_pid);
        };
        let pid = proc::child_with_innermost_pid(&inside.pid_namespace, reported_pid);
        pid.map_err(|e| Failure::Io(format!("cannot find the restored process: {e}")))?
            .ok_or_else(|| Failure::Engine("the restored process is no child of the tasker".into()))
    }
}

impl RunningRestore for CriuRestore {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn wait_until_restored(
        mut self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<Box<dyn RestoredTask>, EngineFailure> {
        loop {
            let message = self
                .swrk
                .wait_for_message(limits)
                .map_err(criu_log::classify_restore_failure)?;
            match message {
                SwrkMessage::Notification {
                    point: script,
                    root_pid: pid,
                } if script == "post-restore" => {
                    let pid = self.caller_pid(pid)?;
                    return Ok(Box::new(CriuRestoredTask {
                        swrk: self.swrk,
                        pid,
                    }));
                }
                SwrkMessage::Notification { .. } => self.swrk.acknowledge(true),
                SwrkMessage::Done => {
                    let reason = "the engine let the task run without permission".to_string();
                    self.swrk.kill();
                    return Err(Failure::Engine(reason).into());
                }
            }
        }
    }
}

struct CriuRestoredTask {
    swrk: Swrk,
    pid: i32,
}

impl RestoredTask for CriuRestoredTask {
    fn pid(&self) -> i32 {
        self.pid
    }

    fn complete_restore(mut self: Box<Self>, limits: &CallLimits) -> Result<(), Failure> {
        self.swrk.restart_timeout();
        self.swrk.acknowledge(true);
        self.swrk.wait_until_finished(limits)
    }

    fn abort_restore(mut self: Box<Self>) {
        // The caller kills the init of the PID namespace that contains the restored processes, so
        // CRIU need not remove them.
        self.swrk.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMPA_CRIU has precedence over the other paths. A wrong path in SEMPA_CRIU is an error that
    /// names the path.
    #[test]
    fn sempa_criu_has_precedence() {
        let criu = Criu::locate(|name| (name == "SEMPA_CRIU").then(|| "/bin/true".into()))
            .expect("it is a file");
        assert_eq!(criu.program(), Path::new("/bin/true"));
        let error = Criu::locate(|name| (name == "SEMPA_CRIU").then(|| "/no/criu".into()))
            .expect_err("it is missing")
            .to_string();
        assert!(
            error.contains("SEMPA_CRIU=/no/criu") && error.contains("cargo xtask criu"),
            "{error}"
        );
    }

    /// Testing for hole punching leaves no file behind.
    #[test]
    fn hole_test_leaves_no_file() {
        let dir = tempfile::tempdir().expect("a directory");
        // Whether hole punching succeeds depends on the file system under test. Hole punching
        // always fails in a directory that does not exist.
        can_punch_holes(dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0);
        assert!(!can_punch_holes(&dir.path().join("none")));
    }

    /// Querying the version of a program that is not CRIU fails. The error names the program's path
    /// and advises how to install CRIU.
    #[test]
    fn version_query_explains_broken_programs() {
        for program in ["/bin/false", "/etc/passwd", "/bin/echo"] {
            let error = Criu {
                program: program.into(),
            }
            .query_version()
            .expect_err("no engine")
            .to_string();
            assert!(
                error.contains(program) && error.contains("cargo xtask criu"),
                "{error}"
            );
        }
    }
}
