//! State of the runtime without I/O: links, inbox, open requests and the phase of the connection.
//! This module uses no socket, thread or clock.
//!
//! The caller passes in frames and the current time, and writes the frames that are queued in the
//! outbox. Every change for which an application thread may wait increments [`Core::event_seq`].

use super::direct_routes::DirectRoutes;
use super::links::Links;
use super::outbox::Outbox;
use super::shm::{PendingWake, ShmRoutes};
use crate::inbox::Inbox;
use bytes::Bytes;
use daemon_hold::{DaemonHold, DaemonItem};
use ordering::OrderTimers;
pub(super) use ordering::{STAMPED_HEAD_BYTES, stamped_head};
use placement_leases::PlacementLeases;
use rm_calls::PendingRmCalls;
use sempa_proto::causal::CausalOrder;
use sempa_proto::frame::{Frame, FrameError, FrameKind, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame, LinkKind};
use sempa_proto::message::CTX_BASE;
use sempa_proto::sm::{SM_EXEC, SM_PLACEMENT_LEASE, SM_SPAWN_WAITS};
use sempa_proto::task::{
    OPEN_REQUESTS_MAX, Reply, Request, RmInfo, SendWatermark, Sink, ToDaemon, ToTask, Welcome,
};
use sempa_proto::{
    HostId, Message, Micros, MigrationId, PvmError, PvmResult, RequestId, RouteId, Tid,
};
use sempa_socket::{MessageFds, PendingFds};
use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of the outbox, in bytes, above which links add no further frames. Control frames are always
/// added.
pub(crate) const OUTBOX_BACKLOG_BYTES_MAX: usize = 1 << 20;
/// Maximum total size, in bytes, of the control frames that are queued while a migration interrupts
/// the connection.
pub(crate) const DEFERRED_CONTROL_BYTES_MAX: usize = 256 << 20;
/// Maximum size of the inbox in bytes. Above this size the task accepts no fragments. The senders
/// retain their messages and send probes from time to time.
const INBOX_BYTES_MAX: usize = 1 << 36;
/// Maximum number of links of a task. Above the maximum, sends to new peers fail.
pub(crate) const LINKS_MAX: usize = 1 << 18;
/// Maximum number of retained links to ended tasks.
pub(crate) const ENDED_LINKS_MAX: usize = 1 << 14;
/// Maximum number of notifications that are deferred until the last messages of their task arrive.
/// Above the maximum the oldest notification is delivered early.
pub(crate) const DEFERRED_DELIVERIES_MAX: usize = 1 << 16;

/// Maximum size of a fragment that is copied out of the read buffer. Without the copy, a small
/// message would prevent the release of a large buffer.
const COPIED_FRAGMENT_BYTES_MAX: usize = 16 << 10;

/// The daemon's request to quiesce for a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuiesceRequest {
    pub(crate) migration: MigrationId,
    /// Paths at which the token file may appear.
    pub(crate) token_paths: Vec<PathBuf>,
}

/// Reason why a frame from the daemon was refused. After an error the connection is unusable.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DaemonFrameError {
    /// The frame cannot be decoded. The frame changed nothing.
    #[error(transparent)]
    Undecodable(#[from] FrameError),
    /// A frame contains a piece of an image, which only a daemon receives. The frame changed
    /// nothing.
    #[error("the daemon sent a piece of an image to a task")]
    ImagePiece,
    /// A route message arrived before its descriptors. No route changed.
    #[error("a route message came without its descriptors")]
    MissingDescriptors,
    /// A route message arrived on a channel that carries no descriptors. No route changed.
    #[error("a route message came on a channel without descriptors")]
    NoDescriptorChannel,
    /// Too many descriptors wait for a frame that has not arrived. Earlier frames were handled; the
    /// descriptors are open until the connection is marked as lost.
    #[error("descriptors without a frame")]
    UnexpectedDescriptors,
    /// A reply to the hello arrived after the connection was established. The frame changed
    /// nothing.
    #[error("the daemon sent a second welcome")]
    SecondWelcome,
    /// A quiesce request arrived when the task was quiescing already, or the connection was lost.
    /// The phase is unchanged.
    #[error("the daemon sent a second quiesce request")]
    SecondQuiesce,
    /// The last frame before a migration cannot be encoded. All rings and direct routes are closed
    /// and the shared memory is released; the phase is unchanged and no frame was queued.
    #[error("quiescing: {0}")]
    QuiescedNotSent(FrameError),
}

/// Phase of the connection to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionPhase {
    /// Frames can be sent and received.
    Connected,
    /// The last frame is queued. The socket is closed when all frames are written.
    Quiescing(QuiesceRequest),
    /// The socket is closed; the I/O thread waits for the token file.
    Quiesced(QuiesceRequest),
    /// The connection is lost for good. The text is the reason.
    Lost(String),
}

/// Request that was sent to the daemon and whose reply the caller has not received yet.
#[derive(Debug)]
struct OpenRequest {
    /// Encoded request, retained because a restart may require the library to repeat the request.
    encoded_request: Bytes,
    reply: Option<Reply>,
}

/// Complete state of the runtime. Its methods do no I/O on the daemon's socket.
#[derive(Debug)]
pub(crate) struct Core {
    own_tid: Tid,
    phase: ConnectionPhase,
    connection_alive: Arc<AtomicBool>,
    host: HostId,
    dsig: i32,
    output_sink: Sink,
    trace_sink: Sink,
    rm: Option<RmInfo>,
    rm_generation: u64,
    rm_deaths: u64,
    /// Messages that have arrived and that the program has not received yet.
    pub(crate) inbox: Inbox,
    /// Bytes to be written to the daemon.
    pub(crate) outbox: Outbox,
    deferred_control_frames: VecDeque<Bytes>,
    deferred_control_bytes: usize,
    /// Shared-memory rings to tasks on this host.
    pub(crate) shm_routes: ShmRoutes,
    /// Direct routes to tasks on other hosts, and the agreements about these routes.
    pub(crate) direct_routes: DirectRoutes,
    links: Links,
    /// Causal order of the messages that this task sends and receives.
    pub(super) order: CausalOrder<Message>,
    order_timers: OrderTimers,
    daemon_hold: DaemonHold,
    ended_peers: VecDeque<Tid>,
    /// Links that may have frames to transmit and that wait for space in the outbox.
    pump_queue: VecDeque<Tid>,
    pump_queue_peers: HashSet<Tid>,
    deferred_deliveries: VecDeque<(SendWatermark, Message)>,
    open_requests: HashMap<RequestId, OpenRequest>,
    last_request_id: RequestId,
    /// Unanswered requests of this task's threads to resource managers.
    pub(crate) rm_calls: PendingRmCalls,
    /// Placements that the resource manager leased in advance.
    pub(crate) placement_leases: PlacementLeases,
    daemon_route: RouteId,
    /// Incarnation with which new links begin; see [`Link::begin_incarnation`].
    incarnation: u16,
    windows_disabled: bool,
    /// Migration for which the complete state was handed off to the daemon. While this field is
    /// set, the task accepts no messages.
    handoff_migration: Option<MigrationId>,
    /// True if the program was asked to exit at least once.
    was_exit_requested: bool,
    is_exiting: bool,
    next_timer_at: Option<Micros>,
    event_seq: u64,
    send_event_seq: u64,
}

impl Core {
    /// Creates the state of a task that a daemon has just accepted.
    pub(crate) fn new(welcome: &Welcome) -> Self {
        let (incarnation, last_request) = handoff::initial_ids(welcome);
        let mut core = Self {
            own_tid: welcome.tid,
            phase: ConnectionPhase::Connected,
            connection_alive: Arc::new(AtomicBool::new(true)),
            host: welcome.host,
            dsig: welcome.dsig,
            output_sink: welcome.output_sink,
            trace_sink: welcome.trace_sink,
            rm: welcome.rm,
            rm_generation: 0,
            rm_deaths: 0,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            deferred_control_frames: VecDeque::new(),
            deferred_control_bytes: 0,
            shm_routes: ShmRoutes::default(),
            direct_routes: DirectRoutes::new(welcome),
            links: Links::default(),
            order: CausalOrder::new(welcome.tid, incarnation),
            order_timers: OrderTimers::default(),
            daemon_hold: DaemonHold::default(),
            ended_peers: VecDeque::new(),
            pump_queue: VecDeque::new(),
            pump_queue_peers: HashSet::new(),
            deferred_deliveries: VecDeque::new(),
            open_requests: HashMap::new(),
            last_request_id: last_request,
            rm_calls: PendingRmCalls::default(),
            placement_leases: PlacementLeases::default(),
            daemon_route: RouteId(1),
            incarnation,
            windows_disabled: false,
            handoff_migration: None,
            was_exit_requested: false,
            is_exiting: false,
            next_timer_at: None,
            event_seq: 0,
            send_event_seq: 0,
        };
        core.order.accept_spawn((*welcome.past).clone());
        if let Some(handoff) = &welcome.handoff {
            core.take_over_links(handoff);
        }
        if let Some(restart) = &welcome.restart_info {
            core.roll_back(restart);
        }
        core
    }

    pub(crate) fn phase(&self) -> &ConnectionPhase {
        &self.phase
    }

    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.phase, ConnectionPhase::Connected)
    }

    /// Returns a flag that is true until the connection is lost for good; reading it needs no lock.
    pub(crate) fn connection_alive_flag(&self) -> Arc<AtomicBool> {
        self.connection_alive.clone()
    }

    /// Returns the reason why the connection is lost for good; `None` while the connection is not
    /// lost.
    pub(crate) fn lost_reason(&self) -> Option<&str> {
        match &self.phase {
            ConnectionPhase::Lost(reason) => Some(reason),
            _ => None,
        }
    }

    pub(crate) fn host(&self) -> HostId {
        self.host
    }

    pub(crate) fn dsig(&self) -> i32 {
        self.dsig
    }

    pub(crate) fn output_sink(&self) -> Sink {
        self.output_sink
    }

    pub(crate) fn trace_sink(&self) -> Sink {
        self.trace_sink
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
    pub(crate) fn has_peer_ended(&self, peer: Tid) -> bool {
        self.links.get(&peer).is_some_and(Link::is_peer_gone)
    }

    /// True if the link has fragments to transmit and does not wait for space in the outbox, so its
    /// flow-control window prevents the transmission.
    pub(crate) fn waits_for_window(&self, peer: Tid) -> bool {
        !self.pump_queue_peers.contains(&peer)
            && self
                .links
                .get(&peer)
                .is_some_and(|link| !link.is_all_transmitted())
    }

    /// True if the link waits for space in the outbox.
    pub(crate) fn waits_for_outbox(&self, peer: Tid) -> bool {
        self.pump_queue_peers.contains(&peer)
    }

    /// True if any link waits for space in the outbox.
    pub(crate) fn has_queued_links(&self) -> bool {
        !self.pump_queue.is_empty()
    }

    /// True if every link has transmitted all its fragments.
    pub(crate) fn has_transmitted_all(&self) -> bool {
        self.links
            .values()
            .all(|link| link.is_peer_gone() || link.is_all_transmitted())
    }

    /// Returns, for each link, the sequence number up to which the task has sent. Omits ended peers
    /// and links without sent fragments.
    pub(crate) fn send_watermarks(&self) -> Vec<SendWatermark> {
        let has_sent = |link: &&Link| !link.is_peer_gone() && link.queued_end_seq() > 1;
        let to_watermark = |link: &Link| SendWatermark {
            peer: link.peer(),
            end_seq: link.queued_end_seq(),
        };
        self.links
            .values()
            .filter(has_sent)
            .map(to_watermark)
            .collect()
    }

    /// Returns a counter that increases with every event that can unblock a thread that waits until
    /// its message is written.
    pub(crate) fn send_event_seq(&self) -> u64 {
        self.send_event_seq
    }

    /// Returns the time at which [`Core::run_timers`] must be called at the latest; `None` without
    /// a timer. The time may be earlier than necessary.
    pub(crate) fn next_timer_at(&self) -> Option<Micros> {
        self.next_timer_at
    }

    // ---- calls of the application

    /// Queues a message to another task.
    pub(crate) fn send(&mut self, now: Micros, message: Message) -> PvmResult<()> {
        let peer = message.dst;
        self.queue_in_order(peer, message)?;
        if let Some(slot) = self.shm_routes.slot(peer) {
            self.pump_ring(now, slot);
            self.record_sent(now, peer);
            return Ok(());
        }
        if self.direct_routes.has_route(peer) {
            self.shm_routes.expect_message_at_socket();
            self.pump_direct_route(now, peer);
            self.record_sent(now, peer);
            return Ok(());
        }
        if self.outbox.backlog_bytes() < OUTBOX_BACKLOG_BYTES_MAX {
            self.pump_link(now, peer);
        } else {
            self.queue_for_pump(peer);
        }
        self.record_sent(now, peer);
        self.offer_ring_if_due(now, peer);
        self.request_automatic_route_if_due(now, peer);
        Ok(())
    }

    /// Sends a small message to a task by writing the message to a ring, if no further step is
    /// needed. Returns the wake-up of the peer, if any. `None` means that nothing was sent and that
    /// the caller must use [`Core::send`]. `wants_direct_route` is true if the program wants direct
    /// routes.
    #[inline]
    pub(crate) fn try_send_inline(
        &mut self,
        now: Micros,
        peer: Tid,
        head: &[u8],
        body: &[u8],
        wants_direct_route: bool,
    ) -> Option<Option<PendingWake>> {
        if wants_direct_route && !self.direct_routes.agreements.is_settled(peer) {
            return None;
        }
        self.try_send_through_ring(now, peer, head, body)
    }

    /// True if the library itself processes the messages with this context and tag.
    #[inline]
    pub(super) fn handles_tag(ctx: i32, tag: i32) -> bool {
        ctx == CTX_BASE && [SM_SPAWN_WAITS, SM_PLACEMENT_LEASE].contains(&tag)
    }

    /// Delivers a message. A message of the resource manager that the library itself processes goes
    /// to the component that handles such messages; every other message goes into the inbox.
    pub(crate) fn deliver(&mut self, message: Message) {
        self.event_seq += 1;
        match message.tag {
            SM_SPAWN_WAITS if message.ctx == CTX_BASE => self.rm_calls.handle_wait_report(message),
            SM_PLACEMENT_LEASE if message.ctx == CTX_BASE => {
                self.placement_leases.handle_lease(message)
            }
            _ => {
                if let Some(message) = self.rm_calls.store_if_answer(message) {
                    self.inbox.push(message);
                }
            }
        }
    }

    pub(crate) fn send_to_daemon(&mut self, message: Message) -> PvmResult<()> {
        if message.tag == SM_EXEC {
            // The tasks that it starts begin with this past, which includes that of the spawner.
            self.tell_past();
        }
        let frame = encode_control(&ToDaemon::Message(message)).map_err(|_| PvmError::OutOfRes)?;
        self.push_control(frame)
    }

    /// Queues a request to the daemon. Returns the id of the request, or a reply that reports the
    /// failure.
    pub(crate) fn send_request(&mut self, daemon_request: Request) -> Result<RequestId, Reply> {
        let failure_reply = |error: PvmError, reason: &str| Reply::Failed {
            error,
            reason: reason.to_string(),
        };
        if let ConnectionPhase::Lost(lost_reason) = &self.phase {
            return Err(failure_reply(PvmError::SysErr, lost_reason));
        }
        if self.open_requests.len() >= OPEN_REQUESTS_MAX {
            return Err(failure_reply(
                PvmError::OutOfRes,
                "too many requests of this task are waiting for replies",
            ));
        }
        self.tell_past_of(&daemon_request);
        let id = self.last_request_id.next();
        let frame = encode_control(&ToDaemon::Request {
            id,
            request: daemon_request,
        })
        .map_err(|e| {
            failure_reply(
                PvmError::OutOfRes,
                &format!("the request was not sent: {e}"),
            )
        })?;
        let queued_frame = frame.clone();
        self.push_control(queued_frame).map_err(|e| {
            failure_reply(
                e,
                "the request was not sent: too much data is queued for the daemon",
            )
        })?;
        self.last_request_id = id;
        self.open_requests.insert(
            id,
            OpenRequest {
                encoded_request: frame,
                reply: None,
            },
        );
        Ok(id)
    }

    /// Returns the reply to a request if the reply has arrived, or a failure if the connection is
    /// lost. `None` means that the reply may still arrive.
    pub(crate) fn take_reply(&mut self, id: RequestId) -> Option<Reply> {
        if self
            .open_requests
            .get(&id)
            .is_some_and(|open_request| open_request.reply.is_some())
        {
            return self.open_requests.remove(&id)?.reply;
        }
        let ConnectionPhase::Lost(lost_reason) = &self.phase else {
            return None;
        };
        let reply = Reply::Failed {
            error: PvmError::SysErr,
            reason: lost_reason.clone(),
        };
        self.open_requests.remove(&id);
        Some(reply)
    }

    /// Closes all rings and direct routes, and makes all links ignore their flow-control windows,
    /// because the process is exiting.
    pub(crate) fn disable_windows(&mut self, now: Micros) {
        if !self.windows_disabled {
            self.close_all_rings(now);
            for peer in self.close_all_direct_routes(now) {
                // The process exits before the direct connection has delivered these fragments. The
                // daemon therefore carries the fragments again.
                self.links
                    .get_mut(&peer)
                    .into_iter()
                    .for_each(Link::schedule_retransmission);
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

    /// Handles a frame from the daemon. `received_fds` contains the descriptors that arrived with
    /// the frame.
    ///
    /// # Errors
    /// The frame violates the protocol. After an error the connection is unusable.
    pub(crate) fn handle_frame(
        &mut self,
        now: Micros,
        frame: Frame,
        received_fds: &mut PendingFds,
    ) -> Result<(), DaemonFrameError> {
        match frame.kind {
            FrameKind::Link => {
                let frame = frame.decode_link()?;
                self.handle_link_frame(now, frame);
                Ok(())
            }
            FrameKind::Control => match frame.decode_control::<ToTask>()? {
                ToTask::Route {
                    sender: sender_tid,
                    same_host: is_same_host,
                    message,
                } => {
                    let descriptors = match received_fds.take_message_fds(message.fd_count()) {
                        MessageFds::All(fds) => fds,
                        MessageFds::Lost => {
                            self.handle_lost_descriptors(now, sender_tid, &message);
                            return Ok(());
                        }
                        MessageFds::Missing => {
                            return Err(DaemonFrameError::MissingDescriptors);
                        }
                    };
                    self.handle_ring_message(now, sender_tid, is_same_host, &message, descriptors);
                    self.handle_direct_message(now, sender_tid, is_same_host, message);
                    Ok(())
                }
                control => self.handle_control(now, control),
            },
            FrameKind::Image => Err(DaemonFrameError::ImagePiece),
        }
    }

    /// Lets the queued links transmit while the outbox has space.
    pub(crate) fn pump(&mut self, now: Micros) {
        while self.outbox.backlog_bytes() < OUTBOX_BACKLOG_BYTES_MAX {
            let Some(peer) = self.pump_queue.pop_front() else {
                return;
            };
            self.pump_queue_peers.remove(&peer);
            self.pump_route(now, peer, 1);
        }
    }

    /// Lets one link transmit while the outbox has space.
    pub(crate) fn pump_link(&mut self, now: Micros, peer: Tid) {
        self.pump_route(now, peer, usize::MAX);
    }

    fn pump_route(&mut self, now: Micros, peer: Tid, frames_max: usize) {
        match self.shm_routes.slot(peer) {
            Some(slot) => self.pump_ring(now, slot),
            None if self.direct_routes.has_route(peer) => self.pump_direct_route(now, peer),
            None => self.pump_through_daemon(now, peer, frames_max),
        }
    }

    pub(crate) fn run_timers(&mut self, now: Micros) {
        if self.next_timer_at.is_none_or(|due| due > now) {
            return;
        }
        self.next_timer_at = None;
        let mut due = Vec::new();
        for (peer, link) in &mut self.links {
            match link.next_wakeup() {
                Some(timer_at) if timer_at <= now => due.push(*peer),
                Some(timer_at) => {
                    self.next_timer_at =
                        Some(self.next_timer_at.map_or(timer_at, |e| e.min(timer_at)))
                }
                None => {}
            }
        }
        for peer in due {
            if let Some(link) = self.links.get_mut(&peer) {
                link.handle_event(now, LinkEvent::Wake);
            }
            self.queue_for_pump(peer);
        }
        self.run_order_timers(now);
        self.run_shm_timers(now);
        self.run_direct_timers(now);
        self.pump(now);
    }

    /// Enters the quiesced phase. Called when all frames are written and the socket is closed.
    pub(crate) fn mark_quiesced(&mut self) {
        if let ConnectionPhase::Quiescing(quiesce) = &self.phase {
            self.phase = ConnectionPhase::Quiesced(quiesce.clone());
            self.event_seq += 1;
        }
    }

    /// Continues on a new connection, after a migration that succeeded or failed, or after a
    /// restart from a checkpoint. After a restart, the links are rolled back to the checkpoint.
    pub(crate) fn resume(&mut self, now: Micros, welcome: &Welcome) {
        self.phase = ConnectionPhase::Connected;
        (self.host, self.dsig) = (welcome.host, welcome.dsig);
        self.direct_routes.adopt_host(welcome);
        self.outbox.clear();
        if let Some(restart) = &welcome.restart_info {
            self.roll_back(restart);
            // A resource manager that received a request before the restart no longer knows the
            // request.
            self.set_rm(None);
        }
        self.set_rm(welcome.rm);
        self.forget_marks_of_daemon();
        self.placement_leases.clear();
        for frame in std::mem::take(&mut self.deferred_control_frames) {
            self.outbox.push_frame(frame);
        }
        self.deferred_control_bytes = 0;
        self.daemon_route = self.daemon_route.next();
        let peers: Vec<Tid> = self.links.keys().copied().collect();
        for peer in peers {
            if let Some(link) = self.links.get_mut(&peer) {
                link.handle_event(now, LinkEvent::RouteUp(self.daemon_route));
                self.queue_for_pump(peer);
            }
        }
        self.pump(now);
        self.event_seq += 1;
    }

    /// Marks the connection as lost for good: closes all rings and direct routes, drops all links,
    /// and delivers the deferred notifications. Only the first reason is recorded.
    pub(crate) fn mark_connection_lost(&mut self, reason: impl Into<String>) {
        if self.lost_reason().is_some() {
            return;
        }
        // Messages that peers on this host have sent can still be received.
        self.close_all_rings(Micros(0));
        self.close_all_direct_routes(Micros(0));
        self.release_shared_memory();
        self.phase = ConnectionPhase::Lost(reason.into());
        self.connection_alive.store(false, Ordering::Release);
        self.outbox.clear();
        self.deferred_control_frames.clear();
        self.deferred_control_bytes = 0;
        self.pump_queue.clear();
        self.pump_queue_peers.clear();
        self.next_timer_at = None;
        // No further messages can arrive, so notifications that wait for a last message are
        // delivered.
        self.deliver_unordered();
        for (_, message) in std::mem::take(&mut self.deferred_deliveries) {
            self.inbox.push(message);
        }
        self.links.clear();
        self.event_seq += 1;
    }

    // ---- internal functions

    fn push_control(&mut self, frame: Bytes) -> PvmResult<()> {
        match self.phase {
            ConnectionPhase::Connected => self.outbox.push_frame(frame),
            ConnectionPhase::Quiescing(_) | ConnectionPhase::Quiesced(_) => {
                if self.deferred_control_bytes + frame.len() > DEFERRED_CONTROL_BYTES_MAX {
                    return Err(PvmError::OutOfRes);
                }
                self.deferred_control_bytes += frame.len();
                self.deferred_control_frames.push_back(frame);
            }
            ConnectionPhase::Lost(_) => return Err(PvmError::SysErr),
        }
        Ok(())
    }

    fn queue_for_pump(&mut self, peer: Tid) {
        if self.pump_queue_peers.insert(peer) {
            self.pump_queue.push_back(peer);
        }
    }

    fn new_link(&self, peer: Tid) -> Link {
        let mut link = Link::new(self.own_tid, peer);
        link.begin_incarnation(self.incarnation, true);
        if self.is_connected() {
            link.handle_event(Micros(0), LinkEvent::RouteUp(self.daemon_route));
        }
        if self.windows_disabled {
            link.disable_window();
        }
        link
    }

    /// Returns the link to a peer and creates the link on first use. If the peer of an existing
    /// link ended without sending anything, a new link replaces the old link, because the tid may
    /// have been reused. `None` if the task has too many links.
    pub(super) fn get_or_create_link(&mut self, peer: Tid) -> Option<&mut Link> {
        let is_stale = self
            .links
            .get(&peer)
            .is_some_and(|link| link.is_peer_gone() && link.expected_seq() == 1);
        if is_stale {
            self.order.forget_peer(peer);
        }
        if is_stale || !self.links.contains_key(&peer) {
            if self.links.len() >= LINKS_MAX && !is_stale {
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
            return self.restore_unacked_fragment(now, &frame);
        }
        if frame.dst != self.own_tid || peer == self.own_tid || !peer.is_task() {
            return;
        }
        if self.refuses_data_of(peer) && matches!(frame.kind, LinkKind::Data { .. }) {
            return;
        }
        // Acknowledgements of a task that ended without sending a message may still be in transit.
        // Only the first fragment of a link proves that a task with this tid exists.
        let is_first_fragment = frame.seq == 1 && matches!(frame.kind, LinkKind::Data { .. });
        let has_ended_silently = |link: &Link| {
            link.is_peer_gone()
                && link.expected_seq() == 1
                && !link.has_older_incarnation_than(frame.incarnation)
        };
        if !is_first_fragment && self.links.get(&peer).is_some_and(has_ended_silently) {
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
            incarnation: frame_incarnation,
            payload,
            ..
        } = frame;
        let previous_incarnation = link.incarnation();
        if !link.accept_incarnation(frame_incarnation) {
            return self.pump_link(now, peer);
        }
        if frame_incarnation != previous_incarnation {
            self.reset_order(peer);
        }
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if payload.len() <= COPIED_FRAGMENT_BYTES_MAX {
            link.handle_borrowed_frame(now, kind, seq, ack, &payload[..]);
        } else {
            link.handle_borrowed_frame(now, kind, seq, ack, payload);
        }
        self.accept_messages_from(peer);
        self.pump_link(now, peer);
        if self.windows_disabled {
            // The frame may tell an exiting thread that the peer has everything, so that nothing
            // more will be written.
            self.bump_send_event_seq();
        }
        self.deliver_deferred(peer);
        self.complete_arrivals(now);
    }

    /// True if the inbox has reached its maximum size. While the inbox is full, fragments are
    /// refused, and their senders retain the messages.
    pub(super) fn inbox_is_full(&self) -> bool {
        self.inbox.charged_bytes() >= INBOX_BYTES_MAX
    }

    // ---- access for rings and direct routes

    pub(super) fn direct_routes_and_links(&mut self) -> (&mut DirectRoutes, &mut Links) {
        (&mut self.direct_routes, &mut self.links)
    }

    pub(super) fn bump_event_seq(&mut self) {
        self.event_seq += 1;
    }

    pub(super) fn shm_routes_and_links(&mut self) -> (&mut ShmRoutes, &mut Links) {
        (&mut self.shm_routes, &mut self.links)
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

    pub(super) fn allocate_route(&mut self) -> RouteId {
        self.daemon_route = self.daemon_route.next();
        self.daemon_route
    }

    pub(super) fn bump_send_event_seq(&mut self) {
        self.send_event_seq += 1;
    }

    /// Ensures that [`Core::run_timers`] is called at the time `timer_at` or earlier.
    pub(super) fn schedule_timer(&mut self, timer_at: Micros) {
        self.next_timer_at = Some(self.next_timer_at.map_or(timer_at, |e| e.min(timer_at)));
    }

    /// Ensures that [`Core::run_timers`] is called when this link needs the call.
    pub(super) fn schedule_link_timer(&mut self, peer: Tid) {
        if let Some(timer_at) = self.links.get(&peer).and_then(Link::next_wakeup) {
            self.schedule_timer(timer_at);
        }
    }

    /// Transmits frames of a link through the daemon until the link has no frame left, the outbox
    /// is full, or `frames_left` frames were queued.
    fn pump_through_daemon(&mut self, now: Micros, peer: Tid, mut frames_left: usize) {
        while let Some(frame) = self
            .links
            .get_mut(&peer)
            .and_then(|link| link.next_frame(now))
        {
            self.outbox.push_link(&frame.to_frame());
            frames_left -= 1;
            if frames_left == 0 || self.outbox.backlog_bytes() >= OUTBOX_BACKLOG_BYTES_MAX {
                return self.queue_for_pump(peer);
            }
        }
        self.schedule_link_timer(peer);
    }

    fn handle_control(&mut self, now: Micros, control: ToTask) -> Result<(), DaemonFrameError> {
        match control {
            ToTask::Welcome(_) | ToTask::Refused { .. } => {
                return Err(DaemonFrameError::SecondWelcome);
            }
            ToTask::Reply { id, reply } => {
                self.accept_daemon_item(now, DaemonItem::Reply(id, reply));
            }
            ToTask::Deliver {
                message,
                deliver_after: watermark,
            } => self.accept_daemon_item(now, DaemonItem::Delivery(message, watermark)),
            ToTask::Past(past) => self.accept_daemon_item(now, DaemonItem::Past(past)),
            ToTask::AwaitMarks { wait_number, marks } => {
                self.handle_marks_question(now, wait_number, marks);
            }
            ToTask::PeerGone { tid } => self.handle_peer_end(now, tid),
            ToTask::PeerMigrated { tid } => {
                self.remove_peer_ring(now, tid);
                self.handle_direct_peer_migration(now, tid);
                if let Some(link) = self.links.get_mut(&tid) {
                    link.handle_event(now, LinkEvent::PeerMigrated);
                    self.pump_link(now, tid);
                }
            }
            ToTask::RmChanged { rm } => self.set_rm(rm),
            ToTask::PrepareExit {
                migration: migration_id,
            } => self.handle_exit_announcement(now, migration_id),
            ToTask::Route { .. } => {
                return Err(DaemonFrameError::NoDescriptorChannel);
            }
            ToTask::Quiesce {
                migration,
                token_paths: tokens,
            } => self.begin_quiesce(
                now,
                QuiesceRequest {
                    migration,
                    token_paths: tokens,
                },
            )?,
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
        if peer == self.own_tid || self.has_peer_ended(peer) {
            return;
        }
        self.remove_peer_ring(now, peer);
        if !self.handle_direct_peer_end(now, peer) {
            return;
        }
        // The end of the peer is recorded even if there was no link. Otherwise a notification could
        // wait forever for this peer's last message.
        let Some(link) = self.get_or_create_link(peer) else {
            return;
        };
        link.handle_event(now, LinkEvent::PeerGone);
        self.pump_link(now, peer);
        self.ended_peers.push_back(peer);
        self.event_seq += 1;
        self.order.handle_peer_end(peer);
        self.deliver_deferred(peer);
        self.complete_arrivals(now);
        if self.ended_peers.len() > ENDED_LINKS_MAX
            && let Some(oldest_peer) = self.ended_peers.pop_front()
            && self.has_peer_ended(oldest_peer)
        {
            self.links.swap_remove(&oldest_peer);
            self.order.forget_peer(oldest_peer);
        }
    }

    fn begin_quiesce(
        &mut self,
        now: Micros,
        quiesce: QuiesceRequest,
    ) -> Result<(), DaemonFrameError> {
        if !self.is_connected() {
            return Err(DaemonFrameError::SecondQuiesce);
        }
        self.close_all_rings(now);
        self.close_all_direct_routes(now);
        for link in self.links.values_mut() {
            link.handle_event(now, LinkEvent::RouteDown);
        }
        self.release_shared_memory();
        self.shm_routes.copy_leased_messages();
        sempa_proto::buffer_pool::clear();
        self.pump_queue.clear();
        self.pump_queue_peers.clear();
        self.next_timer_at = None;
        let last_frame = ToDaemon::Quiesced {
            migration: quiesce.migration,
            watermarks: self.send_watermarks(),
            redirect_address: super::redirect::clear_and_locate(),
        };
        self.outbox
            .push_frame(encode_control(&last_frame).map_err(DaemonFrameError::QuiescedNotSent)?);
        self.phase = ConnectionPhase::Quiescing(quiesce);
        self.event_seq += 1;
        Ok(())
    }
}

mod daemon_hold;
mod deferred_deliveries;
mod handoff;
mod ordering;
mod placement_leases;
mod rm_calls;
mod rollback;
#[cfg(test)]
mod tests;
