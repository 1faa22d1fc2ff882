//! Capabilities of this process. A program that was started by root has all of them, and uses a few.
//!
//! Only what a process may do itself is given up: its bounding and inheritable sets stay as they are. What it starts as root
//! (tasks, the engine, a remote shell) has by the kernel's rules what it would have had anyway.
#![allow(unsafe_code)] // capget and capset have no safe form

use std::io;

/// A capability, by its number in `linux/capability.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability(u8);

impl Capability {
    /// Files may be given to others.
    pub const CHOWN: Capability = Capability(0);
    /// Permissions of files do not count.
    pub const DAC_OVERRIDE: Capability = Capability(1);
    /// The same for reading, also through a descriptor of a folder.
    pub const DAC_READ_SEARCH: Capability = Capability(2);
    /// Files of others may be treated as one's own.
    pub const FOWNER: Capability = Capability(3);
    /// Special bits of files stay when they are changed.
    pub const FSETID: Capability = Capability(4);
    /// Processes of others may be signalled.
    pub const KILL: Capability = Capability(5);
    /// Another group may be taken.
    pub const SETGID: Capability = Capability(6);
    /// Another user may be taken.
    pub const SETUID: Capability = Capability(7);
    /// Ports below 1024.
    pub const NET_BIND_SERVICE: Capability = Capability(10);
    /// Processes of others may be traced.
    pub const SYS_PTRACE: Capability = Capability(19);
    /// Namespaces and mounts.
    pub const SYS_ADMIN: Capability = Capability(21);
    /// Better priorities.
    pub const SYS_NICE: Capability = Capability(23);
    /// Limits may be raised.
    pub const SYS_RESOURCE: Capability = Capability(24);
    /// Processes may be made as they were elsewhere.
    pub const CHECKPOINT_RESTORE: Capability = Capability(40);

    /// A set that has it, as `/proc/PID/status` shows sets.
    pub fn bit(self) -> u64 {
        1 << self.0
    }
}

/// A set of all of these.
pub fn set(all: &[Capability]) -> u64 {
    all.iter().fold(0, |set, one| set | one.bit())
}

/// The kernel's form of a set: effective, permitted and inheritable, the lower halves first.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Half {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// Sets of two halves.
const VERSION: u32 = 0x2008_0522;

fn header() -> Header {
    // The calling thread.
    Header {
        version: VERSION,
        pid: 0,
    }
}

/// Takes all capabilities from the calling thread but those of this set that it has. Threads that it starts have the same; so
/// this comes before there are others.
///
/// # Errors
/// The kernel did not do it.
pub fn keep_only(set: u64) -> io::Result<()> {
    let (mut header, mut halves) = (header(), [Half::default(); 2]);
    // SAFETY: both point to what capget(2) reads and writes in this version.
    let done = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, halves.as_mut_ptr()) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    for (half, kept) in halves.iter_mut().zip([set as u32, (set >> 32) as u32]) {
        half.permitted &= kept;
        half.effective &= kept;
    }
    // SAFETY: both point to what capset(2) reads in this version, and it writes nothing but the version of the header if it does
    // not know that one.
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
    use crate::status::Status;

    #[test]
    fn what_is_not_kept_is_gone_for_this_thread_and_what_it_starts_as_root_has_it_again() {
        // A thread of its own: the others keep what they have.
        let seen = std::thread::spawn(|| {
            // SAFETY: a plain system call.
            let thread = unsafe { libc::gettid() };
            let before = Status::of(thread).expect("it runs");
            let kept = set(&[Capability::KILL, Capability::SYS_PTRACE]);
            keep_only(kept).expect("rights can always be given up");
            let after = Status::of(thread).expect("it runs");
            let child = std::process::Command::new("cat")
                .arg("/proc/self/status")
                .output()
                .expect("cat");
            (
                before,
                kept,
                after,
                String::from_utf8(child.stdout).expect("text"),
            )
        });
        let (before, kept, after, child) = seen.join().expect("no panic");
        for name in ["CapPrm", "CapEff"] {
            assert_eq!(
                after.capabilities(name),
                before.capabilities(name) & kept,
                "{name}"
            );
        }
        for name in ["CapBnd", "CapInh", "CapAmb"] {
            assert_eq!(
                after.capabilities(name),
                before.capabilities(name),
                "{name}"
            );
        }
        let of_child = |name: &str| {
            child
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        if nix::unistd::geteuid().is_root() {
            assert_eq!(of_child("CapPrm:"), before.field("CapBnd"));
        }
        assert_eq!(of_child("CapBnd:"), before.field("CapBnd"));
    }
}
