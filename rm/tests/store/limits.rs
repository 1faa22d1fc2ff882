//! Limits on the number of entries and on the size of decisions in the history.

use crate::{
    StoredEntries, USER, apply_batch, event_time, host_id, read_history, rm_tid, spawn_decision,
    task_id,
};
use pvm_rm::store::history::{
    ATTEMPTS_MAX, DECISIONS_BYTES_MAX, DECISIONS_MAX, JOBS_MAX, PROGRAM_BYTES_MAX, TASKS_MAX,
};
use pvm_rm::store::{History, Table};
use sempa_proto::Tid;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};

/// If a table has more entries than its limit allows, its oldest entries are removed. The totals of
/// users remain.
#[test]
fn oldest_entries_are_removed_and_totals_remain() {
    let (mut history, mut tables) = (History::new(USER, rm_tid()), StoredEntries::new());
    let task_count = TASKS_MAX + 1000;
    for n in 0..task_count as u64 {
        let (tid, event_time) = (task_id(1, 2 + (n % 200_000) as u32), event_time(n));
        let started_event = EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: "short".into(),
            user: USER,
        };
        let ended_event = EventKind::TaskEnded {
            tid,
            status: 0,
            used: Usage::default(),
        };
        history.apply_event(&Event {
            number: 2 * n + 1,
            at: event_time,
            host: host_id(1),
            kind: started_event,
        });
        history.apply_event(&Event {
            number: 2 * n + 2,
            at: event_time,
            host: host_id(1),
            kind: ended_event,
        });
        if n % 10_000 == 0 {
            apply_batch(&mut tables, history.take_batch());
        }
    }
    for n in 0..DECISIONS_MAX + 10 {
        history.record_decision(
            event_time(n as u64),
            DecisionKind::RmStarted {
                continues_state: false,
            },
        );
    }
    apply_batch(&mut tables, history.take_batch());
    let entry_count = |table| tables.keys().filter(|(s, _)| *s == table).count();
    assert_eq!(
        (
            entry_count(Table::Tasks),
            entry_count(Table::Jobs),
            entry_count(Table::Decisions)
        ),
        (TASKS_MAX, JOBS_MAX, DECISIONS_MAX)
    );
    let RmReply::Users(users) = read_history(&tables).answer_query(&RmQuery::Users { user: None })
    else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.task_count, task_count as u64);
}

fn large_spawn_decision(n: u32) -> DecisionKind {
    spawn_decision(n, 100, 40, 64)
}

/// The decisions have at most [`DECISIONS_BYTES_MAX`] bytes altogether, and the newest ones remain.
/// The attempts of a spawn and the name of a program are limited too.
#[test]
fn decisions_are_bounded_in_bytes() {
    let (mut history, mut tables) = (History::new(USER, rm_tid()), StoredEntries::new());
    let decisions = 700;
    for n in 0..decisions {
        history.record_decision(event_time(n.into()), large_spawn_decision(n));
        if n % 50 == 0 {
            apply_batch(&mut tables, history.take_batch());
        }
    }
    apply_batch(&mut tables, history.take_batch());
    let stored_sizes: Vec<(u64, usize)> = tables
        .iter()
        .filter(|((table, _), _)| *table == Table::Decisions)
        .map(|((_, n), v)| (*n, v.len()))
        .collect();
    let bytes: u64 = stored_sizes.iter().map(|(_, bytes)| *bytes as u64).sum();
    assert!(
        bytes <= DECISIONS_BYTES_MAX && bytes > DECISIONS_BYTES_MAX / 10 * 9,
        "{bytes}"
    );
    assert_eq!(
        stored_sizes.last().map(|(n, _)| *n),
        Some(u64::from(decisions))
    );
    assert!(stored_sizes.len() < 600, "{}", stored_sizes.len());
    // A history that was read from the file enforces the same limit.
    let mut restored_history = read_history(&tables);
    restored_history.record_decision(event_time(9999), large_spawn_decision(9999));
    apply_batch(&mut tables, restored_history.take_batch());
    let RmReply::Decisions { decisions, .. } =
        restored_history.answer_query(&RmQuery::TaskDecisions(task_id(2, 10 + 1999 * 100)))
    else {
        panic!("kept")
    };
    let DecisionKind::Spawn { attempts, .. } = &decisions[0].kind else {
        panic!("{decisions:?}")
    };
    assert_eq!(attempts.len(), ATTEMPTS_MAX);
    let decision_count = |tables: &StoredEntries| {
        tables
            .keys()
            .filter(|(table, _)| *table == Table::Decisions)
            .count()
    };
    assert!(decision_count(&tables) <= stored_sizes.len() + 1);
    let long_name_event = EventKind::TaskStarted {
        tid: task_id(1, 5),
        parent: Tid::NONE,
        name: "x".repeat(100_000),
        user: USER,
    };
    restored_history.apply_event(&Event {
        number: 1,
        at: event_time(1),
        host: host_id(1),
        kind: long_name_event,
    });
    assert!(
        restored_history
            .running_tasks()
            .all(|task| task.program.len() <= PROGRAM_BYTES_MAX)
    );
}
