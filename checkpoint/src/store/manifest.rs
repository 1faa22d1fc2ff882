//! The manifest of a checkpoint: its virtual machine and start time, its parts with their hashes,
//! and the description that the writer has added. The manifest is written last and encrypted like
//! the parts. A directory without a manifest is not a checkpoint.

use super::encryption::{DecryptError, Decryptor, EncryptedFile, Encryptor, FileRole, StoreKey};
use super::error::{StoreError, StoreOperation, io_error};
use super::id::CheckpointId;
use super::{CheckpointInfo, MANIFEST_FILE, PartInfo};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum number of tasks in one checkpoint.
pub const PARTS_MAX: usize = 65_536;
/// Maximum size in bytes of the writer's description.
pub const DESCRIPTION_BYTES_MAX: usize = 64 << 20;
/// Maximum length in bytes of the name of a virtual machine.
pub const VM_BYTES_MAX: usize = 256;
/// Maximum size in bytes of a manifest that is read: the description, 64 bytes for each part, and 1
/// MiB for all other fields.
const MANIFEST_BYTES_MAX: u64 = (DESCRIPTION_BYTES_MAX + PARTS_MAX * 64 + (1 << 20)) as u64;

/// A part of a checkpoint: the encrypted file with the images of one task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartEntry {
    pub(super) tid: Tid,
    pub(super) encrypted_bytes: u64,
    pub(super) images_bytes: u64,
    pub(super) blake3: [u8; 32],
}

impl PartEntry {
    pub(super) fn info(&self) -> PartInfo {
        PartInfo {
            tid: self.tid,
            bytes: self.encrypted_bytes,
            images_bytes: self.images_bytes,
        }
    }
}

/// The content of the manifest file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) vm: String,
    pub(super) started_at: Micros,
    /// The parts, sorted by task id.
    pub(super) parts: Vec<PartEntry>,
    /// The description that the writer has added, in any format.
    pub(super) description: Vec<u8>,
}

impl Manifest {
    /// Returns the information about the checkpoint that is shown to users. `manifest_bytes` is the
    /// size of the encrypted manifest.
    pub(super) fn info(&self, id: CheckpointId, manifest_bytes: u64) -> CheckpointInfo {
        let parts: Vec<PartInfo> = self.parts.iter().map(PartEntry::info).collect();
        let bytes = parts
            .iter()
            .fold(manifest_bytes, |sum, part| sum.saturating_add(part.bytes));
        CheckpointInfo {
            id,
            vm: self.vm.clone(),
            job: id.job(),
            started_at: self.started_at,
            bytes,
            parts,
            job_ended_at: None,
            damage: None,
        }
    }

    /// Encrypts the manifest and passes the result to `write`.
    pub(super) fn encrypt(
        &self,
        store_key: &StoreKey,
        id: CheckpointId,
        write: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<EncryptedFile> {
        let content = postcard::to_allocvec(self).map_err(std::io::Error::other)?;
        let mut encryptor = Encryptor::new(store_key, FileRole::Manifest(id), write)?;
        encryptor.append(&content)?;
        encryptor.finish()
    }
}

/// Returns the name of the file with the images of this task.
pub(super) fn part_file_name(tid: Tid) -> String {
    tid.to_string()
}

/// Converts `error`, the reason for which the file `path` cannot be decrypted, to an error of the
/// store.
pub(super) fn decrypt_error_for(
    operation: StoreOperation,
    path: &Path,
    store_key: &StoreKey,
    error: DecryptError,
) -> StoreError {
    let path = path.to_path_buf();
    match error {
        DecryptError::Io(source) => StoreError::Io {
            operation,
            path,
            source,
        },
        DecryptError::OtherKey => StoreError::OtherKey {
            path,
            key: store_key.path.clone(),
        },
        DecryptError::Changed(error) => StoreError::Changed { path, why: error },
    }
}

/// Opens a file of a checkpoint. Returns the file and its length in bytes.
pub(super) fn open_checkpoint_file(
    operation: StoreOperation,
    path: &Path,
) -> Result<(File, u64), StoreError> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let changed_error = |reason: &str| StoreError::Changed {
        path: PathBuf::from(path),
        why: reason.into(),
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|e| match e.raw_os_error() {
            Some(libc::ENOENT) => changed_error("it does not exist"),
            Some(libc::ELOOP) => changed_error("it is a symbolic link"),
            _ => io_error(operation, path)(e),
        })?;
    let meta = file.metadata().map_err(io_error(operation, path))?;
    if !meta.is_file() {
        return Err(changed_error("it is not a regular file"));
    }
    Ok((file, meta.len()))
}

/// Reads and verifies the manifest of the checkpoint in the directory `dir`, and checks that all
/// parts exist with the correct lengths. Returns the manifest and its encrypted size in bytes.
pub(super) fn read_manifest(
    operation: StoreOperation,
    dir: &Path,
    id: CheckpointId,
    store_key: &StoreKey,
) -> Result<(Manifest, u64), StoreError> {
    let path = dir.join(MANIFEST_FILE);
    let (file, file_bytes) = open_checkpoint_file(operation, &path)?;
    let changed_error = |reason: String| StoreError::Changed {
        path: path.clone(),
        why: reason,
    };
    if file_bytes > MANIFEST_BYTES_MAX {
        return Err(changed_error(format!(
            "it has {file_bytes} bytes, and no manifest has more than {MANIFEST_BYTES_MAX}"
        )));
    }
    let content = decrypt_manifest(store_key, id, &file, file_bytes)
        .map_err(|reason| decrypt_error_for(operation, &path, store_key, reason))?;
    let manifest: Manifest = match postcard::take_from_bytes(&content) {
        Ok((manifest, [])) => manifest,
        Ok(_) => return Err(changed_error("it has surplus content".into())),
        Err(e) => return Err(changed_error(format!("its content is malformed: {e}"))),
    };
    let distinct_tids: BTreeSet<Tid> = manifest.parts.iter().map(|part| part.tid).collect();
    let is_valid = manifest.parts.len() <= PARTS_MAX
        && distinct_tids.len() == manifest.parts.len()
        && manifest.description.len() <= DESCRIPTION_BYTES_MAX
        && manifest.vm.len() <= VM_BYTES_MAX;
    if !is_valid {
        return Err(changed_error("its values are impossible".into()));
    }
    for part in &manifest.parts {
        let path = dir.join(part_file_name(part.tid));
        let (_, file_bytes) = open_checkpoint_file(operation, &path)?;
        if file_bytes != part.encrypted_bytes {
            return Err(StoreError::Changed {
                path,
                why: format!("it has {file_bytes} bytes, not {}", part.encrypted_bytes),
            });
        }
    }
    Ok((manifest, file_bytes))
}

fn decrypt_manifest(
    store_key: &StoreKey,
    id: CheckpointId,
    file: &File,
    file_bytes: u64,
) -> Result<Vec<u8>, DecryptError> {
    let mut decryptor = Decryptor::new(store_key, FileRole::Manifest(id), file, file_bytes)?;
    let mut content = Vec::with_capacity(file_bytes as usize);
    loop {
        match decryptor.next_bytes(usize::MAX)? {
            [] => break,
            piece => content.extend_from_slice(piece),
        }
    }
    decryptor.finish()?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::encryption::KEY_BYTES;

    const JOB: Tid = Tid::from_raw(0x40001);

    fn part_entry(tid: i32) -> PartEntry {
        PartEntry {
            tid: Tid::from_raw(tid),
            encrypted_bytes: 3,
            images_bytes: 5,
            blake3: [7; 32],
        }
    }

    fn manifest_with(parts: Vec<PartEntry>) -> Manifest {
        Manifest {
            vm: "vm".into(),
            started_at: Micros(5),
            parts,
            description: b"meta".to_vec(),
        }
    }

    /// Encrypts `content` correctly and reads it as a manifest. The directory also contains the
    /// part of task 1.
    fn encrypt_and_read(content: &[u8]) -> Result<Manifest, StoreError> {
        let store_key = StoreKey::new([1; KEY_BYTES], Path::new("key")).expect("a key");
        let id = CheckpointId::next_id(std::iter::empty(), JOB, Micros(0));
        let dir = tempfile::tempdir().expect("a directory");
        let mut encrypted_bytes = Vec::new();
        let write = |bytes: &[u8]| {
            encrypted_bytes.extend_from_slice(bytes);
            Ok(())
        };
        let mut encryptor =
            Encryptor::new(&store_key, FileRole::Manifest(id), write).expect("sealed");
        encryptor.append(content).expect("sealed");
        encryptor.finish().expect("sealed");
        std::fs::write(dir.path().join(MANIFEST_FILE), &encrypted_bytes).expect("written");
        std::fs::write(dir.path().join(part_file_name(Tid::from_raw(1))), "abc").expect("written");
        let (manifest, bytes) = read_manifest(StoreOperation::Read, dir.path(), id, &store_key)?;
        assert_eq!(bytes, encrypted_bytes.len() as u64);
        Ok(manifest)
    }

    /// A manifest that is encrypted correctly but malformed is refused.
    #[test]
    fn malformed_manifests_are_refused() {
        let encode = |manifest: &Manifest| postcard::to_allocvec(manifest).expect("written");
        let valid_manifest = manifest_with(vec![part_entry(1)]);
        assert_eq!(
            encrypt_and_read(&encode(&valid_manifest)).expect("read"),
            valid_manifest
        );
        let long_name_manifest = Manifest {
            vm: "v".repeat(VM_BYTES_MAX + 1),
            ..manifest_with(vec![])
        };
        let cases = [
            vec![],
            vec![0xff; 40],
            encode(&valid_manifest)[..10].to_vec(),
            [encode(&valid_manifest), vec![0]].concat(),
            encode(&manifest_with(vec![part_entry(1), part_entry(1)])),
            encode(&manifest_with(vec![part_entry(2)])),
            encode(&manifest_with(vec![PartEntry {
                encrypted_bytes: 4,
                ..part_entry(1)
            }])),
            encode(&manifest_with(
                (1..=PARTS_MAX as i32 + 1).map(part_entry).collect(),
            )),
            encode(&long_name_manifest),
        ];
        for case in cases {
            let error = encrypt_and_read(&case).expect_err("refused");
            assert!(matches!(error, StoreError::Changed { .. }), "{error}");
        }
    }
}
