//! Cache of BLAKE3 hashes of files. An entry is valid while the file's metadata is unchanged.

use super::memory_map;
use crate::proc;
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Maximum number of entries. The cache is emptied when it would exceed this number.
pub const CACHED_HASHES_MAX: usize = 4096;

/// Key of a cached hash: device, inode, length, and the modification and status change times in
/// nanoseconds. Programs that may write the file can set the modification time back; only the
/// kernel sets the status change time.
type FileKey = (u64, u64, u64, i128, i128);

/// A cache of file hashes that threads share. Files are hashed without holding the lock.
#[derive(Debug, Default)]
pub struct HashCache {
    hashes: Mutex<HashMap<FileKey, String>>,
}

impl HashCache {
    /// Returns the hash of a file's content in hexadecimal digits. Computes it if the cache does
    /// not contain it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn hash(&self, path: &Path) -> io::Result<String> {
        let mut file = File::open(path)?;
        let key = file_key(&file.metadata()?);
        if let Some(hashes) = self
            .hashes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
        {
            return Ok(hashes.clone());
        }
        let mut hasher = blake3::Hasher::new();
        io::copy(&mut file, &mut hasher)?;
        let hash = hasher.finalize().to_hex().to_string();
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        if hashes.len() >= CACHED_HASHES_MAX {
            hashes.clear();
        }
        hashes.insert(key, hash.clone());
        Ok(hash)
    }

    /// True if the hash of this file is in the cache.
    pub fn contains(&self, path: &Path) -> bool {
        let hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        path.metadata()
            .is_ok_and(|meta| hashes.contains_key(&file_key(&meta)))
    }
}

fn file_key(meta: &Metadata) -> FileKey {
    let to_nanoseconds = |seconds: i64, nanoseconds: i64| {
        i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
    };
    let (modification_ns, status_change_ns) = (
        to_nanoseconds(meta.mtime(), meta.mtime_nsec()),
        to_nanoseconds(meta.ctime(), meta.ctime_nsec()),
    );
    (
        meta.dev(),
        meta.ino(),
        meta.len(),
        modification_ns,
        status_change_ns,
    )
}

/// Maximum size in bytes of a file that is hashed in advance. Larger files are mostly data, not
/// libraries.
const PREHASHED_BYTES_MAX: u64 = 128 << 20;

/// Hashes the program and the libraries of a process in advance, so that a later inspection need
/// not wait for the disk. Read errors are ignored; the inspection reports them.
pub fn hash_program_files(pid: i32, hashes: &HashCache) {
    let Ok(text) = proc::mappings(pid, "maps") else {
        return;
    };
    for mapping in memory_map::parse_maps(&text) {
        let memory_map::Mapping::Private(path) = mapping else {
            continue;
        };
        if path
            .metadata()
            .is_ok_and(|meta| meta.len() <= PREHASHED_BYTES_MAX)
        {
            let _ = hashes.hash(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_file_is_hashed_again() {
        let cache = HashCache::default();
        let path = std::env::temp_dir().join(format!("sempa-hash-{}", std::process::id()));
        std::fs::write(&path, "one").expect("write");
        let first_hash = cache.hash(&path).expect("hash");
        assert_eq!(first_hash, blake3::hash(b"one").to_hex().to_string());
        assert_eq!(cache.hash(&path).expect("again"), first_hash);
        std::fs::write(&path, "other").expect("write");
        assert_ne!(cache.hash(&path).expect("hash"), first_hash);
        std::fs::remove_file(&path).expect("remove");
        assert!(cache.hash(&path).is_err());
    }

    /// A changed file is hashed again, although its length and modification time are unchanged.
    #[test]
    fn preserved_mtime_does_not_hide_change() {
        let (cache, dir) = (HashCache::default(), tempfile::tempdir().expect("dir"));
        let path = dir.path().join("library");
        std::fs::write(&path, "one").expect("write");
        let old_meta = std::fs::metadata(&path).expect("there");
        let (first_hash, modification_time) = (
            cache.hash(&path).expect("hash"),
            old_meta.modified().expect("a time"),
        );
        let status_change_time = |meta: &Metadata| (meta.ctime(), meta.ctime_nsec());
        // Repeat the write until the time of the file system, which may be coarse, has advanced.
        loop {
            std::fs::write(&path, "two").expect("write");
            File::options()
                .write(true)
                .open(&path)
                .and_then(|file| file.set_modified(modification_time))
                .expect("set back");
            let new_meta = std::fs::metadata(&path).expect("there");
            assert_eq!(
                (new_meta.len(), new_meta.modified().expect("a time")),
                (old_meta.len(), modification_time)
            );
            if status_change_time(&new_meta) != status_change_time(&old_meta) {
                break;
            }
        }
        assert_ne!(cache.hash(&path).expect("hash"), first_hash);
    }
}
