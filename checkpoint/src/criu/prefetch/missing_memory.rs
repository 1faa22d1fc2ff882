//! The missing memory of a restored task, and the progress of CRIU's background transfer through
//! it.

use super::super::images::{PAGEMAP_PREFIX, PageRun, read_entries};
use crate::engine::pages::page_size;
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of page-fault requests that are recorded for each process until the background
/// transfer has reached their pages.
const FAULT_REQUESTS_MAX: usize = 65_536;

/// The missing memory of all processes of a task. For each process, by its PID in the images: the
/// end address of each missing range, by start address.
#[derive(Debug, Default)]
pub(super) struct MissingMemory(pub(super) BTreeMap<u64, BTreeMap<u64, u64>>);

impl MissingMemory {
    /// Reads the missing memory from the images in this directory.
    ///
    /// # Errors
    /// An image is damaged or cannot be read.
    pub(super) fn read_from_images(dir: &Path) -> Result<Self, Failure> {
        let read_failure = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
        let mut missing_memory = Self::default();
        for entry in std::fs::read_dir(dir).map_err(read_failure)? {
            let name = entry.map_err(read_failure)?.file_name();
            let name = name.to_string_lossy();
            let pid_text = name
                .strip_prefix(PAGEMAP_PREFIX)
                .and_then(|rest| rest.strip_suffix(".img"));
            // The pagemaps of shared memory, which is never lazy, have other names.
            let Some(namespace_pid) = pid_text.and_then(|pid_text| pid_text.parse().ok()) else {
                continue;
            };
            let runs = read_entries(dir, &name)?
                .into_iter()
                .skip(1)
                .map(|entry| PageRun::decode(&entry));
            let missing_runs = runs.filter(|runs| runs.is_lazy && runs.page_count > 0);
            let to_range = |runs: PageRun| {
                (
                    runs.address,
                    runs.address
                        .saturating_add(runs.page_count.saturating_mul(page_size())),
                )
            };
            let page_ranges: BTreeMap<u64, u64> = missing_runs.map(to_range).collect();
            if !page_ranges.is_empty() {
                missing_memory.0.insert(namespace_pid, page_ranges);
            }
        }
        Ok(missing_memory)
    }

    pub(super) fn into_processes(self) -> BTreeMap<u64, ProcessProgress> {
        let progress = |ranges: BTreeMap<u64, u64>| ProcessProgress {
            next_background_address: ranges.keys().next().copied(),
            missing_ranges: ranges,
            has_background_started: false,
            fault_requests: BTreeMap::new(),
        };
        self.0
            .into_iter()
            .map(|(namespace_pid, ranges)| (namespace_pid, progress(ranges)))
            .collect()
    }
}

/// The missing memory of one process, and the progress of CRIU's requests for it.
#[derive(Debug)]
pub(super) struct ProcessProgress {
    missing_ranges: BTreeMap<u64, u64>,
    /// Address of the first missing page that CRIU has not requested; `None` if CRIU has requested
    /// all pages. The background transfer proceeds from low to high addresses.
    next_background_address: Option<u64>,
    /// True after CRIU's first request of the background transfer.
    has_background_started: bool,
    /// Page-fault requests that the background transfer has not reached yet: the end address of
    /// each, by start address.
    fault_requests: BTreeMap<u64, u64>,
}

impl ProcessProgress {
    /// Returns the range of missing memory (start, end) that contains this address; `None` if the
    /// address is not missing.
    pub(super) fn missing_range_at(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &end) = self.missing_ranges.range(..=address).next_back()?;
        (address < end).then_some((start, end))
    }

    /// True if all of this range is missing.
    pub(super) fn is_missing(&self, mut address: u64, end: u64) -> bool {
        while address < end {
            match self.missing_range_at(address) {
                Some((_, range_end)) => address = range_end,
                None => return false,
            }
        }
        true
    }

    /// Returns the lowest missing address that is at least `address`; `None` if no such address is
    /// missing.
    pub(super) fn next_missing(&self, address: u64) -> Option<u64> {
        match self.missing_range_at(address) {
            Some(_) => Some(address),
            None => self
                .missing_ranges
                .range(address..)
                .next()
                .map(|(start, _)| *start),
        }
    }

    /// Records a request of CRIU. Returns true if the request belongs to the background transfer:
    /// it begins at the expected page, or is longer than the single page of a page fault. The
    /// background transfer then continues at the first missing page from `end` on that no recorded
    /// page fault has requested.
    pub(super) fn record_request(&mut self, address: u64, end: u64, page_size: u64) -> bool {
        if self.next_background_address != Some(address) && end - address <= page_size {
            if self.fault_requests.len() < FAULT_REQUESTS_MAX {
                self.fault_requests.insert(address, end);
            }
            return false;
        }
        self.has_background_started = true;
        let mut next_address = self.next_missing(end);
        while let Some(end) =
            next_address.and_then(|next_address| self.fault_requests.remove(&next_address))
        {
            next_address = self.next_missing(end);
        }
        if let Some(next_address) = next_address {
            self.fault_requests = self.fault_requests.split_off(&next_address);
        }
        self.next_background_address = next_address;
        true
    }

    /// Returns the address where the background transfer continues; `None` if the transfer has not
    /// started, or if CRIU has requested all pages.
    pub(super) fn background_position(&self) -> Option<u64> {
        self.next_background_address
            .filter(|_| self.has_background_started)
    }
}
