//! The properties of this host on which its verdicts depend.

use super::compare::{Found, Host};
use super::hash::HashCache;
use super::{files, kernel, room};
use std::io;
use std::path::Path;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct ThisHost {
    hashes: Arc<HashCache>,
    promised: u64,
}

impl ThisHost {
    /// `promised` are the bytes of memory that are reserved for tasks that are migrating here.
    pub fn new(hashes: Arc<HashCache>, promised: u64) -> ThisHost {
        ThisHost { hashes, promised }
    }
}

impl Host for ThisHost {
    fn cpu_features(&self) -> Vec<String> {
        cpu_features()
    }

    fn kernel_features(&self) -> Vec<String> {
        kernel::features()
    }

    fn kernel(&self) -> String {
        release()
    }

    fn memory_available_bytes(&self) -> u64 {
        room::memory_available_bytes()
    }

    fn memory_promised_bytes(&self) -> u64 {
        self.promised
    }

    fn threads_available(&self) -> Option<u64> {
        room::threads()
    }

    fn look(&self, path: &Path) -> io::Result<Found> {
        let meta = std::fs::metadata(path)?;
        Ok(Found {
            bytes: meta.len(),
            is_directory: meta.is_dir(),
        })
    }

    fn hash(&self, path: &Path) -> io::Result<String> {
        self.hashes.hash(path)
    }

    fn may_not_make(&self, path: &Path, uid: u32) -> Option<String> {
        files::may_not_make(path, uid)
    }
}

/// Returns the features of this host's processor, sorted.
pub(super) fn cpu_features() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    features(&text)
}

/// Returns the release of this host's kernel.
pub(super) fn release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_string()
}

/// Returns the features of the first processor: "flags" on x86, "Features" on ARM.
fn features(cpuinfo: &str) -> Vec<String> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("flags") || line.starts_with("Features"));
    let list = line
        .and_then(|line| line.split_once(':'))
        .map_or("", |(_, list)| list);
    let mut features: Vec<String> = list.split_whitespace().map(String::from).collect();
    features.sort_unstable();
    features.dedup();
    features
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_features_are_parsed() {
        let cpuinfo = "processor\t: 0\nflags\t\t: sse2 fma avx2 fma\nbugs\t\t: none\nprocessor\t: 1\nflags\t\t: sse2\n";
        assert_eq!(features(cpuinfo), ["avx2", "fma", "sse2"]);
    }

    #[test]
    fn own_properties_are_readable() {
        let host = ThisHost::new(Arc::default(), 0);
        assert!(host.memory_available_bytes() > 0);
        assert!(
            !host.cpu_features().is_empty()
                && !host.kernel().is_empty()
                && !host.kernel_features().is_empty()
        );
        assert!(
            host.look(Path::new("/proc"))
                .expect("it exists")
                .is_directory
        );
    }
}
