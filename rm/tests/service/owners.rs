//! Tasks leave hosts whose owner is present; failed migrations are tried again.

use crate::common::{TestBed, client_tid, fake_vm, host_id, migrate_error, request, task_id};
use crate::{bed_with_two_tasks_on_h2, options_with_policy, owner_cause};
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::migration::{Failure, Refusal};
use sempa_proto::sm::{SM_EXECACK, pack_tids};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, Tid};

/// When an owner arrives, all tasks leave the host immediately. Tasks are placed on the host again
/// after the owner has left.
#[test]
fn owner_arrival_empties_host_until_departure() {
    let mut bed = bed_with_two_tasks_on_h2();
    bed.report_owner_present(2);
    // The tasks were started before this resource manager. The old load watcher is not a guest and
    // stays.
    assert_eq!(
        bed.state().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3)]
    );
    let reason = "alice on pts/0".to_string();
    let present_event = EventKind::OwnerPresent {
        host: host_id(2),
        since: Micros(7),
        detected_at: Micros(8),
        why: reason,
    };
    assert_eq!(
        bed.state().recorded_events,
        std::slice::from_ref(&present_event)
    );
    bed.state()
        .report_migrated(task_id(1, 5), 2, 1, owner_cause());
    bed.process_inbox();
    assert_eq!(bed.state().recorded_events.len(), 1, "one is still there");
    bed.state()
        .report_migrated(task_id(2, 1), 2, 3, owner_cause());
    bed.process_inbox();
    assert_eq!(
        bed.state().recorded_events.last(),
        Some(&EventKind::HostVacated { host: host_id(2) })
    );
    bed.report_owner_present(2);
    assert_eq!(bed.state().recorded_events.len(), 2, "said once");
    bed.state().request_spawn(1, &request(2));
    bed.process_inbox();
    assert!(
        bed.state()
            .take_start_orders()
            .iter()
            .all(|e| e.host != host_id(2))
    );
    bed.report_owner_absent(2);
    let reason = "no user is logged in".to_string();
    assert_eq!(
        bed.state().recorded_events.last(),
        Some(&EventKind::OwnerAbsent {
            host: host_id(2),
            why: reason
        })
    );
    assert!(
        bed.state().take_migrations().is_empty(),
        "nobody is moved back"
    );
    bed.state().request_spawn(2, &request(1));
    bed.process_inbox();
    assert_eq!(bed.state().take_start_orders()[0].host, host_id(2));
}

/// A host without guests is recorded as vacated as soon as its owner arrives.
#[test]
fn host_without_guests_is_vacated_at_once() {
    let mut bed = bed_with_two_tasks_on_h2();
    bed.report_owner_present(3);
    assert_eq!(
        bed.state().recorded_events.last(),
        Some(&EventKind::HostVacated { host: host_id(3) })
    );
}

/// If the best target refuses a task, the next best one is tried.
#[test]
fn refused_migration_tries_next_host() {
    let mut bed = bed_with_two_tasks_on_h2();
    let kernel_refusal = Refusal::KernelFeatures {
        missing: vec!["clone3".into()],
        source: "6.1".into(),
        target: "5.10".into(),
    };
    bed.state().refused_migrations.insert(
        (task_id(1, 5), host_id(1)),
        migrate_error(Failure::Refused(vec![kernel_refusal])),
    );
    bed.report_owner_present(2);
    bed.advance(Micros(1));
    assert_eq!(
        bed.state().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3), (task_id(1, 5), 3)]
    );
}

/// If a migration fails, the next best target is tried, and the first one again after some time.
#[test]
fn failed_migration_tries_next_host_then_retries() {
    let mut bed = bed_with_two_tasks_on_h2();
    bed.report_owner_present(2);
    bed.state()
        .report_migrated(task_id(2, 1), 2, 3, owner_cause());
    bed.process_inbox();
    assert_eq!(
        bed.state().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3)]
    );
    bed.state()
        .report_migration_failed(task_id(1, 5), 2, 1, Failure::Killed { signal: 9 });
    bed.process_inbox();
    assert_eq!(bed.state().take_migrations(), [(task_id(1, 5), 3)]);
    bed.state()
        .report_migration_failed(task_id(1, 5), 2, 3, Failure::Killed { signal: 9 });
    bed.process_inbox();
    assert!(bed.state().take_migrations().is_empty());
    let notes = bed.state().recorded_notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].starts_with(
        "t40005 stays on h2 although its owner is present: no host accepts it (h1: the engine"
    ));
    bed.advance(Micros::from_secs(2));
    assert_eq!(bed.state().take_migrations(), [(task_id(1, 5), 1)]);
    assert_eq!(bed.state().recorded_notes().len(), 1, "said once");
}

/// The migration of a task that has not connected yet is retried after a short time.
#[test]
fn unconnected_task_is_retried_soon() {
    let mut bed = bed_with_two_tasks_on_h2();
    bed.state().refused_migrations.insert(
        (task_id(1, 5), host_id(1)),
        migrate_error(Failure::Refused(vec![Refusal::NotConnected])),
    );
    bed.report_owner_present(2);
    bed.state().refused_migrations.clear();
    bed.advance(Micros::from_millis(500));
    assert_eq!(
        bed.state().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3), (task_id(1, 5), 1)]
    );
    assert!(bed.state().recorded_notes().is_empty());
}

/// A pinned task stays on a host with a present owner, and the host is recorded as vacated.
#[test]
fn pinned_task_is_no_guest() {
    let mut bed = bed_with_two_tasks_on_h2();
    for tid in [task_id(1, 5), task_id(2, 1)] {
        for target in [1, 3] {
            bed.state().refused_migrations.insert(
                (tid, host_id(target)),
                migrate_error(Failure::Refused(vec![Refusal::Pinned])),
            );
        }
    }
    bed.report_owner_present(2);
    bed.advance(Micros::from_secs(1));
    assert_eq!(bed.state().take_migrations().len(), 2);
    assert_eq!(
        bed.state().recorded_events.last(),
        Some(&EventKind::HostVacated { host: host_id(2) })
    );
}

/// If a daemon reports that its host has no checkpoint engine, no task migrates to the host.
#[test]
fn host_without_engine_is_no_target() {
    let mut bed = bed_with_two_tasks_on_h2();
    let no_engine = Refusal::NoEngine {
        host: host_id(1),
        why: "not found".into(),
    };
    bed.state().refused_migrations.insert(
        (task_id(1, 5), host_id(1)),
        migrate_error(Failure::Refused(vec![no_engine])),
    );
    bed.report_owner_present(2);
    bed.advance(Micros(1));
    assert_eq!(
        bed.state().take_migrations(),
        [(task_id(1, 5), 1), (task_id(2, 1), 3), (task_id(1, 5), 3)]
    );
    bed.state()
        .report_migrated(task_id(1, 5), 2, 3, owner_cause());
    bed.state()
        .report_migrated(task_id(2, 1), 2, 3, owner_cause());
    bed.report_owner_absent(2);
    bed.report_owner_present(3);
    assert!(
        bed.state()
            .take_migrations()
            .iter()
            .all(|(_, target)| *target == 2)
    );
}

/// A spawn that names a host with a present owner waits until the owner has left.
#[test]
fn spawn_on_named_host_waits_for_owner() {
    let vm = fake_vm(2);
    let rules = SpawnRules {
        wait_max: Micros::from_secs(60),
        ..SpawnRules::default()
    };
    let mut bed = TestBed::start_with_options(
        &vm,
        options_with_policy(EffectivePolicy {
            spawn_rules: rules,
            ..EffectivePolicy::default()
        }),
    );
    bed.report_owner_present(2);
    bed.state().request_spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    assert!(bed.state().take_start_orders().is_empty());
    assert_eq!(bed.state().spawn_reply(1), None);
    bed.report_owner_absent(2);
    let order = bed.state().take_start_orders().pop().expect("placed");
    assert_eq!(order.host, host_id(2));
    bed.state().acknowledge(&order);
    bed.process_inbox();
    assert!(
        matches!(bed.state().spawn_reply(1), Some(Ok(tasks)) if tasks.iter().all(Result::is_ok))
    );
}

/// A task whose spawn named its host is evicted like any other task.
#[test]
fn task_on_named_host_is_evicted_too() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.state().request_spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    let order = bed.state().take_start_orders().pop().expect("placed");
    bed.report_owner_present(2);
    // The event of the task's start arrives before the acknowledgement.
    bed.state().log_event(
        host_id(2),
        EventKind::TaskStarted {
            tid: task_id(2, 100),
            parent: client_tid(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.process_inbox();
    assert_eq!(bed.state().acknowledge(&order), [task_id(2, 100)]);
    bed.process_inbox();
    assert_eq!(bed.state().take_migrations(), [(task_id(2, 100), 1)]);
}

/// A task is evicted if it starts on a host whose owner is present. A task from a command line
/// stays.
#[test]
fn task_started_beside_owner_is_evicted() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.report_owner_present(2);
    bed.state().log_event(
        host_id(2),
        EventKind::TaskStarted {
            tid: task_id(2, 7),
            parent: client_tid(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.state().log_event(
        host_id(2),
        EventKind::TaskStarted {
            tid: task_id(2, 8),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    bed.process_inbox();
    assert_eq!(bed.state().take_migrations(), [(task_id(2, 7), 1)]);
}

/// If no result of a migration arrives until the timeout, the task list is requested and the
/// migration is repeated.
#[test]
fn silent_migration_is_checked_and_repeated() {
    let mut bed = bed_with_two_tasks_on_h2();
    bed.report_owner_present(2);
    assert_eq!(bed.state().take_migrations().len(), 2);
    for _ in 0..6 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 3]);
        bed.report_owner_present(2);
    }
    // According to the task list, the tasks are on h2 and do not migrate. Therefore their
    // migrations are requested again.
    assert_eq!(bed.state().take_migrations().len(), 2);
}

/// A task from a command line is added to the model and never migrated.
#[test]
fn command_line_task_is_never_migrated() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.state().post_message(
        host_id(2).daemon_tid(),
        CTX_BASE,
        SM_EXECACK,
        0,
        pack_tids(&[Ok(task_id(2, 3))]),
    );
    bed.report_owner_present(2);
    assert!(bed.service.model().has_task(task_id(2, 3)));
    assert!(bed.state().take_migrations().is_empty());
}
