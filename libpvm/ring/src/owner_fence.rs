//! The two unequal fences of a [`BiasedLock`](crate::biased_lock::BiasedLock): a light one for its
//! owner, which only restrains the compiler, and a heavy one for the other threads, which is a
//! system call.

#[cfg(feature = "loom")]
pub(crate) use model::*;
#[cfg(not(feature = "loom"))]
pub(crate) use system::*;

#[cfg(not(feature = "loom"))]
mod system {
    #![allow(unsafe_code)] // `membarrier` and the thread pointer have no safe form.

    use crate::futex;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, compiler_fence};

    /// Number of reads of the flag before a thread sleeps until the owner clears the flag.
    const READS_BEFORE_SLEEP: u32 = 100;

    /// Returns a number that is never 0 and that no other running thread of the process has.
    #[inline]
    pub(crate) fn current_thread_token() -> usize {
        #[cfg(target_arch = "x86_64")]
        {
            let thread_pointer: usize;
            // SAFETY: the x86-64 ABI stores the thread pointer at offset 0 from `fs`.
            unsafe {
                std::arch::asm!(
                    "mov {}, fs:0",
                    out(reg) thread_pointer,
                    options(pure, readonly, nostack, preserves_flags)
                );
            }
            thread_pointer
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            thread_local! {
                static PLACE: u8 = const { 0 };
            }
            PLACE.with(|place| std::ptr::from_ref(place) as usize)
        }
    }

    /// Orders the owner's accesses for [`heavy`] fences of other threads.
    #[inline]
    pub(crate) fn light() {
        compiler_fence(Ordering::SeqCst);
    }

    fn call_membarrier(command: libc::c_int) -> bool {
        // SAFETY: `membarrier` accesses no memory of the program.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    fn register() -> bool {
        call_membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
    }

    /// True if this kernel has the heavy fence and this process may use it. No thread waits for
    /// another one to set the flag: a forked child does not have the thread that would set it.
    static IS_AVAILABLE: AtomicBool = AtomicBool::new(false);

    /// Registers this process for the heavy fence. In a process with several threads the kernel
    /// needs about 10 ms for the first call; further calls return at once.
    pub(crate) fn register_process() {
        if register() {
            IS_AVAILABLE.store(true, Ordering::Relaxed);
        }
    }

    /// True if [`register_process`] was successful.
    #[inline]
    pub(crate) fn is_available() -> bool {
        IS_AVAILABLE.load(Ordering::Relaxed)
    }

    /// Executes a full fence in every running thread of the process. The kernel must have it
    /// ([`is_available`]).
    ///
    /// # Panics
    /// The kernel refuses the call, so the caller cannot know whether the owner holds the lock.
    pub(crate) fn heavy() {
        let fence_all = || call_membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
        // A forked child and a process that was restored from an image are not registered.
        let is_done = fence_all()
            || (register() && fence_all())
            || call_membarrier(libc::MEMBARRIER_CMD_GLOBAL);
        assert!(
            is_done,
            "the kernel refuses membarrier, which it had before"
        );
    }

    /// Waits for a while, or until the owner has cleared the flag.
    pub(crate) fn wait_while_held(is_held: &AtomicU32) {
        for _ in 0..READS_BEFORE_SLEEP {
            if is_held.load(Ordering::Relaxed) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        futex::wait(is_held, 1, None);
    }

    /// Wakes the thread that waits in [`wait_while_held`].
    #[cold]
    pub(crate) fn wake_waiter(is_held: &AtomicU32) {
        futex::wake_all(is_held);
    }
}

#[cfg(feature = "loom")]
mod model {
    use crate::sync::{AtomicU32, Ordering, fence};

    /// Returns a number that only the calling thread of the model has.
    pub(crate) fn current_thread_token() -> usize {
        let id = loom::thread::current().id();
        // The identifiers of the model have no number; their texts end with one.
        let text = format!("{id:?}");
        let digits = text.chars().filter(char::is_ascii_digit);
        digits.collect::<String>().parse::<usize>().unwrap_or(0) + 1
    }

    /// In the model a full fence stands in both places: the heavy fence puts one into each thread.
    pub(crate) fn light() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy() {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn register_process() {}

    pub(crate) fn is_available() -> bool {
        true
    }

    pub(crate) fn wait_while_held(_is_held: &AtomicU32) {
        loom::thread::yield_now();
    }

    pub(crate) fn wake_waiter(_is_held: &AtomicU32) {}
}
