//! The runtime as a value: links, inbox, open requests and the phase of the connection, without socket, thread or clock.
//!
//! The shell feeds frames and the time in, and writes out what gathers in the outbox. Everything an application thread
//! may wait for raises [`Core::news`].

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

/// Bytes that may wait for the socket before links have to wait with theirs. Control messages are not held back.
pub(crate) const BACKLOG_BYTES_MAX: usize = 1 << 20;
/// Bytes of control messages that may gather while there is no connection during a move.
pub(crate) const LATER_BYTES_MAX: usize = 256 << 20;
/// Bytes of messages that may wait to be received. Beyond it senders keep their messages, and ask again now and then.
const INBOX_BYTES_MAX: usize = 1 << 36;
/// Conversations a task may have at a time.
pub(crate) const LINKS_MAX: usize = 1 << 18;
/// Remembered conversations with tasks that have ended.
pub(crate) const LINKS_GONE_MAX: usize = 1 << 14;
/// Notifications that may wait for the last messages of their task; beyond it the oldest is handed over early.
pub(crate) const HELD_MAX: usize = 1 << 16;

/// Fragments up to this size are copied out of the read buffer, so that a small message does not keep a large buffer.
const COPY_BYTES_MAX: usize = 16 << 10;

/// A move that the daemon announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quiesce {
    /// The move.
    pub(crate) migration: MigrationId,
    /// Files to watch for the token.
    pub(crate) tokens: Vec<PathBuf>,
}

/// What the connection is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Up.
    Connected,
    /// The last frame is queued; the shell closes the socket when all is written.
    Quiescing(Quiesce),
    /// The socket is closed; the shell waits for the token.
    Quiesced(Quiesce),
    /// Gone for good; one sentence why.
    Lost(String),
}

/// A request that was made.
#[derive(Debug)]
struct Open {
    /// As it was sent, for the case that it has to be made again.
    frame: Bytes,
    reply: Option<Reply>,
}

/// The runtime without its shell.
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
    /// What has arrived.
    pub(crate) inbox: Inbox,
    /// What waits to be written.
    pub(crate) outbox: Outbox,
    later: VecDeque<Bytes>,
    later_bytes: usize,
    /// Rings to tasks on this host.
    pub(crate) near: Near,
    /// Direct routes to tasks on other hosts, and the agreements about them.
    pub(crate) direct: Direct,
    links: FxHashMap<Tid, Link>,
    gone: VecDeque<Tid>,
    /// Links that may have something to transmit and wait for room in the outbox.
    busy: VecDeque<Tid>,
    is_busy: HashSet<Tid>,
    held: VecDeque<(LinkMark, Message)>,
    requests: HashMap<RequestId, Open>,
    last_request: RequestId,
    /// What threads ask resource managers.
    pub(crate) questions: Questions,
    /// What a resource manager has answered ahead.
    pub(crate) grants: Grants,
    route: RouteId,
    /// The timeline that new links begin on; see [`Link::begin_timeline`].
    line: u16,
    lifted: bool,
    /// The move for which all was told to the daemon; nothing has come since.
    parted: Option<MigrationId>,
    /// The program was asked to end some time.
    was_asked: bool,
    /// The process ends.
    ends: bool,
    earliest: Option<Micros>,
    news: u64,
    route_news: u64,
}

impl Core {
    /// A task that has just been accepted.
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

    // ---- getters

    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.phase, Phase::Connected)
    }

    /// True until the connection is gone for good; may be looked at without the lock.
    pub(crate) fn alive(&self) -> Arc<AtomicBool> {
        self.alive.clone()
    }

    /// Why the connection is gone for good.
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

    /// Rises with every change of the resource manager.
    pub(crate) fn rm_generation(&self) -> u64 {
        self.rm_generation
    }

    /// Rises whenever there is no resource manager any more.
    pub(crate) fn rm_deaths(&self) -> u64 {
        self.rm_deaths
    }

    /// Rises with everything an application thread may wait for.
    pub(crate) fn news(&self) -> u64 {
        self.news
    }

    /// True when this peer is known to have ended.
    pub(crate) fn is_gone(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_gone)
    }

    /// True when the link has fragments that the window, not the outbox, keeps back.
    pub(crate) fn waits_for_window(&self, peer: Tid) -> bool {
        !self.is_busy.contains(&peer)
            && self
                .links
                .get(&peer)
                .is_some_and(|link| !link.is_transmitted())
    }

    /// True when the link waits for room in the outbox.
    pub(crate) fn waits_for_room(&self, peer: Tid) -> bool {
        self.is_busy.contains(&peer)
    }

    /// True when some link waits for room in the outbox.
    pub(crate) fn has_more(&self) -> bool {
        !self.busy.is_empty()
    }

    /// True when everything that was sent has been put on the route.
    pub(crate) fn all_transmitted(&self) -> bool {
        self.links
            .values()
            .all(|link| link.is_gone() || link.is_transmitted())
    }

    /// How far each link has sent.
    pub(crate) fn marks(&self) -> Vec<LinkMark> {
        let sent = |link: &&Link| !link.is_gone() && link.sent_end() > 1;
        let mark = |link: &Link| LinkMark {
            peer: link.peer(),
            end: link.sent_end(),
        };
        self.links.values().filter(sent).map(mark).collect()
    }

    /// Rises with everything that a thread may wait for that waits for its message to be out.
    pub(crate) fn route_news(&self) -> u64 {
        self.route_news
    }

    /// When [`Core::wake`] is wanted, at the latest; may be too early.
    pub(crate) fn earliest(&self) -> Option<Micros> {
        self.earliest
    }

    // ---- what the application does

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

    /// Sends a small message to a task, if that needs nothing but a ring that has room: whom to wake afterwards. `None`, and
    /// nothing was sent, when it is not as simple as that. `direct`: the program wants direct routes.
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

    /// Puts a message of this task, or one made in the library, into the inbox.
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

    /// Queues a request.
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

    /// The reply to a request, once it is here, or when it will never come.
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

    /// From now on windows do not hold anything back: the process ends.
    pub(crate) fn lift_windows(&mut self, now: Micros) {
        if !self.lifted {
            self.end_rings(now);
            for peer in self.end_direct(now) {
                // What the connection had not delivered dies with this process.
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

    // ---- what the shell does

    /// Takes a frame from the daemon. An error is one sentence: the connection cannot be used any further.
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

    /// Lets links transmit as far as the outbox has room.
    pub(crate) fn pump(&mut self, now: Micros) {
        while self.outbox.backlog() < BACKLOG_BYTES_MAX {
            let Some(peer) = self.busy.pop_front() else {
                return;
            };
            self.is_busy.remove(&peer);
            self.pump_route(now, peer, 1);
        }
    }

    /// Lets one link transmit as far as the outbox has room.
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

    /// Tells links whose time has come.
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

    /// All is written and the socket is closed.
    pub(crate) fn let_go(&mut self) {
        if let Phase::Quiescing(quiesce) = &self.phase {
            self.phase = Phase::Quiesced(quiesce.clone());
            self.news += 1;
        }
    }

    /// A daemon has accepted the task again after a move, or after one that failed.
    pub(crate) fn resume(&mut self, now: Micros, welcome: &Welcome) {
        self.phase = Phase::Connected;
        (self.host, self.dsig) = (welcome.host, welcome.dsig);
        self.direct.set_addresses(welcome.addresses.clone());
        self.outbox.clear();
        if let Some(restart) = &welcome.restart {
            self.begin_again(restart);
            // A resource manager that was asked before does not know of it.
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

    /// The connection is gone for good. The first reason stays.
    pub(crate) fn lose(&mut self, why: impl Into<String>) {
        if self.lost().is_some() {
            return;
        }
        // What peers here have sent is theirs to have received.
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
        // Nothing more will come: what waited for a last message is handed over.
        for (_, message) in std::mem::take(&mut self.held) {
            self.inbox.push(message);
        }
        self.links.clear();
        self.news += 1;
    }

    // ---- inside

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

    /// The link to a peer, made on first use. One to a peer that ended without having said a word is made anew: the
    /// number may have been given to a task since then.
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
        // A task that ended without a word may have left acknowledgements on the way; only a first fragment shows that
        // there is a task of this number after all.
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

    /// True while messages stay with those who send them.
    pub(super) fn inbox_is_full(&self) -> bool {
        self.inbox.bytes() >= INBOX_BYTES_MAX
    }

    /// Hands over the messages that are complete.
    pub(super) fn deliver_from(&mut self, peer: Tid) {
        while let Some(bytes) = self.links.get_mut(&peer).and_then(Link::take_message) {
            // Shorter than a header: only a peer that breaks the protocol sends such; its message is nothing.
            if let Some(message) = Message::decode(peer, self.me, bytes) {
                self.deliver(message);
            }
        }
    }

    // ---- for rings and direct routes

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

    /// [`Core::wake`] is wanted then.
    pub(super) fn wake_at(&mut self, at: Micros) {
        self.earliest = Some(self.earliest.map_or(at, |e| e.min(at)));
    }

    /// [`Core::wake`] is wanted when this link wants it.
    pub(super) fn note_wakeup(&mut self, peer: Tid) {
        if let Some(at) = self.links.get(&peer).and_then(Link::next_wakeup) {
            self.wake_at(at);
        }
    }

    /// Takes a link's frames until it has none, the outbox is full, or `transmissions` were queued.
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
        // Remembered also without a link: a notification that waits for this peer's last message must not wait for ever.
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
