//! Inputs of the daemon's loop, sent by the tokio tasks that serve its streams, and a rate limit
//! for log lines about unauthenticated peers.

use super::local_socket::LocalSocket;
use super::outbox::Outbox;
use super::session_input::NetInput;
use pvmd_machine::io::{ConnId, Event};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// Capacity of the input queue. Readers wait when it is full, so a flood is held back at the
/// sockets.
pub(crate) const INPUT_QUEUE_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) enum Input {
    /// An event that is passed to the state machine unchanged.
    Event(Event),
    /// A task has completed its handshake; events of its connection follow.
    TaskConnected(TaskConnection),
    /// An input from the sessions with other daemons.
    Net(NetInput),
}

/// A connected task, as the loop sees it.
#[derive(Debug)]
pub(crate) struct TaskConnection {
    pub(crate) conn: ConnId,
    /// Process id from the peer credentials.
    pub(crate) pid: i32,
    /// Pidfd of that process, or the reason why it could not be opened.
    pub(crate) process: std::io::Result<OwnedFd>,
    pub(crate) socket: Arc<LocalSocket>,
    /// Queue of frames to send.
    pub(crate) outbox: Outbox,
    /// Set to a reason to close the connection immediately.
    pub(crate) close_reason: watch::Sender<Option<String>>,
}

pub(crate) type InputSender = mpsc::Sender<Input>;

/// Allows a few lines per minute, so that unauthenticated peers cannot fill the log.
#[derive(Debug)]
pub(crate) struct LogRateLimit {
    start: Instant,
    /// Minute of the last line in the upper 48 bits, number of lines in that minute in the lower
    /// 16.
    minute_and_lines: AtomicU64,
}

/// Maximum number of lines per minute, for each kind of line.
const LINES_PER_MINUTE_MAX: u64 = 20;

impl LogRateLimit {
    pub(crate) fn new() -> LogRateLimit {
        LogRateLimit {
            start: Instant::now(),
            minute_and_lines: AtomicU64::new(0),
        }
    }

    /// Returns true if a line may be written, and counts it.
    pub(crate) fn try_acquire(&self) -> bool {
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
        self.minute_and_lines
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, update)
            .is_ok()
    }
}
