//! The two calls of the system that no crate here wraps, the clock on the wall and the nice level of a thread; and the time of
//! day.
#![allow(unsafe_code)] // foreign functions can only be called so

use crate::hours::WallClock;
use nix::libc;
use sempa_proto::Micros;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A span, as far as it can be expressed.
pub fn micros(span: Duration) -> Micros {
    Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX))
}

/// The time of day.
pub fn wall() -> Micros {
    micros(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// The clock on the wall at this time of day (seconds since 1970), in the time zone of this machine or of `TZ`.
pub fn wall_clock(seconds: u64) -> WallClock {
    let time = libc::time_t::try_from(seconds).unwrap_or(0);
    let mut parts = MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both point to values of the right type that live long enough; all-zero is a valid `tm`, so that it may be
    // read whatever the call does.
    let parts = unsafe {
        libc::localtime_r(&raw const time, parts.as_mut_ptr());
        parts.assume_init()
    };
    // 0 is Sunday there.
    let day = (parts.tm_wday.rem_euclid(7) + 6) % 7;
    let minute = parts.tm_hour.clamp(0, 23) * 60 + parts.tm_min.clamp(0, 59);
    WallClock {
        day: day as u8,
        minute: minute as u16,
    }
}

/// All threads of a process.
///
/// # Errors
/// There is no such process.
pub(crate) fn threads(pid: i32) -> io::Result<impl Iterator<Item = i32>> {
    let entries = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// Makes all threads of a process at least this nice. One that is nicer already stays so.
///
/// # Errors
/// What the system said of the last thread that refused; threads that have ended do not count.
pub fn make_nice(pid: i32, level: i32) -> io::Result<()> {
    let mut result = Ok(());
    for thread in threads(pid)? {
        let thread = thread.cast_unsigned();
        // SAFETY: only numbers go in and out.
        let now = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread) };
        // SAFETY: only numbers go in and out.
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
    fn the_wall_clock_tells_day_and_minute_somewhere_near_universal_time() {
        // 2001-09-09T01:46:40Z, a Sunday: wherever this runs, it is within fourteen hours of it.
        let at = wall_clock(1_000_000_000);
        let minutes = i32::from(at.day) * 1440 + i32::from(at.minute);
        let universal = 6 * 1440 + 106;
        let apart = (minutes - universal).rem_euclid(7 * 1440);
        assert!(apart <= 14 * 60 || apart >= 7 * 1440 - 14 * 60, "{at:?}");
    }

    #[test]
    fn a_process_gets_nicer_and_never_less_nice() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let pid = child.id().cast_signed();
        let level = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
            let rest = stat.rsplit_once(')').expect("a name").1;
            rest.split_whitespace()
                .nth(16)
                .and_then(|n| n.parse::<i32>().ok())
                .expect("a nice level")
        };
        make_nice(pid, 7).expect("nicer is always allowed");
        let first = level();
        make_nice(pid, 3).expect("nothing to do");
        let second = level();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert!(first >= 7 && second == first, "{first} {second}");
        assert!(make_nice(pid, 3).is_err(), "there is no such process");
    }
}
