//! Selects the checkpoints that may be removed. Pure.

use super::id::SetId;
use super::{Limits, SetInfo};
use sempa_proto::Tid;
use std::collections::HashMap;

/// The result of a sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The removed checkpoints, in the order of removal.
    pub removed: Vec<SetInfo>,
    /// Checkpoints above the limit of the store that may not be removed.
    pub sets_over: usize,
    /// Bytes above the limit of the store that may not be removed.
    pub bytes_over: u64,
}

/// A number of checkpoints and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) sets: usize,
    pub(super) bytes: u64,
}

impl Total {
    pub(super) fn of<'a>(sets: impl IntoIterator<Item = &'a SetInfo>) -> Total {
        let add = |sum: Total, set: &SetInfo| Total {
            sets: sum.sets + 1,
            bytes: sum.bytes.saturating_add(set.bytes),
        };
        sets.into_iter().fold(Total::default(), add)
    }

    /// Returns the checkpoints and bytes above the limits.
    pub(super) fn over(self, limits: &Limits) -> (usize, u64) {
        (
            self.sets.saturating_sub(limits.sets_max),
            self.bytes.saturating_sub(limits.bytes_max),
        )
    }
}

/// Returns the newest checkpoint of each job. Virtual machines number their jobs independently.
fn newest(sets: &[SetInfo]) -> HashMap<(&str, Tid), SetId> {
    let mut newest: HashMap<(&str, Tid), SetId> = HashMap::new();
    for set in sets {
        let place = newest.entry((&set.vm, set.job)).or_insert(set.id);
        *place = set.id.max(*place);
    }
    newest
}

/// Returns the checkpoints that may be removed, in the order of removal: first those of jobs that
/// have ended for good, in the order of these ends; then the others, oldest first. Excluded are the
/// newest checkpoint of each job that has not ended, and those for which `keep` returns true.
pub(super) fn superfluous(sets: &[SetInfo], keep: impl Fn(&SetInfo) -> bool) -> Vec<&SetInfo> {
    let newest = newest(sets);
    let is_newest = |set: &SetInfo| newest.get(&(set.vm.as_str(), set.job)) == Some(&set.id);
    let goes = |set: &&SetInfo| (set.ended.is_some() || !is_newest(set)) && !keep(set);
    let mut superfluous: Vec<&SetInfo> = sets.iter().filter(goes).collect();
    superfluous.sort_by_key(|set| (set.ended.is_none(), set.ended, set.id));
    superfluous
}

/// Returns what remains if this job gets a new checkpoint and everything is removed that may be:
/// the newest checkpoints of the other jobs that have not ended for good.
pub(super) fn others(sets: &[SetInfo], vm: &str, job: Tid) -> Total {
    let newest = newest(sets);
    let is_newest = |set: &&SetInfo| {
        set.ended.is_none() && newest.get(&(set.vm.as_str(), set.job)) == Some(&set.id)
    };
    Total::of(
        sets.iter()
            .filter(is_newest)
            .filter(|set| set.vm != vm || set.job != job),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    fn set(vm: &str, job: i32, second: u64, bytes: u64) -> SetInfo {
        let (job, made) = (Tid::from_raw(job), Micros::from_secs(second));
        let id = SetId::after(std::iter::empty(), job, made);
        SetInfo {
            id,
            vm: vm.into(),
            job,
            made,
            bytes,
            parts: vec![],
            ended: None,
        }
    }

    /// The newest checkpoint of a job is never removable, and of the others the oldest are removed
    /// first.
    #[test]
    fn newest_checkpoint_of_a_job_is_never_removable() {
        let sets = [
            set("a", 2, 9, 1),
            set("a", 1, 5, 1),
            set("a", 1, 3, 1),
            set("a", 1, 4, 1),
            set("a", 2, 1, 1),
        ];
        let seconds = |sets: Vec<&SetInfo>| {
            sets.iter()
                .map(|set| set.made.0 / 1_000_000)
                .collect::<Vec<_>>()
        };
        assert_eq!(seconds(superfluous(&sets, |_| false)), [1, 3, 4]);
        assert_eq!(
            seconds(superfluous(&sets, |set| set.made == Micros::from_secs(3))),
            [1, 4]
        );
    }

    /// Checkpoints of ended jobs are removed first, beginning with the job that ended first.
    #[test]
    fn ended_jobs_are_removed_first() {
        let ended = |set: SetInfo, second| SetInfo {
            ended: Some(Micros::from_secs(second)),
            ..set
        };
        let sets = [
            set("a", 1, 1, 1),
            set("a", 1, 2, 1),
            ended(set("a", 2, 8, 1), 20),
            ended(set("a", 3, 9, 1), 10),
            ended(set("a", 3, 7, 1), 10),
        ];
        let seconds = |sets: Vec<&SetInfo>| {
            sets.iter()
                .map(|set| set.made.0 / 1_000_000)
                .collect::<Vec<_>>()
        };
        assert_eq!(seconds(superfluous(&sets, |_| false)), [7, 9, 8, 1]);
        assert_eq!(
            seconds(superfluous(&sets, |set| set.job == Tid::from_raw(3))),
            [8, 1]
        );
        assert_eq!(
            others(&sets, "a", Tid::from_raw(9)),
            Total { sets: 1, bytes: 1 }
        );
    }

    #[test]
    fn equal_job_numbers_of_two_vms_are_two_jobs() {
        let sets = [set("a", 1, 3, 10), set("b", 1, 5, 7)];
        assert!(superfluous(&sets, |_| false).is_empty());
        assert_eq!(
            others(&sets, "a", Tid::from_raw(1)),
            Total { sets: 1, bytes: 7 }
        );
    }

    #[test]
    fn newest_checkpoint_of_each_other_job_remains() {
        let sets = [
            set("a", 1, 3, 1),
            set("a", 1, 4, 2),
            set("a", 2, 1, 4),
            set("a", 2, 2, 8),
            set("a", 3, 1, 16),
        ];
        assert_eq!(
            others(&sets, "a", Tid::from_raw(1)),
            Total { sets: 2, bytes: 24 }
        );
        assert_eq!(
            others(&sets, "a", Tid::from_raw(9)),
            Total { sets: 3, bytes: 26 }
        );
    }
}
