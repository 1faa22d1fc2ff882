//! A daemon, tasker, load watcher or resource manager that hangs (SIGSTOP) is
//! noticed in time, and no promise waits for it. A task that runs in two copies would show it: it
//! appends the name of its host to a file all the time.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_tests::faults::{ProcessRole, SHORT_LEASE_ENV, role_processes};
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::ssh::SshLogin;
use sempa_tests::testbed::{Host, Testbed, wait_until_no_process};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Environment variable and value that set a lease of 20 s, so that 4 s pass between the freeze and
/// the end of tasks.
const MEDIUM_LEASE_ENV: (&str, &str) = ("SEMPA_LEASE_MS", "40000");
/// Time after which tasks with this lease are frozen: 0.6 of it.
const MEDIUM_FREEZE_DELAY: Duration = Duration::from_secs(24);
/// Environment variable and value that set a lease that no stopped process exceeds.
const LONG_LEASE_ENV: (&str, &str) = ("SEMPA_LEASE_MS", "120000");
/// A task that appends nothing for this time is stopped. It appends a line every 20 ms.
const STILL_MIN: Duration = Duration::from_secs(1);
/// File of the task `trace`, in the home directory that all hosts share.
const TRACE_FILE: &str = "trace.txt";

/// A process that is stopped until this value is dropped.
struct StoppedProcess(Pid);

impl StoppedProcess {
    fn new(host: &Host, role: ProcessRole) -> Self {
        let pid = role_processes(host, role)[0];
        Self::stop(pid)
    }

    fn stop(pid: Pid) -> Self {
        kill(pid, Signal::SIGSTOP).expect("it is there");
        Self(pid)
    }
}

impl Drop for StoppedProcess {
    fn drop(&mut self) {
        // Fails if the virtual machine has killed the process.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

/// Starts a virtual machine with a lease on all hosts of a testbed. `rm` is the command of the
/// resource manager.
fn start_vm<'a>(bed: &'a Testbed, lease: (&str, &str), rm: Option<&str>) -> Vm<'a> {
    let settings = VmSettings {
        rm_command: rm.map(str::to_string),
        env: VmSettings::owned_env(&[lease]),
        ..VmSettings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    vm.add_missing_hosts(&bed.hosts().iter().collect::<Vec<_>>())
        .expect("they join");
    vm.compile_program("trace").expect("gcc");
    vm
}

/// Returns the host in each line that tasks have appended, in order.
fn traced_hosts(vm: &Vm<'_>) -> Vec<String> {
    let text = fs::read_to_string(vm.user_home().join(TRACE_FILE)).unwrap_or_default();
    let complete_lines = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    complete_lines
        .map(|line| {
            let host = line.split_whitespace().nth(2);
            host.expect("three words").to_string()
        })
        .collect()
}

/// Waits until tasks have appended this number of lines more.
fn wait_for_lines(vm: &Vm<'_>, line_count: usize) {
    let expected_count = traced_hosts(vm).len() + line_count;
    wait_for(TIMEOUT, || match traced_hosts(vm).len() {
        count if count >= expected_count => Ok(()),
        count => Err(format!("{count} of {expected_count} lines")),
    })
    .or_panic_with_logs(vm);
}

/// Waits until no task has appended anything for [`STILL_MIN`].
fn wait_until_still(vm: &Vm<'_>) {
    let mut last_change = (0, Instant::now());
    wait_for(TIMEOUT, || {
        let line_count = traced_hosts(vm).len();
        if line_count != last_change.0 {
            last_change = (line_count, Instant::now());
        }
        if last_change.1.elapsed() >= STILL_MIN {
            Ok(())
        } else {
            Err(format!("it runs: {line_count} lines"))
        }
    })
    .or_panic_with_logs(vm);
}

fn wait_for_note(vm: &Vm<'_>, part: &str) {
    vm.wait_for_event(
        TIMEOUT,
        part,
        |entry| matches!(&entry.kind, EventKind::Note { text } if text.contains(part)),
    )
    .or_panic_with_logs(vm);
}

/// Starts a job with checkpoints on h2, silences that host until the job has been restarted
/// elsewhere, and checks that the task has never run on both hosts. The silence ends when the value
/// of `silence` is dropped.
fn assert_one_copy_runs<T>(bed: &Testbed, silence: impl FnOnce() -> T) {
    let vm = start_vm(bed, SHORT_LEASE_ENV, None);
    let tid = vm
        .spawn_connected(&["-h2", "trace", TRACE_FILE])
        .or_panic_with_logs(&vm);
    let request = vm.run_pvm(&["checkpoint", "--every", "1s", &tid]);
    request
        .and_then(|request| request.expect_success("the first checkpoint"))
        .or_panic_with_logs(&vm);
    let silenced_host = silence();
    vm.wait_for_event(TIMEOUT, "a restart", |entry| {
        matches!(entry.kind, EventKind::Restarted { .. })
    })
    .or_panic_with_logs(&vm);
    wait_for_lines(&vm, 100);
    drop(silenced_host);
    wait_for_lines(&vm, 100);
    let mut hosts = traced_hosts(&vm);
    hosts.dedup();
    assert!(
        hosts.len() == 2 && hosts[0] == "h2",
        "the task ran in turns on {hosts:?}\n{}",
        vm.events_and_logs()
    );
    vm.halt_and_wait().or_panic_with_logs(&vm);
}

/// If only the daemon of a host hangs, the host's tasks end before the job is restarted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn one_copy_runs_if_a_daemon_hangs() {
    let bed = require_testbed_with_env(3, &[SHORT_LEASE_ENV]);
    assert_one_copy_runs(&bed, || {
        StoppedProcess::new(bed.host(2), ProcessRole::Daemon)
    });
}

/// A host that is cut off.
struct DisconnectedHost<'a>(&'a Testbed);

impl Drop for DisconnectedHost<'_> {
    fn drop(&mut self) {
        let _ = self.0.set_connected(2, true);
    }
}

/// If a host is cut off, its tasks end before the job is restarted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn one_copy_runs_if_a_host_is_cut_off() {
    let bed = require_testbed_with_env(3, &[SHORT_LEASE_ENV]);
    assert_one_copy_runs(&bed, || {
        bed.set_connected(2, false).expect("root");
        DisconnectedHost(&bed)
    });
}

/// If a daemon continues before the lease of its tasks has run out, they continue, and an event
/// tells why they were frozen.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn tasks_continue_if_their_daemon_does_in_time() {
    let bed = require_testbed_with_env(2, &[MEDIUM_LEASE_ENV]);
    let vm = start_vm(&bed, MEDIUM_LEASE_ENV, None);
    vm.spawn_connected(&["-h2", "trace", TRACE_FILE])
        .or_panic_with_logs(&vm);
    let stopped_daemon = StoppedProcess::new(bed.host(2), ProcessRole::Daemon);
    let freeze_time = Instant::now() + MEDIUM_FREEZE_DELAY;
    wait_for(TIMEOUT, || match Instant::now() > freeze_time {
        true => Ok(()),
        false => Err("the lease permits the tasks to run".into()),
    })
    .or_panic_with_logs(&vm);
    wait_until_still(&vm);
    drop(stopped_daemon);
    wait_for_lines(&vm, 100);
    wait_for_note(&vm, "were frozen for");
    vm.halt_and_wait().or_panic_with_logs(&vm);
}

/// If the master hangs, the tasks of its host end as those of all other hosts do.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn tasks_of_the_master_end_if_it_hangs() {
    let bed = require_testbed_with_env(2, &[SHORT_LEASE_ENV]);
    let vm = start_vm(&bed, SHORT_LEASE_ENV, None);
    vm.spawn_connected(&["-h1", "trace", TRACE_FILE])
        .or_panic_with_logs(&vm);
    let stopped_daemon = StoppedProcess::new(bed.host(1), ProcessRole::Daemon);
    wait_until_no_process(bed.host(1), TRACE_FILE, TIMEOUT).or_panic_with_logs(&vm);
    drop(stopped_daemon);
    vm.wait_for_event(
        TIMEOUT,
        "the end of the tasker",
        |entry| matches!(&entry.kind, EventKind::TaskerGone { why, .. } if why.contains("lease")),
    )
    .or_panic_with_logs(&vm);
    vm.halt_and_wait().or_panic_with_logs(&vm);
}

/// If the master hangs and there is no other host, its tasks are frozen, and continue when it does.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn tasks_of_a_single_host_outlive_the_lease() {
    let bed = require_testbed_with_env(1, &[SHORT_LEASE_ENV]);
    let vm = start_vm(&bed, SHORT_LEASE_ENV, None);
    vm.spawn_connected(&["trace", TRACE_FILE])
        .or_panic_with_logs(&vm);
    wait_for_lines(&vm, 10);
    let stopped_daemon = StoppedProcess::new(bed.host(1), ProcessRole::Daemon);
    wait_until_still(&vm);
    // The lease is 6 s long.
    let lease_end = Instant::now() + Duration::from_secs(7);
    wait_for(TIMEOUT, || match Instant::now() > lease_end {
        true => Ok(()),
        false => Err("the lease has not run out".into()),
    })
    .or_panic_with_logs(&vm);
    drop(stopped_daemon);
    wait_for_lines(&vm, 100);
    wait_for_note(&vm, "were frozen for");
    vm.halt_and_wait().or_panic_with_logs(&vm);
}

/// A spawn does not wait for a resource manager that hangs. Another one is started.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn spawns_do_not_wait_for_a_stopped_resource_manager() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE_ENV]);
    let vm = start_vm(&bed, LONG_LEASE_ENV, Some("pvm-rm --policy load"));
    let stopped_rm = StoppedProcess::new(bed.host(1), ProcessRole::ResourceManager);
    vm.spawn_connected(&["trace", TRACE_FILE])
        .or_panic_with_logs(&vm);
    wait_for_note(&vm, "has not answered");
    wait_for(TIMEOUT, || {
        let pids = role_processes(bed.host(1), ProcessRole::ResourceManager);
        match pids[..] {
            [pid] if pid != stopped_rm.0 => Ok(()),
            _ => Err(format!("{pids:?}")),
        }
    })
    .or_panic_with_logs(&vm);
    let rm_count = || {
        let events = vm.events().map_err(|error| error.to_string())?;
        let is_registration = |kind: &EventKind| matches!(kind, EventKind::RmRegistered { .. });
        match events.iter().filter(|e| is_registration(&e.kind)).count() {
            2.. => Ok(()),
            count => Err(format!("{count} have registered")),
        }
    };
    wait_for(TIMEOUT, rm_count).or_panic_with_logs(&vm);
    vm.halt_and_wait().or_panic_with_logs(&vm);
}

/// Returns the process number of the load watcher of a host.
fn load_watcher_pid(host: &Host) -> Result<Pid, String> {
    let processes = host.processes();
    let watcher = processes
        .iter()
        .find(|(_, line)| line.contains("pvm-load-watcher"));
    let (pid, _) = watcher.ok_or_else(|| format!("no load watcher: {processes:?}"))?;
    Ok(Pid::from_raw(pid.cast_signed()))
}

/// Starts a virtual machine with a resource manager, load watchers and a guest on h2 whose owner
/// never asks guests to leave.
fn start_vm_with_guest(bed: &Testbed) -> Vm<'_> {
    let vm = start_vm(bed, LONG_LEASE_ENV, Some("pvm-rm --policy load"));
    let policy_path = vm.user_home().join(".config/sempa/owner.toml");
    fs::create_dir_all(policy_path.parent().expect("a folder")).expect("the testbed's own home");
    fs::write(&policy_path, "leave_after = \"never\"").expect("the testbed's own home");
    wait_for(TIMEOUT, || load_watcher_pid(bed.host(2))).or_panic_with_logs(&vm);
    vm.spawn_connected(&["-h2", "trace", TRACE_FILE])
        .or_panic_with_logs(&vm);
    wait_for_lines(&vm, 1);
    vm
}

/// A load watcher that hangs is replaced, so that guests stop for their owner.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn guests_stop_although_the_load_watcher_hangs() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE_ENV]);
    let vm = start_vm_with_guest(&bed);
    let watcher_pid = load_watcher_pid(bed.host(2)).expect("just seen");
    let _stopped_watcher = StoppedProcess::stop(watcher_pid);
    let login = SshLogin::log_in(&bed, "olga", bed.host(2)).expect("a login");
    vm.wait_for_event(TIMEOUT, "paused guests", |entry| {
        matches!(entry.kind, EventKind::GuestsPaused { .. })
    })
    .or_panic_with_logs(&vm);
    wait_for_note(&vm, "has not answered");
    wait_until_still(&vm);
    login.log_out().expect("logs out");
    vm.halt_and_wait().or_panic_with_logs(&vm);
}

/// A tasker that hangs stops no guest: an event says so, and it is killed with its tasks.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn guests_of_a_stopped_tasker_are_ended() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE_ENV]);
    let vm = start_vm_with_guest(&bed);
    let _stopped_tasker = StoppedProcess::new(bed.host(2), ProcessRole::Tasker);
    let login = SshLogin::log_in(&bed, "olga", bed.host(2)).expect("a login");
    vm.wait_for_event(TIMEOUT, "guests that are not stopped", |entry| {
        matches!(entry.kind, EventKind::GuestsNotPaused { .. })
    })
    .or_panic_with_logs(&vm);
    let tasks = vm.tasks().or_panic_with_logs(&vm);
    assert!(
        tasks.iter().all(|task| !task.stopped),
        "nothing is said to be stopped that is not: {tasks:?}"
    );
    vm.wait_for_event(TIMEOUT, "the end of the tasker", |entry| {
        matches!(&entry.kind, EventKind::TaskerGone { why, .. } if why.contains("not answered"))
    })
    .or_panic_with_logs(&vm);
    wait_until_no_process(bed.host(2), TRACE_FILE, TIMEOUT).or_panic_with_logs(&vm);
    login.log_out().expect("logs out");
    vm.halt_and_wait().or_panic_with_logs(&vm);
}
