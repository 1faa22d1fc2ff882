//! Transfers of checkpoint images between daemons.
//!
//! A stream of the session announces each transfer and stays open until the transfer ends. The
//! images are sent as pieces of files ([`super::image_transfer`]) over a separate connection
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
use super::transfer_counters::TransferCounters;
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

/// Error code with which a stream is refused or aborted.
const STREAM_REFUSED_CODE: VarInt = VarInt::from_u32(1);
/// Delay before a target stops the source. During the delay, the target's own report of the failure
/// is handled first; it contains the reason.
const REFUSE_DELAY: Duration = Duration::from_secs(2);

/// Number of times that freed memory is returned to the kernel after a transfer. One time is not
/// enough, because the threads of a transfer may end a little later than the transfer.
const HEAP_TRIMS_AFTER_TRANSFER: u8 = 2;

#[derive(Debug)]
struct Transfer {
    /// The tokio task that serves the stream; `None` if the work is on this host only.
    stream: Option<AbortHandle>,
    /// Thread that reads or writes the files. The thread ends soon after the stream has ended.
    worker_thread: JoinHandle<()>,
    /// State of the directory if it is sent while it is being written; `None` if the directory was
    /// complete at the start.
    growing_dir: Option<Arc<SharedDirState>>,
    /// True if all data has arrived. The stream then ends when the source has received the
    /// confirmation of the target.
    is_all_received: Arc<AtomicBool>,
}

/// The writer and the reader of a transfer's connection, which are passed to the transfer's thread.
type TransferConnection = (RecordWriter<BulkConnection>, RecordReader<BulkConnection>);
/// Function that waits until the connection is established, and returns the connection.
type AwaitConnectionFn = Box<dyn FnOnce() -> Result<TransferConnection, Failure>>;
/// Function that receives the data of a transfer and returns its size in bytes.
type ReceiveFn = Box<dyn FnOnce(&mut RecordReader<BulkConnection>) -> Result<u64, Failure> + Send>;
/// Receives the result of a transfer from the transfer's thread.
type ResultReceiver<T> = oneshot::Receiver<Result<T, Failure>>;

/// Aborts the work of a transfer when dropped.
#[derive(Default)]
struct AbortGuard {
    dir_state: Option<Arc<SharedDirState>>,
    connection: Option<BulkConnection>,
}

impl Drop for AbortGuard {
    fn drop(&mut self) {
        if let Some(dir_state) = &self.dir_state {
            dir_state.set_state(DirState::Dropped);
        }
        if let Some(connection) = &self.connection {
            connection.abort();
        }
    }
}

/// All transfers of this host. Owned by the daemon's loop.
pub(crate) struct ImageTransfers {
    paths: RuntimePaths,
    inputs: InputSender,
    rate: Arc<RateLimit>,
    bulk_fallbacks: BulkFallbacks,
    counters: TransferCounters,
    /// Expected transfers by migration: the host that sends the images, and the function that
    /// receives them.
    expected_transfers: HashMap<MigrationId, (HostId, ReceiveFn)>,
    transfers: HashMap<MigrationId, Transfer>,
    /// Number of times that freed memory is still to be returned to the kernel.
    pending_heap_trims: u8,
}

impl ImageTransfers {
    /// Creates a state without transfers. `rate` limits the rate at which this host sends data.
    pub(crate) fn new(
        paths: RuntimePaths,
        inputs: InputSender,
        rate: Arc<RateLimit>,
        bulk_fallbacks: BulkFallbacks,
        counters: TransferCounters,
    ) -> Self {
        let (expected_transfers, transfers) = (HashMap::new(), HashMap::new());
        Self {
            paths,
            inputs,
            rate,
            bulk_fallbacks,
            counters,
            expected_transfers,
            transfers,
            pending_heap_trims: 0,
        }
    }

    /// Returns true if the caller must return freed memory to the kernel. The result is true in
    /// [`HEAP_TRIMS_AFTER_TRANSFER`] calls after the last transfer. The loop calls this function
    /// regularly.
    pub(crate) fn should_trim_heap(&mut self) -> bool {
        let must_trim = self.transfers.is_empty() && self.pending_heap_trims > 0;
        self.pending_heap_trims -= u8::from(must_trim);
        must_trim
    }

    fn register(&mut self, migration: MigrationId, transfer: Transfer) {
        self.pending_heap_trims = HEAP_TRIMS_AFTER_TRANSFER;
        self.transfers.insert(migration, transfer);
    }

    /// Starts to send the images of a migration while they are being written. A later call of
    /// [`ImageTransfers::send_images`] marks the images as complete.
    pub(crate) fn start_streaming(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        self.start_sending_dir(migration, to, net, DirState::Growing, |_| Ok(()));
    }

    /// Marks the images of a migration as complete and sends all images that were not sent yet.
    /// Reports [`Event::ImagesSent`].
    pub(crate) fn send_images(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        match self
            .transfers
            .get_mut(&migration)
            .and_then(|transfer| transfer.growing_dir.take())
        {
            Some(dir_state) => dir_state.set_state(DirState::Complete),
            None => self.start_sending_dir(migration, to, net, DirState::Complete, |_| Ok(())),
        }
    }

    /// Runs `complete`, which adds the last files to the directory, and then sends the images to
    /// the host `to`. Reports [`Event::ImagesSent`]. If `to` is `None`, sends nothing and reports
    /// [`Event::ImagesReceived`] on this host.
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
        let counter = self.counters.counter(migration);
        self.start_sending(
            migration,
            to,
            net,
            state,
            move |await_connection, dir_state, rate| {
                complete(&dir)?;
                let (writer, reader) = await_connection()?;
                Sender::new(&dir, writer, rate)
                    .with_counter(counter)
                    .send(dir_state)
                    .map(|sent_amounts| (sent_amounts, reader))
            },
        );
    }

    /// Sends a checkpoint with the function `send` to the store of the host `to`. Reports
    /// [`Event::ImagesSent`].
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
            move |await_connection, _, rate| {
                let (writer, reader) = await_connection()?;
                send(writer, rate).map(|sent_amounts| (sent_amounts, reader))
            },
        );
    }

    /// Starts a transfer. `work` runs on a thread: it waits for the connection, sends all data over
    /// the connection, and returns the sent amounts and the reader of the connection. Reports
    /// [`Event::ImagesSent`].
    fn start_sending(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &mut Net,
        state: DirState,
        work: impl FnOnce(
            AwaitConnectionFn,
            &SharedDirState,
            &RateLimit,
        ) -> Result<(SentAmounts, RecordReader<BulkConnection>), Failure>
        + Send
        + 'static,
    ) {
        let dir_state = Arc::new(SharedDirState::default());
        dir_state.set_state(state);
        let (connection_sender, await_connection) = oneshot::channel::<TransferConnection>();
        let (result_sender, result_receiver) = oneshot::channel();
        let (thread_dir_state, rate) = (dir_state.clone(), self.rate.clone());
        let span = info_span!("migration", id = %migration);
        let thread_span = span.clone();
        let worker_thread = tokio::task::spawn_blocking(move || {
            let _in_span = thread_span.entered();
            let _priority_boost = PriorityBoost::start();
            let await_connection: AwaitConnectionFn = Box::new(move || {
                await_connection
                    .blocking_recv()
                    .map_err(|_| Failure::Cancelled("the transfer was aborted".into()))
            });
            let _ = result_sender.send(work(await_connection, &thread_dir_state, &rate).and_then(
                |(sent_amounts, mut reader)| {
                    let confirmation = reader.wait_for_record().map_err(|e| {
                        Failure::Images(format!("the target did not accept them: {e}"))
                    });
                    confirmation.map(|_| sent_amounts)
                },
            ));
        });
        let pending_session = net.await_session(to);
        let (inputs, fallbacks) = (self.inputs.clone(), self.bulk_fallbacks.clone());
        let growing_dir = (state == DirState::Growing).then(|| dir_state.clone());
        let abort_guard = AbortGuard {
            dir_state: Some(dir_state),
            connection: None,
        };
        let work = async move {
            let started_at = Instant::now();
            let result = match pending_session.wait_for_session().await {
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
            if let Ok(sent_amounts) = &result {
                log_sent_images(migration, to, sent_amounts, started_at.elapsed());
            }
            let result = result.map(|sent_amounts| sent_amounts.file_bytes);
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
                growing_dir,
                is_all_received: all_received,
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
                is_all_received: Arc::default(),
            },
        );
    }

    /// Registers that the host `from` will announce the images of this migration. The announced
    /// images are received into the migration's image directory.
    pub(crate) fn expect_images(&mut self, migration: MigrationId, from: HostId) {
        let dir = self.paths.image_dir(migration);
        self.expect_transfer(migration, from, move |reader| receive(&dir, reader));
    }

    /// Registers that the host `from` will announce the transfer with this migration's id. After
    /// the announcement, `receive` receives the data and returns its size in bytes.
    pub(crate) fn expect_transfer(
        &mut self,
        migration: MigrationId,
        from: HostId,
        receive: impl FnOnce(&mut RecordReader<BulkConnection>) -> Result<u64, Failure> + Send + 'static,
    ) {
        self.expected_transfers
            .insert(migration, (from, Box::new(receive)));
    }

    /// True if images of this migration are expected from the host `from`.
    #[cfg(test)]
    pub(crate) fn is_expected(&self, migration: MigrationId, from: HostId) -> bool {
        self.expected_transfers
            .get(&migration)
            .is_some_and(|(expected_host, _)| *expected_host == from)
    }

    /// Handles the announcement of images. If the images are expected from this host, starts to
    /// receive them and reports [`Event::ImagesReceived`]. Otherwise refuses the images and logs
    /// the refusal.
    pub(crate) fn on_announcement(
        &mut self,
        TransferAnnouncement {
            context: session_context,
            migration,
            session,
            mut stream,
            decoder,
        }: TransferAnnouncement,
    ) {
        let from = session_context.host;
        let take = match self.expected_transfers.entry(migration) {
            Entry::Occupied(expected) if expected.get().0 == from => expected.remove().1,
            // An announcement by another host must not replace the expected announcement.
            _ => {
                tracing::warn!("refused images of {migration} from {from}: they are not expected");
                let _ = stream.stop(STREAM_REFUSED_CODE);
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
            let session = (&session_context, &session);
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
                // The stream ends when the source has received the confirmation. Dropping the
                // stream earlier would be a refusal.
                let _ = stream.read_chunk(1, true).await;
            } else {
                // The source would only report that it cannot continue. This host knows the reason,
                // so its own report must be handled first. The handler of the report drops the
                // transfer with its stream and its connection.
                sleep(REFUSE_DELAY).await;
                let _ = stream.stop(STREAM_REFUSED_CODE);
            }
        };
        let task = tokio::spawn(work.instrument(span));
        self.register(
            migration,
            Transfer {
                stream: Some(task.abort_handle()),
                worker_thread,
                growing_dir: None,
                is_all_received: all_received,
            },
        );
    }

    /// Aborts a transfer and removes the images. A complete transfer is not aborted. The returned
    /// tokio task ends when no more data is written and the images are removed.
    pub(crate) fn drop_images(&mut self, migration: MigrationId) -> JoinHandle<()> {
        self.expected_transfers.remove(&migration);
        let transfer = self.transfers.remove(&migration);
        let dir = self.paths.image_dir(migration);
        tokio::spawn(async move {
            if let Some(Transfer {
                stream,
                worker_thread,
                is_all_received: all_received,
                ..
            }) = transfer
            {
                // A complete transfer is not aborted, because the images may become unneeded on
                // this host before the source has received the confirmation.
                if let Some(stream) = stream.filter(|_| !all_received.load(Ordering::Acquire)) {
                    stream.abort();
                }
                // The thread ends soon, because its connection is closed.
                let _ = worker_thread.await;
            }
            let _ = tokio::task::spawn_blocking(move || remove_images(&dir)).await;
        })
    }
}

/// Announces images to the target, accepts its connection, and waits until the thread has sent all
/// data. Returns the sent amounts.
async fn serve_sending(
    (context, session): (SessionContext, Connection),
    fallbacks: &BulkFallbacks,
    migration: MigrationId,
    connection_sender: oneshot::Sender<TransferConnection>,
    mut result_receiver: ResultReceiver<SentAmounts>,
    mut abort_guard: AbortGuard,
) -> Result<SentAmounts, Failure> {
    let to = context.host;
    let failure = |why: &dyn std::fmt::Display| Failure::Images(format!("{to}: {why}"));
    let listener = BulkListener::open().await.map_err(|e| failure(&e))?;
    let offer = encode_control(listener.offer()).map_err(|e| failure(&e))?;
    let expected_transfer = fallbacks.expect_stream(to, migration, BulkContent::Images);
    let open_result = open_announcement(&context, &session, StreamPurpose::Images(migration)).await;
    let mut stream = open_result.map_err(|why| failure(&why))?;
    stream.write_chunk(offer).await.map_err(|e| failure(&e))?;
    let result = async {
        let (writer, reader) = tokio::select! {
            accept_result = expected_transfer.accept(&session, migration, listener) => {
                let (writer, reader, connection) = accept_result.map_err(|e| failure(&e))?;
                abort_guard.connection = Some(connection);
                (writer, reader)
            }
            result = &mut result_receiver => return thread_result(result),
            why = await_refusal(&stream) => return Err(why),
        };
        // If the thread has ended, nobody receives the connection; the thread's result contains the
        // reason.
        let _ = connection_sender.send((writer, reader));
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
        stream.reset(STREAM_REFUSED_CODE)
    };
    result
}

fn thread_result<T>(
    receive_result: Result<Result<T, Failure>, oneshot::error::RecvError>,
) -> Result<T, Failure> {
    receive_result.unwrap_or_else(|_| {
        Err(Failure::Images(
            "the thread that works on them ended".into(),
        ))
    })
}

/// Waits until the target refuses the images or the session is lost. Returns the reason.
async fn await_refusal(stream: &SendStream) -> Failure {
    match stream.stopped().await {
        Ok(_) => Failure::Images("the target refused them".into()),
        Err(e) => Failure::Images(format!("the session broke: {e}")),
    }
}

/// Connects to the source and waits until the thread has written all data that arrives. Returns the
/// number of bytes.
async fn serve_receiving(
    session: (&SessionContext, &Connection),
    fallbacks: &BulkFallbacks,
    migration: MigrationId,
    (stream, mut decoder): (&mut RecvStream, FrameDecoder),
    connection_sender: oneshot::Sender<TransferConnection>,
    mut result_receiver: ResultReceiver<u64>,
    abort_guard: &mut AbortGuard,
) -> Result<u64, Failure> {
    let failure = |why: &dyn std::fmt::Display| Failure::Images(why.to_string());
    let frame = read_frame(stream, &mut decoder)
        .await
        .map_err(|why| failure(&why))?;
    let offer: ConnectionOffer = frame
        .ok_or_else(|| failure(&"nothing was announced"))?
        .decode_control()
        .map_err(|e| failure(&e))?;
    let connect_result = fallbacks
        .connect(session, (migration, BulkContent::Images), &offer)
        .await;
    let (writer, reader, connection) =
        connect_result.map_err(|e| failure(&format!("no connection to it: {e}")))?;
    abort_guard.connection = Some(connection);
    let _ = connection_sender.send((writer, reader));
    tokio::select! {
        result = &mut result_receiver => thread_result(result),
        frame_result = read_frame(stream, &mut decoder) => match frame_result {
            // The source has received the confirmation or has aborted the transfer. The thread's
            // result shows which of the two has happened.
            Ok(None) => thread_result(result_receiver.await),
            Ok(Some(_)) => Err(failure(&"it sent unexpected data")),
            Err(why) => Err(failure(&why)),
        },
    }
}

fn log_sent_images(migration: MigrationId, to: HostId, amounts: &SentAmounts, duration: Duration) {
    let SentAmounts {
        file_bytes: bytes,
        early_bytes,
        wire_bytes,
        void_bytes,
    } = amounts;
    let duration = duration.as_millis();
    tracing::info!(
        "{migration}: sent {bytes} bytes of images to {to} in {duration} ms, {early_bytes} of them during the dump; \
         {wire_bytes} bytes on the wire without zeros; {void_bytes} bytes discarded after restarts"
    );
}
