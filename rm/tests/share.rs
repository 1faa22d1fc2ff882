//! Who gives way to whom, and who goes on where: decisions from fixed snapshots.

mod idle;

use idle::{NOW, h, idle};
use proptest::prelude::*;
use pvm_rm::decide::{Again, Ask, Fair, Owner, Policy, Snapshot, TaskView, UpDown, give_way, go_on, place};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

fn t(host: u16, local: u32) -> Tid {
    Tid::task(h(host), local).expect("a task")
}

/// So many hosts with one processor, on each a task of user 1.
fn busy(hosts: u16) -> Snapshot {
    let host = |index| {
        let mut host = idle(index, 1, 0);
        let since = Micros(NOW.0 - u64::from(100 - index));
        host.tasks = vec![TaskView { user: 1, ..TaskView::new(t(index, 1), since) }];
        host
    };
    Snapshot::new(NOW, Policy::Load, (1..=hosts).map(host).collect())
}

/// User 1 has held so many processors for a hundred hours.
fn shares(count: u32) -> Fair {
    let mut fair = Fair::new(UpDown::default());
    fair.takes(Micros(0), 1, count);
    fair.recall(NOW, 1, 100.0, Micros(0));
    fair
}

fn request(count: u32) -> SpawnRequest {
    SpawnRequest { file: "worker".into(), place: "?free >= 1; spread".into(), count, ..SpawnRequest::default() }
}

fn tids(snapshot: &Snapshot, fair: &Fair, request: &SpawnRequest) -> Vec<Tid> {
    let ask = Ask { user: 2, request, count: request.count, caller: h(1), peers: &[], without: &[] };
    give_way(snapshot, fair, &ask).into_iter().map(|gives| gives.tid).collect()
}

#[test]
fn those_that_began_last_give_way_and_as_many_as_the_request_needs() {
    let (snapshot, fair) = (busy(4), shares(4));
    assert_eq!(tids(&snapshot, &fair, &request(2)), [t(4, 1), t(3, 1)]);
    let mut after = snapshot.clone();
    for host in [3, 4] {
        after.hosts.edit(h(host)).expect("a host").tasks[0].suspended = true;
    }
    after.hosts.refresh(NOW);
    let request = request(2);
    let ask = Ask { user: 2, request: &request, count: 2, caller: h(1), peers: &[], without: &[] };
    let mut hosts: Vec<HostId> = place(&after, &ask).hosts.into_iter().flatten().collect();
    hosts.sort_unstable();
    assert_eq!(hosts, [h(3), h(4)], "which gets its places then");
}

#[test]
fn nobody_stands_still_in_vain() {
    let (mut snapshot, fair) = (busy(2), shares(2));
    assert_eq!(tids(&snapshot, &fair, &request(3)), [], "three do not fit on two hosts");
    let far = SpawnRequest { place: "?free >= 1; memory >= 900G".into(), ..request(1) };
    assert_eq!(tids(&snapshot, &fair, &far), [], "no host has so much memory");
    assert_eq!(tids(&snapshot, &shares(0), &request(1)), [], "the user holds nothing");
    for host in [1, 2] {
        let host = snapshot.hosts.edit(h(host)).expect("a host");
        host.owner = Owner::Present { why: "alice on pts/0".into() };
    }
    snapshot.hosts.refresh(NOW);
    assert_eq!(tids(&snapshot, &fair, &request(1)), [], "tasks beside an owner make no room");
}

#[test]
fn a_task_goes_on_where_it_is_when_there_is_room_else_where_there_is() {
    let mut snapshot = busy(2);
    let long_ago = Micros(NOW.0 - 60_000_000);
    snapshot.hosts.edit(h(1)).expect("a host").tasks[0].suspended = true;
    snapshot.hosts.refresh(NOW);
    let gave_way = BTreeMap::from([(t(1, 1), long_ago)]);
    let none = BTreeSet::new();
    assert_eq!(go_on(&snapshot, &gave_way, &none), [(t(1, 1), h(1), Again::Here)]);
    assert_eq!(go_on(&snapshot, &gave_way, &BTreeSet::from([h(1)])), [], "something is being started there");
    let soon = BTreeMap::from([(t(1, 1), Micros(NOW.0 - 1_000_000))]);
    assert_eq!(go_on(&snapshot, &soon, &none), [], "what it made room for has not begun");
    let newcomer = TaskView { user: 2, ..TaskView::new(t(1, 2), NOW) };
    snapshot.hosts.edit(h(1)).expect("a host").tasks.push(newcomer);
    snapshot.hosts.refresh(NOW);
    assert_eq!(go_on(&snapshot, &gave_way, &none), [], "both hosts are busy");
    snapshot.hosts.edit(h(2)).expect("a host").tasks.clear();
    snapshot.hosts.refresh(NOW);
    assert_eq!(go_on(&snapshot, &gave_way, &none), [(t(1, 1), h(1), Again::At(h(2)))]);
    let second = TaskView { user: 1, suspended: true, ..TaskView::new(t(1, 3), NOW) };
    snapshot.hosts.edit(h(1)).expect("a host").tasks.push(second);
    snapshot.hosts.refresh(NOW);
    let both = BTreeMap::from([(t(1, 1), long_ago), (t(1, 3), Micros(long_ago.0 - 1))]);
    assert_eq!(go_on(&snapshot, &both, &none), [(t(1, 3), h(1), Again::At(h(2)))], "who has stood longest goes first");
}

proptest! {
    /// When those who are told to give way stand still, the request gets all its places; and nobody is told so for nothing.
    #[test]
    fn who_gives_way_makes_all_the_room_that_is_needed(
        hosts in prop::collection::vec((1_u32..4, 0_u32..4, any::<bool>()), 1..80), count in 1_u32..6, which in 0_usize..6,
        in_turn in any::<bool>(),
    ) {
        let view = |(i, (cores, tasks, idle_owner)): (usize, (u32, u32, bool))| {
            let index = i as u16 + 1;
            let mut host = idle(index, cores, 0);
            let task = |n| TaskView { user: 1, ..TaskView::new(t(index, n), Micros(NOW.0 - u64::from(n))) };
            host.tasks = (1..=tasks).map(task).collect();
            if idle_owner {
                host.owner = Owner::Maybe { why: "alice is idle".into(), idle: true };
            }
            host
        };
        let policy = if in_turn { Policy::RoundRobin } else { Policy::Load };
        let mut snapshot = Snapshot::new(NOW, policy, hosts.into_iter().enumerate().map(view).collect());
        let wants = ["", "?free >= 1", "?free >= 1; spread", "?free >= 2", "?free >= 1; same-host", "?free >= 1; rank = free"];
        let request = SpawnRequest { place: wants[which].into(), ..request(count) };
        let ask = Ask { user: 2, request: &request, count, caller: h(1), peers: &[], without: &[] };
        let held = snapshot.hosts.iter().map(|host| host.tasks.len() as u32).sum();
        let gives = give_way(&snapshot, &shares(held), &ask);
        let all_placed = |snapshot: &Snapshot| place(snapshot, &ask).hosts.iter().all(Result::is_ok);
        prop_assert!(gives.is_empty() || !all_placed(&snapshot));
        for (n, gives) in gives.iter().enumerate() {
            prop_assert!(!all_placed(&snapshot), "{n} are enough");
            let host = gives.tid.home().expect("a host");
            let host = snapshot.hosts.edit(host).expect("a host");
            host.tasks.iter_mut().find(|task| task.tid == gives.tid).expect("it is there").suspended = true;
            snapshot.hosts.refresh(NOW);
        }
        prop_assert!(gives.is_empty() || all_placed(&snapshot));
    }
}
