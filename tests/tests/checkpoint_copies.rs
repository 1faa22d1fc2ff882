//! Copies of checkpoints in the stores of other hosts. A copy can be restarted after the loss of
//! the master's host with its disk, and is removed when it is no longer needed.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::ring_job::RingJob;
use sempa_tests::run::run_successfully;
use sempa_tests::testbed::{Host, Testbed};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Path of the store. Each host has a separate folder at this path.
const STORE_PATH: &str = "/tmp/own/store";
const KEY_PATH: &str = "/tmp/own/key";
const STORE_ENV: [(&str, &str); 3] = [
    ("SEMPA_STORE", STORE_PATH),
    ("SEMPA_STORE_KEY", KEY_PATH),
    ("SEMPA_STORE_COPIES", "1"),
];

fn bed_with_stores() -> Testbed {
    let bed = require_testbed_with_env(3, &STORE_ENV);
    for n in 1..=3 {
        fs::create_dir(bed.host(n).machine_path("/tmp/own")).expect("made");
    }
    bed
}

fn start_vm(bed: &Testbed) -> Vm<'_> {
    let env = STORE_ENV
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let vm = Vm::start(
        bed,
        VmSettings {
            env,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm
}

/// Returns the names of all entries in a host's store except the claims of jobs: checkpoints,
/// drafts, and checkpoints that are being deleted.
fn store_entries(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.machine_path(STORE_PATH))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name != "lock" && !name.starts_with("claim-"))
        .collect()
}

/// Makes a checkpoint of a job and returns the checkpoint's name.
fn make_checkpoint(vm: &Vm<'_>, job: &RingJob) -> String {
    let values = vm
        .pvm_json(&["checkpoint", &job.tid])
        .or_panic_with_logs(vm);
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Waits for the event about the copies of a checkpoint. Returns the number of hosts that have a
/// copy, the number of missing copies, and the reason why they are missing.
fn wait_for_copy_event(vm: &Vm<'_>, checkpoint_name: &str) -> (usize, u32, String) {
    let is_copy_event = |kind: &EventKind| matches!(kind, EventKind::CheckpointCopied { checkpoint: copied_name, .. } if copied_name == checkpoint_name);
    let copy_event = vm
        .wait_for_event(TIMEOUT, "what became of the copies", |entry| {
            is_copy_event(&entry.kind)
        })
        .or_panic_with_logs(vm);
    let EventKind::CheckpointCopied {
        hosts,
        missing,
        why,
        ..
    } = copy_event.kind
    else {
        unreachable!("it was looked for")
    };
    (hosts.len(), missing, why)
}

/// Waits until the copy of a checkpoint exists. Returns the number of the host that stores the
/// copy.
fn wait_for_copy(vm: &Vm<'_>, checkpoint_name: &str) -> usize {
    let (host_count, missing_count, reason) = wait_for_copy_event(vm, checkpoint_name);
    assert_eq!(
        (host_count, missing_count),
        (1, 0),
        "{reason}\n{}",
        vm.events_and_logs()
    );
    let list_values = vm.pvm_json(&["checkpoints"]).or_panic_with_logs(vm);
    let entry = list_values[0]["sets"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|entry| entry["set"] == checkpoint_name)
        .expect("in it");
    let host_name = entry["copies"][0].as_str().expect("a name").to_string();
    host_name
        .strip_prefix('h')
        .and_then(|number| number.parse().ok())
        .expect("a host of the testbed")
}

/// The master's host is lost with its store. The store with the copy is copied from the other host
/// to the master's host, and the job restarts from the copy.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_restarts_from_a_copy_of_its_checkpoint() {
    let bed = bed_with_stores();
    let vm = start_vm(&bed);
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 20);
    let checkpoint_name = make_checkpoint(&vm, &job);
    let copy_host = wait_for_copy(&vm, &checkpoint_name);
    let path_on_host = |n: usize, path: &str| bed.host(n).machine_path(path);
    assert_eq!(
        (
            store_entries(bed.host(1)),
            store_entries(bed.host(copy_host))
        ),
        (vec![checkpoint_name.clone()], vec![checkpoint_name.clone()])
    );
    assert_eq!(
        store_entries(bed.host(5 - copy_host)),
        [""; 0],
        "one copy was wanted"
    );
    let mode = |path: PathBuf| path.metadata().expect("there").mode() & 0o7777;
    assert_eq!(
        [
            mode(path_on_host(copy_host, STORE_PATH)),
            mode(path_on_host(copy_host, KEY_PATH))
        ],
        [0o700, 0o600]
    );
    assert_eq!(
        mode(
            path_on_host(copy_host, STORE_PATH)
                .join(&checkpoint_name)
                .join("manifest")
        ),
        0o600
    );
    let read_key = |n: usize| fs::read(path_on_host(n, KEY_PATH)).expect("there");
    assert_ne!(
        read_key(1),
        read_key(copy_host),
        "each store has a key of its own"
    );
    job.wait_for_rounds(&vm, 10);
    for host in bed.hosts() {
        host.kill_all_processes();
    }
    drop(vm);
    // h1 has a new, empty disk. The files of the host with the copy are copied to h1.
    fs::remove_dir_all(path_on_host(1, "/tmp/own")).expect("removed");
    let mut copy_command = Command::new("cp");
    copy_command.arg("-a").args([
        path_on_host(copy_host, "/tmp/own"),
        path_on_host(1, "/tmp/own"),
    ]);
    run_successfully(copy_command, TIMEOUT).expect("copied");
    let vm = start_vm(&bed);
    // The copy has no record of where the job runs, and no host of the earlier virtual machine
    // answers.
    let refused_output = vm
        .run_pvm(&["restart", &checkpoint_name])
        .or_panic_with_logs(&vm);
    assert!(
        !refused_output.succeeded() && refused_output.stderr.contains("use --force"),
        "{refused_output:?}"
    );
    let restart_output = vm
        .run_pvm(&["restart", &checkpoint_name, "--force"])
        .or_panic_with_logs(&vm);
    assert!(
        restart_output.succeeded(),
        "{restart_output:?}\n{}",
        vm.events_and_logs()
    );
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// The copy of a new checkpoint replaces the older copy on the same host. When the job ends, the
/// copy is removed, and the checkpoints in the master's store remain.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn only_the_newest_checkpoint_is_copied() {
    let bed = bed_with_stores();
    let vm = start_vm(&bed);
    let job = RingJob::start(&vm, "-h3");
    job.wait_for_rounds(&vm, 5);
    let mut copy_hosts = Vec::new();
    for _ in 0..3 {
        let checkpoint_name = make_checkpoint(&vm, &job);
        copy_hosts.push(wait_for_copy(&vm, &checkpoint_name));
        let check_single_copy = || {
            let entries = store_entries(bed.host(copy_hosts[0]));
            if entries == [checkpoint_name.clone()] {
                Ok(())
            } else {
                Err(format!("{entries:?}, not {checkpoint_name}"))
            }
        };
        wait_for(TIMEOUT, check_single_copy).or_panic_with_logs(&vm);
    }
    assert!(
        copy_hosts.iter().all(|host| *host == copy_hosts[0]),
        "the same host as long as it takes them: {copy_hosts:?}"
    );
    job.end_and_check(&vm);
    let check_no_copy = || {
        let entries = store_entries(bed.host(copy_hosts[0]));
        if entries.is_empty() {
            Ok(())
        } else {
            Err(format!("{entries:?}"))
        }
    };
    wait_for(TIMEOUT, check_no_copy).or_panic_with_logs(&vm);
    assert_eq!(
        store_entries(bed.host(1)).len(),
        3,
        "what the master has stays for a day"
    );
    vm.halt_and_wait().expect("halts");
}

/// If the store of one host cannot be used, another host stores the copy. If no host can store a
/// copy, the event names each host with its reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn other_host_stores_copy_if_store_fails() {
    let bed = bed_with_stores();
    for n in [2, 3] {
        // A store in a folder that other users can read is refused.
        let store_folder = bed.host(n).machine_path(STORE_PATH);
        fs::create_dir(&store_folder).expect("made");
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&store_folder, permissions).expect("changed");
        if n == 3 {
            fs::remove_dir(&store_folder).expect("removed");
        }
    }
    let vm = start_vm(&bed);
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    // The order in which hosts are requested to store copies depends on the job.
    let checkpoint_name = make_checkpoint(&vm, &job);
    assert_eq!(wait_for_copy(&vm, &checkpoint_name), 3);
    fs::remove_dir_all(bed.host(3).machine_path(STORE_PATH)).expect("removed");
    fs::write(bed.host(3).machine_path(STORE_PATH), "no folder").expect("written");
    let checkpoint_name = make_checkpoint(&vm, &job);
    let (host_count, missing_count, reason) = wait_for_copy_event(&vm, &checkpoint_name);
    assert_eq!((host_count, missing_count), (0, 1), "{reason}");
    assert!(
        reason.contains("h2: ") && reason.contains("h3: ") && reason.contains(STORE_PATH),
        "{reason}"
    );
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}
