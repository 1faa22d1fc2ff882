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
    pub const CHOWN: Capability = Capability(0);
    /// Permits access to files regardless of their permissions.
    pub const DAC_OVERRIDE: Capability = Capability(1);
    /// Permits reading files regardless of their permissions, including opens by file handle.
    pub const DAC_READ_SEARCH: Capability = Capability(2);
    /// Bypasses checks for the owner of a file.
    pub const FOWNER: Capability = Capability(3);
    /// Preserves the set-user-ID and set-group-ID bits of a file that is modified.
    pub const FSETID: Capability = Capability(4);
    /// Permits sending signals to processes of other users.
    pub const KILL: Capability = Capability(5);
    /// Permits changing the group IDs of the process.
    pub const SETGID: Capability = Capability(6);
    /// Permits changing the user IDs of the process.
    pub const SETUID: Capability = Capability(7);
    /// Permits binding sockets to ports below 1024.
    pub const NET_BIND_SERVICE: Capability = Capability(10);
    /// Permits tracing processes of other users.
    pub const SYS_PTRACE: Capability = Capability(19);
    /// Permits creating namespaces and mounts, and other administrative calls.
    pub const SYS_ADMIN: Capability = Capability(21);
    /// Permits raising the priority of processes.
    pub const SYS_NICE: Capability = Capability(23);
    /// Permits raising hard resource limits.
    pub const SYS_RESOURCE: Capability = Capability(24);
    /// Permits restoring processes with their previous PIDs, among others.
    pub const CHECKPOINT_RESTORE: Capability = Capability(40);

    /// Returns the capability set that contains only this capability, as a bit mask in the format
    /// of `/proc/PID/status`.
    pub fn bit(self) -> u64 {
        1 << self.0
    }
}

/// Returns the bit mask of these capabilities, in the format of `/proc/PID/status`.
pub fn capability_set(all: &[Capability]) -> u64 {
    all.iter().fold(0, |set, one| set | one.bit())
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

fn header() -> CapabilityHeader {
    // PID 0 means the calling thread.
    CapabilityHeader {
        version: CAPABILITY_VERSION_3,
        pid: 0,
    }
}

/// Drops all capabilities of the calling thread that are not in `kept_set`. Threads that this
/// thread creates later inherit the result, so call this before other threads exist.
///
/// # Errors
/// The kernel refused.
pub fn drop_capabilities_except(kept_set: u64) -> io::Result<()> {
    let (mut header, mut halves) = (header(), [CapabilityHalf::default(); 2]);
    // SAFETY: both pointers refer to the structures that capget(2) reads and writes in this
    // version.
    let done = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, halves.as_mut_ptr()) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    for (half, kept) in halves
        .iter_mut()
        .zip([kept_set as u32, (kept_set >> 32) as u32])
    {
        half.permitted &= kept;
        half.effective &= kept;
    }
    // SAFETY: both pointers refer to the structures that capset(2) reads in this version. The
    // kernel writes only the version in the header, if it does not support this version.
    let done = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, halves.as_ptr()) };
    if done == 0 {
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

    /// A thread loses all capabilities except the kept ones, but a program that the thread starts
    /// as root has all of them.
    #[test]
    fn dropped_capabilities_return_for_root_children() {
        // The other threads of the test process keep their capabilities.
        let seen = std::thread::spawn(|| {
            // SAFETY: gettid takes no arguments and cannot fail.
            let thread = unsafe { libc::gettid() };
            let before = proc::status(thread).expect("it runs");
            let kept = capability_set(&[Capability::KILL, Capability::SYS_PTRACE]);
            drop_capabilities_except(kept).expect("rights can always be given up");
            let after = proc::status(thread).expect("it runs");
            let child = std::process::Command::new("cat")
                .arg("/proc/self/status")
                .output()
                .expect("cat");
            let child = Status::from_read(&*child.stdout).expect("a status");
            (before, kept, after, child)
        });
        let (before, kept, after, child) = seen.join().expect("no panic");
        let reduced = |status: &Status| [status.capprm, status.capeff];
        assert_eq!(reduced(&after), reduced(&before).map(|set| set & kept));
        let unchanged = |status: &Status| (status.capbnd, status.capinh, status.capamb);
        assert_eq!(unchanged(&after), unchanged(&before));
        if nix::unistd::geteuid().is_root() {
            assert_eq!(Some(child.capprm), before.capbnd);
        }
        assert_eq!(child.capbnd, before.capbnd);
    }
}
