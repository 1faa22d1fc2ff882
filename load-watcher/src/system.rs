//! Access to the system's time of day and local time, and to the nice levels of threads.
//!
//! Two C functions are called directly (`localtime_r`, `setpriority`), because no crate that the
//! project uses wraps them.
#![allow(unsafe_code)] // foreign functions can only be called so

use crate::hours::LocalTime;
use nix::libc;
use procfs::process::Process;
use sempa_proto::Micros;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Converts a duration to microseconds. A duration that does not fit becomes the maximum value.
pub fn to_micros(duration: Duration) -> Micros {
    Micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

/// Returns the time of day, in microseconds since 1970.
pub fn time_of_day() -> Micros {
    to_micros(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// Returns a time in the time zone of `TZ` or of the machine.
fn broken_down_time(unix_seconds: u64) -> libc::tm {
    let c_time = libc::time_t::try_from(unix_seconds).unwrap_or(0);
    let mut tm_value = MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both pointers refer to live values of the right type. An all-zero `tm` is valid, so
    // the value may be read even if the call fails.
    unsafe {
        libc::localtime_r(&raw const c_time, tm_value.as_mut_ptr());
        tm_value.assume_init()
    }
}

/// Returns the day of the week and the minute of the day at a time, in the time zone of `TZ` or of
/// the machine. `unix_seconds` is the time in seconds since 1970.
pub fn local_time(unix_seconds: u64) -> LocalTime {
    let tm_value = broken_down_time(unix_seconds);
    // In `tm_wday`, 0 is Sunday.
    let day = (tm_value.tm_wday.rem_euclid(7) + 6) % 7;
    let minute = tm_value.tm_hour.clamp(0, 23) * 60 + tm_value.tm_min.clamp(0, 59);
    LocalTime {
        day: day as u8,
        minute: minute as u16,
    }
}

/// Describes a time by the clock to which the owner's hours refer: "10:41, CEST (UTC+02:00)".
/// `unix_seconds` is the time in seconds since 1970.
pub fn describe_clock(unix_seconds: u64) -> String {
    let tm_value = broken_down_time(unix_seconds);
    let zone = if tm_value.tm_zone.is_null() {
        String::new()
    } else {
        // SAFETY: `tm_zone` points to a text of the C library that is never freed.
        unsafe { CStr::from_ptr(tm_value.tm_zone) }
            .to_string_lossy()
            .into_owned()
    };
    let (hour, minute) = (tm_value.tm_hour, tm_value.tm_min);
    format!(
        "{hour:02}:{minute:02}, {}",
        describe_zone(&zone, tm_value.tm_gmtoff)
    )
}

/// Describes a time zone by its abbreviation and its offset from UTC.
fn describe_zone(zone: &str, offset_seconds: i64) -> String {
    let (sign, minutes) = (
        if offset_seconds < 0 { '-' } else { '+' },
        offset_seconds.unsigned_abs() / 60,
    );
    let offset = format!("UTC{sign}{:02}:{:02}", minutes / 60, minutes % 60);
    match zone {
        "UTC" | "" => "UTC".to_string(),
        // Zones without an abbreviation have a number instead.
        _ if zone.starts_with(['+', '-']) => offset,
        _ => format!("{zone} ({offset})"),
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

/// Raises the nice level of each thread of a process to at least `level`. Threads with a higher
/// level keep their level.
///
/// # Errors
/// The process does not exist, or the error of the last thread whose level could not be changed. A
/// thread that has exited causes no error.
pub fn raise_nice_level(pid: i32, level: i32) -> io::Result<()> {
    let mut last_result = Ok(());
    for thread_id in thread_ids(pid)? {
        let thread_id = thread_id.cast_unsigned();
        // SAFETY: the call takes and returns only numbers.
        let current_level = unsafe { libc::getpriority(libc::PRIO_PROCESS, thread_id) };
        if current_level >= level {
            continue;
        }
        // SAFETY: the call takes and returns only numbers.
        if unsafe { libc::setpriority(libc::PRIO_PROCESS, thread_id, level) } != 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::ESRCH) {
                last_result = Err(error);
            }
        }
    }
    last_result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_time_is_near_utc() {
        // 2001-09-09T01:46:40Z was a Sunday. Every time zone differs from UTC by at most fourteen
        // hours.
        let local_time_of_week = local_time(1_000_000_000);
        let local_minute =
            i32::from(local_time_of_week.day) * 1440 + i32::from(local_time_of_week.minute);
        let utc_minute = 6 * 1440 + 106;
        let difference_minutes = (local_minute - utc_minute).rem_euclid(7 * 1440);
        assert!(
            difference_minutes <= 14 * 60 || difference_minutes >= 7 * 1440 - 14 * 60,
            "{local_time_of_week:?}"
        );
    }

    /// The time zone of a clock is stated with its offset.
    #[test]
    fn clock_names_its_zone() {
        for (zone, offset_seconds, expected) in [
            ("CEST", 7200, "CEST (UTC+02:00)"),
            ("NST", -12_600, "NST (UTC-03:30)"),
            ("UTC", 0, "UTC"),
            ("+0545", 20_700, "UTC+05:45"),
        ] {
            assert_eq!(describe_zone(zone, offset_seconds), expected);
        }
        let clock = describe_clock(1_000_000_000);
        assert!(clock.contains(':') && clock.contains(", "), "{clock}");
    }

    /// The nice level is raised to the requested level. A level that is higher than requested is
    /// kept.
    #[test]
    fn nice_level_is_only_raised() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let pid = child.id().cast_signed();
        let nice_level = || {
            let stat = Process::new(pid).and_then(|process| process.stat());
            stat.expect("it lives").nice
        };
        raise_nice_level(pid, 7).expect("nicer is always allowed");
        let initial_level = nice_level();
        raise_nice_level(pid, 3).expect("nothing to do");
        let raised_level = nice_level();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert!(
            initial_level >= 7 && raised_level == initial_level,
            "{initial_level} {raised_level}"
        );
        assert!(
            raise_nice_level(pid, 3).is_err(),
            "there is no such process"
        );
    }
}
