//! Measures the shared memory between two tasks, without running tasks: records that pass through a
//! ring, in one thread and between two threads, and the doorbell.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use sempa_ring::ring::{RingCorrupt, RingReader, RingWriter};
use sempa_ring::shared_memory::{
    OwnDoorbell, PeerDoorbell, RingPair, create_ring_pair, map_peer_ring_pair,
};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Record sizes in bytes, without the record header.
const SIZES: [usize; 3] = [16, 1 << 10, 64 << 10];
/// Numbers of peers that have notified a task before the task reads its doorbell.
const NOTIFIERS: [usize; 3] = [1, 64, 1000];
/// Bytes of the link header before a fragment.
const HEAD_BYTES: usize = 16;
/// Number of times a thread polls an empty ring before it yields its core.
const POLLS_BEFORE_YIELD_MAX: u32 = 2000;

fn main() {
    divan::main();
}

/// Creates the rings of two tasks. Returns the first and the second task's end.
fn pair() -> (RingPair, RingPair) {
    let (one, fd) = create_ring_pair().expect("the system has memory");
    let other = map_peer_ring_pair(fd.as_fd()).expect("it is ours");
    (one, other)
}

/// Copies the next record to `out`. Returns false if the ring is empty.
fn read_record<A: sempa_ring::ring::RingMemory>(
    reader: &mut RingReader<A>,
    out: &mut Vec<u8>,
) -> Result<bool, RingCorrupt> {
    let Some(mut record) = reader.next_record()? else {
        return Ok(false);
    };
    black_box(record.take::<HEAD_BYTES>());
    out.clear();
    record.append_to(out);
    reader.release();
    Ok(true)
}

fn spin_until_record<A: sempa_ring::ring::RingMemory>(
    reader: &mut RingReader<A>,
    out: &mut Vec<u8>,
) {
    let mut looks = 0;
    while !read_record(reader, out).expect("a good ring") {
        looks += 1;
        if looks % POLLS_BEFORE_YIELD_MAX == 0 {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

fn write_record<A: sempa_ring::ring::RingMemory>(writer: &mut RingWriter<A>, body: &[u8]) {
    assert!(
        writer.write([&[0; HEAD_BYTES], body]).expect("a good ring"),
        "the other end has taken all"
    );
}

#[divan::bench(args = SIZES)]
fn push_and_pop(bencher: Bencher, bytes: usize) {
    let (mut one, mut other) = pair();
    let (body, mut out) = (vec![7; bytes], Vec::new());
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        write_record(&mut one.writer, black_box(&body));
        assert!(read_record(&mut other.reader, &mut out).expect("a good ring"));
        out.len()
    });
}

/// Pins the calling thread to the first (`number` 0) or second (`number` 1) processor that the
/// process may use. If only one processor may be used, pins to that one.
///
/// Without pinning, the scheduler may run two busy-waiting threads on one processor for a whole
/// benchmark.
fn pin_to_processor(number: usize) {
    let all = sched_getaffinity(Pid::from_raw(0)).expect("the kernel says it");
    let mut usable = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).is_ok_and(|is| is));
    let mut one = CpuSet::new();
    if let Some(cpu) = usable.nth(number) {
        one.set(cpu).expect("it was in a set");
        sched_setaffinity(Pid::from_raw(0), &one).expect("it may be used");
    }
}

/// Measures the round trip of a record between two busy-waiting threads, each on its own core if
/// the process may use two.
#[divan::bench(args = SIZES)]
fn round_trip_of_two_threads(bencher: Bencher, bytes: usize) {
    let (mut one, mut other) = pair();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = &ended;
        scope.spawn(move || {
            pin_to_processor(1);
            let mut out = Vec::new();
            let mut looks = 0;
            while !ended.load(Ordering::Relaxed) {
                if read_record(&mut other.reader, &mut out).expect("a good ring") {
                    write_record(&mut other.writer, &out);
                }
                looks += 1;
                if looks % POLLS_BEFORE_YIELD_MAX == 0 {
                    std::thread::yield_now();
                }
                std::hint::spin_loop();
            }
        });
        let before = sched_getaffinity(Pid::from_raw(0)).expect("the kernel says it");
        pin_to_processor(0);
        let (body, mut out) = (vec![7; bytes], Vec::new());
        bencher.counter(BytesCount::new(2 * bytes)).bench_local(|| {
            write_record(&mut one.writer, black_box(&body));
            spin_until_record(&mut one.reader, &mut out);
            out.len()
        });
        ended.store(true, Ordering::Relaxed);
        sched_setaffinity(Pid::from_raw(0), &before).expect("it was so");
    });
}

/// `ringers` peers notify a task. The task finds all of them and clears their bits. No thread
/// sleeps.
#[divan::bench(args = NOTIFIERS)]
fn a_bell_is_rung_and_answered(bencher: Bencher, ringers: usize) {
    let own = OwnDoorbell::new().expect("the system has memory");
    let peer =
        PeerDoorbell::map(own.share().expect("the system has memory").as_fd()).expect("it is ours");
    bencher.counter(ItemsCount::new(ringers)).bench_local(|| {
        for slot in 0..ringers {
            black_box(peer.notify(slot, false));
        }
        let (mut found, mut from) = (0, 0);
        while let Some((index, mut bits)) = own.pending_words(from) {
            from = index + 1;
            while bits != 0 {
                own.clear(index * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
                found += 1;
            }
        }
        assert_eq!(found, ringers);
    });
}
