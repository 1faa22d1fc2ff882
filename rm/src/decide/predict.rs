//! What is expected of tasks and moves: how much work a task has left, how large it is, and what a move costs. Learns from
//! what happened.
//!
//! Work is the time that an ordinary processor (speed 1000) would need for it alone. What a move costs has three parts, which
//! are learned apart: the freeze by the size of the task, because a large one's tells nothing of a small one's; the transfer by
//! the link ([`super::links`]), whether memory goes with the images or follows; and warming up.

use super::gains::Gains;
use super::links::{Links, Way};
use sempa_proto::Micros;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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
/// Bytes per second of a task's memory that a dump walks while the task stands still, also where it does not copy them.
const WALKED_PER_SECOND: f64 = 7e9;
/// Tasks of fewer bytes say nothing of a link: their transfer is lost in their freeze.
const MEASURED_MIN: u64 = 16 << 20;
/// Tasks of fewer bytes than each of these, and larger ones, have freezes of their own kinds.
const SIZES: [u64; 3] = [MEASURED_MIN, 256 << 20, 4 << 30];
/// What a task loses after a move until its caches and pages are there again, beside its bytes.
const WARM_UP: f64 = 0.2;
/// Bytes per second of warming up.
const WARM_UP_BYTES_PER_SECOND: f64 = 1e9;
/// A task that was never moved, and of whose program nobody has seen the size, is taken to have so many bytes.
const BYTES_UNKNOWN: u64 = 64 << 20;

#[derive(Clone, Copy, Debug)]
struct Lives {
    count: u32,
    /// Mean of the logarithm of their work in seconds.
    mean_log: f64,
    /// Mean of the logarithm of their bytes, where that was seen.
    bytes_log: Option<f64>,
    heard: u64,
}

/// The freezes of tasks of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Freezes {
    /// Logarithm of what they took over what was expected.
    bias: f64,
    moves: u64,
}

/// A move as it was.
#[derive(Clone, Copy, Debug)]
pub struct Journey {
    /// Between which hosts, if they are known.
    pub way: Option<Way>,
    /// How slow they were for the move's own work ([`slowness`]).
    pub slowness: f64,
    /// Bytes of the images.
    pub images: u64,
    /// The task's memory; 0 when its program took along what it needs: that says nothing of others.
    pub resident: u64,
    /// How long the task stood still.
    pub frozen: Micros,
    /// Until all of its memory was there.
    pub whole: Micros,
}

/// What was learned, to be kept: programs with how many lives were seen and the mean logarithms of their work and bytes;
/// freezes by size; links; what gains were worth; and of how many moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lessons {
    lives: Vec<(String, u32, f64, Option<f64>)>,
    freezes: [Freezes; SIZES.len() + 1],
    links: Links,
    gains: Gains,
    moves: u64,
}

impl Lessons {
    /// Of a virtual machine that is gone: its hosts' numbers mean others now.
    pub fn of_other_hosts(mut self) -> Lessons {
        self.links.forget_hosts();
        self
    }
}

/// What was learned.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    lives: BTreeMap<Arc<str>, Lives>,
    heard: u64,
    freezes: [Freezes; SIZES.len() + 1],
    links: Links,
    gains: Gains,
    moves: u64,
}

/// The kind of freeze that tasks of so many bytes have.
fn kind(bytes: u64) -> usize {
    SIZES
        .iter()
        .position(|limit| bytes < *limit)
        .unwrap_or(SIZES.len())
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
        let mut estimates = Estimates {
            moves: lessons.moves,
            ..Estimates::default()
        };
        for (program, count, mean_log, bytes_log) in lessons
            .lives
            .into_iter()
            .take(PROGRAMS_MAX)
            .filter(|l| l.2.is_finite())
        {
            estimates.heard += 1;
            let bytes_log = bytes_log.filter(|log| log.is_finite());
            let lives = Lives {
                count,
                mean_log,
                bytes_log,
                heard: estimates.heard,
            };
            estimates.lives.insert(Arc::from(program), lives);
        }
        if lessons.freezes.iter().all(|f| f.bias.is_finite()) {
            estimates.freezes = lessons.freezes;
        }
        if lessons.gains.is_sound() {
            estimates.gains = lessons.gains.on_new_clock();
        }
        if lessons.links.is_sound() {
            estimates.links = lessons.links;
        }
        estimates
    }

    /// To be kept; the program that was heard of longest ago first.
    pub fn lessons(&self) -> Lessons {
        let mut programs: Vec<(&Arc<str>, &Lives)> = self.lives.iter().collect();
        programs.sort_by_key(|(_, lives)| lives.heard);
        let lives = programs
            .into_iter()
            .map(|(name, l)| (name.to_string(), l.count, l.mean_log, l.bytes_log))
            .collect();
        let Estimates {
            freezes,
            gains,
            moves,
            ..
        } = *self;
        Lessons {
            lives,
            freezes,
            links: self.links.clone(),
            gains: gains.on_new_clock(),
            moves,
        }
    }

    /// A number that changes with everything that is learned.
    pub fn version(&self) -> u64 {
        self.heard + self.moves + self.gains.lessons()
    }

    /// How fast it is between a zone and the nearest of these, beside the links within either, where moves have shown both.
    pub(super) fn beside_within(&self, zone: u32, peers: &BTreeSet<u32>) -> Option<f64> {
        self.links.beside_within(zone, peers)
    }

    /// What a reckoned gain is worth; `told`: it rests on what programs have told of their work.
    pub(super) fn trust(&self, now: Micros, told: bool) -> f64 {
        self.gains.trust(now, told)
    }

    /// A task that was moved gets so much of what it was to get.
    pub(super) fn rate_came(&mut self, now: Micros, ratio: f64) {
        self.gains.rate_came(now, ratio);
    }

    /// A task that was moved had so much of the work left that it was taken to have.
    pub(super) fn work_came(&mut self, now: Micros, told: bool, ratio: f64) {
        self.gains.work_came(now, told, ratio);
    }

    /// What is known of a program, to be changed.
    fn program(&mut self, program: &Arc<str>) -> &mut Lives {
        self.heard += 1;
        if !self.lives.contains_key(program) && self.lives.len() >= PROGRAMS_MAX {
            let oldest = self
                .lives
                .iter()
                .min_by_key(|(_, lives)| lives.heard)
                .map(|(name, _)| name.clone());
            self.lives.remove(&oldest.expect("there are many"));
        }
        let fresh = Lives {
            count: 0,
            mean_log: 0.0,
            bytes_log: None,
            heard: 0,
        };
        let lives = self.lives.entry(program.clone()).or_insert(fresh);
        lives.heard = self.heard;
        lives
    }

    /// A task of this program has ended after so much work.
    pub fn ended(&mut self, program: &Arc<str>, work: Micros) {
        let log = seconds(work).max(0.001).ln();
        let lives = self.program(program);
        let weight = NEWEST.max(1.0 / f64::from(lives.count + 1));
        lives.mean_log += weight * (log - lives.mean_log);
        lives.count = lives.count.saturating_add(1);
    }

    /// A task of this program was seen to have so many bytes.
    pub fn sized(&mut self, program: &Arc<str>, bytes: u64) {
        if bytes > 0 {
            let (log, lives) = ((bytes as f64).ln(), self.program(program));
            lives.bytes_log = Some(
                lives
                    .bytes_log
                    .map_or(log, |mean| mean + NEWEST * (log - mean)),
            );
        }
    }

    /// How many bytes a task of this program has that had so many when it was moved last, 0 if nobody knows: as many as others
    /// of its program.
    pub fn bytes(&self, program: &str, bytes: u64) -> u64 {
        let usual = || self.lives.get(program).and_then(|lives| lives.bytes_log);
        if bytes > 0 {
            bytes
        } else {
            usual().map_or(BYTES_UNKNOWN, |log| log.exp() as u64)
        }
    }

    /// A move has ended.
    pub fn moved(&mut self, journey: &Journey) {
        let Journey {
            way,
            slowness,
            images,
            resident,
            frozen,
            whole,
        } = *journey;
        if resident == 0 {
            return;
        }
        self.moves += 1;
        if whole > frozen {
            self.froze(resident, slowness, seconds(frozen));
            if resident >= MEASURED_MIN {
                self.links
                    .carried(way, resident, seconds(whole.since(frozen)));
            }
        } else if images >= MEASURED_MIN {
            // All went while it stood still: what that took beyond the freeze was the link.
            let frozen = seconds(frozen);
            self.links.carried(
                way,
                images,
                (frozen - self.freeze(resident, slowness)).max(frozen / 10.0),
            );
        } else {
            let carried = images as f64 / self.links.bytes_per_second(way);
            self.froze(resident, slowness, seconds(frozen) - carried);
        }
    }

    /// A task of so many bytes stood still for so many seconds, its transfer aside.
    fn froze(&mut self, bytes: u64, slowness: f64, seconds: f64) {
        let ratio = seconds.max(0.001) / expected_freeze(bytes, slowness);
        let freezes = &mut self.freezes[kind(bytes)];
        freezes.moves += 1;
        let weight = NEWEST.max(1.0 / freezes.moves as f64);
        freezes.bias += weight * (ratio.clamp(0.05, 100.0).ln() - freezes.bias);
    }

    /// How much work a task of this program has left when it has done so much. Where nothing was seen, as much again: half
    /// of the processes that have run for some time run for that time again (Harchol-Balter and Downey, 1996).
    pub fn left(&self, program: &str, done: Micros) -> Micros {
        let usual = self
            .lives
            .get(program)
            .filter(|l| l.count >= LIVES_MIN)
            .map(|l| micros(l.mean_log.exp()));
        let left = match usual {
            Some(usual) if done < usual => Micros(usual.0 - done.0).max(Micros(done.0 / 2)),
            // It has outlived the others; how long is anybody's guess.
            Some(_) => Micros(done.0 / 2),
            None => done,
        };
        left.min(LEFT_MAX)
    }

    /// Seconds that a task of so many bytes stands still, its transfer aside. Where no task of its size has moved, as smaller
    /// ones do; what large ones do says nothing of it.
    fn freeze(&self, bytes: u64, slowness: f64) -> f64 {
        let known = self.freezes[..=kind(bytes)]
            .iter()
            .rev()
            .find(|freezes| freezes.moves > 0);
        expected_freeze(bytes, slowness) * known.map_or(1.0, |freezes| freezes.bias.exp())
    }

    /// What a move costs a task of so many bytes, between hosts of this [`slowness`]: freeze, transfer and warming up. While its
    /// memory follows a task runs only as long as it needs nothing of what is missing: that counts as if it stood still.
    /// Without a `way`: to a host that is not known yet.
    pub fn cost(&self, bytes: u64, slowness: f64, way: Option<Way>) -> Micros {
        let transfer = bytes as f64 / self.links.bytes_per_second(way);
        micros(self.freeze(bytes, slowness) + transfer + warm_up(bytes))
    }

    /// What a move cost a task that had all its memory after so long.
    pub fn came(&self, bytes: u64, whole: Micros) -> Micros {
        micros(seconds(whole) + warm_up(bytes))
    }
}

/// Seconds that a task of so many bytes loses until its caches are warm again.
fn warm_up(bytes: u64) -> f64 {
    WARM_UP + bytes as f64 / WARM_UP_BYTES_PER_SECOND
}

/// The freeze of a task of so many bytes before anything was learned, in seconds.
fn expected_freeze(bytes: u64, slowness: f64) -> f64 {
    (FREEZE + bytes as f64 / WALKED_PER_SECOND) * slowness
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

    /// A move whose memory went with the images.
    fn at_once(bytes: u64, frozen: Micros, slowness: f64) -> Journey {
        Journey {
            way: None,
            slowness,
            images: bytes,
            resident: bytes,
            frozen,
            whole: frozen,
        }
    }

    #[test]
    fn the_cost_of_moves_follows_what_moves_cost() {
        let mut estimates = Estimates::default();
        let before = estimates.cost(100 << 20, 1.0, None);
        assert!(before < estimates.cost(1 << 30, 1.0, None));
        for _ in 0..20 {
            estimates.moved(&at_once(100 << 20, Micros::from_secs(10), 1.0));
        }
        let after = seconds(estimates.cost(100 << 20, 1.0, None));
        assert!((10.0..11.0).contains(&after), "{after}");
        for _ in 0..40 {
            estimates.moved(&at_once(100 << 20, Micros::from_millis(100), 1.0));
        }
        assert!(estimates.cost(100 << 20, 1.0, None) < before);
    }

    #[test]
    fn a_large_task_whose_memory_follows_leaves_the_cost_of_a_small_one_as_it_was_and_is_not_nearly_free()
     {
        let mut estimates = Estimates::default();
        let small = estimates.cost(1 << 20, 1.0, None);
        let (resident, frozen) = (2 << 30, Micros::from_millis(900));
        let followed = Journey {
            way: None,
            slowness: 1.0,
            images: 200_000,
            resident,
            frozen,
            whole: Micros::from_secs(12),
        };
        for _ in 0..30 {
            estimates.moved(&followed);
        }
        assert!(
            estimates.cost(1 << 20, 1.0, None).0.abs_diff(small.0) < 15_000,
            "{small:?}"
        );
        let large = seconds(estimates.cost(resident, 1.0, None));
        assert!(
            (14.0..15.0).contains(&large),
            "what it took, and warming up: {large}"
        );
        // The other way round a small one does tell something of large ones, until these have moved.
        let mut estimates = Estimates::default();
        let large = estimates.cost(resident, 1.0, None);
        (0..30).for_each(|_| estimates.moved(&at_once(1 << 20, Micros::from_millis(300), 1.0)));
        assert!(estimates.cost(resident, 1.0, None) > large);
    }

    #[test]
    fn a_task_that_never_moved_is_as_large_as_others_of_its_program() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        assert_eq!(estimates.bytes("worker", 0), BYTES_UNKNOWN);
        estimates.sized(&program, 0);
        estimates.sized(&program, 1 << 30);
        let usual = estimates.bytes("worker", 0);
        assert!(usual.abs_diff(1 << 30) < 1 << 10, "{usual}");
        assert_eq!(
            (estimates.bytes("worker", 7), estimates.bytes("other", 0)),
            (7, BYTES_UNKNOWN)
        );
        assert_eq!(
            estimates.left("worker", Micros::from_secs(9)),
            Micros::from_secs(9),
            "no life was seen"
        );
    }

    #[test]
    fn a_move_by_the_programs_own_means_teaches_nothing_of_others() {
        let mut estimates = Estimates::default();
        let before = estimates.cost(1 << 20, 1.0, None);
        estimates.moved(&Journey {
            resident: 0,
            ..at_once(1 << 20, Micros::from_secs(30), 1.0)
        });
        assert_eq!(estimates.cost(1 << 20, 1.0, None), before);
    }

    #[test]
    fn a_move_between_slow_hosts_costs_more_and_teaches_nothing_false_about_others() {
        assert_eq!(
            (
                slowness(1000.0, 4000.0),
                slowness(100.0, 500.0),
                slowness(0.0, 0.0)
            ),
            (1.0, 6.0, SLOW_MAX)
        );
        let mut estimates = Estimates::default();
        let (ordinary, slow) = (
            estimates.cost(1 << 20, 1.0, None),
            estimates.cost(1 << 20, 20.0, None),
        );
        let more = 19.0 * expected_freeze(1 << 20, 1.0);
        assert!(
            (seconds(slow) - seconds(ordinary) - more).abs() < 1e-5,
            "{slow:?} {ordinary:?}"
        );
        for _ in 0..20 {
            let carried = f64::from(1 << 20) / estimates.links.bytes_per_second(None);
            let as_expected = micros(expected_freeze(1 << 20, 20.0) + carried);
            estimates.moved(&at_once(1 << 20, as_expected, 20.0));
        }
        assert!(estimates.cost(1 << 20, 1.0, None).0.abs_diff(ordinary.0) < 10);
    }

    #[test]
    fn what_was_learned_outlives_its_keeper() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        for _ in 0..LIVES_MIN {
            estimates.ended(&program, Micros::from_secs(100));
        }
        estimates.sized(&program, 5 << 20);
        estimates.moved(&at_once(1 << 20, Micros::from_secs(3), 1.0));
        estimates.moved(&at_once(1 << 30, Micros::from_secs(30), 1.0));
        let again = Estimates::recall(estimates.lessons());
        let (done, bytes) = (Micros::from_secs(30), 1 << 20);
        assert_eq!(again.left("worker", done), estimates.left("worker", done));
        assert_eq!(again.bytes("worker", 0), estimates.bytes("worker", 0));
        assert_eq!(
            again.cost(bytes, 1.0, None),
            estimates.cost(bytes, 1.0, None)
        );
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
