//! Finds what the threads of a process do not share although the engine restores it once for the
//! whole process, and what the processes of a task share although the engine restores it for each.

use super::inspect::{INSPECT_ATTEMPTS_MAX, unsupported_resource};
use super::kcmp::{self, SharedResource};
use crate::proc::{self, namespace};
use sempa_proto::migration::Refusal;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Namespaces that a thread can have of its own: the name in /proc/PID/ns, and the description in
/// the refusal.
const THREAD_NAMESPACES: [(&str, &str); 7] = [
    ("mnt", "a mount namespace"),
    ("net", "a network namespace"),
    ("ipc", "an IPC namespace"),
    ("uts", "a host-name namespace"),
    ("cgroup", "a control-group namespace"),
    (
        "pid_for_children",
        "a process-id namespace for its children",
    ),
    ("time_for_children", "a time namespace for its children"),
];

/// Resources that the engine restores once for all threads of a process, and their description in
/// the refusal.
const PROCESS_RESOURCES: [(SharedResource, &str); 2] = [
    (
        SharedResource::FileTable,
        "a table of descriptors of its own (CLONE_FILES)",
    ),
    (
        SharedResource::FileSystem,
        "a working directory, root directory and umask of its own (CLONE_FS)",
    ),
];

/// Resources that the engine restores for each process separately, and how processes come to share
/// them.
const OWN_RESOURCES: [(SharedResource, &str); 3] = [
    (
        SharedResource::Memory,
        "memory (vfork, or clone with CLONE_VM)",
    ),
    (
        SharedResource::FileSystem,
        "working directory, root directory and umask (clone with CLONE_FS)",
    ),
    (
        SharedResource::SignalHandlers,
        "signal handlers (clone with CLONE_SIGHAND)",
    ),
];

/// Checks that all threads of a process have the resources of its first thread. `threads` are the
/// ids of all its threads.
///
/// # Errors
/// The resource of a thread that the engine would replace by the process's.
pub(super) fn check_threads(pid: i32, threads: &[i32]) -> Result<(), Refusal> {
    let namespaces = read_namespaces(pid);
    threads
        .iter()
        .filter(|thread_id| **thread_id != pid)
        .try_for_each(|thread_id| {
            repeat_while_refused(|| check_thread(pid, &namespaces, *thread_id))
        })
}

/// The identities of a thread's namespaces, in the order of [`THREAD_NAMESPACES`].
type ThreadNamespaces = [Option<PathBuf>; THREAD_NAMESPACES.len()];

fn read_namespaces(thread_id: i32) -> ThreadNamespaces {
    let thread = thread_id.to_string();
    THREAD_NAMESPACES.map(|(name, _)| namespace(&thread, name))
}

/// `process_namespaces` are those of the first thread of the process `pid`.
fn check_thread(
    pid: i32,
    process_namespaces: &ThreadNamespaces,
    thread_id: i32,
) -> Result<(), Refusal> {
    for (resource, description) in PROCESS_RESOURCES {
        match kcmp::compare(pid, thread_id, resource) {
            Ok(order) if order.is_eq() => {}
            Ok(_) if has_ended(thread_id) => return Ok(()),
            Ok(_) => return Err(refuse_thread(thread_id, description)),
            // The thread or the whole process has ended.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
            Err(e) => return Err(not_comparable(thread_id, &e)),
        }
    }
    let namespaces = read_namespaces(thread_id);
    let differing = THREAD_NAMESPACES
        .iter()
        .zip(process_namespaces.iter().zip(&namespaces))
        .find(|(_, (process_namespace, namespace))| process_namespace != namespace);
    match differing {
        Some(((_, description), _)) if !has_ended(thread_id) => Err(refuse_thread(
            thread_id,
            &format!("{description} of its own"),
        )),
        _ => Ok(()),
    }
}

fn refuse_thread(thread_id: i32, description: &str) -> Refusal {
    unsupported_resource(format!("a thread ({thread_id}) with {description}"))
}

/// Checks that each process of a task has its own memory, directories and signal handlers.
///
/// # Errors
/// The resource that two processes share.
pub(super) fn check_processes(processes: &[i32]) -> Result<(), Refusal> {
    if processes.len() < 2 {
        return Ok(());
    }
    repeat_while_refused(|| {
        // Ended processes have none of the resources, which would make them equal.
        let running: Vec<i32> = processes
            .iter()
            .copied()
            .filter(|pid| !has_ended(*pid))
            .collect();
        OWN_RESOURCES
            .iter()
            .try_for_each(
                |(resource, description)| match kcmp::find_sharing(&running, *resource) {
                    Ok(None) => Ok(()),
                    Ok(Some((pid, other_pid))) => {
                        let names = [pid, other_pid].map(|pid| {
                            let name = proc::status(pid).map(|status| status.name);
                            format!("{} ({pid})", name.unwrap_or_default())
                        });
                        Err(unsupported_resource(format!(
                            "processes that share their {description}: {}",
                            names.join(" and ")
                        )))
                    }
                    Err(e) => Err(not_comparable(running[0], &e)),
                },
            )
    })
}

/// Calls `check` until it accepts, but at most [`INSPECT_ATTEMPTS_MAX`] times. A thread or process
/// that is ending, or a child between vfork and exec, looks for a moment like one that differs.
fn repeat_while_refused(check: impl Fn() -> Result<(), Refusal>) -> Result<(), Refusal> {
    let mut result = check();
    for _ in 1..INSPECT_ATTEMPTS_MAX {
        if result.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
        result = check();
    }
    result
}

/// True for a thread or process that has ended, or is a zombie.
fn has_ended(id: i32) -> bool {
    !Path::new(&format!("/proc/{id}")).exists()
        || proc::stat(id).is_none_or(|stat| matches!(stat.state, 'Z' | 'X'))
}

fn not_comparable(id: i32, error: &io::Error) -> Refusal {
    unsupported_resource(format!(
        "a process or thread ({id}) that cannot be compared with others (kcmp): {error}"
    ))
}
