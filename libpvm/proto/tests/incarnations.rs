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
};
use sempa_proto::{Micros, RouteId, Tid};
use std::collections::BTreeMap;

const MEMBERS: usize = 3;
const ROUTE: RouteId = RouteId(1);

/// State of one task. A copy of it is the task's part of a checkpoint.
#[derive(Clone)]
struct Task {
    /// Incarnation for links that the task creates.
    incarnation: u16,
    links: BTreeMap<usize, Link>,
    sent: BTreeMap<usize, Vec<u64>>,
    received: BTreeMap<usize, Vec<u64>>,
}

impl Task {
    fn new(line: u16) -> Task {
        Task {
            incarnation: line,
            links: BTreeMap::new(),
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
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
    /// Messages sent since both tasks last started; all of them must arrive.
    must_arrive: Vec<u64>,
    /// Incarnation of the messages in `arrived`.
    incarnation: u16,
    arrived: Vec<u64>,
}

struct World {
    seed: u64,
    rng: Rng,
    now: Micros,
    tasks: Vec<Task>,
    run_states: Vec<RunState>,
    in_flight: BTreeMap<(Micros, u64), (usize, usize, LinkFrame)>,
    serial: u64,
    /// Latest incarnation of the job.
    latest_incarnation: u16,
    checkpoints: Vec<Vec<Task>>,
    /// Traffic between members and outside tasks, by (sender, receiver).
    outside_traffic: BTreeMap<(usize, usize), OutsideTraffic>,
    restarts: u64,
    delivered: u64,
    /// Rate of lost frames and rate of late frames, per thousand each.
    fault_rate: u64,
}

fn tid(task: usize) -> Tid {
    Tid::from_raw(0x40001 + task as i32)
}

fn body(id: u64, len: usize) -> Bytes {
    let filler = (0..len).map(|i| (id as usize).wrapping_mul(31).wrapping_add(i * 7) as u8);
    id.to_le_bytes()
        .into_iter()
        .chain(filler)
        .collect::<Vec<u8>>()
        .into()
}

impl World {
    fn new(seed: u64, outsiders: usize, first_incarnation: u16, bad: u64) -> World {
        let member = |task| if task < MEMBERS { first_incarnation } else { 0 };
        World {
            seed,
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Micros(0),
            tasks: (0..MEMBERS + outsiders)
                .map(|task| Task::new(member(task)))
                .collect(),
            run_states: vec![RunState::Running; MEMBERS + outsiders],
            in_flight: BTreeMap::new(),
            serial: 0,
            latest_incarnation: first_incarnation,
            checkpoints: Vec::new(),
            outside_traffic: BTreeMap::new(),
            restarts: 0,
            delivered: 0,
            fault_rate: bad,
        }
    }

    fn is_member(task: usize) -> bool {
        task < MEMBERS
    }

    /// Returns the end at task `a` of the link to task `b`; creates it on first use.
    fn link(&mut self, a: usize, b: usize) -> &mut Link {
        let runs = self.run_states[a] == RunState::Running;
        let task = &mut self.tasks[a];
        let line = task.incarnation;
        task.links.entry(b).or_insert_with(|| {
            let mut link = Link::new(tid(a), tid(b));
            link.begin_incarnation(line, true);
            if runs {
                link.handle(Micros(0), LinkEvent::RouteUp(ROUTE));
            }
            link
        })
    }

    // ---- actions of tasks

    fn send(&mut self, from: usize, to: usize, len: usize) {
        if from == to || self.run_states[from] == RunState::Dead {
            return;
        }
        self.serial += 1;
        let (id, now) = (self.serial, self.now);
        let vanishes = self.link(from, to).is_peer_gone();
        self.tasks[from].sent.entry(to).or_default().push(id);
        if World::is_member(from) != World::is_member(to) && !vanishes {
            // A message to a task that has died may arrive or not while the sender does not know of
            // the death.
            if self.run_states[to] != RunState::Dead {
                self.outside_traffic
                    .entry((from, to))
                    .or_default()
                    .must_arrive
                    .push(id);
            }
        }
        let body = body(id, len);
        if body.len() <= INLINE_BODY_BYTES_MAX && self.rng.below(2) == 0 {
            let frame = self
                .link(from, to)
                .try_send_inline(now, &[], &body)
                .map(|frame| frame.to_frame());
            if let Some(frame) = frame {
                return self.transmit(from, to, frame);
            }
        }
        self.link(from, to)
            .send([], body)
            .expect("far below the limit");
    }

    /// Sends a random message between two random tasks: usually small, sometimes with several
    /// fragments.
    fn send_random(&mut self) {
        let tasks = self.tasks.len() as u64;
        let (from, to) = (
            self.rng.below(tasks) as usize,
            self.rng.below(tasks) as usize,
        );
        // Links between two outside tasks are not affected by checkpoints.
        if World::is_member(from) || World::is_member(to) {
            let len = if self.rng.below(40) == 0 {
                self.rng.below(3 * FRAGMENT_BYTES_MAX as u64)
            } else {
                self.rng.below(90)
            };
            self.send(from, to, len as usize);
        }
    }

    fn deliver_and_transmit(&mut self, a: usize) {
        if self.run_states[a] != RunState::Running {
            return;
        }
        let (now, peers) = (
            self.now,
            self.tasks[a].links.keys().copied().collect::<Vec<usize>>(),
        );
        for b in peers {
            while let Some(output) = self.link(a, b).poll(now) {
                match output {
                    LinkOutput::Deliver(bytes) => self.check_received(b, a, &bytes),
                    LinkOutput::Transmit(frame) => self.transmit(a, b, frame),
                }
            }
        }
    }

    fn check_received(&mut self, from: usize, to: usize, bytes: &Bytes) {
        let id = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        assert!(
            *bytes == body(id, bytes.len() - 8),
            "content (seed {})",
            self.seed
        );
        let line = self.link(to, from).incarnation();
        let heard = self.tasks[to].received.entry(from).or_default();
        let place = heard.len();
        heard.push(id);
        self.delivered += 1;
        if World::is_member(from) && World::is_member(to) {
            let said = self.tasks[from]
                .sent
                .get(&to)
                .and_then(|said| said.get(place));
            assert_eq!(
                Some(&id),
                said,
                "from {from} to {to}: all, once, in order (seed {})",
                self.seed
            );
            return;
        }
        let pair = self.outside_traffic.entry((from, to)).or_default();
        if pair.incarnation != line {
            (pair.incarnation, pair.arrived) = (line, Vec::new());
        }
        assert!(
            pair.arrived.last().is_none_or(|last| *last < id),
            "from {from} to {to}: once, in order (seed {})",
            self.seed
        );
        pair.arrived.push(id);
        // In its current incarnation a member sends only messages that it has recorded.
        let own = self.tasks[from].incarnation == line && self.run_states[from] != RunState::Dead;
        let said = self.tasks[from]
            .sent
            .get(&to)
            .is_some_and(|said| said.contains(&id));
        assert!(
            said || !own,
            "from {from} to {to}: {id} was never said (seed {})",
            self.seed
        );
    }

    /// Puts a frame in flight; the frame may be lost, duplicated or delayed.
    fn transmit(&mut self, from: usize, to: usize, frame: LinkFrame) {
        let copies = if self.rng.below(1000) < self.fault_rate {
            self.rng.below(3)
        } else {
            1
        };
        for _ in 0..copies {
            let late = self.rng.below(1000) < self.fault_rate;
            let extra = if late {
                self.rng.below(2_000_000)
            } else {
                self.rng.below(200)
            };
            self.serial += 1;
            self.in_flight.insert(
                (self.now + Micros(100 + extra), self.serial),
                (from, to, frame.clone()),
            );
        }
    }

    /// Advances the time to the next event and processes it. Returns false if there is no event.
    fn step(&mut self) -> bool {
        let arrival = self.in_flight.keys().next().map(|(at, _)| *at);
        let back = self
            .run_states
            .iter()
            .filter_map(|state| {
                if let RunState::Stopped(at) = state {
                    *at
                } else {
                    None
                }
            })
            .min();
        let live = self
            .tasks
            .iter()
            .zip(&self.run_states)
            .filter(|(_, state)| **state == RunState::Running);
        let timer = live
            .flat_map(|(task, _)| task.links.values())
            .filter_map(Link::next_wakeup)
            .min();
        let Some(at) = [arrival, back, timer].into_iter().flatten().min() else {
            return false;
        };
        self.now = self.now.max(at);
        if arrival == Some(at) {
            let (_, (from, to, frame)) = self.in_flight.pop_first().expect("just seen");
            if self.run_states[to] == RunState::Running {
                let wire = [&frame.encode_head()[..], &frame.payload].concat();
                let (now, frame) = (
                    self.now,
                    LinkFrame::decode(wire.into()).expect("our own encoding"),
                );
                self.link(to, from).handle(now, LinkEvent::Frame(frame));
                self.deliver_and_transmit(to);
            }
        } else if back == Some(at) {
            let task = self
                .run_states
                .iter()
                .position(|state| *state == RunState::Stopped(Some(at)))
                .expect("just seen");
            self.resume(task);
        } else {
            self.wake(at);
        }
        true
    }

    fn wake(&mut self, at: Micros) {
        for a in 0..self.tasks.len() {
            if self.run_states[a] == RunState::Running {
                for link in self.tasks[a]
                    .links
                    .values_mut()
                    .filter(|l| l.next_wakeup().is_some_and(|t| t <= at))
                {
                    link.handle(self.now, LinkEvent::Wake);
                }
                self.deliver_and_transmit(a);
            }
        }
    }

    fn exchange_messages(&mut self, messages: u64) {
        for _ in 0..messages {
            self.send_random();
            for _ in 0..self.rng.below(6) {
                (0..self.tasks.len()).for_each(|task| self.deliver_and_transmit(task));
                self.step();
            }
        }
    }

    fn stop(&mut self, task: usize) {
        self.run_states[task] = RunState::Stopped(None);
        for link in self.tasks[task].links.values_mut() {
            link.handle(self.now, LinkEvent::RouteDown);
        }
    }

    fn resume(&mut self, task: usize) {
        self.run_states[task] = RunState::Running;
        for link in self.tasks[task].links.values_mut() {
            link.handle(self.now, LinkEvent::RouteUp(ROUTE));
        }
        self.deliver_and_transmit(task);
    }

    /// Stops the members one after another, copies all of them, and resumes them one after another.
    fn checkpoint(&mut self) {
        for task in 0..MEMBERS {
            self.stop(task);
            let messages = self.rng.below(4);
            self.exchange_messages(messages);
        }
        self.checkpoints.push(self.tasks[..MEMBERS].to_vec());
        for task in 0..MEMBERS {
            let at = self.now + Micros(self.rng.below(50_000));
            // Each member resumes at a unique time, because members are found by that time.
            self.run_states[task] = RunState::Stopped(Some(at + Micros(task as u64)));
        }
    }

    fn kill_members(&mut self) {
        for task in 0..MEMBERS {
            self.run_states[task] = RunState::Dead;
            for other in MEMBERS..self.tasks.len() {
                if self.rng.below(2) == 0
                    && let Some(link) = self.tasks[other].links.get_mut(&task)
                {
                    link.handle(self.now, LinkEvent::PeerGone);
                }
            }
        }
        let messages = self.rng.below(10);
        self.exchange_messages(messages);
    }

    /// Restarts all members from a copy, usually the newest one.
    fn restart(&mut self) {
        let back = if self.rng.below(4) == 0 {
            self.rng.below(self.checkpoints.len() as u64) as usize
        } else {
            0
        };
        let set = self.checkpoints[self.checkpoints.len() - 1 - back].clone();
        self.latest_incarnation = self.latest_incarnation.wrapping_add(1).max(1);
        self.restarts += 1;
        for (task, copy) in set.into_iter().enumerate() {
            self.tasks[task] = Task {
                incarnation: self.latest_incarnation,
                ..copy
            };
            for (peer, link) in self.tasks[task]
                .links
                .iter_mut()
                .filter(|(_, link)| !link.is_peer_gone())
            {
                link.begin_incarnation(self.latest_incarnation, World::is_member(*peer));
            }
            self.run_states[task] = RunState::Stopped(None);
        }
        // Not all of these messages must arrive any more, because their sender or receiver was
        // reset.
        self.outside_traffic
            .values_mut()
            .for_each(|pair| pair.must_arrive.clear());
        for task in 0..MEMBERS {
            self.resume(task);
            let messages = self.rng.below(3);
            self.exchange_messages(messages);
        }
    }

    fn all_received(&self) -> bool {
        let members = (0..MEMBERS).flat_map(|from| (0..MEMBERS).map(move |to| (from, to)));
        let none = Vec::new();
        let mut pairs = members.filter(|(from, to)| from != to);
        let inside = pairs.all(|(from, to)| {
            self.tasks[from].sent.get(&to).unwrap_or(&none)
                == self.tasks[to].received.get(&from).unwrap_or(&none)
        });
        inside
            && self
                .outside_traffic
                .values()
                .all(|pair| pair.must_arrive.iter().all(|id| pair.arrived.contains(id)))
    }

    fn settle(&mut self) {
        for _ in 0..2_000_000 {
            (0..self.tasks.len()).for_each(|task| self.deliver_and_transmit(task));
            if self.all_received() {
                return;
            }
            assert!(
                self.step(),
                "everything sleeps although messages are missing (seed {})",
                self.seed
            );
        }
        panic!("the links do not come to rest (seed {})", self.seed);
    }

    /// Lets every task receive a message from every other task. This is necessary because an
    /// outside task considers a dead member dead until that member sends a message.
    fn finish(&mut self) {
        self.settle();
        for member in 0..MEMBERS {
            (0..self.tasks.len()).for_each(|task| self.send(member, task, 10));
        }
        self.settle();
        for task in MEMBERS..self.tasks.len() {
            (0..MEMBERS).for_each(|member| self.send(task, member, 10));
        }
        self.settle();
        // Frames of earlier incarnations that are still in flight must change nothing.
        for _ in 0..2_000_000 {
            (0..self.tasks.len()).for_each(|task| self.deliver_and_transmit(task));
            let flushed = self
                .tasks
                .iter()
                .flat_map(|task| task.links.values())
                .all(Link::is_all_acked);
            if flushed && self.in_flight.is_empty() {
                assert!(self.all_received(), "seed {}", self.seed);
                return;
            }
            assert!(
                self.step(),
                "everything sleeps although something is not acknowledged (seed {})",
                self.seed
            );
        }
        panic!("not all is acknowledged (seed {})", self.seed);
    }
}

fn run_world(seed: u64, first_incarnation: u16, fault_rate: u64) -> World {
    let mut world = World::new(seed, 2, first_incarnation, fault_rate);
    for _ in 0..12 {
        let messages = world.rng.below(40);
        world.exchange_messages(messages);
        match world.rng.below(5) {
            0 | 1 => world.checkpoint(),
            2 | 3 if !world.checkpoints.is_empty() => {
                world.kill_members();
                world.restart();
            }
            _ if world.tasks.len() < MEMBERS + 6 => {
                world.tasks.push(Task::new(0));
                world.run_states.push(RunState::Running);
            }
            _ => {}
        }
    }
    world.finish();
    world
}

/// Members receive exactly the messages of valid incarnations; outside tasks receive everything
/// that was sent since the restart.
#[test]
fn restarted_members_receive_valid_messages_only() {
    let (mut restarts, mut delivered) = (0, 0);
    for seed in 1..=400 {
        let world = run_world(seed, 0, 10);
        (restarts, delivered) = (restarts + world.restarts, delivered + world.delivered);
    }
    assert!(
        restarts > 500 && delivered > 50_000,
        "{restarts} restarts, {delivered} messages"
    );
}

#[test]
fn many_late_frames_change_nothing() {
    for seed in 1..=150 {
        run_world(seed, 0, 120);
    }
}

#[test]
fn incarnation_numbers_may_wrap_around() {
    for seed in 1..=150 {
        run_world(seed, u16::MAX - (seed % 6) as u16, 30);
        run_world(seed, (1 << 15) - (seed % 6) as u16, 30);
    }
}

// ---- tests of a single link

/// Returns the link of task 0 to task 1. Each of the two tasks has sent four messages, of which two
/// have arrived.
fn link_in_use() -> Link {
    let mut link = Link::new(tid(0), tid(1));
    link.handle(Micros(0), LinkEvent::RouteUp(ROUTE));
    for id in 1..=4 {
        link.send([], body(id, 0)).expect("far below the limit");
    }
    while link.poll(Micros(0)).is_some() {}
    for seq in 1..=2 {
        link.handle(Micros(1), LinkEvent::Frame(data(0, seq, 3)));
    }
    assert_eq!(poll_all(&mut link).0.len(), 2);
    link
}

fn frame(line: u16, kind: LinkKind, seq: u64, ack: u64) -> LinkFrame {
    LinkFrame {
        src: tid(1),
        dst: tid(0),
        kind,
        seq,
        ack,
        incarnation: line,
        payload: Bytes::new(),
    }
}

fn data(incarnation: u16, seq: u64, ack: u64) -> LinkFrame {
    LinkFrame {
        payload: body(seq, 0),
        ..frame(incarnation, LinkKind::Data { last: true }, seq, ack)
    }
}

/// Returns the messages that a link delivers, and the frames that it transmits.
fn poll_all(link: &mut Link) -> (Vec<Bytes>, Vec<LinkFrame>) {
    let (mut delivered, mut transmitted) = (Vec::new(), Vec::new());
    while let Some(output) = link.poll(Micros(2)) {
        match output {
            LinkOutput::Deliver(bytes) => delivered.push(bytes),
            LinkOutput::Transmit(frame) => transmitted.push(frame),
        }
    }
    (delivered, transmitted)
}

#[test]
fn frame_of_earlier_incarnation_is_acked_and_ignored() {
    let mut link = link_in_use();
    link.handle(Micros(1), LinkEvent::RouteDown);
    link.begin_incarnation(3, true);
    link.handle(Micros(1), LinkEvent::RouteUp(ROUTE));
    poll_all(&mut link);
    for late in [
        data(0, 3, 5),
        data(2, 3, 5),
        frame(2, LinkKind::Ack { resync: true }, 0, 3),
    ] {
        link.handle(Micros(2), LinkEvent::Frame(late));
        let (delivered, transmitted) = poll_all(&mut link);
        assert!(
            delivered.is_empty() && !link.is_all_acked(),
            "it is of a time that did not happen"
        );
        let [answer] = &transmitted[..] else {
            panic!("{transmitted:?}")
        };
        assert_eq!(
            (answer.kind, answer.incarnation, answer.ack),
            (LinkKind::Ack { resync: false }, 3, 3)
        );
    }
    link.handle(Micros(2), LinkEvent::Frame(data(3, 3, 5)));
    assert_eq!(poll_all(&mut link).0, [body(3, 0)]);
    assert!(
        link.is_all_acked(),
        "the two ends know of each other what they knew"
    );
}

#[test]
fn later_incarnation_resets_link_and_resends_unacked() {
    let mut link = link_in_use();
    link.handle(
        Micros(1),
        LinkEvent::Frame(LinkFrame {
            payload: Bytes::from_static(b"ha"),
            ..frame(0, LinkKind::Data { last: false }, 3, 3)
        }),
    );
    link.handle(Micros(2), LinkEvent::Frame(data(1, 1, 1)));
    let (delivered, transmitted) = poll_all(&mut link);
    assert_eq!(
        delivered,
        [body(1, 0)],
        "half a message of the time before is none"
    );
    let seen: Vec<_> = transmitted
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
    assert_eq!(seen, [(1, 1, 2, body(3, 0)), (1, 2, 2, body(4, 0))]);
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
    let mut link = link_in_use();
    link.handle(Micros(1), LinkEvent::PeerGone);
    link.send([], body(9, 0)).expect("it vanishes");
    link.handle(Micros(1), LinkEvent::Frame(data(0, 3, 5)));
    assert!(
        link.is_peer_gone(),
        "what was on its way when it ended says nothing"
    );
    assert_eq!(poll_all(&mut link), (vec![body(3, 0)], Vec::new()));
    link.handle(Micros(2), LinkEvent::Frame(frame(1, LinkKind::Probe, 1, 1)));
    assert!(!link.is_peer_gone());
    link.send([], body(10, 0)).expect("far below the limit");
    let last = poll_all(&mut link).1.pop().expect("transmitted");
    assert_eq!(
        (last.incarnation, last.seq, last.payload),
        (1, 1, body(10, 0))
    );
}

/// A restarted end sends the messages that were never transmitted, and no message that the peer may
/// have received.
#[test]
fn restarted_end_resends_only_untransmitted() {
    let mut link = link_in_use();
    link.handle(Micros(1), LinkEvent::RouteDown);
    for id in 5..=6 {
        link.send([], body(id, 0)).expect("far below the limit");
    }
    link.begin_incarnation(7, false);
    link.handle(Micros(2), LinkEvent::RouteUp(ROUTE));
    let (delivered, transmitted) = poll_all(&mut link);
    assert!(delivered.is_empty());
    let seen: Vec<_> = transmitted
        .iter()
        .map(|frame| (frame.incarnation, frame.seq, frame.payload.clone()))
        .collect();
    assert_eq!(seen, [(7, 1, body(5, 0)), (7, 2, body(6, 0))]);
    assert_eq!(link.retained_bytes(), 16);
}

#[test]
fn incarnation_zero_follows_every_other() {
    for line in [1, 2, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, u16::MAX] {
        let mut fresh = Link::new(tid(0), tid(1));
        assert!(fresh.accept_incarnation(line), "{line}");
        assert_eq!(fresh.incarnation(), line);
        assert!(
            !fresh.accept_incarnation(0) && fresh.incarnation() == line,
            "{line}"
        );
        let next = line.wrapping_add(1).max(1);
        assert!(
            fresh.accept_incarnation(next) && !fresh.accept_incarnation(line),
            "{line}"
        );
    }
}
