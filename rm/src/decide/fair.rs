//! Priorities of users by the Up-Down scheme (Mutka and Livny, Condor), task limits, and the queue
//! of requests that found no host.
//!
//! Each user has an index:
//!
//! - it rises with every processor that the user holds,
//! - it falls while the user waits for a processor,
//! - it decays towards zero while the user neither holds nor waits.
//!
//! The user with the lowest index is served first. A user who has held many processors for a long
//! time therefore waits longer. A user with few requests is served at once, however many processors
//! other users hold.

use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Maximum number of waiting requests; further ones are refused.
pub const QUEUED_REQUESTS_MAX: usize = 65_536;
/// Maximum number of users whose index is remembered. When another user is added, the idle user
/// whose index is nearest to zero is removed.
pub const USERS_MAX: usize = 65_536;

/// Margin in points. The tasks of a user are preempted for a waiting user only if the first user's
/// index exceeds twice the waiting user's index by at least this margin. A negative index of the
/// waiting user is not doubled. Ten processors held for an hour yield ten points. The margin
/// prevents users with similar usage from preempting each other.
pub const PREEMPTION_MARGIN: f64 = 10.0;

/// Rates at which indices change, in points per hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpDownRates {
    /// Increase for each processor that the user holds, in points per hour.
    pub rise_per_hour: f64,
    /// Decrease while at least one request of the user waits, in points per hour.
    pub fall_per_hour: f64,
    /// Fraction of an idle user's index that remains after one hour, from 0 to 1.
    pub idle_retention: f64,
}

impl Default for UpDownRates {
    fn default() -> Self {
        Self {
            rise_per_hour: 1.0,
            fall_per_hour: 4.0,
            idle_retention: 0.5,
        }
    }
}

/// Maximum numbers of tasks that a user or a job may have at a time; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskLimits {
    pub user_tasks_max: Option<u32>,
    pub job_tasks_max: Option<u32>,
}

/// Limit that prevents the start of a request's tasks, or the queueing of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitError {
    /// The request would exceed the limit of its user.
    UserTasks { task_count: u32, limit: u32 },
    /// The request would exceed the limit of its job.
    JobTasks { task_count: u32, limit: u32 },
    /// The queue contains [`QUEUED_REQUESTS_MAX`] requests.
    QueueFull,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (holder, option, task_count, limit) = match self {
            Self::UserTasks { task_count, limit } => ("user", "--user-tasks", task_count, limit),
            Self::JobTasks { task_count, limit } => ("job", "--job-tasks", task_count, limit),
            Self::QueueFull => {
                return write!(f, "{QUEUED_REQUESTS_MAX} requests are waiting already");
            }
        };
        let ending = if *task_count == 1 { "" } else { "s" };
        write!(
            f,
            "the limit {option} of the resource manager is {limit}, and the {holder} has {task_count} task{ending}"
        )
    }
}

impl TaskLimits {
    /// Checks whether `new_task_count` further tasks are allowed; otherwise returns the exceeded
    /// limit. `user_task_count` and `job_task_count` are the current numbers of tasks of the user
    /// and of the job.
    pub fn allow(
        &self,
        user_task_count: u32,
        job_task_count: u32,
        new_task_count: u32,
    ) -> Result<(), LimitError> {
        let exceeded_limit = |current_count: u32, allowed_max: Option<u32>| {
            allowed_max
                .filter(|allowed_max| current_count.saturating_add(new_task_count) > *allowed_max)
        };
        if let Some(allowed_max) = exceeded_limit(user_task_count, self.user_tasks_max) {
            return Err(LimitError::UserTasks {
                task_count: user_task_count,
                limit: allowed_max,
            });
        }
        match exceeded_limit(job_task_count, self.job_tasks_max) {
            Some(allowed_max) => Err(LimitError::JobTasks {
                task_count: job_task_count,
                limit: allowed_max,
            }),
            None => Ok(()),
        }
    }

    /// Checks whether `new_task_count` further tasks could be allowed later, when all present tasks
    /// of the user and of the job have ended. If not, waiting is useless. `user_task_count` and
    /// `job_task_count` are used only in the error.
    pub fn could_allow(
        &self,
        user_task_count: u32,
        job_task_count: u32,
        new_task_count: u32,
    ) -> Result<(), LimitError> {
        self.allow(0, 0, new_task_count)
            .map_err(|error| match error {
                LimitError::UserTasks {
                    limit: allowed_max, ..
                } => LimitError::UserTasks {
                    task_count: user_task_count,
                    limit: allowed_max,
                },
                LimitError::JobTasks {
                    limit: allowed_max, ..
                } => LimitError::JobTasks {
                    task_count: job_task_count,
                    limit: allowed_max,
                },
                LimitError::QueueFull => LimitError::QueueFull,
            })
    }
}

/// A request in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuedRequest {
    /// Sequence number of the request, ascending in the order of arrival.
    pub number: u64,
    pub user: u32,
    pub job: Tid,
    pub enqueued_at: Micros,
}

#[derive(Clone, Copy, Debug, Default)]
struct UserState {
    index: f64,
    updated_at: Micros,
    held_processors: u32,
    waiting_requests: u32,
}

impl UserState {
    /// Returns the index at `now`. The numbers of processors and waiting requests must not have
    /// changed since the last update.
    fn index_at(&self, rates: &UpDownRates, now: Micros) -> f64 {
        let hours = now.since(self.updated_at).0 as f64 / 3.6e9;
        if self.held_processors == 0 && self.waiting_requests == 0 {
            return self.index * rates.idle_retention.powf(hours);
        }
        let fall = if self.waiting_requests > 0 {
            rates.fall_per_hour
        } else {
            0.0
        };
        self.index + hours * (rates.rise_per_hour * f64::from(self.held_processors) - fall)
    }
}

/// Index, number of held processors and waiting requests of each user.
#[derive(Clone, Debug, Default)]
pub struct FairShare {
    rates: UpDownRates,
    users: BTreeMap<u32, UserState>,
    /// Waiting requests of each user, by their sequence number.
    queue: BTreeMap<u32, BTreeMap<u64, QueuedRequest>>,
    request_count: usize,
}

impl FairShare {
    pub fn new(rates: UpDownRates) -> Self {
        Self {
            rates,
            ..Self::default()
        }
    }

    fn updated_user(&mut self, now: Micros, user: u32) -> &mut UserState {
        let rates = self.rates;
        if self.users.len() >= USERS_MAX && !self.users.contains_key(&user) {
            let idle_users = self
                .users
                .iter()
                .filter(|(_, u)| u.held_processors == 0 && u.waiting_requests == 0);
            let nearest_user = idle_users
                .min_by(|(_, a), (_, b)| a.index.abs().total_cmp(&b.index.abs()))
                .map(|(id, _)| *id);
            nearest_user.map(|id| self.users.remove(&id));
        }
        let entry = self.users.entry(user).or_insert(UserState {
            updated_at: now,
            ..UserState::default()
        });
        (entry.index, entry.updated_at) = (entry.index_at(&rates, now), now.max(entry.updated_at));
        entry
    }

    /// Records that the user has obtained `processor_count` more processors.
    pub fn add_processors(&mut self, now: Micros, user: u32, processor_count: u32) {
        let user = self.updated_user(now, user);
        user.held_processors = user.held_processors.saturating_add(processor_count);
    }

    /// Records that the user has released `processor_count` processors.
    pub fn remove_processors(&mut self, now: Micros, user: u32, processor_count: u32) {
        let user = self.updated_user(now, user);
        user.held_processors = user.held_processors.saturating_sub(processor_count);
    }

    /// Returns the number of processors that the user holds; 0 for an unknown user.
    pub fn held_processors(&self, user: u32) -> u32 {
        self.users.get(&user).map_or(0, |u| u.held_processors)
    }

    /// Returns the user's index, 0 for an unknown user. Users with a lower index are served first.
    pub fn user_index(&self, now: Micros, user: u32) -> f64 {
        self.users
            .get(&user)
            .map_or(0.0, |u| u.index_at(&self.rates, now))
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    /// [`LimitError::QueueFull`]; the request is not added.
    pub fn enqueue(&mut self, now: Micros, request: QueuedRequest) -> Result<(), LimitError> {
        if self.request_count >= QUEUED_REQUESTS_MAX {
            return Err(LimitError::QueueFull);
        }
        if self
            .queue
            .entry(request.user)
            .or_default()
            .insert(request.number, request)
            .is_none()
        {
            self.request_count += 1;
            self.updated_user(now, request.user).waiting_requests += 1;
        }
        Ok(())
    }

    /// Removes the request `number` from the queue, because the request got its hosts or was
    /// withdrawn. Returns the request, or `None` if the queue does not contain it.
    pub fn dequeue(&mut self, now: Micros, user: u32, number: u64) -> Option<QueuedRequest> {
        let queue = self.queue.get_mut(&user)?;
        let request = queue.remove(&number)?;
        if queue.is_empty() {
            self.queue.remove(&user);
        }
        self.request_count -= 1;
        let entry = self.updated_user(now, user);
        entry.waiting_requests = entry.waiting_requests.saturating_sub(1);
        Some(request)
    }

    /// Returns the number of waiting requests.
    pub fn queue_len(&self) -> usize {
        self.request_count
    }

    /// Returns all waiting requests in the order of service.
    pub fn requests_in_order(&self, now: Micros) -> Vec<QueuedRequest> {
        let add_user_index = |(user, queue): (&u32, &BTreeMap<u64, QueuedRequest>)| {
            let index = self.user_index(now, *user);
            queue
                .values()
                .map(|request| (index, *request))
                .collect::<Vec<_>>()
        };
        let mut indexed_requests: Vec<(f64, QueuedRequest)> =
            self.queue.iter().flat_map(add_user_index).collect();
        indexed_requests.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(x.number.cmp(&y.number)));
        indexed_requests
            .into_iter()
            .map(|(_, request)| request)
            .collect()
    }

    /// Empties the queue. Returns its requests in the order of service.
    pub fn drain_queue(&mut self, now: Micros) -> Vec<QueuedRequest> {
        let requests = self.requests_in_order(now);
        for request in &requests {
            self.dequeue(now, request.user, request.number);
        }
        requests
    }

    /// Returns the users with a nonzero index, with their indices.
    pub fn user_indices(&self, now: Micros) -> impl Iterator<Item = (u32, f64)> {
        self.users
            .iter()
            .map(move |(id, user)| (*id, user.index_at(&self.rates, now)))
            .filter(|(_, index)| *index != 0.0)
    }

    /// Restores an index from the history. `stored_age`: time since the index was stored. The user
    /// counts as idle during that time.
    pub fn restore_index(&mut self, now: Micros, user: u32, index: f64, stored_age: Micros) {
        let hours = stored_age.0 as f64 / 3.6e9;
        let index = index * self.rates.idle_retention.powf(hours);
        self.updated_user(now, user).index = index;
    }

    /// Returns the oldest request of each waiting user with the user's index, in the order of
    /// service. If two users have the same index, the older request comes first.
    pub fn next_requests(&self, now: Micros) -> Vec<(f64, QueuedRequest)> {
        let oldest_request = |(user, queue): (&u32, &BTreeMap<u64, QueuedRequest>)| {
            queue
                .values()
                .next()
                .map(|request| (self.user_index(now, *user), *request))
        };
        let mut requests: Vec<_> = self.queue.iter().filter_map(oldest_request).collect();
        requests.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(x.number.cmp(&y.number)));
        requests
    }

    /// Returns the users whose tasks may be preempted for `user`, the highest index first. The
    /// index of such a user exceeds that of `user` by the margin described at
    /// [`PREEMPTION_MARGIN`].
    pub fn preemptible_users(&self, now: Micros, user: u32) -> Vec<u32> {
        let waiting_index = self.user_index(now, user);
        let holders = self
            .users
            .iter()
            .filter(|(id, u)| **id != user && u.held_processors > 0);
        let mut exceeding_users: Vec<_> = holders
            .map(|(id, _)| (self.user_index(now, *id), *id))
            .collect();
        exceeding_users.retain(|(index, _)| {
            *index >= waiting_index + waiting_index.max(0.0) + PREEMPTION_MARGIN
        });
        exceeding_users.sort_by(|(a, x), (b, y)| b.total_cmp(a).then(x.cmp(y)));
        exceeding_users.into_iter().map(|(_, id)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hour(n: u64) -> Micros {
        Micros::from_secs(n * 3600)
    }

    fn request(number: u64, user: u32, enqueued_at_time: Micros) -> QueuedRequest {
        QueuedRequest {
            number,
            user,
            job: Tid::NONE,
            enqueued_at: enqueued_at_time,
        }
    }

    fn service_order(fair_share: &FairShare, now: Micros) -> Vec<u64> {
        fair_share
            .next_requests(now)
            .into_iter()
            .map(|(_, request)| request.number)
            .collect()
    }

    /// The index rises with processors held, falls while a request waits, and decays while the user
    /// is idle.
    #[test]
    fn index_rises_with_use_and_falls_with_waiting() {
        let mut fair_share = FairShare::new(UpDownRates::default());
        fair_share.add_processors(hour(0), 1, 10);
        assert_eq!(fair_share.user_index(hour(2), 1), 20.0);
        fair_share.remove_processors(hour(2), 1, 10);
        assert_eq!(
            fair_share.user_index(hour(3), 1),
            10.0,
            "half is forgotten in an hour"
        );
        fair_share
            .enqueue(hour(2), request(1, 2, hour(2)))
            .expect("room");
        assert_eq!(fair_share.user_index(hour(4), 2), -8.0);
        fair_share.dequeue(hour(4), 2, 1);
        fair_share.add_processors(hour(4), 2, 1);
        assert_eq!(fair_share.user_index(hour(5), 2), -7.0);
    }

    /// The user with the lowest index is served first. Among users with the same index, the older
    /// request comes first.
    #[test]
    fn lowest_index_then_oldest_request_goes_first() {
        let mut fair_share = FairShare::new(UpDownRates::default());
        fair_share.add_processors(hour(0), 1, 100);
        for (number, user) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 2)] {
            fair_share
                .enqueue(hour(10), request(number, user, hour(10)))
                .expect("room");
        }
        assert_eq!(
            service_order(&fair_share, hour(10)),
            [3, 4, 1],
            "one of each user"
        );
        assert_eq!(
            fair_share.dequeue(hour(10), 2, 3).map(|r| r.number),
            Some(3)
        );
        assert_eq!(service_order(&fair_share, hour(10)), [4, 5, 1]);
        fair_share.add_processors(hour(10), 2, 1);
        assert_eq!(
            service_order(&fair_share, hour(11)),
            [4, 5, 1],
            "two waits while it holds one"
        );
        assert_eq!(
            fair_share.preemptible_users(hour(11), 3),
            [1],
            "nobody else has taken much"
        );
        assert_eq!(
            fair_share.preemptible_users(hour(11), 1),
            [],
            "two has taken less"
        );
        assert_eq!(fair_share.queue_len(), 4);
        assert_eq!(fair_share.dequeue(hour(11), 2, 99), None);
    }

    /// `drain_queue` returns the requests in the order in which they would be served one by one.
    #[test]
    fn draining_the_queue_keeps_the_service_order() {
        let mut fair_share = FairShare::new(UpDownRates::default());
        fair_share.add_processors(hour(0), 1, 100);
        for (number, user) in [(1, 1), (2, 2), (3, 1), (4, 3), (5, 2), (6, 4)] {
            fair_share
                .enqueue(hour(1), request(number, user, hour(1)))
                .expect("room");
        }
        let mut sequential_fair_share = fair_share.clone();
        let mut expected_numbers = Vec::new();
        while let Some((_, next_request)) = sequential_fair_share
            .next_requests(hour(2))
            .first()
            .copied()
        {
            sequential_fair_share.dequeue(hour(2), next_request.user, next_request.number);
            expected_numbers.push(next_request.number);
        }
        let drained_numbers: Vec<u64> = fair_share
            .drain_queue(hour(2))
            .iter()
            .map(|r| r.number)
            .collect();
        assert_eq!(
            (drained_numbers, fair_share.queue_len()),
            (expected_numbers, 0)
        );
    }

    /// A restored index has decayed since it was stored.
    #[test]
    fn restored_index_has_decayed() {
        let mut fair_share = FairShare::new(UpDownRates::default());
        fair_share.restore_index(hour(5), 7, 20.0, hour(1));
        assert_eq!(
            fair_share.user_indices(hour(5)).collect::<Vec<_>>(),
            [(7, 10.0)]
        );
    }

    /// A limit error names the limit and states how many tasks there are.
    #[test]
    fn limit_errors_state_count_and_limit() {
        let limits = TaskLimits {
            user_tasks_max: Some(10),
            job_tasks_max: Some(4),
        };
        assert_eq!(limits.allow(6, 0, 4), Ok(()));
        assert_eq!(
            limits.allow(7, 0, 4),
            Err(LimitError::UserTasks {
                task_count: 7,
                limit: 10
            })
        );
        let job_error = limits.allow(0, 2, 3).expect_err("too many");
        assert_eq!(
            job_error.to_string(),
            "the limit --job-tasks of the resource manager is 4, and the job has 2 tasks"
        );
        let user_error = limits.allow(1, 0, 10).expect_err("too many");
        assert_eq!(
            user_error.to_string(),
            "the limit --user-tasks of the resource manager is 10, and the user has 1 task"
        );
        assert_eq!(
            TaskLimits::default().allow(u32::MAX, u32::MAX, u32::MAX),
            Ok(())
        );
        assert_eq!(limits.could_allow(10, 4, 4), Ok(()), "later");
        assert_eq!(
            limits.could_allow(10, 2, 5),
            Err(LimitError::JobTasks {
                task_count: 2,
                limit: 4
            })
        );
        assert_eq!(
            limits.could_allow(3, 2, 11),
            Err(LimitError::UserTasks {
                task_count: 3,
                limit: 10
            })
        );
    }

    /// A full queue refuses further requests.
    #[test]
    fn full_queue_refuses_requests() {
        let mut fair_share = FairShare::new(UpDownRates::default());
        for number in 0..QUEUED_REQUESTS_MAX as u64 {
            fair_share
                .enqueue(hour(0), request(number, (number % 7) as u32, hour(0)))
                .expect("room");
        }
        assert_eq!(
            fair_share.enqueue(hour(0), request(u64::MAX, 1, hour(0))),
            Err(LimitError::QueueFull)
        );
        assert_eq!(fair_share.queue_len(), QUEUED_REQUESTS_MAX);
    }
}
