//! Begins QUIC handshakes with a daemon and never ends one: `flood-handshakes HOST:PORT RATE
//! SECONDS`.
//!
//! The program sends `RATE` first datagrams per second, from [`SOCKET_COUNT`] ports. It answers a
//! request to validate its address (RFC 9000 8.1.2), and ignores everything else, so the daemon
//! waits for the rest of each handshake. At the end it prints how many handshakes it has begun and
//! how many addresses it has validated.

#![allow(clippy::print_stdout)] // It is a program, and this is what it says.

use bytes::BytesMut;
use quinn_proto::crypto::rustls::QuicClientConfig;
use quinn_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, Endpoint, EndpointConfig,
    EndpointEvent,
};
use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of ports from which datagrams are sent.
const SOCKET_COUNT: usize = 64;
/// Maximum number of handshakes that are begun before old ones are forgotten. On a machine that is
/// slower than the rate, the program would otherwise begin handshakes for ever.
const BURST_MAX: u32 = 64;
/// Time for which an address can be validated.
const VALIDATION_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause of the loop when nothing is due.
const IDLE_INTERVAL: Duration = Duration::from_millis(1);
/// The first two bits of a long header and the packet type Retry (RFC 9000 17.2.5).
const RETRY_MASK: u8 = 0b1111_0000;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, rate, seconds] = &arguments[..] else {
        return Err("usage: flood-handshakes HOST:PORT RATE SECONDS".into());
    };
    let address = address
        .to_socket_addrs()?
        .find(SocketAddr::is_ipv4)
        .ok_or("the host has no IPv4 address")?;
    let mut flood = Flood::new(address)?;
    flood.run(rate.parse()?, Duration::from_secs(seconds.parse()?))?;
    println!(
        "{} handshakes begun, {} addresses validated",
        flood.begun_count, flood.validated_count
    );
    Ok(())
}

/// A handshake whose address can still be validated.
struct OpenHandshake {
    connection: Connection,
    socket_index: usize,
}

struct Flood {
    address: SocketAddr,
    sockets: Vec<UdpSocket>,
    endpoint: Endpoint,
    client_config: ClientConfig,
    open_handshakes: HashMap<ConnectionHandle, OpenHandshake>,
    /// The open handshakes in the order of their start.
    start_times: VecDeque<(Instant, ConnectionHandle)>,
    begun_count: u64,
    validated_count: u64,
}

impl Flood {
    fn new(address: SocketAddr) -> Result<Self, Box<dyn Error>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"sempa/1".to_vec()];
        let client_config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
        let endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, false, None);
        let open_socket = |_| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let sockets: std::io::Result<Vec<UdpSocket>> = (0..SOCKET_COUNT).map(open_socket).collect();
        Ok(Self {
            address,
            sockets: sockets?,
            endpoint,
            client_config,
            open_handshakes: HashMap::new(),
            start_times: VecDeque::new(),
            begun_count: 0,
            validated_count: 0,
        })
    }

    fn run(&mut self, rate: f64, duration: Duration) -> Result<(), Box<dyn Error>> {
        let started_at = Instant::now();
        while started_at.elapsed() < duration {
            for _ in 0..BURST_MAX {
                if self.begun_count as f64 >= started_at.elapsed().as_secs_f64() * rate {
                    break;
                }
                self.begin_handshake()?;
            }
            self.answer_requests();
            self.forget_old_handshakes();
            std::thread::sleep(IDLE_INTERVAL);
        }
        Ok(())
    }

    fn begin_handshake(&mut self) -> Result<(), Box<dyn Error>> {
        let now = Instant::now();
        let (handle, connection) = self.endpoint.connect(
            now,
            self.client_config.clone(),
            self.address,
            "h1.vpvmv.sempa",
        )?;
        let socket_index = self.begun_count as usize % SOCKET_COUNT;
        let handshake = self
            .open_handshakes
            .entry(handle)
            .insert_entry(OpenHandshake {
                connection,
                socket_index,
            });
        send_datagrams(handshake.into_mut(), &self.sockets, self.address);
        self.start_times.push_back((now, handle));
        self.begun_count += 1;
        Ok(())
    }

    /// Validates the addresses for which the daemon has asked that.
    fn answer_requests(&mut self) {
        let mut buffer = [0; 2048];
        for socket in &self.sockets {
            while let Ok((bytes, from)) = socket.recv_from(&mut buffer) {
                let datagram = &buffer[..bytes];
                if datagram
                    .first()
                    .is_none_or(|first| first & RETRY_MASK != RETRY_MASK)
                {
                    continue;
                }
                let (now, mut reply) = (Instant::now(), Vec::new());
                let event = self.endpoint.handle(
                    now,
                    from,
                    None,
                    None,
                    BytesMut::from(datagram),
                    &mut reply,
                );
                let Some(DatagramEvent::ConnectionEvent(handle, event)) = event else {
                    continue;
                };
                if let Some(handshake) = self.open_handshakes.get_mut(&handle) {
                    handshake.connection.handle_event(event);
                    send_datagrams(handshake, &self.sockets, self.address);
                    self.validated_count += 1;
                }
            }
        }
    }

    fn forget_old_handshakes(&mut self) {
        while let Some((started_at, handle)) = self.start_times.front().copied()
            && started_at.elapsed() >= VALIDATION_TIMEOUT
        {
            self.start_times.pop_front();
            self.open_handshakes.remove(&handle);
            self.endpoint.handle_event(handle, EndpointEvent::drained());
        }
    }
}

/// Sends the datagrams that the handshake sends now.
fn send_datagrams(handshake: &mut OpenHandshake, sockets: &[UdpSocket], address: SocketAddr) {
    let mut datagram = Vec::new();
    while handshake
        .connection
        .poll_transmit(Instant::now(), 1, &mut datagram)
        .is_some()
    {
        // A full send buffer only slows down the flood.
        let _ = sockets[handshake.socket_index].send_to(&datagram, address);
        datagram.clear();
    }
}
