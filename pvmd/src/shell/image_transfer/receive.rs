//! The receiver: writes the files of a transfer into a directory.

use super::super::bulk_tcp::RecordReader;
use super::super::zeros::{self, Part};
use super::{
    OPEN_FILES_MAX, RECORD_MARK, RECORD_PIECE, TransferMark, format_failure, io_failure,
    receive_failure,
};
use sempa_proto::frame::from_bytes;
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of files in one transfer.
const IMAGE_FILES_MAX: u32 = 65_536;
/// Maximum number of bytes in one transfer.
const IMAGE_BYTES_MAX: u64 = 1 << 42;
/// Maximum length of a file name (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Maximum number of restarts of a directory in one transfer. The number must exceed the number of
/// times that a dump is retried when several dumps conflict.
pub(super) const RESTARTS_MAX: u32 = 256;

struct OpenFile {
    file: File,
    path: PathBuf,
    received_bytes: u64,
}

impl OpenFile {
    fn write_part(&mut self, part: Part<'_>) -> io::Result<()> {
        self.received_bytes += part.unpacked_len() as u64;
        match part {
            Part::Bytes(bytes) => self.file.write_all(bytes),
            Part::Zeros(_) => self
                .file
                .seek(SeekFrom::Start(self.received_bytes))
                .map(|_| ()),
        }
    }
}

/// Writes received files into a new directory.
struct Receiver<'a> {
    dir: &'a Path,
    open_files: BTreeMap<u32, OpenFile>,
    written_files: Vec<PathBuf>,
    file_count: u32,
    byte_count: u64,
    restart_count: u32,
}

/// Writes the files of a transfer into the directory `dir`, which must be missing or empty.
/// Compares the numbers of files and bytes with the end mark. Returns the number of bytes.
pub(in crate::shell) fn receive<R: Read>(
    dir: &Path,
    reader: &mut RecordReader<R>,
) -> Result<u64, Failure> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && is_empty_dir(dir) => {}
        create_result => create_result.map_err(io_failure("make", dir))?,
    }
    let mut receiver = Receiver {
        dir,
        open_files: BTreeMap::new(),
        written_files: Vec::new(),
        file_count: 0,
        byte_count: 0,
        restart_count: 0,
    };
    loop {
        let record = reader.wait_for_record().map_err(receive_failure)?;
        match record.split_first() {
            Some((&RECORD_PIECE, content)) => receiver.on_piece(content)?,
            Some((&RECORD_MARK, content)) => {
                let mark = from_bytes(content).map_err(|e| Failure::Images(e.to_string()))?;
                if let Some(bytes) = receiver.on_mark(mark)? {
                    return Ok(bytes);
                }
            }
            _ => return Err(format_failure("received an unknown kind of record")),
        }
    }
}

impl Receiver<'_> {
    fn on_piece(&mut self, piece: &[u8]) -> Result<(), Failure> {
        let (number, content) = piece
            .split_first_chunk()
            .ok_or_else(|| format_failure("a piece without a file"))?;
        let number = u32::from_le_bytes(*number);
        let target_file = self
            .open_files
            .get_mut(&number)
            .ok_or_else(|| format_failure("received data outside of a file"))?;
        for part in zeros::parts(content) {
            let part = part.map_err(|_| format_failure("received a malformed piece"))?;
            self.byte_count += part.unpacked_len() as u64;
            if self.byte_count > IMAGE_BYTES_MAX {
                return Err(Failure::Images(format!(
                    "received more than {IMAGE_BYTES_MAX} bytes, the limit"
                )));
            }
            target_file
                .write_part(part)
                .map_err(io_failure("write", &target_file.path))?;
        }
        Ok(())
    }

    /// Handles a mark. For the end mark, returns the number of bytes of the transfer; otherwise
    /// returns `None`.
    fn on_mark(&mut self, mark: TransferMark) -> Result<Option<u64>, Failure> {
        match mark {
            TransferMark::File { number, name } => {
                if number != self.file_count
                    || number >= IMAGE_FILES_MAX
                    || self.open_files.len() >= OPEN_FILES_MAX
                {
                    let open_file = self.open_files.len();
                    return Err(Failure::Images(format!(
                        "file {number} is not the next, or over the limit ({open_file} open)"
                    )));
                }
                let open_file = create_file(self.dir, &name)?;
                self.file_count += 1;
                self.written_files.push(open_file.path.clone());
                self.open_files.insert(number, open_file);
            }
            TransferMark::FileEnd { number, bytes } => {
                let ended_file = self.open_files.remove(&number).ok_or_else(|| {
                    format_failure("received the end of a file without its beginning")
                })?;
                if ended_file.received_bytes != bytes {
                    let (path, file_bytes) = (ended_file.path.display(), ended_file.received_bytes);
                    return Err(Failure::Images(format!(
                        "received {file_bytes} bytes of {path}, but {bytes} were sent"
                    )));
                }
                // `set_len` is necessary because the file may end with a hole, which no write has
                // created.
                ended_file
                    .file
                    .set_len(bytes)
                    .map_err(io_failure("write", &ended_file.path))?;
            }
            TransferMark::Restart => {
                self.restart_count += 1;
                if self.restart_count > RESTARTS_MAX {
                    return Err(Failure::Images(format!(
                        "restarted more than {RESTARTS_MAX} times, the limit"
                    )));
                }
                self.open_files.clear();
                for path in self.written_files.drain(..) {
                    std::fs::remove_file(&path).map_err(io_failure("remove", &path))?;
                }
                (self.file_count, self.byte_count) = (0, 0);
            }
            TransferMark::End {
                file_count,
                byte_count,
            } => {
                let received_counts = (self.file_count, self.byte_count);
                if !self.open_files.is_empty() || received_counts != (file_count, byte_count) {
                    let text = format!(
                        "received {} files of {} bytes, but {file_count} of {byte_count} were sent",
                        received_counts.0, received_counts.1
                    );
                    return Err(Failure::Images(text));
                }
                return Ok(Some(byte_count));
            }
        }
        Ok(None)
    }
}

fn is_empty_dir(dir: &Path) -> bool {
    let is_directory = std::fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir());
    is_directory && std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// Creates a new file in `dir`. Refuses a name that contains a path.
fn create_file(dir: &Path, name: &str) -> Result<OpenFile, Failure> {
    let is_file_name = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.contains(['/', '\0'])
        && name != "."
        && name != "..";
    if !is_file_name {
        return Err(Failure::Images(format!(
            "{name:?} is not a plain file name"
        )));
    }
    let path = dir.join(name);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(io_failure("make", &path))?;
    Ok(OpenFile {
        file,
        path,
        received_bytes: 0,
    })
}
