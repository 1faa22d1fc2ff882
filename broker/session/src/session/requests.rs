//! Requests of members: sends, watches, leaves, and the end of the session.

use super::{Destination, GoneReason, LinkId, MemberId, Millis, Session, ToMember, Verdict};
use crate::ids::RequestSeq;
use crate::limits::LimitName;
use crate::protocol::{Request, Role, SessionEnd, WatchTarget};
use crate::state::{Knowledge, Record};
use bytes::Bytes;

impl Session {
    pub(super) fn on_request(
        &mut self,
        now: Millis,
        link: LinkId,
        member: MemberId,
        seq: RequestSeq,
        request: Request,
    ) {
        let Some(known) = self.state.members.get(&member) else {
            return;
        };
        if seq <= known.accepted {
            if let Some(verdict) = known.verdicts.get(&seq).copied() {
                self.send(now, link, ToMember::Verdict { seq, verdict });
            }
            return;
        }
        if known.verdicts.len() >= self.state.settings.limits.requests_max {
            self.close(link);
            self.set_away(now, member, GoneReason::Lost);
            return;
        }
        let is_foreman = known.profile.role == Role::Foreman;
        match request {
            Request::Send {
                to,
                kind,
                body,
                returns,
            } => self.on_send(now, member, seq, to, kind, body, returns),
            Request::Watch(target) => self.on_watch(now, member, seq, target),
            Request::Leave { moved_out } => {
                self.answer(now, member, seq, Verdict::Done);
                let reason = match moved_out {
                    true => GoneReason::MovedOut,
                    false => GoneReason::Left,
                };
                self.depart(now, member, reason);
            }
            Request::Finish { within } if is_foreman => {
                self.answer(now, member, seq, Verdict::Done);
                self.begin_end(now, SessionEnd::Finished, within);
            }
            Request::Finish { .. } => self.answer(now, member, seq, Verdict::NotAllowed),
        }
    }

    /// Records and sends a verdict of a request that changes nothing else.
    fn answer(&mut self, now: Millis, member: MemberId, seq: RequestSeq, verdict: Verdict) {
        let record = Record::Answered {
            member,
            seq,
            verdict,
        };
        self.record(now, record);
        self.send_to_member(now, member, ToMember::Verdict { seq, verdict });
    }

    fn on_watch(&mut self, now: Millis, member: MemberId, seq: RequestSeq, target: WatchTarget) {
        if let WatchTarget::Member(watched) = target
            && self.state.knowledge(watched) == Knowledge::Unknown
        {
            self.answer(now, member, seq, Verdict::Unknown);
            return;
        }
        let record = Record::Watched {
            member,
            seq,
            target,
        };
        self.record(now, record);
        let verdict = Verdict::Done;
        self.send_to_member(now, member, ToMember::Verdict { seq, verdict });
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one request")]
    fn on_send(
        &mut self,
        now: Millis,
        from: MemberId,
        seq: RequestSeq,
        to: Destination,
        kind: i32,
        body: Bytes,
        returns: bool,
    ) {
        let receiver = match self.find_receiver(to, body.len()) {
            Ok(receiver) => receiver,
            Err(verdict) => {
                if matches!(verdict, Verdict::Full(_) | Verdict::NoForeman) {
                    let destination = match (to, self.find_foreman()) {
                        (Destination::Foreman, Some(foreman)) => Destination::Member(foreman),
                        (to, _) => to,
                    };
                    self.room_waiters
                        .entry(destination)
                        .or_default()
                        .insert(from);
                }
                self.answer(now, from, seq, verdict);
                return;
            }
        };
        let record = Record::Taken {
            from,
            seq,
            to: receiver,
            kind,
            body,
            returns,
        };
        self.record(now, record);
        let verdict = Verdict::Taken;
        self.send_to_member(now, from, ToMember::Verdict { seq, verdict });
    }

    /// Returns the member that gets a message of `byte_count` bytes, or the verdict of a refusal.
    fn find_receiver(&self, to: Destination, byte_count: usize) -> Result<MemberId, Verdict> {
        let receiver = match to {
            Destination::Member(member) => member,
            Destination::Foreman => self.find_foreman().ok_or(Verdict::NoForeman)?,
        };
        let limits = &self.state.settings.limits;
        match self.state.knowledge(receiver) {
            Knowledge::Living => {}
            Knowledge::Gone(reason) => return Err(Verdict::Gone(reason)),
            Knowledge::Unknown => return Err(Verdict::Unknown),
        }
        let mailbox = self.state.members.get(&receiver).map(|m| &m.mailbox);
        let (messages, bytes) = mailbox.map_or((0, 0), |mailbox| {
            (mailbox.message_count(), mailbox.byte_count())
        });
        let full_limit = [
            (
                LimitName::MessageBytes,
                byte_count,
                limits.message_bytes_max,
            ),
            (
                LimitName::MemberMessages,
                messages + 1,
                limits.member_messages_max,
            ),
            (
                LimitName::MemberBytes,
                bytes + byte_count,
                limits.member_bytes_max,
            ),
            (
                LimitName::SessionMessages,
                self.state.waiting_messages + 1,
                limits.session_messages_max,
            ),
            (
                LimitName::SessionBytes,
                self.state.waiting_bytes + byte_count,
                limits.session_bytes_max,
            ),
        ];
        match full_limit.iter().find(|(_, value, limit)| value > limit) {
            Some((name, _, _)) => Err(Verdict::Full(*name)),
            None => Ok(receiver),
        }
    }

    fn find_foreman(&self) -> Option<MemberId> {
        let foremen = self.state.members.iter();
        let foremen = foremen.filter(|(_, member)| member.profile.role == Role::Foreman);
        foremen
            .map(|(id, _)| *id)
            .min_by_key(|id| (self.presence.get(id).and_then(|p| p.link()).is_none(), *id))
    }
}
