//! Spawns: placement, start orders, acknowledgements and replies.

use crate::common::{TestBed, client_tid, fake_vm, host_id, no_file_error, request, task_id};
use crate::{pack_int, task_ended_event};
use bytes::Bytes;
use pvm_rm::service::TAG_HOST_DELETE;
use pvm_rm::spawns::START_ACK_TIMEOUT;
use sempa_proto::event::{EventKind, LostTasks};
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::CTX_RM;
use sempa_proto::sm::SM_SPAWN;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// A spawn is placed, started, acknowledged and answered. The reply has the wait id of the spawn.
#[test]
fn spawn_is_placed_started_and_answered() {
    let vm = fake_vm(3);
    let mut bed = TestBed::start_with_watchers(&vm);
    let spawn_request = SpawnRequest {
        args: vec![b"-x".to_vec()],
        where_arg: ":/var".into(),
        ..request(5)
    };
    bed.state().request_spawn(77, &spawn_request);
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    assert_eq!(
        orders
            .iter()
            .map(|e| (e.host.index(), e.request.task_count))
            .collect::<Vec<_>>(),
        [(1, 2), (2, 2), (3, 1)]
    );
    assert!(orders.iter().all(|e| e.parent == client_tid()
        && e.request.args == spawn_request.args
        && e.request.where_arg == ":/var"));
    assert_eq!(bed.state().spawn_reply(77), None, "nobody has acknowledged");
    let h1_tids = bed.state().acknowledge(&orders[0]);
    let h3_tids = bed.state().acknowledge(&orders[2]);
    bed.process_inbox();
    assert_eq!(bed.state().spawn_reply(77), None, "one is missing");
    let h2_tids = bed.state().acknowledge(&orders[1]);
    bed.process_inbox();
    let expected_results = [h1_tids[0], h2_tids[0], h3_tids[0], h1_tids[1], h2_tids[1]].map(Ok);
    assert_eq!(
        bed.state().spawn_reply(77),
        Some(Ok(expected_results.to_vec()))
    );
    let placed_event = bed.state().recorded_events.last().cloned();
    let Some(EventKind::Placed { name, hosts, why }) = placed_event else {
        panic!("{placed_event:?}")
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
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().request_spawn(1, &request(4));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    let h1_tids = bed.state().acknowledge(&orders[0]);
    bed.state()
        .acknowledge_with(&orders[1], &[no_file_error(), no_file_error()]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![
            Ok(h1_tids[0]),
            no_file_error(),
            Ok(h1_tids[1]),
            no_file_error()
        ]))
    );
}

/// If a host is lost while it starts tasks, these tasks are started on other hosts.
#[test]
fn tasks_of_lost_host_start_elsewhere() {
    let vm = fake_vm(3);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().request_spawn(1, &request(3));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    bed.state().post_message(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_HOST_DELETE,
        0,
        pack_int(host_id(2).tid().raw()),
    );
    bed.process_inbox();
    let new_orders = bed.state().take_start_orders();
    assert_eq!(new_orders.len(), 1);
    assert!(new_orders[0].host != host_id(2) && new_orders[0].request.task_count == 1);
    let first_tids = bed.state().acknowledge(&orders[0]);
    let restarted_tids = bed.state().acknowledge(&new_orders[0]);
    let third_tids = bed.state().acknowledge(&orders[2]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![
            Ok(first_tids[0]),
            Ok(restarted_tids[0]),
            Ok(third_tids[0])
        ]))
    );
}

/// If a spawn names a host that is lost, the spawn fails.
#[test]
fn losing_named_host_fails_spawn() {
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().request_spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(2)
        },
    );
    bed.process_inbox();
    bed.state().log_event(
        host_id(1),
        EventKind::HostGone {
            host: host_id(2),
            name: "h2".into(),
            why: "silent".into(),
            lost_tasks: LostTasks::default(),
        },
    );
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::HostFail); 2]))
    );
    assert!(
        bed.state().recorded_notes()[0]
            .starts_with("worker was not started for t40002: Host failed")
    );
}

/// If a host does not acknowledge an order, the order is abandoned. Tasks that the host starts
/// later are killed.
#[test]
fn unacknowledged_start_is_abandoned() {
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().request_spawn(1, &request(2));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    let h1_tids = bed.state().acknowledge(&orders[0]);
    bed.advance(START_ACK_TIMEOUT);
    let new_orders = bed.state().take_start_orders();
    assert_eq!((new_orders.len(), new_orders[0].host), (1, host_id(1)));
    let new_tids = bed.state().acknowledge(&new_orders[0]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Ok(h1_tids[0]), Ok(new_tids[0])]))
    );
    let late_tids = bed.state().acknowledge(&orders[1]);
    bed.process_inbox();
    assert_eq!(bed.state().signalled_tids, late_tids);
}

/// If no host acknowledges an order, the spawn still gets a reply. An invalid spawn gets an error
/// as its reply.
#[test]
fn every_spawn_is_answered_without_acknowledgements() {
    let vm = fake_vm(3);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().request_spawn(1, &request(2));
    bed.state().request_spawn(2, &request(0));
    bed.state().post_message(
        client_tid(),
        CTX_BASE,
        SM_SPAWN,
        3,
        Bytes::from_static(b"rubbish"),
    );
    bed.state().request_spawn(4, &request(u32::MAX >> 1));
    bed.advance(Micros::from_secs(61));
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::HostFail); 2]))
    );
    assert_eq!(bed.state().spawn_reply(2), Some(Err(PvmError::BadParam)));
    assert!(matches!(bed.state().spawn_reply(3), Some(Err(_))));
    assert_eq!(bed.state().spawn_reply(4), Some(Err(PvmError::OutOfRes)));
}

/// Spawns that arrive at the same moment are not all placed on the same host.
#[test]
fn concurrent_spawns_go_to_different_hosts() {
    let mut bed = TestBed::start_with_watchers(&fake_vm(3));
    (1..=3).for_each(|wid| bed.state().request_spawn(wid, &request(1)));
    bed.process_inbox();
    let mut hosts: Vec<u16> = bed
        .state()
        .take_start_orders()
        .iter()
        .map(|order| order.host.index())
        .collect();
    hosts.sort_unstable();
    assert_eq!(hosts, [1, 2, 3], "none has acknowledged anything");
}

/// An acknowledgement that arrives after the end of its task does not add the task to the model
/// again.
#[test]
fn late_acknowledgement_does_not_revive_task() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.state().request_spawn(1, &request(1));
    bed.process_inbox();
    let order = bed.state().take_start_orders().pop().expect("placed");
    bed.state().log_event(
        order.host,
        task_ended_event(task_id(order.host.index(), 100)),
    );
    let tid = bed.state().acknowledge(&order)[0];
    bed.process_inbox();
    assert!(!bed.service.model().has_task(tid));
    assert_eq!(bed.state().spawn_reply(1), Some(Ok(vec![Ok(tid)])));
}
