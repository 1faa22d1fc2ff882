//! Names of checkpoints. A name is also the name of a directory, so it consists only of letters,
//! digits and hyphens, and only its canonical form is accepted.

use sempa_proto::{Micros, Tid};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The last second since 1970 whose year has four digits.
const SECOND_MAX: u64 = 253_402_300_799;
const DAY_SECONDS: u64 = 86_400;

/// The name of a checkpoint: the job, the start time (UTC), and a number that distinguishes
/// checkpoints of the same second, for example `t40001-20261122T141503-1`.
///
/// Names are ordered by age. The names of one job increase even if the clock is set back; in that
/// case the time in the name is later than the clock's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId {
    start_second: u64,
    sequence_number: u32,
    job: Tid,
}

/// A text that is not the name of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not the name of a checkpoint; names look like t40001-20261122T141503-1")]
pub struct InvalidCheckpointId(pub String);

impl CheckpointId {
    pub fn job(&self) -> Tid {
        self.job
    }

    /// Returns a name for a new checkpoint of this job. The name is greater than the existing names
    /// of the job. `now` is the start time of the checkpoint.
    pub(super) fn next_id(existing_ids: impl Iterator<Item = Self>, job: Tid, now: Micros) -> Self {
        let start_second = (now.0 / 1_000_000).min(SECOND_MAX);
        let newest_id = existing_ids.filter(|id| id.job == job).max();
        match newest_id {
            Some(newest_id) if newest_id.start_second >= start_second => Self {
                start_second: newest_id.start_second,
                sequence_number: newest_id.sequence_number.saturating_add(1),
                job,
            },
            _ => Self {
                start_second,
                sequence_number: 1,
                job,
            },
        }
    }
}

impl fmt::Display for CheckpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = date_from_days(self.start_second / DAY_SECONDS);
        let second = self.start_second % DAY_SECONDS;
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(
            f,
            "{}-{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}-{}",
            self.job, self.sequence_number
        )
    }
}

impl FromStr for CheckpointId {
    type Err = InvalidCheckpointId;

    fn from_str(text: &str) -> Result<Self, InvalidCheckpointId> {
        // Accepts only the text that `Display` writes: no signs, no leading zeros, no 31st of
        // February.
        parse_id(text)
            .filter(|id| id.to_string() == text)
            .ok_or_else(|| InvalidCheckpointId(text.chars().take(64).collect()))
    }
}

fn parse_id(text: &str) -> Option<CheckpointId> {
    let mut parts = text.split('-');
    let job = u32::from_str_radix(parts.next()?.strip_prefix('t')?, 16).ok()?;
    let (date, time) = parts.next()?.split_once('T')?;
    let sequence_number = parts.next()?.parse().ok()?;
    let parse_digits =
        |text: &str, start: usize, end: usize| text.get(start..end)?.parse::<u64>().ok();
    let days = days_from_date(
        parse_digits(date, 0, 4)?,
        parse_digits(date, 4, 6)?,
        parse_digits(date, 6, 8)?,
    )?;
    let second_of_day = parse_digits(time, 0, 2)? * 3600
        + parse_digits(time, 2, 4)? * 60
        + parse_digits(time, 4, 6)?;
    Some(CheckpointId {
        start_second: days * DAY_SECONDS + second_of_day,
        sequence_number,
        job: Tid::from_raw(job as i32),
    })
}

/// Converts the number of days since 1970 to (year, month, day). In the computation years begin in
/// March, so that the leap day is the last day of its year.
fn date_from_days(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

/// Converts a date to the number of days since 1970. An invalid date results in a wrong number or
/// `None`.
fn days_from_date(year: u64, month: u64, day: u64) -> Option<u64> {
    let year = if month <= 2 {
        year.checked_sub(1)?
    } else {
        year
    };
    let month = if month > 2 { month - 3 } else { month + 9 };
    let (era, year) = (year / 400, year % 400);
    let day_of_year = (153 * month + 2) / 5 + day;
    (era * 146_097 + year * 365 + year / 4 - year / 100 + day_of_year).checked_sub(719_469)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Tid = Tid::from_raw(0x40001);

    fn first_id(start_second: u64) -> CheckpointId {
        CheckpointId::next_id(std::iter::empty(), JOB, Micros::from_secs(start_second))
    }

    #[test]
    fn name_contains_job_and_time() {
        assert_eq!(
            first_id(1_795_356_903).to_string(),
            "t40001-20261122T141503-1"
        );
        assert_eq!(first_id(0).to_string(), "t40001-19700101T000000-1");
        assert_eq!(
            first_id(951_782_400).to_string(),
            "t40001-20000229T000000-1"
        );
        assert_eq!(
            first_id(u64::MAX / 1_000_000).to_string(),
            "t40001-99991231T235959-1"
        );
    }

    #[test]
    fn names_survive_formatting_and_parsing() {
        for start_second in (0..SECOND_MAX).step_by(86_399 * 7 + 1) {
            let id = first_id(start_second);
            assert_eq!(id.to_string().parse(), Ok(id));
        }
    }

    #[test]
    fn non_canonical_names_are_refused() {
        for text in [
            "",
            ".",
            "..",
            "lock",
            "../t40001-20261122T141503-1",
            "t40001-20261122T141503-1/..",
            "t40001-20261122T141503-1\0",
            " t40001-20261122T141503-1",
            "t40001-20261122T141503-01",
            "t40001-20261122T141503-+1",
            "t40001-20261122T141503--1",
            "t40001-20261122T141503-1-1",
            "t+40001-20261122T141503-1",
            "t040001-20261122T141503-1",
            "T40001-20261122T141503-1",
            "t4000G-20261122T141503-1",
            "t40001-20260230T141503-1",
            "t40001-20261322T141503-1",
            "t40001-20260022T141503-1",
            "t40001-20261100T141503-1",
            "t40001-20261122T241503-1",
            "t40001-20261122T146003-1",
            "t40001-00000101T000000-1",
            "t40001-20261122T141503-4294967296",
            "t40001-2026112é14150-1",
        ] {
            assert!(text.parse::<CheckpointId>().is_err(), "{text:?}");
        }
    }

    /// Later names of a job are greater even if the clock is set back.
    #[test]
    fn names_of_a_job_increase_despite_clock_changes() {
        let mut existing_ids = Vec::new();
        for clock_second in [1000, 1000, 1000, 2000, 500, 2000, 2001] {
            let id = CheckpointId::next_id(
                existing_ids.iter().copied(),
                JOB,
                Micros::from_secs(clock_second),
            );
            assert!(existing_ids.iter().all(|older_id| *older_id < id), "{id}");
            existing_ids.push(id);
        }
        let other_job = Tid::from_raw(0x40002);
        let id = CheckpointId::next_id(
            existing_ids.iter().copied(),
            other_job,
            Micros::from_secs(500),
        );
        assert_eq!(
            id.to_string(),
            "t40002-19700101T000820-1",
            "another job's clock is its own"
        );
    }
}
