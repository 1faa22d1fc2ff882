//! Message sizes and numbers of tasks that PVM 3.4.6 does not support.
//!
//! With the default sizes the tests show that the mechanism works. With `SEMPA_TEST_FULL=1` the
//! sizes exceed the limits of PVM itself.

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use procfs::{Current, Meminfo};
use sempa_tests::faults::{Fault, FaultTargets, Role, Until, daemon_of, inject, is_full};
use sempa_tests::requirements::{require, testbed};
use sempa_tests::run::{RunningCommand, run};
use sempa_tests::vm::Settings;
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

/// A message whose length exceeds 32 bits. Copies of it are in the memory of the sender, in the
/// growing inbox of the receiver, and in transit.
const GIANT_MESSAGE: MessageAndMemoryMib = (4352, 14 << 10);
/// A message that is larger than all buffers between two tasks.
const LARGE_MESSAGE: MessageAndMemoryMib = (300, 2 << 10);
/// Amount of data that two tasks send each other before either receives. It is in the memory of the
/// sender, of the daemons and of the receiver.
const FLOOD: MessageAndMemoryMib = (1024, 6 << 10);
/// Amount of data that two tasks send each other by default, without `SEMPA_TEST_FULL`.
const SMALL_FLOOD: MessageAndMemoryMib = (256, 2 << 10);
/// Number of tasks on one host: PVM supports 4095.
const MANY_TASKS: u32 = 4100;
/// Number of tasks on one host by default. It exceeds the default limit of 1024 descriptors per
/// process.
const SOME_TASKS: u32 = 1100;

fn full_or_default<T>(full: T, default: T) -> T {
    if is_full() { full } else { default }
}

fn run_limits_program(vm: &Vm, words: &[&str]) {
    let program = vm.compile_program("limits").expect("gcc");
    let mut command = vm.command(vm.bed().host(1), program);
    command.args(words);
    let mut running = RunningCommand::start(command, Stdio::null()).expect("it starts");
    let ended = wait_for(TIMEOUT, || match running.poll() {
        Ok(Some(_)) => Ok(()),
        _ => Err("it runs".to_string()),
    });
    if let Err(error) = ended {
        panic!(
            "{words:?}: {error:#}\n{}\n{}",
            describe_waiting_tasks(vm),
            vm.logs()
        );
    }
    let done = running.finish(TIMEOUT).or_panic_with_logs(vm);
    assert!(
        done.succeeded() && done.out == "good\n",
        "{words:?}: {}\n{}\n{}\n{}",
        done.status,
        done.out,
        done.err,
        vm.logs()
    );
}

/// Describes for a report what some of the tasks wait for, and which sockets have unread bytes.
fn describe_waiting_tasks(vm: &Vm) -> String {
    /// Number of tasks that are described: the first task and some of its children.
    const SOME: usize = 4;
    let host = vm.bed().host(1);
    let tasks = host
        .processes()
        .into_iter()
        .filter(|(_, line)| line.contains("limits ") && !line.contains("nsenter"));
    let mut text = String::new();
    for (n, (pid, line)) in tasks.enumerate().filter(|(n, _)| *n < SOME) {
        text += &format!("{n}: {pid} {line}\n");
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let of =
                |name: &str| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            text += &format!(
                "  {} {} {}\n",
                of("comm").trim(),
                of("wchan"),
                of("syscall").trim()
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
        text += &run(debugger, TIMEOUT)
            .map(|done| done.out)
            .unwrap_or_default();
    }
    let sockets = host
        .shell("ss -xan | awk '$3 > 0 || $4 > 0' | head -40", TIMEOUT)
        .map(|done| done.out);
    text + &sockets.unwrap_or_default()
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_hundred_thousand_messages_arrive_in_order() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["pending", "100000"]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_environment_of_more_than_a_megabyte_arrives() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["environment", "15"]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn more_tasks_than_descriptors_live_on_one_host() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let count = full_or_default(MANY_TASKS, SOME_TASKS).to_string();
    run_limits_program(&vm, &["tasks", &count]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_deliver_their_last_messages_to_a_slow_daemon() {
    /// Duration of a pause of the daemon. It exceeds the time for which a task waits for an answer
    /// about a ring.
    const PAUSED: Duration = Duration::from_millis(700);
    /// Time between two pauses, in which the daemon runs.
    const RUNNING: Duration = Duration::from_millis(100);
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    std::thread::scope(|scope| {
        let tasks =
            scope.spawn(|| run_limits_program(&vm, &["tasks", full_or_default("300", "100")]));
        while !tasks.is_finished() {
            let targets = FaultTargets {
                roles: vec![(1, Role::Daemon)],
                ..FaultTargets::default()
            };
            let pause = Fault::Pause(Until::Elapsed(PAUSED));
            inject(&bed, pause, &targets, |_| Ok(()), || Ok(())).expect("it is there");
            std::thread::sleep(RUNNING);
        }
        tasks.join().expect("nothing is missing");
    });
    vm.halt().expect("it ends");
}

/// Limits the number of descriptors of a process to those that are open, plus `more`.
fn limit_descriptors(pid: Pid, more: u32) {
    let open = |fd: &u32| std::fs::symlink_metadata(format!("/proc/{pid}/fd/{fd}")).is_ok();
    let free = (0..).find(|fd| !open(fd)).expect("one of them");
    let mut limit = std::process::Command::new("prlimit");
    limit.args([
        "--pid",
        &pid.to_string(),
        &format!("--nofile={}:", free + more),
    ]);
    let done = run(limit, TIMEOUT).expect("util-linux");
    assert!(done.succeeded(), "{}", done.err);
}

/// Starts two tasks that exchange messages. When they have met, limits their daemon to `more`
/// further descriptors.
fn exchange_with_descriptor_limit(vm: &Vm, folder: &str, more: u32) {
    let folder = vm.home().join(folder);
    std::fs::create_dir(&folder).expect("made");
    std::thread::scope(|scope| {
        let talk =
            scope.spawn(|| run_limits_program(vm, &["full", folder.to_str().expect("text")]));
        let ready = folder.join("ready");
        let met = || {
            ready
                .exists()
                .then_some(())
                .ok_or("the tasks have not met".to_string())
        };
        wait_for(TIMEOUT, met).expect("they meet");
        limit_descriptors(daemon_of(vm.bed().host(1)).expect("a daemon"), more);
        std::fs::write(folder.join("go"), "").expect("made");
        talk.join().expect("all comes");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_message_is_lost_without_free_descriptors() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["full", "here"]);
    run_limits_program(&vm, &["full", "there"]);
    exchange_with_descriptor_limit(&vm, "full", 0);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_message_is_lost_with_many_descriptors_in_flight() {
    /// Number of descriptors in flight, which exceeds the limit for the daemon's user.
    const IN_FLIGHT: usize = 200;
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let (near, _far) = UnixStream::pair().expect("a pair");
    let many = [near.as_raw_fd(); IN_FLIGHT];
    let rights = [ControlMessage::ScmRights(&many)];
    sendmsg::<()>(
        near.as_raw_fd(),
        &[IoSlice::new(b"x")],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .expect("nobody takes them");
    exchange_with_descriptor_limit(&vm, "many", 16);
}

fn free_mebibytes() -> u64 {
    let memory = Meminfo::current().ok();
    memory.and_then(|memory| memory.mem_available).unwrap_or(0) >> 20
}

/// Waits until no other test that needs much memory runs, in this process or another one. Other
/// such tests wait until the returned lock is dropped.
///
/// # Panics
/// The machine does not have enough free memory.
fn lock_memory((_, mebibytes): MessageAndMemoryMib) -> File {
    let turn = File::create(std::env::temp_dir().join("sempa-tests-memory.lock")).expect("a file");
    turn.lock().expect("a lock");
    let free = free_mebibytes();
    let lack = format!("{mebibytes} MiB of free memory are needed, and {free} MiB are free");
    require((free < mebibytes).then_some(lack));
    turn
}

/// One message that is larger than all buffers arrives. With `SEMPA_TEST_FULL=1` it is larger than
/// 4 GiB.
#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn a_giant_message_arrives_whole() {
    let size = full_or_default(GIANT_MESSAGE, LARGE_MESSAGE);
    let _turn = lock_memory(size);
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    run_limits_program(&vm, &["giant", &size.0.to_string()]);
    vm.halt().expect("it ends");
}

/// A task on h1 and a task on `host` send each other a [`FLOOD`] of data by the route `route`
/// before either receives.
fn flood(route: &str, host: &str) {
    let size = full_or_default(FLOOD, SMALL_FLOOD);
    let _turn = lock_memory(size);
    let bed = testbed(2);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let folder = vm.home().join("flood");
    std::fs::create_dir(&folder).expect("made");
    let path = folder.to_str().expect("text");
    run_limits_program(&vm, &["flood", &size.0.to_string(), route, host, path]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn floods_in_a_ring_do_not_block_each_other() {
    flood("direct", "h1");
}

#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn floods_on_a_direct_route_do_not_block_each_other() {
    flood("direct", "h2");
}

#[test]
#[ignore = "system tier: needs root, hosts and free memory"]
fn floods_through_daemons_do_not_block_each_other() {
    flood("default", "h2");
}
