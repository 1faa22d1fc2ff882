//! What a stream of large messages over a direct route costs: copies, calls to the kernel and page
//! faults, none of which depends on the load of the machine.

use super::super::direct::tests::connected_streams;
use super::super::direct::{FrameStream, IoCounts, RECORD_BYTES_MAX, RouteEndReason};
use super::link_sink::LinkSink;
use bytes::Bytes;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{UsageWho, getrusage};
use sempa_proto::buffer_pool;
use sempa_proto::ids::RouteId;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, HEAD_BYTES_MAX, Link, LinkEvent};
use sempa_proto::{Micros, Tid};
use std::os::fd::AsFd;

const MIB: usize = 1 << 20;
const NOW: Micros = Micros(1);
/// Maximum number of bytes that are copied because a large payload has arrived in part: a part of a
/// record leaves the message, and the whole record enters it again.
const INTERRUPTION_COPIED_BYTES: f64 = 2.0 * RECORD_BYTES_MAX as f64;
/// Maximum number of calls because a large payload has arrived in part: one that reads a part, one
/// that finds nothing, and one that reads the rest of a record.
const INTERRUPTION_CALLS: f64 = 3.0;

/// One end of a route with its link.
struct End {
    stream: FrameStream,
    link: Link,
}

impl End {
    fn new(stream: FrameStream, local_tid: i32, peer: i32) -> Self {
        let mut link = Link::new(Tid::from_raw(local_tid), Tid::from_raw(peer));
        link.handle_event(NOW, LinkEvent::RouteUp(RouteId(1)));
        Self { stream, link }
    }

    /// Moves the next frame of the link to the stream. Returns false if there is none, or no space.
    fn queue_frame(&mut self) -> bool {
        if !self.stream.has_frame_space() {
            return false;
        }
        let Some(frame) = self.link.next_frame(NOW) else {
            return false;
        };
        let parts = [&frame.encode_short_head()[..], frame.head, frame.body];
        assert!(self.stream.try_queue_frame(&parts, frame.following_bytes()));
        true
    }

    /// Writes the frames of the link, until the socket is full.
    fn write(&mut self) {
        loop {
            while self.queue_frame() {}
            self.stream.write_queued().expect("the route stands");
            if self.stream.has_unwritten_data() || !self.link.has_frame() {
                break;
            }
        }
    }

    /// Reads what has arrived, if anything has: a task is told by the kernel when to read.
    fn read(&mut self) {
        let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::ZERO).expect("an open socket") == 0 {
            return;
        }
        let mut sink = LinkSink::new(&mut self.link, NOW);
        while self
            .stream
            .read_frames(&mut sink)
            .expect("the route stands")
        {}
        assert!(!sink.is_invalid);
    }
}

/// Returns a route with its two ends.
fn connected_ends() -> [End; 2] {
    let (a, b) = connected_streams();
    [End::new(a, 0x40001, 0x80001), End::new(b, 0x80001, 0x40001)]
}

/// Sends `count` messages with the content of `source`, as a program does that packs each of them
/// and unpacks it at the other end. At most two messages wait to be sent.
fn stream_messages(
    [sender, receiver]: &mut [End; 2],
    source: &[u8],
    unpacked: &mut [u8],
    count: usize,
) {
    let (mut sent_count, mut received_count) = (0, 0);
    let head = [7; HEAD_BYTES_MAX];
    while received_count < count {
        while sent_count < count && sender.link.retained_bytes() < 2 * source.len() {
            let mut body = Vec::new();
            buffer_pool::reserve(&mut body, source.len());
            body.extend_from_slice(source);
            body[..8].copy_from_slice(&(sent_count as u64).to_le_bytes());
            sender
                .link
                .send(head, buffer_pool::freeze(body))
                .expect("sent");
            sent_count += 1;
        }
        sender.write();
        receiver.read();
        receiver.write();
        sender.read();
        while let Some(message) = receiver.link.take_message() {
            assert_eq!(message.bytes[..HEAD_BYTES_MAX], head);
            unpacked.copy_from_slice(&message.bytes[HEAD_BYTES_MAX..]);
            assert_eq!(unpacked[..8], (received_count as u64).to_le_bytes());
            assert!(unpacked[8..] == source[8..], "message {received_count}");
            received_count += 1;
        }
    }
}

fn page_fault_count() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD)
        .expect("this thread")
        .minor_page_faults()
}

fn counts(ends: &[End; 2]) -> [IoCounts; 2] {
    [
        ends[0].stream.output_counts(),
        ends[1].stream.input_counts(),
    ]
}

/// In a steady stream the sender copies each byte once after packing, into the records; the
/// receiver copies next to nothing before unpacking. Neither touches new memory. A loaded machine
/// delivers a payload in parts; a part costs a limited number of bytes and calls.
#[test]
fn stream_of_large_messages_costs_few_copies() {
    for body_bytes in [MIB, 300_000, 5 * MIB + 17] {
        let mut ends = connected_ends();
        let source: Vec<u8> = (0..body_bytes).map(|i| (i % 251) as u8).collect();
        let mut unpacked = source.clone();
        stream_messages(&mut ends, &source, &mut unpacked, 20);
        let (before, faults_before) = (counts(&ends), page_fault_count());
        const COUNT: usize = 40;
        stream_messages(&mut ends, &source, &mut unpacked, COUNT);
        let faults = page_fault_count() - faults_before;
        let [sent, received] = counts(&ends);
        let bytes = (body_bytes * COUNT) as f64;
        let interruptions = (received.interruptions - before[1].interruptions) as f64;
        let copied_bytes =
            |now: IoCounts, before: IoCounts| (now.copied_bytes - before.copied_bytes) as f64;
        let calls = |now: IoCounts, before: IoCounts| (now.calls - before.calls) as f64;
        let copies = [
            copied_bytes(sent, before[0]) / bytes,
            (copied_bytes(received, before[1]) - interruptions * INTERRUPTION_COPIED_BYTES) / bytes,
        ];
        let calls_per_mib = [
            calls(sent, before[0]) * MIB as f64 / bytes,
            (calls(received, before[1]) - interruptions * INTERRUPTION_CALLS) * MIB as f64 / bytes,
        ];
        let faults_per_mib = faults as f64 * MIB as f64 / bytes;
        assert!(copies[0] < 1.01 && copies[1] < 0.1, "{copies:?}");
        assert!(
            calls_per_mib[0] < 8.0 && calls_per_mib[1] < 16.0,
            "{calls_per_mib:?}"
        );
        assert!(faults_per_mib < 0.5, "{faults_per_mib}");
    }
}

/// A payload that arrives a few bytes at a time is copied twice at most.
#[test]
fn payload_in_small_parts_is_copied_twice_at_most() {
    const PART_BYTES: usize = 1_000;
    let [mut sender, mut receiver] = connected_ends();
    let body: Bytes = (0..FRAGMENT_BYTES_MAX).map(|i| (i % 251) as u8).collect();
    sender
        .link
        .send([7; HEAD_BYTES_MAX], body.clone())
        .expect("queued");
    while sender.queue_frame() {}
    let message = loop {
        if sender.stream.has_unwritten_data() {
            sender
                .stream
                .write_part(PART_BYTES)
                .expect("the socket has room");
        }
        receiver.read();
        if let Some(message) = receiver.link.take_message() {
            break message;
        }
    };
    assert_eq!(message.bytes[HEAD_BYTES_MAX..], body[..]);
    let copied_bytes = receiver.stream.input_counts().copied_bytes as usize;
    assert!(
        copied_bytes < 2 * body.len() + RECORD_BYTES_MAX,
        "{copied_bytes}"
    );
}

/// A fragment that arrives on another route while the direct route has half of it is accepted once,
/// and so is everything after it.
#[test]
fn fragment_that_overtakes_its_placement_is_accepted_once() {
    for overtaking_count in [1, 3] {
        let [mut sender, mut receiver] = connected_ends();
        let body: Bytes = (0..3 * MIB / 10).map(|i| (i % 251) as u8).collect();
        let head = [7; HEAD_BYTES_MAX];
        let mut frames = Vec::new();
        let mut other_link = sender.link.clone();
        other_link.send(head, body.clone()).expect("queued");
        while let Some(frame) = other_link.next_frame(NOW) {
            frames.push(frame.to_frame());
        }
        sender.link.send(head, body.clone()).expect("queued");
        assert!(sender.queue_frame(), "the first fragment");
        sender
            .stream
            .write_part(40_000)
            .expect("the socket has room");
        receiver.read();
        assert!(receiver.link.placed_bytes() > 0);
        for frame in frames.into_iter().take(overtaking_count) {
            receiver.link.handle_event(NOW, LinkEvent::Frame(frame));
        }
        assert_eq!(receiver.link.placed_bytes(), 0);
        let message = loop {
            sender.write();
            receiver.read();
            receiver.write();
            sender.read();
            if let Some(message) = receiver.link.take_message() {
                break message;
            }
        };
        assert_eq!(message.bytes[HEAD_BYTES_MAX..], body[..]);
        assert_eq!(receiver.link.take_message(), None);
    }
}

/// A route that ends in the middle of a fragment leaves nothing of it in the link, and the message
/// arrives on another route.
#[test]
fn route_that_ends_in_a_placement_leaves_whole_fragments() {
    let [mut sender, mut receiver] = connected_ends();
    let body: Bytes = (0..3 * MIB / 10).map(|i| (i % 251) as u8).collect();
    sender
        .link
        .send([7; HEAD_BYTES_MAX], body.clone())
        .expect("queued");
    while sender.queue_frame() {}
    sender
        .stream
        .write_part(100_000)
        .expect("the socket has room");
    drop(sender.stream);
    let mut sink = LinkSink::new(&mut receiver.link, NOW);
    let end_reason = loop {
        if let Err(end_reason) = receiver.stream.read_frames(&mut sink) {
            break end_reason;
        }
    };
    assert!(
        matches!(end_reason, RouteEndReason::Broken(_)),
        "{end_reason:?}"
    );
    assert_eq!(receiver.link.placed_bytes(), 0);
    assert_eq!(receiver.link.expected_seq(), 2, "one fragment of 64 KiB");
    for link in [&mut sender.link, &mut receiver.link] {
        link.handle_event(NOW, LinkEvent::RouteUp(RouteId(2)));
    }
    let message = loop {
        while let Some(frame) = sender.link.next_frame(NOW) {
            let frame = frame.to_frame();
            receiver.link.handle_event(NOW, LinkEvent::Frame(frame));
        }
        if let Some(message) = receiver.link.take_message() {
            break message;
        }
        while let Some(frame) = receiver.link.next_frame(NOW) {
            let frame = frame.to_frame();
            sender.link.handle_event(NOW, LinkEvent::Frame(frame));
        }
    };
    assert_eq!(message.bytes[HEAD_BYTES_MAX..], body[..]);
}
