//! Post-copy memory transfers between daemons.
//!
//! A transfer has a connection of its own ([`super::bulk_tcp`]). At each end the tasker's engine
//! reads and writes through a socket of the daemon; the daemons do not interpret the engines'
//! protocol.
//!
//! The target's engine closes its socket when it has fetched everything. If the connection ends
//! earlier, the target's daemon reports [`Event::MemoryLost`] and keeps the socket open: the task
//! that needs the memory must be dead before the engine sees the end of its stream.

use super::bulk_fallback::BulkFallbacks;
use super::bulk_tcp::{BulkConnection, BulkListener, ConnectionOffer, RecordReader, RecordWriter};
use super::input::{Input, InputSender};
use super::net::Net;
use super::rate_limit::RateLimit;
use super::runtime_dir::remove_recursively;
use super::session::{StreamPurpose, open_announcement, read_frame};
use super::session_input::{BulkContent, TransferAnnouncement};
use super::sys::{PriorityBoost, unread_by_peer};
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

/// Time without data from an engine after which an empty record is sent, so that the other host
/// sees that this end is alive.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time for which the connection stays open after the source's engine has ended: the target's
/// engine may not have read its last data and closed yet. Also the time for which the target waits
/// for its engine to close after the engine has read everything.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of bytes read from an engine at once.
const READ_BYTES: usize = zeros::PLAIN_BYTES_MAX;
/// Written to the engine in place of counted runs of zeros.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// One transfer, from this host or to it.
#[derive(Debug)]
struct MemoryTransfer {
    remote_host: HostId,
    task: JoinHandle<()>,
    /// The connection, once both ends are established. The transfer then ends by closing, or when
    /// the connection is aborted.
    connection: Arc<Mutex<Option<BulkConnection>>>,
}

/// All memory transfers of this host. Owned by the daemon's loop.
pub(crate) struct MemoryTransfers {
    paths: RuntimePaths,
    inputs: InputSender,
    rate: Arc<RateLimit>,
    bulk_fallbacks: BulkFallbacks,
    expected: HashMap<MigrationId, (HostId, UnixListener)>,
    transfers: HashMap<MigrationId, MemoryTransfer>,
}

impl MemoryTransfers {
    /// Creates a state without transfers. `rate` limits the rate at which this host sends.
    pub(crate) fn new(
        place: RuntimePaths,
        inputs: InputSender,
        rate: Arc<RateLimit>,
        bulk_fallbacks: BulkFallbacks,
    ) -> MemoryTransfers {
        MemoryTransfers {
            paths: place,
            inputs,
            rate,
            bulk_fallbacks,
            expected: HashMap::new(),
            transfers: HashMap::new(),
        }
    }

    /// On the source: transfers the memory that the tasker serves to the target.
    pub(crate) fn serve(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        let Some(tasker) = self.listen(migration) else {
            return;
        };
        let session = net.await_session(to);
        let (line, rate_limit) = (
            Arc::<Mutex<Option<BulkConnection>>>::default(),
            self.rate.clone(),
        );
        let (shared_line, fallbacks) = (line.clone(), self.bulk_fallbacks.clone());
        let work = async move {
            let failed = |why: &dyn std::fmt::Display| {
                format!("{migration}: no connection for its memory to {to}: {why}")
            };
            let opened = async {
                let (pair, session) = session.session().await.map_err(|e| failed(&e))?;
                let listener = BulkListener::open().await.map_err(|e| failed(&e))?;
                let expected = fallbacks.expect_stream(to, migration, BulkContent::Memory);
                let offer = encode_control(listener.offer()).map_err(|e| failed(&e))?;
                let opened =
                    open_announcement(&pair, &session, StreamPurpose::Memory(migration)).await;
                let mut stream = opened.map_err(|e| failed(&e))?;
                stream.write_chunk(offer).await.map_err(|e| failed(&e))?;
                // The target reads only one frame.
                let _ = stream.finish();
                expected
                    .accept(&session, migration, listener)
                    .await
                    .map_err(|e| failed(&e))
            };
            let (engine, opened) = tokio::join!(tasker.accept(), opened);
            let ends = engine.map_err(|e| failed(&e)).and_then(|(engine, _)| {
                Ok((into_blocking(engine).map_err(|e| e.to_string())?, opened?))
            });
            match ends {
                Ok((engine, (out, incoming, line))) => {
                    *lock(&shared_line) = Some(line.clone());
                    serve_memory(engine, out, incoming, line, rate_limit).await;
                    // Closes the descriptor now instead of at the next transfer.
                    *lock(&shared_line) = None;
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
                connection: line,
            },
        );
    }

    /// On the target: lets the tasker request memory, which the host `from` will send.
    pub(crate) fn expect(&mut self, migration: MigrationId, from: HostId) {
        if let Some(tasker) = self.listen(migration) {
            self.expected.insert(migration, (from, tasker));
        }
    }

    /// On the target: connects to the source if its announcement is expected.
    pub(crate) fn on_announcement(&mut self, mut announced: TransferAnnouncement) {
        let (from, migration) = (announced.context.host, announced.migration);
        let Some((_, tasker)) = self
            .expected
            .remove(&migration)
            .filter(|(host, _)| *host == from)
        else {
            return tracing::warn!("refused memory of {migration} from {from}: it is not expected");
        };
        let line = Arc::<Mutex<Option<BulkConnection>>>::default();
        let (shared_line, inputs) = (line.clone(), self.inputs.clone());
        let fallbacks = self.bulk_fallbacks.clone();
        let work = async move {
            let failed = |why: &dyn std::fmt::Display| {
                format!("{migration}: no connection to its memory on {from}: {why}")
            };
            let opened = async {
                let frame = read_frame(&mut announced.stream, &mut announced.decoder)
                    .await
                    .map_err(|e| failed(&e))?;
                let frame = frame.ok_or_else(|| failed(&"nothing was announced"))?;
                let offer: ConnectionOffer = frame.decode_control().map_err(|e| failed(&e))?;
                let session = (&announced.context, &announced.session);
                fallbacks
                    .connect(session, (migration, BulkContent::Memory), &offer)
                    .await
                    .map_err(|e| failed(&e))
            };
            let ends = match opened.await {
                Ok(opened) => {
                    let engine = tasker.accept().await.map_err(|e| failed(&e));
                    engine.and_then(|(engine, _)| {
                        Ok((into_blocking(engine).map_err(|e| e.to_string())?, opened))
                    })
                }
                Err(why) => Err(why),
            };
            match ends {
                Ok((engine, (out, incoming, line))) => {
                    *lock(&shared_line) = Some(line.clone());
                    let lost = move |why| {
                        // A send error means that the loop has ended; the report is not needed
                        // then.
                        let _ = inputs
                            .blocking_send(Input::Event(Event::MemoryLost { migration, why }));
                    };
                    fetch_memory(engine, out, incoming, line, lost).await;
                    *lock(&shared_line) = None;
                }
                Err(why) => tracing::warn!("{why}"),
            }
        };
        let span = info_span!("migration", id = %migration);
        let task = tokio::spawn(work.instrument(span));
        self.register(
            migration,
            MemoryTransfer {
                remote_host: from,
                task,
                connection: line,
            },
        );
    }

    /// Ends a transfer that no engine has begun to use, after the end or failure of the migration
    /// on this host.
    pub(crate) fn abort_unused(&mut self, migration: MigrationId) {
        self.expected.remove(&migration);
        if let Some(way) = self
            .transfers
            .get(&migration)
            .filter(|way| lock(&way.connection).is_none())
        {
            way.task.abort();
        }
        remove_recursively(&self.paths.memory_socket(migration));
    }

    /// Aborts all transfers with a lost host.
    pub(crate) fn on_host_lost(&mut self, host: HostId) {
        for transfer in self
            .transfers
            .values()
            .filter(|transfer| transfer.remote_host == host)
        {
            match &*lock(&transfer.connection) {
                Some(line) => line.abort(),
                None => transfer.task.abort(),
            }
        }
    }

    fn listen(&self, migration: MigrationId) -> Option<UnixListener> {
        let path = self.paths.memory_socket(migration);
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

fn lock(line: &Mutex<Option<BulkConnection>>) -> std::sync::MutexGuard<'_, Option<BulkConnection>> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The socket of the engine was closed.
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

/// On the source: forwards data in both directions until either end has closed.
async fn serve_memory(
    engine: UnixStream,
    out: RecordWriter<BulkConnection>,
    incoming: RecordReader<BulkConnection>,
    line: BulkConnection,
    rate: Arc<RateLimit>,
) {
    let Ok(request_socket) = engine.try_clone() else {
        return line.abort();
    };
    let closed = Arc::new(AtomicBool::new(false));
    let has_closed = closed.clone();
    let reply_thread = spawn_blocking(move || {
        let boost = PriorityBoost::start();
        forward_from_engine(engine, out, |bytes| rate.wait(bytes));
        drop(boost);
        let until = Instant::now() + CLOSE_TIMEOUT;
        while !closed.load(Ordering::Acquire) && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
        line.abort();
    });
    let request_thread = spawn_blocking(move || {
        let _hurry = PriorityBoost::start();
        let _why = forward_to_engine(incoming, &request_socket);
        has_closed.store(true, Ordering::Release);
        // No further requests will arrive.
        let _ = request_socket.shutdown(Shutdown::Both);
    });
    let _ = tokio::join!(reply_thread, request_thread);
}

/// On the target: forwards data in both directions until the engine has closed its end. Calls
/// `lost` with the reason if the connection ends earlier.
async fn fetch_memory(
    engine: UnixStream,
    out: RecordWriter<BulkConnection>,
    incoming: RecordReader<BulkConnection>,
    line: BulkConnection,
    lost: impl FnOnce(String) + Send + 'static,
) {
    let Ok(reply_socket) = engine.try_clone() else {
        return line.abort();
    };
    let closed = Arc::new(AtomicBool::new(false));
    let has_closed = closed.clone();
    let request_thread = spawn_blocking(move || {
        let _hurry = PriorityBoost::start();
        forward_from_engine(engine, out, |_| ());
        has_closed.store(true, Ordering::Release);
        line.abort();
    });
    let reply_thread = spawn_blocking(move || {
        let _hurry = PriorityBoost::start();
        let why = forward_to_engine(incoming, &reply_socket);
        // An engine that is not scheduled or is stopped may have unread data: its time begins when
        // it has read all of it.
        let mut last_unread = Instant::now();
        while !closed.load(Ordering::Acquire) && last_unread.elapsed() < CLOSE_TIMEOUT {
            std::thread::sleep(POLL_INTERVAL);
            if unread_by_peer(&reply_socket) > 0 {
                last_unread = Instant::now();
            }
        }
        if !closed.load(Ordering::Acquire) {
            lost(format!("the rest of its memory cannot be fetched: {why}"));
        }
        // Returned so that the engine's socket stays open until the other thread has seen the
        // engine close it.
        reply_socket
    });
    let _ = tokio::join!(request_thread, reply_thread);
}

/// Forwards an engine's data to the other host until the engine closes its end or the connection is
/// lost. Calls `wait` with the size of each piece before it is sent.
fn forward_from_engine(
    mut engine: UnixStream,
    mut out: RecordWriter<BulkConnection>,
    wait: impl Fn(usize),
) {
    let mut bytes = vec![0; READ_BYTES];
    while let Some(length) = read_engine(&mut engine, &mut bytes) {
        let fill = |room: &mut [u8]| {
            room.copy_from_slice(&bytes[..length]);
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(sent) = out.send_packed(&[], length, fill, &wait);
        if sent.is_err() {
            // The engine's output must be read to the end: otherwise the engine would block and not
            // notice the end.
            while read_engine(&mut engine, &mut bytes).is_some() {}
            return;
        }
    }
}

/// Reads from an engine and returns the number of bytes: 0 after [`KEEP_ALIVE_INTERVAL`] without
/// data, `None` at the end of the stream.
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

/// Forwards data of the other host to an engine, and returns the error that ended the forwarding.
fn forward_to_engine(
    mut incoming: RecordReader<BulkConnection>,
    mut engine: &UnixStream,
) -> std::io::Error {
    loop {
        if let Err(why) = incoming
            .next()
            .and_then(|packed| unpack(packed, &mut engine))
        {
            return why;
        }
    }
}

/// Writes the data of a packed record.
fn unpack(packed: &[u8], to: &mut impl Write) -> std::io::Result<()> {
    for part in zeros::parts(packed) {
        match part.map_err(|_| {
            std::io::Error::new(ErrorKind::InvalidData, "received a malformed piece")
        })? {
            Part::Bytes(bytes) => to.write_all(bytes)?,
            Part::Zeros(mut count) => {
                while count > 0 {
                    let some = count.min(ZEROS.len());
                    to.write_all(&ZEROS[..some])?;
                    count -= some;
                }
            }
        }
    }
    Ok(())
}
