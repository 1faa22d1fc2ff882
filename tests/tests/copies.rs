//! Copies of checkpoints in the stores of other hosts. A copy can be restarted after the loss of
//! the master's host with its disk, and is removed when it is no longer needed.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::testbed_with_env;
use sempa_tests::ring_job::Job;
use sempa_tests::run::run_ok;
use sempa_tests::testbed::{Host, Testbed};
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Path of the store. Each host has its own folder with this name.
const STORE: &str = "/tmp/own/store";
const KEY: &str = "/tmp/own/key";
const ENV: [(&str, &str); 3] = [
    ("SEMPA_STORE", STORE),
    ("SEMPA_STORE_KEY", KEY),
    ("SEMPA_STORE_COPIES", "1"),
];

fn bed_with_stores() -> Testbed {
    let bed = testbed_with_env(3, &ENV);
    for n in 1..=3 {
        fs::create_dir(bed.host(n).machine_path("/tmp/own")).expect("made");
    }
    bed
}

fn start_vm(bed: &Testbed) -> Vm<'_> {
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

/// Returns the names of all entries in a host's store: checkpoints, drafts, and checkpoints that
/// are being deleted.
fn store_entries(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.machine_path(STORE))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name != "lock").collect()
}

/// Makes a checkpoint of a job. Returns its name.
fn checkpoint(vm: &Vm<'_>, job: &Job) -> String {
    let values = vm.json(&["checkpoint", &job.tid]).or_panic_with_logs(vm);
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Waits for the event about the copies of a checkpoint. Returns the number of hosts that have a
/// copy, the number of missing copies, and the reason why they are missing.
fn wait_for_copy_event(vm: &Vm<'_>, set: &str) -> (usize, u32, String) {
    let is = |kind: &EventKind| matches!(kind, EventKind::CheckpointCopied { checkpoint: of, .. } if of == set);
    let told = vm
        .wait_for_event(
            TIMEOUT,
            "what became of the copies",
            |entry| is(&entry.kind),
        )
        .or_panic_with_logs(vm);
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

/// Waits until the copy of a checkpoint exists. Returns the number of its host.
fn wait_for_copy(vm: &Vm<'_>, set: &str) -> usize {
    let (hosts, missing, why) = wait_for_copy_event(vm, set);
    assert_eq!((hosts, missing), (1, 0), "{why}\n{}", vm.logs());
    let listed = vm.json(&["checkpoints"]).or_panic_with_logs(vm);
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

/// The master's host and its store are lost. The copy from another host is placed in the store, and
/// the job restarts from it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_restarts_from_a_copy_of_its_checkpoint() {
    let bed = bed_with_stores();
    let vm = start_vm(&bed);
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 20);
    let set = checkpoint(&vm, &job);
    let at = wait_for_copy(&vm, &set);
    let place = |n: usize, path: &str| bed.host(n).machine_path(path);
    assert_eq!(
        (store_entries(bed.host(1)), store_entries(bed.host(at))),
        (vec![set.clone()], vec![set.clone()])
    );
    assert_eq!(
        store_entries(bed.host(5 - at)),
        [""; 0],
        "one copy was wanted"
    );
    let mode = |path: PathBuf| path.metadata().expect("there").mode() & 0o7777;
    assert_eq!(
        [mode(place(at, STORE)), mode(place(at, KEY))],
        [0o700, 0o600]
    );
    assert_eq!(mode(place(at, STORE).join(&set).join("manifest")), 0o600);
    let key = |n: usize| fs::read(place(n, KEY)).expect("there");
    assert_ne!(key(1), key(at), "each store has a key of its own");
    job.wait_for_rounds(&vm, 10);
    for host in bed.hosts() {
        host.kill_all();
    }
    drop(vm);
    // h1 gets a new disk, and the copy is placed on it.
    fs::remove_dir_all(place(1, "/tmp/own")).expect("removed");
    let mut copy = Command::new("cp");
    copy.arg("-a")
        .args([place(at, "/tmp/own"), place(1, "/tmp/own")]);
    run_ok(copy, TIMEOUT).expect("copied");
    let vm = start_vm(&bed);
    let again = vm.pvm(&["restart", &set]).or_panic_with_logs(&vm);
    assert!(again.succeeded(), "{again:?}\n{}", vm.logs());
    job.finish(&vm);
    vm.halt().expect("halts");
}

/// The copy of a new checkpoint replaces the older copy on the same host. The copies are removed
/// when the job ends.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn only_the_newest_checkpoint_is_copied() {
    let bed = bed_with_stores();
    let vm = start_vm(&bed);
    let job = Job::start(&vm, "-h3");
    job.wait_for_rounds(&vm, 5);
    let mut at = Vec::new();
    for _ in 0..3 {
        let set = checkpoint(&vm, &job);
        at.push(wait_for_copy(&vm, &set));
        let others = || {
            let there = store_entries(bed.host(at[0]));
            if there == [set.clone()] {
                Ok(())
            } else {
                Err(format!("{there:?}, not {set}"))
            }
        };
        wait_for(TIMEOUT, others).or_panic_with_logs(&vm);
    }
    assert!(
        at.iter().all(|host| *host == at[0]),
        "the same host as long as it takes them: {at:?}"
    );
    job.finish(&vm);
    let none = || {
        let there = store_entries(bed.host(at[0]));
        if there.is_empty() {
            Ok(())
        } else {
            Err(format!("{there:?}"))
        }
    };
    wait_for(TIMEOUT, none).or_panic_with_logs(&vm);
    assert_eq!(
        store_entries(bed.host(1)).len(),
        3,
        "what the master has stays for a day"
    );
    vm.halt().expect("halts");
}

/// If a store cannot be used, another host stores the copy. If none is left, the event has the
/// hosts with their reasons.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn other_host_stores_copy_if_store_fails() {
    let bed = bed_with_stores();
    for n in [2, 3] {
        // A store in a folder that other users can read is refused.
        let place = bed.host(n).machine_path(STORE);
        fs::create_dir(&place).expect("made");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&place, mode).expect("changed");
        if n == 3 {
            fs::remove_dir(&place).expect("removed");
        }
    }
    let vm = start_vm(&bed);
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    // The order in which hosts are requested to store copies depends on the job.
    let set = checkpoint(&vm, &job);
    assert_eq!(wait_for_copy(&vm, &set), 3);
    fs::remove_dir_all(bed.host(3).machine_path(STORE)).expect("removed");
    fs::write(bed.host(3).machine_path(STORE), "no folder").expect("written");
    let set = checkpoint(&vm, &job);
    let (hosts, missing, why) = wait_for_copy_event(&vm, &set);
    assert_eq!((hosts, missing), (0, 1), "{why}");
    assert!(
        why.contains("h2: ") && why.contains("h3: ") && why.contains(STORE),
        "{why}"
    );
    job.finish(&vm);
    vm.halt().expect("halts");
}
