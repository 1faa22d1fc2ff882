//! The machine that this process runs on, as far as a verdict has to know it.

use super::compare::{Found, Host};
use super::hash::HashCache;
use super::{files, kernel, room};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// This machine.
#[derive(Clone, Debug)]
pub struct ThisHost {
    hashes: Arc<HashCache>,
    promised: u64,
}

impl ThisHost {
    /// `hashes` remembers what was hashed before; so many bytes of its memory were `promised` to tasks on their way here.
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

/// Features of this machine's processor, sorted.
pub(super) fn cpu_features() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    features(&text)
}

/// Release of this machine's kernel.
pub(super) fn release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_string()
}

/// The first processor's features; "flags" on x86, "Features" on ARM.
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
    fn proc_is_read_as_it_is_written() {
        let cpuinfo = "processor\t: 0\nflags\t\t: sse2 fma avx2 fma\nbugs\t\t: none\nprocessor\t: 1\nflags\t\t: sse2\n";
        assert_eq!(features(cpuinfo), ["avx2", "fma", "sse2"]);
    }

    #[test]
    fn this_machine_can_be_read() {
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
