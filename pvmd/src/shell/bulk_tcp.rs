//! Bulk transfers between daemons: one TCP connection per transfer, to a listener of the sender.
//!
//! The kernel transfers whole megabytes per call here, while a QUIC session processes datagrams of
//! a few kilobytes. Where TCP is blocked, a stream of the session is used instead
//! ([`super::bulk_fallback`]).
//!
//! - There is no handshake. Both ends derive keys for this connection from their session (RFC 5705,
//!   RFC 8446 7.5), in which each has proved which host of this virtual machine it is.
//! - Data travels in records: length, content, tag of AES-256-GCM. The record number is the nonce,
//!   so no record can be altered, omitted, repeated or reordered. The reader must know which record
//!   is the last.
//! - The first record of the connecting end is empty and proves that this end has the keys.

use super::blocking_stream::BlockingStream;
use super::limits::STALL_TIMEOUT;
use super::zeros;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::MigrationId;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Largest content of a record: it fits into a processor's own cache while it is read, encrypted
/// and written.
pub(super) const CONTENT_BYTES_MAX: usize = (256 << 10) + 64;
/// Length field before a record's content.
const HEAD_BYTES: usize = 4;
/// Authentication tag after a record's content.
const TAG_BYTES: usize = 16;
const SALT_BYTES: usize = 32;
const KEY_BYTES: usize = 32;
/// Time limit for the other end to connect, by TCP or by the session, and to prove that it has the
/// keys.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the peer's kernel to answer before TCP is considered blocked. A lost segment is
/// retransmitted after one second.
const TCP_CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);
/// Maximum number of connections without a proof; further connections wait.
const UNPROVEN_CONNECTIONS_MAX: usize = 8;

/// The port of a sender's listener, and the salt that makes the keys of this connection unique.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ConnectionOffer {
    port: u16,
    salt: [u8; SALT_BYTES],
}

/// The connection that carries a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    /// A TCP connection for this transfer alone.
    Tcp,
    Session,
}

impl Transport {
    /// Returns the label for exporting keys from TLS. Both transports may be tried, and no key is
    /// used for both.
    fn label(self) -> &'static [u8] {
        match self {
            Transport::Tcp => b"EXPORTER-sempa-images",
            Transport::Session => b"EXPORTER-sempa-images-session",
        }
    }
}

/// The keys of one connection.
pub(super) struct ConnectionKeys {
    /// Encrypts the data that the listening end sends.
    pub(super) listener_key: DirectionKey,
    /// Encrypts the data that the connecting end sends.
    connector_key: DirectionKey,
}

impl ConnectionKeys {
    /// Derives keys that only the ends of this session can know and that no other connection has.
    pub(super) fn derive(
        session: &quinn::Connection,
        migration: MigrationId,
        offer: &ConnectionOffer,
        route: Transport,
    ) -> io::Result<ConnectionKeys> {
        let mut context = migration.0.to_le_bytes().to_vec();
        context.extend(offer.salt);
        let mut bytes = [0; 2 * KEY_BYTES];
        session
            .export_keying_material(&mut bytes, route.label(), &context)
            .map_err(|_| io::Error::other("the session gave no keys"))?;
        ConnectionKeys::from_bytes(&bytes)
    }

    fn from_bytes(bytes: &[u8; 2 * KEY_BYTES]) -> io::Result<ConnectionKeys> {
        let (out, back) = bytes.split_at(KEY_BYTES);
        Ok(ConnectionKeys {
            listener_key: DirectionKey::new(out)?,
            connector_key: DirectionKey::new(back)?,
        })
    }

    /// Returns the keys with which the listening end encrypts and decrypts.
    pub(super) fn for_listener(self) -> (DirectionKey, DirectionKey) {
        (self.listener_key, self.connector_key)
    }

    /// Returns the keys with which the connecting end encrypts and decrypts.
    pub(super) fn for_connector(self) -> (DirectionKey, DirectionKey) {
        (self.connector_key, self.listener_key)
    }

    /// Returns keys without a session.
    #[cfg(test)]
    pub(super) fn for_test(byte: u8) -> ConnectionKeys {
        ConnectionKeys::from_bytes(&[byte; 2 * KEY_BYTES]).expect("bytes of the right number")
    }
}

/// The key of one direction, and the number of records that have used it.
pub(super) struct DirectionKey {
    key: LessSafeKey,
    record_count: u64,
}

impl DirectionKey {
    fn new(bytes: &[u8]) -> io::Result<DirectionKey> {
        let key = UnboundKey::new(&AES_256_GCM, bytes)
            .map_err(|_| io::Error::other("a key of the wrong length"))?;
        Ok(DirectionKey {
            key: LessSafeKey::new(key),
            record_count: 0,
        })
    }

    /// Returns the number of the record as nonce; never the same twice.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[NONCE_LEN - 8..].copy_from_slice(&self.record_count.to_be_bytes());
        self.record_count += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Completes a record: encrypts its content in place and fills in head and tag.
    fn seal(&mut self, record: &mut [u8]) -> io::Result<()> {
        let content = record.len() - HEAD_BYTES - TAG_BYTES;
        let head = u32::try_from(content)
            .map_err(io::Error::other)?
            .to_le_bytes();
        let (front, back) = record.split_at_mut(HEAD_BYTES);
        front.copy_from_slice(&head);
        let (content, tag) = back.split_at_mut(content);
        let nonce = self.nonce();
        let made = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(head), content);
        tag.copy_from_slice(
            made.map_err(|_| io::Error::other("the cipher failed"))?
                .as_ref(),
        );
        Ok(())
    }

    /// Decrypts the content of a record in place.
    fn open<'a>(&mut self, head: [u8; HEAD_BYTES], body: &'a mut [u8]) -> io::Result<&'a mut [u8]> {
        let nonce = self.nonce();
        self.key
            .open_in_place(nonce, Aad::from(head), body)
            .map_err(|_| invalid("a record was not made by the other end of this transfer"))
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// Encrypts and writes records.
pub(super) struct RecordWriter<W> {
    to: W,
    key: DirectionKey,
    buffer: Vec<u8>,
}

impl<W: Write> RecordWriter<W> {
    pub(super) fn new(to: W, key: DirectionKey) -> RecordWriter<W> {
        RecordWriter {
            to,
            key,
            buffer: vec![0; HEAD_BYTES + CONTENT_BYTES_MAX + TAG_BYTES],
        }
    }

    /// Sends a record of `length` bytes that `fill` writes.
    ///
    /// # Errors
    /// The outer result is the error of `fill`; the inner one states why the record could not be
    /// sent.
    pub(super) fn send<E>(
        &mut self,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<io::Result<()>, E> {
        assert!(
            length <= CONTENT_BYTES_MAX,
            "whoever sends cuts what it sends"
        );
        let record = &mut self.buffer[..HEAD_BYTES + length + TAG_BYTES];
        fill(&mut record[HEAD_BYTES..HEAD_BYTES + length])?;
        Ok(self
            .key
            .seal(record)
            .and_then(|()| self.to.write_all(record)))
    }

    /// Sends a record of `front` followed by `length` bytes that `fill` writes, packed by
    /// [`super::zeros`]. Calls `before_send` with the size of the record before it is sent, and
    /// returns that size.
    ///
    /// # Errors
    /// As [`RecordWriter::send`].
    pub(super) fn send_packed<E>(
        &mut self,
        front: &[u8],
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
        before_send: impl FnOnce(usize),
    ) -> Result<io::Result<usize>, E> {
        let begin = HEAD_BYTES + front.len();
        let end = begin + zeros::HEAD_BYTES + length;
        assert!(
            end - HEAD_BYTES <= CONTENT_BYTES_MAX,
            "whoever sends cuts what it sends"
        );
        self.buffer[HEAD_BYTES..begin].copy_from_slice(front);
        fill(&mut self.buffer[begin + zeros::HEAD_BYTES..end])?;
        let packed = zeros::pack(&mut self.buffer[begin..end]);
        let record = &mut self.buffer[..begin + packed + TAG_BYTES];
        before_send(record.len());
        Ok(self
            .key
            .seal(record)
            .and_then(|()| self.to.write_all(record))
            .map(|()| record.len()))
    }

    /// Sends an empty record, which proves that this end has the keys.
    pub(super) fn send_proof(&mut self) -> io::Result<()> {
        let Ok(sent) = self.send(0, |_| Ok::<(), Infallible>(()));
        sent
    }
}

/// Reads and decrypts records.
pub(super) struct RecordReader<R> {
    from: R,
    key: DirectionKey,
    buffer: Vec<u8>,
}

impl<R: Read> RecordReader<R> {
    pub(super) fn new(from: R, key: DirectionKey) -> RecordReader<R> {
        RecordReader {
            from,
            key,
            buffer: vec![0; CONTENT_BYTES_MAX + TAG_BYTES],
        }
    }

    /// Returns the content of the next record.
    ///
    /// # Errors
    /// The stream has ended or failed, or the record was not made by the other end.
    pub(super) fn next(&mut self) -> io::Result<&[u8]> {
        let mut head = [0; HEAD_BYTES];
        self.from.read_exact(&mut head)?;
        let length = usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX);
        if length > CONTENT_BYTES_MAX {
            return Err(invalid("a record of an impossible length was announced"));
        }
        let body = &mut self.buffer[..length + TAG_BYTES];
        self.from.read_exact(body)?;
        self.key.open(head, body).map(|content| &*content)
    }
}

/// A blocking connection for threads that read and write.
#[derive(Clone, Debug)]
pub(super) enum BulkConnection {
    Tcp(Arc<std::net::TcpStream>),
    Stream(Arc<BlockingStream>),
}

/// One end of a transfer's connection: its writer, its reader, and a handle that aborts both.
pub(super) type ConnectionEnd = (
    RecordWriter<BulkConnection>,
    RecordReader<BulkConnection>,
    BulkConnection,
);

/// Returns one end of a session stream. The first key encrypts, the second decrypts.
pub(super) fn end_over_stream(
    out: quinn::SendStream,
    back: quinn::RecvStream,
    (sealing_key, opening_key): (DirectionKey, DirectionKey),
) -> ConnectionEnd {
    let connection = BulkConnection::Stream(Arc::new(BlockingStream::new(out, back)));
    (
        RecordWriter::new(connection.clone(), sealing_key),
        RecordReader::new(connection.clone(), opening_key),
        connection,
    )
}

impl BulkConnection {
    fn new(stream: TcpStream) -> io::Result<BulkConnection> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(STALL_TIMEOUT))?;
        stream.set_write_timeout(Some(STALL_TIMEOUT))?;
        Ok(BulkConnection::Tcp(Arc::new(stream)))
    }

    /// Makes all current and future reads and writes fail.
    pub(super) fn abort(&self) {
        match self {
            // A failure means that the connection has already ended.
            BulkConnection::Tcp(stream) => drop(stream.shutdown(std::net::Shutdown::Both)),
            BulkConnection::Stream(stream) => stream.abort(),
        }
    }
}

impl Read for BulkConnection {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let read = match self {
            BulkConnection::Tcp(stream) => (&**stream).read(room),
            BulkConnection::Stream(stream) => stream.read(room),
        };
        read.map_err(describe_timeout)
    }
}

impl Write for BulkConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match self {
            BulkConnection::Tcp(stream) => (&**stream).write(bytes),
            BulkConnection::Stream(stream) => stream.write(bytes),
        };
        written.map_err(describe_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the kernel's error for an expired timeout ("try again") by a readable one.
fn describe_timeout(e: io::Error) -> io::Error {
    match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => io::Error::new(
            ErrorKind::TimedOut,
            format!("nothing went on for {} s", STALL_TIMEOUT.as_secs()),
        ),
        _ => e,
    }
}

/// Listens for the other end of one transfer.
pub(super) struct BulkListener {
    socket: TcpListener,
    offer: ConnectionOffer,
}

impl BulkListener {
    /// Listens on a free port, for IPv4 and IPv6 if this host has both.
    pub(super) async fn open() -> io::Result<BulkListener> {
        let socket = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).await {
            Ok(socket) => socket,
            Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await?,
        };
        let mut salt = [0; SALT_BYTES];
        SystemRandom::new()
            .fill(&mut salt)
            .map_err(|_| io::Error::other("the kernel gave no random bytes"))?;
        let offer = ConnectionOffer {
            port: socket.local_addr()?.port(),
            salt,
        };
        Ok(BulkListener { socket, offer })
    }

    /// Returns the data that the other end needs to connect.
    pub(super) fn offer(&self) -> &ConnectionOffer {
        &self.offer
    }

    /// Accepts the connection that proves it has the keys. Other connections are closed; further
    /// ones wait.
    pub(super) async fn accept(self, mut keys: ConnectionKeys) -> io::Result<ConnectionEnd> {
        let accepted = async {
            let mut unproven = JoinSet::new();
            loop {
                tokio::select! {
                    connected = self.socket.accept(), if unproven.len() < UNPROVEN_CONNECTIONS_MAX => {
                        unproven.spawn(timeout(CONNECT_TIMEOUT, read_first_record(connected?.0)));
                    }
                    Some(ended) = unproven.join_next() => {
                        let Ok(Ok(Ok((stream, mut record)))) = ended else { continue };
                        // A failed proof must not advance the record counter. The nonce is reused
                        // only for decryption.
                        keys.connector_key.record_count = 0;
                        let (head, tag) = record.split_first_chunk_mut::<HEAD_BYTES>().expect("it is longer");
                        if keys.connector_key.open(*head, tag).is_ok() {
                            return Ok::<_, io::Error>(stream);
                        }
                    }
                }
            }
        };
        let late = |_| {
            io::Error::new(
                ErrorKind::TimedOut,
                "it did not connect to the TCP port that it was told",
            )
        };
        let connection =
            BulkConnection::new(timeout(CONNECT_TIMEOUT, accepted).await.map_err(late)??)?;
        Ok((
            RecordWriter::new(connection.clone(), keys.listener_key),
            RecordReader::new(connection.clone(), keys.connector_key),
            connection,
        ))
    }
}

async fn read_first_record(
    mut stream: TcpStream,
) -> io::Result<(TcpStream, [u8; HEAD_BYTES + TAG_BYTES])> {
    let mut record = [0; HEAD_BYTES + TAG_BYTES];
    stream.read_exact(&mut record).await?;
    Ok((stream, record))
}

/// Reason why the sender of a transfer could not be reached.
#[derive(Debug)]
pub(super) struct ConnectError {
    pub(super) why: io::Error,
    /// True if TCP does not reach the sender at all, so that no data was exchanged.
    pub(super) is_blocked: bool,
}

/// Connects to the sender of a transfer.
pub(super) async fn connect(
    to: IpAddr,
    offer: &ConnectionOffer,
    keys: ConnectionKeys,
) -> Result<ConnectionEnd, ConnectError> {
    let blocked = |why| ConnectError {
        why,
        is_blocked: true,
    };
    let failed = |why| ConnectError {
        why,
        is_blocked: false,
    };
    let connecting = TcpStream::connect(SocketAddr::new(to.to_canonical(), offer.port));
    let late = |_| {
        blocked(io::Error::new(
            ErrorKind::TimedOut,
            "no answer from its TCP port",
        ))
    };
    let connection = BulkConnection::new(
        timeout(TCP_CONNECT_TIMEOUT, connecting)
            .await
            .map_err(late)?
            .map_err(blocked)?,
    )
    .map_err(failed)?;
    let (seals, opens) = keys.for_connector();
    let mut out = RecordWriter::new(connection.clone(), seals);
    out.send_proof().map_err(failed)?;
    Ok((
        out,
        RecordReader::new(connection.clone(), opens),
        connection,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    /// Connections without the keys are not accepted, and do not prevent the right connection from
    /// being accepted.
    #[tokio::test(flavor = "multi_thread")]
    async fn unauthenticated_peers_neither_enter_nor_block() {
        let listener = BulkListener::open().await.expect("a port");
        let offer = listener.offer().clone();
        let to = IpAddr::from(Ipv4Addr::LOCALHOST);
        let accepting = tokio::spawn(listener.accept(ConnectionKeys::for_test(1)));
        let mut strangers = Vec::new();
        for said in [
            &b""[..],
            b"what is here?",
            &[0; HEAD_BYTES + TAG_BYTES],
            &[255; 1000],
        ] {
            let mut stranger = TcpStream::connect((to, offer.port))
                .await
                .expect("somebody listens");
            stranger.write_all(said).await.expect("there is room");
            strangers.push(stranger);
        }
        // First with the keys of another transfer, then with the right ones.
        let other = connect(to, &offer, ConnectionKeys::for_test(2))
            .await
            .expect("somebody listens");
        let (_, mut incoming, line) = connect(to, &offer, ConnectionKeys::for_test(1))
            .await
            .expect("somebody listens");
        let (mut out, _, _) = accepting.await.expect("no panic").expect("it has the keys");
        let sent = out.send(5, |room| {
            room.copy_from_slice(b"words");
            Ok::<(), Infallible>(())
        });
        let Ok(sent) = sent;
        sent.expect("it listens");
        let heard =
            tokio::task::spawn_blocking(move || incoming.next().expect("a record").to_vec());
        assert_eq!(heard.await.expect("no panic"), b"words");
        drop((other, line));
    }

    /// Threads blocked in a read or write end when the connection is aborted.
    #[tokio::test(flavor = "multi_thread")]
    async fn cut_ends_blocked_reads_and_writes() {
        let listener = BulkListener::open().await.expect("a port");
        let offer = listener.offer().clone();
        let accepting = tokio::spawn(listener.accept(ConnectionKeys::for_test(1)));
        let to = IpAddr::from(Ipv4Addr::LOCALHOST);
        let (mut full, mut incoming, line) = connect(to, &offer, ConnectionKeys::for_test(1))
            .await
            .expect("somebody listens");
        let (_silent, _deaf, _) = accepting.await.expect("no panic").expect("it has the keys");
        let reads = tokio::task::spawn_blocking(move || {
            incoming.next().map(<[u8]>::len).map_err(|e| e.kind())
        });
        let writes = tokio::task::spawn_blocking(move || {
            loop {
                let Ok(sent) = full.send(CONTENT_BYTES_MAX, |_| Ok::<(), Infallible>(()));
                if sent.is_err() {
                    return;
                }
            }
        });
        line.abort();
        let ended = async {
            (
                reads.await.expect("no panic"),
                writes.await.expect("no panic"),
            )
        };
        let (read, ()) = timeout(Duration::from_secs(30), ended)
            .await
            .expect("both have ended");
        assert!(read.is_err());
    }
}
