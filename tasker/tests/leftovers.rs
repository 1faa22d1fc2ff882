//! Tests that everything in a task's PID namespace stops: children of an ended task, processes that
//! have left the control group, and children between vfork and exec.

mod common;

use checkpoint::proc;
use common::migration_steps::{
    compile_program, count_lines, kill_source_and_wait, stop_and_wait as stop_for_migration,
};
use common::{
    MECHANISMS, Tasker, can_make_namespaces, cpu_ticks, is_alive, migration_id, shell_path,
    start_order, tid, wait_until, wait_until_runs,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::cgroup;
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{Micros, Tid};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// A task that starts a computing child, prints the word "ready" and waits.
const PARENT_SCRIPT: &str = "(while :; do :; done) & echo ready; wait";

/// Asserts that a process uses no processor time while the tasker has nothing to say for a moment.
fn assert_stands_still(tasker: &mut Tasker, pid: i32) {
    let previous_ticks = cpu_ticks(pid);
    for _ in 0..5 {
        let message = tasker.wait_briefly_for_report();
        assert!(message.is_none(), "{message:?}");
    }
    assert_eq!(cpu_ticks(pid), previous_ticks, "process {pid} runs");
}

/// Returns the only child of a process.
fn child_of(pid: i32) -> i32 {
    wait_until("there is a child", || {
        proc::children(pid).is_some_and(|children| children.len() == 1)
    });
    proc::children(pid).expect("it is there")[0]
}

/// Starts [`PARENT_SCRIPT`]. Returns the PIDs of the task's first process and of its child.
fn start_parent(tasker: &mut Tasker) -> (i32, i32) {
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", PARENT_SCRIPT]);
    tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
    (pid, child_of(pid))
}

fn pause_and_wait(tasker: &mut Tasker) {
    tasker.send(ToTasker::Pause {
        tid: tid(1),
        run_time: Micros(0),
    });
    tasker.wait_for_value(&mut Vec::new(), |message| {
        matches!(message, FromTasker::Paused { .. }).then_some(())
    });
}

/// Sends SIGKILL to the task's first process. Waits for the reports of what is left and of the end,
/// in this order. Returns the number of processes left and their PIDs.
fn kill_first_process(tasker: &mut Tasker) -> (u32, Vec<i32>) {
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGKILL,
    });
    let left = tasker.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::LeftBehind {
            tid: left_tid,
            process_count,
            pids,
        } => {
            assert_eq!(*left_tid, tid(1));
            Some((*process_count, pids.clone()))
        }
        FromTasker::Exited { .. } => panic!("the end was reported first"),
        _ => None,
    });
    let (_, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, libc::SIGKILL);
    left
}

fn wait_until_none_left(tasker: &mut Tasker, ended_tid: Tid) {
    tasker.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::LeftBehind {
            tid,
            process_count: 0,
            ..
        } if *tid == ended_tid => Some(()),
        _ => None,
    });
}

fn wait_until_leftovers_stopped(tasker: &mut Tasker) {
    tasker.wait_for_value(&mut Vec::new(), |message| {
        matches!(message, FromTasker::LeftoversStopped { .. }).then_some(())
    });
}

fn stop_leftovers_and_wait(tasker: &mut Tasker) {
    tasker.send(ToTasker::StopLeftovers { tid: tid(1) });
    wait_until_leftovers_stopped(tasker);
}

/// Lets the only process that the task has left behind run, and kills the process.
fn resume_and_kill_leftover(tasker: &mut Tasker, pid: i32) {
    tasker.send(ToTasker::ResumeLeftovers { tid: tid(1) });
    wait_until_runs(pid);
    tasker.send(ToTasker::KillLeftovers { tid: tid(1) });
    wait_until_none_left(tasker, tid(1));
    assert!(!is_alive(pid));
}

/// Runs `test` with the mechanism of this host and with signals. Without the right to create
/// namespaces both are the same.
fn with_each_mechanism(test: impl Fn(&mut Tasker)) {
    for env in MECHANISMS {
        let mut tasker = Tasker::start_with_mechanism(env);
        test(&mut tasker);
        tasker.stop_and_wait();
    }
}

/// A child of a paused task that is killed stays stopped, is counted, runs when guests are welcome,
/// and is killed on request.
#[test]
fn killed_task_leaves_stopped_child() {
    with_each_mechanism(|tasker| {
        let (_, child) = start_parent(tasker);
        pause_and_wait(tasker);
        let left = kill_first_process(tasker);
        assert_eq!(left, (1, vec![child]));
        wait_until_leftovers_stopped(tasker);
        assert_stands_still(tasker, child);
        resume_and_kill_leftover(tasker, child);
    });
}

/// A child that a task has left behind before the owner comes stops when the owner comes.
#[test]
fn left_child_stops_with_a_pause() {
    with_each_mechanism(|tasker| {
        let (_, child) = start_parent(tasker);
        let left = kill_first_process(tasker);
        assert_eq!(left, (1, vec![child]));
        wait_until_runs(child);
        stop_leftovers_and_wait(tasker);
        assert_stands_still(tasker, child);
        tasker.send(ToTasker::ResumeLeftovers { tid: tid(1) });
        wait_until_runs(child);
    });
}

/// A child with a session of its own belongs to the task, also after it has become an orphan.
#[test]
fn task_stops_with_child_of_own_session() {
    let script = "setsid sh -c '(while :; do :; done) & echo ready; wait' & wait";
    with_each_mechanism(|tasker| {
        let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
        tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
        let computing_child = child_of(child_of(pid));
        pause_and_wait(tasker);
        assert_stands_still(tasker, computing_child);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(computing_child);
    });
}

/// A child of a task whose first process dies while the task is stopped for a migration does not
/// run while its copy runs at the target: it runs when the daemon says that there is none, and is
/// killed with the source otherwise.
#[test]
#[ignore = "system tier: needs root"]
fn leftover_of_a_migration_waits_for_the_decision() {
    assert!(can_make_namespaces(), "cannot run here: needs root");
    for continues_at_target in [false, true] {
        with_each_mechanism(|tasker| {
            let (pid, child) = start_parent(tasker);
            stop_for_migration(tasker, tid(1), migration_id(1), &mut Vec::new());
            kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it exists");
            tasker.wait_for_exit(tid(1));
            assert_stands_still_after_reports(tasker, child);
            if continues_at_target {
                kill_source_and_wait(tasker, tid(1), migration_id(1), &mut Vec::new());
                wait_until_none_left(tasker, tid(1));
                assert!(!is_alive(child));
            } else {
                tasker.send(ToTasker::ResumeLeftovers { tid: tid(1) });
                wait_until_runs(child);
            }
        });
    }
}

/// The processes that a task has left behind end with the tasker.
#[test]
fn leftovers_end_with_the_tasker() {
    let mut tasker = Tasker::start();
    let (_, child) = start_parent(&mut tasker);
    kill_first_process(&mut tasker);
    assert!(is_alive(child));
    tasker.stop_and_wait();
    wait_until("the child has ended", || !is_alive(child));
}

/// A task that leaves nothing behind is not reported, and the last process that ends is.
#[test]
fn end_of_last_leftover_is_reported() {
    let mut tasker = Tasker::start();
    let script = "(read x < \"$1\") & echo ready; wait";
    let dir = tempfile::tempdir().expect("a directory");
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a fifo");
    let fifo_text = fifo.to_str().expect("text");
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script, "sh", fifo_text]);
    tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
    assert_eq!(kill_first_process(&mut tasker).0, 1);
    fs::write(&fifo, "go\n").expect("the child reads");
    wait_until_none_left(&mut tasker, tid(1));
    tasker.start_task_and_wait(tid(2), &shell_path(), &["-c", "true"]);
    let mut messages = Vec::new();
    tasker.wait_for_value(&mut messages, |message| {
        matches!(message, FromTasker::Exited { .. }).then_some(())
    });
    let is_left = |message: &FromTasker| matches!(message, FromTasker::LeftBehind { .. });
    assert!(!messages.iter().any(is_left), "{messages:?}");
    tasker.stop_and_wait();
}

/// Returns the directory of the outermost control group of version 2.
fn outermost_group() -> PathBuf {
    let mounts = fs::read("/proc/self/mountinfo").expect("the kernel has it");
    cgroup::find_mount_point(&mounts, None)
        .unwrap_or_else(|| panic!("cannot run here: control groups of version 2 are not mounted"))
}

/// A task, or a child of it, that has left the control group is stopped and resumed like the
/// others. A process that was already stopped stays so.
#[test]
#[ignore = "system tier: needs root and control groups"]
fn process_outside_its_control_group_stops() {
    assert!(can_make_namespaces(), "cannot run here: needs root");
    for leaves_child in [false, true] {
        let mut tasker = Tasker::start();
        let freezer = &tasker.capabilities.freezer;
        assert!(freezer.is_ok(), "cannot run here: {freezer:?}");
        let (pid, child) = start_parent(&mut tasker);
        let script = "while :; do :; done";
        let stopped_pid = tasker.start_task_and_wait(tid(2), &shell_path(), &["-c", script]);
        let leaving_pids = if leaves_child {
            vec![child]
        } else {
            vec![pid, child]
        };
        for leaving_pid in leaving_pids {
            fs::write(
                outermost_group().join("cgroup.procs"),
                leaving_pid.to_string(),
            )
            .expect("it moves");
        }
        wait_until_runs(child);
        pause_and_wait(&mut tasker);
        assert_stands_still(&mut tasker, child);
        wait_until_runs(stopped_pid);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(child);
        // The processes stay members of the task, also after its end.
        pause_and_wait(&mut tasker);
        assert_eq!(kill_first_process(&mut tasker), (1, vec![child]));
        assert_stands_still_after_reports(&mut tasker, child);
        tasker.send(ToTasker::ResumeLeftovers { tid: tid(1) });
        wait_until_runs(child);
        tasker.stop_and_wait();
        assert!(!is_alive(child));
    }
}

fn assert_stands_still_after_reports(tasker: &mut Tasker, pid: i32) {
    tasker.wait_for_value(&mut Vec::new(), |message| {
        matches!(message, FromTasker::LeftoversStopped { .. }).then_some(())
    });
    assert_stands_still(tasker, pid);
}

/// A process that leaves the frozen control group is stopped again.
#[test]
#[ignore = "system tier: needs root and control groups"]
fn process_that_leaves_a_frozen_group_is_stopped_again() {
    assert!(can_make_namespaces(), "cannot run here: needs root");
    let mut tasker = Tasker::start();
    let freezer = &tasker.capabilities.freezer;
    assert!(freezer.is_ok(), "cannot run here: {freezer:?}");
    let (_, child) = start_parent(&mut tasker);
    pause_and_wait(&mut tasker);
    fs::write(outermost_group().join("cgroup.procs"), child.to_string()).expect("it moves");
    tasker.wait_for_value(&mut Vec::new(), |message| {
        matches!(message, FromTasker::Paused { .. }).then_some(())
    });
    assert_stands_still(&mut tasker, child);
    tasker.send(ToTasker::Resume { tid: tid(1) });
    wait_until_runs(child);
    tasker.stop_and_wait();
}

/// A child between vfork and exec is stopped for a pause, and what remains of a killed task in
/// vfork is its child.
#[test]
#[ignore = "system tier: needs gcc"]
fn vfork_child_stops_and_is_left_behind() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = compile_program(dir.path(), "vfork_child");
    let check = |tasker: &mut Tasker, arguments: &[&str]| {
        let pid = tasker.start_task_and_wait(tid(1), &program, arguments);
        tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
        let child = child_of(pid);
        wait_until_runs(child);
        pause_and_wait(tasker);
        assert_stands_still(tasker, child);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(child);
        pause_and_wait(tasker);
        assert_eq!(kill_first_process(tasker), (1, vec![child]));
        assert_stands_still_after_reports(tasker, child);
        tasker.send(ToTasker::KillLeftovers { tid: tid(1) });
        wait_until_none_left(tasker, tid(1));
    };
    with_each_mechanism(|tasker| check(tasker, &[]));
    with_each_mechanism(|tasker| check(tasker, &["threads"]));
}

/// Returns the child of the tasker with the name `name` that is not `first_pid`.
fn other_process_with_name(tasker: &Tasker, name: &str, first_pid: i32) -> i32 {
    let tasker_pid = tasker.child.id().cast_signed();
    let is_other =
        |stat: &proc::Stat| stat.ppid == tasker_pid && stat.comm == name && stat.pid != first_pid;
    let find = || {
        let pids = proc::process_ids().expect("the kernel lists them");
        let mut stats = pids.into_iter().filter_map(proc::stat);
        stats.find(|stat| is_other(stat)).map(|stat| stat.pid)
    };
    wait_until("the process exists", || find().is_some());
    find().expect("it exists")
}

/// A child that the task has made a child of the tasker belongs to the task, also after the end of
/// the first process.
#[test]
#[ignore = "system tier: needs gcc"]
fn tasker_child_is_left_behind() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = compile_program(dir.path(), "clone_parent");
    with_each_mechanism(|tasker| {
        let pid = tasker.start_task_and_wait(tid(1), &program, &[]);
        tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
        let child = other_process_with_name(tasker, "clone_parent", pid);
        pause_and_wait(tasker);
        assert_stands_still(tasker, child);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(child);
        assert_eq!(kill_first_process(tasker), (1, vec![child]));
        wait_until_runs(child);
        stop_leftovers_and_wait(tasker);
        assert_stands_still(tasker, child);
        // The namespace does not end while the process exists.
        resume_and_kill_leftover(tasker, child);
    });
}

/// A process that another program has created in the namespace of a task is left behind by the
/// task.
#[test]
#[ignore = "system tier: needs root"]
fn injected_process_is_left_behind() {
    assert!(can_make_namespaces(), "cannot run here: needs root");
    with_each_mechanism(|tasker| {
        let script = "echo ready; sleep 1000";
        let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
        tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
        let mut injector = Command::new("nsenter")
            .args(["--pid", "--target", &pid.to_string(), "--"])
            .args(["sh", "-c", "while :; do :; done"])
            .spawn()
            .expect("nsenter");
        let injected_pid = child_of(injector.id().cast_signed());
        pause_and_wait(tasker);
        assert_stands_still(tasker, injected_pid);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(injected_pid);
        let (_, left_pids) = kill_first_process(tasker);
        assert!(left_pids.contains(&injected_pid), "{left_pids:?}");
        stop_leftovers_and_wait(tasker);
        assert_stands_still(tasker, injected_pid);
        tasker.send(ToTasker::KillLeftovers { tid: tid(1) });
        // The injector stops itself while its child is stopped, and reaps it afterwards.
        kill(Pid::from_raw(injector.id().cast_signed()), Signal::SIGCONT).expect("it exists");
        wait_until_none_left(tasker, tid(1));
        injector.wait().expect("it is a child");
    });
}

/// Processes that continue one another stop for a pause, also before they are left behind and
/// after.
#[test]
#[ignore = "system tier: needs gcc"]
fn processes_that_continue_one_another_stop() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = compile_program(dir.path(), "continuer");
    with_each_mechanism(|tasker| {
        let pid = tasker.start_task_and_wait(tid(1), &program, &[]);
        tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
        let child = child_of(pid);
        for _ in 0..3 {
            wait_until_runs(pid);
            pause_and_wait(tasker);
            assert_stands_still(tasker, pid);
            assert_stands_still(tasker, child);
            tasker.send(ToTasker::Resume { tid: tid(1) });
        }
        assert_eq!(kill_first_process(tasker), (1, vec![child]));
        stop_leftovers_and_wait(tasker);
        assert_stands_still(tasker, child);
    });
}

/// A process that has left the control group stops, also while another one waits in the kernel, so
/// that the group is not frozen. Only the process that waits is named.
#[test]
#[ignore = "system tier: needs root, control groups and gcc"]
fn process_in_the_kernel_does_not_delay_others() {
    assert!(can_make_namespaces(), "cannot run here: needs root");
    let dir = tempfile::tempdir().expect("a directory");
    let mut tasker = Tasker::start();
    let freezer = &tasker.capabilities.freezer;
    assert!(freezer.is_ok(), "cannot run here: {freezer:?}");
    let program = compile_program(dir.path(), "blocked");
    let pid = tasker.start_task_and_wait(tid(1), &program, &[]);
    tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
    let child = child_of(pid);
    fs::write(outermost_group().join("cgroup.procs"), child.to_string()).expect("it moves");
    wait_until("the parent waits in the kernel", || {
        proc::stat(pid).is_some_and(|stat| stat.state == 'D')
    });
    wait_until_runs(child);
    tasker.send(ToTasker::Pause {
        tid: tid(1),
        run_time: Micros(0),
    });
    let unstopped_pids = tasker.wait_for_value(&mut Vec::new(), |message| match message {
        FromTasker::Paused { .. } => panic!("the task has not stopped"),
        FromTasker::NotStopped { pids, .. } => Some(pids.clone()),
        _ => None,
    });
    assert_eq!(unstopped_pids, [pid]);
    assert_stands_still(&mut tasker, child);
    tasker.send(ToTasker::Resume { tid: tid(1) });
    wait_until_runs(child);
    tasker.stop_and_wait();
}

/// Processes of a task without a namespace that fork and exit in turns are not forgotten, although
/// a single reading of /proc may not contain them.
#[test]
#[ignore = "system tier: needs gcc"]
fn chain_of_processes_is_not_forgotten() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = compile_program(dir.path(), "chain");
    let mut tasker = Tasker::start();
    let mut order = start_order(tid(1), &program, &[]);
    order.pinned = true;
    tasker.send(ToTasker::Start(order));
    tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGKILL,
    });
    let left_count = |message: &FromTasker| match message {
        FromTasker::LeftBehind { process_count, .. } => Some(*process_count),
        _ => None,
    };
    let first_count = tasker.wait_for_value(&mut Vec::new(), left_count);
    assert!(first_count > 0);
    let watched_until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < watched_until {
        let message = tasker.wait_briefly_for_message();
        assert_ne!(message.as_ref().and_then(left_count), Some(0));
    }
    tasker.send(ToTasker::KillLeftovers { tid: tid(1) });
    wait_until_none_left(&mut tasker, tid(1));
    tasker.stop_and_wait();
}
