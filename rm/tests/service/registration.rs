//! Registration: there is at most one resource manager.

use crate::common::{TestBed, client_tid, fake_vm, host_id, rm_tid, task_id, task_info};
use crate::pack_int;
use bytes::Bytes;
use pvm_rm::service::ServiceError;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::sm::{SM_HANDOFF, SM_SCHED};
use sempa_proto::table::{TASK_CONNECTED, TASK_RM};
use sempa_proto::{PvmError, Tid};

/// A second resource manager is refused, and the first one stays registered.
#[test]
fn second_resource_manager_is_refused() {
    let vm = fake_vm(1);
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
    assert!(vm.0.borrow().start_orders.is_empty() && vm.0.borrow().base_messages.is_empty());
}

/// If two resource managers register at the same time, the one that was registered first is
/// registered again.
#[test]
fn concurrent_registration_is_handed_back() {
    let vm = fake_vm(1);
    vm.0.borrow_mut()
        .tasks
        .push(task_info(task_id(1, 9), 1, TASK_CONNECTED, ""));
    vm.0.borrow_mut().previous_rm = task_id(1, 9);
    let Err(error) = TestBed::try_start(&vm, true) else {
        panic!("there is one already")
    };
    assert!(matches!(error, ServiceError::AlreadyRegistered(_)));
    assert_eq!(
        vm.0.borrow().base_messages,
        [(Tid::MY_DAEMON, SM_HANDOFF, 0, pack_int(task_id(1, 9).raw()))]
    );
}

/// A predecessor that has ended does not prevent the start. A successor ends this resource manager.
#[test]
fn dead_predecessor_and_successor_are_handled() {
    let vm = fake_vm(1);
    vm.0.borrow_mut().previous_rm = task_id(1, 9);
    let mut bed = TestBed::try_start(&vm, false).expect("the former one has ended");
    bed.state()
        .log_event(host_id(1), EventKind::RmRegistered { tid: rm_tid() });
    bed.process_inbox();
    bed.state().log_event(
        host_id(1),
        EventKind::RmRegistered {
            tid: task_id(1, 10),
        },
    );
    assert!(
        matches!(bed.try_process_inbox(), Err(ServiceError::Replaced(tid)) if tid == task_id(1, 10))
    );
}

/// If a task sends the resource manager a request to register as resource manager, the request is
/// refused.
#[test]
fn registration_through_rm_is_refused() {
    let vm = fake_vm(1);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state()
        .post_message(client_tid(), CTX_BASE, SM_SCHED, 5, Bytes::new());
    bed.process_inbox();
    assert_eq!(
        bed.state().base_messages,
        [(client_tid(), SM_SCHED, 5, pack_int(PvmError::Denied.code()))]
    );
}
