//! Connections with other daemons: one UDP port, sessions with the hosts of this virtual machine,
//! repeated connection attempts until a session is up, and queues for data that must wait for a
//! session.
//!
//! Owned by the daemon's loop. [`super::session`] serves the streams of a session.

use super::detour::What;
use super::input::{Input, Inputs, LineLimit};
use super::log::Log;
use super::outbox::{LINK_BYTES_MAX, Outbox, Parcel, outbox};
use super::pki::{Identity, host_name, host_named};
use super::port::PortRuntime;
use super::session::{
    self, CLOSE_DUPLICATE, CLOSE_FORGOTTEN, CLOSE_LEAVING, CLOSE_SILENT, Channels, DataParcel,
    Pair, describe,
};
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
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::host::{Carried, HostMsg};
use sempa_proto::migration::Failure;
use sempa_proto::{HostId, MigrationId, Tid};
use std::collections::{HashMap, VecDeque};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Default silence after which a host is considered lost; `SEMPA_LEASE_MS` sets it for the whole
/// virtual machine.
pub(crate) const LEASE: Duration = Duration::from_secs(10);
/// Keep-alives sent within a lease (one every 2 s by default).
const KEEP_ALIVES_PER_LEASE: u32 = 5;
/// Most bytes, without link frames, queued for a host without a session; further ones are dropped
/// with a log line.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Most bytes queued for a host that does not read; above it the session is closed.
const UNSENT_BYTES_MAX: usize = 512 << 20;
/// Time for which the host with the lower index of two leaves connecting to the other.
const DIAL_GRACE: Duration = Duration::from_secs(1);
/// Time limit for an answer from one address.
const DIAL_WITHIN: Duration = Duration::from_secs(4);
/// Interval between attempts at the addresses of one host.
const DIAL_STAGGER: Duration = Duration::from_millis(200);
/// Pause after the first round of attempts; it doubles up to [`DIAL_PAUSE_MAX`].
const DIAL_PAUSE: Duration = Duration::from_millis(100);
const DIAL_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Time a transfer waits for a session with a host that is currently unreachable.
const SESSION_WAIT: Duration = Duration::from_secs(3);
/// Time limit of an incoming handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Most concurrent incoming handshakes; more are refused.
const HANDSHAKES_MAX: usize = 256;
/// Time limit for an expelled host to receive what was sent before.
const FORGET_WITHIN: Duration = Duration::from_secs(2);
/// Most addresses kept per host.
const ADDRESSES_MAX: usize = 16;
/// Received but unread bytes, per stream and per session: enough for 500 MB/s over 30 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const SESSION_WINDOW_BYTES: u32 = 256 << 20;
/// Concurrent streams of a peer: its channels, pair streams (doubled because old ones may still be
/// ending), and announcements of transfers.
const STREAMS_MAX: u32 = 2 + 2 * LANES_MAX as u32 + 64;
/// Concurrent transfers of a peer over the session because TCP is blocked; more wait.
const DETOURS_MAX: u32 = 64;
/// Sent but unacknowledged bytes per session.
const SEND_WINDOW_BYTES: u64 = 16 << 20;
/// Initial congestion window of a path.
const INITIAL_WINDOW_BYTES: u64 = 256 << 10;
/// Largest datagram tried, for jumbo frames and loopback. The endpoint passes ten datagrams at once
/// to the kernel, which accepts at most 65,507 bytes in one call and drops all ten otherwise.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 6400;
/// Kernel buffers of the UDP port, if the user's limits allow them.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// Inputs from the sessions to the loop.
#[derive(Debug)]
pub(crate) enum NetInput {
    /// A connection has completed its handshake.
    Arrived {
        host: HostId,
        connection: Connection,
    },
    /// A session is up.
    Up {
        host: HostId,
        number: u64,
        channels: Channels,
    },
    Control {
        host: HostId,
        number: u64,
        message: HostMsg,
    },
    /// An item of the data channel, in the order of its stream.
    Data {
        host: HostId,
        number: u64,
        parcel: DataParcel,
    },
    /// Announces an image transfer.
    Images(Announced),
    /// Announces a post-copy memory transfer.
    Memory(Announced),
    /// A session stream for a bulk transfer, because TCP is blocked.
    Detour {
        host: HostId,
        migration: MigrationId,
        what: What,
        streams: (quinn::SendStream, quinn::RecvStream),
    },
    /// A session has ended, or failed to come up.
    Down {
        host: HostId,
        number: u64,
        why: String,
    },
    /// A connection attempt has ended. A successful one was reported before as
    /// [`NetInput::Arrived`].
    DialEnded { host: HostId },
}

/// A transfer that another host announces on a stream of its own; the stream carries further data.
#[derive(Debug)]
pub(crate) struct Announced {
    pub(crate) pair: Pair,
    pub(crate) migration: MigrationId,
    pub(crate) session: Connection,
    pub(crate) stream: quinn::RecvStream,
    pub(crate) decoder: FrameDecoder,
}

/// Changes of sessions reported by [`Net::take`].
#[derive(Debug)]
pub(crate) enum NetNews {
    Connected(HostId),
    Lost(HostId, String),
}

/// The session state of another host.
#[derive(Debug, Default)]
struct Peer {
    addresses: Vec<SocketAddr>,
    wanted: bool,
    forgotten: bool,
    session: Option<Session>,
    dialler: Option<AbortHandle>,
    /// Frames that wait for a session; true for the control stream.
    waiting: VecDeque<(bool, Parcel)>,
    waiting_bytes: usize,
    waiting_link_bytes: usize,
    /// Transfers that wait for a session, at most one per migration.
    transfers: Vec<oneshot::Sender<(Pair, Connection)>>,
}

#[derive(Debug)]
struct Session {
    number: u64,
    connection: Connection,
    channels: Option<Channels>,
    fork: FenceSender,
    lanes: FxHashMap<LaneId, Outbox>,
    join: FenceReceiver<Carried>,
}

impl Session {
    fn new(number: u64, connection: Connection, channels: Option<Channels>) -> Session {
        let (fork, join) = (FenceSender::default(), FenceReceiver::default());
        Session {
            number,
            connection,
            channels,
            fork,
            lanes: FxHashMap::default(),
            join,
        }
    }

    /// Queues an item on the main stream of the data channel.
    fn put_data(&mut self, parcel: Parcel) {
        if self
            .channels
            .as_ref()
            .is_some_and(|channels| channels.data.put(parcel))
        {
            self.fork.count_main_entry();
        }
    }

    /// Queues a link frame on its pair's stream or on the main stream. `pair` is called if a stream
    /// must be opened.
    fn put_link(&mut self, pair: impl FnOnce(u64) -> Pair, body: Bytes) {
        let way = ends_of(&body).map(|ends| (ends, self.fork.choose_stream(ends, Instant::now())));
        let Some((ends, StreamChoice::Lane { lane, new, barrier })) = way else {
            return self.put_data(Parcel::Link(body));
        };
        if new {
            let (fill, queue) = outbox(LINK_BYTES_MAX);
            tokio::spawn(session::run_lane(
                pair(self.number),
                self.connection.clone(),
                lane,
                queue,
            ));
            self.lanes.insert(lane, fill);
        }
        let Some(queue) = self.lanes.get(&lane) else {
            return;
        };
        if let Some(words) = barrier {
            queue.put(Parcel::Sure(
                encode_control(&LaneEntry::<()>::Barrier(words)).expect("one number"),
            ));
        }
        if queue.put(Parcel::Link(body)) {
            self.fork.count_frame(ends);
        }
    }

    /// Sends a control item, preceded by the barrier it needs.
    fn put_word(&mut self, word: &Carried, frame: Bytes) {
        if let Some(marks) = self.fork.barrier_for(word) {
            self.put_data(Parcel::Sure(
                encode_control(&MainEntry::<()>::Barrier(marks)).expect("a fence is short"),
            ));
        }
        self.put_data(Parcel::Sure(frame));
        if let Carried::Ended { dst, .. } = word {
            self.close_lanes(Some(*dst));
        }
    }

    /// Closes pair streams that are idle, or those of `task` if it is given.
    fn close_lanes(&mut self, task: Option<Tid>) {
        for mark in self.fork.end_lanes(Instant::now(), task) {
            if let Some(lane) = self.lanes.remove(&mark.lane) {
                lane.put(Parcel::End);
            }
            self.put_data(Parcel::Sure(
                encode_control(&MainEntry::<()>::End(mark)).expect("two numbers"),
            ));
        }
    }

    /// Closes all streams after what was queued before.
    fn end(&self) {
        let Some(channels) = &self.channels else {
            return;
        };
        self.lanes
            .values()
            .chain([&channels.data, &channels.control])
            .for_each(|queue| {
                queue.put(Parcel::End);
            });
    }
}

/// The endpoint and all sessions.
pub(crate) struct Net {
    endpoint: Endpoint,
    client: ClientConfig,
    vm: String,
    me: HostId,
    lease: Duration,
    inputs: Inputs,
    log: Log,
    peers: HashMap<HostId, Peer>,
    next_session: u64,
}

/// A session that exists or is being established.
#[derive(Debug)]
pub(crate) struct Soon {
    host: HostId,
    told: oneshot::Receiver<(Pair, Connection)>,
}

impl Soon {
    /// Waits for the session. A task is paused meanwhile.
    ///
    /// # Errors
    /// No session was established within [`SESSION_WAIT`].
    pub(crate) async fn session(self) -> Result<(Pair, Connection), Failure> {
        let silent = || {
            Failure::Images(format!(
                "this host and {} do not hear each other",
                self.host
            ))
        };
        let told = tokio::time::timeout(SESSION_WAIT, self.told).await;
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
        .max_concurrent_bidi_streams(VarInt::from_u32(DETOURS_MAX))
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
        identity: &Identity,
        (vm, me): (&str, HostId),
        lease: Duration,
        inputs: Inputs,
        log: Log,
    ) -> anyhow::Result<Net> {
        let transport = transport(lease)?;
        let mut server = ServerConfig::with_crypto(Arc::new(identity.server()?));
        server
            .transport_config(transport.clone())
            .max_incoming(HANDSHAKES_MAX);
        let mut client = ClientConfig::new(Arc::new(identity.client()?));
        client.transport_config(transport);
        let mut config = EndpointConfig::default();
        config.max_udp_payload_size(DATAGRAM_BYTES_MAX)?;
        let runtime = Arc::new(PortRuntime);
        let endpoint = Endpoint::new(config, Some(server), socket, runtime)?;
        tokio::spawn(accept(endpoint.clone(), vm.to_string(), inputs.clone()));
        let (vm, peers) = (vm.to_string(), HashMap::new());
        Ok(Net {
            endpoint,
            client,
            vm,
            me,
            lease,
            inputs,
            log,
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

    /// Establishes a session with this host, and again whenever it is lost.
    pub(crate) fn connect(&mut self, host: HostId, addresses: Vec<SocketAddr>) {
        let peer = self.peers.entry(host).or_default();
        peer.wanted = true;
        peer.forgotten = false;
        for address in addresses {
            if !peer.addresses.contains(&address) && peer.addresses.len() < ADDRESSES_MAX {
                peer.addresses.push(address);
            }
        }
        self.dial(host);
    }

    /// Ends the session with a host and refuses new ones.
    pub(crate) fn forget(&mut self, host: HostId) {
        let peer = self.peers.entry(host).or_default();
        if let Some(dialler) = peer.dialler.take() {
            dialler.abort();
        }
        if let Some(session) = peer.session.take() {
            end_session(session);
        }
        *peer = Peer {
            forgotten: true,
            ..Peer::default()
        };
    }

    /// Sends a control message, or queues it until a session is up.
    pub(crate) fn send(&mut self, host: HostId, message: &HostMsg) {
        let frame = match encode_control(message) {
            Ok(frame) => frame,
            Err(e) => {
                return self
                    .log
                    .line(format!("a message to {host} could not be sent: {e}"));
            }
        };
        let Some(peer) = self.known(host) else { return };
        let Some(channels) = peer.session.as_ref().and_then(|s| s.channels.as_ref()) else {
            return self.keep(host, true, Parcel::Sure(frame));
        };
        channels.control.put(Parcel::Sure(frame));
        self.give_up_if_stuck(host);
    }

    /// Sends an item or frame for a task on this host, or queues it until a session is up.
    pub(crate) fn carry(&mut self, host: HostId, carried: Carried) {
        if let Carried::Link(body) = carried {
            let (vm, me, lease) = (&self.vm, self.me, self.lease);
            let peer = self.peers.entry(host).or_default();
            match peer.session.as_mut().filter(|s| s.channels.is_some()) {
                Some(session) => {
                    session.put_link(|number| pair_of(vm, me, lease, host, number), body)
                }
                None if peer.forgotten => {}
                None => self.keep(host, false, Parcel::Link(body)),
            }
            return;
        }
        let frame = match encode_control(&MainEntry::Item(&carried)) {
            Ok(frame) => frame,
            Err(e) => {
                return self.log.line(format!(
                    "an item for a task on {host} could not be sent: {e}"
                ));
            }
        };
        let Some(peer) = self.known(host) else { return };
        match peer.session.as_mut().filter(|s| s.channels.is_some()) {
            Some(session) => session.put_word(&carried, frame),
            None => return self.keep(host, false, Parcel::Sure(frame)),
        }
        self.give_up_if_stuck(host);
    }

    /// Returns the state of a host unless it is expelled.
    fn known(&mut self, host: HostId) -> Option<&mut Peer> {
        Some(self.peers.entry(host).or_default()).filter(|peer| !peer.forgotten)
    }

    /// Closes the session with a host that does not read.
    fn give_up_if_stuck(&mut self, host: HostId) {
        let session = self.peers.get(&host).and_then(|peer| peer.session.as_ref());
        let Some(channels) = session.and_then(|s| s.channels.as_ref()) else {
            return;
        };
        let most = channels
            .control
            .sure_bytes()
            .max(channels.data.sure_bytes());
        if most > UNSENT_BYTES_MAX && channels.connection.close_reason().is_none() {
            self.log
                .line(format!("{host} takes nothing and {UNSENT_BYTES_MAX} bytes wait for it: giving its session up"));
            channels.connection.close(CLOSE_SILENT, b"takes nothing");
        }
    }

    /// Queues an item until there is a session.
    fn keep(&mut self, host: HostId, control: bool, parcel: Parcel) {
        let peer = self.peers.entry(host).or_default();
        let (len, sure) = match &parcel {
            Parcel::Sure(bytes) | Parcel::With(bytes, _) => (bytes.len(), true),
            Parcel::Link(bytes) => (bytes.len(), false),
            Parcel::End => return,
        };
        let (waiting, most) = if sure {
            (&mut peer.waiting_bytes, WAITING_BYTES_MAX)
        } else {
            (&mut peer.waiting_link_bytes, LINK_BYTES_MAX)
        };
        if *waiting + len > most {
            self.log.line(format!(
                "{host} has no session and {most} bytes wait for it: one more is dropped"
            ));
            return;
        }
        *waiting += len;
        peer.waiting.push_back((control, parcel));
    }

    /// Returns the connection of a session that is up, for bulk transfers.
    fn bulk(&self, host: HostId) -> Option<(Pair, Connection)> {
        let session = self.peers.get(&host)?.session.as_ref()?;
        let channels = session.channels.as_ref()?;
        Some((self.pair(host, session.number), channels.connection.clone()))
    }

    /// As [`Net::bulk`], but also waits for a new session if the hosts currently have none.
    pub(crate) fn bulk_soon(&mut self, host: HostId) -> Soon {
        let (tell, told) = oneshot::channel();
        match self.bulk(host) {
            Some(bulk) => {
                let _ = tell.send(bulk);
            }
            None => {
                if let Some(peer) = self.peers.get_mut(&host) {
                    peer.transfers.retain(|other| !other.is_closed());
                    peer.transfers.push(tell);
                }
            }
        }
        Soon { host, told }
    }

    fn pair(&self, host: HostId, number: u64) -> Pair {
        pair_of(&self.vm, self.me, self.lease, host, number)
    }

    /// True if this is the current session with the host.
    pub(crate) fn is_current(&self, host: HostId, number: u64) -> bool {
        self.peers
            .get(&host)
            .and_then(|p| p.session.as_ref())
            .is_some_and(|s| s.number == number)
    }

    /// Handles the inputs about sessions and connection attempts. The other inputs belong to the
    /// loop.
    pub(crate) fn take(&mut self, input: NetInput) -> Vec<NetNews> {
        match input {
            NetInput::Arrived { host, connection } => self.arrived(host, connection),
            NetInput::Up {
                host,
                number,
                channels,
            } => return self.up(host, number, channels),
            NetInput::Down { host, number, why } => return self.down(host, number, why),
            NetInput::DialEnded { host } => {
                if let Some(peer) = self.peers.get_mut(&host) {
                    peer.dialler = None;
                }
            }
            NetInput::Control { .. }
            | NetInput::Data { .. }
            | NetInput::Images(_)
            | NetInput::Memory(_)
            | NetInput::Detour { .. } => {}
        }
        Vec::new()
    }

    fn arrived(&mut self, host: HostId, connection: Connection) {
        if self.peers.get(&host).is_some_and(|p| p.forgotten) || host == self.me {
            connection.close(CLOSE_FORGOTTEN, b"");
            return;
        }
        let number = self.next_session;
        let pair = self.pair(host, number);
        let peer = self.peers.entry(host).or_default();
        if self.me > host {
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

    fn up(&mut self, host: HostId, number: u64, channels: Channels) -> Vec<NetNews> {
        let mut news = Vec::new();
        let decides = self.me > host;
        let peer = self.peers.entry(host).or_default();
        if peer.forgotten || (decides && peer.session.as_ref().is_none_or(|s| s.number != number)) {
            channels.connection.close(CLOSE_FORGOTTEN, b"");
            return news;
        }
        if let Some(old) = peer.session.take()
            && old.number != number
        {
            // The other host decides, and has given up the old session.
            old.connection.close(CLOSE_DUPLICATE, b"");
            news.push(NetNews::Lost(host, "it has begun a new session".into()));
        }
        if let Some(dialler) = peer.dialler.take() {
            dialler.abort();
        }
        let control = channels.control.clone();
        let mut session = Session::new(number, channels.connection.clone(), Some(channels));
        for (to_control, parcel) in peer.waiting.drain(..) {
            if to_control {
                control.put(parcel);
            } else {
                session.put_data(parcel);
            }
        }
        (peer.waiting_bytes, peer.waiting_link_bytes) = (0, 0);
        peer.session = Some(session);
        let transfers = std::mem::take(&mut peer.transfers);
        for (transfer, bulk) in transfers
            .into_iter()
            .zip(std::iter::from_fn(|| self.bulk(host)))
        {
            // The waiting transfer may have ended.
            let _ = transfer.send(bulk);
        }
        self.log.line(format!("session with {host} stands"));
        news.push(NetNews::Connected(host));
        news
    }

    fn down(&mut self, host: HostId, number: u64, why: String) -> Vec<NetNews> {
        let Some(peer) = self.peers.get_mut(&host) else {
            return Vec::new();
        };
        let Some(session) = peer.session.take_if(|s| s.number == number) else {
            return Vec::new();
        };
        let stood = session.channels.is_some();
        let verb = if stood {
            "ended"
        } else {
            "did not come to stand"
        };
        self.log.line(format!("session with {host} {verb}: {why}"));
        // A slave that its master has expelled must not connect again.
        let expelled = host == HostId::MASTER && is_forgotten(&session.connection);
        if stood || expelled {
            vec![NetNews::Lost(host, why)]
        } else {
            Vec::new()
        }
    }

    /// Takes an item of the current session's data channel; [`Net::carried`] returns the items that
    /// are due.
    pub(crate) fn take_data(&mut self, host: HostId, number: u64, parcel: DataParcel) {
        let Some(session) = self.current(host, number) else {
            return;
        };
        match parcel {
            DataParcel::Main(parcel) => session.join.push_main(parcel),
            DataParcel::Lane(lane, parcel) => session.join.push_lane(lane, parcel),
        }
    }

    /// Returns the next item of the data channel for the state machine.
    pub(crate) fn carried(&mut self, host: HostId, number: u64) -> Option<Carried> {
        self.current(host, number)?.join.pop()
    }

    fn current(&mut self, host: HostId, number: u64) -> Option<&mut Session> {
        self.peers
            .get_mut(&host)?
            .session
            .as_mut()
            .filter(|s| s.number == number)
    }

    /// Connects to hosts that lack a session, and closes idle pair streams. Called once a second.
    pub(crate) fn tick(&mut self) {
        self.peers
            .values_mut()
            .filter_map(|peer| peer.session.as_mut())
            .for_each(|session| session.close_lanes(None));
        let wanted: Vec<HostId> = self
            .peers
            .iter()
            .filter(|(_, p)| p.wanted)
            .map(|(host, _)| *host)
            .collect();
        wanted.into_iter().for_each(|host| self.dial(host));
    }

    fn dial(&mut self, host: HostId) {
        let grace = if self.me > host {
            Duration::ZERO
        } else {
            DIAL_GRACE
        };
        let Some(peer) = self.peers.get_mut(&host) else {
            return;
        };
        if peer.session.is_some() || peer.dialler.is_some() || peer.addresses.is_empty() {
            return;
        }
        let dialler = Dialler {
            endpoint: self.endpoint.clone(),
            client: self.client.clone(),
            name: host_name(host, &self.vm),
            host,
            addresses: peer.addresses.clone(),
            log: self.log.clone(),
        };
        let inputs = self.inputs.clone();
        let task = tokio::spawn(async move {
            sleep(grace).await;
            let connection = dialler.until_connected().await;
            let _ = inputs
                .send(Input::Net(NetInput::Arrived { host, connection }))
                .await;
            // The session needs time to come up before another attempt makes sense.
            sleep(DIAL_GRACE).await;
            let _ = inputs.send(Input::Net(NetInput::DialEnded { host })).await;
        });
        peer.dialler = Some(task.abort_handle());
    }

    /// Ends all sessions after what was sent before. The loop must keep calling [`Net::take`] until
    /// [`Net::has_sessions`] is false.
    pub(crate) fn begin_leaving(&mut self) {
        for peer in self.peers.values_mut() {
            peer.wanted = false;
            if let Some(dialler) = peer.dialler.take() {
                dialler.abort();
            }
            match &peer.session {
                Some(session) if session.channels.is_some() => session.end(),
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
    pub(crate) fn silence(&mut self) {
        let nowhere = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        self.endpoint.rebind(nowhere).expect("a socket");
    }

    /// Notifies the peers and closes the port.
    pub(crate) async fn close(self, allowed: Duration) {
        self.endpoint.close(CLOSE_LEAVING, b"leaving");
        let _ = timeout(allowed, self.endpoint.wait_idle()).await;
    }
}

fn pair_of(vm: &str, me: HostId, lease: Duration, host: HostId, number: u64) -> Pair {
    // A slave gives up its master before the master gives up the slave: when the master considers a
    // host's tasks dead, they are.
    let lease = if host == HostId::MASTER {
        lease * 4 / 5
    } else {
        lease
    };
    Pair {
        vm: vm.to_string(),
        me,
        host,
        number,
        lease,
    }
}

/// True if the peer closed the connection because this host is not in its virtual machine.
fn is_forgotten(connection: &Connection) -> bool {
    matches!(connection.close_reason(), Some(quinn::ConnectionError::ApplicationClosed(c)) if c.error_code == CLOSE_FORGOTTEN)
}

/// Ends a session after what was sent on it before.
fn end_session(session: Session) {
    if session.channels.is_none() {
        return session.connection.close(CLOSE_FORGOTTEN, b"");
    }
    session.end();
    let connection = session.connection;
    tokio::spawn(async move {
        let _ = timeout(FORGET_WITHIN, connection.closed()).await;
        connection.close(CLOSE_FORGOTTEN, b"");
    });
}

/// Accepts connections forever. A peer without a certificate of this virtual machine fails the
/// handshake; the endpoint ignores everything that is not QUIC.
async fn accept(endpoint: Endpoint, vm: String, inputs: Inputs) {
    let limit = Arc::new(LineLimit::new());
    while let Some(incoming) = endpoint.accept().await {
        let (vm, inputs, limit) = (vm.clone(), inputs.clone(), limit.clone());
        tokio::spawn(async move {
            let from = incoming.remote_address();
            match shake_hands(incoming, &vm).await {
                Ok((host, connection)) => {
                    let _ = inputs
                        .send(Input::Net(NetInput::Arrived { host, connection }))
                        .await;
                }
                Err(why) if limit.allows() => {
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

async fn shake_hands(incoming: Incoming, vm: &str) -> Result<(HostId, Connection), String> {
    let connecting = incoming.accept().map_err(|e| e.to_string())?;
    let connection = timeout(HANDSHAKE_WITHIN, connecting)
        .await
        .map_err(|_| "the handshake did not end".to_string())?
        .map_err(|e| describe(&e))?;
    match identity(&connection, vm) {
        Some(host) => Ok((host, connection)),
        None => {
            connection.close(CLOSE_FORGOTTEN, b"");
            Err("its certificate names no host of this virtual machine".into())
        }
    }
}

/// Returns the host that the peer's verified certificate names.
fn identity(connection: &Connection, vm: &str) -> Option<HostId> {
    let chain = connection
        .peer_identity()?
        .downcast::<Vec<CertificateDer<'static>>>()
        .ok()?;
    host_named(chain.first()?, vm)
}

/// Connection attempts to one host.
struct Dialler {
    endpoint: Endpoint,
    client: ClientConfig,
    name: String,
    host: HostId,
    addresses: Vec<SocketAddr>,
    log: Log,
}

impl Dialler {
    /// Tries all addresses repeatedly until one answers with the right certificate.
    async fn until_connected(&self) -> Connection {
        let mut pause = DIAL_PAUSE;
        let mut told = false;
        loop {
            match self.round().await {
                Ok(connection) => return connection,
                Err(why) if !told => {
                    self.log
                        .line(format!("cannot reach {} yet: {why}", self.host));
                    told = true;
                }
                Err(_) => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(DIAL_PAUSE_MAX);
        }
    }

    /// Tries each address once, [`DIAL_STAGGER`] apart; returns the first connection.
    async fn round(&self) -> Result<Connection, String> {
        let mut tries = JoinSet::new();
        for (n, address) in self.addresses.iter().copied().enumerate() {
            let (endpoint, client, name) = (
                self.endpoint.clone(),
                self.client.clone(),
                self.name.clone(),
            );
            tries.spawn(async move {
                sleep(DIAL_STAGGER * u32::try_from(n).unwrap_or(0)).await;
                let connecting = endpoint
                    .connect_with(client, address, &name)
                    .map_err(|e| format!("{address}: {e}"))?;
                match timeout(DIAL_WITHIN, connecting).await {
                    Ok(Ok(connection)) => Ok(connection),
                    Ok(Err(e)) => Err(format!("{address}: {}", describe(&e))),
                    Err(_) => Err(format!(
                        "{address}: no answer within {} s",
                        DIAL_WITHIN.as_secs()
                    )),
                }
            });
        }
        let mut reasons = Vec::new();
        while let Some(result) = tries.join_next().await {
            match result {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(why)) => reasons.push(why),
                Err(e) => reasons.push(e.to_string()),
            }
        }
        Err(reasons.join("; "))
    }
}
