//! Asserts that forwarding a frame in the daemon allocates nothing. This test runs in its own
//! process because it counts all allocations.

#[path = "../../../libpvm/proto/tests/counting_allocator/mod.rs"]
mod counting_allocator;
mod one_of_two;

use bytes::{Bytes, BytesMut};
use one_of_two::{Daemon, elsewhere, frame};
use pvmd_machine::{Event, Output};
use sempa_proto::host::DataMsg;
use sempa_proto::link::LinkKind;
use sempa_proto::{HostId, Tid};
use std::ops::Range;

/// Number of counted frames.
const FRAMES: u64 = 10_000;
/// Frames sent before counting: the first messages of a pair create table entries.
const WARM: u64 = 100;

/// Cycles through data frames, fragments and acknowledgements.
fn kind(number: u64) -> LinkKind {
    match number % 4 {
        0 => LinkKind::Data { last: false },
        3 => LinkKind::Ack { resync: false },
        _ => LinkKind::Data { last: true },
    }
}

/// Forwards frames between these tasks. Returns the number of allocations.
fn allocations(
    daemon: &mut Daemon,
    ends: (Tid, Tid),
    event: impl Fn(Bytes) -> Event,
    forwarded: impl Fn(&Output, &Bytes) -> bool,
) -> usize {
    let mut buffer = BytesMut::new();
    let mut pass = |range: Range<u64>| {
        let frames: Vec<Bytes> = range
            .map(|n| frame(&mut buffer, ends, kind(n), n, &[7; 64]))
            .collect();
        let before = counting_allocator::allocations();
        for frame in &frames {
            daemon.handle(event(frame.clone()));
            assert!(
                daemon
                    .poll()
                    .is_some_and(|output| forwarded(&output, frame))
            );
            assert!(daemon.poll().is_none());
        }
        counting_allocator::allocations() - before
    };
    pass(0..WARM);
    pass(WARM..WARM + FRAMES)
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
    assert_eq!(allocations(&mut daemon, ends, event, forwarded), 0);
}

/// Frames to a task of another host are forwarded without an allocation.
#[test]
fn outgoing_frames_allocate_nothing() {
    let mut daemon = Daemon::new(1);
    let ends = (daemon.tids[0], elsewhere());
    let event = |frame| Event::TaskLink {
        conn: Daemon::conn(0),
        frame,
    };
    let forwarded = |output: &Output, sent: &Bytes| match output {
        Output::Carry {
            host: HostId::MASTER,
            carried: DataMsg::Frame(frame),
        } => frame == sent,
        _ => false,
    };
    assert_eq!(allocations(&mut daemon, ends, event, forwarded), 0);
}

/// Frames from a task of another host are forwarded without an allocation.
#[test]
fn incoming_frames_allocate_nothing() {
    let mut daemon = Daemon::new(1);
    let ends = (elsewhere(), daemon.tids[0]);
    let event = |frame| Event::HostCarried {
        host: HostId::MASTER,
        carried: DataMsg::Frame(frame),
    };
    let forwarded = |output: &Output, sent: &Bytes| match output {
        Output::LinkToTask { conn, frame } => *conn == Daemon::conn(0) && frame == sent,
        _ => false,
    };
    assert_eq!(allocations(&mut daemon, ends, event, forwarded), 0);
}
