//! The idle init of a PID namespace.
//!
//! The init is a copy of the tasker that unmaps the tasker's heap. Otherwise each init would retain
//! a snapshot of the heap while its task lives, and a host may have thousands of tasks.
#![allow(unsafe_code)] // What a new process does between system calls has no safe interface.

use crate::sys::{self, Child};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use std::ffi::CStr;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Maximum number of memory ranges that an init unmaps. All further ranges remain mapped.
const HEAP_RANGES_MAX: usize = 256;

/// Creates the idle init of a new PID namespace.
///
/// The init has no open descriptor except `control`. A byte on `control` orders the init to end
/// when the namespace is empty. The end of file orders it to end immediately, which kills all
/// processes in the namespace. The init is created in the control group `group`; if that is `None`,
/// in the tasker's own group.
///
/// # Errors
/// Those of `clone3`; `EPERM` if the tasker may not create namespaces.
pub(crate) fn start_init(
    control: BorrowedFd<'_>,
    group: Option<BorrowedFd<'_>>,
) -> io::Result<Child> {
    let (control, heap_ranges) = (control.as_raw_fd(), HeapRanges::of_this_process());
    // SAFETY: the new process immediately calls `run_init`, which never returns.
    match unsafe { sys::clone3(libc::CLONE_NEWPID, group, None) }? {
        Some(child) => Ok(child),
        // SAFETY: this is the new process.
        None => unsafe { run_init(control, &heap_ranges) },
    }
}

/// Creates the idle init of a new PID namespace and a new mount namespace, like [`start_init`].
/// Returns when the mounts are in place: those of the tasker, which later changes of the host's
/// mounts reach as well, and a `/proc` of the PID namespace.
///
/// # Errors
/// As for [`start_init`], or the kernel refuses a mount.
pub(crate) fn start_init_with_mounts(control: BorrowedFd<'_>) -> io::Result<Child> {
    let (mounted_reader, mounted_writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let (control, heap_ranges) = (control.as_raw_fd(), HeapRanges::of_this_process());
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS;
    // SAFETY: the new process immediately calls `run_init`, which never returns.
    let init = match unsafe { sys::clone3(flags, None, None) }? {
        Some(init) => init,
        // SAFETY: this is the new process. The system calls have constant or local arguments.
        None => unsafe {
            if !mount_proc() {
                libc::_exit(1);
            }
            libc::write(mounted_writer.as_raw_fd(), c"m".as_ptr().cast(), 1);
            run_init(control, &heap_ranges)
        },
    };
    drop(mounted_writer);
    let mut byte = [0];
    loop {
        match nix::unistd::read(&mounted_reader, &mut byte) {
            Ok(1) => return Ok(init),
            Err(Errno::EINTR) => {}
            _ => break,
        }
    }
    let _ = sys::wait_and_reap(init.pid)?;
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        "the kernel refuses to mount /proc in a new mount namespace",
    ))
}

/// Mounts the `/proc` of this process's PID namespace over the inherited one. Mounts of the host
/// still reach this namespace, but none of this namespace reaches the host. Returns false if the
/// kernel refuses.
///
/// # Safety
/// May be called only in a process that was created with a new mount namespace.
unsafe fn mount_proc() -> bool {
    const PROC: &CStr = c"proc";
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: all strings are constants, and no data is passed.
    unsafe {
        let (no_name, no_data) = (std::ptr::null(), std::ptr::null());
        let slave_flags = libc::MS_REC | libc::MS_SLAVE;
        libc::mount(no_name, c"/".as_ptr(), no_name, slave_flags, no_data) == 0
            && libc::mount(
                PROC.as_ptr(),
                c"/proc".as_ptr(),
                PROC.as_ptr(),
                flags,
                no_data,
            ) == 0
    }
}

/// Memory ranges, each with address and length in bytes, that a copy of this process does not need
/// if it makes only system calls. The list itself is not on the heap.
struct HeapRanges {
    ranges: [(usize, usize); HEAP_RANGES_MAX],
    range_count: usize,
}

impl HeapRanges {
    /// Lists the ranges of the calling process; the list is empty if /proc/self/maps cannot be
    /// read.
    fn of_this_process() -> Self {
        let mut heap_ranges = Self {
            ranges: [(0, 0); HEAP_RANGES_MAX],
            range_count: 0,
        };
        let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
            return heap_ranges;
        };
        // The stack and the C library's thread-local storage must stay mapped.
        //
        // SAFETY: the call takes no arguments and returns an address.
        let needed_addresses = [
            (&raw const heap_ranges).addr(),
            unsafe { libc::__errno_location() }.addr(),
        ];
        for range in parse_heap_ranges(&maps)
            .filter(|range| {
                !needed_addresses
                    .iter()
                    .any(|address| range.contains(address))
            })
            .take(HEAP_RANGES_MAX)
        {
            heap_ranges.ranges[heap_ranges.range_count] = (range.start, range.len());
            heap_ranges.range_count += 1;
        }
        heap_ranges
    }
}

/// Returns the ranges of private memory without a file: the heap, and stacks of threads. Ranges
/// that adjoin a mapped file are not returned, because they contain variables of the program or a
/// library (proc_pid_maps(5)).
fn parse_heap_ranges(maps: &str) -> impl Iterator<Item = Range<usize>> {
    let mut file_mapping_end = None;
    maps.lines().filter_map(move |line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let (rights, inode, name) = (fields.next()?, fields.nth(2)?, fields.next());
        if inode != "0" {
            file_mapping_end = Some(range.end);
        }
        let is_anonymous = name.is_none_or(|name| name.starts_with("[anon:"))
            && file_mapping_end != Some(range.start);
        (rights == "rw-p" && inode == "0" && (is_anonymous || name == Some("[heap]")))
            .then_some(range)
    })
}

/// Runs the idle init.
///
/// # Safety
/// May be called only in a process that was created by [`sys::clone3`]. Makes only
/// async-signal-safe calls; after the heap is unmapped, only calls whose code is already in use.
unsafe fn run_init(control: RawFd, heap_ranges: &HeapRanges) -> ! {
    const NAME: &CStr = c"pvm-init";
    /// Interval at which an init without children checks whether its namespace is empty.
    const EMPTY_POLL_INTERVAL: libc::timespec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    // SAFETY: plain system calls on values of this process; the buffer is a local byte. The
    // unmapped memory is unused: no other thread was copied, and no allocation is accessed
    // afterwards.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        // Orphans of the task become children of this process. Because SIGCHLD is ignored, the
        // kernel reaps them.
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::dup2(control, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        for (start, bytes) in &heap_ranges.ranges[..heap_ranges.range_count] {
            libc::munmap(std::ptr::with_exposed_provenance_mut(*start), *bytes);
        }
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
        let mut byte = 0u8;
        loop {
            match libc::read(0, (&raw mut byte).cast(), 1) {
                0 => libc::_exit(0),
                1 => break,
                _ if *libc::__errno_location() == libc::EINTR => {}
                _ => libc::_exit(1),
            }
        }
        loop {
            // Because SIGCHLD is ignored, waitpid returns only when no child is left.
            while libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) != -1
                || *libc::__errno_location() == libc::EINTR
            {}
            // Processes with another parent may remain, whose end cannot be awaited. -1 stands for
            // all processes in the namespace except this one.
            if libc::kill(-1, 0) == -1 && *libc::__errno_location() == libc::ESRCH {
                libc::_exit(0)
            }
            libc::nanosleep(&EMPTY_POLL_INTERVAL, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::proc;
    use procfs::process::Process;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    #[test]
    fn heap_is_private_memory_not_adjoining_a_file() {
        let maps = "\
            1000-2000 r--p 00000000 fe:01 77  /bin/a program\n\
            2000-3000 rw-p 00001000 fe:01 77  /bin/a program\n\
            3000-4000 rw-p 00000000 00:00 0 \n\
            5000-7000 rw-p 00000000 00:00 0   [heap]\n\
            8000-9000 rw-p 00000000 00:00 0 \n\
            9000-a000 ---p 00000000 00:00 0 \n\
            b000-c000 rw-s 00000000 00:01 12  /dev/zero (deleted)\n\
            d000-e000 rw-p 00000000 00:00 0   [anon: glibc: malloc arena]\n\
            e000-f000 rw-p 00000000 00:00 0   [stack]\n\
            nonsense\n";
        assert_eq!(
            parse_heap_ranges(maps).collect::<Vec<_>>(),
            [0x5000..0x7000, 0x8000..0x9000, 0xd000..0xe000]
        );
    }

    /// Waits until the process has unmapped the heap of the tasker. Returns the size of its
    /// anonymous memory in KiB.
    fn wait_for_init_anonymous_kib(pid: i32) -> u64 {
        let started_at = Instant::now();
        while proc::stat(pid).expect("it lives").comm != "pvm-init" {
            assert!(
                started_at.elapsed() < Duration::from_secs(30),
                "it does not become an init"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        let process = Process::new(pid).expect("it lives");
        let rollup = process.smaps_rollup().expect("it lives").memory_map_rollup;
        let bytes = rollup.0[0].extension.map["Anonymous"];
        bytes / 1024
    }

    /// An init retains none of the tasker's allocations. It ends when the control pipe delivers a
    /// byte or is closed.
    #[test]
    #[ignore = "system tier: needs root"]
    fn init_frees_tasker_memory_and_ends_on_order() {
        let large_allocation = vec![7u8; 64 << 20];
        let small_allocations: Vec<Vec<u8>> = (0..100_000).map(|_| vec![7; 100]).collect();
        for order in [None, Some(b'x')] {
            let (control_reader, mut control_writer) = io::pipe().expect("a pipe");
            let init = match start_init(control_reader.as_fd(), None) {
                Ok(init) => init,
                Err(error) => panic!("cannot run here: {error}"),
            };
            let init_anonymous_kib = wait_for_init_anonymous_kib(init.pid);
            assert!(init_anonymous_kib < 2048, "{init_anonymous_kib} KiB");
            if let Some(byte) = order {
                control_writer.write_all(&[byte]).expect("it reads");
            }
            drop((control_writer, control_reader));
            let status_and_usage = sys::wait_and_reap(init.pid).expect("a child");
            assert_eq!(status_and_usage.0, 0, "it ends by itself");
        }
        assert_eq!(
            (large_allocation[1 << 20], small_allocations[99_999][99]),
            (7, 7)
        );
    }
}
