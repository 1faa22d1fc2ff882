//! Suspended jobs, and jobs that yield to those of another user: real processes, judged by their
//! own clocks and by their processor time.

use pvm_rm::store::{Ledger, Shelf};
use sempa_proto::event::EventKind;
use sempa_proto::{Micros, Tid, cgroup};
use sempa_tests::needs::{self, testbed};
use sempa_tests::run::{Running, must};
use sempa_tests::testbed::{ALICE_UID, Host, OLGA_UID};
use sempa_tests::vm::{Settings, Task};
use sempa_tests::{Sure, Vm, eventually, programs};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Microseconds for which suspended tasks are watched.
const STAND: u64 = 1_000_000;

fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the content of a file as a host sees it.
fn file(host: &Host, path: &str) -> String {
    let mut command = host.command("cat");
    command.arg(path);
    must(command, TIMEOUT).expect("it is there").out
}

/// Returns the state of a process, and its processor time in ticks.
fn stat(host: &Host, pid: i32) -> (String, u64) {
    let stat = file(host, &format!("/proc/{pid}/stat"));
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 1..]
        .split_whitespace()
        .collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("a number");
    (fields[0].to_string(), ticks(11) + ticks(12))
}

/// Returns true if the control group of a process is frozen.
fn is_frozen(host: &Host, pid: i32) -> bool {
    let of = |name: &str| file(host, &format!("/proc/{pid}/{name}")).into_bytes();
    let Some(group) = cgroup::group_dir(&of("mountinfo"), &of("cgroup"), None) else {
        return false;
    };
    let events = group.join("cgroup.events");
    // The root group has no such file, and cannot be frozen.
    events.exists()
        && file(host, &events.to_string_lossy())
            .lines()
            .any(|line| line == "frozen 1")
}

fn task(vm: &Vm, tid: &str) -> Task {
    let tasks = vm.tasks().sure(vm);
    tasks
        .into_iter()
        .find(|t| t.tid == tid)
        .unwrap_or_else(|| panic!("{tid} is not there\n{}", vm.logs()))
}

fn host<'a>(vm: &Vm<'a>, task: &Task) -> &'a Host {
    let name = task.host.as_deref().expect("it is on a host");
    vm.bed()
        .hosts()
        .iter()
        .find(|host| host.name() == name)
        .expect("one of ours")
}

/// Waits until a task is stopped by a signal or frozen. Returns its processor time.
fn still(vm: &Vm, tid: &str) -> u64 {
    let task = task(vm, tid);
    assert!(task.suspended && !task.stopped, "{task:?}");
    eventually(TIMEOUT, || {
        let stands = is_frozen(host(vm, &task), task.pid);
        let (state, used) = stat(host(vm, &task), task.pid);
        if stands || state == "T" {
            Ok(used)
        } else {
            Err(format!("{tid} is in state {state} and not frozen"))
        }
    })
    .sure(vm)
}

/// Waits until this time.
fn pass(until: u64) {
    eventually(TIMEOUT, || {
        if now() > until {
            Ok(())
        } else {
            Err("it is not time".to_string())
        }
    })
    .expect("time passes");
}

/// Suspends or resumes a job. Returns the answer of the resource manager.
fn order(vm: &Vm, words: &[&str]) -> Value {
    let answer = vm.json(&[&["job"], words].concat());
    answer.sure(vm).pop().expect("one value")
}

fn tids(value: &Value) -> Vec<String> {
    let list = value
        .as_array()
        .expect("a list")
        .iter()
        .map(|tid| tid.as_str().expect("a tid").to_string());
    list.collect()
}

/// Runs a test on a virtual machine with a resource manager and a job of two tasks on h2.
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
    vm.program("busy").expect("gcc");
    let top = vm.spawn(&["-h2", "busy", "1"]).expect("spawned");
    // A task that answers is connected, and has started the other one before.
    vm.gaps(&top).sure(&vm);
    let all = vm
        .tasks()
        .expect("tasks")
        .into_iter()
        .filter(|task| task.name == "busy");
    let job: Vec<String> = all.map(|task| task.tid).collect();
    assert!(job.len() == 2 && job.contains(&top), "{job:?}");
    for tid in &job {
        vm.gaps(tid).sure(&vm);
    }
    test(&vm, &job);
    vm.halt().expect("halts");
}

/// Checks that a task did not run between these times, by its own clock, and that it continues.
fn assert_stood(vm: &Vm, tid: &str, from: u64, to: u64) {
    let gaps = vm.gaps(tid).sure(vm);
    assert!(
        gaps.iter().any(|gap| gap.0 <= from && gap.1 >= to),
        "{tid}: {gaps:?}; it was still from {from} to {to}"
    );
}

/// The tasks of a suspended job can migrate meanwhile, and continue when the job is resumed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_suspended_job_gets_no_processor_time() {
    with_job(|vm, job| {
        let answer = order(vm, &["suspend", &job[0]]);
        let mut suspended = tids(&answer["tasks"]);
        suspended.sort();
        let mut all = job.to_vec();
        all.sort();
        assert_eq!(suspended, all, "{answer}");
        let before: Vec<u64> = job.iter().map(|tid| still(vm, tid)).collect();
        let stand = now();
        let status = order(vm, &["status", &job[0]]);
        assert!(
            status["job"]["suspended"]["since_us"]
                .as_u64()
                .is_some_and(|since| since <= stand),
            "{status}"
        );
        vm.must_migrate(&job[1], "h3");
        let moved = task(vm, &job[1]);
        assert_eq!(moved.host.as_deref(), Some("h3"));
        let there = still(vm, &job[1]);
        pass(now().max(stand) + STAND);
        assert_eq!(still(vm, &job[0]), before[0], "it got no processor time");
        assert_eq!(still(vm, &job[1]), there, "nor did the one that moved");
        let resume = now();
        let answer = order(vm, &["resume", &job[1]]);
        assert_eq!(tids(&answer["tasks"]).len(), 2, "{answer}");
        for tid in job {
            assert_stood(vm, tid, stand, resume);
            assert!(!task(vm, tid).suspended);
        }
        let status = order(vm, &["status", &job[0]]);
        assert!(status["job"]["suspended"].is_null(), "{status}");
        let stood = status["tasks"]
            .as_array()
            .expect("tasks")
            .iter()
            .find(|t| t["tid"] == job[0].as_str());
        let stood = stood
            .and_then(|t| t["suspended_before_us"].as_u64())
            .expect("it is counted");
        assert!(stood >= STAND, "{status}");
    });
}

/// The resource manager is killed, and the next one resumes the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_stays_suspended_without_its_manager() {
    with_job(|vm, job| {
        order(vm, &["suspend", &job[0]]);
        let before: Vec<u64> = job.iter().map(|tid| still(vm, tid)).collect();
        let registered =
            |entry: &sempa_tests::vm::Entry| matches!(entry.kind, EventKind::RmRegistered { .. });
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
        eventually(TIMEOUT, || {
            if times(vm) > first {
                Ok(())
            } else {
                Err("nobody has registered".to_string())
            }
        })
        .expect("another one");
        let status = order(vm, &["status", &job[1]]);
        assert!(!status["job"]["suspended"].is_null(), "{status}");
        assert_eq!(
            job.iter().map(|tid| still(vm, tid)).collect::<Vec<_>>(),
            before
        );
        let resume = now();
        let answer = order(vm, &["resume", &job[0]]);
        assert_eq!(tids(&answer["tasks"]).len(), 2, "{answer}");
        for tid in job {
            assert_stood(vm, tid, resume, resume);
            vm.pvm(&["kill", tid])
                .expect("pvm")
                .expect_good("kill")
                .expect("it ends");
        }
        // A single task: its daemon suspends it without a resource manager, and it can be ended
        // meanwhile.
        let alone = vm.spawn(&["-h3", "busy"]).expect("spawned");
        order(vm, &["suspend", "--task", &alone]);
        still(vm, &alone);
        vm.pvm(&["kill", &alone])
            .expect("pvm")
            .expect_good("kill")
            .expect("it ends");
        eventually(TIMEOUT, || {
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

/// Writes the history of a resource manager in this folder: a user has used much.
fn has_taken(folder: &Path, user: u32, index: f64) {
    let shelf = Shelf {
        dir: folder.to_path_buf(),
        name: "rm-pvm.redb".into(),
    };
    let (mut ledger, notes) = Ledger::open(Some(&shelf), user, Tid::NONE);
    assert_eq!(notes, Vec::<String>::new());
    ledger.books.set_indices(Micros(now()), [(user, index)]);
    ledger.close();
}

/// Runs a test on two hosts whose owners allow one task each. h2 is used as alice, and root has
/// used much.
fn with_two_users(test: impl FnOnce(&Vm)) {
    let bed = testbed(2);
    let prefix = needs::prefix_in_bed();
    let state = bed.folder().join("state");
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2 lo=alice"]).expect("it joins");
    vm.program("hold").expect("gcc");
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
        must(owner, TIMEOUT).expect("her word is believed");
    }
    has_taken(&state, 0, 100.0);
    let mut manager = vm.command(bed.host(1), "pvm-rm");
    manager.args(["--wait", "600", "--state"]).arg(&state);
    let _manager = Running::start(manager, Stdio::null()).expect("it starts");
    eventually(TIMEOUT, || {
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
    .sure(&vm);
    test(&vm);
    vm.halt().expect("halts");
}

fn why(vm: &Vm, tid: &str) -> String {
    vm.pvm(&["why", tid])
        .and_then(|done| done.expect_good("why"))
        .expect("an answer")
        .out
}

/// A job of a user who has used much is suspended while another user's job runs, and resumed after
/// it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_user_with_a_large_share_yields_to_another() {
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
        let spawn = Running::start(spawn, Stdio::null()).expect("the console runs");
        let done = spawn
            .finish(TIMEOUT)
            .and_then(|done| done.expect_good("spawn"));
        let done = done.sure(vm);
        let answer: Value = serde_json::from_str(done.out.trim()).expect("a value");
        let theirs = answer["results"][0]["tid"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_string();

        let gave_way: Vec<&String> = farm.iter().filter(|tid| task(vm, tid).suspended).collect();
        let [gave_way] = gave_way[..] else {
            panic!("{gave_way:?} of {farm:?}\n{}", vm.logs())
        };
        assert_eq!(
            vm.host_of(&theirs).expect("alive"),
            vm.host_of(gave_way).expect("alive")
        );
        let used = still(vm, gave_way);
        let told = why(vm, gave_way);
        assert!(
            told.contains(&format!(
                "user {ALICE_UID} waits for a host and has used less"
            )),
            "{told}"
        );
        pass(now() + STAND);
        assert_eq!(still(vm, gave_way), used, "it gets no processor time");

        vm.pvm(&["kill", &theirs])
            .expect("pvm")
            .expect_good("kill")
            .expect("it ends");
        let goes_on = || {
            if task(vm, gave_way).suspended {
                Err("it is suspended".to_string())
            } else {
                Ok(())
            }
        };
        eventually(TIMEOUT, goes_on).sure(vm);
        let told = why(vm, gave_way);
        assert!(told.contains("for user 0 again"), "{told}");
        let mut ask = vm.command(vm.bed().host(1), vm.home().join("pvm3/bin/LINUX64/hold"));
        ask.args(["ask", gave_way]);
        let answer = must(ask, TIMEOUT).sure(vm);
        assert!(answer.out.contains("sum GOOD"), "{answer:?}");
    });
}
