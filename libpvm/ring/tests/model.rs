//! Checks rings and doorbells under all interleavings of two threads, with the model checker
//! `loom`. Needs the feature `loom`: see `cargo xtask test`.
#![allow(unsafe_code)] // The checker's cells hand out pointers.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use sempa_ring::doorbell::{Doorbell, WakeTarget};
use sempa_ring::ring::{RingControl, RingMemory, RingReader, RingWriter};

const CAPACITY: usize = 64;

/// Memory that the checker monitors: a concurrent write and read of the same byte fails the test.
struct MonitoredMemory {
    control: RingControl,
    bytes: Vec<UnsafeCell<u8>>,
}

#[derive(Clone)]
struct LoomMemory(Arc<MonitoredMemory>);

impl RingMemory for LoomMemory {
    fn control(&self) -> &RingControl {
        &self.0.control
    }
    fn capacity(&self) -> usize {
        CAPACITY
    }
    fn write(&self, offset: usize, bytes: &[u8]) {
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

/// One thread writes three records of `BYTES` bytes while another thread reads them. `writer`
/// creates the writing end.
fn exchange_three_records<const BYTES: usize>(writer: fn(LoomMemory) -> RingWriter<LoomMemory>) {
    loom::model(move || {
        let area = new_memory();
        let mut writer = writer(area.clone());
        let writing = thread::spawn(move || {
            for n in 0..3u8 {
                while !writer.write([&[n; BYTES]]).expect("a good ring") {
                    thread::yield_now();
                }
            }
        });
        let mut reader = RingReader::new(area);
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
        writing.join().expect("written");
    });
}

#[test]
fn records_arrive_whole_and_in_order() {
    exchange_three_records::<20>(RingWriter::new);
}

#[test]
fn starved_writer_is_woken() {
    loom::model(|| {
        let area = new_memory();
        let mut writer = RingWriter::new(area.clone());
        assert!(writer.write([&[1; 40]]).expect("a good ring"));
        let woken = Arc::new(AtomicU32::new(0));
        let tell = woken.clone();
        let reading = thread::spawn(move || {
            let mut reader = RingReader::new(area);
            assert!(read(&mut reader).is_some());
            if reader.release() {
                tell.store(1, Ordering::SeqCst);
            }
        });
        let has_room = writer.has_space_or_request_wake(40).expect("a good ring");
        reading.join().expect("read");
        assert!(
            has_room || woken.load(Ordering::SeqCst) == 1,
            "nobody would ever wake the writer"
        );
    });
}

#[test]
fn release_without_fence_starves_no_writer() {
    loom::model(|| {
        let area = new_memory();
        let mut writer = RingWriter::new(area.clone());
        assert!(writer.write([]).expect("a good ring"));
        let told = Arc::new(AtomicU32::new(0));
        let tell = told.clone();
        let reading = thread::spawn(move || {
            let mut reader = RingReader::new(area);
            for _ in 0..2 {
                while read(&mut reader).is_none() {
                    thread::yield_now();
                }
                if reader.release() {
                    tell.store(1, Ordering::SeqCst);
                }
            }
        });
        assert!(writer.write([&[1; 40]]).expect("a good ring"));
        let has_room = writer.has_space_or_request_wake(40).expect("a good ring");
        reading.join().expect("read");
        assert!(
            has_room || told.load(Ordering::SeqCst) == 1,
            "nobody would ever wake the writer"
        );
    });
}

#[test]
fn sleeper_misses_no_record() {
    loom::model(|| {
        let area = new_memory();
        let bell = Arc::new(Doorbell::default());
        let (mut writer, ringing) = (RingWriter::new(area.clone()), bell.clone());
        let writing = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            ringing.notify(3, false) == WakeTarget::Sleepers
        });
        let mut reader = RingReader::new(area);
        let seen = bell.prepare_sleep();
        let found = bell.pending_words(0).is_some() && read(&mut reader).is_some();
        let woken = writing.join().expect("written");
        assert!(
            found || woken || bell.sleep_word().load(Ordering::SeqCst) != seen,
            "it would sleep for ever"
        );
    });
}

/// Returns a doorbell with a bit already set, a reader, and a thread that writes a record, notifies
/// the doorbell and returns the threads to wake.
fn notified_doorbell() -> (
    Arc<Doorbell>,
    RingReader<LoomMemory>,
    thread::JoinHandle<WakeTarget>,
) {
    let area = new_memory();
    let bell = Arc::new(Doorbell::default());
    bell.notify(3, false);
    let (mut writer, ringing) = (RingWriter::new(area.clone()), bell.clone());
    let writing = thread::spawn(move || {
        assert!(writer.write([&[1; 8]]).expect("a good ring"));
        ringing.notify(3, false)
    });
    (bell, RingReader::new(area), writing)
}

#[test]
fn always_notified_drainer_misses_no_record() {
    loom::model(|| {
        let (bell, mut reader, writing) = notified_doorbell();
        bell.set_notify_always(true);
        let found = bell.pending_words(0).is_some() && read(&mut reader).is_some();
        let called = writing.join().expect("written") == WakeTarget::Drainer;
        assert!(found || called, "it would sleep for ever");
    });
}

#[test]
fn cleared_bit_is_set_by_later_writers() {
    loom::model(|| {
        let (bell, mut reader, writing) = notified_doorbell();
        bell.clear(3);
        let found = read(&mut reader).is_some();
        writing.join().expect("written");
        assert!(
            found
                || bell
                    .pending_words(0)
                    .is_some_and(|(_, bits)| bits >> 3 & 1 == 1),
            "the record would stay unseen"
        );
    });
}

/// Clearing the bit of one slot loses no record of a second writer whose slot is in the same word.
#[test]
fn clearing_one_slot_keeps_the_other() {
    // With three threads the checker can explore only interleavings with few preemptions.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let bell = Arc::new(Doorbell::default());
        bell.notify(3, false);
        let rings = [new_memory(), new_memory()];
        let writing: Vec<_> = [3, 5]
            .into_iter()
            .zip(rings.clone())
            .map(|(slot, area)| {
                let (mut writer, bell) = (RingWriter::new(area), bell.clone());
                thread::spawn(move || {
                    assert!(writer.write([&[1; 8]]).expect("a good ring"));
                    bell.notify(slot, false);
                })
            })
            .collect();
        let mut readers = rings.map(RingReader::new);
        bell.clear(3);
        let found = read(&mut readers[0]).is_some();
        writing
            .into_iter()
            .for_each(|thread| thread.join().expect("written"));
        let bits = bell.pending_words(0).map_or(0, |(_, bits)| bits);
        assert!(
            found || bits >> 3 & 1 == 1,
            "the first record would stay unseen"
        );
        assert!(bits >> 5 & 1 == 1, "the second record would stay unseen");
    });
}

/// A drainer that accepts a request finds the record, or is requested again.
#[test]
fn accepted_request_misses_no_record() {
    loom::model(|| {
        let area = new_memory();
        let bell = Arc::new(Doorbell::default());
        bell.request_drainer();
        let (mut writer, calling) = (RingWriter::new(area.clone()), bell.clone());
        let writing = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            calling.notify(3, true);
        });
        let mut reader = RingReader::new(area);
        bell.accept_drainer_request();
        let found = bell.pending_words(0).is_some() && read(&mut reader).is_some();
        writing.join().expect("written");
        assert!(
            found || bell.drainer_word().load(Ordering::SeqCst) == 1,
            "it would sleep for ever"
        );
    });
}

/// A reader that first checks whether the ring is closed still reads all records that were written
/// before the close.
#[test]
fn close_hides_no_earlier_record() {
    loom::model(|| {
        let area = new_memory();
        let mut writer = RingWriter::new(area.clone());
        let writing = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            writer.close();
        });
        let mut reader = RingReader::new(area);
        let closed = reader.is_closed();
        let found = read(&mut reader).is_some();
        assert!(found || !closed, "the last record would be lost");
        writing.join().expect("written");
    });
}

/// A record that is written while the reader closes the ring is read, or its writer sees the close.
#[test]
fn record_during_close_is_read_or_writer_sees_it() {
    loom::model(|| {
        let area = new_memory();
        let mut writer = RingWriter::new(area.clone());
        let writing = thread::spawn(move || {
            assert!(writer.write([&[1; 8]]).expect("a good ring"));
            fence(Ordering::SeqCst);
            writer.is_closed()
        });
        let mut reader = RingReader::new(area);
        reader.close();
        let found = read(&mut reader).is_some();
        let seen = writing.join().expect("written");
        assert!(found || seen, "the last record would be lost");
    });
}

/// A drainer that accepts a request sees that the ring is closed, or is requested again.
#[test]
fn accepted_request_misses_no_close() {
    loom::model(|| {
        let area = new_memory();
        let bell = Arc::new(Doorbell::default());
        bell.request_drainer();
        let (reader, calling) = (RingReader::new(area.clone()), bell.clone());
        let ending = thread::spawn(move || {
            reader.close();
            calling.notify(3, true);
        });
        let writer = RingWriter::new(area);
        bell.accept_drainer_request();
        let closed = writer.is_closed();
        ending.join().expect("ended");
        assert!(
            closed || bell.drainer_word().load(Ordering::SeqCst) == 1,
            "it would write for ever"
        );
    });
}

#[test]
fn rewind_loses_and_overwrites_nothing() {
    exchange_three_records::<8>(|area| RingWriter::with_rewind(area, 16));
}

#[test]
fn leased_memory_is_not_overwritten() {
    loom::model(|| {
        let area = new_memory();
        let store = Arc::new(UnsafeCell::new(1u8));
        let (reader_memory, lent) = (area.clone(), store.clone());
        let reading = thread::spawn(move || {
            // SAFETY: the checker fails the test if another thread writes at the same time.
            assert_eq!(lent.with(|byte| unsafe { *byte }), 1);
            reader_memory.control().return_lease(7);
        });
        if area.control().take_returned_leases() != 0 {
            // SAFETY: the checker fails the test if another thread reads at the same time.
            store.with_mut(|byte| unsafe { *byte = 2 });
        }
        reading.join().expect("read");
    });
}
