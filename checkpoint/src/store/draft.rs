//! A checkpoint that is being written (a draft). A draft is invisible to readers: until the
//! checkpoint is complete, its directory has another name and is locked by the writing process. The
//! directory gets its final name when all content of the checkpoint is on the disk.

use super::encryption::{Encryptor, FileRole};
use super::error::{StoreError, StoreOperation, io_error, write_error};
use super::id::CheckpointId;
use super::manifest::{DESCRIPTION_BYTES_MAX, Manifest, PARTS_MAX, PartEntry, part_file_name};
use super::part::ImageFiles;
use super::shared::StoreState;
use super::{CheckpointInfo, LOCK_FILE, MANIFEST_FILE, PartInfo};
use nix::fcntl::{Flock, FlockArg};
use sempa_proto::{Micros, Tid};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io as std_io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A checkpoint that is being written. Dropping this value before [`finish`](Self::finish) removes
/// the draft.
pub struct CheckpointDraft {
    state: Arc<StoreState>,
    vm: String,
    id: CheckpointId,
    started_at: Micros,
    dir: PathBuf,
    lock: Flock<File>,
    /// Maximum size of the checkpoint in bytes.
    bytes_max: u64,
    /// Size in bytes of the content that was written.
    written_bytes: AtomicU64,
    /// The added parts, by task. A value is `None` while its part is being added.
    parts: Mutex<BTreeMap<Tid, Option<PartEntry>>>,
    /// True when the checkpoint must not be removed on drop.
    must_remain: bool,
}

impl CheckpointDraft {
    /// Creates an empty draft.
    pub(super) fn begin(
        state: Arc<StoreState>,
        vm: String,
        job: Tid,
        now: Micros,
    ) -> Result<Self, StoreError> {
        Self::create(state, vm, (job, now, 1), |existing_ids| {
            Ok(CheckpointId::next_id(
                existing_ids.iter().copied(),
                job,
                now,
            ))
        })
    }

    /// Creates an empty draft for the copy of a checkpoint of another store. The copy has the name
    /// `id`, the start time `started_at` and at least `bytes_min` bytes.
    pub(super) fn begin_copy(
        state: Arc<StoreState>,
        vm: String,
        id: CheckpointId,
        (started_at, bytes_min): (Micros, u64),
    ) -> Result<Self, StoreError> {
        Self::create(
            state,
            vm,
            (id.job(), started_at, bytes_min),
            |existing_ids| match existing_ids.contains(&id) {
                true => Err(StoreError::CheckpointExists(id)),
                false => Ok(id),
            },
        )
    }

    /// Creates an empty draft for a checkpoint of the job `job` that was started at `started_at`
    /// and has at least `needed_bytes` bytes. `choose_name` chooses the new name; its argument is
    /// the list of existing names.
    fn create(
        state: Arc<StoreState>,
        vm: String,
        (job, started_at, needed_bytes): (Tid, Micros, u64),
        choose_name: impl FnOnce(&[CheckpointId]) -> Result<CheckpointId, StoreError>,
    ) -> Result<Self, StoreError> {
        let operation = StoreOperation::Begin;
        let _store_lock = state.wait_for_lock(operation)?;
        let bytes_max = state.available_bytes(operation, &vm, job, needed_bytes)?;
        let entries = state.read_entries(operation)?;
        let id = choose_name(
            &[
                entries.checkpoints,
                entries.drafts,
                entries.deleted_checkpoints,
            ]
            .concat(),
        )?;
        let dir = state.draft_dir(id);
        state
            .disk
            .make_dir(&dir)
            .map_err(io_error(operation, &dir))?;
        let lock = match create_lock(&state, &dir) {
            Ok(lock) => lock,
            Err(e) => {
                // Report the first error. Remaining files are removed when the store is next
                // opened.
                let _ = state.disk.remove_tree(&dir);
                return Err(io_error(operation, &dir)(e));
            }
        };
        let (written_bytes, parts) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
        Ok(Self {
            state,
            vm,
            id,
            started_at,
            dir,
            lock,
            bytes_max,
            written_bytes,
            parts,
            must_remain: false,
        })
    }

    /// Returns the name that the checkpoint will have.
    pub fn id(&self) -> CheckpointId {
        self.id
    }

    /// Adds the images of a task: all files of the directory `image_dir`, which must contain
    /// regular files only and must not change during the call. On return the part is on the disk.
    /// Several threads may add tasks at the same time.
    ///
    /// # Errors
    /// No data of this task remains in the draft. The other tasks are unaffected, and the call may
    /// be repeated.
    pub fn add_task(&self, tid: Tid, image_dir: &Path) -> Result<PartInfo, StoreError> {
        self.add_part(tid, |path, written_bytes| {
            let image_dir = ImageFiles::list_dir(image_dir)?;
            self.write_part(tid, path, written_bytes, image_dir.bytes, |write_piece| {
                image_dir.write_stream(path, write_piece)
            })
        })
    }

    /// Adds the images of a task from another store. `write_stream` receives a function as its
    /// argument, and passes the stream of
    /// [`StoredCheckpoint::copy_part`](super::StoredCheckpoint::copy_part) to this function.
    /// `images_bytes` is the size of the unpacked images.
    ///
    /// # Errors
    /// As [`CheckpointDraft::add_task`], or `write_stream` failed.
    pub fn add_task_copy(
        &self,
        tid: Tid,
        images_bytes: u64,
        write_stream: impl FnOnce(&mut dyn FnMut(&[u8]) -> std_io::Result<()>) -> std_io::Result<()>,
    ) -> Result<PartInfo, StoreError> {
        self.add_part(tid, |path, written_bytes| {
            let write_failure = |e| write_error(StoreOperation::Add, path, e, Some(images_bytes));
            self.write_part(tid, path, written_bytes, images_bytes, |write_piece| {
                write_stream(write_piece).map_err(write_failure)
            })
        })
    }

    /// Adds a part. `write_file` writes the file of the part. The arguments of `write_file` are the
    /// path of the file, and a counter to which `write_file` adds the number of written bytes.
    fn add_part(
        &self,
        tid: Tid,
        write_file: impl FnOnce(&Path, &Cell<u64>) -> Result<PartEntry, StoreError>,
    ) -> Result<PartInfo, StoreError> {
        self.reserve_part(tid)?;
        let path = self.dir.join(part_file_name(tid));
        let written_bytes = Cell::new(0);
        let result = write_file(&path, &written_bytes);
        if result.is_err() {
            self.written_bytes
                .fetch_sub(written_bytes.get(), Ordering::Relaxed);
            // Report the first error. If the file cannot be removed, the task cannot be added
            // again.
            let _ = self.state.disk.remove_file(&path);
        }
        let mut parts = self.lock_parts();
        match result {
            Ok(result) => {
                let info = result.info();
                parts.insert(tid, Some(result));
                Ok(info)
            }
            Err(error) => {
                parts.remove(&tid);
                Err(error)
            }
        }
    }

    /// Completes the checkpoint with the added tasks and the caller's description `description`. On
    /// return the checkpoint is on the disk and visible. The store may exceed its limits until
    /// [`CheckpointStore::enforce_limits`](super::CheckpointStore::enforce_limits) has removed old
    /// checkpoints.
    ///
    /// # Errors
    /// The checkpoint is removed.
    pub fn finish(mut self, description: &[u8]) -> Result<CheckpointInfo, StoreError> {
        let operation = StoreOperation::Finish;
        if description.len() > DESCRIPTION_BYTES_MAX {
            let (count, count_max) = (description.len() as u64, DESCRIPTION_BYTES_MAX as u64);
            return Err(StoreError::TooMany {
                operation,
                what: "bytes of its description",
                count,
                max: count_max,
            });
        }
        let parts = std::mem::take(&mut *self.lock_parts())
            .into_values()
            .flatten()
            .collect();
        let manifest = Manifest {
            vm: self.vm.clone(),
            started_at: self.started_at,
            parts,
            description: description.to_vec(),
        };
        let bytes = self.write_manifest(&manifest)?;
        let info = manifest.info(self.id, bytes);
        self.publish(&info)?;
        Ok(info)
    }

    fn lock_parts(&self) -> MutexGuard<'_, BTreeMap<Tid, Option<PartEntry>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the part of this task, so that the task is not added twice.
    fn reserve_part(&self, tid: Tid) -> Result<(), StoreError> {
        let mut parts = self.lock_parts();
        if parts.contains_key(&tid) {
            return Err(StoreError::TaskExists(tid));
        }
        if parts.len() >= PARTS_MAX {
            let (count, count_max) = (parts.len() as u64 + 1, PARTS_MAX as u64);
            return Err(StoreError::TooMany {
                operation: StoreOperation::Add,
                what: "tasks of the checkpoint",
                count,
                max: count_max,
            });
        }
        parts.insert(tid, None);
        Ok(())
    }

    /// Adds `bytes` to the size of the checkpoint. Returns false, and adds nothing, if the
    /// checkpoint would become too large.
    fn try_add_bytes(&self, bytes: u64) -> bool {
        let add_if_within = |byte_sum: u64| {
            byte_sum
                .checked_add(bytes)
                .filter(|byte_sum| *byte_sum <= self.bytes_max)
        };
        self.written_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add_if_within)
            .is_ok()
    }

    /// Encrypts the stream that `write_stream` writes, and writes the result to the file `path`.
    /// `images_bytes` is the size of the unpacked images.
    fn write_part(
        &self,
        tid: Tid,
        path: &Path,
        written_bytes: &Cell<u64>,
        images_bytes: u64,
        write_stream: impl FnOnce(&mut dyn FnMut(&[u8]) -> std_io::Result<()>) -> Result<(), StoreError>,
    ) -> Result<PartEntry, StoreError> {
        let disk = &self.state.disk;
        let write_failure = |unwritten_bytes: u64| {
            move |e: std_io::Error| write_error(StoreOperation::Add, path, e, Some(unwritten_bytes))
        };
        let file = disk.make_file(path).map_err(write_failure(images_bytes))?;
        let is_too_large = Cell::new(false);
        let write = |bytes: &[u8]| {
            let byte_count = bytes.len() as u64;
            if !self.try_add_bytes(byte_count) {
                is_too_large.set(true);
                return Err(std_io::ErrorKind::FileTooLarge.into());
            }
            written_bytes.set(written_bytes.get() + byte_count);
            disk.append(path, &file, bytes)
        };
        let encrypt_stream = || {
            let encryptor =
                Encryptor::new(&self.state.store_key, FileRole::Part(self.id, tid), write);
            let mut encryptor = encryptor.map_err(write_failure(images_bytes))?;
            write_stream(&mut |bytes| encryptor.append(bytes))?;
            encryptor.finish().map_err(write_failure(0))
        };
        let encrypted_file = encrypt_stream().map_err(|error| match is_too_large.get() {
            true => StoreError::CheckpointTooLarge {
                tid,
                bytes_max: self.bytes_max,
            },
            false => error,
        })?;
        disk.sync(path, &file).map_err(write_failure(0))?;
        Ok(PartEntry {
            tid,
            encrypted_bytes: encrypted_file.bytes,
            images_bytes,
            blake3: encrypted_file.blake3,
        })
    }

    /// Writes the manifest and flushes all files to the disk. Returns the size of the manifest in
    /// bytes.
    fn write_manifest(&self, manifest: &Manifest) -> Result<u64, StoreError> {
        let (disk, path) = (&self.state.disk, self.dir.join(MANIFEST_FILE));
        let write_failure = |e: std_io::Error| write_error(StoreOperation::Finish, &path, e, None);
        let file = disk.make_file(&path).map_err(write_failure)?;
        let write = |bytes: &[u8]| disk.append(&path, &file, bytes);
        let encrypted_file = manifest
            .encrypt(&self.state.store_key, self.id, write)
            .map_err(write_failure)?;
        disk.sync(&path, &file).map_err(write_failure)?;
        disk.sync_dir(&self.dir).map_err(write_failure)?;
        Ok(encrypted_file.bytes)
    }

    /// Renames the directory to its final name. Fails if the checkpoint would now exceed the
    /// store's limits.
    fn publish(&mut self, info: &CheckpointInfo) -> Result<(), StoreError> {
        let (operation, state) = (StoreOperation::Finish, &self.state);
        let _store_lock = state.wait_for_lock(operation)?;
        // Other writers may have finished checkpoints since this draft was started.
        state.available_bytes(operation, &self.vm, self.id.job(), info.bytes)?;
        let final_dir = state.checkpoint_dir(self.id);
        // From now on readers may open the checkpoint, so the lock must become a shared lock.
        self.lock
            .relock(FlockArg::LockSharedNonblock)
            .map_err(|e| io_error(operation, &final_dir)(e.into()))?;
        state
            .disk
            .rename(&self.dir, &final_dir)
            .map_err(io_error(operation, &final_dir))?;
        if let Err(e) = state.disk.sync_dir(&state.dir) {
            // The checkpoint is complete, but its name could not be flushed. A visible checkpoint
            // must not be deleted; if the checkpoint cannot be hidden, it remains.
            match state.hide_dir(operation, &final_dir, self.id) {
                Ok(hidden_dir) => self.dir = hidden_dir,
                Err(_) => self.must_remain = true,
            }
            return Err(io_error(operation, &state.dir)(e));
        }
        self.must_remain = true;
        Ok(())
    }
}

impl Drop for CheckpointDraft {
    fn drop(&mut self) {
        if !self.must_remain {
            // Remaining files are invisible, and are removed when the store is next opened or
            // swept.
            let _ = self.state.disk.remove_tree(&self.dir);
        }
    }
}

impl fmt::Debug for CheckpointDraft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draft")
            .field("id", &self.id)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Creates the directory and the lock file of a new draft, and locks the file.
fn create_lock(state: &StoreState, dir: &Path) -> std_io::Result<Flock<File>> {
    let file = state.disk.make_file(&dir.join(LOCK_FILE))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno.into())
}
