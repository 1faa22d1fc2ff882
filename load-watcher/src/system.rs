//! Access to the system's time of day and local time, and to the nice levels of threads.
//!
//! Two C functions are called directly (`localtime_r`, `setpriority`), because no crate that the
//! project uses wraps them.
#![allow(unsafe_code)] // foreign functions can only be called so

use crate::hours::LocalTime;
use nix::libc;
use procfs::process::Process;
use sempa_proto::Micros;
use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Converts a duration to microseconds; returns the maximum if the duration does not fit.
pub fn to_micros(span: Duration) -> Micros {
    Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
}

/// Returns the time of day, in microseconds since 1970.
pub fn time_of_day() -> Micros {
    to_micros(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// Returns the day of the week and the minute at this time of day (seconds since 1970), in the time
/// zone of the machine or of `TZ`.
pub fn local_time(seconds: u64) -> LocalTime {
    let time = libc::time_t::try_from(seconds).unwrap_or(0);
    let mut parts = MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both pointers refer to live values of the right type. An all-zero `tm` is valid, so
    // it may be read even if the call fails.
    let parts = unsafe {
        libc::localtime_r(&raw const time, parts.as_mut_ptr());
        parts.assume_init()
    };
    // In `tm_wday`, 0 is Sunday.
    let day = (parts.tm_wday.rem_euclid(7) + 6) % 7;
    let minute = parts.tm_hour.clamp(0, 23) * 60 + parts.tm_min.clamp(0, 59);
    LocalTime {
        day: day as u8,
        minute: minute as u16,
    }
}

/// Returns the ids of all threads of a process.
///
/// # Errors
/// The process does not exist.
pub(crate) fn thread_ids(pid: i32) -> io::Result<impl Iterator<Item = i32>> {
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let threads = threads.map_err(io::Error::other)?;
    Ok(threads.flatten().map(|thread| thread.tid))
}

/// Raises the nice level of each thread of a process to at least `level`.
///
/// # Errors
/// The error of the last thread that failed; threads that have exited do not count.
pub fn raise_nice(pid: i32, level: i32) -> io::Result<()> {
    let mut result = Ok(());
    for thread in thread_ids(pid)? {
        let thread = thread.cast_unsigned();
        // SAFETY: the call takes and returns only numbers.
        let now = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread) };
        // SAFETY: the call takes and returns only numbers.
        if now < level && unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, level) } != 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ESRCH) {
                result = Err(error);
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_time_is_near_utc() {
        // 2001-09-09T01:46:40Z was a Sunday. Every time zone differs from UTC by at most fourteen
        // hours.
        let at = local_time(1_000_000_000);
        let minutes = i32::from(at.day) * 1440 + i32::from(at.minute);
        let universal = 6 * 1440 + 106;
        let apart = (minutes - universal).rem_euclid(7 * 1440);
        assert!(apart <= 14 * 60 || apart >= 7 * 1440 - 14 * 60, "{at:?}");
    }

    /// A process whose own nice level is higher than requested keeps it.
    #[test]
    fn nice_level_is_only_raised() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let pid = child.id().cast_signed();
        let level = || {
            let stat = Process::new(pid).and_then(|process| process.stat());
            stat.expect("it lives").nice
        };
        raise_nice(pid, 7).expect("nicer is always allowed");
        let first = level();
        raise_nice(pid, 3).expect("nothing to do");
        let second = level();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert!(first >= 7 && second == first, "{first} {second}");
        assert!(raise_nice(pid, 3).is_err(), "there is no such process");
    }
}
