//! `cargo xtask bench micro`: compares the times of single layers with saved figures.
//!
//! The speed of machines differs, and changes over time. Therefore every time is divided by the
//! time of a fixed amount of work, which is measured in the same run.

use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Name of the benchmark that measures the fixed amount of work.
const CALIBRATION: &str = "calibrate/a_fixed_amount_of_work";
/// Prefix of the names of benchmarks that measure the daemon's forwarding path.
const FORWARDING_PREFIX: &str = "forward/";
/// Part of the names of benchmarks in which several frames share one allocation.
const QUEUED_PART: &str = "queued";
/// Minimum number of frames per allocation in benchmarks that match [`QUEUED_PART`].
const FRAMES_PER_ALLOCATION_MIN: f64 = 8.0;
/// Name of the benchmark of a large frame from the network. Each such frame needs its own
/// allocation.
const LARGE_FRAME: &str = "unqueued_from_another_host/61440";
/// Name of the file with the saved figures.
const SAVED_FILE: &str = "micro.json";

/// Settings for the evaluation of a run's figures.
#[derive(Clone, Debug)]
pub struct MicroSettings<'a> {
    /// Folder of the file with the saved figures.
    pub results: &'a Path,
    /// Saves the figures of this run as the new baseline.
    pub save: bool,
    /// Makes a slowdown an error.
    pub strict: bool,
    /// Maximum relative change of a time that counts as unchanged.
    pub tolerance: f64,
}

/// The figures in the output of one run.
#[derive(Debug, Default, PartialEq)]
struct ParsedFigures {
    /// Median time of each benchmark in nanoseconds, by name.
    medians: BTreeMap<String, f64>,
    /// Mean number of allocations per round, by name of the benchmark. Benchmarks without
    /// allocations are omitted.
    allocations: BTreeMap<String, f64>,
}

/// The figures of a run as they are saved.
#[derive(Debug, Serialize, Deserialize)]
struct SavedFigures {
    /// Description of the machine. The comparison does not use it.
    machine: serde_json::Value,
    /// Time of the fixed amount of work in nanoseconds.
    calibration_ns: f64,
    /// Median time of each benchmark in nanoseconds, by name.
    medians_ns: BTreeMap<String, f64>,
}

/// A benchmark whose time relative to the fixed amount of work has changed.
#[derive(Debug, PartialEq)]
struct Change {
    name: String,
    /// New relative time divided by the saved one.
    factor: f64,
    before_ns: f64,
    now_ns: f64,
}

impl MicroSettings<'_> {
    /// Compares the figures in the output `printed` with the saved ones, and saves them if
    /// requested. Returns false if the forwarding path allocates, or if a benchmark is slower and
    /// `strict` is set.
    pub fn evaluate(&self, printed: &str) -> Result<bool> {
        let told = parse_output(printed)?;
        let file = self.results.join(SAVED_FILE);
        let mut good = true;
        for complaint in allocation_errors(&told) {
            println!("bench micro: {complaint}");
            good = false;
        }
        let now = SavedFigures {
            machine: serde_json::to_value(MachineInfo::describe(true, 1, false))?,
            calibration_ns: told
                .medians
                .get(CALIBRATION)
                .copied()
                .context("the fixed amount of work was not measured")?,
            medians_ns: told.medians,
        };
        match fs::read(&file) {
            Ok(bytes) => {
                let before: SavedFigures = serde_json::from_slice(&bytes)
                    .with_context(|| format!("reading {}", file.display()))?;
                print!("{}", comparison_text(&before, &now, self.tolerance));
                good &= !(self.strict
                    && changed_benchmarks(&before, &now, self.tolerance)
                        .iter()
                        .any(|change| change.factor > 1.0));
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                println!(
                    "bench micro: nothing was saved before ({}); --save keeps these figures",
                    file.display()
                );
            }
            Err(e) => return Err(e).with_context(|| format!("reading {}", file.display())),
        }
        if self.save {
            fs::create_dir_all(self.results).with_context(|| self.results.display().to_string())?;
            let text = serde_json::to_string_pretty(&now)? + "\n";
            fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
            println!("bench micro: saved in {}", file.display());
        }
        Ok(good)
    }
}

/// Returns one error for each benchmark of the forwarding path with more allocations than
/// permitted.
fn allocation_errors(figures: &ParsedFigures) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, count) in &figures.allocations {
        let Some(what) = name.strip_prefix(FORWARDING_PREFIX) else {
            continue;
        };
        let allowed = match what {
            LARGE_FRAME => 1.0,
            _ if what.contains(QUEUED_PART) => 1.0 / FRAMES_PER_ALLOCATION_MIN,
            _ => 0.0,
        };
        if *count > allowed {
            complaints.push(format!(
                "{what} allocates {count} times for each frame; allowed is {allowed}"
            ));
        }
    }
    if !figures
        .medians
        .keys()
        .any(|name| name.starts_with(FORWARDING_PREFIX))
    {
        complaints.push(
            "the forwarding path was not measured, so nobody knows whether it allocates"
                .to_string(),
        );
    }
    complaints
}

/// Returns the benchmarks whose relative time has changed by more than the tolerance, largest
/// change first.
fn changed_benchmarks(before: &SavedFigures, now: &SavedFigures, tolerance: f64) -> Vec<Change> {
    let mut all: Vec<Change> = now
        .medians_ns
        .iter()
        .filter(|(name, _)| *name != CALIBRATION)
        .filter_map(|(name, now_ns)| {
            let before_ns = *before.medians_ns.get(name)?;
            let factor = (now_ns / now.calibration_ns) / (before_ns / before.calibration_ns);
            let changed = factor > 1.0 + tolerance || factor < 1.0 / (1.0 + tolerance);
            changed.then(|| Change {
                name: name.clone(),
                factor,
                before_ns,
                now_ns: *now_ns,
            })
        })
        .collect();
    all.sort_by(|one, other| other.factor.ln().abs().total_cmp(&one.factor.ln().abs()));
    all
}

/// Formats the comparison as text.
fn comparison_text(before: &SavedFigures, now: &SavedFigures, share: f64) -> String {
    let changes = changed_benchmarks(before, now, share);
    let slower = changes.iter().filter(|change| change.factor > 1.0).count();
    let mut text = format!(
        "\nbeside {} benchmarks saved before (the fixed amount of work: {:.0} ns then, {:.0} ns now, all times in units of it): \
         {slower} slower and {} faster by more than {:.0} %\n",
        before.medians_ns.len(),
        before.calibration_ns,
        now.calibration_ns,
        changes.len() - slower,
        share * 100.0,
    );
    for Change {
        name,
        factor,
        before_ns,
        now_ns,
    } in &changes
    {
        let word = if *factor > 1.0 { "SLOWER" } else { "faster" };
        text.push_str(&format!(
            "  {word} {factor:>6.2} x  {name:<60} {before_ns:.1} ns then, {now_ns:.1} ns now\n"
        ));
    }
    let gone = before
        .medians_ns
        .keys()
        .filter(|name| !now.medians_ns.contains_key(*name));
    gone.for_each(|name| text.push_str(&format!("  not there any more: {name}\n")));
    text
}

/// Parses the tables that the benchmarks print. A benchmark has one line, indented by its level in
/// the tree, with its median in the third column. The lines below it count allocations; the mean is
/// in their fourth column.
///
/// # Errors
/// Fails if the output has no benchmark.
fn parse_output(printed: &str) -> Result<ParsedFigures> {
    let mut told = ParsedFigures::default();
    let mut path: Vec<String> = Vec::new();
    let mut counted = false;
    for line in printed.lines().filter(|line| line.contains('│')) {
        let mut cells: Vec<&str> = line.rsplitn(6, '│').map(str::trim).collect();
        cells.reverse();
        let [first, _slowest, median, mean, _samples, _iterations] = cells[..] else {
            continue;
        };
        if let Some((before, named)) = line.split_once("─ ") {
            path.truncate((before.chars().count() - 1) / 3 + 1);
            let name = named.split(['│', ' ']).next().unwrap_or_default();
            path.push(name.to_string());
            if let Some(ns) = parse_nanoseconds(median) {
                told.medians.insert(path.join("/"), ns);
            }
        } else if first.ends_with("fastest") {
            path = vec![
                line.split_whitespace()
                    .next()
                    .unwrap_or_default()
                    .to_string(),
            ];
        } else if std::mem::take(&mut counted) {
            let count: f64 = mean
                .parse()
                .with_context(|| format!("no number of allocations: {line}"))?;
            *told.allocations.entry(path.join("/")).or_default() += count;
        } else {
            let word = first.trim_start_matches(['│', ' ']);
            counted = word == "alloc:" || word == "grow:";
        }
    }
    if told.medians.is_empty() {
        bail!("the benchmarks said nothing that can be understood");
    }
    Ok(told)
}

/// Parses a time such as `48.15 ns`.
fn parse_nanoseconds(cell: &str) -> Option<f64> {
    let (number, unit) = cell.split_once(' ')?;
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

    const PRINTED: &str = "\
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

    fn saved(calibration_ns: f64, figures: &[(&str, f64)]) -> SavedFigures {
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

    /// Medians and allocations are parsed with the full names of their benchmarks.
    #[test]
    fn tables_parse_with_full_names() {
        let told = parse_output(PRINTED).expect("a table");
        let medians: Vec<(&str, f64)> = told
            .medians
            .iter()
            .map(|(name, ns)| (name.as_str(), *ns))
            .collect();
        let expected = [
            (CALIBRATION, 16_500.0),
            ("forward/a_frame_between_two_tasks/2", 198.8),
            ("forward/a_frame_between_two_tasks/32", 1.2e6),
            ("forward/queued_to_another_host", 3.0),
        ];
        assert_eq!(medians, expected);
        assert_eq!(
            told.allocations["forward/a_frame_between_two_tasks/2"],
            1.02
        );
        assert_eq!(told.allocations.len(), 2);
        assert!(parse_output("nothing\n").is_err());
    }

    /// One allocation per frame in the state machine is an error. One allocation for many queued
    /// frames is not.
    #[test]
    fn forwarding_must_not_allocate_per_frame() {
        let told = parse_output(PRINTED).expect("a table");
        let complaints = allocation_errors(&told);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(
            complaints[0].starts_with("a_frame_between_two_tasks/2 allocates 1.02"),
            "{complaints:?}"
        );
        let silent = ParsedFigures {
            allocations: BTreeMap::new(),
            ..told
        };
        assert_eq!(allocation_errors(&silent), Vec::<String>::new());
        assert_eq!(
            allocation_errors(&ParsedFigures::default()).len(),
            1,
            "what was not measured is no proof"
        );
    }

    /// A slower machine is not a regression; a slower layer is.
    #[test]
    fn times_are_relative_to_machine() {
        let before = saved(
            100.0,
            &[("a", 10.0), ("b", 10.0), ("c", 10.0), ("gone", 1.0)],
        );
        let now = saved(
            200.0,
            &[("a", 20.0), ("b", 40.0), ("c", 10.0), ("new", 1.0)],
        );
        let changes = changed_benchmarks(&before, &now, 0.25);
        let factors: Vec<(&str, f64)> = changes
            .iter()
            .map(|change| (change.name.as_str(), change.factor))
            .collect();
        assert_eq!(factors, [("b", 2.0), ("c", 0.5)]);
        let text = comparison_text(&before, &now, 0.25);
        assert!(
            text.contains("1 slower and 1 faster") && text.contains("not there any more: gone"),
            "{text}"
        );
    }
}
