//! Large buffers are used again: the first touch of fresh memory costs several times what copying into it does.
//!
//! The pool belongs to the process and is bounded. Whoever finds it busy does without it, so a forked child never waits for a
//! thread that it does not have.

use bytes::Bytes;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Buffers smaller than this are left to the allocator. It gives memory from here on back to the system, piece by piece, as
/// soon as it is free at the end of the heap, and the next message would touch it for the first time again.
pub const POOLED_BYTES_MIN: usize = 64 << 10;
/// Bytes that the pool keeps at most.
pub const POOL_BYTES_MAX: usize = 96 << 20;
/// Buffers that the pool keeps at most.
const BUFFERS_MAX: usize = 64;

static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

fn pool() -> Option<MutexGuard<'static, Vec<Vec<u8>>>> {
    match POOL.try_lock() {
        Ok(pool) => Some(pool),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A kept buffer with this capacity, the smallest or the largest of them, or a fresh one.
fn take(capacity: usize, largest: bool) -> Vec<u8> {
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

/// Gives a buffer back. When there are enough already the smallest goes.
pub fn give(mut buffer: Vec<u8>) {
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
            Some((place, kept)) if kept < buffer.capacity() => drop(pool.swap_remove(place)),
            _ => return,
        }
    }
    let kept: usize = pool.iter().map(Vec::capacity).sum();
    if kept + buffer.capacity() <= POOL_BYTES_MAX {
        pool.push(buffer);
    }
}

/// Makes room for `more` bytes behind what a buffer holds.
pub fn make_room(buffer: &mut Vec<u8>, more: usize) {
    make(buffer, more, false);
}

/// As [`make_room`], for a buffer that gets one piece after the other and will grow further.
pub fn make_room_for_a_piece(buffer: &mut Vec<u8>, more: usize) {
    make(buffer, more, true);
}

fn make(buffer: &mut Vec<u8>, more: usize, growing: bool) {
    let wanted = buffer.len() + more;
    if wanted <= buffer.capacity() {
        return;
    }
    if wanted < POOLED_BYTES_MIN {
        return buffer.reserve(more);
    }
    // Behind the first piece comes another one.
    let least = if growing { 2 * POOLED_BYTES_MIN } else { 0 };
    let mut larger = take(
        wanted.max(buffer.capacity().saturating_mul(2)).max(least),
        growing,
    );
    larger.extend_from_slice(buffer);
    give(std::mem::replace(buffer, larger));
}

/// A buffer that goes back when its last reader has gone.
struct Pooled(Vec<u8>);

impl AsRef<[u8]> for Pooled {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        give(std::mem::take(&mut self.0));
    }
}

/// A buffer that will not be written to any more.
pub fn seal(buffer: Vec<u8>) -> Bytes {
    if buffer.capacity() < POOLED_BYTES_MIN {
        buffer.into()
    } else {
        Bytes::from_owner(Pooled(buffer))
    }
}

/// Lets go of all that is kept, so that a dump does not carry it.
pub fn empty() {
    drop(pool().map(|mut pool| std::mem::take(&mut *pool)));
}

#[cfg(test)]
mod tests {
    use super::*;

    // One test, because the pool is one for the process.
    #[test]
    fn large_buffers_come_back_within_limits_and_small_ones_never_go_there() {
        let mut buffer = Vec::new();
        make_room(&mut buffer, 1 << 20);
        let place = buffer.as_ptr();
        buffer.extend_from_slice(&[1; 1000]);
        let sealed = seal(buffer);
        let second = sealed.clone();
        drop(sealed);
        assert_eq!(second[..], [1; 1000]);
        drop(second);
        let mut again = vec![7; 10];
        make_room(&mut again, 1 << 19);
        assert_eq!(
            (again.as_ptr(), &again[..]),
            (place, &[7; 10][..]),
            "the same memory"
        );
        for _ in 0..2 * BUFFERS_MAX {
            give(Vec::with_capacity(POOLED_BYTES_MIN));
            give(Vec::with_capacity(10));
            give(Vec::with_capacity(POOL_BYTES_MAX / 4));
        }
        let kept: Vec<usize> = pool().expect("free").iter().map(Vec::capacity).collect();
        assert!(kept.len() <= BUFFERS_MAX && kept.iter().sum::<usize>() <= POOL_BYTES_MAX);
        assert!(kept.iter().all(|capacity| *capacity >= POOLED_BYTES_MIN));
        empty();
        assert!(pool().expect("free").is_empty());
        for _ in 0..2 * BUFFERS_MAX {
            give(Vec::with_capacity(POOLED_BYTES_MIN));
        }
        let large = Vec::with_capacity(1 << 20);
        let (place, mut buffer) = (large.as_ptr(), Vec::new());
        give(large);
        make_room(&mut buffer, 1 << 20);
        assert_eq!(
            (buffer.as_ptr(), pool().expect("free").len()),
            (place, BUFFERS_MAX - 1),
            "many small ones keep no large one out"
        );
        drop(buffer);
        empty();
        // A message of two pieces lies in one buffer from the first of them on, and the next one in the same.
        let places: Vec<*const u8> = (0..3)
            .map(|_| {
                let mut buffer = Vec::new();
                for piece in [64 << 10, 20] {
                    make_room_for_a_piece(&mut buffer, piece);
                    buffer.resize(buffer.len() + piece, 0);
                }
                seal(buffer).as_ptr()
            })
            .collect();
        assert!(
            places.iter().all(|place| *place == places[0]),
            "the same memory"
        );
        assert_eq!(pool().expect("free").len(), 1);
    }
}
