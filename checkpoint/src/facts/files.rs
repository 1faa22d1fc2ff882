//! Regular files that a task has open: what is to become of them when it moves, as its variable says, and where they are to go.

use super::descriptors::{Meaning, descriptor};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use sempa_proto::migration::Refusal;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// The variable in the environment of a task.
const VARIABLE: &[u8] = b"SEMPA_FILES=";
/// Bytes of files that are carried along with one task at most.
pub const CARRIED_BYTES_MAX: u64 = 1 << 30;
/// Files that are, at most.
pub const CARRIED_FILES_MAX: usize = 1024;

/// What becomes of open files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Policy {
    /// They have to be at the target.
    #[default]
    Shared,
    /// Those of the task's user are carried along where they are not.
    Copy,
    /// A task with open files does not move.
    Refuse,
}

impl Policy {
    /// What the task with this root process was started with.
    ///
    /// # Errors
    /// The variable says nothing that is known.
    pub(super) fn of(root: i32) -> Result<Policy, Refusal> {
        // Of one that has ended, or whose main thread has, the kernel tells nothing; the rest of the look says so.
        let environment = std::fs::read(format!("/proc/{root}/environ")).unwrap_or_default();
        Policy::read(&environment)
    }

    fn read(environment: &[u8]) -> Result<Policy, Refusal> {
        let value = environment
            .split(|byte| *byte == 0)
            .find_map(|one| one.strip_prefix(VARIABLE));
        match value.unwrap_or_default() {
            b"" | b"shared" => Ok(Policy::Shared),
            b"copy" => Ok(Policy::Copy),
            b"refuse" => Ok(Policy::Refuse),
            other => {
                let other: String = String::from_utf8_lossy(other).chars().take(40).collect();
                let what = format!("SEMPA_FILES={other}, which is none of shared, copy and refuse");
                Err(Refusal::Holds { what })
            }
        }
    }
}

/// An open file that is carried along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Its name.
    pub path: PathBuf,
    /// Where it can be opened whatever has become of its name.
    pub through: PathBuf,
    /// Permission bits.
    pub mode: u32,
    /// Its group.
    pub gid: u32,
}

/// True for a file of the user as whom tasks run here.
pub(super) fn is_own(meta: &std::fs::Metadata) -> bool {
    meta.is_file() && meta.uid() == nix::unistd::geteuid().as_raw()
}

/// What is carried along with the task of this root process and these processes, which stand still.
pub fn files_to_carry(root: i32, processes: &[i32]) -> Vec<OpenFile> {
    let mut files = BTreeMap::new();
    if Policy::of(root) != Ok(Policy::Copy) {
        return Vec::new();
    }
    for pid in processes {
        let Ok(dir) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for entry in dir.flatten() {
            let (through, number) = (entry.path(), entry.file_name());
            let meaning = descriptor(*pid, &through, &number.to_string_lossy());
            let Ok(Meaning::SameLength(path, _) | Meaning::Grows(path) | Meaning::Exists(path)) =
                meaning
            else {
                continue;
            };
            let Ok(meta) = std::fs::metadata(&through) else {
                continue;
            };
            if is_own(&meta) {
                let (mode, gid) = (meta.mode() & 0o7777, meta.gid());
                files.entry(path.clone()).or_insert(OpenFile {
                    path,
                    through,
                    mode,
                    gid,
                });
            }
        }
    }
    files.into_values().collect()
}

/// The folder of a file, reached without following any link, and the file's name in it. Names that processes have open have no
/// links in them, so one that is here leads somewhere else.
///
/// # Errors
/// It is not there, or there is a link on the way.
pub fn folder_of(path: &Path) -> io::Result<(OwnedFd, OsString)> {
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

/// Why no file could be made there for a task of this user, if so.
pub(super) fn may_not_make(path: &Path, uid: u32) -> Option<String> {
    use std::os::fd::AsRawFd;
    let own = nix::unistd::geteuid().as_raw();
    if uid != own {
        return Some(format!("its user is {uid}, and tasks run as {own} there"));
    }
    let (folder, _) = match folder_of(path) {
        Ok(found) => found,
        Err(e) => return Some(format!("its folder: {e}")),
    };
    let through = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let access = nix::unistd::access(through.as_str(), nix::unistd::AccessFlags::W_OK);
    access.err().map(|e| format!("its folder: {}", e.desc()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_becomes_of_files_is_said_in_the_environment() {
        let read = |environment: &str| Policy::read(environment.as_bytes());
        assert_eq!(read(""), Ok(Policy::Shared));
        assert_eq!(read("A=1\0SEMPA_FILES=\0"), Ok(Policy::Shared));
        assert_eq!(
            read("A=SEMPA_FILES=copy\0SEMPA_FILES=shared\0"),
            Ok(Policy::Shared)
        );
        assert_eq!(read("A=1\0SEMPA_FILES=copy\0"), Ok(Policy::Copy));
        assert_eq!(read("SEMPA_FILES=refuse\0B=2\0"), Ok(Policy::Refuse));
        let wrong = read("SEMPA_FILES=cpoy\0").expect_err("nothing that is known");
        assert_eq!(
            wrong.to_string(),
            "it holds SEMPA_FILES=cpoy, which is none of shared, copy and refuse"
        );
    }

    #[test]
    fn a_folder_is_reached_only_without_links() {
        let dir = tempfile::tempdir().expect("dir");
        let real = dir.path().canonicalize().expect("there");
        std::fs::create_dir(real.join("folder")).expect("made");
        std::os::unix::fs::symlink("folder", real.join("link")).expect("made");
        let (_, name) = folder_of(&real.join("folder/file")).expect("it is there");
        assert_eq!(name, "file");
        for path in ["link/file", "folder/../folder/file", "none/file"] {
            assert!(folder_of(&real.join(path)).is_err(), "{path}");
        }
        assert!(folder_of(Path::new("folder/file")).is_err() && folder_of(Path::new("/")).is_err());
        let own = nix::unistd::geteuid().as_raw();
        assert_eq!(may_not_make(&real.join("folder/file"), own), None);
        assert!(may_not_make(&real.join("link/file"), own).is_some());
        assert!(
            may_not_make(&real.join("folder/file"), own + 1)
                .is_some_and(|why| why.contains("its user is"))
        );
    }
}
