//! Draining of hosts on request of a user, and the end of a drain.

use crate::common::{TestBed, client, host_id, request, spawned_task_info, task_id, world};
use crate::{options_with_history, query};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

fn client_cause() -> MigrationCause {
    MigrationCause::Drain {
        requested_by: client(),
    }
}

fn drain(bed: &mut TestBed, within: Option<Micros>) -> Vec<(Tid, Option<String>)> {
    let RmReply::Drain {
        drained: true,
        tasks,
        ..
    } = query(
        bed,
        &RmQuery::Drain {
            host: "h2".into(),
            within,
        },
    )
    else {
        panic!("h2 is there")
    };
    tasks
}

fn remaining_tasks(bed: &mut TestBed) -> Vec<(Tid, Option<String>)> {
    let RmReply::Drain { tasks, .. } = query(bed, &RmQuery::DrainStatus { host: "h2".into() })
    else {
        panic!("h2 is there")
    };
    tasks
}

/// All tasks leave a drained host, and none is placed on it until the end of the drain.
#[test]
fn drained_host_is_emptied_and_reusable() {
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend([
        spawned_task_info(task_id(2, 1), 2),
        spawned_task_info(task_id(2, 2), 2),
    ]);
    let mut bed = TestBed::quiet(&vm);
    assert_eq!(
        drain(&mut bed, None),
        [(task_id(2, 1), None), (task_id(2, 2), None)]
    );
    let goes = vec![
        (task_id(2, 1), host_id(1), client_cause()),
        (task_id(2, 2), host_id(3), client_cause()),
    ];
    assert_eq!(bed.world().migrations, goes);
    bed.world().migrated(task_id(2, 1), 2, 1, client_cause());
    bed.settle();
    assert_eq!(remaining_tasks(&mut bed), [(task_id(2, 2), None)]);
    bed.world().migrated(task_id(2, 2), 2, 3, client_cause());
    bed.settle();
    assert_eq!(remaining_tasks(&mut bed), []);
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: host_id(2) })
    );
    bed.world().take_migrations();
    // No task is placed on the drained host, even if the spawn names it.
    bed.world().spawn(1, &request(4));
    bed.settle();
    assert!(
        bed.world()
            .take_start_orders()
            .iter()
            .all(|exec| exec.host != host_id(2))
    );
    bed.world().spawn(
        2,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    // A task that a user migrates to the drained host is evicted again.
    bed.world().migrated(
        task_id(2, 1),
        1,
        2,
        MigrationCause::Requested {
            requested_by: client(),
        },
    );
    bed.settle();
    assert_eq!(bed.world().take_migrations().len(), 1);
    let RmReply::Drain { drained, .. } = query(&mut bed, &RmQuery::Undrain { host: "h2".into() })
    else {
        panic!("no")
    };
    assert!(!drained);
    bed.world().spawn(
        3,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(bed.world().take_start_orders()[0].host, host_id(2));
    assert_eq!(
        query(
            &mut bed,
            &RmQuery::Drain {
                host: "h9".into(),
                within: None
            }
        ),
        RmReply::NotFound
    );
}

/// Tasks that stay on a drained host are reported with the reason, and once more at the deadline.
#[test]
fn tasks_that_stay_on_drained_host_are_reported() {
    let vm = world(2);
    vm.0.borrow_mut()
        .tasks
        .push(spawned_task_info(task_id(2, 1), 2));
    let mut bed = TestBed::quiet(&vm);
    bed.report_owner_present(1);
    let tasks = drain(&mut bed, Some(Micros::from_secs(3)));
    let why = tasks[0].1.clone().expect("nobody takes it");
    assert_eq!(
        why,
        "no host accepts it (h1: owner present (alice on pts/0))"
    );
    bed.advance(Micros::from_secs(4));
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|n| n.contains("stays on h2 although it is being drained: no host accepts it")),
        "{notes:?}"
    );
    let late = notes
        .iter()
        .filter(|n| n.starts_with("h2 should be empty by now; remaining tasks: "))
        .count();
    assert_eq!(late, 1, "{notes:?}");
    // After a failed migration the task migrates to another host, or to the same one later.
    bed.report_owner_absent(1);
    assert_eq!(bed.world().take_migrations(), [(task_id(2, 1), 1)]);
    bed.world()
        .migration_failed(task_id(2, 1), 2, 1, Failure::Killed { signal: 9 });
    bed.settle();
    assert!(remaining_tasks(&mut bed)[0].1.is_some());
    bed.advance(Micros::from_secs(3));
    assert_eq!(bed.world().take_migrations(), [(task_id(2, 1), 1)]);
}

/// A host is still drained after an owner has arrived and left.
#[test]
fn drain_outlasts_owner_visit() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    drain(&mut bed, None);
    bed.report_owner_present(2);
    bed.report_owner_absent(2);
    bed.world().spawn(
        2,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("no reason")
    };
    let told: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    assert!(
        told.contains(&format!("h2 is being drained: requested by {}", client())),
        "{told:?}"
    );
}

/// After a restart of the resource manager, drained hosts are still drained.
#[test]
fn restarted_rm_keeps_drained_hosts() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    drain(&mut bed, Some(Micros::from_secs(60)));
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    bed.world().spawn(1, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .take_start_orders()
            .iter()
            .all(|exec| exec.host == host_id(1))
    );
    query(&mut bed, &RmQuery::Undrain { host: "h2".into() });
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    bed.world().spawn(2, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .take_start_orders()
            .iter()
            .any(|exec| exec.host == host_id(2))
    );
}
