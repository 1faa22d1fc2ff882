//! Vacated jobs: if the owners request it, jobs that no host accepts are checkpointed and ended.
//! They are restarted when there is room.

use crate::common::{
    TestBed, host_id, migrate_error, spawned_task_info, task_id, task_info, world,
};
use crate::{options_with_history, query};
use pvm_rm::service::{Options, VACATED_RESERVE_AFTER};
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::owner::EvictionMode;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TaskInfo};
use sempa_proto::{Micros, Tid};

/// Returns a job: a top task on h1 with a child on h2 and a child on h3.
fn job_tasks() -> [TaskInfo; 3] {
    let child = |parent: Tid, tid: Tid, host: u16| TaskInfo {
        parent,
        ..spawned_task_info(tid, host)
    };
    [
        child(Tid::NONE, task_id(1, 7), 1),
        child(task_id(1, 7), task_id(2, 7), 2),
        child(task_id(1, 7), task_id(3, 7), 3),
    ]
}

fn pool() -> TestBed {
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend(job_tasks());
    vm.0.borrow_mut().leave_mode = EvictionMode::Checkpoint;
    TestBed::quiet(&vm)
}

fn report_vacated(bed: &mut TestBed, job: Tid) {
    let kind = EventKind::Checkpointed {
        checkpoint: "s1".into(),
        job,
        tasks: 3,
        bytes: 9,
        frozen: Micros(5),
        vacated: true,
    };
    bed.world().event(host_id(1), kind);
    for info in job_tasks() {
        let used = Default::default();
        bed.world().event(
            info.host,
            EventKind::TaskEnded {
                tid: info.tid,
                status: 9,
                used,
            },
        );
    }
    bed.world()
        .tasks
        .retain(|task| job_tasks().iter().all(|member| member.tid != task.tid));
    bed.settle();
}

/// Lets the owners of all hosts arrive one after the other. Tasks that can migrate do so.
fn present_owners_everywhere(bed: &mut TestBed) {
    for host in 1..=3 {
        bed.report_owner_present(host);
        complete_migrations(bed);
    }
}

/// Completes all migrations that have been requested.
fn complete_migrations(bed: &mut TestBed) {
    loop {
        let going = bed.world().take_migrations();
        if going.is_empty() {
            return;
        }
        for (tid, to) in going {
            let from = bed.service.model().host_of(tid).expect("known");
            bed.world()
                .tasks
                .iter_mut()
                .filter(|task| task.tid == tid)
                .for_each(|task| task.host = host_id(to));
            bed.world().migrated(
                tid,
                from.index(),
                to,
                MigrationCause::Owner {
                    why: "alice on pts/0".into(),
                },
            );
            bed.settle();
        }
    }
}

/// A task that another host accepts migrates, and its job is not checkpointed.
#[test]
fn task_with_a_target_only_migrates() {
    let mut bed = pool();
    bed.report_owner_present(2);
    assert_eq!(bed.world().take_migrations().len(), 1);
    assert!(bed.world().checkpoints.is_empty());
}

/// If no host accepts a task of a job, the job is vacated once, and restarted on hosts with room.
#[test]
fn unplaceable_job_is_vacated_and_restarted() {
    let mut bed = pool();
    present_owners_everywhere(&mut bed);
    assert_eq!(
        bed.world().checkpoints,
        [task_id(1, 7)],
        "the first of it that daemons have started, once"
    );
    report_vacated(&mut bed, task_id(1, 7));
    bed.advance(Micros::from_secs(30));
    assert!(bed.world().restarts.is_empty(), "there is no room");
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    assert_eq!(
        bed.world().restarts,
        [("s1".to_string(), vec!["h3".to_string(); 3])]
    );
    let tasks = job_tasks().map(|task| (task.tid, host_id(3))).to_vec();
    bed.world().tasks.extend(job_tasks().map(|task| TaskInfo {
        host: host_id(3),
        ..task
    }));
    bed.world().event(
        host_id(1),
        EventKind::Restarted {
            checkpoint: "s1".into(),
            job: task_id(1, 7),
            tasks,
            why: "asked".into(),
        },
    );
    bed.report_absent_owners(&[3]);
    bed.advance(Micros::from_secs(60));
    assert_eq!(bed.world().checkpoints.len(), 1);
    assert_eq!(bed.world().restarts.len(), 1);
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::TaskDecisions(task_id(1, 7)))
    else {
        panic!("nothing is known")
    };
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Vacated { job, .. } if job == task_id(1, 7))),
        "{decisions:?}"
    );
}

/// A vacated job is not restarted if a user cancels it.
#[test]
fn ended_vacated_job_is_not_restarted() {
    let mut bed = pool();
    present_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(2, 9))),
        RmReply::NotFound
    );
    // The request may name any task of the job.
    let gone = RmReply::VacatedCancelled {
        job: task_id(1, 7),
        checkpoint: "s1".into(),
        starting: false,
    };
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(3, 7))),
        gone
    );
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(3, 7))),
        RmReply::NotFound
    );
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.world().restarts, []);
    report_vacated(&mut bed, task_id(1, 7));
    bed.report_absent_owners(&[3]);
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.world().restarts.len(), 1);
    let starting = RmReply::VacatedCancelled {
        job: task_id(1, 7),
        checkpoint: "s1".into(),
        starting: true,
    };
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(1, 7))),
        starting
    );
}

/// A job that is being vacated is not restarted if a user cancels it.
#[test]
fn job_ended_while_vacating_is_not_restarted() {
    let mut bed = pool();
    present_owners_everywhere(&mut bed);
    assert_eq!(bed.world().checkpoints, [task_id(1, 7)]);
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(2, 7))),
        RmReply::NotFound,
        "not yet"
    );
    report_vacated(&mut bed, task_id(1, 7));
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.world().restarts, []);
}

/// Hosts that refused a task are tried again before its job is vacated.
#[test]
fn refusals_are_retried_before_vacating() {
    let mut bed = pool();
    bed.report_owner_present(3);
    complete_migrations(&mut bed);
    for tid in [task_id(2, 7), task_id(3, 7)] {
        bed.world().refused_migrations.insert(
            (tid, host_id(1)),
            migrate_error(Failure::Engine("a hiccup".into())),
        );
        bed.world().refused_migrations.insert(
            (tid, host_id(3)),
            migrate_error(Failure::Engine("a hiccup".into())),
        );
    }
    bed.report_owner_present(2);
    assert!(bed.world().checkpoints.is_empty());
    for _ in 0..3 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1]);
        bed.report_owner_present(3);
        bed.report_owner_present(2);
    }
    assert_eq!(bed.world().checkpoints, [task_id(1, 7)]);
}

/// Only a checkpoint after which the job was ended marks the job as vacated.
#[test]
fn only_final_checkpoint_vacates_job() {
    let mut bed = pool();
    let periodic = EventKind::Checkpointed {
        checkpoint: "s0".into(),
        job: task_id(1, 7),
        tasks: 3,
        bytes: 9,
        frozen: Micros(5),
        vacated: false,
    };
    present_owners_everywhere(&mut bed);
    bed.world().event(host_id(1), periodic);
    bed.settle();
    for host in 1..=3 {
        bed.report_owner_absent(host);
    }
    bed.advance(Micros::from_secs(30));
    assert!(bed.world().restarts.is_empty(), "it lives");
    present_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    // A user restarts the job from another checkpoint. Then the vacated one must not be restarted.
    let tasks = job_tasks().map(|task| (task.tid, host_id(1))).to_vec();
    bed.world().event(
        host_id(1),
        EventKind::Restarted {
            checkpoint: "s0".into(),
            job: task_id(1, 7),
            tasks,
            why: "asked".into(),
        },
    );
    bed.report_absent_owners(&[1, 2, 3]);
    bed.advance(Micros::from_secs(30));
    assert!(
        bed.world().restarts.is_empty(),
        "it has begun again already"
    );
}

/// A vacated job is restarted only on hosts whose owners allow its programs and number of tasks.
#[test]
fn vacated_job_restarts_within_owner_limits() {
    let mut bed = pool();
    for task in job_tasks() {
        let started = EventKind::TaskStarted {
            tid: task.tid,
            parent: task.parent,
            name: "worker".into(),
            user: 0,
        };
        bed.world().event(task.host, started);
    }
    present_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    bed.world().limits = GuestLimits {
        programs: vec!["work*".into()],
        ..GuestLimits::default()
    };
    bed.report_owner_absent(1);
    bed.advance(Micros::from_secs(20));
    assert!(
        bed.world().restarts.is_empty(),
        "workers are not let in there"
    );
    bed.world().limits = GuestLimits {
        guests_max: Some(1),
        ..GuestLimits::default()
    };
    bed.report_owner_absent(2);
    bed.advance(Micros::from_secs(8));
    assert!(bed.world().restarts.is_empty(), "there is one place");
    bed.world().limits = GuestLimits {
        guests_max: Some(2),
        ..GuestLimits::default()
    };
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(6));
    let on = ["h2", "h3", "h3"].map(String::from).to_vec();
    assert_eq!(bed.world().restarts, [("s1".to_string(), on)]);
}

/// Vacates a job of three tasks, then a job of one task. Every owner allows one guest. All owners
/// are present for the time `wait`.
fn large_and_small(wait: Micros) -> TestBed {
    let mut bed = pool();
    bed.world().limits = GuestLimits {
        guests_max: Some(1),
        ..GuestLimits::default()
    };
    present_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    let (set, job, frozen) = ("s2".into(), task_id(2, 50), Micros(5));
    bed.world().event(
        host_id(2),
        EventKind::Checkpointed {
            checkpoint: set,
            job,
            tasks: 1,
            bytes: 9,
            frozen,
            vacated: true,
        },
    );
    bed.settle();
    for _ in 0..wait.0 / 10_000_000 {
        bed.advance(Micros::from_secs(10));
        // The load watchers report.
        (1..=3).for_each(|host| bed.report_owner_present(host));
    }
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    bed
}

/// For some time, a small vacated job may be restarted before a large one that has waited longer.
#[test]
fn small_vacated_job_may_overtake_large_one() {
    let bed = large_and_small(Micros::from_secs(60));
    assert_eq!(
        bed.world().restarts,
        [("s2".to_string(), vec!["h3".to_string()])]
    );
}

/// After [`VACATED_RESERVE_AFTER`], free hosts are reserved for the job that has waited longest.
#[test]
fn free_slots_are_kept_for_oldest_vacated_job() {
    let mut bed = large_and_small(VACATED_RESERVE_AFTER + Micros::from_secs(30));
    assert_eq!(bed.world().restarts, [], "the place on h3 is kept");
    // The watcher of h3 sends one more report.
    (1..=3).for_each(|host| bed.report_owner_absent(host));
    bed.advance(Micros::from_secs(8));
    let on = ["h1", "h2", "h3"].map(String::from).to_vec();
    assert_eq!(bed.world().restarts, [("s1".to_string(), on)]);
}

/// A job is not vacated while one of its tasks migrates.
#[test]
fn job_is_not_vacated_during_migration() {
    let mut bed = pool();
    bed.report_owner_present(3);
    assert_eq!(bed.world().take_migrations().len(), 1);
    bed.report_owner_present(1);
    bed.report_owner_present(2);
    assert!(bed.world().checkpoints.is_empty(), "one is on its way");
}

/// Jobs are not vacated if the owners request migration or termination of guests.
#[test]
fn only_checkpoint_mode_vacates_jobs() {
    for then in [EvictionMode::Move, EvictionMode::Kill] {
        let mut bed = pool();
        bed.world().leave_mode = then;
        present_owners_everywhere(&mut bed);
        assert!(bed.world().checkpoints.is_empty(), "{then}");
    }
}

/// If the checkpoint of a job has failed, the next attempt follows after a delay.
#[test]
fn failed_vacating_is_retried_later() {
    let mut bed = pool();
    present_owners_everywhere(&mut bed);
    bed.world().event(
        host_id(1),
        EventKind::CheckpointFailed {
            job: task_id(1, 7),
            why: "the disk is full".into(),
        },
    );
    bed.settle();
    for _ in 0..5 {
        present_owners_everywhere(&mut bed);
        bed.advance(Micros::from_secs(10));
    }
    assert_eq!(bed.world().checkpoints.len(), 1);
    for _ in 0..3 {
        present_owners_everywhere(&mut bed);
        bed.advance(Micros::from_secs(10));
    }
    assert_eq!(bed.world().checkpoints.len(), 2);
}

/// A failed restart of a checkpoint is retried at growing intervals.
#[test]
fn failed_restarts_back_off() {
    let mut bed = pool();
    present_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    let mut failed = 0;
    for _ in 0..60 {
        bed.report_absent_owners(&[1, 2, 3]);
        bed.advance(Micros::from_secs(5));
        if bed.world().restarts.len() > failed {
            failed += 1;
            let (set, cause, why) = ("s1".into(), "asked".into(), "no host takes it".into());
            bed.world().event(
                host_id(1),
                EventKind::RestartFailed {
                    checkpoint: set,
                    cause,
                    why,
                },
            );
        }
    }
    assert!((3..=6).contains(&failed), "{failed} tries in five minutes");
    assert_eq!(
        bed.world().restarts.len(),
        failed,
        "not again while one is under way"
    );
}

/// Jobs without a known top task, and children of tasks from a command line, are not vacated.
#[test]
fn jobs_without_spawned_root_are_not_vacated() {
    let vm = world(2);
    let orphan = TaskInfo {
        parent: task_id(1, 99),
        ..spawned_task_info(task_id(2, 7), 2)
    };
    let by_hand = task_info(task_id(2, 8), 2, TASK_CONNECTED, "");
    let alone = TaskInfo {
        parent: task_id(2, 8),
        ..task_info(task_id(2, 9), 2, TASK_FORKED | TASK_CONNECTED, "worker")
    };
    vm.0.borrow_mut().tasks.extend([orphan, by_hand, alone]);
    vm.0.borrow_mut().leave_mode = EvictionMode::Checkpoint;
    let mut bed = TestBed::quiet(&vm);
    (1..=2).for_each(|host| bed.report_owner_present(host));
    assert_eq!(bed.world().checkpoints, []);
}

/// A restarted resource manager restarts the jobs that the previous one has vacated.
#[test]
fn restarted_rm_restarts_vacated_jobs() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend(job_tasks());
    vm.0.borrow_mut().leave_mode = EvictionMode::Checkpoint;
    let options = || Options {
        watchers: true,
        ..options_with_history(dir.path())
    };
    let mut bed = TestBed::quiet_with(&vm, options());
    present_owners_everywhere(&mut bed);
    assert_eq!(bed.world().checkpoints, [task_id(1, 7)]);
    // The resource manager is killed before the checkpoint is complete.
    bed.advance(Micros::from_secs(2));
    drop(bed);
    let mut world = vm.0.borrow_mut();
    let (set, job, frozen) = ("s1".into(), task_id(1, 7), Micros(5));
    let kind = EventKind::Checkpointed {
        checkpoint: set,
        job,
        tasks: 3,
        bytes: 9,
        frozen,
        vacated: true,
    };
    world.event(host_id(1), kind);
    world.clear_inbox();
    world
        .tasks
        .retain(|task| job_tasks().iter().all(|member| member.tid != task.tid));
    drop(world);
    let mut bed = TestBed::quiet_with(&vm, options());
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.world().restarts.len(), 1);
}
