//! Reads the images of a directory.

use super::RestorePolicy;
use super::names::{ImageName, NumberedImage};
use super::violation::ImageViolation;
use super::wire::{Message, Schema};
use crate::criu::images::{INVENTORY_IMAGE, INVENTORY_MAGIC_BYTES, MAGIC_BYTES};
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, fstat};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Maximum length in bytes of an image that is decoded. The largest ones list memory pages.
const IMAGE_BYTES_MAX: u64 = 256 << 20;
/// Maximum length in bytes of an entry. The largest ones list the mappings of a process.
const ENTRY_BYTES_MAX: usize = 8 << 20;
/// Maximum number of entries of an image that are decoded together.
const ENTRIES_MAX: usize = 1 << 20;
/// Maximum number of files in the directory.
const FILES_MAX: usize = 65_536;

/// Where the images are.
enum Source<'a> {
    Directory(OwnedFd),
    Memory(&'a BTreeMap<String, Vec<u8>>),
}

/// A set of images that all have known names.
pub(super) struct ImageDir<'a> {
    source: Source<'a>,
    names: BTreeSet<String>,
    numbered: BTreeSet<(NumberedImage, u64)>,
}

impl<'a> ImageDir<'a> {
    /// Lists the images in a directory.
    pub(super) fn list(dir: &Path, policy: &RestorePolicy) -> Result<Self, ImageViolation> {
        let unreadable = |why: String| ImageViolation::Unreadable {
            image: dir.display().to_string(),
            why,
        };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let dir_fd = open(dir, flags, Mode::empty()).map_err(|e| unreadable(e.to_string()))?;
        let mut images = Self {
            source: Source::Directory(dir_fd),
            names: BTreeSet::new(),
            numbered: BTreeSet::new(),
        };
        for entry in dir.read_dir().map_err(|e| unreadable(e.to_string()))? {
            let entry = entry.map_err(|e| unreadable(e.to_string()))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_file = entry
                .file_type()
                .map_err(|e| unreadable(e.to_string()))?
                .is_file();
            if !is_file {
                return Err(ImageViolation::UnknownImage { name });
            }
            images.add(name, policy)?;
        }
        Ok(images)
    }

    /// Lists images that are in memory, by their names.
    pub(super) fn from_memory(
        image_bytes: &'a BTreeMap<String, Vec<u8>>,
        policy: &RestorePolicy,
    ) -> Result<Self, ImageViolation> {
        let mut images = Self {
            source: Source::Memory(image_bytes),
            names: BTreeSet::new(),
            numbered: BTreeSet::new(),
        };
        for name in image_bytes.keys() {
            images.add(name.clone(), policy)?;
        }
        Ok(images)
    }

    fn add(&mut self, name: String, policy: &RestorePolicy) -> Result<(), ImageViolation> {
        match ImageName::parse(&name) {
            Some(ImageName::Numbered(kind, number)) => {
                self.numbered.insert((kind, number));
            }
            Some(_) => {}
            None if policy.other_files.contains(&name) => {}
            None => return Err(ImageViolation::UnknownImage { name }),
        }
        if self.names.len() == FILES_MAX {
            return Err(ImageViolation::TooMany {
                what: "files",
                limit: FILES_MAX as u64,
            });
        }
        self.names.insert(name);
        Ok(())
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Returns the numbers of all images of a kind.
    pub(super) fn numbers(&self, kind: NumberedImage) -> impl Iterator<Item = u64> {
        let range = (kind, 0)..=(kind, u64::MAX);
        self.numbered.range(range).map(|(_, number)| *number)
    }

    /// Reads a whole image.
    fn read(&self, name: &str) -> Result<Cow<'a, [u8]>, ImageViolation> {
        let image = match &self.source {
            Source::Directory(dir) => read_file(dir, name).map(Cow::Owned),
            Source::Memory(images) => match images.get(name) {
                Some(image) => Ok(Cow::Borrowed(&**image)),
                None => Err(io::ErrorKind::NotFound.into()),
            },
        };
        let image = image.map_err(|e| ImageViolation::Unreadable {
            image: name.into(),
            why: e.to_string(),
        })?;
        match image.len() as u64 > IMAGE_BYTES_MAX {
            true => Err(ImageViolation::TooMany {
                what: "bytes in one image",
                limit: IMAGE_BYTES_MAX,
            }),
            false => Ok(image),
        }
    }

    /// Returns the decoded entries of an image; none if the image does not exist.
    pub(super) fn entries(
        &self,
        name: &str,
        schema: &'static Schema,
    ) -> Result<Vec<Message>, ImageViolation> {
        self.entries_with_data(name, schema, |_| 0)
    }

    /// Returns the decoded entries of an image; none if the image does not exist. After each entry
    /// follow `data_bytes(entry)` bytes of data.
    pub(super) fn entries_with_data(
        &self,
        name: &str,
        schema: &'static Schema,
        data_bytes: impl Fn(&Message) -> u64,
    ) -> Result<Vec<Message>, ImageViolation> {
        if !self.contains(name) {
            return Ok(Vec::new());
        }
        let image = self.read(name)?;
        let mut rest = skip_magic(&image, name)?;
        let mut entries = Vec::new();
        while !rest.is_empty() {
            if entries.len() == ENTRIES_MAX {
                return Err(ImageViolation::TooMany {
                    what: "entries in one image",
                    limit: ENTRIES_MAX as u64,
                });
            }
            let (message, remainder) = split_entry(rest, schema, name)?;
            let data_bytes = usize::try_from(data_bytes(&message)).unwrap_or(usize::MAX);
            rest = remainder
                .get(data_bytes..)
                .ok_or_else(|| truncated_image(name))?;
            entries.push(message);
        }
        Ok(entries)
    }

    /// Returns the first entry of an image; the rest of the image has another format.
    pub(super) fn first_entry(
        &self,
        name: &str,
        schema: &'static Schema,
    ) -> Result<Message, ImageViolation> {
        let image = self.read(name)?;
        Ok(split_entry(skip_magic(&image, name)?, schema, name)?.0)
    }

    /// Returns the only entry of an image that must exist.
    pub(super) fn single_entry(
        &self,
        name: &str,
        schema: &'static Schema,
    ) -> Result<Message, ImageViolation> {
        let mut entries = self.entries(name, schema)?;
        match entries.pop().filter(|_| entries.is_empty()) {
            Some(entry) => Ok(entry),
            None => Err(ImageViolation::Damaged {
                image: name.into(),
                why: "it does not have exactly one entry".into(),
            }),
        }
    }

    /// Decodes the head of an image, and passes each further entry to `visit`.
    pub(super) fn visit_after_head(
        &self,
        name: &str,
        head_schema: &'static Schema,
        schema: &'static Schema,
        mut visit: impl FnMut(&Message) -> Result<(), ImageViolation>,
    ) -> Result<(), ImageViolation> {
        let image = self.read(name)?;
        let (_, mut rest) = split_entry(skip_magic(&image, name)?, head_schema, name)?;
        while !rest.is_empty() {
            let (message, remainder) = split_entry(rest, schema, name)?;
            visit(&message)?;
            rest = remainder;
        }
        Ok(())
    }
}

/// Reads a regular file, at most one byte more than [`IMAGE_BYTES_MAX`].
fn read_file(dir: &OwnedFd, name: &str) -> io::Result<Vec<u8>> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let file = openat(dir, name, flags, Mode::empty())?;
    if fstat(&file)?.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::from(file)
        .take(IMAGE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn truncated_image(name: &str) -> ImageViolation {
    ImageViolation::Damaged {
        image: name.into(),
        why: "it ends within an entry".into(),
    }
}

fn skip_magic<'a>(image: &'a [u8], name: &str) -> Result<&'a [u8], ImageViolation> {
    let magic_bytes = match name {
        INVENTORY_IMAGE => INVENTORY_MAGIC_BYTES,
        _ => MAGIC_BYTES,
    };
    image
        .get(magic_bytes..)
        .ok_or_else(|| truncated_image(name))
}

/// Decodes the entry at the beginning of `bytes`. Returns the entry and the following bytes.
fn split_entry<'a>(
    bytes: &'a [u8],
    schema: &'static Schema,
    name: &str,
) -> Result<(Message, &'a [u8]), ImageViolation> {
    let (length, rest) = bytes
        .split_first_chunk()
        .ok_or_else(|| truncated_image(name))?;
    let (entry, rest) = rest
        .split_at_checked(u32::from_le_bytes(*length) as usize)
        .ok_or_else(|| truncated_image(name))?;
    match entry.len() > ENTRY_BYTES_MAX {
        true => Err(ImageViolation::TooMany {
            what: "bytes in one entry",
            limit: ENTRY_BYTES_MAX as u64,
        }),
        false => Ok((Message::decode(schema, entry, name)?, rest)),
    }
}
