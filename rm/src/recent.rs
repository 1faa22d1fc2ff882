//! A set of limited size that contains the most recently inserted values.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// Contains the last `max` distinct values that were inserted.
#[derive(Debug)]
pub(crate) struct RecentSet<T> {
    max: usize,
    set: HashSet<T>,
    order: VecDeque<T>,
}

impl<T: Copy + Eq + Hash> RecentSet<T> {
    pub(crate) fn new(max: usize) -> RecentSet<T> {
        RecentSet {
            max,
            set: HashSet::new(),
            order: VecDeque::new(),
        }
    }

    pub(crate) fn insert(&mut self, value: T) {
        if self.set.insert(value) {
            self.order.push_back(value);
        }
        while self.order.len() > self.max {
            let oldest = self.order.pop_front().expect("longer than the limit");
            self.set.remove(&oldest);
        }
    }

    /// Removes a value from the set.
    pub(crate) fn remove(&mut self, value: T) {
        if self.set.remove(&value) {
            self.order.retain(|other| *other != value);
        }
    }

    pub(crate) fn contains(&self, value: T) -> bool {
        self.set.contains(&value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the set is full, the oldest value is dropped.
    #[test]
    fn oldest_values_are_dropped_first() {
        let mut recent = RecentSet::new(2);
        [1, 2, 2, 3].into_iter().for_each(|n| recent.insert(n));
        assert!(!recent.contains(1) && recent.contains(2) && recent.contains(3));
        recent.remove(3);
        recent.insert(4);
        assert!(recent.contains(2) && !recent.contains(3) && recent.contains(4));
    }
}
