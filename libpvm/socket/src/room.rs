//! Room behind a socket between a task and its daemon.

use nix::sys::socket::{setsockopt, sockopt};
use std::os::fd::AsFd;

/// Bytes, as the kernel counts them, that may wait to be read: so many that a large message goes without waking its writer
/// again and again.
const ROOM_BYTES: usize = 1 << 20;

/// Asks for more room for what is written than usual; where the system allows less, that has to do.
pub fn make_room(socket: &impl AsFd) {
    // Only root may have more than the system's limit, and it is a help, no more.
    let _ = setsockopt(socket, sockopt::SndBuf, &ROOM_BYTES);
    let _ = setsockopt(socket, sockopt::SndBufForce, &ROOM_BYTES);
}
