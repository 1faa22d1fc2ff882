//! Drops capabilities of this process. A program that root has started has all capabilities, but
//! needs only a few.
//!
//! Only the permitted and effective sets of this process change. Its bounding and inheritable sets
//! are unchanged, so a program that it starts as root (a task, the engine, a remote shell)
//! receives, by the kernel's rules, the same capabilities as before.

pub use rustix::thread::CapabilitySet;

use rustix::thread::{capabilities, set_capabilities};
use std::io;

/// Drops all capabilities of the calling thread that are not in `retained_set`. Threads that this
/// thread creates later inherit the result, so call this function before other threads exist.
///
/// # Errors
/// The kernel refuses the change.
pub fn retain_capabilities(retained_set: CapabilitySet) -> io::Result<()> {
    let mut sets = capabilities(None)?;
    sets.permitted &= retained_set;
    sets.effective &= retained_set;
    Ok(set_capabilities(None, sets)?)
}

/// Returns the permitted capabilities of the calling thread. Those that are not effective, for
/// example because the thread accesses files as another user, can become so.
///
/// # Errors
/// The kernel does not tell them.
pub fn permitted_capabilities() -> io::Result<CapabilitySet> {
    Ok(capabilities(None)?.permitted)
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
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let status_before = proc::status(tid).expect("it runs");
            let retained_set = CapabilitySet::KILL | CapabilitySet::SYS_PTRACE;
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
            reduced_sets(&status_before).map(|set| set & retained_set.bits())
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
