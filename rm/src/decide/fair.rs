//! Whose turn it is: priorities by the Up-Down scheme (Mutka and Livny, Condor), limits, and the queue of requests that
//! found no place.
//!
//! Each user has an index. It rises with every processor that the user holds and falls while the user waits for one; when
//! neither is so, it goes back towards nothing. The lowest index is served first. So who takes much for long waits longer, and
//! who asks for little now and then is served at once, whatever the others have taken.

use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Requests that wait at most; more are refused.
pub const WAITING_MAX: usize = 65_536;
/// Users whose indices are remembered; of more, those nearest to nothing that hold and want nothing are forgotten.
pub const USERS_MAX: usize = 65_536;

/// A user gives way whose index is more than twice that of one who waits, and so many points more: an hour of ten
/// processors. Users who take about the same do not disturb each other.
pub const GIVE_WAY_MARGIN: f64 = 10.0;

/// How indices change, in points for each hour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpDown {
    /// For each processor held.
    pub up: f64,
    /// While anything is waited for.
    pub down: f64,
    /// Towards nothing otherwise: the part of the index that is left after an hour.
    pub kept: f64,
}

impl Default for UpDown {
    fn default() -> UpDown {
        UpDown {
            up: 1.0,
            down: 4.0,
            kept: 0.5,
        }
    }
}

/// How much one may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Tasks of a user at once; `None`: no limit.
    pub user_tasks: Option<u32>,
    /// Tasks of a job at once.
    pub job_tasks: Option<u32>,
}

/// Why a request must wait or is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limited {
    /// The user holds too much.
    User {
        /// What there is.
        has: u32,
        /// The limit.
        most: u32,
    },
    /// The job holds too much.
    Job {
        /// What there is.
        has: u32,
        /// The limit.
        most: u32,
    },
    /// Too many requests wait.
    Queue,
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limited::User { has, most } => {
                write!(f, "the user has {has} tasks, and {most} are allowed")
            }
            Limited::Job { has, most } => {
                write!(f, "the job has {has} tasks, and {most} are allowed")
            }
            Limited::Queue => write!(f, "{WAITING_MAX} requests wait already"),
        }
    }
}

impl Limits {
    /// Whether so many more tasks are allowed.
    pub fn allow(&self, user_has: u32, job_has: u32, more: u32) -> Result<(), Limited> {
        let over =
            |has: u32, most: Option<u32>| most.filter(|most| has.saturating_add(more) > *most);
        if let Some(most) = over(user_has, self.user_tasks) {
            return Err(Limited::User {
                has: user_has,
                most,
            });
        }
        match over(job_has, self.job_tasks) {
            Some(most) => Err(Limited::Job { has: job_has, most }),
            None => Ok(()),
        }
    }

    /// Whether so many tasks would be allowed if the user and the job had no others. If not, it is no use to wait.
    pub fn could_allow(&self, user_has: u32, job_has: u32, more: u32) -> Result<(), Limited> {
        self.allow(0, 0, more).map_err(|limited| match limited {
            Limited::User { most, .. } => Limited::User {
                has: user_has,
                most,
            },
            Limited::Job { most, .. } => Limited::Job { has: job_has, most },
            Limited::Queue => Limited::Queue,
        })
    }
}

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its number: earlier ones are smaller.
    pub number: u64,
    /// Who asks.
    pub user: u32,
    /// For which job.
    pub job: Tid,
    /// Since when.
    pub since: Micros,
}

#[derive(Clone, Copy, Debug, Default)]
struct User {
    index: f64,
    at: Micros,
    held: u32,
    waiting: u32,
}

impl User {
    /// The index at a later time, if nothing changes before.
    fn index_at(&self, rules: &UpDown, now: Micros) -> f64 {
        let hours = now.since(self.at).0 as f64 / 3.6e9;
        if self.held == 0 && self.waiting == 0 {
            return self.index * rules.kept.powf(hours);
        }
        let down = if self.waiting > 0 { rules.down } else { 0.0 };
        self.index + hours * (rules.up * f64::from(self.held) - down)
    }
}

/// Users, what they hold, and what they wait for.
#[derive(Clone, Debug, Default)]
pub struct Fair {
    rules: UpDown,
    users: BTreeMap<u32, User>,
    /// The requests of each user, in the order in which they came.
    queue: BTreeMap<u32, BTreeMap<u64, Waiting>>,
    waiting: usize,
}

impl Fair {
    /// Nobody holds or wants anything.
    pub fn new(rules: UpDown) -> Fair {
        Fair {
            rules,
            ..Fair::default()
        }
    }

    fn user(&mut self, now: Micros, user: u32) -> &mut User {
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
        let entry = self.users.entry(user).or_insert(User {
            at: now,
            ..User::default()
        });
        (entry.index, entry.at) = (entry.index_at(&rules, now), now.max(entry.at));
        entry
    }

    /// The user has got so many processors.
    pub fn takes(&mut self, now: Micros, user: u32, count: u32) {
        let user = self.user(now, user);
        user.held = user.held.saturating_add(count);
    }

    /// The user has given so many back.
    pub fn gives(&mut self, now: Micros, user: u32, count: u32) {
        let user = self.user(now, user);
        user.held = user.held.saturating_sub(count);
    }

    /// What the user holds.
    pub fn held(&self, user: u32) -> u32 {
        self.users.get(&user).map_or(0, |u| u.held)
    }

    /// The user's index; the lower one goes first.
    pub fn index(&self, now: Micros, user: u32) -> f64 {
        self.users
            .get(&user)
            .map_or(0.0, |u| u.index_at(&self.rules, now))
    }

    /// A request waits.
    ///
    /// # Errors
    /// [`Limited::Queue`]; it does not wait then.
    pub fn wait(&mut self, now: Micros, request: Waiting) -> Result<(), Limited> {
        if self.waiting >= WAITING_MAX {
            return Err(Limited::Queue);
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

    /// A request waits no longer: it got its place, or was withdrawn.
    pub fn leave(&mut self, now: Micros, user: u32, number: u64) -> Option<Waiting> {
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

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// All requests that wait, in the order of their turns.
    pub fn queue(&self, now: Micros) -> Vec<Waiting> {
        let with_index = |(user, queue): (&u32, &BTreeMap<u64, Waiting>)| {
            let index = self.index(now, *user);
            queue
                .values()
                .map(|request| (index, *request))
                .collect::<Vec<_>>()
        };
        let mut all: Vec<(f64, Waiting)> = self.queue.iter().flat_map(with_index).collect();
        all.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(x.number.cmp(&y.number)));
        all.into_iter().map(|(_, request)| request).collect()
    }

    /// The same; none waits any longer.
    pub fn take_waiting(&mut self, now: Micros) -> Vec<Waiting> {
        let all = self.queue(now);
        for request in &all {
            self.leave(now, request.user, request.number);
        }
        all
    }

    /// The indices of all users who have one.
    pub fn indices(&self, now: Micros) -> impl Iterator<Item = (u32, f64)> {
        self.users
            .iter()
            .map(move |(id, user)| (*id, user.index_at(&self.rules, now)))
            .filter(|(_, index)| *index != 0.0)
    }

    /// Gives a user the index that was known `ago`; since then the user held nothing and waited for nothing.
    pub fn recall(&mut self, now: Micros, user: u32, index: f64, ago: Micros) {
        let hours = ago.0 as f64 / 3.6e9;
        let index = index * self.rules.kept.powf(hours);
        self.user(now, user).index = index;
    }

    /// The users who wait, the one whose turn it is first, each with the oldest request. Of equal indices, the older
    /// request goes first.
    pub fn turns(&self, now: Micros) -> Vec<(f64, Waiting)> {
        let first = |(user, queue): (&u32, &BTreeMap<u64, Waiting>)| {
            queue
                .values()
                .next()
                .map(|request| (self.index(now, *user), *request))
        };
        let mut turns: Vec<_> = self.queue.iter().filter_map(first).collect();
        turns.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(x.number.cmp(&y.number)));
        turns
    }

    /// Who has to give up processors when this user waits for some: the highest indices first, and only those that are above the
    /// user's own by far (see [`GIVE_WAY_MARGIN`]).
    pub fn give_way(&self, now: Micros, user: u32) -> Vec<u32> {
        let own = self.index(now, user);
        let holders = self
            .users
            .iter()
            .filter(|(id, u)| **id != user && u.held > 0);
        let mut above: Vec<_> = holders.map(|(id, _)| (self.index(now, *id), *id)).collect();
        above.retain(|(index, _)| *index >= own + own.max(0.0) + GIVE_WAY_MARGIN);
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

    fn request(number: u64, user: u32, since: Micros) -> Waiting {
        Waiting {
            number,
            user,
            job: Tid::NONE,
            since,
        }
    }

    fn order(fair: &Fair, now: Micros) -> Vec<u64> {
        fair.turns(now)
            .into_iter()
            .map(|(_, request)| request.number)
            .collect()
    }

    #[test]
    fn usage_raises_waiting_lowers_and_idleness_forgets() {
        let mut fair = Fair::new(UpDown::default());
        fair.takes(hour(0), 1, 10);
        assert_eq!(fair.index(hour(2), 1), 20.0);
        fair.gives(hour(2), 1, 10);
        assert_eq!(fair.index(hour(3), 1), 10.0, "half is forgotten in an hour");
        fair.wait(hour(2), request(1, 2, hour(2))).expect("room");
        assert_eq!(fair.index(hour(4), 2), -8.0);
        fair.leave(hour(4), 2, 1);
        fair.takes(hour(4), 2, 1);
        assert_eq!(fair.index(hour(5), 2), -7.0);
    }

    #[test]
    fn who_has_taken_less_goes_first_and_among_equals_the_older_request() {
        let mut fair = Fair::new(UpDown::default());
        fair.takes(hour(0), 1, 100);
        for (number, user) in [(1, 1), (2, 1), (3, 2), (4, 3), (5, 2)] {
            fair.wait(hour(10), request(number, user, hour(10)))
                .expect("room");
        }
        assert_eq!(order(&fair, hour(10)), [3, 4, 1], "one of each user");
        assert_eq!(fair.leave(hour(10), 2, 3).map(|r| r.number), Some(3));
        assert_eq!(order(&fair, hour(10)), [4, 5, 1]);
        fair.takes(hour(10), 2, 1);
        assert_eq!(
            order(&fair, hour(11)),
            [4, 5, 1],
            "two waits while it holds one"
        );
        assert_eq!(
            fair.give_way(hour(11), 3),
            [1],
            "nobody else has taken much"
        );
        assert_eq!(fair.give_way(hour(11), 1), [], "two has taken less");
        assert_eq!(fair.waiting(), 4);
        assert_eq!(fair.leave(hour(11), 2, 99), None);
    }

    #[test]
    fn all_that_wait_are_taken_in_the_order_in_which_they_would_be_one_by_one() {
        let mut fair = Fair::new(UpDown::default());
        fair.takes(hour(0), 1, 100);
        for (number, user) in [(1, 1), (2, 2), (3, 1), (4, 3), (5, 2), (6, 4)] {
            fair.wait(hour(1), request(number, user, hour(1)))
                .expect("room");
        }
        let mut one_by_one = fair.clone();
        let mut expected = Vec::new();
        while let Some((_, first)) = one_by_one.turns(hour(2)).first().copied() {
            one_by_one.leave(hour(2), first.user, first.number);
            expected.push(first.number);
        }
        let taken: Vec<u64> = fair
            .take_waiting(hour(2))
            .iter()
            .map(|r| r.number)
            .collect();
        assert_eq!((taken, fair.waiting()), (expected, 0));
    }

    #[test]
    fn an_index_that_is_recalled_has_faded_meanwhile() {
        let mut fair = Fair::new(UpDown::default());
        fair.recall(hour(5), 7, 20.0, hour(1));
        assert_eq!(fair.indices(hour(5)).collect::<Vec<_>>(), [(7, 10.0)]);
    }

    #[test]
    fn limits_say_what_there_is_and_what_is_allowed() {
        let limits = Limits {
            user_tasks: Some(10),
            job_tasks: Some(4),
        };
        assert_eq!(limits.allow(6, 0, 4), Ok(()));
        assert_eq!(
            limits.allow(7, 0, 4),
            Err(Limited::User { has: 7, most: 10 })
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
            Err(Limited::Job { has: 2, most: 4 })
        );
        assert_eq!(
            limits.could_allow(3, 2, 11),
            Err(Limited::User { has: 3, most: 10 })
        );
    }

    #[test]
    fn the_queue_has_an_end() {
        let mut fair = Fair::new(UpDown::default());
        for number in 0..WAITING_MAX as u64 {
            fair.wait(hour(0), request(number, (number % 7) as u32, hour(0)))
                .expect("room");
        }
        assert_eq!(
            fair.wait(hour(0), request(u64::MAX, 1, hour(0))),
            Err(Limited::Queue)
        );
        assert_eq!(fair.waiting(), WAITING_MAX);
    }
}
