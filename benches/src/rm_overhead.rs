//! `cargo xtask bench rm`: measures by how much the resource manager slows down spawns and the
//! addition of hosts.
//!
//! Two of our virtual machines, one with a resource manager and one without, are up at the same
//! time and are measured in turn, so that other load on the machine affects both equally. The
//! authors of SEMPA published the same measurements for their resource manager.

use crate::figures::{TimeSummaries, combine_repetitions, median, parse_samples};
use crate::machine_info::MachineInfo;
use crate::systems::compile_one;
use anyhow::{Context, Result, bail};
use sempa_tests::run::run;
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, requirements};
use serde::Serialize;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Time limit for one run of the measuring program.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the daemon of a deleted host to exit.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of repetitions of each row in a full run. With only nine repetitions, the results of two
/// identical virtual machines differ by a tenth.
const REPETITIONS_FULL: usize = 61;
const REPETITIONS_QUICK: usize = 3;
/// Goal: maximum overhead of the resource manager in percent.
const OVERHEAD_PERCENT_MAX: f64 = 10.0;

/// A row of the table, and how it is measured.
struct OverheadRow {
    what: &'static str,
    /// Arguments of the measuring program.
    args: &'static [&'static str],
    /// Name of the time that the row shows.
    sample: &'static str,
    /// True if the measurement needs a second host in the virtual machine.
    two_hosts: bool,
    /// Overhead of SEMPA's resource manager, as published by its authors; `-` if they did not
    /// measure it.
    published_overhead: &'static str,
    /// True if the overhead must not exceed [`OVERHEAD_PERCENT_MAX`].
    has_goal: bool,
}

const OVERHEAD_ROWS: [OverheadRow; 8] = [
    OverheadRow {
        what: "spawn here, the call",
        args: &["spawn", "tasks=1", "rounds=100", "warm=4"],
        sample: "call",
        two_hosts: false,
        published_overhead: "+75 %",
        has_goal: true,
    },
    OverheadRow {
        what: "spawn here, to the first message",
        args: &["spawn", "tasks=1", "rounds=100", "warm=4"],
        sample: "first",
        two_hosts: false,
        published_overhead: "-",
        has_goal: true,
    },
    OverheadRow {
        what: "spawn there, the call",
        args: &["spawn", "tasks=1", "host=h2", "rounds=100", "warm=4"],
        sample: "call",
        two_hosts: true,
        published_overhead: "+166 %",
        has_goal: true,
    },
    OverheadRow {
        what: "spawn there, to the first message",
        args: &["spawn", "tasks=1", "host=h2", "rounds=100", "warm=4"],
        sample: "first",
        two_hosts: true,
        published_overhead: "-",
        has_goal: true,
    },
    OverheadRow {
        what: "addhosts of one host",
        args: &["add_hosts", "host=h2"],
        sample: "call",
        two_hosts: false,
        published_overhead: "+10-30 %",
        has_goal: true,
    },
    OverheadRow {
        what: "two tasks here, the call",
        args: &["spawn", "tasks=2", "rounds=50", "warm=4"],
        sample: "call",
        two_hosts: false,
        published_overhead: "-",
        has_goal: true,
    },
    OverheadRow {
        what: "one after a second, the call",
        args: &["spawn", "tasks=1", "rounds=2", "warm=2", "pause=1100"],
        sample: "call",
        two_hosts: false,
        published_overhead: "-",
        has_goal: true,
    },
    // In this row every spawn must ask the resource manager: it grants placement leases only to
    // tasks that have spawned twice. So the row has no goal.
    OverheadRow {
        what: "a program's first spawn, the call",
        args: &["spawn", "tasks=1", "rounds=1", "warm=0"],
        sample: "call",
        two_hosts: false,
        published_overhead: "-",
        has_goal: false,
    },
];

/// The results of one row.
#[derive(Clone, Debug, Serialize)]
struct MeasuredRow {
    what: &'static str,
    without_ms: f64,
    with_ms: f64,
    /// Overhead of the resource manager in percent: the median of the overheads of the repetitions.
    /// In a repetition the two virtual machines are measured directly one after the other.
    share_percent: f64,
    sempa: &'static str,
    judged: bool,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    rows: Vec<MeasuredRow>,
}

/// A running virtual machine, with or without a resource manager.
struct MeasuredVm<'a> {
    bed: &'a Testbed,
    vm: Vm<'a>,
}

impl<'a> MeasuredVm<'a> {
    fn start(bed: &'a Testbed, managed: bool, two_hosts: bool) -> Result<MeasuredVm<'a>> {
        let rm = managed.then(|| "pvm-rm".to_string());
        let side = MeasuredVm {
            bed,
            vm: Vm::start(
                bed,
                Settings {
                    rm,
                    ..Settings::default()
                },
            )?,
        };
        if two_hosts {
            side.vm.add(&["h2"])?;
        }
        Ok(side)
    }

    fn run_once(&self, words: &[&str]) -> Result<TimeSummaries> {
        let mut command = self.vm.command(
            self.bed.host(1),
            self.bed.home().join("pvm3/bin/LINUX64/peers"),
        );
        command.args(words);
        let samples = parse_samples(
            &run(command, RUN_TIMEOUT)?
                .expect_success("the measuring program")?
                .out,
        )?;
        if words[0] == "add_hosts" {
            wait_until_no_process(self.bed.host(2), "pvmd", DAEMON_EXIT_TIMEOUT)?;
        }
        Ok(samples)
    }
}

/// Measures with and without the resource manager and prints a table. Writes the table and JSON to
/// `results`. Returns true if every overhead with a goal is within `OVERHEAD_PERCENT_MAX`.
pub fn bench_rm(prefix: &Path, own_build: bool, quick: bool, results: &Path) -> Result<bool> {
    if let Some(lack) = requirements::lacks() {
        bail!("bench rm: {lack}");
    }
    let repetitions = if quick {
        REPETITIONS_QUICK
    } else {
        REPETITIONS_FULL
    };
    let mut machine = MachineInfo::describe(own_build, repetitions, quick);
    let beds = [
        Testbed::new(2, Some(prefix), &[])?,
        Testbed::new(2, Some(prefix), &[])?,
    ];
    beds.iter()
        .try_for_each(|bed| compile_one(bed, "gcc", "peers", Some("-lpvm3")))?;
    let mut rows = Vec::new();
    for two_hosts in [false, true] {
        let sides = [
            MeasuredVm::start(&beds[0], false, two_hosts)?,
            MeasuredVm::start(&beds[1], true, two_hosts)?,
        ];
        rows.extend(measure_in_turns(&sides, two_hosts, repetitions)?);
        let [without, with] = sides;
        without.vm.halt()?;
        with.vm.halt()?;
    }
    machine.update_load();
    let order = |row: &MeasuredRow| {
        OVERHEAD_ROWS
            .iter()
            .position(|known| known.what == row.what)
    };
    rows.sort_by_key(order);
    let text = format!("{}{}", machine.text(), table(&rows));
    fs::create_dir_all(results).with_context(|| results.display().to_string())?;
    fs::write(results.join("rm.txt"), &text)?;
    let good = rows
        .iter()
        .filter(|row| row.judged)
        .all(|row| row.share_percent < OVERHEAD_PERCENT_MAX);
    fs::write(
        results.join("rm.json"),
        serde_json::to_string_pretty(&Results { machine, rows })? + "\n",
    )?;
    println!("{text}written: {}", results.display());
    Ok(good)
}

/// Measures the rows that need two hosts, or those that need one. Both virtual machines take turns;
/// the first of `sides` has no resource manager.
fn measure_in_turns(
    sides: &[MeasuredVm<'_>; 2],
    two_hosts: bool,
    repetitions: usize,
) -> Result<Vec<MeasuredRow>> {
    let chosen: Vec<&OverheadRow> = OVERHEAD_ROWS
        .iter()
        .filter(|row| row.two_hosts == two_hosts)
        .collect();
    let mut words: Vec<&[&str]> = chosen.iter().map(|row| row.args).collect();
    words.dedup();
    let mut rows = Vec::new();
    for words in words {
        let mut taken: [Vec<TimeSummaries>; 2] = Default::default();
        for repetition in 1..=repetitions {
            eprintln!(
                "bench rm: {} ({repetition} of {repetitions})",
                words.join(" ")
            );
            // Every second repetition reverses the order, because the first virtual machine may
            // find cold caches.
            let order = if repetition % 2 == 0 { [1, 0] } else { [0, 1] };
            for side in order {
                taken[side].push(sides[side].run_once(words)?);
            }
        }
        for row in chosen.iter().filter(|row| row.args == words) {
            let ms = |side: usize| {
                combine_repetitions(&taken[side], row.sample).map(|sample| sample.median_us / 1e3)
            };
            let (without_ms, with_ms) = ms(0)
                .zip(ms(1))
                .with_context(|| format!("{} was not measured", row.what))?;
            let share_percent =
                overhead_percent(&taken, row.sample).context("no repetition has both sides")?;
            let OverheadRow {
                what,
                published_overhead: sempa,
                has_goal: judged,
                ..
            } = **row;
            rows.push(MeasuredRow {
                what,
                without_ms,
                with_ms,
                share_percent,
                sempa,
                judged,
            });
        }
    }
    Ok(rows)
}

/// Returns the overhead of the second virtual machine over the first one in percent: the median
/// over all repetitions.
fn overhead_percent(samples: &[Vec<TimeSummaries>; 2], name: &str) -> Option<f64> {
    let ratios = samples[0]
        .iter()
        .zip(&samples[1])
        .filter_map(|(without, with)| {
            let (without, with) = without.get(name).zip(with.get(name))?;
            Some(with.median_us / without.median_us)
        });
    median(ratios.collect()).map(|ratio| (ratio - 1.0) * 100.0)
}

fn table(rows: &[MeasuredRow]) -> String {
    let head = [
        "milliseconds, medians",
        "without",
        "with RM",
        "its share",
        "SEMPA's",
    ];
    let mut text = format!(
        "{:36} {:>10} {:>10} {:>10} {:>10}\n",
        head[0], head[1], head[2], head[3], head[4]
    );
    for MeasuredRow {
        what,
        without_ms,
        with_ms,
        share_percent,
        sempa,
        judged,
    } in rows
    {
        let share = format!("{share_percent:+.1} %");
        let note = if *judged {
            ""
        } else {
            "  asked for; not judged"
        };
        text.push_str(&format!(
            "{what:36} {without_ms:>10.3} {with_ms:>10.3} {share:>10} {sempa:>10}{note}\n"
        ));
    }
    text + &format!(
        "share: the median over the repetitions; allowed: less than {OVERHEAD_PERCENT_MAX} % for what programs do again and again\n"
    )
}
