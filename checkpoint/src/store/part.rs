//! Converts the images of a task to one stream of bytes, which is then encrypted.
//!
//! The stream contains for each file its name, length and content, and at the end the counts. Runs
//! of zero blocks are only counted.

use super::error::{Act, StoreError, failed};
use super::seal::{Broken, Opener};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Largest number of files of one task.
pub const FILES_MAX: usize = 65_536;
/// Largest size of the images of one task.
pub const IMAGES_BYTES_MAX: u64 = 1 << 42;
/// Largest length of a file name (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;
/// Bytes that are read at a time.
const PIECE_BYTES: usize = 1 << 20;
/// Zeros are detected in blocks of one memory page.
const BLOCK_BYTES: usize = 4096;
const BLOCK_OF_ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// Tags of the records in the stream.
const END: u8 = 0;
const FILE: u8 = 1;
const DATA: u8 = 2;
const ZEROS: u8 = 3;

/// The files of a directory, listed before any is read.
#[derive(Debug)]
pub(super) struct Images {
    dir: PathBuf,
    files: Vec<(OsString, u64)>,
    /// Bytes of all files.
    pub(super) bytes: u64,
}

fn refused(path: &Path, why: impl Into<String>) -> StoreError {
    StoreError::Images {
        path: path.to_path_buf(),
        why: why.into(),
    }
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    move |e| refused(path, format!("it cannot be read: {e}"))
}

/// Returns the length of a regular file; refuses other kinds.
fn plain(path: &Path, meta: &Metadata) -> Result<u64, StoreError> {
    match meta.file_type() {
        kind if kind.is_file() => Ok(meta.len()),
        kind if kind.is_symlink() => Err(refused(
            path,
            "it is a symbolic link, and images are plain files",
        )),
        kind if kind.is_dir() => Err(refused(
            path,
            "it is a directory, and images are plain files",
        )),
        _ => Err(refused(
            path,
            "it is a device, pipe or socket, and images are plain files",
        )),
    }
}

impl Images {
    /// Lists a directory, which must contain regular files only.
    pub(super) fn of(dir: &Path) -> Result<Images, StoreError> {
        if !dir.symlink_metadata().map_err(unreadable(dir))?.is_dir() {
            return Err(refused(dir, "it is no directory"));
        }
        let mut images = Images {
            dir: dir.to_path_buf(),
            files: Vec::new(),
            bytes: 0,
        };
        for entry in dir.read_dir().map_err(unreadable(dir))? {
            let entry = entry.map_err(unreadable(dir))?;
            let path = entry.path();
            let bytes = plain(&path, &entry.metadata().map_err(unreadable(&path))?)?;
            images.files.push((entry.file_name(), bytes));
            images.bytes = images.bytes.saturating_add(bytes);
            if images.files.len() > FILES_MAX || images.bytes > IMAGES_BYTES_MAX {
                return Err(refused(
                    dir,
                    format!(
                        "there are more than {FILES_MAX} files or {IMAGES_BYTES_MAX} bytes in it"
                    ),
                ));
            }
        }
        images.files.sort();
        Ok(images)
    }

    /// Writes all files to the stream. `target` is the destination, for errors.
    pub(super) fn pour(
        &self,
        target: &Path,
        mut put: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let mut left = self.bytes;
        for (name, bytes) in &self.files {
            let path = self.dir.join(name);
            let mut out = |record: &[u8], data: &[u8], left: u64| {
                put(record)
                    .and_then(|()| put(data))
                    .map_err(|e| failed(Act::Add, target, e, Some(left)))
            };
            let length = name.len() as u16;
            let head = [
                &[FILE][..],
                &length.to_le_bytes(),
                name.as_bytes(),
                &bytes.to_le_bytes(),
            ]
            .concat();
            out(&head, &[], left)?;
            let mut file = open_image(&path, *bytes)?;
            let mut piece = vec![0; PIECE_BYTES.min(*bytes as usize)];
            let mut file_left = *bytes;
            while file_left > 0 {
                let piece = &mut piece[..PIECE_BYTES.min(file_left as usize)];
                file.read_exact(piece).map_err(unreadable(&path))?;
                for (zeros, run) in runs(piece) {
                    match zeros {
                        true => out(
                            &[&[ZEROS][..], &(run.len() as u64).to_le_bytes()].concat(),
                            &[],
                            left,
                        )?,
                        false => out(
                            &[&[DATA][..], &(run.len() as u32).to_le_bytes()].concat(),
                            run,
                            left,
                        )?,
                    }
                    left -= run.len() as u64;
                    file_left -= run.len() as u64;
                }
            }
            if file.read(&mut [0]).map_err(unreadable(&path))? > 0 {
                return Err(refused(&path, "it grew while it was read"));
            }
        }
        let end = [
            &[END][..],
            &(self.files.len() as u32).to_le_bytes(),
            &self.bytes.to_le_bytes(),
        ]
        .concat();
        put(&end).map_err(|e| failed(Act::Add, target, e, Some(0)))
    }
}

/// Opens a file that had this length when it was listed.
fn open_image(path: &Path, bytes: u64) -> Result<File, StoreError> {
    // The file may have been replaced: symbolic links are not followed, and the open never blocks.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(unreadable(path))?;
    if plain(path, &file.metadata().map_err(unreadable(path))?)? != bytes {
        return Err(refused(
            path,
            "its length changed while the images were read",
        ));
    }
    Ok(file)
}

/// Splits a piece of a file into runs of blocks that are all zeros (true) or not.
fn runs(piece: &[u8]) -> impl Iterator<Item = (bool, &[u8])> {
    let zeros = |block: &[u8]| block == &BLOCK_OF_ZEROS[..block.len()];
    let mut rest = piece;
    std::iter::from_fn(move || {
        let first = zeros(rest.chunks(BLOCK_BYTES).next()?);
        let blocks = rest
            .chunks(BLOCK_BYTES)
            .take_while(|block| zeros(block) == first)
            .count();
        let (run, later) = rest.split_at((blocks * BLOCK_BYTES).min(rest.len()));
        rest = later;
        Some((first, run))
    })
}

/// The reason why a stream was not unpacked.
#[derive(Debug)]
pub(super) enum Stopped {
    /// The stream is damaged.
    Broken(Broken),
    /// A file could not be written. The last field is the number of bytes of all files that were
    /// written before.
    Write(PathBuf, io::Error, u64),
}

impl From<Broken> for Stopped {
    fn from(broken: Broken) -> Stopped {
        Stopped::Broken(broken)
    }
}

fn changed(why: impl Into<String>) -> Stopped {
    Stopped::Broken(Broken::Changed(why.into()))
}

/// Writes the files of a stream into an empty directory and returns their bytes. On an error the
/// caller removes the directory.
pub(super) fn unpack<R: Read>(stream: &mut Opener<R>, to: &Path) -> Result<u64, Stopped> {
    let (mut files, mut all) = (0usize, 0u64);
    loop {
        match number::<_, 1>(stream)?[0] {
            FILE => {
                all = all.saturating_add(unpack_file(stream, to, all)?);
                files += 1;
                if files > FILES_MAX || all > IMAGES_BYTES_MAX {
                    return Err(changed("it has more files or bytes than are possible"));
                }
            }
            END => {
                let counts = (
                    u32::from_le_bytes(number(stream)?) as usize,
                    u64::from_le_bytes(number(stream)?),
                );
                if counts != (files, all) {
                    return Err(changed(format!(
                        "{files} files of {all} bytes are in it, and it says {counts:?}"
                    )));
                }
                return Ok(all);
            }
            other => {
                return Err(changed(format!(
                    "a file or the end was expected, and {other} was found"
                )));
            }
        }
    }
}

fn number<R: Read, const N: usize>(stream: &mut Opener<R>) -> Result<[u8; N], Broken> {
    let mut bytes = [0; N];
    stream.fill(&mut bytes)?;
    Ok(bytes)
}

/// Writes one file and returns its bytes. `before` is the number of bytes of the previous files.
fn unpack_file<R: Read>(stream: &mut Opener<R>, to: &Path, before: u64) -> Result<u64, Stopped> {
    let length = usize::from(u16::from_le_bytes(number(stream)?));
    if length > NAME_BYTES_MAX {
        return Err(changed(format!("a file name of {length} bytes is in it")));
    }
    let mut name = vec![0; length];
    stream.fill(&mut name)?;
    let bytes = u64::from_le_bytes(number(stream)?);
    let path = plain_name(&name).map(|name| to.join(name));
    let path = path.ok_or_else(|| {
        changed(format!(
            "{:?} is no plain file name",
            OsStr::from_bytes(&name)
        ))
    })?;
    if bytes > IMAGES_BYTES_MAX {
        return Err(changed(format!("a file of {bytes} bytes is in it")));
    }
    let mut left = bytes;
    let stopped = |e: io::Error, left: u64| Stopped::Write(path.clone(), e, before + bytes - left);
    let mut file = new_file(&path).map_err(|e| stopped(e, left))?;
    while left > 0 {
        let kind = number::<_, 1>(stream)?[0];
        let run = match kind {
            DATA => u64::from(u32::from_le_bytes(number(stream)?)),
            ZEROS => u64::from_le_bytes(number(stream)?),
            other => {
                return Err(changed(format!(
                    "{left} bytes of a file were expected, and {other} was found"
                )));
            }
        };
        if run == 0 || run > left {
            return Err(changed("the pieces of a file are not as long as the file"));
        }
        if kind == ZEROS {
            // A hole, which reads as zeros. A run is never longer than its file, so the position
            // cannot overflow.
            file.seek(SeekFrom::Current(run as i64))
                .map_err(|e| stopped(e, left))?;
        } else {
            let mut rest = run as usize;
            while rest > 0 {
                let data = stream.next(rest)?;
                if data.is_empty() {
                    return Err(changed("its content ends in the middle"));
                }
                rest -= data.len();
                file.write_all(data).map_err(|e| stopped(e, left))?;
            }
        }
        left -= run;
    }
    // The last run may have been a hole.
    file.set_len(bytes).map_err(|e| stopped(e, 0))?;
    Ok(bytes)
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Returns the name unless it contains a path.
fn plain_name(name: &[u8]) -> Option<OsString> {
    let plain = !name.is_empty()
        && !name.contains(&b'/')
        && !name.contains(&0)
        && name != b"."
        && name != b"..";
    plain.then(|| OsString::from_vec(name.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::super::id::SetId;
    use super::super::seal::{KEY_BYTES, Sealer, Secret, What};
    use super::*;
    use sempa_proto::{Micros, Tid};

    const JOB: Tid = Tid::from_raw(0x40001);

    /// Unpacks a stream after encrypting it with the right key.
    fn unpacked(stream: &[u8], to: &Path) -> Result<u64, Stopped> {
        let secret = Secret::new([1; KEY_BYTES], Path::new("key")).expect("a key");
        let what = What::Part(SetId::after(std::iter::empty(), JOB, Micros(0)), JOB);
        let mut sealed = Vec::new();
        let write = |bytes: &[u8]| {
            sealed.extend_from_slice(bytes);
            Ok(())
        };
        let mut sealer = Sealer::new(&secret, what, write).expect("sealed");
        sealer.put(stream).expect("sealed");
        sealer.end().expect("sealed");
        let mut opener = Opener::new(&secret, what, &sealed[..], sealed.len() as u64)?;
        let bytes = unpack(&mut opener, to)?;
        opener.end()?;
        Ok(bytes)
    }

    fn file(name: &[u8], bytes: u64, content: &[u8]) -> Vec<u8> {
        let length = name.len() as u16;
        [
            &[FILE][..],
            &length.to_le_bytes(),
            name,
            &bytes.to_le_bytes(),
            content,
        ]
        .concat()
    }

    fn data(bytes: &[u8]) -> Vec<u8> {
        [&[DATA][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
    }

    fn zeros(bytes: u64) -> Vec<u8> {
        [&[ZEROS][..], &bytes.to_le_bytes()].concat()
    }

    fn end(files: u32, bytes: u64) -> Vec<u8> {
        [&[END][..], &files.to_le_bytes(), &bytes.to_le_bytes()].concat()
    }

    /// A stream that is encrypted correctly but malformed is refused.
    #[test]
    fn malformed_streams_are_refused() {
        let long = vec![b'n'; NAME_BYTES_MAX + 1];
        let streams = [
            vec![],
            vec![9],
            end(1, 0),
            end(0, 1),
            file(b"a", 0, &[]),
            [file(b"a", 2, &data(b"x")), end(1, 2)].concat(),
            [file(b"a", 1, &data(b"xy")), end(1, 1)].concat(),
            [file(b"a", 1, &zeros(2)), end(1, 1)].concat(),
            [file(b"a", 1, &zeros(0)), end(1, 1)].concat(),
            [file(b"a", 5, &data(b"x")[..5])].concat(),
            [file(b"a", u64::MAX, &zeros(u64::MAX)), end(1, u64::MAX)].concat(),
            [file(b"a", 0, &[]), end(1, 0), vec![0]].concat(),
            [file(b"a", 1, &file(b"b", 0, &[])), end(2, 1)].concat(),
        ];
        for stream in streams {
            let dir = tempfile::tempdir().expect("a directory");
            let result = unpacked(&stream, dir.path());
            assert!(
                matches!(result, Err(Stopped::Broken(Broken::Changed(_)))),
                "{stream:?}: {result:?}"
            );
        }
        for name in [&b""[..], b".", b"..", b"../a", b"/a", b"a/b", b"a\0", &long] {
            let dir = tempfile::tempdir().expect("a directory");
            let result = unpacked(&[file(name, 0, &[]), end(1, 0)].concat(), dir.path());
            assert!(
                matches!(result, Err(Stopped::Broken(Broken::Changed(_)))),
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
            file(b"a", 1, &data(b"x")),
            file(b"a", 1, &data(b"y")),
            end(2, 2),
        ]
        .concat();
        assert!(
            matches!(unpacked(&stream, dir.path()), Err(Stopped::Write(_, e, 1)) if e.raw_os_error() == Some(libc::EEXIST))
        );
    }

    #[test]
    fn zero_runs_are_found_by_blocks() {
        let block = |byte: u8| vec![byte; BLOCK_BYTES];
        let piece = [block(0), block(0), block(1), block(0), vec![0; 5]].concat();
        let found: Vec<(bool, usize)> = runs(&piece)
            .map(|(zeros, run)| (zeros, run.len()))
            .collect();
        assert_eq!(
            found,
            [
                (true, 2 * BLOCK_BYTES),
                (false, BLOCK_BYTES),
                (true, BLOCK_BYTES + 5)
            ]
        );
        assert_eq!(runs(&[]).count(), 0);
        let almost = [vec![0; BLOCK_BYTES - 1], vec![1]].concat();
        assert_eq!(
            runs(&almost).map(|(zeros, _)| zeros).collect::<Vec<_>>(),
            [false]
        );
    }
}
