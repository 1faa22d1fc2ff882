//! Properties and resources of a task, and the verdict of a host on them: all checks that precede
//! the pause of a task.
//!
//! - [`inspect`] reads a running task from /proc. It refuses a task with a resource that no engine
//!   can migrate, and names it.
//! - [`compare`] is a pure function from a task's facts and a [`Host`] to a verdict.
//!
//! Neither changes anything. They find the known reasons for a failure; others are found by the
//! dump, which leaves the task unharmed.

mod compare;
mod descriptors;
mod files;
mod hash;
mod host;
mod inspect;
mod kernel;
mod maps;
pub(crate) mod room;
mod sockets;
mod strangers;
mod sysv;

pub use compare::{Found, Host, MEMORY_SLACK_BYTES, compare};
pub use files::{CARRIED_BYTES_MAX, CARRIED_FILES_MAX, OpenFile, files_to_carry, folder_of};
pub use hash::{HASHES_MAX, HashCache};
pub use host::ThisHost;
pub use inspect::{
    NAMED_BYTES_MAX, Subject, has_library_sockets, inspect, learn, resident_bytes, written_files,
};
pub use room::memory_available_bytes;
