//! Jobs with self-checkpoints, on hosts without CRIU or for a user who may not use CRIU.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::{require_testbed, require_testbed_with_own_engine};
use sempa_tests::ring_job::RingJob;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns settings for a job whose first task requests the engine `first_engine` and whose workers
/// request the engine `worker_engine`. Self-checkpoints are written to the user's home folder,
/// which all hosts share.
fn engine_settings(is_alice: bool, first_engine: &str, worker_engine: &str) -> VmSettings {
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    let env = vec![
        pair("SEMPA_ENGINE", first_engine),
        pair("OWN_RING_WORKERS", worker_engine),
        pair("SEMPA_STATE", "ring/state-{tid}"),
        pair("OWN_RING_FOLDER", "ring"),
        pair(
            "PVM_EXPORT",
            "SEMPA_ENGINE:SEMPA_STATE:OWN_RING_FOLDER:OWN_RING_WORKERS",
        ),
    ];
    VmSettings {
        runs_as_alice: is_alice,
        env,
        ..VmSettings::default()
    }
}

fn wait_for_checkpoints(vm: &Vm<'_>, new_count: usize) {
    let required_count = vm.checkpoint_count() + new_count;
    let check_count = || {
        if vm.checkpoint_count() >= required_count {
            Ok(())
        } else {
            Err("no newer checkpoint".to_string())
        }
    };
    wait_for(TIMEOUT, check_count).or_panic_with_logs(vm);
}

/// Returns the names of the files that Sempa has made in `folder`.
fn sempa_file_names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".sempa")).collect()
}

/// Waits until a folder has no files of Sempa. Hosts may be notified of a failed checkpoint only
/// after the console has printed its answer.
fn wait_until_no_sempa_files(vm: &Vm<'_>, folder: &Path) {
    let check_no_files = || match sempa_file_names(folder) {
        file_names if file_names.is_empty() => Ok(()),
        file_names => Err(format!("{file_names:?}")),
    };
    wait_for(TIMEOUT, check_no_files).or_panic_with_logs(vm);
}

/// The tasks of an ordinary user's job write self-checkpoints. Two hosts are killed, one after the
/// other; each time the job rolls back to its self-checkpoints.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_job_rolls_back() {
    let bed = require_testbed(4);
    let vm = Vm::start(&bed, engine_settings(true, "own", "own")).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3", "h4"]).expect("the others join");
    let job = RingJob::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let checkpoint_reply = vm
        .pvm_json(&["checkpoint", "--every", "1s", &job.tid])
        .or_panic_with_logs(&vm);
    let (self_checkpointed_tids, tasks) = (
        checkpoint_reply[0]["own"].as_array(),
        checkpoint_reply[0]["tasks"].as_array(),
    );
    assert!(
        self_checkpointed_tids
            .is_some_and(|self_checkpointed_tids| self_checkpointed_tids.len() == 5)
            && self_checkpointed_tids == tasks,
        "{checkpoint_reply:?}"
    );
    for killed_host in [3, 2] {
        wait_for_checkpoints(&vm, 2);
        job.wait_for_rounds(&vm, 2);
        bed.host(killed_host).kill_all_processes();
        vm.wait_for_rollback(TIMEOUT, &format!("h{killed_host} was lost"))
            .or_panic_with_logs(&vm);
    }
    job.end_and_check(&vm);
    let frozen = |kind: &EventKind| match kind {
        EventKind::Checkpointed { frozen, .. } => Some(frozen.0 / 1000),
        _ => None,
    };
    let frozen_times_ms: Vec<u64> = vm
        .events()
        .or_panic_with_logs(&vm)
        .iter()
        .filter_map(|entry| frozen(&entry.kind))
        .collect();
    eprintln!(
        "{} checkpoints; milliseconds from the first that had ended until the last was kept: {frozen_times_ms:?}",
        frozen_times_ms.len()
    );
    wait_until_no_sempa_files(&vm, &job.folder);
    vm.halt_and_wait().expect("halts");
}

/// No host has CRIU. After all hosts were killed, a new virtual machine restarts a job from the
/// self-checkpoints of its tasks on other hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_restarts_without_criu_on_any_host() {
    let bed = require_testbed_with_own_engine(3);
    fs::remove_file(bed.engine().expect("an engine of its own")).expect("removed");
    let vm = Vm::start(&bed, engine_settings(false, "criu,own:wait=30", "own"))
        .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let checkpoint_output = vm
        .run_pvm(&["checkpoint", &job.tid])
        .or_panic_with_logs(&vm);
    assert!(
        checkpoint_output.succeeded()
            && checkpoint_output.stdout.contains(&format!(
                "5 tasks of job {} by their own checkpoints",
                job.tid
            )),
        "{checkpoint_output:?}\n{}",
        vm.events_and_logs()
    );
    let checkpoint_name = checkpoint_output
        .stdout
        .split(':')
        .next()
        .expect("a name")
        .to_string();
    // The restart loses the rounds after the checkpoint.
    job.wait_for_rounds(&vm, 20);
    for host in bed.hosts() {
        host.kill_all_processes();
    }
    // A restart must replace a file that a program has written since the checkpoint.
    fs::write(
        job.folder.join(format!("state-{}", job.tid)),
        "of another time",
    )
    .expect("written");
    let vm = Vm::start(&bed, engine_settings(false, "own", "own")).or_panic_with_logs(&vm);
    vm.add_hosts(&["h2", "h3"]).or_panic_with_logs(&vm);
    let restart_output = vm
        .run_pvm(&["restart", &checkpoint_name, "--on", "h1,h3"])
        .or_panic_with_logs(&vm);
    assert!(
        restart_output.succeeded() && !restart_output.stdout.contains("h2"),
        "{restart_output:?}\n{}",
        vm.events_and_logs()
    );
    // The restarted task can also migrate by its self-checkpoint.
    let migrate_output = vm
        .migrate_when_ready(&job.tid, "h2")
        .or_panic_with_logs(&vm);
    assert!(
        migrate_output.succeeded() && migrate_output.stdout.contains("by its own checkpoint"),
        "{migrate_output:?}\n{}",
        vm.events_and_logs()
    );
    job.end_and_check(&vm);
    wait_until_no_sempa_files(&vm, &job.folder);
    vm.halt_and_wait().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn criu_and_programs_share_a_checkpoint() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, engine_settings(false, "criu", "own")).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let checkpoint_reply = vm
        .pvm_json(&["checkpoint", "--every", "1s", &job.tid])
        .or_panic_with_logs(&vm);
    let self_checkpointed_tids: Vec<&str> = checkpoint_reply[0]["own"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|tid| tid.as_str())
        .collect();
    assert!(
        self_checkpointed_tids.len() == 4 && !self_checkpointed_tids.contains(&&*job.tid),
        "{checkpoint_reply:?}\n{}",
        vm.events_and_logs()
    );
    wait_for_checkpoints(&vm, 2);
    job.wait_for_rounds(&vm, 2);
    bed.host(3).kill_all_processes();
    let is_restart = |kind: &EventKind| matches!(kind, EventKind::Restarted { .. });
    vm.wait_for_event(TIMEOUT, "a job that went back", |entry| {
        is_restart(&entry.kind)
    })
    .or_panic_with_logs(&vm);
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// A checkpoint is not restarted while a task of its job is alive. If one file of the checkpoint
/// cannot be restored, no task is started and no file is changed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_restart_that_cannot_write_changes_nothing() {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, engine_settings(true, "own", "own")).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    let job = RingJob::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let blocked_path = job.folder.join(format!("state-{}", job.tid));
    let other = vm
        .tasks()
        .or_panic_with_logs(&vm)
        .into_iter()
        .map(|task| task.tid)
        .find(|tid| *tid != job.tid)
        .expect("a worker");
    let checkpoint_output = vm
        .run_pvm(&["checkpoint", &job.tid])
        .or_panic_with_logs(&vm);
    assert!(
        checkpoint_output.succeeded(),
        "{checkpoint_output:?}\n{}",
        vm.events_and_logs()
    );
    let checkpoint_name = checkpoint_output
        .stdout
        .split(':')
        .next()
        .expect("a name")
        .to_string();
    assert!(blocked_path.is_file(), "it has written it");
    let alive_job_output = vm
        .run_pvm(&["restart", &checkpoint_name])
        .or_panic_with_logs(&vm);
    assert!(
        !alive_job_output.succeeded()
            && alive_job_output.stderr.contains(&other)
            && alive_job_output.stderr.contains("alive"),
        "{alive_job_output:?}"
    );
    job.end_and_check(&vm);
    // After all tasks have ended, one of the files is replaced by a folder, so the restart cannot
    // write the file.
    wait_for(TIMEOUT, || match vm.tasks() {
        Ok(tasks)
            if tasks
                .iter()
                .all(|task| task.tid != job.tid && task.tid != other) =>
        {
            Ok(())
        }
        other => Err(format!("{other:?}")),
    })
    .or_panic_with_logs(&vm);
    fs::remove_file(&blocked_path).expect("removed");
    fs::create_dir(&blocked_path).expect("a folder");
    let newer_file = job.folder.join(format!("state-{other}"));
    fs::write(&newer_file, "newer").expect("written");
    let refused_output = vm
        .run_pvm(&["restart", &checkpoint_name])
        .or_panic_with_logs(&vm);
    assert!(
        !refused_output.succeeded() && refused_output.stderr.contains("it is not a regular file"),
        "{refused_output:?}\n{}",
        vm.events_and_logs()
    );
    assert_eq!(
        fs::read_to_string(&newer_file).expect("there"),
        "newer",
        "nothing has taken its place"
    );
    wait_until_no_sempa_files(&vm, &job.folder);
    fs::remove_dir(&blocked_path).expect("removed");
    fs::remove_file(job.folder.join("result")).expect("removed");
    let restart_output = vm
        .run_pvm(&["restart", &checkpoint_name])
        .or_panic_with_logs(&vm);
    assert!(
        restart_output.succeeded(),
        "{restart_output:?}\n{}",
        vm.events_and_logs()
    );
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}
