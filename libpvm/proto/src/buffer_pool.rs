//! A pool of large message buffers. Buffers are reused because the first write to newly mapped
//! memory costs several times as much as the copy of a message into the buffer.
//!
//! The process has one pool of bounded size. If the pool is locked, a thread does not wait: it
//! allocates or frees its buffer directly. A forked child therefore never waits for a lock that a
//! thread of its parent had locked.

use bytes::Bytes;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Minimum capacity of a pooled buffer, in bytes. Smaller buffers are allocated and freed by the
/// allocator. The allocator would return larger buffers to the system when the end of its heap is
/// free, and the next message would cause page faults for the same pages again.
pub const POOLED_BYTES_MIN: usize = 64 << 10;
/// Maximum total capacity of the pooled buffers, in bytes.
pub const POOL_BYTES_MAX: usize = 96 << 20;
/// Maximum number of bytes that are allocated in advance for content that a peer has announced.
const EXPECTED_BYTES_MAX: usize = 1 << 20;
/// Maximum number of pooled buffers.
const POOLED_BUFFERS_MAX: usize = 64;

/// The pooled buffers, the longest unused first.
static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn try_lock_pool() -> Option<MutexGuard<'static, Vec<Vec<u8>>>> {
    match POOL.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Removes a buffer with at least this capacity, in bytes, from the pool: the largest one if
/// `prefers_largest` is true, otherwise the smallest one. Returns `None` if the pool has none or is
/// locked.
fn take_pooled(capacity: usize, prefers_largest: bool) -> Option<Vec<u8>> {
    try_lock_pool().and_then(|mut pool| {
        let candidates = pool
            .iter()
            .map(Vec::capacity)
            .enumerate()
            .filter(|(_, candidate)| *candidate >= capacity);
        let chosen_entry = if prefers_largest {
            candidates.max_by_key(|(_, candidate)| *candidate)
        } else {
            candidates.min_by_key(|(_, candidate)| *candidate)
        };
        Some(pool.remove(chosen_entry?.0))
    })
}

/// Returns the capacity of the largest pooled buffer; zero if the pool is empty or locked.
fn largest_pooled_bytes() -> usize {
    try_lock_pool()
        .and_then(|pool| pool.iter().map(Vec::capacity).max())
        .unwrap_or(0)
}

/// As [`take_pooled`], and allocates a buffer if the pool has none or is locked.
fn take_or_allocate(capacity: usize, prefers_largest: bool) -> Vec<u8> {
    take_pooled(capacity, prefers_largest).unwrap_or_else(|| Vec::with_capacity(capacity))
}

/// Puts a buffer into the pool. If the pool already has its maximum number of buffers, the smallest
/// of these and the new buffer is freed. If the capacity of the buffer would raise the total above
/// [`POOL_BYTES_MAX`], the buffers that were not used for the longest time are freed: the sizes of
/// earlier messages leave the pool. The new buffer is freed if the pool is locked, or if its
/// capacity is below [`POOLED_BYTES_MIN`] or above [`POOL_BYTES_MAX`].
pub fn recycle(mut buffer: Vec<u8>) {
    if buffer.capacity() < POOLED_BYTES_MIN || buffer.capacity() > POOL_BYTES_MAX {
        return;
    }
    buffer.clear();
    let Some(mut pool) = try_lock_pool() else {
        return;
    };
    if pool.len() >= POOLED_BUFFERS_MAX {
        let smallest_buffer = pool
            .iter()
            .map(Vec::capacity)
            .enumerate()
            .min_by_key(|(_, pooled_bytes)| *pooled_bytes);
        match smallest_buffer {
            Some((index, pooled_bytes)) if pooled_bytes < buffer.capacity() => {
                drop(pool.remove(index))
            }
            _ => return,
        }
    }
    let mut total_bytes = buffer.capacity() + pool.iter().map(Vec::capacity).sum::<usize>();
    let mut evicted_count = 0;
    while total_bytes > POOL_BYTES_MAX {
        total_bytes -= pool[evicted_count].capacity();
        evicted_count += 1;
    }
    pool.drain(..evicted_count);
    pool.push(buffer);
}

/// Reserves space for `extra_bytes` bytes after the buffer's content. A large replacement buffer
/// comes from the pool.
pub fn reserve(buffer: &mut Vec<u8>, extra_bytes: usize) {
    reserve_from_pool(buffer, extra_bytes, false);
}

/// Reserves space as [`reserve`] does, for a buffer that is filled in pieces and will grow further:
/// prefers the largest pooled buffer, so that the content is copied less often.
pub fn reserve_for_growth(buffer: &mut Vec<u8>, extra_bytes: usize) {
    reserve_from_pool(buffer, extra_bytes, true);
}

/// Reserves space for `extra_bytes` bytes after the content of a buffer that is filled in pieces
/// and should have `expected_bytes` more bytes in the end. The expectation need not be true: memory
/// for bytes that are only expected is taken from the pool, or allocated up to
/// `EXPECTED_BYTES_MAX` more than the largest pooled buffer or the content has.
pub fn reserve_expected(buffer: &mut Vec<u8>, extra_bytes: usize, expected_bytes: usize) {
    let required_bytes = buffer.len() + extra_bytes;
    if required_bytes <= buffer.capacity() {
        return;
    }
    let expected_total = buffer.len().saturating_add(expected_bytes.max(extra_bytes));
    let pooled = if expected_total < POOLED_BYTES_MIN {
        None
    } else {
        take_pooled(expected_total, false)
    };
    // A smaller pooled buffer is not taken. Otherwise, while the buffers of the expected size are
    // in use, every message would outgrow its first buffer, and its content would be copied.
    let mut replacement = pooled.unwrap_or_else(|| {
        let trusted_bytes = EXPECTED_BYTES_MAX + largest_pooled_bytes().max(buffer.len());
        Vec::with_capacity(
            (required_bytes + trusted_bytes)
                .min(expected_total)
                .max(required_bytes),
        )
    });
    replacement.extend_from_slice(buffer);
    recycle(std::mem::replace(buffer, replacement));
}

fn reserve_from_pool(buffer: &mut Vec<u8>, extra_bytes: usize, will_grow: bool) {
    let required_bytes = buffer.len() + extra_bytes;
    if required_bytes <= buffer.capacity() {
        return;
    }
    if required_bytes < POOLED_BYTES_MIN {
        return buffer.reserve(extra_bytes);
    }
    // The content will grow by at least one more piece, so the buffer gets room for the next piece
    // too.
    let capacity_min = if will_grow { 2 * POOLED_BYTES_MIN } else { 0 };
    let mut replacement = take_or_allocate(
        required_bytes
            .max(buffer.capacity().saturating_mul(2))
            .max(capacity_min),
        will_grow,
    );
    replacement.extend_from_slice(buffer);
    recycle(std::mem::replace(buffer, replacement));
}

/// A buffer that returns to the pool when its last reader drops it.
struct PooledBuffer(Vec<u8>);

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        recycle(std::mem::take(&mut self.0));
    }
}

/// Makes a filled buffer immutable and shareable. A large buffer returns to the pool when its last
/// reader drops it.
pub fn freeze(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < POOLED_BYTES_MIN {
        buffer.into()
    } else {
        Bytes::from_owner(PooledBuffer(buffer))
    }
}

/// Frees all pooled buffers, so that a dump does not contain them. Does nothing if the pool is
/// locked.
pub fn clear() {
    drop(try_lock_pool().map(|mut pool| std::mem::take(&mut *pool)));
}

#[cfg(test)]
mod tests {
    use super::*;

    // One test, because the process has only one pool.
    /// The pool reuses large buffers, also for content that grows, and stores no small buffers. It
    /// keeps its limits, prefers large buffers to small ones, and can be cleared.
    #[test]
    fn pool_reuses_large_buffers_within_its_limits() {
        let mut buffer = Vec::new();
        reserve(&mut buffer, 1 << 20);
        let address = buffer.as_ptr();
        buffer.extend_from_slice(&[1; 1000]);
        let frozen_buffer = freeze(buffer);
        let second_reference = frozen_buffer.clone();
        drop(frozen_buffer);
        assert_eq!(second_reference[..], [1; 1000]);
        drop(second_reference);
        let mut reused_buffer = vec![7; 10];
        reserve(&mut reused_buffer, 1 << 19);
        assert_eq!(
            (reused_buffer.as_ptr(), &reused_buffer[..]),
            (address, &[7; 10][..]),
            "the same memory"
        );
        for _ in 0..2 * POOLED_BUFFERS_MAX {
            recycle(Vec::with_capacity(POOLED_BYTES_MIN));
            recycle(Vec::with_capacity(10));
            recycle(Vec::with_capacity(POOL_BYTES_MAX / 4));
        }
        let capacities: Vec<usize> = try_lock_pool()
            .expect("free")
            .iter()
            .map(Vec::capacity)
            .collect();
        assert!(
            capacities.len() <= POOLED_BUFFERS_MAX
                && capacities.iter().sum::<usize>() <= POOL_BYTES_MAX
        );
        assert!(
            capacities
                .iter()
                .all(|capacity| *capacity >= POOLED_BYTES_MIN)
        );
        clear();
        assert!(try_lock_pool().expect("free").is_empty());
        for _ in 0..2 * POOLED_BUFFERS_MAX {
            recycle(Vec::with_capacity(POOLED_BYTES_MIN));
        }
        let large_buffer = Vec::with_capacity(1 << 20);
        let (address, mut buffer) = (large_buffer.as_ptr(), Vec::new());
        recycle(large_buffer);
        reserve(&mut buffer, 1 << 20);
        assert_eq!(
            (buffer.as_ptr(), try_lock_pool().expect("free").len()),
            (address, POOLED_BUFFERS_MAX - 1),
            "many small ones keep no large one out"
        );
        drop(buffer);
        clear();
        // A message of two pieces uses one buffer from its first piece on, and the next message
        // uses the same buffer.
        let addresses: Vec<*const u8> = (0..3)
            .map(|_| {
                let mut buffer = Vec::new();
                for piece_bytes in [64 << 10, 20] {
                    reserve_for_growth(&mut buffer, piece_bytes);
                    buffer.resize(buffer.len() + piece_bytes, 0);
                }
                freeze(buffer).as_ptr()
            })
            .collect();
        assert!(
            addresses.iter().all(|address| *address == addresses[0]),
            "the same memory"
        );
        assert_eq!(try_lock_pool().expect("free").len(), 1);
        clear();
        check_announced_content();
        clear();
    }

    /// Checks the memory for content whose length was announced. The pool is empty at first.
    fn check_announced_content() {
        // Little memory is allocated for content that is only announced. Content that arrives in
        // pieces as announced is then always in the same memory.
        let mut buffer = Vec::new();
        reserve_expected(&mut buffer, 10, usize::MAX);
        assert!((10..=2 * EXPECTED_BYTES_MAX).contains(&buffer.capacity()));
        let content_bytes = 5 * EXPECTED_BYTES_MAX;
        let addresses: Vec<*const u8> = (0..3)
            .map(|_| {
                let mut buffer = Vec::new();
                while buffer.len() < content_bytes {
                    let missing_bytes = content_bytes - buffer.len();
                    reserve_expected(&mut buffer, 1 << 16, missing_bytes + 100);
                    buffer.resize(buffer.len() + (1 << 16), 0);
                }
                freeze(buffer).as_ptr()
            })
            .collect();
        assert_eq!(addresses[1], addresses[2], "the same memory");
        // A message gets its full size at once, even if only smaller buffers are free.
        clear();
        recycle(Vec::with_capacity(content_bytes - EXPECTED_BYTES_MAX));
        let mut buffer = Vec::new();
        reserve_expected(&mut buffer, 10, content_bytes);
        assert_eq!(buffer.capacity(), content_bytes);
        // A buffer that was not used for the longest time leaves the full pool.
        clear();
        for _ in 0..4 {
            recycle(Vec::with_capacity(POOL_BYTES_MAX / 4));
        }
        recycle(Vec::with_capacity(content_bytes));
        let pooled_buffer = take_pooled(content_bytes, false).expect("pooled");
        assert_eq!(pooled_buffer.capacity(), content_bytes);
    }
}
