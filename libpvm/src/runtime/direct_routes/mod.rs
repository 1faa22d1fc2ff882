//! Direct routes to tasks on other hosts: setup, reading, writing and teardown of the connections.
//!
//! Like a ring, a direct route is only a route of a link. The route may end at any time, and the
//! daemons then carry the messages. [`RouteAgreements`] decides with which tasks to connect; this
//! module executes the decisions.
//!
//! All sockets are in one epoll set, which the I/O thread watches while no other thread polls the
//! routes. Established connections are also in the set on which a waiting application thread
//! sleeps.

mod automatic_requests;
mod link_sink;
#[cfg(test)]
mod stream_cost_tests;
mod watch;

use super::automatic_routes::AutomaticRoutes;
use super::core::Core;
use super::direct::{Acceptor, Dialer, FrameStream, SetupError};
use super::process::ProcessOwned;
use super::route_agreements::{RouteAgreements, RouteEvent, RouteKind, RouteOutput};
use super::socket_waiters::{ReadySockets, SocketWaiters};
use link_sink::LinkSink;
use nix::poll::PollFd;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustc_hash::FxHashMap;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::link::LinkEvent;
use sempa_proto::message::ENC_XDR;
use sempa_proto::route::{Fingerprint, OFFER_ADDRESSES_MAX, OfferId, RouteMsg};
use sempa_proto::task::Welcome;
use sempa_proto::{Message, Micros, PvmResult, Tid};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
pub(crate) use watch::ReadySet;

/// Maximum number of explicit direct routes of one task.
pub(crate) const DIRECT_ROUTES_MAX: usize = 512;
/// Maximum number of ready descriptors handled in one poll.
const READY_EVENTS_MAX: usize = 64;
/// Maximum number of reads of a connection whose reads stop at their limit, before the other
/// connections and the application continue. Together they read more than a link may have in
/// flight.
const REPEATED_READS_MAX: usize = 8;
/// Epoll event data of all descriptors that belong to routes in setup. No tid has this value.
const SETUP_EVENT_DATA: u64 = u64::MAX;
/// Time for which the I/O thread does not watch the direct routes after another thread has polled
/// them.
pub(crate) const THREAD_POLL_WINDOW: Micros = Micros::from_millis(2);
/// Time without received data after which a draining connection is closed.
pub(crate) const DRAIN_SILENCE_TIMEOUT: Micros = Micros::from_secs(2);
/// Maximum duration of the draining of a connection.
pub(crate) const DRAIN_TIMEOUT: Micros = Micros::from_secs(30);
/// Time without traffic after which a route frees its buffers.
const ROUTE_IDLE_TIMEOUT: Micros = Micros::from_secs(60);
const IDLE_CHECK_INTERVAL: Micros = Micros::from_secs(10);
/// Stands for "no certificate" in an acceptance. Tasks on one host need no certificates.
const NO_CERTIFICATE: Fingerprint = [0; 32];

/// Connection of a direct route, with its state.
#[derive(Debug)]
struct DirectConn {
    stream: FrameStream,
    /// True if output is waiting until the socket becomes writable.
    is_write_blocked: bool,
    /// True if the last read stopped at its limit, so the socket may still contain data.
    has_unread_data: bool,
    /// Time limits while the connection is drained; `None` before draining. During draining nothing
    /// is written, but data that the peer sent is still read.
    drain_state: Option<DrainState>,
    last_traffic_at: Micros,
}

/// Time limits for draining a connection to which nothing can be written.
#[derive(Clone, Copy, Debug)]
struct DrainState {
    /// Time at which draining ends if no further data arrives.
    silence_deadline: Micros,
    deadline: Micros,
    /// True if the peer has ended. The links are notified of this end when the connection has been
    /// drained.
    has_peer_ended: bool,
}

/// Addresses and certificate of a peer that offers a route.
#[derive(Debug)]
struct IncomingOffer {
    addresses: Vec<SocketAddr>,
    fingerprint: Fingerprint,
}

/// The direct routes of this task, both established and in setup.
#[derive(Debug)]
pub(crate) struct DirectRoutes {
    pub(crate) agreements: RouteAgreements,
    /// Decides which routes the library sets up on its own.
    pub(crate) automatic: AutomaticRoutes,
    /// IP addresses of this host. Offers contain these addresses.
    addresses: Vec<IpAddr>,
    acceptor: Acceptor,
    /// Peers to which this task's offers were sent.
    offered_peers: FxHashMap<OfferId, Tid>,
    dialers: FxHashMap<Tid, Dialer>,
    /// Contents of the offer that [`RouteAgreements`] handles at present.
    incoming_offer: Option<IncomingOffer>,
    /// Fingerprint of the peer's certificate in the acceptance that [`RouteAgreements`] handles at
    /// present.
    peer_fingerprint: Fingerprint,
    conns: FxHashMap<Tid, DirectConn>,
    blocked_conn_count: usize,
    next_idle_check_at: Option<Micros>,
    ready_set: Option<Arc<ProcessOwned<ReadySet>>>,
    /// Sets of the application threads, which contain the established connections.
    app_waiters: Option<Arc<SocketWaiters>>,
    /// Peers whose last read stopped at its limit, so that the socket may still contain data of
    /// which the I/O thread knows nothing.
    unread_peers: Vec<Tid>,
    /// Time at which an application thread last polled the routes, or was woken by one of them.
    last_polled_at: Option<Micros>,
    /// True while an application thread sleeps on the established connections.
    has_sleeping_app_thread: bool,
}

impl DirectRoutes {
    /// Creates the state of a task without routes on the host of `welcome`.
    pub(crate) fn new(welcome: &Welcome) -> Self {
        Self {
            agreements: RouteAgreements::new(welcome.tid),
            automatic: AutomaticRoutes::new(welcome.allows_automatic_routes),
            addresses: welcome.addresses.clone(),
            acceptor: Acceptor::default(),
            offered_peers: FxHashMap::default(),
            dialers: FxHashMap::default(),
            incoming_offer: None,
            peer_fingerprint: NO_CERTIFICATE,
            conns: FxHashMap::default(),
            blocked_conn_count: 0,
            next_idle_check_at: None,
            ready_set: None,
            app_waiters: None,
            unread_peers: Vec::new(),
            last_polled_at: None,
            has_sleeping_app_thread: false,
        }
    }

    /// Replaces what depends on the host after a migration.
    pub(crate) fn adopt_host(&mut self, welcome: &Welcome) {
        self.addresses.clone_from(&welcome.addresses);
        self.automatic
            .reset_for_host(welcome.allows_automatic_routes);
    }

    /// Makes waiting application threads sleep on the established connections, too.
    pub(crate) fn set_app_waiters(&mut self, waiters: Arc<SocketWaiters>) {
        self.app_waiters = Some(waiters);
    }

    /// Returns the sets of the application threads, if there are established connections.
    pub(crate) fn app_waiters(&self) -> Option<Arc<SocketWaiters>> {
        self.app_waiters.clone().filter(|_| !self.conns.is_empty())
    }

    /// True if a connection must be read although no epoll set may report it to the I/O thread.
    pub(crate) fn has_unread_data(&self) -> bool {
        !self.unread_peers.is_empty()
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
            .is_some_and(|conn| conn.is_write_blocked)
    }

    /// Returns the epoll set that the I/O thread must watch. `None` if there are no routes, or if
    /// another thread polls the set and no route is in setup or waits for a writable socket.
    pub(crate) fn ready_set_to_watch(&self, now: Micros) -> Option<Arc<ProcessOwned<ReadySet>>> {
        let is_polled_by_thread = self
            .last_polled_at
            .is_some_and(|polled_at| now.since(polled_at) < THREAD_POLL_WINDOW);
        self.ready_set
            .clone()
            .filter(|_| !is_polled_by_thread || self.has_background_work())
    }

    /// True if the I/O thread must watch the routes: no other thread polls them or sleeps on them,
    /// or a route is in setup or waits for a writable socket.
    pub(crate) fn needs_io_thread(&self) -> bool {
        let is_watched = self.last_polled_at.is_some() || self.has_sleeping_app_thread;
        self.is_any_open() && (!is_watched || self.has_background_work())
    }

    /// True if routes are in setup or wait for a writable socket. Spinning threads do not handle
    /// such routes.
    fn has_background_work(&self) -> bool {
        self.blocked_conn_count > 0 || !self.dialers.is_empty() || !self.acceptor.is_idle()
    }

    /// Records whether the socket of a connection refuses more data, and watches the socket while
    /// it does. Returns true if this has changed.
    fn set_write_blocked(&mut self, peer: Tid, is_blocked: bool) -> bool {
        let Some(conn) = self.conns.get_mut(&peer) else {
            return false;
        };
        if std::mem::replace(&mut conn.is_write_blocked, is_blocked) == is_blocked {
            return false;
        }
        if is_blocked {
            self.blocked_conn_count += 1;
        } else {
            self.blocked_conn_count -= 1;
        }
        if let Some(ready_set) = &self.ready_set {
            let fd = conn.stream.as_fd();
            watch::set_writable_watched(ready_set, fd, is_blocked, event_data(peer));
        }
        true
    }

    /// True if there are established routes or routes in setup.
    pub(crate) fn is_any_open(&self) -> bool {
        self.ready_set.is_some()
    }

    /// Records that an application thread polls the routes at the time `now`, or was woken by one
    /// of them. `None` means that the I/O thread must watch them from now on.
    pub(crate) fn record_polling(&mut self, now: Option<Micros>) {
        self.last_polled_at = now;
    }

    /// Records whether an application thread sleeps on the established connections.
    pub(crate) fn record_sleeping_app_thread(&mut self, is_sleeping: bool) {
        self.has_sleeping_app_thread = is_sleeping;
    }

    fn get_or_create_ready_set(&mut self) -> Option<Arc<ProcessOwned<ReadySet>>> {
        if self.ready_set.is_none() {
            let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).ok()?;
            self.ready_set = Some(Arc::new(ProcessOwned::from_fd(ReadySet(set))));
        }
        self.ready_set.clone()
    }

    /// Adds all descriptors of routes in setup to the epoll set.
    fn watch_setups(&mut self) {
        let Some(ready_set) = self.get_or_create_ready_set() else {
            return;
        };
        let mut fds: Vec<PollFd<'_>> = Vec::new();
        self.acceptor.add_poll_fds(&mut fds);
        self.dialers
            .values()
            .for_each(|dialer| dialer.add_poll_fds(&mut fds));
        for fd in &fds {
            watch::watch_setup(&ready_set, fd.as_fd(), fd.events(), SETUP_EVENT_DATA);
        }
    }
}

impl Core {
    // ---- agreement

    /// Requests a direct route to this peer for the program. Returns true if a message can be sent
    /// without waiting for the answer.
    pub(crate) fn request_route(&mut self, now: Micros, peer: Tid) -> bool {
        if !self.is_connected()
            || self.has_disabled_windows()
            || peer == self.tid()
            || !peer.is_task()
        {
            return true;
        }
        if !self.direct_routes.agreements.is_settled(peer) {
            if self.has_peer_ended(peer) {
                return true;
            }
            self.handle_route_event(now, RouteEvent::RouteRequested(peer));
        }
        self.direct_routes.agreements.is_settled(peer)
    }

    /// Applies `change` to the program's requests for notifications about routes, and sends the
    /// notifications that `change` queued. Returns the result of `change`.
    pub(crate) fn update_route_watches(
        &mut self,
        now: Micros,
        change: impl FnOnce(&mut RouteAgreements) -> PvmResult<()>,
    ) -> PvmResult<()> {
        let change_result = change(&mut self.direct_routes.agreements);
        self.run_route_outputs(now);
        change_result
    }

    /// Handles a route message of a peer about direct routes.
    pub(super) fn handle_direct_message(
        &mut self,
        now: Micros,
        sender: Tid,
        same_host: bool,
        message: RouteMsg,
    ) {
        let event = match message {
            RouteMsg::DirectOffer {
                id,
                mut addresses,
                fingerprint,
                incarnation: announced_incarnation,
                is_automatic,
            } => {
                self.adopt_incarnation(now, sender, announced_incarnation);
                addresses.truncate(OFFER_ADDRESSES_MAX);
                self.direct_routes.incoming_offer = Some(IncomingOffer {
                    addresses,
                    fingerprint,
                });
                let kind = if is_automatic {
                    RouteKind::Automatic
                } else {
                    RouteKind::Explicit
                };
                RouteEvent::OfferReceived {
                    peer: sender,
                    id,
                    same_host,
                    kind,
                    accepts_automatic: is_automatic && self.accepts_automatic_route(now, sender),
                }
            }
            RouteMsg::DirectAccept {
                id,
                fingerprint,
                incarnation: announced_incarnation,
            } => {
                self.adopt_incarnation(now, sender, announced_incarnation);
                self.direct_routes.peer_fingerprint = fingerprint;
                RouteEvent::OfferAccepted {
                    peer: sender,
                    id,
                    same_host: fingerprint == NO_CERTIFICATE,
                }
            }
            RouteMsg::DirectRefuse { id } => RouteEvent::OfferRefused { peer: sender, id },
            _ => return,
        };
        if self.is_connected() && !self.has_disabled_windows() {
            self.handle_route_event(now, event);
        }
    }

    /// Adopts the incarnation that a peer announces in a route message. Frames on direct routes do
    /// not carry the incarnation. Such frames may be the first frames that the two tasks exchange
    /// after one of the tasks was restarted.
    fn adopt_incarnation(&mut self, now: Micros, peer: Tid, incarnation: u16) {
        if incarnation != self.incarnation_with(peer)
            && let Some(link) = self.get_or_create_link(peer)
        {
            if link.accept_incarnation(incarnation) {
                self.reset_order(peer);
            }
            self.pump_link(now, peer);
        }
    }

    pub(super) fn handle_route_event(&mut self, now: Micros, event: RouteEvent) {
        self.direct_routes.agreements.handle_event(now, event);
        if event != RouteEvent::TimerExpired {
            self.bump_event_seq();
        }
        self.run_route_outputs(now);
    }

    /// Executes the actions that the agreements have queued.
    fn run_route_outputs(&mut self, now: Micros) {
        while let Some(output) = self.direct_routes.agreements.next_output() {
            match output {
                RouteOutput::Offer {
                    peer: receiver,
                    id,
                    kind,
                } => {
                    if !self.offer_direct_route(now, receiver, id, kind) {
                        self.direct_routes
                            .agreements
                            .handle_event(now, RouteEvent::ConnectFailed(receiver));
                    }
                }
                RouteOutput::WithdrawOffer { id } => {
                    self.direct_routes.offered_peers.remove(&id);
                    self.direct_routes.acceptor.withdraw_offer(id);
                }
                RouteOutput::Accept { peer: receiver, id } => {
                    let incarnation = self.incarnation_with(receiver);
                    self.send_route_message(
                        receiver,
                        RouteMsg::DirectAccept {
                            id,
                            fingerprint: NO_CERTIFICATE,
                            incarnation,
                        },
                        Vec::new(),
                    );
                }
                RouteOutput::Dial { peer: receiver, id } => {
                    if !self.start_dial(now, receiver, id) {
                        self.send_route_message(
                            receiver,
                            RouteMsg::DirectRefuse { id },
                            Vec::new(),
                        );
                        self.direct_routes
                            .agreements
                            .handle_event(now, RouteEvent::ConnectFailed(receiver));
                    }
                }
                RouteOutput::ExpectConnection { id } => self
                    .direct_routes
                    .acceptor
                    .record_acceptance(id, self.direct_routes.peer_fingerprint),
                RouteOutput::Refuse { peer: receiver, id } => {
                    self.send_route_message(receiver, RouteMsg::DirectRefuse { id }, Vec::new());
                }
                RouteOutput::Close { peer } => self.close_direct_conn(now, peer),
                RouteOutput::AutomaticEstablished { peer } => {
                    self.direct_routes.automatic.record_established(now, peer)
                }
                RouteOutput::AutomaticFailed { peer, scope } => self
                    .direct_routes
                    .automatic
                    .record_failure(now, peer, scope),
                RouteOutput::AutomaticEnded { peer, is_given_up } => self
                    .direct_routes
                    .automatic
                    .record_end(now, peer, is_given_up),
                RouteOutput::Notify {
                    ctx,
                    tag,
                    body: integers,
                } => {
                    let mut body = Packer::new(Encoding::Xdr);
                    body.pack_items(integers);
                    let own_tid = self.tid();
                    self.deliver(Message {
                        src: own_tid,
                        dst: own_tid,
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
        if let Some(timer_at) = self.direct_routes.agreements.next_wakeup() {
            self.schedule_timer(timer_at);
        }
        self.advance_setups(now);
    }

    /// True if one more explicit route is possible.
    fn has_room_for_explicit_route(&self) -> bool {
        let routes = &self.direct_routes;
        let is_explicit = |peer: &&Tid| !routes.agreements.is_automatic(**peer);
        routes.conns.len() < DIRECT_ROUTES_MAX
            || routes.conns.keys().filter(is_explicit).count() < DIRECT_ROUTES_MAX
    }

    fn offer_direct_route(
        &mut self,
        now: Micros,
        receiver: Tid,
        id: OfferId,
        kind: RouteKind,
    ) -> bool {
        if kind == RouteKind::Explicit && !self.has_room_for_explicit_route() {
            return false;
        }
        let Ok((port, fingerprint)) = self.direct_routes.acceptor.open_offer(now, id) else {
            return false;
        };
        self.direct_routes.offered_peers.insert(id, receiver);
        let addresses = self
            .direct_routes
            .addresses
            .iter()
            .map(|ip| SocketAddr::new(*ip, port));
        let addresses = addresses.take(OFFER_ADDRESSES_MAX).collect();
        let incarnation = self.incarnation_with(receiver);
        self.send_route_message(
            receiver,
            RouteMsg::DirectOffer {
                id,
                addresses,
                fingerprint,
                incarnation,
                is_automatic: kind == RouteKind::Automatic,
            },
            Vec::new(),
        )
    }

    fn start_dial(&mut self, now: Micros, offering_peer: Tid, id: OfferId) -> bool {
        let Some(IncomingOffer {
            addresses,
            fingerprint,
        }) = self.direct_routes.incoming_offer.take()
        else {
            return false;
        };
        if !self.has_room_for_explicit_route() {
            return false;
        }
        let Ok(dialer) = Dialer::new(now, id, &addresses, fingerprint) else {
            return false;
        };
        let fingerprint = dialer.fingerprint();
        self.direct_routes.dialers.insert(offering_peer, dialer);
        let incarnation = self.incarnation_with(offering_peer);
        self.send_route_message(
            offering_peer,
            RouteMsg::DirectAccept {
                id,
                fingerprint,
                incarnation,
            },
            Vec::new(),
        )
    }

    /// Advances all routes in setup: installs the established routes, and reports the failed setups
    /// to the agreements.
    fn advance_setups(&mut self, now: Micros) {
        if self.direct_routes.acceptor.is_idle() && self.direct_routes.dialers.is_empty() {
            if self.direct_routes.conns.is_empty() {
                self.direct_routes.ready_set = None;
            }
            return;
        }
        let mut finished_setups: Vec<(Tid, Result<FrameStream, SetupError>)> = Vec::new();
        for (id, outcome) in self.direct_routes.acceptor.advance_connections(now) {
            if let Some(peer) = self.direct_routes.offered_peers.remove(&id) {
                finished_setups.push((peer, outcome));
            }
        }
        self.direct_routes
            .dialers
            .retain(|peer, dialer| match dialer.advance_attempt(now) {
                Some(outcome) => {
                    finished_setups.push((*peer, outcome));
                    false
                }
                None => true,
            });
        let wakeups = self.direct_routes.dialers.values().map(Dialer::next_wakeup);
        if let Some(timer_at) = wakeups
            .chain(self.direct_routes.acceptor.next_wakeup())
            .min()
        {
            self.schedule_timer(timer_at);
        }
        self.direct_routes.watch_setups();
        for (peer, outcome) in finished_setups {
            match outcome {
                Ok(stream) => self.install_direct_conn(now, peer, stream),
                Err(_) => self.handle_route_event(now, RouteEvent::ConnectFailed(peer)),
            }
        }
    }

    fn install_direct_conn(&mut self, now: Micros, peer: Tid, frame_stream: FrameStream) {
        let Some(ready_set) = self.direct_routes.get_or_create_ready_set() else {
            return self.handle_route_event(now, RouteEvent::ConnectFailed(peer));
        };
        let app_waiters = self.direct_routes.app_waiters.clone();
        if !watch::watch_conn(
            &ready_set,
            app_waiters.as_deref(),
            frame_stream.as_fd(),
            event_data(peer),
        ) {
            watch::unwatch_conn(
                Some(&ready_set),
                app_waiters.as_deref(),
                frame_stream.as_fd(),
            );
            return self.handle_route_event(now, RouteEvent::ConnectFailed(peer));
        }
        self.direct_routes.conns.insert(
            peer,
            DirectConn {
                stream: frame_stream,
                is_write_blocked: false,
                has_unread_data: false,
                drain_state: None,
                last_traffic_at: now,
            },
        );
        let check_at = *self
            .direct_routes
            .next_idle_check_at
            .get_or_insert(now + IDLE_CHECK_INTERVAL);
        self.schedule_timer(check_at);
        let route = self.allocate_route();
        if let Some(link) = self.get_or_create_link(peer) {
            link.handle_event(now, LinkEvent::RouteUp(route));
        }
        self.handle_route_event(now, RouteEvent::Connected(peer));
        self.pump_direct_route(now, peer);
        self.drain_direct_route(now, peer);
    }

    /// Closes the connection to this peer, or cancels its setup. The daemons carry the queued
    /// messages.
    fn close_direct_conn(&mut self, now: Micros, peer: Tid) {
        self.direct_routes.dialers.remove(&peer);
        if let Some(DirectConn {
            stream: frame_stream,
            is_write_blocked: was_blocked,
            ..
        }) = self.direct_routes.conns.remove(&peer)
        {
            self.direct_routes.blocked_conn_count -= usize::from(was_blocked);
            watch::unwatch_conn(
                self.direct_routes.ready_set.as_deref(),
                self.direct_routes.app_waiters.as_deref(),
                frame_stream.as_fd(),
            );
            self.direct_routes
                .unread_peers
                .retain(|unread_peer| *unread_peer != peer);
            frame_stream.close();
            if let Some(link) = self.direct_routes_and_links().1.get_mut(&peer) {
                link.drop_placed_bytes();
            }
            self.bump_send_event_seq();
            self.reroute_through_daemon(now, peer);
        }
    }

    // ---- reading and writing

    /// Reads all direct routes that have data. Returns true if a frame arrived.
    pub(crate) fn poll_direct_routes(&mut self, now: Micros) -> bool {
        let Some(ready_set) = self.direct_routes.ready_set.clone() else {
            return false;
        };
        let mut events = [EpollEvent::empty(); READY_EVENTS_MAX];
        let ready_count = ready_set
            .get()
            .0
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        let (mut has_frame, mut has_setup_event) = (false, false);
        for event in &events[..ready_count] {
            if event.data() == SETUP_EVENT_DATA {
                has_setup_event = true;
                continue;
            }
            let Ok(raw_tid) = i32::try_from(event.data()) else {
                continue;
            };
            let peer = Tid::from_raw(raw_tid);
            if event.events().contains(EpollFlags::EPOLLOUT) {
                self.pump_direct_route(now, peer);
            }
            has_frame |= self.drain_direct_route(now, peer);
        }
        if has_setup_event {
            self.advance_setups(now);
        }
        has_frame |= self.read_unread_conns(now);
        self.complete_arrivals(now);
        has_frame
    }

    /// Reads the connections that a set of the application threads has reported. Returns true if a
    /// frame arrived.
    pub(crate) fn read_reported_conns(&mut self, now: Micros, ready: &ReadySockets) -> bool {
        let mut has_frame = false;
        for peer in ready.direct_peers() {
            has_frame |= self.drain_direct_route(now, peer);
        }
        has_frame |= self.read_unread_conns(now);
        self.complete_arrivals(now);
        has_frame
    }

    /// Continues the reads that stopped at their limit. The I/O thread continues them if a peer
    /// sends faster than this task reads.
    fn read_unread_conns(&mut self, now: Micros) -> bool {
        let mut has_frame = false;
        for _ in 0..REPEATED_READS_MAX {
            let unread_peers = std::mem::take(&mut self.direct_routes.unread_peers);
            if unread_peers.is_empty() {
                break;
            }
            for peer in unread_peers {
                has_frame |= self.drain_direct_route(now, peer);
            }
        }
        has_frame
    }

    /// Reads one route. Returns true if a frame arrived.
    pub(super) fn drain_direct_route(&mut self, now: Micros, peer: Tid) -> bool {
        if self.refuses_data_of(peer) {
            return false;
        }
        let (routes, links) = self.direct_routes_and_links();
        let (Some(conn), Some(link)) = (routes.conns.get_mut(&peer), links.get_mut(&peer)) else {
            return false;
        };
        let mut sink = LinkSink::new(link, now);
        let read_result = conn.stream.read_frames(&mut sink);
        let (has_received, is_invalid) = (sink.has_received, sink.is_invalid);
        let must_answer = link.has_frame();
        conn.has_unread_data = matches!(read_result, Ok(true));
        if conn.has_unread_data && !routes.unread_peers.contains(&peer) {
            routes.unread_peers.push(peer);
        }
        if has_received {
            conn.last_traffic_at = now;
            if let Some(drain) = &mut conn.drain_state {
                drain.silence_deadline = (now + DRAIN_SILENCE_TIMEOUT).min(drain.deadline);
            }
            if self.accept_messages_from(peer) {
                // The next message of this peer will arrive at the socket, too.
                self.shm_routes.expect_message_at_socket();
            }
            self.deliver_deferred(peer);
        }
        match read_result {
            Err(_) => self.handle_direct_end(now, peer),
            Ok(_) if is_invalid => self.handle_direct_end(now, peer),
            Ok(true) => {}
            Ok(false) if must_answer => self.pump_direct_route(now, peer),
            Ok(false) => self.schedule_link_timer(peer),
        }
        has_received
    }

    /// Handles the end of a connection from which all data was read: ends the route and, if the
    /// peer has ended, notifies the links.
    fn handle_direct_end(&mut self, now: Micros, peer: Tid) {
        let has_peer_ended = self
            .direct_routes
            .conns
            .get(&peer)
            .and_then(|conn| conn.drain_state)
            .is_some_and(|drain| drain.has_peer_ended);
        self.handle_route_event(now, RouteEvent::ConnectionEnded(peer));
        self.deliver_deferred(peer);
        if has_peer_ended {
            self.handle_peer_end(now, peer);
        }
    }

    /// Starts draining a connection on which nothing can be written: reads what the peer sent
    /// before, until the connection ends or a time limit of [`DrainState`] expires.
    fn start_draining(&mut self, now: Micros, peer: Tid, peer_has_ended: bool) {
        let routes = &mut self.direct_routes;
        let Some(conn) = routes.conns.get_mut(&peer) else {
            return;
        };
        let new_silence_deadline = now + DRAIN_SILENCE_TIMEOUT;
        let new_drain = DrainState {
            silence_deadline: new_silence_deadline,
            deadline: now + DRAIN_TIMEOUT,
            has_peer_ended: peer_has_ended,
        };
        conn.drain_state.get_or_insert(new_drain).has_peer_ended |= peer_has_ended;
        routes.set_write_blocked(peer, false);
        self.schedule_timer(new_silence_deadline);
        self.bump_send_event_seq();
        while self.drain_direct_route(now, peer) {}
    }

    /// Writes as many frames of the link as the socket accepts.
    pub(super) fn pump_direct_route(&mut self, now: Micros, peer: Tid) {
        let (routes, links) = self.direct_routes_and_links();
        let (Some(conn), Some(link)) = (routes.conns.get_mut(&peer), links.get_mut(&peer)) else {
            return;
        };
        // If the peer has just ended, writing would make the peer's kernel discard data that the
        // kernel has not delivered. This data must be read first. The window limits the amount of
        // this data.
        if conn.drain_state.is_some() || conn.has_unread_data {
            return;
        }
        let mut has_ended = false;
        loop {
            while conn.stream.has_frame_space()
                && let Some(frame) = link.next_frame(now)
            {
                let parts = [&frame.encode_short_head()[..], frame.head, frame.body];
                conn.stream.try_queue_frame(&parts, frame.following_bytes());
                conn.last_traffic_at = now;
            }
            has_ended |= conn.stream.write_queued().is_err();
            if has_ended || conn.stream.has_unwritten_data() || !link.has_frame() {
                break;
            }
        }
        let is_blocked = conn.stream.has_unwritten_data();
        if !has_ended && routes.set_write_blocked(peer, is_blocked) {
            self.bump_send_event_seq();
        }
        if has_ended {
            self.start_draining(now, peer, false);
        } else if !is_blocked {
            // If the socket is full, its readiness triggers the next write.
            self.schedule_link_timer(peer);
        }
    }

    // ---- teardown

    /// Reads the frames that have arrived and closes all direct routes. All later frames go through
    /// the daemon. Returns the peers of the closed routes.
    pub(super) fn close_all_direct_routes(&mut self, now: Micros) -> Vec<Tid> {
        let peers: Vec<Tid> = self.direct_routes.conns.keys().copied().collect();
        for peer in &peers {
            while self.drain_direct_route(now, *peer) {}
        }
        let ended_peers = self
            .direct_routes
            .conns
            .iter()
            .filter(|(_, conn)| conn.drain_state.is_some_and(|drain| drain.has_peer_ended));
        let ended_peers: Vec<Tid> = ended_peers.map(|(peer, _)| *peer).collect();
        self.handle_route_event(now, RouteEvent::CloseAll);
        self.direct_routes.acceptor.close_all();
        self.direct_routes.offered_peers.clear();
        self.direct_routes.dialers.clear();
        self.direct_routes.ready_set = None;
        self.direct_routes.unread_peers.clear();
        self.direct_routes.blocked_conn_count = 0;
        ended_peers
            .into_iter()
            .for_each(|peer| self.handle_peer_end(now, peer));
        peers
    }

    /// Handles the end of a peer. Returns false if the peer's connection must be drained first;
    /// [`Core::handle_peer_end`] is called again after draining.
    pub(super) fn handle_direct_peer_end(&mut self, now: Micros, peer: Tid) -> bool {
        if self.direct_routes.has_route(peer) {
            self.start_draining(now, peer, true);
            return false;
        }
        self.handle_route_event(now, RouteEvent::PeerEnded(peer));
        self.direct_routes.automatic.forget_peer(peer);
        true
    }

    /// Handles the migration of a peer: reads the frames that have arrived on the direct route to
    /// the peer, and closes the route.
    pub(super) fn handle_direct_peer_migration(&mut self, now: Micros, peer: Tid) {
        while self.drain_direct_route(now, peer) {}
        self.handle_route_event(now, RouteEvent::PeerMigrated(peer));
        self.direct_routes.automatic.forget_peer(peer);
    }

    /// Handles expired timers: unanswered offers, drained connections and idle routes.
    pub(super) fn run_direct_timers(&mut self, now: Micros) {
        // Data is read before any timer causes a write, because this task may have been stopped for
        // a long time.
        self.poll_direct_routes(now);
        let draining_conns = self
            .direct_routes
            .conns
            .iter()
            .filter(|(_, conn)| conn.drain_state.is_some());
        for peer in draining_conns.map(|(peer, _)| *peer).collect::<Vec<Tid>>() {
            // Data may have arrived before the deadline while this task was stopped.
            while self.drain_direct_route(now, peer) {}
            match self
                .direct_routes
                .conns
                .get(&peer)
                .and_then(|conn| conn.drain_state)
            {
                Some(drain) if drain.silence_deadline <= now => self.handle_direct_end(now, peer),
                Some(drain) => self.schedule_timer(drain.silence_deadline),
                None => {}
            }
        }
        self.shrink_idle_routes(now);
        self.handle_route_event(now, RouteEvent::TimerExpired);
    }

    /// Frees the buffers of idle routes.
    fn shrink_idle_routes(&mut self, now: Micros) {
        let routes = &mut self.direct_routes;
        if routes
            .next_idle_check_at
            .is_some_and(|check_at| check_at <= now)
        {
            for conn in routes
                .conns
                .values_mut()
                .filter(|conn| now.since(conn.last_traffic_at) >= ROUTE_IDLE_TIMEOUT)
            {
                conn.stream.release_buffers();
            }
            routes.next_idle_check_at =
                (!routes.conns.is_empty()).then(|| now + IDLE_CHECK_INTERVAL);
        }
        if let Some(check_at) = self.direct_routes.next_idle_check_at {
            self.schedule_timer(check_at);
        }
    }

    /// Returns the total size of the buffers of all direct routes in bytes.
    #[cfg(test)]
    pub(super) fn direct_buffer_bytes(&self) -> usize {
        self.direct_routes
            .conns
            .values()
            .map(|conn| conn.stream.buffer_bytes())
            .sum()
    }
}

fn event_data(peer: Tid) -> u64 {
    u64::try_from(peer.raw()).expect("tids of tasks are positive")
}
