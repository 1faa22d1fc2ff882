//! Decisions about preemption, and about the resume of preempted tasks, on fixed snapshots.

mod idle;

use idle::{NOW, host_id, idle_host};
use proptest::prelude::*;
use pvm_rm::decide::{
    FairShare, HostView, OwnerState, PlacementPolicy, PlacementRequest, ResumeTarget, Snapshot,
    TaskView, UpDownRates, place, select_resumable, select_victims,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn task_id(host: u16, local_number: u32) -> Tid {
    Tid::for_task(host_id(host), local_number).expect("a task")
}

/// Returns hosts with one processor each. A task of user 1 runs on each host; a higher host index
/// means a later start.
fn busy_hosts(host_count: u16) -> Snapshot {
    let host = |index| {
        let mut host = idle_host(index, 1, 0);
        let started_at = Micros(NOW.0 - u64::from(100 - index));
        host.tasks = vec![TaskView {
            user: 1,
            ..TaskView::new(task_id(index, 1), started_at)
        }];
        host
    };
    Snapshot::new(
        NOW,
        PlacementPolicy::Load,
        (1..=host_count).map(host).collect(),
    )
}

/// Returns the Up-Down state in which user 1 holds `processor_count` processors and has an index of
/// 100.
fn heavy_user_shares(processor_count: u32) -> FairShare {
    let mut fair_share = FairShare::new(UpDownRates::default());
    fair_share.add_processors(Micros(0), 1, processor_count);
    fair_share.restore_index(NOW, 1, 100.0, Micros(0));
    fair_share
}

fn request(count: u32) -> SpawnRequest {
    SpawnRequest {
        program: "worker".into(),
        where_arg: "?free >= 1; spread".into(),
        task_count: count,
        ..SpawnRequest::default()
    }
}

fn victim_tids(snapshot: &Snapshot, fair_share: &FairShare, request: &SpawnRequest) -> Vec<Tid> {
    let placement_request = PlacementRequest::new(2, request, request.task_count, host_id(1));
    select_victims(snapshot, fair_share, &placement_request)
        .into_iter()
        .map(|victim| victim.tid)
        .collect()
}

/// The most recently started tasks are preempted. Their number is the number of slots that the
/// request needs.
#[test]
fn newest_tasks_are_preempted_first() {
    let (snapshot, fair_share) = (busy_hosts(4), heavy_user_shares(4));
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(2)),
        [task_id(4, 1), task_id(3, 1)]
    );
    let mut freed_snapshot = snapshot.clone();
    for host in [3, 4] {
        freed_snapshot
            .hosts
            .edit(host_id(host))
            .expect("a host")
            .tasks[0]
            .suspended = true;
    }
    freed_snapshot.hosts.refresh(NOW);
    let request = request(2);
    let placement_request = PlacementRequest::new(2, &request, 2, host_id(1));
    let mut hosts: Vec<HostId> = place(&freed_snapshot, &placement_request)
        .hosts
        .into_iter()
        .flatten()
        .collect();
    hosts.sort_unstable();
    assert_eq!(
        hosts,
        [host_id(3), host_id(4)],
        "which gets its places then"
    );
}

/// A request gets slots only from users with a much higher index. No task of a user with a similar
/// index is preempted.
#[test]
fn light_users_tasks_are_not_preempted() {
    let (mut snapshot, fair_share) = (busy_hosts(3), heavy_user_shares(3));
    snapshot.hosts.edit(host_id(2)).expect("a host").tasks[0].user = 3;
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(3)),
        [task_id(3, 1), task_id(1, 1)],
        "the third has taken as little"
    );
}

/// Tasks that share a host are preempted together, and only if other tasks do not suffice.
#[test]
fn tasks_sharing_a_host_are_preempted_last() {
    let (mut snapshot, fair_share) = (busy_hosts(3), heavy_user_shares(4));
    let second_task = TaskView {
        user: 1,
        ..TaskView::new(task_id(3, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(3))
        .expect("a host")
        .tasks
        .push(second_task);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(2)),
        [task_id(2, 1), task_id(1, 1)]
    );
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(3)),
        [task_id(2, 1), task_id(1, 1), task_id(3, 2), task_id(3, 1)]
    );
}

/// If tasks of several users with a high index share a host, all of them are preempted or none.
/// They are preempted only if other hosts do not suffice.
#[test]
fn shared_host_is_freed_by_all_its_users() {
    let (mut snapshot, mut fair_share) = (busy_hosts(2), heavy_user_shares(2));
    fair_share.add_processors(Micros(0), 3, 1);
    fair_share.restore_index(NOW, 3, 90.0, Micros(0));
    let user3_task = TaskView {
        user: 3,
        ..TaskView::new(task_id(2, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(2))
        .expect("a host")
        .tasks
        .push(user3_task);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(1)),
        [task_id(1, 1)],
        "nobody of them if there is another host"
    );
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(2)),
        [task_id(1, 1), task_id(2, 1), task_id(2, 2)]
    );
    let victim = |tid: Tid, user: u32| {
        let request = request(2);
        let placement_request = PlacementRequest::new(2, &request, 2, host_id(1));
        let victim = select_victims(&snapshot, &fair_share, &placement_request)
            .into_iter()
            .find(|victim| victim.tid == tid)
            .expect("it gives way");
        assert!(
            victim.why.ends_with(&format!("of user {user}")),
            "{}",
            victim.why
        );
    };
    victim(task_id(2, 1), 1);
    victim(task_id(2, 2), 3);
}

/// No task is preempted if the request would still get no host after the preemption.
#[test]
fn useless_preemption_is_avoided() {
    let (mut snapshot, fair_share) = (busy_hosts(2), heavy_user_shares(2));
    let impossible_request = SpawnRequest {
        where_arg: "?free >= 1; memory >= 900G".into(),
        ..request(1)
    };
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &impossible_request),
        [],
        "no host has so much memory"
    );
    assert_eq!(
        victim_tids(&snapshot, &heavy_user_shares(0), &request(1)),
        [],
        "the user holds nothing"
    );
    for host in [1, 2] {
        let host = snapshot.hosts.edit(host_id(host)).expect("a host");
        host.owner = OwnerState::Present {
            why: "alice on pts/0".into(),
        };
    }
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victim_tids(&snapshot, &fair_share, &request(1)),
        [],
        "tasks beside an owner make no room"
    );
}

/// A preempted task resumes on its current host if there is room, otherwise on another host.
#[test]
fn preempted_task_resumes_where_there_is_room() {
    let mut snapshot = busy_hosts(2);
    let preemption_time = Micros(NOW.0 - 60_000_000);
    snapshot.hosts.edit(host_id(1)).expect("a host").tasks[0].suspended = true;
    snapshot.hosts.refresh(NOW);
    let preempted_at = BTreeMap::from([(task_id(1, 1), preemption_time)]);
    let no_hosts = BTreeSet::new();
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [(task_id(1, 1), host_id(1), ResumeTarget::CurrentHost)]
    );
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &BTreeSet::from([host_id(1)])),
        [],
        "something is being started there"
    );
    let recently_preempted_at = BTreeMap::from([(task_id(1, 1), Micros(NOW.0 - 1_000_000))]);
    assert_eq!(
        select_resumable(&snapshot, &recently_preempted_at, &no_hosts),
        [],
        "what it made room for has not begun"
    );
    let other_user_task = TaskView {
        user: 2,
        ..TaskView::new(task_id(1, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(1))
        .expect("a host")
        .tasks
        .push(other_user_task);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [],
        "both hosts are busy"
    );
    snapshot
        .hosts
        .edit(host_id(2))
        .expect("a host")
        .tasks
        .clear();
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [(
            task_id(1, 1),
            host_id(1),
            ResumeTarget::OtherHost(host_id(2))
        )]
    );
    let second_task = TaskView {
        user: 1,
        suspended: true,
        ..TaskView::new(task_id(1, 3), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(1))
        .expect("a host")
        .tasks
        .push(second_task);
    snapshot.hosts.refresh(NOW);
    let both_preempted_at = BTreeMap::from([
        (task_id(1, 1), preemption_time),
        (task_id(1, 3), Micros(preemption_time.0 - 1)),
    ]);
    assert_eq!(
        select_resumable(&snapshot, &both_preempted_at, &no_hosts),
        [(
            task_id(1, 3),
            host_id(1),
            ResumeTarget::OtherHost(host_id(2))
        )],
        "who has stood longest goes first"
    );
}

/// Sets the load sample of a host to its running tasks plus external load of `external_threads`
/// threads.
fn set_external_load(snapshot: &mut Snapshot, host: u16, external_threads: f32) {
    let host = snapshot.hosts.edit(host_id(host)).expect("a host");
    let timed_sample = host.sample.as_mut().expect("it is watched");
    let sample = &mut timed_sample.sample;
    timed_sample.vm_task_count = host.tasks.iter().filter(|task| task.computes()).count() as u32;
    let demand = timed_sample.vm_task_count as f32 + external_threads;
    sample.busy_share = (demand / sample.cores as f32).min(1.0);
    (sample.runnable_threads, sample.one_minute_load) = (demand.round() as u32, demand);
    snapshot.hosts.refresh(snapshot.now);
}

fn suspend_task(snapshot: &mut Snapshot, tid: Tid) -> HostId {
    let has_task = |host: &&HostView| host.tasks.iter().any(|task| task.tid == tid);
    let id = snapshot
        .hosts
        .iter()
        .find(has_task)
        .expect("it is somewhere")
        .id;
    let host = snapshot.hosts.edit(id).expect("a host");
    host.tasks
        .iter_mut()
        .find(|task| task.tid == tid)
        .expect("it is there")
        .suspended = true;
    snapshot.hosts.refresh(snapshot.now);
    id
}

/// A preempted task resumes on a host with external load, but not on a host with tasks of another
/// user.
#[test]
fn external_load_does_not_keep_tasks_paused() {
    let mut snapshot = busy_hosts(2);
    suspend_task(&mut snapshot, task_id(1, 1));
    let preempted_at = BTreeMap::from([(task_id(1, 1), Micros(NOW.0 - 60_000_000))]);
    let no_hosts = BTreeSet::new();
    set_external_load(&mut snapshot, 1, 3.0);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [(task_id(1, 1), host_id(1), ResumeTarget::CurrentHost)],
        "it rather runs slowly"
    );
    snapshot
        .hosts
        .edit(host_id(2))
        .expect("a host")
        .tasks
        .clear();
    set_external_load(&mut snapshot, 2, 0.0);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [(
            task_id(1, 1),
            host_id(1),
            ResumeTarget::OtherHost(host_id(2))
        )],
        "best of all where nobody is"
    );
    let other_user_task = TaskView {
        user: 2,
        ..TaskView::new(task_id(1, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(1))
        .expect("a host")
        .tasks
        .push(other_user_task);
    set_external_load(&mut snapshot, 2, 3.0);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [(
            task_id(1, 1),
            host_id(1),
            ResumeTarget::OtherHost(host_id(2))
        )],
        "slowly elsewhere, too"
    );
    snapshot
        .hosts
        .edit(host_id(2))
        .expect("a host")
        .tasks
        .push(TaskView::new(task_id(2, 2), Micros(0)));
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [],
        "but not beside whom it made room for, or in the way of others"
    );
}

/// A preempted task resumes on a host with tasks that ran there before its preemption, but not on a
/// host with the tasks for which it was preempted.
#[test]
fn preempted_task_resumes_beside_old_neighbours() {
    let mut snapshot = busy_hosts(1);
    let (earlier_start, preemption_time) = (Micros(NOW.0 - 90_000_000), Micros(NOW.0 - 60_000_000));
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.tasks.push(TaskView {
        user: 1,
        ..TaskView::new(task_id(1, 2), NOW)
    });
    host.tasks.push(TaskView {
        user: 3,
        ..TaskView::new(task_id(1, 3), earlier_start)
    });
    suspend_task(&mut snapshot, task_id(1, 1));
    let preempted_at = BTreeMap::from([(task_id(1, 1), preemption_time)]);
    let no_hosts = BTreeSet::new();
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [(task_id(1, 1), host_id(1), ResumeTarget::CurrentHost)]
    );
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.tasks.push(TaskView {
        user: 2,
        ..TaskView::new(task_id(1, 4), preemption_time)
    });
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [],
        "this one has come instead"
    );
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.tasks.pop();
    Arc::make_mut(&mut host.guest_policy.limits).guests_max = Some(2);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &no_hosts),
        [],
        "two are there, and the owner allows no more"
    );
}

/// Half a processor is sufficient for a task to resume.
#[test]
fn fraction_of_processor_suffices_to_resume() {
    let mut snapshot = busy_hosts(1);
    suspend_task(&mut snapshot, task_id(1, 1));
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.sample
        .as_mut()
        .expect("it is watched")
        .sample
        .cpu_limit = 0.5;
    snapshot.hosts.refresh(NOW);
    let preempted_at = BTreeMap::from([(task_id(1, 1), Micros(NOW.0 - 60_000_000))]);
    assert_eq!(
        select_resumable(&snapshot, &preempted_at, &BTreeSet::new()),
        [(task_id(1, 1), host_id(1), ResumeTarget::CurrentHost)]
    );
}

/// Resumes tasks until the decision selects no more. Asserts that `is_allowed` holds for the host
/// of each resumed task.
fn resume_all(
    snapshot: &mut Snapshot,
    preempted_at: &mut BTreeMap<Tid, Micros>,
    is_allowed: impl Fn(&HostView) -> bool,
) -> Result<(), TestCaseError> {
    loop {
        let resumable_tasks = select_resumable(snapshot, preempted_at, &BTreeSet::new());
        if resumable_tasks.is_empty() {
            return Ok(());
        }
        for (tid, source, resume_target) in resumable_tasks {
            let host = snapshot.hosts.edit(source).expect("a host");
            let task_position = host
                .tasks
                .iter()
                .position(|task| task.tid == tid)
                .expect("it is there");
            let task = TaskView {
                suspended: false,
                ..host.tasks.remove(task_position)
            };
            let target = if let ResumeTarget::OtherHost(target) = resume_target {
                target
            } else {
                source
            };
            snapshot
                .hosts
                .edit(target)
                .expect("a host")
                .tasks
                .push(task);
            preempted_at.remove(&tid);
            prop_assert!(
                is_allowed(snapshot.host(target).expect("a host")),
                "{tid} goes on at {target}"
            );
        }
        snapshot.hosts.refresh(snapshot.now);
    }
}

proptest! {
    /// A preempted task does not slow down the tasks for which it was preempted, whatever the
    /// external load is. After its resume, the task is not preempted again while a request waits.
    /// The task stays suspended only while the tasks for which it was preempted run.
    #[test]
    fn preempted_tasks_resume_when_replacements_end(
        hosts in prop::collection::vec((1_u32..4, 0_u32..3, any::<bool>(), 0_u32..8, 0_u32..40), 1..20),
        count in 1_u32..4, second in 1_u32..6, needs_free_slots in any::<bool>(),
    ) {
        let view = |(i, (cores, extra_tasks, is_limited, ..)): (usize, &(u32, u32, bool, u32, u32))| {
            let (index, task_count) = (i as u16 + 1, cores + extra_tasks);
            let mut host = idle_host(index, *cores, 0);
            let task = |n| TaskView { user: 1, ..TaskView::new(task_id(index, n), Micros(NOW.0 - u64::from(n))) };
            host.tasks = (1..=task_count).map(task).collect();
            Arc::make_mut(&mut host.guest_policy.limits).guests_max = (*is_limited || !needs_free_slots).then_some(task_count);
            host
        };
        let mut snapshot = Snapshot::new(NOW, PlacementPolicy::Load, hosts.iter().enumerate().map(view).collect());
        for (i, (.., load_before, _)) in (1..).zip(&hosts) {
            set_external_load(&mut snapshot, i, *load_before as f32 / 10.0);
        }
        let place_text = if needs_free_slots { "?free >= 1" } else { "" };
        let spawn_request = |count| SpawnRequest { where_arg: place_text.into(), ..request(count) };
        let (first_request, second) = (spawn_request(count), spawn_request(second));
        let placement_request = |request| PlacementRequest::new(2, request, request.task_count, host_id(1));
        let count_computing = |snapshot: &Snapshot| {
            let count_computing_on = |host: &HostView| host.tasks.iter().filter(|t| t.user == 1 && t.computes()).count();
            snapshot.hosts.iter().map(count_computing_on).sum::<usize>() as u32
        };
        let selection = select_victims(&snapshot, &heavy_user_shares(count_computing(&snapshot)), &placement_request(&first_request));
        if selection.is_empty() {
            return Ok(());
        }
        let mut preempted_at = BTreeMap::new();
        for selection in selection {
            suspend_task(&mut snapshot, selection.tid);
            preempted_at.insert(selection.tid, NOW);
        }
        // The tasks of the request start, and then the external load changes.
        snapshot.now = NOW + Micros::from_secs(30);
        for i in (1..).take(hosts.len()) {
            snapshot.hosts.edit(host_id(i)).expect("a host").sample.as_mut().expect("it is watched").received_at = snapshot.now;
        }
        let target_hosts: Vec<HostId> = place(&snapshot, &placement_request(&first_request)).hosts.into_iter().flatten().collect();
        prop_assert!(!target_hosts.is_empty(), "they are paused in vain");
        for (n, host) in (1..).zip(target_hosts) {
            let host = snapshot.hosts.edit(host).expect("a host");
            host.tasks.push(TaskView { user: 2, ..TaskView::new(task_id(host.id.index(), 1000 + n), snapshot.now) });
        }
        for (i, (.., load_after)) in (1..).zip(&hosts) {
            set_external_load(&mut snapshot, i, *load_after as f32 / 10.0);
        }
        let second_waits = place(&snapshot, &placement_request(&second)).hosts.first().is_none_or(Result::is_err)
            && select_victims(&snapshot, &heavy_user_shares(count_computing(&snapshot)), &placement_request(&second)).is_empty();
        resume_all(&mut snapshot, &mut preempted_at, |host| {
            let running_count = host.tasks.iter().filter(|task| task.computes()).count();
            running_count <= host.cores.max(1) as usize || host.tasks.iter().all(|task| task.user == 1 || !task.computes())
        })?;
        if second_waits {
            let further_victims = select_victims(&snapshot, &heavy_user_shares(count_computing(&snapshot)), &placement_request(&second));
            prop_assert!(further_victims.is_empty(), "{:?} went on for nothing", further_victims);
        }
        snapshot.hosts.iter_mut().for_each(|host| host.tasks.retain(|task| task.user == 1));
        snapshot.hosts.refresh(snapshot.now);
        resume_all(&mut snapshot, &mut preempted_at, |_| true)?;
        prop_assert!(preempted_at.is_empty(), "{:?} are paused, and no task is in their way", preempted_at);
    }

    /// If the selected tasks are suspended, the request gets as many slots as if no host had any
    /// task. Each selected task is necessary for these slots.
    #[test]
    fn victims_free_exactly_the_needed_slots(
        hosts in prop::collection::vec((1_u32..4, 0_u32..4, any::<bool>()), 1..80), count in 1_u32..6, place_index in 0_usize..6,
        is_round_robin in any::<bool>(), user3_thirds in 0_u32..3,
    ) {
        let view = |(i, (cores, tasks, has_idle_owner)): (usize, (u32, u32, bool))| {
            let index = i as u16 + 1;
            let mut host = idle_host(index, cores, 0);
            // Each task belongs to user 1 or user 3; in some cases all tasks belong to the same
            // user.
            let user = |n| if (n + u32::from(index)) % 3 < user3_thirds { 3 } else { 1 };
            let task = |n| TaskView { user: user(n), ..TaskView::new(task_id(index, n), Micros(NOW.0 - u64::from(n))) };
            host.tasks = (1..=tasks).map(task).collect();
            if has_idle_owner {
                host.owner = OwnerState::PossiblyPresent { why: "alice is idle".into(), idle_login: true };
            }
            host
        };
        let policy = if is_round_robin { PlacementPolicy::RoundRobin } else { PlacementPolicy::Load };
        let mut snapshot = Snapshot::new(NOW, policy, hosts.into_iter().enumerate().map(view).collect());
        let place_texts = ["", "?free >= 1", "?free >= 1; spread", "?free >= 2", "?free >= 1; same-host", "?free >= 1; rank = free"];
        let request = SpawnRequest { where_arg: place_texts[place_index].into(), ..request(count) };
        let placement_request = PlacementRequest::new(2, &request, count, host_id(1));
        let count_tasks_of = |user| snapshot.hosts.iter().flat_map(|host| &host.tasks).filter(|task| task.user == user).count() as u32;
        let mut fair_share = heavy_user_shares(count_tasks_of(1));
        fair_share.add_processors(Micros(0), 3, count_tasks_of(3));
        fair_share.restore_index(NOW, 3, 90.0, Micros(0));
        let selection = select_victims(&snapshot, &fair_share, &placement_request);
        let count_slots = |snapshot: &Snapshot| place(snapshot, &placement_request).hosts.iter().filter(|host| host.is_ok()).count();
        let mut empty_snapshot = snapshot.clone();
        empty_snapshot.hosts.iter_mut().for_each(|host| host.tasks.clear());
        empty_snapshot.hosts.refresh(NOW);
        let slots_max = count_slots(&empty_snapshot);
        for (n, selection) in selection.iter().enumerate() {
            prop_assert!(count_slots(&snapshot) < slots_max, "{n} are enough");
            let host = selection.tid.birth_host().expect("a host");
            let host = snapshot.hosts.edit(host).expect("a host");
            host.tasks.iter_mut().find(|task| task.tid == selection.tid).expect("it is there").suspended = true;
            snapshot.hosts.refresh(NOW);
        }
        prop_assert_eq!(count_slots(&snapshot), slots_max);
    }
}
