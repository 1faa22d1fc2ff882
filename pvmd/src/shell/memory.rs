//! Post-copy memory transfers between daemons.
//!
//! A transfer has a connection of its own ([`super::bulk`]). At each end the tasker's engine reads
//! and writes through a socket of the daemon; the daemons do not interpret the engines' protocol.
//!
//! The target's engine closes its socket when it has fetched everything. If the connection ends
//! earlier, the target's daemon reports [`Event::MemoryLost`] and keeps the socket open: the task
//! that needs the memory must be dead before the engine sees the end of its stream.

use super::bulk::{Incoming, Line, Listener, Offer, Outgoing};
use super::detour::{Detours, What};
use super::input::{Input, Inputs};
use super::log::Log;
use super::net::{Announced, Net};
use super::place::remove_any;
use super::rate::Rate;
use super::session::{Purpose, announcing_stream, read_frame};
use super::sys::{Hurry, unread};
use super::zeros::{self, Part};
use pvmd_machine::io::Event;
use sempa_proto::frame::encode_control;
use sempa_proto::place::Place;
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

/// Time without data from an engine after which an empty record is sent, so that the other host
/// sees that this end is alive.
const SILENCE: Duration = Duration::from_secs(30);
/// Time the connection stays open after the source's engine has ended: the target's engine may not
/// have read its last data and closed yet. Also the time the target waits for its engine to close
/// after the engine has read everything.
const LAST_WORDS: Duration = Duration::from_secs(2);
const LOOK_PAUSE: Duration = Duration::from_millis(2);
/// Most bytes read from an engine at once.
const READ_BYTES: usize = zeros::PLAIN_BYTES_MAX;
/// Written to the engine for runs of zeros.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// One transfer, from this host or to it.
#[derive(Debug)]
struct Way {
    other: HostId,
    task: JoinHandle<()>,
    /// The connection, once both ends are established. The transfer then ends by closing, or when
    /// the connection is aborted.
    line: Arc<Mutex<Option<Line>>>,
}

/// All memory transfers of this host. Owned by the daemon's loop.
pub(crate) struct Memory {
    place: Place,
    inputs: Inputs,
    log: Log,
    rate: Arc<Rate>,
    detours: Detours,
    expected: HashMap<MigrationId, (HostId, UnixListener)>,
    ways: HashMap<MigrationId, Way>,
}

impl Memory {
    /// Creates a state without transfers. `rate` limits what leaves this host.
    pub(crate) fn new(
        place: Place,
        inputs: Inputs,
        log: Log,
        rate: Arc<Rate>,
        detours: Detours,
    ) -> Memory {
        Memory {
            place,
            inputs,
            log,
            rate,
            detours,
            expected: HashMap::new(),
            ways: HashMap::new(),
        }
    }

    /// On the source: transfers the memory that the tasker serves to the target.
    pub(crate) fn lend(&mut self, migration: MigrationId, to: HostId, net: &mut Net) {
        let Some(tasker) = self.listen(migration) else {
            return;
        };
        let session = net.bulk_soon(to);
        let (line, of_task) = (Arc::<Mutex<Option<Line>>>::default(), self.rate.clone());
        let (known, log, detours) = (line.clone(), self.log.clone(), self.detours.clone());
        let task = tokio::spawn(async move {
            let failed = |why: &dyn std::fmt::Display| {
                format!("{migration}: no way for its memory to {to}: {why}")
            };
            let opened = async {
                let (pair, session) = session.session().await.map_err(|e| failed(&e))?;
                let listener = Listener::open().await.map_err(|e| failed(&e))?;
                let turn = detours.expect(to, migration, What::Memory);
                let offer = encode_control(listener.offer()).map_err(|e| failed(&e))?;
                let opened = announcing_stream(&pair, &session, Purpose::Memory(migration)).await;
                let mut stream = opened.map_err(|e| failed(&e))?;
                stream.write_chunk(offer).await.map_err(|e| failed(&e))?;
                // The target reads only one frame.
                let _ = stream.finish();
                turn.accept(&session, migration, listener)
                    .await
                    .map_err(|e| failed(&e))
            };
            let (engine, opened) = tokio::join!(tasker.accept(), opened);
            let ends = engine
                .map_err(|e| failed(&e))
                .and_then(|(engine, _)| Ok((blocking(engine)?, opened?)));
            match ends {
                Ok((engine, (out, incoming, line))) => {
                    *lock(&known) = Some(line.clone());
                    lend_over(engine, out, incoming, line, of_task).await;
                    // Drops the descriptor now, not with the next transfer.
                    *lock(&known) = None;
                }
                Err(why) => log.line(why),
            }
        });
        self.keep(
            migration,
            Way {
                other: to,
                task,
                line,
            },
        );
    }

    /// On the target: lets the tasker request memory, which this host will send.
    pub(crate) fn expect(&mut self, migration: MigrationId, from: HostId) {
        if let Some(tasker) = self.listen(migration) {
            self.expected.insert(migration, (from, tasker));
        }
    }

    /// On the target: connects to the source if its announcement is expected.
    pub(crate) fn arrived(&mut self, mut announced: Announced) {
        let (from, migration) = (announced.pair.host, announced.migration);
        let Some((_, tasker)) = self
            .expected
            .remove(&migration)
            .filter(|(host, _)| *host == from)
        else {
            return self.log.line(format!(
                "refused memory of {migration} from {from}: nobody expects it"
            ));
        };
        let line = Arc::<Mutex<Option<Line>>>::default();
        let (known, log, inputs) = (line.clone(), self.log.clone(), self.inputs.clone());
        let detours = self.detours.clone();
        let task = tokio::spawn(async move {
            let failed = |why: &dyn std::fmt::Display| {
                format!("{migration}: no way to its memory on {from}: {why}")
            };
            let opened = async {
                let frame = read_frame(&mut announced.stream, &mut announced.decoder)
                    .await
                    .map_err(|e| failed(&e))?;
                let frame = frame.ok_or_else(|| failed(&"nothing was announced"))?;
                let offer: Offer = frame.control().map_err(|e| failed(&e))?;
                let session = (&announced.pair, &announced.session);
                detours
                    .reach(session, (migration, What::Memory), &offer)
                    .await
                    .map_err(|e| failed(&e))
            };
            let ends = match opened.await {
                Ok(opened) => {
                    let engine = tasker.accept().await.map_err(|e| failed(&e));
                    engine.and_then(|(engine, _)| Ok((blocking(engine)?, opened)))
                }
                Err(why) => Err(why),
            };
            match ends {
                Ok((engine, (out, incoming, line))) => {
                    *lock(&known) = Some(line.clone());
                    let lost = move |why| {
                        // A send error means that the loop has ended; the report is not needed
                        // then.
                        let _ = inputs
                            .blocking_send(Input::Event(Event::MemoryLost { migration, why }));
                    };
                    fetch_over(engine, out, incoming, line, lost).await;
                    *lock(&known) = None;
                }
                Err(why) => log.line(why),
            }
        });
        self.keep(
            migration,
            Way {
                other: from,
                task,
                line,
            },
        );
    }

    /// Ends a transfer that no engine has begun to use, after the end or failure of the migration
    /// on this host.
    pub(crate) fn give_up_unused(&mut self, migration: MigrationId) {
        self.expected.remove(&migration);
        if let Some(way) = self
            .ways
            .get(&migration)
            .filter(|way| lock(&way.line).is_none())
        {
            way.task.abort();
        }
        remove_any(&self.place.memory_way(migration));
    }

    /// Aborts all transfers with a lost host.
    pub(crate) fn host_lost(&mut self, host: HostId) {
        for way in self.ways.values().filter(|way| way.other == host) {
            match &*lock(&way.line) {
                Some(line) => line.cut(),
                None => way.task.abort(),
            }
        }
    }

    fn listen(&self, migration: MigrationId) -> Option<UnixListener> {
        let path = self.place.memory_way(migration);
        remove_any(&path);
        let listener = UnixListener::bind(&path);
        listener
            .map_err(|e| {
                self.log.line(format!(
                    "{migration}: no way for its memory: {}: {e}",
                    path.display()
                ))
            })
            .ok()
    }

    fn keep(&mut self, migration: MigrationId, way: Way) {
        self.ways.retain(|_, way| !way.task.is_finished());
        self.ways.insert(migration, way);
    }
}

fn lock(line: &Mutex<Option<Line>>) -> std::sync::MutexGuard<'_, Option<Line>> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

fn blocking(engine: tokio::net::UnixStream) -> Result<UnixStream, String> {
    let engine = engine.into_std().and_then(|engine| {
        engine.set_nonblocking(false)?;
        engine.set_read_timeout(Some(SILENCE))?;
        Ok(engine)
    });
    engine.map_err(|e| format!("a socket that cannot be used: {e}"))
}

/// On the source: forwards data in both directions until either end has closed.
async fn lend_over(
    engine: UnixStream,
    out: Outgoing<Line>,
    incoming: Incoming<Line>,
    line: Line,
    rate: Arc<Rate>,
) {
    let Ok(asked) = engine.try_clone() else {
        return line.cut();
    };
    let closed = Arc::new(AtomicBool::new(false));
    let has_closed = closed.clone();
    let answers = spawn_blocking(move || {
        let hurry = Hurry::begin();
        from_engine(engine, out, |bytes| rate.wait(bytes));
        drop(hurry);
        let until = Instant::now() + LAST_WORDS;
        while !closed.load(Ordering::Acquire) && Instant::now() < until {
            std::thread::sleep(LOOK_PAUSE);
        }
        line.cut();
    });
    let questions = spawn_blocking(move || {
        let _hurry = Hurry::begin();
        let _why = to_engine(incoming, &asked);
        has_closed.store(true, Ordering::Release);
        // No further requests will arrive.
        let _ = asked.shutdown(Shutdown::Both);
    });
    let _ = tokio::join!(answers, questions);
}

/// On the target: forwards data in both directions until the engine has closed its end. Calls
/// `lost` with the reason if the connection ends earlier.
async fn fetch_over(
    engine: UnixStream,
    out: Outgoing<Line>,
    incoming: Incoming<Line>,
    line: Line,
    lost: impl FnOnce(String) + Send + 'static,
) {
    let Ok(answered) = engine.try_clone() else {
        return line.cut();
    };
    let closed = Arc::new(AtomicBool::new(false));
    let has_closed = closed.clone();
    let questions = spawn_blocking(move || {
        let _hurry = Hurry::begin();
        from_engine(engine, out, |_| ());
        has_closed.store(true, Ordering::Release);
        line.cut();
    });
    let answers = spawn_blocking(move || {
        let _hurry = Hurry::begin();
        let why = to_engine(incoming, &answered);
        // An engine that is not scheduled or is stopped may have unread data: its time begins when
        // it has read all of it.
        let mut read = Instant::now();
        while !closed.load(Ordering::Acquire) && read.elapsed() < LAST_WORDS {
            std::thread::sleep(LOOK_PAUSE);
            if unread(&answered) > 0 {
                read = Instant::now();
            }
        }
        if !closed.load(Ordering::Acquire) {
            lost(format!("its memory does not come any more: {why}"));
        }
        // Returned so that the engine's socket stays open until the other thread has seen the
        // engine close it.
        answered
    });
    let _ = tokio::join!(questions, answers);
}

/// Forwards an engine's data to the other host until the engine closes its end or the connection is
/// lost. Calls `wait` with the size of each piece before it is sent.
fn from_engine(mut engine: UnixStream, mut out: Outgoing<Line>, wait: impl Fn(usize)) {
    let mut bytes = vec![0; READ_BYTES];
    while let Some(length) = heard(&mut engine, &mut bytes) {
        let fill = |room: &mut [u8]| {
            room.copy_from_slice(&bytes[..length]);
            Ok::<(), std::convert::Infallible>(())
        };
        let Ok(sent) = out.send_packed(&[], length, fill, &wait);
        if sent.is_err() {
            // The engine's output must be read to the end: otherwise the engine would block and not
            // notice the end.
            while heard(&mut engine, &mut bytes).is_some() {}
            return;
        }
    }
}

/// Reads from an engine and returns the number of bytes: 0 after [`SILENCE`] without data, `None`
/// at the end of the stream.
fn heard(engine: &mut UnixStream, bytes: &mut [u8]) -> Option<usize> {
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

/// Forwards data of the other host to an engine, and returns why that ended.
fn to_engine(mut incoming: Incoming<Line>, mut engine: &UnixStream) -> std::io::Error {
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
            std::io::Error::new(ErrorKind::InvalidData, "a piece came that is not whole")
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
