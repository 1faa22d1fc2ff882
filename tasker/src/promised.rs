//! Memory of this host that was promised to tasks on their way here. Until a task has its memory nothing of it is seen in what
//! the kernel counts as free, and the next one that is judged would be promised the same.

use crate::supervisor::Supervisor;
use crate::target::{Stage, Target};
use checkpoint::facts::{MEMORY_SLACK_BYTES, memory_available_bytes};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use sempa_proto::MigrationId;
use sempa_proto::migration::{Failure, Refusal};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Of memory as well, and without a name in the library.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
/// Bytes of a block, as files are counted in.
const BLOCK_BYTES: u64 = 512;

/// What was promised to one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Promise {
    /// Bytes that it had when it was last looked at.
    judged: u64,
    /// Bytes of them that are here already.
    here: u64,
    /// It may be refused yet.
    is_judged: bool,
}

impl Promise {
    /// Bytes that are still to come.
    fn bytes(&self) -> u64 {
        self.judged.saturating_sub(self.here)
    }
}

/// All promises. There are no more than moves to this host and threads that judge.
#[derive(Debug, Default)]
pub(crate) struct Promised(BTreeMap<MigrationId, Promise>);

impl Promised {
    /// A task is being judged that needs so much.
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

    /// A task has so much when its images are here. If it has grown by more than what was left over for that since it was judged,
    /// what it has more is promised as well; true then.
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

    /// It was accepted, or not.
    pub(crate) fn judged(&mut self, migration: MigrationId, accepted: bool) {
        match self.0.get_mut(&migration) {
            Some(promise) if accepted => promise.is_judged = false,
            _ => drop(self.0.remove(&migration)),
        }
    }

    /// What was promised to this task.
    pub(crate) fn of(&self, migration: MigrationId) -> u64 {
        self.0.get(&migration).map_or(0, Promise::bytes)
    }

    /// So much of its memory is here already.
    pub(crate) fn came_ahead(&mut self, migration: MigrationId, bytes: u64) {
        if let Some(promise) = self.0.get_mut(&migration) {
            promise.here = promise.here.saturating_add(bytes);
        }
    }

    /// Its images are here. What they take of memory they give back while the task gets it.
    pub(crate) fn images_are_here(&mut self, migration: MigrationId, dir: &Path) {
        if let Some(promise) = self.0.get_mut(&migration) {
            promise.here = promise.here.saturating_add(in_memory(dir));
        }
    }

    /// What is promised to tasks that are judged, or of which `waits` says that they have not got it.
    fn bytes(&mut self, waits: impl Fn(MigrationId) -> bool) -> u64 {
        self.0
            .retain(|migration, promise| promise.is_judged || waits(*migration));
        self.0
            .values()
            .fold(0, |sum, promise| sum.saturating_add(promise.bytes()))
    }
}

/// Bytes that the files of a directory take of memory.
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
    /// A task may have grown since it was judged, while it waited for its turn or its memory went ahead. Where memory follows, nobody
    /// would notice that there is no room for it before the source has given the task up.
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

    /// Memory that was promised and is not used yet.
    pub(crate) fn promised_bytes(&mut self) -> u64 {
        let (targets, following) = (&self.moves.targets, &self.moves.following);
        let is_built = |target: &Target| matches!(target.stage, Stage::Held { .. });
        self.moves.promised.bytes(|migration| {
            // Memory that follows comes when the task is built, and when it runs.
            following.comes(migration)
                || targets
                    .get(&migration)
                    .is_some_and(|target| !is_built(target))
        })
    }
}

/// There is room for what was promised, among that all that a task has that is to be built.
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
    fn what_was_promised_counts_until_the_task_is_refused_or_has_it() {
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
    fn a_task_that_has_grown_since_it_was_judged_needs_room_for_all_that_it_has() {
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
    fn what_was_promised_to_others_is_no_room_for_a_task_that_has_grown() {
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
    fn images_in_memory_are_a_part_of_what_was_promised() {
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
