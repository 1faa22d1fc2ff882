//! Jobs that have ended for good: a small file in each of their sets says when. It is not sealed: whoever could write it could
//! as well remove the set.

use super::disk::Disk;
use super::error::{Act, StoreError, io};
use sempa_proto::Micros;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The file.
const ENDED: &str = "ended";
/// A longer one was not written here.
const BYTES_MAX: u64 = 21;

/// When the job of the set in this directory ended, if it did. What cannot be read was not said: then the set stays.
pub(super) fn read(dir: &Path) -> Option<Micros> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(dir.join(ENDED))
        .ok()?;
    let mut text = String::new();
    file.take(BYTES_MAX + 1).read_to_string(&mut text).ok()?;
    // Without its end it may be the beginning of another number.
    text.strip_suffix('\n')?.parse().ok().map(Micros)
}

/// Says it, or takes it back.
pub(super) fn write(disk: &Disk, dir: &Path, ended: Option<Micros>) -> Result<(), StoreError> {
    if ended.is_some() && read(dir).is_some() {
        return Ok(());
    }
    let path = dir.join(ENDED);
    let written = disk.remove_file(&path).and_then(|()| {
        let Some(ended) = ended else { return Ok(()) };
        let file = disk.make_file(&path)?;
        disk.write(&path, &file, format!("{}\n", ended.0).as_bytes())?;
        disk.sync(&path, &file)
    });
    written.map_err(io(Act::Mark, &path))
}
