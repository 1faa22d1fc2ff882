//! Packs memory for transfer: runs of zeros are replaced by their length.
//!
//! A packed record is a sequence of parts. Each part has a head of four bytes: its length, and in
//! the highest bit whether the part is all zeros. The data follows the head unless it is all zeros.
//! Runs shorter than [`RUN_BYTES_MIN`] do not get a part of their own. Data need not be
//! page-aligned: memory sent by post-copy arrives in pieces of any length.

/// Maximum number of bytes packed into one record, and maximum that unpacking a record may yield.
pub(super) const PLAIN_BYTES_MAX: usize = 256 << 10;
/// Length of the shortest run of zeros that is replaced. Shorter runs are sent unchanged.
pub(super) const RUN_BYTES_MIN: usize = 256;
/// Unit in which zeros are searched. Every run of [`RUN_BYTES_MIN`] contains one complete block,
/// wherever the run begins.
const BLOCK_BYTES: usize = RUN_BYTES_MIN / 2;
/// Bytes of a block that are checked first: they differ from zero in most blocks.
const FIRST_CHECK_BYTES: usize = 8;
/// Length of a part's head. A record is at most this much longer than its data.
pub(super) const HEAD_BYTES: usize = 4;
/// Flag in the head: the part is all zeros, and no data follows.
const ZEROS: u32 = 1 << 31;

/// A part of a packed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Data that is not compressed.
    Bytes(&'a [u8]),
    /// The number of zeros.
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

/// Packs the data in `buffer` after the first [`HEAD_BYTES`] in place. Returns the length of the
/// record, heads included.
pub(super) fn pack(buffer: &mut [u8]) -> usize {
    let end = buffer.len();
    assert!(
        end <= HEAD_BYTES + PLAIN_BYTES_MAX,
        "whoever packs cuts what is packed"
    );
    let (mut from, mut packed) = (HEAD_BYTES, 0);
    while from < end {
        let (run_start, run_end) = next_run(&buffer[from..])
            .map_or((end, end), |(begin, run_end)| {
                (from + begin, from + run_end)
            });
        if run_start > from {
            // Packed output never outgrows the input consumed, so the head fits before the data.
            put_head(buffer, packed, run_start - from, 0);
            buffer.copy_within(from..run_start, packed + HEAD_BYTES);
            packed += HEAD_BYTES + run_start - from;
        }
        if run_end > run_start {
            put_head(buffer, packed, run_end - run_start, ZEROS);
            packed += HEAD_BYTES;
        }
        from = run_end;
    }
    packed
}

fn put_head(buffer: &mut [u8], at: usize, length: usize, kind: u32) {
    // The length is far below the flag bit.
    buffer[at..at + HEAD_BYTES].copy_from_slice(&(length as u32 | kind).to_le_bytes());
}

/// Returns the start and end of the first run of at least [`RUN_BYTES_MIN`] zeros.
fn next_run(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut searched_to = 0;
    for (number, block) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
        let at = number * BLOCK_BYTES;
        if at < searched_to || !is_zero(&block[..FIRST_CHECK_BYTES]) || !is_zero(block) {
            continue;
        }
        let before = bytes[searched_to..at]
            .iter()
            .rev()
            .take_while(|byte| **byte == 0)
            .count();
        let after = at + leading_zeros(&bytes[at..]);
        if after - (at - before) >= RUN_BYTES_MIN {
            return Some((at - before, after));
        }
        searched_to = after;
    }
    None
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().fold(0, |all, byte| all | byte) == 0
}

fn leading_zeros(bytes: &[u8]) -> usize {
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

/// Iterates over the parts of a record. A malformed record ends with an error.
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

/// The record was not made by [`pack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedRecord;

fn first_part(packed: &[u8]) -> Option<(Part<'_>, &[u8])> {
    let (head, rest) = packed.split_first_chunk::<HEAD_BYTES>()?;
    let head = u32::from_le_bytes(*head);
    let length = usize::try_from(head & !ZEROS).ok()?;
    if head & ZEROS != 0 {
        return Some((Part::Zeros(length), rest));
    }
    let (bytes, rest) = rest.split_at_checked(length)?;
    Some((Part::Bytes(bytes), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(plain: &[u8]) -> Vec<u8> {
        let mut room = [&[0xee; HEAD_BYTES][..], plain].concat();
        let length = pack(&mut room);
        room.truncate(length);
        room
    }

    fn unpacked(packed: &[u8]) -> Result<Vec<u8>, MalformedRecord> {
        let mut plain = Vec::new();
        for part in parts(packed) {
            match part? {
                Part::Bytes(bytes) => plain.extend_from_slice(bytes),
                Part::Zeros(count) => plain.resize(plain.len() + count, 0),
            }
        }
        Ok(plain)
    }

    /// Returns the lengths of all long runs of zeros, counted byte by byte.
    fn runs(plain: &[u8]) -> Vec<usize> {
        plain
            .split(|byte| *byte != 0)
            .map(<[u8]>::len)
            .filter(|run| *run >= RUN_BYTES_MIN)
            .collect()
    }

    /// Generates stretches of zeros and other bytes with lengths around the limits.
    fn mixtures() -> impl Strategy<Value = Vec<u8>> {
        let near = prop_oneof![
            0..4usize,
            120..136usize,
            250..262usize,
            380..390usize,
            4090..4100usize
        ];
        let stretch = (any::<bool>(), near, 1..=255u8);
        proptest::collection::vec(stretch, 0..24).prop_map(|all| {
            all.iter()
                .flat_map(|(zeros, length, byte)| vec![if *zeros { 0 } else { *byte }; *length])
                .collect()
        })
    }

    proptest! {
        /// Unpacking restores the data, and exactly the long runs of zeros are replaced.
        #[test]
        fn unpack_restores_data_and_long_runs_are_packed(plain in mixtures()) {
            let packed = packed(&plain);
            prop_assert_eq!(unpacked(&packed), Ok(plain.clone()));
            prop_assert!(packed.len() <= plain.len() + HEAD_BYTES);
            let counted: Vec<usize> = parts(&packed)
                .filter_map(|part| if let Ok(Part::Zeros(count)) = part { Some(count) } else { None })
                .collect();
            prop_assert_eq!(counted, runs(&plain));
        }

        /// Arbitrary bytes yield an error or end; they are never read beyond their end.
        #[test]
        fn arbitrary_bytes_never_read_out_of_bounds(bytes: Vec<u8>) {
            // Each part takes at least its head.
            prop_assert!(parts(&bytes).count() <= bytes.len());
        }
    }

    #[test]
    fn only_zeros_become_one_head() {
        assert_eq!(packed(&[0; 1 << 18]).len(), HEAD_BYTES);
        assert_eq!(packed(&[]), b"");
        assert_eq!(
            packed(&[0; RUN_BYTES_MIN - 1]).len(),
            HEAD_BYTES + RUN_BYTES_MIN - 1
        );
        assert_eq!(
            parts(&packed(&[0; 1 << 18])).next(),
            Some(Ok(Part::Zeros(1 << 18)))
        );
    }

    /// A record that would unpack to more than [`PLAIN_BYTES_MAX`] is malformed.
    #[test]
    fn oversized_record_is_malformed() {
        let zeros = |count: usize| (count as u32 | ZEROS).to_le_bytes();
        assert!(unpacked(&zeros(PLAIN_BYTES_MAX)).is_ok());
        assert_eq!(unpacked(&zeros(PLAIN_BYTES_MAX + 1)), Err(MalformedRecord));
        assert_eq!(
            unpacked(&[zeros(PLAIN_BYTES_MAX), zeros(1)].concat()),
            Err(MalformedRecord)
        );
    }

    #[test]
    fn truncated_record_is_malformed() {
        let packed = packed(&[&[7; 300][..], &[0; 300], &[7; 300]].concat());
        let ends = [0, HEAD_BYTES + 300, 2 * HEAD_BYTES + 300, packed.len()];
        for cut in 0..=packed.len() {
            assert_eq!(
                unpacked(&packed[..cut]).is_ok(),
                ends.contains(&cut),
                "{cut}"
            );
        }
    }
}
