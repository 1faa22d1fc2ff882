//! Converts the images of a task to one stream of bytes, and unpacks such a stream. The stream is
//! encrypted by [`super::encryption`].
//!
//! The stream contains the name, length and content of each file, and at the end the number of
//! files and bytes. For a run of zero blocks only the length of the run is stored.

use super::encryption::{DecryptError, Decryptor};
use super::error::{StoreError, StoreOperation, write_error};
use crate::zero_runs::split_zero_runs;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum number of files of one task.
pub const IMAGE_FILES_MAX: usize = 65_536;
/// Maximum size in bytes of the images of one task.
pub const IMAGES_BYTES_MAX: u64 = 1 << 42;
/// Maximum length in bytes of a file name (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Maximum number of bytes that are read from a file at a time.
const READ_BYTES_MAX: usize = 1 << 20;

/// Tag of the record at the end of the stream.
const TAG_END: u8 = 0;
/// Tag of a record that starts a file.
const TAG_FILE: u8 = 1;
/// Tag of a record with content of the file.
const TAG_DATA: u8 = 2;
/// Tag of a record that replaces a run of zeros in the file.
const TAG_ZEROS: u8 = 3;

/// The files of an image directory, listed before any file is read.
#[derive(Debug)]
pub(super) struct ImageFiles {
    dir: PathBuf,
    /// Name and size in bytes of each file.
    files: Vec<(OsString, u64)>,
    /// Total size in bytes of all files.
    pub(super) bytes: u64,
}

fn unusable_images(path: &Path, reason: impl Into<String>) -> StoreError {
    StoreError::UnusableImages {
        path: path.to_path_buf(),
        why: reason.into(),
    }
}

fn unreadable_image(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |e| unusable_images(path, format!("it cannot be read: {e}"))
}

/// Returns the length in bytes of a regular file; fails for other kinds of files.
fn regular_file_length(path: &Path, meta: &Metadata) -> Result<u64, StoreError> {
    match meta.file_type() {
        kind if kind.is_file() => Ok(meta.len()),
        kind if kind.is_symlink() => Err(unusable_images(
            path,
            "it is a symbolic link, and images are regular files",
        )),
        kind if kind.is_dir() => Err(unusable_images(
            path,
            "it is a directory, and images are plain files",
        )),
        _ => Err(unusable_images(
            path,
            "it is a device, pipe or socket, and images are plain files",
        )),
    }
}

impl ImageFiles {
    /// Lists a directory, which must contain regular files only.
    pub(super) fn list_dir(dir: &Path) -> Result<Self, StoreError> {
        if !dir
            .symlink_metadata()
            .map_err(unreadable_image(dir))?
            .is_dir()
        {
            return Err(unusable_images(dir, "it is not a directory"));
        }
        let mut image_files = Self {
            dir: dir.to_path_buf(),
            files: Vec::new(),
            bytes: 0,
        };
        for entry in dir.read_dir().map_err(unreadable_image(dir))? {
            let entry = entry.map_err(unreadable_image(dir))?;
            let path = entry.path();
            let bytes =
                regular_file_length(&path, &entry.metadata().map_err(unreadable_image(&path))?)?;
            image_files.files.push((entry.file_name(), bytes));
            image_files.bytes = image_files.bytes.saturating_add(bytes);
            if image_files.files.len() > IMAGE_FILES_MAX || image_files.bytes > IMAGES_BYTES_MAX {
                return Err(unusable_images(
                    dir,
                    format!(
                        "it contains more than {IMAGE_FILES_MAX} files or {IMAGES_BYTES_MAX} bytes"
                    ),
                ));
            }
        }
        image_files.files.sort();
        Ok(image_files)
    }

    /// Writes all files to the stream by calling `write`. `part_path` is the path of the part file,
    /// for error messages.
    pub(super) fn write_stream(
        &self,
        part_path: &Path,
        mut write: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let mut remaining_bytes = self.bytes;
        for (name, bytes) in &self.files {
            let path = self.dir.join(name);
            let mut write_record = |record: &[u8], data: &[u8], remaining_bytes: u64| {
                write(record).and_then(|()| write(data)).map_err(|e| {
                    write_error(StoreOperation::Add, part_path, e, Some(remaining_bytes))
                })
            };
            let length = name.len() as u16;
            let file_record = [
                &[TAG_FILE][..],
                &length.to_le_bytes(),
                name.as_bytes(),
                &bytes.to_le_bytes(),
            ]
            .concat();
            write_record(&file_record, &[], remaining_bytes)?;
            let mut file = open_image(&path, *bytes)?;
            let mut piece = vec![0; READ_BYTES_MAX.min(*bytes as usize)];
            let mut remaining_file_bytes = *bytes;
            while remaining_file_bytes > 0 {
                let piece = &mut piece[..READ_BYTES_MAX.min(remaining_file_bytes as usize)];
                file.read_exact(piece).map_err(unreadable_image(&path))?;
                for (is_zero_run, run) in split_zero_runs(piece) {
                    match is_zero_run {
                        true => write_record(
                            &[&[TAG_ZEROS][..], &(run.len() as u64).to_le_bytes()].concat(),
                            &[],
                            remaining_bytes,
                        )?,
                        false => write_record(
                            &[&[TAG_DATA][..], &(run.len() as u32).to_le_bytes()].concat(),
                            run,
                            remaining_bytes,
                        )?,
                    }
                    remaining_bytes -= run.len() as u64;
                    remaining_file_bytes -= run.len() as u64;
                }
            }
            if file.read(&mut [0]).map_err(unreadable_image(&path))? > 0 {
                return Err(unusable_images(&path, "it grew while it was read"));
            }
        }
        let end_record = [
            &[TAG_END][..],
            &(self.files.len() as u32).to_le_bytes(),
            &self.bytes.to_le_bytes(),
        ]
        .concat();
        write(&end_record).map_err(|e| write_error(StoreOperation::Add, part_path, e, Some(0)))
    }
}

/// Opens an image file whose length was `bytes` when it was listed.
fn open_image(path: &Path, bytes: u64) -> Result<File, StoreError> {
    // The file may have been replaced: symbolic links are not followed, and the open never blocks.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(unreadable_image(path))?;
    if regular_file_length(path, &file.metadata().map_err(unreadable_image(path))?)? != bytes {
        return Err(unusable_images(
            path,
            "its length changed while the images were read",
        ));
    }
    Ok(file)
}

/// The reason why a stream was not unpacked.
#[derive(Debug)]
pub(super) enum UnpackError {
    /// The stream is damaged.
    DamagedStream(DecryptError),
    /// A file could not be written. The fields are the file's path, the error, and the number of
    /// bytes that were written to all files before the error.
    WriteFailed(PathBuf, io::Error, u64),
}

impl From<DecryptError> for UnpackError {
    fn from(error: DecryptError) -> Self {
        Self::DamagedStream(error)
    }
}

fn damaged_stream(reason: impl Into<String>) -> UnpackError {
    UnpackError::DamagedStream(DecryptError::Changed(reason.into()))
}

/// Writes the files of a stream into the empty directory `unpack_dir`. Returns their total size in
/// bytes. On an error the caller must remove the directory.
pub(super) fn unpack<R: Read>(
    stream: &mut Decryptor<R>,
    unpack_dir: &Path,
) -> Result<u64, UnpackError> {
    let (mut file_count, mut total_bytes) = (0usize, 0u64);
    loop {
        match read_bytes::<_, 1>(stream)?[0] {
            TAG_FILE => {
                total_bytes =
                    total_bytes.saturating_add(unpack_file(stream, unpack_dir, total_bytes)?);
                file_count += 1;
                if file_count > IMAGE_FILES_MAX || total_bytes > IMAGES_BYTES_MAX {
                    return Err(damaged_stream(
                        "it has more files or bytes than are possible",
                    ));
                }
            }
            TAG_END => {
                let counts = (
                    u32::from_le_bytes(read_bytes(stream)?) as usize,
                    u64::from_le_bytes(read_bytes(stream)?),
                );
                if counts != (file_count, total_bytes) {
                    return Err(damaged_stream(format!(
                        "it contains {file_count} files of {total_bytes} bytes, and its counts are {counts:?}"
                    )));
                }
                return Ok(total_bytes);
            }
            other => {
                return Err(damaged_stream(format!(
                    "a file or the end was expected, and {other} was found"
                )));
            }
        }
    }
}

fn read_bytes<R: Read, const N: usize>(stream: &mut Decryptor<R>) -> Result<[u8; N], DecryptError> {
    let mut bytes = [0; N];
    stream.fill(&mut bytes)?;
    Ok(bytes)
}

/// Unpacks one file of the stream and returns its size in bytes. `previous_bytes` is the total size
/// of the previous files.
fn unpack_file<R: Read>(
    stream: &mut Decryptor<R>,
    unpack_dir: &Path,
    previous_bytes: u64,
) -> Result<u64, UnpackError> {
    let name_bytes = usize::from(u16::from_le_bytes(read_bytes(stream)?));
    if name_bytes > NAME_BYTES_MAX {
        return Err(damaged_stream(format!(
            "a file name of {name_bytes} bytes is in it"
        )));
    }
    let mut name = vec![0; name_bytes];
    stream.fill(&mut name)?;
    let bytes = u64::from_le_bytes(read_bytes(stream)?);
    let path = checked_file_name(&name).map(|name| unpack_dir.join(name));
    let path = path.ok_or_else(|| {
        damaged_stream(format!(
            "{:?} is not a plain file name",
            OsStr::from_bytes(&name)
        ))
    })?;
    if bytes > IMAGES_BYTES_MAX {
        return Err(damaged_stream(format!("a file of {bytes} bytes is in it")));
    }
    let mut remaining_bytes = bytes;
    let write_failure = |e: io::Error, remaining_bytes: u64| {
        UnpackError::WriteFailed(path.clone(), e, previous_bytes + bytes - remaining_bytes)
    };
    let mut file = create_file(&path).map_err(|e| write_failure(e, remaining_bytes))?;
    while remaining_bytes > 0 {
        let tag = read_bytes::<_, 1>(stream)?[0];
        let run_bytes = match tag {
            TAG_DATA => u64::from(u32::from_le_bytes(read_bytes(stream)?)),
            TAG_ZEROS => u64::from_le_bytes(read_bytes(stream)?),
            other => {
                return Err(damaged_stream(format!(
                    "{remaining_bytes} bytes of a file were expected, but the record is {other}"
                )));
            }
        };
        if run_bytes == 0 || run_bytes > remaining_bytes {
            return Err(damaged_stream(
                "the lengths of a file's chunks do not add up to its size",
            ));
        }
        if tag == TAG_ZEROS {
            // The run becomes a hole in the file, which reads as zeros. A run is never longer than
            // its file, so the position cannot overflow.
            file.seek(SeekFrom::Current(run_bytes as i64))
                .map_err(|e| write_failure(e, remaining_bytes))?;
        } else {
            let mut unread_bytes = run_bytes as usize;
            while unread_bytes > 0 {
                let data = stream.next_bytes(unread_bytes)?;
                if data.is_empty() {
                    return Err(damaged_stream("its content ends in the middle"));
                }
                unread_bytes -= data.len();
                file.write_all(data)
                    .map_err(|e| write_failure(e, remaining_bytes))?;
            }
        }
        remaining_bytes -= run_bytes;
    }
    // Extend the file if its last run is a hole.
    file.set_len(bytes).map_err(|e| write_failure(e, 0))?;
    Ok(bytes)
}

fn create_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Returns the file name; `None` if the name is empty or denotes a path.
fn checked_file_name(name: &[u8]) -> Option<OsString> {
    let is_plain = !name.is_empty()
        && !name.contains(&b'/')
        && !name.contains(&0)
        && name != b"."
        && name != b"..";
    is_plain.then(|| OsString::from_vec(name.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::super::encryption::{Encryptor, FileRole, KEY_BYTES, StoreKey};
    use super::super::id::CheckpointId;
    use super::*;
    use sempa_proto::{Micros, Tid};

    const JOB: Tid = Tid::from_raw(0x40001);

    /// Encrypts a stream with the correct key and unpacks it.
    fn encrypt_and_unpack(stream: &[u8], unpack_dir: &Path) -> Result<u64, UnpackError> {
        let store_key = StoreKey::new([1; KEY_BYTES], Path::new("key")).expect("a key");
        let role = FileRole::Part(
            CheckpointId::next_id(std::iter::empty(), JOB, Micros(0)),
            JOB,
        );
        let mut encrypted_bytes = Vec::new();
        let write = |bytes: &[u8]| {
            encrypted_bytes.extend_from_slice(bytes);
            Ok(())
        };
        let mut encryptor = Encryptor::new(&store_key, role, write).expect("sealed");
        encryptor.append(stream).expect("sealed");
        encryptor.finish().expect("sealed");
        let mut decryptor = Decryptor::new(
            &store_key,
            role,
            &encrypted_bytes[..],
            encrypted_bytes.len() as u64,
        )?;
        let bytes = unpack(&mut decryptor, unpack_dir)?;
        decryptor.finish()?;
        Ok(bytes)
    }

    fn file_record(name: &[u8], bytes: u64, content: &[u8]) -> Vec<u8> {
        let length = name.len() as u16;
        [
            &[TAG_FILE][..],
            &length.to_le_bytes(),
            name,
            &bytes.to_le_bytes(),
            content,
        ]
        .concat()
    }

    fn data_record(bytes: &[u8]) -> Vec<u8> {
        [&[TAG_DATA][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
    }

    fn zeros_record(bytes: u64) -> Vec<u8> {
        [&[TAG_ZEROS][..], &bytes.to_le_bytes()].concat()
    }

    fn end_record(files: u32, bytes: u64) -> Vec<u8> {
        [&[TAG_END][..], &files.to_le_bytes(), &bytes.to_le_bytes()].concat()
    }

    /// A stream that is encrypted correctly but malformed is refused.
    #[test]
    fn malformed_streams_are_refused() {
        let long_name = vec![b'n'; NAME_BYTES_MAX + 1];
        let streams = [
            vec![],
            vec![9],
            end_record(1, 0),
            end_record(0, 1),
            file_record(b"a", 0, &[]),
            [file_record(b"a", 2, &data_record(b"x")), end_record(1, 2)].concat(),
            [file_record(b"a", 1, &data_record(b"xy")), end_record(1, 1)].concat(),
            [file_record(b"a", 1, &zeros_record(2)), end_record(1, 1)].concat(),
            [file_record(b"a", 1, &zeros_record(0)), end_record(1, 1)].concat(),
            [file_record(b"a", 5, &data_record(b"x")[..5])].concat(),
            [
                file_record(b"a", u64::MAX, &zeros_record(u64::MAX)),
                end_record(1, u64::MAX),
            ]
            .concat(),
            [file_record(b"a", 0, &[]), end_record(1, 0), vec![0]].concat(),
            [
                file_record(b"a", 1, &file_record(b"b", 0, &[])),
                end_record(2, 1),
            ]
            .concat(),
        ];
        for stream in streams {
            let dir = tempfile::tempdir().expect("a directory");
            let result = encrypt_and_unpack(&stream, dir.path());
            assert!(
                matches!(
                    result,
                    Err(UnpackError::DamagedStream(DecryptError::Changed(_)))
                ),
                "{stream:?}: {result:?}"
            );
        }
        for name in [
            &b""[..],
            b".",
            b"..",
            b"../a",
            b"/a",
            b"a/b",
            b"a\0",
            &long_name,
        ] {
            let dir = tempfile::tempdir().expect("a directory");
            let result = encrypt_and_unpack(
                &[file_record(name, 0, &[]), end_record(1, 0)].concat(),
                dir.path(),
            );
            assert!(
                matches!(
                    result,
                    Err(UnpackError::DamagedStream(DecryptError::Changed(_)))
                ),
                "{name:?}: {result:?}"
            );
            assert_eq!(
                dir.path().read_dir().expect("readable").count(),
                0,
                "{name:?}"
            );
        }
    }

    #[test]
    fn duplicate_names_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let stream = [
            file_record(b"a", 1, &data_record(b"x")),
            file_record(b"a", 1, &data_record(b"y")),
            end_record(2, 2),
        ]
        .concat();
        assert!(
            matches!(encrypt_and_unpack(&stream, dir.path()), Err(UnpackError::WriteFailed(_, e, 1)) if e.raw_os_error() == Some(libc::EEXIST))
        );
    }
}
