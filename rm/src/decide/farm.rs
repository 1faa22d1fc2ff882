//! Simulates job completion on a copy of the cluster. A candidate migration is evaluated by running
//! the simulation with it and without it.
//!
//! The simulation includes later migrations: whenever a processor becomes idle, the task that would
//! end last migrates there if that makes it faster. A candidate is therefore compared with waiting
//! for the next idle processor.
//!
//! All tasks of a host run at the same rate. Each host has a queue of its tasks, sorted by
//! remaining work. Time advances in steps, each to the next end of a task or of a cooldown.

use super::{SHIFT_REST, SHIFTS_MAX};

/// Minimum factor by which a task must become faster to migrate.
pub(super) const FASTER: f64 = 1.2;

/// A host in the simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) processors: f64,
    /// Speed of one processor, relative to an ordinary one.
    pub(super) speed: f64,
    /// External load in threads.
    pub(super) foreign: f64,
}

impl Machine {
    /// Returns the work that each task does per second if `tasks` tasks run on the host, in seconds
    /// of an ordinary processor.
    pub(super) fn rate(&self, tasks: usize) -> f64 {
        let threads = tasks as f64 + self.foreign;
        (self.speed * (self.processors / threads.max(1e-9)).min(1.0)).max(1e-9)
    }

    /// Returns the sum of the completion times of `tasks` tasks in seconds, if all stay on the
    /// host. `left`: remaining work of each, in ascending order.
    pub(super) fn flow(&self, tasks: usize, left: impl Iterator<Item = f64>) -> f64 {
        let (mut before, mut sum) = (0.0, 0.0);
        for (ended, left) in left.enumerate() {
            let running = tasks - ended;
            sum += running as f64 * (left - before) / self.rate(running);
            before = left;
        }
        sum
    }
}

/// A task in the simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Index of the task's host.
    pub(super) at: usize,
    /// Remaining work, in seconds of an ordinary processor. While the task is in a queue,
    /// [`Queue::done`] at its arrival is added.
    pub(super) left: f64,
    /// Number of migrations that the task may still make.
    pub(super) moves: usize,
    /// End of the cooldown, in seconds of simulated time.
    pub(super) rests: f64,
    /// True if the task belongs to the job whose completion time is optimized.
    pub(super) counts: bool,
}

impl Piece {
    /// Migrates the task to host `to` at time `now`. `work`: cost of the migration, as additional
    /// work.
    pub(super) fn go(&mut self, to: usize, work: f64, now: f64) {
        self.moves = self.moves.saturating_sub(1);
        let before = SHIFTS_MAX.saturating_sub(self.moves + 1);
        (self.at, self.left) = (to, self.left + work);
        self.rests = now + SHIFT_REST.0 as f64 / 1e6 * (1_u64 << before) as f64;
    }
}

/// Result of a simulation, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// Time when the last task of the job ends.
    pub(super) end: f64,
    /// Sum of the completion times of the tasks of other jobs.
    pub(super) others: f64,
}

/// Index that stands for "no task", for example after the last task of a queue.
const NONE: usize = usize::MAX;
/// Offer of a host on which one more task would slow down other tasks.
const NO_GAP: f64 = -1.0;

/// The tasks of one host, linked in the order of their ends. All of them run at the same rate.
///
/// `done` at the arrival of a task is added to its remaining work, so the task ends when `done`
/// reaches that sum.
#[derive(Clone, Copy, Debug)]
struct Queue {
    /// Task that ends first. [`Future::next`] gives the successor of each task.
    first: usize,
    last: usize,
    tasks: usize,
    /// Work that a task has done if it was on the host from the start until `since`.
    done: f64,
    since: f64,
    /// Work that each task does per second, in seconds of an ordinary processor.
    rate: f64,
}

/// State of a simulation. The cost of a step depends on the number of hosts, not on the number of
/// tasks.
///
/// Values that are searched over all hosts are in separate arrays, and the state contains no
/// references. To start a trial, the state is copied into memory that is already allocated.
#[derive(Debug, Default)]
pub(super) struct Future {
    machines: Vec<Machine>,
    queues: Vec<Queue>,
    /// Time when the first task of each host ends.
    ends: Vec<f64>,
    /// Time when the last task of each host would end if nothing changed.
    lasts: Vec<f64>,
    /// Rate that each host offers to one more task, or [`NO_GAP`].
    offers: Vec<f64>,
    /// Minimum rate for which a task leaves its host, by host.
    wants: Vec<f64>,
    pieces: Vec<Piece>,
    /// Successor of each task in its queue.
    next: Vec<usize>,
    /// Number of tasks that have not ended.
    tasks: usize,
    /// Number of tasks of the job that have not ended.
    counted: usize,
    /// Completion time of each task that has ended.
    ended: Vec<f64>,
    /// Ends of the cooldowns, in descending order.
    rested: Vec<f64>,
    /// True if some processor is idle.
    gap: bool,
    /// Largest offer that no task has accepted. Offers up to it are skipped, because a task that
    /// declines one does not accept it later unless something else changes.
    declined: f64,
    /// Cost of a migration for its task, in seconds.
    cost: f64,
    now: f64,
    outcome: Outcome,
    /// Number of steps of all simulations in this memory.
    steps: usize,
}

impl Future {
    pub(super) fn of(machines: Vec<Machine>, pieces: Vec<Piece>) -> Future {
        let queue = Queue {
            first: NONE,
            last: NONE,
            tasks: 0,
            done: 0.0,
            since: 0.0,
            rate: 0.0,
        };
        let mut rested: Vec<f64> = pieces
            .iter()
            .map(|piece| piece.rests)
            .filter(|rests| *rests > 0.0)
            .collect();
        rested.sort_unstable_by(|a, b| b.total_cmp(a));
        let none = vec![0.0; machines.len()];
        let mut future = Future {
            queues: vec![queue; machines.len()],
            ends: none.clone(),
            lasts: none.clone(),
            offers: none.clone(),
            wants: none,
            next: vec![NONE; pieces.len()],
            ended: vec![0.0; pieces.len()],
            tasks: pieces.len(),
            machines,
            pieces,
            rested,
            declined: NO_GAP,
            ..Future::default()
        };
        (0..future.queues.len()).for_each(|host| future.count_again(host));
        // Tasks are added in reverse order. Of two tasks with equal remaining work, the first one
        // in the list is then treated as the longer one.
        (0..future.pieces.len()).rev().for_each(|i| future.put(i));
        future
    }

    /// Copies the state of another simulation. Reuses the memory that this simulation has
    /// allocated.
    pub(super) fn become_like(&mut self, other: &Future) {
        self.machines.clone_from(&other.machines);
        self.queues.clone_from(&other.queues);
        self.ends.clone_from(&other.ends);
        self.lasts.clone_from(&other.lasts);
        self.offers.clone_from(&other.offers);
        self.wants.clone_from(&other.wants);
        self.pieces.clone_from(&other.pieces);
        self.next.clone_from(&other.next);
        self.ended.clone_from(&other.ended);
        self.rested.clone_from(&other.rested);
        (self.tasks, self.counted, self.gap, self.declined) =
            (other.tasks, other.counted, other.gap, other.declined);
        (self.cost, self.now, self.outcome) = (other.cost, other.now, other.outcome);
    }

    /// Selects the tasks of the job, and sets the cost of a migration in seconds.
    pub(super) fn ask(&mut self, counts: impl Fn(usize) -> bool, cost: f64) {
        self.pieces
            .iter_mut()
            .enumerate()
            .for_each(|(i, piece)| piece.counts = counts(i));
        self.counted = self.pieces.iter().filter(|piece| piece.counts).count();
        (self.cost, self.declined) = (cost, NO_GAP);
    }

    pub(super) fn machines(&self) -> &[Machine] {
        &self.machines
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Runs until all tasks have ended. Returns the completion time of each task.
    pub(super) fn ends(&mut self) -> &[f64] {
        while self.tasks > 0 {
            self.pass();
        }
        &self.ended
    }

    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Migrates task `i` to host `to` at the current time, with the cost of a migration.
    pub(super) fn go(&mut self, i: usize, to: usize) {
        let gets = self.machines[to].rate(self.queues[to].tasks + 1);
        self.shift(i, to, self.cost * gets);
    }

    /// Migrates task `i` to host `to` without a cost, because the plan already contains the
    /// migration.
    pub(super) fn has_gone(&mut self, i: usize, to: usize) {
        self.shift(i, to, 0.0);
    }

    /// Runs until all tasks have ended, and returns the outcome. Returns `None` as soon as
    /// `will_not_do` rejects the lower bound of the outcome.
    pub(super) fn outcome_unless(
        &mut self,
        will_not_do: impl Fn(Outcome) -> bool,
    ) -> Option<Outcome> {
        while self.tasks > 0 {
            self.pass();
            let end = if self.counted > 0 {
                self.now
            } else {
                self.outcome.end
            };
            let others = self.outcome.others + (self.tasks - self.counted) as f64 * self.now;
            if will_not_do(Outcome { end, others }) {
                return None;
            }
        }
        Some(self.outcome)
    }

    /// Runs until the job has ended or `limit` seconds have passed. Returns true if the job ends
    /// after `limit`.
    pub(super) fn ends_after(&mut self, limit: f64) -> bool {
        while self.counted > 0 && self.now <= limit {
            self.pass();
        }
        self.counted > 0 || self.outcome.end > limit
    }

    /// Makes one step: migrates tasks to idle processors, then advances to the next end of a task.
    /// If a processor is idle, an earlier end of a cooldown ends the step.
    fn pass(&mut self) {
        self.steps += 1;
        while self.rested.last().is_some_and(|at| *at <= self.now) {
            self.rested.pop();
            self.declined = NO_GAP;
        }
        self.fill_gaps();
        let end = -greatest(&self.ends, |end| -end);
        let host = self.ends.iter().position(|at| *at == end).unwrap_or(0);
        if let Some(at) = self.rested.last().filter(|at| self.gap && **at < end) {
            // Adds a small amount, so that the cooldown has ended in spite of rounding.
            self.now = at + 1e-6;
            return;
        }
        self.now = self.now.max(end);
        self.settle(host);
        let queue = &mut self.queues[host];
        let first = queue.first;
        (queue.first, queue.tasks, self.tasks) =
            (self.next[first], queue.tasks - 1, self.tasks - 1);
        if queue.first == NONE {
            queue.last = NONE;
        }
        self.ended[first] = self.now;
        if self.pieces[first].counts {
            (self.outcome.end, self.counted) = (self.now, self.counted - 1);
        } else {
            self.outcome.others += self.now;
        }
        self.count_again(host);
    }

    /// Migrates tasks to idle processors, as long as a task accepts an offer.
    fn fill_gaps(&mut self) {
        for _ in 0..self.tasks {
            let gets = greatest(&self.offers, |offer| offer);
            self.gap = gets > NO_GAP;
            if !self.gap || gets <= self.declined {
                return;
            }
            let to = self.offers.iter().rposition(|offer| *offer == gets);
            let Some((longest, to)) = self.longest_for(gets).zip(to) else {
                self.declined = gets;
                return;
            };
            self.shift(longest, to, self.cost * gets);
        }
    }

    /// Returns the task that becomes faster at the rate `gets` and would otherwise end last; `None`
    /// if no task becomes faster.
    fn longest_for(&self, gets: f64) -> Option<usize> {
        let (mut latest, mut mover) = (self.now, None);
        for (host, (wants, ends)) in self.wants.iter().zip(&self.lasts).enumerate() {
            if gets < *wants || *ends <= latest {
                continue;
            }
            // If the longest task of a host gains nothing, no other task of the host does.
            let Some(longest) = self.longest_of(host) else {
                continue;
            };
            let queue = &self.queues[host];
            let left =
                self.pieces[longest].left - (queue.done + (self.now - queue.since) * queue.rate);
            let ends = self.now + left / queue.rate;
            if ends > self.now + left / gets + self.cost && ends > latest {
                (latest, mover) = (ends, Some(longest));
            }
        }
        mover
    }

    /// Returns the longest of the tasks of a host that may migrate.
    fn longest_of(&self, host: usize) -> Option<usize> {
        let queue = &self.queues[host];
        let may_go = |i: usize| self.pieces[i].moves > 0 && self.pieces[i].rests <= self.now;
        if queue.last != NONE && may_go(queue.last) {
            return Some(queue.last);
        }
        let (mut i, mut longest) = (queue.first, None);
        while i != NONE {
            if may_go(i) {
                longest = Some(i);
            }
            i = self.next[i];
        }
        longest
    }

    fn shift(&mut self, i: usize, to: usize, work: f64) {
        self.declined = NO_GAP;
        self.take(i);
        let piece = &mut self.pieces[i];
        piece.go(to, work, self.now);
        let rests = piece.rests;
        self.rested
            .insert(self.rested.partition_point(|other| *other > rests), rests);
        self.put(i);
    }

    fn take(&mut self, i: usize) {
        let host = self.pieces[i].at;
        self.settle(host);
        let after = self.next[i];
        let queue = &mut self.queues[host];
        queue.tasks -= 1;
        let mut before = NONE;
        if queue.first == i {
            queue.first = after;
        } else {
            before = queue.first;
            while self.next[before] != i {
                before = self.next[before];
            }
            self.next[before] = after;
        }
        if after == NONE {
            queue.last = before;
        }
        let piece = &mut self.pieces[i];
        piece.left = (piece.left - queue.done).max(0.0);
        self.count_again(host);
    }

    fn put(&mut self, i: usize) {
        let host = self.pieces[i].at;
        self.settle(host);
        let queue = &mut self.queues[host];
        queue.tasks += 1;
        self.pieces[i].left += queue.done;
        let (left, mut before, mut after) = (self.pieces[i].left, NONE, queue.first);
        while after != NONE && self.pieces[after].left <= left {
            (before, after) = (after, self.next[after]);
        }
        self.next[i] = after;
        if after == NONE {
            queue.last = i;
        }
        if before == NONE {
            queue.first = i;
        } else {
            self.next[before] = i;
        }
        self.count_again(host);
    }

    /// Adds the work that each task of the host has done until the current time.
    fn settle(&mut self, host: usize) {
        let queue = &mut self.queues[host];
        queue.done += (self.now - queue.since) * queue.rate;
        queue.since = self.now;
    }

    /// Updates the derived values of a host after its tasks have changed.
    fn count_again(&mut self, host: usize) {
        let (queue, machine) = (&mut self.queues[host], &self.machines[host]);
        let tasks = queue.tasks;
        queue.rate = machine.rate(tasks);
        // True if one more task slows down no other task.
        let gap = tasks == 0 || (tasks + 1) as f64 + machine.foreign <= machine.processors;
        self.offers[host] = if gap { machine.rate(tasks + 1) } else { NO_GAP };
        let never = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        (self.ends[host], self.lasts[host], self.wants[host]) = match self.pieces.get(queue.first) {
            Some(first) => {
                let ends =
                    |piece: &Piece| self.now + (piece.left - queue.done).max(0.0) / queue.rate;
                (
                    ends(first),
                    ends(&self.pieces[queue.last]),
                    queue.rate * FASTER,
                )
            }
            None => never,
        };
    }
}

/// Returns the maximum of `of` over the list. Computes four independent maxima, so that the
/// compiler can use vector instructions.
fn greatest(list: &[f64], of: impl Fn(f64) -> f64) -> f64 {
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

    fn outcome(machines: &[Machine], pieces: &[Piece], cost: f64) -> Outcome {
        let mut future = Future::of(machines.to_vec(), pieces.to_vec());
        future.ask(|i| pieces[i].counts, cost);
        future
            .outcome_unless(|_| false)
            .expect("whatever comes will do")
    }

    fn end(machines: &[Machine], pieces: &[Piece], cost: f64) -> f64 {
        outcome(machines, pieces, cost).end
    }

    const ORDINARY: Machine = Machine {
        processors: 1.0,
        speed: 1.0,
        foreign: 0.0,
    };

    fn piece(at: usize, left: f64) -> Piece {
        Piece {
            at,
            left,
            moves: 4,
            rests: 0.0,
            counts: true,
        }
    }

    /// Two tasks share a processor until the first of them has ended.
    #[test]
    fn tasks_share_a_processor_until_they_end() {
        assert_eq!(
            end(&[ORDINARY], &[piece(0, 10.0), piece(0, 30.0)], 1.0),
            40.0
        );
        assert_eq!(ORDINARY.flow(2, [10.0, 30.0].into_iter()), 20.0 + 40.0);
        let two = Machine {
            processors: 2.0,
            ..ORDINARY
        };
        assert_eq!(end(&[two], &[piece(0, 10.0), piece(0, 30.0)], 1.0), 30.0);
        let beside = Machine {
            foreign: 1.0,
            ..ORDINARY
        };
        assert_eq!(end(&[beside], &[piece(0, 10.0)], 1.0), 20.0);
    }

    /// A task migrates to an idle processor. The migration delays it by its cost.
    #[test]
    fn task_migrates_to_idle_processor_at_a_cost() {
        let both = [piece(0, 10.0), piece(0, 10.0)];
        assert_eq!(end(&[ORDINARY, ORDINARY], &both, 1.0), 11.0);
        let stays = both.map(|piece| Piece { moves: 0, ..piece });
        assert_eq!(end(&[ORDINARY, ORDINARY], &stays, 1.0), 20.0);
        // A faster processor becomes free soon enough, so the task waits for it.
        let fast = Machine {
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
        let resting = Piece {
            rests: 5.0,
            ..piece(0, 10.0)
        };
        // The tasks share a host for five seconds. Then each has a host for itself.
        let both = end(&[ORDINARY, ORDINARY], &[resting, resting], 0.0);
        assert!((both - 12.5).abs() < 0.01, "{both}");
        let moved = {
            let mut piece = piece(0, 10.0);
            piece.go(1, 3.0, 0.0);
            piece
        };
        assert_eq!(
            (moved.at, moved.left, moved.moves, moved.rests),
            (1, 13.0, 3, SHIFT_REST.0 as f64 / 1e6)
        );
    }

    /// A task accepts a better offer after it has declined an earlier one.
    #[test]
    fn better_offer_is_taken_after_a_declined_one() {
        // No task leaves half a processor for a processor that is even slower. After ten seconds, a
        // processor that is four times as fast becomes free.
        let (slow, fast) = (
            Machine {
                speed: 0.45,
                ..ORDINARY
            },
            Machine {
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
                    (greatest(&list, |x| x), -greatest(&list, |x| x - 14.0)),
                    (7.0, 7.0),
                    "{list:?}"
                );
            }
        }
        assert_eq!(greatest(&[], |x| x), f64::NEG_INFINITY);
    }

    /// Tasks of other jobs use processor time, but the completion time of the job does not include
    /// them.
    #[test]
    fn other_jobs_take_time_but_do_not_delay_the_end() {
        let other = Piece {
            counts: false,
            ..piece(0, 50.0)
        };
        let outcome = outcome(&[ORDINARY], &[piece(0, 10.0), other], 1.0);
        assert_eq!(
            outcome,
            Outcome {
                end: 20.0,
                others: 60.0
            }
        );
    }
}
