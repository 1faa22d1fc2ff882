//! Instances of the quadratic assignment problem, and the file formats of QAPLIB.

use std::str::SplitWhitespace;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Largest number of locations. Sets of locations are bits of a `u64`.
pub const MAX_SIZE: usize = 64;

/// Largest matrix entry that the reader accepts.
pub const MAX_ENTRY: i64 = 1 << 30;

/// Value of a permutation.
pub type Cost = i64;

/// Two square matrices of non-negative integers.
///
/// A permutation `p` maps every index of the first matrix to an index of the second and costs
/// `Σ first[i][j] · second[p(i)][p(j)]`. The crate calls indices of the first matrix *locations*
/// and indices of the second *facilities*, as in most files of QAPLIB, where the first matrix
/// holds distances. Nothing depends on this reading.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    size: usize,
    first: Vec<i32>,
    second: Vec<i32>,
}

/// A permutation and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Solution {
    pub value: Cost,
    /// Facility of each location, from 0.
    pub permutation: Vec<u8>,
}

/// A solution file of QAPLIB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SolutionFile {
    /// Value that the file states.
    pub value: Cost,
    /// Permutation from 0, in the file's own direction.
    pub permutation: Vec<u8>,
}

/// Values of a permutation and of its inverse. Files of QAPLIB use both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BothValues {
    pub forward: Cost,
    pub inverse: Cost,
}

/// Reasons why a text or two matrices are not an instance, and why a text is not a solution.
/// Words count from 1.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    #[error("word {word} is missing: the text ends before {expected}")]
    Ends { word: usize, expected: &'static str },
    #[error("word {word}, \"{text}\", is not {expected}")]
    NotANumber {
        word: usize,
        text: String,
        expected: &'static str,
    },
    #[error("size {size} at word {word} is outside 1..={MAX_SIZE}")]
    Size { word: usize, size: i64 },
    #[error(
        "entry {entry} at word {word} is outside 0..={MAX_ENTRY}: \
         negative and larger entries are not supported"
    )]
    Entry { word: usize, entry: i64 },
    #[error("word {word}, \"{text}\", follows the last expected number")]
    Surplus { word: usize, text: String },
    #[error("{entry} at word {word} is not a new number of 1..={size}: this is no permutation")]
    Permutation {
        word: usize,
        entry: i64,
        size: usize,
    },
    #[error("a matrix has {found} entries where size {size} needs {needed}")]
    Shape {
        size: usize,
        found: usize,
        needed: usize,
    },
}

/// Reads numbers and counts words.
struct Words<'a> {
    words: SplitWhitespace<'a>,
    position: usize,
}

impl<'a> Words<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            words: text.split_whitespace(),
            position: 0,
        }
    }

    fn number(&mut self, expected: &'static str) -> Result<i64, FormatError> {
        self.position += 1;
        let text = self.words.next().ok_or(FormatError::Ends {
            word: self.position,
            expected,
        })?;
        text.parse().map_err(|_| FormatError::NotANumber {
            word: self.position,
            text: text.to_owned(),
            expected,
        })
    }

    fn size(&mut self) -> Result<usize, FormatError> {
        let size = self.number("the size")?;
        match usize::try_from(size) {
            Ok(fitting) if (1..=MAX_SIZE).contains(&fitting) => Ok(fitting),
            _ => Err(FormatError::Size {
                word: self.position,
                size,
            }),
        }
    }

    fn matrix(&mut self, size: usize, expected: &'static str) -> Result<Vec<i32>, FormatError> {
        let mut entries = Vec::with_capacity(size * size);
        for _ in 0..size * size {
            let entry = self.number(expected)?;
            match i32::try_from(entry) {
                Ok(fitting) if (0..=MAX_ENTRY).contains(&entry) => entries.push(fitting),
                _ => {
                    return Err(FormatError::Entry {
                        word: self.position,
                        entry,
                    });
                }
            }
        }
        Ok(entries)
    }

    fn end(mut self) -> Result<(), FormatError> {
        match self.words.next() {
            None => Ok(()),
            Some(text) => Err(FormatError::Surplus {
                word: self.position + 1,
                text: text.to_owned(),
            }),
        }
    }
}

impl Instance {
    /// Makes an instance of two matrices, row by row.
    pub fn new(size: usize, first: Vec<i32>, second: Vec<i32>) -> Result<Self, FormatError> {
        if !(1..=MAX_SIZE).contains(&size) {
            let size = i64::try_from(size).unwrap_or(i64::MAX);
            return Err(FormatError::Size { word: 1, size });
        }
        for matrix in [&first, &second] {
            if matrix.len() != size * size {
                return Err(FormatError::Shape {
                    size,
                    found: matrix.len(),
                    needed: size * size,
                });
            }
        }
        let outside = |entry: &i32| !(0..=MAX_ENTRY).contains(&i64::from(*entry));
        if let Some(at) = first.iter().chain(&second).position(outside) {
            let entry = first.iter().chain(&second).nth(at).copied();
            return Err(FormatError::Entry {
                word: at + 2,
                entry: i64::from(entry.unwrap_or_default()),
            });
        }
        Ok(Self {
            size,
            first,
            second,
        })
    }

    /// Reads a QAPLIB data file: the size and two matrices, with free white space.
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        let mut words = Words::new(text);
        let size = words.size()?;
        let first = words.matrix(size, "an entry of the first matrix")?;
        let second = words.matrix(size, "an entry of the second matrix")?;
        words.end()?;
        Ok(Self {
            size,
            first,
            second,
        })
    }

    /// Returns the instance in the data format of QAPLIB.
    pub fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.size);
        for matrix in [&self.first, &self.second] {
            text.push('\n');
            for row in matrix.chunks(self.size) {
                let row: Vec<String> = row.iter().map(i32::to_string).collect();
                text.push_str(&row.join(" "));
                text.push('\n');
            }
        }
        text
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns an entry of the first matrix.
    pub fn first(&self, row: usize, column: usize) -> i32 {
        self.first[row * self.size + column]
    }

    /// Returns an entry of the second matrix.
    pub fn second(&self, row: usize, column: usize) -> i32 {
        self.second[row * self.size + column]
    }

    /// Returns the instance with exchanged matrices; its solutions are the inverse permutations.
    pub fn exchanged(&self) -> Self {
        Self {
            size: self.size,
            first: self.second.clone(),
            second: self.first.clone(),
        }
    }

    /// Returns the value of a permutation of all locations.
    pub fn evaluate(&self, permutation: &[u8]) -> Cost {
        let mut value = 0;
        for (i, &p) in permutation.iter().enumerate() {
            for (j, &q) in permutation.iter().enumerate() {
                value += Cost::from(self.first(i, j))
                    * Cost::from(self.second(usize::from(p), usize::from(q)));
            }
        }
        value
    }

    /// Returns the values of a permutation and of its inverse.
    pub fn evaluate_both_ways(&self, permutation: &[u8]) -> BothValues {
        BothValues {
            forward: self.evaluate(permutation),
            inverse: self.evaluate(&inverse(permutation)),
        }
    }

    /// Returns what a placement costs by itself: the product of both diagonal entries.
    pub fn single_cost(&self, location: usize, facility: usize) -> Cost {
        Cost::from(self.first(location, location)) * Cost::from(self.second(facility, facility))
    }

    /// Returns what two placements cost together, in both directions.
    pub fn pair_cost(&self, (i, p): (usize, usize), (j, q): (usize, usize)) -> Cost {
        Cost::from(self.first(i, j)) * Cost::from(self.second(p, q))
            + Cost::from(self.first(j, i)) * Cost::from(self.second(q, p))
    }

    /// Returns a number that divides the value of every permutation. Symmetric data give at
    /// least 2.
    pub fn value_step(&self) -> Cost {
        let mut step = 0;
        for i in 0..self.size {
            for p in 0..self.size {
                step = gcd(step, self.single_cost(i, p));
                for j in 0..i {
                    for q in (0..self.size).filter(|&q| q != p) {
                        step = gcd(step, self.pair_cost((i, p), (j, q)));
                    }
                }
                if step == 1 {
                    return 1;
                }
            }
        }
        step.max(1)
    }
}

/// Reads a QAPLIB solution file: the size, the value, and a permutation of numbers from 1.
pub fn parse_solution(text: &str) -> Result<SolutionFile, FormatError> {
    // Some files of QAPLIB separate the numbers by commas.
    let text = text.replace(',', " ");
    let mut words = Words::new(&text);
    let size = words.size()?;
    let value = words.number("the value")?;
    let mut permutation = Vec::with_capacity(size);
    let mut taken = 0_u64;
    for _ in 0..size {
        let entry = words.number("an entry of the permutation")?;
        let fitting = u8::try_from(entry - 1)
            .ok()
            .filter(|&index| usize::from(index) < size && taken >> index & 1 == 0);
        let Some(index) = fitting else {
            return Err(FormatError::Permutation {
                word: words.position,
                entry,
                size,
            });
        };
        taken |= 1 << index;
        permutation.push(index);
    }
    words.end()?;
    Ok(SolutionFile { value, permutation })
}

/// Returns the inverse of a permutation from 0.
pub fn inverse(permutation: &[u8]) -> Vec<u8> {
    let mut inverse = vec![0; permutation.len()];
    for (index, &image) in (0_u8..).zip(permutation) {
        inverse[usize::from(image)] = index;
    }
    inverse
}

fn gcd(mut a: Cost, mut b: Cost) -> Cost {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "3\n0 1 2 1 0\n3 2 3 0\n\n0 5 6  5 0 7\t6 7 0";

    #[test]
    fn reads_free_white_space() {
        let instance = Instance::parse(SMALL).expect("an instance");
        assert_eq!(instance.size(), 3);
        assert_eq!(instance.first(1, 2), 3);
        assert_eq!(instance.second(0, 2), 6);
        assert_eq!(instance.evaluate(&[0, 1, 2]), 2 * (5 + 2 * 6 + 3 * 7));
        assert_eq!(instance.value_step(), 2);
        assert_eq!(
            Instance::parse(&instance.to_text()).expect("an instance"),
            instance
        );
    }

    #[test]
    fn names_the_position_of_an_error() {
        assert_eq!(
            Instance::parse("2 0 1 x"),
            Err(FormatError::NotANumber {
                word: 4,
                text: "x".into(),
                expected: "an entry of the first matrix"
            })
        );
        assert_eq!(
            Instance::parse("1 0"),
            Err(FormatError::Ends {
                word: 3,
                expected: "an entry of the second matrix"
            })
        );
        assert_eq!(
            Instance::parse("65"),
            Err(FormatError::Size { word: 1, size: 65 })
        );
        assert_eq!(
            Instance::parse("0"),
            Err(FormatError::Size { word: 1, size: 0 })
        );
        assert_eq!(
            Instance::parse("1 -1 0"),
            Err(FormatError::Entry { word: 2, entry: -1 })
        );
        assert_eq!(
            Instance::parse("1 1 0 7"),
            Err(FormatError::Surplus {
                word: 4,
                text: "7".into()
            })
        );
        assert!(matches!(
            Instance::parse(""),
            Err(FormatError::Ends { word: 1, .. })
        ));
        assert_eq!(
            Instance::new(1, vec![0], vec![-3]),
            Err(FormatError::Entry { word: 3, entry: -3 })
        );
        assert!(matches!(
            Instance::new(2, vec![0; 3], vec![0; 4]),
            Err(FormatError::Shape { .. })
        ));
    }

    #[test]
    fn reads_solutions_and_refuses_what_is_no_permutation() {
        let solution = parse_solution("3 17\n 2, 3,1\n").expect("a solution");
        assert_eq!(
            solution,
            SolutionFile {
                value: 17,
                permutation: vec![1, 2, 0]
            }
        );
        for (text, word) in [("3 17 1 1 2", 4), ("3 17 0 1 2", 3), ("3 17 1 4 2", 4)] {
            let error = parse_solution(text).expect_err("no permutation");
            assert!(
                matches!(error, FormatError::Permutation { word: at, .. } if at == word),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn evaluates_both_directions_of_asymmetric_data() {
        let instance = Instance::new(
            3,
            vec![0, 1, 2, 3, 0, 4, 5, 6, 0],
            vec![0, 7, 1, 2, 0, 3, 9, 4, 0],
        )
        .expect("small entries");
        let permutation = [1, 2, 0];
        let both = instance.evaluate_both_ways(&permutation);
        assert_eq!(both.forward, instance.evaluate(&permutation));
        assert_eq!(both.inverse, instance.exchanged().evaluate(&permutation));
        assert_ne!(both.forward, both.inverse);
    }
}
