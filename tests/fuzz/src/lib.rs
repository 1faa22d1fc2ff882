//! Passes hostile bytes to all code that reads what other processes have written: message bodies
//! through the C interface, the documented messages of resource managers, taskers and hosters, the
//! messages of the tasker service, frames, shared memory of other tasks, and images of tasks
//! ([`images`]).
//!
//! * `tests/inputs.rs` passes random inputs to this code in each test run.
//! * `cargo run --profile ci -p sempa-fuzz --bin storm -- 10000000 SEED` passes ten million random
//!   inputs.
//! * With the nightly compiler, `cargo fuzz run unpack --features libfuzzer` in this folder lets
//!   libFuzzer search for inputs.

pub mod images;

use bytes::Bytes;
use pvm_load_watcher::machine_link::{
    self, FromMachine, MessageReader, REQUEST_BYTES_MAX, STATE_BYTES_MAX, ToMachine,
};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::link::{LinkFrame, SHORT_HEAD_BYTES, decode_short_head};
use sempa_proto::sm;
use sempa_proto::tasker_service::{self, MAGIC, ServiceReply, ServiceRequest};
use sempa_ring::block_allocator::Block;
use sempa_ring::ring::{RECORD_HEADER_BYTES, RingControl, RingMemory, RingReader, RingWriter};
use sempa_ring::shared_memory::{RingPair, create_ring_pair};
use sempa_ring::shared_pool::{LEASES_MAX, LeaseReturner, OwnPool, POOL_BYTES, PeerPool};
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_long};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

// This import links the library, whose exported C functions are declared below.
use pvm3 as _;

unsafe extern "C" {
    fn pvm_setopt(what: c_int, value: c_int) -> c_int;
    fn pvm_mkbuf(encoding: c_int) -> c_int;
    fn pvm_freebuf(mid: c_int) -> c_int;
    fn pvm_setsbuf(mid: c_int) -> c_int;
    fn pvm_setrbuf(mid: c_int) -> c_int;
    fn pvm_pkbyte(bytes: *const c_char, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkbyte(bytes: *mut c_char, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkint(numbers: *mut c_int, count: c_int, stride: c_int) -> c_int;
    fn pvm_upklong(numbers: *mut c_long, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkdouble(numbers: *mut f64, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkstr(text: *mut c_char) -> c_int;
    fn pvm_upkmesg() -> c_int;
    fn pvm_bufinfo(mid: c_int, len: *mut c_int, tag: *mut c_int, src: *mut c_int) -> c_int;
}

/// Maximum number of elements that one unpacking call requests.
const ELEMENTS_PER_CALL_MAX: usize = 64;

/// Passes one input to all readers. The first byte selects the encoding, the second byte selects
/// the order of the calls, and all further bytes are the message.
pub fn read_input(data: &[u8]) {
    let [encoding, order, body @ ..] = data else {
        return;
    };
    read_documented_messages(body);
    read_service_messages(body);
    read_load_watcher_messages(body);
    read_frames(body);
    access_hostile_ring(*order, body);
    request_pool_leases(body);
    unpack_messages(c_int::from(encoding & 1), *order, body);
}

/// Reads the body as a message of the tasker service, with a valid beginning and without one.
fn read_service_messages(body: &[u8]) {
    let length = u16::try_from(body.len()).unwrap_or(u16::MAX);
    let message = [&MAGIC[..], &length.to_le_bytes(), body].concat();
    for bytes in [body, &message] {
        let _ = tasker_service::decode::<ServiceRequest>(bytes);
        let _ = tasker_service::decode::<ServiceReply>(bytes);
    }
}

/// Reads the body as messages between load watchers: as a stream, and as one message.
fn read_load_watcher_messages(body: &[u8]) {
    for bytes in [body, &machine_link::encode(&body).unwrap_or_default()] {
        let _ = MessageReader::<ToMachine>::new(REQUEST_BYTES_MAX).push(bytes);
        let _ = MessageReader::<FromMachine>::new(STATE_BYTES_MAX).push(bytes);
    }
}

fn read_documented_messages(body: &[u8]) {
    let body = Bytes::copy_from_slice(body);
    let _ = sm::unpack_spawn(body.clone());
    let _ = sm::unpack_exec(body.clone());
    let _ = sm::unpack_tids(body.clone());
    let _ = sm::unpack_task_exit(body.clone());
    let _ = sm::unpack_hoster_reply(body);
}

fn read_frames(body: &[u8]) {
    let _ = LinkFrame::decode(Bytes::copy_from_slice(body));
    let mut decoder = FrameDecoder::new();
    decoder.push(body);
    while let Ok(Some(frame)) = decoder.next_frame() {
        let _ = frame.decode_control::<sempa_proto::task::ToTask>();
    }
}

/// A ring whose bytes and positions another task has chosen.
struct HostileRing {
    control: RingControl,
    data: RefCell<[u8; RING_BYTES]>,
}

/// Maximum size in bytes of a small record behind its header.
const SMALL_BYTES_MAX: usize = 64;
/// Size of the data of a [`HostileRing`] in bytes.
const RING_BYTES: usize = 512;

impl RingMemory for &HostileRing {
    fn control(&self) -> &RingControl {
        &self.control
    }
    fn capacity(&self) -> usize {
        RING_BYTES
    }
    fn load_header(&self, offset: usize) -> u64 {
        number_at(&self.data.borrow()[..], offset)
    }
    fn store_header(&self, offset: usize, word: u64, _ordering: Ordering) {
        self.write(offset, &word.to_le_bytes());
    }
    fn write(&self, offset: usize, bytes: &[u8]) {
        self.data.borrow_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.data.borrow()[offset..offset + bytes.len()]);
    }
}

/// Returns the eight bytes of the input at offset `offset` as a little-endian number; 0 if the
/// input is too short.
fn number_at(body: &[u8], offset: usize) -> u64 {
    body.get(offset..offset + 8).map_or(0, |bytes| {
        u64::from_le_bytes(bytes.try_into().expect("eight"))
    })
}

/// Reads and writes a ring whose contents and positions another task has chosen. The reader must
/// not deliver more bytes than the ring has.
fn access_hostile_ring(order: u8, body: &[u8]) {
    let mut data = [0; RING_BYTES];
    data[..body.len().min(RING_BYTES)].copy_from_slice(&body[..body.len().min(RING_BYTES)]);
    let tail = if order & 1 == 0 {
        number_at(body, 8)
    } else {
        u64::from(order & 0xf8) % (RING_BYTES as u64 + 8)
    };
    if order & 2 == 0 {
        // The record header is valid. The input determines the length of this record and of all
        // later records.
        let length = u32::from(data[0]);
        data[..RECORD_HEADER_BYTES]
            .copy_from_slice(&(u64::from(length) | u64::from(!length) << 32).to_le_bytes());
    }
    let ring = HostileRing {
        control: RingControl::with_positions(tail, number_at(body, 0)),
        data: RefCell::new(data),
    };
    let mut rest = Vec::new();
    let record_head =
        RingReader::new(&ring).peek_small::<SHORT_HEAD_BYTES>(SMALL_BYTES_MAX, &mut rest);
    assert!(rest.len() <= SMALL_BYTES_MAX);
    let _ = record_head.and_then(decode_short_head);
    let (mut reader, mut delivered_bytes) = (RingReader::new(&ring), 0);
    while let Ok(Some(mut record)) = reader.next_record() {
        if let Some(record_head) = record.take_bytes::<SHORT_HEAD_BYTES>() {
            let _ = decode_short_head(record_head);
        }
        let mut record_bytes = Vec::new();
        record.append_to(&mut record_bytes);
        delivered_bytes += RECORD_HEADER_BYTES + record_bytes.len();
        assert!(delivered_bytes <= RING_BYTES, "more than a ring holds");
        reader.release();
    }
    let mut writer = RingWriter::new(&ring);
    for _ in 0..4 {
        let _ = writer.write([&[1; 20]]);
        let _ = writer.has_space_or_request_wake(usize::from(order) / 4);
    }
}

/// Returns a shared pool of another task, the returner of its leases, and the ring that the
/// returner uses. All calls return the same objects.
fn shared_pool() -> &'static (Arc<PeerPool>, Arc<LeaseReturner>, RingPair) {
    static STORE: OnceLock<(Arc<PeerPool>, Arc<LeaseReturner>, RingPair)> = OnceLock::new();
    STORE.get_or_init(|| {
        let (_, own_pool_fd) = OwnPool::new().expect("the system has memory");
        let (ring_pair, _) = create_ring_pair().expect("the system has memory");
        let lease_returner = LeaseReturner::new(ring_pair.reader.memory());
        (
            Arc::new(PeerPool::map(own_pool_fd.as_fd()).expect("it is ours")),
            lease_returner,
            ring_pair,
        )
    })
}

/// Requests leases of blocks of another task's shared pool, at offsets and sizes from the input.
/// The pool must grant only leases of blocks inside the pool.
fn request_pool_leases(body: &[u8]) {
    let (pool, returner, _) = shared_pool();
    let mut leases = Vec::new();
    for body_offset in [0, 4, 8, 20, 24] {
        let (offset, len) = (
            number_at(body, body_offset) as usize,
            number_at(body, body_offset + 8) as usize % (POOL_BYTES * 2),
        );
        let slot = body.get(body_offset).copied().unwrap_or(0);
        let Some(lease) = pool.lease(Block { offset, len }, slot, returner) else {
            continue;
        };
        assert!(
            offset + len <= POOL_BYTES && usize::from(slot) < LEASES_MAX,
            "{offset} {len} {slot}"
        );
        let bytes: &[u8] = lease.as_ref();
        assert_eq!(bytes.len(), len);
        assert!(
            [bytes.first(), bytes.last()]
                .iter()
                .flatten()
                .all(|byte| **byte == 0),
            "nobody has written there"
        );
        leases.push(lease);
    }
    drop(leases);
    assert!(!pool.has_leases(), "what was used has been given back");
}

/// Unpacks the input as a message through the C interface; `order` selects the unpacking calls.
fn unpack_messages(encoding: c_int, mut order: u8, body: &[u8]) {
    // SAFETY: every pointer leads to a buffer with space for the requested number of elements. A
    // text is never longer than the message that contains it.
    unsafe {
        pvm_setopt(3, 0);
        let mid = pvm_mkbuf(encoding);
        pvm_setsbuf(mid);
        pvm_pkbyte(body.as_ptr().cast(), body.len() as c_int, 1);
        pvm_setrbuf(mid);
        let mut text = vec![0 as c_char; body.len() + 8];
        let (mut ints, mut longs, mut doubles) = (
            [0; ELEMENTS_PER_CALL_MAX],
            [0; ELEMENTS_PER_CALL_MAX],
            [0.0; ELEMENTS_PER_CALL_MAX],
        );
        let mut inner_mids = Vec::new();
        for call_number in 0..16 {
            let element_count = c_int::from(order % ELEMENTS_PER_CALL_MAX as u8);
            let code = match order % 6 {
                0 => pvm_upkstr(text.as_mut_ptr()),
                1 => pvm_upkint(ints.as_mut_ptr(), element_count, 1),
                2 => pvm_upklong(longs.as_mut_ptr(), element_count, 1),
                3 => pvm_upkdouble(doubles.as_mut_ptr(), element_count, 1),
                4 => pvm_upkbyte(text.as_mut_ptr(), element_count.min(text.len() as c_int), 1),
                _ => pvm_upkmesg(),
            };
            if order % 6 == 5 && code > 0 {
                let mut len = 0;
                assert_eq!(
                    pvm_bufinfo(code, &mut len, std::ptr::null_mut(), std::ptr::null_mut()),
                    0
                );
                assert!(
                    len >= 0 && len as usize <= body.len() + 4,
                    "a message cannot be longer than what holds it"
                );
                inner_mids.push(code);
            } else {
                assert!((-36..=0).contains(&code), "{code} is no documented answer");
            }
            order = order
                .rotate_left(3)
                .wrapping_mul(5)
                .wrapping_add(call_number);
        }
        inner_mids
            .into_iter()
            .for_each(|mid| assert_eq!(pvm_freebuf(mid), 0));
        assert_eq!(pvm_freebuf(mid), 0);
    }
}

/// A xorshift generator of pseudo-random numbers.
pub struct InputRng(pub u64);

impl InputRng {
    pub fn next_number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns up to 96 random bytes. Small and very large numbers are frequent in them, because
    /// such numbers are the most likely to break the checks of lengths.
    pub fn next_random_input(&mut self) -> Vec<u8> {
        let len = self.next_number() as usize % 96;
        let mut bytes: Vec<u8> = (0..len).map(|_| self.next_number() as u8).collect();
        for _ in 0..self.next_number() % 6 {
            let extreme_number = [0u32, 1, 4, 12, 0x7fff_ffff, 0xffff_ffff, 0x8000_0000, 64]
                [self.next_number() as usize % 8];
            let offset = self.next_number() as usize % 24 * 4 + 2;
            if let Some(place) = bytes.get_mut(offset..offset + 4) {
                place.copy_from_slice(&if self.next_number() & 1 == 0 {
                    extreme_number.to_be_bytes()
                } else {
                    extreme_number.to_le_bytes()
                });
            }
        }
        bytes
    }
}
