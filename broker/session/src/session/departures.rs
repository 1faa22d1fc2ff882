//! Members that are away or gone, and the end of the session.

use super::{
    Destination, GoneReason, LinkId, MemberId, Millis, Output, Place, Presence, Session,
    SessionEnd, SessionEvent, Stage, ToMember,
};
use crate::limits::ForemanPolicy;
use crate::protocol::Role;
use crate::state::Record;

/// Largest time between two checks of time limits.
const CHECK_INTERVAL_MAX: Millis = Millis(60_000);

impl Session {
    pub(super) fn on_link_lost(&mut self, now: Millis, link: LinkId, reason: GoneReason) {
        let Some(entry) = self.links.remove(&link) else {
            return;
        };
        if let Some(member) = entry.member {
            self.set_away(now, member, reason);
        }
    }

    /// Marks a member as away. `reason` counts if the member does not come back.
    pub(super) fn set_away(&mut self, now: Millis, member: MemberId, reason: GoneReason) {
        if let Some(presence) = self.presence.get_mut(&member) {
            *presence = Presence::Away { since: now, reason };
            self.outputs
                .push_back(Output::Log(SessionEvent::Away { member }));
            self.check_before(now.after(self.state.settings.timing.grace));
        }
    }

    pub(super) fn on_task_ended(&mut self, now: Millis, tid: i32, reason: GoneReason) {
        let place = Place::Inside { tid };
        let of_task = |(id, member): (&MemberId, &crate::state::Member)| {
            (member.place == place).then_some(*id)
        };
        let members: Vec<MemberId> = self.state.members.iter().filter_map(of_task).collect();
        for member in members {
            self.depart(now, member, reason);
        }
        let links = self.links.iter();
        let links: Vec<LinkId> = links
            .filter(|(_, link)| link.place == place)
            .map(|(link, _)| *link)
            .collect();
        for link in links {
            self.close(link);
        }
    }

    /// Makes a member gone: its messages are returned or dropped, then watchers are told.
    pub(super) fn depart(&mut self, now: Millis, member: MemberId, reason: GoneReason) {
        let Some(presence) = self.presence.remove(&member) else {
            return;
        };
        let role = self.state.members.get(&member).map(|m| m.profile.role);
        self.record(now, Record::Departed { member, reason });
        self.outputs
            .push_back(Output::Log(SessionEvent::Gone { member, reason }));
        if let Some(link) = presence.link() {
            self.send(now, link, ToMember::Closed(reason));
            self.close(link);
        }
        for waiters in self.room_waiters.values_mut() {
            waiters.remove(&member);
        }
        // Waiters learn from their next attempt that the member is gone.
        self.tell_waiters(now, Destination::Member(member));
        self.room_waiters.retain(|_, waiters| !waiters.is_empty());
        if self.state.members.is_empty() {
            self.idle_since = Some(now);
            self.check_before(now.after(self.state.settings.timing.idle));
        }
        if role == Some(Role::Foreman) {
            self.end_without_foreman(now);
        }
    }

    /// Ends a session that is left without a foreman, if that is the policy.
    pub(super) fn end_without_foreman(&mut self, now: Millis) {
        let ends = self.state.settings.foreman_policy == ForemanPolicy::End;
        // A foreman that has ended the session has given a time of its own.
        let is_running = matches!(self.stage, Stage::Running);
        if ends && is_running && !self.state.has_foreman() {
            let within = self.state.settings.timing.finish;
            self.begin_end(now, SessionEnd::ForemanGone, within);
        }
    }

    /// Tells all members that the session ends, and ends the session after `within`.
    pub(super) fn begin_end(&mut self, now: Millis, end: SessionEnd, within: Millis) {
        let deadline = now.after(within);
        match &mut self.stage {
            Stage::Running => {
                self.stage = Stage::Ending { end, deadline };
                self.record(now, Record::Ending(end));
                self.outputs
                    .push_back(Output::Log(SessionEvent::Ending(end)));
                let members: Vec<MemberId> = self.presence.keys().copied().collect();
                for member in members {
                    self.send_to_member(now, member, ToMember::Over { end, within });
                }
            }
            // A later word may only shorten the time.
            Stage::Ending { deadline: old, .. } => *old = deadline.min(*old),
            Stage::Ended(_) => return,
        }
        self.check_before(deadline);
    }

    pub(super) fn complete_end(&mut self, now: Millis, end: SessionEnd) {
        let members: Vec<MemberId> = self.presence.keys().copied().collect();
        for member in members {
            self.depart(now, member, GoneReason::SessionOver);
        }
        self.stage = Stage::Ended(end);
        self.outputs.push_back(Output::Ended(end));
    }

    /// Carries out what is due, and computes when the next time limit expires.
    pub(super) fn check_times(&mut self, now: Millis) {
        if now < self.check_at {
            return;
        }
        let timing = self.state.settings.timing;
        let mut next_check = now.after(CHECK_INTERVAL_MAX);
        let outside_links = self.links.iter();
        let outside_links: Vec<LinkId> = outside_links
            .filter(|(_, link)| link.place == Place::Outside)
            .map(|(id, _)| *id)
            .collect();
        for id in outside_links {
            let Some(link) = self.links.get(&id).copied() else {
                continue;
            };
            let silence_end = link.last_heard.after(timing.silence_max);
            if silence_end <= now {
                self.outputs.push_back(Output::Close { link: id });
                self.on_link_lost(now, id, GoneReason::TimedOut);
                continue;
            }
            let mut heartbeat_at = link.last_sent.after(timing.heartbeat);
            if heartbeat_at <= now {
                self.send(now, id, ToMember::Heartbeat);
                heartbeat_at = now.after(timing.heartbeat);
            }
            next_check = next_check.min(silence_end).min(heartbeat_at);
        }
        self.check_at = next_check;
        self.check_away(now);
        if let Some(since) = self.idle_since {
            let idle_end = since.after(timing.idle);
            if idle_end <= now {
                self.begin_end(now, SessionEnd::Idle, Millis(0));
            } else {
                self.check_before(idle_end);
            }
        }
        if let Stage::Ending { deadline, .. } = self.stage {
            self.check_before(deadline);
        }
    }

    /// Ends the grace time of members outside. Of members inside the virtual machine tells when
    /// they end.
    fn check_away(&mut self, now: Millis) {
        let grace = self.state.settings.timing.grace;
        let mut gone_members = Vec::new();
        let mut next_check = None;
        for (id, presence) in &self.presence {
            let is_outside = self
                .state
                .members
                .get(id)
                .is_some_and(|member| member.place == Place::Outside);
            if let (true, Presence::Away { since, reason }) = (is_outside, presence) {
                let grace_end = since.after(grace);
                if grace_end <= now {
                    gone_members.push((*id, *reason));
                } else {
                    next_check = Some(next_check.unwrap_or(grace_end).min(grace_end));
                }
            }
        }
        for (member, reason) in gone_members {
            self.depart(now, member, reason);
        }
        if let Some(next_check) = next_check {
            self.check_before(next_check);
        }
    }
}
