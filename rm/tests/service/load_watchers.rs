//! Load watchers: their start, restart, adoption and reports.

use crate::common::{TestBed, client, host_id, no_file_error, task_id, task_info, world};
use crate::{packed_int, task_ended};
use bytes::Bytes;
use pvm_rm::service::{TAG_HOST_ADD, TAG_LOAD, TAG_TASK_EXIT};
use sempa_proto::event::EventKind;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, OwnerVerdict, TAG_REPORT_TO};
use sempa_proto::rm::CTX_RM;
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED};
use sempa_proto::task::SPAWN_PINNED;
use sempa_proto::{Micros, Tid};

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
