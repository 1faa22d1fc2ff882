//! Tests of the group service without daemons: membership, waiting tasks and answers.

use super::*;
use proptest::prelude::*;

const GROUP_NAME: &[u8] = b"g";

fn tid(n: i32) -> Tid {
    Tid::from_raw(0x40000 + n)
}

/// The group service and the number of the last request.
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
        self.groups.handle_request(tid(task), id, request);
        id
    }

    /// Returns all answers since the last call: the task, and the number or PVM error code.
    fn answers(&mut self) -> Vec<(i32, i32)> {
        let code_of = |result: Result<GroupReply, GroupError>| match result {
            Ok(GroupReply::Number(number)) => number,
            Ok(other) => panic!("{other:?}"),
            Err((error, _)) => error.code(),
        };
        let mut answers = Vec::new();
        while let Some(answer) = self.groups.next_reply() {
            answers.push((answer.tid.raw() - 0x40000, code_of(answer.result)));
        }
        answers
    }

    /// Sends a request and returns its answer. Panics unless there is exactly one answer.
    fn ask(&mut self, task: i32, request: GroupRequest) -> i32 {
        self.send(task, request);
        match self.answers()[..] {
            [(to, code)] if to == task => code,
            ref answers => panic!("{answers:?}"),
        }
    }

    fn join(&mut self, task: i32) -> i32 {
        self.ask(
            task,
            GroupRequest::Join {
                group: GROUP_NAME.to_vec(),
            },
        )
    }

    fn leave(&mut self, task: i32) -> i32 {
        self.ask(
            task,
            GroupRequest::Leave {
                group: GROUP_NAME.to_vec(),
            },
        )
    }

    fn size(&mut self) -> i32 {
        self.ask(
            99,
            GroupRequest::Size {
                group: GROUP_NAME.to_vec(),
            },
        )
    }

    fn instance(&mut self, raw_tid: i32) -> i32 {
        self.ask(
            99,
            GroupRequest::Instance {
                group: GROUP_NAME.to_vec(),
                tid: Tid::from_raw(raw_tid),
            },
        )
    }

    /// Enters the barrier and returns the resulting answers. The answer for this task may come
    /// only later, when other tasks enter.
    fn barrier(&mut self, task: i32, count: i32) -> Vec<(i32, i32)> {
        self.send(
            task,
            GroupRequest::Barrier {
                group: GROUP_NAME.to_vec(),
                required_members: count,
            },
        );
        self.answers()
    }

    fn freeze(&mut self, task: i32, count: i32) -> Vec<(i32, i32)> {
        self.send(
            task,
            GroupRequest::Freeze {
                group: GROUP_NAME.to_vec(),
                required_members: count,
            },
        );
        self.answers()
    }

    fn end_task(&mut self, task: i32) -> Vec<(i32, i32)> {
        self.groups.remove_ended_task(tid(task));
        self.answers()
    }

    fn with_members(member_count: i32) -> Self {
        let mut client = Self::default();
        (0..member_count).for_each(|task| assert_eq!(client.join(task), task));
        client
    }
}

/// A new member gets the lowest free instance number. A group is removed with its last member.
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
                group: GROUP_NAME.to_vec(),
                tid: tid(8)
            }
        ),
        2
    );
    assert_eq!(
        s.ask(
            0,
            GroupRequest::Instance {
                group: GROUP_NAME.to_vec(),
                tid: tid(1)
            }
        ),
        -20
    );
    assert_eq!(
        s.ask(
            0,
            GroupRequest::Member {
                group: GROUP_NAME.to_vec(),
                instance: 4
            }
        ),
        tid(9).raw()
    );
    for unused_instance in [-1, 5, i32::MAX] {
        assert_eq!(
            s.ask(
                0,
                GroupRequest::Member {
                    group: GROUP_NAME.to_vec(),
                    instance: unused_instance
                }
            ),
            -21
        );
    }
    for task in [0, 3, 7, 8] {
        assert_eq!(s.leave(task), 0);
    }
    assert_eq!(s.end_task(9), []);
    assert_eq!((s.size(), s.leave(0)), (-19, -19));
    assert_eq!((s.groups.membership_count, s.groups.names_bytes), (0, 0));
    assert_eq!(s.ask(0, GroupRequest::Join { group: Vec::new() }), -17);
}

/// A barrier releases all its members at the same time and can be used again. A task that names
/// another number of members, or is no member, gets an error.
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

/// Waiting members get an error when a member ends and the remaining members are too few.
#[test]
fn barrier_fails_when_too_few_members_remain() {
    let mut s = GroupClient::with_members(3);
    s.barrier(0, 3);
    s.barrier(1, 3);
    assert_eq!(s.end_task(2), [(0, -19), (1, -19)]);
    // The remaining members can use the barrier with another count than the ended member.
    assert_eq!(s.join(6), 2);
    s.barrier(0, 2);
    assert_eq!(s.end_task(0), []);
    s.barrier(6, 3);
    assert_eq!(s.end_task(6), []);
    assert_eq!(s.join(4), 0);
    s.barrier(4, 2);
    assert_eq!(s.barrier(1, 2), [(1, 0), (4, 0)]);
}

/// A barrier completes when a member ends and the remaining members are enough.
#[test]
fn barrier_completes_with_remaining_members() {
    let mut s = GroupClient::with_members(4);
    s.barrier(0, 2);
    assert_eq!((s.end_task(2), s.end_task(0)), (vec![], vec![]));
    s.barrier(1, 2);
    assert_eq!(s.barrier(3, 2), [(1, 0), (3, 0)]);
}

/// A member that leaves a group can be replaced by a new member before the barrier completes.
#[test]
fn leaving_member_can_be_replaced() {
    let mut s = GroupClient::with_members(3);
    s.barrier(0, 3);
    s.barrier(1, 3);
    assert_eq!((s.leave(2), s.join(8)), (0, 2));
    assert_eq!(s.barrier(8, 3), [(0, 0), (1, 0), (8, 0)]);
}

/// A barrier for all members completes when the only member that has not entered leaves. It fails
/// when a member ends.
#[test]
fn barrier_for_all_ignores_leaving_members() {
    let mut s = GroupClient::with_members(3);
    s.barrier(0, ALL_MEMBERS);
    // A member that joins later does not change the expected count; −1 then means another count.
    assert_eq!(s.join(5), 3);
    assert_eq!(s.barrier(1, ALL_MEMBERS), [(1, -3)]);
    assert_eq!(s.leave(5), 0);
    s.barrier(1, ALL_MEMBERS);
    s.send(
        2,
        GroupRequest::Leave {
            group: GROUP_NAME.to_vec(),
        },
    );
    assert_eq!(s.answers(), [(0, 0), (1, 0), (2, 0)]);
    s.barrier(0, ALL_MEMBERS);
    assert_eq!(s.end_task(1), [(0, -19)]);
}

/// A freeze for −1 waits for the present members, and a frozen group is not frozen again. A lookup
/// of −1 returns the instance number that the next member gets.
#[test]
fn minus_one_means_all_members_or_no_member() {
    let mut s = GroupClient::with_members(3);
    assert_eq!(s.instance(-1), 3);
    assert_eq!((s.leave(1), s.instance(-1), s.join(1)), (0, 1, 1));
    assert_eq!(s.freeze(0, ALL_MEMBERS), []);
    assert_eq!(s.freeze(1, 2), [(1, -3)]);
    assert_eq!(s.freeze(1, 3), []);
    assert_eq!(s.freeze(2, ALL_MEMBERS), [(0, 3), (1, 3), (2, 3)]);
    assert_eq!(s.freeze(0, ALL_MEMBERS), [(0, -18)]);
    assert_eq!(s.instance(-1), 3);
    let mut s = GroupClient::with_members(3);
    s.freeze(0, ALL_MEMBERS);
    s.freeze(1, ALL_MEMBERS);
    s.send(
        2,
        GroupRequest::Leave {
            group: GROUP_NAME.to_vec(),
        },
    );
    assert_eq!(s.answers(), [(0, 2), (1, 2), (2, 0)]);
}

/// A frozen group accepts no members and breaks when a member leaves or ends.
#[test]
fn frozen_group_breaks_when_member_leaves() {
    for member_exits in [false, true] {
        let mut s = GroupClient::with_members(3);
        assert_eq!((s.freeze(0, 3), s.freeze(1, 3)), (vec![], vec![]));
        assert_eq!(s.freeze(2, 3), [(0, 3), (1, 3), (2, 3)]);
        assert_eq!(
            (s.join(7), s.join(0), s.freeze(0, 3), s.size()),
            (-20, -20, vec![(0, -18)], 3)
        );
        s.barrier(0, 3);
        s.barrier(1, 3);
        let answers = if member_exits {
            s.end_task(2)
        } else {
            s.send(
                2,
                GroupRequest::Leave {
                    group: GROUP_NAME.to_vec(),
                },
            );
            s.answers()
        };
        assert_eq!(answers[..2], [(0, -19), (1, -19)]);
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

/// Exceeding a limit for group names is an error. When the only member of the groups has ended, new
/// names can be used.
#[test]
fn exceeded_limits_are_recoverable_errors() {
    let mut s = GroupClient::default();
    let long_name = vec![b'x'; TEXT_FIELD_BYTES_MAX + 1];
    assert_eq!(
        s.ask(
            1,
            GroupRequest::Join {
                group: long_name.clone()
            }
        ),
        PvmError::OutOfRes.code()
    );
    assert_eq!(
        s.ask(
            1,
            GroupRequest::Join {
                group: long_name[1..].to_vec()
            }
        ),
        0
    );
    let group_count_max = (NAMES_BYTES_MAX / TEXT_FIELD_BYTES_MAX) as i32;
    for n in 1..group_count_max {
        let mut group = vec![b'y'; TEXT_FIELD_BYTES_MAX];
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

fn action_strategy() -> impl Strategy<Value = Action> {
    let task = 0..6i32;
    prop_oneof![
        4 => task.clone().prop_map(Action::Join),
        1 => task.clone().prop_map(Action::Leave),
        1 => task.clone().prop_map(Action::LeaveAll),
        1 => task.clone().prop_map(Action::End),
        6 => (task.clone(), prop_oneof![Just(ALL_MEMBERS), 1..5i32]).prop_map(|(task, count)| Action::Barrier(task, count)),
        1 => (task, 2..4i32).prop_map(|(task, count)| Action::Freeze(task, count)),
    ]
}

/// Asserts the invariants of the service between two requests.
fn assert_invariants(groups: &Groups) {
    let mut membership_count = 0;
    for (name, group) in &groups.groups {
        membership_count += group.instances.len();
        assert!(!group.instances.is_empty(), "an empty group does not exist");
        for (tid, instance) in &group.instances {
            assert_eq!(group.members[*instance], *tid);
            assert!(groups.groups_of_task[tid].contains(name));
        }
        let free_positions = group
            .members
            .iter()
            .enumerate()
            .filter(|(_, tid)| **tid == Tid::NONE)
            .map(|(i, _)| i);
        assert_eq!(
            free_positions.collect::<BTreeSet<_>>(),
            group.free_instances
        );
        assert_eq!(
            group.members.len(),
            group.instances.len() + group.free_instances.len()
        );
        for waiting_call in [&group.barrier, &group.freeze].into_iter().flatten() {
            assert!(
                !waiting_call.waiting_requests.is_empty(),
                "a meeting of nobody is none"
            );
            assert!(
                waiting_call.waiting_requests.len() < waiting_call.required_count,
                "who is complete does not wait"
            );
            assert!(
                waiting_call
                    .waiting_requests
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
        membership_count
    );
    assert_eq!(groups.membership_count, membership_count);
}

proptest! {
    /// Every request of a living task gets exactly one answer, unless the task still waits.
    #[test]
    fn every_request_gets_exactly_one_answer(actions in proptest::collection::vec(action_strategy(), 1..80)) {
        let mut s = GroupClient::default();
        let mut open_requests: BTreeMap<RequestId, Tid> = BTreeMap::new();
        let group = || GROUP_NAME.to_vec();
        for chosen_action in actions {
            let (task, request) = match chosen_action {
                Action::Join(task) => (task, GroupRequest::Join { group: group() }),
                Action::Leave(task) => (task, GroupRequest::Leave { group: group() }),
                Action::LeaveAll(task) => (task, GroupRequest::LeaveAll),
                Action::Barrier(task, count) => (task, GroupRequest::Barrier { group: group(), required_members: count }),
                Action::Freeze(task, count) => (task, GroupRequest::Freeze { group: group(), required_members: count }),
                Action::End(task) => {
                    s.groups.remove_ended_task(tid(task));
                    open_requests.retain(|_, waiting_task| *waiting_task != tid(task));
                    (99, GroupRequest::List)
                }
            };
            // A waiting task sends no other request, but it may end.
            if open_requests.values().any(|waiting_task| *waiting_task == tid(task)) {
                continue;
            }
            let id = s.send(task, request);
            open_requests.insert(id, tid(task));
            while let Some(answer) = s.groups.next_reply() {
                prop_assert_eq!(open_requests.remove(&answer.id), Some(answer.tid), "{:?}", answer);
            }
            assert_invariants(&s.groups);
        }
        let waiting_tasks = s.groups.groups.values().flat_map(|g| [&g.barrier, &g.freeze]).flatten();
        let waiting_tasks: BTreeMap<RequestId, Tid> = waiting_tasks.flat_map(|m| &m.waiting_requests).map(|(tid, id)| (*id, *tid)).collect();
        prop_assert_eq!(open_requests, waiting_tasks, "exactly those that wait have no answer");
    }
}
