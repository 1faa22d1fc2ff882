//! Jobs with self-checkpoints, on hosts without CRIU or for a user who may not use CRIU.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::{testbed, testbed_with_own_engine};
use sempa_tests::ring_job::Job;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns settings for a job whose first task requests the engine `first` and whose workers
/// request the engine `workers`. Self-checkpoints are written to the user's home folder, which all
/// hosts share.
fn settings(as_alice: bool, first: &str, workers: &str) -> Settings {
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    let env = vec![
        pair("SEMPA_ENGINE", first),
        pair("OWN_RING_WORKERS", workers),
        pair("SEMPA_STATE", "ring/state-{tid}"),
        pair("OWN_RING_FOLDER", "ring"),
        pair(
            "PVM_EXPORT",
            "SEMPA_ENGINE:SEMPA_STATE:OWN_RING_FOLDER:OWN_RING_WORKERS",
        ),
    ];
    Settings {
        as_alice,
        env,
        ..Settings::default()
    }
}

fn checkpoint_count(vm: &Vm<'_>) -> usize {
    let events = vm.events().or_panic_with_logs(vm);
    events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::Checkpointed { .. }))
        .count()
}

fn wait_for_checkpoints(vm: &Vm<'_>, more: usize) {
    let wanted = checkpoint_count(vm) + more;
    let enough = || {
        if checkpoint_count(vm) >= wanted {
            Ok(())
        } else {
            Err("no newer checkpoint".to_string())
        }
    };
    wait_for(TIMEOUT, enough).or_panic_with_logs(vm);
}

/// Returns the names of files in a folder that Sempa has made.
fn files_of_sempa(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".sempa")).collect()
}

/// Waits until a folder has no files of Sempa. Hosts may be notified of a failed checkpoint only
/// after the console's answer.
fn wait_until_no_files_of_sempa(vm: &Vm<'_>, folder: &Path) {
    let none = || match files_of_sempa(folder) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    };
    wait_for(TIMEOUT, none).or_panic_with_logs(vm);
}

/// The tasks of an ordinary user's job write self-checkpoints. The job rolls back to them when a
/// host is killed, and again when a second one is killed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_job_rolls_back() {
    let bed = testbed(4);
    let vm = Vm::start(&bed, settings(true, "own", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3", "h4"]).expect("the others join");
    let job = Job::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let first = vm
        .json(&["checkpoint", "--every", "1s", &job.tid])
        .or_panic_with_logs(&vm);
    let (own, tasks) = (first[0]["own"].as_array(), first[0]["tasks"].as_array());
    assert!(
        own.is_some_and(|own| own.len() == 5) && own == tasks,
        "{first:?}"
    );
    for lost in [3, 2] {
        wait_for_checkpoints(&vm, 2);
        job.wait_for_rounds(&vm, 2);
        bed.host(lost).kill_all();
        vm.wait_for_rollback(TIMEOUT, &format!("h{lost} was lost"))
            .or_panic_with_logs(&vm);
    }
    job.finish(&vm);
    let frozen = |kind: &EventKind| match kind {
        EventKind::Checkpointed { frozen, .. } => Some(frozen.0 / 1000),
        _ => None,
    };
    let all: Vec<u64> = vm
        .events()
        .or_panic_with_logs(&vm)
        .iter()
        .filter_map(|entry| frozen(&entry.kind))
        .collect();
    eprintln!(
        "{} checkpoints; milliseconds from the first that had ended until the last was kept: {all:?}",
        all.len()
    );
    wait_until_no_files_of_sempa(&vm, &job.folder);
    vm.halt().expect("halts");
}

/// A new virtual machine restarts a job from the self-checkpoints of its tasks.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_restarts_without_criu_on_any_host() {
    let bed = testbed_with_own_engine(3);
    fs::remove_file(bed.engine().expect("an engine of its own")).expect("removed");
    let vm =
        Vm::start(&bed, settings(false, "criu,own:wait=30", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let said = vm.pvm(&["checkpoint", &job.tid]).or_panic_with_logs(&vm);
    assert!(
        said.succeeded()
            && said.out.contains(&format!(
                "5 tasks of job {} by their own checkpoints",
                job.tid
            )),
        "{said:?}\n{}",
        vm.logs()
    );
    let set = said.out.split(':').next().expect("a name").to_string();
    // The restart loses these rounds.
    job.wait_for_rounds(&vm, 20);
    for host in bed.hosts() {
        host.kill_all();
    }
    // A restart must replace a file that a program has written since the checkpoint.
    fs::write(
        job.folder.join(format!("state-{}", job.tid)),
        "of another time",
    )
    .expect("written");
    let vm = Vm::start(&bed, settings(false, "own", "own")).or_panic_with_logs(&vm);
    vm.add(&["h2", "h3"]).or_panic_with_logs(&vm);
    let again = vm
        .pvm(&["restart", &set, "--on", "h1,h3"])
        .or_panic_with_logs(&vm);
    assert!(
        again.succeeded() && !again.out.contains("h2"),
        "{again:?}\n{}",
        vm.logs()
    );
    // A task migrates by its self-checkpoint.
    let moved = vm
        .migrate_when_ready(&job.tid, "h2")
        .or_panic_with_logs(&vm);
    assert!(
        moved.succeeded() && moved.out.contains("by its own checkpoint"),
        "{moved:?}\n{}",
        vm.logs()
    );
    job.finish(&vm);
    wait_until_no_files_of_sempa(&vm, &job.folder);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn criu_and_programs_share_a_checkpoint() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, settings(false, "criu", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let first = vm
        .json(&["checkpoint", "--every", "1s", &job.tid])
        .or_panic_with_logs(&vm);
    let own: Vec<&str> = first[0]["own"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|tid| tid.as_str())
        .collect();
    assert!(
        own.len() == 4 && !own.contains(&&*job.tid),
        "{first:?}\n{}",
        vm.logs()
    );
    wait_for_checkpoints(&vm, 2);
    job.wait_for_rounds(&vm, 2);
    bed.host(3).kill_all();
    let is_back = |kind: &EventKind| matches!(kind, EventKind::Restarted { .. });
    vm.wait_for_event(TIMEOUT, "a job that went back", |entry| {
        is_back(&entry.kind)
    })
    .or_panic_with_logs(&vm);
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// One file of the checkpoint cannot be restored. Therefore no task is started and no file is
/// changed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_restart_that_cannot_write_changes_nothing() {
    let bed = testbed(2);
    let vm = Vm::start(&bed, settings(true, "own", "own")).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let job = Job::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let blocked = job.folder.join(format!("state-{}", job.tid));
    let other = vm
        .tasks()
        .or_panic_with_logs(&vm)
        .into_iter()
        .map(|task| task.tid)
        .find(|tid| *tid != job.tid)
        .expect("a worker");
    let good = vm.pvm(&["checkpoint", &job.tid]).or_panic_with_logs(&vm);
    assert!(good.succeeded(), "{good:?}\n{}", vm.logs());
    let set = good.out.split(':').next().expect("a name").to_string();
    assert!(blocked.is_file(), "it has written it");
    let alive = vm.pvm(&["restart", &set]).or_panic_with_logs(&vm);
    assert!(
        !alive.succeeded() && alive.err.contains(&other) && alive.err.contains("alive"),
        "{alive:?}"
    );
    job.finish(&vm);
    // When all tasks have ended, one of the files is made impossible to write.
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
    fs::remove_file(&blocked).expect("removed");
    fs::create_dir(&blocked).expect("a folder");
    let newer = job.folder.join(format!("state-{other}"));
    fs::write(&newer, "newer").expect("written");
    let refused = vm.pvm(&["restart", &set]).or_panic_with_logs(&vm);
    assert!(
        !refused.succeeded() && refused.err.contains("it is no regular file"),
        "{refused:?}\n{}",
        vm.logs()
    );
    assert_eq!(
        fs::read_to_string(&newer).expect("there"),
        "newer",
        "nothing has taken its place"
    );
    wait_until_no_files_of_sempa(&vm, &job.folder);
    fs::remove_dir(&blocked).expect("removed");
    fs::remove_file(job.folder.join("result")).expect("removed");
    let again = vm.pvm(&["restart", &set]).or_panic_with_logs(&vm);
    assert!(again.succeeded(), "{again:?}\n{}", vm.logs());
    job.finish(&vm);
    vm.halt().expect("halts");
}
