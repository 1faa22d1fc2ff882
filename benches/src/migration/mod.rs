//! `cargo xtask bench migrate`: measures how long a task is frozen during a migration, by the
//! task's own clock.
//!
//! Five methods of migration are compared:
//!
//! - CRIU alone, stop-and-copy: the process is dumped to memory, the images are copied, and the
//!   process is restored;
//! - CRIU alone, post-copy;
//! - Sempa with pre-copy and post-copy;
//! - Sempa without pre-copy;
//! - Sempa without post-copy: all memory is sent with the images.
//!
//! The hosts of all methods run at the same time and the methods are measured alternately, so that
//! other load on the machine affects all methods equally.

mod bare;

use crate::figures::median;
use crate::machine_info::MachineInfo;
use crate::plot::{Chart, Series};
use anyhow::{Context, Result, bail, ensure};
use bare::{PostCopy, StopAndCopy};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::run::wait_for;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{Testbed, Vm, requirements};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Sizes of the tasks' memory in MiB.
const SIZES_MIB: [u32; 4] = [16, 128, 512, 2048];
/// Sizes of the tasks' memory in a quick run, in MiB.
const QUICK_SIZES_MIB: [u32; 2] = [16, 128];
/// Number of repetitions in a full run.
const FULL_REPETITION_COUNT: usize = 7;
/// Number of repetitions for large tasks, and in quick runs.
const REDUCED_REPETITION_COUNT: usize = 3;
/// A task with at least this memory, in MiB, is large.
const LARGE_TASK_MIB_MIN: u32 = 1024;
/// Goal: maximum difference between the freeze times of Sempa and of CRIU alone, in milliseconds.
const FREEZE_DIFFERENCE_MAX_MS: f64 = 30.0;
/// Goal: maximum freeze time of Sempa for a task of any size, in milliseconds.
const FREEZE_MAX_MS: f64 = 60.0;
/// Pause before each migration. The kernel takes apart what the previous method has used, such as
/// namespaces, and the next method must not pay for that.
const SETTLE_TIME: Duration = Duration::from_millis(300);
/// Time limit for one step of a migration.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Name and value of the environment variable that disables pre-copy.
const NO_PRE_COPY_ENV: (&str, &str) = ("SEMPA_PRE_COPY", "never");
/// Name and value of the environment variable that disables post-copy.
const NO_POST_COPY_ENV: (&str, &str) = ("SEMPA_POST_COPY", "never");
/// Environment variable that limits the transfer rate of migrations, in bytes per second.
const RATE_LIMIT_ENV: &str = "SEMPA_MOVE_RATE";
/// Names of the compared methods. Repetition `n` starts with method `n` modulo the number of
/// methods.
const METHOD_NAMES: [&str; 5] = [
    "bare CRIU",
    "bare CRIU, memory follows",
    "ours",
    "ours, nothing ahead",
    "ours, at once",
];
/// Folder for the images of CRIU alone, on its hosts. The folder is in memory, as the image folder
/// of the daemons is.
const IMAGE_FOLDER: &str = "/tmp/bare";

/// Settings of `bench migrate`.
#[derive(Clone, Debug)]
pub struct MigrationSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// True if the run has only small tasks and fewer repetitions.
    pub is_quick: bool,
    /// Sizes of the tasks' memory in MiB. If empty, the default sizes are used.
    pub sizes_mib: Vec<u32>,
    /// Number of repetitions; `None` for the default number.
    pub repetition_count: Option<usize>,
    /// Limit of the transfer rate of Sempa's migrations, in bytes per second; `None` for no limit.
    pub bytes_per_second_max: Option<u64>,
    /// Folder to which the table, the JSON file and the plot are written.
    pub results_folder: PathBuf,
}

/// The times of one migration, and the size of its images.
#[derive(Clone, Debug, Serialize)]
struct MigrationTimes {
    /// Time for which the task did not run, by the task's own clock.
    freeze_ms: f64,
    /// Time from the start of the command until the task ran again.
    total_ms: f64,
    /// Time from the start of the command until all memory had arrived.
    arrived_ms: f64,
    /// Total size of the images in bytes.
    bytes: u64,
    /// The steps in order: name, and duration in milliseconds. The last step ends when the task
    /// runs.
    steps: Vec<(String, f64)>,
}

/// The migrations of the tasks of one size, by method.
#[derive(Clone, Debug, Default, Serialize)]
struct SizeResult {
    mib: u32,
    bare: Vec<MigrationTimes>,
    /// Migrations by CRIU alone with post-copy.
    bare_follows: Vec<MigrationTimes>,
    ours: Vec<MigrationTimes>,
    /// Migrations by Sempa without pre-copy.
    not_ahead: Vec<MigrationTimes>,
    /// Migrations by Sempa without post-copy.
    at_once: Vec<MigrationTimes>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    goal_ms: f64,
    /// Limit of the transfer rate of Sempa's migrations, in bytes per second; `None` for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<u64>,
    sizes: Vec<SizeResult>,
}

/// Runs the measurement and prints a table. Writes the table, JSON and a plot after each size.
/// Returns true if the medians meet the goal.
pub fn bench_migrations(settings: &MigrationSettings) -> Result<bool> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench migrate: {unmet_requirement}");
    }
    let engine =
        requirements::find_engine().context("bench migrate: no CRIU; cargo xtask criu gets one")?;
    let default_sizes_mib = if settings.is_quick {
        &QUICK_SIZES_MIB[..]
    } else {
        &SIZES_MIB[..]
    };
    let sizes_mib = if settings.sizes_mib.is_empty() {
        default_sizes_mib.to_vec()
    } else {
        settings.sizes_mib.clone()
    };
    let default_repetition_count = |mib: u32| {
        if mib >= LARGE_TASK_MIB_MIN || settings.is_quick {
            REDUCED_REPETITION_COUNT
        } else {
            FULL_REPETITION_COUNT
        }
    };
    fs::create_dir_all(&settings.results_folder)
        .with_context(|| settings.results_folder.display().to_string())?;
    let rate = settings.bytes_per_second_max.map(|rate| rate.to_string());
    let rate = rate.as_deref().map(|rate| (RATE_LIMIT_ENV, rate));
    let envs = [None, Some(NO_PRE_COPY_ENV), Some(NO_POST_COPY_ENV)]
        .map(|feature_env| rate.into_iter().chain(feature_env).collect::<Vec<_>>());
    let host_counts = [bare::BARE_HOST_NUMBERS.into_iter().max().unwrap_or(2), 2, 2];
    let testbeds = host_counts
        .iter()
        .zip(&envs)
        .map(|(host_counts, env)| Testbed::with_env(*host_counts, Some(&settings.prefix), env));
    let testbeds = testbeds.collect::<Result<Vec<Testbed>>>()?;
    let vms = testbeds
        .iter()
        .zip(&envs)
        .map(|(testbed, env)| start_vm(testbed, env));
    let vms = vms.collect::<Result<Vec<Vm<'_>>>>()?;
    let print_logs = |_: &_| {
        vms.iter()
            .for_each(|vm| eprintln!("{}", vm.events_and_logs()))
    };
    let mut machine = MachineInfo::collect(
        settings.is_own_build,
        settings
            .repetition_count
            .unwrap_or(default_repetition_count(0)),
        settings.is_quick,
    );
    let (mut size_results, mut meets_goal) = (Vec::new(), false);
    for mib in sizes_mib {
        let repetition_count = settings
            .repetition_count
            .unwrap_or(default_repetition_count(mib));
        size_results
            .push(measure_size(&vms, &engine, mib, repetition_count).inspect_err(print_logs)?);
        machine.update_load_after();
        let (text, table_meets_goal) = format_table(&size_results);
        let results = Results {
            machine: machine.clone(),
            goal_ms: FREEZE_DIFFERENCE_MAX_MS,
            rate: settings.bytes_per_second_max,
            sizes: size_results.clone(),
        };
        write_results(&settings.results_folder, &results, &text)?;
        meets_goal = table_meets_goal;
        println!("{text}");
    }
    vms.iter().try_for_each(Vm::halt_and_wait)?;
    println!("written: {}", settings.results_folder.display());
    Ok(meets_goal)
}

/// Starts a virtual machine of two hosts and compiles the measured program on it.
fn start_vm<'a>(testbed: &'a Testbed, env: &[(&str, &str)]) -> Result<Vm<'a>> {
    let env = env
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let vm = Vm::start(
        testbed,
        VmSettings {
            env,
            ..VmSettings::default()
        },
    )?;
    vm.add_hosts(&["h2"])?;
    vm.compile_program("memory")?;
    Ok(vm)
}

/// Measures the migrations of tasks of one size. The first of `vms` has the default settings, and
/// its testbed also has the hosts for CRIU alone. The second virtual machine runs without pre-copy,
/// the third without post-copy.
fn measure_size(
    vms: &[Vm<'_>],
    engine: &Path,
    mib: u32,
    repetition_count: usize,
) -> Result<SizeResult> {
    let mut stop_and_copy = StopAndCopy::start_process(&vms[0], engine, mib)?;
    let mut post_copy = PostCopy::start_process(&vms[0], engine, mib)?;
    let mut tasks = vms
        .iter()
        .map(|vm| SempaTask::spawn(vm, mib))
        .collect::<Result<Vec<SempaTask<'_>>>>()?;
    let mut result = SizeResult {
        mib,
        ..SizeResult::default()
    };
    for repetition in 0..=repetition_count {
        for method in 0..METHOD_NAMES.len() {
            let method = (method + repetition) % METHOD_NAMES.len();
            std::thread::sleep(SETTLE_TIME);
            let (migration, migrations) = match method {
                0 => (stop_and_copy.migrate_once(), &mut result.bare),
                1 => (post_copy.migrate_once(), &mut result.bare_follows),
                2 => (tasks[0].migrate_once(), &mut result.ours),
                3 => (tasks[1].migrate_once(), &mut result.not_ahead),
                _ => (tasks[2].migrate_once(), &mut result.at_once),
            };
            let migration =
                migration.with_context(|| format!("{mib} MiB, {}", METHOD_NAMES[method]))?;
            eprintln!(
                "bench migrate: {mib} MiB, {}: {:.0} ms",
                METHOD_NAMES[method], migration.freeze_ms
            );
            // The first run of each method is not counted, because caches are cold.
            if repetition > 0 {
                migrations.push(migration);
            }
        }
    }
    stop_and_copy.kill_process()?;
    post_copy.kill_process()?;
    tasks.into_iter().try_for_each(SempaTask::kill_task)?;
    Ok(result)
}

/// Returns the time in microseconds since 1970. The program `memory` uses the same clock.
pub(crate) fn now_us() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_micros() as i64)
}

pub(crate) fn ms_between(start_us: i64, end_us: i64) -> f64 {
    (end_us - start_us) as f64 / 1e3
}

/// The file in which the program `memory` records the gaps in its run time, that is, the times at
/// which it did not run.
#[derive(Debug)]
pub(crate) struct GapRecord(pub(crate) PathBuf);

impl GapRecord {
    /// Waits until the program has written to all of its memory. Returns the process id that the
    /// program sees.
    pub(crate) fn wait_until_ready(&self) -> Result<i64> {
        wait_for(STEP_TIMEOUT, || {
            let ready_pair = self.number_pairs("ready")?.first().copied();
            ready_pair
                .map(|(pid, _)| pid)
                .ok_or_else(|| format!("{} does not say that it is ready", self.0.display()))
        })
    }

    /// Returns the two numbers after `keyword` in each line that starts with `keyword`.
    fn number_pairs(&self, keyword: &str) -> Result<Vec<(i64, i64)>, String> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        if text.lines().any(|line| line.starts_with("bad")) {
            return Err("its memory is not what it was".to_string());
        }
        let parse_pair = |line: &str| {
            let mut numbers = line.strip_prefix(keyword)?.split_whitespace();
            Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
        };
        Ok(text.lines().filter_map(parse_pair).collect())
    }

    /// Waits until the program has recorded the gap that contains the time `time_us`, in
    /// microseconds since 1970. Returns the gap's start and end, in microseconds since 1970.
    fn wait_for_gap(&self, time_us: i64) -> Result<(i64, i64)> {
        wait_for(STEP_TIMEOUT, || self.find_gap(time_us))
    }

    /// Returns start and end of the gap that contains the time `time_us`, all in microseconds since
    /// 1970.
    ///
    /// # Errors
    /// The gap is not recorded yet.
    pub(crate) fn find_gap(&self, time_us: i64) -> Result<(i64, i64), String> {
        let gap = self
            .number_pairs("gap")?
            .into_iter()
            .find(|(start_us, end_us)| *start_us <= time_us && time_us <= *end_us);
        gap.ok_or_else(|| format!("it was not frozen at {time_us}"))
    }
}

/// The measured task in a virtual machine of Sempa.
struct SempaTask<'a> {
    vm: &'a Vm<'a>,
    tid: String,
    gap_record: GapRecord,
    /// Number of the newest event log entry that was evaluated.
    last_event_number: u64,
}

impl<'a> SempaTask<'a> {
    fn spawn(vm: &'a Vm<'a>, mib: u32) -> Result<Self> {
        let gap_record = GapRecord(vm.testbed().folder().join(format!("notes-{mib}-ours")));
        let tid = vm.spawn_connected(&[
            "-h1",
            "memory",
            &mib.to_string(),
            &gap_record.0.display().to_string(),
        ])?;
        gap_record.wait_until_ready()?;
        Ok(SempaTask {
            vm,
            tid,
            gap_record,
            last_event_number: 0,
        })
    }

    fn migrate_once(&mut self) -> Result<MigrationTimes> {
        let target = if self.vm.host_of(&self.tid)? == "h1" {
            "h2"
        } else {
            "h1"
        };
        let begin_us = now_us();
        self.vm
            .migrate_when_ready(&self.tid, target)?
            .expect_success("migrate")?;
        let events = self.vm.events()?;
        let is_new = |entry: &&EventEntry| {
            entry.number > self.last_event_number && entry.at_us as i64 >= begin_us
        };
        let mut steps: Vec<(String, i64)> = Vec::new();
        let mut bytes = 0;
        for entry in events.iter().filter(is_new) {
            match &entry.kind {
                EventKind::MigrationStep { tid, step, .. } if tid.to_string() == self.tid => {
                    steps.push((step.to_string(), entry.at_us as i64));
                }
                EventKind::Migrated {
                    tid,
                    bytes: image_bytes,
                    ..
                } if tid.to_string() == self.tid => bytes = *image_bytes,
                _ => {}
            }
        }
        self.last_event_number = events
            .last()
            .map_or(self.last_event_number, |entry| entry.number);
        steps.sort_by_key(|(_, ended_us)| *ended_us);
        let (last_step, arrived_us) = steps.pop().context("the event log has no steps")?;
        ensure!(
            last_step == Step::Arrive.to_string(),
            "the last step was {last_step}"
        );
        let dumped_us = steps
            .iter()
            .find(|(step, _)| step == "dump")
            .context("the event log has no dump")?
            .1;
        let (stopped_us, resumed_us) = self.gap_record.wait_for_gap(dumped_us)?;
        let (freeze_ms, total_ms, arrived_ms) = (
            ms_between(stopped_us, resumed_us),
            ms_between(begin_us, resumed_us),
            ms_between(begin_us, arrived_us.max(resumed_us)),
        );
        Ok(MigrationTimes {
            freeze_ms,
            total_ms,
            arrived_ms,
            bytes,
            steps: step_durations(begin_us, &steps, resumed_us),
        })
    }

    fn kill_task(self) -> Result<()> {
        self.vm
            .run_pvm(&["kill", &self.tid])?
            .expect_success("kill")
            .map(drop)
    }
}

/// Returns the duration of each step in milliseconds. `steps` contains the time at which each step
/// ended; the last step ends at `resumed_us`, when the task runs. All times are in microseconds
/// since 1970.
fn step_durations(begin_us: i64, steps: &[(String, i64)], resumed_us: i64) -> Vec<(String, f64)> {
    let mut previous_end_us = begin_us;
    let last_index = steps.len().saturating_sub(1);
    let step_duration = |(i, (step, end_us)): (usize, &(String, i64))| {
        let end_us = if i == last_index { resumed_us } else { *end_us };
        let duration_ms = ms_between(previous_end_us, end_us);
        previous_end_us = end_us;
        (step.clone(), duration_ms)
    };
    steps.iter().enumerate().map(step_duration).collect()
}

fn median_time(migrations: &[MigrationTimes], select: &dyn Fn(&MigrationTimes) -> f64) -> f64 {
    median(migrations.iter().map(select).collect()).unwrap_or(f64::NAN)
}

/// Returns the table as text, and true if the goal is met.
fn format_table(sizes: &[SizeResult]) -> (String, bool) {
    let mut text = format!(
        "{:>6} {:>6} {:>10} {:>10} {:>8} {:>8} {:>12} {:>12} {:>14} {:>15} {:>9} {:>10}\n",
        "MiB",
        "moves",
        "bare CRIU",
        "ours",
        "more",
        "goal",
        "whole, bare",
        "whole, ours",
        "arrived, ours",
        "whole, at once",
        "times it",
        "MB, images"
    );
    let mut meets_goal = true;
    for SizeResult {
        mib,
        bare,
        ours,
        at_once,
        ..
    } in sizes
    {
        let median_freeze_ms = |migrations: &[MigrationTimes]| {
            median_time(migrations, &|migration| migration.freeze_ms)
        };
        let median_total_ms = |migrations: &[MigrationTimes]| {
            median_time(migrations, &|migration| migration.total_ms)
        };
        let freeze_difference_ms = median_freeze_ms(ours) - median_freeze_ms(bare);
        let size_meets_goal = freeze_difference_ms <= FREEZE_DIFFERENCE_MAX_MS
            && median_freeze_ms(ours) <= FREEZE_MAX_MS;
        meets_goal &= size_meets_goal;
        let arrived_ms = median_time(ours, &|migration| migration.arrived_ms);
        text.push_str(&format!(
            "{mib:>6} {:>6} {:>10.0} {:>10.0} {freeze_difference_ms:>8.0} {:>8} {:>12.0} {:>12.0} {arrived_ms:>14.0} {:>15.0} {:>9.2} {:>10.1}\n",
            ours.len(),
            median_freeze_ms(bare),
            median_freeze_ms(ours),
            if size_meets_goal { "met" } else { "missed" },
            median_total_ms(bare),
            median_total_ms(ours),
            median_total_ms(at_once),
            arrived_ms / median_total_ms(at_once),
            median_time(ours, &|migration| migration.bytes as f64 / 1e6),
        ));
    }
    text.push_str(&format!(
        "milliseconds, medians: how long the task did not run by its own clock (goal: at most {FREEZE_MAX_MS} ms, and bare + {FREEZE_DIFFERENCE_MAX_MS} ms); from the \
         command until it ran again and until all of its memory had arrived; the whole move with memory and all at once, and \
         how many times that it takes until all has arrived (goal: 1.5)\n"
    ));
    text.push_str(&comparison_table(
        "with memory that follows, bare CRIU and ours",
        sizes,
        |size| [&size.bare_follows, &size.ours],
    ));
    text.push_str(&comparison_table(
        "with memory that goes ahead, and without",
        sizes,
        |size| [&size.ours, &size.not_ahead],
    ));
    text.push_str(&format_steps(sizes));
    (text, meets_goal)
}

/// Returns a table that compares two methods with post-copy. In these methods a part of the memory
/// arrives after the task runs again.
fn comparison_table(
    title: &str,
    sizes: &[SizeResult],
    select_methods: impl Fn(&SizeResult) -> [&Vec<MigrationTimes>; 2],
) -> String {
    let mut text = format!(
        "\n{title}:\n{:>6} {:>16} {:>22} {:>22} {:>24}\n",
        "MiB", "standing still", "until it runs again", "until all is there", "between: needs both"
    );
    for size in sizes {
        let median_pair_text = |select_time: &dyn Fn(&MigrationTimes) -> f64| {
            select_methods(size)
                .map(|migrations| format!("{:.0}", median_time(migrations, select_time)))
                .join(", ")
        };
        text.push_str(&format!(
            "{:>6} {:>16} {:>22} {:>22} {:>24}\n",
            size.mib,
            median_pair_text(&|migration| migration.freeze_ms),
            median_pair_text(&|migration| migration.total_ms),
            median_pair_text(&|migration| migration.arrived_ms),
            median_pair_text(&|migration| migration.arrived_ms - migration.total_ms),
        ));
    }
    text
}

fn format_steps(sizes: &[SizeResult]) -> String {
    let mut text = "\nsteps:\n".to_string();
    for SizeResult {
        mib,
        bare,
        bare_follows,
        ours,
        not_ahead,
        at_once,
    } in sizes
    {
        for (name, migrations) in
            METHOD_NAMES
                .iter()
                .zip([bare, bare_follows, ours, not_ahead, at_once])
        {
            let Some(first_migration) = migrations.first() else {
                continue;
            };
            let format_step = |(i, (step, _)): (usize, &(String, f64))| {
                let durations = |migration: &MigrationTimes| {
                    migration
                        .steps
                        .get(i)
                        .map_or(f64::NAN, |(_, format_step)| *format_step)
                };
                format!("{step} {:.0}", median_time(migrations, &durations))
            };
            let steps: Vec<String> = first_migration
                .steps
                .iter()
                .enumerate()
                .map(format_step)
                .collect();
            text.push_str(&format!("{mib:>6} {name}: {}\n", steps.join(", ")));
        }
    }
    text
}

fn write_results(folder: &Path, results: &Results, text: &str) -> Result<()> {
    let make_series = |name: &str,
                       select_migrations: fn(&SizeResult) -> &[MigrationTimes],
                       select_time: fn(&MigrationTimes) -> f64| {
        let point = |size: &SizeResult| {
            let median_ms = median(select_migrations(size).iter().map(select_time).collect())?;
            Some((f64::from(size.mib), median_ms))
        };
        Series {
            name: name.to_string(),
            points: results.sizes.iter().filter_map(point).collect(),
            ..Series::default()
        }
    };
    let series = vec![
        make_series(
            "bare CRIU, standing still",
            |size| &size.bare,
            |migration| migration.freeze_ms,
        ),
        make_series(
            "bare CRIU, memory follows, standing still",
            |size| &size.bare_follows,
            |migration| migration.freeze_ms,
        ),
        make_series(
            "bare CRIU, memory follows, until all is there",
            |size| &size.bare_follows,
            |migration| migration.arrived_ms,
        ),
        make_series(
            "ours, standing still",
            |size| &size.ours,
            |migration| migration.freeze_ms,
        ),
        make_series(
            "ours, the whole move",
            |size| &size.ours,
            |migration| migration.total_ms,
        ),
        make_series(
            "ours, until all memory is there",
            |size| &size.ours,
            |migration| migration.arrived_ms,
        ),
        make_series(
            "ours, nothing ahead, until all memory is there",
            |size| &size.not_ahead,
            |migration| migration.arrived_ms,
        ),
        make_series(
            "ours, memory and all at once",
            |size| &size.at_once,
            |migration| migration.total_ms,
        ),
    ];
    let chart = Chart {
        name: "migrate".to_string(),
        title: "a move by the task's own clock, beside bare CRIU".to_string(),
        x: "MiB that the task holds".to_string(),
        y: "milliseconds".to_string(),
        more_is_better: false,
        series,
    };
    let mut files = vec![
        ("migrate.txt", format!("{}{text}", results.machine.format())),
        (
            "migrate.json",
            serde_json::to_string_pretty(results)? + "\n",
        ),
    ];
    files.extend(chart.logarithmic_svg().map(|svg| ("migrate.svg", svg)));
    for (name, text) in files {
        let file = folder.join(name);
        fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result contains the duration of each step. The last step ends when the task runs.
    #[test]
    fn step_durations_end_when_task_runs() {
        let steps = [("dump", 3_000), ("restore", 7_000), ("run", 8_000)]
            .map(|(name, at)| (name.to_string(), at));
        let durations: Vec<f64> = step_durations(1_000, &steps, 9_000)
            .into_iter()
            .map(|(_, duration)| duration)
            .collect();
        assert_eq!(durations, [2.0, 4.0, 2.0]);
    }

    #[test]
    fn goal_applies_to_medians() {
        let migration = |freeze_ms| MigrationTimes {
            freeze_ms,
            total_ms: freeze_ms,
            arrived_ms: freeze_ms,
            bytes: 0,
            steps: Vec::new(),
        };
        let size_result = |bare: f64, ours: [f64; 3]| {
            let (bare, at_once) = (vec![migration(bare)], vec![migration(120.0)]);
            SizeResult {
                mib: 16,
                bare,
                ours: ours.map(migration).to_vec(),
                at_once,
                ..SizeResult::default()
            }
        };
        assert!(format_table(&[size_result(30.0, [50.0, 60.0, 900.0])]).1);
        assert!(!format_table(&[size_result(29.0, [50.0, 60.0, 900.0])]).1);
        assert!(!format_table(&[size_result(100.0, [50.0, 61.0, 900.0])]).1);
    }

    /// The post-copy table compares the medians of CRIU alone and Sempa.
    #[test]
    fn post_copy_table_compares_medians() {
        let migration = |unit_ms: f64| {
            let steps = vec![("dump".to_string(), unit_ms)];
            MigrationTimes {
                freeze_ms: unit_ms,
                total_ms: 2.0 * unit_ms,
                arrived_ms: 9.0 * unit_ms,
                bytes: 0,
                steps,
            }
        };
        let (bare_follows, ours) = (
            [50.0, 10.0, 90.0].map(migration).to_vec(),
            vec![migration(7.0)],
        );
        let text = format_table(&[SizeResult {
            mib: 16,
            bare_follows,
            ours,
            ..SizeResult::default()
        }])
        .0;
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert!(
            lines.contains(&vec![
                "16", "50,", "7", "100,", "14", "450,", "63", "350,", "49"
            ]),
            "{text}"
        );
        assert!(
            text.contains("16 bare CRIU, memory follows: dump 50\n"),
            "{text}"
        );
    }
}
