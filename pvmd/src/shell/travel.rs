//! Files of a directory on their way to another host: what is sent for them, and what is made of that there.
//!
//! A directory may be sent while it is still being written. Files that only grow are followed then; when the directory is
//! complete, the rest of them travels, and all other files. What has left of such a file is given back to the file system at
//! once: where that is memory, nothing is there twice, and what was just given back takes up what comes next. Runs of zeros are
//! counted and not sent, and become holes at the other end. Nothing counts before the end mark, which has the counts of
//! everything; whoever began to write anew, in a new directory of the same name, has the other end begin anew as well.

mod receive;
mod send;
#[cfg(test)]
mod tests;

pub(super) use receive::receive;
pub(super) use send::{Progress, Sender, Sent, State};

use super::bulk::{CONTENT_BYTES_MAX, Outgoing};
use super::zeros;
use sempa_proto::frame::to_bytes;
use sempa_proto::migration::Failure;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::path::Path;

/// Bytes of a file in one record at most.
const PIECE_BYTES: usize = zeros::PLAIN_BYTES_MAX;
/// What a record is, and the number of the file that a piece belongs to.
const PIECE_HEAD_BYTES: usize = 5;
pub(super) const MARK: u8 = 0;
pub(super) const PIECE: u8 = 1;
/// Files that are open at the same time at most.
const OPEN_FILES_MAX: usize = 64;

const _: () = assert!(PIECE_HEAD_BYTES + zeros::HEAD_BYTES + PIECE_BYTES <= CONTENT_BYTES_MAX);

/// What stands between the pieces of files.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Mark {
    /// A file begins; they are counted from 0.
    File { number: u32, name: String },
    /// It has ended and is so long.
    FileEnd { number: u32, bytes: u64 },
    /// All that came is void.
    Anew,
    /// All files have been sent.
    End { files: u32, bytes: u64 },
}

/// Sends a record that stands between pieces.
pub(super) fn send_mark<W: Write>(
    out: &mut Outgoing<W>,
    mark: &impl Serialize,
) -> Result<(), Failure> {
    let bytes = to_bytes(mark).map_err(|e| Failure::Images(e.to_string()))?;
    let sent = out.send(1 + bytes.len(), |room| {
        room[0] = MARK;
        room[1..].copy_from_slice(&bytes);
        Ok::<(), Failure>(())
    })?;
    sent.map_err(not_taken)
}

/// Why nothing more came.
pub(super) fn broken_off(e: io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => wrong("the transfer ended in the middle"),
        _ => Failure::Images(format!("the transfer broke off: {e}")),
    }
}

/// What came is not what is sent.
pub(super) fn wrong(what: &str) -> Failure {
    Failure::Images(what.to_string())
}

/// Why nothing more could be sent.
pub(super) fn not_taken(e: io::Error) -> Failure {
    Failure::Images(format!("the target took no more: {e}"))
}

fn io_failure(act: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let what = format!("{act} {}", path.display());
    move |e| Failure::Io(format!("{what}: {e}"))
}
