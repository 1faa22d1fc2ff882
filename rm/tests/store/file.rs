//! The file of the history: restored content, permissions, damaged files, time of reading.

use crate::{USER, example_log, history_of, host_id, rm_tid, spawn_decision, task_id, time_at};
use pvm_rm::store::file::{FILE_BYTES_MAX, OpenedHistory};
use pvm_rm::store::history::{DECISIONS_MAX, TASKS_MAX};
use pvm_rm::store::{Batch, History, HistoryFile};
use sempa_proto::Tid;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Usage;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Adds the maximum number of decisions, of typical size.
fn fill_decisions(history: &mut History) {
    (0..DECISIONS_MAX as u32)
        .for_each(|n| history.record_decision(time_at(n.into()), spawn_decision(n, 4, 1, 8)));
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
        let started = EventKind::TaskStarted {
            tid,
            parent,
            name: "/home/olga/bin/worker".into(),
            user: USER,
        };
        history.apply_event(&Event {
            number: u64::from(2 * n) + 1,
            at: time_at(n.into()),
            host: host_id(1 + (n % 200) as u16),
            kind: started,
        });
        if n + 1000 < TASKS_MAX as u32 {
            let ended = EventKind::TaskEnded {
                tid,
                status: 0,
                used: Usage::default(),
            };
            history.apply_event(&Event {
                number: u64::from(2 * n) + 2,
                at: time_at(n.into()),
                host: host_id(1),
                kind: ended,
            });
        }
    }
    fill_decisions(&mut history);
    history
}

/// Writes a batch, after waiting for earlier ones if necessary.
fn write_batch(store: &HistoryFile, mut batch: Batch) {
    while let Err(back) = store.write(batch) {
        batch = back;
        std::thread::yield_now();
    }
}

/// After the writer was killed, a history of the maximum size can be read fast enough for a
/// restart.
#[test]
fn full_history_is_read_in_time_after_kill() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut history = full_history();
    let opened = open_store(dir.path());
    // The content is written several times, as it would be over a long time.
    for _ in 0..3 {
        write_batch(&opened.store, history.take_batch());
        fill_decisions(&mut history);
    }
    write_batch(&opened.store, history.take_batch());
    // When the second empty batch is accepted, all earlier ones have been written.
    (0..2).for_each(|_| write_batch(&opened.store, Batch::new()));
    // The file is copied without being closed, as after a kill.
    let (path, again) = (dir.path().join("rm.redb"), dir.path().join("again"));
    std::fs::create_dir(&again).expect("a directory");
    let length = std::fs::copy(&path, again.join("rm.redb")).expect("it can be copied");
    assert!(length <= FILE_BYTES_MAX, "{length}");
    let begun = std::time::Instant::now();
    let OpenedHistory {
        entries,
        moved_aside,
        ..
    } = open_store(&again);
    let (read, bad) = History::read(USER, rm_tid(), entries);
    let took = begun.elapsed();
    println!(
        "{} MB of history are read in {:.0} ms",
        length / 1_000_000,
        took.as_secs_f64() * 1e3
    );
    assert_eq!(
        (bad, moved_aside, read.running().count()),
        (0, None, history.running().count())
    );
    assert_eq!(
        (read.log_position(), read.running().count()),
        (history.log_position(), 1000)
    );
    // The goal for a whole restart is two seconds. The limit is higher, because test machines may
    // be slow.
    assert!(took.as_secs() < 30, "it takes {took:?}");
    opened.store.close(Batch::new());
}

fn open_store(dir: &Path) -> OpenedHistory {
    HistoryFile::open(dir, "rm.redb").expect("it can be opened")
}

/// The file restores what was written. Other users cannot read it, and a second resource manager
/// cannot open it.
#[test]
fn file_restores_history_and_is_private() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = dir.path().join("new/state");
    let opened = open_store(&place);
    assert!(opened.entries.is_empty() && opened.moved_aside.is_none());
    let mode = |path: &Path| path.metadata().expect("it is there").permissions().mode() & 0o777;
    assert_eq!((mode(&place), mode(&place.join("rm.redb"))), (0o700, 0o600));
    let mut history = history_of(&example_log());
    opened.store.close(history.take_batch());
    let again = open_store(&place);
    let (read, bad) = History::read(USER, rm_tid(), again.entries);
    assert_eq!(
        (bad, read.log_position(), read.running().count()),
        (0, history.log_position(), 2)
    );
    let second = HistoryFile::open(&place, "rm.redb").expect_err("it is open already");
    assert!(
        second
            .to_string()
            .contains("in use by another resource manager"),
        "{second}"
    );
}

/// A file that is no database, truncated or damaged is renamed and reported.
#[test]
fn unreadable_file_is_moved_aside_and_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("rm.redb");
    let mut history = history_of(&example_log());
    open_store(dir.path()).store.close(history.take_batch());
    let good = std::fs::read(&path).expect("it was written");
    let mut damaged = good.clone();
    damaged[4096..].fill(0xa5);
    let mut cases = vec![
        b"not a database at all".to_vec(),
        good[..good.len() / 2].to_vec(),
        damaged,
    ];
    cases.push(vec![0xff; 1 << 20]);
    for (n, bytes) in cases.into_iter().enumerate() {
        std::fs::write(&path, bytes).expect("it can be written");
        let opened = open_store(dir.path());
        let told = opened
            .moved_aside
            .unwrap_or_else(|| panic!("case {n}: {} entries", opened.entries.len()));
        assert!(
            told.contains("cannot be read") && told.contains("rm.redb.broken-"),
            "{told}"
        );
        assert!(opened.entries.is_empty());
        opened.store.close(Batch::new());
        std::fs::remove_file(&path).expect("a new one was made");
    }
    let aside = std::fs::read_dir(dir.path())
        .expect("it can be listed")
        .count();
    assert_eq!(aside, 4, "each was kept");
}
