//! The drain of a host on request of a user, and the end of a drain.

use crate::common::{TestBed, client_tid, fake_vm, host_id, request, spawned_task_info, task_id};
use crate::{options_with_history, query};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

fn client_cause() -> MigrationCause {
    MigrationCause::Drain {
        requested_by: client_tid(),
    }
}

/// Starts the drain of h2. Returns the remaining tasks, each with the reason why it stays, if any.
fn start_drain(bed: &mut TestBed, time_limit: Option<Micros>) -> Vec<(Tid, Option<String>)> {
    let RmReply::Drain {
        is_drained: true,
        tasks,
        ..
    } = query(
        bed,
        &RmQuery::Drain {
            host: "h2".into(),
            time_limit,
        },
    )
    else {
        panic!("h2 is there")
    };
    tasks
}

/// Returns the tasks that are still on h2, each with the reason why it stays, if any.
fn query_remaining_tasks(bed: &mut TestBed) -> Vec<(Tid, Option<String>)> {
    let RmReply::Drain { tasks, .. } = query(bed, &RmQuery::DrainStatus { host: "h2".into() })
    else {
        panic!("h2 is there")
    };
    tasks
}

/// All tasks leave a drained host. Until the end of the drain no task is placed on it.
#[test]
fn drained_host_is_emptied_and_reusable() {
    let vm = fake_vm(3);
    vm.0.borrow_mut().tasks.extend([
        spawned_task_info(task_id(2, 1), 2),
        spawned_task_info(task_id(2, 2), 2),
    ]);
    let mut bed = TestBed::start_with_watchers(&vm);
    assert_eq!(
        start_drain(&mut bed, None),
        [(task_id(2, 1), None), (task_id(2, 2), None)]
    );
    let expected_migrations = vec![
        (task_id(2, 1), host_id(1), client_cause()),
        (task_id(2, 2), host_id(3), client_cause()),
    ];
    assert_eq!(bed.state().migrations, expected_migrations);
    bed.state()
        .report_migrated(task_id(2, 1), 2, 1, client_cause());
    bed.process_inbox();
    assert_eq!(query_remaining_tasks(&mut bed), [(task_id(2, 2), None)]);
    bed.state()
        .report_migrated(task_id(2, 2), 2, 3, client_cause());
    bed.process_inbox();
    assert_eq!(query_remaining_tasks(&mut bed), []);
    assert_eq!(
        bed.state().recorded_events.last(),
        Some(&EventKind::HostVacated { host: host_id(2) })
    );
    bed.state().take_migrations();
    // No task is placed on the drained host, even if the spawn names the host.
    bed.state().request_spawn(1, &request(4));
    bed.process_inbox();
    assert!(
        bed.state()
            .take_start_orders()
            .iter()
            .all(|order| order.host != host_id(2))
    );
    bed.state().request_spawn(
        2,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    // A user migrates a task to the drained host. The task is evicted again.
    bed.state().report_migrated(
        task_id(2, 1),
        1,
        2,
        MigrationCause::Requested {
            requested_by: client_tid(),
        },
    );
    bed.process_inbox();
    assert_eq!(bed.state().take_migrations().len(), 1);
    let RmReply::Drain { is_drained, .. } =
        query(&mut bed, &RmQuery::Undrain { host: "h2".into() })
    else {
        panic!("no")
    };
    assert!(!is_drained);
    bed.state().request_spawn(
        3,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    assert_eq!(bed.state().take_start_orders()[0].host, host_id(2));
    assert_eq!(
        query(
            &mut bed,
            &RmQuery::Drain {
                host: "h9".into(),
                time_limit: None
            }
        ),
        RmReply::NotFound
    );
}

/// Tasks that stay on a drained host are reported with the reason. They are reported once more at
/// the deadline.
#[test]
fn tasks_that_stay_on_drained_host_are_reported() {
    let vm = fake_vm(2);
    vm.0.borrow_mut()
        .tasks
        .push(spawned_task_info(task_id(2, 1), 2));
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.report_owner_present(1);
    let tasks = start_drain(&mut bed, Some(Micros::from_secs(3)));
    let stay_reason = tasks[0].1.clone().expect("nobody takes it");
    assert_eq!(
        stay_reason,
        "no host accepts it (h1: owner present (alice on pts/0))"
    );
    bed.advance(Micros::from_secs(4));
    let notes = bed.state().recorded_notes();
    assert!(
        notes
            .iter()
            .any(|n| n.contains("stays on h2 although it is being drained: no host accepts it")),
        "{notes:?}"
    );
    let deadline_note_count = notes
        .iter()
        .filter(|n| n.starts_with("h2 should be empty by now; remaining tasks: "))
        .count();
    assert_eq!(deadline_note_count, 1, "{notes:?}");
    // When the owner of h1 has left, the task migrates to h1. The migration fails and is tried
    // again later.
    bed.report_owner_absent(1);
    assert_eq!(bed.state().take_migrations(), [(task_id(2, 1), 1)]);
    bed.state()
        .report_migration_failed(task_id(2, 1), 2, 1, Failure::Killed { signal: 9 });
    bed.process_inbox();
    assert!(query_remaining_tasks(&mut bed)[0].1.is_some());
    bed.advance(Micros::from_secs(3));
    assert_eq!(bed.state().take_migrations(), [(task_id(2, 1), 1)]);
}

/// A drain lasts longer than the presence of an owner during the drain.
#[test]
fn drain_outlasts_owner_visit() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    start_drain(&mut bed, None);
    bed.report_owner_present(2);
    bed.report_owner_absent(2);
    bed.state().request_spawn(
        2,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(1)
        },
    );
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("no reason")
    };
    let texts: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    assert!(
        texts.contains(&format!(
            "h2 is being drained: requested by {}",
            client_tid()
        )),
        "{texts:?}"
    );
}

/// After a restart of the resource manager, a drained host still gets no task.
#[test]
fn restarted_rm_keeps_drained_hosts() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    start_drain(&mut bed, Some(Micros::from_secs(60)));
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    bed.state().request_spawn(1, &request(2));
    bed.process_inbox();
    assert!(
        bed.state()
            .take_start_orders()
            .iter()
            .all(|order| order.host == host_id(1))
    );
    query(&mut bed, &RmQuery::Undrain { host: "h2".into() });
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    bed.state().request_spawn(2, &request(2));
    bed.process_inbox();
    assert!(
        bed.state()
            .take_start_orders()
            .iter()
            .any(|order| order.host == host_id(2))
    );
}
