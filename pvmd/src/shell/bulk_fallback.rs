//! Connects two hosts for a bulk transfer: by TCP ([`super::bulk_tcp`]), or by a stream of their
//! session where TCP is blocked.
//!
//! The session always exists but costs more work per byte. When the connecting end detects that TCP
//! is blocked, it opens a session stream instead, and remembers the host for a while. The listening
//! end accepts the first TCP connection or session stream that arrives.

use super::bulk_tcp::{
    BulkListener, ConnectionEnd, ConnectionKeys, ConnectionOffer, Transport, connect,
    end_over_stream,
};
use super::session::{StreamPurpose, open_bidirectional};
use super::session_input::{BulkContent, SessionContext};
use quinn::{Connection, RecvStream, SendStream};
use sempa_proto::{HostId, MigrationId};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Time for which TCP is not tried again with a host after a TCP connection to it was blocked.
const TCP_RETRY_INTERVAL: Duration = Duration::from_secs(600);
/// Time limit for the other end to accept a session stream.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Reply of the end that accepts a session stream.
const ACCEPT_REPLY: [u8; 1] = [1];

type Streams = (SendStream, RecvStream);

#[derive(Debug, Default)]
struct FallbackState {
    /// Transfers for which the other end may open a session stream: by migration and content, that
    /// host and the receiver of the stream. Each entry is removed with its [`ExpectedTransfer`].
    expected_streams: HashMap<(MigrationId, BulkContent), (HostId, oneshot::Sender<Streams>)>,
    /// Hosts that TCP could not reach, with the time of the last attempt.
    tcp_blocked: HashMap<HostId, Instant>,
}

/// State of bulk connections with other hosts; all clones share it.
#[derive(Clone, Debug)]
pub(crate) struct BulkFallbacks {
    state: Arc<Mutex<FallbackState>>,
}

/// A transfer that waits for the other end to connect.
pub(super) struct ExpectedTransfer {
    fallbacks: BulkFallbacks,
    key: (MigrationId, BulkContent),
    streams: oneshot::Receiver<Streams>,
}

impl Drop for ExpectedTransfer {
    fn drop(&mut self) {
        self.fallbacks.lock().expected_streams.remove(&self.key);
    }
}

impl BulkFallbacks {
    pub(crate) fn new() -> BulkFallbacks {
        BulkFallbacks {
            state: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, FallbackState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Permits the host `from` to open a session stream for the transfer. Must be called before
    /// that host is notified of the transfer.
    pub(super) fn expect_stream(
        &self,
        from: HostId,
        migration: MigrationId,
        what: BulkContent,
    ) -> ExpectedTransfer {
        let (stream_sender, streams) = oneshot::channel();
        self.lock()
            .expected_streams
            .insert((migration, what), (from, stream_sender));
        ExpectedTransfer {
            fallbacks: self.clone(),
            key: (migration, what),
            streams,
        }
    }

    /// Handles a stream that a host has opened in its session.
    pub(crate) fn on_stream(
        &self,
        from: HostId,
        migration: MigrationId,
        what: BulkContent,
        streams: Streams,
    ) {
        let mut state = self.lock();
        match state.expected_streams.remove(&(migration, what)) {
            Some((host, stream_sender)) if host == from => {
                // If the transfer has ended, the streams are dropped, and the other end sees them
                // closed.
                let _ = stream_sender.send(streams);
            }
            other => {
                state
                    .expected_streams
                    .extend(other.map(|waits| ((migration, what), waits)));
                drop(state);
                tracing::warn!(
                    "refused a stream of {from} for {what:?} of {migration}: it is not expected"
                );
            }
        }
    }

    /// Records that TCP does not reach a host. Returns true if this was not known.
    pub(super) fn mark_tcp_blocked(&self, host: HostId) -> bool {
        self.lock()
            .tcp_blocked
            .insert(host, Instant::now())
            .is_none()
    }

    fn is_tcp_blocked(&self, host: HostId) -> bool {
        let mut known = self.lock();
        known
            .tcp_blocked
            .retain(|_, at| at.elapsed() < TCP_RETRY_INTERVAL);
        known.tcp_blocked.contains_key(&host)
    }

    /// At the connecting end: connects to the listener of the other end, or else opens a session
    /// stream.
    pub(super) async fn connect(
        &self,
        (pair, session): (&SessionContext, &Connection),
        (migration, what): (MigrationId, BulkContent),
        offer: &ConnectionOffer,
    ) -> io::Result<ConnectionEnd> {
        let host = pair.host;
        let mut blocked = None;
        if !self.is_tcp_blocked(host) {
            let keys = ConnectionKeys::derive(session, migration, offer, Transport::Tcp)?;
            match connect(session.remote_address().ip(), offer, keys).await {
                Err(e) if e.is_blocked => blocked = Some(e.why),
                other => return other.map_err(|e| e.why),
            }
        }
        let keys = ConnectionKeys::derive(session, migration, offer, Transport::Session)?;
        let accepted = async {
            let (out, mut back) =
                open_bidirectional(pair, session, StreamPurpose::BulkFallback(migration, what))
                    .await
                    .map_err(io::Error::other)?;
            let mut reply = ACCEPT_REPLY;
            back.read_exact(&mut reply)
                .await
                .map_err(io::Error::other)?;
            Ok::<_, io::Error>((out, back))
        };
        let late = |_| {
            io::Error::new(
                ErrorKind::TimedOut,
                "it did not accept a stream of the session",
            )
        };
        let accepted = timeout(ACCEPT_TIMEOUT, accepted)
            .await
            .map_err(late)
            .flatten();
        // If the session stream fails, too, the transfer may have ended; the error then reports
        // both attempts.
        let (out, back) = accepted.map_err(|e| match &blocked {
            Some(why) => io::Error::new(e.kind(), format!("{why}; nor by the session: {e}")),
            None => e,
        })?;
        // Two transfers of one migration may both detect the block; only the first one writes a
        // line to the log.
        if let Some(why) = blocked
            && self.mark_tcp_blocked(host)
        {
            let minutes = TCP_RETRY_INTERVAL.as_secs() / 60;
            tracing::warn!(
                "{migration}: TCP does not reach {host} ({why}): transfers use the session for {minutes} minutes"
            );
        }
        Ok(end_over_stream(out, back, keys.for_connector()))
    }
}

impl ExpectedTransfer {
    /// At the listening end: waits for the TCP connection or the session stream.
    pub(super) async fn accept(
        mut self,
        session: &Connection,
        migration: MigrationId,
        listener: BulkListener,
    ) -> io::Result<ConnectionEnd> {
        let tcp = ConnectionKeys::derive(session, migration, listener.offer(), Transport::Tcp)?;
        let keys =
            ConnectionKeys::derive(session, migration, listener.offer(), Transport::Session)?;
        tokio::select! {
            accepted = listener.accept(tcp) => accepted,
            Ok((mut out, back)) = &mut self.streams => {
                out.write_all(&ACCEPT_REPLY).await.map_err(io::Error::other)?;
                Ok(end_over_stream(out, back, keys.for_listener()))
            }
        }
    }
}
