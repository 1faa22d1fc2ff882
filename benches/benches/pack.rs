//! Measures packing and unpacking of each type in both encodings; one iteration handles 1,000
//! items.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use sempa_proto::body::{Encoding, PackedNumber, Packer, Unpacker};

/// Number of items that one iteration packs or unpacks.
const ITEM_COUNT: usize = 1000;
const ENCODINGS: [Encoding; 2] = [Encoding::Xdr, Encoding::Raw];

fn main() {
    divan::main();
}

fn pack_numbers<T: PackedNumber + From<i8> + Sync>(bencher: Bencher, encoding: Encoding) {
    let values = vec![T::from(7); ITEM_COUNT];
    bencher.counter(ItemsCount::new(ITEM_COUNT)).bench(|| {
        let mut packer = Packer::new(encoding);
        packer.pack_items(black_box(&values).iter().copied());
        packer.finish()
    });
}

fn unpack_numbers<T: PackedNumber + From<i8> + Sync>(bencher: Bencher, encoding: Encoding) {
    let mut packer = Packer::new(encoding);
    packer.pack_items(vec![T::from(7); ITEM_COUNT]);
    let body = packer.finish();
    bencher.counter(ItemsCount::new(ITEM_COUNT)).bench(|| {
        let mut unpacker = Unpacker::new(encoding, body.clone());
        for _ in 0..ITEM_COUNT {
            black_box(unpacker.read_item::<T>().expect("as packed"));
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
    let bytes = vec![7u8; ITEM_COUNT];
    bencher.counter(ItemsCount::new(ITEM_COUNT)).bench(|| {
        let mut packer = Packer::new(encoding);
        packer.pack_bytes(black_box(&bytes));
        packer.finish()
    });
}

#[divan::bench(args = ENCODINGS)]
fn unpack_bytes(bencher: Bencher, encoding: Encoding) {
    let mut packer = Packer::new(encoding);
    packer.pack_bytes(&[7; ITEM_COUNT]);
    let body = packer.finish();
    bencher.counter(ItemsCount::new(ITEM_COUNT)).bench(|| {
        Unpacker::new(encoding, body.clone())
            .read_bytes(ITEM_COUNT)
            .expect("as packed")
    });
}

#[divan::bench(args = ENCODINGS)]
fn pack_string(bencher: Bencher, encoding: Encoding) {
    let text = vec![b'a'; ITEM_COUNT - 1];
    bencher.counter(ItemsCount::new(1usize)).bench(|| {
        let mut packer = Packer::new(encoding);
        packer.pack_str(black_box(&text));
        packer.finish()
    });
}

#[divan::bench(args = ENCODINGS)]
fn unpack_string(bencher: Bencher, encoding: Encoding) {
    let mut packer = Packer::new(encoding);
    packer.pack_str(&[b'a'; ITEM_COUNT - 1]);
    let body = packer.finish();
    bencher.counter(ItemsCount::new(1usize)).bench(|| {
        Unpacker::new(encoding, body.clone())
            .read_str()
            .expect("as packed")
    });
}
