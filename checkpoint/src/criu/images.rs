//! Reads CRIU's images as far as that can be done without CRIU.
//!
//! An image is its kind, four or eight bytes, and entries: a length of four bytes and a protobuf message of as many. What the
//! fields mean is in `images/*.proto` of CRIU's sources.

use crate::engine::pages::page_size;
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

/// Pages of an entry of missing memory: as many as CRIU puts into one.
const PORTION_PAGES: u64 = 512;

/// Fields of an entry that are numbers.
pub(super) type Fields = Vec<(u32, u64)>;

/// The fields that are numbers, of each entry.
///
/// # Errors
/// It cannot be read, or is not whole.
pub(super) fn entries(dir: &Path, name: &str) -> Result<Vec<Fields>, Failure> {
    Ok(parse(&read(dir, name)?, name)?
        .into_iter()
        .map(|(fields, _)| fields)
        .collect())
}

fn read(dir: &Path, name: &str) -> Result<Vec<u8>, Failure> {
    fs::read(dir.join(name)).map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))
}

/// The entries of an image: their fields that are numbers, and they themselves with their length in front.
fn parse<'a>(file: &'a [u8], name: &str) -> Result<Vec<(Fields, &'a [u8])>, Failure> {
    let short = || {
        wrong(
            name,
            &format!("ends within an entry, at {} bytes", file.len()),
        )
    };
    let kind = if name == INVENTORY {
        KIND_OF_INVENTORY
    } else {
        KIND
    };
    let mut rest = file.get(kind..).ok_or_else(short)?;
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (length, behind) = rest.split_first_chunk().ok_or_else(short)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (entry, _) = behind.split_at_checked(length).ok_or_else(short)?;
        let fields = numbers(entry).map_err(|e| wrong(name, &format!("is damaged: {e}")))?;
        let (whole, behind) = rest.split_at(rest.len() - behind.len() + length);
        all.push((fields, whole));
        rest = behind;
    }
    Ok(all)
}

pub(super) fn first(fields: &Fields, wanted: u32) -> Option<u64> {
    fields
        .iter()
        .find(|(field, _)| *field == wanted)
        .map(|(_, number)| *number)
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
    Ok(message
        .special_fields
        .unknown_fields()
        .iter()
        .filter_map(number)
        .collect())
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

/// What the map of pages of a process says that is in the images by this number.
///
/// # Errors
/// It cannot be read, or is not whole.
pub(super) fn pages_of(dir: &Path, number: u64) -> Result<Vec<Pages>, Failure> {
    Ok(entries(dir, &map_name(number))?
        .iter()
        .skip(1)
        .map(Pages::of)
        .collect())
}

/// Notes in the map of a process that the pages in these stretches, of which it says nothing, come when they are asked for.
///
/// # Errors
/// The map cannot be read or written, or is not whole.
pub(super) fn note_missing(
    dir: &Path,
    number: u64,
    stretches: &[(u64, u64)],
) -> Result<(), Failure> {
    let name = map_name(number);
    let file = read(dir, &name)?;
    let entries = parse(&file, &name)?;
    let Some(((_, head), known)) = entries.split_first() else {
        return Err(wrong(&name, "is empty"));
    };
    let mut whole = [&file[..KIND], head].concat();
    let mut known = known.iter().peekable();
    for (address, pages) in stretches.iter().flat_map(|stretch| portions(*stretch)) {
        while let Some((_, bytes)) =
            known.next_if(|(fields, _)| Pages::of(fields).address < address)
        {
            whole.extend_from_slice(bytes);
        }
        whole.extend(missing_entry(address, pages));
    }
    known.for_each(|(_, bytes)| whole.extend_from_slice(bytes));
    fs::write(dir.join(&name), whole).map_err(|e| Failure::Io(format!("cannot change {name}: {e}")))
}

fn map_name(number: u64) -> String {
    format!("{MAP}{number}.img")
}

/// A stretch in portions as CRIU makes them: address, pages.
fn portions((start, end): (u64, u64)) -> impl Iterator<Item = (u64, u64)> {
    let bytes = PORTION_PAGES * page_size();
    let first = std::iter::successors(Some(start), move |at| at.checked_add(bytes));
    first
        .take_while(move |at| *at < end)
        .map(move |at| (at, (end - at).min(bytes) / page_size()))
}

/// An entry of a map. The number of pages is said in both manners.
fn missing_entry(address: u64, pages: u64) -> Vec<u8> {
    let fields = [
        (MAP_ADDRESS, address),
        (MAP_PAGES_BEFORE, pages),
        (MAP_FLAGS, LAZY),
        (MAP_PAGES, pages),
    ];
    let mut message = Vec::new();
    for (field, number) in fields {
        message.push((field << 3) as u8);
        varint(&mut message, number);
    }
    [&(message.len() as u32).to_le_bytes()[..], &message].concat()
}

/// Writes a number as protobuf does: seven bits a byte, the lowest first.
fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(super) fn wrong(name: &str, what: &str) -> Failure {
    Failure::Images(format!("{name} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_memory_is_noted_between_what_is_known_in_portions_and_read_again() {
        let (dir, page) = (tempfile::tempdir().expect("a directory"), page_size());
        let entry = |fields: &[(u32, u64)]| {
            let mut message = Vec::new();
            for (field, number) in fields {
                message.push((field << 3) as u8);
                varint(&mut message, *number);
            }
            [&(message.len() as u32).to_le_bytes()[..], &message].concat()
        };
        let present = |address, pages| {
            entry(&[
                (MAP_ADDRESS, address),
                (MAP_FLAGS, PRESENT),
                (MAP_PAGES, pages),
            ])
        };
        let known = [
            entry(&[(1, 1)]),
            present(10 * page, 2),
            present(5000 * page, 3),
        ]
        .concat();
        fs::write(
            dir.path().join("pagemap-2.img"),
            [&[7; KIND][..], &known].concat(),
        )
        .expect("written");
        let stretches = [
            (page, 4 * page),
            (100 * page, 1100 * page),
            (6000 * page, 6001 * page),
        ];
        note_missing(dir.path(), 2, &stretches).expect("it is whole");
        let all = pages_of(dir.path(), 2).expect("readable");
        let said: Vec<_> = all
            .iter()
            .map(|of| (of.address / page, of.number, of.present, of.missing))
            .collect();
        let expected = [
            (1, 3, false, true),
            (10, 2, true, false),
            (100, 512, false, true),
            (612, 488, false, true),
            (5000, 3, true, false),
            (6000, 1, false, true),
        ];
        assert_eq!(said, expected);
        fs::write(dir.path().join("pagemap-2.img"), [7; KIND]).expect("written");
        assert!(note_missing(dir.path(), 2, &stretches).is_err());
    }
}
