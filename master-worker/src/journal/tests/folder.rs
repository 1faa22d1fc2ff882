//! Locks, modes and removal in the file system.

use super::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

const PATIENCE: Duration = Duration::from_secs(120);

fn open(dir: &Path) -> Result<(Journal, Previous), OpenError> {
    Journal::open(dir, settings(), observed_callbacks().0)
}

fn append_and_wait(journal: &Journal, record: Record) {
    let lsn = journal.append(record).unwrap();
    assert!(journal.wait_durable(lsn, PATIENCE));
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn file_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn second_master_is_refused_and_told_the_first() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let (journal, _) = open(&dir).unwrap();
    let error = open(&dir).unwrap_err();
    let host = nix::unistd::gethostname().unwrap();
    let holder = format!("process {} on host {}", std::process::id(), host.display());
    assert!(matches!(error, OpenError::Locked { .. }));
    assert!(error.to_string().contains(&holder), "{error}");
    drop(journal);
    open(&dir).unwrap();
}

#[test]
fn files_are_private() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("runs/first");
    let (callbacks, events) = observed_callbacks();
    let (journal, _) = Journal::open(&dir, settings(), callbacks).unwrap();
    append_and_wait(&journal, added(0..9));
    journal.begin_snapshot(Bytes::new(), counters(1)).unwrap();
    while journal.is_snapshot_pending() {
        events.recv().unwrap();
    }
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(file_names(&dir), ["log-2", "run.lock", "snapshot-2"]);
    for name in file_names(&dir) {
        assert_eq!(mode(&dir.join(&name)), 0o600, "{name}");
    }
}

#[test]
fn folder_that_others_can_write_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, OpenError::UnsafeFolder { .. }), "{error}");
    assert_eq!(file_names(&dir), Vec::<String>::new());
}

#[test]
fn finished_run_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let (journal, _) = open(&dir).unwrap();
    journal.append(added(0..9)).unwrap();
    // The snapshot may be complete or not.
    journal.begin_snapshot(Bytes::new(), counters(1)).unwrap();
    journal.append(accepted(3, 0..0)).unwrap();
    journal.finish(PATIENCE).unwrap();
    assert_eq!(file_names(parent.path()), Vec::<String>::new());

    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("results.txt"), "mine").unwrap();
    let (journal, previous) = open(&dir).unwrap();
    assert!(matches!(previous, Previous::Nothing));
    journal.finish(PATIENCE).unwrap();
    assert_eq!(file_names(&dir), ["results.txt"]);
}

/// A master that was killed after its run was complete leaves files. The next one removes them and
/// begins a new run.
#[test]
fn leftover_of_a_finished_run_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, _) = open(dir.path()).unwrap();
    append_and_wait(&journal, added(0..9));
    append_and_wait(&journal, Record::Finished);
    drop(journal);
    let (journal, previous) = open(dir.path()).unwrap();
    assert!(matches!(previous, Previous::Finished));
    assert_eq!(journal.generation(), 1);
    append_and_wait(&journal, added(0..2));
    drop(journal);
    let (_journal, previous) = open(dir.path()).unwrap();
    let Previous::Unfinished(recovered) = previous else {
        panic!("the new run is lost");
    };
    assert_eq!(recovered.records, [added(0..2)]);
}

#[test]
fn failed_resume_leaves_no_folder() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let settings = Settings {
        resume: Some(RunId([3; 16])),
        ..settings()
    };
    let error = Journal::open(&dir, settings, observed_callbacks().0).unwrap_err();
    assert!(matches!(error, OpenError::NoSuchRun { .. }));
    assert_eq!(file_names(parent.path()), Vec::<String>::new());
}
