//! Damaged, shortened, missing and foreign files.

use super::faulty_storage::Loss;
use super::*;

/// Length of a mark in the file.
const MARK_BYTES: usize = 29;
/// Length of the frame with a small generation.
const OPENED_BYTES: usize = 22;

/// Returns a disk with three durable commits in one log, and the history of the run.
fn one_log() -> (FaultyStorage, History) {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let mut run = TestRun::start(&storage, &mut history);
    for record in [added(0..3), accepted(1, 3..4), failed(2, 1)] {
        run.complete(&[Step::Append(record), Step::Settle], &mut history);
    }
    run.close(&mut history);
    assert_eq!(storage.file_names(), ["log-1"]);
    (storage, history)
}

/// Returns a disk with a snapshot and two logs: a second snapshot was being written.
fn snapshot_and_two_logs() -> (FaultyStorage, History) {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let mut run = TestRun::start(&storage, &mut history);
    let steps = [
        Step::Append(added(0..3)),
        Step::Append(quarantined(2)),
        Step::Append(failed(1, 1)),
        Step::BeginSnapshot,
        Step::Append(failed(1, 2)),
        Step::Settle,
        Step::SettleSnapshot,
    ];
    run.complete(&steps, &mut history);
    let held = storage.hold_snapshots();
    let steps = [
        Step::BeginSnapshot,
        Step::Append(accepted(1, 3..4)),
        Step::Settle,
    ];
    run.complete(&steps, &mut history);
    let disk = storage.after(Loss::Unsynced);
    drop(held);
    run.close(&mut history);
    let mut names = disk.file_names();
    names.retain(|name| !name.starts_with(".tmp-"));
    assert_eq!(names, ["log-2", "log-3", "snapshot-2"]);
    (disk, history)
}

/// Returns the length of a short header.
fn header_bytes(log: &[u8]) -> usize {
    8 + 4 + 4 + usize::from(log[12]) + 8
}

/// Opens the disk with one file changed. An error must leave all files as they are.
fn open_changed(
    storage: &FaultyStorage,
    name: &str,
    content: Vec<u8>,
) -> Result<Opened, OpenError> {
    let disk = storage.after(Loss::Unsynced);
    disk.set_content(name, content);
    let contents = disk.contents();
    let opened = recover(&disk);
    if let Err(error) = &opened {
        assert!(
            contents == disk.contents(),
            "{error}: the files have changed"
        );
        assert!(error.to_string().contains(name), "{error}");
    }
    opened
}

/// Calls `check` for each byte of a file and several changes of this byte.
fn for_each_flip(
    storage: &FaultyStorage,
    name: &str,
    mut check: impl FnMut(usize, Result<Opened, OpenError>),
) {
    let content = storage.content(name);
    for index in 0..content.len() {
        for mask in [0x01, 0x10, 0x80, 0xff] {
            let mut changed = content.clone();
            changed[index] ^= mask;
            check(index, open_changed(storage, name, changed));
        }
    }
}

/// A change of any byte of a durable record is an error. Only the last mark can be cut, and this
/// loses nothing.
#[test]
fn change_of_any_byte_of_a_log_loses_nothing() {
    let (storage, history) = one_log();
    let last_mark = storage.content("log-1").len() - MARK_BYTES;
    for_each_flip(&storage, "log-1", |index, opened| match opened {
        Ok(opened) => {
            assert!(index >= last_mark, "byte {index} changed unseen");
            let Previous::Unfinished(recovered) = &opened.previous else {
                panic!("there is no run");
            };
            let truncated = recovered.truncated.as_ref().expect("a cut");
            assert_eq!(
                (truncated.offset, truncated.bytes),
                (last_mark as u64, MARK_BYTES as u64)
            );
            let mut history = history.clone();
            history.check(&opened.previous, opened.generation);
        }
        Err(error) => {
            assert!(index < last_mark, "byte {index}: {error}");
            let is_typed = match index {
                0..8 => matches!(error, OpenError::NotAJournal { .. }),
                8..12 => matches!(error, OpenError::FormatVersion { .. }),
                _ => matches!(error, OpenError::Corrupt { .. }),
            };
            assert!(is_typed, "byte {index}: {error}");
        }
    });
}

#[test]
fn change_of_any_byte_of_a_snapshot_is_an_error() {
    let (storage, _) = snapshot_and_two_logs();
    for_each_flip(&storage, "snapshot-2", |index, opened| {
        assert!(opened.is_err(), "byte {index} changed unseen");
    });
}

/// A log with a successor is complete: damage to its records is an error.
#[test]
fn change_of_any_byte_of_an_earlier_log_loses_nothing() {
    let (storage, history) = snapshot_and_two_logs();
    let mut harmless = 0;
    for_each_flip(&storage, "log-2", |_, opened| {
        if let Ok(opened) = opened {
            harmless += 1;
            history.clone().check(&opened.previous, opened.generation);
        }
    });
    // The mark at the end was of use only without the successor.
    assert!(harmless <= 4 * MARK_BYTES, "{harmless}");
}

/// A shorter log has the first records, never others.
#[test]
fn log_of_any_length_has_the_first_records() {
    let (storage, history) = one_log();
    let content = storage.content("log-1");
    let mut counts = Vec::new();
    for len in 0..content.len() {
        match open_changed(&storage, "log-1", content[..len].to_vec()) {
            Ok(opened) => {
                let mut shorter_history = History {
                    durable: 0,
                    ..history.clone()
                };
                shorter_history.generation = 0;
                shorter_history.check(&opened.previous, opened.generation);
                counts.push(shorter_history.records.len());
            }
            Err(error) => assert!(counts.is_empty(), "{len} bytes: {error}"),
        }
    }
    assert!(counts.is_sorted());
    counts.dedup();
    assert_eq!(counts, [0, 1, 2, 3]);
}

/// An undamaged record at another place is cut.
#[test]
fn repeated_record_is_not_taken_twice() {
    let (storage, mut history) = one_log();
    let content = storage.content("log-1");
    let start = header_bytes(&content) + OPENED_BYTES + MARK_BYTES;
    let record = &content[start..][..13 + usize::from(content[start]) + 8];
    let repeated = [&content[..], record].concat();
    let opened = open_changed(&storage, "log-1", repeated).expect("a cut log");
    let Previous::Unfinished(recovered) = &opened.previous else {
        panic!("there is no run");
    };
    let truncated = recovered.truncated.as_ref().expect("a cut");
    assert_eq!(truncated.bytes, record.len() as u64);
    history.check(&opened.previous, opened.generation);
}

#[test]
fn shorter_snapshot_is_an_error() {
    let (storage, _) = snapshot_and_two_logs();
    let content = storage.content("snapshot-2");
    for len in 0..content.len() {
        assert!(
            open_changed(&storage, "snapshot-2", content[..len].to_vec()).is_err(),
            "{len}"
        );
    }
    let longer = [&content[..], b"x"].concat();
    assert!(open_changed(&storage, "snapshot-2", longer).is_err());
}

#[test]
fn missing_file_is_named() {
    let (storage, _) = snapshot_and_two_logs();
    let open_without = |names: &[&str]| {
        let disk = storage.after(Loss::Unsynced);
        names.iter().for_each(|name| disk.remove_content(name));
        recover(&disk).err().expect("an error").to_string()
    };
    assert!(open_without(&["log-2"]).contains("memory/log-2 is missing"));
    assert!(open_without(&["log-2", "log-3"]).contains("memory/log-2 is missing"));
    // Without its snapshot the run needs all logs from the first one.
    assert!(open_without(&["snapshot-2"]).contains("memory/log-1 is missing"));
}

/// Files of another run, or under the name of another file, are not mixed into the run.
#[test]
fn foreign_files_are_refused() {
    let (storage, _) = snapshot_and_two_logs();
    let renamed = open_changed(&storage, "log-4", storage.content("log-3"));
    assert!(matches!(renamed, Err(OpenError::Corrupt { offset: 0, .. })));

    let other_disk = FaultyStorage::default();
    let other_settings = Settings {
        new_run: RunId([8; 16]),
        ..settings()
    };
    recovery::open(&other_disk, &other_settings).expect("an empty folder");
    let (storage, _) = one_log();
    let disk = storage.after(Loss::Unsynced);
    // Frames of another run behind the header of this one.
    let header_bytes = header_bytes(&disk.content("log-1"));
    let mut mixed = storage.content("log-1")[..header_bytes].to_vec();
    mixed.extend(&other_disk.content("log-1")[header_bytes..]);
    let opened = open_changed(&storage, "log-1", mixed).expect("a cut log");
    assert!(matches!(opened.previous, Previous::Nothing));

    let other = open_changed(&FaultyStorage::default(), "log-1", b"my own notes".to_vec());
    assert!(matches!(other, Err(OpenError::NotAJournal { .. })));
}

#[test]
fn other_programs_and_runs_are_refused() {
    let (storage, mut history) = one_log();
    let open = |settings| recovery::open(&storage.after(Loss::Unsynced), &settings);
    let newer_program = Settings::new("sieve 1.1", RunId([9; 16]));
    let error = open(newer_program).err().expect("an error");
    assert!(matches!(error, OpenError::OtherProgram { .. }));
    assert!(
        error
            .to_string()
            .contains("begun by sieve 1.0; this program is sieve 1.1"),
        "{error}"
    );

    let other_run = Settings {
        resume: Some(RunId([9; 16])),
        ..settings()
    };
    assert!(matches!(
        open(other_run.clone()),
        Err(OpenError::OtherRun { .. })
    ));
    let no_run = recovery::open(&FaultyStorage::default(), &other_run);
    assert!(matches!(no_run, Err(OpenError::NoSuchRun { .. })));

    let this_run = Settings {
        resume: Some(RunId([7; 16])),
        ..Settings::new(PROGRAM, RunId([9; 16]))
    };
    let opened = open(this_run).expect("the run");
    assert_eq!(opened.run, RunId([7; 16]));
    history.check(&opened.previous, opened.generation);
}
