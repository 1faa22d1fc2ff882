//! A member as a state machine. The shell connects it to the broker and carries its frames.

use crate::ids::{Incarnation, MailSeq, MemberId, Millis, RequestSeq, Token};
use crate::protocol::{
    GoneReason, Hello, Mail, PROTOCOL_VERSION, Profile, Refusal, Request, SessionEnd, ToBroker,
    ToMember, Verdict,
};
use crate::report::SessionReport;
use std::collections::{BTreeMap, VecDeque};

/// Number of mails that the broker may send before the program receives one.
const WINDOW: u64 = 64;
/// Number of requests that may wait for verdicts.
const UNANSWERED_MAX: usize = 512;
/// Number of verdicts after which the broker is told that they have arrived.
const UNCONFIRMED_MAX: usize = 32;
/// Time between heartbeats before the broker has told its own.
const HEARTBEAT_BEFORE_WELCOME: Millis = Millis(5_000);
/// Silence that ends a connection before the broker has told its own limit.
const SILENCE_BEFORE_WELCOME: Millis = Millis(15_000);

/// Selects mail to receive. `None` matches any value, also notices and returned messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Pattern {
    pub source: Option<MemberId>,
    pub kind: Option<MailKind>,
}

/// The kinds of mail that a program distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailKind {
    /// A message with the application's type.
    Message(i32),
    /// A notice that a member is gone.
    Gone,
    /// A message of this member that came back.
    Returned,
}

/// Returns source and kind of mail. The source of a notice is the member that is gone; the source
/// of a returned message is its receiver.
fn describe(mail: &Mail) -> (MemberId, MailKind) {
    match mail {
        Mail::Message { from, kind, .. } => (*from, MailKind::Message(*kind)),
        Mail::Gone { member, .. } => (*member, MailKind::Gone),
        Mail::Returned { to, .. } => (*to, MailKind::Returned),
    }
}

impl Pattern {
    pub fn any() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn source(self, source: MemberId) -> Self {
        Self {
            source: Some(source),
            ..self
        }
    }

    /// Selects messages of this type.
    #[must_use]
    pub fn kind(self, kind: i32) -> Self {
        self.mail_kind(MailKind::Message(kind))
    }

    #[must_use]
    pub fn mail_kind(self, kind: MailKind) -> Self {
        Self {
            kind: Some(kind),
            ..self
        }
    }

    pub fn matches(&self, mail: &Mail) -> bool {
        let (source, kind) = describe(mail);
        self.source.is_none_or(|wanted| wanted == source)
            && self.kind.is_none_or(|wanted| wanted == kind)
    }
}

/// Description of mail that a probe returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MailHead {
    pub seq: MailSeq,
    pub source: MemberId,
    pub kind: MailKind,
    pub byte_count: usize,
}

/// Why a member is no longer in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    Refused(Refusal),
    /// The broker counts this member as gone.
    Gone(GoneReason),
    /// The session is over.
    Over(SessionEnd),
    /// Another process uses this member's token.
    Superseded,
}

/// Connection state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Disconnected,
    /// The hello is sent.
    Joining,
    Present,
    Closed(Closing),
}

/// A member of a session.
#[derive(Debug)]
pub struct Endpoint {
    token: Token,
    profile: Profile,
    phase: Phase,
    session: String,
    identity: Option<(MemberId, Incarnation)>,
    newest_request: RequestSeq,
    /// Requests without a verdict.
    unanswered: BTreeMap<RequestSeq, Request>,
    /// Verdicts that the program has not taken.
    verdicts: BTreeMap<RequestSeq, Verdict>,
    /// Mail that the program has not received.
    store: BTreeMap<MailSeq, Mail>,
    received: MailSeq,
    /// Mail that the program has received since the hello was made.
    unreported: Vec<MailSeq>,
    credit: MailSeq,
    /// Number of mails that may be in the store; grows while no stored mail matches.
    window: u64,
    mail_max: u64,
    over: Option<SessionEnd>,
    room_offers: u64,
    /// Verdicts that arrived since the broker was told of the newest one.
    unconfirmed_verdicts: usize,
    /// Reports that have arrived; `None` for a question that was not allowed.
    reports: VecDeque<Option<SessionReport>>,
    temporary_refusal: Option<Refusal>,
    out: VecDeque<ToBroker>,
    heartbeat: Millis,
    silence_max: Millis,
    last_heard: Millis,
    last_sent: Millis,
}

impl Endpoint {
    /// Makes a member that has not joined. `token` must be random.
    pub fn new(token: Token, profile: Profile) -> Self {
        Self {
            token,
            profile,
            phase: Phase::Disconnected,
            session: String::new(),
            identity: None,
            newest_request: RequestSeq(0),
            unanswered: BTreeMap::new(),
            verdicts: BTreeMap::new(),
            store: BTreeMap::new(),
            received: MailSeq(0),
            unreported: Vec::new(),
            credit: MailSeq(WINDOW),
            window: WINDOW,
            mail_max: WINDOW,
            over: None,
            room_offers: 0,
            unconfirmed_verdicts: 0,
            reports: VecDeque::new(),
            temporary_refusal: None,
            out: VecDeque::new(),
            heartbeat: HEARTBEAT_BEFORE_WELCOME,
            silence_max: SILENCE_BEFORE_WELCOME,
            last_heard: Millis(0),
            last_sent: Millis(0),
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the member's number and incarnation; `None` before the first welcome.
    pub fn identity(&self) -> Option<(MemberId, Incarnation)> {
        self.identity
    }

    /// Returns the session's name; empty before the first welcome.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Returns why the session ends, if the broker has told so.
    pub fn over(&self) -> Option<SessionEnd> {
        self.over
    }

    /// Returns the newest temporary refusal once.
    pub fn take_temporary_refusal(&mut self) -> Option<Refusal> {
        self.temporary_refusal.take()
    }

    /// Returns the answer to [`Endpoint::inspect`] once: the report, or `Some(None)` if this member
    /// may not have one.
    pub fn take_report(&mut self) -> Option<Option<SessionReport>> {
        self.reports.pop_front()
    }

    /// A connection to the broker exists: sends the hello.
    pub fn connected(&mut self, now: Millis) {
        if matches!(self.phase, Phase::Closed(_)) {
            return;
        }
        self.phase = Phase::Joining;
        (self.last_heard, self.last_sent) = (now, now);
        self.out.clear();
        self.unreported.clear();
        let hello = Hello {
            version: PROTOCOL_VERSION,
            token: self.token,
            profile: self.profile.clone(),
            member: self.identity.map(|(member, _)| member),
            received: self.received,
            held: self.store.keys().copied().collect(),
            seen_verdicts: self.seen_verdicts(),
            credit: self.credit,
        };
        self.out.push_back(ToBroker::Hello(Box::new(hello)));
    }

    /// The connection is lost. The shell connects again unless the phase is closed.
    pub fn disconnected(&mut self) {
        self.out.clear();
        if !matches!(self.phase, Phase::Closed(_)) {
            self.phase = Phase::Disconnected;
        }
    }

    /// Ends the membership locally. Mail that the program has not received is dropped, because the
    /// broker has returned that mail or counts it as dropped.
    pub fn close(&mut self, closing: Closing) {
        self.out.clear();
        self.store.clear();
        self.phase = Phase::Closed(closing);
    }

    pub fn handle(&mut self, now: Millis, frame: ToMember) {
        self.last_heard = now;
        match frame {
            ToMember::Welcome {
                session,
                member,
                incarnation,
                accepted,
                heartbeat,
                silence_max,
                mail_max,
            } => {
                self.session = session;
                self.identity = Some((member, incarnation));
                (self.heartbeat, self.silence_max) = (heartbeat, silence_max);
                self.mail_max = mail_max;
                self.on_welcome(accepted);
            }
            ToMember::Refused(refusal) => self.on_refusal(refusal),
            ToMember::Verdict { seq, verdict } => {
                if self.unanswered.remove(&seq).is_some() {
                    self.verdicts.insert(seq, verdict);
                    self.unconfirmed_verdicts += 1;
                }
                if self.unconfirmed_verdicts >= UNCONFIRMED_MAX {
                    self.push_progress();
                }
            }
            ToMember::Mail { seq, mail } => {
                if seq > self.received {
                    self.received = seq;
                    self.store.insert(seq, mail);
                }
            }
            ToMember::Room(_) => self.room_offers += 1,
            ToMember::Over { end, .. } => self.over = Some(end),
            ToMember::Closed(GoneReason::SessionOver) => {
                let end = self.over.unwrap_or(SessionEnd::Finished);
                self.close(Closing::Over(end));
            }
            ToMember::Closed(reason) => self.close(Closing::Gone(reason)),
            ToMember::Superseded => self.close(Closing::Superseded),
            ToMember::Report(report) => self.reports.push_back(Some(*report)),
            ToMember::NotAllowed => self.reports.push_back(None),
            ToMember::Heartbeat | ToMember::Ending(_) => {}
        }
    }

    fn on_welcome(&mut self, accepted: RequestSeq) {
        self.phase = Phase::Present;
        // Offers may have been lost with the old connection.
        self.room_offers += 1;
        self.push_progress();
        let repeated = self.unanswered.range(RequestSeq(accepted.0 + 1)..);
        let repeated = repeated.map(|(seq, request)| ToBroker::Request {
            seq: *seq,
            request: request.clone(),
        });
        self.out.extend(repeated);
    }

    fn on_refusal(&mut self, refusal: Refusal) {
        match refusal {
            refusal if refusal.is_temporary() => {
                self.temporary_refusal = Some(refusal);
                self.disconnected();
            }
            Refusal::Over(end) => self.close(Closing::Over(end)),
            Refusal::Gone(reason) => self.close(Closing::Gone(reason)),
            refusal => self.close(Closing::Refused(refusal)),
        }
    }

    /// Queues a request and returns its number, under which the verdict arrives.
    pub fn submit(&mut self, request: Request) -> RequestSeq {
        self.newest_request.0 += 1;
        let seq = self.newest_request;
        if self.phase == Phase::Present {
            let request = request.clone();
            self.out.push_back(ToBroker::Request { seq, request });
        }
        self.unanswered.insert(seq, request);
        seq
    }

    /// Requests a report; the answer is in [`Endpoint::take_report`]. A request is lost when the
    /// connection breaks.
    pub fn inspect(&mut self) {
        if self.phase == Phase::Present {
            self.out.push_back(ToBroker::Inspect);
        }
    }

    /// Returns the verdict of a request once, if the verdict has arrived.
    pub fn take_verdict(&mut self, seq: RequestSeq) -> Option<Verdict> {
        self.verdicts.remove(&seq)
    }

    /// Returns a number that changes when a receiver that was full or missing may have room.
    pub fn room_offers(&self) -> u64 {
        self.room_offers
    }

    /// True if the broker accepts another request before it has answered the earlier ones.
    pub fn can_submit(&self) -> bool {
        self.unanswered.len() < UNANSWERED_MAX
    }

    /// Returns the earliest mail that matches, without removing the mail. If none matches and the
    /// window is full, the broker gets credit for more.
    pub fn probe(&mut self, pattern: Pattern) -> Option<MailHead> {
        let head = self.find(pattern);
        if head.is_none() && self.store.len() as u64 >= self.window {
            // Other mail stays in the store, so the window must grow until a match comes.
            let window_max = self.mail_max.saturating_mul(2).max(WINDOW);
            self.window = (self.window * 2)
                .min(window_max)
                .max(self.store.len() as u64 + 1);
            self.push_progress();
        }
        head
    }

    fn find(&self, pattern: Pattern) -> Option<MailHead> {
        let (seq, mail) = self.store.iter().find(|(_, mail)| pattern.matches(mail))?;
        let (source, kind) = describe(mail);
        Some(MailHead {
            seq: *seq,
            source,
            kind,
            byte_count: mail.byte_count(),
        })
    }

    /// Removes the earliest mail that matches and tells the broker that the program has the mail.
    pub fn take(&mut self, pattern: Pattern) -> Option<Mail> {
        let head = self.probe(pattern)?;
        self.take_at(head.seq)
    }

    /// Removes the mail that a probe has found.
    pub fn take_at(&mut self, seq: MailSeq) -> Option<Mail> {
        let mail = self.store.remove(&seq)?;
        if (self.store.len() as u64) < WINDOW / 2 {
            self.window = WINDOW;
        }
        self.unreported.push(seq);
        self.push_progress();
        Some(mail)
    }

    fn seen_verdicts(&self) -> RequestSeq {
        let first_unanswered = self.unanswered.keys().next();
        first_unanswered.map_or(self.newest_request, |seq| RequestSeq(seq.0 - 1))
    }

    fn push_progress(&mut self) {
        let free = self.window.saturating_sub(self.store.len() as u64);
        self.credit = self.credit.max(MailSeq(self.received.0 + free));
        if self.phase == Phase::Present {
            self.unconfirmed_verdicts = 0;
            let consumed = std::mem::take(&mut self.unreported);
            let (seen_verdicts, credit) = (self.seen_verdicts(), self.credit);
            self.out.push_back(ToBroker::Progress {
                consumed,
                seen_verdicts,
                credit,
            });
        }
    }

    /// Returns the next frame for the broker.
    pub fn poll(&mut self, now: Millis) -> Option<ToBroker> {
        let frame = self.out.pop_front()?;
        self.last_sent = now;
        Some(frame)
    }

    /// Sends a heartbeat if one is due. Returns false if the broker was silent for too long: the
    /// shell must close the connection. Connections within the virtual machine need no heartbeat.
    pub fn keep_alive(&mut self, now: Millis) -> bool {
        if now.since(self.last_sent) >= self.heartbeat && self.out.is_empty() {
            self.out.push_back(ToBroker::Heartbeat);
        }
        now.since(self.last_heard) < self.silence_max
    }

    /// Returns the time of the next call of [`Endpoint::keep_alive`].
    pub fn next_keep_alive(&self) -> Millis {
        let heartbeat_at = self.last_sent.after(self.heartbeat);
        heartbeat_at.min(self.last_heard.after(self.silence_max))
    }
}
