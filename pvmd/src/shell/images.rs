//! Transfers of checkpoint images between daemons.
//!
//! A stream of the session announces each transfer and stays open as long as it lasts. The images
//! travel as pieces of files ([`super::image_transfer`]) over a connection of their own
//! ([`super::bulk_tcp`], [`super::bulk_fallback`]). Reading, encryption and writing run on blocking
//! threads, so the daemon's loop never waits for a disk.

use super::bulk_fallback::BulkFallbacks;
use super::bulk_tcp::{BulkConnection, BulkListener, ConnectionOffer, RecordReader, RecordWriter};
use super::image_transfer::{DirState, Sender, SentAmounts, SharedDirState, receive};
use super::input::{Input, InputSender};
use super::net::Net;
use super::rate_limit::RateLimit;
use super::runtime_dir::remove_images;
use super::session::{StreamPurpose, open_announcement, read_frame};
use super::session_input::{BulkContent, SessionContext, TransferAnnouncement};
use super::sys::PriorityBoost;
use pvmd_machine::io::Event;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::migration::Failure;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::{HostId, MigrationId};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::sleep;
use tracing::{Instrument, info_span};

/// Code with which a stream is refused or aborted.
const STREAM_REFUSED: VarInt = VarInt::from_u32(1);
/// Delay before a target makes the source stop: the target's own reason for the failure must be
/// handled first.
const REFUSE_DELAY: Duration = Duration::from_secs(2);

/// Number of times freed memory is returned to the kernel after a transfer: its threads may end a
/// little later than the transfer.
const HEAP_TRIMS_AFTER_TRANSFER: u8 = 2;

#[derive(Debug)]
struct Transfer {
    /// The task that serves the stream; `None` for work on this host only.
    stream: Option<AbortHandle>,
    /// Thread that reads or writes the files; ends soon after the stream.
    worker_thread: JoinHandle<()>,
    /// State of the directory if it is sent while it is being written; `None` when it is complete.
    growing_dir: Option<Arc<SharedDirState>>,
    /// True if all data has arrived. The stream ends when the source has received the confirmation.
    all_received: Arc<AtomicBool>,
}

/// The two directions of a transfer's connection, passed to its thread.
type TransferConnection = (RecordWriter<BulkConnection>, RecordReader<BulkConnection>);
/// Function that waits until the connection is established, and returns it.
type AwaitConnection = Box<dyn FnOnce() -> Result<TransferConnection, Failure>>;
/// Function that receives the data of a transfer and returns its size in bytes.
type ReceiveFn = Box<dyn FnOnce(&mut RecordReader<BulkConnection>) -> Result<u64, Failure> + Send>;
/// Delivers the result of a transfer from its thread.
type ResultReceiver<T> = oneshot::Receiver<Result<T, Failure>>;

/// Aborts the work of a transfer when dropped.
#[derive(Default)]
struct AbortGuard {
    dir_state: Option<Arc<SharedDirState>>,
    connection: Option<BulkConnection>,
}

impl Drop for AbortGuard {
    fn drop(&mut self) {
        if let Some(progress) = &self.dir_state {
            progress.set(DirState::Dropped);
        }
        if let Some(line) = &self.connection {
            line.abort();
        }
    }
}

/// All transfers of this host. Owned by the daemon's loop.
pub(crate) struct ImageTransfers {
    paths: RuntimePaths,
    inputs: InputSender,
    rate: Arc<RateLimit>,
    bulk_fallbacks: BulkFallbacks,
    /// Host that sends the images, and function that receives them, by migration.
    expected: HashMap<MigrationId, (HostId, ReceiveFn)>,
    transfers: HashMap<MigrationId, Transfer>,
    /// Number of times freed memory must still be returned to the kernel.
    pending_heap_trims: u8,
}

impl ImageTransfers {
    /// Creates a state without transfers. `rate` limits the rate at which this host sends.
    pub(crate) fn new(
        place: RuntimePaths,
        inputs: InputSender,
        rate: Arc<RateLimit>,
        bulk_fallbacks: BulkFallbacks,
    ) -> ImageTransfers {
        let (expected, transfers) = (HashMap::new(), HashMap::new());
        ImageTransfers {
            paths: place,
            inputs,
            rate,
            bulk_fallbacks,
            expected,
            transfers,
            pending_heap_trims: 0,
        }
    }

    /// Returns true if freed memory must be returned to the kernel: [`HEAP_TRIMS_AFTER_TRANSFER`]
    /// times after the last transfer. Polled by the loop.
    pub(crate) fn should_trim_heap(&mut self) -> bool {
        let must_trim = self.transfers.is_empty() && self.pending_heap_trims > 0;
        self.pending_heap_trims -= u8::from(must_trim);
        must_trim
    }

    fn register(&mut self, migration: MigrationId, transfer: Transfer) {
        self.pending_heap_trims = HEAP_TRIMS_AFTER_TRANSFER;
        self.transfers.insert(migration, transfer);
    }

    /// Starts to send the images of a migration while they are being written; a later
    /// [`ImageTransfers::send`] marks them as complete.
    pub(crate) fn start_streaming(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        self.start_sending_dir(migration, to, net, DirState::Growing, |_| Ok(()));
    }

    /// Sends the images of a migration, or the part of them not sent yet. Reports
    /// [`Event::ImagesSent`].
    pub(crate) fn send(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        match self
            .transfers
            .get_mut(&migration)
            .and_then(|transfer| transfer.growing_dir.take())
        {
            Some(progress) => progress.set(DirState::Complete),
            None => self.start_sending_dir(migration, to, net, DirState::Complete, |_| Ok(())),
        }
    }

    /// Runs `complete`, which adds the last files to the directory, then sends the images as
    /// [`ImageTransfers::send`] does. Without a destination host, reports [`Event::ImagesReceived`]
    /// on this host instead.
    pub(crate) fn complete_and_send(
        &mut self,
        migration: MigrationId,
        to: Option<HostId>,
        net: &mut Net,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        match to {
            Some(to) => self.start_sending_dir(migration, to, net, DirState::Complete, complete),
            None => self.complete_locally(migration, complete),
        }
    }

    fn start_sending_dir(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &mut Net,
        state: DirState,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        let dir = self.paths.image_dir(migration);
        self.start_sending(migration, to, net, state, move |came, progress, rate| {
            complete(&dir)?;
            let (out, back) = came()?;
            Sender::new(&dir, out, rate)
                .send(progress)
                .map(|sent| (sent, back))
        });
    }

    /// Sends a checkpoint to the store of another host. Reports [`Event::ImagesSent`].
    pub(crate) fn send_copy(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &mut Net,
        send: impl FnOnce(RecordWriter<BulkConnection>, &RateLimit) -> Result<SentAmounts, Failure>
        + Send
        + 'static,
    ) {
        self.start_sending(
            migration,
            to,
            net,
            DirState::Complete,
            move |came, _, rate| {
                let (out, back) = came()?;
                send(out, rate).map(|sent| (sent, back))
            },
        );
    }

    /// Starts a transfer. `work` runs on a thread: it waits for the connection, sends everything
    /// over it, and returns the receiving direction.
    fn start_sending(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &mut Net,
        state: DirState,
        work: impl FnOnce(
            AwaitConnection,
            &SharedDirState,
            &RateLimit,
        ) -> Result<(SentAmounts, RecordReader<BulkConnection>), Failure>
        + Send
        + 'static,
    ) {
        let progress = Arc::new(SharedDirState::default());
        progress.set(state);
        let (connection_sender, connection_receiver) = oneshot::channel::<TransferConnection>();
        let (result_sender, result_receiver) = oneshot::channel();
        let (thread_progress, rate) = (progress.clone(), self.rate.clone());
        let span = info_span!("migration", id = %migration);
        let thread_span = span.clone();
        let worker_thread = tokio::task::spawn_blocking(move || {
            let _in_span = thread_span.entered();
            let _hurry = PriorityBoost::start();
            let connection_receiver: AwaitConnection = Box::new(move || {
                connection_receiver
                    .blocking_recv()
                    .map_err(|_| Failure::Cancelled("the transfer was aborted".into()))
            });
            let _ = result_sender.send(
                work(connection_receiver, &thread_progress, &rate).and_then(|(sent, mut back)| {
                    let taken = back.next().map_err(|e| {
                        Failure::Images(format!("the target did not accept them: {e}"))
                    });
                    taken.map(|_| sent)
                }),
            );
        });
        let pending_session = net.await_session(to);
        let (inputs, fallbacks) = (self.inputs.clone(), self.bulk_fallbacks.clone());
        let early_bytes = (state == DirState::Growing).then(|| progress.clone());
        let abort_guard = AbortGuard {
            dir_state: Some(progress),
            connection: None,
        };
        let work = async move {
            let begin = Instant::now();
            let result = match pending_session.session().await {
                Err(why) => Err(why),
                Ok(session) => {
                    serve_sending(
                        session,
                        &fallbacks,
                        migration,
                        connection_sender,
                        result_receiver,
                        abort_guard,
                    )
                    .await
                }
            };
            if let Ok(sent) = &result {
                log_sent_images(migration, to, sent, begin.elapsed());
            }
            let result = result.map(|sent| sent.bytes);
            let _ = inputs
                .send(Input::Event(Event::ImagesSent { migration, result }))
                .await;
        };
        let stream = tokio::spawn(work.instrument(span));
        let all_received = Arc::default();
        self.register(
            migration,
            Transfer {
                stream: Some(stream.abort_handle()),
                worker_thread,
                growing_dir: early_bytes,
                all_received,
            },
        );
    }

    fn complete_locally(
        &mut self,
        migration: MigrationId,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        let (dir, inputs) = (self.paths.image_dir(migration), self.inputs.clone());
        let worker_thread = tokio::task::spawn_blocking(move || {
            let _in_span = info_span!("migration", id = %migration).entered();
            let result = complete(&dir).map(|()| 0);
            let _ = inputs.blocking_send(Input::Event(Event::ImagesReceived { migration, result }));
        });
        self.register(
            migration,
            Transfer {
                stream: None,
                worker_thread,
                growing_dir: None,
                all_received: Arc::default(),
            },
        );
    }

    /// Accepts the images of this migration from the host `from`.
    pub(crate) fn expect(&mut self, migration: MigrationId, from: HostId) {
        let dir = self.paths.image_dir(migration);
        self.expect_into(migration, from, move |incoming| receive(&dir, incoming));
    }

    /// Accepts the transfer with this migration's id from the host `from`, and receives it with
    /// `take`.
    pub(crate) fn expect_into(
        &mut self,
        migration: MigrationId,
        from: HostId,
        take: impl FnOnce(&mut RecordReader<BulkConnection>) -> Result<u64, Failure> + Send + 'static,
    ) {
        self.expected.insert(migration, (from, Box::new(take)));
    }

    /// True if the host `from` is expected to send images of this migration.
    #[cfg(test)]
    pub(crate) fn expects(&self, migration: MigrationId, from: HostId) -> bool {
        self.expected
            .get(&migration)
            .is_some_and(|(expected, _)| *expected == from)
    }

    /// Starts to receive announced images if they are expected. Reports [`Event::ImagesReceived`].
    pub(crate) fn on_announcement(
        &mut self,
        TransferAnnouncement {
            context: pair,
            migration,
            session,
            mut stream,
            decoder,
        }: TransferAnnouncement,
    ) {
        let from = pair.host;
        let take = match self.expected.entry(migration) {
            Entry::Occupied(expected) if expected.get().0 == from => expected.remove().1,
            // An announcement by another host must not displace the expected one.
            _ => {
                tracing::warn!("refused images of {migration} from {from}: they are not expected");
                let _ = stream.stop(STREAM_REFUSED);
                return;
            }
        };
        let (way, came) = oneshot::channel::<TransferConnection>();
        let (tell, told) = oneshot::channel();
        let span = info_span!("migration", id = %migration);
        let thread_span = span.clone();
        let worker_thread = tokio::task::spawn_blocking(move || {
            let _in_span = thread_span.entered();
            let _hurry = PriorityBoost::start();
            let Ok((mut out, mut incoming)) = came.blocking_recv() else {
                return;
            };
            let received = take(&mut incoming).and_then(|bytes| {
                let unsaid =
                    |e| Failure::Images(format!("cannot confirm the images to the source: {e}"));
                out.send_proof().map(|()| bytes).map_err(unsaid)
            });
            let _ = tell.send(received);
        });
        let (inputs, detours) = (self.inputs.clone(), self.bulk_fallbacks.clone());
        let all_received = Arc::new(AtomicBool::new(false));
        let is_received = all_received.clone();
        let work = async move {
            let mut hold = AbortGuard::default();
            let session = (&pair, &session);
            let result = serve_receiving(
                session,
                &detours,
                migration,
                (&mut stream, decoder),
                way,
                told,
                &mut hold,
            )
            .await;
            let result = result.map_err(|failure| match failure {
                Failure::Images(why) => Failure::Images(format!("from {from}: {why}")),
                other => other,
            });
            let failed = result.is_err();
            is_received.store(!failed, Ordering::Release);
            let _ = inputs
                .send(Input::Event(Event::ImagesReceived { migration, result }))
                .await;
            if !failed {
                // The stream ends when the source has received the confirmation; dropping it
                // earlier would be a refusal.
                let _ = stream.read_chunk(1, true).await;
            } else {
                // The source would only report that it cannot continue. The reason is known on this
                // host and must be handled first. Its handler drops this transfer, and the stream
                // and connection with it.
                sleep(REFUSE_DELAY).await;
                let _ = stream.stop(STREAM_REFUSED);
            }
        };
        let task = tokio::spawn(work.instrument(span));
        self.register(
            migration,
            Transfer {
                stream: Some(task.abort_handle()),
                worker_thread,
                growing_dir: None,
                all_received,
            },
        );
    }

    /// Aborts a transfer and removes the images. The returned task ends when nothing is written any
    /// more.
    pub(crate) fn drop_images(&mut self, migration: MigrationId) -> JoinHandle<()> {
        self.expected.remove(&migration);
        let transfer = self.transfers.remove(&migration);
        let dir = self.paths.image_dir(migration);
        tokio::spawn(async move {
            if let Some(Transfer {
                stream,
                worker_thread,
                all_received,
                ..
            }) = transfer
            {
                // A complete transfer is not aborted: the images may become unneeded here before
                // the source has the confirmation.
                if let Some(stream) = stream.filter(|_| !all_received.load(Ordering::Acquire)) {
                    stream.abort();
                }
                // The thread notices that its connection is closed.
                let _ = worker_thread.await;
            }
            let _ = tokio::task::spawn_blocking(move || remove_images(&dir)).await;
        })
    }
}

/// Announces images, accepts the connection of the other host and waits until the thread has sent
/// everything.
async fn serve_sending(
    (pair, session): (SessionContext, Connection),
    fallbacks: &BulkFallbacks,
    migration: MigrationId,
    connection_sender: oneshot::Sender<TransferConnection>,
    mut result_receiver: ResultReceiver<SentAmounts>,
    mut abort_guard: AbortGuard,
) -> Result<SentAmounts, Failure> {
    let to = pair.host;
    let failed = |why: &dyn std::fmt::Display| Failure::Images(format!("{to}: {why}"));
    let listener = BulkListener::open().await.map_err(|e| failed(&e))?;
    let offer = encode_control(listener.offer()).map_err(|e| failed(&e))?;
    let expected = fallbacks.expect_stream(to, migration, BulkContent::Images);
    let opened = open_announcement(&pair, &session, StreamPurpose::Images(migration)).await;
    let mut stream = opened.map_err(|why| failed(&why))?;
    stream.write_chunk(offer).await.map_err(|e| failed(&e))?;
    let result = async {
        let (out, back) = tokio::select! {
            accepted = expected.accept(&session, migration, listener) => {
                let (out, back, line) = accepted.map_err(|e| failed(&e))?;
                abort_guard.connection = Some(line);
                (out, back)
            }
            result = &mut result_receiver => return thread_result(result),
            why = await_refusal(&stream) => return Err(why),
        };
        // A thread that has ended reports the reason as its result.
        let _ = connection_sender.send((out, back));
        tokio::select! {
            biased;
            result = &mut result_receiver => thread_result(result),
            why = await_refusal(&stream) => Err(why),
        }
    }
    .await;
    let _ = if result.is_ok() {
        stream.finish()
    } else {
        stream.reset(STREAM_REFUSED)
    };
    result
}

fn thread_result<T>(
    received: Result<Result<T, Failure>, oneshot::error::RecvError>,
) -> Result<T, Failure> {
    received.unwrap_or_else(|_| {
        Err(Failure::Images(
            "the thread that works on them ended".into(),
        ))
    })
}

/// Waits until the target refuses the images or the session is lost.
async fn await_refusal(stream: &SendStream) -> Failure {
    match stream.stopped().await {
        Ok(_) => Failure::Images("the target refused them".into()),
        Err(e) => Failure::Images(format!("the session broke: {e}")),
    }
}

/// Connects to the source and waits until the thread has written everything that arrives.
async fn serve_receiving(
    session: (&SessionContext, &Connection),
    fallbacks: &BulkFallbacks,
    migration: MigrationId,
    (stream, mut decoder): (&mut RecvStream, FrameDecoder),
    connection_sender: oneshot::Sender<TransferConnection>,
    mut result_receiver: ResultReceiver<u64>,
    abort_guard: &mut AbortGuard,
) -> Result<u64, Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::Images(why.to_string());
    let frame = read_frame(stream, &mut decoder)
        .await
        .map_err(|why| failed(&why))?;
    let offer: ConnectionOffer = frame
        .ok_or_else(|| failed(&"nothing was announced"))?
        .decode_control()
        .map_err(|e| failed(&e))?;
    let connected = fallbacks
        .connect(session, (migration, BulkContent::Images), &offer)
        .await;
    let (out, incoming, line) =
        connected.map_err(|e| failed(&format!("no connection to it: {e}")))?;
    abort_guard.connection = Some(line);
    let _ = connection_sender.send((out, incoming));
    tokio::select! {
        result = &mut result_receiver => thread_result(result),
        ended = read_frame(stream, &mut decoder) => match ended {
            // The source has received the confirmation or has aborted; the thread's result shows
            // which.
            Ok(None) => thread_result(result_receiver.await),
            Ok(Some(_)) => Err(failed(&"it sent unexpected data")),
            Err(why) => Err(failed(&why)),
        },
    }
}

fn log_sent_images(migration: MigrationId, to: HostId, sent: &SentAmounts, took: Duration) {
    let SentAmounts {
        bytes,
        early_bytes,
        wire_bytes,
        void_bytes,
    } = sent;
    let took = took.as_millis();
    tracing::info!(
        "{migration}: sent {bytes} bytes of images to {to} in {took} ms, {early_bytes} of them during the dump; \
         {wire_bytes} bytes on the wire without zeros; {void_bytes} bytes discarded after restarts"
    );
}
