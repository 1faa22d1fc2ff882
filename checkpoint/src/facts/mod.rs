//! What a task is and holds, and whether a host can take it: all that is checked before anything is frozen.
//!
//! [`inspect`] reads a living task from /proc and refuses by name what no engine can carry; [`compare`] is a pure
//! function from a task's facts and a [`Host`] to a verdict. Neither changes anything. They look for what is known to
//! fail; what they do not know of is found by the dump itself, which leaves the task unharmed.

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
