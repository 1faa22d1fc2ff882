//! Jobs with checkpoints lose hosts or the whole virtual machine, and still finish with the correct
//! result.

use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::require_testbed;
use sempa_tests::ring_job::{ENDLESS_ROUND_COUNT, RingJob, WORKER_COUNT};
use sempa_tests::run::CommandResult;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

fn run_pvm(vm: &Vm, args: &[&str]) -> CommandResult {
    vm.run_pvm(args).or_panic_with_logs(vm)
}

/// Makes a checkpoint of a job and returns the checkpoint's name. `args` are the options and the
/// tid of the job.
fn make_checkpoint(vm: &Vm, args: &[&str]) -> String {
    let command_args = [&["checkpoint"], args].concat();
    let values = vm.pvm_json(&command_args).or_panic_with_logs(vm);
    assert_eq!(
        values[0]["tasks"].as_array().map(Vec::len),
        Some(WORKER_COUNT + 1),
        "{values:?}"
    );
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Returns the paths of all files in `folder` and its subfolders. A folder that cannot be read
/// counts as empty.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                files_below(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// After a virtual machine has ended, the next virtual machine restarts the job from a checkpoint
/// on other hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_restarts_in_new_virtual_machine() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 20);
    let first_checkpoint = make_checkpoint(&vm, &[&job.tid]);
    job.wait_for_rounds(&vm, 15);
    let second_checkpoint = make_checkpoint(&vm, &[&job.tid]);
    assert_ne!(first_checkpoint, second_checkpoint);
    let list_output = run_pvm(&vm, &["checkpoints"]);
    assert!(
        list_output.stdout.contains(&first_checkpoint)
            && list_output.stdout.contains(&second_checkpoint),
        "{list_output:?}"
    );
    let refused_output = run_pvm(&vm, &["restart", &second_checkpoint]);
    assert!(
        !refused_output.succeeded() && refused_output.stderr.contains("are alive"),
        "{refused_output:?}"
    );
    job.wait_for_rounds(&vm, 15);
    let end_values = vm
        .pvm_json(&["checkpoint", "--end", &job.tid])
        .or_panic_with_logs(&vm);
    assert_ne!(
        end_values[0]["set"].as_str(),
        Some(&*second_checkpoint),
        "{end_values:?}"
    );
    let wait_result = wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| error.to_string())?;
        if tasks.iter().any(|task| task.name == "ring_job") {
            Err(format!("{tasks:?}"))
        } else {
            Ok(())
        }
    });
    wait_result.or_panic_with_logs(&vm);
    vm.halt_and_wait().expect("halts");

    let vm = Vm::start(&bed, VmSettings::default()).expect("another virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let unknown_name_output = run_pvm(&vm, &["restart", "t40001-20000101T000000-1"]);
    assert!(
        !unknown_name_output.succeeded()
            && unknown_name_output.stderr.contains("was not restarted"),
        "{unknown_name_output:?}"
    );
    let restart_output = run_pvm(&vm, &["restart", &second_checkpoint, "--on", "h1,h3"]);
    assert!(
        restart_output.succeeded(),
        "{restart_output:?}\n{}",
        vm.events_and_logs()
    );
    assert!(
        restart_output
            .stdout
            .contains(&format!("{} runs on h", job.tid))
            && !restart_output.stdout.contains("h2"),
        "{restart_output:?}"
    );
    vm.migrate_or_panic(&job.tid, "h2");
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// A user removes checkpoints by name or by job. The newest checkpoint of a running job is not
/// removed, because the job rolls back to it. The list shows which jobs have ended.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn checkpoints_are_listed_and_removed() {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let [first_checkpoint, second_checkpoint] = [(); 2].map(|()| make_checkpoint(&vm, &[&job.tid]));
    let newest_checkpoint = make_checkpoint(&vm, &["--every", "10m", &job.tid]);
    let removal_by_name = run_pvm(
        &vm,
        &[
            "checkpoints",
            "--remove",
            &first_checkpoint,
            "t40001-20000101T000000-1",
        ],
    );
    assert!(
        !removal_by_name.succeeded()
            && removal_by_name
                .stdout
                .contains(&format!("{first_checkpoint} removed, ")),
        "{removal_by_name:?}"
    );
    assert!(
        removal_by_name
            .stdout
            .contains("t40001-20000101T000000-1 is kept: there is no such checkpoint"),
        "{removal_by_name:?}"
    );
    let removal_by_job = run_pvm(&vm, &["checkpoints", "--remove-job", &job.tid]);
    assert!(
        !removal_by_job.succeeded()
            && removal_by_job
                .stdout
                .contains(&format!("{second_checkpoint} removed, ")),
        "{removal_by_job:?}"
    );
    let refusal_line = format!(
        "{newest_checkpoint} is kept: job {} needs it if a host is lost",
        job.tid
    );
    assert!(
        removal_by_job.stdout.contains(&refusal_line),
        "{removal_by_job:?}"
    );
    let removal_event = vm.wait_for_event(TIMEOUT, "removal", |entry| match &entry.kind {
        EventKind::CheckpointsRemoved {
            checkpoints: removed_names,
            ..
        } => *removed_names == [second_checkpoint.as_str()],
        _ => false,
    });
    removal_event.or_panic_with_logs(&vm);
    job.end_and_check(&vm);
    let wait_result = wait_for(TIMEOUT, || {
        let list_output = run_pvm(&vm, &["checkpoints"]).stdout;
        let has_ended_mark = list_output
            .lines()
            .any(|line| line.starts_with(&newest_checkpoint) && line.contains("  the job ended 2"));
        if has_ended_mark && !list_output.contains(&second_checkpoint) {
            Ok(())
        } else {
            Err(list_output)
        }
    });
    wait_result.or_panic_with_logs(&vm);
    run_pvm(&vm, &["checkpoint", "--stop", &job.tid]);
    let last_removal = vm
        .pvm_json(&["checkpoints", "--remove", &newest_checkpoint])
        .or_panic_with_logs(&vm);
    assert_eq!(
        last_removal[0]["removed"][0]["set"].as_str(),
        Some(&*newest_checkpoint),
        "{last_removal:?}"
    );
    assert_eq!(run_pvm(&vm, &["checkpoints"]).stdout, "no checkpoints\n");
    vm.halt_and_wait().expect("halts");
}

/// The job rolls back to its newest checkpoint each time a host is killed. Two hosts are killed,
/// one after the other.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_host_is_killed() {
    let bed = require_testbed(4);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3", "h4"]).expect("the others join");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    make_checkpoint(&vm, &["--every", "1s", &job.tid]);
    for killed_host in [3, 2] {
        let checkpoint_count = |vm: &Vm| {
            let events = vm.events().expect("events");
            events
                .iter()
                .filter(|entry| matches!(entry.kind, EventKind::Checkpointed { .. }))
                .count()
        };
        let previous_count = checkpoint_count(&vm);
        let wait_result = wait_for(TIMEOUT, || {
            if checkpoint_count(&vm) > previous_count {
                Ok(())
            } else {
                Err("no newer checkpoint".to_string())
            }
        });
        wait_result.or_panic_with_logs(&vm);
        job.wait_for_rounds(&vm, 5);
        bed.host(killed_host).kill_all_processes();
        vm.wait_for_rollback(TIMEOUT, &format!("h{killed_host} was lost"))
            .or_panic_with_logs(&vm);
    }
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// The job rolls back to its newest checkpoint each time a tasker is killed. Two taskers are
/// killed, one after the other.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_tasker_is_killed() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    make_checkpoint(&vm, &["--every", "1s", &job.tid]);
    for host_number in [3, 2] {
        job.wait_for_rounds(&vm, 5);
        bed.host(host_number)
            .kill_matching_processes(|line| line.contains("pvm-tasker"));
        vm.wait_for_rollback(TIMEOUT, &format!("the tasker of h{host_number} has ended"))
            .or_panic_with_logs(&vm);
    }
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// A task migrates with its log file, which the target does not have. The file is copied to the
/// target if the folder exists there. At the end the log has each line once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn log_file_migrates_with_each_line_once() {
    let bed = require_testbed(3);
    let env = [("SEMPA_FILES", "copy"), ("PVM_EXPORT", "SEMPA_FILES")]
        .map(|(name, value)| (name.into(), value.into()));
    let vm = Vm::start(
        &bed,
        VmSettings {
            env: env.into(),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("ring_job").expect("gcc");
    // `/tmp/ring` is a separate folder on each host.
    let ring_folder = |host: usize| bed.host(host).machine_path("/tmp/ring");
    std::fs::create_dir(ring_folder(2)).expect("made");
    let worker_count = WORKER_COUNT.to_string();
    let args = [
        "-h2",
        "ring_job",
        &worker_count,
        ENDLESS_ROUND_COUNT,
        "-2000",
        "/tmp/ring",
    ];
    let tid = vm.spawn_connected(&args).or_panic_with_logs(&vm);
    let job = RingJob::from_existing(ring_folder(2), tid);
    job.wait_for_rounds(&vm, 20);
    let refused_output = run_pvm(&vm, &["can-migrate", &job.tid, "h3"]);
    let reason = "/tmp/ring/log: it does not exist on the target and cannot be copied there: its directory: ";
    assert!(
        !refused_output.succeeded() && refused_output.stdout.contains(reason),
        "{refused_output:?}"
    );
    std::fs::create_dir(ring_folder(3)).expect("made");
    vm.migrate_or_panic(&job.tid, "h3");
    let job = RingJob::from_existing(ring_folder(3), job.tid);
    job.end_and_check(&vm);
    assert!(!ring_folder(2).join("result").exists() && ring_folder(2).join("log").exists());
    vm.halt_and_wait().expect("halts");
}

/// With a resource manager, the job rolls back, one of its tasks migrates, and the job finishes.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn rolled_back_job_migrates_and_finishes() {
    let bed = require_testbed(3);
    let settings = VmSettings {
        rm_command: Some("pvm-rm".into()),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    make_checkpoint(&vm, &["--every", "1s", &job.tid]);
    job.wait_for_rounds(&vm, 5);
    bed.host(2).kill_all_processes();
    let restart_event = vm.wait_for_event(TIMEOUT, "a job that went back", |entry| {
        matches!(entry.kind, EventKind::Restarted { .. })
    });
    restart_event.or_panic_with_logs(&vm);
    let restart_wait = wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| error.to_string())?;
        let job_task_count = tasks.iter().filter(|task| task.name == "ring_job").count();
        if job_task_count == WORKER_COUNT + 1 {
            Ok(())
        } else {
            Err(format!("{tasks:?}"))
        }
    });
    restart_wait.or_panic_with_logs(&vm);
    // The migration is refused while a checkpoint is in progress, so the test repeats the request.
    let migration_wait = wait_for(TIMEOUT, || {
        let target = if vm.host_of(&job.tid).map_err(|error| error.to_string())? == "h1" {
            "h3"
        } else {
            "h1"
        };
        let migrate_output = vm
            .migrate_when_ready(&job.tid, target)
            .map_err(|error| error.to_string())?;
        if migrate_output.succeeded() {
            Ok(())
        } else {
            Err(migrate_output.stderr)
        }
    });
    migration_wait.or_panic_with_logs(&vm);
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Owners are present on all hosts, so no host accepts the job. The resource manager makes a
/// checkpoint and ends the job. When an owner leaves, the resource manager restarts the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn vacated_job_restarts_when_owner_leaves() {
    let bed = require_testbed(2);
    let settings = VmSettings {
        rm_command: Some("pvm-rm --policy load".into()),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    let policy_folder = vm.user_home().join(".config/sempa");
    std::fs::create_dir_all(&policy_folder).expect("the testbed's own home");
    std::fs::write(policy_folder.join("owner.toml"), "then = \"checkpoint\"\n")
        .expect("the testbed's own home");
    vm.add_hosts(&["h2"]).expect("it joins");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    for host in [2, 1] {
        let presence_wait = wait_for(TIMEOUT, || {
            let owner_reply = run_owner_command_as_olga(&bed, host, &["here"]);
            let is_received = owner_reply["virtual_machines"]
                .as_array()
                .is_none_or(|machines| !machines.is_empty());
            if is_received {
                Ok(())
            } else {
                Err(format!("nobody heard it: {owner_reply}"))
            }
        });
        presence_wait.or_panic_with_logs(&vm);
    }
    let wait_for_kind = |description: &str, is_expected: fn(&EventKind) -> bool| {
        let event_wait = vm.wait_for_event(TIMEOUT, description, |entry| is_expected(&entry.kind));
        event_wait.or_panic_with_logs(&vm);
    };
    wait_for_kind("a parked job", |kind| {
        matches!(kind, EventKind::Checkpointed { tasks: 5, .. })
    });
    let end_wait = wait_for(TIMEOUT, || {
        let remaining_tasks = vm.tasks().map_err(|error| error.to_string())?;
        if remaining_tasks.iter().any(|task| task.name == "ring_job") {
            Err(format!("{remaining_tasks:?}"))
        } else {
            Ok(())
        }
    });
    end_wait.or_panic_with_logs(&vm);
    run_owner_command_as_olga(&bed, 1, &["away"]);
    wait_for_kind("a job that goes on", |kind| {
        matches!(kind, EventKind::Restarted { .. })
    });
    let why_output = run_pvm(&vm, &["why", &job.tid]);
    assert!(
        why_output
            .stdout
            .contains("is checkpointed and ended, and will be restarted when there is room"),
        "{why_output:?}"
    );
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// The files of the store do not reveal the memory of tasks, and a checkpoint with a changed byte
/// is not restarted.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_changed_checkpoint_is_not_restarted() {
    let bed = require_testbed(1);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let job = RingJob::start(&vm, "-h1");
    job.wait_for_rounds(&vm, 5);
    let checkpoint_name = make_checkpoint(&vm, &[&job.tid]);
    assert!(run_pvm(&vm, &["kill", &job.tid]).succeeded());
    run_pvm(&vm, &["reset"]);
    let wait_result = wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| error.to_string())?;
        if tasks.iter().any(|task| task.name == "ring_job") {
            Err(format!("{tasks:?}"))
        } else {
            Ok(())
        }
    });
    wait_result.expect("all end");
    let checkpoint_folder = vm
        .user_home()
        .join(".local/state/sempa/checkpoints")
        .join(&checkpoint_name);
    let memory_text = format!("{}/log", job.folder.display());
    let store_files = files_below(&checkpoint_folder);
    assert!(store_files.len() > WORKER_COUNT, "{store_files:?}");
    for path in &store_files {
        let bytes = std::fs::read(path).expect("readable");
        let is_readable = bytes
            .windows(memory_text.len())
            .any(|window| window == memory_text.as_bytes());
        assert!(!is_readable, "{} shows what a task holds", path.display());
    }
    let largest_file = store_files
        .iter()
        .max_by_key(|path| std::fs::metadata(path).map(|meta| meta.len()).unwrap_or(0));
    let path = largest_file.expect("there are some");
    let original_bytes = std::fs::read(path).expect("readable");
    let mut changed_bytes = original_bytes.clone();
    changed_bytes[original_bytes.len() / 2] ^= 1;
    std::fs::write(path, &changed_bytes).expect("written");
    let refused_output = run_pvm(&vm, &["restart", &checkpoint_name]);
    assert!(
        !refused_output.succeeded()
            && refused_output
                .stderr
                .contains("none of its tasks is running"),
        "{refused_output:?}"
    );
    std::fs::write(path, &original_bytes).expect("written");
    let restart_output = run_pvm(&vm, &["restart", &checkpoint_name]);
    assert!(
        restart_output.succeeded(),
        "{restart_output:?}\n{}",
        vm.events_and_logs()
    );
    job.wait_for_rounds(&vm, 5);
    vm.halt_and_wait().expect("halts");
}
