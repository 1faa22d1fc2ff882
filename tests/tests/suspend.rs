//! Suspension and preemption of jobs. The tests use real processes, and check their own records of
//! when they ran and their processor time.

use pvm_rm::store::{HistoryWriter, StoreLocation};
use sempa_proto::event::EventKind;
use sempa_proto::{Micros, Tid, cgroup};
use sempa_tests::requirements::{self, testbed};
use sempa_tests::run::{RunningCommand, run_ok};
use sempa_tests::testbed::{ALICE_UID, Host, OLGA_UID};
use sempa_tests::vm::{Settings, Task};
use sempa_tests::{OrPanicWithLogs, Vm, programs, wait_for};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Microseconds for which suspended tasks are observed.
const OBSERVED_US: u64 = 1_000_000;

fn now_us() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the content of a file, as a host sees it.
fn read_file(host: &Host, path: &str) -> String {
    let mut command = host.command("cat");
    command.arg(path);
    run_ok(command, TIMEOUT).expect("it is there").out
}

/// Returns the state of a process, and the processor time that it has used in ticks.
fn state_and_ticks(host: &Host, pid: i32) -> (String, u64) {
    let stat = read_file(host, &format!("/proc/{pid}/stat"));
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 1..]
        .split_whitespace()
        .collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("a number");
    (fields[0].to_string(), ticks(11) + ticks(12))
}

/// True if the control group of a process is frozen.
fn is_frozen(host: &Host, pid: i32) -> bool {
    let of = |name: &str| read_file(host, &format!("/proc/{pid}/{name}")).into_bytes();
    let Some(group) = cgroup::group_dir(&of("mountinfo"), &of("cgroup"), None) else {
        return false;
    };
    let events = group.join("cgroup.events");
    // The root group has no such file; it cannot be frozen.
    events.exists()
        && read_file(host, &events.to_string_lossy())
            .lines()
            .any(|line| line == "frozen 1")
}

fn find_task(vm: &Vm, tid: &str) -> Task {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks
        .into_iter()
        .find(|t| t.tid == tid)
        .unwrap_or_else(|| panic!("{tid} is not there\n{}", vm.logs()))
}

fn host_of_task<'a>(vm: &Vm<'a>, task: &Task) -> &'a Host {
    let name = task.host.as_deref().expect("it is on a host");
    vm.bed()
        .hosts()
        .iter()
        .find(|host| host.name() == name)
        .expect("one of ours")
}

/// Waits until a task is stopped by a signal or frozen. Returns the processor time that it has
/// used, in ticks.
fn wait_until_stopped(vm: &Vm, tid: &str) -> u64 {
    let task = find_task(vm, tid);
    assert!(task.suspended && !task.stopped, "{task:?}");
    wait_for(TIMEOUT, || {
        let stands = is_frozen(host_of_task(vm, &task), task.pid);
        let (state, used) = state_and_ticks(host_of_task(vm, &task), task.pid);
        if stands || state == "T" {
            Ok(used)
        } else {
            Err(format!("{tid} is in state {state} and not frozen"))
        }
    })
    .or_panic_with_logs(vm)
}

/// Waits until the time `until`, in microseconds since 1970.
fn wait_until_time(until: u64) {
    wait_for(TIMEOUT, || {
        if now_us() > until {
            Ok(())
        } else {
            Err("it is not time".to_string())
        }
    })
    .expect("time passes");
}

/// Runs a `job` command of the console, such as `suspend`. Returns the answer of the resource
/// manager.
fn run_job_command(vm: &Vm, words: &[&str]) -> Value {
    let answer = vm.json(&[&["job"], words].concat());
    answer.or_panic_with_logs(vm).pop().expect("one value")
}

fn tids(value: &Value) -> Vec<String> {
    let list = value
        .as_array()
        .expect("a list")
        .iter()
        .map(|tid| tid.as_str().expect("a tid").to_string());
    list.collect()
}

/// Runs `test` on a virtual machine with a resource manager and a job of two tasks on h2. The
/// second argument of `test` is the tids of the job.
fn with_job(test: impl FnOnce(&Vm, &[String])) {
    let bed = testbed(3);
    let vm = Vm::start(
        &bed,
        Settings {
            rm: Some("pvm-rm".into()),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("busy").expect("gcc");
    let top = vm.spawn(&["-h2", "busy", "1"]).expect("spawned");
    // An answer shows that the first task is connected; it spawns the other task before it answers.
    vm.busy_gaps(&top).or_panic_with_logs(&vm);
    let all = vm
        .tasks()
        .expect("tasks")
        .into_iter()
        .filter(|task| task.name == "busy");
    let job: Vec<String> = all.map(|task| task.tid).collect();
    assert!(job.len() == 2 && job.contains(&top), "{job:?}");
    for tid in &job {
        vm.busy_gaps(tid).or_panic_with_logs(&vm);
    }
    test(&vm, &job);
    vm.halt().expect("halts");
}

/// Checks that a task did not run between two times, by its own clock, and that it continues.
fn assert_not_run(vm: &Vm, tid: &str, from: u64, to: u64) {
    let gaps = vm.busy_gaps(tid).or_panic_with_logs(vm);
    assert!(
        gaps.iter().any(|gap| gap.0 <= from && gap.1 >= to),
        "{tid}: {gaps:?}; it was still from {from} to {to}"
    );
}

/// A task of a suspended job can migrate. All tasks continue when the job is resumed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_suspended_job_gets_no_processor_time() {
    with_job(|vm, job| {
        let answer = run_job_command(vm, &["suspend", &job[0]]);
        let mut suspended = tids(&answer["tasks"]);
        suspended.sort();
        let mut all = job.to_vec();
        all.sort();
        assert_eq!(suspended, all, "{answer}");
        let before: Vec<u64> = job.iter().map(|tid| wait_until_stopped(vm, tid)).collect();
        let stand = now_us();
        let status = run_job_command(vm, &["status", &job[0]]);
        assert!(
            status["job"]["suspended"]["since_us"]
                .as_u64()
                .is_some_and(|since| since <= stand),
            "{status}"
        );
        vm.must_migrate(&job[1], "h3");
        let moved = find_task(vm, &job[1]);
        assert_eq!(moved.host.as_deref(), Some("h3"));
        let there = wait_until_stopped(vm, &job[1]);
        wait_until_time(now_us().max(stand) + OBSERVED_US);
        assert_eq!(
            wait_until_stopped(vm, &job[0]),
            before[0],
            "it got no processor time"
        );
        assert_eq!(
            wait_until_stopped(vm, &job[1]),
            there,
            "nor did the one that moved"
        );
        let resume = now_us();
        let answer = run_job_command(vm, &["resume", &job[1]]);
        assert_eq!(tids(&answer["tasks"]).len(), 2, "{answer}");
        for tid in job {
            assert_not_run(vm, tid, stand, resume);
            assert!(!find_task(vm, tid).suspended);
        }
        let status = run_job_command(vm, &["status", &job[0]]);
        assert!(status["job"]["suspended"].is_null(), "{status}");
        let stood = status["tasks"]
            .as_array()
            .expect("tasks")
            .iter()
            .find(|t| t["tid"] == job[0].as_str());
        let stood = stood
            .and_then(|t| t["suspended_before_us"].as_u64())
            .expect("it is counted");
        assert!(stood >= OBSERVED_US, "{status}");
    });
}

/// The resource manager is killed while the job is suspended. The next one resumes the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_stays_suspended_without_its_manager() {
    with_job(|vm, job| {
        run_job_command(vm, &["suspend", &job[0]]);
        let before: Vec<u64> = job.iter().map(|tid| wait_until_stopped(vm, tid)).collect();
        let registered = |entry: &sempa_tests::vm::EventEntry| {
            matches!(entry.kind, EventKind::RmRegistered { .. })
        };
        let times = |vm: &Vm| {
            vm.events()
                .expect("events")
                .iter()
                .filter(|e| registered(e))
                .count()
        };
        let first = times(vm);
        let processes = vm.bed().host(1).processes();
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
            if times(vm) > first {
                Ok(())
            } else {
                Err("nobody has registered".to_string())
            }
        })
        .expect("another one");
        let status = run_job_command(vm, &["status", &job[1]]);
        assert!(!status["job"]["suspended"].is_null(), "{status}");
        assert_eq!(
            job.iter()
                .map(|tid| wait_until_stopped(vm, tid))
                .collect::<Vec<_>>(),
            before
        );
        let resume = now_us();
        let answer = run_job_command(vm, &["resume", &job[0]]);
        assert_eq!(tids(&answer["tasks"]).len(), 2, "{answer}");
        for tid in job {
            assert_not_run(vm, tid, resume, resume);
            vm.pvm(&["kill", tid])
                .expect("pvm")
                .expect_success("kill")
                .expect("it ends");
        }
        // A daemon can suspend a single task without a resource manager. A suspended task can be
        // ended.
        let alone = vm.spawn(&["-h3", "busy"]).expect("spawned");
        run_job_command(vm, &["suspend", "--task", &alone]);
        wait_until_stopped(vm, &alone);
        vm.pvm(&["kill", &alone])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        wait_for(TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
            if tasks.iter().all(|t| t.tid != alone) {
                Ok(())
            } else {
                Err(format!("{tasks:?}"))
            }
        })
        .expect("a suspended task can be ended");
    });
}

/// Writes the history of a resource manager into `folder`, in which `user` has used much.
fn write_usage_history(folder: &Path, user: u32, index: f64) {
    let shelf = StoreLocation {
        dir: folder.to_path_buf(),
        file_name: "rm-pvm.redb".into(),
    };
    let (mut ledger, notes) = HistoryWriter::open(Some(&shelf), user, Tid::NONE);
    assert_eq!(notes, Vec::<String>::new());
    ledger
        .history
        .set_indices(Micros(now_us()), [(user, index)]);
    ledger.close();
}

/// Runs `test` on two hosts whose owners permit one task each. h2 is used by alice, and root has
/// used much.
fn with_two_users(test: impl FnOnce(&Vm)) {
    let bed = testbed(2);
    let prefix = requirements::prefix_in_bed();
    let state = bed.folder().join("state");
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2 lo=alice"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    programs::compile(
        "hold",
        &prefix,
        &bed.folder().join("alice/pvm3/bin/LINUX64"),
    )
    .expect("gcc");
    for host in bed.hosts() {
        let home = bed.folder().join("olga");
        let mut owner = host.command_as(Some(("olga", OLGA_UID, &home)), "pvm");
        owner.args(["owner", "limit", "1", "cores"]);
        run_ok(owner, TIMEOUT).expect("her word is believed");
    }
    write_usage_history(&state, 0, 100.0);
    let mut manager = vm.command(bed.host(1), "pvm-rm");
    manager.args(["--wait", "600", "--state"]).arg(&state);
    let _manager = RunningCommand::start(manager, Stdio::null()).expect("it starts");
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watchers = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher") && task.pid > 0)
            .count();
        if watchers == 2 {
            Ok(())
        } else {
            Err(format!("{watchers} watchers: {tasks:?}"))
        }
    })
    .or_panic_with_logs(&vm);
    test(&vm);
    vm.halt().expect("halts");
}

fn why(vm: &Vm, tid: &str) -> String {
    vm.pvm(&["why", tid])
        .and_then(|done| done.expect_success("why"))
        .expect("an answer")
        .out
}

/// A job of a user who has used much is suspended while the job of another user runs, and is
/// resumed afterwards.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_of_heavy_user_is_preempted() {
    with_two_users(|vm| {
        let farm: Vec<String> = (0..2)
            .map(|_| vm.spawn(&["hold", "1"]).expect("spawned"))
            .collect();
        let mut places: Vec<String> = farm
            .iter()
            .map(|tid| vm.host_of(tid).expect("alive"))
            .collect();
        places.sort();
        assert_eq!(places, ["h1", "h2"], "each host takes one");

        let (host, home) = (vm.bed().host(2), vm.bed().folder().join("alice"));
        let mut spawn = host.command_as(Some(("alice", ALICE_UID, &home)), "pvm");
        spawn.args(["--json", "spawn", "hold", "1"]);
        let spawn = RunningCommand::start(spawn, Stdio::null()).expect("the console runs");
        let done = spawn
            .finish(TIMEOUT)
            .and_then(|done| done.expect_success("spawn"));
        let done = done.or_panic_with_logs(vm);
        let answer: Value = serde_json::from_str(done.out.trim()).expect("a value");
        let theirs = answer["results"][0]["tid"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_string();

        let gave_way: Vec<&String> = farm
            .iter()
            .filter(|tid| find_task(vm, tid).suspended)
            .collect();
        let [gave_way] = gave_way[..] else {
            panic!("{gave_way:?} of {farm:?}\n{}", vm.logs())
        };
        assert_eq!(
            vm.host_of(&theirs).expect("alive"),
            vm.host_of(gave_way).expect("alive")
        );
        let used = wait_until_stopped(vm, gave_way);
        let told = why(vm, gave_way);
        assert!(
            told.contains(&format!(
                "user {ALICE_UID} waits for a place and has taken less"
            )),
            "{told}"
        );
        wait_until_time(now_us() + OBSERVED_US);
        assert_eq!(
            wait_until_stopped(vm, gave_way),
            used,
            "it gets no processor time"
        );

        vm.pvm(&["kill", &theirs])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        let goes_on = || {
            if find_task(vm, gave_way).suspended {
                Err("it is suspended".to_string())
            } else {
                Ok(())
            }
        };
        wait_for(TIMEOUT, goes_on).or_panic_with_logs(vm);
        let told = why(vm, gave_way);
        assert!(told.contains("for user 0 again"), "{told}");
        let mut ask = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
        ask.args(["ask", gave_way]);
        let answer = run_ok(ask, TIMEOUT).or_panic_with_logs(vm);
        assert!(answer.out.contains("sum GOOD"), "{answer:?}");
    });
}
