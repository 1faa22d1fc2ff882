//! Finds the populated pages of a process by the ioctl PAGEMAP_SCAN (since Linux 6.7), which
//! handles a whole range of memory in one call.
#![allow(unsafe_code)] // The call has no safe interface.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Arguments and result of the call: `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Debug, Default)]
struct PagemapScanArgs {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions_address: u64,
    regions_max: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

/// Adjacent pages with the same categories: `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// The request code of the ioctl: `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 3 << 30
    | (size_of::<PagemapScanArgs>() as libc::c_ulong) << 16
    | (b'f' as libc::c_ulong) << 8
    | 16;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// Category of the shared page of zeros, which is mapped where memory was read but never written.
const PAGE_IS_PFNZERO: u64 = 1 << 5;
/// Maximum number of regions that one call returns.
const REGIONS_MAX: usize = 512;

/// Selects the pages that a scan returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageFilter {
    /// All pages that the process has written, including swapped-out ones.
    All,
    /// The written pages that are not swapped out.
    InMemory,
}

/// Returns the ranges of populated pages of a process between two addresses, as (start, end). `map`
/// is the process's `/proc/PID/pagemap`.
///
/// # Errors
/// The process has exited, or the kernel does not support the call (ENOTTY).
pub(super) fn scan_pages(
    map: &File,
    (start, end): (u64, u64),
    filter: PageFilter,
) -> io::Result<Vec<(u64, u64)>> {
    let any_of = if filter == PageFilter::All {
        PAGE_IS_PRESENT | PAGE_IS_SWAPPED
    } else {
        PAGE_IS_PRESENT
    };
    let mut all: Vec<(u64, u64)> = Vec::new();
    let mut at = start;
    while at < end {
        let mut found = [PageRegion::default(); REGIONS_MAX];
        let mut scan = PagemapScanArgs {
            size: size_of::<PagemapScanArgs>() as u64,
            start: at,
            end,
            regions_address: found.as_mut_ptr() as u64,
            regions_max: REGIONS_MAX as u64,
            inverted: PAGE_IS_PFNZERO,
            all_of: PAGE_IS_PFNZERO,
            any_of,
            // No categories are returned, so adjacent pages form one region whether they are
            // swapped out or not.
            returned: PAGE_IS_PFNZERO,
            ..PagemapScanArgs::default()
        };
        // SAFETY: the kernel reads and writes `scan`, whose size it receives in `size`, and writes
        // at most `regions_max` regions at `regions`. Both live until the call returns.
        let regions = unsafe { libc::ioctl(map.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
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

    /// Exactly the written pages are found, in as few ranges as possible.
    #[test]
    fn only_written_pages_are_found() {
        let (page, pages) = (page_size() as usize, 3000);
        let memory = map_untouched_memory(page * pages);
        let start = memory.as_ptr() as u64;
        for number in (0..pages).filter(|number| number % 2 == 0 || *number > 2900) {
            memory[number * page] = 1;
        }
        // This page was only read, so it is the shared page of zeros.
        assert_eq!(std::hint::black_box(&*memory)[page], 0);
        let own = File::open("/proc/self/pagemap").expect("everybody may read his own");
        let all = (start, start + (page * pages) as u64);
        let found = scan_pages(&own, all, PageFilter::InMemory).expect("Linux 6.7");
        assert_eq!(
            found,
            scan_pages(&own, all, PageFilter::All).expect("Linux 6.7"),
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

    /// Maps memory whose pages are not populated yet, without huge pages.
    fn map_untouched_memory(bytes: usize) -> &'static mut [u8] {
        // SAFETY: the memory is newly mapped with this length, has no other reference, and is never
        // unmapped.
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
