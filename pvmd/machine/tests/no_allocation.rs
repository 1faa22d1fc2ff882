//! Asserts that the daemon forwards a frame without an allocation. This test runs in its own
//! process because it counts all allocations of the process.

#[path = "../../../libpvm/proto/tests/counting_allocator/mod.rs"]
mod counting_allocator;
mod two_host_daemon;

use bytes::{Bytes, BytesMut};
use pvmd_machine::{Event, Output};
use sempa_proto::host::DataMsg;
use sempa_proto::link::LinkKind;
use sempa_proto::{HostId, Tid};
use std::ops::Range;
use two_host_daemon::{Daemon, frame, remote_task};

const COUNTED_FRAMES: u64 = 10_000;
/// Number of frames sent before counting. The first frames of a pair create table entries.
const WARM_UP_FRAMES: u64 = 100;

/// Returns the kind of the frame with this number. Of four consecutive frames, one is a fragment
/// that is not the last of its message, two are last fragments, and one is an acknowledgement.
fn frame_kind(number: u64) -> LinkKind {
    match number % 4 {
        0 => LinkKind::Data { is_last: false },
        3 => LinkKind::Ack {
            requests_resync: false,
        },
        _ => LinkKind::Data { is_last: true },
    }
}

/// Forwards frames from the first to the second task of `pair`. Returns the number of
/// allocations.
fn count_allocations(
    daemon: &mut Daemon,
    pair: (Tid, Tid),
    event: impl Fn(Bytes) -> Event,
    is_forwarded: impl Fn(&Output, &Bytes) -> bool,
) -> usize {
    let mut buffer = BytesMut::new();
    let mut forward_range = |range: Range<u64>| {
        let frames: Vec<Bytes> = range
            .map(|n| frame(&mut buffer, pair, frame_kind(n), n, &[7; 64]))
            .collect();
        let count_before = counting_allocator::allocation_count();
        for frame in &frames {
            daemon.handle(event(frame.clone()));
            assert!(
                daemon
                    .poll()
                    .is_some_and(|output| is_forwarded(&output, frame))
            );
            assert!(daemon.poll().is_none());
        }
        counting_allocator::allocation_count() - count_before
    };
    forward_range(0..WARM_UP_FRAMES);
    forward_range(WARM_UP_FRAMES..WARM_UP_FRAMES + COUNTED_FRAMES)
}

/// Frames between tasks of one host are forwarded without an allocation.
#[test]
fn local_frames_allocate_nothing() {
    let mut daemon = Daemon::new(2);
    let pair = (daemon.tids[0], daemon.tids[1]);
    let event = |frame| Event::TaskLink {
        conn: Daemon::conn(0),
        frame,
    };
    let is_forwarded = |output: &Output, sent_frame: &Bytes| match output {
        Output::SendFrameToTask { conn, frame } => *conn == Daemon::conn(1) && frame == sent_frame,
        _ => false,
    };
    assert_eq!(count_allocations(&mut daemon, pair, event, is_forwarded), 0);
}

/// Frames to a task of another host are forwarded without an allocation.
#[test]
fn outgoing_frames_allocate_nothing() {
    let mut daemon = Daemon::new(1);
    let pair = (daemon.tids[0], remote_task());
    let event = |frame| Event::TaskLink {
        conn: Daemon::conn(0),
        frame,
    };
    let is_forwarded = |output: &Output, sent_frame: &Bytes| match output {
        Output::SendData {
            host: HostId::MASTER,
            message: DataMsg::Frame(frame),
        } => frame == sent_frame,
        _ => false,
    };
    assert_eq!(count_allocations(&mut daemon, pair, event, is_forwarded), 0);
}

/// Frames from a task of another host are forwarded without an allocation.
#[test]
fn incoming_frames_allocate_nothing() {
    let mut daemon = Daemon::new(1);
    let pair = (remote_task(), daemon.tids[0]);
    let event = |frame| Event::HostData {
        host: HostId::MASTER,
        message: DataMsg::Frame(frame),
    };
    let is_forwarded = |output: &Output, sent_frame: &Bytes| match output {
        Output::SendFrameToTask { conn, frame } => *conn == Daemon::conn(0) && frame == sent_frame,
        _ => false,
    };
    assert_eq!(count_allocations(&mut daemon, pair, event, is_forwarded), 0);
}
