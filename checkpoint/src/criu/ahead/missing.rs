//! The missing memory of a restored task, and the progress of CRIU's background transfer through
//! it.

use super::super::images::{MAP, Pages, entries};
use crate::engine::pages::page_size;
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of page-fault requests of one process that are remembered until the background
/// transfer has passed them.
const OUT_OF_TURN_MAX: usize = 65_536;

/// The missing memory of all processes of a task: by PID in the images, ranges from start to end
/// address.
#[derive(Debug, Default)]
pub(super) struct Missing(pub(super) BTreeMap<u64, BTreeMap<u64, u64>>);

impl Missing {
    /// Reads the missing memory from the images in this directory.
    ///
    /// # Errors
    /// An image is damaged or cannot be read.
    pub(super) fn in_images(dir: &Path) -> Result<Missing, Failure> {
        let unreadable = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
        let mut missing = Missing::default();
        for entry in std::fs::read_dir(dir).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            let name = name.to_string_lossy();
            let number = name
                .strip_prefix(MAP)
                .and_then(|rest| rest.strip_suffix(".img"));
            // Shared memory is never lazy; its pagemaps have other names.
            let Some(process) = number.and_then(|number| number.parse().ok()) else {
                continue;
            };
            let pages = entries(dir, &name)?
                .into_iter()
                .skip(1)
                .map(|entry| Pages::of(&entry));
            let missed = pages.filter(|pages| pages.missing && pages.number > 0);
            let stretch = |pages: Pages| {
                (
                    pages.address,
                    pages
                        .address
                        .saturating_add(pages.number.saturating_mul(page_size())),
                )
            };
            let stretches: BTreeMap<u64, u64> = missed.map(stretch).collect();
            if !stretches.is_empty() {
                missing.0.insert(process, stretches);
            }
        }
        Ok(missing)
    }

    pub(super) fn into_processes(self) -> BTreeMap<u64, Process> {
        let process = |stretches: BTreeMap<u64, u64>| Process {
            front: stretches.keys().next().copied(),
            stretches,
            has_begun: false,
            out_of_turn: BTreeMap::new(),
        };
        self.0
            .into_iter()
            .map(|(number, stretches)| (number, process(stretches)))
            .collect()
    }
}

/// The missing memory of one process.
#[derive(Debug)]
pub(super) struct Process {
    stretches: BTreeMap<u64, u64>,
    /// The first missing page that CRIU has not requested. The background transfer goes from low to
    /// high addresses.
    front: Option<u64>,
    /// True once the background transfer has started.
    has_begun: bool,
    /// Page-fault requests that the background transfer has not reached yet, from start to end
    /// address.
    out_of_turn: BTreeMap<u64, u64>,
}

impl Process {
    /// Returns the range of missing memory that contains this address.
    pub(super) fn misses(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &end) = self.stretches.range(..=address).next_back()?;
        (address < end).then_some((start, end))
    }

    /// True if all of this range is missing.
    pub(super) fn misses_all(&self, mut address: u64, end: u64) -> bool {
        while address < end {
            match self.misses(address) {
                Some((_, until)) => address = until,
                None => return false,
            }
        }
        true
    }

    /// Returns the first missing address that is not below `address`.
    pub(super) fn missing_from(&self, address: u64) -> Option<u64> {
        match self.misses(address) {
            Some(_) => Some(address),
            None => self
                .stretches
                .range(address..)
                .next()
                .map(|(start, _)| *start),
        }
    }

    /// Records a request of CRIU. Returns true if it belongs to the background transfer, which then
    /// continues at `end`: the request begins at the expected page, or is longer than the single
    /// page of a page fault.
    pub(super) fn turn(&mut self, address: u64, end: u64, page: u64) -> bool {
        if self.front != Some(address) && end - address <= page {
            if self.out_of_turn.len() < OUT_OF_TURN_MAX {
                self.out_of_turn.insert(address, end);
            }
            return false;
        }
        self.has_begun = true;
        let mut front = self.missing_from(end);
        while let Some(end) = front.and_then(|front| self.out_of_turn.remove(&front)) {
            front = self.missing_from(end);
        }
        if let Some(front) = front {
            self.out_of_turn = self.out_of_turn.split_off(&front);
        }
        self.front = front;
        true
    }

    /// Returns where the background transfer continues, if it has started.
    pub(super) fn next(&self) -> Option<u64> {
        self.front.filter(|_| self.has_begun)
    }
}
