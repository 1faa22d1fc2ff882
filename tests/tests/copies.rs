//! Copies of checkpoints in the stores of other hosts: they outlive the master's host and its disk, and go when nobody needs them.

use sempa_proto::event::EventKind;
use sempa_tests::needs::testbed_with_env;
use sempa_tests::ring_job::Job;
use sempa_tests::run::must;
use sempa_tests::testbed::{Host, Testbed};
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(120);
/// Each host has a folder of its own under this name.
const STORE: &str = "/tmp/own/store";
const KEY: &str = "/tmp/own/key";
const ENV: [(&str, &str); 3] = [
    ("SEMPA_STORE", STORE),
    ("SEMPA_STORE_KEY", KEY),
    ("SEMPA_STORE_COPIES", "1"),
];

fn bed() -> Testbed {
    let bed = testbed_with_env(3, &ENV);
    for n in 1..=3 {
        fs::create_dir(bed.host(n).path("/tmp/own")).expect("made");
    }
    bed
}

fn started(bed: &Testbed) -> Vm<'_> {
    let env = ENV
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let vm = Vm::start(
        bed,
        Settings {
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm
}

/// What lies in the store of a host: sets, drafts, and what is being deleted.
fn sets(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.path(STORE))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name != "lock").collect()
}

/// Has the job checkpointed; the name of the set.
fn checkpoint(vm: &Vm<'_>, job: &Job) -> String {
    let values = vm.json(&["checkpoint", &job.tid]).sure(vm);
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Waits until it is told what became of the copies of a set: who has one, how many are missing, and why.
fn told(vm: &Vm<'_>, set: &str) -> (usize, u32, String) {
    let is = |kind: &EventKind| matches!(kind, EventKind::CheckpointCopied { checkpoint: of, .. } if of == set);
    let told = vm
        .event(LONG, "what became of the copies", |entry| is(&entry.kind))
        .sure(vm);
    let EventKind::CheckpointCopied {
        hosts,
        missing,
        why,
        ..
    } = told.kind
    else {
        unreachable!("it was looked for")
    };
    (hosts.len(), missing, why)
}

/// Waits until all wanted copies of a set are there; the host that has it.
fn copied(vm: &Vm<'_>, set: &str) -> usize {
    let (hosts, missing, why) = told(vm, set);
    assert_eq!((hosts, missing), (1, 0), "{why}\n{}", vm.logs());
    let listed = vm.json(&["checkpoints"]).sure(vm);
    let entry = listed[0]["sets"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|entry| entry["set"] == set)
        .expect("in it");
    let name = entry["copies"][0].as_str().expect("a name").to_string();
    name.strip_prefix('h')
        .and_then(|number| number.parse().ok())
        .expect("a host of the testbed")
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_goes_on_from_a_copy_when_the_masters_host_and_its_store_are_gone() {
    let bed = bed();
    let vm = started(&bed);
    let job = Job::start(&vm, "-h2", 300);
    job.go_on(&vm, 20);
    let set = checkpoint(&vm, &job);
    let at = copied(&vm, &set);
    let place = |n: usize, path: &str| bed.host(n).path(path);
    assert_eq!(
        (sets(bed.host(1)), sets(bed.host(at))),
        (vec![set.clone()], vec![set.clone()])
    );
    assert_eq!(sets(bed.host(5 - at)), [""; 0], "one copy was wanted");
    let mode = |path: PathBuf| path.metadata().expect("there").mode() & 0o7777;
    assert_eq!(
        [mode(place(at, STORE)), mode(place(at, KEY))],
        [0o700, 0o600]
    );
    assert_eq!(mode(place(at, STORE).join(&set).join("manifest")), 0o600);
    let key = |n: usize| fs::read(place(n, KEY)).expect("there");
    assert_ne!(key(1), key(at), "each store has a key of its own");
    job.go_on(&vm, 10);
    for host in bed.hosts() {
        host.kill_all();
    }
    drop(vm);
    // The disk of h1 is a new one, and what is on it is the copy.
    fs::remove_dir_all(place(1, "/tmp/own")).expect("removed");
    let mut copy = Command::new("cp");
    copy.arg("-a")
        .args([place(at, "/tmp/own"), place(1, "/tmp/own")]);
    must(copy, LONG).expect("copied");
    let vm = started(&bed);
    let again = vm.pvm(&["restart", &set]).sure(&vm);
    assert!(again.good(), "{again:?}\n{}", vm.logs());
    job.finish(&vm);
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn the_newest_checkpoint_of_a_job_has_its_copy_and_when_the_job_has_ended_there_is_none() {
    let bed = bed();
    let vm = started(&bed);
    let job = Job::start(&vm, "-h3", 250);
    job.go_on(&vm, 5);
    let mut at = Vec::new();
    for _ in 0..3 {
        let set = checkpoint(&vm, &job);
        at.push(copied(&vm, &set));
        let others = || {
            let there = sets(bed.host(at[0]));
            if there == [set.clone()] {
                Ok(())
            } else {
                Err(format!("{there:?}, not {set}"))
            }
        };
        eventually(LONG, others).sure(&vm);
    }
    assert!(
        at.iter().all(|host| *host == at[0]),
        "the same host as long as it takes them: {at:?}"
    );
    job.finish(&vm);
    let none = || {
        let there = sets(bed.host(at[0]));
        if there.is_empty() {
            Ok(())
        } else {
            Err(format!("{there:?}"))
        }
    };
    eventually(LONG, none).sure(&vm);
    assert_eq!(
        sets(bed.host(1)).len(),
        3,
        "what the master has stays for a day"
    );
    vm.halt().expect("halts");
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_host_whose_store_cannot_be_used_is_told_with_its_reason_and_another_one_takes_the_copy() {
    let bed = bed();
    for n in [2, 3] {
        // A folder that others may read is no store.
        let place = bed.host(n).path(STORE);
        fs::create_dir(&place).expect("made");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&place, mode).expect("changed");
        if n == 3 {
            fs::remove_dir(&place).expect("removed");
        }
    }
    let vm = started(&bed);
    let job = Job::start(&vm, "-h2", 150);
    job.go_on(&vm, 5);
    // Who is asked first depends on the job; all that can be said is that it ends with the one that can.
    let set = checkpoint(&vm, &job);
    assert_eq!(copied(&vm, &set), 3);
    fs::remove_dir_all(bed.host(3).path(STORE)).expect("removed");
    fs::write(bed.host(3).path(STORE), "no folder").expect("written");
    let set = checkpoint(&vm, &job);
    let (hosts, missing, why) = told(&vm, &set);
    assert_eq!((hosts, missing), (0, 1), "{why}");
    assert!(
        why.contains("h2: ") && why.contains("h3: ") && why.contains(STORE),
        "{why}"
    );
    job.finish(&vm);
    vm.halt().expect("halts");
}
