//! Truncates files to which a task continued to write after the checkpoint from which it is
//! restarted.
//!
//! The restarted task will write the same data again. The file must have its length at the
//! checkpoint: otherwise its content would be duplicated, and the engine would refuse it.

use nix::sys::stat::SFlag;
use sempa_proto::migration::Failure;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Truncates each file of the list to the length in bytes that is given with its path, if the file
/// is longer.
///
/// Only regular files of the tasker's user are changed, and no symbolic link is followed. If any
/// file is shorter than its length at the checkpoint, no file is changed: its old content is
/// missing, and a program that appends would leave a gap that the engine does not detect.
///
/// # Errors
/// [`Failure::Io`] with the file that could not be truncated or is too short.
pub(crate) fn truncate_grown_files(files: &[(PathBuf, u64)]) -> Result<(), Failure> {
    for (path, checkpoint_bytes) in files {
        let metadata = std::fs::symlink_metadata(path)
            .map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
        if metadata.is_file() && metadata.len() < *checkpoint_bytes {
            return Err(Failure::Io(format!(
                "{path} has become shorter since the checkpoint: it has {} bytes, and had {checkpoint_bytes} then. Restore its \
                 content; if it may have a gap, extend it with 'truncate -s {checkpoint_bytes} {path}'",
                metadata.len(),
                path = path.display()
            )));
        }
    }
    files.iter().try_for_each(|(path, checkpoint_bytes)| {
        truncate_if_grown(path, *checkpoint_bytes).map_err(|e| {
            let path = path.display();
            Failure::Io(format!(
                "{path} has grown since the checkpoint and cannot be cut to {checkpoint_bytes} bytes: {e}"
            ))
        })
    })
}

fn truncate_if_grown(path: &Path, checkpoint_bytes: u64) -> io::Result<()> {
    let metadata = std::fs::symlink_metadata(path)?;
    let is_ours = metadata.uid() == checkpoint::facts::file_user();
    if !metadata.is_file() || metadata.len() <= checkpoint_bytes || !is_ours {
        return Ok(());
    }
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    if is_same_file(&file, &metadata)? {
        file.set_len(checkpoint_bytes)
    } else {
        Ok(())
    }
}

/// True if `file` is a regular file that is still the file with the metadata `expected_metadata`,
/// that is, has the same device, inode number and owner. The metadata was read before the file was
/// opened.
fn is_same_file(file: &File, expected_metadata: &std::fs::Metadata) -> io::Result<bool> {
    let metadata = file.metadata()?;
    let is_regular = SFlag::from_bits_truncate(metadata.mode()).contains(SFlag::S_IFREG);
    Ok(is_regular
        && (metadata.dev(), metadata.ino(), metadata.uid())
            == (
                expected_metadata.dev(),
                expected_metadata.ino(),
                expected_metadata.uid(),
            ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_grown_files_are_truncated() {
        let dir = tempfile::tempdir().expect("dir");
        let path = |name: &str| dir.path().join(name);
        for (name, bytes) in [
            ("grown", 100),
            ("same", 40),
            ("target", 100),
            ("shorter", 10),
            ("other", 100),
        ] {
            std::fs::write(path(name), vec![b'x'; bytes]).expect("write");
        }
        std::os::unix::fs::symlink(path("target"), path("link")).expect("link");
        let grown_files = ["grown", "same", "link"].map(|name| (path(name), 40));
        truncate_grown_files(&grown_files).expect("all are ours");
        truncate_grown_files(&[(dir.path().to_path_buf(), 0), ("/dev/null".into(), 0)])
            .expect("no regular files");
        let file_bytes = |name: &str| std::fs::read(path(name)).expect("there").len();
        assert_eq!(["grown", "same", "target"].map(file_bytes), [40, 40, 100]);
        let Err(Failure::Io(why)) =
            truncate_grown_files(&[(path("other"), 40), (path("shorter"), 40)])
        else {
            panic!("taken")
        };
        assert!(
            why.contains("shorter has become shorter")
                && why.contains("it has 10 bytes, and had 40 then"),
            "{why}"
        );
        assert_eq!(
            ["other", "shorter"].map(file_bytes),
            [100, 10],
            "neither was touched"
        );
        assert!(matches!(
            truncate_grown_files(&[(path("missing"), 0)]),
            Err(Failure::Io(_))
        ));
    }
}
