//! Tasks leave hosts whose owner is present; failed migrations are tried again.

use crate::common::{TestBed, client, host_id, migrate_error, request, task_id, world};
use crate::{options_with_policy, owner_cause, two_tasks_on_h2};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::migration::{Failure, Refusal};
use sempa_proto::sm::{SM_EXECACK, pack_tids};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, Tid};

/// When an owner arrives, all tasks leave the host immediately. The host is used again after the
/// owner has left.
#[test]
fn owner_arrival_empties_host_until_departure() {
    let mut bed = two_tasks_on_h2();
    bed.report_owner_present(2);
    // The tasks were started before this resource manager. The old load watcher is not a guest and
    // stays.
    assert_eq!(
        bed.world().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3)]
    );
    let why = "alice on pts/0".to_string();
    let present = EventKind::OwnerPresent {
        host: host_id(2),
        since: Micros(7),
        detected_at: Micros(8),
        why,
    };
    assert_eq!(bed.world().records, std::slice::from_ref(&present));
    bed.world().migrated(task_id(1, 5), 2, 1, owner_cause());
    bed.settle();
    assert_eq!(bed.world().records.len(), 1, "one is still there");
    bed.world().migrated(task_id(2, 1), 2, 3, owner_cause());
    bed.settle();
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: host_id(2) })
    );
    bed.report_owner_present(2);
    assert_eq!(bed.world().records.len(), 2, "said once");
    bed.world().spawn(1, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .take_start_orders()
            .iter()
            .all(|e| e.host != host_id(2))
    );
    bed.report_owner_absent(2);
    let why = "no user is logged in".to_string();
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::OwnerAbsent {
            host: host_id(2),
            why
        })
    );
    assert!(
        bed.world().take_migrations().is_empty(),
        "nobody is moved back"
    );
    bed.world().spawn(2, &request(1));
    bed.settle();
    assert_eq!(bed.world().take_start_orders()[0].host, host_id(2));
}

/// A host without guests is recorded as free of guests as soon as its owner arrives.
#[test]
fn host_without_guests_is_clean_at_once() {
    let mut bed = two_tasks_on_h2();
    bed.report_owner_present(3);
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: host_id(3) })
    );
}

/// If the best target refuses a task, the next best one is tried.
#[test]
fn refused_migration_tries_next_host() {
    let mut bed = two_tasks_on_h2();
    let kernel = Refusal::KernelFeatures {
        missing: vec!["clone3".into()],
        source: "6.1".into(),
        target: "5.10".into(),
    };
    bed.world().refused_migrations.insert(
        (task_id(1, 5), host_id(1)),
        migrate_error(Failure::Refused(vec![kernel])),
    );
    bed.report_owner_present(2);
    bed.advance(Micros(1));
    assert_eq!(
        bed.world().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3), (task_id(1, 5), 3)]
    );
}

/// If a migration fails, the next best target is tried, and the first one again after some time.
#[test]
fn failed_migration_tries_next_host_then_retries() {
    let mut bed = two_tasks_on_h2();
    bed.report_owner_present(2);
    bed.world().migrated(task_id(2, 1), 2, 3, owner_cause());
    bed.settle();
    assert_eq!(
        bed.world().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3)]
    );
    bed.world()
        .migration_failed(task_id(1, 5), 2, 1, Failure::Killed { signal: 9 });
    bed.settle();
    assert_eq!(bed.world().take_migrations(), [(task_id(1, 5), 3)]);
    bed.world()
        .migration_failed(task_id(1, 5), 2, 3, Failure::Killed { signal: 9 });
    bed.settle();
    assert!(bed.world().take_migrations().is_empty());
    let notes = bed.world().notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].starts_with(
        "t40005 stays on h2 although its owner is present: no host accepts it (h1: the engine"
    ));
    bed.advance(Micros::from_secs(2));
    assert_eq!(bed.world().take_migrations(), [(task_id(1, 5), 1)]);
    assert_eq!(bed.world().notes().len(), 1, "said once");
}

/// The migration of a task that has not connected yet is retried after a short time.
#[test]
fn unconnected_task_is_retried_soon() {
    let mut bed = two_tasks_on_h2();
    bed.world().refused_migrations.insert(
        (task_id(1, 5), host_id(1)),
        migrate_error(Failure::Refused(vec![Refusal::NotConnected])),
    );
    bed.report_owner_present(2);
    bed.world().refused_migrations.clear();
    bed.advance(Micros::from_millis(500));
    assert_eq!(
        bed.world().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3), (task_id(1, 5), 1)]
    );
    assert!(bed.world().notes().is_empty());
}

/// A pinned task does not count as a guest.
#[test]
fn pinned_task_is_no_guest() {
    let mut bed = two_tasks_on_h2();
    for tid in [task_id(1, 5), task_id(2, 1)] {
        for to in [1, 3] {
            bed.world().refused_migrations.insert(
                (tid, host_id(to)),
                migrate_error(Failure::Refused(vec![Refusal::Pinned])),
            );
        }
    }
    bed.report_owner_present(2);
    bed.advance(Micros::from_secs(1));
    assert_eq!(bed.world().take_migrations().len(), 2);
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: host_id(2) })
    );
}

/// A host without a checkpoint engine is never used as a target.
#[test]
fn host_without_engine_is_no_target() {
    let mut bed = two_tasks_on_h2();
    let no_engine = Refusal::NoEngine {
        host: host_id(1),
        why: "not found".into(),
    };
    bed.world().refused_migrations.insert(
        (task_id(1, 5), host_id(1)),
        migrate_error(Failure::Refused(vec![no_engine])),
    );
    bed.report_owner_present(2);
    bed.advance(Micros(1));
    assert_eq!(
        bed.world().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3), (task_id(1, 5), 3)]
    );
    bed.world().migrated(task_id(1, 5), 2, 3, owner_cause());
    bed.world().migrated(task_id(2, 1), 2, 3, owner_cause());
    bed.report_owner_absent(2);
    bed.report_owner_present(3);
    assert!(bed.world().take_migrations().iter().all(|(_, to)| *to == 2));
}

/// A spawn that names a host with a present owner waits until the owner has left.
#[test]
fn spawn_on_named_host_waits_for_owner() {
    let vm = world(2);
    let rules = SpawnRules {
        wait: Micros::from_secs(60),
        ..SpawnRules::default()
    };
    let mut bed = TestBed::quiet_with(
        &vm,
        options_with_policy(EffectivePolicy {
            rules,
            ..EffectivePolicy::default()
        }),
    );
    bed.report_owner_present(2);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert!(bed.world().take_start_orders().is_empty());
    assert_eq!(bed.world().spawn_reply(1), None);
    bed.report_owner_absent(2);
    let exec = bed.world().take_start_orders().pop().expect("placed");
    assert_eq!(exec.host, host_id(2));
    bed.world().ack(&exec);
    bed.settle();
    assert!(
        matches!(bed.world().spawn_reply(1), Some(Ok(tasks)) if tasks.iter().all(Result::is_ok))
    );
}

/// A task whose spawn named the host is evicted like any other task.
#[test]
fn task_on_named_host_is_evicted_too() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    let exec = bed.world().take_start_orders().pop().expect("placed");
    bed.report_owner_present(2);
    // The event of the task's start arrives before the acknowledgement.
    bed.world().event(
        host_id(2),
        EventKind::TaskStarted {
            tid: task_id(2, 100),
            parent: client(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.settle();
    assert_eq!(bed.world().ack(&exec), [task_id(2, 100)]);
    bed.settle();
    assert_eq!(bed.world().take_migrations(), [(task_id(2, 100), 1)]);
}

/// A task that starts on a host whose owner is present is evicted. A task from a command line
/// stays.
#[test]
fn task_started_beside_owner_is_evicted() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    bed.report_owner_present(2);
    bed.world().event(
        host_id(2),
        EventKind::TaskStarted {
            tid: task_id(2, 7),
            parent: client(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.world().event(
        host_id(2),
        EventKind::TaskStarted {
            tid: task_id(2, 8),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    bed.settle();
    assert_eq!(bed.world().take_migrations(), [(task_id(2, 7), 1)]);
}

/// If no result of a migration arrives, the task's host is checked after a timeout and the
/// migration is repeated.
#[test]
fn silent_migration_is_checked_and_repeated() {
    let mut bed = two_tasks_on_h2();
    bed.report_owner_present(2);
    assert_eq!(bed.world().take_migrations().len(), 2);
    for _ in 0..6 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 3]);
        bed.report_owner_present(2);
    }
    // The list shows the tasks on h2 and not migrating, so their migrations are requested again.
    assert_eq!(bed.world().take_migrations().len(), 2);
}

/// A task from a command line is added to the model and never migrated.
#[test]
fn command_line_task_is_never_migrated() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    bed.world().post(
        host_id(2).daemon_tid(),
        CTX_BASE,
        SM_EXECACK,
        0,
        pack_tids(&[Ok(task_id(2, 3))]),
    );
    bed.report_owner_present(2);
    assert!(bed.service.model().has_task(task_id(2, 3)));
    assert!(bed.world().take_migrations().is_empty());
}
