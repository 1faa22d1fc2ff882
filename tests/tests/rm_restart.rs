//! After the resource manager is killed, the virtual machine continues. The next resource manager
//! continues with the history of the previous one.

use nix::fcntl::{Flock, FlockArg};
use pvm_rm::store::history::{DECISIONS_MAX, TASKS_MAX};
use pvm_rm::store::{HistoryWriter, StoreLocation};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    DecisionKind, PlacementAttempt, PlacementRule, RejectedHost, RejectionReason,
};
use sempa_proto::{HostId, Micros, Tid};
use sempa_tests::faults::tests_all_cases;
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::run_to_end;
use sempa_tests::ssh::SshLogin;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time from the death of a resource manager to the registration of the next one. The time
/// depends on the machine, so it is checked only with `SEMPA_TEST_FULL=1`.
const RESTART_TIME_MAX: Duration = Duration::from_secs(2);

fn with_rm(host_count: usize, test: impl FnOnce(&Vm)) {
    let bed = require_testbed(host_count);
    with_rm_command(&bed, "pvm-rm".into(), test);
}

fn with_rm_command(bed: &Testbed, rm_command: String, test: impl FnOnce(&Vm)) {
    let host_count = bed.hosts().len();
    let vm = Vm::start(
        bed,
        VmSettings {
            rm_command: Some(rm_command),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    let other_hosts: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add_hosts(&other_hosts).expect("the others join");
    wait_for_watchers(&vm, host_count);
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt_and_wait().expect("halts");
    for host in bed.hosts() {
        let daemon_folder = host.machine_path("/tmp/sempa-0/pvm");
        assert!(
            !daemon_folder.exists(),
            "{} is left",
            daemon_folder.display()
        );
    }
}

/// Waits until each host has a load watcher. Returns the tids of the load watchers.
fn wait_for_watchers(vm: &Vm, host_count: usize) -> Vec<String> {
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watchers = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher") && task.pid > 0);
        let tids: Vec<String> = watchers.map(|task| task.tid.clone()).collect();
        if tids.len() == host_count {
            Ok(tids)
        } else {
            Err(format!("{tids:?}: {tasks:?}\n{}", vm.events_and_logs()))
        }
    })
    .expect("a load watcher on every host")
}

/// Kills the first process on h1 whose command line contains `line_part`.
fn kill_matching_process(vm: &Vm, line_part: &str) {
    let processes = vm.testbed().host(1).processes();
    let (pid, _) = processes
        .iter()
        .find(|(_, line)| line.contains(line_part))
        .unwrap_or_else(|| panic!("{processes:?}"));
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it is there");
}

fn registration_times_us(events: &[EventEntry]) -> Vec<u64> {
    events
        .iter()
        .filter(|e| matches!(e.kind, EventKind::RmRegistered { .. }))
        .map(|e| e.at_us)
        .collect()
}

/// Kills the resource manager and waits until the next one has registered. With `SEMPA_TEST_FULL=1`
/// the time without a resource manager must be shorter than [`RESTART_TIME_MAX`].
fn kill_rm_and_wait_for_next(vm: &Vm) {
    let previous_count = registration_times_us(&vm.events().expect("events")).len();
    kill_matching_process(vm, "pvm-rm");
    let time_without_rm_us = |events: &[EventEntry]| {
        let end_us = events
            .iter()
            .rev()
            .find(|e| matches!(e.kind, EventKind::RmGone { .. }))
            .map(|e| e.at_us)?;
        let times_us = registration_times_us(events);
        (times_us.len() > previous_count)
            .then(|| times_us.last().copied().unwrap_or(0).saturating_sub(end_us))
    };
    let restart_time = wait_for(TIMEOUT, || {
        let events = vm.events().map_err(|error| format!("{error:#}"))?;
        time_without_rm_us(&events).ok_or_else(|| "nobody has registered".to_string())
    });
    let restart_time = Duration::from_micros(restart_time.or_panic_with_logs(vm));
    eprintln!("the next resource manager has registered after {restart_time:.2?}");
    assert!(
        !tests_all_cases() || restart_time < RESTART_TIME_MAX,
        "{restart_time:?}"
    );
}

/// Waits until the resource manager has written its current history to its file.
fn wait_until_history_is_written(vm: &Vm) {
    wait_until_file_is_written(
        vm,
        &vm.testbed()
            .host(1)
            .machine_path("/tmp/sempa-0/pvm/rm.redb"),
    );
}

fn wait_until_file_is_written(vm: &Vm, path: &Path) {
    let now = SystemTime::now();
    wait_for(TIMEOUT * 5, || {
        // Each console command is a task that the resource manager must record, so the resource
        // manager writes its file again.
        vm.events().map_err(|error| format!("{error:#}"))?;
        let modified_at = path
            .metadata()
            .and_then(|meta| meta.modified())
            .map_err(|error| error.to_string())?;
        if modified_at > now {
            Ok(())
        } else {
            Err(format!("{} was written before", path.display()))
        }
    })
    .expect("it is written");
}

fn explain(vm: &Vm, subject: &str) -> Value {
    vm.pvm_json(&["why", subject])
        .expect("an answer")
        .pop()
        .expect("one value")
}

fn decision_kinds(answer: &Value) -> Vec<String> {
    let decisions = answer["decisions"].as_array().cloned().unwrap_or_default();
    let decision_kind = |d: &Value| {
        d["decided"]
            .as_object()
            .and_then(|o| o.keys().next().cloned())
    };
    decisions.iter().filter_map(decision_kind).collect()
}

/// The next resource manager answers questions about decisions of the previous resource manager,
/// and records the end of a task that the previous resource manager had placed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_resource_manager_keeps_its_knowledge() {
    with_rm(2, |vm| {
        let tid = vm.spawn_connected(&["hold", "1"]).expect("spawned");
        let answer_before = explain(vm, &tid);
        assert_eq!(decision_kinds(&answer_before), ["Spawn"], "{answer_before}");
        wait_until_history_is_written(vm);
        kill_rm_and_wait_for_next(vm);
        let answer_after = explain(vm, &tid);
        assert_eq!(answer_after["task"], answer_before["task"]);
        assert_eq!(decision_kinds(&answer_after), ["Spawn"], "{answer_after}");
        vm.run_pvm(&["kill", &tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        let job = answer_before["task"]["job"]
            .as_str()
            .expect("a job")
            .to_string();
        wait_for(TIMEOUT, || {
            let status = vm
                .pvm_json(&["job", "status", &job])
                .map_err(|error| format!("{error:#}"))?;
            let tasks = status[0]["tasks"].as_array().cloned().unwrap_or_default();
            let task_end = tasks
                .iter()
                .find(|task| task["tid"] == tid.as_str())
                .map(|task| task["end"].clone());
            if task_end == Some("killed by signal 15".into()) {
                Ok(())
            } else {
                Err(format!("{task_end:?}: {status:?}"))
            }
        })
        .expect("its end is counted");
    });
}

/// Fills the history of a resource manager in `folder` up to its limits.
fn fill_history(folder: &Path) {
    let store_location = StoreLocation {
        dir: folder.to_path_buf(),
        file_name: "rm-pvm.redb".into(),
    };
    let (mut history_writer, notes) = HistoryWriter::open(Some(&store_location), 0, Tid::NONE);
    assert_eq!(notes, Vec::<String>::new());
    let host = |n: u32| HostId::new(1 + (n % 200) as u16).expect("an index");
    let tid = |n: u32| Tid::for_task(host(n), 10 + n).expect("a task");
    for n in 0..TASKS_MAX as u32 {
        let (at, root_index) = (
            Micros::from_secs(1_700_000_000 + u64::from(n)),
            n / 100 * 100,
        );
        let parent = if n == root_index {
            Tid::NONE
        } else {
            tid(root_index)
        };
        let started = EventKind::TaskStarted {
            tid: tid(n),
            parent,
            name: "/home/olga/bin/worker".into(),
            user: 0,
        };
        let end_event = EventKind::TaskEnded {
            tid: tid(n),
            status: 0,
            used: Usage::default(),
        };
        for (i, kind) in [started, end_event].into_iter().enumerate() {
            history_writer.history.apply_event(&Event {
                number: u64::from(2 * n) + 1 + i as u64,
                at,
                host: host(n),
                kind,
            });
        }
    }
    let why = RejectionReason::Other {
        why: "its owner allows two tasks, and as many are present".into(),
    };
    let rejected_hosts: Vec<RejectedHost> = (0..8)
        .map(|n| RejectedHost {
            host: format!("host{n}"),
            why: why.clone(),
        })
        .collect();
    for n in 0..DECISIONS_MAX as u32 {
        let reason_text = "largest share of a processor, 1.97 on host2".to_string();
        let attempts = vec![PlacementAttempt {
            rule: PlacementRule::Rank,
            reason: reason_text,
            rejected_hosts: rejected_hosts.clone(),
        }];
        let (program, started) = (
            "worker".to_string(),
            (0..4).map(|i| (tid(n + i), format!("host{i}"))).collect(),
        );
        let (requester, job, user, count, error, waited) = (tid(n), tid(n), 0, 4, None, Micros(0));
        let decision = DecisionKind::Spawn {
            program,
            requested_by: requester,
            job,
            user,
            count,
            started,
            error,
            waited,
            attempts,
        };
        history_writer
            .history
            .record_decision(Micros::from_secs(1_700_000_000 + u64::from(n)), decision);
    }
    history_writer.close();
    // On a loaded machine the last batch takes longer than `close` waits. The resource manager
    // must find the file unlocked, or it runs without a history.
    let history_file = File::open(folder.join("rm-pvm.redb")).expect("the file exists");
    drop(Flock::lock(history_file, FlockArg::LockExclusive).expect("the writer unlocks the file"));
}

/// A resource manager with a full history is killed. A spawn succeeds in the meantime, and the next
/// resource manager can explain the earlier decisions.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn full_history_does_not_delay_spawns() {
    let bed = require_testbed(2);
    let state_folder = bed.folder().join("state");
    fill_history(&state_folder);
    let history_file = state_folder.join("rm-pvm.redb");
    with_rm_command(
        &bed,
        format!("pvm-rm --state {}", state_folder.display()),
        |vm| {
            let tid = vm.spawn_connected(&["hold", "1"]).expect("spawned");
            let answer_before = explain(vm, &tid);
            assert_eq!(decision_kinds(&answer_before), ["Spawn"], "{answer_before}");
            wait_until_file_is_written(vm, &history_file);
            let file_bytes = history_file.metadata().expect("it is there").len();
            let start = Instant::now();
            kill_matching_process(vm, "pvm-rm");
            std::thread::scope(|scope| {
                let spawner = scope.spawn(|| {
                    let start = Instant::now();
                    let tid = vm
                        .spawn_connected(&["hold", "1"])
                        .expect("spawned with or without the resource manager");
                    (tid, start.elapsed())
                });
                let answer_time = wait_for(TIMEOUT, || {
                    let output = vm
                        .run_pvm(&["--json", "why", &tid])
                        .map_err(|error| format!("{error:#}"))?;
                    if output.succeeded() {
                        Ok(start.elapsed())
                    } else {
                        Err(output.stderr)
                    }
                });
                let answer_time = answer_time.or_panic_with_logs(vm);
                let (second_tid, spawn_time) = spawner.join().expect("no spawn fails");
                println!(
                    "with {} MB of books: answered after {:.2} s, a spawn meanwhile took {:.2} s",
                    file_bytes / 1_000_000,
                    answer_time.as_secs_f64(),
                    spawn_time.as_secs_f64()
                );
                let longest_time = answer_time.max(spawn_time);
                assert!(
                    !tests_all_cases() || longest_time < RESTART_TIME_MAX * 4,
                    "{longest_time:?}"
                );
                assert_eq!(decision_kinds(&explain(vm, &tid)), ["Spawn"]);
                for tid in [&tid, &second_tid] {
                    vm.run_pvm(&["kill", tid])
                        .expect("pvm")
                        .expect_success("kill")
                        .expect("it ends");
                }
            });
        },
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_spawn_fails_while_resource_managers_die() {
    with_rm(2, |vm| {
        let mut tids = Vec::new();
        for _ in 0..4 {
            let new_tids: Vec<String> = std::thread::scope(|scope| {
                let spawner = scope.spawn(|| {
                    (0..6)
                        .map(|_| {
                            vm.spawn_connected(&["hold", "1"])
                                .expect("spawned with or without the resource manager")
                        })
                        .collect::<Vec<_>>()
                });
                kill_rm_and_wait_for_next(vm);
                spawner.join().expect("no spawn fails")
            });
            tids.extend(new_tids);
        }
        let tasks = vm.tasks().expect("a list");
        assert!(
            tids.iter()
                .all(|tid| tasks.iter().any(|task| task.tid == *tid)),
            "{tids:?}: {tasks:?}"
        );
        let usage = vm.pvm_json(&["usage"]).expect("usage");
        let counted_task_count = usage[0]["users"][0]["sums"]["tasks"].as_u64().unwrap_or(0);
        assert!(
            counted_task_count >= tids.len() as u64,
            "{counted_task_count} of {} tasks are counted: {usage:?}",
            tids.len()
        );
        wait_for_watchers(vm, 2);
    });
}

/// Runs a program that spawns `count` tasks, one after another. Returns their tids.
fn spawn_one_by_one(vm: &Vm, program: &Path, count: usize) -> Vec<String> {
    let mut command = vm.user_command(vm.testbed().host(1), program);
    command.arg(count.to_string());
    let output = run_to_end(command, TIMEOUT * 2)
        .expect("it ends")
        .expect_success("the spawns")
        .expect("all are started");
    assert!(
        output.stdout.ends_with(&format!("all {count} ended\n")),
        "{output:?}"
    );
    output
        .stdout
        .lines()
        .filter(|line| line.starts_with('t'))
        .map(str::to_string)
        .collect()
}

/// A program that spawns tasks one after another sends requests only for some of them, because it
/// gets placement leases. The placement of every task can be explained.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn repeated_spawns_use_leases_and_are_explained() {
    with_rm(3, |vm| {
        let program = vm.compile_program("one_by_one").expect("gcc");
        let tids = spawn_one_by_one(vm, &program, 30);
        assert_eq!(tids.iter().collect::<BTreeSet<_>>().len(), 30, "{tids:?}");
        let used_lease = |tid: &String| explain(vm, tid).to_string().contains("granted in advance");
        let lease_count = tids.iter().filter(|tid| used_lease(tid)).count();
        // The program always sends requests for the first two tasks. It sends a further request if
        // a placement lease arrives late.
        assert!(
            (1..=28).contains(&lease_count),
            "{lease_count} of {tids:?}\n{}",
            vm.events_and_logs()
        );
        let placed_count = vm
            .events()
            .expect("events")
            .iter()
            .filter(|e| matches!(e.kind, EventKind::Placed { .. }))
            .count();
        assert!(placed_count >= 30, "{placed_count}");
        let hosts: BTreeSet<_> = tids
            .iter()
            .map(|tid| u32::from_str_radix(&tid[1..], 16).expect("a tid") >> 18)
            .collect();
        assert!(hosts.len() > 1, "they are spread: {tids:?}");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn repeated_spawns_survive_resource_managers() {
    with_rm(2, |vm| {
        let program = vm.compile_program("one_by_one").expect("gcc");
        std::thread::scope(|scope| {
            let spawner = scope.spawn(|| spawn_one_by_one(vm, &program, 200));
            for _ in 0..2 {
                kill_rm_and_wait_for_next(vm);
            }
            assert_eq!(spawner.join().expect("no spawn fails").len(), 200);
        });
        wait_for_watchers(vm, 2);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_waiting_spawn_survives_its_resource_manager() {
    let bed = require_testbed(2);
    let record_path = bed.root_home().join("record");
    let rm_command = format!(
        "pvm-rm --user-tasks 1 --wait 600 --record {}",
        record_path.display()
    );
    with_rm_command(&bed, rm_command, |vm| {
        let first_tid = vm.spawn_connected(&["hold", "1"]).expect("one is allowed");
        wait_until_history_is_written(vm);
        std::thread::scope(|scope| {
            let spawner = scope.spawn(|| {
                vm.spawn_connected(&["hold", "23"])
                    .expect("it waits as long as it has to")
            });
            wait_for(TIMEOUT, || {
                let bytes = std::fs::read(&record_path).map_err(|error| error.to_string())?;
                let request_count = bytes.windows(4).filter(|bytes| bytes == b"hold").count();
                if request_count > 1 {
                    Ok(())
                } else {
                    Err("it has not asked".to_string())
                }
            })
            .expect("it asks");
            // The answer to this question shows that the resource manager has handled the spawn
            // request before it.
            explain(vm, &first_tid);
            for _ in 0..2 {
                kill_rm_and_wait_for_next(vm);
                explain(vm, &first_tid);
            }
            let hold_task_count = || {
                vm.tasks()
                    .expect("a list")
                    .iter()
                    .filter(|task| task.name.ends_with("hold"))
                    .count()
            };
            assert_eq!(
                hold_task_count(),
                1,
                "nobody has started it in spite of the limit"
            );
            assert!(!spawner.is_finished());
            vm.run_pvm(&["kill", &first_tid])
                .expect("pvm")
                .expect_success("kill")
                .expect("it ends");
            let second_tid = spawner.join().expect("it is started");
            let answer = explain(vm, &second_tid);
            assert_eq!(decision_kinds(&answer), ["Spawn"], "{answer}");
            let waited_us = answer["decisions"][0]["decided"]["Spawn"]["waited"].as_u64();
            assert!(waited_us.is_some_and(|waited_us| waited_us > 0), "{answer}");
        });
    });
}

/// Starts two hosts with load watchers and a resource manager. The resource manager is started by a
/// spawn and not by the master, so the master does not restart the resource manager. Returns the
/// virtual machine and the tids of the load watchers.
fn start_with_manual_rm(bed: &Testbed) -> (Vm<'_>, Vec<String>) {
    let vm = Vm::start(bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    vm.spawn_connected(&["-h1", "pvm-rm"])
        .expect("a resource manager");
    let watchers = wait_for_watchers(&vm, 2);
    (vm, watchers)
}

/// Kills a resource manager that is not restarted, and waits for the event about its end.
fn kill_manual_rm_and_wait(vm: &Vm) {
    kill_matching_process(vm, "pvm-rm");
    vm.wait_for_event(TIMEOUT, "no resource manager", |entry| {
        matches!(entry.kind, EventKind::RmGone { .. })
    })
    .expect("it is gone");
}

/// Load watchers protect owners without a resource manager, and report to the next resource
/// manager.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn load_watchers_work_without_a_resource_manager() {
    let bed = require_testbed(2);
    let (vm, original_watchers) = start_with_manual_rm(&bed);
    let guest_tid = vm.spawn_connected(&["-h2", "hold", "1"]).expect("spawned");
    kill_manual_rm_and_wait(&vm);
    let login = SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
    vm.wait_for_event(TIMEOUT, "guests that are stopped", |entry| {
        matches!(entry.kind, EventKind::GuestsPaused { .. })
    })
    .or_panic_with_logs(&vm);
    let is_stopped = |tid: &str| {
        vm.tasks()
            .expect("a list")
            .iter()
            .any(|task| task.tid == tid && task.stopped)
    };
    assert!(is_stopped(&guest_tid));
    // Without a resource manager no list contains the daemons' load watchers.
    let tids: Vec<String> = vm
        .tasks()
        .expect("a list")
        .into_iter()
        .map(|t| t.tid)
        .collect();
    assert_eq!(tids, [guest_tid.as_str()]);
    vm.spawn_connected(&["-h1", "pvm-rm"])
        .expect("another resource manager");
    vm.wait_for_event(TIMEOUT, "clean host", |entry| {
        matches!(entry.kind, EventKind::HostVacated { .. })
    })
    .or_panic_with_logs(&vm);
    assert_eq!(vm.host_of(&guest_tid).expect("alive"), "h1");
    assert_eq!(
        wait_for_watchers(&vm, 2),
        original_watchers,
        "they report to the next one"
    );
    login.log_out().expect("logs out");
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn owners_limits_hold_without_a_resource_manager() {
    let bed = require_testbed(2);
    let (vm, _) = start_with_manual_rm(&bed);
    vm.compile_program("busy").expect("gcc");
    kill_manual_rm_and_wait(&vm);
    let first_tids: Vec<String> = (0..4)
        .map(|_| vm.spawn_connected(&["hold", "1"]).expect("spawned"))
        .collect();
    let mut hosts: Vec<String> = first_tids
        .iter()
        .map(|tid| vm.host_of(tid).expect("alive"))
        .collect();
    hosts.sort();
    assert_eq!(hosts, ["h1", "h1", "h2", "h2"], "daemons place in turn");
    for tid in &first_tids {
        vm.run_pvm(&["kill", tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
    }
    let policy_path = vm.user_home().join(".config/sempa/owner.toml");
    std::fs::create_dir_all(policy_path.parent().expect("a folder"))
        .expect("the testbed's own home");
    std::fs::write(&policy_path, "[blocked]\nprograms = [\"busy\"]\n")
        .expect("the testbed's own home");
    run_owner_command_as_olga(vm.testbed(), 2, &["limit", "1", "cores"]);
    // When the daemon refuses the spawn, the load watcher has applied the setting. A task that was
    // started before is killed.
    let wait_for_refusal = |spawn_args: &[&str], refusal_text: &str| {
        wait_for(TIMEOUT, || {
            if let Ok(tid) = vm.spawn_connected(spawn_args) {
                vm.run_pvm(&["kill", &tid])
                    .map_err(|error| format!("{error:#}"))?;
            }
            let events = vm.events().map_err(|error| format!("{error:#}"))?;
            if events.iter().any(|entry| entry.text.contains(refusal_text)) {
                Ok(())
            } else {
                Err(format!("no {refusal_text}"))
            }
        })
        .or_panic_with_logs(&vm);
    };
    wait_for_refusal(&["-h2", "busy"], "its owner does not allow busy");
    // The last killed task may not have ended yet, so the spawn is repeated.
    let spawn_guest = || {
        vm.spawn_connected(&["-h2", "hold", "1"])
            .map_err(|error| format!("{error:#}"))
    };
    let guest_tid = wait_for(TIMEOUT, spawn_guest).or_panic_with_logs(&vm);
    wait_for_refusal(
        &["-h2", "hold", "1"],
        "its owner allows one task, and one is present",
    );
    let other_tids: Vec<String> = (0..3)
        .map(|_| {
            vm.spawn_connected(&["hold", "1"])
                .expect("there is another host")
        })
        .collect();
    assert!(
        other_tids
            .iter()
            .all(|tid| vm.host_of(tid).expect("alive") == "h1"),
        "{}",
        vm.events_and_logs()
    );
    let migrate_output = vm.run_pvm(&["migrate", &other_tids[0], "h2"]).expect("pvm");
    assert!(
        !migrate_output.succeeded() && migrate_output.stderr.contains("its owner allows one task"),
        "{migrate_output:?}"
    );
    vm.run_pvm(&["kill", &guest_tid])
        .expect("pvm")
        .expect_success("kill")
        .expect("it ends");
    run_owner_command_as_olga(vm.testbed(), 2, &["limit", "none"]);
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_load_watcher_that_is_killed_is_started_again() {
    with_rm(2, |vm| {
        let original_watchers = wait_for_watchers(vm, 2);
        kill_matching_process(vm, "pvm-load-watcher");
        wait_for(TIMEOUT, || {
            let current_watchers = wait_for_watchers(vm, 2);
            if current_watchers == original_watchers {
                Err(format!("still {current_watchers:?}"))
            } else {
                Ok(())
            }
        })
        .expect("another one runs");
    });
}

/// The resource manager reports an error in its changed policy file, and applies the file when the
/// error is corrected. A record of its decisions can be replayed with another policy.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_policy_file_is_followed_and_can_be_replayed() {
    let bed = require_testbed(2);
    let home_path = |name: &str| bed.root_home().join(name);
    std::fs::write(home_path("rm.toml"), "placing = \"round-robin\"\n").expect("it can be written");
    let (policy_path, record_path) = (
        home_path("rm.toml").display().to_string(),
        home_path("record").display().to_string(),
    );
    with_rm_command(
        &bed,
        format!("pvm-rm --policy {policy_path} --record {record_path}"),
        |vm| {
            let placed_hosts = |vm: &Vm| {
                let tids: Vec<String> = (0..4)
                    .map(|_| vm.spawn_connected(&["hold", "1"]).expect("spawned"))
                    .collect();
                let mut placed_hosts: Vec<String> = tids
                    .iter()
                    .map(|tid| vm.host_of(tid).expect("alive"))
                    .collect();
                placed_hosts.sort();
                placed_hosts
            };
            assert_eq!(placed_hosts(vm), ["h1", "h1", "h2", "h2"]);
            let wait_for_note = |text: &str| {
                let is_note = |entry: &EventEntry| matches!(&entry.kind, EventKind::Note { text: note_text } if note_text.contains(text));
                vm.wait_for_event(TIMEOUT, text, is_note)
                    .or_panic_with_logs(vm)
            };
            std::fs::write(
                home_path("rm.toml"),
                "placing = \"round-robin\"\nuser_task = 6\n",
            )
            .expect("it can be written");
            wait_for_note("rm.toml, line 2: unknown field `user_task`");
            std::fs::write(
                home_path("rm.toml"),
                "placing = \"round-robin\"\nuser_tasks = 6\n",
            )
            .expect("it can be written");
            wait_for_note("rm.toml is in force: placing round-robin");
            let refused_output = vm.run_pvm(&["spawn", "-3", "hold", "1"]).expect("pvm");
            assert!(
                !refused_output.succeeded(),
                "seven tasks are too many: {refused_output:?}"
            );
            std::fs::write(home_path("other.toml"), "placing = \"load\"\n")
                .expect("it can be written");
            let other_policy_path = home_path("other.toml").display().to_string();
            let comparison = vm
                .pvm_json(&["replay", &record_path, "--policy", &other_policy_path])
                .expect("a comparison")
                .pop()
                .expect("one value");
            assert_eq!(
                (
                    &comparison["recorded"]["spawns"],
                    &comparison["other"]["spawns"]
                ),
                (&5.into(), &5.into()),
                "{comparison}"
            );
            assert!(
                comparison["other"]["policy"]
                    .as_str()
                    .is_some_and(|text| text.starts_with("placing load")),
                "{comparison}"
            );
        },
    );
}

/// The resource manager is killed while the policy file is wrong or missing. The next resource
/// manager uses the policy that was in force before.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_policy_survives_a_wrong_or_missing_file() {
    let bed = require_testbed(2);
    let policy_path = bed.root_home().join("rm.toml");
    std::fs::write(&policy_path, "user_tasks = 2\n").expect("it can be written");
    with_rm_command(
        &bed,
        format!("pvm-rm --policy {}", policy_path.display()),
        |vm| {
            let note_count = |text: &str| {
                let events = vm.events().expect("events");
                let is_note = |entry: &&EventEntry| matches!(&entry.kind, EventKind::Note { text: note_text } if note_text.contains(text));
                events.iter().filter(is_note).count()
            };
            let wait_for_notes = |text: &str, expected_count: usize| {
                wait_for(TIMEOUT, || {
                    if note_count(text) == expected_count {
                        Ok(())
                    } else {
                        Err(format!("no {text}"))
                    }
                })
                .or_panic_with_logs(vm);
            };
            let check_limit = || {
                let refused_output = vm.run_pvm(&["spawn", "-3", "hold", "1"]).expect("pvm");
                assert!(
                    !refused_output.succeeded(),
                    "three tasks are too many: {refused_output:?}"
                );
            };
            check_limit();
            wait_until_history_is_written(vm);
            let error_text = "rm.toml, line 2: unknown field `user_task`";
            std::fs::write(&policy_path, "user_tasks = 3\nuser_task = 3\n")
                .expect("it can be written");
            wait_for_notes(error_text, 1);
            kill_rm_and_wait_for_next(vm);
            wait_for_notes(error_text, 2);
            check_limit();
            std::fs::remove_file(&policy_path).expect("it can be removed");
            kill_rm_and_wait_for_next(vm);
            wait_for_notes("rm.toml cannot be read: No such file or directory", 1);
            check_limit();
        },
    );
}
