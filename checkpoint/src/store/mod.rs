//! The store of job checkpoints: a directory with sets, each of which holds the images of the tasks of one job as they were
//! at one moment. A set is complete or it cannot be seen. All that is in it is sealed with the key of the store, because
//! images of memory are secret, and because whoever could change them could run anything where they are restored.
//!
//! The store knows nothing of what a set means: its maker puts a description in, and finds it again. Calls block on the
//! disk. Several processes may use one store at once.
//!
//! * `id`: names of sets.
//! * `seal`: sealed files. `part`: the images of a task as what is sealed. `manifest`: what a set is.
//! * `draft`: a set while it is made. `set`: a set while it is read. `sweep`: which sets are superfluous. `ended`: whose job is
//!   over.
//! * `place`: directory and key file. `shared`: what lies in the directory, and its lock. `disk`: every change of it.

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

/// Sets of a store unless somebody wants otherwise.
pub const SETS_MAX: usize = 64;
/// Bytes of a store unless somebody wants otherwise.
pub const BYTES_MAX: u64 = 64 << 30;

/// The sets of a job that has ended for good go this long after its end, if their room is not needed before.
pub const ENDED_KEPT: Micros = Micros::from_secs(24 * 3600);

/// The file whose lock is that of the store, and in a set that of the set.
const LOCK: &str = "lock";
/// The manifest of a set.
const MANIFEST: &str = "manifest";
/// In front of the name of a set that is being made.
const DRAFT: &str = ".draft-";
/// In front of the name of a set that is being deleted.
const GONE: &str = ".gone-";

/// How much a store may hold. A set is complete before those that it makes superfluous go, so the disk has to have room for
/// one set more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Complete sets.
    pub sets_max: usize,
    /// Bytes of all complete sets on the disk.
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

/// A complete set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetInfo {
    /// Its name.
    pub id: SetId,
    /// The virtual machine that made it; see [`Store::of_vm`].
    pub vm: String,
    /// The job.
    pub job: Tid,
    /// When it was begun, since 1970.
    pub made: Micros,
    /// Bytes on the disk, with the manifest.
    pub bytes: u64,
    /// Its tasks, sorted.
    pub parts: Vec<PartInfo>,
    /// When its job ended for good, if it did; see [`Store::mark`].
    pub ended: Option<Micros>,
}

/// A task in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartInfo {
    /// The task.
    pub tid: Tid,
    /// Bytes on the disk.
    pub bytes: u64,
    /// Bytes of its images when they are unpacked. Zeros are not stored, so there may be many more of these.
    pub images_bytes: u64,
}

/// A store. All clones are one handle.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
    vm: String,
}

impl Store {
    /// Opens a store and removes what a process that died left unfinished in it. Directory and key file are made if they are
    /// not there.
    ///
    /// # Errors
    /// When the directory or the key file could be read or written by others, or belong to somebody else, among others.
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

    /// The same store for a virtual machine of this name. Virtual machines number their jobs each for itself: jobs of the same
    /// number are one job only if this is the same as well. At most [`VM_BYTES_MAX`] bytes of it are used.
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

    /// Begins a set. `now` is the time since 1970.
    ///
    /// # Errors
    /// [`StoreError::NoPlace`] when the limits could not be kept with this set, even if all that may be removed were: the
    /// newest set of each other job that has not ended for good stays.
    pub fn begin(&self, job: Tid, now: Micros) -> Result<Draft, StoreError> {
        Draft::begin(Arc::clone(&self.shared), self.vm.clone(), job, now)
    }

    /// Begins a copy of a set of another store: of the same name, begun then (since 1970), of so many bytes there. It is sealed
    /// with the key of this store.
    ///
    /// # Errors
    /// [`StoreError::There`] when there is a set of this name; and as [`Store::begin`].
    pub fn begin_copy(&self, id: SetId, made: Micros, bytes: u64) -> Result<Draft, StoreError> {
        Draft::copy(Arc::clone(&self.shared), self.vm.clone(), id, (made, bytes))
    }

    /// All complete sets, of all virtual machines, oldest first; and what is there but cannot be read, with why. The parts
    /// are there and have their lengths; whether they are as they were written is known when they are unpacked.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list(&self) -> Result<(Vec<SetInfo>, Unreadable), StoreError> {
        self.shared.read_all(Act::List)
    }

    /// Opens a complete set and verifies what it says of itself.
    ///
    /// # Errors
    /// When it is not there or not as it was made.
    pub fn open_set(&self, id: &SetId) -> Result<Set, StoreError> {
        Set::open(Arc::clone(&self.shared), *id)
    }

    /// Removes a set, also one that cannot be read.
    ///
    /// # Errors
    /// [`StoreError::InUse`] while somebody has it open.
    pub fn remove(&self, id: &SetId) -> Result<(), StoreError> {
        let act = Act::Remove;
        let gone = {
            let _locked = self.shared.lock(act)?;
            self.shared.retire_set(act, *id)?
        };
        self.shared.delete(act, &[gone])
    }

    /// True for a set that was made by the virtual machine of this name.
    pub fn is_own(&self, set: &SetInfo) -> bool {
        set.vm == self.vm
    }

    /// The jobs of these sets have ended for good, so that nobody is likely to want their sets: all those that the same virtual
    /// machine has made of the same job. Or they have not, because one of them was started again: then this is taken back.
    /// Sets that are no more are passed over.
    ///
    /// # Errors
    /// Those that could not be written stay for longer.
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

    /// Removes the sets of jobs that ended for good [`ENDED_KEPT`] ago, and then as [`Store::sweep`] does.
    ///
    /// # Errors
    /// What was not removed stays as it was.
    pub fn tidy(&self, now: Micros, keep: impl Fn(&SetInfo) -> bool) -> Result<Swept, StoreError> {
        self.remove_superfluous(Some(now), keep)
    }

    /// Removes sets until the limits are kept: first those of jobs that have ended for good, the one that ended first first,
    /// and then the oldest, but not the newest one of a job, none that is open, and none that the caller keeps; and what a
    /// process that died left unfinished. Sets that cannot be read neither count nor go.
    ///
    /// # Errors
    /// What was not removed stays as it was.
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
                // Those that ended long ago come first.
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
