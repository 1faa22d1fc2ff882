//! Reduces the scheduling latency of threads that need little processor time but delay other
//! threads.
//!
//! Linux runs the thread with the earliest deadline first. A thread that requests a short slice has
//! earlier deadlines: it runs soon and briefly, and its share of the processor stays the same. A
//! daemon next to compute-bound programs needs a short slice: with the default slice it would wait
//! several milliseconds each time.
#![allow(unsafe_code)] // The calls for a thread's scheduling attributes have no safe form in the crates we use.

use nix::unistd::gettid;
use std::mem::MaybeUninit;

/// Minimum slice that the kernel accepts, in nanoseconds.
const SHORT_SLICE_NS: u64 = 100_000;

/// Nice value that [`boost_priority`] sets.
const BOOSTED_NICE: i32 = -15;

/// Requests a short slice for the calling thread. Threads and processes that the calling thread
/// starts do not inherit the short slice. Linux supports short slices since version 6.12. The call
/// has no effect if the kernel does not support or permit short slices, or if the thread does not
/// have the default scheduling policy.
pub fn request_short_slice() {
    if let Some(mut attributes) = sched_attributes() {
        apply_with_short_slice(&mut attributes);
    }
}

/// Requests a short slice as [`request_short_slice`] does, and sets the nice value of the calling
/// thread to `BOOSTED_NICE`. With the default nice value, a thread that needs more than one short
/// slice waits for 10 ms and more next to compute-bound programs. Without the required privilege,
/// or if the process already has another nice value, the nice value is unchanged.
pub fn boost_priority() {
    let Some(mut attributes) = sched_attributes() else {
        return;
    };
    if attributes.sched_nice == 0 {
        attributes.sched_nice = BOOSTED_NICE;
        if apply_with_short_slice(&mut attributes) {
            return;
        }
        attributes.sched_nice = 0;
    }
    apply_with_short_slice(&mut attributes);
}

/// Returns the scheduling attributes of the calling thread; `None` if the thread has another
/// scheduling policy than the default, or if the kernel does not return the attributes.
fn sched_attributes() -> Option<libc::sched_attr> {
    let mut attributes = MaybeUninit::<libc::sched_attr>::zeroed();
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: the kernel writes at most `size` bytes, only into the value, which lives through the
    // call.
    let status = unsafe {
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
    (status == 0 && attributes.sched_policy == libc::SCHED_OTHER.cast_unsigned())
        .then_some(attributes)
}

/// Applies the attributes with a short slice to the calling thread. Threads that the calling thread
/// starts do not inherit the attributes. Returns false if the kernel refuses.
fn apply_with_short_slice(attributes: &mut libc::sched_attr) -> bool {
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_runtime = SHORT_SLICE_NS;
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

    fn current_nice() -> i32 {
        let stat_text = std::fs::read_to_string("/proc/thread-self/stat").expect("this is Linux");
        let stat_fields = &stat_text[stat_text.rfind(')').expect("a name") + 2..];
        stat_fields
            .split(' ')
            .nth(16)
            .expect("many numbers")
            .parse()
            .expect("a number")
    }

    #[test]
    fn boosted_thread_starts_normal_threads() {
        let initial_nice = current_nice();
        let status_text =
            std::fs::read_to_string("/proc/thread-self/status").expect("this is Linux");
        let capability_mask = status_text
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .expect("every process has some");
        let has_nice_capability =
            u64::from_str_radix(capability_mask.trim(), 16).expect("hexadecimal") & (1 << 23) != 0;
        let (boosted_nice, child_nice) = std::thread::spawn(|| {
            boost_priority();
            (
                current_nice(),
                std::thread::spawn(current_nice).join().expect("no panic"),
            )
        })
        .join()
        .expect("no panic");
        assert_eq!(child_nice, initial_nice);
        assert!(
            boosted_nice
                == if has_nice_capability && initial_nice == 0 {
                    BOOSTED_NICE
                } else {
                    initial_nice
                },
            "{boosted_nice}"
        );
    }

    #[test]
    fn short_slice_keeps_nice_and_is_not_inherited() {
        let initial_nice = current_nice();
        request_short_slice();
        assert_eq!(current_nice(), initial_nice);
        let read_sched = || std::fs::read_to_string("/proc/thread-self/sched");
        let slice_line = |text: &str| {
            text.lines()
                .find(|line| line.starts_with("se.slice"))
                .map(str::to_string)
        };
        // Not every kernel reports the slice.
        if let Some(own_slice) = read_sched().ok().as_deref().and_then(slice_line) {
            let new_thread_slice =
                std::thread::spawn(move || read_sched().ok().as_deref().and_then(slice_line))
                    .join()
                    .expect("no panic");
            assert_ne!(Some(own_slice), new_thread_slice);
        }
    }
}
