//! Header of a message with an array: element format, shape and order of the elements.
//!
//! ```text
//! offset  bytes  content (all numbers little-endian)
//! 0       8      magic
//! 8       4      size of the header in bytes, a multiple of 64
//! 12      1      number of dimensions
//! 13      1      order of the elements: 'C' or 'F'
//! 14      2      length of the format
//! 16      8      size of an element in bytes
//! 24      8 n    shape
//! …              format as in Python's module struct and PEP 3118, then zeros
//! ```
//!
//! The elements follow the header in the sender's memory layout.

use std::ffi::CString;

/// First bytes of a message with an array.
const MAGIC: [u8; 8] = *b"SempaAr1";
/// Size of the header without shape and format.
const FIXED_BYTES: usize = 24;
/// The header is a multiple of this size, so that the elements are aligned if the message is.
const ALIGNMENT_BYTES: usize = 64;
/// Maximum number of dimensions in Python's buffer protocol (`PyBUF_MAX_NDIM`).
const DIMENSIONS_MAX: usize = 64;
/// Formats of one element that a `memoryview` reads, and their sizes in bytes. A `memoryview` does
/// not compare the size of such an element with its format.
const NATIVE_FORMATS: [(&str, usize); 5] = [
    ("cbB?", 1),
    ("hHe", 2),
    ("iIf", 4),
    ("lLqQnNPd", 8),
    ("g", 16),
];

/// Order of the elements in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementOrder {
    /// The last index varies fastest.
    C,
    /// The first index varies fastest.
    Fortran,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArrayHeader {
    pub(crate) order: ElementOrder,
    pub(crate) element_bytes: usize,
    pub(crate) shape: Vec<usize>,
    /// Format of an element as in PEP 3118.
    pub(crate) format: CString,
}

impl ArrayHeader {
    /// Encodes the header.
    ///
    /// # Errors
    /// A sentence, if the array has too many dimensions or its format is too long.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        let format = self.format.as_bytes();
        let dimension_count = u8::try_from(self.shape.len())
            .ok()
            .filter(|count| usize::from(*count) <= DIMENSIONS_MAX)
            .ok_or_else(|| format!("an array has at most {DIMENSIONS_MAX} dimensions"))?;
        let format_bytes = u16::try_from(format.len())
            .map_err(|_| format!("the format of an element has at most {} bytes", u16::MAX))?;
        let header_bytes =
            (FIXED_BYTES + self.shape.len() * 8 + format.len()).next_multiple_of(ALIGNMENT_BYTES);
        let mut out = Vec::with_capacity(header_bytes);
        out.extend_from_slice(&MAGIC);
        // The header has at most 24 + 64 * 8 + 65535 bytes and a rest of 63.
        out.extend_from_slice(&(header_bytes as u32).to_le_bytes());
        out.push(dimension_count);
        out.push(match self.order {
            ElementOrder::C => b'C',
            ElementOrder::Fortran => b'F',
        });
        out.extend_from_slice(&format_bytes.to_le_bytes());
        out.extend_from_slice(&(self.element_bytes as u64).to_le_bytes());
        for length in &self.shape {
            out.extend_from_slice(&(*length as u64).to_le_bytes());
        }
        out.extend_from_slice(format);
        out.resize(header_bytes, 0);
        Ok(out)
    }

    /// Decodes the header of a message. Returns the header and its size in bytes.
    ///
    /// # Errors
    /// A part of a sentence that says why the message contains no array.
    pub(crate) fn decode(message: &[u8]) -> Result<(Self, usize), String> {
        let too_short = || "its header is incomplete".to_string();
        let fixed_part: &[u8; FIXED_BYTES] = message.first_chunk().ok_or_else(too_short)?;
        if fixed_part[..8] != MAGIC {
            return Err("it was not sent with send_array".into());
        }
        let header_bytes = read_number(&fixed_part[8..12]);
        let dimension_count = usize::from(fixed_part[12]);
        let order = match fixed_part[13] {
            b'C' => ElementOrder::C,
            b'F' => ElementOrder::Fortran,
            other => return Err(format!("its order of elements {other} is unknown")),
        };
        let format_bytes = read_number(&fixed_part[14..16]);
        let element_bytes = read_number(&fixed_part[16..24]);
        let header = message.get(..header_bytes).ok_or_else(too_short)?;
        let shape_end = FIXED_BYTES + dimension_count * 8;
        let shape_part = header.get(FIXED_BYTES..shape_end).ok_or_else(too_short)?;
        let format_part = header
            .get(shape_end..shape_end + format_bytes)
            .ok_or_else(too_short)?;
        if dimension_count > DIMENSIONS_MAX {
            return Err(format!("it has {dimension_count} dimensions"));
        }
        let format = CString::new(format_part)
            .map_err(|_| "its element format contains a zero byte".to_string())?;
        let header = Self {
            order,
            element_bytes,
            shape: shape_part.chunks_exact(8).map(read_number).collect(),
            format,
        };
        header.check(message.len() - header_bytes)?;
        Ok((header, header_bytes))
    }

    /// Returns the distances in bytes between neighbours of each dimension.
    pub(crate) fn strides(&self) -> Vec<isize> {
        let mut strides = vec![0; self.shape.len()];
        let mut stride = self.element_bytes;
        let mut set_stride = |dimension: usize| {
            strides[dimension] = stride as isize;
            stride = stride.saturating_mul(self.shape[dimension]);
        };
        match self.order {
            ElementOrder::C => (0..self.shape.len()).rev().for_each(&mut set_stride),
            ElementOrder::Fortran => (0..self.shape.len()).for_each(&mut set_stride),
        }
        strides
    }

    /// Checks that the elements occupy exactly `available_bytes`, and that the size of an element
    /// fits its format.
    fn check(&self, available_bytes: usize) -> Result<(), String> {
        let element_count = if self.shape.contains(&0) {
            Some(0)
        } else {
            self.shape
                .iter()
                .try_fold(1usize, |product, length| product.checked_mul(*length))
        };
        let array_bytes = element_count.and_then(|count| count.checked_mul(self.element_bytes));
        // The lengths of an empty array are checked, too: a reader multiplies them.
        let are_lengths_valid = (self.shape.iter()).all(|length| isize::try_from(*length).is_ok());
        if array_bytes != Some(available_bytes) || !are_lengths_valid || self.element_bytes == 0 {
            return Err(format!(
                "its shape {:?} with {} bytes for an element does not fit its {available_bytes} bytes",
                self.shape, self.element_bytes
            ));
        }
        let format = self.format.to_string_lossy();
        let format = format.strip_prefix('@').unwrap_or(&format);
        let native_format = NATIVE_FORMATS
            .iter()
            .find(|(formats, _)| format.len() == 1 && formats.contains(format));
        if native_format.is_some_and(|(_, native_bytes)| *native_bytes != self.element_bytes) {
            return Err(format!(
                "an element of format '{format}' does not have {} bytes",
                self.element_bytes
            ));
        }
        Ok(())
    }
}

/// Reads a little-endian number of at most eight bytes.
fn read_number(bytes: &[u8]) -> usize {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | usize::from(*byte))
}
