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

pub(super) const INVENTORY_IMAGE: &str = "inventory.img";
/// Prefix of the names of pagemaps.
pub(super) const PAGEMAP_PREFIX: &str = "pagemap-";
/// Length in bytes of the magic number of an image other than the inventory.
pub(super) const MAGIC_BYTES: usize = 8;
/// Length in bytes of the magic number of the inventory.
pub(super) const INVENTORY_MAGIC_BYTES: usize = 4;
/// Field number in `pagemap_entry`: address of the first page.
const ADDRESS_FIELD: u32 = 1;
/// Field number in `pagemap_entry`: number of pages, in versions before CRIU 4.
const COMPAT_PAGE_COUNT_FIELD: u32 = 2;
/// Field number in `pagemap_entry`: true if the pages are in a parent image.
const IN_PARENT_FIELD: u32 = 3;
/// Field number in `pagemap_entry`: flags (`PE_*`).
const FLAGS_FIELD: u32 = 4;
/// Field number in `pagemap_entry`: number of pages, since CRIU 4.
const PAGE_COUNT_FIELD: u32 = 5;
/// Flag of a pagemap entry: the pages are transferred on request.
const PE_LAZY: u64 = 1 << 1;
/// Flag of a pagemap entry: the pages are in the file of pages.
const PE_PRESENT: u64 = 1 << 2;

/// Maximum number of pages of one lazy entry, as in CRIU.
const LAZY_ENTRY_PAGES_MAX: u64 = 512;

/// The fields of an entry that have a varint as value, as pairs of field number and value.
pub(super) type Fields = Vec<(u32, u64)>;

/// Returns the varint fields of each entry of an image.
///
/// # Errors
/// The image cannot be read or is truncated.
pub(super) fn read_entries(dir: &Path, name: &str) -> Result<Vec<Fields>, Failure> {
    Ok(parse_entries(&read_image(dir, name)?, name)?
        .into_iter()
        .map(|(fields, _)| fields)
        .collect())
}

pub(super) fn read_image(dir: &Path, name: &str) -> Result<Vec<u8>, Failure> {
    fs::read(dir.join(name)).map_err(|e| Failure::Io(format!("cannot read {name}: {e}")))
}

/// Returns the entries of an image, in order: the varint fields of the entry, and its encoded bytes
/// including the length.
fn parse_entries<'a>(image: &'a [u8], name: &str) -> Result<Vec<(Fields, &'a [u8])>, Failure> {
    let truncated_failure = || {
        damaged_image(
            name,
            &format!("ends within an entry, at {} bytes", image.len()),
        )
    };
    let magic_bytes = if name == INVENTORY_IMAGE {
        INVENTORY_MAGIC_BYTES
    } else {
        MAGIC_BYTES
    };
    let mut rest = image.get(magic_bytes..).ok_or_else(truncated_failure)?;
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (length, remainder) = rest.split_first_chunk().ok_or_else(truncated_failure)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (entry, _) = remainder
            .split_at_checked(length)
            .ok_or_else(truncated_failure)?;
        let fields =
            varint_fields(entry).map_err(|e| damaged_image(name, &format!("is damaged: {e}")))?;
        let (entry_bytes, remainder) = rest.split_at(rest.len() - remainder.len() + length);
        entries.push((fields, entry_bytes));
        rest = remainder;
    }
    Ok(entries)
}

pub(super) fn first_value(fields: &Fields, field_number: u32) -> Option<u64> {
    fields
        .iter()
        .find(|(field, _)| *field == field_number)
        .map(|(_, field_value)| *field_value)
}

/// Returns the varint fields of a message.
///
/// # Errors
/// The bytes are not a message.
pub(super) fn varint_fields(entry: &[u8]) -> protobuf::Result<Fields> {
    // `Empty` has no fields, so the parser stores all fields of the message as unknown fields.
    let message = Empty::parse_from_bytes(entry)?;
    let to_varint = |(field, value)| match value {
        UnknownValueRef::Varint(to_varint) => Some((field, to_varint)),
        _ => None,
    };
    Ok(message
        .special_fields
        .unknown_fields()
        .iter()
        .filter_map(to_varint)
        .collect())
}

/// A run of pages in a pagemap.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageRun {
    /// Address of the first page in the task's memory.
    pub(super) address: u64,
    pub(super) page_count: u64,
    /// True if the pages are in the file of pages.
    pub(super) is_present: bool,
    /// True if the pages are lazy: not in the file, but transferred on request.
    pub(super) is_lazy: bool,
}

impl PageRun {
    /// Decodes an entry of a pagemap. Must not be called for the first entry, which is a header.
    pub(super) fn decode(entry: &Fields) -> Self {
        let flags = first_value(entry, FLAGS_FIELD);
        let compat_page_count = first_value(entry, COMPAT_PAGE_COUNT_FIELD).unwrap_or_default();
        let is_present = match flags {
            Some(flags) => flags & PE_PRESENT != 0,
            None => first_value(entry, IN_PARENT_FIELD).unwrap_or_default() == 0,
        };
        Self {
            address: first_value(entry, ADDRESS_FIELD).unwrap_or_default(),
            page_count: first_value(entry, PAGE_COUNT_FIELD).unwrap_or(compat_page_count),
            is_present,
            is_lazy: !is_present && flags.unwrap_or_default() & PE_LAZY != 0,
        }
    }
}

/// Returns the pagemap of the process whose PID in the images is `pid`.
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
    let image = read_image(dir, &name)?;
    let entries = parse_entries(&image, &name)?;
    let Some(((_, header), existing_entries)) = entries.split_first() else {
        return Err(damaged_image(&name, "is empty"));
    };
    let mut new_image = [&image[..MAGIC_BYTES], header].concat();
    let mut existing_entries = existing_entries.iter().peekable();
    for (address, page_count) in page_ranges
        .iter()
        .flat_map(|range| split_lazy_range(*range))
    {
        while let Some((_, bytes)) =
            existing_entries.next_if(|(fields, _)| PageRun::decode(fields).address < address)
        {
            new_image.extend_from_slice(bytes);
        }
        new_image.extend(encode_lazy_entry(address, page_count));
    }
    existing_entries.for_each(|(_, bytes)| new_image.extend_from_slice(bytes));
    fs::write(dir.join(&name), new_image)
        .map_err(|e| Failure::Io(format!("cannot change {name}: {e}")))
}

fn pagemap_name(pid: u64) -> String {
    format!("{PAGEMAP_PREFIX}{pid}.img")
}

/// Splits an address range into portions for lazy entries. Each item is the address of a portion
/// and its number of pages.
fn split_lazy_range((start, end): (u64, u64)) -> impl Iterator<Item = (u64, u64)> {
    let portion_bytes = LAZY_ENTRY_PAGES_MAX * page_size();
    let starts = std::iter::successors(Some(start), move |address| {
        address.checked_add(portion_bytes)
    });
    starts
        .take_while(move |address| *address < end)
        .map(move |address| (address, (end - address).min(portion_bytes) / page_size()))
}

/// Encodes a pagemap entry for lazy pages. The number of pages is written in both fields, for CRIU
/// before and since version 4.
fn encode_lazy_entry(address: u64, page_count: u64) -> Vec<u8> {
    let fields = [
        (ADDRESS_FIELD, address),
        (COMPAT_PAGE_COUNT_FIELD, page_count),
        (FLAGS_FIELD, PE_LAZY),
        (PAGE_COUNT_FIELD, page_count),
    ];
    encode_entry(&fields)
}

/// Encodes an entry whose fields all have a varint as value, as pairs of field number and value.
pub(super) fn encode_entry(fields: &[(u32, u64)]) -> Vec<u8> {
    let mut message = Vec::new();
    for (field, value) in fields {
        message.push((field << 3) as u8);
        write_varint(&mut message, *value);
    }
    [&(message.len() as u32).to_le_bytes()[..], &message].concat()
}

/// Encodes a protobuf varint: seven bits per byte, the lowest first.
fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub(super) fn damaged_image(name: &str, damage: &str) -> Failure {
    Failure::Images(format!("{name} {damage}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lazy pages are inserted between the existing entries, in entries of at most 512 pages.
    /// [`read_pagemap`] returns the old and new entries in the order of addresses. A pagemap
    /// without entries is refused.
    #[test]
    fn lazy_pages_are_merged_into_pagemap() {
        let (dir, page_bytes) = (tempfile::tempdir().expect("a directory"), page_size());
        let present_entry = |address, page_count| {
            encode_entry(&[
                (ADDRESS_FIELD, address),
                (FLAGS_FIELD, PE_PRESENT),
                (PAGE_COUNT_FIELD, page_count),
            ])
        };
        let existing_entries = [
            encode_entry(&[(1, 1)]),
            present_entry(10 * page_bytes, 2),
            present_entry(5000 * page_bytes, 3),
        ]
        .concat();
        fs::write(
            dir.path().join("pagemap-2.img"),
            [&[7; MAGIC_BYTES][..], &existing_entries].concat(),
        )
        .expect("written");
        let ranges = [
            (page_bytes, 4 * page_bytes),
            (100 * page_bytes, 1100 * page_bytes),
            (6000 * page_bytes, 6001 * page_bytes),
        ];
        add_lazy_pages(dir.path(), 2, &ranges).expect("it is whole");
        let runs = read_pagemap(dir.path(), 2).expect("readable");
        let decoded_runs: Vec<_> = runs
            .iter()
            .map(|run| {
                (
                    run.address / page_bytes,
                    run.page_count,
                    run.is_present,
                    run.is_lazy,
                )
            })
            .collect();
        let expected = [
            (1, 3, false, true),
            (10, 2, true, false),
            (100, 512, false, true),
            (612, 488, false, true),
            (5000, 3, true, false),
            (6000, 1, false, true),
        ];
        assert_eq!(decoded_runs, expected);
        fs::write(dir.path().join("pagemap-2.img"), [7; MAGIC_BYTES]).expect("written");
        assert!(add_lazy_pages(dir.path(), 2, &ranges).is_err());
    }
}
