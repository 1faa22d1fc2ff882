//! A byte ring with records, for one writer and one reader.
//!
//! - Positions count all bytes that were ever written or read, so they never wrap. Each record
//!   begins with its length, at a position that is a multiple of eight.
//! - The writer publishes records by advancing `tail`; the reader frees space by advancing `head`.
//! - A writer that finds no space sets `starved`; the reader must wake it after freeing space.
//!   Writer and reader access the flag and the positions in opposite order, with a full fence in
//!   between, so at least one of them sees the change of the other.
//! - The reader omits its fence if it was never far from the writer since its last fence, because
//!   then the writer cannot be starved.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, fence};

/// Size of the header of each record: the length and the inverted length, by which garbage is
/// detected.
pub const RECORD_HEAD_BYTES: usize = 8;
/// If the ring is empty and the writer has reached this offset, it continues at the start of the
/// ring. Thereby small messages use only a few pages of memory.
pub const REWIND_BYTES: usize = 16 << 10;
/// Record length that makes the reader continue at the start of the ring.
const REWIND_MARKER: u32 = u32::MAX;
/// The reader frees space when it has read this fraction of the ring, or all records.
const RELEASE_DIVISOR: u64 = 8;
/// A writer can be starved only if more than this fraction of the ring is occupied, because the
/// largest record fits into the remaining part.
const STARVED_DIVISOR: u64 = 4;

/// Control words of a ring, which writer and reader access.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingControl {
    tail: CachePadded<AtomicU64>,
    head: CachePadded<AtomicU64>,
    starved: AtomicU32,
    /// Set by writer or reader when it closes the ring.
    closed: AtomicU32,
    /// Bit set of the leases that the reader has returned: one bit per message in the writer's
    /// shared pool.
    returned_leases: AtomicU64,
}

impl RingControl {
    /// Creates control words with arbitrary positions.
    pub fn with_positions(tail: u64, head: u64) -> RingControl {
        RingControl {
            tail: CachePadded(AtomicU64::new(tail)),
            head: CachePadded(AtomicU64::new(head)),
            ..RingControl::default()
        }
    }

    /// Reader: returns the lease with this number.
    pub fn return_lease(&self, slot: u8) {
        self.returned_leases
            .fetch_or(1 << (slot % 64), Ordering::Release);
    }

    /// Writer: removes and returns the bit set of the leases that were returned since the last
    /// call. The memory of these messages may be written again.
    pub fn take_returned_leases(&self) -> u64 {
        if self.returned_leases.load(Ordering::Relaxed) == 0 {
            0
        } else {
            self.returned_leases.swap(0, Ordering::Acquire)
        }
    }
}

/// Memory of a ring: the control words and the data area.
pub trait RingMemory {
    fn control(&self) -> &RingControl;
    /// Size of the data area in bytes: a power of two, at least 64.
    fn capacity(&self) -> usize;
    /// Copies `bytes` into the data area; the range must not cross the end of the area.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Copies bytes out of the data area; the range must not cross the end of the area.
    fn read(&self, offset: usize, bytes: &mut [u8]);
    /// Appends bytes of the data area to `out`; the range must not cross the end of the area.
    fn append(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let old = out.len();
        out.resize(old + len, 0);
        self.read(offset, &mut out[old..]);
    }
}

/// Error: the other task violated the protocol. This ring is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCorrupt;

impl std::fmt::Display for RingCorrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the shared ring holds what no writer of ours puts there")
    }
}

impl std::error::Error for RingCorrupt {}

#[inline]
fn record_size(len: usize) -> usize {
    RECORD_HEAD_BYTES + len.next_multiple_of(8)
}

#[derive(Debug)]
pub struct RingWriter<A> {
    area: A,
    tail: u64,
    /// Lower bound of the reader's position, as last read.
    head: u64,
    /// Number of bytes to write from the start of the ring before the next rewind.
    rewind_bytes: u64,
    /// Position at which the writer tries to rewind.
    rewind_at: u64,
}

impl<A: RingMemory> RingWriter<A> {
    /// Creates the writing end of an empty ring.
    pub fn new(area: A) -> RingWriter<A> {
        RingWriter::with_rewind(area, REWIND_BYTES)
    }

    /// Creates the writing end of an empty ring that rewinds after `bytes` bytes, a multiple of 8.
    pub fn with_rewind(area: A, bytes: usize) -> RingWriter<A> {
        RingWriter {
            area,
            tail: 0,
            head: 0,
            rewind_bytes: bytes as u64,
            rewind_at: bytes as u64,
        }
    }

    pub fn memory(&self) -> &A {
        &self.area
    }

    /// Removes and returns the returned leases, see [`RingControl::take_returned_leases`].
    pub fn take_returned_leases(&self) -> u64 {
        self.area.control().take_returned_leases()
    }

    /// True if a record of `len` bytes fits.
    ///
    /// # Errors
    /// [`RingCorrupt`] if the reader's position is impossible.
    #[inline]
    pub fn has_space(&mut self, len: usize) -> Result<bool, RingCorrupt> {
        let need = record_size(len) as u64;
        let capacity = self.area.capacity() as u64;
        if self.tail - self.head + need <= capacity {
            return Ok(true);
        }
        self.refresh_head()?;
        Ok(self.tail - self.head + need <= capacity)
    }

    /// True if a record of `len` bytes fits, as [`RingWriter::has_space`]. Otherwise the reader is
    /// asked to wake this writer when it has freed space.
    ///
    /// # Errors
    /// As [`RingWriter::has_space`].
    pub fn has_space_or_request_wake(&mut self, len: usize) -> Result<bool, RingCorrupt> {
        if self.has_space(len)? {
            return Ok(true);
        }
        let starved = &self.area.control().starved;
        starved.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.has_space(len)
    }

    /// Writes a record that consists of `parts`. Returns false and writes nothing if the record
    /// does not fit.
    ///
    /// # Errors
    /// As [`RingWriter::has_space`].
    #[inline]
    pub fn write<const N: usize>(&mut self, parts: [&[u8]; N]) -> Result<bool, RingCorrupt> {
        let len = parts.iter().map(|part| part.len()).sum();
        if !self.has_space(len)? {
            return Ok(false);
        }
        if self.tail >= self.rewind_at {
            self.try_rewind(len);
        }
        let length = u32::try_from(len).expect("a record is smaller than its ring");
        let mut at = self.tail;
        self.copy_in(&mut at, &record_head(length));
        for part in parts {
            self.copy_in(&mut at, part);
        }
        self.tail += record_size(len) as u64;
        self.area
            .control()
            .tail
            .0
            .store(self.tail, Ordering::Release);
        Ok(true)
    }

    /// Continues at the start of the ring if the ring is empty and the record fits there. Called
    /// when `rewind_at` is reached. `len` is the length of the next record.
    fn try_rewind(&mut self, len: usize) {
        self.rewind_at = self.tail + self.rewind_bytes / 8;
        let capacity = self.area.capacity();
        let rest = (capacity as u64) - self.tail % capacity as u64;
        // A wrong position of the reader is detected later, when space is short.
        let is_empty = self.area.control().head.0.load(Ordering::Acquire) == self.tail;
        if is_empty && rest + record_size(len) as u64 <= capacity as u64 {
            self.head = self.tail;
            let mut at = self.tail;
            self.copy_in(&mut at, &record_head(REWIND_MARKER));
            self.tail += rest;
            self.rewind_at = self.tail + self.rewind_bytes;
        }
    }

    fn refresh_head(&mut self) -> Result<(), RingCorrupt> {
        let head = self.area.control().head.0.load(Ordering::Acquire);
        if head < self.head || head > self.tail {
            return Err(RingCorrupt);
        }
        self.head = head;
        Ok(())
    }

    #[inline]
    fn copy_in(&self, at: &mut u64, bytes: &[u8]) {
        let capacity = self.area.capacity();
        let offset = (*at % capacity as u64) as usize;
        *at += bytes.len() as u64;
        if bytes.len() <= capacity - offset {
            return self.area.write(offset, bytes);
        }
        let (first, second) = bytes.split_at(capacity - offset);
        self.area.write(offset, first);
        self.area.write(0, second);
    }

    /// Marks the ring as closed by this end.
    pub fn close(&self) {
        self.area.control().closed.store(1, Ordering::SeqCst);
    }

    /// True if the reader has closed the ring, so that it will not read the remaining records. Must
    /// be called after a full fence, so that the result is not older than the last record.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.area.control().closed.load(Ordering::Acquire) != 0
    }
}

/// Encodes the length and its inverse, which precede a record.
#[inline]
fn record_head(length: u32) -> [u8; RECORD_HEAD_BYTES] {
    (u64::from(length) | u64::from(!length) << 32).to_le_bytes()
}

#[derive(Debug)]
pub struct RingReader<A> {
    area: A,
    head: u64,
    released_head: u64,
    /// Read position at the last release that executed a fence.
    fenced_head: u64,
    /// Lower bound of the writer's position, as last read.
    tail: u64,
}

impl<A: RingMemory> RingReader<A> {
    /// Creates the reading end of an empty ring.
    pub fn new(area: A) -> RingReader<A> {
        RingReader {
            area,
            head: 0,
            released_head: 0,
            fenced_head: 0,
            tail: 0,
        }
    }

    pub fn memory(&self) -> &A {
        &self.area
    }

    /// True if the ring contained no record at the time of the call.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail && self.area.control().tail.0.load(Ordering::Acquire) == self.head
    }

    /// Returns the next record; `None` if there is none.
    ///
    /// # Errors
    /// [`RingCorrupt`] if the next bytes are not a record.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'_, A>>, RingCorrupt> {
        loop {
            if self.head == self.tail {
                self.tail = self.area.control().tail.0.load(Ordering::Acquire);
                if self.head == self.tail {
                    return Ok(None);
                }
            }
            let capacity = self.area.capacity() as u64;
            let there = self
                .tail
                .checked_sub(self.head)
                .filter(|there| *there <= capacity)
                .ok_or(RingCorrupt)?;
            if there < RECORD_HEAD_BYTES as u64 || !self.head.is_multiple_of(8) {
                return Err(RingCorrupt);
            }
            let mut bytes = [0; RECORD_HEAD_BYTES];
            self.area.read((self.head % capacity) as usize, &mut bytes);
            let word = u64::from_le_bytes(bytes);
            let length = word as u32;
            if record_head(length) != bytes {
                return Err(RingCorrupt);
            }
            if length == REWIND_MARKER {
                let rest = capacity - self.head % capacity;
                if rest > there {
                    return Err(RingCorrupt);
                }
                self.head += rest;
                continue;
            }
            let len = length as usize;
            if record_size(len) as u64 > there {
                return Err(RingCorrupt);
            }
            let at = self.head + RECORD_HEAD_BYTES as u64;
            self.head += record_size(len) as u64;
            return Ok(Some(Record {
                area: &self.area,
                position: at,
                remaining: len,
            }));
        }
    }

    /// Frees the space of the records that were read, if it is large enough. Returns true if the
    /// writer waits for space and must be woken.
    #[inline]
    pub fn release(&mut self) -> bool {
        let (unreleased, capacity) = (self.head - self.released_head, self.area.capacity() as u64);
        if unreleased == 0 || (self.head != self.tail && unreleased < capacity / RELEASE_DIVISOR) {
            return false;
        }
        self.released_head = self.head;
        let words = self.area.control();
        words.head.0.store(self.head, Ordering::Release);
        // A writer without space has seen at least `fenced` as the reader's position, and has
        // written more than this fraction of the ring beyond `fenced`. The reader has not read all
        // of that yet, and executes the fence when it has.
        if self.tail - self.fenced_head < capacity / STARVED_DIVISOR {
            return false;
        }
        self.fenced_head = self.head;
        fence(Ordering::SeqCst);
        words.starved.load(Ordering::Relaxed) != 0 && words.starved.swap(0, Ordering::SeqCst) != 0
    }

    /// Marks the ring as closed by this end. If the writer writes a record at the same time, either
    /// a read after this call sees the record, or the writer finds the ring closed after its next
    /// fence.
    pub fn close(&self) {
        self.area.control().closed.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// True if the writer has closed the ring. Reads after this call see all records of the writer.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.area.control().closed.load(Ordering::Acquire) != 0
    }
}

/// A record, which must be read from front to back.
#[derive(Debug)]
pub struct Record<'a, A> {
    area: &'a A,
    position: u64,
    remaining: usize,
}

impl<A: RingMemory> Record<'_, A> {
    /// Number of bytes that have not been read.
    pub fn len(&self) -> usize {
        self.remaining
    }

    pub fn is_empty(&self) -> bool {
        self.remaining == 0
    }

    /// Reads the next `N` bytes; `None` if fewer are left.
    #[inline]
    pub fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let (first, second) = self.advance(N)?;
        self.area.read(first.0, &mut bytes[..first.1]);
        if second > 0 {
            self.area.read(0, &mut bytes[first.1..]);
        }
        Some(bytes)
    }

    /// Appends the bytes that have not been read to `out`.
    #[inline]
    pub fn append_to(&mut self, out: &mut Vec<u8>) {
        let Some((first, second)) = self.advance(self.remaining) else {
            return;
        };
        self.area.append(first.0, first.1, out);
        if second > 0 {
            self.area.append(0, second, out);
        }
    }

    /// Advances over the next `len` bytes. Returns their range in two parts: offset and length of
    /// the part before the end of the ring, and length of the part at the start of the ring. `None`
    /// if fewer bytes are left.
    #[inline]
    fn advance(&mut self, len: usize) -> Option<((usize, usize), usize)> {
        self.remaining = self.remaining.checked_sub(len)?;
        let capacity = self.area.capacity();
        let offset = (self.position % capacity as u64) as usize;
        let first = len.min(capacity - offset);
        self.position += len as u64;
        Some(((offset, first), len - first))
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// A ring in ordinary memory, for one thread.
    #[derive(Clone, Debug)]
    struct Plain(Rc<(RingControl, RefCell<Vec<u8>>)>);

    impl RingMemory for Plain {
        fn control(&self) -> &RingControl {
            &self.0.0
        }
        fn capacity(&self) -> usize {
            self.0.1.borrow().len()
        }
        fn write(&self, offset: usize, bytes: &[u8]) {
            self.0.1.borrow_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        fn read(&self, offset: usize, bytes: &mut [u8]) {
            let len = bytes.len();
            bytes.copy_from_slice(&self.0.1.borrow()[offset..offset + len]);
        }
    }

    fn ring(capacity: usize) -> (RingWriter<Plain>, RingReader<Plain>, Plain) {
        let area = Plain(Rc::new((
            RingControl::default(),
            RefCell::new(vec![0xaa; capacity]),
        )));
        (
            RingWriter::new(area.clone()),
            RingReader::new(area.clone()),
            area,
        )
    }

    fn take_all(reader: &mut RingReader<Plain>) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(mut record) = reader.next_record().expect("a good ring") {
            let mut bytes = Vec::new();
            record.append_to(&mut bytes);
            all.push(bytes);
        }
        reader.release();
        all
    }

    #[test]
    fn records_of_all_sizes_arrive_in_order() {
        let (mut writer, mut reader, _) = ring(256);
        let (mut written, mut read) = (0u32, 0u32);
        let content = |n: u32| vec![n as u8; (n * 37 % 120) as usize];
        while read < 5000 {
            while writer
                .write([
                    &content(written)[..1.min(content(written).len())],
                    content(written).get(1..).unwrap_or(&[]),
                ])
                .expect("good")
            {
                written += 1;
            }
            for record in take_all(&mut reader) {
                assert_eq!(record, content(read));
                read += 1;
            }
            assert_eq!(written, read);
        }
    }

    #[test]
    fn small_messages_stay_at_the_start_of_the_ring() {
        let (mut writer, mut reader, area) = ring(256 << 10);
        for n in 0..20_000u32 {
            assert!(writer.write([&n.to_le_bytes(), &[0; 60]]).expect("good"));
            assert_eq!(take_all(&mut reader)[0][..4], n.to_le_bytes());
        }
        let touched = area
            .0
            .1
            .borrow()
            .iter()
            .rposition(|byte| *byte != 0xaa)
            .expect("something was written");
        assert!(touched < REWIND_BYTES + 128, "{touched}");
    }

    #[test]
    fn starved_writer_is_woken() {
        let (mut writer, mut reader, _) = ring(64);
        assert!(writer.write([&[1; 40]]).expect("good"));
        assert!(!writer.has_space_or_request_wake(40).expect("good"));
        assert!(reader.next_record().expect("good").is_some());
        assert!(reader.release(), "the writer has to be woken");
        assert!(writer.write([&[2; 40]]).expect("good"));
        assert!(reader.next_record().expect("good").is_some());
        assert!(!reader.release(), "nobody waits");
    }

    /// Garbage in the data or the control words makes the ring unusable and has no other effect.
    #[test]
    fn garbage_breaks_only_its_ring() {
        let mut seed = 7u64;
        let mut dice = || {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            seed >> 33
        };
        for round in 0..20_000 {
            let (mut writer, mut reader, area) = ring(64);
            let _ = writer.write([&[3; 20]]).expect("good");
            match round % 3 {
                0 => area
                    .0
                    .1
                    .borrow_mut()
                    .iter_mut()
                    .for_each(|byte| *byte = dice() as u8),
                1 => area.control().tail.0.store(dice() % 200, Ordering::Relaxed),
                _ => area.control().head.0.store(dice() % 200, Ordering::Relaxed),
            }
            let mut taken = 0;
            while let Ok(Some(mut record)) = reader.next_record() {
                let mut bytes = Vec::new();
                record.append_to(&mut bytes);
                assert!(bytes.len() <= 64);
                taken += 1;
                assert!(taken < 100);
            }
            for _ in 0..10 {
                let _ = writer.write([&[4; 13]]);
            }
        }
    }

    #[test]
    fn close_is_seen_by_the_other_end() {
        let (writer, reader, _) = ring(64);
        assert!(!writer.is_closed());
        reader.close();
        assert!(writer.is_closed() && reader.is_closed());
    }
}
