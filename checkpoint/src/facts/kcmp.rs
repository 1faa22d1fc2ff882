//! Compares resources of processes and threads by the system call kcmp(2).
#![allow(unsafe_code)] // The call has no safe interface.

use std::cmp::Ordering;
use std::io;

/// A resource that processes and threads can share or have of their own. The values are those of
/// the kernel (linux/kcmp.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SharedResource {
    /// The address space: threads share it, and so do parent and child between vfork and execve.
    Memory = 1,
    /// The table of open descriptors.
    FileTable = 2,
    /// The working directory, root directory and umask.
    FileSystem = 3,
    /// The table of signal handlers.
    SignalHandlers = 4,
}

/// Compares a resource of two processes or threads. Equal resources are one shared resource. The
/// order of others has no meaning, but does not change while they exist.
///
/// # Errors
/// One of the two does not exist (ESRCH), access is denied, or the kernel lacks the call.
pub(super) fn compare(id: i32, other_id: i32, resource: SharedResource) -> io::Result<Ordering> {
    // SAFETY: no pointer is passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            libc::c_long::from(id),
            libc::c_long::from(other_id),
            resource as libc::c_long,
            0,
            0,
        )
    };
    match result {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(io::Error::last_os_error()),
    }
}

/// True if these two processes share their memory, as between `vfork` and `execve`.
pub fn share_memory(pid: i32, other_pid: i32) -> bool {
    compare(pid, other_pid, SharedResource::Memory).is_ok_and(Ordering::is_eq)
}

/// Returns two of these processes or threads that share a resource; `None` if each has its own.
/// Those that have ended are ignored.
///
/// # Errors
/// As [`compare`], except ESRCH.
pub(super) fn find_sharing(
    ids: &[i32],
    resource: SharedResource,
) -> io::Result<Option<(i32, i32)>> {
    let has_ended = |error: &io::Error| error.raw_os_error() == Some(libc::ESRCH);
    let mut sorted: Vec<i32> = Vec::new();
    for &id in ids {
        let (mut low, mut high) = (0, sorted.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            match compare(id, sorted[middle], resource) {
                Ok(Ordering::Equal) => return Ok(Some((sorted[middle], id))),
                Ok(Ordering::Less) => high = middle,
                Ok(Ordering::Greater) => low = middle + 1,
                Err(e) if has_ended(&e) => {
                    if let Err(e) = compare(id, id, resource) {
                        if !has_ended(&e) {
                            return Err(e);
                        }
                        break;
                    }
                    sorted.remove(middle);
                    (low, high) = (0, sorted.len());
                }
                Err(e) => return Err(e),
            }
        }
        if low == high {
            sorted.insert(low, id);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use std::sync::mpsc::channel;

    fn start_sleeping_process() -> Child {
        Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("it starts")
    }

    /// Threads share everything; processes share nothing. A process that does not exist is ignored.
    #[test]
    fn threads_share_and_processes_do_not() {
        let mut children: Vec<Child> = (0..5).map(|_| start_sleeping_process()).collect();
        let own_pid = std::process::id().cast_signed();
        let mut ids: Vec<i32> = children.iter().map(|child| child.id() as i32).collect();
        ids.extend([own_pid, i32::MAX]);
        let resources = [
            SharedResource::Memory,
            SharedResource::FileTable,
            SharedResource::FileSystem,
            SharedResource::SignalHandlers,
        ];
        for resource in resources {
            assert_eq!(find_sharing(&ids, resource).expect("kcmp"), None);
        }
        let (id_sender, id_receiver) = channel();
        let (end_sender, end_receiver) = channel::<()>();
        let thread = std::thread::spawn(move || {
            id_sender
                .send(nix::unistd::gettid().as_raw())
                .expect("it listens");
            let _ = end_receiver.recv();
        });
        let thread_id = id_receiver.recv().expect("it says");
        ids.insert(2, thread_id);
        for resource in resources {
            let (first, second) = find_sharing(&ids, resource)
                .expect("kcmp")
                .expect("a thread of this process");
            assert_eq!(
                [first.min(second), first.max(second)],
                [own_pid.min(thread_id), own_pid.max(thread_id)]
            );
        }
        drop(end_sender);
        thread.join().expect("no panic");
        for child in &mut children {
            child.kill().expect("it runs");
            child.wait().expect("it ends");
        }
    }
}
