//! Tests of the group service alone: membership, waiting tasks and answers.

use super::*;
use proptest::prelude::*;

const NAME: &[u8] = b"g";

fn tid(n: i32) -> Tid {
    Tid::from_raw(0x40000 + n)
}

/// The service with a counter for request numbers.
#[derive(Default)]
struct GroupClient {
    groups: Groups,
    last_request: u64,
}

impl GroupClient {
    /// Sends a request. Returns its number.
    fn send(&mut self, task: i32, request: GroupRequest) -> RequestId {
        self.last_request += 1;
        let id = RequestId(self.last_request);
        self.groups.handle(tid(task), id, request);
        id
    }

    /// Returns all answers so far: the task, and the number or PVM error code.
    fn answers(&mut self) -> Vec<(i32, i32)> {
        let code = |result: Result<GroupReply, GroupError>| match result {
            Ok(GroupReply::Number(number)) => number,
            Ok(other) => panic!("{other:?}"),
            Err((error, _)) => error.code(),
        };
        let mut all = Vec::new();
        while let Some(answer) = self.groups.poll() {
            all.push((answer.tid.raw() - 0x40000, code(answer.result)));
        }
        all
    }

    /// Sends a request. Returns its only answer.
    fn ask(&mut self, task: i32, request: GroupRequest) -> i32 {
        self.send(task, request);
        match self.answers()[..] {
            [(to, code)] if to == task => code,
            ref others => panic!("{others:?}"),
        }
    }

    fn join(&mut self, task: i32) -> i32 {
        self.ask(
            task,
            GroupRequest::Join {
                group: NAME.to_vec(),
            },
        )
    }

    fn leave(&mut self, task: i32) -> i32 {
        self.ask(
            task,
            GroupRequest::Leave {
                group: NAME.to_vec(),
            },
        )
    }

    fn size(&mut self) -> i32 {
        self.ask(
            99,
            GroupRequest::Size {
                group: NAME.to_vec(),
            },
        )
    }

    /// Enters the barrier. Returns the resulting answers.
    fn barrier(&mut self, task: i32, count: i32) -> Vec<(i32, i32)> {
        self.send(
            task,
            GroupRequest::Barrier {
                group: NAME.to_vec(),
                count,
            },
        );
        self.answers()
    }

    fn freeze(&mut self, task: i32, count: i32) -> Vec<(i32, i32)> {
        self.send(
            task,
            GroupRequest::Freeze {
                group: NAME.to_vec(),
                count,
            },
        );
        self.answers()
    }

    fn end_task(&mut self, task: i32) -> Vec<(i32, i32)> {
        self.groups.remove_ended_task(tid(task));
        self.answers()
    }

    fn with_members(members: i32) -> GroupClient {
        let mut service = GroupClient::default();
        (0..members).for_each(|who| assert_eq!(service.join(who), who));
        service
    }
}

/// Instances are the lowest free numbers, and a group exists while it has members.
#[test]
fn instances_reuse_lowest_free_numbers() {
    let mut s = GroupClient::with_members(4);
    assert_eq!(s.join(2), -18);
    assert_eq!((s.leave(1), s.leave(2), s.leave(2)), (0, 0, -20));
    assert_eq!((s.join(7), s.join(8), s.join(9), s.size()), (1, 2, 4, 5));
    assert_eq!(
        s.ask(
            0,
            GroupRequest::Instance {
                group: NAME.to_vec(),
                tid: tid(8)
            }
        ),
        2
    );
    assert_eq!(
        s.ask(
            0,
            GroupRequest::Instance {
                group: NAME.to_vec(),
                tid: tid(1)
            }
        ),
        -20
    );
    assert_eq!(
        s.ask(
            0,
            GroupRequest::Member {
                group: NAME.to_vec(),
                instance: 4
            }
        ),
        tid(9).raw()
    );
    for none in [-1, 5, i32::MAX] {
        assert_eq!(
            s.ask(
                0,
                GroupRequest::Member {
                    group: NAME.to_vec(),
                    instance: none
                }
            ),
            -21
        );
    }
    for who in [0, 3, 7, 8] {
        assert_eq!(s.leave(who), 0);
    }
    assert_eq!(s.end_task(9), []);
    assert_eq!((s.size(), s.leave(0)), (-19, -19));
    assert_eq!((s.groups.memberships, s.groups.names_bytes), (0, 0));
    assert_eq!(s.ask(0, GroupRequest::Join { group: Vec::new() }), -17);
}

/// A barrier releases its members together and can be used again.
#[test]
fn barrier_releases_members_together() {
    let mut s = GroupClient::with_members(3);
    for _ in 0..2 {
        assert_eq!(
            (s.barrier(0, 3), s.barrier(1, 2), s.barrier(5, 3)),
            (vec![], vec![(1, -3)], vec![(5, -20)])
        );
        assert_eq!((s.barrier(0, 3), s.barrier(1, 3)), (vec![(0, -30)], vec![]));
        assert_eq!(s.barrier(2, 3), [(0, 0), (1, 0), (2, 0)]);
    }
    assert_eq!(
        (s.barrier(0, 0), s.barrier(0, -2)),
        (vec![(0, -3)], vec![(0, -3)])
    );
    assert_eq!(s.barrier(0, 1), [(0, 0)]);
}

/// Waiting members get an error when a member ends and too few are left.
#[test]
fn barrier_fails_when_too_few_members_remain() {
    let mut s = GroupClient::with_members(3);
    s.barrier(0, 3);
    s.barrier(1, 3);
    assert_eq!(s.end_task(2), [(0, -19), (1, -19)]);
    // The remaining members can use the barrier, whatever count an ended member wanted.
    assert_eq!(s.join(6), 2);
    s.barrier(0, 2);
    assert_eq!(s.end_task(0), []);
    s.barrier(6, 3);
    assert_eq!(s.end_task(6), []);
    assert_eq!(s.join(4), 0);
    s.barrier(4, 2);
    assert_eq!(s.barrier(1, 2), [(1, 0), (4, 0)]);
}

/// A barrier completes when enough members are left.
#[test]
fn barrier_completes_with_remaining_members() {
    let mut s = GroupClient::with_members(4);
    s.barrier(0, 2);
    assert_eq!((s.end_task(2), s.end_task(0)), (vec![], vec![]));
    s.barrier(1, 2);
    assert_eq!(s.barrier(3, 2), [(1, 0), (3, 0)]);
}

/// A member that leaves a group can be replaced before the barrier completes.
#[test]
fn leaving_member_can_be_replaced() {
    let mut s = GroupClient::with_members(3);
    s.barrier(0, 3);
    s.barrier(1, 3);
    assert_eq!((s.leave(2), s.join(8)), (0, 2));
    assert_eq!(s.barrier(8, 3), [(0, 0), (1, 0), (8, 0)]);
}

/// A barrier for all members does not wait for a member that leaves.
#[test]
fn barrier_for_all_ignores_leaving_members() {
    let mut s = GroupClient::with_members(3);
    s.barrier(0, ALL_MEMBERS);
    // A later member changes nothing, whether it stays or leaves.
    assert_eq!((s.join(5), s.leave(5)), (3, 0));
    s.barrier(1, ALL_MEMBERS);
    s.send(
        2,
        GroupRequest::Leave {
            group: NAME.to_vec(),
        },
    );
    assert_eq!(s.answers(), [(0, 0), (1, 0), (2, 0)]);
    s.barrier(0, ALL_MEMBERS);
    assert_eq!(s.end_task(1), [(0, -19)]);
}

/// A frozen group accepts no members and breaks when a member leaves or ends.
#[test]
fn frozen_group_breaks_when_member_leaves() {
    for ends in [false, true] {
        let mut s = GroupClient::with_members(3);
        assert_eq!((s.freeze(0, 3), s.freeze(1, 3)), (vec![], vec![]));
        assert_eq!(s.freeze(2, 3), [(0, 3), (1, 3), (2, 3)]);
        assert_eq!(
            (s.join(7), s.join(0), s.freeze(0, 3), s.size()),
            (-20, -20, vec![(0, -18)], 3)
        );
        s.barrier(0, 3);
        s.barrier(1, 3);
        let told = if ends {
            s.end_task(2)
        } else {
            s.send(
                2,
                GroupRequest::Leave {
                    group: NAME.to_vec(),
                },
            );
            s.answers()
        };
        assert_eq!(told[..2], [(0, -19), (1, -19)]);
        assert_eq!(
            (s.barrier(0, 2), s.size(), s.join(2)),
            (vec![(0, -19)], 3, -20)
        );
        assert_eq!(
            (s.leave(0), s.leave(1), s.size(), s.join(7)),
            (0, 0, -19, 0)
        );
    }
}

/// Exceeded limits are errors, and room is available again when members leave.
#[test]
fn exceeded_limits_are_recoverable_errors() {
    let mut s = GroupClient::default();
    let long = vec![b'x'; NAME_BYTES_MAX + 1];
    assert_eq!(
        s.ask(
            1,
            GroupRequest::Join {
                group: long.clone()
            }
        ),
        PvmError::OutOfRes.code()
    );
    assert_eq!(
        s.ask(
            1,
            GroupRequest::Join {
                group: long[1..].to_vec()
            }
        ),
        0
    );
    let many = (NAMES_BYTES_MAX / NAME_BYTES_MAX) as i32;
    for n in 1..many {
        let mut group = vec![b'y'; NAME_BYTES_MAX];
        group[..4].copy_from_slice(&n.to_be_bytes());
        assert_eq!(s.ask(1, GroupRequest::Join { group }), 0);
    }
    assert_eq!(s.join(1), PvmError::OutOfRes.code());
    assert_eq!(s.end_task(1), []);
    assert_eq!(s.join(1), 0);
}

#[derive(Clone, Debug)]
enum Action {
    Join(i32),
    Leave(i32),
    LeaveAll(i32),
    End(i32),
    Barrier(i32, i32),
    Freeze(i32, i32),
}

fn action() -> impl Strategy<Value = Action> {
    let who = 0..6i32;
    prop_oneof![
        4 => who.clone().prop_map(Action::Join),
        1 => who.clone().prop_map(Action::Leave),
        1 => who.clone().prop_map(Action::LeaveAll),
        1 => who.clone().prop_map(Action::End),
        6 => (who.clone(), prop_oneof![Just(ALL_MEMBERS), 1..5i32]).prop_map(|(who, count)| Action::Barrier(who, count)),
        1 => (who, 2..4i32).prop_map(|(who, count)| Action::Freeze(who, count)),
    ]
}

/// Asserts the invariants that must hold between any two requests.
fn assert_invariants(groups: &Groups) {
    let mut memberships = 0;
    for (name, group) in &groups.groups {
        memberships += group.instances.len();
        assert!(!group.instances.is_empty(), "an empty group does not exist");
        for (tid, instance) in &group.instances {
            assert_eq!(group.members[*instance], *tid);
            assert!(groups.groups_of_task[tid].contains(name));
        }
        let holes = group
            .members
            .iter()
            .enumerate()
            .filter(|(_, tid)| **tid == Tid::NONE)
            .map(|(i, _)| i);
        assert_eq!(holes.collect::<BTreeSet<_>>(), group.free_instances);
        assert_eq!(
            group.members.len(),
            group.instances.len() + group.free_instances.len()
        );
        for meeting in [&group.barrier, &group.freeze].into_iter().flatten() {
            assert!(!meeting.waiting.is_empty(), "a meeting of nobody is none");
            assert!(
                meeting.waiting.len() < meeting.required,
                "who is complete does not wait"
            );
            assert!(
                meeting
                    .waiting
                    .keys()
                    .all(|tid| group.instances.contains_key(tid)),
                "only members wait"
            );
            assert_ne!(
                group.state,
                GroupState::Broken,
                "nobody waits in a broken group"
            );
        }
    }
    assert_eq!(
        groups
            .groups_of_task
            .values()
            .map(BTreeSet::len)
            .sum::<usize>(),
        memberships
    );
    assert_eq!(groups.memberships, memberships);
}

proptest! {
    /// Every request of a living task gets exactly one answer, unless the task still waits.
    #[test]
    fn every_request_gets_exactly_one_answer(acts in proptest::collection::vec(action(), 1..80)) {
        let mut s = GroupClient::default();
        let mut open: BTreeMap<RequestId, Tid> = BTreeMap::new();
        let group = || NAME.to_vec();
        for act in acts {
            let (who, request) = match act {
                Action::Join(who) => (who, GroupRequest::Join { group: group() }),
                Action::Leave(who) => (who, GroupRequest::Leave { group: group() }),
                Action::LeaveAll(who) => (who, GroupRequest::LeaveAll),
                Action::Barrier(who, count) => (who, GroupRequest::Barrier { group: group(), count }),
                Action::Freeze(who, count) => (who, GroupRequest::Freeze { group: group(), count }),
                Action::End(who) => {
                    s.groups.remove_ended_task(tid(who));
                    open.retain(|_, asker| *asker != tid(who));
                    (99, GroupRequest::List)
                }
            };
            // A task that waits sends no other request, but it may end.
            if open.values().any(|asker| *asker == tid(who)) {
                continue;
            }
            let id = s.send(who, request);
            open.insert(id, tid(who));
            while let Some(answer) = s.groups.poll() {
                prop_assert_eq!(open.remove(&answer.id), Some(answer.tid), "{:?}", answer);
            }
            assert_invariants(&s.groups);
        }
        let waiting = s.groups.groups.values().flat_map(|g| [&g.barrier, &g.freeze]).flatten();
        let waiting: BTreeMap<RequestId, Tid> = waiting.flat_map(|m| &m.waiting).map(|(tid, id)| (*id, *tid)).collect();
        prop_assert_eq!(open, waiting, "exactly those that wait have no answer");
    }
}
