//! Bulk transfers between daemons: one TCP connection per transfer. The sender of the data listens,
//! and the receiver connects.
//!
//! With TCP, the kernel transfers whole megabytes per call, while a QUIC session processes
//! datagrams of a few kilobytes. Where TCP is blocked, a stream of the session is used instead
//! ([`super::bulk_fallback`]).
//!
//! - There is no handshake. Both ends derive the keys of the connection from their session (RFC
//!   5705, RFC 8446 7.5). In the session, each end has proved which host of this virtual machine it
//!   is.
//! - Data is sent in records: length, content, tag of AES-256-GCM. The record number is the nonce,
//!   so a record that was altered, omitted, repeated or reordered is detected. The reader must know
//!   which record is the last.
//! - The first record of the connecting end is empty. The record proves that the connecting end has
//!   the keys.

use super::blocking_stream::BlockingStream;
use super::limits::STALL_TIMEOUT;
use super::zeros;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::MigrationId;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

/// Maximum length of a record's content. A record of this length fits into a processor core's own
/// cache while it is read, encrypted and written.
pub(super) const CONTENT_BYTES_MAX: usize = (256 << 10) + 64;
/// Length of the field before a record's content; the field contains the length of the content.
const RECORD_HEAD_BYTES: usize = 4;
/// Length of the authentication tag after a record's content.
const TAG_BYTES: usize = 16;
const SALT_BYTES: usize = 32;
const KEY_BYTES: usize = 32;
/// Time limit for the connecting end to connect and to prove that it has the keys, by TCP or by the
/// session.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the TCP handshake. If the limit is reached, TCP is considered blocked. The limit
/// permits one retransmission, because a lost segment is retransmitted after one second.
const TCP_CONNECT_TIMEOUT: Duration = Duration::from_millis(2500);
/// Maximum number of accepted connections that have not yet proved that they have the keys. One
/// more closes the oldest, so that connections that prove nothing delay no transfer.
/// The connecting end sends its proof as soon as it is connected.
const UNPROVEN_CONNECTIONS_MAX: usize = 32;

/// The port of the listener, and the salt that makes the keys of its connection unique.
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
    /// Returns the label with which keys are exported from TLS. The labels differ, because both
    /// transports may be tried for one transfer and no key may be used for both.
    fn label(self) -> &'static [u8] {
        match self {
            Self::Tcp => b"EXPORTER-sempa-images",
            Self::Session => b"EXPORTER-sempa-images-session",
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
    /// Derives keys that only the two ends of `session` can derive and that differ from the keys of
    /// all other connections.
    pub(super) fn derive(
        session: &quinn::Connection,
        migration: MigrationId,
        offer: &ConnectionOffer,
        transport: Transport,
    ) -> io::Result<Self> {
        let mut context = migration.0.to_le_bytes().to_vec();
        context.extend(offer.salt);
        let mut bytes = [0; 2 * KEY_BYTES];
        session
            .export_keying_material(&mut bytes, transport.label(), &context)
            .map_err(|_| io::Error::other("the session gave no keys"))?;
        Self::from_bytes(&bytes)
    }

    fn from_bytes(bytes: &[u8; 2 * KEY_BYTES]) -> io::Result<Self> {
        let (listener_bytes, connector_bytes) = bytes.split_at(KEY_BYTES);
        Ok(Self {
            listener_key: DirectionKey::new(listener_bytes)?,
            connector_key: DirectionKey::new(connector_bytes)?,
        })
    }

    /// Returns the listening end's keys: the key that encrypts, then the key that decrypts.
    pub(super) fn for_listener(self) -> (DirectionKey, DirectionKey) {
        (self.listener_key, self.connector_key)
    }

    /// Returns the connecting end's keys: the key that encrypts, then the key that decrypts.
    pub(super) fn for_connector(self) -> (DirectionKey, DirectionKey) {
        (self.connector_key, self.listener_key)
    }

    /// Returns keys that are derived from `byte` instead of a session.
    #[cfg(test)]
    pub(super) fn for_test(byte: u8) -> Self {
        Self::from_bytes(&[byte; 2 * KEY_BYTES]).expect("bytes of the right number")
    }
}

/// The key of one direction, and the number of records that have used it.
pub(super) struct DirectionKey {
    key: LessSafeKey,
    record_count: u64,
}

impl DirectionKey {
    fn new(bytes: &[u8]) -> io::Result<Self> {
        let key = UnboundKey::new(&AES_256_GCM, bytes)
            .map_err(|_| io::Error::other("a key of the wrong length"))?;
        Ok(Self {
            key: LessSafeKey::new(key),
            record_count: 0,
        })
    }

    /// Returns the number of the next record as a nonce and counts the record. No nonce is returned
    /// twice.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[NONCE_LEN - 8..].copy_from_slice(&self.record_count.to_be_bytes());
        self.record_count += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Completes a record in place: encrypts its content and writes its length field and its tag.
    fn seal(&mut self, record: &mut [u8]) -> io::Result<()> {
        let content = record.len() - RECORD_HEAD_BYTES - TAG_BYTES;
        let length_bytes = u32::try_from(content)
            .map_err(io::Error::other)?
            .to_le_bytes();
        let (length_field, content_and_tag) = record.split_at_mut(RECORD_HEAD_BYTES);
        length_field.copy_from_slice(&length_bytes);
        let (content, tag) = content_and_tag.split_at_mut(content);
        let nonce = self.nonce();
        let sealed_tag =
            self.key
                .seal_in_place_separate_tag(nonce, Aad::from(length_bytes), content);
        tag.copy_from_slice(
            sealed_tag
                .map_err(|_| io::Error::other("the cipher failed"))?
                .as_ref(),
        );
        Ok(())
    }

    /// Decrypts the content of a record in place and returns the content. `body` is the content and
    /// its tag.
    ///
    /// # Errors
    /// The tag does not match: the record was not made with this key and record number.
    fn open<'a>(
        &mut self,
        head: [u8; RECORD_HEAD_BYTES],
        body: &'a mut [u8],
    ) -> io::Result<&'a mut [u8]> {
        let nonce = self.nonce();
        self.key
            .open_in_place(nonce, Aad::from(head), body)
            .map_err(|_| invalid_data("a record was not made by the other end of this transfer"))
    }
}

fn invalid_data(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

/// Encrypts and writes records.
pub(super) struct RecordWriter<W> {
    stream: W,
    key: DirectionKey,
    buffer: Vec<u8>,
}

impl<W: Write> RecordWriter<W> {
    pub(super) fn new(to: W, key: DirectionKey) -> Self {
        Self {
            stream: to,
            key,
            buffer: vec![0; RECORD_HEAD_BYTES + CONTENT_BYTES_MAX + TAG_BYTES],
        }
    }

    /// Sends a record whose content of `length` bytes is written by `fill`.
    ///
    /// # Errors
    /// The outer result is the error of `fill`. The inner result is the error of sending.
    pub(super) fn send<E>(
        &mut self,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<io::Result<()>, E> {
        assert!(length <= CONTENT_BYTES_MAX, "senders split their data");
        let record = &mut self.buffer[..RECORD_HEAD_BYTES + length + TAG_BYTES];
        fill(&mut record[RECORD_HEAD_BYTES..RECORD_HEAD_BYTES + length])?;
        Ok(self
            .key
            .seal(record)
            .and_then(|()| self.stream.write_all(record)))
    }

    /// Sends a record that consists of `prefix` and of `length` bytes that `fill` writes;
    /// [`super::zeros`] packs these bytes. Calls `before_send` with the size of the packed record
    /// before sending the record. Returns the size.
    ///
    /// # Errors
    /// As [`RecordWriter::send`].
    pub(super) fn send_packed<E>(
        &mut self,
        prefix: &[u8],
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
        before_send: impl FnOnce(usize),
    ) -> Result<io::Result<usize>, E> {
        let packed_start = RECORD_HEAD_BYTES + prefix.len();
        let unpacked_end = packed_start + zeros::PART_HEAD_BYTES + length;
        assert!(
            unpacked_end - RECORD_HEAD_BYTES <= CONTENT_BYTES_MAX,
            "senders split their data"
        );
        self.buffer[RECORD_HEAD_BYTES..packed_start].copy_from_slice(prefix);
        fill(&mut self.buffer[packed_start + zeros::PART_HEAD_BYTES..unpacked_end])?;
        let packed_bytes = zeros::pack(&mut self.buffer[packed_start..unpacked_end]);
        let record = &mut self.buffer[..packed_start + packed_bytes + TAG_BYTES];
        before_send(record.len());
        Ok(self
            .key
            .seal(record)
            .and_then(|()| self.stream.write_all(record))
            .map(|()| record.len()))
    }

    /// Sends an empty record, which proves that this end has the keys.
    pub(super) fn send_proof(&mut self) -> io::Result<()> {
        let Ok(send_result) = self.send(0, |_| Ok::<(), Infallible>(()));
        send_result
    }
}

/// Reads and decrypts records.
pub(super) struct RecordReader<R> {
    stream: R,
    key: DirectionKey,
    buffer: Vec<u8>,
}

impl<R: Read> RecordReader<R> {
    pub(super) fn new(from: R, key: DirectionKey) -> Self {
        Self {
            stream: from,
            key,
            buffer: vec![0; CONTENT_BYTES_MAX + TAG_BYTES],
        }
    }

    /// Waits for the next record and returns its content.
    ///
    /// # Errors
    /// The stream has ended or failed, or the record was not made by the other end.
    pub(super) fn wait_for_record(&mut self) -> io::Result<&[u8]> {
        let mut head = [0; RECORD_HEAD_BYTES];
        self.stream.read_exact(&mut head)?;
        let length = usize::try_from(u32::from_le_bytes(head)).unwrap_or(usize::MAX);
        if length > CONTENT_BYTES_MAX {
            return Err(invalid_data(
                "a record of an impossible length was announced",
            ));
        }
        let body = &mut self.buffer[..length + TAG_BYTES];
        self.stream.read_exact(body)?;
        self.key.open(head, body).map(|content| &*content)
    }
}

/// A blocking connection for threads that read and write.
#[derive(Clone, Debug)]
pub(super) enum BulkConnection {
    Tcp(Arc<std::net::TcpStream>),
    Stream(Arc<BlockingStream>),
}

/// One end of a transfer's connection: the writer, the reader, and a handle that aborts both.
pub(super) type ConnectionEnd = (
    RecordWriter<BulkConnection>,
    RecordReader<BulkConnection>,
    BulkConnection,
);

/// Returns this host's end of a session stream. The first key encrypts, the second key decrypts.
pub(super) fn end_over_stream(
    send_stream: quinn::SendStream,
    receive_stream: quinn::RecvStream,
    (sealing_key, opening_key): (DirectionKey, DirectionKey),
) -> ConnectionEnd {
    let connection =
        BulkConnection::Stream(Arc::new(BlockingStream::new(send_stream, receive_stream)));
    (
        RecordWriter::new(connection.clone(), sealing_key),
        RecordReader::new(connection.clone(), opening_key),
        connection,
    )
}

impl BulkConnection {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(STALL_TIMEOUT))?;
        stream.set_write_timeout(Some(STALL_TIMEOUT))?;
        Ok(Self::Tcp(Arc::new(stream)))
    }

    /// Makes all current and future reads and writes fail.
    pub(super) fn abort(&self) {
        match self {
            // `shutdown` fails only if the connection has already ended.
            Self::Tcp(stream) => drop(stream.shutdown(std::net::Shutdown::Both)),
            Self::Stream(stream) => stream.abort(),
        }
    }
}

impl Read for BulkConnection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read_result = match self {
            Self::Tcp(stream) => (&**stream).read(buffer),
            Self::Stream(stream) => stream.read(buffer),
        };
        read_result.map_err(describe_timeout)
    }
}

impl Write for BulkConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let write_result = match self {
            Self::Tcp(stream) => (&**stream).write(bytes),
            Self::Stream(stream) => stream.write(bytes),
        };
        write_result.map_err(describe_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the kernel's error for an expired timeout ("try again") by an error that gives the
/// duration of the timeout.
fn describe_timeout(e: io::Error) -> io::Error {
    match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => io::Error::new(
            ErrorKind::TimedOut,
            format!("no progress for {} s", STALL_TIMEOUT.as_secs()),
        ),
        _ => e,
    }
}

/// Listens for the connecting end of one transfer.
pub(super) struct BulkListener {
    socket: TcpListener,
    offer: ConnectionOffer,
}

impl BulkListener {
    /// Listens on a free port, for IPv4 and IPv6 if this host has both, and creates the offer for
    /// the connecting end.
    pub(super) async fn open() -> io::Result<Self> {
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
        Ok(Self { socket, offer })
    }

    /// Returns the data that the other end needs to connect.
    pub(super) fn offer(&self) -> &ConnectionOffer {
        &self.offer
    }

    /// Waits for a connection that proves that it has the keys, and returns the listening end of
    /// this connection. Connections that fail to prove this are closed. At most
    /// [`UNPROVEN_CONNECTIONS_MAX`] connections are checked at once.
    pub(super) async fn accept(self, mut keys: ConnectionKeys) -> io::Result<ConnectionEnd> {
        let proven_stream = async {
            let mut unproven_connections = JoinSet::new();
            let mut checks: VecDeque<AbortHandle> = VecDeque::new();
            loop {
                tokio::select! {
                    accept_result = self.socket.accept() => {
                        checks.retain(|check| !check.is_finished());
                        if checks.len() >= UNPROVEN_CONNECTIONS_MAX
                            && let Some(oldest_check) = checks.pop_front()
                        {
                            oldest_check.abort();
                        }
                        checks.push_back(unproven_connections.spawn(timeout(CONNECT_TIMEOUT, read_first_record(accept_result?.0))));
                    }
                    Some(proof_result) = unproven_connections.join_next() => {
                        let Ok(Ok(Ok((stream, mut record)))) = proof_result else { continue };
                        // A failed proof must not advance the record counter. Using the nonce for
                        // several connections is safe, because the nonce is used only for
                        // decryption.
                        keys.connector_key.record_count = 0;
                        let (head, tag) = record.split_first_chunk_mut::<RECORD_HEAD_BYTES>().expect("it is longer");
                        if keys.connector_key.open(*head, tag).is_ok() {
                            return Ok::<_, io::Error>(stream);
                        }
                    }
                }
            }
        };
        let timeout_error = |_| {
            io::Error::new(
                ErrorKind::TimedOut,
                "it did not connect to the announced TCP port",
            )
        };
        let connection = BulkConnection::new(
            timeout(CONNECT_TIMEOUT, proven_stream)
                .await
                .map_err(timeout_error)??,
        )?;
        Ok((
            RecordWriter::new(connection.clone(), keys.listener_key),
            RecordReader::new(connection.clone(), keys.connector_key),
            connection,
        ))
    }
}

async fn read_first_record(
    mut stream: TcpStream,
) -> io::Result<(TcpStream, [u8; RECORD_HEAD_BYTES + TAG_BYTES])> {
    let mut record = [0; RECORD_HEAD_BYTES + TAG_BYTES];
    stream.read_exact(&mut record).await?;
    Ok((stream, record))
}

/// Why the sender of a transfer could not be reached.
#[derive(Debug)]
pub(super) struct ConnectError {
    pub(super) error: io::Error,
    /// True if TCP does not reach the sender at all; no data was exchanged in this case.
    pub(super) is_blocked: bool,
}

/// Connects to the sender of a transfer at the address `sender_ip`. Returns the connecting end of
/// the connection, after proving that this end has the keys.
pub(super) async fn connect(
    sender_ip: IpAddr,
    offer: &ConnectionOffer,
    keys: ConnectionKeys,
) -> Result<ConnectionEnd, ConnectError> {
    let blocked_error = |error| ConnectError {
        error,
        is_blocked: true,
    };
    let other_error = |error| ConnectError {
        error,
        is_blocked: false,
    };
    let stream_future = TcpStream::connect(SocketAddr::new(sender_ip.to_canonical(), offer.port));
    let timeout_error = |_| {
        blocked_error(io::Error::new(
            ErrorKind::TimedOut,
            "its TCP port does not answer",
        ))
    };
    let connection = BulkConnection::new(
        timeout(TCP_CONNECT_TIMEOUT, stream_future)
            .await
            .map_err(timeout_error)?
            .map_err(blocked_error)?,
    )
    .map_err(other_error)?;
    let (sealing_key, opening_key) = keys.for_connector();
    let mut writer = RecordWriter::new(connection.clone(), sealing_key);
    writer.send_proof().map_err(other_error)?;
    Ok((
        writer,
        RecordReader::new(connection.clone(), opening_key),
        connection,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    /// Connections without the keys are not accepted, and do not prevent the listener from
    /// accepting the connection with the keys.
    #[tokio::test(flavor = "multi_thread")]
    async fn unauthenticated_peers_neither_enter_nor_block() {
        let listener = BulkListener::open().await.expect("a port");
        let offer = listener.offer().clone();
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let accept_task = tokio::spawn(listener.accept(ConnectionKeys::for_test(1)));
        let mut unauthenticated_peers = Vec::new();
        for _ in 0..2 * UNPROVEN_CONNECTIONS_MAX {
            let silent_peer = TcpStream::connect((ip, offer.port));
            unauthenticated_peers.push(silent_peer.await.expect("somebody listens"));
        }
        for bytes in [
            &b""[..],
            b"what is here?",
            &[0; RECORD_HEAD_BYTES + TAG_BYTES],
            &[255; 1000],
        ] {
            let mut unauthenticated_peer = TcpStream::connect((ip, offer.port))
                .await
                .expect("somebody listens");
            unauthenticated_peer
                .write_all(bytes)
                .await
                .expect("there is room");
            unauthenticated_peers.push(unauthenticated_peer);
        }
        // The first connection has the keys of another transfer, the second connection has the
        // expected keys.
        let wrong_key_end = connect(ip, &offer, ConnectionKeys::for_test(2))
            .await
            .expect("somebody listens");
        let (_, mut reader, connection) = connect(ip, &offer, ConnectionKeys::for_test(1))
            .await
            .expect("somebody listens");
        let (mut writer, _, _) = accept_task
            .await
            .expect("no panic")
            .expect("it has the keys");
        let send_result = writer.send(5, |buffer| {
            buffer.copy_from_slice(b"words");
            Ok::<(), Infallible>(())
        });
        let Ok(send_result) = send_result;
        send_result.expect("it listens");
        let read_task = tokio::task::spawn_blocking(move || {
            reader.wait_for_record().expect("a record").to_vec()
        });
        assert_eq!(read_task.await.expect("no panic"), b"words");
        drop((wrong_key_end, connection));
    }

    /// When a connection is aborted, blocked reads and writes return.
    #[tokio::test(flavor = "multi_thread")]
    async fn abort_ends_blocked_reads_and_writes() {
        let listener = BulkListener::open().await.expect("a port");
        let offer = listener.offer().clone();
        let accept_task = tokio::spawn(listener.accept(ConnectionKeys::for_test(1)));
        let ip = IpAddr::from(Ipv4Addr::LOCALHOST);
        let (mut writer, mut reader, connection) = connect(ip, &offer, ConnectionKeys::for_test(1))
            .await
            .expect("somebody listens");
        let (_idle_writer, _idle_reader, _) = accept_task
            .await
            .expect("no panic")
            .expect("it has the keys");
        let read_task = tokio::task::spawn_blocking(move || {
            reader
                .wait_for_record()
                .map(<[u8]>::len)
                .map_err(|e| e.kind())
        });
        let write_task = tokio::task::spawn_blocking(move || {
            loop {
                let Ok(send_result) = writer.send(CONTENT_BYTES_MAX, |_| Ok::<(), Infallible>(()));
                if send_result.is_err() {
                    return;
                }
            }
        });
        connection.abort();
        let task_results = async {
            (
                read_task.await.expect("no panic"),
                write_task.await.expect("no panic"),
            )
        };
        let (read_result, ()) = timeout(Duration::from_secs(30), task_results)
            .await
            .expect("both have ended");
        assert!(read_result.is_err());
    }
}
