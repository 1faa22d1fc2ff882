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
pub const META_BYTES_MAX: usize = 64 << 20;
/// Maximum length in bytes of the name of a virtual machine.
pub const VM_BYTES_MAX: usize = 256;
/// Maximum size in bytes of a manifest that is read: the description, 64 bytes for each part, and 1
/// MiB for the rest.
const MANIFEST_BYTES_MAX: u64 = (META_BYTES_MAX + PARTS_MAX * 64 + (1 << 20)) as u64;

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
    pub(super) started: Micros,
    /// The parts, sorted by task id.
    pub(super) parts: Vec<PartEntry>,
    /// The description that the writer has added.
    pub(super) meta: Vec<u8>,
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
            started: self.started,
            bytes,
            parts,
            job_ended_at: None,
        }
    }

    /// Encrypts the manifest and passes the result to `write`.
    pub(super) fn seal(
        &self,
        secret: &StoreKey,
        id: CheckpointId,
        write: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> std::io::Result<EncryptedFile> {
        let content = postcard::to_allocvec(self).map_err(std::io::Error::other)?;
        let mut encryptor = Encryptor::new(secret, FileRole::Manifest(id), write)?;
        encryptor.append(&content)?;
        encryptor.finish()
    }
}

/// Returns the name of the file with the images of this task.
pub(super) fn part_name(tid: Tid) -> String {
    tid.to_string()
}

/// Converts the reason `why` the file `path` cannot be decrypted to an error of the store.
pub(super) fn decrypt_error_for(
    operation: StoreOperation,
    path: &Path,
    secret: &StoreKey,
    why: DecryptError,
) -> StoreError {
    let path = path.to_path_buf();
    match why {
        DecryptError::Io(source) => StoreError::Io {
            operation,
            path,
            source,
        },
        DecryptError::OtherKey => StoreError::OtherKey {
            path,
            key: secret.path.clone(),
        },
        DecryptError::Changed(why) => StoreError::Changed { path, why },
    }
}

/// Opens a file of a checkpoint. Returns the file and its length in bytes.
pub(super) fn open_file(operation: StoreOperation, path: &Path) -> Result<(File, u64), StoreError> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let changed = |why: &str| StoreError::Changed {
        path: PathBuf::from(path),
        why: why.into(),
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|e| match e.raw_os_error() {
            Some(libc::ENOENT) => changed("it is not there"),
            Some(libc::ELOOP) => changed("it is a symbolic link"),
            _ => io_error(operation, path)(e),
        })?;
    let meta = file.metadata().map_err(io_error(operation, path))?;
    if !meta.is_file() {
        return Err(changed("it is no plain file"));
    }
    Ok((file, meta.len()))
}

/// Reads and verifies the manifest of the checkpoint in the directory `dir`, and checks that all
/// parts exist with the correct lengths. Returns the manifest and its encrypted size in bytes.
pub(super) fn read_manifest(
    operation: StoreOperation,
    dir: &Path,
    id: CheckpointId,
    secret: &StoreKey,
) -> Result<(Manifest, u64), StoreError> {
    let path = dir.join(MANIFEST_FILE);
    let (file, bytes) = open_file(operation, &path)?;
    let changed = |why: String| StoreError::Changed {
        path: path.clone(),
        why,
    };
    if bytes > MANIFEST_BYTES_MAX {
        return Err(changed(format!(
            "it has {bytes} bytes, and no manifest has more than {MANIFEST_BYTES_MAX}"
        )));
    }
    let content = decrypt(secret, id, &file, bytes)
        .map_err(|why| decrypt_error_for(operation, &path, secret, why))?;
    let manifest: Manifest = match postcard::take_from_bytes(&content) {
        Ok((manifest, [])) => manifest,
        Ok(_) => return Err(changed("there is more in it than belongs there".into())),
        Err(e) => return Err(changed(format!("its content makes no sense: {e}"))),
    };
    let distinct_tids: BTreeSet<Tid> = manifest.parts.iter().map(|part| part.tid).collect();
    let is_valid = manifest.parts.len() <= PARTS_MAX
        && distinct_tids.len() == manifest.parts.len()
        && manifest.meta.len() <= META_BYTES_MAX
        && manifest.vm.len() <= VM_BYTES_MAX;
    if !is_valid {
        return Err(changed("it says what no manifest says".into()));
    }
    for part in &manifest.parts {
        let path = dir.join(part_name(part.tid));
        let (_, bytes) = open_file(operation, &path)?;
        if bytes != part.encrypted_bytes {
            return Err(StoreError::Changed {
                path,
                why: format!("it has {bytes} bytes, not {}", part.encrypted_bytes),
            });
        }
    }
    Ok((manifest, bytes))
}

fn decrypt(
    secret: &StoreKey,
    id: CheckpointId,
    file: &File,
    bytes: u64,
) -> Result<Vec<u8>, DecryptError> {
    let mut decryptor = Decryptor::new(secret, FileRole::Manifest(id), file, bytes)?;
    let mut content = Vec::with_capacity(bytes as usize);
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

    fn part(tid: i32) -> PartEntry {
        PartEntry {
            tid: Tid::from_raw(tid),
            encrypted_bytes: 3,
            images_bytes: 5,
            blake3: [7; 32],
        }
    }

    fn manifest(parts: Vec<PartEntry>) -> Manifest {
        Manifest {
            vm: "vm".into(),
            started: Micros(5),
            parts,
            meta: b"meta".to_vec(),
        }
    }

    /// Encrypts `content` correctly and reads it as a manifest. The directory also contains the
    /// part of task 1.
    fn read_back(content: &[u8]) -> Result<Manifest, StoreError> {
        let secret = StoreKey::new([1; KEY_BYTES], Path::new("key")).expect("a key");
        let id = CheckpointId::next_id(std::iter::empty(), JOB, Micros(0));
        let dir = tempfile::tempdir().expect("a directory");
        let mut encrypted = Vec::new();
        let write = |bytes: &[u8]| {
            encrypted.extend_from_slice(bytes);
            Ok(())
        };
        let mut encryptor = Encryptor::new(&secret, FileRole::Manifest(id), write).expect("sealed");
        encryptor.append(content).expect("sealed");
        encryptor.finish().expect("sealed");
        std::fs::write(dir.path().join(MANIFEST_FILE), &encrypted).expect("written");
        std::fs::write(dir.path().join(part_name(Tid::from_raw(1))), "abc").expect("written");
        let (manifest, bytes) = read_manifest(StoreOperation::Read, dir.path(), id, &secret)?;
        assert_eq!(bytes, encrypted.len() as u64);
        Ok(manifest)
    }

    /// A manifest that is encrypted correctly but malformed is refused.
    #[test]
    fn malformed_manifests_are_refused() {
        let bytes = |manifest: &Manifest| postcard::to_allocvec(manifest).expect("written");
        let good = manifest(vec![part(1)]);
        assert_eq!(read_back(&bytes(&good)).expect("read"), good);
        let long = Manifest {
            vm: "v".repeat(VM_BYTES_MAX + 1),
            ..manifest(vec![])
        };
        let cases = [
            vec![],
            vec![0xff; 40],
            bytes(&good)[..10].to_vec(),
            [bytes(&good), vec![0]].concat(),
            bytes(&manifest(vec![part(1), part(1)])),
            bytes(&manifest(vec![part(2)])),
            bytes(&manifest(vec![PartEntry {
                encrypted_bytes: 4,
                ..part(1)
            }])),
            bytes(&manifest((1..=PARTS_MAX as i32 + 1).map(part).collect())),
            bytes(&long),
        ];
        for case in cases {
            let why = read_back(&case).expect_err("refused");
            assert!(matches!(why, StoreError::Changed { .. }), "{why}");
        }
    }
}
