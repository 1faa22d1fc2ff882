//! State of the runtime as a value: links, inbox, open requests and the phase of the connection,
//! without socket, thread or clock.
//!
//! The caller passes in frames and the current time, and writes out the frames that collect in the
//! outbox. Every change for which an application thread may wait increments [`Core::news`].

use super::far::Direct;
use super::near::{Near, Wakes};
use super::outbox::Outbox;
use crate::inbox::Inbox;
use bytes::Bytes;
use grants::Grants;
use questions::Questions;
use rustc_hash::FxHashMap;
use sempa_proto::frame::{Frame, FrameKind, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame, LinkKind};
use sempa_proto::message::CTX_BASE;
use sempa_proto::sm::{SM_GRANT, SM_SPAWN_WAITS};
use sempa_proto::task::{
    LinkMark, REQUESTS_OPEN_MAX, Reply, Request, RmInfo, Sink, ToDaemon, ToTask, Welcome,
};
use sempa_proto::{
    HostId, Message, Micros, MigrationId, PvmError, PvmResult, RequestId, RouteId, Tid,
};
use sempa_socket::{Passed, Taken};
use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of the outbox above which links do not add further frames. Control frames are always added.
pub(crate) const BACKLOG_BYTES_MAX: usize = 1 << 20;
/// Maximum size of the control frames that are queued while a migration interrupts the connection.
pub(crate) const LATER_BYTES_MAX: usize = 256 << 20;
/// Maximum size of the inbox. Above it fragments are not accepted; senders keep their messages and
/// send probes from time to time.
const INBOX_BYTES_MAX: usize = 1 << 36;
/// Maximum number of links of a task.
pub(crate) const LINKS_MAX: usize = 1 << 18;
/// Maximum number of links to ended tasks that are remembered.
pub(crate) const LINKS_GONE_MAX: usize = 1 << 14;
/// Maximum number of notifications that wait for the last messages of their task. Above it the
/// oldest is delivered early.
pub(crate) const HELD_MAX: usize = 1 << 16;

/// Fragments up to this size are copied out of the read buffer, so that a small message does not
/// keep a large buffer alive.
const COPY_BYTES_MAX: usize = 16 << 10;

/// Migration for which the daemon requested to quiesce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quiesce {
    pub(crate) migration: MigrationId,
    /// Paths where the token file may appear.
    pub(crate) tokens: Vec<PathBuf>,
}

/// Phase of the connection to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The connection is usable.
    Connected,
    /// The last frame is queued; the socket is closed when all frames are written.
    Quiescing(Quiesce),
    /// The socket is closed; the I/O thread waits for the token file.
    Quiesced(Quiesce),
    /// The connection is lost for good, for the given reason.
    Lost(String),
}

/// Request to the daemon that was sent.
#[derive(Debug)]
struct Open {
    /// Encoded request, kept in case it must be sent again.
    frame: Bytes,
    reply: Option<Reply>,
}

/// State of the runtime without I/O.
#[derive(Debug)]
pub(crate) struct Core {
    me: Tid,
    phase: Phase,
    alive: Arc<AtomicBool>,
    host: HostId,
    dsig: i32,
    output: Sink,
    trace: Sink,
    rm: Option<RmInfo>,
    rm_generation: u64,
    rm_deaths: u64,
    /// Messages that were not received yet.
    pub(crate) inbox: Inbox,
    /// Bytes to be written to the daemon.
    pub(crate) outbox: Outbox,
    later: VecDeque<Bytes>,
    later_bytes: usize,
    /// Shared-memory rings to tasks on this host.
    pub(crate) near: Near,
    /// Direct routes to tasks on other hosts, and the agreements about them.
    pub(crate) direct: Direct,
    links: FxHashMap<Tid, Link>,
    gone: VecDeque<Tid>,
    /// Links that may have frames to transmit and wait for space in the outbox.
    busy: VecDeque<Tid>,
    is_busy: HashSet<Tid>,
    held: VecDeque<(LinkMark, Message)>,
    requests: HashMap<RequestId, Open>,
    last_request: RequestId,
    /// Open requests of this task's threads to resource managers.
    pub(crate) questions: Questions,
    /// Placements that the resource manager leased in advance.
    pub(crate) grants: Grants,
    route: RouteId,
    /// Incarnation on which new links begin; see [`Link::begin_timeline`].
    line: u16,
    lifted: bool,
    /// Migration for which the whole state was handed off to the daemon. No message has been
    /// accepted since.
    parted: Option<MigrationId>,
    /// The program was asked to exit at least once.
    was_asked: bool,
    /// The process is exiting.
    ends: bool,
    earliest: Option<Micros>,
    news: u64,
    route_news: u64,
}

impl Core {
    /// Creates the state of a task that a daemon has just accepted.
    pub(crate) fn new(welcome: &Welcome) -> Core {
        let (line, last_request) = successor::beginning(welcome);
        let mut core = Core {
            me: welcome.tid,
            phase: Phase::Connected,
            alive: Arc::new(AtomicBool::new(true)),
            host: welcome.host,
            dsig: welcome.dsig,
            output: welcome.output,
            trace: welcome.trace,
            rm: welcome.rm,
            rm_generation: 0,
            rm_deaths: 0,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            later: VecDeque::new(),
            later_bytes: 0,
            near: Near::default(),
            direct: Direct::new(welcome.tid, welcome.addresses.clone()),
            links: FxHashMap::default(),
            gone: VecDeque::new(),
            busy: VecDeque::new(),
            is_busy: HashSet::new(),
            held: VecDeque::new(),
            requests: HashMap::new(),
            last_request,
            questions: Questions::default(),
            grants: Grants::default(),
            route: RouteId(1),
            line,
            lifted: false,
            parted: None,
            was_asked: false,
            ends: false,
            earliest: None,
            news: 0,
            route_news: 0,
        };
        if let Some(successor) = &welcome.successor {
            core.succeed(successor);
        }
        if let Some(restart) = &welcome.restart {
            core.begin_again(restart);
        }
        core
    }


    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.phase, Phase::Connected)
    }

    /// Returns a flag that is true until the connection is lost for good; reading it needs no lock.
    pub(crate) fn alive(&self) -> Arc<AtomicBool> {
        self.alive.clone()
    }

    /// Returns the reason why the connection is lost for good.
    pub(crate) fn lost(&self) -> Option<&str> {
        match &self.phase {
            Phase::Lost(why) => Some(why),
            _ => None,
        }
    }

    pub(crate) fn host(&self) -> HostId {
        self.host
    }

    pub(crate) fn dsig(&self) -> i32 {
        self.dsig
    }

    pub(crate) fn output(&self) -> Sink {
        self.output
    }

    pub(crate) fn trace(&self) -> Sink {
        self.trace
    }

    pub(crate) fn rm(&self) -> Option<RmInfo> {
        self.rm
    }

    /// Counter that increases with every change of the resource manager.
    pub(crate) fn rm_generation(&self) -> u64 {
        self.rm_generation
    }

    /// Counter that increases whenever the resource manager is lost.
    pub(crate) fn rm_deaths(&self) -> u64 {
        self.rm_deaths
    }

    /// Counter that increases with every event for which an application thread may wait.
    pub(crate) fn news(&self) -> u64 {
        self.news
    }

    /// True if this peer is known to have ended.
    pub(crate) fn is_gone(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_gone)
    }

    /// True if the window, not the outbox, keeps back fragments of the link.
    pub(crate) fn waits_for_window(&self, peer: Tid) -> bool {
        !self.is_busy.contains(&peer)
            && self
                .links
                .get(&peer)
                .is_some_and(|link| !link.is_transmitted())
    }

    /// True if the link waits for space in the outbox.
    pub(crate) fn waits_for_room(&self, peer: Tid) -> bool {
        self.is_busy.contains(&peer)
    }

    /// True if any link waits for space in the outbox.
    pub(crate) fn has_more(&self) -> bool {
        !self.busy.is_empty()
    }

    /// True if every link has transmitted all its fragments.
    pub(crate) fn all_transmitted(&self) -> bool {
        self.links
            .values()
            .all(|link| link.is_gone() || link.is_transmitted())
    }

    /// Returns the sequence number up to which each link has sent.
    pub(crate) fn marks(&self) -> Vec<LinkMark> {
        let sent = |link: &&Link| !link.is_gone() && link.sent_end() > 1;
        let mark = |link: &Link| LinkMark {
            peer: link.peer(),
            end: link.sent_end(),
        };
        self.links.values().filter(sent).map(mark).collect()
    }

    /// Counter that increases with every event that can unblock a thread that waits for its message
    /// to be written.
    pub(crate) fn route_news(&self) -> u64 {
        self.route_news
    }

    /// Time at which [`Core::wake`] must be called at the latest; may be earlier than necessary.
    pub(crate) fn earliest(&self) -> Option<Micros> {
        self.earliest
    }

    // ---- calls of the application

    /// Queues a message to another task.
    pub(crate) fn send(&mut self, now: Micros, message: Message) -> PvmResult<()> {
        let peer = message.dst;
        self.hear(now, peer);
        let Some(link) = self.link_to_send(peer) else {
            return Err(PvmError::OutOfRes);
        };
        link.send(message.head(), message.body)
            .map_err(|_| PvmError::OutOfRes)?;
        if let Some(slot) = self.near.slot(peer) {
            self.pump_ring(now, slot);
            return Ok(());
        }
        if self.direct.leads_to(peer) {
            self.pump_direct(now, peer);
            return Ok(());
        }
        if self.outbox.backlog() < BACKLOG_BYTES_MAX {
            self.pump_link(now, peer);
        } else {
            self.mark_busy(peer);
        }
        self.consider_ring(now, peer);
        Ok(())
    }

    /// Sends a small message to a task if writing to a ring with enough space suffices. Returns the
    /// peers to wake. `None` if it does not suffice; nothing was sent then. `direct`: the program
    /// wants direct routes.
    #[inline]
    pub(crate) fn send_at_once(
        &mut self,
        now: Micros,
        peer: Tid,
        head: &[u8],
        body: &[u8],
        direct: bool,
    ) -> Option<Wakes> {
        if direct && !self.direct.routes.is_settled(peer) {
            return None;
        }
        self.send_near(now, peer, head, body)
    }

    /// Delivers a message from this task itself or from the library: into the inbox, or to the part
    /// of the library that handles it.
    pub(crate) fn deliver(&mut self, message: Message) {
        self.news += 1;
        match message.tag {
            SM_SPAWN_WAITS if message.ctx == CTX_BASE => self.questions.hear_of_waiting(message),
            SM_GRANT if message.ctx == CTX_BASE => self.grants.hear(message),
            _ => {
                if let Some(message) = self.questions.hear(message) {
                    self.inbox.push(message);
                }
            }
        }
    }

    /// Queues a message to a daemon.
    pub(crate) fn tell(&mut self, message: Message) -> PvmResult<()> {
        let frame = encode_control(&ToDaemon::Message(message)).map_err(|_| PvmError::OutOfRes)?;
        self.push_control(frame)
    }

    /// Queues a request to the daemon.
    pub(crate) fn ask(&mut self, what: Request) -> Result<RequestId, Reply> {
        let failed = |error: PvmError, reason: &str| Reply::Failed {
            error,
            reason: reason.to_string(),
        };
        if let Phase::Lost(why) = &self.phase {
            return Err(failed(PvmError::SysErr, why));
        }
        if self.requests.len() >= REQUESTS_OPEN_MAX {
            return Err(failed(
                PvmError::OutOfRes,
                "too many requests of this task wait for an answer",
            ));
        }
        let id = self.last_request.next();
        let frame = encode_control(&ToDaemon::Request { id, what }).map_err(|e| {
            failed(
                PvmError::OutOfRes,
                &format!("the request was not sent: {e}"),
            )
        })?;
        let kept = frame.clone();
        self.push_control(kept)
            .map_err(|e| failed(e, "the request was not sent: too much waits for the daemon"))?;
        self.last_request = id;
        self.requests.insert(id, Open { frame, reply: None });
        Ok(id)
    }

    /// Returns the reply to a request when it has arrived, or a failure when it can never arrive.
    pub(crate) fn take_reply(&mut self, id: RequestId) -> Option<Reply> {
        if self
            .requests
            .get(&id)
            .is_some_and(|open| open.reply.is_some())
        {
            return self.requests.remove(&id)?.reply;
        }
        let Phase::Lost(why) = &self.phase else {
            return None;
        };
        let reply = Reply::Failed {
            error: PvmError::SysErr,
            reason: why.clone(),
        };
        self.requests.remove(&id);
        Some(reply)
    }

    /// Makes all links ignore their flow-control windows, because the process is exiting.
    pub(crate) fn lift_windows(&mut self, now: Micros) {
        if !self.lifted {
            self.end_rings(now);
            for peer in self.end_direct(now) {
                // The process does not live until the connection has delivered these fragments, so
                // they are sent again.
                self.links
                    .get_mut(&peer)
                    .into_iter()
                    .for_each(Link::transmit_again);
            }
        }
        self.lifted = true;
        let peers: Vec<Tid> = self.links.keys().copied().collect();
        for peer in peers {
            if let Some(link) = self.links.get_mut(&peer) {
                link.lift_window();
                self.mark_busy(peer);
            }
        }
        self.pump(now);
    }

    // ---- calls of the threads that do I/O

    /// Handles a frame from the daemon. The error is a sentence; the connection cannot be used
    /// after it.
    pub(crate) fn take_frame(
        &mut self,
        now: Micros,
        frame: Frame,
        passed: &mut Passed,
    ) -> Result<(), String> {
        match frame.kind {
            FrameKind::Link => {
                let frame = frame.link().map_err(|e| e.to_string())?;
                self.take_link_frame(now, frame);
                Ok(())
            }
            FrameKind::Control => match frame.control::<ToTask>().map_err(|e| e.to_string())? {
                ToTask::Route { from, near, word } => {
                    let descriptors = match passed.take(word.descriptors()) {
                        Taken::All(all) => all,
                        Taken::Lost => {
                            self.could_not_take(now, from, &word);
                            return Ok(());
                        }
                        Taken::Missing => {
                            return Err("a word about a route came without its descriptors".into());
                        }
                    };
                    self.take_ring_word(now, from, near, &word, descriptors);
                    self.take_direct_word(now, from, near, word);
                    Ok(())
                }
                control => self.take_control(now, control),
            },
            FrameKind::Image => Err("the daemon sent a piece of an image to a task".into()),
        }
    }

    /// Lets the queued links transmit while the outbox has space.
    pub(crate) fn pump(&mut self, now: Micros) {
        while self.outbox.backlog() < BACKLOG_BYTES_MAX {
            let Some(peer) = self.busy.pop_front() else {
                return;
            };
            self.is_busy.remove(&peer);
            self.pump_route(now, peer, 1);
        }
    }

    /// Lets one link transmit while the outbox has space.
    pub(crate) fn pump_link(&mut self, now: Micros, peer: Tid) {
        self.pump_route(now, peer, usize::MAX);
    }

    fn pump_route(&mut self, now: Micros, peer: Tid, transmissions: usize) {
        match self.near.slot(peer) {
            Some(slot) => self.pump_ring(now, slot),
            None if self.direct.leads_to(peer) => self.pump_direct(now, peer),
            None => self.pump_some(now, peer, transmissions),
        }
    }

    /// Handles all timers that have expired.
    pub(crate) fn wake(&mut self, now: Micros) {
        if self.earliest.is_none_or(|due| due > now) {
            return;
        }
        self.earliest = None;
        let mut due = Vec::new();
        for (peer, link) in &mut self.links {
            match link.next_wakeup() {
                Some(at) if at <= now => due.push(*peer),
                Some(at) => self.earliest = Some(self.earliest.map_or(at, |e| e.min(at))),
                None => {}
            }
        }
        for peer in due {
            if let Some(link) = self.links.get_mut(&peer) {
                link.handle(now, LinkEvent::Wake);
            }
            self.mark_busy(peer);
        }
        self.wake_near(now);
        self.wake_far(now);
        self.pump(now);
    }

    /// Enters the quiesced phase: all frames are written and the socket is closed.
    pub(crate) fn let_go(&mut self) {
        if let Phase::Quiescing(quiesce) = &self.phase {
            self.phase = Phase::Quiesced(quiesce.clone());
            self.news += 1;
        }
    }

    /// Continues on a new connection, after a migration or a failed one.
    pub(crate) fn resume(&mut self, now: Micros, welcome: &Welcome) {
        self.phase = Phase::Connected;
        (self.host, self.dsig) = (welcome.host, welcome.dsig);
        self.direct.set_addresses(welcome.addresses.clone());
        self.outbox.clear();
        if let Some(restart) = &welcome.restart {
            self.begin_again(restart);
            // A resource manager that received a request before the restart does not know it.
            self.set_rm(None);
        }
        self.set_rm(welcome.rm);
        self.grants.forget();
        for frame in std::mem::take(&mut self.later) {
            self.outbox.push(frame);
        }
        self.later_bytes = 0;
        self.route = self.route.next();
        let peers: Vec<Tid> = self.links.keys().copied().collect();
        for peer in peers {
            if let Some(link) = self.links.get_mut(&peer) {
                link.handle(now, LinkEvent::RouteUp(self.route));
                self.mark_busy(peer);
            }
        }
        self.pump(now);
        self.news += 1;
    }

    /// Marks the connection as lost for good. The first reason is kept.
    pub(crate) fn lose(&mut self, why: impl Into<String>) {
        if self.lost().is_some() {
            return;
        }
        // Messages that peers on this host have sent can still be received.
        self.end_rings(Micros(0));
        self.end_direct(Micros(0));
        self.unshare();
        self.phase = Phase::Lost(why.into());
        self.alive.store(false, Ordering::Release);
        self.outbox.clear();
        self.later.clear();
        self.later_bytes = 0;
        self.busy.clear();
        self.is_busy.clear();
        self.earliest = None;
        // Nothing else will arrive, so notifications that wait for a last message are delivered.
        for (_, message) in std::mem::take(&mut self.held) {
            self.inbox.push(message);
        }
        self.links.clear();
        self.news += 1;
    }

    // ---- internal functions

    fn push_control(&mut self, frame: Bytes) -> PvmResult<()> {
        match self.phase {
            Phase::Connected => self.outbox.push(frame),
            Phase::Quiescing(_) | Phase::Quiesced(_) => {
                if self.later_bytes + frame.len() > LATER_BYTES_MAX {
                    return Err(PvmError::OutOfRes);
                }
                self.later_bytes += frame.len();
                self.later.push_back(frame);
            }
            Phase::Lost(_) => return Err(PvmError::SysErr),
        }
        Ok(())
    }

    fn mark_busy(&mut self, peer: Tid) {
        if self.is_busy.insert(peer) {
            self.busy.push_back(peer);
        }
    }

    fn fresh_link(&self, peer: Tid) -> Link {
        let mut link = Link::new(self.me, peer);
        link.begin_timeline(self.line, true);
        if self.is_connected() {
            link.handle(Micros(0), LinkEvent::RouteUp(self.route));
        }
        if self.lifted {
            link.lift_window();
        }
        link
    }

    /// Returns the link to a peer; creates it on first use. A link to a peer that ended without
    /// sending anything is replaced, because the tid may have been reused.
    pub(super) fn link_to_send(&mut self, peer: Tid) -> Option<&mut Link> {
        let stale = self
            .links
            .get(&peer)
            .is_some_and(|link| link.is_gone() && link.expected() == 1);
        if stale || !self.links.contains_key(&peer) {
            if self.links.len() >= LINKS_MAX && !stale {
                return None;
            }
            let link = self.fresh_link(peer);
            self.links.insert(peer, link);
        }
        self.links.get_mut(&peer)
    }

    fn take_link_frame(&mut self, now: Micros, frame: LinkFrame) {
        let peer = frame.src;
        if peer == self.me && frame.dst != self.me {
            return self.take_back(now, &frame);
        }
        if frame.dst != self.me || peer == self.me || !peer.is_task() {
            return;
        }
        if self.inbox_is_full() && matches!(frame.kind, LinkKind::Data { .. }) {
            return;
        }
        // A task that ended without sending a message may have left acknowledgements in transit.
        // Only a first fragment proves that a task with this tid exists.
        let first = frame.seq == 1 && matches!(frame.kind, LinkKind::Data { .. });
        let ended =
            |link: &Link| link.is_gone() && link.expected() == 1 && !link.is_before(frame.line);
        if !first && self.links.get(&peer).is_some_and(ended) {
            return;
        }
        self.drain_peer(now, peer);
        let Some(link) = self.link_to_send(peer) else {
            return;
        };
        let LinkFrame {
            kind,
            seq,
            ack,
            line,
            payload,
            ..
        } = frame;
        if !link.follow(line) {
            return self.pump_link(now, peer);
        }
        if payload.len() <= COPY_BYTES_MAX {
            link.take(now, kind, seq, ack, &payload[..]);
        } else {
            link.take(now, kind, seq, ack, payload);
        }
        self.deliver_from(peer);
        self.pump_link(now, peer);
        self.release_held(peer);
    }

    /// True if fragments are not accepted, so that messages stay with their senders.
    pub(super) fn inbox_is_full(&self) -> bool {
        self.inbox.bytes() >= INBOX_BYTES_MAX
    }

    /// Delivers all complete messages of a peer.
    pub(super) fn deliver_from(&mut self, peer: Tid) {
        while let Some(bytes) = self.links.get_mut(&peer).and_then(Link::take_message) {
            // Only a peer that violates the protocol sends a message shorter than a header; it is
            // dropped.
            if let Some(message) = Message::decode(peer, self.me, bytes) {
                self.deliver(message);
            }
        }
    }

    // ---- access for rings and direct routes

    pub(super) fn direct_and_links(&mut self) -> (&mut Direct, &mut FxHashMap<Tid, Link>) {
        (&mut self.direct, &mut self.links)
    }

    pub(super) fn raise_news(&mut self) {
        self.news += 1;
    }

    pub(super) fn near_and_links(&mut self) -> (&mut Near, &mut FxHashMap<Tid, Link>) {
        (&mut self.near, &mut self.links)
    }

    pub(super) fn tid(&self) -> Tid {
        self.me
    }

    pub(super) fn is_lifted(&self) -> bool {
        self.lifted
    }

    pub(super) fn link_mut(&mut self, peer: Tid) -> Option<&mut Link> {
        self.links.get_mut(&peer)
    }

    pub(super) fn next_route(&mut self) -> RouteId {
        self.route = self.route.next();
        self.route
    }

    pub(super) fn news_of_routes(&mut self) {
        self.route_news += 1;
    }

    /// Ensures that [`Core::wake`] is called at this time.
    pub(super) fn wake_at(&mut self, at: Micros) {
        self.earliest = Some(self.earliest.map_or(at, |e| e.min(at)));
    }

    /// Ensures that [`Core::wake`] is called when this link needs it.
    pub(super) fn note_wakeup(&mut self, peer: Tid) {
        if let Some(at) = self.links.get(&peer).and_then(Link::next_wakeup) {
            self.wake_at(at);
        }
    }

    /// Transmits frames of a link until it has none, the outbox is full, or `transmissions` frames
    /// were queued.
    fn pump_some(&mut self, now: Micros, peer: Tid, mut transmissions: usize) {
        while let Some(frame) = self
            .links
            .get_mut(&peer)
            .and_then(|link| link.next_frame(now))
        {
            self.outbox.push_link(&frame.to_frame());
            transmissions -= 1;
            if transmissions == 0 || self.outbox.backlog() >= BACKLOG_BYTES_MAX {
                return self.mark_busy(peer);
            }
        }
        self.note_wakeup(peer);
    }

    fn take_control(&mut self, now: Micros, control: ToTask) -> Result<(), String> {
        match control {
            ToTask::Welcome(_) | ToTask::Refused { .. } => {
                return Err("the daemon greeted this task twice".into());
            }
            ToTask::Reply { id, reply } => {
                if let Some(open) = self.requests.get_mut(&id) {
                    open.reply = Some(reply);
                    self.news += 1;
                }
            }
            ToTask::Deliver { message, after } => self.take_delivery(now, message, after),
            ToTask::PeerGone { tid } => self.peer_gone(now, tid),
            ToTask::PeerMoved { tid } => {
                self.forget_near(now, tid);
                self.far_moved(now, tid);
                if let Some(link) = self.links.get_mut(&tid) {
                    link.handle(now, LinkEvent::PeerMoved);
                    self.pump_link(now, tid);
                }
            }
            ToTask::RmChanged { rm } => self.set_rm(rm),
            ToTask::TakeNothing { by } => self.take_nothing(now, by),
            ToTask::Route { .. } => {
                return Err("a word about a route came on a way without descriptors".into());
            }
            ToTask::Quiesce { migration, tokens } => {
                self.quiesce(now, Quiesce { migration, tokens })?
            }
        }
        Ok(())
    }

    fn set_rm(&mut self, rm: Option<RmInfo>) {
        if rm == self.rm {
            return;
        }
        if rm.is_none() {
            self.rm_deaths += 1;
        }
        self.rm = rm;
        self.grants.forget();
        self.rm_generation += 1;
        self.news += 1;
    }

    pub(super) fn peer_gone(&mut self, now: Micros, peer: Tid) {
        if peer == self.me || self.is_gone(peer) {
            return;
        }
        self.forget_near(now, peer);
        if !self.far_gone(now, peer) {
            return;
        }
        // Remembered even if there was no link: a notification that waits for this peer's last
        // message must not wait forever.
        let Some(link) = self.link_to_send(peer) else {
            return;
        };
        link.handle(now, LinkEvent::PeerGone);
        self.pump_link(now, peer);
        self.gone.push_back(peer);
        self.news += 1;
        self.release_held(peer);
        if self.gone.len() > LINKS_GONE_MAX
            && let Some(oldest) = self.gone.pop_front()
            && self.is_gone(oldest)
        {
            self.links.remove(&oldest);
        }
    }

    fn quiesce(&mut self, now: Micros, quiesce: Quiesce) -> Result<(), String> {
        if !self.is_connected() {
            return Err("the daemon asked this task twice to let go".into());
        }
        self.end_rings(now);
        self.end_direct(now);
        for link in self.links.values_mut() {
            link.handle(now, LinkEvent::RouteDown);
        }
        self.unshare();
        self.near.keep_borrowed();
        sempa_proto::pool::empty();
        self.busy.clear();
        self.is_busy.clear();
        self.earliest = None;
        let last = ToDaemon::Quiesced {
            migration: quiesce.migration,
            marks: self.marks(),
            redirect_at: super::redirect::open(),
        };
        self.outbox
            .push(encode_control(&last).map_err(|e| format!("letting go: {e}"))?);
        self.phase = Phase::Quiescing(quiesce);
        self.news += 1;
        Ok(())
    }
}

mod again;
mod grants;
mod held;
mod questions;
mod successor;
#[cfg(test)]
mod tests;
