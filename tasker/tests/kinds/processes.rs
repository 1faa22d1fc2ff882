//! Tests the processes of a task and their attributes.

use super::fixture::{MigrationFixture, assert_prints_after_migration, assert_survives};

/// Children migrate with the task. Data in the pipes between them is kept in both directions.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn children_migrate_with_data_in_pipes() {
    assert_survives("processes", "children");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_child_that_has_ended_can_still_be_waited_for() {
    assert_survives("processes", "zombie");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_child_that_was_stopped_stays_stopped() {
    assert_survives("processes", "stopped");
}

/// Sessions, process groups and parents are kept. After the migration the task can fork again.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn sessions_groups_and_parents_stay() {
    assert_survives("processes", "family");
}

/// Memory that parent and child share remains shared, and so do the locks in it.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn shared_memory_keeps_sharing_and_locks() {
    assert_survives("processes", "shared-memory");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_memfd_that_parent_and_child_share_stays_shared() {
    assert_survives("processes", "shared-memory-file");
}

/// Working directory, umask, limits, niceness and environment are kept.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn process_attributes_are_kept() {
    assert_survives("processes", "surroundings");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_seccomp_filter_is_kept() {
    assert_survives("processes", "filtered");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn the_scheduling_policy_is_kept() {
    assert_survives("processes", "batch");
}

/// No line of output is lost or duplicated when the task migrates to another tasker.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn output_is_complete_through_the_new_tasker() {
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("processes");
    fixture.start_and_wait_until_ready(&program, &[], "output", "");
    fixture.migrate_there_and_back();
    let output = fixture.assert_ends_successfully();
    let number_lines = output
        .strip_suffix("half a line\nright\n")
        .expect("what stood in the buffer comes at the end");
    let number_lines: Vec<&str> = number_lines
        .lines()
        .filter(|line| *line != "ready")
        .collect();
    assert!(number_lines.len() >= 500);
    for (expected_number, line) in number_lines.iter().enumerate() {
        assert_eq!(*line, expected_number.to_string());
    }
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_processor_that_it_was_bound_to_is_let_go() {
    assert_prints_after_migration("processes", "bound", "free");
}

/// The personality flag for fixed addresses is lost: programs that the task starts get random
/// addresses.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn fixed_addresses_are_forgotten() {
    assert_prints_after_migration("processes", "random-addresses", "as usual");
}

/// Core dumps contain the same memory as before, timers have the same slack, and the session has
/// the same share of the processors.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn settings_outside_of_images_are_kept() {
    assert_survives("processes", "settings");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn denial_of_writable_code_is_forgotten() {
    assert_prints_after_migration("processes", "write-or-execute", "forgotten");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn policy_for_memory_errors_is_forgotten() {
    assert_prints_after_migration("processes", "memory-errors", "forgotten");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn child_may_share_the_table_of_descriptors() {
    assert_survives("processes", "shared-descriptors");
}
