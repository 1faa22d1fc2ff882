//! Opens or creates the directory and the key file of a store. Both must belong to the user of this
//! process and be inaccessible to other users.

use super::disk::Disk;
use super::encryption::{KEY_BYTES, StoreKey, random_bytes};
use super::error::{StoreError, StoreOperation, io_error};
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Returns a description of the problem if a file belongs to another user or other users have
/// access; otherwise `None`.
fn find_access_problem(meta: &Metadata) -> Option<String> {
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

/// Returns the path of the store's directory without symbolic links. Creates the directory if it
/// does not exist.
pub(super) fn open_directory(dir: &Path) -> Result<PathBuf, StoreError> {
    let unusable = |why: String| StoreError::UnusableDirectory {
        path: dir.to_path_buf(),
        why,
    };
    let make = || DirBuilder::new().recursive(true).mode(0o700).create(dir);
    make().map_err(|e| unusable(format!("it cannot be made: {e}")))?;
    let real = dir.canonicalize().map_err(|e| unusable(e.to_string()))?;
    let meta = real
        .symlink_metadata()
        .map_err(|e| unusable(e.to_string()))?;
    if !meta.is_dir() {
        return Err(unusable("it is no directory".into()));
    }
    match find_access_problem(&meta) {
        Some(why) => Err(unusable(why)),
        None => Ok(real),
    }
}

/// Reads the key file `path`; creates it if it does not exist. `store` is the store's directory,
/// which must not contain the key file.
pub(super) fn read_key(path: &Path, store: &Path, disk: &Disk) -> Result<StoreKey, StoreError> {
    let unusable = |why: String| StoreError::UnusableKey {
        path: path.to_path_buf(),
        why,
    };
    let io_failure = |e: io::Error| unusable(e.to_string());
    let inside = || {
        unusable("it would lie in the store, and whoever has the store would have the key".into())
    };
    let absolute = std::path::absolute(path).map_err(io_failure)?;
    let parent = absolute
        .parent()
        .ok_or_else(|| unusable("it is no file".into()))?;
    if parent.starts_with(store) {
        return Err(inside());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(parent)
        .map_err(io_failure)?;
    if parent
        .canonicalize()
        .map_err(io_failure)?
        .starts_with(store)
    {
        return Err(inside());
    }
    let file = match open_key_file(&absolute) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            create_key_file(&absolute, parent, disk).map_err(|e| match e.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => disk_full_error(&absolute, e),
                _ => unusable(format!("it cannot be made: {e}")),
            })?;
            open_key_file(&absolute)
        }
        file => file,
    };
    let mut file = file.map_err(io_failure)?;
    let meta = file.metadata().map_err(io_failure)?;
    if !meta.is_file() {
        return Err(unusable("it is no plain file".into()));
    }
    if let Some(why) = find_access_problem(&meta) {
        return Err(unusable(why));
    }
    if meta.len() != KEY_BYTES as u64 {
        return Err(unusable(format!("it has {} bytes", meta.len())));
    }
    let mut key = [0; KEY_BYTES];
    file.read_exact(&mut key).map_err(io_failure)?;
    StoreKey::new(key, path).map_err(io_failure)
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

/// Creates a key file. The file gets its name only when it is complete. If several processes create
/// the file at the same time, the first one succeeds and the others use its file.
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
        .and_then(|()| disk.add_link(&temporary, path));
    let removed = disk.remove_file(&temporary);
    match linked {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
        _ => removed?,
    }
    disk.sync_dir(parent)
}
