//! Tests with a hostile task that corrupts shared memory or dies while it writes. Only the links of
//! the hostile task are affected.

use super::fake::{FakeDaemon, RecordedMessage};
use super::rings::{same_host_daemon, tasks_with_ring};
use super::{
    recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until, xdr_message,
};
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

/// Distance in bytes between the control words of the two rings of a pair. The other offsets are
/// relative to the control words of one ring, whose `tail` is at offset 0.
const CONTROL_WORDS_DISTANCE: u64 = 384;
const HEAD_OFFSET: u64 = 128;
const STARVED_FLAG_OFFSET: u64 = 256;
const CLOSED_FLAG_OFFSET: u64 = 260;
const RETURNED_LEASES_OFFSET: u64 = 264;
/// Offset in bytes of the data of the first ring.
const DATA_OFFSET: u64 = 4096;

struct TestRng(u64);

impl TestRng {
    fn next_below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// Returns a number that is usually very small or very large. Such lengths and positions are
    /// critical.
    fn extreme_word(&mut self) -> u64 {
        match self.next_below(4) {
            0 => self.next_below(2),
            1 => u64::MAX - self.next_below(8),
            2 => self.next_below(2 << 20) & !7,
            _ => self.next_below(u64::MAX),
        }
    }
}

fn write_at(fd: &OwnedFd, offset: u64, bytes: &[u8]) {
    pwrite(fd, bytes, i64::try_from(offset).expect("small"))
        .expect("such memory can be written to");
}

/// Returns a record with a valid header and random link or lease contents.
fn random_record(rng: &mut TestRng) -> Vec<u8> {
    let link_kind = match rng.next_below(3) {
        0 => LinkKind::Data {
            is_last: rng.next_below(2) == 0,
        },
        1 => LinkKind::Ack {
            requests_resync: rng.next_below(2) == 0,
        },
        _ => LinkKind::Probe,
    };
    let mut body = encode_short_head(link_kind, rng.next_below(50), rng.extreme_word()).to_vec();
    if rng.next_below(2) == 0 {
        body[0] |= FLAG_OUT_OF_LINE;
        for lease_word in [
            rng.next_below(4),
            rng.extreme_word(),
            rng.extreme_word(),
            rng.next_below(70),
        ] {
            body.extend(lease_word.to_le_bytes());
        }
        // The header of the message, also of an impossible length.
        body.resize(body.len() + rng.next_below(40) as usize, 7);
    } else {
        body.resize(body.len() + rng.next_below(300) as usize, 7);
    }
    let length = body.len() as u32;
    let mut bytes = (u64::from(length) | u64::from(!length) << 32)
        .to_le_bytes()
        .to_vec();
    bytes.append(&mut body);
    bytes
}

/// Overwrites one randomly selected field or record in the memory of a pair of rings.
fn corrupt_rings(rng: &mut TestRng, fd: &OwnedFd) {
    let control_offset = rng.next_below(2) * CONTROL_WORDS_DISTANCE;
    match rng.next_below(9) {
        0 => write_at(fd, control_offset, &rng.extreme_word().to_le_bytes()),
        1 => write_at(
            fd,
            control_offset + HEAD_OFFSET,
            &rng.extreme_word().to_le_bytes(),
        ),
        2 => write_at(
            fd,
            control_offset + STARVED_FLAG_OFFSET,
            &(rng.extreme_word() as u32).to_le_bytes(),
        ),
        3 => write_at(
            fd,
            control_offset + CLOSED_FLAG_OFFSET,
            &(rng.extreme_word() as u32).to_le_bytes(),
        ),
        4 | 5 => write_at(
            fd,
            control_offset + RETURNED_LEASES_OFFSET,
            &rng.extreme_word().to_le_bytes(),
        ),
        6 => write_at(
            fd,
            rng.next_below(RING_PAIR_BYTES as u64 - 8),
            &rng.extreme_word().to_le_bytes(),
        ),
        _ => {
            // Writes a record after the last record, and advances the tail past the new record.
            let (ring_index, ring_bytes) = (
                rng.next_below(2),
                (RING_PAIR_BYTES as u64 - DATA_OFFSET) / 2,
            );
            let mut tail = [0; 8];
            assert_eq!(
                pread(fd, &mut tail, (ring_index * CONTROL_WORDS_DISTANCE) as i64),
                Ok(8)
            );
            let (tail, bytes) = (u64::from_le_bytes(tail), random_record(rng));
            let record_offset = (tail % ring_bytes).min(ring_bytes - 512);
            write_at(
                fd,
                DATA_OFFSET + ring_index * ring_bytes + record_offset,
                &bytes,
            );
            let new_tail = tail.wrapping_add(bytes.len().next_multiple_of(8) as u64);
            write_at(
                fd,
                ring_index * CONTROL_WORDS_DISTANCE,
                &new_tail.to_le_bytes(),
            );
        }
    }
}

/// Overwrites randomly selected memory that the hostile task can write: fields of a doorbell if
/// `corrupts_doorbell` is true, otherwise a field or record of a ring that the hostile task has
/// offered or was offered. Does nothing if the randomly selected message contains no such memory.
fn corrupt_shared_memory(
    fake: &FakeDaemon,
    rng: &mut TestRng,
    hostile_tid: Tid,
    corrupts_doorbell: bool,
) {
    let state = fake.state();
    let all_messages = state.recorded_messages.iter().flatten();
    let hostile_messages: Vec<_> = all_messages
        .filter(|(a, b, _, fds)| (*a == hostile_tid || *b == hostile_tid) && !fds.is_empty())
        .collect();
    if hostile_messages.is_empty() {
        return;
    }
    // Only the most recent rings and doorbells are in use.
    let (_, _, message, fds) = hostile_messages[hostile_messages.len()
        - 1
        - rng.next_below(hostile_messages.len().min(4) as u64) as usize];
    match message {
        RouteMsg::RingOffer { .. } if !corrupts_doorbell => corrupt_rings(rng, &fds[0]),
        RouteMsg::RingOffer { .. } | RouteMsg::RingAccept { .. } if corrupts_doorbell => {
            let doorbell = fds.last().expect("looked");
            write_at(
                doorbell,
                rng.next_below(DOORBELL_BYTES as u64 / 8) * 8,
                &rng.extreme_word().to_le_bytes(),
            );
            // The first bytes of a doorbell are the most important ones, because they control the
            // wake-ups.
            write_at(
                doorbell,
                rng.next_below(4) * 4,
                &(rng.extreme_word() as u32).to_le_bytes(),
            );
        }
        _ => {}
    }
}

/// Corrupts memory until several rings have failed and new rings have been set up.
fn corrupt_until_rings_fail(fake: &FakeDaemon, hostile_task: &Runtime, victims: [Tid; 2]) {
    const FAILED_RINGS_MIN: usize = 8;
    /// Maximum number of corrupted doorbells. Each corruption may delay a wake-up by a second.
    const CORRUPTED_DOORBELLS_MAX: u64 = 10;
    let (mut rng, mut round_count, mut corrupted_doorbell_count) = (TestRng(3), 0u64, 0);
    wait_until("broken rings", || {
        for _ in 0..20 {
            round_count += 1;
            // Messages make the tasks set up rings again. Large messages make the tasks use pools.
            let len = if round_count.is_multiple_of(50) {
                300_000
            } else {
                20
            };
            hostile_task
                .send(xdr_message(
                    victims[round_count as usize % 2],
                    2,
                    vec![2; len],
                ))
                .expect("sent");
            let corrupts_doorbell = corrupted_doorbell_count < CORRUPTED_DOORBELLS_MAX
                && round_count.is_multiple_of(200);
            corrupted_doorbell_count += u64::from(corrupts_doorbell);
            corrupt_shared_memory(fake, &mut rng, hostile_task.tid(), corrupts_doorbell);
        }
        let fake_state = fake.state();
        let is_hostile_acceptance = |(a, b, message, _): &&RecordedMessage| {
            (*a == hostile_task.tid() || *b == hostile_task.tid())
                && matches!(message, RouteMsg::RingAccept { .. })
        };
        (fake_state
            .recorded_messages
            .iter()
            .flatten()
            .filter(is_hostile_acceptance)
            .count()
            >= FAILED_RINGS_MIN)
            .then_some(())
    });
}

/// A task that corrupts all its shared memory does not affect the messages between other tasks.
#[test]
fn corrupted_shared_memory_affects_own_links_only() {
    const MESSAGES_PER_ROUND: u32 = 10_000;
    let fake = same_host_daemon();
    fake.state().recorded_messages = Some(Vec::new());
    let (a, b) = tasks_with_ring(&fake);
    let hostile_task = fake.enroll();
    std::thread::scope(|scope| {
        let corruption_thread =
            scope.spawn(|| corrupt_until_rings_fail(&fake, &hostile_task, [a.tid(), b.tid()]));
        let mut round = 0;
        while round == 0 || !corruption_thread.is_finished() {
            let numbers = round * MESSAGES_PER_ROUND..(round + 1) * MESSAGES_PER_ROUND;
            std::thread::scope(|scope| {
                for (own_task, peer) in [(&a, &b), (&b, &a)] {
                    let sent_numbers = numbers.clone();
                    scope.spawn(move || {
                        for number in sent_numbers {
                            let body = [
                                &number.to_le_bytes()[..],
                                &vec![number as u8; number as usize % 300],
                            ]
                            .concat();
                            own_task
                                .send(xdr_message(peer.tid(), 1, body))
                                .expect("sent");
                        }
                    });
                    let expected_numbers = numbers.clone();
                    scope.spawn(move || {
                        recv_and_check_numbered(own_task, peer.tid(), expected_numbers)
                    });
                }
            });
            // Drops all messages that the hostile task has sent.
            for task in [&a, &b] {
                task.check_inbox(&mut |inbox| {
                    while inbox.take_first(|m| m.src == hostile_task.tid()).is_some() {}
                    Some(())
                });
            }
            round += 1;
        }
        corruption_thread
            .join()
            .expect("its own library bears it, too");
    });
}

/// A message in a ring is received even if a hostile task has cleared the doorbell.
#[test]
fn ring_is_read_despite_cleared_doorbell() {
    let fake = same_host_daemon();
    fake.state().recorded_messages = Some(Vec::new());
    let (a, b) = tasks_with_ring(&fake);
    let overwrite_doorbells = |offset: u64, bytes: &[u8]| {
        let state = fake.state();
        let doorbells = state
            .recorded_messages
            .iter()
            .flatten()
            .filter_map(|(_, _, _, fds)| fds.last());
        doorbells.for_each(|doorbell| write_at(doorbell, offset, bytes));
    };
    // The next message is now expected through the ring.
    a.send(xdr_message(b.tid(), 0, "")).expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 0);
    for n in 1..4 {
        std::thread::scope(|scope| {
            let receive_thread = scope.spawn(|| wait_for_next_message(&b));
            wait_until("a sleeper", || {
                b.inner
                    .shared_state
                    .lock()
                    .has_event_waiters()
                    .then_some(())
            });
            // The doorbell now shows no sleeping thread and an awake drainer thread, so the writer
            // wakes no thread.
            overwrite_doorbells(0, &[[0u8; 4], [0; 4], [1, 0, 0, 0], [0; 4]].concat());
            // While the test holds the writer's lock, the writer cannot send a probe.
            let mut state_guard = a.lock().expect("not forked");
            let now = state_guard.now();
            state_guard
                .core
                .send(now, xdr_message(b.tid(), n, ""))
                .expect("sent");
            overwrite_doorbells(16, &[0; DOORBELL_BYTES - 16]);
            assert_eq!(receive_thread.join().expect("no panic").tag, n);
        });
    }
}

/// A receiver maps at most a fixed number of pools of one peer.
#[test]
fn pools_of_one_peer_are_bounded() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    let mapped_pool_count = |task: &Runtime| {
        task.with_core(|core| core.shm_routes.mapped_peer_pool_count())
            .expect("not forked")
    };
    let mut count_max = 0;
    for n in 0..40 {
        let mut state_guard = b.lock().expect("not forked");
        let now = state_guard.now();
        let (_, fd) = OwnPool::new().expect("made");
        state_guard.core.handle_ring_message(
            now,
            a.tid(),
            true,
            &RouteMsg::PoolOffer { id: OfferId(n) },
            vec![fd],
        );
        state_guard.core.shm_routes.leak_lease(a.tid());
        drop(state_guard);
        count_max = count_max.max(mapped_pool_count(&b));
    }
    assert_eq!(count_max, 8, "each with a message in use");
    send_numbered(&a, b.tid(), 0..200);
    recv_and_check_numbered(&b, a.tid(), 0..200);
}

/// Helper process of another test: sends messages until it is killed.
#[test]
#[ignore = "child process of another test"]
fn subprocess_writes_without_end() {
    let socket = std::env::var_os("WRITES_TO_SOCKET")
        .expect("told where")
        .into();
    let receiver: i32 = std::env::var("WRITES_TO_TASK")
        .expect("told to whom")
        .parse()
        .expect("a number");
    let options = crate::runtime::EnrollOptions {
        socket,
        claim: sempa_proto::task::Claim::NotSpawned,
        program: "writer".into(),
        on_daemon_exit: sempa_proto::task::OnDaemonExit::FailCalls,
        has_automatic_routes: false,
    };
    let task = Runtime::connect(options).expect("welcome");
    for number in 0u32.. {
        let mut body = vec![number as u8; 60_000];
        body[..4].copy_from_slice(&number.to_le_bytes());
        task.send(xdr_message(Tid::from_raw(receiver), 1, body))
            .expect("sent");
    }
}

/// If a process is killed while it writes, its complete messages are received and its incomplete
/// message is not.
#[test]
fn killed_writer_leaves_whole_messages_only() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    for round in 0..12 {
        let mut writer = Command::new(std::env::current_exe().expect("known"))
            .args([
                "--exact",
                "runtime::tests::hostile::subprocess_writes_without_end",
                "--ignored",
            ])
            .env("WRITES_TO_SOCKET", fake.socket_path())
            .env("WRITES_TO_TASK", a.tid().raw().to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("started");
        let first_message = wait_for_next_message(&a);
        let writer_tid = first_message.src;
        let check_message = |number: u32, message: &Message| {
            assert_eq!(
                (message.body[..4].as_ref(), message.body.len()),
                (&number.to_le_bytes()[..], 60_000),
                "in order"
            );
            assert!(
                message.body[4..].iter().all(|byte| *byte == number as u8),
                "whole"
            );
        };
        check_message(0, &first_message);
        wait_until("a ring", || {
            a.with_core(|core| core.shm_routes.slot(writer_tid).is_some())
                .filter(|is_reached| *is_reached)
        });
        for number in 1..50 + round * 7 {
            check_message(number, &wait_for_next_message(&a));
        }
        // The process writes continuously, so it is usually killed in the middle of a message.
        writer.kill().expect("it runs");
        writer.wait().expect("it has ended");
        wait_until("the closed socket", || {
            fake.is_closed(writer_tid).then_some(())
        });
        fake.send_control(a.tid(), ToTask::PeerGone { tid: writer_tid });
        wait_until("the end of the ring", || {
            a.with_core(|core| core.shm_routes.slot(writer_tid).is_none())
                .filter(|is_reached| *is_reached)
        });
        let mut number = 50 + round * 7;
        while let Some(message) =
            a.check_inbox(&mut |inbox| inbox.take_first(|m| m.src == writer_tid))
        {
            check_message(number, &message);
            number += 1;
        }
        send_numbered(&a, b.tid(), 0..20);
        recv_and_check_numbered(&b, a.tid(), 0..20);
    }
}
