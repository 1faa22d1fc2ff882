//! The admission queue: decides which queued migrations away from one host may start. A pure
//! function.
//!
//! The tasks share the host's network connection, so the smallest depart first: at any time most
//! tasks have already migrated. A task occupies a slot until its images have arrived, or, with
//! post-copy, until all its memory has arrived.
//!
//! A task may depart while
//!
//! - fewer than [`SMALLER_DEPARTURES_MAX`] tasks that are not larger occupy slots, so that larger
//!   tasks do not delay it, and
//! - fewer than [`TOTAL_DEPARTURES_MAX`] tasks, the larger ones included, occupy slots.
//!
//! A paused task does not wait for tasks whose post-copy memory is being sent.

use sempa_proto::{Micros, MigrationId};

/// Limit for the departing tasks of one host that are not larger than the next task in the queue.
/// When the limit is reached, the next task waits. Larger departing tasks do not count.
pub const SMALLER_DEPARTURES_MAX: usize = 4;
/// Limit for all departing tasks of one host, of any size. When the limit is reached, every other
/// task waits.
pub const TOTAL_DEPARTURES_MAX: usize = 8;
/// Maximum time that a task waits for the sources to report the sizes of the other tasks.
pub const SIZE_WAIT_MAX: Micros = Micros::from_millis(50);

/// The state of one migration away from the host. Contains only what the admission depends on.
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
        queued_at: Micros,
        /// True if the task is paused until it has departed, because the owner of its host is
        /// present.
        is_paused: bool,
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
/// the time at which the function must be called again even if no state has changed; `None` if no
/// such call is needed.
pub(super) fn select_departures(
    now: Micros,
    states: &[QueueState],
) -> (Vec<MigrationId>, Option<Micros>) {
    let (mut departing_bytes, mut sending_bytes, mut queued_tasks) =
        (Vec::new(), Vec::new(), Vec::new());
    for state in states {
        match *state {
            QueueState::SizeUnknown => {}
            QueueState::Queued {
                id,
                bytes,
                queued_at,
                is_paused,
            } => queued_tasks.push((bytes, id, queued_at, is_paused)),
            QueueState::Departing { bytes } => departing_bytes.push(bytes),
            QueueState::SendingMemory { bytes } => sending_bytes.push(bytes),
        }
    }
    queued_tasks.sort_unstable();
    let size_wait_end = queued_tasks
        .iter()
        .map(|(_, _, queued_at, _)| *queued_at + SIZE_WAIT_MAX)
        .min();
    if let Some(time) =
        size_wait_end.filter(|time| *time > now && states.contains(&QueueState::SizeUnknown))
    {
        return (Vec::new(), Some(time));
    }
    let mut admitted_ids = Vec::new();
    for (bytes, id, _, is_paused) in queued_tasks {
        let occupied_slots = || {
            departing_bytes
                .iter()
                .chain(sending_bytes.iter().filter(|_| !is_paused))
        };
        let smaller_count = occupied_slots()
            .filter(|slot_bytes| **slot_bytes <= bytes)
            .count();
        if smaller_count >= SMALLER_DEPARTURES_MAX
            || occupied_slots().count() >= TOTAL_DEPARTURES_MAX
        {
            continue;
        }
        departing_bytes.push(bytes);
        admitted_ids.push(id);
    }
    (admitted_ids, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Micros = Micros::from_secs(9);

    fn queued_state(id: u64, bytes: u64) -> QueueState {
        QueueState::Queued {
            id: MigrationId(id),
            bytes,
            queued_at: NOW,
            is_paused: false,
        }
    }

    fn admitted_ids(states: &[QueueState]) -> Vec<u64> {
        select_departures(NOW, states)
            .0
            .into_iter()
            .map(|id| id.0)
            .collect()
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
        let three_departing_states = [QueueState::Departing { bytes: 5 }; 3];
        assert_eq!(
            admitted_ids(
                &[
                    &three_departing_states[..],
                    &[queued_state(7, 90), queued_state(8, 80)]
                ]
                .concat()
            ),
            [8]
        );
    }

    /// Smaller tasks depart although four larger tasks are already departing, until
    /// [`TOTAL_DEPARTURES_MAX`] tasks are departing.
    #[test]
    fn small_tasks_need_no_slot_of_large_ones() {
        let large_departing_states = [QueueState::Departing { bytes: 1 << 30 }; 4];
        let small_queued_states: Vec<QueueState> =
            (1..=6).map(|id| queued_state(id, 1 << 20)).collect();
        assert_eq!(
            admitted_ids(&[&large_departing_states[..], &small_queued_states].concat()),
            [1, 2, 3, 4]
        );
        assert_eq!(
            admitted_ids(&[&large_departing_states[..], &[queued_state(9, 1 << 30)]].concat()),
            [0; 0]
        );
        let states = [
            &large_departing_states[..],
            &[QueueState::Departing { bytes: 1 << 10 }; 4],
        ]
        .concat();
        assert_eq!(
            admitted_ids(&[&states[..], &[queued_state(9, 1)]].concat()),
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
            queued_at: NOW,
            is_paused: true,
        };
        let four_sending_states = [QueueState::SendingMemory { bytes: 50 }; 4];
        assert_eq!(
            admitted_ids(
                &[
                    &four_sending_states[..],
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
                    &four_sending_states[..],
                    &[queued_state(1, 90), paused_state(2, 95)]
                ]
                .concat()
            ),
            [2]
        );
        let three_sending_states = [
            &four_sending_states[..3],
            &[queued_state(1, 90), queued_state(2, 60)],
        ]
        .concat();
        assert_eq!(
            admitted_ids(&three_sending_states),
            [2],
            "the smaller one has the place that is left"
        );
        let many_sending_states = [QueueState::SendingMemory { bytes: 1 }; 20];
        let states = [
            paused_state(1, 9),
            paused_state(2, 9),
            paused_state(3, 9),
            paused_state(4, 9),
            paused_state(5, 9),
        ];
        assert_eq!(
            admitted_ids(&[&many_sending_states[..], &states].concat()),
            [1, 2, 3, 4],
            "they wait for each other's images alone"
        );
    }

    /// While the size of a task is unknown, the other tasks wait for it, at most for
    /// [`SIZE_WAIT_MAX`].
    #[test]
    fn admission_waits_for_unknown_sizes() {
        let states = [
            QueueState::SizeUnknown,
            queued_state(1, 90),
            queued_state(2, 10),
        ];
        assert_eq!(
            select_departures(NOW, &states),
            (vec![], Some(NOW + SIZE_WAIT_MAX))
        );
        assert_eq!(
            select_departures(NOW + SIZE_WAIT_MAX, &states),
            (vec![MigrationId(2), MigrationId(1)], None)
        );
    }
}
