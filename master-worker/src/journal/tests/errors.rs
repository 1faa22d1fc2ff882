//! Failed calls, full disks, full queues, and snapshots that take long.

use super::faulty_storage::Loss;
use super::*;
use nix::errno::Errno;

const PATIENCE: Duration = Duration::from_secs(120);

fn steps() -> Vec<Step> {
    vec![
        Step::Append(added(0..4)),
        Step::Settle,
        Step::Append(accepted(0, 4..6)),
        Step::BeginSnapshot,
        Step::Append(failed(1, 1)),
        Step::Settle,
        Step::SettleSnapshot,
        Step::Append(quarantined(1)),
        Step::Append(accepted(2, 0..0)),
        Step::Settle,
    ]
}

fn is_failure(event: &Notice) -> bool {
    matches!(event, Notice::WritesFail { .. })
}

/// One or several failed calls at any place lose nothing, and records are not reported durable
/// before they are.
#[test]
fn failed_calls_lose_nothing() {
    for errno in [Errno::ENOSPC, Errno::EIO] {
        for failures in [1, 2, 5] {
            for call in 1.. {
                let (storage, mut history) = (FaultyStorage::default(), History::default());
                let mut run = TestRun::start(&storage, &mut history);
                run.ends_at_errors = false;
                let calls_before = storage.calls();
                storage.fail(call..call + failures, errno);
                run.complete(&steps(), &mut history);
                run.close(&mut history);
                assert_eq!(history.durable, history.records.len());
                let disk = storage.after(Loss::Unsynced);
                let opened = recover_valid(&disk);
                history.check(&opened.previous, opened.generation);
                if storage.calls() - calls_before < call {
                    break;
                }
            }
        }
    }
}

/// After a failed sync the next master may find records that only the system's memory has. The
/// master writes them again, so that they survive a loss of power from then on.
#[test]
fn records_of_a_failed_sync_are_durable_after_the_next_open() {
    for call in 1.. {
        let (storage, mut history) = (FaultyStorage::default(), History::default());
        let mut run = TestRun::start(&storage, &mut history);
        storage.fail(call..u64::MAX, Errno::EIO);
        let interrupted = run.run(&steps(), &mut history).is_err();
        run.close(&mut history);
        let disk = storage.after(Loss::Kill);
        let opened = recover_valid(&disk);
        history.check(&opened.previous, opened.generation);
        // All that was found counts as durable in the history.
        let opened = recover_valid(&disk.after(Loss::Unsynced));
        history.check(&opened.previous, opened.generation);
        if !interrupted {
            break;
        }
    }
}

/// An error of a call while the journal is opened is reported, and another attempt finds all.
#[test]
fn failed_call_of_an_open_loses_nothing() {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let mut run = TestRun::start(&storage, &mut history);
    run.complete(&steps(), &mut history);
    run.close(&mut history);
    for call in 1.. {
        let disk = storage.after(Loss::TornAt(10));
        disk.fail(call..call + 1, Errno::EIO);
        match recover(&disk) {
            Ok(opened) => {
                history.clone().check(&opened.previous, opened.generation);
                if disk.calls() - storage.calls() < call {
                    break;
                }
            }
            Err(error) => {
                let error_text = error.to_string();
                assert!(matches!(error, OpenError::Io { .. }), "{error_text}");
                assert!(error_text.contains("Input/output error"), "{error_text}");
            }
        }
        let disk = disk.after(Loss::Unsynced);
        let opened = recover_valid(&disk);
        history.clone().check(&opened.previous, opened.generation);
    }
}

/// While the disk is full, records wait in memory up to the limit, one notice tells the user, and
/// afterwards all records become durable in order.
#[test]
fn full_disk_fills_the_queue_and_loses_nothing() {
    let storage = FaultyStorage::default();
    let (callbacks, events) = observed_callbacks();
    let settings = Settings {
        queue_bytes_max: 4096,
        ..settings()
    };
    let shared_storage = Arc::new(storage.clone());
    let (journal, _) =
        Journal::open_storage(shared_storage, settings, callbacks).expect("an empty folder");
    storage.fail(1..u64::MAX, Errno::ENOSPC);
    let mut records = Vec::new();
    let refused = loop {
        let record = accepted(records.len() as u64, 0..0);
        match journal.append(record.clone()) {
            Ok(_) => records.push(record),
            Err(refusal) => break refusal,
        }
    };
    let AppendError::Full(refused) = refused else {
        panic!("{refused}");
    };
    assert_eq!(*refused, accepted(records.len() as u64, 0..0));
    assert!(journal.waiting_bytes() <= 4096);
    let Event::Notice(notice) = events.recv().expect("an open journal") else {
        panic!("a record is durable on a full disk");
    };
    assert!(
        notice.to_string().contains("No space left on device"),
        "{notice}"
    );
    assert!(!journal.wait_for_room(&refused, Duration::ZERO));
    assert!(!journal.wait_durable(Lsn(2), Duration::ZERO));

    storage.fail(0..0, Errno::ENOSPC);
    assert!(journal.wait_for_room(&refused, PATIENCE));
    let last = journal.append((*refused).clone()).expect("room");
    records.push(*refused);
    assert!(journal.wait_durable(last, PATIENCE));
    drop(journal);
    let notices = events.try_iter().filter_map(|event| match event {
        Event::Notice(notice) => Some(notice),
        Event::Durable(_) => None,
    });
    let notices: Vec<Notice> = notices.collect();
    assert!(
        matches!(notices[..], [Notice::WritesResumed]),
        "{notices:?}"
    );
    let Previous::Unfinished(recovered) = recover_valid(&storage).previous else {
        panic!("there is no run");
    };
    assert_eq!(recovered.records, records);
}

/// A journal that is closed while the disk fails does not wait, and reports what is lost.
#[test]
fn close_on_a_failing_disk_reports_the_loss() {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let mut run = TestRun::start(&storage, &mut history);
    run.complete(&[Step::Append(added(0..1)), Step::Settle], &mut history);
    storage.fail(1..u64::MAX, Errno::EIO);
    for id in 1..4 {
        let _ = run.step(&Step::Append(added(id..id + 1)), &mut history);
    }
    let notices = run.close(&mut history);
    assert_eq!(history.durable, 1);
    assert_eq!(
        notices.iter().filter(|notice| is_failure(notice)).count(),
        1
    );
    assert!(
        matches!(notices.last(), Some(Notice::RecordsLost { records: 3, .. })),
        "{notices:?}"
    );
}

/// Records become durable while a snapshot does not come to its end.
#[test]
fn records_become_durable_while_a_snapshot_is_written() {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let mut run = TestRun::start(&storage, &mut history);
    run.complete(&[Step::Append(added(0..9)), Step::Settle], &mut history);
    let held = storage.hold_snapshots();
    let steps = [
        Step::BeginSnapshot,
        Step::Append(accepted(3, 0..0)),
        Step::Settle,
        Step::Append(failed(4, 1)),
        Step::Settle,
    ];
    run.complete(&steps, &mut history);
    assert!(run.journal.is_snapshot_pending());
    let refusal = run.journal.begin_snapshot(Bytes::new(), Bytes::new());
    assert_eq!(refusal, Err(SnapshotRefused::InProgress));
    let disk = storage.after(Loss::Unsynced);
    let opened = recover_valid(&disk);
    history.clone().check(&opened.previous, opened.generation);
    assert!(disk.file_names().contains(&"log-2".to_string()));

    drop(held);
    run.complete(&[Step::SettleSnapshot], &mut history);
    run.close(&mut history);
    assert_eq!(storage.file_names(), ["log-2", "snapshot-2"]);
    let opened = recover_valid(&storage.after(Loss::Unsynced));
    history.check(&opened.previous, opened.generation);
}

/// A failed snapshot leaves the logs; the next one replaces them all.
#[test]
fn next_snapshot_replaces_a_failed_one() {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let mut run = TestRun::start(&storage, &mut history);
    run.complete(&[Step::Append(added(0..9)), Step::Settle], &mut history);
    let held = storage.hold_snapshots();
    let steps = [
        Step::BeginSnapshot,
        Step::Append(accepted(3, 0..0)),
        Step::Settle,
    ];
    run.complete(&steps, &mut history);
    storage.fail(1..u64::MAX, Errno::ENOSPC);
    drop(held);
    run.complete(&[Step::SettleSnapshot], &mut history);
    storage.fail(0..0, Errno::ENOSPC);
    assert_eq!(
        storage
            .file_names()
            .iter()
            .filter(|name| name.starts_with("log-"))
            .count(),
        2
    );
    let disk = storage.after(Loss::Unsynced);
    let opened = recover_valid(&disk);
    history.clone().check(&opened.previous, opened.generation);
    assert!(opened.log_bytes > opened.log.synced_bytes());

    let log_bytes = run.journal.log_bytes();
    let steps = [
        Step::BeginSnapshot,
        Step::Append(failed(4, 1)),
        Step::Settle,
        Step::SettleSnapshot,
    ];
    run.complete(&steps, &mut history);
    assert!(run.journal.log_bytes() < log_bytes);
    let notices = run.close(&mut history);
    assert!(
        notices.iter().all(|notice| !is_failure(notice)),
        "{notices:?}"
    );
    let names = storage.file_names();
    assert!(names.contains(&"log-3".to_string()) && names.contains(&"snapshot-3".to_string()));
    assert!(
        !names
            .iter()
            .any(|name| ["log-1", "log-2"].contains(&name.as_str())),
        "{names:?}"
    );
    let opened = recover_valid(&storage.after(Loss::Unsynced));
    history.check(&opened.previous, opened.generation);
}

#[test]
fn record_above_the_limit_is_returned() {
    let (storage, mut history) = (FaultyStorage::default(), History::default());
    let run = TestRun::start(&storage, &mut history);
    let payload = Bytes::from(vec![0; 1 << 20]);
    let large_task = |id| StoredTask {
        payload: payload.clone(),
        ..task(id)
    };
    let record = Record::TasksAdded {
        tasks: (0..1024).map(large_task).collect(),
    };
    let refusal = run.journal.append(record).expect_err("a refusal");
    assert!(matches!(refusal, AppendError::TooLarge { .. }), "{refusal}");
    run.close(&mut history);
}
