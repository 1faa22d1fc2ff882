//! Post-copy memory transfers between daemons.
//!
//! Each transfer uses a separate connection ([`super::bulk_tcp`]). On each host the tasker's engine
//! reads and writes through a socket of the daemon. The daemons do not interpret the engines'
//! protocol.
//!
//! The target's engine closes its socket when it has fetched all memory. If the connection ends
//! earlier, the target's daemon reports [`Event::MemoryLost`] and does not close the socket. Before
//! the engine reads the end of its stream, the task that needs the memory must be dead.

use super::bulk_fallback::BulkFallbacks;
use super::bulk_tcp::{BulkConnection, BulkListener, ConnectionOffer, RecordReader, RecordWriter};
use super::input::{Input, InputSender};
use super::net::Net;
use super::rate_limit::RateLimit;
use super::runtime_dir::remove_recursively;
use super::session::{StreamPurpose, open_announcement, read_frame};
use super::session_input::{BulkContent, TransferAnnouncement};
use super::sys::{PriorityBoost, bytes_unread_by_peer};
use super::transfer_counters::{TransferCounter, TransferCounters};
use super::zeros::{self, Part};
use pvmd_machine::io::Event;
use sempa_proto::frame::encode_control;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::{HostId, MigrationId};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::{Instrument, info_span};

/// Time without data from an engine after which an empty record is sent. The record shows the other
/// host that this host is alive.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time for which the connection stays open after the source's engine has ended. During this time
/// the target's engine reads its last data and closes its socket. Also the time for which the
/// target waits for its engine to close the socket after the engine has read all data.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which a thread checks whether the engine has closed its socket.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of bytes read from an engine at once.
const READ_BYTES_MAX: usize = zeros::PLAIN_BYTES_MAX;
/// Zeros that are written to the engine for a run of zeros, of which only the length was sent.
static ZERO_BYTES: [u8; 64 << 10] = [0; 64 << 10];

/// A memory transfer, which this host sends or receives.
#[derive(Debug)]
struct MemoryTransfer {
    remote_host: HostId,
    task: JoinHandle<()>,
    /// The connection while it is established; `None` before and afterwards. Closing or aborting
    /// the connection ends the transfer.
    connection: Arc<Mutex<Option<BulkConnection>>>,
}

/// All memory transfers of this host. Owned by the daemon's loop.
pub(crate) struct MemoryTransfers {
    paths: RuntimePaths,
    inputs: InputSender,
    rate: Arc<RateLimit>,
    bulk_fallbacks: BulkFallbacks,
    counters: TransferCounters,
    expected_transfers: HashMap<MigrationId, (HostId, UnixListener)>,
    transfers: HashMap<MigrationId, MemoryTransfer>,
}

impl MemoryTransfers {
    /// Creates a state without transfers. `rate` limits the rate at which this host sends data.
    pub(crate) fn new(
        paths: RuntimePaths,
        inputs: InputSender,
        rate: Arc<RateLimit>,
        bulk_fallbacks: BulkFallbacks,
        counters: TransferCounters,
    ) -> Self {
        Self {
            paths,
            inputs,
            rate,
            bulk_fallbacks,
            counters,
            expected_transfers: HashMap::new(),
            transfers: HashMap::new(),
        }
    }

    /// On the source: sends the memory that the tasker serves to the host `to`. Errors are logged.
    pub(crate) fn send_memory(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        let Some(engine_listener) = self.listen_for_engine(migration) else {
            return;
        };
        let session = net.await_session(to);
        let (shared_connection, rate_limit) = (
            Arc::<Mutex<Option<BulkConnection>>>::default(),
            self.rate.clone(),
        );
        let (task_connection, fallbacks) = (shared_connection.clone(), self.bulk_fallbacks.clone());
        let counter = self.counters.counter(migration);
        let work = async move {
            let connect_error_text = |why: &dyn std::fmt::Display| {
                format!("{migration}: no connection for its memory to {to}: {why}")
            };
            let connect_result = async {
                let (context, session) = session
                    .wait_for_session()
                    .await
                    .map_err(|e| connect_error_text(&e))?;
                let listener = BulkListener::open()
                    .await
                    .map_err(|e| connect_error_text(&e))?;
                let expected_transfer = fallbacks.expect_stream(to, migration, BulkContent::Memory);
                let offer = encode_control(listener.offer()).map_err(|e| connect_error_text(&e))?;
                let connect_result =
                    open_announcement(&context, &session, StreamPurpose::Memory(migration)).await;
                let mut stream = connect_result.map_err(|e| connect_error_text(&e))?;
                stream
                    .write_chunk(offer)
                    .await
                    .map_err(|e| connect_error_text(&e))?;
                // The target reads only one frame.
                let _ = stream.finish();
                expected_transfer
                    .accept(&session, migration, listener)
                    .await
                    .map_err(|e| connect_error_text(&e))
            };
            let (engine, connect_result) = tokio::join!(engine_listener.accept(), connect_result);
            let endpoints = engine
                .map_err(|e| connect_error_text(&e))
                .and_then(|(engine, _)| {
                    Ok((
                        into_blocking(engine).map_err(|e| e.to_string())?,
                        connect_result?,
                    ))
                });
            match endpoints {
                Ok((engine, (writer, reader, shared_connection))) => {
                    *lock(&task_connection) = Some(shared_connection.clone());
                    let pace = (rate_limit, counter);
                    serve_memory(engine, writer, reader, shared_connection, pace).await;
                    // The connection is dropped now, so that its descriptor is closed. Otherwise
                    // the descriptor would stay open until the next transfer removes this transfer.
                    *lock(&task_connection) = None;
                }
                Err(why) => tracing::warn!("{why}"),
            }
        };
        let span = info_span!("migration", id = %migration);
        let task = tokio::spawn(work.instrument(span));
        self.register(
            migration,
            MemoryTransfer {
                remote_host: to,
                task,
                connection: shared_connection,
            },
        );
    }

    /// On the target: registers that the host `from` will send memory. Listens for the tasker's
    /// engine, which requests the memory.
    pub(crate) fn expect_memory(&mut self, migration: MigrationId, from: HostId) {
        if let Some(engine_listener) = self.listen_for_engine(migration) {
            self.expected_transfers
                .insert(migration, (from, engine_listener));
        }
    }

    /// On the target: connects to the source if memory of this migration is expected from the
    /// announcing host, and forwards the memory to the engine. Otherwise logs a refusal.
    pub(crate) fn on_announcement(&mut self, mut announcement: TransferAnnouncement) {
        let (source_host, migration) = (announcement.context.host, announcement.migration);
        let Some((_, engine_listener)) = self
            .expected_transfers
            .remove(&migration)
            .filter(|(host, _)| *host == source_host)
        else {
            return tracing::warn!(
                "refused memory of {migration} from {source_host}: it is not expected"
            );
        };
        let shared_connection = Arc::<Mutex<Option<BulkConnection>>>::default();
        let (task_connection, inputs) = (shared_connection.clone(), self.inputs.clone());
        let fallbacks = self.bulk_fallbacks.clone();
        let work = async move {
            let connect_error_text = |why: &dyn std::fmt::Display| {
                format!("{migration}: no connection to its memory on {source_host}: {why}")
            };
            let connect_result = async {
                let frame = read_frame(&mut announcement.stream, &mut announcement.decoder)
                    .await
                    .map_err(|e| connect_error_text(&e))?;
                let frame = frame.ok_or_else(|| connect_error_text(&"nothing was announced"))?;
                let offer: ConnectionOffer =
                    frame.decode_control().map_err(|e| connect_error_text(&e))?;
                let session = (&announcement.context, &announcement.session);
                fallbacks
                    .connect(session, (migration, BulkContent::Memory), &offer)
                    .await
                    .map_err(|e| connect_error_text(&e))
            };
            let endpoints = match connect_result.await {
                Ok(connect_result) => {
                    let engine = engine_listener
                        .accept()
                        .await
                        .map_err(|e| connect_error_text(&e));
                    engine.and_then(|(engine, _)| {
                        Ok((
                            into_blocking(engine).map_err(|e| e.to_string())?,
                            connect_result,
                        ))
                    })
                }
                Err(why) => Err(why),
            };
            match endpoints {
                Ok((engine, (writer, reader, shared_connection))) => {
                    *lock(&task_connection) = Some(shared_connection.clone());
                    let report_loss = move |why| {
                        // Sending fails only if the loop has ended; the report is then not needed.
                        let _ = inputs
                            .blocking_send(Input::Event(Event::MemoryLost { migration, why }));
                    };
                    fetch_memory(engine, writer, reader, shared_connection, report_loss).await;
                    *lock(&task_connection) = None;
                }
                Err(why) => tracing::warn!("{why}"),
            }
        };
        let span = info_span!("migration", id = %migration);
        let task = tokio::spawn(work.instrument(span));
        self.register(
            migration,
            MemoryTransfer {
                remote_host: source_host,
                task,
                connection: shared_connection,
            },
        );
    }

    /// Ends a transfer whose connection is not established yet. Called after the end or failure of
    /// the migration on this host.
    pub(crate) fn abort_unconnected(&mut self, migration: MigrationId) {
        self.expected_transfers.remove(&migration);
        if let Some(transfer) = self
            .transfers
            .get(&migration)
            .filter(|transfer| lock(&transfer.connection).is_none())
        {
            transfer.task.abort();
        }
        remove_recursively(&self.paths.memory_socket_path(migration));
    }

    /// Aborts all transfers with the host `host`. Called when the host is lost.
    pub(crate) fn on_host_lost(&mut self, host: HostId) {
        for transfer in self
            .transfers
            .values()
            .filter(|transfer| transfer.remote_host == host)
        {
            match &*lock(&transfer.connection) {
                Some(connection) => connection.abort(),
                None => transfer.task.abort(),
            }
        }
    }

    fn listen_for_engine(&self, migration: MigrationId) -> Option<UnixListener> {
        let path = self.paths.memory_socket_path(migration);
        remove_recursively(&path);
        let listener = UnixListener::bind(&path);
        listener
            .map_err(|e| {
                tracing::warn!(
                    "{migration}: no connection for its memory: {}: {e}",
                    path.display()
                )
            })
            .ok()
    }

    fn register(&mut self, migration: MigrationId, transfer: MemoryTransfer) {
        self.transfers
            .retain(|_, transfer| !transfer.task.is_finished());
        self.transfers.insert(migration, transfer);
    }
}

fn lock(
    connection: &Mutex<Option<BulkConnection>>,
) -> std::sync::MutexGuard<'_, Option<BulkConnection>> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error: the engine's socket cannot be used. The socket was closed.
#[derive(Debug, thiserror::Error)]
#[error("a socket that cannot be used: {0}")]
struct UnusableSocket(#[source] std::io::Error);

fn into_blocking(engine: tokio::net::UnixStream) -> Result<UnixStream, UnusableSocket> {
    let engine = engine.into_std().and_then(|engine| {
        engine.set_nonblocking(false)?;
        engine.set_read_timeout(Some(KEEP_ALIVE_INTERVAL))?;
        Ok(engine)
    });
    engine.map_err(UnusableSocket)
}

/// On the source: forwards data in both directions until the engine or the target has closed its
/// end.
async fn serve_memory(
    engine: UnixStream,
    writer: RecordWriter<BulkConnection>,
    reader: RecordReader<BulkConnection>,
    connection: BulkConnection,
    (rate, counter): (Arc<RateLimit>, TransferCounter),
) {
    let Ok(request_socket) = engine.try_clone() else {
        return connection.abort();
    };
    let target_has_closed = Arc::new(AtomicBool::new(false));
    let thread_target_has_closed = target_has_closed.clone();
    let reply_thread = spawn_blocking(move || {
        let priority_boost = PriorityBoost::start();
        forward_from_engine(engine, writer, |bytes| {
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
            rate.wait_for_slot(bytes);
        });
        drop(priority_boost);
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while !target_has_closed.load(Ordering::Acquire) && Instant::now() < deadline {
            std::thread::sleep(CLOSE_POLL_INTERVAL);
        }
        connection.abort();
    });
    let request_thread = spawn_blocking(move || {
        let _priority_boost = PriorityBoost::start();
        let _error = forward_to_engine(reader, &request_socket);
        thread_target_has_closed.store(true, Ordering::Release);
        // No further requests will arrive, so the engine's socket is closed.
        let _ = request_socket.shutdown(Shutdown::Both);
    });
    let _ = tokio::join!(reply_thread, request_thread);
}

/// On the target: forwards data in both directions until the engine has closed its socket. Calls
/// `report_loss` with the reason if the connection ends earlier.
async fn fetch_memory(
    engine: UnixStream,
    writer: RecordWriter<BulkConnection>,
    reader: RecordReader<BulkConnection>,
    connection: BulkConnection,
    report_loss: impl FnOnce(String) + Send + 'static,
) {
    let Ok(reply_socket) = engine.try_clone() else {
        return connection.abort();
    };
    let engine_has_closed = Arc::new(AtomicBool::new(false));
    let thread_engine_has_closed = engine_has_closed.clone();
    let request_thread = spawn_blocking(move || {
        let _priority_boost = PriorityBoost::start();
        forward_from_engine(engine, writer, |_| ());
        thread_engine_has_closed.store(true, Ordering::Release);
        connection.abort();
    });
    let reply_thread = spawn_blocking(move || {
        let _priority_boost = PriorityBoost::start();
        let error = forward_to_engine(reader, &reply_socket);
        // A stopped engine, or one that is not scheduled, may have unread data. Its time limit
        // starts when it has read all data.
        let mut last_unread_at = Instant::now();
        while !engine_has_closed.load(Ordering::Acquire) && last_unread_at.elapsed() < CLOSE_TIMEOUT
        {
            std::thread::sleep(CLOSE_POLL_INTERVAL);
            if bytes_unread_by_peer(&reply_socket) > 0 {
                last_unread_at = Instant::now();
            }
        }
        if !engine_has_closed.load(Ordering::Acquire) {
            report_loss(format!("the rest of its memory cannot be fetched: {error}"));
        }
        // The thread returns the socket, so that the socket stays open until the request thread has
        // detected that the engine has closed its end.
        reply_socket
    });
    let _ = tokio::join!(request_thread, reply_thread);
}

/// Forwards an engine's data to the other host until the engine closes its socket or the connection
/// is lost. Calls `before_send` with the size of each piece before the piece is sent.
fn forward_from_engine(
    mut engine: UnixStream,
    mut writer: RecordWriter<BulkConnection>,
    before_send: impl Fn(usize),
) {
    let mut bytes = vec![0; READ_BYTES_MAX];
    while let Some(length) = read_engine(&mut engine, &mut bytes) {
        let fill = |buffer: &mut [u8]| {
            buffer.copy_from_slice(&bytes[..length]);
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(send_result) = writer.send_packed(&[], length, fill, &before_send);
        if send_result.is_err() {
            // The engine's output must be read to its end. Otherwise the engine would block and not
            // detect the end of the connection.
            while read_engine(&mut engine, &mut bytes).is_some() {}
            return;
        }
    }
}

/// Reads from an engine and returns the number of bytes. Returns 0 after [`KEEP_ALIVE_INTERVAL`]
/// without data, and `None` at the end of the stream or after an error.
fn read_engine(engine: &mut UnixStream, bytes: &mut [u8]) -> Option<usize> {
    loop {
        match engine.read(bytes) {
            Ok(0) => return None,
            Ok(length) => return Some(length),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Some(0);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// Forwards data of the other host to an engine until reading or writing fails. Returns the error
/// of the failed operation.
fn forward_to_engine(
    mut reader: RecordReader<BulkConnection>,
    mut engine: &UnixStream,
) -> std::io::Error {
    loop {
        if let Err(error) = reader
            .wait_for_record()
            .and_then(|packed_record| write_unpacked(packed_record, &mut engine))
        {
            return error;
        }
    }
}

/// Writes the data of a packed record to `output`.
fn write_unpacked(packed_record: &[u8], output: &mut impl Write) -> std::io::Result<()> {
    for part in zeros::parts(packed_record) {
        match part.map_err(|_| {
            std::io::Error::new(ErrorKind::InvalidData, "received a malformed piece")
        })? {
            Part::Bytes(bytes) => output.write_all(bytes)?,
            Part::Zeros(mut remaining_bytes) => {
                while remaining_bytes > 0 {
                    let chunk_bytes = remaining_bytes.min(ZERO_BYTES.len());
                    output.write_all(&ZERO_BYTES[..chunk_bytes])?;
                    remaining_bytes -= chunk_bytes;
                }
            }
        }
    }
    Ok(())
}
