//! Tasks of an ordinary user that would migrate, or would not, if they were root's.

use super::common::migration_steps::{
    continue_and_wait, dump_and_wait, restore_and_wait, stop_and_wait,
};
use super::common::{migration_id, tid};
use super::fixture::MigrationFixture;
use super::refusals::assert_refused;
use sempa_proto::migration::Refusal;
use std::os::unix::fs::{PermissionsExt, chown};

/// Asserts that the inspection of the task finds something that cannot be read.
fn assert_unreadable(result: &Result<sempa_proto::migration::TaskFacts, Refusal>) {
    let is_environment = |refusal: &Refusal| matches!(refusal, Refusal::Unreadable { property, .. } if property == "its environment");
    assert!(result.as_ref().is_err_and(is_environment), "{result:?}");
}

/// A process that is not dumpable is refused: only root may read it.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn task_that_is_not_dumpable_is_refused() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("refused");
    fixture.start_and_wait_until_ready(&program, &[], "not-dumpable", "");
    assert_unreadable(&fixture.inspect());
    fixture.assert_ends_successfully();
}

/// A program that the user may execute and not read makes a process that is not dumpable.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn task_with_unreadable_program_is_refused() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("refused");
    chown(&program, Some(0), Some(0)).expect("root may do so");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o711)).expect("root's own");
    fixture.start_and_wait_until_ready(&program, &[], "packets", "");
    assert_unreadable(&fixture.inspect());
    fixture.assert_ends_successfully();
}

/// The removed program of another user is refused: its content is not the user's to carry.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn removed_program_of_another_user_is_refused() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("refused");
    chown(&program, Some(0), Some(0)).expect("root may do so");
    fixture.start_and_wait_until_ready(&program, &[], "confined", "");
    std::fs::remove_file(&program).expect("it is there");
    assert_eq!(fixture.query_verdict(), []);
    let (id, mut messages) = (migration_id(7), Vec::new());
    let images = fixture.dir.path().join("images");
    stop_and_wait(&mut fixture.source, tid(1), id, &mut messages);
    dump_and_wait(&mut fixture.source, tid(1), id, &images, &mut messages).expect("a dump");
    let failure = restore_and_wait(&mut fixture.target, tid(1), id, &images)
        .expect_err("a file of root")
        .to_string();
    assert!(failure.contains("would belong to user 0"), "{failure}");
    continue_and_wait(&mut fixture.source, tid(1), id, &mut messages);
    fixture.assert_ends_successfully();
}

/// A task that has confined itself migrates, and is not confined any more.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn confinement_of_a_task_is_forgotten() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("refused");
    fixture.start_and_wait_until_ready(&program, &[], "confined", "forgotten");
    fixture.migrate_there_and_back();
    fixture.assert_ends_successfully();
}

/// With a user namespace an ordinary user may make all other namespaces; the task is refused.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn user_namespace_of_a_task_is_refused() {
    assert_refused("own-users", "", "a user namespace of its own");
}
