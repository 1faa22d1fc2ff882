//! Removes the file in which CRIU caches the features of the kernel (kdat). The file belongs to
//! CRIU, and any user of CRIU on the host may have created it. A virtual machine must not leave the
//! file on a host where it did not exist before.

use std::path::PathBuf;

/// Path of CRIU's cache file if `/run` is a memory file system.
const KDAT_PATH: &str = "/run/criu.kdat";

/// Removes CRIU's cache file when dropped, unless the file existed when this value was created.
#[derive(Debug)]
pub struct KdatCleanup {
    path_to_remove: Option<PathBuf>,
}

impl KdatCleanup {
    /// Checks whether the cache file exists. If the file exists, dropping the returned value does
    /// not remove it.
    pub fn check_presence() -> Self {
        Self::for_path(PathBuf::from(KDAT_PATH))
    }

    fn for_path(path: PathBuf) -> Self {
        Self {
            path_to_remove: (!path.exists()).then_some(path),
        }
    }
}

impl Drop for KdatCleanup {
    fn drop(&mut self) {
        if let Some(path) = &self.path_to_remove {
            // Fails if the file does not exist, or if it belongs to another user.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cache file is removed if it was created after the check. A file that existed at the
    /// check is not removed.
    #[test]
    fn existing_file_is_kept() {
        let path = std::env::temp_dir().join(format!("criu-notes-{}", std::process::id()));
        let cleanup = KdatCleanup::for_path(path.clone());
        std::fs::write(&path, "x").expect("writable");
        drop(cleanup);
        assert!(!path.exists());
        std::fs::write(&path, "x").expect("writable");
        drop(KdatCleanup::for_path(path.clone()));
        assert!(path.exists());
        std::fs::remove_file(&path).expect("removable");
    }
}
