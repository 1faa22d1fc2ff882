//! The state that all handles of a store share: its directory, the entries of the directory, and
//! the lock of the store.
//!
//! The lock of the store is held only while a directory in the store is renamed. Content is written
//! before, and deleted afterwards, without the lock.

use super::disk::Disk;
use super::encryption::StoreKey;
use super::error::{StoreError, StoreOperation, io_error};
use super::id::CheckpointId;
use super::sweep::{StoreUsage, usage_of_other_jobs};
use super::{
    CheckpointInfo, DELETED_PREFIX, DRAFT_PREFIX, LOCK_FILE, StoreLimits, claim, damage_mark,
    end_mark, manifest,
};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sempa_proto::Tid;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Maximum time to wait for the lock of the store.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between attempts to acquire the lock of the store.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Names of the unreadable entries, with the reasons.
pub type UnreadableEntries = Vec<(String, StoreError)>;

/// Data that all handles of an open store share: path, key, limits and disk.
pub(super) struct StoreState {
    /// Path of the store's directory, without symbolic links.
    pub(super) dir: PathBuf,
    pub(super) store_key: StoreKey,
    pub(super) limits: StoreLimits,
    pub(super) disk: Disk,
}

/// The entries of a store's directory, grouped by the prefix of their names.
#[derive(Debug, Default)]
pub(super) struct StoreEntries {
    /// The complete checkpoints, oldest first.
    pub(super) checkpoints: Vec<CheckpointId>,
    pub(super) drafts: Vec<CheckpointId>,
    pub(super) deleted_checkpoints: Vec<CheckpointId>,
    pub(super) foreign_files: Vec<String>,
}

impl StoreState {
    pub(super) fn checkpoint_dir(&self, id: CheckpointId) -> PathBuf {
        self.dir.join(id.to_string())
    }

    pub(super) fn draft_dir(&self, id: CheckpointId) -> PathBuf {
        self.dir.join(format!("{DRAFT_PREFIX}{id}"))
    }

    fn deleted_dir(&self, id: CheckpointId) -> PathBuf {
        self.dir.join(format!("{DELETED_PREFIX}{id}"))
    }

    /// Waits for the lock of the store and acquires it. Fails after [`LOCK_TIMEOUT`].
    pub(super) fn wait_for_lock(
        &self,
        operation: StoreOperation,
    ) -> Result<Flock<File>, StoreError> {
        let path = self.dir.join(LOCK_FILE);
        let mut file = open_lock_file(&path, true).map_err(io_error(operation, &path))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) => file,
                Err((_, errno)) => return Err(io_error(operation, &path)(errno.into())),
            };
            if Instant::now() >= deadline {
                return Err(StoreError::Busy {
                    operation,
                    dir: self.dir.clone(),
                    seconds: LOCK_TIMEOUT.as_secs(),
                });
            }
            sleep(LOCK_RETRY_INTERVAL);
        }
    }

    /// Reads the entries of the store's directory.
    pub(super) fn read_entries(
        &self,
        operation: StoreOperation,
    ) -> Result<StoreEntries, StoreError> {
        let mut entries = StoreEntries::default();
        for entry in self
            .dir
            .read_dir()
            .map_err(io_error(operation, &self.dir))?
        {
            let name = entry
                .map_err(io_error(operation, &self.dir))?
                .file_name()
                .to_string_lossy()
                .into_owned();
            let (group, id) = if let Some(id) = name.strip_prefix(DRAFT_PREFIX) {
                (&mut entries.drafts, id)
            } else if let Some(id) = name.strip_prefix(DELETED_PREFIX) {
                (&mut entries.deleted_checkpoints, id)
            } else {
                (&mut entries.checkpoints, &*name)
            };
            match id.parse() {
                Ok(id) => group.push(id),
                Err(_) if name == LOCK_FILE || claim::is_claim_file(&name) => {}
                Err(_) => entries.foreign_files.push(name),
            }
        }
        entries.checkpoints.sort();
        entries.foreign_files.sort();
        Ok(entries)
    }

    /// Reads all checkpoints. Returns the readable checkpoints, oldest first, and the unreadable
    /// entries.
    pub(super) fn read_checkpoints(
        &self,
        operation: StoreOperation,
    ) -> Result<(Vec<CheckpointInfo>, UnreadableEntries), StoreError> {
        let entries = self.read_entries(operation)?;
        let foreign_entry =
            |name: String| (name.clone(), StoreError::ForeignFile(self.dir.join(name)));
        let mut unreadable_entries: UnreadableEntries = entries
            .foreign_files
            .into_iter()
            .map(foreign_entry)
            .collect();
        let mut checkpoints = Vec::new();
        for id in entries.checkpoints {
            let dir = self.checkpoint_dir(id);
            match manifest::read_manifest(operation, &dir, id, &self.store_key) {
                Ok((manifest, bytes)) => {
                    checkpoints.push(CheckpointInfo {
                        job_ended_at: end_mark::read_end_mark(&dir),
                        damage: damage_mark::read_damage_mark(&dir),
                        ..manifest.info(id, bytes)
                    });
                }
                // The checkpoint has just been removed.
                Err(_) if !may_exist(&dir) => {}
                Err(error) => unreadable_entries.push((id.to_string(), error)),
            }
        }
        Ok((checkpoints, unreadable_entries))
    }

    /// Returns the maximum number of bytes for a new checkpoint of the job `job`. With a checkpoint
    /// of this size the store is within its limits after all removable checkpoints are removed.
    ///
    /// # Errors
    /// The maximum is less than `needed_bytes`, or the number of checkpoints would exceed its
    /// limit.
    pub(super) fn available_bytes(
        &self,
        operation: StoreOperation,
        vm: &str,
        job: Tid,
        needed_bytes: u64,
    ) -> Result<u64, StoreError> {
        let (checkpoints, _) = self.read_checkpoints(operation)?;
        let StoreUsage { checkpoints, bytes } = usage_of_other_jobs(&checkpoints, vm, job);
        let StoreLimits {
            checkpoints_max,
            bytes_max,
        } = self.limits;
        let available_bytes = bytes_max.saturating_sub(bytes);
        if checkpoints >= checkpoints_max || available_bytes < needed_bytes {
            return Err(StoreError::LimitsExceeded {
                operation,
                dir: self.dir.clone(),
                needed: needed_bytes,
                checkpoints,
                bytes,
                checkpoints_max,
                bytes_max,
            });
        }
        Ok(available_bytes)
    }

    /// Hides a directory by renaming it, and returns its new path. The caller holds the lock of the
    /// store, and must later delete the directory without that lock.
    pub(super) fn hide_dir(
        &self,
        operation: StoreOperation,
        dir: &Path,
        id: CheckpointId,
    ) -> Result<PathBuf, StoreError> {
        let hidden_dir = self.deleted_dir(id);
        self.disk
            .remove_tree(&hidden_dir)
            .map_err(io_error(operation, &hidden_dir))?;
        self.disk
            .rename(dir, &hidden_dir)
            .map_err(io_error(operation, dir))?;
        Ok(hidden_dir)
    }

    /// Hides a checkpoint durably, unless a reader has it open, and returns the new path of its
    /// directory. The caller holds the lock of the store.
    pub(super) fn hide_checkpoint(
        &self,
        operation: StoreOperation,
        id: CheckpointId,
    ) -> Result<PathBuf, StoreError> {
        let dir = self.checkpoint_dir(id);
        let _exclusive_lock = match lock_checkpoint(&dir, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err(Errno::EWOULDBLOCK) => return Err(StoreError::InUse(id)),
            Err(Errno::ENOENT) if !may_exist(&dir) => return Err(StoreError::NoCheckpoint(id)),
            Err(errno) => return Err(io_error(operation, &dir)(errno.into())),
        };
        let hidden_dir = self.hide_dir(operation, &dir, id)?;
        // Without this flush, a crash of the machine could restore the name of a checkpoint whose
        // files are deleted.
        self.disk
            .sync_dir(&self.dir)
            .map_err(io_error(operation, &self.dir))?;
        Ok(hidden_dir)
    }

    /// Hides drafts whose writers have died. Returns all hidden directories, including those of
    /// earlier deletions. The caller holds the lock of the store, so every draft of a running
    /// writer is already locked.
    pub(super) fn hide_abandoned_drafts(
        &self,
        operation: StoreOperation,
    ) -> Result<Vec<PathBuf>, StoreError> {
        let entries = self.read_entries(operation)?;
        let mut hidden_dirs: Vec<PathBuf> = entries
            .deleted_checkpoints
            .into_iter()
            .map(|id| self.deleted_dir(id))
            .collect();
        for id in entries.drafts {
            let dir = self.draft_dir(id);
            let lock_failure = match open_lock_file(&dir.join(LOCK_FILE), false) {
                Ok(file) => Flock::lock(file, FlockArg::LockExclusiveNonblock)
                    .err()
                    .map(|(_, errno)| errno),
                Err(e) if e.kind() == ErrorKind::NotFound => None,
                Err(e) => return Err(io_error(operation, &dir)(e)),
            };
            match lock_failure {
                // If the directory has disappeared, its writer has just removed it.
                None if may_exist(&dir) => hidden_dirs.push(self.hide_dir(operation, &dir, id)?),
                None | Some(Errno::EWOULDBLOCK) => {}
                Some(errno) => return Err(io_error(operation, &dir)(errno.into())),
            }
        }
        Ok(hidden_dirs)
    }

    /// Deletes directories that were hidden before.
    pub(super) fn delete_hidden_dirs(
        &self,
        operation: StoreOperation,
        hidden_dirs: &[PathBuf],
    ) -> Result<(), StoreError> {
        hidden_dirs
            .iter()
            .try_for_each(|dir| self.disk.remove_tree(dir).map_err(io_error(operation, dir)))
    }
}

/// True if a file exists at this path, or if it cannot be determined whether one exists.
pub(super) fn may_exist(path: &Path) -> bool {
    !matches!(path.symlink_metadata(), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// Opens a lock file. If `create` is true, the file is created if it does not exist.
pub(super) fn open_lock_file(path: &Path, create: bool) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW);
    options.open(path)
}

/// Locks a checkpoint until the result is dropped. Creates the lock file if it is missing. The file
/// may be missing if a user has copied the checkpoint's directory.
pub(super) fn lock_checkpoint(dir: &Path, mode: FlockArg) -> Result<Flock<File>, Errno> {
    let to_errno = |e: std::io::Error| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO));
    let file = open_lock_file(&dir.join(LOCK_FILE), true).map_err(to_errno)?;
    Flock::lock(file, mode).map_err(|(_, to_errno)| to_errno)
}
