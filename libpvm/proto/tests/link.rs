//! Simulates links with loss, duplication, reordering, broken routes and migrating tasks, in
//! virtual time from one seed.
//!
//! Every pair of tasks exchanges numbered messages. Each receiver checks that every number arrives
//! once and in order, with the bytes that were sent.

mod rng;

use bytes::Bytes;
use rng::Rng;
use sempa_proto::link::{
    FRAGMENT_BYTES_MAX, INLINE_BODY_BYTES_MAX, Link, LinkEvent, LinkFrame, LinkKind, LinkOutput,
    WINDOW_BYTES_MAX, WINDOW_FRAGMENTS_MAX,
};
use sempa_proto::{Micros, RouteId, Tid};
use std::collections::BTreeMap;

/// Fault rates of the network, per thousand.
#[derive(Clone, Copy, Debug)]
struct FaultRates {
    loss: u64,
    duplication: u64,
    reordering: u64,
    /// Probability, at each step, that a task migrates or loses its route for a while.
    migrations: u64,
}

const NO_FAULTS: FaultRates = FaultRates {
    loss: 0,
    duplication: 0,
    reordering: 0,
    migrations: 0,
};
const MODERATE_FAULTS: FaultRates = FaultRates {
    loss: 5,
    duplication: 10,
    reordering: 10,
    migrations: 4,
};
const HEAVY_FAULTS: FaultRates = FaultRates {
    loss: 30,
    duplication: 30,
    reordering: 60,
    migrations: 4,
};

struct Network {
    rng: Rng,
    faults: FaultRates,
    now: Micros,
    tids: Vec<Tid>,
    /// `links[a][b]` is task `a`'s end of its link to task `b`.
    links: Vec<Vec<Link>>,
    /// For each task, the time at which it gets its next route; `None` if it has a route.
    route_back_at: Vec<Option<Micros>>,
    routes: u64,
    in_flight: BTreeMap<(Micros, u64), (usize, usize, LinkFrame)>,
    serial: u64,
    sent: Vec<Vec<u64>>,
    received: Vec<Vec<u64>>,
    transmitted_frames: u64,
    whole_messages: u64,
}

fn message(from: usize, to: usize, number: u64, len: usize) -> (Bytes, Bytes) {
    let mut head = Vec::with_capacity(24);
    for word in [from as u64, to as u64, number] {
        head.extend_from_slice(&word.to_le_bytes());
    }
    let body: Vec<u8> = (0..len)
        .map(|i| (number as usize).wrapping_mul(31).wrapping_add(i * 7) as u8)
        .collect();
    (head.into(), body.into())
}

impl Network {
    fn new(seed: u64, tasks: usize, weather: FaultRates) -> Network {
        let tids: Vec<Tid> = (1..=tasks as i32)
            .map(|i| Tid::from_raw(0x40000 + i))
            .collect();
        let mut links: Vec<Vec<Link>> = tids
            .iter()
            .map(|a| tids.iter().map(|b| Link::new(*a, *b)).collect())
            .collect();
        for link in links.iter_mut().flatten() {
            link.handle(Micros(0), LinkEvent::RouteUp(RouteId(0)));
        }
        Network {
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            faults: weather,
            now: Micros(0),
            links,
            route_back_at: vec![None; tasks],
            routes: 0,
            in_flight: BTreeMap::new(),
            serial: 0,
            sent: vec![vec![0; tasks]; tasks],
            received: vec![vec![0; tasks]; tasks],
            transmitted_frames: 0,
            whole_messages: 0,
            tids,
        }
    }

    fn send(&mut self, from: usize, to: usize, len: usize) {
        let number = self.sent[from][to];
        self.sent[from][to] += 1;
        let (head, body) = message(from, to, number, len);
        if body.len() <= INLINE_BODY_BYTES_MAX && self.rng.below(2) == 0 {
            let frame = self.links[from][to]
                .try_send_inline(self.now, &head, &body)
                .map(|frame| frame.to_frame());
            if let Some(frame) = frame {
                return self.transmit(from, to, frame);
            }
        }
        self.links[from][to]
            .send(head, body)
            .expect("far below the limit");
    }

    /// Sends a random message: usually small, sometimes with several fragments.
    fn send_random(&mut self) {
        let tasks = self.tids.len() as u64;
        let from = self.rng.below(tasks) as usize;
        let to = ((from as u64 + 1 + self.rng.below(tasks - 1)) % tasks) as usize;
        let len = match self.rng.below(2000) {
            0 => self.rng.below(4 * FRAGMENT_BYTES_MAX as u64),
            1..6 => FRAGMENT_BYTES_MAX as u64 - 24 + self.rng.below(3) - 1,
            _ => self.rng.below(100),
        };
        self.send(from, to, len as usize);
    }

    fn deliver_and_transmit(&mut self, a: usize) {
        for b in 0..self.tids.len() {
            self.send_whole_messages(a, b);
            while let Some(output) = self.links[a][b].poll(self.now) {
                match output {
                    LinkOutput::Deliver(bytes) => self.check(b, a, bytes),
                    LinkOutput::Transmit(frame) => self.transmit(a, b, frame),
                }
                self.send_whole_messages(a, b);
            }
        }
    }

    /// Sends half of the messages that have several fragments as whole messages, in one frame
    /// larger than a fragment.
    fn send_whole_messages(&mut self, a: usize, b: usize) {
        while let Some((head, body)) = self.links[a][b].next_whole_message(FRAGMENT_BYTES_MAX) {
            let payload: Bytes = [head, body].concat().into();
            if self.rng.below(2) == 0 {
                return;
            }
            let (src, dst) = (self.tids[a], self.tids[b]);
            let (seq, ack) = self.links[a][b].mark_whole_sent(self.now);
            self.whole_messages += 1;
            self.transmit(
                a,
                b,
                LinkFrame {
                    src,
                    dst,
                    kind: LinkKind::Data { last: true },
                    seq,
                    ack,
                    incarnation: 0,
                    payload,
                },
            );
        }
    }

    fn check(&mut self, from: usize, to: usize, bytes: Bytes) {
        let number = self.received[from][to];
        let (head, body) = message(from, to, number, bytes.len() - 24);
        assert_eq!(
            &bytes[..24],
            &head[..],
            "order, and no loss or double, from {from} to {to}"
        );
        assert!(bytes[24..] == body[..], "content from {from} to {to}");
        self.received[from][to] += 1;
    }

    fn transmit(&mut self, from: usize, to: usize, frame: LinkFrame) {
        assert!(
            self.route_back_at[from].is_none(),
            "a link without a route transmits nothing"
        );
        self.transmitted_frames += 1;
        let copies = match self.rng.below(1000) {
            roll if roll < self.faults.loss => 0,
            roll if roll < self.faults.loss + self.faults.duplication => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let extra = if self.rng.below(1000) < self.faults.reordering {
                self.rng.below(3000)
            } else {
                0
            };
            self.serial += 1;
            self.in_flight.insert(
                (self.now + Micros(100 + extra), self.serial),
                (from, to, frame.clone()),
            );
        }
    }

    /// Removes a task's route. In half of the cases the frames in flight to the task are lost (a
    /// migration), otherwise they are kept (a broken route).
    fn take_route_down(&mut self, task: usize) {
        if self.route_back_at[task].is_some() {
            return;
        }
        self.route_back_at[task] = Some(self.now + Micros(self.rng.below(200_000)));
        for link in &mut self.links[task] {
            link.handle(self.now, LinkEvent::RouteDown);
        }
        if self.rng.below(2) == 0 {
            self.in_flight.retain(|_, (_, to, _)| *to != task);
        }
    }

    fn bring_route_up(&mut self, task: usize) {
        self.route_back_at[task] = None;
        self.routes += 1;
        let (now, route) = (self.now, RouteId(self.routes));
        for link in &mut self.links[task] {
            link.handle(now, LinkEvent::RouteUp(route));
        }
        for peer in 0..self.tids.len() {
            self.links[peer][task].handle(now, LinkEvent::PeerMigrated);
            self.deliver_and_transmit(peer);
        }
    }

    /// Advances the time to the next event and processes it. Returns false if there is no event.
    fn step(&mut self) -> bool {
        if self.rng.below(1000) < self.faults.migrations {
            let task = self.rng.below(self.tids.len() as u64) as usize;
            self.take_route_down(task);
        }
        let arrival = self.in_flight.keys().next().map(|(at, _)| *at);
        let back = self.route_back_at.iter().flatten().min().copied();
        let timer = self
            .links
            .iter()
            .flatten()
            .filter_map(Link::next_wakeup)
            .min();
        let Some(at) = [arrival, back, timer].into_iter().flatten().min() else {
            return false;
        };
        self.now = self.now.max(at);
        if arrival == Some(at) {
            let (_, (from, to, frame)) = self.in_flight.pop_first().expect("just seen");
            if self.route_back_at[to].is_none() && frame.payload.len() > FRAGMENT_BYTES_MAX {
                self.links[to][from].handle_whole_message(
                    self.now,
                    frame.seq,
                    frame.ack,
                    frame.payload,
                );
                self.deliver_and_transmit(to);
            } else if self.route_back_at[to].is_none() {
                let wire = [&frame.encode_head()[..], &frame.payload].concat();
                let frame = LinkFrame::decode(wire.into()).expect("our own encoding");
                self.links[to][from].handle(self.now, LinkEvent::Frame(frame));
                self.deliver_and_transmit(to);
            }
        } else if back == Some(at) {
            let task = self
                .route_back_at
                .iter()
                .position(|t| *t == Some(at))
                .expect("just seen");
            self.bring_route_up(task);
        } else {
            for a in 0..self.tids.len() {
                for b in 0..self.tids.len() {
                    if self.links[a][b].next_wakeup().is_some_and(|t| t <= at) {
                        self.links[a][b].handle(self.now, LinkEvent::Wake);
                    }
                }
                self.deliver_and_transmit(a);
            }
        }
        true
    }

    fn settle(&mut self) {
        self.faults.migrations = 0;
        for _ in 0..20_000_000 {
            for a in 0..self.tids.len() {
                if self.route_back_at[a].is_none() {
                    self.deliver_and_transmit(a);
                }
            }
            if self.sent == self.received && self.links.iter().flatten().all(Link::is_all_acked) {
                return self.assert_becomes_silent();
            }
            assert!(
                self.step(),
                "everything sleeps although messages are missing"
            );
        }
        panic!("the links do not come to rest");
    }

    /// Asserts that links without unacknowledged messages stop transmitting.
    fn assert_becomes_silent(&mut self) {
        for _ in 0..100_000 {
            for a in 0..self.tids.len() {
                if self.route_back_at[a].is_none() {
                    self.deliver_and_transmit(a);
                }
            }
            if !self.step() {
                return;
            }
        }
        panic!("links that owe each other nothing go on talking");
    }

    fn message_count(&self) -> u64 {
        self.received.iter().flatten().sum()
    }
}

fn run_network(seed: u64, tasks: usize, faults: FaultRates, messages: u64) -> Network {
    let mut network = Network::new(seed, tasks, faults);
    for _ in 0..messages {
        network.send_random();
        if network.rng.below(4) > 0 {
            for a in 0..tasks {
                if network.route_back_at[a].is_none() {
                    network.deliver_and_transmit(a);
                }
            }
            network.step();
        }
    }
    network.settle();
    network
}

/// A million messages arrive once and in order despite loss, duplication, reordering and
/// migrations.
#[test]
fn million_messages_arrive_once_in_order() {
    let (mut messages, mut wholes, mut seed) = (0, 0, 0);
    while messages < 1_000_000 {
        seed += 1;
        let network = run_network(seed, 2 + (seed % 4) as usize, MODERATE_FAULTS, 10_000);
        (messages, wholes) = (
            messages + network.message_count(),
            wholes + network.whole_messages,
        );
    }
    assert!(wholes > 100, "messages in one piece, too: {wholes}");
}

#[test]
fn heavy_faults_only_delay_messages() {
    for seed in 1..20 {
        run_network(seed, 2 + (seed % 4) as usize, HEAVY_FAULTS, 5_000);
    }
}

#[test]
fn reliable_routes_need_no_retransmission() {
    let mut network = Network::new(1, 2, NO_FAULTS);
    for _ in 0..1000 {
        network.send(0, 1, 10);
    }
    network.settle();
    // Number of acknowledgements: at least two, and at most one per eighth of the window and one
    // per delay.
    assert!(
        (1002..1010).contains(&network.transmitted_frames),
        "{}",
        network.transmitted_frames
    );
}

/// Two tasks that each send a gigabyte before they receive do not block each other.
#[test]
fn mutual_bulk_senders_do_not_deadlock() {
    let mut network = Network::new(1, 2, NO_FAULTS);
    let piece: Bytes = vec![7; 16 << 20].into();
    for (a, b) in [(0, 1), (1, 0)] {
        for _ in 0..64 {
            network.links[a][b]
                .send(Bytes::new(), piece.clone())
                .expect("below the limit");
        }
    }
    let mut delivered = 0;
    while delivered < 128 {
        for a in 0..2 {
            let b = 1 - a;
            while let Some(output) = network.links[a][b].poll(network.now) {
                match output {
                    LinkOutput::Deliver(bytes) => {
                        assert_eq!(bytes.len(), 16 << 20);
                        delivered += 1;
                    }
                    LinkOutput::Transmit(frame) => network.transmit(a, b, frame),
                }
            }
        }
        let in_the_air: usize = network
            .in_flight
            .values()
            .map(|(.., f)| f.payload.len())
            .sum();
        assert!(
            in_the_air <= 2 * (WINDOW_BYTES_MAX + FRAGMENT_BYTES_MAX),
            "the window bounds what daemons hold"
        );
        if let Some((key, (from, to, frame))) = network.in_flight.pop_first() {
            network.now = network.now.max(key.0);
            network.links[to][from].handle(network.now, LinkEvent::Frame(frame));
        }
    }
}

#[test]
fn window_bounds_fragments_and_bytes() {
    let mut link = Link::new(Tid::from_raw(0x40001), Tid::from_raw(0x40002));
    link.handle(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    for _ in 0..2 * WINDOW_FRAGMENTS_MAX {
        link.send(Bytes::from_static(b"x"), Bytes::new())
            .expect("below the limit");
    }
    let mut sent = 0;
    while link.poll(Micros(0)).is_some() {
        sent += 1;
    }
    assert_eq!(sent, WINDOW_FRAGMENTS_MAX);
    link.disable_window();
    while link.poll(Micros(0)).is_some() {
        sent += 1;
    }
    assert_eq!(
        sent,
        2 * WINDOW_FRAGMENTS_MAX,
        "a task that ends hands everything over"
    );
    assert!(link.is_all_transmitted() && !link.is_all_acked());
}

#[test]
fn answered_probe_is_not_sent() {
    let (a, b) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
    let mut link = Link::new(a, b);
    link.handle(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    link.send(Bytes::from_static(b"x"), Bytes::new())
        .expect("below the limit");
    assert!(matches!(
        link.poll(Micros(0)),
        Some(LinkOutput::Transmit(_))
    ));
    // The link would send a probe next, but the acknowledgement arrives before the probe is sent.
    link.handle(Micros(1), LinkEvent::RouteUp(RouteId(2)));
    let ack = LinkFrame {
        src: b,
        dst: a,
        kind: LinkKind::Ack { resync: false },
        seq: 0,
        ack: 2,
        incarnation: 0,
        payload: Bytes::new(),
    };
    link.handle(Micros(2), LinkEvent::Frame(ack));
    assert_eq!((link.poll(Micros(3)), link.next_wakeup()), (None, None));
}

#[test]
fn messages_to_ended_peer_are_dropped() {
    let mut link = Link::new(Tid::from_raw(0x40001), Tid::from_raw(0x40002));
    link.handle(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    link.send(Bytes::from_static(b"x"), Bytes::new())
        .expect("below the limit");
    link.handle(Micros(1), LinkEvent::PeerGone);
    link.send(Bytes::from_static(b"y"), Bytes::new())
        .expect("it vanishes");
    assert_eq!(link.poll(Micros(2)), None);
    assert_eq!((link.retained_bytes(), link.next_wakeup()), (0, None));
}

#[test]
fn foreign_frames_and_future_acks_are_ignored() {
    let (a, b, c) = (
        Tid::from_raw(0x40001),
        Tid::from_raw(0x40002),
        Tid::from_raw(0x40003),
    );
    let mut link = Link::new(a, b);
    link.handle(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    link.send(Bytes::from_static(b"x"), Bytes::new())
        .expect("below the limit");
    assert!(matches!(
        link.poll(Micros(0)),
        Some(LinkOutput::Transmit(_))
    ));
    let frame = |src, kind, seq, ack| LinkFrame {
        src,
        dst: a,
        kind,
        seq,
        ack,
        incarnation: 0,
        payload: Bytes::from_static(b"?"),
    };
    link.handle(
        Micros(1),
        LinkEvent::Frame(frame(c, LinkKind::Data { last: true }, 1, 1)),
    );
    link.handle(
        Micros(1),
        LinkEvent::Frame(frame(b, LinkKind::Ack { resync: true }, 0, 99)),
    );
    assert_eq!(link.poll(Micros(1)), None);
    assert!(!link.is_all_acked(), "the message is still kept");
}
