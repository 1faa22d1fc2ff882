//! The interface of a dump engine, which writes a stopped process tree into a directory (dump) and
//! rebuilds it on another host (restore).
//!
//! CRIU ([`crate::criu`]) implements this interface for any process. Programs that are restarted
//! instead, from their own checkpoint or from the beginning, write no images and need no engine.
//!
//! Every operation has two parts:
//!
//! - `start_*` creates the engine's process and returns immediately, so that one thread can be the
//!   parent of all processes. The process may be created before the task stops ([`IdleDump`],
//!   [`IdleRestore`]).
//! - The other methods may block, on any thread, but never past their deadline or after their
//!   [`CancelHandle`] has fired.
//!
//! Memory may be transferred outside the images:
//!
//! - Post-copy: most memory is transferred after the task has resumed at the target. The dump then
//!   ends with a [`MemoryServer`], which serves the memory at the source. At the target a
//!   [`MemoryFetch`] requests the memory while the restore runs.
//! - Pre-copy: with post-copy, memory may also be sent while the task still runs at the source, by
//!   [`Engine::send_pre_copy`] at the source and [`Engine::receive_pre_copy`] at the target.

pub(crate) mod pages;
mod received_pages;
mod sent_pages;
mod served_memory;

pub use received_pages::ReceivedPages;
pub use sent_pages::{PreCopyStopCondition, SentPages};
pub use served_memory::ServedMemory;
pub(crate) use served_memory::TracerOrder;

use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::DumpReport;
use std::io;
use std::net;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use thiserror::Error;

/// Aborts a running engine call from another thread. All clones share one state; firing cannot be
/// undone.
#[derive(Clone, Debug)]
pub struct CancelHandle {
    fired_event: Arc<EventFd>,
}

impl CancelHandle {
    /// Creates a handle that has not fired.
    ///
    /// # Errors
    /// No file descriptor is available.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            fired_event: Arc::new(EventFd::from_flags(
                EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
            )?),
        })
    }

    /// Aborts the engine calls that use this handle. They return once the engine's process is dead
    /// and reaped.
    pub fn fire(&self) {
        // A write fails only if the counter is full; then the handle has already fired.
        let _ = self.fired_event.write(1);
    }

    /// Returns a descriptor that is readable once the handle has fired.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fired_event.as_fd()
    }
}

/// The part of a migration in which an engine call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedPart {
    /// The memory that post-copy transfers. A migration without post-copy may succeed.
    MissingMemory,
    /// Anything else. A migration without post-copy would have failed as well.
    Other,
}

/// The failure of a dump or restore.
#[derive(Clone, Debug, Error)]
#[error("{failure}")]
pub struct EngineFailure {
    pub failure: Failure,
    pub failed_part: FailedPart,
}

impl EngineFailure {
    /// Describes a failure to handle the memory that post-copy transfers.
    pub fn missing_memory(failure: Failure) -> Self {
        Self {
            failure,
            failed_part: FailedPart::MissingMemory,
        }
    }
}

impl From<Failure> for EngineFailure {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            failed_part: FailedPart::Other,
        }
    }
}

impl From<EngineFailure> for Failure {
    fn from(engine_failure: EngineFailure) -> Self {
        engine_failure.failure
    }
}

/// Limits of a blocking call.
#[derive(Clone, Debug)]
pub struct CallLimits {
    /// Time limit of the call. When it expires, the engine is killed and the call fails with
    /// [`Failure::Deadline`].
    pub timeout: Duration,
    /// When this handle fires, the engine is killed and the call fails with [`Failure::Cancelled`].
    pub cancel: CancelHandle,
}

/// Parameters of the dump of a stopped task.
#[derive(Debug)]
pub struct DumpParams {
    /// Root of the process tree, in the caller's PID namespace. The root and its descendants are
    /// stopped and remain stopped.
    pub root_pid: i32,
    /// All processes of the tree, including the root.
    pub processes: Vec<i32>,
    /// An existing empty directory that only its owner can access. It receives the images.
    pub dir: PathBuf,
    /// Inode number of the task's PID namespace. If the engine runs outside, the images refer to
    /// the namespace but do not contain it.
    pub pid_namespace: u64,
    /// The namespaces inside which the engine runs; `None` if it runs in those of the caller.
    pub inside: Option<TaskNamespaces>,
    /// With post-copy: a connected stream on which the target will request memory. `None` if the
    /// images must contain all memory.
    pub page_stream: Option<OwnedFd>,
    /// Pages that pre-copy has already sent on `page_stream`.
    pub sent_pages: Option<Arc<SentPages>>,
}

/// Resources of the source that the images do not contain. The images refer to them by these
/// values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExternalResources {
    /// Inode number of the pipe that received the task's output.
    pub output_pipe: u64,
}

/// Resources that the new host gives a restored task. They are known before the images arrive.
#[derive(Debug)]
pub struct RestoreResources {
    /// The empty PID namespace that receives the task.
    pub pid_namespace: OwnedFd,
    /// Write end of the pipe that will receive the task's output.
    pub output: OwnedFd,
    /// The namespaces inside which the engine runs; `None` if it runs in those of the caller. The
    /// next PIDs of the namespace must be far from those in the images, because the engine's own
    /// processes get them.
    pub inside: Option<TaskNamespaces>,
}

/// The namespaces of a task inside which the engine runs, and the user of the task.
///
/// A process without root's rights can be dumped only from inside: the engine's code in the task
/// needs a `/proc` that shows the task's own PIDs.
#[derive(Clone, Debug)]
pub struct TaskNamespaces {
    pub pid_namespace: Arc<OwnedFd>,
    /// The mounts of the task, with the `/proc` of `pid_namespace`.
    pub mount_namespace: Arc<OwnedFd>,
    pub user: TaskIds,
    /// Directory of the caller that contains all image directories. Only root can access it.
    pub own_dir: PathBuf,
}

/// Ids of the user of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskIds {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// The parameters of a restore.
#[derive(Debug)]
pub struct RestoreParams {
    pub dir: PathBuf,
    /// External resources to which the images in `dir` refer.
    pub external_resources: ExternalResources,
    /// True if post-copy is used. A [`MemoryFetch`] for this directory must then already be
    /// started.
    pub post_copy: bool,
}

/// An engine did not report its version, for example because it cannot be executed. No process of
/// the engine remains.
#[derive(Debug, Error)]
#[error("the dump engine {} does not run: {cause}; {install_hint}", program.display())]
pub struct EngineUnusable {
    pub program: PathBuf,
    pub install_hint: &'static str,
    #[source]
    pub cause: VersionError,
}

/// The reason why an engine did not report its version.
#[derive(Debug, Error)]
pub enum VersionError {
    #[error(transparent)]
    Start(io::Error),
    /// The engine did not answer within this time and was killed.
    #[error("no answer within {} s", .0.as_secs())]
    TimedOut(Duration),
    #[error(transparent)]
    ReadOutput(io::Error),
    #[error("{status}: {first_line}")]
    Failed {
        status: ExitStatus,
        first_line: String,
    },
}

/// A program that dumps and restores tasks, such as CRIU.
pub trait Engine: Send + Sync {
    /// Runs the engine to find out whether it can be executed, and returns its version. Only a dump
    /// shows whether the engine can dump and restore tasks.
    ///
    /// # Errors
    /// The engine cannot be executed, or did not report its version. The error text contains the
    /// cause and how to install the engine.
    fn query_version(&self) -> Result<String, EngineUnusable>;

    /// Starts the engine to find out whether this host supports post-copy. The engine writes its
    /// messages into `dir`.
    ///
    /// # Errors
    /// The engine's process could not be created.
    fn start_post_copy_check(&self, dir: &Path) -> Result<Box<dyn PostCopyCheck>, Failure>;

    /// Starts an engine process that waits for the parameters of a dump, inside the namespaces
    /// `inside` if they are given.
    ///
    /// # Errors
    /// The engine's process could not be created.
    fn start_idle_dump(
        &self,
        inside: Option<&TaskNamespaces>,
    ) -> Result<Box<dyn IdleDump>, Failure>;

    /// Starts a dump.
    ///
    /// # Errors
    /// The engine's process could not be created. The task is unchanged.
    fn start_dump(&self, params: DumpParams) -> Result<Box<dyn RunningDump>, EngineFailure> {
        self.start_idle_dump(params.inside.as_ref())?.start(params)
    }

    /// Prepares another attempt after a failed dump: removes files of a killed engine that would
    /// make every attempt fail. Returns true if the dump failed only because another dump ran at
    /// the same moment, so that another attempt may succeed. `root_pid` is the PID of the task's
    /// root process.
    fn prepare_retry(&self, root_pid: i32, failure: &Failure) -> bool;

    /// Starts an engine process that waits for the parameters of a restore.
    ///
    /// # Errors
    /// The engine's process could not be created.
    fn start_idle_restore(
        &self,
        resources: RestoreResources,
    ) -> Result<Box<dyn IdleRestore>, Failure>;

    /// Starts a restore, like [`IdleRestore::start`] with a new engine process.
    ///
    /// # Errors
    /// As for [`IdleRestore::start`].
    fn start_restore(
        &self,
        resources: RestoreResources,
        params: RestoreParams,
    ) -> Result<Box<dyn RunningRestore>, Failure> {
        self.start_idle_restore(resources)?.start(params)
    }

    /// Pre-copies the memory of these running processes on a connected stream. Ends when a round
    /// finds few changed pages, or when `stop_condition` is due. Blocks while the target accepts no
    /// data; shutting the stream down ends the call.
    ///
    /// # Errors
    /// The target has not received the memory. The processes are unchanged.
    fn send_pre_copy(
        &self,
        processes: &[i32],
        stream: &OwnedFd,
        stop_condition: &PreCopyStopCondition,
    ) -> Result<SentPages, Failure>;

    /// Receives pre-copied memory on a connected stream, at most `bytes_max` bytes. Blocks until
    /// all of the memory has arrived; shutting the stream down ends the call. The source waits for
    /// an acknowledgement, which the caller must send ([`crate::criu::acknowledge_pre_copy`]).
    ///
    /// # Errors
    /// The memory did not arrive, or the source violated the protocol.
    fn receive_pre_copy(&self, stream: &OwnedFd, bytes_max: u64) -> Result<ReceivedPages, Failure>;

    /// Starts the process that requests the memory of a task on the connected stream `page_stream`.
    /// `dir` contains the images, `received_pages` the pages that were pre-copied. Must be called
    /// before the restore is started.
    ///
    /// # Errors
    /// The engine's process could not be created.
    fn start_fetch(
        &self,
        dir: &Path,
        page_stream: OwnedFd,
        received_pages: ReceivedPages,
    ) -> Result<Box<dyn MemoryFetch>, Failure>;
}

/// A running check of the kernel's support for post-copy.
pub trait PostCopyCheck: Send {
    /// Returns the PID of the engine's process, a child of the caller. Only
    /// [`wait_for_result`](Self::wait_for_result) may reap the process.
    fn engine_pid(&self) -> i32;

    /// Waits for the result. On return the engine's process has been reaped.
    ///
    /// # Errors
    /// The kernel does not support post-copy, or the check failed.
    fn wait_for_result(self: Box<Self>, limits: &CallLimits) -> Result<(), Failure>;
}

/// An engine process that waits for the parameters of a dump, so that its start takes no time while
/// the task is stopped. Dropping this value ends the process.
pub trait IdleDump: Send {
    /// Returns the PID of the engine's process, a child of the caller. Only this value may reap the
    /// process.
    fn engine_pid(&self) -> i32;

    /// True if the engine's process has ended, for example because it was killed.
    fn has_ended(&self) -> bool;

    /// Starts the dump.
    ///
    /// # Errors
    /// The engine's process has ended, or the memory for post-copy cannot be determined. The task
    /// is unchanged.
    fn start(self: Box<Self>, params: DumpParams) -> Result<Box<dyn RunningDump>, EngineFailure>;
}

/// An engine process that waits for the parameters of a restore. Dropping this value ends the
/// process.
pub trait IdleRestore: Send {
    /// Returns the PID of the engine's process, a child of the caller. Only this value may reap the
    /// process.
    fn engine_pid(&self) -> i32;

    /// True if the engine's process has ended, for example because it was killed.
    fn has_ended(&self) -> bool;

    /// Starts the restore. The root of the restored task becomes a child of the calling process.
    /// The restore may consume the images, so they can be restored only once.
    ///
    /// # Errors
    /// The engine's process has ended. Nothing of the task exists.
    fn start(self: Box<Self>, params: RestoreParams) -> Result<Box<dyn RunningRestore>, Failure>;
}

/// A dump whose engine process was started.
pub trait RunningDump: Send {
    /// Returns the PID of the engine's process, a child of the caller. Only
    /// [`wait_until_dumped`](Self::wait_until_dumped) may reap the process.
    fn engine_pid(&self) -> i32;

    /// Waits until the images are complete, and returns after the engine's process has been reaped.
    /// With post-copy, the [`MemoryServer`] provides the memory that is not in the images. A
    /// canceled dump may get a grace period to end regularly, because that is safer for the task
    /// than killing the engine.
    ///
    /// # Errors
    /// The dump failed. The task still exists and is still stopped, unless it has exited.
    fn wait_until_dumped(
        self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<(DumpReport, Option<Box<dyn MemoryServer>>), EngineFailure>;
}

/// The memory of a dumped task at the source of a post-copy migration. The task still exists and is
/// stopped.
pub trait MemoryServer: Send {
    /// Returns a handle by which other threads can control the server.
    fn handle(&self) -> ServedMemory;

    /// Serves page requests until the target closes its stream. On return the task is still
    /// stopped, or has exited if it was killed.
    ///
    /// # Errors
    /// Memory could not be served. Only the target knows whether it has received all memory.
    fn wait_until_served(self: Box<Self>, limits: &CallLimits) -> Result<(), Failure>;
}

/// The memory of a restored task that is being fetched from the source.
pub trait MemoryFetch: Send {
    /// Returns the PID of the engine's process, a child of the caller. Only
    /// [`wait_until_fetched`](Self::wait_until_fetched) may reap the process.
    fn engine_pid(&self) -> i32;

    /// Returns a handle that reports, while the fetch runs, whether all memory has arrived.
    fn completion(&self) -> FetchCompletion;

    /// Waits until all memory has arrived. On return the engine's process has been reaped.
    ///
    /// # Errors
    /// Some memory is missing and will not arrive. The caller must first kill the processes and
    /// then drop the [`UffdGuard`]: while the guard exists, the processes block when they access a
    /// missing page; without the guard they would read zeros.
    fn wait_until_fetched(self: Box<Self>, limits: &CallLimits)
    -> Result<(), (Failure, UffdGuard)>;
}

/// Reports whether all memory of a task has arrived. All clones share one state.
///
/// The state is set before the engine exits, because the exit may take long if the engine gets no
/// CPU time or is stopped.
#[derive(Clone, Debug)]
pub struct FetchCompletion {
    is_complete: Arc<AtomicBool>,
    /// The stream on which the source sends the memory.
    stream: Arc<UnixStream>,
}

impl FetchCompletion {
    /// Creates the state "not complete" for memory that arrives on `stream`.
    pub(crate) fn new(stream: Arc<UnixStream>) -> Self {
        Self {
            is_complete: Arc::default(),
            stream,
        }
    }

    pub(crate) fn mark_complete(&self) {
        self.is_complete.store(true, Ordering::Release);
    }

    /// Handles the end of the memory stream: the source will send no more memory. Returns true if
    /// no memory is missing. Then the stream is closed, so that the engine stops waiting and
    /// succeeds.
    pub fn close_if_complete(&self) -> bool {
        let is_complete = self.is_complete();
        if is_complete {
            // The source may have closed the stream already.
            let _ = self.stream.shutdown(net::Shutdown::Both);
        }
        is_complete
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }
}

/// Open userfaultfd descriptors of processes. While they are open, a process that accesses a
/// missing page blocks instead of reading zeros.
#[derive(Debug)]
pub struct UffdGuard(
    #[expect(dead_code, reason = "held for its being open")] pub(crate) Vec<OwnedFd>,
);

/// A restore whose engine process was started.
pub trait RunningRestore: Send {
    /// Returns the PID of the engine's process, a child of the caller. Only the other methods of
    /// this trait may reap the process.
    fn engine_pid(&self) -> i32;

    /// Waits until the task is rebuilt. The task has not executed any instruction yet.
    ///
    /// # Errors
    /// The engine's process is dead and reaped. Some processes of the task may remain in its PID
    /// namespace; the caller must kill the namespace's init.
    fn wait_until_restored(
        self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<Box<dyn RestoredTask>, EngineFailure>;
}

/// A restored task that is stopped before its first instruction.
pub trait RestoredTask: Send {
    /// Returns the PID of the task's root, in the caller's PID namespace.
    fn pid(&self) -> i32;

    /// Completes the restore: the engine detaches, and the task remains stopped, as it was when it
    /// was dumped.
    ///
    /// # Errors
    /// As for [`RunningRestore::wait_until_restored`]. If the engine has died after it had begun to
    /// detach, the task may have run.
    fn complete_restore(self: Box<Self>, limits: &CallLimits) -> Result<(), Failure>;

    /// Aborts the restore: the engine is killed, or removes what it has built and exits. Returns
    /// without a long wait.
    fn abort_restore(self: Box<Self>);
}
