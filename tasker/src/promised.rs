//! Memory of this host that is reserved for tasks on their way here.
//!
//! Until a task has received its memory, the kernel still counts that memory as free, and the next
//! task would be promised the same.

use crate::supervisor::Supervisor;
use crate::target::{Stage, Target};
use checkpoint::facts::{MEMORY_SLACK_BYTES, memory_available_bytes};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use sempa_proto::MigrationId;
use sempa_proto::migration::{Failure, Refusal};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Another file system in memory; nix has no constant for it.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Unit of the block count of a file.
const BLOCK_BYTES: u64 = 512;

/// The reservation of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Promise {
    /// Bytes that the task had when it was last checked.
    judged: u64,
    /// Bytes of them that have already arrived.
    here: u64,
    /// The check is in progress; the task may still be refused.
    is_judged: bool,
}

impl Promise {
    /// Returns the bytes that have not arrived yet.
    fn bytes(&self) -> u64 {
        self.judged.saturating_sub(self.here)
    }
}

/// All reservations, by migration. Their number is bounded by the limits on migrations to this host
/// and on worker threads.
#[derive(Debug, Default)]
pub(crate) struct Promised(BTreeMap<MigrationId, Promise>);

impl Promised {
    /// Reserves memory for a task that is being checked.
    pub(crate) fn make(&mut self, migration: MigrationId, bytes: u64) {
        self.0.insert(
            migration,
            Promise {
                judged: bytes,
                here: 0,
                is_judged: true,
            },
        );
    }

    /// Records the size of a task whose images have arrived. If it has grown by more than the slack
    /// since the check, its reservation grows, too, and the result is true.
    fn grown(&mut self, migration: MigrationId, memory: u64) -> bool {
        let Some(promise) = self.0.get_mut(&migration) else {
            return false;
        };
        let has_grown = memory.saturating_sub(promise.judged) > MEMORY_SLACK_BYTES;
        if has_grown {
            promise.judged = memory;
        }
        has_grown
    }

    /// Records the verdict: the reservation stays if the task was accepted.
    pub(crate) fn judged(&mut self, migration: MigrationId, accepted: bool) {
        match self.0.get_mut(&migration) {
            Some(promise) if accepted => promise.is_judged = false,
            _ => drop(self.0.remove(&migration)),
        }
    }

    /// Returns the outstanding bytes of this task's reservation.
    pub(crate) fn of(&self, migration: MigrationId) -> u64 {
        self.0.get(&migration).map_or(0, Promise::bytes)
    }

    /// Records that `bytes` of the task's memory have arrived by pre-copy.
    pub(crate) fn came_ahead(&mut self, migration: MigrationId, bytes: u64) {
        if let Some(promise) = self.0.get_mut(&migration) {
            promise.here = promise.here.saturating_add(bytes);
        }
    }

    /// Records that the task's images have arrived. The memory they occupy is freed while the task
    /// gets its own.
    pub(crate) fn images_are_here(&mut self, migration: MigrationId, dir: &Path) {
        if let Some(promise) = self.0.get_mut(&migration) {
            promise.here = promise.here.saturating_add(in_memory(dir));
        }
    }

    /// Returns the bytes reserved for tasks being checked, and for tasks that according to `waits`
    /// do not have their memory yet.
    fn bytes(&mut self, waits: impl Fn(MigrationId) -> bool) -> u64 {
        self.0
            .retain(|migration, promise| promise.is_judged || waits(*migration));
        self.0
            .values()
            .fold(0, |sum, promise| sum.saturating_add(promise.bytes()))
    }
}

/// Returns the bytes that the files of a directory occupy in memory.
fn in_memory(dir: &Path) -> u64 {
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
    /// Checks that there is still room for a task that may have grown since its check, while it
    /// waited or was pre-copied.
    ///
    /// With post-copy, a lack of memory would otherwise show only after the source has given up the
    /// task.
    pub(crate) fn has_room_yet(
        &mut self,
        migration: MigrationId,
        memory: u64,
    ) -> Result<(), Failure> {
        if !self.moves.promised.grown(migration, memory) {
            return Ok(());
        }
        room_for(memory, self.promised_bytes(), memory_available_bytes())
    }

    /// Returns the memory that is reserved but not used yet.
    pub(crate) fn promised_bytes(&mut self) -> u64 {
        let (targets, following) = (&self.moves.targets, &self.moves.following);
        let is_built = |target: &Target| matches!(target.stage, Stage::Held { .. });
        self.moves.promised.bytes(|migration| {
            // Post-copied memory arrives when the task is built and while it runs.
            following.comes(migration)
                || targets
                    .get(&migration)
                    .is_some_and(|target| !is_built(target))
        })
    }
}

/// Checks that the available memory covers all reservations, including `memory` for the task to be
/// built.
fn room_for(memory: u64, promised: u64, available: u64) -> Result<(), Failure> {
    if promised <= available {
        return Ok(());
    }
    let others = promised.saturating_sub(memory);
    Err(Failure::Refused(vec![match others {
        0 => Refusal::Memory {
            need: memory,
            have: available,
        },
        promised => Refusal::MemoryPromised {
            need: memory,
            have: available,
            promised,
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
        let mut promised = Promised::default();
        promised.make(ONE, 100);
        promised.make(TWO, 10);
        assert_eq!(promised.bytes(|_| false), 110, "both are judged");
        promised.judged(ONE, true);
        promised.judged(TWO, false);
        assert_eq!(promised.bytes(|migration| migration == ONE), 100);
        assert_eq!(promised.bytes(|_| false), 0, "it has its memory");
        assert_eq!(promised.bytes(|_| true), 0, "and that is final");
    }

    #[test]
    fn grown_task_needs_room_for_all_its_memory() {
        const SLACK: u64 = MEMORY_SLACK_BYTES;
        let mut promised = Promised::default();
        assert!(!promised.grown(ONE, u64::MAX), "nobody has judged it");
        promised.make(ONE, 100);
        promised.judged(ONE, true);
        assert!(
            !promised.grown(ONE, 100 + SLACK) && promised.of(ONE) == 100,
            "so much was left over for that"
        );
        promised.came_ahead(ONE, 40);
        assert!(promised.grown(ONE, 101 + SLACK));
        assert_eq!(promised.of(ONE), 61 + SLACK, "but for what is here");
        assert!(!promised.grown(ONE, 101 + SLACK), "that was promised once");
        promised.came_ahead(ONE, 500 + SLACK);
        assert!(promised.of(ONE) == 0 && promised.grown(ONE, 600 + 3 * SLACK));
        assert_eq!(
            promised.of(ONE),
            60 + 2 * SLACK,
            "all that is here counts, also what was not promised then"
        );
    }

    #[test]
    fn grown_task_cannot_use_reservations_of_others() {
        assert_eq!(room_for(500, 500, 500), Ok(()));
        let refused = |refusal| Err(Failure::Refused(vec![refusal]));
        assert_eq!(
            room_for(500, 500, 499),
            refused(Refusal::Memory {
                need: 500,
                have: 499
            })
        );
        let promised = Refusal::MemoryPromised {
            need: 500,
            have: 600,
            promised: 200,
        };
        assert_eq!(room_for(500, 700, 600), refused(promised));
        assert_eq!(
            room_for(500, 450, 449),
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
        let mut promised = Promised::default();
        promised.make(ONE, 3 << 20);
        promised.judged(ONE, true);
        promised.images_are_here(ONE, dir.path());
        assert_eq!(promised.bytes(|_| true), 2 << 20);
        promised.came_ahead(TWO, 1 << 20);
        promised.came_ahead(ONE, 1 << 20);
        assert_eq!(
            (promised.bytes(|_| true), promised.of(ONE)),
            (1 << 20, 1 << 20)
        );
        promised.came_ahead(ONE, u64::MAX);
        promised.make(ONE, 2 << 20);
        promised.judged(ONE, true);
        promised.images_are_here(TWO, dir.path());
        promised.images_are_here(ONE, Path::new("/proc"));
        assert_eq!(
            promised.bytes(|_| true),
            2 << 20,
            "nothing there is in memory"
        );
    }
}
