//! `cargo xtask bench micro`: what single layers cost, beside what they cost when somebody saved it. Machines differ, and so
//! do hours of one, so every time is told in units of a fixed amount of work that was measured in the same run.

use crate::machine::Machine;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The benchmark that is the same on all machines.
const CALIBRATION: &str = "calibrate/a_fixed_amount_of_work";
/// Benchmarks of the daemon's forwarding, and the one among them that may allocate, as often as is said there.
const FORWARDING: &str = "forward/";
/// What streams hand over lies in pieces of memory that many frames share: fewer allocations than one for so many frames.
const QUEUED: &str = "queued";
const FRAMES_PER_ALLOCATION: f64 = 8.0;
/// A large frame that comes from the network lies in memory of its own.
const LARGE: &str = "unqueued_from_another_host/61440";
/// The file with what was saved.
const FILE: &str = "micro.json";

/// What is to be done with the figures of a run.
#[derive(Clone, Debug)]
pub struct Micro<'a> {
    /// The folder with what was saved before.
    pub results: &'a Path,
    /// These figures are to be what later runs are compared with.
    pub save: bool,
    /// What is slower than before is an error.
    pub strict: bool,
    /// A change by less than this share is none.
    pub share: f64,
}

/// The figures of one run.
#[derive(Debug, Default, PartialEq)]
struct Told {
    /// Median of each benchmark in nanoseconds.
    medians: BTreeMap<String, f64>,
    /// Allocations of one round, in the mean, where there are any.
    allocations: BTreeMap<String, f64>,
}

/// What is kept of a run.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    /// Where it was measured, for people.
    machine: serde_json::Value,
    /// Nanoseconds of the fixed amount of work.
    calibration_ns: f64,
    /// Nanoseconds of each benchmark, its median.
    medians_ns: BTreeMap<String, f64>,
}

/// A benchmark that takes another share of the fixed amount of work than before.
#[derive(Debug, PartialEq)]
struct Change {
    name: String,
    /// How many times as long as before.
    factor: f64,
    before_ns: f64,
    now_ns: f64,
}

impl Micro<'_> {
    /// Looks at what the benchmarks have printed: compares it with what was saved, and saves it if it is to. False if the
    /// forwarding path allocates, or if something is slower and that is an error.
    ///
    /// # Errors
    /// The output is not understood, or a file cannot be read or written.
    pub fn judge(&self, printed: &str) -> Result<bool> {
        let told = read(printed)?;
        let file = self.results.join(FILE);
        let mut good = true;
        for complaint in allocating(&told) {
            println!("bench micro: {complaint}");
            good = false;
        }
        let now = Saved {
            machine: serde_json::to_value(Machine::describe(true, 1, false))?,
            calibration_ns: told
                .medians
                .get(CALIBRATION)
                .copied()
                .context("the fixed amount of work was not measured")?,
            medians_ns: told.medians,
        };
        match fs::read(&file) {
            Ok(bytes) => {
                let before: Saved = serde_json::from_slice(&bytes)
                    .with_context(|| format!("reading {}", file.display()))?;
                print!("{}", comparison(&before, &now, self.share));
                good &= !(self.strict
                    && changes(&before, &now, self.share)
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

/// What is wrong with the allocations of the forwarding path.
fn allocating(told: &Told) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, count) in &told.allocations {
        let Some(what) = name.strip_prefix(FORWARDING) else {
            continue;
        };
        let allowed = match what {
            LARGE => 1.0,
            _ if what.contains(QUEUED) => 1.0 / FRAMES_PER_ALLOCATION,
            _ => 0.0,
        };
        if *count > allowed {
            complaints.push(format!(
                "{what} allocates {count} times for each frame; allowed is {allowed}"
            ));
        }
    }
    if !told.medians.keys().any(|name| name.starts_with(FORWARDING)) {
        complaints.push(
            "the forwarding path was not measured, so nobody knows whether it allocates"
                .to_string(),
        );
    }
    complaints
}

/// What takes longer or shorter than before, by more than this share; what has changed most comes first.
fn changes(before: &Saved, now: &Saved, share: f64) -> Vec<Change> {
    let mut all: Vec<Change> = now
        .medians_ns
        .iter()
        .filter(|(name, _)| *name != CALIBRATION)
        .filter_map(|(name, now_ns)| {
            let before_ns = *before.medians_ns.get(name)?;
            let factor = (now_ns / now.calibration_ns) / (before_ns / before.calibration_ns);
            let changed = factor > 1.0 + share || factor < 1.0 / (1.0 + share);
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

/// The comparison for people.
fn comparison(before: &Saved, now: &Saved, share: f64) -> String {
    let changes = changes(before, now, share);
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

/// Reads the tables that the benchmarks print: a line per benchmark, indented by its place in the tree, with the median in
/// the third column; behind it lines that count its allocations, with the mean in the fourth.
///
/// # Errors
/// There is no benchmark in it.
fn read(printed: &str) -> Result<Told> {
    let mut told = Told::default();
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
            if let Some(ns) = nanoseconds(median) {
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

/// A time such as `48.15 ns`.
fn nanoseconds(cell: &str) -> Option<f64> {
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

    fn saved(calibration_ns: f64, figures: &[(&str, f64)]) -> Saved {
        let medians_ns = figures
            .iter()
            .map(|(name, ns)| ((*name).to_string(), *ns))
            .collect();
        Saved {
            machine: serde_json::Value::Null,
            calibration_ns,
            medians_ns,
        }
    }

    #[test]
    fn medians_and_allocations_are_read_with_the_place_of_their_benchmark() {
        let told = read(PRINTED).expect("a table");
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
        assert!(read("nothing\n").is_err());
    }

    #[test]
    fn an_allocation_of_the_state_machine_is_an_error_and_one_for_many_queued_frames_is_not() {
        let told = read(PRINTED).expect("a table");
        let complaints = allocating(&told);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(
            complaints[0].starts_with("a_frame_between_two_tasks/2 allocates 1.02"),
            "{complaints:?}"
        );
        let silent = Told {
            allocations: BTreeMap::new(),
            ..told
        };
        assert_eq!(allocating(&silent), Vec::<String>::new());
        assert_eq!(
            allocating(&Told::default()).len(),
            1,
            "what was not measured is no proof"
        );
    }

    #[test]
    fn a_slower_machine_is_no_regression_and_a_slower_layer_is_one() {
        let before = saved(
            100.0,
            &[("a", 10.0), ("b", 10.0), ("c", 10.0), ("gone", 1.0)],
        );
        let now = saved(
            200.0,
            &[("a", 20.0), ("b", 40.0), ("c", 10.0), ("new", 1.0)],
        );
        let changes = changes(&before, &now, 0.25);
        let factors: Vec<(&str, f64)> = changes
            .iter()
            .map(|change| (change.name.as_str(), change.factor))
            .collect();
        assert_eq!(factors, [("b", 2.0), ("c", 0.5)]);
        let text = comparison(&before, &now, 0.25);
        assert!(
            text.contains("1 slower and 1 faster") && text.contains("not there any more: gone"),
            "{text}"
        );
    }
}
