//! Jobs that no host takes are checkpointed and ended where an owner wants it so, and go on when there is room.

use crate::common::{Bed, client, failed, h, info, spawned, t, world};
use crate::{ask, with_books};
use pvm_rm::service::Options;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Failure;
use sempa_proto::owner::Leave;
use sempa_proto::rm::{Answer, Decided, Question};
use sempa_proto::table::{TASK_CONNECTED, TASK_FORKED, TaskInfo};
use sempa_proto::{Micros, Tid};

/// A first task on h1 with a child on h2 and one on h3, spawned from a command line.
fn family() -> [TaskInfo; 3] {
    let child = |parent: Tid, tid: Tid, host: u16| TaskInfo { parent, ..spawned(tid, host) };
    [child(client(), t(1, 7), 1), child(t(1, 7), t(2, 7), 2), child(t(1, 7), t(3, 7), 3)]
}

fn pool() -> Bed {
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend(family());
    vm.0.borrow_mut().then = Leave::Checkpoint;
    Bed::quiet(&vm)
}

fn checkpointed(bed: &mut Bed, job: Tid) {
    let kind = EventKind::Checkpointed { set: "s1".into(), job, tasks: 3, bytes: 9, frozen: Micros(5) };
    bed.world().event(h(1), kind);
    for info in family() {
        let used = Default::default();
        bed.world().event(info.host, EventKind::TaskEnded { tid: info.tid, status: 9, used });
    }
    bed.world().tasks.retain(|task| family().iter().all(|member| member.tid != task.tid));
    bed.settle();
}

/// All owners are there, one after the other.
fn crowd(bed: &mut Bed) {
    (1..=3).for_each(|host| bed.owner_comes(host));
}

#[test]
fn a_task_that_another_host_takes_only_moves() {
    let mut bed = pool();
    bed.owner_comes(2);
    assert_eq!(bed.world().took_migrations().len(), 1);
    assert!(bed.world().checkpoints.is_empty());
}

#[test]
fn a_job_is_parked_once_when_nobody_takes_its_task_and_goes_on_where_there_is_room() {
    let mut bed = pool();
    crowd(&mut bed);
    assert_eq!(bed.world().checkpoints, [t(1, 7)], "the first of it that daemons have started, once");
    checkpointed(&mut bed, t(1, 7));
    bed.pass(Micros::from_secs(30));
    assert!(bed.world().restarts.is_empty(), "there is no room");
    bed.owner_leaves(3);
    bed.pass(Micros::from_secs(12));
    assert_eq!(bed.world().restarts, [("s1".to_string(), vec!["h3".to_string()])]);
    let tasks = family().map(|task| (task.tid, h(3))).to_vec();
    bed.world().tasks.extend(family().map(|task| TaskInfo { host: h(3), ..task }));
    bed.world().event(h(1), EventKind::Restarted { set: "s1".into(), job: t(1, 7), tasks, why: "asked".into() });
    bed.signs_of_life(&[3]);
    bed.pass(Micros::from_secs(60));
    assert_eq!(bed.world().checkpoints.len(), 1);
    assert_eq!(bed.world().restarts, [("s1".to_string(), vec!["h3".to_string()])]);
    let Answer::Why { decisions, .. } = ask(&mut bed, &Question::WhyTask(t(1, 7))) else { panic!("nothing is known") };
    assert!(decisions.iter().any(|d| matches!(d.what, Decided::Parked { job, .. } if job == t(1, 7))), "{decisions:?}");
}

#[test]
fn a_host_that_refused_a_task_is_asked_again_before_its_job_is_parked() {
    let mut bed = pool();
    bed.owner_comes(3);
    bed.world().took_migrations();
    for tid in [t(2, 7), t(3, 7)] {
        bed.world().refuse.insert((tid, h(1)), failed(Failure::Engine("a hiccup".into())));
        bed.world().refuse.insert((tid, h(3)), failed(Failure::Engine("a hiccup".into())));
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

#[test]
fn owners_who_want_guests_moved_or_gone_have_no_job_parked() {
    for then in [Leave::Move, Leave::Kill] {
        let mut bed = pool();
        bed.world().then = then;
        crowd(&mut bed);
        assert!(bed.world().checkpoints.is_empty(), "{then}");
    }
}

#[test]
fn a_job_whose_checkpoint_failed_is_left_in_peace_and_tried_again() {
    let mut bed = pool();
    crowd(&mut bed);
    bed.world().event(h(1), EventKind::CheckpointFailed { job: t(1, 7), why: "the disk is full".into() });
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

#[test]
fn a_set_that_cannot_be_started_is_tried_less_and_less_often() {
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
            bed.world().event(h(1), EventKind::RestartFailed { set, cause, why });
        }
    }
    assert!((3..=6).contains(&failed), "{failed} tries in five minutes");
    assert_eq!(bed.world().restarts.len(), failed, "not again while one is under way");
}

#[test]
fn what_has_lost_its_head_stands_still_and_so_does_what_a_command_line_began() {
    let vm = world(2);
    let orphan = TaskInfo { parent: t(1, 99), ..spawned(t(2, 7), 2) };
    let by_hand = info(t(2, 8), 2, TASK_CONNECTED, "");
    let alone = TaskInfo { parent: t(2, 8), ..info(t(2, 9), 2, TASK_FORKED | TASK_CONNECTED, "worker") };
    vm.0.borrow_mut().tasks.extend([orphan, by_hand, alone]);
    vm.0.borrow_mut().then = Leave::Checkpoint;
    let mut bed = Bed::quiet(&vm);
    (1..=2).for_each(|host| bed.owner_comes(host));
    assert_eq!(bed.world().checkpoints, [t(2, 9)]);
}

#[test]
fn a_resource_manager_that_begins_again_starts_what_the_one_before_has_parked() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(3);
    vm.0.borrow_mut().tasks.extend(family());
    vm.0.borrow_mut().then = Leave::Checkpoint;
    let options = || Options { watchers: true, ..with_books(dir.path()) };
    let mut bed = Bed::quiet_with(&vm, options());
    crowd(&mut bed);
    assert_eq!(bed.world().checkpoints, [t(1, 7)]);
    // It is killed before the checkpoint is complete.
    bed.pass(Micros::from_secs(2));
    drop(bed);
    let mut world = vm.0.borrow_mut();
    let kind = EventKind::Checkpointed { set: "s1".into(), job: t(1, 7), tasks: 3, bytes: 9, frozen: Micros(5) };
    world.event(h(1), kind);
    world.forget_mail();
    world.tasks.retain(|task| family().iter().all(|member| member.tid != task.tid));
    drop(world);
    let mut bed = Bed::quiet_with(&vm, options());
    bed.pass(Micros::from_secs(12));
    assert_eq!(bed.world().restarts.len(), 1);
}
