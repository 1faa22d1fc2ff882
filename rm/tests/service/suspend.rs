//! Jobs that a user suspends as a whole, and tasks that are preempted because their user has a high
//! index.

use crate::common::{
    FakeVm, TestBed, client_tid, fake_vm, host_id, request, spawned_task_info, task_id, task_info,
};
use crate::queries::start_two_workers;
use crate::{options_with_history, options_with_policy, query, task_ended_event};
use pvm_rm::decide::TaskLimits;
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

/// Returns the cause of a suspension that the client requests for a whole job.
fn client_cause() -> SuspendCause {
    SuspendCause::JobRequested {
        requested_by: client_tid(),
    }
}

/// Suspends or resumes a job. Returns the changed tasks, and the unchanged tasks with the reasons.
fn set_job_suspended(bed: &mut TestBed, job: Tid, suspend: bool) -> (Vec<Tid>, Vec<(Tid, String)>) {
    let RmReply::Suspended {
        tasks,
        unchanged_tasks: unchanged_entries,
        ..
    } = query(bed, &RmQuery::Suspend { job, suspend })
    else {
        panic!("no")
    };
    (tasks, unchanged_entries)
}

/// Reports the start of a task that the client has started without the resource manager.
fn report_client_child(bed: &mut TestBed, tid: Tid) {
    bed.state().log_event(
        host_id(1),
        EventKind::TaskStarted {
            tid,
            parent: client_tid(),
            name: "worker".into(),
            user: 0,
        },
    );
    bed.state().tasks.push(spawned_task_info(tid, 1));
    bed.process_inbox();
}

/// A job is suspended and resumed as a whole, including tasks that it starts while it is suspended.
#[test]
fn job_is_suspended_and_resumed_as_a_whole() {
    let mut bed = TestBed::start_with_watchers(&fake_vm(2));
    let mut tids = start_two_workers(&mut bed);
    assert_eq!(
        set_job_suspended(&mut bed, tids[1], true),
        (tids.clone(), vec![])
    );
    tids.push(task_id(1, 900));
    report_client_child(&mut bed, tids[2]);
    let expected_orders: Vec<(Tid, bool, SuspendCause)> = tids
        .iter()
        .map(|tid| (*tid, true, client_cause()))
        .collect();
    assert_eq!(bed.state().suspend_orders, expected_orders);
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
    let (changed_tids, unchanged_entries) = set_job_suspended(&mut bed, tids[1], true);
    assert_eq!(
        (changed_tids, unchanged_entries.len()),
        (vec![], 3),
        "they are so already"
    );
    tids.sort_unstable();
    assert_eq!(
        set_job_suspended(&mut bed, tids[2], false),
        (tids.clone(), vec![])
    );
    assert!(
        bed.state().suspend_orders[3..]
            .iter()
            .all(|(_, suspend, _)| !suspend)
    );
    report_client_child(&mut bed, task_id(1, 901));
    assert_eq!(
        bed.state().suspend_orders.len(),
        6,
        "nothing is suspended any more"
    );
    let RmReply::Decisions { decisions, .. } =
        query(&mut bed, &RmQuery::TaskDecisions(task_id(1, 900)))
    else {
        panic!("no reason")
    };
    let texts: Vec<String> = decisions.iter().map(|d| d.kind.to_string()).collect();
    let expected_starts = [
        "t40384 was suspended on h1: requested by t40002 for its whole job",
        "t40384 was resumed on h1: ",
    ];
    assert!(
        expected_starts
            .iter()
            .zip(&texts)
            .all(|(a, b)| b.starts_with(a))
            && texts.len() == 2,
        "{texts:?}"
    );
}

/// Time for which a task was suspended does not count as usage.
#[test]
fn suspended_time_is_not_usage() {
    let mut bed = TestBed::start_with_watchers(&fake_vm(2));
    let tids = start_two_workers(&mut bed);
    bed.advance(Micros::from_secs(3));
    set_job_suspended(&mut bed, tids[0], true);
    bed.advance(Micros::from_secs(5));
    set_job_suspended(&mut bed, tids[0], false);
    bed.advance(Micros::from_secs(1));
    bed.state().log_event(host_id(1), task_ended_event(tids[0]));
    set_job_suspended(&mut bed, tids[1], true);
    bed.advance(Micros::from_secs(2));
    bed.state().log_event(host_id(2), task_ended_event(tids[1]));
    bed.process_inbox();
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
    let mut bed = TestBed::start_with_watchers(&fake_vm(2));
    let tids = start_two_workers(&mut bed);
    bed.state()
        .refused_suspensions
        .insert(tids[0], PvmError::Denied);
    let (tasks, unchanged_entries) = set_job_suspended(&mut bed, tids[0], true);
    assert_eq!((tasks, unchanged_entries.len()), (vec![tids[1]], 1));
    assert!(
        unchanged_entries[0].0 == tids[0] && unchanged_entries[0].1.contains("refused"),
        "{unchanged_entries:?}"
    );
    let unknown_job_query = RmQuery::Suspend {
        job: task_id(2, 999),
        suspend: true,
    };
    assert_eq!(query(&mut bed, &unknown_job_query), RmReply::NotFound);
}

/// A restarted resource manager restores suspensions, suspends tasks that a suspended job has
/// started in the meantime, and completes a resume that was interrupted.
#[test]
fn restarted_rm_keeps_suspensions_and_resumptions() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    let tids = start_two_workers(&mut bed);
    set_job_suspended(&mut bed, tids[0], true);
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut()
        .tasks
        .iter_mut()
        .filter(|t| tids.contains(&t.tid))
        .for_each(|t| t.suspended = true);
    // While no resource manager runs, the job starts another task.
    let late_task = task_id(1, 900);
    let event = EventKind::TaskStarted {
        tid: late_task,
        parent: client_tid(),
        name: "worker".into(),
        user: 0,
    };
    vm.0.borrow_mut().log_event(host_id(1), event);
    vm.0.borrow_mut()
        .tasks
        .push(spawned_task_info(late_task, 1));
    vm.0.borrow_mut().clear_inbox();
    vm.0.borrow_mut().suspend_orders.clear();
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    assert_eq!(
        vm.0.borrow().suspend_orders,
        [(late_task, true, client_cause())]
    );
    bed.advance(Micros::from_secs(1));
    drop(bed);
    // The resource manager was killed after it had recorded the resume of the job and before it had
    // resumed the tasks.
    vm.0.borrow_mut()
        .tasks
        .iter_mut()
        .filter(|t| t.tid == late_task)
        .for_each(|t| t.suspended = true);
    vm.0.borrow_mut().log_event(
        host_id(1),
        EventKind::JobResumed {
            job: client_tid(),
            requested_by: client_tid(),
        },
    );
    vm.0.borrow_mut().clear_inbox();
    vm.0.borrow_mut().suspend_orders.clear();
    TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    let mut resumed_tids: Vec<Tid> =
        vm.0.borrow()
            .suspend_orders
            .iter()
            .filter(|s| !s.1)
            .map(|s| s.0)
            .collect();
    resumed_tids.sort_unstable();
    let mut job_tids = [&tids[..], &[late_task]].concat();
    job_tids.sort_unstable();
    assert_eq!(resumed_tids, job_tids);
}

/// Returns the tid of a task of user 7 from a command line.
fn second_user_task() -> Tid {
    task_id(1, 3)
}

/// Returns the tid of a task of user 8 from a command line.
fn third_user_task() -> Tid {
    task_id(1, 4)
}

/// Returns a service with two hosts of two processors each. Tasks of user 0 have used all
/// processors for six hours. Also returns these tasks. `preempts`: the policy enables preemption.
fn start_with_occupied_hosts(preempts: bool) -> (FakeVm, TestBed, Vec<Tid>) {
    start_with_occupied_hosts_and_limits(preempts, TaskLimits::default())
}

/// Like [`start_with_occupied_hosts`], with limits for every user.
fn start_with_occupied_hosts_and_limits(
    preempts: bool,
    limits: TaskLimits,
) -> (FakeVm, TestBed, Vec<Tid>) {
    let (vm, mut bed) = start_with_three_users(preempts, limits);
    let mut tids = Vec::new();
    for wid in [5, 6] {
        bed.state().request_spawn(
            wid,
            &SpawnRequest {
                where_arg: "?free >= 1; spread".into(),
                ..request(2)
            },
        );
        bed.process_inbox();
        tids.extend(acknowledge_starts(&mut bed, client_tid()));
    }
    assert_eq!(tids.len(), 4);
    advance_with_reports(&mut bed, 6 * 3600);
    (vm, bed, tids)
}

/// Returns a service with two hosts of two processors each. Users 0, 7 and 8 have a task from a
/// command line each.
fn start_with_three_users(preempts: bool, limits: TaskLimits) -> (FakeVm, TestBed) {
    let vm = fake_vm(2);
    for (task, uid) in [(second_user_task(), 7), (third_user_task(), 8)] {
        vm.0.borrow_mut().tasks.push(TaskInfo {
            uid,
            ..task_info(task, 1, TASK_CONNECTED, "")
        });
    }
    let rules = SpawnRules {
        wait_max: Micros::from_secs(3600),
        task_limits: limits,
    };
    let policy = EffectivePolicy {
        spawn_rules: rules,
        preempts,
        ..EffectivePolicy::default()
    };
    let bed = TestBed::start_with_options(&vm, options_with_policy(policy));
    bed.state().log_event(
        host_id(1),
        EventKind::TaskStarted {
            tid: client_tid(),
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        },
    );
    (vm, bed)
}

/// Spawns a task for `spawner` on the host named `host_name`. Returns the tid of the new task.
fn spawn_on_host(bed: &mut TestBed, spawner: Tid, host_name: &str) -> Tid {
    let named_request = SpawnRequest {
        flags: SPAWN_HOST,
        where_arg: host_name.into(),
        ..request(1)
    };
    bed.state().request_spawn_by(spawner, 8, &named_request);
    bed.process_inbox();
    acknowledge_starts(bed, spawner)[0]
}

/// Advances the time by `seconds`. Load watchers report every ten seconds.
fn advance_with_reports(bed: &mut TestBed, seconds: u64) {
    for _ in 0..seconds / 10 {
        bed.advance(Micros::from_secs(10));
        bed.report_absent_owners(&[1, 2]);
    }
}

/// Acknowledges all orders to start tasks, and reports the starts as children of `parent`. Returns
/// the started tasks.
fn acknowledge_starts(bed: &mut TestBed, parent: Tid) -> Vec<Tid> {
    let orders = bed.state().take_start_orders();
    let mut tids = Vec::new();
    for order in orders {
        let started_tids = bed.state().acknowledge(&order);
        for tid in &started_tids {
            bed.state().log_event(
                order.host,
                EventKind::TaskStarted {
                    tid: *tid,
                    parent,
                    name: "worker".into(),
                    user: 0,
                },
            );
            bed.state()
                .tasks
                .push(spawned_task_info(*tid, order.host.index()));
        }
        tids.extend(started_tids);
    }
    bed.process_inbox();
    tids
}

fn request_one_slot(bed: &mut TestBed) {
    request_slots(bed, second_user_task(), 1, "?free >= 1");
}

fn request_slots(bed: &mut TestBed, requester: Tid, count: u32, place_text: &str) {
    let request = SpawnRequest {
        where_arg: place_text.into(),
        ..request(count)
    };
    bed.state().request_spawn_by(requester, 9, &request);
    bed.process_inbox();
}

/// Returns the users for whose requests tasks were preempted since the last call, as texts.
fn take_preempting_users(bed: &mut TestBed) -> Vec<String> {
    let orders = std::mem::take(&mut bed.state().suspend_orders);
    let preempting_users = orders
        .into_iter()
        .filter_map(|(_, suspend, cause)| match cause {
            SuspendCause::Preempted {
                why: preempting_users,
            } if suspend => preempting_users.split(" waits").next().map(str::to_string),
            _ => None,
        });
    preempting_users.collect()
}

/// If preemption cannot help one request, tasks are still preempted for other requests.
#[test]
fn unmeetable_request_does_not_block_preemption() {
    let (_, mut bed, _) = start_with_occupied_hosts(true);
    request_slots(&mut bed, second_user_task(), 1, "?memory >= 100T");
    advance_with_reports(&mut bed, 60);
    assert_eq!(take_preempting_users(&mut bed), [""; 0], "it is of no use");
    request_slots(&mut bed, third_user_task(), 1, "?free >= 1");
    advance_with_reports(&mut bed, 10);
    assert_eq!(take_preempting_users(&mut bed), ["user 8"]);
    assert_eq!(acknowledge_starts(&mut bed, third_user_task()).len(), 1);
}

/// If one request waits because of a limit, tasks are still preempted for other requests.
#[test]
fn limited_request_does_not_block_preemption() {
    let (_, mut bed, _) = start_with_occupied_hosts_and_limits(
        true,
        TaskLimits {
            user_tasks_max: Some(4),
            job_tasks_max: None,
        },
    );
    spawn_on_host(&mut bed, second_user_task(), "h1");
    request_slots(&mut bed, second_user_task(), 4, "?free >= 1");
    // After 180 seconds, later requests of the user must wait until the first one has been placed.
    advance_with_reports(&mut bed, 180);
    assert_eq!(
        take_preempting_users(&mut bed),
        [""; 0],
        "five are too many, even with preemption"
    );
    request_slots(&mut bed, third_user_task(), 1, "?free >= 1");
    advance_with_reports(&mut bed, 10);
    assert_eq!(take_preempting_users(&mut bed), ["user 8"]);
    assert_eq!(acknowledge_starts(&mut bed, third_user_task()).len(), 1);
}

/// No task is preempted on a host that is reserved for another request.
#[test]
fn no_preemption_on_reserved_hosts() {
    let (_, mut bed) = start_with_three_users(true, TaskLimits::default());
    let (h2_task, h1_task) = (
        spawn_on_host(&mut bed, client_tid(), "h2"),
        spawn_on_host(&mut bed, client_tid(), "h1"),
    );
    advance_with_reports(&mut bed, 6 * 3600);
    // If only tasks of user 0 are preempted, neither host becomes free. User 8 has too low an index
    // to be preempted.
    for host in ["h1", "h2"] {
        spawn_on_host(&mut bed, third_user_task(), host);
    }
    request_slots(&mut bed, second_user_task(), 2, "?free >= 2; same-host");
    advance_with_reports(&mut bed, 150);
    let notes = bed.state().recorded_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.contains("hosts are reserved for it")),
        "{notes:?}"
    );
    request_slots(&mut bed, third_user_task(), 1, "?free >= 1");
    advance_with_reports(&mut bed, 10);
    let orders = bed.state().suspend_orders.clone();
    let [(preempted_tid, true, SuspendCause::Preempted { .. })] = &orders[..] else {
        panic!("{orders:?}, not {h1_task}")
    };
    assert_eq!(*preempted_tid, h2_task);
    assert_eq!(
        acknowledge_starts(&mut bed, third_user_task())[0].birth_host(),
        Some(host_id(2))
    );
}

/// A task of a user with a high index is preempted for a waiting user. It resumes when there is
/// room.
#[test]
fn heavy_user_is_preempted_and_later_resumed() {
    let (_, mut bed, tids) = start_with_occupied_hosts(true);
    request_one_slot(&mut bed);
    let orders = std::mem::take(&mut bed.state().suspend_orders);
    let [(preempted_tid, true, SuspendCause::Preempted { why })] = &orders[..] else {
        panic!("{orders:?}")
    };
    assert_eq!(
        why,
        "user 7 waits for a host and has used less: index 0.0 against 24.0 of user 0"
    );
    assert!(tids.contains(preempted_tid));
    let new_tids = acknowledge_starts(&mut bed, second_user_task());
    assert_eq!(new_tids.len(), 1, "it got its place");
    assert_eq!(new_tids[0].birth_host(), preempted_tid.birth_host());
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.state().suspend_orders, [], "its place is taken");
    let RmReply::Decisions {
        task: Some(task),
        decisions,
        ..
    } = query(&mut bed, &RmQuery::TaskDecisions(*preempted_tid))
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
    bed.state().log_event(
        new_tids[0].birth_host().expect("a task"),
        task_ended_event(new_tids[0]),
    );
    advance_with_reports(&mut bed, 20);
    let orders = bed.state().suspend_orders.clone();
    assert!(
        matches!(&orders[..], [(tid, false, SuspendCause::Preempted { .. })] if tid == preempted_tid),
        "{orders:?}"
    );
}

/// When the other user's task has ended, a preempted task resumes even if there is external load.
#[test]
fn preempted_task_resumes_despite_external_load() {
    let (_, mut bed, tids) = start_with_occupied_hosts(true);
    request_one_slot(&mut bed);
    let preempted_tid = std::mem::take(&mut bed.state().suspend_orders)[0].0;
    let new_tids = acknowledge_starts(&mut bed, second_user_task());
    // Six threads are runnable on two processors.
    bed.state().reported_load = (1.0, 6);
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.state().suspend_orders, [], "its place is taken");
    bed.state().log_event(
        new_tids[0].birth_host().expect("a task"),
        task_ended_event(new_tids[0]),
    );
    advance_with_reports(&mut bed, 20);
    let orders = std::mem::take(&mut bed.state().suspend_orders);
    assert!(
        matches!(&orders[..], [(tid, false, SuspendCause::Preempted { .. })] if *tid == preempted_tid),
        "{orders:?}"
    );
    // A request of another user waits. It would get no host even if the task were preempted.
    request_one_slot(&mut bed);
    advance_with_reports(&mut bed, 120);
    assert_eq!(bed.state().suspend_orders, [], "of {tids:?}");
    bed.state().reported_load = (1.0, 2);
    advance_with_reports(&mut bed, 20);
    let orders = bed.state().suspend_orders.clone();
    assert!(
        matches!(&orders[..], [(_, true, SuspendCause::Preempted { .. })]),
        "{orders:?}"
    );
}

/// A waiting spawn is placed when the external load has ended.
#[test]
fn waiting_spawn_starts_when_external_load_ends() {
    for preempts in [true, false] {
        let (_, mut bed, tids) = start_with_occupied_hosts(preempts);
        bed.state().reported_load = (1.0, 6);
        advance_with_reports(&mut bed, 10);
        for tid in &tids {
            bed.state()
                .log_event(tid.birth_host().expect("a task"), task_ended_event(*tid));
        }
        request_one_slot(&mut bed);
        advance_with_reports(&mut bed, 60);
        assert_eq!(
            acknowledge_starts(&mut bed, second_user_task()),
            [],
            "the hosts are busy"
        );
        bed.state().reported_load = (0.0, 0);
        advance_with_reports(&mut bed, 20);
        assert_eq!(acknowledge_starts(&mut bed, second_user_task()).len(), 1);
    }
}

/// A task that starts after the resource manager is counted for its own user.
#[test]
fn late_task_is_attributed_to_its_user() {
    let (_, mut bed, _) = start_with_occupied_hosts(true);
    let late_task = task_id(2, 9);
    bed.state().log_event(
        host_id(2),
        EventKind::TaskStarted {
            tid: late_task,
            parent: Tid::NONE,
            name: String::new(),
            user: 8,
        },
    );
    bed.process_inbox();
    let request = SpawnRequest {
        where_arg: "?free >= 1".into(),
        ..request(1)
    };
    bed.state()
        .post_message(late_task, CTX_BASE, SM_SPAWN, 9, pack_spawn(&request, None));
    bed.process_inbox();
    let orders = bed.state().suspend_orders.clone();
    assert!(
        matches!(&orders[..], [(_, true, SuspendCause::Preempted { why })] if why.starts_with("user 8 waits")),
        "{orders:?}"
    );
}

/// No task is preempted if the policy disables preemption, or for a request of the same user.
#[test]
fn no_preemption_by_policy_or_for_same_user() {
    let (_, mut bed, _) = start_with_occupied_hosts(false);
    request_one_slot(&mut bed);
    advance_with_reports(&mut bed, 60);
    assert_eq!(bed.state().suspend_orders, []);
    let (_, mut bed, _) = start_with_occupied_hosts(true);
    let request = SpawnRequest {
        where_arg: "?free >= 1".into(),
        ..request(1)
    };
    bed.state().request_spawn(7, &request);
    advance_with_reports(&mut bed, 60);
    assert_eq!(
        bed.state().suspend_orders,
        [],
        "it is the same user who waits"
    );
}

/// If a job is resumed, its preempted tasks stay suspended.
#[test]
fn resuming_job_keeps_preempted_tasks_paused() {
    let (_, mut bed, tids) = start_with_occupied_hosts(true);
    request_one_slot(&mut bed);
    let preempted_tid = bed.state().suspend_orders[0].0;
    acknowledge_starts(&mut bed, second_user_task());
    let (suspended_tids, unchanged_entries) = set_job_suspended(&mut bed, preempted_tid, true);
    assert_eq!((suspended_tids.len(), unchanged_entries.len()), (3, 1));
    let (resumed_tids, unchanged_entries) = set_job_suspended(&mut bed, preempted_tid, false);
    assert!(
        resumed_tids.len() == 3 && !resumed_tids.contains(&preempted_tid),
        "{resumed_tids:?} of {tids:?}"
    );
    assert!(
        unchanged_entries[0].0 == preempted_tid && unchanged_entries[0].1.contains("preempted"),
        "{unchanged_entries:?}"
    );
}

/// A task belongs to the user who started its job, on whatever host the task runs. A restart of the
/// resource manager does not change that.
#[test]
fn task_belongs_to_user_of_its_job() {
    let dir = tempfile::tempdir().expect("a directory");
    let vm = fake_vm(2);
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    // User 7 starts a job on h2. A task of the job is started on h1, where the daemon belongs to
    // user 0.
    let (top_task, task) = (task_id(2, 3), task_id(1, 77));
    bed.state().log_event(
        host_id(2),
        EventKind::TaskStarted {
            tid: top_task,
            parent: Tid::NONE,
            name: String::new(),
            user: 7,
        },
    );
    bed.state().log_event(
        host_id(1),
        EventKind::TaskStarted {
            tid: task,
            parent: top_task,
            name: "worker".into(),
            user: 0,
        },
    );
    bed.process_inbox();
    let query_users = |bed: &mut TestBed| {
        let RmReply::Job { job, tasks } = query(bed, &RmQuery::Job(task)) else {
            panic!("no job")
        };
        (
            job.user,
            tasks.iter().map(|task| task.user).collect::<Vec<u32>>(),
        )
    };
    assert_eq!(query_users(&mut bed), (7, vec![7, 7]));
    let mut top_task_info = task_info(top_task, 2, TASK_CONNECTED, "");
    top_task_info.uid = 7;
    bed.state()
        .tasks
        .extend([top_task_info, spawned_task_info(task, 1)]);
    bed.advance(Micros::from_secs(1));
    drop(bed);
    vm.0.borrow_mut().clear_inbox();
    let mut bed = TestBed::try_start_with(&vm, options_with_history(dir.path())).expect("no other");
    assert_eq!(query_users(&mut bed), (7, vec![7, 7]));
}
