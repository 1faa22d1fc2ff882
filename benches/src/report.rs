//! Formats the results of `bench peers` as a table, as JSON and as charts, and writes the files.

use crate::curves::CurveResults;
use crate::figures::{
    MeasurementFailure, System, TimeSummaries, TimeSummary, combine_repetitions, median_range_above,
};
use crate::floor;
use crate::machine_info::MachineInfo;
use crate::peers_table_rows::{Measurement, Row, RowGoals};
use crate::plot::Chart;
use crate::systems::{MeasuredRows, SystemResult};
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Maximum number of characters of a failure's text in the table.
const FAILURE_CHARS_MAX: usize = 240;

/// If the largest median of a row's repetitions exceeds the smallest median by more than this
/// factor, the table lists both.
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
    /// PVM's time divided by Sempa's time; `None` if a time is missing.
    speed_to_pvm: Option<f64>,
    /// Open MPI's time divided by Sempa's time; `None` if a time is missing.
    speed_to_mpi: Option<f64>,
    /// Smallest and largest median of the repetitions in the unit of the row, by system. Contains
    /// only systems whose medians differ by more than the factor [`SPREAD_FACTOR`].
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
    /// The summaries of every repetition, by the arguments of the measuring program and by system.
    repetitions: BTreeMap<String, BTreeMap<&'static str, Vec<TimeSummaries>>>,
    curves: Vec<Chart>,
    floor: Vec<floor::FloorResult>,
    troubles: Vec<MeasurementFailure>,
}

impl Report {
    /// Creates an empty report. `repeat_with` is the command line that repeats the measurement.
    pub(crate) fn new(machine: MachineInfo, repeat_with: String) -> Self {
        Self {
            machine,
            repeat_with,
            rows: Vec::new(),
            repetitions: BTreeMap::new(),
            curves: Vec::new(),
            floor: Vec::new(),
            troubles: Vec::new(),
        }
    }

    /// Adds the rows, repetitions and failures of the measurements `measurements`. The results in
    /// `measured_rows` have the same order. Updates the machine's load.
    pub(crate) fn add_rows(&mut self, measurements: &[Measurement], measured_rows: MeasuredRows) {
        for (measurement, results) in measurements.iter().zip(&measured_rows) {
            let arguments = measurement.args.join(" ");
            self.rows.extend(
                measurement
                    .rows
                    .iter()
                    .map(|row| evaluate_row(row, results)),
            );
            for (system, results) in results {
                let failure = |reason| MeasurementFailure {
                    system: *system,
                    text: format!("{arguments} on {}: {reason}", system.name()),
                };
                self.troubles.extend(results.failure.iter().map(failure));
            }
            let repetitions = results
                .iter()
                .map(|(system, results)| (system.name(), results.repetitions.clone()));
            self.repetitions.insert(arguments, repetitions.collect());
        }
        self.machine.update_load_after();
    }

    pub(crate) fn add_curves(&mut self, curves: CurveResults) {
        self.curves.extend(curves.charts);
        self.troubles.extend(curves.failures);
        self.machine.update_load_after();
    }

    pub(crate) fn add_floor(&mut self, floor: Vec<floor::FloorResult>) {
        self.floor = floor;
    }

    /// True if a measurement of Sempa failed. Failures of other systems do not count, because they
    /// are not faults of Sempa.
    pub(crate) fn has_sempa_failure(&self) -> bool {
        self.troubles
            .iter()
            .any(|trouble| trouble.system == System::Sempa)
    }

    /// Formats the rows as a table.
    fn format_table(&self) -> String {
        let names = System::ALL.map(System::name);
        let column_titles = [
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
        let mut table: Vec<Vec<String>> = vec![column_titles.map(str::to_string).to_vec()];
        table.extend(self.rows.iter().map(|line| line.cells.clone()));
        let column_width = |column: usize| {
            table
                .iter()
                .map(|cells| cells[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..column_titles.len()).map(column_width).collect();
        let mut text = String::new();
        for cells in &table {
            let mut line = format!("{:<1$}", cells[0], widths[0]);
            for (cell, column_width) in cells.iter().zip(&widths).skip(1) {
                line.push_str(&format!("  {cell:>column_width$}"));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// Formats the whole report as text: table, curves, floor, machine, failures.
    pub(crate) fn format_report(&self) -> String {
        let mut text = if self.rows.is_empty() {
            String::new()
        } else {
            self.format_table()
        };
        for chart in &self.curves {
            text.push_str(&format_curve(chart));
        }
        for (index, result) in self.floor.iter().enumerate() {
            let heading = if index == 0 {
                "\nthe machine without any library\n"
            } else {
                ""
            };
            text.push_str(&format!(
                "{heading}  {:<60} {:>8} {}\n",
                result.title,
                format_three_digits(result.value),
                result.unit
            ));
        }
        text.push_str(&self.format_spreads());
        if !self.rows.is_empty() {
            text.push_str(
                "\ntimes: median (99 of 100); speed to PVM, to Open MPI: how many times faster ours is, of the same run\n",
            );
        }
        text.push_str(&self.machine.format());
        text.push_str(&format!("repeat with: {}\n", self.repeat_with));
        for failure in &self.troubles {
            // The text is shortened; the JSON file contains the whole text.
            let failure_lines: Vec<&str> = failure
                .text
                .lines()
                .map(str::trim)
                .filter(|result| !result.is_empty())
                .collect();
            let shortened_text: String = failure_lines
                .join(" / ")
                .chars()
                .take(FAILURE_CHARS_MAX)
                .collect();
            text.push_str(&format!("NOT MEASURED: {shortened_text}\n"));
        }
        text
    }

    /// Lists the rows whose repetitions differ by more than the factor [`SPREAD_FACTOR`]. The
    /// medians of these rows are not reliable. Returns an empty text if there are no such rows.
    fn format_spreads(&self) -> String {
        let mut text = String::new();
        for row in &self.rows {
            let format_range = |(system, (smallest, largest)): (&&str, &(f64, f64))| {
                format!(
                    "{system} {} to {} {}",
                    format_three_digits(*smallest),
                    format_three_digits(*largest),
                    row.unit
                )
            };
            let ranges: Vec<String> = row.spread.iter().map(format_range).collect();
            if !ranges.is_empty() {
                text.push_str(&format!("  {:<46} {}\n", row.name, ranges.join("; ")));
            }
        }
        let heading = format!(
            "\nmedians of the repetitions that differ by more than {SPREAD_FACTOR} times\n"
        );
        if text.is_empty() {
            text
        } else {
            heading + &text
        }
    }

    /// Writes `peers.json`, `peers.txt` and one chart per curve to `folder`.
    pub(crate) fn write_files(&self, folder: &Path) -> Result<()> {
        let name = |name_text: &str| name_text.to_string();
        let mut files = vec![
            (name("peers.json"), serde_json::to_string_pretty(self)?),
            (name("peers.txt"), self.format_report()),
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
fn format_curve(chart: &Chart) -> String {
    let mut text = format!("\n{} ({}: {})\n", chart.title, chart.x, chart.y);
    for series in &chart.series {
        let format_p99 = |x: f64| {
            series
                .p99
                .iter()
                .find(|format_point| format_point.0 == x)
                .map(|format_point| format!(" ({})", format_three_digits(format_point.1)))
        };
        let format_point = |(x, y): &(f64, f64)| {
            format!(
                "{x}: {}{}",
                format_three_digits(*y),
                format_p99(*x).unwrap_or_default()
            )
        };
        let points: Vec<String> = series.points.iter().map(format_point).collect();
        text.push_str(&format!("  {:<24} {}\n", series.name, points.join("  ")));
    }
    for sempa_series in &chart.series {
        let Some(route) = sempa_series.name.strip_prefix(System::Sempa.name()) else {
            continue;
        };
        let pvm_name = format!("{}{route}", System::Pvm.name());
        let Some(pvm_series) = chart.series.iter().find(|series| series.name == pvm_name) else {
            continue;
        };
        let speed_ratio = |(x, y): &(f64, f64)| {
            let pvm_y = pvm_series
                .points
                .iter()
                .find(|format_point| format_point.0 == *x)?
                .1;
            let speed_ratio = if chart.more_is_better {
                y / pvm_y
            } else {
                pvm_y / y
            };
            Some(format!("{x}: {}x", format_three_digits(speed_ratio)))
        };
        let points: Vec<String> = sempa_series.points.iter().filter_map(speed_ratio).collect();
        text.push_str(&format!(
            "  {:<24} {}\n",
            format!("speed to PVM{route}"),
            points.join("  ")
        ));
    }
    text
}

fn evaluate_row(row: &Row, results: &[(System, SystemResult)]) -> RowResult {
    let time_of = |system: System, name: &str| {
        let sempa_time = results
            .iter()
            .find(|(result_system, _)| *result_system == system)?;
        combine_repetitions(&sempa_time.1.repetitions, name)
    };
    let mut row_result = RowResult {
        name: row.name,
        title: row.title,
        unit: row.unit.symbol(),
        values: BTreeMap::new(),
        times: BTreeMap::new(),
        speed_to_pvm: None,
        speed_to_mpi: None,
        spread: BTreeMap::new(),
        goal: format_goal(row),
        met: None,
        cells: vec![row.title.to_string()],
    };
    for system in System::ALL {
        let cell = time_of(system, row.time_name).map(|time_of| {
            row_result
                .values
                .insert(system.name(), row.unit.convert_us(time_of.median_us));
            row_result.times.insert(system.name(), time_of);
            format_value_cell(row, &time_of)
        });
        row_result
            .cells
            .push(cell.unwrap_or_else(|| "-".to_string()));
    }
    for (system, results) in results {
        if let Some((smallest, largest)) =
            median_range_above(&results.repetitions, row.time_name, SPREAD_FACTOR)
        {
            let (smallest, largest) = (row.unit.convert_us(smallest), row.unit.convert_us(largest));
            row_result.spread.insert(
                system.name(),
                (smallest.min(largest), smallest.max(largest)),
            );
        }
    }
    let (pvm_time, sempa_time) = (
        time_of(System::Pvm, row.time_name),
        time_of(System::Sempa, row.time_name),
    );
    let speed_to = |largest: Option<TimeSummary>| {
        largest
            .zip(sempa_time)
            .map(|(largest, sempa_time)| largest.median_us / sempa_time.median_us)
    };
    (row_result.speed_to_pvm, row_result.speed_to_mpi) = (
        speed_to(pvm_time),
        speed_to(time_of(System::OpenMpi, row.time_name)),
    );
    let reference_time = row
        .goal
        .own_ratio_max
        .and_then(|(_, name)| time_of(System::Sempa, name));
    row_result.met = sempa_time.and_then(|sempa_time| {
        is_goal_met(
            row,
            sempa_time.median_us,
            pvm_time.map(|pvm_time| pvm_time.median_us),
            reference_time.map(|smallest| smallest.median_us),
        )
    });
    let ratio_text = |speed: Option<f64>| {
        speed.map_or("-".to_string(), |speed| {
            format!("{}x", format_three_digits(speed))
        })
    };
    row_result.cells.extend([
        ratio_text(row_result.speed_to_pvm),
        ratio_text(row_result.speed_to_mpi),
        row_result.goal.clone(),
    ]);
    row_result.cells.push(
        row_result
            .met
            .map_or("", |met| if met { "yes" } else { "no" })
            .to_string(),
    );
    row_result
}

fn format_value_cell(row: &Row, time: &TimeSummary) -> String {
    let value = format!(
        "{} {}",
        format_three_digits(row.unit.convert_us(time.median_us)),
        row.unit.symbol()
    );
    if row.unit.is_time() && time.count >= 100 {
        return format!(
            "{value} ({})",
            format_three_digits(row.unit.convert_us(time.p99_us))
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

fn format_goal(row: &Row) -> String {
    let RowGoals {
        bound,
        pvm_ratio_max,
        own_ratio_max,
    } = row.goal;
    let sign = if row.unit.is_time() { "<=" } else { ">=" };
    let mut goal_parts: Vec<String> = bound
        .iter()
        .map(|value| format!("{sign} {value} {}", row.unit.symbol()))
        .collect();
    goal_parts.extend(pvm_ratio_max.map(|_| "no slower than PVM".to_string()));
    goal_parts.extend(
        own_ratio_max.map(|(factor, name)| format!("<= {factor} x {}", name.replace('_', " "))),
    );
    goal_parts.join(", ")
}

/// True if Sempa's time `sempa_us` meets the goal of the row; `None` if the row has no goal or a
/// time is missing. `pvm_us` is PVM's time, and `reference_us` is the time to which the goal is
/// relative. All times are in microseconds.
fn is_goal_met(
    row: &Row,
    sempa_us: f64,
    pvm_us: Option<f64>,
    reference_us: Option<f64>,
) -> Option<bool> {
    let RowGoals {
        bound,
        pvm_ratio_max,
        own_ratio_max,
    } = row.goal;
    let value = row.unit.convert_us(sempa_us);
    let mut checks = Vec::new();
    checks.extend(bound.map(|bound| {
        if row.unit.is_time() {
            value <= bound
        } else {
            value >= bound
        }
    }));
    if let Some(factor) = pvm_ratio_max {
        checks.push(sempa_us <= factor * pvm_us?);
    }
    if let Some((factor, _)) = own_ratio_max {
        checks.push(sempa_us <= factor * reference_us?);
    }
    (!checks.is_empty()).then(|| checks.iter().all(|is_met| *is_met))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers_table_rows::{self, Unit};
    use crate::plot::Series;

    fn test_row(unit: Unit, goal: RowGoals) -> Row {
        Row {
            name: "r",
            title: "a row",
            time_name: "rtt",
            unit,
            goal,
        }
    }

    fn system_result(us: f64) -> SystemResult {
        SystemResult {
            repetitions: vec![TimeSummaries::from([(
                "rtt".to_string(),
                TimeSummary::of_single_time(us),
            )])],
            failure: None,
        }
    }

    fn row_result(results: &[(System, SystemResult)]) -> RowResult {
        evaluate_row(&test_row(Unit::Micros, RowGoals::default()), results)
    }

    fn empty_report() -> Report {
        Report::new(MachineInfo::collect(false, 1, false), String::new())
    }

    /// A time must not exceed its goal, and a rate must not be less than its goal.
    #[test]
    fn goals_bound_times_above_and_rates_below() {
        let goal = RowGoals {
            bound: Some(2.0),
            ..RowGoals::default()
        };
        assert_eq!(
            is_goal_met(&test_row(Unit::Micros, goal), 1.5, None, None),
            Some(true)
        );
        assert_eq!(
            is_goal_met(&test_row(Unit::Micros, goal), 2.5, None, None),
            Some(false)
        );
        assert_eq!(
            is_goal_met(&test_row(Unit::MillionsPerSecond, goal), 0.4, None, None),
            Some(true)
        );
        assert_eq!(
            is_goal_met(&test_row(Unit::MillionsPerSecond, goal), 0.6, None, None),
            Some(false)
        );
    }

    /// Without the time to which a goal is relative, the goal is neither met nor missed.
    #[test]
    fn missing_comparison_gives_no_verdict() {
        let goal = RowGoals {
            pvm_ratio_max: Some(1.0),
            ..RowGoals::default()
        };
        assert_eq!(
            is_goal_met(&test_row(Unit::Micros, goal), 1.0, None, None),
            None
        );
        assert_eq!(
            is_goal_met(&test_row(Unit::Micros, goal), 1.0, Some(2.0), None),
            Some(true)
        );
        assert_eq!(
            is_goal_met(
                &test_row(Unit::Micros, RowGoals::default()),
                1.0,
                Some(2.0),
                None
            ),
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
            format_curve(&Chart {
                name,
                title,
                x,
                y,
                more_is_better,
                series: series.clone(),
            })
        };
        let last_line = |text: String| text.lines().last().map(str::to_string);
        assert_eq!(
            last_line(chart(false)).as_deref(),
            Some("  speed to PVM, direct     8: 3.00x")
        );
        assert_eq!(
            last_line(chart(true)).as_deref(),
            Some("  speed to PVM, direct     8: 0.333x")
        );
        assert!(chart(true).contains("Sempa, direct            8: 10.0 (20.0)"));
    }

    #[test]
    fn speed_is_relative_to_pvm_and_open_mpi() {
        let result = row_result(&[
            (System::Pvm, system_result(30.0)),
            (System::Sempa, system_result(10.0)),
        ]);
        assert_eq!(result.speed_to_pvm, Some(3.0));
        assert_eq!(
            result.cells[1..7],
            ["30.0 us", "10.0 us", "-", "-", "3.00x", "-"]
        );
        let result = row_result(&[
            (System::OpenMpi, system_result(5.0)),
            (System::Sempa, system_result(10.0)),
        ]);
        assert_eq!(
            (result.speed_to_pvm, result.speed_to_mpi),
            (None, Some(0.5))
        );
    }

    /// If repetitions differ much, the smallest and the largest median of each system are reported.
    #[test]
    fn spread_is_reported_per_system() {
        let mut two_repetitions = system_result(169.0);
        two_repetitions
            .repetitions
            .extend(system_result(400.0).repetitions);
        let result = row_result(&[
            (System::Pvm, system_result(30.0)),
            (System::Sempa, two_repetitions),
        ]);
        assert_eq!(result.spread, BTreeMap::from([("Sempa", (169.0, 400.0))]));
        let report = Report {
            rows: vec![result],
            ..empty_report()
        };
        assert!(
            report.format_report().contains("Sempa 169 to 400 us"),
            "{}",
            report.format_report()
        );
    }

    /// A failure of another system does not make the command fail.
    #[test]
    fn only_our_failures_fail_the_command() {
        let report_with_failure = |system| {
            let mut report = empty_report();
            let results = vec![(
                system,
                SystemResult {
                    repetitions: Vec::new(),
                    failure: Some("it ended".to_string()),
                },
            )];
            report.add_rows(&[peers_table_rows::MEASUREMENTS[0]], vec![results]);
            report
        };
        assert!(!report_with_failure(System::Pvm).has_sempa_failure());
        assert!(
            report_with_failure(System::Pvm)
                .format_report()
                .contains("NOT MEASURED")
        );
        assert!(report_with_failure(System::Sempa).has_sempa_failure());
    }
}
