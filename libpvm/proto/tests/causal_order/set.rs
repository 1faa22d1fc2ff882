//! Sets of small numbers.

/// A set of small numbers, one bit for each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Set {
    words: Vec<u64>,
}

impl Set {
    pub(crate) fn contains(&self, number: usize) -> bool {
        let word = self.words.get(number / 64).copied().unwrap_or(0);
        word & (1 << (number % 64)) != 0
    }

    /// Adds a number. Returns true if the set did not contain it.
    pub(crate) fn insert(&mut self, number: usize) -> bool {
        if self.words.len() <= number / 64 {
            self.words.resize(number / 64 + 1, 0);
        }
        let is_new = !self.contains(number);
        self.words[number / 64] |= 1 << (number % 64);
        is_new
    }

    pub(crate) fn remove(&mut self, number: usize) {
        if let Some(word) = self.words.get_mut(number / 64) {
            *word &= !(1 << (number % 64));
        }
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        for (word, other_word) in self.words.iter_mut().zip(&other.words) {
            *word |= other_word;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
        let bits_of = |word: u64| (0..64).filter(move |bit| word & (1 << bit) != 0);
        let words = self.words.iter().enumerate();
        words.flat_map(move |(index, word)| bits_of(*word).map(move |bit| index * 64 + bit))
    }
}
