//! Memory of this host that is reserved for tasks that are migrating to it.
//!
//! Until a task has received its memory, the kernel still counts that memory as free, and the same
//! memory would be promised to the next task.

use crate::supervisor::Supervisor;
use crate::target::{IncomingTask, TargetStage};
use checkpoint::facts::{MEMORY_SLACK_BYTES, memory_available_bytes};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use sempa_proto::MigrationId;
use sempa_proto::migration::{Failure, Refusal};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// File system type of ramfs, which like tmpfs stores files in memory. nix has no constant for it.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Size in bytes of the blocks in which the system reports the space of a file.
const BLOCK_BYTES: u64 = 512;

/// The memory reservation of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reservation {
    /// Memory in bytes that the task had when it was last checked.
    checked_bytes: u64,
    /// Number of bytes of the task's memory that have already arrived.
    arrived_bytes: u64,
    /// True while the task is being checked and may still be refused.
    is_pending: bool,
}

impl Reservation {
    /// Returns the number of bytes that have not arrived yet.
    fn outstanding_bytes(&self) -> u64 {
        self.checked_bytes.saturating_sub(self.arrived_bytes)
    }
}

/// All memory reservations, by migration. Their number is bounded by the limits on migrations to
/// this host and on worker threads.
#[derive(Debug, Default)]
pub(crate) struct MemoryReservations(BTreeMap<MigrationId, Reservation>);

impl MemoryReservations {
    /// Reserves memory for a task that is being checked.
    pub(crate) fn reserve(&mut self, migration: MigrationId, bytes: u64) {
        self.0.insert(
            migration,
            Reservation {
                checked_bytes: bytes,
                arrived_bytes: 0,
                is_pending: true,
            },
        );
    }

    /// Records the memory of a task whose images have arrived. Returns true if the memory has grown
    /// by more than the slack since the check; the reservation then grows, too.
    fn record_growth(&mut self, migration: MigrationId, memory: u64) -> bool {
        let Some(reservation) = self.0.get_mut(&migration) else {
            return false;
        };
        let has_grown = memory.saturating_sub(reservation.checked_bytes) > MEMORY_SLACK_BYTES;
        if has_grown {
            reservation.checked_bytes = memory;
        }
        has_grown
    }

    /// Records the verdict on a task: removes its reservation if the task was refused.
    pub(crate) fn record_verdict(&mut self, migration: MigrationId, accepted: bool) {
        match self.0.get_mut(&migration) {
            Some(reservation) if accepted => reservation.is_pending = false,
            _ => drop(self.0.remove(&migration)),
        }
    }

    /// Returns the number of bytes that are reserved for this task and have not arrived yet.
    pub(crate) fn reserved_for(&self, migration: MigrationId) -> u64 {
        self.0
            .get(&migration)
            .map_or(0, Reservation::outstanding_bytes)
    }

    /// Records that `bytes` of the task's memory have arrived by pre-copy.
    pub(crate) fn record_pre_copied(&mut self, migration: MigrationId, bytes: u64) {
        if let Some(reservation) = self.0.get_mut(&migration) {
            reservation.arrived_bytes = reservation.arrived_bytes.saturating_add(bytes);
        }
    }

    /// Records that the task's images have arrived. The memory that the images occupy is freed
    /// while the task is restored.
    pub(crate) fn record_images(&mut self, migration: MigrationId, dir: &Path) {
        if let Some(reservation) = self.0.get_mut(&migration) {
            reservation.arrived_bytes = reservation
                .arrived_bytes
                .saturating_add(bytes_in_memory(dir));
        }
    }

    /// Returns the number of bytes that are reserved for tasks being checked, and for tasks whose
    /// memory has not arrived. `waits` returns true for the migrations of the latter. Removes all
    /// other reservations.
    fn outstanding_bytes(&mut self, waits: impl Fn(MigrationId) -> bool) -> u64 {
        self.0
            .retain(|migration, reservation| reservation.is_pending || waits(*migration));
        self.0.values().fold(0, |sum, reservation| {
            sum.saturating_add(reservation.outstanding_bytes())
        })
    }
}

/// Returns the number of bytes of memory that the files of a directory occupy; 0 if its file system
/// is not in memory.
fn bytes_in_memory(dir: &Path) -> u64 {
    if !statfs(dir).is_ok_and(|of| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&of.filesystem_type())) {
        return 0;
    }
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    let blocks = entries
        .flatten()
        .filter_map(|entry| Some(entry.metadata().ok()?.blocks()));
    blocks.sum::<u64>().saturating_mul(BLOCK_BYTES)
}

impl Supervisor {
    /// Checks that the available memory still suffices for a task. The task may have grown since
    /// its feasibility check, while it was queued or pre-copied.
    ///
    /// With post-copy, a lack of memory would otherwise be detected only after the source has
    /// released the task.
    pub(crate) fn check_memory_for(
        &mut self,
        migration: MigrationId,
        memory: u64,
    ) -> Result<(), Failure> {
        if !self
            .migrations
            .reservations
            .record_growth(migration, memory)
        {
            return Ok(());
        }
        check_available(memory, self.reserved_bytes(), memory_available_bytes())
    }

    /// Returns the number of bytes of memory that are reserved but not used yet.
    pub(crate) fn reserved_bytes(&mut self) -> u64 {
        let (targets, following) = (&self.migrations.targets, &self.migrations.post_copies);
        let is_built = |target: &IncomingTask| matches!(target.stage, TargetStage::Restored { .. });
        self.migrations.reservations.outstanding_bytes(|migration| {
            // Post-copied memory arrives while the task is restored and while it runs.
            following.is_arriving(migration)
                || targets
                    .get(&migration)
                    .is_some_and(|target| !is_built(target))
        })
    }
}

/// Checks that the available memory covers all reservations. `reserved` is their total, which
/// includes `memory` bytes for the task to be restored.
fn check_available(memory: u64, reserved: u64, available: u64) -> Result<(), Failure> {
    if reserved <= available {
        return Ok(());
    }
    let others = reserved.saturating_sub(memory);
    Err(Failure::Refused(vec![match others {
        0 => Refusal::Memory {
            need: memory,
            have: available,
        },
        reserved => Refusal::MemoryReserved {
            need: memory,
            have: available,
            reserved,
        },
    }]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: MigrationId = MigrationId(1);
    const TWO: MigrationId = MigrationId(2);

    #[test]
    fn reservation_counts_until_refused_or_arrived() {
        let mut reservations = MemoryReservations::default();
        reservations.reserve(ONE, 100);
        reservations.reserve(TWO, 10);
        assert_eq!(
            reservations.outstanding_bytes(|_| false),
            110,
            "both are judged"
        );
        reservations.record_verdict(ONE, true);
        reservations.record_verdict(TWO, false);
        assert_eq!(
            reservations.outstanding_bytes(|migration| migration == ONE),
            100
        );
        assert_eq!(
            reservations.outstanding_bytes(|_| false),
            0,
            "it has its memory"
        );
        assert_eq!(
            reservations.outstanding_bytes(|_| true),
            0,
            "and that is final"
        );
    }

    #[test]
    fn grown_task_needs_room_for_all_its_memory() {
        const SLACK: u64 = MEMORY_SLACK_BYTES;
        let mut reservations = MemoryReservations::default();
        assert!(
            !reservations.record_growth(ONE, u64::MAX),
            "nobody has judged it"
        );
        reservations.reserve(ONE, 100);
        reservations.record_verdict(ONE, true);
        assert!(
            !reservations.record_growth(ONE, 100 + SLACK) && reservations.reserved_for(ONE) == 100,
            "so much was left over for that"
        );
        reservations.record_pre_copied(ONE, 40);
        assert!(reservations.record_growth(ONE, 101 + SLACK));
        assert_eq!(
            reservations.reserved_for(ONE),
            61 + SLACK,
            "but for what is here"
        );
        assert!(
            !reservations.record_growth(ONE, 101 + SLACK),
            "that was promised once"
        );
        reservations.record_pre_copied(ONE, 500 + SLACK);
        assert!(
            reservations.reserved_for(ONE) == 0 && reservations.record_growth(ONE, 600 + 3 * SLACK)
        );
        assert_eq!(
            reservations.reserved_for(ONE),
            60 + 2 * SLACK,
            "all that is here counts, also what was not promised then"
        );
    }

    #[test]
    fn grown_task_cannot_use_reservations_of_others() {
        assert_eq!(check_available(500, 500, 500), Ok(()));
        let refused = |refusal| Err(Failure::Refused(vec![refusal]));
        assert_eq!(
            check_available(500, 500, 499),
            refused(Refusal::Memory {
                need: 500,
                have: 499
            })
        );
        let reservations = Refusal::MemoryReserved {
            need: 500,
            have: 600,
            reserved: 200,
        };
        assert_eq!(check_available(500, 700, 600), refused(reservations));
        assert_eq!(
            check_available(500, 450, 449),
            refused(Refusal::Memory {
                need: 500,
                have: 449
            }),
            "some came ahead"
        );
    }

    #[test]
    fn images_in_memory_count_as_arrived() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        std::fs::write(dir.path().join("pages-1.img"), vec![7; 1 << 20]).expect("written");
        let mut reservations = MemoryReservations::default();
        reservations.reserve(ONE, 3 << 20);
        reservations.record_verdict(ONE, true);
        reservations.record_images(ONE, dir.path());
        assert_eq!(reservations.outstanding_bytes(|_| true), 2 << 20);
        reservations.record_pre_copied(TWO, 1 << 20);
        reservations.record_pre_copied(ONE, 1 << 20);
        assert_eq!(
            (
                reservations.outstanding_bytes(|_| true),
                reservations.reserved_for(ONE)
            ),
            (1 << 20, 1 << 20)
        );
        reservations.record_pre_copied(ONE, u64::MAX);
        reservations.reserve(ONE, 2 << 20);
        reservations.record_verdict(ONE, true);
        reservations.record_images(TWO, dir.path());
        reservations.record_images(ONE, Path::new("/proc"));
        assert_eq!(
            reservations.outstanding_bytes(|_| true),
            2 << 20,
            "nothing there is in memory"
        );
    }
}
