//! CRIU as the dump engine. It dumps and restores any process tree; programs need not link a
//! library.
//!
//! Each dump or restore is one `criu swrk` process (RPC mode), driven over a socket pair with the
//! messages of `rust-criu`. It runs in its own process group; the whole group is killed at a
//! deadline or when the call is canceled. The options (see `options`):
//!
//! - the task at the source stays stopped after the dump (`leave_stopped`),
//! - the network is not locked (`network_lock: SKIP`),
//! - the PID namespace is external,
//! - the restored root is a child of the caller (`rst_sibling`).
//!
//! CRIU itself is unmodified, but must be linked dynamically: two libraries of this crate are
//! loaded into CRIU by `LD_PRELOAD`.
//!
//! | problem of CRIU | solution here |
//! | --- | --- |
//! | A CRIU that is killed during a dump leaves a trap that kills the task | `ptrace_relay`: a thread of the tasker is the tracer; `trap_cleanup` restores registers and code |
//! | Dumps of tasks with the same working directory disturb each other | `dump_lock`: one dump at a time per directory |
//! | For a lazy dump the stopped task splices its pages into pipes, which takes time | `lazy_pages_filter` hides these pages from CRIU; `page_server` reads them from the stopped processes |
//! | `criu lazy-pages` requests one range at a time | `prefetch`: a proxy requests pages before CRIU does |
//! | `criu lazy-pages` loses requests when the task unmaps memory or forks | `uffd_batching.c`: events are read only when no request is open |
//! | Missing pages become zeros when `criu lazy-pages` dies | `uffd_keeper`: copies of the userfaultfd descriptors |
//! | CRIU may report success although its images are truncated | `image_check` |

mod criu_log;
mod dump_lock;
mod image_check;
mod image_owner;
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
mod ptrace;
mod ptrace_relay;
mod thread_freezer;
mod trap_cleanup;
mod uffd_keeper;

pub use image_owner::check_owner;
pub use kdat::KdatCleanup;
pub use pre_copy::acknowledge as acknowledge_pre_copy;
pub use thread_freezer::FrozenThreads;

use crate::engine::{
    CallLimits, DumpJob, Engine, EngineUnusable, MemoryFetch, MemoryServer, PostCopyCheck,
    PreCopyStopCondition, ReceivedPages, RestoreJob, RestoredTask, RunningDump, RunningRestore,
    SentPages,
};
use lazy_pages_filter::LazyPages;
use nix::fcntl::{FallocateFlags, fallocate};
use process::{CriuCommand, Swrk, SwrkMessage};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::DumpReport;
use std::ffi::OsString;
use std::fs::File;
use std::io::{PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Paths that are searched for CRIU, after SEMPA_CRIU and before PATH.
const DEFAULT_PATHS: [&str; 2] = ["/opt/sempa/criu/sbin/criu", "/opt/criu/sbin/criu"];
/// Advice in error messages: how to install a working engine.
pub const INSTALL_HINT: &str = "get one with `cargo xtask criu` (the daemon finds it within five minutes), or start \
                                the daemon with SEMPA_CRIU set to the path of a working criu";

/// Time limit for a canceled dump to end regularly before it is killed.
const CANCEL_GRACE_TIMEOUT: Duration = Duration::from_secs(2);

const DUMP_LOG: &str = "dump.log";
const RESTORE_LOG: &str = "restore.log";
const CHECK_LOG: &str = "check.log";
/// Name of the file that receives CRIU's standard error. CRIU writes to it until its log is open.
const STDERR: &str = "criu.stderr";
/// Name of a temporary file that tests whether the file system can punch holes.
const HOLE_TEST_FILE: &str = "hole";

/// Why no CRIU program is used. Nothing was started.
#[derive(Debug, Error)]
pub enum NoEngine {
    #[error(
        "there is no dump engine at SEMPA_CRIU={}: install one there (the daemon finds it within five \
         minutes), or get one with `cargo xtask criu` and start the daemon without SEMPA_CRIU",
        program.display()
    )]
    NotAtSetPath { program: PathBuf },
    #[error("no dump engine in {} or PATH: {}", DEFAULT_PATHS.join(", "), INSTALL_HINT)]
    NotFound,
}

/// An installed CRIU program.
#[derive(Clone, Debug)]
pub struct Criu {
    program: PathBuf,
}

impl Criu {
    /// Finds the CRIU program: in SEMPA_CRIU, the default paths, or PATH, in this order. `env`
    /// returns the value of an environment variable.
    ///
    /// # Errors
    /// The text says where CRIU was searched and how to install it.
    pub fn locate(env: impl Fn(&str) -> Option<OsString>) -> Result<Criu, NoEngine> {
        if let Some(set) = env("SEMPA_CRIU").filter(|v| !v.is_empty()) {
            let program = PathBuf::from(set);
            return match program.is_file() {
                true => Ok(Criu { program }),
                false => Err(NoEngine::NotAtSetPath { program }),
            };
        }
        let path = env("PATH").unwrap_or_default();
        let in_path = std::env::split_paths(&path).map(|dir| dir.join("criu"));
        DEFAULT_PATHS
            .iter()
            .map(PathBuf::from)
            .chain(in_path)
            .find(|program| program.is_file())
            .map(|program| Criu { program })
            .ok_or(NoEngine::NotFound)
    }

    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Starts a `criu swrk` process for one request. `request` encodes the request; its argument is
    /// the descriptor number of the image directory.
    fn start(
        &self,
        dir: &Path,
        log: &'static str,
        inherit: &[&OwnedFd],
        variables: &[(&'static str, String)],
        request: impl FnOnce(i32) -> Vec<u8>,
    ) -> Result<Swrk, Failure> {
        let open = |e: std::io::Error| {
            Failure::Io(format!(
                "cannot open the image directory {}: {e}",
                dir.display()
            ))
        };
        let images = File::open(dir).map_err(open)?;
        let request = request(images.as_raw_fd());
        let inherit: Vec<BorrowedFd<'_>> = inherit.iter().map(|fd| fd.as_fd()).collect();
        Swrk::start(
            &self.program,
            dir,
            images,
            log,
            &inherit,
            variables,
            &request,
        )
    }
}

impl Engine for Criu {
    fn probe(&self) -> Result<String, EngineUnusable> {
        process::query_version(&self.program).map_err(|cause| EngineUnusable {
            program: self.program.clone(),
            install_hint: INSTALL_HINT,
            cause,
        })
    }

    fn start_dump(&self, job: DumpJob) -> Result<Box<dyn RunningDump>, Failure> {
        // The dump succeeds without the task snapshot and the relay, but then an engine that is
        // killed may damage the task.
        let task_snapshot = trap_cleanup::TaskSnapshot::take(&job.processes).ok();
        let (relay, criu_end) = ptrace_relay::Relay::start_tracer(job.pid, &job.processes)
            .ok()
            .unzip();
        let mut inherit = criu_end
            .as_ref()
            .map_or(Vec::new(), |criu_end| criu_end.descriptors().to_vec());
        let mut variables = criu_end
            .as_ref()
            .map_or(Vec::new(), ptrace_relay::CriuEnd::environment);
        let unknown =
            |e| Failure::Engine(format!("cannot determine the memory for post-copy: {e}"));
        let post_copy = job
            .page_stream
            .as_ref()
            .map(|_| LazyPages::choose(&job.processes))
            .transpose()
            .map_err(unknown)?;
        let list = post_copy
            .as_ref()
            .map(LazyPages::filter_list)
            .transpose()
            .map_err(unknown)?;
        inherit.extend(&list);
        variables.extend(list.as_ref().map(ptrace_relay::hidden_areas_variable));
        let request = |images| options::encode_dump_request(&job, images, DUMP_LOG);
        let mut swrk = self.start(&job.dir, DUMP_LOG, &inherit, &variables, request)?;
        swrk.raise_priority();
        swrk.set_cancel_grace(CANCEL_GRACE_TIMEOUT);
        let post_copy = post_copy.zip(job.page_stream.map(Arc::new));
        Ok(Box::new(CriuDump {
            swrk,
            relay,
            dir: job.dir,
            task_snapshot,
            post_copy,
            pre_copied: job.pre_copied,
        }))
    }

    fn start_post_copy_check(&self, dir: &Path) -> Result<Box<dyn PostCopyCheck>, Failure> {
        let unknown = |e| Failure::Engine(format!("the kernel does not support PAGEMAP_SCAN: {e}"));
        lazy_pages_filter::check_pagemap_scan().map_err(unknown)?;
        let io = |e: std::io::Error| Failure::Io(format!("no descriptor for the engine: {e}"));
        let (library_loaded, library_end) = std::io::pipe().map_err(io)?;
        let (library, library_end) = (
            ptrace_relay::library_file().map_err(io)?,
            OwnedFd::from(library_end),
        );
        let arguments = ["check", "--feature", "uffd-noncoop"]
            .into_iter()
            .map(AsRef::as_ref);
        let inherit = [library.as_fd(), library_end.as_fd()];
        let program = CriuCommand::start(
            &self.program,
            arguments,
            dir,
            &inherit,
            &ptrace_relay::load_report_variables(&library, &library_end),
        )?;
        Ok(Box::new(CriuPostCopyCheck {
            program,
            log: dir.join(CHECK_LOG),
            library_loaded,
        }))
    }

    fn is_retryable(&self, root: i32, failure: &Failure) -> bool {
        dump_lock::is_retryable(root, failure)
    }

    fn start_restore(&self, job: RestoreJob) -> Result<Box<dyn RunningRestore>, Failure> {
        let inherit = [&job.pid_namespace, &job.output];
        // With hole punching CRIU frees each page of the image after reading it. Then images in a
        // memory file system and the restored task together never need twice the memory.
        let consume_images = can_punch_holes(&job.dir);
        let request =
            |images| options::encode_restore_request(&job, images, RESTORE_LOG, consume_images);
        let swrk = self.start(&job.dir, RESTORE_LOG, &inherit, &[], request)?;
        Ok(Box::new(CriuRestore { swrk }))
    }

    fn send_pre_copy(
        &self,
        processes: &[i32],
        stream: &OwnedFd,
        stop: &PreCopyStopCondition,
    ) -> Result<SentPages, Failure> {
        pre_copy::send(processes, stream, stop)
    }

    fn receive_pre_copy(&self, stream: &OwnedFd, bytes_max: u64) -> Result<ReceivedPages, Failure> {
        pre_copy::receive(stream, bytes_max)
    }

    fn start_fetch(
        &self,
        dir: &Path,
        page_stream: OwnedFd,
        pre_copied: ReceivedPages,
    ) -> Result<Box<dyn MemoryFetch>, Failure> {
        Ok(Box::new(lazy_pages_daemon::LazyPagesDaemon::start(
            &self.program,
            dir,
            page_stream,
            pre_copied,
        )?))
    }
}

struct CriuPostCopyCheck {
    program: CriuCommand,
    log: PathBuf,
    /// Receives one byte when CRIU has loaded our library. End of file means that CRIU has exited.
    library_loaded: PipeReader,
}

impl PostCopyCheck for CriuPostCopyCheck {
    fn engine_pid(&self) -> i32 {
        self.program.pid()
    }

    fn finish(mut self: Box<Self>, limits: &CallLimits) -> Result<(), Failure> {
        self.program.finish(limits, &self.log)?;
        match self.library_loaded.read(&mut [0]) {
            Ok(1) => Ok(()),
            _ => Err(Failure::Engine(
                "the engine does not load the libraries for post-copy: is it linked statically?"
                    .into(),
            )),
        }
    }
}

struct CriuDump {
    // Field order matters: CRIU must have ended before the relay is dropped.
    swrk: Swrk,
    relay: Option<ptrace_relay::Relay>,
    dir: PathBuf,
    /// State of the task before the dump, to undo CRIU's changes.
    task_snapshot: Option<trap_cleanup::TaskSnapshot>,
    /// With post-copy: the memory that is not in the images, and the stream on which the target
    /// will request that memory.
    post_copy: Option<(LazyPages, Arc<OwnedFd>)>,
    /// Pages that the target has already received by pre-copy.
    pre_copied: Option<Arc<SentPages>>,
}

impl CriuDump {
    /// Waits until CRIU has exited, then completes and checks the images.
    fn finish_images(&mut self, limits: &CallLimits) -> Result<(), Failure> {
        self.swrk.finish(limits)?;
        if let Some((lazy_pages, _)) = &self.post_copy {
            lazy_pages.add_to_images(&self.dir)?;
        }
        image_check::check_images(&self.dir)
    }
}

impl RunningDump for CriuDump {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn finish(
        mut self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<(DumpReport, Option<Box<dyn MemoryServer>>), Failure> {
        let done = self.finish_images(limits);
        if done.is_err() {
            self.swrk.kill();
        }
        // After this drop everything that CRIU left pending for the task is removed, and the task
        // is stopped.
        drop(self.relay.take());
        if let (Err(why), Some(before)) = (&done, &self.task_snapshot) {
            before.restore_after(why);
        }
        done?;
        // The logs matter only after a failure. The images are transferred without them.
        for log in [DUMP_LOG, STDERR] {
            let _ = std::fs::remove_file(self.dir.join(log));
        }
        let report = count_files(&self.dir);
        let report =
            report.map_err(|e| Failure::Io(format!("cannot read {}: {e}", self.dir.display())))?;
        let sent = self.pre_copied.take();
        let server = |(lazy_pages, page_stream)| {
            Ok(Box::new(page_server::PageServer::start(
                lazy_pages,
                page_stream,
                sent,
            )?) as Box<dyn MemoryServer>)
        };
        Ok((report, self.post_copy.take().map(server).transpose()?))
    }
}

/// True if ranges of files in this directory can be freed (`FALLOC_FL_PUNCH_HOLE`). CRIU fails if
/// it is ordered to punch holes and cannot.
fn can_punch_holes(dir: &Path) -> bool {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let path = dir.join(HOLE_TEST_FILE);
    let shrinks = File::create(&path).is_ok_and(|file| fallocate(&file, flags, 0, 1).is_ok());
    let _ = std::fs::remove_file(path);
    shrinks
}

/// Returns the number and the total size of the files in a directory.
fn count_files(dir: &Path) -> std::io::Result<DumpReport> {
    let mut report = DumpReport::default();
    for entry in std::fs::read_dir(dir)? {
        let meta = entry?.metadata()?;
        if meta.is_file() {
            report.files += 1;
            report.bytes += meta.len();
        }
    }
    Ok(report)
}

struct CriuRestore {
    swrk: Swrk,
}

impl RunningRestore for CriuRestore {
    fn engine_pid(&self) -> i32 {
        self.swrk.pid()
    }

    fn wait_until_restored(
        mut self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<Box<dyn RestoredTask>, Failure> {
        loop {
            match self.swrk.receive(limits)? {
                SwrkMessage::Notify { point: script, pid } if script == "post-restore" => {
                    return Ok(Box::new(CriuRestoredTask {
                        swrk: self.swrk,
                        pid,
                    }));
                }
                SwrkMessage::Notify { .. } => self.swrk.acknowledge(true),
                SwrkMessage::Done => {
                    let why = "the engine let the task run without permission".to_string();
                    self.swrk.kill();
                    return Err(Failure::Engine(why));
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

    fn release(mut self: Box<Self>, limits: &CallLimits) -> Result<(), Failure> {
        self.swrk.restart_timeout();
        self.swrk.acknowledge(true);
        self.swrk.finish(limits)
    }

    fn abort(mut self: Box<Self>) {
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
        let found = Criu::locate(|name| (name == "SEMPA_CRIU").then(|| "/bin/true".into()))
            .expect("it is a file");
        assert_eq!(found.program(), Path::new("/bin/true"));
        let why = Criu::locate(|name| (name == "SEMPA_CRIU").then(|| "/no/criu".into()))
            .expect_err("it is missing")
            .to_string();
        assert!(
            why.contains("SEMPA_CRIU=/no/criu") && why.contains("cargo xtask criu"),
            "{why}"
        );
    }

    /// Testing for hole punching leaves no file behind.
    #[test]
    fn hole_test_leaves_no_file() {
        let dir = tempfile::tempdir().expect("a directory");
        // Whether hole punching succeeds depends on the file system under test. It always fails in
        // a directory that does not exist.
        can_punch_holes(dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).expect("readable").count(), 0);
        assert!(!can_punch_holes(&dir.path().join("none")));
    }

    /// Probing a program that is not CRIU fails; the error names the program's path and advises how
    /// to install CRIU.
    #[test]
    fn probe_explains_broken_programs() {
        for program in ["/bin/false", "/etc/passwd", "/bin/echo"] {
            let why = Criu {
                program: program.into(),
            }
            .probe()
            .expect_err("no engine")
            .to_string();
            assert!(
                why.contains(program) && why.contains("cargo xtask criu"),
                "{why}"
            );
        }
    }
}
