//! The bell of a task: which of its rings have something, and who sleeps.
//!
//! A writer sets the bit of its conversation and looks whether anybody sleeps; a reader says that it sleeps and looks for bits
//! once more. Both with a full fence between, so one of the two sees the other. Bits may stay set for a while after their
//! ring was emptied: the usual conversation back and forth then costs no write to this page at all.
//!
//! All tasks of a user on a host write here. One that breaks the rules can delay the others' wake-ups, not their messages:
//! the ear looks at all rings when it has not been called for a while, whatever stands here.

use crate::sync::{Apart, AtomicU32, AtomicU64, Ordering, fence};

/// Conversations that a bell has places for.
pub const SLOTS_MAX: usize = 4096;
const WORDS: usize = SLOTS_MAX / 64;

/// Whom a writer has to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Nobody: the reader is looking, or will.
    Nobody,
    /// Those who sleep on [`Bell::word`].
    Sleepers,
    /// The one who sleeps on [`Bell::ear`].
    Ear,
}

/// The bell.
#[derive(Debug)]
#[repr(C)]
pub struct Bell {
    word: AtomicU32,
    sleepers: AtomicU32,
    ear: AtomicU32,
    every: AtomicU32,
    summary: Apart<AtomicU64>,
    bits: [AtomicU64; WORDS],
}

impl Default for Bell {
    fn default() -> Bell {
        Bell {
            word: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            ear: AtomicU32::new(0),
            every: AtomicU32::new(0),
            summary: Apart::default(),
            bits: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Bell {
    /// The word to sleep on: it changes whenever sleepers are woken.
    pub fn word(&self) -> &AtomicU32 {
        &self.word
    }

    /// The word that the ear sleeps on while it is 0.
    pub fn ear(&self) -> &AtomicU32 {
        &self.ear
    }

    /// After writing to the ring of this slot: says whom to wake. `urgent`: the ear, too, if nobody else would look.
    #[inline]
    pub fn ring(&self, slot: usize, urgent: bool) -> Wake {
        fence(Ordering::SeqCst);
        let (index, bit) = (slot / 64 % WORDS, 1 << (slot % 64));
        if self.bits[index].load(Ordering::Relaxed) & bit == 0 {
            self.bits[index].fetch_or(bit, Ordering::SeqCst);
            self.summary.0.fetch_or(1 << index, Ordering::SeqCst);
            // The sleeper finds this bit, or we find the sleeper.
            fence(Ordering::SeqCst);
        }
        if self.sleepers.load(Ordering::Relaxed) != 0
            && self.sleepers.swap(0, Ordering::SeqCst) != 0
        {
            self.word.fetch_add(1, Ordering::SeqCst);
            return Wake::Sleepers;
        }
        if (urgent || self.every.load(Ordering::Relaxed) != 0) && self.call_ear() {
            Wake::Ear
        } else {
            Wake::Nobody
        }
    }

    /// Calls the ear; true when it has to be woken.
    pub fn call_ear(&self) -> bool {
        self.ear.swap(1, Ordering::SeqCst) == 0
    }

    /// True when the ear has been called.
    pub fn is_called(&self) -> bool {
        self.ear.load(Ordering::SeqCst) != 0
    }

    /// The ear takes its call. All rings have to be looked at once more after this.
    pub fn take_call(&self) {
        self.ear.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// With `true` the ear is called for everything that arrives while nobody sleeps. All rings have to be looked at once more
    /// after this.
    pub fn call_for_everything(&self, every: bool) {
        self.every.store(u32::from(every), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The first word of slots from `from` on that has bits set: its number (slots are 64 times it and more) and its bits.
    #[inline]
    pub fn rung(&self, from: usize) -> Option<(usize, u64)> {
        let mut summary = self.summary.0.load(Ordering::Acquire);
        if from >= WORDS {
            return None;
        }
        summary &= u64::MAX << from;
        while summary != 0 {
            let index = summary.trailing_zeros() as usize;
            let bits = self.bits[index].load(Ordering::Acquire);
            if bits != 0 {
                return Some((index, bits));
            }
            summary &= summary - 1;
        }
        None
    }

    /// Takes a bit back. Its ring has to be looked at once more after this.
    pub fn hush(&self, slot: usize) {
        let (index, bit) = (slot / 64 % WORDS, 1 << (slot % 64));
        if self.bits[index].fetch_and(!bit, Ordering::SeqCst) & !bit == 0 {
            self.summary.0.fetch_and(!(1 << index), Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if self.bits[index].load(Ordering::SeqCst) != 0 {
                self.summary.0.fetch_or(1 << index, Ordering::SeqCst);
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Somebody is about to sleep: the value to sleep on. All rings have to be looked at once more after this.
    pub fn about_to_sleep(&self) -> u32 {
        let seen = self.word.load(Ordering::SeqCst);
        self.sleepers.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        seen
    }

    /// Changes the word, so that those who are about to sleep do not.
    pub fn stir(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
    }

    /// Begins again as another bell that goes on where `old` is.
    pub fn follow(&self, old: &Bell) {
        self.word.store(
            old.word.load(Ordering::SeqCst).wrapping_add(1),
            Ordering::SeqCst,
        );
        self.every
            .store(old.every.load(Ordering::SeqCst), Ordering::SeqCst);
        // Whoever sleeps now is woken before this one takes its place; the ear looks at everything.
        self.ear.store(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn slots_are_found_and_taken_back_one_by_one() {
        let bell = Bell::default();
        for slot in [0, 63, 64, 4095] {
            assert_eq!(bell.ring(slot, false), Wake::Nobody);
        }
        let slots = |bell: &Bell| -> Vec<usize> {
            let words = std::iter::successors(bell.rung(0), |(index, _)| bell.rung(index + 1));
            words
                .flat_map(|(i, bits)| {
                    (0..64)
                        .filter(move |b| bits >> b & 1 == 1)
                        .map(move |b| i * 64 + b)
                })
                .collect()
        };
        assert_eq!(slots(&bell), [0, 63, 64, 4095]);
        bell.hush(63);
        assert_eq!(slots(&bell), [0, 64, 4095]);
        [0, 64, 4095].into_iter().for_each(|slot| bell.hush(slot));
        assert_eq!(slots(&bell), [0; 0]);
    }

    #[test]
    fn a_sleeper_is_woken_once_and_the_ear_only_when_it_is_wanted() {
        let bell = Bell::default();
        let seen = bell.about_to_sleep();
        assert_eq!(bell.ring(5, true), Wake::Sleepers);
        assert_ne!(bell.word().load(Ordering::SeqCst), seen);
        assert_eq!(bell.ring(5, true), Wake::Ear);
        assert_eq!(
            bell.ring(5, true),
            Wake::Nobody,
            "it has been called already"
        );
        bell.take_call();
        assert_eq!(bell.ring(5, false), Wake::Nobody);
        bell.call_for_everything(true);
        assert_eq!(bell.ring(5, false), Wake::Ear);
    }
}
