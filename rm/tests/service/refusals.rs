//! Spawns that are refused immediately, with the reason.

use crate::common::{TestBed, client, request, task_id};
use crate::{occupied_bed, query};
use pvm_rm::spawns::refusals::{REFUSAL_LOG_INTERVAL, REFUSALS_LOGGED_MAX};
use pvm_rm::spawns::{PENDING_SPAWNS_MAX, SPAWN_TASKS_MAX, SpawnRules};
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::{Micros, PvmError, Tid};

/// Returns the refusals of this task's job: the event log entries, and the lines of `pvm why`.
fn refusal_reports(bed: &mut TestBed, task: Tid) -> (Vec<String>, Vec<String>) {
    let RmReply::Decisions { decisions, .. } = query(bed, &RmQuery::TaskDecisions(task)) else {
        panic!("nothing is known of {task}")
    };
    let spawns = decisions
        .iter()
        .filter(|d| matches!(d.kind, DecisionKind::Spawn { error: Some(_), .. }));
    let decided = spawns.map(|d| d.kind.to_string()).collect();
    let notes = bed
        .world()
        .notes()
        .into_iter()
        .filter(|note| note.contains("was not started for"))
        .collect();
    (notes, decided)
}

/// Spawns above the limit of pending requests are refused, and the reason is logged once per
/// interval.
#[test]
fn excess_spawns_are_refused_and_logged_rarely() {
    let mut bed = occupied_bed(SpawnRules {
        wait: Micros::from_secs(3600),
        ..SpawnRules::default()
    });
    let all = PENDING_SPAWNS_MAX as i32;
    (1..=all + 50).for_each(|wid| bed.world().spawn(wid, &request(1)));
    bed.settle();
    assert_eq!(bed.world().spawn_reply(all), None, "it waits");
    assert!(
        (all + 1..=all + 50)
            .all(|wid| bed.world().spawn_reply(wid) == Some(Err(PvmError::OutOfRes)))
    );
    let why = "worker was not started for t40002: Out of resources (1024 spawns are in progress or waiting already)";
    assert_eq!(
        refusal_reports(&mut bed, client()),
        (vec![why.to_string()], vec![why.to_string()])
    );
    bed.advance(REFUSAL_LOG_INTERVAL);
    bed.world().spawn(all + 51, &request(1));
    bed.settle();
    assert_eq!(
        refusal_reports(&mut bed, client()).1.len(),
        2,
        "somebody may look only now"
    );
}

/// Refusals of very many tasks do not flood the event log.
#[test]
fn refusals_of_many_tasks_are_logged_bounded() {
    let mut bed = occupied_bed(SpawnRules::default());
    let most = REFUSALS_LOGGED_MAX as u32;
    for local in 0..3 * most {
        let task = task_id(1, 1000 + local);
        bed.world().spawn_by(task, 1, &request(SPAWN_TASKS_MAX + 1));
    }
    bed.settle();
    let notes = bed.world().notes();
    let of = |note: &&String| note.contains("(a spawn may request at most 65536 tasks)");
    assert_eq!(notes.iter().filter(of).count(), REFUSALS_LOGGED_MAX);
    bed.advance(REFUSAL_LOG_INTERVAL);
    bed.world().spawn(1, &request(0));
    bed.settle();
    let (notes, _) = refusal_reports(&mut bed, client());
    assert!(
        notes
            .last()
            .is_some_and(|note| note.ends_with("(it requests no tasks)")),
        "{notes:?}"
    );
}
