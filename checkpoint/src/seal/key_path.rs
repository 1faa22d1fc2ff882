//! Opens the key file safely. The path is resolved one component at a time, without symbolic links,
//! so that the checked directories are the ones that are used.

use super::error::SiteKeyError;
use super::site_keys::KEY_FILE_BYTES_MAX;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{FileStat, Mode, fstat, mkdirat};
use nix::unistd::geteuid;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use zeroize::Zeroizing;

/// Path of the site key.
pub const DEFAULT_SITE_KEY_PATH: &str = "/etc/sempa/site.key";
/// Mode bits that give write access to the group and to others.
const OTHERS_WRITE: u32 = 0o022;
/// Mode bits that give any access to the group and to others.
const OTHERS_ACCESS: u32 = 0o077;
/// Mode bit of directories in which users can rename only their own files.
const STICKY: u32 = 0o1000;

/// The directory of a key file, open and checked.
pub(super) struct KeyDir {
    pub(super) dir: OwnedFd,
    /// Name of the key file in the directory.
    pub(super) name: OsString,
    pub(super) path: PathBuf,
}

/// Returns the errors of the key file `path` for `action`.
pub(super) fn io_error(action: &'static str, path: &Path) -> impl Fn(Errno) -> SiteKeyError {
    move |errno| SiteKeyError::Io {
        action,
        path: path.to_path_buf(),
        cause: errno.into(),
    }
}

/// True if this user may own the key and its directories.
fn is_trusted_user(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

impl KeyDir {
    /// Opens the directory of the key file `path`, and checks all directories above. With
    /// `create`, a missing directory is created if the directory above it exists.
    pub(super) fn open(path: &Path, create: bool) -> Result<Self, SiteKeyError> {
        let invalid_path = |why: &str| SiteKeyError::Invalid {
            path: path.to_path_buf(),
            why: format!("its path {why}"),
        };
        let absolute_path = std::path::absolute(path).map_err(|cause| SiteKeyError::Io {
            action: "find",
            path: path.to_path_buf(),
            cause,
        })?;
        let name = absolute_path
            .file_name()
            .ok_or_else(|| invalid_path("does not name a file"))?;
        let parent = absolute_path
            .parent()
            .ok_or_else(|| invalid_path("has no directory"))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut dir_path = PathBuf::from("/");
        let mut dir = open("/", flags, Mode::empty()).map_err(io_error("find", path))?;
        check_dir(&dir, &dir_path, path)?;
        for component in parent.components() {
            let name = match component {
                Component::RootDir => continue,
                Component::Normal(name) => name,
                _ => return Err(invalid_path("contains \"..\"")),
            };
            dir_path.push(name);
            let mut next_dir = openat(&dir, name, flags, Mode::empty());
            if create && matches!(next_dir, Err(Errno::ENOENT)) && dir_path == parent {
                mkdirat(&dir, name, Mode::from_bits_truncate(0o755))
                    .map_err(io_error("make the directory of", path))?;
                next_dir = openat(&dir, name, flags, Mode::empty());
            }
            dir = next_dir.map_err(|errno| match errno {
                Errno::ENOENT => SiteKeyError::Missing {
                    path: path.to_path_buf(),
                },
                Errno::ELOOP | Errno::ENOTDIR => SiteKeyError::AccessibleDirectory {
                    path: path.to_path_buf(),
                    dir: dir_path.clone(),
                    why: "is a symbolic link or not a directory".into(),
                },
                errno => io_error("find", path)(errno),
            })?;
            check_dir(&dir, &dir_path, path)?;
        }
        Ok(Self {
            dir,
            name: name.to_os_string(),
            path: path.to_path_buf(),
        })
    }

    /// Reads the key file and checks who has access.
    pub(super) fn read(&self) -> Result<Zeroizing<String>, SiteKeyError> {
        let io_error = io_error("read", &self.path);
        // The open must not block if the file is a pipe.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let accessible_key = |why: &str| SiteKeyError::AccessibleKey {
            path: self.path.clone(),
            why: why.into(),
        };
        let file = openat(&self.dir, &*self.name, flags, Mode::empty());
        let file = file.map_err(|errno| match errno {
            Errno::ENOENT => SiteKeyError::Missing {
                path: self.path.clone(),
            },
            Errno::ELOOP => accessible_key("is a symbolic link"),
            errno => io_error(errno),
        })?;
        let metadata = fstat(&file).map_err(&io_error)?;
        if metadata.st_mode & libc::S_IFMT != libc::S_IFREG {
            return Err(accessible_key("is not a regular file"));
        }
        if let Some(why) = find_access_problem(&metadata, OTHERS_ACCESS) {
            return Err(accessible_key(&why));
        }
        // The whole text fits, so the keys are not copied to memory that is not erased.
        let mut text = Zeroizing::new(String::with_capacity(KEY_FILE_BYTES_MAX as usize + 1));
        let invalid_file = |why: String| SiteKeyError::Invalid {
            path: self.path.clone(),
            why,
        };
        File::from(file)
            .take(KEY_FILE_BYTES_MAX + 1)
            .read_to_string(&mut text)
            .map_err(|e| invalid_file(e.to_string()))?;
        match text.len() as u64 > KEY_FILE_BYTES_MAX {
            true => Err(invalid_file(format!(
                "it has more than {KEY_FILE_BYTES_MAX} bytes"
            ))),
            false => Ok(text),
        }
    }
}

pub(super) fn read_key_file(path: &Path) -> Result<Zeroizing<String>, SiteKeyError> {
    KeyDir::open(path, false)?.read()
}

/// Checks that only trusted users can change the directory `dir_path` above the key file `path`.
fn check_dir(dir: &OwnedFd, dir_path: &Path, path: &Path) -> Result<(), SiteKeyError> {
    let metadata = fstat(dir).map_err(io_error("check the directories of", path))?;
    // In a sticky directory other users can neither rename nor remove what trusted users own, and
    // the next component is checked for its owner.
    let forbidden_bits = match metadata.st_mode & STICKY {
        0 => OTHERS_WRITE,
        _ => 0,
    };
    match find_access_problem(&metadata, forbidden_bits) {
        Some(why) => Err(SiteKeyError::AccessibleDirectory {
            path: path.to_path_buf(),
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
