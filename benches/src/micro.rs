//! `cargo xtask bench micro`: compares the times of single layers with saved figures.
//!
//! The speed of machines differs, and changes over time. Therefore every time is divided by the
//! time of a fixed amount of work, which the same run measures.

use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Name of the benchmark that measures the fixed amount of work.
const CALIBRATION_NAME: &str = "calibrate/a_fixed_amount_of_work";
/// Prefix of the names of benchmarks that measure the daemon's forwarding path.
const FORWARDING_PREFIX: &str = "forward/";
/// Substring of the names of benchmarks in which several frames share one allocation.
const QUEUED_NAME_PART: &str = "queued";
/// Minimum number of frames per allocation in benchmarks whose name contains [`QUEUED_NAME_PART`].
const FRAMES_PER_ALLOCATION_MIN: f64 = 8.0;
/// End of the name of the benchmark for a large frame from the network. Each such frame needs its
/// own allocation.
const LARGE_FRAME_NAME_END: &str = "unqueued_from_another_host/61440";
/// Name of the file with the saved figures.
const SAVED_FIGURES_FILE: &str = "micro.json";

/// Settings for the comparison of a run's figures with the saved figures.
#[derive(Clone, Debug)]
pub struct MicroSettings<'a> {
    /// Folder that contains the file with the saved figures.
    pub results_folder: &'a Path,
    /// True if the figures of this run are saved as the new baseline.
    pub saves_figures: bool,
    /// True if a slowdown is an error.
    pub is_strict: bool,
    /// Maximum relative change of a time that counts as unchanged; 0.25 is a quarter.
    pub change_fraction_max: f64,
}

/// The figures in the output of one run of the benchmarks.
#[derive(Debug, Default, PartialEq)]
struct ParsedFigures {
    /// Median time of each benchmark in nanoseconds, by name.
    medians_ns: BTreeMap<String, f64>,
    /// Mean number of allocations per iteration, by name of the benchmark. Benchmarks without
    /// allocations are omitted.
    allocation_counts: BTreeMap<String, f64>,
}

/// Content of the file [`SAVED_FIGURES_FILE`]: the figures of one run.
#[derive(Debug, Serialize, Deserialize)]
struct SavedFigures {
    /// Description of the machine. The comparison does not use this description.
    machine: serde_json::Value,
    /// Time of the fixed amount of work in nanoseconds.
    calibration_ns: f64,
    /// Median time of each benchmark in nanoseconds, by name.
    medians_ns: BTreeMap<String, f64>,
}

/// A benchmark whose time relative to the fixed amount of work has changed.
#[derive(Debug, PartialEq)]
struct TimeChange {
    name: String,
    /// New relative time divided by the saved relative time.
    factor: f64,
    saved_ns: f64,
    new_ns: f64,
}

impl MicroSettings<'_> {
    /// Compares the figures in the output `output` with the saved figures, and saves the new
    /// figures if `saves_figures` is set. Returns false if the forwarding path allocates more often
    /// than permitted or was not measured, or if `is_strict` is set and a benchmark is slower by
    /// more than the tolerance.
    pub fn compare_and_save(&self, output: &str) -> Result<bool> {
        let figures = parse_output(output)?;
        let saved_file = self.results_folder.join(SAVED_FIGURES_FILE);
        let mut is_accepted = true;
        for error in allocation_errors(&figures) {
            println!("bench micro: {error}");
            is_accepted = false;
        }
        let new_figures = SavedFigures {
            machine: serde_json::to_value(MachineInfo::collect(true, 1, false))?,
            calibration_ns: figures
                .medians_ns
                .get(CALIBRATION_NAME)
                .copied()
                .context("the fixed amount of work was not measured")?,
            medians_ns: figures.medians_ns,
        };
        match fs::read(&saved_file) {
            Ok(bytes) => {
                let saved_figures: SavedFigures = serde_json::from_slice(&bytes)
                    .with_context(|| format!("reading {}", saved_file.display()))?;
                print!(
                    "{}",
                    format_comparison(&saved_figures, &new_figures, self.change_fraction_max)
                );
                is_accepted &= !(self.is_strict
                    && changed_benchmarks(&saved_figures, &new_figures, self.change_fraction_max)
                        .iter()
                        .any(|change| change.factor > 1.0));
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                println!(
                    "bench micro: nothing was saved before ({}); --save keeps these figures",
                    saved_file.display()
                );
            }
            Err(e) => return Err(e).with_context(|| format!("reading {}", saved_file.display())),
        }
        if self.saves_figures {
            fs::create_dir_all(self.results_folder)
                .with_context(|| self.results_folder.display().to_string())?;
            let text = serde_json::to_string_pretty(&new_figures)? + "\n";
            fs::write(&saved_file, text)
                .with_context(|| format!("writing {}", saved_file.display()))?;
            println!("bench micro: saved in {}", saved_file.display());
        }
        Ok(is_accepted)
    }
}

/// Returns one error for each benchmark of the forwarding path with more allocations than
/// permitted, and an error if no benchmark of the forwarding path was run.
fn allocation_errors(figures: &ParsedFigures) -> Vec<String> {
    let mut errors = Vec::new();
    for (name, count) in &figures.allocation_counts {
        let Some(benchmark) = name.strip_prefix(FORWARDING_PREFIX) else {
            continue;
        };
        let allowed_count = match benchmark {
            LARGE_FRAME_NAME_END => 1.0,
            _ if benchmark.contains(QUEUED_NAME_PART) => 1.0 / FRAMES_PER_ALLOCATION_MIN,
            _ => 0.0,
        };
        if *count > allowed_count {
            errors.push(format!(
                "{benchmark} allocates {count} times for each frame; allowed is {allowed_count}"
            ));
        }
    }
    if !figures
        .medians_ns
        .keys()
        .any(|name| name.starts_with(FORWARDING_PREFIX))
    {
        errors.push(
            "the forwarding path was not measured, so it is unknown whether it allocates"
                .to_string(),
        );
    }
    errors
}

/// Returns the benchmarks whose relative time has changed by more than the tolerance, in descending
/// order of the change.
fn changed_benchmarks(
    saved_figures: &SavedFigures,
    new_figures: &SavedFigures,
    change_fraction_max: f64,
) -> Vec<TimeChange> {
    let mut changes: Vec<TimeChange> = new_figures
        .medians_ns
        .iter()
        .filter(|(name, _)| *name != CALIBRATION_NAME)
        .filter_map(|(name, now_ns)| {
            let before_ns = *saved_figures.medians_ns.get(name)?;
            let factor =
                (now_ns / new_figures.calibration_ns) / (before_ns / saved_figures.calibration_ns);
            let has_changed =
                factor > 1.0 + change_fraction_max || factor < 1.0 / (1.0 + change_fraction_max);
            has_changed.then(|| TimeChange {
                name: name.clone(),
                factor,
                saved_ns: before_ns,
                new_ns: *now_ns,
            })
        })
        .collect();
    changes.sort_by(|change, other| other.factor.ln().abs().total_cmp(&change.factor.ln().abs()));
    changes
}

/// Formats the comparison with the saved figures as text. `change_fraction_max` is the tolerance.
fn format_comparison(
    saved_figures: &SavedFigures,
    new_figures: &SavedFigures,
    change_fraction_max: f64,
) -> String {
    let changes = changed_benchmarks(saved_figures, new_figures, change_fraction_max);
    let slower_count = changes.iter().filter(|change| change.factor > 1.0).count();
    let mut text = format!(
        "\ncompared with {} saved benchmarks (the fixed amount of work: {:.0} ns then, {:.0} ns now, all times in \
         units of it): {slower_count} slower and {} faster by more than {:.0} %\n",
        saved_figures.medians_ns.len(),
        saved_figures.calibration_ns,
        new_figures.calibration_ns,
        changes.len() - slower_count,
        change_fraction_max * 100.0,
    );
    for TimeChange {
        name,
        factor,
        saved_ns: before_ns,
        new_ns: now_ns,
    } in &changes
    {
        let judgement = if *factor > 1.0 { "SLOWER" } else { "faster" };
        text.push_str(&format!(
            "  {judgement} {factor:>6.2} x  {name:<60} {before_ns:.1} ns then, {now_ns:.1} ns now\n"
        ));
    }
    let missing_names = saved_figures
        .medians_ns
        .keys()
        .filter(|name| !new_figures.medians_ns.contains_key(*name));
    missing_names.for_each(|name| text.push_str(&format!("  no longer exists: {name}\n")));
    text
}

/// Parses the tables that the benchmarks print. A benchmark has one line, indented by its level in
/// the tree; its median is in the third column. Below this line, a line `alloc:` or `grow:`
/// precedes a line with numbers of allocations; the mean is in the fourth column of the latter. The
/// two means are added.
///
/// # Errors
/// The output contains no benchmark, or a mean number of allocations is malformed.
fn parse_output(output: &str) -> Result<ParsedFigures> {
    let mut figures = ParsedFigures::default();
    let mut name_path: Vec<String> = Vec::new();
    let mut has_allocation_count = false;
    for line in output.lines().filter(|line| line.contains('│')) {
        let mut cells: Vec<&str> = line.rsplitn(6, '│').map(str::trim).collect();
        cells.reverse();
        let [
            name_cell_text,
            _slowest,
            median,
            mean,
            _samples,
            _iterations,
        ] = cells[..]
        else {
            continue;
        };
        if let Some((indentation, name_cell)) = line.split_once("─ ") {
            name_path.truncate((indentation.chars().count() - 1) / 3 + 1);
            let name = name_cell.split(['│', ' ']).next().unwrap_or_default();
            name_path.push(name.to_string());
            if let Some(ns) = parse_nanoseconds(median) {
                figures.medians_ns.insert(name_path.join("/"), ns);
            }
        } else if name_cell_text.ends_with("fastest") {
            name_path = vec![
                line.split_whitespace()
                    .next()
                    .unwrap_or_default()
                    .to_string(),
            ];
        } else if std::mem::take(&mut has_allocation_count) {
            let count: f64 = mean
                .parse()
                .with_context(|| format!("no number of allocations: {line}"))?;
            *figures
                .allocation_counts
                .entry(name_path.join("/"))
                .or_default() += count;
        } else {
            let keyword = name_cell_text.trim_start_matches(['│', ' ']);
            has_allocation_count = keyword == "alloc:" || keyword == "grow:";
        }
    }
    if figures.medians_ns.is_empty() {
        bail!("the output of the benchmarks cannot be parsed");
    }
    Ok(figures)
}

/// Parses a time such as `48.15 ns`.
fn parse_nanoseconds(time_text: &str) -> Option<f64> {
    let (number, unit) = time_text.split_once(' ')?;
    let factor = match unit {
        "ps" => 1e-3,
        "ns" => 1.0,
        "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BENCHMARK_OUTPUT: &str = "\
calibrate                  fastest       │ slowest       │ median        │ mean          │ samples │ iters
╰─ a_fixed_amount_of_work  16.2 µs       │ 20.1 µs       │ 16.5 µs       │ 16.6 µs       │ 100     │ 100

forward                       fastest       │ slowest       │ median        │ mean          │ samples │ iters
├─ a_frame_between_two_tasks                │               │               │               │         │
│  ├─ 2                       192.3 ns      │ 261.1 ns      │ 198.8 ns      │ 199.8 ns      │ 100     │ 1600
│  │                          5.199 Mitem/s │ 3.829 Mitem/s │ 5.028 Mitem/s │ 5.004 Mitem/s │         │
│  │                          max alloc:    │               │               │               │         │
│  │                            0.062       │ 0.062         │ 0.062         │ 0.062         │         │
│  │                            2 B         │ 2 B           │ 2 B           │ 2 B           │         │
│  │                          alloc:        │               │               │               │         │
│  │                            1           │ 1             │ 1             │ 1.02          │         │
│  │                            32 B        │ 32 B          │ 32 B          │ 32 B          │         │
│  ╰─ 32                      192.3 ns      │ 261.1 ns      │ 1.2 ms        │ 199.8 ns      │ 100     │ 1600
╰─ queued_to_another_host     1 ns          │ 1 ns          │ 3 ns          │ 1 ns          │ 100     │ 1600
                              alloc:        │               │               │               │         │
                                0.002       │ 0.002         │ 0.002         │ 0.002         │         │
                                32 B        │ 32 B          │ 32 B          │ 32 B          │         │
";

    fn make_saved_figures(calibration_ns: f64, figures: &[(&str, f64)]) -> SavedFigures {
        let medians_ns = figures
            .iter()
            .map(|(name, ns)| ((*name).to_string(), *ns))
            .collect();
        SavedFigures {
            machine: serde_json::Value::Null,
            calibration_ns,
            medians_ns,
        }
    }

    #[test]
    fn tables_parse_with_full_names() {
        let figures = parse_output(BENCHMARK_OUTPUT).expect("a table");
        let medians: Vec<(&str, f64)> = figures
            .medians_ns
            .iter()
            .map(|(name, ns)| (name.as_str(), *ns))
            .collect();
        let expected = [
            (CALIBRATION_NAME, 16_500.0),
            ("forward/a_frame_between_two_tasks/2", 198.8),
            ("forward/a_frame_between_two_tasks/32", 1.2e6),
            ("forward/queued_to_another_host", 3.0),
        ];
        assert_eq!(medians, expected);
        assert_eq!(
            figures.allocation_counts["forward/a_frame_between_two_tasks/2"],
            1.02
        );
        assert_eq!(figures.allocation_counts.len(), 2);
        assert!(parse_output("nothing\n").is_err());
    }

    /// One allocation per frame in the state machine is an error. One allocation for many queued
    /// frames is no error.
    #[test]
    fn forwarding_must_not_allocate_per_frame() {
        let figures = parse_output(BENCHMARK_OUTPUT).expect("a table");
        let errors = allocation_errors(&figures);
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(
            errors[0].starts_with("a_frame_between_two_tasks/2 allocates 1.02"),
            "{errors:?}"
        );
        let figures_without_allocations = ParsedFigures {
            allocation_counts: BTreeMap::new(),
            ..figures
        };
        assert_eq!(
            allocation_errors(&figures_without_allocations),
            Vec::<String>::new()
        );
        assert_eq!(
            allocation_errors(&ParsedFigures::default()).len(),
            1,
            "what was not measured is no proof"
        );
    }

    /// A slower machine is not a regression. A slower layer is a regression.
    #[test]
    fn times_are_relative_to_machine() {
        let saved_figures = make_saved_figures(
            100.0,
            &[("a", 10.0), ("b", 10.0), ("c", 10.0), ("gone", 1.0)],
        );
        let new_figures = make_saved_figures(
            200.0,
            &[("a", 20.0), ("b", 40.0), ("c", 10.0), ("new", 1.0)],
        );
        let changes = changed_benchmarks(&saved_figures, &new_figures, 0.25);
        let factors: Vec<(&str, f64)> = changes
            .iter()
            .map(|change| (change.name.as_str(), change.factor))
            .collect();
        assert_eq!(factors, [("b", 2.0), ("c", 0.5)]);
        let text = format_comparison(&saved_figures, &new_figures, 0.25);
        assert!(
            text.contains("1 slower and 1 faster") && text.contains("no longer exists: gone"),
            "{text}"
        );
    }
}
