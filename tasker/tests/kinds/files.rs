//! Tests files and directories that a task has open.

use super::TASK_USER;
use super::common::migration_steps::{
    continue_and_wait, discard_and_wait, dump_and_wait, restore_and_wait, stop_and_wait,
};
use super::common::{migration_id, tid, user_dir};
use super::fixture::{
    MigrationFixture, assert_survives, assert_survives_on_other_host, start_other_host,
};
use sempa_proto::migration::{Failure, FileRequirement, Refusal};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_file_open_for_reading_keeps_its_position() {
    assert_survives("files", "reading");
}

/// A file open for reading and writing keeps its position. The task shares the position with a
/// child.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn read_write_file_keeps_position_with_child() {
    assert_survives("files", "read-write");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_small_deleted_file_travels_with_its_content() {
    assert_survives("files", "deleted-small");
}

/// A deleted file of some mebibytes keeps its content.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn large_deleted_file_keeps_its_content() {
    assert_survives("files", "deleted-large");
}

/// A file that never had a name keeps its content.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unnamed_file_keeps_its_content() {
    assert_survives("files", "unnamed");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_named_pipe_with_both_ends_inside_keeps_its_data() {
    assert_survives_on_other_host("files", "named-pipe", "mkfifo -m 666 $data/fifo");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn open_directories_keep_their_position() {
    assert_survives("files", "directories");
}

/// After a migration the task uses the system files and the null device of the target.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn system_files_are_those_of_the_target() {
    assert_survives("files", "of-the-system");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_log_that_grew_meanwhile_is_appended_to() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("files");
    fixture.start_and_wait_until_ready(&program, &[], "appending", "");
    let log = fixture.dir.path().join("log");
    assert_eq!(
        fixture
            .file_requirement("log")
            .expect("it is open")
            .requirement,
        FileRequirement::Exists
    );
    fixture.migrate_while(&mut || {
        std::fs::File::options()
            .append(true)
            .open(&log)
            .expect("open")
            .write_all(b"meanwhile\n")
            .expect("write");
    });
    let dir = fixture.dir.path().to_path_buf();
    std::fs::write(dir.join("go"), "").expect("write");
    let (_, status, _) = fixture.target.wait_for_exit(tid(1));
    assert_eq!(status, 7 << 8);
    assert_eq!(
        std::fs::read_to_string(&log).expect("text"),
        "before\nmeanwhile\nafter\n"
    );
}

/// Asserts that the target refuses the task because of its open file, for the reason `expected`.
/// The shell command `prepare` first changes the directory `data` of the target.
fn assert_refused_by_target(prepare: &str, expected: &str) {
    let mut fixture = MigrationFixture::with_target(|dir| start_other_host(dir, prepare));
    let program = fixture.compile_c("files");
    fixture.start_and_wait_until_ready(&program, &[], "held", "");
    let path = fixture.dir.path().join("data/held");
    assert_eq!(
        fixture.query_verdict(),
        [Refusal::File {
            path,
            why: expected.into()
        }]
    );
    assert_eq!(fixture.assert_ends_successfully(), "ready\nright\n");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_open_file_that_the_target_lacks_is_named() {
    assert_refused_by_target("true", "it does not exist on the target");
}

/// If an open file has another length on the target, the refusal names the file.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn file_of_another_length_is_refused() {
    assert_refused_by_target(
        "printf other > $data/held",
        "it has 800 bytes at the source, 5 on the target",
    );
}

/// An open file keeps its content, even if its name now belongs to another file.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn replaced_file_keeps_its_content() {
    assert_survives("files", "replaced");
}

/// A task migrates, although the file of its program was removed.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn removed_program_migrates() {
    assert_survives("files", "program-removed");
}

/// Returns the path of the target's directory `data`, as the test can access it.
fn target_data_dir(fixture: &MigrationFixture) -> PathBuf {
    let data_dir = fixture.dir.path().join("data");
    PathBuf::from(format!("/proc/{}/root", fixture.target.child.id()))
        .join(data_dir.strip_prefix("/").expect("absolute"))
}

/// Starts a task with an open file that the target lacks. `policy_variable` is the task's variable
/// for its file policy.
fn start_with_file_policy(policy_variable: &'static str, prepare: &str) -> MigrationFixture {
    let mut fixture = MigrationFixture::with_target(|dir| start_other_host(dir, prepare));
    fixture.task_variable = Some(policy_variable);
    let program = fixture.compile_c("files");
    fixture.start_and_wait_until_ready(&program, &[], "held", "");
    fixture
}

/// With the policy `copy`, an open file that the target lacks is transferred with the task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_file_is_carried_by_policy() {
    let mut fixture = start_with_file_policy("SEMPA_FILES=copy", "true");
    let file = fixture.dir.path().join("data/held");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o604)).expect("it is ours");
    assert_eq!(
        fixture
            .file_requirement("data/held")
            .expect("it is open")
            .requirement,
        FileRequirement::LengthOrCopy
    );
    let content = std::fs::read(&file).expect("there");
    fixture.migrate_while(&mut || {});
    let target_file = target_data_dir(&fixture).join("held");
    assert_eq!(std::fs::read(&target_file).expect("carried along"), content);
    assert_eq!(
        std::fs::metadata(&target_file)
            .expect("there")
            .permissions()
            .mode()
            & 0o7777,
        0o604
    );
    assert!(file.exists(), "and it is still here");
    std::fs::write(fixture.dir.path().join("go"), "").expect("write");
    let (last_output, status, _) = fixture.target.wait_for_exit(tid(1));
    assert!(
        last_output.ends_with(b"right\n") && status == 7 << 8,
        "{}",
        String::from_utf8_lossy(&last_output)
    );
    assert!(target_file.exists(), "it is the task's own");
}

/// The target removes a transferred file if the migration fails.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn carried_file_is_removed_after_a_failure() {
    let mut fixture = start_with_file_policy("SEMPA_FILES=copy", "true");
    assert_eq!(fixture.query_verdict(), []);
    let id = migration_id(1);
    let (images, mut messages) = (user_dir(TASK_USER), Vec::new());
    let dir = images.path().join("images");
    stop_and_wait(&mut fixture.source, tid(1), id, &mut messages);
    dump_and_wait(&mut fixture.source, tid(1), id, &dir, &mut messages).expect("a dump");
    restore_and_wait(&mut fixture.target, tid(1), id, &dir).expect("a restore");
    let target_file = target_data_dir(&fixture).join("held");
    assert!(target_file.exists());
    discard_and_wait(&mut fixture.target, id, &mut Vec::new());
    assert!(!target_file.exists());
    // The file is also removed if the restore fails.
    assert_eq!(fixture.query_verdict(), []);
    let image = dir.join(match TASK_USER {
        Some(_) => "sealed-images",
        None => "inventory.img",
    });
    std::fs::write(
        &image,
        std::fs::read(&image)
            .expect("there")
            .iter()
            .map(|b| !b)
            .collect::<Vec<u8>>(),
    )
    .expect("written");
    restore_and_wait(&mut fixture.target, tid(1), migration_id(2), &dir)
        .expect_err("a broken image");
    assert!(!target_file.exists());
    continue_and_wait(&mut fixture.source, tid(1), id, &mut messages);
    fixture.assert_ends_successfully();
}

/// If the target lacks a file although it has accepted the task, because the task has opened it
/// later, the failure names the file, and the task continues at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn file_opened_after_the_check_is_named() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("files");
    fixture.start_and_wait_until_ready(&program, &[], "held", "");
    let (id, mut messages) = (migration_id(1), Vec::new());
    let dir = fixture.dir.path().join("images");
    stop_and_wait(&mut fixture.source, tid(1), id, &mut messages);
    dump_and_wait(&mut fixture.source, tid(1), id, &dir, &mut messages).expect("a dump");
    let path = fixture.dir.path().join("data/held");
    let hidden_path = fixture.dir.path().join("hidden");
    std::fs::rename(&path, &hidden_path).expect("the test's own file");
    let failure = restore_and_wait(&mut fixture.target, tid(1), id, &dir);
    match failure.expect_err("a file is missing") {
        Failure::Refused(verdict) => assert!(
            matches!(&verdict[..], [Refusal::File { path: named_path, why }]
                if *named_path == path && why.starts_with("it does not exist on the target; ")),
            "{verdict:?}"
        ),
        other => panic!("{other:?}"),
    }
    std::fs::rename(&hidden_path, &path).expect("the test's own file");
    continue_and_wait(&mut fixture.source, tid(1), id, &mut messages);
    fixture.assert_ends_successfully();
}

/// A transferred file never overwrites an existing file: the target refuses the task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn carried_file_never_overwrites() {
    let mut fixture = start_with_file_policy("SEMPA_FILES=copy", "printf other > $data/held");
    let path = fixture.dir.path().join("data/held");
    let why = "it has 800 bytes at the source, 5 on the target".into();
    assert_eq!(fixture.query_verdict(), [Refusal::File { path, why }]);
    fixture.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_file_is_not_carried_where_its_folder_is_missing() {
    let mut fixture = start_with_file_policy(
        "SEMPA_FILES=copy",
        "umount $data && mount -t tmpfs none ${data%/data}",
    );
    let verdict = fixture.query_verdict();
    let is_directory_refusal = |refusal: &Refusal| matches!(refusal, Refusal::File { path, why } if path.ends_with("data/held") && why.contains("cannot be copied there: its directory: "));
    assert!(verdict.iter().any(is_directory_refusal), "{verdict:?}");
    fixture.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_whose_policy_is_to_stay_with_its_files_is_refused() {
    let mut fixture = start_with_file_policy("SEMPA_FILES=refuse", "true");
    let path = fixture.dir.path().join("data/held");
    assert_eq!(fixture.inspect(), Err(Refusal::OpenFilesRefused { path }));
    fixture.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_policy_for_files_that_means_nothing_is_refused() {
    let mut fixture = start_with_file_policy("SEMPA_FILES=all", "true");
    let what = "SEMPA_FILES=all, which is not one of shared, copy and refuse".into();
    assert_eq!(
        fixture.inspect(),
        Err(Refusal::UnsupportedResource { what })
    );
    fixture.assert_ends_successfully();
}
