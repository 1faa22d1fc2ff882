//! The store for checkpoints of jobs: a directory with one subdirectory for each checkpoint, which
//! contains the images of all tasks of one job at one moment.
//!
//! - A checkpoint is complete, or it is invisible.
//! - All content is encrypted and authenticated with the key of the store. Memory images are
//!   secret, and a process that could change them could execute any code where they are restored.
//! - The store does not interpret checkpoints: the writer adds a description, which the reader gets
//!   back.
//! - Calls block on the disk. Several processes may use one store at the same time.
//!
//! | module | content |
//! | --- | --- |
//! | `id` | names of checkpoints |
//! | `seal` | encrypted files |
//! | `part` | the images of a task as one stream, which is encrypted |
//! | `manifest` | the description of a checkpoint and its parts |
//! | `draft`, `set` | a checkpoint while it is written, and while it is read |
//! | `sweep` | selection of the checkpoints to remove |
//! | `ended` | marks for jobs that have ended |
//! | `place` | the store's directory and key file |
//! | `shared` | the entries of the directory, and its lock |
//! | `disk` | all changes on the disk |

mod disk;
mod draft;
mod ended;
mod error;
mod id;
mod manifest;
mod part;
mod place;
mod seal;
mod set;
mod shared;
mod sweep;
#[cfg(test)]
mod tests;

pub use draft::Draft;
pub use error::{Act, StoreError};
pub use id::{NotASetId, SetId};
pub use manifest::{META_BYTES_MAX, PARTS_MAX, VM_BYTES_MAX};
pub use part::{FILES_MAX, IMAGES_BYTES_MAX};
pub use set::Set;
pub use shared::Unreadable;
pub use sweep::Swept;

use disk::Disk;
use sempa_proto::{Micros, Tid};
use shared::Shared;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use sweep::{Total, superfluous};

/// Default limit of the number of checkpoints.
pub const SETS_MAX: usize = 64;
/// Default limit of the size of a store.
pub const BYTES_MAX: u64 = 64 << 30;

/// Time after the final end of a job until its checkpoints are removed, unless their space is
/// needed earlier.
pub const ENDED_KEPT: Micros = Micros::from_secs(24 * 3600);

/// Name of the lock file, in the store and in each checkpoint.
const LOCK: &str = "lock";
/// Name of a checkpoint's manifest.
const MANIFEST: &str = "manifest";
/// Prefix of the directory of a checkpoint that is being written.
const DRAFT: &str = ".draft-";
/// Prefix of the directory of a checkpoint that is being deleted.
const GONE: &str = ".gone-";

/// Limits of a store. A new checkpoint is completed before old ones are removed, so the disk must
/// have space for one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of complete checkpoints.
    pub sets_max: usize,
    /// Bytes of all complete checkpoints on the disk.
    pub bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            sets_max: SETS_MAX,
            bytes_max: BYTES_MAX,
        }
    }
}

/// A complete checkpoint, as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetInfo {
    pub id: SetId,
    /// The virtual machine that made it; see [`Store::of_vm`].
    pub vm: String,
    pub job: Tid,
    /// When it was started, since 1970.
    pub made: Micros,
    /// Bytes on the disk, including the manifest.
    pub bytes: u64,
    /// Its tasks, sorted by ID.
    pub parts: Vec<PartInfo>,
    /// When its job ended for good, if it did; see [`Store::mark`].
    pub ended: Option<Micros>,
}

/// A task in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartInfo {
    pub tid: Tid,
    /// Bytes on the disk.
    pub bytes: u64,
    /// Bytes of its images when they are unpacked. Zeros are not stored, so this may be much more.
    pub images_bytes: u64,
}

/// A store. All clones share one state.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
    vm: String,
}

impl Store {
    /// Opens a store and removes the unfinished work of processes that have died. Creates the
    /// directory and the key file if they do not exist.
    ///
    /// # Errors
    /// The directory or the key file belongs to another user, or other users could read or write
    /// it, among others.
    pub fn open(dir: &Path, key_file: &Path, limits: Limits) -> Result<Store, StoreError> {
        Store::open_on(Disk::new(), dir, key_file, limits)
    }

    fn open_on(
        disk: Disk,
        dir: &Path,
        key_file: &Path,
        limits: Limits,
    ) -> Result<Store, StoreError> {
        let dir = place::directory(dir)?;
        let secret = place::secret(key_file, &dir, &disk)?;
        let shared = Shared {
            dir,
            secret,
            limits,
            disk,
        };
        let gone = {
            let _locked = shared.lock(Act::Open)?;
            shared.abandoned(Act::Open)?
        };
        shared.delete(Act::Open, &gone)?;
        Ok(Store {
            shared: Arc::new(shared),
            vm: String::new(),
        })
    }

    /// Returns the same store for the virtual machine of this name. Virtual machines number their
    /// jobs independently: equal numbers denote one job only within one virtual machine. At most
    /// [`VM_BYTES_MAX`] bytes of the name are used.
    #[must_use]
    pub fn of_vm(&self, vm: &str) -> Store {
        let whole = (0..=VM_BYTES_MAX.min(vm.len()))
            .rev()
            .find(|end| vm.is_char_boundary(*end));
        Store {
            shared: Arc::clone(&self.shared),
            vm: vm[..whole.unwrap_or(0)].to_string(),
        }
    }

    /// Starts a checkpoint. `now` is the time since 1970.
    ///
    /// # Errors
    /// [`StoreError::NoPlace`] if the limits could not be kept with this checkpoint, even after
    /// removing everything that may be removed. The newest checkpoint of each other job stays
    /// unless the job has ended for good.
    pub fn begin(&self, job: Tid, now: Micros) -> Result<Draft, StoreError> {
        Draft::begin(Arc::clone(&self.shared), self.vm.clone(), job, now)
    }

    /// Starts a copy of a checkpoint of another store. The copy has the same name and is encrypted
    /// with the key of this store. `made` is the start time of the original (since 1970), `bytes`
    /// its size.
    ///
    /// # Errors
    /// [`StoreError::There`] if this store has a checkpoint of this name; otherwise as
    /// [`Store::begin`].
    pub fn begin_copy(&self, id: SetId, made: Micros, bytes: u64) -> Result<Draft, StoreError> {
        Draft::copy(Arc::clone(&self.shared), self.vm.clone(), id, (made, bytes))
    }

    /// Returns all complete checkpoints of all virtual machines, oldest first, and the unreadable
    /// entries with the reasons.
    ///
    /// The parts of each checkpoint exist and have the right lengths; their content is verified
    /// when they are unpacked.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<(Vec<SetInfo>, Unreadable), StoreError> {
        self.shared.read_all(Act::List)
    }

    /// Opens a complete checkpoint and verifies its manifest.
    ///
    /// # Errors
    /// It does not exist, or it was changed.
    pub fn open_set(&self, id: &SetId) -> Result<Set, StoreError> {
        Set::open(Arc::clone(&self.shared), *id)
    }

    /// Removes a checkpoint, even an unreadable one.
    ///
    /// # Errors
    /// [`StoreError::InUse`] while it is open for reading.
    pub fn remove(&self, id: &SetId) -> Result<(), StoreError> {
        let act = Act::Remove;
        let gone = {
            let _locked = self.shared.lock(act)?;
            self.shared.retire_set(act, *id)?
        };
        self.shared.delete(act, &[gone])
    }

    /// True if the virtual machine of this handle made the checkpoint.
    pub fn is_own(&self, set: &SetInfo) -> bool {
        set.vm == self.vm
    }

    /// Records when the jobs of these checkpoints ended for good, or with `None` that they have
    /// been restarted. Applies to all checkpoints that the same virtual machine has made of the
    /// same job. Checkpoints that do not exist are skipped.
    ///
    /// # Errors
    /// Checkpoints whose mark could not be written stay longer.
    pub fn mark(&self, of: &[SetId], ended: Option<Micros>) -> Result<(), StoreError> {
        let (act, shared) = (Act::Mark, &self.shared);
        let _locked = shared.lock(act)?;
        let (sets, _) = shared.read_all(act)?;
        let jobs: Vec<(&str, Tid)> = sets
            .iter()
            .filter(|set| of.contains(&set.id))
            .map(|set| (&*set.vm, set.job))
            .collect();
        let theirs = sets.iter().filter(|set| {
            jobs.contains(&(&*set.vm, set.job)) && set.ended.is_some() != ended.is_some()
        });
        theirs
            .map(|set| ended::write(&shared.disk, &shared.set_dir(set.id), ended))
            .fold(Ok(()), Result::and)
    }

    /// Removes the checkpoints of jobs that ended for good [`ENDED_KEPT`] ago, then those that
    /// [`Store::sweep`] removes.
    ///
    /// # Errors
    /// Checkpoints that were not removed are unchanged.
    pub fn tidy(&self, now: Micros, keep: impl Fn(&SetInfo) -> bool) -> Result<Swept, StoreError> {
        self.remove_superfluous(Some(now), keep)
    }

    /// Removes checkpoints until the limits are kept, and the unfinished work of processes that
    /// have died.
    ///
    /// - First to go are those of jobs that have ended for good, in the order of these ends; then
    ///   the oldest.
    /// - Never removed are the newest checkpoint of a job that has not ended, checkpoints that are
    ///   open, and those for which `keep` returns true.
    /// - Unreadable checkpoints neither count nor are removed.
    ///
    /// # Errors
    /// Checkpoints that were not removed are unchanged.
    pub fn sweep(&self, keep: impl Fn(&SetInfo) -> bool) -> Result<Swept, StoreError> {
        self.remove_superfluous(None, keep)
    }

    fn remove_superfluous(
        &self,
        now: Option<Micros>,
        keep: impl Fn(&SetInfo) -> bool,
    ) -> Result<Swept, StoreError> {
        let (act, shared) = (Act::Sweep, &self.shared);
        let locked = shared.lock(act)?;
        let mut gone = shared.abandoned(act)?;
        let (sets, _) = shared.read_all(act)?;
        let mut total = Total::of(&sets);
        let mut swept = Swept::default();
        for set in superfluous(&sets, keep) {
            let is_old = |ended| now.is_some_and(|now: Micros| now.since(ended) >= ENDED_KEPT);
            if total.over(&shared.limits) == (0, 0) && !set.ended.is_some_and(is_old) {
                // Expired checkpoints come first, so no other one has expired.
                break;
            }
            match shared.retire_set(act, set.id) {
                Ok(dir) => gone.push(dir),
                Err(StoreError::InUse(_)) => continue,
                Err(why) => return Err(why),
            }
            total = Total {
                sets: total.sets - 1,
                bytes: total.bytes.saturating_sub(set.bytes),
            };
            swept.removed.push(set.clone());
        }
        drop(locked);
        (swept.sets_over, swept.bytes_over) = total.over(&shared.limits);
        shared.delete(act, &gone)?;
        Ok(swept)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store in {}", self.shared.dir.display())
    }
}
