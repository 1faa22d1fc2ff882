//! Spawns that wait for a free host, and limits on the number of tasks.

use crate::common::{TestBed, client, host_id, request, world};
use crate::{occupied_bed, options_with_policy, packed_int, task_ended};
use pvm_rm::api::VmApi;
use pvm_rm::decide::Limits;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::service::TAG_HOST_DELETE;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::rm::CTX_RM;
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

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
