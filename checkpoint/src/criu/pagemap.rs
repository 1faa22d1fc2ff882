//! Finds the populated pages of a process by the ioctl PAGEMAP_SCAN (since Linux 6.7), which
//! handles a whole range of memory in one call.
#![allow(unsafe_code)] // The call has no safe interface.

use crate::engine::pages::page_size;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

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
/// Category of guard pages (MADV_GUARD_INSTALL, since Linux 6.13). They have no content and cannot
/// be read. The kernel has the category since Linux 6.15; before, guard pages are only in the
/// category of swapped-out pages.
const PAGE_IS_GUARD: u64 = 1 << 8;
/// Maximum number of regions that one call returns.
const REGIONS_MAX: usize = 512;

/// Size in bytes of a page's entry in `/proc/PID/pagemap`.
const ENTRY_BYTES: u64 = 8;
/// Maximum number of entries that are read at once.
const ENTRIES_MAX: u64 = 4096;
/// Bit of an entry whose page is swapped out.
const ENTRY_IS_SWAPPED: u64 = 1 << 62;
/// Mask of the swap type in the entry of a swapped-out page.
const SWAP_TYPE_MASK: u64 = 0x1f;
/// The kernel numbers swap areas from zero upwards, at most 32. It marks pages that it cannot read,
/// such as guard pages and damaged memory, with the highest numbers (nine at most in Linux 6.18). A
/// smaller number is certainly a swap area.
const CERTAIN_SWAP_TYPES: u64 = 16;

/// False if the kernel does not have [`PAGE_IS_GUARD`].
static HAS_GUARD_CATEGORY: AtomicBool = AtomicBool::new(true);

/// Populated pages of a process, as ranges (start, end).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PopulatedPages {
    pub(super) ranges: Vec<(u64, u64)>,
    /// The part of `ranges` that is not in memory: swapped out, or unreadable.
    pub(super) swapped_ranges: Vec<(u64, u64)>,
}

impl PopulatedPages {
    fn add(&mut self, region: &PageRegion) {
        extend_ranges(&mut self.ranges, region);
        if region.categories & PAGE_IS_SWAPPED != 0 {
            extend_ranges(&mut self.swapped_ranges, region);
        }
    }
}

fn extend_ranges(ranges: &mut Vec<(u64, u64)>, region: &PageRegion) {
    match ranges.last_mut() {
        Some(last_range) if last_range.1 == region.start => last_range.1 = region.end,
        _ => ranges.push((region.start, region.end)),
    }
}

/// Selects the pages that a scan returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageFilter {
    /// All pages that the process has written, including swapped-out ones.
    All,
    /// The written pages that are not swapped out.
    InMemory,
}

/// Checks that the kernel finds pages by the ioctl. Without it, each page is looked up on its own.
///
/// # Errors
/// The kernel does not support the ioctl.
pub fn check_page_scan() -> io::Result<()> {
    let pagemap = File::open("/proc/self/pagemap")?;
    scan_pages(&pagemap, (0, page_size()), PageFilter::All).map(drop)
}

/// Returns the populated pages of a process between two addresses, without guard pages if the
/// kernel can tell them. `pagemap` is the open file `/proc/PID/pagemap` of the process.
///
/// # Errors
/// The process has exited, or the kernel does not support the ioctl (ENOTTY).
pub(super) fn scan_pages(
    pagemap: &File,
    (start, end): (u64, u64),
    filter: PageFilter,
) -> io::Result<PopulatedPages> {
    let alternative_categories = if filter == PageFilter::All {
        PAGE_IS_PRESENT | PAGE_IS_SWAPPED
    } else {
        PAGE_IS_PRESENT
    };
    let mut pages = PopulatedPages::default();
    let mut scan_start = start;
    while scan_start < end {
        let mut region_buffer = [PageRegion::default(); REGIONS_MAX];
        let excluded_categories = if HAS_GUARD_CATEGORY.load(Ordering::Relaxed) {
            PAGE_IS_PFNZERO | PAGE_IS_GUARD
        } else {
            PAGE_IS_PFNZERO
        };
        let mut scan = PagemapScanArgs {
            size: size_of::<PagemapScanArgs>() as u64,
            start: scan_start,
            end,
            regions_address: region_buffer.as_mut_ptr() as u64,
            regions_max: REGIONS_MAX as u64,
            inverted_categories: excluded_categories,
            required_categories: excluded_categories,
            alternative_categories,
            // Adjacent pages form one region if both or neither are swapped out.
            returned_categories: PAGE_IS_SWAPPED,
            ..PagemapScanArgs::default()
        };
        // SAFETY: the kernel reads and writes `scan`, whose size it receives in `size`, and writes
        // at most `regions_max` regions at `regions_address`. Both live until the call returns.
        let region_count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        let Ok(region_count) = usize::try_from(region_count) else {
            let error = io::Error::last_os_error();
            // A kernel without the category refuses a request that contains it.
            if error.raw_os_error() == Some(libc::EINVAL)
                && excluded_categories & PAGE_IS_GUARD != 0
            {
                HAS_GUARD_CATEGORY.store(false, Ordering::Relaxed);
                continue;
            }
            return Err(error);
        };
        region_buffer
            .iter()
            .take(region_count)
            .for_each(|region| pages.add(region));
        if scan.walk_end <= scan_start {
            break;
        }
        scan_start = scan.walk_end;
    }
    Ok(pages)
}

/// Returns the addresses of those pages in `swapped_ranges` that may not be in a swap area: guard
/// pages on a kernel that cannot tell them, damaged memory, and pages that are being moved.
///
/// # Errors
/// The process has exited.
pub(super) fn pages_outside_swap_areas(
    pagemap: &File,
    swapped_ranges: &[(u64, u64)],
) -> io::Result<Vec<u64>> {
    let mut addresses = Vec::new();
    for (start, end) in swapped_ranges {
        let mut address = *start;
        while address < *end {
            let page_count = ((end - address) / page_size()).min(ENTRIES_MAX);
            let mut entries = vec![0; (page_count * ENTRY_BYTES) as usize];
            pagemap.read_exact_at(&mut entries, address / page_size() * ENTRY_BYTES)?;
            let (entries, _) = entries.as_chunks::<{ ENTRY_BYTES as usize }>();
            addresses.extend(
                entries
                    .iter()
                    .zip((address..).step_by(page_size() as usize))
                    .filter(|(entry, _)| is_outside_swap_areas(u64::from_ne_bytes(**entry)))
                    .map(|(_, page)| page),
            );
            address += page_count * page_size();
        }
    }
    Ok(addresses)
}

/// True if the page with this entry in `/proc/PID/pagemap` may not be in a swap area.
fn is_outside_swap_areas(entry: u64) -> bool {
    entry & ENTRY_IS_SWAPPED != 0 && entry & SWAP_TYPE_MASK >= CERTAIN_SWAP_TYPES
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Advice that turns pages into guard pages, since Linux 6.13.
    const MADV_GUARD_INSTALL: libc::c_int = 102;

    /// Lets scans of this process behave as on Linux 6.13, which does not report guard pages, until
    /// it is dropped.
    pub(in super::super) struct ForgottenGuardCategory {
        /// Address of a new guard page.
        pub(in super::super) guard_page: u64,
        had_category: bool,
    }

    impl Drop for ForgottenGuardCategory {
        fn drop(&mut self) {
            HAS_GUARD_CATEGORY.store(self.had_category, Ordering::Relaxed);
        }
    }

    /// Forgets that the kernel reports guard pages. Returns `None` if the kernel has none.
    pub(in super::super) fn forget_guard_category() -> Option<ForgottenGuardCategory> {
        let page_bytes = page_size() as usize;
        // Pages before and after the guard page make it a part of a larger mapping.
        let memory = map_untouched_memory(8 * page_bytes);
        memory
            .iter_mut()
            .step_by(page_bytes)
            .for_each(|byte| *byte = 1);
        let guard_page = memory.as_ptr() as u64 + 3 * page_size();
        install_guard_page(guard_page).then(|| ForgottenGuardCategory {
            guard_page,
            had_category: HAS_GUARD_CATEGORY.swap(false, Ordering::Relaxed),
        })
    }

    /// Makes a page of [`map_untouched_memory`] a guard page. Returns false if the kernel cannot.
    fn install_guard_page(address: u64) -> bool {
        let (address, length) = (address as *mut libc::c_void, page_size() as usize);
        // SAFETY: the page belongs to memory that is never unmapped, and no code accesses the page
        // any more.
        unsafe { libc::madvise(address, length, MADV_GUARD_INSTALL) == 0 }
    }

    /// Scans a range of the test process.
    fn scan_own_pages(range: (u64, u64), filter: PageFilter) -> PopulatedPages {
        let pagemap = File::open("/proc/self/pagemap").expect("everybody may read his own");
        scan_pages(&pagemap, range, filter).expect("Linux 6.7")
    }

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
        let range = (start, start + (page_bytes * page_count) as u64);
        let PopulatedPages {
            ranges,
            swapped_ranges,
        } = scan_own_pages(range, PageFilter::InMemory);
        assert_eq!(
            ranges,
            scan_own_pages(range, PageFilter::All).ranges,
            "nothing is swapped out"
        );
        assert_eq!(swapped_ranges, []);
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

    /// Guard pages are no populated pages. Where the kernel cannot tell them, they are outside of
    /// swap areas.
    #[test]
    fn guard_pages_are_omitted_or_suspicious() {
        let page_bytes = page_size() as usize;
        let memory = map_untouched_memory(8 * page_bytes);
        let start = memory.as_ptr() as u64;
        memory
            .iter_mut()
            .step_by(page_bytes)
            .for_each(|byte| *byte = 1);
        let guard_page = start + 3 * page_size();
        if !install_guard_page(guard_page) {
            eprintln!("this kernel has no guard pages");
            return;
        }
        let end = start + 8 * page_size();
        let pages = scan_own_pages((start, end), PageFilter::All);
        let pagemap = File::open("/proc/self/pagemap").expect("everybody may read his own");
        if HAS_GUARD_CATEGORY.load(Ordering::Relaxed) {
            let around = [(start, guard_page), (guard_page + page_size(), end)];
            assert_eq!(pages.ranges, around);
            assert_eq!(pages.swapped_ranges, []);
        } else {
            assert_eq!(
                pages.swapped_ranges,
                [(guard_page, guard_page + page_size())]
            );
        }
        // The type of the entry is only visible to root.
        if nix::unistd::geteuid().is_root() {
            let suspicious = pages_outside_swap_areas(&pagemap, &[(start, end)]);
            assert_eq!(suspicious.expect("readable"), [guard_page]);
        }
    }

    /// Pages in swap areas have low type numbers; present pages have none.
    #[test]
    fn high_types_are_outside_swap_areas() {
        let swapped_entry = |swap_type: u64| ENTRY_IS_SWAPPED | 77 << 5 | swap_type;
        assert!(
            ![0, 1, 15]
                .map(swapped_entry)
                .into_iter()
                .any(is_outside_swap_areas)
        );
        assert!(
            [16, 23, 31]
                .map(swapped_entry)
                .into_iter()
                .all(is_outside_swap_areas)
        );
        assert!(!is_outside_swap_areas(1 << 63 | 31), "a page frame number");
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
