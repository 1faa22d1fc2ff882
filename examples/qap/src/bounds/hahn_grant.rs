//! The dual procedure of Hahn and Grant: dual ascent on the level-1 reformulation-linearization
//! of the problem.
//!
//! Every placement has a leader cost, and every pair of placements a cost. The procedure moves
//! costs of pairs into leaders (an assignment problem for each placement) and leaders into the
//! bound (one more). A child inherits all reduced costs of its parent.
//!
//! Both placements of a pair draw on the same cost. The first to come takes half, the second what
//! is left: then the first round gives the bound of Gilmore and Lawler, and later rounds rise from
//! there. If the first takes all, the ascent ends far lower (nug12: 373 instead of 510).

use super::assignment::reduce;
use super::{
    BoundError, Cell, Child, FORBIDDEN, Free, LowerBound, MAX_TARGET, Placement, Scaled,
    append_children, choose_branch, for_width, is_forbidden, round_up, width, without_column,
};
use crate::instance::{Cost, Instance};
use crate::symmetry::Symmetry;
use crate::vector::with_best_vectors;

/// Largest size: the pairs of one level take 2 MiB there.
pub(crate) const MAX_HAHN_GRANT_SIZE: usize = 32;

/// Largest multiple of a cost unit. Fractions make the ascent finer.
const MAX_SCALE: Scaled = 1 << 10;

/// When to stop the ascent of a node and branch.
#[derive(Clone, Copy, Debug)]
struct Patience {
    max_rounds: u32,
    /// A further round needs a gain of at least this part of what is missing.
    gain_divisor: Scaled,
}

const ROOT_PATIENCE: Patience = Patience {
    max_rounds: 200,
    gain_divisor: 200,
};

const NODE_PATIENCE: Patience = Patience {
    max_rounds: 30,
    gain_divisor: 8,
};

pub(crate) struct HahnGrant {
    instance: Instance,
    symmetry: Symmetry,
    /// Every value is a multiple of this.
    step: Cost,
    scale: Scaled,
    levels: Vec<Level>,
    /// Rows of one assignment problem.
    scratch: Vec<Scaled>,
    /// Leaders to be distributed; later the bounds of children above the node's own.
    shares: Vec<Scaled>,
}

/// A subproblem with reduced costs.
struct Level {
    free: Free,
    width: usize,
    bound: Scaled,
    /// Row for each free location, column for each free facility.
    leaders: Vec<Scaled>,
    /// For rows i < k a block of `size` rows: row j, column l is what the placements (i, j) and
    /// (k, l) cost together.
    pairs: Vec<Scaled>,
}

/// Whether a subproblem may still have an improving solution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outlook {
    Open,
    Pruned,
}

impl HahnGrant {
    pub(crate) fn new(
        instance: &Instance,
        symmetry: Symmetry,
        ceiling: Cost,
    ) -> Result<Self, BoundError> {
        let size = instance.size();
        if size > MAX_HAHN_GRANT_SIZE {
            return Err(BoundError::TooLarge {
                size,
                limit: MAX_HAHN_GRANT_SIZE,
            });
        }
        let mut scale = MAX_SCALE;
        while scale > 1 && ceiling * Cost::from(scale) > Cost::from(MAX_TARGET) {
            scale /= 2;
        }
        let mut levels = vec![Level::root(instance, &symmetry, scale)];
        for left in (1..size).rev() {
            levels.push(Level::empty(left, &symmetry));
        }
        Ok(Self {
            instance: instance.clone(),
            symmetry,
            step: instance.value_step(),
            scale,
            levels,
            scratch: vec![0; size * width(size)],
            shares: vec![0; size * width(size)],
        })
    }

    /// Raises the bound of a level and appends its children.
    #[inline(always)]
    fn bound<const W: usize>(
        &mut self,
        depth: usize,
        target: Scaled,
        patience: Patience,
        children: &mut Vec<Child>,
    ) {
        let level = &mut self.levels[depth];
        let size = level.free.size;
        let (scratch, _) = self.scratch.as_chunks_mut::<W>();
        let (shares, _) = self.shares.as_chunks_mut::<W>();
        let scratch = &mut scratch[..size];
        let shares = &mut shares[..size];
        if level.ascend::<W>(target, patience, scratch, shares) == Outlook::Pruned {
            return;
        }
        level.look_ahead::<W>(target, scratch, shares);
        let free = &level.free;
        let orbits = self.symmetry.orbits(
            free.stabilizer,
            &free.locations[..size],
            &free.facilities[..size],
        );
        let branch = choose_branch(shares, target - level.bound, orbits.as_ref());
        let (scale, step, bound) = (Cost::from(self.scale), self.step, level.bound);
        append_children(&branch, free, children, |Cell { row, column }| {
            let scaled = Cost::from(bound + shares[row][column]);
            round_up(scaled, scale * step) / scale
        });
    }

    fn scaled(&self, target: Cost) -> Scaled {
        (target * Cost::from(self.scale)) as Scaled
    }
}

impl LowerBound for HahnGrant {
    fn expand_root(&mut self, target: Cost, children: &mut Vec<Child>) {
        let target = self.scaled(target);
        // A root that was computed before knows nothing of solutions above its own target.
        self.levels[0] = Level::root(&self.instance, &self.symmetry, self.scale);
        let size = self.instance.size();
        with_best_vectors(
            #[inline(always)]
            || for_width!(size, W => self.bound::<W>(0, target, ROOT_PATIENCE, children)),
        );
    }

    fn expand(
        &mut self,
        depth: usize,
        placement: Placement,
        target: Cost,
        children: &mut Vec<Child>,
    ) {
        let target = self.scaled(target);
        let size = self.levels[depth + 1].free.size;
        with_best_vectors(
            #[inline(always)]
            || {
                for_width!(size, W => {
                    let (upper, lower) = self.levels.split_at_mut(depth + 1);
                    lower[0].set_child::<W>(&upper[depth], placement, target, &self.symmetry);
                    self.bound::<W>(depth + 1, target, NODE_PATIENCE, children);
                });
            },
        );
    }
}

/// Returns the number of the block of rows `i` < `k`.
#[inline(always)]
fn block(size: usize, i: usize, k: usize) -> usize {
    i * (2 * size - i - 1) / 2 + k - i - 1
}

/// Returns the greater half of a cost.
#[inline(always)]
fn half(cost: Scaled) -> Scaled {
    if is_forbidden(cost) {
        FORBIDDEN
    } else {
        cost - (cost >> 1)
    }
}

/// Returns the cost of a pair, or `FORBIDDEN` if the pair and a leader cost more than `room`.
#[inline(always)]
fn within(room: Scaled, pair: Scaled, leader: Scaled) -> Scaled {
    if pair + leader <= room {
        pair
    } else {
        FORBIDDEN
    }
}

impl Level {
    fn empty(size: usize, symmetry: &Symmetry) -> Self {
        let width = width(size);
        let mut free = Free::all(size, symmetry);
        free.size = size;
        // Room at the end lets `without_column` read past the last row.
        let rows = size * size * size.saturating_sub(1) / 2;
        Self {
            free,
            width,
            bound: 0,
            leaders: vec![FORBIDDEN; (size + 2) * width],
            pairs: vec![FORBIDDEN; (rows + 2) * width],
        }
    }

    fn root(instance: &Instance, symmetry: &Symmetry, scale: Scaled) -> Self {
        let size = instance.size();
        let mut level = Self::empty(size, symmetry);
        let width = level.width;
        let scaled = |cost: Cost| {
            let cost = cost * Cost::from(scale);
            if cost > Cost::from(MAX_TARGET) {
                FORBIDDEN
            } else {
                cost as Scaled
            }
        };
        for i in 0..size {
            for j in 0..size {
                level.leaders[i * width + j] = scaled(instance.single_cost(i, j));
                for k in i + 1..size {
                    for l in (0..size).filter(|&l| l != j) {
                        let row = block(size, i, k) * size + j;
                        level.pairs[row * width + l] = scaled(instance.pair_cost((i, j), (k, l)));
                    }
                }
            }
        }
        level
    }

    /// Sets this to the parent's subproblem with one more placement.
    #[inline(always)]
    fn set_child<const W: usize>(
        &mut self,
        parent: &Self,
        placement: Placement,
        target: Scaled,
        symmetry: &Symmetry,
    ) {
        let cell = parent.free.cell(placement);
        self.free.remove(&parent.free, cell, symmetry);
        let (size, above) = (self.free.size, parent.free.size);
        self.bound = parent.bound + parent.leaders[cell.row * parent.width + cell.column];
        let (leaders, _) = self.leaders.as_chunks_mut::<W>();
        let (pairs, _) = self.pairs.as_chunks_mut::<W>();
        let room = target - self.bound;
        for k in 0..size {
            let row = k + usize::from(k >= cell.row);
            let start = row * parent.width;
            leaders[k] = without_column::<W>(&parent.leaders, start, cell.column, size, FORBIDDEN);
            for l in 0..size {
                let column = l + usize::from(l >= cell.column);
                let leader = leaders[k][l] + parent.pair(cell, Cell { row, column });
                leaders[k][l] = if leader > room { FORBIDDEN } else { leader };
            }
        }
        let mut number = 0;
        for i in 0..size {
            for k in i + 1..size {
                let upper = (
                    i + usize::from(i >= cell.row),
                    k + usize::from(k >= cell.row),
                );
                let first = block(above, upper.0, upper.1) * above;
                for j in 0..size {
                    let row = first + j + usize::from(j >= cell.column);
                    pairs[number] = without_column::<W>(
                        &parent.pairs,
                        row * parent.width,
                        cell.column,
                        size,
                        FORBIDDEN,
                    );
                    number += 1;
                }
            }
        }
    }

    /// Returns what two placements of different rows cost together.
    #[inline(always)]
    fn pair(&self, one: Cell, other: Cell) -> Scaled {
        let (first, second) = if one.row < other.row {
            (one, other)
        } else {
            (other, one)
        };
        let row = block(self.free.size, first.row, second.row) * self.free.size + first.column;
        self.pairs[row * self.width + second.column]
    }

    /// Repeats rounds of the ascent while they gain enough.
    #[inline(always)]
    fn ascend<const W: usize>(
        &mut self,
        target: Scaled,
        patience: Patience,
        scratch: &mut [[Scaled; W]],
        shares: &mut [[Scaled; W]],
    ) -> Outlook {
        if self.raise_bound::<W>(target, scratch) == Outlook::Pruned {
            return Outlook::Pruned;
        }
        for _ in 0..patience.max_rounds {
            let before = self.bound;
            self.spread_leaders::<W>(shares);
            self.collect_pairs::<W>(target, scratch);
            if self.raise_bound::<W>(target, scratch) == Outlook::Pruned {
                return Outlook::Pruned;
            }
            if self.bound - before < (target - self.bound) / patience.gain_divisor {
                break;
            }
        }
        Outlook::Open
    }

    /// Moves what an assignment of the leaders must cost into the bound.
    #[inline(always)]
    fn raise_bound<const W: usize>(
        &mut self,
        target: Scaled,
        scratch: &mut [[Scaled; W]],
    ) -> Outlook {
        let (leaders, _) = self.leaders.as_chunks_mut::<W>();
        let leaders = &mut leaders[..self.free.size];
        scratch.copy_from_slice(leaders);
        let Some(value) = reduce(scratch) else {
            return Outlook::Pruned;
        };
        self.bound += value;
        if self.bound > target {
            return Outlook::Pruned;
        }
        let room = target - self.bound;
        for (leaders, reduced) in leaders.iter_mut().zip(scratch) {
            for column in 0..W {
                let leader = reduced[column];
                leaders[column] = if leader > room { FORBIDDEN } else { leader };
            }
        }
        Outlook::Open
    }

    /// Distributes every leader evenly over the pairs of its placement. Pairs with a forbidden
    /// placement become forbidden.
    #[inline(always)]
    fn spread_leaders<const W: usize>(&mut self, shares: &mut [[Scaled; W]]) {
        let size = self.free.size;
        if size < 2 {
            return;
        }
        let others = size as Scaled - 1;
        let (leaders, _) = self.leaders.as_chunks_mut::<W>();
        for (leaders, shares) in leaders.iter_mut().zip(shares.iter_mut()) {
            for column in 0..W {
                let share = leaders[column] / others;
                let forbidden = is_forbidden(leaders[column]);
                shares[column] = if forbidden { FORBIDDEN } else { share };
                leaders[column] -= if forbidden { 0 } else { share * others };
            }
        }
        let (pairs, _) = self.pairs.as_chunks_mut::<W>();
        let mut number = 0;
        for i in 0..size {
            for k in i + 1..size {
                let other = shares[k];
                for &share in &shares[i][..size] {
                    let row = &mut pairs[number];
                    for column in 0..W {
                        row[column] = (row[column] + other[column] + share).min(FORBIDDEN);
                    }
                    number += 1;
                }
            }
        }
    }

    /// Moves costs of pairs into leaders: for every placement what an assignment of the others
    /// must cost.
    #[inline(always)]
    fn collect_pairs<const W: usize>(&mut self, target: Scaled, scratch: &mut [[Scaled; W]]) {
        let size = self.free.size;
        let rows = &mut scratch[..size - 1];
        let room = target - self.bound;
        for row in 0..size {
            for column in 0..size {
                let at = row * W + column;
                if is_forbidden(self.leaders[at]) {
                    continue;
                }
                let cell = Cell { row, column };
                self.gather::<W>(cell, rows, half);
                let leader = match reduce(rows) {
                    Some(value) => self.leaders[at] + value,
                    None => FORBIDDEN,
                };
                if leader > room {
                    self.leaders[at] = FORBIDDEN;
                } else {
                    self.leaders[at] = leader;
                    self.put_back::<W>(cell, room - leader, rows);
                }
            }
        }
    }

    /// Copies the costs of all pairs of one placement: of pairs with later rows the part that
    /// `part` gives, of others all.
    #[inline(always)]
    fn gather<const W: usize>(
        &self,
        cell: Cell,
        rows: &mut [[Scaled; W]],
        part: impl Fn(Scaled) -> Scaled,
    ) {
        let size = self.free.size;
        let (pairs, _) = self.pairs.as_chunks::<W>();
        for k in 0..cell.row {
            let first = block(size, k, cell.row) * size;
            let mut row = [FORBIDDEN; W];
            for (entry, pairs) in row.iter_mut().zip(&pairs[first..first + size]) {
                *entry = pairs[cell.column];
            }
            rows[k] = row;
        }
        for k in cell.row + 1..size {
            let costs = &pairs[block(size, cell.row, k) * size + cell.column];
            for column in 0..W {
                rows[k - 1][column] = part(costs[column]);
            }
        }
    }

    /// Stores reduced costs of all pairs of one placement, and adds what `gather` left of them by
    /// `half`. A pair is forbidden if both leaders and the pair cost more than the bound leaves:
    /// more than `room` besides this leader.
    #[inline(always)]
    fn put_back<const W: usize>(&mut self, cell: Cell, room: Scaled, rows: &[[Scaled; W]]) {
        let size = self.free.size;
        let (leaders, _) = self.leaders.as_chunks::<W>();
        let (pairs, _) = self.pairs.as_chunks_mut::<W>();
        for k in 0..cell.row {
            let first = block(size, k, cell.row) * size;
            let (reduced, leaders) = (&rows[k], &leaders[k]);
            let mut row = [FORBIDDEN; W];
            for column in 0..W {
                row[column] = within(room, reduced[column], leaders[column]);
            }
            for (entry, pairs) in row.iter().zip(&mut pairs[first..first + size]) {
                pairs[cell.column] = *entry;
            }
        }
        for k in cell.row + 1..size {
            let costs = &mut pairs[block(size, cell.row, k) * size + cell.column];
            let (reduced, leaders) = (&rows[k - 1], &leaders[k]);
            for column in 0..W {
                let cost = (costs[column] >> 1) + reduced[column];
                costs[column] = within(room, cost, leaders[column]);
            }
        }
    }

    /// Computes by how much the bound of every child exceeds this node's before an ascent of its
    /// own. Children without improving solution become forbidden.
    #[inline(always)]
    fn look_ahead<const W: usize>(
        &mut self,
        target: Scaled,
        scratch: &mut [[Scaled; W]],
        excess: &mut [[Scaled; W]],
    ) {
        let size = self.free.size;
        let room = target - self.bound;
        let rows = &mut scratch[..size - 1];
        for row in 0..size {
            excess[row] = [FORBIDDEN; W];
            for column in 0..size {
                let at = row * W + column;
                let leader = self.leaders[at];
                if is_forbidden(leader) {
                    continue;
                }
                self.gather::<W>(Cell { row, column }, rows, |cost| cost);
                for (index, entries) in rows.iter_mut().enumerate() {
                    let other = index + usize::from(index >= row);
                    for (column, entry) in entries.iter_mut().enumerate() {
                        *entry += self.leaders[other * W + column];
                    }
                }
                let child = reduce(rows).map_or(FORBIDDEN, |value| value + leader);
                if child > room {
                    self.leaders[at] = FORBIDDEN;
                } else {
                    excess[row][column] = child;
                }
            }
        }
    }
}
