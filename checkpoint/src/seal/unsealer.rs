//! Reads images from a sealed stream.

use super::context::{CONTEXT_BYTES_MAX, SealContext};
use super::error::SealError;
use super::site_keys::{KeyId, SiteKeys};
use super::{MAGIC, NAME_BYTES_MAX, SealedSize, Tag, is_image_name, open_image_dir};
use crate::sealed_stream::{StreamDecryptor, StreamHead, read_exactly};
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Limits of the images that are unsealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsealLimits {
    /// Maximum number of files.
    pub files_max: usize,
    /// Maximum total length of the files in bytes. Zeros count, although they use no space.
    pub image_bytes_max: u64,
}

impl Default for UnsealLimits {
    /// Returns the limits of the images of a task in a checkpoint.
    fn default() -> Self {
        Self {
            files_max: crate::store::IMAGE_FILES_MAX,
            image_bytes_max: crate::store::IMAGES_BYTES_MAX,
        }
    }
}

/// Writes the images of a sealed stream to the empty directory `empty_dir`. The input must end
/// where the stream ends.
///
/// # Errors
/// The directory is empty again, or is not empty and unchanged:
/// - Other users have access to the directory, or it is not empty.
/// - The stream was sealed with another key or in another context, or was changed.
/// - The stream exceeds the limits.
/// - The input cannot be read, or a file cannot be written.
pub fn unseal_images(
    mut input: impl Read,
    empty_dir: &Path,
    keys: &SiteKeys,
    context: &SealContext,
    limits: &UnsealLimits,
) -> Result<SealedSize, SealError> {
    let mut unsealed_files = UnsealedFiles::new(empty_dir)?;
    let expected_context = context.encode()?;
    let mut input = CountedInput {
        input: &mut input,
        read_bytes: 0,
    };
    let head = StreamHead::read(&mut input, MAGIC)?;
    let found_id = KeyId::from_bytes(head.key_id());
    let key = keys.find(found_id).ok_or_else(|| SealError::OtherKey {
        found: found_id,
        current: keys.current_id(),
    })?;
    let found_context = read_context(&mut input)?;
    context.check_equal(&expected_context, &found_context)?;
    let mut stream = StreamDecryptor::new(key, &head, &expected_context, input)?;
    let size = read_records(&mut stream, &mut unsealed_files, limits)?;
    let input = stream.finish()?;
    unsealed_files.retain();
    Ok(SealedSize {
        sealed_bytes: input.read_bytes,
        ..size
    })
}

fn read_context(input: &mut impl Read) -> Result<Vec<u8>, SealError> {
    let mut length = [0; 2];
    read_exactly(input, &mut length)?;
    let length = usize::from(u16::from_be_bytes(length));
    if length > CONTEXT_BYTES_MAX {
        return Err(SealError::Changed(format!(
            "its context has {length} bytes"
        )));
    }
    let mut context = vec![0; length];
    read_exactly(input, &mut context)?;
    Ok(context)
}

fn read_records<R: Read>(
    stream: &mut StreamDecryptor<R>,
    unsealed_files: &mut UnsealedFiles,
    limits: &UnsealLimits,
) -> Result<SealedSize, SealError> {
    let mut size = SealedSize::default();
    loop {
        match read_tag(stream)? {
            Tag::File => {
                if size.files == limits.files_max {
                    return Err(SealError::LimitExceeded {
                        limit: limits.files_max as u64,
                        unit: "files",
                    });
                }
                let remaining_bytes = limits.image_bytes_max - size.image_bytes;
                let file_bytes = read_file(stream, unsealed_files, remaining_bytes)?;
                size.image_bytes += file_bytes.ok_or(SealError::LimitExceeded {
                    limit: limits.image_bytes_max,
                    unit: "bytes",
                })?;
                size.files += 1;
            }
            Tag::End => {
                let file_count = u32::from_le_bytes(stream.read_array()?) as usize;
                let image_bytes = u64::from_le_bytes(stream.read_array()?);
                if (file_count, image_bytes) != (size.files, size.image_bytes) {
                    return Err(SealError::Changed("its counts are wrong".into()));
                }
                return Ok(size);
            }
            tag => return Err(unexpected_tag(tag)),
        }
    }
}

fn read_tag<R: Read>(stream: &mut StreamDecryptor<R>) -> Result<Tag, SealError> {
    let [byte] = stream.read_array()?;
    Tag::from_byte(byte).ok_or_else(|| SealError::Changed(format!("it has a record {byte}")))
}

fn unexpected_tag(tag: Tag) -> SealError {
    SealError::Changed(format!("it has a record {tag:?} at a wrong position"))
}

/// Writes one file of the stream. Returns its length in bytes; `None` if the file is longer than
/// `bytes_max`.
fn read_file<R: Read>(
    stream: &mut StreamDecryptor<R>,
    unsealed_files: &mut UnsealedFiles,
    bytes_max: u64,
) -> Result<Option<u64>, SealError> {
    let name = read_name(stream)?;
    let write_error = |cause| SealError::WriteImage {
        name: name.clone(),
        cause,
    };
    let mut file = unsealed_files.create(&name).map_err(write_error)?;
    let mut file_bytes = 0;
    loop {
        let tag = read_tag(stream)?;
        let run_bytes = match tag {
            Tag::Data => u64::from(u32::from_le_bytes(stream.read_array()?)),
            Tag::Zeros => u64::from_le_bytes(stream.read_array()?),
            Tag::FileEnd => {
                if u64::from_le_bytes(stream.read_array()?) != file_bytes {
                    return Err(SealError::Changed("the length of a file is wrong".into()));
                }
                // Extend the file if its last run is a hole.
                file.set_len(file_bytes).map_err(write_error)?;
                return Ok(Some(file_bytes));
            }
            tag => return Err(unexpected_tag(tag)),
        };
        if run_bytes == 0 {
            return Err(SealError::Changed("it has an empty record".into()));
        }
        if run_bytes > bytes_max - file_bytes {
            return Ok(None);
        }
        file_bytes += run_bytes;
        if tag == Tag::Zeros {
            // The run becomes a hole in the file, which reads as zeros.
            file.seek(SeekFrom::Start(file_bytes))
                .map_err(write_error)?;
            continue;
        }
        let mut remaining_bytes = run_bytes as usize;
        while remaining_bytes > 0 {
            let bytes = stream.next_bytes(remaining_bytes)?;
            if bytes.is_empty() {
                return Err(SealError::Changed("it ends within a file".into()));
            }
            file.write_all(bytes).map_err(write_error)?;
            remaining_bytes -= bytes.len();
        }
    }
}

fn read_name<R: Read>(stream: &mut StreamDecryptor<R>) -> Result<String, SealError> {
    let [length] = stream.read_array()?;
    let mut name = vec![0; usize::from(length).min(NAME_BYTES_MAX + 1)];
    stream.fill(&mut name)?;
    String::from_utf8(name)
        .ok()
        .filter(|name| is_image_name(name))
        .ok_or_else(|| SealError::Changed("a file in it does not have the name of an image".into()))
}

/// The files that were written. Dropping the value removes them.
struct UnsealedFiles {
    dir: OwnedFd,
    names: Vec<String>,
}

impl UnsealedFiles {
    fn new(empty_dir: &Path) -> Result<Self, SealError> {
        let dir = open_image_dir(empty_dir)?;
        let is_empty = empty_dir
            .read_dir()
            .map_err(|e| SealError::UnsafeDirectory {
                path: empty_dir.to_path_buf(),
                why: format!("it cannot be read: {e}"),
            })?
            .next()
            .is_none();
        match is_empty {
            true => Ok(Self {
                dir,
                names: Vec::new(),
            }),
            false => Err(SealError::DirectoryNotEmpty {
                path: empty_dir.to_path_buf(),
            }),
        }
    }

    /// Creates a file that did not exist.
    fn create(&mut self, name: &str) -> io::Result<File> {
        let flags =
            OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(&self.dir, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
        self.names.push(name.to_string());
        Ok(File::from(file))
    }

    fn retain(mut self) {
        self.names.clear();
    }
}

impl Drop for UnsealedFiles {
    fn drop(&mut self) {
        for name in &self.names {
            // The file exists, and nobody else has access to the directory.
            let _ = unlinkat(&self.dir, &**name, UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// Counts the bytes of the sealed stream.
struct CountedInput<R> {
    input: R,
    read_bytes: u64,
}

impl<R: Read> Read for CountedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.input.read(buffer)?;
        self.read_bytes += bytes as u64;
        Ok(bytes)
    }
}
