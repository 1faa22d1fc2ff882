//! The claims of jobs: which virtual machine runs a job that has checkpoints in the store. Each is
//! one sealed file in the store's directory, which is replaced in one step.
//!
//! The store does not interpret the content of a claim. The lock of the store orders the changes of
//! all processes that use it.

use super::CheckpointStore;
use super::encryption::{DecryptError, Decryptor, Encryptor, FileRole};
use super::error::{StoreError, StoreOperation, io_error};
use super::manifest::{decrypt_error_for, open_checkpoint_file};
use super::shared::{StoreState, may_exist};
use sempa_proto::checkpoint::ClaimKey;
use sempa_proto::{Micros, Tid};
use std::path::PathBuf;

/// Prefix of the file name of a claim. The job and the origin in hexadecimal follow.
const CLAIM_PREFIX: &str = "claim-";
/// Suffix of a claim that is being written.
const NEW_SUFFIX: &str = ".new";
/// Maximum size in bytes of the content of a claim.
pub const CLAIM_BYTES_MAX: usize = 16 << 10;

/// True if a file with this name in the store's directory belongs to a claim.
pub(super) fn is_claim_file(name: &str) -> bool {
    parse_file_name(name.strip_suffix(NEW_SUFFIX).unwrap_or(name)).is_some()
}

fn file_name(key: ClaimKey) -> String {
    format!("{CLAIM_PREFIX}{}-{:016x}", key.job, key.origin.0)
}

fn parse_file_name(name: &str) -> Option<ClaimKey> {
    let (job, origin) = name.strip_prefix(CLAIM_PREFIX)?.split_once('-')?;
    let key = ClaimKey {
        job: Tid::from_raw(i32::from_str_radix(job.strip_prefix('t')?, 16).ok()?),
        origin: Micros(u64::from_str_radix(origin, 16).ok()?),
    };
    (file_name(key) == name).then_some(key)
}

impl CheckpointStore {
    /// Reads the claim of a job and replaces it by what `change` returns, while no other process
    /// changes it. `change` gets `None` if there is no claim. If `change` returns `None`, the claim
    /// stays as it is.
    ///
    /// # Errors
    /// The claim cannot be read, because it was changed or sealed with another key, or cannot be
    /// written. It is then as before, or as `change` has returned it.
    pub fn update_claim(
        &self,
        key: ClaimKey,
        change: impl FnOnce(Option<&[u8]>) -> Option<Vec<u8>>,
    ) -> Result<(), StoreError> {
        let operation = StoreOperation::Claim;
        let _store_lock = self.state.wait_for_lock(operation)?;
        let content = self.state.read_claim(key)?;
        match change(content.as_deref()) {
            Some(new_content) => self.state.write_claim(key, &new_content),
            None => Ok(()),
        }
    }

    /// Returns the claim of a job; `None` if there is none. Does not wait for processes that change
    /// the claim.
    ///
    /// # Errors
    /// The claim was changed or sealed with another key, or the disk failed.
    pub fn read_claim(&self, key: ClaimKey) -> Result<Option<Vec<u8>>, StoreError> {
        self.state.read_claim(key)
    }

    /// Returns the claims of all jobs with their contents. Claims that cannot be read are omitted.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn read_claims(&self) -> Result<Vec<(ClaimKey, Vec<u8>)>, StoreError> {
        let operation = StoreOperation::Claim;
        let to_error = |e| io_error(operation, &self.state.dir)(e);
        let mut claims = Vec::new();
        for entry in self.state.dir.read_dir().map_err(to_error)? {
            let name = entry.map_err(to_error)?.file_name();
            let Some(key) = parse_file_name(&name.to_string_lossy()) else {
                continue;
            };
            if let Ok(Some(content)) = self.state.read_claim(key) {
                claims.push((key, content));
            }
        }
        Ok(claims)
    }

    /// Removes the claim of a job that does not run, if no checkpoint of the job is left. Does
    /// nothing if `may_remove` returns false for the content of the claim.
    ///
    /// # Errors
    /// The claim cannot be read or removed.
    pub fn remove_unneeded_claim(
        &self,
        key: ClaimKey,
        may_remove: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        let operation = StoreOperation::Claim;
        let _store_lock = self.state.wait_for_lock(operation)?;
        let entries = self.state.read_entries(operation)?;
        if entries.checkpoints.iter().any(|id| id.job() == key.job) {
            return Ok(());
        }
        if self
            .state
            .read_claim(key)?
            .is_some_and(|content| may_remove(&content))
        {
            let path = self.state.claim_path(key);
            self.state
                .disk
                .remove_file(&path)
                .map_err(io_error(operation, &path))?;
        }
        Ok(())
    }
}

impl StoreState {
    fn claim_path(&self, key: ClaimKey) -> PathBuf {
        self.dir.join(file_name(key))
    }

    fn read_claim(&self, key: ClaimKey) -> Result<Option<Vec<u8>>, StoreError> {
        let (operation, path) = (StoreOperation::Claim, self.claim_path(key));
        if !may_exist(&path) {
            return Ok(None);
        }
        let (file, bytes) = open_checkpoint_file(operation, &path)?;
        let decrypt = || {
            let mut decryptor = Decryptor::new(&self.store_key, FileRole::Claim(key), file, bytes)?;
            let mut content = Vec::new();
            loop {
                match decryptor.next_bytes(CLAIM_BYTES_MAX)? {
                    [] => break,
                    piece => content.extend_from_slice(piece),
                }
                if content.len() > CLAIM_BYTES_MAX {
                    return Err(DecryptError::Changed("it is too long".into()));
                }
            }
            decryptor.finish()?;
            Ok(content)
        };
        let content = decrypt();
        content
            .map(Some)
            .map_err(|error| decrypt_error_for(operation, &path, &self.store_key, error))
    }

    /// Replaces a claim. The caller holds the lock of the store.
    fn write_claim(&self, key: ClaimKey, content: &[u8]) -> Result<(), StoreError> {
        let (operation, path) = (StoreOperation::Claim, self.claim_path(key));
        let mut new_path = path.clone().into_os_string();
        new_path.push(NEW_SUFFIX);
        let new_path = PathBuf::from(new_path);
        let write = || {
            // A writer that has died may have left its file.
            self.disk.remove_file(&new_path)?;
            let file = self.disk.make_file(&new_path)?;
            let write_bytes = |bytes: &[u8]| self.disk.append(&new_path, &file, bytes);
            let role = FileRole::Claim(key);
            let mut encryptor = Encryptor::new(&self.store_key, role, write_bytes)?;
            encryptor.append(content)?;
            encryptor.finish()?;
            self.disk.sync(&new_path, &file)?;
            self.disk.rename(&new_path, &path)?;
            self.disk.sync_dir(&self.dir)
        };
        write().map_err(|error| {
            // The disk may be full. The reason for the error remains the first one.
            let _ = self.disk.remove_file(&new_path);
            io_error(operation, &path)(error)
        })
    }
}
