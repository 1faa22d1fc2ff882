//! Tests migrations of programs with several threads.

use super::fixture::{MigrationFixture, assert_survives};

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_mutex_that_is_held_and_waited_for_stays_so() {
    assert_survives("threads", "mutex");
}

/// Threads that wait for a condition variable are woken after the migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn condition_wakes_threads_after_migration() {
    assert_survives("threads", "condition");
}

/// Threads that wait at barriers, semaphores and read-write locks continue to wait after the
/// migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn barriers_and_locks_keep_their_waiters() {
    assert_survives("threads", "barriers");
}

/// Sixty-four computing threads keep their thread ids, names, signal masks and thread-local data.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sixty_four_threads_keep_their_state() {
    assert_survives("threads", "many");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn openmp_at_full_load_goes_on_computing() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile("gcc", &["-fopenmp"], "openmp.c");
    fixture.start_and_wait_until_ready(&program, &[], "load", "");
    fixture.migrate_there_and_back();
    assert_eq!(fixture.assert_ends_successfully(), "ready\nright\n");
}
