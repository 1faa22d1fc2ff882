//! Packs memory for transfer: runs of zeros are replaced by their length.
//!
//! A packed record is a sequence of parts. Each part begins with a head of four bytes: the highest
//! bit is set if the part is all zeros, the other bits are the length of the part. The data follows
//! the head, unless the part is all zeros. A run shorter than [`RUN_BYTES_MIN`] is not a separate
//! part. Data need not be page-aligned, because memory sent by post-copy arrives in pieces of any
//! length.

/// Maximum number of bytes that one record may contain in unpacked form.
pub(super) const PLAIN_BYTES_MAX: usize = 256 << 10;
/// Minimum length of a run of zeros that is replaced. Shorter runs are sent unchanged.
pub(super) const RUN_BYTES_MIN: usize = 256;
/// Length of the blocks in which zeros are searched. Every run of [`RUN_BYTES_MIN`] bytes contains
/// at least one complete block, regardless of the start of the run.
const BLOCK_BYTES: usize = RUN_BYTES_MIN / 2;
/// Number of bytes of a block that are checked first. In most blocks some of these bytes differ
/// from zero.
const FIRST_CHECK_BYTES: usize = 8;
/// Length of a part's head in bytes. A record is at most this much longer than its unpacked data.
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
    /// Returns the length of the unpacked part in bytes.
    pub(super) fn unpacked_len(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Zeros(count) => *count,
        }
    }
}

/// Packs the data in `buffer` in place. The data must start after the first [`PART_HEAD_BYTES`]
/// bytes. Returns the length of the record in bytes, including heads.
pub(super) fn pack(buffer: &mut [u8]) -> usize {
    let buffer_end = buffer.len();
    assert!(
        buffer_end <= PART_HEAD_BYTES + PLAIN_BYTES_MAX,
        "callers split their data"
    );
    let (mut unread_start, mut packed_len) = (PART_HEAD_BYTES, 0);
    while unread_start < buffer_end {
        let (run_start, run_end) = find_run(&buffer[unread_start..])
            .map_or((buffer_end, buffer_end), |(start, run_end)| {
                (unread_start + start, unread_start + run_end)
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
/// there is no such run.
fn find_run(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut search_start = 0;
    for (block_index, block) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
        let block_start = block_index * BLOCK_BYTES;
        if block_start < search_start || !is_zero(&block[..FIRST_CHECK_BYTES]) || !is_zero(block) {
            continue;
        }
        let preceding_zero_count = bytes[search_start..block_start]
            .iter()
            .rev()
            .take_while(|byte| **byte == 0)
            .count();
        let run_end = block_start + leading_zero_count(&bytes[block_start..]);
        if run_end - (block_start - preceding_zero_count) >= RUN_BYTES_MIN {
            return Some((block_start - preceding_zero_count, run_end));
        }
        search_start = run_end;
    }
    None
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |bits, byte| bits | byte) == 0
}

fn leading_zero_count(bytes: &[u8]) -> usize {
    let zero_block_bytes = bytes
        .chunks_exact(BLOCK_BYTES)
        .take_while(|block| is_zero(block))
        .count()
        * BLOCK_BYTES;
    zero_block_bytes
        + bytes[zero_block_bytes..]
            .iter()
            .take_while(|byte| **byte == 0)
            .count()
}

/// Iterates over the parts of a record. For a malformed record, the last item is an error.
pub(super) fn parts(
    mut packed_record: &[u8],
) -> impl Iterator<Item = Result<Part<'_>, MalformedRecord>> {
    let mut remaining_bytes = PLAIN_BYTES_MAX;
    std::iter::from_fn(move || {
        if packed_record.is_empty() {
            return None;
        }
        let part =
            first_part(packed_record).filter(|(part, _)| part.unpacked_len() <= remaining_bytes);
        packed_record = part.map_or(&[], |(_, rest)| rest);
        remaining_bytes -= part.map_or(0, |(part, _)| part.unpacked_len());
        Some(part.map(|(part, _)| part).ok_or(MalformedRecord))
    })
}

/// Error: [`pack`] cannot have produced the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedRecord;

fn first_part(packed_record: &[u8]) -> Option<(Part<'_>, &[u8])> {
    let (head, rest) = packed_record.split_first_chunk::<PART_HEAD_BYTES>()?;
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

    fn unpack_to_vec(packed_record: &[u8]) -> Result<Vec<u8>, MalformedRecord> {
        let mut data = Vec::new();
        for part in parts(packed_record) {
            match part? {
                Part::Bytes(bytes) => data.extend_from_slice(bytes),
                Part::Zeros(count) => data.resize(data.len() + count, 0),
            }
        }
        Ok(data)
    }

    /// Returns the lengths of all runs of at least [`RUN_BYTES_MIN`] zeros, found byte by byte.
    fn long_run_lengths(plain_data: &[u8]) -> Vec<usize> {
        plain_data
            .split(|byte| *byte != 0)
            .map(<[u8]>::len)
            .filter(|run_bytes| *run_bytes >= RUN_BYTES_MIN)
            .collect()
    }

    /// Generates data in which stretches of zeros and stretches of another byte follow each other.
    /// The lengths of the stretches are close to the limits of the format.
    fn mixed_data() -> impl Strategy<Value = Vec<u8>> {
        let length_near_limit = prop_oneof![
            0..4usize,
            120..136usize,
            250..262usize,
            380..390usize,
            4090..4100usize
        ];
        let stretch = (any::<bool>(), length_near_limit, 1..=255u8);
        proptest::collection::vec(stretch, 0..24).prop_map(|stretches| {
            stretches
                .iter()
                .flat_map(|(is_zeros, length, byte)| {
                    vec![if *is_zeros { 0 } else { *byte }; *length]
                })
                .collect()
        })
    }

    proptest! {
        /// Unpacking restores the data. Exactly the runs of at least [`RUN_BYTES_MIN`] zeros are
        /// replaced.
        #[test]
        fn unpack_restores_data_and_long_runs_are_packed(plain_data in mixed_data()) {
            let packed_record = pack_to_vec(&plain_data);
            prop_assert_eq!(unpack_to_vec(&packed_record), Ok(plain_data.clone()));
            prop_assert!(packed_record.len() <= plain_data.len() + PART_HEAD_BYTES);
            let packed_run_lengths: Vec<usize> = parts(&packed_record)
                .filter_map(|part| if let Ok(Part::Zeros(count)) = part { Some(count) } else { None })
                .collect();
            prop_assert_eq!(packed_run_lengths, long_run_lengths(&plain_data));
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
        let packed_record = pack_to_vec(&[&[7; 300][..], &[0; 300], &[7; 300]].concat());
        let part_boundaries = [
            0,
            PART_HEAD_BYTES + 300,
            2 * PART_HEAD_BYTES + 300,
            packed_record.len(),
        ];
        for length in 0..=packed_record.len() {
            assert_eq!(
                unpack_to_vec(&packed_record[..length]).is_ok(),
                part_boundaries.contains(&length),
                "{length}"
            );
        }
    }
}
