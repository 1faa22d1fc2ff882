//! Opens or creates the directory and the key file of a store. Both must belong to this user and be
//! inaccessible to others.

use super::disk::Disk;
use super::encryption::{KEY_BYTES, StoreKey, random_bytes};
use super::error::{StoreError, StoreOperation, io_error};
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Returns the reason if a file belongs to another user or other users have access.
fn access_problem(meta: &Metadata) -> Option<String> {
    let me = nix::unistd::geteuid().as_raw();
    if meta.uid() != me {
        return Some(format!(
            "it belongs to user {}, and this is user {me}",
            meta.uid()
        ));
    }
    let mode = meta.mode() & 0o7777;
    (mode & 0o077 != 0).then(|| format!("others can read or write it (mode {mode:04o})"))
}

/// Returns the real path of the directory; creates it if it does not exist.
pub(super) fn open_directory(dir: &Path) -> Result<PathBuf, StoreError> {
    let bad = |why: String| StoreError::UnusableDirectory {
        path: dir.to_path_buf(),
        why,
    };
    let make = || DirBuilder::new().recursive(true).mode(0o700).create(dir);
    make().map_err(|e| bad(format!("it cannot be created: {e}")))?;
    let real = dir.canonicalize().map_err(|e| bad(e.to_string()))?;
    let meta = real.symlink_metadata().map_err(|e| bad(e.to_string()))?;
    if !meta.is_dir() {
        return Err(bad("it is not a directory".into()));
    }
    match access_problem(&meta) {
        Some(why) => Err(bad(why)),
        None => Ok(real),
    }
}

/// Reads the key file; creates it if it does not exist. `store` is the real path of the directory.
pub(super) fn read_key(path: &Path, store: &Path, disk: &Disk) -> Result<StoreKey, StoreError> {
    let bad = |why: String| StoreError::UnusableKey {
        path: path.to_path_buf(),
        why,
    };
    let io_bad = |e: io::Error| bad(e.to_string());
    let inside =
        || bad("it would be in the store, and a copy of the store would include the key".into());
    let absolute = std::path::absolute(path).map_err(io_bad)?;
    let parent = absolute
        .parent()
        .ok_or_else(|| bad("it is not a file".into()))?;
    if parent.starts_with(store) {
        return Err(inside());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(parent)
        .map_err(io_bad)?;
    if parent.canonicalize().map_err(io_bad)?.starts_with(store) {
        return Err(inside());
    }
    let file = match open_key_file(&absolute) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            create_key_file(&absolute, parent, disk).map_err(|e| match e.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => disk_full_error(&absolute, e),
                _ => bad(format!("it cannot be created: {e}")),
            })?;
            open_key_file(&absolute)
        }
        file => file,
    };
    let mut file = file.map_err(io_bad)?;
    let meta = file.metadata().map_err(io_bad)?;
    if !meta.is_file() {
        return Err(bad("it is not a regular file".into()));
    }
    if let Some(why) = access_problem(&meta) {
        return Err(bad(why));
    }
    if meta.len() != KEY_BYTES as u64 {
        return Err(bad(format!("it has {} bytes", meta.len())));
    }
    let mut key = [0; KEY_BYTES];
    file.read_exact(&mut key).map_err(io_bad)?;
    StoreKey::new(key, path).map_err(io_bad)
}

fn disk_full_error(path: &Path, e: io::Error) -> StoreError {
    io_error(StoreOperation::Open, path)(e)
}

fn open_key_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
}

/// Creates a key file, which has its name only when it is complete. If several processes do so at
/// the same time, the first one wins.
fn create_key_file(path: &Path, parent: &Path, disk: &Disk) -> io::Result<()> {
    let key = random_bytes::<KEY_BYTES>()?;
    let mut name = path
        .file_name()
        .ok_or(ErrorKind::InvalidInput)?
        .to_os_string();
    name.push(format!(".{:016x}.new", u64::from_ne_bytes(random_bytes()?)));
    let temporary = parent.join(name);
    let file = disk.make_file(&temporary)?;
    let linked = disk
        .append(&temporary, &file, &key)
        .and_then(|()| disk.sync(&temporary, &file))
        .and_then(|()| disk.link(&temporary, path));
    let removed = disk.remove_file(&temporary);
    match linked {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
        _ => removed?,
    }
    disk.sync_dir(parent)
}
