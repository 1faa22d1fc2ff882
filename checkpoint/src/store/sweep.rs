//! Selects the checkpoints that may be removed. Pure functions without I/O.

use super::id::CheckpointId;
use super::{CheckpointInfo, StoreLimits};
use sempa_proto::Tid;
use std::collections::HashMap;

/// The checkpoints that a sweep has removed, and the amounts by which the limits are still
/// exceeded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepResult {
    /// The removed checkpoints, in the order of removal.
    pub removed: Vec<CheckpointInfo>,
    /// Number of checkpoints above the limit of the store. The excess remains because these
    /// checkpoints may not be removed.
    pub checkpoints_over_limit: usize,
    /// Number of bytes above the limit of the store. The excess remains because the checkpoints may
    /// not be removed.
    pub bytes_over_limit: u64,
}

/// Number and total size in bytes of some checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoreUsage {
    pub(super) checkpoints: usize,
    pub(super) bytes: u64,
}

impl StoreUsage {
    pub(super) fn sum<'a>(checkpoints: impl IntoIterator<Item = &'a CheckpointInfo>) -> Self {
        let add = |sum: Self, checkpoint: &CheckpointInfo| Self {
            checkpoints: sum.checkpoints + 1,
            bytes: sum.bytes.saturating_add(checkpoint.bytes),
        };
        checkpoints.into_iter().fold(Self::default(), add)
    }

    /// Returns by how many checkpoints (first) and by how many bytes (second) the limits are
    /// exceeded.
    pub(super) fn excess(self, limits: &StoreLimits) -> (usize, u64) {
        (
            self.checkpoints.saturating_sub(limits.checkpoints_max),
            self.bytes.saturating_sub(limits.bytes_max),
        )
    }
}

/// Returns the name of the newest checkpoint of each job that is not marked as damaged, by virtual
/// machine and job. Virtual machines number their jobs independently.
fn newest_by_job(checkpoints: &[CheckpointInfo]) -> HashMap<(&str, Tid), CheckpointId> {
    let mut newest_ids: HashMap<(&str, Tid), CheckpointId> = HashMap::new();
    for checkpoint in checkpoints.iter().filter(|c| c.damage.is_none()) {
        let latest_id = newest_ids
            .entry((&checkpoint.vm, checkpoint.job))
            .or_insert(checkpoint.id);
        *latest_id = checkpoint.id.max(*latest_id);
    }
    newest_ids
}

/// Returns the checkpoints that may be removed, in the order of removal: first the checkpoints of
/// jobs with an end mark, in the order in which the jobs ended; then the other checkpoints, oldest
/// first. Not returned are the newest checkpoint of each job without an end mark, and checkpoints
/// for which `must_remain` returns true.
pub(super) fn select_removable(
    checkpoints: &[CheckpointInfo],
    must_remain: impl Fn(&CheckpointInfo) -> bool,
) -> Vec<&CheckpointInfo> {
    let newest_ids = newest_by_job(checkpoints);
    let is_newest = |checkpoint: &CheckpointInfo| {
        newest_ids.get(&(checkpoint.vm.as_str(), checkpoint.job)) == Some(&checkpoint.id)
    };
    let is_removable = |checkpoint: &&CheckpointInfo| {
        (checkpoint.job_ended_at.is_some() || !is_newest(checkpoint)) && !must_remain(checkpoint)
    };
    let mut removable_checkpoints: Vec<&CheckpointInfo> =
        checkpoints.iter().filter(is_removable).collect();
    removable_checkpoints.sort_by_key(|checkpoint| {
        (
            checkpoint.job_ended_at.is_none(),
            checkpoint.job_ended_at,
            checkpoint.id,
        )
    });
    removable_checkpoints
}

/// Returns the number and size of the other checkpoints that remain after a new checkpoint of the
/// job `job` is written and all removable checkpoints are removed. The remaining ones are the
/// newest checkpoints of all other jobs without an end mark.
pub(super) fn usage_of_other_jobs(
    checkpoints: &[CheckpointInfo],
    vm: &str,
    job: Tid,
) -> StoreUsage {
    let newest_ids = newest_by_job(checkpoints);
    let is_newest = |checkpoint: &&CheckpointInfo| {
        checkpoint.job_ended_at.is_none()
            && newest_ids.get(&(checkpoint.vm.as_str(), checkpoint.job)) == Some(&checkpoint.id)
    };
    StoreUsage::sum(
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

    fn checkpoint_info(vm: &str, job: i32, start_second: u64, bytes: u64) -> CheckpointInfo {
        let (job, started_at) = (Tid::from_raw(job), Micros::from_secs(start_second));
        let id = CheckpointId::next_id(std::iter::empty(), job, started_at);
        CheckpointInfo {
            id,
            vm: vm.into(),
            job,
            started_at,
            bytes,
            parts: vec![],
            job_ended_at: None,
            damage: None,
        }
    }

    /// A damaged checkpoint is not the newest of its job: the intact one before it stays.
    #[test]
    fn damaged_checkpoint_is_not_the_newest_of_its_job() {
        let checkpoints = [
            checkpoint_info("a", 1, 1, 1),
            checkpoint_info("a", 1, 2, 1),
            CheckpointInfo {
                damage: Some("a byte was changed".into()),
                ..checkpoint_info("a", 1, 3, 1)
            },
        ];
        let removable_seconds: Vec<u64> = select_removable(&checkpoints, |_| false)
            .iter()
            .map(|checkpoint| checkpoint.started_at.0 / 1_000_000)
            .collect();
        assert_eq!(removable_seconds, [1, 3]);
    }

    /// The newest checkpoint of a job without an end mark is never removable. Of the other
    /// checkpoints, the oldest are removed first.
    #[test]
    fn newest_checkpoint_of_a_job_is_never_removable() {
        let checkpoints = [
            checkpoint_info("a", 2, 9, 1),
            checkpoint_info("a", 1, 5, 1),
            checkpoint_info("a", 1, 3, 1),
            checkpoint_info("a", 1, 4, 1),
            checkpoint_info("a", 2, 1, 1),
        ];
        let start_seconds = |checkpoints: Vec<&CheckpointInfo>| {
            checkpoints
                .iter()
                .map(|checkpoint| checkpoint.started_at.0 / 1_000_000)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            start_seconds(select_removable(&checkpoints, |_| false)),
            [1, 3, 4]
        );
        assert_eq!(
            start_seconds(select_removable(&checkpoints, |checkpoint| checkpoint
                .started_at
                == Micros::from_secs(3))),
            [1, 4]
        );
    }

    /// Checkpoints of ended jobs are removed first, beginning with the job that ended first.
    #[test]
    fn ended_jobs_are_removed_first() {
        let ended_checkpoint = |checkpoint: CheckpointInfo, end_second| CheckpointInfo {
            job_ended_at: Some(Micros::from_secs(end_second)),
            ..checkpoint
        };
        let checkpoints = [
            checkpoint_info("a", 1, 1, 1),
            checkpoint_info("a", 1, 2, 1),
            ended_checkpoint(checkpoint_info("a", 2, 8, 1), 20),
            ended_checkpoint(checkpoint_info("a", 3, 9, 1), 10),
            ended_checkpoint(checkpoint_info("a", 3, 7, 1), 10),
        ];
        let start_seconds = |checkpoints: Vec<&CheckpointInfo>| {
            checkpoints
                .iter()
                .map(|checkpoint| checkpoint.started_at.0 / 1_000_000)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            start_seconds(select_removable(&checkpoints, |_| false)),
            [7, 9, 8, 1]
        );
        assert_eq!(
            start_seconds(select_removable(&checkpoints, |checkpoint| checkpoint.job
                == Tid::from_raw(3))),
            [8, 1]
        );
        assert_eq!(
            usage_of_other_jobs(&checkpoints, "a", Tid::from_raw(9)),
            StoreUsage {
                checkpoints: 1,
                bytes: 1
            }
        );
    }

    #[test]
    fn equal_job_numbers_of_two_vms_are_two_jobs() {
        let checkpoints = [
            checkpoint_info("a", 1, 3, 10),
            checkpoint_info("b", 1, 5, 7),
        ];
        assert!(select_removable(&checkpoints, |_| false).is_empty());
        assert_eq!(
            usage_of_other_jobs(&checkpoints, "a", Tid::from_raw(1)),
            StoreUsage {
                checkpoints: 1,
                bytes: 7
            }
        );
    }

    #[test]
    fn newest_checkpoint_of_each_other_job_remains() {
        let checkpoints = [
            checkpoint_info("a", 1, 3, 1),
            checkpoint_info("a", 1, 4, 2),
            checkpoint_info("a", 2, 1, 4),
            checkpoint_info("a", 2, 2, 8),
            checkpoint_info("a", 3, 1, 16),
        ];
        assert_eq!(
            usage_of_other_jobs(&checkpoints, "a", Tid::from_raw(1)),
            StoreUsage {
                checkpoints: 2,
                bytes: 24
            }
        );
        assert_eq!(
            usage_of_other_jobs(&checkpoints, "a", Tid::from_raw(9)),
            StoreUsage {
                checkpoints: 3,
                bytes: 26
            }
        );
    }
}
