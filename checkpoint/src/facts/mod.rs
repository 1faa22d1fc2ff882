//! Checks that are made before a task is stopped for a migration. They concern the task's
//! properties and resources, and what the target host provides.
//!
//! - [`inspect()`] reads a running task from /proc. It refuses a task that has a resource which no
//!   engine can migrate; the refusal names the resource.
//! - [`decide_verdict`] is a pure function from a task's facts and [`HostProperties`] to a verdict.
//!
//! Neither function changes the task or the host. They detect the known reasons for a failure. If
//! the dump detects another reason, it fails and leaves the task unharmed.

mod attributes;
pub(crate) mod available_resources;
mod descriptors;
mod fifo_peers;
mod files;
mod hash;
mod identity;
mod inspect;
mod kcmp;
mod kernel;
mod memory_map;
mod open_files;
mod shared_state;
mod sockets;
mod sysv;
mod this_host;
mod verdict;

pub use available_resources::memory_available_bytes;
pub use files::{
    COPIED_BYTES_MAX, COPIED_FILES_MAX, OpenFile, file_user, files_to_copy, open_parent_dir,
};
pub use hash::{CACHED_HASHES_MAX, HashCache, hash_program_files};
pub use inspect::{
    EnginePlace, FILE_LIST_BYTES_MAX, TaskProcesses, has_library_sockets, inspect,
    process_memory_bytes, written_files,
};
pub use kcmp::share_memory;
pub use open_files::open_files;
pub use this_host::ThisHost;
pub use verdict::{
    FoundFile, HostProperties, MEMORY_SLACK_BYTES, decide_verdict, refused_open_files,
};
