//! Which pages of a process are there: one call of the kernel (PAGEMAP_SCAN, since Linux 6.7) for a whole stretch of memory.
#![allow(unsafe_code)] // The call has no safe interface.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What is wanted, and how far it went; `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Debug, Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    found: u64,
    found_max: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    told: u64,
}

/// Pages that are alike and follow each other; `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The call: it reads and writes a structure of this size, and is number 16 of the calls 'f'.
const SCAN: libc::c_ulong =
    3 << 30 | (size_of::<Scan>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 16;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
/// The page of zeros that all processes have in common, where memory was read and never written.
const ZERO: u64 = 1 << 5;
/// Regions that are told at once.
const REGIONS: usize = 512;

/// Which pages are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All that the process has written.
    All,
    /// But for those that are swapped out.
    InMemory,
}

/// Where pages of this process lie between two addresses: from, to.
///
/// # Errors
/// The process is gone, or the kernel does not know the call (ENOTTY).
pub(super) fn present(
    map: &File,
    (start, end): (u64, u64),
    wanted: Wanted,
) -> io::Result<Vec<(u64, u64)>> {
    let any_of = if wanted == Wanted::All {
        PRESENT | SWAPPED
    } else {
        PRESENT
    };
    let mut all: Vec<(u64, u64)> = Vec::new();
    let mut at = start;
    while at < end {
        let mut found = [Region::default(); REGIONS];
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: at,
            end,
            found: found.as_mut_ptr() as u64,
            found_max: REGIONS as u64,
            inverted: ZERO,
            all_of: ZERO,
            any_of,
            // Of no page that is found: so neighbours are one region whether they are swapped or not.
            told: ZERO,
            ..Scan::default()
        };
        // SAFETY: the kernel reads and writes `scan`, whose size it is told, and writes no more than `found_max` regions
        // behind `found`; both live until the call is over.
        let regions = unsafe { libc::ioctl(map.as_raw_fd(), SCAN, &raw mut scan) };
        let regions = usize::try_from(regions).map_err(|_| io::Error::last_os_error())?;
        for region in found.iter().take(regions) {
            match all.last_mut() {
                Some(last) if last.1 == region.start => last.1 = region.end,
                _ => all.push((region.start, region.end)),
            }
        }
        if scan.walk_end <= at {
            break;
        }
        at = scan.walk_end;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pages::page_size;

    #[test]
    fn pages_that_were_written_are_found_and_no_others() {
        let (page, pages) = (page_size() as usize, 3000);
        let memory = fresh(page * pages);
        let start = memory.as_ptr() as u64;
        for number in (0..pages).filter(|number| number % 2 == 0 || *number > 2900) {
            memory[number * page] = 1;
        }
        // Read, and so the page of zeros.
        assert_eq!(std::hint::black_box(&*memory)[page], 0);
        let own = File::open("/proc/self/pagemap").expect("everybody may read his own");
        let all = (start, start + (page * pages) as u64);
        let found = present(&own, all, Wanted::InMemory).expect("Linux 6.7");
        assert_eq!(
            found,
            present(&own, all, Wanted::All).expect("Linux 6.7"),
            "nothing is swapped out"
        );
        assert_eq!(
            found
                .iter()
                .map(|(from, to)| (to - from) / page as u64)
                .sum::<u64>(),
            1500 + 50
        );
        assert!(
            found
                .iter()
                .all(|(from, _)| ((from - start) / page as u64).is_multiple_of(2)),
            "{found:?}"
        );
        assert_eq!(found.len(), 1451);
    }

    /// Memory of small pages that nobody has touched.
    fn fresh(bytes: usize) -> &'static mut [u8] {
        // SAFETY: fresh memory of this length that nobody else knows, for as long as the process lives.
        unsafe {
            let (read_write, own) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let memory = libc::mmap(std::ptr::null_mut(), bytes, read_write, own, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            libc::madvise(memory, bytes, libc::MADV_NOHUGEPAGE);
            std::slice::from_raw_parts_mut(memory.cast(), bytes)
        }
    }
}
