//! Placements granted in advance (placement leases). A task that has spawned twice in the same way
//! will probably do so again; with a grant it need not ask each time. Pure: the service chooses the
//! hosts and sends the grants ([`sempa_proto::sm::PlacementLease`]). A slot is the right to start
//! one task on one of the hosts.
//!
//! - Grants are reviewed every second, and replaced if the same request would now get other hosts.
//!   The hosts of a grant are therefore at most one second out of date.
//! - A daemon rejects a granted host whose owner accepts no guests, as for every placement.
//! - The total number of slots is bounded, so that many tasks cannot be sent to the same host
//!   before the first of them is known.

use crate::spawns::SpawnIncoming;
use sempa_proto::rm::PlacementAttempt;
use sempa_proto::sm::{LEASE_HOSTS_MAX, LEASE_TASKS_MAX};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Time for which a grant is valid after its last use. Also the maximum time between two similar
/// requests that lead to a grant.
pub const GRANT_WINDOW: Micros = Micros::from_secs(30);
/// Interval at which grants are compared with a fresh placement.
pub const REVIEW_INTERVAL: Micros = Micros::from_secs(1);
/// Maximum number of granted slots of all tasks that are not used yet.
pub const GRANTED_SLOTS_MAX: usize = 2 * LEASE_HOSTS_MAX;
/// Time for which a request is remembered after its last use. It exceeds [`GRANT_WINDOW`], because
/// daemons report the last used slots only after the end of the task that used them.
const REQUEST_MEMORY_WINDOW: Micros = Micros::from_secs(60);
/// Maximum number of tasks whose requests are remembered. Beyond it, tasks without slots are
/// dropped first; among them, the task whose last spawn is oldest.
const TASKS_MAX: usize = 1024;
/// Maximum size of a request's environment in bytes. A request with a larger environment gets no
/// grant.
const ENV_BYTES_MAX: usize = 16 << 10;
/// Number of requests remembered per task: the last one and the one before, because reports of used
/// slots of the earlier one may still arrive.
const REQUESTS_PER_TASK: usize = 2;

/// Requests of tasks that spawn a few tasks at a time, with their grants.
#[derive(Debug, Default)]
pub struct Grants {
    tasks: BTreeMap<Tid, VecDeque<RepeatedRequest>>,
    /// Time of the last review.
    reviewed_at: Micros,
}

/// A request of a task, with its grant if there is one.
#[derive(Debug)]
struct RepeatedRequest {
    /// The request as it arrived, without its arguments.
    request: SpawnIncoming,
    /// Time of the request or of the last use of its slots, whichever is later.
    last_used: Micros,
    /// Granted hosts that are not used yet.
    hosts: VecDeque<HostId>,
    /// True if the task may not use the slots any more, because the grant was revoked or the task
    /// has given it up. Reports of slots used earlier may still arrive.
    closed: bool,
    /// Explanation of the granted placement; `None` without a grant.
    attempt: Option<PlacementAttempt>,
}

/// The grant from which a task has used slots.
#[derive(Clone, Debug)]
pub struct GrantUse {
    /// The request that the grant answers in advance.
    pub from: SpawnIncoming,
    /// Why the tasks go to these hosts.
    pub attempt: PlacementAttempt,
    /// True if at least half of the slots are used, so that the grant must be renewed.
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
    /// Records a request whose tasks have all been started. Returns true if it is similar to the
    /// task's previous request, so that the task should get a grant. A request for more than
    /// [`LEASE_TASKS_MAX`] tasks is not recorded.
    pub fn record_answer(&mut self, now: Micros, from: &SpawnIncoming) -> bool {
        self.expire(now);
        let env: usize = from.request.env.iter().map(Vec::len).sum();
        if env > ENV_BYTES_MAX || from.request.count as usize > LEASE_TASKS_MAX {
            return false;
        }
        if self.tasks.len() >= TASKS_MAX && !self.tasks.contains_key(&from.requester) {
            // There is always a task without slots, because fewer slots exist than tasks are
            // remembered.
            let last = |requests: &VecDeque<RepeatedRequest>| {
                requests
                    .front()
                    .map(|kind| (kind.has_slots(now), kind.last_used))
            };
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
            kind.request.request.has_same_placement_as(&from.request)
                && now.since(kind.last_used) < GRANT_WINDOW
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

    /// Returns the maximum number of slots of a new grant for this task. The new grant replaces its
    /// current one.
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

    /// Returns the last request of a task, for which its next grant is made.
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

    /// Starts a review. Returns each task that has slots, with the hosts of its unused slots.
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

    /// Sets the slots of a task for requests like its last one. They replace earlier slots.
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

    /// Records a daemon's report that the task has used slots on these hosts. `wid`: wait id of the
    /// request for which the grant was made. `None` if the grant is unknown.
    pub fn record_use(
        &mut self,
        now: Micros,
        task: Tid,
        wid: i32,
        hosts: impl Iterator<Item = HostId>,
    ) -> Option<GrantUse> {
        let requests = self.tasks.get_mut(&task)?;
        let last = requests
            .front()
            .is_some_and(|request| request.request.wid == wid);
        let request = requests
            .iter_mut()
            .find(|request| request.request.wid == wid)?;
        let attempt = request.attempt.clone()?;
        for host in hosts {
            // A host that is not found belongs to the previous grant. Then none of the current
            // slots is removed, and the renewal may come slightly early.
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

    /// Revokes all grants. Returns the tasks to notify, each with the wait id of its grant. A task
    /// whose slots are all used according to the reports is included, because reports may belong to
    /// an earlier grant.
    pub fn revoke_all(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.revoke_where(|kind| kind.is_open(now))
    }

    /// Revokes grants that were not used for [`REVIEW_INTERVAL`], because other tasks need slots.
    /// Returns the tasks to notify, each with the wait id of its grant.
    pub fn revoke_idle(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.revoke_where(|kind| {
            kind.has_slots(now) && now.since(kind.last_used) >= REVIEW_INTERVAL
        })
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

    /// Closes the grants of a task that has sent a spawn request or has ended. It has no usable
    /// slots then.
    pub fn close_for_task(&mut self, task: Tid) {
        self.tasks
            .get_mut(&task)
            .into_iter()
            .flatten()
            .for_each(|kind| kind.closed = true);
    }

    /// Closes the grants of all tasks for which `is_known` is false.
    pub fn close_unknown(&mut self, is_known: impl Fn(Tid) -> bool) {
        let unknown = self.tasks.iter_mut().filter(|(task, _)| !is_known(**task));
        unknown
            .flat_map(|(_, kinds)| kinds)
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
