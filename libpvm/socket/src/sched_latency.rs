//! Scheduling latency of threads that need little processor time but delay others.
//!
//! Linux runs the thread with the earliest deadline first. A thread that requests a short slice has
//! earlier deadlines: it runs soon and briefly, and its share of the processor stays the same. A
//! daemon needs this next to compute-bound programs: with the default slice it waits several
//! milliseconds each time.
#![allow(unsafe_code)] // The calls for a thread's scheduling attributes have no safe form in the crates we use.

use nix::unistd::gettid;
use std::mem::MaybeUninit;

/// Shortest slice that the kernel accepts.
const SLICE_NS: u64 = 100_000;

/// Nice value of a boosted thread.
const BOOSTED_NICE: i32 = -15;

/// Requests a short slice for this thread; threads and processes that it starts are not affected.
/// Linux supports this from 6.12 on. Nothing changes if the kernel does not support it, does not
/// permit it, or if the process has another scheduling policy.
pub fn request_short_slice() {
    if let Some(mut asked) = sched_attributes() {
        apply_with_short_slice(&mut asked);
    }
}

/// As [`request_short_slice`], and gives this thread precedence over threads with the default nice
/// value. A thread that needs little time, but more than one short slice, waits for 10 ms and more
/// next to compute-bound programs otherwise. Without the required privilege, or if the process
/// already has another nice value, it only requests short slices.
pub fn boost_priority() {
    let Some(mut asked) = sched_attributes() else {
        return;
    };
    if asked.sched_nice == 0 {
        asked.sched_nice = BOOSTED_NICE;
        if apply_with_short_slice(&mut asked) {
            return;
        }
        asked.sched_nice = 0;
    }
    apply_with_short_slice(&mut asked);
}

/// Returns the scheduling attributes of this thread, if its policy is the default one.
fn sched_attributes() -> Option<libc::sched_attr> {
    let mut attributes = MaybeUninit::<libc::sched_attr>::zeroed();
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the kernel writes at most `size` bytes, only into the value, which lives through the
    // call.
    let known = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            gettid().as_raw(),
            attributes.as_mut_ptr(),
            size,
            0,
        )
    };
    // SAFETY: the value was all zeros, which is valid for these integers, and the kernel has
    // written integers.
    let attributes = unsafe { attributes.assume_init() };
    (known == 0 && attributes.sched_policy == libc::SCHED_OTHER.cast_unsigned())
        .then_some(attributes)
}

/// Applies the attributes with a short slice to this thread, but to none that it starts. Returns
/// false if the kernel refuses.
fn apply_with_short_slice(attributes: &mut libc::sched_attr) -> bool {
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_runtime = SLICE_NS;
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

    /// Returns the nice value of this thread.
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
    fn boosted_thread_starts_normal_threads() {
        let before = nice();
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("this is Linux");
        let rights = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .expect("every process has some");
        let may_raise =
            u64::from_str_radix(rights.trim(), 16).expect("hexadecimal") & (1 << 23) != 0;
        let (own, started) = std::thread::spawn(|| {
            boost_priority();
            (nice(), std::thread::spawn(nice).join().expect("no panic"))
        })
        .join()
        .expect("no panic");
        assert_eq!(started, before);
        assert!(
            own == if may_raise && before == 0 {
                BOOSTED_NICE
            } else {
                before
            },
            "{own}"
        );
    }

    #[test]
    fn short_slice_keeps_nice_and_is_not_inherited() {
        let before = nice();
        request_short_slice();
        assert_eq!(nice(), before);
        let turn = || std::fs::read_to_string("/proc/thread-self/sched");
        let of = |text: &str| {
            text.lines()
                .find(|line| line.starts_with("se.slice"))
                .map(str::to_string)
        };
        // Not every kernel reports it.
        if let Some(own) = turn().ok().as_deref().and_then(of) {
            let started = std::thread::spawn(move || turn().ok().as_deref().and_then(of))
                .join()
                .expect("no panic");
            assert_ne!(Some(own), started);
        }
    }
}
