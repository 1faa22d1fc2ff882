//! The broker of one session as a state machine.

mod departures;
mod hello;
mod requests;

use crate::ids::{LinkId, MailSeq, MemberId, Millis, RequestSeq, Token};
use crate::limits::Settings;
use crate::protocol::{
    Destination, GoneReason, Hello, Place, Refusal, Role, SessionEnd, ToBroker, ToMember, Verdict,
};
use crate::report::{Counts, MemberReport, MemberState, SessionReport};
use crate::state::{Record, State};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// An event that the shell reports to the session.
#[derive(Clone, Debug)]
pub enum Event {
    /// An authenticated connection begins.
    Opened {
        link: LinkId,
        place: Place,
        /// The highest role that the connection's secret allows.
        rights: Role,
    },
    Frame {
        link: LinkId,
        frame: ToBroker,
    },
    /// A connection has ended.
    Closed {
        link: LinkId,
    },
    /// A task of the virtual machine has ended. Its messages have arrived before.
    TaskEnded {
        tid: i32,
        reason: GoneReason,
    },
    /// The task that the broker has started as the foreman has ended. The task may not have joined.
    ForemanEnded,
    /// The session must end.
    End {
        end: SessionEnd,
        within: Millis,
    },
    /// The time of [`Session::next_wakeup`] has come.
    Wakeup,
}

/// An action for the shell. The shell must carry out all actions in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write the record to the journal before later outputs are carried out.
    Record(Record),
    Send {
        link: LinkId,
        frame: ToMember,
    },
    Close {
        link: LinkId,
    },
    /// Report the end of this task with [`Event::TaskEnded`].
    WatchTask {
        tid: i32,
    },
    Log(SessionEvent),
    /// The session has ended. No member is left.
    Ended(SessionEnd),
}

/// An event for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    Joined {
        member: MemberId,
        host: String,
    },
    Resumed {
        member: MemberId,
    },
    Away {
        member: MemberId,
    },
    Gone {
        member: MemberId,
        reason: GoneReason,
    },
    Ending(SessionEnd),
}

/// Connection of a member that is not gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// The welcome is sent; no answer yet.
    Joining(LinkId),
    Present(LinkId),
    Away {
        since: Millis,
        /// The reason if the member does not come back.
        reason: GoneReason,
    },
}

impl Presence {
    fn link(self) -> Option<LinkId> {
        match self {
            Self::Joining(link) | Self::Present(link) => Some(link),
            Self::Away { .. } => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    place: Place,
    rights: Role,
    member: Option<MemberId>,
    last_heard: Millis,
    last_sent: Millis,
    /// The newest mail that was sent on this link.
    pushed: MailSeq,
    /// The member accepts mail up to this number.
    credit: MailSeq,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Running,
    Ending { end: SessionEnd, deadline: Millis },
    Ended(SessionEnd),
}

/// The joins of the current second.
#[derive(Clone, Copy, Debug, Default)]
struct JoinRate {
    second: u64,
    joins: u32,
}

/// The broker of one session.
#[derive(Debug)]
pub struct Session {
    state: State,
    stage: Stage,
    presence: BTreeMap<MemberId, Presence>,
    links: BTreeMap<LinkId, Link>,
    /// Members that were told that a receiver is full or missing.
    room_waiters: BTreeMap<Destination, BTreeSet<MemberId>>,
    join_rate: JoinRate,
    idle_since: Option<Millis>,
    outputs: VecDeque<Output>,
    /// No time limit expires before this time.
    check_at: Millis,
}

impl Session {
    /// Starts a session without members.
    pub fn new(session: &str, settings: Settings, now: Millis) -> Self {
        let mut new = Self::from_state(State::default(), now);
        new.record(
            now,
            Record::Started {
                session: session.to_string(),
                settings: Box::new(settings),
            },
        );
        new
    }

    /// Continues a session after a restart of the broker. All members are away until they resume.
    pub fn resume(state: State, now: Millis) -> Self {
        let mut resumed = Self::from_state(state, now);
        for tid in resumed.state.inside_tids() {
            resumed.outputs.push_back(Output::WatchTask { tid });
        }
        resumed.settle(now);
        resumed
    }

    fn from_state(state: State, now: Millis) -> Self {
        let away = Presence::Away {
            since: now,
            reason: GoneReason::Lost,
        };
        let stage = match state.end {
            None => Stage::Running,
            Some(end) => Stage::Ending {
                end,
                deadline: now.after(state.settings.timing.finish),
            },
        };
        Self {
            presence: state.members.keys().map(|id| (*id, away)).collect(),
            idle_since: state.members.is_empty().then_some(now),
            state,
            stage,
            links: BTreeMap::new(),
            room_waiters: BTreeMap::new(),
            join_rate: JoinRate::default(),
            outputs: VecDeque::new(),
            check_at: now,
        }
    }

    /// Returns the durable state, for a snapshot of the journal.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Handles an event. The shell then calls [`Session::poll`] until nothing is left.
    pub fn handle(&mut self, now: Millis, event: Event) {
        match event {
            Event::Opened {
                link,
                place,
                rights,
            } => self.on_opened(now, link, place, rights),
            Event::Frame { link, frame } => self.on_frame(now, link, frame),
            Event::Closed { link } => self.on_link_lost(now, link, GoneReason::Lost),
            Event::TaskEnded { tid, reason } => self.on_task_ended(now, tid, reason),
            Event::ForemanEnded => self.end_without_foreman(now),
            Event::End { end, within } => self.begin_end(now, end, within),
            Event::Wakeup => {}
        }
        self.check_times(now);
        self.settle(now);
    }

    /// Returns the next output.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the time at which the shell must send [`Event::Wakeup`]; `None` after the end.
    pub fn next_wakeup(&self) -> Option<Millis> {
        (!matches!(self.stage, Stage::Ended(_))).then_some(self.check_at)
    }

    /// Returns the report for users.
    pub fn report(&self, now: Millis) -> SessionReport {
        let living = self.state.members.iter().map(|(id, member)| MemberReport {
            member: *id,
            incarnation: member.incarnation,
            state: match self.presence.get(id) {
                Some(Presence::Joining(_)) => MemberState::Joining,
                Some(Presence::Present(_)) => MemberState::Present,
                Some(Presence::Away { .. }) | None => MemberState::Away,
            },
            profile: member.profile.clone(),
            place: member.place,
            sent: member.sent,
            received: member.received,
            waiting: member.mailbox.message_count() as u64,
            waiting_bytes: member.mailbox.byte_count() as u64,
            oldest: member
                .mailbox
                .oldest()
                .map_or(Millis(0), |taken_at| now.since(taken_at)),
        });
        let gone = self.state.gone.iter().map(|(id, gone)| MemberReport {
            member: *id,
            incarnation: gone.incarnation,
            state: MemberState::Gone(gone.reason),
            profile: gone.profile.clone(),
            place: gone.place,
            sent: gone.sent,
            received: gone.received,
            waiting: 0,
            waiting_bytes: 0,
            oldest: Millis(0),
        });
        SessionReport {
            session: self.state.session.clone(),
            end: self.state.end,
            counts: self.counts(),
            waiting: self.state.waiting_messages as u64,
            waiting_bytes: self.state.waiting_bytes as u64,
            members: living.chain(gone).collect(),
        }
    }

    pub fn counts(&self) -> Counts {
        self.state.counts
    }

    fn record(&mut self, now: Millis, record: Record) {
        self.outputs.push_back(Output::Record(record.clone()));
        self.state.apply(record, now);
    }

    fn send(&mut self, now: Millis, link: LinkId, frame: ToMember) {
        if let Some(entry) = self.links.get_mut(&link) {
            entry.last_sent = now;
            self.outputs.push_back(Output::Send { link, frame });
        }
    }

    fn send_to_member(&mut self, now: Millis, member: MemberId, frame: ToMember) {
        let link = self.presence.get(&member).and_then(|p| p.link());
        if let Some(link) = link {
            self.send(now, link, frame);
        }
    }

    fn close(&mut self, link: LinkId) {
        if self.links.remove(&link).is_some() {
            self.outputs.push_back(Output::Close { link });
        }
    }

    fn on_opened(&mut self, now: Millis, link: LinkId, place: Place, rights: Role) {
        let entry = Link {
            place,
            rights,
            member: None,
            last_heard: now,
            last_sent: now,
            pushed: MailSeq(0),
            credit: MailSeq(0),
        };
        self.links.insert(link, entry);
        self.check_before(now.after(self.state.settings.timing.heartbeat));
    }

    fn on_frame(&mut self, now: Millis, link: LinkId, frame: ToBroker) {
        let Some(entry) = self.links.get_mut(&link) else {
            return;
        };
        entry.last_heard = now;
        let (member, rights) = (entry.member, entry.rights);
        if let Some(member) = member
            && self.presence.get(&member) == Some(&Presence::Joining(link))
        {
            self.presence.insert(member, Presence::Present(link));
        }
        match (frame, member) {
            (ToBroker::Hello(hello), None) => self.on_hello(now, link, *hello),
            (ToBroker::Request { seq, request }, Some(member)) => {
                self.on_request(now, link, member, seq, request);
            }
            (
                ToBroker::Progress {
                    consumed,
                    seen_verdicts,
                    credit,
                },
                Some(member),
            ) => self.on_progress(now, link, member, consumed, seen_verdicts, credit),
            (ToBroker::Heartbeat, _) => {}
            (ToBroker::Inspect, _) if rights == Role::Foreman => {
                let report = Box::new(self.report(now));
                self.send(now, link, ToMember::Report(report));
            }
            (ToBroker::End { within }, _) if rights == Role::Foreman => {
                self.begin_end(now, SessionEnd::Operator, within);
                let end = self.state.end.unwrap_or(SessionEnd::Operator);
                self.send(now, link, ToMember::Ending(end));
            }
            (ToBroker::Inspect | ToBroker::End { .. }, _) => {
                self.send(now, link, ToMember::NotAllowed);
            }
            // A second hello, or a request before the hello, breaks the protocol.
            (_, _) => {
                self.close(link);
                if let Some(member) = member {
                    self.set_away(now, member, GoneReason::Lost);
                }
            }
        }
    }

    fn refuse(&mut self, now: Millis, link: LinkId, refusal: Refusal) {
        self.send(now, link, ToMember::Refused(refusal));
        self.close(link);
    }

    fn on_progress(
        &mut self,
        now: Millis,
        link: LinkId,
        member: MemberId,
        consumed: Vec<MailSeq>,
        seen_verdicts: RequestSeq,
        credit: MailSeq,
    ) {
        if let Some(link) = self.links.get_mut(&link) {
            link.credit = link.credit.max(credit);
        }
        let frees = !consumed.is_empty();
        let confirms = self
            .state
            .members
            .get(&member)
            .is_some_and(|m| m.verdicts.range(..=seen_verdicts).next().is_some());
        if frees || confirms {
            let record = Record::Progressed {
                member,
                consumed,
                seen_verdicts,
            };
            self.record(now, record);
        }
        self.push_mail(now, member);
        if frees {
            self.offer_room(now, member);
        }
    }

    /// Sends waiting mail as far as the member's credit allows.
    fn push_mail(&mut self, now: Millis, member: MemberId) {
        let link_id = self.presence.get(&member).and_then(|p| p.link());
        let (Some(link_id), Some(entry)) = (link_id, self.state.members.get(&member)) else {
            return;
        };
        let Some(link) = self.links.get_mut(&link_id) else {
            return;
        };
        for (seq, mail) in entry.mailbox.between(link.pushed, link.credit) {
            link.pushed = seq;
            link.last_sent = now;
            let mail = mail.mail.clone();
            self.outputs.push_back(Output::Send {
                link: link_id,
                frame: ToMember::Mail { seq, mail },
            });
        }
    }

    /// Tells those who met a full mailbox that half of it is free.
    fn offer_room(&mut self, now: Millis, member: MemberId) {
        let destination = Destination::Member(member);
        let limits = self.state.settings.limits;
        let has_room = self.state.members.get(&member).is_none_or(|m| {
            m.mailbox.message_count() <= limits.member_messages_max / 2
                && m.mailbox.byte_count() <= limits.member_bytes_max / 2
        });
        if has_room {
            self.tell_waiters(now, destination);
        }
        let session_has_room = self.state.waiting_messages <= limits.session_messages_max / 2
            && self.state.waiting_bytes <= limits.session_bytes_max / 2;
        if session_has_room && !self.room_waiters.is_empty() {
            let destinations: Vec<Destination> = self.room_waiters.keys().copied().collect();
            for destination in destinations {
                if destination != Destination::Foreman || self.state.has_foreman() {
                    self.tell_waiters(now, destination);
                }
            }
        }
    }

    fn tell_waiters(&mut self, now: Millis, destination: Destination) {
        for waiter in self.room_waiters.remove(&destination).unwrap_or_default() {
            self.send_to_member(now, waiter, ToMember::Room(destination));
        }
    }

    /// Sends the new mail of all members after a change.
    fn settle(&mut self, now: Millis) {
        for member in self.state.take_touched() {
            self.push_mail(now, member);
        }
        match self.stage {
            Stage::Ending { end, deadline } if self.state.members.is_empty() || deadline <= now => {
                self.complete_end(now, end);
            }
            _ => {}
        }
    }

    fn check_before(&mut self, time: Millis) {
        self.check_at = self.check_at.min(time);
    }

    fn is_known_token(&self, token: &Token) -> Option<MemberId> {
        self.state.find_token(token)
    }
}
