//! `cargo xtask bench soak`: migrates communicating tasks hundreds of times.
//!
//! Every message is checked. The resources of the virtual machine are sampled regularly. A
//! regression line through the samples of each resource shows whether migrations leak it.

use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::event::{EVENTS_MAX, EventKind};
use sempa_tests::crowd::{Crowd, CrowdReport};
use sempa_tests::footprint::{Footprint, RECORDS_KIB_MAX, RECORDS_KIB_NAME};
use sempa_tests::rng::Rng;
use sempa_tests::run::run_ok;
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, requirements};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The plan of one part of a run.
#[derive(Clone, Copy, Debug)]
struct PartPlan {
    name: &'static str,
    tasks: usize,
    /// Number of neighbors on each side with which a task communicates; 0 means all tasks.
    neighbors: usize,
    hosts: usize,
    /// Number of migrations of each task before the measurement. They cause the one-time costs:
    /// structures that a first migration creates, and copies of memory that a task shared with
    /// others of its program.
    initial_migrations: usize,
    /// True if tasks return the memory of large messages to the kernel at once. Otherwise the C
    /// library's caches of many tasks would need hours to fill.
    returns_memory: bool,
    /// The migrations as (concurrent migrations, repetitions), in this order.
    rounds: &'static [(usize, usize)],
    /// Number of times the whole list `rounds` is executed.
    round_repetitions: usize,
    /// Number of migrations between two samples of the resources.
    sample_interval: usize,
    /// Checkpoint interval of a job that runs at the same time; `None` if there is no such job.
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

/// Number of short tasks that run first. They fill the event log and the resource manager's record
/// of decisions, as in a virtual machine that has run for a long time. New entries then replace old
/// ones instead of increasing the memory.
const SHORT_TASKS: usize = 22_000;
/// Number of short tasks that run at the same time.
const SHORT_TASKS_CONCURRENT_MAX: usize = 40;
/// Time limit for all short tasks.
const SHORT_TASKS_TIMEOUT: Duration = Duration::from_secs(600);
/// Time without migrations before each sample, because daemons return unused memory only every five
/// seconds.
const SETTLE_DELAY: Duration = Duration::from_secs(6);
/// Number of readings per sample. A sample takes the minimum of its readings, so that temporary
/// needs of messages and checkpoints do not count.
const READINGS_PER_SAMPLE: u32 = 13;
/// Interval between two readings of a sample.
const READING_INTERVAL: Duration = Duration::from_millis(500);
/// Fraction of the migrations that are warm-up. Samples during the warm-up do not count, because
/// structures that are created once may still grow.
const WARM_UP_FRACTION: f64 = 0.3;
/// A figure is flat if its regression line rises, over all counted migrations, by at most this
/// fraction of the figure's mean. A rise within [`FLAT_DEVIATIONS`] is also accepted.
const FLAT_RISE_FRACTION: f64 = 0.02;
/// A figure is also flat if its regression line rises by at most this number of standard deviations
/// from the line.
const FLAT_DEVIATIONS: f64 = 3.0;

/// Figures that may grow up to a limit, as (name, limit).
const BOUNDED_FIGURES: [(&str, u64); 1] = [(RECORDS_KIB_NAME, RECORDS_KIB_MAX)];

/// Settings of `bench soak`.
#[derive(Clone, Debug)]
pub struct SoakSettings {
    /// Folder in which our programs are installed.
    pub prefix: PathBuf,
    /// True if the programs were built from these sources for this run.
    pub own_build: bool,
    /// Runs about a tenth of the migrations.
    pub quick: bool,
    /// Names of the parts to run; the stored results of the others are retained. If empty, all
    /// parts are run.
    pub only: Vec<String>,
    /// Folder to which the table and the JSON file are written.
    pub results: PathBuf,
}

/// The resources after `moves` migrations.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ResourceSample {
    moves: usize,
    seconds: f64,
    figures: Vec<(String, u64)>,
}

/// The regression line of one figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trend {
    figure: String,
    /// First value of the figure after the warm-up.
    first: u64,
    /// Last value of the figure.
    last: u64,
    mean: f64,
    /// Slope of the regression line per 100 migrations.
    per_100_moves: f64,
    /// Standard deviation of the values from the regression line.
    deviation: f64,
    /// True if the figure is flat. For a figure in [`BOUNDED_FIGURES`]: true if its last value is
    /// within the limit.
    flat: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct PartResult {
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
    /// Number of new entries in the event log per 100 migrations. The log keeps 65,536 entries.
    events_per_100_moves: f64,
    checkpoints: usize,
    trends: Vec<Trend>,
    looks: Vec<ResourceSample>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: MachineInfo,
    parts: Vec<PartResult>,
}

/// Runs the measurement and prints a table. Writes the table and JSON after each part. Returns true
/// if every message arrived exactly once, every migration succeeded, and no figure grew.
pub fn bench_soak(settings: &SoakSettings) -> Result<bool> {
    if let Some(lack) = requirements::lacks() {
        bail!("bench soak: {lack}");
    }
    requirements::engine().context("bench soak: no CRIU; cargo xtask criu gets one")?;
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

/// Reads the results of an earlier run, for the parts that this run does not measure.
fn stored_parts(file: &Path, how: &SoakSettings) -> Result<Vec<PartResult>> {
    #[derive(Deserialize)]
    struct Before {
        parts: Vec<PartResult>,
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

fn run_part(how: &SoakSettings, plan: &PartPlan) -> Result<PartResult> {
    // With logs of the default size, the logs would still grow at the end of the run.
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

/// Runs short tasks until the event log and the resource manager's record of decisions have
/// discarded their first entries.
fn fill_records(vm: &Vm<'_>) -> Result<()> {
    let mut command = vm.command(vm.bed().host(1), vm.compile_program("brief")?);
    command.args([SHORT_TASKS, SHORT_TASKS_CONCURRENT_MAX].map(|number| number.to_string()));
    let begin = Instant::now();
    run_ok(command, SHORT_TASKS_TIMEOUT)?;
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

/// Starts a job with periodic checkpoints, which runs in addition to the migrating tasks and ends
/// with the virtual machine. Returns the tid of its first task.
fn checkpointed_job(vm: &Vm<'_>, every: &str) -> Result<String> {
    vm.compile_program("ring_job")?;
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
        .expect_success("checkpoint")?;
    Ok(tid)
}

fn measure(vm: &Vm<'_>, plan: &PartPlan, hosts: &[&str]) -> Result<PartResult> {
    let options: &[&str] = if plan.returns_memory { &["-g"] } else { &[] };
    let mut crowd = Crowd::start(vm, plan.tasks, plan.neighbors, options, hosts)?;
    let mut rng = Rng::new(61);
    (0..plan.initial_migrations * plan.tasks)
        .try_for_each(|nth| crowd.migrate_to_other_host(vm, &mut rng, nth % plan.tasks))?;
    let (begin, before) = (Instant::now(), last_event(vm, 0)?);
    let (mut moves, mut looked, mut samples, mut sampling_time) =
        (0, 0, Vec::new(), Duration::ZERO);
    let mut last = before;
    for (at_once, often) in std::iter::repeat_n(plan.rounds, plan.round_repetitions).flatten() {
        for _ in 0..*often {
            crowd.migrate_random(vm, &mut rng, *at_once)?;
            moves += at_once;
            if moves >= looked + plan.sample_interval {
                looked = moves;
                let since = Instant::now();
                samples.push(take_sample(vm, moves, begin));
                sampling_time += since.elapsed();
                print_progress(plan, samples.last());
                ensure!(crowd.director_runs()?, "the director has ended");
                last = last_event(vm, last)?;
            }
        }
    }
    crowd.check_hosts(vm)?;
    let seconds = (begin.elapsed() - sampling_time).as_secs_f64();
    ensure!(
        last - before < EVENTS_MAX as u64,
        "the event log has thrown entries away: they cannot be counted any more"
    );
    let log = vm.events_from(before + 1)?;
    let of = |is_it: fn(&EventKind) -> bool| log.iter().filter(|entry| is_it(&entry.kind)).count();
    let CrowdReport {
        checked,
        lost,
        doubled,
        disordered,
        damaged,
    } = crowd.finish()?;
    Ok(PartResult {
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

/// Returns the number of the newest entry in the event log. `known` is the number of an earlier
/// entry.
fn last_event(vm: &Vm<'_>, known: u64) -> Result<u64> {
    Ok(vm
        .events_from(known)?
        .last()
        .map_or(known, |entry| entry.number))
}

fn take_sample(vm: &Vm<'_>, moves: usize, begin: Instant) -> ResourceSample {
    sleep(SETTLE_DELAY);
    let mut figures = Footprint::measure(vm).figures();
    for _ in 1..READINGS_PER_SAMPLE {
        sleep(READING_INTERVAL);
        let now = Footprint::measure(vm).figures();
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

/// Computes the regression line of each figure from the samples after the warm-up. `moves` is the
/// number of all migrations.
fn trends(samples: &[ResourceSample], moves: usize) -> Vec<Trend> {
    let warm = moves as f64 * WARM_UP_FRACTION;
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
        let kept_up_to = figure_limit(name);
        Trend {
            figure: name.clone(),
            first: first.figures[i].1,
            last,
            mean,
            per_100_moves: slope * 100.0,
            deviation,
            flat: match kept_up_to {
                Some(limit) => last <= limit,
                None => rise <= (FLAT_DEVIATIONS * deviation).max(FLAT_RISE_FRACTION * mean),
            },
        }
    };
    names.enumerate().map(trend).collect()
}

fn figure_limit(figure: &str) -> Option<u64> {
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
        // The division is done last, so that the mean of equal numbers is exactly that number.
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

/// Returns the table as text, and true if no message was lost and no figure grew.
fn table(parts: &[PartResult]) -> (String, bool) {
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
                match (figure_limit(&trend.figure), trend.flat) {
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

    /// A figure that rises with the migrations is not flat; one that oscillates is.
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

    /// A figure in [`BOUNDED_FIGURES`] may rise up to its limit.
    #[test]
    fn bounded_figure_may_rise_to_limit() {
        let of_records = |value: fn(usize) -> u64| {
            let mut looks = looks(value);
            looks
                .iter_mut()
                .for_each(|look| look.figures[0].0 = RECORDS_KIB_NAME.to_string());
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
