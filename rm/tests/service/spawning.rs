//! Spawns: placement, start orders, acknowledgements and answers.

use crate::common::{TestBed, client, host_id, no_file_error, request, task_id, world};
use crate::{packed_int, task_ended};
use bytes::Bytes;
use pvm_rm::service::TAG_HOST_DELETE;
use pvm_rm::spawns::START_ACK_TIMEOUT;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::CTX_RM;
use sempa_proto::sm::SM_SPAWN;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// A spawn is placed, started, acknowledged and answered; the answer carries its wait id.
#[test]
fn spawn_is_placed_started_and_answered() {
    let vm = world(3);
    let mut bed = TestBed::quiet(&vm);
    let asked = SpawnRequest {
        args: vec![b"-x".to_vec()],
        place: ":/var".into(),
        ..request(5)
    };
    bed.world().spawn(77, &asked);
    bed.settle();
    let execs = bed.world().take_start_orders();
    assert_eq!(
        execs
            .iter()
            .map(|e| (e.host.index(), e.request.count))
            .collect::<Vec<_>>(),
        [(1, 2), (2, 2), (3, 1)]
    );
    assert!(execs.iter().all(|e| e.parent == client()
        && e.request.args == asked.args
        && e.request.place == ":/var"));
    assert_eq!(bed.world().spawn_reply(77), None, "nobody has acknowledged");
    let on1 = bed.world().ack(&execs[0]);
    let on3 = bed.world().ack(&execs[2]);
    bed.settle();
    assert_eq!(bed.world().spawn_reply(77), None, "one is missing");
    let on2 = bed.world().ack(&execs[1]);
    bed.settle();
    let expected = [on1[0], on2[0], on3[0], on1[1], on2[1]].map(Ok);
    assert_eq!(bed.world().spawn_reply(77), Some(Ok(expected.to_vec())));
    let placed = bed.world().records.last().cloned();
    let Some(EventKind::Placed { name, hosts, why }) = placed else {
        panic!("{placed:?}")
    };
    assert_eq!(
        (name.as_str(), hosts),
        ("worker", [1, 2, 3, 1, 2].map(host_id).to_vec())
    );
    assert!(why.contains("largest share of a processor"), "{why}");
}

/// If the program is missing on a host, all tasks on that host fail.
#[test]
fn missing_program_fails_tasks_of_its_host() {
    let vm = world(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(4));
    bed.settle();
    let execs = bed.world().take_start_orders();
    let on1 = bed.world().ack(&execs[0]);
    bed.world()
        .ack_with(&execs[1], &[no_file_error(), no_file_error()]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![
            Ok(on1[0]),
            no_file_error(),
            Ok(on1[1]),
            no_file_error()
        ]))
    );
}

/// If a host is lost while tasks are being started on it, these tasks are started on other hosts.
#[test]
fn tasks_of_lost_host_start_elsewhere() {
    let vm = world(3);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(3));
    bed.settle();
    let execs = bed.world().take_start_orders();
    bed.world().post(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_HOST_DELETE,
        0,
        packed_int(host_id(2).tid().raw()),
    );
    bed.settle();
    let again = bed.world().take_start_orders();
    assert_eq!(again.len(), 1);
    assert!(again[0].host != host_id(2) && again[0].request.count == 1);
    let a = bed.world().ack(&execs[0]);
    let b = bed.world().ack(&again[0]);
    let c = bed.world().ack(&execs[2]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Ok(a[0]), Ok(b[0]), Ok(c[0])]))
    );
}

/// If a spawn names a host that is lost, the spawn fails.
#[test]
fn losing_named_host_fails_spawn() {
    let vm = world(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(2)
        },
    );
    bed.settle();
    bed.world().event(
        host_id(1),
        EventKind::HostGone {
            host: host_id(2),
            name: "h2".into(),
            why: "silent".into(),
        },
    );
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::HostFail); 2]))
    );
    assert!(bed.world().notes()[0].starts_with("worker was not started for t40002: Host failed"));
}

/// An order that a host does not acknowledge is abandoned. Tasks that the host starts later are
/// killed.
#[test]
fn unacknowledged_start_is_abandoned() {
    let vm = world(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(2));
    bed.settle();
    let execs = bed.world().take_start_orders();
    let on1 = bed.world().ack(&execs[0]);
    bed.advance(START_ACK_TIMEOUT);
    let again = bed.world().take_start_orders();
    assert_eq!((again.len(), again[0].host), (1, host_id(1)));
    let more = bed.world().ack(&again[0]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Ok(on1[0]), Ok(more[0])]))
    );
    let late = bed.world().ack(&execs[1]);
    bed.settle();
    assert_eq!(bed.world().killed, late);
}

/// Every spawn is answered even if no host acknowledges it.
#[test]
fn every_spawn_is_answered_without_acknowledgements() {
    let vm = world(3);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(2));
    bed.world().spawn(2, &request(0));
    bed.world().post(
        client(),
        CTX_BASE,
        SM_SPAWN,
        3,
        Bytes::from_static(b"rubbish"),
    );
    bed.world().spawn(4, &request(u32::MAX >> 1));
    bed.advance(Micros::from_secs(61));
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::HostFail); 2]))
    );
    assert_eq!(bed.world().spawn_reply(2), Some(Err(PvmError::BadParam)));
    assert!(matches!(bed.world().spawn_reply(3), Some(Err(_))));
    assert_eq!(bed.world().spawn_reply(4), Some(Err(PvmError::OutOfRes)));
}

/// Spawns that arrive at the same moment are not all placed on the same host.
#[test]
fn concurrent_spawns_go_to_different_hosts() {
    let mut bed = TestBed::quiet(&world(3));
    (1..=3).for_each(|wid| bed.world().spawn(wid, &request(1)));
    bed.settle();
    let mut hosts: Vec<u16> = bed
        .world()
        .take_start_orders()
        .iter()
        .map(|exec| exec.host.index())
        .collect();
    hosts.sort_unstable();
    assert_eq!(hosts, [1, 2, 3], "none has acknowledged anything");
}

/// An acknowledgement that arrives after the end of its task does not add the task again.
#[test]
fn late_acknowledgement_does_not_revive_task() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    bed.world().spawn(1, &request(1));
    bed.settle();
    let exec = bed.world().take_start_orders().pop().expect("placed");
    bed.world()
        .event(exec.host, task_ended(task_id(exec.host.index(), 100)));
    let tid = bed.world().ack(&exec)[0];
    bed.settle();
    assert!(!bed.service.model().has_task(tid));
    assert_eq!(bed.world().spawn_reply(1), Some(Ok(vec![Ok(tid)])));
}
