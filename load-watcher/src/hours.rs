//! Times of the week in policy files: `9-17`, `mon-fri 9:00-17:30`, `sat,sun`, `fri 22-6`,
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

/// The same hours on one or more days. If the end is not after the start, the hours extend over
/// midnight and belong to the day on which they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Hours {
    days: [bool; 7],
    from: u16,
    to: u16,
}

/// Error of a text that is not a time of the week.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} is not a time of the week; examples: '9-17', 'mon-fri 9:00-17:30', 'sat,sun', 'always'"
)]
pub struct HoursError(String);

impl Hours {
    /// True if the minute lies in these hours; the end itself does not.
    pub fn contains(&self, at: LocalTime) -> bool {
        let (today, yesterday) = (
            self.days[usize::from(at.day % 7)],
            self.days[usize::from((at.day + 6) % 7)],
        );
        if self.from < self.to {
            today && (self.from..self.to).contains(&at.minute)
        } else {
            (today && at.minute >= self.from) || (yesterday && at.minute < self.to)
        }
    }

    /// Splits hours that extend over midnight, so that no part does.
    fn split_at_midnight(&self) -> Vec<Hours> {
        if self.from < self.to {
            return vec![*self];
        }
        let mut next_day = self.days;
        next_day.rotate_right(1);
        let evening = Hours {
            to: DAY_MINUTES,
            ..*self
        };
        let morning = Hours {
            days: next_day,
            from: 0,
            to: self.to,
        };
        [evening, morning]
            .into_iter()
            .filter(|part| part.from < part.to)
            .collect()
    }

    /// Returns the hours that both have in common.
    pub fn intersection(&self, other: &Hours) -> Vec<Hours> {
        let meet = |a: Hours, b: &Hours| {
            let days = std::array::from_fn(|day| a.days[day] && b.days[day]);
            Hours {
                days,
                from: a.from.max(b.from),
                to: a.to.min(b.to),
            }
        };
        let (mine, theirs) = (self.split_at_midnight(), other.split_at_midnight());
        let all = mine
            .into_iter()
            .flat_map(|a| theirs.iter().map(move |b| meet(a, b)));
        all.filter(|part| part.from < part.to && part.days.contains(&true))
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

fn parse_span(text: &str) -> Option<(u16, u16)> {
    let (from, to) = text.split_once('-')?;
    let (from, to) = (parse_minute(from)?, parse_minute(to)?);
    (from != to && from < DAY_MINUTES).then_some((from, to))
}

impl FromStr for Hours {
    type Err = HoursError;

    fn from_str(text: &str) -> Result<Hours, HoursError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let whole = (0, DAY_MINUTES);
        let parsed = match words[..] {
            ["always"] => Some(([true; 7], whole)),
            [one] => match (parse_days(one), parse_span(one)) {
                (Some(days), _) => Some((days, whole)),
                (None, span) => span.map(|span| ([true; 7], span)),
            },
            [first, second] => parse_days(first).zip(parse_span(second)),
            _ => None,
        };
        let (days, (from, to)) = parsed.ok_or_else(|| HoursError(text.to_string()))?;
        Ok(Hours { days, from, to })
    }
}

impl TryFrom<String> for Hours {
    type Error = HoursError;

    fn try_from(text: String) -> Result<Hours, HoursError> {
        text.parse()
    }
}

impl fmt::Display for Hours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = (self.from, self.to) == (0, DAY_MINUTES);
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
                clock(self.from),
                clock(self.to)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hours(text: &str) -> Hours {
        text.parse().expect("good")
    }

    fn at(day: u8, hour: u16, minute: u16) -> LocalTime {
        LocalTime {
            day,
            minute: hour * 60 + minute,
        }
    }

    /// Hours include their first minute and exclude their end.
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

    /// Hours over midnight belong to the day on which they start, even at the end of the week.
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

    /// Malformed hours are refused with an error that quotes them.
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
            let error = text.parse::<Hours>().expect_err(text).to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    proptest! {
        /// Formatted hours are parsed unchanged.
        #[test]
        fn formatted_hours_parse_unchanged(days in any::<[bool; 7]>(), from in 0_u16..1440, to in 1_u16..=1440) {
            prop_assume!(from != to && days.contains(&true));
            let hours = Hours { days, from, to };
            prop_assert_eq!(hours.to_string().parse::<Hours>(), Ok(hours));
        }

        /// The intersection of two hours contains exactly the minutes that both contain.
        #[test]
        fn intersection_contains_common_minutes(
            days in any::<[[bool; 7]; 2]>(), from in any::<[u16; 2]>(), to in any::<[u16; 2]>(), day in 0_u8..7, minute in 0_u16..1440,
        ) {
            let [a, b] = std::array::from_fn(|i| Hours { days: days[i], from: from[i] % 1440, to: to[i] % 1440 + 1 });
            let moments = [minute, a.from, b.from, a.to % 1440, b.to % 1440].map(|minute| LocalTime { day, minute });
            for at in moments {
                prop_assert_eq!(a.intersection(&b).iter().any(|part| part.contains(at)), a.contains(at) && b.contains(at));
            }
        }

        /// Any text is parsed or refused without a panic.
        #[test]
        fn any_text_is_accepted_or_refused(text in "[a-z0-9 :,-]{0,20}|.{0,20}") {
            let _ = text.parse::<Hours>();
        }
    }
}
