//! Measures the shared memory between two tasks, without running tasks: the doorbell, and the
//! transfer of records through a ring, in one thread and between two threads.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use sempa_ring::ring::{CorruptRing, RingReader, RingWriter};
use sempa_ring::shared_memory::{
    OwnDoorbell, PeerDoorbell, RingPair, create_ring_pair, map_peer_ring_pair,
};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Record sizes in bytes, without the record header.
const RECORD_SIZES: [usize; 3] = [16, 1 << 10, 64 << 10];
/// Numbers of peers that notify a task before the task reads its doorbell.
const NOTIFIER_COUNTS: [usize; 3] = [1, 64, 1000];
/// Size in bytes of the link header that precedes each fragment.
const LINK_HEADER_BYTES: usize = 16;
/// Number of polls of an empty ring after which a thread yields its processor.
const POLLS_BEFORE_YIELD: u32 = 2000;

fn main() {
    divan::main();
}

/// Creates the rings of two tasks. Returns the first and the second task's ring pair.
fn create_ring_pairs() -> (RingPair, RingPair) {
    let (own_pair, fd) = create_ring_pair().expect("the system has memory");
    let peer_pair = map_peer_ring_pair(fd.as_fd()).expect("it is ours");
    (own_pair, peer_pair)
}

/// Copies the next record, without its link header, to `out` and releases the record. Returns false
/// if the ring is empty.
///
/// # Errors
/// The ring is corrupt.
fn read_record<A: sempa_ring::ring::RingMemory>(
    reader: &mut RingReader<A>,
    out: &mut Vec<u8>,
) -> Result<bool, CorruptRing> {
    let Some(mut record) = reader.next_record()? else {
        return Ok(false);
    };
    black_box(record.take_bytes::<LINK_HEADER_BYTES>());
    out.clear();
    record.append_to(out);
    reader.release();
    Ok(true)
}

fn spin_until_record_is_read<A: sempa_ring::ring::RingMemory>(
    reader: &mut RingReader<A>,
    out: &mut Vec<u8>,
) {
    let mut poll_count = 0;
    while !read_record(reader, out).expect("a good ring") {
        poll_count += 1;
        if poll_count % POLLS_BEFORE_YIELD == 0 {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

fn write_record<A: sempa_ring::ring::RingMemory>(writer: &mut RingWriter<A>, body: &[u8]) {
    assert!(
        writer
            .write([&[0; LINK_HEADER_BYTES], body])
            .expect("a good ring"),
        "the other end has taken all"
    );
}

#[divan::bench(args = RECORD_SIZES)]
fn push_and_pop(bencher: Bencher, record_bytes: usize) {
    let (mut own_pair, mut peer_pair) = create_ring_pairs();
    let (body, mut out) = (vec![7; record_bytes], Vec::new());
    bencher
        .counter(BytesCount::new(record_bytes))
        .bench_local(|| {
            write_record(&mut own_pair.writer, black_box(&body));
            assert!(read_record(&mut peer_pair.reader, &mut out).expect("a good ring"));
            out.len()
        });
}

/// Pins the calling thread to the first (`index` 0) or second (`index` 1) processor that the
/// process may use. If the process may use only one processor, an `index` of 1 has no effect.
///
/// Without pinning, the scheduler may run two busy-waiting threads on one processor for a whole
/// benchmark.
fn pin_to_processor(index: usize) {
    let allowed_set = sched_getaffinity(Pid::from_raw(0)).expect("the kernel says it");
    let mut allowed_cpus = (0..CpuSet::count())
        .filter(|cpu| allowed_set.is_set(*cpu).is_ok_and(|is_allowed| is_allowed));
    let mut chosen_set = CpuSet::new();
    if let Some(cpu) = allowed_cpus.nth(index) {
        chosen_set.set(cpu).expect("it was in a set");
        sched_setaffinity(Pid::from_raw(0), &chosen_set).expect("it may be used");
    }
}

/// Measures the round trip of a record between two busy-waiting threads. Each thread has its own
/// processor if the process may use two.
#[divan::bench(args = RECORD_SIZES)]
fn round_trip_of_two_threads(bencher: Bencher, record_bytes: usize) {
    let (mut own_pair, mut peer_pair) = create_ring_pairs();
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let has_ended = &has_ended;
        scope.spawn(move || {
            pin_to_processor(1);
            let mut out = Vec::new();
            let mut poll_count = 0;
            while !has_ended.load(Ordering::Relaxed) {
                if read_record(&mut peer_pair.reader, &mut out).expect("a good ring") {
                    write_record(&mut peer_pair.writer, &out);
                }
                poll_count += 1;
                if poll_count % POLLS_BEFORE_YIELD == 0 {
                    std::thread::yield_now();
                }
                std::hint::spin_loop();
            }
        });
        let old_affinity = sched_getaffinity(Pid::from_raw(0)).expect("the kernel says it");
        pin_to_processor(0);
        let (body, mut out) = (vec![7; record_bytes], Vec::new());
        bencher
            .counter(BytesCount::new(2 * record_bytes))
            .bench_local(|| {
                write_record(&mut own_pair.writer, black_box(&body));
                spin_until_record_is_read(&mut own_pair.reader, &mut out);
                out.len()
            });
        has_ended.store(true, Ordering::Relaxed);
        sched_setaffinity(Pid::from_raw(0), &old_affinity).expect("it was so");
    });
}

/// Measures notifications: `notifier_count` peers notify a task, and the task finds all of them and
/// clears their bits. No thread sleeps.
#[divan::bench(args = NOTIFIER_COUNTS)]
fn notify_and_find_peers(bencher: Bencher, notifier_count: usize) {
    let doorbell = OwnDoorbell::new().expect("the system has memory");
    let peer_view = PeerDoorbell::map(doorbell.share().expect("the system has memory").as_fd())
        .expect("it is ours");
    bencher
        .counter(ItemsCount::new(notifier_count))
        .bench_local(|| {
            for slot in 0..notifier_count {
                black_box(peer_view.notify(slot, false));
            }
            let (mut found_count, mut next_word) = (0, 0);
            while let Some((index, mut bits)) = doorbell.next_pending_word(next_word) {
                next_word = index + 1;
                while bits != 0 {
                    doorbell.clear_slot(index * 64 + bits.trailing_zeros() as usize);
                    bits &= bits - 1;
                    found_count += 1;
                }
            }
            assert_eq!(found_count, notifier_count);
        });
}
