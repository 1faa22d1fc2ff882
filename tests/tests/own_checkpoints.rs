//! Jobs with self-checkpoints: no host has CRIU, or the user may not use it.

use sempa_proto::event::EventKind;
use sempa_tests::needs::{testbed, testbed_with_own_engine};
use sempa_tests::ring_job::Job;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::fs;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Settings for a job: the engines of its first task and of its workers. Their files are in a
/// folder of their home, which all hosts share.
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

fn made(vm: &Vm<'_>) -> usize {
    let events = vm.events().sure(vm);
    events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::Checkpointed { .. }))
        .count()
}

fn until_more_are_made(vm: &Vm<'_>, more: usize) {
    let wanted = made(vm) + more;
    let enough = || {
        if made(vm) >= wanted {
            Ok(())
        } else {
            Err("no newer checkpoint".to_string())
        }
    };
    eventually(TIMEOUT, enough).sure(vm);
}

/// Returns the names in a folder that Sempa has made.
fn strangers(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".sempa")).collect()
}

/// Waits until none is left: hosts are notified of a failed checkpoint after the answer.
fn no_strangers(vm: &Vm<'_>, folder: &Path) {
    let none = || match strangers(folder) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    };
    eventually(TIMEOUT, none).sure(vm);
}

/// The tasks of an ordinary user's job write self-checkpoints, and the job rolls back when two
/// hosts are killed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_ordinary_users_job_goes_back() {
    let bed = testbed(4);
    let vm = Vm::start(&bed, settings(true, "own", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3", "h4"]).expect("the others join");
    let job = Job::start_own(&vm, "-h2");
    job.go_on(&vm, 5);
    let first = vm
        .json(&["checkpoint", "--every", "1s", &job.tid])
        .sure(&vm);
    let (own, tasks) = (first[0]["own"].as_array(), first[0]["tasks"].as_array());
    assert!(
        own.is_some_and(|own| own.len() == 5) && own == tasks,
        "{first:?}"
    );
    for lost in [3, 2] {
        until_more_are_made(&vm, 2);
        job.go_on(&vm, 2);
        bed.host(lost).kill_all();
        vm.went_back(TIMEOUT, &format!("h{lost} was lost"))
            .sure(&vm);
    }
    job.finish(&vm);
    let frozen = |kind: &EventKind| match kind {
        EventKind::Checkpointed { frozen, .. } => Some(frozen.0 / 1000),
        _ => None,
    };
    let all: Vec<u64> = vm
        .events()
        .sure(&vm)
        .iter()
        .filter_map(|entry| frozen(&entry.kind))
        .collect();
    eprintln!(
        "{} checkpoints; milliseconds from the first that had ended until the last was kept: {all:?}",
        all.len()
    );
    no_strangers(&vm, &job.folder);
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
    let job = Job::start_own(&vm, "-h2");
    job.go_on(&vm, 5);
    let said = vm.pvm(&["checkpoint", &job.tid]).sure(&vm);
    assert!(
        said.good()
            && said.out.contains(&format!(
                "5 tasks of job {} by their own checkpoints",
                job.tid
            )),
        "{said:?}\n{}",
        vm.logs()
    );
    let set = said.out.split(':').next().expect("a name").to_string();
    // This progress is lost.
    job.go_on(&vm, 20);
    for host in bed.hosts() {
        host.kill_all();
    }
    // A file that a program has written since must be replaced.
    fs::write(
        job.folder.join(format!("state-{}", job.tid)),
        "of another time",
    )
    .expect("written");
    let vm = Vm::start(&bed, settings(false, "own", "own")).sure(&vm);
    vm.add(&["h2", "h3"]).sure(&vm);
    let again = vm.pvm(&["restart", &set, "--on", "h1,h3"]).sure(&vm);
    assert!(
        again.good() && !again.out.contains("h2"),
        "{again:?}\n{}",
        vm.logs()
    );
    // One task migrates with its self-checkpoint.
    let moved = vm.migrate_when_ready(&job.tid, "h2").sure(&vm);
    assert!(
        moved.good() && moved.out.contains("by its own checkpoint"),
        "{moved:?}\n{}",
        vm.logs()
    );
    job.finish(&vm);
    no_strangers(&vm, &job.folder);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn criu_and_programs_share_a_checkpoint() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, settings(false, "criu", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start_own(&vm, "-h2");
    job.go_on(&vm, 5);
    let first = vm
        .json(&["checkpoint", "--every", "1s", &job.tid])
        .sure(&vm);
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
    until_more_are_made(&vm, 2);
    job.go_on(&vm, 2);
    bed.host(3).kill_all();
    let is_back = |kind: &EventKind| matches!(kind, EventKind::Restarted { .. });
    vm.event(TIMEOUT, "a job that went back", |entry| {
        is_back(&entry.kind)
    })
    .sure(&vm);
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// One file of the checkpoint cannot be restored, so no task starts and no file is changed.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_restart_that_cannot_write_changes_nothing() {
    let bed = testbed(2);
    let vm = Vm::start(&bed, settings(true, "own", "own")).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let job = Job::start_own(&vm, "-h2");
    job.go_on(&vm, 5);
    let blocked = job.folder.join(format!("state-{}", job.tid));
    let other = vm
        .tasks()
        .sure(&vm)
        .into_iter()
        .map(|task| task.tid)
        .find(|tid| *tid != job.tid)
        .expect("a worker");
    let good = vm.pvm(&["checkpoint", &job.tid]).sure(&vm);
    assert!(good.good(), "{good:?}\n{}", vm.logs());
    let set = good.out.split(':').next().expect("a name").to_string();
    assert!(blocked.is_file(), "it has written it");
    let alive = vm.pvm(&["restart", &set]).sure(&vm);
    assert!(
        !alive.good() && alive.err.contains(&other) && alive.err.contains("alive"),
        "{alive:?}"
    );
    job.finish(&vm);
    // The tasks have ended, and one of the files cannot be written.
    eventually(TIMEOUT, || match vm.tasks() {
        Ok(tasks)
            if tasks
                .iter()
                .all(|task| task.tid != job.tid && task.tid != other) =>
        {
            Ok(())
        }
        other => Err(format!("{other:?}")),
    })
    .sure(&vm);
    fs::remove_file(&blocked).expect("removed");
    fs::create_dir(&blocked).expect("a folder");
    let newer = job.folder.join(format!("state-{other}"));
    fs::write(&newer, "newer").expect("written");
    let refused = vm.pvm(&["restart", &set]).sure(&vm);
    assert!(
        !refused.good() && refused.err.contains("it is not a regular file"),
        "{refused:?}\n{}",
        vm.logs()
    );
    assert_eq!(
        fs::read_to_string(&newer).expect("there"),
        "newer",
        "nothing has taken its place"
    );
    no_strangers(&vm, &job.folder);
    fs::remove_dir(&blocked).expect("removed");
    fs::remove_file(job.folder.join("result")).expect("removed");
    let again = vm.pvm(&["restart", &set]).sure(&vm);
    assert!(again.good(), "{again:?}\n{}", vm.logs());
    job.finish(&vm);
    vm.halt().expect("halts");
}
