//! Simulates job completion on a copy of the cluster. A candidate migration is evaluated by two
//! simulations: with the migration and without it.
//!
//! The simulation includes later migrations: whenever a processor becomes idle, the task that would
//! end last migrates to it, if the task becomes faster there. A candidate is therefore compared
//! with waiting for the next idle processor.
//!
//! All tasks of a host run at the same rate. Each host has a queue of its tasks, sorted by
//! remaining work. Time advances in steps, each to the next end of a task or of a cooldown.

use super::{REBALANCE_COOLDOWN, REBALANCES_MAX};

/// Minimum ratio of a task's new rate to its old rate for a migration.
pub(super) const SPEEDUP_FACTOR_MIN: f64 = 1.2;

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
    /// Returns the work that each task does per second if `task_count` tasks run on the host, in
    /// seconds of an ordinary processor.
    pub(super) fn rate(&self, task_count: usize) -> f64 {
        let threads = task_count as f64 + self.external_threads;
        (self.speed * (self.processors / threads.max(1e-9)).min(1.0)).max(1e-9)
    }

    /// Returns the sum of the completion times of `task_count` tasks in seconds, if all of them
    /// stay on the host. `works_left`: remaining work of each task, in ascending order.
    pub(super) fn completion_sum(
        &self,
        task_count: usize,
        works_left: impl Iterator<Item = f64>,
    ) -> f64 {
        let (mut shorter_work, mut sum) = (0.0, 0.0);
        for (ended_count, works_left) in works_left.enumerate() {
            let running_count = task_count - ended_count;
            sum += running_count as f64 * (works_left - shorter_work) / self.rate(running_count);
            shorter_work = works_left;
        }
        sum
    }
}

/// A task in the simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimTask {
    /// Index of the task's host.
    pub(super) host: usize,
    /// Remaining work, in seconds of an ordinary processor. While the task is in a queue, the field
    /// also includes the value that [`HostQueue::work_done`] had when the task was added.
    pub(super) work_left_s: f64,
    /// Number of migrations that the task may still make.
    pub(super) migrations_left: usize,
    /// End of the cooldown, in seconds of simulated time.
    pub(super) cooldown_end_s: f64,
    /// True if the task belongs to the job whose completion time is optimized.
    pub(super) in_job: bool,
}

impl SimTask {
    /// Migrates the task to host `target` at time `now`: adds the cost, uses up one of the
    /// migrations left, and starts the cooldown. `work`: cost of the migration, as additional work
    /// in seconds of an ordinary processor.
    pub(super) fn migrate(&mut self, target: usize, work: f64, now: f64) {
        self.migrations_left = self.migrations_left.saturating_sub(1);
        let previous_migrations = REBALANCES_MAX.saturating_sub(self.migrations_left + 1);
        (self.host, self.work_left_s) = (target, self.work_left_s + work);
        self.cooldown_end_s =
            now + REBALANCE_COOLDOWN.0 as f64 / 1e6 * (1_u64 << previous_migrations) as f64;
    }
}

/// Result of a simulation, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct SimOutcome {
    /// Time when the last task of the job ends.
    pub(super) job_end_s: f64,
    /// Sum of the completion times of the tasks that do not belong to the job.
    pub(super) other_ends_sum_s: f64,
}

/// Index that stands for "no task", for example after the last task of a queue.
const NO_TASK: usize = usize::MAX;
/// Offered rate of a host on which one more task would slow down other tasks.
const NO_OFFERED_RATE: f64 = -1.0;

/// The tasks of one host, linked in the order of their ends. All of them run at the same rate.
///
/// When a task is added, the current `work_done` is added to its remaining work. The task therefore
/// ends when `work_done` reaches this sum.
#[derive(Clone, Copy, Debug)]
struct HostQueue {
    /// Task that ends first, or [`NO_TASK`]. [`Simulation::next_tasks`] contains the successor of
    /// each task.
    first_task: usize,
    last_task: usize,
    len: usize,
    /// Work that a task would have done by `updated_at` if it had been on the host from the start.
    work_done: f64,
    updated_at: f64,
    /// Work that each task does per second, in seconds of an ordinary processor.
    rate: f64,
}

/// State of a simulation. The cost of a step depends on the number of hosts and not on the number
/// of tasks.
///
/// Values that are searched over all hosts are in separate arrays. The state contains no
/// references. To start a trial, the state is copied into memory that is already allocated.
#[derive(Debug, Default)]
pub(super) struct Simulation {
    hosts: Vec<SimHost>,
    queues: Vec<HostQueue>,
    /// Time when the first task of each host ends; infinite for a host without tasks.
    first_ends: Vec<f64>,
    /// Time when the last task of each host would end if nothing changed; infinite for a host
    /// without tasks.
    last_ends: Vec<f64>,
    /// Rate that each host offers to one more task, or [`NO_OFFERED_RATE`].
    offered_rates: Vec<f64>,
    /// Minimum rate for which a task of each host would migrate; infinite for a host without tasks.
    min_accepted_rates: Vec<f64>,
    sim_tasks: Vec<SimTask>,
    /// Successor of each task in its queue.
    next_tasks: Vec<usize>,
    /// Number of tasks that have not ended.
    running_count: usize,
    /// Number of tasks of the job that have not ended.
    running_in_job_count: usize,
    /// Completion time of each task that has ended; 0 for other tasks.
    ended_at: Vec<f64>,
    /// Ends of the cooldowns, in descending order.
    cooldown_ends: Vec<f64>,
    /// True if a processor is idle.
    has_idle_processor: bool,
    /// Largest offer that no task has accepted. Smaller or equal offers are skipped: a task that
    /// declines an offer accepts it later only if something else changes.
    declined_rate: f64,
    /// Cost of a migration for the migrating task, in seconds.
    migration_cost_s: f64,
    now_s: f64,
    outcome: SimOutcome,
    /// Number of steps of all trials that have reused this memory.
    step_count: usize,
}

impl Simulation {
    pub(super) fn new(sim_hosts: Vec<SimHost>, initial_tasks: Vec<SimTask>) -> Self {
        let queue = HostQueue {
            first_task: NO_TASK,
            last_task: NO_TASK,
            len: 0,
            work_done: 0.0,
            updated_at: 0.0,
            rate: 0.0,
        };
        let mut sorted_cooldown_ends: Vec<f64> = initial_tasks
            .iter()
            .map(|sim_task| sim_task.cooldown_end_s)
            .filter(|end| *end > 0.0)
            .collect();
        sorted_cooldown_ends.sort_unstable_by(|a, b| b.total_cmp(a));
        let zeros = vec![0.0; sim_hosts.len()];
        let mut simulation = Self {
            queues: vec![queue; sim_hosts.len()],
            first_ends: zeros.clone(),
            last_ends: zeros.clone(),
            offered_rates: zeros.clone(),
            min_accepted_rates: zeros,
            next_tasks: vec![NO_TASK; initial_tasks.len()],
            ended_at: vec![0.0; initial_tasks.len()],
            running_count: initial_tasks.len(),
            hosts: sim_hosts,
            sim_tasks: initial_tasks,
            cooldown_ends: sorted_cooldown_ends,
            declined_rate: NO_OFFERED_RATE,
            ..Self::default()
        };
        (0..simulation.queues.len()).for_each(|host| simulation.recompute(host));
        // Tasks are added in reverse order. Of two tasks with equal remaining work, the first one
        // in the list is then treated as the longer one.
        (0..simulation.sim_tasks.len())
            .rev()
            .for_each(|i| simulation.enqueue(i));
        simulation
    }

    /// Copies the state of another simulation. Reuses the memory that this simulation has
    /// allocated.
    pub(super) fn reset_from(&mut self, other: &Self) {
        self.hosts.clone_from(&other.hosts);
        self.queues.clone_from(&other.queues);
        self.first_ends.clone_from(&other.first_ends);
        self.last_ends.clone_from(&other.last_ends);
        self.offered_rates.clone_from(&other.offered_rates);
        self.min_accepted_rates
            .clone_from(&other.min_accepted_rates);
        self.sim_tasks.clone_from(&other.sim_tasks);
        self.next_tasks.clone_from(&other.next_tasks);
        self.ended_at.clone_from(&other.ended_at);
        self.cooldown_ends.clone_from(&other.cooldown_ends);
        (
            self.running_count,
            self.running_in_job_count,
            self.has_idle_processor,
            self.declined_rate,
        ) = (
            other.running_count,
            other.running_in_job_count,
            other.has_idle_processor,
            other.declined_rate,
        );
        (self.migration_cost_s, self.now_s, self.outcome) =
            (other.migration_cost_s, other.now_s, other.outcome);
    }

    /// Selects the tasks of the job, for which `is_in_job` is true, and sets the cost of a
    /// migration in seconds.
    pub(super) fn select_job(&mut self, is_in_job: impl Fn(usize) -> bool, migration_cost_s: f64) {
        self.sim_tasks
            .iter_mut()
            .enumerate()
            .for_each(|(i, sim_task)| sim_task.in_job = is_in_job(i));
        self.running_in_job_count = self
            .sim_tasks
            .iter()
            .filter(|sim_task| sim_task.in_job)
            .count();
        (self.migration_cost_s, self.declined_rate) = (migration_cost_s, NO_OFFERED_RATE);
    }

    pub(super) fn hosts(&self) -> &[SimHost] {
        &self.hosts
    }

    pub(super) fn tasks(&self) -> &[SimTask] {
        &self.sim_tasks
    }

    /// Runs until all tasks have ended. Returns the completion time of each task.
    pub(super) fn run_to_end(&mut self) -> &[f64] {
        while self.running_count > 0 {
            self.advance();
        }
        &self.ended_at
    }

    pub(super) fn step_count(&self) -> usize {
        self.step_count
    }

    /// Migrates task `i` to host `target` at the current time. The cost of a migration is added to
    /// the task's work.
    pub(super) fn migrate(&mut self, i: usize, target: usize) {
        let target_rate = self.hosts[target].rate(self.queues[target].len + 1);
        self.relocate_task(i, target, self.migration_cost_s * target_rate);
    }

    /// Migrates task `i` to host `target` without a cost, because the plan already contains the
    /// migration.
    pub(super) fn apply_planned(&mut self, i: usize, target: usize) {
        self.relocate_task(i, target, 0.0);
    }

    /// Runs until all tasks have ended and returns the outcome. Returns `None` as soon as `rejects`
    /// is true for a lower bound of the outcome.
    pub(super) fn run_unless_rejected(
        &mut self,
        rejects: impl Fn(SimOutcome) -> bool,
    ) -> Option<SimOutcome> {
        while self.running_count > 0 {
            self.advance();
            let end = if self.running_in_job_count > 0 {
                self.now_s
            } else {
                self.outcome.job_end_s
            };
            let other_ends_sum = self.outcome.other_ends_sum_s
                + (self.running_count - self.running_in_job_count) as f64 * self.now_s;
            if rejects(SimOutcome {
                job_end_s: end,
                other_ends_sum_s: other_ends_sum,
            }) {
                return None;
            }
        }
        Some(self.outcome)
    }

    /// Runs until the job has ended or `limit_seconds` seconds have passed. Returns true if the job
    /// ends after `limit_seconds`.
    pub(super) fn job_ends_after(&mut self, limit_seconds: f64) -> bool {
        while self.running_in_job_count > 0 && self.now_s <= limit_seconds {
            self.advance();
        }
        self.running_in_job_count > 0 || self.outcome.job_end_s > limit_seconds
    }

    /// Makes one step: migrates tasks to idle processors, then advances to the next end of a task.
    /// If a processor is idle and a cooldown ends earlier, advances only to the end of the
    /// cooldown.
    fn advance(&mut self) {
        self.step_count += 1;
        while self
            .cooldown_ends
            .last()
            .is_some_and(|cooldown_end| *cooldown_end <= self.now_s)
        {
            self.cooldown_ends.pop();
            self.declined_rate = NO_OFFERED_RATE;
        }
        self.fill_idle_processors();
        let end = -max_by_value(&self.first_ends, |end| -end);
        let host = self
            .first_ends
            .iter()
            .position(|cooldown_end| *cooldown_end == end)
            .unwrap_or(0);
        if let Some(cooldown_end) = self
            .cooldown_ends
            .last()
            .filter(|cooldown_end| self.has_idle_processor && **cooldown_end < end)
        {
            // Adds a small amount so that the cooldown has ended in spite of rounding.
            self.now_s = cooldown_end + 1e-6;
            return;
        }
        self.now_s = self.now_s.max(end);
        self.advance_work(host);
        let queue = &mut self.queues[host];
        let first_task_index = queue.first_task;
        (queue.first_task, queue.len, self.running_count) = (
            self.next_tasks[first_task_index],
            queue.len - 1,
            self.running_count - 1,
        );
        if queue.first_task == NO_TASK {
            queue.last_task = NO_TASK;
        }
        self.ended_at[first_task_index] = self.now_s;
        if self.sim_tasks[first_task_index].in_job {
            (self.outcome.job_end_s, self.running_in_job_count) =
                (self.now_s, self.running_in_job_count - 1);
        } else {
            self.outcome.other_ends_sum_s += self.now_s;
        }
        self.recompute(host);
    }

    /// Migrates tasks to idle processors, as long as a task accepts an offer.
    fn fill_idle_processors(&mut self) {
        for _ in 0..self.running_count {
            let rate = max_by_value(&self.offered_rates, |offer| offer);
            self.has_idle_processor = rate > NO_OFFERED_RATE;
            if !self.has_idle_processor || rate <= self.declined_rate {
                return;
            }
            let target = self.offered_rates.iter().rposition(|offer| *offer == rate);
            let Some((longest_task, target)) = self.longest_task_for_rate(rate).zip(target) else {
                self.declined_rate = rate;
                return;
            };
            self.relocate_task(longest_task, target, self.migration_cost_s * rate);
        }
    }

    /// Returns the task that becomes faster at the rate `offered_rate` and would otherwise end
    /// last; `None` if no task becomes faster.
    fn longest_task_for_rate(&self, offered_rate: f64) -> Option<usize> {
        let (mut latest_end, mut candidate) = (self.now_s, None);
        for (host, (min_rate, task_end)) in self
            .min_accepted_rates
            .iter()
            .zip(&self.last_ends)
            .enumerate()
        {
            if offered_rate < *min_rate || *task_end <= latest_end {
                continue;
            }
            // If the longest task of a host gains nothing, no other task of the host does.
            let Some(longest_task) = self.longest_movable_task(host) else {
                continue;
            };
            let queue = &self.queues[host];
            let work_to_do = self.sim_tasks[longest_task].work_left_s
                - (queue.work_done + (self.now_s - queue.updated_at) * queue.rate);
            let task_end = self.now_s + work_to_do / queue.rate;
            if task_end > self.now_s + work_to_do / offered_rate + self.migration_cost_s
                && task_end > latest_end
            {
                (latest_end, candidate) = (task_end, Some(longest_task));
            }
        }
        candidate
    }

    /// Returns the task with the most remaining work among the tasks of a host that may migrate.
    /// Returns `None` if no task of the host may migrate.
    fn longest_movable_task(&self, host: usize) -> Option<usize> {
        let queue = &self.queues[host];
        let may_migrate = |i: usize| {
            self.sim_tasks[i].migrations_left > 0 && self.sim_tasks[i].cooldown_end_s <= self.now_s
        };
        if queue.last_task != NO_TASK && may_migrate(queue.last_task) {
            return Some(queue.last_task);
        }
        let (mut i, mut longest_task) = (queue.first_task, None);
        while i != NO_TASK {
            if may_migrate(i) {
                longest_task = Some(i);
            }
            i = self.next_tasks[i];
        }
        longest_task
    }

    fn relocate_task(&mut self, i: usize, target: usize, added_work_s: f64) {
        self.declined_rate = NO_OFFERED_RATE;
        self.dequeue(i);
        let sim_task = &mut self.sim_tasks[i];
        sim_task.migrate(target, added_work_s, self.now_s);
        let cooldown_end = sim_task.cooldown_end_s;
        self.cooldown_ends.insert(
            self.cooldown_ends
                .partition_point(|other| *other > cooldown_end),
            cooldown_end,
        );
        self.enqueue(i);
    }

    fn dequeue(&mut self, i: usize) {
        let host = self.sim_tasks[i].host;
        self.advance_work(host);
        let successor = self.next_tasks[i];
        let queue = &mut self.queues[host];
        queue.len -= 1;
        let mut predecessor = NO_TASK;
        if queue.first_task == i {
            queue.first_task = successor;
        } else {
            predecessor = queue.first_task;
            while self.next_tasks[predecessor] != i {
                predecessor = self.next_tasks[predecessor];
            }
            self.next_tasks[predecessor] = successor;
        }
        if successor == NO_TASK {
            queue.last_task = predecessor;
        }
        let sim_task = &mut self.sim_tasks[i];
        sim_task.work_left_s = (sim_task.work_left_s - queue.work_done).max(0.0);
        self.recompute(host);
    }

    fn enqueue(&mut self, i: usize) {
        let host = self.sim_tasks[i].host;
        self.advance_work(host);
        let queue = &mut self.queues[host];
        queue.len += 1;
        self.sim_tasks[i].work_left_s += queue.work_done;
        let (work_sum, mut predecessor, mut successor) =
            (self.sim_tasks[i].work_left_s, NO_TASK, queue.first_task);
        while successor != NO_TASK && self.sim_tasks[successor].work_left_s <= work_sum {
            (predecessor, successor) = (successor, self.next_tasks[successor]);
        }
        self.next_tasks[i] = successor;
        if successor == NO_TASK {
            queue.last_task = i;
        }
        if predecessor == NO_TASK {
            queue.first_task = i;
        } else {
            self.next_tasks[predecessor] = i;
        }
        self.recompute(host);
    }

    /// Adds the work that each task of the host has done until the current time.
    fn advance_work(&mut self, host: usize) {
        let queue = &mut self.queues[host];
        queue.work_done += (self.now_s - queue.updated_at) * queue.rate;
        queue.updated_at = self.now_s;
    }

    /// Updates the derived values of a host after its tasks have changed.
    fn recompute(&mut self, host: usize) {
        let (queue, sim_host) = (&mut self.queues[host], &self.hosts[host]);
        let task_count = queue.len;
        queue.rate = sim_host.rate(task_count);
        // True if one more task would slow down no other task.
        let has_room = task_count == 0
            || (task_count + 1) as f64 + sim_host.external_threads <= sim_host.processors;
        self.offered_rates[host] = if has_room {
            sim_host.rate(task_count + 1)
        } else {
            NO_OFFERED_RATE
        };
        let no_times = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        (
            self.first_ends[host],
            self.last_ends[host],
            self.min_accepted_rates[host],
        ) = match self.sim_tasks.get(queue.first_task) {
            Some(first_sim_task) => {
                let end_time = |sim_task: &SimTask| {
                    self.now_s + (sim_task.work_left_s - queue.work_done).max(0.0) / queue.rate
                };
                (
                    end_time(first_sim_task),
                    end_time(&self.sim_tasks[queue.last_task]),
                    queue.rate * SPEEDUP_FACTOR_MIN,
                )
            }
            None => no_times,
        };
    }
}

/// Returns the maximum of `value_of(value)` over the values of the list; negative infinity for an
/// empty list. Computes four independent maxima, so that the compiler can use vector instructions.
fn max_by_value(list: &[f64], value_of: impl Fn(f64) -> f64) -> f64 {
    let greater_of = |a: f64, b: f64| if a > b { a } else { b };
    let (chunks, rest) = list.as_chunks::<4>();
    let mut maxima = [f64::NEG_INFINITY; 4];
    for chunk in chunks {
        maxima = std::array::from_fn(|i| greater_of(value_of(chunk[i]), maxima[i]));
    }
    maxima
        .into_iter()
        .chain(rest.iter().map(|number| value_of(*number)))
        .fold(f64::NEG_INFINITY, |maxima, number| {
            greater_of(number, maxima)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(sim_hosts: &[SimHost], tasks: &[SimTask], cost_s: f64) -> SimOutcome {
        let mut simulation = Simulation::new(sim_hosts.to_vec(), tasks.to_vec());
        simulation.select_job(|i| tasks[i].in_job, cost_s);
        simulation
            .run_unless_rejected(|_| false)
            .expect("whatever comes will do")
    }

    fn job_end(sim_hosts: &[SimHost], tasks: &[SimTask], cost_s: f64) -> f64 {
        outcome(sim_hosts, tasks, cost_s).job_end_s
    }

    const ORDINARY: SimHost = SimHost {
        processors: 1.0,
        speed: 1.0,
        external_threads: 0.0,
    };

    fn sim_task(host_index: usize, work_s: f64) -> SimTask {
        SimTask {
            host: host_index,
            work_left_s: work_s,
            migrations_left: 4,
            cooldown_end_s: 0.0,
            in_job: true,
        }
    }

    /// Two tasks share a processor until the first of them has ended.
    #[test]
    fn tasks_share_a_processor_until_they_end() {
        assert_eq!(
            job_end(&[ORDINARY], &[sim_task(0, 10.0), sim_task(0, 30.0)], 1.0),
            40.0
        );
        assert_eq!(
            ORDINARY.completion_sum(2, [10.0, 30.0].into_iter()),
            20.0 + 40.0
        );
        let two_processors = SimHost {
            processors: 2.0,
            ..ORDINARY
        };
        assert_eq!(
            job_end(
                &[two_processors],
                &[sim_task(0, 10.0), sim_task(0, 30.0)],
                1.0
            ),
            30.0
        );
        let loaded_host = SimHost {
            external_threads: 1.0,
            ..ORDINARY
        };
        assert_eq!(job_end(&[loaded_host], &[sim_task(0, 10.0)], 1.0), 20.0);
    }

    /// A task migrates to an idle processor. The migration delays it by its cost.
    #[test]
    fn task_migrates_to_idle_processor_at_a_cost() {
        let two_tasks = [sim_task(0, 10.0), sim_task(0, 10.0)];
        assert_eq!(job_end(&[ORDINARY, ORDINARY], &two_tasks, 1.0), 11.0);
        let fixed_tasks = two_tasks.map(|original_task| SimTask {
            migrations_left: 0,
            ..original_task
        });
        assert_eq!(job_end(&[ORDINARY, ORDINARY], &fixed_tasks, 1.0), 20.0);
        // A faster processor becomes idle soon enough, so the task waits for it.
        let fast_host = SimHost {
            speed: 2.0,
            ..ORDINARY
        };
        assert_eq!(
            job_end(
                &[ORDINARY, fast_host],
                &[sim_task(0, 40.0), sim_task(1, 20.0)],
                0.0
            ),
            10.0 + 15.0
        );
    }

    /// A task does not migrate before its cooldown has ended.
    #[test]
    fn cooldown_delays_migration() {
        let cooling_task = SimTask {
            cooldown_end_s: 5.0,
            ..sim_task(0, 10.0)
        };
        // The tasks share a host for five seconds. Then each has a host for itself.
        let end_of_both = job_end(&[ORDINARY, ORDINARY], &[cooling_task, cooling_task], 0.0);
        assert!((end_of_both - 12.5).abs() < 0.01, "{end_of_both}");
        let migrated_task = {
            let mut new_task = sim_task(0, 10.0);
            new_task.migrate(1, 3.0, 0.0);
            new_task
        };
        assert_eq!(
            (
                migrated_task.host,
                migrated_task.work_left_s,
                migrated_task.migrations_left,
                migrated_task.cooldown_end_s
            ),
            (1, 13.0, 3, REBALANCE_COOLDOWN.0 as f64 / 1e6)
        );
    }

    /// A task that has declined an offer accepts a later, better offer.
    #[test]
    fn better_offer_is_accepted_after_a_declined_one() {
        // No task exchanges half a processor for the idle processor, which is even slower. After
        // ten seconds, a processor that is four times as fast becomes idle.
        let (slow_host, fast_host) = (
            SimHost {
                speed: 0.45,
                ..ORDINARY
            },
            SimHost {
                speed: 4.0,
                ..ORDINARY
            },
        );
        let initial_tasks = [sim_task(0, 30.0), sim_task(0, 30.0), sim_task(1, 40.0)];
        let end = job_end(&[ORDINARY, fast_host, slow_host], &initial_tasks, 12.0);
        // One of the two tasks migrates to the fast processor. The other task needs 25 more seconds
        // where it is. If both tasks stayed together, they would need 60 seconds.
        assert!((end - 35.0).abs() < 1e-6, "{end}");
    }

    /// The maximum is found at any position of lists of any length.
    #[test]
    fn maximum_is_found_at_any_position() {
        for length in 0..=9 {
            for position in 0..length {
                let values: Vec<f64> = (0..length)
                    .map(|i| if i == position { 7.0 } else { i as f64 - 20.0 })
                    .collect();
                assert_eq!(
                    (
                        max_by_value(&values, |x| x),
                        -max_by_value(&values, |x| x - 14.0)
                    ),
                    (7.0, 7.0),
                    "{values:?}"
                );
            }
        }
        assert_eq!(max_by_value(&[], |x| x), f64::NEG_INFINITY);
    }

    /// Tasks of other jobs use processor time, but the completion time of the job does not include
    /// their ends.
    #[test]
    fn other_jobs_take_time_but_do_not_delay_the_end() {
        let other_job_task = SimTask {
            in_job: false,
            ..sim_task(0, 50.0)
        };
        let outcome = outcome(&[ORDINARY], &[sim_task(0, 10.0), other_job_task], 1.0);
        assert_eq!(
            outcome,
            SimOutcome {
                job_end_s: 20.0,
                other_ends_sum_s: 60.0
            }
        );
    }
}
