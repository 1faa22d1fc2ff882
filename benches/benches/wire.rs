//! Measures the time of the steps for a message before it reaches a socket: packing, framing, and
//! the bookkeeping of the link.

use bytes::Bytes;
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::frame::{FrameDecoder, FrameKind, encode_frame};
use sempa_proto::link::{Link, LinkEvent, LinkOutput};
use sempa_proto::{HostId, Micros, RouteId, Tid};

const MESSAGE_SIZES: [usize; 4] = [16, 1 << 10, 64 << 10, 1 << 20];

fn main() {
    divan::main();
}

#[divan::bench(args = MESSAGE_SIZES)]
fn pack_and_unpack_integers(bencher: Bencher, message_bytes: usize) {
    let values: Vec<i32> = (0..message_bytes / 4).map(|i| i as i32).collect();
    bencher.counter(BytesCount::new(message_bytes)).bench(|| {
        let mut packer = Packer::new(Encoding::Xdr);
        packer.pack_items(values.iter().copied());
        Unpacker::new_xdr(packer.finish())
            .read_ints(values.len() as i32)
            .expect("as packed")
    });
}

#[divan::bench(args = MESSAGE_SIZES)]
fn frame_and_decode(bencher: Bencher, message_bytes: usize) {
    let body = vec![7u8; message_bytes];
    bencher.counter(BytesCount::new(message_bytes)).bench(|| {
        let mut decoder = FrameDecoder::new();
        decoder.push(&encode_frame(FrameKind::Image, &[black_box(&body)]));
        decoder.next_frame().expect("good").expect("whole")
    });
}

/// Measures the transfer of one message through both ends of a link, including the
/// acknowledgements.
#[divan::bench(args = MESSAGE_SIZES)]
fn link_hands_a_message_over(bencher: Bencher, message_bytes: usize) {
    let body = Bytes::from(vec![7u8; message_bytes]);
    let tid = |local_number| Tid::for_task(HostId::MASTER, local_number).expect("a tid");
    let (mut sender, mut receiver) = (Link::new(tid(1), tid(2)), Link::new(tid(2), tid(1)));
    let mut now = Micros(0);
    for link in [&mut sender, &mut receiver] {
        link.handle_event(now, LinkEvent::RouteUp(RouteId(1)));
    }
    bencher
        .counter(BytesCount::new(message_bytes))
        .bench_local(|| {
            sender
                .send(Bytes::from_static(&[0; 16]), body.clone())
                .expect("room");
            let mut received_message = None;
            while received_message.is_none() || !sender.is_all_acked() {
                now = now + Micros(1);
                let mut is_idle = true;
                while let Some(output) = sender.poll(now) {
                    is_idle = false;
                    if let LinkOutput::Transmit(frame) = output {
                        receiver.handle_event(now, LinkEvent::Frame(frame));
                    }
                }
                while let Some(output) = receiver.poll(now) {
                    is_idle = false;
                    match output {
                        LinkOutput::Transmit(frame) => {
                            sender.handle_event(now, LinkEvent::Frame(frame))
                        }
                        LinkOutput::Deliver(message) => received_message = Some(message),
                    }
                }
                if is_idle {
                    let due_at = sender
                        .next_wakeup()
                        .into_iter()
                        .chain(receiver.next_wakeup())
                        .min();
                    now = due_at.unwrap_or(now).max(now);
                    sender.handle_event(now, LinkEvent::Wake);
                    receiver.handle_event(now, LinkEvent::Wake);
                }
            }
            received_message
        });
}
