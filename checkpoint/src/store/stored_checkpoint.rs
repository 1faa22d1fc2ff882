//! A complete checkpoint that is open for reading.

use super::CheckpointInfo;
use super::damage_mark;
use super::encryption::{DecryptError, Decryptor, FileRole};
use super::end_mark;
use super::error::{StoreError, StoreOperation, io_error, write_error};
use super::id::CheckpointId;
use super::manifest::{self, Manifest, PartEntry, part_file_name};
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
    state: Arc<StoreState>,
    dir: PathBuf,
    info: CheckpointInfo,
    manifest: Manifest,
    _shared_lock: Flock<File>,
}

impl StoredCheckpoint {
    pub(super) fn open(state: Arc<StoreState>, id: CheckpointId) -> Result<Self, StoreError> {
        let operation = StoreOperation::Read;
        let dir = state.checkpoint_dir(id);
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
        let (manifest, bytes) = manifest::read_manifest(operation, &dir, id, &state.store_key)?;
        let info = CheckpointInfo {
            job_ended_at: end_mark::read_end_mark(&dir),
            damage: damage_mark::read_damage_mark(&dir),
            ..manifest.info(id, bytes)
        };
        Ok(Self {
            state,
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
    pub fn description(&self) -> &[u8] {
        &self.manifest.description
    }

    /// Unpacks the images of a task into the new directory `unpack_dir` (mode 0700, files 0600).
    /// Returns the size of the images in bytes. On success the images equal those that were added
    /// to the checkpoint.
    ///
    /// # Errors
    /// The checkpoint does not contain the task, the part was changed, or the files cannot be
    /// written. If the directory existed before the call, it remains unchanged; otherwise it does
    /// not exist after an error.
    pub fn unpack_task(&self, tid: Tid, unpack_dir: &Path) -> Result<u64, StoreError> {
        let part = self.find_part(tid)?;
        DirBuilder::new()
            .mode(0o700)
            .create(unpack_dir)
            .map_err(io_error(StoreOperation::Unpack, unpack_dir))?;
        let result = self.unpack_part(part, unpack_dir);
        if result.is_err() {
            // Report the first error, which also explains why the removal may fail.
            let _ = std::fs::remove_dir_all(unpack_dir);
        }
        result
    }

    /// Passes the decrypted stream of a task to `write`, in pieces, for
    /// [`CheckpointDraft::add_task_copy`](super::CheckpointDraft::add_task_copy). Each piece is
    /// authentic; only a successful return means that the stream is complete and unchanged.
    ///
    /// # Errors
    /// The checkpoint was changed, or `write` failed.
    pub fn copy_part(
        &self,
        tid: Tid,
        mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let operation = StoreOperation::Read;
        self.read_verified(operation, self.find_part(tid)?, |decryptor, path| {
            let to_store_error =
                |error| manifest::decrypt_error_for(operation, path, &self.state.store_key, error);
            loop {
                match decryptor.next_bytes(usize::MAX).map_err(to_store_error)? {
                    [] => return Ok(()),
                    piece => write(piece).map_err(io_error(operation, path))?,
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

    fn unpack_part(&self, part: &PartEntry, unpack_dir: &Path) -> Result<u64, StoreError> {
        let operation = StoreOperation::Unpack;
        self.read_verified(operation, part, |decryptor, path| {
            let to_store_error = |decrypt_error| {
                manifest::decrypt_error_for(operation, path, &self.state.store_key, decrypt_error)
            };
            let images_bytes =
                part::unpack(decryptor, unpack_dir).map_err(|error| match error {
                    UnpackError::DamagedStream(decrypt_error) => to_store_error(decrypt_error),
                    UnpackError::WriteFailed(file, e, written_bytes) => write_error(
                        operation,
                        &file,
                        e,
                        Some(part.images_bytes.saturating_sub(written_bytes)),
                    ),
                })?;
            match images_bytes == part.images_bytes {
                true => Ok(images_bytes),
                false => Err(to_store_error(DecryptError::Changed(
                    "the length of its images differs from that in the manifest".into(),
                ))),
            }
        })
    }

    /// Reads a part completely by calling `read`, and then verifies that the part was not changed
    /// after it was added.
    fn read_verified<T>(
        &self,
        operation: StoreOperation,
        part: &PartEntry,
        read: impl FnOnce(&mut Decryptor<File>, &Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let store_key = &self.state.store_key;
        let path = self.dir.join(part_file_name(part.tid));
        let to_store_error =
            |error| manifest::decrypt_error_for(operation, &path, store_key, error);
        let changed_error = |error: &str| to_store_error(DecryptError::Changed(error.into()));
        let (file, bytes) = manifest::open_checkpoint_file(operation, &path)?;
        if bytes != part.encrypted_bytes {
            return Err(changed_error(
                "its length differs from that in the manifest",
            ));
        }
        let role = FileRole::Part(self.info.id, part.tid);
        let mut decryptor = Decryptor::new(store_key, role, file, bytes).map_err(to_store_error)?;
        let result = read(&mut decryptor, &path)?;
        if decryptor.finish().map_err(to_store_error)? != part.blake3 {
            return Err(changed_error("its hash differs from that in the manifest"));
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
