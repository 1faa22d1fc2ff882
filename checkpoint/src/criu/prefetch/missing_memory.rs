//! The missing memory of a restored task, and the progress of CRIU's background transfer through
//! it.

use super::super::images::{PAGEMAP_PREFIX, PageRun, read_entries};
use crate::engine::pages::page_size;
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of page-fault requests that are remembered for each process until the background
/// transfer has reached them.
const FAULTS_MAX: usize = 65_536;

/// The missing memory of all processes of a task. For each process, by its PID in the images: the
/// end address of each missing range, by start address.
#[derive(Debug, Default)]
pub(super) struct MissingMemory(pub(super) BTreeMap<u64, BTreeMap<u64, u64>>);

impl MissingMemory {
    /// Reads the missing memory from the images in this directory.
    ///
    /// # Errors
    /// An image is damaged or cannot be read.
    pub(super) fn read_from_images(dir: &Path) -> Result<MissingMemory, Failure> {
        let unreadable = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
        let mut missing = MissingMemory::default();
        for entry in std::fs::read_dir(dir).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            let name = name.to_string_lossy();
            let number = name
                .strip_prefix(PAGEMAP_PREFIX)
                .and_then(|rest| rest.strip_suffix(".img"));
            // The pagemaps of shared memory, which is never lazy, have other names.
            let Some(process) = number.and_then(|number| number.parse().ok()) else {
                continue;
            };
            let pages = read_entries(dir, &name)?
                .into_iter()
                .skip(1)
                .map(|entry| PageRun::decode(&entry));
            let missing_pages = pages.filter(|pages| pages.lazy && pages.count > 0);
            let to_range = |pages: PageRun| {
                (
                    pages.address,
                    pages
                        .address
                        .saturating_add(pages.count.saturating_mul(page_size())),
                )
            };
            let page_ranges: BTreeMap<u64, u64> = missing_pages.map(to_range).collect();
            if !page_ranges.is_empty() {
                missing.0.insert(process, page_ranges);
            }
        }
        Ok(missing)
    }

    pub(super) fn into_processes(self) -> BTreeMap<u64, ProcessProgress> {
        let process = |ranges: BTreeMap<u64, u64>| ProcessProgress {
            next_background: ranges.keys().next().copied(),
            ranges,
            background_started: false,
            fault_requests: BTreeMap::new(),
        };
        self.0
            .into_iter()
            .map(|(number, ranges)| (number, process(ranges)))
            .collect()
    }
}

/// The missing memory of one process, and how far CRIU has requested it.
#[derive(Debug)]
pub(super) struct ProcessProgress {
    ranges: BTreeMap<u64, u64>,
    /// Address of the first missing page that CRIU has not requested. The background transfer
    /// proceeds from low to high addresses.
    next_background: Option<u64>,
    /// True when CRIU has sent a request of the background transfer.
    background_started: bool,
    /// Page-fault requests that the background transfer has not reached yet: the end address of
    /// each, by start address.
    fault_requests: BTreeMap<u64, u64>,
}

impl ProcessProgress {
    /// Returns the range of missing memory (start, end) that contains this address; `None` if the
    /// address is not missing.
    pub(super) fn missing_range_at(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &end) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some((start, end))
    }

    /// True if all of this range is missing.
    pub(super) fn is_missing(&self, mut address: u64, end: u64) -> bool {
        while address < end {
            match self.missing_range_at(address) {
                Some((_, until)) => address = until,
                None => return false,
            }
        }
        true
    }

    /// Returns the first missing address that is not below `address`.
    pub(super) fn next_missing(&self, address: u64) -> Option<u64> {
        match self.missing_range_at(address) {
            Some(_) => Some(address),
            None => self.ranges.range(address..).next().map(|(start, _)| *start),
        }
    }

    /// Records a request of CRIU. Returns true if the request belongs to the background transfer:
    /// it begins at the expected page, or is longer than the single page of a page fault. The
    /// background transfer then continues at `end`.
    pub(super) fn record_request(&mut self, address: u64, end: u64, page: u64) -> bool {
        if self.next_background != Some(address) && end - address <= page {
            if self.fault_requests.len() < FAULTS_MAX {
                self.fault_requests.insert(address, end);
            }
            return false;
        }
        self.background_started = true;
        let mut front = self.next_missing(end);
        while let Some(end) = front.and_then(|front| self.fault_requests.remove(&front)) {
            front = self.next_missing(end);
        }
        if let Some(front) = front {
            self.fault_requests = self.fault_requests.split_off(&front);
        }
        self.next_background = front;
        true
    }

    /// Returns the address where the background transfer continues; `None` if it has not started.
    pub(super) fn background_position(&self) -> Option<u64> {
        self.next_background.filter(|_| self.background_started)
    }
}
