//! Measures what a message costs before it reaches a socket: packing, framing, and the bookkeeping
//! of the link.

use bytes::Bytes;
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::frame::{FrameDecoder, FrameKind, encode_frame};
use sempa_proto::link::{Link, LinkEvent, LinkOutput};
use sempa_proto::{HostId, Micros, RouteId, Tid};

const SIZES: [usize; 4] = [16, 1 << 10, 64 << 10, 1 << 20];

fn main() {
    divan::main();
}

#[divan::bench(args = SIZES)]
fn pack_and_unpack_integers(bencher: Bencher, bytes: usize) {
    let values: Vec<i32> = (0..bytes / 4).map(|i| i as i32).collect();
    bencher.counter(BytesCount::new(bytes)).bench(|| {
        let mut packer = Packer::new(Encoding::Xdr);
        packer.items(values.iter().copied());
        Unpacker::xdr(packer.finish())
            .ints(values.len() as i32)
            .expect("as packed")
    });
}

#[divan::bench(args = SIZES)]
fn frame_and_decode(bencher: Bencher, bytes: usize) {
    let body = vec![7u8; bytes];
    bencher.counter(BytesCount::new(bytes)).bench(|| {
        let mut decoder = FrameDecoder::new();
        decoder.push(&encode_frame(FrameKind::Image, &[black_box(&body)]));
        decoder.next_frame().expect("good").expect("whole")
    });
}

/// One message passes through both ends of a link, including the acknowledgements.
#[divan::bench(args = SIZES)]
fn link_hands_a_message_over(bencher: Bencher, bytes: usize) {
    let body = Bytes::from(vec![7u8; bytes]);
    let tid = |local| Tid::task(HostId::MASTER, local).expect("a tid");
    let (mut one, mut other) = (Link::new(tid(1), tid(2)), Link::new(tid(2), tid(1)));
    let mut now = Micros(0);
    for link in [&mut one, &mut other] {
        link.handle(now, LinkEvent::RouteUp(RouteId(1)));
    }
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        one.send(Bytes::from_static(&[0; 16]), body.clone())
            .expect("room");
        let mut delivered = None;
        while delivered.is_none() || !one.is_all_acked() {
            now = now + Micros(1);
            let mut idle = true;
            while let Some(output) = one.poll(now) {
                idle = false;
                if let LinkOutput::Transmit(frame) = output {
                    other.handle(now, LinkEvent::Frame(frame));
                }
            }
            while let Some(output) = other.poll(now) {
                idle = false;
                match output {
                    LinkOutput::Transmit(frame) => one.handle(now, LinkEvent::Frame(frame)),
                    LinkOutput::Deliver(message) => delivered = Some(message),
                }
            }
            if idle {
                let due = one
                    .next_wakeup()
                    .into_iter()
                    .chain(other.next_wakeup())
                    .min();
                now = due.unwrap_or(now).max(now);
                one.handle(now, LinkEvent::Wake);
                other.handle(now, LinkEvent::Wake);
            }
        }
        delivered
    });
}
