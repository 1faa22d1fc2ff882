//! Time ranges of the week in policy files: `9-17`, `mon-fri 9:00-17:30`, `sat,sun`, `fri 22-6`,
//! `always`. Pure.

use serde::Deserialize;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Names of the days of the week, in the order of their indices.
const DAY_NAMES: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const MINUTES_PER_DAY: u16 = 24 * 60;

/// A minute of the week in local time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    /// Day of the week: 0 is Monday, 6 is Sunday.
    pub day: u8,
    /// Minutes since midnight, below 1440.
    pub minute: u16,
}

/// A time range that applies on one or more days of the week. If the end of the range is not after
/// its start, the range extends over midnight and belongs to the day on which the range starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct WeeklyHours {
    days: [bool; 7],
    #[serde(rename = "from")]
    start_minute: u16,
    #[serde(rename = "to")]
    end_minute: u16,
}

/// Error of a text that is not a time range of the week; contains the text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} is not a time of the week; examples: '9-17', 'mon-fri 9:00-17:30', 'sat,sun', 'always'"
)]
pub struct HoursError(String);

impl WeeklyHours {
    /// True if the minute `at` is in the time range. The end of the range is excluded.
    pub fn contains(&self, at: LocalTime) -> bool {
        let (includes_today, includes_yesterday) = (
            self.days[usize::from(at.day % 7)],
            self.days[usize::from((at.day + 6) % 7)],
        );
        if self.start_minute < self.end_minute {
            includes_today && (self.start_minute..self.end_minute).contains(&at.minute)
        } else {
            (includes_today && at.minute >= self.start_minute)
                || (includes_yesterday && at.minute < self.end_minute)
        }
    }

    /// Returns the same times as ranges that do not extend over midnight: one range, or two if this
    /// range extends over midnight.
    fn split_at_midnight(&self) -> Vec<Self> {
        if self.start_minute < self.end_minute {
            return vec![*self];
        }
        let mut following_days = self.days;
        following_days.rotate_right(1);
        let evening_part = Self {
            end_minute: MINUTES_PER_DAY,
            ..*self
        };
        let morning_part = Self {
            days: following_days,
            start_minute: 0,
            end_minute: self.end_minute,
        };
        [evening_part, morning_part]
            .into_iter()
            .filter(|part| part.start_minute < part.end_minute)
            .collect()
    }

    /// Returns the times that are in this range and in `other`, as a list of ranges.
    pub fn intersection(&self, other: &Self) -> Vec<Self> {
        let intersect_parts = |a: Self, b: &Self| {
            let days = std::array::from_fn(|day| a.days[day] && b.days[day]);
            Self {
                days,
                start_minute: a.start_minute.max(b.start_minute),
                end_minute: a.end_minute.min(b.end_minute),
            }
        };
        let (own_parts, other_parts) = (self.split_at_midnight(), other.split_at_midnight());
        let intersections = own_parts
            .into_iter()
            .flat_map(|a| other_parts.iter().map(move |b| intersect_parts(a, b)));
        intersections
            .filter(|part| part.start_minute < part.end_minute && part.days.contains(&true))
            .collect()
    }
}

fn parse_day(text: &str) -> Option<usize> {
    DAY_NAMES
        .iter()
        .position(|name| text.eq_ignore_ascii_case(name))
}

fn parse_days(text: &str) -> Option<[bool; 7]> {
    let mut included_days = [false; 7];
    for part in text.split(',') {
        let (first_day, last_day) = part.split_once('-').unwrap_or((part, part));
        let (first_day, last_day) = (parse_day(first_day)?, parse_day(last_day)?);
        let mut i = first_day;
        while i != last_day {
            included_days[i] = true;
            i = (i + 1) % 7;
        }
        included_days[last_day] = true;
    }
    Some(included_days)
}

fn parse_minute(text: &str) -> Option<u16> {
    let (hours, minutes) = text.split_once(':').unwrap_or((text, "0"));
    let is_short_number = |part: &str| {
        !part.is_empty() && part.len() <= 2 && part.bytes().all(|b| b.is_ascii_digit())
    };
    if !is_short_number(hours) || !is_short_number(minutes) {
        return None;
    }
    let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
    Some(hours * 60 + minutes)
        .filter(|total_minutes| minutes < 60 && *total_minutes <= MINUTES_PER_DAY)
}

fn parse_minute_range(text: &str) -> Option<(u16, u16)> {
    let (start, end) = text.split_once('-')?;
    let (start, end) = (parse_minute(start)?, parse_minute(end)?);
    (start != end && start < MINUTES_PER_DAY).then_some((start, end))
}

impl FromStr for WeeklyHours {
    type Err = HoursError;

    fn from_str(text: &str) -> Result<Self, HoursError> {
        let tokens: Vec<&str> = text.split_whitespace().collect();
        let whole_day = (0, MINUTES_PER_DAY);
        let days_and_range = match tokens[..] {
            ["always"] => Some(([true; 7], whole_day)),
            [token] => match (parse_days(token), parse_minute_range(token)) {
                (Some(days), _) => Some((days, whole_day)),
                (None, minute_range) => minute_range.map(|minute_range| ([true; 7], minute_range)),
            },
            [days_token, range_token] => {
                parse_days(days_token).zip(parse_minute_range(range_token))
            }
            _ => None,
        };
        let (days, (start_minute, end_minute)) =
            days_and_range.ok_or_else(|| HoursError(text.to_string()))?;
        Ok(Self {
            days,
            start_minute,
            end_minute,
        })
    }
}

impl TryFrom<String> for WeeklyHours {
    type Error = HoursError;

    fn try_from(text: String) -> Result<Self, HoursError> {
        text.parse()
    }
}

impl fmt::Display for WeeklyHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_whole_day = (self.start_minute, self.end_minute) == (0, MINUTES_PER_DAY);
        let is_every_day = self.days == [true; 7];
        if is_whole_day && is_every_day {
            return f.write_str("always");
        }
        if !is_every_day {
            let mut parts: Vec<String> = Vec::new();
            let mut i = 0;
            while i < 7 {
                let consecutive_day_count = self.days[i..]
                    .iter()
                    .take_while(|is_selected| **is_selected)
                    .count();
                match consecutive_day_count {
                    0 => {}
                    1 => parts.push(DAY_NAMES[i].to_string()),
                    _ => parts.push(format!(
                        "{}-{}",
                        DAY_NAMES[i],
                        DAY_NAMES[i + consecutive_day_count - 1]
                    )),
                }
                i += consecutive_day_count.max(1);
            }
            f.write_str(&parts.join(","))?;
        }
        if !is_whole_day {
            let clock_text = |m: u16| format!("{}:{:02}", m / 60, m % 60);
            write!(
                f,
                "{}{}-{}",
                if is_every_day { "" } else { " " },
                clock_text(self.start_minute),
                clock_text(self.end_minute)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse_hours(text: &str) -> WeeklyHours {
        text.parse().expect("good")
    }

    fn local_time(day: u8, hour: u16, minute: u16) -> LocalTime {
        LocalTime {
            day,
            minute: hour * 60 + minute,
        }
    }

    /// A time range includes its first minute and excludes the minute of its end.
    #[test]
    fn hours_include_start_and_exclude_end() {
        let office_hours = parse_hours("mon-fri 9-17:30");
        assert!(
            !office_hours.contains(local_time(0, 8, 59))
                && office_hours.contains(local_time(0, 9, 0))
                && office_hours.contains(local_time(4, 17, 29))
        );
        assert!(
            !office_hours.contains(local_time(4, 17, 30))
                && !office_hours.contains(local_time(5, 12, 0))
        );
        assert!(
            parse_hours("sat,sun").contains(local_time(6, 23, 59))
                && !parse_hours("sat,sun").contains(local_time(0, 0, 0))
        );
        assert!(
            parse_hours("22-24").contains(local_time(2, 23, 59))
                && parse_hours("always").contains(local_time(3, 3, 3))
        );
    }

    /// Hours over midnight belong to the day on which they start. Hours that start on Sunday extend
    /// into Monday.
    #[test]
    fn hours_over_midnight_belong_to_start_day() {
        let night_hours = parse_hours("fri 22-6");
        assert!(
            night_hours.contains(local_time(4, 22, 0))
                && night_hours.contains(local_time(5, 5, 59))
        );
        assert!(
            !night_hours.contains(local_time(4, 5, 0))
                && !night_hours.contains(local_time(5, 22, 0))
                && !night_hours.contains(local_time(5, 6, 0))
        );
        assert!(
            parse_hours("sun 23-1").contains(local_time(0, 0, 30)),
            "the week goes round"
        );
        assert!(
            parse_hours("sat-mon 1-2").contains(local_time(6, 1, 0))
                && parse_hours("sat-mon 1-2").contains(local_time(0, 1, 0))
        );
    }

    #[test]
    fn malformed_hours_are_refused_and_quoted() {
        for text in [
            "",
            "9",
            "9-9",
            "25-26",
            "9-17-18",
            "mon 9-17 x",
            "monday",
            "9:60-10",
            "24-3",
            "-",
            "9:001-10",
        ] {
            let error = text.parse::<WeeklyHours>().expect_err(text).to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    proptest! {
        #[test]
        fn formatted_hours_parse_unchanged(days in any::<[bool; 7]>(), from in 0_u16..1440, to in 1_u16..=1440) {
            prop_assume!(from != to && days.contains(&true));
            let hours = WeeklyHours { days, start_minute: from, end_minute: to };
            prop_assert_eq!(hours.to_string().parse::<WeeklyHours>(), Ok(hours));
        }

        /// The intersection of two time ranges contains exactly the minutes that are in both.
        #[test]
        fn intersection_contains_common_minutes(
            days in any::<[[bool; 7]; 2]>(), from in any::<[u16; 2]>(), to in any::<[u16; 2]>(), day in 0_u8..7, minute in 0_u16..1440,
        ) {
            let [a, b] = std::array::from_fn(|i| WeeklyHours { days: days[i], start_minute: from[i] % 1440, end_minute: to[i] % 1440 + 1 });
            let moments = [minute, a.start_minute, b.start_minute, a.end_minute % 1440, b.end_minute % 1440].map(|minute| LocalTime { day, minute });
            for at in moments {
                prop_assert_eq!(a.intersection(&b).iter().any(|part| part.contains(at)), a.contains(at) && b.contains(at));
            }
        }

        #[test]
        fn any_text_is_accepted_or_refused(text in "[a-z0-9 :,-]{0,20}|.{0,20}") {
            let _ = text.parse::<WeeklyHours>();
        }
    }
}
