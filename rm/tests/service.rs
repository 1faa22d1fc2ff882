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
use common::{Bed, client, failed, h, info, no_file, request, rm as own, spawned, t, world};
use proptest::prelude::*;
use pvm_rm::api::VmApi;
use pvm_rm::decide::Limits;
use pvm_rm::policy::Conduct;
use pvm_rm::service::{
    Options, ServiceError, TAG_HOST_ADD, TAG_HOST_DELETE, TAG_LOAD, TAG_POLICY, TAG_TASK_EXIT,
};
use pvm_rm::spawns::{EXEC_TIME_MAX, Rules};
use pvm_rm::store::Shelf;
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

fn int(value: i32) -> Bytes {
    let mut body = Packer::new(Encoding::Xdr);
    body.int(value);
    body.finish()
}

fn owner() -> MigrationCause {
    MigrationCause::Owner {
        why: "alice on pts/0".into(),
    }
}

fn ended(tid: Tid) -> EventKind {
    EventKind::TaskEnded {
        tid,
        status: 0,
        used: Usage::default(),
    }
}

/// A spawn is placed, started, acknowledged and answered under its wait id.
#[test]
fn spawn_is_placed_started_and_answered() {
    let vm = world(3);
    let mut bed = Bed::quiet(&vm);
    let asked = SpawnRequest {
        args: vec![b"-x".to_vec()],
        place: ":/var".into(),
        ..request(5)
    };
    bed.world().spawn(77, &asked);
    bed.settle();
    let execs = bed.world().took_execs();
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
    assert_eq!(bed.world().answer(77), None, "nobody has acknowledged");
    let on1 = bed.world().ack(&execs[0]);
    let on3 = bed.world().ack(&execs[2]);
    bed.settle();
    assert_eq!(bed.world().answer(77), None, "one is missing");
    let on2 = bed.world().ack(&execs[1]);
    bed.settle();
    let expected = [on1[0], on2[0], on3[0], on1[1], on2[1]].map(Ok);
    assert_eq!(bed.world().answer(77), Some(Ok(expected.to_vec())));
    let placed = bed.world().records.last().cloned();
    let Some(EventKind::Placed { name, hosts, why }) = placed else {
        panic!("{placed:?}")
    };
    assert_eq!(
        (name.as_str(), hosts),
        ("worker", [1, 2, 3, 1, 2].map(h).to_vec())
    );
    assert!(why.contains("largest share of a processor"), "{why}");
}

/// A missing program fails all tasks on that host.
#[test]
fn missing_program_fails_tasks_of_its_host() {
    let vm = world(2);
    let mut bed = Bed::start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(4));
    bed.settle();
    let execs = bed.world().took_execs();
    let on1 = bed.world().ack(&execs[0]);
    bed.world().ack_with(&execs[1], &[no_file(), no_file()]);
    bed.settle();
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Ok(on1[0]), no_file(), Ok(on1[1]), no_file()]))
    );
}

/// Tasks on a host that is lost meanwhile are started elsewhere.
#[test]
fn tasks_of_lost_host_start_elsewhere() {
    let vm = world(3);
    let mut bed = Bed::start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(3));
    bed.settle();
    let execs = bed.world().took_execs();
    bed.world().post(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_HOST_DELETE,
        0,
        int(h(2).tid().raw()),
    );
    bed.settle();
    let again = bed.world().took_execs();
    assert_eq!(again.len(), 1);
    assert!(again[0].host != h(2) && again[0].request.count == 1);
    let a = bed.world().ack(&execs[0]);
    let b = bed.world().ack(&again[0]);
    let c = bed.world().ack(&execs[2]);
    bed.settle();
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Ok(a[0]), Ok(b[0]), Ok(c[0])]))
    );
}

/// The loss of a named host fails the spawn.
#[test]
fn losing_named_host_fails_spawn() {
    let vm = world(2);
    let mut bed = Bed::start(&vm, false).expect("no other");
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
        h(1),
        EventKind::HostGone {
            host: h(2),
            name: "h2".into(),
            why: "silent".into(),
        },
    );
    bed.settle();
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Err(PvmError::HostFail); 2]))
    );
    assert!(bed.world().notes()[0].starts_with("worker was not started for t40002: Host failed"));
}

/// A start that a host does not acknowledge is abandoned, and tasks it starts late are killed.
#[test]
fn unacknowledged_start_is_abandoned() {
    let vm = world(2);
    let mut bed = Bed::start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(2));
    bed.settle();
    let execs = bed.world().took_execs();
    let on1 = bed.world().ack(&execs[0]);
    bed.pass(EXEC_TIME_MAX);
    let again = bed.world().took_execs();
    assert_eq!((again.len(), again[0].host), (1, h(1)));
    let more = bed.world().ack(&again[0]);
    bed.settle();
    assert_eq!(
        bed.world().answer(1),
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
    let mut bed = Bed::start(&vm, false).expect("no other");
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
    bed.pass(Micros::from_secs(61));
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Err(PvmError::HostFail); 2]))
    );
    assert_eq!(bed.world().answer(2), Some(Err(PvmError::BadParam)));
    assert!(matches!(bed.world().answer(3), Some(Err(_))));
    assert_eq!(bed.world().answer(4), Some(Err(PvmError::OutOfRes)));
}

/// A second resource manager is refused, and the first one stays.
#[test]
fn second_resource_manager_is_refused() {
    let vm = world(1);
    vm.0.borrow_mut()
        .tasks
        .push(info(t(1, 9), 1, TASK_CONNECTED | TASK_RM, ""));
    let Err(error) = Bed::start(&vm, true) else {
        panic!("there is one already")
    };
    assert!(matches!(error, ServiceError::AlreadyRegistered(tid) if tid == t(1, 9)));
    assert!(
        error
            .to_string()
            .starts_with("resource manager t40009 is registered already"),
        "{error}"
    );
    assert!(vm.0.borrow().execs.is_empty() && vm.0.borrow().sent.is_empty());
}

/// A resource manager that registered at the same moment gets its registration back.
#[test]
fn concurrent_registration_is_handed_back() {
    let vm = world(1);
    vm.0.borrow_mut()
        .tasks
        .push(info(t(1, 9), 1, TASK_CONNECTED, ""));
    vm.0.borrow_mut().previous = t(1, 9);
    let Err(error) = Bed::start(&vm, true) else {
        panic!("there is one already")
    };
    assert!(matches!(error, ServiceError::AlreadyRegistered(_)));
    assert_eq!(
        vm.0.borrow().sent,
        [(Tid::MY_DAEMON, SM_HANDOFF, 0, int(t(1, 9).raw()))]
    );
}

/// A dead predecessor is no obstacle, and a successor ends this resource manager.
#[test]
fn dead_predecessor_and_successor_are_handled() {
    let vm = world(1);
    vm.0.borrow_mut().previous = t(1, 9);
    let mut bed = Bed::start(&vm, false).expect("the former one has ended");
    bed.world()
        .event(h(1), EventKind::RmRegistered { tid: own() });
    bed.settle();
    bed.world()
        .event(h(1), EventKind::RmRegistered { tid: t(1, 10) });
    assert!(matches!(bed.try_settle(), Err(ServiceError::Replaced(tid)) if tid == t(1, 10)));
}

/// Each host gets a pinned load watcher that reports to the resource manager.
#[test]
fn each_host_gets_a_pinned_watcher() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    bed.world().hosts.push(3);
    bed.world()
        .post(Tid::MY_DAEMON, CTX_RM, TAG_HOST_ADD, 0, Bytes::new());
    bed.settle();
    let execs = bed.world().took_execs();
    assert_eq!((execs.len(), execs[0].host), (1, h(3)));
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
    assert_eq!(bed.world().watched, [Bed::watcher(1), Bed::watcher(2)]);
}

/// A load watcher that dies repeatedly is restarted at growing intervals.
#[test]
fn dying_watcher_restarts_back_off() {
    let vm = world(1);
    let mut bed = Bed::quiet(&vm);
    let mut watcher = Bed::watcher(1);
    let mut pauses = Vec::new();
    for _ in 0..5 {
        bed.world()
            .post(Tid::MY_DAEMON, CTX_RM, TAG_TASK_EXIT, 0, int(watcher.raw()));
        bed.world().event(h(1), ended(watcher));
        bed.settle();
        let mut waited = 0;
        let exec = loop {
            if let Some(exec) = bed.world().took_execs().pop() {
                break exec;
            }
            bed.pass(Micros::from_millis(50));
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

/// A silent load watcher is replaced, and a missing program is reported once.
#[test]
fn silent_watcher_is_replaced() {
    let vm = world(1);
    let mut bed = Bed::quiet(&vm);
    bed.pass(Micros::from_secs(46));
    assert_eq!(bed.world().killed, [Bed::watcher(1)]);
    for _ in 0..3 {
        bed.pass(Micros::from_secs(5));
        let exec = bed.world().took_execs().pop().expect("another attempt");
        bed.world().ack_with(&exec, &[no_file()]);
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

/// A load watcher of an earlier resource manager is adopted, and a silent one is replaced.
#[test]
fn watcher_of_predecessor_is_adopted() {
    let vm = world(3);
    let left = |host: u16| {
        info(
            Bed::watcher(host),
            host,
            TASK_FORKED | TASK_CONNECTED,
            LOAD_WATCHER_PROGRAM,
        )
    };
    vm.0.borrow_mut().tasks.extend([left(1), left(2)]);
    let mut bed = Bed::start(&vm, true).expect("no other resource manager");
    let asked: Vec<(Tid, i32)> = bed
        .world()
        .answers
        .iter()
        .map(|sent| (sent.0, sent.1))
        .collect();
    assert_eq!(
        asked,
        [
            (Bed::watcher(1), TAG_REPORT_TO),
            (Bed::watcher(2), TAG_REPORT_TO)
        ]
    );
    let hosts = |bed: &mut Bed| {
        bed.world()
            .took_execs()
            .iter()
            .map(|e| e.host)
            .collect::<Vec<_>>()
    };
    assert_eq!(hosts(&mut bed), [h(3)], "the others have one");
    bed.world().report(
        Bed::watcher(1),
        h(1),
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
    bed.pass(Micros::from_secs(6));
    assert_eq!(bed.world().killed, [Bed::watcher(2)]);
    bed.pass(Micros::from_secs(2));
    assert_eq!(hosts(&mut bed), [h(2)]);
}

/// A load watcher that a host has started is adopted, and a second one is killed.
#[test]
fn watcher_started_by_host_is_adopted() {
    let vm = world(1);
    let mut bed = Bed::quiet(&vm);
    bed.world().post(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_TASK_EXIT,
        0,
        int(Bed::watcher(1).raw()),
    );
    bed.world().event(h(1), ended(Bed::watcher(1)));
    let own = t(1, 51);
    bed.world().report(
        own,
        h(1),
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
    bed.pass(Micros::from_secs(5));
    assert!(bed.world().took_execs().is_empty(), "none is missing");
    bed.world()
        .report(t(1, 52), h(1), OwnerVerdict::Absent { since: None });
    bed.settle();
    assert_eq!(bed.world().killed, [t(1, 52)]);
    assert!(
        !bed.world()
            .records
            .iter()
            .any(|r| matches!(r, EventKind::OwnerAbsent { .. })),
        "the first one counts"
    );
}

/// A report counts only if it comes from the load watcher of that host.
#[test]
fn reports_of_other_tasks_are_ignored() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    let there = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(2),
    };
    bed.world().report(client(), h(1), there.clone());
    bed.world().report(Bed::watcher(2), h(1), there.clone());
    bed.settle();
    assert!(bed.world().records.is_empty());
}

/// The first report of a load watcher may arrive before its start is acknowledged.
#[test]
fn first_report_may_precede_acknowledgement() {
    let vm = world(1);
    let mut bed = Bed::start(&vm, true).expect("no other");
    let exec = bed
        .world()
        .took_execs()
        .pop()
        .expect("a watcher is started");
    let there = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(2),
    };
    bed.world().report(Bed::watcher(1), h(1), there);
    bed.settle();
    assert!(matches!(
        bed.world().records[0],
        EventKind::OwnerPresent { .. }
    ));
    bed.world().ack_with(&exec, &[Ok(Bed::watcher(1))]);
    bed.settle();
    assert!(bed.world().killed.is_empty());
}

/// Three hosts; two tasks on h2 that started before the resource manager.
fn two_tasks_on_h2() -> Bed {
    let vm = world(3);
    vm.0.borrow_mut()
        .tasks
        .extend([spawned(t(2, 1), 2), spawned(t(1, 5), 2)]);
    vm.0.borrow_mut()
        .tasks
        .push(info(t(2, 9), 2, TASK_FORKED, "/opt/bin/pvm-load-watcher"));
    Bed::quiet(&vm)
}

/// When an owner arrives all tasks leave at once, and the host is used again when the owner has
/// left.
#[test]
fn owner_arrival_empties_host_until_departure() {
    let mut bed = two_tasks_on_h2();
    bed.owner_comes(2);
    // The tasks are older than this resource manager. The old load watcher is no guest and stays.
    assert_eq!(bed.world().took_migrations(), [(t(1, 5), 1), (t(2, 1), 3)]);
    let why = "alice on pts/0".to_string();
    let present = EventKind::OwnerPresent {
        host: h(2),
        since: Micros(7),
        detected_at: Micros(8),
        why,
    };
    assert_eq!(bed.world().records, std::slice::from_ref(&present));
    bed.world().moved(t(1, 5), 2, 1, owner());
    bed.settle();
    assert_eq!(bed.world().records.len(), 1, "one is still there");
    bed.world().moved(t(2, 1), 2, 3, owner());
    bed.settle();
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: h(2) })
    );
    bed.owner_comes(2);
    assert_eq!(bed.world().records.len(), 2, "said once");
    bed.world().spawn(1, &request(2));
    bed.settle();
    assert!(bed.world().took_execs().iter().all(|e| e.host != h(2)));
    bed.owner_leaves(2);
    let why = "no user is logged in".to_string();
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::OwnerAbsent { host: h(2), why })
    );
    assert!(
        bed.world().took_migrations().is_empty(),
        "nobody is moved back"
    );
    bed.world().spawn(2, &request(1));
    bed.settle();
    assert_eq!(bed.world().took_execs()[0].host, h(2));
}

/// One host whose owner is present, with these rules for waiting spawns.
fn full(rules: Rules) -> Bed {
    let vm = world(1);
    let options = with_conduct(Conduct {
        rules,
        ..Conduct::default()
    });
    let mut bed = Bed::quiet_with(&vm, options);
    bed.owner_comes(1);
    bed
}

/// A spawn without a free host waits and is placed when one becomes free.
#[test]
fn spawn_waits_for_free_host() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(30),
        ..Rules::default()
    });
    bed.world().spawn(1, &request(2));
    bed.world().spawn(2, &request(1));
    bed.pass(Micros::from_secs(10));
    assert_eq!(bed.world().answer(1), None);
    assert!(bed.world().took_execs().is_empty());
    bed.owner_leaves(1);
    let execs = bed.world().took_execs();
    assert_eq!(
        execs.iter().map(|e| e.request.count).collect::<Vec<_>>(),
        [2, 1],
        "in their order"
    );
    let tids = bed.world().ack(&execs[0]);
    bed.settle();
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Ok(tids[0]), Ok(tids[1])]))
    );
}

/// Waiting spawns do not all take the same free slots.
#[test]
fn waiting_spawns_share_freed_slots() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(30),
        ..Rules::default()
    });
    let both = SpawnRequest {
        place: "?free >= 2".into(),
        ..request(2)
    };
    (1..=3).for_each(|wid| bed.world().spawn(wid, &both));
    bed.settle();
    bed.owner_leaves(1);
    let execs = bed.world().took_execs();
    assert_eq!(
        execs.len(),
        1,
        "the host has two processors, and what is being started there has both"
    );
    bed.world().ack(&execs[0]);
    bed.pass(Micros::from_secs(10));
    assert!(bed.world().took_execs().is_empty() && bed.world().answer(1).is_some());
}

/// Spawns that arrive at the same moment do not all go to the same host.
#[test]
fn concurrent_spawns_go_to_different_hosts() {
    let mut bed = Bed::quiet(&world(3));
    (1..=3).for_each(|wid| bed.world().spawn(wid, &request(1)));
    bed.settle();
    let mut hosts: Vec<u16> = bed
        .world()
        .took_execs()
        .iter()
        .map(|exec| exec.host.index())
        .collect();
    hosts.sort_unstable();
    assert_eq!(hosts, [1, 2, 3], "none has acknowledged anything");
}

/// A spawn that has waited too long is refused as without waiting.
#[test]
fn waiting_spawn_times_out_with_refusal() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(30),
        ..Rules::default()
    });
    bed.world().spawn(1, &request(2));
    bed.pass(Micros::from_secs(29));
    assert_eq!(bed.world().answer(1), None);
    bed.owner_comes(1);
    bed.pass(Micros::from_secs(2));
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
    let mut at_once = full(Rules::default());
    at_once.world().spawn(1, &request(2));
    at_once.settle();
    assert_eq!(
        at_once.world().answer(1),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
}

/// A task is notified once that its request waits, and when it no longer waits.
#[test]
fn task_is_notified_once_of_waiting_and_of_its_end() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(30),
        ..Rules::default()
    });
    let began = bed.vm.wall();
    bed.world().spawn(1, &request(2));
    bed.pass(Micros::from_secs(10));
    bed.owner_comes(1);
    assert_eq!(bed.world().waits(1), [Some(began)]);
    bed.owner_leaves(1);
    assert_eq!(
        bed.world().waits(1),
        [Some(began), None],
        "before anything is started"
    );
    bed.world().spawn(2, &request(1));
    bed.settle();
    assert_eq!(bed.world().waits(2), [], "it never waited");
}

/// The time that a request has waited under an earlier resource manager counts.
#[test]
fn waiting_time_carries_over_to_new_rm() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(30),
        ..Rules::default()
    });
    let since = Micros(bed.vm.wall().0 - 20_000_000);
    bed.world().spawn_again(1, &request(1), since);
    bed.pass(Micros::from_secs(9));
    assert_eq!(bed.world().answer(1), None);
    assert_eq!(bed.world().waits(1), [Some(since)]);
    bed.owner_comes(1);
    bed.pass(Micros::from_secs(2));
    assert_eq!(
        bed.world().answer(1),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    bed.world()
        .spawn_again(2, &request(1), Micros(since.0 - 20_000_000));
    bed.settle();
    assert_eq!(
        bed.world().answer(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)])),
        "it has waited long enough"
    );
}

/// The requests of a task are dropped when it ends.
#[test]
fn exit_cancels_waiting_requests() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(30),
        ..Rules::default()
    });
    bed.world().spawn(1, &request(2));
    bed.settle();
    bed.world().event(h(1), ended(client()));
    bed.settle();
    bed.owner_leaves(1);
    assert!(bed.world().took_execs().is_empty());
}

/// A user never gets more tasks than the limit allows.
#[test]
fn user_task_limit_is_enforced() {
    let limits = Limits {
        user_tasks: Some(3),
        job_tasks: None,
    };
    let vm = world(2);
    let rules = Rules {
        wait: Micros::default(),
        limits,
    };
    let options = with_conduct(Conduct {
        rules,
        ..Conduct::default()
    });
    let mut bed = Bed::quiet_with(&vm, options);
    bed.world().spawn(1, &request(2));
    bed.settle();
    let mut tids = Vec::new();
    let execs = bed.world().took_execs();
    for exec in &execs {
        tids.extend(bed.world().ack(exec));
    }
    bed.settle();
    bed.world().spawn(2, &request(2));
    bed.settle();
    assert_eq!(
        bed.world().answer(2),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
    let why = bed.world().notes().pop().expect("a note says why");
    assert!(
        why.contains("the user has 2 tasks, and 3 are allowed"),
        "{why}"
    );
    bed.world().event(h(1), ended(tids[0]));
    bed.settle();
    bed.world().spawn(3, &request(2));
    bed.settle();
    let more: u32 = bed
        .world()
        .took_execs()
        .iter()
        .map(|exec| exec.request.count)
        .sum();
    assert_eq!(more, 2, "one has ended, so two more are allowed");
}

/// Tasks on a lost host do not count towards limits.
#[test]
fn tasks_of_lost_host_do_not_count() {
    let limits = Limits {
        user_tasks: Some(2),
        job_tasks: None,
    };
    let vm = world(2);
    let rules = Rules {
        wait: Micros::default(),
        limits,
    };
    let options = with_conduct(Conduct {
        rules,
        ..Conduct::default()
    });
    let mut bed = Bed::quiet_with(&vm, options);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(2)
        },
    );
    bed.settle();
    let exec = bed.world().took_execs().pop().expect("placed");
    bed.world().ack(&exec);
    bed.settle();
    bed.world().hosts.retain(|host| *host != 2);
    bed.world().post(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_HOST_DELETE,
        0,
        int(h(2).tid().raw()),
    );
    bed.settle();
    bed.world().spawn(2, &request(2));
    bed.settle();
    assert_eq!(bed.world().took_execs().len(), 1);
}

/// A host without guests is recorded as clean as soon as its owner arrives.
#[test]
fn host_without_guests_is_clean_at_once() {
    let mut bed = two_tasks_on_h2();
    bed.owner_comes(3);
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: h(3) })
    );
}

/// After a refusal the next best host is tried.
#[test]
fn refused_migration_tries_next_host() {
    let mut bed = two_tasks_on_h2();
    let kernel = Refusal::KernelFeatures {
        missing: vec!["clone3".into()],
        source: "6.1".into(),
        target: "5.10".into(),
    };
    bed.world()
        .refuse
        .insert((t(1, 5), h(1)), failed(Failure::Refused(vec![kernel])));
    bed.owner_comes(2);
    bed.pass(Micros(1));
    assert_eq!(
        bed.world().took_migrations(),
        [(t(1, 5), 1), (t(2, 1), 3), (t(1, 5), 3)]
    );
}

/// After a failed migration the next best host is tried, and later the first one again.
#[test]
fn failed_migration_tries_next_host_then_retries() {
    let mut bed = two_tasks_on_h2();
    bed.owner_comes(2);
    bed.world().moved(t(2, 1), 2, 3, owner());
    bed.settle();
    assert_eq!(bed.world().took_migrations(), [(t(1, 5), 1), (t(2, 1), 3)]);
    bed.world()
        .move_failed(t(1, 5), 2, 1, Failure::Killed { signal: 9 });
    bed.settle();
    assert_eq!(bed.world().took_migrations(), [(t(1, 5), 3)]);
    bed.world()
        .move_failed(t(1, 5), 2, 3, Failure::Killed { signal: 9 });
    bed.settle();
    assert!(bed.world().took_migrations().is_empty());
    let notes = bed.world().notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].starts_with(
        "t40005 stays on h2 although its owner is present: no host accepts it (h1: the engine"
    ));
    bed.pass(Micros::from_secs(2));
    assert_eq!(bed.world().took_migrations(), [(t(1, 5), 1)]);
    assert_eq!(bed.world().notes().len(), 1, "said once");
}

/// The migration of a task that has not connected yet is retried soon.
#[test]
fn unconnected_task_is_retried_soon() {
    let mut bed = two_tasks_on_h2();
    bed.world().refuse.insert(
        (t(1, 5), h(1)),
        failed(Failure::Refused(vec![Refusal::NotConnected])),
    );
    bed.owner_comes(2);
    bed.world().refuse.clear();
    bed.pass(Micros::from_millis(500));
    assert_eq!(
        bed.world().took_migrations(),
        [(t(1, 5), 1), (t(2, 1), 3), (t(1, 5), 1)]
    );
    assert!(bed.world().notes().is_empty());
}

/// A pinned task is no guest.
#[test]
fn pinned_task_is_no_guest() {
    let mut bed = two_tasks_on_h2();
    for tid in [t(1, 5), t(2, 1)] {
        for to in [1, 3] {
            bed.world().refuse.insert(
                (tid, h(to)),
                failed(Failure::Refused(vec![Refusal::Pinned])),
            );
        }
    }
    bed.owner_comes(2);
    bed.pass(Micros::from_secs(1));
    assert_eq!(bed.world().took_migrations().len(), 2);
    assert_eq!(
        bed.world().records.last(),
        Some(&EventKind::HostVacated { host: h(2) })
    );
}

/// A host without an engine is no target for any task.
#[test]
fn host_without_engine_is_no_target() {
    let mut bed = two_tasks_on_h2();
    let no_engine = Refusal::NoEngine {
        host: h(1),
        why: "not found".into(),
    };
    bed.world()
        .refuse
        .insert((t(1, 5), h(1)), failed(Failure::Refused(vec![no_engine])));
    bed.owner_comes(2);
    bed.pass(Micros(1));
    assert_eq!(
        bed.world().took_migrations(),
        [(t(1, 5), 1), (t(2, 1), 3), (t(1, 5), 3)]
    );
    bed.world().moved(t(1, 5), 2, 3, owner());
    bed.world().moved(t(2, 1), 2, 3, owner());
    bed.owner_leaves(2);
    bed.owner_comes(3);
    assert!(bed.world().took_migrations().iter().all(|(_, to)| *to == 2));
}

/// A spawn that names a host waits until the host's owner has left.
#[test]
fn spawn_on_named_host_waits_for_owner() {
    let vm = world(2);
    let rules = Rules {
        wait: Micros::from_secs(60),
        ..Rules::default()
    };
    let mut bed = Bed::quiet_with(
        &vm,
        with_conduct(Conduct {
            rules,
            ..Conduct::default()
        }),
    );
    bed.owner_comes(2);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    assert!(bed.world().took_execs().is_empty());
    assert_eq!(bed.world().answer(1), None);
    bed.owner_leaves(2);
    let exec = bed.world().took_execs().pop().expect("placed");
    assert_eq!(exec.host, h(2));
    bed.world().ack(&exec);
    bed.settle();
    assert!(matches!(bed.world().answer(1), Some(Ok(tasks)) if tasks.iter().all(Result::is_ok)));
}

/// A task on a named host is evicted like any other.
#[test]
fn task_on_named_host_is_evicted_too() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(1)
        },
    );
    bed.settle();
    let exec = bed.world().took_execs().pop().expect("placed");
    bed.owner_comes(2);
    // The event arrives before the acknowledgement.
    bed.world().event(
        h(2),
        EventKind::TaskStarted {
            tid: t(2, 100),
            parent: client(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.settle();
    assert_eq!(bed.world().ack(&exec), [t(2, 100)]);
    bed.settle();
    assert_eq!(bed.world().took_migrations(), [(t(2, 100), 1)]);
}

/// A task that starts next to an owner is evicted; a command-line task stays.
#[test]
fn task_started_beside_owner_is_evicted() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    bed.owner_comes(2);
    bed.world().event(
        h(2),
        EventKind::TaskStarted {
            tid: t(2, 7),
            parent: client(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.world().event(
        h(2),
        EventKind::TaskStarted {
            tid: t(2, 8),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    bed.settle();
    assert_eq!(bed.world().took_migrations(), [(t(2, 7), 1)]);
}

/// A late acknowledgement does not revive a task that has ended.
#[test]
fn late_acknowledgement_does_not_revive_task() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    bed.world().spawn(1, &request(1));
    bed.settle();
    let exec = bed.world().took_execs().pop().expect("placed");
    bed.world()
        .event(exec.host, ended(t(exec.host.index(), 100)));
    let tid = bed.world().ack(&exec)[0];
    bed.settle();
    assert!(!bed.service.model().knows(tid));
    assert_eq!(bed.world().answer(1), Some(Ok(vec![Ok(tid)])));
}

/// Consecutive events are handled together, and the next request right after them.
#[test]
fn events_are_batched_up_to_next_request() {
    let mut bed = two_tasks_on_h2();
    for tid in [t(2, 1), t(1, 5)] {
        bed.world().event(h(2), ended(tid));
    }
    bed.world().spawn(1, &request(1));
    bed.world().event(h(1), ended(t(9, 9)));
    bed.service.step().expect("it goes on");
    assert!(
        [t(2, 1), t(1, 5)]
            .iter()
            .all(|tid| !bed.service.model().knows(*tid))
    );
    assert_eq!(bed.world().took_execs().len(), 1);
    assert_eq!(bed.world().inbox.len(), 1);
}

/// Tasks that are restarted from a checkpoint are known again.
#[test]
fn restarted_tasks_are_known_again() {
    let mut bed = two_tasks_on_h2();
    let tids = [t(2, 7), t(3, 9)];
    bed.world().tasks.extend(tids.map(|tid| spawned(tid, 3)));
    for tid in tids {
        let started = EventKind::TaskStarted {
            tid,
            parent: client(),
            name: "worker".into(),
            user: 0,
        };
        bed.world().event(h(2), started);
        bed.world().event(h(2), ended(tid));
    }
    bed.settle();
    assert!(tids.iter().all(|tid| !bed.service.model().knows(*tid)));
    let tasks = tids.map(|tid| (tid, h(3))).to_vec();
    let restarted = EventKind::Restarted {
        checkpoint: "s".into(),
        job: tids[0],
        tasks,
        why: "h2 was lost".into(),
    };
    bed.world().event(h(1), restarted);
    bed.pass(Micros::from_secs(2));
    assert!(tids.iter().all(|tid| bed.service.model().knows(*tid)));
    assert_eq!(bed.service.model().host_of(tids[1]), Some(h(3)));
}

/// Missed events make the resource manager request a new task list.
#[test]
fn missed_events_trigger_a_new_list() {
    let mut bed = two_tasks_on_h2();
    bed.world().event(
        h(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.settle();
    let lists = bed.world().lists;
    bed.pass(Micros::from_secs(3));
    assert_eq!(bed.world().lists, lists, "nothing was missed");
    bed.world().tasks.push(spawned(t(3, 4), 3));
    bed.world().miss_event();
    bed.world().event(
        h(1),
        EventKind::Note {
            text: String::new(),
        },
    );
    bed.pass(Micros::from_secs(1));
    assert_eq!(bed.world().lists, lists + 1);
    assert!(bed.service.model().knows(t(3, 4)));
}

/// A migration without a result is checked after a while and repeated.
#[test]
fn silent_migration_is_checked_and_repeated() {
    let mut bed = two_tasks_on_h2();
    bed.owner_comes(2);
    assert_eq!(bed.world().took_migrations().len(), 2);
    for _ in 0..6 {
        bed.pass(Micros::from_secs(10));
        bed.signs_of_life(&[1, 3]);
        bed.owner_comes(2);
    }
    // The list shows that they are on h2 and do not migrate: the migrations are requested again.
    assert_eq!(bed.world().took_migrations().len(), 2);
}

/// A task that tries to register as resource manager through this one is refused.
#[test]
fn registration_through_rm_is_refused() {
    let vm = world(1);
    let mut bed = Bed::start(&vm, false).expect("no other");
    bed.world()
        .post(client(), CTX_BASE, SM_SCHED, 5, Bytes::new());
    bed.settle();
    assert_eq!(
        bed.world().sent,
        [(client(), SM_SCHED, 5, int(PvmError::Denied.code()))]
    );
}

/// A task that connects from a command line is known and never migrated.
#[test]
fn command_line_task_is_never_migrated() {
    let vm = world(2);
    let mut bed = Bed::quiet(&vm);
    bed.world().post(
        h(2).daemon_tid(),
        CTX_BASE,
        SM_EXECACK,
        0,
        pack_tids(&[Ok(t(2, 3))]),
    );
    bed.owner_comes(2);
    assert!(bed.service.model().knows(t(2, 3)));
    assert!(bed.world().took_migrations().is_empty());
}

proptest! {
    /// Any task may send any bytes. Events are accepted only from daemons, which send valid ones.
    #[test]
    fn invalid_messages_are_survived(messages in prop::collection::vec(
        (prop::sample::select(vec![t(1, 2), Tid::MY_DAEMON, h(2).daemon_tid(), Bed::watcher(1)]),
         prop::bool::ANY, 0_i32..20, 990_i32..1010, prop::collection::vec(any::<u8>(), 0..64)), 0..60,
    )) {
        let vm = world(2);
        let mut bed = Bed::quiet(&vm);
        for (src, base, tag, wid, body) in messages {
            let (ctx, tag) = if base || !src.is_task() { (CTX_BASE, SM_SPAWN + tag) } else { (CTX_RM, tag) };
            bed.world().post(src, ctx, tag, wid, body.into());
        }
        bed.settle();
        bed.pass(Micros::from_secs(1));
    }
}

/// Options with load watchers and this policy.
fn with_conduct(conduct: Conduct) -> Options {
    Options {
        conduct,
        given: conduct,
        watchers: true,
        ..Options::default()
    }
}

/// Options with a history in this directory.
fn with_books(dir: &std::path::Path) -> Options {
    let shelf = Some(Shelf {
        dir: dir.to_path_buf(),
        name: "rm.redb".into(),
    });
    Options {
        shelf,
        ..Options::default()
    }
}

fn ask(bed: &mut Bed, question: &RmQuery) -> RmReply {
    let body = rm::encode(question).expect("it can be written").into();
    bed.world().post(client(), CTX_RM, TAG_QUERY, 4711, body);
    bed.settle();
    let (to, tag, wid, body) = bed.world().answers.pop().expect("an answer");
    assert_eq!((to, tag, wid), (client(), TAG_REPLY, 4711));
    rm::decode(&body)
        .expect("it can be read")
        .expect("of this version")
}

/// A changed policy file applies at once; an invalid one does not.
#[test]
fn valid_policy_change_applies_at_once() {
    let vm = world(3);
    let mut bed = Bed::with(
        &vm,
        Options {
            policy_file: "rm.toml".into(),
            ..Options::default()
        },
    )
    .expect("no other");
    let change = |bed: &mut Bed, text: &'static str| {
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
    let hosts = |bed: &mut Bed| {
        bed.world().spawn(1, &request(3));
        bed.settle();
        bed.world()
            .took_execs()
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
