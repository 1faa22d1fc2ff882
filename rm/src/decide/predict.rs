//! Predicts the remaining work and the memory of tasks, and the cost of migrations. Learns from
//! ended tasks and completed migrations.
//!
//! Work is the time that a task needs alone on an ordinary processor (speed 1000). The cost of a
//! migration has three parts:
//!
//! - the freeze, learned by size class, because measurements of large tasks do not apply to small
//!   ones;
//! - the transfer, learned by link ([`super::link_speeds`]), whether the memory is part of the
//!   images or follows by post-copy;
//! - the warm-up of caches and pages, at a fixed rate.

use super::gain_feedback::GainFeedback;
use super::link_speeds::{HostPair, LinkSpeeds};
use sempa_proto::Micros;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Maximum number of programs with remembered statistics. Beyond it, the program that was updated
/// longest ago is dropped.
pub const PROGRAMS_MAX: usize = 1024;
/// Minimum number of ended tasks of a program before their mean work is used.
const COMPLETIONS_MIN: u32 = 3;
/// Minimum weight of the newest observation.
const NEWEST_WEIGHT: f64 = 0.2;
/// Maximum remaining work that is predicted for a task.
pub const WORK_LEFT_MAX: Micros = Micros::from_secs(24 * 3600);
/// Freeze of a migration on an idle ordinary processor, in seconds. The part proportional to memory
/// is added to it.
const FREEZE_BASE_SECONDS: f64 = 0.06;
/// Maximum factor by which a host counts as slower than an ordinary one.
const SLOWNESS_MAX: f64 = 100.0;
/// Bytes per second that a dump scans of the memory of the frozen task, even if it does not copy
/// them.
const DUMP_SCAN_BYTES_PER_SECOND: f64 = 7e9;
/// Minimum memory in bytes for learning the speed of a link. For smaller tasks, transfer and freeze
/// cannot be distinguished.
const LINK_SAMPLE_BYTES_MIN: u64 = 16 << 20;
/// Upper bounds of the size classes of freezes, in bytes. Larger tasks form the last class.
const FREEZE_SIZE_BOUNDS: [u64; 3] = [LINK_SAMPLE_BYTES_MIN, 256 << 20, 4 << 30];
/// Time in seconds that a task loses after a migration until its caches and pages are present. The
/// part proportional to memory is added to it.
const WARM_UP_BASE_SECONDS: f64 = 0.2;
/// Bytes of memory per second for which caches and pages become present after a migration.
const WARM_UP_BYTES_PER_SECOND: f64 = 1e9;
/// Assumed memory of a task that has never migrated and whose program's size is unknown, in bytes.
const DEFAULT_TASK_BYTES: u64 = 64 << 20;

#[derive(Clone, Copy, Debug)]
struct ProgramStats {
    count: u32,
    /// Mean logarithm of the work in seconds.
    mean_log: f64,
    /// Mean logarithm of the memory in bytes; `None` until it was observed.
    bytes_log: Option<f64>,
    updated: u64,
}

/// Freeze statistics of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct FreezeStats {
    /// Mean logarithm of the ratio of the actual to the expected freeze time.
    bias: f64,
    moves: u64,
}

/// Measurements of one completed migration.
#[derive(Clone, Copy, Debug)]
pub struct MigrationSample {
    /// The two hosts, if they are known.
    pub pair: Option<HostPair>,
    /// Factor by which the hosts do the work of the migration slower than ordinary ones
    /// ([`slowness`]).
    pub slowness: f64,
    /// Size of the images in bytes.
    pub image_bytes: u64,
    /// The task's memory in bytes. 0 if the program saved its own state; nothing is learned from
    /// such a migration.
    pub resident_bytes: u64,
    /// Time for which the task was frozen.
    pub frozen: Micros,
    /// Time from the start of the migration until all memory of the task was at the target.
    pub complete_after: Micros,
}

/// Learned values in the form in which they are stored. `lives` contains for each program: its
/// name, the number of ended tasks, and the mean logarithms of their work and memory. `moves` is
/// the number of migrations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LearnedCosts {
    lives: Vec<(String, u32, f64, Option<f64>)>,
    freezes: [FreezeStats; FREEZE_SIZE_BOUNDS.len() + 1],
    links: LinkSpeeds,
    gains: GainFeedback,
    moves: u64,
}

impl LearnedCosts {
    /// Returns the values that also apply to another virtual machine, in which host numbers denote
    /// other hosts.
    pub fn for_other_hosts(mut self) -> LearnedCosts {
        self.links.forget_hosts();
        self
    }
}

/// Values learned from earlier tasks and migrations.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    programs: BTreeMap<Arc<str>, ProgramStats>,
    updates: u64,
    freezes: [FreezeStats; FREEZE_SIZE_BOUNDS.len() + 1],
    links: LinkSpeeds,
    gains: GainFeedback,
    moves: u64,
}

/// Returns the index of the size class for the freeze of a task.
fn size_class(bytes: u64) -> usize {
    FREEZE_SIZE_BOUNDS
        .iter()
        .position(|limit| bytes < *limit)
        .unwrap_or(FREEZE_SIZE_BOUNDS.len())
}

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds.max(0.0) * 1e6) as u64)
}

impl Estimates {
    /// Restores learned values from the history. Ignores values that are not finite.
    pub fn restore(learned: LearnedCosts) -> Estimates {
        let mut estimates = Estimates {
            moves: learned.moves,
            ..Estimates::default()
        };
        for (program, count, mean_log, bytes_log) in learned
            .lives
            .into_iter()
            .take(PROGRAMS_MAX)
            .filter(|l| l.2.is_finite())
        {
            estimates.updates += 1;
            let bytes_log = bytes_log.filter(|log| log.is_finite());
            let lives = ProgramStats {
                count,
                mean_log,
                bytes_log,
                updated: estimates.updates,
            };
            estimates.programs.insert(Arc::from(program), lives);
        }
        if learned.freezes.iter().all(|f| f.bias.is_finite()) {
            estimates.freezes = learned.freezes;
        }
        if learned.gains.is_valid() {
            estimates.gains = learned.gains.on_new_clock();
        }
        if learned.links.is_valid() {
            estimates.links = learned.links;
        }
        estimates
    }

    /// Returns the learned values for the history. Programs are ordered by their last update, the
    /// oldest first.
    pub fn to_learned_costs(&self) -> LearnedCosts {
        let mut programs: Vec<(&Arc<str>, &ProgramStats)> = self.programs.iter().collect();
        programs.sort_by_key(|(_, lives)| lives.updated);
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
        LearnedCosts {
            lives,
            freezes,
            links: self.links.clone(),
            gains: gains.on_new_clock(),
            moves,
        }
    }

    /// Returns a number that changes with every observation.
    pub fn version(&self) -> u64 {
        self.updates + self.moves + self.gains.observations()
    }

    /// Returns the relative speed of the fastest link between a zone and one of the zones
    /// `peers`: compared with the faster of the links within the two zones. `None` until
    /// migrations have measured these links.
    pub(super) fn relative_speed(&self, zone: u32, peers: &BTreeSet<u32>) -> Option<f64> {
        self.links.relative_speed(zone, peers)
    }

    /// Returns the factor by which a computed gain is multiplied. `declared`: the gain was computed
    /// from work that programs declared.
    pub(super) fn confidence(&self, now: Micros, declared: bool) -> f64 {
        self.gains.confidence(now, declared)
    }

    /// Records the ratio of the actual to the predicted gain in rate of a migrated task.
    pub(super) fn record_rate(&mut self, now: Micros, ratio: f64) {
        self.gains.record_rate(now, ratio);
    }

    /// Records the ratio of the actual to the predicted remaining work of a migrated task.
    /// `declared`: the work was declared.
    pub(super) fn record_work(&mut self, now: Micros, declared: bool, ratio: f64) {
        self.gains.record_work(now, declared, ratio);
    }

    /// Returns the statistics of a program for an update, and marks them as the most recently
    /// updated.
    fn program_stats(&mut self, program: &Arc<str>) -> &mut ProgramStats {
        self.updates += 1;
        if !self.programs.contains_key(program) && self.programs.len() >= PROGRAMS_MAX {
            let oldest = self
                .programs
                .iter()
                .min_by_key(|(_, lives)| lives.updated)
                .map(|(name, _)| name.clone());
            self.programs.remove(&oldest.expect("there are many"));
        }
        let fresh = ProgramStats {
            count: 0,
            mean_log: 0.0,
            bytes_log: None,
            updated: 0,
        };
        let lives = self.programs.entry(program.clone()).or_insert(fresh);
        lives.updated = self.updates;
        lives
    }

    /// Records that a task of this program ended after `work`.
    pub fn record_completion(&mut self, program: &Arc<str>, work: Micros) {
        let log = seconds(work).max(0.001).ln();
        let lives = self.program_stats(program);
        let weight = NEWEST_WEIGHT.max(1.0 / f64::from(lives.count + 1));
        lives.mean_log += weight * (log - lives.mean_log);
        lives.count = lives.count.saturating_add(1);
    }

    /// Records the memory of a task of this program, in bytes.
    pub fn record_size(&mut self, program: &Arc<str>, bytes: u64) {
        if bytes > 0 {
            let (log, lives) = ((bytes as f64).ln(), self.program_stats(program));
            lives.bytes_log = Some(
                lives
                    .bytes_log
                    .map_or(log, |mean| mean + NEWEST_WEIGHT * (log - mean)),
            );
        }
    }

    /// Returns the expected memory of a task. This is `bytes`, the memory at its last migration, or
    /// the mean of its program if `bytes` is 0.
    pub fn expected_bytes(&self, program: &str, bytes: u64) -> u64 {
        let usual = || self.programs.get(program).and_then(|lives| lives.bytes_log);
        if bytes > 0 {
            bytes
        } else {
            usual().map_or(DEFAULT_TASK_BYTES, |log| log.exp() as u64)
        }
    }

    /// Learns from a completed migration.
    pub fn record_migration(&mut self, journey: &MigrationSample) {
        let MigrationSample {
            pair: way,
            slowness,
            image_bytes: images,
            resident_bytes: resident,
            frozen,
            complete_after: whole,
        } = *journey;
        if resident == 0 {
            return;
        }
        self.moves += 1;
        if whole > frozen {
            self.record_freeze(resident, slowness, seconds(frozen));
            if resident >= LINK_SAMPLE_BYTES_MIN {
                self.links
                    .record_transfer(way, resident, seconds(whole.since(frozen)));
            }
        } else if images >= LINK_SAMPLE_BYTES_MIN {
            // All memory was transferred during the freeze. The part of it that exceeds the
            // expected freeze was the transfer.
            let frozen = seconds(frozen);
            self.links.record_transfer(
                way,
                images,
                (frozen - self.expected_freeze_of(resident, slowness)).max(frozen / 10.0),
            );
        } else {
            let carried = images as f64 / self.links.bytes_per_second(way);
            self.record_freeze(resident, slowness, seconds(frozen) - carried);
        }
    }

    /// Records a freeze of `seconds`, not including the transfer.
    fn record_freeze(&mut self, bytes: u64, slowness: f64, seconds: f64) {
        let ratio = seconds.max(0.001) / default_freeze(bytes, slowness);
        let freezes = &mut self.freezes[size_class(bytes)];
        freezes.moves += 1;
        let weight = NEWEST_WEIGHT.max(1.0 / freezes.moves as f64);
        freezes.bias += weight * (ratio.clamp(0.05, 100.0).ln() - freezes.bias);
    }

    /// Returns the expected remaining work of a task of this program that has done `done` work.
    /// Without observations this is `done`: half of the processes that have run for some time run
    /// for at least that time again (Harchol-Balter and Downey, 1996).
    pub fn work_left(&self, program: &str, done: Micros) -> Micros {
        let usual = self
            .programs
            .get(program)
            .filter(|l| l.count >= COMPLETIONS_MIN)
            .map(|l| micros(l.mean_log.exp()));
        let left = match usual {
            Some(usual) if done < usual => Micros(usual.0 - done.0).max(Micros(done.0 / 2)),
            // The task has done more than the mean work. The remaining work is assumed to be half
            // of the work done.
            Some(_) => Micros(done.0 / 2),
            None => done,
        };
        left.min(WORK_LEFT_MAX)
    }

    /// Returns the expected freeze of a task in seconds, not including the transfer. If no task of
    /// its size class has migrated, the next smaller class is used. Larger classes are not.
    fn expected_freeze_of(&self, bytes: u64, slowness: f64) -> f64 {
        let observed = self.freezes[..=size_class(bytes)]
            .iter()
            .rev()
            .find(|freezes| freezes.moves > 0);
        default_freeze(bytes, slowness) * observed.map_or(1.0, |freezes| freezes.bias.exp())
    }

    /// Returns the expected cost of a migration: freeze, transfer and warm-up. `slowness`: see
    /// [`slowness`]. `pair`: the hosts, `None` if the target is not known yet.
    ///
    /// During post-copy a task runs only until it needs a missing page. So the transfer counts as
    /// if the task were frozen.
    pub fn migration_cost(&self, bytes: u64, slowness: f64, pair: Option<HostPair>) -> Micros {
        let transfer = bytes as f64 / self.links.bytes_per_second(pair);
        micros(self.expected_freeze_of(bytes, slowness) + transfer + warm_up(bytes))
    }

    /// Returns the actual cost of a migration. `complete_after`: time until all memory was at the
    /// target.
    pub fn actual_cost(&self, bytes: u64, whole: Micros) -> Micros {
        micros(seconds(whole) + warm_up(bytes))
    }
}

/// Returns the time in seconds that a task loses until its caches and pages are present.
fn warm_up(bytes: u64) -> f64 {
    WARM_UP_BASE_SECONDS + bytes as f64 / WARM_UP_BYTES_PER_SECOND
}

/// Returns the freeze in seconds that is assumed before any observation.
fn default_freeze(bytes: u64, slowness: f64) -> f64 {
    (FREEZE_BASE_SECONDS + bytes as f64 / DUMP_SCAN_BYTES_PER_SECOND) * slowness
}

/// Returns the factor by which the hosts of a migration do the work of the migration slower than an
/// idle ordinary processor.
///
/// Half of the work is done at the source, where the task gets `has` thousandths of an ordinary
/// processor. The other half is done at the target, where it gets `rate`. A faster host counts as
/// an ordinary one.
pub fn slowness(source_rate: f64, target_rate: f64) -> f64 {
    let slow = |rate: f64| (1e3 / rate.max(1.0)).clamp(1.0, SLOWNESS_MAX);
    (slow(source_rate) + slow(target_rate)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected remaining work of a task equals the work done, until other tasks of its program
    /// have ended.
    #[test]
    fn work_left_follows_completed_tasks_of_program() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        let left = |e: &Estimates, done| seconds(e.work_left("worker", Micros::from_secs(done)));
        assert_eq!(left(&estimates, 30), 30.0);
        for _ in 0..COMPLETIONS_MIN {
            estimates.record_completion(&program, Micros::from_secs(100));
        }
        assert!((left(&estimates, 30) - 70.0).abs() < 0.01);
        assert_eq!(left(&estimates, 200), 100.0, "it has outlived the others");
        assert_eq!(
            seconds(estimates.work_left("other", Micros::from_secs(7))),
            7.0
        );
    }

    /// Returns a migration whose memory was part of the images.
    fn at_once(bytes: u64, frozen: Micros, slowness: f64) -> MigrationSample {
        MigrationSample {
            pair: None,
            slowness,
            image_bytes: bytes,
            resident_bytes: bytes,
            frozen,
            complete_after: frozen,
        }
    }

    /// The predicted cost of migrations approaches their observed cost.
    #[test]
    fn predicted_cost_follows_observed_cost() {
        let mut estimates = Estimates::default();
        let before = estimates.migration_cost(100 << 20, 1.0, None);
        assert!(before < estimates.migration_cost(1 << 30, 1.0, None));
        for _ in 0..20 {
            estimates.record_migration(&at_once(100 << 20, Micros::from_secs(10), 1.0));
        }
        let after = seconds(estimates.migration_cost(100 << 20, 1.0, None));
        assert!((10.0..11.0).contains(&after), "{after}");
        for _ in 0..40 {
            estimates.record_migration(&at_once(100 << 20, Micros::from_millis(100), 1.0));
        }
        assert!(estimates.migration_cost(100 << 20, 1.0, None) < before);
    }

    /// Post-copy of a large task does not change the predicted cost of a small one, and its own
    /// predicted cost includes the transfer.
    #[test]
    fn large_post_copy_keeps_cost_of_small_tasks() {
        let mut estimates = Estimates::default();
        let small = estimates.migration_cost(1 << 20, 1.0, None);
        let (resident, frozen) = (2 << 30, Micros::from_millis(900));
        let followed = MigrationSample {
            pair: None,
            slowness: 1.0,
            image_bytes: 200_000,
            resident_bytes: resident,
            frozen,
            complete_after: Micros::from_secs(12),
        };
        for _ in 0..30 {
            estimates.record_migration(&followed);
        }
        assert!(
            estimates
                .migration_cost(1 << 20, 1.0, None)
                .0
                .abs_diff(small.0)
                < 15_000,
            "{small:?}"
        );
        let large = seconds(estimates.migration_cost(resident, 1.0, None));
        assert!(
            (14.0..15.0).contains(&large),
            "what it took, and warming up: {large}"
        );
        // Measurements of small tasks are used for large ones, until large ones have migrated.
        let mut estimates = Estimates::default();
        let large = estimates.migration_cost(resident, 1.0, None);
        (0..30).for_each(|_| {
            estimates.record_migration(&at_once(1 << 20, Micros::from_millis(300), 1.0))
        });
        assert!(estimates.migration_cost(resident, 1.0, None) > large);
    }

    /// The expected memory of a task that has never migrated is the mean of its program.
    #[test]
    fn unmigrated_task_has_its_programs_size() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        assert_eq!(estimates.expected_bytes("worker", 0), DEFAULT_TASK_BYTES);
        estimates.record_size(&program, 0);
        estimates.record_size(&program, 1 << 30);
        let usual = estimates.expected_bytes("worker", 0);
        assert!(usual.abs_diff(1 << 30) < 1 << 10, "{usual}");
        assert_eq!(
            (
                estimates.expected_bytes("worker", 7),
                estimates.expected_bytes("other", 0)
            ),
            (7, DEFAULT_TASK_BYTES)
        );
        assert_eq!(
            estimates.work_left("worker", Micros::from_secs(9)),
            Micros::from_secs(9),
            "no life was seen"
        );
    }

    /// A migration in which the program saved its own state does not change the predictions.
    #[test]
    fn self_saved_state_teaches_nothing() {
        let mut estimates = Estimates::default();
        let before = estimates.migration_cost(1 << 20, 1.0, None);
        estimates.record_migration(&MigrationSample {
            resident_bytes: 0,
            ..at_once(1 << 20, Micros::from_secs(30), 1.0)
        });
        assert_eq!(estimates.migration_cost(1 << 20, 1.0, None), before);
    }

    /// A migration between slow hosts costs more, and does not distort the predictions for other
    /// hosts.
    #[test]
    fn slow_hosts_cost_more_and_teach_nothing_false() {
        assert_eq!(
            (
                slowness(1000.0, 4000.0),
                slowness(100.0, 500.0),
                slowness(0.0, 0.0)
            ),
            (1.0, 6.0, SLOWNESS_MAX)
        );
        let mut estimates = Estimates::default();
        let (ordinary, slow) = (
            estimates.migration_cost(1 << 20, 1.0, None),
            estimates.migration_cost(1 << 20, 20.0, None),
        );
        let more = 19.0 * default_freeze(1 << 20, 1.0);
        assert!(
            (seconds(slow) - seconds(ordinary) - more).abs() < 1e-5,
            "{slow:?} {ordinary:?}"
        );
        for _ in 0..20 {
            let carried = f64::from(1 << 20) / estimates.links.bytes_per_second(None);
            let as_expected = micros(default_freeze(1 << 20, 20.0) + carried);
            estimates.record_migration(&at_once(1 << 20, as_expected, 20.0));
        }
        assert!(
            estimates
                .migration_cost(1 << 20, 1.0, None)
                .0
                .abs_diff(ordinary.0)
                < 10
        );
    }

    /// Predictions are the same after learned values were stored and restored.
    #[test]
    fn learned_values_survive_storing() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        for _ in 0..COMPLETIONS_MIN {
            estimates.record_completion(&program, Micros::from_secs(100));
        }
        estimates.record_size(&program, 5 << 20);
        estimates.record_migration(&at_once(1 << 20, Micros::from_secs(3), 1.0));
        estimates.record_migration(&at_once(1 << 30, Micros::from_secs(30), 1.0));
        let again = Estimates::restore(estimates.to_learned_costs());
        let (done, bytes) = (Micros::from_secs(30), 1 << 20);
        assert_eq!(
            again.work_left("worker", done),
            estimates.work_left("worker", done)
        );
        assert_eq!(
            again.expected_bytes("worker", 0),
            estimates.expected_bytes("worker", 0)
        );
        assert_eq!(
            again.migration_cost(bytes, 1.0, None),
            estimates.migration_cost(bytes, 1.0, None)
        );
        assert_eq!(again.to_learned_costs(), estimates.to_learned_costs());
    }

    /// Beyond the maximum, the programs that were updated longest ago are dropped.
    #[test]
    fn excess_programs_are_dropped() {
        let mut estimates = Estimates::default();
        for n in 0..PROGRAMS_MAX + 10 {
            estimates.record_completion(&Arc::from(format!("p{n}")), Micros::from_secs(1));
        }
        assert_eq!(estimates.programs.len(), PROGRAMS_MAX);
        assert!(!estimates.programs.contains_key("p0") && estimates.programs.contains_key("p1033"));
    }
}
