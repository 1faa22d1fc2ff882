//! Measures the processor time of decisions, with few hosts and with more hosts than a virtual
//! machine can have. Unlike elapsed time, processor time hardly depends on the load of the machine.
//!
//! Prints a table in microseconds. The exit status is 1 if the median of a decision exceeds the
//! limit. `cargo xtask bench decide` runs this program. `--json=FILE` writes the results to a file.
//! Other arguments select the decisions whose names contain one of them.

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
/// Number of measurements of each decision.
const MEASUREMENTS: usize = 51;
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

/// Returns the processor time of this thread.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("this is Linux")
        .into()
}

fn measure(name: &'static str, decide: &mut dyn FnMut(usize)) -> DecisionCost {
    let mut made = 0;
    let mut time = |times: usize| {
        let begin = thread_cpu_time();
        for _ in 0..times {
            decide(made);
            made += 1;
        }
        (thread_cpu_time() - begin).as_secs_f64() * 1e6 / times as f64
    };
    // The first run fills the caches.
    time(1);
    let each = (MEASUREMENT_US_MIN / time(1)).ceil().max(1.0) as usize;
    let mut all: Vec<f64> = (0..MEASUREMENTS).map(|_| time(each)).collect();
    all.sort_by(f64::total_cmp);
    DecisionCost {
        name,
        median: all[MEASUREMENTS / 2],
        best: all[0],
    }
}

fn table(all: &[DecisionCosts]) {
    let heads: Vec<String> = all
        .iter()
        .map(|costs| format!("{:10} hosts", costs.hosts))
        .collect();
    println!(
        "{:36}{}",
        "microseconds, median and best, with",
        heads.concat()
    );
    for i in 0..all[0].decisions.len() {
        let cell = |costs: &DecisionCosts| {
            format!(
                "{:8.1}{:8.1}",
                costs.decisions[i].median, costs.decisions[i].best
            )
        };
        println!(
            "{:36}{}",
            all[0].decisions[i].name,
            all.iter().map(cell).collect::<Vec<_>>().concat()
        );
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let json = words.iter().find_map(|word| word.strip_prefix("--json="));
    // Cargo adds an argument of its own.
    let only: Vec<&String> = words
        .iter()
        .filter(|word| !word.starts_with("--"))
        .collect();
    let of_size = |hosts: u16| {
        let mut decisions = Vec::new();
        let mut visit = |name: &'static str, decide: &mut dyn FnMut(usize)| {
            if only.is_empty() || only.iter().any(|word| name.contains(word.as_str())) {
                decisions.push(measure(name, decide));
            }
        };
        visit_local_decisions(hosts, &mut visit);
        visit_work_plans(hosts, &mut visit);
        visit_global_decisions(hosts, &mut visit);
        DecisionCosts { hosts, decisions }
    };
    let all: Vec<DecisionCosts> = [64, 1024, HostId::INDEX_MAX, HOSTS_MAX].map(of_size).into();
    table(&all);
    let mut within_limits = true;
    for DecisionCosts { hosts, decisions } in &all {
        for DecisionCost { name, median, .. } in decisions
            .iter()
            .filter(|cost| cost.median > DECISION_US_MAX)
        {
            println!(
                "{name} takes {median:.0} µs with {hosts} hosts; {DECISION_US_MAX} µs are allowed"
            );
            within_limits = false;
        }
    }
    if let Some(file) = json
        && let Err(error) =
            std::fs::write(file, serde_json::to_vec(&all).expect("numbers and names"))
    {
        println!("cannot write the results to {file}: {error}");
        within_limits = false;
    }
    if within_limits {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
