//! `cargo xtask bench balance`: runs farms of unequal tasks on hosts that control groups make
//! unequal.
//!
//! Two sets of such hosts are up at the same time, so that other load on the machine affects both
//! alike:
//!
//! - On one set the farm runs without a resource manager; tasks are placed in turn.
//! - On the other set it runs under a resource manager that balances, first without and then with
//!   declared work of each task.
//!
//! The results are compared with the best assignment, which is found by exhaustive search. A last
//! farm is in balance from the start; none of its tasks may be migrated.

use crate::figures::median;
use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::MigrationCause;
use sempa_tests::assignment::{Speed, best, blind};
use sempa_tests::labour::{Harvest, Unequal};
use sempa_tests::rng::Rng;
use sempa_tests::vm::Entry;
use sempa_tests::{limits, needs};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Share of one processor that each host has. The machine must have twice their sum.
const SHARES: [f64; 4] = [0.1, 0.1, 0.2, 0.4];
/// Number of tasks in the farm.
const TASKS: usize = 12;
/// Range of the work of a task, in milliseconds of processor time.
const WORK_MS: (usize, usize) = (2_500, 14_500);
/// Divisor of the work in a quick run.
const QUICK_DIVISOR: usize = 3;
/// Repetitions, each with different tasks.
const REPETITIONS: usize = 3;
/// Time limit for one farm.
const FARM_TIMEOUT: Duration = Duration::from_secs(1200);
/// Time after which load watchers have reported their hosts.
const LOAD_REPORT_DELAY: Duration = Duration::from_secs(8);
/// Goals: largest ratio of our time to that of the best assignment, and smallest speedup over
/// placement in turn.
const RATIO_TO_BEST_MAX: f64 = 1.15;
const SPEEDUP_MIN: f64 = 1.5;

/// Number of tasks in the balanced farm, and work of each in milliseconds. With host shares of one,
/// one, two and four parts, every task gets the same share of a processor.
const EVEN_TASKS: usize = 8;
const EVEN_WORK_MS: usize = 8_000;

/// Result of one run of a farm.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FarmRun {
    seconds: f64,
    /// One sentence per migration, with its reason.
    moves: Vec<String>,
    /// Number of migrations before the first task ended.
    #[serde(default)]
    early_moves: usize,
    failed_moves: usize,
    /// Starts, migrations and ends of tasks with their hosts, in seconds after the first start.
    #[serde(default)]
    course: Vec<String>,
}

/// One repetition with its own tasks.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Repetition {
    /// Number of the repetition, which is also the seed of its tasks.
    number: usize,
    /// Work of each task in seconds of processor time.
    work: Vec<f64>,
    /// Seconds of the best static assignment.
    best: f64,
    /// Seconds that are achievable without knowledge of the tasks if migrations cost nothing.
    blind: f64,
    in_turn: FarmRun,
    untold: FarmRun,
    told: FarmRun,
    /// Run of equal tasks that are balanced from the start, without declared work.
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
    /// Runs one repetition with less work.
    pub quick: bool,
    /// Number of repetitions in place of the default.
    pub repetitions: Option<usize>,
    /// Runs only these repetitions and keeps the stored results of the others.
    pub only: Vec<usize>,
    /// Folder for table and JSON.
    pub results: PathBuf,
}

/// Measures, prints a table, and writes it and JSON after each repetition. Returns true if the
/// medians meet the goals.
///
/// # Errors
/// Fails if hosts cannot be created, a farm fails, or the results cannot be written.
pub fn bench_balance(settings: &BalanceSettings) -> Result<bool> {
    if let Some(missing) = needs::lacks().or_else(limits::lacks) {
        bail!("bench balance: {missing}");
    }
    let repetitions = settings
        .repetitions
        .unwrap_or(if settings.quick { 1 } else { REPETITIONS });
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
        Unequal::new(&settings.prefix, &SHARES)?,
        Unequal::new(&settings.prefix, &SHARES)?,
    ];
    let unit = std::thread::scope(|scope| {
        // Calibrates both sets at the same time, because processors that share a core are slower
        // together.
        let each = sides.each_ref().map(|side| scope.spawn(|| side.unit()));
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

/// Reads the stored repetitions.
fn stored_repetitions(file: &Path) -> Result<Vec<Repetition>> {
    let Ok(text) = fs::read_to_string(file) else {
        return Ok(Vec::new());
    };
    let mut all: Value = serde_json::from_str(&text).with_context(|| file.display().to_string())?;
    serde_json::from_value(all["rounds"].take()).with_context(|| file.display().to_string())
}

fn run_repetition(
    sides: &[Unequal; 2],
    unit: f64,
    number: usize,
    quick: bool,
) -> Result<Repetition> {
    let (mut rng, (least, most)) = (Rng::new(number as u64), WORK_MS);
    let less = if quick { QUICK_DIVISOR } else { 1 };
    let ms: Vec<usize> = (0..TASKS)
        .map(|_| (least + rng.below(most - least)) / less)
        .collect();
    let units: Vec<u32> = ms
        .iter()
        .map(|ms| ((*ms as f64 / 1e3 / unit).round() as u32).max(1))
        .collect();
    let work: Vec<f64> = units.iter().map(|units| f64::from(*units) * unit).collect();
    let hosts = SHARES.map(|share| Speed {
        each: share,
        processors: 1.0,
    });
    let (best, blind) = (best(&hosts, &work), blind(&hosts, &work));
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

/// Runs the farm once: without a resource manager if `rm_overhead` is `None`, otherwise under one.
/// The inner value is the declared work per unit, if it is declared.
fn run_farm(hosts: &Unequal, managed: Option<Option<f64>>, units: &[u32]) -> Result<FarmRun> {
    let vm = hosts.start()?;
    let manager = managed.map(|_| hosts.manage(&vm)).transpose()?;
    if manager.is_some() {
        std::thread::sleep(LOAD_REPORT_DELAY);
    }
    let done = hosts
        .farm(&vm, managed.flatten(), units)?
        .finish(FARM_TIMEOUT);
    let harvest = Harvest::read(
        &done
            .and_then(|done| done.expect_good("the farm"))
            .with_context(|| vm.logs())?
            .out,
    )?;
    let right = harvest.tasks.len() == units.len() && harvest.tasks.iter().all(|task| task.right);
    ensure!(
        right,
        "a task was lost or did something else: {harvest:?}\n{}",
        vm.logs()
    );
    let events = vm.events()?;
    let for_load = |entry: &&Entry| {
        matches!(
            entry.kind,
            EventKind::Migrated {
                cause: MigrationCause::Load { .. },
                ..
            }
        )
    };
    let ended = |entry: &Entry| match &entry.kind {
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
    let course = timeline(&events, &harvest);
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
    let seconds = harvest.us as f64 / 1e6;
    eprintln!(
        "bench balance: {managed:?}: {seconds:.1} s, {} migrations, {failed_moves} failed",
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

/// Returns the starts, migrations and ends of the farm's tasks, one line each.
fn timeline(events: &[Entry], harvest: &Harvest) -> Vec<String> {
    let units = |tid: &Tid| {
        harvest
            .tasks
            .iter()
            .find(|task| task.tid == tid.to_string())
            .map(|task| task.units)
    };
    let line = |entry: &Entry| match &entry.kind {
        EventKind::TaskStarted { tid, .. } => Some(format!(
            "{tid} of {} units starts on {}",
            units(tid)?,
            entry.host.as_deref().unwrap_or("?")
        )),
        EventKind::TaskEnded { tid, .. } => units(tid).map(|_| format!("{tid} ends")),
        EventKind::Migrated { tid, from, to, .. } => {
            units(tid).map(|_| format!("{tid} migrated from {from} to {to}"))
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

/// Returns the table, and whether the goals are met.
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
        "medians of {} farms of {TASKS} tasks, moves of all; goal: {RATIO_TO_BEST_MAX}x of the best, {SPEEDUP_MIN}x faster than in turn\n",
        rounds.len()
    ));
    (text, good)
}
