//! Reads CRIU's images as far as that can be done without CRIU.
//!
//! An image is its kind, four or eight bytes, and entries: a length of four bytes and a protobuf message of as many. What the
//! fields mean is in `images/*.proto` of CRIU's sources.

use nix::unistd::{SysconfVar, sysconf};
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, UnknownValueRef};
use sempa_proto::migration::Failure;
use std::fs;
use std::path::Path;

pub(super) const INVENTORY: &str = "inventory.img";
/// Begin of the names of maps of pages.
pub(super) const MAP: &str = "pagemap-";
/// The kind of the inventory has four bytes, that of others eight.
pub(super) const KIND: usize = 8;
pub(super) const KIND_OF_INVENTORY: usize = 4;
/// Of `pagemap_entry`: where; pages, as they were counted before version 4 and since; in an earlier image; what they are.
const MAP_ADDRESS: u32 = 1;
const MAP_PAGES_BEFORE: u32 = 2;
const MAP_IN_PARENT: u32 = 3;
const MAP_FLAGS: u32 = 4;
const MAP_PAGES: u32 = 5;
/// A flag: these pages come when they are asked for.
const LAZY: u64 = 1 << 1;
/// A flag: these pages are in the file.
const PRESENT: u64 = 1 << 2;

/// Fields of an entry that are numbers.
pub(super) type Fields = Vec<(u32, u64)>;

/// The fields that are numbers, of each entry.
///
/// # Errors
/// It cannot be read, or is not whole.
pub(super) fn entries(dir: &Path, name: &str) -> Result<Vec<Fields>, Failure> {
    let file = fs::read(dir.join(name)).map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))?;
    let short = || wrong(name, &format!("ends within an entry, at {} bytes", file.len()));
    let kind = if name == INVENTORY { KIND_OF_INVENTORY } else { KIND };
    let mut rest = file.get(kind..).ok_or_else(short)?;
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (length, behind) = rest.split_first_chunk().ok_or_else(short)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (entry, behind) = behind.split_at_checked(length).ok_or_else(short)?;
        all.push(numbers(entry).map_err(|e| wrong(name, &format!("is damaged: {e}")))?);
        rest = behind;
    }
    Ok(all)
}

pub(super) fn first(fields: &Fields, wanted: u32) -> Option<u64> {
    fields.iter().find(|(field, _)| *field == wanted).map(|(_, number)| *number)
}

/// The fields of a message that are numbers.
///
/// # Errors
/// It is none.
pub(super) fn numbers(entry: &[u8]) -> protobuf::Result<Fields> {
    // What a message without fields does not know is all that there is.
    let message = Empty::parse_from_bytes(entry)?;
    let number = |(field, value)| match value {
        UnknownValueRef::Varint(number) => Some((field, number)),
        _ => None,
    };
    Ok(message.special_fields.unknown_fields().iter().filter_map(number).collect())
}

/// Pages that follow each other, of a map of pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pages {
    /// Where they were in the task.
    pub(super) address: u64,
    pub(super) number: u64,
    /// They are in the file.
    pub(super) present: bool,
    /// They are not, and come when they are asked for.
    pub(super) missing: bool,
}

impl Pages {
    /// What an entry of a map says; its first one is about the whole map.
    pub(super) fn of(entry: &Fields) -> Pages {
        let flags = first(entry, MAP_FLAGS);
        let before = first(entry, MAP_PAGES_BEFORE).unwrap_or_default();
        let present = match flags {
            Some(flags) => flags & PRESENT != 0,
            None => first(entry, MAP_IN_PARENT).unwrap_or_default() == 0,
        };
        Pages {
            address: first(entry, MAP_ADDRESS).unwrap_or_default(),
            number: first(entry, MAP_PAGES).unwrap_or(before),
            present,
            missing: !present && flags.unwrap_or_default() & LAZY != 0,
        }
    }
}

pub(super) fn page_size() -> u64 {
    let known = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    known.and_then(|bytes| u64::try_from(bytes).ok()).expect("the system has pages of some size")
}

pub(super) fn wrong(name: &str, what: &str) -> Failure {
    Failure::Images(format!("{name} {what}"))
}
