//! Locks, modes and removal in the file system.

use super::*;
use anyhow::{Result, ensure};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

const PATIENCE: Duration = Duration::from_secs(120);

fn open(dir: &Path) -> Result<(Journal, Previous), OpenError> {
    Journal::open(dir, settings(), observed_callbacks().0)
}

fn append_and_wait(journal: &Journal, record: Record) -> Result<()> {
    let lsn = journal.append(record)?;
    ensure!(journal.wait_durable(lsn, PATIENCE));
    Ok(())
}

fn mode(path: &Path) -> Result<u32> {
    Ok(fs::metadata(path)?.permissions().mode() & 0o7777)
}

fn file_names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[test]
fn second_master_is_refused_and_told_the_first() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let dir = parent.path().join("run");
    let (journal, _) = open(&dir)?;
    let error = open(&dir).expect_err("a refusal");
    let host = nix::unistd::gethostname()?;
    let holder = format!("process {} on host {}", std::process::id(), host.display());
    assert!(matches!(error, OpenError::Locked { .. }));
    assert!(error.to_string().contains(&holder), "{error}");
    drop(journal);
    open(&dir)?;
    Ok(())
}

#[test]
fn files_are_private() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let dir = parent.path().join("runs/first");
    let (callbacks, events) = observed_callbacks();
    let (journal, _) = Journal::open(&dir, settings(), callbacks)?;
    append_and_wait(&journal, added(0..9))?;
    journal.begin_snapshot(Bytes::new(), counters(1))?;
    while journal.is_snapshot_pending() {
        events.recv()?;
    }
    assert_eq!(mode(&dir)?, 0o700);
    assert_eq!(file_names(&dir)?, ["log-2", "run.lock", "snapshot-2"]);
    for name in file_names(&dir)? {
        assert_eq!(mode(&dir.join(&name))?, 0o600, "{name}");
    }
    Ok(())
}

#[test]
fn folder_that_others_can_write_is_refused() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let dir = parent.path().join("run");
    fs::create_dir(&dir)?;
    fs::set_permissions(&dir, Permissions::from_mode(0o777))?;
    let error = open(&dir).expect_err("a refusal");
    assert!(matches!(error, OpenError::UnsafeFolder { .. }), "{error}");
    assert_eq!(file_names(&dir)?, Vec::<String>::new());
    Ok(())
}

#[test]
fn finished_run_leaves_nothing() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let dir = parent.path().join("run");
    let (journal, _) = open(&dir)?;
    journal.append(added(0..9))?;
    // The snapshot may be complete or not.
    journal.begin_snapshot(Bytes::new(), counters(1))?;
    journal.append(accepted(3, 0..0))?;
    journal.finish(PATIENCE)?;
    assert_eq!(file_names(parent.path())?, Vec::<String>::new());

    fs::create_dir(&dir)?;
    fs::write(dir.join("results.txt"), "mine")?;
    let (journal, previous) = open(&dir)?;
    assert!(matches!(previous, Previous::Nothing));
    journal.finish(PATIENCE)?;
    assert_eq!(file_names(&dir)?, ["results.txt"]);
    Ok(())
}

/// A master that was killed after its run was complete leaves files. The next one removes them and
/// begins a new run.
#[test]
fn leftover_of_a_finished_run_is_removed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (journal, _) = open(dir.path())?;
    append_and_wait(&journal, added(0..9))?;
    append_and_wait(&journal, Record::Finished)?;
    drop(journal);
    let (journal, previous) = open(dir.path())?;
    assert!(matches!(previous, Previous::Finished));
    assert_eq!(journal.generation(), 1);
    append_and_wait(&journal, added(0..2))?;
    drop(journal);
    let (_journal, previous) = open(dir.path())?;
    let Previous::Unfinished(recovered) = previous else {
        panic!("the new run is lost");
    };
    assert_eq!(recovered.records, [added(0..2)]);
    Ok(())
}

#[test]
fn failed_resume_leaves_no_folder() -> Result<()> {
    let parent = tempfile::tempdir()?;
    let dir = parent.path().join("run");
    let settings = Settings {
        resume: Some(RunId([3; 16])),
        ..settings()
    };
    let error = Journal::open(&dir, settings, observed_callbacks().0).expect_err("a refusal");
    assert!(matches!(error, OpenError::NoSuchRun { .. }));
    assert_eq!(file_names(parent.path())?, Vec::<String>::new());
    Ok(())
}
