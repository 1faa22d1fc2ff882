//! Runs of zeros in the content of files.

/// Size in bytes of the blocks in which zeros are detected: one memory page.
const BLOCK_BYTES: usize = 4096;
const ZERO_BLOCK: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// Splits a piece of a file into runs of blocks. The bool is true for a run of zero blocks, and
/// false for a run of blocks that all contain other bytes than zero.
pub(crate) fn split_zero_runs(piece: &[u8]) -> impl Iterator<Item = (bool, &[u8])> {
    let is_zero = |block: &[u8]| block == &ZERO_BLOCK[..block.len()];
    let mut rest = piece;
    std::iter::from_fn(move || {
        let is_zero_run = is_zero(rest.chunks(BLOCK_BYTES).next()?);
        let block_count = rest
            .chunks(BLOCK_BYTES)
            .take_while(|block| is_zero(block) == is_zero_run)
            .count();
        let (run, remaining) = rest.split_at((block_count * BLOCK_BYTES).min(rest.len()));
        rest = remaining;
        Some((is_zero_run, run))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_runs_are_found_by_blocks() {
        let block = |byte: u8| vec![byte; BLOCK_BYTES];
        let piece = [block(0), block(0), block(1), block(0), vec![0; 5]].concat();
        let runs: Vec<(bool, usize)> = split_zero_runs(&piece)
            .map(|(is_zero_run, run)| (is_zero_run, run.len()))
            .collect();
        assert_eq!(
            runs,
            [
                (true, 2 * BLOCK_BYTES),
                (false, BLOCK_BYTES),
                (true, BLOCK_BYTES + 5)
            ]
        );
        assert_eq!(split_zero_runs(&[]).count(), 0);
        let almost_zero_block = [vec![0; BLOCK_BYTES - 1], vec![1]].concat();
        assert_eq!(
            split_zero_runs(&almost_zero_block)
                .map(|(is_zero_run, _)| is_zero_run)
                .collect::<Vec<_>>(),
            [false]
        );
    }
}
