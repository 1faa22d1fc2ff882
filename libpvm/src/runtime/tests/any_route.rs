//! Property test: the route between two communicating tasks changes at random between daemon, ring
//! and direct connection, with migrations and broken connections. No message may be lost,
//! duplicated, damaged or reordered.

use super::fake::FakeDaemon;
use super::{TEST_TIMEOUT, message, wait_until};
use crate::inbox::Inbox;
use crate::runtime::Runtime;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};
use sempa_proto::link::INLINE_BODY_BYTES_MAX;
use sempa_proto::message::{CTX_BASE, ENC_XDR, encode_message_head};
use sempa_proto::task::ToTask;
use sempa_proto::{Message, Tid};
use std::cell::RefCell;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Number of scripts, unless `PROPTEST_CASES` is set.
const SCRIPT_COUNT: u32 = 24;
/// Maximum number of changes in one script.
const CHANGES_MAX: usize = 8;
/// Number of messages in each direction between two changes.
const MESSAGES_BETWEEN_CHANGES: std::ops::Range<u32> = 0..120;
/// Maximum number of messages that one task has sent and the other task has not received.
const UNRECEIVED_MESSAGES_MAX: u32 = 150;
const LARGE_BYTES: usize = 3 << 20;
const TAG_NUMBER: i32 = 1;
const TAG_END: i32 = 2;

/// Change of the route between the two tasks, which have the numbers 0 and 1.
#[derive(Clone, Copy, Debug)]
enum RouteChange {
    RequestRoute(usize),
    /// The task begins to accept or to refuse direct routes.
    SetAccepts(usize, bool),
    /// The task migrates. Afterwards it is on the same host as its peer if `same_host`. The peer is
    /// notified before (`early`) or after the task runs again.
    Migrate {
        task: usize,
        same_host: bool,
        notify_peer_first: bool,
    },
    /// Both tasks migrate at the same time; the task `first` runs again first.
    MigrateBoth {
        first_to_resume: usize,
        same_host: bool,
    },
    BreakDirectConnections,
}

fn any_change() -> impl Strategy<Value = RouteChange> {
    let who = 0..2usize;
    prop_oneof![
        4 => who.clone().prop_map(RouteChange::RequestRoute),
        1 => (who.clone(), any::<bool>()).prop_map(|(who, willing)| RouteChange::SetAccepts(who, willing)),
        4 => (who.clone(), any::<bool>(), any::<bool>()).prop_map(|(who, near, early)| RouteChange::Migrate { task: who, same_host: near, notify_peer_first: early }),
        1 => (who, any::<bool>()).prop_map(|(first, near)| RouteChange::MigrateBoth { first_to_resume: first, same_host: near }),
        2 => Just(RouteChange::BreakDirectConnections),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RouteKind {
    Daemon,
    Ring,
    Direct,
}

fn current_route(task: &Runtime, peer: Tid) -> RouteKind {
    let look = |core: &crate::runtime::Core| match () {
        () if core.shm.has_ring(peer) => RouteKind::Ring,
        () if core.direct.has_route(peer) => RouteKind::Direct,
        () => RouteKind::Daemon,
    };
    task.with_core(look).expect("not forked")
}

/// Proxies in the direct connections of a fake daemon's tasks. A proxy can break its connection.
#[derive(Clone, Default)]
struct Proxies(Arc<Mutex<Vec<TcpStream>>>);

impl Proxies {
    fn insert(fake: &FakeDaemon) -> Proxies {
        let lines = Proxies::default();
        let own = lines.clone();
        fake.state().address_rewrite = Some(Box::new(move |offered| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let address = listener.local_addr().expect("it has one");
            let lines = own.clone();
            thread::spawn(move || lines.run(&listener, offered));
            address
        }));
        lines
    }

    /// Runs the proxy of one connection. Either task may have closed its end before.
    fn run(&self, listener: &TcpListener, offered: SocketAddr) {
        let Ok((dialled, _)) = listener.accept() else {
            return;
        };
        let Ok(offering) = TcpStream::connect(offered) else {
            return;
        };
        let ends = [dialled, offering];
        let twins = || {
            ends.each_ref()
                .map(|end| end.try_clone().expect("a descriptor"))
        };
        self.0
            .lock()
            .expect("no panic under the lock")
            .extend(twins());
        for ([mut from, _], [_, mut to]) in
            [(twins(), twins()), (reversed(twins()), reversed(twins()))]
        {
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }

    fn break_all(&self) {
        for end in self.0.lock().expect("no panic under the lock").drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn reversed([a, b]: [TcpStream; 2]) -> [TcpStream; 2] {
    [b, a]
}

/// Two communicating tasks with their daemon.
struct Exchange {
    fake: FakeDaemon,
    tasks: [Runtime; 2],
    proxies: Proxies,
    /// Number of messages that each task has received.
    received_counts: [AtomicU32; 2],
    stop_requested: AtomicBool,
    migrations: AtomicU32,
}

/// Returns the content of a message: its number, and bytes derived from it.
fn numbered_body(number: u32) -> Vec<u8> {
    let len = match number % 64 {
        63 => LARGE_BYTES,
        n if n % 3 == 0 => 4 + (number as usize * 7919) % 200_000,
        _ => 4 + number as usize % 200,
    };
    let mut body = vec![number as u8; len];
    body[..4].copy_from_slice(&number.to_le_bytes());
    body
}

impl Exchange {
    fn new(near: bool) -> Exchange {
        let fake = FakeDaemon::start();
        fake.state().same_host = near;
        let (tasks, lines) = ([fake.enroll(), fake.enroll()], Proxies::insert(&fake));
        let (taken, enough, moves) = (
            Default::default(),
            AtomicBool::new(false),
            AtomicU32::new(0),
        );
        Exchange {
            fake,
            tasks,
            proxies: lines,
            received_counts: taken,
            stop_requested: enough,
            migrations: moves,
        }
    }

    fn tid(&self, who: usize) -> Tid {
        self.tasks[who].tid()
    }

    /// Sends numbered messages until the test is stopped; small messages are sent inline if
    /// possible, as programs do.
    fn send(&self, who: usize) {
        let (task, to) = (&self.tasks[who], self.tid(1 - who));
        let send = |tag: i32, body: Vec<u8>| {
            let small = body.len() <= INLINE_BODY_BYTES_MAX;
            if !(small
                && task.try_send_inline(
                    to,
                    encode_message_head(CTX_BASE, tag, 0, ENC_XDR),
                    &body,
                    false,
                ))
            {
                task.send(message(to, tag, body)).expect("sent");
            }
        };
        let mut number = 0;
        while !self.stop_requested.load(Ordering::Relaxed) {
            if number - self.received_counts[1 - who].load(Ordering::Relaxed)
                < UNRECEIVED_MESSAGES_MAX
            {
                send(TAG_NUMBER, numbered_body(number));
                number += 1;
            } else {
                thread::yield_now();
            }
        }
        send(TAG_END, number.to_le_bytes().to_vec());
    }

    /// Receives messages up to the end message, and checks the number and content of each message.
    fn receive(&self, who: usize) {
        let (task, from) = (&self.tasks[who], self.tid(1 - who));
        for number in 0u32.. {
            let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m: &Message| m.src == from);
            let got = task
                .wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), wanted)
                .expect("connected");
            let got = got.unwrap_or_else(|| {
                panic!(
                    "message {number} did not come; {:?}",
                    current_route(task, from)
                )
            });
            if got.tag == TAG_END {
                assert_eq!(got.body[..], number.to_le_bytes(), "as many as were sent");
                return;
            }
            assert_eq!(got.body[..4], number.to_le_bytes(), "once, and in order");
            assert!(got.body[..] == numbered_body(number), "whole");
            self.received_counts[who].store(number + 1, Ordering::Relaxed);
        }
    }

    /// Waits until `count` more messages have been received in each direction.
    fn wait_for_messages(&self, count: u32) {
        let all = || {
            self.received_counts
                .each_ref()
                .map(|taken| taken.load(Ordering::Relaxed))
        };
        let from = all();
        wait_until("messages", || {
            all()
                .iter()
                .zip(from)
                .all(|(now, from)| *now >= from + count)
                .then_some(())
        });
    }

    fn quiesce(&self, who: usize) -> u64 {
        let migration = u64::from(self.migrations.fetch_add(1, Ordering::Relaxed)) + 1;
        self.fake.quiesce(self.tid(who), migration);
        migration
    }

    fn resume(&self, who: usize, migration: u64) {
        self.fake.resume(migration);
        wait_until("the return", || self.tasks[who].socket_fd());
    }

    fn notify_peer(&self, who: usize) {
        self.fake.send_control(
            self.tid(1 - who),
            ToTask::PeerMigrated { tid: self.tid(who) },
        );
    }

    fn apply(&self, change: RouteChange) {
        match change {
            RouteChange::RequestRoute(who) => self.tasks[who].open_route(self.tid(1 - who)),
            RouteChange::SetAccepts(who, willing) => self.tasks[who].set_accepts_routes(willing),
            RouteChange::Migrate {
                task: who,
                same_host,
                notify_peer_first: early,
            } => {
                let migration = self.quiesce(who);
                self.fake.wait_quiesced(self.tid(who), migration);
                self.fake.state().same_host = same_host;
                if early {
                    self.notify_peer(who);
                }
                self.resume(who, migration);
                if !early {
                    self.notify_peer(who);
                }
            }
            RouteChange::MigrateBoth {
                first_to_resume: first,
                same_host,
            } => {
                let migrations = [0, 1].map(|who| self.quiesce(who));
                (0..2).for_each(|who| self.fake.wait_quiesced(self.tid(who), migrations[who]));
                self.fake.state().same_host = same_host;
                for who in [first, 1 - first] {
                    self.notify_peer(who);
                    self.resume(who, migrations[who]);
                }
            }
            RouteChange::BreakDirectConnections => self.proxies.break_all(),
        }
    }
}

/// Runs a script; returns the route before each change and after the last change.
fn run_script(same_host: bool, script: &[(u32, RouteChange)]) -> Vec<RouteKind> {
    let talk = Exchange::new(same_host);
    let mut ways = Vec::new();
    thread::scope(|scope| {
        for who in 0..2 {
            scope.spawn({
                let talk = &talk;
                move || talk.send(who)
            });
            scope.spawn({
                let talk = &talk;
                move || talk.receive(who)
            });
        }
        for (messages, change) in script {
            talk.wait_for_messages(*messages);
            ways.push(current_route(&talk.tasks[0], talk.tid(1)));
            talk.apply(*change);
        }
        talk.wait_for_messages(MESSAGES_BETWEEN_CHANGES.end);
        ways.push(current_route(&talk.tasks[0], talk.tid(1)));
        talk.stop_requested.store(true, Ordering::Relaxed);
    });
    for (who, task) in talk.tasks.iter().enumerate() {
        let left = task.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|m| (m.src, m.tag)));
        assert_eq!(left, None, "something came twice to {who}");
    }
    ways
}

/// Whatever routes two tasks use and however they change, no message is lost, duplicated, damaged
/// or reordered.
#[test]
fn route_changes_preserve_messages() {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(SCRIPT_COUNT);
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 20,
        ..Config::default()
    };
    let script = (
        any::<bool>(),
        prop::collection::vec((MESSAGES_BETWEEN_CHANGES, any_change()), 1..=CHANGES_MAX),
    );
    let seen = RefCell::new(Vec::new());
    let result = TestRunner::new(config).run(&script, |(near, script)| -> TestCaseResult {
        let ways = run_script(near, &script);
        seen.borrow_mut().push(ways);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    // The test proves nothing unless every route was used and routes changed.
    let seen = seen.into_inner();
    for wanted in [RouteKind::Daemon, RouteKind::Ring, RouteKind::Direct] {
        assert!(
            seen.iter().flatten().any(|way| *way == wanted),
            "no {wanted:?}: {seen:?}"
        );
    }
    for (from, to) in [
        (RouteKind::Ring, RouteKind::Daemon),
        (RouteKind::Daemon, RouteKind::Ring),
        (RouteKind::Daemon, RouteKind::Direct),
    ] {
        let changed = seen
            .iter()
            .flat_map(|ways| ways.windows(2))
            .any(|pair| pair == [from, to]);
        assert!(changed, "never from {from:?} to {to:?}: {seen:?}");
    }
}
