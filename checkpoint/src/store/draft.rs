//! A checkpoint that is being written (a draft). A draft is invisible to readers: its directory has
//! another name and is locked by the writing process. The directory gets its final name when all
//! content of the checkpoint is on the disk.

use super::encryption::{Encryptor, FileRole};
use super::error::{StoreError, StoreOperation, io_error, write_error};
use super::id::CheckpointId;
use super::manifest::{META_BYTES_MAX, Manifest, PARTS_MAX, PartEntry, part_name};
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

/// A checkpoint that is being written. Dropping it before [`finish`](Self::finish) removes it.
pub struct CheckpointDraft {
    shared: Arc<StoreState>,
    vm: String,
    id: CheckpointId,
    started: Micros,
    dir: PathBuf,
    lock: Flock<File>,
    /// Maximum size of the checkpoint in bytes.
    bytes_max: u64,
    /// Size in bytes of the content that was written.
    bytes_used: AtomicU64,
    /// The added parts, by task. The value is `None` while the part is being added.
    parts: Mutex<BTreeMap<Tid, Option<PartEntry>>>,
    /// True when the checkpoint must not be removed on drop.
    must_keep: bool,
}

impl CheckpointDraft {
    /// Creates an empty draft.
    pub(super) fn begin(
        shared: Arc<StoreState>,
        vm: String,
        job: Tid,
        now: Micros,
    ) -> Result<CheckpointDraft, StoreError> {
        CheckpointDraft::create(shared, vm, (job, now, 1), |existing| {
            Ok(CheckpointId::next_id(existing.iter().copied(), job, now))
        })
    }

    /// Creates an empty draft for the copy of a checkpoint of another store. The copy has the name
    /// `id`, the start time `started` and at least `bytes` bytes.
    pub(super) fn begin_copy(
        shared: Arc<StoreState>,
        vm: String,
        id: CheckpointId,
        (started, bytes): (Micros, u64),
    ) -> Result<CheckpointDraft, StoreError> {
        CheckpointDraft::create(
            shared,
            vm,
            (id.job(), started, bytes),
            |existing| match existing.contains(&id) {
                true => Err(StoreError::CheckpointExists(id)),
                false => Ok(id),
            },
        )
    }

    /// Creates an empty draft for a checkpoint of the job `job` that was started at `started` and
    /// has at least `needed` bytes. `name` chooses the new name; its argument is the list of
    /// existing names.
    fn create(
        shared: Arc<StoreState>,
        vm: String,
        (job, started, needed): (Tid, Micros, u64),
        name: impl FnOnce(&[CheckpointId]) -> Result<CheckpointId, StoreError>,
    ) -> Result<CheckpointDraft, StoreError> {
        let operation = StoreOperation::Begin;
        let _locked = shared.lock(operation)?;
        let bytes_max = shared.bytes_available(operation, &vm, job, needed)?;
        let entries = shared.read_entries(operation)?;
        let id = name(&[entries.checkpoints, entries.drafts, entries.deleted].concat())?;
        let dir = shared.draft_dir(id);
        shared
            .disk
            .make_dir(&dir)
            .map_err(io_error(operation, &dir))?;
        let lock = match create_lock(&shared, &dir) {
            Ok(lock) => lock,
            Err(e) => {
                // Report the first error. Remaining files are removed when the store is next
                // opened.
                let _ = shared.disk.remove_tree(&dir);
                return Err(io_error(operation, &dir)(e));
            }
        };
        let (bytes_used, parts) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
        Ok(CheckpointDraft {
            shared,
            vm,
            id,
            started,
            dir,
            lock,
            bytes_max,
            bytes_used,
            parts,
            must_keep: false,
        })
    }

    /// Returns the name that the checkpoint will have.
    pub fn id(&self) -> CheckpointId {
        self.id
    }

    /// Adds the images of a task: all files of the directory `images`, which must contain regular
    /// files only and must not change during the call. On return the part is on the disk. Several
    /// threads may add tasks at the same time.
    ///
    /// # Errors
    /// No data of this task remains in the draft. The other tasks are unaffected, and the call may
    /// be repeated.
    pub fn add(&self, tid: Tid, images: &Path) -> Result<PartInfo, StoreError> {
        self.add_part(tid, |path, counted| {
            let images = ImageFiles::list(images)?;
            self.write_part(tid, path, counted, images.bytes, |put| {
                images.write_stream(path, put)
            })
        })
    }

    /// Adds the images of a task from another store. `write_stream` writes the stream of
    /// [`StoredCheckpoint::copy_part`](super::StoredCheckpoint::copy_part) to its argument.
    /// `images_bytes` is the size of the unpacked images.
    ///
    /// # Errors
    /// As [`CheckpointDraft::add`], or `write_stream` failed.
    pub fn add_copy(
        &self,
        tid: Tid,
        images_bytes: u64,
        write_stream: impl FnOnce(&mut dyn FnMut(&[u8]) -> std_io::Result<()>) -> std_io::Result<()>,
    ) -> Result<PartInfo, StoreError> {
        self.add_part(tid, |path, counted| {
            let write_failure = |e| write_error(StoreOperation::Add, path, e, Some(images_bytes));
            self.write_part(tid, path, counted, images_bytes, |put| {
                write_stream(put).map_err(write_failure)
            })
        })
    }

    /// Adds a part. `seal` writes the file at the path of its first argument and counts the written
    /// bytes in its second.
    fn add_part(
        &self,
        tid: Tid,
        seal: impl FnOnce(&Path, &Cell<u64>) -> Result<PartEntry, StoreError>,
    ) -> Result<PartInfo, StoreError> {
        self.reserve(tid)?;
        let path = self.dir.join(part_name(tid));
        let counted = Cell::new(0);
        let part = seal(&path, &counted);
        if part.is_err() {
            self.bytes_used.fetch_sub(counted.get(), Ordering::Relaxed);
            // Report the first error. If the file cannot be removed, the task cannot be added
            // again.
            let _ = self.shared.disk.remove_file(&path);
        }
        let mut parts = self.lock_parts();
        match part {
            Ok(part) => {
                let info = part.info();
                parts.insert(tid, Some(part));
                Ok(info)
            }
            Err(why) => {
                parts.remove(&tid);
                Err(why)
            }
        }
    }

    /// Completes the checkpoint with the added tasks and the caller's description `meta`. On return
    /// the checkpoint is on the disk and visible. The store may exceed its limits until
    /// [`CheckpointStore::enforce_limits`](super::CheckpointStore::enforce_limits) has removed old
    /// checkpoints.
    ///
    /// # Errors
    /// The checkpoint is removed.
    pub fn finish(mut self, meta: &[u8]) -> Result<CheckpointInfo, StoreError> {
        let operation = StoreOperation::Finish;
        if meta.len() > META_BYTES_MAX {
            let (count, max) = (meta.len() as u64, META_BYTES_MAX as u64);
            return Err(StoreError::TooMany {
                operation,
                what: "the bytes that describe it",
                count,
                max,
            });
        }
        let parts = std::mem::take(&mut *self.lock_parts())
            .into_values()
            .flatten()
            .collect();
        let manifest = Manifest {
            vm: self.vm.clone(),
            started: self.started,
            parts,
            meta: meta.to_vec(),
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
    fn reserve(&self, tid: Tid) -> Result<(), StoreError> {
        let mut parts = self.lock_parts();
        if parts.contains_key(&tid) {
            return Err(StoreError::TaskExists(tid));
        }
        if parts.len() >= PARTS_MAX {
            let (count, max) = (parts.len() as u64 + 1, PARTS_MAX as u64);
            return Err(StoreError::TooMany {
                operation: StoreOperation::Add,
                what: "the tasks of the set",
                count,
                max,
            });
        }
        parts.insert(tid, None);
        Ok(())
    }

    /// Adds `bytes` to the size of the checkpoint. Returns false, and adds nothing, if the
    /// checkpoint would become too large.
    fn count_bytes(&self, bytes: u64) -> bool {
        let add_if_within = |used: u64| {
            used.checked_add(bytes)
                .filter(|used| *used <= self.bytes_max)
        };
        self.bytes_used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add_if_within)
            .is_ok()
    }

    /// Encrypts the stream that `write_stream` writes, and writes the result to the file `path`.
    /// `images_bytes` is the size of the unpacked images.
    fn write_part(
        &self,
        tid: Tid,
        path: &Path,
        counted: &Cell<u64>,
        images_bytes: u64,
        write_stream: impl FnOnce(&mut dyn FnMut(&[u8]) -> std_io::Result<()>) -> Result<(), StoreError>,
    ) -> Result<PartEntry, StoreError> {
        let disk = &self.shared.disk;
        let write_failure = |left: u64| {
            move |e: std_io::Error| write_error(StoreOperation::Add, path, e, Some(left))
        };
        let file = disk.make_file(path).map_err(write_failure(images_bytes))?;
        let too_large = Cell::new(false);
        let write = |bytes: &[u8]| {
            let count = bytes.len() as u64;
            if !self.count_bytes(count) {
                too_large.set(true);
                return Err(std_io::ErrorKind::FileTooLarge.into());
            }
            counted.set(counted.get() + count);
            disk.append(path, &file, bytes)
        };
        let seal = || {
            let encryptor =
                Encryptor::new(&self.shared.secret, FileRole::Part(self.id, tid), write);
            let mut encryptor = encryptor.map_err(write_failure(images_bytes))?;
            write_stream(&mut |bytes| encryptor.append(bytes))?;
            encryptor.finish().map_err(write_failure(0))
        };
        let encrypted = seal().map_err(|why| match too_large.get() {
            true => StoreError::CheckpointTooLarge {
                tid,
                bytes_max: self.bytes_max,
            },
            false => why,
        })?;
        disk.sync(path, &file).map_err(write_failure(0))?;
        Ok(PartEntry {
            tid,
            encrypted_bytes: encrypted.bytes,
            images_bytes,
            blake3: encrypted.blake3,
        })
    }

    /// Writes the manifest and flushes everything to the disk. Returns the size of the manifest.
    fn write_manifest(&self, manifest: &Manifest) -> Result<u64, StoreError> {
        let (disk, path) = (&self.shared.disk, self.dir.join(MANIFEST_FILE));
        let write_failure = |e: std_io::Error| write_error(StoreOperation::Finish, &path, e, None);
        let file = disk.make_file(&path).map_err(write_failure)?;
        let write = |bytes: &[u8]| disk.append(&path, &file, bytes);
        let encrypted = manifest
            .seal(&self.shared.secret, self.id, write)
            .map_err(write_failure)?;
        disk.sync(&path, &file).map_err(write_failure)?;
        disk.sync_dir(&self.dir).map_err(write_failure)?;
        Ok(encrypted.bytes)
    }

    /// Gives the directory its final name. Fails if the checkpoint would now exceed the store's
    /// limits.
    fn publish(&mut self, info: &CheckpointInfo) -> Result<(), StoreError> {
        let (operation, shared) = (StoreOperation::Finish, &self.shared);
        let _locked = shared.lock(operation)?;
        // Other writers may have finished checkpoints since this draft was started.
        shared.bytes_available(operation, &self.vm, self.id.job(), info.bytes)?;
        let final_dir = shared.checkpoint_dir(self.id);
        // From now on readers may open the checkpoint, so the lock must become a shared lock.
        self.lock
            .relock(FlockArg::LockSharedNonblock)
            .map_err(|e| io_error(operation, &final_dir)(e.into()))?;
        shared
            .disk
            .rename(&self.dir, &final_dir)
            .map_err(io_error(operation, &final_dir))?;
        if let Err(e) = shared.disk.sync_dir(&shared.dir) {
            // The checkpoint is complete, but its name could not be flushed. It must not be deleted
            // while it is visible; if it cannot be hidden, it remains.
            match shared.hide(operation, &final_dir, self.id) {
                Ok(gone) => self.dir = gone,
                Err(_) => self.must_keep = true,
            }
            return Err(io_error(operation, &shared.dir)(e));
        }
        self.must_keep = true;
        Ok(())
    }
}

impl Drop for CheckpointDraft {
    fn drop(&mut self) {
        if !self.must_keep {
            // Remaining files are invisible, and are removed when the store is next opened or
            // swept.
            let _ = self.shared.disk.remove_tree(&self.dir);
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
fn create_lock(shared: &StoreState, dir: &Path) -> std_io::Result<Flock<File>> {
    let file = shared.disk.make_file(&dir.join(LOCK_FILE))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno.into())
}
