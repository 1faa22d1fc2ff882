//! Tests files and directories that a task has open.

use super::common::moving::{discard, dump, restore, stop};
use super::common::{migration, tid};
use super::scene::{Scene, assert_survives, assert_survives_on_other_host, start_other_host};
use sempa_proto::migration::{FileRequirement, Refusal};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_file_open_for_reading_keeps_its_position() {
    assert_survives("files", "reading");
}

/// A file open for reading and writing keeps its position, which the task shares with a child.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn read_write_file_keeps_position_with_child() {
    assert_survives("files", "read-write");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_small_deleted_file_travels_with_its_content() {
    assert_survives("files", "deleted-small");
}

/// A deleted file of some mebibytes keeps its content.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn large_deleted_file_keeps_its_content() {
    assert_survives("files", "deleted-large");
}

/// A file that never had a name keeps its content.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unnamed_file_keeps_its_content() {
    assert_survives("files", "unnamed");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_named_pipe_with_both_ends_inside_keeps_its_data() {
    assert_survives_on_other_host("files", "named-pipe", "mkfifo $data/fifo");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn open_directories_keep_their_position() {
    assert_survives("files", "directories");
}

/// After a migration the task uses the target's system files and null device.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn system_files_are_those_of_the_target() {
    assert_survives("files", "of-the-system");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_log_that_grew_meanwhile_is_appended_to() {
    let mut scene = Scene::begin();
    let program = scene.compile_c("files");
    scene.start(&program, &[], "appending", "");
    let log = scene.dir.path().join("log");
    assert_eq!(
        scene.fact("log").expect("it is open").requirement,
        FileRequirement::Exists
    );
    scene.migrate_while(&mut || {
        std::fs::File::options()
            .append(true)
            .open(&log)
            .expect("open")
            .write_all(b"meanwhile\n")
            .expect("write");
    });
    let dir = scene.dir.path().to_path_buf();
    std::fs::write(dir.join("go"), "").expect("write");
    let (_, status, _) = scene.target.wait_for_exit(tid(1));
    assert_eq!(status, 7 << 8);
    assert_eq!(
        std::fs::read_to_string(&log).expect("text"),
        "before\nmeanwhile\nafter\n"
    );
}

/// Asserts the target's reason for refusing an open file, after the shell command `prepare` has
/// changed the target's directory.
fn assert_refused_by_target(prepare: &str, expected: &str) {
    let mut scene = Scene::begin_with(|dir| start_other_host(dir, prepare));
    let program = scene.compile_c("files");
    scene.start(&program, &[], "held", "");
    let path = scene.dir.path().join("data/held");
    assert_eq!(
        scene.verdict(),
        [Refusal::File {
            path,
            why: expected.into()
        }]
    );
    assert_eq!(scene.assert_ends_successfully(), "ready\nright\n");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_open_file_that_the_target_lacks_is_named() {
    assert_refused_by_target("true", "it does not exist on the target");
}

/// If an open file has another length on the target, the refusal names the file.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn file_of_another_length_is_refused() {
    assert_refused_by_target(
        "printf other > $data/held",
        "it has 800 bytes at the source, 5 on the target",
    );
}

/// A file whose name was given to another file keeps its content.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn replaced_file_keeps_its_content() {
    assert_survives("files", "replaced");
}

/// A program whose file was removed while it runs migrates.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn removed_program_migrates() {
    assert_survives("files", "program-removed");
}

/// Returns the directory `data` of the target.
fn target_data_dir(scene: &Scene) -> PathBuf {
    let place = scene.dir.path().join("data");
    PathBuf::from(format!("/proc/{}/root", scene.target.child.id()))
        .join(place.strip_prefix("/").expect("absolute"))
}

/// Starts a task with an open file that the target lacks, and with this file policy.
fn start_with_file_policy(policy: &'static str, prepare: &str) -> Scene {
    let mut scene = Scene::begin_with(|dir| start_other_host(dir, prepare));
    scene.variable = Some(policy);
    let program = scene.compile_c("files");
    scene.start(&program, &[], "held", "");
    scene
}

/// With the policy `copy` an open file that the target lacks is transferred with the task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_file_is_carried_by_policy() {
    let mut scene = start_with_file_policy("SEMPA_FILES=copy", "true");
    let file = scene.dir.path().join("data/held");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o604)).expect("it is ours");
    assert_eq!(
        scene.fact("data/held").expect("it is open").requirement,
        FileRequirement::LengthOrCopied
    );
    let content = std::fs::read(&file).expect("there");
    scene.migrate_while(&mut || {});
    let there = target_data_dir(&scene).join("held");
    assert_eq!(std::fs::read(&there).expect("carried along"), content);
    assert_eq!(
        std::fs::metadata(&there)
            .expect("there")
            .permissions()
            .mode()
            & 0o7777,
        0o604
    );
    assert!(file.exists(), "and it is still here");
    std::fs::write(scene.dir.path().join("go"), "").expect("write");
    let (rest, status, _) = scene.target.wait_for_exit(tid(1));
    assert!(
        rest.ends_with(b"right\n") && status == 7 << 8,
        "{}",
        String::from_utf8_lossy(&rest)
    );
    assert!(there.exists(), "it is the task's own");
}

/// A transferred file is removed if the migration fails.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn carried_file_is_removed_after_a_failure() {
    let mut scene = start_with_file_policy("SEMPA_FILES=copy", "true");
    assert_eq!(scene.verdict(), []);
    let id = migration(1);
    let (images, mut seen) = (tempfile::tempdir().expect("dir"), Vec::new());
    let dir = images.path().join("images");
    stop(&mut scene.source, tid(1), id, &mut seen);
    dump(&mut scene.source, tid(1), id, &dir, &mut seen).expect("a dump");
    restore(&mut scene.target, tid(1), id, &dir).expect("a restore");
    let there = target_data_dir(&scene).join("held");
    assert!(there.exists());
    discard(&mut scene.target, id, &mut Vec::new());
    assert!(!there.exists());
    // The file is also removed if the restore fails.
    assert_eq!(scene.verdict(), []);
    std::fs::write(
        dir.join("inventory.img"),
        std::fs::read(dir.join("inventory.img"))
            .expect("there")
            .iter()
            .map(|b| !b)
            .collect::<Vec<u8>>(),
    )
    .expect("written");
    restore(&mut scene.target, tid(1), migration(2), &dir).expect_err("a broken image");
    assert!(!there.exists());
    super::common::moving::continue_task(&mut scene.source, tid(1), id, &mut seen);
    scene.assert_ends_successfully();
}

/// A transferred file never overwrites another file.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn carried_file_never_overwrites() {
    let mut scene = start_with_file_policy("SEMPA_FILES=copy", "printf other > $data/held");
    let path = scene.dir.path().join("data/held");
    let why = "it has 800 bytes at the source, 5 on the target".into();
    assert_eq!(scene.verdict(), [Refusal::File { path, why }]);
    scene.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_file_is_not_carried_where_its_folder_is_missing() {
    let mut scene = start_with_file_policy(
        "SEMPA_FILES=copy",
        "umount $data && mount -t tmpfs none ${data%/data}",
    );
    let verdict = scene.verdict();
    let held = |refusal: &Refusal| matches!(refusal, Refusal::File { path, why } if path.ends_with("data/held") && why.contains("cannot be carried there: its folder: "));
    assert!(verdict.iter().any(held), "{verdict:?}");
    scene.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_whose_policy_is_to_stay_with_its_files_is_refused() {
    let mut scene = start_with_file_policy("SEMPA_FILES=refuse", "true");
    let path = scene.dir.path().join("data/held");
    assert_eq!(scene.inspect(), Err(Refusal::OpenFilesRefused { path }));
    scene.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_policy_for_files_that_means_nothing_is_refused() {
    let mut scene = start_with_file_policy("SEMPA_FILES=all", "true");
    let what = "SEMPA_FILES=all, which is none of shared, copy and refuse".into();
    assert_eq!(scene.inspect(), Err(Refusal::UnsupportedResource { what }));
    scene.assert_ends_successfully();
}
