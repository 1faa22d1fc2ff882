//! Which tasks of a host leave it first when several are to leave. They share its link, so the smallest go first: as many as
//! can have gone at any time, and nobody waits for a large one who would be through in a moment. Memory that follows its task
//! is on the link as long as images are; but no task that stands still anyway waits for it. Pure.

use sempa_proto::{Micros, MigrationId};

/// Tasks that leave one host at a time.
pub const LEAVE_AT_ONCE_MAX: usize = 4;
/// The same with smaller ones that have come while larger ones were already leaving.
pub const LEAVE_AT_ONCE_WITH_SMALLER_MAX: usize = 8;
/// Whoever is to leave waits this long at most until it is known how large the others are.
pub const GATHER_TIME: Micros = Micros::from_millis(50);

/// A move away from the host, as far as this is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// How large the task is has not been said.
    Unknown,
    /// It waits since then.
    Waits {
        /// Which.
        id: MigrationId,
        /// Its resident memory.
        bytes: u64,
        /// Since when.
        since: Micros,
        /// The owner of its host is there, so it stands still until it has left.
        stands: bool,
    },
    /// It is leaving.
    Leaves {
        /// Its resident memory.
        bytes: u64,
    },
    /// It has left, and its memory has not.
    Follows {
        /// Its memory.
        bytes: u64,
    },
}

/// Those of one host whose turn it is now, the smallest first; and when to look again although nothing has happened.
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

    #[test]
    fn the_smallest_go_first_and_four_at_a_time() {
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

    #[test]
    fn larger_ones_that_are_leaving_already_do_not_keep_smaller_ones_here() {
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

    #[test]
    fn who_runs_waits_for_memory_that_is_on_the_link_and_who_stands_still_does_not() {
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

    #[test]
    fn for_a_moment_it_is_waited_until_all_have_said_how_large_they_are() {
        let all = [Standing::Unknown, waits(1, 90), waits(2, 10)];
        assert_eq!(turns(NOW, &all), (vec![], Some(NOW + GATHER_TIME)));
        assert_eq!(
            turns(NOW + GATHER_TIME, &all),
            (vec![MigrationId(2), MigrationId(1)], None)
        );
    }
}
