//! Direct routes to tasks on other hosts: setup, reading, writing and teardown of the connections.
//!
//! Like a ring, a direct route is only a route of a link: it may end at any time, and the daemons
//! then carry the messages. [`RouteAgreements`] decides with which tasks to connect; this module
//! carries the decisions out.
//!
//! All sockets are in one epoll set, which the I/O thread watches while no thread spins on it.

use super::core::Core;
use super::direct::{Acceptor, Dialer, FrameStream, SetupError};
use super::process::ProcessOwned;
use super::route_agreements::{RouteAgreements, RouteEvent, RouteOutput};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustc_hash::FxHashMap;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::link::{LinkEvent, decode_short_head};
use sempa_proto::message::ENC_XDR;
use sempa_proto::route::{Fingerprint, OFFER_ADDRESSES_MAX, OfferId, RouteMsg};
use sempa_proto::{Message, Micros, PvmResult, Tid};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Maximum number of direct routes of one task.
pub(crate) const DIRECT_ROUTES_MAX: usize = 512;
/// Maximum number of ready descriptors handled in one poll.
const READY_EVENTS_MAX: usize = 64;
/// Epoll event data of all descriptors that belong to routes in setup.
const SETUP_TOKEN: u64 = u64::MAX;
/// Time for which the I/O thread does not watch the direct routes after another thread has polled
/// them.
pub(crate) const POLLED_BY_THREAD_WINDOW: Micros = Micros::from_millis(2);
/// A draining connection is closed if nothing arrives for this time.
pub(crate) const DRAIN_SILENCE_TIMEOUT: Micros = Micros::from_secs(2);
/// Maximum duration of the draining of a connection.
pub(crate) const DRAIN_TIMEOUT: Micros = Micros::from_secs(30);
/// Time without traffic after which a route frees its buffers.
const IDLE_TIMEOUT: Micros = Micros::from_secs(60);
const IDLE_CHECK_INTERVAL: Micros = Micros::from_secs(10);
/// Stands for "no certificate" in an acceptance: tasks on one host need none.
const NO_CERTIFICATE: Fingerprint = [0; 32];

/// Connection of a direct route, with its state.
#[derive(Debug)]
struct DirectConn {
    stream: FrameStream,
    /// Output is waiting until the socket becomes writable.
    is_write_blocked: bool,
    /// The last read stopped at its limit, so the socket may still contain data.
    has_unread_data: bool,
    /// Set while the connection is drained: nothing is written, but data that the peer sent is
    /// still read.
    drain: Option<DrainState>,
    last_traffic_at: Micros,
}

/// Time limits for draining a connection on which nothing can be written.
#[derive(Clone, Copy, Debug)]
struct DrainState {
    /// Time at which draining ends if nothing arrives.
    silence_deadline: Micros,
    deadline: Micros,
    /// The peer has ended. The links are notified of the end when the connection has been drained.
    peer_ended: bool,
}

/// Addresses and certificate of a peer that offers a route.
#[derive(Debug)]
struct IncomingOffer {
    addresses: Vec<SocketAddr>,
    fingerprint: Fingerprint,
}

/// Epoll set of all descriptors of the direct routes.
#[derive(Debug)]
pub(crate) struct ReadySet(Epoll);

impl AsFd for ReadySet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// The direct routes of this task, both established and in setup.
#[derive(Debug)]
pub(crate) struct DirectRoutes {
    pub(crate) agreements: RouteAgreements,
    /// IP addresses of this host, which offers contain.
    addresses: Vec<IpAddr>,
    acceptor: Acceptor,
    /// Peers to which this task's offers were sent.
    offered_peers: FxHashMap<OfferId, Tid>,
    dialers: FxHashMap<Tid, Dialer>,
    /// Contents of the offer that is being handled.
    incoming_offer: Option<IncomingOffer>,
    /// Fingerprint of the peer's certificate in the acceptance that is being handled.
    peer_fingerprint: Fingerprint,
    conns: FxHashMap<Tid, DirectConn>,
    blocked_conn_count: usize,
    next_idle_check: Option<Micros>,
    ready_set: Option<Arc<ProcessOwned<ReadySet>>>,
    /// Time at which a spinning thread last polled the routes.
    polled_at: Option<Micros>,
}

impl DirectRoutes {
    pub(crate) fn new(me: Tid, addresses: Vec<IpAddr>) -> DirectRoutes {
        DirectRoutes {
            agreements: RouteAgreements::new(me),
            addresses,
            acceptor: Acceptor::default(),
            offered_peers: FxHashMap::default(),
            dialers: FxHashMap::default(),
            incoming_offer: None,
            peer_fingerprint: NO_CERTIFICATE,
            conns: FxHashMap::default(),
            blocked_conn_count: 0,
            next_idle_check: None,
            ready_set: None,
            polled_at: None,
        }
    }

    /// Sets the addresses of the host, after a migration.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<IpAddr>) {
        self.addresses = addresses;
    }

    /// True if messages to this peer go through a direct connection.
    pub(crate) fn has_route(&self, peer: Tid) -> bool {
        self.conns.contains_key(&peer)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// True if frames to this peer wait until the socket of the direct route is writable.
    pub(crate) fn is_blocked(&self, peer: Tid) -> bool {
        self.conns
            .get(&peer)
            .is_some_and(|far| far.is_write_blocked)
    }

    /// Returns the epoll set that the I/O thread must watch; `None` while another thread polls it.
    pub(crate) fn ready_set_to_watch(&self, now: Micros) -> Option<Arc<ProcessOwned<ReadySet>>> {
        let attended = self
            .polled_at
            .is_some_and(|at| now.since(at) < POLLED_BY_THREAD_WINDOW);
        self.ready_set
            .clone()
            .filter(|_| !attended || self.has_background_work())
    }

    /// True if the I/O thread must watch the routes because no other thread does.
    pub(crate) fn needs_io_thread(&self) -> bool {
        self.is_open() && (self.polled_at.is_none() || self.has_background_work())
    }

    /// True if routes are in setup or wait for a writable socket. Spinning threads do not handle
    /// these.
    fn has_background_work(&self) -> bool {
        self.blocked_conn_count > 0 || !self.dialers.is_empty() || !self.acceptor.is_idle()
    }

    /// True if there are routes, or routes in setup.
    pub(crate) fn is_open(&self) -> bool {
        self.ready_set.is_some()
    }

    /// Records that a spinning thread polls the routes at this time; `None` means that the thread
    /// stops polling.
    pub(crate) fn record_polling(&mut self, now: Option<Micros>) {
        self.polled_at = now;
    }

    fn get_or_create_ready_set(&mut self) -> Option<Arc<ProcessOwned<ReadySet>>> {
        if self.ready_set.is_none() {
            let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).ok()?;
            self.ready_set = Some(Arc::new(ProcessOwned::new_fd(ReadySet(set))));
        }
        self.ready_set.clone()
    }

    /// Adds all descriptors of routes in setup to the epoll set.
    fn watch_setups(&mut self) {
        let Some(set) = self.get_or_create_ready_set() else {
            return;
        };
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        self.acceptor.add_poll_fds(&mut fds);
        self.dialers
            .values()
            .for_each(|dialer| dialer.add_poll_fds(&mut fds));
        for fd in &fds {
            set_poll_events(&set, fd.as_fd(), fd.events(), SETUP_TOKEN);
        }
    }
}

/// Adds a descriptor to the epoll set, or changes its events if it is in the set.
fn set_poll_events(set: &ProcessOwned<ReadySet>, fd: BorrowedFd<'_>, wants: PollFlags, token: u64) {
    let mut flags = EpollFlags::empty();
    flags.set(EpollFlags::EPOLLOUT, wants.contains(PollFlags::POLLOUT));
    flags.set(EpollFlags::EPOLLIN, wants.contains(PollFlags::POLLIN));
    let mut event = EpollEvent::new(flags, token);
    if set.get().0.add(fd, event) == Err(Errno::EEXIST) {
        // If the kernel has no memory for the entry, the route is handled when its timer expires.
        let _ = set.get().0.modify(fd, &mut event);
    }
}

impl Core {
    // ---- agreement

    /// Requests a direct route to this peer for the program. Returns true if a message need not
    /// wait for the answer.
    pub(crate) fn request_route(&mut self, now: Micros, peer: Tid) -> bool {
        if !self.is_connected()
            || self.has_disabled_windows()
            || peer == self.tid()
            || !peer.is_task()
        {
            return true;
        }
        if !self.direct.agreements.is_settled(peer) {
            if self.is_gone(peer) {
                return true;
            }
            self.handle_route_event(now, RouteEvent::Requested(peer));
        }
        self.direct.agreements.is_settled(peer)
    }

    /// Applies `change` to the program's requests for notifications about routes, and sends the
    /// notifications that are due.
    pub(crate) fn update_route_watches(
        &mut self,
        now: Micros,
        change: impl FnOnce(&mut RouteAgreements) -> PvmResult<()>,
    ) -> PvmResult<()> {
        let changed = change(&mut self.direct.agreements);
        self.run_route_outputs(now);
        changed
    }

    /// Handles a route message of a peer about direct routes.
    pub(super) fn handle_direct_message(
        &mut self,
        now: Micros,
        from: Tid,
        same_host: bool,
        message: RouteMsg,
    ) {
        let event = match message {
            RouteMsg::DirectOffer {
                id,
                mut addresses,
                fingerprint,
                incarnation: line,
            } => {
                self.adopt_incarnation(now, from, line);
                addresses.truncate(OFFER_ADDRESSES_MAX);
                self.direct.incoming_offer = Some(IncomingOffer {
                    addresses,
                    fingerprint,
                });
                RouteEvent::OfferReceived {
                    peer: from,
                    id,
                    same_host,
                }
            }
            RouteMsg::DirectAccept {
                id,
                fingerprint,
                incarnation: line,
            } => {
                self.adopt_incarnation(now, from, line);
                self.direct.peer_fingerprint = fingerprint;
                RouteEvent::Accepted {
                    peer: from,
                    id,
                    same_host: fingerprint == NO_CERTIFICATE,
                }
            }
            RouteMsg::DirectRefuse { id } => RouteEvent::Refused { peer: from, id },
            _ => return,
        };
        if self.is_connected() && !self.has_disabled_windows() {
            self.handle_route_event(now, event);
        }
    }

    /// Adopts the incarnation that a peer announces in a route message. Frames on direct routes do
    /// not carry the incarnation, and they may be the first frames that the two tasks exchange
    /// after a restart of one of them.
    fn adopt_incarnation(&mut self, now: Micros, peer: Tid, incarnation: u16) {
        if incarnation != self.incarnation_with(peer)
            && let Some(link) = self.get_or_create_link(peer)
        {
            link.accept_incarnation(incarnation);
            self.pump_link(now, peer);
        }
    }

    pub(super) fn handle_route_event(&mut self, now: Micros, event: RouteEvent) {
        self.direct.agreements.handle(now, event);
        if event != RouteEvent::TimerExpired {
            self.bump_event_seq();
        }
        self.run_route_outputs(now);
    }

    /// Executes the actions that the agreements have queued.
    fn run_route_outputs(&mut self, now: Micros) {
        while let Some(output) = self.direct.agreements.next_output() {
            match output {
                RouteOutput::Offer { to, id } => {
                    if !self.offer_direct(now, to, id) {
                        self.direct.agreements.handle(now, RouteEvent::Failed(to));
                    }
                }
                RouteOutput::Withdraw { id } => {
                    self.direct.offered_peers.remove(&id);
                    self.direct.acceptor.withdraw(id);
                }
                RouteOutput::Accept { to, id } => {
                    let incarnation = self.incarnation_with(to);
                    self.send_route_message(
                        to,
                        RouteMsg::DirectAccept {
                            id,
                            fingerprint: NO_CERTIFICATE,
                            incarnation,
                        },
                        Vec::new(),
                    );
                }
                RouteOutput::Dial { to, id } => {
                    if !self.start_dial(now, to, id) {
                        self.send_route_message(to, RouteMsg::DirectRefuse { id }, Vec::new());
                        self.direct.agreements.handle(now, RouteEvent::Failed(to));
                    }
                }
                RouteOutput::ExpectConnection { id } => self
                    .direct
                    .acceptor
                    .record_acceptance(id, self.direct.peer_fingerprint),
                RouteOutput::Refuse { to, id } => {
                    self.send_route_message(to, RouteMsg::DirectRefuse { id }, Vec::new());
                }
                RouteOutput::Close { peer } => self.close_direct(now, peer),
                RouteOutput::Notify { ctx, tag, words } => {
                    let mut body = Packer::new(Encoding::Xdr);
                    body.items(words);
                    let me = self.tid();
                    self.deliver(Message {
                        src: me,
                        dst: me,
                        ctx,
                        tag,
                        wid: 0,
                        enc: ENC_XDR,
                        body: body.finish(),
                    });
                }
            }
            self.bump_event_seq();
        }
        if let Some(due) = self.direct.agreements.next_wakeup() {
            self.schedule_timer(due);
        }
        self.advance_setups(now);
    }

    fn offer_direct(&mut self, now: Micros, to: Tid, id: OfferId) -> bool {
        if self.direct.conns.len() >= DIRECT_ROUTES_MAX {
            return false;
        }
        let Ok((port, fingerprint)) = self.direct.acceptor.open_offer(now, id) else {
            return false;
        };
        self.direct.offered_peers.insert(id, to);
        let addresses = self
            .direct
            .addresses
            .iter()
            .map(|ip| SocketAddr::new(*ip, port));
        let addresses = addresses.take(OFFER_ADDRESSES_MAX).collect();
        let incarnation = self.incarnation_with(to);
        self.send_route_message(
            to,
            RouteMsg::DirectOffer {
                id,
                addresses,
                fingerprint,
                incarnation,
            },
            Vec::new(),
        )
    }

    fn start_dial(&mut self, now: Micros, to: Tid, id: OfferId) -> bool {
        let Some(IncomingOffer {
            addresses,
            fingerprint,
        }) = self.direct.incoming_offer.take()
        else {
            return false;
        };
        if self.direct.conns.len() >= DIRECT_ROUTES_MAX {
            return false;
        }
        let Ok(dialer) = Dialer::new(now, id, &addresses, fingerprint) else {
            return false;
        };
        let fingerprint = dialer.fingerprint();
        self.direct.dialers.insert(to, dialer);
        let incarnation = self.incarnation_with(to);
        self.send_route_message(
            to,
            RouteMsg::DirectAccept {
                id,
                fingerprint,
                incarnation,
            },
            Vec::new(),
        )
    }

    /// Advances all routes in setup.
    fn advance_setups(&mut self, now: Micros) {
        if self.direct.acceptor.is_idle() && self.direct.dialers.is_empty() {
            if self.direct.conns.is_empty() {
                self.direct.ready_set = None;
            }
            return;
        }
        let mut done: Vec<(Tid, Result<FrameStream, SetupError>)> = Vec::new();
        for (id, outcome) in self.direct.acceptor.step(now) {
            if let Some(peer) = self.direct.offered_peers.remove(&id) {
                done.push((peer, outcome));
            }
        }
        self.direct
            .dialers
            .retain(|peer, dialer| match dialer.step(now) {
                Some(outcome) => {
                    done.push((*peer, outcome));
                    false
                }
                None => true,
            });
        let dialers = self.direct.dialers.values().map(Dialer::next_wakeup);
        if let Some(due) = dialers.chain(self.direct.acceptor.next_wakeup()).min() {
            self.schedule_timer(due);
        }
        self.direct.watch_setups();
        for (peer, outcome) in done {
            match outcome {
                Ok(end) => self.install_direct(now, peer, end),
                Err(_) => self.handle_route_event(now, RouteEvent::Failed(peer)),
            }
        }
    }

    fn install_direct(&mut self, now: Micros, peer: Tid, end: FrameStream) {
        let Some(set) = self.direct.get_or_create_ready_set() else {
            return self.handle_route_event(now, RouteEvent::Failed(peer));
        };
        set_poll_events(&set, end.as_fd(), PollFlags::POLLIN, event_token(peer));
        self.direct.conns.insert(
            peer,
            DirectConn {
                stream: end,
                is_write_blocked: false,
                has_unread_data: false,
                drain: None,
                last_traffic_at: now,
            },
        );
        let look = *self
            .direct
            .next_idle_check
            .get_or_insert(now + IDLE_CHECK_INTERVAL);
        self.schedule_timer(look);
        let route = self.next_route();
        if let Some(link) = self.get_or_create_link(peer) {
            link.handle(now, LinkEvent::RouteUp(route));
        }
        self.handle_route_event(now, RouteEvent::Connected(peer));
        self.pump_direct(now, peer);
        self.drain_direct(now, peer);
    }

    /// Closes the connection to this peer, or cancels its setup. The daemons carry the queued
    /// messages.
    fn close_direct(&mut self, now: Micros, peer: Tid) {
        self.direct.dialers.remove(&peer);
        if let Some(DirectConn {
            stream: end,
            is_write_blocked: blocked,
            ..
        }) = self.direct.conns.remove(&peer)
        {
            self.direct.blocked_conn_count -= usize::from(blocked);
            if let Some(set) = &self.direct.ready_set {
                // Closing alone is not enough: a forked child may have a copy of the descriptor,
                // which would keep the entry in the set.
                let _ = set.get().0.delete(end.as_fd());
            }
            end.close();
            self.bump_send_event_seq();
            self.reroute_through_daemon(now, peer);
        }
    }

    // ---- reading and writing

    /// Reads all direct routes that have data. Returns true if a frame arrived.
    pub(crate) fn poll_direct(&mut self, now: Micros) -> bool {
        let Some(set) = self.direct.ready_set.clone() else {
            return false;
        };
        let mut events = [EpollEvent::empty(); READY_EVENTS_MAX];
        let ready = set
            .get()
            .0
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        let (mut found, mut has_setup_event) = (false, false);
        for event in &events[..ready] {
            if event.data() == SETUP_TOKEN {
                has_setup_event = true;
                continue;
            }
            let Ok(raw) = i32::try_from(event.data()) else {
                continue;
            };
            let peer = Tid::from_raw(raw);
            if event.events().contains(EpollFlags::EPOLLOUT) {
                self.pump_direct(now, peer);
            }
            found |= self.drain_direct(now, peer);
        }
        if has_setup_event {
            self.advance_setups(now);
        }
        found
    }

    /// Reads one route. Returns true if a frame arrived.
    pub(super) fn drain_direct(&mut self, now: Micros, peer: Tid) -> bool {
        if self.inbox_is_full() {
            return false;
        }
        let (direct, links) = self.direct_and_links();
        let (Some(conn), Some(link)) = (direct.conns.get_mut(&peer), links.get_mut(&peer)) else {
            return false;
        };
        let (mut found, mut garbage) = (false, false);
        let ended = conn.stream.read(&mut |frame| {
            found = true;
            match frame
                .split_first_chunk()
                .and_then(|(head, rest)| Some((decode_short_head(*head)?, rest)))
            {
                Some(((kind, seq, ack), rest)) => {
                    link.handle_borrowed_frame(now, kind, seq, ack, rest)
                }
                None => garbage = true,
            }
        });
        let answers = link.has_frame();
        conn.has_unread_data = matches!(ended, Ok(true));
        if found {
            conn.last_traffic_at = now;
            if let Some(draining) = &mut conn.drain {
                draining.silence_deadline = (now + DRAIN_SILENCE_TIMEOUT).min(draining.deadline);
            }
            self.deliver_messages_from(peer);
            self.release_deferred(peer);
        }
        match ended {
            Err(_) => self.finish_direct(now, peer),
            Ok(_) if garbage => self.finish_direct(now, peer),
            Ok(true) => {}
            Ok(false) if answers => self.pump_direct(now, peer),
            Ok(false) => self.schedule_link_timer(peer),
        }
        found
    }

    /// Ends the route whose connection has been read to its end.
    fn finish_direct(&mut self, now: Micros, peer: Tid) {
        let gone = self
            .direct
            .conns
            .get(&peer)
            .and_then(|far| far.drain)
            .is_some_and(|last| last.peer_ended);
        self.handle_route_event(now, RouteEvent::Ended(peer));
        self.release_deferred(peer);
        if gone {
            self.handle_peer_end(now, peer);
        }
    }

    /// Starts draining a connection on which nothing can be written: reads what the peer sent
    /// before, until the connection ends or a time limit of [`DrainState`] expires.
    fn start_draining(&mut self, now: Micros, peer: Tid, peer_ended: bool) {
        let direct = &mut self.direct;
        let Some(conn) = direct.conns.get_mut(&peer) else {
            return;
        };
        let silent_until = now + DRAIN_SILENCE_TIMEOUT;
        let new_drain = DrainState {
            silence_deadline: silent_until,
            deadline: now + DRAIN_TIMEOUT,
            peer_ended,
        };
        conn.drain.get_or_insert(new_drain).peer_ended |= peer_ended;
        if std::mem::take(&mut conn.is_write_blocked) {
            direct.blocked_conn_count -= 1;
            if let Some(set) = &direct.ready_set {
                set_poll_events(
                    set,
                    conn.stream.as_fd(),
                    PollFlags::POLLIN,
                    event_token(peer),
                );
            }
        }
        self.schedule_timer(silent_until);
        self.bump_send_event_seq();
        while self.drain_direct(now, peer) {}
    }

    /// Writes frames of the link, as far as the socket accepts them.
    pub(super) fn pump_direct(&mut self, now: Micros, peer: Tid) {
        let (direct, links) = self.direct_and_links();
        let (Some(conn), Some(link)) = (direct.conns.get_mut(&peer), links.get_mut(&peer)) else {
            return;
        };
        // If the peer has just ended, writing would make the peer's kernel discard data that it has
        // not delivered. This data must be read first; the window bounds its amount.
        if conn.drain.is_some() || conn.has_unread_data {
            return;
        }
        let mut ended = false;
        loop {
            while conn.stream.has_room()
                && let Some(frame) = link.next_frame(now)
            {
                conn.stream
                    .push(&[&frame.encode_short_head(), frame.head, frame.body]);
                conn.last_traffic_at = now;
            }
            ended |= conn.stream.flush().is_err();
            if ended || conn.stream.wants_write() || !link.has_frame() {
                break;
            }
        }
        let blocked = conn.stream.wants_write();
        if blocked != conn.is_write_blocked && !ended {
            conn.is_write_blocked = blocked;
            direct.blocked_conn_count = if blocked {
                direct.blocked_conn_count + 1
            } else {
                direct.blocked_conn_count - 1
            };
            let wants = if blocked {
                PollFlags::POLLIN | PollFlags::POLLOUT
            } else {
                PollFlags::POLLIN
            };
            if let Some(set) = &direct.ready_set {
                set_poll_events(set, conn.stream.as_fd(), wants, event_token(peer));
            }
            self.bump_send_event_seq();
        }
        if ended {
            self.start_draining(now, peer, false);
        } else if !blocked {
            // If blocked, the socket's readiness triggers the next write.
            self.schedule_link_timer(peer);
        }
    }

    // ---- teardown

    /// Reads what has arrived and closes all direct routes. All later frames go through the daemon.
    /// Returns the peers of the closed routes.
    pub(super) fn end_direct(&mut self, now: Micros) -> Vec<Tid> {
        let peers: Vec<Tid> = self.direct.conns.keys().copied().collect();
        for peer in &peers {
            while self.drain_direct(now, *peer) {}
        }
        let ended_peers = self
            .direct
            .conns
            .iter()
            .filter(|(_, far)| far.drain.is_some_and(|last| last.peer_ended));
        let ended_peers: Vec<Tid> = ended_peers.map(|(peer, _)| *peer).collect();
        self.handle_route_event(now, RouteEvent::CloseAll);
        self.direct.acceptor.close();
        self.direct.offered_peers.clear();
        self.direct.dialers.clear();
        self.direct.ready_set = None;
        self.direct.blocked_conn_count = 0;
        ended_peers
            .into_iter()
            .for_each(|peer| self.handle_peer_end(now, peer));
        peers
    }

    /// Handles the end of a peer. Returns false if the peer's connection must be drained first;
    /// [`Core::handle_peer_end`] is called again after draining.
    pub(super) fn direct_peer_ended(&mut self, now: Micros, peer: Tid) -> bool {
        if self.direct.has_route(peer) {
            self.start_draining(now, peer, true);
            return false;
        }
        self.handle_route_event(now, RouteEvent::PeerEnded(peer));
        true
    }

    /// Closes the direct route to a peer that has migrated.
    pub(super) fn direct_peer_migrated(&mut self, now: Micros, peer: Tid) {
        while self.drain_direct(now, peer) {}
        self.handle_route_event(now, RouteEvent::PeerMigrated(peer));
    }

    /// Handles expired timers: unanswered offers, drained connections and idle routes.
    pub(super) fn run_direct_timers(&mut self, now: Micros) {
        // Data is read before any timer causes a write: this task may have been stopped for a long
        // time.
        self.poll_direct(now);
        let draining = self
            .direct
            .conns
            .iter()
            .filter(|(_, far)| far.drain.is_some());
        for peer in draining.map(|(peer, _)| *peer).collect::<Vec<Tid>>() {
            // This task may have been stopped, so data may have arrived before the deadline.
            while self.drain_direct(now, peer) {}
            match self.direct.conns.get(&peer).and_then(|far| far.drain) {
                Some(last) if last.silence_deadline <= now => self.finish_direct(now, peer),
                Some(last) => self.schedule_timer(last.silence_deadline),
                None => {}
            }
        }
        self.shrink_idle_routes(now);
        self.handle_route_event(now, RouteEvent::TimerExpired);
    }

    /// Frees the buffers of idle routes.
    fn shrink_idle_routes(&mut self, now: Micros) {
        let direct = &mut self.direct;
        if direct.next_idle_check.is_some_and(|due| due <= now) {
            for far in direct
                .conns
                .values_mut()
                .filter(|far| now.since(far.last_traffic_at) >= IDLE_TIMEOUT)
            {
                far.stream.release_buffers();
            }
            direct.next_idle_check = (!direct.conns.is_empty()).then(|| now + IDLE_CHECK_INTERVAL);
        }
        if let Some(due) = self.direct.next_idle_check {
            self.schedule_timer(due);
        }
    }

    /// Returns the size of all buffers of direct routes.
    #[cfg(test)]
    pub(super) fn direct_buffer_bytes(&self) -> usize {
        self.direct
            .conns
            .values()
            .map(|far| far.stream.buffer_bytes())
            .sum()
    }
}

fn event_token(peer: Tid) -> u64 {
    u64::try_from(peer.raw()).expect("tids of tasks are positive")
}
