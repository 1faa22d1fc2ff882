//! Limits that several modules share.

use std::time::Duration;

/// Time without progress on a connection, in either direction, after which it is aborted. The
/// session detects a dead host much earlier.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest datagram tried, for jumbo frames and loopback. The endpoint passes ten datagrams at once
/// to the kernel, which accepts at most 65,507 bytes in one call and drops all ten otherwise.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 6400;
