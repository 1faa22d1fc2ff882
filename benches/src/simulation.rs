//! `cargo xtask bench sim` and `cargo xtask bench decide`: store the results of the resource
//! manager's own benchmarks (`rm/benches`) with a description of the machine, and draw them. Only
//! the decisions are measured in real time; everything else is simulated.

use crate::machine_info::MachineInfo;
use crate::plot::{Chart, Series};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The parts of the simulation's results that are drawn as charts.
#[derive(Deserialize)]
struct SimulationResults {
    week: SimulatedWeek,
    days: Vec<SimulatedDays>,
}

#[derive(Deserialize)]
struct SimulatedWeek {
    by_hour: Vec<(f64, f64)>,
    moves_by_hour: Vec<f64>,
    clean_s: Spread,
    stall_s: Spread,
}

#[derive(Deserialize)]
struct Spread {
    hundredths: Vec<f64>,
}

#[derive(Deserialize)]
struct SimulatedDays {
    hosts: u16,
    light: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    waits_s: (Vec<f64>, Vec<f64>),
}

#[derive(Serialize)]
struct StoredResults<'a> {
    machine: &'a MachineInfo,
    results: Value,
}

/// Stores the output (`text`) and the results (the file `json`) of a benchmark in the folder
/// `results`, under the name `name`. Returns the results.
fn store_results(
    name: &str,
    text: &str,
    json: &Path,
    machine: &MachineInfo,
    results: &Path,
) -> Result<Value> {
    let found = fs::read(json).with_context(|| json.display().to_string())?;
    let found: Value =
        serde_json::from_slice(&found).with_context(|| json.display().to_string())?;
    fs::create_dir_all(results).with_context(|| results.display().to_string())?;
    fs::write(results.join(format!("{name}.txt")), text)?;
    let kept = StoredResults {
        machine,
        results: found.clone(),
    };
    fs::write(
        results.join(format!("{name}.json")),
        serde_json::to_string_pretty(&kept)? + "\n",
    )?;
    println!("written: {}", results.display());
    Ok(found)
}

/// Stores the output and the results of `rm/benches/decide.rs`: the cost of decisions.
///
/// # Errors
/// Fails if the file `json` is missing or the results cannot be written.
pub fn store_decide(text: &str, json: &Path, results: &Path) -> Result<()> {
    let machine = MachineInfo::describe(true, 1, false);
    let text = format!("{}{text}", machine.text());
    store_results("decide", &text, json, &machine, results).map(drop)
}

/// Stores and draws the results of `rm/benches/sim.rs`: a simulated week, and some simulated days.
///
/// # Errors
/// Fails if the file `json` is missing or malformed, or if the results cannot be written.
pub fn store_sim(text: &str, json: &Path, results: &Path) -> Result<()> {
    let machine = MachineInfo::describe(true, 1, false);
    let results_json = store_results("sim", text, json, &machine, results)?;
    let results_json: SimulationResults =
        serde_json::from_value(results_json).with_context(|| json.display().to_string())?;
    for chart in charts(&results_json) {
        if let Some(svg) = chart.linear_svg() {
            fs::write(results.join(format!("{}.svg", chart.name)), svg)?;
        }
    }
    Ok(())
}

fn charts(found: &SimulationResults) -> [Chart; 4] {
    let SimulationResults { week, days } = found;
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
    let by_hour = |of: fn(&(f64, f64)) -> f64| {
        week.by_hour
            .iter()
            .enumerate()
            .map(|(hour, both)| (hour as f64, of(both)))
            .collect::<Vec<_>>()
    };
    let moves = week
        .moves_by_hour
        .iter()
        .enumerate()
        .map(|(hour, moves)| (hour as f64, *moves))
        .collect();
    let ms = |spread: &Spread| {
        spread
            .hundredths
            .iter()
            .enumerate()
            .map(|(part, s)| (part as f64, s * 1e3))
            .collect::<Vec<_>>()
    };
    let pools: BTreeSet<u16> = days.iter().map(|day| day.hosts).collect();
    let both = |hosts: u16| {
        [("alone", false), ("beside a greedy one", true)].map(|(how, beside)| {
            series(&format!("{hosts} hosts, {how}"), waits(days, hosts, beside))
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
                series("a guest runs on", ms(&week.stall_s)),
                series("until no guest is left", ms(&week.clean_s)),
            ],
        ),
        chart(
            "sim-waits",
            "Waiting of those who want little",
            "percent of their jobs",
            "minutes",
            pools.into_iter().flat_map(both).collect(),
        ),
    ]
}

/// Returns the waiting times, in minutes, of those who want little in a pool of `hosts` hosts, by
/// the percentage of their jobs. `is_shared` is true for the times next to a greedy user.
fn waits(days: &[SimulatedDays], hosts: u16, is_shared: bool) -> Vec<(f64, f64)> {
    let of_pair = |pair: &Pair| {
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
    let mut all: Vec<f64> = pairs.flat_map(of_pair).collect();
    all.sort_by(f64::total_cmp);
    let last = all.len().saturating_sub(1).max(1) as f64;
    all.iter()
        .enumerate()
        .map(|(n, wait)| (100.0 * n as f64 / last, wait / 60.0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results of a simulation are stored and drawn.
    #[test]
    fn simulation_is_stored_and_drawn() {
        let spread = serde_json::json!({ "hundredths": [0.0, 0.02, 0.04] });
        let pair = serde_json::json!({ "waits_s": [[0.0, 60.0], [5.0, 66.0]] });
        let found = serde_json::json!({
            "week": { "by_hour": [[400.0, 300.0], [500.0, 450.0]], "moves_by_hour": [3, 4], "clean_s": spread, "stall_s": spread },
            "days": [{ "hosts": 9, "light": [pair] }, { "hosts": 7, "light": [pair] }, { "hosts": 9, "light": [] }],
        });
        let folder = std::env::temp_dir().join(format!("simulated-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let json = folder.join("found.json");
        fs::write(&json, found.to_string()).expect("it can be written");
        store_sim("a table\n", &json, &folder).expect("it is kept");
        let read = |name: &str| fs::read_to_string(folder.join(name)).expect("it was written");
        assert_eq!(read("sim.txt"), "a table\n");
        let kept: Value = serde_json::from_str(&read("sim.json")).expect("it is JSON");
        assert_eq!(kept["results"], found);
        for name in ["sim-week", "sim-moves", "sim-owners", "sim-waits"] {
            assert!(read(&format!("{name}.svg")).contains("<polyline"), "{name}");
        }
        let waits = read("sim-waits.svg");
        let labels: Vec<&str> = waits
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
