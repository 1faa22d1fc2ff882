//! Simulates, in virtual time, a week of a thousand desktop machines, and days of three users, one
//! of whom requests all hosts. The simulations use the decisions and the service of the resource
//! manager without changes.
//!
//! The durations on hosts are drawn from measurements: `--owners=FILE` and `--migrate=FILE` name
//! the result files of the benchmarks `owners` and `migrate`. `--json=FILE` writes the results to a
//! file. `cargo xtask bench sim` runs this program and draws the results.

#[path = "../tests/day/mod.rs"]
mod day;
#[path = "../tests/desktop/mod.rs"]
mod desktop;
#[path = "../tests/desktop_pool/mod.rs"]
mod desktop_pool;
#[path = "../tests/rng/mod.rs"]
mod rng;
#[path = "../tests/week/mod.rs"]
mod week;

use day::{DayComparison, DayResults, ROOMY_POOL, SEEDS, TIGHT_POOL};
use desktop_pool::MeasuredTimes;
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

/// Reads the results of the benchmark `owners` from `owners_file` and those of the benchmark
/// `migrate` from `migrate_file`. Returns the times from which durations are drawn.
///
/// # Errors
///
/// A file cannot be read, or one of the lists of times is empty.
fn read_times(owners_file: &str, migrate_file: &str) -> Result<MeasuredTimes, String> {
    let (owner_results, migration_results) = (
        read_json::<OwnerResults>(owners_file)?,
        read_json::<MigrationResults>(migrate_file)?,
    );
    let migrations = migration_results
        .sizes
        .into_iter()
        .find(|size| size.mib == TASK_MIB);
    let migrations = migrations.map(|size| size.ours).unwrap_or_default();
    let total_ms_min = migrations
        .iter()
        .map(|migration| migration.total_ms)
        .fold(f64::INFINITY, f64::min);
    let to_seconds = |us: Vec<u64>| us.into_iter().map(|us| us as f64 / 1e6);
    let times = MeasuredTimes {
        stop_s: to_seconds(owner_results.stood_still_us).collect(),
        // A time shorter than the shortest migration belongs to a host without guests.
        clear_s: to_seconds(owner_results.clean_us)
            .filter(|s| *s * 1e3 >= total_ms_min)
            .collect(),
        freeze_s: migrations
            .iter()
            .map(|migration| migration.freeze_ms / 1e3)
            .collect(),
        migration_s: migrations
            .iter()
            .map(|migration| migration.arrived_ms / 1e3)
            .collect(),
    };
    if [
        &times.stop_s,
        &times.clear_s,
        &times.freeze_s,
        &times.migration_s,
    ]
    .iter()
    .any(|durations| durations.is_empty())
    {
        return Err(format!(
            "{owners_file} or {migrate_file} contains no times of guests on owners' hosts, or of migrations of {TASK_MIB} MiB"
        ));
    }
    Ok(times)
}

fn run() -> Result<bool, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let find_option = |name: &str| {
        let option_value = arguments
            .iter()
            .find_map(|find_option| find_option.strip_prefix(name)?.strip_prefix('='));
        option_value.ok_or_else(|| {
            format!("{name}=FILE is missing; run this benchmark with 'cargo xtask bench sim'")
        })
    };
    let week = WeekResults::simulate(
        1,
        read_times(find_option("--owners")?, find_option("--migrate")?)?,
    );
    print!("{}", week.format_text());
    let mut days = Vec::new();
    for day in [ROOMY_POOL, TIGHT_POOL] {
        for seed in SEEDS {
            let DayResults {
                without_greedy,
                with_greedy,
            } = day.run(seed);
            days.push(DayComparison::from_runs(
                &day,
                seed,
                &without_greedy,
                &with_greedy,
            ));
        }
    }
    println!("\n{}", DayComparison::format_table(&days));
    let are_fair = days.iter().all(DayComparison::is_fair);
    let file = find_option("--json")?;
    let json =
        serde_json::to_vec(&SimulationResults { week, days }).map_err(|error| error.to_string())?;
    fs::write(file, json).map_err(|error| format!("{file}: {error}"))?;
    Ok(are_fair)
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
