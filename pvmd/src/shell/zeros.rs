//! Packs memory for transfer: runs of zeros are replaced by their length.
//!
//! A packed record is a sequence of parts. Each part begins with a head of four bytes: the highest
//! bit is set if the part is all zeros, the other bits are the part's length. The data follows the
//! head, unless the part is all zeros. A run shorter than [`RUN_BYTES_MIN`] is not a separate part.
//! Data need not be page-aligned, because memory sent by post-copy arrives in pieces of any length.

/// Maximum number of bytes that one record may contain in unpacked form.
pub(super) const PLAIN_BYTES_MAX: usize = 256 << 10;
/// Minimum length of a run of zeros that is replaced. Shorter runs are sent unchanged.
pub(super) const RUN_BYTES_MIN: usize = 256;
/// Unit in which zeros are searched. Every run of [`RUN_BYTES_MIN`] bytes contains at least one
/// complete block, regardless of its start.
const BLOCK_BYTES: usize = RUN_BYTES_MIN / 2;
/// Number of bytes of a block that are checked first. In most blocks they differ from zero.
const FIRST_CHECK_BYTES: usize = 8;
/// Length of a part's head. A record is at most this much longer than its unpacked data.
pub(super) const PART_HEAD_BYTES: usize = 4;
/// Flag in the head: the part is all zeros, and no data follows the head.
const ZEROS_FLAG: u32 = 1 << 31;

/// A part of a packed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Data that is contained unchanged.
    Bytes(&'a [u8]),
    /// A run of zeros; the value is its length in bytes.
    Zeros(usize),
}

impl Part<'_> {
    /// Returns the length of the unpacked part.
    pub(super) fn unpacked_len(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Zeros(count) => *count,
        }
    }
}

/// Packs the data in `buffer` in place. The data must start after the first [`PART_HEAD_BYTES`]
/// bytes. Returns the length of the record, including heads.
pub(super) fn pack(buffer: &mut [u8]) -> usize {
    let end = buffer.len();
    assert!(
        end <= PART_HEAD_BYTES + PLAIN_BYTES_MAX,
        "callers split their data"
    );
    let (mut unread_start, mut packed_len) = (PART_HEAD_BYTES, 0);
    while unread_start < end {
        let (run_start, run_end) = find_run(&buffer[unread_start..])
            .map_or((end, end), |(begin, run_end)| {
                (unread_start + begin, unread_start + run_end)
            });
        if run_start > unread_start {
            // The packed output is never longer than the data that was already read, so the head
            // fits before the remaining data.
            write_head(buffer, packed_len, run_start - unread_start, 0);
            buffer.copy_within(unread_start..run_start, packed_len + PART_HEAD_BYTES);
            packed_len += PART_HEAD_BYTES + run_start - unread_start;
        }
        if run_end > run_start {
            write_head(buffer, packed_len, run_end - run_start, ZEROS_FLAG);
            packed_len += PART_HEAD_BYTES;
        }
        unread_start = run_end;
    }
    packed_len
}

fn write_head(buffer: &mut [u8], offset: usize, length: usize, flag: u32) {
    // The length is far below the value of the flag bit.
    buffer[offset..offset + PART_HEAD_BYTES].copy_from_slice(&(length as u32 | flag).to_le_bytes());
}

/// Returns the start and the end of the first run of at least [`RUN_BYTES_MIN`] zeros; `None` if
/// there is none.
fn find_run(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut searched_to = 0;
    for (block_index, block) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
        let block_start = block_index * BLOCK_BYTES;
        if block_start < searched_to || !is_zero(&block[..FIRST_CHECK_BYTES]) || !is_zero(block) {
            continue;
        }
        let zeros_before = bytes[searched_to..block_start]
            .iter()
            .rev()
            .take_while(|byte| **byte == 0)
            .count();
        let run_end = block_start + leading_zero_count(&bytes[block_start..]);
        if run_end - (block_start - zeros_before) >= RUN_BYTES_MIN {
            return Some((block_start - zeros_before, run_end));
        }
        searched_to = run_end;
    }
    None
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, byte| all | byte) == 0
}

fn leading_zero_count(bytes: &[u8]) -> usize {
    let blocks = bytes
        .chunks_exact(BLOCK_BYTES)
        .take_while(|block| is_zero(block))
        .count()
        * BLOCK_BYTES;
    blocks
        + bytes[blocks..]
            .iter()
            .take_while(|byte| **byte == 0)
            .count()
}

/// Iterates over the parts of a record. For a malformed record, the last item is an error.
pub(super) fn parts(mut packed: &[u8]) -> impl Iterator<Item = Result<Part<'_>, MalformedRecord>> {
    let mut remaining = PLAIN_BYTES_MAX;
    std::iter::from_fn(move || {
        if packed.is_empty() {
            return None;
        }
        let part = first_part(packed).filter(|(part, _)| part.unpacked_len() <= remaining);
        packed = part.map_or(&[], |(_, rest)| rest);
        remaining -= part.map_or(0, |(part, _)| part.unpacked_len());
        Some(part.map(|(part, _)| part).ok_or(MalformedRecord))
    })
}

/// Error: [`pack`] cannot have produced the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedRecord;

fn first_part(packed: &[u8]) -> Option<(Part<'_>, &[u8])> {
    let (head, rest) = packed.split_first_chunk::<PART_HEAD_BYTES>()?;
    let head = u32::from_le_bytes(*head);
    let length = usize::try_from(head & !ZEROS_FLAG).ok()?;
    if head & ZEROS_FLAG != 0 {
        return Some((Part::Zeros(length), rest));
    }
    let (bytes, rest) = rest.split_at_checked(length)?;
    Some((Part::Bytes(bytes), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pack_to_vec(data: &[u8]) -> Vec<u8> {
        let mut buffer = [&[0xee; PART_HEAD_BYTES][..], data].concat();
        let length = pack(&mut buffer);
        buffer.truncate(length);
        buffer
    }

    fn unpack_to_vec(packed: &[u8]) -> Result<Vec<u8>, MalformedRecord> {
        let mut data = Vec::new();
        for part in parts(packed) {
            match part? {
                Part::Bytes(bytes) => data.extend_from_slice(bytes),
                Part::Zeros(count) => data.resize(data.len() + count, 0),
            }
        }
        Ok(data)
    }

    /// Returns the lengths of all runs of at least [`RUN_BYTES_MIN`] zeros. Counts byte by byte.
    fn long_run_lengths(plain: &[u8]) -> Vec<usize> {
        plain
            .split(|byte| *byte != 0)
            .map(<[u8]>::len)
            .filter(|run| *run >= RUN_BYTES_MIN)
            .collect()
    }

    /// Generates data of alternating zeros and other bytes, in stretches whose lengths are close to
    /// the limits.
    fn mixed_data() -> impl Strategy<Value = Vec<u8>> {
        let length_near_limit = prop_oneof![
            0..4usize,
            120..136usize,
            250..262usize,
            380..390usize,
            4090..4100usize
        ];
        let stretch = (any::<bool>(), length_near_limit, 1..=255u8);
        proptest::collection::vec(stretch, 0..24).prop_map(|all| {
            all.iter()
                .flat_map(|(zeros, length, byte)| vec![if *zeros { 0 } else { *byte }; *length])
                .collect()
        })
    }

    proptest! {
        /// Unpacking restores the data. Exactly the runs of at least [`RUN_BYTES_MIN`] zeros are
        /// replaced.
        #[test]
        fn unpack_restores_data_and_long_runs_are_packed(plain in mixed_data()) {
            let packed = pack_to_vec(&plain);
            prop_assert_eq!(unpack_to_vec(&packed), Ok(plain.clone()));
            prop_assert!(packed.len() <= plain.len() + PART_HEAD_BYTES);
            let packed_runs: Vec<usize> = parts(&packed)
                .filter_map(|part| if let Ok(Part::Zeros(count)) = part { Some(count) } else { None })
                .collect();
            prop_assert_eq!(packed_runs, long_run_lengths(&plain));
        }

        /// Arbitrary bytes yield parts or an error, and are never read beyond their end.
        #[test]
        fn arbitrary_bytes_never_read_out_of_bounds(bytes: Vec<u8>) {
            // Each part consumes at least its head.
            prop_assert!(parts(&bytes).count() <= bytes.len());
        }
    }

    #[test]
    fn only_zeros_become_one_head() {
        assert_eq!(pack_to_vec(&[0; 1 << 18]).len(), PART_HEAD_BYTES);
        assert_eq!(pack_to_vec(&[]), b"");
        assert_eq!(
            pack_to_vec(&[0; RUN_BYTES_MIN - 1]).len(),
            PART_HEAD_BYTES + RUN_BYTES_MIN - 1
        );
        assert_eq!(
            parts(&pack_to_vec(&[0; 1 << 18])).next(),
            Some(Ok(Part::Zeros(1 << 18)))
        );
    }

    /// A record that would unpack to more than [`PLAIN_BYTES_MAX`] is malformed.
    #[test]
    fn oversized_record_is_malformed() {
        let zeros_head = |count: usize| (count as u32 | ZEROS_FLAG).to_le_bytes();
        assert!(unpack_to_vec(&zeros_head(PLAIN_BYTES_MAX)).is_ok());
        assert_eq!(
            unpack_to_vec(&zeros_head(PLAIN_BYTES_MAX + 1)),
            Err(MalformedRecord)
        );
        assert_eq!(
            unpack_to_vec(&[zeros_head(PLAIN_BYTES_MAX), zeros_head(1)].concat()),
            Err(MalformedRecord)
        );
    }

    #[test]
    fn truncated_record_is_malformed() {
        let packed = pack_to_vec(&[&[7; 300][..], &[0; 300], &[7; 300]].concat());
        let part_boundaries = [
            0,
            PART_HEAD_BYTES + 300,
            2 * PART_HEAD_BYTES + 300,
            packed.len(),
        ];
        for length in 0..=packed.len() {
            assert_eq!(
                unpack_to_vec(&packed[..length]).is_ok(),
                part_boundaries.contains(&length),
                "{length}"
            );
        }
    }
}
