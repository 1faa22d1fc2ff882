//! The damage mark of a checkpoint that was refused because it is not as it was written: a small
//! file in its directory with the reason. The file is not encrypted, because a process that could
//! write it could also remove the checkpoint.

use super::disk::Disk;
use super::error::{StoreError, StoreOperation, io_error};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Name of the file that contains the damage mark.
const MARK_FILE_NAME: &str = "damaged";
/// Maximum size in bytes of a reason in a damage mark. The rest of a longer reason is omitted.
const REASON_BYTES_MAX: usize = 1024;

/// Returns the reason why the checkpoint in this directory is marked as damaged; `None` if it is
/// not marked.
pub(super) fn read_damage_mark(dir: &Path) -> Option<String> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(dir.join(MARK_FILE_NAME))
        .ok()?;
    let mut bytes = Vec::new();
    // A mark counts even if its reason cannot be read.
    let _ = file.take(REASON_BYTES_MAX as u64).read_to_end(&mut bytes);
    Some(String::from_utf8_lossy(&bytes).trim().to_string())
}

/// Writes the damage mark, or removes it if `reason` is `None`. An existing mark keeps its reason.
pub(super) fn write_damage_mark(
    disk: &Disk,
    dir: &Path,
    reason: Option<&str>,
) -> Result<(), StoreError> {
    let path = dir.join(MARK_FILE_NAME);
    let write_result = match reason {
        None => disk.remove_file(&path),
        Some(_) if read_damage_mark(dir).is_some() => return Ok(()),
        Some(reason) => disk.make_file(&path).and_then(|file| {
            let end = (0..=REASON_BYTES_MAX.min(reason.len()))
                .rev()
                .find(|end| reason.is_char_boundary(*end))
                .unwrap_or(0);
            disk.append(&path, &file, &reason.as_bytes()[..end])?;
            disk.sync(&path, &file)
        }),
    };
    write_result.map_err(io_error(StoreOperation::MarkDamage, &path))
}
