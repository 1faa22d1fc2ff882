//! A handle to the memory that a dump left with its task, at the source of a post-copy migration.

use nix::sys::socket::{Shutdown, shutdown};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// An order to the thread that traces the dumped processes.
#[derive(Debug)]
pub(crate) enum TracerOrder {
    /// From now on a killed process keeps its memory. The reply confirms the order.
    KeepKilled(SyncSender<()>),
    /// Detach from all processes and end.
    Detach,
}

/// A handle for other threads than the one that serves the memory of a dumped task.
#[derive(Clone, Debug)]
pub struct ServedMemory {
    /// The stream on which the target requests pages.
    pub(crate) page_stream: Arc<OwnedFd>,
    pub(crate) orders: SyncSender<TracerOrder>,
}

impl ServedMemory {
    /// Stops serving. The processes are released, still stopped.
    pub fn stop_serving(&self) {
        // The stream may be closed already.
        let _ = shutdown(self.page_stream.as_raw_fd(), Shutdown::Both);
    }

    /// Makes the memory survive the death of its processes. Must be called before they are killed.
    ///
    /// A killed process executes nothing any more, but exits only when its memory is no longer
    /// needed.
    pub fn keep_after_kill(&self) {
        let (answer, answered) = sync_channel(1);
        if self.orders.send(TracerOrder::KeepKilled(answer)).is_ok() {
            // Fails if the tracer has just ended.
            let _ = answered.recv();
        }
    }
}
