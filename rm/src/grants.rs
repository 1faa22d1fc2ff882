//! Placements granted in advance (placement leases). A task that has spawned twice in the same way
//! will probably do so again. With a grant the task need not send a request for each spawn. The
//! module does no input or output: the service chooses the hosts and sends the grants
//! ([`sempa_proto::sm::PlacementLease`]). A slot is the right to start one task on one of the
//! hosts.
//!
//! - Grants are reviewed every second, and replaced if the same request would now get other hosts.
//!   The hosts of a grant are therefore at most one second out of date.
//! - A daemon rejects a granted host whose owner accepts no guests, as for every placement.
//! - The total number of slots is bounded, so that not too many tasks are sent to the same host
//!   before the resource manager knows the first of them.

use crate::spawns::IncomingSpawn;
use sempa_proto::rm::PlacementAttempt;
use sempa_proto::sm::{LEASE_HOSTS_MAX, LEASE_TASKS_MAX};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, VecDeque};

/// Time for which a grant is valid after its last use. Also the maximum time between two similar
/// requests that lead to a grant.
pub const GRANT_WINDOW: Micros = Micros::from_secs(30);
/// Interval at which grants are compared with a new placement.
pub const REVIEW_INTERVAL: Micros = Micros::from_secs(1);
/// Maximum number of unused granted slots of all tasks.
pub const GRANTED_SLOTS_MAX: usize = 2 * LEASE_HOSTS_MAX;
/// Time for which a request is remembered after its last use. This time exceeds [`GRANT_WINDOW`],
/// because daemons report the last used slots only after the end of the task that used them.
const REQUEST_MEMORY_WINDOW: Micros = Micros::from_secs(60);
/// Maximum number of tasks whose requests are remembered. If there are more, the task without slots
/// whose last spawn is oldest is removed.
const REMEMBERED_TASKS_MAX: usize = 1024;
/// Maximum size of a request's environment in bytes. A request with a larger environment gets no
/// grant.
const ENV_BYTES_MAX: usize = 16 << 10;
/// Number of requests remembered per task: the last request and the request before it. Reports of
/// used slots of the earlier request may still arrive.
const REQUESTS_PER_TASK_MAX: usize = 2;

/// Requests of tasks that spawn a few tasks at a time, with their grants.
#[derive(Debug, Default)]
pub struct Grants {
    requests_by_task: BTreeMap<Tid, VecDeque<RepeatedRequest>>,
    /// Time of the last review.
    reviewed_at: Micros,
}

/// A request of a task, with its grant if there is one.
#[derive(Debug)]
struct RepeatedRequest {
    /// The request as it arrived, without its arguments.
    request: IncomingSpawn,
    /// Time of the request or of the last use of its slots, whichever is later.
    last_used_at: Micros,
    /// Granted hosts that are not used yet.
    unused_hosts: VecDeque<HostId>,
    /// True if the task can no longer use the slots, because the grant was revoked or the task has
    /// returned it. Reports of slots that were used earlier may still arrive.
    is_closed: bool,
    /// Explanation of the granted placement; `None` without a grant.
    attempt: Option<PlacementAttempt>,
}

/// The grant from which a task has used slots.
#[derive(Clone, Debug)]
pub struct GrantUse {
    /// The request for which the grant was made.
    pub incoming: IncomingSpawn,
    /// Explanation of the granted placement.
    pub attempt: PlacementAttempt,
    /// True if at least half of the slots are used, so that a new grant is needed.
    pub needs_renewal: bool,
}

impl RepeatedRequest {
    fn is_open(&self, now: Micros) -> bool {
        self.attempt.is_some() && !self.is_closed && now.since(self.last_used_at) < GRANT_WINDOW
    }

    fn has_slots(&self, now: Micros) -> bool {
        !self.unused_hosts.is_empty() && self.is_open(now)
    }
}

impl Grants {
    /// Records a request whose tasks have all been started. Returns true if the request is similar
    /// to the task's previous request, so that the task should get a grant. Requests with more than
    /// [`LEASE_TASKS_MAX`] tasks or a large environment are not recorded.
    pub fn record_request(&mut self, now: Micros, incoming_spawn: &IncomingSpawn) -> bool {
        self.remove_expired_requests(now);
        let env_bytes: usize = incoming_spawn.request.env.iter().map(Vec::len).sum();
        if env_bytes > ENV_BYTES_MAX || incoming_spawn.request.task_count as usize > LEASE_TASKS_MAX
        {
            return false;
        }
        if self.requests_by_task.len() >= REMEMBERED_TASKS_MAX
            && !self
                .requests_by_task
                .contains_key(&incoming_spawn.requester)
        {
            // There is always a task without slots, because fewer slots exist than tasks are
            // remembered.
            let eviction_order = |requests: &VecDeque<RepeatedRequest>| {
                requests.front().map(|repeated_request| {
                    (
                        repeated_request.has_slots(now),
                        repeated_request.last_used_at,
                    )
                })
            };
            let oldest_task = self
                .requests_by_task
                .iter()
                .min_by_key(|(_, requests)| eviction_order(requests))
                .map(|(task, _)| *task);
            oldest_task.map(|oldest_task| self.requests_by_task.remove(&oldest_task));
        }
        let request = SpawnRequest {
            args: Vec::new(),
            ..incoming_spawn.request.clone()
        };
        let narrowed_spawn = IncomingSpawn {
            request,
            ..incoming_spawn.clone()
        };
        let requests = self
            .requests_by_task
            .entry(narrowed_spawn.requester)
            .or_default();
        let is_similar = |repeated_request: &RepeatedRequest| {
            repeated_request
                .request
                .request
                .has_same_placement_as(&narrowed_spawn.request)
                && now.since(repeated_request.last_used_at) < GRANT_WINDOW
        };
        let is_repeated = requests.front().is_some_and(is_similar);
        requests.push_front(RepeatedRequest {
            request: narrowed_spawn,
            last_used_at: now,
            unused_hosts: VecDeque::new(),
            is_closed: false,
            attempt: None,
        });
        requests.truncate(REQUESTS_PER_TASK_MAX);
        is_repeated
    }

    /// Returns the maximum number of slots of a new grant for this task. The new grant replaces the
    /// task's current grant.
    pub fn available_slots(&self, now: Micros, task: Tid) -> usize {
        let other_requests = self
            .requests_by_task
            .iter()
            .filter(|(tid, _)| **tid != task)
            .filter_map(|(_, task_requests)| task_requests.front());
        let granted_count: usize = other_requests
            .filter(|repeated_request| repeated_request.has_slots(now))
            .map(|repeated_request| repeated_request.unused_hosts.len())
            .sum();
        GRANTED_SLOTS_MAX
            .saturating_sub(granted_count)
            .min(LEASE_HOSTS_MAX)
    }

    /// Returns the last request of a task, for which its next grant is made.
    pub fn last_request(&self, task: Tid) -> Option<&IncomingSpawn> {
        self.requests_by_task
            .get(&task)?
            .front()
            .map(|repeated_request| &repeated_request.request)
    }

    /// Returns the time at which the next review is due; `None` if no slots are granted.
    pub fn next_review(&self) -> Option<Micros> {
        let has_grants = self
            .requests_by_task
            .values()
            .filter_map(VecDeque::front)
            .any(|repeated_request| repeated_request.has_slots(self.reviewed_at));
        has_grants.then_some(self.reviewed_at + REVIEW_INTERVAL)
    }

    /// Starts a review. Returns each task that has slots, with the hosts of its unused slots.
    pub fn review(&mut self, now: Micros) -> Vec<(Tid, Vec<HostId>)> {
        self.reviewed_at = now;
        let granted_requests = self
            .requests_by_task
            .iter()
            .filter_map(|(task, task_requests)| Some((task, task_requests.front()?)));
        let granted_requests =
            granted_requests.filter(|(_, repeated_request)| repeated_request.has_slots(now));
        granted_requests
            .map(|(task, repeated_request)| {
                (
                    *task,
                    repeated_request.unused_hosts.iter().copied().collect(),
                )
            })
            .collect()
    }

    /// Sets the slots of a task for requests like its last one. These slots replace the task's
    /// earlier slots.
    pub fn set_grant(&mut self, task: Tid, hosts: &[HostId], attempt: PlacementAttempt) {
        if let Some(request) = self
            .requests_by_task
            .get_mut(&task)
            .and_then(|task_requests| task_requests.front_mut())
        {
            (request.unused_hosts, request.is_closed, request.attempt) =
                (hosts.iter().copied().collect(), false, Some(attempt));
        }
    }

    /// Records a daemon's report that the task has used slots on these hosts. `wid`: wait id of the
    /// request for which the grant was made. Returns the grant; `None` if the grant is unknown.
    pub fn record_use(
        &mut self,
        now: Micros,
        task: Tid,
        wid: i32,
        hosts: impl Iterator<Item = HostId>,
    ) -> Option<GrantUse> {
        let requests = self.requests_by_task.get_mut(&task)?;
        let is_last_request = requests
            .front()
            .is_some_and(|request| request.request.wait_id == wid);
        let request = requests
            .iter_mut()
            .find(|request| request.request.wait_id == wid)?;
        let attempt = request.attempt.clone()?;
        for host in hosts {
            // A host that is not found belongs to the previous grant. In this case no current slot
            // is removed, and the renewal may occur slightly early.
            if let Some(index) = request
                .unused_hosts
                .iter()
                .position(|granted_host| *granted_host == host)
            {
                request.unused_hosts.remove(index);
            }
        }
        request.last_used_at = now;
        let is_renewal_due = is_last_request
            && !request.is_closed
            && request.unused_hosts.len() <= LEASE_HOSTS_MAX / 2;
        Some(GrantUse {
            incoming: request.request.clone(),
            attempt,
            needs_renewal: is_renewal_due,
        })
    }

    /// Revokes all grants. Returns the tasks to notify, each with the wait id of its grant. Also
    /// includes tasks whose slots are all used according to the reports, because the reports may
    /// belong to an earlier grant.
    pub fn revoke_all(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.revoke_where(|repeated_request| repeated_request.is_open(now))
    }

    /// Revokes grants that were not used for [`REVIEW_INTERVAL`], because other tasks need slots.
    /// Returns the tasks to notify, each with the wait id of its grant.
    pub fn revoke_idle(&mut self, now: Micros) -> Vec<(Tid, i32)> {
        self.revoke_where(|repeated_request| {
            repeated_request.has_slots(now)
                && now.since(repeated_request.last_used_at) >= REVIEW_INTERVAL
        })
    }

    fn revoke_where(&mut self, matches: impl Fn(&RepeatedRequest) -> bool) -> Vec<(Tid, i32)> {
        let mut tasks_to_notify = Vec::new();
        for (task, task_requests) in &mut self.requests_by_task {
            if let Some(repeated_request) = task_requests
                .front_mut()
                .filter(|repeated_request| matches(repeated_request))
            {
                repeated_request.is_closed = true;
                tasks_to_notify.push((*task, repeated_request.request.wait_id));
            }
        }
        tasks_to_notify
    }

    /// Closes the grants of a task that has sent a spawn request or has ended. The task has no
    /// usable slots after either event.
    pub fn close_for_task(&mut self, task: Tid) {
        self.requests_by_task
            .get_mut(&task)
            .into_iter()
            .flatten()
            .for_each(|repeated_request| repeated_request.is_closed = true);
    }

    /// Closes the grants of all tasks for which `is_known` is false.
    pub fn close_unknown(&mut self, is_known: impl Fn(Tid) -> bool) {
        let unknown_tasks = self
            .requests_by_task
            .iter_mut()
            .filter(|(task, _)| !is_known(**task));
        unknown_tasks
            .flat_map(|(_, task_requests)| task_requests)
            .for_each(|repeated_request| repeated_request.is_closed = true);
    }

    fn remove_expired_requests(&mut self, now: Micros) {
        self.requests_by_task.retain(|_, task_requests| {
            task_requests.front().is_some_and(|repeated_request| {
                now.since(repeated_request.last_used_at) < REQUEST_MEMORY_WINDOW
            })
        });
    }
}
