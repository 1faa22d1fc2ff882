//! Tests with a hostile task that corrupts shared memory, or dies while it writes: only the links
//! of the hostile task are affected.

use super::fake::{FakeDaemon, RecordedMessage};
use super::rings::{ring_pair, same_host_daemon};
use super::{expect_numbered, message, recv_next, send_numbered, wait_until};
use crate::runtime::Runtime;
use nix::sys::uio::{pread, pwrite};
use sempa_proto::Tid;
use sempa_proto::link::{FLAG_OUT_OF_LINE, LinkKind, encode_short_head};
use sempa_proto::message::Message;
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::ToTask;
use sempa_ring::shared_memory::{DOORBELL_BYTES, RING_PAIR_BYTES};
use sempa_ring::shared_pool::OwnPool;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

/// Distance between the control words of the two rings of a pair. The offsets below are relative to
/// the control words of one ring, whose `tail` is at offset 0.
const CONTROL_WORDS_DISTANCE: u64 = 384;
const HEAD_OFFSET: u64 = 128;
const STARVED_OFFSET: u64 = 256;
const CLOSED_OFFSET: u64 = 260;
const RETURNED_OFFSET: u64 = 264;
/// Offset of the data of the first ring.
const DATA_OFFSET: u64 = 4096;

struct Rng(u64);

impl Rng {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    /// Returns a number that is most often very small or very large, because such lengths and
    /// positions are critical.
    fn extreme_word(&mut self) -> u64 {
        match self.below(4) {
            0 => self.below(2),
            1 => u64::MAX - self.below(8),
            2 => self.below(2 << 20) & !7,
            _ => self.below(u64::MAX),
        }
    }
}

fn write_at(fd: &OwnedFd, at: u64, bytes: &[u8]) {
    pwrite(fd, bytes, i64::try_from(at).expect("small")).expect("such memory can be written to");
}

/// Returns a record with a valid header and random link or lease contents.
fn random_record(dice: &mut Rng) -> Vec<u8> {
    let kind = match dice.below(3) {
        0 => LinkKind::Data {
            last: dice.below(2) == 0,
        },
        1 => LinkKind::Ack {
            resync: dice.below(2) == 0,
        },
        _ => LinkKind::Probe,
    };
    let mut body = encode_short_head(kind, dice.below(50), dice.extreme_word()).to_vec();
    if dice.below(2) == 0 {
        body[0] |= FLAG_OUT_OF_LINE;
        for word in [
            dice.below(4),
            dice.extreme_word(),
            dice.extreme_word(),
            dice.below(70),
        ] {
            body.extend(word.to_le_bytes());
        }
    } else {
        body.resize(body.len() + dice.below(300) as usize, 7);
    }
    let length = body.len() as u32;
    let mut bytes = (u64::from(length) | u64::from(!length) << 32)
        .to_le_bytes()
        .to_vec();
    bytes.append(&mut body);
    bytes
}

/// Overwrites one random part of the memory of a pair of rings.
fn corrupt_rings(dice: &mut Rng, fd: &OwnedFd) {
    let words = dice.below(2) * CONTROL_WORDS_DISTANCE;
    match dice.below(9) {
        0 => write_at(fd, words, &dice.extreme_word().to_le_bytes()),
        1 => write_at(fd, words + HEAD_OFFSET, &dice.extreme_word().to_le_bytes()),
        2 => write_at(
            fd,
            words + STARVED_OFFSET,
            &(dice.extreme_word() as u32).to_le_bytes(),
        ),
        3 => write_at(
            fd,
            words + CLOSED_OFFSET,
            &(dice.extreme_word() as u32).to_le_bytes(),
        ),
        4 | 5 => write_at(
            fd,
            words + RETURNED_OFFSET,
            &dice.extreme_word().to_le_bytes(),
        ),
        6 => write_at(
            fd,
            dice.below(RING_PAIR_BYTES as u64 - 8),
            &dice.extreme_word().to_le_bytes(),
        ),
        _ => {
            // Writes a record after the last one, and advances the tail past it.
            let (ring, ring_bytes) = (dice.below(2), (RING_PAIR_BYTES as u64 - DATA_OFFSET) / 2);
            let mut tail = [0; 8];
            assert_eq!(
                pread(fd, &mut tail, (ring * CONTROL_WORDS_DISTANCE) as i64),
                Ok(8)
            );
            let (tail, bytes) = (u64::from_le_bytes(tail), random_record(dice));
            let at = (tail % ring_bytes).min(ring_bytes - 512);
            write_at(fd, DATA_OFFSET + ring * ring_bytes + at, &bytes);
            let end = tail.wrapping_add(bytes.len().next_multiple_of(8) as u64);
            write_at(fd, ring * CONTROL_WORDS_DISTANCE, &end.to_le_bytes());
        }
    }
}

/// Overwrites one random part of memory that the hostile task can write: a ring that it shares, or
/// a doorbell.
fn corrupt_shared_memory(fake: &FakeDaemon, dice: &mut Rng, from: Tid, doorbells: bool) {
    let net = fake.state();
    let all = net.recorded.iter().flatten();
    let mine: Vec<_> = all
        .filter(|(a, b, _, fds)| (*a == from || *b == from) && !fds.is_empty())
        .collect();
    if mine.is_empty() {
        return;
    }
    // Only the most recent rings and doorbells are in use.
    let (_, _, message, fds) = mine[mine.len() - 1 - dice.below(mine.len().min(4) as u64) as usize];
    match message {
        RouteMsg::RingOffer { .. } if !doorbells => corrupt_rings(dice, &fds[0]),
        RouteMsg::RingOffer { .. } | RouteMsg::RingAccept { .. } if doorbells => {
            let bell = fds.last().expect("looked");
            write_at(
                bell,
                dice.below(DOORBELL_BYTES as u64 / 8) * 8,
                &dice.extreme_word().to_le_bytes(),
            );
            // The first words of a doorbell are the most important ones.
            write_at(
                bell,
                dice.below(4) * 4,
                &(dice.extreme_word() as u32).to_le_bytes(),
            );
        }
        _ => {}
    }
}

/// Corrupts memory until several rings have failed and new ones have been set up.
fn corrupt_until_rings_fail(fake: &FakeDaemon, bad: &Runtime, victims: [Tid; 2]) {
    const RINGS: usize = 8;
    /// Number of corrupted doorbells. Each may delay a wake-up by a second.
    const CORRUPTED_DOORBELLS: u64 = 10;
    let (mut dice, mut rounds, mut bells) = (Rng(3), 0u64, 0);
    wait_until("broken rings", || {
        for _ in 0..20 {
            rounds += 1;
            // Messages make the tasks set up rings again, and large ones make them use pools.
            let len = if rounds.is_multiple_of(50) {
                300_000
            } else {
                20
            };
            bad.send(message(victims[rounds as usize % 2], 2, vec![2; len]))
                .expect("sent");
            let at_bells = bells < CORRUPTED_DOORBELLS && rounds.is_multiple_of(200);
            bells += u64::from(at_bells);
            corrupt_shared_memory(fake, &mut dice, bad.tid(), at_bells);
        }
        let net = fake.state();
        let made = |(a, b, word, _): &&RecordedMessage| {
            (*a == bad.tid() || *b == bad.tid()) && matches!(word, RouteMsg::RingAccept { .. })
        };
        (net.recorded.iter().flatten().filter(made).count() >= RINGS).then_some(())
    });
}

/// A task that corrupts all memory it shares does not affect the messages between other tasks.
#[test]
fn corrupted_shared_memory_affects_own_links_only() {
    const NUMBERS: u32 = 10_000;
    let fake = same_host_daemon();
    fake.state().recorded = Some(Vec::new());
    let (a, b) = ring_pair(&fake);
    let bad = fake.enroll();
    std::thread::scope(|scope| {
        let scribbling = scope.spawn(|| corrupt_until_rings_fail(&fake, &bad, [a.tid(), b.tid()]));
        let mut round = 0;
        while round == 0 || !scribbling.is_finished() {
            let numbers = round * NUMBERS..(round + 1) * NUMBERS;
            std::thread::scope(|scope| {
                for (one, other) in [(&a, &b), (&b, &a)] {
                    let sent = numbers.clone();
                    scope.spawn(move || {
                        for number in sent {
                            let body = [
                                &number.to_le_bytes()[..],
                                &vec![number as u8; number as usize % 300],
                            ]
                            .concat();
                            one.send(message(other.tid(), 1, body)).expect("sent");
                        }
                    });
                    let wanted = numbers.clone();
                    scope.spawn(move || expect_numbered(one, other.tid(), wanted));
                }
            });
            // Drops whatever the hostile task has sent.
            for task in [&a, &b] {
                task.check_inbox(&mut |inbox| {
                    while inbox.take_first(|m| m.src == bad.tid()).is_some() {}
                    Some(())
                });
            }
            round += 1;
        }
        scribbling.join().expect("its own library bears it, too");
    });
}

/// A message in a ring is received even if a hostile task has cleared the doorbell.
#[test]
fn ring_is_read_despite_cleared_doorbell() {
    let fake = same_host_daemon();
    fake.state().recorded = Some(Vec::new());
    let (a, b) = ring_pair(&fake);
    let wipe = |from: u64, bytes: &[u8]| {
        let net = fake.state();
        let bells = net
            .recorded
            .iter()
            .flatten()
            .filter_map(|(_, _, _, fds)| fds.last());
        bells.for_each(|bell| write_at(bell, from, bytes));
    };
    // After this message, the next message is expected through the ring.
    a.send(message(b.tid(), 0, "")).expect("sent");
    assert_eq!(recv_next(&b).tag, 0);
    for n in 1..4 {
        std::thread::scope(|scope| {
            let hearing = scope.spawn(|| recv_next(&b));
            wait_until("a sleeper", || {
                b.0.shared.lock().has_event_waiters().then_some(())
            });
            // No thread seems to sleep and the drainer thread seems to be woken, so the writer
            // wakes no thread.
            wipe(0, &[[0u8; 4], [0; 4], [1, 0, 0, 0], [0; 4]].concat());
            // While the test holds the writer's lock, the writer cannot send a probe.
            let mut held = a.lock().expect("not forked");
            let now = held.now();
            held.core.send(now, message(b.tid(), n, "")).expect("sent");
            wipe(16, &[0; DOORBELL_BYTES - 16]);
            assert_eq!(hearing.join().expect("no panic").tag, n);
        });
    }
}

/// The number of pools of one peer is limited.
#[test]
fn pools_of_one_peer_are_bounded() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    let stores = |task: &Runtime| {
        task.with_core(|core| core.shm.mapped_peer_pools())
            .expect("not forked")
    };
    let mut at_most = 0;
    for n in 0..40 {
        let mut held = b.lock().expect("not forked");
        let now = held.now();
        let (_, fd) = OwnPool::new().expect("made");
        held.core.handle_ring_message(
            now,
            a.tid(),
            true,
            &RouteMsg::PoolOffer { id: OfferId(n) },
            vec![fd],
        );
        held.core.shm.leak_lease(a.tid());
        drop(held);
        at_most = at_most.max(stores(&b));
    }
    assert_eq!(at_most, 8, "each with a message in use");
    send_numbered(&a, b.tid(), 0..200);
    expect_numbered(&b, a.tid(), 0..200);
}

/// Helper process of another test: sends messages until it is killed.
#[test]
#[ignore = "child process of another test"]
fn child_writes_without_end() {
    let socket = std::env::var_os("WRITES_TO_SOCKET")
        .expect("told where")
        .into();
    let to: i32 = std::env::var("WRITES_TO_TASK")
        .expect("told to whom")
        .parse()
        .expect("a number");
    let options = crate::runtime::EnrollOptions {
        socket,
        claim: sempa_proto::task::Claim::New,
        program: "writer".into(),
        on_daemon_exit: sempa_proto::task::OnDaemonExit::FailCalls,
    };
    let task = Runtime::connect(options).expect("welcome");
    for number in 0u32.. {
        let mut body = vec![number as u8; 60_000];
        body[..4].copy_from_slice(&number.to_le_bytes());
        task.send(message(Tid::from_raw(to), 1, body))
            .expect("sent");
    }
}

/// If a process is killed while it writes, its whole messages are received, and no incomplete one.
#[test]
fn killed_writer_leaves_whole_messages_only() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    for round in 0..12 {
        let mut writer = Command::new(std::env::current_exe().expect("known"))
            .args([
                "--exact",
                "runtime::tests::hostile::child_writes_without_end",
                "--ignored",
            ])
            .env("WRITES_TO_SOCKET", fake.socket())
            .env("WRITES_TO_TASK", a.tid().raw().to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("started");
        let first = recv_next(&a);
        let from = first.src;
        let whole = |number: u32, got: &Message| {
            assert_eq!(
                (got.body[..4].as_ref(), got.body.len()),
                (&number.to_le_bytes()[..], 60_000),
                "in order"
            );
            assert!(
                got.body[4..].iter().all(|byte| *byte == number as u8),
                "whole"
            );
        };
        whole(0, &first);
        wait_until("a ring", || {
            a.with_core(|core| core.shm.slot(from).is_some())
                .filter(|has| *has)
        });
        for number in 1..50 + round * 7 {
            whole(number, &recv_next(&a));
        }
        // The process writes continuously, so it is killed in the middle of a message.
        writer.kill().expect("it runs");
        writer.wait().expect("it has ended");
        wait_until("the closed socket", || fake.is_closed(from).then_some(()));
        fake.send_control(a.tid(), ToTask::PeerGone { tid: from });
        wait_until("the end of the ring", || {
            a.with_core(|core| core.shm.slot(from).is_none())
                .filter(|has| *has)
        });
        let mut number = 50 + round * 7;
        while let Some(got) = a.check_inbox(&mut |inbox| inbox.take_first(|m| m.src == from)) {
            whole(number, &got);
            number += 1;
        }
        send_numbered(&a, b.tid(), 0..20);
        expect_numbered(&b, a.tid(), 0..20);
    }
}
