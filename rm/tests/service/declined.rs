//! Tasks that a host's daemon declines because of its owner are started on other hosts, or wait.

use crate::common::{TestBed, host_id, request, task_id, world};
use crate::options_with_policy;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::owner::GUEST_REFUSED;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros};
use std::collections::BTreeSet;

/// Tasks that a host declines because of its owner are started on other hosts, unless the request
/// names the host.
#[test]
fn tasks_refused_for_owner_start_elsewhere() {
    let vm = world(3);
    let mut bed = TestBed::try_start(&vm, false).expect("no other");
    bed.world().spawn(1, &request(3));
    bed.settle();
    let execs = bed.world().take_start_orders();
    let on1 = bed.world().ack(&execs[0]);
    bed.world().ack_with(&execs[1], &[Err(GUEST_REFUSED)]);
    let on3 = bed.world().ack(&execs[2]);
    bed.settle();
    let again = bed.world().take_start_orders();
    assert_eq!(again.len(), 1, "{again:?}");
    assert!(again[0].host != execs[1].host && again[0].request.count == 1);
    // The owner of the second host has arrived, too. The third host accepts the task.
    bed.world().ack_with(&again[0], &[Err(GUEST_REFUSED)]);
    bed.settle();
    let last = bed.world().take_start_orders();
    let there = bed.world().ack(&last[0]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Ok(on1[0]), Ok(there[0]), Ok(on3[0])]))
    );
    let hosts: BTreeSet<HostId> = [execs[1].host, again[0].host, last[0].host].into();
    assert_eq!(hosts.len(), 3, "each was asked once");

    let named = SpawnRequest {
        flags: SPAWN_HOST,
        place: "h2".into(),
        ..request(2)
    };
    bed.world().spawn(2, &named);
    bed.settle();
    let exec = bed.world().take_start_orders().remove(0);
    bed.world()
        .ack_with(&exec, &[Err(GUEST_REFUSED), Err(GUEST_REFUSED)]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(2),
        Some(Ok(vec![Err(GUEST_REFUSED), Err(GUEST_REFUSED)]))
    );
}

/// Declined tasks that must share a host, or whose number per host is limited, are started on other
/// hosts only if that keeps the constraint.
#[test]
fn refused_grouped_tasks_keep_their_constraint() {
    let same_host = SpawnRequest {
        place: "?same-host".into(),
        ..request(2)
    };
    let spread = SpawnRequest {
        place: "?spread = 1".into(),
        ..request(2)
    };
    let first_order = |asked: &SpawnRequest| {
        let mut bed = TestBed::quiet(&world(3));
        bed.world().spawn(1, asked);
        bed.settle();
        let execs = bed.world().take_start_orders();
        (bed, execs)
    };
    let (mut bed, execs) = first_order(&same_host);
    let tid = task_id(execs[0].host.index(), 100);
    bed.world()
        .ack_with(&execs[0], &[Ok(tid), Err(GUEST_REFUSED)]);
    bed.settle();
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Ok(tid), Err(GUEST_REFUSED)])),
        "the other one has no place beside it"
    );

    let (mut bed, execs) = first_order(&same_host);
    bed.world()
        .ack_with(&execs[0], &[Err(GUEST_REFUSED), Err(GUEST_REFUSED)]);
    bed.settle();
    let again = bed.world().take_start_orders();
    assert_eq!(
        again
            .iter()
            .map(|exec| exec.request.count)
            .collect::<Vec<_>>(),
        [2],
        "both, on another host"
    );
    assert!(again[0].host != execs[0].host);

    let (mut bed, execs) = first_order(&spread);
    assert_eq!(execs.len(), 2);
    let there = bed.world().ack(&execs[0]);
    bed.world().ack_with(&execs[1], &[Err(GUEST_REFUSED)]);
    bed.settle();
    assert_eq!(
        bed.world()
            .spawn_reply(1)
            .expect("answered")
            .expect("results")
            .iter()
            .flatten()
            .count(),
        there.len()
    );
}

/// A spawn that all hosts decline waits if the policy allows it, and is retried on these hosts
/// later.
#[test]
fn refused_spawn_waits_and_is_retried() {
    let refused_by_all = |wait: Micros| {
        let rules = SpawnRules {
            wait,
            ..SpawnRules::default()
        };
        let mut bed = TestBed::quiet_with(
            &world(2),
            options_with_policy(EffectivePolicy {
                rules,
                ..EffectivePolicy::default()
            }),
        );
        bed.world().spawn(1, &request(1));
        bed.settle();
        for _ in 0..2 {
            let execs = bed.world().take_start_orders();
            assert_eq!(execs.len(), 1);
            bed.world().ack_with(&execs[0], &[Err(GUEST_REFUSED)]);
            // The event log contains the refusal by the host.
            bed.world().event(
                execs[0].host,
                EventKind::Note {
                    text: "not started".into(),
                },
            );
            bed.settle();
        }
        for _ in 0..3 {
            bed.world().event(
                host_id(1),
                EventKind::Note {
                    text: "something else".into(),
                },
            );
            bed.settle();
        }
        assert_eq!(
            bed.world().take_start_orders().len(),
            0,
            "nobody is asked again for a while"
        );
        bed
    };
    let bed = refused_by_all(Micros(0));
    assert_eq!(
        bed.world().spawn_reply(1),
        Some(Ok(vec![Err(GUEST_REFUSED)])),
        "it may not wait"
    );

    let mut bed = refused_by_all(Micros::from_secs(600));
    assert_eq!(bed.world().spawn_reply(1), None, "it may wait");
    assert_eq!(
        bed.world().wait_notices(1).len(),
        1,
        "its library knows that, so that it waits on under another resource manager"
    );
    bed.advance(Micros::from_secs(10));
    let execs = bed.world().take_start_orders();
    assert_eq!(execs.len(), 1, "owners come and go unheard");
    let started = bed.world().ack(&execs[0]);
    bed.settle();
    assert_eq!(bed.world().spawn_reply(1), Some(Ok(vec![Ok(started[0])])));
}
