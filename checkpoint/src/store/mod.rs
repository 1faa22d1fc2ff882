//! The store for checkpoints of jobs: a directory with one subdirectory for each checkpoint, which
//! contains the images of all tasks of one job at one moment.
//!
//! - A checkpoint is complete, or it is invisible.
//! - All content is encrypted and authenticated with the key of the store. Memory images are
//!   secret, and a process that could change them could execute any code where they are restored.
//! - The store does not interpret checkpoints: the writer adds a description, which readers receive
//!   unchanged.
//! - Calls block on the disk. Several processes may use one store at the same time.
//!
//! | module | content |
//! | --- | --- |
//! | `id` | names of checkpoints |
//! | `encryption` | encrypted files |
//! | `part` | the images of a task as one stream, which is encrypted |
//! | `manifest` | the description of a checkpoint and its parts |
//! | `draft`, `stored_checkpoint` | a checkpoint while it is written, and while it is read |
//! | `sweep` | selection of the checkpoints to remove |
//! | `end_mark` | marks for jobs that have ended |
//! | `location` | the store's directory and key file |
//! | `shared` | the entries of the directory, and its lock |
//! | `disk` | all changes on the disk |

mod disk;
mod draft;
mod encryption;
mod end_mark;
mod error;
mod id;
mod location;
mod manifest;
mod part;
mod shared;
mod stored_checkpoint;
mod sweep;
#[cfg(test)]
mod tests;

pub use draft::CheckpointDraft;
pub use error::{StoreError, StoreOperation};
pub use id::{CheckpointId, InvalidCheckpointId};
pub use manifest::{META_BYTES_MAX, PARTS_MAX, VM_BYTES_MAX};
pub use part::{IMAGE_FILES_MAX, IMAGES_BYTES_MAX};
pub use shared::UnreadableEntries;
pub use stored_checkpoint::StoredCheckpoint;
pub use sweep::SweepResult;

use disk::Disk;
use sempa_proto::{Micros, Tid};
use shared::StoreState;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use sweep::{StoreUsage, removable};

/// Default maximum number of checkpoints in a store.
pub const CHECKPOINTS_MAX: usize = 64;
/// Default maximum size of a store in bytes.
pub const STORE_BYTES_MAX: u64 = 64 << 30;

/// Time after the end of a job that will not be restarted until its checkpoints are removed, unless
/// their space is needed earlier.
pub const ENDED_RETENTION: Micros = Micros::from_secs(24 * 3600);

/// Name of the lock file in the store's directory and in each checkpoint.
const LOCK_FILE: &str = "lock";
/// Name of the manifest file in a checkpoint's directory.
const MANIFEST_FILE: &str = "manifest";
/// Prefix of the directory name of a checkpoint that is being written.
const DRAFT_PREFIX: &str = ".draft-";
/// Prefix of the directory name of a checkpoint that is being deleted.
const DELETED_PREFIX: &str = ".gone-";

/// Limits of a store. A new checkpoint is completed before old ones are removed, so the disk needs
/// space for one additional checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Maximum number of complete checkpoints.
    pub checkpoints_max: usize,
    /// Maximum size in bytes of all complete checkpoints on the disk.
    pub bytes_max: u64,
}

impl Default for StoreLimits {
    fn default() -> StoreLimits {
        StoreLimits {
            checkpoints_max: CHECKPOINTS_MAX,
            bytes_max: STORE_BYTES_MAX,
        }
    }
}

/// Information about a complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointInfo {
    pub id: CheckpointId,
    /// Name of the virtual machine that made the checkpoint; see [`CheckpointStore::for_vm`].
    pub vm: String,
    pub job: Tid,
    /// Time since 1970 at which the checkpoint was started.
    pub started: Micros,
    /// Size in bytes on the disk, including the manifest.
    pub bytes: u64,
    /// The tasks of the checkpoint, sorted by id.
    pub parts: Vec<PartInfo>,
    /// Time at which the job ended without being restarted; `None` if it has not ended. See
    /// [`CheckpointStore::mark_jobs_ended`].
    pub job_ended_at: Option<Micros>,
}

/// Information about one task in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartInfo {
    pub tid: Tid,
    /// Size in bytes of the encrypted images on the disk.
    pub bytes: u64,
    /// Size in bytes of the unpacked images. Zeros are not stored, so this may be much more than
    /// `bytes`.
    pub images_bytes: u64,
}

/// A handle to a store for one virtual machine. All clones share one state.
#[derive(Clone)]
pub struct CheckpointStore {
    state: Arc<StoreState>,
    vm: String,
}

impl CheckpointStore {
    /// Opens a store and removes incomplete files of processes that have died. Creates the
    /// directory and the key file if they do not exist.
    ///
    /// # Errors
    /// Among others: the directory or the key file belongs to another user, or other users could
    /// read or write it.
    pub fn open(
        dir: &Path,
        key_file: &Path,
        limits: StoreLimits,
    ) -> Result<CheckpointStore, StoreError> {
        CheckpointStore::open_on(Disk::new(), dir, key_file, limits)
    }

    fn open_on(
        disk: Disk,
        dir: &Path,
        key_file: &Path,
        limits: StoreLimits,
    ) -> Result<CheckpointStore, StoreError> {
        let dir = location::open_directory(dir)?;
        let secret = location::read_key(key_file, &dir, &disk)?;
        let shared = StoreState {
            dir,
            secret,
            limits,
            disk,
        };
        let gone = {
            let _locked = shared.lock(StoreOperation::Open)?;
            shared.hide_abandoned_drafts(StoreOperation::Open)?
        };
        shared.delete_hidden(StoreOperation::Open, &gone)?;
        Ok(CheckpointStore {
            state: Arc::new(shared),
            vm: String::new(),
        })
    }

    /// Returns a handle to the same store for the virtual machine with this name. Virtual machines
    /// number their jobs independently: equal numbers denote the same job only within one virtual
    /// machine. At most [`VM_BYTES_MAX`] bytes of the name are used.
    #[must_use]
    pub fn for_vm(&self, vm: &str) -> CheckpointStore {
        let end = (0..=VM_BYTES_MAX.min(vm.len()))
            .rev()
            .find(|end| vm.is_char_boundary(*end));
        CheckpointStore {
            state: Arc::clone(&self.state),
            vm: vm[..end.unwrap_or(0)].to_string(),
        }
    }

    /// Starts to write a checkpoint. `now` is the time since 1970.
    ///
    /// # Errors
    /// [`StoreError::LimitsExceeded`] if the store would exceed its limits with this checkpoint,
    /// even after removing all checkpoints that may be removed. The newest checkpoint of each other
    /// job may not be removed unless the job has ended for good.
    pub fn begin(&self, job: Tid, now: Micros) -> Result<CheckpointDraft, StoreError> {
        CheckpointDraft::begin(Arc::clone(&self.state), self.vm.clone(), job, now)
    }

    /// Starts to write a copy of a checkpoint of another store. The copy has the same name and is
    /// encrypted with the key of this store. `started` is the start time of the original (since
    /// 1970), `bytes` its size.
    ///
    /// # Errors
    /// [`StoreError::CheckpointExists`] if this store has a checkpoint with this name; otherwise as
    /// [`CheckpointStore::begin`].
    pub fn begin_copy(
        &self,
        id: CheckpointId,
        started: Micros,
        bytes: u64,
    ) -> Result<CheckpointDraft, StoreError> {
        CheckpointDraft::begin_copy(
            Arc::clone(&self.state),
            self.vm.clone(),
            id,
            (started, bytes),
        )
    }

    /// Returns all complete checkpoints of all virtual machines, oldest first, and the unreadable
    /// entries with the reasons.
    ///
    /// The parts of each returned checkpoint exist and have the correct lengths. Their content is
    /// verified only when they are unpacked.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list_checkpoints(&self) -> Result<(Vec<CheckpointInfo>, UnreadableEntries), StoreError> {
        self.state.read_checkpoints(StoreOperation::List)
    }

    /// Opens a complete checkpoint and verifies its manifest.
    ///
    /// # Errors
    /// The checkpoint does not exist, or it was changed.
    pub fn open_checkpoint(&self, id: &CheckpointId) -> Result<StoredCheckpoint, StoreError> {
        StoredCheckpoint::open(Arc::clone(&self.state), *id)
    }

    /// Removes a checkpoint, even an unreadable one.
    ///
    /// # Errors
    /// [`StoreError::InUse`] while it is open for reading.
    pub fn remove(&self, id: &CheckpointId) -> Result<(), StoreError> {
        let operation = StoreOperation::Remove;
        let gone = {
            let _locked = self.state.lock(operation)?;
            self.state.hide_checkpoint(operation, *id)?
        };
        self.state.delete_hidden(operation, &[gone])
    }

    /// True if the virtual machine of this handle made the checkpoint.
    pub fn is_own_checkpoint(&self, checkpoint: &CheckpointInfo) -> bool {
        checkpoint.vm == self.vm
    }

    /// Records that the jobs of these checkpoints have ended for good at the time `ended`, or, if
    /// it is `None`, that they have been restarted. Applies to all checkpoints that the same
    /// virtual machine has made of the same job. Checkpoints that do not exist are skipped.
    ///
    /// # Errors
    /// Checkpoints whose mark could not be written are retained longer.
    pub fn mark_jobs_ended(
        &self,
        ids: &[CheckpointId],
        ended: Option<Micros>,
    ) -> Result<(), StoreError> {
        let (operation, shared) = (StoreOperation::Mark, &self.state);
        let _locked = shared.lock(operation)?;
        let (checkpoints, _) = shared.read_checkpoints(operation)?;
        let jobs: Vec<(&str, Tid)> = checkpoints
            .iter()
            .filter(|checkpoint| ids.contains(&checkpoint.id))
            .map(|checkpoint| (&*checkpoint.vm, checkpoint.job))
            .collect();
        let marked = checkpoints.iter().filter(|checkpoint| {
            jobs.contains(&(&*checkpoint.vm, checkpoint.job))
                && checkpoint.job_ended_at.is_some() != ended.is_some()
        });
        marked
            .map(|checkpoint| {
                end_mark::write_end_mark(&shared.disk, &shared.checkpoint_dir(checkpoint.id), ended)
            })
            .fold(Ok(()), Result::and)
    }

    /// Removes the checkpoints of jobs that have ended for good at least [`ENDED_RETENTION`] ago,
    /// then the checkpoints that [`CheckpointStore::enforce_limits`] removes.
    ///
    /// # Errors
    /// Checkpoints that were not removed are unchanged.
    pub fn remove_expired(
        &self,
        now: Micros,
        keep: impl Fn(&CheckpointInfo) -> bool,
    ) -> Result<SweepResult, StoreError> {
        self.remove_superfluous(Some(now), keep)
    }

    /// Removes checkpoints until the store is within its limits, and removes incomplete files of
    /// processes that have died.
    ///
    /// - Checkpoints of jobs that have ended for good are removed first, in the order in which the
    ///   jobs ended; then the oldest checkpoints are removed.
    /// - Not removed are the newest checkpoint of a job that has not ended, checkpoints that are
    ///   open, and checkpoints for which `keep` returns true.
    /// - Unreadable checkpoints neither count nor are removed.
    ///
    /// # Errors
    /// Checkpoints that were not removed are unchanged.
    pub fn enforce_limits(
        &self,
        keep: impl Fn(&CheckpointInfo) -> bool,
    ) -> Result<SweepResult, StoreError> {
        self.remove_superfluous(None, keep)
    }

    fn remove_superfluous(
        &self,
        now: Option<Micros>,
        keep: impl Fn(&CheckpointInfo) -> bool,
    ) -> Result<SweepResult, StoreError> {
        let (operation, shared) = (StoreOperation::Sweep, &self.state);
        let locked = shared.lock(operation)?;
        let mut gone = shared.hide_abandoned_drafts(operation)?;
        let (checkpoints, _) = shared.read_checkpoints(operation)?;
        let mut total = StoreUsage::total(&checkpoints);
        let mut swept = SweepResult::default();
        for checkpoint in removable(&checkpoints, keep) {
            let is_expired =
                |ended| now.is_some_and(|now: Micros| now.since(ended) >= ENDED_RETENTION);
            if total.excess(&shared.limits) == (0, 0)
                && !checkpoint.job_ended_at.is_some_and(is_expired)
            {
                // Expired checkpoints are first in the list, so no further checkpoint has expired.
                break;
            }
            match shared.hide_checkpoint(operation, checkpoint.id) {
                Ok(dir) => gone.push(dir),
                Err(StoreError::InUse(_)) => continue,
                Err(why) => return Err(why),
            }
            total = StoreUsage {
                checkpoints: total.checkpoints - 1,
                bytes: total.bytes.saturating_sub(checkpoint.bytes),
            };
            swept.removed.push(checkpoint.clone());
        }
        drop(locked);
        (swept.checkpoints_over_limit, swept.bytes_over_limit) = total.excess(&shared.limits);
        shared.delete_hidden(operation, &gone)?;
        Ok(swept)
    }
}

impl fmt::Debug for CheckpointStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store in {}", self.state.dir.display())
    }
}
