//! The durable state of a session and the records that change it.

use crate::ids::{Incarnation, MailSeq, MemberId, Millis, RequestSeq, Token};
use crate::limits::Settings;
use crate::mailbox::{Mailbox, MailboxEntry, NOTICES_MAX};
use crate::protocol::{GoneReason, Mail, Place, Profile, Role, SessionEnd, Verdict, WatchTarget};
use crate::report::Counts;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A change of the durable state. The journal is the sequence of all records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    Started {
        session: String,
        settings: Box<Settings>,
    },
    /// A new member got the next number.
    Joined {
        token: Token,
        profile: Profile,
        place: Place,
    },
    Resumed {
        member: MemberId,
        place: Place,
        /// The newest mail that the member has.
        received: MailSeq,
    },
    /// A message is in the receiver's mailbox.
    Taken {
        from: MemberId,
        seq: RequestSeq,
        to: MemberId,
        kind: i32,
        body: Bytes,
        returns: bool,
    },
    /// A request got this verdict and changed nothing else.
    Answered {
        member: MemberId,
        seq: RequestSeq,
        verdict: Verdict,
    },
    Watched {
        member: MemberId,
        seq: RequestSeq,
        target: WatchTarget,
    },
    Progressed {
        member: MemberId,
        consumed: Vec<MailSeq>,
        seen_verdicts: RequestSeq,
    },
    Departed {
        member: MemberId,
        reason: GoneReason,
    },
    Ending(SessionEnd),
    /// The whole state; replaces all earlier records.
    Snapshot(Box<State>),
}

impl Record {
    /// True if the record must be on the disk before later outputs are carried out.
    pub fn must_be_synced(&self) -> bool {
        !matches!(
            self,
            Self::Resumed { .. } | Self::Answered { .. } | Self::Progressed { .. }
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) token: Token,
    pub(crate) profile: Profile,
    pub(crate) place: Place,
    pub(crate) incarnation: Incarnation,
    pub(crate) mailbox: Mailbox,
    /// All requests up to this one are processed.
    pub(crate) accepted: RequestSeq,
    /// Verdicts that the member has not confirmed.
    pub(crate) verdicts: BTreeMap<RequestSeq, Verdict>,
    pub(crate) watches_all: bool,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GoneMember {
    pub(crate) reason: GoneReason,
    pub(crate) token: Token,
    pub(crate) profile: Profile,
    pub(crate) place: Place,
    pub(crate) incarnation: Incarnation,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// State of a member number in the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Knowledge {
    Living,
    Gone(GoneReason),
    Unknown,
}

/// The durable state of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub(crate) session: String,
    pub(crate) settings: Settings,
    pub(crate) newest_member: MemberId,
    pub(crate) members: BTreeMap<MemberId, Member>,
    pub(crate) gone: BTreeMap<MemberId, GoneMember>,
    tokens: BTreeMap<Token, MemberId>,
    /// Members that watch one member.
    watchers: BTreeMap<MemberId, BTreeSet<MemberId>>,
    pub(crate) end: Option<SessionEnd>,
    pub(crate) counts: Counts,
    pub(crate) waiting_messages: usize,
    pub(crate) waiting_bytes: usize,
    /// Members with new mail since the last call of [`State::take_touched`].
    #[serde(skip)]
    touched: BTreeSet<MemberId>,
}

impl State {
    /// Restores the state from a journal. Records may only be missing at the end.
    pub fn recover(records: impl IntoIterator<Item = Record>) -> Self {
        let mut state = Self::default();
        for record in records {
            state.apply(record, Millis(0));
        }
        state.touched.clear();
        state
    }

    /// Returns the name of the session; empty before the first record.
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Returns why the session ends, if it ends.
    pub fn end(&self) -> Option<SessionEnd> {
        self.end
    }

    /// Returns the tasks of the virtual machine that are members and not gone.
    pub fn inside_tids(&self) -> Vec<i32> {
        let places = self.members.values().map(|member| member.place);
        places
            .filter_map(|place| match place {
                Place::Inside { tid } => Some(tid),
                Place::Outside => None,
            })
            .collect()
    }

    pub(crate) fn find_token(&self, token: &Token) -> Option<MemberId> {
        self.tokens.get(token).copied()
    }

    pub(crate) fn knowledge(&self, member: MemberId) -> Knowledge {
        if self.members.contains_key(&member) {
            Knowledge::Living
        } else if let Some(gone) = self.gone.get(&member) {
            Knowledge::Gone(gone.reason)
        } else if member.0 >= 1 && member <= self.newest_member {
            Knowledge::Gone(GoneReason::Forgotten)
        } else {
            Knowledge::Unknown
        }
    }

    pub(crate) fn has_foreman(&self) -> bool {
        let mut members = self.members.values();
        members.any(|member| member.profile.role == Role::Foreman)
    }

    /// Returns the members with new mail since the last call.
    pub(crate) fn take_touched(&mut self) -> BTreeSet<MemberId> {
        std::mem::take(&mut self.touched)
    }

    pub(crate) fn apply(&mut self, record: Record, now: Millis) {
        match record {
            Record::Started { session, settings } => {
                self.session = session;
                self.settings = *settings;
            }
            Record::Joined {
                token,
                profile,
                place,
            } => self.apply_join(token, profile, place),
            Record::Resumed {
                member,
                place,
                received,
            } => {
                if let Some(member) = self.members.get_mut(&member) {
                    member.incarnation.0 += 1;
                    member.place = place;
                    member.mailbox.skip_to(received);
                }
            }
            Record::Taken {
                from,
                seq,
                to,
                kind,
                body,
                returns,
            } => {
                self.answer(from, seq, Verdict::Taken);
                self.counts.taken += 1;
                if let Some(sender) = self.members.get_mut(&from) {
                    sender.sent += 1;
                }
                self.deliver(to, Mail::Message { from, kind, body }, returns, now);
            }
            Record::Answered {
                member,
                seq,
                verdict,
            } => {
                self.counts.refused += u64::from(verdict != Verdict::Done);
                self.answer(member, seq, verdict);
            }
            Record::Watched {
                member,
                seq,
                target,
            } => self.apply_watch(member, seq, target, now),
            Record::Progressed {
                member,
                consumed,
                seen_verdicts,
            } => self.apply_progress(member, &consumed, seen_verdicts),
            Record::Departed { member, reason } => self.apply_departure(member, reason, now),
            Record::Ending(end) => self.end = Some(end),
            Record::Snapshot(state) => *self = *state,
        }
    }

    fn apply_join(&mut self, token: Token, profile: Profile, place: Place) {
        self.newest_member.0 += 1;
        self.counts.joins += 1;
        self.tokens.insert(token, self.newest_member);
        let member = Member {
            token,
            profile,
            place,
            incarnation: Incarnation(1),
            mailbox: Mailbox::default(),
            accepted: RequestSeq(0),
            verdicts: BTreeMap::new(),
            watches_all: false,
            sent: 0,
            received: 0,
        };
        self.members.insert(self.newest_member, member);
    }

    fn answer(&mut self, member: MemberId, seq: RequestSeq, verdict: Verdict) {
        if let Some(member) = self.members.get_mut(&member) {
            member.accepted = member.accepted.max(seq);
            member.verdicts.insert(seq, verdict);
        }
    }

    /// Adds mail to a mailbox. Mail for a member that is gone is dropped; the caller has counted
    /// that mail.
    fn deliver(&mut self, to: MemberId, mail: Mail, returns: bool, now: Millis) {
        let Some(receiver) = self.members.get_mut(&to) else {
            return;
        };
        let is_notice = matches!(mail, Mail::Gone { .. });
        if is_notice && receiver.mailbox.notice_count() >= NOTICES_MAX {
            self.counts.dropped_notices += 1;
            return;
        }
        self.waiting_messages += usize::from(!is_notice);
        self.waiting_bytes += mail.byte_count();
        receiver.mailbox.push(MailboxEntry {
            mail,
            returns,
            taken_at: now,
        });
        self.touched.insert(to);
    }

    fn apply_watch(&mut self, member: MemberId, seq: RequestSeq, target: WatchTarget, now: Millis) {
        self.answer(member, seq, Verdict::Done);
        match target {
            WatchTarget::All => {
                if let Some(member) = self.members.get_mut(&member) {
                    member.watches_all = true;
                }
            }
            WatchTarget::Member(watched) => match self.knowledge(watched) {
                Knowledge::Gone(reason) => {
                    let notice = Mail::Gone {
                        member: watched,
                        reason,
                        undelivered: 0,
                    };
                    self.deliver(member, notice, false, now);
                }
                Knowledge::Living | Knowledge::Unknown => {
                    self.watchers.entry(watched).or_default().insert(member);
                }
            },
        }
    }

    fn apply_progress(
        &mut self,
        member: MemberId,
        consumed: &[MailSeq],
        seen_verdicts: RequestSeq,
    ) {
        let Some(member) = self.members.get_mut(&member) else {
            return;
        };
        for seq in consumed {
            let Some(entry) = member.mailbox.consume(*seq) else {
                continue;
            };
            self.waiting_bytes -= entry.mail.byte_count();
            match entry.mail {
                Mail::Message { .. } => {
                    member.received += 1;
                    self.counts.delivered += 1;
                    self.waiting_messages -= 1;
                }
                Mail::Returned { .. } => self.waiting_messages -= 1,
                Mail::Gone { .. } => {}
            }
        }
        member.verdicts.retain(|seq, _| *seq > seen_verdicts);
    }

    fn apply_departure(&mut self, id: MemberId, reason: GoneReason, now: Millis) {
        let Some(mut member) = self.members.remove(&id) else {
            return;
        };
        self.waiting_messages -= member.mailbox.message_count();
        self.waiting_bytes -= member.mailbox.byte_count();
        let mut undelivered = 0;
        for entry in member.mailbox.drain() {
            let Mail::Message { from, kind, body } = entry.mail else {
                continue;
            };
            undelivered += 1;
            if entry.returns && self.members.contains_key(&from) {
                self.counts.returned += 1;
                let returned = Mail::Returned {
                    to: id,
                    kind,
                    body,
                    reason,
                };
                self.deliver(from, returned, false, now);
            } else {
                self.counts.dropped += 1;
            }
        }
        for watchers in self.watchers.values_mut() {
            watchers.remove(&id);
        }
        let mut watchers = self.watchers.remove(&id).unwrap_or_default();
        self.watchers.retain(|_, watchers| !watchers.is_empty());
        let members_that_watch_all = self.members.iter().filter(|(_, other)| other.watches_all);
        watchers.extend(members_that_watch_all.map(|(other, _)| *other));
        for watcher in watchers {
            let notice = Mail::Gone {
                member: id,
                reason,
                undelivered,
            };
            self.deliver(watcher, notice, false, now);
        }
        self.remember_gone(id, member, reason);
    }

    fn remember_gone(&mut self, id: MemberId, member: Member, reason: GoneReason) {
        let gone = GoneMember {
            reason,
            token: member.token,
            profile: member.profile,
            place: member.place,
            incarnation: member.incarnation,
            sent: member.sent,
            received: member.received,
        };
        self.gone.insert(id, gone);
        while self.gone.len() > self.settings.limits.gone_members_max {
            if let Some((_, forgotten)) = self.gone.pop_first() {
                self.tokens.remove(&forgotten.token);
            }
        }
    }
}
