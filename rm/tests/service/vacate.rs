//! Vacated jobs: if no host accepts a job and the owners request checkpoints, the job is
//! checkpointed and ended. It is restarted when there is room.

use crate::common::{
    TestBed, fake_vm, host_id, migrate_error, spawned_task_info, task_id, task_info,
};
use crate::{options_with_history, query};
use pvm_rm::service::{Options, VACATED_RESERVATION_DELAY};
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::owner::EvictionMode;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TaskInfo};
use sempa_proto::{Micros, Tid};

/// Returns the tasks of a job: its first task on h1, a child on h2 and a child on h3.
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

/// Returns a service with the job of [`job_tasks`], and three owners who request checkpoints.
fn vacating_bed() -> TestBed {
    let vm = fake_vm(3);
    vm.0.borrow_mut().tasks.extend(job_tasks());
    vm.0.borrow_mut().eviction_mode = EvictionMode::Checkpoint;
    TestBed::start_with_watchers(&vm)
}

/// Reports the checkpoint of a vacated job and the ends of the tasks of [`job_tasks`].
fn report_vacated(bed: &mut TestBed, job: Tid) {
    let kind = EventKind::Checkpointed {
        checkpoint: "s1".into(),
        job,
        tasks: 3,
        bytes: 9,
        frozen: Micros(5),
        vacated: true,
    };
    bed.state().log_event(host_id(1), kind);
    for info in job_tasks() {
        let usage = Default::default();
        bed.state().log_event(
            info.host,
            EventKind::TaskEnded {
                tid: info.tid,
                status: 9,
                used: usage,
            },
        );
    }
    bed.state()
        .tasks
        .retain(|task| job_tasks().iter().all(|member| member.tid != task.tid));
    bed.process_inbox();
}

/// Reports the owners of all hosts as present, one after the other. Tasks that can migrate do so.
fn report_owners_everywhere(bed: &mut TestBed) {
    for host in 1..=3 {
        bed.report_owner_present(host);
        complete_migrations(bed);
    }
}

/// Completes all migrations that have been requested.
fn complete_migrations(bed: &mut TestBed) {
    loop {
        let migrations = bed.state().take_migrations();
        if migrations.is_empty() {
            return;
        }
        for (tid, target) in migrations {
            let source = bed.service.model().host_of(tid).expect("known");
            bed.state()
                .tasks
                .iter_mut()
                .filter(|task| task.tid == tid)
                .for_each(|task| task.host = host_id(target));
            bed.state().report_migrated(
                tid,
                source.index(),
                target,
                MigrationCause::Owner {
                    why: "alice on pts/0".into(),
                },
            );
            bed.process_inbox();
        }
    }
}

/// If another host accepts a task, the task migrates, and its job is not checkpointed.
#[test]
fn task_with_a_target_only_migrates() {
    let mut bed = vacating_bed();
    bed.report_owner_present(2);
    assert_eq!(bed.state().take_migrations().len(), 1);
    assert!(bed.state().checkpointed_jobs.is_empty());
}

/// If no host accepts a task of a job, the job is vacated once. It is restarted when hosts have
/// room.
#[test]
fn unplaceable_job_is_vacated_and_restarted() {
    let mut bed = vacating_bed();
    report_owners_everywhere(&mut bed);
    assert_eq!(
        bed.state().checkpointed_jobs,
        [task_id(1, 7)],
        "the first of it that daemons have started, once"
    );
    report_vacated(&mut bed, task_id(1, 7));
    bed.advance(Micros::from_secs(30));
    assert!(bed.state().restart_requests.is_empty(), "there is no room");
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    assert_eq!(
        bed.state().restart_requests,
        [("s1".to_string(), vec!["h3".to_string(); 3])]
    );
    let tasks = job_tasks().map(|task| (task.tid, host_id(3))).to_vec();
    bed.state().tasks.extend(job_tasks().map(|task| TaskInfo {
        host: host_id(3),
        ..task
    }));
    bed.state().log_event(
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
    assert_eq!(bed.state().checkpointed_jobs.len(), 1);
    assert_eq!(bed.state().restart_requests.len(), 1);
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

/// If a user cancels a vacated job, the job is not restarted. A restart that has begun is not
/// cancelled.
#[test]
fn ended_vacated_job_is_not_restarted() {
    let mut bed = vacating_bed();
    report_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(2, 9))),
        RmReply::NotFound
    );
    // The request may name any task of the job.
    let cancelled_reply = RmReply::VacatedCancelled {
        job: task_id(1, 7),
        checkpoint: "s1".into(),
        restart_started: false,
    };
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(3, 7))),
        cancelled_reply
    );
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(3, 7))),
        RmReply::NotFound
    );
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.state().restart_requests, []);
    report_vacated(&mut bed, task_id(1, 7));
    bed.report_absent_owners(&[3]);
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.state().restart_requests.len(), 1);
    let starting_reply = RmReply::VacatedCancelled {
        job: task_id(1, 7),
        checkpoint: "s1".into(),
        restart_started: true,
    };
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(1, 7))),
        starting_reply
    );
}

/// If a user cancels a job that is being vacated, the job is not restarted.
#[test]
fn job_ended_while_vacating_is_not_restarted() {
    let mut bed = vacating_bed();
    report_owners_everywhere(&mut bed);
    assert_eq!(bed.state().checkpointed_jobs, [task_id(1, 7)]);
    assert_eq!(
        query(&mut bed, &RmQuery::CancelVacated(task_id(2, 7))),
        RmReply::NotFound,
        "not yet"
    );
    report_vacated(&mut bed, task_id(1, 7));
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.state().restart_requests, []);
}

/// Hosts that refused a task get a second request before the job of the task is vacated.
#[test]
fn refusals_are_retried_before_vacating() {
    let mut bed = vacating_bed();
    bed.report_owner_present(3);
    complete_migrations(&mut bed);
    for tid in [task_id(2, 7), task_id(3, 7)] {
        bed.state().refused_migrations.insert(
            (tid, host_id(1)),
            migrate_error(Failure::Engine("a hiccup".into())),
        );
        bed.state().refused_migrations.insert(
            (tid, host_id(3)),
            migrate_error(Failure::Engine("a hiccup".into())),
        );
    }
    bed.report_owner_present(2);
    assert!(bed.state().checkpointed_jobs.is_empty());
    for _ in 0..3 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1]);
        bed.report_owner_present(3);
        bed.report_owner_present(2);
    }
    assert_eq!(bed.state().checkpointed_jobs, [task_id(1, 7)]);
}

/// Only a checkpoint that ended the job marks the job as vacated.
#[test]
fn only_final_checkpoint_vacates_job() {
    let mut bed = vacating_bed();
    let periodic_checkpoint = EventKind::Checkpointed {
        checkpoint: "s0".into(),
        job: task_id(1, 7),
        tasks: 3,
        bytes: 9,
        frozen: Micros(5),
        vacated: false,
    };
    report_owners_everywhere(&mut bed);
    bed.state().log_event(host_id(1), periodic_checkpoint);
    bed.process_inbox();
    for host in 1..=3 {
        bed.report_owner_absent(host);
    }
    bed.advance(Micros::from_secs(30));
    assert!(bed.state().restart_requests.is_empty(), "it lives");
    report_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    // A user restarts the job from another checkpoint. After that, the vacated checkpoint must not
    // be restarted.
    let tasks = job_tasks().map(|task| (task.tid, host_id(1))).to_vec();
    bed.state().log_event(
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
        bed.state().restart_requests.is_empty(),
        "it has begun again already"
    );
}

/// A vacated job is restarted only on hosts whose owners allow its programs and its number of
/// tasks.
#[test]
fn vacated_job_restarts_within_owner_limits() {
    let mut bed = vacating_bed();
    for task in job_tasks() {
        let started_event = EventKind::TaskStarted {
            tid: task.tid,
            parent: task.parent,
            name: "worker".into(),
            user: 0,
        };
        bed.state().log_event(task.host, started_event);
    }
    report_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    bed.state().guest_limits = GuestLimits {
        blocked_programs: vec!["work*".into()],
        ..GuestLimits::default()
    };
    bed.report_owner_absent(1);
    bed.advance(Micros::from_secs(20));
    assert!(
        bed.state().restart_requests.is_empty(),
        "workers are not let in there"
    );
    bed.state().guest_limits = GuestLimits {
        guests_max: Some(1),
        ..GuestLimits::default()
    };
    bed.report_owner_absent(2);
    bed.advance(Micros::from_secs(8));
    assert!(
        bed.state().restart_requests.is_empty(),
        "there is one place"
    );
    bed.state().guest_limits = GuestLimits {
        guests_max: Some(2),
        ..GuestLimits::default()
    };
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(6));
    let host_names = ["h2", "h3", "h3"].map(String::from).to_vec();
    assert_eq!(
        bed.state().restart_requests,
        [("s1".to_string(), host_names)]
    );
}

/// Vacates a job of three tasks, then a job of one task. Every owner allows one guest. All owners
/// are present for the time `presence`.
fn vacate_two_jobs(presence: Micros) -> TestBed {
    let mut bed = vacating_bed();
    bed.state().guest_limits = GuestLimits {
        guests_max: Some(1),
        ..GuestLimits::default()
    };
    report_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    let (checkpoint, job, frozen) = ("s2".into(), task_id(2, 50), Micros(5));
    bed.state().log_event(
        host_id(2),
        EventKind::Checkpointed {
            checkpoint,
            job,
            tasks: 1,
            bytes: 9,
            frozen,
            vacated: true,
        },
    );
    bed.process_inbox();
    for _ in 0..presence.0 / 10_000_000 {
        bed.advance(Micros::from_secs(10));
        // The load watchers send their periodic reports.
        (1..=3).for_each(|host| bed.report_owner_present(host));
    }
    bed.report_owner_absent(3);
    bed.advance(Micros::from_secs(12));
    bed
}

/// Until [`VACATED_RESERVATION_DELAY`] has passed, a small vacated job may be restarted before a
/// large one that has waited longer.
#[test]
fn small_vacated_job_may_overtake_large_one() {
    let bed = vacate_two_jobs(Micros::from_secs(60));
    assert_eq!(
        bed.state().restart_requests,
        [("s2".to_string(), vec!["h3".to_string()])]
    );
}

/// After [`VACATED_RESERVATION_DELAY`], free hosts are reserved for the job that has waited
/// longest.
#[test]
fn free_hosts_are_reserved_for_oldest_vacated_job() {
    let mut bed = vacate_two_jobs(VACATED_RESERVATION_DELAY + Micros::from_secs(30));
    assert_eq!(bed.state().restart_requests, [], "the place on h3 is kept");
    // All owners leave. Each load watcher sends one more report.
    (1..=3).for_each(|host| bed.report_owner_absent(host));
    bed.advance(Micros::from_secs(8));
    let host_names = ["h1", "h2", "h3"].map(String::from).to_vec();
    assert_eq!(
        bed.state().restart_requests,
        [("s1".to_string(), host_names)]
    );
}

/// A job is not vacated while one of its tasks migrates.
#[test]
fn job_is_not_vacated_during_migration() {
    let mut bed = vacating_bed();
    bed.report_owner_present(3);
    assert_eq!(bed.state().take_migrations().len(), 1);
    bed.report_owner_present(1);
    bed.report_owner_present(2);
    assert!(
        bed.state().checkpointed_jobs.is_empty(),
        "one is on its way"
    );
}

/// If the owners request migration or termination of guests, no job is vacated.
#[test]
fn only_checkpoint_mode_vacates_jobs() {
    for mode in [EvictionMode::Move, EvictionMode::Kill] {
        let mut bed = vacating_bed();
        bed.state().eviction_mode = mode;
        report_owners_everywhere(&mut bed);
        assert!(bed.state().checkpointed_jobs.is_empty(), "{mode}");
    }
}

/// If the checkpoint of a job fails, the next attempt follows after a delay.
#[test]
fn failed_vacating_is_retried_later() {
    let mut bed = vacating_bed();
    report_owners_everywhere(&mut bed);
    bed.state().log_event(
        host_id(1),
        EventKind::CheckpointFailed {
            job: task_id(1, 7),
            why: "the disk is full".into(),
        },
    );
    bed.process_inbox();
    for _ in 0..5 {
        report_owners_everywhere(&mut bed);
        bed.advance(Micros::from_secs(10));
    }
    assert_eq!(bed.state().checkpointed_jobs.len(), 1);
    for _ in 0..3 {
        report_owners_everywhere(&mut bed);
        bed.advance(Micros::from_secs(10));
    }
    assert_eq!(bed.state().checkpointed_jobs.len(), 2);
}

/// A failed restart of a checkpoint is retried at growing intervals: at most six times in five
/// minutes.
#[test]
fn failed_restarts_back_off() {
    let mut bed = vacating_bed();
    report_owners_everywhere(&mut bed);
    report_vacated(&mut bed, task_id(1, 7));
    let mut failure_count = 0;
    for _ in 0..60 {
        bed.report_absent_owners(&[1, 2, 3]);
        bed.advance(Micros::from_secs(5));
        if bed.state().restart_requests.len() > failure_count {
            failure_count += 1;
            let (checkpoint, cause, reason) =
                ("s1".into(), "asked".into(), "no host takes it".into());
            bed.state().log_event(
                host_id(1),
                EventKind::RestartFailed {
                    checkpoint,
                    cause,
                    why: reason,
                },
            );
        }
    }
    assert!(
        (3..=6).contains(&failure_count),
        "{failure_count} tries in five minutes"
    );
    assert_eq!(
        bed.state().restart_requests.len(),
        failure_count,
        "not again while one is under way"
    );
}

/// A job is not vacated if its first task is unknown, or if its tasks are children of a task from a
/// command line.
#[test]
fn jobs_without_spawned_root_are_not_vacated() {
    let vm = fake_vm(2);
    let orphan = TaskInfo {
        parent: task_id(1, 99),
        ..spawned_task_info(task_id(2, 7), 2)
    };
    let command_line_task = task_info(task_id(2, 8), 2, TASK_CONNECTED, "");
    let command_line_child = TaskInfo {
        parent: task_id(2, 8),
        ..task_info(task_id(2, 9), 2, TASK_FORKED | TASK_CONNECTED, "worker")
    };
    vm.0.borrow_mut()
        .tasks
        .extend([orphan, command_line_task, command_line_child]);
    vm.0.borrow_mut().eviction_mode = EvictionMode::Checkpoint;
    let mut bed = TestBed::start_with_watchers(&vm);
    (1..=2).for_each(|host| bed.report_owner_present(host));
    assert_eq!(bed.state().checkpointed_jobs, []);
}

/// A restarted resource manager restarts the jobs that the previous one has vacated.
#[test]
fn restarted_rm_restarts_vacated_jobs() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = fake_vm(3);
    vm.0.borrow_mut().tasks.extend(job_tasks());
    vm.0.borrow_mut().eviction_mode = EvictionMode::Checkpoint;
    let options = || Options {
        starts_watchers: true,
        ..options_with_history(dir.path())
    };
    let mut bed = TestBed::start_with_options(&vm, options());
    report_owners_everywhere(&mut bed);
    assert_eq!(bed.state().checkpointed_jobs, [task_id(1, 7)]);
    // The resource manager is killed before the checkpoint is complete.
    bed.advance(Micros::from_secs(2));
    drop(bed);
    let mut state = vm.0.borrow_mut();
    let (checkpoint, job, frozen) = ("s1".into(), task_id(1, 7), Micros(5));
    let kind = EventKind::Checkpointed {
        checkpoint,
        job,
        tasks: 3,
        bytes: 9,
        frozen,
        vacated: true,
    };
    state.log_event(host_id(1), kind);
    state.clear_inbox();
    state
        .tasks
        .retain(|task| job_tasks().iter().all(|member| member.tid != task.tid));
    drop(state);
    let mut bed = TestBed::start_with_options(&vm, options());
    bed.advance(Micros::from_secs(12));
    assert_eq!(bed.state().restart_requests.len(), 1);
}
