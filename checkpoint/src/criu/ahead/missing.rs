//! Which memory is missing, and how far CRIU has come in asking for it.

use super::super::images::{MAP, Pages, entries};
use crate::engine::pages::page_size;
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::path::Path;

/// Needs of one process that are remembered because CRIU has not come so far yet.
const OUT_OF_TURN_MAX: usize = 65_536;

/// The memory that all processes of a task miss: by their numbers, stretches from one address to another.
#[derive(Debug, Default)]
pub(super) struct Missing(pub(super) BTreeMap<u64, BTreeMap<u64, u64>>);

impl Missing {
    /// As the images in this directory say.
    ///
    /// # Errors
    /// One of them is not whole.
    pub(super) fn in_images(dir: &Path) -> Result<Missing, Failure> {
        let unreadable = |e| Failure::Io(format!("cannot read {}: {e}", dir.display()));
        let mut missing = Missing::default();
        for entry in std::fs::read_dir(dir).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            let name = name.to_string_lossy();
            let number = name
                .strip_prefix(MAP)
                .and_then(|rest| rest.strip_suffix(".img"));
            // Memory that processes share is not left behind; its maps have other names.
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

/// The memory that a process misses.
#[derive(Debug)]
pub(super) struct Process {
    stretches: BTreeMap<u64, u64>,
    /// The first page that CRIU has not asked for. It goes from low addresses to high ones.
    front: Option<u64>,
    /// It does so already.
    has_begun: bool,
    /// What it has asked for behind that, because the task needed it.
    out_of_turn: BTreeMap<u64, u64>,
}

impl Process {
    /// The stretch of missing memory in which this address is.
    pub(super) fn misses(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &end) = self.stretches.range(..=address).next_back()?;
        (address < end).then_some((start, end))
    }

    /// True if all of this is missing.
    pub(super) fn misses_all(&self, mut address: u64, end: u64) -> bool {
        while address < end {
            match self.misses(address) {
                Some((_, until)) => address = until,
                None => return false,
            }
        }
        true
    }

    /// The first missing address from here on.
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

    /// CRIU asks for this. True if it is its turn, or more than a task needs at once: then it goes on from there.
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

    /// From where on it will ask, if it has begun to.
    pub(super) fn next(&self) -> Option<u64> {
        self.front.filter(|_| self.has_begun)
    }
}
