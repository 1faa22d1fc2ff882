//! How soon a thread gets the processor that has little to do and that others wait for.
//!
//! Linux gives turns to those whose deadline is first, and who asks for short turns has earlier deadlines: it comes soon, for a
//! little while, and gets no more of the processor than before. Whoever passes on the words of others wants that beside
//! programs that compute all the time: there a daemon with turns of the usual length waits for some milliseconds each time.

use nix::unistd::gettid;
use std::mem::MaybeUninit;

/// Shorter is not possible.
const TURN_NS: u64 = 100_000;

/// Asks for short turns for this thread; not for those that it will start, nor for its children. Known from Linux 6.12 on; where
/// it is not, or not allowed, or where somebody has chosen another policy for this process, nothing changes.
pub fn take_short_turns() {
    let mut attributes = MaybeUninit::<libc::sched_attr>::zeroed();
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the kernel writes at most `size` bytes, and only into the value, which lives through the call.
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, gettid().as_raw(), attributes.as_mut_ptr(), size, 0) };
    // SAFETY: it was all zeros before, which is valid for these numbers, and the kernel has written numbers.
    let mut attributes = unsafe { attributes.assume_init() };
    if known != 0 || attributes.sched_policy != libc::SCHED_OTHER.cast_unsigned() {
        return;
    }
    attributes.size = size;
    attributes.sched_runtime = TURN_NS;
    attributes.sched_flags = libc::SCHED_FLAG_RESET_ON_FORK.cast_unsigned().into();
    // SAFETY: the kernel reads `size` bytes of the value, which lives through the call.
    unsafe { libc::syscall(libc::SYS_sched_setattr, gettid().as_raw(), &raw const attributes, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_with_short_turns_is_as_urgent_as_before_and_starts_others_with_usual_ones() {
        let nice = || {
            std::fs::read_to_string("/proc/thread-self/stat").map(|text| text.split(' ').nth(18).map(str::to_string))
        };
        let before = nice().expect("this is Linux");
        take_short_turns();
        assert_eq!(nice().expect("this is Linux"), before);
        let turn = || std::fs::read_to_string("/proc/thread-self/sched");
        let of = |text: &str| text.lines().find(|line| line.starts_with("se.slice")).map(str::to_string);
        // Not every kernel tells.
        if let Some(own) = turn().ok().as_deref().and_then(of) {
            let started = std::thread::spawn(move || turn().ok().as_deref().and_then(of)).join().expect("no panic");
            assert_ne!(Some(own), started);
        }
    }
}
