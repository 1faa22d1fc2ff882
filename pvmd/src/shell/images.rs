//! Transfers of checkpoint images between daemons.
//!
//! A stream of the session announces each transfer and stays open as long as it lasts. The images
//! travel as pieces of files ([`super::travel`]) over a connection of their own ([`super::bulk`],
//! [`super::detour`]). Reading, encryption and writing run on blocking threads, so the daemon's
//! loop never waits for a disk.

use super::bulk::{Incoming, Line, Listener, Offer, Outgoing};
use super::detour::{Detours, What};
use super::input::{Input, Inputs};
use super::log::Log;
use super::net::{Announced, Net};
use super::place::remove_images;
use super::rate::Rate;
use super::session::{Pair, Purpose, announcing_stream, read_frame};
use super::sys::Hurry;
use super::travel::{Progress, Sender, Sent, State, receive};
use pvmd_machine::io::Event;
use quinn::{Connection, RecvStream, SendStream, VarInt};
use sempa_proto::frame::{FrameDecoder, encode_control};
use sempa_proto::migration::Failure;
use sempa_proto::place::Place;
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

/// Code with which a stream is refused or aborted.
const STREAM_REFUSED: VarInt = VarInt::from_u32(1);
/// Delay before a target tells the source to stop: its own reason for the failure must be handled
/// first.
const REFUSE_AFTER: Duration = Duration::from_secs(2);

/// Number of times freed memory is returned to the kernel after a transfer: its threads may end a
/// little later than the transfer.
const GIVE_BACKS: u8 = 2;

/// A transfer in progress.
#[derive(Debug)]
struct Transfer {
    /// The task that serves the stream; `None` for work on this host only.
    stream: Option<AbortHandle>,
    /// Thread that reads or writes the files; ends soon after the stream.
    disk: JoinHandle<()>,
    /// State of the directory if it is sent while it is being written; taken when it is complete.
    ahead: Option<Arc<Progress>>,
    /// All data has arrived. The stream ends when the source has received the confirmation.
    here: Arc<AtomicBool>,
}

/// The two directions of a transfer's connection, passed to its thread.
type Way = (Outgoing<Line>, Incoming<Line>);
/// Waits until the connection is established.
type Came = Box<dyn FnOnce() -> Result<Way, Failure>>;
/// Receives the data of a transfer and returns its size in bytes.
type Take = Box<dyn FnOnce(&mut Incoming<Line>) -> Result<u64, Failure> + Send>;
/// Delivers the result of a transfer from its thread.
type Told<T> = oneshot::Receiver<Result<T, Failure>>;

/// Aborts the work of a transfer when dropped.
#[derive(Default)]
struct Hold {
    progress: Option<Arc<Progress>>,
    line: Option<Line>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(progress) = &self.progress {
            progress.turn(State::Void);
        }
        if let Some(line) = &self.line {
            line.cut();
        }
    }
}

/// All transfers of this host. Owned by the daemon's loop.
pub(crate) struct Images {
    place: Place,
    inputs: Inputs,
    log: Log,
    rate: Arc<Rate>,
    detours: Detours,
    /// By migration: the host that sends the images, and how they are received.
    expected: HashMap<MigrationId, (HostId, Take)>,
    transfers: HashMap<MigrationId, Transfer>,
    /// Number of times freed memory must still be returned to the kernel.
    give_back: u8,
}

impl Images {
    /// Creates a state without transfers. `rate` limits what leaves this host.
    pub(crate) fn new(
        place: Place,
        inputs: Inputs,
        log: Log,
        rate: Arc<Rate>,
        detours: Detours,
    ) -> Images {
        let (expected, transfers) = (HashMap::new(), HashMap::new());
        Images {
            place,
            inputs,
            log,
            rate,
            detours,
            expected,
            transfers,
            give_back: 0,
        }
    }

    /// Returns true if freed memory must be returned to the kernel: [`GIVE_BACKS`] times after the
    /// last transfer. Polled by the loop.
    pub(crate) fn gives_back(&mut self) -> bool {
        let gives = self.transfers.is_empty() && self.give_back > 0;
        self.give_back -= u8::from(gives);
        gives
    }

    fn begin(&mut self, migration: MigrationId, transfer: Transfer) {
        self.give_back = GIVE_BACKS;
        self.transfers.insert(migration, transfer);
    }

    /// Starts to send the images of a migration while they are being written; a later
    /// [`Images::send`] marks them as complete.
    pub(crate) fn send_ahead(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        self.start(migration, to, net, State::Growing, |_| Ok(()));
    }

    /// Sends the images of a migration, or the part of them not sent yet. Reports
    /// [`Event::ImagesSent`].
    pub(crate) fn send(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        match self
            .transfers
            .get_mut(&migration)
            .and_then(|transfer| transfer.ahead.take())
        {
            Some(progress) => progress.turn(State::Complete),
            None => self.start(migration, to, net, State::Complete, |_| Ok(())),
        }
    }

    /// Runs `complete`, which adds the last files to the directory, then sends the images as
    /// [`Images::send`] does. Without a destination host, reports [`Event::ImagesReceived`] on this
    /// host instead.
    pub(crate) fn complete(
        &mut self,
        migration: MigrationId,
        to: Option<HostId>,
        net: &mut Net,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        match to {
            Some(to) => self.start(migration, to, net, State::Complete, complete),
            None => self.complete_here(migration, complete),
        }
    }

    fn start(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &mut Net,
        state: State,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        let dir = self.place.images(migration);
        self.start_work(migration, to, net, state, move |came, progress, rate| {
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
        send: impl FnOnce(Outgoing<Line>, &Rate) -> Result<Sent, Failure> + Send + 'static,
    ) {
        self.start_work(migration, to, net, State::Complete, move |came, _, rate| {
            let (out, back) = came()?;
            send(out, rate).map(|sent| (sent, back))
        });
    }

    /// Starts a transfer. `work` runs on a thread: it sends everything over the connection, once
    /// that is established, and returns the receiving direction.
    fn start_work(
        &mut self,
        migration: MigrationId,
        to: HostId,
        net: &mut Net,
        state: State,
        work: impl FnOnce(Came, &Progress, &Rate) -> Result<(Sent, Incoming<Line>), Failure>
        + Send
        + 'static,
    ) {
        let progress = Arc::new(Progress::default());
        progress.turn(state);
        let (way, came) = oneshot::channel::<Way>();
        let (tell, told) = oneshot::channel();
        let (of_thread, rate) = (progress.clone(), self.rate.clone());
        let disk = tokio::task::spawn_blocking(move || {
            let _hurry = Hurry::begin();
            let came: Came = Box::new(move || {
                came.blocking_recv()
                    .map_err(|_| Failure::CalledOff("the transfer was broken off".into()))
            });
            let _ = tell.send(work(came, &of_thread, &rate).and_then(|(sent, mut back)| {
                let taken = back
                    .next()
                    .map_err(|e| Failure::Images(format!("the target did not take them: {e}")));
                taken.map(|_| sent)
            }));
        });
        let bulk = net.bulk_soon(to);
        let (inputs, log, detours) = (self.inputs.clone(), self.log.clone(), self.detours.clone());
        let ahead = (state == State::Growing).then(|| progress.clone());
        let hold = Hold {
            progress: Some(progress),
            line: None,
        };
        let stream = tokio::spawn(async move {
            let begin = Instant::now();
            let result = match bulk.session().await {
                Err(why) => Err(why),
                Ok(session) => send_over(session, &detours, migration, way, told, hold).await,
            };
            if let Ok(Sent {
                bytes,
                ahead,
                left,
                in_vain,
            }) = &result
            {
                let took = begin.elapsed().as_millis();
                log.line(format!(
                    "{migration}: {bytes} bytes of images sent to {to} in {took} ms, {ahead} of them while they were written; {left} bytes left without the zeros; in vain before that: {in_vain}"
                ));
            }
            let result = result.map(|sent| sent.bytes);
            let _ = inputs
                .send(Input::Event(Event::ImagesSent { migration, result }))
                .await;
        });
        let here = Arc::default();
        self.begin(
            migration,
            Transfer {
                stream: Some(stream.abort_handle()),
                disk,
                ahead,
                here,
            },
        );
    }

    fn complete_here(
        &mut self,
        migration: MigrationId,
        complete: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) {
        let (dir, inputs) = (self.place.images(migration), self.inputs.clone());
        let disk = tokio::task::spawn_blocking(move || {
            let result = complete(&dir).map(|()| 0);
            let _ = inputs.blocking_send(Input::Event(Event::ImagesReceived { migration, result }));
        });
        self.begin(
            migration,
            Transfer {
                stream: None,
                disk,
                ahead: None,
                here: Arc::default(),
            },
        );
    }

    /// Accepts the images of this migration from this host.
    pub(crate) fn expect(&mut self, migration: MigrationId, from: HostId) {
        let dir = self.place.images(migration);
        self.expect_with(migration, from, move |incoming| receive(&dir, incoming));
    }

    /// Accepts what this host sends under this migration's id, and receives it with `take`.
    pub(crate) fn expect_with(
        &mut self,
        migration: MigrationId,
        from: HostId,
        take: impl FnOnce(&mut Incoming<Line>) -> Result<u64, Failure> + Send + 'static,
    ) {
        self.expected.insert(migration, (from, Box::new(take)));
    }

    /// True if this host is expected to send images of this migration.
    #[cfg(test)]
    pub(crate) fn expects(&self, migration: MigrationId, from: HostId) -> bool {
        self.expected
            .get(&migration)
            .is_some_and(|(expected, _)| *expected == from)
    }

    /// Starts to receive announced images if they are expected. Reports [`Event::ImagesReceived`].
    pub(crate) fn arrived(
        &mut self,
        Announced {
            pair,
            migration,
            session,
            mut stream,
            decoder,
        }: Announced,
    ) {
        let from = pair.host;
        let take = match self.expected.entry(migration) {
            Entry::Occupied(expected) if expected.get().0 == from => expected.remove().1,
            // An announcement by another host must not displace the expected one.
            _ => {
                self.log.line(format!(
                    "refused images of {migration} from {from}: nobody expects them"
                ));
                let _ = stream.stop(STREAM_REFUSED);
                return;
            }
        };
        let (way, came) = oneshot::channel::<Way>();
        let (tell, told) = oneshot::channel();
        let disk = tokio::task::spawn_blocking(move || {
            let _hurry = Hurry::begin();
            let Ok((mut out, mut incoming)) = came.blocking_recv() else {
                return;
            };
            let received = take(&mut incoming).and_then(|bytes| {
                let unsaid = |e| {
                    Failure::Images(format!("the source does not hear that they are here: {e}"))
                };
                out.prove().map(|()| bytes).map_err(unsaid)
            });
            let _ = tell.send(received);
        });
        let (inputs, detours) = (self.inputs.clone(), self.detours.clone());
        let here = Arc::new(AtomicBool::new(false));
        let is_here = here.clone();
        let task = tokio::spawn(async move {
            let mut hold = Hold::default();
            let session = (&pair, &session);
            let result = receive_over(
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
            is_here.store(!failed, Ordering::Release);
            let _ = inputs
                .send(Input::Event(Event::ImagesReceived { migration, result }))
                .await;
            if !failed {
                // The stream ends when the source has received the confirmation; dropping it
                // earlier would be a refusal.
                let _ = stream.read_chunk(1, true).await;
            } else {
                // The source would only report that it cannot continue. The reason is known here
                // and must be handled first. Its handler drops this transfer, and the stream and
                // connection with it.
                sleep(REFUSE_AFTER).await;
                let _ = stream.stop(STREAM_REFUSED);
            }
        });
        self.begin(
            migration,
            Transfer {
                stream: Some(task.abort_handle()),
                disk,
                ahead: None,
                here,
            },
        );
    }

    /// Aborts a transfer and removes the images. The returned task ends when nothing is written any
    /// more.
    pub(crate) fn drop_images(&mut self, migration: MigrationId) -> JoinHandle<()> {
        self.expected.remove(&migration);
        let transfer = self.transfers.remove(&migration);
        let dir = self.place.images(migration);
        tokio::spawn(async move {
            if let Some(Transfer {
                stream, disk, here, ..
            }) = transfer
            {
                // A complete transfer is not aborted: the images may become unneeded here before
                // the source has the confirmation.
                if let Some(stream) = stream.filter(|_| !here.load(Ordering::Acquire)) {
                    stream.abort();
                }
                // The thread notices that its connection is closed.
                let _ = disk.await;
            }
            let _ = tokio::task::spawn_blocking(move || remove_images(&dir)).await;
        })
    }
}

/// Announces images, lets the other host connect and waits until the thread has sent everything.
async fn send_over(
    (pair, session): (Pair, Connection),
    detours: &Detours,
    migration: MigrationId,
    way: oneshot::Sender<Way>,
    mut told: Told<Sent>,
    mut hold: Hold,
) -> Result<Sent, Failure> {
    let to = pair.host;
    let failed = |why: &dyn std::fmt::Display| Failure::Images(format!("{to}: {why}"));
    let listener = Listener::open().await.map_err(|e| failed(&e))?;
    let offer = encode_control(listener.offer()).map_err(|e| failed(&e))?;
    let turn = detours.expect(to, migration, What::Images);
    let opened = announcing_stream(&pair, &session, Purpose::Images(migration)).await;
    let mut stream = opened.map_err(|why| failed(&why))?;
    stream.write_chunk(offer).await.map_err(|e| failed(&e))?;
    let result = async {
        let (out, back) = tokio::select! {
            accepted = turn.accept(&session, migration, listener) => {
                let (out, back, line) = accepted.map_err(|e| failed(&e))?;
                hold.line = Some(line);
                (out, back)
            }
            result = &mut told => return outcome(result),
            why = refused(&stream) => return Err(why),
        };
        // A thread that has ended reports the reason as its result.
        let _ = way.send((out, back));
        tokio::select! {
            biased;
            result = &mut told => outcome(result),
            why = refused(&stream) => Err(why),
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

fn outcome<T>(told: Result<Result<T, Failure>, oneshot::error::RecvError>) -> Result<T, Failure> {
    told.unwrap_or_else(|_| {
        Err(Failure::Images(
            "the thread that works on them ended".into(),
        ))
    })
}

/// Waits until the target refuses the images or the session is lost.
async fn refused(stream: &SendStream) -> Failure {
    match stream.stopped().await {
        Ok(_) => Failure::Images("the target refused them".into()),
        Err(e) => Failure::Images(format!("the session broke: {e}")),
    }
}

/// Connects to the source and waits until the thread has written everything that arrives.
async fn receive_over(
    session: (&Pair, &Connection),
    detours: &Detours,
    migration: MigrationId,
    (stream, mut decoder): (&mut RecvStream, FrameDecoder),
    way: oneshot::Sender<Way>,
    mut told: Told<u64>,
    hold: &mut Hold,
) -> Result<u64, Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::Images(why.to_string());
    let frame = read_frame(stream, &mut decoder)
        .await
        .map_err(|why| failed(&why))?;
    let offer: Offer = frame
        .ok_or_else(|| failed(&"nothing was announced"))?
        .control()
        .map_err(|e| failed(&e))?;
    let connected = detours
        .reach(session, (migration, What::Images), &offer)
        .await;
    let (out, incoming, line) =
        connected.map_err(|e| failed(&format!("no connection to it: {e}")))?;
    hold.line = Some(line);
    let _ = way.send((out, incoming));
    tokio::select! {
        result = &mut told => outcome(result),
        ended = read_frame(stream, &mut decoder) => match ended {
            // The source has the confirmation, or has given up; the thread's result shows which.
            Ok(None) => outcome(told.await),
            Ok(Some(_)) => Err(failed(&"it said more than was to be said")),
            Err(why) => Err(failed(&why)),
        },
    }
}
