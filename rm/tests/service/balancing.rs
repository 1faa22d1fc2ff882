//! Rebalancing migrations, and the comparison of their results with the predictions.

use crate::common::{TestBed, fake_vm, host_id, request, spawned_task_info, task_id};
use crate::{options_with_policy, query};
use pvm_rm::policy::EffectivePolicy;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{DecisionKind, MigrationBenefit, RmQuery, RmReply};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, Tid};

/// If the policy enables rebalancing, tasks of a crowded host migrate to free hosts. Otherwise the
/// tasks stay.
#[test]
fn balancing_spreads_tasks_of_crowded_host() {
    for is_rebalancing_enabled in [false, true] {
        let vm = fake_vm(3);
        vm.0.borrow_mut()
            .tasks
            .extend((1..=6).map(|n| spawned_task_info(task_id(2, n), 2)));
        let options = options_with_policy(EffectivePolicy {
            rebalances: is_rebalancing_enabled,
            ..EffectivePolicy::default()
        });
        let mut bed = TestBed::start_with_options(&vm, options);
        for _ in 0..6 {
            bed.advance(Micros::from_secs(10));
            bed.report_absent_owners(&[1, 2, 3]);
        }
        let causes: Vec<String> = bed
            .state()
            .migrations
            .iter()
            .map(|(_, _, cause)| cause.to_string())
            .collect();
        assert_eq!(
            bed.state().take_migrations().len(),
            if is_rebalancing_enabled { 4 } else { 0 },
            "{causes:?}"
        );
        assert!(causes.iter().all(|why| why.starts_with("load: ") && why.contains(" of a processor instead of ")));
    }
}

/// A task is not rebalanced if its spawn named its host.
#[test]
fn task_on_named_host_is_not_balanced() {
    let vm = fake_vm(3);
    let options = options_with_policy(EffectivePolicy {
        rebalances: true,
        ..EffectivePolicy::default()
    });
    let mut bed = TestBed::start_with_options(&vm, options);
    bed.state().request_spawn(
        1,
        &SpawnRequest {
            flags: SPAWN_HOST,
            where_arg: "h2".into(),
            ..request(6)
        },
    );
    bed.process_inbox();
    let order = bed.state().take_start_orders().pop().expect("placed");
    bed.state().acknowledge(&order);
    for _ in 0..6 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 2, 3]);
    }
    assert!(bed.state().take_migrations().is_empty());
}

/// Returns the recorded result of a task's migration as (predicted benefit, actual benefit, text).
/// `None`: there is no result yet.
fn query_migration_result(
    bed: &mut TestBed,
    tid: Tid,
) -> Option<(MigrationBenefit, MigrationBenefit, String)> {
    let RmReply::Decisions { decisions, .. } = query(bed, &RmQuery::TaskDecisions(tid)) else {
        panic!("nothing is known of {tid}")
    };
    decisions.iter().find_map(|decision| match &decision.kind {
        DecisionKind::BenefitMeasured {
            expected,
            actual_benefit: measured_benefit,
            ..
        } => Some((*expected, *measured_benefit, decision.kind.to_string())),
        _ => None,
    })
}

/// The history compares the result of a migration with its predicted gain.
#[test]
fn predicted_gain_is_compared_with_result() {
    let vm = fake_vm(3);
    vm.0.borrow_mut()
        .tasks
        .extend((1..=6).map(|n| spawned_task_info(task_id(2, n), 2)));
    let mut bed = TestBed::start_with_options(
        &vm,
        options_with_policy(EffectivePolicy {
            rebalances: true,
            ..EffectivePolicy::default()
        }),
    );
    let advance_and_report = |bed: &mut TestBed| {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 2, 3]);
    };
    let mut migrated_tids = Vec::new();
    while migrated_tids.len() < 4 {
        advance_and_report(&mut bed);
        let migrations = std::mem::take(&mut bed.state().migrations);
        for (tid, target, cause) in migrations {
            let mut state = bed.state();
            state
                .tasks
                .iter_mut()
                .filter(|task| task.tid == tid)
                .for_each(|task| task.host = target);
            state.report_migrated(tid, 2, target.index(), cause);
            migrated_tids.push(tid);
        }
        bed.process_inbox();
    }
    let (first_task, last_task) = (migrated_tids[0], migrated_tids[3]);
    advance_and_report(&mut bed);
    assert_eq!(
        query_migration_result(&mut bed, first_task),
        None,
        "it is too early to tell"
    );
    // One of the tasks ends early; another one runs longer than predicted.
    bed.state().log_event(
        host_id(1),
        EventKind::TaskEnded {
            tid: first_task,
            status: 0,
            used: Usage::default(),
        },
    );
    bed.process_inbox();
    let (predicted_benefit, measured_benefit, text) =
        query_migration_result(&mut bed, first_task).expect("it is known");
    assert!(
        predicted_benefit.gain > Micros::from_secs(1) && predicted_benefit.cost > Micros(0),
        "{text}"
    );
    assert!(
        measured_benefit.gain > Micros(0) && measured_benefit.cost > Micros(0),
        "{text}"
    );
    assert!(
        text.starts_with(&format!("the migration of {first_task} from h2 to h")),
        "{text}"
    );
    assert_eq!(
        query_migration_result(&mut bed, last_task),
        None,
        "nothing is known of that one yet"
    );
    (0..30).for_each(|_| advance_and_report(&mut bed));
    let (predicted_benefit, measured_benefit, text) =
        query_migration_result(&mut bed, last_task).expect("it is known");
    assert!(
        measured_benefit.gain > predicted_benefit.gain,
        "it has worked there for longer than it was expected to: {text}"
    );
}
