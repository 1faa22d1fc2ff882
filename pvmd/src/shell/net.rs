//! Connections with other daemons: one UDP port, sessions with the hosts of this virtual machine,
//! repeated connection attempts until a session is up, and queues for data that must wait for a
//! session.
//!
//! Owned by the daemon's loop. [`super::session`] serves the streams of a session.

use super::input::{Input, InputSender, LogRateLimit};
use super::limits::DATAGRAM_BYTES_MAX;
use super::outbox::{LINK_BYTES_MAX, Outbox, Outgoing, outbox};
use super::pki::{HostCredentials, host_name, host_of_certificate};
use super::session::{
    self, CLOSE_DUPLICATE, CLOSE_EXPELLED, CLOSE_LEAVING, CLOSE_SILENT, describe,
};
use super::session_input::{DataItem, NetInput, SessionContext, SessionQueues};
use super::udp_port::PortRuntime;
use bytes::Bytes;
use pvmd_machine::Event;
use pvmd_machine::pair_streams::{
    FenceReceiver, FenceSender, LANES_MAX, LaneEntry, LaneId, MainEntry, StreamChoice, ends_of,
};
use quinn::congestion::CubicConfig;
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, Incoming, MtuDiscoveryConfig, ServerConfig,
    TransportConfig, VarInt,
};
use rustc_hash::FxHashMap;
use rustls::pki_types::CertificateDer;
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

/// Default silence after which a host is considered lost; `SEMPA_LEASE_MS` sets it for the whole
/// virtual machine.
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(10);
/// Keep-alives sent within a lease (one every 2 s by default).
const KEEP_ALIVES_PER_LEASE: u32 = 5;
/// Maximum number of bytes queued for a host without a session, excluding link frames. Further
/// items are dropped with a log line.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Maximum number of bytes queued for a host that does not read. If there are more, the session is
/// closed.
const UNSENT_BYTES_MAX: usize = 512 << 20;
/// Delay before a host connects to a host with a higher index. Usually the host with the higher
/// index has connected by then.
const CONNECT_GRACE_PERIOD: Duration = Duration::from_secs(1);
/// Time limit for an answer from one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Interval between attempts at the addresses of one host.
const CONNECT_STAGGER_INTERVAL: Duration = Duration::from_millis(200);
/// Pause after the first round of attempts; it doubles up to [`RECONNECT_INTERVAL_MAX`].
const RECONNECT_INTERVAL_MIN: Duration = Duration::from_millis(100);
const RECONNECT_INTERVAL_MAX: Duration = Duration::from_secs(5);
/// Time for which a transfer waits for a session with a host that is currently unreachable.
const SESSION_TIMEOUT: Duration = Duration::from_secs(3);
/// Time limit of an incoming handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent incoming handshakes; further ones are refused.
const HANDSHAKES_MAX: usize = 256;
/// Time limit for an expelled host to receive the data that was sent before.
const EXPEL_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of addresses kept per host.
const ADDRESSES_MAX: usize = 16;
/// Maximum number of received but unread bytes per stream: enough for 500 MB/s over 30 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// Maximum number of received but unread bytes per session.
const SESSION_WINDOW_BYTES: u32 = 256 << 20;
/// Maximum number of concurrent streams of a peer: its channels, pair streams (doubled because old
/// ones may still be ending), and announcements of transfers.
const STREAMS_MAX: u32 = 2 + 2 * LANES_MAX as u32 + 64;
/// Maximum number of concurrent transfers of a peer over the session because TCP is blocked;
/// further ones wait.
const FALLBACK_STREAMS_MAX: u32 = 64;
/// Maximum number of sent but unacknowledged bytes per session.
const SEND_WINDOW_BYTES: u64 = 16 << 20;
/// Initial congestion window of a path.
const INITIAL_WINDOW_BYTES: u64 = 256 << 10;
/// Kernel buffers of the UDP port, if the user's limits allow them.
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
    is_wanted: bool,
    is_expelled: bool,
    session: Option<Session>,
    connector: Option<AbortHandle>,
    /// Frames that wait for a session. The bool is true for frames of the control stream.
    queued: VecDeque<(bool, Outgoing)>,
    queued_bytes: usize,
    queued_link_bytes: usize,
    /// Transfers that wait for a session, at most one per migration.
    waiting_transfers: Vec<oneshot::Sender<(SessionContext, Connection)>>,
}

#[derive(Debug)]
struct Session {
    session_number: u64,
    connection: Connection,
    channels: Option<SessionQueues>,
    fence_sender: FenceSender,
    pair_streams: FxHashMap<LaneId, Outbox>,
    fence_receiver: FenceReceiver<DataMsg>,
}

impl Session {
    fn new(number: u64, connection: Connection, queues: Option<SessionQueues>) -> Session {
        let (fence_sender, fence_receiver) = (FenceSender::default(), FenceReceiver::default());
        Session {
            session_number: number,
            connection,
            channels: queues,
            fence_sender,
            pair_streams: FxHashMap::default(),
            fence_receiver,
        }
    }

    /// Queues an item on the main stream of the data channel.
    fn send_main(&mut self, item: Outgoing) {
        if self
            .channels
            .as_ref()
            .is_some_and(|queues| queues.data.enqueue(item))
        {
            self.fence_sender.count_main_entry();
        }
    }

    /// Queues a link frame on its pair's stream or on the main stream. `context` is called if a
    /// stream must be opened.
    fn send_link(&mut self, context: impl FnOnce(u64) -> SessionContext, body: Bytes) {
        let way = ends_of(&body)
            .map(|ends| (ends, self.fence_sender.choose_stream(ends, Instant::now())));
        let Some((ends, StreamChoice::Lane { lane, new, barrier })) = way else {
            return self.send_main(Outgoing::Link(body));
        };
        if new {
            let (fill, queue) = outbox(LINK_BYTES_MAX);
            tokio::spawn(session::run_pair_stream(
                context(self.session_number),
                self.connection.clone(),
                lane,
                queue,
            ));
            self.pair_streams.insert(lane, fill);
        }
        let Some(queue) = self.pair_streams.get(&lane) else {
            return;
        };
        if let Some(words) = barrier {
            queue.enqueue(Outgoing::Reliable(
                encode_control(&LaneEntry::<()>::Barrier(words)).expect("one number"),
            ));
        }
        if queue.enqueue(Outgoing::Link(body)) {
            self.fence_sender.count_frame(ends);
        }
    }

    /// Sends a control item, preceded by the barrier it needs.
    fn send_control_item(&mut self, word: &DataMsg, frame: Bytes) {
        if let Some(marks) = self.fence_sender.barrier_for(word) {
            self.send_main(Outgoing::Reliable(
                encode_control(&MainEntry::<()>::Barrier(marks)).expect("a fence is short"),
            ));
        }
        self.send_main(Outgoing::Reliable(frame));
        if let DataMsg::Ended { tid: dst, .. } = word {
            self.close_pair_streams(Some(*dst));
        }
    }

    /// Closes pair streams that are idle, or those of `task` if it is given.
    fn close_pair_streams(&mut self, task: Option<Tid>) {
        for mark in self.fence_sender.end_lanes(Instant::now(), task) {
            if let Some(lane) = self.pair_streams.remove(&mark.lane) {
                lane.enqueue(Outgoing::Close);
            }
            self.send_main(Outgoing::Reliable(
                encode_control(&MainEntry::<()>::End(mark)).expect("two numbers"),
            ));
        }
    }

    /// Closes all streams after the data that was queued before.
    fn finish_streams(&self) {
        let Some(queues) = &self.channels else {
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

/// The endpoint and all sessions.
pub(crate) struct Net {
    endpoint: Endpoint,
    client_config: ClientConfig,
    vm: String,
    own_host: HostId,
    lease: Duration,
    inputs: InputSender,
    peers: HashMap<HostId, Peer>,
    next_session: u64,
}

/// A session that exists or is being established.
#[derive(Debug)]
pub(crate) struct PendingSession {
    host: HostId,
    receiver: oneshot::Receiver<(SessionContext, Connection)>,
}

impl PendingSession {
    /// Waits for the session. A migrating task is paused during the wait.
    ///
    /// # Errors
    /// No session was established within [`SESSION_TIMEOUT`].
    pub(crate) async fn session(self) -> Result<(SessionContext, Connection), Failure> {
        let silent = || {
            Failure::Images(format!(
                "there is no session between this host and {}",
                self.host
            ))
        };
        let told = tokio::time::timeout(SESSION_TIMEOUT, self.receiver).await;
        told.ok().and_then(Result::ok).ok_or_else(silent)
    }
}

/// Opens a UDP port (0: any free one), for IPv4 and IPv6 if this host has both.
///
/// # Errors
/// The port cannot be opened.
pub(crate) fn bind_udp(port: u16) -> std::io::Result<UdpSocket> {
    let socket = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Ok(socket) => socket,
        // No IPv6 on this host.
        Err(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?,
    };
    use nix::sys::socket::{setsockopt, sockopt};
    // Larger buffers are only an optimization; root may exceed the system's limit.
    let _ = setsockopt(&socket, sockopt::RcvBuf, &SOCKET_BUFFER_BYTES);
    let _ = setsockopt(&socket, sockopt::SndBuf, &SOCKET_BUFFER_BYTES);
    let _ = setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER_BYTES);
    let _ = setsockopt(&socket, sockopt::SndBufForce, &SOCKET_BUFFER_BYTES);
    Ok(socket)
}

fn transport(lease: Duration) -> anyhow::Result<Arc<TransportConfig>> {
    let mut transport = TransportConfig::default();
    let mut congestion = CubicConfig::default();
    congestion.initial_window(INITIAL_WINDOW_BYTES);
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(DATAGRAM_BYTES_MAX);
    transport
        .keep_alive_interval(Some(lease / KEEP_ALIVES_PER_LEASE))
        // The session watches the lease; this timeout only removes connections that are certainly
        // dead.
        .max_idle_timeout(Some((lease * 2).try_into()?))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .receive_window(VarInt::from_u32(SESSION_WINDOW_BYTES))
        .send_window(SEND_WINDOW_BYTES)
        .max_concurrent_uni_streams(VarInt::from_u32(STREAMS_MAX))
        .max_concurrent_bidi_streams(VarInt::from_u32(FALLBACK_STREAMS_MAX))
        .datagram_receive_buffer_size(None)
        .mtu_discovery_config(Some(mtu))
        .congestion_controller_factory(Arc::new(congestion));
    Ok(Arc::new(transport))
}

impl Net {
    /// Starts the endpoint on a bound port.
    ///
    /// # Errors
    /// The certificates or the socket cannot be used.
    pub(crate) fn start(
        socket: UdpSocket,
        identity: &HostCredentials,
        (vm, own_host): (&str, HostId),
        lease: Duration,
        inputs: InputSender,
    ) -> anyhow::Result<Net> {
        let transport = transport(lease)?;
        let mut server = ServerConfig::with_crypto(Arc::new(identity.server_config()?));
        server
            .transport_config(transport.clone())
            .max_incoming(HANDSHAKES_MAX);
        let mut client = ClientConfig::new(Arc::new(identity.client_config()?));
        client.transport_config(transport);
        let mut config = EndpointConfig::default();
        config.max_udp_payload_size(DATAGRAM_BYTES_MAX)?;
        let runtime = Arc::new(PortRuntime);
        let endpoint = Endpoint::new(config, Some(server), socket, runtime)?;
        tokio::spawn(accept(endpoint.clone(), vm.to_string(), inputs.clone()));
        let (vm, peers) = (vm.to_string(), HashMap::new());
        Ok(Net {
            endpoint,
            client_config: client,
            vm,
            own_host,
            lease,
            inputs,
            peers,
            next_session: 1,
        })
    }

    /// Returns the UDP port, to be announced to other hosts.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn port(&self) -> std::io::Result<u16> {
        Ok(self.endpoint.local_addr()?.port())
    }

    /// Establishes a session with a host, and a new one whenever the session is lost.
    pub(crate) fn connect(&mut self, host: HostId, addresses: Vec<SocketAddr>) {
        let peer = self.peers.entry(host).or_default();
        peer.is_wanted = true;
        peer.is_expelled = false;
        for address in addresses {
            if !peer.addresses.contains(&address) && peer.addresses.len() < ADDRESSES_MAX {
                peer.addresses.push(address);
            }
        }
        self.connect_if_needed(host);
    }

    /// Ends the session with a host and refuses new ones.
    pub(crate) fn expel(&mut self, host: HostId) {
        let peer = self.peers.entry(host).or_default();
        if let Some(connector) = peer.connector.take() {
            connector.abort();
        }
        if let Some(session) = peer.session.take() {
            end_session(session);
        }
        *peer = Peer {
            is_expelled: true,
            ..Peer::default()
        };
    }

    /// Sends a control message, or queues it until a session is up.
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
        let Some(queues) = peer.session.as_ref().and_then(|s| s.channels.as_ref()) else {
            return self.queue_until_up(host, true, Outgoing::Reliable(frame));
        };
        queues.control.enqueue(Outgoing::Reliable(frame));
        self.close_if_stalled(host);
    }

    /// Sends an item or frame for a task on the host `host`, or queues it until a session is up.
    pub(crate) fn send_data(&mut self, host: HostId, carried: DataMsg) {
        if let DataMsg::Frame(body) = carried {
            let (vm, me, lease) = (&self.vm, self.own_host, self.lease);
            let peer = self.peers.entry(host).or_default();
            match peer.session.as_mut().filter(|s| s.channels.is_some()) {
                Some(session) => {
                    session.send_link(|number| session_context(vm, me, lease, host, number), body)
                }
                None if peer.is_expelled => {}
                None => self.queue_until_up(host, false, Outgoing::Link(body)),
            }
            return;
        }
        let frame = match encode_control(&MainEntry::Item(&carried)) {
            Ok(frame) => frame,
            Err(e) => {
                return tracing::warn!("an item for a task on {host} could not be sent: {e}");
            }
        };
        let Some(peer) = self.peer_unless_expelled(host) else {
            return;
        };
        match peer.session.as_mut().filter(|s| s.channels.is_some()) {
            Some(session) => session.send_control_item(&carried, frame),
            None => return self.queue_until_up(host, false, Outgoing::Reliable(frame)),
        }
        self.close_if_stalled(host);
    }

    /// Returns the state of a host unless it is expelled.
    fn peer_unless_expelled(&mut self, host: HostId) -> Option<&mut Peer> {
        Some(self.peers.entry(host).or_default()).filter(|peer| !peer.is_expelled)
    }

    /// Closes the session with a host that does not read.
    fn close_if_stalled(&mut self, host: HostId) {
        let session = self.peers.get(&host).and_then(|peer| peer.session.as_ref());
        let Some(queues) = session.and_then(|s| s.channels.as_ref()) else {
            return;
        };
        let most = queues
            .control
            .reliable_bytes()
            .max(queues.data.reliable_bytes());
        if most > UNSENT_BYTES_MAX && queues.connection.close_reason().is_none() {
            tracing::warn!(
                "{host} reads nothing and {UNSENT_BYTES_MAX} bytes are queued for it: closing its session"
            );
            queues.connection.close(CLOSE_SILENT, b"reads nothing");
        }
    }

    /// Queues an item until there is a session.
    fn queue_until_up(&mut self, host: HostId, control: bool, item: Outgoing) {
        let peer = self.peers.entry(host).or_default();
        let (len, reliable) = match &item {
            Outgoing::Reliable(bytes) | Outgoing::WithFds(bytes, _) => (bytes.len(), true),
            Outgoing::Link(bytes) => (bytes.len(), false),
            Outgoing::Close => return,
        };
        let (waiting, bytes_max) = if reliable {
            (&mut peer.queued_bytes, QUEUED_BYTES_MAX)
        } else {
            (&mut peer.queued_link_bytes, LINK_BYTES_MAX)
        };
        if *waiting + len > bytes_max {
            tracing::warn!(
                "{host} has no session and {bytes_max} bytes are queued for it: a frame is dropped"
            );
            return;
        }
        *waiting += len;
        peer.queued.push_back((control, item));
    }

    /// Returns the connection of a session that is up, for bulk transfers.
    fn session_for_transfer(&self, host: HostId) -> Option<(SessionContext, Connection)> {
        let session = self.peers.get(&host)?.session.as_ref()?;
        let queues = session.channels.as_ref()?;
        Some((
            self.session_context(host, session.session_number),
            queues.connection.clone(),
        ))
    }

    /// As [`Net::session_for_transfer`], but also waits for a new session if the hosts currently
    /// have none.
    pub(crate) fn await_session(&mut self, host: HostId) -> PendingSession {
        let (session_sender, receiver) = oneshot::channel();
        match self.session_for_transfer(host) {
            Some(bulk) => {
                let _ = session_sender.send(bulk);
            }
            None => {
                if let Some(peer) = self.peers.get_mut(&host) {
                    peer.waiting_transfers.retain(|other| !other.is_closed());
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

    /// Handles the inputs about sessions and connection attempts. The other inputs belong to the
    /// loop.
    pub(crate) fn handle_input(&mut self, input: NetInput) -> Vec<SessionChange> {
        match input {
            NetInput::HandshakeDone { host, connection } => {
                self.on_handshake_done(host, connection)
            }
            NetInput::SessionUp {
                host,
                number,
                channels: queues,
            } => return self.on_session_up(host, number, queues),
            NetInput::SessionDown { host, number, why } => {
                return self.on_session_down(host, number, why);
            }
            NetInput::ConnectEnded { host } => {
                if let Some(peer) = self.peers.get_mut(&host) {
                    peer.connector = None;
                }
            }
            NetInput::Control { .. }
            | NetInput::Data { .. }
            | NetInput::Images(_)
            | NetInput::Memory(_)
            | NetInput::FallbackStream { .. } => {}
        }
        Vec::new()
    }

    fn on_handshake_done(&mut self, host: HostId, connection: Connection) {
        if self.peers.get(&host).is_some_and(|p| p.is_expelled) || host == self.own_host {
            connection.close(CLOSE_EXPELLED, b"");
            return;
        }
        let number = self.next_session;
        let pair = self.session_context(host, number);
        let peer = self.peers.entry(host).or_default();
        if self.own_host > host {
            // This host has the higher index, so it decides, and there is one session at a time.
            if peer.session.is_some() {
                connection.close(CLOSE_DUPLICATE, b"");
                return;
            }
            peer.session = Some(Session::new(number, connection.clone(), None));
        }
        self.next_session += 1;
        tokio::spawn(session::run(pair, connection, self.inputs.clone()));
    }

    fn on_session_up(
        &mut self,
        host: HostId,
        number: u64,
        queues: SessionQueues,
    ) -> Vec<SessionChange> {
        let mut news = Vec::new();
        let decides = self.own_host > host;
        let peer = self.peers.entry(host).or_default();
        if peer.is_expelled
            || (decides
                && peer
                    .session
                    .as_ref()
                    .is_none_or(|s| s.session_number != number))
        {
            queues.connection.close(CLOSE_EXPELLED, b"");
            return news;
        }
        if let Some(old) = peer.session.take()
            && old.session_number != number
        {
            // The other host decides, and has given up the old session.
            old.connection.close(CLOSE_DUPLICATE, b"");
            news.push(SessionChange::Lost(
                host,
                "it has begun a new session".into(),
            ));
        }
        if let Some(connector) = peer.connector.take() {
            connector.abort();
        }
        let control = queues.control.clone();
        let mut session = Session::new(number, queues.connection.clone(), Some(queues));
        for (to_control, item) in peer.queued.drain(..) {
            if to_control {
                control.enqueue(item);
            } else {
                session.send_main(item);
            }
        }
        (peer.queued_bytes, peer.queued_link_bytes) = (0, 0);
        peer.session = Some(session);
        let transfers = std::mem::take(&mut peer.waiting_transfers);
        for (transfer, bulk) in transfers
            .into_iter()
            .zip(std::iter::from_fn(|| self.session_for_transfer(host)))
        {
            // The waiting transfer may have ended.
            let _ = transfer.send(bulk);
        }
        tracing::info!("session with {host} is up");
        news.push(SessionChange::Connected(host));
        news
    }

    fn on_session_down(&mut self, host: HostId, number: u64, why: String) -> Vec<SessionChange> {
        let Some(peer) = self.peers.get_mut(&host) else {
            return Vec::new();
        };
        let Some(session) = peer.session.take_if(|s| s.session_number == number) else {
            return Vec::new();
        };
        let was_up = session.channels.is_some();
        let verb = if was_up { "ended" } else { "failed to come up" };
        tracing::info!("session with {host} {verb}: {why}");
        // A slave that its master has expelled must not connect again.
        let expelled = host == HostId::MASTER && is_expelled(&session.connection);
        if was_up || expelled {
            vec![SessionChange::Lost(host, why)]
        } else {
            Vec::new()
        }
    }

    /// Accepts an item of the current session's data channel; [`Net::next_data`] returns the items
    /// that no fence holds.
    pub(crate) fn accept_data(&mut self, host: HostId, number: u64, item: DataItem) {
        let Some(session) = self.current_session(host, number) else {
            return;
        };
        match item {
            DataItem::Main(item) => session.fence_receiver.push_main(item),
            DataItem::Lane(lane, item) => session.fence_receiver.push_lane(lane, item),
        }
    }

    /// Returns the next item of the data channel for the state machine.
    pub(crate) fn next_data(&mut self, host: HostId, number: u64) -> Option<DataMsg> {
        self.current_session(host, number)?.fence_receiver.pop()
    }

    fn current_session(&mut self, host: HostId, number: u64) -> Option<&mut Session> {
        self.peers
            .get_mut(&host)?
            .session
            .as_mut()
            .filter(|s| s.session_number == number)
    }

    /// Connects to hosts that lack a session, and closes idle pair streams. Called once a second.
    pub(crate) fn tick(&mut self) {
        self.peers
            .values_mut()
            .filter_map(|peer| peer.session.as_mut())
            .for_each(|session| session.close_pair_streams(None));
        let wanted: Vec<HostId> = self
            .peers
            .iter()
            .filter(|(_, p)| p.is_wanted)
            .map(|(host, _)| *host)
            .collect();
        wanted
            .into_iter()
            .for_each(|host| self.connect_if_needed(host));
    }

    fn connect_if_needed(&mut self, host: HostId) {
        let grace = if self.own_host > host {
            Duration::ZERO
        } else {
            CONNECT_GRACE_PERIOD
        };
        let Some(peer) = self.peers.get_mut(&host) else {
            return;
        };
        if peer.session.is_some() || peer.connector.is_some() || peer.addresses.is_empty() {
            return;
        }
        let connector = Connector {
            endpoint: self.endpoint.clone(),
            client: self.client_config.clone(),
            name: host_name(host, &self.vm),
            host,
            addresses: peer.addresses.clone(),
        };
        let inputs = self.inputs.clone();
        let task = tokio::spawn(async move {
            sleep(grace).await;
            let connection = connector.connect_with_retry().await;
            let _ = inputs
                .send(Input::Net(NetInput::HandshakeDone { host, connection }))
                .await;
            // The session needs time to come up before another attempt makes sense.
            sleep(CONNECT_GRACE_PERIOD).await;
            let _ = inputs
                .send(Input::Net(NetInput::ConnectEnded { host }))
                .await;
        });
        peer.connector = Some(task.abort_handle());
    }

    /// Ends all sessions after the data that was sent before. The loop must keep calling
    /// [`Net::handle_input`] until [`Net::has_sessions`] is false.
    pub(crate) fn begin_shutdown(&mut self) {
        for peer in self.peers.values_mut() {
            peer.is_wanted = false;
            if let Some(connector) = peer.connector.take() {
                connector.abort();
            }
            match &peer.session {
                Some(session) if session.channels.is_some() => session.finish_streams(),
                Some(session) => session.connection.close(CLOSE_LEAVING, b""),
                None => {}
            }
        }
    }

    /// True if any session has not ended.
    pub(crate) fn has_sessions(&self) -> bool {
        self.peers.values().any(|p| p.session.is_some())
    }

    /// Simulates the loss of this host's network: the port sends and receives nothing any more, and
    /// no peer is notified.
    #[cfg(test)]
    pub(crate) fn cut_network(&mut self) {
        let nowhere = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        self.endpoint.rebind(nowhere).expect("a socket");
    }

    /// Notifies the peers and closes the port.
    pub(crate) async fn close(self, allowed: Duration) {
        self.endpoint.close(CLOSE_LEAVING, b"leaving");
        let _ = timeout(allowed, self.endpoint.wait_idle()).await;
    }
}

fn session_context(
    vm: &str,
    own_host: HostId,
    lease: Duration,
    host: HostId,
    number: u64,
) -> SessionContext {
    // A slave considers its master lost before the master considers the slave lost: when the master
    // considers a host's tasks dead, they are.
    let lease = if host == HostId::MASTER {
        lease * 4 / 5
    } else {
        lease
    };
    SessionContext {
        vm: vm.to_string(),
        own_host,
        host,
        number,
        lease,
    }
}

/// True if the peer closed the connection because this host is not in its virtual machine.
fn is_expelled(connection: &Connection) -> bool {
    matches!(connection.close_reason(), Some(quinn::ConnectionError::ApplicationClosed(c)) if c.error_code == CLOSE_EXPELLED)
}

/// Ends a session after the data that was sent on it before.
fn end_session(session: Session) {
    if session.channels.is_none() {
        return session.connection.close(CLOSE_EXPELLED, b"");
    }
    session.finish_streams();
    let connection = session.connection;
    tokio::spawn(async move {
        let _ = timeout(EXPEL_TIMEOUT, connection.closed()).await;
        connection.close(CLOSE_EXPELLED, b"");
    });
}

/// Accepts connections forever. A peer without a certificate of this virtual machine fails the
/// handshake; the endpoint ignores everything that is not QUIC.
async fn accept(endpoint: Endpoint, vm: String, inputs: InputSender) {
    let limit = Arc::new(LogRateLimit::new());
    while let Some(incoming) = endpoint.accept().await {
        let (vm, inputs, limit) = (vm.clone(), inputs.clone(), limit.clone());
        tokio::spawn(async move {
            let from = incoming.remote_address();
            match complete_handshake(incoming, &vm).await {
                Ok((host, connection)) => {
                    let _ = inputs
                        .send(Input::Net(NetInput::HandshakeDone { host, connection }))
                        .await;
                }
                Err(why) if limit.try_acquire() => {
                    let text = format!("refused a connection from {from}: {why}");
                    let _ = inputs
                        .send(Input::Event(Event::Unauthenticated { text }))
                        .await;
                }
                Err(_) => {}
            }
        });
    }
}

/// Why an incoming connection was refused. No byte beyond the handshake was processed.
#[derive(Debug, thiserror::Error)]
enum HandshakeError {
    #[error(transparent)]
    Accept(quinn::ConnectionError),
    #[error("the handshake did not end")]
    Timeout,
    #[error("{}", describe(.0))]
    Failed(#[source] quinn::ConnectionError),
    #[error("its certificate names no host of this virtual machine")]
    UnknownHost,
}

async fn complete_handshake(
    incoming: Incoming,
    vm: &str,
) -> Result<(HostId, Connection), HandshakeError> {
    let connecting = incoming.accept().map_err(HandshakeError::Accept)?;
    let connection = timeout(HANDSHAKE_TIMEOUT, connecting)
        .await
        .map_err(|_| HandshakeError::Timeout)?
        .map_err(HandshakeError::Failed)?;
    match peer_host(&connection, vm) {
        Some(host) => Ok((host, connection)),
        None => {
            connection.close(CLOSE_EXPELLED, b"");
            Err(HandshakeError::UnknownHost)
        }
    }
}

/// Returns the host that the peer's verified certificate names.
fn peer_host(connection: &Connection, vm: &str) -> Option<HostId> {
    let chain = connection
        .peer_identity()?
        .downcast::<Vec<CertificateDer<'static>>>()
        .ok()?;
    host_of_certificate(chain.first()?, vm)
}

/// Why an address of a host gave no connection.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    /// No packet was sent.
    #[error("{address}: {source}")]
    Start {
        address: SocketAddr,
        source: quinn::ConnectError,
    },
    #[error("{address}: {}", describe(.source))]
    Failed {
        address: SocketAddr,
        source: quinn::ConnectionError,
    },
    #[error("{address}: no answer within {} s", CONNECT_TIMEOUT.as_secs())]
    NoAnswer { address: SocketAddr },
    #[error(transparent)]
    AttemptFailed(tokio::task::JoinError),
}

/// The reasons of all addresses of a host, none of which gave a connection.
#[derive(Debug)]
struct UnreachableHost(Vec<ConnectError>);

impl std::error::Error for UnreachableHost {}

impl std::fmt::Display for UnreachableHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reasons: Vec<String> = self.0.iter().map(ConnectError::to_string).collect();
        f.write_str(&reasons.join("; "))
    }
}

/// Connection attempts to one host.
struct Connector {
    endpoint: Endpoint,
    client: ClientConfig,
    name: String,
    host: HostId,
    addresses: Vec<SocketAddr>,
}

impl Connector {
    /// Tries all addresses repeatedly until one answers with the right certificate.
    async fn connect_with_retry(&self) -> Connection {
        let mut pause = RECONNECT_INTERVAL_MIN;
        let mut logged = false;
        loop {
            match self.try_addresses().await {
                Ok(connection) => return connection,
                Err(why) if !logged => {
                    tracing::warn!("cannot reach {} yet: {why}", self.host);
                    logged = true;
                }
                Err(_) => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(RECONNECT_INTERVAL_MAX);
        }
    }

    /// Tries each address once, [`CONNECT_STAGGER_INTERVAL`] apart; returns the first connection.
    async fn try_addresses(&self) -> Result<Connection, UnreachableHost> {
        let mut tries = JoinSet::new();
        for (n, address) in self.addresses.iter().copied().enumerate() {
            let (endpoint, client, name) = (
                self.endpoint.clone(),
                self.client.clone(),
                self.name.clone(),
            );
            tries.spawn(async move {
                sleep(CONNECT_STAGGER_INTERVAL * u32::try_from(n).unwrap_or(0)).await;
                let connecting = endpoint
                    .connect_with(client, address, &name)
                    .map_err(|source| ConnectError::Start { address, source })?;
                match timeout(CONNECT_TIMEOUT, connecting).await {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(source)) => Err(ConnectError::Failed { address, source }),
                    Err(_) => Err(ConnectError::NoAnswer { address }),
                }
            });
        }
        let mut reasons = Vec::new();
        while let Some(result) = tries.join_next().await {
            match result {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(why)) => reasons.push(why),
                Err(e) => reasons.push(ConnectError::AttemptFailed(e)),
            }
        }
        Err(UnreachableHost(reasons))
    }
}
