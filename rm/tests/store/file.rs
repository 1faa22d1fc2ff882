//! The file of the history: restored content, permissions, damaged files, and the time that reading
//! takes.

use crate::{
    USER, build_history, event_time, example_log, host_id, rm_tid, spawn_decision, task_id,
};
use pvm_rm::store::file::{FILE_BYTES_MAX, OpenedHistory};
use pvm_rm::store::history::{DECISIONS_MAX, TASKS_MAX};
use pvm_rm::store::{Batch, History, HistoryFile};
use sempa_proto::Tid;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Usage;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Records [`DECISIONS_MAX`] decisions of typical size.
fn fill_decisions(history: &mut History) {
    (0..DECISIONS_MAX as u32)
        .for_each(|n| history.record_decision(event_time(n.into()), spawn_decision(n, 4, 1, 8)));
}

/// Returns a history of the maximum size.
fn full_history() -> History {
    let mut history = History::new(USER, rm_tid());
    for n in 0..TASKS_MAX as u32 {
        // Each job has a thousand tasks. Only the last thousand tasks still run.
        let (tid, parent) = (
            task_id(1 + (n % 200) as u16, 10 + n),
            if n % 1000 == 0 {
                Tid::NONE
            } else {
                task_id(1, 10 + n / 1000 * 1000)
            },
        );
        let tid = if n % 1000 == 0 {
            task_id(1, 10 + n)
        } else {
            tid
        };
        let started_event = EventKind::TaskStarted {
            tid,
            parent,
            name: "/home/olga/bin/worker".into(),
            user: USER,
        };
        history.apply_event(&Event {
            number: u64::from(2 * n) + 1,
            at: event_time(n.into()),
            host: host_id(1 + (n % 200) as u16),
            kind: started_event,
        });
        if n + 1000 < TASKS_MAX as u32 {
            let ended_event = EventKind::TaskEnded {
                tid,
                status: 0,
                used: Usage::default(),
            };
            history.apply_event(&Event {
                number: u64::from(2 * n) + 2,
                at: event_time(n.into()),
                host: host_id(1),
                kind: ended_event,
            });
        }
    }
    fill_decisions(&mut history);
    history
}

/// Writes a batch. Waits if earlier batches have not been written yet.
fn write_batch(store: &HistoryFile, mut batch: Batch) {
    while let Err(refused_batch) = store.try_send_batch(batch) {
        batch = refused_batch;
        std::thread::yield_now();
    }
}

/// After the writer was killed, a history of the maximum size is read in less than thirty seconds.
#[test]
fn full_history_is_read_in_time_after_kill() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut history = full_history();
    let opened_history = open_store(dir.path());
    // The content is written three times, as the file of a long-running resource manager is.
    for _ in 0..3 {
        write_batch(&opened_history.file, history.take_batch());
        fill_decisions(&mut history);
    }
    write_batch(&opened_history.file, history.take_batch());
    // When the second empty batch is accepted, all earlier ones have been written.
    (0..2).for_each(|_| write_batch(&opened_history.file, Batch::new()));
    // The file is copied without being closed, as after a kill.
    let (path, copy_dir) = (dir.path().join("rm.redb"), dir.path().join("again"));
    std::fs::create_dir(&copy_dir).expect("a directory");
    let file_bytes = std::fs::copy(&path, copy_dir.join("rm.redb")).expect("it can be copied");
    assert!(file_bytes <= FILE_BYTES_MAX, "{file_bytes}");
    let start = std::time::Instant::now();
    let OpenedHistory {
        entries,
        rename_note: note_of_rename,
        ..
    } = open_store(&copy_dir);
    let (restored_history, damaged_count) = History::from_entries(USER, rm_tid(), entries);
    let read_time = start.elapsed();
    println!(
        "{} MB of history are read in {:.0} ms",
        file_bytes / 1_000_000,
        read_time.as_secs_f64() * 1e3
    );
    assert_eq!(
        (
            damaged_count,
            note_of_rename,
            restored_history.running_tasks().count()
        ),
        (0, None, history.running_tasks().count())
    );
    assert_eq!(
        (
            restored_history.log_position(),
            restored_history.running_tasks().count()
        ),
        (history.log_position(), 1000)
    );
    // The goal for a whole restart is two seconds. The limit is higher, because test machines may
    // be slow.
    assert!(read_time.as_secs() < 30, "it takes {read_time:?}");
    opened_history.file.write_and_close(Batch::new());
}

fn open_store(dir: &Path) -> OpenedHistory {
    HistoryFile::open(dir, "rm.redb").expect("it can be opened")
}

/// The file restores what was written. Other users cannot read the file, and a second resource
/// manager cannot open it.
#[test]
fn file_restores_history_and_is_private() {
    let dir = tempfile::tempdir().expect("a directory");
    let state_dir = dir.path().join("new/state");
    let opened_history = open_store(&state_dir);
    assert!(opened_history.entries.is_empty() && opened_history.rename_note.is_none());
    let permissions =
        |path: &Path| path.metadata().expect("it is there").permissions().mode() & 0o777;
    assert_eq!(
        (
            permissions(&state_dir),
            permissions(&state_dir.join("rm.redb"))
        ),
        (0o700, 0o600)
    );
    let mut history = build_history(&example_log());
    opened_history.file.write_and_close(history.take_batch());
    let reopened_history = open_store(&state_dir);
    let (restored_history, damaged_count) =
        History::from_entries(USER, rm_tid(), reopened_history.entries);
    assert_eq!(
        (
            damaged_count,
            restored_history.log_position(),
            restored_history.running_tasks().count()
        ),
        (0, history.log_position(), 2)
    );
    let open_error = HistoryFile::open(&state_dir, "rm.redb").expect_err("it is open already");
    assert!(
        open_error
            .to_string()
            .contains("in use by another resource manager"),
        "{open_error}"
    );
}

/// A file is renamed and reported if it is no database, truncated or damaged.
#[test]
fn unreadable_file_is_renamed_and_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("rm.redb");
    let mut history = build_history(&example_log());
    open_store(dir.path())
        .file
        .write_and_close(history.take_batch());
    let valid_bytes = std::fs::read(&path).expect("it was written");
    let mut damaged_bytes = valid_bytes.clone();
    damaged_bytes[4096..].fill(0xa5);
    let mut cases = vec![
        b"not a database at all".to_vec(),
        valid_bytes[..valid_bytes.len() / 2].to_vec(),
        damaged_bytes,
    ];
    cases.push(vec![0xff; 1 << 20]);
    for (n, bytes) in cases.into_iter().enumerate() {
        std::fs::write(&path, bytes).expect("it can be written");
        let opened_history = open_store(dir.path());
        let report = opened_history
            .rename_note
            .unwrap_or_else(|| panic!("case {n}: {} entries", opened_history.entries.len()));
        assert!(
            report.contains("cannot be read") && report.contains("rm.redb.broken-"),
            "{report}"
        );
        assert!(opened_history.entries.is_empty());
        opened_history.file.write_and_close(Batch::new());
        std::fs::remove_file(&path).expect("a new one was made");
    }
    let renamed_count = std::fs::read_dir(dir.path())
        .expect("it can be listed")
        .count();
    assert_eq!(renamed_count, 4, "each was kept");
}
