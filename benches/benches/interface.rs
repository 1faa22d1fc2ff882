//! Packing of each type through the C library's own functions, as a C program calls them: 1,000 items at a time. Only a
//! message that was received can be unpacked, and that takes a virtual machine: `cargo xtask bench peers --only 'unpack*'`.
#![allow(unsafe_code)] // The functions are C's.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use pvm3 as _;
use std::ffi::{c_char, c_double, c_float, c_int, c_long, c_short, c_uint, c_ulong, c_ushort};

/// Items of one call.
const ITEMS: usize = 1000;
/// `PvmDataDefault` and `PvmDataRaw`.
const ENCODINGS: [c_int; 2] = [0, 1];

unsafe extern "C" {
    fn pvm_initsend(encoding: c_int) -> c_int;
    fn pvm_pkstr(text: *const c_char) -> c_int;
}

fn main() {
    divan::main();
}

/// An empty active send buffer.
fn begin(encoding: c_int) {
    // SAFETY: it takes any number.
    let buffer = unsafe { pvm_initsend(encoding) };
    assert!(buffer > 0, "a send buffer: {buffer}");
}

macro_rules! types {
    ($($pack:ident $pk:ident $t:ty, $value:expr;)*) => {$(
        unsafe extern "C" {
            fn $pk(items: *const $t, count: c_int, stride: c_int) -> c_int;
        }

        #[divan::bench(args = ENCODINGS)]
        fn $pack(bencher: Bencher, encoding: c_int) {
            let items: Vec<$t> = vec![$value; ITEMS];
            bencher.counter(ItemsCount::new(ITEMS)).bench_local(|| {
                begin(encoding);
                // SAFETY: so many items are there.
                assert_eq!(unsafe { $pk(black_box(&items).as_ptr(), ITEMS as c_int, 1) }, 0);
            });
        }
    )*};
}

types! {
    pack_byte pvm_pkbyte c_char, 7;
    pack_short pvm_pkshort c_short, 7;
    pack_ushort pvm_pkushort c_ushort, 7;
    pack_int pvm_pkint c_int, 7;
    pack_uint pvm_pkuint c_uint, 7;
    pack_long pvm_pklong c_long, 7;
    pack_ulong pvm_pkulong c_ulong, 7;
    pack_float pvm_pkfloat c_float, 7.0;
    pack_double pvm_pkdouble c_double, 7.0;
    pack_cplx pvm_pkcplx [c_float; 2], [7.0; 2];
    pack_dcplx pvm_pkdcplx [c_double; 2], [7.0; 2];
}

/// A string of 999 bytes.
#[divan::bench(args = ENCODINGS)]
fn pack_string(bencher: Bencher, encoding: c_int) {
    let mut text = vec![b'a' as c_char; ITEMS];
    text[ITEMS - 1] = 0;
    bencher.bench_local(|| {
        begin(encoding);
        // SAFETY: the text ends with a zero.
        assert_eq!(unsafe { pvm_pkstr(black_box(&text).as_ptr()) }, 0);
    });
}
