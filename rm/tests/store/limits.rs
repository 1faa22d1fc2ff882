//! Limits on the number of entries and on the size of decisions.

use crate::{Tables, USER, apply_batch, host_id, reread, rm_tid, spawn_decision, task_id, time_at};
use pvm_rm::store::history::{
    ATTEMPTS_MAX, DECISIONS_BYTES_MAX, DECISIONS_MAX, JOBS_MAX, PROGRAM_BYTES_MAX, TASKS_MAX,
};
use pvm_rm::store::{History, Table};
use sempa_proto::Tid;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::Usage;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};

/// If a table exceeds its maximum size, its oldest entries are removed, and the totals remain.
#[test]
fn oldest_entries_are_removed_and_sums_remain() {
    let (mut history, mut tables) = (History::new(USER, rm_tid()), Tables::new());
    let tasks = TASKS_MAX + 1000;
    for n in 0..tasks as u64 {
        let (tid, at) = (task_id(1, 2 + (n % 200_000) as u32), time_at(n));
        let started = EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: "short".into(),
            user: USER,
        };
        let ended = EventKind::TaskEnded {
            tid,
            status: 0,
            used: Usage::default(),
        };
        history.apply_event(&Event {
            number: 2 * n + 1,
            at,
            host: host_id(1),
            kind: started,
        });
        history.apply_event(&Event {
            number: 2 * n + 2,
            at,
            host: host_id(1),
            kind: ended,
        });
        if n % 10_000 == 0 {
            apply_batch(&mut tables, history.take_batch());
        }
    }
    for n in 0..DECISIONS_MAX + 10 {
        history.record_decision(
            time_at(n as u64),
            DecisionKind::RmStarted { resumed: false },
        );
    }
    apply_batch(&mut tables, history.take_batch());
    let count = |table| tables.keys().filter(|(s, _)| *s == table).count();
    assert_eq!(
        (
            count(Table::Tasks),
            count(Table::Jobs),
            count(Table::Decisions)
        ),
        (TASKS_MAX, JOBS_MAX, DECISIONS_MAX)
    );
    let RmReply::Users(users) = reread(&tables).answer(&RmQuery::Users { user: None }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.tasks, tasks as u64);
}

fn large_spawn_decision(n: u32) -> DecisionKind {
    spawn_decision(n, 100, 40, 64)
}

/// The total size of the decisions is bounded, and the newest ones remain.
#[test]
fn decisions_are_bounded_in_bytes() {
    let (mut history, mut tables) = (History::new(USER, rm_tid()), Tables::new());
    let decisions = 700;
    for n in 0..decisions {
        history.record_decision(time_at(n.into()), large_spawn_decision(n));
        if n % 50 == 0 {
            apply_batch(&mut tables, history.take_batch());
        }
    }
    apply_batch(&mut tables, history.take_batch());
    let kept: Vec<(u64, usize)> = tables
        .iter()
        .filter(|((table, _), _)| *table == Table::Decisions)
        .map(|((_, n), v)| (*n, v.len()))
        .collect();
    let bytes: u64 = kept.iter().map(|(_, bytes)| *bytes as u64).sum();
    assert!(
        bytes <= DECISIONS_BYTES_MAX && bytes > DECISIONS_BYTES_MAX / 10 * 9,
        "{bytes}"
    );
    assert_eq!(kept.last().map(|(n, _)| *n), Some(u64::from(decisions)));
    assert!(kept.len() < 600, "{}", kept.len());
    // A history that was read from the file computes the same sizes.
    let mut again = reread(&tables);
    again.record_decision(time_at(9999), large_spawn_decision(9999));
    apply_batch(&mut tables, again.take_batch());
    let RmReply::Decisions { decisions, .. } =
        again.answer(&RmQuery::TaskDecisions(task_id(2, 10 + 1999 * 100)))
    else {
        panic!("kept")
    };
    let DecisionKind::Spawn { attempts, .. } = &decisions[0].kind else {
        panic!("{decisions:?}")
    };
    assert_eq!(attempts.len(), ATTEMPTS_MAX);
    let count = |tables: &Tables| {
        tables
            .keys()
            .filter(|(table, _)| *table == Table::Decisions)
            .count()
    };
    assert!(count(&tables) <= kept.len() + 1);
    let long = EventKind::TaskStarted {
        tid: task_id(1, 5),
        parent: Tid::NONE,
        name: "x".repeat(100_000),
        user: USER,
    };
    again.apply_event(&Event {
        number: 1,
        at: time_at(1),
        host: host_id(1),
        kind: long,
    });
    assert!(
        again
            .running()
            .all(|task| task.program.len() <= PROGRAM_BYTES_MAX)
    );
}
