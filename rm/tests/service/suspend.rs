//! Jobs that a user suspends as a whole, and tasks that are preempted because their users have a
//! high index.

use crate::answers::two_workers;
use crate::common::{
    FakeVm, TestBed, client, host_id, request, spawned_task_info, task_id, task_info, world,
};
use crate::{options_with_history, options_with_policy, query, task_ended};
use pvm_rm::decide::Limits;
use pvm_rm::policy::EffectivePolicy;
use pvm_rm::spawns::SpawnRules;
use sempa_proto::event::EventKind;
use sempa_proto::message::CTX_BASE;
use sempa_proto::rm::{DecisionKind, RmQuery, RmReply};
use sempa_proto::sm::{SM_SPAWN, pack_spawn};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::table::{TASK_CONNECTED, TaskInfo};
use sempa_proto::task::{SPAWN_HOST, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// Returns the cause of a suspension that the client has requested.
fn client_cause() -> SuspendCause {
    SuspendCause::JobRequested {
        requested_by: client(),
    }
}

fn set_job_suspended(bed: &mut TestBed, job: Tid, suspend: bool) -> (Vec<Tid>, Vec<(Tid, String)>) {
    let RmReply::Suspended {
        tasks,
        unchanged: others,
        ..
    } = query(bed, &RmQuery::Suspend { job, suspend })
    else {
        panic!("no")
    };
    (tasks, others)
}

/// Reports the start of a task that the client has started without the resource manager.
fn report_started(bed: &mut TestBed, tid: Tid) {
    bed.world().event(
        host_id(1),
        EventKind::TaskStarted {
            tid,
            parent: client(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.world().tasks.push(spawned_task_info(tid, 1));
    bed.settle();
}

/// A job is suspended and resumed as a whole, including tasks that it starts while it is suspended.
#[test]
fn job_is_suspended_and_resumed_as_a_whole() {
    let mut bed = TestBed::quiet(&world(2));
    let mut tids = two_workers(&mut bed);
    assert_eq!(
        set_job_suspended(&mut bed, tids[1], true),
        (tids.clone(), vec![])
    );
    tids.push(task_id(1, 900));
    report_started(&mut bed, tids[2]);
    let expected: Vec<(Tid, bool, SuspendCause)> = tids
        .iter()
        .map(|tid| (*tid, true, client_cause()))
        .collect();
    assert_eq!(bed.world().suspends, expected);
    let RmReply::Job { job, tasks } = query(&mut bed, &RmQuery::Job(tids[0])) else {
        panic!("no job")
    };
    assert_eq!(job.suspension.map(|s| s.cause), Some(client_cause()));
    assert!(
        tasks
            .iter()
            .all(|t| t.suspension.is_some() == tids.contains(&t.tid)),
        "{tasks:?}"
    );
    let (none, others) = set_job_suspended(&mut bed, tids[1], true);
    assert_eq!((none, others.len()), (vec![], 3), "they are so already");
    tids.sort_unstable();
    assert_eq!(
        set_job_suspended(&mut bed, tids[2], false),
        (tids.clone(), vec![])
    );
    assert!(
        bed.world().suspends[3..]
            .iter()
            .all(|(_, suspend, _)| !suspend)
    );
    report_started(&mut bed, task_id(1, 901));
    assert_eq!(
        bed.world().suspends.len(),
        6,
        "nothing is suspended any more"
    );
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::TaskDecisions(task_id(1, 900)))
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

/// Time for which a task was suspended does not count as usage.
#[test]
fn suspended_time_is_not_usage() {
    let mut bed = TestBed::quiet(&world(2));
    let tids = two_workers(&mut bed);
    bed.advance(Micros::from_secs(3));
    set_job_suspended(&mut bed, tids[0], true);
    bed.advance(Micros::from_secs(5));
    set_job_suspended(&mut bed, tids[0], false);
    bed.advance(Micros::from_secs(1));
    bed.world().event(host_id(1), task_ended(tids[0]));
    set_job_suspended(&mut bed, tids[1], true);
    bed.advance(Micros::from_secs(2));
    bed.world().event(host_id(2), task_ended(tids[1]));
    bed.settle();
    let RmReply::Job { job, .. } = query(&mut bed, &RmQuery::Job(tids[0])) else {
        panic!("no job")
    };
    assert_eq!(
        job.totals.wall_time,
        Micros::from_secs(8),
        "four seconds each"
    );
}

/// If a daemon refuses to suspend a task, the reply contains the task and the reason. For an
/// unknown job the reply is `NotFound`.
#[test]
fn refused_suspension_is_reported_with_reason() {
    let mut bed = TestBed::quiet(&world(2));
    let tids = two_workers(&mut bed);
    bed.world()
        .refused_suspensions
        .insert(tids[0], PvmError::Denied);
    let (tasks, others) = set_job_suspended(&mut bed, tids[0], true);
    assert_eq!((tasks, others.len()), (vec![tids[1]], 1));
    assert!(
        others[0].0 == tids[0] && others[0].1.contains("refused"),
        "{others:?}"
    );
    let unknown = RmQuery::Suspend {
        job: task_id(2, 999),
        suspend: true,
    };
    assert_eq!(query(&mut bed, &unknown), RmReply::NotFound);
}

/// A restarted resource manager keeps suspensions, and completes a resume that was interrupted.
#[test]
fn restarted_rm_keeps_suspensions_and_resumptions() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    let tids = two_workers(&mut bed);
    set_job_suspended(&mut bed, tids[0], true);
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut()
        .tasks
        .iter_mut()
        .filter(|t| tids.contains(&t.tid))
        .for_each(|t| t.suspended = true);
    // While no resource manager runs, the job starts another task.
    let late = task_id(1, 900);
    let event = EventKind::TaskStarted {
        tid: late,
        parent: client(),
        name: "worker".into(),
        user: 0,
    };
    vm.0.borrow_mut().event(host_id(1), event);
    vm.0.borrow_mut().tasks.push(spawned_task_info(late, 1));
    vm.0.borrow_mut().clear_inbox();
    vm.0.borrow_mut().suspends.clear();
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    assert_eq!(vm.0.borrow().suspends, [(late, true, client_cause())]);
    bed.advance(Micros::from_secs(1));
    drop(bed);
    // The resource manager ended after it had recorded the resume of the job and before it had
    // resumed the tasks.
    vm.0.borrow_mut()
        .tasks
        .iter_mut()
        .filter(|t| t.tid == late)
        .for_each(|t| t.suspended = true);
    vm.0.borrow_mut().event(
        host_id(1),
        EventKind::JobResumed {
            job: client(),
            requested_by: client(),
        },
    );
    vm.0.borrow_mut().clear_inbox();
    vm.0.borrow_mut().suspends.clear();
    TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
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

/// Returns the tid of a program of user 7.
fn second_user_task() -> Tid {
    task_id(1, 3)
}

/// Returns the tid of a program of user 8.
fn third_user_task() -> Tid {
    task_id(1, 4)
}

/// Returns a service with two hosts of two processors each. User 0 has held all processors for six
/// hours. Also returns the tasks.
fn occupied_hosts(give_way: bool) -> (FakeVm, TestBed, Vec<Tid>) {
    occupied_hosts_with(give_way, Limits::default())
}

/// Like [`taken`], with limits for every user.
fn occupied_hosts_with(give_way: bool, limits: Limits) -> (FakeVm, TestBed, Vec<Tid>) {
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
        tids.extend(start_ordered(&mut bed, client()));
    }
    assert_eq!(tids.len(), 4);
    advance_with_reports(&mut bed, 6 * 3600);
    (vm, bed, tids)
}

/// Returns a service with two hosts of two processors each, and programs of the users 0, 7 and 8.
fn three_users(give_way: bool, limits: Limits) -> (FakeVm, TestBed) {
    let vm = world(2);
    for (task, uid) in [(second_user_task(), 7), (third_user_task(), 8)] {
        vm.0.borrow_mut().tasks.push(TaskInfo {
            uid,
            ..task_info(task, 1, TASK_CONNECTED, "")
        });
    }
    let rules = SpawnRules {
        wait: Micros::from_secs(3600),
        limits,
    };
    let conduct = EffectivePolicy {
        rules,
        give_way,
        ..EffectivePolicy::default()
    };
    let bed = TestBed::quiet_with(&vm, options_with_policy(conduct));
    bed.world().event(
        host_id(1),
        EventKind::TaskStarted {
            tid: client(),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    (vm, bed)
}

/// Spawns a task of `task` on the host named `host`. Returns the new task.
fn spawn_on(bed: &mut TestBed, task: Tid, host: &str) -> Tid {
    let named = SpawnRequest {
        flags: SPAWN_HOST,
        place: host.into(),
        ..request(1)
    };
    bed.world().spawn_by(task, 8, &named);
    bed.settle();
    start_ordered(bed, task)[0]
}

/// Advances the time by `seconds`. Load watchers report every ten seconds.
fn advance_with_reports(bed: &mut TestBed, seconds: u64) {
    for _ in 0..seconds / 10 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 2]);
    }
}

/// Lets the hosts carry out all orders to start tasks. Returns the started tasks.
fn start_ordered(bed: &mut TestBed, parent: Tid) -> Vec<Tid> {
    let execs = bed.world().take_start_orders();
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
            bed.world()
                .tasks
                .push(spawned_task_info(*tid, exec.host.index()));
        }
        tids.extend(started);
    }
    bed.settle();
    tids
}

fn request_one_slot(bed: &mut TestBed) {
    request_slots(bed, second_user_task(), 1, "?free >= 1");
}

fn request_slots(bed: &mut TestBed, task: Tid, count: u32, place: &str) {
    let request = SpawnRequest {
        place: place.into(),
        ..request(count)
    };
    bed.world().spawn_by(task, 9, &request);
    bed.settle();
}

/// Returns the users for whose requests tasks were preempted since the last call.
fn preempted_for(bed: &mut TestBed) -> Vec<String> {
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

/// If preemption cannot help a request, tasks are still preempted for other requests.
#[test]
fn unmeetable_request_does_not_block_preemption() {
    let (_, mut bed, _) = occupied_hosts(true);
    request_slots(&mut bed, second_user_task(), 1, "?memory >= 100T");
    advance_with_reports(&mut bed, 60);
    assert_eq!(preempted_for(&mut bed), [""; 0], "it is of no use");
    request_slots(&mut bed, third_user_task(), 1, "?free >= 1");
    advance_with_reports(&mut bed, 10);
    assert_eq!(preempted_for(&mut bed), ["user 8"]);
    assert_eq!(start_ordered(&mut bed, third_user_task()).len(), 1);
}

/// If a request waits because of a limit, tasks are still preempted for other requests.
#[test]
fn limited_request_does_not_block_preemption() {
    let (_, mut bed, _) = occupied_hosts_with(
        true,
        Limits {
            user_tasks: Some(4),
            job_tasks: None,
        },
    );
    spawn_on(&mut bed, second_user_task(), "h1");
    request_slots(&mut bed, second_user_task(), 4, "?free >= 1");
    // After this time, later requests of the user wait until this one is served.
    advance_with_reports(&mut bed, 180);
    assert_eq!(
        preempted_for(&mut bed),
        [""; 0],
        "five are too many, even with preemption"
    );
    request_slots(&mut bed, third_user_task(), 1, "?free >= 1");
    advance_with_reports(&mut bed, 10);
    assert_eq!(preempted_for(&mut bed), ["user 8"]);
    assert_eq!(start_ordered(&mut bed, third_user_task()).len(), 1);
}

/// No task is preempted on a host that is reserved for another request.
#[test]
fn no_preemption_on_reserved_hosts() {
    let (_, mut bed) = three_users(true, Limits::default());
    let (on2, on1) = (
        spawn_on(&mut bed, client(), "h2"),
        spawn_on(&mut bed, client(), "h1"),
    );
    advance_with_reports(&mut bed, 6 * 3600);
    // Preempting user 0 on one host does not free both hosts. User 8 has too low an index to be
    // preempted.
    for host in ["h1", "h2"] {
        spawn_on(&mut bed, third_user_task(), host);
    }
    request_slots(&mut bed, second_user_task(), 2, "?free >= 2; same-host");
    advance_with_reports(&mut bed, 150);
    let notes = bed.world().notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("hosts are reserved for it")),
        "{notes:?}"
    );
    request_slots(&mut bed, third_user_task(), 1, "?free >= 1");
    advance_with_reports(&mut bed, 10);
    let suspends = bed.world().suspends.clone();
    let [(gave_way, true, SuspendCause::Preempted { .. })] = &suspends[..] else {
        panic!("{suspends:?}, not {on1}")
    };
    assert_eq!(*gave_way, on2);
    assert_eq!(
        start_ordered(&mut bed, third_user_task())[0].birth_host(),
        Some(host_id(2))
    );
}

/// A task of a user with a high index is preempted for a waiting user, and resumes when there is
/// room.
#[test]
fn heavy_user_is_preempted_and_later_resumed() {
    let (_, mut bed, tids) = occupied_hosts(true);
    request_one_slot(&mut bed);
    let suspends = std::mem::take(&mut bed.world().suspends);
    let [(gave_way, true, SuspendCause::Preempted { why })] = &suspends[..] else {
        panic!("{suspends:?}")
    };
    assert_eq!(
        why,
        "user 7 waits for a host and has used less: index 0.0 against 24.0 of user 0"
    );
    assert!(tids.contains(gave_way));
    let theirs = start_ordered(&mut bed, second_user_task());
    assert_eq!(theirs.len(), 1, "it got its place");
    assert_eq!(theirs[0].birth_host(), gave_way.birth_host());
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.world().suspends, [], "its place is taken");
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = query(&mut bed, &RmQuery::TaskDecisions(*gave_way))
    else {
        panic!()
    };
    assert!(
        task.suspension
            .is_some_and(|s| s.to_string().starts_with("preempted: user 7 waits"))
    );
    assert!(
        decisions
            .iter()
            .any(|d| matches!(d.kind, DecisionKind::Suspended { .. })),
        "{decisions:?}"
    );
    bed.world().event(
        theirs[0].birth_host().expect("a task"),
        task_ended(theirs[0]),
    );
    advance_with_reports(&mut bed, 20);
    let suspends = bed.world().suspends.clone();
    assert!(
        matches!(&suspends[..], [(tid, false, SuspendCause::Preempted { .. })] if tid == gave_way),
        "{suspends:?}"
    );
}

/// A preempted task resumes when the other user's task has ended, even if there is external load.
#[test]
fn preempted_task_resumes_despite_external_load() {
    let (_, mut bed, tids) = occupied_hosts(true);
    request_one_slot(&mut bed);
    let gave_way = std::mem::take(&mut bed.world().suspends)[0].0;
    let theirs = start_ordered(&mut bed, second_user_task());
    // Six threads are runnable on two processors.
    bed.world().load = (1.0, 6);
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.world().suspends, [], "its place is taken");
    bed.world().event(
        theirs[0].birth_host().expect("a task"),
        task_ended(theirs[0]),
    );
    advance_with_reports(&mut bed, 20);
    let suspends = std::mem::take(&mut bed.world().suspends);
    assert!(
        matches!(&suspends[..], [(tid, false, SuspendCause::Preempted { .. })] if *tid == gave_way),
        "{suspends:?}"
    );
    // A request of another user waits, but would get no host if the task were preempted.
    request_one_slot(&mut bed);
    advance_with_reports(&mut bed, 120);
    assert_eq!(bed.world().suspends, [], "of {tids:?}");
    bed.world().load = (1.0, 2);
    advance_with_reports(&mut bed, 20);
    let suspends = bed.world().suspends.clone();
    assert!(
        matches!(&suspends[..], [(_, true, SuspendCause::Preempted { .. })]),
        "{suspends:?}"
    );
}

/// A waiting spawn is placed when the external load has ended.
#[test]
fn waiting_spawn_starts_when_external_load_ends() {
    for give_way in [true, false] {
        let (_, mut bed, tids) = occupied_hosts(give_way);
        bed.world().load = (1.0, 6);
        advance_with_reports(&mut bed, 10);
        for tid in &tids {
            bed.world()
                .event(tid.birth_host().expect("a task"), task_ended(*tid));
        }
        request_one_slot(&mut bed);
        advance_with_reports(&mut bed, 60);
        assert_eq!(
            start_ordered(&mut bed, second_user_task()),
            [],
            "the hosts are busy"
        );
        bed.world().load = (0.0, 0);
        advance_with_reports(&mut bed, 20);
        assert_eq!(start_ordered(&mut bed, second_user_task()).len(), 1);
    }
}

/// A task that starts after the resource manager is counted for its own user.
#[test]
fn late_task_is_attributed_to_its_user() {
    let (_, mut bed, _) = occupied_hosts(true);
    let late = task_id(2, 9);
    bed.world().event(
        host_id(2),
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

/// No task is preempted if the policy disables preemption, or for a request of the same user.
#[test]
fn no_preemption_by_policy_or_for_same_user() {
    let (_, mut bed, _) = occupied_hosts(false);
    request_one_slot(&mut bed);
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.world().suspends, []);
    let (_, mut bed, _) = occupied_hosts(true);
    let request = SpawnRequest {
        place: "?free >= 1".into(),
        ..request(1)
    };
    bed.world().spawn(7, &request);
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.world().suspends, [], "it is the same user who waits");
}

/// When a job is resumed, its preempted tasks stay suspended.
#[test]
fn resuming_job_keeps_preempted_tasks_paused() {
    let (_, mut bed, tids) = occupied_hosts(true);
    request_one_slot(&mut bed);
    let gave_way = bed.world().suspends[0].0;
    start_ordered(&mut bed, second_user_task());
    let (suspended, others) = set_job_suspended(&mut bed, gave_way, true);
    assert_eq!((suspended.len(), others.len()), (3, 1));
    let (resumed, others) = set_job_suspended(&mut bed, gave_way, false);
    assert!(
        resumed.len() == 3 && !resumed.contains(&gave_way),
        "{resumed:?} of {tids:?}"
    );
    assert!(
        others[0].0 == gave_way && others[0].1.contains("preempted"),
        "{others:?}"
    );
}

/// A task belongs to the user who started its job, on whatever host it runs. This also holds after
/// a restart of the resource manager.
#[test]
fn task_belongs_to_user_of_its_job() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = world(2);
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    // The user at h2 has an account there. A task of theirs is started on h1, where the daemon
    // belongs to another user.
    let (top, task) = (task_id(2, 3), task_id(1, 77));
    bed.world().event(
        host_id(2),
        EventKind::TaskStarted {
            tid: top,
            parent: Tid::NONE,
            name: String::new(),
            user: 7,
        },
    );
    bed.world().event(
        host_id(1),
        EventKind::TaskStarted {
            tid: task,
            parent: top,
            name: "worker".into(),
            user: 0,
        },
    );
    bed.settle();
    let users = |bed: &mut TestBed| {
        let RmReply::Job { job, tasks } = query(bed, &RmQuery::Job(task)) else {
            panic!("no job")
        };
        (
            job.user,
            tasks.iter().map(|task| task.user).collect::<Vec<u32>>(),
        )
    };
    assert_eq!(users(&mut bed), (7, vec![7, 7]));
    let mut listed = task_info(top, 2, TASK_CONNECTED, "");
    listed.uid = 7;
    bed.world()
        .tasks
        .extend([listed, spawned_task_info(task, 1)]);
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::with(&vm, options_with_history(dir.path())).expect("no other");
    assert_eq!(users(&mut bed), (7, vec![7, 7]));
}
