//! Files and directories.

use super::common::tid;
use super::scene::{Scene, other_host, survives, survives_elsewhere};
use sempa_proto::migration::{FileMatch, Refusal};
use std::io::Write;

#[test]
fn a_file_open_for_reading_keeps_its_position() {
    survives("files", "reading");
}

#[test]
fn a_file_open_for_reading_and_writing_keeps_its_position_also_with_a_child() {
    survives("files", "read-write");
}

#[test]
fn a_small_deleted_file_travels_with_its_content() {
    survives("files", "deleted-small");
}

#[test]
fn a_deleted_file_of_some_mebibytes_travels_with_its_content() {
    survives("files", "deleted-large");
}

#[test]
fn a_file_that_never_had_a_name_travels_with_its_content() {
    survives("files", "unnamed");
}

#[test]
fn a_named_pipe_with_both_ends_inside_keeps_its_data() {
    survives_elsewhere("files", "named-pipe", "mkfifo $data/fifo");
}

#[test]
fn open_directories_keep_their_position() {
    survives("files", "directories");
}

#[test]
fn files_of_the_system_and_the_null_device_are_those_of_the_new_host() {
    survives("files", "of-the-system");
}

#[test]
fn a_log_that_grew_meanwhile_is_appended_to() {
    let Some(mut scene) = Scene::begin() else { return };
    let program = scene.compile_c("files");
    assert!(scene.start(&program, &[], "appending", ""));
    let log = scene.dir.path().join("log");
    assert_eq!(scene.fact("log").expect("it is open").must, FileMatch::Exists);
    scene.moves_while(&mut || {
        std::fs::File::options().append(true).open(&log).expect("open").write_all(b"meanwhile\n").expect("write");
    });
    let dir = scene.dir.path().to_path_buf();
    std::fs::write(dir.join("go"), "").expect("write");
    let (_, status, _) = scene.there.follow_to_the_end(tid(1));
    assert_eq!(status, 7 << 8);
    assert_eq!(std::fs::read_to_string(&log).expect("text"), "before\nmeanwhile\nafter\n");
}

/// What the target says, after this preparation of its own folder.
fn is_refused_at_the_target(prepare: &str, expected: &str) {
    let Some(mut scene) = Scene::begin_with(|dir| other_host(dir, prepare)) else { return };
    let program = scene.compile_c("files");
    assert!(scene.start(&program, &[], "held", ""));
    let path = scene.dir.path().join("data/held");
    assert_eq!(scene.verdict(), [Refusal::File { path, why: expected.into() }]);
    assert_eq!(scene.ends_right(), "ready\nright\n");
}

#[test]
fn an_open_file_that_the_target_lacks_is_named() {
    is_refused_at_the_target("true", "it does not exist on the target");
}

#[test]
fn an_open_file_of_another_length_on_the_target_is_named() {
    is_refused_at_the_target("printf other > $data/held", "it has 800 bytes at the source, 5 on the target");
}

#[test]
fn a_file_whose_name_another_one_has_taken_travels_with_its_content() {
    survives("files", "replaced");
}

#[test]
fn a_program_whose_file_was_removed_while_it_ran_moves() {
    survives("files", "program-removed");
}
