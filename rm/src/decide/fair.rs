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
pub const WAITING_MAX: usize = 65_536;
/// Maximum number of users whose index is remembered. Beyond it, the idle user whose index is
/// nearest to zero is dropped.
pub const USERS_MAX: usize = 65_536;

/// A user's tasks are preempted only if the user's index exceeds twice the index of the waiting
/// user by this many points. Ten processors held for an hour yield ten points. The margin prevents
/// users with similar usage from preempting each other.
pub const PREEMPTION_MARGIN: f64 = 10.0;

/// Rates at which indices change, in points per hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpDownRates {
    /// Increase for each processor that the user holds.
    pub up: f64,
    /// Decrease while at least one request of the user waits.
    pub down: f64,
    /// Fraction of an idle user's index that remains after one hour.
    pub idle_retention: f64,
}

impl Default for UpDownRates {
    fn default() -> UpDownRates {
        UpDownRates {
            up: 1.0,
            down: 4.0,
            idle_retention: 0.5,
        }
    }
}

/// Maximum numbers of tasks at a time; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub user_tasks: Option<u32>,
    pub job_tasks: Option<u32>,
}

/// Why a request must wait or is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitError {
    /// The user's limit would be exceeded.
    UserTasks { has: u32, most: u32 },
    /// The job's limit would be exceeded.
    JobTasks { has: u32, limit: u32 },
    /// The queue is full.
    QueueFull,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitError::UserTasks { has, most } => {
                write!(f, "the user has {has} tasks, and {most} are allowed")
            }
            LimitError::JobTasks { has, limit: most } => {
                write!(f, "the job has {has} tasks, and {most} are allowed")
            }
            LimitError::QueueFull => write!(f, "{WAITING_MAX} requests are waiting already"),
        }
    }
}

impl Limits {
    /// Checks whether `more` further tasks are allowed. `user_has` and `job_has` are the current
    /// numbers of tasks.
    pub fn allow(&self, user_has: u32, job_has: u32, more: u32) -> Result<(), LimitError> {
        let over =
            |has: u32, most: Option<u32>| most.filter(|most| has.saturating_add(more) > *most);
        if let Some(most) = over(user_has, self.user_tasks) {
            return Err(LimitError::UserTasks {
                has: user_has,
                most,
            });
        }
        match over(job_has, self.job_tasks) {
            Some(most) => Err(LimitError::JobTasks {
                has: job_has,
                limit: most,
            }),
            None => Ok(()),
        }
    }

    /// Checks whether `more` tasks could be allowed at a later time, when the user and the job have
    /// fewer tasks. If not, waiting is useless.
    pub fn could_allow(&self, user_has: u32, job_has: u32, more: u32) -> Result<(), LimitError> {
        self.allow(0, 0, more).map_err(|limited| match limited {
            LimitError::UserTasks { most, .. } => LimitError::UserTasks {
                has: user_has,
                most,
            },
            LimitError::JobTasks { limit: most, .. } => LimitError::JobTasks {
                has: job_has,
                limit: most,
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
    pub since: Micros,
}

#[derive(Clone, Copy, Debug, Default)]
struct UserState {
    index: f64,
    updated_at: Micros,
    held: u32,
    waiting: u32,
}

impl UserState {
    /// Returns the index at `now`, if the number of processors and requests has not changed since
    /// the last update.
    fn index_at(&self, rules: &UpDownRates, now: Micros) -> f64 {
        let hours = now.since(self.updated_at).0 as f64 / 3.6e9;
        if self.held == 0 && self.waiting == 0 {
            return self.index * rules.idle_retention.powf(hours);
        }
        let down = if self.waiting > 0 { rules.down } else { 0.0 };
        self.index + hours * (rules.up * f64::from(self.held) - down)
    }
}

/// Indices, holdings and waiting requests of all users.
#[derive(Clone, Debug, Default)]
pub struct FairShare {
    rules: UpDownRates,
    users: BTreeMap<u32, UserState>,
    /// Waiting requests of each user, in the order of arrival.
    queue: BTreeMap<u32, BTreeMap<u64, QueuedRequest>>,
    waiting: usize,
}

impl FairShare {
    pub fn new(rules: UpDownRates) -> FairShare {
        FairShare {
            rules,
            ..FairShare::default()
        }
    }

    fn user(&mut self, now: Micros, user: u32) -> &mut UserState {
        let rules = self.rules;
        if self.users.len() >= USERS_MAX && !self.users.contains_key(&user) {
            let idle = self
                .users
                .iter()
                .filter(|(_, u)| u.held == 0 && u.waiting == 0);
            let least = idle
                .min_by(|(_, a), (_, b)| a.index.abs().total_cmp(&b.index.abs()))
                .map(|(id, _)| *id);
            least.map(|id| self.users.remove(&id));
        }
        let entry = self.users.entry(user).or_insert(UserState {
            updated_at: now,
            ..UserState::default()
        });
        (entry.index, entry.updated_at) = (entry.index_at(&rules, now), now.max(entry.updated_at));
        entry
    }

    /// Records that the user has obtained `event_count` more processors.
    pub fn acquire(&mut self, now: Micros, user: u32, count: u32) {
        let user = self.user(now, user);
        user.held = user.held.saturating_add(count);
    }

    /// Records that the user has released `count` processors.
    pub fn release(&mut self, now: Micros, user: u32, count: u32) {
        let user = self.user(now, user);
        user.held = user.held.saturating_sub(count);
    }

    /// Returns the number of processors that the user holds.
    pub fn held(&self, user: u32) -> u32 {
        self.users.get(&user).map_or(0, |u| u.held)
    }

    /// Returns the user's index. Users with a lower index are served first.
    pub fn index(&self, now: Micros, user: u32) -> f64 {
        self.users
            .get(&user)
            .map_or(0.0, |u| u.index_at(&self.rules, now))
    }

    /// Adds a request to the queue.
    ///
    /// # Errors
    /// [`LimitError::QueueFull`]; the request is not added.
    pub fn enqueue(&mut self, now: Micros, request: QueuedRequest) -> Result<(), LimitError> {
        if self.waiting >= WAITING_MAX {
            return Err(LimitError::QueueFull);
        }
        if self
            .queue
            .entry(request.user)
            .or_default()
            .insert(request.number, request)
            .is_none()
        {
            self.waiting += 1;
            self.user(now, request.user).waiting += 1;
        }
        Ok(())
    }

    /// Removes a request from the queue, because it got its hosts or was withdrawn. Returns `None`
    /// if it is not in the queue.
    pub fn dequeue(&mut self, now: Micros, user: u32, number: u64) -> Option<QueuedRequest> {
        let queue = self.queue.get_mut(&user)?;
        let request = queue.remove(&number)?;
        if queue.is_empty() {
            self.queue.remove(&user);
        }
        self.waiting -= 1;
        let entry = self.user(now, user);
        entry.waiting = entry.waiting.saturating_sub(1);
        Some(request)
    }

    /// Returns the number of waiting requests.
    pub fn queue_len(&self) -> usize {
        self.waiting
    }

    /// Returns all waiting requests in the order of service.
    pub fn queue_in_order(&self, now: Micros) -> Vec<QueuedRequest> {
        let with_index = |(user, queue): (&u32, &BTreeMap<u64, QueuedRequest>)| {
            let index = self.index(now, *user);
            queue
                .values()
                .map(|request| (index, *request))
                .collect::<Vec<_>>()
        };
        let mut all: Vec<(f64, QueuedRequest)> = self.queue.iter().flat_map(with_index).collect();
        all.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(x.number.cmp(&y.number)));
        all.into_iter().map(|(_, request)| request).collect()
    }

    /// Empties the queue and returns its requests in the order of service.
    pub fn drain_queue(&mut self, now: Micros) -> Vec<QueuedRequest> {
        let all = self.queue_in_order(now);
        for request in &all {
            self.dequeue(now, request.user, request.number);
        }
        all
    }

    /// Returns the users with a nonzero index, with their indices.
    pub fn indices(&self, now: Micros) -> impl Iterator<Item = (u32, f64)> {
        self.users
            .iter()
            .map(move |(id, user)| (*id, user.index_at(&self.rules, now)))
            .filter(|(_, index)| *index != 0.0)
    }

    /// Restores an index from the history. `ago`: time since it was stored. The user counts as idle
    /// during that time.
    pub fn restore_index(&mut self, now: Micros, user: u32, index: f64, ago: Micros) {
        let hours = ago.0 as f64 / 3.6e9;
        let index = index * self.rules.idle_retention.powf(hours);
        self.user(now, user).index = index;
    }

    /// Returns the oldest request of each waiting user with the user's index, in the order of
    /// service. If two indices are equal, the older request comes first.
    pub fn next_per_user(&self, now: Micros) -> Vec<(f64, QueuedRequest)> {
        let first = |(user, queue): (&u32, &BTreeMap<u64, QueuedRequest>)| {
            queue
                .values()
                .next()
                .map(|request| (self.index(now, *user), *request))
        };
        let mut turns: Vec<_> = self.queue.iter().filter_map(first).collect();
        turns.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(x.number.cmp(&y.number)));
        turns
    }

    /// Returns the users whose tasks may be preempted for `user`: those whose index exceeds
    /// the index of `user` far enough (see [`PREEMPTION_MARGIN`]), the highest index first.
    pub fn preemptible_users(&self, now: Micros, user: u32) -> Vec<u32> {
        let own_index = self.index(now, user);
        let holders = self
            .users
            .iter()
            .filter(|(id, u)| **id != user && u.held > 0);
        let mut above: Vec<_> = holders.map(|(id, _)| (self.index(now, *id), *id)).collect();
        above.retain(|(index, _)| *index >= own_index + own_index.max(0.0) + PREEMPTION_MARGIN);
        above.sort_by(|(a, x), (b, y)| b.total_cmp(a).then(x.cmp(y)));
        above.into_iter().map(|(_, id)| id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hour(n: u64) -> Micros {
        Micros::from_secs(n * 3600)
    }

    fn request(number: u64, user: u32, since: Micros) -> QueuedRequest {
        QueuedRequest {
            number,
            user,
            job: Tid::NONE,
            since,
        }
    }

    fn order(fair: &FairShare, now: Micros) -> Vec<u64> {
        fair.next_per_user(now)
            .into_iter()
            .map(|(_, request)| request.number)
            .collect()
    }

    /// The index rises with processors held, falls while a request waits, and decays while the user
    /// is idle.
    #[test]
    fn index_rises_with_use_and_falls_with_waiting() {
        let mut fair = FairShare::new(UpDownRates::default());
        fair.acquire(hour(0), 1, 10);
        assert_eq!(fair.index(hour(2), 1), 20.0);
        fair.release(hour(2), 1, 10);
        assert_eq!(fair.index(hour(3), 1), 10.0, "half is forgotten in an hour");
        fair.enqueue(hour(2), request(1, 2, hour(2))).expect("room");
        assert_eq!(fair.index(hour(4), 2), -8.0);
        fair.dequeue(hour(4), 2, 1);
        fair.acquire(hour(4), 2, 1);
        assert_eq!(fair.index(hour(5), 2), -7.0);
    }

    /// The user with the lowest index goes first; among equal indices the older request does.
    #[test]
    fn lowest_index_then_oldest_request_goes_first() {
        let mut fair = FairShare::new(UpDownRates::default());
        fair.acquire(hour(0), 1, 100);
        for (number, user) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 2)] {
            fair.enqueue(hour(10), request(number, user, hour(10)))
                .expect("room");
        }
        assert_eq!(order(&fair, hour(10)), [3, 4, 1], "one of each user");
        assert_eq!(fair.dequeue(hour(10), 2, 3).map(|r| r.number), Some(3));
        assert_eq!(order(&fair, hour(10)), [4, 5, 1]);
        fair.acquire(hour(10), 2, 1);
        assert_eq!(
            order(&fair, hour(11)),
            [4, 5, 1],
            "two waits while it holds one"
        );
        assert_eq!(
            fair.preemptible_users(hour(11), 3),
            [1],
            "nobody else has taken much"
        );
        assert_eq!(
            fair.preemptible_users(hour(11), 1),
            [],
            "two has taken less"
        );
        assert_eq!(fair.queue_len(), 4);
        assert_eq!(fair.dequeue(hour(11), 2, 99), None);
    }

    /// Taking all requests at once gives the same order as taking them one by one.
    #[test]
    fn draining_the_queue_keeps_the_service_order() {
        let mut fair = FairShare::new(UpDownRates::default());
        fair.acquire(hour(0), 1, 100);
        for (number, user) in [(1, 1), (2, 2), (3, 1), (4, 3), (5, 2), (6, 4)] {
            fair.enqueue(hour(1), request(number, user, hour(1)))
                .expect("room");
        }
        let mut one_by_one = fair.clone();
        let mut expected = Vec::new();
        while let Some((_, first)) = one_by_one.next_per_user(hour(2)).first().copied() {
            one_by_one.dequeue(hour(2), first.user, first.number);
            expected.push(first.number);
        }
        let taken: Vec<u64> = fair.drain_queue(hour(2)).iter().map(|r| r.number).collect();
        assert_eq!((taken, fair.queue_len()), (expected, 0));
    }

    /// A restored index has decayed since it was stored.
    #[test]
    fn restored_index_has_decayed() {
        let mut fair = FairShare::new(UpDownRates::default());
        fair.restore_index(hour(5), 7, 20.0, hour(1));
        assert_eq!(fair.indices(hour(5)).collect::<Vec<_>>(), [(7, 10.0)]);
    }

    /// A limit error states how many tasks there are and how many are allowed.
    #[test]
    fn limit_errors_state_count_and_limit() {
        let limits = Limits {
            user_tasks: Some(10),
            job_tasks: Some(4),
        };
        assert_eq!(limits.allow(6, 0, 4), Ok(()));
        assert_eq!(
            limits.allow(7, 0, 4),
            Err(LimitError::UserTasks { has: 7, most: 10 })
        );
        let job = limits.allow(0, 2, 3).expect_err("too many");
        assert_eq!(job.to_string(), "the job has 2 tasks, and 4 are allowed");
        assert_eq!(
            Limits::default().allow(u32::MAX, u32::MAX, u32::MAX),
            Ok(())
        );
        assert_eq!(limits.could_allow(10, 4, 4), Ok(()), "later");
        assert_eq!(
            limits.could_allow(10, 2, 5),
            Err(LimitError::JobTasks { has: 2, limit: 4 })
        );
        assert_eq!(
            limits.could_allow(3, 2, 11),
            Err(LimitError::UserTasks { has: 3, most: 10 })
        );
    }

    /// A full queue refuses further requests.
    #[test]
    fn full_queue_refuses_requests() {
        let mut fair = FairShare::new(UpDownRates::default());
        for number in 0..WAITING_MAX as u64 {
            fair.enqueue(hour(0), request(number, (number % 7) as u32, hour(0)))
                .expect("room");
        }
        assert_eq!(
            fair.enqueue(hour(0), request(u64::MAX, 1, hour(0))),
            Err(LimitError::QueueFull)
        );
        assert_eq!(fair.queue_len(), WAITING_MAX);
    }
}
