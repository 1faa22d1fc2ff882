//! Tests of the runtime with a fake daemon: several tasks in one process, real sockets, real
//! threads.

mod any_route;
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

/// Timeout of every wait; longer than any loaded machine needs.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `f` until it returns a value.
pub(super) fn wait_until<R>(what: &str, mut f: impl FnMut() -> Option<R>) -> R {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(found) = f() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn message(dst: Tid, tag: i32, body: impl Into<Bytes>) -> Message {
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
pub(super) fn recv_next(task: &Runtime) -> Message {
    let first = &mut |inbox: &mut Inbox| inbox.take_first(|_| true);
    task.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), first)
        .expect("connected")
        .expect("a message in time")
}

/// Sends messages of different lengths, each with its number.
pub(super) fn send_numbered(task: &Runtime, to: Tid, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let len = 4 + (number as usize * 7919) % 200_000 / (1 + number as usize % 50);
        let mut body = vec![number as u8; len];
        body[..4].copy_from_slice(&number.to_le_bytes());
        task.send(message(to, 1, body)).expect("sent");
    }
}

/// Receives these messages from one sender and checks that all arrive once, in order and undamaged.
pub(super) fn expect_numbered(task: &Runtime, from: Tid, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.src == from);
        let got = task.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), wanted);
        let got = got
            .expect("connected")
            .unwrap_or_else(|| panic!("message {number} did not come"));
        assert_eq!(got.body[..4], number.to_le_bytes(), "in order");
        assert!(got.body[4..].iter().all(|b| *b == number as u8), "whole");
    }
}

/// Wait ids are positive and distinct.
#[test]
fn wait_ids_are_positive_and_unique() {
    let fake = fake::FakeDaemon::start();
    let task = fake.enroll();
    let wids: std::collections::HashSet<i32> = (0..100).map(|_| task.next_wid()).collect();
    assert!(wids.len() == 100 && wids.iter().all(|wid| *wid > 0));
}

/// Sending to an address that is neither a task nor a daemon fails.
#[test]
fn invalid_address_is_refused() {
    let fake = fake::FakeDaemon::start();
    let task = fake.enroll();
    for raw in [0, -1, 0x40000, 0x4000_0001] {
        assert_eq!(
            task.send(message(Tid::from_raw(raw), 1, "")),
            Err(PvmError::BadParam),
            "{raw:x}"
        );
    }
}
