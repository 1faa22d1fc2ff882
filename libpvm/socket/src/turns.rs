//! How soon a thread gets the processor that has little to do and that others wait for.
//!
//! Linux gives turns to those whose deadline is first, and who asks for short turns has earlier deadlines: it comes soon, for a
//! little while, and gets no more of the processor than before. Whoever passes on the words of others wants that beside
//! programs that compute all the time: there a daemon with turns of the usual length waits for some milliseconds each time.
#![allow(unsafe_code)] // The calls for a thread's scheduling attributes have no safe form in the crates we use.

use nix::unistd::gettid;
use std::mem::MaybeUninit;

/// Shorter is not possible.
const TURN_NS: u64 = 100_000;

/// How urgent a thread is that others must not keep from the processor.
const FIRST: i32 = -15;

/// Asks for short turns for this thread; not for those that it will start, nor for its children. Known from Linux 6.12 on; where
/// it is not, or not allowed, or where somebody has chosen another policy for this process, nothing changes.
pub fn take_short_turns() {
    if let Some(mut asked) = attributes() {
        set(&mut asked);
    }
}

/// As [`take_short_turns`], and this thread comes before all that are as urgent as usual: who has little to do, but more than fits
/// into one short turn, waits for ten milliseconds and more behind programs that compute. Without the right to be more
/// urgent than others, or where somebody has chosen how urgent this process is, it only takes short turns.
pub fn come_first() {
    let Some(mut asked) = attributes() else {
        return;
    };
    if asked.sched_nice == 0 {
        asked.sched_nice = FIRST;
        if set(&mut asked) {
            return;
        }
        asked.sched_nice = 0;
    }
    set(&mut asked);
}

/// What holds for this thread now, if its policy is the usual one.
fn attributes() -> Option<libc::sched_attr> {
    let mut attributes = MaybeUninit::<libc::sched_attr>::zeroed();
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the kernel writes at most `size` bytes, and only into the value, which lives through the call.
    let known = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            gettid().as_raw(),
            attributes.as_mut_ptr(),
            size,
            0,
        )
    };
    // SAFETY: it was all zeros before, which is valid for these numbers, and the kernel has written numbers.
    let attributes = unsafe { attributes.assume_init() };
    (known == 0 && attributes.sched_policy == libc::SCHED_OTHER.cast_unsigned())
        .then_some(attributes)
}

/// Has this hold for this thread, with short turns, but for none that it starts. False if the kernel refuses.
fn set(attributes: &mut libc::sched_attr) -> bool {
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_runtime = TURN_NS;
    attributes.sched_flags = libc::SCHED_FLAG_RESET_ON_FORK.cast_unsigned().into();
    // SAFETY: the kernel reads `size` bytes of the value, which lives through the call.
    unsafe {
        libc::syscall(
            libc::SYS_sched_setattr,
            gettid().as_raw(),
            &raw const *attributes,
            0,
        ) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How urgent this thread is.
    fn nice() -> i32 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("this is Linux");
        let behind_name = &stat[stat.rfind(')').expect("a name") + 2..];
        behind_name
            .split(' ')
            .nth(16)
            .expect("many numbers")
            .parse()
            .expect("a number")
    }

    #[test]
    fn a_thread_that_comes_first_starts_others_that_are_as_urgent_as_usual() {
        let before = nice();
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("this is Linux");
        let rights = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .expect("every process has some");
        let may_raise =
            u64::from_str_radix(rights.trim(), 16).expect("hexadecimal") & (1 << 23) != 0;
        let (own, started) = std::thread::spawn(|| {
            come_first();
            (nice(), std::thread::spawn(nice).join().expect("no panic"))
        })
        .join()
        .expect("no panic");
        assert_eq!(started, before);
        assert!(
            own == if may_raise && before == 0 {
                FIRST
            } else {
                before
            },
            "{own}"
        );
    }

    #[test]
    fn a_thread_with_short_turns_is_as_urgent_as_before_and_starts_others_with_usual_ones() {
        let before = nice();
        take_short_turns();
        assert_eq!(nice(), before);
        let turn = || std::fs::read_to_string("/proc/thread-self/sched");
        let of = |text: &str| {
            text.lines()
                .find(|line| line.starts_with("se.slice"))
                .map(str::to_string)
        };
        // Not every kernel tells.
        if let Some(own) = turn().ok().as_deref().and_then(of) {
            let started = std::thread::spawn(move || turn().ok().as_deref().and_then(of))
                .join()
                .expect("no panic");
            assert_ne!(Some(own), started);
        }
    }
}
