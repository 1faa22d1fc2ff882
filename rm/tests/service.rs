//! Tests of the resource manager's service, with a fake virtual machine and virtual time.

mod answers;
mod balancing;
mod choice;
mod common;
mod declined;
mod drain;
mod grants;
mod kill;
mod park;
mod policy;
mod refusals;
mod suspend;
mod waiting;

use bytes::Bytes;
use common::{
    TestBed, client, host_id, migrate_error, no_file_error, request, rm_tid as own,
    spawned_task_info, task_id, task_info, world,
};
use proptest::prelude::*;
use pvm_rm::api::VmApi;
use pvm_rm::decide::Limits;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::{
    Options, ServiceError, TAG_HOST_ADD, TAG_HOST_DELETE, TAG_LOAD, TAG_POLICY, TAG_TASK_EXIT,
};
use pvm_rm::spawns::{START_ACK_TIMEOUT, SpawnRules};
use pvm_rm::store::StoreLocation;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::event::EventKind;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, OwnerVerdict, TAG_REPORT_TO};
use sempa_proto::message::CTX_BASE;
use sempa_proto::migration::{Failure, MigrationCause, Refusal, Usage};
use sempa_proto::rm::{self, CTX_RM, RmQuery, RmReply, TAG_QUERY, TAG_REPLY};
use sempa_proto::sm::{SM_EXECACK, SM_HANDOFF, SM_SCHED, SM_SPAWN, pack_tids};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TASK_RM};
use sempa_proto::task::{SPAWN_HOST, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

fn packed_int(value: i32) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(value);
    body.finish()
}

fn owner_cause() -> MigrationCause {
    MigrationCause::Owner {
        why: "alice on pts/0".into(),
    }
}

fn task_ended(tid: Tid) -> EventKind {
    EventKind::TaskEnded {
        tid,
        status: 0,
        used: Usage::default(),
    }
}

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

/// A second resource manager is refused, and the first one stays registered.
#[test]
fn second_resource_manager_is_refused() {
    let vm = world(1);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(task_id(1, 9), 1, TASK_CONNECTED | TASK_RM, ""));
    let Err(error) = TestBed::try_start(&vm, true) else {
        panic!("there is one already")
    };
    assert!(matches!(error, ServiceError::AlreadyRegistered(tid) if tid == task_id(1, 9)));
    assert!(
        error
            .to_string()
            .starts_with("resource manager t40009 is registered already"),
        "{error}"
    );
    assert!(vm.0.borrow().execs.is_empty() && vm.0.borrow().sent.is_empty());
}

/// If two resource managers register at the same moment, the one that was registered first is
/// registered again.
#[test]
fn concurrent_registration_is_handed_back() {
    let vm = world(1);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(task_id(1, 9), 1, TASK_CONNECTED, ""));
    vm.0.borrow_mut().previous_rm = task_id(1, 9);
    let Err(error) = TestBed::try_start(&vm, true) else {
        panic!("there is one already")
    };
    assert!(matches!(error, ServiceError::AlreadyRegistered(_)));
    assert_eq!(
        vm.0.borrow().sent,
        [(
            Tid::MY_DAEMON,
            SM_HANDOFF,
            0,
            packed_int(task_id(1, 9).raw())
        )]
    );
}

/// A predecessor that has ended does not prevent the start, and a successor ends this resource
/// manager.
#[test]
fn dead_predecessor_and_successor_are_handled() {
    let vm = world(1);
    vm.0.borrow_mut().previous_rm = task_id(1, 9);
    let mut bed = TestBed::try_start(&vm, false).expect("the former one has ended");
    bed.world()
        .event(host_id(1), EventKind::RmRegistered { tid: own() });
    bed.settle();
    bed.world().event(
        host_id(1),
        EventKind::RmRegistered {
            tid: task_id(1, 10),
        },
    );
    assert!(matches!(bed.try_settle(), Err(ServiceError::Replaced(tid)) if tid == task_id(1, 10)));
}

/// Each host gets a pinned load watcher that reports to the resource manager.
#[test]
fn each_host_gets_a_pinned_watcher() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    bed.world().hosts.push(3);
    bed.world()
        .post(Tid::MY_DAEMON, CTX_RM, TAG_HOST_ADD, 0, Bytes::new());
    bed.settle();
    let execs = bed.world().take_start_orders();
    assert_eq!((execs.len(), execs[0].host), (1, host_id(3)));
    let request = &execs[0].request;
    assert_eq!(
        (request.file.as_str(), request.flags & SPAWN_PINNED),
        (LOAD_WATCHER_PROGRAM, SPAWN_PINNED)
    );
    let args: Vec<_> = request
        .args
        .iter()
        .map(|a| String::from_utf8_lossy(a).into_owned())
        .collect();
    assert_eq!(
        args,
        [
            "--report-to",
            "t40001",
            "--ctx",
            &CTX_RM.to_string(),
            "--tag",
            &TAG_LOAD.to_string()
        ]
    );
    assert_eq!(
        bed.world().watched,
        [TestBed::watcher(1), TestBed::watcher(2)]
    );
}

/// A load watcher that dies repeatedly is restarted at growing intervals.
#[test]
fn dying_watcher_restarts_back_off() {
    let vm = world(1);
    let mut bed = TestBed::quiet(&vm);
    let mut watcher = TestBed::watcher(1);
    let mut pauses = Vec::new();
    for _ in 0..5 {
        bed.world().post(
            Tid::MY_DAEMON,
            CTX_RM,
            TAG_TASK_EXIT,
            0,
            packed_int(watcher.raw()),
        );
        bed.world().event(host_id(1), task_ended(watcher));
        bed.settle();
        let mut waited = 0;
        let exec = loop {
            if let Some(exec) = bed.world().take_start_orders().pop() {
                break exec;
            }
            bed.advance(Micros::from_millis(50));
            waited += 50;
        };
        pauses.push(waited);
        watcher = bed.world().ack(&exec)[0];
        bed.settle();
    }
    assert!(
        pauses.windows(2).all(|w| w[1] > w[0]) && pauses[0] <= 300,
        "{pauses:?}"
    );
}

/// A silent load watcher is replaced. A missing load watcher program is reported once.
#[test]
fn silent_watcher_is_replaced() {
    let vm = world(1);
    let mut bed = TestBed::quiet(&vm);
    bed.advance(Micros::from_secs(46));
    assert_eq!(bed.world().killed, [TestBed::watcher(1)]);
    for _ in 0..3 {
        bed.advance(Micros::from_secs(5));
        let exec = bed
            .world()
            .take_start_orders()
            .pop()
            .expect("another attempt");
        bed.world().ack_with(&exec, &[no_file_error()]);
        bed.settle();
    }
    let notes = bed.world().notes();
    assert_eq!(
        notes
            .iter()
            .filter(|n| n.contains("no load watcher on host 1: No such file"))
            .count(),
        1,
        "{notes:?}"
    );
}

/// A load watcher of an earlier resource manager is adopted, or replaced if it is silent.
#[test]
fn watcher_of_predecessor_is_adopted() {
    let vm = world(3);
    let left = |host: u16| {
        task_info(
            TestBed::watcher(host),
            host,
            TASK_FORKED | TASK_CONNECTED,
            LOAD_WATCHER_PROGRAM,
        )
    };
    vm.0.borrow_mut().tasks.extend([left(1), left(2)]);
    let mut bed = TestBed::try_start(&vm, true).expect("no other resource manager");
    let asked: Vec<(Tid, i32)> = bed
        .world()
        .answers
        .iter()
        .map(|sent| (sent.0, sent.1))
        .collect();
    assert_eq!(
        asked,
        [
            (TestBed::watcher(1), TAG_REPORT_TO),
            (TestBed::watcher(2), TAG_REPORT_TO)
        ]
    );
    let hosts = |bed: &mut TestBed| {
        bed.world()
            .take_start_orders()
            .iter()
            .map(|e| e.host)
            .collect::<Vec<_>>()
    };
    assert_eq!(hosts(&mut bed), [host_id(3)], "the others have one");
    bed.world().report(
        TestBed::watcher(1),
        host_id(1),
        OwnerVerdict::Present {
            since: Micros(1),
            detected_at: Micros(2),
        },
    );
    bed.settle();
    assert!(
        matches!(
            bed.world().records[..],
            [EventKind::OwnerPresent { .. }, ..]
        ),
        "it is heard"
    );
    bed.advance(Micros::from_secs(6));
    assert_eq!(bed.world().killed, [TestBed::watcher(2)]);
    bed.advance(Micros::from_secs(2));
    assert_eq!(hosts(&mut bed), [host_id(2)]);
}

/// A load watcher that was started by its host is adopted, and a second one on the host is killed.
#[test]
fn watcher_started_by_host_is_adopted() {
    let vm = world(1);
    let mut bed = TestBed::quiet(&vm);
    bed.world().post(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_TASK_EXIT,
        0,
        packed_int(TestBed::watcher(1).raw()),
    );
    bed.world()
        .event(host_id(1), task_ended(TestBed::watcher(1)));
    let own = task_id(1, 51);
    bed.world().report(
        own,
        host_id(1),
        OwnerVerdict::Present {
            since: Micros(1),
            detected_at: Micros(2),
        },
    );
    bed.settle();
    assert!(
        bed.world()
            .records
            .iter()
            .any(|r| matches!(r, EventKind::OwnerPresent { .. })),
        "it is heard"
    );
    bed.advance(Micros::from_secs(5));
    assert!(
        bed.world().take_start_orders().is_empty(),
        "none is missing"
    );
    bed.world().report(
        task_id(1, 52),
        host_id(1),
        OwnerVerdict::Absent { since: None },
    );
    bed.settle();
    assert_eq!(bed.world().killed, [task_id(1, 52)]);
    assert!(
        !bed.world()
            .records
            .iter()
            .any(|r| matches!(r, EventKind::OwnerAbsent { .. })),
        "the first one counts"
    );
}

/// A report is accepted only from the load watcher of the reported host.
#[test]
fn reports_of_other_tasks_are_ignored() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    let there = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(2),
    };
    bed.world().report(client(), host_id(1), there.clone());
    bed.world()
        .report(TestBed::watcher(2), host_id(1), there.clone());
    bed.settle();
    assert!(bed.world().records.is_empty());
}

/// The first report of a load watcher is accepted even before its start is acknowledged.
#[test]
fn first_report_may_precede_acknowledgement() {
    let vm = world(1);
    let mut bed = TestBed::try_start(&vm, true).expect("no other");
    let exec = bed
        .world()
        .take_start_orders()
        .pop()
        .expect("a watcher is started");
    let there = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(2),
    };
    bed.world().report(TestBed::watcher(1), host_id(1), there);
    bed.settle();
    assert!(matches!(
        bed.world().records[0],
        EventKind::OwnerPresent { .. }
    ));
    bed.world().ack_with(&exec, &[Ok(TestBed::watcher(1))]);
    bed.settle();
    assert!(bed.world().killed.is_empty());
}

/// Returns a service with three hosts, and two tasks on h2 that were started before the resource
/// manager.
fn two_tasks_on_h2() -> TestBed {
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend([
        spawned_task_info(task_id(2, 1), 2),
        spawned_task_info(task_id(1, 5), 2),
    ]);
    vm.0.borrow_mut().tasks.push(task_info(
        task_id(2, 9),
        2,
        TASK_FORKED,
        "/opt/bin/pvm-load-watcher",
    ));
    TestBed::quiet(&vm)
}

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

/// Returns a service with one host whose owner is present, and these rules for waiting spawns.
fn occupied_bed(rules: SpawnRules) -> TestBed {
    let vm = world(1);
    let options = options_with_policy(EffectivePolicy {
        rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::quiet_with(&vm, options);
    bed.report_owner_present(1);
    bed
}

/// A spawn that finds no free host waits, and is placed when a host becomes free.
#[test]
fn spawn_waits_for_free_host() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    bed.world().spawn(1, &request(2));
    bed.world().spawn(2, &request(1));
    bed.advance(Micros::from_secs(10));
    assert_eq!(bed.world().spawn_reply(1), None);
    assert!(bed.world().take_start_orders().is_empty());
    bed.report_owner_absent(1);
    let execs = bed.world().take_start_orders();
    assert_eq!(
        execs.iter().map(|e| e.request.count).collect::<Vec<_>>(),
        [2, 1],
        "in their order"
    );
    let tids = bed.world().ack(&execs[0]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Ok(tids[0]), Ok(tids[1])]))
    );
}

/// Waiting spawns are not all placed on the same free slots.
#[test]
fn waiting_spawns_share_freed_slots() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    let both = SpawnRequest {
        place: "?free >= 2".into(),
        ..request(2)
    };
    (1..=3).for_each(|wid| bed.world().spawn(wid, &both));
    bed.settle();
    bed.report_owner_absent(1);
    let execs = bed.world().take_start_orders();
    assert_eq!(
        execs.len(),
        1,
        "the host has two processors, and what is being started there has both"
    );
    bed.world().ack(&execs[0]);
    bed.advance(Micros::from_secs(10));
    assert!(bed.world().take_start_orders().is_empty() && bed.world().spawn_reply(1).is_some());
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

/// A spawn whose waiting time has ended is refused, as if the policy allowed no waiting.
#[test]
fn waiting_spawn_times_out_with_refusal() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    bed.world().spawn(1, &request(2));
    bed.advance(Micros::from_secs(29));
    assert_eq!(bed.world().spawn_reply(1), None);
    bed.report_owner_present(1);
    bed.advance(Micros::from_secs(2));
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
    let mut at_once = occupied_bed(SpawnRules::default());
    at_once.world().spawn(1, &request(2));
    at_once.settle();
    assert_eq!(
        at_once.world().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
}

/// A task is notified when its request begins to wait and when it stops waiting, once each.
#[test]
fn task_is_notified_once_of_waiting_and_of_its_end() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    let began = bed.vm.wall_clock();
    bed.world().spawn(1, &request(2));
    bed.advance(Micros::from_secs(10));
    bed.report_owner_present(1);
    assert_eq!(bed.world().wait_notices(1), [Some(began)]);
    bed.report_owner_absent(1);
    assert_eq!(
        bed.world().wait_notices(1),
        [Some(began), None],
        "before anything is started"
    );
    bed.world().spawn(2, &request(1));
    bed.settle();
    assert_eq!(bed.world().wait_notices(2), [], "it never waited");
}

/// Time for which a request has waited at an earlier resource manager counts as waiting time.
#[test]
fn waiting_time_carries_over_to_new_rm() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    let since = Micros(bed.vm.wall_clock().0 - 20_000_000);
    bed.world().spawn_waiting_since(1, &request(1), since);
    bed.advance(Micros::from_secs(9));
    assert_eq!(bed.world().spawn_reply(1), None);
    assert_eq!(bed.world().wait_notices(1), [Some(since)]);
    bed.report_owner_present(1);
    bed.advance(Micros::from_secs(2));
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    bed.world()
        .spawn_waiting_since(2, &request(1), Micros(since.0 - 20_000_000));
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)])),
        "it has waited long enough"
    );
}

/// When a task ends, its waiting requests are dropped.
#[test]
fn exit_cancels_waiting_requests() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    bed.world().spawn(1, &request(2));
    bed.settle();
    bed.world().event(host_id(1), task_ended(client()));
    bed.settle();
    bed.report_owner_absent(1);
    assert!(bed.world().take_start_orders().is_empty());
}

/// A user never has more tasks than the limit.
#[test]
fn user_task_limit_is_enforced() {
    let limits = Limits {
        user_tasks: Some(3),
        job_tasks: None,
    };
    let vm = world(2);
    let rules = SpawnRules {
        wait: Micros::default(),
        limits,
    };
    let options = options_with_policy(EffectivePolicy {
        rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::quiet_with(&vm, options);
    bed.world().spawn(1, &request(2));
    bed.settle();
    let mut tids = Vec::new();
    let execs = bed.world().take_start_orders();
    for exec in &execs {
        tids.extend(bed.world().ack(exec));
    }
    bed.settle();
    bed.world().spawn(2, &request(2));
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
    let why = bed.world().notes().pop().expect("a note says why");
    assert!(
        why.contains("the user has 2 tasks, and 3 are allowed"),
        "{why}"
    );
    bed.world().event(host_id(1), task_ended(tids[0]));
    bed.settle();
    bed.world().spawn(3, &request(2));
    bed.settle();
    let more: u32 = bed
        .world()
        .take_start_orders()
        .iter()
        .map(|exec| exec.request.count)
        .sum();
    assert_eq!(more, 2, "one has ended, so two more are allowed");
}

/// Tasks on a lost host do not count against the limits.
#[test]
fn tasks_of_lost_host_do_not_count() {
    let limits = Limits {
        user_tasks: Some(2),
        job_tasks: None,
    };
    let vm = world(2);
    let rules = SpawnRules {
        wait: Micros::default(),
        limits,
    };
    let options = options_with_policy(EffectivePolicy {
        rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::quiet_with(&vm, options);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(2)
        },
    );
    bed.settle();
    let exec = bed.world().take_start_orders().pop().expect("placed");
    bed.world().ack(&exec);
    bed.settle();
    bed.world().hosts.retain(|host| *host != 2);
    bed.world().post(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_HOST_DELETE,
        0,
        packed_int(host_id(2).tid().raw()),
    );
    bed.settle();
    bed.world().spawn(2, &request(2));
    bed.settle();
    assert_eq!(bed.world().take_start_orders().len(), 1);
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

/// Consecutive events are processed together, and a request that follows them is processed
/// immediately after them.
#[test]
fn events_are_batched_up_to_next_request() {
    let mut bed = two_tasks_on_h2();
    for tid in [task_id(2, 1), task_id(1, 5)] {
        bed.world().event(host_id(2), task_ended(tid));
    }
    bed.world().spawn(1, &request(1));
    bed.world().event(host_id(1), task_ended(task_id(9, 9)));
    bed.service.step().expect("it goes on");
    assert!(
        [task_id(2, 1), task_id(1, 5)]
            .iter()
            .all(|tid| !bed.service.model().has_task(*tid))
    );
    assert_eq!(bed.world().take_start_orders().len(), 1);
    assert_eq!(bed.world().inbox.len(), 1);
}

/// Tasks that were restarted from a checkpoint are added to the model again.
#[test]
fn restarted_tasks_are_known_again() {
    let mut bed = two_tasks_on_h2();
    let tids = [task_id(2, 7), task_id(3, 9)];
    bed.world()
        .tasks
        .extend(tids.map(|tid| spawned_task_info(tid, 3)));
    for tid in tids {
        let started = EventKind::TaskStarted {
            tid,
            parent: client(),
            name: "worker".into(),
            user: 0,
        };
        bed.world().event(host_id(2), started);
        bed.world().event(host_id(2), task_ended(tid));
    }
    bed.settle();
    assert!(tids.iter().all(|tid| !bed.service.model().has_task(*tid)));
    let tasks = tids.map(|tid| (tid, host_id(3))).to_vec();
    let restarted = EventKind::Restarted {
        checkpoint: "s".into(),
        job: tids[0],
        tasks,
        why: "h2 was lost".into(),
    };
    bed.world().event(host_id(1), restarted);
    bed.advance(Micros::from_secs(2));
    assert!(tids.iter().all(|tid| bed.service.model().has_task(*tid)));
    assert_eq!(bed.service.model().host_of(tids[1]), Some(host_id(3)));
}

/// If events were missed, the resource manager requests a new task list.
#[test]
fn missed_events_trigger_a_new_list() {
    let mut bed = two_tasks_on_h2();
    bed.world().event(
        host_id(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.settle();
    let lists = bed.world().list_count;
    bed.advance(Micros::from_secs(3));
    assert_eq!(bed.world().list_count, lists, "nothing was missed");
    bed.world().tasks.push(spawned_task_info(task_id(3, 4), 3));
    bed.world().miss_event();
    bed.world().event(
        host_id(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.advance(Micros::from_secs(1));
    assert_eq!(bed.world().list_count, lists + 1);
    assert!(bed.service.model().has_task(task_id(3, 4)));
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

/// A request to register as resource manager that a task sends to the resource manager is refused.
#[test]
fn registration_through_rm_is_refused() {
    let vm = world(1);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world()
        .post(client(), CTX_BASE, SM_SCHED, 5, Bytes::new());
    bed.settle();
    assert_eq!(
        bed.world().sent,
        [(client(), SM_SCHED, 5, packed_int(PvmError::Denied.code()))]
    );
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

proptest! {
    /// A message with arbitrary bytes from a task does not stop the service. Events are accepted
    /// only from daemons.
    #[test]
    fn invalid_messages_are_survived(messages in prop::collection::vec(
        (prop::sample::select(vec![task_id(1, 2), Tid::MY_DAEMON, host_id(2).daemon_tid(), TestBed::watcher(1)]),
         prop::bool::ANY, 0_i32..20, 990_i32..1010, prop::collection::vec(any::<u8>(), 0..64)), 0..60,
    )) {
        let vm = world(2);
        let mut bed = TestBed::quiet(&vm);
        for (src, base, tag, wid, body) in messages {
            let (ctx, tag) = if base || !src.is_task() { (CTX_BASE, SM_SPAWN + tag) } else { (CTX_RM, tag) };
            bed.world().post(src, ctx, tag, wid, body.into());
        }
        bed.settle();
        bed.advance(Micros::from_secs(1));
    }
}

/// Returns options with load watchers and this policy.
fn options_with_policy(conduct: EffectivePolicy) -> Options {
    Options {
        policy: conduct,
        command_line_policy: conduct,
        watchers: true,
        ..Options::default()
    }
}

/// Returns options with a history in this directory.
fn options_with_history(dir: &std::path::Path) -> Options {
    let shelf = Some(StoreLocation {
        dir: dir.to_path_buf(),
        file_name: "rm.redb".into(),
    });
    Options {
        store_location: shelf,
        ..Options::default()
    }
}

fn query(bed: &mut TestBed, question: &RmQuery) -> RmReply {
    let body = rm::encode(question).expect("it can be written").into();
    bed.world().post(client(), CTX_RM, TAG_QUERY, 4711, body);
    bed.settle();
    let (to, tag, wid, body) = bed.world().answers.pop().expect("an answer");
    assert_eq!((to, tag, wid), (client(), TAG_REPLY, 4711));
    rm::decode(&body)
        .expect("it can be read")
        .expect("of this version")
}

/// A valid change of the policy file applies immediately; an invalid one is ignored.
#[test]
fn valid_policy_change_applies_at_once() {
    let vm = world(3);
    let mut bed = TestBed::with(
        &vm,
        Options {
            policy_file: "rm.toml".into(),
            ..Options::default()
        },
    )
    .expect("no other");
    let change = |bed: &mut TestBed, text: &'static str| {
        bed.world().post(
            own(),
            CTX_RM,
            TAG_POLICY,
            0,
            Bytes::from_static(text.as_bytes()),
        );
        bed.settle();
        bed.world().notes().last().cloned().unwrap_or_default()
    };
    let hosts = |bed: &mut TestBed| {
        bed.world().spawn(1, &request(3));
        bed.settle();
        bed.world()
            .take_start_orders()
            .iter()
            .map(|e| e.host.index())
            .collect::<Vec<_>>()
    };
    let told = change(&mut bed, "placing = \"round-robin\"\nuser_tasks = 3\n");
    assert!(
        told.starts_with("the policy in rm.toml is in force: placing round-robin, balance off"),
        "{told}"
    );
    assert_eq!(hosts(&mut bed), [1, 2, 3]);
    let told = change(
        &mut bed,
        "placing = \"round-robin\"\nuser_tasks = 2\nfoo = 1\n",
    );
    assert!(
        told.starts_with("rm.toml, line 3: unknown field `foo`"),
        "{told}"
    );
    assert_eq!(hosts(&mut bed).len(), 3, "three are still allowed");
    change(&mut bed, "user_tasks = 2\n");
    assert_eq!(hosts(&mut bed), [], "and now two");
    bed.world().post(
        client(),
        CTX_RM,
        TAG_POLICY,
        0,
        Bytes::from_static(b"user_tasks = 9"),
    );
    bed.settle();
    assert_eq!(hosts(&mut bed), [], "nobody else may say so");
}
