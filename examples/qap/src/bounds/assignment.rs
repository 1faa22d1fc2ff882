//! The linear assignment problem: Jonker and Volgenant's shortest augmenting paths, after
//! reduction of rows and columns.
//!
//! Rows are arrays of `W` entries, of which the compiler makes vector code. The crate has its own
//! solver because bounds need the reduced costs of millions of small matrices, in place.

use super::{FORBIDDEN, Scaled, is_forbidden};

/// No row is assigned to a column.
const NONE: u8 = u8::MAX;

/// Solves the assignment problem in place. Returns the value and leaves the reduced costs of an
/// optimal dual solution, all of them at least 0; returns `None` if no assignment avoids
/// forbidden entries.
///
/// The rows are as many as the columns in use. Other columns hold `FORBIDDEN` in every row.
/// Forbidden entries stay forbidden, but their value may fall: see `is_forbidden`.
#[inline(always)]
pub(crate) fn reduce<const W: usize>(rows: &mut [[Scaled; W]]) -> Option<Scaled> {
    let mut value = reduce_rows_and_columns(rows)?;
    let mut matching = Matching::<W>::new();
    let unmatched = matching.match_zeros(rows);
    if unmatched == 0 {
        return Some(value);
    }
    let mut duals = Duals {
        row: [0; W],
        column: [0; W],
    };
    let mut left = unmatched;
    while left != 0 {
        let row = left.trailing_zeros() as usize;
        left &= left - 1;
        value = value.saturating_add(augment(rows, &mut matching, &mut duals, row)?);
        if is_forbidden(value) {
            return None;
        }
    }
    for (row, dual) in rows.iter_mut().zip(duals.row) {
        for column in 0..W {
            row[column] -= dual + duals.column[column];
        }
    }
    Some(value)
}

#[inline(always)]
fn reduce_rows_and_columns<const W: usize>(rows: &mut [[Scaled; W]]) -> Option<Scaled> {
    let mut value: Scaled = 0;
    let mut least_of_columns = [FORBIDDEN; W];
    for row in rows.iter_mut() {
        let least = least_of(row);
        if is_forbidden(least) {
            return None;
        }
        value = value.saturating_add(least);
        for column in 0..W {
            row[column] -= least;
            least_of_columns[column] = least_of_columns[column].min(row[column]);
        }
    }
    let mut in_use = 0;
    let mut sum: Scaled = 0;
    for least in &mut least_of_columns {
        let keep = Scaled::from(!is_forbidden(*least));
        *least *= keep;
        in_use += keep;
        sum = sum.saturating_add(*least);
    }
    if in_use as usize != rows.len() {
        return None;
    }
    if sum != 0 {
        for row in rows.iter_mut() {
            for column in 0..W {
                row[column] -= least_of_columns[column];
            }
        }
    }
    let value = value.saturating_add(sum);
    (!is_forbidden(value)).then_some(value)
}

struct Duals<const W: usize> {
    row: [Scaled; W],
    column: [Scaled; W],
}

struct Matching<const W: usize> {
    row_of: [u8; W],
    column_of: [u8; W],
}

impl<const W: usize> Matching<W> {
    #[inline(always)]
    fn new() -> Self {
        Self {
            row_of: [NONE; W],
            column_of: [NONE; W],
        }
    }

    #[inline(always)]
    fn assign(&mut self, row: usize, column: usize) {
        self.row_of[column] = row as u8;
        self.column_of[row] = column as u8;
    }

    /// Matches rows to entries 0, each to its first free one. Rows without one take the column
    /// of a row that has another. Returns the set of the rest.
    #[inline(always)]
    fn match_zeros(&mut self, rows: &[[Scaled; W]]) -> u64 {
        let mut zeros = [0_u64; W];
        let mut taken = 0_u64;
        let mut unmatched = 0_u64;
        for (index, row) in rows.iter().enumerate() {
            zeros[index] = columns_with(row, 0);
            let free = zeros[index] & !taken;
            if free == 0 {
                unmatched |= 1 << index;
            } else {
                self.assign(index, free.trailing_zeros() as usize);
                taken |= free & free.wrapping_neg();
            }
        }
        let mut left = unmatched;
        while left != 0 {
            let index = left.trailing_zeros() as usize;
            left &= left - 1;
            let mut candidates = zeros[index];
            while candidates != 0 {
                let column = candidates.trailing_zeros() as usize;
                candidates &= candidates - 1;
                let owner = usize::from(self.row_of[column]);
                let free = zeros[owner] & !taken;
                if free != 0 {
                    self.assign(owner, free.trailing_zeros() as usize);
                    self.assign(index, column);
                    taken |= free & free.wrapping_neg();
                    unmatched &= !(1 << index);
                    break;
                }
            }
        }
        unmatched
    }
}

/// Assigns `start` along a shortest augmenting path. Returns by how much the value rises.
#[inline(always)]
fn augment<const W: usize>(
    rows: &[[Scaled; W]],
    matching: &mut Matching<W>,
    duals: &mut Duals<W>,
    start: usize,
) -> Option<Scaled> {
    let mut distance = [0; W];
    let mut previous = [start as Scaled; W];
    let mut closed = [0; W];
    for column in 0..W {
        distance[column] = rows[start][column] - duals.row[start] - duals.column[column];
    }
    let mut scanned = 0_u64;
    let (length, mut column) = loop {
        let mut open = [0; W];
        for column in 0..W {
            open[column] = distance[column] + closed[column];
        }
        let least = least_of(&open);
        if is_forbidden(least) {
            return None;
        }
        let column = columns_with(&open, least).trailing_zeros() as usize;
        let row = matching.row_of[column];
        if row == NONE {
            break (least, column);
        }
        scanned |= 1 << column;
        closed[column] = FORBIDDEN;
        let row = usize::from(row);
        let offset = least - duals.row[row];
        for column in 0..W {
            let through = rows[row][column] - duals.column[column] + offset;
            let shorter = through < distance[column];
            distance[column] = if shorter { through } else { distance[column] };
            previous[column] = if shorter {
                row as Scaled
            } else {
                previous[column]
            };
        }
    };
    duals.row[start] += length;
    while scanned != 0 {
        let column = scanned.trailing_zeros() as usize;
        scanned &= scanned - 1;
        let shift = length - distance[column];
        duals.row[usize::from(matching.row_of[column])] += shift;
        duals.column[column] -= shift;
    }
    loop {
        let row = previous[column] as usize;
        let next = matching.column_of[row];
        matching.assign(row, column);
        if row == start {
            return Some(length);
        }
        column = usize::from(next);
    }
}

#[inline(always)]
pub(super) fn least_of<const W: usize>(row: &[Scaled; W]) -> Scaled {
    let mut least = row[0];
    for &entry in &row[1..] {
        least = least.min(entry);
    }
    least
}

/// Returns the set of columns whose entry is `value`.
#[inline(always)]
fn columns_with<const W: usize>(row: &[Scaled; W], value: Scaled) -> u64 {
    let mut columns = 0;
    for (part, entries) in row.chunks(32).enumerate() {
        let mut bits = 0_u32;
        for (column, &entry) in entries.iter().enumerate() {
            bits |= u32::from(entry == value) << column;
        }
        columns |= u64::from(bits) << (32 * part);
    }
    columns
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WIDTH: usize = 8;

    fn least_by_trying(rows: &[[Scaled; WIDTH]], taken: u64) -> Option<Scaled> {
        let Some((row, rest)) = rows.split_first() else {
            return Some(0);
        };
        (0..WIDTH)
            .filter(|&column| taken >> column & 1 == 0 && !is_forbidden(row[column]))
            .filter_map(|column| {
                least_by_trying(rest, taken | 1 << column).map(|value| value + row[column])
            })
            .min()
    }

    fn matrices() -> impl Strategy<Value = Vec<[Scaled; WIDTH]>> {
        let entry = prop_oneof![4 => 0..30_i32, 1 => Just(0), 2 => Just(FORBIDDEN)];
        (1..=6_usize, 0..WIDTH).prop_flat_map(move |(size, skipped)| {
            proptest::collection::vec(proptest::collection::vec(entry.clone(), size), size)
                .prop_map(move |entries| {
                    let widen = |row: Vec<Scaled>| {
                        let mut wide = [FORBIDDEN; WIDTH];
                        for (column, entry) in row.into_iter().enumerate() {
                            wide[(column + skipped) % WIDTH] = entry;
                        }
                        wide
                    };
                    entries.into_iter().map(widen).collect()
                })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        #[test]
        fn finds_the_least_assignment_and_valid_reduced_costs(rows in matrices()) {
            let expected = least_by_trying(&rows, 0);
            let mut reduced = rows.clone();
            let value = reduce(&mut reduced);
            prop_assert_eq!(value, expected);
            let Some(value) = value else { return Ok(()) };
            prop_assert_eq!(least_by_trying(&reduced, 0), Some(0));
            for (row, original) in reduced.iter().zip(&rows) {
                for (&entry, &original) in row.iter().zip(original) {
                    prop_assert!(entry >= 0);
                    prop_assert_eq!(is_forbidden(entry), is_forbidden(original));
                }
            }
            // Every assignment costs as much as its reduced costs and the value together.
            let shifted = |column: usize| {
                let sum = |rows: &[[Scaled; WIDTH]]| -> Option<Scaled> {
                    rows.iter().enumerate().map(|(row, entries)| {
                        let entry = entries[(row + column) % WIDTH];
                        (!is_forbidden(entry)).then_some(entry)
                    }).sum()
                };
                (sum(&rows), sum(&reduced))
            };
            for column in 0..WIDTH {
                if let (Some(before), Some(after)) = shifted(column) {
                    prop_assert_eq!(before, after + value);
                }
            }
        }
    }
}
