//! Reads CRIU's images, and adds lazy pages to them.
//!
//! An image is a magic number of four or eight bytes, followed by entries. An entry is a length of
//! four bytes and a protobuf message of that length. The fields are described in `images/*.proto`
//! of CRIU's sources.

use crate::engine::pages::page_size;
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, UnknownValueRef};
use sempa_proto::migration::Failure;
use std::fs;
use std::path::Path;

pub(super) const INVENTORY: &str = "inventory.img";
/// Prefix of the names of pagemaps.
pub(super) const PAGEMAP_PREFIX: &str = "pagemap-";
/// Length of the magic number of an image other than the inventory.
pub(super) const MAGIC_BYTES: usize = 8;
/// Length of the magic number of the inventory.
pub(super) const INVENTORY_MAGIC_BYTES: usize = 4;
/// Field number in `pagemap_entry`: address of the first page.
const MAP_ADDRESS: u32 = 1;
/// Field number in `pagemap_entry`: number of pages, until CRIU 4.
const MAP_PAGE_COUNT_COMPAT: u32 = 2;
/// Field number in `pagemap_entry`: true if the pages are in a parent image.
const MAP_IN_PARENT: u32 = 3;
/// Field number in `pagemap_entry`: flags (`PE_*`).
const MAP_FLAGS: u32 = 4;
/// Field number in `pagemap_entry`: number of pages, since CRIU 4.
const MAP_PAGE_COUNT: u32 = 5;
/// Flag of a pagemap entry: the pages are transferred on request.
const PE_LAZY: u64 = 1 << 1;
/// Flag of a pagemap entry: the pages are in the file of pages.
const PE_PRESENT: u64 = 1 << 2;

/// Maximum number of pages of one lazy entry, as in CRIU.
const LAZY_ENTRY_PAGES_MAX: u64 = 512;

/// The varint fields of an entry, as pairs of field number and value.
pub(super) type Fields = Vec<(u32, u64)>;

/// Returns the varint fields of each entry of an image.
///
/// # Errors
/// The image cannot be read or is truncated.
pub(super) fn read_entries(dir: &Path, name: &str) -> Result<Vec<Fields>, Failure> {
    Ok(parse(&read(dir, name)?, name)?
        .into_iter()
        .map(|(fields, _)| fields)
        .collect())
}

fn read(dir: &Path, name: &str) -> Result<Vec<u8>, Failure> {
    fs::read(dir.join(name)).map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))
}

/// Returns the entries of an image. Each has its varint fields, and its encoded bytes including the
/// length.
fn parse<'a>(file: &'a [u8], name: &str) -> Result<Vec<(Fields, &'a [u8])>, Failure> {
    let truncated = || {
        damaged_image(
            name,
            &format!("ends within an entry, at {} bytes", file.len()),
        )
    };
    let magic_bytes = if name == INVENTORY {
        INVENTORY_MAGIC_BYTES
    } else {
        MAGIC_BYTES
    };
    let mut rest = file.get(magic_bytes..).ok_or_else(truncated)?;
    let mut all = Vec::new();
    while !rest.is_empty() {
        let (length, remainder) = rest.split_first_chunk().ok_or_else(truncated)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (entry, _) = remainder.split_at_checked(length).ok_or_else(truncated)?;
        let fields =
            varint_fields(entry).map_err(|e| damaged_image(name, &format!("is damaged: {e}")))?;
        let (whole, remainder) = rest.split_at(rest.len() - remainder.len() + length);
        all.push((fields, whole));
        rest = remainder;
    }
    Ok(all)
}

pub(super) fn first_value(fields: &Fields, wanted: u32) -> Option<u64> {
    fields
        .iter()
        .find(|(field, _)| *field == wanted)
        .map(|(_, number)| *number)
}

/// Returns the varint fields of a message.
///
/// # Errors
/// The bytes are not a message.
pub(super) fn varint_fields(entry: &[u8]) -> protobuf::Result<Fields> {
    // `Empty` knows no fields, so all fields of the message are unknown fields of it.
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

/// A run of pages in a pagemap.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageRun {
    /// Address of the first page in the task's memory.
    pub(super) address: u64,
    pub(super) count: u64,
    /// True if the pages are in the file of pages.
    pub(super) present: bool,
    /// True if the pages are lazy: not in the file, but transferred on request.
    pub(super) lazy: bool,
}

impl PageRun {
    /// Decodes an entry of a pagemap. Must not be called for the first entry, which is a header.
    pub(super) fn decode(entry: &Fields) -> PageRun {
        let flags = first_value(entry, MAP_FLAGS);
        let before = first_value(entry, MAP_PAGE_COUNT_COMPAT).unwrap_or_default();
        let present = match flags {
            Some(flags) => flags & PE_PRESENT != 0,
            None => first_value(entry, MAP_IN_PARENT).unwrap_or_default() == 0,
        };
        PageRun {
            address: first_value(entry, MAP_ADDRESS).unwrap_or_default(),
            count: first_value(entry, MAP_PAGE_COUNT).unwrap_or(before),
            present,
            lazy: !present && flags.unwrap_or_default() & PE_LAZY != 0,
        }
    }
}

/// Returns the pagemap of the process whose PID in the images is `number`.
///
/// # Errors
/// The pagemap cannot be read or is truncated.
pub(super) fn read_pagemap(dir: &Path, pid: u64) -> Result<Vec<PageRun>, Failure> {
    Ok(read_entries(dir, &pagemap_name(pid))?
        .iter()
        .skip(1)
        .map(PageRun::decode)
        .collect())
}

/// Adds entries for lazy pages, given as (start, end) ranges, to the pagemap of a process. The
/// pagemap must not contain these pages yet.
///
/// # Errors
/// The pagemap cannot be read or written, or is truncated.
pub(super) fn add_lazy_pages(
    dir: &Path,
    pid: u64,
    page_ranges: &[(u64, u64)],
) -> Result<(), Failure> {
    let name = pagemap_name(pid);
    let file = read(dir, &name)?;
    let entries = parse(&file, &name)?;
    let Some(((_, head), known)) = entries.split_first() else {
        return Err(damaged_image(&name, "is empty"));
    };
    let mut whole = [&file[..MAGIC_BYTES], head].concat();
    let mut known = known.iter().peekable();
    for (address, pages) in page_ranges.iter().flat_map(|stretch| portions(*stretch)) {
        while let Some((_, bytes)) =
            known.next_if(|(fields, _)| PageRun::decode(fields).address < address)
        {
            whole.extend_from_slice(bytes);
        }
        whole.extend(encode_lazy_entry(address, pages));
    }
    known.for_each(|(_, bytes)| whole.extend_from_slice(bytes));
    fs::write(dir.join(&name), whole).map_err(|e| Failure::Io(format!("cannot change {name}: {e}")))
}

fn pagemap_name(pid: u64) -> String {
    format!("{PAGEMAP_PREFIX}{pid}.img")
}

/// Splits an address range into portions for lazy entries. Each portion is its address and number
/// of pages.
fn portions((start, end): (u64, u64)) -> impl Iterator<Item = (u64, u64)> {
    let bytes = LAZY_ENTRY_PAGES_MAX * page_size();
    let first = std::iter::successors(Some(start), move |at| at.checked_add(bytes));
    first
        .take_while(move |at| *at < end)
        .map(move |at| (at, (end - at).min(bytes) / page_size()))
}

/// Encodes a pagemap entry for lazy pages. The number of pages is written in both fields, for CRIU
/// before and since version 4.
fn encode_lazy_entry(address: u64, pages: u64) -> Vec<u8> {
    let fields = [
        (MAP_ADDRESS, address),
        (MAP_PAGE_COUNT_COMPAT, pages),
        (MAP_FLAGS, PE_LAZY),
        (MAP_PAGE_COUNT, pages),
    ];
    let mut message = Vec::new();
    for (field, number) in fields {
        message.push((field << 3) as u8);
        write_varint(&mut message, number);
    }
    [&(message.len() as u32).to_le_bytes()[..], &message].concat()
}

/// Encodes a protobuf varint: seven bits per byte, the lowest first.
fn write_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(super) fn damaged_image(name: &str, what: &str) -> Failure {
    Failure::Images(format!("{name} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lazy pages are inserted in portions between the existing entries and can be read again.
    #[test]
    fn lazy_pages_are_merged_into_pagemap() {
        let (dir, page) = (tempfile::tempdir().expect("a directory"), page_size());
        let entry = |fields: &[(u32, u64)]| {
            let mut message = Vec::new();
            for (field, number) in fields {
                message.push((field << 3) as u8);
                write_varint(&mut message, *number);
            }
            [&(message.len() as u32).to_le_bytes()[..], &message].concat()
        };
        let present = |address, pages| {
            entry(&[
                (MAP_ADDRESS, address),
                (MAP_FLAGS, PE_PRESENT),
                (MAP_PAGE_COUNT, pages),
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
            [&[7; MAGIC_BYTES][..], &known].concat(),
        )
        .expect("written");
        let stretches = [
            (page, 4 * page),
            (100 * page, 1100 * page),
            (6000 * page, 6001 * page),
        ];
        add_lazy_pages(dir.path(), 2, &stretches).expect("it is whole");
        let all = read_pagemap(dir.path(), 2).expect("readable");
        let said: Vec<_> = all
            .iter()
            .map(|of| (of.address / page, of.count, of.present, of.lazy))
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
        fs::write(dir.path().join("pagemap-2.img"), [7; MAGIC_BYTES]).expect("written");
        assert!(add_lazy_pages(dir.path(), 2, &stretches).is_err());
    }
}
