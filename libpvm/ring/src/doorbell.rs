//! The doorbell of a task: a set of bits in shared memory that shows which of the task's rings have
//! records, and whether threads of the task sleep.
//!
//! A writer sets the bit of its ring's slot and then checks for sleeping threads. A reader
//! announces that it will sleep and then checks the bits again. Both execute a full fence between
//! the two steps, so the reader sees the bit or the writer sees the sleeping thread. A bit may stay
//! set for a while after its ring was emptied. As a result, two tasks that exchange messages in
//! turn do not write to this page at all.
//!
//! Other tasks of the same user on the host write to the doorbell. A misbehaving task can delay the
//! wake-ups of the doorbell's owner, but cannot cause the loss of messages: the drainer thread
//! checks all rings if no request has arrived for a while, whatever the doorbell contains.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, fence};

/// Number of slots, one for each ring of a task.
pub const SLOT_COUNT: usize = 4096;
const WORD_COUNT: usize = SLOT_COUNT / 64;

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
    summary_bits: CachePadded<AtomicU64>,
    slot_bits: [AtomicU64; WORD_COUNT],
}

impl Default for Doorbell {
    fn default() -> Self {
        Self {
            sleep_word: AtomicU32::new(0),
            has_sleepers: AtomicU32::new(0),
            drainer_word: AtomicU32::new(0),
            notify_always: AtomicU32::new(0),
            summary_bits: CachePadded::default(),
            slot_bits: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

/// Position of a pass over the slots whose bits are set. It borrows nothing, so that the rings can
/// be read during the pass.
#[derive(Debug, Default)]
pub struct SlotCursor {
    next_word_index: usize,
    bits: u64,
}

impl Doorbell {
    /// Futex word on which readers sleep. The value of the word changes whenever the readers are
    /// woken.
    pub fn sleep_word(&self) -> &AtomicU32 {
        &self.sleep_word
    }

    /// Futex word of the drainer thread, which sleeps while the value is 0.
    pub fn drainer_word(&self) -> &AtomicU32 {
        &self.drainer_word
    }

    /// Notifies the reader after a write to the ring of this slot. Returns the threads to wake. If
    /// `is_urgent` is true and no reader sleeps, the drainer thread is requested.
    #[inline]
    pub fn notify(&self, slot: usize, is_urgent: bool) -> WakeTarget {
        fence(Ordering::SeqCst);
        let (index, bit) = (slot / 64 % WORD_COUNT, 1 << (slot % 64));
        if self.slot_bits[index].load(Ordering::Relaxed) & bit == 0 {
            self.slot_bits[index].fetch_or(bit, Ordering::SeqCst);
            self.summary_bits.0.fetch_or(1 << index, Ordering::SeqCst);
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
        if (is_urgent || self.notify_always.load(Ordering::Relaxed) != 0) && self.request_drainer()
        {
            WakeTarget::Drainer
        } else {
            WakeTarget::NoThread
        }
    }

    /// Requests the drainer thread. Returns true if the drainer thread must be woken.
    pub fn request_drainer(&self) -> bool {
        self.drainer_word.swap(1, Ordering::SeqCst) == 0
    }

    /// True from a request for the drainer thread until the drainer thread accepts the request.
    pub fn is_drainer_requested(&self) -> bool {
        self.drainer_word.load(Ordering::SeqCst) != 0
    }

    /// Clears the request for the drainer thread. Only the drainer thread calls this method.
    /// Afterwards the drainer thread must check all rings once more.
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

    /// Returns index and bits of the first word that has a bit set, at index `start_index` or
    /// later; `None` if there is no such word. Bit `b` of word `i` belongs to slot `64 * i + b`.
    #[inline]
    pub fn next_pending_word(&self, start_index: usize) -> Option<(usize, u64)> {
        let mut summary = self.summary_bits.0.load(Ordering::Acquire);
        if start_index >= WORD_COUNT {
            return None;
        }
        summary &= u64::MAX << start_index;
        while summary != 0 {
            let index = summary.trailing_zeros() as usize;
            let bits = self.slot_bits[index].load(Ordering::Acquire);
            if bits != 0 {
                return Some((index, bits));
            }
            summary &= summary - 1;
        }
        None
    }

    /// Returns the next slot whose bit is set, after those that `cursor` has passed; `None` at the
    /// end. The bits of a word are read once.
    #[inline]
    pub fn next_pending_slot(&self, cursor: &mut SlotCursor) -> Option<usize> {
        if cursor.bits == 0 {
            let (index, bits) = self.next_pending_word(cursor.next_word_index)?;
            (cursor.next_word_index, cursor.bits) = (index + 1, bits);
        }
        let bit = cursor.bits.trailing_zeros() as usize;
        cursor.bits &= cursor.bits - 1;
        Some((cursor.next_word_index - 1) * 64 + bit)
    }

    /// Returns the slot whose bit is the only one that is set; `None` if no bit is set or several.
    #[inline]
    pub fn only_pending_slot(&self) -> Option<usize> {
        let summary = self.summary_bits.0.load(Ordering::Acquire);
        if !summary.is_power_of_two() {
            return None;
        }
        let index = summary.trailing_zeros() as usize;
        let bits = self.slot_bits[index].load(Ordering::Acquire);
        bits.is_power_of_two()
            .then(|| index * 64 + bits.trailing_zeros() as usize)
    }

    /// Clears the bit of a slot. The slot's ring must be checked once more afterwards.
    pub fn clear_slot(&self, slot: usize) {
        let (index, bit) = (slot / 64 % WORD_COUNT, 1 << (slot % 64));
        if self.slot_bits[index].fetch_and(!bit, Ordering::SeqCst) & !bit == 0 {
            self.summary_bits
                .0
                .fetch_and(!(1 << index), Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if self.slot_bits[index].load(Ordering::SeqCst) != 0 {
                self.summary_bits.0.fetch_or(1 << index, Ordering::SeqCst);
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Announces that this thread will sleep. Returns the value of the futex word; the thread may
    /// sleep only while the word has this value. All rings must be checked once more before the
    /// sleep.
    pub fn prepare_sleep(&self) -> u32 {
        let word_value = self.sleep_word.load(Ordering::SeqCst);
        self.has_sleepers.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        word_value
    }

    /// Changes the futex word, so that threads that are about to sleep on it stay awake.
    pub fn change_sleep_word(&self) {
        self.sleep_word.fetch_add(1, Ordering::SeqCst);
    }

    /// Initializes this doorbell, which will replace `old_doorbell` at the same address. Copies the
    /// setting of [`Doorbell::set_notify_always`], changes the futex word of the readers, and
    /// requests the drainer thread.
    pub fn init_from_predecessor(&self, old_doorbell: &Self) {
        self.sleep_word.store(
            old_doorbell
                .sleep_word
                .load(Ordering::SeqCst)
                .wrapping_add(1),
            Ordering::SeqCst,
        );
        self.notify_always.store(
            old_doorbell.notify_always.load(Ordering::SeqCst),
            Ordering::SeqCst,
        );
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
        let doorbell = Doorbell::default();
        for slot in [0, 63, 64, 4095] {
            assert_eq!(doorbell.notify(slot, false), WakeTarget::NoThread);
        }
        let pending_slots = |doorbell: &Doorbell| -> Vec<usize> {
            let pending_words =
                std::iter::successors(doorbell.next_pending_word(0), |(index, _)| {
                    doorbell.next_pending_word(index + 1)
                });
            pending_words
                .flat_map(|(i, bits)| {
                    (0..64)
                        .filter(move |b| bits >> b & 1 == 1)
                        .map(move |b| i * 64 + b)
                })
                .collect()
        };
        assert_eq!(pending_slots(&doorbell), [0, 63, 64, 4095]);
        assert_eq!(doorbell.only_pending_slot(), None);
        doorbell.clear_slot(63);
        assert_eq!(pending_slots(&doorbell), [0, 64, 4095]);
        doorbell.clear_slot(64);
        assert_eq!(doorbell.only_pending_slot(), None);
        doorbell.clear_slot(4095);
        assert_eq!(doorbell.only_pending_slot(), Some(0));
        doorbell.clear_slot(0);
        assert_eq!(pending_slots(&doorbell), [0; 0]);
        assert_eq!(doorbell.only_pending_slot(), None);
    }

    #[test]
    fn sleepers_wake_once_and_drainer_on_request() {
        let doorbell = Doorbell::default();
        let word_value = doorbell.prepare_sleep();
        assert_eq!(doorbell.notify(5, true), WakeTarget::Sleepers);
        assert_ne!(doorbell.sleep_word().load(Ordering::SeqCst), word_value);
        assert_eq!(doorbell.notify(5, true), WakeTarget::Drainer);
        assert_eq!(
            doorbell.notify(5, true),
            WakeTarget::NoThread,
            "it has been called already"
        );
        doorbell.accept_drainer_request();
        assert_eq!(doorbell.notify(5, false), WakeTarget::NoThread);
        doorbell.set_notify_always(true);
        assert_eq!(doorbell.notify(5, false), WakeTarget::Drainer);
    }
}
