//! Termination of whole jobs on request of a user.

use crate::common::{TestBed, client_tid, fake_vm, host_id, request, spawned_task_info, task_id};
use crate::query;
use pvm_rm::service::TERM_TIMEOUT;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::table::TaskInfo;
use sempa_proto::{Micros, PvmError, Tid};

const TASK_COUNT: u32 = 1500;

/// Returns a service with a job of [`TASK_COUNT`] tasks and another job. Also returns the first
/// task of the large job.
fn start_large_job() -> (TestBed, Tid) {
    let vm = fake_vm(2);
    let top_task = task_id(1, 7);
    let mut state = vm.0.borrow_mut();
    state.tasks.push(TaskInfo {
        parent: Tid::NONE,
        ..spawned_task_info(top_task, 1)
    });
    state.tasks.extend((1..TASK_COUNT).map(|n| TaskInfo {
        parent: top_task,
        ..spawned_task_info(task_id(2, 100 + n), 2)
    }));
    state.tasks.push(TaskInfo {
        parent: Tid::NONE,
        ..spawned_task_info(task_id(2, 9000), 2)
    });
    drop(state);
    let mut bed = TestBed::try_start(&vm, false).expect("no other resource manager");
    bed.process_inbox();
    (bed, top_task)
}

fn report_task_ended(bed: &mut TestBed, tid: Tid) {
    bed.state().tasks.retain(|task| task.tid != tid);
    bed.state().log_event(
        host_id(2),
        EventKind::TaskEnded {
            tid,
            status: 15,
            used: Usage::default(),
        },
    );
}

/// Reports that a task which the first task of the job has spawned begins to run.
fn report_task_started(bed: &mut TestBed, tid: Tid, top_task: Tid) {
    let kind = EventKind::TaskStarted {
        tid,
        parent: top_task,
        name: "worker".into(),
        user: 0,
    };
    bed.state().log_event(host_id(1), kind);
}

/// Asserts that a spawn by the task `caller` is refused because its job is being ended.
fn assert_spawn_is_refused(bed: &mut TestBed, caller: Tid, top_task: Tid) {
    bed.state().request_spawn_by(caller, 5, &request(1));
    bed.process_inbox();
    assert!(
        bed.state().take_start_orders().is_empty(),
        "it starts nothing any more"
    );
    let refusal_text = format!(
        "worker was not started for {caller}: Permission denied (job {top_task}, which it belongs to,"
    );
    let notes = bed.state().recorded_notes();
    assert!(
        notes.iter().any(|note| note.starts_with(&refusal_text)),
        "{notes:?}"
    );
}

/// All tasks of a job of [`TASK_COUNT`] tasks get SIGTERM. The remaining ones get SIGKILL until no
/// task is left.
#[test]
fn large_job_is_terminated_then_killed() {
    let (mut bed, top_task) = start_large_job();
    // The request may name any task of the job.
    let RmReply::KillProgress {
        job,
        remaining_tasks: remaining_count,
        forced_kills: 0,
        ..
    } = query(&mut bed, &RmQuery::Kill(task_id(2, 1000)))
    else {
        panic!()
    };
    assert_eq!((job, remaining_count), (top_task, TASK_COUNT));
    bed.advance(Micros::from_secs(1));
    let term_signals: Vec<(Tid, i32)> = std::mem::take(&mut bed.state().signals);
    assert_eq!(term_signals.len() as u32, TASK_COUNT, "each once");
    assert!(
        term_signals
            .iter()
            .all(|(tid, signal)| *signal == 15 && *tid != task_id(2, 9000)),
        "and no other job's"
    );
    // The job spawns one more task, and the spawn is refused. A task that was being started begins
    // to run.
    assert_spawn_is_refused(&mut bed, task_id(2, 600), top_task);
    let late_task = task_id(1, 8000);
    report_task_started(&mut bed, late_task, top_task);
    // All but three tasks end.
    let remaining_tids = [top_task, task_id(2, 101), task_id(2, 102)];
    term_signals
        .iter()
        .map(|(tid, _)| *tid)
        .filter(|tid| !remaining_tids.contains(tid))
        .for_each(|tid| report_task_ended(&mut bed, tid));
    bed.process_inbox();
    bed.advance(Micros::from_secs(1));
    assert_eq!(std::mem::take(&mut bed.state().signals), [(late_task, 15)]);
    report_task_ended(&mut bed, late_task);
    bed.advance(TERM_TIMEOUT);
    let mut kill_signals = std::mem::take(&mut bed.state().signals);
    kill_signals.sort_unstable();
    assert_eq!(kill_signals, remaining_tids.map(|tid| (tid, 9)));
    let RmReply::KillProgress {
        remaining_tasks: 3, ..
    } = query(&mut bed, &RmQuery::KillStatus(top_task))
    else {
        panic!()
    };
    remaining_tids
        .into_iter()
        .for_each(|tid| report_task_ended(&mut bed, tid));
    bed.advance(Micros::from_secs(1));
    let final_progress = RmReply::KillProgress {
        job: top_task,
        exit_requests: TASK_COUNT + 1,
        forced_kills: 3,
        remaining_tasks: 0,
        signal_failures: Vec::new(),
    };
    assert_eq!(
        query(&mut bed, &RmQuery::KillStatus(top_task)),
        final_progress
    );
    let notes = bed.state().recorded_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("was ended with 1501 tasks, 3 of them by SIGKILL")),
        "{notes:?}"
    );
    bed.advance(Micros::from_secs(30));
    assert!(bed.state().signals.is_empty());
    // A task whose start took very long is ended, too.
    report_task_started(&mut bed, task_id(1, 8001), top_task);
    bed.process_inbox();
    assert_eq!(bed.state().signals, [(task_id(1, 8001), 15)]);
}

/// A task that is being started when its job is ended gets a signal as soon as it runs.
#[test]
fn tasks_being_started_are_ended_too() {
    let vm = fake_vm(2);
    let mut bed = TestBed::start_with_watchers(&vm);
    let tids = crate::queries::start_two_workers(&mut bed);
    bed.state().request_spawn_by(tids[0], 6, &request(2));
    bed.process_inbox();
    let orders = bed.state().take_start_orders();
    assert!(!orders.is_empty());
    // The client, which is the first task of the job, sends the request. Therefore it gets no
    // signal.
    let RmReply::KillProgress {
        job,
        remaining_tasks: remaining_count,
        ..
    } = query(&mut bed, &RmQuery::Kill(tids[1]))
    else {
        panic!()
    };
    assert_eq!(
        (job, remaining_count),
        (client_tid(), 3),
        "two tasks and a request"
    );
    for tid in tids {
        report_task_ended(&mut bed, tid);
    }
    bed.advance(Micros::from_secs(1));
    let RmReply::KillProgress {
        remaining_tasks: 1, ..
    } = query(&mut bed, &RmQuery::KillStatus(client_tid()))
    else {
        panic!()
    };
    let started_tids: Vec<Tid> = orders
        .iter()
        .flat_map(|order| bed.vm.0.borrow_mut().acknowledge(order))
        .collect();
    bed.process_inbox();
    bed.advance(Micros::from_secs(1));
    let signals = bed.state().signals.clone();
    assert!(
        started_tids.iter().all(|tid| signals.contains(&(*tid, 15))),
        "{started_tids:?} {signals:?}"
    );
    for tid in started_tids {
        report_task_ended(&mut bed, tid);
    }
    bed.advance(Micros::from_secs(1));
    let reply = query(&mut bed, &RmQuery::KillStatus(client_tid()));
    assert!(
        matches!(
            reply,
            RmReply::KillProgress {
                exit_requests: 4,
                forced_kills: 0,
                remaining_tasks: 0,
                ..
            }
        ),
        "{reply:?}"
    );
}

/// The reply contains a task that cannot be signalled. For an unknown job the reply is `NotFound`.
#[test]
fn unsignalled_task_is_named() {
    let (mut bed, top_task) = start_large_job();
    assert_eq!(
        query(&mut bed, &RmQuery::Kill(task_id(1, 4999))),
        RmReply::NotFound
    );
    assert_eq!(
        query(&mut bed, &RmQuery::KillStatus(top_task)),
        RmReply::NotFound
    );
    bed.state()
        .refused_signals
        .insert(task_id(2, 300), PvmError::DSysErr);
    drop(query(&mut bed, &RmQuery::Kill(top_task)));
    bed.advance(Micros::from_secs(1));
    let RmReply::KillProgress {
        signal_failures: failed_signals,
        ..
    } = query(&mut bed, &RmQuery::KillStatus(top_task))
    else {
        panic!()
    };
    assert_eq!(
        failed_signals
            .iter()
            .map(|(tid, _)| *tid)
            .collect::<Vec<_>>(),
        [task_id(2, 300)]
    );
}
