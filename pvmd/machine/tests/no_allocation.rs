//! Asserts that forwarding a frame in the daemon allocates nothing. This test runs in its own
//! process because it counts all allocations.

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
/// Number of frames sent before counting: the first messages of a pair create table entries.
const WARM_UP_FRAMES: u64 = 100;

/// Returns the kind of the frame with this number: data frames, fragments and acknowledgements in
/// turn.
fn frame_kind(number: u64) -> LinkKind {
    match number % 4 {
        0 => LinkKind::Data { last: false },
        3 => LinkKind::Ack { resync: false },
        _ => LinkKind::Data { last: true },
    }
}

/// Forwards frames between these tasks. Returns the number of allocations.
fn count_allocations(
    daemon: &mut Daemon,
    src_dst: (Tid, Tid),
    event: impl Fn(Bytes) -> Event,
    forwarded: impl Fn(&Output, &Bytes) -> bool,
) -> usize {
    let mut buffer = BytesMut::new();
    let mut forward_range = |range: Range<u64>| {
        let frames: Vec<Bytes> = range
            .map(|n| frame(&mut buffer, src_dst, frame_kind(n), n, &[7; 64]))
            .collect();
        let before = counting_allocator::allocation_count();
        for frame in &frames {
            daemon.handle(event(frame.clone()));
            assert!(
                daemon
                    .poll()
                    .is_some_and(|output| forwarded(&output, frame))
            );
            assert!(daemon.poll().is_none());
        }
        counting_allocator::allocation_count() - before
    };
    forward_range(0..WARM_UP_FRAMES);
    forward_range(WARM_UP_FRAMES..WARM_UP_FRAMES + COUNTED_FRAMES)
}

/// Frames between tasks of one host are forwarded without an allocation.
#[test]
fn local_frames_allocate_nothing() {
    let mut daemon = Daemon::new(2);
    let ends = (daemon.tids[0], daemon.tids[1]);
    let event = |frame| Event::TaskLink {
        conn: Daemon::conn(0),
        frame,
    };
    let forwarded = |output: &Output, sent: &Bytes| match output {
        Output::LinkToTask { conn, frame } => *conn == Daemon::conn(1) && frame == sent,
        _ => false,
    };
    assert_eq!(count_allocations(&mut daemon, ends, event, forwarded), 0);
}

/// Frames to a task of another host are forwarded without an allocation.
#[test]
fn outgoing_frames_allocate_nothing() {
    let mut daemon = Daemon::new(1);
    let ends = (daemon.tids[0], remote_task());
    let event = |frame| Event::TaskLink {
        conn: Daemon::conn(0),
        frame,
    };
    let forwarded = |output: &Output, sent: &Bytes| match output {
        Output::SendData {
            host: HostId::MASTER,
            message: DataMsg::Frame(frame),
        } => frame == sent,
        _ => false,
    };
    assert_eq!(count_allocations(&mut daemon, ends, event, forwarded), 0);
}

/// Frames from a task of another host are forwarded without an allocation.
#[test]
fn incoming_frames_allocate_nothing() {
    let mut daemon = Daemon::new(1);
    let ends = (remote_task(), daemon.tids[0]);
    let event = |frame| Event::HostData {
        host: HostId::MASTER,
        message: DataMsg::Frame(frame),
    };
    let forwarded = |output: &Output, sent: &Bytes| match output {
        Output::LinkToTask { conn, frame } => *conn == Daemon::conn(0) && frame == sent,
        _ => false,
    };
    assert_eq!(count_allocations(&mut daemon, ends, event, forwarded), 0);
}
