//! Which sets are superfluous. Pure.

use super::id::SetId;
use super::{Limits, SetInfo};
use sempa_proto::Tid;
use std::collections::HashMap;

/// What a sweep did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The sets that were removed, oldest first.
    pub removed: Vec<SetInfo>,
    /// Sets that are still above the limit, because none of what is left may be removed.
    pub sets_over: usize,
    /// Bytes that are, likewise.
    pub bytes_over: u64,
}

/// A number of sets and their bytes.
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

    /// Sets and bytes above the limits.
    pub(super) fn over(self, limits: &Limits) -> (usize, u64) {
        (
            self.sets.saturating_sub(limits.sets_max),
            self.bytes.saturating_sub(limits.bytes_max),
        )
    }
}

/// The newest set of each job. Virtual machines number their jobs each for itself.
fn newest(sets: &[SetInfo]) -> HashMap<(&str, Tid), SetId> {
    let mut newest: HashMap<(&str, Tid), SetId> = HashMap::new();
    for set in sets {
        let place = newest.entry((&set.vm, set.job)).or_insert(set.id);
        *place = set.id.max(*place);
    }
    newest
}

/// The sets that may be removed: those of jobs that have ended for good, the one that ended first first; then the others, oldest
/// first, but not the newest one of a job; and none that the caller keeps.
pub(super) fn superfluous(sets: &[SetInfo], keep: impl Fn(&SetInfo) -> bool) -> Vec<&SetInfo> {
    let newest = newest(sets);
    let is_newest = |set: &SetInfo| newest.get(&(set.vm.as_str(), set.job)) == Some(&set.id);
    let goes = |set: &&SetInfo| (set.ended.is_some() || !is_newest(set)) && !keep(set);
    let mut superfluous: Vec<&SetInfo> = sets.iter().filter(goes).collect();
    superfluous.sort_by_key(|set| (set.ended.is_none(), set.ended, set.id));
    superfluous
}

/// What stays when there is a newer set of this job and all that may be removed is: the newest sets of the other jobs that have
/// not ended for good.
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

    #[test]
    fn the_newest_set_of_a_job_is_never_superfluous_and_the_oldest_go_first() {
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

    #[test]
    fn sets_of_jobs_that_have_ended_go_first_and_those_of_the_job_that_ended_first_before_all() {
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
    fn jobs_of_the_same_number_in_two_virtual_machines_are_two_jobs() {
        let sets = [set("a", 1, 3, 10), set("b", 1, 5, 7)];
        assert!(superfluous(&sets, |_| false).is_empty());
        assert_eq!(
            others(&sets, "a", Tid::from_raw(1)),
            Total { sets: 1, bytes: 7 }
        );
    }

    #[test]
    fn what_stays_beside_a_job_is_the_newest_set_of_each_other_one() {
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
