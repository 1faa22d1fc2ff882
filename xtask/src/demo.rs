//! `cargo xtask demo`: tasks of a running PVM program migrate off a host whose owner logs in.
//!
//! The demo makes four hosts on this machine, runs Debian's unmodified tablix2 on them, and logs in
//! on one by ssh. Then it prints what the virtual machine did. All processes are in namespaces that
//! end with this process, so an interrupted demo leaves nothing.

use crate::demo_output::print_demo_line;
use crate::install::{self, BuildParts};
use crate::timeline::Timeline;
use crate::{one_host_demo, setup};
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::event::EventKind;
use sempa_tests::run::{RunningCommand, run_ok};
use sempa_tests::ssh::Login;
use sempa_tests::timetable::{self, DEMO_SCHOOL, FINISH_OPTION, Solution};
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm, requirements, wait_for};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Time limit for each condition that the demo waits for, on a loaded machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the search of tablix2 on a slow machine.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(600);
/// Minimum duration of the search. In a shorter search the demo would show nothing.
const SEARCH_MIN: Duration = Duration::from_secs(20);
/// Number of tablix2's kernels, one for each host.
const KERNEL_COUNT: usize = 4;
/// Number of the host whose owner logs in.
const OWNED_HOST: usize = 2;

/// The results of the demo, as they are written to the JSON file.
#[derive(Debug, Serialize)]
struct Outcome {
    /// True if all checks have passed.
    good: bool,
    /// The reasons for which checks have failed.
    reasons: Vec<String>,
    /// The events after the login; `None` if the login was not detected.
    timeline: Option<Timeline>,
    /// Duration of tablix2's run in seconds.
    search_s: f64,
    /// Violation of soft constraints in the solution of each kernel, as computed by tablix2.
    fitness: Vec<u64>,
}

/// Runs the demo on four hosts. Writes the results to the file `json`. Returns false if a check
/// fails.
///
/// # Errors
/// A step cannot be performed.
pub(crate) fn run(json: &Path) -> Result<bool> {
    setup::set_up_all()?;
    print_demo_line("building (release)");
    let profile = install::own_profile()?;
    install::build(&profile, BuildParts::ProgramsAndHosts)?;
    let prefix = install::target_folder()?.join("sempa-prefix");
    install::install_files(&prefix, &profile)?;
    let prefix = prefix.canonicalize()?;
    if let Some(lack) = requirements::lacks() {
        println!(
            "demo: {lack}; so the demo has no login and no migration, only a virtual machine of this one host"
        );
        return one_host_demo::run(&prefix);
    }
    print_demo_line(&format!(
        "making {KERNEL_COUNT} hosts, each with its own network, files, processes and sshd"
    ));
    let bed = Testbed::new(KERNEL_COUNT, Some(&prefix), &[])?;
    let rm = "pvm-rm --policy load".to_string();
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some(rm),
            ..Settings::default()
        },
    )?;
    let outcome = run_story(&vm).inspect_err(|_| eprintln!("{}", vm.logs()))?;
    if let Some(timeline) = &outcome.timeline {
        timeline.print();
    }
    let place = if json.is_absolute() {
        json.to_path_buf()
    } else {
        setup::project_folder().join(json)
    };
    if let Some(folder) = place.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&place, serde_json::to_vec_pretty(&outcome)?)
        .with_context(|| place.display().to_string())?;
    print_demo_line(&format!("the same as JSON: {}", place.display()));
    for reason in &outcome.reasons {
        println!("demo: NOT GOOD: {reason}");
    }
    if outcome.good {
        print_demo_line("everything held");
    }
    Ok(outcome.good)
}

fn run_story(vm: &Vm) -> Result<Outcome> {
    let names = add_hosts(vm, print_demo_line)?;
    let (index, owned) = (index_of(&names, OWNED_HOST)?, vm.bed().host(OWNED_HOST));
    let started = Instant::now();
    let mut search = start_search(vm, print_demo_line)?;
    wait_for_guests(vm, &mut search)?;
    print_demo_line(&format!(
        "olga logs into {} over ssh, with a terminal",
        owned.name()
    ));
    let login = Login::new(vm.bed(), "olga", owned)?;
    vm.wait_for_event(
        WAIT_TIMEOUT,
        "clean host after the login",
        |entry| matches!(entry.kind, EventKind::HostVacated { host } if host.index() == index),
    )?;
    let mut reasons = remaining_guests(vm, owned.name())?;
    print_demo_line(&format!(
        "{} is clean; olga works, then logs out",
        owned.name()
    ));
    login.log_out()?;
    vm.wait_for_event(
        WAIT_TIMEOUT,
        "event that says the owner has left",
        |entry| matches!(entry.kind, EventKind::OwnerAbsent { host, .. } if host.index() == index),
    )?;
    if let Err(error) = wait_until_host_is_used(vm, owned.name()) {
        reasons.push(format!("{error:#}"));
    }
    print_demo_line("waiting for tablix2 to end by itself");
    let done = search.finish(SEARCH_TIMEOUT)?;
    let searched = started.elapsed();
    if !done.succeeded() {
        reasons.push(format!(
            "tablix2 ended with {}: {}",
            done.status,
            done.err.trim()
        ));
    }
    if searched < SEARCH_MIN {
        reasons.push(format!("tablix2 ran only {:.1} s", searched.as_secs_f64()));
    }
    let solutions = read_solutions(vm)?;
    reasons.extend(solution_error(&solutions));
    let timeline = Timeline::from_events(index, &names, &vm.events()?);
    match &timeline {
        Some(timeline) => reasons.extend(timeline.missing_parts()),
        None => reasons.push("the event log knows of no login".to_string()),
    }
    if !reasons.is_empty() {
        eprintln!("{}", vm.logs());
    }
    halt_and_check(vm, &mut reasons)?;
    let fitness: Vec<u64> = solutions.iter().map(|solution| solution.fitness).collect();
    print_demo_line(&format!(
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

/// Adds the hosts over ssh and waits for a load watcher on each. Returns the host names, by host
/// index.
pub(crate) fn add_hosts(vm: &Vm, say: fn(&str)) -> Result<BTreeMap<u16, String>> {
    let hosts = vm.bed().hosts();
    let others: Vec<&str> = hosts[1..].iter().map(|host| host.name()).collect();
    say(&format!(
        "the virtual machine runs on h1; adding {} over ssh",
        others.join(" ")
    ));
    vm.add(&others)?;
    wait_for(WAIT_TIMEOUT, || {
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

pub(crate) fn start_search(vm: &Vm, say: fn(&str)) -> Result<RunningCommand> {
    let folder = work_folder(vm);
    fs::create_dir_all(&folder)?;
    let problem = folder.join("school.xml");
    fs::write(&problem, timetable::problem(DEMO_SCHOOL, 1))?;
    say(&format!(
        "tablix2 looks for a timetable with {KERNEL_COUNT} kernels"
    ));
    let mut command = vm.command(vm.bed().host(1), "tablix2");
    command
        .args([
            "-n",
            &KERNEL_COUNT.to_string(),
            "-d",
            "3",
            "-p",
            FINISH_OPTION,
            "-o",
        ])
        .arg(folder.join("demo_"))
        .arg(&problem);
    RunningCommand::start(command, Stdio::null())
}

/// Waits until a kernel of tablix2 runs on the owner's host and the search has made progress.
fn wait_for_guests(vm: &Vm, search: &mut RunningCommand) -> Result<()> {
    let owned = vm.bed().host(OWNED_HOST).name();
    wait_for(WAIT_TIMEOUT, || {
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

/// Name of the tablix2 program that runs on each host.
pub(crate) const KERNEL_PROGRAM: &str = "tablix2_kernel";

fn is_kernel(name: &str) -> bool {
    name.ends_with(KERNEL_PROGRAM)
}

/// Returns the kernels that are still on a host, according to the console and to the host's process
/// table.
fn remaining_guests(vm: &Vm, host: &str) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for task in vm.tasks()? {
        if is_kernel(&task.name) && task.host.as_deref() == Some(host) {
            left.push(format!("the console still lists {} on {host}", task.tid));
        }
    }
    for (pid, line) in vm.bed().host(OWNED_HOST).processes() {
        if line.contains(KERNEL_PROGRAM) {
            left.push(format!("process {pid} ({line}) is still on {host}"));
        }
    }
    Ok(left)
}

/// Waits until a new task that names no host is placed on `host`, whose owner has logged out.
fn wait_until_host_is_used(vm: &Vm, host: &str) -> Result<()> {
    vm.compile_program("hold")?;
    wait_for(WAIT_TIMEOUT, || {
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
    print_demo_line(&format!(
        "{host} is used again: a new task was placed there"
    ));
    Ok(())
}

/// Returns what is wrong in the set of solutions; `None` if all solutions have all lessons.
pub(crate) fn solution_error(solutions: &[Solution]) -> Option<String> {
    let lessons = DEMO_SCHOOL.days * DEMO_SCHOOL.lessons_per_day * DEMO_SCHOOL.concurrent_lessons;
    let wrong = solutions.iter().any(|solution| solution.lessons != lessons);
    wrong.then(|| format!("a solution does not have all {lessons} lessons: {solutions:?}"))
}

/// Converts the result of each kernel with tablix2's own program, and checks it. Returns the
/// solutions.
pub(crate) fn read_solutions(vm: &Vm) -> Result<Vec<Solution>> {
    let folder = work_folder(vm);
    let mut solutions = Vec::new();
    for number in 0..KERNEL_COUNT {
        let table = folder.join(format!("demo_{number}.csv"));
        let mut command = vm.command(vm.bed().host(1), "tablix2_output");
        command
            .arg("-o")
            .arg(&table)
            .arg("csv")
            .arg(folder.join(format!("demo_result{number}.xml")));
        run_ok(command, WAIT_TIMEOUT)?;
        let text = fs::read_to_string(&table).with_context(|| table.display().to_string())?;
        solutions
            .push(timetable::check_solution(&text).with_context(|| format!("result {number}"))?);
    }
    if solutions.is_empty() {
        bail!("tablix2 has written no result");
    }
    Ok(solutions)
}

/// Halts the virtual machine. Adds a reason to `reasons` for each process or file that remains.
fn halt_and_check(vm: &Vm, reasons: &mut Vec<String>) -> Result<()> {
    vm.halt()?;
    let before = reasons.len();
    for host in vm.bed().hosts() {
        let files = host.leftover_files(vm.bed().folder());
        if !files.is_empty() {
            reasons.push(format!("halt left files on {}: {files:?}", host.name()));
        }
    }
    if reasons.len() == before {
        print_demo_line("halted; no process and no file is left on any host");
    }
    Ok(())
}
