//! Rebalancing migrations by the service, and the comparison of their results with the prediction.

use crate::common::{TestBed, host_id, request, spawned_task_info, task_id, world};
use crate::{options_with_policy, query};
use pvm_rm::policy::EffectivePolicy;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{DecisionKind, MigrationBenefit, RmQuery, RmReply};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, Tid};

/// With rebalancing, tasks of a crowded host migrate to free hosts. Without it they stay.
#[test]
fn balancing_spreads_tasks_of_crowded_host() {
    for balance in [false, true] {
        let vm = world(3);
        vm.0.borrow_mut()
            .tasks
            .extend((1..=6).map(|n| spawned_task_info(task_id(2, n), 2)));
        let options = options_with_policy(EffectivePolicy {
            balance,
            ..EffectivePolicy::default()
        });
        let mut bed = TestBed::quiet_with(&vm, options);
        for _ in 0..6 {
            bed.advance(Micros::from_secs(10));
            bed.report_absent_owners(&[1, 2, 3]);
        }
        let causes: Vec<String> = bed
            .world()
            .migrations
            .iter()
            .map(|(_, _, cause)| cause.to_string())
            .collect();
        assert_eq!(
            bed.world().take_migrations().len(),
            if balance { 4 } else { 0 },
            "{causes:?}"
        );
        assert!(causes.iter().all(|why| why.starts_with("load: ") && why.contains(" of a processor instead of ")));
    }
}

/// A task whose spawn named its host is not rebalanced.
#[test]
fn task_on_named_host_is_not_balanced() {
    let vm = world(3);
    let options = options_with_policy(EffectivePolicy {
        balance: true,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::quiet_with(&vm, options);
    bed.world().spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            place: "h2".into(),
            ..request(6)
        },
    );
    bed.settle();
    let exec = bed.world().take_start_orders().pop().expect("placed");
    bed.world().ack(&exec);
    for _ in 0..6 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 2, 3]);
    }
    assert!(bed.world().take_migrations().is_empty());
}

/// Returns the recorded result of a task's migration as (predicted, actual, text); `None` if there
/// is none yet.
fn migration_result(
    bed: &mut TestBed,
    tid: Tid,
) -> Option<(MigrationBenefit, MigrationBenefit, String)> {
    let RmReply::Decisions { decisions, .. } = query(bed, &RmQuery::TaskDecisions(tid)) else {
        panic!("nothing is known of {tid}")
    };
    decisions.iter().find_map(|decision| match &decision.kind {
        DecisionKind::BenefitMeasured {
            expected,
            actual: came,
            ..
        } => Some((*expected, *came, decision.kind.to_string())),
        _ => None,
    })
}

/// The history compares the result of a migration with its predicted gain.
#[test]
fn predicted_gain_is_compared_with_result() {
    let vm = world(3);
    vm.0.borrow_mut()
        .tasks
        .extend((1..=6).map(|n| spawned_task_info(task_id(2, n), 2)));
    let mut bed = TestBed::quiet_with(
        &vm,
        options_with_policy(EffectivePolicy {
            balance: true,
            ..EffectivePolicy::default()
        }),
    );
    let round = |bed: &mut TestBed| {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 2, 3]);
    };
    let mut moved = Vec::new();
    while moved.len() < 4 {
        round(&mut bed);
        let begun = std::mem::take(&mut bed.world().migrations);
        for (tid, to, cause) in begun {
            let mut world = bed.world();
            world
                .tasks
                .iter_mut()
                .filter(|task| task.tid == tid)
                .for_each(|task| task.host = to);
            world.migrated(tid, 2, to.index(), cause);
            moved.push(tid);
        }
        bed.settle();
    }
    let (first, second) = (moved[0], moved[3]);
    round(&mut bed);
    assert_eq!(
        migration_result(&mut bed, first),
        None,
        "it is too early to tell"
    );
    // One of the tasks ends early; the other one runs longer than predicted.
    bed.world().event(
        host_id(1),
        EventKind::TaskEnded {
            tid: first,
            status: 0,
            used: Usage::default(),
        },
    );
    bed.settle();
    let (expected, came, sentence) = migration_result(&mut bed, first).expect("it is known");
    assert!(
        expected.gain > Micros::from_secs(1) && expected.cost > Micros(0),
        "{sentence}"
    );
    assert!(came.gain > Micros(0) && came.cost > Micros(0), "{sentence}");
    assert!(
        sentence.starts_with(&format!("the migration of {first} from h2 to h")),
        "{sentence}"
    );
    assert_eq!(
        migration_result(&mut bed, second),
        None,
        "nothing is known of that one yet"
    );
    (0..30).for_each(|_| round(&mut bed));
    let (expected, came, sentence) = migration_result(&mut bed, second).expect("it is known");
    assert!(
        came.gain > expected.gain,
        "it has worked there for longer than it was expected to: {sentence}"
    );
}
