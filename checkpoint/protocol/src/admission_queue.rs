//! The admission queue: decides which queued migrations away from one host may start. A pure
//! function.
//!
//! The tasks share the host's network connection, so the smallest depart first: at any time most
//! tasks have already migrated. A task occupies a slot until its images have arrived; with
//! post-copy, until all its memory has arrived.
//!
//! A task may depart while
//!
//! - fewer than [`DEPARTURES_MAX`] tasks of at most its size occupy slots, so that larger ones do
//!   not delay it, and
//! - fewer than [`DEPARTURES_WITH_SMALLER_MAX`] tasks of any size occupy slots.
//!
//! A paused task does not wait for tasks whose post-copy memory is being sent.

use sempa_proto::{Micros, MigrationId};

/// Maximum number of tasks that depart from one host at a time, when a task of their size or a
/// larger one is next in the queue.
pub const DEPARTURES_MAX: usize = 4;
/// Maximum number of tasks of any size that depart from one host at a time.
pub const DEPARTURES_WITH_SMALLER_MAX: usize = 8;
/// Maximum time that a task waits for the sources to report the sizes of the other tasks.
pub const SIZE_WAIT_MAX: Micros = Micros::from_millis(50);

/// The state of one migration away from the host, as far as the queue needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueState {
    /// The source has not reported the size of the task.
    SizeUnknown,
    /// The task is queued.
    Queued {
        id: MigrationId,
        /// Resident memory of the task in bytes.
        bytes: u64,
        /// Time at which the task was queued.
        since: Micros,
        /// The task is paused until it has departed, because the owner of its host is present.
        paused: bool,
    },
    /// The images are being sent.
    Departing {
        /// Resident memory of the task in bytes.
        bytes: u64,
    },
    /// The task runs at the target, and its memory is still being sent (post-copy).
    SendingMemory {
        /// Resident memory of the task in bytes.
        bytes: u64,
    },
}

/// Returns the queued migrations of one host that may depart now, the smallest first. Also returns
/// the time at which to call again, unless the states change before.
pub(super) fn admit(now: Micros, states: &[QueueState]) -> (Vec<MigrationId>, Option<Micros>) {
    let (mut departing, mut sending_memory, mut queued) = (Vec::new(), Vec::new(), Vec::new());
    for state in states {
        match *state {
            QueueState::SizeUnknown => {}
            QueueState::Queued {
                id,
                bytes,
                since,
                paused,
            } => queued.push((bytes, id, since, paused)),
            QueueState::Departing { bytes } => departing.push(bytes),
            QueueState::SendingMemory { bytes } => sending_memory.push(bytes),
        }
    }
    queued.sort_unstable();
    let gather_until = queued
        .iter()
        .map(|(_, _, since, _)| *since + SIZE_WAIT_MAX)
        .min();
    if let Some(at) =
        gather_until.filter(|at| *at > now && states.contains(&QueueState::SizeUnknown))
    {
        return (Vec::new(), Some(at));
    }
    let mut admitted = Vec::new();
    for (bytes, id, _, paused) in queued {
        let others = || {
            departing
                .iter()
                .chain(sending_memory.iter().filter(|_| !paused))
        };
        let smaller = others().filter(|other| **other <= bytes).count();
        if smaller >= DEPARTURES_MAX || others().count() >= DEPARTURES_WITH_SMALLER_MAX {
            continue;
        }
        departing.push(bytes);
        admitted.push(id);
    }
    (admitted, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Micros = Micros::from_secs(9);

    fn queued_state(id: u64, bytes: u64) -> QueueState {
        QueueState::Queued {
            id: MigrationId(id),
            bytes,
            since: NOW,
            paused: false,
        }
    }

    fn admitted_ids(all: &[QueueState]) -> Vec<u64> {
        admit(NOW, all).0.into_iter().map(|id| id.0).collect()
    }

    /// The smallest tasks depart first, four at a time.
    #[test]
    fn smallest_four_depart_first() {
        assert_eq!(admitted_ids(&[]), [0; 0]);
        assert_eq!(admitted_ids(&[queued_state(1, 90)]), [1]);
        assert_eq!(
            admitted_ids(&[
                queued_state(1, 90),
                queued_state(2, 10),
                queued_state(3, 50),
                queued_state(4, 70),
                queued_state(5, 20)
            ]),
            [2, 5, 3, 4]
        );
        let three = [QueueState::Departing { bytes: 5 }; 3];
        assert_eq!(
            admitted_ids(&[&three[..], &[queued_state(7, 90), queued_state(8, 80)]].concat()),
            [8]
        );
    }

    /// Smaller tasks depart although four larger tasks are already departing, until the limit for
    /// tasks of any size is reached.
    #[test]
    fn small_tasks_need_no_slot_of_large_ones() {
        let large = [QueueState::Departing { bytes: 1 << 30 }; 4];
        let small: Vec<QueueState> = (1..=6).map(|id| queued_state(id, 1 << 20)).collect();
        assert_eq!(admitted_ids(&[&large[..], &small].concat()), [1, 2, 3, 4]);
        assert_eq!(
            admitted_ids(&[&large[..], &[queued_state(9, 1 << 30)]].concat()),
            [0; 0]
        );
        let all = [&large[..], &[QueueState::Departing { bytes: 1 << 10 }; 4]].concat();
        assert_eq!(
            admitted_ids(&[&all[..], &[queued_state(9, 1)]].concat()),
            [0; 0],
            "there is a limit to that, too"
        );
    }

    /// Memory of post-copy occupies slots for running tasks, but not for paused ones.
    #[test]
    fn only_running_tasks_wait_for_post_copy() {
        let paused_state = |id, bytes| QueueState::Queued {
            id: MigrationId(id),
            bytes,
            since: NOW,
            paused: true,
        };
        let sending_memory = [QueueState::SendingMemory { bytes: 50 }; 4];
        assert_eq!(
            admitted_ids(
                &[
                    &sending_memory[..],
                    &[
                        queued_state(1, 90),
                        queued_state(2, 60),
                        queued_state(3, 10)
                    ]
                ]
                .concat()
            ),
            [3]
        );
        assert_eq!(
            admitted_ids(
                &[
                    &sending_memory[..],
                    &[queued_state(1, 90), paused_state(2, 95)]
                ]
                .concat()
            ),
            [2]
        );
        let three = [
            &sending_memory[..3],
            &[queued_state(1, 90), queued_state(2, 60)],
        ]
        .concat();
        assert_eq!(
            admitted_ids(&three),
            [2],
            "the smaller one has the place that is left"
        );
        let many = [QueueState::SendingMemory { bytes: 1 }; 20];
        let all = [
            paused_state(1, 9),
            paused_state(2, 9),
            paused_state(3, 9),
            paused_state(4, 9),
            paused_state(5, 9),
        ];
        assert_eq!(
            admitted_ids(&[&many[..], &all].concat()),
            [1, 2, 3, 4],
            "they wait for each other's images alone"
        );
    }

    /// While the size of a task is unknown, the other tasks wait for it, at most for
    /// [`SIZE_WAIT_MAX`].
    #[test]
    fn admission_waits_for_unknown_sizes() {
        let all = [
            QueueState::SizeUnknown,
            queued_state(1, 90),
            queued_state(2, 10),
        ];
        assert_eq!(admit(NOW, &all), (vec![], Some(NOW + SIZE_WAIT_MAX)));
        assert_eq!(
            admit(NOW + SIZE_WAIT_MAX, &all),
            (vec![MigrationId(2), MigrationId(1)], None)
        );
    }
}
