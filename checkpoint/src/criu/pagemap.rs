//! Finds the populated pages of a process by the ioctl PAGEMAP_SCAN (since Linux 6.7), which
//! handles a whole range of memory in one call.
#![allow(unsafe_code)] // The call has no safe interface.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Arguments and result of the ioctl: `struct pm_scan_arg` of linux/fs.h.
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
    inverted_categories: u64,
    required_categories: u64,
    alternative_categories: u64,
    returned_categories: u64,
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

/// Returns the ranges of populated pages of a process between two addresses, as (start, end).
/// `pagemap` is the open file `/proc/PID/pagemap` of the process.
///
/// # Errors
/// The process has exited, or the kernel does not support the ioctl (ENOTTY).
pub(super) fn scan_pages(
    pagemap: &File,
    (start, end): (u64, u64),
    filter: PageFilter,
) -> io::Result<Vec<(u64, u64)>> {
    let alternative_categories = if filter == PageFilter::All {
        PAGE_IS_PRESENT | PAGE_IS_SWAPPED
    } else {
        PAGE_IS_PRESENT
    };
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut scan_start = start;
    while scan_start < end {
        let mut region_buffer = [PageRegion::default(); REGIONS_MAX];
        let mut scan = PagemapScanArgs {
            size: size_of::<PagemapScanArgs>() as u64,
            start: scan_start,
            end,
            regions_address: region_buffer.as_mut_ptr() as u64,
            regions_max: REGIONS_MAX as u64,
            inverted_categories: PAGE_IS_PFNZERO,
            required_categories: PAGE_IS_PFNZERO,
            alternative_categories,
            // No categories are returned, so adjacent pages form one region whether they are
            // swapped out or not.
            returned_categories: PAGE_IS_PFNZERO,
            ..PagemapScanArgs::default()
        };
        // SAFETY: the kernel reads and writes `scan`, whose size it receives in `size`, and writes
        // at most `regions_max` regions at `regions_address`. Both live until the call returns.
        let region_count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        let region_count = usize::try_from(region_count).map_err(|_| io::Error::last_os_error())?;
        for region in region_buffer.iter().take(region_count) {
            match ranges.last_mut() {
                Some(last_range) if last_range.1 == region.start => last_range.1 = region.end,
                _ => ranges.push((region.start, region.end)),
            }
        }
        if scan.walk_end <= scan_start {
            break;
        }
        scan_start = scan.walk_end;
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pages::page_size;

    /// Exactly the written pages are found, in as few ranges as possible.
    #[test]
    fn only_written_pages_are_found() {
        let (page_bytes, page_count) = (page_size() as usize, 3000);
        let memory = map_untouched_memory(page_bytes * page_count);
        let start = memory.as_ptr() as u64;
        for index in (0..page_count).filter(|index| index % 2 == 0 || *index > 2900) {
            memory[index * page_bytes] = 1;
        }
        // This page was only read, so it is the shared page of zeros.
        assert_eq!(std::hint::black_box(&*memory)[page_bytes], 0);
        let pagemap = File::open("/proc/self/pagemap").expect("everybody may read his own");
        let range = (start, start + (page_bytes * page_count) as u64);
        let ranges = scan_pages(&pagemap, range, PageFilter::InMemory).expect("Linux 6.7");
        assert_eq!(
            ranges,
            scan_pages(&pagemap, range, PageFilter::All).expect("Linux 6.7"),
            "nothing is swapped out"
        );
        assert_eq!(
            ranges
                .iter()
                .map(|(range_start, range_end)| (range_end - range_start) / page_bytes as u64)
                .sum::<u64>(),
            1500 + 50
        );
        assert!(
            ranges.iter().all(
                |(range_start, _)| ((range_start - start) / page_bytes as u64).is_multiple_of(2)
            ),
            "{ranges:?}"
        );
        assert_eq!(ranges.len(), 1451);
    }

    /// Maps memory whose pages are not populated yet, without huge pages.
    fn map_untouched_memory(bytes: usize) -> &'static mut [u8] {
        // SAFETY: the memory is newly mapped with this length, has no other reference, and is never
        // unmapped.
        unsafe {
            let (protection, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let memory = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            libc::madvise(memory, bytes, libc::MADV_NOHUGEPAGE);
            std::slice::from_raw_parts_mut(memory.cast(), bytes)
        }
    }
}
