//! Tests migrations of programs with several threads.

use super::scene::{Scene, assert_survives};

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_mutex_that_is_held_and_waited_for_stays_so() {
    assert_survives("threads", "mutex");
}

/// Threads that wait for a condition are woken after the migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn condition_wakes_threads_after_migration() {
    assert_survives("threads", "condition");
}

/// Threads that wait at barriers, semaphores and read-write locks still wait after the migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn barriers_and_locks_keep_their_waiters() {
    assert_survives("threads", "barriers");
}

/// Sixty-four computing threads keep their numbers, names, signal masks and thread-local data.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sixty_four_threads_keep_their_state() {
    assert_survives("threads", "many");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn openmp_at_full_load_goes_on_computing() {
    let mut scene = Scene::begin();
    let program = scene.compile("gcc", &["-fopenmp"], "openmp.c");
    scene.start(&program, &[], "load", "");
    scene.migrate_there_and_back();
    assert_eq!(scene.assert_ends_successfully(), "ready\nright\n");
}
