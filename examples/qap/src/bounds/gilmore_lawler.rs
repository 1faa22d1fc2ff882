//! The bound of Gilmore and Lawler: for every placement the least that its row may cost, and an
//! assignment problem over these.

use super::assignment::reduce;
use super::{
    BoundError, Branch, Cell, Child, FORBIDDEN, Free, LowerBound, Placement, Scaled,
    append_children, choose_branch, for_width, round_up, width, without_column, worst_cost,
};
use crate::instance::{Cost, Instance, MAX_SIZE};
use crate::symmetry::Symmetry;
use crate::vector::with_best_vectors;

/// Largest sum that a single row may give: sums of rows stay within 32 bits.
const MAX_WORST_COST: Cost = (FORBIDDEN / 4) as Cost;

pub(crate) struct GilmoreLawler {
    instance: Instance,
    symmetry: Symmetry,
    /// Every value is a multiple of this.
    step: Cost,
    levels: Vec<Level>,
    scratch: Vec<Scaled>,
}

/// A subproblem. Matrices have rows of `width` entries and as much unused room at the end.
struct Level {
    free: Free,
    width: usize,
    /// Cost of the placements so far, among themselves.
    fixed: Scaled,
    /// Cost of each free placement by itself and together with all placed ones.
    linear: Vec<Scaled>,
    /// Row of a free location: its entries of the first matrix towards the others, descending.
    descending: Vec<Scaled>,
    /// Column of a free facility: its entries of the second matrix towards the others, ascending.
    ascending: Vec<Scaled>,
}

impl GilmoreLawler {
    pub(crate) fn new(instance: &Instance, symmetry: Symmetry) -> Result<Self, BoundError> {
        let worst = worst_cost(instance);
        if worst > MAX_WORST_COST {
            return Err(BoundError::TooCostly {
                worst,
                limit: MAX_WORST_COST,
            });
        }
        let size = instance.size();
        let mut levels = vec![Level::root(instance, &symmetry)];
        for left in (1..size).rev() {
            levels.push(Level::empty(left, &symmetry));
        }
        Ok(Self {
            instance: instance.clone(),
            symmetry,
            step: instance.value_step(),
            levels,
            scratch: vec![0; size * width(size)],
        })
    }

    /// Sets level `depth` + 1 without computing its bound.
    #[inline(always)]
    fn descend<const W: usize>(&mut self, depth: usize, placement: Placement) {
        let (upper, lower) = self.levels.split_at_mut(depth + 1);
        lower[0].set_child::<W>(&upper[depth], placement, &self.instance, &self.symmetry);
    }

    /// Computes the bound of a level and its children.
    #[inline(always)]
    fn bound<const W: usize>(&mut self, depth: usize, target: Cost, children: &mut Vec<Child>) {
        let level = &self.levels[depth];
        let target = target as Scaled;
        let size = level.free.size;
        let (scratch, _) = self.scratch.as_chunks_mut::<W>();
        let excess = &mut scratch[..size];
        level.fill::<W>(excess);
        let Some(value) = reduce(excess) else { return };
        let bound = level.fixed + value;
        if bound > target {
            return;
        }
        let free = &level.free;
        let orbits = self.symmetry.orbits(
            free.stabilizer,
            &free.locations[..size],
            &free.facilities[..size],
        );
        let branch: Branch = choose_branch(excess, target - bound, orbits.as_ref());
        let step = self.step;
        append_children(&branch, free, children, |Cell { row, column }| {
            round_up(Cost::from(bound + excess[row][column]), step)
        });
    }
}

impl LowerBound for GilmoreLawler {
    fn expand_root(&mut self, target: Cost, children: &mut Vec<Child>) {
        let size = self.instance.size();
        for_width!(size, W => self.bound::<W>(0, target, children));
    }

    fn expand(
        &mut self,
        depth: usize,
        placement: Placement,
        target: Cost,
        children: &mut Vec<Child>,
    ) {
        let size = self.levels[depth + 1].free.size;
        with_best_vectors(
            #[inline(always)]
            || {
                for_width!(size, W => {
                    self.descend::<W>(depth, placement);
                    self.bound::<W>(depth + 1, target, children);
                });
            },
        );
    }
}

impl Level {
    fn empty(size: usize, symmetry: &Symmetry) -> Self {
        let width = width(size);
        let mut free = Free::all(size, symmetry);
        free.size = size;
        // One row of room lets `without_column` read past the last row.
        let room = (size + 1) * width + MAX_SIZE;
        Self {
            free,
            width,
            fixed: 0,
            linear: vec![0; room],
            descending: vec![0; room],
            ascending: vec![0; room],
        }
    }

    fn root(instance: &Instance, symmetry: &Symmetry) -> Self {
        let size = instance.size();
        let mut level = Self::empty(size, symmetry);
        let width = level.width;
        for index in 0..size {
            let row = &mut level.linear[index * width..][..width];
            row.fill(FORBIDDEN);
            for (facility, entry) in row[..size].iter_mut().enumerate() {
                *entry = instance.single_cost(index, facility) as Scaled;
            }
            let others = |entry: &dyn Fn(usize) -> Scaled| -> Vec<Scaled> {
                let mut others: Vec<Scaled> = (0..size)
                    .filter(|&other| other != index)
                    .map(entry)
                    .collect();
                others.sort_unstable();
                others
            };
            let first = others(&|other| instance.first(index, other));
            for (place, entry) in first.into_iter().rev().enumerate() {
                level.descending[index * width + place] = entry;
            }
            let second = others(&|other| instance.second(index, other));
            for (place, entry) in second.into_iter().enumerate() {
                level.ascending[place * width + index] = entry;
            }
        }
        level
    }

    #[inline(always)]
    fn set_child<const W: usize>(
        &mut self,
        parent: &Self,
        placement: Placement,
        instance: &Instance,
        symmetry: &Symmetry,
    ) {
        let cell = parent.free.cell(placement);
        self.free.remove(&parent.free, cell, symmetry);
        self.fixed = parent.fixed + parent.linear[cell.row * parent.width + cell.column];
        let (location, facility) = (
            usize::from(placement.location),
            usize::from(placement.facility),
        );
        let size = self.free.size;
        let mut towards = [0; W];
        let mut back = [0; W];
        for (column, &other) in self.free.facilities[..size].iter().enumerate() {
            towards[column] = instance.second(usize::from(other), facility);
            back[column] = instance.second(facility, usize::from(other));
        }
        let (linear, _) = self.linear.as_chunks_mut::<W>();
        let (descending, _) = self.descending.as_chunks_mut::<W>();
        for row in 0..size {
            let other = usize::from(self.free.locations[row]);
            let start = (row + usize::from(row >= cell.row)) * parent.width;
            let mut costs =
                without_column::<W>(&parent.linear, start, cell.column, size, FORBIDDEN);
            let (to, from) = (
                instance.first(other, location),
                instance.first(location, other),
            );
            for column in 0..W {
                costs[column] += to * towards[column] + from * back[column];
            }
            linear[row] = costs;
            let greater = parent.descending[start..start + W].iter();
            let place = greater.map(|&entry| u32::from(entry > to)).sum::<u32>() as usize;
            descending[row] = without_column::<W>(&parent.descending, start, place, size - 1, 0);
        }
        self.remove_ascending::<W>(parent, cell, &towards);
    }

    /// Removes one column, and from every other column its entry towards the placed facility.
    #[inline(always)]
    fn remove_ascending<const W: usize>(&mut self, parent: &Self, cell: Cell, gone: &[Scaled; W]) {
        let size = self.free.size;
        let (ascending, _) = self.ascending.as_chunks_mut::<W>();
        let mut row = without_column::<W>(&parent.ascending, 0, cell.column, size, 0);
        for place in 0..size - 1 {
            let start = (place + 1) * parent.width;
            let next = without_column::<W>(&parent.ascending, start, cell.column, size, 0);
            for column in 0..W {
                // Of equal entries any may go: the next one has the same value.
                let keep = row[column] < gone[column];
                ascending[place][column] = if keep { row[column] } else { next[column] };
            }
            row = next;
        }
    }

    /// Fills in the least cost of every placement.
    #[inline(always)]
    fn fill<const W: usize>(&self, costs: &mut [[Scaled; W]]) {
        let size = self.free.size;
        let (linear, _) = self.linear.as_chunks::<W>();
        let (descending, _) = self.descending.as_chunks::<W>();
        let (ascending, _) = self.ascending.as_chunks::<W>();
        for row in 0..size {
            let mut sums = linear[row];
            for place in 0..size - 1 {
                let factor = descending[row][place];
                for column in 0..W {
                    sums[column] += factor * ascending[place][column];
                }
            }
            costs[row] = sums;
        }
    }
}
