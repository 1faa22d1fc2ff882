//! What PVM 3.4.6 had no room for.

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use sempa_tests::faults::{Fault, Role, Targets, Until, daemon_of, inject};
use sempa_tests::needs::testbed;
use sempa_tests::run::{Running, run};
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(300);

/// Memory that the largest message takes on its way: with the sender, in the receiver's inbox as it grows, in between.
const GIANT_NEEDS_MIB: u64 = 14 << 10;
/// What two tasks send each other before either receives, and the memory that it takes: with who has sent it, with the daemons
/// on the way, with who receives it.
const FLOOD_MIB: &str = "1024";
const FLOOD_NEEDS_MIB: u64 = 6 << 10;

fn good(vm: &Vm, words: &[&str]) {
    let program = vm.program("limits").expect("gcc");
    let mut command = vm.command(vm.bed().host(1), program);
    command.args(words);
    let mut running = Running::start(command, Stdio::null()).expect("it starts");
    let ended = eventually(LONG, || match running.poll() {
        Ok(Some(_)) => Ok(()),
        _ => Err("it runs".to_string()),
    });
    if let Err(error) = ended {
        panic!("{words:?}: {error:#}\n{}\n{}", who_waits(vm), vm.logs());
    }
    let done = running.finish(LONG).sure(vm);
    assert!(
        done.good() && done.out == "good\n",
        "{words:?}: {}\n{}\n{}\n{}",
        done.status,
        done.out,
        done.err,
        vm.logs()
    );
}

/// Where some of the tasks stand, and which sockets hold bytes that nobody has read.
fn who_waits(vm: &Vm) -> String {
    /// Tasks that are looked at: the first one, and some of those that it has started.
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
        // Where the program has got to, if there is somebody to tell it.
        let mut debugger = std::process::Command::new("gdb");
        debugger.args([
            "-p",
            &pid.to_string(),
            "-batch",
            "-ex",
            "thread apply all backtrace 16",
        ]);
        text += &run(debugger, LONG).map(|done| done.out).unwrap_or_default();
    }
    let sockets = host
        .shell("ss -xan | awk '$3 > 0 || $4 > 0' | head -40", LONG)
        .map(|done| done.out);
    text + &sockets.unwrap_or_default()
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_hundred_thousand_messages_wait_and_come_in_order() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["pending", "100000"]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_environment_larger_than_a_megabyte_reaches_a_spawned_task() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["environment", "15"]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn more_tasks_than_pvms_four_thousand_live_on_one_host() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["tasks", "4100"]);
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_that_leave_while_their_daemon_stands_still_again_and_again_have_said_their_last_words() {
    /// Longer than a task waits for an answer about a ring.
    const STANDS: Duration = Duration::from_millis(700);
    /// So that a little of what is to be done is done in between: the rhythm of the fault, and nothing that is waited for.
    const RUNS: Duration = Duration::from_millis(100);
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    std::thread::scope(|scope| {
        let tasks = scope.spawn(|| good(&vm, &["tasks", "300"]));
        while !tasks.is_finished() {
            let targets = Targets {
                roles: vec![(1, Role::Daemon)],
                ..Targets::default()
            };
            let pause = Fault::Pause(Until::Elapsed(STANDS));
            inject(&bed, pause, &targets, |_| Ok(()), || Ok(())).expect("it is there");
            std::thread::sleep(RUNS);
        }
        tasks.join().expect("nothing is missing");
    });
    vm.halt().expect("it ends");
}

/// The process may open so few descriptors more; those that it has remain.
fn leave_room(pid: Pid, more: u32) {
    let open = |fd: &u32| std::fs::symlink_metadata(format!("/proc/{pid}/fd/{fd}")).is_ok();
    let free = (0..).find(|fd| !open(fd)).expect("one of them");
    let mut limit = std::process::Command::new("prlimit");
    limit.args([
        "--pid",
        &pid.to_string(),
        &format!("--nofile={}:", free + more),
    ]);
    let done = run(limit, LONG).expect("util-linux");
    assert!(done.good(), "{}", done.err);
}

/// Two tasks meet, their daemon may open so few descriptors more from then on, and they talk.
fn talk_beside(vm: &Vm, folder: &str, more: u32) {
    let folder = vm.home().join(folder);
    std::fs::create_dir(&folder).expect("made");
    std::thread::scope(|scope| {
        let talk = scope.spawn(|| good(vm, &["full", folder.to_str().expect("text")]));
        let ready = folder.join("ready");
        let met = || {
            ready
                .exists()
                .then_some(())
                .ok_or("the tasks have not met".to_string())
        };
        eventually(LONG, met).expect("they meet");
        leave_room(daemon_of(vm.bed().host(1)).expect("a daemon"), more);
        std::fs::write(folder.join("go"), "").expect("made");
        talk.join().expect("all comes");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_and_a_daemon_that_may_have_no_more_descriptors_lose_no_message() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["full", "here"]);
    good(&vm, &["full", "there"]);
    talk_beside(&vm, "full", 0);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_daemon_whose_user_has_too_many_descriptors_on_their_way_loses_no_message() {
    /// More than the daemon may have, and than its user may send by it while they are on their way.
    const ON_THEIR_WAY: usize = 200;
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let (near, _far) = UnixStream::pair().expect("a pair");
    let many = [near.as_raw_fd(); ON_THEIR_WAY];
    let rights = [ControlMessage::ScmRights(&many)];
    sendmsg::<()>(
        near.as_raw_fd(),
        &[IoSlice::new(b"x")],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .expect("nobody takes them");
    talk_beside(&vm, "many", 16);
}

fn free_mebibytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|words| words.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or(0)
        / 1024
}

/// Keeps the other tests that take so much memory waiting, also those of other processes, while it is held; `None`, with a word,
/// where there is not enough.
fn memory(mebibytes: u64) -> Option<File> {
    let turn = File::create(std::env::temp_dir().join("sempa-tests-memory.lock")).expect("a file");
    turn.lock().expect("a lock");
    if free_mebibytes() < mebibytes {
        println!("not tried: it takes {mebibytes} MiB of free memory");
        return None;
    }
    Some(turn)
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_message_larger_than_four_gibibytes_arrives_whole() {
    let Some(_turn) = memory(GIANT_NEEDS_MIB) else {
        return;
    };
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    good(&vm, &["giant", "4352"]);
    vm.halt().expect("it ends");
}

/// Two tasks, this one on h1 and the other one on `host`.
fn flood(route: &str, host: &str) {
    let Some(_turn) = memory(FLOOD_NEEDS_MIB) else {
        return;
    };
    let bed = testbed(2);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let folder = vm.home().join("flood");
    std::fs::create_dir(&folder).expect("made");
    good(
        &vm,
        &[
            "flood",
            FLOOD_MIB,
            route,
            host,
            folder.to_str().expect("text"),
        ],
    );
    vm.halt().expect("it ends");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn two_tasks_of_one_host_that_send_each_other_a_gibibyte_before_they_receive_do_not_block_each_other()
 {
    flood("direct", "h1");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn two_tasks_with_a_direct_route_that_send_each_other_a_gibibyte_before_they_receive_do_not_block_each_other()
 {
    flood("direct", "h2");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn two_tasks_whose_daemons_carry_a_gibibyte_each_way_before_they_receive_do_not_block_each_other() {
    flood("default", "h2");
}
