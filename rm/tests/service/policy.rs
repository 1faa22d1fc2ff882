//! Use of the policy file when a resource manager is restarted.

use crate::common::{FakeVm, TestBed, fake_vm, rm_tid};
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

/// Starts a resource manager with this policy file. `content`: content of the file. `wait_s`:
/// waiting time of spawns on the command line, in seconds.
fn start_rm(
    vm: &FakeVm,
    dir: &Path,
    file_name: &str,
    content: FileContent,
    wait_s: u64,
) -> Result<TestBed, ServiceError> {
    vm.0.borrow_mut().clear_inbox();
    vm.0.borrow_mut().recorded_events.clear();
    let command_line_policy = EffectivePolicy {
        spawn_rules: SpawnRules {
            wait_max: Micros::from_secs(wait_s),
            ..SpawnRules::default()
        },
        ..EffectivePolicy::default()
    };
    let policy_content = Some(
        content
            .map(|text| text.as_bytes().to_vec())
            .map_err(str::to_string),
    );
    let options = Options {
        policy: command_line_policy,
        command_line_policy,
        policy_file: file_name.into(),
        policy_content,
        ..options_with_history(dir)
    };
    TestBed::try_start_with(vm, options)
}

/// Kills the resource manager after it has written its history. Returns the limit on tasks per user
/// before the kill; `None` if there was no limit.
fn kill_and_get_user_limit(mut bed: TestBed) -> Option<u32> {
    bed.advance(Micros::from_secs(1));
    bed.service.policy().spawn_rules.task_limits.user_tasks_max
}

/// A policy file that has become invalid or that is missing does not prevent a restart. The last
/// valid content applies.
#[test]
fn invalid_policy_file_does_not_prevent_restart() {
    let (dir, vm) = (tempfile::tempdir().expect("a directory"), fake_vm(1));
    let restart = |content| start_rm(&vm, dir.path(), "rm.toml", content, 5).expect("it begins");
    assert_eq!(
        kill_and_get_user_limit(restart(Ok("user_tasks = 2\n"))),
        Some(2)
    );
    for (content, expected_note) in [
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
        let bed = restart(content);
        let notes = bed.state().recorded_notes();
        let is_expected_note = |note: &&String| {
            note.starts_with(expected_note) && note.ends_with("and the policy is unchanged")
        };
        assert_eq!(
            notes.iter().filter(is_expected_note).count(),
            1,
            "{notes:?}"
        );
        assert_eq!(kill_and_get_user_limit(bed), Some(2), "{expected_note}");
    }
    // The history stores the last valid change of the file. At the next start, the options of the
    // command line may differ.
    let mut bed = restart(Ok("user_tasks = 2\n"));
    bed.state().post_message(
        rm_tid(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 7\n"),
    );
    bed.state().post_message(
        rm_tid(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = many\n"),
    );
    bed.process_inbox();
    assert_eq!(kill_and_get_user_limit(bed), Some(7));
    let bed =
        start_rm(&vm, dir.path(), "rm.toml", Ok("user_tasks = many\n"), 9).expect("it begins");
    assert_eq!(
        bed.service.policy().spawn_rules.wait_max,
        Micros::from_secs(9)
    );
    assert_eq!(kill_and_get_user_limit(bed), Some(7));
}

/// If no valid content of the policy file is stored, an invalid file prevents the start.
#[test]
fn new_policy_file_must_be_valid() {
    let (dir, vm) = (tempfile::tempdir().expect("a directory"), fake_vm(1));
    let start_error = |file, content| {
        start_rm(&vm, dir.path(), file, content, 0)
            .map(|_| ())
            .expect_err("it is wrong")
            .to_string()
    };
    let expected_error = "rm.toml, line 1: unknown field `user_task`";
    assert!(start_error("rm.toml", Ok("user_task = 3\n")).starts_with(expected_error));
    assert_eq!(
        kill_and_get_user_limit(
            start_rm(&vm, dir.path(), "rm.toml", Ok("user_tasks = 2\n"), 0).expect("it begins")
        ),
        Some(2)
    );
    let other_file_error = "other.toml, line 1: unknown field `user_task`";
    assert!(
        start_error("other.toml", Ok("user_task = 3\n")).starts_with(other_file_error),
        "another file was in force"
    );
    assert!(
        start_error("laod", Err("No such file"))
            .starts_with("\"laod\" is neither 'load' nor 'round-robin'")
    );
    assert!(
        start_error("other.toml", Ok("placing = \"choice:slurm\"\n"))
            .contains("the chooser \"slurm\"")
    );
}
