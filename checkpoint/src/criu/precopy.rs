//! Memory that goes ahead of its task (pre-copy).
//!
//! While the task still runs its pages are sent to the target ([`send`]), which keeps them ([`ReceivedPages`]). When it stands still
//! and is dumped, what is missing at the target is asked for as ever, but the source answers with those pages only whose content
//! is another one than that which it has sent ([`SentPages`]), told by a cryptographic hash of each page.
//!
//! So nothing depends on the kernel's telling which pages were written since: CRIU could use nothing but the marks of soft-dirty
//! tracking, which many kernels are built without, and the other way (write protection by userfaultfd) has to be set up
//! inside of each process, may be in the program's own use, and costs the program two microseconds for each page. What is not
//! known to be the same is sent again, so a page that was read in the middle of a write does no harm.

mod receive;
mod send;

pub use receive::acknowledge;
pub(super) use receive::receive;
pub(super) use send::send;

#[cfg(doc)]
use crate::engine::{ReceivedPages, SentPages};
