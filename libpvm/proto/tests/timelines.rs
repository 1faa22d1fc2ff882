//! Simulates links of tasks that are restarted from checkpoints, in virtual time from one seed.
//!
//! Some tasks are members of a job, others are not. From time to time all members stop and are
//! copied, or all of them die and restart from a copy with a later incarnation. Frames of earlier
//! incarnations arrive late, twice, or never.
//!
//! Every message has a unique number, and every task records what it has sent and received. The
//! copy of a member includes its records. The messages that a member received from another member
//! must therefore always be a prefix of those that the other one recorded as sent.

mod dice;

use bytes::Bytes;
use dice::Dice;
use sempa_proto::link::{
    FRAGMENT_BYTES_MAX, Link, LinkEvent, LinkFrame, LinkKind, LinkOutput, SMALL_BYTES_MAX,
};
use sempa_proto::{Micros, RouteId, Tid};
use std::collections::BTreeMap;

const MEMBERS: usize = 3;
const ROUTE: RouteId = RouteId(1);

/// State of one task. A copy of it is the task's part of a checkpoint.
#[derive(Clone)]
struct Task {
    /// Incarnation of new links.
    line: u16,
    links: BTreeMap<usize, Link>,
    said: BTreeMap<usize, Vec<u64>>,
    heard: BTreeMap<usize, Vec<u64>>,
}

impl Task {
    fn new(line: u16) -> Task {
        Task {
            line,
            links: BTreeMap::new(),
            said: BTreeMap::new(),
            heard: BTreeMap::new(),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Runs,
    /// Stopped; resumes at this time.
    Still(Option<Micros>),
    Dead,
}

/// Messages between a member and an outside task since their last incarnation change.
#[derive(Clone, Default)]
struct Outside {
    /// Messages sent in the current life of both tasks, all of which must arrive.
    owed: Vec<u64>,
    /// Incarnation of the messages in `come`.
    line: u16,
    come: Vec<u64>,
}

struct World {
    seed: u64,
    dice: Dice,
    now: Micros,
    tasks: Vec<Task>,
    state: Vec<State>,
    air: BTreeMap<(Micros, u64), (usize, usize, LinkFrame)>,
    serial: u64,
    /// Latest incarnation of the job.
    line: u16,
    sets: Vec<Vec<Task>>,
    /// By sender and receiver; one of them is a member, the other is not.
    outside: BTreeMap<(usize, usize), Outside>,
    restarts: u64,
    delivered: u64,
    /// Rate of lost frames and of late frames, per thousand.
    bad: u64,
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
    fn new(seed: u64, outsiders: usize, first_line: u16, bad: u64) -> World {
        let member = |task| if task < MEMBERS { first_line } else { 0 };
        World {
            seed,
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: Micros(0),
            tasks: (0..MEMBERS + outsiders)
                .map(|task| Task::new(member(task)))
                .collect(),
            state: vec![State::Runs; MEMBERS + outsiders],
            air: BTreeMap::new(),
            serial: 0,
            line: first_line,
            sets: Vec::new(),
            outside: BTreeMap::new(),
            restarts: 0,
            delivered: 0,
            bad,
        }
    }

    fn is_member(task: usize) -> bool {
        task < MEMBERS
    }

    /// Returns one end of a link; creates it on first use.
    fn link(&mut self, a: usize, b: usize) -> &mut Link {
        let runs = self.state[a] == State::Runs;
        let task = &mut self.tasks[a];
        let line = task.line;
        task.links.entry(b).or_insert_with(|| {
            let mut link = Link::new(tid(a), tid(b));
            link.begin_timeline(line, true);
            if runs {
                link.handle(Micros(0), LinkEvent::RouteUp(ROUTE));
            }
            link
        })
    }

    // ---- actions of tasks

    fn say(&mut self, from: usize, to: usize, len: usize) {
        if from == to || self.state[from] == State::Dead {
            return;
        }
        self.serial += 1;
        let (id, now) = (self.serial, self.now);
        let vanishes = self.link(from, to).is_gone();
        self.tasks[from].said.entry(to).or_default().push(id);
        if World::is_member(from) != World::is_member(to) && !vanishes {
            // A message to a dead task whose death is not known yet may arrive or not.
            if self.state[to] != State::Dead {
                self.outside.entry((from, to)).or_default().owed.push(id);
            }
        }
        let body = body(id, len);
        if body.len() <= SMALL_BYTES_MAX && self.dice.roll(2) == 0 {
            let frame = self
                .link(from, to)
                .send_at_once(now, &[], &body)
                .map(|frame| frame.to_frame());
            if let Some(frame) = frame {
                return self.launch(from, to, frame);
            }
        }
        self.link(from, to)
            .send([], body)
            .expect("far below the limit");
    }

    /// Sends a random message between two random tasks: usually small, sometimes with several
    /// fragments.
    fn say_something(&mut self) {
        let tasks = self.tasks.len() as u64;
        let (from, to) = (
            self.dice.roll(tasks) as usize,
            self.dice.roll(tasks) as usize,
        );
        // Links between two outside tasks are not affected by checkpoints.
        if World::is_member(from) || World::is_member(to) {
            let len = if self.dice.roll(40) == 0 {
                self.dice.roll(3 * FRAGMENT_BYTES_MAX as u64)
            } else {
                self.dice.roll(90)
            };
            self.say(from, to, len as usize);
        }
    }

    fn pump(&mut self, a: usize) {
        if self.state[a] != State::Runs {
            return;
        }
        let (now, peers) = (
            self.now,
            self.tasks[a].links.keys().copied().collect::<Vec<usize>>(),
        );
        for b in peers {
            while let Some(output) = self.link(a, b).poll(now) {
                match output {
                    LinkOutput::Deliver(bytes) => self.hear(b, a, &bytes),
                    LinkOutput::Transmit(frame) => self.launch(a, b, frame),
                }
            }
        }
    }

    fn hear(&mut self, from: usize, to: usize, bytes: &Bytes) {
        let id = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        assert!(
            *bytes == body(id, bytes.len() - 8),
            "content (seed {})",
            self.seed
        );
        let line = self.link(to, from).line();
        let heard = self.tasks[to].heard.entry(from).or_default();
        let place = heard.len();
        heard.push(id);
        self.delivered += 1;
        if World::is_member(from) && World::is_member(to) {
            let said = self.tasks[from]
                .said
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
        let pair = self.outside.entry((from, to)).or_default();
        if pair.line != line {
            (pair.line, pair.come) = (line, Vec::new());
        }
        assert!(
            pair.come.last().is_none_or(|last| *last < id),
            "from {from} to {to}: once, in order (seed {})",
            self.seed
        );
        pair.come.push(id);
        // In its current incarnation a member sends only messages that it has recorded.
        let own = self.tasks[from].line == line && self.state[from] != State::Dead;
        let said = self.tasks[from]
            .said
            .get(&to)
            .is_some_and(|said| said.contains(&id));
        assert!(
            said || !own,
            "from {from} to {to}: {id} was never said (seed {})",
            self.seed
        );
    }

    /// Puts a frame in flight; it may be lost, duplicated or delayed.
    fn launch(&mut self, from: usize, to: usize, frame: LinkFrame) {
        let copies = if self.dice.roll(1000) < self.bad {
            self.dice.roll(3)
        } else {
            1
        };
        for _ in 0..copies {
            let late = self.dice.roll(1000) < self.bad;
            let extra = if late {
                self.dice.roll(2_000_000)
            } else {
                self.dice.roll(200)
            };
            self.serial += 1;
            self.air.insert(
                (self.now + Micros(100 + extra), self.serial),
                (from, to, frame.clone()),
            );
        }
    }

    /// Advances to the next event. False if there is none.
    fn step(&mut self) -> bool {
        let arrival = self.air.keys().next().map(|(at, _)| *at);
        let back = self
            .state
            .iter()
            .filter_map(|state| {
                if let State::Still(at) = state {
                    *at
                } else {
                    None
                }
            })
            .min();
        let live = self
            .tasks
            .iter()
            .zip(&self.state)
            .filter(|(_, state)| **state == State::Runs);
        let timer = live
            .flat_map(|(task, _)| task.links.values())
            .filter_map(Link::next_wakeup)
            .min();
        let Some(at) = [arrival, back, timer].into_iter().flatten().min() else {
            return false;
        };
        self.now = self.now.max(at);
        if arrival == Some(at) {
            let (_, (from, to, frame)) = self.air.pop_first().expect("just seen");
            if self.state[to] == State::Runs {
                let wire = [&frame.encode_head()[..], &frame.payload].concat();
                let (now, frame) = (
                    self.now,
                    LinkFrame::decode(wire.into()).expect("our own encoding"),
                );
                self.link(to, from).handle(now, LinkEvent::Frame(frame));
                self.pump(to);
            }
        } else if back == Some(at) {
            let task = self
                .state
                .iter()
                .position(|state| *state == State::Still(Some(at)))
                .expect("just seen");
            self.go_on(task);
        } else {
            self.wake(at);
        }
        true
    }

    fn wake(&mut self, at: Micros) {
        for a in 0..self.tasks.len() {
            if self.state[a] == State::Runs {
                for link in self.tasks[a]
                    .links
                    .values_mut()
                    .filter(|l| l.next_wakeup().is_some_and(|t| t <= at))
                {
                    link.handle(self.now, LinkEvent::Wake);
                }
                self.pump(a);
            }
        }
    }

    fn chatter(&mut self, messages: u64) {
        for _ in 0..messages {
            self.say_something();
            for _ in 0..self.dice.roll(6) {
                (0..self.tasks.len()).for_each(|task| self.pump(task));
                self.step();
            }
        }
    }

    fn stand(&mut self, task: usize) {
        self.state[task] = State::Still(None);
        for link in self.tasks[task].links.values_mut() {
            link.handle(self.now, LinkEvent::RouteDown);
        }
    }

    fn go_on(&mut self, task: usize) {
        self.state[task] = State::Runs;
        for link in self.tasks[task].links.values_mut() {
            link.handle(self.now, LinkEvent::RouteUp(ROUTE));
        }
        self.pump(task);
    }

    /// Stops the members one after the other, copies them, and resumes them one after the other.
    fn checkpoint(&mut self) {
        for task in 0..MEMBERS {
            self.stand(task);
            let messages = self.dice.roll(4);
            self.chatter(messages);
        }
        self.sets.push(self.tasks[..MEMBERS].to_vec());
        for task in 0..MEMBERS {
            let at = self.now + Micros(self.dice.roll(50_000));
            // Unique times, because tasks are found by their time.
            self.state[task] = State::Still(Some(at + Micros(task as u64)));
        }
    }

    fn die(&mut self) {
        for task in 0..MEMBERS {
            self.state[task] = State::Dead;
            for other in MEMBERS..self.tasks.len() {
                if self.dice.roll(2) == 0
                    && let Some(link) = self.tasks[other].links.get_mut(&task)
                {
                    link.handle(self.now, LinkEvent::PeerGone);
                }
            }
        }
        let messages = self.dice.roll(10);
        self.chatter(messages);
    }

    /// Restarts all members from a copy, usually the newest one.
    fn restart(&mut self) {
        let back = if self.dice.roll(4) == 0 {
            self.dice.roll(self.sets.len() as u64) as usize
        } else {
            0
        };
        let set = self.sets[self.sets.len() - 1 - back].clone();
        self.line = self.line.wrapping_add(1).max(1);
        self.restarts += 1;
        for (task, copy) in set.into_iter().enumerate() {
            self.tasks[task] = Task {
                line: self.line,
                ..copy
            };
            for (peer, link) in self.tasks[task]
                .links
                .iter_mut()
                .filter(|(_, link)| !link.is_gone())
            {
                link.begin_timeline(self.line, World::is_member(*peer));
            }
            self.state[task] = State::Still(None);
        }
        // Sender or receiver of each of these messages has been reset.
        self.outside.values_mut().for_each(|pair| pair.owed.clear());
        for task in 0..MEMBERS {
            self.go_on(task);
            let messages = self.dice.roll(3);
            self.chatter(messages);
        }
    }

    fn all_heard(&self) -> bool {
        let members = (0..MEMBERS).flat_map(|from| (0..MEMBERS).map(move |to| (from, to)));
        let none = Vec::new();
        let mut pairs = members.filter(|(from, to)| from != to);
        let inside = pairs.all(|(from, to)| {
            self.tasks[from].said.get(&to).unwrap_or(&none)
                == self.tasks[to].heard.get(&from).unwrap_or(&none)
        });
        inside
            && self
                .outside
                .values()
                .all(|pair| pair.owed.iter().all(|id| pair.come.contains(id)))
    }

    fn settle(&mut self) {
        for _ in 0..2_000_000 {
            (0..self.tasks.len()).for_each(|task| self.pump(task));
            if self.all_heard() {
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

    /// Lets every task receive a message from every other one. An outside task considers a dead
    /// member dead until that member sends a message.
    fn finish(&mut self) {
        self.settle();
        for member in 0..MEMBERS {
            (0..self.tasks.len()).for_each(|task| self.say(member, task, 10));
        }
        self.settle();
        for task in MEMBERS..self.tasks.len() {
            (0..MEMBERS).for_each(|member| self.say(task, member, 10));
        }
        self.settle();
        // Frames that are still in flight must change nothing.
        for _ in 0..2_000_000 {
            (0..self.tasks.len()).for_each(|task| self.pump(task));
            let flushed = self
                .tasks
                .iter()
                .flat_map(|task| task.links.values())
                .all(Link::is_flushed);
            if flushed && self.air.is_empty() {
                assert!(self.all_heard(), "seed {}", self.seed);
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

fn live(seed: u64, first_line: u16, bad: u64) -> World {
    let mut world = World::new(seed, 2, first_line, bad);
    for _ in 0..12 {
        let messages = world.dice.roll(40);
        world.chatter(messages);
        match world.dice.roll(5) {
            0 | 1 => world.checkpoint(),
            2 | 3 if !world.sets.is_empty() => {
                world.die();
                world.restart();
            }
            _ if world.tasks.len() < MEMBERS + 6 => {
                world.tasks.push(Task::new(0));
                world.state.push(State::Runs);
            }
            _ => {}
        }
    }
    world.finish();
    world
}

/// Members receive exactly the messages of valid incarnations; outside tasks receive everything
/// sent since the restart.
#[test]
fn restarted_members_receive_valid_messages_only() {
    let (mut restarts, mut delivered) = (0, 0);
    for seed in 1..=400 {
        let world = live(seed, 0, 10);
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
        live(seed, 0, 120);
    }
}

#[test]
fn incarnation_numbers_may_wrap_around() {
    for seed in 1..=150 {
        live(seed, u16::MAX - (seed % 6) as u16, 30);
        live(seed, (1 << 15) - (seed % 6) as u16, 30);
    }
}

// ---- tests of a single link

/// Returns a link of task 0 to task 1. Each end has sent four messages, of which two have arrived.
fn met() -> Link {
    let mut link = Link::new(tid(0), tid(1));
    link.handle(Micros(0), LinkEvent::RouteUp(ROUTE));
    for id in 1..=4 {
        link.send([], body(id, 0)).expect("far below the limit");
    }
    while link.poll(Micros(0)).is_some() {}
    for seq in 1..=2 {
        link.handle(Micros(1), LinkEvent::Frame(data(0, seq, 3)));
    }
    assert_eq!(words(&mut link).0.len(), 2);
    link
}

fn frame(line: u16, kind: LinkKind, seq: u64, ack: u64) -> LinkFrame {
    LinkFrame {
        src: tid(1),
        dst: tid(0),
        kind,
        seq,
        ack,
        line,
        payload: Bytes::new(),
    }
}

fn data(line: u16, seq: u64, ack: u64) -> LinkFrame {
    LinkFrame {
        payload: body(seq, 0),
        ..frame(line, LinkKind::Data { last: true }, seq, ack)
    }
}

/// Returns the messages that a link delivers and the frames that it transmits.
fn words(link: &mut Link) -> (Vec<Bytes>, Vec<LinkFrame>) {
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
    let mut link = met();
    link.handle(Micros(1), LinkEvent::RouteDown);
    link.begin_timeline(3, true);
    link.handle(Micros(1), LinkEvent::RouteUp(ROUTE));
    words(&mut link);
    for late in [
        data(0, 3, 5),
        data(2, 3, 5),
        frame(2, LinkKind::Ack { resync: true }, 0, 3),
    ] {
        link.handle(Micros(2), LinkEvent::Frame(late));
        let (delivered, transmitted) = words(&mut link);
        assert!(
            delivered.is_empty() && !link.is_flushed(),
            "it is of a time that did not happen"
        );
        let [answer] = &transmitted[..] else {
            panic!("{transmitted:?}")
        };
        assert_eq!(
            (answer.kind, answer.line, answer.ack),
            (LinkKind::Ack { resync: false }, 3, 3)
        );
    }
    link.handle(Micros(2), LinkEvent::Frame(data(3, 3, 5)));
    assert_eq!(words(&mut link).0, [body(3, 0)]);
    assert!(
        link.is_flushed(),
        "the two ends know of each other what they knew"
    );
}

#[test]
fn later_incarnation_resets_link_and_resends_unacked() {
    let mut link = met();
    link.handle(
        Micros(1),
        LinkEvent::Frame(LinkFrame {
            payload: Bytes::from_static(b"ha"),
            ..frame(0, LinkKind::Data { last: false }, 3, 3)
        }),
    );
    link.handle(Micros(2), LinkEvent::Frame(data(1, 1, 1)));
    let (delivered, transmitted) = words(&mut link);
    assert_eq!(
        delivered,
        [body(1, 0)],
        "half a message of the time before is none"
    );
    let seen: Vec<_> = transmitted
        .iter()
        .map(|frame| (frame.line, frame.seq, frame.ack, frame.payload.clone()))
        .collect();
    assert_eq!(seen, [(1, 1, 2, body(3, 0)), (1, 2, 2, body(4, 0))]);
    assert_eq!((link.line(), link.sent_end(), link.expected()), (1, 3, 2));
}

#[test]
fn restarted_peer_counts_as_alive() {
    let mut link = met();
    link.handle(Micros(1), LinkEvent::PeerGone);
    link.send([], body(9, 0)).expect("it vanishes");
    link.handle(Micros(1), LinkEvent::Frame(data(0, 3, 5)));
    assert!(
        link.is_gone(),
        "what was on its way when it ended says nothing"
    );
    assert_eq!(words(&mut link), (vec![body(3, 0)], Vec::new()));
    link.handle(Micros(2), LinkEvent::Frame(frame(1, LinkKind::Probe, 1, 1)));
    assert!(!link.is_gone());
    link.send([], body(10, 0)).expect("far below the limit");
    let last = words(&mut link).1.pop().expect("transmitted");
    assert_eq!((last.line, last.seq, last.payload), (1, 1, body(10, 0)));
}

/// A restarted end sends what was never transmitted, and nothing that the peer may have received.
#[test]
fn restarted_end_resends_only_untransmitted() {
    let mut link = met();
    link.handle(Micros(1), LinkEvent::RouteDown);
    for id in 5..=6 {
        link.send([], body(id, 0)).expect("far below the limit");
    }
    link.begin_timeline(7, false);
    link.handle(Micros(2), LinkEvent::RouteUp(ROUTE));
    let (delivered, transmitted) = words(&mut link);
    assert!(delivered.is_empty());
    let seen: Vec<_> = transmitted
        .iter()
        .map(|frame| (frame.line, frame.seq, frame.payload.clone()))
        .collect();
    assert_eq!(seen, [(7, 1, body(5, 0)), (7, 2, body(6, 0))]);
    assert_eq!(link.retained_bytes(), 16);
}

#[test]
fn incarnation_zero_follows_every_other() {
    for line in [1, 2, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, u16::MAX] {
        let mut fresh = Link::new(tid(0), tid(1));
        assert!(fresh.follow(line), "{line}");
        assert_eq!(fresh.line(), line);
        assert!(!fresh.follow(0) && fresh.line() == line, "{line}");
        let next = line.wrapping_add(1).max(1);
        assert!(fresh.follow(next) && !fresh.follow(line), "{line}");
    }
}
