//! Drops capabilities of this process. A program that root has started has all capabilities, but
//! needs only a few.
//!
//! Only the permitted and effective sets of this process change. Its bounding and inheritable sets
//! are unchanged, so a program that it starts as root (a task, the engine, a remote shell)
//! receives, by the kernel's rules, the same capabilities as before.
#![allow(unsafe_code)] // capget and capset have no safe form

use std::io;

/// A capability, by its number in `linux/capability.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability(u8);

impl Capability {
    /// Permits changing the owner of files.
    pub const CHOWN: Self = Self(0);
    /// Permits access to files regardless of their permissions.
    pub const DAC_OVERRIDE: Self = Self(1);
    /// Permits reading files regardless of their permissions, including opens by file handle.
    pub const DAC_READ_SEARCH: Self = Self(2);
    /// Bypasses checks for the owner of a file.
    pub const FOWNER: Self = Self(3);
    /// Preserves the set-user-ID and set-group-ID bits of a file that is modified.
    pub const FSETID: Self = Self(4);
    /// Permits sending signals to processes of other users.
    pub const KILL: Self = Self(5);
    /// Permits changing the group IDs of the process.
    pub const SETGID: Self = Self(6);
    /// Permits changing the user IDs of the process.
    pub const SETUID: Self = Self(7);
    /// Permits binding sockets to ports below 1024.
    pub const NET_BIND_SERVICE: Self = Self(10);
    /// Permits tracing processes of other users.
    pub const SYS_PTRACE: Self = Self(19);
    /// Permits creating namespaces and mounts, and other administrative calls.
    pub const SYS_ADMIN: Self = Self(21);
    /// Permits raising the priority of processes.
    pub const SYS_NICE: Self = Self(23);
    /// Permits raising hard resource limits.
    pub const SYS_RESOURCE: Self = Self(24);
    /// Permits, among other operations, restoring processes with their previous PIDs.
    pub const CHECKPOINT_RESTORE: Self = Self(40);

    /// Returns the capability set that contains only this capability, as a bit mask in the format
    /// of `/proc/PID/status`.
    pub fn mask(self) -> u64 {
        1 << self.0
    }
}

/// Returns the bit mask of these capabilities, in the format of `/proc/PID/status`.
pub fn capability_set(capabilities: &[Capability]) -> u64 {
    capabilities
        .iter()
        .fold(0, |set, capability| set | capability.mask())
}

/// The low or high 32 bits of each of the three capability sets, as capget(2) returns them; the low
/// bits come first.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilityHalf {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

/// Version 3 of the capget(2) interface: each set is split into two halves of 32 bits.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

fn capability_header() -> CapabilityHeader {
    // PID 0 means the calling thread.
    CapabilityHeader {
        version: CAPABILITY_VERSION_3,
        pid: 0,
    }
}

/// Drops all capabilities of the calling thread that are not in `retained_set`. Threads that this
/// thread creates later inherit the result, so call this function before other threads exist.
///
/// # Errors
/// The kernel refuses the change.
pub fn retain_capabilities(retained_set: u64) -> io::Result<()> {
    let (mut header, mut halves) = (capability_header(), [CapabilityHalf::default(); 2]);
    // SAFETY: both pointers refer to the structures that capget(2) reads and writes in this
    // version.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, halves.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    for (half, retained_half) in halves
        .iter_mut()
        .zip([retained_set as u32, (retained_set >> 32) as u32])
    {
        half.permitted &= retained_half;
        half.effective &= retained_half;
    }
    // SAFETY: both pointers refer to the structures that capset(2) reads in this version. The
    // kernel writes only the version in the header, if it does not support this version.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, halves.as_ptr()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc;
    use procfs::FromRead;
    use procfs::process::Status;

    /// A thread loses all capabilities except the retained ones, but a program that the thread
    /// starts as root has all capabilities.
    #[test]
    fn dropped_capabilities_return_for_root_children() {
        // The other threads of the test process retain their capabilities.
        let test_thread = std::thread::spawn(|| {
            // SAFETY: gettid takes no arguments and cannot fail.
            let tid = unsafe { libc::gettid() };
            let status_before = proc::status(tid).expect("it runs");
            let retained_set = capability_set(&[Capability::KILL, Capability::SYS_PTRACE]);
            retain_capabilities(retained_set).expect("rights can always be given up");
            let status_after = proc::status(tid).expect("it runs");
            let child_status = std::process::Command::new("cat")
                .arg("/proc/self/status")
                .output()
                .expect("cat");
            let child_status = Status::from_read(&*child_status.stdout).expect("a status");
            (status_before, retained_set, status_after, child_status)
        });
        let (status_before, retained_set, status_after, child_status) =
            test_thread.join().expect("no panic");
        let reduced_sets = |status: &Status| [status.capprm, status.capeff];
        assert_eq!(
            reduced_sets(&status_after),
            reduced_sets(&status_before).map(|set| set & retained_set)
        );
        let unchanged_sets = |status: &Status| (status.capbnd, status.capinh, status.capamb);
        assert_eq!(
            unchanged_sets(&status_after),
            unchanged_sets(&status_before)
        );
        if nix::unistd::geteuid().is_root() {
            assert_eq!(Some(child_status.capprm), status_before.capbnd);
        }
        assert_eq!(child_status.capbnd, status_before.capbnd);
    }
}
