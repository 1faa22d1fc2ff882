//! `cargo xtask demo`: tasks of a running PVM program migrate off a host whose owner logs in.
//!
//! The demo creates four hosts on this machine, each with the tasker service. The ordinary user
//! alice runs Debian's unmodified tablix2 on them; olga logs in on one of them by ssh. Then the
//! demo prints what the virtual machine did. All processes are in namespaces that end with this
//! process, so nothing remains after an interrupted demo.

use crate::demo_output::print_demo_line;
use crate::timeline::{LiveTimeline, Timeline};
use crate::{one_host_demo, setup};
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::event::EventKind;
use sempa_tests::run::{RunningCommand, run_successfully};
use sempa_tests::ssh::SshLogin;
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::timetable::{self, DEMO_SCHOOL, FINISH_OPTION, Solution};
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, requirements, wait_for};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use xtask_install::{self as install, BuildParts};

/// Time limit for each condition that the demo waits for, long enough for a loaded machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the search of tablix2, long enough for a slow machine.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(600);
/// Minimum duration of tablix2's search. A shorter search could end before the login.
const SEARCH_DURATION_MIN: Duration = Duration::from_secs(20);
/// Number of tablix2's kernels: one for each host.
const KERNEL_COUNT: usize = 4;
/// Number of the host whose owner logs in.
const OWNED_HOST: usize = 2;

/// The results of the demo, as they are written to the JSON file.
#[derive(Debug, Serialize)]
struct DemoOutcome {
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

/// Runs the demo on four hosts. Writes the results to the file `json_file`. Returns false if a
/// check fails.
///
/// # Errors
/// A step cannot be performed.
pub(crate) fn run(json_file: &Path) -> Result<bool> {
    let prefix = build_and_install(&[])?;
    if let Some(missing_requirement) = requirements::unmet_requirement() {
        println!(
            "demo: {missing_requirement}; so the demo has no login and no migration, only a virtual machine of this one host"
        );
        return one_host_demo::run(&prefix);
    }
    with_test_hosts(&prefix, KERNEL_COUNT, |vm| {
        let outcome = run_scenario(vm).inspect_err(|_| eprintln!("{}", vm.events_and_logs()))?;
        save_json(json_file, &outcome)?;
        for reason in &outcome.reasons {
            println!("demo: NOT GOOD: {reason}");
        }
        if outcome.good {
            print_demo_line("everything held");
        }
        Ok(outcome.good)
    })
}

/// Builds and installs what a demo needs, and the further `packages`. Returns the prefix of the
/// installation.
///
/// # Errors
/// A step cannot be performed.
pub(crate) fn build_and_install(packages: &[&str]) -> Result<PathBuf> {
    setup::set_up_all()?;
    print_demo_line("building (release)");
    let profile = install::build_profile()?;
    install::build(&profile, BuildParts::ProgramsAndHosts)?;
    if !packages.is_empty() {
        let mut command =
            install::cargo_command(&["build", "--locked", "--profile", profile.as_str()])?;
        command.args(packages.iter().flat_map(|name| ["--package", name]));
        ensure!(command.status()?.success(), "the build failed");
    }
    let prefix = install::target_folder()?.join("sempa-prefix");
    install::install_files(&prefix, &profile)?;
    Ok(prefix.canonicalize()?)
}

/// Runs `scenario` on a virtual machine of the ordinary user alice, whose master is on the first of
/// `host_count` hosts, each with the tasker service.
///
/// # Errors
/// The hosts or the virtual machine cannot be started, or `scenario` fails.
pub(crate) fn with_test_hosts<T>(
    prefix: &Path,
    host_count: usize,
    scenario: impl FnOnce(&Vm) -> Result<T>,
) -> Result<T> {
    print_demo_line(&format!(
        "making {host_count} hosts, each with its own network, files, processes and sshd"
    ));
    let testbed = Testbed::new(host_count, Some(prefix), &[])?;
    let key_dir = install::target_folder()?.canonicalize()?;
    let _services = TaskerServices::start(&testbed, &key_dir)?;
    print_demo_line("the tasker service runs on each host; alice is an ordinary user");
    let rm_command = "pvm-rm --policy load".to_string();
    let vm = Vm::start(
        &testbed,
        VmSettings {
            rm_command: Some(rm_command),
            runs_as_alice: true,
            ..VmSettings::default()
        },
    )?;
    scenario(&vm)
}

/// Writes the results of a demo to a JSON file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn save_json(json_file: &Path, outcome: &impl Serialize) -> Result<()> {
    let json_path = if json_file.is_absolute() {
        json_file.to_path_buf()
    } else {
        xtask_install::project_folder().join(json_file)
    };
    if let Some(folder) = json_path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(&json_path, serde_json::to_vec_pretty(outcome)?)
        .with_context(|| json_path.display().to_string())?;
    print_demo_line(&format!("the same as JSON: {}", json_path.display()));
    Ok(())
}

fn run_scenario(vm: &Vm) -> Result<DemoOutcome> {
    let host_names = add_hosts(vm, print_demo_line)?;
    let (index, owned_host) = (
        host_index(&host_names, OWNED_HOST)?,
        vm.testbed().host(OWNED_HOST),
    );
    let search_start = Instant::now();
    let mut search = start_search(vm, print_demo_line)?;
    wait_for_guests(vm, &mut search)?;
    print_demo_line(&format!(
        "olga logs into {} over ssh, with a terminal",
        owned_host.name()
    ));
    let login = SshLogin::log_in(vm.testbed(), "olga", owned_host)?;
    print_until_clean(vm, index, &host_names)?;
    let mut reasons = remaining_guests(vm, owned_host.name())?;
    print_demo_line(&format!(
        "{} is clean; olga works, then logs out",
        owned_host.name()
    ));
    login.log_out()?;
    vm.wait_for_event(
        WAIT_TIMEOUT,
        "event that says the owner has left",
        |entry| matches!(entry.kind, EventKind::OwnerAbsent { host, .. } if host.index() == index),
    )?;
    if let Err(error) = wait_until_host_is_used(vm, owned_host.name()) {
        reasons.push(format!("{error:#}"));
    }
    print_demo_line("waiting for tablix2 to end by itself");
    let search_result = search.wait_or_kill(SEARCH_TIMEOUT)?;
    let search_duration = search_start.elapsed();
    if !search_result.succeeded() {
        reasons.push(format!(
            "tablix2 ended with {}: {}",
            search_result.status,
            search_result.stderr.trim()
        ));
    }
    if search_duration < SEARCH_DURATION_MIN {
        reasons.push(format!(
            "tablix2 ran only {:.1} s",
            search_duration.as_secs_f64()
        ));
    }
    let solutions = read_solutions(vm)?;
    reasons.extend(solution_error(&solutions));
    let timeline = Timeline::from_events(index, &host_names, &vm.events()?);
    match &timeline {
        Some(timeline) => reasons.extend(timeline.missing_events()),
        None => reasons.push("the event log knows of no login".to_string()),
    }
    if !reasons.is_empty() {
        eprintln!("{}", vm.events_and_logs());
    }
    halt_and_check_leftovers(vm, &mut reasons)?;
    let fitness: Vec<u64> = solutions.iter().map(|solution| solution.fitness).collect();
    print_demo_line(&format!(
        "tablix2 ran {:.1} s, ended with {}, {} timetables without a mandatory error (unmet wishes: {fitness:?})",
        search_duration.as_secs_f64(),
        search_result.status,
        solutions.len()
    ));
    Ok(DemoOutcome {
        good: reasons.is_empty(),
        reasons,
        timeline,
        search_s: search_duration.as_secs_f64(),
        fitness,
    })
}

/// Prints the timeline of the login while its events happen, until the host is clean.
fn print_until_clean(vm: &Vm, index: u16, host_names: &BTreeMap<u16, String>) -> Result<()> {
    let mut live_timeline = LiveTimeline::default();
    wait_for(WAIT_TIMEOUT, || {
        let events = vm.events().map_err(|error| error.to_string())?;
        live_timeline.print_new(index, host_names, &events);
        let is_clean = |kind: &EventKind| matches!(kind, EventKind::HostVacated { host } if host.index() == index);
        match events.iter().any(|entry| is_clean(&entry.kind)) {
            true => Ok(()),
            false => Err("no clean host after the login".to_string()),
        }
    })?;
    println!();
    Ok(())
}

/// Adds the hosts over ssh, and waits until a load watcher runs on each host. Prints the progress
/// with `print_line`. Returns the host names by host index.
pub(crate) fn add_hosts(vm: &Vm, print_line: fn(&str)) -> Result<BTreeMap<u16, String>> {
    let hosts = vm.testbed().hosts();
    let added_names: Vec<&str> = hosts[1..].iter().map(|host| host.name()).collect();
    print_line(&format!(
        "the virtual machine runs on h1; adding {} over ssh",
        added_names.join(" ")
    ));
    vm.add_hosts(&added_names)?;
    wait_for(WAIT_TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let has_watcher = |name: &str| {
            tasks.iter().any(|task| {
                task.name.ends_with("pvm-load-watcher") && task.host.as_deref() == Some(name)
            })
        };
        match hosts.iter().find(|host| !has_watcher(host.name())) {
            Some(host) => Err(format!("no load watcher on {}", host.name())),
            None => Ok(()),
        }
    })?;
    let configuration = vm
        .pvm_json(&["conf"])?
        .pop()
        .context("conf prints one value")?;
    let mut host_names = BTreeMap::new();
    for host in configuration["hosts"]
        .as_array()
        .context("conf lists the hosts")?
    {
        let index = host["index"]
            .as_u64()
            .and_then(|index| u16::try_from(index).ok())
            .context("an index")?;
        host_names.insert(index, host["name"].as_str().context("a name")?.to_string());
    }
    ensure!(
        host_names.len() == hosts.len(),
        "{} hosts are in the virtual machine: {host_names:?}",
        host_names.len()
    );
    print_line("the resource manager is registered and every host has a load watcher");
    Ok(host_names)
}

fn host_index(names: &BTreeMap<u16, String>, host_number: usize) -> Result<u16> {
    let host_name = format!("h{host_number}");
    let host_entry = names.iter().find(|(_, name)| **name == host_name);
    host_entry
        .map(|(index, _)| *index)
        .with_context(|| format!("{host_name} is not in {names:?}"))
}

fn work_folder(vm: &Vm) -> PathBuf {
    vm.user_home().join("timetable")
}

pub(crate) fn start_search(vm: &Vm, print_line: fn(&str)) -> Result<RunningCommand> {
    let folder = work_folder(vm);
    fs::create_dir_all(&folder)?;
    let problem_path = folder.join("school.xml");
    fs::write(&problem_path, timetable::problem_xml(DEMO_SCHOOL, 1))?;
    chown(&folder, Some(vm.user_id()), None)?;
    print_line(&format!(
        "tablix2 looks for a timetable with {KERNEL_COUNT} kernels"
    ));
    let mut command = vm.user_command(vm.testbed().host(1), "tablix2");
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
        .arg(&problem_path);
    RunningCommand::start(command, Stdio::null())
}

/// Waits until a kernel of tablix2 runs on the owner's host and the search has made progress.
fn wait_for_guests(vm: &Vm, search: &mut RunningCommand) -> Result<()> {
    let owned_name = vm.testbed().host(OWNED_HOST).name();
    wait_for(WAIT_TIMEOUT, || {
        if let Ok(Some(status)) = search.poll_status() {
            let exit_text =
                search.stderr_so_far().unwrap_or_default() + &search.stdout_so_far().unwrap_or_default();
            return Ok(Err(format!(
                "tablix2 ended early, {status}: {}",
                exit_text.trim()
            )));
        }
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let is_kernel_on_host = tasks
            .iter()
            .any(|task| is_kernel(&task.name) && task.host.as_deref() == Some(owned_name));
        let search_output =
            search.stdout_so_far().unwrap_or_default() + &search.stderr_so_far().unwrap_or_default();
        match (is_kernel_on_host, search_output.contains(" reports ")) {
            (true, true) => Ok(Ok(())),
            (is_kernel_on_host, has_progress) => Err(format!(
                "kernel on {owned_name}: {is_kernel_on_host}, progress reported: {has_progress}; tasks: {tasks:?}"
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

/// Returns descriptions of the kernels that still run on a host, according to the console or to the
/// host's process table.
fn remaining_guests(vm: &Vm, host_name: &str) -> Result<Vec<String>> {
    let mut guest_notes = Vec::new();
    for task in vm.tasks()? {
        if is_kernel(&task.name) && task.host.as_deref() == Some(host_name) {
            guest_notes.push(format!(
                "the console still lists {} on {host_name}",
                task.tid
            ));
        }
    }
    for (pid, line) in vm.testbed().host(OWNED_HOST).processes() {
        if line.contains(KERNEL_PROGRAM) {
            guest_notes.push(format!("process {pid} ({line}) is still on {host_name}"));
        }
    }
    Ok(guest_notes)
}

/// Waits until the virtual machine places a new task on `host`, whose owner has logged out. The
/// task does not request a host.
fn wait_until_host_is_used(vm: &Vm, host: &str) -> Result<()> {
    vm.compile_program("hold")?;
    wait_for(WAIT_TIMEOUT, || {
        let try_placement = || -> Result<bool> {
            let tid = vm.spawn_connected(&["hold", "1"])?;
            let placed_host = vm.host_of(&tid)?;
            vm.run_pvm(&["kill", &tid])?;
            Ok(placed_host == host)
        };
        match try_placement() {
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

/// Returns a description of the error in the solutions; `None` if each solution has all lessons.
pub(crate) fn solution_error(solutions: &[Solution]) -> Option<String> {
    let expected_lessons =
        DEMO_SCHOOL.day_count * DEMO_SCHOOL.lessons_per_day * DEMO_SCHOOL.concurrent_lesson_count;
    let is_incomplete = solutions
        .iter()
        .any(|solution| solution.lesson_count != expected_lessons);
    is_incomplete
        .then(|| format!("a solution does not have all {expected_lessons} lessons: {solutions:?}"))
}

/// Converts the result of each kernel with tablix2's own program, and parses the converted file.
/// Returns the solutions.
pub(crate) fn read_solutions(vm: &Vm) -> Result<Vec<Solution>> {
    let folder = work_folder(vm);
    let mut solutions = Vec::new();
    for kernel_number in 0..KERNEL_COUNT {
        let csv_path = folder.join(format!("demo_{kernel_number}.csv"));
        let mut command = vm.user_command(vm.testbed().host(1), "tablix2_output");
        command
            .arg("-o")
            .arg(&csv_path)
            .arg("csv")
            .arg(folder.join(format!("demo_result{kernel_number}.xml")));
        run_successfully(command, WAIT_TIMEOUT)?;
        let text = fs::read_to_string(&csv_path).with_context(|| csv_path.display().to_string())?;
        solutions.push(
            timetable::check_solution(&text).with_context(|| format!("result {kernel_number}"))?,
        );
    }
    if solutions.is_empty() {
        bail!("tablix2 has written no result");
    }
    Ok(solutions)
}

/// Halts the virtual machine. Adds a reason to `reasons` for each process or file that remains on a
/// host after [`WAIT_TIMEOUT`]. The tasker service forgets an ended tasker shortly after its end.
pub(crate) fn halt_and_check_leftovers(vm: &Vm, reasons: &mut Vec<String>) -> Result<()> {
    vm.halt_and_wait()?;
    let previous_count = reasons.len();
    for host in vm.testbed().hosts() {
        let no_files = wait_for(WAIT_TIMEOUT, || {
            let files = host.leftover_files(vm.testbed().folder());
            match files.is_empty() {
                true => Ok(()),
                false => Err(format!("halt left files on {}: {files:?}", host.name())),
            }
        });
        if let Err(error) = no_files {
            reasons.push(format!("{error:#}"));
        }
    }
    if reasons.len() == previous_count {
        print_demo_line("halted; no process and no file is left on any host");
    }
    Ok(())
}
