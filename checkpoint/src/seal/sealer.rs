//! Writes images to a sealed stream.

use super::context::SealContext;
use super::error::SealError;
use super::site_keys::SiteKeys;
use super::{SealedSize, Tag, is_image_name, open_image_dir};
use crate::sealed_stream::{StreamEncryptor, StreamHead};
use crate::zero_runs::split_zero_runs;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Number of bytes that are read from an image at a time.
const READ_BYTES: usize = 256 << 10;

/// Seals images one after the other, while the dump still writes further ones. The stream is valid
/// only after [`ImageSealer::finish`].
pub struct ImageSealer<W> {
    /// `None` after a failure: then the stream contains an incomplete file.
    stream: Option<StreamEncryptor<CountedOutput<W>>>,
    piece: Vec<u8>,
    size: SealedSize,
}

impl<W: Write> ImageSealer<W> {
    /// Starts a stream with the current key.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn new(output: W, keys: &SiteKeys, context: &SealContext) -> Result<Self, SealError> {
        let context = context.encode()?;
        let mut output = CountedOutput {
            output,
            written_bytes: 0,
        };
        let mut start_stream = || {
            let head = StreamHead::generate(keys.current())?;
            output.write_all(head.as_bytes())?;
            output.write_all(&(context.len() as u16).to_be_bytes())?;
            output.write_all(&context)?;
            Ok(head)
        };
        let head = start_stream().map_err(SealError::WriteStream)?;
        let stream = StreamEncryptor::new(keys.current(), head, &context, output)
            .map_err(SealError::WriteStream)?;
        Ok(Self {
            stream: Some(stream),
            piece: vec![0; READ_BYTES],
            size: SealedSize::default(),
        })
    }

    /// Seals one image, reading it to its end. Returns its length in bytes. After an error the
    /// stream cannot be finished.
    ///
    /// # Errors
    /// The name is not acceptable, the image cannot be read, or the output cannot be written.
    pub fn add_file(&mut self, name: &str, image: impl Read) -> Result<u64, SealError> {
        let mut stream = self.stream.take().ok_or(SealError::Incomplete)?;
        if !is_image_name(name) {
            return Err(SealError::UnsuitableImage {
                name: name.into(),
                why: "its name is not the name of an image".into(),
            });
        }
        let bytes = write_file(&mut stream, &mut self.piece, name, image)?;
        self.stream = Some(stream);
        self.size.files += 1;
        self.size.image_bytes += bytes;
        Ok(bytes)
    }

    /// Writes the end of the stream. The output is not flushed.
    ///
    /// # Errors
    /// The output cannot be written, or an image could not be sealed.
    pub fn finish(self) -> Result<SealedSize, SealError> {
        let mut stream = self.stream.ok_or(SealError::Incomplete)?;
        let file_count = self.size.files as u32;
        let end_record = [
            &[Tag::End as u8][..],
            &file_count.to_le_bytes(),
            &self.size.image_bytes.to_le_bytes(),
        ];
        let output = stream
            .append(&end_record.concat())
            .and_then(|()| stream.finish())
            .map_err(SealError::WriteStream)?;
        Ok(SealedSize {
            sealed_bytes: output.written_bytes,
            ..self.size
        })
    }
}

fn write_file<W: Write>(
    stream: &mut StreamEncryptor<W>,
    piece: &mut [u8],
    name: &str,
    mut image: impl Read,
) -> Result<u64, SealError> {
    let mut append = |head: &[u8], content: &[u8]| {
        stream
            .append(head)
            .and_then(|()| stream.append(content))
            .map_err(SealError::WriteStream)
    };
    append(&[Tag::File as u8, name.len() as u8], name.as_bytes())?;
    let mut file_bytes = 0;
    loop {
        let piece_bytes = fill_from(&mut image, piece).map_err(|e| SealError::UnsuitableImage {
            name: name.into(),
            why: format!("it cannot be read: {e}"),
        })?;
        for (is_zero_run, run) in split_zero_runs(&piece[..piece_bytes]) {
            if is_zero_run {
                append(&[Tag::Zeros as u8], &(run.len() as u64).to_le_bytes())?;
            } else {
                append(&[Tag::Data as u8], &(run.len() as u32).to_le_bytes())?;
                append(run, &[])?;
            }
        }
        file_bytes += piece_bytes as u64;
        if piece_bytes < piece.len() {
            append(&[Tag::FileEnd as u8], &file_bytes.to_le_bytes())?;
            return Ok(file_bytes);
        }
    }
}

/// Reads until the buffer is full or the input ends. Returns the number of bytes read.
fn fill_from(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled_bytes = 0;
    while filled_bytes < buffer.len() {
        match input.read(&mut buffer[filled_bytes..]) {
            Ok(0) => break,
            Ok(bytes) => filled_bytes += bytes,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled_bytes)
}

/// Counts the bytes of the sealed stream.
struct CountedOutput<W> {
    output: W,
    written_bytes: u64,
}

impl<W: Write> Write for CountedOutput<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written_bytes = self.output.write(bytes)?;
        self.written_bytes += written_bytes as u64;
        Ok(written_bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// Seals all files of the image directory `dir`, which must contain regular files only.
///
/// # Errors
/// Other users have access to the directory, a file is not suitable or changes its length, or the
/// output cannot be written. The stream is then not valid.
pub fn seal_images(
    dir: &Path,
    output: impl Write,
    keys: &SiteKeys,
    context: &SealContext,
) -> Result<SealedSize, SealError> {
    let dir_fd = open_image_dir(dir)?;
    let mut names = Vec::new();
    let unreadable_dir = |e: io::Error| SealError::UnsafeDirectory {
        path: dir.to_path_buf(),
        why: format!("it cannot be read: {e}"),
    };
    for entry in dir.read_dir().map_err(unreadable_dir)? {
        let name = entry.map_err(unreadable_dir)?.file_name();
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort_unstable();
    let mut sealer = ImageSealer::new(output, keys, context)?;
    for name in names {
        let (file, expected_bytes) =
            open_image(&dir_fd, &name).map_err(|why| SealError::UnsuitableImage {
                name: name.clone(),
                why,
            })?;
        let sealed_bytes = sealer.add_file(&name, file)?;
        if sealed_bytes != expected_bytes {
            return Err(SealError::UnsuitableImage {
                name,
                why: "its length changed while it was sealed".into(),
            });
        }
    }
    sealer.finish()
}

/// Opens a regular file in an image directory. Returns the file and its length in bytes.
fn open_image(dir_fd: &OwnedFd, name: &str) -> Result<(File, u64), String> {
    // The open must not block if the file is a pipe.
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let file = openat(dir_fd, name, flags, Mode::empty())
        .map_err(|e| format!("it cannot be opened: {e}"))?;
    let metadata = fstat(&file).map_err(|e| e.to_string())?;
    match metadata.st_mode & libc::S_IFMT {
        libc::S_IFREG => Ok((File::from(file), metadata.st_size.cast_unsigned())),
        _ => Err("it is not a regular file".into()),
    }
}
