//! Send buffer of a socket between a task and its daemon.

use nix::sys::socket::{setsockopt, sockopt};
use std::os::fd::AsFd;

/// Size of the send buffer in bytes, as the kernel counts them. With this size the writer of a
/// large message is not woken repeatedly.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// Enlarges the send buffer of a socket as far as the system permits.
pub fn enlarge_send_buffer(socket: &impl AsFd) {
    // Only root may exceed the system's limit. If both calls fail, the buffer has the default size.
    let _ = setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    let _ = setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES);
}
