//! State of the runtime as a pure value: links, inbox, open requests and the phase of the
//! connection. This module uses no socket, thread or clock.
//!
//! The caller passes in frames and the current time, and writes out the frames that collect in the
//! outbox. Every change for which an application thread may wait increments [`Core::event_seq`].

use super::direct_routes::DirectRoutes;
use super::outbox::Outbox;
use super::shm::{PeerWakes, ShmRoutes};
use crate::inbox::Inbox;
use bytes::Bytes;
use placement_leases::PlacementLeases;
use rm_calls::PendingRmCalls;
use rustc_hash::FxHashMap;
use sempa_proto::frame::{Frame, FrameKind, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame, LinkKind};
use sempa_proto::message::CTX_BASE;
use sempa_proto::sm::{SM_PLACEMENT_LEASE, SM_SPAWN_WAITS};
use sempa_proto::task::{
    REQUESTS_OPEN_MAX, Reply, Request, RmInfo, SendWatermark, Sink, ToDaemon, ToTask, Welcome,
};
use sempa_proto::{
    HostId, Message, Micros, MigrationId, PvmError, PvmResult, RequestId, RouteId, Tid,
};
use sempa_socket::{MessageFds, PendingFds};
use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of the outbox above which links do not add further frames. Control frames are always added.
pub(crate) const BACKLOG_BYTES_MAX: usize = 1 << 20;
/// Maximum size of the control frames that are queued while a migration interrupts the connection.
pub(crate) const DEFERRED_CONTROL_BYTES_MAX: usize = 256 << 20;
/// Maximum size of the inbox. Above this size fragments are not accepted; senders keep their
/// messages and send probes from time to time.
const INBOX_BYTES_MAX: usize = 1 << 36;
/// Maximum number of links of a task. Above the maximum, sends to new peers fail.
pub(crate) const LINKS_MAX: usize = 1 << 18;
/// Maximum number of links to ended tasks that are remembered.
pub(crate) const ENDED_LINKS_MAX: usize = 1 << 14;
/// Maximum number of notifications that are deferred until the last messages of their task arrive.
/// Above the maximum the oldest notification is delivered early.
pub(crate) const DEFERRED_DELIVERIES_MAX: usize = 1 << 16;

/// Fragments up to this size are copied out of the read buffer, so that a small message does not
/// keep a large buffer alive.
const COPY_BYTES_MAX: usize = 16 << 10;

/// The daemon's request to quiesce for a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuiesceRequest {
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
    Quiescing(QuiesceRequest),
    /// The socket is closed; the I/O thread waits for the token file.
    Quiesced(QuiesceRequest),
    /// The connection is lost for good, for the given reason.
    Lost(String),
}

/// Request that was sent to the daemon and whose reply the caller has not taken yet.
#[derive(Debug)]
struct OpenRequest {
    /// Encoded request, retained in case it must be sent again.
    encoded_request: Bytes,
    reply: Option<Reply>,
}

/// Complete state of the runtime. Its methods do no I/O.
#[derive(Debug)]
pub(crate) struct Core {
    own_tid: Tid,
    phase: Phase,
    connection_alive: Arc<AtomicBool>,
    host: HostId,
    dsig: i32,
    output: Sink,
    trace: Sink,
    rm: Option<RmInfo>,
    rm_generation: u64,
    rm_deaths: u64,
    /// Messages that have arrived and that the program has not received yet.
    pub(crate) inbox: Inbox,
    /// Bytes to be written to the daemon.
    pub(crate) outbox: Outbox,
    deferred_control: VecDeque<Bytes>,
    deferred_control_bytes: usize,
    /// Shared-memory rings to tasks on this host.
    pub(crate) shm: ShmRoutes,
    /// Direct routes to tasks on other hosts, and the agreements about them.
    pub(crate) direct: DirectRoutes,
    links: FxHashMap<Tid, Link>,
    ended_peers: VecDeque<Tid>,
    /// Links that may have frames to transmit and wait for space in the outbox.
    pump_queue: VecDeque<Tid>,
    in_pump_queue: HashSet<Tid>,
    deferred_deliveries: VecDeque<(SendWatermark, Message)>,
    open_requests: HashMap<RequestId, OpenRequest>,
    last_request: RequestId,
    /// Unanswered requests of this task's threads to resource managers.
    pub(crate) rm_calls: PendingRmCalls,
    /// Placements that the resource manager leased in advance.
    pub(crate) placement_leases: PlacementLeases,
    route: RouteId,
    /// Incarnation on which new links begin; see [`Link::begin_incarnation`].
    incarnation: u16,
    windows_disabled: bool,
    /// Migration for which the whole state was handed off to the daemon. Since the handoff no
    /// message has been accepted.
    handed_off_for: Option<MigrationId>,
    /// The program was asked to exit at least once.
    exit_was_requested: bool,
    exiting: bool,
    next_timer: Option<Micros>,
    event_seq: u64,
    send_event_seq: u64,
}

impl Core {
    /// Creates the state of a task that a daemon has just accepted.
    pub(crate) fn new(welcome: &Welcome) -> Core {
        let (incarnation, last_request) = handoff::initial_ids(welcome);
        let mut core = Core {
            own_tid: welcome.tid,
            phase: Phase::Connected,
            connection_alive: Arc::new(AtomicBool::new(true)),
            host: welcome.host,
            dsig: welcome.dsig,
            output: welcome.output,
            trace: welcome.trace,
            rm: welcome.rm,
            rm_generation: 0,
            rm_deaths: 0,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            deferred_control: VecDeque::new(),
            deferred_control_bytes: 0,
            shm: ShmRoutes::default(),
            direct: DirectRoutes::new(welcome.tid, welcome.addresses.clone()),
            links: FxHashMap::default(),
            ended_peers: VecDeque::new(),
            pump_queue: VecDeque::new(),
            in_pump_queue: HashSet::new(),
            deferred_deliveries: VecDeque::new(),
            open_requests: HashMap::new(),
            last_request,
            rm_calls: PendingRmCalls::default(),
            placement_leases: PlacementLeases::default(),
            route: RouteId(1),
            incarnation,
            windows_disabled: false,
            handed_off_for: None,
            exit_was_requested: false,
            exiting: false,
            next_timer: None,
            event_seq: 0,
            send_event_seq: 0,
        };
        if let Some(successor) = &welcome.handoff {
            core.take_over_links(successor);
        }
        if let Some(restart) = &welcome.restart {
            core.roll_back(restart);
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
    pub(crate) fn connection_alive_flag(&self) -> Arc<AtomicBool> {
        self.connection_alive.clone()
    }

    /// Returns the reason why the connection is lost for good.
    pub(crate) fn lost_reason(&self) -> Option<&str> {
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

    /// Returns a counter that increases with every change of the resource manager.
    pub(crate) fn rm_generation(&self) -> u64 {
        self.rm_generation
    }

    /// Returns a counter that increases whenever the resource manager is lost.
    pub(crate) fn rm_deaths(&self) -> u64 {
        self.rm_deaths
    }

    /// Returns a counter that increases with every event for which an application thread may wait.
    pub(crate) fn event_seq(&self) -> u64 {
        self.event_seq
    }

    /// True if this peer is known to have ended.
    pub(crate) fn is_gone(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_peer_gone)
    }

    /// True if the flow-control window of the link, and not a full outbox, prevents the
    /// transmission of its fragments.
    pub(crate) fn waits_for_window(&self, peer: Tid) -> bool {
        !self.in_pump_queue.contains(&peer)
            && self
                .links
                .get(&peer)
                .is_some_and(|link| !link.is_all_transmitted())
    }

    /// True if the link waits for space in the outbox.
    pub(crate) fn waits_for_outbox(&self, peer: Tid) -> bool {
        self.in_pump_queue.contains(&peer)
    }

    /// True if any link waits for space in the outbox.
    pub(crate) fn has_queued_links(&self) -> bool {
        !self.pump_queue.is_empty()
    }

    /// True if every link has transmitted all its fragments.
    pub(crate) fn all_transmitted(&self) -> bool {
        self.links
            .values()
            .all(|link| link.is_peer_gone() || link.is_all_transmitted())
    }

    /// Returns the sequence number up to which each link has sent.
    pub(crate) fn send_watermarks(&self) -> Vec<SendWatermark> {
        let sent = |link: &&Link| !link.is_peer_gone() && link.queued_end_seq() > 1;
        let mark = |link: &Link| SendWatermark {
            peer: link.peer(),
            end_seq: link.queued_end_seq(),
        };
        self.links.values().filter(sent).map(mark).collect()
    }

    /// Returns a counter that increases with every event that can unblock a thread that waits until
    /// its message is written.
    pub(crate) fn send_event_seq(&self) -> u64 {
        self.send_event_seq
    }

    /// Returns the time at which [`Core::run_timers`] must be called at the latest. The time may be
    /// earlier than necessary.
    pub(crate) fn next_timer(&self) -> Option<Micros> {
        self.next_timer
    }

    // ---- calls of the application

    /// Queues a message to another task.
    pub(crate) fn send(&mut self, now: Micros, message: Message) -> PvmResult<()> {
        let peer = message.dst;
        self.poll_acks(now, peer);
        let Some(link) = self.get_or_create_link(peer) else {
            return Err(PvmError::OutOfRes);
        };
        link.send(message.encode_head(), message.body)
            .map_err(|_| PvmError::OutOfRes)?;
        if let Some(slot) = self.shm.slot(peer) {
            self.pump_ring(now, slot);
            return Ok(());
        }
        if self.direct.has_route(peer) {
            self.pump_direct(now, peer);
            return Ok(());
        }
        if self.outbox.backlog_bytes() < BACKLOG_BYTES_MAX {
            self.pump_link(now, peer);
        } else {
            self.queue_for_pump(peer);
        }
        self.offer_ring_if_due(now, peer);
        Ok(())
    }

    /// Sends a small message to a task by writing it to a ring, if no further step is needed.
    /// Returns the peers to wake. `None` means that nothing was sent and the caller must use
    /// [`Core::send`]. `direct` is true if the program wants direct routes.
    #[inline]
    pub(crate) fn try_send_inline(
        &mut self,
        now: Micros,
        peer: Tid,
        head: &[u8],
        body: &[u8],
        direct: bool,
    ) -> Option<PeerWakes> {
        if direct && !self.direct.agreements.is_settled(peer) {
            return None;
        }
        self.try_send_through_ring(now, peer, head, body)
    }

    /// Delivers a message from this task itself or from the library: into the inbox, or to the
    /// component of the library that processes such messages.
    pub(crate) fn deliver(&mut self, message: Message) {
        self.event_seq += 1;
        match message.tag {
            SM_SPAWN_WAITS if message.ctx == CTX_BASE => self.rm_calls.handle_wait_report(message),
            SM_PLACEMENT_LEASE if message.ctx == CTX_BASE => {
                self.placement_leases.handle_lease(message)
            }
            _ => {
                if let Some(message) = self.rm_calls.match_answer(message) {
                    self.inbox.push(message);
                }
            }
        }
    }

    pub(crate) fn send_to_daemon(&mut self, message: Message) -> PvmResult<()> {
        let frame = encode_control(&ToDaemon::Message(message)).map_err(|_| PvmError::OutOfRes)?;
        self.push_control(frame)
    }

    /// Queues a request to the daemon. Returns the id of the request, or a reply that reports the
    /// failure.
    pub(crate) fn send_request(&mut self, what: Request) -> Result<RequestId, Reply> {
        let failed = |error: PvmError, reason: &str| Reply::Failed {
            error,
            reason: reason.to_string(),
        };
        if let Phase::Lost(why) = &self.phase {
            return Err(failed(PvmError::SysErr, why));
        }
        if self.open_requests.len() >= REQUESTS_OPEN_MAX {
            return Err(failed(
                PvmError::OutOfRes,
                "too many requests of this task wait for an answer",
            ));
        }
        let id = self.last_request.next();
        let frame = encode_control(&ToDaemon::Request { id, request: what }).map_err(|e| {
            failed(
                PvmError::OutOfRes,
                &format!("the request was not sent: {e}"),
            )
        })?;
        let kept = frame.clone();
        self.push_control(kept)
            .map_err(|e| failed(e, "the request was not sent: too much waits for the daemon"))?;
        self.last_request = id;
        self.open_requests.insert(
            id,
            OpenRequest {
                encoded_request: frame,
                reply: None,
            },
        );
        Ok(id)
    }

    /// Returns the reply to a request if it has arrived, or a failure if it can never arrive.
    pub(crate) fn take_reply(&mut self, id: RequestId) -> Option<Reply> {
        if self
            .open_requests
            .get(&id)
            .is_some_and(|open| open.reply.is_some())
        {
            return self.open_requests.remove(&id)?.reply;
        }
        let Phase::Lost(why) = &self.phase else {
            return None;
        };
        let reply = Reply::Failed {
            error: PvmError::SysErr,
            reason: why.clone(),
        };
        self.open_requests.remove(&id);
        Some(reply)
    }

    /// Makes all links ignore their flow-control windows, because the process is exiting.
    pub(crate) fn disable_windows(&mut self, now: Micros) {
        if !self.windows_disabled {
            self.end_rings(now);
            for peer in self.end_direct(now) {
                // The process exits before the direct connection has delivered these fragments, so
                // they are sent again through the daemon.
                self.links
                    .get_mut(&peer)
                    .into_iter()
                    .for_each(Link::retransmit_unacked);
            }
        }
        self.windows_disabled = true;
        let peers: Vec<Tid> = self.links.keys().copied().collect();
        for peer in peers {
            if let Some(link) = self.links.get_mut(&peer) {
                link.disable_window();
                self.queue_for_pump(peer);
            }
        }
        self.pump(now);
    }

    // ---- calls of the threads that do I/O

    /// Handles a frame from the daemon. After an error the connection is unusable; the error is a
    /// sentence for the user.
    pub(crate) fn handle_frame(
        &mut self,
        now: Micros,
        frame: Frame,
        passed: &mut PendingFds,
    ) -> Result<(), String> {
        match frame.kind {
            FrameKind::Link => {
                let frame = frame.decode_link().map_err(|e| e.to_string())?;
                self.handle_link_frame(now, frame);
                Ok(())
            }
            FrameKind::Control => match frame
                .decode_control::<ToTask>()
                .map_err(|e| e.to_string())?
            {
                ToTask::Route {
                    from,
                    same_host: near,
                    message,
                } => {
                    let descriptors = match passed.take(message.fd_count()) {
                        MessageFds::All(all) => all,
                        MessageFds::Lost => {
                            self.handle_lost_descriptors(now, from, &message);
                            return Ok(());
                        }
                        MessageFds::Missing => {
                            return Err("a word about a route came without its descriptors".into());
                        }
                    };
                    self.handle_ring_message(now, from, near, &message, descriptors);
                    self.handle_direct_message(now, from, near, message);
                    Ok(())
                }
                control => self.handle_control(now, control),
            },
            FrameKind::Image => Err("the daemon sent a piece of an image to a task".into()),
        }
    }

    /// Lets the queued links transmit while the outbox has space.
    pub(crate) fn pump(&mut self, now: Micros) {
        while self.outbox.backlog_bytes() < BACKLOG_BYTES_MAX {
            let Some(peer) = self.pump_queue.pop_front() else {
                return;
            };
            self.in_pump_queue.remove(&peer);
            self.pump_route(now, peer, 1);
        }
    }

    /// Lets one link transmit while the outbox has space.
    pub(crate) fn pump_link(&mut self, now: Micros, peer: Tid) {
        self.pump_route(now, peer, usize::MAX);
    }

    fn pump_route(&mut self, now: Micros, peer: Tid, transmissions: usize) {
        match self.shm.slot(peer) {
            Some(slot) => self.pump_ring(now, slot),
            None if self.direct.has_route(peer) => self.pump_direct(now, peer),
            None => self.pump_through_daemon(now, peer, transmissions),
        }
    }

    pub(crate) fn run_timers(&mut self, now: Micros) {
        if self.next_timer.is_none_or(|due| due > now) {
            return;
        }
        self.next_timer = None;
        let mut due = Vec::new();
        for (peer, link) in &mut self.links {
            match link.next_wakeup() {
                Some(at) if at <= now => due.push(*peer),
                Some(at) => self.next_timer = Some(self.next_timer.map_or(at, |e| e.min(at))),
                None => {}
            }
        }
        for peer in due {
            if let Some(link) = self.links.get_mut(&peer) {
                link.handle(now, LinkEvent::Wake);
            }
            self.queue_for_pump(peer);
        }
        self.run_shm_timers(now);
        self.run_direct_timers(now);
        self.pump(now);
    }

    /// Enters the quiesced phase. Called when all frames are written and the socket is closed.
    pub(crate) fn mark_quiesced(&mut self) {
        if let Phase::Quiescing(quiesce) = &self.phase {
            self.phase = Phase::Quiesced(quiesce.clone());
            self.event_seq += 1;
        }
    }

    /// Continues on a new connection, after a migration or after a migration that failed.
    pub(crate) fn resume(&mut self, now: Micros, welcome: &Welcome) {
        self.phase = Phase::Connected;
        (self.host, self.dsig) = (welcome.host, welcome.dsig);
        self.direct.set_addresses(welcome.addresses.clone());
        self.outbox.clear();
        if let Some(restart) = &welcome.restart {
            self.roll_back(restart);
            // A resource manager that received a request before the restart does not know it.
            self.set_rm(None);
        }
        self.set_rm(welcome.rm);
        self.placement_leases.clear();
        for frame in std::mem::take(&mut self.deferred_control) {
            self.outbox.push(frame);
        }
        self.deferred_control_bytes = 0;
        self.route = self.route.next();
        let peers: Vec<Tid> = self.links.keys().copied().collect();
        for peer in peers {
            if let Some(link) = self.links.get_mut(&peer) {
                link.handle(now, LinkEvent::RouteUp(self.route));
                self.queue_for_pump(peer);
            }
        }
        self.pump(now);
        self.event_seq += 1;
    }

    /// Marks the connection as lost for good. The first reason is kept.
    pub(crate) fn mark_connection_lost(&mut self, reason: impl Into<String>) {
        if self.lost_reason().is_some() {
            return;
        }
        // Messages that peers on this host have sent can still be received.
        self.end_rings(Micros(0));
        self.end_direct(Micros(0));
        self.release_shared_memory();
        self.phase = Phase::Lost(reason.into());
        self.connection_alive.store(false, Ordering::Release);
        self.outbox.clear();
        self.deferred_control.clear();
        self.deferred_control_bytes = 0;
        self.pump_queue.clear();
        self.in_pump_queue.clear();
        self.next_timer = None;
        // Nothing else will arrive, so notifications that wait for a last message are delivered.
        for (_, message) in std::mem::take(&mut self.deferred_deliveries) {
            self.inbox.push(message);
        }
        self.links.clear();
        self.event_seq += 1;
    }

    // ---- internal functions

    fn push_control(&mut self, frame: Bytes) -> PvmResult<()> {
        match self.phase {
            Phase::Connected => self.outbox.push(frame),
            Phase::Quiescing(_) | Phase::Quiesced(_) => {
                if self.deferred_control_bytes + frame.len() > DEFERRED_CONTROL_BYTES_MAX {
                    return Err(PvmError::OutOfRes);
                }
                self.deferred_control_bytes += frame.len();
                self.deferred_control.push_back(frame);
            }
            Phase::Lost(_) => return Err(PvmError::SysErr),
        }
        Ok(())
    }

    fn queue_for_pump(&mut self, peer: Tid) {
        if self.in_pump_queue.insert(peer) {
            self.pump_queue.push_back(peer);
        }
    }

    fn new_link(&self, peer: Tid) -> Link {
        let mut link = Link::new(self.own_tid, peer);
        link.begin_incarnation(self.incarnation, true);
        if self.is_connected() {
            link.handle(Micros(0), LinkEvent::RouteUp(self.route));
        }
        if self.windows_disabled {
            link.disable_window();
        }
        link
    }

    /// Returns the link to a peer and creates it on first use. If the peer of an existing link
    /// ended without sending anything, a new link replaces it, because the tid may have been
    /// reused. `None` if the task has too many links.
    pub(super) fn get_or_create_link(&mut self, peer: Tid) -> Option<&mut Link> {
        let stale = self
            .links
            .get(&peer)
            .is_some_and(|link| link.is_peer_gone() && link.expected_seq() == 1);
        if stale || !self.links.contains_key(&peer) {
            if self.links.len() >= LINKS_MAX && !stale {
                return None;
            }
            let link = self.new_link(peer);
            self.links.insert(peer, link);
        }
        self.links.get_mut(&peer)
    }

    fn handle_link_frame(&mut self, now: Micros, frame: LinkFrame) {
        let peer = frame.src;
        if peer == self.own_tid && frame.dst != self.own_tid {
            return self.restore_unacked(now, &frame);
        }
        if frame.dst != self.own_tid || peer == self.own_tid || !peer.is_task() {
            return;
        }
        if self.inbox_is_full() && matches!(frame.kind, LinkKind::Data { .. }) {
            return;
        }
        // Acknowledgements of a task that ended without sending a message may still be in transit.
        // Only a first fragment proves that a task with this tid exists.
        let first = frame.seq == 1 && matches!(frame.kind, LinkKind::Data { .. });
        let ended = |link: &Link| {
            link.is_peer_gone()
                && link.expected_seq() == 1
                && !link.has_older_incarnation_than(frame.incarnation)
        };
        if !first && self.links.get(&peer).is_some_and(ended) {
            return;
        }
        self.drain_peer(now, peer);
        let Some(link) = self.get_or_create_link(peer) else {
            return;
        };
        let LinkFrame {
            kind,
            seq,
            ack,
            incarnation: line,
            payload,
            ..
        } = frame;
        if !link.accept_incarnation(line) {
            return self.pump_link(now, peer);
        }
        if payload.len() <= COPY_BYTES_MAX {
            link.handle_borrowed_frame(now, kind, seq, ack, &payload[..]);
        } else {
            link.handle_borrowed_frame(now, kind, seq, ack, payload);
        }
        self.deliver_messages_from(peer);
        self.pump_link(now, peer);
        self.release_deferred(peer);
    }

    /// True if the inbox has reached its maximum size. Fragments are then refused, and their
    /// senders keep the messages.
    pub(super) fn inbox_is_full(&self) -> bool {
        self.inbox.charged_bytes() >= INBOX_BYTES_MAX
    }

    /// Delivers all messages of a peer whose last fragment has arrived.
    pub(super) fn deliver_messages_from(&mut self, peer: Tid) {
        while let Some(bytes) = self.links.get_mut(&peer).and_then(Link::take_message) {
            // Only a peer that violates the protocol sends a message shorter than a header; it is
            // dropped.
            if let Some(message) = Message::decode(peer, self.own_tid, bytes) {
                self.deliver(message);
            }
        }
    }

    // ---- access for rings and direct routes

    pub(super) fn direct_and_links(&mut self) -> (&mut DirectRoutes, &mut FxHashMap<Tid, Link>) {
        (&mut self.direct, &mut self.links)
    }

    pub(super) fn bump_event_seq(&mut self) {
        self.event_seq += 1;
    }

    pub(super) fn shm_and_links(&mut self) -> (&mut ShmRoutes, &mut FxHashMap<Tid, Link>) {
        (&mut self.shm, &mut self.links)
    }

    pub(super) fn tid(&self) -> Tid {
        self.own_tid
    }

    pub(super) fn has_disabled_windows(&self) -> bool {
        self.windows_disabled
    }

    pub(super) fn link_mut(&mut self, peer: Tid) -> Option<&mut Link> {
        self.links.get_mut(&peer)
    }

    pub(super) fn next_route(&mut self) -> RouteId {
        self.route = self.route.next();
        self.route
    }

    pub(super) fn bump_send_event_seq(&mut self) {
        self.send_event_seq += 1;
    }

    /// Ensures that [`Core::run_timers`] is called at this time.
    pub(super) fn schedule_timer(&mut self, at: Micros) {
        self.next_timer = Some(self.next_timer.map_or(at, |e| e.min(at)));
    }

    /// Ensures that [`Core::run_timers`] is called when this link needs it.
    pub(super) fn schedule_link_timer(&mut self, peer: Tid) {
        if let Some(at) = self.links.get(&peer).and_then(Link::next_wakeup) {
            self.schedule_timer(at);
        }
    }

    /// Transmits frames of a link until it has none, the outbox is full, or `transmissions` frames
    /// were queued.
    fn pump_through_daemon(&mut self, now: Micros, peer: Tid, mut transmissions: usize) {
        while let Some(frame) = self
            .links
            .get_mut(&peer)
            .and_then(|link| link.next_frame(now))
        {
            self.outbox.push_link(&frame.to_frame());
            transmissions -= 1;
            if transmissions == 0 || self.outbox.backlog_bytes() >= BACKLOG_BYTES_MAX {
                return self.queue_for_pump(peer);
            }
        }
        self.schedule_link_timer(peer);
    }

    fn handle_control(&mut self, now: Micros, control: ToTask) -> Result<(), String> {
        match control {
            ToTask::Welcome(_) | ToTask::Refused { .. } => {
                return Err("the daemon greeted this task twice".into());
            }
            ToTask::Reply { id, reply } => {
                if let Some(open) = self.open_requests.get_mut(&id) {
                    open.reply = Some(reply);
                    self.event_seq += 1;
                }
            }
            ToTask::Deliver {
                message,
                deliver_after: after,
            } => self.handle_delivery(now, message, after),
            ToTask::PeerGone { tid } => self.handle_peer_end(now, tid),
            ToTask::PeerMigrated { tid } => {
                self.remove_peer_ring(now, tid);
                self.direct_peer_migrated(now, tid);
                if let Some(link) = self.links.get_mut(&tid) {
                    link.handle(now, LinkEvent::PeerMigrated);
                    self.pump_link(now, tid);
                }
            }
            ToTask::RmChanged { rm } => self.set_rm(rm),
            ToTask::PrepareExit { migration: by } => self.handle_exit_announcement(now, by),
            ToTask::Route { .. } => {
                return Err("a word about a route came on a way without descriptors".into());
            }
            ToTask::Quiesce { migration, tokens } => {
                self.begin_quiesce(now, QuiesceRequest { migration, tokens })?
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
        self.placement_leases.clear();
        self.rm_generation += 1;
        self.event_seq += 1;
    }

    pub(super) fn handle_peer_end(&mut self, now: Micros, peer: Tid) {
        if peer == self.own_tid || self.is_gone(peer) {
            return;
        }
        self.remove_peer_ring(now, peer);
        if !self.direct_peer_ended(now, peer) {
            return;
        }
        // The end of the peer is recorded even if there was no link: a notification that waits for
        // this peer's last message must not wait forever.
        let Some(link) = self.get_or_create_link(peer) else {
            return;
        };
        link.handle(now, LinkEvent::PeerGone);
        self.pump_link(now, peer);
        self.ended_peers.push_back(peer);
        self.event_seq += 1;
        self.release_deferred(peer);
        if self.ended_peers.len() > ENDED_LINKS_MAX
            && let Some(oldest) = self.ended_peers.pop_front()
            && self.is_gone(oldest)
        {
            self.links.remove(&oldest);
        }
    }

    fn begin_quiesce(&mut self, now: Micros, quiesce: QuiesceRequest) -> Result<(), String> {
        if !self.is_connected() {
            return Err("the daemon asked this task twice to let go".into());
        }
        self.end_rings(now);
        self.end_direct(now);
        for link in self.links.values_mut() {
            link.handle(now, LinkEvent::RouteDown);
        }
        self.release_shared_memory();
        self.shm.copy_leased_messages();
        sempa_proto::buffer_pool::clear();
        self.pump_queue.clear();
        self.in_pump_queue.clear();
        self.next_timer = None;
        let last = ToDaemon::Quiesced {
            migration: quiesce.migration,
            watermarks: self.send_watermarks(),
            redirect_address: super::redirect::reset(),
        };
        self.outbox
            .push(encode_control(&last).map_err(|e| format!("letting go: {e}"))?);
        self.phase = Phase::Quiescing(quiesce);
        self.event_seq += 1;
        Ok(())
    }
}

mod deferred_deliveries;
mod handoff;
mod placement_leases;
mod rm_calls;
mod rollback;
#[cfg(test)]
mod tests;
