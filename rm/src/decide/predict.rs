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

/// Maximum number of programs with remembered statistics. When another program is added, the
/// program that was updated longest ago is removed.
pub const PROGRAMS_MAX: usize = 1024;
/// Minimum number of ended tasks of a program before their mean work is used.
const COMPLETIONS_MIN: u32 = 3;
/// Minimum weight of the newest observation.
const NEWEST_WEIGHT: f64 = 0.2;
/// Maximum remaining work that is predicted for a task.
pub const WORK_LEFT_MAX: Micros = Micros::from_secs(24 * 3600);
/// Freeze of a migration on an idle ordinary processor, in seconds, without the time that is
/// proportional to memory.
const FREEZE_BASE_SECONDS: f64 = 0.06;
/// Maximum factor by which a host counts as slower than an ordinary one.
const SLOWNESS_MAX: f64 = 100.0;
/// Bytes per second at which a dump scans the memory of the frozen task, even if the dump does not
/// copy the memory.
const DUMP_SCAN_BYTES_PER_SECOND: f64 = 7e9;
/// Minimum memory in bytes for learning the speed of a link. For smaller tasks, transfer and freeze
/// cannot be distinguished.
const LINK_SAMPLE_BYTES_MIN: u64 = 16 << 20;
/// Upper bounds of the size classes of freezes, in bytes. Larger tasks form the last class.
const FREEZE_SIZE_BOUNDS: [u64; 3] = [LINK_SAMPLE_BYTES_MIN, 256 << 20, 4 << 30];
/// Time in seconds that a task loses after a migration until its caches and pages are present,
/// without the time that is proportional to memory.
const WARM_UP_BASE_SECONDS: f64 = 0.2;
/// Bytes of memory per second that become present in caches and pages after a migration.
const WARM_UP_BYTES_PER_SECOND: f64 = 1e9;
/// Assumed memory of a task that has never migrated and whose program's size is unknown, in bytes.
const DEFAULT_TASK_BYTES: u64 = 64 << 20;

#[derive(Clone, Copy, Debug)]
struct ProgramStats {
    ended_count: u32,
    /// Mean natural logarithm of the work in seconds.
    work_log: f64,
    /// Mean natural logarithm of the memory in bytes; `None` until the memory was observed.
    bytes_log: Option<f64>,
    update_number: u64,
}

/// Freeze statistics of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct FreezeStats {
    /// Mean natural logarithm of the ratio of the actual to the expected freeze time.
    ratio_log: f64,
    migration_count: u64,
}

/// Measurements of one completed migration, from its event.
#[derive(Clone, Copy, Debug)]
pub struct MigrationSample {
    /// The two hosts of the migration; `None` if one of them is not known.
    pub pair: Option<HostPair>,
    /// Factor by which the hosts are slower than ordinary ones ([`slowness`]).
    pub slowness: f64,
    /// Size of the images in bytes.
    pub image_bytes: u64,
    /// The task's memory in bytes. 0 if the program saved its own state. Nothing is learned from
    /// such a migration.
    pub resident_bytes: u64,
    /// Time for which the task was frozen.
    pub freeze_time: Micros,
    /// Time from the start of the migration until all memory of the task was at the target.
    pub time_until_complete: Micros,
}

/// Learned values in the form in which they are stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LearnedCosts {
    /// For each program: its name, the number of ended tasks, and the mean logarithms of their work
    /// and memory.
    programs: Vec<(String, u32, f64, Option<f64>)>,
    freeze_stats: [FreezeStats; FREEZE_SIZE_BOUNDS.len() + 1],
    link_speeds: LinkSpeeds,
    gain_feedback: GainFeedback,
    migration_count: u64,
}

impl LearnedCosts {
    /// Returns the values that also apply to another virtual machine. There, host numbers denote
    /// other hosts, so the speeds of host pairs are removed.
    pub fn for_other_hosts(mut self) -> Self {
        self.link_speeds.clear_host_pairs();
        self
    }
}

/// Values learned from earlier tasks and migrations.
#[derive(Clone, Debug, Default)]
pub struct Estimates {
    programs: BTreeMap<Arc<str>, ProgramStats>,
    program_update_count: u64,
    freeze_stats: [FreezeStats; FREEZE_SIZE_BOUNDS.len() + 1],
    link_speeds: LinkSpeeds,
    gain_feedback: GainFeedback,
    migration_count: u64,
}

/// Returns the index of the size class of a task's freeze. `bytes`: the task's memory.
fn size_class(bytes: u64) -> usize {
    FREEZE_SIZE_BOUNDS
        .iter()
        .position(|limit| bytes < *limit)
        .unwrap_or(FREEZE_SIZE_BOUNDS.len())
}

fn seconds(duration: Micros) -> f64 {
    duration.0 as f64 / 1e6
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds.max(0.0) * 1e6) as u64)
}

impl Estimates {
    /// Restores learned values from the history. Ignores values that are not finite or otherwise
    /// invalid.
    pub fn restore(stored_costs: LearnedCosts) -> Self {
        let mut estimates = Self {
            migration_count: stored_costs.migration_count,
            ..Self::default()
        };
        for (program, task_count, mean_log, bytes_log) in stored_costs
            .programs
            .into_iter()
            .take(PROGRAMS_MAX)
            .filter(|l| l.2.is_finite())
        {
            estimates.program_update_count += 1;
            let bytes_log = bytes_log.filter(|log| log.is_finite());
            let stats = ProgramStats {
                ended_count: task_count,
                work_log: mean_log,
                bytes_log,
                update_number: estimates.program_update_count,
            };
            estimates.programs.insert(Arc::from(program), stats);
        }
        if stored_costs
            .freeze_stats
            .iter()
            .all(|f| f.ratio_log.is_finite())
        {
            estimates.freeze_stats = stored_costs.freeze_stats;
        }
        if stored_costs.gain_feedback.is_valid() {
            estimates.gain_feedback = stored_costs.gain_feedback.with_clock_reset();
        }
        if stored_costs.link_speeds.is_valid() {
            estimates.link_speeds = stored_costs.link_speeds;
        }
        estimates
    }

    /// Returns the learned values for the history. Programs are ordered by their last update, the
    /// oldest first.
    pub fn to_learned_costs(&self) -> LearnedCosts {
        let mut programs: Vec<(&Arc<str>, &ProgramStats)> = self.programs.iter().collect();
        programs.sort_by_key(|(_, program_entries)| program_entries.update_number);
        let program_entries = programs
            .into_iter()
            .map(|(name, l)| (name.to_string(), l.ended_count, l.work_log, l.bytes_log))
            .collect();
        let Self {
            freeze_stats: freezes,
            gain_feedback: gains,
            migration_count: migration_total,
            ..
        } = *self;
        LearnedCosts {
            programs: program_entries,
            freeze_stats: freezes,
            link_speeds: self.link_speeds.clone(),
            gain_feedback: gains.with_clock_reset(),
            migration_count: migration_total,
        }
    }

    /// Returns a number that rises with every observation.
    pub fn version(&self) -> u64 {
        self.program_update_count + self.migration_count + self.gain_feedback.observation_count()
    }

    /// Returns the relative speed of the fastest link between `zone` and one of the zones
    /// `peer_zones`. The speed is relative to the faster of the links within the two zones. `None`
    /// until migrations have measured these links.
    pub(super) fn relative_speed(&self, zone: u32, peer_zones: &BTreeSet<u32>) -> Option<f64> {
        self.link_speeds.relative_speed(zone, peer_zones)
    }

    /// Returns the factor by which a computed gain is multiplied. `declared`: the gain was computed
    /// from work that programs declared.
    pub(super) fn confidence(&self, now: Micros, declared: bool) -> f64 {
        self.gain_feedback.confidence(now, declared)
    }

    /// Records the ratio of the actual to the predicted gain in rate of a migrated task.
    pub(super) fn record_rate(&mut self, now: Micros, ratio: f64) {
        self.gain_feedback.record_rate(now, ratio);
    }

    /// Records the ratio of the actual to the predicted remaining work of a migrated task.
    /// `declared`: the work was declared.
    pub(super) fn record_work(&mut self, now: Micros, declared: bool, ratio: f64) {
        self.gain_feedback.record_work(now, declared, ratio);
    }

    /// Returns the statistics of a program for an update and marks them as updated. Adds statistics
    /// for an unknown program; if there are too many programs, removes the one that was updated
    /// longest ago.
    fn program_stats(&mut self, program: &Arc<str>) -> &mut ProgramStats {
        self.program_update_count += 1;
        if !self.programs.contains_key(program) && self.programs.len() >= PROGRAMS_MAX {
            let oldest_program = self
                .programs
                .iter()
                .min_by_key(|(_, entry_stats)| entry_stats.update_number)
                .map(|(name, _)| name.clone());
            self.programs
                .remove(&oldest_program.expect("there are many"));
        }
        let empty_stats = ProgramStats {
            ended_count: 0,
            work_log: 0.0,
            bytes_log: None,
            update_number: 0,
        };
        let entry_stats = self.programs.entry(program.clone()).or_insert(empty_stats);
        entry_stats.update_number = self.program_update_count;
        entry_stats
    }

    /// Records that a task of this program has ended after `work`, in time of an ordinary
    /// processor.
    pub fn record_completion(&mut self, program: &Arc<str>, work: Micros) {
        let log = seconds(work).max(0.001).ln();
        let stats = self.program_stats(program);
        let weight = NEWEST_WEIGHT.max(1.0 / f64::from(stats.ended_count + 1));
        stats.work_log += weight * (log - stats.work_log);
        stats.ended_count = stats.ended_count.saturating_add(1);
    }

    /// Records the memory of a task of this program, in bytes.
    pub fn record_size(&mut self, program: &Arc<str>, bytes: u64) {
        if bytes > 0 {
            let (log, stats) = ((bytes as f64).ln(), self.program_stats(program));
            stats.bytes_log = Some(
                stats
                    .bytes_log
                    .map_or(log, |mean| mean + NEWEST_WEIGHT * (log - mean)),
            );
        }
    }

    /// Returns the expected memory of a task in bytes: `bytes`, its memory at the last migration.
    /// If `bytes` is 0, returns the mean of the task's program, or a default for an unknown
    /// program.
    pub fn expected_bytes(&self, program: &str, bytes: u64) -> u64 {
        let program_mean_log = || self.programs.get(program).and_then(|stats| stats.bytes_log);
        if bytes > 0 {
            bytes
        } else {
            program_mean_log().map_or(DEFAULT_TASK_BYTES, |log| log.exp() as u64)
        }
    }

    /// Learns from a completed migration. Ignores a migration in which the program saved its own
    /// state.
    pub fn record_migration(&mut self, sample: &MigrationSample) {
        let MigrationSample {
            pair: host_pair,
            slowness,
            image_bytes: image_size_bytes,
            resident_bytes: memory_size_bytes,
            freeze_time: freeze_duration,
            time_until_complete: total_time,
        } = *sample;
        if memory_size_bytes == 0 {
            return;
        }
        self.migration_count += 1;
        if total_time > freeze_duration {
            self.record_freeze(memory_size_bytes, slowness, seconds(freeze_duration));
            if memory_size_bytes >= LINK_SAMPLE_BYTES_MIN {
                self.link_speeds.record_transfer(
                    host_pair,
                    memory_size_bytes,
                    seconds(total_time.since(freeze_duration)),
                );
            }
        } else if image_size_bytes >= LINK_SAMPLE_BYTES_MIN {
            // All memory was transferred during the freeze. The transfer took the time by which the
            // freeze exceeds the expected freeze.
            let freeze_duration = seconds(freeze_duration);
            self.link_speeds.record_transfer(
                host_pair,
                image_size_bytes,
                (freeze_duration - self.expected_freeze_seconds(memory_size_bytes, slowness))
                    .max(freeze_duration / 10.0),
            );
        } else {
            let transfer_seconds =
                image_size_bytes as f64 / self.link_speeds.bytes_per_second(host_pair);
            self.record_freeze(
                memory_size_bytes,
                slowness,
                seconds(freeze_duration) - transfer_seconds,
            );
        }
    }

    /// Records a freeze of `seconds`, not including the transfer.
    fn record_freeze(&mut self, bytes: u64, slowness: f64, seconds: f64) {
        let ratio = seconds.max(0.001) / default_freeze_seconds(bytes, slowness);
        let class_stats = &mut self.freeze_stats[size_class(bytes)];
        class_stats.migration_count += 1;
        let weight = NEWEST_WEIGHT.max(1.0 / class_stats.migration_count as f64);
        class_stats.ratio_log += weight * (ratio.clamp(0.05, 100.0).ln() - class_stats.ratio_log);
    }

    /// Returns the expected remaining work of a task of this program that has done `work_done`
    /// work. Until enough tasks of the program have ended, the result is `work_done`: half of the
    /// processes that have run for some time run for at least the same time again (Harchol-Balter
    /// and Downey, 1996).
    pub fn work_left(&self, program: &str, work_done: Micros) -> Micros {
        let mean_work = self
            .programs
            .get(program)
            .filter(|l| l.ended_count >= COMPLETIONS_MIN)
            .map(|l| micros(l.work_log.exp()));
        let predicted_work = match mean_work {
            Some(mean_work) if work_done < mean_work => {
                Micros(mean_work.0 - work_done.0).max(Micros(work_done.0 / 2))
            }
            // The task has done more than the mean work. The remaining work is assumed to be half
            // of the work done.
            Some(_) => Micros(work_done.0 / 2),
            None => work_done,
        };
        predicted_work.min(WORK_LEFT_MAX)
    }

    /// Returns the expected freeze of a task in seconds, without the transfer. If no task of the
    /// same size class has migrated, the next smaller class with a migration is used. Larger
    /// classes are never used.
    fn expected_freeze_seconds(&self, bytes: u64, slowness: f64) -> f64 {
        let observed_stats = self.freeze_stats[..=size_class(bytes)]
            .iter()
            .rev()
            .find(|freezes| freezes.migration_count > 0);
        default_freeze_seconds(bytes, slowness)
            * observed_stats.map_or(1.0, |freezes| freezes.ratio_log.exp())
    }

    /// Returns the expected cost of a migration: freeze, transfer and warm-up. `slowness`: result
    /// of the function [`slowness`]. `pair`: the hosts; `None` if the target is not known yet.
    ///
    /// During post-copy a task runs only until it needs a missing page. The transfer therefore
    /// counts as if the task were frozen.
    pub fn migration_cost(&self, bytes: u64, slowness: f64, pair: Option<HostPair>) -> Micros {
        let transfer_seconds = bytes as f64 / self.link_speeds.bytes_per_second(pair);
        micros(
            self.expected_freeze_seconds(bytes, slowness)
                + transfer_seconds
                + warm_up_seconds(bytes),
        )
    }

    /// Returns the actual cost of a migration of `bytes` of memory. `total_time`: time until all
    /// memory was at the target.
    pub fn actual_cost(&self, bytes: u64, total_time: Micros) -> Micros {
        micros(seconds(total_time) + warm_up_seconds(bytes))
    }
}

/// Returns the time in seconds that a task loses until its caches and pages are present.
fn warm_up_seconds(bytes: u64) -> f64 {
    WARM_UP_BASE_SECONDS + bytes as f64 / WARM_UP_BYTES_PER_SECOND
}

/// Returns the freeze in seconds that is assumed before any observation.
fn default_freeze_seconds(bytes: u64, slowness: f64) -> f64 {
    (FREEZE_BASE_SECONDS + bytes as f64 / DUMP_SCAN_BYTES_PER_SECOND) * slowness
}

/// Returns the factor by which the hosts of a migration are slower than an idle ordinary processor.
///
/// `source_rate` and `target_rate` are the rates that the task gets at the source and at the
/// target, in thousandths of an ordinary processor. Half of the work of the migration is done at
/// the source, and the other half at the target. A faster host counts as an ordinary one.
pub fn slowness(source_rate: f64, target_rate: f64) -> f64 {
    let host_slowness = |rate: f64| (1e3 / rate.max(1.0)).clamp(1.0, SLOWNESS_MAX);
    (host_slowness(source_rate) + host_slowness(target_rate)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Until enough tasks of a program have ended, the expected remaining work of a task equals the
    /// work done. Then it follows from the mean work of the ended tasks.
    #[test]
    fn work_left_follows_completed_tasks_of_program() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        let remaining_seconds = |e: &Estimates, work_seconds| {
            seconds(e.work_left("worker", Micros::from_secs(work_seconds)))
        };
        assert_eq!(remaining_seconds(&estimates, 30), 30.0);
        for _ in 0..COMPLETIONS_MIN {
            estimates.record_completion(&program, Micros::from_secs(100));
        }
        assert!((remaining_seconds(&estimates, 30) - 70.0).abs() < 0.01);
        assert_eq!(
            remaining_seconds(&estimates, 200),
            100.0,
            "it has outlived the others"
        );
        assert_eq!(
            seconds(estimates.work_left("other", Micros::from_secs(7))),
            7.0
        );
    }

    /// Returns a migration whose memory was part of the images.
    fn migration_without_post_copy(
        bytes: u64,
        freeze_duration: Micros,
        slowness: f64,
    ) -> MigrationSample {
        MigrationSample {
            pair: None,
            slowness,
            image_bytes: bytes,
            resident_bytes: bytes,
            freeze_time: freeze_duration,
            time_until_complete: freeze_duration,
        }
    }

    /// The predicted cost of migrations approaches their observed cost.
    #[test]
    fn predicted_cost_follows_observed_cost() {
        let mut estimates = Estimates::default();
        let initial_cost = estimates.migration_cost(100 << 20, 1.0, None);
        assert!(initial_cost < estimates.migration_cost(1 << 30, 1.0, None));
        for _ in 0..20 {
            estimates.record_migration(&migration_without_post_copy(
                100 << 20,
                Micros::from_secs(10),
                1.0,
            ));
        }
        let learned_cost = seconds(estimates.migration_cost(100 << 20, 1.0, None));
        assert!((10.0..11.0).contains(&learned_cost), "{learned_cost}");
        for _ in 0..40 {
            estimates.record_migration(&migration_without_post_copy(
                100 << 20,
                Micros::from_millis(100),
                1.0,
            ));
        }
        assert!(estimates.migration_cost(100 << 20, 1.0, None) < initial_cost);
    }

    /// Post-copy of a large task does not change the predicted cost of a small task. The predicted
    /// cost of the large task includes the transfer.
    #[test]
    fn large_post_copy_keeps_cost_of_small_tasks() {
        let mut estimates = Estimates::default();
        let small_cost = estimates.migration_cost(1 << 20, 1.0, None);
        let (memory_size_bytes, freeze_duration) = (2 << 30, Micros::from_millis(900));
        let post_copy_sample = MigrationSample {
            pair: None,
            slowness: 1.0,
            image_bytes: 200_000,
            resident_bytes: memory_size_bytes,
            freeze_time: freeze_duration,
            time_until_complete: Micros::from_secs(12),
        };
        for _ in 0..30 {
            estimates.record_migration(&post_copy_sample);
        }
        assert!(
            estimates
                .migration_cost(1 << 20, 1.0, None)
                .0
                .abs_diff(small_cost.0)
                < 15_000,
            "{small_cost:?}"
        );
        let large_cost = seconds(estimates.migration_cost(memory_size_bytes, 1.0, None));
        assert!(
            (14.0..15.0).contains(&large_cost),
            "what it took, and warming up: {large_cost}"
        );
        // Measurements of small tasks are used for large ones, until large ones have migrated.
        let mut estimates = Estimates::default();
        let large_cost = estimates.migration_cost(memory_size_bytes, 1.0, None);
        (0..30).for_each(|_| {
            estimates.record_migration(&migration_without_post_copy(
                1 << 20,
                Micros::from_millis(300),
                1.0,
            ))
        });
        assert!(estimates.migration_cost(memory_size_bytes, 1.0, None) > large_cost);
    }

    /// The expected memory of a task that has never migrated is the mean of its program.
    #[test]
    fn unmigrated_task_has_its_programs_size() {
        let (mut estimates, program) = (Estimates::default(), Arc::from("worker"));
        assert_eq!(estimates.expected_bytes("worker", 0), DEFAULT_TASK_BYTES);
        estimates.record_size(&program, 0);
        estimates.record_size(&program, 1 << 30);
        let expected_bytes = estimates.expected_bytes("worker", 0);
        assert!(
            expected_bytes.abs_diff(1 << 30) < 1 << 10,
            "{expected_bytes}"
        );
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
    fn self_saved_state_does_not_change_predictions() {
        let mut estimates = Estimates::default();
        let initial_cost = estimates.migration_cost(1 << 20, 1.0, None);
        estimates.record_migration(&MigrationSample {
            resident_bytes: 0,
            ..migration_without_post_copy(1 << 20, Micros::from_secs(30), 1.0)
        });
        assert_eq!(estimates.migration_cost(1 << 20, 1.0, None), initial_cost);
    }

    /// A migration between slow hosts costs more, and does not distort the predictions for other
    /// hosts.
    #[test]
    fn slow_hosts_do_not_distort_cost_of_other_hosts() {
        assert_eq!(
            (
                slowness(1000.0, 4000.0),
                slowness(100.0, 500.0),
                slowness(0.0, 0.0)
            ),
            (1.0, 6.0, SLOWNESS_MAX)
        );
        let mut estimates = Estimates::default();
        let (ordinary_cost, slow_cost) = (
            estimates.migration_cost(1 << 20, 1.0, None),
            estimates.migration_cost(1 << 20, 20.0, None),
        );
        let extra_seconds = 19.0 * default_freeze_seconds(1 << 20, 1.0);
        assert!(
            (seconds(slow_cost) - seconds(ordinary_cost) - extra_seconds).abs() < 1e-5,
            "{slow_cost:?} {ordinary_cost:?}"
        );
        for _ in 0..20 {
            let transfer_seconds =
                f64::from(1 << 20) / estimates.link_speeds.bytes_per_second(None);
            let expected_time = micros(default_freeze_seconds(1 << 20, 20.0) + transfer_seconds);
            estimates.record_migration(&migration_without_post_copy(1 << 20, expected_time, 20.0));
        }
        assert!(
            estimates
                .migration_cost(1 << 20, 1.0, None)
                .0
                .abs_diff(ordinary_cost.0)
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
        estimates.record_migration(&migration_without_post_copy(
            1 << 20,
            Micros::from_secs(3),
            1.0,
        ));
        estimates.record_migration(&migration_without_post_copy(
            1 << 30,
            Micros::from_secs(30),
            1.0,
        ));
        let restored_estimates = Estimates::restore(estimates.to_learned_costs());
        let (work_done, bytes) = (Micros::from_secs(30), 1 << 20);
        assert_eq!(
            restored_estimates.work_left("worker", work_done),
            estimates.work_left("worker", work_done)
        );
        assert_eq!(
            restored_estimates.expected_bytes("worker", 0),
            estimates.expected_bytes("worker", 0)
        );
        assert_eq!(
            restored_estimates.migration_cost(bytes, 1.0, None),
            estimates.migration_cost(bytes, 1.0, None)
        );
        assert_eq!(
            restored_estimates.to_learned_costs(),
            estimates.to_learned_costs()
        );
    }

    /// When [`PROGRAMS_MAX`] is exceeded, the program that was updated longest ago is removed.
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
