//! Formats the results of `bench peers` as a table and as JSON, and writes them.

use crate::curves::CurveResults;
use crate::figures::{
    MeasurementFailure, System, TimeSummaries, TimeSummary, combine_repetitions, spread_above,
};
use crate::floor;
use crate::machine_info::MachineInfo;
use crate::plot::Chart;
use crate::rows::{Measurement, Row, RowGoal};
use crate::systems::{MeasuredRows, SystemResult};
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Maximum number of characters of a failure that the table shows.
const FAILURE_CHARS_MAX: usize = 240;

/// If the medians of a row's repetitions differ by more than this factor, the table lists the
/// smallest and the largest one.
const SPREAD_FACTOR: f64 = 1.5;

/// The results of all systems in one row of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RowResult {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    /// Result in the unit of the row, by system.
    values: BTreeMap<&'static str, f64>,
    /// Summary of the times in all repetitions, by system.
    times: BTreeMap<&'static str, TimeSummary>,
    /// PVM's time divided by ours; `None` if one of them is missing.
    speed_to_pvm: Option<f64>,
    /// Open MPI's time divided by ours; `None` if one of them is missing.
    speed_to_mpi: Option<f64>,
    /// Smallest and largest median of the repetitions in the unit of the row, by system. Contains
    /// only systems in which they differ by more than [`SPREAD_FACTOR`].
    spread: BTreeMap<&'static str, (f64, f64)>,
    goal: String,
    met: Option<bool>,
    #[serde(skip)]
    cells: Vec<String>,
}

/// All results of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    machine: MachineInfo,
    /// Command line that repeats the measurement.
    repeat_with: String,
    rows: Vec<RowResult>,
    /// The summaries of every repetition, by the arguments of the measurement and by system.
    repetitions: BTreeMap<String, BTreeMap<&'static str, Vec<TimeSummaries>>>,
    curves: Vec<Chart>,
    floor: Vec<floor::FloorResult>,
    troubles: Vec<MeasurementFailure>,
}

impl Report {
    /// Creates an empty report. `repeat_with` is the command line that repeats the measurement.
    pub(crate) fn new(machine: MachineInfo, repeat_with: String) -> Report {
        Report {
            machine,
            repeat_with,
            rows: Vec::new(),
            repetitions: BTreeMap::new(),
            curves: Vec::new(),
            floor: Vec::new(),
            troubles: Vec::new(),
        }
    }

    /// Adds the rows of the measurements `chosen`, with their results `measured` in the same order.
    pub(crate) fn add_rows(&mut self, chosen: &[Measurement], measured: MeasuredRows) {
        for (one, given) in chosen.iter().zip(&measured) {
            let what = one.args.join(" ");
            self.rows
                .extend(one.rows.iter().map(|row| make_row_result(row, given)));
            for (system, given) in given {
                let trouble = |why| MeasurementFailure {
                    system: *system,
                    text: format!("{what} on {}: {why}", system.name()),
                };
                self.troubles.extend(given.failure.iter().map(trouble));
            }
            let all = given
                .iter()
                .map(|(system, given)| (system.name(), given.repetitions.clone()));
            self.repetitions.insert(what, all.collect());
        }
        self.machine.update_load();
    }

    pub(crate) fn add_curves(&mut self, curves: CurveResults) {
        self.curves.extend(curves.charts);
        self.troubles.extend(curves.failures);
        self.machine.update_load();
    }

    pub(crate) fn add_floor(&mut self, floor: Vec<floor::FloorResult>) {
        self.floor = floor;
    }

    /// True if a measurement of our system failed. Failures of other systems do not count, because
    /// we cannot correct them.
    pub(crate) fn has_own_failure(&self) -> bool {
        self.troubles
            .iter()
            .any(|trouble| trouble.system == System::Sempa)
    }

    /// Formats the rows as a table.
    fn table(&self) -> String {
        let names = System::ALL.map(System::name);
        let head = [
            "figure",
            names[0],
            names[1],
            names[2],
            names[3],
            "speed to PVM",
            "to Open MPI",
            "goal",
            "met",
        ];
        let mut table: Vec<Vec<String>> = vec![head.map(str::to_string).to_vec()];
        table.extend(self.rows.iter().map(|line| line.cells.clone()));
        let width = |column: usize| {
            table
                .iter()
                .map(|cells| cells[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let mut text = String::new();
        for cells in &table {
            let mut line = format!("{:<1$}", cells[0], widths[0]);
            for (cell, width) in cells.iter().zip(&widths).skip(1) {
                line.push_str(&format!("  {cell:>width$}"));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// Formats the whole report as text: table, curves, floor, machine, failures.
    pub(crate) fn text(&self) -> String {
        let mut text = if self.rows.is_empty() {
            String::new()
        } else {
            self.table()
        };
        for chart in &self.curves {
            text.push_str(&curve_text(chart));
        }
        for (place, line) in self.floor.iter().enumerate() {
            let head = if place == 0 {
                "\nthe machine without any library\n"
            } else {
                ""
            };
            text.push_str(&format!(
                "{head}  {:<60} {:>8} {}\n",
                line.title,
                format_three_digits(line.value),
                line.unit
            ));
        }
        text.push_str(&self.spread_text());
        if !self.rows.is_empty() {
            text.push_str(
                "\ntimes: median (99 of 100); speed to PVM, to Open MPI: how many times faster ours is, of the same run\n",
            );
        }
        text.push_str(&self.machine.text());
        text.push_str(&format!("repeat with: {}\n", self.repeat_with));
        for trouble in &self.troubles {
            // The text is shortened, because the JSON file contains all of it.
            let words: Vec<&str> = trouble
                .text
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .collect();
            let shown: String = words.join(" / ").chars().take(FAILURE_CHARS_MAX).collect();
            text.push_str(&format!("NOT MEASURED: {shown}\n"));
        }
        text
    }

    /// Lists the rows of which the repetitions differ by more than [`SPREAD_FACTOR`]. Their medians
    /// are not reliable.
    fn spread_text(&self) -> String {
        let mut text = String::new();
        for line in &self.rows {
            let ends = |(system, (least, most)): (&&str, &(f64, f64))| {
                format!(
                    "{system} {} to {} {}",
                    format_three_digits(*least),
                    format_three_digits(*most),
                    line.unit
                )
            };
            let all: Vec<String> = line.spread.iter().map(ends).collect();
            if !all.is_empty() {
                text.push_str(&format!("  {:<46} {}\n", line.name, all.join("; ")));
            }
        }
        let head = format!(
            "\nmedians of the repetitions that differ by more than {SPREAD_FACTOR} times\n"
        );
        if text.is_empty() { text } else { head + &text }
    }

    /// Writes `peers.json`, `peers.txt` and one chart per curve to `folder`.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let name = |plain: &str| plain.to_string();
        let mut files = vec![
            (name("peers.json"), serde_json::to_string_pretty(self)?),
            (name("peers.txt"), self.text()),
        ];
        files.extend(
            self.curves.iter().filter_map(|chart| {
                Some((format!("{}.svg", chart.name), chart.logarithmic_svg()?))
            }),
        );
        for (name, text) in files {
            let file = folder.join(name);
            fs::write(&file, text).with_context(|| file.display().to_string())?;
        }
        Ok(())
    }
}

/// Formats the points of a curve as text, one line per series.
fn curve_text(chart: &Chart) -> String {
    let mut text = format!("\n{} ({}: {})\n", chart.title, chart.x, chart.y);
    for series in &chart.series {
        let p99 = |x: f64| {
            series
                .p99
                .iter()
                .find(|point| point.0 == x)
                .map(|point| format!(" ({})", format_three_digits(point.1)))
        };
        let point = |(x, y): &(f64, f64)| {
            format!(
                "{x}: {}{}",
                format_three_digits(*y),
                p99(*x).unwrap_or_default()
            )
        };
        let points: Vec<String> = series.points.iter().map(point).collect();
        text.push_str(&format!("  {:<24} {}\n", series.name, points.join("  ")));
    }
    for own in &chart.series {
        let Some(route) = own.name.strip_prefix(System::Sempa.name()) else {
            continue;
        };
        let theirs = format!("{}{route}", System::Pvm.name());
        let Some(pvm) = chart.series.iter().find(|series| series.name == theirs) else {
            continue;
        };
        let speed = |(x, y): &(f64, f64)| {
            let beside = pvm.points.iter().find(|point| point.0 == *x)?.1;
            let speed = if chart.more_is_better {
                y / beside
            } else {
                beside / y
            };
            Some(format!("{x}: {}x", format_three_digits(speed)))
        };
        let points: Vec<String> = own.points.iter().filter_map(speed).collect();
        text.push_str(&format!(
            "  {:<24} {}\n",
            format!("speed to PVM{route}"),
            points.join("  ")
        ));
    }
    text
}

fn make_row_result(row: &Row, given: &[(System, SystemResult)]) -> RowResult {
    let time = |system: System, name: &str| {
        let own = given.iter().find(|(of, _)| *of == system)?;
        combine_repetitions(&own.1.repetitions, name)
    };
    let mut line = RowResult {
        name: row.name,
        title: row.title,
        unit: row.unit.name(),
        values: BTreeMap::new(),
        times: BTreeMap::new(),
        speed_to_pvm: None,
        speed_to_mpi: None,
        spread: BTreeMap::new(),
        goal: goal_text(row),
        met: None,
        cells: vec![row.title.to_string()],
    };
    for system in System::ALL {
        let cell = time(system, row.sample).map(|time| {
            line.values
                .insert(system.name(), row.unit.convert(time.median_us));
            line.times.insert(system.name(), time);
            value_cell(row, &time)
        });
        line.cells.push(cell.unwrap_or_else(|| "-".to_string()));
    }
    for (system, given) in given {
        if let Some((one, other)) = spread_above(&given.repetitions, row.sample, SPREAD_FACTOR) {
            let (one, other) = (row.unit.convert(one), row.unit.convert(other));
            line.spread
                .insert(system.name(), (one.min(other), one.max(other)));
        }
    }
    let (pvm, own) = (
        time(System::Pvm, row.sample),
        time(System::Sempa, row.sample),
    );
    let speed_to = |other: Option<TimeSummary>| {
        other
            .zip(own)
            .map(|(other, own)| other.median_us / own.median_us)
    };
    (line.speed_to_pvm, line.speed_to_mpi) =
        (speed_to(pvm), speed_to(time(System::OpenMpi, row.sample)));
    let reference = row
        .goal
        .own_ratio_max
        .and_then(|(_, name)| time(System::Sempa, name));
    line.met = own.and_then(|own| {
        is_goal_met(
            row,
            own.median_us,
            pvm.map(|pvm| pvm.median_us),
            reference.map(|one| one.median_us),
        )
    });
    let ratio_text = |speed: Option<f64>| {
        speed.map_or("-".to_string(), |speed| {
            format!("{}x", format_three_digits(speed))
        })
    };
    line.cells.extend([
        ratio_text(line.speed_to_pvm),
        ratio_text(line.speed_to_mpi),
        line.goal.clone(),
    ]);
    line.cells.push(
        line.met
            .map_or("", |met| if met { "yes" } else { "no" })
            .to_string(),
    );
    line
}

fn value_cell(row: &Row, time: &TimeSummary) -> String {
    let value = format!(
        "{} {}",
        format_three_digits(row.unit.convert(time.median_us)),
        row.unit.name()
    );
    if row.unit.is_time() && time.count >= 100 {
        return format!(
            "{value} ({})",
            format_three_digits(row.unit.convert(time.p99_us))
        );
    }
    value
}

/// Formats a number with about three significant digits.
fn format_three_digits(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

fn goal_text(row: &Row) -> String {
    let RowGoal {
        bound,
        pvm_ratio_max: of_pvm,
        own_ratio_max: of_own,
    } = row.goal;
    let sign = if row.unit.is_time() { "<=" } else { ">=" };
    let mut parts: Vec<String> = bound
        .iter()
        .map(|value| format!("{sign} {value} {}", row.unit.name()))
        .collect();
    parts.extend(of_pvm.map(|_| "no slower than PVM".to_string()));
    parts.extend(of_own.map(|(factor, name)| format!("<= {factor} x {}", name.replace('_', " "))));
    parts.join(", ")
}

/// True if our time `own` meets the goal of the row. `pvm` is PVM's time, and `reference` the time
/// to which the goal is relative. All times are in microseconds. `None` if there is no goal or a
/// time is missing.
fn is_goal_met(row: &Row, own: f64, pvm: Option<f64>, reference: Option<f64>) -> Option<bool> {
    let RowGoal {
        bound,
        pvm_ratio_max: of_pvm,
        own_ratio_max: of_own,
    } = row.goal;
    let value = row.unit.convert(own);
    let mut verdicts = Vec::new();
    verdicts.extend(bound.map(|bound| {
        if row.unit.is_time() {
            value <= bound
        } else {
            value >= bound
        }
    }));
    if let Some(factor) = of_pvm {
        verdicts.push(own <= factor * pvm?);
    }
    if let Some((factor, _)) = of_own {
        verdicts.push(own <= factor * reference?);
    }
    (!verdicts.is_empty()).then(|| verdicts.iter().all(|good| *good))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::Series;
    use crate::rows::{self, Unit};

    fn row(unit: Unit, goal: RowGoal) -> Row {
        Row {
            name: "r",
            title: "a row",
            sample: "rtt",
            unit,
            goal,
        }
    }

    fn given(us: f64) -> SystemResult {
        SystemResult {
            repetitions: vec![TimeSummaries::from([(
                "rtt".to_string(),
                TimeSummary::one(us),
            )])],
            failure: None,
        }
    }

    fn line_of(given: &[(System, SystemResult)]) -> RowResult {
        make_row_result(&row(Unit::Micros, RowGoal::default()), given)
    }

    fn report() -> Report {
        Report::new(MachineInfo::describe(false, 1, false), String::new())
    }

    /// A time must not exceed its goal, and a rate must not fall below it.
    #[test]
    fn goals_bound_times_above_and_rates_below() {
        let goal = RowGoal {
            bound: Some(2.0),
            ..RowGoal::default()
        };
        assert_eq!(
            is_goal_met(&row(Unit::Micros, goal), 1.5, None, None),
            Some(true)
        );
        assert_eq!(
            is_goal_met(&row(Unit::Micros, goal), 2.5, None, None),
            Some(false)
        );
        assert_eq!(
            is_goal_met(&row(Unit::MillionsPerSecond, goal), 0.4, None, None),
            Some(true)
        );
        assert_eq!(
            is_goal_met(&row(Unit::MillionsPerSecond, goal), 0.6, None, None),
            Some(false)
        );
    }

    /// Without the time that a goal is relative to, the goal is neither met nor missed.
    #[test]
    fn missing_comparison_gives_no_verdict() {
        let goal = RowGoal {
            pvm_ratio_max: Some(1.0),
            ..RowGoal::default()
        };
        assert_eq!(is_goal_met(&row(Unit::Micros, goal), 1.0, None, None), None);
        assert_eq!(
            is_goal_met(&row(Unit::Micros, goal), 1.0, Some(2.0), None),
            Some(true)
        );
        assert_eq!(
            is_goal_met(&row(Unit::Micros, RowGoal::default()), 1.0, Some(2.0), None),
            None
        );
    }

    /// The speed of a curve is computed from points with the same route and the same x value.
    #[test]
    fn curves_compare_same_route_and_point() {
        let series = |name: &str, y| Series {
            name: name.to_string(),
            points: vec![(8.0, y)],
            p99: vec![(8.0, 2.0 * y)],
        };
        let series = vec![
            series("PVM 3.4.6, direct", 30.0),
            series("PVM 3.4.6", 60.0),
            series("Sempa, direct", 10.0),
        ];
        let chart = |more_is_better| {
            let (name, title, x, y) = (
                "c".to_string(),
                "t".to_string(),
                "bytes".to_string(),
                "us".to_string(),
            );
            curve_text(&Chart {
                name,
                title,
                x,
                y,
                more_is_better,
                series: series.clone(),
            })
        };
        let last = |text: String| text.lines().last().map(str::to_string);
        assert_eq!(
            last(chart(false)).as_deref(),
            Some("  speed to PVM, direct     8: 3.00x")
        );
        assert_eq!(
            last(chart(true)).as_deref(),
            Some("  speed to PVM, direct     8: 0.333x")
        );
        assert!(chart(true).contains("Sempa, direct            8: 10.0 (20.0)"));
    }

    /// The speed is relative to PVM and to Open MPI.
    #[test]
    fn speed_is_relative_to_pvm() {
        let line = line_of(&[(System::Pvm, given(30.0)), (System::Sempa, given(10.0))]);
        assert_eq!(line.speed_to_pvm, Some(3.0));
        assert_eq!(
            line.cells[1..7],
            ["30.0 us", "10.0 us", "-", "-", "3.00x", "-"]
        );
        let line = line_of(&[(System::OpenMpi, given(5.0)), (System::Sempa, given(10.0))]);
        assert_eq!((line.speed_to_pvm, line.speed_to_mpi), (None, Some(0.5)));
    }

    /// If repetitions differ much, the smallest and the largest median are reported for each
    /// system.
    #[test]
    fn spread_is_reported_per_system() {
        let mut two = given(169.0);
        two.repetitions.extend(given(400.0).repetitions);
        let line = line_of(&[(System::Pvm, given(30.0)), (System::Sempa, two)]);
        assert_eq!(line.spread, BTreeMap::from([("Sempa", (169.0, 400.0))]));
        let report = Report {
            rows: vec![line],
            ..report()
        };
        assert!(
            report.text().contains("Sempa 169 to 400 us"),
            "{}",
            report.text()
        );
    }

    /// Only failures of our system make the command fail.
    #[test]
    fn only_our_failures_fail_the_command() {
        let with = |system| {
            let mut report = report();
            let given = vec![(
                system,
                SystemResult {
                    repetitions: Vec::new(),
                    failure: Some("it ended".to_string()),
                },
            )];
            report.add_rows(&[rows::MEASUREMENTS[0]], vec![given]);
            report
        };
        assert!(!with(System::Pvm).has_own_failure());
        assert!(with(System::Pvm).text().contains("NOT MEASURED"));
        assert!(with(System::Sempa).has_own_failure());
    }
}
