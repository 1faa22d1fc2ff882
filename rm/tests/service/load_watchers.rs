//! Load watchers: their start, restart, adoption and reports.

use crate::common::{TestBed, client_tid, fake_vm, host_id, no_file_error, task_id, task_info};
use crate::{pack_int, task_ended_event};
use bytes::Bytes;
use pvm_rm::service::{TAG_HOST_ADD, TAG_LOAD_REPORT, TAG_TASK_EXIT};
use sempa_proto::event::EventKind;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, OwnerVerdict, TAG_REPORT_ADDRESS};
use sempa_proto::rm::CTX_RM;
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED};
use sempa_proto::task::SPAWN_PINNED;
use sempa_proto::{Micros, Tid};

/// The resource manager starts a load watcher on each host. The watcher is pinned and reports to
/// the resource manager.
#[test]
fn each_host_gets_a_pinned_watcher() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.state().host_indices.push(3);
    bed.state()
        .post_message(Tid::MY_DAEMON, CTX_RM, TAG_HOST_ADD, 0, Bytes::new());
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    assert_eq!((orders.len(), orders[0].host), (1, host_id(3)));
    let request = &orders[0].request;
    assert_eq!(
        (request.program.as_str(), request.flags & SPAWN_PINNED),
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
            &TAG_LOAD_REPORT.to_string()
        ]
    );
    assert_eq!(
        bed.state().exit_watched_tids,
        [TestBed::watcher_tid(1), TestBed::watcher_tid(2)]
    );
}

/// A load watcher that dies repeatedly is restarted at growing intervals.
#[test]
fn dying_watcher_restarts_back_off() {
    let vm = fake_vm(1);
    let mut bed = TestBed::start_with_watchers(&vm);
    let mut watcher = TestBed::watcher_tid(1);
    let mut pauses_ms = Vec::new();
    for _ in 0..5 {
        bed.state().post_message(
            Tid::MY_DAEMON,
            CTX_RM,
            TAG_TASK_EXIT,
            0,
            pack_int(watcher.raw()),
        );
        bed.state().log_event(host_id(1), task_ended_event(watcher));
        bed.process_inbox();
        let mut waited_ms = 0;
        let order = loop {
            if let Some(order) = bed.state().take_start_orders().pop() {
                break order;
            }
            bed.advance(Micros::from_millis(50));
            waited_ms += 50;
        };
        pauses_ms.push(waited_ms);
        watcher = bed.state().acknowledge(&order)[0];
        bed.process_inbox();
    }
    assert!(
        pauses_ms.windows(2).all(|w| w[1] > w[0]) && pauses_ms[0] <= 300,
        "{pauses_ms:?}"
    );
}

/// A load watcher that sends no reports is replaced. A missing load watcher program is reported
/// once.
#[test]
fn silent_watcher_is_replaced() {
    let vm = fake_vm(1);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.advance(Micros::from_secs(46));
    assert_eq!(bed.state().signalled_tids, [TestBed::watcher_tid(1)]);
    for _ in 0..3 {
        bed.advance(Micros::from_secs(5));
        let order = bed
            .state()
            .take_start_orders()
            .pop()
            .expect("another attempt");
        bed.state().acknowledge_with(&order, &[no_file_error()]);
        bed.process_inbox();
    }
    let notes = bed.state().recorded_notes();
    assert_eq!(
        notes
            .iter()
            .filter(|n| n.contains("no load watcher on host 1: No such file"))
            .count(),
        1,
        "{notes:?}"
    );
}

/// The resource manager adopts a load watcher of its predecessor. A watcher that sends no reports
/// is replaced.
#[test]
fn watcher_of_predecessor_is_adopted() {
    let vm = fake_vm(3);
    let old_watcher = |host: u16| {
        task_info(
            TestBed::watcher_tid(host),
            host,
            TASK_FORKED | TASK_CONNECTED,
            LOAD_WATCHER_PROGRAM,
        )
    };
    vm.0.borrow_mut()
        .tasks
        .extend([old_watcher(1), old_watcher(2)]);
    let mut bed = TestBed::try_start(&vm, true).expect("no other resource manager");
    let report_requests: Vec<(Tid, i32)> = bed
        .state()
        .rm_messages
        .iter()
        .map(|message| (message.0, message.1))
        .collect();
    assert_eq!(
        report_requests,
        [
            (TestBed::watcher_tid(1), TAG_REPORT_ADDRESS),
            (TestBed::watcher_tid(2), TAG_REPORT_ADDRESS)
        ]
    );
    let take_ordered_hosts = |bed: &mut TestBed| {
        bed.state()
            .take_start_orders()
            .iter()
            .map(|e| e.host)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        take_ordered_hosts(&mut bed),
        [host_id(3)],
        "the others have one"
    );
    bed.state().report_load(
        TestBed::watcher_tid(1),
        host_id(1),
        OwnerVerdict::Present {
            since: Micros(1),
            detected_at: Micros(2),
        },
    );
    bed.process_inbox();
    assert!(
        matches!(
            bed.state().recorded_events[..],
            [EventKind::OwnerPresent { .. }, ..]
        ),
        "it is heard"
    );
    bed.advance(Micros::from_secs(6));
    assert_eq!(bed.state().signalled_tids, [TestBed::watcher_tid(2)]);
    bed.advance(Micros::from_secs(2));
    assert_eq!(take_ordered_hosts(&mut bed), [host_id(2)]);
}

/// A load watcher that the daemon of its host has started is adopted. A second one on the host is
/// killed.
#[test]
fn watcher_started_by_host_is_adopted() {
    let vm = fake_vm(1);
    let mut bed = TestBed::start_with_watchers(&vm);
    bed.state().post_message(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_TASK_EXIT,
        0,
        pack_int(TestBed::watcher_tid(1).raw()),
    );
    bed.state()
        .log_event(host_id(1), task_ended_event(TestBed::watcher_tid(1)));
    let host_watcher = task_id(1, 51);
    bed.state().report_load(
        host_watcher,
        host_id(1),
        OwnerVerdict::Present {
            since: Micros(1),
            detected_at: Micros(2),
        },
    );
    bed.process_inbox();
    assert!(
        bed.state()
            .recorded_events
            .iter()
            .any(|r| matches!(r, EventKind::OwnerPresent { .. })),
        "it is heard"
    );
    bed.advance(Micros::from_secs(5));
    assert!(
        bed.state().take_start_orders().is_empty(),
        "none is missing"
    );
    bed.state().report_load(
        task_id(1, 52),
        host_id(1),
        OwnerVerdict::Absent { since: None },
    );
    bed.process_inbox();
    assert_eq!(bed.state().signalled_tids, [task_id(1, 52)]);
    assert!(
        !bed.state()
            .recorded_events
            .iter()
            .any(|r| matches!(r, EventKind::OwnerAbsent { .. })),
        "the first one counts"
    );
}

/// A report is accepted only from the load watcher of the reported host.
#[test]
fn reports_of_other_tasks_are_ignored() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    let owner_present = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(2),
    };
    bed.state()
        .report_load(client_tid(), host_id(1), owner_present.clone());
    bed.state()
        .report_load(TestBed::watcher_tid(2), host_id(1), owner_present.clone());
    bed.process_inbox();
    assert!(bed.state().recorded_events.is_empty());
}

/// The first report of a load watcher is accepted even if its start has not been acknowledged yet.
#[test]
fn first_report_may_precede_acknowledgement() {
    let vm = fake_vm(1);
    let mut bed = TestBed::try_start(&vm, true).expect("no other");
    let order = bed
        .state()
        .take_start_orders()
        .pop()
        .expect("a watcher is started");
    let owner_present = OwnerVerdict::Present {
        since: Micros(1),
        detected_at: Micros(2),
    };
    bed.state()
        .report_load(TestBed::watcher_tid(1), host_id(1), owner_present);
    bed.process_inbox();
    assert!(matches!(
        bed.state().recorded_events[0],
        EventKind::OwnerPresent { .. }
    ));
    bed.state()
        .acknowledge_with(&order, &[Ok(TestBed::watcher_tid(1))]);
    bed.process_inbox();
    assert!(bed.state().signalled_tids.is_empty());
}
