//! Lower bounds of subproblems, and the choice of the next branching from them.
#![expect(
    clippy::needless_range_loop,
    reason = "loops over the same columns of several rows become vector code"
)]

pub(crate) mod assignment;
pub(crate) mod gilmore_lawler;
pub(crate) mod hahn_grant;

use thiserror::Error;

use crate::instance::{Cost, Instance, MAX_SIZE};
use crate::symmetry::{Orbits, Stabilizer, Symmetry};

/// Costs inside a bound, multiplied by the bound's own scale.
pub(crate) type Scaled = i32;

/// A placement that no improving solution contains.
pub(crate) const FORBIDDEN: Scaled = 1 << 29;

/// Entries from here on are forbidden: reduction of a matrix lowers `FORBIDDEN` by less than
/// half of its value.
const FORBIDDEN_FROM: Scaled = FORBIDDEN / 2;

/// Costs above this one are forbidden from the start. A bound needs `target` at most this.
pub(crate) const MAX_TARGET: Scaled = 1 << 26;

#[inline(always)]
pub(crate) fn is_forbidden(cost: Scaled) -> bool {
    cost >= FORBIDDEN_FROM
}

/// Reasons why a bound cannot be computed for an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BoundError {
    #[error(
        "some permutations of this instance may cost {worst}, and the bound computes with at \
         most {limit}: divide the entries of the matrices by a common factor"
    )]
    TooCostly { worst: Cost, limit: Cost },
    #[error("the Hahn-Grant bound is for sizes up to {limit}, not {size}: use the bound gl")]
    TooLarge { size: usize, limit: usize },
}

/// A facility on a location.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Placement {
    pub location: u8,
    pub facility: u8,
}

/// A subproblem of a node: one more placement, and a lower bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Child {
    pub(crate) bound: Cost,
    pub(crate) placement: Placement,
}

/// A lower bound that is computed along a path of the tree. Level d is the node after d
/// placements; levels above the current one are kept.
pub(crate) trait LowerBound {
    /// `target` is at most `MAX_TARGET` here and below.
    ///
    /// Computes the root. Appends its children, or none if no solution costs `target` or less.
    fn expand_root(&mut self, target: Cost, children: &mut Vec<Child>);

    /// Computes the child of level `depth` that `placement` gives, at level `depth` + 1. Appends
    /// its children, or none if no completion costs `target` or less.
    fn expand(
        &mut self,
        depth: usize,
        placement: Placement,
        target: Cost,
        children: &mut Vec<Child>,
    );
}

/// Locations and facilities that a subproblem has left, ascending, and its symmetry.
#[derive(Clone)]
pub(crate) struct Free {
    pub(crate) size: usize,
    pub(crate) locations: [u8; MAX_SIZE],
    pub(crate) facilities: [u8; MAX_SIZE],
    pub(crate) stabilizer: Stabilizer,
}

/// Row and column of a placement among free locations and facilities.
#[derive(Clone, Copy)]
pub(crate) struct Cell {
    pub(crate) row: usize,
    pub(crate) column: usize,
}

impl Free {
    pub(crate) fn all(size: usize, symmetry: &Symmetry) -> Self {
        let mut indices = [0; MAX_SIZE];
        for (number, index) in (0..).zip(&mut indices) {
            *index = number;
        }
        Self {
            size,
            locations: indices,
            facilities: indices,
            stabilizer: symmetry.whole(),
        }
    }

    pub(crate) fn placement(&self, cell: Cell) -> Placement {
        Placement {
            location: self.locations[cell.row],
            facility: self.facilities[cell.column],
        }
    }

    /// Returns the cell of a placement whose location and facility are free.
    pub(crate) fn cell(&self, placement: Placement) -> Cell {
        let position = |free: &[u8], index| free.iter().take_while(|&&other| other < index).count();
        Cell {
            row: position(&self.locations[..self.size], placement.location),
            column: position(&self.facilities[..self.size], placement.facility),
        }
    }

    /// Sets this to what `parent` has left without one cell.
    pub(crate) fn remove(&mut self, parent: &Self, cell: Cell, symmetry: &Symmetry) {
        self.size = parent.size - 1;
        for index in 0..self.size {
            self.locations[index] = parent.locations[index + usize::from(index >= cell.row)];
            self.facilities[index] = parent.facilities[index + usize::from(index >= cell.column)];
        }
        self.stabilizer = symmetry.fix(parent.stabilizer, parent.placement(cell));
    }
}

/// The placements that a node branches over.
pub(crate) enum Branch {
    /// All facilities of the set for one location.
    Row { row: usize, columns: u64 },
    /// All locations of the set for one facility.
    Column { column: usize, rows: u64 },
}

/// Chooses the row or column with the fewest placements whose excess is at most `slack`; ties go
/// to the largest sum of excesses, then to rows, then to the first. Of symmetric placements the
/// branching has one.
#[inline(always)]
pub(crate) fn choose_branch<const W: usize>(
    excess: &[[Scaled; W]],
    slack: Scaled,
    orbits: Option<&Orbits>,
) -> Branch {
    let size = excess.len();
    // Keeps sums of 64 entries within 32 bits.
    let shift = (8 - slack.leading_zeros().min(8)) as Scaled;
    let mut counts = [0; W];
    let mut sums = [0; W];
    let mut best = Choice::NONE;
    for (row, entries) in excess.iter().enumerate() {
        let (mut count, mut sum) = (0, 0);
        for column in 0..W {
            let allowed = Scaled::from(entries[column] <= slack);
            let weight = entries[column].min(slack + 1) >> shift;
            count += allowed;
            sum += weight;
            counts[column] += allowed;
            sums[column] += weight;
        }
        // Columns out of use weigh the same in every row.
        let count = match orbits {
            None => count,
            Some(orbits) => orbits.facilities.count(allowed_columns(entries, slack)),
        };
        best.offer(Choice {
            count,
            sum,
            line: Line::Row(row),
        });
    }
    let unused = (W - size) as Scaled * ((slack + 1) >> shift);
    best.sum -= unused;
    for column in 0..size {
        let count = match orbits {
            None => counts[column],
            Some(orbits) => orbits.locations.count(allowed_rows(excess, column, slack)),
        };
        best.offer(Choice {
            count,
            sum: sums[column],
            line: Line::Column(column),
        });
    }
    match best.line {
        Line::Row(row) => {
            let allowed = allowed_columns(&excess[row], slack);
            let columns = orbits.map_or(allowed, |orbits| orbits.facilities.first_of(allowed));
            Branch::Row { row, columns }
        }
        Line::Column(column) => {
            let allowed = allowed_rows(excess, column, slack);
            let rows = orbits.map_or(allowed, |orbits| orbits.locations.first_of(allowed));
            Branch::Column { column, rows }
        }
    }
}

#[derive(Clone, Copy)]
enum Line {
    Row(usize),
    Column(usize),
}

#[derive(Clone, Copy)]
struct Choice {
    count: Scaled,
    sum: Scaled,
    line: Line,
}

impl Choice {
    const NONE: Self = Self {
        count: Scaled::MAX,
        sum: 0,
        line: Line::Row(0),
    };

    #[inline(always)]
    fn offer(&mut self, other: Self) {
        if other.count < self.count || (other.count == self.count && other.sum > self.sum) {
            *self = other;
        }
    }
}

#[inline(always)]
fn allowed_columns<const W: usize>(entries: &[Scaled; W], slack: Scaled) -> u64 {
    let mut allowed = 0;
    for (column, &entry) in entries.iter().enumerate() {
        allowed |= u64::from(entry <= slack) << column;
    }
    allowed
}

#[inline(always)]
fn allowed_rows<const W: usize>(excess: &[[Scaled; W]], column: usize, slack: Scaled) -> u64 {
    let mut allowed = 0;
    for (row, entries) in excess.iter().enumerate() {
        allowed |= u64::from(entries[column] <= slack) << row;
    }
    allowed
}

/// Appends the children of a branching, ascending by bound. `bound_of` gives a child's bound.
#[inline(always)]
pub(crate) fn append_children(
    branch: &Branch,
    free: &Free,
    children: &mut Vec<Child>,
    bound_of: impl Fn(Cell) -> Cost,
) {
    let first = children.len();
    let mut left = match *branch {
        Branch::Row { columns, .. } => columns,
        Branch::Column { rows, .. } => rows,
    };
    while left != 0 {
        let index = left.trailing_zeros() as usize;
        left &= left - 1;
        let cell = match *branch {
            Branch::Row { row, .. } => Cell { row, column: index },
            Branch::Column { column, .. } => Cell { row: index, column },
        };
        children.push(Child {
            bound: bound_of(cell),
            placement: free.placement(cell),
        });
    }
    children[first..].sort_unstable();
}

/// Returns the largest sum that a bound may meet before it knows an entry as forbidden.
pub(crate) fn worst_cost(instance: &Instance) -> Cost {
    let size = instance.size();
    let sorted_rows = |entry: &dyn Fn(usize, usize) -> i32| -> Vec<Vec<Cost>> {
        (0..size)
            .map(|row| {
                let mut entries: Vec<Cost> = (0..size)
                    .map(|column| Cost::from(entry(row, column)))
                    .collect();
                entries.sort_unstable();
                entries
            })
            .collect()
    };
    let rows = [
        sorted_rows(&|i, j| instance.first(i, j)),
        sorted_rows(&|i, j| instance.first(j, i)),
    ];
    let others = [
        sorted_rows(&|i, j| instance.second(i, j)),
        sorted_rows(&|i, j| instance.second(j, i)),
    ];
    let mut worst = 0;
    for (rows, others) in rows.iter().zip(&others) {
        let mut worst_row = 0;
        for row in rows {
            for other in others {
                let sum: Cost = row.iter().zip(other).map(|(a, b)| a * b).sum();
                worst_row = worst_row.max(sum);
            }
        }
        worst += worst_row;
    }
    worst
}

/// Returns the least multiple of `step` that is at least `value`.
#[inline(always)]
pub(crate) fn round_up(value: Cost, step: Cost) -> Cost {
    let rest = value % step;
    if rest == 0 {
        value
    } else {
        value + step - rest
    }
}

/// Number of entries in a row of a level's matrices: a multiple of eight.
pub(crate) const fn width(size: usize) -> usize {
    match size {
        0..=8 => 8,
        9..=16 => 16,
        17..=24 => 24,
        25..=32 => 32,
        _ => 64,
    }
}

/// Evaluates an expression with `$width` as constant: the width of rows for `$size`.
macro_rules! for_width {
    ($size:expr, $width:ident => $body:expr) => {
        match $crate::bounds::width($size) {
            8 => {
                const $width: usize = 8;
                $body
            }
            16 => {
                const $width: usize = 16;
                $body
            }
            24 => {
                const $width: usize = 24;
                $body
            }
            32 => {
                const $width: usize = 32;
                $body
            }
            _ => {
                const $width: usize = 64;
                $body
            }
        }
    };
}
pub(crate) use for_width;

/// Returns row `row` of a matrix with rows of `stride` entries, without column `removed`, for a
/// child of `size` columns. Entries from `size` on are `padding`. The matrix needs `W` more
/// entries after its last row.
#[inline(always)]
pub(crate) fn without_column<const W: usize>(
    matrix: &[Scaled],
    start: usize,
    removed: usize,
    size: usize,
    padding: Scaled,
) -> [Scaled; W] {
    let near = &matrix[start..start + W];
    let far = &matrix[start + 1..start + 1 + W];
    let mut row = [padding; W];
    for column in 0..W {
        let kept = if column < removed {
            near[column]
        } else {
            far[column]
        };
        row[column] = if column < size { kept } else { padding };
    }
    row
}
