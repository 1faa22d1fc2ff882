//! One session with another daemon: a QUIC connection with a control stream and a data stream in
//! each direction, pair streams for busy pairs of tasks, and an additional stream for every
//! transfer.
//!
//! Of two daemons, the daemon with the higher index selects the connection for the session by
//! sending its hello first. The daemon with the lower index sends no data on a connection before it
//! has received this hello. Therefore both daemons always use the same connection.
//!
//! A session ends for three reasons: its connection ends, the peer sends what no daemon sends, or
//! a stream that the session depends on breaks. These are the control stream and the streams of the
//! data channel, which no daemon resets while it serves the session. The end of the control stream
//! is the peer's end of the session. The fences of the data channel count what its streams carry
//! ([`pvmd_machine::pair_streams`]), so a missing part would delay all later items for ever; the
//! next session starts new counts, and links send again what was lost.
//!
//! All other trouble of a stream concerns that stream alone. A daemon that aborts a transfer resets
//! or ends its stream, possibly before the peer has received the hello. A stream may be silent for
//! as long as the session lives, because its first datagram may be lost again and again; the limit
//! of concurrent streams bounds the number of silent streams.

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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use thiserror::Error;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

/// Time limit from the end of the handshake to the hellos of the session. The hellos of later
/// streams have no time limit.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of chunks read from a stream at once. Each chunk is the content of one datagram.
const READ_CHUNKS_MAX: usize = 32;
/// Maximum number of frames passed to a stream at once.
const WRITE_FRAMES_MAX: usize = 64;
/// Time limit for the peer to receive the data that this daemon has sent last.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of checks for silence per lease.
const CHECKS_PER_LEASE: u32 = 20;

/// Magic number in the hello of every stream.
const STREAM_MAGIC: [u8; 4] = *b"SMPH";

/// Close code of a connection that is redundant, because the two hosts use another connection.
pub(crate) const CLOSE_DUPLICATE: VarInt = VarInt::from_u32(1);
/// Close code for a host that does not belong, or no longer belongs, to this virtual machine.
pub(crate) const CLOSE_EXPELLED: VarInt = VarInt::from_u32(2);
/// Close code after a protocol error.
const CLOSE_PROTOCOL_ERROR: VarInt = VarInt::from_u32(3);
/// Close code of an orderly end.
pub(crate) const CLOSE_LEAVING: VarInt = VarInt::from_u32(4);
/// Close code if the peer was silent for longer than the lease.
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
    /// Announces an image transfer. The stream stays open until the transfer ends.
    Images(MigrationId),
    /// Announces a post-copy memory transfer.
    Memory(MigrationId),
    /// A bidirectional stream for the data of an announced transfer, used because TCP is blocked.
    BulkFallback(MigrationId, BulkContent),
}

/// The first frame of every stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StreamHello {
    magic: [u8; 4],
    version: u16,
    vm: String,
    sender: HostId,
    receiver: HostId,
    purpose: StreamPurpose,
}

/// Reason why a stream of a session cannot be used. Depending on the stream, the session ends; see
/// the module documentation. Data that was not acknowledged is sent again in the next session.
#[derive(Debug, Error)]
pub(crate) enum SessionError {
    /// No stream was opened.
    #[error(transparent)]
    OpenStream(quinn::ConnectionError),
    /// The connection has ended while this daemon waited for data of the peer.
    #[error("{}", describe_close(.0))]
    ConnectionLost(#[source] quinn::ConnectionError),
    /// The frame cannot be encoded, so nothing was sent.
    #[error(transparent)]
    Encode(FrameError),
    /// Writing has failed. The peer has received at most a part of the frame.
    #[error(transparent)]
    Write(quinn::WriteError),
    /// The bytes of the peer are not a frame, or the frame has unknown content.
    #[error(transparent)]
    Decode(FrameError),
    #[error(transparent)]
    Read(quinn::ReadError),
    #[error("its first stream is for {0:?}")]
    WrongFirstStream(StreamPurpose),
    #[error("it opened a second stream for {0:?}")]
    SecondStream(StreamPurpose),
    #[error("it opened a stream in both directions for {0:?}")]
    WrongDirections(StreamPurpose),
    /// The peer must send nothing after the hello of a fallback stream until the stream is
    /// accepted.
    #[error("it sent unexpected data on a stream")]
    UnexpectedData,
    #[error("a stream ended before its hello")]
    EndedBeforeHello,
    #[error("it uses protocol version {0}, this daemon {own}", own = WIRE_VERSION)]
    WrongVersion(u16),
    /// The peer expects another daemon at this address.
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
    /// The stream belongs to the data channel. The frames behind the break are missing.
    #[error("a stream of the data channel broke: {0}")]
    DataStreamBroke(Box<Self>),
    /// The tokio task that reads a stream has failed. Items that the tokio task had read were
    /// forwarded.
    #[error(transparent)]
    ReaderFailed(JoinError),
    /// This daemon is ending. The item that was read is not forwarded.
    #[error("this daemon ends")]
    DaemonEnds,
}

impl SessionError {
    /// True if a daemon that follows the protocol can cause this error on a stream whose hello has
    /// not been received.
    fn concerns_stream_only(&self) -> bool {
        match self {
            // The reader of the control stream reports the end of the connection, after it has
            // read all earlier messages.
            Self::ConnectionLost(_)
            | Self::Read(_)
            | Self::EndedBeforeHello
            | Self::EndedInFrame => true,
            Self::OpenStream(_)
            | Self::Encode(_)
            | Self::Write(_)
            | Self::Decode(_)
            | Self::WrongFirstStream(_)
            | Self::SecondStream(_)
            | Self::WrongDirections(_)
            | Self::UnexpectedData
            | Self::WrongVersion(_)
            | Self::WrongIdentity { .. }
            | Self::WrongLaneItem
            | Self::DataStreamBroke(_)
            | Self::ReaderFailed(_)
            | Self::DaemonEnds => false,
        }
    }
}

/// Serves a connection as a session, from the hellos to the end of the session, and reports the
/// end.
pub(crate) async fn run_session(
    context: SessionContext,
    connection: Connection,
    inputs: InputSender,
) {
    let reason = match timeout(HELLO_TIMEOUT, context.exchange_hellos(&connection)).await {
        Ok(Ok(streams)) => context.serve(&connection, streams, &inputs).await,
        Ok(Err(reason)) => reason.to_string(),
        Err(_) => "no hello arrived in time".to_string(),
    };
    connection.close(CLOSE_PROTOCOL_ERROR, b"");
    let session_down = NetInput::SessionDown {
        host: context.host,
        session_number: context.session_number,
        reason,
    };
    let _ = inputs.send(Input::Net(session_down)).await;
}

/// The streams of a session that exist after both hellos.
struct SessionStreams {
    control_sender: SendStream,
    data_sender: SendStream,
    control_receiver: (RecvStream, FrameDecoder),
}

impl SessionContext {
    /// Exchanges hellos with the peer and returns the streams of the session. The host with the
    /// higher index sends its hello first.
    async fn exchange_hellos(
        &self,
        connection: &Connection,
    ) -> Result<SessionStreams, SessionError> {
        if self.own_host > self.host {
            let (control_sender, data_sender) = self.send_hello(connection).await?;
            let control_receiver = self.receive_hello(connection).await?;
            Ok(SessionStreams {
                control_sender,
                data_sender,
                control_receiver,
            })
        } else {
            let control_receiver = self.receive_hello(connection).await?;
            let (control_sender, data_sender) = self.send_hello(connection).await?;
            Ok(SessionStreams {
                control_sender,
                data_sender,
                control_receiver,
            })
        }
    }

    async fn send_hello(
        &self,
        connection: &Connection,
    ) -> Result<(SendStream, SendStream), SessionError> {
        let control_stream = self
            .open_stream(connection, StreamPurpose::Control, 2)
            .await?;
        let data_stream = self.open_stream(connection, StreamPurpose::Data, 1).await?;
        Ok((control_stream, data_stream))
    }

    /// Opens a stream and sends its purpose. Data of streams with higher priority is sent first.
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
        let frame = self.encode_hello(purpose)?;
        stream.write_chunk(frame).await.map_err(SessionError::Write)
    }

    /// Returns the first frame of a stream for `purpose`.
    pub(crate) fn encode_hello(&self, purpose: StreamPurpose) -> Result<Bytes, SessionError> {
        let hello = StreamHello {
            magic: STREAM_MAGIC,
            version: WIRE_VERSION,
            vm: self.vm.clone(),
            sender: self.own_host,
            receiver: self.host,
            purpose,
        };
        encode_control(&hello).map_err(SessionError::Encode)
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
            other_purpose => Err(SessionError::WrongFirstStream(other_purpose)),
        }
    }

    /// Reads the first frame of a stream and checks that the stream is meant for this session.
    /// Returns the purpose of the stream.
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
        if (hello.sender, hello.receiver, &hello.vm) != (self.host, self.own_host, &self.vm) {
            return Err(SessionError::WrongIdentity {
                own_host: self.own_host,
                own_vm: self.vm.clone(),
                host: hello.receiver,
                vm: hello.vm,
            });
        }
        Ok(hello.purpose)
    }

    /// Serves a session until it ends: writes the queued data, and forwards the received data to
    /// the loop. Returns the reason of the end.
    async fn serve(
        &self,
        connection: &Connection,
        streams: SessionStreams,
        inputs: &InputSender,
    ) -> String {
        let (control_outbox, control_queue) = outbox(0);
        let (data_outbox, data_queue) = outbox(LINK_BYTES_MAX);
        let session_queues = SessionQueues {
            control: control_outbox,
            data: data_outbox,
            connection: connection.clone(),
        };
        let session_up = NetInput::SessionUp {
            host: self.host,
            session_number: self.session_number,
            queues: session_queues,
        };
        if inputs.send(Input::Net(session_up)).await.is_err() {
            return "this daemon ends".into();
        }
        let writer_tasks = [
            tokio::spawn(write_stream(
                connection.clone(),
                streams.control_sender,
                control_queue,
            )),
            tokio::spawn(write_stream(
                connection.clone(),
                streams.data_sender,
                data_queue,
            )),
        ];
        let (stream, decoder) = streams.control_receiver;
        let reason = tokio::select! {
            reason = self.forward_control(connection, stream, decoder, inputs) => reason,
            reason = self.accept_streams(connection, inputs) => reason,
            reason = self.accept_fallback_streams(connection, inputs) => reason,
            reason = self.wait_until_silent(connection) => reason,
        };
        writer_tasks.iter().for_each(|w| w.abort());
        reason
    }

    /// Forwards control messages until the peer ends the stream. Returns the reason why the session
    /// ends.
    async fn forward_control(
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
                session_number: self.session_number,
                message,
            };
            if inputs.send(Input::Net(input)).await.is_err() {
                return "this daemon ends".into();
            }
        }
    }

    /// Serves the peer's unidirectional streams except the control stream, each on a tokio task of
    /// its own. Returns the reason if the peer violates the protocol or this daemon ends; otherwise
    /// does not return.
    async fn accept_streams(&self, connection: &Connection, inputs: &InputSender) -> String {
        let (has_data_stream, mut reader_tasks) =
            (Arc::new(AtomicBool::new(false)), JoinSet::new());
        loop {
            let stream = tokio::select! {
                Some(reader_result) = reader_tasks.join_next() => match reader_result.unwrap_or_else(|e| Err(SessionError::ReaderFailed(e))) {
                    Ok(()) => continue,
                    Err(why) => return why.to_string(),
                },
                stream = connection.accept_uni() => match stream {
                    Ok(stream) => stream,
                    // When the connection ends, the reader of the control stream reports the end,
                    // after it has read all earlier messages.
                    Err(_) => std::future::pending().await,
                },
            };
            reader_tasks.spawn(self.clone().serve_stream(
                connection.clone(),
                stream,
                has_data_stream.clone(),
                inputs.clone(),
            ));
        }
    }

    /// Reads the hello of a unidirectional stream. Then forwards the items of a stream of the data
    /// channel until it ends, or passes the announcement of a transfer to the loop.
    ///
    /// # Errors
    /// The session must end.
    async fn serve_stream(
        self,
        session: Connection,
        mut stream: RecvStream,
        has_data_stream: Arc<AtomicBool>,
        inputs: InputSender,
    ) -> Result<(), SessionError> {
        let mut decoder = FrameDecoder::new();
        let Some(purpose) = self.read_purpose_if_any(&mut stream, &mut decoder).await? else {
            return Ok(());
        };
        let lane = match purpose {
            StreamPurpose::Data if !has_data_stream.swap(true, Ordering::Relaxed) => None,
            StreamPurpose::PairStream(lane) => Some(lane),
            StreamPurpose::Images(migration) | StreamPurpose::Memory(migration) => {
                let announcement = TransferAnnouncement {
                    context: self,
                    migration,
                    session,
                    stream,
                    decoder,
                };
                let input = match purpose {
                    StreamPurpose::Memory(_) => NetInput::MemoryAnnounced(announcement),
                    _ => NetInput::ImagesAnnounced(announcement),
                };
                let send_result = inputs.send(Input::Net(input)).await;
                return send_result.map_err(|_| SessionError::DaemonEnds);
            }
            other_purpose => return Err(SessionError::SecondStream(other_purpose)),
        };
        forward_data(self, lane, stream, decoder, inputs).await
    }

    /// Accepts the bidirectional streams of the peer, each on a tokio task of its own. Returns the
    /// reason if the peer violates the protocol or this daemon ends; otherwise does not return.
    async fn accept_fallback_streams(
        &self,
        connection: &Connection,
        inputs: &InputSender,
    ) -> String {
        let mut reader_tasks = JoinSet::new();
        loop {
            let streams = tokio::select! {
                Some(reader_result) = reader_tasks.join_next() => match reader_result.unwrap_or_else(|e| Err(SessionError::ReaderFailed(e))) {
                    Ok(()) => continue,
                    Err(why) => return why.to_string(),
                },
                streams = connection.accept_bi() => match streams {
                    Ok(streams) => streams,
                    // When the connection ends, the reader of the control stream reports the end.
                    Err(_) => std::future::pending().await,
                },
            };
            reader_tasks.spawn(self.clone().pass_fallback_stream(streams, inputs.clone()));
        }
    }

    /// Reads the hello of a bidirectional stream and passes the stream to the loop.
    ///
    /// # Errors
    /// The session must end.
    async fn pass_fallback_stream(
        self,
        (send_stream, mut receive_stream): (SendStream, RecvStream),
        inputs: InputSender,
    ) -> Result<(), SessionError> {
        let mut decoder = FrameDecoder::new();
        let hello_result = self.read_purpose_if_any(&mut receive_stream, &mut decoder);
        let Some(purpose) = hello_result.await? else {
            return Ok(());
        };
        let StreamPurpose::BulkFallback(migration, content) = purpose else {
            return Err(SessionError::WrongDirections(purpose));
        };
        if !decoder.is_empty() {
            return Err(SessionError::UnexpectedData);
        }
        let fallback_stream = NetInput::FallbackStream {
            host: self.host,
            migration,
            content,
            streams: (send_stream, receive_stream),
        };
        let send_result = inputs.send(Input::Net(fallback_stream)).await;
        send_result.map_err(|_| SessionError::DaemonEnds)
    }

    /// Waits for the hello of a stream that the peer has opened during the session, and returns the
    /// purpose of the stream; `None` if the peer has reset or ended the stream before its hello.
    ///
    /// # Errors
    /// The hello is none that a daemon sends. The session must end.
    async fn read_purpose_if_any(
        &self,
        stream: &mut RecvStream,
        decoder: &mut FrameDecoder,
    ) -> Result<Option<StreamPurpose>, SessionError> {
        match self.read_purpose(stream, decoder).await {
            Ok(purpose) => Ok(Some(purpose)),
            Err(why) if why.concerns_stream_only() => {
                tracing::debug!("{} gave up a stream before its hello: {why}", self.host);
                Ok(None)
            }
            Err(why) => Err(why),
        }
    }

    /// Waits until no authenticated data has arrived from the peer for the duration of a lease.
    /// Then closes the connection and returns the reason.
    ///
    /// The function counts checks instead of measuring time. Therefore a pause of this whole
    /// process, or the sleep of this machine, is not counted as silence of the peer. The master
    /// then declares a host lost later, never earlier, and the host's tasks have ended by then by
    /// the lease of their tasker.
    async fn wait_until_silent(&self, connection: &Connection) -> String {
        let mut check_timer = interval_at(
            next_lease_check(self.lease / CHECKS_PER_LEASE),
            self.lease / CHECKS_PER_LEASE,
        );
        check_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut previous_frame_count, mut silent_check_count) = (0, 0);
        loop {
            check_timer.tick().await;
            let frame_stats = connection.stats().frame_rx;
            let frame_count = frame_stats.acks
                + frame_stats.ping
                + frame_stats.stream
                + frame_stats.max_data
                + frame_stats.max_stream_data;
            silent_check_count = if frame_count == previous_frame_count {
                silent_check_count + 1
            } else {
                0
            };
            previous_frame_count = frame_count;
            if silent_check_count >= CHECKS_PER_LEASE {
                connection.close(CLOSE_SILENT, b"nothing was heard");
                return format!("it sent nothing for {} ms", self.lease.as_millis());
            }
        }
    }
}

/// Returns the next time at which all sessions of this daemon check their leases. If each session
/// had its own check times, the daemon would be woken once per host.
fn next_lease_check(check_interval: Duration) -> Instant {
    static FIRST_CHECK: OnceLock<Instant> = OnceLock::new();
    let first_check = *FIRST_CHECK.get_or_init(Instant::now);
    let step_count = first_check.elapsed().as_nanos() / check_interval.as_nanos().max(1) + 1;
    first_check + check_interval * u32::try_from(step_count).unwrap_or(0)
}

/// Forwards the items of one stream until the peer ends the stream. If `lane` is `Some`, the stream
/// is this pair stream; if `lane` is `None`, the stream is the main stream of the data channel.
///
/// # Errors
/// The peer violates the protocol, or this daemon ends. The session must end.
async fn forward_data(
    context: SessionContext,
    lane: Option<LaneId>,
    mut stream: RecvStream,
    mut decoder: FrameDecoder,
    inputs: InputSender,
) -> Result<(), SessionError> {
    loop {
        let frame = match read_frame(&mut stream, &mut decoder).await {
            Ok(Some(frame)) => frame,
            // If the connection ends, the reader of the control stream reports the reason.
            Ok(None) | Err(SessionError::ConnectionLost(_)) => return Ok(()),
            Err(why) => return Err(SessionError::DataStreamBroke(Box::new(why))),
        };
        let item = match lane {
            None => DataItem::Main(decode_main_entry(frame)?),
            Some(lane) => DataItem::Lane(lane, decode_lane_entry(frame)?),
        };
        let input = NetInput::Data {
            host: context.host,
            session_number: context.session_number,
            item,
        };
        inputs
            .send(Input::Net(input))
            .await
            .map_err(|_| SessionError::DaemonEnds)?;
    }
}

fn decode_main_entry(frame: Frame) -> Result<MainEntry<DataMsg>, SessionError> {
    match frame {
        Frame {
            kind: FrameKind::Link,
            body,
        } => Ok(MainEntry::Item(DataMsg::Frame(body))),
        frame => frame.decode_control().map_err(SessionError::Decode),
    }
}

pub(super) fn decode_lane_entry(frame: Frame) -> Result<LaneEntry<DataMsg>, SessionError> {
    match frame {
        Frame {
            kind: FrameKind::Link,
            body,
        } => Ok(LaneEntry::Item(DataMsg::Frame(body))),
        frame => match frame.decode_control::<LaneEntry<()>>() {
            Ok(LaneEntry::Barrier(barrier)) => Ok(LaneEntry::Barrier(barrier)),
            Ok(LaneEntry::Item(())) => Err(SessionError::WrongLaneItem),
            Err(e) => Err(SessionError::Decode(e)),
        },
    }
}

/// Opens a pair stream and writes the queued frames to the stream until it ends.
pub(crate) async fn run_pair_stream(
    context: SessionContext,
    connection: Connection,
    lane: LaneId,
    queue: OutboxReader,
) {
    // If the stream cannot be opened, the session is ending; the reader of the control stream
    // reports this.
    if let Ok(stream) = context
        .open_stream(&connection, StreamPurpose::PairStream(lane), 1)
        .await
    {
        write_stream(connection, stream, queue).await;
    }
}

/// Writes queued frames to a stream that the session depends on. After
/// [`super::outbox::Outgoing::Close`], finishes the stream and waits until the peer has received
/// all data. If the peer refuses the stream, ends the session: later frames of the stream would be
/// lost, and no daemon refuses such a stream.
async fn write_stream(connection: Connection, mut stream: SendStream, mut queue: OutboxReader) {
    let mut batch = Vec::with_capacity(WRITE_FRAMES_MAX);
    let mut chunks: Vec<Bytes> = Vec::with_capacity(2 * WRITE_FRAMES_MAX);
    let mut chunk_encoder = ChunkEncoder::default();
    loop {
        batch.clear();
        chunks.clear();
        if queue.receive_batch(&mut batch, WRITE_FRAMES_MAX).await == 0 {
            return;
        }
        let must_close = chunk_encoder.encode(&batch, &mut chunks);
        let write_result = stream.write_all_chunks(&mut chunks).await;
        batch.iter().for_each(|item| queue.record_removed(item));
        if let Err(why) = write_result {
            if !matches!(why, quinn::WriteError::ConnectionLost(_)) {
                connection.close(CLOSE_PROTOCOL_ERROR, b"a stream was refused");
            }
            return;
        }
        if must_close {
            let _ = stream.finish();
            let _ = timeout(FINISH_TIMEOUT, stream.stopped()).await;
            return;
        }
    }
}

/// Opens a stream that announces a transfer of images or memory.
///
/// # Errors
/// The stream cannot be opened; the session is ending.
pub(crate) async fn open_announcement(
    context: &SessionContext,
    connection: &Connection,
    purpose: StreamPurpose,
) -> Result<SendStream, SessionError> {
    context.open_stream(connection, purpose, 0).await
}

/// Opens a bidirectional stream for `purpose`. After the hello of this daemon, the peer must send
/// first.
///
/// # Errors
/// The stream cannot be opened; the session is ending.
pub(crate) async fn open_bidirectional(
    context: &SessionContext,
    connection: &Connection,
    purpose: StreamPurpose,
) -> Result<(SendStream, RecvStream), SessionError> {
    let (mut send_stream, receive_stream) = connection
        .open_bi()
        .await
        .map_err(SessionError::OpenStream)?;
    let _ = send_stream.set_priority(0);
    context.send_purpose(&mut send_stream, purpose).await?;
    Ok((send_stream, receive_stream))
}

/// Waits for the next frame and returns the frame, or `None` at the end of the stream.
///
/// # Errors
/// No frame can be read. The stream is unusable after the error.
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
            Ok(Some(piece_count)) => pieces[..piece_count]
                .iter()
                .for_each(|piece| decoder.push(piece)),
            Ok(None) if decoder.is_empty() => return Ok(None),
            Ok(None) => return Err(SessionError::EndedInFrame),
            Err(quinn::ReadError::ConnectionLost(e)) => {
                return Err(SessionError::ConnectionLost(e));
            }
            Err(e) => return Err(SessionError::Read(e)),
        }
    }
}

/// Returns the reason why a connection has ended, as a text for the user.
pub(crate) fn describe_close(e: &quinn::ConnectionError) -> String {
    match e {
        quinn::ConnectionError::ApplicationClosed(close_frame) => match close_frame.error_code {
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
        quinn::ConnectionError::ConnectionClosed(close_frame)
            if is_tls_alert(close_frame.error_code) =>
        {
            let reason = String::from_utf8_lossy(&close_frame.reason);
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

/// True for QUIC error codes that represent a TLS alert.
fn is_tls_alert(code: quinn::TransportErrorCode) -> bool {
    (0x100..0x200).contains(&u64::from(code))
}
