//! `cargo xtask bench soak`: migrates communicating tasks hundreds of times.
//!
//! Every message is checked. The resources of the virtual machine are sampled regularly. A
//! regression line through the samples of each resource shows whether migrations leak this
//! resource.

use crate::machine_info::MachineInfo;
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::event::{EVENTS_MAX, EventKind};
use sempa_tests::all_to_all::{AllToAllJob, AllToAllReport};
use sempa_tests::footprint::{Footprint, RECORDS_KIB_MAX, RECORDS_KIB_NAME};
use sempa_tests::rng::Rng;
use sempa_tests::run::run_successfully;
use sempa_tests::vm::VmSettings;
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
    task_count: usize,
    /// Number of neighbors on each side with which a task communicates; 0 means that each task
    /// communicates with all tasks.
    neighbor_reach: usize,
    host_count: usize,
    /// Number of migrations of each task before the measurement. These migrations cause the
    /// one-time costs: structures that a first migration creates, and copies of memory pages that a
    /// task shared with other tasks of its program.
    initial_migration_count: usize,
    /// True if tasks return the memory of large messages to the kernel at once. Otherwise the C
    /// library's caches of many tasks would need hours until they are full.
    returns_memory: bool,
    /// The migrations as (number of concurrent migrations, repetitions), in this order.
    migration_rounds: &'static [(usize, usize)],
    /// Number of repetitions of the list `migration_rounds`.
    round_repetition_count: usize,
    /// Number of migrations between two samples of the resources.
    migrations_per_sample: usize,
    /// Checkpoint interval of an additional job; `None` if there is no such job.
    checkpoint_interval: Option<&'static str>,
}

const MANY_TASKS_PLAN: PartPlan = PartPlan {
    name: "tasks",
    task_count: 61,
    neighbor_reach: 2,
    host_count: 8,
    initial_migration_count: 2,
    returns_memory: true,
    migration_rounds: &[(1, 25), (6, 6)],
    round_repetition_count: 2,
    migrations_per_sample: 8,
    checkpoint_interval: None,
};

const MANY_MIGRATIONS_PLAN: PartPlan = PartPlan {
    name: "moves",
    task_count: 6,
    neighbor_reach: 0,
    host_count: 4,
    initial_migration_count: 0,
    returns_memory: false,
    migration_rounds: &[(1, 10), (3, 5)],
    round_repetition_count: 40,
    migrations_per_sample: 50,
    checkpoint_interval: Some("1s"),
};

/// Number of short tasks that run first. These tasks fill the event log and the resource manager's
/// record of decisions, as in a virtual machine that has run for a long time. After that, new
/// entries replace old entries and do not increase the memory.
const SHORT_TASK_COUNT: usize = 22_000;
/// Number of short tasks that run at the same time.
const CONCURRENT_SHORT_TASKS_MAX: usize = 40;
/// Time limit for all short tasks.
const SHORT_TASKS_TIMEOUT: Duration = Duration::from_secs(600);
/// Time without migrations before each sample. This time is longer than five seconds, the interval
/// in which daemons return unused memory.
const SETTLE_DELAY: Duration = Duration::from_secs(6);
/// Number of readings for one sample. A sample contains the minimum of its readings, so that
/// temporary use by messages and checkpoints does not count.
const READINGS_PER_SAMPLE_COUNT: u32 = 13;
/// Interval between two readings of a sample.
const READING_INTERVAL: Duration = Duration::from_millis(500);
/// Fraction of the migrations that are warm-up. Samples during the warm-up do not count, because
/// structures that are created once may grow until its end.
const WARM_UP_FRACTION: f64 = 0.3;
/// A figure is flat if its regression line rises, over all counted migrations, by at most this
/// fraction of the figure's mean. A rise within the limit of [`FLAT_DEVIATIONS_MAX`] is also
/// accepted.
const FLAT_RISE_FRACTION_MAX: f64 = 0.02;
/// A figure is also flat if its regression line rises by at most this number of standard deviations
/// of the values from the line.
const FLAT_DEVIATIONS_MAX: f64 = 3.0;

/// Figures that may grow up to a limit: name and limit.
const BOUNDED_FIGURES: [(&str, u64); 1] = [(RECORDS_KIB_NAME, RECORDS_KIB_MAX)];

/// Programs, length and parts of one run of `bench soak`.
#[derive(Clone, Debug)]
pub struct SoakSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// True if only about a tenth of the migrations are run.
    pub is_quick: bool,
    /// Names of the parts to run; the stored results of the other parts are retained. If no name is
    /// given, all parts are run.
    pub selected_parts: Vec<String>,
    /// Folder to which the table and the JSON file are written.
    pub results_folder: PathBuf,
}

/// The resources in use after `moves` migrations.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ResourceSample {
    moves: usize,
    seconds: f64,
    figures: Vec<(String, u64)>,
}

/// The regression line of one figure, and the result whether the figure is flat.
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
/// if every message arrived exactly once, every migration succeeded, and every figure was flat or
/// within its limit.
pub fn bench_soak(settings: &SoakSettings) -> Result<bool> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench soak: {unmet_requirement}");
    }
    requirements::find_engine().context("bench soak: no CRIU; cargo xtask criu gets one")?;
    fs::create_dir_all(&settings.results_folder)
        .with_context(|| settings.results_folder.display().to_string())?;
    let plans: Vec<PartPlan> = [MANY_TASKS_PLAN, MANY_MIGRATIONS_PLAN]
        .into_iter()
        .filter(|plan| is_selected(plan, &settings.selected_parts))
        .collect();
    ensure!(
        !plans.is_empty(),
        "bench soak: there are the parts {} and {}",
        MANY_TASKS_PLAN.name,
        MANY_MIGRATIONS_PLAN.name
    );
    let results_file = settings.results_folder.join("soak.json");
    let mut results = Results {
        machine: MachineInfo::collect(settings.is_own_build, 1, settings.is_quick),
        parts: stored_parts(&results_file, settings)?,
    };
    let mut meets_goals = true;
    for plan in plans {
        let part = run_part(
            settings,
            &if settings.is_quick {
                shorten_plan(plan)
            } else {
                plan
            },
        )?;
        results.parts.retain(|other| other.name != part.name);
        results.parts.push(part);
        results.parts.sort_by_key(|part| part.moves);
        results.machine.update_load_after();
        let (text, table_meets_goals) = format_table(&results.parts);
        fs::write(
            settings.results_folder.join("soak.txt"),
            format!("{}{text}", results.machine.format()),
        )?;
        fs::write(
            &results_file,
            serde_json::to_string_pretty(&results)? + "\n",
        )?;
        println!("{text}");
        meets_goals = table_meets_goals;
    }
    println!("written: {}", settings.results_folder.display());
    Ok(meets_goals)
}

fn is_selected(plan: &PartPlan, selected_parts: &[String]) -> bool {
    selected_parts.is_empty() || selected_parts.iter().any(|name| name == plan.name)
}

/// Reads the results of an earlier run for the parts that this run does not measure. Returns an
/// empty vector if this run measures all parts or if the file does not exist.
fn stored_parts(file: &Path, settings: &SoakSettings) -> Result<Vec<PartResult>> {
    #[derive(Deserialize)]
    struct StoredResults {
        parts: Vec<PartResult>,
    }
    if settings.selected_parts.is_empty() || !file.exists() {
        return Ok(Vec::new());
    }
    let stored_results: StoredResults =
        serde_json::from_slice(&fs::read(file)?).with_context(|| file.display().to_string())?;
    Ok(stored_results.parts)
}

fn shorten_plan(plan: PartPlan) -> PartPlan {
    const QUICK_ROUNDS: [(usize, usize); 2] = [(1, 6), (3, 2)];
    PartPlan {
        migration_rounds: &QUICK_ROUNDS,
        round_repetition_count: if plan.checkpoint_interval.is_some() {
            8
        } else {
            1
        },
        migrations_per_sample: 6,
        initial_migration_count: 0,
        ..plan
    }
}

fn run_part(settings: &SoakSettings, plan: &PartPlan) -> Result<PartResult> {
    // Logs of the default size would not be full at the end of the run, so a smaller maximum size
    // is set.
    let log_size_variable = ("PVMDLOGMAX", "3500");
    let testbed = Testbed::with_env(
        plan.host_count,
        Some(&settings.prefix),
        &[log_size_variable],
    )?;
    let env = vec![(
        log_size_variable.0.to_string(),
        log_size_variable.1.to_string(),
    )];
    let vm = Vm::start(
        &testbed,
        VmSettings {
            rm_command: Some("pvm-rm".into()),
            env,
            ..VmSettings::default()
        },
    )?;
    let host_names: Vec<&str> = testbed.hosts().iter().map(|host| host.name()).collect();
    vm.add_hosts(&host_names[1..])?;
    if !settings.is_quick {
        fill_event_and_decision_records(&vm)?;
    }
    let job_tid = plan
        .checkpoint_interval
        .map(|interval| start_checkpointed_job(&vm, interval))
        .transpose()?;
    let result = measure_part(&vm, plan, &host_names)
        .inspect_err(|_| eprintln!("{}", vm.events_and_logs()))?;
    if let Some(first_task) = job_tid {
        ensure!(
            vm.host_of(&first_task).is_ok(),
            "the job with checkpoints has ended"
        );
    }
    vm.halt_and_wait()?;
    Ok(result)
}

/// Runs short tasks until the event log and the resource manager's record of decisions are full and
/// have discarded their first entries.
fn fill_event_and_decision_records(vm: &Vm<'_>) -> Result<()> {
    let mut command = vm.user_command(vm.testbed().host(1), vm.compile_program("brief")?);
    command.args([SHORT_TASK_COUNT, CONCURRENT_SHORT_TASKS_MAX].map(|number| number.to_string()));
    let started_at = Instant::now();
    run_successfully(command, SHORT_TASKS_TIMEOUT)?;
    let oldest_number = vm.events()?.first().map_or(0, |entry| entry.number);
    ensure!(
        oldest_number > 1,
        "the event log is not full after {SHORT_TASK_COUNT} short tasks"
    );
    eprintln!(
        "bench soak: {SHORT_TASK_COUNT} short tasks in {:.0} s",
        started_at.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Starts a job with periodic checkpoints. The job runs in addition to the migrating tasks and ends
/// with the virtual machine. Returns the tid of the job's first task.
fn start_checkpointed_job(vm: &Vm<'_>, interval: &str) -> Result<String> {
    vm.compile_program("ring_job")?;
    let folder = vm.user_home().join("ring");
    fs::create_dir_all(&folder)?;
    let tid = vm.spawn_connected(&[
        "-h1",
        "ring_job",
        "2",
        "100000000",
        "20000",
        &folder.display().to_string(),
    ])?;
    vm.run_pvm(&["checkpoint", "--every", interval, &tid])?
        .expect_success("checkpoint")?;
    Ok(tid)
}

fn measure_part(vm: &Vm<'_>, plan: &PartPlan, host_names: &[&str]) -> Result<PartResult> {
    let options: &[&str] = if plan.returns_memory { &["-g"] } else { &[] };
    let mut job = AllToAllJob::start(
        vm,
        plan.task_count,
        plan.neighbor_reach,
        options,
        host_names,
    )?;
    let mut rng = Rng::new(61);
    (0..plan.initial_migration_count * plan.task_count).try_for_each(|repetition| {
        job.migrate_to_other_host(vm, &mut rng, repetition % plan.task_count)
    })?;
    let (started_at, event_number_before) = (Instant::now(), newest_event_number(vm, 0)?);
    let (mut migration_count, mut sampled_migration_count, mut samples, mut sampling_time) =
        (0, 0, Vec::new(), Duration::ZERO);
    let mut newest_number = event_number_before;
    for (concurrent_count, repetition_count) in
        std::iter::repeat_n(plan.migration_rounds, plan.round_repetition_count).flatten()
    {
        for _ in 0..*repetition_count {
            job.migrate_random_workers(vm, &mut rng, *concurrent_count)?;
            migration_count += concurrent_count;
            if migration_count >= sampled_migration_count + plan.migrations_per_sample {
                sampled_migration_count = migration_count;
                let sampling_started_at = Instant::now();
                samples.push(take_sample(vm, migration_count, started_at));
                sampling_time += sampling_started_at.elapsed();
                print_progress(plan, samples.last());
                ensure!(job.is_director_running()?, "the director has ended");
                newest_number = newest_event_number(vm, newest_number)?;
            }
        }
    }
    job.check_worker_hosts(vm)?;
    let seconds = (started_at.elapsed() - sampling_time).as_secs_f64();
    ensure!(
        newest_number - event_number_before < EVENTS_MAX as u64,
        "the event log has discarded entries: they cannot be counted any more"
    );
    let new_events = vm.events_from(event_number_before + 1)?;
    let count_events = |matches_kind: fn(&EventKind) -> bool| {
        new_events
            .iter()
            .filter(|entry| matches_kind(&entry.kind))
            .count()
    };
    let AllToAllReport {
        checked_count: checked,
        lost_count: lost,
        doubled_count: doubled,
        disordered_count: disordered,
        damaged_count: damaged,
    } = job.end_and_report()?;
    Ok(PartResult {
        name: plan.name.to_string(),
        tasks: plan.task_count,
        hosts: plan.host_count,
        moves: migration_count,
        failed_moves: count_events(|kind| matches!(kind, EventKind::MigrationFailed { .. })),
        seconds,
        checked,
        lost,
        doubled,
        disordered,
        damaged,
        events_per_100_moves: 100.0 * (newest_number - event_number_before) as f64
            / migration_count as f64,
        checkpoints: count_events(|kind| matches!(kind, EventKind::Checkpointed { .. })),
        trends: figure_trends(&samples, migration_count),
        looks: samples,
    })
}

fn print_progress(plan: &PartPlan, sample: Option<&ResourceSample>) {
    let Some(sample) = sample else { return };
    let memory_figures = sample
        .figures
        .iter()
        .filter(|(name, _)| name.ends_with("memory KiB"));
    let memory_figures: Vec<String> = memory_figures
        .map(|(name, kib)| format!("{name} {kib}"))
        .collect();
    eprintln!(
        "bench soak: {}: {} moves, {:.0} s; {}",
        plan.name,
        sample.moves,
        sample.seconds,
        memory_figures.join(", ")
    );
}

/// Returns the number of the newest entry in the event log. The search starts at the entry number
/// `earlier_number`, which is returned if no entry is found.
fn newest_event_number(vm: &Vm<'_>, earlier_number: u64) -> Result<u64> {
    Ok(vm
        .events_from(earlier_number)?
        .last()
        .map_or(earlier_number, |entry| entry.number))
}

fn take_sample(vm: &Vm<'_>, migration_count: usize, started_at: Instant) -> ResourceSample {
    sleep(SETTLE_DELAY);
    let mut figures = Footprint::measure(vm).named_values();
    for _ in 1..READINGS_PER_SAMPLE_COUNT {
        sleep(READING_INTERVAL);
        let reading = Footprint::measure(vm).named_values();
        figures
            .iter_mut()
            .zip(reading)
            .for_each(|((_, smallest), (_, value))| *smallest = value.min(*smallest));
    }
    ResourceSample {
        moves: migration_count,
        seconds: started_at.elapsed().as_secs_f64(),
        figures,
    }
}

/// Computes the regression line of each figure from the samples after the warm-up.
/// `migration_count` is the total number of migrations.
fn figure_trends(samples: &[ResourceSample], migration_count: usize) -> Vec<Trend> {
    let warm_up_count = migration_count as f64 * WARM_UP_FRACTION;
    let counted_samples: Vec<&ResourceSample> = samples
        .iter()
        .filter(|sample| sample.moves as f64 >= warm_up_count)
        .collect();
    let Some(first_sample) = counted_samples.first() else {
        return Vec::new();
    };
    let names = first_sample.figures.iter().map(|(name, _)| name);
    let trend_of_figure = |(i, name): (usize, &String)| {
        let points: Vec<(f64, f64)> = counted_samples
            .iter()
            .map(|l| (l.moves as f64, l.figures[i].1 as f64))
            .collect();
        let RegressionLine {
            y_mean: mean,
            slope,
            standard_deviation: deviation,
        } = RegressionLine::fit(&points);
        let migration_span = points.last().map_or(0.0, |last_value| last_value.0) - points[0].0;
        let total_rise = slope * migration_span;
        let last_value = counted_samples.last().map_or(0, |l| l.figures[i].1);
        let value_limit = figure_limit(name);
        Trend {
            figure: name.clone(),
            first: first_sample.figures[i].1,
            last: last_value,
            mean,
            per_100_moves: slope * 100.0,
            deviation,
            flat: match value_limit {
                Some(limit) => last_value <= limit,
                None => {
                    total_rise
                        <= (FLAT_DEVIATIONS_MAX * deviation).max(FLAT_RISE_FRACTION_MAX * mean)
                }
            },
        }
    };
    names.enumerate().map(trend_of_figure).collect()
}

fn figure_limit(figure: &str) -> Option<u64> {
    BOUNDED_FIGURES
        .iter()
        .find(|(name, _)| *name == figure)
        .map(|(_, limit)| *limit)
}

/// A least-squares regression line.
struct RegressionLine {
    y_mean: f64,
    slope: f64,
    standard_deviation: f64,
}

impl RegressionLine {
    fn fit(points: &[(f64, f64)]) -> Self {
        let point_count = points.len() as f64;
        // The division is the last operation, so that the mean of equal numbers is exactly equal to
        // these numbers.
        let (x_mean, y_mean) = points.iter().fold((0.0, 0.0), |(x_mean, y_mean), point| {
            (x_mean + point.0, y_mean + point.1)
        });
        let (x_mean, y_mean) = (x_mean / point_count, y_mean / point_count);
        let x_variance_sum: f64 = points
            .iter()
            .map(|point| (point.0 - x_mean) * (point.0 - x_mean))
            .sum();
        let covariance_sum: f64 = points
            .iter()
            .map(|point| (point.0 - x_mean) * (point.1 - y_mean))
            .sum();
        let slope = if x_variance_sum > 0.0 {
            covariance_sum / x_variance_sum
        } else {
            0.0
        };
        let residual_sum: f64 = points
            .iter()
            .map(|point| (point.1 - y_mean - slope * (point.0 - x_mean)).powi(2))
            .sum();
        Self {
            y_mean,
            slope,
            standard_deviation: (residual_sum / point_count).sqrt(),
        }
    }
}

/// Returns the table as text, and true if every message arrived exactly once, no migration failed,
/// and every figure was flat or within its limit.
fn format_table(parts: &[PartResult]) -> (String, bool) {
    let (mut text, mut meets_goals) = (String::new(), true);
    for part in parts {
        let fault_count = part.lost + part.doubled + part.disordered + part.damaged;
        meets_goals &= fault_count == 0 && part.checked > 0 && part.failed_moves == 0;
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
            meets_goals &= trend.flat;
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
    (text, meets_goals)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_samples(value: impl Fn(usize) -> u64) -> Vec<ResourceSample> {
        let sample = |i: usize| ResourceSample {
            moves: i * 10,
            seconds: 0.0,
            figures: vec![("x".to_string(), value(i))],
        };
        (1..=20).map(sample).collect()
    }

    /// A figure that rises with the migrations is not flat. A figure that oscillates is flat.
    #[test]
    fn steady_rise_is_growth_and_oscillation_is_flat() {
        let rising_trend = &figure_trends(&make_samples(|i| 1000 + 5 * i as u64), 200)[0];
        assert!(
            !rising_trend.flat && (rising_trend.per_100_moves - 50.0).abs() < 1e-6,
            "{rising_trend:?}"
        );
        let oscillating_trend =
            &figure_trends(&make_samples(|i| 1000 + i as u64 % 2 * 300), 200)[0];
        assert!(oscillating_trend.flat, "{oscillating_trend:?}");
        let constant_trend = &figure_trends(&make_samples(|_| 7), 200)[0];
        assert!(
            constant_trend.flat && constant_trend.deviation == 0.0,
            "{constant_trend:?}"
        );
    }

    /// A figure in [`BOUNDED_FIGURES`] may rise to its limit.
    #[test]
    fn bounded_figure_may_rise_to_limit() {
        let is_records_figure_flat = |value: fn(usize) -> u64| {
            let mut samples = make_samples(value);
            samples
                .iter_mut()
                .for_each(|sample| sample.figures[0].0 = RECORDS_KIB_NAME.to_string());
            figure_trends(&samples, 200).remove(0).flat
        };
        assert!(is_records_figure_flat(|i| 1000 + 5 * i as u64));
        assert!(!is_records_figure_flat(|i| RECORDS_KIB_MAX - 19 + i as u64));
    }

    #[test]
    fn rise_during_warm_up_does_not_count() {
        let trend = &figure_trends(&make_samples(|i| 100 * (i as u64).min(6)), 200)[0];
        assert!(trend.flat && trend.mean == 600.0, "{trend:?}");
    }
}
