//! Memory of this host that is reserved for tasks that are migrating to it.
//!
//! Until a task has received its memory, the kernel still counts that memory as free. Without
//! reservations the tasker would promise the same memory to several tasks.

use crate::supervisor::Supervisor;
use crate::target::{IncomingTask, TargetStage};
use checkpoint::facts::{MEMORY_SLACK_BYTES, memory_available_bytes};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use sempa_proto::MigrationId;
use sempa_proto::migration::{Failure, Refusal};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// File system type of ramfs, which stores files in memory like tmpfs. nix has no constant for it.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Size in bytes of the blocks in which stat(2) reports the disk usage of a file.
const BLOCK_BYTES: u64 = 512;

/// The memory reservation of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reservation {
    /// Memory in bytes that the task had at its last check.
    checked_bytes: u64,
    /// Number of bytes of the task's memory that have already arrived.
    arrived_bytes: u64,
    /// True during the task's feasibility check, after which the task may still be refused.
    is_pending: bool,
}

impl Reservation {
    /// Returns the number of bytes that have not arrived yet.
    fn missing_bytes(&self) -> u64 {
        self.checked_bytes.saturating_sub(self.arrived_bytes)
    }
}

/// All memory reservations, by migration. The limits on migrations to this host and on worker
/// threads bound their number.
#[derive(Debug, Default)]
pub(crate) struct MemoryReservations(BTreeMap<MigrationId, Reservation>);

impl MemoryReservations {
    /// Reserves `bytes` bytes of memory for a task during its feasibility check.
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

    /// Records the memory of a task whose images have arrived, in bytes. Returns true if the memory
    /// has grown by more than [`MEMORY_SLACK_BYTES`] since the check; the reservation then grows,
    /// too.
    fn record_growth(&mut self, migration: MigrationId, memory_bytes: u64) -> bool {
        let Some(reservation) = self.0.get_mut(&migration) else {
            return false;
        };
        let has_grown = memory_bytes.saturating_sub(reservation.checked_bytes) > MEMORY_SLACK_BYTES;
        if has_grown {
            reservation.checked_bytes = memory_bytes;
        }
        has_grown
    }

    /// Records the verdict on a task: removes its reservation if the task was refused.
    pub(crate) fn record_verdict(&mut self, migration: MigrationId, is_accepted: bool) {
        match self.0.get_mut(&migration) {
            Some(reservation) if is_accepted => reservation.is_pending = false,
            _ => drop(self.0.remove(&migration)),
        }
    }

    /// Returns the memory in bytes that this task had at its last check.
    pub(crate) fn checked_bytes(&self, migration: MigrationId) -> u64 {
        let reservation = self.0.get(&migration);
        reservation.map_or(0, |reservation| reservation.checked_bytes)
    }

    /// Returns the number of bytes that are reserved for this task and have not arrived yet.
    pub(crate) fn bytes_reserved_for(&self, migration: MigrationId) -> u64 {
        self.0.get(&migration).map_or(0, Reservation::missing_bytes)
    }

    /// Records that `bytes` of the task's memory have arrived by pre-copy.
    pub(crate) fn record_pre_copied_bytes(&mut self, migration: MigrationId, bytes: u64) {
        if let Some(reservation) = self.0.get_mut(&migration) {
            reservation.arrived_bytes = reservation.arrived_bytes.saturating_add(bytes);
        }
    }

    /// Records the arrival of the task's images in the directory `dir`. If the images are in
    /// memory, that memory is freed while the task is restored, so it counts as arrived.
    pub(crate) fn record_image_arrival(&mut self, migration: MigrationId, dir: &Path) {
        if let Some(reservation) = self.0.get_mut(&migration) {
            reservation.arrived_bytes = reservation
                .arrived_bytes
                .saturating_add(bytes_in_memory(dir));
        }
    }

    /// Returns the number of reserved bytes of two groups of tasks: those during their feasibility
    /// check, and those whose memory has not arrived. `awaits_memory` returns true for the
    /// migrations of the second group. Removes all other reservations.
    fn outstanding_bytes(&mut self, awaits_memory: impl Fn(MigrationId) -> bool) -> u64 {
        self.0
            .retain(|migration, reservation| reservation.is_pending || awaits_memory(*migration));
        self.0.values().fold(0, |sum, reservation| {
            sum.saturating_add(reservation.missing_bytes())
        })
    }
}

/// Returns the number of bytes of memory that the files of a directory occupy; 0 if its file system
/// is not in memory.
fn bytes_in_memory(dir: &Path) -> u64 {
    if !statfs(dir).is_ok_and(|file_system| {
        [TMPFS_MAGIC, RAMFS_MAGIC].contains(&file_system.filesystem_type())
    }) {
        return 0;
    }
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    let block_count = entries
        .flatten()
        .filter_map(|entry| Some(entry.metadata().ok()?.blocks()));
    block_count.sum::<u64>().saturating_mul(BLOCK_BYTES)
}

impl Supervisor {
    /// Checks that the available memory still suffices for a task with `memory_bytes` bytes. The
    /// task may have grown since its feasibility check, while it was queued or pre-copied.
    ///
    /// With post-copy, a lack of memory would otherwise be detected only after the source has
    /// released the task.
    pub(crate) fn check_grown_memory(
        &mut self,
        migration: MigrationId,
        memory_bytes: u64,
    ) -> Result<(), Failure> {
        if !self
            .migrations
            .reservations
            .record_growth(migration, memory_bytes)
        {
            return Ok(());
        }
        check_available(
            memory_bytes,
            self.reserved_bytes(),
            memory_available_bytes(),
        )
    }

    /// Returns the number of reserved bytes of memory that have not arrived yet.
    pub(crate) fn reserved_bytes(&mut self) -> u64 {
        let (targets, post_copies) = (
            &self.migrations.incoming_tasks,
            &self.migrations.post_copies,
        );
        let is_restored =
            |target: &IncomingTask| matches!(target.stage, TargetStage::Restored { .. });
        self.migrations.reservations.outstanding_bytes(|migration| {
            // Post-copied memory arrives while the task is restored and while it runs.
            post_copies.is_memory_arriving(migration)
                || targets
                    .get(&migration)
                    .is_some_and(|target| !is_restored(target))
        })
    }
}

/// Checks that the available memory covers all reservations. `reserved_bytes` is their total, which
/// includes `task_bytes` bytes for the task that is being restored. All numbers are bytes.
fn check_available(
    task_bytes: u64,
    reserved_bytes: u64,
    available_bytes: u64,
) -> Result<(), Failure> {
    if reserved_bytes <= available_bytes {
        return Ok(());
    }
    let reserved_bytes_of_others = reserved_bytes.saturating_sub(task_bytes);
    Err(Failure::Refused(vec![match reserved_bytes_of_others {
        0 => Refusal::Memory {
            need: task_bytes,
            have: available_bytes,
        },
        reserved_bytes => Refusal::MemoryReserved {
            need: task_bytes,
            have: available_bytes,
            reserved_bytes,
        },
    }]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIGRATION_1: MigrationId = MigrationId(1);
    const MIGRATION_2: MigrationId = MigrationId(2);

    #[test]
    fn reservation_counts_until_refused_or_arrived() {
        let mut reservations = MemoryReservations::default();
        reservations.reserve(MIGRATION_1, 100);
        reservations.reserve(MIGRATION_2, 10);
        assert_eq!(
            reservations.outstanding_bytes(|_| false),
            110,
            "both are judged"
        );
        reservations.record_verdict(MIGRATION_1, true);
        reservations.record_verdict(MIGRATION_2, false);
        assert_eq!(
            reservations.outstanding_bytes(|migration| migration == MIGRATION_1),
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
        const SLACK_BYTES: u64 = MEMORY_SLACK_BYTES;
        let mut reservations = MemoryReservations::default();
        assert!(
            !reservations.record_growth(MIGRATION_1, u64::MAX),
            "nobody has judged it"
        );
        reservations.reserve(MIGRATION_1, 100);
        reservations.record_verdict(MIGRATION_1, true);
        assert!(
            !reservations.record_growth(MIGRATION_1, 100 + SLACK_BYTES)
                && reservations.bytes_reserved_for(MIGRATION_1) == 100,
            "so much was left over for that"
        );
        reservations.record_pre_copied_bytes(MIGRATION_1, 40);
        assert!(reservations.record_growth(MIGRATION_1, 101 + SLACK_BYTES));
        assert_eq!(
            reservations.bytes_reserved_for(MIGRATION_1),
            61 + SLACK_BYTES,
            "but for what is here"
        );
        assert!(
            !reservations.record_growth(MIGRATION_1, 101 + SLACK_BYTES),
            "that was promised once"
        );
        reservations.record_pre_copied_bytes(MIGRATION_1, 500 + SLACK_BYTES);
        assert!(
            reservations.bytes_reserved_for(MIGRATION_1) == 0
                && reservations.record_growth(MIGRATION_1, 600 + 3 * SLACK_BYTES)
        );
        assert_eq!(
            reservations.bytes_reserved_for(MIGRATION_1),
            60 + 2 * SLACK_BYTES,
            "all that is here counts, also what was not promised then"
        );
    }

    #[test]
    fn grown_task_cannot_use_reservations_of_others() {
        assert_eq!(check_available(500, 500, 500), Ok(()));
        let refusal_error = |refusal| Err(Failure::Refused(vec![refusal]));
        assert_eq!(
            check_available(500, 500, 499),
            refusal_error(Refusal::Memory {
                need: 500,
                have: 499
            })
        );
        let memory_refusal = Refusal::MemoryReserved {
            need: 500,
            have: 600,
            reserved_bytes: 200,
        };
        assert_eq!(
            check_available(500, 700, 600),
            refusal_error(memory_refusal)
        );
        assert_eq!(
            check_available(500, 450, 449),
            refusal_error(Refusal::Memory {
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
        reservations.reserve(MIGRATION_1, 3 << 20);
        reservations.record_verdict(MIGRATION_1, true);
        reservations.record_image_arrival(MIGRATION_1, dir.path());
        assert_eq!(reservations.outstanding_bytes(|_| true), 2 << 20);
        reservations.record_pre_copied_bytes(MIGRATION_2, 1 << 20);
        reservations.record_pre_copied_bytes(MIGRATION_1, 1 << 20);
        assert_eq!(
            (
                reservations.outstanding_bytes(|_| true),
                reservations.bytes_reserved_for(MIGRATION_1)
            ),
            (1 << 20, 1 << 20)
        );
        reservations.record_pre_copied_bytes(MIGRATION_1, u64::MAX);
        reservations.reserve(MIGRATION_1, 2 << 20);
        reservations.record_verdict(MIGRATION_1, true);
        reservations.record_image_arrival(MIGRATION_2, dir.path());
        reservations.record_image_arrival(MIGRATION_1, Path::new("/proc"));
        assert_eq!(
            reservations.outstanding_bytes(|_| true),
            2 << 20,
            "nothing there is in memory"
        );
    }
}
