//! Simulates, in virtual time, a week of a thousand desktops and days of three users one of whom
//! requests all hosts. The decisions and the service are the real ones.
//!
//! Durations on hosts are drawn from measurements: `--owners=FILE` and `--migrate=FILE` name the
//! results of these benchmarks. `--json=FILE` writes the results to a file. `cargo xtask bench sim`
//! runs it and draws the results.

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

use day::{Both, Compared, ROOMY, SEEDS, TIGHT};
use pool::Times;
use serde::{Deserialize, Serialize};
use std::fs;
use std::process::ExitCode;
use week::Week;

/// Size of the tasks whose migration times are used, in MiB.
const MIB: u32 = 128;

/// Results of `cargo xtask bench owners`, in microseconds.
#[derive(Deserialize)]
struct Owners {
    stood_still_us: Vec<u64>,
    clean_us: Vec<u64>,
}

/// A migration measured by `cargo xtask bench migrate`, in milliseconds.
#[derive(Deserialize)]
struct Moved {
    freeze_ms: f64,
    total_ms: f64,
    arrived_ms: f64,
}

#[derive(Deserialize)]
struct OfSize {
    mib: u32,
    ours: Vec<Moved>,
}

#[derive(Deserialize)]
struct Migrate {
    sizes: Vec<OfSize>,
}

#[derive(Serialize)]
struct Results {
    week: Week,
    days: Vec<Compared>,
}

fn read<T: for<'a> Deserialize<'a>>(file: &str) -> Result<T, String> {
    let bytes = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    serde_json::from_slice(&bytes).map_err(|error| format!("{file}: {error}"))
}

/// Reads the measured times.
fn times(owners: &str, migrate: &str) -> Result<Times, String> {
    let (of_owners, of_moves) = (read::<Owners>(owners)?, read::<Migrate>(migrate)?);
    let moved = of_moves.sizes.into_iter().find(|size| size.mib == MIB);
    let moved = moved.map(|size| size.ours).unwrap_or_default();
    let shortest = moved
        .iter()
        .map(|one| one.total_ms)
        .fold(f64::INFINITY, f64::min);
    let seconds = |us: Vec<u64>| us.into_iter().map(|us| us as f64 / 1e6);
    let times = Times {
        stops: seconds(of_owners.stood_still_us).collect(),
        // A host that was clean sooner than any migration takes had no guest.
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
            "{owners} or {migrate} contains no times of guests on owners' hosts, or of migrations of {MIB} MiB"
        ));
    }
    Ok(times)
}

fn run() -> Result<bool, String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |name: &str| {
        let found = words
            .iter()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        found.ok_or_else(|| {
            format!("{name}=FILE is missing; run this benchmark with 'cargo xtask bench sim'")
        })
    };
    let week = Week::of(1, times(word("--owners")?, word("--migrate")?)?);
    print!("{}", week.text());
    let mut days = Vec::new();
    for day in [ROOMY, TIGHT] {
        for seed in SEEDS {
            let Both { alone, beside } = day.run(seed);
            days.push(Compared::of(&day, seed, &alone, &beside));
        }
    }
    println!("\n{}", Compared::table(&days));
    let good = days.iter().all(Compared::is_fair);
    let file = word("--json")?;
    let json = serde_json::to_vec(&Results { week, days }).map_err(|error| error.to_string())?;
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
