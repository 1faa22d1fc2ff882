//! `cargo xtask bench migrate`: measures how long a task is frozen during a migration, by the
//! task's own clock.
//!
//! Five methods of migration are compared:
//!
//! - bare CRIU, stop-and-copy: the process is dumped to memory, the images are copied, and the
//!   process is restored;
//! - bare CRIU, post-copy;
//! - our system with pre-copy and post-copy;
//! - our system without pre-copy;
//! - our system without post-copy: all memory is sent with the images.
//!
//! The hosts of all methods are up at the same time and the methods take turns, so that other load
//! on the machine affects all methods equally.

mod bare;

use crate::figures::median;
use crate::machine_info::MachineInfo;
use crate::plot::{Chart, Series};
use anyhow::{Context, Result, bail, ensure};
use bare::{PostCopy, StopAndCopy};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_tests::run::wait_for;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{Testbed, Vm, requirements};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Memory of the tasks in MiB.
const SIZES: [u32; 4] = [16, 128, 512, 2048];
/// Memory of the tasks in a quick run, in MiB.
const SIZES_QUICK: [u32; 2] = [16, 128];
/// Number of repetitions in a full run.
const REPETITIONS_FULL: usize = 7;
/// Number of repetitions for large tasks, and in quick runs.
const REPETITIONS_FEW: usize = 3;
/// Minimum memory of a large task in MiB.
const LARGE_MIB: u32 = 1024;
/// Goal: maximum difference between our freeze time and that of bare CRIU, in milliseconds.
const FREEZE_DIFFERENCE_MAX_MS: f64 = 30.0;
/// Time limit for one step of a migration.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Environment variable and value that disable pre-copy.
const NO_PRE_COPY: (&str, &str) = ("SEMPA_PRE_COPY", "never");
/// Environment variable and value that disable post-copy.
const NO_POST_COPY: (&str, &str) = ("SEMPA_POST_COPY", "never");
/// Environment variable with the limit of the transfer rate of migrations, in bytes per second.
const RATE_VARIABLE: &str = "SEMPA_MOVE_RATE";
/// Names of the compared methods, in the order in which they are measured.
const METHODS: [&str; 5] = [
    "bare CRIU",
    "bare CRIU, memory follows",
    "ours",
    "ours, nothing ahead",
    "ours, at once",
];
/// Folder for the images of bare CRIU on its hosts. Like the image folder of the daemons, it is in
/// memory.
const IMAGE_FOLDER: &str = "/tmp/bare";

/// Settings of `bench migrate`.
#[derive(Clone, Debug)]
pub struct MigrationSettings {
    /// Folder in which our programs are installed.
    pub prefix: PathBuf,
    /// True if the programs were built from these sources for this run.
    pub own_build: bool,
    /// Uses small tasks and fewer repetitions.
    pub quick: bool,
    /// Memory of the tasks in MiB. If empty, the defaults are used.
    pub sizes: Vec<u32>,
    /// Number of repetitions; `None` for the default.
    pub repetitions: Option<usize>,
    /// Limit of the transfer rate of our migrations, in bytes per second.
    pub rate: Option<u64>,
    /// Folder to which the table, the JSON file and the plot are written.
    pub results: PathBuf,
}

/// The times and the size of one migration.
#[derive(Clone, Debug, Serialize)]
struct MigrationTimes {
    /// Time for which the task did not run, by the task's own clock.
    freeze_ms: f64,
    /// Time from the command until the task ran again.
    total_ms: f64,
    /// Time from the command until all memory had arrived.
    arrived_ms: f64,
    /// Size of the images in bytes.
    bytes: u64,
    /// Names of the steps in order, each with its duration in milliseconds. The last step ends when
    /// the task runs.
    steps: Vec<(String, f64)>,
}

/// The migrations of the tasks of one size, by method.
#[derive(Clone, Debug, Default, Serialize)]
struct SizeResult {
    mib: u32,
    bare: Vec<MigrationTimes>,
    /// Migrations by bare CRIU with post-copy.
    bare_follows: Vec<MigrationTimes>,
    ours: Vec<MigrationTimes>,
    /// Migrations by our system without pre-copy.
    not_ahead: Vec<MigrationTimes>,
    /// Migrations by our system without post-copy.
    at_once: Vec<MigrationTimes>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    goal_ms: f64,
    /// Limit of the transfer rate of our migrations, in bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<u64>,
    sizes: Vec<SizeResult>,
}

/// Runs the measurement and prints a table. Writes the table, JSON and a plot after each size.
/// Returns true if the medians meet the goal.
pub fn bench_migrations(settings: &MigrationSettings) -> Result<bool> {
    if let Some(missing) = requirements::lacks() {
        bail!("bench migrate: {missing}");
    }
    let engine =
        requirements::engine().context("bench migrate: no CRIU; cargo xtask criu gets one")?;
    let usual = if settings.quick {
        &SIZES_QUICK[..]
    } else {
        &SIZES[..]
    };
    let sizes = if settings.sizes.is_empty() {
        usual.to_vec()
    } else {
        settings.sizes.clone()
    };
    let few = |mib: u32| {
        if mib >= LARGE_MIB || settings.quick {
            REPETITIONS_FEW
        } else {
            REPETITIONS_FULL
        }
    };
    fs::create_dir_all(&settings.results)
        .with_context(|| settings.results.display().to_string())?;
    let rate = settings.rate.map(|rate| rate.to_string());
    let rate = rate.as_deref().map(|rate| (RATE_VARIABLE, rate));
    let envs = [None, Some(NO_PRE_COPY), Some(NO_POST_COPY)]
        .map(|less| rate.into_iter().chain(less).collect::<Vec<_>>());
    let hosts = [bare::BARE_HOSTS.into_iter().max().unwrap_or(2), 2, 2];
    let beds = hosts
        .iter()
        .zip(&envs)
        .map(|(hosts, env)| Testbed::with_env(*hosts, Some(&settings.prefix), env));
    let beds = beds.collect::<Result<Vec<Testbed>>>()?;
    let vms = beds.iter().zip(&envs).map(|(bed, env)| start_vm(bed, env));
    let vms = vms.collect::<Result<Vec<Vm<'_>>>>()?;
    let logs = |_: &_| vms.iter().for_each(|vm| eprintln!("{}", vm.logs()));
    let mut machine = MachineInfo::describe(
        settings.own_build,
        settings.repetitions.unwrap_or(few(0)),
        settings.quick,
    );
    let (mut all, mut good) = (Vec::new(), false);
    for mib in sizes {
        let times = settings.repetitions.unwrap_or(few(mib));
        all.push(measure_size(&vms, &engine, mib, times).inspect_err(logs)?);
        machine.update_load();
        let (text, met) = table(&all);
        let results = Results {
            machine: machine.clone(),
            goal_ms: FREEZE_DIFFERENCE_MAX_MS,
            rate: settings.rate,
            sizes: all.clone(),
        };
        write_results(&settings.results, &results, &text)?;
        good = met;
        println!("{text}");
    }
    vms.iter().try_for_each(Vm::halt)?;
    println!("written: {}", settings.results.display());
    Ok(good)
}

/// Starts a virtual machine of two hosts and compiles the measured program there.
fn start_vm<'a>(bed: &'a Testbed, env: &[(&str, &str)]) -> Result<Vm<'a>> {
    let env = env
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let vm = Vm::start(
        bed,
        Settings {
            env,
            ..Settings::default()
        },
    )?;
    vm.add(&["h2"])?;
    vm.compile_program("memory")?;
    Ok(vm)
}

/// Measures the migrations of tasks of one size. The first of `vms` has the default settings, and
/// its testbed also has the hosts for bare CRIU; the second one runs without pre-copy, the third
/// one without post-copy.
fn measure_size(vms: &[Vm<'_>], engine: &Path, mib: u32, times: usize) -> Result<SizeResult> {
    let mut bare = StopAndCopy::start(&vms[0], engine, mib)?;
    let mut followed = PostCopy::start(&vms[0], engine, mib)?;
    let mut tasks = vms
        .iter()
        .map(|vm| SempaTask::start(vm, mib))
        .collect::<Result<Vec<SempaTask<'_>>>>()?;
    let mut size = SizeResult {
        mib,
        ..SizeResult::default()
    };
    for number in 0..=times {
        for side in 0..METHODS.len() {
            let side = (side + number) % METHODS.len();
            let (once, all) = match side {
                0 => (bare.migrate_once(), &mut size.bare),
                1 => (followed.migrate_once(), &mut size.bare_follows),
                2 => (tasks[0].migrate_once(), &mut size.ours),
                3 => (tasks[1].migrate_once(), &mut size.not_ahead),
                _ => (tasks[2].migrate_once(), &mut size.at_once),
            };
            let once = once.with_context(|| format!("{mib} MiB, {}", METHODS[side]))?;
            eprintln!(
                "bench migrate: {mib} MiB, {}: {:.0} ms",
                METHODS[side], once.freeze_ms
            );
            // The first run of each method is not counted, because caches are cold.
            if number > 0 {
                all.push(once);
            }
        }
    }
    bare.kill()?;
    followed.kill()?;
    tasks.into_iter().try_for_each(SempaTask::kill)?;
    Ok(size)
}

/// Returns the microseconds since 1970. The program `memory` uses the same clock.
pub(crate) fn now_us() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as i64)
}

pub(crate) fn ms_between(from: i64, to: i64) -> f64 {
    (to - from) as f64 / 1e3
}

/// The file in which the program `memory` records the gaps in its run time.
#[derive(Debug)]
pub(crate) struct GapRecord(pub(crate) PathBuf);

impl GapRecord {
    /// Waits until the program has filled its memory. Returns the process id that the program sees.
    pub(crate) fn await_ready(&self) -> Result<i64> {
        wait_for(STEP_TIMEOUT, || {
            let ready = self.number_pairs("ready")?.first().copied();
            ready
                .map(|(pid, _)| pid)
                .ok_or_else(|| format!("{} does not say that it is ready", self.0.display()))
        })
    }

    /// Returns the two numbers after `word` in each line that begins with `word`.
    fn number_pairs(&self, word: &str) -> Result<Vec<(i64, i64)>, String> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        if text.lines().any(|line| line.starts_with("bad")) {
            return Err("its memory is not what it was".to_string());
        }
        let pair = |line: &str| {
            let mut words = line.strip_prefix(word)?.split_whitespace();
            Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
        };
        Ok(text.lines().filter_map(pair).collect())
    }

    /// Waits until the program has recorded the gap that contains the time `at`. Returns the gap's
    /// begin and end, in microseconds since 1970.
    fn await_gap(&self, at: i64) -> Result<(i64, i64)> {
        wait_for(STEP_TIMEOUT, || self.find_gap(at))
    }

    /// Returns the gap that contains the time `at`. The error reports that the gap is not recorded
    /// yet.
    pub(crate) fn find_gap(&self, at: i64) -> Result<(i64, i64), String> {
        let found = self
            .number_pairs("gap")?
            .into_iter()
            .find(|(from, to)| *from <= at && at <= *to);
        found.ok_or_else(|| format!("it did not stand still at {at}"))
    }
}

/// A task of our virtual machine.
struct SempaTask<'a> {
    vm: &'a Vm<'a>,
    tid: String,
    gap_record: GapRecord,
    /// Number of the newest event log entry that was read.
    last_event: u64,
}

impl<'a> SempaTask<'a> {
    fn start(vm: &'a Vm<'a>, mib: u32) -> Result<SempaTask<'a>> {
        let notes = GapRecord(vm.bed().folder().join(format!("notes-{mib}-ours")));
        let tid = vm.spawn(&[
            "-h1",
            "memory",
            &mib.to_string(),
            &notes.0.display().to_string(),
        ])?;
        notes.await_ready()?;
        Ok(SempaTask {
            vm,
            tid,
            gap_record: notes,
            last_event: 0,
        })
    }

    fn migrate_once(&mut self) -> Result<MigrationTimes> {
        let to = if self.vm.host_of(&self.tid)? == "h1" {
            "h2"
        } else {
            "h1"
        };
        let begin = now_us();
        self.vm
            .migrate_when_ready(&self.tid, to)?
            .expect_success("migrate")?;
        let events = self.vm.events()?;
        let new =
            |entry: &&EventEntry| entry.number > self.last_event && entry.at_us as i64 >= begin;
        let mut steps: Vec<(String, i64)> = Vec::new();
        let mut bytes = 0;
        for entry in events.iter().filter(new) {
            match &entry.kind {
                EventKind::MigrationStep { tid, step, .. } if tid.to_string() == self.tid => {
                    steps.push((step.to_string(), entry.at_us as i64));
                }
                EventKind::Migrated {
                    tid, bytes: all, ..
                } if tid.to_string() == self.tid => bytes = *all,
                _ => {}
            }
        }
        self.last_event = events.last().map_or(self.last_event, |entry| entry.number);
        steps.sort_by_key(|(_, at)| *at);
        let (last, arrived) = steps.pop().context("the event log has no steps")?;
        ensure!(last == Step::Arrive.to_string(), "the last step was {last}");
        let dumped = steps
            .iter()
            .find(|(step, _)| step == "dump")
            .context("the event log has no dump")?
            .1;
        let (from, until) = self.gap_record.await_gap(dumped)?;
        let (freeze_ms, total_ms, arrived_ms) = (
            ms_between(from, until),
            ms_between(begin, until),
            ms_between(begin, arrived.max(until)),
        );
        Ok(MigrationTimes {
            freeze_ms,
            total_ms,
            arrived_ms,
            bytes,
            steps: step_durations(begin, &steps, until),
        })
    }

    fn kill(self) -> Result<()> {
        self.vm
            .pvm(&["kill", &self.tid])?
            .expect_success("kill")
            .map(drop)
    }
}

/// Returns the duration of each step in milliseconds. `steps` has the time of the end of each step;
/// the last step ends at `until`, when the task runs.
fn step_durations(begin: i64, steps: &[(String, i64)], until: i64) -> Vec<(String, f64)> {
    let mut before = begin;
    let last = steps.len().saturating_sub(1);
    let span = |(i, (step, at)): (usize, &(String, i64))| {
        let at = if i == last { until } else { *at };
        let took = ms_between(before, at);
        before = at;
        (step.clone(), took)
    };
    steps.iter().enumerate().map(span).collect()
}

fn median_of(all: &[MigrationTimes], of: &dyn Fn(&MigrationTimes) -> f64) -> f64 {
    median(all.iter().map(of).collect()).unwrap_or(f64::NAN)
}

/// Returns the table as text, and true if the goal is met.
fn table(sizes: &[SizeResult]) -> (String, bool) {
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
    let mut good = true;
    for SizeResult {
        mib,
        bare,
        ours,
        at_once,
        ..
    } in sizes
    {
        let freeze = |all: &[MigrationTimes]| median_of(all, &|once| once.freeze_ms);
        let whole = |all: &[MigrationTimes]| median_of(all, &|once| once.total_ms);
        let more = freeze(ours) - freeze(bare);
        let met = more <= FREEZE_DIFFERENCE_MAX_MS;
        good &= met;
        let arrived = median_of(ours, &|once| once.arrived_ms);
        text.push_str(&format!(
            "{mib:>6} {:>6} {:>10.0} {:>10.0} {more:>8.0} {:>8} {:>12.0} {:>12.0} {arrived:>14.0} {:>15.0} {:>9.2} {:>10.1}\n",
            ours.len(),
            freeze(bare),
            freeze(ours),
            if met { "met" } else { "missed" },
            whole(bare),
            whole(ours),
            whole(at_once),
            arrived / whole(at_once),
            median_of(ours, &|once| once.bytes as f64 / 1e6),
        ));
    }
    text.push_str(&format!(
        "milliseconds, medians: how long the task did not run by its own clock (goal: bare + {FREEZE_DIFFERENCE_MAX_MS} ms); from the \
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
    text.push_str(&steps_text(sizes));
    (text, good)
}

/// Returns a table that compares two methods with post-copy: their memory partly arrives after the
/// task runs.
fn comparison_table(
    what: &str,
    sizes: &[SizeResult],
    two: impl Fn(&SizeResult) -> [&Vec<MigrationTimes>; 2],
) -> String {
    let mut text = format!(
        "\n{what}:\n{:>6} {:>16} {:>22} {:>22} {:>24}\n",
        "MiB", "standing still", "until it runs again", "until all is there", "between: needs both"
    );
    for size in sizes {
        let both = |of: &dyn Fn(&MigrationTimes) -> f64| {
            two(size)
                .map(|all| format!("{:.0}", median_of(all, of)))
                .join(", ")
        };
        text.push_str(&format!(
            "{:>6} {:>16} {:>22} {:>22} {:>24}\n",
            size.mib,
            both(&|once| once.freeze_ms),
            both(&|once| once.total_ms),
            both(&|once| once.arrived_ms),
            both(&|once| once.arrived_ms - once.total_ms),
        ));
    }
    text
}

fn steps_text(sizes: &[SizeResult]) -> String {
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
        for (name, all) in METHODS
            .iter()
            .zip([bare, bare_follows, ours, not_ahead, at_once])
        {
            let Some(first) = all.first() else { continue };
            let took = |(i, (step, _)): (usize, &(String, f64))| {
                let of =
                    |once: &MigrationTimes| once.steps.get(i).map_or(f64::NAN, |(_, took)| *took);
                format!("{step} {:.0}", median_of(all, &of))
            };
            let steps: Vec<String> = first.steps.iter().enumerate().map(took).collect();
            text.push_str(&format!("{mib:>6} {name}: {}\n", steps.join(", ")));
        }
    }
    text
}

fn write_results(folder: &Path, results: &Results, text: &str) -> Result<()> {
    let line =
        |name: &str, side: fn(&SizeResult) -> &[MigrationTimes], of: fn(&MigrationTimes) -> f64| {
            let point = |size: &SizeResult| {
                let middle = median(side(size).iter().map(of).collect())?;
                Some((f64::from(size.mib), middle))
            };
            Series {
                name: name.to_string(),
                points: results.sizes.iter().filter_map(point).collect(),
                ..Series::default()
            }
        };
    let series = vec![
        line(
            "bare CRIU, standing still",
            |size| &size.bare,
            |once| once.freeze_ms,
        ),
        line(
            "bare CRIU, memory follows, standing still",
            |size| &size.bare_follows,
            |once| once.freeze_ms,
        ),
        line(
            "bare CRIU, memory follows, until all is there",
            |size| &size.bare_follows,
            |once| once.arrived_ms,
        ),
        line(
            "ours, standing still",
            |size| &size.ours,
            |once| once.freeze_ms,
        ),
        line(
            "ours, the whole move",
            |size| &size.ours,
            |once| once.total_ms,
        ),
        line(
            "ours, until all memory is there",
            |size| &size.ours,
            |once| once.arrived_ms,
        ),
        line(
            "ours, nothing ahead, until all memory is there",
            |size| &size.not_ahead,
            |once| once.arrived_ms,
        ),
        line(
            "ours, memory and all at once",
            |size| &size.at_once,
            |once| once.total_ms,
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
        ("migrate.txt", format!("{}{text}", results.machine.text())),
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

    /// Steps are shown by their durations, and the last one ends when the task runs.
    #[test]
    fn step_durations_end_when_task_runs() {
        let steps = [("dump", 3_000), ("restore", 7_000), ("run", 8_000)]
            .map(|(name, at)| (name.to_string(), at));
        let spans: Vec<f64> = step_durations(1_000, &steps, 9_000)
            .into_iter()
            .map(|(_, took)| took)
            .collect();
        assert_eq!(spans, [2.0, 4.0, 2.0]);
    }

    /// The goal applies to the medians.
    #[test]
    fn goal_applies_to_medians() {
        let once = |freeze_ms| MigrationTimes {
            freeze_ms,
            total_ms: freeze_ms,
            arrived_ms: freeze_ms,
            bytes: 0,
            steps: Vec::new(),
        };
        let size = |ours: [f64; 3]| {
            let (bare, at_once) = (vec![once(100.0)], vec![once(120.0)]);
            SizeResult {
                mib: 16,
                bare,
                ours: ours.map(once).to_vec(),
                at_once,
                ..SizeResult::default()
            }
        };
        assert!(table(&[size([90.0, 130.0, 900.0])]).1);
        assert!(!table(&[size([90.0, 131.0, 900.0])]).1);
    }

    /// The post-copy table compares the medians of bare CRIU and our system.
    #[test]
    fn post_copy_table_compares_medians() {
        let once = |by: f64| {
            let steps = vec![("dump".to_string(), by)];
            MigrationTimes {
                freeze_ms: by,
                total_ms: 2.0 * by,
                arrived_ms: 9.0 * by,
                bytes: 0,
                steps,
            }
        };
        let (bare_follows, ours) = ([50.0, 10.0, 90.0].map(once).to_vec(), vec![once(7.0)]);
        let text = table(&[SizeResult {
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
