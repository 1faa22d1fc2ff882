//! Memory on its way, in which runs of zeros are only counted.
//!
//! What is packed is a sequence of parts, each behind a head of four bytes: how many bytes it is, and in the highest bit whether
//! these follow or are all zero. A run that is shorter than [`RUN_BYTES_MIN`] is not worth a part. Nothing has to begin at a page:
//! memory that follows a task comes in pieces of any length.

/// Bytes that are packed at once at most, and what unpacking can make of a record.
pub(super) const PLAIN_BYTES_MAX: usize = 256 << 10;
/// Shorter runs of zeros go as they are.
pub(super) const RUN_BYTES_MIN: usize = 256;
/// What is looked at at once. Each run that counts has one such block in it, wherever it begins.
const BLOCK_BYTES: usize = RUN_BYTES_MIN / 2;
/// So much of a block is looked at first: most have something else there.
const GLANCE_BYTES: usize = 8;
/// In front of each part; so much longer is what is packed than what it was, at most.
pub(super) const HEAD_BYTES: usize = 4;
/// In the head: the bytes are zeros and do not follow.
const ZEROS: u32 = 1 << 31;

/// A part of what was packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Bytes as they are.
    Bytes(&'a [u8]),
    /// So many zeros.
    Zeros(usize),
}

impl Part<'_> {
    /// How many bytes it stands for.
    pub(super) fn length(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Zeros(count) => *count,
        }
    }
}

/// Packs what lies in `room` behind the first [`HEAD_BYTES`], where it lies; how many bytes it has become, with these.
pub(super) fn pack(room: &mut [u8]) -> usize {
    let end = room.len();
    assert!(
        end <= HEAD_BYTES + PLAIN_BYTES_MAX,
        "whoever packs cuts what is packed"
    );
    let (mut from, mut packed) = (HEAD_BYTES, 0);
    while from < end {
        let (zeros, after) = next_run(&room[from..])
            .map_or((end, end), |(begin, after)| (from + begin, from + after));
        if zeros > from {
            // What was packed before has become shorter than it was: there is room for the head.
            put_head(room, packed, zeros - from, 0);
            room.copy_within(from..zeros, packed + HEAD_BYTES);
            packed += HEAD_BYTES + zeros - from;
        }
        if after > zeros {
            put_head(room, packed, after - zeros, ZEROS);
            packed += HEAD_BYTES;
        }
        from = after;
    }
    packed
}

fn put_head(room: &mut [u8], at: usize, length: usize, kind: u32) {
    // It is far below the bit of the kind.
    room[at..at + HEAD_BYTES].copy_from_slice(&(length as u32 | kind).to_le_bytes());
}

/// Where the first run of zeros that is long enough begins, and where it ends.
fn next_run(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut looked_at = 0;
    for (number, block) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
        let at = number * BLOCK_BYTES;
        if at < looked_at || !is_zero(&block[..GLANCE_BYTES]) || !is_zero(block) {
            continue;
        }
        let before = bytes[looked_at..at]
            .iter()
            .rev()
            .take_while(|byte| **byte == 0)
            .count();
        let after = at + leading_zeros(&bytes[at..]);
        if after - (at - before) >= RUN_BYTES_MIN {
            return Some((at - before, after));
        }
        looked_at = after;
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

/// The parts of what was packed; what was not packed so ends with an error.
pub(super) fn parts(mut packed: &[u8]) -> impl Iterator<Item = Result<Part<'_>, Malformed>> {
    let mut room = PLAIN_BYTES_MAX;
    std::iter::from_fn(move || {
        if packed.is_empty() {
            return None;
        }
        let part = first_part(packed).filter(|(part, _)| part.length() <= room);
        packed = part.map_or(&[], |(_, rest)| rest);
        room -= part.map_or(0, |(part, _)| part.length());
        Some(part.map(|(part, _)| part).ok_or(Malformed))
    })
}

/// It was not packed by [`pack`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

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

    fn unpacked(packed: &[u8]) -> Result<Vec<u8>, Malformed> {
        let mut plain = Vec::new();
        for part in parts(packed) {
            match part? {
                Part::Bytes(bytes) => plain.extend_from_slice(bytes),
                Part::Zeros(count) => plain.resize(plain.len() + count, 0),
            }
        }
        Ok(plain)
    }

    /// The lengths of all runs of zeros, counted byte by byte.
    fn runs(plain: &[u8]) -> Vec<usize> {
        plain
            .split(|byte| *byte != 0)
            .map(<[u8]>::len)
            .filter(|run| *run >= RUN_BYTES_MIN)
            .collect()
    }

    /// Stretches of zeros and of something else, of lengths around those that matter.
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
        #[test]
        fn whatever_is_packed_is_unpacked_as_it_was_and_each_long_run_of_zeros_is_counted(plain in mixtures()) {
            let packed = packed(&plain);
            prop_assert_eq!(unpacked(&packed), Ok(plain.clone()));
            prop_assert!(packed.len() <= plain.len() + HEAD_BYTES);
            let counted: Vec<usize> = parts(&packed)
                .filter_map(|part| if let Ok(Part::Zeros(count)) = part { Some(count) } else { None })
                .collect();
            prop_assert_eq!(counted, runs(&plain));
        }

        #[test]
        fn what_was_not_packed_is_an_error_or_ends_and_never_reads_beyond_its_end(bytes: Vec<u8>) {
            // Each part takes its head at least.
            prop_assert!(parts(&bytes).count() <= bytes.len());
        }
    }

    #[test]
    fn zeros_alone_become_one_head_and_nothing_becomes_nothing() {
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

    #[test]
    fn a_record_cannot_become_more_than_is_packed_at_once() {
        let zeros = |count: usize| (count as u32 | ZEROS).to_le_bytes();
        assert!(unpacked(&zeros(PLAIN_BYTES_MAX)).is_ok());
        assert_eq!(unpacked(&zeros(PLAIN_BYTES_MAX + 1)), Err(Malformed));
        assert_eq!(
            unpacked(&[zeros(PLAIN_BYTES_MAX), zeros(1)].concat()),
            Err(Malformed)
        );
    }

    #[test]
    fn what_is_cut_off_is_told() {
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
