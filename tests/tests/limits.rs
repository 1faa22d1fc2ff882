//! Message sizes and numbers of tasks that PVM 3.4.6 does not support.
//!
//! By default the tests use smaller sizes. With `SEMPA_TEST_FULL=1` the sizes exceed the limits of
//! PVM itself.

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use procfs::{Current, Meminfo};
use sempa_tests::faults::{
    Fault, FaultEnd, FaultTargets, ProcessRole, daemon_pid, inject_and_wait, tests_all_cases,
};
use sempa_tests::requirements::{panic_if_unmet, require_testbed};
use sempa_tests::run::{RunningCommand, run_to_end};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(300);

/// A message size, and the free memory that the test with this size needs, both in MiB.
type MessageAndMemoryMib = (u64, u64);

/// A message whose length in bytes does not fit into 32 bits. Copies of the message are in the
/// memory of the sender, in the growing inbox of the receiver, and in transit.
const GIANT_MESSAGE: MessageAndMemoryMib = (4352, 14 << 10);
/// A message that is larger than all buffers between two tasks.
const LARGE_MESSAGE: MessageAndMemoryMib = (300, 2 << 10);
/// Amount of data that two tasks send each other before either task receives. The data is in the
/// memory of the sender, the daemons and the receiver.
const FLOOD: MessageAndMemoryMib = (1024, 6 << 10);
/// Amount of data that two tasks send each other by default, without `SEMPA_TEST_FULL`.
const SMALL_FLOOD: MessageAndMemoryMib = (256, 2 << 10);
/// Number of tasks on one host, more than the 4095 that PVM supports.
const FULL_TASK_COUNT: u32 = 4100;
/// Number of tasks on one host by default. It exceeds the default limit of 1024 descriptors per
/// process.
const DEFAULT_TASK_COUNT: u32 = 1100;

fn full_or_default<T>(full_value: T, default_value: T) -> T {
    if tests_all_cases() {
        full_value
    } else {
        default_value
    }
}

fn run_limits_program(vm: &Vm, args: &[&str]) {
    let program = vm.compile_program("limits").expect("gcc");
    let mut command = vm.user_command(vm.testbed().host(1), program);
    command.args(args);
    let mut running_program = RunningCommand::start(command, Stdio::null()).expect("it starts");
    let wait_result = wait_for(TIMEOUT, || match running_program.poll_status() {
        Ok(Some(_)) => Ok(()),
        _ => Err("it runs".to_string()),
    });
    if let Err(error) = wait_result {
        panic!(
            "{args:?}: {error:#}\n{}\n{}",
            describe_waiting_tasks(vm),
            vm.events_and_logs()
        );
    }
    let output = running_program.wait_or_kill(TIMEOUT).or_panic_with_logs(vm);
    assert!(
        output.succeeded() && output.stdout == "good\n",
        "{args:?}: {}\n{}\n{}\n{}",
        output.status,
        output.stdout,
        output.stderr,
        vm.events_and_logs()
    );
}

/// Describes for a report what some of the tasks wait for, and which sockets have unread bytes.
fn describe_waiting_tasks(vm: &Vm) -> String {
    /// Maximum number of tasks that are described: the first task and some of its children.
    const DESCRIBED_TASKS_MAX: usize = 4;
    let host = vm.testbed().host(1);
    let tasks = host
        .processes()
        .into_iter()
        .filter(|(_, line)| line.contains("limits ") && !line.contains("nsenter"));
    let mut report = String::new();
    for (n, (pid, line)) in tasks.enumerate().filter(|(n, _)| *n < DESCRIBED_TASKS_MAX) {
        report += &format!("{n}: {pid} {line}\n");
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let read_file =
                |name: &str| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            report += &format!(
                "  {} {} {}\n",
                read_file("comm").trim(),
                read_file("wchan"),
                read_file("syscall").trim()
            );
        }
        // Adds the stack of the task if a debugger is installed.
        let mut debugger = std::process::Command::new("gdb");
        debugger.args([
            "-p",
            &pid.to_string(),
            "-batch",
            "-ex",
            "thread apply all backtrace 16",
        ]);
        report += &run_to_end(debugger, TIMEOUT)
            .map(|output| output.stdout)
            .unwrap_or_default();
    }
    let sockets = host
        .run_shell("ss -xan | awk '$3 > 0 || $4 > 0' | head -40", TIMEOUT)
        .map(|output| output.stdout);
    report + &sockets.unwrap_or_default()
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_hundred_thousand_messages_arrive_in_order() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["pending", "100000"]);
    vm.halt_and_wait().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_environment_of_more_than_a_megabyte_arrives() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["environment", "15"]);
    vm.halt_and_wait().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn more_tasks_than_descriptors_live_on_one_host() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let count = full_or_default(FULL_TASK_COUNT, DEFAULT_TASK_COUNT).to_string();
    run_limits_program(&vm, &["tasks", &count]);
    vm.halt_and_wait().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_deliver_their_last_messages_to_a_slow_daemon() {
    /// Duration of a pause of the daemon. It exceeds the time for which a task waits for an answer
    /// about a ring.
    const PAUSE_DURATION: Duration = Duration::from_millis(700);
    /// Time between two pauses, in which the daemon runs.
    const RUN_DURATION: Duration = Duration::from_millis(100);
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    std::thread::scope(|scope| {
        let program_thread =
            scope.spawn(|| run_limits_program(&vm, &["tasks", full_or_default("300", "100")]));
        while !program_thread.is_finished() {
            let targets = FaultTargets {
                hosts_and_roles: vec![(1, ProcessRole::Daemon)],
                ..FaultTargets::default()
            };
            let pause = Fault::Pause(FaultEnd::Elapsed(PAUSE_DURATION));
            inject_and_wait(&bed, pause, &targets, |_| Ok(()), || Ok(())).expect("it is there");
            std::thread::sleep(RUN_DURATION);
        }
        program_thread.join().expect("nothing is missing");
    });
    vm.halt_and_wait().expect("it ends");
}

/// Sets the limit of a process for descriptor numbers to its lowest free descriptor plus
/// `extra_count`.
fn limit_descriptors(pid: Pid, extra_count: u32) {
    let is_open = |fd: &u32| std::fs::symlink_metadata(format!("/proc/{pid}/fd/{fd}")).is_ok();
    let lowest_free_fd = (0..).find(|fd| !is_open(fd)).expect("one of them");
    let mut prlimit = std::process::Command::new("prlimit");
    prlimit.args([
        "--pid",
        &pid.to_string(),
        &format!("--nofile={}:", lowest_free_fd + extra_count),
    ]);
    let output = run_to_end(prlimit, TIMEOUT).expect("util-linux");
    assert!(output.succeeded(), "{}", output.stderr);
}

/// Starts two tasks that exchange messages. After the first message between them, limits their
/// daemon to `extra_count` further descriptors. Then lets the tasks continue, and checks that all
/// messages arrive.
fn exchange_with_descriptor_limit(vm: &Vm, folder: &str, extra_count: u32) {
    let folder = vm.user_home().join(folder);
    std::fs::create_dir(&folder).expect("made");
    std::thread::scope(|scope| {
        let exchange =
            scope.spawn(|| run_limits_program(vm, &["full", folder.to_str().expect("text")]));
        let ready_file = folder.join("ready");
        let check_ready = || {
            ready_file
                .exists()
                .then_some(())
                .ok_or("the tasks have not met".to_string())
        };
        wait_for(TIMEOUT, check_ready).expect("they meet");
        limit_descriptors(
            daemon_pid(vm.testbed().host(1)).expect("a daemon"),
            extra_count,
        );
        std::fs::write(folder.join("go"), "").expect("made");
        exchange.join().expect("all comes");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_message_is_lost_without_free_descriptors() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["full", "here"]);
    run_limits_program(&vm, &["full", "there"]);
    exchange_with_descriptor_limit(&vm, "full", 0);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_message_is_lost_with_many_descriptors_in_flight() {
    /// Number of descriptors in flight. It exceeds the limit for the daemon's user.
    const IN_FLIGHT_COUNT: usize = 200;
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let (socket, _peer_socket) = UnixStream::pair().expect("a pair");
    let descriptors = [socket.as_raw_fd(); IN_FLIGHT_COUNT];
    let control_messages = [ControlMessage::ScmRights(&descriptors)];
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(b"x")],
        &control_messages,
        MsgFlags::empty(),
        None,
    )
    .expect("nobody takes them");
    exchange_with_descriptor_limit(&vm, "many", 16);
}

fn available_mib() -> u64 {
    let memory = Meminfo::current().ok();
    memory.and_then(|memory| memory.mem_available).unwrap_or(0) >> 20
}

/// Waits until no other test that needs much memory runs, in this or another process. Such tests
/// wait until the returned lock is dropped.
///
/// # Panics
/// The machine does not have enough free memory.
fn wait_for_memory_lock((_, needed_mib): MessageAndMemoryMib) -> File {
    let lock_file =
        File::create(std::env::temp_dir().join("sempa-tests-memory.lock")).expect("a file");
    lock_file.lock().expect("a lock");
    let free_mib = available_mib();
    let missing_memory =
        format!("{needed_mib} MiB of free memory are needed, and {free_mib} MiB are free");
    panic_if_unmet((free_mib < needed_mib).then_some(missing_memory));
    lock_file
}

/// One message that is larger than all buffers arrives. With `SEMPA_TEST_FULL=1` it is larger than
/// 4 GiB.
#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn a_giant_message_arrives_whole() {
    let message_and_memory = full_or_default(GIANT_MESSAGE, LARGE_MESSAGE);
    let _memory_lock = wait_for_memory_lock(message_and_memory);
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["giant", &message_and_memory.0.to_string()]);
    vm.halt_and_wait().expect("it ends");
}

/// A task on h1 and a task on `host` send each other a [`FLOOD`] of data over the route `route`,
/// before either task receives.
fn check_flood(route: &str, host: &str) {
    let flood_and_memory = full_or_default(FLOOD, SMALL_FLOOD);
    let _memory_lock = wait_for_memory_lock(flood_and_memory);
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    let folder = vm.user_home().join("flood");
    std::fs::create_dir(&folder).expect("made");
    let path = folder.to_str().expect("text");
    run_limits_program(
        &vm,
        &["flood", &flood_and_memory.0.to_string(), route, host, path],
    );
    vm.halt_and_wait().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn floods_in_a_ring_do_not_block_each_other() {
    check_flood("direct", "h1");
}

#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn floods_on_a_direct_route_do_not_block_each_other() {
    check_flood("direct", "h2");
}

#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn floods_through_daemons_do_not_block_each_other() {
    check_flood("default", "h2");
}
