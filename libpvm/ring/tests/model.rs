//! Checks rings and doorbells under all interleavings of two threads, with the model checker
//! `loom`. Needs the feature `loom`: see `cargo xtask test`.
#![allow(unsafe_code)] // The checker's cells hand out pointers.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;
use sempa_ring::biased_lock::BiasedLock;
use sempa_ring::doorbell::{Doorbell, WakeTarget};
use sempa_ring::ring::{RingControl, RingMemory, RingReader, RingWriter};

const CAPACITY: usize = 64;

/// Memory that the checker monitors: a concurrent write and read of the same byte fails the test.
struct MonitoredMemory {
    control: RingControl,
    bytes: Vec<UnsafeCell<u8>>,
    /// The same bytes as words, for headers.
    words: Vec<AtomicU64>,
}

/// Stands for data in a word.
const DATA_WORD: u64 = 7;

#[derive(Clone)]
struct LoomMemory(Arc<MonitoredMemory>);

impl RingMemory for LoomMemory {
    fn control(&self) -> &RingControl {
        &self.0.control
    }
    fn capacity(&self) -> usize {
        CAPACITY
    }
    fn load_header(&self, offset: usize) -> u64 {
        self.0.words[offset / 8].load(Ordering::Acquire)
    }
    fn store_header(&self, offset: usize, word: u64, ordering: Ordering) {
        self.0.words[offset / 8].store(word, ordering);
    }
    fn write(&self, offset: usize, bytes: &[u8]) {
        for index in offset / 8..(offset + bytes.len()).div_ceil(8) {
            self.0.words[index].store(DATA_WORD, Ordering::Relaxed);
        }
        for (cell, byte) in self.0.bytes[offset..].iter().zip(bytes) {
            // SAFETY: the checker fails the test if another thread accesses the cell at the same
            // time.
            cell.with_mut(|cell| unsafe { *cell = *byte });
        }
    }
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        for (cell, byte) in self.0.bytes[offset..].iter().zip(bytes) {
            // SAFETY: the checker fails the test if another thread writes to the cell at the same
            // time.
            *byte = cell.with(|cell| unsafe { *cell });
        }
    }
}

fn new_memory() -> LoomMemory {
    let bytes = (0..CAPACITY).map(|_| UnsafeCell::new(0)).collect();
    LoomMemory(Arc::new(MonitoredMemory {
        control: RingControl::default(),
        bytes,
        words: (0..CAPACITY / 8).map(|_| AtomicU64::new(0)).collect(),
    }))
}

fn read(reader: &mut RingReader<LoomMemory>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    reader
        .next_record()
        .expect("a good ring")?
        .append_to(&mut bytes);
    Some(bytes)
}

/// Runs a model in which one thread writes three records of `BYTES` bytes while another thread
/// reads them. `create_writer` creates the writing end of the ring.
fn exchange_three_records<const BYTES: usize>(
    create_writer: fn(LoomMemory) -> RingWriter<LoomMemory>,
) {
    loom::model(move || {
        let memory = new_memory();
        let mut create_writer = create_writer(memory.clone());
        let writer_thread = thread::spawn(move || {
            for n in 0..3u8 {
                while !create_writer.write([&[n; BYTES]]).expect("a good ring") {
                    thread::yield_now();
                }
            }
        });
        let mut reader = RingReader::new(memory);
        for n in 0..3u8 {
            let bytes = loop {
                match read(&mut reader) {
                    Some(bytes) => break bytes,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(bytes, [n; BYTES]);
            reader.release();
        }
        writer_thread.join().expect("written");
    });
}

#[test]
fn records_arrive_whole_and_in_order() {
    exchange_three_records::<20>(RingWriter::new);
}

#[test]
fn starved_writer_is_woken() {
    loom::model(|| {
        let memory = new_memory();
        let mut writer = RingWriter::new(memory.clone());
        assert!(writer.write([&[1; 40]]).expect("a good ring"));
        let wake_flag = Arc::new(AtomicU32::new(0));
        let reader_wake_flag = wake_flag.clone();
        let reader_thread = thread::spawn(move || {
            let mut reader = RingReader::new(memory);
            assert!(read(&mut reader).is_some());
            if reader.release() {
                reader_wake_flag.store(1, Ordering::SeqCst);
            }
        });
        let has_space = writer.has_space_or_request_wake(40).expect("a good ring");
        reader_thread.join().expect("read");
        assert!(
            has_space || wake_flag.load(Ordering::SeqCst) == 1,
            "nobody would ever wake the writer"
        );
    });
}

#[test]
fn release_without_fence_starves_no_writer() {
    loom::model(|| {
        let memory = new_memory();
        let mut writer = RingWriter::new(memory.clone());
        assert!(writer.write([]).expect("a good ring"));
        let wake_flag = Arc::new(AtomicU32::new(0));
        let reader_wake_flag = wake_flag.clone();
        let reader_thread = thread::spawn(move || {
            let mut reader = RingReader::new(memory);
            for _ in 0..2 {
                while read(&mut reader).is_none() {
                    thread::yield_now();
                }
                if reader.release() {
                    reader_wake_flag.store(1, Ordering::SeqCst);
                }
            }
        });
        assert!(writer.write([&[1; 40]]).expect("a good ring"));
        let has_space = writer.has_space_or_request_wake(40).expect("a good ring");
        reader_thread.join().expect("read");
        assert!(
            has_space || wake_flag.load(Ordering::SeqCst) == 1,
            "nobody would ever wake the writer"
        );
    });
}

#[test]
fn sleeper_misses_no_record() {
    loom::model(|| {
        let memory = new_memory();
        let doorbell = Arc::new(Doorbell::default());
        let (mut writer, writer_doorbell) = (RingWriter::new(memory.clone()), doorbell.clone());
        let writer_thread = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            writer_doorbell.notify(3, false) == WakeTarget::Sleepers
        });
        let mut reader = RingReader::new(memory);
        let word_value = doorbell.prepare_sleep();
        let has_read_record =
            doorbell.next_pending_word(0).is_some() && read(&mut reader).is_some();
        let must_wake = writer_thread.join().expect("written");
        assert!(
            has_read_record
                || must_wake
                || doorbell.sleep_word().load(Ordering::SeqCst) != word_value,
            "it would sleep for ever"
        );
    });
}

/// Returns a doorbell whose bit for slot 3 is already set, a reader, and a thread that writes a
/// record, notifies the doorbell and returns the threads to wake.
fn notified_doorbell() -> (
    Arc<Doorbell>,
    RingReader<LoomMemory>,
    thread::JoinHandle<WakeTarget>,
) {
    let memory = new_memory();
    let doorbell = Arc::new(Doorbell::default());
    doorbell.notify(3, false);
    let (mut writer, writer_doorbell) = (RingWriter::new(memory.clone()), doorbell.clone());
    let writer_thread = thread::spawn(move || {
        assert!(writer.write([&[1; 8]]).expect("a good ring"));
        writer_doorbell.notify(3, false)
    });
    (doorbell, RingReader::new(memory), writer_thread)
}

#[test]
fn always_notified_drainer_misses_no_record() {
    loom::model(|| {
        let (doorbell, mut reader, writer_thread) = notified_doorbell();
        doorbell.set_notify_always(true);
        let has_read_record =
            doorbell.next_pending_word(0).is_some() && read(&mut reader).is_some();
        let drainer_requested = writer_thread.join().expect("written") == WakeTarget::Drainer;
        assert!(
            has_read_record || drainer_requested,
            "it would sleep for ever"
        );
    });
}

#[test]
fn cleared_bit_is_set_by_later_writers() {
    loom::model(|| {
        let (doorbell, mut reader, writer_thread) = notified_doorbell();
        doorbell.clear_slot(3);
        let has_read_record = read(&mut reader).is_some();
        writer_thread.join().expect("written");
        assert!(
            has_read_record
                || doorbell
                    .next_pending_word(0)
                    .is_some_and(|(_, bits)| bits >> 3 & 1 == 1),
            "the record would stay unseen"
        );
    });
}

/// Clearing the bit of slot 3 loses no record of the writer with slot 5, whose bit is in the same
/// word.
#[test]
fn clearing_one_slot_keeps_the_other() {
    // With three threads the checker can explore only interleavings with few preemptions.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let doorbell = Arc::new(Doorbell::default());
        doorbell.notify(3, false);
        let memories = [new_memory(), new_memory()];
        let writer_threads: Vec<_> = [3, 5]
            .into_iter()
            .zip(memories.clone())
            .map(|(slot, memory)| {
                let (mut writer, doorbell) = (RingWriter::new(memory), doorbell.clone());
                thread::spawn(move || {
                    assert!(writer.write([&[1; 8]]).expect("a good ring"));
                    doorbell.notify(slot, false);
                })
            })
            .collect();
        let mut readers = memories.map(RingReader::new);
        doorbell.clear_slot(3);
        let has_read_record = read(&mut readers[0]).is_some();
        writer_threads
            .into_iter()
            .for_each(|thread| thread.join().expect("written"));
        let bits = doorbell.next_pending_word(0).map_or(0, |(_, bits)| bits);
        assert!(
            has_read_record || bits >> 3 & 1 == 1,
            "the first record would stay unseen"
        );
        assert!(bits >> 5 & 1 == 1, "the second record would stay unseen");
    });
}

/// A drainer that accepts a request finds the record, or is requested again.
#[test]
fn accepted_request_misses_no_record() {
    loom::model(|| {
        let memory = new_memory();
        let doorbell = Arc::new(Doorbell::default());
        doorbell.request_drainer();
        let (mut writer, writer_doorbell) = (RingWriter::new(memory.clone()), doorbell.clone());
        let writer_thread = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            writer_doorbell.notify(3, true);
        });
        let mut reader = RingReader::new(memory);
        doorbell.accept_drainer_request();
        let has_read_record =
            doorbell.next_pending_word(0).is_some() && read(&mut reader).is_some();
        writer_thread.join().expect("written");
        assert!(
            has_read_record || doorbell.drainer_word().load(Ordering::SeqCst) == 1,
            "it would sleep for ever"
        );
    });
}

/// A reader that first checks whether the ring is closed still reads all records that were written
/// before the close.
#[test]
fn close_hides_no_earlier_record() {
    loom::model(|| {
        let memory = new_memory();
        let mut writer = RingWriter::new(memory.clone());
        let writer_thread = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            writer.close();
        });
        let mut reader = RingReader::new(memory);
        let is_closed = reader.is_closed();
        let has_read_record = read(&mut reader).is_some();
        assert!(
            has_read_record || !is_closed,
            "the last record would be lost"
        );
        writer_thread.join().expect("written");
    });
}

/// A record that is written while the reader closes the ring is read, or its writer sees the close.
#[test]
fn record_during_close_is_read_or_writer_sees_it() {
    loom::model(|| {
        let memory = new_memory();
        let mut writer = RingWriter::new(memory.clone());
        let writer_thread = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            fence(Ordering::SeqCst);
            writer.is_closed()
        });
        let mut reader = RingReader::new(memory);
        reader.close();
        let has_read_record = read(&mut reader).is_some();
        let writer_saw_close = writer_thread.join().expect("written");
        assert!(
            has_read_record || writer_saw_close,
            "the last record would be lost"
        );
    });
}

/// A drainer that accepts a request sees that the ring is closed, or is requested again.
#[test]
fn accepted_request_misses_no_close() {
    loom::model(|| {
        let memory = new_memory();
        let doorbell = Arc::new(Doorbell::default());
        doorbell.request_drainer();
        let (reader, closer_doorbell) = (RingReader::new(memory.clone()), doorbell.clone());
        let closer_thread = thread::spawn(move || {
            reader.close();
            closer_doorbell.notify(3, true);
        });
        let writer = RingWriter::new(memory);
        doorbell.accept_drainer_request();
        let is_closed = writer.is_closed();
        closer_thread.join().expect("ended");
        assert!(
            is_closed || doorbell.drainer_word().load(Ordering::SeqCst) == 1,
            "it would write for ever"
        );
    });
}

#[test]
fn rewind_loses_and_overwrites_nothing() {
    exchange_three_records::<8>(|area| RingWriter::with_rewind_bytes(area, 16));
}

#[test]
fn leased_memory_is_not_overwritten() {
    loom::model(|| {
        let memory = new_memory();
        let leased_byte = Arc::new(UnsafeCell::new(1u8));
        let (reader_memory, reader_byte) = (memory.clone(), leased_byte.clone());
        let reader_thread = thread::spawn(move || {
            // SAFETY: the checker fails the test if another thread writes at the same time.
            assert_eq!(reader_byte.with(|byte| unsafe { *byte }), 1);
            reader_memory.control().return_lease(7);
        });
        if memory.control().take_returned_leases() != 0 {
            // SAFETY: the checker fails the test if another thread reads at the same time.
            leased_byte.with_mut(|byte| unsafe { *byte = 2 });
        }
        reader_thread.join().expect("read");
    });
}

/// Looks once at the two rings whose bits are set. Returns whether each ring had a record.
fn look(doorbell: &Doorbell, readers: &mut [RingReader<LoomMemory>; 2]) -> [bool; 2] {
    let bits = doorbell.next_pending_word(0).map_or(0, |(_, bits)| bits);
    let mut has_record = [false; 2];
    for (slot, reader) in readers.iter_mut().enumerate() {
        has_record[slot] = bits >> slot & 1 == 1 && read(reader).is_some();
    }
    has_record
}

/// Runs a model in which one task writes to ring 0 of the reader and then tells another task, and
/// that task writes to ring 1 of the reader when it was told. A reader that has seen the second
/// message finds the first one at the latest in the look that follows. `before_looks` runs in the
/// reader.
fn check_second_look(before_looks: fn(&Doorbell, &mut [RingReader<LoomMemory>; 2]) -> bool) {
    loom::model(move || {
        let memories = [new_memory(), new_memory()];
        let doorbell = Arc::new(Doorbell::default());
        let was_told = Arc::new(AtomicU32::new(0));
        let (first_memory, second_memory) = (memories[0].clone(), memories[1].clone());
        let (first_doorbell, second_doorbell) = (doorbell.clone(), doorbell.clone());
        let tell = was_told.clone();
        let first_writer = thread::spawn(move || {
            let mut writer = RingWriter::new(first_memory);
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            first_doorbell.notify(0, false);
            tell.store(1, Ordering::Release);
        });
        let second_writer = thread::spawn(move || {
            if was_told.load(Ordering::Acquire) == 1 {
                let mut writer = RingWriter::new(second_memory);
                assert!(writer.write([&[2; 8]]).expect("a good ring"));
                second_doorbell.notify(1, false);
            }
        });
        let mut readers = memories.map(RingReader::new);
        let mut has_first = before_looks(&doorbell, &mut readers);
        let [found_first, found_second] = look(&doorbell, &mut readers);
        has_first |= found_first;
        if found_second && !has_first {
            let [found_first, _] = look(&doorbell, &mut readers);
            assert!(found_first, "the second look misses an earlier message");
        }
        first_writer.join().expect("written");
        second_writer.join().expect("written");
    });
}

#[test]
fn second_look_finds_every_earlier_record() {
    check_second_look(|_, _| false);
}

/// The bit of the first ring is cleared while its record arrives, as before a sleep.
#[test]
fn second_look_finds_record_whose_bit_was_cleared() {
    check_second_look(|doorbell, readers| {
        doorbell.clear_slot(0);
        read(&mut readers[0]).is_some()
    });
}

/// Increments the counter. The checker fails the test if another thread accesses it meanwhile.
fn increment(counter: &UnsafeCell<u32>) {
    // SAFETY: see above.
    counter.with_mut(|counter| unsafe { *counter += 1 });
}

/// Returns a counter of 2 behind a lock that is biased to the calling thread.
fn biased_counter() -> Arc<BiasedLock<UnsafeCell<u32>>> {
    let lock = Arc::new(BiasedLock::new(UnsafeCell::new(0)));
    for _ in 0..2 {
        increment(&lock.lock());
    }
    lock
}

/// One thread acquires the lock in the biased mode, and another one ends this mode.
#[test]
fn biased_lock_admits_one_thread() {
    loom::model(|| {
        let lock = biased_counter();
        let other_thread = thread::spawn({
            let lock = lock.clone();
            move || increment(&lock.lock())
        });
        for _ in 0..2 {
            increment(&lock.lock());
        }
        other_thread.join().expect("the thread ends");
        // SAFETY: no other thread is left.
        let count = lock.lock().with(|counter| unsafe { *counter });
        assert_eq!(count, 5);
    });
}

/// A thread that does not wait ends the biased mode while the owner may hold the lock. Its next
/// acquisition does not pass the owner either.
#[test]
fn attempt_for_biased_lock_admits_one_thread() {
    loom::model(|| {
        let lock = biased_counter();
        let other_thread = thread::spawn({
            let lock = lock.clone();
            move || {
                if let Some(counter) = lock.try_lock() {
                    increment(&counter);
                }
                increment(&lock.lock());
            }
        });
        increment(&lock.lock());
        other_thread.join().expect("the thread ends");
    });
}
