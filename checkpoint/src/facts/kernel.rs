//! What the kernel can do, found by asking it: release numbers say little, because distributions carry new things back and
//! build others out.
#![allow(unsafe_code)] // a system call whose existence is in question has no wrapper

use std::ffi::{CStr, c_long};

/// A system call that not every kernel has, with arguments by which one that exists does nothing.
struct Probe {
    name: &'static str,
    number: c_long,
    arguments: [c_long; 6],
}

const fn probe(name: &'static str, number: c_long, arguments: [c_long; 6]) -> Probe {
    Probe {
        name,
        number,
        arguments,
    }
}

/// No descriptor, no flag, no process.
const NONE: c_long = -1;

/// From Linux 5.1 on all architectures give a new system call the same number; those that follow have no name in the C library's
/// header everywhere.
const FUTEX_WAKE: c_long = 454;
const FUTEX_WAIT: c_long = 455;
const MSEAL: c_long = 462;
const FCHMODAT2: c_long = 452;
const CACHESTAT: c_long = 451;
const FUTEX_WAITV: c_long = 449;
const PROCESS_MADVISE: c_long = 440;
const EPOLL_PWAIT2: c_long = 441;

/// What a C library or a program looks for at its start and uses ever after. Each call is refused for its arguments: no such
/// descriptor, flags that nobody defines, a structure of no bytes, an address that nobody may have.
const PROBES: [Probe; 20] = [
    probe("cachestat", CACHESTAT, [NONE, 0, 0, NONE, 0, 0]),
    probe("clone3", libc::SYS_clone3, [0, 0, 0, 0, 0, 0]),
    probe("close_range", libc::SYS_close_range, [1, 0, 0, 0, 0, 0]),
    probe(
        "copy_file_range",
        libc::SYS_copy_file_range,
        [NONE, 0, NONE, 0, 0, 0],
    ),
    probe("epoll_pwait2", EPOLL_PWAIT2, [NONE, 0, 0, 0, 0, 0]),
    probe("faccessat2", libc::SYS_faccessat2, [NONE, 0, 0, NONE, 0, 0]),
    probe("fchmodat2", FCHMODAT2, [NONE, 0, 0, NONE, 0, 0]),
    probe("futex_wait", FUTEX_WAIT, [0, 0, 0, NONE, 0, 0]),
    probe("futex_waitv", FUTEX_WAITV, [0, 0, 0, 0, 0, 0]),
    probe("futex_wake", FUTEX_WAKE, [0, 0, 0, NONE, 0, 0]),
    probe("getrandom", libc::SYS_getrandom, [0, 0, NONE, 0, 0, 0]),
    probe("membarrier", libc::SYS_membarrier, [0, NONE, 0, 0, 0, 0]),
    probe(
        "memfd_create",
        libc::SYS_memfd_create,
        [0, NONE, 0, 0, 0, 0],
    ),
    probe("mseal", MSEAL, [1, 0, NONE, 0, 0, 0]),
    probe("openat2", libc::SYS_openat2, [NONE, 0, 0, 0, 0, 0]),
    probe("pidfd_open", libc::SYS_pidfd_open, [NONE, NONE, 0, 0, 0, 0]),
    probe("pkey_alloc", libc::SYS_pkey_alloc, [NONE, NONE, 0, 0, 0, 0]),
    probe(
        "process_madvise",
        PROCESS_MADVISE,
        [NONE, 0, 0, NONE, NONE, 0],
    ),
    probe("rseq", libc::SYS_rseq, [0, 0, NONE, 0, 0, 0]),
    probe("statx", libc::SYS_statx, [NONE, 0, NONE, NONE, 0, 0]),
];

/// Moved tasks get a time namespace, in which their clock goes on where it was.
const TIME_NAMESPACE: (&str, &CStr) = ("time-namespaces", c"/proc/self/ns/time");

/// The names of what this kernel can do, sorted.
pub(super) fn features() -> Vec<String> {
    let calls = PROBES
        .iter()
        .filter(|probe| exists(probe))
        .map(|probe| probe.name);
    let (name, path) = TIME_NAMESPACE;
    let namespaces = nix::sys::stat::lstat(path).is_ok().then_some(name);
    let mut features: Vec<String> = calls.chain(namespaces).map(String::from).collect();
    features.sort_unstable();
    features
}

fn exists(probe: &Probe) -> bool {
    let [a, b, c, d, e, f] = probe.arguments;
    // SAFETY: with these arguments none of the calls reads or writes memory, opens anything or changes the process: see
    // `PROBES`.
    let refused = unsafe { libc::syscall(probe.number, a, b, c, d, e, f) } < 0;
    !(refused && nix::Error::last() == nix::Error::ENOSYS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_every_kernel_has_are_found_and_one_that_none_has_is_not() {
        let found = features();
        assert!(
            ["getrandom", "memfd_create", "statx"]
                .iter()
                .all(|name| found.iter().any(|f| f == name)),
            "{found:?}"
        );
        assert!(found.is_sorted());
        assert!(!exists(&probe("no such call", 100_000, [0; 6])));
    }

    #[test]
    fn asking_changes_nothing() {
        let descriptors = || std::fs::read_dir("/proc/self/fd").expect("there").count();
        let before = descriptors();
        assert_eq!(features(), features());
        // Other tests of this process may have opened something meanwhile: looked at until it is as before.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while descriptors() > before {
            assert!(std::time::Instant::now() < until, "something stayed open");
        }
    }
}
