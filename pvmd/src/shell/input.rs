//! Inputs of the daemon's loop, which are sent by the tokio tasks that serve the daemon's streams.
//! Also a rate limit for log lines about unauthenticated peers.

use super::local_socket::LocalSocket;
use super::outbox::Outbox;
use super::session_input::NetInput;
use pvmd_machine::io::{ConnId, Event};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// Capacity of the input queue. When the queue is full, the tokio tasks that read the sockets wait.
/// Therefore the data of a flood stays in the sockets.
pub(crate) const INPUT_QUEUE_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) enum Input {
    /// An event that the loop passes to the state machine unchanged.
    Event(Event),
    /// A task has completed its handshake. Events of its connection follow this input.
    TaskConnected(TaskConnection),
    /// An input from the sessions with other daemons.
    Net(NetInput),
}

/// Connection of a task, as the loop uses it.
#[derive(Debug)]
pub(crate) struct TaskConnection {
    pub(crate) conn: ConnId,
    /// Process id from the peer credentials.
    pub(crate) pid: i32,
    /// Pidfd of the process `pid`, or the error with which opening the pidfd failed.
    pub(crate) process: std::io::Result<OwnedFd>,
    pub(crate) socket: Arc<LocalSocket>,
    /// Queue of frames to send.
    pub(crate) outbox: Outbox,
    /// Setting a reason closes the connection immediately.
    pub(crate) close_reason: watch::Sender<Option<String>>,
}

pub(crate) type InputSender = mpsc::Sender<Input>;

/// Limits the number of log lines per minute, so that unauthenticated peers cannot fill the log.
#[derive(Debug)]
pub(crate) struct LogRateLimit {
    started_at: Instant,
    /// Upper 48 bits: minute of the last line. Lower 16 bits: number of lines in this minute.
    minute_and_lines: AtomicU64,
}

/// Maximum number of lines per minute, for each type of line.
const LINES_PER_MINUTE_MAX: u64 = 20;

impl LogRateLimit {
    pub(crate) fn new() -> Self {
        Self {
            started_at: Instant::now(),
            minute_and_lines: AtomicU64::new(0),
        }
    }

    /// Returns true and counts the line if the line may be written; otherwise returns false.
    pub(crate) fn try_acquire(&self) -> bool {
        let minute = self.started_at.elapsed().as_secs() / 60;
        let packed_state = |minute: u64, lines: u64| minute << 16 | lines;
        let next_state = |state: u64| {
            let lines = if state >> 16 == minute {
                state & 0xffff
            } else {
                0
            };
            (lines < LINES_PER_MINUTE_MAX).then(|| packed_state(minute, lines + 1))
        };
        self.minute_and_lines
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next_state)
            .is_ok()
    }
}
