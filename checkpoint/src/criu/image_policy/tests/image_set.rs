//! Images of a real task that can be altered, and the policy with which they are checked.

use crate::criu::image_policy::{
    ImageViolation, OpenedFiles, RestoreLimits, RestorePolicy, UserIdentity, verify_image_bytes,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

pub(super) const UID: u32 = 65534;

pub(super) fn test_policy() -> RestorePolicy {
    RestorePolicy {
        identity: UserIdentity {
            uid: UID,
            gid: UID,
            groups: vec![100, 101],
        },
        limits: RestoreLimits::default(),
        requires_no_new_privs: true,
        bounding_set: u64::MAX,
        other_files: BTreeSet::new(),
    }
}

/// A field of a message: number, wire type, value.
pub(super) type RawField = (u64, RawValue);

#[derive(Clone, Debug, PartialEq)]
pub(super) enum RawValue {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(Vec<u8>),
}

pub(super) fn read_varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first().expect("whole");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

pub(super) fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub(super) fn parse(mut bytes: &[u8]) -> Vec<RawField> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = read_varint(&mut bytes);
        let value = match key & 7 {
            0 => RawValue::Varint(read_varint(&mut bytes)),
            1 => {
                let (value, rest) = bytes.split_first_chunk().expect("whole");
                bytes = rest;
                RawValue::Fixed64(*value)
            }
            2 => {
                let length = read_varint(&mut bytes) as usize;
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                RawValue::Bytes(value.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

pub(super) fn encode(fields: &[RawField]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, value) in fields {
        match value {
            RawValue::Varint(value) => {
                write_varint(&mut out, number << 3);
                write_varint(&mut out, *value);
            }
            RawValue::Fixed64(value) => {
                write_varint(&mut out, number << 3 | 1);
                out.extend(value);
            }
            RawValue::Bytes(value) => {
                write_varint(&mut out, number << 3 | 2);
                write_varint(&mut out, value.len() as u64);
                out.extend(value);
            }
        }
    }
    out
}

pub(super) fn varint(number: u64, value: u64) -> RawField {
    (number, RawValue::Varint(value))
}

pub(super) fn bytes(number: u64, value: &[u8]) -> RawField {
    (number, RawValue::Bytes(value.to_vec()))
}

/// A set of images, by name.
#[derive(Clone)]
pub(super) struct ImageSet(pub(super) BTreeMap<String, Vec<u8>>);

impl ImageSet {
    pub(super) fn load() -> Self {
        Self::load_from("user-images")
    }

    pub(super) fn load_from(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("testdata")
            .join(name);
        let entries = fs::read_dir(dir).expect("test data").map(|entry| {
            let path = entry.expect("read").path();
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            (name, fs::read(&path).expect("read"))
        });
        Self(entries.filter(|(name, _)| name.ends_with(".img")).collect())
    }

    /// Changes the message at `path` in the entry `entry` of an image. The path consists of field
    /// numbers; a repeated field means its first occurrence.
    pub(super) fn alter(
        mut self,
        name: &str,
        entry: usize,
        path: &[u64],
        change: impl FnOnce(&mut Vec<RawField>),
    ) -> Self {
        let image = self.0.get_mut(name).expect("the image exists");
        let mut offset = if name == "inventory.img" { 4 } else { 8 };
        for _ in 0..entry {
            offset += 4 + entry_length(image, offset);
        }
        let length = entry_length(image, offset);
        let message = alter_message(&image[offset + 4..][..length], path, change);
        let replacement = [&(message.len() as u32).to_le_bytes()[..], &message].concat();
        image.splice(offset..offset + 4 + length, replacement);
        self
    }

    /// Sets the number in the field `field` of the message at `path`.
    pub(super) fn set(
        self,
        name: &str,
        entry: usize,
        path: &[u64],
        field: u64,
        value: u64,
    ) -> Self {
        self.alter(name, entry, path, |fields| {
            fields.retain(|(number, _)| *number != field);
            fields.push(varint(field, value));
        })
    }

    pub(super) fn add(self, name: &str, entry: usize, path: &[u64], field: RawField) -> Self {
        self.alter(name, entry, path, |fields| fields.push(field))
    }

    /// Returns the number of the entry of `files.img` that describes a file of the kind `kind`
    /// whose description satisfies `is_meant`.
    pub(super) fn file(&self, kind: u64, is_meant: impl Fn(&[RawField]) -> bool) -> (usize, u64) {
        let image = &self.0["files.img"];
        let mut offset = 8;
        for entry in 0.. {
            let length = entry_length(image, offset);
            let fields = parse(&image[offset + 4..][..length]);
            let description = fields.iter().find_map(|(number, value)| match value {
                RawValue::Bytes(value) => Some((*number, parse(value))),
                _ => None,
            });
            let (number, description) = description.expect("a description");
            if fields.contains(&varint(1, kind)) && is_meant(&description) {
                return (entry, number);
            }
            offset += 4 + length;
        }
        unreachable!("the file exists")
    }

    pub(super) fn path_file(&self, path: &str) -> (usize, u64) {
        self.file(1, |description| {
            description.contains(&bytes(6, path.as_bytes()))
        })
    }

    pub(super) fn write(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, image) in &self.0 {
            fs::write(dir.path().join(name), image).expect("written");
        }
        dir
    }

    pub(super) fn verify_with(
        &self,
        policy: &RestorePolicy,
    ) -> Result<OpenedFiles, ImageViolation> {
        verify_image_bytes(&self.0, policy)
    }

    pub(super) fn verify(&self) -> Result<OpenedFiles, ImageViolation> {
        self.verify_with(&test_policy())
    }

    pub(super) fn violation(&self) -> ImageViolation {
        match self.verify() {
            Ok(_) => panic!("the images are accepted"),
            Err(violation) => violation,
        }
    }
}

fn entry_length(image: &[u8], offset: usize) -> usize {
    let length = image[offset..].first_chunk().expect("an entry");
    u32::from_le_bytes(*length) as usize
}

pub(super) fn alter_message(
    message: &[u8],
    path: &[u64],
    change: impl FnOnce(&mut Vec<RawField>),
) -> Vec<u8> {
    let mut fields = parse(message);
    match path.split_first() {
        None => change(&mut fields),
        Some((first, rest)) => {
            let field = fields.iter_mut().find(|(number, _)| number == first);
            let (_, RawValue::Bytes(inner)) = field.expect("the field exists") else {
                panic!("{first} is not a message");
            };
            *inner = alter_message(inner, rest, change);
        }
    }
    encode(&fields)
}

/// Path of the credentials in the image of a thread: `thread_core`, `creds`.
pub(super) const CREDENTIALS: [u64; 2] = [5, 10];
/// Path of the properties of a process in the image of its main thread: `tc`.
pub(super) const TASK: [u64; 1] = [3];
/// The images of the main threads of two processes, and of another thread.
pub(super) const CORES: [&str; 3] = ["core-2.img", "core-3.img", "core-5.img"];
