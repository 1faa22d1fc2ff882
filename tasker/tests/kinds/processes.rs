//! Processes of a task and what each has of its own.

use super::scene::{Scene, becomes, survives};

#[test]
fn children_move_with_it_with_data_on_its_way_in_pipes_both_ways() {
    survives("processes", "children");
}

#[test]
fn a_child_that_has_ended_can_still_be_waited_for() {
    survives("processes", "zombie");
}

#[test]
fn a_child_that_was_stopped_stays_stopped() {
    survives("processes", "stopped");
}

#[test]
fn sessions_groups_and_parents_stay_and_new_processes_can_be_made() {
    survives("processes", "family");
}

#[test]
fn memory_that_parent_and_child_share_stays_shared_with_its_locks() {
    survives("processes", "shared-memory");
}

#[test]
fn a_memfd_that_parent_and_child_share_stays_shared() {
    survives("processes", "shared-memory-file");
}

#[test]
fn working_directory_umask_limits_nice_environment_and_the_like_are_kept() {
    survives("processes", "surroundings");
}

#[test]
fn groups_and_dumpability_are_kept() {
    survives("processes", "groups");
}

#[test]
fn a_seccomp_filter_is_kept() {
    survives("processes", "filtered");
}

#[test]
fn the_scheduling_policy_is_kept() {
    survives("processes", "batch");
}

#[test]
fn no_line_of_output_or_errors_is_lost_or_doubled_through_the_new_tasker() {
    let Some(mut scene) = Scene::begin() else {
        return;
    };
    let program = scene.compile_c("processes");
    assert!(scene.start(&program, &[], "output", ""));
    scene.moves_there_and_back();
    let said = scene.ends_right();
    let numbers = said
        .strip_suffix("half a line\nright\n")
        .expect("what stood in the buffer comes at the end");
    let numbers: Vec<&str> = numbers.lines().filter(|line| *line != "ready").collect();
    assert!(numbers.len() >= 500);
    for (expected, line) in numbers.iter().enumerate() {
        assert_eq!(*line, expected.to_string());
    }
}

#[test]
fn a_processor_that_it_was_bound_to_is_let_go() {
    becomes("processes", "bound", "free");
}

#[test]
fn addresses_that_were_not_to_be_random_are_for_new_programs_again() {
    becomes("processes", "random-addresses", "as usual");
}
