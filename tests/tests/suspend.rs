//! Suspension and preemption of jobs. The tests use real processes, and check the processes' own
//! records of when they ran, and their processor time.

use pvm_rm::store::{HistoryWriter, StoreLocation};
use sempa_proto::event::EventKind;
use sempa_proto::{Micros, Tid, cgroup};
use sempa_tests::requirements::{self, require_testbed};
use sempa_tests::run::{RunningCommand, run_successfully};
use sempa_tests::testbed::{ALICE_UID, Host, OLGA_UID};
use sempa_tests::vm::{Task, VmSettings};
use sempa_tests::{OrPanicWithLogs, Vm, programs, wait_for};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum time for which suspended tasks are observed, in microseconds.
const OBSERVATION_MIN_US: u64 = 1_000_000;

fn now_us() -> u64 {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since_1970.as_micros()).expect("fits")
}

/// Returns the content of the file at `path` in the file system of a host.
fn read_file(host: &Host, path: &str) -> String {
    let mut command = host.root_command("cat");
    command.arg(path);
    run_successfully(command, TIMEOUT)
        .expect("it is there")
        .stdout
}

/// Returns the state letter of a process, and the processor time that the process has used, in
/// clock ticks.
fn state_and_ticks(host: &Host, pid: i32) -> (String, u64) {
    let stat = read_file(host, &format!("/proc/{pid}/stat"));
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 1..]
        .split_whitespace()
        .collect();
    let ticks = |index: usize| fields[index].parse::<u64>().expect("a number");
    (fields[0].to_string(), ticks(11) + ticks(12))
}

/// True if the control group of a process is frozen.
fn is_frozen(host: &Host, pid: i32) -> bool {
    let read_proc_file = |name: &str| read_file(host, &format!("/proc/{pid}/{name}")).into_bytes();
    let Some(group_folder) = cgroup::group_dir(
        &read_proc_file("mountinfo"),
        &read_proc_file("cgroup"),
        None,
    ) else {
        return false;
    };
    let events_file = group_folder.join("cgroup.events");
    // The root group has no such file and cannot be frozen.
    events_file.exists()
        && read_file(host, &events_file.to_string_lossy())
            .lines()
            .any(|line| line == "frozen 1")
}

fn find_task(vm: &Vm, tid: &str) -> Task {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks
        .into_iter()
        .find(|t| t.tid == tid)
        .unwrap_or_else(|| panic!("{tid} is not there\n{}", vm.events_and_logs()))
}

fn host_of_task<'a>(vm: &Vm<'a>, task: &Task) -> &'a Host {
    let name = task.host.as_deref().expect("it is on a host");
    vm.testbed()
        .hosts()
        .iter()
        .find(|host| host.name() == name)
        .expect("one of ours")
}

/// Waits until a suspended task is stopped by a signal or frozen. Returns the processor time that
/// the task has used, in clock ticks.
fn wait_until_stopped(vm: &Vm, tid: &str) -> u64 {
    let task = find_task(vm, tid);
    assert!(task.suspended && !task.stopped, "{task:?}");
    wait_for(TIMEOUT, || {
        let is_group_frozen = is_frozen(host_of_task(vm, &task), task.pid);
        let (state, ticks) = state_and_ticks(host_of_task(vm, &task), task.pid);
        if is_group_frozen || state == "T" {
            Ok(ticks)
        } else {
            Err(format!("{tid} is in state {state} and not frozen"))
        }
    })
    .or_panic_with_logs(vm)
}

/// Waits until the time `time_us`, in microseconds since 1970.
fn wait_until_time(time_us: u64) {
    wait_for(TIMEOUT, || {
        if now_us() > time_us {
            Ok(())
        } else {
            Err("it is not time".to_string())
        }
    })
    .expect("time passes");
}

/// Runs a `job` command of the console, such as `suspend`. Returns the answer of the resource
/// manager.
fn run_job_command(vm: &Vm, args: &[&str]) -> Value {
    let answer = vm.pvm_json(&[&["job"], args].concat());
    answer.or_panic_with_logs(vm).pop().expect("one value")
}

fn parse_tids(value: &Value) -> Vec<String> {
    let tids = value
        .as_array()
        .expect("a list")
        .iter()
        .map(|tid| tid.as_str().expect("a tid").to_string());
    tids.collect()
}

/// Runs `test` on a virtual machine with a resource manager and a job of two tasks on h2. The
/// second argument of `test` contains the tids of the two tasks.
fn with_job(test: impl FnOnce(&Vm, &[String])) {
    let bed = require_testbed(3);
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: Some("pvm-rm".into()),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("busy").expect("gcc");
    let parent_tid = vm.spawn_connected(&["-h2", "busy", "1"]).expect("spawned");
    // The answer shows that the first task has connected and has spawned the other task.
    vm.busy_gaps_us(&parent_tid).or_panic_with_logs(&vm);
    let busy_tasks = vm
        .tasks()
        .expect("tasks")
        .into_iter()
        .filter(|task| task.name == "busy");
    let job_tids: Vec<String> = busy_tasks.map(|task| task.tid).collect();
    assert!(
        job_tids.len() == 2 && job_tids.contains(&parent_tid),
        "{job_tids:?}"
    );
    for tid in &job_tids {
        vm.busy_gaps_us(tid).or_panic_with_logs(&vm);
    }
    test(&vm, &job_tids);
    vm.halt_and_wait().expect("halts");
}

/// Checks that a task did not run between two times (microseconds since 1970), by the task's own
/// clock, and that the task runs again.
fn assert_did_not_run(vm: &Vm, tid: &str, from_us: u64, to_us: u64) {
    let gaps = vm.busy_gaps_us(tid).or_panic_with_logs(vm);
    assert!(
        gaps.iter().any(|gap| gap.0 <= from_us && gap.1 >= to_us),
        "{tid}: {gaps:?}; it was still from {from_us} to {to_us}"
    );
}

/// The tasks of a suspended job get no processor time, even after one of them has migrated. All
/// tasks continue when the job is resumed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_suspended_job_gets_no_processor_time() {
    with_job(|vm, job_tids| {
        let answer = run_job_command(vm, &["suspend", &job_tids[0]]);
        let mut suspended_tids = parse_tids(&answer["tasks"]);
        suspended_tids.sort();
        let mut all_tids = job_tids.to_vec();
        all_tids.sort();
        assert_eq!(suspended_tids, all_tids, "{answer}");
        let ticks_before: Vec<u64> = job_tids
            .iter()
            .map(|tid| wait_until_stopped(vm, tid))
            .collect();
        let stopped_at_us = now_us();
        let status = run_job_command(vm, &["status", &job_tids[0]]);
        assert!(
            status["job"]["suspended"]["since_us"]
                .as_u64()
                .is_some_and(|since| since <= stopped_at_us),
            "{status}"
        );
        vm.migrate_or_panic(&job_tids[1], "h3");
        let migrated_task = find_task(vm, &job_tids[1]);
        assert_eq!(migrated_task.host.as_deref(), Some("h3"));
        let ticks_at_target = wait_until_stopped(vm, &job_tids[1]);
        wait_until_time(now_us().max(stopped_at_us) + OBSERVATION_MIN_US);
        assert_eq!(
            wait_until_stopped(vm, &job_tids[0]),
            ticks_before[0],
            "it got no processor time"
        );
        assert_eq!(
            wait_until_stopped(vm, &job_tids[1]),
            ticks_at_target,
            "nor did the one that moved"
        );
        let resume_us = now_us();
        let answer = run_job_command(vm, &["resume", &job_tids[1]]);
        assert_eq!(parse_tids(&answer["tasks"]).len(), 2, "{answer}");
        for tid in job_tids {
            assert_did_not_run(vm, tid, stopped_at_us, resume_us);
            assert!(!find_task(vm, tid).suspended);
        }
        let status = run_job_command(vm, &["status", &job_tids[0]]);
        assert!(status["job"]["suspended"].is_null(), "{status}");
        let suspended_us = status["tasks"]
            .as_array()
            .expect("tasks")
            .iter()
            .find(|t| t["tid"] == job_tids[0].as_str());
        let suspended_us = suspended_us
            .and_then(|t| t["suspended_before_us"].as_u64())
            .expect("it is counted");
        assert!(suspended_us >= OBSERVATION_MIN_US, "{status}");
    });
}

/// The resource manager is killed while the job is suspended. The job stays suspended, and the next
/// resource manager resumes it on request.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_stays_suspended_without_its_manager() {
    with_job(|vm, job_tids| {
        run_job_command(vm, &["suspend", &job_tids[0]]);
        let ticks_before: Vec<u64> = job_tids
            .iter()
            .map(|tid| wait_until_stopped(vm, tid))
            .collect();
        let is_registration = |entry: &sempa_tests::vm::EventEntry| {
            matches!(entry.kind, EventKind::RmRegistered { .. })
        };
        let registration_count = |vm: &Vm| {
            vm.events()
                .expect("events")
                .iter()
                .filter(|e| is_registration(e))
                .count()
        };
        let previous_count = registration_count(vm);
        let processes = vm.testbed().host(1).processes();
        let (pid, _) = processes
            .iter()
            .find(|(_, line)| line.contains("pvm-rm"))
            .expect("it runs");
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        )
        .expect("it is there");
        wait_for(TIMEOUT, || {
            if registration_count(vm) > previous_count {
                Ok(())
            } else {
                Err("nobody has registered".to_string())
            }
        })
        .expect("another one");
        let status = run_job_command(vm, &["status", &job_tids[1]]);
        assert!(!status["job"]["suspended"].is_null(), "{status}");
        assert_eq!(
            job_tids
                .iter()
                .map(|tid| wait_until_stopped(vm, tid))
                .collect::<Vec<_>>(),
            ticks_before
        );
        let resume_us = now_us();
        let answer = run_job_command(vm, &["resume", &job_tids[0]]);
        assert_eq!(parse_tids(&answer["tasks"]).len(), 2, "{answer}");
        for tid in job_tids {
            assert_did_not_run(vm, tid, resume_us, resume_us);
            vm.run_pvm(&["kill", tid])
                .expect("pvm")
                .expect_success("kill")
                .expect("it ends");
        }
        // A daemon can suspend a single task without a resource manager. A suspended task can be
        // ended.
        let single_tid = vm.spawn_connected(&["-h3", "busy"]).expect("spawned");
        run_job_command(vm, &["suspend", "--task", &single_tid]);
        wait_until_stopped(vm, &single_tid);
        vm.run_pvm(&["kill", &single_tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        wait_for(TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
            if tasks.iter().all(|t| t.tid != single_tid) {
                Ok(())
            } else {
                Err(format!("{tasks:?}"))
            }
        })
        .expect("a suspended task can be ended");
    });
}

/// Writes a history for a resource manager into `folder`. In this history `user` has the Up-Down
/// index `index`.
fn write_usage_history(folder: &Path, user: u32, index: f64) {
    let store_location = StoreLocation {
        dir: folder.to_path_buf(),
        file_name: "rm-pvm.redb".into(),
    };
    let (mut history_writer, notes) = HistoryWriter::open(Some(&store_location), user, Tid::NONE);
    assert_eq!(notes, Vec::<String>::new());
    history_writer
        .history
        .set_user_indices(Micros(now_us()), [(user, index)]);
    history_writer.close();
}

/// Runs `test` on two hosts whose owners permit one task each. The daemon of h2 runs as alice. In
/// the history of the resource manager root has a high Up-Down index.
fn with_two_users(test: impl FnOnce(&Vm)) {
    let bed = require_testbed(2);
    let prefix = requirements::require_prefix_in_hosts();
    let state_folder = bed.folder().join("state");
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2 lo=alice"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    programs::compile_into(
        "hold",
        &prefix,
        &bed.folder().join("alice/pvm3/bin/LINUX64"),
    )
    .expect("gcc");
    write_usage_history(&state_folder, 0, 100.0);
    let mut manager = vm.user_command(bed.host(1), "pvm-rm");
    manager
        .args(["--wait", "600", "--state"])
        .arg(&state_folder);
    let _manager = RunningCommand::start(manager, Stdio::null()).expect("it starts");
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watcher_count = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher") && task.pid > 0)
            .count();
        if watcher_count == 2 {
            Ok(())
        } else {
            Err(format!("{watcher_count} watchers: {tasks:?}"))
        }
    })
    .or_panic_with_logs(&vm);
    for host in bed.hosts() {
        let olga_home = bed.folder().join("olga");
        let mut owner_command = host.command_as(Some(("olga", OLGA_UID, &olga_home)), "pvm");
        owner_command.args(["owner", "limit", "1", "cores"]);
        run_successfully(owner_command, TIMEOUT).expect("the load watcher confirms the limit");
    }
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

fn why_output(vm: &Vm, tid: &str) -> String {
    vm.run_pvm(&["why", tid])
        .and_then(|output| output.expect_success("why"))
        .expect("an answer")
        .stdout
}

/// A job of a user who has used much processor time is suspended while the job of another user
/// runs, and is resumed afterwards.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_of_heavy_user_is_preempted() {
    with_two_users(|vm| {
        let root_tids: Vec<String> = (0..2)
            .map(|_| vm.spawn_connected(&["hold", "1"]).expect("spawned"))
            .collect();
        let mut host_names: Vec<String> = root_tids
            .iter()
            .map(|tid| vm.host_of(tid).expect("alive"))
            .collect();
        host_names.sort();
        assert_eq!(host_names, ["h1", "h2"], "each host takes one");

        let (host, alice_home) = (vm.testbed().host(2), vm.testbed().folder().join("alice"));
        let mut spawn_command = host.command_as(Some(("alice", ALICE_UID, &alice_home)), "pvm");
        spawn_command.args(["--json", "spawn", "hold", "1"]);
        let spawn_command =
            RunningCommand::start(spawn_command, Stdio::null()).expect("the console runs");
        let spawn_output = spawn_command
            .wait_or_kill(TIMEOUT)
            .and_then(|spawn_output| spawn_output.expect_success("spawn"));
        let spawn_output = spawn_output.or_panic_with_logs(vm);
        let answer: Value = serde_json::from_str(spawn_output.stdout.trim()).expect("a value");
        let alice_tid = answer["results"][0]["tid"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_string();

        let preempted_tid: Vec<&String> = root_tids
            .iter()
            .filter(|tid| find_task(vm, tid).suspended)
            .collect();
        let [preempted_tid] = preempted_tid[..] else {
            panic!(
                "{preempted_tid:?} of {root_tids:?}\n{}",
                vm.events_and_logs()
            )
        };
        assert_eq!(
            vm.host_of(&alice_tid).expect("alive"),
            vm.host_of(preempted_tid).expect("alive")
        );
        let ticks = wait_until_stopped(vm, preempted_tid);
        let why_text = why_output(vm, preempted_tid);
        assert!(
            why_text.contains(&format!(
                "user {ALICE_UID} waits for a host and has used less"
            )),
            "{why_text}"
        );
        wait_until_time(now_us() + OBSERVATION_MIN_US);
        assert_eq!(
            wait_until_stopped(vm, preempted_tid),
            ticks,
            "it gets no processor time"
        );

        vm.run_pvm(&["kill", &alice_tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        let check_resumed = || {
            if find_task(vm, preempted_tid).suspended {
                Err("it is suspended".to_string())
            } else {
                Ok(())
            }
        };
        wait_for(TIMEOUT, check_resumed).or_panic_with_logs(vm);
        let why_text = why_output(vm, preempted_tid);
        assert!(why_text.contains("for user 0 again"), "{why_text}");
        let mut ask_command = vm.user_command(
            vm.testbed().host(1),
            vm.user_home().join("pvm3/bin/LINUX64/hold"),
        );
        ask_command.args(["ask", preempted_tid]);
        let answer = run_successfully(ask_command, TIMEOUT).or_panic_with_logs(vm);
        assert!(answer.stdout.contains("sum GOOD"), "{answer:?}");
    });
}
