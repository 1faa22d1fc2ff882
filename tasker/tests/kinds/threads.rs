//! Threads.

use super::scene::{Scene, survives};

#[test]
fn a_mutex_that_is_held_and_waited_for_stays_so() {
    survives("threads", "mutex");
}

#[test]
fn threads_that_wait_for_a_condition_hear_of_it_after_the_move() {
    survives("threads", "condition");
}

#[test]
fn barriers_semaphores_and_read_write_locks_keep_those_who_wait() {
    survives("threads", "barriers");
}

#[test]
fn sixty_four_computing_threads_keep_numbers_names_signal_masks_and_what_is_their_own() {
    survives("threads", "many");
}

#[test]
fn openmp_at_full_load_goes_on_computing() {
    let Some(mut scene) = Scene::begin() else {
        return;
    };
    let program = scene.compile("gcc", &["-fopenmp"], "openmp.c");
    assert!(scene.start(&program, &[], "load", ""));
    scene.moves_there_and_back();
    assert_eq!(scene.ends_right(), "ready\nright\n");
}
