//! Transfers the files of a directory to another host.
//!
//! A directory may be sent while it is still being written:
//!
//! 1. Files to which data is only appended are sent while they grow. Sent data is punched out of
//!    the file immediately. If the file system is in memory, no data is stored twice, and the freed
//!    memory is available for new data.
//! 2. When the directory is complete, the remaining data of these files and all other files are
//!    sent.
//! 3. The end mark contains the total numbers of files and bytes. No file is valid before the end
//!    mark has arrived.
//!
//! For a run of zeros, only the length of the run is sent; the run becomes a hole at the receiver.
//! If the writer starts again in a new directory of the same name, the transfer restarts, too.

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
const PIECE_BYTES_MAX: usize = zeros::PLAIN_BYTES_MAX;
/// Length of the head of a piece: the type of the record and the number of the file.
const PIECE_HEAD_BYTES: usize = 5;
pub(super) const RECORD_MARK: u8 = 0;
pub(super) const RECORD_PIECE: u8 = 1;
/// Maximum number of files that are open at the same time.
const OPEN_FILES_MAX: usize = 64;

const _: () =
    assert!(PIECE_HEAD_BYTES + zeros::PART_HEAD_BYTES + PIECE_BYTES_MAX <= CONTENT_BYTES_MAX);

/// Records that mark the structure of a transfer. The data of the files is sent in pieces between
/// these records.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum TransferMark {
    /// A file begins; files are numbered from 0.
    File { number: u32, name: String },
    /// A file is complete and has `bytes` bytes.
    FileEnd { number: u32, bytes: u64 },
    /// The receiver must delete everything that it has received in this transfer so far.
    Restart,
    /// All files have been sent: `file_count` files with `byte_count` bytes in total.
    End { file_count: u32, byte_count: u64 },
}

/// Sends a structure record.
pub(super) fn send_mark<W: Write>(
    writer: &mut RecordWriter<W>,
    mark: &impl Serialize,
) -> Result<(), Failure> {
    let bytes = to_bytes(mark).map_err(|e| Failure::Images(e.to_string()))?;
    let send_result = writer.send(1 + bytes.len(), |buffer| {
        buffer[0] = RECORD_MARK;
        buffer[1..].copy_from_slice(&bytes);
        Ok::<(), Failure>(())
    })?;
    send_result.map_err(send_failure)
}

/// Returns the failure of a transfer for which reading from the connection failed.
pub(super) fn receive_failure(e: io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => format_failure("the transfer ended in the middle"),
        _ => Failure::Images(format!("the transfer failed: {e}")),
    }
}

/// Returns the failure for received data that violates the format. `reason` describes the
/// violation.
pub(super) fn format_failure(reason: &str) -> Failure {
    Failure::Images(reason.to_string())
}

/// Returns the failure of a transfer for which writing to the connection failed.
pub(super) fn send_failure(e: io::Error) -> Failure {
    Failure::Images(format!("the target stopped receiving: {e}"))
}

fn io_failure(verb: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let action = format!("{verb} {}", path.display());
    move |e| Failure::Io(format!("{action}: {e}"))
}
