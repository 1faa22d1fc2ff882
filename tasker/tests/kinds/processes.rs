//! Tests the processes of a task and their attributes.

use super::scene::{Scene, becomes, survives};

/// Children migrate with the task, with data in the pipes in both directions.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn children_migrate_with_data_in_pipes() {
    survives("processes", "children");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_child_that_has_ended_can_still_be_waited_for() {
    survives("processes", "zombie");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_child_that_was_stopped_stays_stopped() {
    survives("processes", "stopped");
}

/// Sessions, process groups and parents are kept, and the task can fork again.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sessions_groups_and_parents_stay() {
    survives("processes", "family");
}

/// Memory that parent and child share remains shared, with its locks.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn shared_memory_keeps_sharing_and_locks() {
    survives("processes", "shared-memory");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_memfd_that_parent_and_child_share_stays_shared() {
    survives("processes", "shared-memory-file");
}

/// Working directory, umask, limits, niceness and environment are kept.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn process_attributes_are_kept() {
    survives("processes", "surroundings");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn groups_and_dumpability_are_kept() {
    survives("processes", "groups");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_seccomp_filter_is_kept() {
    survives("processes", "filtered");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn the_scheduling_policy_is_kept() {
    survives("processes", "batch");
}

/// No line of standard output or standard error is lost or duplicated when the task migrates to
/// another tasker.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn output_is_complete_through_the_new_tasker() {
    let mut scene = Scene::begin();
    let program = scene.compile_c("processes");
    scene.start(&program, &[], "output", "");
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
#[ignore = "system tier: needs CRIU and gcc"]
fn a_processor_that_it_was_bound_to_is_let_go() {
    becomes("processes", "bound", "free");
}

/// The personality flag for fixed addresses is lost: programs that the task starts get random
/// addresses.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn fixed_addresses_are_forgotten() {
    becomes("processes", "random-addresses", "as usual");
}
