//! A complete checkpoint that is open for reading.

use super::CheckpointInfo;
use super::encryption::{DecryptError, Decryptor, FileRole};
use super::end_mark;
use super::error::{StoreError, StoreOperation, io_error, write_error};
use super::id::CheckpointId;
use super::manifest::{self, Manifest, PartEntry, part_name};
use super::part::{self, UnpackError};
use super::shared::{StoreState, lock_checkpoint, may_exist};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use sempa_proto::Tid;
use std::fmt;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A complete checkpoint whose manifest is verified. The checkpoint is not removed while this value
/// exists.
pub struct StoredCheckpoint {
    store: Arc<StoreState>,
    dir: PathBuf,
    info: CheckpointInfo,
    manifest: Manifest,
    _shared_lock: Flock<File>,
}

impl StoredCheckpoint {
    pub(super) fn open(
        shared: Arc<StoreState>,
        id: CheckpointId,
    ) -> Result<StoredCheckpoint, StoreError> {
        let operation = StoreOperation::Read;
        let dir = shared.checkpoint_dir(id);
        let lock =
            lock_checkpoint(&dir, FlockArg::LockSharedNonblock).map_err(|errno| match errno {
                // The checkpoint is being removed.
                Errno::EWOULDBLOCK | Errno::ENOENT => StoreError::NoCheckpoint(id),
                _ => io_error(operation, &dir)(errno.into()),
            })?;
        // The checkpoint may have been removed before this process acquired the lock.
        if !may_exist(&dir) {
            return Err(StoreError::NoCheckpoint(id));
        }
        let (manifest, bytes) = manifest::read_manifest(operation, &dir, id, &shared.secret)?;
        let info = CheckpointInfo {
            job_ended_at: end_mark::read_end_mark(&dir),
            ..manifest.info(id, bytes)
        };
        Ok(StoredCheckpoint {
            store: shared,
            dir,
            info,
            manifest,
            _shared_lock: lock,
        })
    }

    pub fn info(&self) -> &CheckpointInfo {
        &self.info
    }

    /// Returns the description that the writer has added.
    pub fn meta(&self) -> &[u8] {
        &self.manifest.meta
    }

    /// Unpacks the images of a task into the new directory `to` (mode 0700, files 0600). Returns
    /// the size of the images in bytes. On success the images equal those that were added to the
    /// checkpoint.
    ///
    /// # Errors
    /// The directory does not exist after an error. If it existed before the call, it is unchanged.
    pub fn unpack(&self, tid: Tid, to: &Path) -> Result<u64, StoreError> {
        let part = self.find_part(tid)?;
        DirBuilder::new()
            .mode(0o700)
            .create(to)
            .map_err(io_error(StoreOperation::Unpack, to))?;
        let unpacked = self.unpack_part(part, to);
        if unpacked.is_err() {
            // Report the first error, which also explains why the removal may fail.
            let _ = std::fs::remove_dir_all(to);
        }
        unpacked
    }

    /// Passes the decrypted stream of a task to `put`, in pieces, for
    /// [`CheckpointDraft::add_copy`](super::CheckpointDraft::add_copy). Each piece is authentic;
    /// only a successful return means that the stream is complete and unchanged.
    ///
    /// # Errors
    /// The checkpoint was changed, or `put` failed.
    pub fn copy_part(
        &self,
        tid: Tid,
        mut put: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let operation = StoreOperation::Read;
        self.read_verified(operation, self.find_part(tid)?, |decryptor, path| {
            let broken =
                |why| manifest::decrypt_error_for(operation, path, &self.store.secret, why);
            loop {
                match decryptor.next_bytes(usize::MAX).map_err(broken)? {
                    [] => return Ok(()),
                    piece => put(piece).map_err(io_error(operation, path))?,
                }
            }
        })
    }

    fn find_part(&self, tid: Tid) -> Result<&PartEntry, StoreError> {
        let id = self.info.id;
        self.manifest
            .parts
            .iter()
            .find(|part| part.tid == tid)
            .ok_or(StoreError::NoTask { id, tid })
    }

    fn unpack_part(&self, part: &PartEntry, to: &Path) -> Result<u64, StoreError> {
        let operation = StoreOperation::Unpack;
        self.read_verified(operation, part, |decryptor, path| {
            let broken =
                |why| manifest::decrypt_error_for(operation, path, &self.store.secret, why);
            let images_bytes = part::unpack(decryptor, to).map_err(|stopped| match stopped {
                UnpackError::DamagedStream(why) => broken(why),
                UnpackError::Write(file, e, done) => write_error(
                    operation,
                    &file,
                    e,
                    Some(part.images_bytes.saturating_sub(done)),
                ),
            })?;
            match images_bytes == part.images_bytes {
                true => Ok(images_bytes),
                false => Err(broken(DecryptError::Changed(
                    "its images are not as long as the manifest says".into(),
                ))),
            }
        })
    }

    /// Reads a part completely by calling `read`, and verifies that the part is unchanged since it
    /// was added.
    fn read_verified<T>(
        &self,
        operation: StoreOperation,
        part: &PartEntry,
        read: impl FnOnce(&mut Decryptor<File>, &Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let secret = &self.store.secret;
        let path = self.dir.join(part_name(part.tid));
        let broken = |why| manifest::decrypt_error_for(operation, &path, secret, why);
        let changed = |why: &str| broken(DecryptError::Changed(why.into()));
        let (file, bytes) = manifest::open_file(operation, &path)?;
        if bytes != part.encrypted_bytes {
            return Err(changed("its length is not that which the manifest says"));
        }
        let what = FileRole::Part(self.info.id, part.tid);
        let mut decryptor = Decryptor::new(secret, what, file, bytes).map_err(broken)?;
        let result = read(&mut decryptor, &path)?;
        if decryptor.finish().map_err(broken)? != part.blake3 {
            return Err(changed("its hash is not that which the manifest says"));
        }
        Ok(result)
    }
}

impl fmt::Debug for StoredCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Set")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}
