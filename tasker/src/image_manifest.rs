//! The image directory and its manifest. The manifest contains facts about the source that the
//! target's tasker needs in addition to the engine's images.

use crate::file_transfer::TransferredFile;
use crate::process_settings::ProcessSettings;
use sempa_proto::frame::{from_bytes, to_bytes};
use sempa_proto::migration::{Failure, RequiredFile};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name of the manifest file.
const MANIFEST_FILE: &str = "sempa-carry";
/// Version of the manifest's format.
const MANIFEST_VERSION: u16 = 6;
/// Maximum length in bytes of a manifest that is accepted for reading.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of image files in one directory.
const IMAGE_FILES_MAX: usize = 65_536;

/// The facts in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageManifest {
    version: u16,
    /// Inode number of the pipe that receives the task's output at the source. Images identify the
    /// pipe by this number.
    pub(crate) output_pipe_inode: u64,
    /// PIDs, in the task's namespace, of processes that were already stopped before the migration
    /// stopped the task.
    pub(crate) already_stopped_pids: Vec<i32>,
    /// Memory of the task in bytes, including post-copied memory.
    pub(crate) memory_bytes: u64,
    /// Files that the task has open for writing, each with its length in bytes at the time of the
    /// dump.
    pub(crate) written_files: Vec<(PathBuf, u64)>,
    /// Files that are transferred together with the task.
    pub(crate) transferred_files: Vec<TransferredFile>,
    /// Settings of the task's processes that the engine does not restore.
    pub(crate) process_settings: Vec<ProcessSettings>,
    /// Name and length in bytes of each image file.
    image_lengths: Vec<(String, u64)>,
    /// Files that the task had open when it was stopped. They explain a failed restore.
    pub(crate) open_files: Vec<RequiredFile>,
}

/// The files of a task at the time of its dump.
#[derive(Debug, Default)]
pub(crate) struct TaskFiles {
    pub(crate) open: Vec<RequiredFile>,
    /// The files of [`ImageManifest::written_files`], with their lengths in bytes.
    pub(crate) written: Vec<(PathBuf, u64)>,
    pub(crate) transferred: Vec<TransferredFile>,
}

impl ImageManifest {
    /// Lists the images in the directory `dir` and returns a manifest with the given facts.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(crate) fn from_image_dir(
        dir: &Path,
        output_pipe_inode: u64,
        already_stopped_pids: Vec<i32>,
        memory_bytes: u64,
        files: TaskFiles,
        process_settings: Vec<ProcessSettings>,
    ) -> Result<Self, Failure> {
        Ok(Self {
            version: MANIFEST_VERSION,
            output_pipe_inode,
            already_stopped_pids,
            memory_bytes,
            written_files: files.written,
            transferred_files: files.transferred,
            process_settings,
            image_lengths: list_images(dir)?,
            open_files: files.open,
        })
    }

    /// Writes the manifest next to the images. Returns the manifest's length in bytes.
    ///
    /// # Errors
    /// The manifest cannot be written.
    pub(crate) fn write(&self, dir: &Path) -> Result<u64, Failure> {
        let path = dir.join(MANIFEST_FILE);
        let bytes =
            to_bytes(self).map_err(|e| Failure::Io(format!("cannot describe the images: {e}")))?;
        std::fs::write(&path, &bytes)
            .map_err(|e| Failure::Io(format!("cannot write {}: {e}", path.display())))?;
        Ok(bytes.len() as u64)
    }

    /// Reads the manifest in the directory `dir`, and checks that all images exist with the
    /// recorded lengths. A truncated image can make an engine loop forever.
    ///
    /// # Errors
    /// [`Failure::Images`] with the missing or truncated image.
    pub(crate) fn read(dir: &Path) -> Result<Self, Failure> {
        let path = dir.join(MANIFEST_FILE);
        let manifest_failure =
            |why: &dyn std::fmt::Display| Failure::Images(format!("{}: {why}", path.display()));
        let length_bytes = std::fs::metadata(&path)
            .map_err(|e| manifest_failure(&e))?
            .len();
        if length_bytes > MANIFEST_BYTES_MAX {
            return Err(manifest_failure(&format!(
                "it has {length_bytes} bytes, more than any real one"
            )));
        }
        let manifest: Self = from_bytes(&std::fs::read(&path).map_err(|e| manifest_failure(&e))?)
            .map_err(|e| manifest_failure(&e))?;
        if manifest.version != MANIFEST_VERSION {
            return Err(manifest_failure(&format!(
                "it has version {}, but only {MANIFEST_VERSION} is supported",
                manifest.version
            )));
        }
        for (name, length_bytes) in &manifest.image_lengths {
            let found_bytes = std::fs::metadata(dir.join(name)).map(|meta| meta.len());
            match found_bytes {
                Ok(found_bytes) if found_bytes == *length_bytes => {}
                Ok(found_bytes) => {
                    return Err(Failure::Images(format!(
                        "{name} has {found_bytes} bytes, {length_bytes} were written"
                    )));
                }
                Err(e) => return Err(Failure::Images(format!("{name}: {e}"))),
            }
        }
        Ok(manifest)
    }

    /// Returns the names of the files in the image directory that are not the engine's.
    pub(crate) fn own_file_names(&self) -> impl Iterator<Item = &str> {
        let copies = self
            .transferred_files
            .iter()
            .map(TransferredFile::image_name);
        copies.chain([MANIFEST_FILE])
    }

    /// Returns the paths of the files that are transferred together with the task.
    pub(crate) fn transferred_paths(&self) -> impl Iterator<Item = &Path> {
        self.transferred_files.iter().map(TransferredFile::path)
    }

    /// Returns the total length of all images in bytes.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.image_lengths.iter().map(|(_, bytes)| bytes).sum()
    }
}

fn list_images(dir: &Path) -> Result<Vec<(String, u64)>, Failure> {
    let io_failure = |e: io::Error| Failure::Io(format!("cannot read {}: {e}", dir.display()));
    let mut images = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io_failure)? {
        let entry = entry.map_err(io_failure)?;
        let metadata = entry.metadata().map_err(io_failure)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if metadata.is_file() && name != MANIFEST_FILE {
            images.push((name, metadata.len()));
        }
        if images.len() > IMAGE_FILES_MAX {
            return Err(Failure::Io(format!(
                "{} has more than {IMAGE_FILES_MAX} files, the limit",
                dir.display()
            )));
        }
    }
    images.sort();
    Ok(images)
}

/// Creates an image directory with mode 0700. If the directory exists, checks that it is empty and
/// sets its mode.
pub(crate) fn prepare_image_dir(dir: &Path) -> Result<(), Failure> {
    let dir_failure = |e: &dyn std::fmt::Display| {
        Failure::Io(format!(
            "cannot make the image directory {}: {e}",
            dir.display()
        ))
    };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let mut entries = std::fs::read_dir(dir).map_err(|e| dir_failure(&e))?;
            if entries.next().is_some() {
                return Err(dir_failure(&"it exists and is not empty"));
            }
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            std::fs::set_permissions(dir, mode).map_err(|e| dir_failure(&e))
        }
        Err(e) => Err(dir_failure(&e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_or_missing_image_is_detected() {
        let dir = tempfile::tempdir().expect("dir");
        std::fs::write(dir.path().join("pages-1.img"), [7u8; 8192]).expect("write");
        let manifest = ImageManifest::from_image_dir(
            dir.path(),
            5,
            vec![3],
            9000,
            TaskFiles::default(),
            vec![ProcessSettings::default()],
        )
        .expect("carry");
        manifest.write(dir.path()).expect("write");
        assert_eq!(
            ImageManifest::read(dir.path()),
            Ok(manifest.clone()),
            "whole"
        );
        assert_eq!(manifest.image_bytes(), 8192);
        std::fs::write(dir.path().join("pages-1.img"), [7u8; 4096]).expect("write");
        let truncated_failure =
            Failure::Images("pages-1.img has 4096 bytes, 8192 were written".into());
        assert_eq!(ImageManifest::read(dir.path()), Err(truncated_failure));
        std::fs::remove_file(dir.path().join("pages-1.img")).expect("remove");
        assert!(matches!(
            ImageManifest::read(dir.path()),
            Err(Failure::Images(_))
        ));
        std::fs::write(dir.path().join(MANIFEST_FILE), b"\xff\xff").expect("write");
        assert!(matches!(
            ImageManifest::read(dir.path()),
            Err(Failure::Images(_))
        ));
    }
}
