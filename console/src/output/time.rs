//! Formats times: in the zone of the user for sentences, in UTC for programs.

use jiff::{Timestamp, Zoned, tz::TimeZone};
use sempa_proto::Micros;

/// Returns the time in the zone that `TZ` or the host's settings name. A time outside the calendar
/// (year 9999) becomes the beginning of 1970.
fn zoned(at: Micros, zone: TimeZone) -> Zoned {
    let timestamp = i64::try_from(at.0).ok().map(Timestamp::from_microsecond);
    let timestamp = timestamp.and_then(Result::ok).unwrap_or_default();
    timestamp.to_zoned(zone)
}

/// Formats a time in UTC with milliseconds, such as `2026-11-21T09:34:01.123Z`, for JSON.
pub(crate) fn format_utc(at: Micros) -> String {
    let time = zoned(at, TimeZone::UTC);
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// Formats a time in the user's zone with milliseconds and the zone, such as
/// `2026-11-21 10:34:01.123 CET`, for sentences and tables.
pub(crate) fn format_local(at: Micros) -> String {
    format_in_zone(at, TimeZone::system())
}

fn format_in_zone(at: Micros, zone: TimeZone) -> String {
    let time = zoned(at, zone);
    time.strftime("%Y-%m-%d %H:%M:%S%.3f %Z").to_string()
}

/// Formats a time of day in the user's zone, such as `10:34:01 CET`, for times of the present day.
pub(crate) fn format_local_time(at: Micros) -> String {
    let time = zoned(at, TimeZone::system());
    time.strftime("%H:%M:%S %Z").to_string()
}

/// Formats a time in the user's zone as C's `ctime` does, such as `Sat Nov 21 09:34:01 2026`.
pub(crate) fn format_ctime(at: Micros) -> String {
    ctime_in_zone(at, TimeZone::system())
}

fn ctime_in_zone(at: Micros, zone: TimeZone) -> String {
    let time = zoned(at, zone);
    time.strftime("%a %b %e %H:%M:%S %Y").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_civil_dates() {
        assert_eq!(format_utc(Micros(0)), "1970-01-01T00:00:00.000Z");
        assert_eq!(
            format_utc(Micros(951_782_400_000_000)),
            "2000-02-29T00:00:00.000Z"
        );
        assert_eq!(
            format_utc(Micros(1_735_689_599_999_999)),
            "2024-12-31T23:59:59.999Z"
        );
        assert_eq!(
            ctime_in_zone(Micros(0), TimeZone::UTC),
            "Thu Jan  1 00:00:00 1970"
        );
        assert_eq!(
            ctime_in_zone(Micros(1_795_275_167_412_550), TimeZone::UTC),
            "Sat Nov 21 15:32:47 2026"
        );
    }

    /// A sentence has the time of the zone and its name, in winter and in summer.
    #[test]
    fn local_times_name_their_zone() {
        let zone = || TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").expect("a zone");
        assert_eq!(
            format_in_zone(Micros(1_795_275_167_412_550), zone()),
            "2026-11-21 16:32:47.412 CET"
        );
        assert_eq!(
            format_in_zone(Micros(1_782_000_000_000_000), zone()),
            "2026-06-21 02:00:00.000 CEST"
        );
        assert_eq!(
            format_in_zone(Micros(u64::MAX), TimeZone::UTC),
            "1970-01-01 00:00:00.000 UTC"
        );
    }
}
