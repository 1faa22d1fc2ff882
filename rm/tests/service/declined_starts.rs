//! A host's daemon declines tasks because of its owner. These tasks are started on other hosts, or
//! the spawn waits.

use crate::common::{TestBed, fake_vm, host_id, request, task_id};
use crate::options_with_policy;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::owner::GUEST_REFUSED_ERROR;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros};
use std::collections::BTreeSet;

/// A task that a host declines because of its owner is started on another host, unless the request
/// names the host.
#[test]
fn tasks_refused_for_owner_start_elsewhere() {
    let vm = fake_vm(3);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.state().request_spawn(1, &request(3));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    let h1_tids = bed.state().acknowledge(&orders[0]);
    bed.state()
        .acknowledge_with(&orders[1], &[Err(GUEST_REFUSED_ERROR)]);
    let h3_tids = bed.state().acknowledge(&orders[2]);
    bed.process_inbox();
    let second_orders = bed.state().take_start_orders();
    assert_eq!(second_orders.len(), 1, "{second_orders:?}");
    assert!(second_orders[0].host != orders[1].host && second_orders[0].request.task_count == 1);
    // The owner of the host that gets the new order has arrived, too. The remaining host accepts
    // the task.
    bed.state()
        .acknowledge_with(&second_orders[0], &[Err(GUEST_REFUSED_ERROR)]);
    bed.process_inbox();
    let third_orders = bed.state().take_start_orders();
    let accepted_tids = bed.state().acknowledge(&third_orders[0]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![
            Ok(h1_tids[0]),
            Ok(accepted_tids[0]),
            Ok(h3_tids[0])
        ]))
    );
    let hosts: BTreeSet<HostId> =
        [orders[1].host, second_orders[0].host, third_orders[0].host].into();
    assert_eq!(hosts.len(), 3, "each was asked once");

    let named_request = SpawnRequest {
        flags: SPAWN_HOST,
        where_arg: "h2".into(),
        ..request(2)
    };
    bed.state().request_spawn(2, &named_request);
    bed.process_inbox();
    let order = bed.state().take_start_orders().remove(0);
    bed.state().acknowledge_with(
        &order,
        &[Err(GUEST_REFUSED_ERROR), Err(GUEST_REFUSED_ERROR)],
    );
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(2),
        Some(Ok(vec![Err(GUEST_REFUSED_ERROR), Err(GUEST_REFUSED_ERROR)]))
    );
}

/// If declined tasks must share a host, or if their number per host is limited, they are started on
/// other hosts only if the constraint is still met.
#[test]
fn refused_grouped_tasks_keep_their_constraint() {
    let same_host_request = SpawnRequest {
        where_arg: "?same-host".into(),
        ..request(2)
    };
    let spread_request = SpawnRequest {
        where_arg: "?spread = 1".into(),
        ..request(2)
    };
    let request_and_take_orders = |spawn_request: &SpawnRequest| {
        let mut bed = TestBed::start_with_watchers(&fake_vm(3));
        bed.state().request_spawn(1, spawn_request);
        bed.process_inbox();
        let orders = bed.state().take_start_orders();
        (bed, orders)
    };
    let (mut bed, orders) = request_and_take_orders(&same_host_request);
    let tid = task_id(orders[0].host.index(), 100);
    bed.state()
        .acknowledge_with(&orders[0], &[Ok(tid), Err(GUEST_REFUSED_ERROR)]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Ok(tid), Err(GUEST_REFUSED_ERROR)])),
        "the other one has no place beside it"
    );

    let (mut bed, orders) = request_and_take_orders(&same_host_request);
    bed.state().acknowledge_with(
        &orders[0],
        &[Err(GUEST_REFUSED_ERROR), Err(GUEST_REFUSED_ERROR)],
    );
    bed.process_inbox();
    let new_orders = bed.state().take_start_orders();
    assert_eq!(
        new_orders
            .iter()
            .map(|order| order.request.task_count)
            .collect::<Vec<_>>(),
        [2],
        "both, on another host"
    );
    assert!(new_orders[0].host != orders[0].host);

    let (mut bed, orders) = request_and_take_orders(&spread_request);
    assert_eq!(orders.len(), 2);
    let accepted_tids = bed.state().acknowledge(&orders[0]);
    bed.state()
        .acknowledge_with(&orders[1], &[Err(GUEST_REFUSED_ERROR)]);
    bed.process_inbox();
    assert_eq!(
        bed.state()
            .spawn_reply(1)
            .expect("answered")
            .expect("results")
            .iter()
            .flatten()
            .count(),
        accepted_tids.len()
    );
}

/// If all hosts decline a spawn, the spawn waits if the policy allows waiting. Later these hosts
/// get new orders.
#[test]
fn refused_spawn_waits_and_is_retried() {
    let decline_on_all_hosts = |wait_limit: Micros| {
        let rules = SpawnRules {
            wait_max: wait_limit,
            ..SpawnRules::default()
        };
        let mut bed = TestBed::start_with_options(
            &fake_vm(2),
            options_with_policy(EffectivePolicy {
                spawn_rules: rules,
                ..EffectivePolicy::default()
            }),
        );
        bed.state().request_spawn(1, &request(1));
        bed.process_inbox();
        for _ in 0..2 {
            let orders = bed.state().take_start_orders();
            assert_eq!(orders.len(), 1);
            bed.state()
                .acknowledge_with(&orders[0], &[Err(GUEST_REFUSED_ERROR)]);
            // The daemon of the host logs that it has declined the task.
            bed.state().log_event(
                orders[0].host,
                EventKind::Note {
                    text: "not started".into(),
                },
            );
            bed.process_inbox();
        }
        for _ in 0..3 {
            bed.state().log_event(
                host_id(1),
                EventKind::Note {
                    text: "something else".into(),
                },
            );
            bed.process_inbox();
        }
        assert_eq!(
            bed.state().take_start_orders().len(),
            0,
            "nobody is asked again for a while"
        );
        bed
    };
    let bed = decline_on_all_hosts(Micros(0));
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Err(GUEST_REFUSED_ERROR)])),
        "it may not wait"
    );

    let mut bed = decline_on_all_hosts(Micros::from_secs(600));
    assert_eq!(bed.state().spawn_reply(1), None, "it may wait");
    assert_eq!(
        bed.state().wait_notices(1).len(),
        1,
        "its library knows that, so that it waits on under another resource manager"
    );
    bed.advance(Micros::from_secs(10));
    let orders = bed.state().take_start_orders();
    assert_eq!(orders.len(), 1, "owners come and go unheard");
    let started_tids = bed.state().acknowledge(&orders[0]);
    bed.process_inbox();
    assert_eq!(
        bed.state().spawn_reply(1),
        Some(Ok(vec![Ok(started_tids[0])]))
    );
}
