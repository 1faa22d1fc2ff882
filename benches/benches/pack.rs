//! Measures packing and unpacking of each type in both encodings, 1,000 items at a time.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use sempa_proto::body::{Encoding, PackedNumber, Packer, Unpacker};

/// Number of items per call.
const ITEMS: usize = 1000;
const ENCODINGS: [Encoding; 2] = [Encoding::Xdr, Encoding::Raw];

fn main() {
    divan::main();
}

fn pack_numbers<T: PackedNumber + From<i8> + Sync>(bencher: Bencher, encoding: Encoding) {
    let values = vec![T::from(7); ITEMS];
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| {
        let mut packer = Packer::new(encoding);
        packer.items(black_box(&values).iter().copied());
        packer.finish()
    });
}

fn unpack_numbers<T: PackedNumber + From<i8> + Sync>(bencher: Bencher, encoding: Encoding) {
    let mut packer = Packer::new(encoding);
    packer.items(vec![T::from(7); ITEMS]);
    let body = packer.finish();
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| {
        let mut unpacker = Unpacker::new(encoding, body.clone());
        for _ in 0..ITEMS {
            black_box(unpacker.item::<T>().expect("as packed"));
        }
    });
}

macro_rules! numbers {
    ($($pack:ident $unpack:ident $t:ty),*) => {$(
        #[divan::bench(args = ENCODINGS)]
        fn $pack(bencher: Bencher, encoding: Encoding) {
            pack_numbers::<$t>(bencher, encoding);
        }

        #[divan::bench(args = ENCODINGS)]
        fn $unpack(bencher: Bencher, encoding: Encoding) {
            unpack_numbers::<$t>(bencher, encoding);
        }
    )*};
}
numbers!(
    pack_short unpack_short i16,
    pack_int unpack_int i32,
    pack_long unpack_long i64,
    pack_float unpack_float f32,
    pack_double unpack_double f64
);

#[divan::bench(args = ENCODINGS)]
fn pack_bytes(bencher: Bencher, encoding: Encoding) {
    let bytes = vec![7u8; ITEMS];
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| {
        let mut packer = Packer::new(encoding);
        packer.bytes(black_box(&bytes));
        packer.finish()
    });
}

#[divan::bench(args = ENCODINGS)]
fn unpack_bytes(bencher: Bencher, encoding: Encoding) {
    let mut packer = Packer::new(encoding);
    packer.bytes(&[7; ITEMS]);
    let body = packer.finish();
    bencher.counter(ItemsCount::new(ITEMS)).bench(|| {
        Unpacker::new(encoding, body.clone())
            .bytes(ITEMS)
            .expect("as packed")
    });
}

#[divan::bench(args = ENCODINGS)]
fn pack_string(bencher: Bencher, encoding: Encoding) {
    let text = vec![b'a'; ITEMS - 1];
    bencher.counter(ItemsCount::new(1usize)).bench(|| {
        let mut packer = Packer::new(encoding);
        packer.str(black_box(&text));
        packer.finish()
    });
}

#[divan::bench(args = ENCODINGS)]
fn unpack_string(bencher: Bencher, encoding: Encoding) {
    let mut packer = Packer::new(encoding);
    packer.str(&[b'a'; ITEMS - 1]);
    let body = packer.finish();
    bencher.counter(ItemsCount::new(1usize)).bench(|| {
        Unpacker::new(encoding, body.clone())
            .str()
            .expect("as packed")
    });
}
