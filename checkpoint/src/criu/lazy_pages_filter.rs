//! Hides from CRIU the memory that is transferred after the dump (post-copy).
//!
//! CRIU's own lazy dump lets the stopped task splice its pages into pipes, which takes longer the
//! more memory the task has. This module avoids the splicing:
//!
//! 1. Before the dump it chooses the hidden areas: all private anonymous memory, which CRIU itself
//!    would treat as lazy. The hidden areas are always whole mappings, because CRIU requests a
//!    whole mapping if any page of the mapping is lazy. A mapping with a page that cannot be read
//!    is not hidden: what follows must be known to be readable while the source can still go on.
//! 2. During the dump a library in CRIU ([`super::ptrace_relay`]) removes these areas from the
//!    results of PAGEMAP_SCAN, so CRIU finds no pages in them.
//! 3. After the dump the hidden pages are added to the images as lazy (PE_LAZY).
//!
//! The pages are served by [`super::page_server`].

use super::images::{add_lazy_pages, read_pagemap};
use super::pagemap::{PageFilter, PopulatedPages, pages_outside_swap_areas, scan_pages};
use super::process_memory::unreadable_pages;
use crate::engine::pages::page_size;
use crate::proc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Names of mappings of ordinary memory, and the prefix of a name that the process has given. All
/// other mappings with a name are those of the kernel, such as `[vdso]` and `[uprobes]`.
const MEMORY_MAPPINGS: [&str; 3] = ["", "[heap]", "[stack]"];
const NAMED_MEMORY_PREFIX: &str = "[anon:";
/// `VmFlags` of mappings that CRIU never treats as lazy: locked memory, and reserved huge pages.
const NEVER_LAZY_FLAGS: [&str; 2] = ["lo", "ht"];

/// The hidden memory of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessLazyPages {
    /// PID in the tasker's PID namespace.
    pub(super) pid: i32,
    /// PID in the task's PID namespace, as in the images.
    pub(super) namespace_pid: u64,
    /// The areas that are hidden from CRIU, as (start, end).
    areas: Vec<(u64, u64)>,
    /// The ranges of populated pages in the hidden areas, as (start, end).
    pub(super) page_ranges: Vec<(u64, u64)>,
    /// Pages that cannot be read. Their mappings are not hidden.
    unreadable_pages: Vec<u64>,
}

/// The hidden memory of all processes of a task. The processes must remain stopped.
#[derive(Clone, Debug, Default)]
pub(super) struct LazyPages {
    pub(super) processes: Vec<ProcessLazyPages>,
}

/// Checks that the kernel supports PAGEMAP_SCAN.
///
/// # Errors
/// The error of the system call.
pub(super) fn check_pagemap_scan() -> io::Result<()> {
    let pagemap = File::open("/proc/self/pagemap")?;
    let range = (page_size(), 2 * page_size());
    scan_pages(&pagemap, range, PageFilter::All).map(drop)
}

impl LazyPages {
    /// Chooses the hidden memory of these processes, which must be stopped.
    ///
    /// # Errors
    /// A process has exited, or the kernel does not support PAGEMAP_SCAN.
    pub(super) fn choose(processes: &[i32]) -> io::Result<Self> {
        let process_pages = processes
            .iter()
            .map(|pid| ProcessLazyPages::choose(*pid))
            .filter(|process_pages| !matches!(process_pages, Ok(None)));
        Ok(Self {
            processes: process_pages
                .filter_map(Result::transpose)
                .collect::<io::Result<_>>()?,
        })
    }

    /// Creates the memory file for [`write_filter_file`](Self::write_filter_file). While the file
    /// is empty, the library in CRIU hides nothing.
    ///
    /// # Errors
    /// No file descriptor or memory is available.
    pub(super) fn create_filter_file() -> io::Result<OwnedFd> {
        Ok(memfd_create(c"sempa-withheld", MFdFlags::MFD_CLOEXEC)?)
    }

    /// Writes the hidden areas to the empty file `filter_file` for the library in CRIU, as triples
    /// of PID, start and end, sorted. The PIDs are those in the task's namespace if `is_inside` is
    /// true, which means that CRIU runs inside it.
    ///
    /// # Errors
    /// No memory is available.
    pub(super) fn write_filter_file(
        &self,
        filter_file: &OwnedFd,
        is_inside: bool,
    ) -> io::Result<()> {
        let process_entries = |process: &ProcessLazyPages| -> Vec<[u64; 3]> {
            let pid = match is_inside {
                true => process.namespace_pid,
                false => process.pid.cast_unsigned().into(),
            };
            process
                .areas
                .iter()
                .map(|(start, end)| [pid, *start, *end])
                .collect()
        };
        let bytes = self
            .processes
            .iter()
            .flat_map(process_entries)
            .flatten()
            .flat_map(u64::to_ne_bytes)
            .collect::<Vec<u8>>();
        File::from(filter_file.try_clone()?).write_all(&bytes)
    }

    /// Adds the hidden pages to the images in this directory as lazy pages.
    ///
    /// # Errors
    /// An image is damaged, or CRIU has dumped hidden memory.
    pub(super) fn add_to_images(&self, dir: &Path) -> Result<(), Failure> {
        for process in &self.processes {
            for run in read_pagemap(dir, process.namespace_pid)? {
                let end = run
                    .address
                    .saturating_add(run.page_count.saturating_mul(page_size()));
                if process
                    .areas
                    .iter()
                    .any(|(range_start, range_end)| run.address < *range_end && end > *range_start)
                {
                    return Err(Failure::Engine(
                        "the engine dumped memory that was reserved for post-copy".into(),
                    ));
                }
            }
            add_lazy_pages(dir, process.namespace_pid, &process.page_ranges)?;
        }
        Ok(())
    }

    /// Adds to the failure of a dump that the task has memory which cannot be read, if so.
    pub(super) fn explain_failure(&self, failure: Failure) -> Failure {
        let first_unreadable = self.processes.iter().find_map(|process| {
            let page = process.unreadable_pages.first()?;
            Some((process.namespace_pid, page, process.unreadable_pages.len()))
        });
        match (failure, first_unreadable) {
            (Failure::Engine(reason), Some((namespace_pid, page, count))) => {
                Failure::Engine(format!(
                    "{reason}; {count} pages of its process {namespace_pid} cannot be read, the first at \
                 {page:#x}: they are guard pages that this kernel does not report, or damaged memory"
                ))
            }
            (failure, _) => failure,
        }
    }

    /// True if this page is hidden memory of the process whose PID in the images is
    /// `namespace_pid`.
    pub(super) fn contains(&self, namespace_pid: u64, address: u64) -> bool {
        self.range_at(namespace_pid, address).is_some()
    }

    /// Returns the PID, in the tasker's PID namespace, of the process to which this hidden page
    /// belongs, and the end address of the range of hidden pages. `None` if the page is not hidden.
    pub(super) fn range_at(&self, namespace_pid: u64, address: u64) -> Option<(i32, u64)> {
        let process = self
            .processes
            .iter()
            .find(|process| process.namespace_pid == namespace_pid)?;
        let next_index = process
            .page_ranges
            .partition_point(|(start, _)| *start <= address);
        let (_, end) = process.page_ranges.get(next_index.checked_sub(1)?)?;
        (address < *end).then_some((process.pid, *end))
    }
}

impl ProcessLazyPages {
    /// Chooses the hidden memory of one process; `None` if the process has no memory to hide.
    fn choose(pid: i32) -> io::Result<Option<Self>> {
        let namespace_pid = namespace_pid(pid).ok_or_else(process_exited_error)?;
        let areas = lazy_areas(pid)?;
        // A zombie has no memory; its `pagemap` cannot be read.
        if areas.is_empty() {
            return Ok(None);
        }
        let mut process_pages = Self {
            pid,
            namespace_pid,
            areas,
            page_ranges: Vec::new(),
            unreadable_pages: Vec::new(),
        };
        let pages = populated_pages(pid, &process_pages.areas, PageFilter::All)?;
        process_pages.unreadable_pages = find_unreadable_pages(pid, &process_pages.areas, &pages)?;
        process_pages.page_ranges = pages.ranges;
        process_pages.remove_unreadable_areas();
        Ok(Some(process_pages))
    }

    /// Removes the areas that contain pages that cannot be read, so that the engine dumps them.
    fn remove_unreadable_areas(&mut self) {
        for page in &self.unreadable_pages {
            let Some(index) = self.areas.iter().position(|area| contains(area, *page)) else {
                continue;
            };
            let area = self.areas.remove(index);
            self.page_ranges
                .retain(|(start, _)| !contains(&area, *start));
        }
    }
}

fn contains((start, end): &(u64, u64), address: u64) -> bool {
    (*start..*end).contains(&address)
}

/// Returns those of the populated pages `pages` of a process that cannot be read. `areas` are the
/// mappings that contain the pages.
///
/// Reads the first page of each mapping, and each page that may be neither in memory nor in a swap
/// area. The kernel can read all other pages: it has just reported them as memory or swapped-out
/// memory of a mapping that can be read. To read all would take as long as to send them.
fn find_unreadable_pages(
    pid: i32,
    areas: &[(u64, u64)],
    pages: &PopulatedPages,
) -> io::Result<Vec<u64>> {
    let first_page = |area: &(u64, u64)| {
        let index = pages.ranges.partition_point(|(start, _)| *start < area.0);
        let (start, _) = pages.ranges.get(index)?;
        contains(area, *start).then_some(*start)
    };
    let mut probed_pages: Vec<u64> = areas.iter().filter_map(first_page).collect();
    if !pages.swapped_ranges.is_empty() {
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        probed_pages.extend(pages_outside_swap_areas(&pagemap, &pages.swapped_ranges)?);
    }
    unreadable_pages(pid, &probed_pages)
}

fn process_exited_error() -> io::Error {
    io::Error::from(io::ErrorKind::NotFound)
}

/// Returns the PID of a process in its innermost PID namespace. `None` if the process has exited.
pub(super) fn namespace_pid(pid: i32) -> Option<u64> {
    u64::try_from(proc::innermost_pid(pid)?).ok()
}

/// Returns the areas of a process's memory that can be transferred after the dump, as (start, end).
///
/// # Errors
/// The process has exited, or its mappings cannot be read.
pub(super) fn lazy_areas(pid: i32) -> io::Result<Vec<(u64, u64)>> {
    let status = proc::status(pid).ok_or_else(process_exited_error)?;
    let is_nonzero = |kib: Option<u64>| kib.is_some_and(|kib| kib > 0);
    // To produce `smaps` the kernel visits every page. Therefore `smaps` is read only if the
    // process may have locked memory or huge pages.
    let file_name = if is_nonzero(status.vmlck) || is_nonzero(status.hugetlbpages) {
        "smaps"
    } else {
        "maps"
    };
    Ok(parse_lazy_areas(&proc::mappings(pid, file_name)?))
}

/// Returns the populated pages in these areas.
///
/// # Errors
/// As for [`lazy_areas`].
pub(super) fn populated_pages(
    pid: i32,
    areas: &[(u64, u64)],
    filter: PageFilter,
) -> io::Result<PopulatedPages> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut pages = PopulatedPages::default();
    for area in areas {
        // Ranges of adjacent areas stay apart.
        let area_pages = scan_pages(&pagemap, *area, filter)?;
        pages.ranges.extend(area_pages.ranges);
        pages.swapped_ranges.extend(area_pages.swapped_ranges);
    }
    Ok(pages)
}

/// Parses `/proc/PID/maps` or `smaps` and returns the private anonymous areas that can be lazy.
fn parse_lazy_areas(maps: &str) -> Vec<(u64, u64)> {
    let mut areas = Vec::new();
    let mut is_last_lazy = false;
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if is_last_lazy
                && flags
                    .split_whitespace()
                    .any(|flag| NEVER_LAZY_FLAGS.contains(&flag))
            {
                areas.pop();
            }
        } else if let Some((start, end, rest)) = parse_mapping(line) {
            is_last_lazy = is_private_anonymous(rest);
            if is_last_lazy {
                areas.push((start, end));
            }
        }
    }
    areas
}

/// Parses the first line of a mapping into start address, end address, and the rest of the line.
fn parse_mapping(line: &str) -> Option<(u64, u64, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let parse_hex = |hex| u64::from_str_radix(hex, 16).ok();
    Some((parse_hex(start)?, parse_hex(end)?, rest))
}

/// True for private anonymous memory. `rest` is the part of the line in `maps` after the addresses.
fn is_private_anonymous(rest: &str) -> bool {
    // `rest` has the fields: permissions, offset, device, inode, name.
    let mut fields = rest.split_whitespace();
    let (perms, inode) = (fields.next().unwrap_or_default(), fields.nth(2));
    let name = fields.next().unwrap_or_default();
    let is_memory = MEMORY_MAPPINGS.contains(&name) || name.starts_with(NAMED_MEMORY_PREFIX);
    perms.ends_with('p') && inode == Some("0") && is_memory
}

#[cfg(test)]
mod tests {
    use super::super::pagemap::tests::forget_guard_category;
    use super::*;

    const MAPS: &str = "\
5566f000-5567f000 r-xp 00000000 fe:01 1234                       /usr/bin/a program
56000000-56100000 rw-p 00000000 00:00 0                          [heap]
7f000000-7f100000 rw-s 00000000 00:1a 77                         /data/shared table
7f200000-7f300000 rw-p 00000000 00:00 0 \n\
7f300000-7f400000 r--p 00000000 00:00 0                          [anon:a name]
7f400000-7f410000 rw-p 00000000 00:00 0 \n\
7f500000-7f600000 ---p 00000000 00:00 0 \n\
7f600000-7f700000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
7f800000-7f900000 rw-p 00001000 fe:01 1234                       /usr/lib/a
7f900000-7f901000 --xp 00000000 00:00 0                          [uprobes]
7fff0000-7fff8000 rw-p 00000000 00:00 0                          [stack]
7fffa000-7fffc000 r--p 00000000 00:00 0                          [vvar]
7fffc000-7fffe000 r-xp 00000000 00:00 0                          [vdso]
";

    /// Only private memory without a file is hidden; kernel mappings are not.
    #[test]
    fn private_anonymous_memory_is_hidden() {
        let starts: Vec<u64> = parse_lazy_areas(MAPS)
            .iter()
            .map(|(start, _)| *start)
            .collect();
        assert_eq!(
            starts,
            [
                0x5600_0000,
                0x7f20_0000,
                0x7f30_0000,
                0x7f40_0000,
                0x7f50_0000,
                0x7fff_0000
            ]
        );
    }

    /// Locked memory and reserved huge pages are not hidden.
    #[test]
    fn locked_and_huge_memory_is_dumped() {
        let smaps = "\
7f200000-7f300000 rw-p 00000000 00:00 0 \nSize: 1024 kB\nVmFlags: rd wr mr mw me lo ac\n\
7f300000-7f400000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac\n\
7f400000-7f410000 rw-p 00000000 00:00 0 \nVmFlags: rd wr lo\n\
7f500000-7f600000 rw-p 00000000 00:00 0 \nVmFlags: rd ht\n";
        assert_eq!(parse_lazy_areas(smaps), [(0x7f30_0000, 0x7f40_0000)]);
    }

    /// A range of hidden pages is found by any address in it, and by no other address.
    #[test]
    fn ranges_are_found_by_any_address() {
        let process = ProcessLazyPages {
            pid: 77,
            namespace_pid: 2,
            areas: vec![(0x1000, 0x9000)],
            page_ranges: vec![(0x1000, 0x3000), (0x5000, 0x6000)],
            unreadable_pages: Vec::new(),
        };
        let lazy_pages = LazyPages {
            processes: vec![process],
        };
        let ranges = [0xfff, 0x1000, 0x2fff, 0x3000, 0x5000, 0x6000]
            .map(|address| lazy_pages.range_at(2, address));
        assert_eq!(
            ranges,
            [
                None,
                Some((77, 0x3000)),
                Some((77, 0x3000)),
                None,
                Some((77, 0x6000)),
                None
            ]
        );
        assert!(!lazy_pages.contains(3, 0x1000));
    }

    /// Mappings with pages that cannot be read are not hidden, and a failed dump is explained by
    /// them.
    #[test]
    fn mapping_with_unreadable_page_is_dumped() {
        let mut process = ProcessLazyPages {
            pid: 77,
            namespace_pid: 2,
            areas: vec![(0x1000, 0x4000), (0x4000, 0x6000), (0x8000, 0x9000)],
            page_ranges: vec![
                (0x1000, 0x2000),
                (0x3000, 0x4000),
                (0x4000, 0x6000),
                (0x8000, 0x9000),
            ],
            unreadable_pages: vec![0x1000, 0x3000],
        };
        process.remove_unreadable_areas();
        assert_eq!(process.areas, [(0x4000, 0x6000), (0x8000, 0x9000)]);
        assert_eq!(process.page_ranges, [(0x4000, 0x6000), (0x8000, 0x9000)]);
        let mut lazy_pages = LazyPages {
            processes: vec![process],
        };
        let failure = || Failure::Engine("it stopped".into());
        let explained = lazy_pages.explain_failure(failure()).to_string();
        assert!(
            explained.contains("it stopped; 2 pages of its process 2")
                && explained.contains("0x1000"),
            "{explained}"
        );
        assert_eq!(
            lazy_pages.explain_failure(Failure::TaskEnded),
            Failure::TaskEnded
        );
        lazy_pages.processes[0].unreadable_pages.clear();
        assert_eq!(lazy_pages.explain_failure(failure()), failure());
    }

    /// A guard page that the kernel does not report is found by reading it.
    #[test]
    fn unreported_guard_page_is_not_hidden() {
        let Some(forgotten_category) = forget_guard_category() else {
            eprintln!("this kernel has no guard pages");
            return;
        };
        let process = ProcessLazyPages::choose(std::process::id() as i32);
        let process = process.expect("readable").expect("it has memory");
        let guard_page = forgotten_category.guard_page;
        // The C library may have made further ones, for the stacks of threads.
        assert!(process.unreadable_pages.contains(&guard_page));
        assert!(!process.areas.iter().any(|area| contains(area, guard_page)));
        assert!(!process.areas.is_empty() && !process.page_ranges.is_empty());
    }

    /// A buffer of the test process is found as memory that can be hidden.
    #[test]
    fn own_buffer_is_hidden_memory() {
        let buffer = vec![7_u8; 4 << 20];
        let lazy_pages = LazyPages::choose(&[std::process::id() as i32]).expect("it is there");
        let (start, end) = (
            buffer.as_ptr() as u64 & !(page_size() - 1),
            buffer.as_ptr() as u64 + (4 << 20) - 1,
        );
        let namespace_pid = lazy_pages.processes[0].namespace_pid;
        assert!(
            lazy_pages.contains(namespace_pid, start) && lazy_pages.contains(namespace_pid, end),
            "{lazy_pages:?}"
        );
    }
}
