//! Transfers the files of a directory to another host.
//!
//! A directory may be sent while it is still being written:
//!
//! 1. Files that only grow are sent as they grow. Sent data is punched out of the file immediately:
//!    if the file system is in memory, no data is stored twice, and the freed memory is available
//!    for new data.
//! 2. When the directory is complete, the rest of these files and all other files are sent.
//! 3. The end mark contains the total numbers of files and bytes. No file is valid before the end
//!    mark has arrived.
//!
//! Runs of zeros are counted instead of sent, and become holes at the receiver. If the writer
//! starts again in a new directory of the same name, the transfer restarts as well.

mod receive;
mod send;
#[cfg(test)]
mod tests;

pub(super) use receive::receive;
pub(super) use send::{DirState, Sender, SentAmounts, SharedDirState};

use super::bulk_tcp::{CONTENT_BYTES_MAX, RecordWriter};
use super::zeros;
use sempa_proto::frame::to_bytes;
use sempa_proto::migration::Failure;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::path::Path;

/// Maximum number of bytes of a file in one record.
const PIECE_BYTES: usize = zeros::PLAIN_BYTES_MAX;
/// Size of the head of a piece: the kind of the record and the number of the file.
const PIECE_HEAD_BYTES: usize = 5;
pub(super) const RECORD_MARK: u8 = 0;
pub(super) const RECORD_PIECE: u8 = 1;
/// Maximum number of files that are open at the same time.
const OPEN_FILES_MAX: usize = 64;

const _: () = assert!(PIECE_HEAD_BYTES + zeros::HEAD_BYTES + PIECE_BYTES <= CONTENT_BYTES_MAX);

/// Records that structure a transfer. The data of the files is in the pieces between them.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum TransferMark {
    /// A file begins; files are numbered from 0.
    File { number: u32, name: String },
    /// A file is complete and has `bytes` bytes.
    FileEnd { number: u32, bytes: u64 },
    /// Everything received so far is void.
    Restart,
    /// All files have been sent: `files` files with `bytes` bytes in total.
    End { files: u32, bytes: u64 },
}

/// Sends a structure record.
pub(super) fn send_mark<W: Write>(
    out: &mut RecordWriter<W>,
    mark: &impl Serialize,
) -> Result<(), Failure> {
    let bytes = to_bytes(mark).map_err(|e| Failure::Images(e.to_string()))?;
    let sent = out.send(1 + bytes.len(), |room| {
        room[0] = RECORD_MARK;
        room[1..].copy_from_slice(&bytes);
        Ok::<(), Failure>(())
    })?;
    sent.map_err(send_failure)
}

/// Returns the failure of a transfer whose data does not arrive any more.
pub(super) fn receive_failure(e: io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => format_failure("the transfer ended in the middle"),
        _ => Failure::Images(format!("the transfer failed: {e}")),
    }
}

/// Returns the failure for received data that violates the format.
pub(super) fn format_failure(what: &str) -> Failure {
    Failure::Images(what.to_string())
}

/// Returns the failure of a transfer that could not send more data.
pub(super) fn send_failure(e: io::Error) -> Failure {
    Failure::Images(format!("the target stopped receiving: {e}"))
}

fn io_failure(act: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let what = format!("{act} {}", path.display());
    move |e| Failure::Io(format!("{what}: {e}"))
}
