//! Checkpoints of which a byte was changed: they are refused, no host is lost, and a job that has
//! to roll back uses the checkpoint before them.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::require_testbed;
use sempa_tests::ring_job::RingJob;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of restarts of a damaged checkpoint. Each one gives up transfers to two hosts at once.
const RESTART_COUNT: usize = 40;
/// The byte of an image that is changed.
const DAMAGED_OFFSET: usize = 100;

fn image_path(vm: &Vm<'_>, checkpoint: &str, tid: &str) -> PathBuf {
    vm.user_home()
        .join(".local/state/sempa/checkpoints")
        .join(checkpoint)
        .join(tid)
}

fn change_byte(path: &PathBuf) {
    let mut bytes = fs::read(path).expect("readable");
    bytes[DAMAGED_OFFSET] ^= 1;
    fs::write(path, bytes).expect("writable");
}

/// Makes a checkpoint of a job and returns its name.
fn make_checkpoint(vm: &Vm<'_>, args: &[&str]) -> String {
    let values = vm
        .pvm_json(&[&["checkpoint"], args].concat())
        .or_panic_with_logs(vm);
    values[0]["set"].as_str().expect("a name").to_string()
}

/// Returns the tids of the job's tasks, the first task last.
fn job_tids(vm: &Vm<'_>, job: &RingJob) -> Vec<String> {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    let mut tids: Vec<String> = tasks
        .into_iter()
        .filter(|task| task.name == "ring_job")
        .map(|task| task.tid)
        .collect();
    tids.sort_by_key(|tid| *tid == job.tid);
    tids
}

/// A restart of a damaged checkpoint is refused and affects nothing else, however often it is
/// tried. With the byte restored, it succeeds.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn restarts_of_a_damaged_checkpoint_lose_no_host() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("hold").expect("gcc");
    let bystander = vm
        .spawn_connected(&["-h3", "hold", "1"])
        .or_panic_with_logs(&vm);
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    let tids = job_tids(&vm, &job);
    let checkpoint = make_checkpoint(&vm, &["--end", &job.tid]);
    tids.iter()
        .for_each(|tid| change_byte(&image_path(&vm, &checkpoint, tid)));
    for round in 0..RESTART_COUNT {
        let output = vm
            .run_pvm(&["restart", &checkpoint])
            .or_panic_with_logs(&vm);
        assert!(
            !output.succeeded() && output.stderr.contains("is not as it was written"),
            "{round}: {output:?}\n{}",
            vm.events_and_logs()
        );
    }
    assert_eq!(vm.host_names().or_panic_with_logs(&vm), ["h1", "h2", "h3"]);
    let has_bystander = vm
        .tasks()
        .or_panic_with_logs(&vm)
        .iter()
        .any(|task| task.tid == bystander);
    assert!(has_bystander, "{}", vm.events_and_logs());
    let list_output = vm.run_pvm(&["checkpoints"]).or_panic_with_logs(&vm);
    assert!(
        list_output
            .stdout
            .contains("it was damaged when it was last read"),
        "{list_output:?}"
    );
    tids.iter()
        .for_each(|tid| change_byte(&image_path(&vm, &checkpoint, tid)));
    let output = vm
        .run_pvm(&["restart", &checkpoint])
        .or_panic_with_logs(&vm);
    assert!(output.succeeded(), "{output:?}\n{}", vm.events_and_logs());
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}

/// A job that loses a host rolls back to the newest checkpoint that is intact.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn rollback_uses_the_checkpoint_before_a_damaged_one() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 10);
    // No other checkpoint is taken before the host is lost.
    let intact_checkpoint = make_checkpoint(&vm, &["--every", "1h", &job.tid]);
    job.wait_for_rounds(&vm, 10);
    let damaged_checkpoint = make_checkpoint(&vm, &[&job.tid]);
    let tids = job_tids(&vm, &job);
    change_byte(&image_path(&vm, &damaged_checkpoint, &tids[0]));
    bed.host(3).kill_all_processes();
    let damage_entry = vm
        .wait_for_event(TIMEOUT, "damaged checkpoint", |entry| {
            matches!(entry.kind, EventKind::CheckpointDamaged { .. })
        })
        .or_panic_with_logs(&vm);
    let EventKind::CheckpointDamaged {
        checkpoint,
        replacement,
        ..
    } = damage_entry.kind
    else {
        panic!("{damage_entry:?}")
    };
    assert_eq!(
        (checkpoint, replacement),
        (damaged_checkpoint, Some(intact_checkpoint.clone()))
    );
    vm.wait_for_event(TIMEOUT, "restart", |entry| {
        matches!(&entry.kind, EventKind::Restarted { checkpoint, .. } if *checkpoint == intact_checkpoint)
    })
    .or_panic_with_logs(&vm);
    // The other hosts were not lost by the attempt.
    assert_eq!(vm.host_names().or_panic_with_logs(&vm), ["h1", "h2"]);
    let wait_result = wait_for(TIMEOUT, || {
        let running_tids = job_tids(&vm, &job);
        if running_tids.len() == tids.len() {
            Ok(())
        } else {
            Err(format!("{running_tids:?}"))
        }
    });
    wait_result.or_panic_with_logs(&vm);
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}
