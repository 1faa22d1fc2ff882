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

/// Time passes.
struct Future<'a> {
    machines: &'a [Machine],
    pieces: Vec<Piece>,
    /// Tasks on each machine.
    on: Vec<usize>,
    /// Seconds that a move costs its task.
    cost: f64,
    now: f64,
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
    let mut on = vec![0; machines.len()];
    pieces.iter().for_each(|piece| on[piece.at] += 1);
    let mut future = Future { machines, pieces: pieces.to_vec(), on, cost, now: 0.0 };
    let mut outcome = Outcome::default();
    while !future.pieces.is_empty() {
        future.fill_gaps();
        match future.pass() {
            Some(ended) if ended.counts => outcome.end = future.now,
            Some(_) => outcome.others += future.now,
            None => {}
        }
    }
    outcome
}

impl Future<'_> {
    fn rate(&self, piece: &Piece) -> f64 {
        self.machines[piece.at].rate(self.on[piece.at])
    }

    /// Time passes until a task ends, which is answered, or has rested.
    fn pass(&mut self) -> Option<Piece> {
        let spans = self.pieces.iter().map(|piece| piece.left / self.rate(piece)).enumerate();
        let (first, span) = spans.min_by(|a, b| a.1.total_cmp(&b.1)).expect("there is a task");
        let waits = self.pieces.iter().map(|piece| piece.rests - self.now).filter(|rests| *rests > 0.0);
        let rested = waits.min_by(f64::total_cmp).filter(|rests| *rests < span);
        let rates: Vec<f64> = self.machines.iter().zip(&self.on).map(|(machine, on)| machine.rate(*on)).collect();
        let passes = rested.unwrap_or(span);
        self.pieces.iter_mut().for_each(|piece| piece.left = (piece.left - passes * rates[piece.at]).max(0.0));
        // A little more, so that what is over is over.
        self.now += passes + if rested.is_some() { 1e-6 } else { 0.0 };
        if rested.is_some() {
            return None;
        }
        let ended = self.pieces.swap_remove(first);
        self.on[ended.at] -= 1;
        Some(ended)
    }

    /// Tasks go to processors that have nothing to do.
    fn fill_gaps(&mut self) {
        for _ in 0..self.pieces.len() {
            let free = |i: &usize| (self.on[*i] + 1) as f64 + self.machines[*i].foreign <= self.machines[*i].processors;
            let gets = |i: usize| self.machines[i].rate(self.on[i] + 1);
            let idle = |i: &usize| self.on[*i] == 0;
            let best =
                (0..self.machines.len()).filter(|i| free(i) || idle(i)).max_by(|a, b| gets(*a).total_cmp(&gets(*b)));
            let Some(to) = best else { return };
            let gets = gets(to);
            let (mut last, mut mover) = (0.0, None);
            for (i, piece) in
                self.pieces.iter().enumerate().filter(|(_, piece)| piece.moves > 0 && piece.rests <= self.now)
            {
                let has = self.rate(piece);
                let ends = piece.left / has;
                if gets >= has * FASTER && ends > piece.left / gets + self.cost && ends > last {
                    (last, mover) = (ends, Some(i));
                }
            }
            let Some(mover) = mover else { return };
            let piece = &mut self.pieces[mover];
            self.on[piece.at] -= 1;
            self.on[to] += 1;
            piece.go(to, self.cost * gets, self.now);
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
