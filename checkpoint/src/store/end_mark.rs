//! The end mark of a job that has ended and will not be restarted: a small file in each of the
//! job's checkpoints with the time of the end. The file is not encrypted, because a process that
//! could write it could also remove the checkpoint.

use super::disk::Disk;
use super::error::{StoreError, StoreOperation, io_error};
use sempa_proto::Micros;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Name of the file that contains the end mark.
const MARK_FILE_NAME: &str = "ended";
/// Maximum size in bytes of a valid end mark: 20 digits and a newline.
const MARK_BYTES_MAX: u64 = 21;

/// Returns the time at which the job of the checkpoint in this directory ended; `None` if the
/// checkpoint has no end mark. An unreadable mark counts as missing, so that the checkpoint is not
/// removed.
pub(super) fn read_end_mark(dir: &Path) -> Option<Micros> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(dir.join(MARK_FILE_NAME))
        .ok()?;
    let mut text = String::new();
    file.take(MARK_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .ok()?;
    // Without the final newline the number may be truncated.
    text.strip_suffix('\n')?.parse().ok().map(Micros)
}

/// Writes the end mark with the time `ended_at`, or removes the mark if `ended_at` is `None`.
pub(super) fn write_end_mark(
    disk: &Disk,
    dir: &Path,
    ended_at: Option<Micros>,
) -> Result<(), StoreError> {
    if ended_at.is_some() && read_end_mark(dir).is_some() {
        return Ok(());
    }
    let path = dir.join(MARK_FILE_NAME);
    let write_result = disk.remove_file(&path).and_then(|()| {
        let Some(ended_at) = ended_at else {
            return Ok(());
        };
        let file = disk.make_file(&path)?;
        disk.append(&path, &file, format!("{}\n", ended_at.0).as_bytes())?;
        disk.sync(&path, &file)
    });
    write_result.map_err(io_error(StoreOperation::Mark, &path))
}
