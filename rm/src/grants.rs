//! Answers to requests that were not made yet: a task that has just spawned twice in the same way will likely do so again, and
//! need not ask each time. Pure; the service decides the places and sends what is given ([`sempa_proto::sm::Grant`]).
//!
//! What is given is looked at again each second, and given anew where the same request would get other places by then: so as long as the
//! resource manager works it is not older than what that knows. Daemons keep tasks off hosts whose owners want none whoever chose the
//! place. All of it together is bounded, so that many tasks cannot be sent to the same good host before anybody has heard of the first.

use crate::spawns::Incoming;
use sempa_proto::rm::Attempt;
use sempa_proto::sm::{GRANT_COUNT_MAX, GRANT_HOSTS_MAX};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, VecDeque};

/// How long after the last spawn of its kind a grant holds, and how soon a request has to follow another one like it to get one.
pub const GRANT_SPAN: Micros = Micros::from_secs(30);
/// How often is looked whether the same places would be given now.
pub const REVIEW_PAUSE: Micros = Micros::from_secs(1);
/// Places given to all tasks together that were not taken yet.
pub const GRANTED_MAX: usize = 2 * GRANT_HOSTS_MAX;
/// How long a request is remembered: daemons tell of the last places taken behind the end of the task that took them.
const REMEMBERED: Micros = Micros::from_secs(60);
/// Tasks whose requests are remembered; of those that have no places who has spawned nothing for longest is forgotten first.
const TASKS_MAX: usize = 1024;
/// Bytes of a request's environment at most; with more it is not remembered.
const ENV_BYTES_MAX: usize = 16 << 10;
/// Kinds of requests remembered of a task: the last one, and the one before, of which something may be on its way.
const KINDS: usize = 2;

/// The requests of tasks that ask for a few tasks each, and what was given to them.
#[derive(Debug, Default)]
pub struct Grants {
    tasks: BTreeMap<Tid, VecDeque<Kind>>,
    /// When all was looked at last.
    reviewed: Micros,
}

/// Requests of a task that are alike.
#[derive(Debug)]
struct Kind {
    /// The last one that was asked.
    from: Incoming,
    /// When it was asked, or a place was taken.
    last: Micros,
    /// Places that were given and not taken.
    hosts: VecDeque<HostId>,
    /// They cannot be taken any more, because the task was told so or has given them up. Of those that it took before may be told yet.
    closed: bool,
    /// What was said of the places.
    attempt: Option<Attempt>,
}

/// Places were taken.
#[derive(Clone, Debug)]
pub struct Granted {
    /// The request, as the one before it came.
    pub from: Incoming,
    /// Why its tasks go there.
    pub attempt: Attempt,
    /// Half of the places are taken: it is time for others.
    pub renew: bool,
}

impl Kind {
    fn is_open(&self, now: Micros) -> bool {
        self.attempt.is_some() && !self.closed && now.since(self.last) < GRANT_SPAN
    }

    fn holds(&self, now: Micros) -> bool {
        !self.hosts.is_empty() && self.is_open(now)
    }
}

impl Grants {
    /// A request for [`GRANT_COUNT_MAX`] tasks at most was answered with all of them. True when it follows another one like it: it is
    /// worth a grant.
    pub fn answered(&mut self, now: Micros, from: &Incoming) -> bool {
        self.forget(now);
        let env: usize = from.request.env.iter().map(Vec::len).sum();
        if env > ENV_BYTES_MAX || from.request.count as usize > GRANT_COUNT_MAX {
            return false;
        }
        if self.tasks.len() >= TASKS_MAX && !self.tasks.contains_key(&from.src) {
            // There are fewer places than tasks.
            let last =
                |kinds: &VecDeque<Kind>| kinds.front().map(|kind| (kind.holds(now), kind.last));
            let oldest = self
                .tasks
                .iter()
                .min_by_key(|(_, kinds)| last(kinds))
                .map(|(task, _)| *task);
            oldest.map(|oldest| self.tasks.remove(&oldest));
        }
        let request = SpawnRequest {
            args: Vec::new(),
            ..from.request.clone()
        };
        let from = Incoming {
            request,
            ..from.clone()
        };
        let kinds = self.tasks.entry(from.src).or_default();
        let like = |kind: &Kind| {
            kind.from.request.is_like(&from.request) && now.since(kind.last) < GRANT_SPAN
        };
        let again = kinds.front().is_some_and(like);
        kinds.push_front(Kind {
            from,
            last: now,
            hosts: VecDeque::new(),
            closed: false,
            attempt: None,
        });
        kinds.truncate(KINDS);
        again
    }

    /// How many places may be given to a task now, instead of those it has.
    pub fn room(&self, now: Micros, task: Tid) -> usize {
        let others = self
            .tasks
            .iter()
            .filter(|(tid, _)| **tid != task)
            .filter_map(|(_, kinds)| kinds.front());
        let given: usize = others
            .filter(|kind| kind.holds(now))
            .map(|kind| kind.hosts.len())
            .sum();
        GRANTED_MAX.saturating_sub(given).min(GRANT_HOSTS_MAX)
    }

    /// The request that the next places of a task are for.
    pub fn next_of(&self, task: Tid) -> Option<&Incoming> {
        self.tasks.get(&task)?.front().map(|kind| &kind.from)
    }

    /// When it is time to look whether all that was given would be given again; `None`: nothing is given.
    pub fn next_review(&self) -> Option<Micros> {
        let given = self
            .tasks
            .values()
            .filter_map(VecDeque::front)
            .any(|kind| kind.holds(self.reviewed));
        given.then_some(self.reviewed + REVIEW_PAUSE)
    }

    /// What is given, and to whom. It is looked at now.
    pub fn review(&mut self, now: Micros) -> Vec<(Tid, Vec<HostId>)> {
        self.reviewed = now;
        let given = self
            .tasks
            .iter()
            .filter_map(|(task, kinds)| Some((task, kinds.front()?)));
        let given = given.filter(|(_, kind)| kind.holds(now));
        given
            .map(|(task, kind)| (*task, kind.hosts.iter().copied().collect()))
            .collect()
    }

    /// The next tasks of this task's last request go to these hosts, instead of those given before.
    pub fn give(&mut self, task: Tid, hosts: &[HostId], attempt: Attempt) {
        if let Some(kind) = self
            .tasks
            .get_mut(&task)
            .and_then(|kinds| kinds.front_mut())
        {
            (kind.hosts, kind.closed, kind.attempt) =
                (hosts.iter().copied().collect(), false, Some(attempt));
        }
    }

    /// A daemon says that places of the grant under this wait id were taken. `None`: nothing is known of such a grant.
    pub fn taken(
        &mut self,
        now: Micros,
        task: Tid,
        wid: i32,
        hosts: impl Iterator<Item = HostId>,
    ) -> Option<Granted> {
        let kinds = self.tasks.get_mut(&task)?;
        let last = kinds.front().is_some_and(|kind| kind.from.wid == wid);
        let kind = kinds.iter_mut().find(|kind| kind.from.wid == wid)?;
        let attempt = kind.attempt.clone()?;
        for host in hosts {
            // It may be one of the grant before: those that were given since are all there still, and there will be new ones sooner.
            if let Some(at) = kind.hosts.iter().position(|given| *given == host) {
                kind.hosts.remove(at);
            }
        }
        kind.last = now;
        let renew = last && !kind.closed && kind.hosts.len() <= GRANT_HOSTS_MAX / 2;
        Some(Granted {
            from: kind.from.clone(),
            attempt,
            renew,
        })
    }

    /// Nothing that was given holds any more. Who is to be told, with the wait id of the grant: also those who may have places yet of
    /// which is thought here that they have taken them.
    pub fn take_back(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.take_back_where(|kind| kind.is_open(now))
    }

    /// The same for what nobody has taken a place of for a moment: others want some.
    pub fn take_back_idle(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.take_back_where(|kind| kind.holds(now) && now.since(kind.last) >= REVIEW_PAUSE)
    }

    fn take_back_where(&mut self, which: impl Fn(&Kind) -> bool) -> Vec<(Tid, i32)> {
        let mut told = Vec::new();
        for (task, kinds) in &mut self.tasks {
            if let Some(kind) = kinds.front_mut().filter(|kind| which(kind)) {
                kind.closed = true;
                told.push((*task, kind.from.wid));
            }
        }
        told
    }

    /// A task asks, or has ended: so it has none of the places any more that it was given.
    pub fn given_up(&mut self, task: Tid) {
        self.tasks
            .get_mut(&task)
            .into_iter()
            .flatten()
            .for_each(|kind| kind.closed = true);
    }

    /// The same for all that are not known any more.
    pub fn keep(&mut self, is_known: impl Fn(Tid) -> bool) {
        let gone = self.tasks.iter_mut().filter(|(task, _)| !is_known(**task));
        gone.flat_map(|(_, kinds)| kinds)
            .for_each(|kind| kind.closed = true);
    }

    fn forget(&mut self, now: Micros) {
        self.tasks.retain(|_, kinds| {
            kinds
                .front()
                .is_some_and(|kind| now.since(kind.last) < REMEMBERED)
        });
    }
}
