//! Spawns that are refused at once, with the reason.

use crate::common::{Bed, client, request, t};
use crate::{ask, full};
use pvm_rm::spawns::refusals::{REFUSAL_TOLD_PAUSE, REFUSALS_TOLD_MAX};
use pvm_rm::spawns::{Rules, SPAWN_TASKS_MAX, SPAWNS_OPEN_MAX};
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::{Micros, PvmError, Tid};

/// Returns what the event log and `pvm why` report about refusals of this task's job.
fn told(bed: &mut Bed, task: Tid) -> (Vec<String>, Vec<String>) {
    let RmReply::Decisions { decisions, .. } = ask(bed, &RmQuery::TaskDecisions(task)) else {
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

/// Spawns above the limit of open requests are refused with a reason that is logged once per
/// interval.
#[test]
fn excess_spawns_are_refused_and_logged_rarely() {
    let mut bed = full(Rules {
        wait: Micros::from_secs(3600),
        ..Rules::default()
    });
    let all = SPAWNS_OPEN_MAX as i32;
    (1..=all + 50).for_each(|wid| bed.world().spawn(wid, &request(1)));
    bed.settle();
    assert_eq!(bed.world().answer(all), None, "it waits");
    assert!(
        (all + 1..=all + 50).all(|wid| bed.world().answer(wid) == Some(Err(PvmError::OutOfRes)))
    );
    let why = "worker was not started for t40002: Out of resources (1024 spawns are in progress or waiting already)";
    assert_eq!(
        told(&mut bed, client()),
        (vec![why.to_string()], vec![why.to_string()])
    );
    bed.pass(REFUSAL_TOLD_PAUSE);
    bed.world().spawn(all + 51, &request(1));
    bed.settle();
    assert_eq!(
        told(&mut bed, client()).1.len(),
        2,
        "somebody may look only now"
    );
}

/// Refusals of very many tasks do not fill the event log.
#[test]
fn refusals_of_many_tasks_are_logged_bounded() {
    let mut bed = full(Rules::default());
    let most = REFUSALS_TOLD_MAX as u32;
    for local in 0..3 * most {
        let task = t(1, 1000 + local);
        bed.world().spawn_by(task, 1, &request(SPAWN_TASKS_MAX + 1));
    }
    bed.settle();
    let notes = bed.world().notes();
    let of = |note: &&String| note.contains("(a spawn may request at most 65536 tasks)");
    assert_eq!(notes.iter().filter(of).count(), REFUSALS_TOLD_MAX);
    bed.pass(REFUSAL_TOLD_PAUSE);
    bed.world().spawn(1, &request(0));
    bed.settle();
    let (notes, _) = told(&mut bed, client());
    assert!(
        notes
            .last()
            .is_some_and(|note| note.ends_with("(it requests no tasks)")),
        "{notes:?}"
    );
}
