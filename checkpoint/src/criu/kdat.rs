//! Keeps CRIU's cache of the kernel's features (kdat) usable.
//!
//! Without the cache every CRIU tries the kernel out at its start, which takes 30 to 60 ms, most of
//! it for a network namespace with firewall rules. The first CRIU on a host writes the cache, which
//! is valid until the machine restarts. The probe of the engine is this first CRIU, so no migration
//! pays for the trial. The cache is CRIU's own file about the machine, not about a virtual machine,
//! so it outlives the tasker.
//!
//! CRIU writes the cache under a temporary name that must not exist. A CRIU that was killed in
//! between leaves this name behind, and no later CRIU on the host writes the cache.

use std::fs::Metadata;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Temporary name of CRIU's cache file. CRIU keeps the cache only in a memory file system.
const TEMPORARY_PATH: &str = "/run/criu.kdat.tmp";
/// Minimum age of a temporary file that a killed CRIU has left behind. A CRIU that lives has this
/// name for microseconds.
const STALE_AGE_MIN: Duration = Duration::from_secs(60);

/// Removes the temporary file of the cache if a killed CRIU has left it behind.
///
/// The age alone decides, and a wrong decision costs no more than the cache. If a CRIU has been
/// stopped for that long in the middle of its write, its rename fails, which it ignores, or it
/// renames the file of another CRIU, and the next CRIU discards a cache that is incomplete.
pub(super) fn remove_stale_temporary() {
    // Without the right to remove the file, CRIU works without its cache.
    let _ = remove_if_stale(Path::new(TEMPORARY_PATH), SystemTime::now());
}

fn remove_if_stale(path: &Path, now: SystemTime) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if is_stale(&metadata, now) => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

/// True for a file that is old, or whose time lies in the future because the clock was set back.
fn is_stale(metadata: &Metadata, now: SystemTime) -> bool {
    metadata.is_file()
        && metadata.modified().is_ok_and(|modified_at| {
            now.duration_since(modified_at)
                .map_or(true, |age| age >= STALE_AGE_MIN)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary file is removed when it is old, and kept while a CRIU may be writing it.
    #[test]
    fn only_old_temporary_files_are_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("criu.kdat.tmp");
        std::fs::write(&path, "").expect("writable");
        let written_at = std::fs::metadata(&path)
            .and_then(|metadata| metadata.modified())
            .expect("it is there");
        remove_if_stale(&path, written_at + STALE_AGE_MIN / 2).expect("removable");
        assert!(path.exists());
        remove_if_stale(&path, written_at + STALE_AGE_MIN).expect("removable");
        assert!(!path.exists());
        std::fs::write(&path, "").expect("writable");
        remove_if_stale(&path, written_at - STALE_AGE_MIN).expect("removable");
        assert!(!path.exists(), "its time lies in the future");
        remove_if_stale(&path, written_at).expect("a missing file is not an error");
    }
}
