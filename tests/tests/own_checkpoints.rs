//! Checkpoints of jobs whose programs write their own: no host has CRIU, or its user may not use it.

use sempa_proto::event::EventKind;
use sempa_tests::needs::{testbed, testbed_with_own_engine};
use sempa_tests::ring_job::Job;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::fs;
use std::path::Path;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(120);

/// A job whose tasks are to be written so, the first one and its workers; their files are in a folder of their home, which all
/// hosts have in common.
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
    eventually(LONG, enough).sure(vm);
}

/// Names in a folder that no task has put there.
fn strangers(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).expect("a folder").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(".sempa")).collect()
}

/// Hosts that were not to blame are told after the answer that nothing comes of it.
fn no_strangers(vm: &Vm<'_>, folder: &Path) {
    let none = || match strangers(folder) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    };
    eventually(LONG, none).sure(vm);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_of_an_ordinary_user_goes_back_to_its_own_checkpoints_when_hosts_of_it_are_killed() {
    let bed = testbed(4);
    let vm = Vm::start(&bed, settings(true, "own", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3", "h4"]).expect("the others join");
    let job = Job::start_own(&vm, "-h2", 600);
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
        vm.went_back(LONG, &format!("h{lost} was lost")).sure(&vm);
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

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_without_criu_on_any_host_goes_on_in_a_new_virtual_machine_from_what_it_wrote_itself() {
    let bed = testbed_with_own_engine(3);
    fs::remove_file(bed.engine().expect("an engine of its own")).expect("removed");
    let vm =
        Vm::start(&bed, settings(false, "criu,own:wait=30", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start_own(&vm, "-h2", 300);
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
    // What has happened since did not.
    job.go_on(&vm, 20);
    for host in bed.hosts() {
        host.kill_all();
    }
    // What programs have written since would lead them astray.
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
    // One of them moves on, by the same way.
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
fn where_criu_and_programs_write_one_checkpoint_together_it_is_whole() {
    let bed = testbed(3);
    let vm = Vm::start(&bed, settings(false, "criu", "own")).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    let job = Job::start_own(&vm, "-h2", 300);
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
    vm.event(LONG, "a job that went back", |entry| is_back(&entry.kind))
        .sure(&vm);
    job.finish(&vm);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_set_whose_files_cannot_be_put_back_is_not_started_and_no_file_is_changed() {
    let bed = testbed(2);
    let vm = Vm::start(&bed, settings(true, "own", "own")).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let job = Job::start_own(&vm, "-h2", 150);
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
    // Now they are gone, and one of the files has no place to go to.
    eventually(LONG, || match vm.tasks() {
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
        !refused.good() && refused.err.contains("it is no regular file"),
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
