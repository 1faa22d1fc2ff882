//! Preemption, and the resume of preempted tasks: decisions about fixed snapshots.

mod idle;

use idle::{NOW, host_id, idle_host};
use proptest::prelude::*;
use pvm_rm::decide::{
    FairShare, HostView, OwnerState, PlacementPolicy, PlacementRequest, ResumeAt, Snapshot,
    TaskView, UpDownRates, place, select_resumable, select_victims,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn task_id(host: u16, local: u32) -> Tid {
    Tid::task(host_id(host), local).expect("a task")
}

/// Returns hosts with one processor each. A task of user 1 runs on each.
fn busy_hosts(hosts: u16) -> Snapshot {
    let host = |index| {
        let mut host = idle_host(index, 1, 0);
        let since = Micros(NOW.0 - u64::from(100 - index));
        host.tasks = vec![TaskView {
            user: 1,
            ..TaskView::new(task_id(index, 1), since)
        }];
        host
    };
    Snapshot::new(NOW, PlacementPolicy::Load, (1..=hosts).map(host).collect())
}

/// Returns the Up-Down state in which user 1 holds `count` processors and has an index of
/// 100.
fn heavy_user_shares(count: u32) -> FairShare {
    let mut fair = FairShare::new(UpDownRates::default());
    fair.acquire(Micros(0), 1, count);
    fair.restore_index(NOW, 1, 100.0, Micros(0));
    fair
}

fn request(count: u32) -> SpawnRequest {
    SpawnRequest {
        file: "worker".into(),
        place: "?free >= 1; spread".into(),
        count,
        ..SpawnRequest::default()
    }
}

fn victims(snapshot: &Snapshot, fair: &FairShare, request: &SpawnRequest) -> Vec<Tid> {
    let ask = PlacementRequest::new(2, request, request.count, host_id(1));
    select_victims(snapshot, fair, &ask)
        .into_iter()
        .map(|gives| gives.tid)
        .collect()
}

/// The most recently started tasks are preempted, as many as the request needs.
#[test]
fn newest_tasks_are_preempted_first() {
    let (snapshot, fair) = (busy_hosts(4), heavy_user_shares(4));
    assert_eq!(
        victims(&snapshot, &fair, &request(2)),
        [task_id(4, 1), task_id(3, 1)]
    );
    let mut after = snapshot.clone();
    for host in [3, 4] {
        after.hosts.edit(host_id(host)).expect("a host").tasks[0].suspended = true;
    }
    after.hosts.refresh(NOW);
    let request = request(2);
    let ask = PlacementRequest::new(2, &request, 2, host_id(1));
    let mut hosts: Vec<HostId> = place(&after, &ask).hosts.into_iter().flatten().collect();
    hosts.sort_unstable();
    assert_eq!(
        hosts,
        [host_id(3), host_id(4)],
        "which gets its places then"
    );
}

/// A request gets slots only from users with a much higher index. A user with a similar index is
/// not preempted.
#[test]
fn light_users_tasks_are_not_preempted() {
    let (mut snapshot, fair) = (busy_hosts(3), heavy_user_shares(3));
    snapshot.hosts.edit(host_id(2)).expect("a host").tasks[0].user = 3;
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victims(&snapshot, &fair, &request(3)),
        [task_id(3, 1), task_id(1, 1)],
        "the third has taken as little"
    );
}

/// Tasks that share a host are preempted as a group, and only if tasks that are alone on a host do
/// not suffice.
#[test]
fn tasks_sharing_a_host_are_preempted_last() {
    let (mut snapshot, fair) = (busy_hosts(3), heavy_user_shares(4));
    let second = TaskView {
        user: 1,
        ..TaskView::new(task_id(3, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(3))
        .expect("a host")
        .tasks
        .push(second);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victims(&snapshot, &fair, &request(2)),
        [task_id(2, 1), task_id(1, 1)]
    );
    assert_eq!(
        victims(&snapshot, &fair, &request(3)),
        [task_id(2, 1), task_id(1, 1), task_id(3, 2), task_id(3, 1)]
    );
}

/// A host shared by tasks of several users with a high index is freed by preempting all of them,
/// and only if the request needs it.
#[test]
fn shared_host_is_freed_by_all_its_users() {
    let (mut snapshot, mut fair) = (busy_hosts(2), heavy_user_shares(2));
    fair.acquire(Micros(0), 3, 1);
    fair.restore_index(NOW, 3, 90.0, Micros(0));
    let theirs = TaskView {
        user: 3,
        ..TaskView::new(task_id(2, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(2))
        .expect("a host")
        .tasks
        .push(theirs);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        victims(&snapshot, &fair, &request(1)),
        [task_id(1, 1)],
        "nobody of them if there is another host"
    );
    assert_eq!(
        victims(&snapshot, &fair, &request(2)),
        [task_id(1, 1), task_id(2, 1), task_id(2, 2)]
    );
    let gives = |tid: Tid, of: u32| {
        let request = request(2);
        let ask = PlacementRequest::new(2, &request, 2, host_id(1));
        let gives = select_victims(&snapshot, &fair, &ask)
            .into_iter()
            .find(|gives| gives.tid == tid)
            .expect("it gives way");
        assert!(
            gives.why.ends_with(&format!("of user {of}")),
            "{}",
            gives.why
        );
    };
    gives(task_id(2, 1), 1);
    gives(task_id(2, 2), 3);
}

/// No task is preempted if the request would get no host by it.
#[test]
fn useless_preemption_is_avoided() {
    let (mut snapshot, fair) = (busy_hosts(2), heavy_user_shares(2));
    let far = SpawnRequest {
        place: "?free >= 1; memory >= 900G".into(),
        ..request(1)
    };
    assert_eq!(
        victims(&snapshot, &fair, &far),
        [],
        "no host has so much memory"
    );
    assert_eq!(
        victims(&snapshot, &heavy_user_shares(0), &request(1)),
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
        victims(&snapshot, &fair, &request(1)),
        [],
        "tasks beside an owner make no room"
    );
}

/// A preempted task resumes on its own host if there is room, otherwise on another host.
#[test]
fn preempted_task_resumes_where_there_is_room() {
    let mut snapshot = busy_hosts(2);
    let long_ago = Micros(NOW.0 - 60_000_000);
    snapshot.hosts.edit(host_id(1)).expect("a host").tasks[0].suspended = true;
    snapshot.hosts.refresh(NOW);
    let gave_way = BTreeMap::from([(task_id(1, 1), long_ago)]);
    let none = BTreeSet::new();
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
        [(task_id(1, 1), host_id(1), ResumeAt::CurrentHost)]
    );
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &BTreeSet::from([host_id(1)])),
        [],
        "something is being started there"
    );
    let soon = BTreeMap::from([(task_id(1, 1), Micros(NOW.0 - 1_000_000))]);
    assert_eq!(
        select_resumable(&snapshot, &soon, &none),
        [],
        "what it made room for has not begun"
    );
    let newcomer = TaskView {
        user: 2,
        ..TaskView::new(task_id(1, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(1))
        .expect("a host")
        .tasks
        .push(newcomer);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
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
        select_resumable(&snapshot, &gave_way, &none),
        [(task_id(1, 1), host_id(1), ResumeAt::OtherHost(host_id(2)))]
    );
    let second = TaskView {
        user: 1,
        suspended: true,
        ..TaskView::new(task_id(1, 3), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(1))
        .expect("a host")
        .tasks
        .push(second);
    snapshot.hosts.refresh(NOW);
    let both = BTreeMap::from([
        (task_id(1, 1), long_ago),
        (task_id(1, 3), Micros(long_ago.0 - 1)),
    ]);
    assert_eq!(
        select_resumable(&snapshot, &both, &none),
        [(task_id(1, 3), host_id(1), ResumeAt::OtherHost(host_id(2)))],
        "who has stood longest goes first"
    );
}

/// Adds external load of this number of processors to a host.
fn set_external_load(snapshot: &mut Snapshot, host: u16, busy: f32) {
    let host = snapshot.hosts.edit(host_id(host)).expect("a host");
    let sampled = host.sample.as_mut().expect("it is watched");
    let sample = &mut sampled.sample;
    sampled.own_tasks = host.tasks.iter().filter(|task| task.computes()).count() as u32;
    let demand = sampled.own_tasks as f32 + busy;
    sample.busy = (demand / sample.cores as f32).min(1.0);
    (sample.running, sample.load1) = (demand.round() as u32, demand);
    snapshot.hosts.refresh(snapshot.now);
}

fn suspend(snapshot: &mut Snapshot, tid: Tid) -> HostId {
    let on = |host: &&HostView| host.tasks.iter().any(|task| task.tid == tid);
    let id = snapshot.hosts.iter().find(on).expect("it is somewhere").id;
    let host = snapshot.hosts.edit(id).expect("a host");
    host.tasks
        .iter_mut()
        .find(|task| task.tid == tid)
        .expect("it is there")
        .suspended = true;
    snapshot.hosts.refresh(snapshot.now);
    id
}

/// External load does not prevent the resume of a preempted task.
#[test]
fn external_load_does_not_keep_tasks_paused() {
    let mut snapshot = busy_hosts(2);
    suspend(&mut snapshot, task_id(1, 1));
    let gave_way = BTreeMap::from([(task_id(1, 1), Micros(NOW.0 - 60_000_000))]);
    let none = BTreeSet::new();
    set_external_load(&mut snapshot, 1, 3.0);
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
        [(task_id(1, 1), host_id(1), ResumeAt::CurrentHost)],
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
        select_resumable(&snapshot, &gave_way, &none),
        [(task_id(1, 1), host_id(1), ResumeAt::OtherHost(host_id(2)))],
        "best of all where nobody is"
    );
    let newcomer = TaskView {
        user: 2,
        ..TaskView::new(task_id(1, 2), NOW)
    };
    snapshot
        .hosts
        .edit(host_id(1))
        .expect("a host")
        .tasks
        .push(newcomer);
    set_external_load(&mut snapshot, 2, 3.0);
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
        [(task_id(1, 1), host_id(1), ResumeAt::OtherHost(host_id(2)))],
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
        select_resumable(&snapshot, &gave_way, &none),
        [],
        "but not beside whom it made room for, or in the way of others"
    );
}

/// A preempted task resumes on a host with tasks that ran there before its preemption, but not on a
/// host with the tasks for which it was preempted.
#[test]
fn preempted_task_resumes_beside_old_neighbours() {
    let mut snapshot = busy_hosts(1);
    let (before, since) = (Micros(NOW.0 - 90_000_000), Micros(NOW.0 - 60_000_000));
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.tasks.push(TaskView {
        user: 1,
        ..TaskView::new(task_id(1, 2), NOW)
    });
    host.tasks.push(TaskView {
        user: 3,
        ..TaskView::new(task_id(1, 3), before)
    });
    suspend(&mut snapshot, task_id(1, 1));
    let gave_way = BTreeMap::from([(task_id(1, 1), since)]);
    let none = BTreeSet::new();
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
        [(task_id(1, 1), host_id(1), ResumeAt::CurrentHost)]
    );
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.tasks.push(TaskView {
        user: 2,
        ..TaskView::new(task_id(1, 4), since)
    });
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
        [],
        "this one has come instead"
    );
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.tasks.pop();
    Arc::make_mut(&mut host.guest_policy.limits).guests_max = Some(2);
    snapshot.hosts.refresh(NOW);
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &none),
        [],
        "two are there, and the owner allows no more"
    );
}

/// A fraction of a processor is sufficient for a task to resume.
#[test]
fn fraction_of_processor_suffices_to_resume() {
    let mut snapshot = busy_hosts(1);
    suspend(&mut snapshot, task_id(1, 1));
    let host = snapshot.hosts.edit(host_id(1)).expect("a host");
    host.sample
        .as_mut()
        .expect("it is watched")
        .sample
        .cpu_limit = 0.5;
    snapshot.hosts.refresh(NOW);
    let gave_way = BTreeMap::from([(task_id(1, 1), Micros(NOW.0 - 60_000_000))]);
    assert_eq!(
        select_resumable(&snapshot, &gave_way, &BTreeSet::new()),
        [(task_id(1, 1), host_id(1), ResumeAt::CurrentHost)]
    );
}

/// Resumes tasks until the decision selects no more. Asserts that `good` holds for the
/// host of each resumed task.
fn resume_all(
    snapshot: &mut Snapshot,
    gave_way: &mut BTreeMap<Tid, Micros>,
    good: impl Fn(&HostView) -> bool,
) -> Result<(), TestCaseError> {
    loop {
        let next = select_resumable(snapshot, gave_way, &BTreeSet::new());
        if next.is_empty() {
            return Ok(());
        }
        for (tid, from, again) in next {
            let host = snapshot.hosts.edit(from).expect("a host");
            let at = host
                .tasks
                .iter()
                .position(|task| task.tid == tid)
                .expect("it is there");
            let task = TaskView {
                suspended: false,
                ..host.tasks.remove(at)
            };
            let to = if let ResumeAt::OtherHost(to) = again {
                to
            } else {
                from
            };
            snapshot.hosts.edit(to).expect("a host").tasks.push(task);
            gave_way.remove(&tid);
            prop_assert!(
                good(snapshot.host(to).expect("a host")),
                "{tid} goes on at {to}"
            );
        }
        snapshot.hosts.refresh(snapshot.now);
    }
}

proptest! {
    /// With any external load, a preempted task does not slow down the tasks for which it was
    /// preempted, and is not preempted again after its resume while a request waits. It stays
    /// suspended only while those tasks run.
    #[test]
    fn preempted_tasks_resume_when_replacements_end(
        hosts in prop::collection::vec((1_u32..4, 0_u32..3, any::<bool>(), 0_u32..8, 0_u32..40), 1..20),
        count in 1_u32..4, second in 1_u32..6, free in any::<bool>(),
    ) {
        let view = |(i, (cores, more, limited, ..)): (usize, &(u32, u32, bool, u32, u32))| {
            let (index, tasks) = (i as u16 + 1, cores + more);
            let mut host = idle_host(index, *cores, 0);
            let task = |n| TaskView { user: 1, ..TaskView::new(task_id(index, n), Micros(NOW.0 - u64::from(n))) };
            host.tasks = (1..=tasks).map(task).collect();
            Arc::make_mut(&mut host.guest_policy.limits).guests_max = (*limited || !free).then_some(tasks);
            host
        };
        let mut snapshot = Snapshot::new(NOW, PlacementPolicy::Load, hosts.iter().enumerate().map(view).collect());
        for (i, (.., before, _)) in (1..).zip(&hosts) {
            set_external_load(&mut snapshot, i, *before as f32 / 10.0);
        }
        let place_of = if free { "?free >= 1" } else { "" };
        let ask_for = |count| SpawnRequest { place: place_of.into(), ..request(count) };
        let (first, second) = (ask_for(count), ask_for(second));
        let ask = |request| PlacementRequest::new(2, request, request.count, host_id(1));
        let held = |snapshot: &Snapshot| {
            let computing = |host: &HostView| host.tasks.iter().filter(|t| t.user == 1 && t.computes()).count();
            snapshot.hosts.iter().map(computing).sum::<usize>() as u32
        };
        let gives = select_victims(&snapshot, &heavy_user_shares(held(&snapshot)), &ask(&first));
        if gives.is_empty() {
            return Ok(());
        }
        let mut gave_way = BTreeMap::new();
        for gives in gives {
            suspend(&mut snapshot, gives.tid);
            gave_way.insert(gives.tid, NOW);
        }
        // The tasks of the request start, and then the external load changes.
        snapshot.now = NOW + Micros::from_secs(30);
        for i in (1..).take(hosts.len()) {
            snapshot.hosts.edit(host_id(i)).expect("a host").sample.as_mut().expect("it is watched").received_at = snapshot.now;
        }
        let places: Vec<HostId> = place(&snapshot, &ask(&first)).hosts.into_iter().flatten().collect();
        prop_assert!(!places.is_empty(), "they are paused in vain");
        for (n, host) in (1..).zip(places) {
            let host = snapshot.hosts.edit(host).expect("a host");
            host.tasks.push(TaskView { user: 2, ..TaskView::new(task_id(host.id.index(), 1000 + n), snapshot.now) });
        }
        for (i, (.., after)) in (1..).zip(&hosts) {
            set_external_load(&mut snapshot, i, *after as f32 / 10.0);
        }
        let waits = place(&snapshot, &ask(&second)).hosts.first().is_none_or(Result::is_err)
            && select_victims(&snapshot, &heavy_user_shares(held(&snapshot)), &ask(&second)).is_empty();
        resume_all(&mut snapshot, &mut gave_way, |host| {
            let own = host.tasks.iter().filter(|task| task.computes()).count();
            own <= host.cores.max(1) as usize || host.tasks.iter().all(|task| task.user == 1 || !task.computes())
        })?;
        if waits {
            let again = select_victims(&snapshot, &heavy_user_shares(held(&snapshot)), &ask(&second));
            prop_assert!(again.is_empty(), "{:?} went on for nothing", again);
        }
        snapshot.hosts.iter_mut().for_each(|host| host.tasks.retain(|task| task.user == 1));
        snapshot.hosts.refresh(snapshot.now);
        resume_all(&mut snapshot, &mut gave_way, |_| true)?;
        prop_assert!(gave_way.is_empty(), "{:?} are paused, and no task is in their way", gave_way);
    }

    /// If the selected tasks are suspended, the request gets as many slots as if no task of these
    /// users existed. No selected task could be omitted.
    #[test]
    fn victims_free_exactly_the_needed_slots(
        hosts in prop::collection::vec((1_u32..4, 0_u32..4, any::<bool>()), 1..80), count in 1_u32..6, which in 0_usize..6,
        in_turn in any::<bool>(), second in 0_u32..3,
    ) {
        let view = |(i, (cores, tasks, idle_owner)): (usize, (u32, u32, bool))| {
            let index = i as u16 + 1;
            let mut host = idle_host(index, cores, 0);
            // Each task belongs to one of the two users, or all belong to the same user.
            let user = |n| if (n + u32::from(index)) % 3 < second { 3 } else { 1 };
            let task = |n| TaskView { user: user(n), ..TaskView::new(task_id(index, n), Micros(NOW.0 - u64::from(n))) };
            host.tasks = (1..=tasks).map(task).collect();
            if idle_owner {
                host.owner = OwnerState::PossiblyPresent { why: "alice is idle".into(), idle_login: true };
            }
            host
        };
        let policy = if in_turn { PlacementPolicy::RoundRobin } else { PlacementPolicy::Load };
        let mut snapshot = Snapshot::new(NOW, policy, hosts.into_iter().enumerate().map(view).collect());
        let wants = ["", "?free >= 1", "?free >= 1; spread", "?free >= 2", "?free >= 1; same-host", "?free >= 1; rank = free"];
        let request = SpawnRequest { place: wants[which].into(), ..request(count) };
        let ask = PlacementRequest::new(2, &request, count, host_id(1));
        let held = |user| snapshot.hosts.iter().flat_map(|host| &host.tasks).filter(|task| task.user == user).count() as u32;
        let mut fair = heavy_user_shares(held(1));
        fair.acquire(Micros(0), 3, held(3));
        fair.restore_index(NOW, 3, 90.0, Micros(0));
        let gives = select_victims(&snapshot, &fair, &ask);
        let placed = |snapshot: &Snapshot| place(snapshot, &ask).hosts.iter().filter(|host| host.is_ok()).count();
        let mut empty = snapshot.clone();
        empty.hosts.iter_mut().for_each(|host| host.tasks.clear());
        empty.hosts.refresh(NOW);
        let most = placed(&empty);
        for (n, gives) in gives.iter().enumerate() {
            prop_assert!(placed(&snapshot) < most, "{n} are enough");
            let host = gives.tid.birth_host().expect("a host");
            let host = snapshot.hosts.edit(host).expect("a host");
            host.tasks.iter_mut().find(|task| task.tid == gives.tid).expect("it is there").suspended = true;
            snapshot.hosts.refresh(NOW);
        }
        prop_assert_eq!(placed(&snapshot), most);
    }
}
