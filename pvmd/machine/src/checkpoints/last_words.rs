//! The last words of tasks that have ended, on their way while others are written.
//!
//! What a living task has sent and its peer has not taken it sends again after a restart. One that has ended does not: its daemon
//! sends what is left, and behind that word of its end. A checkpoint without these words would lose them, as a worker's result that
//! its master waits for. So before a task is written its daemon has to know the ends of all that have ended of its job; and when some of
//! what they said waits for the task then, it goes on and takes it, and the checkpoint is tried again.

use crate::pairs::sender_of;
use crate::tasks::Task;
use crate::{Machine, Output, Timer};
use sempa_proto::host::{Carried, Held};
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::migration::Failure;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeSet, VecDeque};

/// Ends that are remembered.
const ENDS_MAX: usize = 65_536;
/// So long a word of an end is waited for. What has not come by then was lost with its host, or with its session.
const AWAIT_TIME: Micros = Micros::from_secs(2);
/// So long after an end last words may be on their way: a host that is silent for longer is lost, mostly.
const RECENT_SPAN: Micros = Micros::from_secs(10);
/// Ends that are remembered for that.
const RECENT_MAX: usize = 512;

/// Tasks of which it is known that they have ended.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    known: BTreeSet<Tid>,
    /// The oldest first; some may have been forgotten.
    order: VecDeque<Tid>,
}

impl Ends {
    fn add(&mut self, tid: Tid) {
        if self.known.insert(tid) {
            self.order.push_back(tid);
        }
        while self.order.len() > ENDS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// It has begun again.
    pub(crate) fn forget(&mut self, tid: Tid) {
        if self.known.remove(&tid) {
            self.order.retain(|other| *other != tid);
        }
    }
}

/// What the master remembers of ends, whoever it was and whether anybody makes checkpoints of his job: before the first one nobody
/// knows who belongs to it.
#[derive(Debug, Default)]
pub(super) struct Recent(VecDeque<(Micros, Tid)>);

impl Recent {
    /// This task has ended.
    pub(super) fn ended(&mut self, now: Micros, tid: Tid) {
        self.0.push_back((now, tid));
        let is_old = |(at, _): &(Micros, Tid)| now.since(*at) >= RECENT_SPAN;
        while self.0.len() > RECENT_MAX || self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
    }

    /// Whose last words may be on their way.
    pub(super) fn all(&self, now: Micros) -> impl Iterator<Item = Tid> {
        self.0
            .iter()
            .filter(move |(at, _)| now.since(*at) < RECENT_SPAN)
            .map(|(_, tid)| *tid)
    }
}

impl Machine {
    /// A host has just come in. It was not there to hear of ends, and nobody is to wait until it has.
    pub(crate) fn tell_of_ends(&mut self, host: HostId) {
        let now = self.now;
        let Some(keeping) = self.keeping() else {
            return;
        };
        let ended: Vec<Tid> = keeping.recent.all(now).collect();
        let words = ended.into_iter().map(|dst| Carried::Ended {
            dst,
            marks: Vec::new(),
        });
        self.out
            .extend(words.map(|carried| Output::Carry { host, carried }));
    }

    /// Word of an end has come, and so all that the task said.
    pub(crate) fn end_is_known(&mut self, tid: Tid) {
        self.tasks.ends.add(tid);
        // Those that are to be written are few, and mostly there are none.
        for source in self.moves.sources.values() {
            let Some(task) = self.tasks.live.get_mut(&source.of().tid) else {
                continue;
            };
            if task.awaits.remove(&tid) {
                self.moves.settled.extend(task.take_settled());
            }
        }
    }

    /// A task is to be written when the ends of these are known here.
    pub(crate) fn await_ends(&mut self, id: MigrationId, tid: Tid, ended: Vec<Tid>) {
        let known = &self.tasks.ends.known;
        let can_come = |tid: &Tid| {
            self.location(*tid)
                .is_some_and(|host| self.table.get(host).is_some())
        };
        let awaits: BTreeSet<Tid> = ended
            .into_iter()
            .filter(|tid| !known.contains(tid) && can_come(tid))
            .collect();
        if awaits.is_empty() {
            return;
        }
        if let Some(task) = self.tasks.get_mut(tid) {
            task.awaits = awaits;
            self.timer(AWAIT_TIME, Timer::AwaitsEnds(tid, id));
        }
    }

    /// They have not come in their time.
    pub(crate) fn await_no_longer(&mut self, tid: Tid, id: MigrationId) {
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.settling == Some(id))
        else {
            return;
        };
        task.awaits.clear();
        self.moves.settled.extend(task.take_settled());
    }

    /// Whether nothing waits for a task that somebody said who has ended.
    ///
    /// # Errors
    /// It has to take that before it is written.
    pub(super) fn has_heard_the_dead(&self, task: &Task) -> Result<(), Failure> {
        let left = task.away.as_ref().map_or(0, |away| away.left);
        let is_said = |held: &&Held| match held {
            Held::Link(bytes) => matches!(LinkFrame::kind_of(bytes), Some(LinkKind::Data { .. })),
            Held::Item(_) => false,
        };
        let mut senders = task
            .inbox
            .iter()
            .skip(left)
            .filter(is_said)
            .filter_map(sender_of);
        match senders.find(|src| self.tasks.ends.known.contains(src)) {
            None => Ok(()),
            Some(src) => Err(Failure::CalledOff(format!(
                "the last words of {src} have come, which has ended, and it has to take them first"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_recent_for_a_while_and_only_so_many_of_them() {
        let mut recent = Recent::default();
        let all = |recent: &Recent, at: Micros| recent.all(at).map(Tid::raw).collect::<Vec<_>>();
        recent.ended(Micros(0), Tid::from_raw(1));
        recent.ended(Micros(1), Tid::from_raw(2));
        assert_eq!(all(&recent, Micros(RECENT_SPAN.0 - 1)), [1, 2]);
        assert_eq!(all(&recent, RECENT_SPAN), [2]);
        recent.ended(RECENT_SPAN + Micros(1), Tid::from_raw(3));
        assert_eq!(recent.0.len(), 1);
        (0..=RECENT_MAX).for_each(|_| recent.ended(RECENT_SPAN + Micros(2), Tid::from_raw(4)));
        assert_eq!(all(&recent, RECENT_SPAN + Micros(2)), vec![4; RECENT_MAX]);
    }

    #[test]
    fn as_many_ends_are_remembered_as_there_is_room_for_and_none_of_who_has_begun_again() {
        let mut ends = Ends::default();
        let tids =
            || (0..=i32::try_from(ENDS_MAX).expect("small")).map(|n| Tid::from_raw(0x40000 + n));
        tids().for_each(|tid| ends.add(tid));
        assert_eq!(
            (ends.known.len(), ends.known.first()),
            (ENDS_MAX, Some(&Tid::from_raw(0x40001)))
        );
        let again = Tid::from_raw(0x40005);
        ends.forget(again);
        assert!(!ends.known.contains(&again));
        ends.add(again);
        assert_eq!(
            (ends.known.len(), ends.order.len(), ends.order.back()),
            (ENDS_MAX, ENDS_MAX, Some(&again))
        );
    }
}
