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
    SmallFrame, WINDOW_BYTES_MAX, WINDOW_FRAGMENTS_MAX,
};
use sempa_proto::{Micros, RouteId, Tid};
use std::collections::BTreeMap;

/// Fault rates of the network, per thousand.
#[derive(Clone, Copy, Debug)]
struct FaultRates {
    loss_permille: u64,
    duplication_permille: u64,
    reordering_permille: u64,
    /// Probability, at each step, that a task migrates or temporarily loses its route.
    route_loss_permille: u64,
}

const NO_FAULTS: FaultRates = FaultRates {
    loss_permille: 0,
    duplication_permille: 0,
    reordering_permille: 0,
    route_loss_permille: 0,
};
const MODERATE_FAULTS: FaultRates = FaultRates {
    loss_permille: 5,
    duplication_permille: 10,
    reordering_permille: 10,
    route_loss_permille: 4,
};
const HEAVY_FAULTS: FaultRates = FaultRates {
    loss_permille: 30,
    duplication_permille: 30,
    reordering_permille: 60,
    route_loss_permille: 4,
};

struct Network {
    rng: Rng,
    fault_rates: FaultRates,
    now: Micros,
    tids: Vec<Tid>,
    /// `links[a][b]` is task `a`'s end of its link to task `b`.
    links: Vec<Vec<Link>>,
    /// For each task, the time at which it gets its next route; `None` if it has a route.
    next_route_at: Vec<Option<Micros>>,
    route_count: u64,
    frames_in_flight: BTreeMap<(Micros, u64), (usize, usize, LinkFrame)>,
    last_serial: u64,
    sent_counts: Vec<Vec<u64>>,
    received_counts: Vec<Vec<u64>>,
    transmitted_frames: u64,
    whole_messages: u64,
}

fn build_message(sender: usize, receiver: usize, number: u64, len: usize) -> (Bytes, Bytes) {
    let mut head = Vec::with_capacity(24);
    for field in [sender as u64, receiver as u64, number] {
        head.extend_from_slice(&field.to_le_bytes());
    }
    let body: Vec<u8> = (0..len)
        .map(|i| (number as usize).wrapping_mul(31).wrapping_add(i * 7) as u8)
        .collect();
    (head.into(), body.into())
}

impl Network {
    fn new(seed: u64, task_count: usize, fault_rates: FaultRates) -> Self {
        let tids: Vec<Tid> = (1..=task_count as i32)
            .map(|i| Tid::from_raw(0x40000 + i))
            .collect();
        let mut links: Vec<Vec<Link>> = tids
            .iter()
            .map(|a| tids.iter().map(|b| Link::new(*a, *b)).collect())
            .collect();
        for link in links.iter_mut().flatten() {
            link.handle_event(Micros(0), LinkEvent::RouteUp(RouteId(0)));
        }
        Self {
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            fault_rates,
            now: Micros(0),
            links,
            next_route_at: vec![None; task_count],
            route_count: 0,
            frames_in_flight: BTreeMap::new(),
            last_serial: 0,
            sent_counts: vec![vec![0; task_count]; task_count],
            received_counts: vec![vec![0; task_count]; task_count],
            transmitted_frames: 0,
            whole_messages: 0,
            tids,
        }
    }

    fn send(&mut self, sender: usize, receiver: usize, len: usize) {
        let number = self.sent_counts[sender][receiver];
        self.sent_counts[sender][receiver] += 1;
        let (head, body) = build_message(sender, receiver, number, len);
        if body.len() <= INLINE_BODY_BYTES_MAX && self.rng.below(2) == 0 {
            let link = &mut self.links[sender][receiver];
            if let Some(SmallFrame { seq, ack }) = link.try_send_small(self.now, &head, &body) {
                let frame = LinkFrame {
                    src: self.tids[sender],
                    dst: self.tids[receiver],
                    kind: LinkKind::Data { is_last: true },
                    seq,
                    ack,
                    incarnation: link.incarnation(),
                    payload: [&head[..], &body].concat().into(),
                };
                return self.transmit(sender, receiver, frame);
            }
        }
        self.links[sender][receiver]
            .send(head, body)
            .expect("far below the limit");
    }

    /// Sends a message between two random tasks: usually small, sometimes with several fragments.
    fn send_random(&mut self) {
        let task_count = self.tids.len() as u64;
        let sender = self.rng.below(task_count) as usize;
        let receiver = ((sender as u64 + 1 + self.rng.below(task_count - 1)) % task_count) as usize;
        let len = match self.rng.below(2000) {
            0 => self.rng.below(4 * FRAGMENT_BYTES_MAX as u64),
            1..6 => FRAGMENT_BYTES_MAX as u64 - 24 + self.rng.below(3) - 1,
            _ => self.rng.below(100),
        };
        self.send(sender, receiver, len as usize);
    }

    fn deliver_and_transmit(&mut self, task_index: usize) {
        for peer_index in 0..self.tids.len() {
            self.send_whole_messages(task_index, peer_index);
            while let Some(output) = self.links[task_index][peer_index].poll(self.now) {
                match output {
                    LinkOutput::Deliver(bytes) => {
                        self.check_received(peer_index, task_index, bytes)
                    }
                    LinkOutput::Transmit(frame) => self.transmit(task_index, peer_index, frame),
                }
                self.send_whole_messages(task_index, peer_index);
            }
        }
    }

    /// Sends, with probability one half, the next message of several fragments as a whole message,
    /// in one frame that is larger than a fragment. Returns when no such message is next, or when
    /// the message must be sent in fragments.
    fn send_whole_messages(&mut self, sender: usize, receiver: usize) {
        while let Some((head, body)) =
            self.links[sender][receiver].next_whole_message(FRAGMENT_BYTES_MAX)
        {
            let payload: Bytes = [head, body].concat().into();
            if self.rng.below(2) == 0 {
                return;
            }
            let (src, dst) = (self.tids[sender], self.tids[receiver]);
            let (seq, ack) = self.links[sender][receiver].mark_whole_message_sent(self.now);
            self.whole_messages += 1;
            self.transmit(
                sender,
                receiver,
                LinkFrame {
                    src,
                    dst,
                    kind: LinkKind::Data { is_last: true },
                    seq,
                    ack,
                    incarnation: 0,
                    payload,
                },
            );
        }
    }

    fn check_received(&mut self, sender: usize, receiver: usize, bytes: Bytes) {
        let number = self.received_counts[sender][receiver];
        let (head, body) = build_message(sender, receiver, number, bytes.len() - 24);
        assert_eq!(
            &bytes[..24],
            &head[..],
            "order, and no loss or double, from {sender} to {receiver}"
        );
        assert!(
            bytes[24..] == body[..],
            "content from {sender} to {receiver}"
        );
        self.received_counts[sender][receiver] += 1;
    }

    fn transmit(&mut self, sender: usize, receiver: usize, frame: LinkFrame) {
        assert!(
            self.next_route_at[sender].is_none(),
            "a link without a route transmits nothing"
        );
        self.transmitted_frames += 1;
        let copy_count = match self.rng.below(1000) {
            roll if roll < self.fault_rates.loss_permille => 0,
            roll if roll
                < self.fault_rates.loss_permille + self.fault_rates.duplication_permille =>
            {
                2
            }
            _ => 1,
        };
        for _ in 0..copy_count {
            let extra_delay_us = if self.rng.below(1000) < self.fault_rates.reordering_permille {
                self.rng.below(3000)
            } else {
                0
            };
            self.last_serial += 1;
            self.frames_in_flight.insert(
                (self.now + Micros(100 + extra_delay_us), self.last_serial),
                (sender, receiver, frame.clone()),
            );
        }
    }

    /// Removes a task's route. In half of the cases the frames in flight to the task are lost (a
    /// migration), otherwise they remain in flight (a broken route).
    fn remove_route(&mut self, task: usize) {
        if self.next_route_at[task].is_some() {
            return;
        }
        self.next_route_at[task] = Some(self.now + Micros(self.rng.below(200_000)));
        for link in &mut self.links[task] {
            link.handle_event(self.now, LinkEvent::RouteDown);
        }
        if self.rng.below(2) == 0 {
            self.frames_in_flight
                .retain(|_, (_, receiver, _)| *receiver != task);
        }
    }

    fn add_route(&mut self, task: usize) {
        self.next_route_at[task] = None;
        self.route_count += 1;
        let (now, route) = (self.now, RouteId(self.route_count));
        for link in &mut self.links[task] {
            link.handle_event(now, LinkEvent::RouteUp(route));
        }
        for peer in 0..self.tids.len() {
            self.links[peer][task].handle_event(now, LinkEvent::PeerMigrated);
            self.deliver_and_transmit(peer);
        }
    }

    /// Advances the time to the next event and processes it. Returns false if there is no event.
    fn process_next_event(&mut self) -> bool {
        if self.rng.below(1000) < self.fault_rates.route_loss_permille {
            let task = self.rng.below(self.tids.len() as u64) as usize;
            self.remove_route(task);
        }
        let arrival_time = self
            .frames_in_flight
            .keys()
            .next()
            .map(|(event_time, _)| *event_time);
        let route_time = self.next_route_at.iter().flatten().min().copied();
        let wakeup_time = self
            .links
            .iter()
            .flatten()
            .filter_map(Link::next_wakeup)
            .min();
        let Some(event_time) = [arrival_time, route_time, wakeup_time]
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
            if self.next_route_at[receiver].is_none() && frame.payload.len() > FRAGMENT_BYTES_MAX {
                // Header and body arrive apart.
                let mut body = frame.payload;
                let head = body.split_to(24);
                self.links[receiver][sender].handle_whole_message(
                    self.now,
                    (frame.seq, frame.ack),
                    head,
                    body,
                );
                self.deliver_and_transmit(receiver);
            } else if self.next_route_at[receiver].is_none() {
                let encoded_frame = [&frame.encode_head()[..], &frame.payload].concat();
                let frame = LinkFrame::decode(encoded_frame.into()).expect("our own encoding");
                self.links[receiver][sender].handle_event(self.now, LinkEvent::Frame(frame));
                self.deliver_and_transmit(receiver);
            }
        } else if route_time == Some(event_time) {
            let task = self
                .next_route_at
                .iter()
                .position(|t| *t == Some(event_time))
                .expect("just seen");
            self.add_route(task);
        } else {
            for a in 0..self.tids.len() {
                for b in 0..self.tids.len() {
                    if self.links[a][b]
                        .next_wakeup()
                        .is_some_and(|t| t <= event_time)
                    {
                        self.links[a][b].handle_event(self.now, LinkEvent::Wake);
                    }
                }
                self.deliver_and_transmit(a);
            }
        }
        true
    }

    fn run_until_all_acked(&mut self) {
        self.fault_rates.route_loss_permille = 0;
        for _ in 0..20_000_000 {
            for a in 0..self.tids.len() {
                if self.next_route_at[a].is_none() {
                    self.deliver_and_transmit(a);
                }
            }
            if self.sent_counts == self.received_counts
                && self.links.iter().flatten().all(Link::is_all_acked)
            {
                return self.assert_becomes_silent();
            }
            assert!(
                self.process_next_event(),
                "everything sleeps although messages are missing"
            );
        }
        panic!("the links do not come to rest");
    }

    /// Asserts that links without unacknowledged messages stop transmitting.
    fn assert_becomes_silent(&mut self) {
        for _ in 0..100_000 {
            for a in 0..self.tids.len() {
                if self.next_route_at[a].is_none() {
                    self.deliver_and_transmit(a);
                }
            }
            if !self.process_next_event() {
                return;
            }
        }
        panic!("links that owe each other nothing go on talking");
    }

    fn received_message_count(&self) -> u64 {
        self.received_counts.iter().flatten().sum()
    }
}

fn run_network(
    seed: u64,
    task_count: usize,
    fault_rates: FaultRates,
    message_count: u64,
) -> Network {
    let mut network = Network::new(seed, task_count, fault_rates);
    for _ in 0..message_count {
        network.send_random();
        if network.rng.below(4) > 0 {
            for a in 0..task_count {
                if network.next_route_at[a].is_none() {
                    network.deliver_and_transmit(a);
                }
            }
            network.process_next_event();
        }
    }
    network.run_until_all_acked();
    network
}

/// A million messages arrive once and in order despite loss, duplication, reordering and
/// migrations.
#[test]
fn million_messages_arrive_once_in_order() {
    let (mut message_count, mut whole_messages, mut seed) = (0, 0, 0);
    while message_count < 1_000_000 {
        seed += 1;
        let network = run_network(seed, 2 + (seed % 4) as usize, MODERATE_FAULTS, 10_000);
        (message_count, whole_messages) = (
            message_count + network.received_message_count(),
            whole_messages + network.whole_messages,
        );
    }
    assert!(
        whole_messages > 100,
        "messages in one piece, too: {whole_messages}"
    );
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
    network.run_until_all_acked();
    // The frames that are not data are acknowledgements: at least two, and at most one per eighth
    // of the window and one per acknowledgement delay.
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
    let large_body: Bytes = vec![7; 16 << 20].into();
    for (a, b) in [(0, 1), (1, 0)] {
        for _ in 0..64 {
            network.links[a][b]
                .send(Bytes::new(), large_body.clone())
                .expect("below the limit");
        }
    }
    let mut delivered_count = 0;
    while delivered_count < 128 {
        for a in 0..2 {
            let b = 1 - a;
            while let Some(output) = network.links[a][b].poll(network.now) {
                match output {
                    LinkOutput::Deliver(bytes) => {
                        assert_eq!(bytes.len(), 16 << 20);
                        delivered_count += 1;
                    }
                    LinkOutput::Transmit(frame) => network.transmit(a, b, frame),
                }
            }
        }
        let in_flight_bytes: usize = network
            .frames_in_flight
            .values()
            .map(|(.., f)| f.payload.len())
            .sum();
        assert!(
            in_flight_bytes <= 2 * (WINDOW_BYTES_MAX + FRAGMENT_BYTES_MAX),
            "the window bounds what daemons hold"
        );
        if let Some((key, (sender, receiver, frame))) = network.frames_in_flight.pop_first() {
            network.now = network.now.max(key.0);
            network.links[receiver][sender].handle_event(network.now, LinkEvent::Frame(frame));
        }
    }
}

#[test]
fn window_bounds_fragments_and_bytes() {
    let mut link = Link::new(Tid::from_raw(0x40001), Tid::from_raw(0x40002));
    link.handle_event(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    for _ in 0..2 * WINDOW_FRAGMENTS_MAX {
        link.send(Bytes::from_static(b"x"), Bytes::new())
            .expect("below the limit");
    }
    let mut transmitted_count = 0;
    while link.poll(Micros(0)).is_some() {
        transmitted_count += 1;
    }
    assert_eq!(transmitted_count, WINDOW_FRAGMENTS_MAX);
    link.disable_window();
    while link.poll(Micros(0)).is_some() {
        transmitted_count += 1;
    }
    assert_eq!(
        transmitted_count,
        2 * WINDOW_FRAGMENTS_MAX,
        "a task that ends hands everything over"
    );
    assert!(link.is_all_transmitted() && !link.is_all_acked());
}

#[test]
fn answered_probe_is_not_sent() {
    let (a, b) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
    let mut link = Link::new(a, b);
    link.handle_event(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    link.send(Bytes::from_static(b"x"), Bytes::new())
        .expect("below the limit");
    assert!(matches!(
        link.poll(Micros(0)),
        Some(LinkOutput::Transmit(_))
    ));
    // The link would send a probe next, but the acknowledgement arrives before the probe is sent.
    link.handle_event(Micros(1), LinkEvent::RouteUp(RouteId(2)));
    let ack = LinkFrame {
        src: b,
        dst: a,
        kind: LinkKind::Ack {
            requests_resync: false,
        },
        seq: 0,
        ack: 2,
        incarnation: 0,
        payload: Bytes::new(),
    };
    link.handle_event(Micros(2), LinkEvent::Frame(ack));
    assert_eq!((link.poll(Micros(3)), link.next_wakeup()), (None, None));
}

#[test]
fn messages_to_ended_peer_are_dropped() {
    let mut link = Link::new(Tid::from_raw(0x40001), Tid::from_raw(0x40002));
    link.handle_event(Micros(0), LinkEvent::RouteUp(RouteId(1)));
    link.send(Bytes::from_static(b"x"), Bytes::new())
        .expect("below the limit");
    link.handle_event(Micros(1), LinkEvent::PeerGone);
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
    link.handle_event(Micros(0), LinkEvent::RouteUp(RouteId(1)));
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
    link.handle_event(
        Micros(1),
        LinkEvent::Frame(frame(c, LinkKind::Data { is_last: true }, 1, 1)),
    );
    link.handle_event(
        Micros(1),
        LinkEvent::Frame(frame(
            b,
            LinkKind::Ack {
                requests_resync: true,
            },
            0,
            99,
        )),
    );
    assert_eq!(link.poll(Micros(1)), None);
    assert!(!link.is_all_acked(), "the message is still kept");
}
