//! A pool of large message buffers. Buffers are reused because the first write to fresh memory
//! costs several times as much as the copy of a message into it.
//!
//! The process has one pool of bounded size. If the pool is locked, a thread does not wait: it
//! allocates or frees its buffer directly. So a forked child never waits for a lock that is held by
//! a thread of its parent.

use bytes::Bytes;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Minimum capacity of a pooled buffer. Smaller buffers are allocated and freed by the allocator.
/// Larger buffers are pooled because the allocator returns them to the system when the end of its
/// heap is free, and the next message would cause page faults for the same pages again.
pub const POOLED_BYTES_MIN: usize = 64 << 10;
/// Maximum total capacity of the pooled buffers.
pub const POOL_BYTES_MAX: usize = 96 << 20;
/// Maximum number of pooled buffers.
const BUFFERS_MAX: usize = 64;

static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn pool() -> Option<MutexGuard<'static, Vec<Vec<u8>>>> {
    match POOL.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Removes a buffer with at least this capacity from the pool: the largest one if `largest` is
/// true, otherwise the smallest one. Allocates a buffer if the pool has none.
fn take_or_allocate(capacity: usize, largest: bool) -> Vec<u8> {
    let kept = pool().and_then(|mut pool| {
        let fits = pool
            .iter()
            .map(Vec::capacity)
            .enumerate()
            .filter(|(_, kept)| *kept >= capacity);
        let best = if largest {
            fits.max_by_key(|(_, kept)| *kept)
        } else {
            fits.min_by_key(|(_, kept)| *kept)
        };
        Some(pool.swap_remove(best?.0))
    });
    kept.unwrap_or_else(|| Vec::with_capacity(capacity))
}

/// Puts a buffer into the pool. If the pool is full, the smallest of the pooled buffers and this
/// buffer is freed.
pub fn recycle(mut buffer: Vec<u8>) {
    if buffer.capacity() < POOLED_BYTES_MIN || buffer.capacity() > POOL_BYTES_MAX {
        return;
    }
    buffer.clear();
    let Some(mut pool) = pool() else { return };
    if pool.len() >= BUFFERS_MAX {
        let smallest = pool
            .iter()
            .map(Vec::capacity)
            .enumerate()
            .min_by_key(|(_, kept)| *kept);
        match smallest {
            Some((index, kept)) if kept < buffer.capacity() => drop(pool.swap_remove(index)),
            _ => return,
        }
    }
    let kept: usize = pool.iter().map(Vec::capacity).sum();
    if kept + buffer.capacity() <= POOL_BYTES_MAX {
        pool.push(buffer);
    }
}

/// Reserves space for `more` bytes after the buffer's content; a large replacement buffer comes
/// from the pool.
pub fn reserve(buffer: &mut Vec<u8>, more: usize) {
    reserve_from_pool(buffer, more, false);
}

/// Reserves space as [`reserve`] does, for a buffer that is filled in pieces and will grow further:
/// prefers the largest pooled buffer, so that the content is copied less often.
pub fn reserve_for_growth(buffer: &mut Vec<u8>, more: usize) {
    reserve_from_pool(buffer, more, true);
}

fn reserve_from_pool(buffer: &mut Vec<u8>, more: usize, growing: bool) {
    let wanted = buffer.len() + more;
    if wanted <= buffer.capacity() {
        return;
    }
    if wanted < POOLED_BYTES_MIN {
        return buffer.reserve(more);
    }
    // At least one more piece will follow the first piece.
    let least = if growing { 2 * POOLED_BYTES_MIN } else { 0 };
    let mut larger = take_or_allocate(
        wanted.max(buffer.capacity().saturating_mul(2)).max(least),
        growing,
    );
    larger.extend_from_slice(buffer);
    recycle(std::mem::replace(buffer, larger));
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

/// Makes a finished buffer immutable and shareable. A large buffer returns to the pool when its
/// last reader drops it.
pub fn freeze(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < POOLED_BYTES_MIN {
        buffer.into()
    } else {
        Bytes::from_owner(PooledBuffer(buffer))
    }
}

/// Frees all pooled buffers, so that a dump does not contain them.
pub fn clear() {
    drop(pool().map(|mut pool| std::mem::take(&mut *pool)));
}

#[cfg(test)]
mod tests {
    use super::*;

    // One test, because the process has only one pool.
    /// The pool reuses large buffers within its limits and never holds small ones.
    #[test]
    fn pool_reuses_large_buffers_within_its_limits() {
        let mut buffer = Vec::new();
        reserve(&mut buffer, 1 << 20);
        let place = buffer.as_ptr();
        buffer.extend_from_slice(&[1; 1000]);
        let sealed = freeze(buffer);
        let second = sealed.clone();
        drop(sealed);
        assert_eq!(second[..], [1; 1000]);
        drop(second);
        let mut again = vec![7; 10];
        reserve(&mut again, 1 << 19);
        assert_eq!(
            (again.as_ptr(), &again[..]),
            (place, &[7; 10][..]),
            "the same memory"
        );
        for _ in 0..2 * BUFFERS_MAX {
            recycle(Vec::with_capacity(POOLED_BYTES_MIN));
            recycle(Vec::with_capacity(10));
            recycle(Vec::with_capacity(POOL_BYTES_MAX / 4));
        }
        let kept: Vec<usize> = pool().expect("free").iter().map(Vec::capacity).collect();
        assert!(kept.len() <= BUFFERS_MAX && kept.iter().sum::<usize>() <= POOL_BYTES_MAX);
        assert!(kept.iter().all(|capacity| *capacity >= POOLED_BYTES_MIN));
        clear();
        assert!(pool().expect("free").is_empty());
        for _ in 0..2 * BUFFERS_MAX {
            recycle(Vec::with_capacity(POOLED_BYTES_MIN));
        }
        let large = Vec::with_capacity(1 << 20);
        let (place, mut buffer) = (large.as_ptr(), Vec::new());
        recycle(large);
        reserve(&mut buffer, 1 << 20);
        assert_eq!(
            (buffer.as_ptr(), pool().expect("free").len()),
            (place, BUFFERS_MAX - 1),
            "many small ones keep no large one out"
        );
        drop(buffer);
        clear();
        // A message of two pieces uses one buffer from its first piece on, and the next message
        // uses the same buffer.
        let places: Vec<*const u8> = (0..3)
            .map(|_| {
                let mut buffer = Vec::new();
                for piece in [64 << 10, 20] {
                    reserve_for_growth(&mut buffer, piece);
                    buffer.resize(buffer.len() + piece, 0);
                }
                freeze(buffer).as_ptr()
            })
            .collect();
        assert!(
            places.iter().all(|place| *place == places[0]),
            "the same memory"
        );
        assert_eq!(pool().expect("free").len(), 1);
    }
}
