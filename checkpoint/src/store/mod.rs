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
//! | `claim` | which virtual machine runs a job |
//! | `end_mark`, `damage_mark` | marks for jobs that have ended, and for damaged checkpoints |
//! | `location` | the store's directory and key file |
//! | `shared` | the entries of the directory, and its lock |
//! | `disk` | all changes on the disk |

mod claim;
mod damage_mark;
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

pub use claim::CLAIM_BYTES_MAX;
pub use draft::CheckpointDraft;
pub use error::{StoreError, StoreOperation};
pub use id::{CheckpointId, InvalidCheckpointId};
pub use manifest::{DESCRIPTION_BYTES_MAX, PARTS_MAX, VM_BYTES_MAX};
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
use sweep::{StoreUsage, select_removable};

/// Default maximum number of checkpoints in a store.
pub const CHECKPOINTS_MAX: usize = 64;
/// Default maximum size of a store in bytes.
pub const STORE_BYTES_MAX: u64 = 64 << 30;

/// Time for which the checkpoints of a job are retained after the job has ended and will not be
/// restarted. The checkpoints are removed earlier if their space is needed.
pub const ENDED_JOB_RETENTION: Micros = Micros::from_secs(24 * 3600);

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
    fn default() -> Self {
        Self {
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
    pub started_at: Micros,
    /// Size in bytes on the disk, including the manifest.
    pub bytes: u64,
    /// The tasks of the checkpoint, sorted by id.
    pub parts: Vec<PartInfo>,
    /// Time at which the job ended without being restarted; `None` if no end is recorded. See
    /// [`CheckpointStore::mark_jobs_ended`].
    pub job_ended_at: Option<Micros>,
    /// The reason why the checkpoint was refused when it was last read; `None` if it was not. See
    /// [`CheckpointStore::mark_damaged`].
    pub damage: Option<String>,
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
    /// The directory or the key file cannot be created or read, belongs to another user, or is
    /// accessible to other users.
    pub fn open(dir: &Path, key_file: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        Self::open_with_disk(Disk::new(), dir, key_file, limits)
    }

    fn open_with_disk(
        disk: Disk,
        dir: &Path,
        key_file: &Path,
        limits: StoreLimits,
    ) -> Result<Self, StoreError> {
        let dir = location::open_directory(dir)?;
        let store_key = location::read_key(key_file, &dir, &disk)?;
        let store_state = StoreState {
            dir,
            store_key,
            limits,
            disk,
        };
        let hidden_dirs = {
            let _store_lock = store_state.wait_for_lock(StoreOperation::Open)?;
            store_state.hide_abandoned_drafts(StoreOperation::Open)?
        };
        store_state.delete_hidden_dirs(StoreOperation::Open, &hidden_dirs)?;
        Ok(Self {
            state: Arc::new(store_state),
            vm: String::new(),
        })
    }

    /// Returns a handle to the same store for the virtual machine with this name. Virtual machines
    /// number their jobs independently: equal numbers denote the same job only within one virtual
    /// machine. A name longer than [`VM_BYTES_MAX`] bytes is truncated.
    #[must_use]
    pub fn for_vm(&self, vm: &str) -> Self {
        let name_end = (0..=VM_BYTES_MAX.min(vm.len()))
            .rev()
            .find(|name_end| vm.is_char_boundary(*name_end));
        Self {
            state: Arc::clone(&self.state),
            vm: vm[..name_end.unwrap_or(0)].to_string(),
        }
    }

    /// Starts to write a checkpoint. `now` is the time since 1970.
    ///
    /// # Errors
    /// [`StoreError::LimitsExceeded`] if the store would exceed its limits with this checkpoint,
    /// even after removing all checkpoints that may be removed. The newest checkpoint of each other
    /// job may not be removed unless [`CheckpointStore::mark_jobs_ended`] has recorded the end of
    /// that job.
    pub fn begin(&self, job: Tid, now: Micros) -> Result<CheckpointDraft, StoreError> {
        CheckpointDraft::begin(Arc::clone(&self.state), self.vm.clone(), job, now)
    }

    /// Starts to write a copy of a checkpoint of another store. The copy has the same name and is
    /// encrypted with the key of this store. `started_at` is the start time of the original (since
    /// 1970), `bytes` its size.
    ///
    /// # Errors
    /// [`StoreError::CheckpointExists`] if this store has a checkpoint with this name; otherwise as
    /// [`CheckpointStore::begin`].
    pub fn begin_copy(
        &self,
        id: CheckpointId,
        started_at: Micros,
        bytes: u64,
    ) -> Result<CheckpointDraft, StoreError> {
        CheckpointDraft::begin_copy(
            Arc::clone(&self.state),
            self.vm.clone(),
            id,
            (started_at, bytes),
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
    /// [`StoreError::InUse`] while the checkpoint is open for reading.
    pub fn remove_checkpoint(&self, id: &CheckpointId) -> Result<(), StoreError> {
        let operation = StoreOperation::Remove;
        let hidden_dir = {
            let _store_lock = self.state.wait_for_lock(operation)?;
            self.state.hide_checkpoint(operation, *id)?
        };
        self.state.delete_hidden_dirs(operation, &[hidden_dir])
    }

    /// True if the virtual machine of this handle made the checkpoint.
    pub fn is_own_checkpoint(&self, checkpoint: &CheckpointInfo) -> bool {
        checkpoint.vm == self.vm
    }

    /// Records that the jobs of these checkpoints have ended at the time `ended_at` and will not be
    /// restarted. An end that is already recorded keeps its time. If `ended_at` is `None`, records
    /// that the jobs have been restarted. Applies to all checkpoints that the same virtual machine
    /// has made of the same job. Checkpoints that do not exist are skipped.
    ///
    /// # Errors
    /// Checkpoints whose mark could not be written are retained longer.
    pub fn mark_jobs_ended(
        &self,
        ids: &[CheckpointId],
        ended_at: Option<Micros>,
    ) -> Result<(), StoreError> {
        let (operation, state) = (StoreOperation::Mark, &self.state);
        let _store_lock = state.wait_for_lock(operation)?;
        let (checkpoints, _) = state.read_checkpoints(operation)?;
        let jobs: Vec<(&str, Tid)> = checkpoints
            .iter()
            .filter(|checkpoint| ids.contains(&checkpoint.id))
            .map(|checkpoint| (&*checkpoint.vm, checkpoint.job))
            .collect();
        let affected_checkpoints = checkpoints.iter().filter(|checkpoint| {
            jobs.contains(&(&*checkpoint.vm, checkpoint.job))
                && checkpoint.job_ended_at.is_some() != ended_at.is_some()
        });
        affected_checkpoints
            .map(|checkpoint| {
                end_mark::write_end_mark(
                    &state.disk,
                    &state.checkpoint_dir(checkpoint.id),
                    ended_at,
                )
            })
            .fold(Ok(()), Result::and)
    }

    /// Records that a checkpoint is damaged, with the reason. If `reason` is `None`, records that
    /// it is intact. A damaged checkpoint does not count as the newest of its job, so the one
    /// before it is not removed in its favor.
    ///
    /// # Errors
    /// The mark could not be written or removed. The checkpoint is unchanged.
    pub fn mark_damaged(&self, id: &CheckpointId, reason: Option<&str>) -> Result<(), StoreError> {
        let (operation, state) = (StoreOperation::MarkDamage, &self.state);
        let _store_lock = state.wait_for_lock(operation)?;
        let dir = state.checkpoint_dir(*id);
        if !shared::may_exist(&dir) {
            return Ok(());
        }
        damage_mark::write_damage_mark(&state.disk, &dir, reason)
    }

    /// Returns the newest checkpoint of the job that is older than the checkpoint `id` and not
    /// known to be damaged; `None` if there is none. Virtual machines number their jobs
    /// independently, so `is_same_job` decides by the description of a checkpoint whether the job
    /// with this number is meant. Checkpoints that turn out to be damaged or are being removed are
    /// omitted.
    ///
    /// # Errors
    /// The store cannot be read. It may have such a checkpoint.
    pub fn find_older_checkpoint(
        &self,
        id: &CheckpointId,
        job: Tid,
        is_same_job: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<CheckpointId>, StoreError> {
        let (checkpoints, unreadable_entries) = self.list_checkpoints()?;
        let intact_checkpoints = checkpoints
            .iter()
            .filter(|checkpoint| checkpoint.damage.is_none());
        // The disk may read these again.
        let unread_ids = unreadable_entries
            .iter()
            .filter(|(_, error)| matches!(error, StoreError::Io { .. }))
            .filter_map(|(name, _)| name.parse().ok());
        let mut candidates: Vec<CheckpointId> = intact_checkpoints
            .map(|checkpoint| checkpoint.id)
            .chain(unread_ids)
            .filter(|candidate| candidate.job() == job && candidate < id)
            .collect();
        candidates.sort_unstable();
        for older_id in candidates.into_iter().rev() {
            match self.open_checkpoint(&older_id) {
                Ok(checkpoint) if is_same_job(checkpoint.description()) => {
                    return Ok(Some(older_id));
                }
                Err(error @ StoreError::Io { .. }) => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(None)
    }

    /// Removes the checkpoints of jobs whose recorded end is at least [`ENDED_JOB_RETENTION`] ago,
    /// then the checkpoints that [`CheckpointStore::enforce_limits`] removes.
    ///
    /// # Errors
    /// Checkpoints that were not removed are unchanged.
    pub fn remove_expired(
        &self,
        now: Micros,
        must_remain: impl Fn(&CheckpointInfo) -> bool,
    ) -> Result<SweepResult, StoreError> {
        self.remove_superfluous(Some(now), must_remain)
    }

    /// Removes checkpoints until the store is within its limits, and removes incomplete files of
    /// processes that have died.
    ///
    /// - Checkpoints of jobs with a recorded end are removed first, in the order in which the jobs
    ///   ended. Then the oldest checkpoints are removed.
    /// - Not removed are the newest checkpoint of a job without a recorded end that is not marked
    ///   as damaged, checkpoints that are open, and checkpoints for which `must_remain` returns
    ///   true.
    /// - Unreadable checkpoints are not removed, and do not count towards the limits.
    ///
    /// # Errors
    /// Checkpoints that were not removed are unchanged.
    pub fn enforce_limits(
        &self,
        must_remain: impl Fn(&CheckpointInfo) -> bool,
    ) -> Result<SweepResult, StoreError> {
        self.remove_superfluous(None, must_remain)
    }

    fn remove_superfluous(
        &self,
        now: Option<Micros>,
        must_remain: impl Fn(&CheckpointInfo) -> bool,
    ) -> Result<SweepResult, StoreError> {
        let (operation, state) = (StoreOperation::Sweep, &self.state);
        let store_lock = state.wait_for_lock(operation)?;
        let mut hidden_dirs = state.hide_abandoned_drafts(operation)?;
        let (checkpoints, _) = state.read_checkpoints(operation)?;
        let mut usage = StoreUsage::sum(&checkpoints);
        let mut result = SweepResult::default();
        for checkpoint in select_removable(&checkpoints, must_remain) {
            let is_expired = |ended_at| {
                now.is_some_and(|now: Micros| now.since(ended_at) >= ENDED_JOB_RETENTION)
            };
            if usage.excess(&state.limits) == (0, 0)
                && !checkpoint.job_ended_at.is_some_and(is_expired)
            {
                // Expired checkpoints are first in the list, so no further checkpoint has expired.
                break;
            }
            match state.hide_checkpoint(operation, checkpoint.id) {
                Ok(dir) => hidden_dirs.push(dir),
                Err(StoreError::InUse(_)) => continue,
                Err(error) => return Err(error),
            }
            usage = StoreUsage {
                checkpoints: usage.checkpoints - 1,
                bytes: usage.bytes.saturating_sub(checkpoint.bytes),
            };
            result.removed.push(checkpoint.clone());
        }
        drop(store_lock);
        (result.checkpoints_over_limit, result.bytes_over_limit) = usage.excess(&state.limits);
        state.delete_hidden_dirs(operation, &hidden_dirs)?;
        Ok(result)
    }
}

impl fmt::Debug for CheckpointStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store in {}", self.state.dir.display())
    }
}
