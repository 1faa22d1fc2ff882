//! When a farm ends: its tasks with what each has left, in a copy of the virtual machine in which time passes. Whoever weighs
//! a move lets time pass with it and without.
//!
//! What would be moved later anyway counts on both sides: whenever a processor has nothing to do, the task that would end last
//! goes there if that makes it faster. So a move now is weighed against waiting for a place, and not against waiting for ever.

use super::{SHIFT_REST, SHIFTS_MAX};

/// A task must become faster by this factor to move for its own sake.
pub(super) const FASTER: f64 = 1.2;

/// A host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    /// Processors that may be used.
    pub(super) processors: f64,
    /// Work that one of them does in a second, in seconds of an ordinary one.
    pub(super) speed: f64,
    /// Threads that are not ours.
    pub(super) foreign: f64,
}

impl Machine {
    /// Work that each of so many tasks does in a second.
    pub(super) fn rate(&self, tasks: usize) -> f64 {
        let threads = tasks as f64 + self.foreign;
        (self.speed * (self.processors / threads.max(1e-9)).min(1.0)).max(1e-9)
    }

    /// The sum of the seconds until each of so many tasks ends, if all stay; `left`: what each has left, in rising order.
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

/// A task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Its host, as a place in the list of machines.
    pub(super) at: usize,
    /// What it has left, in seconds of an ordinary processor.
    pub(super) left: f64,
    /// Moves that it may still make.
    pub(super) moves: usize,
    /// Until then it makes none, in seconds from now.
    pub(super) rests: f64,
    /// It belongs to the farm whose end is asked for.
    pub(super) counts: bool,
}

impl Piece {
    /// It goes to another host at this time, and does so much less work meanwhile.
    pub(super) fn go(&mut self, to: usize, work: f64, now: f64) {
        self.moves = self.moves.saturating_sub(1);
        let before = SHIFTS_MAX.saturating_sub(self.moves + 1);
        (self.at, self.left) = (to, self.left + work);
        self.rests = now + SHIFT_REST.0 as f64 / 1e6 * (1_u64 << before) as f64;
    }
}

/// What comes of it, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// Until the last task of the farm ends.
    pub(super) end: f64,
    /// Until each other task ends, all together.
    pub(super) others: f64,
}

/// Behind the last one of a queue.
const NONE: usize = usize::MAX;
/// What a host offers where one more task would make others slower.
const NO_GAP: f64 = -1.0;

/// A host's tasks while time passes. All of them do the same work in the same time, so the one that has least left ends first.
/// What is left of each counts from the beginning of time: it is what those who were here all the time will have `done` then.
#[derive(Clone, Copy, Debug)]
struct Queue {
    /// The one that ends first; the others follow in their order.
    first: usize,
    last: usize,
    tasks: usize,
    /// Work that a task had done at that time that was here all the time.
    done: f64,
    since: f64,
    /// Work that each does in a second.
    rate: f64,
}

/// Time passes. Its steps cost as much as there are hosts, however many tasks they have. What is looked for among the hosts is
/// in lists of its own, and nothing refers to memory elsewhere: a future is tried on a copy that takes an old one's place.
#[derive(Debug, Default)]
pub(super) struct Future {
    machines: Vec<Machine>,
    queues: Vec<Queue>,
    /// When the first task of each host ends, and when the last one would if all went on as now.
    ends: Vec<f64>,
    lasts: Vec<f64>,
    /// What each host offers to one more task, or [`NO_GAP`].
    offers: Vec<f64>,
    /// What a task of each host must be offered to go.
    wants: Vec<f64>,
    pieces: Vec<Piece>,
    /// Who follows each task in its queue.
    next: Vec<usize>,
    /// Tasks that have not ended, and those of them that count.
    tasks: usize,
    counted: usize,
    /// When each task has ended, if it has.
    ended: Vec<f64>,
    /// When tasks will have rested, the first time last.
    rested: Vec<f64>,
    /// A processor has nothing to do.
    gap: bool,
    /// Nobody goes to a processor that offers no more than this: time alone makes nobody go who stays now.
    declined: f64,
    /// Seconds that a move costs its task.
    cost: f64,
    now: f64,
    outcome: Outcome,
    /// Steps that time has made in all futures that took this place.
    steps: usize,
}

impl Future {
    /// As it is now.
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
        // Of those that have as much left the first one counts as the longest.
        (0..future.pieces.len()).rev().for_each(|i| future.put(i));
        future
    }

    /// The same as another one, in the memory that is there.
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

    /// The end asked for is that of these tasks, whose moves cost them so many seconds.
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

    /// Lets time pass until all tasks have ended, and answers when each did.
    pub(super) fn ends(&mut self) -> &[f64] {
        while self.tasks > 0 {
            self.pass();
        }
        &self.ended
    }

    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// A task goes to another host now.
    pub(super) fn go(&mut self, i: usize, to: usize) {
        let gets = self.machines[to].rate(self.queues[to].tasks + 1);
        self.shift(i, to, self.cost * gets);
    }

    /// The same, at no cost and by a move that was decided before.
    pub(super) fn has_gone(&mut self, i: usize, to: usize) {
        self.shift(i, to, 0.0);
    }

    /// Lets time pass until all tasks have ended, unless it is seen before that it will not do: what comes of it is in no
    /// number less than what is asked about.
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

    /// Lets time pass until the farm has ended, and answers whether that is after so many seconds.
    pub(super) fn ends_after(&mut self, limit: f64) -> bool {
        while self.counted > 0 && self.now <= limit {
            self.pass();
        }
        self.counted > 0 || self.outcome.end > limit
    }

    /// Until a task ends, or has rested and may find a place.
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
            // A little more, so that what is over is over.
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

    /// Tasks go to processors that have nothing to do.
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

    /// The task that would end last of those that this makes faster.
    fn longest_for(&self, gets: f64) -> Option<usize> {
        let (mut latest, mut mover) = (self.now, None);
        for (host, (wants, ends)) in self.wants.iter().zip(&self.lasts).enumerate() {
            if gets < *wants || *ends <= latest {
                continue;
            }
            // Where the longest one gains nothing, the others do not either.
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

    /// Of those that may go.
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

    /// What has been done until now.
    fn settle(&mut self, host: usize) {
        let queue = &mut self.queues[host];
        queue.done += (self.now - queue.since) * queue.rate;
        queue.since = self.now;
    }

    /// The tasks of a host are others than before.
    fn count_again(&mut self, host: usize) {
        let (queue, machine) = (&mut self.queues[host], &self.machines[host]);
        let tasks = queue.tasks;
        queue.rate = machine.rate(tasks);
        // One more makes none of them slower, or there are none.
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

/// The greatest of what these numbers stand for. In four parts, so that the processor compares several at once.
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

    #[test]
    fn tasks_share_a_processor_until_each_has_ended() {
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

    #[test]
    fn a_task_goes_where_a_processor_has_nothing_to_do_and_that_costs() {
        let both = [piece(0, 10.0), piece(0, 10.0)];
        assert_eq!(end(&[ORDINARY, ORDINARY], &both, 1.0), 11.0);
        let stays = both.map(|piece| Piece { moves: 0, ..piece });
        assert_eq!(end(&[ORDINARY, ORDINARY], &stays, 1.0), 20.0);
        // A faster processor that gets free in time is waited for.
        let fast = Machine {
            speed: 2.0,
            ..ORDINARY
        };
        assert_eq!(
            end(&[ORDINARY, fast], &[piece(0, 40.0), piece(1, 20.0)], 0.0),
            10.0 + 15.0
        );
    }

    #[test]
    fn a_task_that_rests_or_stays_is_not_moved_before_its_time() {
        let resting = Piece {
            rests: 5.0,
            ..piece(0, 10.0)
        };
        // Five seconds of sharing, then the other half of the work beside an idle host.
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

    #[test]
    fn a_better_offer_is_taken_although_the_one_before_it_was_not() {
        // Nobody leaves half a processor for one that is slower still. One that is four times as fast gets free after ten seconds.
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
        // One of the two goes there, and the other one has 25 left for itself; together they would need 60.
        assert!((end - 35.0).abs() < 1e-6, "{end}");
    }

    #[test]
    fn the_greatest_of_any_number_of_numbers_is_found_wherever_it_is() {
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

    #[test]
    fn tasks_of_others_take_time_and_their_ends_do_not_count() {
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
