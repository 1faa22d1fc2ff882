//! Output of tasks that are lost with their host ends for the console and for a parent that prints
//! it, unless their job rolls back.

use sempa_tests::requirements::require_testbed;
use sempa_tests::run::{CommandResult, RunningCommand};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::process::Stdio;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Line that ends the output of a lost task.
const LOST_LINE: &str = "lost with its host: the last lines may be missing";
/// Line of a task whose job rolls back.
const ROLLBACK_LINE: &str = "waits for the restart of its job from the last checkpoint";

/// Starts a command on a virtual machine with the host h3, waits until the command has printed all
/// `texts`, and kills all processes of h3. Returns the result of the command.
fn run_and_lose_host(start: impl FnOnce(&Vm) -> RunningCommand, texts: &[&str]) -> CommandResult {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let command = start(&vm);
    wait_for(TIMEOUT, || {
        let out = command.stdout_so_far().map_err(|error| error.to_string())?;
        if texts.iter().all(|text| out.contains(text)) {
            Ok(())
        } else {
            Err(out)
        }
    })
    .or_panic_with_logs(&vm);
    bed.host(3).kill_all_processes();
    let result = command.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
    vm.halt_and_wait().expect("halts");
    result
}

/// `pvm spawn '->'` ends with the reason and with a failure when the host of its task is lost.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn console_job_ends_when_its_host_is_lost() {
    let start = |vm: &Vm| {
        let script = r"printf 'ready\nhalf'; sleep 10000";
        vm.start_pvm(&["spawn", "->", "-h3", "/bin/sh", "-c", script])
            .expect("starts")
    };
    let result = run_and_lose_host(start, &["ready\n"]);
    let tid_line = result.stdout.lines().find(|line| line.starts_with('t'));
    let prefix = format!("[1:{}]", tid_line.expect("the task's tid"));
    let end = format!("{prefix} half\n{prefix} {LOST_LINE}\n{prefix} EOF\n[1] finished\n");
    assert!(result.stdout.ends_with(&end), "{result:?}");
    assert_eq!(result.status.code(), Some(1), "{result:?}");
}

/// `pvm_exit` of a task that prints the output of a child returns when the child's host is lost.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn exit_after_catchout_ends_when_a_host_is_lost() {
    let start = |vm: &Vm| {
        let program = vm.compile_program("left_behind").expect("gcc");
        let mut command = vm.user_command(vm.testbed().host(1), program);
        command.arg("h3");
        RunningCommand::start(command, Stdio::null()).expect("starts")
    };
    // The parent prints the tid when the child's message has arrived.
    let result = run_and_lose_host(start, &["whole line\n", "child t"]);
    assert!(result.succeeded(), "{result:?}");
    let child_line = result
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("child "));
    let prefix = format!("[{}]", child_line.expect("the child's tid"));
    let end = format!("{prefix} half a line\n{prefix} {LOST_LINE}\n{prefix} EOF\nleft\n");
    assert!(result.stdout.ends_with(&end), "{result:?}");
}

/// Runs `pvm spawn '->' PLACE two_words FILE [CHILD_HOST]` with a checkpoint, and has `lose` cause
/// a rollback for the reason `why`. The console must show the output of the restarted task, and end
/// with this task.
fn check_rollback(place: &str, child_host: Option<&str>, lose: impl FnOnce(&Testbed), why: &str) {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let program = vm.compile_program("two_words").expect("gcc");
    let file = vm.user_home().join("second-word");
    let texts = [&program, &file].map(|path| path.to_str().expect("text").to_string());
    let mut command = vec!["spawn", "->", place, &texts[0], &texts[1]];
    command.extend(child_host);
    let command = vm.start_pvm(&command).expect("starts");
    let tid = wait_for(TIMEOUT, || {
        let out = command.stdout_so_far().map_err(|error| error.to_string())?;
        let tid = out.lines().find(|line| line.starts_with('t'));
        match tid.filter(|_| out.contains("ready\n")) {
            Some(tid) => Ok(tid.to_string()),
            None => Err(out),
        }
    })
    .or_panic_with_logs(&vm);
    let checkpoint = vm.run_pvm(&["checkpoint", "--every", "1h", &tid]);
    let checkpoint = checkpoint.or_panic_with_logs(&vm);
    assert!(checkpoint.succeeded(), "{checkpoint:?}");
    lose(&bed);
    vm.wait_for_rollback(TIMEOUT, why).or_panic_with_logs(&vm);
    std::fs::write(&file, "").expect("written");
    let result = command.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
    let prefix = format!("[1:{tid}]");
    let end = format!(
        "{prefix} ready\n{prefix} {ROLLBACK_LINE}\n{prefix} again\n{prefix} EOF\n[1] finished\n"
    );
    assert!(result.stdout.ends_with(&end), "{result:?}");
    assert!(result.succeeded(), "{result:?}");
    vm.halt_and_wait().expect("halts");
}

fn kill_h3(bed: &Testbed) {
    bed.host(3).kill_all_processes();
}

/// A job rolls back because the host of the console's task is lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn console_job_continues_after_its_rollback() {
    check_rollback("-h3", None, kill_h3, "h3 was lost");
}

/// A job rolls back because a host is lost that has only tasks which the console does not show. The
/// console's task is killed for the rollback.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn console_job_continues_after_the_loss_of_a_hidden_task() {
    check_rollback("-h1", Some("h3"), kill_h3, "h3 was lost");
}

/// A job rolls back because the tasker of its task is killed. The host remains, and its daemon ends
/// the output of the task.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn console_job_continues_after_the_loss_of_a_tasker() {
    let kill_tasker = |bed: &Testbed| {
        let is_tasker = |line: &str| line.contains("pvm-tasker");
        bed.host(3).kill_matching_processes(is_tasker);
    };
    check_rollback("-h3", None, kill_tasker, "the tasker of h3 has ended");
}
