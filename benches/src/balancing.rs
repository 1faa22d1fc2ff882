//! `cargo xtask bench balance`: runs farms of tasks with unequal work on hosts whose processor
//! shares are made unequal by control groups.
//!
//! Two sets of such hosts run at the same time, so that other load on the machine affects both sets
//! equally:
//!
//! - On one set the farm runs without a resource manager; tasks are placed round robin.
//! - On the other set the farm runs under a resource manager that rebalances, first without and
//!   then with declared work of each task.
//!
//! The results are compared with the best assignment, which is found by exhaustive search. The
//! tasks of the last farm are balanced from the start, so no task of this farm may be migrated
//! before the first task has ended.

use crate::figures::median;
use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::MigrationCause;
use sempa_tests::assignment::{HostCapacity, best_completion_s, uninformed_completion_s};
use sempa_tests::farm::{FarmResult, UnequalHosts};
use sempa_tests::rng::Rng;
use sempa_tests::vm::EventEntry;
use sempa_tests::{limits, requirements};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Share of one processor for each host of a set. The two sets together use at most twice the sum
/// of these shares.
const PROCESSOR_SHARES: [f64; 4] = [0.1, 0.1, 0.2, 0.4];
/// Number of tasks in the farm.
const FARM_TASK_COUNT: usize = 12;
/// Minimum and maximum work of a task, in milliseconds of processor time.
const WORK_RANGE_MS: (usize, usize) = (2_500, 14_500);
/// Divisor of the work in a quick run.
const QUICK_WORK_DIVISOR: usize = 3;
/// Default number of repetitions. Each repetition has different tasks.
const DEFAULT_REPETITION_COUNT: usize = 3;
/// Time limit for one farm.
const FARM_TIMEOUT: Duration = Duration::from_secs(1200);
/// Time until load watchers have reported their hosts after their start.
const LOAD_REPORT_DELAY: Duration = Duration::from_secs(8);
/// Goal: maximum ratio of Sempa's time to the time of the best assignment.
const RATIO_TO_BEST_MAX: f64 = 1.15;
/// Goal: minimum speedup over round-robin placement.
const SPEEDUP_MIN: f64 = 1.5;

/// Number of tasks in the balanced farm. The shares of the hosts are in the ratio 1 : 1 : 2 : 4, so
/// a placement exists in which each of eight equal tasks has the same share of a processor.
const BALANCED_TASK_COUNT: usize = 8;
/// Work of each task in the balanced farm, in milliseconds of processor time.
const BALANCED_WORK_MS: usize = 8_000;

/// Result of one run of a farm.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FarmRun {
    seconds: f64,
    /// One sentence for each migration for load balance. The sentence includes the reason.
    moves: Vec<String>,
    /// Number of migrations for load balance before the first task ended.
    #[serde(default)]
    early_moves: usize,
    failed_moves: usize,
    /// One line for each start, migration and end of a task. The lines about starts and migrations
    /// name the hosts. Times are in seconds after the first start.
    #[serde(default)]
    course: Vec<String>,
}

/// The results of one repetition. Each repetition has different tasks.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Repetition {
    /// Number of the repetition, which is also the seed of its tasks.
    number: usize,
    /// Work of each task, in seconds of processor time.
    work: Vec<f64>,
    /// Time of the best static assignment in seconds.
    best: f64,
    /// Time in seconds that a scheduler could achieve without knowledge of the work if migrations
    /// cost nothing.
    blind: f64,
    /// Run with round-robin placement, without a resource manager.
    in_turn: FarmRun,
    /// Run under the resource manager, without declared work.
    untold: FarmRun,
    /// Run under the resource manager, with declared work.
    told: FarmRun,
    /// Run of the balanced farm, without declared work. `None` in result files of earlier versions.
    #[serde(default)]
    even: Option<FarmRun>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    shares: [f64; PROCESSOR_SHARES.len()],
    /// Seconds of processor time per unit of work.
    unit: f64,
    rounds: Vec<Repetition>,
}

/// Settings of `bench balance`.
#[derive(Clone, Debug)]
pub struct BalanceSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// True if one repetition with a third of the work is run.
    pub is_quick: bool,
    /// Number of repetitions; `None` for the default number.
    pub repetition_count: Option<usize>,
    /// Numbers of the repetitions to run; the stored results of the other repetitions are retained.
    /// If empty, all repetitions are run.
    pub selected_numbers: Vec<usize>,
    /// Folder to which the table and the JSON file are written.
    pub results_folder: PathBuf,
}

/// Runs the measurement and prints a table. Writes the table and JSON after each repetition.
/// Returns true if the results meet the goals.
pub fn bench_balance(settings: &BalanceSettings) -> Result<bool> {
    if let Some(unmet_requirement) =
        requirements::unmet_requirement().or_else(limits::unmet_cpu_requirement)
    {
        bail!("bench balance: {unmet_requirement}");
    }
    let repetition_count = settings.repetition_count.unwrap_or(if settings.is_quick {
        1
    } else {
        DEFAULT_REPETITION_COUNT
    });
    let repetition_numbers: Vec<usize> = if settings.selected_numbers.is_empty() {
        (1..=repetition_count).collect()
    } else {
        settings.selected_numbers.clone()
    };
    let results_file = settings.results_folder.join("balance.json");
    let mut repetition_results = if settings.selected_numbers.is_empty() {
        Vec::new()
    } else {
        stored_repetitions(&results_file)?
    };
    repetition_results
        .retain(|repetition: &Repetition| !repetition_numbers.contains(&repetition.number));
    let mut machine = MachineInfo::collect(
        settings.is_own_build,
        repetition_results.len() + repetition_numbers.len(),
        settings.is_quick,
    );
    let host_sets = [
        UnequalHosts::new(&settings.prefix, &PROCESSOR_SHARES)?,
        UnequalHosts::new(&settings.prefix, &PROCESSOR_SHARES)?,
    ];
    let unit_s = std::thread::scope(|scope| {
        // The unit of work is measured on both sets at the same time, because two processors that
        // share a core are slower when both are in use.
        let measurements = host_sets
            .each_ref()
            .map(|measurement| scope.spawn(|| measurement.measure_unit_s()));
        let measurements =
            measurements.map(|measurement| measurement.join().expect("it does not panic"));
        measurements
            .into_iter()
            .sum::<Result<f64>>()
            .map(|unit_sum| unit_sum / host_sets.len() as f64)
    })?;
    fs::create_dir_all(&settings.results_folder)
        .with_context(|| settings.results_folder.display().to_string())?;
    let mut meets_goals = true;
    for number in repetition_numbers {
        eprintln!("bench balance: repetition {number}");
        repetition_results.push(run_repetition(
            &host_sets,
            unit_s,
            number,
            settings.is_quick,
        )?);
        repetition_results.sort_by_key(|repetition| repetition.number);
        machine.update_load_after();
        let (text, table_meets_goals) = format_table(&repetition_results);
        let text = format!("{}{text}", machine.format());
        fs::write(settings.results_folder.join("balance.txt"), &text)?;
        let results = Results {
            machine: machine.clone(),
            shares: PROCESSOR_SHARES,
            unit: unit_s,
            rounds: repetition_results.clone(),
        };
        fs::write(
            &results_file,
            serde_json::to_string_pretty(&results)? + "\n",
        )?;
        println!("{text}written: {}", settings.results_folder.display());
        meets_goals = table_meets_goals;
    }
    Ok(meets_goals)
}

/// Reads the repetitions from an earlier run's JSON file. Returns an empty vector if the file does
/// not exist.
fn stored_repetitions(file: &Path) -> Result<Vec<Repetition>> {
    let Ok(text) = fs::read_to_string(file) else {
        return Ok(Vec::new());
    };
    let mut results: Value =
        serde_json::from_str(&text).with_context(|| file.display().to_string())?;
    serde_json::from_value(results["rounds"].take()).with_context(|| file.display().to_string())
}

fn run_repetition(
    host_sets: &[UnequalHosts; 2],
    unit_s: f64,
    number: usize,
    is_quick: bool,
) -> Result<Repetition> {
    let (mut rng, (work_min_ms, work_max_ms)) = (Rng::new(number as u64), WORK_RANGE_MS);
    let work_divisor = if is_quick { QUICK_WORK_DIVISOR } else { 1 };
    let ms: Vec<usize> = (0..FARM_TASK_COUNT)
        .map(|_| (work_min_ms + rng.next_below(work_max_ms - work_min_ms)) / work_divisor)
        .collect();
    let units: Vec<u32> = ms
        .iter()
        .map(|ms| ((*ms as f64 / 1e3 / unit_s).round() as u32).max(1))
        .collect();
    let work_s: Vec<f64> = units
        .iter()
        .map(|units| f64::from(*units) * unit_s)
        .collect();
    let hosts = PROCESSOR_SHARES.map(|share| HostCapacity {
        work_per_second: share,
        processor_count: 1.0,
    });
    let (best_s, uninformed_s) = (
        best_completion_s(&hosts, &work_s),
        uninformed_completion_s(&hosts, &work_s),
    );
    eprintln!("bench balance: {work_s:.1?} s of work; the best assignment takes {best_s:.1} s");
    let even = vec![
        ((BALANCED_WORK_MS as f64 / 1e3 / unit_s / work_divisor as f64).round() as u32)
            .max(1);
        BALANCED_TASK_COUNT
    ];
    let (round_robin_run, [undeclared_run, told, even]) = std::thread::scope(|scope| {
        let round_robin_run = scope.spawn(|| run_farm(&host_sets[0], None, &units));
        let farm_settings = [(None, &units), (Some(unit_s), &units), (None, &even)];
        let [undeclared_run, told, even] =
            farm_settings.map(|(told, units)| run_farm(&host_sets[1], Some(told), units));
        anyhow::Ok((
            round_robin_run.join().expect("it does not panic")?,
            [undeclared_run?, told?, even?],
        ))
    })?;
    Ok(Repetition {
        number,
        work: work_s,
        best: best_s,
        blind: uninformed_s,
        in_turn: round_robin_run,
        untold: undeclared_run,
        told,
        even: Some(even),
    })
}

/// Runs a farm once. If `rm_declared_unit_s` is `None`, no resource manager runs. The inner value
/// is the number of seconds per unit of work that the tasks declare; if the inner value is `None`,
/// the tasks declare no work.
fn run_farm(
    hosts: &UnequalHosts,
    rm_declared_unit_s: Option<Option<f64>>,
    units: &[u32],
) -> Result<FarmRun> {
    let vm = hosts.start_vm()?;
    let rm = rm_declared_unit_s
        .map(|_| hosts.start_resource_manager(&vm))
        .transpose()?;
    if rm.is_some() {
        std::thread::sleep(LOAD_REPORT_DELAY);
    }
    let result = hosts
        .start_farm(&vm, rm_declared_unit_s.flatten(), units)?
        .wait_or_kill(FARM_TIMEOUT);
    let farm_result = FarmResult::parse(
        &result
            .and_then(|result| result.expect_success("the farm"))
            .with_context(|| vm.events_and_logs())?
            .stdout,
    )?;
    let is_correct = farm_result.tasks.len() == units.len()
        && farm_result.tasks.iter().all(|task| task.is_correct);
    ensure!(
        is_correct,
        "a task was lost or did something else: {farm_result:?}\n{}",
        vm.events_and_logs()
    );
    let events = vm.events()?;
    let is_load_migration = |entry: &&EventEntry| {
        matches!(
            entry.kind,
            EventKind::Migrated {
                cause: MigrationCause::Load { .. },
                ..
            }
        )
    };
    let is_task_end = |entry: &EventEntry| match &entry.kind {
        EventKind::TaskEnded { tid, .. } => farm_result
            .tasks
            .iter()
            .any(|task| task.tid == tid.to_string()),
        _ => false,
    };
    let early_moves = events
        .iter()
        .take_while(|entry| !is_task_end(entry))
        .filter(is_load_migration)
        .count();
    let course = course_lines(&events, &farm_result);
    let moves: Vec<String> = events
        .iter()
        .filter(is_load_migration)
        .map(|entry| entry.text.clone())
        .collect();
    let failed_moves = events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::MigrationFailed { .. }))
        .count();
    vm.halt_and_wait()?;
    drop(rm);
    let seconds = farm_result.elapsed_us as f64 / 1e6;
    eprintln!(
        "bench balance: {rm_declared_unit_s:?}: {seconds:.1} s, {} migrations, {failed_moves} failed",
        moves.len()
    );
    moves.iter().for_each(|text| eprintln!("  {text}"));
    Ok(FarmRun {
        seconds,
        moves,
        early_moves,
        failed_moves,
        course,
    })
}

/// Returns one line for each start, migration and end of the farm's tasks, in order of time. Times
/// are in seconds after the first line.
fn course_lines(events: &[EventEntry], farm_result: &FarmResult) -> Vec<String> {
    let unit_count = |tid: &Tid| {
        farm_result
            .tasks
            .iter()
            .find(|task| task.tid == tid.to_string())
            .map(|task| task.unit_count)
    };
    let format_event = |entry: &EventEntry| match &entry.kind {
        EventKind::TaskStarted { tid, .. } => Some(format!(
            "{tid} of {} units starts on {}",
            unit_count(tid)?,
            entry.host.as_deref().unwrap_or("?")
        )),
        EventKind::TaskEnded { tid, .. } => unit_count(tid).map(|_| format!("{tid} ends")),
        EventKind::Migrated { tid, from, to, .. } => {
            unit_count(tid).map(|_| format!("{tid} migrated from {from} to {to}"))
        }
        _ => None,
    };
    let lines: Vec<(u64, String)> = events
        .iter()
        .filter_map(|entry| Some((entry.at_us, format_event(entry)?)))
        .collect();
    let first_at_us = lines.first().map_or(0, |(at_us, _)| *at_us);
    lines
        .into_iter()
        .map(|(at_us, text)| {
            format!(
                "{:.1} {text}",
                at_us.saturating_sub(first_at_us) as f64 / 1e6
            )
        })
        .collect()
}

fn format_column_titles() -> String {
    let titles = [
        "",
        "seconds",
        "of the best",
        "than in turn",
        "moves",
        "failed",
    ];
    format!(
        "{:46} {:>8} {:>12} {:>13} {:>6} {:>7}\n",
        titles[0], titles[1], titles[2], titles[3], titles[4], titles[5]
    )
}

/// Returns the table as text, and true if the results meet the goals.
fn format_table(repetitions: &[Repetition]) -> (String, bool) {
    let mut text = format_column_titles();
    let median_of = |select: &dyn Fn(&Repetition) -> f64| {
        median(repetitions.iter().map(select).collect()).unwrap_or(f64::NAN)
    };
    let mut add_line = |name: &str,
                        seconds: &dyn Fn(&Repetition) -> f64,
                        farm_run: Option<&dyn Fn(&Repetition) -> &FarmRun>| {
        let ratio_to_best = median_of(&|repetition| seconds(repetition) / repetition.best);
        let speedup = median_of(&|repetition| repetition.in_turn.seconds / seconds(repetition));
        text.push_str(&format!(
            "{name:46} {:>8.1} {ratio_to_best:>11.2}x {speedup:>12.2}x",
            median_of(seconds)
        ));
        if let Some(farm_run) = farm_run {
            let sum_of_runs = |select: fn(&FarmRun) -> usize| {
                repetitions
                    .iter()
                    .map(|repetition| select(farm_run(repetition)))
                    .sum::<usize>()
            };
            text.push_str(&format!(
                " {:>6} {:>7}",
                sum_of_runs(|farm_run| farm_run.moves.len()),
                sum_of_runs(|farm_run| farm_run.failed_moves)
            ));
        }
        text.push('\n');
        (ratio_to_best, speedup)
    };
    add_line(
        "the best assignment, by trying all",
        &|repetition| repetition.best,
        None,
    );
    add_line(
        "as good as without knowing the tasks",
        &|repetition| repetition.blind,
        None,
    );
    add_line(
        "in turn, without resource manager",
        &|repetition| repetition.in_turn.seconds,
        Some(&|repetition| &repetition.in_turn),
    );
    let undeclared_ratios = add_line(
        "pvm-rm --balance, work not told",
        &|repetition| repetition.untold.seconds,
        Some(&|repetition| &repetition.untold),
    );
    let declared_ratios = add_line(
        "pvm-rm --balance, work told",
        &|repetition| repetition.told.seconds,
        Some(&|repetition| &repetition.told),
    );
    let meets_ratios =
        [undeclared_ratios, declared_ratios]
            .iter()
            .all(|(ratio_to_best, speedup)| {
                *ratio_to_best <= RATIO_TO_BEST_MAX && *speedup >= SPEEDUP_MIN
            });
    let balanced_runs: Vec<&FarmRun> = repetitions
        .iter()
        .filter_map(|repetition| repetition.even.as_ref())
        .collect();
    let early_migration_count = balanced_runs
        .iter()
        .map(|farm_run| farm_run.early_moves)
        .sum::<usize>();
    let meets_goals = meets_ratios && early_migration_count == 0;
    text.push_str(&format!(
        "{} farms of {BALANCED_TASK_COUNT} equal tasks, in balance from the beginning: {early_migration_count} moves before one had ended; goal: none\n",
        balanced_runs.len()
    ));
    text.push_str(&format!(
        "medians of {} farms of {FARM_TASK_COUNT} tasks, moves of all; goal: {RATIO_TO_BEST_MAX}x of the best, {SPEEDUP_MIN}x faster than in turn\n",
        repetitions.len()
    ));
    (text, meets_goals)
}
