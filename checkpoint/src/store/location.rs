//! Opens or creates the directory and the key file of a store. Both must belong to the user of this
//! process and be inaccessible to other users.

use super::disk::Disk;
use super::encryption::{KEY_BYTES, StoreKey, random_bytes};
use super::error::{StoreError, StoreOperation, io_error};
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Returns a description of the problem if a file belongs to another user, or if other users have
/// access; `None` if there is no problem.
fn find_access_problem(meta: &Metadata) -> Option<String> {
    let own_uid = nix::unistd::geteuid().as_raw();
    if meta.uid() != own_uid {
        return Some(format!(
            "it belongs to user {}, and this is user {own_uid}",
            meta.uid()
        ));
    }
    let mode = meta.mode() & 0o7777;
    (mode & 0o077 != 0).then(|| format!("others can read or write it (mode {mode:04o})"))
}

/// Returns the path of the store's directory without symbolic links. Creates the directory if it
/// does not exist.
pub(super) fn open_directory(dir: &Path) -> Result<PathBuf, StoreError> {
    let unusable_error = |reason: String| StoreError::UnusableDirectory {
        path: dir.to_path_buf(),
        why: reason,
    };
    let create = || DirBuilder::new().recursive(true).mode(0o700).create(dir);
    create().map_err(|e| unusable_error(format!("it cannot be created: {e}")))?;
    let real_dir = dir
        .canonicalize()
        .map_err(|e| unusable_error(e.to_string()))?;
    let meta = real_dir
        .symlink_metadata()
        .map_err(|e| unusable_error(e.to_string()))?;
    if !meta.is_dir() {
        return Err(unusable_error("it is not a directory".into()));
    }
    match find_access_problem(&meta) {
        Some(reason) => Err(unusable_error(reason)),
        None => Ok(real_dir),
    }
}

/// Reads the key file `path`; creates it if it does not exist. `store_dir` is the store's
/// directory, which must not contain the key file.
pub(super) fn read_key(path: &Path, store_dir: &Path, disk: &Disk) -> Result<StoreKey, StoreError> {
    let unusable_error = |reason: String| StoreError::UnusableKey {
        path: path.to_path_buf(),
        why: reason,
    };
    let io_failure = |e: io::Error| unusable_error(e.to_string());
    let inside_store_error = || {
        unusable_error(
            "it would be in the store, and a copy of the store would include the key".into(),
        )
    };
    let absolute_path = std::path::absolute(path).map_err(io_failure)?;
    let parent = absolute_path
        .parent()
        .ok_or_else(|| unusable_error("it is not a file".into()))?;
    if parent.starts_with(store_dir) {
        return Err(inside_store_error());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(parent)
        .map_err(io_failure)?;
    if parent
        .canonicalize()
        .map_err(io_failure)?
        .starts_with(store_dir)
    {
        return Err(inside_store_error());
    }
    let file = match open_key_file(&absolute_path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            create_key_file(&absolute_path, parent, disk).map_err(|e| match e.kind() {
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                    disk_full_error(&absolute_path, e)
                }
                _ => unusable_error(format!("it cannot be created: {e}")),
            })?;
            open_key_file(&absolute_path)
        }
        file => file,
    };
    let mut file = file.map_err(io_failure)?;
    let meta = file.metadata().map_err(io_failure)?;
    if !meta.is_file() {
        return Err(unusable_error("it is not a regular file".into()));
    }
    if let Some(reason) = find_access_problem(&meta) {
        return Err(unusable_error(reason));
    }
    if meta.len() != KEY_BYTES as u64 {
        return Err(unusable_error(format!("it has {} bytes", meta.len())));
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
/// the file at the same time, the first process succeeds, and the other processes use its file.
fn create_key_file(path: &Path, parent: &Path, disk: &Disk) -> io::Result<()> {
    let key = random_bytes::<KEY_BYTES>()?;
    let mut temporary_name = path
        .file_name()
        .ok_or(ErrorKind::InvalidInput)?
        .to_os_string();
    temporary_name.push(format!(".{:016x}.new", u64::from_ne_bytes(random_bytes()?)));
    let temporary_path = parent.join(temporary_name);
    let file = disk.make_file(&temporary_path)?;
    let link_result = disk
        .append(&temporary_path, &file, &key)
        .and_then(|()| disk.sync(&temporary_path, &file))
        .and_then(|()| disk.add_link(&temporary_path, path));
    let remove_result = disk.remove_file(&temporary_path);
    match link_result {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(e),
        _ => remove_result?,
    }
    disk.sync_dir(parent)
}
