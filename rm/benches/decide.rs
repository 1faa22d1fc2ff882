//! Measures the processor time of decisions, with few hosts and with more than a virtual machine
//! can have. Processor time is hardly disturbed by a busy machine.
//!
//! Prints a table of microseconds and exits with 1 if the median of a decision exceeds the allowed
//! time. `cargo xtask bench decide` runs it. `--json=FILE` writes the results to a file. Other
//! arguments select the decisions whose names contain one of them.

#[path = "../tests/desktop/mod.rs"]
mod desktop;
#[path = "../tests/large/mod.rs"]
mod large;

use large::{HOSTS_MAX, looks_at_all, looks_at_some, plans};
use nix::time::{ClockId, clock_gettime};
use sempa_proto::HostId;
use serde::Serialize;
use std::process::ExitCode;
use std::time::Duration;

/// Microseconds that a decision may take.
const ALLOWED: f64 = 1e3;
/// Measurements of each decision.
const TIMES: usize = 51;
/// Minimum microseconds of a measurement: short decisions are repeated within one measurement.
const MEASURED_MIN: f64 = 50.0;

/// Microseconds of one decision.
#[derive(Serialize)]
struct Cost {
    name: &'static str,
    median: f64,
    best: f64,
}

/// Costs of all decisions with this number of hosts.
#[derive(Serialize)]
struct Costs {
    hosts: u16,
    decisions: Vec<Cost>,
}

/// Returns the processor time of this thread.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("this is Linux")
        .into()
}

fn cost(name: &'static str, decide: &mut dyn FnMut(usize)) -> Cost {
    let mut made = 0;
    let mut time = |times: usize| {
        let begin = now();
        for _ in 0..times {
            decide(made);
            made += 1;
        }
        (now() - begin).as_secs_f64() * 1e6 / times as f64
    };
    // The first run fills the caches.
    time(1);
    let each = (MEASURED_MIN / time(1)).ceil().max(1.0) as usize;
    let mut all: Vec<f64> = (0..TIMES).map(|_| time(each)).collect();
    all.sort_by(f64::total_cmp);
    Cost {
        name,
        median: all[TIMES / 2],
        best: all[0],
    }
}

fn table(all: &[Costs]) {
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
        let cell = |costs: &Costs| {
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
                decisions.push(cost(name, decide));
            }
        };
        looks_at_some(hosts, &mut visit);
        plans(hosts, &mut visit);
        looks_at_all(hosts, &mut visit);
        Costs { hosts, decisions }
    };
    let all: Vec<Costs> = [64, 1024, HostId::INDEX_MAX, HOSTS_MAX].map(of_size).into();
    table(&all);
    let mut good = true;
    for Costs { hosts, decisions } in &all {
        for Cost { name, median, .. } in decisions.iter().filter(|cost| cost.median > ALLOWED) {
            println!("{name} takes {median:.0} µs with {hosts} hosts; {ALLOWED} µs are allowed");
            good = false;
        }
    }
    if let Some(file) = json
        && let Err(error) =
            std::fs::write(file, serde_json::to_vec(&all).expect("numbers and names"))
    {
        println!("cannot write the results to {file}: {error}");
        good = false;
    }
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
