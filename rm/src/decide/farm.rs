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

    /// The sum of the seconds until each of these tasks ends, if all stay; `left`: what each has left, in rising order.
    pub(super) fn flow(&self, left: impl ExactSizeIterator<Item = f64>) -> f64 {
        let (tasks, mut before, mut sum) = (left.len(), 0.0, 0.0);
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

/// Lets time pass until all tasks have ended; a move costs its task so many seconds.
pub(super) fn outcome(machines: &[Machine], pieces: &[Piece], cost: f64) -> Outcome {
    outcome_unless(machines, pieces, cost, |_| false).unwrap_or_default()
}

/// The same, unless it is seen before that it will not do: what comes of it is in no number less than what is asked about.
pub(super) fn outcome_unless(
    machines: &[Machine],
    pieces: &[Piece],
    cost: f64,
    will_not_do: impl Fn(Outcome) -> bool,
) -> Option<Outcome> {
    let mut future = Future::of(machines, pieces, cost);
    let mut outcome = Outcome::default();
    let mut counted = pieces.iter().filter(|piece| piece.counts).count();
    while future.tasks > 0 {
        future.fill_gaps();
        match future.pass() {
            Some(ended) if ended.counts => (outcome.end, counted) = (future.now, counted - 1),
            Some(_) => outcome.others += future.now,
            None => {}
        }
        let end = if counted > 0 { future.now } else { outcome.end };
        let others = outcome.others + (future.tasks - counted) as f64 * future.now;
        if will_not_do(Outcome { end, others }) {
            return None;
        }
    }
    Some(outcome)
}

/// A host and its tasks while time passes. All of them do the same work in the same time.
struct Queue {
    machine: Machine,
    /// The one that ends first is the last one. What is left of each counts from the beginning of time: it is what the tasks
    /// here will have `done` when it ends.
    pieces: Vec<Piece>,
    /// Work that a task has done that was here all the time.
    done: f64,
    /// Work that each does in a second.
    rate: f64,
    /// The same if one more comes.
    gets: f64,
    /// One more makes none of them slower, or there are none.
    gap: bool,
}

impl Queue {
    fn count_again(&mut self) {
        let tasks = self.pieces.len();
        (self.rate, self.gets) = (self.machine.rate(tasks), self.machine.rate(tasks + 1));
        self.gap = tasks == 0 || (tasks + 1) as f64 + self.machine.foreign <= self.machine.processors;
    }

    /// Seconds until a task ends.
    fn ends(&self) -> Option<f64> {
        self.pieces.last().map(|piece| (piece.left - self.done).max(0.0) / self.rate)
    }

    fn take(&mut self, at: usize) -> Piece {
        let mut piece = self.pieces.remove(at);
        piece.left = (piece.left - self.done).max(0.0);
        self.count_again();
        piece
    }

    fn put(&mut self, mut piece: Piece) {
        piece.left += self.done;
        self.pieces.insert(self.pieces.partition_point(|other| other.left > piece.left), piece);
        self.count_again();
    }
}

/// Time passes. Its steps cost as much as there are hosts, however many tasks they have.
struct Future {
    queues: Vec<Queue>,
    tasks: usize,
    /// When tasks will have rested, the first time last.
    rested: Vec<f64>,
    /// Seconds that a move costs its task.
    cost: f64,
    now: f64,
}

impl Future {
    fn of(machines: &[Machine], pieces: &[Piece], cost: f64) -> Future {
        let queue = |machine: &Machine| {
            let mut queue = Queue { machine: *machine, pieces: Vec::new(), done: 0.0, rate: 0.0, gets: 0.0, gap: true };
            queue.count_again();
            queue
        };
        let mut queues: Vec<Queue> = machines.iter().map(queue).collect();
        pieces.iter().for_each(|piece| queues[piece.at].pieces.push(*piece));
        for queue in &mut queues {
            queue.pieces.sort_by(|a, b| b.left.total_cmp(&a.left));
            queue.count_again();
        }
        let mut rested: Vec<f64> = pieces.iter().map(|piece| piece.rests).filter(|rests| *rests > 0.0).collect();
        rested.sort_unstable_by(|a, b| b.total_cmp(a));
        Future { queues, tasks: pieces.len(), rested, cost, now: 0.0 }
    }

    /// Time passes until a task ends, which is answered, or has rested and may find a place.
    fn pass(&mut self) -> Option<Piece> {
        let spans = self.queues.iter().enumerate().filter_map(|(i, queue)| Some((i, queue.ends()?)));
        let (first, span) = spans.min_by(|a, b| a.1.total_cmp(&b.1)).expect("there is a task");
        while self.rested.last().is_some_and(|at| *at <= self.now) {
            self.rested.pop();
        }
        let gap = self.queues.iter().any(|queue| queue.gap);
        let rested = self.rested.last().map(|at| *at - self.now).filter(|rests| gap && *rests < span);
        let passes = rested.unwrap_or(span);
        self.queues.iter_mut().for_each(|queue| queue.done += passes * queue.rate);
        // A little more, so that what is over is over.
        self.now += passes + if rested.is_some() { 1e-6 } else { 0.0 };
        if rested.is_some() {
            return None;
        }
        self.tasks -= 1;
        let queue = &mut self.queues[first];
        let ended = queue.pieces.pop();
        queue.count_again();
        ended
    }

    /// Tasks go to processors that have nothing to do.
    fn fill_gaps(&mut self) {
        for _ in 0..self.tasks {
            let gaps = self.queues.iter().enumerate().filter(|(_, queue)| queue.gap);
            let best = gaps.map(|(i, queue)| (i, queue.gets)).max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((to, gets)) = best else { return };
            let (mut last, mut mover) = (0.0, None);
            for (i, queue) in self.queues.iter().enumerate().filter(|(_, queue)| gets >= queue.rate * FASTER) {
                let may_go = |piece: &Piece| piece.moves > 0 && piece.rests <= self.now;
                // Where the longest one gains nothing, the others do not either.
                let Some(longest) = queue.pieces.iter().position(may_go) else { continue };
                let left = queue.pieces[longest].left - queue.done;
                let ends = left / queue.rate;
                if ends > left / gets + self.cost && ends > last {
                    (last, mover) = (ends, Some((i, longest)));
                }
            }
            let Some((from, longest)) = mover else { return };
            let mut piece = self.queues[from].take(longest);
            piece.go(to, self.cost * gets, self.now);
            let at = self.rested.partition_point(|other| *other > piece.rests);
            self.rested.insert(at, piece.rests);
            self.queues[to].put(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(machines: &[Machine], pieces: &[Piece], cost: f64) -> f64 {
        outcome(machines, pieces, cost).end
    }

    const ORDINARY: Machine = Machine { processors: 1.0, speed: 1.0, foreign: 0.0 };

    fn piece(at: usize, left: f64) -> Piece {
        Piece { at, left, moves: 4, rests: 0.0, counts: true }
    }

    #[test]
    fn tasks_share_a_processor_until_each_has_ended() {
        assert_eq!(end(&[ORDINARY], &[piece(0, 10.0), piece(0, 30.0)], 1.0), 40.0);
        assert_eq!(ORDINARY.flow([10.0, 30.0].into_iter()), 20.0 + 40.0);
        let two = Machine { processors: 2.0, ..ORDINARY };
        assert_eq!(end(&[two], &[piece(0, 10.0), piece(0, 30.0)], 1.0), 30.0);
        let beside = Machine { foreign: 1.0, ..ORDINARY };
        assert_eq!(end(&[beside], &[piece(0, 10.0)], 1.0), 20.0);
    }

    #[test]
    fn a_task_goes_where_a_processor_has_nothing_to_do_and_that_costs() {
        let both = [piece(0, 10.0), piece(0, 10.0)];
        assert_eq!(end(&[ORDINARY, ORDINARY], &both, 1.0), 11.0);
        let stays = both.map(|piece| Piece { moves: 0, ..piece });
        assert_eq!(end(&[ORDINARY, ORDINARY], &stays, 1.0), 20.0);
        // A faster processor that gets free in time is waited for.
        let fast = Machine { speed: 2.0, ..ORDINARY };
        assert_eq!(end(&[ORDINARY, fast], &[piece(0, 40.0), piece(1, 20.0)], 0.0), 10.0 + 15.0);
    }

    #[test]
    fn a_task_that_rests_or_stays_is_not_moved_before_its_time() {
        let resting = Piece { rests: 5.0, ..piece(0, 10.0) };
        // Five seconds of sharing, then the other half of the work beside an idle host.
        let both = end(&[ORDINARY, ORDINARY], &[resting, resting], 0.0);
        assert!((both - 12.5).abs() < 0.01, "{both}");
        let moved = {
            let mut piece = piece(0, 10.0);
            piece.go(1, 3.0, 0.0);
            piece
        };
        assert_eq!((moved.at, moved.left, moved.moves, moved.rests), (1, 13.0, 3, 60.0));
    }

    #[test]
    fn tasks_of_others_take_time_and_their_ends_do_not_count() {
        let other = Piece { counts: false, ..piece(0, 50.0) };
        let outcome = outcome(&[ORDINARY], &[piece(0, 10.0), other], 1.0);
        assert_eq!(outcome, Outcome { end: 20.0, others: 60.0 });
    }
}
