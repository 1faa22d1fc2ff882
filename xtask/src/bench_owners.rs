//! `cargo xtask bench owners`: people log in at random times on hosts where tablix2 and a farm
//! compute.
//!
//! Measures how soon the guests stop, by their own clocks and by the kernel's counts. Checks where
//! the guests go, and that their jobs end with the right results.

mod judge;
mod kernels;

use crate::demo::{self, hosts_join, start_search};
use anyhow::{Context, Result, ensure};
use judge::{Clocks, Decision, GotOn, Late, Outcome, RanOn, Stay};
use kernels::{Watch, now_us};
use sempa_tests::rng::Rng;
use sempa_tests::run::Running;
use sempa_tests::ssh::Login;
use sempa_tests::testbed::Host;
use sempa_tests::vm::{Entry, Settings};
use sempa_tests::{Testbed, Vm, needs};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Hosts of the testbed. People log in on any of them, also on the master's.
const HOSTS: usize = 4;
/// Tasks of the farm: each computes all the time and watches its own clock.
const WORKERS: usize = 4;
/// Units of work of each task for each second of the run. A unit is about 10 ms of processor time.
/// With this number of tasks and processors a farm takes a third of the run.
const UNITS_PER_SECOND: u64 = 5;
/// Upper bound of people who are logged in at the same time, so that guests have a host to go to.
const AT_ONCE: usize = 2;
/// Bounds of the length of a visit, and of the time between two arrivals, in milliseconds.
const STAY_MS: (usize, usize) = (3_000, 15_000);
const PAUSE_MS: (usize, usize) = (1_000, 6_000);
/// Time limit of each wait.
const SOON: Duration = Duration::from_secs(60);
/// Time for tablix2 and the farm to end after the last visit.
const REST_TIME: Duration = Duration::from_secs(900);

/// Runs for this number of minutes. `results` is the folder for the JSON. Returns false if a check
/// fails.
///
/// # Errors
/// A step could not be performed at all.
pub(crate) fn run(prefix: &Path, minutes: u64, results: &Path) -> Result<bool> {
    if let Some(lack) = needs::lacks() {
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
    let outcome = watch(&vm, Duration::from_secs(60 * minutes))
        .inspect_err(|_| eprintln!("{}", vm.logs()))?;
    vm.halt()?;
    tell(&outcome);
    fs::create_dir_all(results)?;
    let file = results.join("owners.json");
    fs::write(&file, serde_json::to_vec_pretty(&outcome)?)
        .with_context(|| file.display().to_string())?;
    say(&format!("the same as JSON: {}", file.display()));
    Ok(outcome.good)
}

fn watch(vm: &Vm, span: Duration) -> Result<Outcome> {
    let names = hosts_join(vm, say)?;
    vm.program("busy")?;
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
    let kernels = Watch::start(&hosts, demo::KERNEL)?;
    let (mut outcome, mut events, mut stays) = (Outcome::default(), BTreeMap::new(), Vec::new());
    let begin = Instant::now();
    let mut jobs = Jobs::start(vm, span)?;
    let (mut rng, mut there) = (Rng::new(1), BTreeMap::new());
    while begin.elapsed() < span {
        pause(&mut rng, PAUSE_MS);
        leave(&mut there, &mut stays, |until| until <= Instant::now())?;
        let (index, host) = hosts[rng.below(HOSTS)];
        if there.len() < AT_ONCE && !there.contains_key(&index) {
            let (stay, from) = (millis(&mut rng, STAY_MS), now_us());
            let login = Login::new(vm.bed(), "olga", host)?;
            there.insert(
                index,
                There {
                    until: Instant::now() + stay,
                    from,
                    login,
                },
            );
            outcome.visits += 1;
        }
        jobs.go_on(vm, &mut outcome)?;
        // The log is bounded; events read in time cannot be lost.
        note(vm, &mut events)?;
    }
    leave(&mut there, &mut stays, |_| true)?;
    say("everybody has left; waiting for tablix2 and the farm to end by themselves");
    let clocks = jobs.finish(vm, &mut outcome)?;
    outcome.seconds = begin.elapsed().as_secs();
    note(vm, &mut events)?;
    let (events, seen) = (events.into_values().collect::<Vec<Entry>>(), kernels.end()?);
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

/// A running tablix2 and a running farm; each starts again when it ends.
struct Jobs {
    search: Running,
    farm: Running,
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

    /// Judges the jobs that have ended, and starts them again.
    fn go_on(&mut self, vm: &Vm, outcome: &mut Outcome) -> Result<()> {
        if self.search.poll()?.is_some() {
            let ended = std::mem::replace(&mut self.search, start_search(vm, say)?);
            searched(vm, ended, SOON, outcome);
        }
        if self.farm.poll()?.is_some() {
            let ended = std::mem::replace(&mut self.farm, start_farm(vm, self.units)?);
            harvested(ended, SOON, outcome, &mut self.clocks);
        }
        Ok(())
    }

    /// Waits for both jobs. Returns the clocks of all workers.
    fn finish(mut self, vm: &Vm, outcome: &mut Outcome) -> Result<Clocks> {
        searched(vm, self.search, REST_TIME, outcome);
        harvested(self.farm, REST_TIME, outcome, &mut self.clocks);
        Ok(self.clocks)
    }
}

fn start_farm(vm: &Vm, units: u64) -> Result<Running> {
    let mut command = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/busy"));
    command.args(["farm", &WORKERS.to_string(), &units.to_string()]);
    Running::start(command, Stdio::null())
}

/// Waits until tablix2 has ended, at most until the deadline, and checks its timetables.
fn searched(vm: &Vm, search: Running, deadline: Duration, outcome: &mut Outcome) {
    let checked = search.finish(deadline).and_then(|done| {
        done.expect_good("tablix2")?;
        demo::solutions(vm)
    });
    outcome.searches += 1;
    match checked {
        Ok(solutions) => {
            outcome.timetables += solutions.len();
            outcome.reasons.extend(demo::lacks(&solutions));
        }
        Err(error) => outcome.reasons.push(format!("tablix2: {error:#}")),
    }
}

/// Waits until a farm has ended, at most until the deadline, and checks the result of each task.
fn harvested(farm: Running, deadline: Duration, outcome: &mut Outcome, clocks: &mut Clocks) {
    outcome.farms += 1;
    match farm
        .finish(deadline)
        .and_then(|done| done.expect_good("the farm"))
    {
        Ok(done) => match read_farm(&done.out, clocks) {
            right if right == WORKERS => outcome.results += right,
            right => outcome.reasons.push(format!(
                "{right} of {WORKERS} tasks of a farm had the right result: {}",
                done.out
            )),
        },
        Err(error) => outcome.reasons.push(format!("{error:#}")),
    }
}

/// Returns the number of right results of a farm. Adds the clocks of its tasks to `clocks`.
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

/// A person who is logged in on a host.
struct There {
    until: Instant,
    /// Just before the login, in microseconds since 1970.
    from: u64,
    login: Login,
}

/// Logs out all people whose time is over.
fn leave(
    there: &mut BTreeMap<u16, There>,
    stays: &mut Vec<Stay>,
    is_over: impl Fn(Instant) -> bool,
) -> Result<()> {
    let over: Vec<u16> = there
        .iter()
        .filter(|(_, there)| is_over(there.until))
        .map(|(host, _)| *host)
        .collect();
    for host in over {
        if let Some(There { from, login, .. }) = there.remove(&host) {
            login.out()?;
            stays.push(Stay {
                host,
                from,
                to: now_us(),
            });
        }
    }
    Ok(())
}

fn note(vm: &Vm, events: &mut BTreeMap<u64, Entry>) -> Result<()> {
    events.extend(vm.events()?.into_iter().map(|entry| (entry.number, entry)));
    Ok(())
}

/// Returns all decisions about a host that the resource manager remembers.
fn decisions(vm: &Vm, host: &str) -> Result<Vec<Decision>> {
    let mut answer = vm
        .json(&["why", host])?
        .pop()
        .context("why prints one value")?;
    Ok(serde_json::from_value(answer["decisions"].take())?)
}

fn tell(outcome: &Outcome) {
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
    for Late {
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
    for RanOn {
        worker,
        ran_us,
        story,
    } in &outcome.ran_on
    {
        println!("{worker} ran for {:.1} ms:", *ran_us as f64 / 1e3);
        story.iter().for_each(|line| println!("    {line}"));
    }
    for GotOn { pid, got_us, story } in &outcome.got_on {
        println!(
            "process {pid} of tablix2 got the processor for {:.1} ms:",
            *got_us as f64 / 1e3
        );
        story.iter().for_each(|line| println!("    {line}"));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_farm_says_which_results_are_right_and_when_its_tasks_stood_still() {
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
