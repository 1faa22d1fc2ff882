//! A byte ring with records, for one writer and one reader.
//!
//! - Positions count all bytes that were ever written or read, so they never wrap. Each record
//!   begins with a header, at a position that is a multiple of [`RECORD_ALIGNMENT`].
//! - The writer publishes a record by storing its header. A header of zero ends the records: before
//!   a record is published, the header behind it is cleared. So a small message moves one cache
//!   line between the processors, and the reader polls the line that the message will fill.
//! - The writer advances `tail` before it publishes a record. The reader compares `tail` with the
//!   lengths of records, except of small ones that it takes one by one, and never polls `tail`.
//! - The reader frees space by advancing `head`.
//! - A writer that finds no space sets `writer_starved`; the reader must wake the writer after
//!   freeing space. Writer and reader access the flag and the positions in opposite order, with a
//!   full fence in between, so at least one side sees the change that the other side made.
//! - The reader omits its fence if the reader was never far from the writer since its last fence,
//!   because then the writer cannot be starved.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, fence};

/// Size of the header of each record: the length and the inverted length, by which the reader
/// detects garbage.
pub const RECORD_HEADER_BYTES: usize = 8;
/// Alignment of records in bytes: a cache line, or less for the model checker.
pub const RECORD_ALIGNMENT: usize = if cfg!(feature = "loom") { 8 } else { 64 };
/// Header of a record that is not there yet.
const NO_RECORD: u64 = 0;
/// Distance in bytes from the end of the records at which the writer requests memory that it will
/// write soon. The processor moves the cache line while the writer goes on.
const PREFETCH_DISTANCE_BYTES: usize = 512;
/// When the ring is empty and the writer has reached this offset, the writer continues at the start
/// of the ring. Thereby small messages use only a few pages of memory.
pub const REWIND_BYTES: usize = 16 << 10;
/// Record length that makes the reader continue at the start of the ring.
const REWIND_MARKER: u32 = u32::MAX;
/// The reader frees space when it has read the ring's capacity divided by this number, or all
/// records.
const RELEASE_DIVISOR: u64 = 8;
/// A writer can be starved only if more than the ring's capacity divided by this number is
/// occupied. Otherwise the largest record fits into the free part.
const STARVED_DIVISOR: u64 = 4;

/// Control words of a ring. Writer and reader access them.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingControl {
    tail: CachePadded<AtomicU64>,
    head: CachePadded<AtomicU64>,
    writer_starved: AtomicU32,
    /// Nonzero if the writer or the reader has closed the ring.
    is_closed: AtomicU32,
    /// Bit set of the leases that the reader has returned: one bit per message in the writer's
    /// shared pool.
    returned_leases: AtomicU64,
}

impl RingControl {
    /// Creates control words with arbitrary positions.
    pub fn with_positions(tail: u64, head: u64) -> Self {
        Self {
            tail: CachePadded(AtomicU64::new(tail)),
            head: CachePadded(AtomicU64::new(head)),
            ..Self::default()
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

/// Memory of a ring: control words and data area.
pub trait RingMemory {
    fn control(&self) -> &RingControl;
    /// Size of the data area in bytes: a power of two, at least 64. All bytes are 0 at first.
    fn capacity(&self) -> usize;
    /// Returns the word at an offset that is a multiple of eight, with the ordering `Acquire`.
    fn load_header(&self, offset: usize) -> u64;
    /// Stores a word at an offset that is a multiple of eight.
    fn store_header(&self, offset: usize, word: u64, ordering: Ordering);
    /// Requests the cache line at an offset for a write that follows soon.
    fn prefetch_for_write(&self, _offset: usize) {}
    /// Copies `bytes` into the data area; the range must not cross the end of the area.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Copies bytes out of the data area; the range must not cross the end of the area.
    fn read(&self, offset: usize, bytes: &mut [u8]);
    /// Appends bytes of the data area to `out`; the range must not cross the end of the area.
    fn append(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let old_len = out.len();
        out.resize(old_len + len, 0);
        self.read(offset, &mut out[old_len..]);
    }
}

/// Error: the other task violated the protocol. This ring is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorruptRing;

impl std::fmt::Display for CorruptRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the shared ring contains an invalid record or position")
    }
}

impl std::error::Error for CorruptRing {}

#[inline]
fn record_size(len: usize) -> usize {
    (RECORD_HEADER_BYTES + len).next_multiple_of(RECORD_ALIGNMENT)
}

/// Number of free bytes that a record of `len` bytes needs: its own, and the header behind it.
#[inline]
fn needed_bytes(len: usize) -> u64 {
    (record_size(len) + RECORD_ALIGNMENT) as u64
}

/// Returns the place of a position in the data area.
#[inline]
fn offset_of(position: u64, memory: &impl RingMemory) -> usize {
    (position % memory.capacity() as u64) as usize
}

#[derive(Debug)]
pub struct RingWriter<A> {
    memory: A,
    tail: u64,
    /// Lower bound of the reader's position, as last read.
    known_head: u64,
    /// Number of bytes to write from the start of the ring before the next rewind.
    rewind_bytes: u64,
    /// Position at which the writer tries to rewind.
    rewind_position: u64,
}

impl<A: RingMemory> RingWriter<A> {
    /// Creates the writing end of an empty ring.
    pub fn new(area: A) -> Self {
        Self::with_rewind_bytes(area, REWIND_BYTES)
    }

    /// Creates the writing end of an empty ring that rewinds after `rewind_bytes` bytes, a multiple
    /// of 8.
    pub fn with_rewind_bytes(area: A, rewind_bytes: usize) -> Self {
        Self {
            memory: area,
            tail: 0,
            known_head: 0,
            rewind_bytes: rewind_bytes as u64,
            rewind_position: rewind_bytes as u64,
        }
    }

    pub fn memory(&self) -> &A {
        &self.memory
    }

    /// Removes and returns the returned leases, see [`RingControl::take_returned_leases`].
    pub fn take_returned_leases(&self) -> u64 {
        self.memory.control().take_returned_leases()
    }

    /// Returns the position after the last record.
    #[inline]
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Returns a position up to which the reader has read.
    ///
    /// # Errors
    /// [`CorruptRing`] if the reader's position is impossible.
    pub fn read_position(&mut self) -> Result<u64, CorruptRing> {
        self.refresh_head()?;
        Ok(self.known_head)
    }

    /// True if a record of `len` bytes fits.
    ///
    /// # Errors
    /// [`CorruptRing`] if the reader's position is impossible.
    #[inline]
    pub fn has_space(&mut self, len: usize) -> Result<bool, CorruptRing> {
        let needed_bytes = needed_bytes(len);
        let capacity = self.memory.capacity() as u64;
        if self.tail - self.known_head + needed_bytes <= capacity {
            return Ok(true);
        }
        self.refresh_head()?;
        Ok(self.tail - self.known_head + needed_bytes <= capacity)
    }

    /// True if a record of `len` bytes fits, as [`RingWriter::has_space`]. If not, the method
    /// requests that the reader wakes this writer when the reader has freed space.
    ///
    /// # Errors
    /// As [`RingWriter::has_space`].
    pub fn has_space_or_request_wake(&mut self, len: usize) -> Result<bool, CorruptRing> {
        if self.has_space(len)? {
            return Ok(true);
        }
        let starved_flag = &self.memory.control().writer_starved;
        starved_flag.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.has_space(len)
    }

    /// Writes a record that consists of `parts`. Returns false and writes nothing if the record
    /// does not fit.
    ///
    /// # Errors
    /// As [`RingWriter::has_space`].
    #[inline]
    pub fn write<const N: usize>(&mut self, parts: [&[u8]; N]) -> Result<bool, CorruptRing> {
        let len = parts.iter().map(|part| part.len()).sum();
        if !self.has_space(len)? {
            return Ok(false);
        }
        if self.tail >= self.rewind_position {
            self.try_rewind(len);
        }
        let mut position = self.tail + RECORD_HEADER_BYTES as u64;
        for part in parts {
            self.copy_to_ring(&mut position, part);
        }
        self.publish(len);
        Ok(true)
    }

    /// Writes a record that consists of a header of constant size and a body, as
    /// [`RingWriter::write`] does. Returns false and writes nothing if the record does not fit.
    ///
    /// # Errors
    /// As [`RingWriter::has_space`].
    #[inline]
    pub fn write_small<const N: usize>(
        &mut self,
        head: &[u8; N],
        body: &[u8],
    ) -> Result<bool, CorruptRing> {
        let len = N + body.len();
        let offset = offset_of(self.tail, &self.memory);
        let crosses_end = offset + record_size(len) > self.memory.capacity();
        if crosses_end || self.tail >= self.rewind_position {
            return self.write([head, body]);
        }
        if !self.has_space(len)? {
            return Ok(false);
        }
        self.memory.write(offset + RECORD_HEADER_BYTES, head);
        self.memory.write(offset + RECORD_HEADER_BYTES + N, body);
        self.publish(len);
        Ok(true)
    }

    /// Makes the record of `len` bytes at the end visible to the reader. Inlined because each small
    /// message passes here: the compiler otherwise adds a call of 13 instructions.
    #[inline(always)]
    fn publish(&mut self, len: usize) {
        let length = u32::try_from(len).expect("a record is smaller than its ring");
        self.publish_header(encode_record_header(length), record_size(len));
    }

    /// Stores the header of a record that occupies `size` bytes, after the header behind the record
    /// was cleared.
    #[inline]
    fn publish_header(&mut self, header: u64, size: usize) {
        let offset = offset_of(self.tail, &self.memory);
        self.tail += size as u64;
        let next_offset = offset_of(self.tail, &self.memory);
        let prefetched_position = self.tail + PREFETCH_DISTANCE_BYTES as u64;
        self.memory
            .prefetch_for_write(offset_of(prefetched_position, &self.memory));
        self.memory
            .store_header(next_offset, NO_RECORD, Ordering::Relaxed);
        let control = self.memory.control();
        control.tail.0.store(self.tail, Ordering::Relaxed);
        self.memory.store_header(offset, header, Ordering::Release);
    }

    /// Continues at the start of the ring if the ring is empty and the record fits there. Called
    /// when `rewind_position` is reached. `len` is the length of the next record in bytes.
    fn try_rewind(&mut self, len: usize) {
        self.rewind_position = self.tail + self.rewind_bytes / 8;
        let capacity = self.memory.capacity();
        let remaining_bytes = (capacity as u64) - self.tail % capacity as u64;
        // A wrong position of the reader is detected later, when space is short.
        let is_empty = self.memory.control().head.0.load(Ordering::Acquire) == self.tail;
        if is_empty && remaining_bytes + needed_bytes(len) <= capacity as u64 {
            self.known_head = self.tail;
            self.publish_header(
                encode_record_header(REWIND_MARKER),
                remaining_bytes as usize,
            );
            self.rewind_position = self.tail + self.rewind_bytes;
        }
    }

    fn refresh_head(&mut self) -> Result<(), CorruptRing> {
        let head = self.memory.control().head.0.load(Ordering::Acquire);
        if head < self.known_head || head > self.tail {
            return Err(CorruptRing);
        }
        self.known_head = head;
        Ok(())
    }

    #[inline]
    fn copy_to_ring(&self, position: &mut u64, bytes: &[u8]) {
        let capacity = self.memory.capacity();
        let offset = offset_of(*position, &self.memory);
        *position += bytes.len() as u64;
        if bytes.len() <= capacity - offset {
            return self.memory.write(offset, bytes);
        }
        let (first_part, second_part) = bytes.split_at(capacity - offset);
        self.memory.write(offset, first_part);
        self.memory.write(0, second_part);
    }

    /// Marks the ring as closed by the writer.
    pub fn close(&self) {
        self.memory.control().is_closed.store(1, Ordering::SeqCst);
    }

    /// True if the reader has closed the ring and therefore will not read the remaining records.
    /// Must be called after a full fence, so that the result is not older than the last record.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.memory.control().is_closed.load(Ordering::Acquire) != 0
    }
}

/// Encodes the header of a record: the length and the inverted length.
#[inline]
fn encode_record_header(length: u32) -> u64 {
    u64::from(length) | u64::from(!length) << 32
}

#[derive(Debug)]
pub struct RingReader<A> {
    memory: A,
    head: u64,
    released_head: u64,
    /// Read position at the last release that executed a fence.
    fenced_head: u64,
    /// Position of the writer, as last read. Small records are read without reading it.
    known_tail: u64,
}

impl<A: RingMemory> RingReader<A> {
    /// Creates the reading end of an empty ring.
    pub fn new(area: A) -> Self {
        Self {
            memory: area,
            head: 0,
            released_head: 0,
            fenced_head: 0,
            known_tail: 0,
        }
    }

    pub fn memory(&self) -> &A {
        &self.memory
    }

    /// True if the ring contained no record at the time of the call.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.load_header() == NO_RECORD
    }

    /// Returns the header at the reader's position.
    #[inline]
    fn load_header(&self) -> u64 {
        self.memory.load_header(offset_of(self.head, &self.memory))
    }

    /// Returns the next record; `None` if there is none. The record is read from the ring.
    ///
    /// # Errors
    /// [`CorruptRing`] if the next bytes are not a record.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'_, A>>, CorruptRing> {
        let Some(len) = self.find_record()? else {
            return Ok(None);
        };
        let position = self.head;
        self.head += record_size(len) as u64;
        Ok(Some(self.record_at(position, len)))
    }

    /// Copies the next record, which stays in the ring: the first `N` bytes are returned, and the
    /// rest, at most `rest_bytes_max` bytes, replaces the content of `rest`. Returns `None` if
    /// there is no such record, and for a record at the end of the ring's memory.
    #[inline]
    pub fn peek_small<const N: usize>(
        &mut self,
        rest_bytes_max: usize,
        rest: &mut Vec<u8>,
    ) -> Option<[u8; N]> {
        let offset = offset_of(self.head, &self.memory);
        let header = self.memory.load_header(offset);
        let length = header as u32;
        let rest_bytes = (length as usize).checked_sub(N)?;
        if encode_record_header(length) != header
            || rest_bytes > rest_bytes_max
            || offset + record_size(N + rest_bytes_max) > self.memory.capacity()
        {
            return None;
        }
        let mut head = [0; N];
        self.memory.read(offset + RECORD_HEADER_BYTES, &mut head);
        rest.clear();
        let rest_offset = offset + RECORD_HEADER_BYTES + N;
        self.memory.append(rest_offset, rest_bytes, rest);
        Some(head)
    }

    /// Removes the record of `len` bytes that [`RingReader::peek_small`] has just returned.
    #[inline]
    pub fn skip_record(&mut self, len: usize) {
        self.head += record_size(len) as u64;
    }

    #[inline]
    fn record_at(&self, position: u64, len: usize) -> Record<'_, A> {
        Record {
            memory: &self.memory,
            position: position + RECORD_HEADER_BYTES as u64,
            remaining_bytes: len,
        }
    }

    /// Advances to the header of the next record, and returns the length of the record in bytes;
    /// `None` if there is no record.
    ///
    /// # Errors
    /// As [`RingReader::next_record`].
    #[inline]
    fn find_record(&mut self) -> Result<Option<usize>, CorruptRing> {
        let capacity = self.memory.capacity();
        loop {
            let header = self.load_header();
            if header == NO_RECORD {
                return Ok(None);
            }
            let (offset, length) = (offset_of(self.head, &self.memory), header as u32);
            if encode_record_header(length) != header {
                return Err(CorruptRing);
            }
            if length == REWIND_MARKER {
                self.check_written(capacity - offset)?;
                self.head += (capacity - offset) as u64;
                continue;
            }
            let len = length as usize;
            self.check_written(record_size(len))?;
            return Ok(Some(len));
        }
    }

    /// Checks that the writer has written `size` bytes behind the reader's position. A published
    /// header is never newer than the writer's position.
    ///
    /// # Errors
    /// [`CorruptRing`] if the writer's position says otherwise, or is impossible.
    #[inline]
    fn check_written(&mut self, size: usize) -> Result<(), CorruptRing> {
        if self.known_tail < self.head + size as u64 {
            self.known_tail = self.memory.control().tail.0.load(Ordering::Acquire);
        }
        let written_bytes = self.known_tail.checked_sub(self.head).ok_or(CorruptRing)?;
        if written_bytes < size as u64 || written_bytes > self.memory.capacity() as u64 {
            return Err(CorruptRing);
        }
        Ok(())
    }

    /// Frees the space of the records that were read, if the space is large enough or all records
    /// were read. Returns true if the writer waits for space and must be woken.
    #[inline]
    pub fn release(&mut self) -> bool {
        let unreleased_bytes = self.head - self.released_head;
        let is_large = unreleased_bytes >= self.memory.capacity() as u64 / RELEASE_DIVISOR;
        (is_large || self.is_empty()) && self.release_all()
    }

    /// Frees the space of all records that were read. Returns true if the writer waits for space
    /// and must be woken.
    #[inline]
    pub fn release_all(&mut self) -> bool {
        if self.head == self.released_head {
            return false;
        }
        self.released_head = self.head;
        let control = self.memory.control();
        control.head.0.store(self.head, Ordering::Release);
        // A writer without space has seen at least `fenced_head` as the reader's position, and has
        // written more than `capacity / STARVED_DIVISOR` bytes after that position. The reader will
        // read these bytes, so a later release executes a fence, and this release needs none.
        if self.head - self.fenced_head < self.memory.capacity() as u64 / STARVED_DIVISOR {
            return false;
        }
        self.fenced_head = self.head;
        fence(Ordering::SeqCst);
        control.writer_starved.load(Ordering::Relaxed) != 0
            && control.writer_starved.swap(0, Ordering::SeqCst) != 0
    }

    /// Marks the ring as closed by the reader. If the writer writes a record at the same time,
    /// either a read after this call sees the record, or the writer finds the ring closed after its
    /// next fence.
    pub fn close(&self) {
        self.memory.control().is_closed.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// True if the writer has closed the ring. Reads after this call see all records of the writer.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.memory.control().is_closed.load(Ordering::Acquire) != 0
    }
}

/// A record; its bytes must be read in order.
#[derive(Debug)]
pub struct Record<'a, A> {
    memory: &'a A,
    position: u64,
    remaining_bytes: usize,
}

impl<A: RingMemory> Record<'_, A> {
    /// Number of bytes that have not been read.
    pub fn len(&self) -> usize {
        self.remaining_bytes
    }

    pub fn is_empty(&self) -> bool {
        self.remaining_bytes == 0
    }

    /// Reads the next `N` bytes; `None` if fewer bytes remain.
    #[inline]
    pub fn take_bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let (first_part, second_len) = self.advance(N)?;
        self.memory.read(first_part.0, &mut bytes[..first_part.1]);
        if second_len > 0 {
            self.memory.read(0, &mut bytes[first_part.1..]);
        }
        Some(bytes)
    }

    /// Appends the bytes that have not been read to `out`.
    #[inline]
    pub fn append_to(&mut self, out: &mut Vec<u8>) {
        let Some((first_part, second_len)) = self.advance(self.remaining_bytes) else {
            return;
        };
        self.memory.append(first_part.0, first_part.1, out);
        if second_len > 0 {
            self.memory.append(0, second_len, out);
        }
    }

    /// Advances over the next `len` bytes. Returns the offset and the length of the first part of
    /// these bytes, and the length of the second part. The second part begins at the start of the
    /// ring; it is empty if the bytes do not cross the end of the ring. Returns `None` if fewer
    /// than `len` bytes remain.
    #[inline]
    fn advance(&mut self, len: usize) -> Option<((usize, usize), usize)> {
        self.remaining_bytes = self.remaining_bytes.checked_sub(len)?;
        let capacity = self.memory.capacity();
        let offset = (self.position % capacity as u64) as usize;
        let first_len = len.min(capacity - offset);
        self.position += len as u64;
        Some(((offset, first_len), len - first_len))
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// A ring in ordinary memory, for one thread.
    #[derive(Clone, Debug)]
    struct LocalMemory(Rc<(RingControl, RefCell<Vec<u8>>)>);

    impl RingMemory for LocalMemory {
        fn control(&self) -> &RingControl {
            &self.0.0
        }
        fn capacity(&self) -> usize {
            self.0.1.borrow().len()
        }
        fn load_header(&self, offset: usize) -> u64 {
            let mut bytes = [0; 8];
            self.read(offset, &mut bytes);
            u64::from_le_bytes(bytes)
        }
        fn store_header(&self, offset: usize, word: u64, _ordering: Ordering) {
            self.write(offset, &word.to_le_bytes());
        }
        fn write(&self, offset: usize, bytes: &[u8]) {
            self.0.1.borrow_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        fn read(&self, offset: usize, bytes: &mut [u8]) {
            let len = bytes.len();
            bytes.copy_from_slice(&self.0.1.borrow()[offset..offset + len]);
        }
    }

    fn new_ring(
        capacity: usize,
    ) -> (
        RingWriter<LocalMemory>,
        RingReader<LocalMemory>,
        LocalMemory,
    ) {
        let memory = LocalMemory(Rc::new((
            RingControl::default(),
            RefCell::new(vec![0; capacity]),
        )));
        (
            RingWriter::new(memory.clone()),
            RingReader::new(memory.clone()),
            memory,
        )
    }

    fn read_all_records(reader: &mut RingReader<LocalMemory>) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while let Some(mut record) = reader.next_record().expect("a good ring") {
            let mut bytes = Vec::new();
            record.append_to(&mut bytes);
            records.push(bytes);
        }
        reader.release();
        records
    }

    #[test]
    fn records_of_all_sizes_arrive_in_order() {
        let (mut writer, mut reader, _) = new_ring(256);
        let (mut written_count, mut read_count) = (0u32, 0u32);
        let content = |n: u32| vec![n as u8; (n * 37 % 120) as usize];
        while read_count < 5000 {
            while writer
                .write([
                    &content(written_count)[..1.min(content(written_count).len())],
                    content(written_count).get(1..).unwrap_or(&[]),
                ])
                .expect("good")
            {
                written_count += 1;
            }
            for record in read_all_records(&mut reader) {
                assert_eq!(record, content(read_count));
                read_count += 1;
            }
            assert_eq!(written_count, read_count);
        }
    }

    /// Small records are written and read like others, also where a record crosses the end of the
    /// memory and where the writer rewinds.
    #[test]
    fn small_records_are_ordinary_records() {
        const REST_BYTES_MAX: usize = 100;
        let memory = LocalMemory(Rc::new((
            RingControl::default(),
            RefCell::new(vec![0; 1024]),
        )));
        let mut writer = RingWriter::with_rewind_bytes(memory.clone(), 512);
        let mut reader = RingReader::new(memory);
        let (mut written_count, mut read_count, mut peeked_count) = (0u64, 0u64, 0);
        let rest_of = |n: u64| vec![n as u8; (n * 7 % (REST_BYTES_MAX as u64 + 1)) as usize];
        while read_count < 5000 {
            for _ in 0..=written_count % 5 {
                let (head, rest) = (written_count.to_le_bytes(), rest_of(written_count));
                let is_written = match written_count % 3 {
                    0 => writer.write([&head, &rest]),
                    _ => writer.write_small(&head, &rest),
                };
                written_count += u64::from(is_written.expect("good"));
            }
            while !reader.is_empty() {
                let mut rest = vec![0xff; 3];
                let head = match reader.peek_small::<8>(REST_BYTES_MAX, &mut rest) {
                    Some(head) => {
                        peeked_count += 1;
                        reader.skip_record(8 + rest.len());
                        head
                    }
                    None => {
                        rest.clear();
                        let mut record = reader.next_record().expect("good").expect("one");
                        let head = record.take_bytes().expect("long enough");
                        record.append_to(&mut rest);
                        head
                    }
                };
                assert_eq!(
                    (u64::from_le_bytes(head), rest),
                    (read_count, rest_of(read_count))
                );
                read_count += 1;
                reader.release();
            }
            assert_eq!(read_count, written_count);
        }
        assert!(peeked_count > 1000, "{peeked_count}");
    }

    /// A record that is not small stays in the ring.
    #[test]
    fn long_and_short_records_are_not_small() {
        let (mut writer, mut reader, _) = new_ring(256);
        let mut rest = Vec::new();
        assert_eq!(reader.peek_small::<8>(16, &mut rest), None);
        assert!(writer.write([&[1; 4]]).expect("good"));
        assert!(writer.write_small(&[2; 8], &[3; 17]).expect("good"));
        assert_eq!(reader.peek_small::<8>(16, &mut rest), None);
        assert!(reader.next_record().expect("good").is_some());
        assert_eq!(reader.peek_small::<8>(16, &mut rest), None);
        assert_eq!(reader.peek_small::<8>(17, &mut rest), Some([2; 8]));
        assert_eq!(rest, [3; 17]);
    }

    #[test]
    fn small_messages_stay_at_the_start_of_the_ring() {
        let (mut writer, mut reader, memory) = new_ring(256 << 10);
        for n in 0..20_000u32 {
            assert!(writer.write([&n.to_le_bytes(), &[0; 60]]).expect("good"));
            assert_eq!(read_all_records(&mut reader)[0][..4], n.to_le_bytes());
        }
        let last_written_offset = memory
            .0
            .1
            .borrow()
            .iter()
            .rposition(|byte| *byte != 0)
            .expect("something was written");
        assert!(
            last_written_offset < REWIND_BYTES + 128,
            "{last_written_offset}"
        );
    }

    #[test]
    fn starved_writer_is_woken() {
        let (mut writer, mut reader, _) = new_ring(512);
        assert!(writer.write([&[1; 250]]).expect("good"));
        assert!(!writer.has_space_or_request_wake(200).expect("good"));
        assert!(reader.next_record().expect("good").is_some());
        assert!(reader.release(), "the writer has to be woken");
        assert!(writer.write([&[2; 250]]).expect("good"));
        assert!(reader.next_record().expect("good").is_some());
        assert!(!reader.release(), "nobody waits");
    }

    /// Garbage in the data or the control words makes the ring unusable and has no other effect.
    #[test]
    fn garbage_breaks_only_its_ring() {
        let mut seed = 7u64;
        let mut random_number = || {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            seed >> 33
        };
        for round in 0..20_000 {
            let (mut writer, mut reader, memory) = new_ring(256);
            let _ = writer.write([&[3; 20]]).expect("good");
            match round % 3 {
                0 => memory
                    .0
                    .1
                    .borrow_mut()
                    .iter_mut()
                    .for_each(|byte| *byte = random_number() as u8),
                1 => memory.store_header(
                    random_number() as usize % 4 * RECORD_ALIGNMENT,
                    encode_record_header((random_number() % 300) as u32),
                    Ordering::Relaxed,
                ),
                _ => memory
                    .control()
                    .head
                    .0
                    .store(random_number() % 200, Ordering::Relaxed),
            }
            // The writer decides how many records there are.
            for _ in 0..100 {
                let Ok(Some(mut record)) = reader.next_record() else {
                    break;
                };
                let mut bytes = Vec::new();
                record.append_to(&mut bytes);
                assert!(bytes.len() <= 256);
            }
            for _ in 0..10 {
                let _ = writer.write([&[4; 13]]);
            }
        }
    }

    #[test]
    fn reader_close_is_seen_by_writer_and_reader() {
        let (writer, reader, _) = new_ring(256);
        assert!(!writer.is_closed());
        reader.close();
        assert!(writer.is_closed() && reader.is_closed());
    }
}
