//! `cargo xtask bench soak`: migrates communicating tasks hundreds of times.
//!
//! Every message is checked. The resources of the virtual machine are sampled regularly; a
//! regression line through the samples shows which resources migrations leak.

use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::event::{EVENTS_MAX, EventKind};
use sempa_tests::crowd::{Account, Crowd};
use sempa_tests::footprint::{Footprint, RECORDS, RECORDS_KIB_MAX};
use sempa_tests::rng::Rng;
use sempa_tests::run::must;
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, needs};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// One part of a run.
#[derive(Clone, Copy, Debug)]
struct PartPlan {
    name: &'static str,
    tasks: usize,
    /// Number of neighbors on each side that a task communicates with; 0 means all tasks.
    neighbors: usize,
    hosts: usize,
    /// Migrations of each task before the measurement. They bring one-time costs forward:
    /// structures created by a first migration, and memory that a task shared with others of its
    /// program.
    initial_migrations: usize,
    /// Tasks return the memory of large messages at once. Otherwise the C library's caches of many
    /// tasks would need hours to fill.
    returns_memory: bool,
    /// (concurrent migrations, repetitions), executed in this order. The next field says how often
    /// the whole list is executed.
    rounds: &'static [(usize, usize)],
    round_repetitions: usize,
    /// Migrations between two samples of the resources.
    sample_interval: usize,
    /// Checkpoint interval of a job that runs at the same time.
    checkpoint_interval: Option<&'static str>,
}

const CROWD_PLAN: PartPlan = PartPlan {
    name: "tasks",
    tasks: 61,
    neighbors: 2,
    hosts: 8,
    initial_migrations: 2,
    returns_memory: true,
    rounds: &[(1, 25), (6, 6)],
    round_repetitions: 2,
    sample_interval: 8,
    checkpoint_interval: None,
};

const LONG_PLAN: PartPlan = PartPlan {
    name: "moves",
    tasks: 6,
    neighbors: 0,
    hosts: 4,
    initial_migrations: 0,
    returns_memory: false,
    rounds: &[(1, 10), (3, 5)],
    round_repetitions: 40,
    sample_interval: 50,
    checkpoint_interval: Some("1s"),
};

/// Short tasks that run first, and how many of them at a time. They fill the event log and the
/// resource manager's decisions, as on a virtual machine with long use, so that migrations replace
/// entries instead of adding some.
const SHORT_TASKS: usize = 22_000;
const SHORT_TASKS_CONCURRENT: usize = 40;
/// Time limit for all of them.
const SHORT_TASKS_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause without migrations before each sample, because daemons return memory every five seconds.
const SETTLE_DELAY: Duration = Duration::from_secs(6);
/// Readings per sample, and their interval. A sample takes the minimum of its readings, so that
/// temporary needs of messages and checkpoints do not count.
const READINGS_PER_SAMPLE: u32 = 13;
const READING_INTERVAL: Duration = Duration::from_millis(500);
/// Part of the migrations before which samples are not counted, because structures that are created
/// once and kept may still grow.
const WARM_UP_PART: f64 = 0.3;
/// A figure is flat if its line rises, over all counted migrations, by at most `FLAT_PART` of its
/// mean or by at most `DEVIATIONS` standard deviations from the line.
const FLAT_PART: f64 = 0.02;
const DEVIATIONS: f64 = 3.0;

/// Figures that grow on purpose up to a limit, with the limit.
const BOUNDED_FIGURES: [(&str, u64); 1] = [(RECORDS, RECORDS_KIB_MAX)];

/// Settings of `bench soak`.
#[derive(Clone, Debug)]
pub struct SoakSettings {
    /// Folder in which our programs are installed.
    pub prefix: PathBuf,
    /// True if the programs were built from these sources for this run.
    pub own_build: bool,
    /// Runs a tenth of the migrations.
    pub quick: bool,
    /// Runs only the parts with these names and keeps the stored results of the others.
    pub only: Vec<String>,
    /// Folder for table and JSON.
    pub results: PathBuf,
}

/// A sample of the resources after this many migrations.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ResourceSample {
    moves: usize,
    seconds: f64,
    figures: Vec<(String, u64)>,
}

/// The regression line through one figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trend {
    figure: String,
    /// First and last counted values.
    first: u64,
    last: u64,
    mean: f64,
    /// Slope of the line per 100 migrations.
    per_100_moves: f64,
    /// Standard deviation from the line.
    deviation: f64,
    /// True if the figure is flat or, if listed in [`BOUNDED_FIGURES`], below its limit.
    flat: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Part {
    name: String,
    tasks: usize,
    hosts: usize,
    moves: usize,
    failed_moves: usize,
    seconds: f64,
    checked: u64,
    lost: u64,
    doubled: u64,
    disordered: u64,
    damaged: u64,
    /// Entries in the event log per 100 migrations. The log keeps 65,536.
    events_per_100_moves: f64,
    checkpoints: usize,
    trends: Vec<Trend>,
    looks: Vec<ResourceSample>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    parts: Vec<Part>,
}

/// Measures, prints a table, and writes it and JSON after each part. Returns true if every message
/// arrived exactly once, every migration succeeded, and no figure grew.
///
/// # Errors
/// Fails if hosts cannot be created, the tasks do not communicate, or the results cannot be
/// written.
pub fn bench_soak(settings: &SoakSettings) -> Result<bool> {
    if let Some(lack) = needs::lacks() {
        bail!("bench soak: {lack}");
    }
    needs::engine().context("bench soak: no CRIU; cargo xtask criu gets one")?;
    fs::create_dir_all(&settings.results)
        .with_context(|| settings.results.display().to_string())?;
    let plans: Vec<PartPlan> = [CROWD_PLAN, LONG_PLAN]
        .into_iter()
        .filter(|plan| is_selected(plan, &settings.only))
        .collect();
    ensure!(
        !plans.is_empty(),
        "bench soak: there are the parts {} and {}",
        CROWD_PLAN.name,
        LONG_PLAN.name
    );
    let file = settings.results.join("soak.json");
    let mut results = Results {
        machine: MachineInfo::describe(settings.own_build, 1, settings.quick),
        parts: stored_parts(&file, settings)?,
    };
    let mut good = true;
    for plan in plans {
        let part = run_part(
            settings,
            &if settings.quick {
                quick_plan(plan)
            } else {
                plan
            },
        )?;
        results.parts.retain(|other| other.name != part.name);
        results.parts.push(part);
        results.parts.sort_by_key(|part| part.moves);
        results.machine.update_load();
        let (text, met) = table(&results.parts);
        fs::write(
            settings.results.join("soak.txt"),
            format!("{}{text}", results.machine.text()),
        )?;
        fs::write(&file, serde_json::to_string_pretty(&results)? + "\n")?;
        println!("{text}");
        good = met;
    }
    println!("written: {}", settings.results.display());
    Ok(good)
}

fn is_selected(plan: &PartPlan, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|name| name == plan.name)
}

/// Reads the stored parts, if only some parts are measured.
fn stored_parts(file: &Path, how: &SoakSettings) -> Result<Vec<Part>> {
    #[derive(Deserialize)]
    struct Before {
        parts: Vec<Part>,
    }
    if how.only.is_empty() || !file.exists() {
        return Ok(Vec::new());
    }
    let before: Before =
        serde_json::from_slice(&fs::read(file)?).with_context(|| file.display().to_string())?;
    Ok(before.parts)
}

fn quick_plan(plan: PartPlan) -> PartPlan {
    const FEW: [(usize, usize); 2] = [(1, 6), (3, 2)];
    PartPlan {
        rounds: &FEW,
        round_repetitions: if plan.checkpoint_interval.is_some() {
            8
        } else {
            1
        },
        sample_interval: 6,
        initial_migrations: 0,
        ..plan
    }
}

fn run_part(how: &SoakSettings, plan: &PartPlan) -> Result<Part> {
    // With the default size the logs would grow for longer than the run.
    let short_logs = ("PVMDLOGMAX", "3500");
    let bed = Testbed::with_env(plan.hosts, Some(&how.prefix), &[short_logs])?;
    let env = vec![(short_logs.0.to_string(), short_logs.1.to_string())];
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some("pvm-rm".into()),
            env,
            ..Settings::default()
        },
    )?;
    let names: Vec<&str> = bed.hosts().iter().map(|host| host.name()).collect();
    vm.add(&names[1..])?;
    if !how.quick {
        fill_records(&vm)?;
    }
    let job = plan
        .checkpoint_interval
        .map(|every| checkpointed_job(&vm, every))
        .transpose()?;
    let measured = measure(&vm, plan, &names).inspect_err(|_| eprintln!("{}", vm.logs()))?;
    if let Some(job_file) = job {
        ensure!(
            vm.host_of(&job_file).is_ok(),
            "the job with checkpoints has ended"
        );
    }
    vm.halt()?;
    Ok(measured)
}

/// Runs short tasks until the event log and the resource manager's decisions have discarded their
/// first entries.
fn fill_records(vm: &Vm<'_>) -> Result<()> {
    let mut command = vm.command(vm.bed().host(1), vm.program("brief")?);
    command.args([SHORT_TASKS, SHORT_TASKS_CONCURRENT].map(|number| number.to_string()));
    let begin = Instant::now();
    must(command, SHORT_TASKS_TIMEOUT)?;
    let oldest = vm.events()?.first().map_or(0, |entry| entry.number);
    ensure!(
        oldest > 1,
        "the event log is not full after {SHORT_TASKS} short tasks"
    );
    eprintln!(
        "bench soak: {SHORT_TASKS} short tasks in {:.0} s",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Starts a job with periodic checkpoints in addition to the migrating tasks. It ends with the
/// virtual machine.
fn checkpointed_job(vm: &Vm<'_>, every: &str) -> Result<String> {
    vm.program("ring_job")?;
    let folder = vm.home().join("ring");
    fs::create_dir_all(&folder)?;
    let tid = vm.spawn(&[
        "-h1",
        "ring_job",
        "2",
        "100000000",
        "20000",
        &folder.display().to_string(),
    ])?;
    vm.pvm(&["checkpoint", "--every", every, &tid])?
        .expect_good("checkpoint")?;
    Ok(tid)
}

fn measure(vm: &Vm<'_>, plan: &PartPlan, hosts: &[&str]) -> Result<Part> {
    let options: &[&str] = if plan.returns_memory { &["-g"] } else { &[] };
    let mut crowd = Crowd::start(vm, plan.tasks, plan.neighbors, options, hosts)?;
    let mut rng = Rng::new(61);
    (0..plan.initial_migrations * plan.tasks)
        .try_for_each(|nth| crowd.move_to_another(vm, &mut rng, nth % plan.tasks))?;
    let (begin, before) = (Instant::now(), last_event(vm, 0)?);
    let (mut moves, mut looked, mut samples, mut sampling_time) =
        (0, 0, Vec::new(), Duration::ZERO);
    let mut last = before;
    for (at_once, often) in std::iter::repeat_n(plan.rounds, plan.round_repetitions).flatten() {
        for _ in 0..*often {
            crowd.move_some(vm, &mut rng, *at_once)?;
            moves += at_once;
            if moves >= looked + plan.sample_interval {
                looked = moves;
                let since = Instant::now();
                samples.push(take_sample(vm, moves, begin));
                sampling_time += since.elapsed();
                print_progress(plan, samples.last());
                ensure!(crowd.goes_on()?, "the director has ended");
                last = last_event(vm, last)?;
            }
        }
    }
    crowd.all_in_place(vm)?;
    let seconds = (begin.elapsed() - sampling_time).as_secs_f64();
    ensure!(
        last - before < EVENTS_MAX as u64,
        "the event log has discarded entries: they cannot be counted any more"
    );
    let log = vm.events_from(before + 1)?;
    let of = |is_it: fn(&EventKind) -> bool| log.iter().filter(|entry| is_it(&entry.kind)).count();
    let Account {
        checked,
        lost,
        doubled,
        disordered,
        damaged,
    } = crowd.finish()?;
    Ok(Part {
        name: plan.name.to_string(),
        tasks: plan.tasks,
        hosts: plan.hosts,
        moves,
        failed_moves: of(|kind| matches!(kind, EventKind::MigrationFailed { .. })),
        seconds,
        checked,
        lost,
        doubled,
        disordered,
        damaged,
        events_per_100_moves: 100.0 * (last - before) as f64 / moves as f64,
        checkpoints: of(|kind| matches!(kind, EventKind::Checkpointed { .. })),
        trends: trends(&samples, moves),
        looks: samples,
    })
}

fn print_progress(plan: &PartPlan, look: Option<&ResourceSample>) {
    let Some(look) = look else { return };
    let memory = look
        .figures
        .iter()
        .filter(|(name, _)| name.ends_with("memory KiB"));
    let memory: Vec<String> = memory.map(|(name, kib)| format!("{name} {kib}")).collect();
    eprintln!(
        "bench soak: {}: {} moves, {:.0} s; {}",
        plan.name,
        look.moves,
        look.seconds,
        memory.join(", ")
    );
}

/// Returns the number of the newest entry in the event log, which is at least `known`.
fn last_event(vm: &Vm<'_>, known: u64) -> Result<u64> {
    Ok(vm
        .events_from(known)?
        .last()
        .map_or(known, |entry| entry.number))
}

fn take_sample(vm: &Vm<'_>, moves: usize, begin: Instant) -> ResourceSample {
    sleep(SETTLE_DELAY);
    let mut figures = Footprint::of(vm).figures();
    for _ in 1..READINGS_PER_SAMPLE {
        sleep(READING_INTERVAL);
        let now = Footprint::of(vm).figures();
        figures
            .iter_mut()
            .zip(now)
            .for_each(|((_, least), (_, value))| *least = value.min(*least));
    }
    ResourceSample {
        moves,
        seconds: begin.elapsed().as_secs_f64(),
        figures,
    }
}

/// Computes the regression line of each figure after the warm-up.
fn trends(samples: &[ResourceSample], moves: usize) -> Vec<Trend> {
    let warm = moves as f64 * WARM_UP_PART;
    let counted: Vec<&ResourceSample> = samples
        .iter()
        .filter(|look| look.moves as f64 >= warm)
        .collect();
    let Some(first) = counted.first() else {
        return Vec::new();
    };
    let names = first.figures.iter().map(|(name, _)| name);
    let trend = |(i, name): (usize, &String)| {
        let points: Vec<(f64, f64)> = counted
            .iter()
            .map(|l| (l.moves as f64, l.figures[i].1 as f64))
            .collect();
        let RegressionLine {
            mean,
            slope,
            deviation,
        } = RegressionLine::fit(&points);
        let span = points.last().map_or(0.0, |last| last.0) - points[0].0;
        let rise = slope * span;
        let last = counted.last().map_or(0, |l| l.figures[i].1);
        let kept_up_to = limit_of(name);
        Trend {
            figure: name.clone(),
            first: first.figures[i].1,
            last,
            mean,
            per_100_moves: slope * 100.0,
            deviation,
            flat: match kept_up_to {
                Some(limit) => last <= limit,
                None => rise <= (DEVIATIONS * deviation).max(FLAT_PART * mean),
            },
        }
    };
    names.enumerate().map(trend).collect()
}

fn limit_of(figure: &str) -> Option<u64> {
    BOUNDED_FIGURES
        .iter()
        .find(|(name, _)| *name == figure)
        .map(|(_, limit)| *limit)
}

/// A least-squares regression line.
struct RegressionLine {
    mean: f64,
    slope: f64,
    deviation: f64,
}

impl RegressionLine {
    fn fit(points: &[(f64, f64)]) -> RegressionLine {
        let count = points.len() as f64;
        // Divides at the end, so that the mean of equal numbers is exactly that number.
        let (x, y) = points
            .iter()
            .fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        let (x, y) = (x / count, y / count);
        let across: f64 = points
            .iter()
            .map(|point| (point.0 - x) * (point.0 - x))
            .sum();
        let both: f64 = points
            .iter()
            .map(|point| (point.0 - x) * (point.1 - y))
            .sum();
        let slope = if across > 0.0 { both / across } else { 0.0 };
        let square: f64 = points
            .iter()
            .map(|point| (point.1 - y - slope * (point.0 - x)).powi(2))
            .sum();
        RegressionLine {
            mean: y,
            slope,
            deviation: (square / count).sqrt(),
        }
    }
}

/// Returns the table, and whether no message was lost and no figure grew.
fn table(parts: &[Part]) -> (String, bool) {
    let (mut text, mut good) = (String::new(), true);
    for part in parts {
        let faults = part.lost + part.doubled + part.disordered + part.damaged;
        good &= faults == 0 && part.checked > 0 && part.failed_moves == 0;
        text.push_str(&format!(
            "\n{}: {} tasks on {} hosts, {} moves in {:.0} s, {} of them failed\n\
             messages: {} checked, {} lost, {} doubled, {} out of order, {} damaged\n\
             event log: {:.0} entries for 100 moves; checkpoints of a job beside it: {}\n\
             {:<32} {:>12} {:>12} {:>12} {:>14} {:>12}\n",
            part.name,
            part.tasks,
            part.hosts,
            part.moves,
            part.seconds,
            part.failed_moves,
            part.checked,
            part.lost,
            part.doubled,
            part.disordered,
            part.damaged,
            part.events_per_100_moves,
            part.checkpoints,
            "after the warm-up",
            "first",
            "last",
            "mean",
            "per 100 moves",
            "deviation"
        ));
        for trend in &part.trends {
            good &= trend.flat;
            text.push_str(&format!(
                "{:<32} {:>12} {:>12} {:>12.1} {:>14.2} {:>12.2}{}\n",
                trend.figure,
                trend.first,
                trend.last,
                trend.mean,
                trend.per_100_moves,
                trend.deviation,
                match (limit_of(&trend.figure), trend.flat) {
                    (None, true) => String::new(),
                    (Some(limit), true) => format!("  kept, {limit} at most"),
                    (_, false) => "  grows".to_string(),
                }
            ));
        }
    }
    (text, good)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(value: impl Fn(usize) -> u64) -> Vec<ResourceSample> {
        let look = |i: usize| ResourceSample {
            moves: i * 10,
            seconds: 0.0,
            figures: vec![("x".to_string(), value(i))],
        };
        (1..=20).map(look).collect()
    }

    /// A figure that rises with the migrations grows; one that oscillates is flat.
    #[test]
    fn steady_rise_is_growth_and_oscillation_is_flat() {
        let grows = &trends(&looks(|i| 1000 + 5 * i as u64), 200)[0];
        assert!(
            !grows.flat && (grows.per_100_moves - 50.0).abs() < 1e-6,
            "{grows:?}"
        );
        let flat = &trends(&looks(|i| 1000 + i as u64 % 2 * 300), 200)[0];
        assert!(flat.flat, "{flat:?}");
        let still = &trends(&looks(|_| 7), 200)[0];
        assert!(still.flat && still.deviation == 0.0, "{still:?}");
    }

    /// A figure that is kept on purpose may rise to its limit.
    #[test]
    fn bounded_figure_may_rise_to_limit() {
        let of_records = |value: fn(usize) -> u64| {
            let mut looks = looks(value);
            looks
                .iter_mut()
                .for_each(|look| look.figures[0].0 = RECORDS.to_string());
            trends(&looks, 200).remove(0).flat
        };
        assert!(of_records(|i| 1000 + 5 * i as u64));
        assert!(!of_records(|i| RECORDS_KIB_MAX - 19 + i as u64));
    }

    /// A rise during the warm-up does not count.
    #[test]
    fn rise_during_warm_up_does_not_count() {
        let warm = &trends(&looks(|i| 100 * (i as u64).min(6)), 200)[0];
        assert!(warm.flat && warm.mean == 600.0, "{warm:?}");
    }
}
