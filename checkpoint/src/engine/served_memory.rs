//! A handle to the memory that a post-copy dump did not write to the images. The memory remains in
//! the dumped processes at the source.

use nix::sys::socket::{Shutdown, shutdown};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// An order to the thread that traces the dumped processes (the tracer).
#[derive(Debug)]
pub(crate) enum TracerOrder {
    /// Order to retain the memory of each process that is killed from now on. The tracer replies on
    /// the channel when it has executed the order.
    RetainMemoryAfterKill(SyncSender<()>),
    /// Detach from all processes and end.
    Detach,
}

/// A handle by which other threads control the server of a dumped task's memory.
#[derive(Clone, Debug)]
pub struct ServedMemory {
    /// The stream on which the target requests pages.
    pub(crate) page_stream: Arc<OwnedFd>,
    pub(crate) order_sender: SyncSender<TracerOrder>,
}

impl ServedMemory {
    /// Stops serving the memory. The processes are detached and remain stopped.
    pub fn stop_serving(&self) {
        // The stream may be closed already.
        let _ = shutdown(self.page_stream.as_raw_fd(), Shutdown::Both);
    }

    /// Retains the memory of the processes after their death. Must be called before they are
    /// killed.
    ///
    /// A killed process executes no more instructions, but exits only when its memory is no longer
    /// needed.
    pub fn retain_memory_after_kill(&self) {
        let (reply_sender, reply_receiver) = sync_channel(1);
        if self
            .order_sender
            .send(TracerOrder::RetainMemoryAfterKill(reply_sender))
            .is_ok()
        {
            // Fails if the tracer has just ended.
            let _ = reply_receiver.recv();
        }
    }
}
