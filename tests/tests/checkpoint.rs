//! Jobs with checkpoints lose hosts or the whole virtual machine, and still finish with the correct
//! result.

use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command;
use sempa_tests::requirements::testbed;
use sempa_tests::ring_job::{ENDLESS_ROUNDS, Job, WORKER_COUNT};
use sempa_tests::run::CommandResult;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

fn pvm(vm: &Vm, words: &[&str]) -> CommandResult {
    vm.pvm(words).or_panic_with_logs(vm)
}

/// Makes a checkpoint of a job. Returns its name.
fn checkpoint(vm: &Vm, words: &[&str]) -> String {
    let all = [&["checkpoint"], words].concat();
    let values = vm.json(&all).or_panic_with_logs(vm);
    assert_eq!(
        values[0]["tasks"].as_array().map(Vec::len),
        Some(WORKER_COUNT + 1),
        "{values:?}"
    );
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Returns the paths of all files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                files(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// After the virtual machine has ended, a new one restarts the job from a checkpoint on other
/// hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_restarts_in_new_virtual_machine() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 20);
    let first = checkpoint(&vm, &[&job.tid]);
    job.wait_for_rounds(&vm, 15);
    let set = checkpoint(&vm, &[&job.tid]);
    assert_ne!(first, set);
    let listed = pvm(&vm, &["checkpoints"]);
    assert!(
        listed.out.contains(&first) && listed.out.contains(&set),
        "{listed:?}"
    );
    let alive = pvm(&vm, &["restart", &set]);
    assert!(
        !alive.succeeded() && alive.err.contains("are alive"),
        "{alive:?}"
    );
    job.wait_for_rounds(&vm, 15);
    let ended = vm
        .json(&["checkpoint", "--end", &job.tid])
        .or_panic_with_logs(&vm);
    assert_ne!(ended[0]["set"].as_str(), Some(&*set), "{ended:?}");
    let gone = wait_for(TIMEOUT, || {
        let left = vm.tasks().map_err(|error| error.to_string())?;
        if left.iter().any(|task| task.name == "ring_job") {
            Err(format!("{left:?}"))
        } else {
            Ok(())
        }
    });
    gone.or_panic_with_logs(&vm);
    vm.halt().expect("halts");

    let vm = Vm::start(&bed, Settings::default()).expect("another virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let unknown = pvm(&vm, &["restart", "t40001-20000101T000000-1"]);
    assert!(
        !unknown.succeeded() && unknown.err.contains("was not restarted"),
        "{unknown:?}"
    );
    let again = pvm(&vm, &["restart", &set, "--on", "h1,h3"]);
    assert!(again.succeeded(), "{again:?}\n{}", vm.logs());
    assert!(
        again.out.contains(&format!("{} runs on h", job.tid)) && !again.out.contains("h2"),
        "{again:?}"
    );
    vm.must_migrate(&job.tid, "h2");
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// Checkpoints are removed by name and by job, except for the one to which a running job rolls
/// back. The list shows which jobs have ended.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn checkpoints_are_listed_and_removed() {
    let bed = testbed(2);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let [first, second] = [(); 2].map(|()| checkpoint(&vm, &[&job.tid]));
    let newest = checkpoint(&vm, &["--every", "10m", &job.tid]);
    let one = pvm(
        &vm,
        &[
            "checkpoints",
            "--remove",
            &first,
            "t40001-20000101T000000-1",
        ],
    );
    assert!(
        !one.succeeded() && one.out.contains(&format!("{first} removed, ")),
        "{one:?}"
    );
    assert!(
        one.out
            .contains("t40001-20000101T000000-1 is kept: there is no such checkpoint"),
        "{one:?}"
    );
    let all = pvm(&vm, &["checkpoints", "--remove-job", &job.tid]);
    assert!(
        !all.succeeded() && all.out.contains(&format!("{second} removed, ")),
        "{all:?}"
    );
    let stays = format!(
        "{newest} is kept: job {} needs it if a host is lost",
        job.tid
    );
    assert!(all.out.contains(&stays), "{all:?}");
    let logged = vm.wait_for_event(TIMEOUT, "removal", |entry| match &entry.kind {
        EventKind::CheckpointsRemoved {
            checkpoints: sets, ..
        } => *sets == [second.as_str()],
        _ => false,
    });
    logged.or_panic_with_logs(&vm);
    job.finish(&vm);
    let over = wait_for(TIMEOUT, || {
        let listed = pvm(&vm, &["checkpoints"]).out;
        let told = listed
            .lines()
            .any(|line| line.starts_with(&newest) && line.contains("  the job ended 2"));
        if told && !listed.contains(&second) {
            Ok(())
        } else {
            Err(listed)
        }
    });
    over.or_panic_with_logs(&vm);
    pvm(&vm, &["checkpoint", "--stop", &job.tid]);
    let last = vm
        .json(&["checkpoints", "--remove", &newest])
        .or_panic_with_logs(&vm);
    assert_eq!(
        last[0]["removed"][0]["set"].as_str(),
        Some(&*newest),
        "{last:?}"
    );
    assert_eq!(pvm(&vm, &["checkpoints"]).out, "no checkpoints\n");
    vm.halt().expect("halts");
}

/// When a host is killed the job rolls back to its newest checkpoint. This happens twice.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_host_is_killed() {
    let bed = testbed(4);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3", "h4"]).expect("the others join");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    checkpoint(&vm, &["--every", "1s", &job.tid]);
    for lost in [3, 2] {
        let made = |vm: &Vm| {
            let events = vm.events().expect("events");
            events
                .iter()
                .filter(|entry| matches!(entry.kind, EventKind::Checkpointed { .. }))
                .count()
        };
        let before = made(&vm);
        let newer = wait_for(TIMEOUT, || {
            if made(&vm) > before {
                Ok(())
            } else {
                Err("no newer checkpoint".to_string())
            }
        });
        newer.or_panic_with_logs(&vm);
        job.wait_for_rounds(&vm, 5);
        bed.host(lost).kill_all();
        vm.wait_for_rollback(TIMEOUT, &format!("h{lost} was lost"))
            .or_panic_with_logs(&vm);
    }
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// When a tasker is killed the job rolls back to its newest checkpoint. This happens twice.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_tasker_is_killed() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    checkpoint(&vm, &["--every", "1s", &job.tid]);
    for struck in [3, 2] {
        job.wait_for_rounds(&vm, 5);
        bed.host(struck)
            .kill_matching(|line| line.contains("pvm-tasker"));
        vm.wait_for_rollback(TIMEOUT, &format!("the tasker of h{struck} has ended"))
            .or_panic_with_logs(&vm);
    }
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// A task migrates with its log file, which the target does not have. The file is copied to the
/// target if the folder exists there. At the end the log has each line once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn log_file_migrates_with_each_line_once() {
    let bed = testbed(3);
    let env = [("SEMPA_FILES", "copy"), ("PVM_EXPORT", "SEMPA_FILES")]
        .map(|(name, value)| (name.into(), value.into()));
    let vm = Vm::start(
        &bed,
        Settings {
            env: env.into(),
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("ring_job").expect("gcc");
    // Each host has its own folder with this name.
    let place = |host: usize| bed.host(host).machine_path("/tmp/ring");
    std::fs::create_dir(place(2)).expect("made");
    let workers = WORKER_COUNT.to_string();
    let words = [
        "-h2",
        "ring_job",
        &workers,
        ENDLESS_ROUNDS,
        "-2000",
        "/tmp/ring",
    ];
    let tid = vm.spawn(&words).or_panic_with_logs(&vm);
    let job = Job::existing(place(2), tid);
    job.wait_for_rounds(&vm, 20);
    let nowhere = pvm(&vm, &["can-migrate", &job.tid, "h3"]);
    let reason = "/tmp/ring/log: it does not exist on the target and cannot be copied there: its directory: ";
    assert!(
        !nowhere.succeeded() && nowhere.out.contains(reason),
        "{nowhere:?}"
    );
    std::fs::create_dir(place(3)).expect("made");
    vm.must_migrate(&job.tid, "h3");
    let job = Job::existing(place(3), job.tid);
    job.finish(&vm);
    assert!(!place(2).join("result").exists() && place(2).join("log").exists());
    vm.halt().expect("halts");
}

/// With a resource manager, the job rolls back, one of its tasks migrates, and the job finishes.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn rolled_back_job_migrates_and_finishes() {
    let bed = testbed(3);
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    checkpoint(&vm, &["--every", "1s", &job.tid]);
    job.wait_for_rounds(&vm, 5);
    bed.host(2).kill_all();
    let back = vm.wait_for_event(TIMEOUT, "a job that went back", |entry| {
        matches!(entry.kind, EventKind::Restarted { .. })
    });
    back.or_panic_with_logs(&vm);
    let all = wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| error.to_string())?;
        let ours = tasks.iter().filter(|task| task.name == "ring_job").count();
        if ours == WORKER_COUNT + 1 {
            Ok(())
        } else {
            Err(format!("{tasks:?}"))
        }
    });
    all.or_panic_with_logs(&vm);
    // The migration is refused while a checkpoint is in progress, so it is repeated.
    let moved = wait_for(TIMEOUT, || {
        let to = if vm.host_of(&job.tid).map_err(|error| error.to_string())? == "h1" {
            "h3"
        } else {
            "h1"
        };
        let done = vm
            .migrate_when_ready(&job.tid, to)
            .map_err(|error| error.to_string())?;
        if done.succeeded() {
            Ok(())
        } else {
            Err(done.err)
        }
    });
    moved.or_panic_with_logs(&vm);
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// Owners are present on all hosts, so no host accepts the job. The resource manager makes a
/// checkpoint and ends the job, and restarts it when an owner leaves.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn vacated_job_restarts_when_owner_leaves() {
    let bed = testbed(2);
    let settings = Settings {
        rm: Some("pvm-rm --policy load".into()),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    let rules = vm.home().join(".config/sempa");
    std::fs::create_dir_all(&rules).expect("the testbed's own home");
    std::fs::write(rules.join("owner.toml"), "then = \"checkpoint\"\n")
        .expect("the testbed's own home");
    vm.add(&["h2"]).expect("it joins");
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    for host in [2, 1] {
        let heard = wait_for(TIMEOUT, || {
            let said = run_owner_command(&bed, host, &["here"]);
            let watched = said["virtual_machines"]
                .as_array()
                .is_none_or(|all| !all.is_empty());
            if watched {
                Ok(())
            } else {
                Err(format!("nobody heard it: {said}"))
            }
        });
        heard.or_panic_with_logs(&vm);
    }
    let told = |what: &str, is_so: fn(&EventKind) -> bool| {
        let found = vm.wait_for_event(TIMEOUT, what, |entry| is_so(&entry.kind));
        found.or_panic_with_logs(&vm);
    };
    told("a parked job", |kind| {
        matches!(kind, EventKind::Checkpointed { tasks: 5, .. })
    });
    let gone = wait_for(TIMEOUT, || {
        let left = vm.tasks().map_err(|error| error.to_string())?;
        if left.iter().any(|task| task.name == "ring_job") {
            Err(format!("{left:?}"))
        } else {
            Ok(())
        }
    });
    gone.or_panic_with_logs(&vm);
    run_owner_command(&bed, 1, &["away"]);
    told("a job that goes on", |kind| {
        matches!(kind, EventKind::Restarted { .. })
    });
    let why = pvm(&vm, &["why", &job.tid]);
    assert!(
        why.out
            .contains("is checkpointed and ended, and will be restarted when there is room"),
        "{why:?}"
    );
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// The files of the store do not reveal the memory of tasks, and a checkpoint with a changed byte
/// is not restarted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_changed_checkpoint_is_not_restarted() {
    let bed = testbed(1);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let job = Job::start(&vm, "-h1");
    job.wait_for_rounds(&vm, 5);
    let set = checkpoint(&vm, &[&job.tid]);
    assert!(pvm(&vm, &["kill", &job.tid]).succeeded());
    pvm(&vm, &["reset"]);
    let ended = wait_for(TIMEOUT, || {
        let left = vm.tasks().map_err(|error| error.to_string())?;
        if left.iter().any(|task| task.name == "ring_job") {
            Err(format!("{left:?}"))
        } else {
            Ok(())
        }
    });
    ended.expect("all end");
    let store = vm.home().join(".local/state/sempa/checkpoints").join(&set);
    let secret = format!("{}/log", job.folder.display());
    let all = files(&store);
    assert!(all.len() > WORKER_COUNT, "{all:?}");
    for path in &all {
        let bytes = std::fs::read(path).expect("readable");
        let readable = bytes
            .windows(secret.len())
            .any(|window| window == secret.as_bytes());
        assert!(!readable, "{} shows what a task holds", path.display());
    }
    let largest = all
        .iter()
        .max_by_key(|path| std::fs::metadata(path).map(|meta| meta.len()).unwrap_or(0));
    let path = largest.expect("there are some");
    let good = std::fs::read(path).expect("readable");
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    std::fs::write(path, &bad).expect("written");
    let refused = pvm(&vm, &["restart", &set]);
    assert!(
        !refused.succeeded() && refused.err.contains("none of its tasks is running"),
        "{refused:?}"
    );
    std::fs::write(path, &good).expect("written");
    let again = pvm(&vm, &["restart", &set]);
    assert!(again.succeeded(), "{again:?}\n{}", vm.logs());
    job.wait_for_rounds(&vm, 5);
    vm.halt().expect("halts");
}
