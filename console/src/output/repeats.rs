//! Counts repeated lines instead of repeating them.

use sempa_proto::Micros;
use std::collections::VecDeque;

/// Number of different lines within which a repetition is recognized. Two or three causes that
/// alternate count as repetitions, too.
const RECENT_LINES_MAX: usize = 8;
/// Time after which repetitions are reported although they continue.
const REPORT_INTERVAL: Micros = Micros::from_secs(60);

/// A line of a list, with what distinguishes it from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepeatableLine {
    /// The text without its time and without numbers that only count.
    pub(crate) content: String,
    pub(crate) at: Micros,
    /// The time as text, for the report of the last repetition.
    pub(crate) time: String,
}

/// A line that was shown, and its repetitions since.
#[derive(Debug)]
struct RecentLine {
    line: RepeatableLine,
    repeat_count: u64,
    last_time: String,
    /// Time of the last line or report that was shown.
    shown_at: Micros,
}

/// Decides which lines are shown, and how often the others were repeated.
#[derive(Debug, Default)]
pub(crate) struct RepeatCounter {
    recent_lines: VecDeque<RecentLine>,
}

impl RepeatCounter {
    /// Takes the next line. Returns false if it repeats a recent one and must not be shown.
    /// `reports` receives a report for each earlier line whose repetitions are over, or have lasted
    /// for [`REPORT_INTERVAL`].
    pub(crate) fn take(&mut self, line: RepeatableLine, reports: &mut Vec<String>) -> bool {
        let position = self
            .recent_lines
            .iter()
            .position(|recent| recent.line.content == line.content);
        let Some(mut recent) = position.and_then(|index| self.recent_lines.remove(index)) else {
            if self.recent_lines.len() >= RECENT_LINES_MAX {
                reports.extend(self.recent_lines.pop_front().as_ref().and_then(report));
            }
            self.recent_lines.push_back(RecentLine {
                last_time: line.time.clone(),
                shown_at: line.at,
                line,
                repeat_count: 0,
            });
            return true;
        };
        recent.repeat_count += 1;
        recent.last_time = line.time;
        if line.at.since(recent.shown_at) >= REPORT_INTERVAL {
            reports.extend(report(&recent));
            (recent.repeat_count, recent.shown_at) = (0, line.at);
            recent.line.time.clone_from(&recent.last_time);
        }
        self.recent_lines.push_back(recent);
        false
    }

    /// Returns the reports of all repetitions, at the end of the list.
    pub(crate) fn finish(&mut self) -> Vec<String> {
        let recent_lines = std::mem::take(&mut self.recent_lines);
        recent_lines.iter().filter_map(report).collect()
    }
}

/// Returns the report of a line's repetitions; `None` if there were none.
fn report(recent: &RecentLine) -> Option<String> {
    let RecentLine {
        line,
        repeat_count,
        last_time,
        ..
    } = recent;
    let times = if *repeat_count == 1 { "time" } else { "times" };
    (*repeat_count > 0).then(|| {
        format!(
            "{last_time} {} ({repeat_count} more {times} since {})",
            line.content, line.time
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(lines: &[(&str, &str)]) -> Vec<String> {
        let (mut counter, mut out) = (RepeatCounter::default(), Vec::new());
        for (time, content) in lines {
            let line = RepeatableLine {
                content: content.to_string(),
                at: Micros::from_secs(time.parse().expect("a number")),
                time: time.to_string(),
            };
            let mut reports = Vec::new();
            let is_shown = counter.take(line, &mut reports);
            out.append(&mut reports);
            if is_shown {
                out.push(format!("{time} {content}"));
            }
        }
        out.extend(counter.finish());
        out
    }

    /// A line that repeats is shown once and counted, also if others come in between.
    #[test]
    fn repetitions_are_counted() {
        assert_eq!(
            shown(&[("1", "a"), ("2", "b"), ("3", "a"), ("4", "a"), ("5", "c")]),
            ["1 a", "2 b", "5 c", "4 a (2 more times since 1)"]
        );
        assert_eq!(
            shown(&[("1", "a"), ("2", "a")]),
            ["1 a", "2 a (1 more time since 1)"]
        );
        assert_eq!(shown(&[("1", "a"), ("2", "b")]), ["1 a", "2 b"]);
    }

    /// Repetitions that go on are reported once a minute.
    #[test]
    fn lasting_repetitions_are_reported() {
        assert_eq!(
            shown(&[("1", "a"), ("2", "a"), ("61", "a"), ("62", "a")]),
            [
                "1 a",
                "61 a (2 more times since 1)",
                "62 a (1 more time since 61)"
            ]
        );
    }

    /// A line that comes back after many others is news.
    #[test]
    fn late_repetition_is_shown_again() {
        let others: Vec<String> = (0..RECENT_LINES_MAX).map(|n| n.to_string()).collect();
        let mut lines = vec![("1", "a"), ("2", "a")];
        lines.extend(others.iter().map(|other| ("3", other.as_str())));
        lines.push(("4", "a"));
        let shown = shown(&lines);
        assert!(shown.contains(&"2 a (1 more time since 1)".to_string()));
        assert_eq!(shown.last().map(String::as_str), Some("4 a"));
    }
}
