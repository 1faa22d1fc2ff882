//! How two hosts get at each other for very many bytes: by a TCP connection ([`super::bulk`]), or, where something between
//! them lets none through, by a stream of their session, which is there already but does more work for each byte.
//!
//! The end that connects finds that out, opens the stream instead, and remembers the host for a while. Whoever waits for it takes
//! what comes first.

use super::bulk::{Ends, Keys, Listener, Offer, Route, connect, over_stream};
use super::log::Log;
use super::session::{Pair, Purpose, both_ways};
use quinn::{Connection, RecvStream, SendStream};
use sempa_proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// A host that TCP did not get to is not tried by TCP for so long.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Time for the other end to take a stream.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// Said by the end that takes a stream.
const TAKEN: [u8; 1] = [1];

/// What is to be had on a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum What {
    /// Images of a move.
    Images,
    /// Memory that follows its task.
    Memory,
}

type Streams = (SendStream, RecvStream);

#[derive(Debug, Default)]
struct Known {
    /// Transfers of this host for which the other end may come by the session. Each is dropped with its [`Turn`].
    waiting: HashMap<(MigrationId, What), (HostId, oneshot::Sender<Streams>)>,
    /// Hosts that TCP did not get to, and when.
    blocked: HashMap<HostId, Instant>,
}

/// What is known of ways to other hosts; all copies are one.
#[derive(Clone, Debug)]
pub(crate) struct Detours {
    known: Arc<Mutex<Known>>,
    log: Log,
}

/// A transfer that waits for its other end.
pub(super) struct Turn {
    detours: Detours,
    what: (MigrationId, What),
    streams: oneshot::Receiver<Streams>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.detours.lock().waiting.remove(&self.what);
    }
}

impl Detours {
    /// Nothing is known.
    pub(crate) fn new(log: Log) -> Detours {
        Detours {
            known: Arc::default(),
            log,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this host may come by its session; before it is told of the transfer.
    pub(super) fn expect(&self, from: HostId, migration: MigrationId, what: What) -> Turn {
        let (tell, streams) = oneshot::channel();
        self.lock().waiting.insert((migration, what), (from, tell));
        Turn {
            detours: self.clone(),
            what: (migration, what),
            streams,
        }
    }

    /// A host has opened a stream of its session.
    pub(crate) fn arrived(
        &self,
        from: HostId,
        migration: MigrationId,
        what: What,
        streams: Streams,
    ) {
        let mut known = self.lock();
        match known.waiting.remove(&(migration, what)) {
            Some((host, tell)) if host == from => {
                // Dropped streams tell the other end that nobody wants them.
                let _ = tell.send(streams);
            }
            other => {
                known
                    .waiting
                    .extend(other.map(|waits| ((migration, what), waits)));
                drop(known);
                self.log.line(format!(
                    "refused a stream of {from} for {what:?} of {migration}: nobody expects it"
                ));
            }
        }
    }

    /// Notes that TCP does not get to a host. True if that is news.
    pub(super) fn block(&self, host: HostId) -> bool {
        self.lock().blocked.insert(host, Instant::now()).is_none()
    }

    fn is_blocked(&self, host: HostId) -> bool {
        let mut known = self.lock();
        known.blocked.retain(|_, at| at.elapsed() < REMEMBERED);
        known.blocked.contains_key(&host)
    }

    /// The end that connects: gets to where the other one listens, or else to the other one by its session.
    pub(super) async fn reach(
        &self,
        (pair, session): (&Pair, &Connection),
        (migration, what): (MigrationId, What),
        offer: &Offer,
    ) -> io::Result<Ends> {
        let host = pair.host;
        let mut blocked = None;
        if !self.is_blocked(host) {
            let keys = Keys::of(session, migration, offer, Route::Tcp)?;
            match connect(session.remote_address().ip(), offer, keys).await {
                Err(e) if e.is_blocked => blocked = Some(e.why),
                other => return other.map_err(|e| e.why),
            }
        }
        let keys = Keys::of(session, migration, offer, Route::Session)?;
        let taken = async {
            let (out, mut back) = both_ways(pair, session, Purpose::Detour(migration, what))
                .await
                .map_err(io::Error::other)?;
            let mut said = TAKEN;
            back.read_exact(&mut said).await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((out, back))
        };
        let late = |_| {
            io::Error::new(
                ErrorKind::TimedOut,
                "it did not take a stream of the session",
            )
        };
        let taken = timeout(TAKEN_WITHIN, taken).await.map_err(late).flatten();
        // Whoever does not want to be reached any more is not reached by TCP either, and what was wrong then is that.
        let (out, back) = taken.map_err(|e| match &blocked {
            Some(why) => io::Error::new(e.kind(), format!("{why}; nor by the session: {e}")),
            None => e,
        })?;
        // Two transfers of one move find it out at the same time.
        if let Some(why) = blocked
            && self.block(host)
        {
            let minutes = REMEMBERED.as_secs() / 60;
            self.log.line(format!(
                "{migration}: TCP does not get to {host} ({why}): by the session, and so for {minutes} minutes"
            ));
        }
        Ok(over_stream(out, back, keys.of_who_connects()))
    }
}

impl Turn {
    /// The end that is connected to, by TCP or by a stream of the session.
    pub(super) async fn accept(
        mut self,
        session: &Connection,
        migration: MigrationId,
        listener: Listener,
    ) -> io::Result<Ends> {
        let tcp = Keys::of(session, migration, listener.offer(), Route::Tcp)?;
        let keys = Keys::of(session, migration, listener.offer(), Route::Session)?;
        tokio::select! {
            accepted = listener.accept(tcp) => accepted,
            Ok((mut out, back)) = &mut self.streams => {
                out.write_all(&TAKEN).await.map_err(io::Error::other)?;
                Ok(over_stream(out, back, keys.of_who_listens()))
            }
        }
    }
}
