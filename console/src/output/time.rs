//! Formats times as dates in UTC.

use sempa_proto::Micros;

/// A date and a time of day in UTC.
struct CivilTime {
    year: u64,
    /// Counts from 1 to 12.
    month: u64,
    /// Counts from 1 to 31.
    day: u64,
    second_of_day: u64,
    /// Days since the last Sunday.
    weekday: usize,
}

impl CivilTime {
    fn new(at: Micros) -> Self {
        let seconds = at.0 / 1_000_000;
        let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
        // Converts days since 1970 to a civil date, in 400-year eras that begin on 1 March.
        let shifted_days = days + 719_468;
        let (era, day_of_era) = (shifted_days / 146_097, shifted_days % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        // 1 January 1970 was a Thursday.
        Self {
            year,
            month,
            day,
            second_of_day,
            weekday: ((days + 4) % 7) as usize,
        }
    }

    fn time_of_day(&self) -> String {
        format!(
            "{:02}:{:02}:{:02}",
            self.second_of_day / 3600,
            self.second_of_day / 60 % 60,
            self.second_of_day % 60
        )
    }
}

/// Formats a time in UTC with milliseconds, such as `2026-11-21T09:34:01.123Z`.
pub(crate) fn format_utc(at: Micros) -> String {
    let civil_time = CivilTime::new(at);
    let CivilTime {
        year, month, day, ..
    } = civil_time;
    format!(
        "{year:04}-{month:02}-{day:02}T{}.{:03}Z",
        civil_time.time_of_day(),
        at.0 / 1000 % 1000
    )
}

/// Formats a time in UTC as C's `ctime` does, such as `Sat Nov 21 09:34:01 2026`.
pub(crate) fn format_ctime(at: Micros) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let civil_time = CivilTime::new(at);
    let (weekday, month) = (
        DAYS[civil_time.weekday],
        MONTHS[civil_time.month as usize - 1],
    );
    format!(
        "{weekday} {month} {:2} {} {}",
        civil_time.day,
        civil_time.time_of_day(),
        civil_time.year
    )
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
        assert_eq!(format_ctime(Micros(0)), "Thu Jan  1 00:00:00 1970");
        assert_eq!(
            format_ctime(Micros(1_735_689_599_999_999)),
            "Tue Dec 31 23:59:59 2024"
        );
        assert_eq!(
            format_ctime(Micros(1_795_275_167_412_550)),
            "Sat Nov 21 15:32:47 2026"
        );
    }
}
