//! Tests of the history in memory and of its file.

use proptest::prelude::*;
use pvm_rm::store::file::{FILE_BYTES_MAX, OpenedHistory};
use pvm_rm::store::history::{
    ATTEMPTS_MAX, DECISIONS_BYTES_MAX, DECISIONS_MAX, JOBS_MAX, PROGRAM_BYTES_MAX, TASKS_MAX,
};
use pvm_rm::store::{Batch, History, HistoryFile, LogPosition, Table};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::{MigrationCause, Usage};
use sempa_proto::rm::{
    self, DecisionKind, JobUsage, PlacementAttempt, PlacementRule, RejectedHost, RmQuery, RmReply,
    TaskOutcome, TaskUsage, UsageTotals,
};
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

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
    let mut books = History::new(USER, rm_tid());
    log.0.iter().for_each(|event| books.apply_event(event));
    books
}

fn job(books: &History, tid: Tid) -> (JobUsage, Vec<TaskUsage>) {
    match books.answer(&RmQuery::Job(tid)) {
        RmReply::Job { job, tasks } => (job, tasks),
        other => panic!("{other:?}"),
    }
}

/// A job consists of a top task and all its descendants, and its usage is the sum of theirs.
#[test]
fn job_sums_usage_of_its_tasks() {
    let books = history_of(&example_log());
    let (job, tasks) = job(&books, task_id(3, 3));
    assert_eq!(
        (job.job, job.user, job.program.as_str(), job.ended),
        (task_id(1, 2), USER, "", None)
    );
    let used = Usage {
        user: Micros::from_secs(24),
        system: Micros(0),
        resident_max_bytes: 15_000,
    };
    let wall = Micros::from_secs(30);
    assert_eq!(
        job.totals,
        UsageTotals {
            tasks: 4,
            running: 2,
            failed: 1,
            used,
            wall_time: wall,
            migrations: 1,
            evictions: 1
        }
    );
    let told: Vec<_> = tasks
        .iter()
        .map(|t| (t.tid, t.host.as_str(), t.ended.map(|(_, how)| how)))
        .collect();
    let expected = [
        (task_id(1, 2), "h1", None),
        (task_id(1, 3), "h1", Some(TaskOutcome::Status(0))),
        (task_id(2, 3), "h3", Some(TaskOutcome::Status(9))),
        (task_id(3, 3), "h3", None),
    ];
    assert_eq!(told, expected);
    let RmReply::Users(users) = books.answer(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!((users.len(), users[0].totals), (1, job.totals));
    assert_eq!(
        books.answer(&RmQuery::Users { user: Some(7) }),
        RmReply::Users(Vec::new())
    );
}

/// Appends the restart of a job: each host reports the start of its tasks, and then the master
/// reports the restart.
fn append_restart(log: &mut EventLog, at: u64, all: &[(Tid, Tid, u16)]) {
    for (tid, parent, host) in all {
        log.append(
            at,
            *host,
            EventKind::TaskStarted {
                tid: *tid,
                parent: *parent,
                name: "worker".into(),
                user: USER,
            },
        );
    }
    let tasks = all
        .iter()
        .map(|(tid, _, host)| (*tid, host_id(*host)))
        .collect();
    let why = "h1 was lost".to_string();
    log.append(
        at + 1,
        1,
        EventKind::Restarted {
            checkpoint: "s".into(),
            job: task_id(1, 3),
            tasks,
            why,
        },
    );
}

/// Task number and birth host of a top task, its child and its grandchild.
const FAMILY: [(u32, u16); 3] = [(3, 1), (4, 2), (5, 2)];

fn family(parent: Tid) -> [(Tid, Tid, u16); 3] {
    let [top, child, last] = FAMILY.map(|(local, host)| task_id(host, local));
    [(top, parent, 3), (child, top, 3), (last, child, 2)]
}

/// After a restart all tasks belong to one job, in whatever order their starts are reported.
#[test]
fn restarted_job_is_complete_in_any_report_order() {
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for (order, same_machine) in orders
        .into_iter()
        .flat_map(|order| [(order, true), (order, false)])
    {
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
        if same_machine {
            family(Tid::NONE)
                .iter()
                .for_each(|(tid, parent, _)| log.started(2, *tid, *parent, "worker"));
            log.moved(8, task_id(2, 4), 2, 3, owner());
            family(Tid::NONE)
                .iter()
                .for_each(|(tid, ..)| log.ended(12, *tid, 9, 1_000));
        }
        append_restart(&mut log, 20, &order.map(|at| family(Tid::NONE)[at]));
        let mut books = history_of(&log);
        let (job, tasks) = job(&books, task_id(2, 5));
        assert_eq!(
            (job.job, job.program.as_str(), job.ended),
            (task_id(1, 3), "worker", None),
            "{order:?}"
        );
        assert_eq!(
            (job.totals.tasks, job.totals.running, job.totals.failed),
            (3, 3, 0),
            "{order:?}"
        );
        let told: BTreeSet<_> = tasks
            .iter()
            .map(|t| (t.tid, t.host.clone(), t.ended.is_none()))
            .collect();
        assert_eq!(
            told,
            family(Tid::NONE)
                .map(|(tid, _, host)| (tid, format!("h{host}"), true))
                .into(),
            "{order:?}"
        );
        let RmReply::Jobs(jobs) = books.answer(&RmQuery::Jobs { user: None }) else {
            panic!("no jobs")
        };
        let alive: Vec<_> = jobs
            .iter()
            .filter(|job| job.ended.is_none())
            .map(|job| job.job)
            .collect();
        assert_eq!(
            (alive, jobs.len()),
            (vec![task_id(1, 3)], 1 + usize::from(same_machine)),
            "{order:?}"
        );
        let RmReply::Decisions { decisions, .. } =
            books.answer(&RmQuery::TaskDecisions(task_id(2, 4)))
        else {
            panic!("nothing")
        };
        assert!(
            decisions
                .iter()
                .any(|d| matches!(d.kind, DecisionKind::Restarted { .. })),
            "{decisions:?}"
        );
        let early = decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Migrated { .. }));
        assert_eq!(
            early, same_machine,
            "what was decided before it went back is about the same task: {decisions:?}"
        );
        let RmReply::Decisions { decisions, .. } =
            books.answer(&RmQuery::TaskDecisions(task_id(1, 3)))
        else {
            panic!("nothing")
        };
        let moved = decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Migrated { tid, .. } if tid == task_id(2, 4)));
        assert_eq!(
            moved, same_machine,
            "what was decided about a task is about its job: {decisions:?}"
        );
        let mut sheets = Tables::new();
        apply_batch(&mut sheets, books.take_batch());
        assert_eq!(reread(&sheets), books);
    }
}

/// Returns the reported decisions about a task, job or host as texts.
fn reported(books: &History, question: RmQuery) -> Vec<String> {
    let RmReply::Decisions { decisions, .. } = books.answer(&question) else {
        panic!("nothing is known")
    };
    decisions.iter().map(|d| d.kind.to_string()).collect()
}

/// A task that was ended for an owner is reported with the reason, and counts as evicted.
#[test]
fn task_killed_by_owner_counts_as_eviction() {
    let mut log = example_log();
    let (guests, why) = (
        vec![task_id(3, 3), task_id(3, 99)],
        "olga is logged in on pts/1".to_string(),
    );
    log.append(
        30,
        3,
        EventKind::GuestsEnded {
            host: host_id(3),
            guests,
            why: why.clone(),
        },
    );
    log.ended(31, task_id(3, 3), 15, 1_000);
    log.append(
        40,
        3,
        EventKind::GuestsEnded {
            host: host_id(3),
            guests: vec![],
            why,
        },
    );
    let books = history_of(&log);
    let (one, other) = (task_id(3, 3), task_id(3, 99));
    let ended =
        format!("guests ended for the owner of h3: {one} {other}: olga is logged in on pts/1");
    for question in [
        RmQuery::TaskDecisions(task_id(3, 3)),
        RmQuery::TaskDecisions(task_id(1, 2)),
        RmQuery::HostDecisions("h3".into()),
    ] {
        let told = reported(&books, question);
        assert_eq!(
            told.iter().filter(|told| **told == ended).count(),
            1,
            "{told:?}"
        );
        assert!(
            told.iter()
                .all(|told| !told.contains("guests ended for the owner") || *told == ended),
            "{told:?}"
        );
    }
    let (job, tasks) = job(&books, task_id(3, 3));
    assert_eq!((job.totals.migrations, job.totals.evictions), (1, 2));
    assert_eq!(
        (tasks[3].tid, tasks[3].migrations, tasks[3].evictions),
        (task_id(3, 3), 0, 1)
    );
    let RmReply::Users(users) = books.answer(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.evictions, 2);
}

/// Each task of a job that was vacated for an owner counts as evicted.
#[test]
fn vacating_counts_as_eviction_of_each_task() {
    let mut log = EventLog::default();
    let tasks = family(Tid::NONE);
    tasks
        .iter()
        .for_each(|(tid, parent, _)| log.started(2, *tid, *parent, "worker"));
    let parked = |parked, set: &str| {
        let (set, job, bytes, frozen) = (set.to_string(), task_id(1, 3), 9, Micros(5));
        EventKind::Checkpointed {
            checkpoint: set,
            job,
            tasks: 3,
            bytes,
            frozen,
            vacated: parked,
        }
    };
    log.append(5, 1, parked(false, "t40003-20261122T141503-1"));
    assert_eq!(
        job(&history_of(&log), task_id(1, 3)).0.totals.evictions,
        0,
        "it goes on"
    );
    log.append(6, 1, parked(true, "t40003-20261122T141504-1"));
    tasks
        .iter()
        .for_each(|(tid, ..)| log.ended(7, *tid, 9, 1_000));
    assert_eq!(job(&history_of(&log), task_id(1, 3)).0.totals.evictions, 3);
}

/// Each failure is reported in queries for the job or the host that it concerns.
#[test]
fn failures_are_attributed_to_jobs_and_hosts() {
    let mut log = example_log();
    let why = || "no room".to_string();
    log.append(
        30,
        1,
        EventKind::CheckpointFailed {
            job: task_id(1, 2),
            why: why(),
        },
    );
    let (set, cause) = (
        format!("{}-20261122T141503-1", task_id(1, 2)),
        "h1 was lost".to_string(),
    );
    log.append(
        31,
        1,
        EventKind::RestartFailed {
            checkpoint: set.clone(),
            cause: cause.clone(),
            why: why(),
        },
    );
    log.append(
        32,
        1,
        EventKind::RestartFailed {
            checkpoint: "nonsense".into(),
            cause,
            why: why(),
        },
    );
    log.append(
        33,
        3,
        EventKind::TaskerGone {
            host: host_id(3),
            why: "signal 9".into(),
        },
    );
    log.ended(34, task_id(3, 3), 9, 1_000);
    log.append(
        35,
        1,
        EventKind::HostRefused {
            name: "h4".into(),
            why: "no route to it".into(),
        },
    );
    let mut books = history_of(&log);
    let job = reported(&books, RmQuery::TaskDecisions(task_id(1, 2)));
    let tasker = format!(
        "the tasker of h3 has ended (signal 9), and with it {}",
        task_id(3, 3)
    );
    let failed = format!("checkpoint {set} was not restarted (h1 was lost): no room");
    let last = [
        format!("job {} was not checkpointed: no room", task_id(1, 2)),
        failed,
        tasker.clone(),
    ];
    assert_eq!(job[job.len() - 3..], last);
    assert_eq!(
        reported(&books, RmQuery::HostDecisions("h3".into())).last(),
        Some(&tasker)
    );
    assert_eq!(
        reported(&books, RmQuery::HostDecisions("h4".into())),
        ["h4 was not added: no route to it"]
    );
    let mut sheets = Tables::new();
    apply_batch(&mut sheets, books.take_batch());
    assert_eq!(reread(&sheets), books);
}

/// A restarted job still belongs to the job of the task that had spawned it.
#[test]
fn restarted_job_keeps_its_parent() {
    let mut log = example_log();
    family(task_id(1, 2))
        .iter()
        .for_each(|(tid, parent, _)| log.started(30, *tid, *parent, "worker"));
    family(task_id(1, 2))
        .iter()
        .for_each(|(tid, ..)| log.ended(31, *tid, 9, 1_000));
    let [top, child, last] = family(task_id(1, 2));
    append_restart(&mut log, 40, &[last, child, top]);
    let (job, _) = job(&history_of(&log), task_id(2, 5));
    assert_eq!(
        (job.job, job.totals.tasks, job.totals.running),
        (task_id(1, 2), 10, 5)
    );
}

/// Tasks that serve the virtual machine, and consoles without children, do not count as jobs.
#[test]
fn service_tasks_and_consoles_are_no_jobs() {
    let mut log = example_log();
    log.started(30, task_id(1, 77), Tid::NONE, "");
    log.ended(31, task_id(1, 77), 0, 1);
    let RmReply::Jobs(jobs) = history_of(&log).answer(&RmQuery::Jobs { user: None }) else {
        panic!("no jobs")
    };
    assert_eq!(
        jobs.iter().map(|j| j.job).collect::<Vec<_>>(),
        [task_id(1, 2)]
    );
}

/// Each decision is reported in queries for the task and the host that it concerns.
#[test]
fn decisions_are_reported_for_their_subject() {
    let books = history_of(&example_log());
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = books.answer(&RmQuery::TaskDecisions(task_id(2, 3)))
    else {
        panic!()
    };
    assert_eq!((task.migrations, task.evictions), (1, 1));
    assert_eq!(
        decisions
            .iter()
            .map(|d| d.kind.to_string())
            .collect::<Vec<_>>(),
        [
            "t80003 migrated from h2 to h3 because the owner of h2 is present (olga is logged in on pts/1): 4096 \
             bytes, frozen 50.0 ms"
        ]
    );
    let RmReply::Decisions { decisions, .. } = books.answer(&RmQuery::HostDecisions("h2".into()))
    else {
        panic!()
    };
    assert!(
        matches!(decisions[..], [_, _]),
        "it joined, and a task left it: {decisions:?}"
    );
    assert_eq!(
        books.answer(&RmQuery::TaskDecisions(task_id(1, 99))),
        RmReply::NotFound
    );
    assert_eq!(
        books.answer(&RmQuery::HostDecisions("nobody".into())),
        RmReply::NotFound
    );
}

/// When a host is lost, its tasks end. Tasks that are missing in a task list end, too.
#[test]
fn lost_host_or_reconciliation_ends_tasks() {
    let mut log = example_log();
    log.append(
        40,
        1,
        EventKind::HostGone {
            host: host_id(3),
            name: "h3".into(),
            why: "silent".into(),
        },
    );
    let mut books = history_of(&log);
    assert_eq!(
        job(&books, task_id(1, 2)).1[3].ended,
        Some((time_at(40), TaskOutcome::Lost))
    );
    let info = TaskInfo {
        tid: task_id(1, 77),
        parent: Tid::NONE,
        host: host_id(1),
        flags: 0,
        name: String::new(),
        pid: 1,
        uid: USER,
        migrating: false,
        paused: false,
        suspended: false,
    };
    books.reconcile(time_at(50), &[info]);
    let (job, _) = job(&books, task_id(1, 2));
    assert_eq!((job.ended, job.totals.running), (Some(time_at(50)), 0));
}

/// In a new virtual machine the totals of users remain, and tids may be reused.
#[test]
fn new_virtual_machine_keeps_sums_and_reuses_tids() {
    let mut books = history_of(&example_log());
    books.start_new_vm();
    assert_eq!(books.log_position(), LogPosition::default());
    assert_eq!(books.running().count(), 0);
    let mut log = EventLog::default();
    log.started(100, task_id(1, 2), Tid::NONE, "");
    log.started(101, task_id(1, 3), task_id(1, 2), "other");
    log.0.iter().for_each(|event| books.apply_event(event));
    let (job, tasks) = job(&books, task_id(1, 3));
    assert_eq!(
        (tasks.len(), job.totals.tasks),
        (2, 2),
        "the former job of that tid is another one"
    );
    let RmReply::Users(users) = books.answer(&RmQuery::Users { user: None }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.tasks, 6);
}

/// The stored entries, by table and key, as the database file would contain them.
type Tables = BTreeMap<(Table, u64), Vec<u8>>;

fn apply_batch(sheets: &mut Tables, batch: Batch) {
    for change in batch {
        match change.value {
            Some(value) => drop(sheets.insert((change.table, change.key), value)),
            None => drop(sheets.remove(&(change.table, change.key))),
        }
    }
}

fn reread(sheets: &Tables) -> History {
    let entries = sheets
        .iter()
        .map(|((sheet, key), value)| (*sheet, *key, value.clone()));
    let (books, bad) = History::read(USER, rm_tid(), entries);
    assert_eq!(bad, 0);
    books
}

fn questions() -> Vec<RmQuery> {
    let mut all = vec![RmQuery::Users { user: None }, RmQuery::Jobs { user: None }];
    for host in 1..=3 {
        all.push(RmQuery::HostDecisions(format!("h{host}")));
        all.extend((2..12).flat_map(|n| {
            [
                RmQuery::Job(task_id(host, n)),
                RmQuery::TaskDecisions(task_id(host, n)),
            ]
        }));
    }
    all
}

/// Random events without regard to consistency: hosts, tasks, parents and exits in any order.
fn random_events() -> impl Strategy<Value = Vec<(u8, u16, u32, u32, i32)>> {
    prop::collection::vec((0..6_u8, 1..4_u16, 2..12_u32, 0..12_u32, 0..3_i32), 1..80)
}

fn log_of(happenings: &[(u8, u16, u32, u32, i32)]) -> EventLog {
    let (mut log, mut seen) = (EventLog::default(), BTreeSet::new());
    for (n, (what, host, local, other, status)) in happenings.iter().copied().enumerate() {
        let (at, tid) = (n as u64, task_id(host, local));
        let parent = if other < 2 {
            Tid::NONE
        } else {
            task_id(1, other)
        };
        match what {
            0 => {
                log.append(
                    at,
                    1,
                    EventKind::HostAdded {
                        host: host_id(host),
                        name: format!("h{host}"),
                    },
                );
            }
            // Skipped, because a tid is reused only after a quarter of a million other tids.
            1 | 2 if seen.contains(&tid) => {}
            1 | 2 => {
                seen.extend([tid, parent]);
                log.started(at, tid, parent, if other == 0 { "" } else { "worker" });
            }
            3 => log.ended(at, tid, status, u64::from(local)),
            4 => log.moved(at, tid, host, 1 + host % 3, owner()),
            _ => {
                let name = format!("h{host}");
                log.append(
                    at,
                    1,
                    EventKind::HostGone {
                        host: host_id(host),
                        name,
                        why: "lost".into(),
                    },
                );
            }
        }
    }
    log
}

proptest! {
    /// After a crash at any time, the file and the rest of the event log restore the same history
    /// as without a crash.
    #[test]
    fn crash_neither_repeats_nor_loses_events(
        happenings in random_events(), cut in 0..80_usize, lost in 0..20_usize,
    ) {
        let log = log_of(&happenings);
        let whole = history_of(&log);
        let cut = cut.min(log.0.len());
        let (mut before, mut sheets) = (History::new(USER, rm_tid()), Tables::new());
        log.0[..cut].iter().for_each(|event| before.apply_event(event));
        apply_batch(&mut sheets, before.take_batch());
        // These events were applied but not written before the crash.
        log.0[cut..].iter().take(lost).for_each(|event| before.apply_event(event));
        let mut after = reread(&sheets);
        // Some events are applied twice.
        log.0[cut.saturating_sub(3)..].iter().for_each(|event| after.apply_event(event));
        for question in questions() {
            prop_assert_eq!(after.answer(&question), whole.answer(&question), "{:?}", question);
        }
        prop_assert_eq!(after.log_position(), whole.log_position());
    }

    /// At any time, the batches written so far contain the whole history.
    #[test]
    fn batches_contain_whole_history(happenings in random_events(), every in 1..10_usize) {
        let log = log_of(&happenings);
        let (mut books, mut sheets) = (History::new(USER, rm_tid()), Tables::new());
        for some in log.0.chunks(every) {
            some.iter().for_each(|event| books.apply_event(event));
            apply_batch(&mut sheets, books.take_batch());
            prop_assert!(!books.is_dirty() && books.take_batch().is_empty());
            let again = reread(&sheets);
            for question in questions() {
                prop_assert_eq!(again.answer(&question), books.answer(&question), "{:?}", question);
            }
        }
    }

    /// The totals of each job equal the sums over its tasks.
    #[test]
    fn sums_are_sums_of_tasks(happenings in random_events()) {
        let books = history_of(&log_of(&happenings));
        let RmReply::Jobs(jobs) = books.answer(&RmQuery::Jobs { user: None }) else { panic!("no jobs") };
        for one in jobs {
            let RmReply::Job { job, tasks } = books.answer(&RmQuery::Job(one.job)) else { panic!("it was listed") };
            if job.started != one.started {
                continue;
            }
            let mut sums = UsageTotals::default();
            for task in &tasks {
                sums.tasks += 1;
                sums.running += u64::from(task.ended.is_none());
                sums.failed += u64::from(task.ended.is_some_and(|(_, how)| !how.is_success()));
                sums.used = sums.used.plus(task.used);
                sums.wall_time = sums.wall_time + task.ended.map_or(Micros(0), |(at, _)| at.since(task.started));
                sums.migrations += u64::from(task.migrations);
                sums.evictions += u64::from(task.evictions);
            }
            prop_assert_eq!(job.totals, sums);
            prop_assert_eq!(job.ended.is_none(), job.totals.running > 0);
        }
    }
}

/// If a table exceeds its maximum size, its oldest entries are removed, and the totals remain.
#[test]
fn oldest_entries_are_removed_and_sums_remain() {
    let (mut books, mut sheets) = (History::new(USER, rm_tid()), Tables::new());
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
        books.apply_event(&Event {
            number: 2 * n + 1,
            at,
            host: host_id(1),
            kind: started,
        });
        books.apply_event(&Event {
            number: 2 * n + 2,
            at,
            host: host_id(1),
            kind: ended,
        });
        if n % 10_000 == 0 {
            apply_batch(&mut sheets, books.take_batch());
        }
    }
    for n in 0..DECISIONS_MAX + 10 {
        books.record_decision(
            time_at(n as u64),
            DecisionKind::RmStarted { resumed: false },
        );
    }
    apply_batch(&mut sheets, books.take_batch());
    let count = |sheet| sheets.keys().filter(|(s, _)| *s == sheet).count();
    assert_eq!(
        (
            count(Table::Tasks),
            count(Table::Jobs),
            count(Table::Decisions)
        ),
        (TASKS_MAX, JOBS_MAX, DECISIONS_MAX)
    );
    let RmReply::Users(users) = reread(&sheets).answer(&RmQuery::Users { user: None }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.tasks, tasks as u64);
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

fn large_spawn_decision(n: u32) -> DecisionKind {
    spawn_decision(n, 100, 40, 64)
}

/// The total size of the decisions is bounded, and the newest ones remain.
#[test]
fn decisions_are_bounded_in_bytes() {
    let (mut books, mut sheets) = (History::new(USER, rm_tid()), Tables::new());
    let decisions = 700;
    for n in 0..decisions {
        books.record_decision(time_at(n.into()), large_spawn_decision(n));
        if n % 50 == 0 {
            apply_batch(&mut sheets, books.take_batch());
        }
    }
    apply_batch(&mut sheets, books.take_batch());
    let kept: Vec<(u64, usize)> = sheets
        .iter()
        .filter(|((sheet, _), _)| *sheet == Table::Decisions)
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
    let mut again = reread(&sheets);
    again.record_decision(time_at(9999), large_spawn_decision(9999));
    apply_batch(&mut sheets, again.take_batch());
    let RmReply::Decisions { decisions, .. } =
        again.answer(&RmQuery::TaskDecisions(task_id(2, 10 + 1999 * 100)))
    else {
        panic!("kept")
    };
    let DecisionKind::Spawn { attempts, .. } = &decisions[0].kind else {
        panic!("{decisions:?}")
    };
    assert_eq!(attempts.len(), ATTEMPTS_MAX);
    let count = |sheets: &Tables| {
        sheets
            .keys()
            .filter(|(sheet, _)| *sheet == Table::Decisions)
            .count()
    };
    assert!(count(&sheets) <= kept.len() + 1);
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

/// Adds the maximum number of decisions, of typical size.
fn fill_decisions(books: &mut History) {
    (0..DECISIONS_MAX as u32)
        .for_each(|n| books.record_decision(time_at(n.into()), spawn_decision(n, 4, 1, 8)));
}

/// Returns a history of the maximum size.
fn full_history() -> History {
    let mut books = History::new(USER, rm_tid());
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
        books.apply_event(&Event {
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
            books.apply_event(&Event {
                number: u64::from(2 * n) + 2,
                at: time_at(n.into()),
                host: host_id(1),
                kind: ended,
            });
        }
    }
    fill_decisions(&mut books);
    books
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
    let mut books = full_history();
    let opened = open_store(dir.path());
    // The content is written several times, as it would be over a long time.
    for _ in 0..3 {
        write_batch(&opened.store, books.take_batch());
        fill_decisions(&mut books);
    }
    write_batch(&opened.store, books.take_batch());
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
        "{} MB of books are read in {:.0} ms",
        length / 1_000_000,
        took.as_secs_f64() * 1e3
    );
    assert_eq!(
        (bad, moved_aside, read.running().count()),
        (0, None, books.running().count())
    );
    assert_eq!(
        (read.log_position(), read.running().count()),
        (books.log_position(), 1000)
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
    let mut books = history_of(&example_log());
    opened.store.close(books.take_batch());
    let again = open_store(&place);
    let (read, bad) = History::read(USER, rm_tid(), again.entries);
    assert_eq!(
        (bad, read.log_position(), read.running().count()),
        (0, books.log_position(), 2)
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
    let mut books = history_of(&example_log());
    open_store(dir.path()).store.close(books.take_batch());
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
