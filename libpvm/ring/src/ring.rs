//! A ring of bytes with one writer and one reader, holding records.
//!
//! Positions count all bytes ever written and read, so they never wrap; a record begins at a multiple of eight with its
//! length. The writer publishes by moving `tail`, the reader gives room back by moving `head`. A writer that finds no room says
//! so in `starved`, and whoever reads next is told to wake it: the flag and the positions are set and looked at on the two
//! sides in opposite order with a full fence between, so one of the two sees the other. A reader that has never been far
//! behind since its last fence does without one: no writer can have starved.

use crate::sync::{Apart, AtomicU32, AtomicU64, Ordering, fence};

/// Bytes in front of a record: its length, and the same inverted, so that garbage is noticed.
pub const RECORD_HEAD_BYTES: usize = 8;
/// A writer that finds the ring empty beyond this offset goes back to its beginning, so that a conversation of small
/// messages stays within a few pages of memory.
pub const REWIND_BYTES: usize = 16 << 10;
/// Length of the mark that sends the reader to the beginning.
const REWIND: u32 = u32::MAX;
/// The reader gives room back after this share of the ring, or when it has read all.
const RELEASE_SHARE: u64 = 8;
/// A writer finds no room for a record only when more than this share of the ring is taken: a record needs no more than the
/// rest of it.
const STARVED_SHARE: u64 = 4;

/// The words that both ends look at.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Words {
    tail: Apart<AtomicU64>,
    head: Apart<AtomicU64>,
    starved: AtomicU32,
    /// Set by either end when it has let go.
    closed: AtomicU32,
    /// Messages that the reader had from the writer's store and is done with: a bit for each.
    returned: AtomicU64,
}

impl Words {
    /// Words that say that so much was written and read, whether it was or not.
    pub fn at(tail: u64, head: u64) -> Words {
        Words {
            tail: Apart(AtomicU64::new(tail)),
            head: Apart(AtomicU64::new(head)),
            ..Words::default()
        }
    }

    /// The reader is done with a message.
    pub fn give_back(&self, slot: u8) {
        self.returned.fetch_or(1 << (slot % 64), Ordering::Release);
    }

    /// What the reader is done with since the last time; the writer may write there again.
    pub fn take_returned(&self) -> u64 {
        if self.returned.load(Ordering::Relaxed) == 0 {
            0
        } else {
            self.returned.swap(0, Ordering::Acquire)
        }
    }
}

/// Where a ring lies.
pub trait Area {
    /// The words.
    fn words(&self) -> &Words;
    /// Bytes of data: a power of two, at least 64.
    fn capacity(&self) -> usize;
    /// Copies into the data; the range does not reach over the end.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Copies out of the data; the range does not reach over the end.
    fn read(&self, offset: usize, bytes: &mut [u8]);
    /// Copies out of the data behind what `out` holds; the range does not reach over the end.
    fn append(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let old = out.len();
        out.resize(old + len, 0);
        self.read(offset, &mut out[old..]);
    }
}

/// The other end broke the rules; this ring cannot be used any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the shared ring holds what no writer of ours puts there")
    }
}

impl std::error::Error for Broken {}

#[inline]
fn record_bytes(len: usize) -> usize {
    RECORD_HEAD_BYTES + len.next_multiple_of(8)
}

/// The writing end.
#[derive(Debug)]
pub struct Writer<A> {
    area: A,
    tail: u64,
    /// The reader has got at least this far.
    head: u64,
    /// Bytes written from the beginning before it goes back there.
    rewind_bytes: u64,
    /// When to try the next time to go back to the beginning.
    rewind_at: u64,
}

impl<A: Area> Writer<A> {
    /// The writing end of an empty ring.
    pub fn new(area: A) -> Writer<A> {
        Writer::with_rewind(area, REWIND_BYTES)
    }

    /// The same for a ring that goes back to its beginning after `bytes`, a multiple of 8.
    pub fn with_rewind(area: A, bytes: usize) -> Writer<A> {
        Writer {
            area,
            tail: 0,
            head: 0,
            rewind_bytes: bytes as u64,
            rewind_at: bytes as u64,
        }
    }

    /// Where the ring lies.
    pub fn area(&self) -> &A {
        &self.area
    }

    /// What the reader is done with since the last time; see [`Words::take_returned`].
    pub fn take_returned(&self) -> u64 {
        self.area.words().take_returned()
    }

    /// True when a record of `len` bytes has room now.
    ///
    /// # Errors
    /// [`Broken`] when the reader's position is impossible.
    #[inline]
    pub fn has_room(&mut self, len: usize) -> Result<bool, Broken> {
        let need = record_bytes(len) as u64;
        let capacity = self.area.capacity() as u64;
        if self.tail - self.head + need <= capacity {
            return Ok(true);
        }
        self.look()?;
        Ok(self.tail - self.head + need <= capacity)
    }

    /// As [`Writer::has_room`]; when there is none, the reader will say when it has made some.
    ///
    /// # Errors
    /// As [`Writer::has_room`].
    pub fn wants_room(&mut self, len: usize) -> Result<bool, Broken> {
        if self.has_room(len)? {
            return Ok(true);
        }
        let starved = &self.area.words().starved;
        starved.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.has_room(len)
    }

    /// Writes a record made of `parts`; false, and nothing is written, when there is no room.
    ///
    /// # Errors
    /// As [`Writer::has_room`].
    #[inline]
    pub fn write<const N: usize>(&mut self, parts: [&[u8]; N]) -> Result<bool, Broken> {
        let len = parts.iter().map(|part| part.len()).sum();
        if !self.has_room(len)? {
            return Ok(false);
        }
        if self.tail >= self.rewind_at {
            self.rewind(len);
        }
        let length = u32::try_from(len).expect("a record is smaller than its ring");
        let mut at = self.tail;
        self.put(&mut at, &head(length));
        for part in parts {
            self.put(&mut at, part);
        }
        self.tail += record_bytes(len) as u64;
        self.area.words().tail.0.store(self.tail, Ordering::Release);
        Ok(true)
    }

    /// Goes back to the beginning when the ring is empty and a while has passed.
    fn rewind(&mut self, len: usize) {
        self.rewind_at = self.tail + self.rewind_bytes / 8;
        let capacity = self.area.capacity();
        let rest = (capacity as u64) - self.tail % capacity as u64;
        // A lie of the reader is noticed when room is short.
        let is_empty = self.area.words().head.0.load(Ordering::Acquire) == self.tail;
        if is_empty && rest + record_bytes(len) as u64 <= capacity as u64 {
            self.head = self.tail;
            let mut at = self.tail;
            self.put(&mut at, &head(REWIND));
            self.tail += rest;
            self.rewind_at = self.tail + self.rewind_bytes;
        }
    }

    fn look(&mut self) -> Result<(), Broken> {
        let head = self.area.words().head.0.load(Ordering::Acquire);
        if head < self.head || head > self.tail {
            return Err(Broken);
        }
        self.head = head;
        Ok(())
    }

    #[inline]
    fn put(&self, at: &mut u64, bytes: &[u8]) {
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

    /// Tells the other end that this one has let go.
    pub fn close(&self) {
        self.area.words().closed.store(1, Ordering::SeqCst);
    }

    /// True when the other end has let go: what was written and not read will not be read. After a fence, so that a record
    /// written before is either read or not, but the answer is not too old.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.area.words().closed.load(Ordering::Acquire) != 0
    }
}

/// Length and its inverse, as they stand in front of a record.
#[inline]
fn head(length: u32) -> [u8; RECORD_HEAD_BYTES] {
    (u64::from(length) | u64::from(!length) << 32).to_le_bytes()
}

/// The reading end.
#[derive(Debug)]
pub struct Reader<A> {
    area: A,
    head: u64,
    released: u64,
    /// What had been read when room was given back with a fence the last time.
    fenced: u64,
    /// The writer has got at least this far.
    tail: u64,
}

impl<A: Area> Reader<A> {
    /// The reading end of an empty ring.
    pub fn new(area: A) -> Reader<A> {
        Reader {
            area,
            head: 0,
            released: 0,
            fenced: 0,
            tail: 0,
        }
    }

    /// Where the ring lies.
    pub fn area(&self) -> &A {
        &self.area
    }

    /// True when nothing is there to be read, at a glance.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail && self.area.words().tail.0.load(Ordering::Acquire) == self.head
    }

    /// The next record, if there is one.
    ///
    /// # Errors
    /// [`Broken`] when what is there is no record.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'_, A>>, Broken> {
        loop {
            if self.head == self.tail {
                self.tail = self.area.words().tail.0.load(Ordering::Acquire);
                if self.head == self.tail {
                    return Ok(None);
                }
            }
            let capacity = self.area.capacity() as u64;
            let there = self
                .tail
                .checked_sub(self.head)
                .filter(|there| *there <= capacity)
                .ok_or(Broken)?;
            if there < RECORD_HEAD_BYTES as u64 || !self.head.is_multiple_of(8) {
                return Err(Broken);
            }
            let mut bytes = [0; RECORD_HEAD_BYTES];
            self.area.read((self.head % capacity) as usize, &mut bytes);
            let word = u64::from_le_bytes(bytes);
            let length = word as u32;
            if head(length) != bytes {
                return Err(Broken);
            }
            if length == REWIND {
                let rest = capacity - self.head % capacity;
                if rest > there {
                    return Err(Broken);
                }
                self.head += rest;
                continue;
            }
            let len = length as usize;
            if record_bytes(len) as u64 > there {
                return Err(Broken);
            }
            let at = self.head + RECORD_HEAD_BYTES as u64;
            self.head += record_bytes(len) as u64;
            return Ok(Some(Record {
                area: &self.area,
                at,
                left: len,
            }));
        }
    }

    /// Gives room back after reading some, when it is time; true when the writer waits for room and has to be woken.
    #[inline]
    pub fn release(&mut self) -> bool {
        let (unreleased, capacity) = (self.head - self.released, self.area.capacity() as u64);
        if unreleased == 0 || (self.head != self.tail && unreleased < capacity / RELEASE_SHARE) {
            return false;
        }
        self.released = self.head;
        let words = self.area.words();
        words.head.0.store(self.head, Ordering::Release);
        // A writer without room has seen no less than what was fenced, and more than this share beyond it is written then;
        // it is read sooner or later, and the fence comes with that.
        if self.tail - self.fenced < capacity / STARVED_SHARE {
            return false;
        }
        self.fenced = self.head;
        fence(Ordering::SeqCst);
        words.starved.load(Ordering::Relaxed) != 0 && words.starved.swap(0, Ordering::SeqCst) != 0
    }

    /// Tells the other end that this one has let go. A record that comes while this is called is there for who reads after it,
    /// or its writer finds after its next fence that nobody will read it.
    pub fn close(&self) {
        self.area.words().closed.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// True when the other end has let go. What it wrote before is there for who reads after this look, not before it.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.area.words().closed.load(Ordering::Acquire) != 0
    }
}

/// A record being read; its bytes are taken from front to back.
#[derive(Debug)]
pub struct Record<'a, A> {
    area: &'a A,
    at: u64,
    left: usize,
}

impl<A: Area> Record<'_, A> {
    /// Bytes not yet taken.
    pub fn len(&self) -> usize {
        self.left
    }

    /// True when all has been taken.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// Takes the next `N` bytes; `None` when fewer are left.
    #[inline]
    pub fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let (first, second) = self.pieces(N)?;
        self.area.read(first.0, &mut bytes[..first.1]);
        if second > 0 {
            self.area.read(0, &mut bytes[first.1..]);
        }
        Some(bytes)
    }

    /// Takes the rest behind what `out` holds.
    #[inline]
    pub fn append_to(&mut self, out: &mut Vec<u8>) {
        let Some((first, second)) = self.pieces(self.left) else {
            return;
        };
        self.area.append(first.0, first.1, out);
        if second > 0 {
            self.area.append(0, second, out);
        }
    }

    /// Offset and length of the next `len` bytes up to the ring's end, and how many follow at its beginning.
    #[inline]
    fn pieces(&mut self, len: usize) -> Option<((usize, usize), usize)> {
        self.left = self.left.checked_sub(len)?;
        let capacity = self.area.capacity();
        let offset = (self.at % capacity as u64) as usize;
        let first = len.min(capacity - offset);
        self.at += len as u64;
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
    struct Plain(Rc<(Words, RefCell<Vec<u8>>)>);

    impl Area for Plain {
        fn words(&self) -> &Words {
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

    fn ring(capacity: usize) -> (Writer<Plain>, Reader<Plain>, Plain) {
        let area = Plain(Rc::new((
            Words::default(),
            RefCell::new(vec![0xaa; capacity]),
        )));
        (Writer::new(area.clone()), Reader::new(area.clone()), area)
    }

    fn take_all(reader: &mut Reader<Plain>) -> Vec<Vec<u8>> {
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
    fn records_of_all_sizes_come_out_in_order_over_many_rounds() {
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
    fn a_quiet_conversation_stays_at_the_beginning_of_its_ring() {
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
    fn a_starving_writer_is_told_of_room() {
        let (mut writer, mut reader, _) = ring(64);
        assert!(writer.write([&[1; 40]]).expect("good"));
        assert!(!writer.wants_room(40).expect("good"));
        assert!(reader.next_record().expect("good").is_some());
        assert!(reader.release(), "the writer has to be woken");
        assert!(writer.write([&[2; 40]]).expect("good"));
        assert!(reader.next_record().expect("good").is_some());
        assert!(!reader.release(), "nobody waits");
    }

    #[test]
    fn garbage_in_the_data_or_the_words_breaks_the_ring_and_nothing_else() {
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
                1 => area.words().tail.0.store(dice() % 200, Ordering::Relaxed),
                _ => area.words().head.0.store(dice() % 200, Ordering::Relaxed),
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
    fn the_end_of_either_is_seen_by_the_other() {
        let (writer, reader, _) = ring(64);
        assert!(!writer.is_closed());
        reader.close();
        assert!(writer.is_closed() && reader.is_closed());
    }
}
