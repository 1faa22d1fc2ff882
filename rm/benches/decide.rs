//! Measures the processor time of decisions, with few hosts and with more hosts than a virtual
//! machine can have. Unlike elapsed time, processor time hardly depends on the load of the machine.
//!
//! Prints a table in microseconds. The exit status is 1 if the median of a decision exceeds
//! [`DECISION_US_MAX`]. `cargo xtask bench decide` runs this program. `--json=FILE` writes the
//! results to a file. If there are other arguments, only the decisions whose names contain one of
//! them are measured.

#[path = "../tests/desktop/mod.rs"]
mod desktop;
#[path = "../tests/large/mod.rs"]
mod large;

use large::{HOSTS_MAX, visit_global_decisions, visit_local_decisions, visit_work_plans};
use nix::time::{ClockId, clock_gettime};
use sempa_proto::HostId;
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Maximum median time of a decision in microseconds.
const DECISION_US_MAX: f64 = 1e3;
/// Number of measurements of each decision; odd, so that one of them is the median.
const MEASUREMENT_COUNT: usize = 51;
/// Minimum duration of a measurement in microseconds. A shorter decision is repeated within the
/// measurement.
const MEASUREMENT_US_MIN: f64 = 50.0;

/// Processor time of one decision in microseconds.
#[derive(Serialize)]
struct DecisionCost {
    name: &'static str,
    median: f64,
    best: f64,
}

/// Processor times of all decisions with this number of hosts.
#[derive(Serialize)]
struct DecisionCosts {
    hosts: u16,
    decisions: Vec<DecisionCost>,
}

/// Returns the processor time that this thread has used.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("this is Linux")
        .into()
}

fn measure(name: &'static str, decide: &mut dyn FnMut(usize)) -> DecisionCost {
    let mut decision_count = 0;
    let mut mean_us = |run_count: usize| {
        let start = thread_cpu_time();
        for _ in 0..run_count {
            decide(decision_count);
            decision_count += 1;
        }
        (thread_cpu_time() - start).as_secs_f64() * 1e6 / run_count as f64
    };
    // The first run only fills the caches; its time is not used.
    mean_us(1);
    let runs_per_measurement = (MEASUREMENT_US_MIN / mean_us(1)).ceil().max(1.0) as usize;
    let mut measurements_us: Vec<f64> = (0..MEASUREMENT_COUNT)
        .map(|_| mean_us(runs_per_measurement))
        .collect();
    measurements_us.sort_by(f64::total_cmp);
    DecisionCost {
        name,
        median: measurements_us[MEASUREMENT_COUNT / 2],
        best: measurements_us[0],
    }
}

fn print_table(costs_by_size: &[DecisionCosts]) {
    let column_titles: Vec<String> = costs_by_size
        .iter()
        .map(|costs| format!("{:10} hosts", costs.hosts))
        .collect();
    println!(
        "{:36}{}",
        "microseconds, median and best, with",
        column_titles.concat()
    );
    for i in 0..costs_by_size[0].decisions.len() {
        let format_cell = |costs: &DecisionCosts| {
            format!(
                "{:8.1}{:8.1}",
                costs.decisions[i].median, costs.decisions[i].best
            )
        };
        println!(
            "{:36}{}",
            costs_by_size[0].decisions[i].name,
            costs_by_size
                .iter()
                .map(format_cell)
                .collect::<Vec<_>>()
                .concat()
        );
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let json_file = arguments
        .iter()
        .find_map(|argument| argument.strip_prefix("--json="));
    // Cargo adds the argument `--bench`.
    let name_filters: Vec<&String> = arguments
        .iter()
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let measure_decisions = |hosts: u16| {
        let mut decisions = Vec::new();
        let mut visit = |name: &'static str, decide: &mut dyn FnMut(usize)| {
            if name_filters.is_empty()
                || name_filters
                    .iter()
                    .any(|argument| name.contains(argument.as_str()))
            {
                decisions.push(measure(name, decide));
            }
        };
        visit_local_decisions(hosts, &mut visit);
        visit_work_plans(hosts, &mut visit);
        visit_global_decisions(hosts, &mut visit);
        DecisionCosts { hosts, decisions }
    };
    let costs_by_size: Vec<DecisionCosts> = [64, 1024, HostId::INDEX_MAX, HOSTS_MAX]
        .map(measure_decisions)
        .into();
    print_table(&costs_by_size);
    let mut has_succeeded = true;
    for DecisionCosts { hosts, decisions } in &costs_by_size {
        for DecisionCost { name, median, .. } in decisions
            .iter()
            .filter(|cost| cost.median > DECISION_US_MAX)
        {
            println!(
                "{name} takes {median:.0} µs with {hosts} hosts; {DECISION_US_MAX} µs are allowed"
            );
            has_succeeded = false;
        }
    }
    if let Some(file) = json_file
        && let Err(error) = std::fs::write(
            file,
            serde_json::to_vec(&costs_by_size).expect("numbers and names"),
        )
    {
        println!("cannot write the results to {file}: {error}");
        has_succeeded = false;
    }
    if has_succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
