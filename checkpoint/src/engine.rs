//! The contract of a dump engine: what writes a stopped process tree into a directory and builds it again elsewhere.
//!
//! CRIU is the engine that dumps any process. A program that is started again instead, by its own checkpoint or as it began,
//! leaves no images, so it needs nothing of this. Starting is apart from driving: `start_*` makes the engine's process and returns at once, so that one
//! thread can be the parent of everything; the rest may block, in any thread, but never past its deadline or beyond the
//! firing of its [`Cancel`].

use nix::sys::eventfd::{EfdFlags, EventFd};
use sempa_proto::migration::Failure;
use sempa_proto::tasker::DumpReport;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Ends a running engine call from another thread. All clones are one handle; firing is for good.
#[derive(Clone, Debug)]
pub struct Cancel {
    fired: Arc<EventFd>,
}

impl Cancel {
    /// A handle that has not fired.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn new() -> io::Result<Cancel> {
        Ok(Cancel { fired: Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?) })
    }

    /// Fires. The call ends as soon as its engine process is dead and reaped.
    pub fn fire(&self) {
        // Only a full counter can fail, and then it has fired already.
        let _ = self.fired.write(1);
    }

    /// Readable once fired.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fired.as_fd()
    }
}

/// How long a call may take and how it is called off.
#[derive(Clone, Debug)]
pub struct Limits {
    /// After this the engine is killed and the call fails with [`Failure::Deadline`].
    pub allowed: Duration,
    /// When this fires the engine is killed and the call fails with [`Failure::CalledOff`].
    pub cancel: Cancel,
}

/// A stopped task to be written.
#[derive(Debug)]
pub struct DumpJob {
    /// The root of the process tree, as the caller sees it. It and its descendants are stopped and stay so.
    pub pid: i32,
    /// All processes of the tree, the root included.
    pub processes: Vec<i32>,
    /// Existing directory, accessible to its owner only. The images and nothing else go there.
    pub dir: PathBuf,
    /// Inode number of the process-id namespace that the task lives in and that is not part of the image.
    pub pid_namespace: u64,
}

/// What a task's images refer to outside themselves, as it was where they were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Inode number of the pipe that took its output.
    pub output_pipe: u64,
}

/// A task to be built again.
#[derive(Debug)]
pub struct RestoreJob {
    /// Where the images are.
    pub dir: PathBuf,
    /// What they refer to.
    pub outside: Outside,
    /// The empty process-id namespace to build it in.
    pub pid_namespace: OwnedFd,
    /// The writing end of the pipe that is to take its output.
    pub output: OwnedFd,
}

/// A dump engine. See the module for who may block.
pub trait Engine: Send + Sync {
    /// Runs the engine to see that it is there and starts; its version. Whether it works is known only from a real dump.
    ///
    /// # Errors
    /// One sentence: what is missing and how to get it.
    fn probe(&self) -> Result<String, String>;

    /// Starts a dump.
    ///
    /// # Errors
    /// The engine's process could not be made; the task is untouched.
    fn start_dump(&self, job: DumpJob) -> Result<Box<dyn Dumping>, Failure>;

    /// True if a dump of the task with this root failed only because of another dump at the same moment, so that the
    /// same dump may well succeed if it is started again. Clears away what an engine that was killed left in the way.
    fn may_try_again(&self, root: i32, failure: &Failure) -> bool;

    /// Starts a restore. The restored task's root becomes a child of the calling process. The images are good for this one
    /// restore only: it may use them up.
    ///
    /// # Errors
    /// The engine's process could not be made; nothing of the task exists.
    fn start_restore(&self, job: RestoreJob) -> Result<Box<dyn Restoring>, Failure>;
}

/// A dump under way.
pub trait Dumping: Send {
    /// The engine's process: a child of the caller that only [`finish`](Self::finish) may wait for.
    fn engine_pid(&self) -> i32;

    /// Waits for the end. The engine's process is reaped when this returns. A dump that is called off may be given a
    /// moment to end by itself, because that is safer for the task.
    ///
    /// # Errors
    /// The task still exists and is still stopped, if it has not ended by itself.
    fn finish(self: Box<Self>, limits: &Limits) -> Result<DumpReport, Failure>;
}

/// A restore under way.
pub trait Restoring: Send {
    /// The engine's process: a child of the caller that only these calls may wait for.
    fn engine_pid(&self) -> i32;

    /// Waits until the task is rebuilt and nothing of it runs yet.
    ///
    /// # Errors
    /// The engine's process is dead and reaped. Parts of the task may be left in the namespace: kill its init.
    fn hold(self: Box<Self>, limits: &Limits) -> Result<Box<dyn Held>, Failure>;
}

/// A task that is rebuilt and held before its first instruction.
pub trait Held: Send {
    /// The task's root, as the caller sees it.
    fn pid(&self) -> i32;

    /// Acknowledges: the task is let go, stopped as it was when it was dumped.
    ///
    /// # Errors
    /// As for [`Restoring::hold`]; the task may have run if the engine died late.
    fn release(self: Box<Self>, limits: &Limits) -> Result<(), Failure>;

    /// Refuses: the engine removes what it built and ends, or is killed at once. Never blocks long.
    fn refuse(self: Box<Self>);
}
