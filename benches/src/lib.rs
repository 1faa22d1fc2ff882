//! Benchmarks. `benches/wire.rs` and its neighbours measure single layers without any I/O (`cargo xtask bench micro`, which
//! compares them with what was saved by this library). The rest of it is `cargo xtask bench peers`: the running system beside
//! PVM 3.4.6, Open MPI and MPICH, in one run on one machine; `cargo xtask bench rm`: with and without the resource manager;
//! `cargo xtask bench balance`: a farm that is balanced beside one that is not; `cargo xtask bench migrate`: tasks that are
//! moved, beside bare CRIU; `cargo xtask bench owners --sizes`: tasks that leave for an owner; `cargo xtask bench soak`: tasks that talk and are moved hundreds of times, and what that
//! leaves behind; and it keeps what `cargo xtask bench decide` and `cargo xtask bench sim` find.
//!
//! It measures and tells; it judges nothing that a test could rest on, because a loaded machine is slow without a defect.

mod balanced;
mod curves;
mod evicted;
mod figures;
mod floor;
mod machine;
mod managed;
mod micro;
mod moved;
mod netpipe;
mod plot;
mod report;
mod rows;
mod soak;
mod systems;
mod virtual_time;

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::PathBuf;

pub use balanced::{Balance, balanced};
pub use evicted::{Evict, evicted};
pub use figures::System;
pub use managed::managed;
pub use micro::Micro;
pub use moved::{Migrate, migrated};
pub use soak::{Soak, soaked};
pub use virtual_time::{decided, simulated};

/// Debian packages that the systems come from.
pub const PACKAGES: [&str; 7] = [
    "pvm",
    "pvm-dev",
    "openmpi-bin",
    "libopenmpi-dev",
    "mpich",
    "libmpich-dev",
    "netpipe-pvm",
];

/// Repetitions of a whole run and of a quick one.
const REPETITIONS: usize = 5;
const REPETITIONS_QUICK: usize = 2;

/// What to measure, and how long.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where our programs are installed.
    pub prefix: PathBuf,
    /// They were built for this run, from these sources.
    pub own_build: bool,
    /// Fewer repetitions and rounds.
    pub quick: bool,
    /// Names of rows and curves, a `*` at the end for any; none: all.
    pub only: Vec<String>,
    /// Repetitions, if not the usual number.
    pub repetitions: Option<usize>,
    /// Folder for JSON and plots.
    pub results: PathBuf,
}

impl Settings {
    /// The command that measures the same again.
    fn words(&self) -> String {
        let mut words = "cargo xtask bench peers".to_string();
        if self.quick {
            words.push_str(" --quick");
        }
        if let Some(repetitions) = self.repetitions {
            words.push_str(&format!(" --repetitions {repetitions}"));
        }
        self.only
            .iter()
            .for_each(|name| words.push_str(&format!(" --only '{name}'")));
        words
    }
}

/// Measures, prints the table, writes the results. True if every measurement of ours worked, whether fast or not; what
/// another system cannot do is told.
///
/// # Errors
/// A system cannot be started, or the results cannot be written.
pub fn peers(settings: &Settings) -> Result<bool> {
    let only = &settings.only;
    let chosen = rows::chosen(only);
    let curves: Vec<&str> = curves::NAMES
        .into_iter()
        .filter(|name| only.is_empty() || rows::is_meant(name, only))
        .collect();
    let with_floor = only.is_empty() || rows::is_meant(floor::NAME, only);
    if chosen.is_empty() && curves.is_empty() && !with_floor {
        let names = [rows::names(), curves::NAMES.to_vec(), vec![floor::NAME]].concat();
        bail!(
            "bench peers: no row is called {}; there are: {}",
            only.join(", "),
            names.join(", ")
        );
    }
    let repetitions = settings.repetitions.unwrap_or(if settings.quick {
        REPETITIONS_QUICK
    } else {
        REPETITIONS
    });
    fs::create_dir_all(&settings.results)
        .with_context(|| settings.results.display().to_string())?;
    let machine = machine::Machine::describe(settings.own_build, repetitions, settings.quick);
    let mut report = report::Report::new(machine, settings.words());
    // Written after each part: who interrupts a long run keeps what it had.
    report.add_rows(
        &chosen,
        systems::measure(&settings.prefix, &chosen, repetitions, settings.quick)?,
    );
    report.write(&settings.results)?;
    if with_floor {
        report.add_floor(floor::measure(settings.quick)?);
        report.write(&settings.results)?;
    }
    for name in curves {
        report.add_curves(curves::measure(&settings.prefix, name, settings.quick)?);
        report.write(&settings.results)?;
    }
    println!("{}written: {}", report.text(), settings.results.display());
    Ok(!report.is_ours_in_trouble())
}
