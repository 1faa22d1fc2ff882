//! Members and a broker under faults: connections break with frames in flight, frames arrive twice,
//! processes end, and the broker is killed between any two outputs.

use crate::*;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Number of steps of one run before everything heals.
const STEPS: u32 = 1500;
/// Largest number of members of one run.
const MEMBERS_MAX: usize = 24;

/// Xorshift generator: one seed gives one run.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).expect("64 bits") % limit
    }
}

/// What a program does with its member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Running,
    /// The process was killed.
    Dead,
    /// The broker has told the member that its membership is over.
    Closed,
}

#[derive(Debug)]
struct Member {
    endpoint: Endpoint,
    place: Place,
    life: Life,
    link: Option<LinkId>,
    to_broker: VecDeque<ToBroker>,
    to_member: VecDeque<ToMember>,
    /// Message ids of requests without a verdict.
    asked: BTreeMap<RequestSeq, u64>,
    /// True if the member could have received mail of which the broker was not told in time.
    is_ambiguous: bool,
    newest_from: BTreeMap<MemberId, u64>,
    gone_seen: BTreeSet<MemberId>,
}

#[derive(Debug)]
struct World {
    rng: Rng,
    now: Millis,
    settings: Settings,
    session: Option<Session>,
    synced: Vec<Record>,
    unsynced: Vec<Record>,
    members: Vec<Member>,
    links: BTreeMap<LinkId, usize>,
    next_link: u64,
    next_message: u64,
    taken: BTreeMap<u64, MemberId>,
    refused: BTreeSet<u64>,
    received: BTreeMap<u64, MemberId>,
    returned: BTreeSet<u64>,
    /// Outputs that are carried out before the broker is killed.
    outputs_until_kill: Option<usize>,
    output_count: usize,
    ended: Option<SessionEnd>,
}

fn id_of(body: &Bytes) -> u64 {
    u64::from_le_bytes(body[..8].try_into().expect("8 bytes"))
}

impl World {
    fn new(seed: u64) -> Self {
        let mut settings = Settings::default();
        settings.limits.member_messages_max = 20;
        settings.limits.joins_per_second_max = 1000;
        let mut world = Self {
            rng: Rng::new(seed),
            now: Millis(1),
            settings,
            session: None,
            synced: Vec::new(),
            unsynced: Vec::new(),
            members: Vec::new(),
            links: BTreeMap::new(),
            next_link: 1,
            next_message: 1,
            taken: BTreeMap::new(),
            refused: BTreeSet::new(),
            received: BTreeMap::new(),
            returned: BTreeSet::new(),
            outputs_until_kill: None,
            output_count: 0,
            ended: None,
        };
        world.start_broker();
        world
    }

    fn start_broker(&mut self) {
        let records = self.synced.clone();
        let session = match records.is_empty() {
            true => Session::new("sim", self.settings, self.now),
            false => {
                let state = State::recover(records.clone());
                // A snapshot restores the same state as the records.
                let snapshot = Record::Snapshot(Box::new(state.clone()));
                assert_eq!(State::recover([snapshot]), state);
                Session::resume(state, self.now)
            }
        };
        self.session = Some(session);
        self.carry_out();
    }

    fn kill_broker(&mut self) {
        // What was not synced may survive in part.
        let kept = self.rng.below(self.unsynced.len() + 1);
        self.synced.extend(self.unsynced.drain(..).take(kept));
        self.session = None;
        self.links.clear();
        for index in 0..self.members.len() {
            self.break_member_side(index);
        }
    }

    fn carry_out(&mut self) {
        while let Some(output) = self.session.as_mut().and_then(Session::poll) {
            self.output_count += 1;
            if let Some(left) = &mut self.outputs_until_kill {
                if *left == 0 {
                    self.outputs_until_kill = None;
                    self.kill_broker();
                    return;
                }
                *left -= 1;
            }
            match output {
                Output::Record(record) => {
                    let must_be_synced = record.must_be_synced();
                    // A journal on a disk holds encoded records.
                    let bytes = postcard::to_stdvec(&record).expect("encodes");
                    self.unsynced
                        .push(postcard::from_bytes(&bytes).expect("decodes"));
                    if must_be_synced {
                        self.synced.append(&mut self.unsynced);
                    }
                }
                Output::Send { link, frame } => {
                    if let Some(index) = self.links.get(&link) {
                        self.members[*index].to_member.push_back(frame);
                    }
                }
                Output::Close { link } => {
                    if let Some(index) = self.links.remove(&link)
                        && self.members[index].link == Some(link)
                    {
                        self.members[index].to_broker.clear();
                        self.members[index].link = None;
                    }
                }
                Output::WatchTask { tid } => self.report_dead_task(tid),
                Output::Log(_) => {}
                Output::Ended(end) => self.ended = Some(end),
            }
        }
    }

    fn report_dead_task(&mut self, tid: i32) {
        let place = Place::Inside { tid };
        let is_dead = self
            .members
            .iter()
            .any(|m| m.place == place && m.life == Life::Dead);
        if is_dead {
            let reason = GoneReason::Killed;
            self.tell(Event::TaskEnded { tid, reason });
        }
    }

    fn tell(&mut self, event: Event) {
        if let Some(session) = &mut self.session {
            session.handle(self.now, event);
            self.carry_out();
        }
    }

    fn add_member(&mut self) {
        let number = u8::try_from(self.members.len()).expect("few members");
        let role = match number % 4 {
            0 => Role::Foreman,
            _ => Role::Worker,
        };
        let place = match number % 2 {
            0 => Place::Inside {
                tid: 0x40000 + i32::from(number),
            },
            _ => Place::Outside,
        };
        let profile = Profile {
            role,
            host: format!("h{number}"),
            program: "sim".into(),
            factor: 1000,
        };
        self.members.push(Member {
            endpoint: Endpoint::new(Token([number; 16]), profile),
            place,
            life: Life::Running,
            link: None,
            to_broker: VecDeque::new(),
            to_member: VecDeque::new(),
            asked: BTreeMap::new(),
            is_ambiguous: false,
            newest_from: BTreeMap::new(),
            gone_seen: BTreeSet::new(),
        });
        let index = self.members.len() - 1;
        self.connect(index);
        let watch = Request::Watch(WatchTarget::All);
        self.members[index].endpoint.submit(watch);
        self.pump(index);
    }

    fn connect(&mut self, index: usize) {
        let member = &mut self.members[index];
        if self.session.is_none() || member.link.is_some() || member.life != Life::Running {
            return;
        }
        let link = LinkId(self.next_link);
        self.next_link += 1;
        member.link = Some(link);
        member.to_member.clear();
        member.endpoint.connected(self.now);
        self.links.insert(link, index);
        let (place, rights) = (member.place, Role::Foreman);
        self.tell(Event::Opened {
            link,
            place,
            rights,
        });
        self.pump(index);
    }

    /// Moves frames from the member to its connection and handles what the member has got.
    fn pump(&mut self, index: usize) {
        let now = self.now;
        let member = &mut self.members[index];
        while let Some(frame) = member.endpoint.poll(now) {
            if member.link.is_some() {
                member.to_broker.push_back(frame);
            }
        }
        let asked = std::mem::take(&mut member.asked);
        for (seq, id) in asked {
            match member.endpoint.take_verdict(seq) {
                None => {
                    member.asked.insert(seq, id);
                }
                Some(Verdict::Taken) => {
                    let sender = member.endpoint.identity().expect("joined").0;
                    self.taken.insert(id, sender);
                }
                Some(_) => {
                    self.refused.insert(id);
                }
            }
        }
        if let Phase::Closed(_) = member.endpoint.phase() {
            member.life = match member.life {
                Life::Dead => Life::Dead,
                _ => Life::Closed,
            };
        }
    }

    fn break_member_side(&mut self, index: usize) {
        let member = &mut self.members[index];
        member.link = None;
        member.to_broker.clear();
        member.to_member.clear();
        member.endpoint.disconnected();
        member.is_ambiguous = true;
    }

    /// Breaks a connection. Some frames that are in flight to the broker still arrive.
    fn break_link(&mut self, index: usize) {
        for _ in 0..self.rng.below(3) {
            self.deliver_to_broker(index);
        }
        let link = self.members[index].link;
        self.break_member_side(index);
        if let Some(link) = link
            && self.links.remove(&link).is_some()
        {
            self.tell(Event::Closed { link });
        }
    }

    fn deliver_to_broker(&mut self, index: usize) {
        let Some(link) = self.members[index].link else {
            return;
        };
        if let Some(frame) = self.members[index].to_broker.pop_front() {
            let is_hello = matches!(frame, ToBroker::Hello(_));
            if !is_hello && self.rng.below(10) == 0 {
                let frame = frame.clone();
                self.tell(Event::Frame { link, frame });
            }
            self.tell(Event::Frame { link, frame });
        }
    }

    fn deliver_to_member(&mut self, index: usize) {
        let now = self.now;
        let is_doubled = self.rng.below(10) == 0;
        let member = &mut self.members[index];
        if let Some(frame) = member.to_member.pop_front() {
            if is_doubled {
                member.endpoint.handle(now, frame.clone());
            }
            member.endpoint.handle(now, frame);
            self.pump(index);
        } else if member.link.is_none() {
            // The broker has closed the connection, and all its frames have arrived.
            self.break_member_side(index);
        }
    }

    fn send_from(&mut self, index: usize) {
        let ids = self.members.len() + 2;
        let to = match self.rng.below(5) {
            0 => Destination::Foreman,
            _ => Destination::Member(MemberId(u32::try_from(self.rng.below(ids)).expect("few"))),
        };
        let id = self.next_message;
        self.next_message += 1;
        let returns = self.rng.below(2) == 0;
        let member = &mut self.members[index];
        if member.life == Life::Running && member.endpoint.can_submit() {
            let seq = member.endpoint.submit(Request::Send {
                to,
                kind: i32::try_from(id % 3).expect("small"),
                body: Bytes::copy_from_slice(&id.to_le_bytes()),
                returns,
            });
            member.asked.insert(seq, id);
            self.pump(index);
        }
    }

    fn receive_at(&mut self, index: usize, pattern: Pattern) -> bool {
        let member = &mut self.members[index];
        if member.life != Life::Running {
            return false;
        }
        let head = member.endpoint.probe(pattern);
        let mail = head.and_then(|head| member.endpoint.take_at(head.seq));
        match &mail {
            Some(Mail::Message { from, body, .. }) => {
                let id = id_of(body);
                let own = member.endpoint.identity().expect("joined").0;
                assert!(!member.gone_seen.contains(from), "{from} after its notice");
                if pattern == Pattern::any() {
                    let newest = member.newest_from.insert(*from, id);
                    assert!(newest.is_none_or(|newest| newest < id), "order from {from}");
                }
                let earlier = self.received.insert(id, own);
                assert_eq!(earlier, None, "message {id} was received twice");
            }
            Some(Mail::Gone { member: gone, .. }) => {
                assert!(member.gone_seen.insert(*gone), "two notices about {gone}");
            }
            Some(Mail::Returned { body, .. }) => {
                assert!(self.returned.insert(id_of(body)), "returned twice");
            }
            None => {}
        }
        self.pump(index);
        mail.is_some()
    }

    fn kill_member(&mut self, index: usize) {
        let member = &mut self.members[index];
        if member.life != Life::Running {
            return;
        }
        member.life = Life::Dead;
        match self.members[index].place {
            Place::Outside => self.break_link(index),
            Place::Inside { tid } => {
                // The virtual machine delivers what a task has sent before it reports its end.
                while self.session.is_some() && !self.members[index].to_broker.is_empty() {
                    self.deliver_to_broker(index);
                }
                self.members[index].link = None;
                let reason = GoneReason::Killed;
                self.tell(Event::TaskEnded { tid, reason });
            }
        }
    }

    fn step(&mut self) {
        self.now.0 += 1 + self.rng.below(20) as u64;
        let index = self.rng.below(self.members.len().max(1));
        let choice = self.rng.below(1000);
        match choice {
            0..30 if self.members.len() < MEMBERS_MAX => self.add_member(),
            _ if self.members.is_empty() => self.add_member(),
            30..250 => self.send_from(index),
            250..400 => {
                self.receive_at(index, Pattern::any());
            }
            400..650 => self.deliver_to_broker(index),
            650..930 => self.deliver_to_member(index),
            930..950 => self.break_link(index),
            950..980 => self.connect(index),
            980..984 => self.kill_member(index),
            984..987 => {
                if self.members[index].life == Life::Running {
                    let leave = Request::Leave { moved_out: false };
                    self.members[index].endpoint.submit(leave);
                    self.pump(index);
                }
            }
            987..992 => self.kill_broker(),
            992..996 => self.outputs_until_kill = Some(self.rng.below(12)),
            _ => self.tell(Event::Wakeup),
        }
        if self.session.is_none() && self.rng.below(10) == 0 {
            self.start_broker();
        }
    }

    /// Connects all members that run and lets them receive everything.
    fn heal(&mut self) {
        self.outputs_until_kill = None;
        if self.session.is_none() {
            self.start_broker();
        }
        loop {
            let mut has_changed = false;
            for index in 0..self.members.len() {
                if self.members[index].life == Life::Running && self.members[index].link.is_none() {
                    has_changed = true;
                    while !self.members[index].to_member.is_empty() {
                        self.deliver_to_member(index);
                    }
                    self.break_member_side(index);
                    self.connect(index);
                }
                while !self.members[index].to_broker.is_empty() {
                    has_changed = true;
                    self.deliver_to_broker(index);
                }
                while !self.members[index].to_member.is_empty() {
                    has_changed = true;
                    self.deliver_to_member(index);
                }
                while self.receive_at(index, Pattern::any()) {
                    has_changed = true;
                }
            }
            if !has_changed {
                break;
            }
        }
        // The grace time of dead members outside ends.
        let grace = self.settings.timing.grace;
        self.now = self.now.after(grace).after(grace);
    }

    fn check(&mut self) {
        let counts = self.session.as_ref().expect("runs").counts();
        let report = self.session.as_ref().expect("runs").report(self.now);
        assert_eq!(report.waiting, 0, "{report:?}");
        assert_eq!(
            counts.taken,
            counts.delivered + counts.returned + counts.dropped
        );
        for id in self.received.keys() {
            assert!(!self.refused.contains(id), "{id} was refused and received");
        }
        let ambiguous: BTreeSet<MemberId> = self
            .members
            .iter()
            .filter(|m| m.is_ambiguous && m.life != Life::Running)
            .filter_map(|m| Some(m.endpoint.identity()?.0))
            .collect();
        let both = self.returned.iter().filter(|id| {
            let receiver = self.received.get(id);
            receiver.is_some_and(|receiver| !ambiguous.contains(receiver))
        });
        assert_eq!(both.count(), 0, "messages were received and returned");
        let lost = self.taken.keys();
        let lost = lost.filter(|id| !self.received.contains_key(id) && !self.returned.contains(id));
        let lost_count = lost.count() as u64;
        // Returned messages may wait at senders that ended, and such messages count as returned.
        assert!(
            lost_count <= counts.dropped + counts.returned,
            "{lost_count} taken messages vanished: {counts:?}"
        );
    }
}

fn run(seed: u64) -> World {
    let mut world = World::new(seed);
    for _ in 0..STEPS {
        world.step();
        if world.ended.is_some() {
            break;
        }
    }
    world
}

/// Under all faults each message is received once, returned, or counted as dropped; the order of
/// each pair is kept; a notice comes after the last message.
#[test]
fn messages_are_received_once_or_returned_or_counted() {
    let (mut received, mut returned, mut dropped, mut refused) = (0, 0, 0, 0);
    for seed in 1..=400 {
        let mut world = run(seed);
        if world.ended.is_some() {
            continue;
        }
        world.heal();
        // Connections were silent for too long: dead members are gone, the others connect again.
        world.tell(Event::Wakeup);
        world.heal();
        world.check();
        let counts = world.session.as_ref().expect("runs").counts();
        received += world.received.len();
        returned += world.returned.len();
        dropped += counts.dropped;
        refused += world.refused.len();
    }
    // The faults reach every outcome.
    assert!(received > 10_000 && returned > 100 && dropped > 100 && refused > 1_000);
}

/// Runs a fixed exchange and kills the broker before output number `kill_at`.
fn exchange_with_kill(kill_at: Option<usize>) -> World {
    let mut world = World::new(7);
    world.outputs_until_kill = kill_at;
    let ensure_broker = |world: &mut World| {
        if world.session.is_none() {
            world.start_broker();
        }
        for index in 0..world.members.len() {
            world.connect(index);
        }
    };
    for _ in 0..4 {
        world.add_member();
        ensure_broker(&mut world);
    }
    for round in 0..12 {
        ensure_broker(&mut world);
        for index in 0..4 {
            let to = Destination::Member(MemberId((round + index) % 4 + 1));
            let id = world.next_message;
            world.next_message += 1;
            let member = &mut world.members[index as usize];
            if member.life == Life::Running {
                let seq = member.endpoint.submit(Request::Send {
                    to,
                    kind: 0,
                    body: Bytes::copy_from_slice(&id.to_le_bytes()),
                    returns: true,
                });
                member.asked.insert(seq, id);
                world.pump(index as usize);
            }
        }
        for index in 0..4 {
            for _ in 0..6 {
                world.deliver_to_broker(index);
                world.deliver_to_member(index);
            }
            world.receive_at(index, Pattern::any());
        }
        if round == 8 {
            world.kill_member(2);
        }
    }
    world.heal();
    world
}

/// The broker may be killed before each of its outputs; nothing that was taken is lost.
#[test]
fn a_kill_before_each_output_loses_nothing() {
    let output_count = exchange_with_kill(None).output_count;
    assert!(output_count > 200, "{output_count}");
    for kill_at in 0..output_count {
        let mut world = exchange_with_kill(Some(kill_at));
        world.check();
        let counts = world.session.as_ref().expect("runs").counts();
        let dead = MemberId(3);
        let lost = world.taken.iter().filter(|(id, sender)| {
            !world.received.contains_key(id) && !world.returned.contains(id) && **sender != dead
        });
        let lost = lost.count() as u64;
        assert!(
            lost <= counts.dropped,
            "kill before output {kill_at}: {lost} lost, {counts:?}"
        );
    }
}
