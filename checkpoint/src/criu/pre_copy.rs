//! Pre-copy: sends memory to the target while the task still runs.
//!
//! 1. While the task runs, the source reads its pages and sends them to the target ([`send()`]),
//!    which stores them ([`ReceivedPages`]). The source stores a cryptographic hash of each sent
//!    page ([`SentPages`]).
//! 2. When the task is stopped and dumped, the target requests its missing memory as in any
//!    post-copy migration. The source answers only with the pages whose hash has changed.
//!
//! The hashes replace the kernel's write tracking:
//!
//! - CRIU's own pre-dump uses soft-dirty bits, which many kernels are built without.
//! - Write protection by userfaultfd must be set up inside each process, conflicts with programs
//!   that use userfaultfd themselves, and costs the program two microseconds for each page.
//!
//! A page that is read in the middle of a write is harmless: its hash differs later, so the page is
//! sent again.

mod receive;
mod send;

pub use receive::acknowledge;
pub(super) use receive::receive;
pub(super) use send::send;

#[cfg(doc)]
use crate::engine::{ReceivedPages, SentPages};
