//! Tests of the history in memory and of the file that stores it.

mod batches;
mod decisions;
mod file;
mod limits;
mod usage;

use pvm_rm::store::{Batch, History, Table};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::{MigrationCause, Usage};
use sempa_proto::rm::{
    self, DecisionKind, JobUsage, PlacementAttempt, PlacementRule, RejectedHost, RmQuery, RmReply,
    TaskUsage,
};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::BTreeMap;

const USER: u32 = 1000;

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn task_id(host: u16, local_number: u32) -> Tid {
    Tid::for_task(host_id(host), local_number).expect("a task")
}

fn rm_tid() -> Tid {
    task_id(1, 1)
}

fn event_time(second: u64) -> Micros {
    Micros::from_secs(1_700_000_000 + second)
}

/// An event log to which tests append events. The times of the appended events are given in
/// seconds, which [`event_time`] converts.
#[derive(Default)]
struct EventLog(Vec<Event>);

impl EventLog {
    fn append(&mut self, second: u64, host: u16, kind: EventKind) -> &Event {
        let number = self.0.len() as u64 + 1;
        self.0.push(Event {
            number,
            at: event_time(second),
            host: host_id(host),
            kind,
        });
        self.0.last().expect("pushed a moment ago")
    }

    fn append_start(&mut self, second: u64, tid: Tid, parent: Tid, name: &str) {
        let host = tid.birth_host().map_or(1, HostId::index);
        self.append(
            second,
            host,
            EventKind::TaskStarted {
                tid,
                parent,
                name: name.into(),
                user: USER,
            },
        );
    }

    fn append_end(&mut self, second: u64, tid: Tid, status: i32, cpu_ms: u64) {
        let usage = Usage {
            user: Micros::from_millis(cpu_ms),
            resident_max_bytes: cpu_ms,
            ..Usage::default()
        };
        self.append(
            second,
            tid.birth_host().map_or(1, HostId::index),
            EventKind::TaskEnded {
                tid,
                status,
                used: usage,
            },
        );
    }

    fn append_migration(
        &mut self,
        second: u64,
        tid: Tid,
        source_index: u16,
        target_index: u16,
        cause: MigrationCause,
    ) {
        let id = MigrationId(self.0.len() as u64);
        let (source, target, freeze_duration, transfer_time) = (
            host_id(source_index),
            host_id(target_index),
            Micros(50_000),
            Micros(80_000),
        );
        let (bytes, resident) = (4096, 1 << 20);
        let kind = EventKind::Migrated {
            id,
            tid,
            from: source,
            to: target,
            cause,
            bytes,
            resident,
            frozen: freeze_duration,
            transfer_time,
        };
        self.append(second, target_index, kind);
    }
}

fn owner_cause() -> MigrationCause {
    MigrationCause::Owner {
        why: "olga is logged in on pts/1".into(),
    }
}

/// Returns the log of a job: a task from a command line, two workers, and a helper that one of the
/// workers has spawned. One worker succeeds, the other is killed after an eviction, and the helper
/// is still running.
fn example_log() -> EventLog {
    let mut log = EventLog::default();
    for host in 1..=3 {
        log.append(
            0,
            1,
            EventKind::HostAdded {
                host: host_id(host),
                name: format!("h{host}"),
            },
        );
    }
    log.append_start(0, rm_tid(), Tid::NONE, "pvm-rm");
    log.append_start(0, task_id(2, 9), Tid::NONE, "/opt/bin/pvm-load-watcher");
    log.append_start(1, task_id(1, 2), Tid::NONE, "");
    log.append_start(2, task_id(1, 3), task_id(1, 2), "worker");
    log.append_start(2, task_id(2, 3), task_id(1, 2), "worker");
    log.append_start(3, task_id(3, 3), task_id(2, 3), "helper");
    log.append_end(12, task_id(1, 3), 0, 9_000);
    log.append_migration(13, task_id(2, 3), 2, 3, owner_cause());
    log.append_end(22, task_id(2, 3), 9, 15_000);
    log
}

fn build_history(log: &EventLog) -> History {
    let mut history = History::new(USER, rm_tid());
    log.0.iter().for_each(|event| history.apply_event(event));
    history
}

fn query_job(history: &History, tid: Tid) -> (JobUsage, Vec<TaskUsage>) {
    match history.answer_query(&RmQuery::Job(tid)) {
        RmReply::Job { job, tasks } => (job, tasks),
        other => panic!("{other:?}"),
    }
}

/// Returns the decisions that a query reports, as texts.
fn query_decision_texts(history: &History, query: RmQuery) -> Vec<String> {
    let RmReply::Decisions { decisions, .. } = history.answer_query(&query) else {
        panic!("nothing is known")
    };
    decisions.iter().map(|d| d.kind.to_string()).collect()
}

/// The stored entries by table and key, as the database file contains them.
type StoredEntries = BTreeMap<(Table, u64), Vec<u8>>;

fn apply_batch(tables: &mut StoredEntries, batch: Batch) {
    for entry in batch {
        match entry.value {
            Some(value) => drop(tables.insert((entry.table, entry.key), value)),
            None => drop(tables.remove(&(entry.table, entry.key))),
        }
    }
}

fn read_history(tables: &StoredEntries) -> History {
    let entries = tables
        .iter()
        .map(|((table, key), value)| (*table, *key, value.clone()));
    let (history, damaged_count) = History::from_entries(USER, rm_tid(), entries);
    assert_eq!(damaged_count, 0);
    history
}

/// Returns the decision about a spawn of `task_count` tasks, with this number of attempts and this
/// number of excluded hosts in each attempt. `seed` determines the tids.
fn spawn_decision(
    seed: u32,
    task_count: u32,
    attempt_count: usize,
    excluded_count: u32,
) -> DecisionKind {
    let rejection = rm::RejectionReason::Other {
        why: "its owner allows two tasks, and as many are present".into(),
    };
    let rejected_hosts = (0..excluded_count)
        .map(|host| RejectedHost {
            host: format!("host{host}.example.org"),
            why: rejection.clone(),
        })
        .collect();
    let reason = "largest share of a processor, 1.97 on h2; not used: h3".to_string();
    let attempt = PlacementAttempt {
        rule: PlacementRule::Rank,
        reason,
        rejected_hosts,
    };
    DecisionKind::Spawn {
        program: "worker".into(),
        requested_by: task_id(1, 2),
        job: task_id(1, 2),
        user: USER,
        count: task_count,
        started: (0..task_count)
            .map(|i| {
                (
                    task_id(2, 10 + seed % 2000 * 100 + i),
                    format!("host{i}.example.org"),
                )
            })
            .collect(),
        error: None,
        waited: Micros(0),
        attempts: vec![attempt; attempt_count],
    }
}
