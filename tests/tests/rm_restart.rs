//! The resource manager is killed: the virtual machine continues, and the next resource manager
//! continues with the knowledge of the previous one.

use pvm_rm::store::history::{DECISIONS_MAX, TASKS_MAX};
use pvm_rm::store::{HistoryWriter, StoreLocation};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    DecisionKind, PlacementAttempt, PlacementRule, RejectedHost, RejectionReason,
};
use sempa_proto::{HostId, Micros, Tid};
use sempa_tests::faults::is_full;
use sempa_tests::owner_agent::run_owner_command;
use sempa_tests::requirements::testbed;
use sempa_tests::run::run;
use sempa_tests::ssh::Login;
use sempa_tests::vm::{EventEntry, Settings};
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time from the death of a resource manager to the registration of the next one. It
/// depends on the machine, so only the campaign checks it.
const RESTART_MAX: Duration = Duration::from_secs(2);

fn with_rm(hosts: usize, test: impl FnOnce(&Vm)) {
    let bed = testbed(hosts);
    with_command(&bed, "pvm-rm".into(), test);
}

fn with_command(bed: &Testbed, rm: String, test: impl FnOnce(&Vm)) {
    let hosts = bed.hosts().len();
    let vm = Vm::start(
        bed,
        Settings {
            rm: Some(rm),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    let others: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add(&others).expect("the others join");
    wait_for_watchers(&vm, hosts);
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt().expect("halts");
    for host in bed.hosts() {
        let left = host.machine_path("/tmp/sempa-0/pvm");
        assert!(!left.exists(), "{} is left", left.display());
    }
}

/// Waits until each host has a load watcher. Returns the tids of the load watchers.
fn wait_for_watchers(vm: &Vm, hosts: usize) -> Vec<String> {
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watchers = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher") && task.pid > 0);
        let tids: Vec<String> = watchers.map(|task| task.tid.clone()).collect();
        if tids.len() == hosts {
            Ok(tids)
        } else {
            Err(format!("{tids:?}: {tasks:?}\n{}", vm.logs()))
        }
    })
    .expect("a load watcher on every host")
}

/// Kills the process on h1 whose command line contains `what`.
fn kill(vm: &Vm, what: &str) {
    let processes = vm.bed().host(1).processes();
    let (pid, _) = processes
        .iter()
        .find(|(_, line)| line.contains(what))
        .unwrap_or_else(|| panic!("{processes:?}"));
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it is there");
}

fn registration_times(events: &[EventEntry]) -> Vec<u64> {
    events
        .iter()
        .filter(|e| matches!(e.kind, EventKind::RmRegistered { .. }))
        .map(|e| e.at_us)
        .collect()
}

/// Kills the resource manager. Waits until the next one has registered.
fn kill_rm(vm: &Vm) {
    let before = registration_times(&vm.events().expect("events")).len();
    kill(vm, "pvm-rm");
    let newest = |events: &[EventEntry]| {
        let gone = events
            .iter()
            .rev()
            .find(|e| matches!(e.kind, EventKind::RmGone { .. }))
            .map(|e| e.at_us)?;
        let at = registration_times(events);
        (at.len() > before).then(|| at.last().copied().unwrap_or(0).saturating_sub(gone))
    };
    let span = wait_for(TIMEOUT, || {
        let events = vm.events().map_err(|error| format!("{error:#}"))?;
        newest(&events).ok_or_else(|| "nobody has registered".to_string())
    });
    let span = Duration::from_micros(span.or_panic_with_logs(vm));
    eprintln!("the next resource manager has registered after {span:.2?}");
    assert!(!is_full() || span < RESTART_MAX, "{span:?}");
}

/// Waits until the resource manager has written its current knowledge to its file.
fn wait_until_written(vm: &Vm) {
    wait_until_file_is_written(
        vm,
        &vm.bed().host(1).machine_path("/tmp/sempa-0/pvm/rm.redb"),
    );
}

fn wait_until_file_is_written(vm: &Vm, file: &Path) {
    let now = SystemTime::now();
    wait_for(TIMEOUT * 5, || {
        // Each console command is a task, which the resource manager must record.
        vm.events().map_err(|error| format!("{error:#}"))?;
        let at = file
            .metadata()
            .and_then(|meta| meta.modified())
            .map_err(|error| error.to_string())?;
        if at > now {
            Ok(())
        } else {
            Err(format!("{} was written before", file.display()))
        }
    })
    .expect("it is written");
}

fn explain(vm: &Vm, subject: &str) -> Value {
    vm.json(&["why", subject])
        .expect("an answer")
        .pop()
        .expect("one value")
}

fn decision_kinds(answer: &Value) -> Vec<String> {
    let decisions = answer["decisions"].as_array().cloned().unwrap_or_default();
    let kind = |d: &Value| {
        d["decided"]
            .as_object()
            .and_then(|o| o.keys().next().cloned())
    };
    decisions.iter().filter_map(kind).collect()
}

/// The next resource manager answers questions about decisions of the previous one.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_killed_resource_manager_keeps_its_knowledge() {
    with_rm(2, |vm| {
        let tid = vm.spawn(&["hold", "1"]).expect("spawned");
        let before = explain(vm, &tid);
        assert_eq!(decision_kinds(&before), ["Spawn"], "{before}");
        wait_until_written(vm);
        kill_rm(vm);
        let after = explain(vm, &tid);
        assert_eq!(after["task"], before["task"]);
        assert_eq!(decision_kinds(&after), ["Spawn"], "{after}");
        vm.pvm(&["kill", &tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
        let job = before["task"]["job"].as_str().expect("a job").to_string();
        wait_for(TIMEOUT, || {
            let status = vm
                .json(&["job", "status", &job])
                .map_err(|error| format!("{error:#}"))?;
            let tasks = status[0]["tasks"].as_array().cloned().unwrap_or_default();
            let end = tasks
                .iter()
                .find(|task| task["tid"] == tid.as_str())
                .map(|task| task["end"].clone());
            if end == Some("killed by signal 15".into()) {
                Ok(())
            } else {
                Err(format!("{end:?}: {status:?}"))
            }
        })
        .expect("its end is counted");
    });
}

/// Fills the history of a resource manager up to its limits.
fn fill_history(folder: &Path) {
    let shelf = StoreLocation {
        dir: folder.to_path_buf(),
        file_name: "rm-pvm.redb".into(),
    };
    let (mut ledger, notes) = HistoryWriter::open(Some(&shelf), 0, Tid::NONE);
    assert_eq!(notes, Vec::<String>::new());
    let host = |n: u32| HostId::new(1 + (n % 200) as u16).expect("an index");
    let tid = |n: u32| Tid::task(host(n), 10 + n).expect("a task");
    for n in 0..TASKS_MAX as u32 {
        let (at, top) = (
            Micros::from_secs(1_700_000_000 + u64::from(n)),
            n / 100 * 100,
        );
        let parent = if n == top { Tid::NONE } else { tid(top) };
        let started = EventKind::TaskStarted {
            tid: tid(n),
            parent,
            name: "/home/olga/bin/worker".into(),
            user: 0,
        };
        let ended = EventKind::TaskEnded {
            tid: tid(n),
            status: 0,
            used: Usage::default(),
        };
        for (i, kind) in [started, ended].into_iter().enumerate() {
            ledger.history.apply_event(&Event {
                number: u64::from(2 * n) + 1 + i as u64,
                at,
                host: host(n),
                kind,
            });
        }
    }
    let why = RejectionReason::Other {
        why: "its owner allows two tasks, and they are there".into(),
    };
    let not_used: Vec<RejectedHost> = (0..8)
        .map(|n| RejectedHost {
            host: format!("host{n}"),
            why: why.clone(),
        })
        .collect();
    for n in 0..DECISIONS_MAX as u32 {
        let sentence = "largest share of a processor, 1.97 on host2".to_string();
        let attempts = vec![PlacementAttempt {
            rule: PlacementRule::Rank,
            reason: sentence,
            rejected: not_used.clone(),
        }];
        let (program, started) = (
            "worker".to_string(),
            (0..4).map(|i| (tid(n + i), format!("host{i}"))).collect(),
        );
        let (by, job, user, count, error, waited) = (tid(n), tid(n), 0, 4, None, Micros(0));
        let what = DecisionKind::Spawn {
            program,
            requested_by: by,
            job,
            user,
            count,
            started,
            error,
            waited,
            attempts,
        };
        ledger
            .history
            .record_decision(Micros::from_secs(1_700_000_000 + u64::from(n)), what);
    }
    ledger.close();
}

/// A resource manager with a full history is killed. A spawn succeeds in the meantime, and the next
/// resource manager knows the earlier decisions.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn full_history_does_not_delay_spawns() {
    let bed = testbed(2);
    let state = bed.folder().join("state");
    fill_history(&state);
    let file = state.join("rm-pvm.redb");
    with_command(&bed, format!("pvm-rm --state {}", state.display()), |vm| {
        let tid = vm.spawn(&["hold", "1"]).expect("spawned");
        let before = explain(vm, &tid);
        assert_eq!(decision_kinds(&before), ["Spawn"], "{before}");
        wait_until_file_is_written(vm, &file);
        let bytes = file.metadata().expect("it is there").len();
        let begun = Instant::now();
        kill(vm, "pvm-rm");
        std::thread::scope(|scope| {
            let spawner = scope.spawn(|| {
                let begun = Instant::now();
                let tid = vm.spawn(&["hold", "1"]).expect("spawned whoever places it");
                (tid, begun.elapsed())
            });
            let answered = wait_for(TIMEOUT, || {
                let done = vm
                    .pvm(&["--json", "why", &tid])
                    .map_err(|error| format!("{error:#}"))?;
                if done.succeeded() {
                    Ok(begun.elapsed())
                } else {
                    Err(done.err)
                }
            });
            let answered = answered.or_panic_with_logs(vm);
            let (other, spawned) = spawner.join().expect("no spawn fails");
            println!(
                "with {} MB of books: answered after {:.2} s, a spawn meanwhile took {:.2} s",
                bytes / 1_000_000,
                answered.as_secs_f64(),
                spawned.as_secs_f64()
            );
            let slowest = answered.max(spawned);
            assert!(!is_full() || slowest < RESTART_MAX * 4, "{slowest:?}");
            assert_eq!(decision_kinds(&explain(vm, &tid)), ["Spawn"]);
            for tid in [&tid, &other] {
                vm.pvm(&["kill", tid])
                    .expect("pvm")
                    .expect_success("kill")
                    .expect("it ends");
            }
        });
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_spawn_fails_while_resource_managers_die() {
    with_rm(2, |vm| {
        let mut tids = Vec::new();
        for _ in 0..4 {
            let spawns: Vec<String> = std::thread::scope(|scope| {
                let spawner = scope.spawn(|| {
                    (0..6)
                        .map(|_| vm.spawn(&["hold", "1"]).expect("spawned whoever places it"))
                        .collect::<Vec<_>>()
                });
                kill_rm(vm);
                spawner.join().expect("no spawn fails")
            });
            tids.extend(spawns);
        }
        let tasks = vm.tasks().expect("a list");
        assert!(
            tids.iter()
                .all(|tid| tasks.iter().any(|task| task.tid == *tid)),
            "{tids:?}: {tasks:?}"
        );
        let usage = vm.json(&["usage"]).expect("usage");
        let counted = usage[0]["users"][0]["sums"]["tasks"].as_u64().unwrap_or(0);
        assert!(
            counted >= tids.len() as u64,
            "{counted} of {} tasks are counted: {usage:?}",
            tids.len()
        );
        wait_for_watchers(vm, 2);
    });
}

/// Runs a program that spawns `count` tasks, one after another. Returns their tids.
fn spawn_one_by_one(vm: &Vm, program: &Path, count: usize) -> Vec<String> {
    let mut command = vm.command(vm.bed().host(1), program);
    command.arg(count.to_string());
    let done = run(command, TIMEOUT * 2)
        .expect("it ends")
        .expect_success("the spawns")
        .expect("all are started");
    assert!(
        done.out.ends_with(&format!("all {count} ended\n")),
        "{done:?}"
    );
    done.out
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
        let beforehand = |tid: &String| explain(vm, tid).to_string().contains("said beforehand");
        let granted = tids.iter().filter(|tid| beforehand(tid)).count();
        // The first two tasks are always requested. Others may be requested if a placement lease
        // arrives late.
        assert!(
            (1..=28).contains(&granted),
            "{granted} of {tids:?}\n{}",
            vm.logs()
        );
        let placed = vm
            .events()
            .expect("events")
            .iter()
            .filter(|e| matches!(e.kind, EventKind::Placed { .. }))
            .count();
        assert!(placed >= 30, "{placed}");
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
                kill_rm(vm);
            }
            assert_eq!(spawner.join().expect("no spawn fails").len(), 200);
        });
        wait_for_watchers(vm, 2);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_waiting_spawn_survives_its_resource_manager() {
    let bed = testbed(2);
    let record = bed.home().join("record");
    let rm = format!(
        "pvm-rm --user-tasks 1 --wait 600 --record {}",
        record.display()
    );
    with_command(&bed, rm, |vm| {
        let first = vm.spawn(&["hold", "1"]).expect("one is allowed");
        wait_until_written(vm);
        std::thread::scope(|scope| {
            let spawner = scope.spawn(|| {
                vm.spawn(&["hold", "23"])
                    .expect("it waits as long as it has to")
            });
            wait_for(TIMEOUT, || {
                let bytes = std::fs::read(&record).map_err(|error| error.to_string())?;
                let asked = bytes.windows(4).filter(|bytes| bytes == b"hold").count();
                if asked > 1 {
                    Ok(())
                } else {
                    Err("it has not asked".to_string())
                }
            })
            .expect("it asks");
            // The answer to this question shows that the resource manager has handled the spawn
            // request before it.
            explain(vm, &first);
            for _ in 0..2 {
                kill_rm(vm);
                explain(vm, &first);
            }
            let holds = || {
                vm.tasks()
                    .expect("a list")
                    .iter()
                    .filter(|task| task.name.ends_with("hold"))
                    .count()
            };
            assert_eq!(holds(), 1, "nobody has started it in spite of the limit");
            assert!(!spawner.is_finished());
            vm.pvm(&["kill", &first])
                .expect("pvm")
                .expect_success("kill")
                .expect("it ends");
            let second = spawner.join().expect("it is started");
            let answer = explain(vm, &second);
            assert_eq!(decision_kinds(&answer), ["Spawn"], "{answer}");
            let waited = answer["decisions"][0]["decided"]["Spawn"]["waited"].as_u64();
            assert!(waited.is_some_and(|waited| waited > 0), "{answer}");
        });
    });
}

/// Starts two hosts with load watchers and a resource manager. The resource manager was not started
/// by the master, so the master does not restart it. Returns the virtual machine and the tids of
/// the load watchers.
fn start_with_manual_rm(bed: &Testbed) -> (Vm<'_>, Vec<String>) {
    let vm = Vm::start(bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    vm.spawn(&["-h1", "pvm-rm"]).expect("a resource manager");
    let watchers = wait_for_watchers(&vm, 2);
    (vm, watchers)
}

/// Kills a resource manager that is not restarted, and waits until the virtual machine knows its
/// end.
fn kill_manual_rm(vm: &Vm) {
    kill(vm, "pvm-rm");
    vm.wait_for_event(TIMEOUT, "no resource manager", |entry| {
        matches!(entry.kind, EventKind::RmGone { .. })
    })
    .expect("it is gone");
}

/// Load watchers protect owners without a resource manager, and report to the next one.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn load_watchers_work_without_a_resource_manager() {
    let bed = testbed(2);
    let (vm, before) = start_with_manual_rm(&bed);
    let guest = vm.spawn(&["-h2", "hold", "1"]).expect("spawned");
    kill_manual_rm(&vm);
    let login = Login::new(vm.bed(), "olga", vm.bed().host(2)).expect("a login");
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
    assert!(is_stopped(&guest));
    assert_eq!(wait_for_watchers(&vm, 2), before);
    vm.spawn(&["-h1", "pvm-rm"])
        .expect("another resource manager");
    vm.wait_for_event(TIMEOUT, "clean host", |entry| {
        matches!(entry.kind, EventKind::HostVacated { .. })
    })
    .or_panic_with_logs(&vm);
    assert_eq!(vm.host_of(&guest).expect("alive"), "h1");
    assert_eq!(
        wait_for_watchers(&vm, 2),
        before,
        "they report to the next one"
    );
    login.log_out().expect("logs out");
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn owners_limits_hold_without_a_resource_manager() {
    let bed = testbed(2);
    let (vm, _) = start_with_manual_rm(&bed);
    vm.compile_program("busy").expect("gcc");
    kill_manual_rm(&vm);
    let in_turn: Vec<String> = (0..4)
        .map(|_| vm.spawn(&["hold", "1"]).expect("spawned"))
        .collect();
    let mut hosts: Vec<String> = in_turn
        .iter()
        .map(|tid| vm.host_of(tid).expect("alive"))
        .collect();
    hosts.sort();
    assert_eq!(hosts, ["h1", "h1", "h2", "h2"], "daemons place in turn");
    for tid in &in_turn {
        vm.pvm(&["kill", tid])
            .expect("pvm")
            .expect_success("kill")
            .expect("it ends");
    }
    let file = vm.home().join(".config/sempa/owner.toml");
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("the testbed's own home");
    std::fs::write(&file, "[blocked]\nprograms = [\"busy\"]\n").expect("the testbed's own home");
    run_owner_command(vm.bed(), 2, &["limit", "1", "cores"]);
    // When the daemon refuses both spawns, the load watcher has applied both settings. Tasks that
    // were started before that are killed.
    let refused = |spawn: &[&str], why: &str| {
        wait_for(TIMEOUT, || {
            if let Ok(tid) = vm.spawn(spawn) {
                vm.pvm(&["kill", &tid])
                    .map_err(|error| format!("{error:#}"))?;
            }
            let events = vm.events().map_err(|error| format!("{error:#}"))?;
            if events.iter().any(|entry| entry.text.contains(why)) {
                Ok(())
            } else {
                Err(format!("no {why}"))
            }
        })
        .or_panic_with_logs(&vm);
    };
    refused(&["-h2", "busy"], "its owner lets nobody run busy");
    // The last of these tasks may still be ending.
    let allowed = || {
        vm.spawn(&["-h2", "hold", "1"])
            .map_err(|error| format!("{error:#}"))
    };
    let guest = wait_for(TIMEOUT, allowed).or_panic_with_logs(&vm);
    refused(
        &["-h2", "hold", "1"],
        "its owner allows one task, and it is there",
    );
    let others: Vec<String> = (0..3)
        .map(|_| vm.spawn(&["hold", "1"]).expect("there is another host"))
        .collect();
    assert!(
        others
            .iter()
            .all(|tid| vm.host_of(tid).expect("alive") == "h1"),
        "{}",
        vm.logs()
    );
    let moved = vm.pvm(&["migrate", &others[0], "h2"]).expect("pvm");
    assert!(
        !moved.succeeded() && moved.err.contains("its owner allows one task"),
        "{moved:?}"
    );
    vm.pvm(&["kill", &guest])
        .expect("pvm")
        .expect_success("kill")
        .expect("it ends");
    run_owner_command(vm.bed(), 2, &["limit", "none"]);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_load_watcher_that_is_killed_is_started_again() {
    with_rm(2, |vm| {
        let before = wait_for_watchers(vm, 2);
        kill(vm, "pvm-load-watcher");
        wait_for(TIMEOUT, || {
            let now = wait_for_watchers(vm, 2);
            if now == before {
                Err(format!("still {now:?}"))
            } else {
                Ok(())
            }
        })
        .expect("another one runs");
    });
}

/// A changed policy file takes effect, and a record of decisions can be replayed with another
/// policy.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_policy_file_is_followed_and_can_be_replayed() {
    let bed = testbed(2);
    let file = |name: &str| bed.home().join(name);
    std::fs::write(file("rm.toml"), "placing = \"round-robin\"\n").expect("it can be written");
    let (policy, record) = (
        file("rm.toml").display().to_string(),
        file("record").display().to_string(),
    );
    with_command(
        &bed,
        format!("pvm-rm --policy {policy} --record {record}"),
        |vm| {
            let hosts = |vm: &Vm| {
                let tids: Vec<String> = (0..4)
                    .map(|_| vm.spawn(&["hold", "1"]).expect("spawned"))
                    .collect();
                let mut hosts: Vec<String> = tids
                    .iter()
                    .map(|tid| vm.host_of(tid).expect("alive"))
                    .collect();
                hosts.sort();
                hosts
            };
            assert_eq!(hosts(vm), ["h1", "h1", "h2", "h2"]);
            let note = |text: &str| {
                let says = |entry: &EventEntry| matches!(&entry.kind, EventKind::Note { text: told } if told.contains(text));
                vm.wait_for_event(TIMEOUT, text, says)
                    .or_panic_with_logs(vm)
            };
            std::fs::write(
                file("rm.toml"),
                "placing = \"round-robin\"\nuser_task = 6\n",
            )
            .expect("it can be written");
            note("rm.toml, line 2: unknown field `user_task`");
            std::fs::write(
                file("rm.toml"),
                "placing = \"round-robin\"\nuser_tasks = 6\n",
            )
            .expect("it can be written");
            note("rm.toml is in force: placing round-robin");
            let refused = vm.pvm(&["spawn", "-3", "hold", "1"]).expect("pvm");
            assert!(
                !refused.succeeded(),
                "seven tasks are too many: {refused:?}"
            );
            std::fs::write(file("other.toml"), "placing = \"load\"\n").expect("it can be written");
            let other = file("other.toml").display().to_string();
            let both = vm
                .json(&["replay", &record, "--policy", &other])
                .expect("a comparison")
                .pop()
                .expect("one value");
            assert_eq!(
                (&both["recorded"]["spawns"], &both["other"]["spawns"]),
                (&5.into(), &5.into()),
                "{both}"
            );
            assert!(
                both["other"]["policy"]
                    .as_str()
                    .is_some_and(|text| text.starts_with("placing load")),
                "{both}"
            );
        },
    );
}

/// The resource manager is killed while the policy file is wrong or missing. The next one uses the
/// policy that was in force.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_policy_survives_a_wrong_or_missing_file() {
    let bed = testbed(2);
    let file = bed.home().join("rm.toml");
    std::fs::write(&file, "user_tasks = 2\n").expect("it can be written");
    with_command(&bed, format!("pvm-rm --policy {}", file.display()), |vm| {
        let notes = |text: &str| {
            let events = vm.events().expect("events");
            let says = |entry: &&EventEntry| matches!(&entry.kind, EventKind::Note { text: told } if told.contains(text));
            events.iter().filter(says).count()
        };
        let noted = |text: &str, times: usize| {
            wait_for(TIMEOUT, || {
                if notes(text) == times {
                    Ok(())
                } else {
                    Err(format!("no {text}"))
                }
            })
            .or_panic_with_logs(vm);
        };
        let limited = || {
            let refused = vm.pvm(&["spawn", "-3", "hold", "1"]).expect("pvm");
            assert!(
                !refused.succeeded(),
                "three tasks are too many: {refused:?}"
            );
        };
        limited();
        wait_until_written(vm);
        let wrong = "rm.toml, line 2: unknown field `user_task`";
        std::fs::write(&file, "user_tasks = 3\nuser_task = 3\n").expect("it can be written");
        noted(wrong, 1);
        kill_rm(vm);
        noted(wrong, 2);
        limited();
        std::fs::remove_file(&file).expect("it can be removed");
        kill_rm(vm);
        noted("rm.toml cannot be read: No such file or directory", 1);
        limited();
    });
}
