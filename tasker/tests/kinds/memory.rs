//! Memory.

use super::scene::{Scene, becomes, survives};

#[test]
fn advice_locks_and_protection_of_memory_are_kept() {
    survives("memory", "advised");
}

#[test]
fn private_and_shared_file_mappings_keep_what_was_written() {
    survives("memory", "mapped");
}

#[test]
fn a_deep_stack_unwinds_and_grows() {
    survives("memory", "stack");
}

#[test]
fn the_heap_goes_on() {
    survives("memory", "heap");
}

#[test]
fn locale_time_zone_and_character_tables_stay_in_use() {
    survives("memory", "language");
}

#[test]
fn hundreds_of_mebibytes_move_and_untouched_pages_are_not_sent() {
    const MIB: u64 = 1 << 20;
    let Some(mut scene) = Scene::begin() else {
        return;
    };
    let program = scene.compile_c("memory");
    assert!(scene.start(&program, &[], "big", ""));
    let moved = scene.moves_there_and_back();
    // 300 MiB were written with numbers and 16 with zeros, 512 read and 4096 never looked at.
    assert!(
        (316 * MIB..326 * MIB).contains(&moved.image_bytes),
        "{moved:?}"
    );
    assert_eq!(scene.ends_right(), "ready\nright\n");
}

#[test]
fn a_lock_on_all_memory_to_come_is_forgotten() {
    becomes("memory", "locked-for-good", "forgotten");
}
