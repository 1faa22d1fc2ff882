//! What is expected of tasks and moves: how much work a task has left, and what a move costs. Learns from what happened.
//!
//! Work is the time that an ordinary processor (speed 1000) would need for it alone.

use sempa_proto::Micros;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Programs whose lives are remembered; more forget the one that was heard of longest ago.
pub const PROGRAMS_MAX: usize = 1024;
/// Lives of a program that must have been seen before they are believed.
const LIVES_MIN: u32 = 3;
/// Weight of what happened last.
const NEWEST: f64 = 0.2;
/// More work is expected of no task, whatever was seen.
pub const LEFT_MAX: Micros = Micros::from_secs(24 * 3600);
/// What every move costs beside its bytes, where an ordinary processor has nothing else to do.
const FREEZE: f64 = 0.06;
/// No host is taken to be slower than an ordinary one by more.
const SLOW_MAX: f64 = 100.0;
/// Bytes per second from the source's memory to the target's, before anything was learned.
const BYTES_PER_SECOND: f64 = 200e6;
/// What a task loses after a move until its caches and pages are there again, beside its bytes.
const WARM_UP: f64 = 0.2;
/// Bytes per second of warming up.
const WARM_UP_BYTES_PER_SECOND: f64 = 1e9;
/// A task that was never moved is taken to have so many bytes.
const BYTES_UNKNOWN: u64 = 64 << 20;

#[derive(Clone, Copy, Debug)]
struct Lives {
    count: u32,
    /// Mean of the logarithm of their work in seconds.
    mean_log: f64,
    heard: u64,
}

/// What was learned, to be kept: programs with how many lives were seen and the mean logarithm of their work; the logarithm
/// of what moves cost over what was expected, and of how many moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lessons {
    lives: Vec<(String, u32, f64)>,
    cost_bias: f64,
    moves: u64,
}

/// What was learned.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    lives: BTreeMap<Arc<str>, Lives>,
    heard: u64,
    /// Logarithm of what moves cost over what was expected.
    cost_bias: f64,
    moves: u64,
}

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds.max(0.0) * 1e6) as u64)
}

impl Estimates {
    /// As it was kept.
    pub fn recall(lessons: Lessons) -> Estimates {
        let mut estimates = Estimates { cost_bias: lessons.cost_bias, moves: lessons.moves, ..Estimates::default() };
        for (program, count, mean_log) in lessons.lives.into_iter().take(PROGRAMS_MAX).filter(|l| l.2.is_finite()) {
            estimates.heard += 1;
            let lives = Lives { count, mean_log, heard: estimates.heard };
            estimates.lives.insert(Arc::from(program), lives);
        }
        if !estimates.cost_bias.is_finite() {
            estimates.cost_bias = 0.0;
        }
        estimates
    }

    /// To be kept; the program that was heard of longest ago first.
    pub fn lessons(&self) -> Lessons {
        let mut programs: Vec<(&Arc<str>, &Lives)> = self.lives.iter().collect();
        programs.sort_by_key(|(_, lives)| lives.heard);
        let lives = programs.into_iter().map(|(name, l)| (name.to_string(), l.count, l.mean_log)).collect();
        Lessons { lives, cost_bias: self.cost_bias, moves: self.moves }
    }

    /// A number that changes with everything that is learned.
    pub fn version(&self) -> u64 {
        self.heard + self.moves
    }

    /// A task of this program has ended after so much work.
    pub fn ended(&mut self, program: &Arc<str>, work: Micros) {
        self.heard += 1;
        let log = seconds(work).max(0.001).ln();
        let first = Lives { count: 0, mean_log: log, heard: 0 };
        let lives = self.lives.entry(program.clone()).or_insert(first);
        let weight = NEWEST.max(1.0 / f64::from(lives.count + 1));
        lives.mean_log += weight * (log - lives.mean_log);
        (lives.count, lives.heard) = (lives.count.saturating_add(1), self.heard);
        if self.lives.len() > PROGRAMS_MAX {
            let oldest = self.lives.iter().min_by_key(|(_, lives)| lives.heard).map(|(name, _)| name.clone());
            self.lives.remove(&oldest.expect("more than the limit"));
        }
    }

    /// A move has stopped a task with an image of `bytes` for `frozen`; its hosts were so many times slower than an ordinary
    /// processor ([`slowness`]).
    pub fn moved(&mut self, bytes: u64, frozen: Micros, slowness: f64) {
        let ratio = seconds(frozen).max(0.001) / Estimates::frozen_seconds(bytes, slowness);
        self.moves += 1;
        let weight = NEWEST.max(1.0 / self.moves as f64);
        self.cost_bias += weight * (ratio.clamp(0.05, 100.0).ln() - self.cost_bias);
    }

    /// How much work a task of this program has left when it has done so much. Where nothing was seen, as much again: half
    /// of the processes that have run for some time run for that time again (Harchol-Balter and Downey, 1996).
    pub fn left(&self, program: &str, done: Micros) -> Micros {
        let usual = self.lives.get(program).filter(|l| l.count >= LIVES_MIN).map(|l| micros(l.mean_log.exp()));
        let left = match usual {
            Some(usual) if done < usual => Micros(usual.0 - done.0).max(Micros(done.0 / 2)),
            // It has outlived the others; how long is anybody's guess.
            Some(_) => Micros(done.0 / 2),
            None => done,
        };
        left.min(LEFT_MAX)
    }

    fn frozen_seconds(bytes: u64, slowness: f64) -> f64 {
        FREEZE * slowness + bytes as f64 / BYTES_PER_SECOND
    }

    /// What a move costs a task whose newest image had `bytes`, 0 if nobody knows, between hosts of this [`slowness`]: standstill
    /// and warming up.
    pub fn cost(&self, bytes: u64, slowness: f64) -> Micros {
        let bytes = if bytes == 0 { BYTES_UNKNOWN } else { bytes };
        let warm_up = WARM_UP + bytes as f64 / WARM_UP_BYTES_PER_SECOND;
        micros(Estimates::frozen_seconds(bytes, slowness) * self.cost_bias.exp() + warm_up)
    }
}

/// How many times slower than an ordinary processor that has nothing else to do the hosts of a move are, for the work of the
/// move itself: one half of it is done where the task gets `has` thousandths of such a processor, the other where it gets
/// `gets`. A faster one counts as an ordinary one.
pub fn slowness(has: f64, gets: f64) -> f64 {
    let slow = |rate: f64| (1e3 / rate.max(1.0)).clamp(1.0, SLOW_MAX);
    (slow(has) + slow(gets)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_expected_to_do_as_much_again_until_others_of_its_program_have_ended() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        let left = |e: &Estimates, done| seconds(e.left("worker", Micros::from_secs(done)));
        assert_eq!(left(&estimates, 30), 30.0);
        for _ in 0..LIVES_MIN {
            estimates.ended(&program, Micros::from_secs(100));
        }
        assert!((left(&estimates, 30) - 70.0).abs() < 0.01);
        assert_eq!(left(&estimates, 200), 100.0, "it has outlived the others");
        assert_eq!(seconds(estimates.left("other", Micros::from_secs(7))), 7.0);
    }

    #[test]
    fn the_cost_of_moves_follows_what_moves_cost() {
        let mut estimates = Estimates::default();
        let before = estimates.cost(100 << 20, 1.0);
        assert!(before < estimates.cost(1 << 30, 1.0));
        for _ in 0..20 {
            estimates.moved(100 << 20, Micros::from_secs(10), 1.0);
        }
        let after = seconds(estimates.cost(100 << 20, 1.0));
        assert!((10.0..11.0).contains(&after), "{after}");
        for _ in 0..40 {
            estimates.moved(100 << 20, Micros::from_millis(100), 1.0);
        }
        assert!(estimates.cost(100 << 20, 1.0) < before);
    }

    #[test]
    fn a_move_between_slow_hosts_costs_more_and_teaches_nothing_false_about_others() {
        assert_eq!((slowness(1000.0, 4000.0), slowness(100.0, 500.0), slowness(0.0, 0.0)), (1.0, 6.0, SLOW_MAX));
        let mut estimates = Estimates::default();
        let (ordinary, slow) = (estimates.cost(1 << 20, 1.0), estimates.cost(1 << 20, 20.0));
        assert!((seconds(slow) - seconds(ordinary) - 19.0 * FREEZE).abs() < 1e-5, "{slow:?} {ordinary:?}");
        for _ in 0..20 {
            let as_expected = micros(Estimates::frozen_seconds(1 << 20, 20.0));
            estimates.moved(1 << 20, as_expected, 20.0);
        }
        assert!(estimates.cost(1 << 20, 1.0).0.abs_diff(ordinary.0) < 10);
    }

    #[test]
    fn what_was_learned_outlives_its_keeper() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        for _ in 0..LIVES_MIN {
            estimates.ended(&program, Micros::from_secs(100));
        }
        estimates.moved(1 << 20, Micros::from_secs(3), 1.0);
        let again = Estimates::recall(estimates.lessons());
        let (done, bytes) = (Micros::from_secs(30), 1 << 20);
        assert_eq!(again.left("worker", done), estimates.left("worker", done));
        assert_eq!(again.cost(bytes, 1.0), estimates.cost(bytes, 1.0));
        assert_eq!(again.lessons(), estimates.lessons());
    }

    #[test]
    fn programs_are_forgotten_when_there_are_too_many() {
        let mut estimates = Estimates::default();
        for n in 0..PROGRAMS_MAX + 10 {
            estimates.ended(&Arc::from(format!("p{n}")), Micros::from_secs(1));
        }
        assert_eq!(estimates.lives.len(), PROGRAMS_MAX);
        assert!(!estimates.lives.contains_key("p0") && estimates.lives.contains_key("p1033"));
    }
}
