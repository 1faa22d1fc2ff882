//! The queue of tasks that wait to depart from one host. Pure.
//!
//! The tasks share the host's link, so the smallest depart first and most tasks are gone at any
//! time. A task occupies a slot until its images have arrived; with post-copy, until all its memory
//! has.
//!
//! A task may depart while
//!
//! - fewer than [`LEAVE_AT_ONCE_MAX`] tasks of at most its size occupy slots, so that larger ones
//!   do not delay it, and
//! - fewer than [`LEAVE_AT_ONCE_WITH_SMALLER_MAX`] tasks in all occupy slots.
//!
//! Memory of post-copy occupies the link as well, but for a paused task it does not count.

use sempa_proto::{Micros, MigrationId};

/// Limit of the tasks that depart from one host at a time, not counting larger ones than the next.
pub const LEAVE_AT_ONCE_MAX: usize = 4;
/// Limit of all tasks that depart from one host at a time.
pub const LEAVE_AT_ONCE_WITH_SMALLER_MAX: usize = 8;
/// Longest time that a task waits until the sizes of the others are known.
pub const GATHER_TIME: Micros = Micros::from_millis(50);

/// The state of one migration away from the host, as far as the queue needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The source has not reported the size of the task.
    Unknown,
    /// The task is queued.
    Waits {
        id: MigrationId,
        /// Resident memory of the task.
        bytes: u64,
        /// When it was queued.
        since: Micros,
        /// The task is paused until it has departed, because its host's owner is present.
        stands: bool,
    },
    /// The images are being sent.
    Leaves {
        /// Resident memory of the task.
        bytes: u64,
    },
    /// The task has departed, and its memory is being sent (post-copy).
    Follows {
        /// Resident memory of the task.
        bytes: u64,
    },
}

/// Returns the queued migrations of one host that may depart now, the smallest first; and when to
/// call again although nothing has happened.
pub(super) fn turns(now: Micros, all: &[Standing]) -> (Vec<MigrationId>, Option<Micros>) {
    let (mut leaving, mut following, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for one in all {
        match *one {
            Standing::Unknown => {}
            Standing::Waits {
                id,
                bytes,
                since,
                stands,
            } => waiting.push((bytes, id, since, stands)),
            Standing::Leaves { bytes } => leaving.push(bytes),
            Standing::Follows { bytes } => following.push(bytes),
        }
    }
    waiting.sort_unstable();
    let gathered = waiting
        .iter()
        .map(|(_, _, since, _)| *since + GATHER_TIME)
        .min();
    if let Some(at) = gathered.filter(|at| *at > now && all.contains(&Standing::Unknown)) {
        return (Vec::new(), Some(at));
    }
    let mut go = Vec::new();
    for (bytes, id, _, stands) in waiting {
        let others = || leaving.iter().chain(following.iter().filter(|_| !stands));
        let ahead = others().filter(|other| **other <= bytes).count();
        if ahead >= LEAVE_AT_ONCE_MAX || others().count() >= LEAVE_AT_ONCE_WITH_SMALLER_MAX {
            continue;
        }
        leaving.push(bytes);
        go.push(id);
    }
    (go, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Micros = Micros::from_secs(9);

    fn waits(id: u64, bytes: u64) -> Standing {
        Standing::Waits {
            id: MigrationId(id),
            bytes,
            since: NOW,
            stands: false,
        }
    }

    fn go(all: &[Standing]) -> Vec<u64> {
        turns(NOW, all).0.into_iter().map(|id| id.0).collect()
    }

    /// The smallest tasks depart first, four at a time.
    #[test]
    fn smallest_four_depart_first() {
        assert_eq!(go(&[]), [0; 0]);
        assert_eq!(go(&[waits(1, 90)]), [1]);
        assert_eq!(
            go(&[
                waits(1, 90),
                waits(2, 10),
                waits(3, 50),
                waits(4, 70),
                waits(5, 20)
            ]),
            [2, 5, 3, 4]
        );
        let three = [Standing::Leaves { bytes: 5 }; 3];
        assert_eq!(
            go(&[&three[..], &[waits(7, 90), waits(8, 80)]].concat()),
            [8]
        );
    }

    /// Smaller tasks depart in addition to four larger ones that already depart, up to the second
    /// limit.
    #[test]
    fn small_tasks_need_no_slot_of_large_ones() {
        let large = [Standing::Leaves { bytes: 1 << 30 }; 4];
        let small: Vec<Standing> = (1..=6).map(|id| waits(id, 1 << 20)).collect();
        assert_eq!(go(&[&large[..], &small].concat()), [1, 2, 3, 4]);
        assert_eq!(go(&[&large[..], &[waits(9, 1 << 30)]].concat()), [0; 0]);
        let all = [&large[..], &[Standing::Leaves { bytes: 1 << 10 }; 4]].concat();
        assert_eq!(
            go(&[&all[..], &[waits(9, 1)]].concat()),
            [0; 0],
            "there is a limit to that, too"
        );
    }

    /// Memory of post-copy occupies slots for running tasks, but not for paused ones.
    #[test]
    fn only_running_tasks_wait_for_post_copy() {
        let stands = |id, bytes| Standing::Waits {
            id: MigrationId(id),
            bytes,
            since: NOW,
            stands: true,
        };
        let follow = [Standing::Follows { bytes: 50 }; 4];
        assert_eq!(
            go(&[&follow[..], &[waits(1, 90), waits(2, 60), waits(3, 10)]].concat()),
            [3]
        );
        assert_eq!(
            go(&[&follow[..], &[waits(1, 90), stands(2, 95)]].concat()),
            [2]
        );
        let three = [&follow[..3], &[waits(1, 90), waits(2, 60)]].concat();
        assert_eq!(
            go(&three),
            [2],
            "the smaller one has the place that is left"
        );
        let many = [Standing::Follows { bytes: 1 }; 20];
        let all = [
            stands(1, 9),
            stands(2, 9),
            stands(3, 9),
            stands(4, 9),
            stands(5, 9),
        ];
        assert_eq!(
            go(&[&many[..], &all].concat()),
            [1, 2, 3, 4],
            "they wait for each other's images alone"
        );
    }

    /// While the size of a task is unknown, the others wait for it, at most for the gather time.
    #[test]
    fn admission_waits_for_unknown_sizes() {
        let all = [Standing::Unknown, waits(1, 90), waits(2, 10)];
        assert_eq!(turns(NOW, &all), (vec![], Some(NOW + GATHER_TIME)));
        assert_eq!(
            turns(NOW + GATHER_TIME, &all),
            (vec![MigrationId(2), MigrationId(1)], None)
        );
    }
}
