//! A set of limited size that contains the most recently inserted values.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// Contains the last `max` distinct values that were inserted.
#[derive(Debug)]
pub(crate) struct Recent<T> {
    max: usize,
    set: HashSet<T>,
    order: VecDeque<T>,
}

impl<T: Copy + Eq + Hash> Recent<T> {
    pub(crate) fn new(max: usize) -> Recent<T> {
        Recent {
            max,
            set: HashSet::new(),
            order: VecDeque::new(),
        }
    }

    pub(crate) fn put(&mut self, value: T) {
        if self.set.insert(value) {
            self.order.push_back(value);
        }
        while self.order.len() > self.max {
            let oldest = self.order.pop_front().expect("longer than the limit");
            self.set.remove(&oldest);
        }
    }

    /// Removes a value from the set.
    pub(crate) fn forget(&mut self, value: T) {
        if self.set.remove(&value) {
            self.order.retain(|other| *other != value);
        }
    }

    pub(crate) fn has(&self, value: T) -> bool {
        self.set.contains(&value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the set is full, the oldest value is dropped.
    #[test]
    fn oldest_values_are_dropped_first() {
        let mut recent = Recent::new(2);
        [1, 2, 2, 3].into_iter().for_each(|n| recent.put(n));
        assert!(!recent.has(1) && recent.has(2) && recent.has(3));
        recent.forget(3);
        recent.put(4);
        assert!(recent.has(2) && !recent.has(3) && recent.has(4));
    }
}
