//! Selects the checkpoints that may be removed. Pure functions without I/O.

use super::id::CheckpointId;
use super::{CheckpointInfo, StoreLimits};
use sempa_proto::Tid;
use std::collections::HashMap;

/// The checkpoints that a sweep has removed, and by how much the limits are still exceeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepResult {
    /// The removed checkpoints, in the order of removal.
    pub removed: Vec<CheckpointInfo>,
    /// Number of checkpoints above the limit of the store, because they may not be removed.
    pub checkpoints_over_limit: usize,
    /// Number of bytes above the limit of the store, because their checkpoints may not be removed.
    pub bytes_over_limit: u64,
}

/// Number and total size in bytes of some checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoreUsage {
    pub(super) checkpoints: usize,
    pub(super) bytes: u64,
}

impl StoreUsage {
    pub(super) fn total<'a>(
        checkpoints: impl IntoIterator<Item = &'a CheckpointInfo>,
    ) -> StoreUsage {
        let add = |sum: StoreUsage, checkpoint: &CheckpointInfo| StoreUsage {
            checkpoints: sum.checkpoints + 1,
            bytes: sum.bytes.saturating_add(checkpoint.bytes),
        };
        checkpoints.into_iter().fold(StoreUsage::default(), add)
    }

    /// Returns by how many checkpoints and by how many bytes the limits are exceeded.
    pub(super) fn excess(self, limits: &StoreLimits) -> (usize, u64) {
        (
            self.checkpoints.saturating_sub(limits.checkpoints_max),
            self.bytes.saturating_sub(limits.bytes_max),
        )
    }
}

/// Returns the newest checkpoint of each job, by virtual machine and job. Virtual machines number
/// their jobs independently.
fn newest_by_job(checkpoints: &[CheckpointInfo]) -> HashMap<(&str, Tid), CheckpointId> {
    let mut newest: HashMap<(&str, Tid), CheckpointId> = HashMap::new();
    for checkpoint in checkpoints {
        let latest = newest
            .entry((&checkpoint.vm, checkpoint.job))
            .or_insert(checkpoint.id);
        *latest = checkpoint.id.max(*latest);
    }
    newest
}

/// Returns the checkpoints that may be removed, in the order of removal: first those of jobs that
/// have ended for good, in the order in which the jobs ended; then the others, oldest first.
/// Excluded are the newest checkpoint of each job that has not ended, and those for which `keep`
/// returns true.
pub(super) fn removable(
    checkpoints: &[CheckpointInfo],
    keep: impl Fn(&CheckpointInfo) -> bool,
) -> Vec<&CheckpointInfo> {
    let newest = newest_by_job(checkpoints);
    let is_newest = |checkpoint: &CheckpointInfo| {
        newest.get(&(checkpoint.vm.as_str(), checkpoint.job)) == Some(&checkpoint.id)
    };
    let is_removable = |checkpoint: &&CheckpointInfo| {
        (checkpoint.job_ended_at.is_some() || !is_newest(checkpoint)) && !keep(checkpoint)
    };
    let mut superfluous: Vec<&CheckpointInfo> = checkpoints.iter().filter(is_removable).collect();
    superfluous.sort_by_key(|checkpoint| {
        (
            checkpoint.job_ended_at.is_none(),
            checkpoint.job_ended_at,
            checkpoint.id,
        )
    });
    superfluous
}

/// Returns the number and size of the checkpoints that remain after a new checkpoint of the job
/// `job` is written and all removable checkpoints are removed: the newest checkpoints of the other
/// jobs that have not ended for good.
pub(super) fn remaining_of_other_jobs(
    checkpoints: &[CheckpointInfo],
    vm: &str,
    job: Tid,
) -> StoreUsage {
    let newest = newest_by_job(checkpoints);
    let is_newest = |checkpoint: &&CheckpointInfo| {
        checkpoint.job_ended_at.is_none()
            && newest.get(&(checkpoint.vm.as_str(), checkpoint.job)) == Some(&checkpoint.id)
    };
    StoreUsage::total(
        checkpoints
            .iter()
            .filter(is_newest)
            .filter(|checkpoint| checkpoint.vm != vm || checkpoint.job != job),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    fn info(vm: &str, job: i32, second: u64, bytes: u64) -> CheckpointInfo {
        let (job, started) = (Tid::from_raw(job), Micros::from_secs(second));
        let id = CheckpointId::next_id(std::iter::empty(), job, started);
        CheckpointInfo {
            id,
            vm: vm.into(),
            job,
            started,
            bytes,
            parts: vec![],
            job_ended_at: None,
        }
    }

    /// The newest checkpoint of a job is never removable. Of the other checkpoints, the oldest are
    /// removed first.
    #[test]
    fn newest_checkpoint_of_a_job_is_never_removable() {
        let checkpoints = [
            info("a", 2, 9, 1),
            info("a", 1, 5, 1),
            info("a", 1, 3, 1),
            info("a", 1, 4, 1),
            info("a", 2, 1, 1),
        ];
        let seconds = |checkpoints: Vec<&CheckpointInfo>| {
            checkpoints
                .iter()
                .map(|checkpoint| checkpoint.started.0 / 1_000_000)
                .collect::<Vec<_>>()
        };
        assert_eq!(seconds(removable(&checkpoints, |_| false)), [1, 3, 4]);
        assert_eq!(
            seconds(removable(&checkpoints, |checkpoint| checkpoint.started
                == Micros::from_secs(3))),
            [1, 4]
        );
    }

    /// Checkpoints of ended jobs are removed first, beginning with the job that ended first.
    #[test]
    fn ended_jobs_are_removed_first() {
        let ended = |checkpoint: CheckpointInfo, second| CheckpointInfo {
            job_ended_at: Some(Micros::from_secs(second)),
            ..checkpoint
        };
        let checkpoints = [
            info("a", 1, 1, 1),
            info("a", 1, 2, 1),
            ended(info("a", 2, 8, 1), 20),
            ended(info("a", 3, 9, 1), 10),
            ended(info("a", 3, 7, 1), 10),
        ];
        let seconds = |checkpoints: Vec<&CheckpointInfo>| {
            checkpoints
                .iter()
                .map(|checkpoint| checkpoint.started.0 / 1_000_000)
                .collect::<Vec<_>>()
        };
        assert_eq!(seconds(removable(&checkpoints, |_| false)), [7, 9, 8, 1]);
        assert_eq!(
            seconds(removable(&checkpoints, |checkpoint| checkpoint.job
                == Tid::from_raw(3))),
            [8, 1]
        );
        assert_eq!(
            remaining_of_other_jobs(&checkpoints, "a", Tid::from_raw(9)),
            StoreUsage {
                checkpoints: 1,
                bytes: 1
            }
        );
    }

    #[test]
    fn equal_job_numbers_of_two_vms_are_two_jobs() {
        let checkpoints = [info("a", 1, 3, 10), info("b", 1, 5, 7)];
        assert!(removable(&checkpoints, |_| false).is_empty());
        assert_eq!(
            remaining_of_other_jobs(&checkpoints, "a", Tid::from_raw(1)),
            StoreUsage {
                checkpoints: 1,
                bytes: 7
            }
        );
    }

    #[test]
    fn newest_checkpoint_of_each_other_job_remains() {
        let checkpoints = [
            info("a", 1, 3, 1),
            info("a", 1, 4, 2),
            info("a", 2, 1, 4),
            info("a", 2, 2, 8),
            info("a", 3, 1, 16),
        ];
        assert_eq!(
            remaining_of_other_jobs(&checkpoints, "a", Tid::from_raw(1)),
            StoreUsage {
                checkpoints: 2,
                bytes: 24
            }
        );
        assert_eq!(
            remaining_of_other_jobs(&checkpoints, "a", Tid::from_raw(9)),
            StoreUsage {
                checkpoints: 3,
                bytes: 26
            }
        );
    }
}
