//! Measures packing and unpacking of each type through the exported C functions, as a C program
//! calls them. Each call handles 1,000 items. An unpack call reads a buffer that was packed before
//! the measurement; the measured time includes the selection of this buffer.
#![allow(unsafe_code)] // The functions are C's.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use pvm3 as _;
use std::ffi::{c_char, c_double, c_float, c_int, c_long, c_short, c_uint, c_ulong, c_ushort};

/// Number of items that one call packs or unpacks.
const ITEM_COUNT: usize = 1000;
/// The values of `PvmDataDefault` and `PvmDataRaw`.
const ENCODINGS: [c_int; 2] = [0, 1];

unsafe extern "C" {
    fn pvm_initsend(encoding: c_int) -> c_int;
    fn pvm_setrbuf(buffer: c_int) -> c_int;
    fn pvm_setsbuf(buffer: c_int) -> c_int;
    fn pvm_freebuf(buffer: c_int) -> c_int;
    fn pvm_pkstr(text: *const c_char) -> c_int;
    fn pvm_upkstr(place: *mut c_char) -> c_int;
}

fn main() {
    divan::main();
}

/// Makes an empty buffer the active send buffer.
fn make_empty_send_buffer(encoding: c_int) {
    // SAFETY: `pvm_initsend` accepts any number.
    let buffer = unsafe { pvm_initsend(encoding) };
    assert!(buffer > 0, "a send buffer: {buffer}");
}

/// Number of a packed buffer that can be unpacked once. Dropping the value frees the buffer.
struct PackedBuffer(c_int);

impl PackedBuffer {
    /// Creates a buffer and calls `pack`, which must pack items into the buffer.
    fn pack_new(encoding: c_int, pack: impl FnOnce()) -> Self {
        make_empty_send_buffer(encoding);
        pack();
        // SAFETY: `pvm_setsbuf` accepts any number. After the call no send buffer is active, so the
        // next `pvm_initsend` does not free this buffer.
        Self(unsafe { pvm_setsbuf(0) })
    }

    fn select_for_unpack(&self) {
        // SAFETY: `pvm_setrbuf` accepts any number.
        assert!(unsafe { pvm_setrbuf(black_box(self.0)) } >= 0);
    }
}

impl Drop for PackedBuffer {
    fn drop(&mut self) {
        // SAFETY: `pvm_freebuf` accepts any number.
        assert_eq!(unsafe { pvm_freebuf(self.0) }, 0);
    }
}

macro_rules! types {
    ($($pack:ident $unpack:ident $pk:ident $upk:ident $t:ty, $value:expr;)*) => {$(
        unsafe extern "C" {
            fn $pk(items: *const $t, count: c_int, stride: c_int) -> c_int;
            fn $upk(items: *mut $t, count: c_int, stride: c_int) -> c_int;
        }

        #[divan::bench(args = ENCODINGS)]
        fn $unpack(bencher: Bencher, encoding: c_int) {
            let items: Vec<$t> = vec![$value; ITEM_COUNT];
            let packed = || {
                PackedBuffer::pack_new(encoding, || {
                    // SAFETY: `items` contains `ITEM_COUNT` items.
                    assert_eq!(unsafe { $pk(items.as_ptr(), ITEM_COUNT as c_int, 1) }, 0);
                })
            };
            let mut place = items.clone();
            bencher.counter(ItemsCount::new(ITEM_COUNT)).with_inputs(packed).bench_local_refs(|packed| {
                packed.select_for_unpack();
                // SAFETY: `place` has room for `ITEM_COUNT` items.
                assert_eq!(unsafe { $upk(black_box(&mut place).as_mut_ptr(), ITEM_COUNT as c_int, 1) }, 0);
            });
        }

        #[divan::bench(args = ENCODINGS)]
        fn $pack(bencher: Bencher, encoding: c_int) {
            let items: Vec<$t> = vec![$value; ITEM_COUNT];
            bencher.counter(ItemsCount::new(ITEM_COUNT)).bench_local(|| {
                make_empty_send_buffer(encoding);
                // SAFETY: `items` contains `ITEM_COUNT` items.
                assert_eq!(unsafe { $pk(black_box(&items).as_ptr(), ITEM_COUNT as c_int, 1) }, 0);
            });
        }
    )*};
}

types! {
    pack_byte unpack_byte pvm_pkbyte pvm_upkbyte c_char, 7;
    pack_short unpack_short pvm_pkshort pvm_upkshort c_short, 7;
    pack_ushort unpack_ushort pvm_pkushort pvm_upkushort c_ushort, 7;
    pack_int unpack_int pvm_pkint pvm_upkint c_int, 7;
    pack_uint unpack_uint pvm_pkuint pvm_upkuint c_uint, 7;
    pack_long unpack_long pvm_pklong pvm_upklong c_long, 7;
    pack_ulong unpack_ulong pvm_pkulong pvm_upkulong c_ulong, 7;
    pack_float unpack_float pvm_pkfloat pvm_upkfloat c_float, 7.0;
    pack_double unpack_double pvm_pkdouble pvm_upkdouble c_double, 7.0;
    pack_cplx unpack_cplx pvm_pkcplx pvm_upkcplx [c_float; 2], [7.0; 2];
    pack_dcplx unpack_dcplx pvm_pkdcplx pvm_upkdcplx [c_double; 2], [7.0; 2];
}

/// Packs a string of 999 bytes.
#[divan::bench(args = ENCODINGS)]
fn pack_string(bencher: Bencher, encoding: c_int) {
    let mut text = vec![b'a' as c_char; ITEM_COUNT];
    text[ITEM_COUNT - 1] = 0;
    bencher.bench_local(|| {
        make_empty_send_buffer(encoding);
        // SAFETY: the text ends with a zero.
        assert_eq!(unsafe { pvm_pkstr(black_box(&text).as_ptr()) }, 0);
    });
}

/// Unpacks a string of 999 bytes.
#[divan::bench(args = ENCODINGS)]
fn unpack_string(bencher: Bencher, encoding: c_int) {
    let mut text = vec![b'a' as c_char; ITEM_COUNT];
    text[ITEM_COUNT - 1] = 0;
    let packed_buffer = || {
        PackedBuffer::pack_new(encoding, || {
            // SAFETY: the text ends with a zero.
            assert_eq!(unsafe { pvm_pkstr(text.as_ptr()) }, 0);
        })
    };
    let mut unpacked_text = text.clone();
    bencher
        .with_inputs(packed_buffer)
        .bench_local_refs(|packed_buffer| {
            packed_buffer.select_for_unpack();
            // SAFETY: `unpacked_text` has room for the text and its zero.
            let status = unsafe { pvm_upkstr(black_box(&mut unpacked_text).as_mut_ptr()) };
            assert_eq!(status, 0);
        });
}
