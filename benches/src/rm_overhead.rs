//! `cargo xtask bench rm`: measures by how much the resource manager slows down spawns and the
//! addition of hosts.
//!
//! Two virtual machines of Sempa, one with a resource manager and one without, run at the same
//! time. They are measured alternately, so that other load on the machine affects both equally. The
//! authors of SEMPA published the same measurements for their resource manager.

use crate::figures::{TimeSummaries, combine_repetitions, median, parse_samples};
use crate::machine_info::MachineInfo;
use crate::systems::compile_program;
use anyhow::{Context, Result, bail};
use sempa_tests::run::run_to_end;
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, requirements};
use serde::Serialize;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Time limit for one run of the measuring program.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the daemon of a deleted host to exit.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of repetitions of each row in a full run. In a run with only nine repetitions, the
/// results of two identical virtual machines differed by a tenth.
const FULL_REPETITION_COUNT: usize = 61;
const QUICK_REPETITION_COUNT: usize = 3;
/// Goal: upper limit of the resource manager's overhead in percent, exclusive.
const OVERHEAD_PERCENT_END: f64 = 10.0;

/// A row of the table, and the measurement for the row.
struct OverheadRow {
    title: &'static str,
    /// Arguments of the measuring program.
    program_arguments: &'static [&'static str],
    /// Name of the time that the row shows, as the program prints it.
    time_name: &'static str,
    /// True if the measurement needs a second host in the virtual machine.
    needs_two_hosts: bool,
    /// Overhead of the resource manager of SEMPA, as its authors published it; `-` if the authors
    /// did not measure it.
    published_overhead: &'static str,
    /// True if the overhead must be less than [`OVERHEAD_PERCENT_END`].
    has_goal: bool,
}

const OVERHEAD_ROWS: [OverheadRow; 8] = [
    OverheadRow {
        title: "spawn here, the call",
        program_arguments: &["spawn", "tasks=1", "rounds=100", "warm=4"],
        time_name: "call",
        needs_two_hosts: false,
        published_overhead: "+75 %",
        has_goal: true,
    },
    OverheadRow {
        title: "spawn here, to the first message",
        program_arguments: &["spawn", "tasks=1", "rounds=100", "warm=4"],
        time_name: "first",
        needs_two_hosts: false,
        published_overhead: "-",
        has_goal: true,
    },
    OverheadRow {
        title: "spawn there, the call",
        program_arguments: &["spawn", "tasks=1", "host=h2", "rounds=100", "warm=4"],
        time_name: "call",
        needs_two_hosts: true,
        published_overhead: "+166 %",
        has_goal: true,
    },
    OverheadRow {
        title: "spawn there, to the first message",
        program_arguments: &["spawn", "tasks=1", "host=h2", "rounds=100", "warm=4"],
        time_name: "first",
        needs_two_hosts: true,
        published_overhead: "-",
        has_goal: true,
    },
    OverheadRow {
        title: "addhosts of one host",
        program_arguments: &["add_hosts", "host=h2"],
        time_name: "call",
        needs_two_hosts: false,
        published_overhead: "+10-30 %",
        has_goal: true,
    },
    OverheadRow {
        title: "two tasks here, the call",
        program_arguments: &["spawn", "tasks=2", "rounds=50", "warm=4"],
        time_name: "call",
        needs_two_hosts: false,
        published_overhead: "-",
        has_goal: true,
    },
    OverheadRow {
        title: "one after a second, the call",
        program_arguments: &["spawn", "tasks=1", "rounds=2", "warm=2", "pause=1100"],
        time_name: "call",
        needs_two_hosts: false,
        published_overhead: "-",
        has_goal: true,
    },
    // In this row every spawn must ask the resource manager, because the resource manager grants
    // placement leases only to tasks that have spawned twice. Therefore the row has no goal.
    OverheadRow {
        title: "a program's first spawn, the call",
        program_arguments: &["spawn", "tasks=1", "rounds=1", "warm=0"],
        time_name: "call",
        needs_two_hosts: false,
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
    /// Overhead of the resource manager in percent: the median of the overheads of all repetitions.
    /// Each repetition measures the second virtual machine directly after the first.
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
    testbed: &'a Testbed,
    vm: Vm<'a>,
}

impl<'a> MeasuredVm<'a> {
    fn start(testbed: &'a Testbed, has_rm: bool, needs_two_hosts: bool) -> Result<Self> {
        let rm = has_rm.then(|| "pvm-rm".to_string());
        let measured_vm = MeasuredVm {
            testbed,
            vm: Vm::start(
                testbed,
                VmSettings {
                    rm_command: rm,
                    ..VmSettings::default()
                },
            )?,
        };
        if needs_two_hosts {
            measured_vm.vm.add_hosts(&["h2"])?;
        }
        Ok(measured_vm)
    }

    fn measure_once(&self, arguments: &[&str]) -> Result<TimeSummaries> {
        let mut command = self.vm.user_command(
            self.testbed.host(1),
            self.testbed.root_home().join("pvm3/bin/LINUX64/peers"),
        );
        command.args(arguments);
        let samples = parse_samples(
            &run_to_end(command, RUN_TIMEOUT)?
                .expect_success("the measuring program")?
                .stdout,
        )?;
        if arguments[0] == "add_hosts" {
            wait_until_no_process(self.testbed.host(2), "pvmd", DAEMON_EXIT_TIMEOUT)?;
        }
        Ok(samples)
    }
}

/// Measures with and without the resource manager and prints a table. Writes the table and JSON to
/// the folder `results_folder`. Returns true if every overhead with a goal is less than
/// `OVERHEAD_PERCENT_END`.
pub fn bench_rm(
    prefix: &Path,
    is_own_build: bool,
    is_quick: bool,
    results_folder: &Path,
) -> Result<bool> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench rm: {unmet_requirement}");
    }
    let repetition_count = if is_quick {
        QUICK_REPETITION_COUNT
    } else {
        FULL_REPETITION_COUNT
    };
    let mut machine = MachineInfo::collect(is_own_build, repetition_count, is_quick);
    let testbeds = [
        Testbed::new(2, Some(prefix), &[])?,
        Testbed::new(2, Some(prefix), &[])?,
    ];
    testbeds
        .iter()
        .try_for_each(|testbed| compile_program(testbed, "gcc", "peers", Some("-lpvm3")))?;
    let mut rows = Vec::new();
    for needs_two_hosts in [false, true] {
        let vms = [
            MeasuredVm::start(&testbeds[0], false, needs_two_hosts)?,
            MeasuredVm::start(&testbeds[1], true, needs_two_hosts)?,
        ];
        rows.extend(measure_alternately(
            &vms,
            needs_two_hosts,
            repetition_count,
        )?);
        let [vm_without_rm, vm_with_rm] = vms;
        vm_without_rm.vm.halt_and_wait()?;
        vm_with_rm.vm.halt_and_wait()?;
    }
    machine.update_load_after();
    let row_index = |row: &MeasuredRow| {
        OVERHEAD_ROWS
            .iter()
            .position(|overhead_row| overhead_row.title == row.what)
    };
    rows.sort_by_key(row_index);
    let text = format!("{}{}", machine.format(), format_table(&rows));
    fs::create_dir_all(results_folder).with_context(|| results_folder.display().to_string())?;
    fs::write(results_folder.join("rm.txt"), &text)?;
    let meets_goals = rows
        .iter()
        .filter(|row| row.judged)
        .all(|row| row.share_percent < OVERHEAD_PERCENT_END);
    fs::write(
        results_folder.join("rm.json"),
        serde_json::to_string_pretty(&Results { machine, rows })? + "\n",
    )?;
    println!("{text}written: {}", results_folder.display());
    Ok(meets_goals)
}

/// Measures the rows that need two hosts if `uses_two_hosts` is true, otherwise the rows that need
/// one host. Each repetition measures both virtual machines, one after the other. The first element
/// of `vms` has no resource manager.
fn measure_alternately(
    vms: &[MeasuredVm<'_>; 2],
    uses_two_hosts: bool,
    repetitions: usize,
) -> Result<Vec<MeasuredRow>> {
    let chosen_rows: Vec<&OverheadRow> = OVERHEAD_ROWS
        .iter()
        .filter(|row| row.needs_two_hosts == uses_two_hosts)
        .collect();
    let mut words: Vec<&[&str]> = chosen_rows
        .iter()
        .map(|row| row.program_arguments)
        .collect();
    words.dedup();
    let mut rows = Vec::new();
    for words in words {
        let mut summaries_by_vm: [Vec<TimeSummaries>; 2] = Default::default();
        for repetition in 1..=repetitions {
            eprintln!(
                "bench rm: {} ({repetition} of {repetitions})",
                words.join(" ")
            );
            // Every second repetition reverses the order, because caches may be cold for the
            // virtual machine that is measured first.
            let order = if repetition % 2 == 0 { [1, 0] } else { [0, 1] };
            for vm_index in order {
                summaries_by_vm[vm_index].push(vms[vm_index].measure_once(words)?);
            }
        }
        for row in chosen_rows
            .iter()
            .filter(|row| row.program_arguments == words)
        {
            let median_ms = |vm_index: usize| {
                combine_repetitions(&summaries_by_vm[vm_index], row.time_name)
                    .map(|sample| sample.median_us / 1e3)
            };
            let (without_ms, with_ms) = median_ms(0)
                .zip(median_ms(1))
                .with_context(|| format!("{} was not measured", row.title))?;
            let share_percent = overhead_percent(&summaries_by_vm, row.time_name)
                .context("no repetition has both sides")?;
            let OverheadRow {
                title: what,
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
/// over all repetitions. `None` if no repetition has the time `name` of both virtual machines.
fn overhead_percent(samples: &[Vec<TimeSummaries>; 2], name: &str) -> Option<f64> {
    let ratios = samples[0]
        .iter()
        .zip(&samples[1])
        .filter_map(|(without_rm, with_rm)| {
            let (without_rm, with_rm) = without_rm.get(name).zip(with_rm.get(name))?;
            Some(with_rm.median_us / without_rm.median_us)
        });
    median(ratios.collect()).map(|ratio| (ratio - 1.0) * 100.0)
}

fn format_table(rows: &[MeasuredRow]) -> String {
    let column_titles = [
        "milliseconds, medians",
        "without",
        "with RM",
        "its share",
        "SEMPA's",
    ];
    let mut text = format!(
        "{:36} {:>10} {:>10} {:>10} {:>10}\n",
        column_titles[0], column_titles[1], column_titles[2], column_titles[3], column_titles[4]
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
        let overhead_text = format!("{share_percent:+.1} %");
        let note = if *judged {
            ""
        } else {
            "  no goal: the resource manager must be asked"
        };
        text.push_str(&format!(
            "{what:36} {without_ms:>10.3} {with_ms:>10.3} {overhead_text:>10} {sempa:>10}{note}\n"
        ));
    }
    text + &format!(
        "share: the median over the repetitions; goal: less than {OVERHEAD_PERCENT_END} % for repeated operations\n"
    )
}
