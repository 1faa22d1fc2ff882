//! A lock that the thread that uses it most acquires with plain loads and stores.
//!
//! In the *plain* mode the lock is an ordinary mutex. The first thread that acquires the lock more
//! than [`BIAS_RUN_LENGTH`] times in a row becomes its *owner*, and after each such run of the
//! owner the lock enters the *biased* mode. The owner then acquires the lock by storing a flag and
//! reading the mode again. Another thread acquires the mutex, ends the biased mode, and waits until
//! the owner has cleared the flag. The owner never changes, so that only one thread writes the
//! flag.
//!
//! Between the owner's store and load there is no fence. Instead, the other thread executes the
//! system call `membarrier` between its own store and load: the call returns after every running
//! thread of the process has executed a full fence. So either the owner reads the new mode, or the
//! other thread reads the flag. One call costs some microseconds, and the next call follows at the
//! earliest after another run of the owner. The process must be registered for this call
//! ([`register_process`]); until then all locks stay in the plain mode.

#![allow(unsafe_code)] // The lock hands out references to the value that it guards.

use crate::owner_fence::{self, current_thread_token};
use crate::sync::{AtomicU32, AtomicUsize, Mutex, MutexGuard, Ordering, TryLockError};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

/// Number of successive acquisitions of the owner before the biased mode. Their locked instructions
/// cost about as much as the end of the biased mode. On a loaded machine the threads of the library
/// end that mode more often for each message, so the number must be small.
pub const BIAS_RUN_LENGTH: u32 = if cfg!(feature = "loom") { 1 } else { 64 };

/// Token of no thread.
const NO_THREAD: usize = 0;

/// The threads that have acquired the lock in the plain mode.
#[derive(Debug)]
struct Uses {
    /// Token of the owner; [`NO_THREAD`] until there is one.
    owner: usize,
    /// Token of the thread that acquired the lock last.
    last_thread: usize,
    /// Number of successive acquisitions of this thread.
    run_length: u32,
}

const NO_USES: Uses = Uses {
    owner: NO_THREAD,
    last_thread: NO_THREAD,
    run_length: 0,
};

/// A lock as [`std::sync::Mutex`], without poisoning.
#[derive(Debug)]
pub struct BiasedLock<T> {
    /// Token of the owner in the biased mode; [`NO_THREAD`] in the plain mode. Written only by
    /// threads that hold `mutex`.
    biased_to: AtomicUsize,
    /// 1 while the owner holds the lock in the biased mode. Written only by the owner; a futex word
    /// for the thread that ends the biased mode.
    is_held_by_owner: AtomicU32,
    mutex: Mutex<Uses>,
    value: UnsafeCell<T>,
}

/// Permits the biased mode in this process, if the kernel supports it. In a process with several
/// threads the kernel needs about 10 ms for the first call, so no lock should be held.
pub fn register_process() {
    owner_fence::register_process();
}

// SAFETY: as for `std::sync::Mutex`: at most one thread at a time has a reference to the value.
unsafe impl<T: Send> Send for BiasedLock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Guard of a [`BiasedLock`].
#[derive(Debug)]
pub struct BiasedLockGuard<'a, T> {
    lock: &'a BiasedLock<T>,
    /// `None` if the owner holds the lock in the biased mode.
    mutex_guard: Option<MutexGuard<'a, Uses>>,
    /// Keeps the guard in its thread.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl<T: Default> Default for BiasedLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> BiasedLock<T> {
    #[cfg(not(feature = "loom"))]
    pub const fn new(value: T) -> Self {
        Self {
            biased_to: AtomicUsize::new(NO_THREAD),
            is_held_by_owner: AtomicU32::new(0),
            mutex: Mutex::new(NO_USES),
            value: UnsafeCell::new(value),
        }
    }

    #[cfg(feature = "loom")]
    pub fn new(value: T) -> Self {
        Self {
            biased_to: AtomicUsize::new(NO_THREAD),
            is_held_by_owner: AtomicU32::new(0),
            mutex: Mutex::new(NO_USES),
            value: UnsafeCell::new(value),
        }
    }

    /// Acquires the lock. Blocks for ever if this thread holds the lock already.
    #[inline]
    pub fn lock(&self) -> BiasedLockGuard<'_, T> {
        let thread = current_thread_token();
        if self.try_acquire_as_owner(thread) {
            return self.biased_guard();
        }
        self.lock_mutex(thread)
    }

    /// Acquires the lock if no thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<BiasedLockGuard<'_, T>> {
        let thread = current_thread_token();
        if self.try_acquire_as_owner(thread) {
            return Some(self.biased_guard());
        }
        self.try_lock_mutex(thread)
    }

    /// Acquires the lock in the biased mode. Returns false if the lock is not biased to this
    /// thread, or if this thread holds the lock already.
    #[inline]
    fn try_acquire_as_owner(&self, thread: usize) -> bool {
        if self.biased_to.load(Ordering::Relaxed) != thread
            || self.is_held_by_owner.load(Ordering::Relaxed) != 0
        {
            return false;
        }
        self.is_held_by_owner.store(1, Ordering::Relaxed);
        owner_fence::light();
        if self.biased_to.load(Ordering::Relaxed) == thread {
            return true;
        }
        self.release_as_owner();
        false
    }

    /// Releases the lock in the biased mode.
    #[inline]
    fn release_as_owner(&self) {
        self.is_held_by_owner.store(0, Ordering::Release);
        owner_fence::light();
        if self.biased_to.load(Ordering::Relaxed) == NO_THREAD {
            owner_fence::wake_waiter(&self.is_held_by_owner);
        }
    }

    #[inline]
    fn biased_guard(&self) -> BiasedLockGuard<'_, T> {
        BiasedLockGuard {
            lock: self,
            mutex_guard: None,
            _not_send: std::marker::PhantomData,
        }
    }

    #[inline(never)]
    fn lock_mutex(&self, thread: usize) -> BiasedLockGuard<'_, T> {
        let uses = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        if self.biased_to.load(Ordering::Relaxed) != NO_THREAD {
            self.end_biased_mode();
        }
        // The owner may have acquired the lock before the biased mode ended.
        while self.is_held_by_owner.load(Ordering::Acquire) != 0 {
            owner_fence::wait_while_held(&self.is_held_by_owner);
        }
        self.record_use(uses, thread)
    }

    #[inline(never)]
    fn try_lock_mutex(&self, thread: usize) -> Option<BiasedLockGuard<'_, T>> {
        let uses = match self.mutex.try_lock() {
            Ok(uses) => uses,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let owner = self.biased_to.load(Ordering::Relaxed);
        if owner == thread {
            // This thread holds the lock itself.
            return None;
        }
        if owner != NO_THREAD {
            self.end_biased_mode();
        }
        if self.is_held_by_owner.load(Ordering::Acquire) != 0 {
            return None;
        }
        Some(self.record_use(uses, thread))
    }

    /// Ends the biased mode. Afterwards the owner either holds the lock and
    /// `is_held_by_owner` is 1, or reads that the mode is plain before it acquires the lock again.
    /// The caller holds the mutex.
    fn end_biased_mode(&self) {
        self.biased_to.store(NO_THREAD, Ordering::Relaxed);
        owner_fence::heavy();
    }

    /// Records an acquisition in the plain mode, and enters the biased mode after a run of the
    /// owner.
    fn record_use<'a>(
        &'a self,
        mut uses: MutexGuard<'a, Uses>,
        thread: usize,
    ) -> BiasedLockGuard<'a, T> {
        if uses.last_thread != thread {
            (uses.last_thread, uses.run_length) = (thread, 0);
        }
        uses.run_length = uses.run_length.saturating_add(1);
        let is_long_run = uses.run_length > BIAS_RUN_LENGTH;
        if is_long_run && [NO_THREAD, thread].contains(&uses.owner) && owner_fence::is_available() {
            (uses.owner, uses.run_length) = (thread, 0);
            self.is_held_by_owner.store(1, Ordering::Relaxed);
            self.biased_to.store(thread, Ordering::Relaxed);
            return self.biased_guard();
        }
        BiasedLockGuard {
            lock: self,
            mutex_guard: Some(uses),
            _not_send: std::marker::PhantomData,
        }
    }
}

impl<T> Deref for BiasedLockGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard's thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for BiasedLockGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard's thread holds the lock, and the guard is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for BiasedLockGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.mutex_guard.is_none() {
            self.lock.release_as_owner();
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn biased_lock() -> Arc<BiasedLock<u32>> {
        register_process();
        let lock = Arc::new(BiasedLock::new(0));
        for _ in 0..=BIAS_RUN_LENGTH {
            *lock.lock() += 1;
        }
        assert_eq!(
            lock.biased_to.load(Ordering::Relaxed),
            current_thread_token()
        );
        lock
    }

    /// Not a test: this is the code of the process that the next test starts.
    #[test]
    #[ignore = "child process of another test"]
    fn subprocess_uses_lock_before_registration() {
        let lock = BiasedLock::new(());
        let use_often = || {
            for _ in 0..=BIAS_RUN_LENGTH {
                drop(lock.lock());
            }
        };
        use_often();
        assert_eq!(lock.biased_to.load(Ordering::Relaxed), NO_THREAD);
        register_process();
        use_often();
        assert_ne!(lock.biased_to.load(Ordering::Relaxed), NO_THREAD);
    }

    /// No use of a lock waits for the kernel to register the process.
    #[test]
    fn lock_is_plain_before_registration() {
        let output = std::process::Command::new(std::env::current_exe().expect("a path"))
            .args([
                "--exact",
                "biased_lock::tests::subprocess_uses_lock_before_registration",
                "--ignored",
            ])
            .output()
            .expect("a process");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
    }

    /// A thread that holds the lock does not acquire it again, in no mode.
    #[test]
    fn holder_does_not_acquire_lock_again() {
        for lock in [Arc::new(BiasedLock::new(0)), biased_lock()] {
            let guard = lock.lock();
            assert!(lock.try_lock().is_none());
            drop(guard);
            assert!(lock.try_lock().is_some());
        }
    }

    /// Another thread ends the biased mode and waits for the owner. Later the lock is biased to the
    /// owner again.
    #[test]
    fn other_thread_waits_for_owner() {
        let lock = biased_lock();
        let mut guard = lock.lock();
        let (attempt_sender, attempts) = std::sync::mpsc::channel();
        let other_thread = std::thread::spawn({
            let lock = lock.clone();
            move || {
                let is_free = lock.try_lock().is_some();
                attempt_sender.send(is_free).expect("the owner waits");
                *lock.lock() *= 2;
            }
        });
        assert_eq!(attempts.recv(), Ok(false), "the owner holds the lock");
        assert_eq!(lock.biased_to.load(Ordering::Relaxed), NO_THREAD);
        *guard += 1;
        drop(guard);
        other_thread.join().expect("the thread ends");
        assert_eq!(*lock.lock(), (BIAS_RUN_LENGTH + 2) * 2);
        for _ in 0..=BIAS_RUN_LENGTH {
            drop(lock.lock());
        }
        assert_eq!(
            lock.biased_to.load(Ordering::Relaxed),
            current_thread_token()
        );
    }

    /// Threads that all use the lock often lose no update.
    #[test]
    fn competing_threads_lose_no_update() {
        register_process();
        const UPDATES_PER_THREAD: u32 = 20 * BIAS_RUN_LENGTH;
        const THREAD_COUNT: u32 = 4;
        let lock = Arc::new(BiasedLock::new(0));
        let threads: Vec<_> = (0..THREAD_COUNT)
            .map(|number| {
                let lock = lock.clone();
                std::thread::spawn(move || {
                    for update in 0..UPDATES_PER_THREAD {
                        let attempt = (number % 2 == 0).then(|| lock.try_lock()).flatten();
                        match attempt {
                            Some(mut count) => *count += 1,
                            None => *lock.lock() += 1,
                        }
                        if update % (2 * BIAS_RUN_LENGTH) == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("the thread ends");
        }
        assert_eq!(*lock.lock(), THREAD_COUNT * UPDATES_PER_THREAD);
    }
}
