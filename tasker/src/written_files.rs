//! Truncates files to which a task continued to write after the checkpoint from which it is
//! restarted.
//!
//! The restarted task will write the same data again. A file that has grown since the checkpoint is
//! truncated to its length at the checkpoint, so that its content is not duplicated and the engine
//! finds the file with the expected length.

use nix::sys::stat::SFlag;
use sempa_proto::migration::Failure;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Truncates each of these files to its length at the checkpoint if it has grown.
///
/// Only regular files of the tasker's user are changed, and no symbolic link is followed. If a file
/// is shorter than at the checkpoint, no file is changed: its old content is missing, and a program
/// that appends would leave a gap that the engine does not detect.
///
/// # Errors
/// [`Failure::Io`] with the file that could not be truncated or is too short.
pub(crate) fn truncate_grown(files: &[(PathBuf, u64)]) -> Result<(), Failure> {
    for (path, bytes) in files {
        let now = std::fs::symlink_metadata(path)
            .map_err(|e| Failure::Io(format!("{}: {e}", path.display())))?;
        if now.is_file() && now.len() < *bytes {
            return Err(Failure::Io(format!(
                "{path} has become shorter since the checkpoint: it has {} bytes, and had {bytes} then. Bring it back as it was; if it may \
                 have a gap, make it as long with 'truncate -s {bytes} {path}'",
                now.len(),
                path = path.display()
            )));
        }
    }
    files.iter().try_for_each(|(path, bytes)| {
        truncate(path, *bytes).map_err(|e| {
            let path = path.display();
            Failure::Io(format!(
                "{path} has grown since the checkpoint and cannot be cut to {bytes} bytes: {e}"
            ))
        })
    })
}

fn truncate(path: &Path, bytes: u64) -> io::Result<()> {
    let meta = std::fs::symlink_metadata(path)?;
    let is_ours = meta.uid() == nix::unistd::getuid().as_raw();
    if !meta.is_file() || meta.len() <= bytes || !is_ours {
        return Ok(());
    }
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path)?;
    if is_same_file(&file, &meta)? {
        file.set_len(bytes)
    } else {
        Ok(())
    }
}

/// True if the open file is the regular file whose metadata was read before.
fn is_same_file(file: &File, expected: &std::fs::Metadata) -> io::Result<bool> {
    let meta = file.metadata()?;
    let is_regular = SFlag::from_bits_truncate(meta.mode()).contains(SFlag::S_IFREG);
    Ok(is_regular
        && (meta.dev(), meta.ino(), meta.uid()) == (expected.dev(), expected.ino(), expected.uid()))
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
        let all = ["grown", "same", "link"].map(|name| (path(name), 40));
        truncate_grown(&all).expect("all are ours");
        truncate_grown(&[(dir.path().to_path_buf(), 0), ("/dev/null".into(), 0)])
            .expect("no regular files");
        let length = |name: &str| std::fs::read(path(name)).expect("there").len();
        assert_eq!(["grown", "same", "target"].map(length), [40, 40, 100]);
        let Err(Failure::Io(why)) = truncate_grown(&[(path("other"), 40), (path("shorter"), 40)])
        else {
            panic!("taken")
        };
        assert!(
            why.contains("shorter has become shorter")
                && why.contains("it has 10 bytes, and had 40 then"),
            "{why}"
        );
        assert_eq!(
            ["other", "shorter"].map(length),
            [100, 10],
            "neither was touched"
        );
        assert!(matches!(
            truncate_grown(&[(path("missing"), 0)]),
            Err(Failure::Io(_))
        ));
    }
}
