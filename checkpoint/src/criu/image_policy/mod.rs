//! Checks images before root's CRIU restores them for a user.
//!
//! CRIU restores what images contain, with the rights of the process that runs it. Images that were
//! forged could therefore contain a process with other rights than the user's. This check accepts
//! only what is known to be harmless; everything else is refused:
//!
//! - Every process and thread has exactly the user's ids, no capabilities, and limits that the user
//!   may have (`processes`).
//! - Every open or mapped file is of a known kind, and has the plain absolute path of a file
//!   (`files`). [`OpenedFiles`] lists these paths; [`check_access_as_user`] checks that the user
//!   may open them.
//! - Memory consists of known kinds of mappings (`memory`).
//! - Messages contain only known fields (`schema`, `wire`), and the directory contains only known
//!   images (`names`). Images of mounts, networks and other namespaces are unknown: CRIU runs
//!   inside the task's namespaces, and images of such a dump do not contain them.
//!
//! The check does not replace these measures of the caller:
//!
//! - CRIU opens files and creates sockets after this check. It must do both with the file system
//!   ids of the user: a user can exchange a file between the check and the restore, and a socket of
//!   root can share a port with a service of root (`SO_REUSEPORT`).
//! - CRIU must be started without supplementary groups: it does not change the groups of a process
//!   whose images contain none.

mod access;
mod files;
mod images;
mod memory;
mod names;
mod processes;
mod schema;
mod special_files;
#[cfg(test)]
mod tests;
mod violation;
mod wire;

pub use access::{FileChecker, check_access, check_access_as_user};
pub use violation::ImageViolation;

use files::FileTable;
use images::ImageDir;
use processes::ProcessTable;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Number of resource limits of a process (`RLIM_NLIMITS`).
pub const RESOURCE_LIMITS: usize = 16;

/// The ids of a user, from this host's account database. Tasks of root are not checked by this
/// module: they may have everything that the check refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserIdentity {
    pub uid: u32,
    /// The primary group of the user.
    pub gid: u32,
    /// All groups of the user. The primary group need not be among them.
    pub groups: Vec<u32>,
}

impl UserIdentity {
    fn has_group(&self, gid: u32) -> bool {
        gid == self.gid || self.groups.contains(&gid)
    }
}

/// Limits of what images may contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreLimits {
    /// Maximum number of processes.
    pub processes_max: usize,
    /// Maximum number of threads of all processes.
    pub threads_max: usize,
    /// Maximum number of open files and of descriptors of all processes.
    pub files_max: usize,
    /// Maximum number of memory mappings of a process.
    pub mappings_max: usize,
    /// The highest hard limits that processes may have, in the order of the kernel's numbers
    /// (`RLIMIT_CPU` is 0); `u64::MAX` means unlimited.
    pub resource_limits_max: [u64; RESOURCE_LIMITS],
    /// Lowest nice value of a thread.
    pub nice_min: i64,
    /// Highest real-time priority of a thread; 0 forbids real-time scheduling.
    pub realtime_priority_max: u64,
    /// Lowest value of `/proc/PID/oom_score_adj`.
    pub oom_score_adj_min: i64,
    /// Maximum size of a pipe's buffer in bytes (`fs.pipe-max-size`).
    pub pipe_bytes_max: u64,
    /// Maximum size of a socket's buffer in bytes, as `getsockopt` returns it.
    pub socket_bytes_max: u64,
    /// Lowest port that a user's socket may be bound to (`net.ipv4.ip_unprivileged_port_start`).
    pub port_min: u32,
    /// Maximum number of requests of all asynchronous input and output contexts (`fs.aio-max-nr`).
    pub aio_requests_max: u64,
}

impl Default for RestoreLimits {
    /// Returns the defaults of Linux for users, without limits for processor time and memory.
    fn default() -> Self {
        Self {
            processes_max: 4096,
            threads_max: 65_536,
            files_max: 1 << 20,
            mappings_max: 65_530,
            resource_limits_max: DEFAULT_RESOURCE_LIMITS,
            nice_min: 0,
            realtime_priority_max: 0,
            oom_score_adj_min: 0,
            pipe_bytes_max: 1 << 20,
            socket_bytes_max: 8 << 20,
            port_min: 1024,
            aio_requests_max: 65_536,
        }
    }
}

/// The hard limits of a user's processes after the kernel's start: no real-time priority, no nice
/// value below 0.
const DEFAULT_RESOURCE_LIMITS: [u64; RESOURCE_LIMITS] = {
    let mut limits = [u64::MAX; RESOURCE_LIMITS];
    limits[13] = 0;
    limits[14] = 0;
    limits
};

/// The contents of images that a restore accepts.
#[derive(Clone, Debug)]
pub struct RestorePolicy {
    pub identity: UserIdentity,
    pub limits: RestoreLimits,
    /// True if every process must have `no_new_privs`.
    pub requires_no_new_privs: bool,
    /// The capabilities that a set-user-id program may get at most, as a bit mask: the bounding set
    /// of the process that starts CRIU.
    pub bounding_set: u64,
    /// Names of files in the directory that are not images, such as the caller's manifest. They are
    /// not checked.
    pub other_files: BTreeSet<String>,
}

/// How a task has opened a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileAccess {
    /// The path only (`O_PATH`).
    Path,
    /// The working directory of a process.
    Enter,
    Read,
    Write,
    ReadWrite,
    /// The program of a process.
    Execute,
    /// A file that is created under this path during the restore: a deleted file, or the address of
    /// a Unix socket. The user must be allowed to create it.
    Create,
}

/// A file that the task has open or mapped.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpenedFile {
    pub path: PathBuf,
    pub access: FileAccess,
}

/// The files that the restore opens, without duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenedFiles {
    pub files: BTreeSet<OpenedFile>,
}

/// Checks all images in a directory. Returns the files that the restore opens; the caller must
/// check that the user may open them ([`check_access_as_user`]).
///
/// # Errors
/// The first violation that is found.
pub fn verify_images(dir: &Path, policy: &RestorePolicy) -> Result<OpenedFiles, ImageViolation> {
    verify(&ImageDir::list(dir, policy)?, policy)
}

/// Checks images that are in memory, by their names. See [`verify_images`].
///
/// # Errors
/// The first violation that is found.
pub fn verify_image_bytes(
    images: &BTreeMap<String, Vec<u8>>,
    policy: &RestorePolicy,
) -> Result<OpenedFiles, ImageViolation> {
    verify(&ImageDir::from_memory(images, policy)?, policy)
}

fn verify(images: &ImageDir<'_>, policy: &RestorePolicy) -> Result<OpenedFiles, ImageViolation> {
    let processes = ProcessTable::read(images, policy)?;
    let mut file_table = FileTable::read(images, policy, &processes)?;
    memory::check(images, policy, &processes, &mut file_table)?;
    file_table.into_opened_files()
}
