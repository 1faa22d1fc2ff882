//! Checks the memory mappings of processes.

use super::files::FileTable;
use super::images::ImageDir;
use super::names::NumberedImage;
use super::processes::{ProcessTable, check_count};
use super::schema::{MM, PAGEMAP, PAGEMAP_HEAD};
use super::violation::ImageViolation;
use super::wire::Message;
use super::{FileAccess, RestorePolicy};
use crate::engine::pages::page_size;

/// Values of `status` in `vma_entry` that are permitted, from `criu/include/image.h`.
const STATUS_BITS: u64 = STATUS_REGULAR
    | STATUS_STACK
    | STATUS_VSYSCALL
    | STATUS_VDSO
    | STATUS_HEAP
    | STATUS_FILE_PRIVATE
    | STATUS_FILE_SHARED
    | STATUS_ANON_SHARED
    | STATUS_ANON_PRIVATE
    | STATUS_VVAR
    | STATUS_AIO_RING
    | STATUS_MEMFD
    | STATUS_SHADOW_STACK
    | STATUS_GUARD;
const STATUS_REGULAR: u64 = 1 << 0;
const STATUS_STACK: u64 = 1 << 1;
const STATUS_VSYSCALL: u64 = 1 << 2;
const STATUS_VDSO: u64 = 1 << 3;
const STATUS_HEAP: u64 = 1 << 5;
const STATUS_FILE_PRIVATE: u64 = 1 << 6;
const STATUS_FILE_SHARED: u64 = 1 << 7;
const STATUS_ANON_SHARED: u64 = 1 << 8;
const STATUS_ANON_PRIVATE: u64 = 1 << 9;
const STATUS_VVAR: u64 = 1 << 12;
const STATUS_AIO_RING: u64 = 1 << 13;
const STATUS_MEMFD: u64 = 1 << 14;
const STATUS_SHADOW_STACK: u64 = 1 << 15;
const STATUS_GUARD: u64 = 1 << 16;
/// Flags of `mmap` that are permitted: the type of sharing, and MAP_FIXED, MAP_ANONYMOUS,
/// MAP_GROWSDOWN, MAP_DENYWRITE, MAP_EXECUTABLE, MAP_LOCKED, MAP_NORESERVE, MAP_POPULATE,
/// MAP_NONBLOCK, MAP_STACK, MAP_HUGETLB with the size of a page.
const MAP_FLAGS: u64 = 0xf
    | 0x10
    | 0x20
    | 0x100
    | 0x800
    | 0x1000
    | MAP_LOCKED
    | 0x4000
    | 0x8000
    | 0x10000
    | 0x20000
    | 0x40000
    | 0xfc00_0000;
const MAP_LOCKED: u64 = 0x2000;
/// Permissions of memory: read, write, execute.
const PROTECTION_BITS: u64 = 0x7;
/// End of the addresses of programs: 47 bits on x86-64, 48 bits on other processors.
const ADDRESSES_END: u64 = if cfg!(target_arch = "x86_64") {
    1 << 47
} else {
    1 << 48
};
/// Flags of a pagemap entry that are permitted: lazy, present.
const PAGEMAP_FLAGS: u64 = 0x6;
/// Number of the limit for locked memory (`RLIMIT_MEMLOCK`).
const LOCKED_MEMORY_LIMIT: usize = 8;

/// Checks the memory of all processes.
pub(super) fn check(
    images: &ImageDir<'_>,
    policy: &RestorePolicy,
    processes: &ProcessTable,
    files: &mut FileTable,
) -> Result<(), ImageViolation> {
    let mut aio_requests = 0;
    for pid in processes.living.keys() {
        let memory = images.single_entry(&format!("mm-{pid}.img"), &MM)?;
        files.reference(
            memory.required("exe_file_id") as u32,
            Some(FileAccess::Execute),
        )?;
        if !(0..=2).contains(&memory.signed("dumpable").unwrap_or(0)) {
            return Err(memory_violation(
                *pid,
                "it is not valid whether it is dumped",
            ));
        }
        for ring in memory.messages("aios") {
            aio_requests += ring.required("nr_req");
        }
        if aio_requests > policy.limits.aio_requests_max {
            return Err(ImageViolation::TooMany {
                what: "requests of asynchronous input and output",
                limit: policy.limits.aio_requests_max,
            });
        }
        let ranges = check_mappings(&memory, policy, *pid, files)?;
        check_pagemap(images, *pid, &ranges)?;
    }
    for (kind, prefix) in [
        (NumberedImage::Memory, "mm-"),
        (NumberedImage::Pagemap, "pagemap-"),
    ] {
        let is_unknown = |number: &u64| {
            !u32::try_from(*number).is_ok_and(|pid| processes.living.contains_key(&pid))
        };
        if let Some(number) = images.numbers(kind).find(is_unknown) {
            return Err(ImageViolation::UnknownImage {
                name: format!("{prefix}{number}.img"),
            });
        }
    }
    for number in images.numbers(NumberedImage::SharedPagemap) {
        let name = format!("pagemap-shmem-{number}.img");
        images.visit_after_head(&name, &PAGEMAP_HEAD, &PAGEMAP, |run| {
            check_page_flags(run, &name)
        })?;
    }
    Ok(())
}

fn memory_violation(pid: u32, why: impl Into<String>) -> ImageViolation {
    ImageViolation::Memory {
        pid,
        why: why.into(),
    }
}

/// Checks all mappings of a process. Returns their address ranges, in ascending order.
fn check_mappings(
    memory: &Message,
    policy: &RestorePolicy,
    pid: u32,
    files: &mut FileTable,
) -> Result<Vec<(u64, u64)>, ImageViolation> {
    let mappings: Vec<&Message> = memory.messages("vmas").collect();
    check_count(
        "memory mappings",
        mappings.len(),
        policy.limits.mappings_max,
    )?;
    let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(mappings.len());
    let mut guard_ranges = Vec::new();
    let mut locked_bytes = 0u64;
    for mapping in mappings {
        let (start, end) = (mapping.required("start"), mapping.required("end"));
        let status = mapping.required("status");
        let is_aligned = start % page_size() == 0 && end % page_size() == 0;
        let is_guard = status & STATUS_GUARD != 0;
        let previous_end = match is_guard {
            true => 0,
            false => ranges.last().map_or(0, |(_, end)| *end),
        };
        let is_below_end = end <= ADDRESSES_END || status & STATUS_VSYSCALL != 0;
        if !is_aligned || start < previous_end || start >= end || !is_below_end {
            return Err(memory_violation(
                pid,
                format!("a mapping has the addresses {start:#x}-{end:#x}"),
            ));
        }
        match is_guard {
            true => guard_ranges.push((start, end)),
            false => ranges.push((start, end)),
        }
        if mapping.required("flags") & MAP_LOCKED != 0 {
            locked_bytes = locked_bytes.saturating_add(end - start);
        }
        check_mapping(mapping, status, pid, files)?;
    }
    // Guard pages (MADV_GUARD_INSTALL) are parts of mappings, and have entries of their own.
    let is_inside = |guard: &(u64, u64)| {
        let next = ranges.partition_point(|(start, _)| *start <= guard.0);
        next > 0 && guard.1 <= ranges[next - 1].1
    };
    if let Some((start, end)) = guard_ranges.iter().find(|guard| !is_inside(guard)) {
        return Err(memory_violation(
            pid,
            format!("the guard pages {start:#x}-{end:#x} are in no mapping"),
        ));
    }
    let allowed = policy.limits.resource_limits_max[LOCKED_MEMORY_LIMIT];
    match locked_bytes > allowed {
        true => Err(ImageViolation::ResourceLimit {
            pid,
            limit: "RLIMIT_MEMLOCK",
            found: locked_bytes,
            allowed,
        }),
        false => Ok(ranges),
    }
}

/// Checks the kind of one mapping, and records the file that it maps.
fn check_mapping(
    mapping: &Message,
    status: u64,
    pid: u32,
    files: &mut FileTable,
) -> Result<(), ImageViolation> {
    let flags = mapping.required("flags");
    let protection = mapping.required("prot");
    if status & !STATUS_BITS != 0 || flags & !MAP_FLAGS != 0 || protection & !PROTECTION_BITS != 0 {
        return Err(memory_violation(
            pid,
            format!(
                "a mapping has an unknown kind (status {status:#x}, flags {flags:#x}, protection {protection:#x})"
            ),
        ));
    }
    // CRIU opens the file with exactly these flags.
    let access = match mapping.number("fdflags") {
        Some(0) => FileAccess::Read,
        Some(1) => FileAccess::Write,
        Some(2) => FileAccess::ReadWrite,
        Some(flags) => {
            return Err(memory_violation(
                pid,
                format!("a mapping opens its file with the flags {flags:#o}"),
            ));
        }
        None if flags & libc::MAP_SHARED as u64 != 0
            && protection & libc::PROT_WRITE as u64 != 0 =>
        {
            FileAccess::ReadWrite
        }
        None => FileAccess::Read,
    };
    if status & (STATUS_FILE_PRIVATE | STATUS_FILE_SHARED) == 0 {
        return Ok(());
    }
    let id = u32::try_from(mapping.required("shmid"))
        .map_err(|_| memory_violation(pid, "a mapping names no file"))?;
    match files.is_memfd(id) {
        true => Ok(()),
        false => files.reference(id, Some(access)),
    }
}

/// Checks that the pages of a process are inside its mappings.
fn check_pagemap(
    images: &ImageDir<'_>,
    pid: u32,
    ranges: &[(u64, u64)],
) -> Result<(), ImageViolation> {
    let name = format!("pagemap-{pid}.img");
    images.visit_after_head(&name, &PAGEMAP_HEAD, &PAGEMAP, |run| {
        check_page_flags(run, &name)?;
        let start = run.required("vaddr");
        let page_count = run
            .number("nr_pages")
            .unwrap_or_else(|| run.required("compat_nr_pages"));
        let end = page_count
            .checked_mul(page_size())
            .and_then(|bytes| start.checked_add(bytes));
        match end.is_some_and(|end| covers(ranges, start, end)) {
            true => Ok(()),
            false => Err(memory_violation(
                pid,
                format!("{page_count} pages at {start:#x} are outside of its mappings"),
            )),
        }
    })
}

fn check_page_flags(run: &Message, image: &str) -> Result<(), ImageViolation> {
    match run.number("flags").unwrap_or(0) & !PAGEMAP_FLAGS {
        0 => Ok(()),
        flags => Err(ImageViolation::Damaged {
            image: image.into(),
            why: format!("its pages have the flags {flags:#x}"),
        }),
    }
}

/// True if the ascending ranges contain all addresses from `start` to `end`.
fn covers(ranges: &[(u64, u64)], start: u64, end: u64) -> bool {
    let first = ranges.partition_point(|(_, range_end)| *range_end <= start);
    let mut covered_end = start;
    for (range_start, range_end) in &ranges[first..] {
        if covered_end >= end || *range_start > covered_end {
            break;
        }
        covered_end = *range_end;
    }
    covered_end >= end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_runs_must_be_covered_completely() {
        let ranges = [(10, 20), (20, 30), (40, 50)];
        for (start, end, expected) in [
            (10, 30, true),
            (15, 25, true),
            (40, 50, true),
            (9, 12, false),
            (25, 41, false),
            (30, 40, false),
            (45, 51, false),
            (60, 61, false),
        ] {
            assert_eq!(covers(&ranges, start, end), expected, "{start}-{end}");
        }
    }
}
