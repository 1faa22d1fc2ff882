//! Connections with other daemons: one UDP port, sessions with the hosts of this virtual machine,
//! connection attempts that are repeated until a session is up, and queues for data that must wait
//! for a session.
//!
//! Owned by the daemon's loop. [`super::session`] serves the streams of a session.

use super::handshakes::{
    UNREAD_BYTES_MAX, UNREAD_HANDSHAKE_BYTES_MAX, UNREAD_HANDSHAKES_MAX, accept_connections,
};
use super::input::{Input, InputSender};
use super::limits::DATAGRAM_BYTES_MAX;
use super::outbox::{LINK_BYTES_MAX, Outbox, Outgoing, outbox};
use super::pki::{HostCredentials, host_name};
use super::session::{
    self, CLOSE_DUPLICATE, CLOSE_EXPELLED, CLOSE_LEAVING, CLOSE_SILENT, describe_close,
};
use super::session_input::{DataItem, NetInput, SessionContext, SessionQueues};
use super::udp_port::PortRuntime;
use bytes::Bytes;
use pvmd_machine::pair_streams::{
    FenceReceiver, FenceSender, LANES_MAX, LaneEntry, LaneId, MainEntry, StreamChoice, link_ends,
};
use quinn::congestion::CubicConfig;
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, MtuDiscoveryConfig, ServerConfig,
    TransportConfig, VarInt,
};
use rustc_hash::FxHashMap;
use sempa_proto::frame::encode_control;
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::migration::Failure;
use sempa_proto::{HostId, Tid};
use std::collections::{HashMap, VecDeque};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Default duration of silence after which a host is considered lost. `SEMPA_LEASE_MS` sets another
/// duration for the whole virtual machine.
pub(crate) const LEASE_DEFAULT: Duration = Duration::from_secs(10);
/// Number of keep-alive packets that are sent within a lease. With the default lease, one packet is
/// sent every 2 s.
const KEEP_ALIVES_PER_LEASE: u32 = 5;
/// Maximum number of bytes queued for a host without a session, excluding link frames. Items that
/// would exceed this limit are dropped and logged.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Maximum number of reliable bytes in one send queue of a session. If a queue contains more, the
/// host does not read, and the session is closed.
const UNSENT_BYTES_MAX: usize = 512 << 20;
/// Delay before a host connects to a host with a higher index. The host with the higher index
/// connects without delay, so a session usually exists when the delay ends.
const CONNECT_GRACE_PERIOD: Duration = Duration::from_secs(1);
/// Time limit for an address to answer a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Delay between the attempts at successive addresses of one host.
const CONNECT_STAGGER_INTERVAL: Duration = Duration::from_millis(200);
/// Pause after the first round of attempts. The pause doubles after each round, up to
/// [`RECONNECT_INTERVAL_MAX`].
const RECONNECT_INTERVAL_MIN: Duration = Duration::from_millis(100);
const RECONNECT_INTERVAL_MAX: Duration = Duration::from_secs(5);
/// Time for which a transfer waits for a session with a host that has none.
const SESSION_WAIT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit for an expelled host to receive the data that was sent before the expulsion.
const EXPEL_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of stored addresses per host.
const ADDRESSES_MAX: usize = 16;
/// Maximum number of received but unread bytes per stream. This number is sufficient for 500 MB/s
/// at a round-trip time of 30 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// Maximum number of received but unread bytes per session.
const SESSION_WINDOW_BYTES: u32 = 256 << 20;
/// Maximum number of concurrent unidirectional streams of a peer: its channels, its pair streams
/// and its announcements of transfers. The number of pair streams is counted twice, because closed
/// pair streams may still be ending.
const STREAMS_MAX: u32 = 2 + 2 * LANES_MAX as u32 + 64;
/// Maximum number of concurrent transfers of a peer over the session where TCP is blocked; further
/// transfers wait.
const FALLBACK_STREAMS_MAX: u32 = 64;
/// Maximum number of sent but unacknowledged bytes per session.
const SEND_WINDOW_BYTES: u64 = 16 << 20;
/// Initial congestion window of a path.
const INITIAL_WINDOW_BYTES: u64 = 256 << 10;
/// Size of the kernel's send buffer and of its receive buffer for the UDP port, if the user's
/// limits allow this size.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// Changes of sessions reported by [`Net::handle_input`].
#[derive(Debug)]
pub(crate) enum SessionChange {
    Connected(HostId),
    Lost(HostId, String),
}

/// The session state of another host.
#[derive(Debug, Default)]
struct Peer {
    addresses: Vec<SocketAddr>,
    needs_session: bool,
    is_expelled: bool,
    session: Option<Session>,
    connect_task: Option<AbortHandle>,
    /// Frames that wait for a session. The bool is true if the frame is for the control stream.
    queued_items: VecDeque<(bool, Outgoing)>,
    queued_bytes: usize,
    queued_link_bytes: usize,
    /// Transfers that wait for a session, at most one per migration.
    waiting_transfers: Vec<oneshot::Sender<(SessionContext, Connection)>>,
}

#[derive(Debug)]
struct Session {
    session_number: u64,
    connection: Connection,
    queues: Option<SessionQueues>,
    fence_sender: FenceSender,
    pair_streams: FxHashMap<LaneId, Outbox>,
    fence_receiver: FenceReceiver<DataMsg>,
}

impl Session {
    fn new(session_number: u64, connection: Connection, queues: Option<SessionQueues>) -> Self {
        let (fence_sender, fence_receiver) = (FenceSender::default(), FenceReceiver::default());
        Self {
            session_number,
            connection,
            queues,
            fence_sender,
            pair_streams: FxHashMap::default(),
            fence_receiver,
        }
    }

    /// Queues an item on the main stream of the data channel.
    fn queue_main(&mut self, item: Outgoing) {
        if self
            .queues
            .as_ref()
            .is_some_and(|queues| queues.data.enqueue(item))
        {
            self.fence_sender.count_main_entry();
        }
    }

    /// Queues a link frame on the stream of its pair, or on the main stream if the pair has no
    /// stream. Opens the stream of the pair if it is new. `context` returns the session context for
    /// a session number.
    fn queue_link(&mut self, context: impl FnOnce(u64) -> SessionContext, body: Bytes) {
        let stream_choice = link_ends(&body)
            .map(|pair| (pair, self.fence_sender.choose_stream(pair, Instant::now())));
        let Some((
            pair,
            StreamChoice::Lane {
                lane,
                is_new,
                barrier,
            },
        )) = stream_choice
        else {
            return self.queue_main(Outgoing::Link(body));
        };
        if is_new {
            let (stream_outbox, stream_queue) = outbox(LINK_BYTES_MAX);
            tokio::spawn(session::run_pair_stream(
                context(self.session_number),
                self.connection.clone(),
                lane,
                stream_queue,
            ));
            self.pair_streams.insert(lane, stream_outbox);
        }
        let Some(stream_queue) = self.pair_streams.get(&lane) else {
            return;
        };
        if let Some(barrier_entry) = barrier {
            stream_queue.enqueue(Outgoing::Reliable(
                encode_control(&LaneEntry::<()>::Barrier(barrier_entry)).expect("one number"),
            ));
        }
        if stream_queue.enqueue(Outgoing::Link(body)) {
            self.fence_sender.count_frame(pair);
        }
    }

    /// Sends a control item. If a barrier must precede the item, sends the barrier first. If the
    /// item reports the end of a task, closes the pair streams of this task.
    fn queue_control_item(&mut self, item: &DataMsg, frame: Bytes) {
        if let Some(barrier_marks) = self.fence_sender.barrier_for(item) {
            self.queue_main(Outgoing::Reliable(
                encode_control(&MainEntry::<()>::Barrier(barrier_marks)).expect("a fence is short"),
            ));
        }
        self.queue_main(Outgoing::Reliable(frame));
        if let DataMsg::TaskEnded { tid: dst, .. } = item {
            self.close_pair_streams(Some(*dst));
        }
    }

    /// Closes pair streams that are idle. If `task` is `Some`, closes the pair streams of this task
    /// instead.
    fn close_pair_streams(&mut self, task: Option<Tid>) {
        for mark in self.fence_sender.end_lanes(Instant::now(), task) {
            if let Some(stream_outbox) = self.pair_streams.remove(&mark.lane) {
                stream_outbox.enqueue(Outgoing::Close);
            }
            self.queue_main(Outgoing::Reliable(
                encode_control(&MainEntry::<()>::End(mark)).expect("two numbers"),
            ));
        }
    }

    /// Closes all streams of the session after the data that is already queued.
    fn finish_streams(&self) {
        let Some(queues) = &self.queues else {
            return;
        };
        self.pair_streams
            .values()
            .chain([&queues.data, &queues.control])
            .for_each(|queue| {
                queue.enqueue(Outgoing::Close);
            });
    }
}

/// The QUIC endpoint of this daemon and all sessions.
pub(crate) struct Net {
    endpoint: Endpoint,
    client_config: ClientConfig,
    vm: String,
    own_host: HostId,
    lease: Duration,
    inputs: InputSender,
    peers: HashMap<HostId, Peer>,
    next_session_number: u64,
}

/// A session that exists or is being established.
#[derive(Debug)]
pub(crate) struct PendingSession {
    host: HostId,
    receiver: oneshot::Receiver<(SessionContext, Connection)>,
}

impl PendingSession {
    /// Waits for the session. If the transfer belongs to a migration, the migrating task is paused
    /// during the wait.
    ///
    /// # Errors
    /// No session was established within [`SESSION_WAIT_TIMEOUT`], or the host is expelled.
    pub(crate) async fn wait_for_session(self) -> Result<(SessionContext, Connection), Failure> {
        let timeout_failure = || {
            Failure::Images(format!(
                "there is no session between this host and {}",
                self.host
            ))
        };
        let wait_result = timeout(SESSION_WAIT_TIMEOUT, self.receiver).await;
        wait_result
            .ok()
            .and_then(Result::ok)
            .ok_or_else(timeout_failure)
    }
}

/// Opens the UDP port `port` (0 means any free port), for IPv4 and IPv6 if this host has both.
///
/// # Errors
/// The port cannot be opened.
pub(crate) fn bind_udp(port: u16) -> std::io::Result<UdpSocket> {
    let socket = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Ok(socket) => socket,
        // Fails if this host has no IPv6.
        Err(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?,
    };
    use nix::sys::socket::{setsockopt, sockopt};
    // Larger buffers are only an optimization, so errors are ignored. Only root may exceed the
    // system's limit (`RcvBufForce`, `SndBufForce`).
    let _ = setsockopt(&socket, sockopt::RcvBuf, &SOCKET_BUFFER_BYTES);
    let _ = setsockopt(&socket, sockopt::SndBuf, &SOCKET_BUFFER_BYTES);
    let _ = setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER_BYTES);
    let _ = setsockopt(&socket, sockopt::SndBufForce, &SOCKET_BUFFER_BYTES);
    Ok(socket)
}

fn transport_config(lease: Duration) -> anyhow::Result<Arc<TransportConfig>> {
    let mut transport = TransportConfig::default();
    let mut congestion_config = CubicConfig::default();
    congestion_config.initial_window(INITIAL_WINDOW_BYTES);
    let mut mtu_discovery = MtuDiscoveryConfig::default();
    mtu_discovery.upper_bound(DATAGRAM_BYTES_MAX);
    transport
        .keep_alive_interval(Some(lease / KEEP_ALIVES_PER_LEASE))
        // The session itself watches the lease. The idle timeout only removes connections that are
        // certainly dead.
        .max_idle_timeout(Some((lease * 2).try_into()?))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .receive_window(VarInt::from_u32(SESSION_WINDOW_BYTES))
        .send_window(SEND_WINDOW_BYTES)
        .max_concurrent_uni_streams(VarInt::from_u32(STREAMS_MAX))
        .max_concurrent_bidi_streams(VarInt::from_u32(FALLBACK_STREAMS_MAX))
        .datagram_receive_buffer_size(None)
        .mtu_discovery_config(Some(mtu_discovery))
        .congestion_controller_factory(Arc::new(congestion_config));
    Ok(Arc::new(transport))
}

impl Net {
    /// Starts the endpoint on a bound port.
    ///
    /// # Errors
    /// The certificates or the socket cannot be used.
    pub(crate) fn start(
        socket: UdpSocket,
        credentials: &HostCredentials,
        (vm, own_host): (&str, HostId),
        lease: Duration,
        inputs: InputSender,
    ) -> anyhow::Result<Self> {
        let transport = transport_config(lease)?;
        let mut server_config = ServerConfig::with_crypto(Arc::new(credentials.server_config()?));
        server_config
            .transport_config(transport.clone())
            .max_incoming(UNREAD_HANDSHAKES_MAX)
            .incoming_buffer_size(UNREAD_HANDSHAKE_BYTES_MAX)
            .incoming_buffer_size_total(UNREAD_BYTES_MAX);
        let mut client_config = ClientConfig::new(Arc::new(credentials.client_config()?));
        client_config.transport_config(transport);
        let mut endpoint_config = EndpointConfig::default();
        endpoint_config.max_udp_payload_size(DATAGRAM_BYTES_MAX)?;
        let runtime = Arc::new(PortRuntime);
        let endpoint = Endpoint::new(endpoint_config, Some(server_config), socket, runtime)?;
        tokio::spawn(accept_connections(
            endpoint.clone(),
            vm.to_string(),
            inputs.clone(),
        ));
        let (vm, peers) = (vm.to_string(), HashMap::new());
        Ok(Self {
            endpoint,
            client_config,
            vm,
            own_host,
            lease,
            inputs,
            peers,
            next_session_number: 1,
        })
    }

    /// Returns the UDP port, to be announced to other hosts.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn port(&self) -> std::io::Result<u16> {
        Ok(self.endpoint.local_addr()?.port())
    }

    /// Establishes a session with a host at one of `addresses`. If the session is lost, establishes
    /// another session.
    pub(crate) fn keep_connected(&mut self, host: HostId, addresses: Vec<SocketAddr>) {
        let peer = self.peers.entry(host).or_default();
        peer.needs_session = true;
        peer.is_expelled = false;
        for address in addresses {
            if !peer.addresses.contains(&address) && peer.addresses.len() < ADDRESSES_MAX {
                peer.addresses.push(address);
            }
        }
        self.connect_if_needed(host);
    }

    /// Ends the session with a host and refuses further sessions with this host.
    pub(crate) fn expel_host(&mut self, host: HostId) {
        let peer = self.peers.entry(host).or_default();
        if let Some(connect_task) = peer.connect_task.take() {
            connect_task.abort();
        }
        if let Some(session) = peer.session.take() {
            end_session(session);
        }
        *peer = Peer {
            is_expelled: true,
            ..Peer::default()
        };
    }

    /// Sends a control message to a host. Without a session, queues the message until a session is
    /// up. Messages to an expelled host are dropped.
    pub(crate) fn send_control(&mut self, host: HostId, message: &HostMsg) {
        let frame = match encode_control(message) {
            Ok(frame) => frame,
            Err(e) => {
                return tracing::warn!("a message to {host} could not be sent: {e}");
            }
        };
        let Some(peer) = self.peer_unless_expelled(host) else {
            return;
        };
        let Some(queues) = peer.session.as_ref().and_then(|s| s.queues.as_ref()) else {
            return self.queue_until_up(host, true, Outgoing::Reliable(frame));
        };
        queues.control.enqueue(Outgoing::Reliable(frame));
        self.close_if_stalled(host);
    }

    /// Sends an item or frame for a task on the host `host`. Without a session, queues the item or
    /// frame until a session is up. Data for an expelled host is dropped.
    pub(crate) fn send_data(&mut self, host: HostId, message: DataMsg) {
        if let DataMsg::Frame(body) = message {
            let (vm, own_host, lease) = (&self.vm, self.own_host, self.lease);
            let peer = self.peers.entry(host).or_default();
            match peer.session.as_mut().filter(|s| s.queues.is_some()) {
                Some(session) => session.queue_link(
                    |number| session_context(vm, own_host, lease, host, number),
                    body,
                ),
                None if peer.is_expelled => {}
                None => self.queue_until_up(host, false, Outgoing::Link(body)),
            }
            return;
        }
        let frame = match encode_control(&MainEntry::Item(&message)) {
            Ok(frame) => frame,
            Err(e) => {
                return tracing::warn!("an item for a task on {host} could not be sent: {e}");
            }
        };
        let Some(peer) = self.peer_unless_expelled(host) else {
            return;
        };
        match peer.session.as_mut().filter(|s| s.queues.is_some()) {
            Some(session) => session.queue_control_item(&message, frame),
            None => return self.queue_until_up(host, false, Outgoing::Reliable(frame)),
        }
        self.close_if_stalled(host);
    }

    /// Returns the state of a host; `None` if the host is expelled.
    fn peer_unless_expelled(&mut self, host: HostId) -> Option<&mut Peer> {
        Some(self.peers.entry(host).or_default()).filter(|peer| !peer.is_expelled)
    }

    /// Closes the session with a host if one of its send queues contains more than
    /// [`UNSENT_BYTES_MAX`] bytes.
    fn close_if_stalled(&mut self, host: HostId) {
        let session = self.peers.get(&host).and_then(|peer| peer.session.as_ref());
        let Some(queues) = session.and_then(|s| s.queues.as_ref()) else {
            return;
        };
        let queued_bytes = queues
            .control
            .reliable_bytes()
            .max(queues.data.reliable_bytes());
        if queued_bytes > UNSENT_BYTES_MAX && queues.connection.close_reason().is_none() {
            tracing::warn!(
                "{host} reads nothing and {UNSENT_BYTES_MAX} bytes are queued for it: closing its session"
            );
            queues.connection.close(CLOSE_SILENT, b"reads nothing");
        }
    }

    /// Queues an item until a session is up. If the queue's limit would be exceeded, drops the item
    /// and logs this.
    fn queue_until_up(&mut self, host: HostId, is_control: bool, item: Outgoing) {
        let peer = self.peers.entry(host).or_default();
        let (len, is_reliable) = match &item {
            Outgoing::Reliable(bytes) | Outgoing::WithFds(bytes, _) => (bytes.len(), true),
            Outgoing::Link(bytes) => (bytes.len(), false),
            Outgoing::Close => return,
        };
        let (waiting_bytes, bytes_max) = if is_reliable {
            (&mut peer.queued_bytes, QUEUED_BYTES_MAX)
        } else {
            (&mut peer.queued_link_bytes, LINK_BYTES_MAX)
        };
        if *waiting_bytes + len > bytes_max {
            tracing::warn!(
                "{host} has no session and {bytes_max} bytes are queued for it: a frame is dropped"
            );
            return;
        }
        *waiting_bytes += len;
        peer.queued_items.push_back((is_control, item));
    }

    /// Returns the session with a host for a bulk transfer; `None` if no session is up.
    fn session_for_transfer(&self, host: HostId) -> Option<(SessionContext, Connection)> {
        let session = self.peers.get(&host)?.session.as_ref()?;
        let queues = session.queues.as_ref()?;
        Some((
            self.session_context(host, session.session_number),
            queues.connection.clone(),
        ))
    }

    /// Returns the session with a host for a bulk transfer, or, if no session is up, a value that
    /// waits for a session.
    pub(crate) fn await_session(&mut self, host: HostId) -> PendingSession {
        let (session_sender, receiver) = oneshot::channel();
        match self.session_for_transfer(host) {
            Some(session) => {
                let _ = session_sender.send(session);
            }
            // A host that has just joined may have no state here yet.
            None => {
                if let Some(peer) = self.peer_unless_expelled(host) {
                    peer.waiting_transfers.retain(|sender| !sender.is_closed());
                    peer.waiting_transfers.push(session_sender);
                }
            }
        }
        PendingSession { host, receiver }
    }

    fn session_context(&self, host: HostId, number: u64) -> SessionContext {
        session_context(&self.vm, self.own_host, self.lease, host, number)
    }

    pub(crate) fn is_current(&self, host: HostId, number: u64) -> bool {
        self.peers
            .get(&host)
            .and_then(|p| p.session.as_ref())
            .is_some_and(|s| s.session_number == number)
    }

    /// Handles an input about sessions or connection attempts, and returns the changes of sessions.
    /// The loop handles all other inputs itself.
    pub(crate) fn handle_input(&mut self, input: NetInput) -> Vec<SessionChange> {
        match input {
            NetInput::HandshakeDone { host, connection } => {
                self.on_handshake_done(host, connection)
            }
            NetInput::SessionUp {
                host,
                session_number: number,
                queues,
            } => return self.on_session_up(host, number, queues),
            NetInput::SessionDown {
                host,
                session_number: number,
                reason,
            } => {
                return self.on_session_down(host, number, reason);
            }
            NetInput::ConnectEnded { host } => {
                if let Some(peer) = self.peers.get_mut(&host) {
                    peer.connect_task = None;
                }
            }
            NetInput::Control { .. }
            | NetInput::Data { .. }
            | NetInput::ImagesAnnounced(_)
            | NetInput::MemoryAnnounced(_)
            | NetInput::FallbackStream { .. } => {}
        }
        Vec::new()
    }

    fn on_handshake_done(&mut self, host: HostId, connection: Connection) {
        if self.peers.get(&host).is_some_and(|p| p.is_expelled) || host == self.own_host {
            connection.close(CLOSE_EXPELLED, b"");
            return;
        }
        let number = self.next_session_number;
        let context = self.session_context(host, number);
        let peer = self.peers.entry(host).or_default();
        if self.own_host > host {
            // This host has the higher index and therefore selects the connection. Only one session
            // may exist at a time.
            if peer.session.is_some() {
                connection.close(CLOSE_DUPLICATE, b"");
                return;
            }
            peer.session = Some(Session::new(number, connection.clone(), None));
        }
        self.next_session_number += 1;
        tokio::spawn(session::run_session(
            context,
            connection,
            self.inputs.clone(),
        ));
    }

    fn on_session_up(
        &mut self,
        host: HostId,
        number: u64,
        queues: SessionQueues,
    ) -> Vec<SessionChange> {
        let mut changes = Vec::new();
        let this_host_selects = self.own_host > host;
        let peer = self.peers.entry(host).or_default();
        if peer.is_expelled
            || (this_host_selects
                && peer
                    .session
                    .as_ref()
                    .is_none_or(|s| s.session_number != number))
        {
            queues.connection.close(CLOSE_EXPELLED, b"");
            return changes;
        }
        if let Some(old_session) = peer.session.take()
            && old_session.session_number != number
        {
            // The other host selects the connection, and has replaced the old session.
            old_session.connection.close(CLOSE_DUPLICATE, b"");
            changes.push(SessionChange::Lost(
                host,
                "it has begun a new session".into(),
            ));
        }
        if let Some(connect_task) = peer.connect_task.take() {
            connect_task.abort();
        }
        let control = queues.control.clone();
        let mut session = Session::new(number, queues.connection.clone(), Some(queues));
        for (to_control, item) in peer.queued_items.drain(..) {
            if to_control {
                control.enqueue(item);
            } else {
                session.queue_main(item);
            }
        }
        (peer.queued_bytes, peer.queued_link_bytes) = (0, 0);
        peer.session = Some(session);
        let waiting_transfers = std::mem::take(&mut peer.waiting_transfers);
        for (session_sender, transfer_session) in waiting_transfers
            .into_iter()
            .zip(std::iter::from_fn(|| self.session_for_transfer(host)))
        {
            // The transfer that waited may have ended.
            let _ = session_sender.send(transfer_session);
        }
        tracing::info!("session with {host} is up");
        changes.push(SessionChange::Connected(host));
        changes
    }

    fn on_session_down(&mut self, host: HostId, number: u64, reason: String) -> Vec<SessionChange> {
        let Some(peer) = self.peers.get_mut(&host) else {
            return Vec::new();
        };
        let Some(session) = peer.session.take_if(|s| s.session_number == number) else {
            return Vec::new();
        };
        let was_up = session.queues.is_some();
        let outcome = if was_up { "ended" } else { "failed to come up" };
        tracing::info!("session with {host} {outcome}: {reason}");
        // A slave must not connect again after its master has expelled it.
        let was_expelled = host == HostId::MASTER && is_expelled(&session.connection);
        if was_up || was_expelled {
            vec![SessionChange::Lost(host, reason)]
        } else {
            Vec::new()
        }
    }

    /// Accepts an item of the data channel of the session with this number. [`Net::next_data`]
    /// returns the items in order, as soon as no fence delays them. An item of an earlier session
    /// is dropped.
    pub(crate) fn accept_data(&mut self, host: HostId, number: u64, item: DataItem) {
        let Some(session) = self.current_session(host, number) else {
            return;
        };
        match item {
            DataItem::Main(item) => session.fence_receiver.push_main(item),
            DataItem::Lane(lane, item) => session.fence_receiver.push_lane(lane, item),
        }
    }

    /// Returns the next item of the data channel for the state machine; `None` if there is no item
    /// or a fence delays the next item.
    pub(crate) fn next_data(&mut self, host: HostId, number: u64) -> Option<DataMsg> {
        self.current_session(host, number)?
            .fence_receiver
            .next_item()
    }

    fn current_session(&mut self, host: HostId, number: u64) -> Option<&mut Session> {
        self.peers
            .get_mut(&host)?
            .session
            .as_mut()
            .filter(|s| s.session_number == number)
    }

    /// Connects to hosts that lack a session, and closes idle pair streams. Must be called once per
    /// second.
    pub(crate) fn maintain_sessions(&mut self) {
        self.peers
            .values_mut()
            .filter_map(|peer| peer.session.as_mut())
            .for_each(|session| session.close_pair_streams(None));
        let hosts_needing_session: Vec<HostId> = self
            .peers
            .iter()
            .filter(|(_, p)| p.needs_session)
            .map(|(host, _)| *host)
            .collect();
        hosts_needing_session
            .into_iter()
            .for_each(|host| self.connect_if_needed(host));
    }

    fn connect_if_needed(&mut self, host: HostId) {
        let connect_delay = if self.own_host > host {
            Duration::ZERO
        } else {
            CONNECT_GRACE_PERIOD
        };
        let Some(peer) = self.peers.get_mut(&host) else {
            return;
        };
        if peer.session.is_some() || peer.connect_task.is_some() || peer.addresses.is_empty() {
            return;
        }
        let connector = Connector {
            endpoint: self.endpoint.clone(),
            client_config: self.client_config.clone(),
            name: host_name(host, &self.vm),
            host,
            addresses: peer.addresses.clone(),
        };
        let inputs = self.inputs.clone();
        let task = tokio::spawn(async move {
            sleep(connect_delay).await;
            let connection = connector.connect_with_retry().await;
            let _ = inputs
                .send(Input::Net(NetInput::HandshakeDone { host, connection }))
                .await;
            // The session needs some time to come up. Another attempt before that would be useless.
            sleep(CONNECT_GRACE_PERIOD).await;
            let _ = inputs
                .send(Input::Net(NetInput::ConnectEnded { host }))
                .await;
        });
        peer.connect_task = Some(task.abort_handle());
    }

    /// Ends all sessions after the data that is already queued. The loop must continue to call
    /// [`Net::handle_input`] until [`Net::has_sessions`] returns false.
    pub(crate) fn begin_shutdown(&mut self) {
        for peer in self.peers.values_mut() {
            peer.needs_session = false;
            if let Some(connect_task) = peer.connect_task.take() {
                connect_task.abort();
            }
            match &peer.session {
                Some(session) if session.queues.is_some() => session.finish_streams(),
                Some(session) => session.connection.close(CLOSE_LEAVING, b""),
                None => {}
            }
        }
    }

    /// True if any session has not ended.
    pub(crate) fn has_sessions(&self) -> bool {
        self.peers.values().any(|p| p.session.is_some())
    }

    /// Simulates the loss of this host's network: the port no longer sends or receives, and no peer
    /// is notified.
    #[cfg(test)]
    pub(crate) fn cut_network(&mut self) {
        let unused_socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        self.endpoint.rebind(unused_socket).expect("a socket");
    }

    /// Notifies the peers and closes the port. Waits at most `wait_max`.
    pub(crate) async fn close(self, wait_max: Duration) {
        self.endpoint.close(CLOSE_LEAVING, b"leaving");
        let _ = timeout(wait_max, self.endpoint.wait_idle()).await;
    }
}

fn session_context(
    vm: &str,
    own_host: HostId,
    lease: Duration,
    host: HostId,
    number: u64,
) -> SessionContext {
    // A slave considers its master lost before the master considers the slave lost. The tasks of a
    // slave end by the lease of their tasker, also if the slave hangs and notices nothing.
    let lease = if host == HostId::MASTER {
        lease * 4 / 5
    } else {
        lease
    };
    SessionContext {
        vm: vm.to_string(),
        own_host,
        host,
        session_number: number,
        lease,
    }
}

/// True if the peer closed the connection because this host does not belong to the peer's virtual
/// machine.
fn is_expelled(connection: &Connection) -> bool {
    matches!(connection.close_reason(), Some(quinn::ConnectionError::ApplicationClosed(c)) if c.error_code == CLOSE_EXPELLED)
}

/// Ends a session after the data that is already queued.
fn end_session(session: Session) {
    if session.queues.is_none() {
        return session.connection.close(CLOSE_EXPELLED, b"");
    }
    session.finish_streams();
    let connection = session.connection;
    tokio::spawn(async move {
        let _ = timeout(EXPEL_TIMEOUT, connection.closed()).await;
        connection.close(CLOSE_EXPELLED, b"");
    });
}

/// Reason why connecting to an address of a host failed.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    /// No packet was sent.
    #[error("{address}: {source}")]
    Start {
        address: SocketAddr,
        source: quinn::ConnectError,
    },
    #[error("{address}: {}", describe_close(.source))]
    Failed {
        address: SocketAddr,
        source: quinn::ConnectionError,
    },
    #[error("{address}: no answer within {} s", CONNECT_TIMEOUT.as_secs())]
    NoAnswer { address: SocketAddr },
    #[error(transparent)]
    AttemptFailed(tokio::task::JoinError),
}

/// Error: connecting to all addresses of a host failed. Contains the reason for each address.
#[derive(Debug)]
struct UnreachableHost(Vec<ConnectError>);

impl std::error::Error for UnreachableHost {}

impl std::fmt::Display for UnreachableHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons: Vec<String> = self.0.iter().map(ConnectError::to_string).collect();
        f.write_str(&reasons.join("; "))
    }
}

/// Attempts to connect to one host.
struct Connector {
    endpoint: Endpoint,
    client_config: ClientConfig,
    name: String,
    host: HostId,
    addresses: Vec<SocketAddr>,
}

impl Connector {
    /// Tries all addresses repeatedly, without a time limit, until one of the addresses answers
    /// with the host's certificate. Returns the connection.
    async fn connect_with_retry(&self) -> Connection {
        let mut retry_interval = RECONNECT_INTERVAL_MIN;
        let mut is_logged = false;
        loop {
            match self.try_addresses().await {
                Ok(connection) => return connection,
                Err(why) if !is_logged => {
                    tracing::warn!("cannot reach {} yet: {why}", self.host);
                    is_logged = true;
                }
                Err(_) => {}
            }
            sleep(retry_interval).await;
            retry_interval = (retry_interval * 2).min(RECONNECT_INTERVAL_MAX);
        }
    }

    /// Tries each address once, with a delay of [`CONNECT_STAGGER_INTERVAL`] between successive
    /// addresses. Returns the first connection.
    ///
    /// # Errors
    /// No address has answered; contains the reason for each address.
    async fn try_addresses(&self) -> Result<Connection, UnreachableHost> {
        let mut attempts = JoinSet::new();
        for (address_index, address) in self.addresses.iter().copied().enumerate() {
            let (endpoint, client_config, name) = (
                self.endpoint.clone(),
                self.client_config.clone(),
                self.name.clone(),
            );
            attempts.spawn(async move {
                sleep(CONNECT_STAGGER_INTERVAL * u32::try_from(address_index).unwrap_or(0)).await;
                let handshake = endpoint
                    .connect_with(client_config, address, &name)
                    .map_err(|source| ConnectError::Start { address, source })?;
                match timeout(CONNECT_TIMEOUT, handshake).await {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(source)) => Err(ConnectError::Failed { address, source }),
                    Err(_) => Err(ConnectError::NoAnswer { address }),
                }
            });
        }
        let mut reasons = Vec::new();
        while let Some(result) = attempts.join_next().await {
            match result {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(why)) => reasons.push(why),
                Err(e) => reasons.push(ConnectError::AttemptFailed(e)),
            }
        }
        Err(UnreachableHost(reasons))
    }
}
