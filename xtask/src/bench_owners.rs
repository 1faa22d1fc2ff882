//! `cargo xtask bench owners`: owners log in at random times on hosts on which tablix2 and a farm
//! of tasks compute.
//!
//! Measures how soon the guests stop after a login, by the guests' own clocks and by the kernel's
//! counts of processor time. Checks to which hosts the guests migrate, and that the jobs end with
//! correct results.

mod judge;
mod kernels;

use crate::demo::{self, add_hosts, start_search};
use anyhow::{Context, Result, ensure};
use judge::{Clocks, Decision, LateHost, LateKernel, LateWorker, Outcome, ScriptedLogin};
use kernels::{SamplingThread, now_us};
use sempa_tests::rng::Rng;
use sempa_tests::run::RunningCommand;
use sempa_tests::ssh::Login;
use sempa_tests::testbed::Host;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{Testbed, Vm, requirements};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Number of hosts of the testbed. Owners log in on any of them, including the master's host.
const HOSTS: usize = 4;
/// Number of tasks of the farm. Each computes all the time and records when it ran.
const FARM_WORKERS: usize = 4;
/// Units of work of each task per second of the run. A unit takes about 10 ms of processor time.
/// With [`FARM_WORKERS`] tasks on as many processors, a farm takes a third of the run.
const UNITS_PER_SECOND: u64 = 5;
/// Maximum number of owners who are logged in at the same time, so that guests always have a host
/// to which they can migrate.
const CONCURRENT_LOGINS_MAX: usize = 2;
/// Minimum and maximum duration of a login, in milliseconds.
const LOGIN_DURATION_MS: (usize, usize) = (3_000, 15_000);
/// Minimum and maximum time between two logins, in milliseconds.
const LOGIN_INTERVAL_MS: (usize, usize) = (1_000, 6_000);
/// Time limit for each condition that the benchmark waits for.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for tablix2 and the farm to end after the last logout.
const JOBS_END_TIMEOUT: Duration = Duration::from_secs(900);

/// Runs the benchmark for `minutes` minutes. Writes JSON to the folder `results`. Returns false if
/// a check fails.
///
/// # Errors
/// A step cannot be performed.
pub(crate) fn run(prefix: &Path, minutes: u64, results: &Path) -> Result<bool> {
    if let Some(lack) = requirements::lacks() {
        anyhow::bail!("bench owners: {lack}");
    }
    let bed = Testbed::new(HOSTS, Some(prefix), &[])?;
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some("pvm-rm --policy load".to_string()),
            ..Settings::default()
        },
    )?;
    let outcome = run_logins(&vm, Duration::from_secs(60 * minutes))
        .inspect_err(|_| eprintln!("{}", vm.logs()))?;
    vm.halt()?;
    print_outcome(&outcome);
    fs::create_dir_all(results)?;
    let file = results.join("owners.json");
    fs::write(&file, serde_json::to_vec_pretty(&outcome)?)
        .with_context(|| file.display().to_string())?;
    say(&format!("the same as JSON: {}", file.display()));
    Ok(outcome.good)
}

fn run_logins(vm: &Vm, span: Duration) -> Result<Outcome> {
    let names = add_hosts(vm, say)?;
    vm.compile_program("busy")?;
    let index_of = |host: &Host| {
        names
            .iter()
            .find(|(_, name)| **name == host.name())
            .map(|(index, _)| *index)
    };
    let hosts: Vec<(u16, &Host)> = vm
        .bed()
        .hosts()
        .iter()
        .filter_map(|host| Some((index_of(host)?, host)))
        .collect();
    ensure!(
        hosts.len() == HOSTS,
        "not all hosts are in the virtual machine: {names:?}"
    );
    let kernels = SamplingThread::start(&hosts, demo::KERNEL_PROGRAM)?;
    let (mut outcome, mut events, mut stays) = (Outcome::default(), BTreeMap::new(), Vec::new());
    let begin = Instant::now();
    let mut jobs = Jobs::start(vm, span)?;
    let (mut rng, mut there) = (Rng::new(1), BTreeMap::new());
    while begin.elapsed() < span {
        pause(&mut rng, LOGIN_INTERVAL_MS);
        log_out_expired(&mut there, &mut stays, |until| until <= Instant::now())?;
        let (index, host) = hosts[rng.below(HOSTS)];
        if there.len() < CONCURRENT_LOGINS_MAX && !there.contains_key(&index) {
            let (stay, from) = (millis(&mut rng, LOGIN_DURATION_MS), now_us());
            let login = Login::new(vm.bed(), "olga", host)?;
            there.insert(
                index,
                ActiveLogin {
                    until: Instant::now() + stay,
                    from,
                    login,
                },
            );
            outcome.visits += 1;
        }
        jobs.restart_ended(vm, &mut outcome)?;
        // The event log is bounded, so new events are read before they can be overwritten.
        read_new_events(vm, &mut events)?;
    }
    log_out_expired(&mut there, &mut stays, |_| true)?;
    say("everybody has left; waiting for tablix2 and the farm to end by themselves");
    let clocks = jobs.finish(vm, &mut outcome)?;
    outcome.seconds = begin.elapsed().as_secs();
    read_new_events(vm, &mut events)?;
    let (events, seen) = (
        events.into_values().collect::<Vec<EventEntry>>(),
        kernels.end()?,
    );
    let decisions = names
        .into_iter()
        .map(|(index, name)| Ok((index, (name.clone(), decisions(vm, &name)?))));
    outcome.judge(
        &events,
        &stays,
        &decisions.collect::<Result<_>>()?,
        &clocks,
        &seen,
    );
    Ok(outcome)
}

/// A running tablix2 and a running farm. Each is started again when it ends.
struct Jobs {
    search: RunningCommand,
    farm: RunningCommand,
    units: u64,
    clocks: Clocks,
}

impl Jobs {
    fn start(vm: &Vm, span: Duration) -> Result<Jobs> {
        let units = span.as_secs() * UNITS_PER_SECOND;
        Ok(Jobs {
            search: start_search(vm, say)?,
            farm: start_farm(vm, units)?,
            units,
            clocks: Clocks::new(),
        })
    }

    /// Checks the results of the jobs that have ended, and starts these jobs again.
    fn restart_ended(&mut self, vm: &Vm, outcome: &mut Outcome) -> Result<()> {
        if self.search.poll()?.is_some() {
            let ended = std::mem::replace(&mut self.search, start_search(vm, say)?);
            finish_search(vm, ended, WAIT_TIMEOUT, outcome);
        }
        if self.farm.poll()?.is_some() {
            let ended = std::mem::replace(&mut self.farm, start_farm(vm, self.units)?);
            finish_farm(ended, WAIT_TIMEOUT, outcome, &mut self.clocks);
        }
        Ok(())
    }

    /// Waits until both jobs have ended and checks their results. Returns the clocks of all
    /// workers.
    fn finish(mut self, vm: &Vm, outcome: &mut Outcome) -> Result<Clocks> {
        finish_search(vm, self.search, JOBS_END_TIMEOUT, outcome);
        finish_farm(self.farm, JOBS_END_TIMEOUT, outcome, &mut self.clocks);
        Ok(self.clocks)
    }
}

fn start_farm(vm: &Vm, units: u64) -> Result<RunningCommand> {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/busy"));
    command.args(["farm", &FARM_WORKERS.to_string(), &units.to_string()]);
    RunningCommand::start(command, Stdio::null())
}

/// Waits until tablix2 has ended, and checks its timetables. Adds the result to `outcome`.
fn finish_search(vm: &Vm, search: RunningCommand, deadline: Duration, outcome: &mut Outcome) {
    let checked = search.finish(deadline).and_then(|done| {
        done.expect_success("tablix2")?;
        demo::read_solutions(vm)
    });
    outcome.searches += 1;
    match checked {
        Ok(solutions) => {
            outcome.timetables += solutions.len();
            outcome.reasons.extend(demo::solution_error(&solutions));
        }
        Err(error) => outcome.reasons.push(format!("tablix2: {error:#}")),
    }
}

/// Waits until a farm has ended, and checks the result of each task. Adds the result to `outcome`.
fn finish_farm(
    farm: RunningCommand,
    deadline: Duration,
    outcome: &mut Outcome,
    clocks: &mut Clocks,
) {
    outcome.farms += 1;
    match farm
        .finish(deadline)
        .and_then(|done| done.expect_success("the farm"))
    {
        Ok(done) => match read_farm(&done.out, clocks) {
            right if right == FARM_WORKERS => outcome.results += right,
            right => outcome.reasons.push(format!(
                "{right} of {FARM_WORKERS} tasks of a farm had the right result: {}",
                done.out
            )),
        },
        Err(error) => outcome.reasons.push(format!("{error:#}")),
    }
}

/// Returns the number of correct results in a farm's output. Adds the clocks of the farm's tasks to
/// `clocks`.
fn read_farm(out: &str, clocks: &mut Clocks) -> usize {
    let span = |from: &str, to: &str| Some((from.parse::<u64>().ok()?, to.parse::<u64>().ok()?));
    let mut right = 0;
    for line in out.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["spawned", tid] => drop(clocks.entry(tid.to_string()).or_default()),
            ["watched", tid, from, to] => {
                let clock = clocks.entry(tid.to_string()).or_default();
                (clock.first, clock.last) = span(from, to).unwrap_or_default();
            }
            ["gap", tid, from, to] => clocks
                .entry(tid.to_string())
                .or_default()
                .gaps
                .extend(span(from, to)),
            ["task", _, "right"] => right += 1,
            _ => {}
        }
    }
    right
}

fn say(line: &str) {
    eprintln!("bench owners: {line}");
}

fn millis(rng: &mut Rng, (least, most): (usize, usize)) -> Duration {
    Duration::from_millis((least + rng.below(most - least)) as u64)
}

fn pause(rng: &mut Rng, span: (usize, usize)) {
    std::thread::sleep(millis(rng, span));
}

/// An owner who is logged in on a host.
struct ActiveLogin {
    until: Instant,
    /// Time just before the login, in microseconds since 1970.
    from: u64,
    login: Login,
}

/// Logs out all owners for whose time of logout `is_over` returns true.
fn log_out_expired(
    there: &mut BTreeMap<u16, ActiveLogin>,
    stays: &mut Vec<ScriptedLogin>,
    is_over: impl Fn(Instant) -> bool,
) -> Result<()> {
    let over: Vec<u16> = there
        .iter()
        .filter(|(_, there)| is_over(there.until))
        .map(|(host, _)| *host)
        .collect();
    for host in over {
        if let Some(ActiveLogin { from, login, .. }) = there.remove(&host) {
            login.log_out()?;
            stays.push(ScriptedLogin {
                host,
                from,
                to: now_us(),
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
fn decisions(vm: &Vm, host: &str) -> Result<Vec<Decision>> {
    let mut answer = vm
        .json(&["why", host])?
        .pop()
        .context("why prints one value")?;
    Ok(serde_json::from_value(answer["decisions"].take())?)
}

fn print_outcome(outcome: &Outcome) {
    let ms = |us: Option<&u64>| us.map_or("-".to_string(), |us| format!("{:.1}", *us as f64 / 1e3));
    let line = |what: &str, all: &[u64]| {
        let share = |percent: usize| {
            ms(all.get((all.len() * percent / 100).min(all.len().saturating_sub(1))))
        };
        println!(
            "{what:48} {:>6} {:>8} {:>8} {:>8}",
            all.len(),
            share(50),
            share(99),
            ms(all.last())
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
    line("its load watcher knows", &outcome.seen_us);
    line(
        "all guests are paused, after its directive",
        &outcome.held_us,
    );
    line(
        "a worker runs no more, by its own clock",
        &outcome.stood_still_us,
    );
    line(
        "a kernel of tablix2 got so much after 50 ms",
        &outcome.kernels_got_us,
    );
    line("and its dump, inside of it", &outcome.dumps_got_us);
    line("and the kernel, to end it", &outcome.ends_got_us);
    line("no guest is left on the host", &outcome.clean_us);
    line("the same where there was one", &outcome.cleared_us);
    line(
        "the same where a guest had nowhere to go",
        &outcome.nowhere_us,
    );
    if outcome.workers_skipped + outcome.kernels_skipped > 0 {
        println!(
            "not judged: {} workers, {} kernels",
            outcome.workers_skipped, outcome.kernels_skipped
        );
    }
    print_late(outcome);
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

/// Prints each host, worker and process that was later than promised, with its events.
fn print_late(outcome: &Outcome) {
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

    /// The output of a farm has the correctness of each result, and the times in which each task
    /// did not run.
    #[test]
    fn farm_output_has_results_and_gaps() {
        let mut clocks = Clocks::new();
        let out = "spawned t40002\nspawned t40003\nwatched t40003 10 400\ngap t40003 100 250\ntask t40003 right\n\
                   watched t40002 12 300\ntask t40002 wrong\nfarm 2\n";
        assert_eq!(read_farm(out, &mut clocks), 1);
        let told = |tid: &str| {
            (
                clocks[tid].first,
                clocks[tid].last,
                clocks[tid].gaps.clone(),
            )
        };
        assert_eq!(told("t40003"), (10, 400, vec![(100, 250)]));
        assert_eq!(
            told("t40002"),
            (12, 300, vec![]),
            "it was never paused, and is a worker all the same"
        );
    }
}
