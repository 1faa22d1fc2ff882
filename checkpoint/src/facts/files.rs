//! Policy for the regular files that a task has open, as selected by `SEMPA_FILES`: it determines
//! which files are copied in a migration. The module also checks whether a file can be created at
//! the target.

use super::descriptors::{DescriptorMeaning, read_descriptor};
use super::inspect::unreadable;
use crate::proc;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, Uid, faccessat};
use sempa_proto::migration::Refusal;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Start of the environment entry that selects the file policy of a task; the policy's name
/// follows.
const POLICY_ENTRY_START: &[u8] = b"SEMPA_FILES=";
/// Maximum total size in bytes of the files that are copied with one task.
pub const COPIED_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of files that are copied with one task.
pub const COPIED_FILES_MAX: usize = 1024;

/// How the open files of a task are treated in a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FilePolicy {
    /// The files must exist at the target.
    #[default]
    Shared,
    /// Files that belong to the task's user are copied to the target if they do not exist there.
    Copy,
    /// A task with open files does not migrate.
    Refuse,
}

impl FilePolicy {
    /// Returns the policy that the environment of the task's root process selects.
    ///
    /// # Errors
    /// `SEMPA_FILES` has an unknown value, or the environment cannot be read.
    pub(super) fn read_from_process(root_pid: i32) -> Result<Self, Refusal> {
        let environment = match proc::environment(root_pid) {
            // The environment of a process whose main thread has ended belongs to root. Other
            // checks refuse such a process.
            Err(_) if proc::stat(root_pid).is_none_or(|stat| stat.state == 'Z') => Vec::new(),
            environment => environment.map_err(|e| unreadable("its environment", &e))?,
        };
        Self::parse(&environment)
    }

    fn parse(environment: &[u8]) -> Result<Self, Refusal> {
        let value = environment
            .split(|byte| *byte == 0)
            .find_map(|entry| entry.strip_prefix(POLICY_ENTRY_START));
        match value.unwrap_or_default() {
            b"" | b"shared" => Ok(Self::Shared),
            b"copy" => Ok(Self::Copy),
            b"refuse" => Ok(Self::Refuse),
            unknown_value => {
                let unknown_value: String = String::from_utf8_lossy(unknown_value)
                    .chars()
                    .take(40)
                    .collect();
                let resource = format!(
                    "SEMPA_FILES={unknown_value}, which is not one of shared, copy and refuse"
                );
                Err(Refusal::UnsupportedResource { what: resource })
            }
        }
    }
}

/// An open file that is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    pub path: PathBuf,
    /// Path in /proc/PID/fd. The file can be opened by this path even if its name was removed.
    pub fd_path: PathBuf,
    pub mode: u32,
    pub gid: u32,
}

/// Returns the id of the user with whose rights the calling thread accesses files.
pub fn file_user() -> u32 {
    // An invalid id changes nothing; the call returns the present one.
    nix::unistd::setfsuid(Uid::from_raw(u32::MAX)).as_raw()
}

/// True for a regular file that belongs to the user of this process. All tasks of this host run as
/// that user.
pub(super) fn belongs_to_this_user(meta: &std::fs::Metadata) -> bool {
    meta.is_file() && meta.uid() == file_user()
}

/// Returns the files that are copied when the task with these stopped processes migrates.
/// `root_pid` is the PID of the task's root process.
pub fn files_to_copy(root_pid: i32, processes: &[i32]) -> Vec<OpenFile> {
    let mut files = BTreeMap::new();
    if FilePolicy::read_from_process(root_pid) != Ok(FilePolicy::Copy) {
        return Vec::new();
    }
    for pid in processes {
        let Ok(fd_entries) = proc::descriptors(*pid) else {
            continue;
        };
        for entry in fd_entries {
            let (fd_path, fd_number) = (entry.path(), entry.file_name());
            let meaning = read_descriptor(*pid, &fd_path, &fd_number.to_string_lossy());
            let Ok(
                DescriptorMeaning::EqualLengthFile(path, _)
                | DescriptorMeaning::MinimumLengthFile(path)
                | DescriptorMeaning::ExistingFile(path),
            ) = meaning
            else {
                continue;
            };
            let Ok(meta) = std::fs::metadata(&fd_path) else {
                continue;
            };
            if belongs_to_this_user(&meta) {
                let (mode, gid) = (meta.mode() & 0o7777, meta.gid());
                files.entry(path.clone()).or_insert(OpenFile {
                    path,
                    fd_path,
                    mode,
                    gid,
                });
            }
        }
    }
    files.into_values().collect()
}

/// Opens the directory of a file without following symbolic links. Returns the open directory and
/// the file's name. The path of an open file contains no symbolic links, so a symbolic link on this
/// host would lead to another file.
///
/// # Errors
/// The directory does not exist, or a component of the path is a symbolic link.
pub fn open_parent_dir(path: &Path) -> io::Result<(OwnedFd, OsString)> {
    let invalid_path = || io::Error::from(io::ErrorKind::InvalidInput);
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    let (parent, name) = (
        path.parent().ok_or_else(invalid_path)?,
        path.file_name().ok_or_else(invalid_path)?,
    );
    let mut components = parent.components();
    if components.next() != Some(Component::RootDir) {
        return Err(invalid_path());
    }
    let mut dir_fd: OwnedFd = std::fs::File::open("/")?.into();
    for component in components {
        let Component::Normal(component) = component else {
            return Err(invalid_path());
        };
        dir_fd = openat(&dir_fd, component, flags | OFlag::O_PATH, Mode::empty())?;
    }
    Ok((dir_fd, OsStr::to_os_string(name)))
}

/// Returns the reason why a task of the user `uid` cannot create a file at this path; `None` if the
/// task can create it.
pub(super) fn creation_obstacle(path: &Path, uid: u32) -> Option<String> {
    let own_uid = file_user();
    if uid != own_uid {
        return Some(format!(
            "its user is {uid}, and tasks run as {own_uid} there"
        ));
    }
    let (parent_dir, _) = match open_parent_dir(path) {
        Ok(parent) => parent,
        Err(e) => return Some(format!("its directory: {e}")),
    };
    // With the rights of this thread, and not with those of its real user.
    let flags = AtFlags::AT_EACCESS;
    let access_result = faccessat(&parent_dir, ".", AccessFlags::W_OK, flags);
    access_result
        .err()
        .map(|e| format!("its directory: {}", e.desc()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_policy_is_read_from_environment() {
        let parse_policy = |environment: &str| FilePolicy::parse(environment.as_bytes());
        assert_eq!(parse_policy(""), Ok(FilePolicy::Shared));
        assert_eq!(parse_policy("A=1\0SEMPA_FILES=\0"), Ok(FilePolicy::Shared));
        assert_eq!(
            parse_policy("A=SEMPA_FILES=copy\0SEMPA_FILES=shared\0"),
            Ok(FilePolicy::Shared)
        );
        assert_eq!(
            parse_policy("A=1\0SEMPA_FILES=copy\0"),
            Ok(FilePolicy::Copy)
        );
        assert_eq!(
            parse_policy("SEMPA_FILES=refuse\0B=2\0"),
            Ok(FilePolicy::Refuse)
        );
        let refusal = parse_policy("SEMPA_FILES=cpoy\0").expect_err("nothing that is known");
        assert_eq!(
            refusal.to_string(),
            "it has SEMPA_FILES=cpoy, which is not one of shared, copy and refuse"
        );
    }

    #[test]
    fn symbolic_links_to_directory_are_refused() {
        let dir = tempfile::tempdir().expect("dir");
        let real_dir = dir.path().canonicalize().expect("there");
        std::fs::create_dir(real_dir.join("folder")).expect("made");
        std::os::unix::fs::symlink("folder", real_dir.join("link")).expect("made");
        let (_, name) = open_parent_dir(&real_dir.join("folder/file")).expect("it is there");
        assert_eq!(name, "file");
        for path in ["link/file", "folder/../folder/file", "none/file"] {
            assert!(open_parent_dir(&real_dir.join(path)).is_err(), "{path}");
        }
        assert!(
            open_parent_dir(Path::new("folder/file")).is_err()
                && open_parent_dir(Path::new("/")).is_err()
        );
        let own_uid = file_user();
        assert_eq!(
            creation_obstacle(&real_dir.join("folder/file"), own_uid),
            None
        );
        assert!(creation_obstacle(&real_dir.join("link/file"), own_uid).is_some());
        assert!(
            creation_obstacle(&real_dir.join("folder/file"), own_uid + 1)
                .is_some_and(|reason| reason.contains("its user is"))
        );
    }
}
