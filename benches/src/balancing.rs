//! `cargo xtask bench balance`: runs farms of tasks with unequal work on hosts whose processor
//! shares are made unequal by control groups.
//!
//! Two sets of such hosts are up at the same time, so that other load on the machine affects both
//! sets equally:
//!
//! - On one set the farm runs without a resource manager; tasks are placed round robin.
//! - On the other set it runs under a resource manager that rebalances: first without and then with
//!   declared work of each task.
//!
//! The results are compared with the best assignment, which is found by exhaustive search. A last
//! farm is balanced from the start; none of its tasks may be migrated.

use crate::figures::median;
use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::MigrationCause;
use sempa_tests::assignment::{HostSpeed, best_seconds, uninformed_seconds};
use sempa_tests::farm::{FarmResult, UnequalHosts};
use sempa_tests::rng::Rng;
use sempa_tests::vm::EventEntry;
use sempa_tests::{limits, requirements};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Share of one processor for each host of a set. The two sets together need twice the sum.
const SHARES: [f64; 4] = [0.1, 0.1, 0.2, 0.4];
/// Number of tasks in the farm.
const FARM_TASKS: usize = 12;
/// Range of the work of a task, in milliseconds of processor time.
const WORK_MS: (usize, usize) = (2_500, 14_500);
/// Divisor of the work in a quick run.
const QUICK_DIVISOR: usize = 3;
/// Default number of repetitions. Each has different tasks.
const DEFAULT_REPETITIONS: usize = 3;
/// Time limit for one farm.
const FARM_TIMEOUT: Duration = Duration::from_secs(1200);
/// Time that load watchers need to report their hosts after their start.
const LOAD_REPORT_DELAY: Duration = Duration::from_secs(8);
/// Goal: maximum ratio of our time to the time of the best assignment.
const RATIO_TO_BEST_MAX: f64 = 1.15;
/// Goal: minimum speedup over round-robin placement.
const SPEEDUP_MIN: f64 = 1.5;

/// Number of tasks in the balanced farm. The shares of the hosts are in the ratio 1 : 1 : 2 : 4, so
/// eight equal tasks can each get the same share of a processor.
const EVEN_TASKS: usize = 8;
/// Work of each task in the balanced farm, in milliseconds of processor time.
const EVEN_WORK_MS: usize = 8_000;

/// Result of one run of a farm.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FarmRun {
    seconds: f64,
    /// One sentence per migration, which includes its reason.
    moves: Vec<String>,
    /// Number of migrations before the first task ended.
    #[serde(default)]
    early_moves: usize,
    failed_moves: usize,
    /// Starts, migrations and ends of tasks with their hosts, one line each. Times are in seconds
    /// after the first start.
    #[serde(default)]
    course: Vec<String>,
}

/// The results of one repetition, which has its own tasks.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Repetition {
    /// Number of the repetition, which is also the seed of its tasks.
    number: usize,
    /// Work of each task, in seconds of processor time.
    work: Vec<f64>,
    /// Time of the best static assignment in seconds.
    best: f64,
    /// Time in seconds that a scheduler could achieve without knowledge of the work, if migrations
    /// cost nothing.
    blind: f64,
    /// Run with round-robin placement, without a resource manager.
    in_turn: FarmRun,
    /// Run under the resource manager, without declared work.
    untold: FarmRun,
    /// Run under the resource manager, with declared work.
    told: FarmRun,
    /// Run of the balanced farm, without declared work. `None` in old results.
    #[serde(default)]
    even: Option<FarmRun>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    shares: [f64; SHARES.len()],
    /// Seconds of processor time per unit of work.
    unit: f64,
    rounds: Vec<Repetition>,
}

/// Settings of `bench balance`.
#[derive(Clone, Debug)]
pub struct BalanceSettings {
    /// Folder in which our programs are installed.
    pub prefix: PathBuf,
    /// True if the programs were built from these sources for this run.
    pub own_build: bool,
    /// Runs one repetition with a third of the work.
    pub quick: bool,
    /// Number of repetitions; `None` for the default.
    pub repetitions: Option<usize>,
    /// Numbers of the repetitions to run; the stored results of all others are retained. If empty,
    /// all are run.
    pub only: Vec<usize>,
    /// Folder to which the table and the JSON file are written.
    pub results: PathBuf,
}

/// Runs the measurement and prints a table. Writes the table and JSON after each repetition.
/// Returns true if the medians meet the goals.
pub fn bench_balance(settings: &BalanceSettings) -> Result<bool> {
    if let Some(missing) = requirements::lacks().or_else(limits::lacks) {
        bail!("bench balance: {missing}");
    }
    let repetitions = settings.repetitions.unwrap_or(if settings.quick {
        1
    } else {
        DEFAULT_REPETITIONS
    });
    let numbers: Vec<usize> = if settings.only.is_empty() {
        (1..=repetitions).collect()
    } else {
        settings.only.clone()
    };
    let file = settings.results.join("balance.json");
    let mut rounds = if settings.only.is_empty() {
        Vec::new()
    } else {
        stored_repetitions(&file)?
    };
    rounds.retain(|round: &Repetition| !numbers.contains(&round.number));
    let mut machine = MachineInfo::describe(
        settings.own_build,
        rounds.len() + numbers.len(),
        settings.quick,
    );
    let sides = [
        UnequalHosts::new(&settings.prefix, &SHARES)?,
        UnequalHosts::new(&settings.prefix, &SHARES)?,
    ];
    let unit = std::thread::scope(|scope| {
        // The unit of work is measured on both sets at the same time, because two processors that
        // share a core are slower when both are in use.
        let each = sides
            .each_ref()
            .map(|side| scope.spawn(|| side.measure_unit_seconds()));
        let each = each.map(|side| side.join().expect("it does not panic"));
        each.into_iter()
            .sum::<Result<f64>>()
            .map(|sum| sum / sides.len() as f64)
    })?;
    fs::create_dir_all(&settings.results)
        .with_context(|| settings.results.display().to_string())?;
    let mut good = true;
    for number in numbers {
        eprintln!("bench balance: repetition {number}");
        rounds.push(run_repetition(&sides, unit, number, settings.quick)?);
        rounds.sort_by_key(|round| round.number);
        machine.update_load();
        let (text, met) = table(&rounds);
        let text = format!("{}{text}", machine.text());
        fs::write(settings.results.join("balance.txt"), &text)?;
        let all = Results {
            machine: machine.clone(),
            shares: SHARES,
            unit,
            rounds: rounds.clone(),
        };
        fs::write(&file, serde_json::to_string_pretty(&all)? + "\n")?;
        println!("{text}written: {}", settings.results.display());
        good = met;
    }
    Ok(good)
}

/// Reads the repetitions from an earlier run's JSON file. Returns none if the file does not exist.
fn stored_repetitions(file: &Path) -> Result<Vec<Repetition>> {
    let Ok(text) = fs::read_to_string(file) else {
        return Ok(Vec::new());
    };
    let mut all: Value = serde_json::from_str(&text).with_context(|| file.display().to_string())?;
    serde_json::from_value(all["rounds"].take()).with_context(|| file.display().to_string())
}

fn run_repetition(
    sides: &[UnequalHosts; 2],
    unit: f64,
    number: usize,
    quick: bool,
) -> Result<Repetition> {
    let (mut rng, (least, most)) = (Rng::new(number as u64), WORK_MS);
    let less = if quick { QUICK_DIVISOR } else { 1 };
    let ms: Vec<usize> = (0..FARM_TASKS)
        .map(|_| (least + rng.below(most - least)) / less)
        .collect();
    let units: Vec<u32> = ms
        .iter()
        .map(|ms| ((*ms as f64 / 1e3 / unit).round() as u32).max(1))
        .collect();
    let work: Vec<f64> = units.iter().map(|units| f64::from(*units) * unit).collect();
    let hosts = SHARES.map(|share| HostSpeed {
        work_per_second: share,
        processors: 1.0,
    });
    let (best, blind) = (
        best_seconds(&hosts, &work),
        uninformed_seconds(&hosts, &work),
    );
    eprintln!("bench balance: {work:.1?} s of work; the best assignment takes {best:.1} s");
    let even =
        vec![((EVEN_WORK_MS as f64 / 1e3 / unit / less as f64).round() as u32).max(1); EVEN_TASKS];
    let (in_turn, [untold, told, even]) = std::thread::scope(|scope| {
        let in_turn = scope.spawn(|| run_farm(&sides[0], None, &units));
        let ways = [(None, &units), (Some(unit), &units), (None, &even)];
        let [untold, told, even] = ways.map(|(told, units)| run_farm(&sides[1], Some(told), units));
        anyhow::Ok((
            in_turn.join().expect("it does not panic")?,
            [untold?, told?, even?],
        ))
    })?;
    Ok(Repetition {
        number,
        work,
        best,
        blind,
        in_turn,
        untold,
        told,
        even: Some(even),
    })
}

/// Runs a farm once. If `managed` is `None`, no resource manager runs. Its inner value is the
/// number of seconds per unit of work that tasks declare; `None` if they declare nothing.
fn run_farm(hosts: &UnequalHosts, managed: Option<Option<f64>>, units: &[u32]) -> Result<FarmRun> {
    let vm = hosts.start()?;
    let manager = managed
        .map(|_| hosts.start_resource_manager(&vm))
        .transpose()?;
    if manager.is_some() {
        std::thread::sleep(LOAD_REPORT_DELAY);
    }
    let done = hosts
        .start_farm(&vm, managed.flatten(), units)?
        .finish(FARM_TIMEOUT);
    let harvest = FarmResult::parse(
        &done
            .and_then(|done| done.expect_success("the farm"))
            .with_context(|| vm.logs())?
            .out,
    )?;
    let right =
        harvest.tasks.len() == units.len() && harvest.tasks.iter().all(|task| task.is_correct);
    ensure!(
        right,
        "a task was lost or did something else: {harvest:?}\n{}",
        vm.logs()
    );
    let events = vm.events()?;
    let for_load = |entry: &&EventEntry| {
        matches!(
            entry.kind,
            EventKind::Migrated {
                cause: MigrationCause::Load { .. },
                ..
            }
        )
    };
    let ended = |entry: &EventEntry| match &entry.kind {
        EventKind::TaskEnded { tid, .. } => {
            harvest.tasks.iter().any(|task| task.tid == tid.to_string())
        }
        _ => false,
    };
    let early_moves = events
        .iter()
        .take_while(|entry| !ended(entry))
        .filter(for_load)
        .count();
    let course = course_lines(&events, &harvest);
    let moves: Vec<String> = events
        .iter()
        .filter(for_load)
        .map(|entry| entry.text.clone())
        .collect();
    let failed_moves = events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::MigrationFailed { .. }))
        .count();
    vm.halt()?;
    drop(manager);
    let seconds = harvest.elapsed_us as f64 / 1e6;
    eprintln!(
        "bench balance: {managed:?}: {seconds:.1} s, {} moves, {failed_moves} failed",
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

/// Returns the starts, migrations and ends of the farm's tasks in order of time, one line each.
fn course_lines(events: &[EventEntry], harvest: &FarmResult) -> Vec<String> {
    let units = |tid: &Tid| {
        harvest
            .tasks
            .iter()
            .find(|task| task.tid == tid.to_string())
            .map(|task| task.units)
    };
    let line = |entry: &EventEntry| match &entry.kind {
        EventKind::TaskStarted { tid, .. } => Some(format!(
            "{tid} of {} units starts on {}",
            units(tid)?,
            entry.host.as_deref().unwrap_or("?")
        )),
        EventKind::TaskEnded { tid, .. } => units(tid).map(|_| format!("{tid} ends")),
        EventKind::Migrated { tid, from, to, .. } => {
            units(tid).map(|_| format!("{tid} has moved from {from} to {to}"))
        }
        _ => None,
    };
    let all: Vec<(u64, String)> = events
        .iter()
        .filter_map(|entry| Some((entry.at_us, line(entry)?)))
        .collect();
    let first = all.first().map_or(0, |(at, _)| *at);
    all.into_iter()
        .map(|(at, text)| format!("{:.1} {text}", at.saturating_sub(first) as f64 / 1e6))
        .collect()
}

/// Returns the table as text, and true if the goals are met.
fn table(rounds: &[Repetition]) -> (String, bool) {
    let head = [
        "",
        "seconds",
        "of the best",
        "than in turn",
        "moves",
        "failed",
    ];
    let mut text = format!(
        "{:46} {:>8} {:>12} {:>13} {:>6} {:>7}\n",
        head[0], head[1], head[2], head[3], head[4], head[5]
    );
    let middle = |of: &dyn Fn(&Repetition) -> f64| {
        median(rounds.iter().map(of).collect()).unwrap_or(f64::NAN)
    };
    let mut line = |name: &str,
                    seconds: &dyn Fn(&Repetition) -> f64,
                    once: Option<&dyn Fn(&Repetition) -> &FarmRun>| {
        let over = middle(&|round| seconds(round) / round.best);
        let faster = middle(&|round| round.in_turn.seconds / seconds(round));
        text.push_str(&format!(
            "{name:46} {:>8.1} {over:>11.2}x {faster:>12.2}x",
            middle(seconds)
        ));
        if let Some(once) = once {
            let sum = |of: fn(&FarmRun) -> usize| {
                rounds.iter().map(|round| of(once(round))).sum::<usize>()
            };
            text.push_str(&format!(
                " {:>6} {:>7}",
                sum(|once| once.moves.len()),
                sum(|once| once.failed_moves)
            ));
        }
        text.push('\n');
        (over, faster)
    };
    line(
        "the best assignment, by trying all",
        &|round| round.best,
        None,
    );
    line(
        "as good as without knowing the tasks",
        &|round| round.blind,
        None,
    );
    line(
        "in turn, without resource manager",
        &|round| round.in_turn.seconds,
        Some(&|round| &round.in_turn),
    );
    let untold = line(
        "pvm-rm --balance, work not told",
        &|round| round.untold.seconds,
        Some(&|round| &round.untold),
    );
    let told = line(
        "pvm-rm --balance, work told",
        &|round| round.told.seconds,
        Some(&|round| &round.told),
    );
    let met = [untold, told]
        .iter()
        .all(|(over, faster)| *over <= RATIO_TO_BEST_MAX && *faster >= SPEEDUP_MIN);
    let even: Vec<&FarmRun> = rounds
        .iter()
        .filter_map(|round| round.even.as_ref())
        .collect();
    let disturbed = even.iter().map(|once| once.early_moves).sum::<usize>();
    let good = met && disturbed == 0;
    text.push_str(&format!(
        "{} farms of {EVEN_TASKS} equal tasks, in balance from the beginning: {disturbed} moves before one had ended; goal: none\n",
        even.len()
    ));
    text.push_str(&format!(
        "medians of {} farms of {FARM_TASKS} tasks, moves of all; goal: {RATIO_TO_BEST_MAX}x of the best, {SPEEDUP_MIN}x faster than in turn\n",
        rounds.len()
    ));
    (text, good)
}
