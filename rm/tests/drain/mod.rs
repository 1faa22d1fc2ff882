//! Hosts that a user drains, and that take tasks again later.

use crate::common::{Bed, client, h, request, spawned, t, world};
use crate::{ask, with_books};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

fn by() -> MigrationCause {
    MigrationCause::Drain {
        requested_by: client(),
    }
}

fn drain(bed: &mut Bed, within: Option<Micros>) -> Vec<(Tid, Option<String>)> {
    let RmReply::Drain {
        drained: true,
        tasks,
        ..
    } = ask(
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

fn left(bed: &mut Bed) -> Vec<(Tid, Option<String>)> {
    let RmReply::Drain { tasks, .. } = ask(bed, &RmQuery::DrainStatus { host: "h2".into() }) else {
        panic!("h2 is there")
    };
    tasks
}

/// All tasks leave a drained host and none is placed there until the drain is over.
#[test]
fn drained_host_is_emptied_and_reusable() {
    let vm = world(3);
    vm.0.borrow_mut()
        .tasks
        .extend([spawned(t(2, 1), 2), spawned(t(2, 2), 2)]);
    let mut bed = Bed::quiet(&vm);
    assert_eq!(drain(&mut bed, None), [(t(2, 1), None), (t(2, 2), None)]);
    let goes = vec![(t(2, 1), h(1), by()), (t(2, 2), h(3), by())];
    assert_eq!(bed.world().migrations, goes);
    bed.world().moved(t(2, 1), 2, 1, by());
    bed.settle();
    assert_eq!(left(&mut bed), [(t(2, 2), None)]);
    bed.world().moved(t(2, 2), 2, 3, by());
    bed.settle();
    assert_eq!(left(&mut bed), []);
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: h(2) })
    );
    bed.world().took_migrations();
    // Tasks are placed there neither by choice nor by name.
    bed.world().spawn(1, &request(4));
    bed.settle();
    assert!(
        bed.world()
            .took_execs()
            .iter()
            .all(|exec| exec.host != h(2))
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
        bed.world().answer(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    // A task that a user migrates there is evicted again.
    bed.world().moved(
        t(2, 1),
        1,
        2,
        MigrationCause::Requested {
            requested_by: client(),
        },
    );
    bed.settle();
    assert_eq!(bed.world().took_migrations().len(), 1);
    let RmReply::Drain { drained, .. } = ask(&mut bed, &RmQuery::Undrain { host: "h2".into() })
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
    assert_eq!(bed.world().took_execs()[0].host, h(2));
    assert_eq!(
        ask(
            &mut bed,
            &RmQuery::Drain {
                host: "h9".into(),
                within: None
            }
        ),
        RmReply::NotFound
    );
}

/// Tasks that stay on a drained host are reported with the reason, and again at the deadline.
#[test]
fn tasks_that_stay_on_drained_host_are_reported() {
    let vm = world(2);
    vm.0.borrow_mut().tasks.push(spawned(t(2, 1), 2));
    let mut bed = Bed::quiet(&vm);
    bed.owner_comes(1);
    let tasks = drain(&mut bed, Some(Micros::from_secs(3)));
    let why = tasks[0].1.clone().expect("nobody takes it");
    assert_eq!(
        why,
        "no host accepts it (h1: owner present (alice on pts/0))"
    );
    bed.pass(Micros::from_secs(4));
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
    // A migration that fails is repeated, to another host or the same one.
    bed.owner_leaves(1);
    assert_eq!(bed.world().took_migrations(), [(t(2, 1), 1)]);
    bed.world()
        .move_failed(t(2, 1), 2, 1, Failure::Killed { signal: 9 });
    bed.settle();
    assert!(left(&mut bed)[0].1.is_some());
    bed.pass(Micros::from_secs(3));
    assert_eq!(bed.world().took_migrations(), [(t(2, 1), 1)]);
}

/// A host stays drained after an owner has come and gone.
#[test]
fn drain_outlasts_owner_visit() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    drain(&mut bed, None);
    bed.owner_comes(2);
    bed.owner_leaves(2);
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
        bed.world().answer(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::HostDecisions("h2".into()))
    else {
        panic!("no reason")
    };
    let told: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    assert!(
        told.contains(&format!("h2 is being drained: requested by {}", client())),
        "{told:?}"
    );
}

/// A restarted resource manager keeps drained hosts drained.
#[test]
fn restarted_rm_keeps_drained_hosts() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    drain(&mut bed, Some(Micros::from_secs(60)));
    bed.pass(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().forget_mail();
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    bed.world().spawn(1, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .took_execs()
            .iter()
            .all(|exec| exec.host == h(1))
    );
    ask(&mut bed, &RmQuery::Undrain { host: "h2".into() });
    bed.pass(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().forget_mail();
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    bed.world().spawn(2, &request(2));
    bed.settle();
    assert!(
        bed.world()
            .took_execs()
            .iter()
            .any(|exec| exec.host == h(2))
    );
}
