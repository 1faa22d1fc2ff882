//! `cargo xtask bench sim` and `cargo xtask bench decide`: store the results of the resource
//! manager's own benchmarks (`rm/benches`) with a description of the machine. The results of `sim`
//! are also drawn as charts. Only the decisions are measured in real time; everything else is
//! simulated.

use crate::machine_info::MachineInfo;
use crate::plot::{Chart, Series};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Those results of the simulation that are drawn as charts.
#[derive(Deserialize)]
struct SimulationResults {
    week: SimulatedWeek,
    days: Vec<SimulatedDays>,
}

#[derive(Deserialize)]
struct SimulatedWeek {
    by_hour: Vec<(f64, f64)>,
    moves_by_hour: Vec<f64>,
    clean_s: Percentiles,
    stall_s: Percentiles,
}

#[derive(Deserialize)]
struct Percentiles {
    hundredths: Vec<f64>,
}

#[derive(Deserialize)]
struct SimulatedDays {
    hosts: u16,
    light: Vec<WaitComparison>,
}

#[derive(Deserialize)]
struct WaitComparison {
    waits_s: (Vec<f64>, Vec<f64>),
}

#[derive(Serialize)]
struct StoredResults<'a> {
    machine: &'a MachineInfo,
    results: Value,
}

/// Stores the results of a benchmark in the folder `results_folder`: `output`, its output, as
/// `NAME.txt`, and the content of the file `json_file` as `NAME.json`. `name` is NAME. Returns the
/// content of `json_file`.
fn store_results(
    name: &str,
    output: &str,
    json_file: &Path,
    machine: &MachineInfo,
    results_folder: &Path,
) -> Result<Value> {
    let results_value = fs::read(json_file).with_context(|| json_file.display().to_string())?;
    let results_value: Value =
        serde_json::from_slice(&results_value).with_context(|| json_file.display().to_string())?;
    fs::create_dir_all(results_folder).with_context(|| results_folder.display().to_string())?;
    fs::write(results_folder.join(format!("{name}.txt")), output)?;
    let stored_results = StoredResults {
        machine,
        results: results_value.clone(),
    };
    fs::write(
        results_folder.join(format!("{name}.json")),
        serde_json::to_string_pretty(&stored_results)? + "\n",
    )?;
    println!("written: {}", results_folder.display());
    Ok(results_value)
}

/// Stores the output and the results of `rm/benches/decide.rs`: the times of decisions.
///
/// # Errors
/// The file `json_file` is missing, or the results cannot be written.
pub fn store_decide(text: &str, json_file: &Path, results_folder: &Path) -> Result<()> {
    let machine = MachineInfo::collect(true, 1, false);
    let text = format!("{}{text}", machine.format());
    store_results("decide", &text, json_file, &machine, results_folder).map(drop)
}

/// Stores and draws the results of `rm/benches/sim.rs`: a simulated week, and several simulated
/// days.
///
/// # Errors
/// The file `json_file` is missing or malformed, or the results cannot be written.
pub fn store_sim(text: &str, json_file: &Path, results_folder: &Path) -> Result<()> {
    let machine = MachineInfo::collect(true, 1, false);
    let simulation_results = store_results("sim", text, json_file, &machine, results_folder)?;
    let simulation_results: SimulationResults = serde_json::from_value(simulation_results)
        .with_context(|| json_file.display().to_string())?;
    for chart in make_charts(&simulation_results) {
        if let Some(svg) = chart.linear_svg() {
            fs::write(results_folder.join(format!("{}.svg", chart.name)), svg)?;
        }
    }
    Ok(())
}

fn make_charts(results: &SimulationResults) -> [Chart; 4] {
    let SimulationResults { week, days } = results;
    let series = |name: &str, points: Vec<(f64, f64)>| Series {
        name: name.to_string(),
        points,
        p99: Vec::new(),
    };
    let chart = |name: &str, title: &str, x: &str, y: &str, series: Vec<Series>| {
        let [name, title, x, y] = [name, title, x, y].map(str::to_string);
        Chart {
            name,
            title,
            x,
            y,
            more_is_better: false,
            series,
        }
    };
    let by_hour = |select_value: fn(&(f64, f64)) -> f64| {
        week.by_hour
            .iter()
            .enumerate()
            .map(|(hour, both)| (hour as f64, select_value(both)))
            .collect::<Vec<_>>()
    };
    let moves = week
        .moves_by_hour
        .iter()
        .enumerate()
        .map(|(hour, moves)| (hour as f64, *moves))
        .collect();
    let millisecond_points = |spread: &Percentiles| {
        spread
            .hundredths
            .iter()
            .enumerate()
            .map(|(percent, s)| (percent as f64, s * 1e3))
            .collect::<Vec<_>>()
    };
    let host_counts: BTreeSet<u16> = days.iter().map(|day| day.hosts).collect();
    let both = |hosts: u16| {
        [("alone", false), ("beside a greedy one", true)].map(|(condition_text, is_shared)| {
            series(
                &format!("{hosts} hosts, {condition_text}"),
                waits_by_percentage(days, hosts, is_shared),
            )
        })
    };
    [
        chart(
            "sim-week",
            "A week of 1,000 desktops",
            "hours since Monday, 0:00",
            "hosts",
            vec![
                series("without an owner", by_hour(|both| both.0)),
                series("at work for guests", by_hour(|both| both.1)),
            ],
        ),
        chart(
            "sim-moves",
            "Moves in each hour",
            "hours since Monday, 0:00",
            "moves",
            vec![series("moves", moves)],
        ),
        chart(
            "sim-owners",
            "What owners notice",
            "percent of all times",
            "milliseconds after the login",
            vec![
                series("a guest runs on", millisecond_points(&week.stall_s)),
                series("until no guest is left", millisecond_points(&week.clean_s)),
            ],
        ),
        chart(
            "sim-waits",
            "Waiting of those who want little",
            "percent of their jobs",
            "minutes",
            host_counts.into_iter().flat_map(both).collect(),
        ),
    ]
}

/// Returns the waiting times of users with a light load in clusters of `hosts` hosts, as
/// (percentage of their jobs, minutes), in ascending order. `is_shared` is true for the times while
/// a user with a heavy load is active, too.
fn waits_by_percentage(days: &[SimulatedDays], hosts: u16, is_shared: bool) -> Vec<(f64, f64)> {
    let pair_waits_s = |pair: &WaitComparison| {
        if is_shared {
            pair.waits_s.1.clone()
        } else {
            pair.waits_s.0.clone()
        }
    };
    let pairs = days
        .iter()
        .filter(|day| day.hosts == hosts)
        .flat_map(|day| &day.light);
    let mut waits_s: Vec<f64> = pairs.flat_map(pair_waits_s).collect();
    waits_s.sort_by(f64::total_cmp);
    let last_index = waits_s.len().saturating_sub(1).max(1) as f64;
    waits_s
        .iter()
        .enumerate()
        .map(|(n, wait_s)| (100.0 * n as f64 / last_index, wait_s / 60.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulation_is_stored_and_drawn() {
        let spread = serde_json::json!({ "hundredths": [0.0, 0.02, 0.04] });
        let pair = serde_json::json!({ "waits_s": [[0.0, 60.0], [5.0, 66.0]] });
        let results = serde_json::json!({
            "week": { "by_hour": [[400.0, 300.0], [500.0, 450.0]], "moves_by_hour": [3, 4], "clean_s": spread, "stall_s": spread },
            "days": [{ "hosts": 9, "light": [pair] }, { "hosts": 7, "light": [pair] }, { "hosts": 9, "light": [] }],
        });
        let folder = std::env::temp_dir().join(format!("simulated-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let json_file = folder.join("found.json");
        fs::write(&json_file, results.to_string()).expect("it can be written");
        store_sim("a table\n", &json_file, &folder).expect("it is kept");
        let read_file = |name: &str| fs::read_to_string(folder.join(name)).expect("it was written");
        assert_eq!(read_file("sim.txt"), "a table\n");
        let stored_json: Value = serde_json::from_str(&read_file("sim.json")).expect("it is JSON");
        assert_eq!(stored_json["results"], results);
        for name in ["sim-week", "sim-moves", "sim-owners", "sim-waits"] {
            assert!(
                read_file(&format!("{name}.svg")).contains("<polyline"),
                "{name}"
            );
        }
        let waits_chart = read_file("sim-waits.svg");
        let labels: Vec<&str> = waits_chart
            .split(['<', '>'])
            .filter(|text| text.contains(" hosts, "))
            .collect();
        assert_eq!(
            labels,
            [
                "7 hosts, alone",
                "7 hosts, beside a greedy one",
                "9 hosts, alone",
                "9 hosts, beside a greedy one"
            ]
        );
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
