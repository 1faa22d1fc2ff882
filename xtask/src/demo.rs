//! `cargo xtask demo`: a running PVM program leaves a host whose owner comes back.
//!
//! The demo has four hosts on this machine, Debian's unmodified tablix2 on them, and a real ssh
//! login on one. Then it prints what the virtual machine did. Everything runs in namespaces that
//! end with this process, so an interruption needs no handler to clean up.

use crate::install::{self, Parts};
use crate::timeline::Timeline;
use crate::{demo_alone, setup};
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::event::EventKind;
use sempa_tests::run::{Running, must};
use sempa_tests::ssh::Login;
use sempa_tests::timetable::{self, PATIENCE, SCHOOL, Solution};
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, eventually, needs};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Time limit of each wait on a loaded machine.
const SOON: Duration = Duration::from_secs(60);
/// Longest search of tablix2 on a slow machine.
const SEARCH_TIME: Duration = Duration::from_secs(600);
/// The program must run at least this long for the demo to show anything.
const SEARCH_LEAST: Duration = Duration::from_secs(20);
/// Kernels of tablix2, one for each host.
const KERNELS: usize = 4;
/// The host to which the owner comes back.
const OWNED: usize = 2;

/// The content of the JSON file.
#[derive(Debug, Serialize)]
struct Outcome {
    /// True if all checks have passed.
    good: bool,
    /// The reasons why a check has failed.
    reasons: Vec<String>,
    /// The story of the login.
    timeline: Option<Timeline>,
    /// Seconds that tablix2 ran for.
    search_s: f64,
    /// Unmet wishes in the solutions, one for each kernel.
    fitness: Vec<u64>,
}

/// Runs the demo on four hosts. `json` is the file for the timeline. Returns false if a check
/// fails.
///
/// # Errors
/// A step could not be performed at all.
pub(crate) fn run(json: &Path) -> Result<bool> {
    setup::everything()?;
    say("building (release)");
    let profile = install::own_profile()?;
    install::build(&profile, Parts::ProgramsAndHosts)?;
    let prefix = install::target()?.join("sempa-prefix");
    install::lay_out(&prefix, &profile)?;
    let prefix = prefix.canonicalize()?;
    if let Some(lack) = needs::lacks() {
        println!(
            "demo: {lack}; so the demo has no login and no migration, only a virtual machine of this one host"
        );
        return demo_alone::run(&prefix);
    }
    say(&format!(
        "making {KERNELS} hosts, each with its own network, files, processes and sshd"
    ));
    let bed = Testbed::new(KERNELS, Some(&prefix), &[])?;
    let rm = "pvm-rm --policy load".to_string();
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some(rm),
            ..Settings::default()
        },
    )?;
    let outcome = story(&vm).inspect_err(|_| eprintln!("{}", vm.logs()))?;
    if let Some(timeline) = &outcome.timeline {
        timeline.print();
    }
    let place = if json.is_absolute() {
        json.to_path_buf()
    } else {
        setup::project().join(json)
    };
    if let Some(folder) = place.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&place, serde_json::to_vec_pretty(&outcome)?)
        .with_context(|| place.display().to_string())?;
    say(&format!("the same as JSON: {}", place.display()));
    for reason in &outcome.reasons {
        println!("demo: NOT GOOD: {reason}");
    }
    if outcome.good {
        say("everything held");
    }
    Ok(outcome.good)
}

/// Prints a line of the demo.
pub(crate) fn say(line: &str) {
    println!("demo: {line}");
}

fn story(vm: &Vm) -> Result<Outcome> {
    let names = hosts_join(vm, say)?;
    let (index, owned) = (index_of(&names, OWNED)?, vm.bed().host(OWNED));
    let started = Instant::now();
    let mut search = start_search(vm, say)?;
    wait_for_guests(vm, &mut search)?;
    say(&format!(
        "olga logs into {} over ssh, with a terminal",
        owned.name()
    ));
    let login = Login::new(vm.bed(), "olga", owned)?;
    vm.event(
        SOON,
        "clean host after the login",
        |entry| matches!(entry.kind, EventKind::HostVacated { host } if host.index() == index),
    )?;
    let mut reasons = guests_on(vm, owned.name())?;
    say(&format!(
        "{} is clean; olga works, then logs out",
        owned.name()
    ));
    login.out()?;
    vm.event(
        SOON,
        "event that says the owner has left",
        |entry| matches!(entry.kind, EventKind::OwnerAbsent { host, .. } if host.index() == index),
    )?;
    if let Err(error) = used_again(vm, owned.name()) {
        reasons.push(format!("{error:#}"));
    }
    say("waiting for tablix2 to end by itself");
    let done = search.finish(SEARCH_TIME)?;
    let searched = started.elapsed();
    if !done.good() {
        reasons.push(format!(
            "tablix2 ended with {}: {}",
            done.status,
            done.err.trim()
        ));
    }
    if searched < SEARCH_LEAST {
        reasons.push(format!("tablix2 ran only {:.1} s", searched.as_secs_f64()));
    }
    let solutions = solutions(vm)?;
    reasons.extend(lacks(&solutions));
    let timeline = Timeline::of(index, &names, &vm.events()?);
    match &timeline {
        Some(timeline) => reasons.extend(timeline.lacks()),
        None => reasons.push("the event log knows of no login".to_string()),
    }
    if !reasons.is_empty() {
        eprintln!("{}", vm.logs());
    }
    leave_nothing(vm, &mut reasons)?;
    let fitness: Vec<u64> = solutions.iter().map(|solution| solution.fitness).collect();
    say(&format!(
        "tablix2 ran {:.1} s, ended with {}, {} timetables without a mandatory error (unmet wishes: {fitness:?})",
        searched.as_secs_f64(),
        done.status,
        solutions.len()
    ));
    Ok(Outcome {
        good: reasons.is_empty(),
        reasons,
        timeline,
        search_s: searched.as_secs_f64(),
        fitness,
    })
}

/// Adds the hosts over ssh and waits for a load watcher on each. Returns the host names by index.
pub(crate) fn hosts_join(vm: &Vm, say: fn(&str)) -> Result<BTreeMap<u16, String>> {
    let hosts = vm.bed().hosts();
    let others: Vec<&str> = hosts[1..].iter().map(|host| host.name()).collect();
    say(&format!(
        "the virtual machine runs on h1; adding {} over ssh",
        others.join(" ")
    ));
    vm.add(&others)?;
    eventually(SOON, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watched = |name: &str| {
            tasks.iter().any(|task| {
                task.name.ends_with("pvm-load-watcher") && task.host.as_deref() == Some(name)
            })
        };
        match hosts.iter().find(|host| !watched(host.name())) {
            Some(host) => Err(format!("no load watcher on {}", host.name())),
            None => Ok(()),
        }
    })?;
    let conf = vm.json(&["conf"])?.pop().context("conf prints one value")?;
    let mut names = BTreeMap::new();
    for host in conf["hosts"].as_array().context("conf lists the hosts")? {
        let index = host["index"]
            .as_u64()
            .and_then(|index| u16::try_from(index).ok())
            .context("an index")?;
        names.insert(index, host["name"].as_str().context("a name")?.to_string());
    }
    ensure!(
        names.len() == hosts.len(),
        "{} hosts are in the virtual machine: {names:?}",
        names.len()
    );
    say("the resource manager is registered and every host has a load watcher");
    Ok(names)
}

fn index_of(names: &BTreeMap<u16, String>, number: usize) -> Result<u16> {
    let wanted = format!("h{number}");
    let found = names.iter().find(|(_, name)| **name == wanted);
    found
        .map(|(index, _)| *index)
        .with_context(|| format!("{wanted} is not in {names:?}"))
}

fn work_folder(vm: &Vm) -> PathBuf {
    vm.home().join("timetable")
}

pub(crate) fn start_search(vm: &Vm, say: fn(&str)) -> Result<Running> {
    let folder = work_folder(vm);
    fs::create_dir_all(&folder)?;
    let problem = folder.join("school.xml");
    fs::write(&problem, timetable::problem(SCHOOL, 1))?;
    say(&format!(
        "tablix2 looks for a timetable with {KERNELS} kernels"
    ));
    let mut command = vm.command(vm.bed().host(1), "tablix2");
    command
        .args(["-n", &KERNELS.to_string(), "-d", "3", "-p", PATIENCE, "-o"])
        .arg(folder.join("demo_"))
        .arg(&problem);
    Running::start(command, Stdio::null())
}

/// Waits until a kernel runs on the owned host and the search has made progress.
fn wait_for_guests(vm: &Vm, search: &mut Running) -> Result<()> {
    let owned = vm.bed().host(OWNED).name();
    eventually(SOON, || {
        if let Ok(Some(status)) = search.poll() {
            let words =
                search.err_so_far().unwrap_or_default() + &search.out_so_far().unwrap_or_default();
            return Ok(Err(format!(
                "tablix2 ended early, {status}: {}",
                words.trim()
            )));
        }
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let there = tasks
            .iter()
            .any(|task| is_kernel(&task.name) && task.host.as_deref() == Some(owned));
        let out =
            search.out_so_far().unwrap_or_default() + &search.err_so_far().unwrap_or_default();
        match (there, out.contains(" reports ")) {
            (true, true) => Ok(Ok(())),
            (there, reports) => Err(format!(
                "kernel on {owned}: {there}, progress reported: {reports}; tasks: {tasks:?}"
            )),
        }
    })?
    .map_err(anyhow::Error::msg)
}

/// The name of tablix2's program that runs on each host.
pub(crate) const KERNEL: &str = "tablix2_kernel";

fn is_kernel(name: &str) -> bool {
    name.ends_with(KERNEL)
}

/// Returns the kernels that are still on a host, by the console and by the host's process table.
fn guests_on(vm: &Vm, host: &str) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for task in vm.tasks()? {
        if is_kernel(&task.name) && task.host.as_deref() == Some(host) {
            left.push(format!("the console still lists {} on {host}", task.tid));
        }
    }
    for (pid, line) in vm.bed().host(OWNED).processes() {
        if line.contains(KERNEL) {
            left.push(format!("process {pid} ({line}) is still on {host}"));
        }
    }
    Ok(left)
}

/// Checks that a new task without a given host is placed on the host that its owner has left.
fn used_again(vm: &Vm, host: &str) -> Result<()> {
    vm.program("hold")?;
    eventually(SOON, || {
        let attempt = || -> Result<bool> {
            let tid = vm.spawn(&["hold", "1"])?;
            let place = vm.host_of(&tid)?;
            vm.pvm(&["kill", &tid])?;
            Ok(place == host)
        };
        match attempt() {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("new tasks are not placed on {host}")),
            Err(error) => Err(format!("{error:#}")),
        }
    })?;
    say(&format!(
        "{host} is used again: a new task was placed there"
    ));
    Ok(())
}

/// Returns what is wrong with the solutions as a whole; `None` if they are right.
pub(crate) fn lacks(solutions: &[Solution]) -> Option<String> {
    let lessons = SCHOOL.days * SCHOOL.lessons * SCHOOL.at_once;
    let wrong = solutions.iter().any(|solution| solution.lessons != lessons);
    wrong.then(|| format!("a solution does not have all {lessons} lessons: {solutions:?}"))
}

/// Reads every result with tablix2's own program and checks it.
pub(crate) fn solutions(vm: &Vm) -> Result<Vec<Solution>> {
    let folder = work_folder(vm);
    let mut solutions = Vec::new();
    for number in 0..KERNELS {
        let table = folder.join(format!("demo_{number}.csv"));
        let mut command = vm.command(vm.bed().host(1), "tablix2_output");
        command
            .arg("-o")
            .arg(&table)
            .arg("csv")
            .arg(folder.join(format!("demo_result{number}.xml")));
        must(command, SOON)?;
        let text = fs::read_to_string(&table).with_context(|| table.display().to_string())?;
        solutions.push(timetable::check(&text).with_context(|| format!("result {number}"))?);
    }
    if solutions.is_empty() {
        bail!("tablix2 has written no result");
    }
    Ok(solutions)
}

/// Halts the virtual machine. Adds a reason for each process or file that remains.
fn leave_nothing(vm: &Vm, reasons: &mut Vec<String>) -> Result<()> {
    vm.halt()?;
    let before = reasons.len();
    for host in vm.bed().hosts() {
        let files = host.files_left(vm.bed().folder());
        if !files.is_empty() {
            reasons.push(format!("halt left files on {}: {files:?}", host.name()));
        }
    }
    if reasons.len() == before {
        say("halted; no process and no file is left on any host");
    }
    Ok(())
}
