//! Limits that several modules share.

use std::time::Duration;

/// Maximum time without progress in either direction of a connection. After this time the
/// connection is aborted. The session detects a dead host much earlier.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size in bytes of the datagrams that path discovery tries, for jumbo frames and loopback.
/// The endpoint passes ten datagrams to the kernel in one call. The kernel accepts at most 65,507
/// bytes per call and drops all ten datagrams if they are longer in total.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 6400;
