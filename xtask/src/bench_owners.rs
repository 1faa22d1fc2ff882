//! `cargo xtask bench owners`: owners log in at random times on hosts on which tablix2 and a farm
//! of tasks compute.
//!
//! Measures how soon the guests stop after a login, by the guests' own clocks and by the kernel's
//! counts of processor time. Checks that the guests migrate for the right reasons, and that the
//! jobs end with correct results.

mod judge;
mod kernels;

use crate::demo::{self, add_hosts, start_search};
use anyhow::{Context, Result, ensure};
use judge::{
    LateHost, LateKernel, LateWorker, OwnersOutcome, RmDecision, ScriptedLogin, WorkerClocks,
};
use kernels::{SamplingThread, now_us};
use sempa_tests::rng::Rng;
use sempa_tests::run::RunningCommand;
use sempa_tests::ssh::SshLogin;
use sempa_tests::testbed::Host;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{Testbed, Vm, requirements};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Number of hosts of the testbed. Owners log in on any of them, including the master's host.
const HOST_COUNT: usize = 4;
/// Number of tasks of the farm. Each task computes without a pause and records the times at which
/// it ran.
const FARM_WORKER_COUNT: usize = 4;
/// Units of work of each farm task per second of the run. A unit takes about 10 ms of processor
/// time, so a farm takes about a twentieth of the run if each of its tasks has a processor of its
/// own.
const UNITS_PER_SECOND: u64 = 5;
/// Maximum number of owners who are logged in at the same time. Guests therefore always have a host
/// to which they can migrate.
const CONCURRENT_LOGINS_MAX: usize = 2;
/// Minimum and maximum duration of a login, in milliseconds.
const LOGIN_DURATION_RANGE_MS: (usize, usize) = (3_000, 15_000);
/// Minimum and maximum time between two logins, in milliseconds.
const LOGIN_INTERVAL_RANGE_MS: (usize, usize) = (1_000, 6_000);
/// Time limit for each condition that the benchmark waits for.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for tablix2 and the farm to end after the last logout.
const JOBS_END_TIMEOUT: Duration = Duration::from_secs(900);

/// Runs the benchmark for `minutes` minutes. Writes JSON to the folder `results_folder`. Returns
/// false if a check fails.
///
/// # Errors
/// A step cannot be performed.
pub(crate) fn run(prefix: &Path, minutes: u64, results_folder: &Path) -> Result<bool> {
    if let Some(missing_requirement) = requirements::unmet_requirement() {
        anyhow::bail!("bench owners: {missing_requirement}");
    }
    let testbed = Testbed::new(HOST_COUNT, Some(prefix), &[])?;
    let vm = Vm::start(
        &testbed,
        VmSettings {
            rm_command: Some("pvm-rm --policy load".to_string()),
            ..VmSettings::default()
        },
    )?;
    let outcome = run_logins(&vm, Duration::from_secs(60 * minutes))
        .inspect_err(|_| eprintln!("{}", vm.events_and_logs()))?;
    vm.halt_and_wait()?;
    print_outcome(&outcome);
    fs::create_dir_all(results_folder)?;
    let json_path = results_folder.join("owners.json");
    fs::write(&json_path, serde_json::to_vec_pretty(&outcome)?)
        .with_context(|| json_path.display().to_string())?;
    print_progress(&format!("the same as JSON: {}", json_path.display()));
    Ok(outcome.good)
}

fn run_logins(vm: &Vm, duration: Duration) -> Result<OwnersOutcome> {
    let host_names = add_hosts(vm, print_progress)?;
    vm.compile_program("busy")?;
    let index_of = |host: &Host| {
        host_names
            .iter()
            .find(|(_, name)| **name == host.name())
            .map(|(index, _)| *index)
    };
    let hosts: Vec<(u16, &Host)> = vm
        .testbed()
        .hosts()
        .iter()
        .filter_map(|host| Some((index_of(host)?, host)))
        .collect();
    ensure!(
        hosts.len() == HOST_COUNT,
        "not all hosts are in the virtual machine: {host_names:?}"
    );
    let sampling_thread = SamplingThread::start(&hosts, demo::KERNEL_PROGRAM)?;
    let (mut outcome, mut events, mut finished_logins) =
        (OwnersOutcome::default(), BTreeMap::new(), Vec::new());
    let start = Instant::now();
    let mut jobs = Jobs::start(vm, duration)?;
    let (mut rng, mut active_logins) = (Rng::new(1), BTreeMap::new());
    while start.elapsed() < duration {
        sleep_random(&mut rng, LOGIN_INTERVAL_RANGE_MS);
        log_out_expired(&mut active_logins, &mut finished_logins, |logout_at| {
            logout_at <= Instant::now()
        })?;
        let (index, host) = hosts[rng.next_below(HOST_COUNT)];
        if active_logins.len() < CONCURRENT_LOGINS_MAX && !active_logins.contains_key(&index) {
            let (login_duration, login_time_us) =
                (random_duration(&mut rng, LOGIN_DURATION_RANGE_MS), now_us());
            let login = SshLogin::log_in(vm.testbed(), "olga", host)?;
            active_logins.insert(
                index,
                ActiveLogin {
                    logout_at: Instant::now() + login_duration,
                    login_at_us: login_time_us,
                    login,
                },
            );
            outcome.visits += 1;
        }
        jobs.restart_ended_jobs(vm, &mut outcome)?;
        // The event log is bounded, so new events are read before they can be overwritten.
        read_new_events(vm, &mut events)?;
    }
    log_out_expired(&mut active_logins, &mut finished_logins, |_| true)?;
    print_progress("everybody has left; waiting for tablix2 and the farm to end by themselves");
    let clocks = jobs.wait_and_check(vm, &mut outcome)?;
    outcome.seconds = start.elapsed().as_secs();
    read_new_events(vm, &mut events)?;
    let (events, kernel_samples) = (
        events.into_values().collect::<Vec<EventEntry>>(),
        sampling_thread.stop_and_wait()?,
    );
    let decisions = host_names
        .into_iter()
        .map(|(index, name)| Ok((index, (name.clone(), query_decisions(vm, &name)?))));
    outcome.evaluate_run(
        &events,
        &finished_logins,
        &decisions.collect::<Result<_>>()?,
        &clocks,
        &kernel_samples,
    );
    Ok(outcome)
}

/// A running tablix2 and a running farm. Each of the two jobs is started again when it has ended.
struct Jobs {
    search: RunningCommand,
    farm: RunningCommand,
    units_per_task: u64,
    clocks: WorkerClocks,
}

impl Jobs {
    fn start(vm: &Vm, run_duration: Duration) -> Result<Self> {
        let units = run_duration.as_secs() * UNITS_PER_SECOND;
        Ok(Self {
            search: start_search(vm, print_progress)?,
            farm: start_farm(vm, units)?,
            units_per_task: units,
            clocks: WorkerClocks::new(),
        })
    }

    /// Checks the results of the jobs that have ended, and starts new runs of these jobs.
    fn restart_ended_jobs(&mut self, vm: &Vm, outcome: &mut OwnersOutcome) -> Result<()> {
        if self.search.poll_status()?.is_some() {
            let ended_job = std::mem::replace(&mut self.search, start_search(vm, print_progress)?);
            wait_for_search(vm, ended_job, WAIT_TIMEOUT, outcome);
        }
        if self.farm.poll_status()?.is_some() {
            let ended_job = std::mem::replace(&mut self.farm, start_farm(vm, self.units_per_task)?);
            wait_for_farm(ended_job, WAIT_TIMEOUT, outcome, &mut self.clocks);
        }
        Ok(())
    }

    /// Waits until both jobs have ended, and checks their results. Returns the clocks of all
    /// workers.
    fn wait_and_check(mut self, vm: &Vm, outcome: &mut OwnersOutcome) -> Result<WorkerClocks> {
        wait_for_search(vm, self.search, JOBS_END_TIMEOUT, outcome);
        wait_for_farm(self.farm, JOBS_END_TIMEOUT, outcome, &mut self.clocks);
        Ok(self.clocks)
    }
}

fn start_farm(vm: &Vm, units_per_task: u64) -> Result<RunningCommand> {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/busy"),
    );
    command.args([
        "farm",
        &FARM_WORKER_COUNT.to_string(),
        &units_per_task.to_string(),
    ]);
    RunningCommand::start(command, Stdio::null())
}

/// Waits until tablix2 has ended, and checks its timetables. Adds the number of correct timetables,
/// or an error, to `outcome`.
fn wait_for_search(
    vm: &Vm,
    search: RunningCommand,
    timeout: Duration,
    outcome: &mut OwnersOutcome,
) {
    let search_result = search.wait_or_kill(timeout).and_then(|command_result| {
        command_result.expect_success("tablix2")?;
        demo::read_solutions(vm)
    });
    outcome.searches += 1;
    match search_result {
        Ok(solutions) => {
            outcome.timetables += solutions.len();
            outcome.reasons.extend(demo::solution_error(&solutions));
        }
        Err(error) => outcome.reasons.push(format!("tablix2: {error:#}")),
    }
}

/// Waits until a farm has ended, and checks the result of each task. Adds the number of correct
/// results, or an error, to `outcome`, and the clocks of the tasks to `clocks`.
fn wait_for_farm(
    farm: RunningCommand,
    timeout: Duration,
    outcome: &mut OwnersOutcome,
    clocks: &mut WorkerClocks,
) {
    outcome.farms += 1;
    match farm
        .wait_or_kill(timeout)
        .and_then(|command_result| command_result.expect_success("the farm"))
    {
        Ok(command_result) => match read_farm(&command_result.stdout, clocks) {
            correct_count if correct_count == FARM_WORKER_COUNT => outcome.results += correct_count,
            correct_count => outcome.reasons.push(format!(
                "{correct_count} of {FARM_WORKER_COUNT} tasks of a farm had the right result: {}",
                command_result.stdout
            )),
        },
        Err(error) => outcome.reasons.push(format!("{error:#}")),
    }
}

/// Returns the number of correct results in a farm's output. Adds the clocks of the farm's tasks to
/// `clocks`.
fn read_farm(farm_output: &str, clocks: &mut WorkerClocks) -> usize {
    let parse_gap =
        |start: &str, end: &str| Some((start.parse::<u64>().ok()?, end.parse::<u64>().ok()?));
    let mut correct_count = 0;
    for line in farm_output.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["spawned", tid] => drop(clocks.entry(tid.to_string()).or_default()),
            ["watched", tid, start, end] => {
                let clock = clocks.entry(tid.to_string()).or_default();
                (clock.first_reading_us, clock.last_reading_us) =
                    parse_gap(start, end).unwrap_or_default();
            }
            ["gap", tid, start, end] => clocks
                .entry(tid.to_string())
                .or_default()
                .gaps_us
                .extend(parse_gap(start, end)),
            ["task", _, "right"] => correct_count += 1,
            _ => {}
        }
    }
    correct_count
}

fn print_progress(line: &str) {
    eprintln!("bench owners: {line}");
}

fn random_duration(rng: &mut Rng, (min_ms, max_ms): (usize, usize)) -> Duration {
    Duration::from_millis((min_ms + rng.next_below(max_ms - min_ms)) as u64)
}

fn sleep_random(rng: &mut Rng, range_ms: (usize, usize)) {
    std::thread::sleep(random_duration(rng, range_ms));
}

/// A login that the benchmark has not ended yet.
struct ActiveLogin {
    logout_at: Instant,
    /// Time just before the login, in microseconds since 1970.
    login_at_us: u64,
    login: SshLogin,
}

/// Logs out the owners whose time of logout satisfies `is_over`, and adds their logins to
/// `finished_logins`.
fn log_out_expired(
    active_logins: &mut BTreeMap<u16, ActiveLogin>,
    finished_logins: &mut Vec<ScriptedLogin>,
    is_over: impl Fn(Instant) -> bool,
) -> Result<()> {
    let expired_hosts: Vec<u16> = active_logins
        .iter()
        .filter(|(_, active_logins)| is_over(active_logins.logout_at))
        .map(|(host, _)| *host)
        .collect();
    for host in expired_hosts {
        if let Some(ActiveLogin {
            login_at_us: from,
            login,
            ..
        }) = active_logins.remove(&host)
        {
            login.log_out()?;
            finished_logins.push(ScriptedLogin {
                host_index: host,
                login_at_us: from,
                logout_at_us: now_us(),
            });
        }
    }
    Ok(())
}

fn read_new_events(vm: &Vm, events: &mut BTreeMap<u64, EventEntry>) -> Result<()> {
    events.extend(vm.events()?.into_iter().map(|entry| (entry.number, entry)));
    Ok(())
}

/// Returns all decisions about a host that the resource manager has recorded.
fn query_decisions(vm: &Vm, host: &str) -> Result<Vec<RmDecision>> {
    let mut why_output = vm
        .pvm_json(&["why", host])?
        .pop()
        .context("why prints one value")?;
    Ok(serde_json::from_value(why_output["decisions"].take())?)
}

fn print_outcome(outcome: &OwnersOutcome) {
    let format_ms =
        |us: Option<&u64>| us.map_or("-".to_string(), |us| format!("{:.1}", *us as f64 / 1e3));
    let print_row = |description: &str, sorted_times_us: &[u64]| {
        let percentile = |percent: usize| {
            format_ms(
                sorted_times_us.get(
                    (sorted_times_us.len() * percent / 100)
                        .min(sorted_times_us.len().saturating_sub(1)),
                ),
            )
        };
        println!(
            "{description:48} {:>6} {:>8} {:>8} {:>8}",
            sorted_times_us.len(),
            percentile(50),
            percentile(99),
            format_ms(sorted_times_us.last())
        );
    };
    println!(
        "{} visits in {} s; {} migrations, {} more failed; tablix2 finished {} times with {} timetables, the farm {} times \
         with {} right results",
        outcome.visits,
        outcome.seconds,
        outcome.moves,
        outcome.failed_moves,
        outcome.searches,
        outcome.timetables,
        outcome.farms,
        outcome.results
    );
    println!(
        "{:48} {:>6} {:>8} {:>8} {:>8}",
        "milliseconds after the login record", "times", "median", "99 %", "worst"
    );
    print_row("its load watcher knows", &outcome.seen_us);
    print_row(
        "all guests are paused, after its directive",
        &outcome.held_us,
    );
    print_row(
        "a worker runs no more, by its own clock",
        &outcome.stood_still_us,
    );
    print_row(
        "a kernel of tablix2 got so much after 50 ms",
        &outcome.kernels_got_us,
    );
    print_row("and its dump, inside of it", &outcome.dumps_got_us);
    print_row("and the kernel, to end it", &outcome.ends_got_us);
    print_row("no guest is left on the host", &outcome.clean_us);
    print_row("the same where there was one", &outcome.cleared_us);
    print_row(
        "the same where a guest had nowhere to go",
        &outcome.nowhere_us,
    );
    if outcome.workers_skipped + outcome.kernels_skipped > 0 {
        println!(
            "not judged: {} workers, {} kernels",
            outcome.workers_skipped, outcome.kernels_skipped
        );
    }
    print_exceeded_limits(outcome);
    println!(
        "load: {}",
        fs::read_to_string("/proc/loadavg")
            .unwrap_or_default()
            .trim()
    );
    for reason in &outcome.reasons {
        println!("NOT GOOD: {reason}");
    }
}

/// Prints each host, worker and kernel that exceeded its limit, with the events of the visit.
fn print_exceeded_limits(outcome: &OwnersOutcome) {
    for LateHost {
        host,
        clean_us,
        promised_us,
        story,
    } in &outcome.late
    {
        println!(
            "{host} was clean after {:.1} ms, promised {:.1}:",
            *clean_us as f64 / 1e3,
            *promised_us as f64 / 1e3
        );
        story.iter().for_each(|line| println!("    {line}"));
    }
    for LateWorker {
        worker,
        ran_us,
        story,
    } in &outcome.ran_on
    {
        println!("{worker} ran for {:.1} ms:", *ran_us as f64 / 1e3);
        story.iter().for_each(|line| println!("    {line}"));
    }
    for LateKernel { pid, got_us, story } in &outcome.got_on {
        println!(
            "process {pid} of tablix2 got the processor for {:.1} ms:",
            *got_us as f64 / 1e3
        );
        story.iter().for_each(|line| println!("    {line}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker's record contains its gaps, the times in which it did not run.
    #[test]
    fn farm_output_has_results_and_gaps() {
        let mut clocks = WorkerClocks::new();
        let farm_output = "spawned t40002\nspawned t40003\nwatched t40003 10 400\ngap t40003 100 250\ntask t40003 right\n\
                   watched t40002 12 300\ntask t40002 wrong\nfarm 2\n";
        assert_eq!(read_farm(farm_output, &mut clocks), 1);
        let gaps_of = |tid: &str| {
            (
                clocks[tid].first_reading_us,
                clocks[tid].last_reading_us,
                clocks[tid].gaps_us.clone(),
            )
        };
        assert_eq!(gaps_of("t40003"), (10, 400, vec![(100, 250)]));
        assert_eq!(
            gaps_of("t40002"),
            (12, 300, vec![]),
            "it was never paused, and is a worker all the same"
        );
    }
}
