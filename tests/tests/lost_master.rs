//! After the loss of the master each host knows what ran, and how to restart it.

use nix::sys::signal::Signal;
use sempa_tests::faults::{daemon_pid, kill_and_wait, send_signal};
use sempa_tests::requirements::{require_testbed, require_testbed_with_env};
use sempa_tests::ring_job::RingJob;
use sempa_tests::testbed::{Host, Testbed};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Path of the store if each host has a separate one.
const STORE_PATH: &str = "/tmp/own/store";
const OWN_STORE_ENV: [(&str, &str); 3] = [
    ("SEMPA_STORE", STORE_PATH),
    ("SEMPA_STORE_KEY", "/tmp/own/key"),
    ("SEMPA_STORE_COPIES", "1"),
];

/// Returns settings for a job whose tasks write their own checkpoints, so that no engine is needed,
/// and further environment variables.
fn settings(env: &[(&str, &str)]) -> VmSettings {
    let own_engine = [
        ("SEMPA_ENGINE", "own"),
        ("OWN_RING_WORKERS", "own"),
        ("SEMPA_STATE", "ring/state-{tid}"),
        ("OWN_RING_FOLDER", "ring"),
        (
            "PVM_EXPORT",
            "SEMPA_ENGINE:SEMPA_STATE:OWN_RING_FOLDER:OWN_RING_WORKERS",
        ),
    ];
    VmSettings {
        env: VmSettings::owned_env(&[&own_engine, env].concat()),
        ..VmSettings::default()
    }
}

fn start_job<'a>(bed: &'a Testbed, env: &[(&str, &str)]) -> (Vm<'a>, RingJob) {
    let vm = Vm::start(bed, settings(env)).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start_with_self_checkpoints(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    (vm, job)
}

/// Makes a checkpoint of a job and returns its name.
fn make_checkpoint(vm: &Vm<'_>, job: &RingJob) -> String {
    let values = vm
        .pvm_json(&["checkpoint", &job.tid])
        .or_panic_with_logs(vm);
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Returns the notes of a host, as `pvm lost --json` prints them there.
fn notes_on(vm: &Vm<'_>, host: &Host, options: &[&str]) -> Vec<Value> {
    let arguments = [&["--json", "lost"], options].concat();
    let output = vm.run_pvm_on(host, &arguments).or_panic_with_logs(vm);
    assert!(output.succeeded(), "{output:?}");
    let lines = output.stdout.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// Waits until the note of a host, which is kept while the virtual machine runs, names the
/// checkpoint.
fn wait_for_kept_checkpoint(vm: &Vm<'_>, host: &Host, checkpoint: &str) {
    let dir = vm.user_home().join(".local/state/sempa/notes");
    let ending = format!("-{}.json", host.name());
    let names_checkpoint = || {
        let entries = fs::read_dir(&dir).map_err(|error| error.to_string())?;
        let mut paths = entries.flatten().map(|entry| entry.path());
        let path = paths
            .find(|path| path.display().to_string().ends_with(&ending))
            .ok_or("no note")?;
        let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
        match text.contains(checkpoint) {
            true => Ok(()),
            false => Err(text),
        }
    };
    wait_for(TIMEOUT, names_checkpoint).or_panic_with_logs(vm);
}

fn wait_until_daemon_ended(vm: &Vm<'_>, host: &Host) {
    let has_ended = || match daemon_pid(host) {
        None => Ok(()),
        Some(pid) => Err(format!("{pid} runs on {}", host.name())),
    };
    wait_for(TIMEOUT, has_ended).or_panic_with_logs(vm);
}

/// Only the master's daemon is killed. Each host says what was lost, the commands say where to
/// look, and the newest checkpoint is restarted by the command of the note.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn killed_master_leaves_notes_and_its_job_is_restarted() {
    let bed = require_testbed(3);
    let (vm, job) = start_job(&bed, &[]);
    let checkpoint = make_checkpoint(&vm, &job);
    for host in bed.hosts() {
        wait_for_kept_checkpoint(&vm, host, &checkpoint);
        assert_eq!(
            notes_on(&vm, host, &[]),
            [Value::Null; 0],
            "nothing is lost"
        );
    }
    job.wait_for_rounds(&vm, 5);
    kill_and_wait(daemon_pid(bed.host(1)).expect("it runs"));
    for host in bed.hosts() {
        wait_until_daemon_ended(&vm, host);
    }

    let note = notes_on(&vm, bed.host(2), &[]).pop().expect("a note");
    assert_eq!(
        (&note["state"], &note["master"]),
        (&"master lost".into(), &"h1".into())
    );
    assert_eq!(
        (&note["task_count"], &note["host_count"]),
        (&5.into(), &3.into())
    );
    assert!(
        note["lost_us"].as_u64() >= note["summary_us"].as_u64(),
        "{note}"
    );
    assert!(
        note["why"].as_str().is_some_and(|why| !why.is_empty()),
        "{note}"
    );
    let programs: Vec<&str> = note["tasks"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|task| task["program"].as_str())
        .collect();
    assert_eq!(programs, ["own_ring"; 5], "{note}");
    assert_eq!(note["sets"][0]["set"], checkpoint.as_str());
    let master_note = notes_on(&vm, bed.host(1), &[]).pop().expect("a note");
    assert_eq!(master_note["state"], "daemon ended");
    assert_eq!(master_note["sets"][0]["here"], true);
    let restart_command = format!("pvm restart {checkpoint}");
    assert_eq!(master_note["sets"][0]["restart"], restart_command.as_str());

    let output = vm.run_pvm_on(bed.host(2), &["ps"]).or_panic_with_logs(&vm);
    assert!(
        !output.succeeded()
            && output.stderr.contains("no virtual machine is running here")
            && output
                .stderr
                .contains("this host, h2, lost the master h1 at 20")
            && output.stderr.contains("'pvm lost' shows what ran"),
        "{output:?}"
    );
    let output = vm.run_pvm(&["start"]).or_panic_with_logs(&vm);
    assert!(
        output.succeeded()
            && output.stderr.contains("did not end in order")
            && output
                .stderr
                .contains(&format!("Restart it here: pvm start; {restart_command}")),
        "{output:?}"
    );
    vm.add_hosts(&["h2", "h3"]).or_panic_with_logs(&vm);
    let values = vm
        .pvm_json(&["restart", "--newest"])
        .or_panic_with_logs(&vm);
    assert_eq!(values[0]["set"], checkpoint.as_str(), "{values:?}");
    assert_eq!(values[0]["tasks"].as_array().map(Vec::len), Some(5));
    // The notes of all hosts are settled: the job runs again.
    for host in bed.hosts() {
        let is_settled = || match notes_on(&vm, host, &[]) {
            notes if notes.is_empty() => Ok(()),
            notes => Err(format!("{notes:?}")),
        };
        wait_for(TIMEOUT, is_settled).or_panic_with_logs(&vm);
        assert_eq!(notes_on(&vm, host, &["--all"]).len(), 1);
    }
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
    // A virtual machine that ends in order leaves no note. The earlier one is dismissed.
    for host in bed.hosts() {
        let notes = notes_on(&vm, host, &["--all"]);
        assert_eq!(notes.len(), 1, "{notes:?}");
        notes_on(&vm, host, &["--all", "--dismiss"]);
        assert_eq!(notes_on(&vm, host, &["--all"]), [Value::Null; 0]);
    }
}

/// All processes of the master's host are killed. A new virtual machine on another host does not
/// restart the job by mistake, because the store says who ran it, and does so if the user insists.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn job_of_lost_host_needs_force_elsewhere() {
    let bed = require_testbed(3);
    let (vm, job) = start_job(&bed, &[]);
    let checkpoint = make_checkpoint(&vm, &job);
    wait_for_kept_checkpoint(&vm, bed.host(2), &checkpoint);
    bed.host(1).kill_all_processes();
    for host in bed.hosts() {
        wait_until_daemon_ended(&vm, host);
    }
    let on_h2 = |arguments: &[&str]| {
        vm.run_pvm_on(bed.host(2), arguments)
            .or_panic_with_logs(&vm)
    };
    let output = on_h2(&["start"]);
    assert!(
        output.stderr.contains("lost the master h1 at 20") && output.stderr.contains(&checkpoint),
        "{output:?}"
    );
    let output = on_h2(&["add", "h3"]);
    assert!(output.succeeded(), "{output:?}");
    let output = on_h2(&["restart", "--newest", &job.tid]);
    assert!(
        !output.succeeded()
            && output
                .stderr
                .contains("its job runs in virtual machine pvm")
            && output.stderr.contains("use --force"),
        "{output:?}"
    );
    // The claim was renewed when the daemon was killed; it is valid for a minute.
    let restart = || match on_h2(&["restart", "--newest", &job.tid, "--force"]) {
        output if output.succeeded() => Ok(output.stdout),
        output => Err(output.stderr),
    };
    let text = wait_for(TIMEOUT, restart).or_panic_with_logs(&vm);
    assert!(text.contains(&format!("{} runs on h2", job.tid)), "{text}");
    job.end_and_check(&vm);
    assert!(on_h2(&["halt"]).succeeded());
    wait_until_daemon_ended(&vm, bed.host(2));
}

/// A host that was cut off has a copy of the checkpoint in its own store, which has no claims. It
/// finds out that the virtual machine still runs, and does not restart the job. When nobody
/// answers, it asks for the user's word.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn copy_is_not_restarted_while_its_virtual_machine_answers() {
    let bed = require_testbed_with_env(3, &OWN_STORE_ENV);
    for host in bed.hosts() {
        fs::create_dir(host.machine_path("/tmp/own")).expect("made");
    }
    let (vm, job) = start_job(&bed, &OWN_STORE_ENV);
    let checkpoint = make_checkpoint(&vm, &job);
    let has_copy = |n: &usize| {
        let store = bed.host(*n).machine_path(STORE_PATH);
        Path::new(&store).join(&checkpoint).is_dir()
    };
    let find_copy = || {
        [2, 3]
            .into_iter()
            .find(has_copy)
            .ok_or("no copy".to_string())
    };
    let copy_host = wait_for(TIMEOUT, find_copy).or_panic_with_logs(&vm);
    wait_for_kept_checkpoint(&vm, bed.host(copy_host), &format!("\"h{copy_host}\"]"));
    bed.set_connected(copy_host, false).expect("cut off");
    wait_until_daemon_ended(&vm, bed.host(copy_host));
    bed.set_connected(copy_host, true).expect("connected");
    let on_host = |arguments: &[&str]| {
        vm.run_pvm_on(bed.host(copy_host), arguments)
            .or_panic_with_logs(&vm)
    };
    let output = on_host(&["start"]);
    assert!(
        output.stderr.contains("If h1 is not down but only cut off")
            && output.stderr.contains("Restart it here:"),
        "{output:?}"
    );
    for options in [&[][..], &["--force"]] {
        let output = on_host(&[&["restart", "--newest"], options].concat());
        assert!(
            !output.succeeded()
                && output
                    .stderr
                    .contains("virtual machine pvm, which made the checkpoint, still runs")
                && output.stderr.contains("End it there first (on h"),
            "{output:?}"
        );
    }
    let output = on_host(&["--json", "restart", &checkpoint]);
    let value: Value = serde_json::from_str(&output.stdout).expect("JSON");
    assert!(
        value["failed"]
            .as_str()
            .is_some_and(|text| text.contains("still runs")),
        "{value}"
    );
    for host in bed
        .hosts()
        .iter()
        .filter(|host| host.name() != format!("h{copy_host}"))
    {
        host.kill_all_processes();
    }
    let output = on_host(&["restart", &checkpoint]);
    assert!(
        !output.succeeded()
            && output.stderr.contains("do not answer")
            && output.stderr.contains("it would run twice")
            && output.stderr.contains("use --force"),
        "{output:?}"
    );
    let output = on_host(&["restart", &checkpoint, "--force"]);
    assert!(output.succeeded(), "{output:?}");
    job.end_and_check(&vm);
    assert!(on_host(&["halt"]).succeeded());
    wait_until_daemon_ended(&vm, bed.host(copy_host));
}

/// The event of a lost host names the tasks that were lost with it. A halt names the host that
/// does not answer.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn lost_tasks_and_silent_hosts_are_named() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    let tid = vm
        .spawn_connected(&["-h3", "hold", "1"])
        .or_panic_with_logs(&vm);
    bed.host(3).kill_all_processes();
    let entry = vm.wait_for_event(TIMEOUT, "a lost host", |entry| {
        entry.text.starts_with("h3 (host 3) is gone: ")
    });
    let entry = entry.or_panic_with_logs(&vm);
    assert!(
        entry.text.ends_with(&format!("; lost with it: {tid} hold")),
        "{entry:?}"
    );

    let stopped_daemon = daemon_pid(bed.host(2)).expect("it runs");
    send_signal(stopped_daemon, Signal::SIGSTOP).expect("stopped");
    let output = vm.run_pvm(&["halt"]).or_panic_with_logs(&vm);
    assert!(
        !output.succeeded() && output.stderr.contains("these hosts did not answer: h2."),
        "{output:?}"
    );
    send_signal(stopped_daemon, Signal::SIGCONT).expect("continued");
    wait_until_daemon_ended(&vm, bed.host(2));
    assert_eq!(notes_on(&vm, bed.host(1), &["--all"]), [Value::Null; 0]);
}
