//! The daemon's way to other daemons: one UDP port, sessions with the hosts of this virtual machine, dialling until a
//! session stands, and queues for what has to wait for one. Owned by the daemon's loop; a session's streams are served
//! in [`super::session`].

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
use pvmd_machine::lanes::{Fork, Join, LANES_MAX, Lane, LaneId, Main, Way, ends_of};
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

/// Silence after which a host is lost; `SEMPA_LEASE_MS` sets another time for the whole virtual machine.
pub(crate) const LEASE: Duration = Duration::from_secs(10);
/// Keep-alives are sent so often within a lease (every 2 s by default).
const KEEP_ALIVES_PER_LEASE: u32 = 5;
/// Bytes that wait for a host without a session at most, beside link frames; more are refused with a line in the log.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Bytes that wait for a host that takes nothing; over it the session is given up.
const UNSENT_BYTES_MAX: usize = 512 << 20;
/// The lower index of two hosts lets the other one dial first for this long.
const DIAL_GRACE: Duration = Duration::from_secs(1);
/// Time for one address to answer.
const DIAL_WITHIN: Duration = Duration::from_secs(4);
/// Addresses of one host are tried this far apart.
const DIAL_STAGGER: Duration = Duration::from_millis(200);
/// Pause between two rounds of dialling; doubles up to [`DIAL_PAUSE_MAX`].
const DIAL_PAUSE: Duration = Duration::from_millis(100);
const DIAL_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long a transfer waits for a session with a host that is not heard just now.
const SESSION_WAIT: Duration = Duration::from_secs(3);
/// Time for a handshake that somebody else began.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Handshakes of others at once; more are refused.
const HANDSHAKES_MAX: usize = 256;
/// Time for a forgotten host to take what was sent to it before.
const FORGET_WITHIN: Duration = Duration::from_secs(2);
/// Addresses kept for one host.
const ADDRESSES_MAX: usize = 16;
/// Received and not yet read, per stream and per session: room for 500 MB/s over 30 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const SESSION_WINDOW_BYTES: u32 = 256 << 20;
/// Streams of a peer at once: its channels, twice its lanes because old ones may be ending, and images.
const STREAMS_MAX: u32 = 2 + 2 * LANES_MAX as u32 + 64;
/// Transfers of a peer at once that go by the session for want of TCP; more wait.
const DETOURS_MAX: u32 = 64;
/// Sent and not yet acknowledged, per session.
const SEND_WINDOW_BYTES: u64 = 16 << 20;
/// What a path is taken to bear at the beginning.
const INITIAL_WINDOW_BYTES: u64 = 256 << 10;
/// Largest datagram tried, for jumbo frames and loopback. The endpoint hands ten datagrams at once to the kernel, which
/// takes no more than 65,507 bytes in one call and drops all ten otherwise.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 6400;
/// Kernel buffers of the UDP port, if the user may have so much.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// What the sessions tell the loop.
#[derive(Debug)]
pub(crate) enum NetInput {
    /// A connection has passed the handshake.
    Arrived {
        host: HostId,
        connection: Connection,
    },
    /// A session stands.
    Up {
        host: HostId,
        number: u64,
        channels: Channels,
    },
    /// A control message.
    Control {
        host: HostId,
        number: u64,
        message: HostMsg,
    },
    /// A parcel of the data channel, in the order of its stream.
    Data {
        host: HostId,
        number: u64,
        parcel: DataParcel,
    },
    /// The beginning of an image transfer.
    Images(Announced),
    /// Memory that is to follow a task can be had.
    Memory(Announced),
    /// A stream of the session for what could not be had by TCP.
    Detour {
        host: HostId,
        migration: MigrationId,
        what: What,
        streams: (quinn::SendStream, quinn::RecvStream),
    },
    /// A session has ended, or never came to stand.
    Down {
        host: HostId,
        number: u64,
        why: String,
    },
    /// A round of dialling has ended with a connection (which has arrived) or will not.
    DialEnded { host: HostId },
}

/// What another host announces on a stream of its own, which has more to say.
#[derive(Debug)]
pub(crate) struct Announced {
    pub(crate) pair: Pair,
    pub(crate) migration: MigrationId,
    pub(crate) session: Connection,
    pub(crate) stream: quinn::RecvStream,
    pub(crate) decoder: FrameDecoder,
}

/// What the loop learns from [`Net::take`].
#[derive(Debug)]
pub(crate) enum NetNews {
    /// The session stands.
    Connected(HostId),
    /// It ended.
    Lost(HostId, String),
}

/// Another host, as far as sessions go.
#[derive(Debug, Default)]
struct Peer {
    addresses: Vec<SocketAddr>,
    wanted: bool,
    forgotten: bool,
    session: Option<Session>,
    dialler: Option<AbortHandle>,
    /// Whole frames and link frames that wait for a session: true for the control stream.
    waiting: VecDeque<(bool, Parcel)>,
    waiting_bytes: usize,
    waiting_link_bytes: usize,
    /// Transfers that wait for a session, one for each move at most.
    transfers: Vec<oneshot::Sender<(Pair, Connection)>>,
}

#[derive(Debug)]
struct Session {
    number: u64,
    connection: Connection,
    channels: Option<Channels>,
    fork: Fork,
    lanes: FxHashMap<LaneId, Outbox>,
    join: Join<Carried>,
}

impl Session {
    fn new(number: u64, connection: Connection, channels: Option<Channels>) -> Session {
        let (fork, join) = (Fork::default(), Join::default());
        Session {
            number,
            connection,
            channels,
            fork,
            lanes: FxHashMap::default(),
            join,
        }
    }

    /// Puts something on the main stream of the data channel.
    fn put_data(&mut self, parcel: Parcel) {
        if self
            .channels
            .as_ref()
            .is_some_and(|channels| channels.data.put(parcel))
        {
            self.fork.sent_main();
        }
    }

    /// Sends a link frame on its way; `pair` is for a lane that has to be opened.
    fn put_link(&mut self, pair: impl FnOnce(u64) -> Pair, body: Bytes) {
        let way = ends_of(&body).map(|ends| (ends, self.fork.way(ends, Instant::now())));
        let Some((ends, Way::Lane { lane, new, behind })) = way else {
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
        if let Some(words) = behind {
            queue.put(Parcel::Sure(
                encode_control(&Lane::<()>::Behind(words)).expect("one number"),
            ));
        }
        if queue.put(Parcel::Link(body)) {
            self.fork.sent(ends);
        }
    }

    /// Sends a word behind all that it has to be behind.
    fn put_word(&mut self, word: &Carried, frame: Bytes) {
        if let Some(marks) = self.fork.fence(word) {
            self.put_data(Parcel::Sure(
                encode_control(&Main::<()>::After(marks)).expect("a fence is short"),
            ));
        }
        self.put_data(Parcel::Sure(frame));
        if let Carried::Ended { dst, .. } = word {
            self.close_lanes(Some(*dst));
        }
    }

    /// Ends lanes that are not needed any more, or that one task has to do with.
    fn close_lanes(&mut self, task: Option<Tid>) {
        for mark in self.fork.close(Instant::now(), task) {
            if let Some(lane) = self.lanes.remove(&mark.lane) {
                lane.put(Parcel::End);
            }
            self.put_data(Parcel::Sure(
                encode_control(&Main::<()>::End(mark)).expect("two numbers"),
            ));
        }
    }

    /// Has all streams end after what was put there before.
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

/// A session that is there, or is to come.
#[derive(Debug)]
pub(crate) struct Soon {
    host: HostId,
    told: oneshot::Receiver<(Pair, Connection)>,
}

impl Soon {
    /// Waits for it: a task stands still meanwhile.
    ///
    /// # Errors
    /// It did not come.
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

/// Opens the UDP port (any free one), for both protocols if this host has both.
///
/// # Errors
/// When there is none.
pub(crate) fn bind_udp(port: u16) -> std::io::Result<UdpSocket> {
    let socket = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Ok(socket) => socket,
        // No IPv6 on this host.
        Err(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?,
    };
    use nix::sys::socket::{setsockopt, sockopt};
    // Larger buffers only make it faster; root may exceed the system's limit.
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
        // The lease is watched in the session; this only ends what is dead for sure.
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
    /// When certificates or the socket cannot be used.
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

    /// The port, for announcing it.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub(crate) fn port(&self) -> std::io::Result<u16> {
        Ok(self.endpoint.local_addr()?.port())
    }

    /// Has a session with this host: dials unless one stands, and goes on trying.
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

    /// Ends the session and refuses new ones.
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

    /// Sends a control message, now or when a session stands.
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

    /// Sends something for a task there, now or when a session stands.
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
        let frame = match encode_control(&Main::Item(&carried)) {
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

    /// A host that has not been forgotten.
    fn known(&mut self, host: HostId) -> Option<&mut Peer> {
        Some(self.peers.entry(host).or_default()).filter(|peer| !peer.forgotten)
    }

    /// Gives up the session with a host that takes nothing.
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

    /// Keeps something until there is a session.
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

    /// The connection of a session that stands, for transfers.
    fn bulk(&self, host: HostId) -> Option<(Pair, Connection)> {
        let session = self.peers.get(&host)?.session.as_ref()?;
        let channels = session.channels.as_ref()?;
        Some((self.pair(host, session.number), channels.connection.clone()))
    }

    /// The same, also if the two hosts do not hear each other just now and begin a new session soon.
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

    /// True if this is the session that counts.
    pub(crate) fn is_current(&self, host: HostId, number: u64) -> bool {
        self.peers
            .get(&host)
            .and_then(|p| p.session.as_ref())
            .is_some_and(|s| s.number == number)
    }

    /// Takes what a session or dialler reports; control messages, carried things and images are the loop's own.
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
            // We decide, and there is one session at a time.
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
            // The other one decides, and has given the old one up.
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
            // Who waited may have given up.
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
        // A slave that its master does not want any more is not to go on dialling it.
        let expelled = host == HostId::MASTER && is_forgotten(&session.connection);
        if stood || expelled {
            vec![NetNews::Lost(host, why)]
        } else {
            Vec::new()
        }
    }

    /// Takes a parcel of the data channel of the session that counts; what its turn has come for is [`Net::carried`].
    pub(crate) fn take_data(&mut self, host: HostId, number: u64, parcel: DataParcel) {
        let Some(session) = self.current(host, number) else {
            return;
        };
        match parcel {
            DataParcel::Main(parcel) => session.join.take_main(parcel),
            DataParcel::Lane(lane, parcel) => session.join.take_lane(lane, parcel),
        }
    }

    /// The next thing for the machine out of the data channel.
    pub(crate) fn carried(&mut self, host: HostId, number: u64) -> Option<Carried> {
        self.current(host, number)?.join.next()
    }

    fn current(&mut self, host: HostId, number: u64) -> Option<&mut Session> {
        self.peers
            .get_mut(&host)?
            .session
            .as_mut()
            .filter(|s| s.number == number)
    }

    /// Dials again where a session is wanted and none stands, and ends lanes without use. Called now and then.
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
            // The session needs a moment to come to stand before dialling again makes sense.
            sleep(DIAL_GRACE).await;
            let _ = inputs.send(Input::Net(NetInput::DialEnded { host })).await;
        });
        peer.dialler = Some(task.abort_handle());
    }

    /// Has all sessions end after what was sent before. The loop goes on feeding [`Net::take`] until
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

    /// True while a session has not ended.
    pub(crate) fn has_sessions(&self) -> bool {
        self.peers.values().any(|p| p.session.is_some())
    }

    /// As if this host's network had gone: sends and hears nothing any more on its port, and says so to nobody.
    #[cfg(test)]
    pub(crate) fn silence(&mut self) {
        let nowhere = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        self.endpoint.rebind(nowhere).expect("a socket");
    }

    /// Closes the port after telling those who still listen.
    pub(crate) async fn close(self, allowed: Duration) {
        self.endpoint.close(CLOSE_LEAVING, b"leaving");
        let _ = timeout(allowed, self.endpoint.wait_idle()).await;
    }
}

fn pair_of(vm: &str, me: HostId, lease: Duration, host: HostId, number: u64) -> Pair {
    // A slave gives its master up before the master gives up the slave: when the master counts a host's tasks as
    // dead, they are.
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

/// True if the other end has closed the connection because it does not count this host in.
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

/// Takes connections of others for ever. Whoever has no certificate of this virtual machine does not get past the
/// handshake; what is not QUIC at all is ignored by the endpoint.
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
                    let _ = inputs.send(Input::Event(Event::Stranger { text })).await;
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

/// The host that the peer's verified certificate names.
fn identity(connection: &Connection, vm: &str) -> Option<HostId> {
    let chain = connection
        .peer_identity()?
        .downcast::<Vec<CertificateDer<'static>>>()
        .ok()?;
    host_named(chain.first()?, vm)
}

/// One host being dialled.
struct Dialler {
    endpoint: Endpoint,
    client: ClientConfig,
    name: String,
    host: HostId,
    addresses: Vec<SocketAddr>,
    log: Log,
}

impl Dialler {
    /// Tries all addresses, again and again, until one answers as the right host.
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

    /// All addresses once, a little apart; the first that answers counts.
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
