//! `cargo xtask bench owners`: people log in at random times on hosts where tablix2 and a farm compute. How soon do the
//! guests stand still, by their own clocks, and what becomes of them?

use crate::demo::{hosts_join, start_search};
use anyhow::{Context, Result};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Cause, Step};
use sempa_tests::dice::Dice;
use sempa_tests::ssh::Login;
use sempa_tests::vm::{Entry, Settings};
use sempa_tests::{Testbed, Vm, eventually, needs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Hosts; people log in on any of them, also where the master is.
const HOSTS: usize = 4;
/// Tasks of the farm: each computes all the time and watches its own clock.
const WORKERS: usize = 4;
/// People who are there at the same time at most, so that there is somewhere to go.
const AT_ONCE: usize = 2;
/// They stay so long, in milliseconds, and come so long after one another.
const STAY_MS: (usize, usize) = (3_000, 15_000);
const PAUSE_MS: (usize, usize) = (1_000, 6_000);
/// The promise: nothing of ours runs longer beside an owner.
const PROMISE_US: u64 = 50_000;
/// The promise for a host: so long after the login no guest is left there, if there is somewhere to go. What took longer is
/// told with its story.
const CLEAN_US: u64 = 1_000_000;
/// Time for each single thing that is waited for.
const SOON: Duration = Duration::from_secs(60);
/// Time for tablix2 to end after the last visit.
const SEARCH_TIME: Duration = Duration::from_secs(900);

/// What came of it.
#[derive(Debug, Default, Serialize)]
struct Outcome {
    good: bool,
    reasons: Vec<String>,
    seconds: u64,
    visits: usize,
    /// From the login record until a worker ran no more, by its own clock; sorted.
    stood_still_us: Vec<u64>,
    /// From the login record until the load watcher knew; sorted.
    seen_us: Vec<u64>,
    /// From its word to the daemon until all guests stood still; sorted.
    held_us: Vec<u64>,
    /// From the login record until no guest was left; sorted.
    clean_us: Vec<u64>,
    /// The same where a guest had no host to go to for a time; sorted.
    nowhere_us: Vec<u64>,
    /// What happened to guests of hosts that were clean later than promised.
    late: Vec<Late>,
    ran_on: Vec<RanOn>,
    moves: usize,
    failed_moves: usize,
    searches: usize,
}

/// A host that had guests for long after its owner had come.
#[derive(Debug, Serialize)]
struct Late {
    host: String,
    clean_us: u64,
    /// Each with its milliseconds after the login record.
    story: Vec<String>,
}

/// A worker that ran for long after the owner had come.
#[derive(Debug, Serialize)]
struct RanOn {
    worker: String,
    ran_us: u64,
    /// What happened on its host meanwhile, each with its milliseconds after the login record.
    story: Vec<String>,
}

/// A decision of the resource manager, as `pvm why` tells it.
#[derive(Debug, Deserialize)]
struct Decision {
    at_us: u64,
    text: String,
    decided: serde_json::Value,
}

/// A host by its name, and what was decided about it.
type Decisions = BTreeMap<u16, (String, Vec<Decision>)>;

/// Somebody's visit, as the virtual machine saw it.
struct Visit {
    host: u16,
    since: u64,
}

/// Runs for so many minutes; `results` is the folder for the JSON. `Ok(false)`: something did not hold.
///
/// # Errors
/// A step could not be done at all.
pub(crate) fn run(prefix: &Path, minutes: u64, results: &Path) -> Result<bool> {
    if let Some(lack) = needs::lacks() {
        anyhow::bail!("bench owners: {lack}");
    }
    let bed = Testbed::new(HOSTS, Some(prefix), &[])?;
    let vm = Vm::start(&bed, Settings { rm: Some("pvm-rm --policy load".to_string()), ..Settings::default() })?;
    let outcome = watch(&vm, Duration::from_secs(60 * minutes)).inspect_err(|_| eprintln!("{}", vm.logs()))?;
    vm.halt()?;
    tell(&outcome);
    fs::create_dir_all(results)?;
    let file = results.join("owners.json");
    fs::write(&file, serde_json::to_vec_pretty(&outcome)?).with_context(|| file.display().to_string())?;
    say(&format!("the same as JSON: {}", file.display()));
    Ok(outcome.good)
}

fn watch(vm: &Vm, span: Duration) -> Result<Outcome> {
    let names = hosts_join(vm, say)?;
    vm.program("busy")?;
    let workers: Vec<String> = (0..WORKERS).map(|_| vm.spawn(&["busy"])).collect::<Result<_>>()?;
    let (mut outcome, mut events) = (Outcome::default(), BTreeMap::new());
    let begin = Instant::now();
    let mut search = start_search(vm, say)?;
    let (mut dice, mut there) = (Dice::new(1), BTreeMap::new());
    while begin.elapsed() < span {
        pause(&mut dice, PAUSE_MS);
        leave(&mut there, |until| until <= Instant::now())?;
        let host = 1 + dice.below(HOSTS);
        if there.len() < AT_ONCE && !there.contains_key(&host) {
            let stay = millis(&mut dice, STAY_MS);
            there.insert(host, (Instant::now() + stay, Login::new(vm.bed(), "olga", vm.bed().host(host))?));
            outcome.visits += 1;
        }
        if search.poll()?.is_some() {
            outcome.ended(search.finish(SOON)?.expect_good("tablix2").map(drop));
            search = start_search(vm, say)?;
        }
        // The log is bounded; what is read now cannot be lost.
        note(vm, &mut events)?;
    }
    leave(&mut there, |_| true)?;
    say("everybody has left; waiting for tablix2 to end by itself");
    outcome.ended(search.finish(SEARCH_TIME)?.expect_good("tablix2").map(drop));
    outcome.seconds = begin.elapsed().as_secs();
    note(vm, &mut events)?;
    let events: Vec<Entry> = events.into_values().collect();
    let decisions = names.into_iter().map(|(index, name)| Ok((index, (name.clone(), decisions(vm, &name)?))));
    outcome.judge_events(&events, &decisions.collect::<Result<_>>()?);
    for worker in &workers {
        // It may be standing still yet.
        let gaps = eventually(SOON, || vm.gaps(worker).map_err(|error| format!("{error:#}")));
        let gaps = gaps.with_context(|| format!("{worker} is not there at the end"))?;
        outcome.judge_worker(worker, &gaps, &events);
    }
    let Outcome { stood_still_us, seen_us, held_us, clean_us, nowhere_us, .. } = &mut outcome;
    [stood_still_us, seen_us, held_us, clean_us, nowhere_us].into_iter().for_each(|all| all.sort_unstable());
    let late = outcome.stood_still_us.iter().filter(|us| **us > PROMISE_US).count();
    if late > 0 {
        outcome.reasons.push(format!("{late} times a worker ran longer than {} ms beside an owner", PROMISE_US / 1000));
    }
    outcome.good = outcome.reasons.is_empty();
    Ok(outcome)
}

fn say(line: &str) {
    eprintln!("bench owners: {line}");
}

fn millis(dice: &mut Dice, (least, most): (usize, usize)) -> Duration {
    Duration::from_millis((least + dice.below(most - least)) as u64)
}

fn pause(dice: &mut Dice, span: (usize, usize)) {
    std::thread::sleep(millis(dice, span));
}

type There = BTreeMap<usize, (Instant, Login)>;

/// Logs out whose time is over.
fn leave(there: &mut There, is_over: impl Fn(Instant) -> bool) -> Result<()> {
    let over: Vec<usize> = there.iter().filter(|(_, (until, _))| is_over(*until)).map(|(host, _)| *host).collect();
    over.into_iter().filter_map(|host| there.remove(&host)).try_for_each(|(_, login)| login.out())
}

fn note(vm: &Vm, events: &mut BTreeMap<u64, Entry>) -> Result<()> {
    events.extend(vm.events()?.into_iter().map(|entry| (entry.number, entry)));
    Ok(())
}

/// All that the resource manager remembers to have decided about a host.
fn decisions(vm: &Vm, host: &str) -> Result<Vec<Decision>> {
    let mut answer = vm.json(&["why", host])?.pop().context("why prints one value")?;
    Ok(serde_json::from_value(answer["decisions"].take())?)
}

/// When people came, by the records of their logins.
fn visits(events: &[Entry]) -> impl Iterator<Item = Visit> {
    events.iter().filter_map(|entry| match entry.kind {
        EventKind::OwnerPresent { host, since, .. } => Some(Visit { host: host.index(), since: since.0 }),
        _ => None,
    })
}

/// The first event after a time that says something.
fn after<T>(events: &[Entry], since: u64, says: impl Fn(&Entry) -> Option<T>) -> Option<T> {
    events.iter().filter(|entry| entry.at_us >= since).find_map(says)
}

/// What happened on the host of a visit until then.
fn story(visit: &Visit, until: u64, events: &[Entry]) -> Vec<String> {
    let here = |entry: &&Entry| match &entry.kind {
        EventKind::Moving { from, .. } => from.index() == visit.host,
        EventKind::OwnerPresent { host, .. } | EventKind::GuestsStopped { host, .. } => host.index() == visit.host,
        _ => false,
    };
    let meanwhile = events.iter().filter(|entry| (visit.since..=until).contains(&entry.at_us)).filter(here);
    meanwhile.map(|entry| told(visit, entry.at_us, &entry.text)).collect()
}

/// A line of a story.
fn told(visit: &Visit, at_us: u64, text: &str) -> String {
    format!("{:.1} {text}", (at_us - visit.since) as f64 / 1e3)
}

impl Outcome {
    fn ended(&mut self, search: Result<()>) {
        self.searches += 1;
        if let Err(error) = search {
            self.reasons.push(format!("{error:#}"));
        }
    }

    fn judge_events(&mut self, events: &[Entry], decisions: &Decisions) {
        for entry in events {
            match &entry.kind {
                EventKind::Moved { cause, .. } => {
                    self.moves += 1;
                    if !matches!(cause, Cause::Owner { why } if why.contains("olga")) {
                        self.reasons.push(format!("a move for another reason: {}", entry.text));
                    }
                }
                EventKind::MoveFailed { .. } => self.failed_moves += 1,
                EventKind::OwnerPresent { since, seen, .. } => self.seen_us.push(seen.since(*since).0),
                EventKind::GuestsStopped { took, guests, .. } if !guests.is_empty() => self.held_us.push(took.0),
                _ => {}
            }
        }
        for visit in visits(events) {
            let clean = |entry: &Entry| match entry.kind {
                EventKind::HostClean { host } if host.index() == visit.host => Some(Some(entry.at_us - visit.since)),
                EventKind::OwnerAbsent { host, .. } if host.index() == visit.host => Some(None),
                _ => None,
            };
            if let Some(clean_us) = after(events, visit.since, clean).flatten() {
                self.judge_clean(&visit, clean_us, events, decisions);
            }
        }
    }

    /// A host had no guest any more after that time.
    fn judge_clean(&mut self, visit: &Visit, clean_us: u64, events: &[Entry], decisions: &Decisions) {
        let until = visit.since + clean_us;
        let within = |at_us: u64| at_us >= visit.since && at_us <= until;
        let of_host = decisions.get(&visit.host);
        let decided: Vec<&Decision> =
            of_host.into_iter().flat_map(|(_, all)| all).filter(|d| within(d.at_us)).collect();
        let nowhere = |d: &&Decision| d.decided["Stays"]["why"].as_str().is_some_and(|why| why.starts_with("no host"));
        if decided.iter().any(nowhere) { &mut self.nowhere_us } else { &mut self.clean_us }.push(clean_us);
        if clean_us <= CLEAN_US {
            return;
        }
        let step = |entry: &&Entry| match &entry.kind {
            EventKind::Moving { from, .. } => from.index() == visit.host && within(entry.at_us),
            _ => false,
        };
        let steps = events.iter().filter(step).map(|entry| (entry.at_us, entry.text.clone()));
        let mut story: Vec<(u64, String)> = decided.iter().map(|d| (d.at_us, d.text.clone())).chain(steps).collect();
        story.sort();
        let host = of_host.map(|(name, _)| name.clone()).unwrap_or_default();
        self.late.push(Late { host, clean_us, story: story.iter().map(|(at, text)| told(visit, *at, text)).collect() });
    }

    /// For each visit where the worker was: how long it ran yet.
    fn judge_worker(&mut self, worker: &str, gaps: &[(u64, u64)], events: &[Entry]) {
        for visit in visits(events) {
            let stood = |entry: &Entry| match &entry.kind {
                EventKind::GuestsStopped { host, guests, .. } if host.index() == visit.host => {
                    Some(guests.iter().any(|tid| tid.to_string() == worker))
                }
                _ => None,
            };
            if after(events, visit.since, stood) != Some(true) {
                continue;
            }
            // Nothing of it ran between its stop and this moment.
            let end = |entry: &Entry| match &entry.kind {
                EventKind::Moving { tid, from, step: Step::Transfer, .. } => {
                    (from.index() == visit.host && tid.to_string() == worker).then_some(entry.at_us)
                }
                EventKind::GuestsContinued { host, .. } => (host.index() == visit.host).then_some(entry.at_us),
                _ => None,
            };
            let Some(end) = after(events, visit.since, end) else { continue };
            match gaps.iter().find(|(from, to)| *from < end && *to >= end) {
                Some((from, _)) => {
                    let ran_us = from.saturating_sub(visit.since);
                    self.stood_still_us.push(ran_us);
                    if ran_us > PROMISE_US {
                        self.ran_on.push(RanOn { worker: worker.into(), ran_us, story: story(&visit, end, events) });
                    }
                }
                None => {
                    self.reasons.push(format!("{worker} ran at {end}, while somebody was there since {}", visit.since))
                }
            }
        }
    }
}

fn tell(outcome: &Outcome) {
    let ms = |us: Option<&u64>| us.map_or("-".to_string(), |us| format!("{:.1}", *us as f64 / 1e3));
    let line = |what: &str, all: &[u64]| {
        let share = |percent: usize| ms(all.get((all.len() * percent / 100).min(all.len().saturating_sub(1))));
        println!("{what:48} {:>6} {:>8} {:>8} {:>8}", all.len(), share(50), share(99), ms(all.last()));
    };
    println!(
        "{} visits in {} s; {} moves, {} more failed; tablix2 ended {} times by itself",
        outcome.visits, outcome.seconds, outcome.moves, outcome.failed_moves, outcome.searches
    );
    println!(
        "{:48} {:>6} {:>8} {:>8} {:>8}",
        "milliseconds after the login record", "times", "median", "99 %", "worst"
    );
    line("its load watcher knows", &outcome.seen_us);
    line("all guests stand still, after its word", &outcome.held_us);
    line("a worker runs no more, by its own clock", &outcome.stood_still_us);
    line("no guest is left on the host", &outcome.clean_us);
    line("the same where a guest had nowhere to go", &outcome.nowhere_us);
    for Late { host, clean_us, story } in &outcome.late {
        println!("{host} was clean after {:.1} ms:", *clean_us as f64 / 1e3);
        story.iter().for_each(|line| println!("    {line}"));
    }
    for RanOn { worker, ran_us, story } in &outcome.ran_on {
        println!("{worker} ran for {:.1} ms:", *ran_us as f64 / 1e3);
        story.iter().for_each(|line| println!("    {line}"));
    }
    println!("load: {}", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim());
    for reason in &outcome.reasons {
        println!("NOT GOOD: {reason}");
    }
}
