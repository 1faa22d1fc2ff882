//! Connects two hosts for a bulk transfer: by TCP ([`super::bulk`]), or by a stream of their
//! session where TCP is blocked.
//!
//! The session always exists but costs more work per byte. The connecting end finds out that TCP is
//! blocked, opens a session stream instead, and remembers the host for a while. The listening end
//! accepts whichever arrives first.

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

/// Time for which TCP is not tried again with a host that it could not reach.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Time limit for the other end to accept a session stream.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// Sent by the end that accepts a session stream.
const TAKEN: [u8; 1] = [1];

/// What a bulk transfer carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum What {
    /// Images of a migration or checkpoint.
    Images,
    /// Memory of a task in post-copy.
    Memory,
}

type Streams = (SendStream, RecvStream);

#[derive(Debug, Default)]
struct Known {
    /// Transfers for which the other end may open a session stream. Each entry is removed with its
    /// [`Turn`].
    waiting: HashMap<(MigrationId, What), (HostId, oneshot::Sender<Streams>)>,
    /// Hosts that TCP could not reach, and when.
    blocked: HashMap<HostId, Instant>,
}

/// State of bulk connections with other hosts; all clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Detours {
    known: Arc<Mutex<Known>>,
    log: Log,
}

/// A transfer that waits for the other end to connect.
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
    pub(crate) fn new(log: Log) -> Detours {
        Detours {
            known: Arc::default(),
            log,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets this host open a session stream for the transfer. Must be called before the host learns
    /// of the transfer.
    pub(super) fn expect(&self, from: HostId, migration: MigrationId, what: What) -> Turn {
        let (tell, streams) = oneshot::channel();
        self.lock().waiting.insert((migration, what), (from, tell));
        Turn {
            detours: self.clone(),
            what: (migration, what),
            streams,
        }
    }

    /// Handles a stream that a host has opened in its session.
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
                // If the transfer has ended, the streams are dropped, which tells the other end.
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

    /// Records that TCP does not reach a host. Returns true if this was not known.
    pub(super) fn block(&self, host: HostId) -> bool {
        self.lock().blocked.insert(host, Instant::now()).is_none()
    }

    fn is_blocked(&self, host: HostId) -> bool {
        let mut known = self.lock();
        known.blocked.retain(|_, at| at.elapsed() < REMEMBERED);
        known.blocked.contains_key(&host)
    }

    /// At the connecting end: connects to the listener of the other end, or else opens a session
    /// stream.
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
        // If the session stream fails, too, the transfer may have ended; the error then reports
        // both attempts.
        let (out, back) = taken.map_err(|e| match &blocked {
            Some(why) => io::Error::new(e.kind(), format!("{why}; nor by the session: {e}")),
            None => e,
        })?;
        // Two transfers of one migration may both find out; only one writes a line.
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
    /// At the listening end: waits for the TCP connection or the session stream.
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
