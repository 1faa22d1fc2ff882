//! Connections whose first message has not arrived. The module does no input or output.
//!
//! The number of connections of each user is limited, so a user who opens many of them, and sends
//! nothing, does not keep others out.

use sempa_proto::tasker_service::{self, DecodeError, ServiceRequest};
use std::time::{Duration, Instant};

/// Time limit for the first message.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections without a request, of all users and of one.
const PENDING_MAX: usize = 256;
const PENDING_OF_USER_MAX: usize = 8;

/// A connection with the user of its peer. `C` is the socket.
#[derive(Debug)]
pub(crate) struct PendingConnection<C> {
    pub(crate) socket: C,
    pub(crate) uid: u32,
    received_bytes: Vec<u8>,
    deadline: Instant,
}

/// All connections without a complete request.
#[derive(Debug)]
pub(crate) struct PendingConnections<C>(Vec<PendingConnection<C>>);

impl<C> Default for PendingConnections<C> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<C> PendingConnections<C> {
    /// Adds a connection. Returns the socket if its user, or all users, have too many.
    pub(crate) fn add(&mut self, socket: C, uid: u32, now: Instant) -> Result<(), C> {
        let of_user = self.0.iter().filter(|pending| pending.uid == uid).count();
        if self.0.len() >= PENDING_MAX || of_user >= PENDING_OF_USER_MAX {
            return Err(socket);
        }
        self.0.push(PendingConnection {
            socket,
            uid,
            received_bytes: Vec::new(),
            deadline: now + REQUEST_TIMEOUT,
        });
        Ok(())
    }

    pub(crate) fn sockets(&self) -> impl Iterator<Item = &C> {
        self.0.iter().map(|pending| &pending.socket)
    }

    /// Removes and returns the connections whose indices `is_ready` accepts.
    pub(crate) fn take_ready(
        &mut self,
        is_ready: impl Fn(usize) -> bool,
    ) -> Vec<PendingConnection<C>> {
        let mut index = 0;
        let mut take = |_: &mut PendingConnection<C>| {
            index += 1;
            is_ready(index - 1)
        };
        self.0.extract_if(.., &mut take).collect()
    }

    /// Adds a connection again, whose request is not complete yet.
    pub(crate) fn put_back(&mut self, pending: PendingConnection<C>) {
        self.0.push(pending);
    }

    /// Removes the connections whose time limit has passed.
    pub(crate) fn remove_expired(&mut self, now: Instant) {
        self.0.retain(|pending| pending.deadline > now);
    }

    /// Returns the time until the next time limit; `None` without connections.
    pub(crate) fn next_timeout(&self, now: Instant) -> Option<Duration> {
        let next_deadline = self.0.iter().map(|pending| pending.deadline).min();
        next_deadline.map(|deadline| deadline.saturating_duration_since(now))
    }
}

impl<C> PendingConnection<C> {
    /// Adds received bytes. Returns the request once it is complete.
    ///
    /// # Errors
    /// The bytes are no request, or more than one.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<Option<ServiceRequest>, DecodeError> {
        self.received_bytes.extend_from_slice(bytes);
        match tasker_service::decode(&self.received_bytes)? {
            // The daemon waits for the reply before it sends anything else.
            Some((_, length)) if length < self.received_bytes.len() => {
                Err(DecodeError::TooLong(self.received_bytes.len()))
            }
            request => Ok(request.map(|(request, _)| request)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::tasker_service::{SessionId, encode};

    /// A user with many silent connections keeps no other user out, and they end in time.
    #[test]
    fn silent_connections_of_a_user_are_few_and_end() {
        let (mut pending, start) = (PendingConnections::default(), Instant::now());
        let accepted = (0..1000).filter(|n| pending.add(*n, 7, start).is_ok());
        assert_eq!(accepted.count(), PENDING_OF_USER_MAX);
        assert_eq!(pending.add(5000, 8, start), Ok(()));
        assert_eq!(pending.next_timeout(start), Some(REQUEST_TIMEOUT));
        pending.remove_expired(start + REQUEST_TIMEOUT);
        assert_eq!(
            (pending.sockets().count(), pending.next_timeout(start)),
            (0, None)
        );
        for uid in 0..1000 {
            // The first refusal is due to the total number.
            let _ = pending.add(uid, uid, start);
        }
        assert_eq!(pending.sockets().count(), PENDING_MAX);
    }

    /// A request may arrive in pieces; nothing may follow before the reply.
    #[test]
    fn request_is_complete_with_its_last_byte() {
        let (mut pending, now) = (PendingConnections::default(), Instant::now());
        let request = ServiceRequest::Kill {
            session: SessionId(3),
        };
        let bytes = encode(&request);
        pending.add((), 1, now).expect("the first");
        let mut connection = pending.take_ready(|_| true).pop().expect("one");
        let (first, rest) = bytes.split_at(5);
        assert_eq!(connection.receive(first), Ok(None));
        pending.put_back(connection);
        let mut connection = pending.take_ready(|index| index == 0).pop().expect("one");
        assert_eq!(connection.receive(rest), Ok(Some(request)));
        assert!(connection.receive(b"x").is_err());
    }
}
