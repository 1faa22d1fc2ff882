//! Ending of whole jobs on request of a user.

use crate::common::{TestBed, client, host_id, request, spawned_task_info, task_id, world};
use crate::query;
use pvm_rm::service::TERM_TIMEOUT;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::table::TaskInfo;
use sempa_proto::{Micros, PvmError, Tid};

const TASK_COUNT: u32 = 1500;

/// Returns a service with a job of [`TASK_COUNT`] tasks and another job, and the top task of the
/// first job.
fn large_job() -> (TestBed, Tid) {
    let vm = world(2);
    let top = task_id(1, 7);
    let mut world = vm.0.borrow_mut();
    world.tasks.push(TaskInfo {
        parent: Tid::NONE,
        ..spawned_task_info(top, 1)
    });
    world.tasks.extend((1..TASK_COUNT).map(|n| TaskInfo {
        parent: top,
        ..spawned_task_info(task_id(2, 100 + n), 2)
    }));
    world.tasks.push(TaskInfo {
        parent: Tid::NONE,
        ..spawned_task_info(task_id(2, 9000), 2)
    });
    drop(world);
    let mut bed = TestBed::try_start(&vm, false).expect("no other resource manager");
    bed.settle();
    (bed, top)
}

fn report_ended(bed: &mut TestBed, tid: Tid) {
    bed.world().tasks.retain(|task| task.tid != tid);
    bed.world().event(
        host_id(2),
        EventKind::TaskEnded {
            tid,
            status: 15,
            used: Usage::default(),
        },
    );
}

/// In a job of 1500 tasks, all tasks get SIGTERM. The remaining ones get SIGKILL until none is
/// left.
#[test]
fn large_job_is_terminated_then_killed() {
    let (mut bed, top) = large_job();
    // The request may name any task of the job.
    let RmReply::KillProgress {
        job,
        left,
        forced: 0,
        ..
    } = query(&mut bed, &RmQuery::Kill(task_id(2, 1000)))
    else {
        panic!()
    };
    assert_eq!((job, left), (top, TASK_COUNT));
    bed.advance(Micros::from_secs(1));
    let asked: Vec<(Tid, i32)> = std::mem::take(&mut bed.world().signals);
    assert_eq!(asked.len() as u32, TASK_COUNT, "each once");
    assert!(
        asked
            .iter()
            .all(|(tid, signal)| *signal == 15 && *tid != task_id(2, 9000)),
        "and no other job's"
    );
    // The job spawns one more task, which is refused. A task that was being started begins to run.
    bed.world().spawn_by(task_id(2, 600), 5, &request(1));
    bed.settle();
    assert!(
        bed.world().take_start_orders().is_empty(),
        "it starts nothing any more"
    );
    let why = format!(
        "worker was not started for {}: Permission denied (job {top}, which it belongs to,",
        task_id(2, 600)
    );
    let notes = bed.world().notes();
    assert!(notes.iter().any(|note| note.starts_with(&why)), "{notes:?}");
    let late = task_id(1, 8000);
    let kind = EventKind::TaskStarted {
        tid: late,
        parent: top,
        name: "worker".into(),
        user: 0,
    };
    bed.world().event(host_id(1), kind);
    // All but three tasks end.
    let stubborn = [top, task_id(2, 101), task_id(2, 102)];
    asked
        .iter()
        .map(|(tid, _)| *tid)
        .filter(|tid| !stubborn.contains(tid))
        .for_each(|tid| report_ended(&mut bed, tid));
    bed.settle();
    bed.advance(Micros::from_secs(1));
    assert_eq!(std::mem::take(&mut bed.world().signals), [(late, 15)]);
    report_ended(&mut bed, late);
    bed.advance(TERM_TIMEOUT);
    let mut forced = std::mem::take(&mut bed.world().signals);
    forced.sort_unstable();
    assert_eq!(forced, stubborn.map(|tid| (tid, 9)));
    let RmReply::KillProgress { left: 3, .. } = query(&mut bed, &RmQuery::KillStatus(top)) else {
        panic!()
    };
    stubborn
        .into_iter()
        .for_each(|tid| report_ended(&mut bed, tid));
    bed.advance(Micros::from_secs(1));
    let done = RmReply::KillProgress {
        job: top,
        asked: TASK_COUNT + 1,
        forced: 3,
        left: 0,
        failed: Vec::new(),
    };
    assert_eq!(query(&mut bed, &RmQuery::KillStatus(top)), done);
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("was ended with 1501 tasks, 3 of them by SIGKILL")),
        "{notes:?}"
    );
    bed.advance(Micros::from_secs(30));
    assert!(bed.world().signals.is_empty());
    // A task whose start took very long is also ended.
    let kind = EventKind::TaskStarted {
        tid: task_id(1, 8001),
        parent: top,
        name: "worker".into(),
        user: 0,
    };
    bed.world().event(host_id(1), kind);
    bed.settle();
    assert_eq!(bed.world().signals, [(task_id(1, 8001), 15)]);
}

/// Tasks that are being started for a job are ended as soon as they run.
#[test]
fn tasks_being_started_are_ended_too() {
    let vm = world(2);
    let mut bed = TestBed::quiet(&vm);
    let tids = crate::answers::two_workers(&mut bed);
    bed.world().spawn_by(tids[0], 6, &request(2));
    bed.settle();
    let execs = bed.world().take_start_orders();
    assert!(!execs.is_empty());
    // The client, which is the top task of the job, sends the request. So it is not ended.
    let RmReply::KillProgress { job, left, .. } = query(&mut bed, &RmQuery::Kill(tids[1])) else {
        panic!()
    };
    assert_eq!((job, left), (client(), 3), "two tasks and a request");
    for tid in tids {
        report_ended(&mut bed, tid);
    }
    bed.advance(Micros::from_secs(1));
    let RmReply::KillProgress { left: 1, .. } = query(&mut bed, &RmQuery::KillStatus(client()))
    else {
        panic!()
    };
    let started: Vec<Tid> = execs
        .iter()
        .flat_map(|exec| bed.vm.0.borrow_mut().ack(exec))
        .collect();
    bed.settle();
    bed.advance(Micros::from_secs(1));
    let signals = bed.world().signals.clone();
    assert!(
        started.iter().all(|tid| signals.contains(&(*tid, 15))),
        "{started:?} {signals:?}"
    );
    for tid in started {
        report_ended(&mut bed, tid);
    }
    bed.advance(Micros::from_secs(1));
    let answer = query(&mut bed, &RmQuery::KillStatus(client()));
    assert!(
        matches!(
            answer,
            RmReply::KillProgress {
                asked: 4,
                forced: 0,
                left: 0,
                ..
            }
        ),
        "{answer:?}"
    );
}

/// The reply names a task that cannot be signalled. For an unknown job the reply is `NotFound`.
#[test]
fn unsignalled_task_is_named() {
    let (mut bed, top) = large_job();
    assert_eq!(
        query(&mut bed, &RmQuery::Kill(task_id(1, 4999))),
        RmReply::NotFound
    );
    assert_eq!(
        query(&mut bed, &RmQuery::KillStatus(top)),
        RmReply::NotFound
    );
    bed.world()
        .refused_signals
        .insert(task_id(2, 300), PvmError::DSysErr);
    drop(query(&mut bed, &RmQuery::Kill(top)));
    bed.advance(Micros::from_secs(1));
    let RmReply::KillProgress { failed, .. } = query(&mut bed, &RmQuery::KillStatus(top)) else {
        panic!()
    };
    assert_eq!(
        failed.iter().map(|(tid, _)| *tid).collect::<Vec<_>>(),
        [task_id(2, 300)]
    );
}
