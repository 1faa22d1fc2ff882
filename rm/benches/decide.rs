//! What decisions cost, with few hosts and with more than there can be. Prints a table of microseconds of processor time, so
//! that a busy machine disturbs little, and ends with 1 if the median of one is above what is allowed; `cargo xtask bench
//! decide` runs it. Words say which ones: those whose names have one of them.

#[path = "../tests/large/mod.rs"]
mod large;

use large::{HOSTS_MAX, looks_at_all, looks_at_some, plans};
use nix::time::{ClockId, clock_gettime};
use sempa_proto::HostId;
use std::process::ExitCode;
use std::time::Duration;

/// Microseconds that a decision may take.
const ALLOWED: f64 = 1e3;
/// Measurements of each decision.
const TIMES: usize = 51;
/// A measurement takes so many microseconds at least: decisions that are too short for the clock are made more than once.
const MEASURED_MIN: f64 = 50.0;

/// Microseconds of one decision.
struct Cost {
    name: &'static str,
    median: f64,
    best: f64,
}

/// Processor time of this thread.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("this is Linux").into()
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
    // The first one fills caches.
    time(1);
    let each = (MEASURED_MIN / time(1)).ceil().max(1.0) as usize;
    let mut all: Vec<f64> = (0..TIMES).map(|_| time(each)).collect();
    all.sort_by(f64::total_cmp);
    Cost { name, median: all[TIMES / 2], best: all[0] }
}

fn main() -> ExitCode {
    // Cargo adds a word of its own.
    let only: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let sizes = [64, 1024, HostId::INDEX_MAX, HOSTS_MAX];
    let of_size = |hosts: &u16| {
        let mut costs = Vec::new();
        let mut visit = |name: &'static str, decide: &mut dyn FnMut(usize)| {
            if only.is_empty() || only.iter().any(|word| name.contains(word)) {
                costs.push(cost(name, decide));
            }
        };
        looks_at_some(*hosts, &mut visit);
        plans(*hosts, &mut visit);
        looks_at_all(*hosts, &mut visit);
        costs
    };
    let all: Vec<Vec<Cost>> = sizes.iter().map(of_size).collect();
    println!("{:36}{}", "microseconds, median and best, with", sizes.map(|hosts| format!("{hosts:10} hosts")).concat());
    for i in 0..all[0].len() {
        let times: Vec<String> = all.iter().map(|d| format!("{:8.1}{:8.1}", d[i].median, d[i].best)).collect();
        println!("{:36}{}", all[0][i].name, times.concat());
    }
    let mut good = true;
    for (hosts, costs) in sizes.iter().zip(&all) {
        for Cost { name, median, .. } in costs.iter().filter(|cost| cost.median > ALLOWED) {
            println!("above the {ALLOWED} µs that are allowed: {name}, {median:.0} µs with {hosts} hosts");
            good = false;
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
