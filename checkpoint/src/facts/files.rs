//! Regular files that a task has open: whether they are copied when the task migrates, as selected
//! by `SEMPA_FILES`, and whether they can be created at the target.

use super::descriptors::{DescriptorMeaning, read_descriptor};
use crate::proc;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use sempa_proto::migration::Refusal;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// The environment variable that selects the file policy of a task.
const POLICY_VARIABLE: &[u8] = b"SEMPA_FILES=";
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
    /// The variable has an unknown value.
    pub(super) fn of_task(root: i32) -> Result<FilePolicy, Refusal> {
        // The environment cannot be read if the process or its main thread has exited. Other checks
        // refuse such a process.
        FilePolicy::parse(&proc::environment(root))
    }

    fn parse(environment: &[u8]) -> Result<FilePolicy, Refusal> {
        let value = environment
            .split(|byte| *byte == 0)
            .find_map(|entry| entry.strip_prefix(POLICY_VARIABLE));
        match value.unwrap_or_default() {
            b"" | b"shared" => Ok(FilePolicy::Shared),
            b"copy" => Ok(FilePolicy::Copy),
            b"refuse" => Ok(FilePolicy::Refuse),
            other => {
                let other: String = String::from_utf8_lossy(other).chars().take(40).collect();
                let what =
                    format!("SEMPA_FILES={other}, which is not one of shared, copy and refuse");
                Err(Refusal::UnsupportedResource { what })
            }
        }
    }
}

/// An open file that is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    pub path: PathBuf,
    /// Path in /proc/PID/fd. It opens the file even if the file's name was removed.
    pub fd_path: PathBuf,
    pub mode: u32,
    pub gid: u32,
}

/// True for a regular file that belongs to the user of this process, as whom tasks run on this
/// host.
pub(super) fn belongs_to_this_user(meta: &std::fs::Metadata) -> bool {
    meta.is_file() && meta.uid() == nix::unistd::geteuid().as_raw()
}

/// Returns the files that are copied when the task of these stopped processes migrates. `root` is
/// the task's root process.
pub fn files_to_copy(root: i32, processes: &[i32]) -> Vec<OpenFile> {
    let mut files = BTreeMap::new();
    if FilePolicy::of_task(root) != Ok(FilePolicy::Copy) {
        return Vec::new();
    }
    for pid in processes {
        let Ok(open) = proc::descriptors(*pid) else {
            continue;
        };
        for entry in open {
            let (fd_path, number) = (entry.path(), entry.file_name());
            let meaning = read_descriptor(*pid, &fd_path, &number.to_string_lossy());
            let Ok(
                DescriptorMeaning::SameLength(path, _)
                | DescriptorMeaning::MinimumLength(path)
                | DescriptorMeaning::MustExist(path),
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
    let wrong = || io::Error::from(io::ErrorKind::InvalidInput);
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    let (folder, name) = (
        path.parent().ok_or_else(wrong)?,
        path.file_name().ok_or_else(wrong)?,
    );
    let mut parts = folder.components();
    if parts.next() != Some(Component::RootDir) {
        return Err(wrong());
    }
    let mut at: OwnedFd = std::fs::File::open("/")?.into();
    for part in parts {
        let Component::Normal(part) = part else {
            return Err(wrong());
        };
        at = openat(&at, part, flags | OFlag::O_PATH, Mode::empty())?;
    }
    Ok((at, OsStr::to_os_string(name)))
}

/// Returns why a task of this user cannot create a file at this path; `None` if it can.
pub(super) fn creation_obstacle(path: &Path, uid: u32) -> Option<String> {
    use std::os::fd::AsRawFd;
    let own_uid = nix::unistd::geteuid().as_raw();
    if uid != own_uid {
        return Some(format!(
            "its user is {uid}, and tasks run as {own_uid} there"
        ));
    }
    let (folder, _) = match open_parent_dir(path) {
        Ok(found) => found,
        Err(e) => return Some(format!("its directory: {e}")),
    };
    let through = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let access = nix::unistd::access(through.as_str(), nix::unistd::AccessFlags::W_OK);
    access.err().map(|e| format!("its directory: {}", e.desc()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_policy_is_read_from_environment() {
        let read = |environment: &str| FilePolicy::parse(environment.as_bytes());
        assert_eq!(read(""), Ok(FilePolicy::Shared));
        assert_eq!(read("A=1\0SEMPA_FILES=\0"), Ok(FilePolicy::Shared));
        assert_eq!(
            read("A=SEMPA_FILES=copy\0SEMPA_FILES=shared\0"),
            Ok(FilePolicy::Shared)
        );
        assert_eq!(read("A=1\0SEMPA_FILES=copy\0"), Ok(FilePolicy::Copy));
        assert_eq!(read("SEMPA_FILES=refuse\0B=2\0"), Ok(FilePolicy::Refuse));
        let wrong = read("SEMPA_FILES=cpoy\0").expect_err("nothing that is known");
        assert_eq!(
            wrong.to_string(),
            "it has SEMPA_FILES=cpoy, which is not one of shared, copy and refuse"
        );
    }

    #[test]
    fn symbolic_links_to_directory_are_refused() {
        let dir = tempfile::tempdir().expect("dir");
        let real = dir.path().canonicalize().expect("there");
        std::fs::create_dir(real.join("folder")).expect("made");
        std::os::unix::fs::symlink("folder", real.join("link")).expect("made");
        let (_, name) = open_parent_dir(&real.join("folder/file")).expect("it is there");
        assert_eq!(name, "file");
        for path in ["link/file", "folder/../folder/file", "none/file"] {
            assert!(open_parent_dir(&real.join(path)).is_err(), "{path}");
        }
        assert!(
            open_parent_dir(Path::new("folder/file")).is_err()
                && open_parent_dir(Path::new("/")).is_err()
        );
        let own = nix::unistd::geteuid().as_raw();
        assert_eq!(creation_obstacle(&real.join("folder/file"), own), None);
        assert!(creation_obstacle(&real.join("link/file"), own).is_some());
        assert!(
            creation_obstacle(&real.join("folder/file"), own + 1)
                .is_some_and(|why| why.contains("its user is"))
        );
    }
}
