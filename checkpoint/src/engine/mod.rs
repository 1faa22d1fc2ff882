//! The contract of a dump engine: what writes a stopped process tree into a directory and builds it again elsewhere.
//!
//! CRIU is the engine that dumps any process. A program that is started again instead, by its own checkpoint or as it began,
//! leaves no images, so it needs nothing of this. Starting is apart from driving: `start_*` makes the engine's process and returns at once, so that one
//! thread can be the parent of everything; the rest may block, in any thread, but never past its deadline or beyond the
//! firing of its [`Cancel`].
//!
//! Most of a task's memory may follow when the task goes on elsewhere already (post-copy): then a dump ends with a
//! [`Serving`], which has it, and beside the restore there is an [`Arriving`], which asks for it. Of such a task memory may go
//! ahead while it still runs at the source (pre-copy): [`Engine::send_ahead`] there and [`Engine::take_ahead`] at the other end.

pub(crate) mod pages;
mod received_pages;
mod sent_pages;
mod served_memory;

pub use received_pages::ReceivedPages;
pub use sent_pages::{PreCopyStop, SentPages};
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
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
        Ok(Cancel {
            fired: Arc::new(EventFd::from_flags(
                EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
            )?),
        })
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
    /// A connected stream on which the other host will ask for memory; `None`: all of it goes into the directory.
    pub asked_on: Option<OwnedFd>,
    /// What was sent ahead on that stream.
    pub sent: Option<Arc<SentPages>>,
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
    /// Its memory comes later; an [`Arriving`] for this directory was started before.
    pub memory_follows: bool,
}

/// A dump engine. See the module for who may block.
pub trait Engine: Send + Sync {
    /// Runs the engine to see that it is there and starts; its version. Whether it works is known only from a real dump.
    ///
    /// # Errors
    /// One sentence: what is missing and how to get it.
    fn probe(&self) -> Result<String, String>;

    /// Starts the engine to see whether the memory of a task can follow the task on this host. `dir`: for what it says.
    ///
    /// # Errors
    /// The engine's process could not be made.
    fn start_check(&self, dir: &Path) -> Result<Box<dyn Checking>, Failure>;

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

    /// Sends the memory of these running processes ahead on a connected stream, until little is left that they change, or there is a
    /// hurry. Blocks as long as the other end takes what comes; shutting the stream down ends it.
    ///
    /// # Errors
    /// It did not arrive. The processes are as they were.
    fn send_ahead(
        &self,
        processes: &[i32],
        stream: &OwnedFd,
        stop: &PreCopyStop,
    ) -> Result<SentPages, Failure>;

    /// Takes memory that comes ahead on a connected stream: no more than so many bytes. The caller must answer when all has come. Blocks until
    /// all is here; shutting the stream down ends it.
    ///
    /// # Errors
    /// It did not come, or something else.
    fn take_ahead(&self, stream: &OwnedFd, bytes_max: u64) -> Result<ReceivedPages, Failure>;

    /// Starts what asks for the memory of the task whose images are in this directory, on a connected stream, on which this has come
    /// ahead. To be called before the restore is started.
    ///
    /// # Errors
    /// The engine's process could not be made.
    fn start_arrival(
        &self,
        dir: &Path,
        ask_on: OwnedFd,
        ahead: ReceivedPages,
    ) -> Result<Box<dyn Arriving>, Failure>;
}

/// A look at what the kernel can do.
pub trait Checking: Send {
    /// The engine's process: a child of the caller that only [`finish`](Self::finish) may wait for.
    fn engine_pid(&self) -> i32;

    /// Waits for the answer. The engine's process is reaped when this returns.
    ///
    /// # Errors
    /// It cannot, or nobody knows.
    fn finish(self: Box<Self>, limits: &Limits) -> Result<(), Failure>;
}

/// A dump under way.
pub trait Dumping: Send {
    /// The engine's process: a child of the caller that only [`finish`](Self::finish) may wait for.
    fn engine_pid(&self) -> i32;

    /// Waits until the images are complete. The engine's process is reaped when this returns; what is not in the images has the
    /// [`Serving`]. A dump that is called off may be given a moment to end by itself, because that is safer for the task.
    ///
    /// # Errors
    /// The task still exists and is still stopped, if it has not ended by itself.
    fn finish(
        self: Box<Self>,
        limits: &Limits,
    ) -> Result<(DumpReport, Option<Box<dyn Serving>>), Failure>;
}

/// The memory of a dumped task, on the host that it leaves. The task is still there, and stopped.
pub trait Serving: Send {
    /// For other threads.
    fn memory(&self) -> ServedMemory;

    /// Hands out what is asked for until the other end closes its stream. When this returns the task stands still as before, or
    /// is gone if it was killed.
    ///
    /// # Errors
    /// It could not be handed out. Only the other end knows whether it has got everything.
    fn finish(self: Box<Self>, limits: &Limits) -> Result<(), Failure>;
}

/// The memory of a restored task, on its way.
pub trait Arriving: Send {
    /// The engine's process: a child of the caller that only [`finish`](Self::finish) may wait for.
    fn engine_pid(&self) -> i32;

    /// Tells, meanwhile, whether all memory is here.
    fn whole(&self) -> Whole;

    /// Waits until all memory is here. The engine's process is reaped when this returns.
    ///
    /// # Errors
    /// Some of it is missing and will not come. The task must not run any more: kill its processes, then drop what comes with
    /// the reason. Until then they stand still where they need what is missing; after it they would find zeros there.
    fn finish(self: Box<Self>, limits: &Limits) -> Result<(), (Failure, Missing)>;
}

/// Whether all memory of a task is here: the engine has said so, and may not have ended, because it gets no processor or stands still.
/// All clones are one.
#[derive(Clone, Debug)]
pub struct Whole {
    is: Arc<AtomicBool>,
    /// To the host that hands it out.
    way: Arc<UnixStream>,
}

impl Whole {
    /// It is not, and comes by this.
    pub(crate) fn new(way: Arc<UnixStream>) -> Whole {
        Whole {
            is: Arc::default(),
            way,
        }
    }

    pub(crate) fn becomes(&self) {
        self.is.store(true, Ordering::Release);
    }

    /// The other host will say no more. True if nothing is missing: then the engine waits for it no longer, and ends well.
    pub fn without_more(&self) -> bool {
        let is = self.is_so();
        if is {
            // The other end may have done so.
            let _ = self.way.shutdown(net::Shutdown::Both);
        }
        is
    }

    pub(crate) fn is_so(&self) -> bool {
        self.is.load(Ordering::Acquire)
    }
}

/// What keeps processes from finding zeros where their memory has not arrived.
#[derive(Debug)]
pub struct Missing(
    #[expect(dead_code, reason = "held for its being open")] pub(crate) Vec<OwnedFd>,
);

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
