//! `cargo xtask bench owners --sizes`: measures how long the eviction of a task takes when an owner
//! logs in, by size of the task's memory.
//!
//! An owner logs in on a host whose only guest is the task. The benchmark measures the times until
//! the task stops, until it runs on another host, and until no process and no memory of the task
//! remains on the first host. The sizes are measured one after another. The task itself records the
//! intervals in which it did not run.

use crate::figures::median;
use crate::machine_info::MachineInfo;
use crate::migration::{GapRecord, ms_between, now_us};
use anyhow::{Context, Result, bail};
use procfs::process::Process;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::table::TASK_CONNECTED;
use sempa_tests::run::wait_for;
use sempa_tests::ssh::SshLogin;
use sempa_tests::vm::{EventEntry, Task, VmSettings};
use sempa_tests::{Testbed, Vm, requirements};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const HOST_COUNT: usize = 4;
/// Default number of counted logins per task. One more login precedes the counted logins. This
/// login is not counted, because caches are cold.
const DEFAULT_LOGIN_COUNT: usize = 5;
/// Time limit for each wait of the benchmark.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Settings of `bench owners --sizes`.
#[derive(Clone, Debug)]
pub struct EvictionSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// Sizes of the tasks' memory in MiB.
    pub sizes_mib: Vec<u32>,
    /// Number of counted logins per task; `None` for the default.
    pub login_count: Option<usize>,
    /// Folder to which the table and the JSON file are written.
    pub results_folder: PathBuf,
}

/// Times of one eviction in milliseconds. Each time starts at the login record unless its comment
/// names another start.
#[derive(Clone, Debug, Serialize)]
struct EvictionTimes {
    /// Time at which the task stopped running, by the task's own clock.
    stood_still_ms: f64,
    /// Time at which the event log reported that the guests were stopped.
    stopped_ms: f64,
    /// Duration for which the task did not run, by the task's own clock. The duration starts when
    /// the task stops.
    freeze_ms: f64,
    /// Time at which the task ran on another host, by the task's own clock.
    ran_ms: f64,
    /// Time at which the event log reported that no process and no memory of the task remained on
    /// the host.
    clean_ms: f64,
    /// Time at which the process on the first host had no memory and all memory had arrived on the
    /// new host.
    gone_ms: f64,
}

type EvictionColumn = (&'static str, fn(&EvictionTimes) -> f64);

const FIGURE_COLUMNS: [EvictionColumn; 6] = [
    ("runs no more", |visit| visit.stood_still_ms),
    ("guests stopped", |visit| visit.stopped_ms),
    ("did not run for", |visit| visit.freeze_ms),
    ("runs elsewhere", |visit| visit.ran_ms),
    ("host clean", |visit| visit.clean_ms),
    ("memory gone", |visit| visit.gone_ms),
];

#[derive(Debug, Serialize)]
struct SizeResult {
    mib: u32,
    visits: Vec<EvictionTimes>,
}

/// Runs the measurement and prints a table. Writes the table and JSON to the results folder.
pub fn bench_evictions(settings: &EvictionSettings) -> Result<()> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench owners: {unmet_requirement}");
    }
    let login_count = settings.login_count.unwrap_or(DEFAULT_LOGIN_COUNT);
    let mut machine = MachineInfo::collect(settings.is_own_build, login_count, false);
    let testbed = Testbed::new(HOST_COUNT, Some(&settings.prefix), &[])?;
    let vm = Vm::start(
        &testbed,
        VmSettings {
            rm_command: Some("pvm-rm --policy load".to_string()),
            ..VmSettings::default()
        },
    )?;
    let size_results = measure_sizes(&vm, &settings.sizes_mib, login_count)
        .inspect_err(|_| eprintln!("{}", vm.events_and_logs()))?;
    vm.halt_and_wait()?;
    machine.update_load_after();
    let text = machine.format() + &format_table(&size_results);
    println!("{text}");
    fs::create_dir_all(&settings.results_folder)?;
    let json_text = serde_json::to_string_pretty(
        &serde_json::json!({ "machine": machine, "sizes": size_results }),
    )? + "\n";
    for (name, text) in [("evictions.txt", text), ("evictions.json", json_text)] {
        let file = settings.results_folder.join(name);
        fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn measure_sizes(vm: &Vm<'_>, sizes_mib: &[u32], login_count: usize) -> Result<Vec<SizeResult>> {
    let slave_names: Vec<&str> = vm.testbed().hosts()[1..]
        .iter()
        .map(|host| host.name())
        .collect();
    vm.add_hosts(&slave_names)?;
    wait_for(WAIT_TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watcher_count = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher"))
            .count();
        if watcher_count == HOST_COUNT {
            Ok(())
        } else {
            Err(format!(
                "{watcher_count} of {HOST_COUNT} hosts have a load watcher"
            ))
        }
    })?;
    vm.compile_program("memory")?;
    let measure_size = |mib: &u32| -> Result<SizeResult> {
        let gap_record = GapRecord(vm.testbed().folder().join(format!("notes-{mib}-evicted")));
        let tid = vm.spawn_connected(&[
            "-h2",
            "memory",
            &mib.to_string(),
            &gap_record.0.display().to_string(),
        ])?;
        gap_record.wait_until_ready()?;
        let mut evictions = (0..=login_count)
            .map(|_| measure_eviction(vm, &tid, &gap_record))
            .collect::<Result<Vec<EvictionTimes>>>()?;
        evictions.remove(0);
        vm.run_pvm(&["kill", &tid])?.expect_success("kill")?;
        Ok(SizeResult {
            mib: *mib,
            visits: evictions,
        })
    };
    sizes_mib
        .iter()
        .map(|mib| measure_size(mib).with_context(|| format!("{mib} MiB")))
        .collect()
}

fn measure_eviction(vm: &Vm<'_>, tid: &str, gap_record: &GapRecord) -> Result<EvictionTimes> {
    let host_name = wait_for(WAIT_TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let is_settled = |task: &&Task| {
            task.tid == tid && !task.moving && !task.stopped && task.flags & TASK_CONNECTED != 0
        };
        let task = tasks
            .iter()
            .find(is_settled)
            .ok_or_else(|| format!("{tid} does not come to rest: {tasks:?}"))?;
        task.host
            .clone()
            .ok_or_else(|| format!("{tid} runs on no known host"))
    })?;
    let host = vm
        .testbed()
        .hosts()
        .iter()
        .find(|host| host.name() == host_name)
        .context("it runs on no known host")?;
    let is_task_process =
        |(_, line): &(u32, String)| line.contains(&*gap_record.0.to_string_lossy());
    let pid = host
        .processes()
        .into_iter()
        .find(is_task_process)
        .with_context(|| format!("no process of it on {host_name}"))?
        .0;
    let begin_us = u64::try_from(now_us())?;
    let owner_login = SshLogin::log_in(vm.testbed(), "olga", host)?;
    let memory_gone_us = wait_for(WAIT_TIMEOUT, || {
        if has_memory(pid) {
            Err(format!("it is still on {host_name}"))
        } else {
            Ok(now_us())
        }
    })?;
    let times = wait_for(WAIT_TIMEOUT, || {
        let events = vm.events().map_err(|error| format!("{error:#}"))?;
        let new_events: Vec<EventEntry> = events
            .into_iter()
            .filter(|entry| entry.at_us >= begin_us)
            .collect();
        eviction_times(&new_events, tid, memory_gone_us, gap_record)
    })?;
    owner_login.log_out()?;
    eprintln!("bench owners: {tid} on {host_name}: {times:.0?}");
    Ok(times)
}

/// True if the process has memory. The kernel returns an empty command line for a process that has
/// released its memory.
fn has_memory(pid: u32) -> bool {
    let command_line = Process::new(pid.cast_signed()).and_then(|process| process.cmdline());
    command_line.is_ok_and(|command_line| !command_line.is_empty())
}

/// Computes the times of an eviction from the event log and the task's gap record. `memory_gone_us`
/// is the first time at which the process had no memory, in microseconds since 1970.
///
/// # Errors
/// An event or a gap is missing; the error describes it.
fn eviction_times(
    events: &[EventEntry],
    tid: &str,
    memory_gone_us: i64,
    gap_record: &GapRecord,
) -> Result<EvictionTimes, String> {
    let event_time_us = |description: &str, is_expected: &dyn Fn(&EventKind) -> bool| {
        let event = events.iter().find(|entry| is_expected(&entry.kind));
        event
            .map(|entry| entry.at_us as i64)
            .ok_or_else(|| format!("the event log has no {description}"))
    };
    let step = |expected_step: Step| move |kind: &EventKind| matches!(kind, EventKind::MigrationStep { tid: step_tid, step, .. } if *step == expected_step && step_tid.to_string() == tid);
    let login_us = events.iter().find_map(|entry| match entry.kind {
        EventKind::OwnerPresent { host, since, .. } => Some((host, since.0 as i64)),
        _ => None,
    });
    let (host, login_us) = login_us.ok_or("the event log has no owner")?;
    let stopped_us = event_time_us(
        "stop",
        &|kind| matches!(kind, EventKind::GuestsPaused { host: event_host, .. } if *event_host == host),
    )?;
    let clean_us = event_time_us(
        "clean host",
        &|kind| matches!(kind, EventKind::HostVacated { host: event_host } if *event_host == host),
    )?;
    let arrived_us = event_time_us("end of the move", &step(Step::Arrive))?;
    let (gap_start_us, gap_end_us) =
        gap_record.find_gap(event_time_us("dump", &step(Step::Dump))?)?;
    Ok(EvictionTimes {
        // The gap may begin before the login record, because the task may have waited for a
        // processor at that time. The result is then 0.
        stood_still_ms: ms_between(login_us, gap_start_us).max(0.0),
        stopped_ms: ms_between(login_us, stopped_us),
        freeze_ms: ms_between(gap_start_us, gap_end_us),
        ran_ms: ms_between(login_us, gap_end_us),
        clean_ms: ms_between(login_us, clean_us),
        gone_ms: ms_between(login_us, memory_gone_us.max(arrived_us)),
    })
}

fn format_table(sizes: &[SizeResult]) -> String {
    let mut text = format!("{:>6} {:>6}", "MiB", "visits");
    FIGURE_COLUMNS
        .iter()
        .for_each(|(name, _)| text.push_str(&format!(" {name:>17}")));
    for SizeResult { mib, visits } in sizes {
        text.push_str(&format!("\n{mib:>6} {:>6}", visits.len()));
        for (_, select) in FIGURE_COLUMNS {
            let values: Vec<f64> = visits.iter().map(select).collect();
            let largest_ms = values.iter().copied().fold(f64::NAN, f64::max);
            let cell = format!(
                "{:.0} ({largest_ms:.0})",
                median(values).unwrap_or(f64::NAN)
            );
            text.push_str(&format!(" {cell:>17}"));
        }
    }
    text + "\nmilliseconds after the login record, except the duration for which the task did not run: medians \
            (worst)\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table shows the median and the largest value of each figure.
    #[test]
    fn table_shows_median_and_worst() {
        let times = |unit_ms: f64| EvictionTimes {
            stood_still_ms: unit_ms,
            stopped_ms: 2.0 * unit_ms,
            freeze_ms: 3.0 * unit_ms,
            ran_ms: 4.0 * unit_ms,
            clean_ms: 5.0 * unit_ms,
            gone_ms: 6.0 * unit_ms,
        };
        let text = format_table(&[SizeResult {
            mib: 16,
            visits: [5.0, 1.0, 20.0].map(times).to_vec(),
        }]);
        let words: Vec<&str> = text
            .lines()
            .nth(1)
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        assert_eq!(
            words.join(" "),
            "16 3 5 (20) 10 (40) 15 (60) 20 (80) 25 (100) 30 (120)",
            "in the order of what happens"
        );
    }
}
