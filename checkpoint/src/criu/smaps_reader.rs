//! Reads the mappings of large processes while CRIU prepares its dump.
//!
//! To produce `/proc/PID/smaps` the kernel visits all pages of the process: 13 ms for a gibibyte.
//! CRIU reads this file in the middle of a dump. The process is stopped, so the text is the same
//! when a thread of the tasker has read it before, while CRIU did its first steps. The library in
//! CRIU requests the text over the socket of the relay ([`super::ptrace_relay`]).
//!
//! The text is not read before the process is stopped: a later `madvise` of a whole mapping would
//! change it without any trace in `/proc/PID/maps`.

use crate::proc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

/// Minimum resident memory in KiB of a process whose mappings are read by a thread. For a smaller
/// process the thread would cost more than it saves.
const RESIDENT_KIB_MIN: u64 = 64 << 10;
/// Maximum number of threads of one dump. CRIU reads the mappings of further processes itself.
const READERS_MAX: usize = 4;

/// The threads that read the mappings of stopped processes, by PID.
#[derive(Debug, Default)]
pub(super) struct SmapsReaders(BTreeMap<i32, JoinHandle<io::Result<OwnedFd>>>);

impl SmapsReaders {
    /// Starts a thread for each large process of these, which must be stopped and remain stopped.
    pub(super) fn start(pids: &[i32]) -> Self {
        Self::start_for(pids, RESIDENT_KIB_MIN)
    }

    fn start_for(pids: &[i32], resident_kib_min: u64) -> Self {
        let is_large = |pid: &&i32| {
            proc::status(**pid)
                .and_then(|status| status.vmrss)
                .is_some_and(|kib| kib >= resident_kib_min)
        };
        let start_reader = |pid: &i32| {
            let pid = *pid;
            let reader = std::thread::Builder::new()
                .name("smaps".into())
                .spawn(move || {
                    super::process::raise_thread_priority();
                    read_to_memory(pid)
                });
            // If no thread can be started, CRIU reads the file itself.
            Some((pid, reader.ok()?))
        };
        Self(
            pids.iter()
                .filter(is_large)
                .take(READERS_MAX)
                .filter_map(start_reader)
                .collect(),
        )
    }

    /// Waits for the text of a process and returns it as a file in memory, once. `None` if no
    /// thread has read it.
    pub(super) fn take_text(&mut self, pid: i32) -> Option<OwnedFd> {
        self.0.remove(&pid)?.join().ok()?.ok()
    }
}

fn read_to_memory(pid: i32) -> io::Result<OwnedFd> {
    let text = std::fs::read(format!("/proc/{pid}/smaps"))?;
    let mut file = File::from(memfd_create(c"sempa-smaps", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&text)?;
    file.rewind()?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    /// The text of a large process is that of the kernel, and is given once. Small processes have
    /// none.
    #[test]
    fn text_of_large_processes_is_read_once() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("it starts");
        let pid = child.id() as i32;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGSTOP)
            .expect("it is there");
        while proc::stat(pid).is_none_or(|stat| stat.state != 'T') {
            std::thread::yield_now();
        }
        assert!(SmapsReaders::start(&[pid]).take_text(pid).is_none());
        let mut readers = SmapsReaders::start_for(&[pid], 0);
        let mut text = String::new();
        File::from(readers.take_text(pid).expect("it was read"))
            .read_to_string(&mut text)
            .expect("readable");
        assert!(readers.take_text(pid).is_none());
        let expected = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("readable");
        // The share of a page that other processes have changes at any time.
        let mappings = |text: &str| -> Vec<String> {
            text.lines()
                .filter(|line| line.contains('-') || line.starts_with("VmFlags"))
                .map(String::from)
                .collect()
        };
        assert!(mappings(&text).len() > 10);
        assert_eq!(mappings(&text), mappings(&expected));
        child.kill().expect("it is there");
        child.wait().expect("it ends");
    }
}
