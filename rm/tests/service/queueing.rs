//! Spawns that wait for a free host, and limits on the number of tasks.

use crate::common::{TestBed, client_tid, fake_vm, host_id, request};
use crate::{occupied_bed, options_with_policy, pack_int, task_ended_event};
use pvm_rm::api::VmApi;
use pvm_rm::decide::TaskLimits;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::TAG_HOST_DELETE;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// A spawn that finds no free host waits. It is placed when a host becomes free.
#[test]
fn spawn_waits_for_free_host() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    bed.state().request_spawn(1, &request(2));
    bed.state().request_spawn(2, &request(1));
    bed.advance(Micros::from_secs(10));
    assert_eq!(bed.state().spawn_reply(1), None);
    assert!(bed.state().take_start_orders().is_empty());
    bed.report_owner_absent(1);
    let orders = bed.state().take_start_orders();
    assert_eq!(
        orders
            .iter()
            .map(|e| e.request.task_count)
            .collect::<Vec<_>>(),
        [2, 1],
        "in their order"
    );
    let tids = bed.state().acknowledge(&orders[0]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Ok(tids[0]), Ok(tids[1])]))
    );
}

/// Each free slot goes to one of the waiting spawns only.
#[test]
fn waiting_spawns_share_freed_slots() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    let two_slot_request = SpawnRequest {
        where_arg: "?free >= 2".into(),
        ..request(2)
    };
    (1..=3).for_each(|wid| bed.state().request_spawn(wid, &two_slot_request));
    bed.process_inbox();
    bed.report_owner_absent(1);
    let orders = bed.state().take_start_orders();
    assert_eq!(
        orders.len(),
        1,
        "the host has two processors, and what is being started there has both"
    );
    bed.state().acknowledge(&orders[0]);
    bed.advance(Micros::from_secs(10));
    assert!(bed.state().take_start_orders().is_empty() && bed.state().spawn_reply(1).is_some());
}

/// A spawn whose waiting time has ended is refused. The reply is the same as if the policy allowed
/// no waiting.
#[test]
fn waiting_spawn_times_out_with_refusal() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    bed.state().request_spawn(1, &request(2));
    bed.advance(Micros::from_secs(29));
    assert_eq!(bed.state().spawn_reply(1), None);
    bed.report_owner_present(1);
    bed.advance(Micros::from_secs(2));
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
    let mut no_wait_bed = occupied_bed(SpawnRules::default());
    no_wait_bed.state().request_spawn(1, &request(2));
    no_wait_bed.process_inbox();
    assert_eq!(
        no_wait_bed.state().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
}

/// A task is notified when its request begins to wait and when the request stops waiting, once
/// each.
#[test]
fn task_is_notified_once_of_waiting_and_of_its_end() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    let wait_start = bed.vm.wall_clock();
    bed.state().request_spawn(1, &request(2));
    bed.advance(Micros::from_secs(10));
    bed.report_owner_present(1);
    assert_eq!(bed.state().wait_notices(1), [Some(wait_start)]);
    bed.report_owner_absent(1);
    assert_eq!(
        bed.state().wait_notices(1),
        [Some(wait_start), None],
        "before anything is started"
    );
    bed.state().request_spawn(2, &request(1));
    bed.process_inbox();
    assert_eq!(bed.state().wait_notices(2), [], "it never waited");
}

/// Time for which a request has waited at an earlier resource manager counts as waiting time.
#[test]
fn waiting_time_carries_over_to_new_rm() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    let wait_start = Micros(bed.vm.wall_clock().0 - 20_000_000);
    bed.state()
        .request_spawn_waiting_since(1, &request(1), wait_start);
    bed.advance(Micros::from_secs(9));
    assert_eq!(bed.state().spawn_reply(1), None);
    assert_eq!(bed.state().wait_notices(1), [Some(wait_start)]);
    bed.report_owner_present(1);
    bed.advance(Micros::from_secs(2));
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Err(PvmError::OutOfRes)]))
    );
    bed.state()
        .request_spawn_waiting_since(2, &request(1), Micros(wait_start.0 - 20_000_000));
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes)])),
        "it has waited long enough"
    );
}

/// When a task ends, its waiting requests are dropped.
#[test]
fn exit_cancels_waiting_requests() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(30),
        ..SpawnRules::default()
    });
    bed.state().request_spawn(1, &request(2));
    bed.process_inbox();
    bed.state()
        .log_event(host_id(1), task_ended_event(client_tid()));
    bed.process_inbox();
    bed.report_owner_absent(1);
    assert!(bed.state().take_start_orders().is_empty());
}

/// With a limit of three tasks and two running tasks, a spawn of two tasks is refused. When one of
/// the running tasks has ended, such a spawn is accepted.
#[test]
fn user_task_limit_is_enforced() {
    let limits = TaskLimits {
        user_tasks_max: Some(3),
        job_tasks_max: None,
    };
    let vm = fake_vm(2);
    let rules = SpawnRules {
        wait_max: Micros::default(),
        task_limits: limits,
    };
    let options = options_with_policy(EffectivePolicy {
        spawn_rules: rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::start_with_options(&vm, options);
    bed.state().request_spawn(1, &request(2));
    bed.process_inbox();
    let mut tids = Vec::new();
    let orders = bed.state().take_start_orders();
    for order in &orders {
        tids.extend(bed.state().acknowledge(order));
    }
    bed.process_inbox();
    bed.state().request_spawn(2, &request(2));
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(2),
        Some(Ok(vec![Err(PvmError::OutOfRes); 2]))
    );
    let refusal_note = bed.state().recorded_notes().pop().expect("a note says why");
    assert!(
        refusal_note.contains(
            "the limit --user-tasks of the resource manager is 3, and the user has 2 tasks"
        ),
        "{refusal_note}"
    );
    bed.state().log_event(host_id(1), task_ended_event(tids[0]));
    bed.process_inbox();
    bed.state().request_spawn(3, &request(2));
    bed.process_inbox();
    let started_count: u32 = bed
        .state()
        .take_start_orders()
        .iter()
        .map(|order| order.request.task_count)
        .sum();
    assert_eq!(started_count, 2, "one has ended, so two more are allowed");
}

/// Tasks on a lost host do not count against the limits.
#[test]
fn tasks_of_lost_host_do_not_count() {
    let limits = TaskLimits {
        user_tasks_max: Some(2),
        job_tasks_max: None,
    };
    let vm = fake_vm(2);
    let rules = SpawnRules {
        wait_max: Micros::default(),
        task_limits: limits,
    };
    let options = options_with_policy(EffectivePolicy {
        spawn_rules: rules,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::start_with_options(&vm, options);
    bed.state().request_spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(2)
        },
    );
    bed.process_inbox();
    let order = bed.state().take_start_orders().pop().expect("placed");
    bed.state().acknowledge(&order);
    bed.process_inbox();
    bed.state().host_indices.retain(|host| *host != 2);
    bed.state().post_message(
        Tid::MY_DAEMON,
        CTX_RM,
        TAG_HOST_DELETE,
        0,
        pack_int(host_id(2).tid().raw()),
    );
    bed.process_inbox();
    bed.state().request_spawn(2, &request(2));
    bed.process_inbox();
    assert_eq!(bed.state().take_start_orders().len(), 1);
}
