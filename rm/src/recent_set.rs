//! A set of limited size that contains the most recently inserted values.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// A set of limited size. If the set is full, an insertion removes the value that was inserted
/// first.
#[derive(Debug)]
pub(crate) struct RecentSet<T> {
    len_max: usize,
    values: HashSet<T>,
    insertion_order: VecDeque<T>,
}

impl<T: Copy + Eq + Hash> RecentSet<T> {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            len_max: max,
            values: HashSet::new(),
            insertion_order: VecDeque::new(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) {
        if self.values.insert(value) {
            self.insertion_order.push_back(value);
        }
        while self.insertion_order.len() > self.len_max {
            let oldest_value = self
                .insertion_order
                .pop_front()
                .expect("longer than the limit");
            self.values.remove(&oldest_value);
        }
    }

    pub(crate) fn remove(&mut self, value: T) {
        if self.values.remove(&value) {
            self.insertion_order.retain(|other| *other != value);
        }
    }

    pub(crate) fn contains(&self, value: T) -> bool {
        self.values.contains(&value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the set is full, an insertion removes the oldest value.
    #[test]
    fn oldest_values_are_dropped_first() {
        let mut recent_set = RecentSet::new(2);
        [1, 2, 2, 3].into_iter().for_each(|n| recent_set.insert(n));
        assert!(!recent_set.contains(1) && recent_set.contains(2) && recent_set.contains(3));
        recent_set.remove(3);
        recent_set.insert(4);
        assert!(recent_set.contains(2) && !recent_set.contains(3) && recent_set.contains(4));
    }
}
