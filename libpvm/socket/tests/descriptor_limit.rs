//! Tests a process that has reached its descriptor limit. The test changes the limit of its whole
//! process, so it is the only test in its file.

use bytes::BytesMut;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_socket::{MessageFds, PendingFds, ReadOutcome, receive};
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// Descriptor limit of the test process; larger than the number of its open descriptors.
const FD_LIMIT: u64 = 128;

fn send(socket: &UnixStream, bytes: &[u8], fds: &[RawFd]) {
    let control_messages = [ControlMessage::ScmRights(fds)];
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(bytes)],
        &control_messages,
        MsgFlags::empty(),
        None,
    )
    .expect("sent");
}

/// If a message's descriptors exceed the limit, that message loses its descriptors, and all other
/// messages get their own descriptors.
#[test]
fn lost_descriptors_do_not_shift_to_other_messages() {
    let (sender, receiver) = UnixStream::pair().expect("a pair");
    let file = File::open("/dev/null").expect("it is there");
    for text in [b"none", b"half", b"both"] {
        send(&sender, text, &[file.as_raw_fd(), sender.as_raw_fd()]);
    }
    setrlimit(Resource::RLIMIT_NOFILE, FD_LIMIT, FD_LIMIT).expect("it may have less");
    let mut open_files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let (mut buffer, mut pending_fds) = (BytesMut::with_capacity(100), PendingFds::default());
    for free_fd_count in 0..3 {
        open_files.truncate(open_files.len() - usize::from(free_fd_count > 0));
        let outcome = receive(
            &receiver,
            &mut buffer,
            &mut pending_fds,
            MsgFlags::MSG_DONTWAIT,
        )
        .expect("there");
        assert_eq!(
            outcome,
            ReadOutcome {
                byte_count: 4,
                is_drained: false
            },
            "it may go on behind them"
        );
    }
    assert_eq!(&buffer[..], b"nonehalfboth", "no byte of the words is lost");
    assert_eq!(
        pending_fds.len(),
        4,
        "two sets that are lost, and two descriptors"
    );
    assert!(matches!(pending_fds.take_message_fds(2), MessageFds::Lost));
    assert!(
        matches!(pending_fds.take_message_fds(2), MessageFds::Lost),
        "also that of which one came"
    );
    assert!(matches!(pending_fds.take_message_fds(2), MessageFds::All(both) if both.len() == 2));
    assert!(matches!(
        pending_fds.take_message_fds(1),
        MessageFds::Missing
    ));
}
