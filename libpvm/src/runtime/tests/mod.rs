//! Tests of the runtime with a fake daemon. The tests run several tasks in one process, with real
//! sockets and threads.

mod any_route;
mod automatic;
mod direct;
mod exits;
mod fake;
mod forbidden;
mod hostile;
mod messaging;
mod migrations;
mod rings;
mod rm;
mod zero_copy;

use crate::inbox::Inbox;
use crate::runtime::Runtime;
use bytes::Bytes;
use sempa_proto::message::{CTX_BASE, ENC_XDR, Message};
use sempa_proto::{PvmError, Tid};
use std::time::{Duration, Instant};

/// Timeout of every wait. The timeout is long because test machines may be loaded.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `f` until `f` returns a value, and returns this value. Panics after [`TEST_TIMEOUT`].
pub(super) fn wait_until<R>(awaited_event: &str, mut f: impl FnMut() -> Option<R>) -> R {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(value) = f() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain: {awaited_event}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn xdr_message(dst: Tid, tag: i32, body: impl Into<Bytes>) -> Message {
    Message {
        src: Tid::NONE,
        dst,
        ctx: CTX_BASE,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body: body.into(),
    }
}

/// Returns the next message; panics after [`TEST_TIMEOUT`].
pub(super) fn wait_for_next_message(task: &Runtime) -> Message {
    let take_first_message = &mut |inbox: &mut Inbox| inbox.take_first(|_| true);
    task.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), take_first_message)
        .expect("connected")
        .expect("a message in time")
}

/// Sends messages of different lengths. Each message begins with its number.
pub(super) fn send_numbered(task: &Runtime, receiver: Tid, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let len = 4 + (number as usize * 7919) % 200_000 / (1 + number as usize % 50);
        let mut body = vec![number as u8; len];
        body[..4].copy_from_slice(&number.to_le_bytes());
        task.send(xdr_message(receiver, 1, body)).expect("sent");
    }
}

/// Receives the messages of [`send_numbered`] from one sender, and checks that all arrive once, in
/// order and undamaged.
pub(super) fn recv_and_check_numbered(task: &Runtime, sender: Tid, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let take_from_sender = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.src == sender);
        let message = task.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), take_from_sender);
        let message = message
            .expect("connected")
            .unwrap_or_else(|| panic!("message {number} did not come"));
        assert_eq!(message.body[..4], number.to_le_bytes(), "in order");
        assert!(
            message.body[4..].iter().all(|b| *b == number as u8),
            "whole"
        );
    }
}

#[test]
fn wait_ids_are_positive_and_unique() {
    let fake = fake::FakeDaemon::start();
    let task = fake.enroll();
    let wids: std::collections::HashSet<i32> = (0..100).map(|_| task.allocate_wid()).collect();
    assert!(wids.len() == 100 && wids.iter().all(|wid| *wid > 0));
}

/// Sending to an address that is neither a task nor a daemon fails with `BadParam`.
#[test]
fn invalid_address_is_refused() {
    let fake = fake::FakeDaemon::start();
    let task = fake.enroll();
    for raw_tid in [0, -1, 0x40000, 0x4000_0001] {
        assert_eq!(
            task.send(xdr_message(Tid::from_raw(raw_tid), 1, "")),
            Err(PvmError::BadParam),
            "{raw_tid:x}"
        );
    }
}
