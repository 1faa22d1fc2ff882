//! Tests of the history in memory and of its file.

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

fn task_id(host: u16, local: u32) -> Tid {
    Tid::task(host_id(host), local).expect("a task")
}

fn rm_tid() -> Tid {
    task_id(1, 1)
}

fn time_at(n: u64) -> Micros {
    Micros::from_secs(1_700_000_000 + n)
}

/// An event log that tests append to.
#[derive(Default)]
struct EventLog(Vec<Event>);

impl EventLog {
    fn append(&mut self, at: u64, host: u16, kind: EventKind) -> &Event {
        let number = self.0.len() as u64 + 1;
        self.0.push(Event {
            number,
            at: time_at(at),
            host: host_id(host),
            kind,
        });
        self.0.last().expect("pushed a moment ago")
    }

    fn started(&mut self, at: u64, tid: Tid, parent: Tid, name: &str) {
        let host = tid.birth_host().map_or(1, HostId::index);
        self.append(
            at,
            host,
            EventKind::TaskStarted {
                tid,
                parent,
                name: name.into(),
                user: USER,
            },
        );
    }

    fn ended(&mut self, at: u64, tid: Tid, status: i32, millis: u64) {
        let used = Usage {
            user: Micros::from_millis(millis),
            resident_max_bytes: millis,
            ..Usage::default()
        };
        self.append(
            at,
            tid.birth_host().map_or(1, HostId::index),
            EventKind::TaskEnded { tid, status, used },
        );
    }

    fn moved(&mut self, at: u64, tid: Tid, from: u16, to: u16, cause: MigrationCause) {
        let id = MigrationId(self.0.len() as u64);
        let (source, target, frozen, whole) =
            (host_id(from), host_id(to), Micros(50_000), Micros(80_000));
        let (bytes, resident) = (4096, 1 << 20);
        let kind = EventKind::Migrated {
            id,
            tid,
            from: source,
            to: target,
            cause,
            bytes,
            resident,
            frozen,
            transfer_time: whole,
        };
        self.append(at, to, kind);
    }
}

fn owner() -> MigrationCause {
    MigrationCause::Owner {
        why: "olga is logged in on pts/1".into(),
    }
}

/// Returns the log of a job: a task from a command line with three workers. One worker succeeds,
/// one is killed after an eviction, and one still runs.
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
    log.started(0, rm_tid(), Tid::NONE, "pvm-rm");
    log.started(0, task_id(2, 9), Tid::NONE, "/opt/bin/pvm-load-watcher");
    log.started(1, task_id(1, 2), Tid::NONE, "");
    log.started(2, task_id(1, 3), task_id(1, 2), "worker");
    log.started(2, task_id(2, 3), task_id(1, 2), "worker");
    log.started(3, task_id(3, 3), task_id(2, 3), "helper");
    log.ended(12, task_id(1, 3), 0, 9_000);
    log.moved(13, task_id(2, 3), 2, 3, owner());
    log.ended(22, task_id(2, 3), 9, 15_000);
    log
}

fn history_of(log: &EventLog) -> History {
    let mut history = History::new(USER, rm_tid());
    log.0.iter().for_each(|event| history.apply_event(event));
    history
}

fn job(history: &History, tid: Tid) -> (JobUsage, Vec<TaskUsage>) {
    match history.answer(&RmQuery::Job(tid)) {
        RmReply::Job { job, tasks } => (job, tasks),
        other => panic!("{other:?}"),
    }
}

/// Returns the reported decisions about a task, job or host as texts.
fn reported(history: &History, question: RmQuery) -> Vec<String> {
    let RmReply::Decisions { decisions, .. } = history.answer(&question) else {
        panic!("nothing is known")
    };
    decisions.iter().map(|d| d.kind.to_string()).collect()
}

/// The stored entries, by table and key, as the database file would contain them.
type Tables = BTreeMap<(Table, u64), Vec<u8>>;

fn apply_batch(tables: &mut Tables, batch: Batch) {
    for change in batch {
        match change.value {
            Some(value) => drop(tables.insert((change.table, change.key), value)),
            None => drop(tables.remove(&(change.table, change.key))),
        }
    }
}

fn reread(tables: &Tables) -> History {
    let entries = tables
        .iter()
        .map(|((table, key), value)| (*table, *key, value.clone()));
    let (history, bad) = History::read(USER, rm_tid(), entries);
    assert_eq!(bad, 0);
    history
}

/// Returns the decision about a spawn with these numbers of tasks, attempts, and excluded hosts.
fn spawn_decision(n: u32, tasks: u32, attempts: usize, hosts: u32) -> DecisionKind {
    let why = rm::RejectionReason::Other {
        why: "its owner allows two tasks, and as many are present".into(),
    };
    let not_used = (0..hosts)
        .map(|host| RejectedHost {
            host: format!("host{host}.example.org"),
            why: why.clone(),
        })
        .collect();
    let sentence = "largest share of a processor, 1.97 on h2; not used: h3".to_string();
    let attempt = PlacementAttempt {
        rule: PlacementRule::Rank,
        reason: sentence,
        rejected: not_used,
    };
    DecisionKind::Spawn {
        program: "worker".into(),
        requested_by: task_id(1, 2),
        job: task_id(1, 2),
        user: USER,
        count: tasks,
        started: (0..tasks)
            .map(|i| {
                (
                    task_id(2, 10 + n % 2000 * 100 + i),
                    format!("host{i}.example.org"),
                )
            })
            .collect(),
        error: None,
        waited: Micros(0),
        attempts: vec![attempt; attempts],
    }
}
