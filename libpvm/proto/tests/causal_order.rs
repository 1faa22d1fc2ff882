//! Simulates tasks that exchange messages through rings and through a network, and checks at every
//! receive that all earlier messages to the same task were received before.
//!
//! The simulated rings show a message at once to a reader that looks at them; the simulated network
//! delays each link on its own. Looks are interleaved with the steps of the other tasks. Tasks
//! migrate (their rings end) and are killed (what they have not transmitted is lost).

mod rng;

use rng::Rng;
use sempa_proto::Tid;
use sempa_proto::causal::{CausalOrder, OrderMessage, Position};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Number of messages that a simulated ring can hold.
const RING_CAPACITY: usize = 3;

/// A message of a program, with everything that its sender knew when it was sent.
#[derive(Clone, Debug)]
struct Message {
    id: usize,
    past: BTreeSet<usize>,
}

#[derive(Clone, Debug)]
enum Content {
    Program { stamp: u64, message: Message },
    Order(OrderMessage),
}

#[derive(Clone, Debug)]
struct Fragment {
    end_seq: u64,
    content: Content,
}

/// One direction of a link: from its sender to its receiver.
#[derive(Debug, Default)]
struct Direction {
    queued_end_seq: u64,
    /// Not transmitted yet, in the sender's memory.
    backlog: VecDeque<Fragment>,
    network: VecDeque<Fragment>,
    ring: VecDeque<Fragment>,
    has_ring: bool,
    /// Acknowledgements on their way to the sender.
    acks: VecDeque<u64>,
    acked_end_seq: u64,
    received_end_seq: u64,
}

struct Task {
    host: usize,
    order: CausalOrder<Message>,
    /// Messages in this task's past, sent by any task.
    known: BTreeSet<usize>,
    received: BTreeSet<usize>,
    has_ended: bool,
    /// Tasks whose end this task has not been told yet.
    untold_ends: BTreeSet<usize>,
}

struct World {
    rng: Rng,
    tasks: Vec<Task>,
    directions: BTreeMap<(usize, usize), Direction>,
    /// Receiver of each message, and whether the message may be lost.
    receivers: Vec<usize>,
    lost: BTreeSet<usize>,
    held_count_max: usize,
    /// Tasks in the middle of a look; they take no other step.
    busy_tasks: BTreeSet<usize>,
    uses_rings: bool,
}

fn tid(task: usize) -> Tid {
    Tid::from_raw(0x40001 + task as i32)
}

fn task_of(tid: Tid) -> usize {
    (tid.raw() - 0x40001) as usize
}

impl World {
    fn new(seed: u64, task_count: usize, host_count: usize, uses_rings: bool) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let tasks = (0..task_count)
            .map(|task| Task {
                host: rng.below(host_count as u64) as usize,
                order: CausalOrder::new(tid(task), 0),
                known: BTreeSet::new(),
                received: BTreeSet::new(),
                has_ended: false,
                untold_ends: BTreeSet::new(),
            })
            .collect();
        Self {
            rng,
            tasks,
            directions: BTreeMap::new(),
            receivers: Vec::new(),
            lost: BTreeSet::new(),
            held_count_max: 0,
            busy_tasks: BTreeSet::new(),
            uses_rings,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }

    fn direction(&mut self, from: usize, to: usize) -> &mut Direction {
        self.directions.entry((from, to)).or_insert(Direction {
            queued_end_seq: 1,
            received_end_seq: 1,
            acked_end_seq: 1,
            ..Direction::default()
        })
    }

    fn position(end_seq: u64) -> Position {
        Position {
            incarnation: 0,
            end_seq,
        }
    }

    // ---- sending

    fn send(&mut self, from: usize, to: usize) {
        let id = self.receivers.len();
        self.receivers.push(to);
        let past = self.tasks[from].known.clone();
        self.send_copy(from, to, Message { id, past });
        self.tasks[from].known.insert(id);
    }

    fn multicast(&mut self, from: usize, receivers: &[usize]) {
        let past = self.tasks[from].known.clone();
        self.tasks[from].order.begin_multicast();
        for to in receivers {
            let id = self.receivers.len();
            self.receivers.push(*to);
            let message = Message {
                id,
                past: past.clone(),
            };
            self.send_copy(from, *to, message);
            self.tasks[from].known.insert(id);
        }
        self.tasks[from].order.end_multicast();
    }

    fn send_copy(&mut self, from: usize, to: usize, message: Message) {
        if self.tasks[to].has_ended {
            self.lost.insert(message.id);
        }
        if let Some(list) = self.tasks[from].order.list_for(tid(to)) {
            self.queue(from, to, Content::Order(list));
        }
        let stamp = self.tasks[from].order.next_stamp();
        self.queue(from, to, Content::Program { stamp, message });
        self.transmit(from, to);
        self.record_sent(from, to);
    }

    fn record_sent(&mut self, from: usize, to: usize) {
        let direction = self.direction(from, to);
        let end_seq = direction.queued_end_seq;
        let is_visible = direction.has_ring && direction.backlog.is_empty();
        self.tasks[from]
            .order
            .record_sent(tid(to), Self::position(end_seq), is_visible);
    }

    fn queue(&mut self, from: usize, to: usize, content: Content) {
        let direction = self.direction(from, to);
        direction.queued_end_seq += 1;
        let end_seq = direction.queued_end_seq;
        direction.backlog.push_back(Fragment { end_seq, content });
    }

    /// Moves the backlog to the route, as far as the route has space.
    fn transmit(&mut self, from: usize, to: usize) {
        let direction = self.direction(from, to);
        while let Some(fragment) = direction.backlog.pop_front() {
            if !direction.has_ring {
                direction.network.push_back(fragment);
            } else if direction.ring.len() < RING_CAPACITY {
                direction.ring.push_back(fragment);
            } else {
                direction.backlog.push_front(fragment);
                break;
            }
        }
        self.record_progress(from, to);
    }

    fn record_progress(&mut self, from: usize, to: usize) {
        let direction = self.direction(from, to);
        let is_ring_complete = direction.has_ring && direction.backlog.is_empty();
        let acked = Self::position(direction.acked_end_seq);
        self.tasks[from]
            .order
            .record_progress(tid(to), acked, is_ring_complete);
    }

    // ---- routes

    /// Establishes rings between two tasks of one host. Nothing may be in transit, as between the
    /// offer of a ring and its answer.
    fn open_ring(&mut self, a: usize, b: usize) {
        let is_possible = self.uses_rings
            && a != b
            && self.tasks[a].host == self.tasks[b].host
            && !self.tasks[a].has_ended
            && !self.tasks[b].has_ended
            && self.direction(a, b).network.is_empty()
            && self.direction(b, a).network.is_empty()
            && !self.direction(a, b).has_ring;
        if is_possible {
            for (from, to) in [(a, b), (b, a)] {
                self.direction(from, to).has_ring = true;
                self.transmit(from, to);
            }
        }
    }

    /// Ends the rings between two tasks. Each reads what the other has written.
    fn close_ring(&mut self, a: usize, b: usize) {
        if !self.direction(a, b).has_ring {
            return;
        }
        for (from, to) in [(a, b), (b, a)] {
            self.direction(from, to).has_ring = false;
            self.read_ring(from, to);
        }
        for (from, to) in [(a, b), (b, a)] {
            if !self.tasks[from].has_ended {
                self.transmit(from, to);
            }
        }
    }

    fn migrate(&mut self, task: usize, host: usize) {
        for peer in 0..self.tasks.len() {
            if peer != task {
                self.close_ring(task, peer);
            }
        }
        self.complete_looks(task);
        self.tasks[task].host = host;
    }

    /// Kills a task: what is in its memory is lost, what it has transmitted is not.
    fn kill(&mut self, task: usize) {
        self.tasks[task].has_ended = true;
        for peer in 0..self.tasks.len() {
            if peer == task {
                continue;
            }
            self.close_ring(task, peer);
            let backlog = std::mem::take(&mut self.direction(task, peer).backlog);
            self.mark_lost(backlog);
            let direction = self.direction(peer, task);
            let mut unread: Vec<Fragment> = direction.network.drain(..).collect();
            unread.extend(direction.backlog.drain(..));
            self.mark_lost(unread);
            self.tasks[peer].untold_ends.insert(task);
        }
        for (id, receiver) in self.receivers.iter().enumerate() {
            if *receiver == task {
                self.lost.insert(id);
            }
        }
    }

    fn mark_lost(&mut self, fragments: impl IntoIterator<Item = Fragment>) {
        for fragment in fragments {
            if let Content::Program { message, .. } = fragment.content {
                self.lost.insert(message.id);
            }
        }
    }

    /// Tells a task that another one has ended, once everything of that task has arrived.
    fn tell_end(&mut self, task: usize, ended_task: usize) {
        if self.direction(ended_task, task).network.is_empty()
            && self.tasks[task].untold_ends.remove(&ended_task)
        {
            self.tasks[task].order.handle_peer_end(tid(ended_task));
            self.finish_accept(task);
        }
    }

    // ---- receiving

    fn receive_from_network(&mut self, from: usize, to: usize) {
        let Some(fragment) = self.direction(from, to).network.pop_front() else {
            return;
        };
        // A ring is read before anything that arrives on another route.
        self.read_ring(from, to);
        self.accept(from, to, fragment);
        let direction = self.direction(from, to);
        direction.acks.push_back(direction.received_end_seq);
        self.finish_accept(to);
    }

    fn accept(&mut self, from: usize, to: usize, fragment: Fragment) {
        let Fragment { end_seq, content } = fragment;
        let received = &mut self.direction(from, to).received_end_seq;
        assert_eq!(*received + 1, end_seq, "the link keeps the order");
        *received = end_seq;
        if self.tasks[to].has_ended {
            return;
        }
        let (order, position) = (&mut self.tasks[to].order, Self::position(end_seq));
        match content {
            Content::Program { stamp, message } => {
                order.accept_message(tid(from), position, stamp, message)
            }
            Content::Order(message) => order.accept_order_message(tid(from), position, message),
        }
        self.record_progress(to, from);
        self.held_count_max = self.held_count_max.max(self.tasks[to].order.held_count());
    }

    fn receive_ack(&mut self, from: usize, to: usize) {
        let direction = self.direction(from, to);
        if let Some(ack) = direction.acks.pop_front() {
            direction.acked_end_seq = direction.acked_end_seq.max(ack);
            self.record_progress(from, to);
        }
    }

    fn read_ring(&mut self, from: usize, to: usize) {
        while let Some(fragment) = self.direction(from, to).ring.pop_front() {
            self.accept(from, to, fragment);
        }
        if self.direction(from, to).has_ring {
            self.transmit(from, to);
        }
    }

    fn finish_accept(&mut self, task: usize) {
        while let Some((peer, answer)) = self.tasks[task].order.next_answer() {
            let peer = task_of(peer);
            self.queue(task, peer, Content::Order(answer));
            self.transmit(task, peer);
        }
        self.complete_looks(task);
    }

    /// Looks at the rings of a task until its messages are in order. Other tasks take steps
    /// meanwhile.
    fn complete_looks(&mut self, task: usize) {
        let mut look_count = 0;
        self.busy_tasks.insert(task);
        while self.tasks[task].order.is_waiting_for_look() {
            look_count += 1;
            assert!(look_count < 10_000, "the looks do not end");
            self.tasks[task].order.begin_look();
            let start = self.below(self.tasks.len());
            for offset in 0..self.tasks.len() {
                let peer = (start + offset) % self.tasks.len();
                if peer != task {
                    self.read_ring(peer, task);
                }
                if self.busy_tasks.len() < 3 && self.below(3) == 0 {
                    self.step();
                }
            }
            self.tasks[task].order.end_look();
        }
        self.busy_tasks.remove(&task);
        while let Some((peer, answer)) = self.tasks[task].order.next_answer() {
            let peer = task_of(peer);
            self.queue(task, peer, Content::Order(answer));
            self.transmit(task, peer);
        }
        self.deliver(task);
    }

    fn deliver(&mut self, task: usize) {
        while let Some(message) = self.tasks[task].order.next_delivery() {
            for earlier in &message.past {
                let concerns_task = self.receivers[*earlier] == task;
                assert!(
                    !concerns_task
                        || self.tasks[task].received.contains(earlier)
                        || self.lost.contains(earlier),
                    "task {task} receives message {} before message {earlier}",
                    message.id
                );
            }
            let task = &mut self.tasks[task];
            assert!(task.received.insert(message.id), "received twice");
            task.known.extend(message.past);
            task.known.insert(message.id);
        }
    }

    // ---- steps

    /// Takes one step of any task that is not in the middle of a look.
    fn step(&mut self) {
        let count = self.tasks.len();
        let (a, b) = (self.below(count), self.below(count));
        if a == b || self.busy_tasks.contains(&a) {
            return;
        }
        let is_peer_busy = self.busy_tasks.contains(&b);
        let is_alive = !self.tasks[a].has_ended;
        match self.below(20) {
            0..6 if is_alive => self.send(a, b),
            6 if is_alive => {
                let receivers: Vec<usize> = (0..count).filter(|to| *to != a).collect();
                self.multicast(a, &receivers);
            }
            7..9 if !is_peer_busy => self.open_ring(a, b),
            9 if !is_peer_busy && self.below(4) == 0 => self.close_ring(a, b),
            10..14 if is_alive => self.receive_from_network(b, a),
            14..16 if is_alive => self.receive_ack(a, b),
            16..18 if is_alive => {
                self.read_ring(b, a);
                self.finish_accept(a);
            }
            18 if is_alive => {
                while let Some((peer, list)) = self.tasks[a].order.next_refreshed_list() {
                    let peer = task_of(peer);
                    self.queue(a, peer, Content::Order(list));
                    self.transmit(a, peer);
                    self.record_sent(a, peer);
                }
            }
            19 if is_alive => self.tell_end(a, b),
            _ => {}
        }
    }

    /// Delivers everything that is in transit, and checks that nothing is left.
    fn drain(&mut self) {
        for _ in 0..1000 {
            for to in 0..self.tasks.len() {
                if self.tasks[to].has_ended {
                    continue;
                }
                for from in 0..self.tasks.len() {
                    while from != to && !self.direction(from, to).network.is_empty() {
                        self.receive_from_network(from, to);
                    }
                    if from != to {
                        self.read_ring(from, to);
                        self.receive_ack(to, from);
                        self.tell_end(to, from);
                    }
                }
                self.finish_accept(to);
            }
        }
        for (id, receiver) in self.receivers.iter().enumerate() {
            let task = &self.tasks[*receiver];
            assert!(
                task.has_ended || task.received.contains(&id) || self.lost.contains(&id),
                "message {id} never arrived"
            );
        }
        for task in &self.tasks {
            assert!(
                task.has_ended || !task.order.is_holding_any(),
                "a message is held for ever"
            );
        }
    }
}

/// Runs `step_count` steps and returns the largest number of messages that were held back at once.
fn run(seed: u64, task_count: usize, host_count: usize, uses_rings: bool, faults: bool) -> usize {
    let mut world = World::new(seed, task_count, host_count, uses_rings);
    for _ in 0..400 {
        world.step();
        if faults && world.below(40) == 0 {
            let (task, host) = (world.below(task_count), world.below(host_count));
            if !world.tasks[task].has_ended {
                world.migrate(task, host);
            }
        }
        if faults && world.below(200) == 0 {
            let task = world.below(task_count);
            if !world.tasks[task].has_ended {
                world.kill(task);
            }
        }
    }
    world.drain();
    world.held_count_max
}

/// One host: all messages but the first ones go through rings.
#[test]
fn rings_of_one_host_keep_causal_order() {
    for seed in 0..80 {
        run(seed, 3 + (seed % 4) as usize, 1, true, false);
    }
}

/// Several hosts without rings: every message goes through the network.
#[test]
fn network_keeps_causal_order() {
    let held_counts = (0..80).map(|seed| run(seed, 3 + (seed % 4) as usize, 3, false, false));
    assert!(held_counts.max() > Some(0), "no message was ever held back");
}

/// Several hosts; tasks of one host use rings.
#[test]
fn mixed_routes_keep_causal_order() {
    for seed in 0..80 {
        run(seed, 4 + (seed % 3) as usize, 2, true, false);
    }
}

/// As before, while tasks migrate and are killed.
#[test]
fn migrations_and_kills_keep_causal_order() {
    for seed in 0..120 {
        run(seed, 4 + (seed % 3) as usize, 3, true, true);
    }
}
