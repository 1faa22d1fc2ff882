//! Simulates links of tasks that are restarted from checkpoints, in virtual time from one seed.
//!
//! Some tasks are members of a job; the others are outside tasks. At random times all members stop
//! and are copied, or all members die and restart from a copy with a later incarnation. Frames of
//! earlier incarnations arrive late, twice, or never.
//!
//! Every message has a unique number, and every task records which messages it has sent and
//! received. The copy of a member contains its records. Therefore the messages that a member
//! received from another member must always be a prefix of the messages that the other member
//! recorded as sent.

mod rng;

use bytes::Bytes;
use rng::Rng;
use sempa_proto::link::{
    FRAGMENT_BYTES_MAX, INLINE_BODY_BYTES_MAX, Link, LinkEvent, LinkFrame, LinkKind, LinkOutput,
    SmallFrame,
};
use sempa_proto::{Micros, RouteId, Tid};
use std::collections::BTreeMap;

const MEMBER_COUNT: usize = 3;
const ROUTE: RouteId = RouteId(1);

/// State of one task. A checkpoint contains a copy of this state for each member.
#[derive(Clone)]
struct Task {
    /// Incarnation for links that the task creates.
    incarnation: u16,
    links: BTreeMap<usize, Link>,
    sent_ids: BTreeMap<usize, Vec<u64>>,
    received_ids: BTreeMap<usize, Vec<u64>>,
}

impl Task {
    fn new(task_incarnation: u16) -> Self {
        Self {
            incarnation: task_incarnation,
            links: BTreeMap::new(),
            sent_ids: BTreeMap::new(),
            received_ids: BTreeMap::new(),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum RunState {
    Running,
    /// Stopped; resumes at the given time. `None` if no time is set yet.
    Stopped(Option<Micros>),
    Dead,
}

/// Messages between a member and an outside task since their last incarnation change.
#[derive(Clone, Default)]
struct OutsideTraffic {
    /// Messages sent since the start of the later of the two tasks; all of them must arrive.
    required_ids: Vec<u64>,
    /// Incarnation of the messages in `arrived_ids`.
    incarnation: u16,
    arrived_ids: Vec<u64>,
}

struct Simulation {
    seed: u64,
    rng: Rng,
    now: Micros,
    tasks: Vec<Task>,
    run_states: Vec<RunState>,
    frames_in_flight: BTreeMap<(Micros, u64), (usize, usize, LinkFrame)>,
    last_serial: u64,
    /// Latest incarnation of the job.
    latest_incarnation: u16,
    checkpoints: Vec<Vec<Task>>,
    /// Traffic between members and outside tasks, by (sender, receiver).
    outside_traffic: BTreeMap<(usize, usize), OutsideTraffic>,
    restart_count: u64,
    delivered_count: u64,
    /// Probability, per thousand, that a frame is lost or duplicated; also the probability that a
    /// frame is late.
    fault_permille: u64,
}

fn tid(task: usize) -> Tid {
    Tid::from_raw(0x40001 + task as i32)
}

fn message_body(id: u64, len: usize) -> Bytes {
    let filler = (0..len).map(|i| (id as usize).wrapping_mul(31).wrapping_add(i * 7) as u8);
    id.to_le_bytes()
        .into_iter()
        .chain(filler)
        .collect::<Vec<u8>>()
        .into()
}

impl Simulation {
    fn new(
        seed: u64,
        outside_task_count: usize,
        first_incarnation: u16,
        fault_permille: u64,
    ) -> Self {
        let incarnation_of = |task| {
            if task < MEMBER_COUNT {
                first_incarnation
            } else {
                0
            }
        };
        Self {
            seed,
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Micros(0),
            tasks: (0..MEMBER_COUNT + outside_task_count)
                .map(|task| Task::new(incarnation_of(task)))
                .collect(),
            run_states: vec![RunState::Running; MEMBER_COUNT + outside_task_count],
            frames_in_flight: BTreeMap::new(),
            last_serial: 0,
            latest_incarnation: first_incarnation,
            checkpoints: Vec::new(),
            outside_traffic: BTreeMap::new(),
            restart_count: 0,
            delivered_count: 0,
            fault_permille,
        }
    }

    fn is_member(task: usize) -> bool {
        task < MEMBER_COUNT
    }

    /// Returns task `task_index`'s end of its link to task `peer_index`. Creates the link on first
    /// use.
    fn get_or_create_link(&mut self, task_index: usize, peer_index: usize) -> &mut Link {
        let is_running = self.run_states[task_index] == RunState::Running;
        let task = &mut self.tasks[task_index];
        let incarnation = task.incarnation;
        task.links.entry(peer_index).or_insert_with(|| {
            let mut link = Link::new(tid(task_index), tid(peer_index));
            link.begin_incarnation(incarnation, true);
            if is_running {
                link.handle_event(Micros(0), LinkEvent::RouteUp(ROUTE));
            }
            link
        })
    }

    // ---- actions of tasks

    fn send(&mut self, sender: usize, receiver: usize, len: usize) {
        if sender == receiver || self.run_states[sender] == RunState::Dead {
            return;
        }
        self.last_serial += 1;
        let (id, now) = (self.last_serial, self.now);
        let is_peer_gone = self.get_or_create_link(sender, receiver).is_peer_gone();
        self.tasks[sender]
            .sent_ids
            .entry(receiver)
            .or_default()
            .push(id);
        if Self::is_member(sender) != Self::is_member(receiver) && !is_peer_gone {
            // While the sender does not know that the receiver has died, a message may or may not
            // arrive.
            if self.run_states[receiver] != RunState::Dead {
                self.outside_traffic
                    .entry((sender, receiver))
                    .or_default()
                    .required_ids
                    .push(id);
            }
        }
        let body = message_body(id, len);
        if body.len() <= INLINE_BODY_BYTES_MAX && self.rng.below(2) == 0 {
            let link = self.get_or_create_link(sender, receiver);
            if let Some(SmallFrame { seq, ack }) = link.try_send_small(now, &[], &body) {
                let frame = LinkFrame {
                    src: tid(sender),
                    dst: tid(receiver),
                    kind: LinkKind::Data { is_last: true },
                    seq,
                    ack,
                    incarnation: link.incarnation(),
                    payload: body,
                };
                return self.transmit(sender, receiver, frame);
            }
        }
        self.get_or_create_link(sender, receiver)
            .send([], body)
            .expect("far below the limit");
    }

    /// Sends a random message between two random tasks: usually small, sometimes with several
    /// fragments.
    fn send_random(&mut self) {
        let task_count = self.tasks.len() as u64;
        let (sender, receiver) = (
            self.rng.below(task_count) as usize,
            self.rng.below(task_count) as usize,
        );
        // Links between two outside tasks are not affected by checkpoints.
        if Self::is_member(sender) || Self::is_member(receiver) {
            let len = if self.rng.below(40) == 0 {
                self.rng.below(3 * FRAGMENT_BYTES_MAX as u64)
            } else {
                self.rng.below(90)
            };
            self.send(sender, receiver, len as usize);
        }
    }

    /// Polls all links of task `task_index`: checks each delivered message and transmits each
    /// frame.
    fn deliver_and_transmit(&mut self, task_index: usize) {
        if self.run_states[task_index] != RunState::Running {
            return;
        }
        let (now, peers) = (
            self.now,
            self.tasks[task_index]
                .links
                .keys()
                .copied()
                .collect::<Vec<usize>>(),
        );
        for peer_index in peers {
            while let Some(output) = self.get_or_create_link(task_index, peer_index).poll(now) {
                match output {
                    LinkOutput::Deliver(bytes) => {
                        self.check_received(peer_index, task_index, &bytes)
                    }
                    LinkOutput::Transmit(frame) => self.transmit(task_index, peer_index, frame),
                }
            }
        }
    }

    fn check_received(&mut self, sender: usize, receiver: usize, bytes: &Bytes) {
        let id = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        assert!(
            *bytes == message_body(id, bytes.len() - 8),
            "content (seed {})",
            self.seed
        );
        let incarnation = self.get_or_create_link(receiver, sender).incarnation();
        let received_ids = self.tasks[receiver].received_ids.entry(sender).or_default();
        let index = received_ids.len();
        received_ids.push(id);
        self.delivered_count += 1;
        if Self::is_member(sender) && Self::is_member(receiver) {
            let recorded = self.tasks[sender]
                .sent_ids
                .get(&receiver)
                .and_then(|recorded| recorded.get(index));
            assert_eq!(
                Some(&id),
                recorded,
                "from {sender} to {receiver}: all, once, in order (seed {})",
                self.seed
            );
            return;
        }
        let traffic = self.outside_traffic.entry((sender, receiver)).or_default();
        if traffic.incarnation != incarnation {
            (traffic.incarnation, traffic.arrived_ids) = (incarnation, Vec::new());
        }
        assert!(
            traffic
                .arrived_ids
                .last()
                .is_none_or(|last_id| *last_id < id),
            "from {sender} to {receiver}: once, in order (seed {})",
            self.seed
        );
        traffic.arrived_ids.push(id);
        // A member sends only messages that it has recorded in its current incarnation.
        let is_sender_current = self.tasks[sender].incarnation == incarnation
            && self.run_states[sender] != RunState::Dead;
        let recorded = self.tasks[sender]
            .sent_ids
            .get(&receiver)
            .is_some_and(|recorded| recorded.contains(&id));
        assert!(
            recorded || !is_sender_current,
            "from {sender} to {receiver}: {id} was never said (seed {})",
            self.seed
        );
    }

    /// Puts a frame in flight; the frame may be lost, duplicated or delayed.
    fn transmit(&mut self, sender: usize, receiver: usize, frame: LinkFrame) {
        let copy_count = if self.rng.below(1000) < self.fault_permille {
            self.rng.below(3)
        } else {
            1
        };
        for _ in 0..copy_count {
            let is_late = self.rng.below(1000) < self.fault_permille;
            let extra_delay_us = if is_late {
                self.rng.below(2_000_000)
            } else {
                self.rng.below(200)
            };
            self.last_serial += 1;
            self.frames_in_flight.insert(
                (self.now + Micros(100 + extra_delay_us), self.last_serial),
                (sender, receiver, frame.clone()),
            );
        }
    }

    /// Advances the time to the next event and processes it. Returns false if there is no event.
    fn process_next_event(&mut self) -> bool {
        let arrival_time = self
            .frames_in_flight
            .keys()
            .next()
            .map(|(event_time, _)| *event_time);
        let resume_time = self
            .run_states
            .iter()
            .filter_map(|state| {
                if let RunState::Stopped(event_time) = state {
                    *event_time
                } else {
                    None
                }
            })
            .min();
        let running_tasks = self
            .tasks
            .iter()
            .zip(&self.run_states)
            .filter(|(_, state)| **state == RunState::Running);
        let wakeup_time = running_tasks
            .flat_map(|(task, _)| task.links.values())
            .filter_map(Link::next_wakeup)
            .min();
        let Some(event_time) = [arrival_time, resume_time, wakeup_time]
            .into_iter()
            .flatten()
            .min()
        else {
            return false;
        };
        self.now = self.now.max(event_time);
        if arrival_time == Some(event_time) {
            let (_, (sender, receiver, frame)) =
                self.frames_in_flight.pop_first().expect("just seen");
            if self.run_states[receiver] == RunState::Running {
                let encoded_frame = [&frame.encode_head()[..], &frame.payload].concat();
                let (now, frame) = (
                    self.now,
                    LinkFrame::decode(encoded_frame.into()).expect("our own encoding"),
                );
                self.get_or_create_link(receiver, sender)
                    .handle_event(now, LinkEvent::Frame(frame));
                self.deliver_and_transmit(receiver);
            }
        } else if resume_time == Some(event_time) {
            let task = self
                .run_states
                .iter()
                .position(|state| *state == RunState::Stopped(Some(event_time)))
                .expect("just seen");
            self.resume_task(task);
        } else {
            self.wake_links(event_time);
        }
        true
    }

    fn wake_links(&mut self, event_time: Micros) {
        for task_index in 0..self.tasks.len() {
            if self.run_states[task_index] == RunState::Running {
                for link in self.tasks[task_index]
                    .links
                    .values_mut()
                    .filter(|l| l.next_wakeup().is_some_and(|t| t <= event_time))
                {
                    link.handle_event(self.now, LinkEvent::Wake);
                }
                self.deliver_and_transmit(task_index);
            }
        }
    }

    fn exchange_messages(&mut self, message_count: u64) {
        for _ in 0..message_count {
            self.send_random();
            for _ in 0..self.rng.below(6) {
                (0..self.tasks.len()).for_each(|task| self.deliver_and_transmit(task));
                self.process_next_event();
            }
        }
    }

    fn stop_task(&mut self, task: usize) {
        self.run_states[task] = RunState::Stopped(None);
        for link in self.tasks[task].links.values_mut() {
            link.handle_event(self.now, LinkEvent::RouteDown);
        }
    }

    fn resume_task(&mut self, task: usize) {
        self.run_states[task] = RunState::Running;
        for link in self.tasks[task].links.values_mut() {
            link.handle_event(self.now, LinkEvent::RouteUp(ROUTE));
        }
        self.deliver_and_transmit(task);
    }

    /// Stops the members one after another, copies all of them, and resumes them one after another.
    fn checkpoint_members(&mut self) {
        for task in 0..MEMBER_COUNT {
            self.stop_task(task);
            let message_count = self.rng.below(4);
            self.exchange_messages(message_count);
        }
        self.checkpoints.push(self.tasks[..MEMBER_COUNT].to_vec());
        for task in 0..MEMBER_COUNT {
            let resume_time = self.now + Micros(self.rng.below(50_000));
            // Each member resumes at a unique time, because the simulation identifies the member by
            // this time.
            self.run_states[task] = RunState::Stopped(Some(resume_time + Micros(task as u64)));
        }
    }

    fn kill_members(&mut self) {
        for task in 0..MEMBER_COUNT {
            self.run_states[task] = RunState::Dead;
            for outside_task in MEMBER_COUNT..self.tasks.len() {
                if self.rng.below(2) == 0
                    && let Some(link) = self.tasks[outside_task].links.get_mut(&task)
                {
                    link.handle_event(self.now, LinkEvent::PeerGone);
                }
            }
        }
        let message_count = self.rng.below(10);
        self.exchange_messages(message_count);
    }

    /// Restarts all members from a checkpoint, usually the newest one.
    fn restart_members(&mut self) {
        let checkpoint_age = if self.rng.below(4) == 0 {
            self.rng.below(self.checkpoints.len() as u64) as usize
        } else {
            0
        };
        let copies = self.checkpoints[self.checkpoints.len() - 1 - checkpoint_age].clone();
        self.latest_incarnation = self.latest_incarnation.wrapping_add(1).max(1);
        self.restart_count += 1;
        for (task, copy) in copies.into_iter().enumerate() {
            self.tasks[task] = Task {
                incarnation: self.latest_incarnation,
                ..copy
            };
            for (peer, link) in self.tasks[task]
                .links
                .iter_mut()
                .filter(|(_, link)| !link.is_peer_gone())
            {
                link.begin_incarnation(self.latest_incarnation, Self::is_member(*peer));
            }
            self.run_states[task] = RunState::Stopped(None);
        }
        // The restart has reset the sender or the receiver of these messages, so they need not
        // arrive any more.
        self.outside_traffic
            .values_mut()
            .for_each(|traffic| traffic.required_ids.clear());
        for task in 0..MEMBER_COUNT {
            self.resume_task(task);
            let message_count = self.rng.below(3);
            self.exchange_messages(message_count);
        }
    }

    fn all_received(&self) -> bool {
        let member_pairs = (0..MEMBER_COUNT)
            .flat_map(|sender| (0..MEMBER_COUNT).map(move |receiver| (sender, receiver)));
        let empty_ids = Vec::new();
        let mut pairs = member_pairs.filter(|(sender, receiver)| sender != receiver);
        let members_agree = pairs.all(|(sender, receiver)| {
            self.tasks[sender]
                .sent_ids
                .get(&receiver)
                .unwrap_or(&empty_ids)
                == self.tasks[receiver]
                    .received_ids
                    .get(&sender)
                    .unwrap_or(&empty_ids)
        });
        members_agree
            && self.outside_traffic.values().all(|traffic| {
                traffic
                    .required_ids
                    .iter()
                    .all(|id| traffic.arrived_ids.contains(id))
            })
    }

    fn run_until_all_received(&mut self) {
        for _ in 0..2_000_000 {
            (0..self.tasks.len()).for_each(|task| self.deliver_and_transmit(task));
            if self.all_received() {
                return;
            }
            assert!(
                self.process_next_event(),
                "everything sleeps although messages are missing (seed {})",
                self.seed
            );
        }
        panic!("the links do not come to rest (seed {})", self.seed);
    }

    /// Lets every task receive a message from every other task. This is necessary because an
    /// outside task considers a dead member dead until that member sends a message.
    fn exchange_final_messages(&mut self) {
        self.run_until_all_received();
        for member in 0..MEMBER_COUNT {
            (0..self.tasks.len()).for_each(|task| self.send(member, task, 10));
        }
        self.run_until_all_received();
        for task in MEMBER_COUNT..self.tasks.len() {
            (0..MEMBER_COUNT).for_each(|member| self.send(task, member, 10));
        }
        self.run_until_all_received();
        // Frames of earlier incarnations that are still in flight must change nothing.
        for _ in 0..2_000_000 {
            (0..self.tasks.len()).for_each(|task| self.deliver_and_transmit(task));
            let all_acked = self
                .tasks
                .iter()
                .flat_map(|task| task.links.values())
                .all(Link::is_all_acked);
            if all_acked && self.frames_in_flight.is_empty() {
                assert!(self.all_received(), "seed {}", self.seed);
                return;
            }
            assert!(
                self.process_next_event(),
                "everything sleeps although something is not acknowledged (seed {})",
                self.seed
            );
        }
        panic!("not all is acknowledged (seed {})", self.seed);
    }
}

fn run_simulation(seed: u64, first_incarnation: u16, fault_permille: u64) -> Simulation {
    let mut simulation = Simulation::new(seed, 2, first_incarnation, fault_permille);
    for _ in 0..12 {
        let message_count = simulation.rng.below(40);
        simulation.exchange_messages(message_count);
        match simulation.rng.below(5) {
            0 | 1 => simulation.checkpoint_members(),
            2 | 3 if !simulation.checkpoints.is_empty() => {
                simulation.kill_members();
                simulation.restart_members();
            }
            _ if simulation.tasks.len() < MEMBER_COUNT + 6 => {
                simulation.tasks.push(Task::new(0));
                simulation.run_states.push(RunState::Running);
            }
            _ => {}
        }
    }
    simulation.exchange_final_messages();
    simulation
}

/// Members receive exactly the messages of valid incarnations. Outside tasks receive everything
/// that was sent since the last restart.
#[test]
fn restarted_members_receive_valid_messages_only() {
    let (mut restart_count, mut delivered_count) = (0, 0);
    for seed in 1..=400 {
        let simulation = run_simulation(seed, 0, 10);
        (restart_count, delivered_count) = (
            restart_count + simulation.restart_count,
            delivered_count + simulation.delivered_count,
        );
    }
    assert!(
        restart_count > 500 && delivered_count > 50_000,
        "{restart_count} restarts, {delivered_count} messages"
    );
}

#[test]
fn many_late_frames_change_nothing() {
    for seed in 1..=150 {
        run_simulation(seed, 0, 120);
    }
}

#[test]
fn incarnation_numbers_may_wrap_around() {
    for seed in 1..=150 {
        run_simulation(seed, u16::MAX - (seed % 6) as u16, 30);
        run_simulation(seed, (1 << 15) - (seed % 6) as u16, 30);
    }
}

// ---- tests of a single link

/// Returns task 0's end of its link to task 1. Task 0 has sent four messages, of which task 1 has
/// acknowledged two. Two messages of task 1 have arrived.
fn link_with_traffic() -> Link {
    let mut link = Link::new(tid(0), tid(1));
    link.handle_event(Micros(0), LinkEvent::RouteUp(ROUTE));
    for id in 1..=4 {
        link.send([], message_body(id, 0))
            .expect("far below the limit");
    }
    while link.poll(Micros(0)).is_some() {}
    for seq in 1..=2 {
        link.handle_event(Micros(1), LinkEvent::Frame(data_frame(0, seq, 3)));
    }
    assert_eq!(poll_all(&mut link).0.len(), 2);
    link
}

fn new_frame(link_incarnation: u16, kind: LinkKind, seq: u64, ack: u64) -> LinkFrame {
    LinkFrame {
        src: tid(1),
        dst: tid(0),
        kind,
        seq,
        ack,
        incarnation: link_incarnation,
        payload: Bytes::new(),
    }
}

fn data_frame(incarnation: u16, seq: u64, ack: u64) -> LinkFrame {
    LinkFrame {
        payload: message_body(seq, 0),
        ..new_frame(incarnation, LinkKind::Data { is_last: true }, seq, ack)
    }
}

/// Returns the messages that a link delivers, and the frames that it transmits.
fn poll_all(link: &mut Link) -> (Vec<Bytes>, Vec<LinkFrame>) {
    let (mut messages, mut frames) = (Vec::new(), Vec::new());
    while let Some(output) = link.poll(Micros(2)) {
        match output {
            LinkOutput::Deliver(bytes) => messages.push(bytes),
            LinkOutput::Transmit(frame) => frames.push(frame),
        }
    }
    (messages, frames)
}

#[test]
fn frame_of_earlier_incarnation_is_acked_and_ignored() {
    let mut link = link_with_traffic();
    link.handle_event(Micros(1), LinkEvent::RouteDown);
    link.begin_incarnation(3, true);
    link.handle_event(Micros(1), LinkEvent::RouteUp(ROUTE));
    poll_all(&mut link);
    for late_frame in [
        data_frame(0, 3, 5),
        data_frame(2, 3, 5),
        new_frame(
            2,
            LinkKind::Ack {
                requests_resync: true,
            },
            0,
            3,
        ),
    ] {
        link.handle_event(Micros(2), LinkEvent::Frame(late_frame));
        let (messages, frames) = poll_all(&mut link);
        assert!(
            messages.is_empty() && !link.is_all_acked(),
            "it is of a time that did not happen"
        );
        let [answer] = &frames[..] else {
            panic!("{frames:?}")
        };
        assert_eq!(
            (answer.kind, answer.incarnation, answer.ack),
            (
                LinkKind::Ack {
                    requests_resync: false
                },
                3,
                3
            )
        );
    }
    link.handle_event(Micros(2), LinkEvent::Frame(data_frame(3, 3, 5)));
    assert_eq!(poll_all(&mut link).0, [message_body(3, 0)]);
    assert!(
        link.is_all_acked(),
        "the two ends know of each other what they knew"
    );
}

#[test]
fn later_incarnation_resets_link_and_resends_unacked() {
    let mut link = link_with_traffic();
    link.handle_event(
        Micros(1),
        LinkEvent::Frame(LinkFrame {
            payload: Bytes::from_static(b"ha"),
            ..new_frame(0, LinkKind::Data { is_last: false }, 3, 3)
        }),
    );
    link.handle_event(Micros(2), LinkEvent::Frame(data_frame(1, 1, 1)));
    let (messages, frames) = poll_all(&mut link);
    assert_eq!(
        messages,
        [message_body(1, 0)],
        "half a message of the time before is none"
    );
    let frame_fields: Vec<_> = frames
        .iter()
        .map(|frame| {
            (
                frame.incarnation,
                frame.seq,
                frame.ack,
                frame.payload.clone(),
            )
        })
        .collect();
    assert_eq!(
        frame_fields,
        [(1, 1, 2, message_body(3, 0)), (1, 2, 2, message_body(4, 0))]
    );
    assert_eq!(
        (
            link.incarnation(),
            link.queued_end_seq(),
            link.expected_seq()
        ),
        (1, 3, 2)
    );
}

#[test]
fn restarted_peer_counts_as_alive() {
    let mut link = link_with_traffic();
    link.handle_event(Micros(1), LinkEvent::PeerGone);
    link.send([], message_body(9, 0)).expect("it vanishes");
    link.handle_event(Micros(1), LinkEvent::Frame(data_frame(0, 3, 5)));
    assert!(
        link.is_peer_gone(),
        "what was on its way when it ended says nothing"
    );
    assert_eq!(poll_all(&mut link), (vec![message_body(3, 0)], Vec::new()));
    link.handle_event(
        Micros(2),
        LinkEvent::Frame(new_frame(1, LinkKind::Probe, 1, 1)),
    );
    assert!(!link.is_peer_gone());
    link.send([], message_body(10, 0))
        .expect("far below the limit");
    let last_frame = poll_all(&mut link).1.pop().expect("transmitted");
    assert_eq!(
        (last_frame.incarnation, last_frame.seq, last_frame.payload),
        (1, 1, message_body(10, 0))
    );
}

/// A restarted end sends the messages that were never transmitted, and no message that the peer may
/// have received.
#[test]
fn restarted_end_resends_only_untransmitted() {
    let mut link = link_with_traffic();
    link.handle_event(Micros(1), LinkEvent::RouteDown);
    for id in 5..=6 {
        link.send([], message_body(id, 0))
            .expect("far below the limit");
    }
    link.begin_incarnation(7, false);
    link.handle_event(Micros(2), LinkEvent::RouteUp(ROUTE));
    let (messages, frames) = poll_all(&mut link);
    assert!(messages.is_empty());
    let frame_fields: Vec<_> = frames
        .iter()
        .map(|frame| (frame.incarnation, frame.seq, frame.payload.clone()))
        .collect();
    assert_eq!(
        frame_fields,
        [(7, 1, message_body(5, 0)), (7, 2, message_body(6, 0))]
    );
    assert_eq!(link.retained_bytes(), 16);
}

#[test]
fn incarnation_zero_follows_every_other() {
    for incarnation in [1, 2, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, u16::MAX] {
        let mut link = Link::new(tid(0), tid(1));
        assert!(link.accept_incarnation(incarnation), "{incarnation}");
        assert_eq!(link.incarnation(), incarnation);
        assert!(
            !link.accept_incarnation(0) && link.incarnation() == incarnation,
            "{incarnation}"
        );
        let next_incarnation = incarnation.wrapping_add(1).max(1);
        assert!(
            link.accept_incarnation(next_incarnation) && !link.accept_incarnation(incarnation),
            "{incarnation}"
        );
    }
}
