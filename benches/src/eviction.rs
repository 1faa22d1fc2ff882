//! `cargo xtask bench owners --sizes`: measures how long the eviction of a task takes when an owner
//! logs in, by size of the task's memory.
//!
//! An owner logs in on a host whose only guest is the task. The benchmark measures the times until
//! the task stops, until it runs on another host, and until no process and no memory of it remains
//! on the first host. The sizes are measured one after another. The task itself records when it
//! ran.

use crate::figures::median;
use crate::machine_info::MachineInfo;
use crate::migration::{GapRecord, ms_between, now_us};
use anyhow::{Context, Result, bail};
use procfs::process::Process;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::table::TASK_CONNECTED;
use sempa_tests::run::wait_for;
use sempa_tests::ssh::Login;
use sempa_tests::vm::{EventEntry, Settings, Task};
use sempa_tests::{Testbed, Vm, requirements};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const HOSTS: usize = 4;
/// Number of logins per task. The first one is not counted, because caches are cold.
const LOGINS: usize = 5;
/// Time limit for each condition that the benchmark waits for.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Settings of `bench owners --sizes`.
#[derive(Clone, Debug)]
pub struct EvictionSettings {
    /// Folder in which our programs are installed.
    pub prefix: PathBuf,
    /// True if the programs were built from these sources for this run.
    pub own_build: bool,
    /// Memory of the tasks in MiB.
    pub sizes: Vec<u32>,
    /// Number of logins per task; `None` for the default.
    pub logins_per_task: Option<usize>,
    /// Folder to which the table and the JSON file are written.
    pub results: PathBuf,
}

/// Times of one eviction in milliseconds, counted from the login record unless stated otherwise.
#[derive(Clone, Debug, Serialize)]
struct EvictionTimes {
    /// Time at which the task stopped running, by the task's own clock.
    stood_still_ms: f64,
    /// Time at which the event log reported that the guests were stopped.
    stopped_ms: f64,
    /// Duration for which the task did not run, by the task's own clock.
    freeze_ms: f64,
    /// Time at which the task ran on another host, by the task's own clock.
    ran_ms: f64,
    /// Time at which the event log reported that neither processes nor memory of the task remained
    /// on the host.
    clean_ms: f64,
    /// Time at which the process on the first host had no memory left and all memory had arrived on
    /// the new host.
    gone_ms: f64,
}

type FigureColumn = (&'static str, fn(&EvictionTimes) -> f64);

const FIGURES: [FigureColumn; 6] = [
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

/// Runs the measurement and prints a table. Writes the table and JSON.
pub fn bench_evictions(settings: &EvictionSettings) -> Result<()> {
    if let Some(missing) = requirements::lacks() {
        bail!("bench owners: {missing}");
    }
    let visits = settings.logins_per_task.unwrap_or(LOGINS);
    let mut machine = MachineInfo::describe(settings.own_build, visits, false);
    let bed = Testbed::new(HOSTS, Some(&settings.prefix), &[])?;
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some("pvm-rm --policy load".to_string()),
            ..Settings::default()
        },
    )?;
    let sizes =
        measure_sizes(&vm, &settings.sizes, visits).inspect_err(|_| eprintln!("{}", vm.logs()))?;
    vm.halt()?;
    machine.update_load();
    let text = machine.text() + &table(&sizes);
    println!("{text}");
    fs::create_dir_all(&settings.results)?;
    let json =
        serde_json::to_string_pretty(&serde_json::json!({ "machine": machine, "sizes": sizes }))?
            + "\n";
    for (name, text) in [("evictions.txt", text), ("evictions.json", json)] {
        let file = settings.results.join(name);
        fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn measure_sizes(vm: &Vm<'_>, sizes: &[u32], visits: usize) -> Result<Vec<SizeResult>> {
    let others: Vec<&str> = vm.bed().hosts()[1..]
        .iter()
        .map(|host| host.name())
        .collect();
    vm.add(&others)?;
    wait_for(WAIT_TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watchers = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher"))
            .count();
        if watchers == HOSTS {
            Ok(())
        } else {
            Err(format!("{watchers} of {HOSTS} hosts have a load watcher"))
        }
    })?;
    vm.compile_program("memory")?;
    let size = |mib: &u32| -> Result<SizeResult> {
        let notes = GapRecord(vm.bed().folder().join(format!("notes-{mib}-evicted")));
        let tid = vm.spawn(&[
            "-h2",
            "memory",
            &mib.to_string(),
            &notes.0.display().to_string(),
        ])?;
        notes.await_ready()?;
        let mut all = (0..=visits)
            .map(|_| measure_eviction(vm, &tid, &notes))
            .collect::<Result<Vec<EvictionTimes>>>()?;
        all.remove(0);
        vm.pvm(&["kill", &tid])?.expect_success("kill")?;
        Ok(SizeResult {
            mib: *mib,
            visits: all,
        })
    };
    sizes
        .iter()
        .map(|mib| size(mib).with_context(|| format!("{mib} MiB")))
        .collect()
}

fn measure_eviction(vm: &Vm<'_>, tid: &str, notes: &GapRecord) -> Result<EvictionTimes> {
    let host_name = wait_for(WAIT_TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let rests = |task: &&Task| {
            task.tid == tid && !task.moving && !task.stopped && task.flags & TASK_CONNECTED != 0
        };
        let task = tasks
            .iter()
            .find(rests)
            .ok_or_else(|| format!("{tid} does not come to rest: {tasks:?}"))?;
        task.host
            .clone()
            .ok_or_else(|| format!("{tid} runs on no known host"))
    })?;
    let host = vm
        .bed()
        .hosts()
        .iter()
        .find(|host| host.name() == host_name)
        .context("it runs on no known host")?;
    let own = |(_, line): &(u32, String)| line.contains(&*notes.0.to_string_lossy());
    let pid = host
        .processes()
        .into_iter()
        .find(own)
        .with_context(|| format!("no process of it on {host_name}"))?
        .0;
    let begin = u64::try_from(now_us())?;
    let login = Login::new(vm.bed(), "olga", host)?;
    let gone = wait_for(WAIT_TIMEOUT, || {
        if has_memory(pid) {
            Err(format!("it is still on {host_name}"))
        } else {
            Ok(now_us())
        }
    })?;
    let visit = wait_for(WAIT_TIMEOUT, || {
        let events = vm.events().map_err(|error| format!("{error:#}"))?;
        let new: Vec<EventEntry> = events
            .into_iter()
            .filter(|entry| entry.at_us >= begin)
            .collect();
        eviction_times(&new, tid, gone, notes)
    })?;
    login.log_out()?;
    eprintln!("bench owners: {tid} on {host_name}: {visit:.0?}");
    Ok(visit)
}

/// True if the process has memory. The kernel shows an empty command line for a process that has
/// released its memory.
fn has_memory(pid: u32) -> bool {
    let line = Process::new(pid.cast_signed()).and_then(|process| process.cmdline());
    line.is_ok_and(|line| !line.is_empty())
}

/// Computes the times of an eviction from the event log and the task's record. `gone` is the time
/// at which the process had no memory. The error names the entry that is still missing.
fn eviction_times(
    events: &[EventEntry],
    tid: &str,
    gone: i64,
    notes: &GapRecord,
) -> Result<EvictionTimes, String> {
    let at = |what: &str, is_it: &dyn Fn(&EventKind) -> bool| {
        let found = events.iter().find(|entry| is_it(&entry.kind));
        found
            .map(|entry| entry.at_us as i64)
            .ok_or_else(|| format!("the event log has no {what}"))
    };
    let step = |wanted: Step| move |kind: &EventKind| matches!(kind, EventKind::MigrationStep { tid: who, step, .. } if *step == wanted && who.to_string() == tid);
    let login = events.iter().find_map(|entry| match entry.kind {
        EventKind::OwnerPresent { host, since, .. } => Some((host, since.0 as i64)),
        _ => None,
    });
    let (host, login) = login.ok_or("the event log has no owner")?;
    let stopped = at(
        "stop",
        &|kind| matches!(kind, EventKind::GuestsPaused { host: which, .. } if *which == host),
    )?;
    let clean = at(
        "clean host",
        &|kind| matches!(kind, EventKind::HostVacated { host: which } if *which == host),
    )?;
    let arrived = at("end of the move", &step(Step::Arrive))?;
    let (from, until) = notes.find_gap(at("dump", &step(Step::Dump))?)?;
    Ok(EvictionTimes {
        // The task may have waited for a processor since before the login record.
        stood_still_ms: ms_between(login, from).max(0.0),
        stopped_ms: ms_between(login, stopped),
        freeze_ms: ms_between(from, until),
        ran_ms: ms_between(login, until),
        clean_ms: ms_between(login, clean),
        gone_ms: ms_between(login, gone.max(arrived)),
    })
}

fn table(sizes: &[SizeResult]) -> String {
    let mut text = format!("{:>6} {:>6}", "MiB", "visits");
    FIGURES
        .iter()
        .for_each(|(name, _)| text.push_str(&format!(" {name:>17}")));
    for SizeResult { mib, visits } in sizes {
        text.push_str(&format!("\n{mib:>6} {:>6}", visits.len()));
        for (_, of) in FIGURES {
            let all: Vec<f64> = visits.iter().map(of).collect();
            let worst = all.iter().copied().fold(f64::NAN, f64::max);
            let cell = format!("{:.0} ({worst:.0})", median(all).unwrap_or(f64::NAN));
            text.push_str(&format!(" {cell:>17}"));
        }
    }
    text + "\nmilliseconds after the login record, except the duration for which the task did not run: medians \
            (worst)\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table shows the median and the worst value of each figure.
    #[test]
    fn table_shows_median_and_worst() {
        let visit = |by: f64| EvictionTimes {
            stood_still_ms: by,
            stopped_ms: 2.0 * by,
            freeze_ms: 3.0 * by,
            ran_ms: 4.0 * by,
            clean_ms: 5.0 * by,
            gone_ms: 6.0 * by,
        };
        let text = table(&[SizeResult {
            mib: 16,
            visits: [5.0, 1.0, 20.0].map(visit).to_vec(),
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
