//! Joins of new members, and resumes of members whose connection has ended.

use super::{
    Hello, JoinRate, LinkId, MailSeq, MemberId, Millis, Output, Place, Presence, Refusal, Session,
    SessionEvent, Stage, ToMember,
};
use crate::limits::LimitName;
use crate::protocol::{Destination, PROTOCOL_VERSION, Role};
use crate::state::{Knowledge, Record};

impl Session {
    pub(super) fn on_hello(&mut self, now: Millis, link: LinkId, hello: Hello) {
        let Some(entry) = self.links.get(&link).copied() else {
            return;
        };
        if hello.version != PROTOCOL_VERSION {
            self.refuse(now, link, Refusal::WrongVersion(PROTOCOL_VERSION));
            return;
        }
        if hello.profile.role > entry.rights {
            self.refuse(now, link, Refusal::NotAllowed);
            return;
        }
        if let Stage::Ended(end) = self.stage {
            self.refuse(now, link, Refusal::Over(end));
            return;
        }
        let known_member = self.is_known_token(&hello.token);
        match known_member.map(|member| (member, self.state.knowledge(member))) {
            Some((member, Knowledge::Living)) => self.resume_member(now, link, member, &hello),
            Some((_, Knowledge::Gone(reason))) => self.refuse(now, link, Refusal::Gone(reason)),
            Some((_, Knowledge::Unknown)) | None => self.join(now, link, entry.place, hello),
        }
    }

    fn join(&mut self, now: Millis, link: LinkId, place: Place, hello: Hello) {
        let refusal = if hello.member.is_some() {
            Some(Refusal::UnknownMember)
        } else if let Stage::Ending { end, .. } | Stage::Ended(end) = self.stage {
            Some(Refusal::Over(end))
        } else if self.state.members.len() >= self.state.settings.limits.members_max {
            Some(Refusal::Limit(LimitName::Members))
        } else if !self.allows_join(now) {
            Some(Refusal::Limit(LimitName::JoinsPerSecond))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.refuse(now, link, refusal);
            return;
        }
        let (role, host) = (hello.profile.role, hello.profile.host.clone());
        let record = Record::Joined {
            token: hello.token,
            profile: hello.profile,
            place,
        };
        self.record(now, record);
        let member = self.state.newest_member;
        self.idle_since = None;
        self.outputs
            .push_back(Output::Log(SessionEvent::Joined { member, host }));
        if let Place::Inside { tid } = place {
            self.outputs.push_back(Output::WatchTask { tid });
        }
        self.connect(now, link, member, MailSeq(0), hello.credit);
        if role == Role::Foreman {
            self.tell_waiters(now, Destination::Foreman);
        }
    }

    fn allows_join(&mut self, now: Millis) -> bool {
        let second = now.0 / 1000;
        if self.join_rate.second != second {
            self.join_rate = JoinRate { second, joins: 0 };
        }
        self.join_rate.joins += 1;
        self.join_rate.joins <= self.state.settings.limits.joins_per_second_max
    }

    fn resume_member(&mut self, now: Millis, link: LinkId, member: MemberId, hello: &Hello) {
        let Some(known) = self.state.members.get(&member) else {
            return;
        };
        if hello.received < known.mailbox.highest_consumed() {
            self.refuse(now, link, Refusal::OlderState);
            return;
        }
        let arrived = known.mailbox.seqs_up_to(hello.received);
        let old_link = self.presence.get(&member).and_then(|p| p.link());
        if let Some(old_link) = old_link {
            self.send(now, old_link, ToMember::Superseded);
            self.close(old_link);
        }
        let place = self
            .links
            .get(&link)
            .map_or(Place::Outside, |entry| entry.place);
        let record = Record::Resumed {
            member,
            place,
            received: hello.received,
        };
        self.record(now, record);
        if let Place::Inside { tid } = place {
            self.outputs.push_back(Output::WatchTask { tid });
        }
        // Mail that has arrived and is not held was received by the program.
        let mut consumed = arrived;
        consumed.retain(|seq| !hello.held.contains(seq));
        let record = Record::Progressed {
            member,
            consumed,
            seen_verdicts: hello.seen_verdicts,
        };
        self.record(now, record);
        self.outputs
            .push_back(Output::Log(SessionEvent::Resumed { member }));
        self.connect(now, link, member, hello.received, hello.credit);
        self.offer_room(now, member);
    }

    /// Connects a member to its new link and sends what the member has missed.
    fn connect(
        &mut self,
        now: Millis,
        link: LinkId,
        member: MemberId,
        received: MailSeq,
        credit: MailSeq,
    ) {
        let settings = self.state.settings;
        let Some(known) = self.state.members.get(&member) else {
            return;
        };
        if let Some(entry) = self.links.get_mut(&link) {
            entry.member = Some(member);
            entry.pushed = received;
            entry.credit = credit;
        }
        let welcome = ToMember::Welcome {
            session: self.state.session.clone(),
            member,
            incarnation: known.incarnation,
            accepted: known.accepted,
            heartbeat: settings.timing.heartbeat,
            silence_max: settings.timing.silence_max,
            mail_max: settings.limits.member_messages_max as u64,
        };
        let verdicts: Vec<_> = known.verdicts.iter().map(|(s, v)| (*s, *v)).collect();
        self.presence.insert(member, Presence::Joining(link));
        self.send(now, link, welcome);
        for (seq, verdict) in verdicts {
            self.send(now, link, ToMember::Verdict { seq, verdict });
        }
        if let Stage::Ending { end, deadline } = self.stage {
            let within = deadline.since(now);
            self.send(now, link, ToMember::Over { end, within });
        }
        self.push_mail(now, member);
        self.check_before(now.after(settings.timing.heartbeat));
    }
}
