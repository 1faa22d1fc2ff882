//! Reads the properties of this host that determine the host's verdicts on tasks.

use super::hash::HashCache;
use super::verdict::{FoundFile, HostProperties};
use super::{available_resources, files, kernel};
use crate::proc;
use procfs::{CpuInfo, Current};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct ThisHost {
    hashes: Arc<HashCache>,
    reserved_bytes: u64,
    pid_limit: u32,
}

impl ThisHost {
    /// `reserved_bytes` is the number of bytes of memory that are reserved for tasks that are
    /// migrating to this host. All process ids in a new PID namespace are below `pid_limit`.
    pub fn new(hashes: Arc<HashCache>, reserved_bytes: u64, pid_limit: u32) -> Self {
        Self {
            hashes,
            reserved_bytes,
            pid_limit,
        }
    }
}

impl HostProperties for ThisHost {
    fn cpu_features(&self) -> io::Result<Vec<String>> {
        cpu_features()
    }

    fn kernel_features(&self) -> Vec<String> {
        kernel::kernel_features()
    }

    fn kernel(&self) -> String {
        proc::kernel_release()
    }

    fn memory_available_bytes(&self) -> io::Result<u64> {
        available_resources::read_memory_available_bytes()
    }

    fn memory_reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }

    fn pid_limit(&self) -> u32 {
        self.pid_limit
    }

    fn threads_available(&self) -> io::Result<Option<u64>> {
        available_resources::threads_available()
    }

    fn has_address(&self, address: IpAddr) -> bool {
        // The address alone is checked, so the kernel chooses the port.
        let bind_result = UdpSocket::bind((address, 0));
        !bind_result.is_err_and(|e| e.raw_os_error() == Some(libc::EADDRNOTAVAIL))
    }

    fn find_file(&self, path: &Path) -> io::Result<FoundFile> {
        let meta = std::fs::metadata(path)?;
        Ok(FoundFile {
            bytes: meta.len(),
            is_directory: meta.is_dir(),
        })
    }

    fn hash(&self, path: &Path) -> io::Result<String> {
        self.hashes.hash(path)
    }

    fn creation_obstacle(&self, path: &Path, uid: u32) -> Option<String> {
        files::creation_obstacle(path, uid)
    }
}

/// Returns the features of this host's processor, sorted.
///
/// # Errors
/// They cannot be read, for example because no descriptor is available.
pub(super) fn cpu_features() -> io::Result<Vec<String>> {
    let features = CpuInfo::current().map(|info| first_cpu_features(&info));
    let features = features.map_err(proc::into_io_error)?;
    match features.is_empty() {
        true => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "/proc/cpuinfo lists none",
        )),
        false => Ok(features),
    }
}

/// Returns the features of the first processor, sorted. In /proc/cpuinfo the field is called
/// "flags" on x86 and "Features" on ARM.
fn first_cpu_features(info: &CpuInfo) -> Vec<String> {
    let flags_text = info
        .get_field(0, "flags")
        .or_else(|| info.get_field(0, "Features"))
        .unwrap_or_default();
    let mut features: Vec<String> = flags_text.split_whitespace().map(String::from).collect();
    features.sort_unstable();
    features.dedup();
    features
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs::FromRead;

    #[test]
    fn processor_features_are_parsed() {
        let cpuinfo = "processor\t: 0\nflags\t\t: sse2 fma avx2 fma\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: sse2\n";
        let info = CpuInfo::from_read(cpuinfo.as_bytes()).expect("it is complete");
        assert_eq!(first_cpu_features(&info), ["avx2", "fma", "sse2"]);
    }

    #[test]
    fn own_properties_are_readable() {
        let host = ThisHost::new(Arc::default(), 0, u32::MAX);
        assert!(host.memory_available_bytes().expect("readable") > 0);
        assert!(host.threads_available().is_ok());
        assert!(
            !host.cpu_features().expect("readable").is_empty()
                && !host.kernel().is_empty()
                && !host.kernel_features().is_empty()
        );
        assert!(
            host.find_file(Path::new("/proc"))
                .expect("it exists")
                .is_directory
        );
    }
}
