//! What a task leaves behind is a guest of its host: it stops for the owner, is named, and ends
//! with `pvm kill`, an eviction and `pvm halt`. The tests observe real processes.

use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::TestOwnerAgent;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::{run_successfully, run_to_end};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Path of the program that acts as an owner agent.
const OWNER_AGENT_PROGRAM: &str = env!("CARGO_BIN_EXE_owner-speaks");
/// A computing process that is not ready to run and has used no processor time for this duration
/// counts as stopped.
const STOPPED_MIN: Duration = Duration::from_millis(700);

/// A task of the program `leaver`, and its computing child.
struct Parent {
    tid: String,
    child_pid: i32,
}

fn first_host_file(vm: &Vm, path: &str) -> Option<String> {
    let mut command = vm.testbed().host(1).root_command("cat");
    command.arg(path);
    let result = run_to_end(command, TIMEOUT).expect("cat runs");
    result.succeeded().then_some(result.stdout)
}

/// Returns the processor time of a process in clock ticks; `None` if the process has ended.
fn ticks(vm: &Vm, pid: i32) -> Option<u64> {
    Some(ticks_and_readiness(vm, pid)?.0)
}

/// Returns the processor time of a process in clock ticks, and true if the process is ready to run;
/// `None` if the process has ended.
fn ticks_and_readiness(vm: &Vm, pid: i32) -> Option<(u64, bool)> {
    let stat = first_host_file(vm, &format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    (fields[0] != "Z").then_some(())?;
    let ticks = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
    Some((ticks, fields[0] == "R"))
}

fn wait_until_stopped(vm: &Vm, pid: i32) {
    let mut last_change = (ticks(vm, pid), Instant::now());
    wait_for(TIMEOUT, || {
        let (current_ticks, is_ready) = ticks_and_readiness(vm, pid).ok_or("it has ended")?;
        if is_ready || Some(current_ticks) != last_change.0 {
            last_change = (Some(current_ticks), Instant::now());
        }
        match last_change.1.elapsed() >= STOPPED_MIN {
            true => Ok(()),
            false => Err(format!("it runs: {current_ticks} ticks")),
        }
    })
    .or_panic_with_logs(vm);
}

fn wait_until_running(vm: &Vm, pid: i32) {
    let first_ticks = ticks(vm, pid);
    wait_for(TIMEOUT, || match ticks(vm, pid) > first_ticks {
        true => Ok(()),
        false => Err(format!("it does not run: {first_ticks:?} ticks")),
    })
    .or_panic_with_logs(vm);
}

fn wait_until_gone(vm: &Vm, pid: i32) {
    wait_for(TIMEOUT, || match ticks(vm, pid) {
        None => Ok(()),
        Some(_) => Err(format!("process {pid} is there")),
    })
    .or_panic_with_logs(vm);
}

fn spawn_parent(vm: &Vm, mode: &str) -> Parent {
    let tid = vm.spawn_connected(&["leaver", mode]).expect("spawned");
    let task = vm.tasks().expect("tasks").into_iter();
    let pid = task
        .filter(|task| task.tid == tid)
        .map(|task| task.pid)
        .next()
        .expect("it is listed");
    let child_pid = wait_for(TIMEOUT, || {
        let threads = format!("/proc/{pid}/task/{pid}/children");
        let children = first_host_file(vm, &threads).unwrap_or_default();
        let child = children.split_whitespace().next();
        child
            .and_then(|pid| pid.parse().ok())
            .ok_or_else(|| "no child yet".to_string())
    })
    .or_panic_with_logs(vm);
    wait_until_running(vm, child_pid);
    Parent { tid, child_pid }
}

fn run_pvm(vm: &Vm, arguments: &[&str]) {
    let result = vm.run_pvm(arguments).expect("the console runs");
    assert!(result.succeeded(), "{arguments:?}: {result:?}");
}

fn wait_for_left_event(vm: &Vm, tid: &str) {
    vm.wait_for_event(TIMEOUT, "something is left", |entry| {
        matches!(&entry.kind, EventKind::ProcessesLeft { left, .. }
            if left.tid.to_string() == tid && left.processes == 1)
    })
    .or_panic_with_logs(vm);
}

/// Waits until `ps` lists the ended task with one process, stopped or not.
fn wait_until_listed(vm: &Vm, tid: &str, is_stopped: bool) {
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let is_expected = tasks
            .iter()
            .any(|task| task.tid == tid && task.left_processes == 1 && task.stopped == is_stopped);
        is_expected.then_some(()).ok_or(format!("{tasks:?}"))
    })
    .or_panic_with_logs(vm);
}

/// Runs `test` with the freezer, with signals instead, and without privileges.
fn with_each_mechanism(test: impl Fn(&Vm, &mut TestOwnerAgent)) {
    for (env, runs_as_alice) in [
        (&[][..], false),
        (&[("SEMPA_FREEZER", "off")][..], false),
        (&[][..], true),
    ] {
        let bed = require_testbed(1);
        let settings = VmSettings {
            env: VmSettings::owned_env(env),
            runs_as_alice,
            ..VmSettings::default()
        };
        let vm = Vm::start(&bed, settings).expect("a virtual machine");
        vm.compile_program("leaver").expect("gcc");
        let mut owner_agent = TestOwnerAgent::start(&vm, bed.host(1), OWNER_AGENT_PROGRAM);
        test(&vm, &mut owner_agent);
        vm.halt_and_wait().expect("halts");
    }
}

/// A child of a paused task that is killed stays stopped while the owner is there, and `pvm kill`
/// ends it.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn child_of_killed_guest_stays_stopped() {
    with_each_mechanism(|vm, owner_agent| {
        let parent = spawn_parent(vm, "child");
        owner_agent.send_directive("stop olga is there");
        wait_until_stopped(vm, parent.child_pid);
        run_pvm(vm, &["sig", "KILL", &parent.tid]);
        wait_for_left_event(vm, &parent.tid);
        wait_until_listed(vm, &parent.tid, true);
        wait_until_stopped(vm, parent.child_pid);
        owner_agent.send_directive("welcome olga has left");
        wait_until_running(vm, parent.child_pid);
        wait_until_listed(vm, &parent.tid, false);
        run_pvm(vm, &["kill", &parent.tid]);
        wait_until_gone(vm, parent.child_pid);
    });
}

/// A child that a killed task has left runs, as in PVM, until the owner comes; then it stops, and
/// the event names it. It ends with the virtual machine.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn child_left_before_owner_comes_stops() {
    with_each_mechanism(|vm, owner_agent| {
        let parent = spawn_parent(vm, "child");
        run_pvm(vm, &["kill", &parent.tid]);
        wait_for_left_event(vm, &parent.tid);
        wait_until_running(vm, parent.child_pid);
        owner_agent.send_directive("stop olga is there");
        vm.wait_for_event(TIMEOUT, "the pause names it", |entry| {
            matches!(&entry.kind, EventKind::GuestsPaused { leftovers, .. }
                if leftovers.iter().any(|left| left.tid.to_string() == parent.tid))
        })
        .or_panic_with_logs(vm);
        wait_until_stopped(vm, parent.child_pid);
    });
}

/// A policy that ends guests also ends what tasks have left behind.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn eviction_by_kill_ends_what_is_left() {
    with_each_mechanism(|vm, owner_agent| {
        let parent = spawn_parent(vm, "child");
        run_pvm(vm, &["kill", &parent.tid]);
        wait_for_left_event(vm, &parent.tid);
        let other_parent = spawn_parent(vm, "child");
        owner_agent.send_directive("kill 1 olga is there");
        wait_until_gone(vm, parent.child_pid);
        wait_until_gone(vm, other_parent.child_pid);
    });
}

/// A child between vfork and exec stops. If its parent is killed, the task ends, and the child is
/// what it has left.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn vfork_child_of_killed_guest_stays_stopped() {
    with_each_mechanism(|vm, owner_agent| {
        let parent = spawn_parent(vm, "vfork");
        owner_agent.send_directive("stop olga is there");
        wait_until_stopped(vm, parent.child_pid);
        run_pvm(vm, &["sig", "KILL", &parent.tid]);
        wait_until_listed(vm, &parent.tid, true);
        wait_for(TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
            let is_live =
                |task: &&sempa_tests::vm::Task| task.tid == parent.tid && task.left_processes == 0;
            match tasks.iter().find(is_live) {
                None => Ok(()),
                Some(task) => Err(format!("it is still listed as a task: {task:?}")),
            }
        })
        .or_panic_with_logs(vm);
        wait_until_stopped(vm, parent.child_pid);
    });
}

/// Moves a process of h1 into the outermost control group of version 2.
fn leave_control_group(vm: &Vm, pid: i32) {
    let script = format!(
        "g=$(awk '$0 ~ / - cgroup2 /{{print $5; exit}}' /proc/self/mountinfo); \
         [ -n \"$g\" ] && echo {pid} > \"$g/cgroup.procs\""
    );
    let mut command = vm.testbed().host(1).root_command("sh");
    command.args(["-c", &script]);
    run_successfully(command, TIMEOUT)
        .unwrap_or_else(|error| panic!("cannot run here: no control groups: {error:#}"));
}

/// A process that has left its task's control group stops like the others, also after the end of
/// the task.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn child_outside_control_group_stops() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.compile_program("leaver").expect("gcc");
    let mut owner_agent = TestOwnerAgent::start(&vm, bed.host(1), OWNER_AGENT_PROGRAM);
    let parent = spawn_parent(&vm, "child");
    leave_control_group(&vm, parent.child_pid);
    owner_agent.send_directive("stop olga is there");
    wait_until_stopped(&vm, parent.child_pid);
    owner_agent.send_directive("welcome olga has left");
    wait_until_running(&vm, parent.child_pid);
    run_pvm(&vm, &["kill", &parent.tid]);
    wait_for_left_event(&vm, &parent.tid);
    owner_agent.send_directive("stop olga is there");
    wait_until_listed(&vm, &parent.tid, true);
    wait_until_stopped(&vm, parent.child_pid);
    vm.halt_and_wait().expect("halts");
}
