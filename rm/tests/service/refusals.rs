//! Spawns that are refused immediately, with the reason.

use crate::common::{TestBed, client_tid, request, task_id};
use crate::{occupied_bed, query};
use pvm_rm::spawns::refusals::{LOGGED_REFUSALS_MAX, REFUSAL_LOG_INTERVAL};
use pvm_rm::spawns::{PENDING_SPAWNS_MAX, SPAWN_TASKS_MAX, SpawnRules};
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::{Micros, PvmError, Tid};

/// Returns two lists of texts about the refused spawns of this task's job: the entries of the event
/// log, and the lines of `pvm why`.
fn refusal_reports(bed: &mut TestBed, task: Tid) -> (Vec<String>, Vec<String>) {
    let RmReply::Decisions { decisions, .. } = query(bed, &RmQuery::TaskDecisions(task)) else {
        panic!("nothing is known of {task}")
    };
    let spawns = decisions
        .iter()
        .filter(|d| matches!(d.kind, DecisionKind::Spawn { error: Some(_), .. }));
    let decision_texts = spawns.map(|d| d.kind.to_string()).collect();
    let notes = bed
        .state()
        .recorded_notes()
        .into_iter()
        .filter(|note| note.contains("was not started for"))
        .collect();
    (notes, decision_texts)
}

/// Spawns above [`PENDING_SPAWNS_MAX`] are refused. The reason is logged once per interval.
#[test]
fn excess_spawns_are_refused_and_logged_rarely() {
    let mut bed = occupied_bed(SpawnRules {
        wait_max: Micros::from_secs(3600),
        ..SpawnRules::default()
    });
    let pending_max = PENDING_SPAWNS_MAX as i32;
    (1..=pending_max + 50).for_each(|wid| bed.state().request_spawn(wid, &request(1)));
    bed.process_inbox();
    assert_eq!(bed.state().spawn_reply(pending_max), None, "it waits");
    assert!(
        (pending_max + 1..=pending_max + 50)
            .all(|wid| bed.state().spawn_reply(wid) == Some(Err(PvmError::OutOfRes)))
    );
    let refusal_text = "worker was not started for t40002: Out of resources (1024 spawns are in progress or waiting already)";
    assert_eq!(
        refusal_reports(&mut bed, client_tid()),
        (
            vec![refusal_text.to_string()],
            vec![refusal_text.to_string()]
        )
    );
    bed.advance(REFUSAL_LOG_INTERVAL);
    bed.state().request_spawn(pending_max + 51, &request(1));
    bed.process_inbox();
    assert_eq!(
        refusal_reports(&mut bed, client_tid()).1.len(),
        2,
        "somebody may look only now"
    );
}

/// At most [`LOGGED_REFUSALS_MAX`] refusals are logged per interval.
#[test]
fn refusals_of_many_tasks_are_logged_bounded() {
    let mut bed = occupied_bed(SpawnRules::default());
    let logged_max = LOGGED_REFUSALS_MAX as u32;
    for local in 0..3 * logged_max {
        let task = task_id(1, 1000 + local);
        bed.state()
            .request_spawn_by(task, 1, &request(SPAWN_TASKS_MAX + 1));
    }
    bed.process_inbox();
    let notes = bed.state().recorded_notes();
    let is_size_refusal =
        |note: &&String| note.contains("(a spawn may request at most 65536 tasks)");
    assert_eq!(
        notes.iter().filter(is_size_refusal).count(),
        LOGGED_REFUSALS_MAX
    );
    bed.advance(REFUSAL_LOG_INTERVAL);
    bed.state().request_spawn(1, &request(0));
    bed.process_inbox();
    let (notes, _) = refusal_reports(&mut bed, client_tid());
    assert!(
        notes
            .last()
            .is_some_and(|note| note.ends_with("(it requests no tasks)")),
        "{notes:?}"
    );
}
