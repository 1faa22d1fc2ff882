//! What the daemon's loop is told by the tasks that serve its streams, and a limit for lines about strangers.

use super::local::TaskLine;
use super::net::NetInput;
use pvmd_machine::io::Event;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::mpsc;

/// Inputs that may wait for the loop. Readers wait when it is full, so that a flood stops at the sockets.
pub(crate) const INPUTS_WAITING_MAX: usize = 1024;

/// One input of the daemon's loop.
#[derive(Debug)]
pub(crate) enum Input {
    /// For the machine as it is.
    Event(Event),
    /// A task has said a proper hello; events of its connection follow.
    TaskUp(TaskLine),
    /// From the sessions with other daemons.
    Net(NetInput),
}

/// The way into the loop.
pub(crate) type Inputs = mpsc::Sender<Input>;

/// Lets a few lines a minute through, so that strangers cannot fill the log.
#[derive(Debug)]
pub(crate) struct LineLimit {
    start: Instant,
    /// Minute of the last line and the number of lines in it.
    state: AtomicU64,
}

/// Lines about strangers per minute and kind.
const LINES_PER_MINUTE_MAX: u64 = 20;

impl LineLimit {
    /// A limit with nothing used of it.
    pub(crate) fn new() -> LineLimit {
        LineLimit {
            start: Instant::now(),
            state: AtomicU64::new(0),
        }
    }

    /// True if a line may be written now.
    pub(crate) fn allows(&self) -> bool {
        let minute = self.start.elapsed().as_secs() / 60;
        let pack = |minute: u64, lines: u64| minute << 16 | lines;
        let update = |state: u64| {
            let lines = if state >> 16 == minute {
                state & 0xffff
            } else {
                0
            };
            (lines < LINES_PER_MINUTE_MAX).then(|| pack(minute, lines + 1))
        };
        self.state
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, update)
            .is_ok()
    }
}
