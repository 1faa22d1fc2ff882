//! Placements given in advance. A task that has just spawned twice in the same way is likely to do
//! so again; with a grant it need not ask each time. Pure: the service decides the hosts and sends
//! the grants ([`sempa_proto::sm::PlacementLease`]).
//!
//! - Grants are reviewed each second and replaced if the same request would get other hosts. While
//!   the resource manager works, a grant is therefore at most a second older than its knowledge.
//! - A daemon rejects a granted host whose owner accepts no guests, as it does for every placement.
//! - The total of all grants is bounded, so that many tasks cannot be sent to the same good host
//!   before the first one is known.

use crate::spawns::SpawnIncoming;
use sempa_proto::rm::PlacementAttempt;
use sempa_proto::sm::{LEASE_HOSTS_MAX, LEASE_TASKS_MAX};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, VecDeque};

/// How long a grant is valid after the last spawn of its kind, and the maximum time between two
/// similar requests for a grant.
pub const GRANT_WINDOW: Micros = Micros::from_secs(30);
/// Interval at which grants are compared with a fresh placement.
pub const REVIEW_INTERVAL: Micros = Micros::from_secs(1);
/// Maximum number of granted and unused slots of all tasks together.
pub const GRANTED_SLOTS_MAX: usize = 2 * LEASE_HOSTS_MAX;
/// How long a request is remembered. Daemons report the last used slots after the end of the task
/// that used them.
const REQUEST_MEMORY_WINDOW: Micros = Micros::from_secs(60);
/// Maximum number of tasks whose requests are remembered. Of the tasks without slots, the one that
/// has spawned nothing for the longest time is dropped first.
const TASKS_MAX: usize = 1024;
/// Maximum size of a request's environment in bytes; a request with a larger one is not remembered.
const ENV_BYTES_MAX: usize = 16 << 10;
/// Requests remembered per task: the last one, and the one before, because reports about its slots
/// may still arrive.
const REQUESTS_PER_TASK: usize = 2;

/// Requests of tasks that spawn a few tasks at a time, with their grants.
#[derive(Debug, Default)]
pub struct Grants {
    tasks: BTreeMap<Tid, VecDeque<RepeatedRequest>>,
    /// Time of the last review.
    reviewed_at: Micros,
}

/// Similar requests of one task, with their grant.
#[derive(Debug)]
struct RepeatedRequest {
    /// The last of these requests that was asked.
    request: SpawnIncoming,
    /// When a request was asked or a slot was used, whichever is later.
    last_used: Micros,
    /// Granted hosts that are not used yet.
    hosts: VecDeque<HostId>,
    /// The slots cannot be used any more, because the task was notified or has given them up.
    /// Reports about slots used before may still arrive.
    closed: bool,
    /// Explanation of the granted placement.
    attempt: Option<PlacementAttempt>,
}

/// Slots of a grant were used.
#[derive(Clone, Debug)]
pub struct GrantUse {
    /// The request that the grant answers in advance.
    pub from: SpawnIncoming,
    /// Why the tasks go to these hosts.
    pub attempt: PlacementAttempt,
    /// At least half of the slots are used: a new grant is due.
    pub needs_renewal: bool,
}

impl RepeatedRequest {
    fn is_open(&self, now: Micros) -> bool {
        self.attempt.is_some() && !self.closed && now.since(self.last_used) < GRANT_WINDOW
    }

    fn has_slots(&self, now: Micros) -> bool {
        !self.hosts.is_empty() && self.is_open(now)
    }
}

impl Grants {
    /// Records that a request for at most [`LEASE_TASKS_MAX`] tasks was answered with all of them.
    /// Returns whether it follows a similar one and deserves a grant.
    pub fn record_answer(&mut self, now: Micros, from: &SpawnIncoming) -> bool {
        self.expire(now);
        let env: usize = from.request.env.iter().map(Vec::len).sum();
        if env > ENV_BYTES_MAX || from.request.count as usize > LEASE_TASKS_MAX {
            return false;
        }
        if self.tasks.len() >= TASKS_MAX && !self.tasks.contains_key(&from.requester) {
            // There are fewer slots than remembered tasks.
            let last =
                |requests: &VecDeque<RepeatedRequest>| requests.front().map(|kind| (kind.has_slots(now), kind.last_used));
            let oldest = self
                .tasks
                .iter()
                .min_by_key(|(_, requests)| last(requests))
                .map(|(task, _)| *task);
            oldest.map(|oldest| self.tasks.remove(&oldest));
        }
        let request = SpawnRequest {
            args: Vec::new(),
            ..from.request.clone()
        };
        let from = SpawnIncoming {
            request,
            ..from.clone()
        };
        let requests = self.tasks.entry(from.requester).or_default();
        let like = |kind: &RepeatedRequest| {
            kind.request.request.places_like(&from.request) && now.since(kind.last_used) < GRANT_WINDOW
        };
        let is_repeated = requests.front().is_some_and(like);
        requests.push_front(RepeatedRequest {
            request: from,
            last_used: now,
            hosts: VecDeque::new(),
            closed: false,
            attempt: None,
        });
        requests.truncate(REQUESTS_PER_TASK);
        is_repeated
    }

    /// Returns how many slots may be granted to a task instead of those it has.
    pub fn available_slots(&self, now: Micros, task: Tid) -> usize {
        let others = self
            .tasks
            .iter()
            .filter(|(tid, _)| **tid != task)
            .filter_map(|(_, kinds)| kinds.front());
        let given: usize = others
            .filter(|kind| kind.has_slots(now))
            .map(|kind| kind.hosts.len())
            .sum();
        GRANTED_SLOTS_MAX.saturating_sub(given).min(LEASE_HOSTS_MAX)
    }

    /// Returns the request for which the next grant of a task is made.
    pub fn request_of(&self, task: Tid) -> Option<&SpawnIncoming> {
        self.tasks.get(&task)?.front().map(|kind| &kind.request)
    }

    /// Returns when the next review is due; `None` if no slots are granted.
    pub fn next_review(&self) -> Option<Micros> {
        let given = self
            .tasks
            .values()
            .filter_map(VecDeque::front)
            .any(|kind| kind.has_slots(self.reviewed_at));
        given.then_some(self.reviewed_at + REVIEW_INTERVAL)
    }

    /// Starts a review. Returns the tasks with grants and their unused hosts.
    pub fn review(&mut self, now: Micros) -> Vec<(Tid, Vec<HostId>)> {
        self.reviewed_at = now;
        let given = self
            .tasks
            .iter()
            .filter_map(|(task, kinds)| Some((task, kinds.front()?)));
        let given = given.filter(|(_, kind)| kind.has_slots(now));
        given
            .map(|(task, kind)| (*task, kind.hosts.iter().copied().collect()))
            .collect()
    }

    /// Grants these hosts for the task's last request, in place of earlier ones.
    pub fn set_grant(&mut self, task: Tid, hosts: &[HostId], attempt: PlacementAttempt) {
        if let Some(request) = self
            .tasks
            .get_mut(&task)
            .and_then(|kinds| kinds.front_mut())
        {
            (request.hosts, request.closed, request.attempt) =
                (hosts.iter().copied().collect(), false, Some(attempt));
        }
    }

    /// Records a daemon's report that slots of the grant with this wait id were used. `None` if the
    /// grant is unknown.
    pub fn record_use(
        &mut self,
        now: Micros,
        task: Tid,
        wid: i32,
        hosts: impl Iterator<Item = HostId>,
    ) -> Option<GrantUse> {
        let requests = self.tasks.get_mut(&task)?;
        let last = requests.front().is_some_and(|request| request.request.wid == wid);
        let request = requests.iter_mut().find(|request| request.request.wid == wid)?;
        let attempt = request.attempt.clone()?;
        for host in hosts {
            // The slot may belong to the previous grant. Then the current slots are all unused, and
            // are renewed slightly early.
            if let Some(at) = request.hosts.iter().position(|given| *given == host) {
                request.hosts.remove(at);
            }
        }
        request.last_used = now;
        let renew = last && !request.closed && request.hosts.len() <= LEASE_HOSTS_MAX / 2;
        Some(GrantUse {
            from: request.request.clone(),
            attempt,
            needs_renewal: renew,
        })
    }

    /// Revokes all grants. Returns the tasks to notify, with the wait id of the grant. These
    /// include tasks whose slots count as used here, because they may still have some.
    pub fn revoke_all(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.revoke_where(|kind| kind.is_open(now))
    }

    /// Revokes grants that were not used recently, because other tasks want slots.
    pub fn revoke_idle(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.revoke_where(|kind| kind.has_slots(now) && now.since(kind.last_used) >= REVIEW_INTERVAL)
    }

    fn revoke_where(&mut self, matches: impl Fn(&RepeatedRequest) -> bool) -> Vec<(Tid, i32)> {
        let mut to_notify = Vec::new();
        for (task, kinds) in &mut self.tasks {
            if let Some(kind) = kinds.front_mut().filter(|kind| matches(kind)) {
                kind.closed = true;
                to_notify.push((*task, kind.request.wid));
            }
        }
        to_notify
    }

    /// Closes the grants of a task that asks itself or has ended: it has none of its slots any
    /// more.
    pub fn close_for_task(&mut self, task: Tid) {
        self.tasks
            .get_mut(&task)
            .into_iter()
            .flatten()
            .for_each(|kind| kind.closed = true);
    }

    /// Closes the grants of tasks that are not known any more.
    pub fn close_unknown(&mut self, is_known: impl Fn(Tid) -> bool) {
        let unknown = self.tasks.iter_mut().filter(|(task, _)| !is_known(**task));
        unknown.flat_map(|(_, kinds)| kinds)
            .for_each(|kind| kind.closed = true);
    }

    fn expire(&mut self, now: Micros) {
        self.tasks.retain(|_, kinds| {
            kinds
                .front()
                .is_some_and(|kind| now.since(kind.last_used) < REQUEST_MEMORY_WINDOW)
        });
    }
}
