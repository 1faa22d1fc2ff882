//! The receiver: writes the files of a transfer.

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
/// Longest file name (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Maximum number of restarts of a directory in one transfer. It exceeds the number of times that a
/// dump is retried when several dumps conflict.
pub(super) const RESTARTS_MAX: u32 = 256;

struct OpenFile {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl OpenFile {
    fn write_part(&mut self, part: Part<'_>) -> io::Result<()> {
        self.bytes += part.unpacked_len() as u64;
        match part {
            Part::Bytes(bytes) => self.file.write_all(bytes),
            Part::Zeros(_) => self.file.seek(SeekFrom::Start(self.bytes)).map(|_| ()),
        }
    }
}

/// Writes received files into a new directory.
struct Receiver<'a> {
    dir: &'a Path,
    open_files: BTreeMap<u32, OpenFile>,
    written_files: Vec<PathBuf>,
    files: u32,
    bytes: u64,
    restarts: u32,
}

/// Writes the files of a transfer into the new directory `dir` and checks their counts. Returns the
/// number of bytes.
pub(in crate::shell) fn receive<R: Read>(
    dir: &Path,
    incoming: &mut RecordReader<R>,
) -> Result<u64, Failure> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists && is_empty_dir(dir) => {}
        made => made.map_err(io_failure("make", dir))?,
    }
    let mut receiver = Receiver {
        dir,
        open_files: BTreeMap::new(),
        written_files: Vec::new(),
        files: 0,
        bytes: 0,
        restarts: 0,
    };
    loop {
        let record = incoming.next().map_err(receive_failure)?;
        match record.split_first() {
            Some((&RECORD_PIECE, rest)) => receiver.on_piece(rest)?,
            Some((&RECORD_MARK, rest)) => {
                let mark = from_bytes(rest).map_err(|e| Failure::Images(e.to_string()))?;
                if let Some(bytes) = receiver.on_mark(mark)? {
                    return Ok(bytes);
                }
            }
            _ => return Err(format_failure("something came that is no piece of a file")),
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
            .ok_or_else(|| format_failure("bytes came outside of a file"))?;
        for part in zeros::parts(content) {
            let part = part.map_err(|_| format_failure("a piece came that is not whole"))?;
            self.bytes += part.unpacked_len() as u64;
            if self.bytes > IMAGE_BYTES_MAX {
                return Err(Failure::Images(format!(
                    "more than {IMAGE_BYTES_MAX} bytes came, the limit"
                )));
            }
            target_file
                .write_part(part)
                .map_err(io_failure("write", &target_file.path))?;
        }
        Ok(())
    }

    /// Handles a mark. Returns the number of bytes if it was the end mark.
    fn on_mark(&mut self, mark: TransferMark) -> Result<Option<u64>, Failure> {
        match mark {
            TransferMark::File { number, name } => {
                if number != self.files
                    || number >= IMAGE_FILES_MAX
                    || self.open_files.len() >= OPEN_FILES_MAX
                {
                    let open = self.open_files.len();
                    return Err(Failure::Images(format!(
                        "file {number} is not the next, or over the limit ({open} open)"
                    )));
                }
                let open = create(self.dir, &name)?;
                self.files += 1;
                self.written_files.push(open.path.clone());
                self.open_files.insert(number, open);
            }
            TransferMark::FileEnd { number, bytes } => {
                let done = self
                    .open_files
                    .remove(&number)
                    .ok_or_else(|| format_failure("a file ended that did not begin"))?;
                if done.bytes != bytes {
                    let (path, came) = (done.path.display(), done.bytes);
                    return Err(Failure::Images(format!(
                        "{came} bytes of {path} came, {bytes} were sent"
                    )));
                }
                // The file may end with a hole.
                done.file
                    .set_len(bytes)
                    .map_err(io_failure("write", &done.path))?;
            }
            TransferMark::Restart => {
                self.restarts += 1;
                if self.restarts > RESTARTS_MAX {
                    return Err(Failure::Images(format!(
                        "begun anew more than {RESTARTS_MAX} times, the limit"
                    )));
                }
                self.open_files.clear();
                for path in self.written_files.drain(..) {
                    std::fs::remove_file(&path).map_err(io_failure("remove", &path))?;
                }
                (self.files, self.bytes) = (0, 0);
            }
            TransferMark::End { files, bytes } => {
                let (own_files, own_bytes) = (self.files, self.bytes);
                if !self.open_files.is_empty() || (own_files, own_bytes) != (files, bytes) {
                    let text = format!(
                        "{own_files} files of {own_bytes} bytes came, {files} of {bytes} were sent"
                    );
                    return Err(Failure::Images(text));
                }
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }
}

fn is_empty_dir(dir: &Path) -> bool {
    let real = std::fs::symlink_metadata(dir).is_ok_and(|m| m.is_dir());
    real && std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// Creates a new file; the name must not contain a path.
fn create(dir: &Path, name: &str) -> Result<OpenFile, Failure> {
    let is_plain = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.contains(['/', '\0'])
        && name != "."
        && name != "..";
    if !is_plain {
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
        bytes: 0,
    })
}
