//! Registration: there is at most one resource manager.

use crate::common::{TestBed, client, host_id, rm_tid as own, task_id, task_info, world};
use crate::packed_int;
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
