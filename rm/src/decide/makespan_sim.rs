//! Simulates job completion on a copy of the cluster. A candidate migration is evaluated by running
//! the simulation with it and without it.
//!
//! The simulation includes later migrations: whenever a processor becomes idle, the task that would
//! end last migrates there if that makes it faster. A candidate is therefore compared with waiting
//! for the next idle processor.
//!
//! All tasks of a host run at the same rate. Each host has a queue of its tasks, sorted by
//! remaining work. Time advances in steps, each to the next end of a task or of a cooldown.

use super::{REBALANCE_COOLDOWN, REBALANCES_MAX};

/// Minimum factor by which a task must become faster to migrate.
pub(super) const SPEEDUP_MIN: f64 = 1.2;

/// A host in the simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimHost {
    pub(super) processors: f64,
    /// Speed of one processor, relative to an ordinary one.
    pub(super) speed: f64,
    /// External load in threads.
    pub(super) external_threads: f64,
}

impl SimHost {
    /// Returns the work that each task does per second if `tasks` tasks run on the host, in seconds
    /// of an ordinary processor.
    pub(super) fn rate(&self, tasks: usize) -> f64 {
        let threads = tasks as f64 + self.external_threads;
        (self.speed * (self.processors / threads.max(1e-9)).min(1.0)).max(1e-9)
    }

    /// Returns the sum of the completion times of `tasks` tasks in seconds, if all stay on the
    /// host. `work_left`: remaining work of each, in ascending order.
    pub(super) fn completion_sum(
        &self,
        tasks: usize,
        works_left: impl Iterator<Item = f64>,
    ) -> f64 {
        let (mut before, mut sum) = (0.0, 0.0);
        for (ended, works_left) in works_left.enumerate() {
            let running = tasks - ended;
            sum += running as f64 * (works_left - before) / self.rate(running);
            before = works_left;
        }
        sum
    }
}

/// A task in the simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimTask {
    /// Index of the task's host.
    pub(super) host: usize,
    /// Remaining work, in seconds of an ordinary processor. While the task is in a queue,
    /// [`HostQueue::work_done`] at its arrival is added.
    pub(super) work_left: f64,
    /// Number of migrations that the task may still make.
    pub(super) moves_left: usize,
    /// End of the cooldown, in seconds of simulated time.
    pub(super) cooldown_end: f64,
    /// True if the task belongs to the job whose completion time is optimized.
    pub(super) in_job: bool,
}

impl SimTask {
    /// Migrates the task to host `to` at time `now`. `work`: cost of the migration, as
    /// additional work.
    pub(super) fn migrate(&mut self, to: usize, work: f64, now: f64) {
        self.moves_left = self.moves_left.saturating_sub(1);
        let before = REBALANCES_MAX.saturating_sub(self.moves_left + 1);
        (self.host, self.work_left) = (to, self.work_left + work);
        self.cooldown_end = now + REBALANCE_COOLDOWN.0 as f64 / 1e6 * (1_u64 << before) as f64;
    }
}

/// Result of a simulation, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct SimOutcome {
    /// Time when the last task of the job ends.
    pub(super) job_end: f64,
    /// Sum of the completion times of the tasks of other jobs.
    pub(super) other_ends: f64,
}

/// Index that stands for "no task", for example after the last task of a queue.
const NO_TASK: usize = usize::MAX;
/// Offer of a host on which one more task would slow down other tasks.
const NO_OFFER: f64 = -1.0;

/// The tasks of one host, linked in the order of their ends. All of them run at the same rate.
///
/// `done` at the arrival of a task is added to its remaining work, so the task ends when `done`
/// reaches that sum.
#[derive(Clone, Copy, Debug)]
struct HostQueue {
    /// Task that ends first. [`Simulation::next`] gives the successor of each task.
    first: usize,
    last: usize,
    len: usize,
    /// Work that a task has done if it was on the host from the start until `updated_at`.
    work_done: f64,
    updated_at: f64,
    /// Work that each task does per second, in seconds of an ordinary processor.
    rate: f64,
}

/// State of a simulation. The cost of a step depends on the number of hosts, not on the number of
/// tasks.
///
/// Values that are searched over all hosts are in separate arrays, and the state contains no
/// references. To start a trial, the state is copied into memory that is already allocated.
#[derive(Debug, Default)]
pub(super) struct Simulation {
    hosts: Vec<SimHost>,
    queues: Vec<HostQueue>,
    /// Time when the first task of each host ends.
    first_ends: Vec<f64>,
    /// Time when the last task of each host would end if nothing changed.
    last_ends: Vec<f64>,
    /// Rate that each host offers to one more task, or [`NO_OFFER`].
    offers: Vec<f64>,
    /// Minimum rate for which a task leaves its host, by host.
    min_offers: Vec<f64>,
    sim_tasks: Vec<SimTask>,
    /// Successor of each task in its queue.
    next: Vec<usize>,
    /// Number of tasks that have not ended.
    running: usize,
    /// Number of tasks of the job that have not ended.
    running_in_job: usize,
    /// Completion time of each task that has ended.
    ended_at: Vec<f64>,
    /// Ends of the cooldowns, in descending order.
    cooldown_ends: Vec<f64>,
    /// True if some processor is idle.
    has_idle_processor: bool,
    /// Largest offer that no task has accepted. Offers up to it are skipped, because a task that
    /// declines one does not accept it later unless something else changes.
    declined_offer: f64,
    /// Cost of a migration for its task, in seconds.
    move_cost: f64,
    now: f64,
    outcome: SimOutcome,
    /// Number of steps of all simulations in this memory.
    steps: usize,
}

impl Simulation {
    pub(super) fn new(machines: Vec<SimHost>, pieces: Vec<SimTask>) -> Simulation {
        let queue = HostQueue {
            first: NO_TASK,
            last: NO_TASK,
            len: 0,
            work_done: 0.0,
            updated_at: 0.0,
            rate: 0.0,
        };
        let mut rested: Vec<f64> = pieces
            .iter()
            .map(|piece| piece.cooldown_end)
            .filter(|rests| *rests > 0.0)
            .collect();
        rested.sort_unstable_by(|a, b| b.total_cmp(a));
        let none = vec![0.0; machines.len()];
        let mut future = Simulation {
            queues: vec![queue; machines.len()],
            first_ends: none.clone(),
            last_ends: none.clone(),
            offers: none.clone(),
            min_offers: none,
            next: vec![NO_TASK; pieces.len()],
            ended_at: vec![0.0; pieces.len()],
            running: pieces.len(),
            hosts: machines,
            sim_tasks: pieces,
            cooldown_ends: rested,
            declined_offer: NO_OFFER,
            ..Simulation::default()
        };
        (0..future.queues.len()).for_each(|host| future.recompute(host));
        // Tasks are added in reverse order. Of two tasks with equal remaining work, the first one
        // in the list is then treated as the longer one.
        (0..future.sim_tasks.len())
            .rev()
            .for_each(|i| future.enqueue(i));
        future
    }

    /// Copies the state of another simulation. Reuses the memory that this simulation has
    /// allocated.
    pub(super) fn reset_from(&mut self, other: &Simulation) {
        self.hosts.clone_from(&other.hosts);
        self.queues.clone_from(&other.queues);
        self.first_ends.clone_from(&other.first_ends);
        self.last_ends.clone_from(&other.last_ends);
        self.offers.clone_from(&other.offers);
        self.min_offers.clone_from(&other.min_offers);
        self.sim_tasks.clone_from(&other.sim_tasks);
        self.next.clone_from(&other.next);
        self.ended_at.clone_from(&other.ended_at);
        self.cooldown_ends.clone_from(&other.cooldown_ends);
        (
            self.running,
            self.running_in_job,
            self.has_idle_processor,
            self.declined_offer,
        ) = (
            other.running,
            other.running_in_job,
            other.has_idle_processor,
            other.declined_offer,
        );
        (self.move_cost, self.now, self.outcome) = (other.move_cost, other.now, other.outcome);
    }

    /// Selects the tasks of the job, and sets the cost of a migration in seconds.
    pub(super) fn select_job(&mut self, counts: impl Fn(usize) -> bool, cost: f64) {
        self.sim_tasks
            .iter_mut()
            .enumerate()
            .for_each(|(i, piece)| piece.in_job = counts(i));
        self.running_in_job = self.sim_tasks.iter().filter(|piece| piece.in_job).count();
        (self.move_cost, self.declined_offer) = (cost, NO_OFFER);
    }

    pub(super) fn hosts(&self) -> &[SimHost] {
        &self.hosts
    }

    pub(super) fn tasks(&self) -> &[SimTask] {
        &self.sim_tasks
    }

    /// Runs until all tasks have ended. Returns the completion time of each task.
    pub(super) fn run_to_end(&mut self) -> &[f64] {
        while self.running > 0 {
            self.step();
        }
        &self.ended_at
    }

    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Migrates task `i` to host `target` at the current time, with the cost of a migration.
    pub(super) fn migrate(&mut self, i: usize, to: usize) {
        let gets = self.hosts[to].rate(self.queues[to].len + 1);
        self.relocate(i, to, self.move_cost * gets);
    }

    /// Migrates task `i` to host `to` without a cost, because the plan already contains the
    /// migration.
    pub(super) fn apply_planned(&mut self, i: usize, to: usize) {
        self.relocate(i, to, 0.0);
    }

    /// Runs until all tasks have ended, and returns the outcome. Returns `None` as soon as
    /// `rejects` rejects the lower bound of the outcome.
    pub(super) fn run_unless(
        &mut self,
        rejects: impl Fn(SimOutcome) -> bool,
    ) -> Option<SimOutcome> {
        while self.running > 0 {
            self.step();
            let end = if self.running_in_job > 0 {
                self.now
            } else {
                self.outcome.job_end
            };
            let others =
                self.outcome.other_ends + (self.running - self.running_in_job) as f64 * self.now;
            if rejects(SimOutcome {
                job_end: end,
                other_ends: others,
            }) {
                return None;
            }
        }
        Some(self.outcome)
    }

    /// Runs until the job has ended or `limit` seconds have passed. Returns true if the job
    /// ends after `limit`.
    pub(super) fn job_ends_after(&mut self, limit: f64) -> bool {
        while self.running_in_job > 0 && self.now <= limit {
            self.step();
        }
        self.running_in_job > 0 || self.outcome.job_end > limit
    }

    /// Makes one step: migrates tasks to idle processors, then advances to the next end of a task.
    /// If a processor is idle, an earlier end of a cooldown ends the step.
    fn step(&mut self) {
        self.steps += 1;
        while self.cooldown_ends.last().is_some_and(|at| *at <= self.now) {
            self.cooldown_ends.pop();
            self.declined_offer = NO_OFFER;
        }
        self.fill_idle_processors();
        let end = -max_by_value(&self.first_ends, |end| -end);
        let host = self
            .first_ends
            .iter()
            .position(|at| *at == end)
            .unwrap_or(0);
        if let Some(at) = self
            .cooldown_ends
            .last()
            .filter(|at| self.has_idle_processor && **at < end)
        {
            // Adds a small amount, so that the cooldown has ended in spite of rounding.
            self.now = at + 1e-6;
            return;
        }
        self.now = self.now.max(end);
        self.advance_work(host);
        let queue = &mut self.queues[host];
        let first = queue.first;
        (queue.first, queue.len, self.running) =
            (self.next[first], queue.len - 1, self.running - 1);
        if queue.first == NO_TASK {
            queue.last = NO_TASK;
        }
        self.ended_at[first] = self.now;
        if self.sim_tasks[first].in_job {
            (self.outcome.job_end, self.running_in_job) = (self.now, self.running_in_job - 1);
        } else {
            self.outcome.other_ends += self.now;
        }
        self.recompute(host);
    }

    /// Migrates tasks to idle processors, as long as a task accepts an offer.
    fn fill_idle_processors(&mut self) {
        for _ in 0..self.running {
            let rate = max_by_value(&self.offers, |offer| offer);
            self.has_idle_processor = rate > NO_OFFER;
            if !self.has_idle_processor || rate <= self.declined_offer {
                return;
            }
            let to = self.offers.iter().rposition(|offer| *offer == rate);
            let Some((longest, to)) = self.longest_task_for_rate(rate).zip(to) else {
                self.declined_offer = rate;
                return;
            };
            self.relocate(longest, to, self.move_cost * rate);
        }
    }

    /// Returns the task that becomes faster at the rate `gets` and would otherwise end last; `None`
    /// if no task becomes faster.
    fn longest_task_for_rate(&self, gets: f64) -> Option<usize> {
        let (mut latest, mut candidate) = (self.now, None);
        for (host, (wants, ends)) in self.min_offers.iter().zip(&self.last_ends).enumerate() {
            if gets < *wants || *ends <= latest {
                continue;
            }
            // If the longest task of a host gains nothing, no other task of the host does.
            let Some(longest) = self.longest_movable_task(host) else {
                continue;
            };
            let queue = &self.queues[host];
            let left = self.sim_tasks[longest].work_left
                - (queue.work_done + (self.now - queue.updated_at) * queue.rate);
            let ends = self.now + left / queue.rate;
            if ends > self.now + left / gets + self.move_cost && ends > latest {
                (latest, candidate) = (ends, Some(longest));
            }
        }
        candidate
    }

    /// Returns the longest of the tasks of a host that may migrate.
    fn longest_movable_task(&self, host: usize) -> Option<usize> {
        let queue = &self.queues[host];
        let may_go = |i: usize| {
            self.sim_tasks[i].moves_left > 0 && self.sim_tasks[i].cooldown_end <= self.now
        };
        if queue.last != NO_TASK && may_go(queue.last) {
            return Some(queue.last);
        }
        let (mut i, mut longest) = (queue.first, None);
        while i != NO_TASK {
            if may_go(i) {
                longest = Some(i);
            }
            i = self.next[i];
        }
        longest
    }

    fn relocate(&mut self, i: usize, to: usize, work: f64) {
        self.declined_offer = NO_OFFER;
        self.dequeue(i);
        let piece = &mut self.sim_tasks[i];
        piece.migrate(to, work, self.now);
        let rests = piece.cooldown_end;
        self.cooldown_ends.insert(
            self.cooldown_ends.partition_point(|other| *other > rests),
            rests,
        );
        self.enqueue(i);
    }

    fn dequeue(&mut self, i: usize) {
        let host = self.sim_tasks[i].host;
        self.advance_work(host);
        let after = self.next[i];
        let queue = &mut self.queues[host];
        queue.len -= 1;
        let mut before = NO_TASK;
        if queue.first == i {
            queue.first = after;
        } else {
            before = queue.first;
            while self.next[before] != i {
                before = self.next[before];
            }
            self.next[before] = after;
        }
        if after == NO_TASK {
            queue.last = before;
        }
        let piece = &mut self.sim_tasks[i];
        piece.work_left = (piece.work_left - queue.work_done).max(0.0);
        self.recompute(host);
    }

    fn enqueue(&mut self, i: usize) {
        let host = self.sim_tasks[i].host;
        self.advance_work(host);
        let queue = &mut self.queues[host];
        queue.len += 1;
        self.sim_tasks[i].work_left += queue.work_done;
        let (left, mut before, mut after) = (self.sim_tasks[i].work_left, NO_TASK, queue.first);
        while after != NO_TASK && self.sim_tasks[after].work_left <= left {
            (before, after) = (after, self.next[after]);
        }
        self.next[i] = after;
        if after == NO_TASK {
            queue.last = i;
        }
        if before == NO_TASK {
            queue.first = i;
        } else {
            self.next[before] = i;
        }
        self.recompute(host);
    }

    /// Adds the work that each task of the host has done until the current time.
    fn advance_work(&mut self, host: usize) {
        let queue = &mut self.queues[host];
        queue.work_done += (self.now - queue.updated_at) * queue.rate;
        queue.updated_at = self.now;
    }

    /// Updates the derived values of a host after its tasks have changed.
    fn recompute(&mut self, host: usize) {
        let (queue, machine) = (&mut self.queues[host], &self.hosts[host]);
        let tasks = queue.len;
        queue.rate = machine.rate(tasks);
        // True if one more task slows down no other task.
        let gap = tasks == 0 || (tasks + 1) as f64 + machine.external_threads <= machine.processors;
        self.offers[host] = if gap {
            machine.rate(tasks + 1)
        } else {
            NO_OFFER
        };
        let never = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        (
            self.first_ends[host],
            self.last_ends[host],
            self.min_offers[host],
        ) = match self.sim_tasks.get(queue.first) {
            Some(first) => {
                let ends = |piece: &SimTask| {
                    self.now + (piece.work_left - queue.work_done).max(0.0) / queue.rate
                };
                (
                    ends(first),
                    ends(&self.sim_tasks[queue.last]),
                    queue.rate * SPEEDUP_MIN,
                )
            }
            None => never,
        };
    }
}

/// Returns the maximum of `of` over the list. Computes four independent maxima, so that the
/// compiler can use vector instructions.
fn max_by_value(list: &[f64], of: impl Fn(f64) -> f64) -> f64 {
    let more = |a: f64, b: f64| if a > b { a } else { b };
    let (fours, rest) = list.as_chunks::<4>();
    let mut most = [f64::NEG_INFINITY; 4];
    for four in fours {
        most = std::array::from_fn(|i| more(of(four[i]), most[i]));
    }
    most.into_iter()
        .chain(rest.iter().map(|number| of(*number)))
        .fold(f64::NEG_INFINITY, |most, number| more(number, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(machines: &[SimHost], pieces: &[SimTask], cost: f64) -> SimOutcome {
        let mut future = Simulation::new(machines.to_vec(), pieces.to_vec());
        future.select_job(|i| pieces[i].in_job, cost);
        future
            .run_unless(|_| false)
            .expect("whatever comes will do")
    }

    fn end(machines: &[SimHost], pieces: &[SimTask], cost: f64) -> f64 {
        outcome(machines, pieces, cost).job_end
    }

    const ORDINARY: SimHost = SimHost {
        processors: 1.0,
        speed: 1.0,
        external_threads: 0.0,
    };

    fn piece(at: usize, left: f64) -> SimTask {
        SimTask {
            host: at,
            work_left: left,
            moves_left: 4,
            cooldown_end: 0.0,
            in_job: true,
        }
    }

    /// Two tasks share a processor until the first of them has ended.
    #[test]
    fn tasks_share_a_processor_until_they_end() {
        assert_eq!(
            end(&[ORDINARY], &[piece(0, 10.0), piece(0, 30.0)], 1.0),
            40.0
        );
        assert_eq!(
            ORDINARY.completion_sum(2, [10.0, 30.0].into_iter()),
            20.0 + 40.0
        );
        let two = SimHost {
            processors: 2.0,
            ..ORDINARY
        };
        assert_eq!(end(&[two], &[piece(0, 10.0), piece(0, 30.0)], 1.0), 30.0);
        let beside = SimHost {
            external_threads: 1.0,
            ..ORDINARY
        };
        assert_eq!(end(&[beside], &[piece(0, 10.0)], 1.0), 20.0);
    }

    /// A task migrates to an idle processor. The migration delays it by its cost.
    #[test]
    fn task_migrates_to_idle_processor_at_a_cost() {
        let both = [piece(0, 10.0), piece(0, 10.0)];
        assert_eq!(end(&[ORDINARY, ORDINARY], &both, 1.0), 11.0);
        let stays = both.map(|piece| SimTask {
            moves_left: 0,
            ..piece
        });
        assert_eq!(end(&[ORDINARY, ORDINARY], &stays, 1.0), 20.0);
        // A faster processor becomes free soon enough, so the task waits for it.
        let fast = SimHost {
            speed: 2.0,
            ..ORDINARY
        };
        assert_eq!(
            end(&[ORDINARY, fast], &[piece(0, 40.0), piece(1, 20.0)], 0.0),
            10.0 + 15.0
        );
    }

    /// A task does not migrate before its cooldown has ended.
    #[test]
    fn cooldown_delays_migration() {
        let resting = SimTask {
            cooldown_end: 5.0,
            ..piece(0, 10.0)
        };
        // The tasks share a host for five seconds. Then each has a host for itself.
        let both = end(&[ORDINARY, ORDINARY], &[resting, resting], 0.0);
        assert!((both - 12.5).abs() < 0.01, "{both}");
        let moved = {
            let mut piece = piece(0, 10.0);
            piece.migrate(1, 3.0, 0.0);
            piece
        };
        assert_eq!(
            (
                moved.host,
                moved.work_left,
                moved.moves_left,
                moved.cooldown_end
            ),
            (1, 13.0, 3, REBALANCE_COOLDOWN.0 as f64 / 1e6)
        );
    }

    /// A task accepts a better offer after it has declined an earlier one.
    #[test]
    fn better_offer_is_taken_after_a_declined_one() {
        // No task leaves half a processor for a processor that is even slower. After ten seconds, a
        // processor that is four times as fast becomes free.
        let (slow, fast) = (
            SimHost {
                speed: 0.45,
                ..ORDINARY
            },
            SimHost {
                speed: 4.0,
                ..ORDINARY
            },
        );
        let shared = [piece(0, 30.0), piece(0, 30.0), piece(1, 40.0)];
        let end = end(&[ORDINARY, fast, slow], &shared, 12.0);
        // One of the two tasks migrates to it. The other needs 25 more seconds on the slow
        // processor. Together on the slow processor they would need 60 seconds.
        assert!((end - 35.0).abs() < 1e-6, "{end}");
    }

    /// The maximum is found at any position of lists of any length.
    #[test]
    fn greatest_finds_the_maximum_at_any_position() {
        for count in 0..=9 {
            for at in 0..count {
                let list: Vec<f64> = (0..count)
                    .map(|i| if i == at { 7.0 } else { i as f64 - 20.0 })
                    .collect();
                assert_eq!(
                    (
                        max_by_value(&list, |x| x),
                        -max_by_value(&list, |x| x - 14.0)
                    ),
                    (7.0, 7.0),
                    "{list:?}"
                );
            }
        }
        assert_eq!(max_by_value(&[], |x| x), f64::NEG_INFINITY);
    }

    /// Tasks of other jobs use processor time, but the completion time of the job does not include
    /// them.
    #[test]
    fn other_jobs_take_time_but_do_not_delay_the_end() {
        let other = SimTask {
            in_job: false,
            ..piece(0, 50.0)
        };
        let outcome = outcome(&[ORDINARY], &[piece(0, 10.0), other], 1.0);
        assert_eq!(
            outcome,
            SimOutcome {
                job_end: 20.0,
                other_ends: 60.0
            }
        );
    }
}
