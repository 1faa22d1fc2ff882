//! Tests that a task is called paused only when each of its processes was seen stopped.

mod common;

use checkpoint::proc;
use common::migration_steps::*;
use common::{
    FREEZER_OFF, MECHANISMS, Tasker, cpu_ticks, pause_and_wait, shell_path, tid, wait_until,
    wait_until_paused, wait_until_runs,
};
use sempa_proto::Micros;
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::path::Path;
use std::time::{Duration, Instant};

const IMMEDIATELY: Micros = Micros(0);

/// Returns the lowest number that is not a descriptor of a process.
fn lowest_free_descriptor(pid: i32) -> usize {
    let is_open = |number: &usize| Path::new(&format!("/proc/{pid}/fd/{number}")).exists();
    (0..).find(|number| !is_open(number)).expect("one is free")
}

/// Sets the number of descriptors that a process may open.
fn set_descriptor_limit(pid: i32, soft_limit: usize) {
    let status = std::process::Command::new("prlimit")
        .args([
            "--pid",
            &pid.to_string(),
            &format!("--nofile={soft_limit}:"),
        ])
        .status();
    assert!(status.expect("prlimit").success());
}

/// A tasker that cannot open a file calls no task stopped. When it can, it stops the task.
#[test]
#[ignore = "system tier: needs root"]
fn task_that_cannot_be_read_is_not_called_stopped() {
    assert!(common::can_make_namespaces(), "cannot run here: needs root");
    let no_engine = ("SEMPA_CRIU", "/nonexistent");
    for env in [&[no_engine][..], &[no_engine, FREEZER_OFF][..]] {
        let mut tasker = Tasker::start_with_env(env);
        let tasker_pid = tasker.child.id().cast_signed();
        // The failed probe of the engine, 1 s after the start, opens files.
        let probe_end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < probe_end {
            tasker.wait_briefly_for_message();
        }
        let script = "while :; do :; done";
        let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
        set_descriptor_limit(tasker_pid, lowest_free_descriptor(tasker_pid));
        wait_until_runs(pid);
        tasker.send(ToTasker::Pause {
            tid: tid(1),
            run_time: IMMEDIATELY,
        });
        tasker.wait_for_value(&mut Vec::new(), |message| match message {
            FromTasker::Paused { .. } => panic!("nothing shows that the task is stopped"),
            FromTasker::NotStopped { .. } => Some(()),
            _ => None,
        });
        if tasker.capabilities.freezer.is_ok() {
            // One descriptor is reserved for the freeze.
            let previous_ticks = cpu_ticks(pid);
            assert!(tasker.wait_briefly_for_message().is_none());
            assert_eq!(cpu_ticks(pid), previous_ticks);
        }
        set_descriptor_limit(tasker_pid, 1024);
        tasker.wait_for_value(&mut Vec::new(), |message| {
            matches!(message, FromTasker::Paused { .. }).then_some(())
        });
        let previous_ticks = cpu_ticks(pid);
        assert!(tasker.wait_briefly_for_message().is_none());
        assert_eq!(cpu_ticks(pid), previous_ticks);
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(pid);
        tasker.stop_and_wait();
    }
}

/// A process of a paused task that runs after a failed migration is stopped again. Only then the
/// task counts as stopped. A process that its task has stopped stays so.
#[test]
#[ignore = "system tier: needs CRIU"]
fn process_that_runs_after_a_failed_migration_is_stopped() {
    require_migration();
    let script = "(kill -STOP $(sh -c 'echo $PPID'); while :; do :; done) & \
        (while :; do :; done) & echo ready; while :; do :; done";
    for env in MECHANISMS {
        let mut tasker = Tasker::start_with_mechanism(env);
        let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
        tasker.wait_for_output(tid(1), &mut Vec::new(), |text| count_lines(text) == 1);
        let children = proc::children(pid).expect("it runs");
        let (stopped_pid, running_pid) = (children[0], children[1]);
        let is_stopped = || proc::stat(stopped_pid).is_some_and(|stat| stat.state == 'T');
        wait_until("the child has stopped itself", is_stopped);
        let mut messages = Vec::new();
        pause_and_wait(&mut tasker, IMMEDIATELY, &mut messages);
        for number in [1, 2] {
            let migration = common::migration_id(number);
            stop_and_wait(&mut tasker, tid(1), migration, &mut messages);
            let running_pid = nix::unistd::Pid::from_raw(running_pid);
            nix::sys::signal::kill(running_pid, nix::sys::signal::Signal::SIGCONT).expect("sent");
            continue_and_wait(&mut tasker, tid(1), migration, &mut messages);
            wait_until_paused(&mut tasker, &mut messages);
            let previous_ticks = [pid, running_pid.as_raw()].map(cpu_ticks);
            assert!(tasker.wait_briefly_for_message().is_none());
            assert_eq!([pid, running_pid.as_raw()].map(cpu_ticks), previous_ticks);
        }
        tasker.send(ToTasker::Resume { tid: tid(1) });
        wait_until_runs(pid);
        wait_until_runs(running_pid);
        assert!(is_stopped());
        tasker.stop_and_wait();
    }
}
