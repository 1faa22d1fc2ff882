//! A member of a session, for programs.

use crate::Error;
use crate::directory::recorded_end;
use crate::inside::{Connection, InsideLink};
use crate::options::{JoinOptions, SendOptions};
use crate::outside::OutsideLink;
use crate::session_file::SessionFile;
use bytes::Bytes;
use libpvm::Vm;
use ring::rand::{SecureRandom, SystemRandom};
use sempa_broker_session::{
    Closing, Destination, Endpoint, GoneReason, LimitName, Mail, MailHead, MailSeq, MemberId,
    Millis, Pattern, Phase, Profile, Refusal, Request, RequestSeq, SessionEnd, SessionReport,
    Token, Verdict, WatchTarget,
};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time limit for the broker's answer to a report or to a leave.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that dropping a member waits for the broker's answer to the leave.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);

/// Time without an answer after which a member with a session file asks the virtual machine on its
/// own host, if there is one, whether the session is over.
const LATE_COMER_TIMEOUT: Duration = Duration::from_secs(2);

/// State that all threads of a member share.
#[derive(Debug)]
pub(crate) struct MemberState {
    pub(crate) endpoint: Endpoint,
    /// Connection within the virtual machine.
    pub(crate) connection: Option<Connection>,
    /// Why the last attempt to connect from outside failed.
    pub(crate) failure: Option<String>,
    /// The limit that has refused this member within the virtual machine.
    pub(crate) refusal: Option<Refusal>,
}

#[derive(Debug)]
enum Link {
    Inside {
        link: InsideLink,
        state: Box<Mutex<MemberState>>,
    },
    Outside(Arc<OutsideLink>),
}

/// Number of a message that was sent without waiting for the verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(RequestSeq);

/// This program as a member of a session. Several threads may use it. Dropping the value leaves the
/// session.
#[derive(Debug)]
pub struct Member {
    link: Link,
    session: String,
    id: MemberId,
}

impl Member {
    /// Joins a session: as a task of the virtual machine, or from outside with a session file. The
    /// first member that arrives in the virtual machine starts the broker.
    ///
    /// # Errors
    /// [`Error::Over`] if the session is over; [`Error::Refused`] with the limit that is reached.
    pub fn join(options: JoinOptions) -> Result<Self, Error> {
        match &options.session_file {
            None => Self::join_as_task(Vm::enroll()?, options),
            Some(path) => {
                let file = SessionFile::read(path)?;
                Self::join_from_outside(file, &options)
            }
        }
    }

    /// As [`Member::join`], for a program that is already a task.
    ///
    /// # Errors
    /// As [`Member::join`].
    pub fn join_as_task(vm: Vm, options: JoinOptions) -> Result<Self, Error> {
        let deadline = Instant::now() + options.timeout;
        let link = InsideLink::new(vm, &options.session, &options.broker_options);
        let mut state = new_state(&options)?;
        link.pump_until(&mut state, Some(deadline))?;
        let link = Link::Inside {
            link,
            state: Box::new(Mutex::new(state)),
        };
        Self::await_welcome(link, options.session, deadline)
    }

    fn join_from_outside(file: SessionFile, options: &JoinOptions) -> Result<Self, Error> {
        let deadline = Instant::now() + options.timeout;
        let (session, fingerprint) = (file.session.clone(), file.fingerprint.clone());
        let link = OutsideLink::start(new_state(options)?, file)?;
        if !link.is_welcomed_before(deadline.min(Instant::now() + LATE_COMER_TIMEOUT))
            && let Some(end) = recorded_end(&session, &fingerprint)
        {
            link.stop();
            return Err(Error::Over { session, end });
        }
        Self::await_welcome(Link::Outside(link), session, deadline)
    }

    fn await_welcome(link: Link, session: String, deadline: Instant) -> Result<Self, Error> {
        let mut member = Self {
            link,
            session,
            id: MemberId(0),
        };
        let identity = member.wait_until(Some(deadline), |endpoint| {
            endpoint
                .identity()
                .filter(|_| endpoint.phase() == Phase::Present)
        })?;
        match identity {
            Some((id, _)) => {
                member.id = id;
                Ok(member)
            }
            None => Err(member.why_not_welcomed()),
        }
    }

    fn why_not_welcomed(&self) -> Error {
        let session = self.session.clone();
        let mut state = self.lock();
        let refusal = state.endpoint.take_temporary_refusal().or(state.refusal);
        if let Some(refusal) = refusal {
            return Error::Refused { session, refusal };
        }
        let failure = state.failure.take();
        Error::NoBroker {
            session,
            reason: failure.unwrap_or_else(|| "the broker did not answer in time".into()),
        }
    }

    /// Returns this member's number, which the session never uses again.
    pub fn id(&self) -> MemberId {
        self.id
    }

    pub fn session(&self) -> &str {
        &self.session
    }

    /// Returns how often this member has connected.
    pub fn incarnation(&self) -> u32 {
        let identity = self.lock().endpoint.identity();
        identity.map_or(0, |(_, incarnation)| incarnation.0)
    }

    /// Returns the member's task API; `None` outside the virtual machine.
    pub fn vm(&self) -> Option<&Vm> {
        match &self.link {
            Link::Inside { link, .. } => Some(link.vm()),
            Link::Outside(_) => None,
        }
    }

    /// Returns why the session ends, as soon as the broker has told so. The member may finish its
    /// work in the time that the foreman has given, and then leaves.
    pub fn over(&self) -> Option<SessionEnd> {
        let mut state = self.lock();
        // A failure shows itself in the next call that needs the broker.
        let _ = self.pump(&mut state);
        match state.endpoint.phase() {
            Phase::Closed(Closing::Over(end)) => Some(end),
            _ => state.endpoint.over(),
        }
    }

    /// Sends a message and waits for the verdict.
    ///
    /// # Errors
    /// This member is no longer in the session. A receiver that is gone, unknown or full is no
    /// error, but a verdict.
    pub fn send(
        &self,
        to: Destination,
        kind: i32,
        body: impl Into<Bytes>,
        options: SendOptions,
    ) -> Result<Verdict, Error> {
        let body = body.into();
        let deadline = options.wait.map(|wait| Instant::now() + wait);
        loop {
            let offers = self.lock().endpoint.room_offers();
            let ticket = self.post(to, kind, body.clone(), options.returns)?;
            let verdict = self.verdict(ticket)?;
            let may_wait = match verdict {
                Verdict::Full(limit) => limit != LimitName::MessageBytes,
                Verdict::NoForeman => true,
                _ => false,
            };
            let Some(deadline) = deadline.filter(|_| may_wait) else {
                return Ok(verdict);
            };
            let has_room = self.wait_until(Some(deadline), |endpoint| {
                (endpoint.room_offers() != offers).then_some(())
            })?;
            if has_room.is_none() {
                return Ok(verdict);
            }
        }
    }

    /// Sends a message without waiting for the verdict, which [`Member::verdict`] returns.
    ///
    /// # Errors
    /// This member is no longer in the session.
    pub fn post(
        &self,
        to: Destination,
        kind: i32,
        body: impl Into<Bytes>,
        returns: bool,
    ) -> Result<Ticket, Error> {
        let body = body.into();
        self.submit(Request::Send {
            to,
            kind,
            body,
            returns,
        })
    }

    /// Waits for the verdict of a message. Each verdict is returned once.
    ///
    /// # Errors
    /// This member is no longer in the session; whether the message was taken is not known.
    pub fn verdict(&self, ticket: Ticket) -> Result<Verdict, Error> {
        let verdict = self.wait_until(None, |endpoint| endpoint.take_verdict(ticket.0))?;
        verdict.ok_or_else(|| self.timed_out("try again"))
    }

    fn submit(&self, request: Request) -> Result<Ticket, Error> {
        let mut request = Some(request);
        let ticket = self.wait_until(None, |endpoint| {
            if !endpoint.can_submit() {
                return None;
            }
            Some(Ticket(endpoint.submit(request.take()?)))
        })?;
        ticket.ok_or_else(|| self.timed_out("try again"))
    }

    /// Waits for the earliest mail that matches. Other mail stays.
    ///
    /// # Errors
    /// This member is no longer in the session.
    pub fn recv(&self, pattern: Pattern) -> Result<Mail, Error> {
        let mail = self.wait_until(None, |endpoint| endpoint.take(pattern))?;
        mail.ok_or_else(|| self.timed_out("try again"))
    }

    /// As [`Member::recv`]; returns `None` if the time passes first.
    ///
    /// # Errors
    /// As [`Member::recv`].
    pub fn recv_timeout(&self, pattern: Pattern, timeout: Duration) -> Result<Option<Mail>, Error> {
        let deadline = Instant::now().checked_add(timeout);
        self.wait_until(deadline, |endpoint| endpoint.take(pattern))
    }

    /// Returns the earliest mail that matches and has arrived.
    ///
    /// # Errors
    /// As [`Member::recv`].
    pub fn try_recv(&self, pattern: Pattern) -> Result<Option<Mail>, Error> {
        self.check(|endpoint| endpoint.take(pattern))
    }

    /// Waits for mail that matches, and tells about it without removing it.
    ///
    /// # Errors
    /// As [`Member::recv`].
    pub fn probe(&self, pattern: Pattern) -> Result<MailHead, Error> {
        let head = self.wait_until(None, |endpoint| endpoint.probe(pattern))?;
        head.ok_or_else(|| self.timed_out("try again"))
    }

    /// As [`Member::probe`]; returns `None` if the time passes first.
    ///
    /// # Errors
    /// As [`Member::recv`].
    pub fn probe_timeout(
        &self,
        pattern: Pattern,
        timeout: Duration,
    ) -> Result<Option<MailHead>, Error> {
        let deadline = Instant::now().checked_add(timeout);
        self.wait_until(deadline, |endpoint| endpoint.probe(pattern))
    }

    /// Tells about mail that matches and has arrived. Asks nobody: the broker has sent mail ahead.
    ///
    /// # Errors
    /// As [`Member::recv`].
    pub fn iprobe(&self, pattern: Pattern) -> Result<Option<MailHead>, Error> {
        self.check(|endpoint| endpoint.probe(pattern))
    }

    /// Receives the mail that a probe has found; `None` if another thread has received it.
    ///
    /// # Errors
    /// As [`Member::recv`].
    pub fn recv_probed(&self, seq: MailSeq) -> Result<Option<Mail>, Error> {
        self.check(|endpoint| endpoint.take_at(seq))
    }

    /// Asks for a notice when members are gone. The notice is mail and comes after the last message
    /// of the member.
    ///
    /// # Errors
    /// This member is no longer in the session.
    pub fn watch(&self, target: WatchTarget) -> Result<Verdict, Error> {
        let ticket = self.submit(Request::Watch(target))?;
        self.verdict(ticket)
    }

    /// Returns the report of the session. Outside the virtual machine only a foreman may ask.
    ///
    /// # Errors
    /// [`Error::Refused`] if this member may not ask; it stays in the session.
    pub fn report(&self) -> Result<SessionReport, Error> {
        let mut asked_in = None;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let report = self.wait_until(Some(deadline), |endpoint| {
            let incarnation = endpoint.identity().map(|(_, incarnation)| incarnation);
            // The question is lost with the connection.
            if endpoint.phase() == Phase::Present && asked_in != incarnation {
                endpoint.inspect();
                asked_in = incarnation;
            }
            endpoint.take_report()
        })?;
        let report =
            report.ok_or_else(|| self.timed_out("try again, or see 'pvm-broker members'"))?;
        report.ok_or_else(|| Error::Refused {
            session: self.session.clone(),
            refusal: Refusal::NotAllowed,
        })
    }

    /// Ends the session for all after `within`. Needs the role foreman.
    ///
    /// # Errors
    /// This member is no longer in the session.
    pub fn finish(&self, within: Duration) -> Result<Verdict, Error> {
        let within = Millis(u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
        let ticket = self.submit(Request::Finish { within })?;
        match self.verdict(ticket) {
            // The end of the session may overtake the verdict.
            Err(Error::Over { .. }) => Ok(Verdict::Done),
            verdict => verdict,
        }
    }

    /// Leaves the session. Mail that was not received is returned to its senders or dropped.
    ///
    /// # Errors
    /// The broker did not confirm in time.
    pub fn leave(self) -> Result<(), Error> {
        self.leave_within(false, ANSWER_TIMEOUT)
    }

    /// Leaves the session because the owner of the host needs the host.
    ///
    /// # Errors
    /// The broker did not confirm in time.
    pub fn leave_for_owner(self) -> Result<(), Error> {
        self.leave_within(true, ANSWER_TIMEOUT)
    }

    fn leave_within(&self, moved_out: bool, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        let mut is_submitted = false;
        let result = self.wait_until::<()>(Some(deadline), |endpoint| {
            if !is_submitted {
                endpoint.submit(Request::Leave { moved_out });
                is_submitted = true;
            }
            None
        });
        match result {
            Err(Error::Gone {
                reason: GoneReason::Left | GoneReason::MovedOut,
                ..
            })
            | Err(Error::Over { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(self.timed_out("the broker notices the end of this process by itself")),
        }
    }

    fn timed_out(&self, advice: &'static str) -> Error {
        Error::TimedOut {
            session: self.session.clone(),
            advice,
        }
    }

    fn lock(&self) -> MutexGuard<'_, MemberState> {
        match &self.link {
            Link::Inside { state, .. } => state.lock().unwrap_or_else(PoisonError::into_inner),
            Link::Outside(link) => link.lock(),
        }
    }

    fn pump(&self, state: &mut MemberState) -> Result<(), Error> {
        match &self.link {
            Link::Inside { link, .. } => link.pump(state),
            Link::Outside(_) => Ok(()),
        }
    }

    fn flush(&self, state: &mut MemberState) -> Result<(), Error> {
        match &self.link {
            Link::Inside { link, .. } => link.flush(state),
            Link::Outside(link) => {
                link.flush();
                Ok(())
            }
        }
    }

    /// Calls `f` once with the newest state.
    fn check<R>(&self, f: impl FnOnce(&mut Endpoint) -> Option<R>) -> Result<Option<R>, Error> {
        let mut state = self.lock();
        self.pump(&mut state)?;
        let value = f(&mut state.endpoint);
        self.flush(&mut state)?;
        match state.endpoint.phase() {
            Phase::Closed(closing) if value.is_none() => {
                Err(Error::from_closing(&self.session, closing))
            }
            _ => Ok(value),
        }
    }

    /// Calls `f` after each change until `f` returns a value; returns `None` after the deadline.
    fn wait_until<R>(
        &self,
        deadline: Option<Instant>,
        mut f: impl FnMut(&mut Endpoint) -> Option<R>,
    ) -> Result<Option<R>, Error> {
        let mut state = self.lock();
        loop {
            self.pump(&mut state)?;
            if let Some(value) = f(&mut state.endpoint) {
                self.flush(&mut state)?;
                return Ok(Some(value));
            }
            self.flush(&mut state)?;
            if let Phase::Closed(closing) = state.endpoint.phase() {
                return Err(Error::from_closing(&self.session, closing));
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(None);
            }
            state = self.wait(state, deadline)?;
        }
    }

    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, MemberState>,
        deadline: Option<Instant>,
    ) -> Result<MutexGuard<'a, MemberState>, Error> {
        match &self.link {
            Link::Inside { link, .. } => {
                let generation = link.generation();
                let connection = state.connection;
                drop(state);
                if let Some(connection) = connection {
                    link.wait(connection, generation, deadline)?;
                }
                Ok(self.lock())
            }
            Link::Outside(link) => Ok(match deadline {
                None => link
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let time = deadline.saturating_duration_since(Instant::now());
                    let waited = link.changed.wait_timeout(state, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            }),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let is_present = self.lock().endpoint.phase() == Phase::Present;
        if is_present {
            // Without an answer the broker notices the end of this process by itself.
            let _ = self.leave_within(false, DROP_TIMEOUT);
        }
        if let Link::Outside(link) = &self.link {
            link.stop();
        }
    }
}

fn new_state(options: &JoinOptions) -> Result<MemberState, Error> {
    let mut token = [0; 16];
    SystemRandom::new()
        .fill(&mut token)
        .map_err(|_| std::io::Error::other("no random bytes"))?;
    let host = nix::unistd::gethostname().unwrap_or_default();
    let program = std::env::args_os().next().unwrap_or_default();
    let program = Path::new(&program).file_name().unwrap_or_default();
    let profile = Profile {
        role: options.role,
        host: host.to_string_lossy().into_owned(),
        program: program.to_string_lossy().into_owned(),
        factor: options.factor,
    };
    Ok(MemberState {
        endpoint: Endpoint::new(Token(token), profile),
        connection: None,
        failure: None,
        refusal: None,
    })
}
