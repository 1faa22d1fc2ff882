//! Jobs that a user suspends as a whole, and tasks that are preempted because their users hold a
//! large share.

use crate::answers::two_workers;
use crate::common::{Bed, FakeVm, client, h, info, request, spawned, t, world};
use crate::{ask, ended, with_books, with_conduct};
use pvm_rm::decide::Limits;
use pvm_rm::policy::Conduct;
use pvm_rm::spawns::Rules;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::sm::{SM_SPAWN, pack_spawn};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::table::{TASK_CONNECTED, TaskInfo};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// The client as the cause of a suspension.
fn by() -> SuspendCause {
    SuspendCause::JobRequested {
        requested_by: client(),
    }
}

fn order(bed: &mut Bed, job: Tid, suspend: bool) -> (Vec<Tid>, Vec<(Tid, String)>) {
    let RmReply::Suspended {
        tasks,
        unchanged: others,
        ..
    } = ask(bed, &RmQuery::Suspend { job, suspend })
    else {
        panic!("no")
    };
    (tasks, others)
}

/// Reports a task that the client starts without the resource manager.
fn starts(bed: &mut Bed, tid: Tid) {
    bed.world().event(
        h(1),
        EventKind::TaskStarted {
            tid,
            parent: client(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.world().tasks.push(spawned(tid, 1));
    bed.settle();
}

/// A job is suspended and resumed as a whole, including tasks that it starts meanwhile.
#[test]
fn job_is_suspended_and_resumed_as_a_whole() {
    let mut bed = Bed::quiet(&world(2));
    let mut tids = two_workers(&mut bed);
    assert_eq!(order(&mut bed, tids[1], true), (tids.clone(), vec![]));
    tids.push(t(1, 900));
    starts(&mut bed, tids[2]);
    let expected: Vec<(Tid, bool, SuspendCause)> =
        tids.iter().map(|tid| (*tid, true, by())).collect();
    assert_eq!(bed.world().suspends, expected);
    let RmReply::Job { job, tasks } = ask(&mut bed, &RmQuery::Job(tids[0])) else {
        panic!("no job")
    };
    assert_eq!(job.suspended.map(|s| s.cause), Some(by()));
    assert!(
        tasks
            .iter()
            .all(|t| t.suspended.is_some() == tids.contains(&t.tid)),
        "{tasks:?}"
    );
    let (none, others) = order(&mut bed, tids[1], true);
    assert_eq!((none, others.len()), (vec![], 3), "they are so already");
    tids.sort_unstable();
    assert_eq!(order(&mut bed, tids[2], false), (tids.clone(), vec![]));
    assert!(
        bed.world().suspends[3..]
            .iter()
            .all(|(_, suspend, _)| !suspend)
    );
    starts(&mut bed, t(1, 901));
    assert_eq!(
        bed.world().suspends.len(),
        6,
        "nothing is suspended any more"
    );
    let RmReply::Decisions { decisions, .. } = ask(&mut bed, &RmQuery::TaskDecisions(t(1, 900)))
    else {
        panic!("no reason")
    };
    let told: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    let sentences = [
        "t40384 was suspended on h1: requested by t40002 for its whole job",
        "t40384 was resumed on h1: ",
    ];
    assert!(
        sentences.iter().zip(&told).all(|(a, b)| b.starts_with(a)) && told.len() == 2,
        "{told:?}"
    );
}

/// The time for which a task was suspended does not count as usage.
#[test]
fn suspended_time_is_not_usage() {
    let mut bed = Bed::quiet(&world(2));
    let tids = two_workers(&mut bed);
    bed.pass(Micros::from_secs(3));
    order(&mut bed, tids[0], true);
    bed.pass(Micros::from_secs(5));
    order(&mut bed, tids[0], false);
    bed.pass(Micros::from_secs(1));
    bed.world().event(h(1), ended(tids[0]));
    order(&mut bed, tids[1], true);
    bed.pass(Micros::from_secs(2));
    bed.world().event(h(2), ended(tids[1]));
    bed.settle();
    let RmReply::Job { job, .. } = ask(&mut bed, &RmQuery::Job(tids[0])) else {
        panic!("no job")
    };
    assert_eq!(
        job.totals.wall_time,
        Micros::from_secs(8),
        "four seconds each"
    );
}

/// A task whose suspension a daemon refuses is reported with the reason; an unknown job is reported
/// as unknown.
#[test]
fn refused_suspension_is_reported_with_reason() {
    let mut bed = Bed::quiet(&world(2));
    let tids = two_workers(&mut bed);
    bed.world()
        .refuses_suspending
        .insert(tids[0], PvmError::Denied);
    let (tasks, others) = order(&mut bed, tids[0], true);
    assert_eq!((tasks, others.len()), (vec![tids[1]], 1));
    assert!(
        others[0].0 == tids[0] && others[0].1.contains("refused"),
        "{others:?}"
    );
    let unknown = RmQuery::Suspend {
        job: t(2, 999),
        suspend: true,
    };
    assert_eq!(ask(&mut bed, &unknown), RmReply::NotFound);
}

/// A restarted resource manager keeps suspensions and completes an interrupted resumption.
#[test]
fn restarted_rm_keeps_suspensions_and_resumptions() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    let tids = two_workers(&mut bed);
    order(&mut bed, tids[0], true);
    bed.pass(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut()
        .tasks
        .iter_mut()
        .filter(|t| tids.contains(&t.tid))
        .for_each(|t| t.suspended = true);
    // Meanwhile the job starts another task.
    let late = t(1, 900);
    let event = EventKind::TaskStarted {
        tid: late,
        parent: client(),
        name: "worker".into(),
        user: 0,
    };
    vm.0.borrow_mut().event(h(1), event);
    vm.0.borrow_mut().tasks.push(spawned(late, 1));
    vm.0.borrow_mut().forget_mail();
    vm.0.borrow_mut().suspends.clear();
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    assert_eq!(vm.0.borrow().suspends, [(late, true, by())]);
    bed.pass(Micros::from_secs(1));
    drop(bed);
    // The resource manager died after it had recorded the resumption and before it had resumed the
    // tasks.
    vm.0.borrow_mut()
        .tasks
        .iter_mut()
        .filter(|t| t.tid == late)
        .for_each(|t| t.suspended = true);
    vm.0.borrow_mut().event(
        h(1),
        EventKind::JobResumed {
            job: client(),
            requested_by: client(),
        },
    );
    vm.0.borrow_mut().forget_mail();
    vm.0.borrow_mut().suspends.clear();
    Bed::with(&vm, with_books(dir.path())).expect("no other");
    let mut resumed: Vec<Tid> =
        vm.0.borrow()
            .suspends
            .iter()
            .filter(|s| !s.1)
            .map(|s| s.0)
            .collect();
    resumed.sort_unstable();
    let mut all = [&tids[..], &[late]].concat();
    all.sort_unstable();
    assert_eq!(resumed, all);
}

/// A program of user 7.
fn other() -> Tid {
    t(1, 3)
}

/// A program of user 8.
fn third() -> Tid {
    t(1, 4)
}

/// Two hosts with two processors each, all of which user 0 has held for six hours.
fn taken(give_way: bool) -> (FakeVm, Bed, Vec<Tid>) {
    taken_with(give_way, Limits::default())
}

/// As [`taken`], with limits for every user.
fn taken_with(give_way: bool, limits: Limits) -> (FakeVm, Bed, Vec<Tid>) {
    let (vm, mut bed) = three_users(give_way, limits);
    let mut tids = Vec::new();
    for wid in [5, 6] {
        bed.world().spawn(
            wid,
            &SpawnRequest {
                place: "?free >= 1; spread".into(),
                ..request(2)
            },
        );
        bed.settle();
        tids.extend(begun(&mut bed, client()));
    }
    assert_eq!(tids.len(), 4);
    live(&mut bed, 6 * 3600);
    (vm, bed, tids)
}

/// Two hosts with two processors each, and programs of the users 0, 7 and 8.
fn three_users(give_way: bool, limits: Limits) -> (FakeVm, Bed) {
    let vm = world(2);
    for (task, uid) in [(other(), 7), (third(), 8)] {
        vm.0.borrow_mut().tasks.push(TaskInfo {
            uid,
            ..info(task, 1, TASK_CONNECTED, "")
        });
    }
    let rules = Rules {
        wait: Micros::from_secs(3600),
        limits,
    };
    let conduct = Conduct {
        rules,
        give_way,
        ..Conduct::default()
    };
    let bed = Bed::quiet_with(&vm, with_conduct(conduct));
    bed.world().event(
        h(1),
        EventKind::TaskStarted {
            tid: client(),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    (vm, bed)
}

/// Lets a task spawn one task on a named host. Returns the new task.
fn starts_on(bed: &mut Bed, task: Tid, host: &str) -> Tid {
    let named = SpawnRequest {
        flags: SPAWN_HOST,
        place: host.into(),
        ..request(1)
    };
    bed.world().spawn_by(task, 8, &named);
    bed.settle();
    begun(bed, task)[0]
}

/// Lets this time pass while load watchers report.
fn live(bed: &mut Bed, seconds: u64) {
    for _ in 0..seconds / 10 {
        bed.pass(Micros::from_secs(10));
        bed.signs_of_life(&[1, 2]);
    }
}

/// Lets the hosts carry out all start orders. Returns the started tasks.
fn begun(bed: &mut Bed, parent: Tid) -> Vec<Tid> {
    let execs = bed.world().took_execs();
    let mut tids = Vec::new();
    for exec in execs {
        let started = bed.world().ack(&exec);
        for tid in &started {
            bed.world().event(
                exec.host,
                EventKind::TaskStarted {
                    tid: *tid,
                    parent,
                    name: "worker".into(),
                    user: 0,
                },
            );
            bed.world().tasks.push(spawned(*tid, exec.host.index()));
        }
        tids.extend(started);
    }
    bed.settle();
    tids
}

fn asks_for_one(bed: &mut Bed) {
    asks(bed, other(), 1, "?free >= 1");
}

fn asks(bed: &mut Bed, task: Tid, count: u32, place: &str) {
    let request = SpawnRequest {
        place: place.into(),
        ..request(count)
    };
    bed.world().spawn_by(task, 9, &request);
    bed.settle();
}

/// Returns the users for whom tasks were preempted.
fn helped(bed: &mut Bed) -> Vec<String> {
    let suspends = std::mem::take(&mut bed.world().suspends);
    let why = suspends
        .into_iter()
        .filter_map(|(_, suspend, cause)| match cause {
            SuspendCause::Preempted { why } if suspend => {
                why.split(" waits").next().map(str::to_string)
            }
            _ => None,
        });
    why.collect()
}

/// A request that preemption cannot help does not prevent preemption for others.
#[test]
fn unmeetable_request_does_not_block_preemption() {
    let (_, mut bed, _) = taken(true);
    asks(&mut bed, other(), 1, "?memory >= 100T");
    live(&mut bed, 60);
    assert_eq!(helped(&mut bed), [""; 0], "it is of no use");
    asks(&mut bed, third(), 1, "?free >= 1");
    live(&mut bed, 10);
    assert_eq!(helped(&mut bed), ["user 8"]);
    assert_eq!(begun(&mut bed, third()).len(), 1);
}

/// A request that waits because of a limit does not prevent preemption for others.
#[test]
fn limited_request_does_not_block_preemption() {
    let (_, mut bed, _) = taken_with(
        true,
        Limits {
            user_tasks: Some(4),
            job_tasks: None,
        },
    );
    starts_on(&mut bed, other(), "h1");
    asks(&mut bed, other(), 4, "?free >= 1");
    // Long enough that later requests of the user wait for this one.
    live(&mut bed, 180);
    assert_eq!(
        helped(&mut bed),
        [""; 0],
        "five are too many, even with preemption"
    );
    asks(&mut bed, third(), 1, "?free >= 1");
    live(&mut bed, 10);
    assert_eq!(helped(&mut bed), ["user 8"]);
    assert_eq!(begun(&mut bed, third()).len(), 1);
}

/// No task is preempted on hosts that are reserved for another request.
#[test]
fn no_preemption_on_reserved_hosts() {
    let (_, mut bed) = three_users(true, Limits::default());
    let (on2, on1) = (
        starts_on(&mut bed, client(), "h2"),
        starts_on(&mut bed, client(), "h1"),
    );
    live(&mut bed, 6 * 3600);
    // Preempting user 0 on one host is not enough for both hosts: user 8 has used too little to be
    // preempted.
    for host in ["h1", "h2"] {
        starts_on(&mut bed, third(), host);
    }
    asks(&mut bed, other(), 2, "?free >= 2; same-host");
    live(&mut bed, 150);
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("hosts are reserved for it")),
        "{notes:?}"
    );
    asks(&mut bed, third(), 1, "?free >= 1");
    live(&mut bed, 10);
    let suspends = bed.world().suspends.clone();
    let [(gave_way, true, SuspendCause::Preempted { .. })] = &suspends[..] else {
        panic!("{suspends:?}, not {on1}")
    };
    assert_eq!(*gave_way, on2);
    assert_eq!(begun(&mut bed, third())[0].birth_host(), Some(h(2)));
}

/// A task of a user who has used much is preempted for a waiting user and resumes when there is
/// room.
#[test]
fn heavy_user_is_preempted_and_later_resumed() {
    let (_, mut bed, tids) = taken(true);
    asks_for_one(&mut bed);
    let suspends = std::mem::take(&mut bed.world().suspends);
    let [(gave_way, true, SuspendCause::Preempted { why })] = &suspends[..] else {
        panic!("{suspends:?}")
    };
    assert_eq!(
        why,
        "user 7 waits for a host and has used less: index 0.0 against 24.0 of user 0"
    );
    assert!(tids.contains(gave_way));
    let theirs = begun(&mut bed, other());
    assert_eq!(theirs.len(), 1, "it got its place");
    assert_eq!(theirs[0].birth_host(), gave_way.birth_host());
    live(&mut bed, 60);
    assert_eq!(bed.world().suspends, [], "its place is taken");
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = ask(&mut bed, &RmQuery::TaskDecisions(*gave_way))
    else {
        panic!()
    };
    assert!(
        task.suspended
            .is_some_and(|s| s.to_string().starts_with("preempted: user 7 waits"))
    );
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Suspended { .. })),
        "{decisions:?}"
    );
    bed.world()
        .event(theirs[0].birth_host().expect("a task"), ended(theirs[0]));
    live(&mut bed, 20);
    let suspends = bed.world().suspends.clone();
    assert!(
        matches!(&suspends[..], [(tid, false, SuspendCause::Preempted { .. })] if tid == gave_way),
        "{suspends:?}"
    );
}

/// A preempted task resumes when the other user's task has ended, even next to external load.
#[test]
fn preempted_task_resumes_despite_external_load() {
    let (_, mut bed, tids) = taken(true);
    asks_for_one(&mut bed);
    let gave_way = std::mem::take(&mut bed.world().suspends)[0].0;
    let theirs = begun(&mut bed, other());
    // Six runnable threads on two processors.
    bed.world().load = (1.0, 6);
    live(&mut bed, 60);
    assert_eq!(bed.world().suspends, [], "its place is taken");
    bed.world()
        .event(theirs[0].birth_host().expect("a task"), ended(theirs[0]));
    live(&mut bed, 20);
    let suspends = std::mem::take(&mut bed.world().suspends);
    assert!(
        matches!(&suspends[..], [(tid, false, SuspendCause::Preempted { .. })] if *tid == gave_way),
        "{suspends:?}"
    );
    // Another user waits, but preempting the task would not help.
    asks_for_one(&mut bed);
    live(&mut bed, 120);
    assert_eq!(bed.world().suspends, [], "of {tids:?}");
    bed.world().load = (1.0, 2);
    live(&mut bed, 20);
    let suspends = bed.world().suspends.clone();
    assert!(
        matches!(&suspends[..], [(_, true, SuspendCause::Preempted { .. })]),
        "{suspends:?}"
    );
}

/// A waiting spawn is placed when external load has ended.
#[test]
fn waiting_spawn_starts_when_external_load_ends() {
    for give_way in [true, false] {
        let (_, mut bed, tids) = taken(give_way);
        bed.world().load = (1.0, 6);
        live(&mut bed, 10);
        for tid in &tids {
            bed.world()
                .event(tid.birth_host().expect("a task"), ended(*tid));
        }
        asks_for_one(&mut bed);
        live(&mut bed, 60);
        assert_eq!(begun(&mut bed, other()), [], "the hosts are busy");
        bed.world().load = (0.0, 0);
        live(&mut bed, 20);
        assert_eq!(begun(&mut bed, other()).len(), 1);
    }
}

/// A task that starts after the resource manager is attributed to its own user.
#[test]
fn late_task_is_attributed_to_its_user() {
    let (_, mut bed, _) = taken(true);
    let late = t(2, 9);
    bed.world().event(
        h(2),
        EventKind::TaskStarted {
            tid: late,
            parent: Tid::NONE,
            name: String::new(),
            user: 8,
        },
    );
    bed.settle();
    let request = SpawnRequest {
        place: "?free >= 1".into(),
        ..request(1)
    };
    bed.world()
        .post(late, CTX_BASE, SM_SPAWN, 9, pack_spawn(&request, None));
    bed.settle();
    let suspends = bed.world().suspends.clone();
    assert!(
        matches!(&suspends[..], [(_, true, SuspendCause::Preempted { why })] if why.starts_with("user 8 waits")),
        "{suspends:?}"
    );
}

/// No task is preempted if the policy forbids it, or for a request of the same user.
#[test]
fn no_preemption_by_policy_or_for_same_user() {
    let (_, mut bed, _) = taken(false);
    asks_for_one(&mut bed);
    live(&mut bed, 60);
    assert_eq!(bed.world().suspends, []);
    let (_, mut bed, _) = taken(true);
    let request = SpawnRequest {
        place: "?free >= 1".into(),
        ..request(1)
    };
    bed.world().spawn(7, &request);
    live(&mut bed, 60);
    assert_eq!(bed.world().suspends, [], "it is the same user who waits");
}

/// Resuming a job does not resume its preempted tasks.
#[test]
fn resuming_job_keeps_preempted_tasks_paused() {
    let (_, mut bed, tids) = taken(true);
    asks_for_one(&mut bed);
    let gave_way = bed.world().suspends[0].0;
    begun(&mut bed, other());
    let (suspended, others) = order(&mut bed, gave_way, true);
    assert_eq!((suspended.len(), others.len()), (3, 1));
    let (resumed, others) = order(&mut bed, gave_way, false);
    assert!(
        resumed.len() == 3 && !resumed.contains(&gave_way),
        "{resumed:?} of {tids:?}"
    );
    assert!(
        others[0].0 == gave_way && others[0].1.contains("preempted"),
        "{others:?}"
    );
}

/// A task belongs to the user who started its job wherever it runs, also after a restart of the
/// resource manager.
#[test]
fn task_belongs_to_user_of_its_job() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    // The user at h2 has a login of their own there; their task arrives on h1, where another user
    // runs the daemon.
    let (top, task) = (t(2, 3), t(1, 77));
    bed.world().event(
        h(2),
        EventKind::TaskStarted {
            tid: top,
            parent: Tid::NONE,
            name: String::new(),
            user: 7,
        },
    );
    bed.world().event(
        h(1),
        EventKind::TaskStarted {
            tid: task,
            parent: top,
            name: "worker".into(),
            user: 0,
        },
    );
    bed.settle();
    let users = |bed: &mut Bed| {
        let RmReply::Job { job, tasks } = ask(bed, &RmQuery::Job(task)) else {
            panic!("no job")
        };
        (
            job.user,
            tasks.iter().map(|task| task.user).collect::<Vec<u32>>(),
        )
    };
    assert_eq!(users(&mut bed), (7, vec![7, 7]));
    let mut listed = info(top, 2, TASK_CONNECTED, "");
    listed.uid = 7;
    bed.world().tasks.extend([listed, spawned(task, 1)]);
    bed.pass(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().forget_mail();
    let mut bed = Bed::with(&vm, with_books(dir.path())).expect("no other");
    assert_eq!(users(&mut bed), (7, vec![7, 7]));
}
