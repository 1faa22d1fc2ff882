//! Creates and changes the key file. A new file gets its name only when it is complete on the
//! disk, so the file is valid at each moment.

use super::error::SiteKeyError;
use super::key_path::{KeyDir, io_error};
use super::site_keys::{KeyId, SiteKeys};
use crate::sealed_stream::random_bytes;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, fsync, linkat, unlinkat};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

impl SiteKeys {
    /// Creates the key file `path` with a random key. The directory of the file is created if it
    /// does not exist. Returns the identifier of the key.
    ///
    /// # Errors
    /// The file already exists or cannot be written, or other users can change the directories
    /// above.
    pub fn create_file(path: &Path) -> Result<KeyId, SiteKeyError> {
        let key_dir = KeyDir::open(path, true)?;
        let keys = Self::generate(path)?;
        write_file(&key_dir, &keys, Replace::Nothing)?;
        Ok(keys.current_id())
    }

    /// Adds a random key to the key file `path`. The new key becomes the current key, and the old
    /// current key becomes a previous key. The file must then be copied to all hosts of the site.
    /// Returns the identifier of the new key.
    ///
    /// # Errors
    /// The file is unchanged: [`Self::load`] fails, the file has [`super::PREVIOUS_KEYS_MAX`]
    /// previous keys, or it cannot be written.
    pub fn rotate_file(path: &Path) -> Result<KeyId, SiteKeyError> {
        change_file(path, Self::rotate)
    }

    /// Removes all previous keys from the key file `path`. Images and checkpoints that were sealed
    /// with these keys do not open any more. Returns the identifier of the current key.
    ///
    /// # Errors
    /// The file is unchanged: [`Self::load`] fails, or the file cannot be written.
    pub fn forget_previous_file(path: &Path) -> Result<KeyId, SiteKeyError> {
        change_file(path, |keys| {
            keys.forget_previous();
            Ok(())
        })
    }
}

fn change_file(
    path: &Path,
    change: impl FnOnce(&mut SiteKeys) -> Result<(), SiteKeyError>,
) -> Result<KeyId, SiteKeyError> {
    let key_dir = KeyDir::open(path, false)?;
    // Without the lock one of two concurrent changes could be lost.
    let dir_fd = key_dir.dir.try_clone().map_err(change_error(path))?;
    let _dir_lock = Flock::lock(dir_fd, FlockArg::LockExclusive)
        .map_err(|(_, errno)| change_error(path)(errno.into()))?;
    let mut keys = SiteKeys::parse(&key_dir.read()?, path)?;
    change(&mut keys)?;
    write_file(&key_dir, &keys, Replace::Existing)?;
    Ok(keys.current_id())
}

fn change_error(path: &Path) -> impl Fn(io::Error) -> SiteKeyError {
    move |cause| SiteKeyError::Io {
        action: "change",
        path: path.to_path_buf(),
        cause,
    }
}

/// Whether a written file replaces an existing file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replace {
    Nothing,
    Existing,
}

fn write_file(key_dir: &KeyDir, keys: &SiteKeys, replace: Replace) -> Result<(), SiteKeyError> {
    let io_error = io_error("write", &key_dir.path);
    let write_error = change_error(&key_dir.path);
    let suffix = u64::from_ne_bytes(random_bytes().map_err(&write_error)?);
    let mut temporary_name = key_dir.name.clone();
    temporary_name.push(format!(".{suffix:016x}.new"));
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    let file = openat(&key_dir.dir, &*temporary_name, flags, mode).map_err(&io_error)?;
    let mut file = File::from(file);
    let write_result = file
        .write_all(keys.to_text().as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(write_error);
    let result = write_result.and_then(|()| match replace {
        Replace::Existing => renameat(&key_dir.dir, &*temporary_name, &key_dir.dir, &*key_dir.name)
            .map_err(&io_error),
        Replace::Nothing => linkat(
            &key_dir.dir,
            &*temporary_name,
            &key_dir.dir,
            &*key_dir.name,
            AtFlags::empty(),
        )
        .map_err(|errno| match errno {
            Errno::EEXIST => SiteKeyError::Exists {
                path: key_dir.path.clone(),
            },
            errno => io_error(errno),
        }),
    });
    if result.is_err() || replace == Replace::Nothing {
        // The file with the final name is complete, or the caller learns of the first error.
        let _ = unlinkat(&key_dir.dir, &*temporary_name, UnlinkatFlags::NoRemoveDir);
    }
    result?;
    fsync(&key_dir.dir).map_err(io_error)
}
