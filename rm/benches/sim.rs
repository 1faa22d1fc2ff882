//! Simulates, in virtual time, a week of a thousand desktop machines, and days of three users, one
//! of whom requests all hosts. The simulations use the real decisions and the real service.
//!
//! The durations on hosts are drawn from measurements: `--owners=FILE` and `--migrate=FILE` name
//! the result files of these benchmarks. `--json=FILE` writes the results to a file. `cargo xtask
//! bench sim` runs this program and draws the results.

#[path = "../tests/day/mod.rs"]
mod day;
#[path = "../tests/desktop/mod.rs"]
mod desktop;
#[path = "../tests/pool/mod.rs"]
mod pool;
#[path = "../tests/random/mod.rs"]
mod random;
#[path = "../tests/week/mod.rs"]
mod week;

use day::{DayComparison, DayResults, ROOMY, SEEDS, TIGHT};
use pool::MeasuredTimes;
use serde::{Deserialize, Serialize};
use std::fs;
use std::process::ExitCode;
use week::WeekResults;

/// Memory size in MiB of the tasks whose measured migration times are used.
const TASK_MIB: u32 = 128;

/// Results of `cargo xtask bench owners`, in microseconds.
#[derive(Deserialize)]
struct OwnerResults {
    stood_still_us: Vec<u64>,
    clean_us: Vec<u64>,
}

/// A migration measured by `cargo xtask bench migrate`, in milliseconds.
#[derive(Deserialize)]
struct MeasuredMigration {
    freeze_ms: f64,
    total_ms: f64,
    arrived_ms: f64,
}

#[derive(Deserialize)]
struct SizeResults {
    mib: u32,
    ours: Vec<MeasuredMigration>,
}

#[derive(Deserialize)]
struct MigrationResults {
    sizes: Vec<SizeResults>,
}

#[derive(Serialize)]
struct SimulationResults {
    week: WeekResults,
    days: Vec<DayComparison>,
}

fn read_json<T: for<'a> Deserialize<'a>>(file: &str) -> Result<T, String> {
    let bytes = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    serde_json::from_slice(&bytes).map_err(|error| format!("{file}: {error}"))
}

/// Reads the measured times.
fn read_times(owners: &str, migrate: &str) -> Result<MeasuredTimes, String> {
    let (of_owners, of_moves) = (
        read_json::<OwnerResults>(owners)?,
        read_json::<MigrationResults>(migrate)?,
    );
    let moved = of_moves.sizes.into_iter().find(|size| size.mib == TASK_MIB);
    let moved = moved.map(|size| size.ours).unwrap_or_default();
    let shortest = moved
        .iter()
        .map(|one| one.total_ms)
        .fold(f64::INFINITY, f64::min);
    let seconds = |us: Vec<u64>| us.into_iter().map(|us| us as f64 / 1e6);
    let times = MeasuredTimes {
        stops: seconds(of_owners.stood_still_us).collect(),
        // A duration that is shorter than any migration belongs to a host without guests.
        clears: seconds(of_owners.clean_us)
            .filter(|s| *s * 1e3 >= shortest)
            .collect(),
        freezes: moved.iter().map(|one| one.freeze_ms / 1e3).collect(),
        moves: moved.iter().map(|one| one.arrived_ms / 1e3).collect(),
    };
    if [&times.stops, &times.clears, &times.freezes, &times.moves]
        .iter()
        .any(|all| all.is_empty())
    {
        return Err(format!(
            "{owners} or {migrate} contains no times of guests on owners' hosts, or of migrations of {TASK_MIB} MiB"
        ));
    }
    Ok(times)
}

fn run() -> Result<bool, String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| {
        let found = words
            .iter()
            .find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
        found.ok_or_else(|| {
            format!("{name}=FILE is missing; run this benchmark with 'cargo xtask bench sim'")
        })
    };
    let week = WeekResults::simulate(1, read_times(option("--owners")?, option("--migrate")?)?);
    print!("{}", week.text());
    let mut days = Vec::new();
    for day in [ROOMY, TIGHT] {
        for seed in SEEDS {
            let DayResults {
                alone,
                contended: beside,
            } = day.run(seed);
            days.push(DayComparison::of(&day, seed, &alone, &beside));
        }
    }
    println!("\n{}", DayComparison::table(&days));
    let good = days.iter().all(DayComparison::is_fair);
    let file = option("--json")?;
    let json =
        serde_json::to_vec(&SimulationResults { week, days }).map_err(|error| error.to_string())?;
    fs::write(file, json).map_err(|error| format!("{file}: {error}"))?;
    Ok(good)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            println!("light users wait longer next to a greedy user than allowed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("bench sim: {error}");
            ExitCode::FAILURE
        }
    }
}
