//! Notices of tasks that end and of hosts that come and go, one after the other.

use crate::error::Error;
use crate::vm::{Match, Vm};
use sempa_proto::task::{NotifyRequest, NotifyWhat, Reply, Request};
use sempa_proto::{HostId, Message, PvmError, Tid};
use std::collections::VecDeque;
use std::iter::FusedIterator;
use std::time::Duration;

/// The tag of the messages; their context is the notices' own.
const TAG: i32 = 1;

/// Something that was asked for has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notice {
    /// This task has ended; all that it has sent to this one is here.
    TaskEnded(Tid),
    /// This host has left, or was lost.
    HostGone(HostId),
    /// This host has joined.
    HostJoined(HostId),
}

/// Notices as they come: an iterator that waits. It ends when nothing more can come, or after an error. When it is
/// dropped, nothing more is asked for.
///
/// ```no_run
/// use libpvm::{Notice, Vm};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vm = Vm::enroll()?;
/// let workers = vm.spawner("worker").count(3).start()?.all()?;
/// let tids: Vec<_> = workers.iter().map(|worker| worker.tid()).collect();
/// for notice in vm.watch_tasks(&tids)? {
///     if let Notice::TaskEnded(tid) = notice? {
///         println!("{tid} has ended");
///     }
/// }
/// println!("all have ended");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Notices {
    vm: Vm,
    ctx: i32,
    what: NotifyWhat,
    /// How many messages are still to come; `None`: without end.
    open: Option<usize>,
    /// Read, and not handed out.
    ready: VecDeque<Notice>,
    broken: bool,
}

impl Vm {
    /// A notice for each of these tasks when it ends; at once for one that has ended.
    ///
    /// # Errors
    /// [`PvmError::BadParam`] for what is no task; otherwise as the daemon says.
    pub fn watch_tasks(&self, tids: &[Tid]) -> Result<Notices, Error> {
        self.watch(NotifyWhat::TaskExit(tids.to_vec()), Some(tids.len()))
    }

    /// A notice for each of these hosts when it leaves or is lost; at once for one that is not there.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn watch_hosts(&self, hosts: &[HostId]) -> Result<Notices, Error> {
        self.watch(
            NotifyWhat::HostDelete(hosts.iter().map(|host| host.tid()).collect()),
            Some(hosts.len()),
        )
    }

    /// A notice for each host that joins from now on.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn watch_new_hosts(&self) -> Result<Notices, Error> {
        self.watch(NotifyWhat::HostAdd { count: -1 }, None)
    }

    fn watch(&self, what: NotifyWhat, open: Option<usize>) -> Result<Notices, Error> {
        let ctx = match self.runtime().request(Request::NewContext) {
            Reply::Context(ctx) => ctx,
            other => return Err(Error::from_reply("making a context", other)),
        };
        let notices = Notices {
            vm: self.clone(),
            ctx,
            what,
            open,
            ready: VecDeque::new(),
            broken: false,
        };
        if open != Some(0) {
            // On failure the drop gives the context back.
            self.notify(notices.request(false))?;
        }
        Ok(notices)
    }
}

impl Notices {
    /// The next notice if one is here.
    ///
    /// # Errors
    /// As [`Vm::try_recv`].
    pub fn try_next(&mut self) -> Result<Option<Notice>, Error> {
        self.advance(|vm, wanted| vm.try_recv(wanted))
    }

    /// Waits for the next notice, but no longer than `span`.
    ///
    /// # Errors
    /// As [`Vm::recv_timeout`].
    pub fn next_within(&mut self, span: Duration) -> Result<Option<Notice>, Error> {
        self.advance(|vm, wanted| vm.recv_timeout(wanted, span))
    }

    /// True when a message carries notices of these, for programs that wait for other messages at the same time
    /// ([`Vm::recv_where`]); [`Notices::notices_in`] reads it.
    pub fn are_in(&self, message: &Message) -> bool {
        message.ctx == self.ctx && message.tag == TAG
    }

    /// The notices in a message of these ([`Notices::are_in`]).
    ///
    /// # Errors
    /// [`PvmError::BadMsg`] when it holds something else.
    pub fn notices_in(&mut self, message: &Message) -> Result<Vec<Notice>, Error> {
        self.open = self.open.map(|open| open.saturating_sub(1));
        read(&self.what, message).map(Vec::from)
    }

    /// True when nothing more can come.
    pub fn is_done(&self) -> bool {
        self.ready.is_empty() && (self.broken || self.open == Some(0))
    }

    fn advance(
        &mut self,
        recv: impl FnOnce(&Vm, Match) -> Result<Option<Message>, Error>,
    ) -> Result<Option<Notice>, Error> {
        if self.ready.is_empty() && !self.is_done() {
            let found = recv(&self.vm, Match::any().ctx(self.ctx).tag(TAG));
            self.broken = found.is_err();
            if let Some(message) = found? {
                self.ready = self.notices_in(&message)?.into();
            }
        }
        Ok(self.ready.pop_front())
    }

    fn request(&self, cancel: bool) -> NotifyRequest {
        NotifyRequest {
            what: self.what.clone(),
            ctx: self.ctx,
            tag: TAG,
            cancel,
        }
    }
}

/// The notices in a message about `what`.
fn read(what: &NotifyWhat, message: &Message) -> Result<VecDeque<Notice>, Error> {
    let mut body = Vm::unpack(message)?;
    let host = |tid: i32| Tid::from_raw(tid).home().ok_or(PvmError::BadMsg);
    let read = match what {
        NotifyWhat::TaskExit(_) => body
            .int()
            .map(|tid| [Notice::TaskEnded(Tid::from_raw(tid))].into()),
        NotifyWhat::HostDelete(_) => body
            .int()
            .and_then(host)
            .map(|host| [Notice::HostGone(host)].into()),
        NotifyWhat::HostAdd { .. } => {
            body.int()
                .and_then(|count| body.ints(count))
                .and_then(|tids| {
                    tids.into_iter()
                        .map(|tid| host(tid).map(Notice::HostJoined))
                        .collect()
                })
        }
    };
    read.map_err(|error| Error::new(error, format!("a notice cannot be read: {error}")))
}

impl Iterator for Notices {
    type Item = Result<Notice, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_done() {
            return None;
        }
        self.advance(|vm, wanted| vm.recv(wanted).map(Some))
            .transpose()
    }
}

impl FusedIterator for Notices {}

impl Drop for Notices {
    fn drop(&mut self) {
        // None of this matters when the daemon is gone. What was asked for and has not come comes at once when it is
        // cancelled; it is dropped with what has come and was not read.
        if self.open != Some(0) {
            let _ = self.vm.notify(self.request(true));
        }
        let ctx = self.ctx;
        let mut drain = |inbox: &mut crate::Inbox| inbox.take_first(|message| message.ctx == ctx);
        while self.vm.runtime().inbox_try(&mut drain).is_some() {}
        let _ = self.vm.runtime().request(Request::FreeContext { ctx });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::body::{Encoding, Packer};

    fn of(what: NotifyWhat, words: &[i32]) -> Result<Vec<Notice>, Error> {
        let mut body = Packer::new(Encoding::Xdr);
        body.items(words.iter().copied());
        let (src, dst) = (HostId::MASTER.daemon(), Tid::from_raw(0x40001));
        let enc = sempa_proto::message::ENC_XDR;
        let message = Message {
            src,
            dst,
            ctx: 7,
            tag: TAG,
            wid: 0,
            enc,
            body: body.finish(),
        };
        read(&what, &message).map(Vec::from)
    }

    #[test]
    fn messages_become_notices() {
        let task = Tid::from_raw(0x80001);
        let (h2, h3) = (HostId::new(2).expect("2"), HostId::new(3).expect("3"));
        assert_eq!(
            of(NotifyWhat::TaskExit(vec![task]), &[0x80001]),
            Ok(vec![Notice::TaskEnded(task)])
        );
        assert_eq!(
            of(NotifyWhat::HostDelete(vec![h2.tid()]), &[0x80000]),
            Ok(vec![Notice::HostGone(h2)])
        );
        let joined = vec![Notice::HostJoined(h2), Notice::HostJoined(h3)];
        assert_eq!(
            of(NotifyWhat::HostAdd { count: -1 }, &[2, 0x80000, 0xc0000]),
            Ok(joined)
        );
        assert!(of(NotifyWhat::HostAdd { count: -1 }, &[2, 0x80000]).is_err());
        assert!(of(NotifyWhat::HostDelete(vec![h2.tid()]), &[0]).is_err());
    }

    #[test]
    fn the_parts_of_the_interface_may_go_to_other_threads() {
        fn sends<T: Send>() {}
        fn shares<T: Sync>() {}
        sends::<Vm>();
        shares::<Vm>();
        sends::<crate::Task>();
        shares::<crate::Task>();
        sends::<Notices>();
        sends::<crate::Spawn>();
    }
}
