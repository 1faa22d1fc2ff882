//! Reads what has arrived, without waiting: rings, direct routes and the daemon's socket.

use super::shared::LockedState;
use super::socket_waiters::ReadySockets;
use sempa_proto::Micros;

/// Minimum interval between two reads of the socket by threads that also poll rings. Between these
/// reads the I/O thread watches the socket.
const SOCKET_READ_INTERVAL: Micros = Micros(500);
/// Maximum number of times that a woken thread asks for further readable sockets. Together they are
/// more than a task may have.
const READY_ROUNDS_MAX: usize = 64;

impl LockedState {
    /// Handles the frames that have arrived in rings and on direct routes, and reads the socket. If
    /// there are rings but no direct routes, the socket is read at most once in
    /// [`SOCKET_READ_INTERVAL`].
    pub(crate) fn poll_incoming(&mut self) {
        let now = self.now();
        let previous_event_seq = self.core.event_seq();
        self.core.poll_rings(now);
        if !self.core.direct_routes.is_empty() {
            // The call also reads the daemon's socket if it has data.
            self.poll_direct_routes(now);
            return;
        }
        let has_rings = !self.core.shm_routes.is_empty();
        if self.core.event_seq() == previous_event_seq
            && (!has_rings || now.since(self.last_socket_read_at) >= SOCKET_READ_INTERVAL)
        {
            self.read_and_write();
        }
    }

    /// Handles the frames that have arrived on direct routes or, if there are such routes, at the
    /// daemon's socket. Returns true if a frame may have arrived. After the call, the I/O thread
    /// does not watch the direct routes for a few milliseconds.
    pub(super) fn poll_direct_routes(&mut self, now: Micros) -> bool {
        let Some(waiters) = self.core.direct_routes.app_waiters() else {
            return false;
        };
        self.core.direct_routes.record_polling(Some(now));
        let ready = waiters.readable_sockets();
        if ready.is_daemon_readable() {
            self.read_and_write();
        }
        self.core.read_reported_conns(now, &ready) || ready.is_daemon_readable()
    }

    /// Reads the sockets for which a thread was woken. Without a socket, the thread was woken for
    /// another reason, and reads the daemon's socket to be sure.
    pub(super) fn read_ready_sockets(&mut self, mut ready: ReadySockets) {
        let has_no_conn = ready.direct_peers().next().is_none();
        if has_no_conn || ready.is_daemon_readable() {
            self.read_and_write();
        }
        if !has_no_conn {
            // The next message of a running exchange may arrive before this thread sleeps again.
            // It must not wake the I/O thread.
            let now = self.now();
            self.core.direct_routes.record_polling(Some(now));
        }
        for _ in 0..READY_ROUNDS_MAX {
            let now = self.now();
            self.core.read_reported_conns(now, &ready);
            // The kernel has not told the I/O thread of the other sockets.
            let waiters = self.core.direct_routes.app_waiters();
            let Some(waiters) = waiters.filter(|_| ready.is_full()) else {
                break;
            };
            ready = waiters.readable_sockets();
        }
        if !self.core.outbox.is_empty() || self.core.has_queued_links() {
            self.read_and_write();
        }
    }
}
