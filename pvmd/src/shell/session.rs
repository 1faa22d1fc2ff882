//! One session with another daemon: a QUIC connection with a control stream and a data stream in
//! each direction, pair streams for busy pairs of tasks, and one more stream for every transfer.
//!
//! Of two daemons, the one with the higher index decides which connection is the session: it sends
//! its hello first. The other daemon sends no data on a connection before it has received this
//! hello, so both daemons always use the same connection.

use super::input::{Input, InputSender};
use super::outbox::{ChunkEncoder, LINK_BYTES_MAX, OutboxReader, outbox};
use super::session_input::{
    BulkContent, DataItem, NetInput, SessionContext, SessionQueues, TransferAnnouncement,
};
use bytes::Bytes;
use pvmd_machine::pair_streams::{LaneEntry, LaneId, MainEntry};
use quinn::{Connection, RecvStream, SendStream, VarInt};
use sempa_proto::frame::{Frame, FrameDecoder, FrameError, FrameKind, encode_control};
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::{HostId, MigrationId, WIRE_VERSION};
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;
use std::time::Duration;
use thiserror::Error;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

/// Time limit from the handshake to the peer's hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of chunks read from a stream at once; each chunk is the content of one datagram.
const READ_CHUNKS_MAX: usize = 32;
/// Maximum number of frames passed to a stream at once.
const WRITE_FRAMES_MAX: usize = 64;
/// Time limit for the peer to receive the last data of this daemon.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of checks per lease.
const LEASE_CHECKS: u32 = 20;

/// First bytes of every stream.
const STREAM_MAGIC: [u8; 4] = *b"SMPH";

/// Close code of a redundant connection.
pub(crate) const CLOSE_DUPLICATE: VarInt = VarInt::from_u32(1);
/// Close code for a host that is not, or no longer, in this virtual machine.
pub(crate) const CLOSE_EXPELLED: VarInt = VarInt::from_u32(2);
/// Close code after a protocol error.
const CLOSE_PROTOCOL_ERROR: VarInt = VarInt::from_u32(3);
/// Close code of an orderly end.
pub(crate) const CLOSE_LEAVING: VarInt = VarInt::from_u32(4);
/// Close code if the peer was silent for too long.
pub(crate) const CLOSE_SILENT: VarInt = VarInt::from_u32(5);

/// The purpose of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StreamPurpose {
    /// Control messages between daemons ([`HostMsg`]).
    Control,
    /// The main stream of the data channel: control items and link frames, as [`MainEntry`].
    Data,
    /// Link frames of one pair of tasks, as [`LaneEntry`].
    PairStream(LaneId),
    /// Announces an image transfer; open as long as the transfer lasts.
    Images(MigrationId),
    /// Announces a post-copy memory transfer.
    Memory(MigrationId),
    /// Bidirectional: carries an announced transfer because TCP is blocked.
    BulkFallback(MigrationId, BulkContent),
}

/// The first frame of every stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StreamHello {
    magic: [u8; 4],
    version: u16,
    vm: String,
    from: HostId,
    to: HostId,
    purpose: StreamPurpose,
}

/// Why a stream of a session cannot be used. The session ends; what was not acknowledged is sent
/// again in the next session.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    /// No stream was opened.
    #[error(transparent)]
    OpenStream(quinn::ConnectionError),
    /// The connection has ended while data of the peer was awaited.
    #[error("{}", describe(.0))]
    ConnectionLost(#[source] quinn::ConnectionError),
    /// The frame cannot be encoded, so nothing was sent.
    #[error(transparent)]
    Encode(FrameError),
    /// The peer has received at most a part of the frame.
    #[error(transparent)]
    Write(quinn::WriteError),
    /// The bytes of the peer are no frame, or a frame with an unknown content.
    #[error(transparent)]
    Decode(FrameError),
    #[error(transparent)]
    Read(quinn::ReadError),
    #[error("its first stream is for {0:?}")]
    WrongFirstStream(StreamPurpose),
    #[error("a stream ended before its hello")]
    EndedBeforeHello,
    #[error("it uses protocol version {0}, this daemon {own}", own = WIRE_VERSION)]
    WrongVersion(u16),
    /// The peer takes this daemon for another one.
    #[error("it addressed {host} of {vm}, but this is {own_host} of {own_vm}")]
    WrongIdentity {
        own_host: HostId,
        own_vm: String,
        host: HostId,
        vm: String,
    },
    #[error("a stream ended in the middle of a frame")]
    EndedInFrame,
    #[error("it sent an invalid item on a pair stream")]
    WrongLaneItem,
    /// The reading task has failed; items that it had read were forwarded.
    #[error(transparent)]
    ReaderFailed(JoinError),
    /// The item that was read is not forwarded.
    #[error("this daemon ends")]
    DaemonEnds,
}

/// Serves a connection as a session, from the hellos to its end, and reports the end.
pub(crate) async fn run(context: SessionContext, connection: Connection, inputs: InputSender) {
    let why = match timeout(HELLO_TIMEOUT, context.open(&connection)).await {
        Ok(Ok(streams)) => context.serve(&connection, streams, &inputs).await,
        Ok(Err(why)) => why.to_string(),
        Err(_) => "no hello arrived in time".to_string(),
    };
    connection.close(CLOSE_PROTOCOL_ERROR, b"");
    let down = NetInput::SessionDown {
        host: context.host,
        number: context.number,
        why,
    };
    let _ = inputs.send(Input::Net(down)).await;
}

/// The streams of a session that exist after the hellos.
struct SessionStreams {
    control_out: SendStream,
    data_out: SendStream,
    control_in: (RecvStream, FrameDecoder),
}

impl SessionContext {
    /// Exchanges hellos: the host with the higher index sends first.
    async fn open(&self, connection: &Connection) -> Result<SessionStreams, SessionError> {
        if self.own_host > self.host {
            let (control_out, data_out) = self.send_hello(connection).await?;
            let control_in = self.receive_hello(connection).await?;
            Ok(SessionStreams {
                control_out,
                data_out,
                control_in,
            })
        } else {
            let control_in = self.receive_hello(connection).await?;
            let (control_out, data_out) = self.send_hello(connection).await?;
            Ok(SessionStreams {
                control_out,
                data_out,
                control_in,
            })
        }
    }

    async fn send_hello(
        &self,
        connection: &Connection,
    ) -> Result<(SendStream, SendStream), SessionError> {
        let control = self
            .open_stream(connection, StreamPurpose::Control, 2)
            .await?;
        let data = self.open_stream(connection, StreamPurpose::Data, 1).await?;
        Ok((control, data))
    }

    /// Opens a stream and sends its purpose. Streams of higher priority are sent first.
    async fn open_stream(
        &self,
        connection: &Connection,
        purpose: StreamPurpose,
        priority: i32,
    ) -> Result<SendStream, SessionError> {
        let mut stream = connection
            .open_uni()
            .await
            .map_err(SessionError::OpenStream)?;
        let _ = stream.set_priority(priority);
        self.send_purpose(&mut stream, purpose).await?;
        Ok(stream)
    }

    async fn send_purpose(
        &self,
        stream: &mut SendStream,
        purpose: StreamPurpose,
    ) -> Result<(), SessionError> {
        let hello = StreamHello {
            magic: STREAM_MAGIC,
            version: WIRE_VERSION,
            vm: self.vm.clone(),
            from: self.own_host,
            to: self.host,
            purpose,
        };
        let frame = encode_control(&hello).map_err(SessionError::Encode)?;
        stream.write_chunk(frame).await.map_err(SessionError::Write)
    }

    async fn receive_hello(
        &self,
        connection: &Connection,
    ) -> Result<(RecvStream, FrameDecoder), SessionError> {
        let mut stream = connection
            .accept_uni()
            .await
            .map_err(SessionError::ConnectionLost)?;
        let mut decoder = FrameDecoder::new();
        match self.read_purpose(&mut stream, &mut decoder).await? {
            StreamPurpose::Control => Ok((stream, decoder)),
            other => Err(SessionError::WrongFirstStream(other)),
        }
    }

    /// Reads the first frame of a stream and checks that it is meant for this session.
    async fn read_purpose(
        &self,
        stream: &mut RecvStream,
        decoder: &mut FrameDecoder,
    ) -> Result<StreamPurpose, SessionError> {
        let frame = read_frame(stream, decoder)
            .await?
            .ok_or(SessionError::EndedBeforeHello)?;
        let hello: StreamHello = frame.decode_control().map_err(SessionError::Decode)?;
        if hello.magic != STREAM_MAGIC || hello.version != WIRE_VERSION {
            return Err(SessionError::WrongVersion(hello.version));
        }
        if (hello.from, hello.to, &hello.vm) != (self.host, self.own_host, &self.vm) {
            return Err(SessionError::WrongIdentity {
                own_host: self.own_host,
                own_vm: self.vm.clone(),
                host: hello.to,
                vm: hello.vm,
            });
        }
        Ok(hello.purpose)
    }

    /// Serves a session until it ends, and returns the reason.
    async fn serve(
        &self,
        connection: &Connection,
        streams: SessionStreams,
        inputs: &InputSender,
    ) -> String {
        let (control, control_queue) = outbox(0);
        let (data, data_queue) = outbox(LINK_BYTES_MAX);
        let queues = SessionQueues {
            control,
            data,
            connection: connection.clone(),
        };
        let up = NetInput::SessionUp {
            host: self.host,
            number: self.number,
            channels: queues,
        };
        if inputs.send(Input::Net(up)).await.is_err() {
            return "this daemon ends".into();
        }
        let writers = [
            tokio::spawn(write_stream(streams.control_out, control_queue)),
            tokio::spawn(write_stream(streams.data_out, data_queue)),
        ];
        let (stream, decoder) = streams.control_in;
        let why = tokio::select! {
            why = self.read_control(connection, stream, decoder, inputs) => why,
            why = self.accept_streams(connection, inputs) => why,
            why = self.accept_fallback_streams(connection, inputs) => why,
            why = self.watch_lease(connection) => why,
        };
        writers.iter().for_each(|w| w.abort());
        why
    }

    /// Forwards control messages until the peer ends the stream.
    async fn read_control(
        &self,
        connection: &Connection,
        mut stream: RecvStream,
        mut decoder: FrameDecoder,
        inputs: &InputSender,
    ) -> String {
        loop {
            let message = match read_frame(&mut stream, &mut decoder).await {
                Ok(Some(frame)) => frame.decode_control::<HostMsg>(),
                Ok(None) => {
                    connection.close(CLOSE_LEAVING, b"");
                    return "it has closed the session".into();
                }
                Err(why) => return why.to_string(),
            };
            let Ok(message) = message else {
                return "it sent a control message that cannot be understood".into();
            };
            let input = NetInput::Control {
                host: self.host,
                number: self.number,
                message,
            };
            if inputs.send(Input::Net(input)).await.is_err() {
                return "this daemon ends".into();
            }
        }
    }

    /// Serves the peer's unidirectional streams except the control stream. Returns only at a
    /// protocol error.
    async fn accept_streams(&self, connection: &Connection, inputs: &InputSender) -> String {
        let (mut has_data, mut readers) = (false, JoinSet::new());
        loop {
            let mut stream = tokio::select! {
                Some(ended) = readers.join_next() => match ended.unwrap_or_else(|e| Err(SessionError::ReaderFailed(e))) {
                    Ok(()) => continue,
                    Err(why) => return why.to_string(),
                },
                stream = connection.accept_uni() => match stream {
                    Ok(stream) => stream,
                    // The reader of the control stream reports the end, once it has read what came
                    // before.
                    Err(_) => std::future::pending().await,
                },
            };
            let mut decoder = FrameDecoder::new();
            let purpose =
                timeout(HELLO_TIMEOUT, self.read_purpose(&mut stream, &mut decoder)).await;
            match purpose {
                Ok(Ok(StreamPurpose::Data)) if !has_data => {
                    has_data = true;
                    readers.spawn(read_data(
                        self.clone(),
                        None,
                        stream,
                        decoder,
                        inputs.clone(),
                    ));
                }
                Ok(Ok(StreamPurpose::PairStream(lane))) => {
                    readers.spawn(read_data(
                        self.clone(),
                        Some(lane),
                        stream,
                        decoder,
                        inputs.clone(),
                    ));
                }
                Ok(Ok(
                    purpose @ (StreamPurpose::Images(migration) | StreamPurpose::Memory(migration)),
                )) => {
                    let (pair, session) = (self.clone(), connection.clone());
                    let announced = TransferAnnouncement {
                        context: pair,
                        migration,
                        session,
                        stream,
                        decoder,
                    };
                    let input = match purpose {
                        StreamPurpose::Memory(_) => NetInput::Memory(announced),
                        _ => NetInput::Images(announced),
                    };
                    if inputs.send(Input::Net(input)).await.is_err() {
                        return "this daemon ends".into();
                    }
                }
                Ok(Ok(other)) => return format!("it opened a second stream for {other:?}"),
                Ok(Err(why)) => return why.to_string(),
                Err(_) => return "it opened a stream and sent nothing".into(),
            }
        }
    }

    /// Accepts the bidirectional streams of the peer. Returns only at a protocol error.
    async fn accept_fallback_streams(
        &self,
        connection: &Connection,
        inputs: &InputSender,
    ) -> String {
        loop {
            // The reader of the control stream reports the end.
            let Ok((out, mut back)) = connection.accept_bi().await else {
                std::future::pending().await
            };
            let mut decoder = FrameDecoder::new();
            let purpose =
                match timeout(HELLO_TIMEOUT, self.read_purpose(&mut back, &mut decoder)).await {
                    Ok(Ok(purpose)) => purpose,
                    Ok(Err(why)) => return why.to_string(),
                    Err(_) => return "it opened a stream and sent nothing".into(),
                };
            let StreamPurpose::BulkFallback(migration, what) = purpose else {
                return format!("it opened a stream both ways for {purpose:?}");
            };
            // The peer must send nothing more until the stream is accepted.
            if !decoder.is_empty() {
                return "it sent unexpected data on a stream".into();
            }
            let fallback_stream = NetInput::FallbackStream {
                host: self.host,
                migration,
                what,
                streams: (out, back),
            };
            if inputs.send(Input::Net(fallback_stream)).await.is_err() {
                return "this daemon ends".into();
            }
        }
    }

    /// Returns when no authenticated data has arrived from the peer for the duration of a lease.
    ///
    /// Checks are counted instead of time, so that a pause of this whole process is not attributed
    /// to the peer.
    async fn watch_lease(&self, connection: &Connection) -> String {
        let mut steps = interval_at(
            next_lease_check(self.lease / LEASE_CHECKS),
            self.lease / LEASE_CHECKS,
        );
        steps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut frames_seen, mut silent_checks) = (0, 0);
        loop {
            steps.tick().await;
            let frames = connection.stats().frame_rx;
            let now = frames.acks
                + frames.ping
                + frames.stream
                + frames.max_data
                + frames.max_stream_data;
            silent_checks = if now == frames_seen {
                silent_checks + 1
            } else {
                0
            };
            frames_seen = now;
            if silent_checks >= LEASE_CHECKS {
                connection.close(CLOSE_SILENT, b"nothing was heard");
                return format!("it sent nothing for {} ms", self.lease.as_millis());
            }
        }
    }
}

/// Returns the next common time at which all sessions of this daemon check their leases: separate
/// times would wake the daemon once per host.
fn next_lease_check(step: Duration) -> Instant {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let first = *FIRST.get_or_init(Instant::now);
    let steps = first.elapsed().as_nanos() / step.as_nanos().max(1) + 1;
    first + step * u32::try_from(steps).unwrap_or(0)
}

/// Forwards the items of the main stream of the data channel, or of a pair stream, until the peer
/// ends the stream.
///
/// # Errors
/// A protocol error of the peer, or the end of this daemon.
async fn read_data(
    context: SessionContext,
    lane: Option<LaneId>,
    mut stream: RecvStream,
    mut decoder: FrameDecoder,
    inputs: InputSender,
) -> Result<(), SessionError> {
    loop {
        // The control stream reports the reason of an end.
        let Ok(Some(frame)) = read_frame(&mut stream, &mut decoder).await else {
            return Ok(());
        };
        let item = match lane {
            None => DataItem::Main(main_item(frame)?),
            Some(lane) => DataItem::Lane(lane, pair_stream_item(frame)?),
        };
        let input = NetInput::Data {
            host: context.host,
            number: context.number,
            item,
        };
        inputs
            .send(Input::Net(input))
            .await
            .map_err(|_| SessionError::DaemonEnds)?;
    }
}

fn main_item(frame: Frame) -> Result<MainEntry<DataMsg>, SessionError> {
    match frame {
        Frame {
            kind: FrameKind::Link,
            body,
        } => Ok(MainEntry::Item(DataMsg::Frame(body))),
        frame => frame.decode_control().map_err(SessionError::Decode),
    }
}

pub(super) fn pair_stream_item(frame: Frame) -> Result<LaneEntry<DataMsg>, SessionError> {
    match frame {
        Frame {
            kind: FrameKind::Link,
            body,
        } => Ok(LaneEntry::Item(DataMsg::Frame(body))),
        frame => match frame.decode_control::<LaneEntry<()>>() {
            Ok(LaneEntry::Barrier(words)) => Ok(LaneEntry::Barrier(words)),
            Ok(LaneEntry::Item(())) => Err(SessionError::WrongLaneItem),
            Err(e) => Err(SessionError::Decode(e)),
        },
    }
}

/// Serves a pair stream from its opening to its end.
pub(crate) async fn run_pair_stream(
    context: SessionContext,
    connection: Connection,
    lane: LaneId,
    queue: OutboxReader,
) {
    // Without a stream the session is ending; the control stream reports that.
    if let Ok(stream) = context
        .open_stream(&connection, StreamPurpose::PairStream(lane), 1)
        .await
    {
        write_stream(stream, queue).await;
    }
}

/// Writes queued frames. After [`super::outbox::Outgoing::Close`] it finishes the stream and waits
/// until the peer has received everything.
async fn write_stream(mut stream: SendStream, mut queue: OutboxReader) {
    let mut batch = Vec::with_capacity(WRITE_FRAMES_MAX);
    let mut chunks: Vec<Bytes> = Vec::with_capacity(2 * WRITE_FRAMES_MAX);
    let mut encoder = ChunkEncoder::default();
    loop {
        batch.clear();
        chunks.clear();
        if queue.receive_batch(&mut batch, WRITE_FRAMES_MAX).await == 0 {
            return;
        }
        let end = encoder.encode(&batch, &mut chunks);
        let written = stream.write_all_chunks(&mut chunks).await;
        batch.iter().for_each(|item| queue.record_done(item));
        if written.is_err() {
            return;
        }
        if end {
            let _ = stream.finish();
            let _ = timeout(FINISH_TIMEOUT, stream.stopped()).await;
            return;
        }
    }
}

/// Opens a stream that announces a transfer of images or memory.
///
/// # Errors
/// The failure of the session.
pub(crate) async fn open_announcement(
    context: &SessionContext,
    connection: &Connection,
    what: StreamPurpose,
) -> Result<SendStream, SessionError> {
    context.open_stream(connection, what, 0).await
}

/// Opens a bidirectional stream. The peer sends first.
///
/// # Errors
/// The failure of the session.
pub(crate) async fn open_bidirectional(
    context: &SessionContext,
    connection: &Connection,
    what: StreamPurpose,
) -> Result<(SendStream, RecvStream), SessionError> {
    let (mut out, back) = connection
        .open_bi()
        .await
        .map_err(SessionError::OpenStream)?;
    let _ = out.set_priority(0);
    context.send_purpose(&mut out, what).await?;
    Ok((out, back))
}

/// Returns the next frame, or `None` at the end of the stream.
///
/// # Errors
/// No frame can be read. The stream cannot be used any more.
pub(crate) async fn read_frame(
    stream: &mut RecvStream,
    decoder: &mut FrameDecoder,
) -> Result<Option<Frame>, SessionError> {
    loop {
        if let Some(frame) = decoder.next_frame().map_err(SessionError::Decode)? {
            return Ok(Some(frame));
        }
        let mut pieces = [const { Bytes::new() }; READ_CHUNKS_MAX];
        match stream.read_chunks(&mut pieces).await {
            Ok(Some(count)) => pieces[..count].iter().for_each(|piece| decoder.push(piece)),
            Ok(None) if decoder.is_empty() => return Ok(None),
            Ok(None) => return Err(SessionError::EndedInFrame),
            Err(quinn::ReadError::ConnectionLost(e)) => {
                return Err(SessionError::ConnectionLost(e));
            }
            Err(e) => return Err(SessionError::Read(e)),
        }
    }
}

/// Describes the end of a connection for the user.
pub(crate) fn describe(e: &quinn::ConnectionError) -> String {
    match e {
        quinn::ConnectionError::ApplicationClosed(close) => match close.error_code {
            CLOSE_LEAVING => "the session was closed regularly".into(),
            CLOSE_DUPLICATE => "it has another session with this host".into(),
            CLOSE_EXPELLED => "this host is no longer in its virtual machine".into(),
            CLOSE_SILENT => "this host sent it nothing for too long".into(),
            CLOSE_PROTOCOL_ERROR => "it did not understand this host".into(),
            code => format!("it closed the session with code {code}"),
        },
        quinn::ConnectionError::TransportError(e) if is_tls_alert(e.code) => {
            format!(
                "it has no certificate of this virtual machine ({})",
                e.reason
            )
        }
        quinn::ConnectionError::ConnectionClosed(close) if is_tls_alert(close.error_code) => {
            let reason = String::from_utf8_lossy(&close.reason);
            format!(
                "it belongs to another virtual machine: it rejects the certificate of this host ({reason})"
            )
        }
        quinn::ConnectionError::TimedOut => "it sent nothing until the session timed out".into(),
        quinn::ConnectionError::Reset => {
            "its daemon does not know the session (was it restarted?)".into()
        }
        quinn::ConnectionError::LocallyClosed => "this host closed the session".into(),
        e => e.to_string(),
    }
}

/// True for QUIC error codes that stand for a TLS alert.
fn is_tls_alert(code: quinn::TransportErrorCode) -> bool {
    (0x100..0x200).contains(&u64::from(code))
}
