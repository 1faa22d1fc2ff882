//! Detects kernel features by calling the kernel. The kernel's release number is not sufficient,
//! because distributions backport features and omit others.
#![allow(unsafe_code)] // a system call whose existence is in question has no wrapper

use std::ffi::{CStr, c_long};

/// A system call that some kernels lack, with arguments with which it has no effect.
struct SyscallProbe {
    name: &'static str,
    number: c_long,
    arguments: [c_long; 6],
}

const fn syscall_probe(name: &'static str, number: c_long, arguments: [c_long; 6]) -> SyscallProbe {
    SyscallProbe {
        name,
        number,
        arguments,
    }
}

/// An invalid value for a descriptor, flags or a process id.
const INVALID_ARGUMENT: c_long = -1;

/// Number of a system call for which some C libraries have no constant. The same holds for the
/// following constants. Since Linux 5.1, a new system call has the same number on all
/// architectures.
const SYS_FUTEX_WAKE: c_long = 454;
const SYS_FUTEX_WAIT: c_long = 455;
const SYS_MSEAL: c_long = 462;
const SYS_FCHMODAT2: c_long = 452;
const SYS_CACHESTAT: c_long = 451;
const SYS_FUTEX_WAITV: c_long = 449;
const SYS_PROCESS_MADVISE: c_long = 440;
const SYS_EPOLL_PWAIT2: c_long = 441;

/// System calls that C libraries and programs probe once and then use. A kernel that has the call
/// rejects the arguments given here: an invalid descriptor, undefined flags, a structure of size 0,
/// or an invalid address.
const SYSCALL_PROBES: [SyscallProbe; 20] = [
    syscall_probe(
        "cachestat",
        SYS_CACHESTAT,
        [INVALID_ARGUMENT, 0, 0, INVALID_ARGUMENT, 0, 0],
    ),
    syscall_probe("clone3", libc::SYS_clone3, [0, 0, 0, 0, 0, 0]),
    syscall_probe("close_range", libc::SYS_close_range, [1, 0, 0, 0, 0, 0]),
    syscall_probe(
        "copy_file_range",
        libc::SYS_copy_file_range,
        [INVALID_ARGUMENT, 0, INVALID_ARGUMENT, 0, 0, 0],
    ),
    syscall_probe(
        "epoll_pwait2",
        SYS_EPOLL_PWAIT2,
        [INVALID_ARGUMENT, 0, 0, 0, 0, 0],
    ),
    syscall_probe(
        "faccessat2",
        libc::SYS_faccessat2,
        [INVALID_ARGUMENT, 0, 0, INVALID_ARGUMENT, 0, 0],
    ),
    syscall_probe(
        "fchmodat2",
        SYS_FCHMODAT2,
        [INVALID_ARGUMENT, 0, 0, INVALID_ARGUMENT, 0, 0],
    ),
    syscall_probe(
        "futex_wait",
        SYS_FUTEX_WAIT,
        [0, 0, 0, INVALID_ARGUMENT, 0, 0],
    ),
    syscall_probe("futex_waitv", SYS_FUTEX_WAITV, [0, 0, 0, 0, 0, 0]),
    syscall_probe(
        "futex_wake",
        SYS_FUTEX_WAKE,
        [0, 0, 0, INVALID_ARGUMENT, 0, 0],
    ),
    syscall_probe(
        "getrandom",
        libc::SYS_getrandom,
        [0, 0, INVALID_ARGUMENT, 0, 0, 0],
    ),
    syscall_probe(
        "membarrier",
        libc::SYS_membarrier,
        [0, INVALID_ARGUMENT, 0, 0, 0, 0],
    ),
    syscall_probe(
        "memfd_create",
        libc::SYS_memfd_create,
        [0, INVALID_ARGUMENT, 0, 0, 0, 0],
    ),
    syscall_probe("mseal", SYS_MSEAL, [1, 0, INVALID_ARGUMENT, 0, 0, 0]),
    syscall_probe(
        "openat2",
        libc::SYS_openat2,
        [INVALID_ARGUMENT, 0, 0, 0, 0, 0],
    ),
    syscall_probe(
        "pidfd_open",
        libc::SYS_pidfd_open,
        [INVALID_ARGUMENT, INVALID_ARGUMENT, 0, 0, 0, 0],
    ),
    syscall_probe(
        "pkey_alloc",
        libc::SYS_pkey_alloc,
        [INVALID_ARGUMENT, INVALID_ARGUMENT, 0, 0, 0, 0],
    ),
    syscall_probe(
        "process_madvise",
        SYS_PROCESS_MADVISE,
        [
            INVALID_ARGUMENT,
            0,
            0,
            INVALID_ARGUMENT,
            INVALID_ARGUMENT,
            0,
        ],
    ),
    syscall_probe("rseq", libc::SYS_rseq, [0, 0, INVALID_ARGUMENT, 0, 0, 0]),
    syscall_probe(
        "statx",
        libc::SYS_statx,
        [
            INVALID_ARGUMENT,
            0,
            INVALID_ARGUMENT,
            INVALID_ARGUMENT,
            0,
            0,
        ],
    ),
];

/// Name and path of the feature "time namespace". A migrated task gets a time namespace, which
/// continues its clock.
const TIME_NAMESPACE: (&str, &CStr) = ("time-namespaces", c"/proc/self/ns/time");

/// Returns the names of this kernel's features, sorted.
pub(super) fn kernel_features() -> Vec<String> {
    let syscall_names = SYSCALL_PROBES
        .iter()
        .filter(|probe| kernel_has_syscall(probe))
        .map(|probe| probe.name);
    let (name, path) = TIME_NAMESPACE;
    let time_namespace = nix::sys::stat::lstat(path).is_ok().then_some(name);
    let mut features: Vec<String> = syscall_names
        .chain(time_namespace)
        .map(String::from)
        .collect();
    features.sort_unstable();
    features
}

fn kernel_has_syscall(probe: &SyscallProbe) -> bool {
    let [a, b, c, d, e, f] = probe.arguments;
    // SAFETY: with these arguments none of the calls reads or writes memory, opens anything or
    // changes the process; see `SYSCALL_PROBES`.
    let is_error = unsafe { libc::syscall(probe.number, a, b, c, d, e, f) } < 0;
    !(is_error && nix::Error::last() == nix::Error::ENOSYS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_existing_calls_are_found() {
        let features = kernel_features();
        assert!(
            ["getrandom", "memfd_create", "statx"]
                .iter()
                .all(|name| features.iter().any(|f| f == name)),
            "{features:?}"
        );
        assert!(features.is_sorted());
        assert!(!kernel_has_syscall(&syscall_probe(
            "no such call",
            100_000,
            [0; 6]
        )));
    }

    #[test]
    fn probing_leaves_no_descriptors() {
        let count_descriptors = || std::fs::read_dir("/proc/self/fd").expect("there").count();
        let initial_count = count_descriptors();
        assert_eq!(kernel_features(), kernel_features());
        // Other tests in this process may have opened descriptors in the meantime. Wait until they
        // are closed.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while count_descriptors() > initial_count {
            assert!(
                std::time::Instant::now() < deadline,
                "something stayed open"
            );
        }
    }
}
