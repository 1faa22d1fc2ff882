//! Init data of a run on one host, shared by all workers of the host.

use bytes::Bytes;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that belongs to the user in the virtual machine's directory, which `halt` removes.
#[derive(Clone, Debug)]
pub(crate) struct HostStore {
    dir: PathBuf,
}

impl HostStore {
    /// Returns the store in `dir`; `None` unless the directory belongs to this user alone.
    pub(crate) fn open(dir: &Path) -> Option<Self> {
        let metadata = fs::symlink_metadata(dir).ok()?;
        let is_private = metadata.is_dir()
            && metadata.uid() == nix::unistd::geteuid().as_raw()
            && metadata.mode() & 0o077 == 0;
        is_private.then(|| Self {
            dir: dir.to_path_buf(),
        })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("work-{number:016x}"))
    }

    /// Stores data under a number. Readers see the whole data or nothing.
    ///
    /// # Errors
    /// The file cannot be written; nothing remains.
    pub(crate) fn write(&self, number: u64, data: &[u8]) -> io::Result<()> {
        let temporary_path = self
            .dir
            .join(format!("work-{number:016x}.{}", std::process::id()));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options
            .open(&temporary_path)
            .and_then(|mut file| file.write_all(data))
            .and_then(|()| fs::rename(&temporary_path, self.path(number)));
        if written.is_err() {
            // The error of the write is more important than that of the removal.
            let _ = fs::remove_file(&temporary_path);
        }
        written
    }

    /// Returns the data with this number and length; `None` if they are not there.
    pub(crate) fn read(&self, number: u64, length: u64) -> Option<Bytes> {
        let data = fs::read(self.path(number)).ok()?;
        (data.len() as u64 == length).then(|| data.into())
    }

    /// Removes the data of all runs that this user's workers have stored here.
    pub(crate) fn remove(&self, number: u64) {
        // Another worker of the host may have removed the file.
        let _ = fs::remove_file(self.path(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn data_are_read_only_with_the_right_length() {
        let dir = tempfile::tempdir().expect("a folder");
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(dir.path(), private).expect("changed");
        let store = HostStore::open(dir.path()).expect("private");
        store.write(7, b"hello").expect("written");
        assert_eq!(store.read(7, 5).as_deref(), Some(&b"hello"[..]));
        assert_eq!(store.read(7, 6), None);
        assert_eq!(store.read(8, 5), None);
        store.remove(7);
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 0);
    }

    #[test]
    fn shared_directory_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let shared = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.path(), shared).expect("changed");
        assert!(HostStore::open(dir.path()).is_none());
    }
}
