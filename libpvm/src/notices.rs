//! Iterators over notices: a task has ended, or a host has joined or left.

use crate::error::Error;
use crate::vm::{Match, Vm};
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request};
use sempa_proto::{HostId, Message, PvmError, Tid};
use std::collections::VecDeque;
use std::iter::FusedIterator;
use std::time::Duration;

/// Tag of all notice messages. Each [`Notices`] uses its own message context, so the messages of
/// different [`Notices`] differ.
const NOTICE_TAG: i32 = 1;

/// An event about which this task has requested a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// The task with this tid has ended. All messages that the ended task sent to this task have
    /// arrived.
    TaskEnded(Tid),
    /// The host has left the virtual machine, or was lost.
    HostRemoved(HostId),
    HostJoined(HostId),
}

/// Blocking iterator over notices. The iterator ends when no further notice can arrive, or after an
/// error. Dropping the iterator cancels the request.
///
/// ```no_run
/// use libpvm::{Notice, Vm};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vm = Vm::enroll()?;
/// let workers = vm.spawner("worker").count(3).start()?.all()?;
/// let tids: Vec<_> = workers.iter().map(|worker| worker.tid()).collect();
/// for notice in vm.watch_tasks(&tids)? {
///   if let Notice::TaskEnded(tid) = notice? {
///       println!("{tid} has ended");
///   }
/// }
/// println!("all have ended");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Notices {
    vm: Vm,
    ctx: i32,
    subjects: NotifySubjects,
    /// Number of notice messages that have not arrived yet; `None` if the number is unlimited.
    remaining_messages: Option<usize>,
    /// Notices that were read from a message and not returned yet.
    decoded_notices: VecDeque<Notice>,
    has_failed: bool,
}

impl Vm {
    /// Requests one notice for the end of each of these tasks. If a task has already ended, its
    /// notice is sent immediately.
    ///
    /// # Errors
    /// [`PvmError::BadParam`] if a tid is not a task; otherwise the daemon's error.
    pub fn watch_tasks(&self, tids: &[Tid]) -> Result<Notices, Error> {
        self.watch(NotifySubjects::TaskExit(tids.to_vec()), Some(tids.len()))
    }

    /// Requests one notice for the departure or loss of each of these hosts. If a host is not in
    /// the host table, its notice is sent immediately.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn watch_hosts(&self, hosts: &[HostId]) -> Result<Notices, Error> {
        self.watch(
            NotifySubjects::HostDelete(hosts.iter().map(|host| host.tid()).collect()),
            Some(hosts.len()),
        )
    }

    /// Requests a notice for each host that joins after this call.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn watch_new_hosts(&self) -> Result<Notices, Error> {
        self.watch(NotifySubjects::HostAdd { messages_max: -1 }, None)
    }

    fn watch(
        &self,
        subjects: NotifySubjects,
        message_count: Option<usize>,
    ) -> Result<Notices, Error> {
        let ctx = match self.runtime().request_and_wait(Request::NewContext) {
            Reply::Context(ctx) => ctx,
            other => return Err(Error::from_reply("making a context", other)),
        };
        let notices = Notices {
            vm: self.clone(),
            ctx,
            subjects,
            remaining_messages: message_count,
            decoded_notices: VecDeque::new(),
            has_failed: false,
        };
        if message_count != Some(0) {
            // If the request fails, dropping `notices` frees the context.
            self.notify(notices.notify_request(false))?;
        }
        Ok(notices)
    }
}

impl Notices {
    /// Returns the next notice, or `None` if none has arrived.
    ///
    /// # Errors
    /// As [`Vm::try_recv`].
    pub fn try_next(&mut self) -> Result<Option<Notice>, Error> {
        self.receive_next(|vm, selection| vm.try_recv(selection))
    }

    /// Waits for the next notice. Returns `None` if the timeout expires or no further notice can
    /// arrive.
    ///
    /// # Errors
    /// As [`Vm::recv_timeout`].
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<Notice>, Error> {
        self.receive_next(|vm, selection| vm.recv_timeout(selection, timeout))
    }

    /// True if the message contains notices of this iterator. A program that also waits for other
    /// messages passes this method to [`Vm::recv_where`] and decodes the message with
    /// [`Notices::decode`].
    pub fn is_notice_message(&self, message: &Message) -> bool {
        message.ctx == self.ctx && message.tag == NOTICE_TAG
    }

    /// Returns the notices in a message for which [`Notices::is_notice_message`] is true.
    ///
    /// # Errors
    /// [`PvmError::BadMsg`] if the message does not contain notices of the requested kind.
    pub fn decode(&mut self, message: &Message) -> Result<Vec<Notice>, Error> {
        self.remaining_messages = self.remaining_messages.map(|count| count.saturating_sub(1));
        decode_notices(&self.subjects, message).map(Vec::from)
    }

    /// True if no further notice can arrive.
    pub fn is_exhausted(&self) -> bool {
        self.decoded_notices.is_empty() && (self.has_failed || self.remaining_messages == Some(0))
    }

    fn receive_next(
        &mut self,
        receive: impl FnOnce(&Vm, Match) -> Result<Option<Message>, Error>,
    ) -> Result<Option<Notice>, Error> {
        if self.decoded_notices.is_empty() && !self.is_exhausted() {
            let receive_result = receive(&self.vm, Match::any().ctx(self.ctx).tag(NOTICE_TAG));
            self.has_failed = receive_result.is_err();
            if let Some(message) = receive_result? {
                self.decoded_notices = self.decode(&message)?.into();
            }
        }
        Ok(self.decoded_notices.pop_front())
    }

    fn notify_request(&self, cancel: bool) -> NotifyRequest {
        NotifyRequest {
            subjects: self.subjects.clone(),
            ctx: self.ctx,
            tag: NOTICE_TAG,
            is_cancellation: cancel,
        }
    }
}

/// Decodes the notices in a notice message. `subjects` is the kind of notices that was requested.
fn decode_notices(subjects: &NotifySubjects, message: &Message) -> Result<VecDeque<Notice>, Error> {
    let mut body = Vm::unpack(message)?;
    let host_of_tid = |tid: i32| Tid::from_raw(tid).birth_host().ok_or(PvmError::BadMsg);
    let decoded_notices = match subjects {
        NotifySubjects::TaskExit(_) => body
            .read_int()
            .map(|tid| [Notice::TaskEnded(Tid::from_raw(tid))].into()),
        NotifySubjects::HostDelete(_) => body
            .read_int()
            .and_then(host_of_tid)
            .map(|host_of_tid| [Notice::HostRemoved(host_of_tid)].into()),
        NotifySubjects::HostAdd { .. } => body
            .read_int()
            .and_then(|count| body.read_ints(count))
            .and_then(|tids| {
                tids.into_iter()
                    .map(|tid| host_of_tid(tid).map(Notice::HostJoined))
                    .collect()
            }),
    };
    decoded_notices.map_err(|error| Error::new(error, format!("a notice cannot be read: {error}")))
}

impl Iterator for Notices {
    type Item = Result<Notice, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_exhausted() {
            return None;
        }
        self.receive_next(|vm, selection| vm.recv(selection).map(Some))
            .transpose()
    }
}

impl FusedIterator for Notices {}

impl Drop for Notices {
    fn drop(&mut self) {
        // Errors do not matter here: without the daemon there is no request to cancel. After the
        // cancellation the daemon immediately sends the outstanding notices. These notices are
        // dropped together with the notices that the program has not read.
        if self.remaining_messages != Some(0) {
            let _ = self.vm.notify(self.notify_request(true));
        }
        let ctx = self.ctx;
        let mut take_message =
            |inbox: &mut crate::Inbox| inbox.take_first(|message| message.ctx == ctx);
        while self.vm.runtime().check_inbox(&mut take_message).is_some() {}
        let _ = self
            .vm
            .runtime()
            .request_and_wait(Request::FreeContext { ctx });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::body::{Encoding, Packer};

    fn decode_ints(subjects: NotifySubjects, integers: &[i32]) -> Result<Vec<Notice>, Error> {
        let mut body = Packer::new(Encoding::Xdr);
        body.pack_items(integers.iter().copied());
        let (src, dst) = (HostId::MASTER.daemon_tid(), Tid::from_raw(0x40001));
        let enc = sempa_proto::message::ENC_XDR;
        let message = Message {
            src,
            dst,
            ctx: 7,
            tag: NOTICE_TAG,
            wid: 0,
            enc,
            body: body.finish(),
        };
        decode_notices(&subjects, &message).map(Vec::from)
    }

    /// Messages about tasks and hosts are decoded into notices. Malformed messages are errors.
    #[test]
    fn notice_messages_are_decoded() {
        let task = Tid::from_raw(0x80001);
        let (h2, h3) = (HostId::new(2).expect("2"), HostId::new(3).expect("3"));
        assert_eq!(
            decode_ints(NotifySubjects::TaskExit(vec![task]), &[0x80001]),
            Ok(vec![Notice::TaskEnded(task)])
        );
        assert_eq!(
            decode_ints(NotifySubjects::HostDelete(vec![h2.tid()]), &[0x80000]),
            Ok(vec![Notice::HostRemoved(h2)])
        );
        let join_notices = vec![Notice::HostJoined(h2), Notice::HostJoined(h3)];
        assert_eq!(
            decode_ints(
                NotifySubjects::HostAdd { messages_max: -1 },
                &[2, 0x80000, 0xc0000]
            ),
            Ok(join_notices)
        );
        assert!(decode_ints(NotifySubjects::HostAdd { messages_max: -1 }, &[2, 0x80000]).is_err());
        assert!(decode_ints(NotifySubjects::HostDelete(vec![h2.tid()]), &[0]).is_err());
    }

    /// The types of the Rust API can be sent to other threads. Most of these types can be shared
    /// between threads.
    #[test]
    fn api_types_are_send_and_sync() {
        fn assert_send<T: Send>() {}
        fn assert_sync<T: Sync>() {}
        assert_send::<Vm>();
        assert_sync::<Vm>();
        assert_send::<crate::Task>();
        assert_sync::<crate::Task>();
        assert_send::<Notices>();
        assert_send::<crate::Spawn>();
    }
}
