//! The policy file when a resource manager is restarted.

use crate::common::{FakeVm, TestBed, rm_tid as own, world};
use crate::options_with_history;
use bytes::Bytes;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::{Options, ServiceError, TAG_POLICY};
use pvm_rm::spawns::SpawnRules;
use sempa_proto::Micros;
use sempa_proto::rm::CTX_RM;
use std::path::Path;

/// The content of the policy file at a start, or the error that occurred while it was read.
type FileContent = Result<&'static str, &'static str>;

/// Starts a resource manager with this policy file. `wait`: waiting time of spawns on the
/// command line, in seconds.
fn start(
    vm: &FakeVm,
    dir: &Path,
    file: &str,
    found: FileContent,
    wait: u64,
) -> Result<TestBed, ServiceError> {
    vm.0.borrow_mut().clear_inbox();
    vm.0.borrow_mut().records.clear();
    let given = EffectivePolicy {
        rules: SpawnRules {
            wait: Micros::from_secs(wait),
            ..SpawnRules::default()
        },
        ..EffectivePolicy::default()
    };
    let policy_read = Some(
        found
            .map(|text| text.as_bytes().to_vec())
            .map_err(str::to_string),
    );
    let options = Options {
        policy: given,
        command_line_policy: given,
        policy_file: file.into(),
        policy_content: policy_read,
        ..options_with_history(dir)
    };
    TestBed::with(vm, options)
}

/// Kills the resource manager after it has written its history. Returns the limit on tasks per user
/// that was in force.
fn kill(mut bed: TestBed) -> Option<u32> {
    bed.advance(Micros::from_secs(1));
    bed.service.policy().rules.limits.user_tasks
}

/// A policy file that has become invalid or is missing does not prevent a restart; the last valid
/// content applies.
#[test]
fn invalid_policy_file_does_not_prevent_restart() {
    let (dir, vm) = (tempfile::tempdir().expect("a directory"), world(1));
    let again = |found| start(&vm, dir.path(), "rm.toml", found, 5).expect("it begins");
    assert_eq!(kill(again(Ok("user_tasks = 2\n"))), Some(2));
    for (found, said) in [
        (
            Ok("user_tasks = 3\nuser_task = 3\n"),
            "rm.toml, line 2: unknown field `user_task`",
        ),
        (
            Ok("placing = \"choice:slurm\"\n"),
            "rm.toml: the policy names the chooser \"slurm\"",
        ),
        (
            Err("No such file or directory"),
            "rm.toml cannot be read: No such file or directory",
        ),
    ] {
        let bed = again(found);
        let notes = bed.world().notes();
        let told = |note: &&String| {
            note.starts_with(said) && note.ends_with("and the policy is unchanged")
        };
        assert_eq!(notes.iter().filter(told).count(), 1, "{notes:?}");
        assert_eq!(kill(bed), Some(2), "{said}");
    }
    // The history stores a change of the file while the resource manager runs. The command line may
    // differ at the next start.
    let mut bed = again(Ok("user_tasks = 2\n"));
    bed.world().post(
        own(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 7\n"),
    );
    bed.world().post(
        own(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = many\n"),
    );
    bed.settle();
    assert_eq!(kill(bed), Some(7));
    let bed = start(&vm, dir.path(), "rm.toml", Ok("user_tasks = many\n"), 9).expect("it begins");
    assert_eq!(bed.service.policy().rules.wait, Micros::from_secs(9));
    assert_eq!(kill(bed), Some(7));
}

/// If no valid content of the policy file is stored, an invalid file prevents the start.
#[test]
fn new_policy_file_must_be_valid() {
    let (dir, vm) = (tempfile::tempdir().expect("a directory"), world(1));
    let refused = |file, found| {
        start(&vm, dir.path(), file, found, 0)
            .map(|_| ())
            .expect_err("it is wrong")
            .to_string()
    };
    let line = "rm.toml, line 1: unknown field `user_task`";
    assert!(refused("rm.toml", Ok("user_task = 3\n")).starts_with(line));
    assert_eq!(
        kill(start(&vm, dir.path(), "rm.toml", Ok("user_tasks = 2\n"), 0).expect("it begins")),
        Some(2)
    );
    let other = "other.toml, line 1: unknown field `user_task`";
    assert!(
        refused("other.toml", Ok("user_task = 3\n")).starts_with(other),
        "another file was in force"
    );
    assert!(
        refused("laod", Err("No such file"))
            .starts_with("\"laod\" is neither 'load' nor 'round-robin'")
    );
    assert!(
        refused("other.toml", Ok("placing = \"choice:slurm\"\n")).contains("the chooser \"slurm\"")
    );
}
