//! Time ranges of the week in policy files: `9-17`, `mon-fri 9:00-17:30`, `sat,sun`, `fri 22-6`,
//! `always`. Pure.

use serde::Deserialize;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const DAY_MINUTES: u16 = 24 * 60;

/// A minute of the week in local time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalTime {
    /// Day of the week; 0 is Monday.
    pub day: u8,
    /// Minutes since midnight, below 1440.
    pub minute: u16,
}

/// The same time range on one or more days of the week. If the end is not after the start, the
/// range extends over midnight and belongs to the day on which it starts.
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
    "{0:?} is no time of the week; it looks like '9-17', 'mon-fri 9:00-17:30', 'sat,sun' or 'always'"
)]
pub struct HoursError(String);

impl WeeklyHours {
    /// True if the minute is in the time range. The end of the range is excluded.
    pub fn contains(&self, at: LocalTime) -> bool {
        let (today, yesterday) = (
            self.days[usize::from(at.day % 7)],
            self.days[usize::from((at.day + 6) % 7)],
        );
        if self.start_minute < self.end_minute {
            today && (self.start_minute..self.end_minute).contains(&at.minute)
        } else {
            (today && at.minute >= self.start_minute) || (yesterday && at.minute < self.end_minute)
        }
    }

    /// Splits a time range that extends over midnight into ranges that do not.
    fn split_at_midnight(&self) -> Vec<WeeklyHours> {
        if self.start_minute < self.end_minute {
            return vec![*self];
        }
        let mut next_day = self.days;
        next_day.rotate_right(1);
        let evening = WeeklyHours {
            end_minute: DAY_MINUTES,
            ..*self
        };
        let morning = WeeklyHours {
            days: next_day,
            start_minute: 0,
            end_minute: self.end_minute,
        };
        [evening, morning]
            .into_iter()
            .filter(|part| part.start_minute < part.end_minute)
            .collect()
    }

    /// Returns the time that both ranges have in common, as a list of ranges.
    pub fn intersection(&self, other: &WeeklyHours) -> Vec<WeeklyHours> {
        let meet = |a: WeeklyHours, b: &WeeklyHours| {
            let days = std::array::from_fn(|day| a.days[day] && b.days[day]);
            WeeklyHours {
                days,
                start_minute: a.start_minute.max(b.start_minute),
                end_minute: a.end_minute.min(b.end_minute),
            }
        };
        let (mine, theirs) = (self.split_at_midnight(), other.split_at_midnight());
        let all = mine
            .into_iter()
            .flat_map(|a| theirs.iter().map(move |b| meet(a, b)));
        all.filter(|part| part.start_minute < part.end_minute && part.days.contains(&true))
            .collect()
    }
}

fn parse_day(text: &str) -> Option<usize> {
    DAYS.iter().position(|name| text.eq_ignore_ascii_case(name))
}

fn parse_days(text: &str) -> Option<[bool; 7]> {
    let mut all = [false; 7];
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (parse_day(first)?, parse_day(last)?);
        let mut i = first;
        while i != last {
            all[i] = true;
            i = (i + 1) % 7;
        }
        all[last] = true;
    }
    Some(all)
}

fn parse_minute(text: &str) -> Option<u16> {
    let (hours, minutes) = text.split_once(':').unwrap_or((text, "0"));
    let short = |part: &str| {
        !part.is_empty() && part.len() <= 2 && part.bytes().all(|b| b.is_ascii_digit())
    };
    if !short(hours) || !short(minutes) {
        return None;
    }
    let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
    Some(hours * 60 + minutes).filter(|all| minutes < 60 && *all <= DAY_MINUTES)
}

fn parse_minute_range(text: &str) -> Option<(u16, u16)> {
    let (from, to) = text.split_once('-')?;
    let (from, to) = (parse_minute(from)?, parse_minute(to)?);
    (from != to && from < DAY_MINUTES).then_some((from, to))
}

impl FromStr for WeeklyHours {
    type Err = HoursError;

    fn from_str(text: &str) -> Result<WeeklyHours, HoursError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let whole = (0, DAY_MINUTES);
        let parsed = match words[..] {
            ["always"] => Some(([true; 7], whole)),
            [one] => match (parse_days(one), parse_minute_range(one)) {
                (Some(days), _) => Some((days, whole)),
                (None, span) => span.map(|span| ([true; 7], span)),
            },
            [first, second] => parse_days(first).zip(parse_minute_range(second)),
            _ => None,
        };
        let (days, (from, to)) = parsed.ok_or_else(|| HoursError(text.to_string()))?;
        Ok(WeeklyHours {
            days,
            start_minute: from,
            end_minute: to,
        })
    }
}

impl TryFrom<String> for WeeklyHours {
    type Error = HoursError;

    fn try_from(text: String) -> Result<WeeklyHours, HoursError> {
        text.parse()
    }
}

impl fmt::Display for WeeklyHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = (self.start_minute, self.end_minute) == (0, DAY_MINUTES);
        let all = self.days == [true; 7];
        if whole && all {
            return f.write_str("always");
        }
        if !all {
            let mut parts: Vec<String> = Vec::new();
            let mut i = 0;
            while i < 7 {
                let run = self.days[i..].iter().take_while(|on| **on).count();
                match run {
                    0 => {}
                    1 => parts.push(DAYS[i].to_string()),
                    _ => parts.push(format!("{}-{}", DAYS[i], DAYS[i + run - 1])),
                }
                i += run.max(1);
            }
            f.write_str(&parts.join(","))?;
        }
        if !whole {
            let clock = |m: u16| format!("{}:{:02}", m / 60, m % 60);
            write!(
                f,
                "{}{}-{}",
                if all { "" } else { " " },
                clock(self.start_minute),
                clock(self.end_minute)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hours(text: &str) -> WeeklyHours {
        text.parse().expect("good")
    }

    fn at(day: u8, hour: u16, minute: u16) -> LocalTime {
        LocalTime {
            day,
            minute: hour * 60 + minute,
        }
    }

    /// A time range includes its first minute and excludes its end.
    #[test]
    fn hours_include_start_and_exclude_end() {
        let office = hours("mon-fri 9-17:30");
        assert!(
            !office.contains(at(0, 8, 59))
                && office.contains(at(0, 9, 0))
                && office.contains(at(4, 17, 29))
        );
        assert!(!office.contains(at(4, 17, 30)) && !office.contains(at(5, 12, 0)));
        assert!(
            hours("sat,sun").contains(at(6, 23, 59)) && !hours("sat,sun").contains(at(0, 0, 0))
        );
        assert!(hours("22-24").contains(at(2, 23, 59)) && hours("always").contains(at(3, 3, 3)));
    }

    /// A time range over midnight belongs to the day on which it starts, even at the end of the
    /// week.
    #[test]
    fn hours_over_midnight_belong_to_start_day() {
        let night = hours("fri 22-6");
        assert!(night.contains(at(4, 22, 0)) && night.contains(at(5, 5, 59)));
        assert!(
            !night.contains(at(4, 5, 0))
                && !night.contains(at(5, 22, 0))
                && !night.contains(at(5, 6, 0))
        );
        assert!(
            hours("sun 23-1").contains(at(0, 0, 30)),
            "the week goes round"
        );
        assert!(
            hours("sat-mon 1-2").contains(at(6, 1, 0))
                && hours("sat-mon 1-2").contains(at(0, 1, 0))
        );
    }

    /// A malformed time range is refused with an error that quotes it.
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
        /// A formatted time range is parsed into the same time range.
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

        /// Any text is parsed or refused without a panic.
        #[test]
        fn any_text_is_accepted_or_refused(text in "[a-z0-9 :,-]{0,20}|.{0,20}") {
            let _ = text.parse::<WeeklyHours>();
        }
    }
}
