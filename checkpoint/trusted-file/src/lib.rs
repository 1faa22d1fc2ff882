//! Files that decide what root's programs do. Only root, or the user of this process, can have
//! written them.
//!
//! The path is resolved one component at a time, without symbolic links, so that the checked
//! directories are the ones that are used. A file gets its name only when it is complete on the
//! disk, so the file is valid at each moment.

use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, mkdirat};
use nix::unistd::{UnlinkatFlags, fsync, geteuid, linkat, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use thiserror::Error;

/// Mode bits that give write access to the group and to others.
const OTHERS_WRITE: u32 = 0o022;
/// Mode bits that give any access to the group and to others.
const OTHERS_ACCESS: u32 = 0o077;
/// Mode bit of directories in which users can rename only their own files.
const STICKY: u32 = 0o1000;

/// The reason why a file is not used, or was not changed.
#[derive(Debug, Error)]
pub enum FileError {
    #[error("there is no such file")]
    Missing,
    /// The path itself cannot be used. The text continues "its path".
    #[error("its path {0}")]
    Path(&'static str),
    /// Other users may have written or read the file. The text continues "the file".
    #[error("it {0}")]
    Accessible(String),
    /// Other users may have replaced the file. The text continues "the directory".
    #[error("the directory {} {why}", .dir.display())]
    AccessibleDirectory { dir: PathBuf, why: String },
    #[error("{0}")]
    Content(String),
    #[error("the file exists")]
    Exists,
    /// The text of the action continues "cannot" and precedes the name of the file.
    #[error("{cause}")]
    Io {
        action: &'static str,
        cause: io::Error,
    },
}

impl FileError {
    fn io(action: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self::Io {
            action,
            cause: errno.into(),
        }
    }
}

/// The users who may read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// A secret: other users must not have any access.
    OwnerOnly,
    Everyone,
}

impl Readers {
    fn mode(self) -> Mode {
        Mode::from_bits_truncate(match self {
            Self::OwnerOnly => 0o600,
            Self::Everyone => 0o644,
        })
    }

    fn forbidden_bits(self) -> u32 {
        match self {
            Self::OwnerOnly => OTHERS_ACCESS,
            Self::Everyone => OTHERS_WRITE,
        }
    }
}

/// Whether a written file replaces an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// An existing file is an error.
    Nothing,
    Existing,
}

/// Whether a missing directory is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingDir {
    Refuse,
    /// Create the directory of the file. The directory above must exist.
    Create,
}

/// A file whose directory is open and checked. The file may be missing.
#[derive(Debug)]
pub struct TrustedFile {
    dir: OwnedFd,
    /// Name of the file in the directory.
    name: OsString,
    readers: Readers,
}

impl TrustedFile {
    /// Opens the directory of the file `path`, and checks all directories above.
    ///
    /// # Errors
    /// The directory does not exist, or other users can change a directory above the file.
    pub fn locate(
        path: &Path,
        readers: Readers,
        missing_dir: MissingDir,
    ) -> Result<Self, FileError> {
        let absolute_path = std::path::absolute(path).map_err(|cause| FileError::Io {
            action: "find",
            cause,
        })?;
        let name = absolute_path
            .file_name()
            .ok_or(FileError::Path("does not name a file"))?;
        let parent = absolute_path
            .parent()
            .ok_or(FileError::Path("has no directory"))?;
        let mut dir_path = PathBuf::from("/");
        let mut dir = open("/", dir_flags(), Mode::empty()).map_err(FileError::io("find"))?;
        check_dir(&dir, &dir_path)?;
        for component in parent.components() {
            let name = match component {
                Component::RootDir => continue,
                Component::Normal(name) => name,
                _ => return Err(FileError::Path("contains \"..\"")),
            };
            dir_path.push(name);
            let may_create = missing_dir == MissingDir::Create && dir_path == parent;
            dir = open_dir(&dir, name, &dir_path, may_create)?;
            check_dir(&dir, &dir_path)?;
        }
        Ok(Self {
            dir,
            name: name.to_os_string(),
            readers,
        })
    }

    /// Appends the content to `text`, and checks who has access. If `text` has room for
    /// `bytes_max` + 1 bytes, the content is copied to no other memory.
    ///
    /// # Errors
    /// The file does not exist, is too long or is not text, or other users have access.
    pub fn read(&self, text: &mut String, bytes_max: u64) -> Result<(), FileError> {
        let read_error = FileError::io("read");
        // The open must not block if the file is a pipe.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let file = openat(&self.dir, &*self.name, flags, Mode::empty());
        let file = file.map_err(|errno| match errno {
            Errno::ENOENT => FileError::Missing,
            Errno::ELOOP => FileError::Accessible("is a symbolic link".into()),
            errno => read_error(errno),
        })?;
        let metadata = fstat(&file).map_err(&read_error)?;
        if SFlag::from_bits_truncate(metadata.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
            return Err(FileError::Accessible("is not a regular file".into()));
        }
        if let Some(why) = find_access_problem(&metadata, self.readers.forbidden_bits()) {
            return Err(FileError::Accessible(why));
        }
        let byte_count = File::from(file)
            .take(bytes_max + 1)
            .read_to_string(text)
            .map_err(|e| FileError::Content(e.to_string()))?;
        match byte_count as u64 > bytes_max {
            true => Err(FileError::Content(format!(
                "it has more than {bytes_max} bytes"
            ))),
            false => Ok(()),
        }
    }

    /// Locks the directory of the file. Without the lock, one of two concurrent changes could be
    /// lost.
    ///
    /// # Errors
    /// The system's error.
    pub fn lock(&self) -> Result<Flock<OwnedFd>, FileError> {
        let lock_error = |cause| FileError::Io {
            action: "change",
            cause,
        };
        let dir = self.dir.try_clone().map_err(lock_error)?;
        Flock::lock(dir, FlockArg::LockExclusive).map_err(|(_, errno)| lock_error(errno.into()))
    }

    /// Writes the file. The file has its name only when it is complete on the disk.
    ///
    /// # Errors
    /// The file is unchanged: it exists and must not be replaced, or it cannot be written.
    pub fn write(&self, content: &[u8], replace: Replace) -> Result<(), FileError> {
        let mut temporary_name = self.name.clone();
        let suffix = RandomState::new().hash_one(std::process::id());
        temporary_name.push(format!(".{suffix:016x}.new"));
        let flags =
            OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = self.readers.mode();
        let file = openat(&self.dir, &*temporary_name, flags, mode);
        let mut file = File::from(file.map_err(FileError::io("write"))?);
        let write_result = nix::sys::stat::fchmod(&file, mode)
            .map_err(io::Error::from)
            .and_then(|()| file.write_all(content))
            .and_then(|()| file.sync_all())
            .map_err(|cause| FileError::Io {
                action: "change",
                cause,
            });
        let result = write_result.and_then(|()| self.give_name(&temporary_name, replace));
        if result.is_err() || replace == Replace::Nothing {
            // The file with the final name is complete, or the caller learns of the first error.
            let _ = unlinkat(&self.dir, &*temporary_name, UnlinkatFlags::NoRemoveDir);
        }
        result?;
        fsync(&self.dir).map_err(FileError::io("write"))
    }

    fn give_name(&self, temporary_name: &OsStr, replace: Replace) -> Result<(), FileError> {
        let (dir, name) = (&self.dir, &*self.name);
        let write_error = FileError::io("write");
        match replace {
            Replace::Existing => renameat(dir, temporary_name, dir, name).map_err(write_error),
            Replace::Nothing => linkat(dir, temporary_name, dir, name, AtFlags::empty()).map_err(
                |errno| match errno {
                    Errno::EEXIST => FileError::Exists,
                    errno => write_error(errno),
                },
            ),
        }
    }
}

fn dir_flags() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
}

fn open_dir(
    above: &OwnedFd,
    name: &OsStr,
    dir_path: &Path,
    may_create: bool,
) -> Result<OwnedFd, FileError> {
    let mut dir = openat(above, name, dir_flags(), Mode::empty());
    if may_create && matches!(dir, Err(Errno::ENOENT)) {
        let mode = Mode::from_bits_truncate(0o755);
        match mkdirat(above, name, mode) {
            // Another process may have created the directory at the same time.
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(FileError::io("make the directory of")(errno)),
        }
        dir = openat(above, name, dir_flags(), Mode::empty());
    }
    dir.map_err(|errno| match errno {
        Errno::ENOENT => FileError::Missing,
        Errno::ELOOP | Errno::ENOTDIR => FileError::AccessibleDirectory {
            dir: dir_path.to_path_buf(),
            why: "is a symbolic link or not a directory".into(),
        },
        errno => FileError::io("find")(errno),
    })
}

/// True if this user may own the file and its directories.
fn is_trusted_user(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// Checks that only trusted users can change the directory `dir_path` above the file.
fn check_dir(dir: &OwnedFd, dir_path: &Path) -> Result<(), FileError> {
    let metadata = fstat(dir).map_err(FileError::io("check the directories of"))?;
    // In a sticky directory other users can neither rename nor remove what trusted users own, and
    // the next component is checked for its owner.
    let forbidden_bits = match metadata.st_mode & STICKY {
        0 => OTHERS_WRITE,
        _ => 0,
    };
    match find_access_problem(&metadata, forbidden_bits) {
        Some(why) => Err(FileError::AccessibleDirectory {
            dir: dir_path.to_path_buf(),
            why,
        }),
        None => Ok(()),
    }
}

/// Returns a description of the problem if a file belongs to an untrusted user or has one of the
/// forbidden mode bits; `None` if there is no problem.
fn find_access_problem(metadata: &FileStat, forbidden_bits: u32) -> Option<String> {
    let (uid, mode) = (metadata.st_uid, metadata.st_mode & 0o7777);
    if !is_trusted_user(uid) {
        return Some(format!("belongs to user {uid}"));
    }
    (mode & forbidden_bits != 0).then(|| format!("gives other users access (mode {mode:04o})"))
}

#[cfg(test)]
mod tests;
