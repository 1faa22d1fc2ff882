//! Tests a process that has reached its descriptor limit. The test changes the limit of its whole
//! process, so it is the only test in its file.

use bytes::BytesMut;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_socket::{MessageFds, PendingFds, Received, receive};
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// Descriptor limit of the test process; larger than the number of its open descriptors.
const FD_LIMIT: u64 = 128;

fn send(to: &UnixStream, bytes: &[u8], descriptors: &[RawFd]) {
    let rights = [ControlMessage::ScmRights(descriptors)];
    sendmsg::<()>(
        to.as_raw_fd(),
        &[IoSlice::new(bytes)],
        &rights,
        MsgFlags::empty(),
        None,
    )
    .expect("sent");
}

/// If a message's descriptors exceed the limit, only that message is lost; no other message gets
/// its descriptors.
#[test]
fn lost_descriptors_do_not_shift_to_other_messages() {
    let (near, far) = UnixStream::pair().expect("a pair");
    let file = File::open("/dev/null").expect("it is there");
    for word in [b"none", b"half", b"both"] {
        send(&near, word, &[file.as_raw_fd(), near.as_raw_fd()]);
    }
    setrlimit(Resource::RLIMIT_NOFILE, FD_LIMIT, FD_LIMIT).expect("it may have less");
    let mut full: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let (mut buffer, mut passed) = (BytesMut::with_capacity(100), PendingFds::default());
    for room in 0..3 {
        full.truncate(full.len() - usize::from(room > 0));
        let received =
            receive(&far, &mut buffer, &mut passed, MsgFlags::MSG_DONTWAIT).expect("there");
        assert_eq!(
            received,
            Received {
                bytes: 4,
                drained: false
            },
            "it may go on behind them"
        );
    }
    assert_eq!(&buffer[..], b"nonehalfboth", "no byte of the words is lost");
    assert_eq!(
        passed.len(),
        4,
        "two sets that are lost, and two descriptors"
    );
    assert!(matches!(passed.take(2), MessageFds::Lost));
    assert!(
        matches!(passed.take(2), MessageFds::Lost),
        "also that of which one came"
    );
    assert!(matches!(passed.take(2), MessageFds::All(both) if both.len() == 2));
    assert!(matches!(passed.take(1), MessageFds::Missing));
}
