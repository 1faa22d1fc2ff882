//! Vacated jobs: if the owners request it, jobs that no host accepts are checkpointed and ended.
//! They are restarted when there is room.

use crate::common::{Bed, failed, h, info, spawned, t, world};
use crate::{ask, with_books};
use pvm_rm::service::{KEEP_AFTER, Options};
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::{Failure, MigrationCause};
use sempa_proto::owner::EvictionMode;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TaskInfo};
use sempa_proto::{Micros, Tid};

/// Returns a job: a top task on h1 with a child on h2 and a child on h3.
fn family() -> [TaskInfo; 3] {
    let child = |parent: Tid, tid: Tid, host: u16| TaskInfo {
        parent,
        ..spawned(tid, host)
    };
    [
        child(Tid::NONE, t(1, 7), 1),
        child(t(1, 7), t(2, 7), 2),
        child(t(1, 7), t(3, 7), 3),
    ]
}

fn pool() -> Bed {
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend(family());
    vm.0.borrow_mut().then = EvictionMode::Checkpoint;
    Bed::quiet(&vm)
}

fn checkpointed(bed: &mut Bed, job: Tid) {
    let kind = EventKind::Checkpointed {
        checkpoint: "s1".into(),
        job,
        tasks: 3,
        bytes: 9,
        frozen: Micros(5),
        vacated: true,
    };
    bed.world().event(h(1), kind);
    for info in family() {
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
        .retain(|task| family().iter().all(|member| member.tid != task.tid));
    bed.settle();
}

/// Lets the owners of all hosts arrive one after the other. Tasks that can migrate do so.
fn crowd(bed: &mut Bed) {
    for host in 1..=3 {
        bed.owner_comes(host);
        arrive(bed);
    }
}

/// Completes all migrations that have been requested.
fn arrive(bed: &mut Bed) {
    loop {
        let going = bed.world().took_migrations();
        if going.is_empty() {
            return;
        }
        for (tid, to) in going {
            let from = bed.service.model().host_of(tid).expect("known");
            bed.world()
                .tasks
                .iter_mut()
                .filter(|task| task.tid == tid)
                .for_each(|task| task.host = h(to));
            bed.world().moved(
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
    bed.owner_comes(2);
    assert_eq!(bed.world().took_migrations().len(), 1);
    assert!(bed.world().checkpoints.is_empty());
}

/// If no host accepts a task of a job, the job is vacated once, and restarted on hosts with room.
#[test]
fn unplaceable_job_is_vacated_and_restarted() {
    let mut bed = pool();
    crowd(&mut bed);
    assert_eq!(
        bed.world().checkpoints,
        [t(1, 7)],
        "the first of it that daemons have started, once"
    );
    checkpointed(&mut bed, t(1, 7));
    bed.pass(Micros::from_secs(30));
    assert!(bed.world().restarts.is_empty(), "there is no room");
    bed.owner_leaves(3);
    bed.pass(Micros::from_secs(12));
    assert_eq!(
        bed.world().restarts,
        [("s1".to_string(), vec!["h3".to_string(); 3])]
    );
    let tasks = family().map(|task| (task.tid, h(3))).to_vec();
    bed.world()
        .tasks
        .extend(family().map(|task| TaskInfo { host: h(3), ..task }));
    bed.world().event(
        h(1),
        EventKind::Restarted {
            checkpoint: "s1".into(),
            job: t(1, 7),
            tasks,
            why: "asked".into(),
        },
    );
    bed.signs_of_life(&[3]);
    bed.pass(Micros::from_secs(60));
    assert_eq!(bed.world().checkpoints.len(), 1);
    assert_eq!(bed.world().restarts.len(), 1);
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::TaskDecisions(t(1, 7)))
    else {
        panic!("nothing is known")
    };
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Vacated { job, .. } if job == t(1, 7))),
        "{decisions:?}"
    );
}

/// A vacated job is not restarted if a user cancels it.
#[test]
fn ended_vacated_job_is_not_restarted() {
    let mut bed = pool();
    crowd(&mut bed);
    checkpointed(&mut bed, t(1, 7));
    assert_eq!(
        ask(&mut bed, &RmQuery::CancelVacated(t(2, 9))),
        RmReply::NotFound
    );
    // The request may name any task of the job.
    let gone = RmReply::VacatedCancelled {
        job: t(1, 7),
        checkpoint: "s1".into(),
        starting: false,
    };
    assert_eq!(ask(&mut bed, &RmQuery::CancelVacated(t(3, 7))), gone);
    assert_eq!(
        ask(&mut bed, &RmQuery::CancelVacated(t(3, 7))),
        RmReply::NotFound
    );
    bed.owner_leaves(3);
    bed.pass(Micros::from_secs(12));
    assert_eq!(bed.world().restarts, []);
    checkpointed(&mut bed, t(1, 7));
    bed.signs_of_life(&[3]);
    bed.pass(Micros::from_secs(12));
    assert_eq!(bed.world().restarts.len(), 1);
    let starting = RmReply::VacatedCancelled {
        job: t(1, 7),
        checkpoint: "s1".into(),
        starting: true,
    };
    assert_eq!(ask(&mut bed, &RmQuery::CancelVacated(t(1, 7))), starting);
}

/// A job that is being vacated is not restarted if a user cancels it.
#[test]
fn job_ended_while_vacating_is_not_restarted() {
    let mut bed = pool();
    crowd(&mut bed);
    assert_eq!(bed.world().checkpoints, [t(1, 7)]);
    assert_eq!(
        ask(&mut bed, &RmQuery::CancelVacated(t(2, 7))),
        RmReply::NotFound,
        "not yet"
    );
    checkpointed(&mut bed, t(1, 7));
    bed.owner_leaves(3);
    bed.pass(Micros::from_secs(12));
    assert_eq!(bed.world().restarts, []);
}

/// Hosts that refused a task are tried again before its job is vacated.
#[test]
fn refusals_are_retried_before_vacating() {
    let mut bed = pool();
    bed.owner_comes(3);
    arrive(&mut bed);
    for tid in [t(2, 7), t(3, 7)] {
        bed.world()
            .refuse
            .insert((tid, h(1)), failed(Failure::Engine("a hiccup".into())));
        bed.world()
            .refuse
            .insert((tid, h(3)), failed(Failure::Engine("a hiccup".into())));
    }
    bed.owner_comes(2);
    assert!(bed.world().checkpoints.is_empty());
    for _ in 0..3 {
        bed.pass(Micros::from_secs(10));
        bed.signs_of_life(&[1]);
        bed.owner_comes(3);
        bed.owner_comes(2);
    }
    assert_eq!(bed.world().checkpoints, [t(1, 7)]);
}

/// Only a checkpoint after which the job was ended marks the job as vacated.
#[test]
fn only_final_checkpoint_vacates_job() {
    let mut bed = pool();
    let periodic = EventKind::Checkpointed {
        checkpoint: "s0".into(),
        job: t(1, 7),
        tasks: 3,
        bytes: 9,
        frozen: Micros(5),
        vacated: false,
    };
    crowd(&mut bed);
    bed.world().event(h(1), periodic);
    bed.settle();
    for host in 1..=3 {
        bed.owner_leaves(host);
    }
    bed.pass(Micros::from_secs(30));
    assert!(bed.world().restarts.is_empty(), "it lives");
    crowd(&mut bed);
    checkpointed(&mut bed, t(1, 7));
    // A user restarts the job from another checkpoint. Then the vacated one must not be restarted.
    let tasks = family().map(|task| (task.tid, h(1))).to_vec();
    bed.world().event(
        h(1),
        EventKind::Restarted {
            checkpoint: "s0".into(),
            job: t(1, 7),
            tasks,
            why: "asked".into(),
        },
    );
    bed.signs_of_life(&[1, 2, 3]);
    bed.pass(Micros::from_secs(30));
    assert!(
        bed.world().restarts.is_empty(),
        "it has begun again already"
    );
}

/// A vacated job is restarted only on hosts whose owners allow its programs and number of tasks.
#[test]
fn vacated_job_restarts_within_owner_limits() {
    let mut bed = pool();
    for task in family() {
        let started = EventKind::TaskStarted {
            tid: task.tid,
            parent: task.parent,
            name: "worker".into(),
            user: 0,
        };
        bed.world().event(task.host, started);
    }
    crowd(&mut bed);
    checkpointed(&mut bed, t(1, 7));
    bed.world().limits = GuestLimits {
        programs: vec!["work*".into()],
        ..GuestLimits::default()
    };
    bed.owner_leaves(1);
    bed.pass(Micros::from_secs(20));
    assert!(
        bed.world().restarts.is_empty(),
        "workers are not let in there"
    );
    bed.world().limits = GuestLimits {
        guests_max: Some(1),
        ..GuestLimits::default()
    };
    bed.owner_leaves(2);
    bed.pass(Micros::from_secs(8));
    assert!(bed.world().restarts.is_empty(), "there is one place");
    bed.world().limits = GuestLimits {
        guests_max: Some(2),
        ..GuestLimits::default()
    };
    bed.owner_leaves(3);
    bed.pass(Micros::from_secs(6));
    let on = ["h2", "h3", "h3"].map(String::from).to_vec();
    assert_eq!(bed.world().restarts, [("s1".to_string(), on)]);
}

/// Vacates a job of three tasks, then a job of one task. Every owner allows one guest. All owners
/// are present for the time `wait`.
fn large_and_small(wait: Micros) -> Bed {
    let mut bed = pool();
    bed.world().limits = GuestLimits {
        guests_max: Some(1),
        ..GuestLimits::default()
    };
    crowd(&mut bed);
    checkpointed(&mut bed, t(1, 7));
    let (set, job, frozen) = ("s2".into(), t(2, 50), Micros(5));
    bed.world().event(
        h(2),
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
        bed.pass(Micros::from_secs(10));
        // The load watchers report.
        (1..=3).for_each(|host| bed.owner_comes(host));
    }
    bed.owner_leaves(3);
    bed.pass(Micros::from_secs(12));
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

/// After [`KEEP_AFTER`], free hosts are reserved for the job that has waited longest.
#[test]
fn free_slots_are_kept_for_oldest_vacated_job() {
    let mut bed = large_and_small(KEEP_AFTER + Micros::from_secs(30));
    assert_eq!(bed.world().restarts, [], "the place on h3 is kept");
    // The watcher of h3 sends one more report.
    (1..=3).for_each(|host| bed.owner_leaves(host));
    bed.pass(Micros::from_secs(8));
    let on = ["h1", "h2", "h3"].map(String::from).to_vec();
    assert_eq!(bed.world().restarts, [("s1".to_string(), on)]);
}

/// A job is not vacated while one of its tasks migrates.
#[test]
fn job_is_not_vacated_during_migration() {
    let mut bed = pool();
    bed.owner_comes(3);
    assert_eq!(bed.world().took_migrations().len(), 1);
    bed.owner_comes(1);
    bed.owner_comes(2);
    assert!(bed.world().checkpoints.is_empty(), "one is on its way");
}

/// Jobs are not vacated if the owners request migration or termination of guests.
#[test]
fn only_checkpoint_mode_vacates_jobs() {
    for then in [EvictionMode::Move, EvictionMode::Kill] {
        let mut bed = pool();
        bed.world().then = then;
        crowd(&mut bed);
        assert!(bed.world().checkpoints.is_empty(), "{then}");
    }
}

/// If the checkpoint of a job has failed, the next attempt follows after a delay.
#[test]
fn failed_vacating_is_retried_later() {
    let mut bed = pool();
    crowd(&mut bed);
    bed.world().event(
        h(1),
        EventKind::CheckpointFailed {
            job: t(1, 7),
            why: "the disk is full".into(),
        },
    );
    bed.settle();
    for _ in 0..5 {
        crowd(&mut bed);
        bed.pass(Micros::from_secs(10));
    }
    assert_eq!(bed.world().checkpoints.len(), 1);
    for _ in 0..3 {
        crowd(&mut bed);
        bed.pass(Micros::from_secs(10));
    }
    assert_eq!(bed.world().checkpoints.len(), 2);
}

/// A failed restart of a checkpoint is retried at growing intervals.
#[test]
fn failed_restarts_back_off() {
    let mut bed = pool();
    crowd(&mut bed);
    checkpointed(&mut bed, t(1, 7));
    let mut failed = 0;
    for _ in 0..60 {
        bed.signs_of_life(&[1, 2, 3]);
        bed.pass(Micros::from_secs(5));
        if bed.world().restarts.len() > failed {
            failed += 1;
            let (set, cause, why) = ("s1".into(), "asked".into(), "no host takes it".into());
            bed.world().event(
                h(1),
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
        parent: t(1, 99),
        ..spawned(t(2, 7), 2)
    };
    let by_hand = info(t(2, 8), 2, TASK_CONNECTED, "");
    let alone = TaskInfo {
        parent: t(2, 8),
        ..info(t(2, 9), 2, TASK_FORKED | TASK_CONNECTED, "worker")
    };
    vm.0.borrow_mut().tasks.extend([orphan, by_hand, alone]);
    vm.0.borrow_mut().then = EvictionMode::Checkpoint;
    let mut bed = Bed::quiet(&vm);
    (1..=2).for_each(|host| bed.owner_comes(host));
    assert_eq!(bed.world().checkpoints, []);
}

/// A restarted resource manager restarts the jobs that the previous one has vacated.
#[test]
fn restarted_rm_restarts_vacated_jobs() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend(family());
    vm.0.borrow_mut().then = EvictionMode::Checkpoint;
    let options = || Options {
        watchers: true,
        ..with_books(dir.path())
    };
    let mut bed = Bed::quiet_with(&vm, options());
    crowd(&mut bed);
    assert_eq!(bed.world().checkpoints, [t(1, 7)]);
    // The resource manager is killed before the checkpoint is complete.
    bed.pass(Micros::from_secs(2));
    drop(bed);
    let mut world = vm.0.borrow_mut();
    let (set, job, frozen) = ("s1".into(), t(1, 7), Micros(5));
    let kind = EventKind::Checkpointed {
        checkpoint: set,
        job,
        tasks: 3,
        bytes: 9,
        frozen,
        vacated: true,
    };
    world.event(h(1), kind);
    world.forget_mail();
    world
        .tasks
        .retain(|task| family().iter().all(|member| member.tid != task.tid));
    drop(world);
    let mut bed = Bed::quiet_with(&vm, options());
    bed.pass(Micros::from_secs(12));
    assert_eq!(bed.world().restarts.len(), 1);
}
