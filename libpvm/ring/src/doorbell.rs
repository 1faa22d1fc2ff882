//! The doorbell of a task: a set of bits in shared memory that shows which of the task's rings have
//! records, and whether threads of the task sleep.
//!
//! A writer sets the bit of its ring's slot and then checks for sleeping threads. A reader
//! announces that it will sleep and then checks the bits again. Both execute a full fence between
//! the two steps, so the reader sees the bit or the writer sees the sleeping thread. Bits may stay
//! set for a while after their ring was emptied; then two tasks that exchange messages in turn do
//! not write to this page at all.
//!
//! Other tasks of the same user on the host write to the doorbell. A misbehaving task can delay the
//! wake-ups of the owner, but not cause the loss of messages: the drainer thread checks all rings
//! if it was not requested for a while, whatever the doorbell contains.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, fence};

/// Number of slots, one for each ring of a task.
pub const SLOTS_MAX: usize = 4096;
const WORDS: usize = SLOTS_MAX / 64;

/// The threads that a writer must wake after a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeTarget {
    /// No thread: the reader is awake and will check its rings.
    NoThread,
    /// The threads that sleep on the futex word [`Doorbell::sleep_word`].
    Sleepers,
    /// The drainer thread, which sleeps on the futex word [`Doorbell::drainer_word`].
    Drainer,
}

/// Doorbell of one task, in shared memory.
#[derive(Debug)]
#[repr(C)]
pub struct Doorbell {
    sleep_word: AtomicU32,
    has_sleepers: AtomicU32,
    drainer_word: AtomicU32,
    notify_always: AtomicU32,
    summary: CachePadded<AtomicU64>,
    bits: [AtomicU64; WORDS],
}

impl Default for Doorbell {
    fn default() -> Doorbell {
        Doorbell {
            sleep_word: AtomicU32::new(0),
            has_sleepers: AtomicU32::new(0),
            drainer_word: AtomicU32::new(0),
            notify_always: AtomicU32::new(0),
            summary: CachePadded::default(),
            bits: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl Doorbell {
    /// Futex word on which readers sleep. Its value changes whenever they are woken.
    pub fn sleep_word(&self) -> &AtomicU32 {
        &self.sleep_word
    }

    /// Futex word of the drainer thread: the thread sleeps while the value is 0.
    pub fn drainer_word(&self) -> &AtomicU32 {
        &self.drainer_word
    }

    /// Notifies the reader after a write to the ring of this slot. Returns the threads to wake. If
    /// `urgent` is true and no reader sleeps, the drainer thread is requested.
    #[inline]
    pub fn notify(&self, slot: usize, urgent: bool) -> WakeTarget {
        fence(Ordering::SeqCst);
        let (index, bit) = (slot / 64 % WORDS, 1 << (slot % 64));
        if self.bits[index].load(Ordering::Relaxed) & bit == 0 {
            self.bits[index].fetch_or(bit, Ordering::SeqCst);
            self.summary.0.fetch_or(1 << index, Ordering::SeqCst);
            // Either the thread that is about to sleep finds this bit, or this thread finds the
            // sleeping thread.
            fence(Ordering::SeqCst);
        }
        if self.has_sleepers.load(Ordering::Relaxed) != 0
            && self.has_sleepers.swap(0, Ordering::SeqCst) != 0
        {
            self.sleep_word.fetch_add(1, Ordering::SeqCst);
            return WakeTarget::Sleepers;
        }
        if (urgent || self.notify_always.load(Ordering::Relaxed) != 0) && self.request_drainer() {
            WakeTarget::Drainer
        } else {
            WakeTarget::NoThread
        }
    }

    /// Requests the drainer thread; true if it must be woken.
    pub fn request_drainer(&self) -> bool {
        self.drainer_word.swap(1, Ordering::SeqCst) == 0
    }

    /// True from a request for the drainer thread until the thread accepts the request.
    pub fn is_drainer_requested(&self) -> bool {
        self.drainer_word.load(Ordering::SeqCst) != 0
    }

    /// Clears the request for the drainer thread; called by that thread. It must check all rings
    /// once more afterwards.
    pub fn accept_drainer_request(&self) {
        self.drainer_word.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Sets whether every notification requests the drainer thread while no reader sleeps. All
    /// rings must be checked once more afterwards.
    pub fn set_notify_always(&self, enabled: bool) {
        self.notify_always
            .store(u32::from(enabled), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Returns the first word with a bit set, at index `from` or later: its index and its bits. Bit
    /// `b` of word `i` belongs to slot `64 * i + b`.
    #[inline]
    pub fn pending_words(&self, from: usize) -> Option<(usize, u64)> {
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

    /// Clears the bit of a slot. The slot's ring must be checked once more afterwards.
    pub fn clear(&self, slot: usize) {
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

    /// Announces that this thread will sleep. Returns the value of the futex word; the thread may
    /// sleep only while the word has this value. All rings must be checked once more before the
    /// sleep.
    pub fn prepare_sleep(&self) -> u32 {
        let seen = self.sleep_word.load(Ordering::SeqCst);
        self.has_sleepers.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        seen
    }

    /// Changes the futex word, so that threads that are about to sleep on it do not.
    pub fn change_sleep_word(&self) {
        self.sleep_word.fetch_add(1, Ordering::SeqCst);
    }

    /// Initializes this doorbell, which will replace `old` at the same address.
    pub fn replace_from(&self, old: &Doorbell) {
        self.sleep_word.store(
            old.sleep_word.load(Ordering::SeqCst).wrapping_add(1),
            Ordering::SeqCst,
        );
        self.notify_always
            .store(old.notify_always.load(Ordering::SeqCst), Ordering::SeqCst);
        // The changed word wakes the threads that sleep on the old doorbell. The drainer thread is
        // requested, so that it checks all rings.
        self.drainer_word.store(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn slots_are_found_and_cleared_one_by_one() {
        let bell = Doorbell::default();
        for slot in [0, 63, 64, 4095] {
            assert_eq!(bell.notify(slot, false), WakeTarget::NoThread);
        }
        let slots = |bell: &Doorbell| -> Vec<usize> {
            let words = std::iter::successors(bell.pending_words(0), |(index, _)| {
                bell.pending_words(index + 1)
            });
            words
                .flat_map(|(i, bits)| {
                    (0..64)
                        .filter(move |b| bits >> b & 1 == 1)
                        .map(move |b| i * 64 + b)
                })
                .collect()
        };
        assert_eq!(slots(&bell), [0, 63, 64, 4095]);
        bell.clear(63);
        assert_eq!(slots(&bell), [0, 64, 4095]);
        [0, 64, 4095].into_iter().for_each(|slot| bell.clear(slot));
        assert_eq!(slots(&bell), [0; 0]);
    }

    #[test]
    fn sleepers_wake_once_and_drainer_on_request() {
        let bell = Doorbell::default();
        let seen = bell.prepare_sleep();
        assert_eq!(bell.notify(5, true), WakeTarget::Sleepers);
        assert_ne!(bell.sleep_word().load(Ordering::SeqCst), seen);
        assert_eq!(bell.notify(5, true), WakeTarget::Drainer);
        assert_eq!(
            bell.notify(5, true),
            WakeTarget::NoThread,
            "it has been called already"
        );
        bell.accept_drainer_request();
        assert_eq!(bell.notify(5, false), WakeTarget::NoThread);
        bell.set_notify_always(true);
        assert_eq!(bell.notify(5, false), WakeTarget::Drainer);
    }
}
