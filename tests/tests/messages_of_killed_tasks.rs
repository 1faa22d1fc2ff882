//! Messages that a task has sent over a direct route before it was killed are received, including
//! those in transit.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Number of messages that the sender sends before it is killed. The receiver does not acknowledge
/// so few messages. An acknowledgement to a dead task would make the kernel discard the unread
/// messages.
const MESSAGE_COUNT: usize = 7;
/// Size of each message in bytes.
const MESSAGE_BYTES: usize = 64 << 10;

/// Returns the process id of the receiver outside of its host's process namespace.
fn receiver_pid(vm: &Vm) -> Pid {
    let host = vm.testbed().host(3);
    let is_receiver = |line: &str| {
        line.split(' ')
            .next()
            .is_some_and(|program| program.ends_with("last_words"))
    };
    let pids: Vec<u32> = host
        .processes()
        .into_iter()
        .filter(|(_, line)| is_receiver(line))
        .map(|(pid, _)| pid)
        .collect();
    let [pid] = pids[..] else {
        panic!("one listener: {pids:?}")
    };
    Pid::from_raw(pid.cast_signed())
}

/// The receiver was stopped while the killed task sent its messages, and still receives all of
/// them.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_task_has_delivered_its_messages() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let program = vm.compile_program("last_words").expect("gcc");
    let mut command = vm.user_command(bed.host(1), program);
    command.args([
        &MESSAGE_COUNT.to_string(),
        &MESSAGE_BYTES.to_string(),
        "h2",
        "h3",
    ]);
    let mut director = RunningCommand::start(command, Stdio::piped()).expect("it starts");
    let sender_tid = wait_for(TIMEOUT, || {
        let out = director
            .stdout_so_far()
            .map_err(|error| error.to_string())?;
        let sender_tid = out.lines().find_map(|line| line.strip_prefix("talker "));
        sender_tid
            .filter(|_| out.contains("ready\n"))
            .map(String::from)
            .ok_or(out.clone())
    })
    .or_panic_with_logs(&vm);
    let receiver = receiver_pid(&vm);
    kill(receiver, Signal::SIGSTOP).expect("it is there");
    director
        .take_stdin()
        .expect("piped")
        .write_all(b"go\n")
        .expect("it listens");
    wait_for(TIMEOUT, || match vm.tasks() {
        Ok(tasks) if tasks.iter().all(|task| task.tid != sender_tid) => Ok(()),
        other => Err(format!("{sender_tid} is still there: {other:?}")),
    })
    .or_panic_with_logs(&vm);
    kill(receiver, Signal::SIGCONT).expect("it is there");
    let output = director.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
    assert!(
        output.succeeded()
            && output
                .stdout
                .contains(&format!("heard {MESSAGE_COUNT} in order, then the end")),
        "{output:?}"
    );
    vm.halt_and_wait().expect("halts");
}
