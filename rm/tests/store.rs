//! The history as a value, and the file it is written to.

use proptest::prelude::*;
use pvm_rm::store::books::{
    ATTEMPTS_MAX, DECISIONS_BYTES_MAX, DECISIONS_MAX, JOBS_MAX, PROGRAM_BYTES_MAX, TASKS_MAX,
};
use pvm_rm::store::file::{FILE_BYTES_MAX, Opened};
use pvm_rm::store::{Batch, Books, Place, Sheet, Store};
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

fn h(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn t(host: u16, local: u32) -> Tid {
    Tid::task(h(host), local).expect("a task")
}

fn own() -> Tid {
    t(1, 1)
}

fn second(n: u64) -> Micros {
    Micros::from_secs(1_700_000_000 + n)
}

/// An event log that tests append to.
#[derive(Default)]
struct Log(Vec<Event>);

impl Log {
    fn say(&mut self, at: u64, host: u16, kind: EventKind) -> &Event {
        let number = self.0.len() as u64 + 1;
        self.0.push(Event {
            number,
            at: second(at),
            host: h(host),
            kind,
        });
        self.0.last().expect("pushed a moment ago")
    }

    fn started(&mut self, at: u64, tid: Tid, parent: Tid, name: &str) {
        let host = tid.birth_host().map_or(1, HostId::index);
        self.say(
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
        self.say(
            at,
            tid.birth_host().map_or(1, HostId::index),
            EventKind::TaskEnded { tid, status, used },
        );
    }

    fn moved(&mut self, at: u64, tid: Tid, from: u16, to: u16, cause: MigrationCause) {
        let id = MigrationId(self.0.len() as u64);
        let (source, target, frozen, whole) = (h(from), h(to), Micros(50_000), Micros(80_000));
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
        self.say(at, to, kind);
    }
}

fn owner() -> MigrationCause {
    MigrationCause::Owner {
        why: "olga is logged in on pts/1".into(),
    }
}

/// A job of a command-line task with three workers: one succeeds, one is killed after an eviction,
/// one runs.
fn story() -> Log {
    let mut log = Log::default();
    for host in 1..=3 {
        log.say(
            0,
            1,
            EventKind::HostAdded {
                host: h(host),
                name: format!("h{host}"),
            },
        );
    }
    log.started(0, own(), Tid::NONE, "pvm-rm");
    log.started(0, t(2, 9), Tid::NONE, "/opt/bin/pvm-load-watcher");
    log.started(1, t(1, 2), Tid::NONE, "");
    log.started(2, t(1, 3), t(1, 2), "worker");
    log.started(2, t(2, 3), t(1, 2), "worker");
    log.started(3, t(3, 3), t(2, 3), "helper");
    log.ended(12, t(1, 3), 0, 9_000);
    log.moved(13, t(2, 3), 2, 3, owner());
    log.ended(22, t(2, 3), 9, 15_000);
    log
}

fn books(log: &Log) -> Books {
    let mut books = Books::new(USER, own());
    log.0.iter().for_each(|event| books.event(event));
    books
}

fn job(books: &Books, tid: Tid) -> (JobUsage, Vec<TaskUsage>) {
    match books.answer(&RmQuery::Job(tid)) {
        RmReply::Job { job, tasks } => (job, tasks),
        other => panic!("{other:?}"),
    }
}

/// A job is a top-level task with all its descendants and sums their usage.
#[test]
fn job_sums_usage_of_its_tasks() {
    let books = books(&story());
    let (job, tasks) = job(&books, t(3, 3));
    assert_eq!(
        (job.job, job.user, job.program.as_str(), job.ended),
        (t(1, 2), USER, "", None)
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
        (t(1, 2), "h1", None),
        (t(1, 3), "h1", Some(TaskOutcome::Status(0))),
        (t(2, 3), "h3", Some(TaskOutcome::Status(9))),
        (t(3, 3), "h3", None),
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

/// Restarts a job: each host reports the start of its tasks, and then the master reports the
/// restart.
fn again(log: &mut Log, at: u64, all: &[(Tid, Tid, u16)]) {
    for (tid, parent, host) in all {
        log.say(
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
    let tasks = all.iter().map(|(tid, _, host)| (*tid, h(*host))).collect();
    let why = "h1 was lost".to_string();
    log.say(
        at + 1,
        1,
        EventKind::Restarted {
            checkpoint: "s".into(),
            job: t(1, 3),
            tasks,
            why,
        },
    );
}

/// Local number and home host of a root task, its child and its grandchild.
const LINE: [(u32, u16); 3] = [(3, 1), (4, 2), (5, 2)];

fn line(above: Tid) -> [(Tid, Tid, u16); 3] {
    let [top, child, last] = LINE.map(|(local, host)| t(host, local));
    [(top, above, 3), (child, top, 3), (last, child, 2)]
}

/// A restarted job is complete, in whatever order its tasks are reported.
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
        let mut log = Log::default();
        for host in 1..=3 {
            log.say(
                0,
                1,
                EventKind::HostAdded {
                    host: h(host),
                    name: format!("h{host}"),
                },
            );
        }
        if same_machine {
            line(Tid::NONE)
                .iter()
                .for_each(|(tid, parent, _)| log.started(2, *tid, *parent, "worker"));
            log.moved(8, t(2, 4), 2, 3, owner());
            line(Tid::NONE)
                .iter()
                .for_each(|(tid, ..)| log.ended(12, *tid, 9, 1_000));
        }
        again(&mut log, 20, &order.map(|at| line(Tid::NONE)[at]));
        let mut books = books(&log);
        let (job, tasks) = job(&books, t(2, 5));
        assert_eq!(
            (job.job, job.program.as_str(), job.ended),
            (t(1, 3), "worker", None),
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
            line(Tid::NONE)
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
            (vec![t(1, 3)], 1 + usize::from(same_machine)),
            "{order:?}"
        );
        let RmReply::Decisions { decisions, .. } = books.answer(&RmQuery::TaskDecisions(t(2, 4)))
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
        let RmReply::Decisions { decisions, .. } = books.answer(&RmQuery::TaskDecisions(t(1, 3)))
        else {
            panic!("nothing")
        };
        let moved = decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Migrated { tid, .. } if tid == t(2, 4)));
        assert_eq!(
            moved, same_machine,
            "what was decided about a task is about its job: {decisions:?}"
        );
        let mut sheets = Sheets::new();
        apply(&mut sheets, books.batch());
        assert_eq!(reread(&sheets), books);
    }
}

/// Returns what is reported about a task, job or host, as text.
fn told(books: &Books, question: RmQuery) -> Vec<String> {
    let RmReply::Decisions { decisions, .. } = books.answer(&question) else {
        panic!("nothing is known")
    };
    decisions.iter().map(|d| d.kind.to_string()).collect()
}

/// A task that an owner has ended is reported with the reason and counts as an eviction.
#[test]
fn task_killed_by_owner_counts_as_eviction() {
    let mut log = story();
    let (guests, why) = (
        vec![t(3, 3), t(3, 99)],
        "olga is logged in on pts/1".to_string(),
    );
    log.say(
        30,
        3,
        EventKind::GuestsEnded {
            host: h(3),
            guests,
            why: why.clone(),
        },
    );
    log.ended(31, t(3, 3), 15, 1_000);
    log.say(
        40,
        3,
        EventKind::GuestsEnded {
            host: h(3),
            guests: vec![],
            why,
        },
    );
    let books = books(&log);
    let (one, other) = (t(3, 3), t(3, 99));
    let ended =
        format!("guests ended for the owner of h3: {one} {other}: olga is logged in on pts/1");
    for question in [
        RmQuery::TaskDecisions(t(3, 3)),
        RmQuery::TaskDecisions(t(1, 2)),
        RmQuery::HostDecisions("h3".into()),
    ] {
        let told = told(&books, question);
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
    let (job, tasks) = job(&books, t(3, 3));
    assert_eq!((job.totals.migrations, job.totals.evictions), (1, 2));
    assert_eq!(
        (tasks[3].tid, tasks[3].migrations, tasks[3].evictions),
        (t(3, 3), 0, 1)
    );
    let RmReply::Users(users) = books.answer(&RmQuery::Users { user: Some(USER) }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.evictions, 2);
}

/// Each task of a job that is vacated for an owner counts as an eviction.
#[test]
fn vacating_counts_as_eviction_of_each_task() {
    let mut log = Log::default();
    let tasks = line(Tid::NONE);
    tasks
        .iter()
        .for_each(|(tid, parent, _)| log.started(2, *tid, *parent, "worker"));
    let parked = |parked, set: &str| {
        let (set, job, bytes, frozen) = (set.to_string(), t(1, 3), 9, Micros(5));
        EventKind::Checkpointed {
            checkpoint: set,
            job,
            tasks: 3,
            bytes,
            frozen,
            vacated: parked,
        }
    };
    log.say(5, 1, parked(false, "t40003-20261122T141503-1"));
    assert_eq!(
        job(&books(&log), t(1, 3)).0.totals.evictions,
        0,
        "it goes on"
    );
    log.say(6, 1, parked(true, "t40003-20261122T141504-1"));
    tasks
        .iter()
        .for_each(|(tid, ..)| log.ended(7, *tid, 9, 1_000));
    assert_eq!(job(&books(&log), t(1, 3)).0.totals.evictions, 3);
}

/// Failures are reported for the jobs and hosts they concern.
#[test]
fn failures_are_attributed_to_jobs_and_hosts() {
    let mut log = story();
    let why = || "no room".to_string();
    log.say(
        30,
        1,
        EventKind::CheckpointFailed {
            job: t(1, 2),
            why: why(),
        },
    );
    let (set, cause) = (
        format!("{}-20261122T141503-1", t(1, 2)),
        "h1 was lost".to_string(),
    );
    log.say(
        31,
        1,
        EventKind::RestartFailed {
            checkpoint: set.clone(),
            cause: cause.clone(),
            why: why(),
        },
    );
    log.say(
        32,
        1,
        EventKind::RestartFailed {
            checkpoint: "nonsense".into(),
            cause,
            why: why(),
        },
    );
    log.say(
        33,
        3,
        EventKind::TaskerGone {
            host: h(3),
            why: "signal 9".into(),
        },
    );
    log.ended(34, t(3, 3), 9, 1_000);
    log.say(
        35,
        1,
        EventKind::HostRefused {
            name: "h4".into(),
            why: "no route to it".into(),
        },
    );
    let mut books = books(&log);
    let job = told(&books, RmQuery::TaskDecisions(t(1, 2)));
    let tasker = format!(
        "the tasker of h3 has ended (signal 9), and with it {}",
        t(3, 3)
    );
    let failed = format!("checkpoint {set} was not restarted (h1 was lost): no room");
    let last = [
        format!("job {} was not checkpointed: no room", t(1, 2)),
        failed,
        tasker.clone(),
    ];
    assert_eq!(job[job.len() - 3..], last);
    assert_eq!(
        told(&books, RmQuery::HostDecisions("h3".into())).last(),
        Some(&tasker)
    );
    assert_eq!(
        told(&books, RmQuery::HostDecisions("h4".into())),
        ["h4 was not added: no route to it"]
    );
    let mut sheets = Sheets::new();
    apply(&mut sheets, books.batch());
    assert_eq!(reread(&sheets), books);
}

/// A restarted job still belongs to the task that had spawned it.
#[test]
fn restarted_job_keeps_its_parent() {
    let mut log = story();
    line(t(1, 2))
        .iter()
        .for_each(|(tid, parent, _)| log.started(30, *tid, *parent, "worker"));
    line(t(1, 2))
        .iter()
        .for_each(|(tid, ..)| log.ended(31, *tid, 9, 1_000));
    let [top, child, last] = line(t(1, 2));
    again(&mut log, 40, &[last, child, top]);
    let (job, _) = job(&books(&log), t(2, 5));
    assert_eq!(
        (job.job, job.totals.tasks, job.totals.running),
        (t(1, 2), 10, 5)
    );
}

/// Tasks that serve the virtual machine and consoles without children are no jobs.
#[test]
fn service_tasks_and_consoles_are_no_jobs() {
    let mut log = story();
    log.started(30, t(1, 77), Tid::NONE, "");
    log.ended(31, t(1, 77), 0, 1);
    let RmReply::Jobs(jobs) = books(&log).answer(&RmQuery::Jobs { user: None }) else {
        panic!("no jobs")
    };
    assert_eq!(jobs.iter().map(|j| j.job).collect::<Vec<_>>(), [t(1, 2)]);
}

/// Decisions are reported for the task and host they concern.
#[test]
fn decisions_are_reported_for_their_subject() {
    let books = books(&story());
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = books.answer(&RmQuery::TaskDecisions(t(2, 3)))
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
        books.answer(&RmQuery::TaskDecisions(t(1, 99))),
        RmReply::NotFound
    );
    assert_eq!(
        books.answer(&RmQuery::HostDecisions("nobody".into())),
        RmReply::NotFound
    );
}

/// The loss of a host ends its tasks, and so does a task list without them.
#[test]
fn lost_host_or_reconciliation_ends_tasks() {
    let mut log = story();
    log.say(
        40,
        1,
        EventKind::HostGone {
            host: h(3),
            name: "h3".into(),
            why: "silent".into(),
        },
    );
    let mut books = books(&log);
    assert_eq!(
        job(&books, t(1, 2)).1[3].ended,
        Some((second(40), TaskOutcome::Lost))
    );
    let info = TaskInfo {
        tid: t(1, 77),
        parent: Tid::NONE,
        host: h(1),
        flags: 0,
        name: String::new(),
        pid: 1,
        uid: USER,
        migrating: false,
        paused: false,
        suspended: false,
    };
    books.reconcile(second(50), &[info]);
    let (job, _) = job(&books, t(1, 2));
    assert_eq!((job.ended, job.totals.running), (Some(second(50)), 0));
}

/// A new virtual machine keeps the sums and may reuse tids.
#[test]
fn new_virtual_machine_keeps_sums_and_reuses_tids() {
    let mut books = books(&story());
    books.begin_anew();
    assert_eq!(books.place(), Place::default());
    assert_eq!(books.running().count(), 0);
    let mut log = Log::default();
    log.started(100, t(1, 2), Tid::NONE, "");
    log.started(101, t(1, 3), t(1, 2), "other");
    log.0.iter().for_each(|event| books.event(event));
    let (job, tasks) = job(&books, t(1, 3));
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

/// The tables as a file would contain them.
type Sheets = BTreeMap<(Sheet, u64), Vec<u8>>;

fn apply(sheets: &mut Sheets, batch: Batch) {
    for change in batch {
        match change.value {
            Some(value) => drop(sheets.insert((change.sheet, change.key), value)),
            None => drop(sheets.remove(&(change.sheet, change.key))),
        }
    }
}

fn reread(sheets: &Sheets) -> Books {
    let entries = sheets
        .iter()
        .map(|((sheet, key), value)| (*sheet, *key, value.clone()));
    let (books, bad) = Books::read(USER, own(), entries);
    assert_eq!(bad, 0);
    books
}

fn questions() -> Vec<RmQuery> {
    let mut all = vec![RmQuery::Users { user: None }, RmQuery::Jobs { user: None }];
    for host in 1..=3 {
        all.push(RmQuery::HostDecisions(format!("h{host}")));
        all.extend(
            (2..12).flat_map(|n| [RmQuery::Job(t(host, n)), RmQuery::TaskDecisions(t(host, n))]),
        );
    }
    all
}

/// Random events regardless of sense: hosts, tasks, parents and exits in any order.
fn happenings() -> impl Strategy<Value = Vec<(u8, u16, u32, u32, i32)>> {
    prop::collection::vec((0..6_u8, 1..4_u16, 2..12_u32, 0..12_u32, 0..3_i32), 1..80)
}

fn written(happenings: &[(u8, u16, u32, u32, i32)]) -> Log {
    let (mut log, mut seen) = (Log::default(), BTreeSet::new());
    for (n, (what, host, local, other, status)) in happenings.iter().copied().enumerate() {
        let (at, tid) = (n as u64, t(host, local));
        let parent = if other < 2 { Tid::NONE } else { t(1, other) };
        match what {
            0 => {
                log.say(
                    at,
                    1,
                    EventKind::HostAdded {
                        host: h(host),
                        name: format!("h{host}"),
                    },
                );
            }
            // A tid is reused only after a quarter of a million others.
            1 | 2 if seen.contains(&tid) => {}
            1 | 2 => {
                seen.extend([tid, parent]);
                log.started(at, tid, parent, if other == 0 { "" } else { "worker" });
            }
            3 => log.ended(at, tid, status, u64::from(local)),
            4 => log.moved(at, tid, host, 1 + host % 3, owner()),
            _ => {
                let name = format!("h{host}");
                log.say(
                    at,
                    1,
                    EventKind::HostGone {
                        host: h(host),
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
    /// After a crash at any time, reading the file and the log from the stored position restores
    /// the history as without a crash.
    #[test]
    fn crash_neither_repeats_nor_loses_events(
        happenings in happenings(), cut in 0..80_usize, lost in 0..20_usize,
    ) {
        let log = written(&happenings);
        let whole = books(&log);
        let cut = cut.min(log.0.len());
        let (mut before, mut sheets) = (Books::new(USER, own()), Sheets::new());
        log.0[..cut].iter().for_each(|event| before.event(event));
        apply(&mut sheets, before.batch());
        // Events that were read and not written.
        log.0[cut..].iter().take(lost).for_each(|event| before.event(event));
        let mut after = reread(&sheets);
        // Some events are read twice.
        log.0[cut.saturating_sub(3)..].iter().for_each(|event| after.event(event));
        for question in questions() {
            prop_assert_eq!(after.answer(&question), whole.answer(&question), "{:?}", question);
        }
        prop_assert_eq!(after.place(), whole.place());
    }

    /// At every moment, all written batches together contain the whole history.
    #[test]
    fn batches_contain_whole_history(happenings in happenings(), every in 1..10_usize) {
        let log = written(&happenings);
        let (mut books, mut sheets) = (Books::new(USER, own()), Sheets::new());
        for some in log.0.chunks(every) {
            some.iter().for_each(|event| books.event(event));
            apply(&mut sheets, books.batch());
            prop_assert!(!books.is_dirty() && books.batch().is_empty());
            let again = reread(&sheets);
            for question in questions() {
                prop_assert_eq!(again.answer(&question), books.answer(&question), "{:?}", question);
            }
        }
    }

    /// The sums of each job equal the sums over its tasks.
    #[test]
    fn sums_are_sums_of_tasks(happenings in happenings()) {
        let books = books(&written(&happenings));
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

/// When there are too many entries the oldest are removed, and the sums remain.
#[test]
fn oldest_entries_are_removed_and_sums_remain() {
    let (mut books, mut sheets) = (Books::new(USER, own()), Sheets::new());
    let tasks = TASKS_MAX + 1000;
    for n in 0..tasks as u64 {
        let (tid, at) = (t(1, 2 + (n % 200_000) as u32), second(n));
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
        books.event(&Event {
            number: 2 * n + 1,
            at,
            host: h(1),
            kind: started,
        });
        books.event(&Event {
            number: 2 * n + 2,
            at,
            host: h(1),
            kind: ended,
        });
        if n % 10_000 == 0 {
            apply(&mut sheets, books.batch());
        }
    }
    for n in 0..DECISIONS_MAX + 10 {
        books.decided(second(n as u64), DecisionKind::RmStarted { resumed: false });
    }
    apply(&mut sheets, books.batch());
    let count = |sheet| sheets.keys().filter(|(s, _)| *s == sheet).count();
    assert_eq!(
        (
            count(Sheet::Tasks),
            count(Sheet::Jobs),
            count(Sheet::Decisions)
        ),
        (TASKS_MAX, JOBS_MAX, DECISIONS_MAX)
    );
    let RmReply::Users(users) = reread(&sheets).answer(&RmQuery::Users { user: None }) else {
        panic!("no users")
    };
    assert_eq!(users[0].totals.tasks, tasks as u64);
}

/// A spawn with these numbers of tasks, attempts, and excluded hosts with reasons.
fn spawned(n: u32, tasks: u32, attempts: usize, hosts: u32) -> DecisionKind {
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
        requested_by: t(1, 2),
        job: t(1, 2),
        user: USER,
        count: tasks,
        started: (0..tasks)
            .map(|i| {
                (
                    t(2, 10 + n % 2000 * 100 + i),
                    format!("host{i}.example.org"),
                )
            })
            .collect(),
        error: None,
        waited: Micros(0),
        attempts: vec![attempt; attempts],
    }
}

fn large_spawn(n: u32) -> DecisionKind {
    spawned(n, 100, 40, 64)
}

/// Decisions are bounded in bytes, and the newest remain.
#[test]
fn decisions_are_bounded_in_bytes() {
    let (mut books, mut sheets) = (Books::new(USER, own()), Sheets::new());
    let decisions = 700;
    for n in 0..decisions {
        books.decided(second(n.into()), large_spawn(n));
        if n % 50 == 0 {
            apply(&mut sheets, books.batch());
        }
    }
    apply(&mut sheets, books.batch());
    let kept: Vec<(u64, usize)> = sheets
        .iter()
        .filter(|((sheet, _), _)| *sheet == Sheet::Decisions)
        .map(|((_, n), v)| (*n, v.len()))
        .collect();
    let bytes: u64 = kept.iter().map(|(_, bytes)| *bytes as u64).sum();
    assert!(
        bytes <= DECISIONS_BYTES_MAX && bytes > DECISIONS_BYTES_MAX / 10 * 9,
        "{bytes}"
    );
    assert_eq!(kept.last().map(|(n, _)| *n), Some(u64::from(decisions)));
    assert!(kept.len() < 600, "{}", kept.len());
    // Reading the history counts the same bytes.
    let mut again = reread(&sheets);
    again.decided(second(9999), large_spawn(9999));
    apply(&mut sheets, again.batch());
    let RmReply::Decisions { decisions, .. } =
        again.answer(&RmQuery::TaskDecisions(t(2, 10 + 1999 * 100)))
    else {
        panic!("kept")
    };
    let DecisionKind::Spawn { attempts, .. } = &decisions[0].kind else {
        panic!("{decisions:?}")
    };
    assert_eq!(attempts.len(), ATTEMPTS_MAX);
    let count = |sheets: &Sheets| {
        sheets
            .keys()
            .filter(|(sheet, _)| *sheet == Sheet::Decisions)
            .count()
    };
    assert!(count(&sheets) <= kept.len() + 1);
    let long = EventKind::TaskStarted {
        tid: t(1, 5),
        parent: Tid::NONE,
        name: "x".repeat(100_000),
        user: USER,
    };
    again.event(&Event {
        number: 1,
        at: second(1),
        host: h(1),
        kind: long,
    });
    assert!(
        again
            .running()
            .all(|task| task.program.len() <= PROGRAM_BYTES_MAX)
    );
}

/// Adds the maximum number of decisions, of typical size.
fn decide_much(books: &mut Books) {
    (0..DECISIONS_MAX as u32).for_each(|n| books.decided(second(n.into()), spawned(n, 4, 1, 8)));
}

/// A history of the maximum size.
fn full_books() -> Books {
    let mut books = Books::new(USER, own());
    for n in 0..TASKS_MAX as u32 {
        // Jobs of a thousand tasks; only the last thousand tasks run.
        let (tid, parent) = (
            t(1 + (n % 200) as u16, 10 + n),
            if n % 1000 == 0 {
                Tid::NONE
            } else {
                t(1, 10 + n / 1000 * 1000)
            },
        );
        let tid = if n % 1000 == 0 { t(1, 10 + n) } else { tid };
        let started = EventKind::TaskStarted {
            tid,
            parent,
            name: "/home/olga/bin/worker".into(),
            user: USER,
        };
        books.event(&Event {
            number: u64::from(2 * n) + 1,
            at: second(n.into()),
            host: h(1 + (n % 200) as u16),
            kind: started,
        });
        if n + 1000 < TASKS_MAX as u32 {
            let ended = EventKind::TaskEnded {
                tid,
                status: 0,
                used: Usage::default(),
            };
            books.event(&Event {
                number: u64::from(2 * n) + 2,
                at: second(n.into()),
                host: h(1),
                kind: ended,
            });
        }
    }
    decide_much(&mut books);
    books
}

/// Writes a batch, waiting for earlier ones if necessary.
fn write(store: &Store, mut batch: Batch) {
    while let Err(back) = store.write(batch) {
        batch = back;
        std::thread::yield_now();
    }
}

/// A history of the maximum size is read within the time of a restart after its writer was killed.
#[test]
fn full_history_is_read_in_time_after_kill() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut books = full_books();
    let opened = open(dir.path());
    // The file is written several times over, as in a long life.
    for _ in 0..3 {
        write(&opened.store, books.batch());
        decide_much(&mut books);
    }
    write(&opened.store, books.batch());
    // When the second batch is accepted, all earlier ones are written.
    (0..2).for_each(|_| write(&opened.store, Batch::new()));
    // Copies the file as a kill would leave it: it was not closed.
    let (path, again) = (dir.path().join("rm.redb"), dir.path().join("again"));
    std::fs::create_dir(&again).expect("a directory");
    let length = std::fs::copy(&path, again.join("rm.redb")).expect("it can be copied");
    assert!(length <= FILE_BYTES_MAX, "{length}");
    let begun = std::time::Instant::now();
    let Opened {
        entries,
        moved_aside,
        ..
    } = open(&again);
    let (read, bad) = Books::read(USER, own(), entries);
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
        (read.place(), read.running().count()),
        (books.place(), 1000)
    );
    // The goal is two seconds for a whole restart; test machines may be slow.
    assert!(took.as_secs() < 30, "it takes {took:?}");
    opened.store.close(Batch::new());
}

fn open(dir: &Path) -> Opened {
    Store::open(dir, "rm.redb").expect("it can be opened")
}

/// The file restores what was written, and no other user or resource manager can open it.
#[test]
fn file_restores_history_and_is_private() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = dir.path().join("new/state");
    let opened = open(&place);
    assert!(opened.entries.is_empty() && opened.moved_aside.is_none());
    let mode = |path: &Path| path.metadata().expect("it is there").permissions().mode() & 0o777;
    assert_eq!((mode(&place), mode(&place.join("rm.redb"))), (0o700, 0o600));
    let mut books = books(&story());
    opened.store.close(books.batch());
    let again = open(&place);
    let (read, bad) = Books::read(USER, own(), again.entries);
    assert_eq!(
        (bad, read.place(), read.running().count()),
        (0, books.place(), 2)
    );
    let second = Store::open(&place, "rm.redb").expect_err("it is open already");
    assert!(
        second
            .to_string()
            .contains("in use by another resource manager"),
        "{second}"
    );
}

/// A foreign, truncated or damaged file is moved aside and reported.
#[test]
fn unreadable_file_is_moved_aside_and_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("rm.redb");
    let mut books = books(&story());
    open(dir.path()).store.close(books.batch());
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
        let opened = open(dir.path());
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
