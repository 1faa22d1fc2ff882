//! A checkpoint while it is written. It is invisible until it is complete: its directory has
//! another name and is locked by the writing process. It gets the final name when all its content
//! is on the disk.

use super::error::{Act, StoreError, failed, io};
use super::id::SetId;
use super::manifest::{META_BYTES_MAX, Manifest, PARTS_MAX, Part, part_name};
use super::part::Images;
use super::seal::{Sealer, What};
use super::shared::Shared;
use super::{LOCK, MANIFEST, PartInfo, SetInfo};
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

/// A checkpoint that is being written. Dropping it before it is finished removes it.
pub struct Draft {
    shared: Arc<Shared>,
    vm: String,
    id: SetId,
    made: Micros,
    dir: PathBuf,
    lock: Flock<File>,
    /// Bytes that the checkpoint may have.
    room: u64,
    /// Bytes that it has.
    used: AtomicU64,
    /// `None` while the part is being added.
    parts: Mutex<BTreeMap<Tid, Option<Part>>>,
    finished: bool,
}

impl Draft {
    /// Creates an empty draft.
    pub(super) fn begin(
        shared: Arc<Shared>,
        vm: String,
        job: Tid,
        now: Micros,
    ) -> Result<Draft, StoreError> {
        Draft::make(shared, vm, (job, now, 1), |there| {
            Ok(SetId::after(there.iter().copied(), job, now))
        })
    }

    /// Creates an empty draft for the copy of a checkpoint of another store with this name, start
    /// time and size.
    pub(super) fn copy(
        shared: Arc<Shared>,
        vm: String,
        id: SetId,
        (made, bytes): (Micros, u64),
    ) -> Result<Draft, StoreError> {
        Draft::make(shared, vm, (id.job(), made, bytes), |there| {
            match there.contains(&id) {
                true => Err(StoreError::There(id)),
                false => Ok(id),
            }
        })
    }

    /// Creates an empty draft for a checkpoint of this job that was started at `made` and has at
    /// least `needed` bytes. `name` gets the existing names and chooses a new one.
    fn make(
        shared: Arc<Shared>,
        vm: String,
        (job, made, needed): (Tid, Micros, u64),
        name: impl FnOnce(&[SetId]) -> Result<SetId, StoreError>,
    ) -> Result<Draft, StoreError> {
        let act = Act::Begin;
        let _locked = shared.lock(act)?;
        let room = shared.room(act, &vm, job, needed)?;
        let entries = shared.entries(act)?;
        let id = name(&[entries.sets, entries.drafts, entries.gone].concat())?;
        let dir = shared.draft_dir(id);
        shared.disk.make_dir(&dir).map_err(io(act, &dir))?;
        let lock = match make_lock(&shared, &dir) {
            Ok(lock) => lock,
            Err(e) => {
                // The first error is reported. What remains is removed when the store is opened
                // next.
                let _ = shared.disk.remove_tree(&dir);
                return Err(io(act, &dir)(e));
            }
        };
        let (used, parts) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
        Ok(Draft {
            shared,
            vm,
            id,
            made,
            dir,
            lock,
            room,
            used,
            parts,
            finished: false,
        })
    }

    /// Returns the name that the checkpoint will have.
    pub fn id(&self) -> SetId {
        self.id
    }

    /// Adds the images of a task: all files of a directory, which must contain regular files only
    /// and must not change meanwhile. On return the part is on the disk. Several threads may add
    /// tasks at the same time.
    ///
    /// # Errors
    /// Nothing of this task is kept. The other tasks are unaffected, and the call may be repeated.
    pub fn add(&self, tid: Tid, images: &Path) -> Result<PartInfo, StoreError> {
        self.add_part(tid, |path, charged| {
            let images = Images::of(images)?;
            self.seal_part(tid, path, charged, images.bytes, |put| {
                images.pour(path, put)
            })
        })
    }

    /// Adds the images of a task from another store. `pour` passes on the stream of
    /// [`Set::pour`](super::Set::pour). `images_bytes` is the size of the unpacked images.
    ///
    /// # Errors
    /// As [`Draft::add`], or `pour` failed.
    pub fn add_copy(
        &self,
        tid: Tid,
        images_bytes: u64,
        pour: impl FnOnce(&mut dyn FnMut(&[u8]) -> std_io::Result<()>) -> std_io::Result<()>,
    ) -> Result<PartInfo, StoreError> {
        self.add_part(tid, |path, charged| {
            let wrong = |e| failed(Act::Add, path, e, Some(images_bytes));
            self.seal_part(tid, path, charged, images_bytes, |put| {
                pour(put).map_err(wrong)
            })
        })
    }

    /// Adds a part: `seal` writes the file at the given path and counts its bytes.
    fn add_part(
        &self,
        tid: Tid,
        seal: impl FnOnce(&Path, &Cell<u64>) -> Result<Part, StoreError>,
    ) -> Result<PartInfo, StoreError> {
        self.reserve(tid)?;
        let path = self.dir.join(part_name(tid));
        let charged = Cell::new(0);
        let part = seal(&path, &charged);
        if part.is_err() {
            self.used.fetch_sub(charged.get(), Ordering::Relaxed);
            // The first error is reported. If the file cannot be removed, the task cannot be added
            // again.
            let _ = self.shared.disk.remove_file(&path);
        }
        let mut parts = self.parts();
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

    /// Completes the checkpoint with the added tasks and the description of the caller. On return
    /// it is on the disk and visible. Until [`Store::sweep`](super::Store::sweep) has removed old
    /// checkpoints the limits of the store may be exceeded.
    ///
    /// # Errors
    /// The checkpoint is removed.
    pub fn finish(mut self, meta: &[u8]) -> Result<SetInfo, StoreError> {
        let act = Act::Finish;
        if meta.len() > META_BYTES_MAX {
            let (count, max) = (meta.len() as u64, META_BYTES_MAX as u64);
            return Err(StoreError::TooMany {
                act,
                what: "the bytes that describe it",
                count,
                max,
            });
        }
        let parts = std::mem::take(&mut *self.parts())
            .into_values()
            .flatten()
            .collect();
        let manifest = Manifest {
            vm: self.vm.clone(),
            made: self.made,
            parts,
            meta: meta.to_vec(),
        };
        let bytes = self.write_manifest(&manifest)?;
        let info = manifest.info(self.id, bytes);
        self.publish(&info)?;
        Ok(info)
    }

    fn parts(&self) -> MutexGuard<'_, BTreeMap<Tid, Option<Part>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves the entry of this task, so that it is not added twice.
    fn reserve(&self, tid: Tid) -> Result<(), StoreError> {
        let mut parts = self.parts();
        if parts.contains_key(&tid) {
            return Err(StoreError::Twice(tid));
        }
        if parts.len() >= PARTS_MAX {
            let (count, max) = (parts.len() as u64 + 1, PARTS_MAX as u64);
            return Err(StoreError::TooMany {
                act: Act::Add,
                what: "the tasks of the set",
                count,
                max,
            });
        }
        parts.insert(tid, None);
        Ok(())
    }

    /// Counts bytes. Returns false, and counts nothing, if the checkpoint would become too large.
    fn charge(&self, bytes: u64) -> bool {
        let enough = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.room);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, enough)
            .is_ok()
    }

    /// Encrypts the stream that `pour` writes into a part file. `images_bytes` is the size of the
    /// unpacked images.
    fn seal_part(
        &self,
        tid: Tid,
        path: &Path,
        charged: &Cell<u64>,
        images_bytes: u64,
        pour: impl FnOnce(&mut dyn FnMut(&[u8]) -> std_io::Result<()>) -> Result<(), StoreError>,
    ) -> Result<Part, StoreError> {
        let disk = &self.shared.disk;
        let wrong = |left: u64| move |e: std_io::Error| failed(Act::Add, path, e, Some(left));
        let file = disk.make_file(path).map_err(wrong(images_bytes))?;
        let too_large = Cell::new(false);
        let write = |bytes: &[u8]| {
            let count = bytes.len() as u64;
            if !self.charge(count) {
                too_large.set(true);
                return Err(std_io::ErrorKind::FileTooLarge.into());
            }
            charged.set(charged.get() + count);
            disk.write(path, &file, bytes)
        };
        let seal = || {
            let sealer = Sealer::new(&self.shared.secret, What::Part(self.id, tid), write);
            let mut sealer = sealer.map_err(wrong(images_bytes))?;
            pour(&mut |bytes| sealer.put(bytes))?;
            sealer.end().map_err(wrong(0))
        };
        let sealed = seal().map_err(|why| match too_large.get() {
            true => StoreError::TooLarge {
                tid,
                bytes_max: self.room,
            },
            false => why,
        })?;
        disk.sync(path, &file).map_err(wrong(0))?;
        Ok(Part {
            tid,
            bytes: sealed.bytes,
            images_bytes,
            blake3: sealed.blake3,
        })
    }

    /// Writes the manifest and flushes everything to the disk. Returns the size of the manifest.
    fn write_manifest(&self, manifest: &Manifest) -> Result<u64, StoreError> {
        let (disk, path) = (&self.shared.disk, self.dir.join(MANIFEST));
        let wrong = |e: std_io::Error| failed(Act::Finish, &path, e, None);
        let file = disk.make_file(&path).map_err(wrong)?;
        let write = |bytes: &[u8]| disk.write(&path, &file, bytes);
        let sealed = manifest
            .seal(&self.shared.secret, self.id, write)
            .map_err(wrong)?;
        disk.sync(&path, &file).map_err(wrong)?;
        disk.sync_dir(&self.dir).map_err(wrong)?;
        Ok(sealed.bytes)
    }

    /// Gives the directory its final name, unless the limits can no longer be kept.
    fn publish(&mut self, info: &SetInfo) -> Result<(), StoreError> {
        let (act, shared) = (Act::Finish, &self.shared);
        let _locked = shared.lock(act)?;
        // Others may have finished checkpoints since this one was started.
        shared.room(act, &self.vm, self.id.job(), info.bytes)?;
        let place = shared.set_dir(self.id);
        // From now on readers may open the checkpoint, so the lock must be shared.
        self.lock
            .relock(FlockArg::LockSharedNonblock)
            .map_err(|e| io(act, &place)(e.into()))?;
        shared
            .disk
            .rename(&self.dir, &place)
            .map_err(io(act, &place))?;
        if let Err(e) = shared.disk.sync_dir(&shared.dir) {
            // The checkpoint is complete. It must not be deleted while it is visible; if it cannot
            // be hidden, it stays.
            match shared.retire(act, &place, self.id) {
                Ok(gone) => self.dir = gone,
                Err(_) => self.finished = true,
            }
            return Err(io(act, &shared.dir)(e));
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished {
            // What remains is invisible, and is removed when the store is opened or swept next.
            let _ = self.shared.disk.remove_tree(&self.dir);
        }
    }
}

impl fmt::Debug for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draft")
            .field("id", &self.id)
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Creates and takes the lock of a new draft.
fn make_lock(shared: &Shared, dir: &Path) -> std_io::Result<Flock<File>> {
    let file = shared.disk.make_file(&dir.join(LOCK))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno.into())
}
