//! Tests migrations of programs that use memory in special ways.

use super::TASK_USER;
use super::fixture::{MigrationFixture, assert_prints_after_migration, assert_survives};

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn advice_locks_and_protection_of_memory_are_kept() {
    assert_survives("memory", "advised");
}

/// Private and shared mappings of files keep the data that was written to them.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn file_mappings_keep_what_was_written() {
    assert_survives("memory", "mapped");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_deep_stack_unwinds_and_grows() {
    assert_survives("memory", "stack");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn the_heap_goes_on() {
    assert_survives("memory", "heap");
}

/// The task continues to use its locale, time zone and character tables.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn locale_and_time_zone_stay_in_use() {
    assert_survives("memory", "language");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn guard_pages_stay_guard_pages() {
    assert_survives("memory", "guarded");
}

/// Memory that was sealed (mseal) keeps its content, but is not sealed any more.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn seals_of_memory_are_forgotten() {
    assert_prints_after_migration("memory", "sealed", "forgotten");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn droppable_memory_stays_droppable() {
    assert_prints_after_migration("memory", "droppable", "kept");
}

/// Hundreds of mebibytes migrate. Pages that were never written are not sent.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn untouched_pages_are_not_sent() {
    const MIB: u64 = 1 << 20;
    let mut fixture = MigrationFixture::new();
    let program = fixture.compile_c("memory");
    fixture.start_and_wait_until_ready(&program, &[], "big", "");
    let measurements = fixture.migrate_there_and_back();
    // 300 MiB contain numbers, and 16 MiB were overwritten with zeros; 512 MiB were only read, and
    // 4096 MiB were never touched. Sealed images contain no zeros.
    let sent_min = match TASK_USER {
        Some(_) => 300 * MIB,
        None => 316 * MIB,
    };
    assert!(
        (sent_min..326 * MIB).contains(&measurements.image_bytes),
        "{measurements:?}"
    );
    assert_eq!(fixture.assert_ends_successfully(), "ready\nright\n");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_lock_on_all_memory_to_come_is_forgotten() {
    assert_prints_after_migration("memory", "locked-for-good", "forgotten");
}
