//! What users cannot do with images: their daemons transport sealed images, and own the file system
//! in which root's engine restores their tasks.

mod common;

use common::migration_steps::*;
use common::{Tasker, migration_id, tid, user_dir};
use sempa_proto::migration::{Failure, Refusal};
use sempa_proto::tasker::FromTasker;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Two ordinary users with accounts on every machine.
const NOBODY: u32 = 65_534;
const DAEMON: u32 = 1;
const SEALED_FILE: &str = "sealed-images";

/// A task of a user that is stopped and dumped, and a tasker for its restore.
struct DumpedTask {
    source: Tasker,
    target: Tasker,
    /// Belongs to the user, and contains the program, the task's files and the images.
    dir: tempfile::TempDir,
    output: Vec<u8>,
}

impl DumpedTask {
    /// Starts `program` with the argument `row`, as the fixtures of the kinds of tasks do, and
    /// dumps the process.
    fn new(program_name: &str, row: &str) -> Self {
        require_migration();
        let dir = user_dir(Some(NOBODY));
        let program = compile_kind(dir.path(), program_name);
        let mut source = Tasker::start_for_user(NOBODY);
        let dir_text = dir.path().to_str().expect("text");
        source.start_task_and_wait(tid(1), &program, &[row, dir_text, ""]);
        let mut output = Vec::new();
        source.wait_for_output(tid(1), &mut output, |text| text.ends_with(b"ready\n"));
        let (id, mut messages) = (migration_id(1), Vec::new());
        stop_and_wait(&mut source, tid(1), id, &mut messages);
        let images = dir.path().join("images");
        dump_and_wait(&mut source, tid(1), id, &images, &mut messages).expect("a dump");
        Self {
            source,
            target: Tasker::start_for_user(NOBODY),
            dir,
            output,
        }
    }

    fn images(&self) -> PathBuf {
        self.dir.path().join("images")
    }

    fn sealed_file(&self) -> PathBuf {
        self.images().join(SEALED_FILE)
    }

    /// Tries a restore. Returns the failure.
    fn restore_failure(&mut self) -> Failure {
        let images = self.images();
        restore_and_wait(&mut self.target, tid(1), migration_id(2), &images)
            .expect_err("it must be refused")
    }

    /// Asserts that the task still goes on at the source.
    fn assert_continues(mut self) {
        let mut messages = Vec::new();
        continue_and_wait(&mut self.source, tid(1), migration_id(1), &mut messages);
        self.output.extend(output_of(&messages, tid(1)));
        assert!(
            !messages
                .iter()
                .any(|m| matches!(m, FromTasker::Exited { .. }))
        );
        self.source.stop_and_wait();
        self.target.stop_and_wait();
    }
}

/// Compiles a program of the kinds of tasks, and makes the directory of its files.
fn compile_kind(dir: &Path, name: &str) -> PathBuf {
    let data_dir = dir.join("data");
    fs::create_dir(dir.join("kinds")).expect("the test's own directory");
    let program = compile_program(dir, &format!("kinds/{name}"));
    fs::create_dir(&data_dir).expect("the test's own directory");
    for path in [&program, &data_dir] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).expect("root may do so");
    }
    program
}

/// A byte of the sealed images was changed, they were cut, or something was added.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn changed_images_are_refused() {
    let mut task = DumpedTask::new("files", "held");
    let sealed = fs::read(task.sealed_file()).expect("sealed images");
    let middle = sealed.len() / 2;
    let mut flipped = sealed.clone();
    flipped[middle] ^= 1;
    for forged in [
        flipped,
        sealed[..middle].to_vec(),
        [&sealed[..], b"x"].concat(),
        Vec::new(),
        b"sempaim\x01 and nothing of it".to_vec(),
    ] {
        fs::write(task.sealed_file(), forged).expect("the test's own file");
        let failure = task.restore_failure();
        assert!(matches!(failure, Failure::Images(_)), "{failure:?}");
    }
    task.assert_continues();
}

/// Images of another user's task, or of another task of the same user, are not restored.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn images_of_others_are_refused() {
    let mut task = DumpedTask::new("files", "held");
    let images = task.images();
    let failure = restore_and_wait(&mut task.target, tid(2), migration_id(2), &images);
    assert!(
        matches!(&failure, Err(Failure::Images(why)) if why.contains("are sealed for")),
        "{failure:?}"
    );
    let others_dir = user_dir(Some(DAEMON));
    let stolen = others_dir.path().join("images");
    fs::create_dir(&stolen).expect("the test's own directory");
    fs::copy(task.sealed_file(), stolen.join(SEALED_FILE)).expect("copied");
    for path in [stolen.clone(), stolen.join(SEALED_FILE)] {
        std::os::unix::fs::chown(path, Some(DAEMON), Some(DAEMON)).expect("root may do so");
    }
    let mut other = Tasker::start_for_user(DAEMON);
    let failure = restore_and_wait(&mut other, tid(1), migration_id(3), &stolen);
    assert!(
        matches!(&failure, Err(Failure::Images(why)) if why.contains("user nobody")),
        "{failure:?}"
    );
    other.stop_and_wait();
    task.assert_continues();
}

/// The engine's images themselves, which a user could have written, are not restored.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn images_without_seal_are_refused() {
    let mut task = DumpedTask::new("files", "held");
    fs::remove_file(task.sealed_file()).expect("the test's own file");
    for name in ["inventory.img", "pstree.img", "core-2.img", "sempa-carry"] {
        fs::write(task.images().join(name), b"forged").expect("the test's own file");
    }
    let failure = task.restore_failure();
    assert!(matches!(failure, Failure::Images(_)), "{failure:?}");
    task.assert_continues();
}

/// The file of sealed images is no way to a file of root, and a pipe does not block the tasker.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn links_and_pipes_instead_of_images_are_refused() {
    let mut task = DumpedTask::new("files", "held");
    let secret = tempfile::NamedTempFile::new().expect("a file");
    fs::rename(task.sealed_file(), secret.path()).expect("the test's own files");
    symlink(secret.path(), task.sealed_file()).expect("a link");
    assert!(matches!(task.restore_failure(), Failure::Images(_)));
    fs::remove_file(task.sealed_file()).expect("the test's own file");
    nix::unistd::mkfifo(&task.sealed_file(), nix::sys::stat::Mode::S_IRUSR).expect("a pipe");
    std::os::unix::fs::chown(task.sealed_file(), Some(NOBODY), None).expect("root may do so");
    assert!(matches!(task.restore_failure(), Failure::Images(_)));
    fs::remove_file(task.sealed_file()).expect("the test's own file");
    // The right images, in a file that the user cannot read.
    fs::copy(secret.path(), task.sealed_file()).expect("copied");
    fs::set_permissions(task.sealed_file(), PermissionsExt::from_mode(0o600)).expect("ours");
    assert!(matches!(task.restore_failure(), Failure::Images(_)));
    task.assert_continues();
}

/// After the dump the user replaces an open file by a link to a file of root. The restore fails
/// instead of giving the task root's file.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn file_replaced_by_a_link_to_roots_file_is_not_opened() {
    let mut task = DumpedTask::new("files", "held");
    let held = task.dir.path().join("data/held");
    let secret = tempfile::NamedTempFile::new().expect("a file");
    fs::copy(&held, secret.path()).expect("copied");
    fs::set_permissions(secret.path(), PermissionsExt::from_mode(0o600)).expect("ours");
    let hidden = task.dir.path().join("hidden");
    fs::rename(&held, &hidden).expect("the test's own files");
    symlink(secret.path(), &held).expect("a link");
    let failure = task.restore_failure();
    let names_file =
        |refusal: &Refusal| matches!(refusal, Refusal::File { path, .. } if *path == held);
    assert!(
        matches!(&failure, Failure::Refused(why) if why.iter().any(names_file)),
        "{failure:?}"
    );
    fs::remove_file(&held).expect("the test's own file");
    fs::rename(&hidden, &held).expect("the test's own files");
    task.assert_continues();
}

/// After the dump the user replaces the directory of a deleted file by a link to a directory of
/// root, which has all other files of the task. The engine, which writes the deleted file again,
/// creates nothing there.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn deleted_file_is_not_written_into_roots_directory() {
    let mut task = DumpedTask::new("files", "deleted-small");
    let roots_dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(roots_dir.path(), PermissionsExt::from_mode(0o755)).expect("ours");
    fs::create_dir(roots_dir.path().join("kinds")).expect("the test's own directory");
    let (dir, hidden) = (
        task.dir.path().to_path_buf(),
        task.dir.path().with_extension("hidden"),
    );
    let program = "kinds/files";
    fs::copy(dir.join(program), roots_dir.path().join(program)).expect("copied");
    fs::rename(&dir, &hidden).expect("the test's own directory");
    symlink(roots_dir.path(), &dir).expect("a link");
    let images = hidden.join("images");
    let result = restore_and_wait(&mut task.target, tid(1), migration_id(2), &images);
    let entries: Vec<_> = fs::read_dir(roots_dir.path()).expect("readable").collect();
    fs::remove_file(&dir).expect("the test's own file");
    fs::rename(&hidden, &dir).expect("the test's own directory");
    assert!(
        result.is_err() && entries.len() == 1,
        "{result:?}, {entries:?}"
    );
    // With its own directory the same images are restored.
    let images = task.images();
    restore_and_wait(&mut task.target, tid(1), migration_id(3), &images).expect("a restore");
    task.assert_continues();
}

/// The daemon names directories that the user may not write: the dump fails, and nothing is
/// created. The task goes on.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn images_are_written_only_where_the_user_may_write() {
    let mut task = DumpedTask::new("files", "held");
    let roots_dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(roots_dir.path(), PermissionsExt::from_mode(0o755)).expect("ours");
    let mut messages = Vec::new();
    for dir in [
        roots_dir.path().join("images"),
        PathBuf::from("/etc/sempa-images"),
    ] {
        continue_and_wait(&mut task.source, tid(1), migration_id(1), &mut messages);
        stop_and_wait(&mut task.source, tid(1), migration_id(1), &mut messages);
        let result = dump_and_wait(
            &mut task.source,
            tid(1),
            migration_id(1),
            &dir,
            &mut messages,
        );
        assert!(matches!(result, Err(Failure::Io(_))), "{result:?}");
        assert!(!dir.exists());
    }
    task.assert_continues();
}

/// While the images exist in the clear, only root can reach them.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn images_in_the_clear_are_out_of_reach() {
    let task = DumpedTask::new("files", "held");
    let service_dirs = fs::read_dir("/run/sempa").expect("the service's directory");
    let mut count = 0;
    for entry in service_dirs.flatten() {
        if entry.file_name().to_string_lossy().starts_with("images-") {
            let metadata = entry.metadata().expect("it exists");
            use std::os::unix::fs::MetadataExt;
            assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o700));
            count += 1;
        }
    }
    assert!(count >= 2, "one for each tasker");
    let sealed = fs::read(task.sealed_file()).expect("sealed images");
    assert!(
        !sealed.windows(8).any(|window| window == b"data/hel"),
        "no path is readable"
    );
    task.assert_continues();
}

/// A full disk of the user makes the dump fail, and the task goes on.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn full_disk_fails_the_dump_only() {
    let mut task = DumpedTask::new("files", "held");
    let full = task.dir.path().join("full");
    fs::create_dir(&full).expect("the test's own directory");
    let options = format!("size=16k,uid={NOBODY}");
    let mount = |program: &str, args: &[&str]| {
        let status = std::process::Command::new(program)
            .args(args)
            .arg(&full)
            .status();
        assert!(status.expect("it runs").success());
    };
    mount("mount", &["-t", "tmpfs", "-o", &options, "none"]);
    let mut messages = Vec::new();
    continue_and_wait(&mut task.source, tid(1), migration_id(1), &mut messages);
    // The tasker's mounts are those of this process.
    stop_and_wait(&mut task.source, tid(1), migration_id(1), &mut messages);
    let images = full.join("images");
    let result = dump_and_wait(
        &mut task.source,
        tid(1),
        migration_id(1),
        &images,
        &mut messages,
    );
    mount("umount", &[]);
    assert!(
        matches!(&result, Err(Failure::Io(why)) if why.contains("No space left")),
        "{result:?}"
    );
    task.assert_continues();
}
