//! Connects two hosts for a bulk transfer: by TCP ([`super::bulk_tcp`]), or by a stream of their
//! session where TCP is blocked.
//!
//! The session always exists, but a session stream needs more processor time per byte than TCP. If
//! the connecting end detects that TCP is blocked, it opens a session stream instead. The
//! connecting end then uses session streams with this host for [`TCP_RETRY_INTERVAL`]. The
//! listening end accepts the first TCP connection or session stream that arrives.

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

/// Time for which no TCP connection to a host is attempted after the host was not reachable by TCP.
const TCP_RETRY_INTERVAL: Duration = Duration::from_secs(600);
/// Time limit for the other end to accept a session stream.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Reply of the listening end when it accepts a session stream.
const ACCEPT_REPLY: [u8; 1] = [1];

type StreamPair = (SendStream, RecvStream);

#[derive(Debug, Default)]
struct FallbackState {
    /// Transfers for which the connecting end may open a session stream. The key is the migration
    /// and the content. The value is the connecting host and the sender that passes the session
    /// stream to the [`ExpectedTransfer`]. Each entry is removed with its [`ExpectedTransfer`].
    expected_streams: HashMap<(MigrationId, BulkContent), (HostId, oneshot::Sender<StreamPair>)>,
    /// Hosts that were not reachable by TCP, each with the time of the last attempt.
    tcp_blocked_at: HashMap<HostId, Instant>,
}

/// State of bulk connections with other hosts. All clones share the state.
#[derive(Clone, Debug)]
pub(crate) struct BulkFallbacks {
    state: Arc<Mutex<FallbackState>>,
}

/// A transfer that waits for the other end to connect.
pub(super) struct ExpectedTransfer {
    fallbacks: BulkFallbacks,
    key: (MigrationId, BulkContent),
    streams: oneshot::Receiver<StreamPair>,
}

impl Drop for ExpectedTransfer {
    fn drop(&mut self) {
        self.fallbacks.lock().expected_streams.remove(&self.key);
    }
}

impl BulkFallbacks {
    pub(crate) fn new() -> Self {
        Self {
            state: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, FallbackState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Permits the host `from` to open a session stream for the transfer, and returns the transfer,
    /// which receives the stream. Must be called before `from` is notified of the transfer.
    pub(super) fn expect_stream(
        &self,
        from: HostId,
        migration: MigrationId,
        content: BulkContent,
    ) -> ExpectedTransfer {
        let (stream_sender, stream_receiver) = oneshot::channel();
        self.lock()
            .expected_streams
            .insert((migration, content), (from, stream_sender));
        ExpectedTransfer {
            fallbacks: self.clone(),
            key: (migration, content),
            streams: stream_receiver,
        }
    }

    /// Handles a session stream that the host `from` has opened: passes the stream to the transfer
    /// that expects it, or refuses the stream and logs the refusal.
    pub(crate) fn on_stream(
        &self,
        from: HostId,
        migration: MigrationId,
        content: BulkContent,
        streams: StreamPair,
    ) {
        let mut state = self.lock();
        match state.expected_streams.remove(&(migration, content)) {
            Some((host, stream_sender)) if host == from => {
                // If the transfer has ended, the streams are dropped and the host `from` detects
                // that they are closed.
                let _ = stream_sender.send(streams);
            }
            other_entry => {
                state.expected_streams.extend(
                    other_entry.map(|host_and_sender| ((migration, content), host_and_sender)),
                );
                drop(state);
                tracing::warn!(
                    "refused a stream of {from} for {content:?} of {migration}: it is not expected"
                );
            }
        }
    }

    /// Records that TCP does not reach `host`. Returns true if `host` was not marked already.
    pub(super) fn mark_tcp_blocked(&self, host: HostId) -> bool {
        self.lock()
            .tcp_blocked_at
            .insert(host, Instant::now())
            .is_none()
    }

    fn is_tcp_blocked(&self, host: HostId) -> bool {
        let mut state = self.lock();
        state
            .tcp_blocked_at
            .retain(|_, blocked_at| blocked_at.elapsed() < TCP_RETRY_INTERVAL);
        state.tcp_blocked_at.contains_key(&host)
    }

    /// At the connecting end: connects to the listener. If TCP is blocked, opens a session stream
    /// instead. Returns this end of the connection.
    pub(super) async fn connect(
        &self,
        (context, session): (&SessionContext, &Connection),
        (migration, content): (MigrationId, BulkContent),
        offer: &ConnectionOffer,
    ) -> io::Result<ConnectionEnd> {
        let host = context.host;
        let mut blocked_reason = None;
        if !self.is_tcp_blocked(host) {
            let keys = ConnectionKeys::derive(session, migration, offer, Transport::Tcp)?;
            match connect(session.remote_address().ip(), offer, keys).await {
                Err(e) if e.is_blocked => blocked_reason = Some(e.error),
                other => return other.map_err(|e| e.error),
            }
        }
        let keys = ConnectionKeys::derive(session, migration, offer, Transport::Session)?;
        let stream_result = async {
            let (send_stream, mut receive_stream) = open_bidirectional(
                context,
                session,
                StreamPurpose::BulkFallback(migration, content),
            )
            .await
            .map_err(io::Error::other)?;
            let mut accept_reply = ACCEPT_REPLY;
            receive_stream
                .read_exact(&mut accept_reply)
                .await
                .map_err(io::Error::other)?;
            Ok::<_, io::Error>((send_stream, receive_stream))
        };
        let timeout_error = |_| {
            io::Error::new(
                ErrorKind::TimedOut,
                "it did not accept a stream of the session",
            )
        };
        let stream_result = timeout(ACCEPT_TIMEOUT, stream_result)
            .await
            .map_err(timeout_error)
            .flatten();
        // The session stream may also fail because the transfer has ended. Therefore the error
        // reports both attempts.
        let (send_stream, receive_stream) = stream_result.map_err(|e| match &blocked_reason {
            Some(blocked_error) => io::Error::new(
                e.kind(),
                format!("{blocked_error}; nor by the session: {e}"),
            ),
            None => e,
        })?;
        // Two transfers of one migration may both detect that TCP is blocked; only the first of
        // these transfers logs a line.
        if let Some(blocked_error) = blocked_reason
            && self.mark_tcp_blocked(host)
        {
            let minutes = TCP_RETRY_INTERVAL.as_secs() / 60;
            tracing::warn!(
                "{migration}: TCP does not reach {host} ({blocked_error}): transfers use the session for {minutes} minutes"
            );
        }
        Ok(end_over_stream(
            send_stream,
            receive_stream,
            keys.for_connector(),
        ))
    }
}

impl ExpectedTransfer {
    /// At the listening end: waits for the TCP connection or the session stream, whichever arrives
    /// first. Returns this end of the connection.
    pub(super) async fn accept(
        mut self,
        session: &Connection,
        migration: MigrationId,
        listener: BulkListener,
    ) -> io::Result<ConnectionEnd> {
        let tcp_keys =
            ConnectionKeys::derive(session, migration, listener.offer(), Transport::Tcp)?;
        let session_keys =
            ConnectionKeys::derive(session, migration, listener.offer(), Transport::Session)?;
        tokio::select! {
            tcp_result = listener.accept(tcp_keys) => tcp_result,
            Ok((mut send_stream, receive_stream)) = &mut self.streams => {
                send_stream.write_all(&ACCEPT_REPLY).await.map_err(io::Error::other)?;
                Ok(end_over_stream(send_stream, receive_stream, session_keys.for_listener()))
            }
        }
    }
}
