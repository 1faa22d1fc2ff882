//! Automorphisms of the two matrices. Placements that an automorphism maps to each other lead to
//! subproblems of equal value; a branching needs one of them.

use crate::bounds::Placement;
use crate::instance::{Instance, MAX_SIZE};

/// Automorphisms that are used, for each matrix. Grids have 4 or 8. Every subset is valid.
const MAX_AUTOMORPHISMS: usize = 64;

/// Extensions that the search for automorphisms tries.
const MAX_TRIES: usize = 200_000;

/// Automorphisms of both matrices, without the identity.
#[derive(Clone, Debug, Default)]
pub(crate) struct Symmetry {
    locations: Automorphisms,
    facilities: Automorphisms,
}

#[derive(Clone, Debug, Default)]
struct Automorphisms {
    maps: Vec<Vec<u8>>,
    /// The set of the maps that leave an index in its place, for every index.
    fixing: Vec<u64>,
}

/// The automorphisms that leave all placed locations and facilities in their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stabilizer {
    locations: u64,
    facilities: u64,
}

/// Orbits of free locations and facilities, as sets of rows and of columns.
pub(crate) struct Orbits {
    pub(crate) locations: Partition,
    pub(crate) facilities: Partition,
}

/// Disjoint sets that cover all lines.
pub(crate) struct Partition {
    sets: Vec<u64>,
}

impl Partition {
    /// Returns how many sets are allowed entirely. A set with one forbidden member is as a whole
    /// without improving solution.
    pub(crate) fn count(&self, allowed: u64) -> i32 {
        self.sets
            .iter()
            .map(|set| i32::from(set & !allowed == 0))
            .sum()
    }

    /// Returns the first member of each set that is allowed entirely.
    pub(crate) fn first_of(&self, allowed: u64) -> u64 {
        let entire = self.sets.iter().filter(|&set| set & !allowed == 0);
        entire.fold(0, |first, set| first | (set & set.wrapping_neg()))
    }
}

impl Symmetry {
    pub(crate) fn of(instance: &Instance) -> Self {
        let size = instance.size();
        Self {
            locations: Automorphisms::find(size, &|i, j| instance.first(i, j)),
            facilities: Automorphisms::find(size, &|i, j| instance.second(i, j)),
        }
    }

    /// Returns the stabilizer of no placement.
    pub(crate) fn whole(&self) -> Stabilizer {
        Stabilizer {
            locations: self.locations.all(),
            facilities: self.facilities.all(),
        }
    }

    #[inline]
    pub(crate) fn fix(&self, stabilizer: Stabilizer, placement: Placement) -> Stabilizer {
        Stabilizer {
            locations: stabilizer.locations
                & self.locations.fixing[usize::from(placement.location)],
            facilities: stabilizer.facilities
                & self.facilities.fixing[usize::from(placement.facility)],
        }
    }

    /// Returns the orbits of a subproblem, `None` if each is a single line.
    pub(crate) fn orbits(
        &self,
        stabilizer: Stabilizer,
        locations: &[u8],
        facilities: &[u8],
    ) -> Option<Orbits> {
        (stabilizer.locations | stabilizer.facilities != 0).then(|| Orbits {
            locations: self.locations.orbits(stabilizer.locations, locations),
            facilities: self.facilities.orbits(stabilizer.facilities, facilities),
        })
    }
}

impl Automorphisms {
    fn find(size: usize, entry: &dyn Fn(usize, usize) -> i32) -> Self {
        let mut search = AutomorphismSearch {
            size,
            entry,
            image: Vec::with_capacity(size),
            taken: 0,
            tries: 0,
            found: Vec::new(),
        };
        search.extend();
        let maps = search.found;
        let fixing = (0..size)
            .map(|index| {
                let fixes = |map: &Vec<u8>| usize::from(map[index]) == index;
                (0..)
                    .zip(&maps)
                    .fold(0, |set, (bit, map)| set | u64::from(fixes(map)) << bit)
            })
            .collect();
        Self { maps, fixing }
    }

    fn all(&self) -> u64 {
        (0..self.maps.len()).fold(0, |set, map| set | 1 << map)
    }

    /// Returns the orbits of the lines that `free` names. The maps keep `free` as a set.
    fn orbits(&self, maps: u64, free: &[u8]) -> Partition {
        let mut line_of = [0; MAX_SIZE];
        for (line, &index) in free.iter().enumerate() {
            line_of[usize::from(index)] = line;
        }
        let mut sets: Vec<u64> = (0..free.len()).map(|line| 1 << line).collect();
        for (_, map) in (0..)
            .zip(&self.maps)
            .filter(|(bit, _)| maps >> bit & 1 == 1)
        {
            for (line, &index) in free.iter().enumerate() {
                let image = 1_u64 << line_of[usize::from(map[usize::from(index)])];
                let joined = sets
                    .iter()
                    .filter(|&set| set & (image | 1 << line) != 0)
                    .fold(0, |joined, set| joined | set);
                sets.retain(|set| set & joined == 0);
                sets.push(joined);
            }
        }
        Partition { sets }
    }
}

struct AutomorphismSearch<'a> {
    size: usize,
    entry: &'a dyn Fn(usize, usize) -> i32,
    image: Vec<u8>,
    taken: u64,
    tries: usize,
    found: Vec<Vec<u8>>,
}

impl AutomorphismSearch<'_> {
    /// Finds all automorphisms that continue the current images of the first indices.
    fn extend(&mut self) {
        let next = self.image.len();
        if next == self.size {
            let identity = self
                .image
                .iter()
                .enumerate()
                .all(|(i, &j)| i == usize::from(j));
            if !identity {
                self.found.push(self.image.clone());
            }
            return;
        }
        for candidate in (0..self.size).filter(|&index| index < MAX_SIZE) {
            if self.found.len() == MAX_AUTOMORPHISMS || self.tries == MAX_TRIES {
                return;
            }
            if self.taken >> candidate & 1 == 1 || !self.fits(next, candidate) {
                continue;
            }
            self.tries += 1;
            self.image.push(candidate as u8);
            self.taken |= 1 << candidate;
            self.extend();
            self.taken &= !(1 << candidate);
            self.image.pop();
        }
    }

    fn fits(&self, index: usize, candidate: usize) -> bool {
        let entry = self.entry;
        entry(index, index) == entry(candidate, candidate)
            && self.image.iter().enumerate().all(|(other, &image)| {
                let image = usize::from(image);
                entry(index, other) == entry(candidate, image)
                    && entry(other, index) == entry(image, candidate)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nugent::find;

    fn location_automorphisms(name: &str) -> usize {
        Symmetry::of(&find(name).expect("an embedded instance").instance())
            .locations
            .maps
            .len()
            + 1
    }

    #[test]
    fn grids_have_their_automorphisms() {
        for (name, expected) in [
            ("nug12", 4),
            ("nug15", 4),
            ("nug16b", 8),
            ("nug17", 1),
            ("nug20", 4),
            ("nug25", 8),
        ] {
            assert_eq!(location_automorphisms(name), expected, "{name}");
        }
    }

    #[test]
    fn orbits_shrink_as_locations_are_taken() {
        let symmetry = Symmetry::of(&find("nug16b").expect("an embedded instance").instance());
        let all: Vec<u8> = (0..16).collect();
        let orbits = symmetry
            .orbits(symmetry.whole(), &all, &all)
            .expect("a symmetry");
        // Corners, edges and the middle of a square of four by four.
        let mut sizes: Vec<u32> = orbits
            .locations
            .sets
            .iter()
            .map(|set| set.count_ones())
            .collect();
        sizes.sort_unstable();
        assert_eq!(sizes, [4, 4, 8]);
        assert_eq!(orbits.locations.first_of(u64::MAX), 0b10_0011);
        assert_eq!(
            orbits.locations.count(!1),
            2,
            "an orbit with a forbidden member is forbidden"
        );
        let corner = symmetry.fix(
            symmetry.whole(),
            Placement {
                location: 0,
                facility: 3,
            },
        );
        let left: Vec<u8> = (1..16).collect();
        let orbits = symmetry.orbits(corner, &left, &left).expect("a symmetry");
        assert_eq!(orbits.locations.sets.len(), 9, "the diagonal is left");
        let none = symmetry.fix(
            corner,
            Placement {
                location: 1,
                facility: 0,
            },
        );
        assert!(symmetry.orbits(none, &left[1..], &left[1..]).is_none());
    }

    #[test]
    fn equal_entries_do_not_overflow_the_limits() {
        let instance = Instance::new(20, vec![1; 400], vec![1; 400]).expect("small entries");
        let symmetry = Symmetry::of(&instance);
        assert_eq!(symmetry.locations.maps.len(), MAX_AUTOMORPHISMS);
    }
}
