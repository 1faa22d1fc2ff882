//! The simulated tasks, links, routes and services.

use super::rng::Rng;
use super::set::Set;
use sempa_proto::causal::{CausalOrder, Mark, MarkKey, OrderMessage, Past, Position};
use sempa_proto::link::{Link, LinkEvent, LinkFrame, LinkKind, ReceivedMessage};
use sempa_proto::{HostId, Micros, RouteId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// Number of frames that a simulated ring can hold.
const RING_CAPACITY: usize = 3;
/// Stands for the daemon as the sender of a notice.
pub(crate) const DAEMON: usize = usize::MAX;
/// Largest number of tasks of a world, with those that were spawned.
const TASKS_MAX: usize = 9;
/// Maximum number of looks before the messages that are in order are delivered.
const LOOKS_MAX: usize = 16;
/// Simulated duration of a step.
const STEP_TIME: Micros = Micros::from_millis(5);

/// A message of a program or a notice of the daemon, with everything that precedes it.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) sender: usize,
    pub(crate) receiver: usize,
    pub(crate) past: Rc<Set>,
}

#[derive(Clone, Debug)]
enum Content {
    Program { stamp: u64, id: usize },
    Order { stamp: u64, message: OrderMessage },
}

/// One direction of a pair of tasks.
#[derive(Debug, Default)]
pub(crate) struct Direction {
    pub(crate) network: VecDeque<LinkFrame>,
    ring: VecDeque<LinkFrame>,
    has_ring: bool,
    /// Number of the first fragment that the receiver has not read from the ring.
    ring_read_seq: u64,
}

impl Direction {
    pub(crate) fn is_empty(&self) -> bool {
        self.network.is_empty() && self.ring.is_empty()
    }
}

#[derive(Clone, Debug)]
pub(crate) enum DaemonItem {
    Past(Past),
    Notice(usize),
}

#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) host: usize,
    pub(crate) job: usize,
    pub(crate) incarnation: u16,
    pub(crate) order: CausalOrder<usize>,
    pub(crate) links: BTreeMap<usize, Link>,
    /// Messages in this task's past, sent by any task.
    pub(crate) known: Set,
    /// Messages that this task has sent. It may know one of an abandoned timeline that it has not.
    pub(crate) sent: Set,
    pub(crate) received: Set,
    /// Messages that a link of this task has accepted.
    pub(crate) accepted: Set,
    /// Marks that the daemon was told.
    pub(crate) daemon_marks: Vec<Mark>,
    pub(crate) daemon_knows_marks: bool,
    pub(crate) daemon_items: VecDeque<DaemonItem>,
    pub(crate) has_ended: bool,
    /// Tasks whose end this task has not been told yet.
    pub(crate) untold_ends: BTreeSet<usize>,
}

/// The group service: a task that uses it learns what all earlier users knew.
#[derive(Default)]
pub(crate) struct Service {
    clock: u64,
    marks_by_task: BTreeMap<usize, Vec<Mark>>,
    known: Set,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) tasks: Vec<Task>,
    pub(crate) directions: BTreeMap<(usize, usize), Direction>,
    pub(crate) messages: Vec<Message>,
    contents: Vec<Content>,
    /// Messages that may never arrive.
    pub(crate) lost: Set,
    /// Messages to tasks that the sender knew to have ended.
    pub(crate) dropped: Set,
    /// Messages for which nobody waits after a restart: those that had arrived at an earlier
    /// process of a restarted task, and those in transit between others.
    pub(crate) rearriving: Set,
    /// Messages that may arrive twice: a restarted task has received them, and its peer has not
    /// learned it.
    pub(crate) repeatable: Set,
    pub(crate) held_count_max: usize,
    /// Tasks in the middle of a look; they take no other step.
    pub(crate) busy_tasks: BTreeSet<usize>,
    pub(crate) service: Service,
    pub(crate) snapshots: BTreeMap<usize, BTreeMap<usize, Task>>,
    pub(crate) last_incarnation: u16,
    pub(crate) now: Micros,
    last_route: RouteId,
    fold_marks_min: usize,
    pub(crate) uses_rings: bool,
    pub(crate) uses_services: bool,
    /// True at the end, when tasks only receive.
    pub(crate) is_draining: bool,
}

pub(crate) fn tid(task: usize) -> Tid {
    Tid::from_raw(0x40001 + task as i32)
}

fn service_tid() -> Tid {
    HostId::MASTER.daemon_tid()
}

fn task_of(tid: Tid) -> usize {
    (tid.raw() - 0x40001) as usize
}

impl World {
    pub(crate) fn new(
        seed: u64,
        task_count: usize,
        host_count: usize,
        job_count: usize,
        fold_marks_min: usize,
    ) -> Self {
        let mut world = Self {
            rng: Rng((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            tasks: Vec::new(),
            directions: BTreeMap::new(),
            messages: Vec::new(),
            contents: Vec::new(),
            lost: Set::default(),
            dropped: Set::default(),
            rearriving: Set::default(),
            repeatable: Set::default(),
            held_count_max: 0,
            busy_tasks: BTreeSet::new(),
            service: Service::default(),
            snapshots: BTreeMap::new(),
            last_incarnation: 0,
            now: Micros(0),
            last_route: RouteId(0),
            fold_marks_min,
            uses_rings: false,
            uses_services: false,
            is_draining: false,
        };
        for task in 0..task_count {
            let host = world.below(host_count);
            world.add_task(host, task % job_count);
        }
        world
    }

    fn add_task(&mut self, host: usize, job: usize) -> usize {
        let task = self.tasks.len();
        let mut order = CausalOrder::new(tid(task), 0);
        order.set_fold_marks_min(self.fold_marks_min);
        self.tasks.push(Task {
            host,
            job,
            incarnation: 0,
            order,
            links: BTreeMap::new(),
            known: Set::default(),
            sent: Set::default(),
            received: Set::default(),
            accepted: Set::default(),
            daemon_marks: Vec::new(),
            daemon_knows_marks: false,
            daemon_items: VecDeque::new(),
            has_ended: false,
            untold_ends: BTreeSet::new(),
        });
        task
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }

    pub(crate) fn is_alive(&self, task: usize) -> bool {
        !self.tasks[task].has_ended
    }

    pub(crate) fn direction(&mut self, from: usize, to: usize) -> &mut Direction {
        self.directions.entry((from, to)).or_default()
    }

    pub(crate) fn link(&mut self, task: usize, peer: usize) -> &mut Link {
        let incarnation = self.tasks[task].incarnation;
        let route = self.last_route.next();
        let links = &mut self.tasks[task].links;
        let is_stale = |link: &Link| link.is_peer_gone() && link.expected_seq() == 1;
        if links.get(&peer).is_some_and(is_stale) {
            links.remove(&peer);
            self.tasks[task].order.forget_peer(tid(peer));
        }
        self.tasks[task].links.entry(peer).or_insert_with(|| {
            let mut link = Link::new(tid(task), tid(peer));
            link.begin_incarnation(incarnation, true);
            link.handle_event(Micros(0), LinkEvent::RouteUp(route));
            link
        })
    }

    pub(crate) fn next_route(&mut self) -> RouteId {
        self.last_route = self.last_route.next();
        self.last_route
    }

    fn position_of(&mut self, task: usize, peer: usize) -> Position {
        let link = self.link(task, peer);
        Position {
            incarnation: link.incarnation(),
            end_seq: link.queued_end_seq(),
        }
    }

    // ---- sending

    fn add_message(&mut self, sender: usize, receiver: usize, past: Rc<Set>) -> usize {
        self.messages.push(Message {
            sender,
            receiver,
            past,
        });
        self.messages.len() - 1
    }

    pub(crate) fn send(&mut self, from: usize, to: usize) {
        let past = Rc::new(self.tasks[from].known.clone());
        self.send_copy(from, to, past);
    }

    pub(crate) fn multicast(&mut self, from: usize, receivers: &[usize]) {
        let past = Rc::new(self.tasks[from].known.clone());
        self.tasks[from].order.begin_multicast();
        for to in receivers {
            self.send_copy(from, *to, past.clone());
        }
        self.tasks[from].order.end_multicast();
    }

    fn send_copy(&mut self, from: usize, to: usize, past: Rc<Set>) {
        let id = self.add_message(from, to, past);
        self.tasks[from].known.insert(id);
        self.tasks[from].sent.insert(id);
        if !self.is_alive(to) {
            self.lost.insert(id);
        }
        if self.link(from, to).is_peer_gone() {
            self.lost.insert(id);
            self.dropped.insert(id);
            return;
        }
        if let Some(list) = self.tasks[from].order.list_for(tid(to)) {
            self.queue_order_message(from, to, list);
        }
        let stamp = self.tasks[from].order.next_stamp();
        self.queue(from, to, Content::Program { stamp, id });
        self.transmit(from, to);
        self.record_sent(from, to);
    }

    fn queue_order_message(&mut self, from: usize, to: usize, message: OrderMessage) {
        let stamp = self.tasks[from].order.list_stamp();
        self.queue(from, to, Content::Order { stamp, message });
    }

    fn queue(&mut self, from: usize, to: usize, content: Content) {
        let index = self.contents.len() as u64;
        self.contents.push(content);
        let sent = self
            .link(from, to)
            .send(index.to_le_bytes(), Vec::new().into());
        sent.expect("the link has space");
    }

    pub(crate) fn record_sent(&mut self, from: usize, to: usize) {
        if self.link(from, to).is_peer_gone() {
            return;
        }
        let position = self.position_of(from, to);
        let has_ring = self.direction(from, to).has_ring;
        let is_visible = has_ring && self.link(from, to).is_all_transmitted();
        let order = &mut self.tasks[from].order;
        order.record_sent(tid(to), position, is_visible);
        if !has_ring && order.wants_prompt_acks() {
            self.link(from, to).request_ack();
            self.transmit(from, to);
        }
    }

    /// Moves frames of the link to the route, as far as the route has space.
    pub(crate) fn transmit(&mut self, from: usize, to: usize) {
        let now = self.now;
        loop {
            let direction = self.direction(from, to);
            if direction.has_ring && direction.ring.len() >= RING_CAPACITY {
                break;
            }
            let has_ring = direction.has_ring;
            let Some(frame) = self.link(from, to).next_frame(now) else {
                break;
            };
            let frame = frame.to_frame();
            let direction = self.direction(from, to);
            match has_ring {
                true => direction.ring.push_back(frame),
                false => direction.network.push_back(frame),
            }
        }
        self.record_progress(from, to);
    }

    fn record_progress(&mut self, from: usize, to: usize) {
        let has_ring = self.direction(from, to).has_ring;
        let link = self.link(from, to);
        let is_ring_complete = has_ring && link.is_all_transmitted() && link.confirms_all();
        let acked = Position {
            incarnation: link.incarnation(),
            end_seq: link.acked_below(),
        };
        self.tasks[from]
            .order
            .record_progress(tid(to), acked, is_ring_complete);
    }

    // ---- routes

    /// Establishes rings between two tasks of one host. Nothing may be in transit, as between the
    /// offer of a ring and its answer.
    pub(crate) fn open_ring(&mut self, a: usize, b: usize) {
        let is_possible = self.uses_rings
            && a != b
            && self.tasks[a].host == self.tasks[b].host
            && self.is_alive(a)
            && self.is_alive(b)
            && !self.link(a, b).is_peer_gone()
            && !self.link(b, a).is_peer_gone()
            && self.link(a, b).incarnation() == self.link(b, a).incarnation()
            && self.direction(a, b).network.is_empty()
            && self.direction(b, a).network.is_empty()
            && !self.direction(a, b).has_ring;
        if is_possible {
            for (from, to) in [(a, b), (b, a)] {
                let (route, now) = (self.next_route(), self.now);
                let direction = self.direction(from, to);
                (direction.has_ring, direction.ring_read_seq) = (true, 0);
                self.link(from, to)
                    .handle_event(now, LinkEvent::ConfirmingRouteUp(route));
                self.transmit(from, to);
            }
        }
    }

    /// Ends the rings between two tasks. Each reads what the other has written.
    pub(crate) fn close_ring(&mut self, a: usize, b: usize) {
        if !self.direction(a, b).has_ring {
            return;
        }
        for (from, to) in [(a, b), (b, a)] {
            self.direction(from, to).has_ring = false;
            self.read_ring(from, to);
        }
        for (from, to) in [(a, b), (b, a)] {
            if self.is_alive(from) {
                let (route, now) = (self.next_route(), self.now);
                self.link(from, to)
                    .handle_event(now, LinkEvent::RouteUp(route));
                self.transmit(from, to);
            }
        }
    }

    pub(crate) fn close_rings_of(&mut self, task: usize) {
        for peer in (0..self.tasks.len()).filter(|peer| *peer != task) {
            self.close_ring(task, peer);
        }
    }

    pub(crate) fn migrate(&mut self, task: usize, host: usize) {
        self.close_rings_of(task);
        self.finish_accept(task);
        self.tasks[task].host = host;
        self.tasks[task].daemon_knows_marks = false;
    }

    /// Lets the sender learn how far its ring was read.
    pub(crate) fn read_receipts(&mut self, from: usize, to: usize) {
        let (now, direction) = (self.now, self.direction(from, to));
        let (has_ring, seq) = (direction.has_ring, direction.ring_read_seq);
        if has_ring {
            self.link(from, to).confirm_received(now, seq);
            self.record_progress(from, to);
        }
    }

    // ---- ends

    /// Kills a task: what is in its memory is lost, what it has transmitted is not.
    pub(crate) fn kill(&mut self, task: usize) {
        self.tasks[task].has_ended = true;
        self.close_rings_of(task);
        let mut in_transit = Set::default();
        for peer in (0..self.tasks.len()).filter(|peer| *peer != task) {
            self.direction(peer, task).network.clear();
            if self.is_alive(peer) {
                self.add_acceptable(task, peer, &mut in_transit);
                if self.below(2) == 0 {
                    self.tasks[peer].untold_ends.insert(task);
                }
            }
        }
        for (id, message) in self.messages.iter().enumerate() {
            let has_arrived = message.receiver < self.tasks.len()
                && self.tasks[message.receiver].accepted.contains(id);
            let is_unsent = message.sender == task && !has_arrived && !in_transit.contains(id);
            if is_unsent || message.receiver == task {
                self.lost.insert(id);
            }
        }
        self.tasks[task].links.clear();
        self.tasks[task].daemon_items.clear();
        for marks in self.service.marks_by_task.values_mut() {
            marks.retain(|mark| mark.receiver != tid(task));
        }
    }

    /// Adds the messages on the way from one task to another that the receiver will accept.
    fn add_acceptable(&mut self, from: usize, to: usize, in_transit: &mut Set) {
        let link = self.link(to, from);
        let mut expected = (link.incarnation(), link.expected_seq());
        let direction = &self.directions[&(from, to)];
        for frame in &direction.network {
            if sempa_proto::link::is_later_incarnation(frame.incarnation, expected.0) {
                expected = (frame.incarnation, 1);
            }
            let is_data = matches!(frame.kind, LinkKind::Data { .. });
            if is_data && (frame.incarnation, frame.seq) == expected {
                expected.1 += 1;
                if let Content::Program { id, .. } = self.contents[content_index(&frame.payload)] {
                    in_transit.insert(id);
                }
            }
        }
    }

    /// Tells a task that another one has ended, once everything of that task has arrived.
    pub(crate) fn tell_end(&mut self, task: usize, ended_task: usize) {
        let is_due = self.direction(ended_task, task).network.is_empty()
            && self.tasks[task].untold_ends.remove(&ended_task);
        if is_due && !self.is_alive(ended_task) {
            let now = self.now;
            if !self.link(task, ended_task).is_peer_gone() {
                self.link(task, ended_task)
                    .handle_event(now, LinkEvent::PeerGone);
            }
            self.tasks[task].order.handle_peer_end(tid(ended_task));
            self.finish_accept(task);
        }
    }

    // ---- receiving

    pub(crate) fn receive_from_network(&mut self, from: usize, to: usize) {
        let Some(frame) = self.direction(from, to).network.pop_front() else {
            return;
        };
        if !self.is_alive(to) {
            if self.is_alive(from) {
                self.tasks[from].untold_ends.insert(to);
            }
            return;
        }
        let is_first_fragment = frame.seq == 1 && matches!(frame.kind, LinkKind::Data { .. });
        let has_ended_silently = |link: &Link| {
            link.is_peer_gone()
                && link.expected_seq() == 1
                && !link.has_older_incarnation_than(frame.incarnation)
        };
        let link = self.tasks[to].links.get(&from);
        if !is_first_fragment && link.is_some_and(has_ended_silently) {
            return;
        }
        // A ring is read before anything that arrives on another route.
        self.read_ring(from, to);
        let previous_incarnation = self.link(to, from).incarnation();
        if !self.link(to, from).accept_incarnation(frame.incarnation) {
            return self.transmit(to, from);
        }
        if frame.incarnation != previous_incarnation {
            self.reset_order(to, from);
        }
        self.accept_frame(from, to, frame);
        self.transmit(to, from);
        self.finish_accept(to);
    }

    pub(crate) fn reset_order(&mut self, task: usize, peer: usize) {
        let incarnation = self.link(task, peer).incarnation();
        self.tasks[task]
            .order
            .handle_link_reset(tid(peer), incarnation);
        if !self.link(task, peer).is_all_acked() {
            let position = self.position_of(task, peer);
            self.tasks[task]
                .order
                .record_sent(tid(peer), position, false);
        }
    }

    fn accept_frame(&mut self, from: usize, to: usize, frame: LinkFrame) {
        let now = self.now;
        let LinkFrame { kind, seq, ack, .. } = frame;
        let link = self.link(to, from);
        link.handle_borrowed_frame(now, kind, seq, ack, frame.payload);
        while let Some(ReceivedMessage { end_seq, bytes, .. }) = self.link(to, from).take_message()
        {
            let position = Position {
                incarnation: self.link(to, from).incarnation(),
                end_seq,
            };
            let content = self.contents[content_index(&bytes)].clone();
            let order = &mut self.tasks[to].order;
            match content {
                Content::Program { stamp, id } => {
                    order.accept_message(tid(from), position, stamp, id);
                    self.tasks[to].accepted.insert(id);
                }
                Content::Order { stamp, message } => {
                    order.accept_order_message(tid(from), position, stamp, message);
                }
            }
        }
        self.record_progress(to, from);
        self.held_count_max = self.held_count_max.max(self.tasks[to].order.held_count());
    }

    pub(crate) fn read_ring(&mut self, from: usize, to: usize) {
        while let Some(frame) = self.direction(from, to).ring.pop_front() {
            if self.is_alive(to) {
                if let LinkKind::Data { .. } = frame.kind {
                    self.direction(from, to).ring_read_seq = frame.seq + 1;
                }
                self.accept_frame(from, to, frame);
            }
        }
        if self.direction(from, to).has_ring {
            self.transmit(from, to);
            self.transmit(to, from);
        }
    }

    fn send_answers(&mut self, task: usize) {
        while let Some((peer, answer)) = self.tasks[task].order.next_answer() {
            let peer = task_of(peer);
            if !self.link(task, peer).is_peer_gone() {
                self.queue_order_message(task, peer, answer);
                self.transmit(task, peer);
            }
        }
    }

    pub(crate) fn finish_accept(&mut self, task: usize) {
        self.send_answers(task);
        self.complete_looks(task);
        self.release_daemon_items(task);
    }

    /// Looks at the rings of a task until its messages are in order. Other tasks take steps
    /// meanwhile.
    fn complete_looks(&mut self, task: usize) {
        let mut look_count = 0;
        self.busy_tasks.insert(task);
        while self.tasks[task].order.is_waiting_for_look() && look_count < LOOKS_MAX {
            look_count += 1;
            self.tasks[task].order.begin_look();
            let start = self.below(self.tasks.len());
            for offset in 0..self.tasks.len() {
                let peer = (start + offset) % self.tasks.len();
                if peer != task {
                    self.read_ring(peer, task);
                }
                if !self.is_draining && self.busy_tasks.len() < 3 && self.below(3) == 0 {
                    self.step();
                }
            }
            self.tasks[task].order.end_look();
        }
        self.busy_tasks.remove(&task);
        self.send_answers(task);
        self.deliver(task);
    }

    fn deliver(&mut self, task: usize) {
        while let Some(id) = self.tasks[task].order.next_delivery() {
            let past = self.messages[id].past.clone();
            // A message that is sent again to a restarted task has lost the marks before it.
            let is_sent_again = self.lost.contains(id);
            for earlier in past.iter().filter(|_| !is_sent_again) {
                let concerns_task = self.messages[earlier].receiver == task;
                assert!(
                    !concerns_task
                        || self.tasks[task].received.contains(earlier)
                        || self.lost.contains(earlier)
                        || self.rearriving.contains(earlier),
                    "task {task} receives message {id} of {} before message {earlier} of {}",
                    self.messages[id].sender,
                    self.messages[earlier].sender
                );
            }
            let is_new = self.tasks[task].received.insert(id);
            let may_repeat = self.lost.contains(id) || self.repeatable.contains(id);
            assert!(is_new || may_repeat, "{id} received twice");
            let task = &mut self.tasks[task];
            task.known.add_all(&past);
            task.known.insert(id);
        }
    }

    // ---- services

    /// Tells the daemon the past of a request. Returns it.
    fn tell_daemon(&mut self, task: usize) -> Past {
        let task = &mut self.tasks[task];
        let list = match std::mem::replace(&mut task.daemon_knows_marks, true) {
            true => task.order.list_for(service_tid()),
            false => Some(task.order.whole_list_for(service_tid())),
        };
        if let Some(OrderMessage::Marks { marks, .. }) = list {
            task.daemon_marks = marks;
        }
        Past {
            clock: task.order.clock(),
            marks: task.daemon_marks.clone(),
        }
    }

    /// Lets a task use the service, which replies.
    pub(crate) fn use_service(&mut self, task: usize) {
        let past = self.tell_daemon(task);
        self.service.clock = self.service.clock.max(past.clock);
        self.service.marks_by_task.insert(task, past.marks);
        self.service.known.add_all(&self.tasks[task].known);
        let mut marks: BTreeMap<MarkKey, Mark> = BTreeMap::new();
        for (user, user_marks) in &self.service.marks_by_task {
            for mark in user_marks {
                if *user != task && mark.sender != tid(task) {
                    let known_mark = marks.entry(mark.key()).or_insert(*mark);
                    if mark.covers(known_mark) {
                        *known_mark = *mark;
                    }
                }
            }
        }
        let past = Past {
            clock: self.service.clock,
            marks: marks.into_values().collect(),
        };
        let id = self.add_message(DAEMON, task, Rc::new(self.service.known.clone()));
        let items = &mut self.tasks[task].daemon_items;
        items.extend([DaemonItem::Past(past), DaemonItem::Notice(id)]);
    }

    pub(crate) fn spawn(&mut self, parent: usize, host: usize) {
        if self.tasks.len() >= TASKS_MAX {
            return;
        }
        let past = self.tell_daemon(parent);
        let child = self.add_task(host, self.tasks[parent].job);
        self.tasks[child].known = self.tasks[parent].known.clone();
        self.tasks[child].order.accept_spawn(past);
    }

    /// Lets a task handle what its daemon has sent, if nothing is awaited.
    pub(crate) fn release_daemon_items(&mut self, task: usize) {
        if self.busy_tasks.contains(&task) {
            return;
        }
        loop {
            let Task {
                order,
                daemon_items,
                ..
            } = &mut self.tasks[task];
            if order.is_past_awaited() {
                return;
            }
            let Some(item) = daemon_items.pop_front() else {
                return;
            };
            match item {
                DaemonItem::Past(past) => order.accept_past(past),
                DaemonItem::Notice(id) => order.accept_notice(id),
            }
            self.send_answers(task);
            self.complete_looks(task);
        }
    }

    // ---- timers

    pub(crate) fn wake_links(&mut self, task: usize) {
        let now = self.now;
        for peer in 0..self.tasks.len() {
            if let Some(link) = self.tasks[task].links.get_mut(&peer)
                && link.next_wakeup().is_some_and(|due| due <= now)
            {
                link.handle_event(now, LinkEvent::Wake);
                self.transmit(task, peer);
            }
        }
    }

    /// Asks the senders of awaited messages.
    pub(crate) fn check_senders(&mut self, task: usize) {
        self.tasks[task].order.ask_awaited();
        self.send_answers(task);
    }

    /// Ends waits that take too long. Unless jobs restart independently of each other, all senders
    /// that live have answered before.
    pub(crate) fn age_holds(&mut self) {
        for task in 0..self.tasks.len() {
            if !self.is_alive(task) {
                continue;
            }
            for mark in self.tasks[task].order.age_holds() {
                let sender = task_of(mark.sender);
                let may_give_up = !self.is_alive(sender) || self.snapshots.len() > 1;
                assert!(may_give_up, "{task} gives up {mark:?}");
            }
        }
    }

    pub(crate) fn refresh_lists(&mut self, task: usize) {
        while let Some((peer, list)) = self.tasks[task].order.next_refreshed_list() {
            match list {
                OrderMessage::Marks { marks, .. } if peer == service_tid() => {
                    self.tasks[task].daemon_marks.clone_from(&marks);
                    self.service.marks_by_task.insert(task, marks);
                }
                list => {
                    let peer = task_of(peer);
                    if !self.link(task, peer).is_peer_gone() {
                        self.queue_order_message(task, peer, list);
                        self.transmit(task, peer);
                        let position = self.position_of(task, peer);
                        let order = &mut self.tasks[task].order;
                        order.record_list_sent(tid(peer), position);
                    }
                }
            }
        }
        self.send_answers(task);
    }

    // ---- steps

    /// Takes one step of any task that is not in the middle of a look.
    pub(crate) fn step(&mut self) {
        self.now = self.now + STEP_TIME;
        let count = self.tasks.len();
        let (a, b) = (self.below(count), self.below(count));
        if a == b || self.busy_tasks.contains(&a) {
            return;
        }
        let is_peer_busy = self.busy_tasks.contains(&b);
        let is_alive = self.is_alive(a);
        match self.below(24) {
            0..6 if is_alive => self.send(a, b),
            6 if is_alive => {
                let receivers: Vec<usize> = (0..count).filter(|to| *to != a).collect();
                self.multicast(a, &receivers);
            }
            7..9 if !is_peer_busy => self.open_ring(a, b),
            9 if !is_peer_busy && self.below(4) == 0 => self.close_ring(a, b),
            10..15 if is_alive => self.receive_from_network(b, a),
            15 if is_alive => self.read_receipts(a, b),
            16..18 if is_alive => {
                self.read_ring(b, a);
                self.finish_accept(a);
            }
            18 if is_alive => self.refresh_lists(a),
            19 if is_alive => self.tell_end(a, b),
            20 if is_alive => self.wake_links(a),
            21 if is_alive && self.uses_services => self.use_service(a),
            22 if is_alive => self.release_daemon_items(a),
            23 if is_alive && self.below(4) == 0 => self.check_senders(a),
            _ => {}
        }
    }
}

fn content_index(payload: &[u8]) -> usize {
    u64::from_le_bytes(payload.try_into().expect("a content has eight bytes")) as usize
}
