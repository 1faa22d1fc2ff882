//! Property test: the route between two communicating tasks changes at random between daemon, ring
//! and direct connection, which the programs or their libraries request, with migrations and broken
//! connections. No message may be lost,
//! duplicated, damaged or reordered.

use super::fake::FakeDaemon;
use super::{TEST_TIMEOUT, wait_until, xdr_message};
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
const SCRIPT_COUNT_DEFAULT: u32 = 24;
/// Maximum number of changes in one script.
const CHANGES_MAX: usize = 8;
/// Range of the number of messages in each direction between two changes.
const MESSAGE_COUNTS_BETWEEN_CHANGES: std::ops::Range<u32> = 0..120;
/// Maximum number of messages that one task has sent and the other task has not received.
const UNRECEIVED_MESSAGES_MAX: u32 = 150;
const LARGE_BODY_BYTES: usize = 3 << 20;
const NUMBER_TAG: i32 = 1;
const END_TAG: i32 = 2;

/// Change of the route between the two tasks, which have the numbers 0 and 1.
#[derive(Clone, Copy, Debug)]
enum RouteChange {
    RequestRoute(usize),
    /// The task starts accepting direct routes (true) or refusing them (false).
    SetAcceptsRoutes(usize, bool),
    /// The task migrates. Afterwards both tasks are on the same host if `same_host` is true. If
    /// `notify_peer_first` is true, the peer is notified before the task runs again, otherwise
    /// after the task runs again.
    Migrate {
        task_index: usize,
        same_host: bool,
        notify_peer_first: bool,
    },
    /// Both tasks migrate at the same time. The task with the index `first_to_resume` is the first
    /// to run again.
    MigrateBoth {
        first_to_resume: usize,
        same_host: bool,
    },
    BreakDirectConnections,
}

fn route_change_strategy() -> impl Strategy<Value = RouteChange> {
    let task_index = 0..2usize;
    prop_oneof![
        4 => task_index.clone().prop_map(RouteChange::RequestRoute),
        1 => (task_index.clone(), any::<bool>()).prop_map(|(task_index, accepts)| RouteChange::SetAcceptsRoutes(task_index, accepts)),
        4 => (task_index.clone(), any::<bool>(), any::<bool>()).prop_map(|(task_index, same_host, notifies_first)| RouteChange::Migrate { task_index, same_host, notify_peer_first: notifies_first }),
        1 => (task_index, any::<bool>()).prop_map(|(first_index, same_host)| RouteChange::MigrateBoth { first_to_resume: first_index, same_host }),
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
    let route_of = |core: &crate::runtime::Core| match () {
        () if core.shm_routes.has_ring(peer) => RouteKind::Ring,
        () if core.direct_routes.has_route(peer) => RouteKind::Direct,
        () => RouteKind::Daemon,
    };
    task.with_core(route_of).expect("not forked")
}

/// Proxies in the direct connections of a fake daemon's tasks. A proxy can break its connection.
#[derive(Clone, Default)]
struct Proxies(Arc<Mutex<Vec<TcpStream>>>);

impl Proxies {
    fn insert_proxies(fake: &FakeDaemon) -> Self {
        let proxies = Self::default();
        let shared_proxies = proxies.clone();
        fake.state().address_rewrite = Some(Box::new(move |offered_address| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let address = listener.local_addr().expect("it has one");
            let proxies = shared_proxies.clone();
            thread::spawn(move || proxies.forward_one_connection(&listener, offered_address));
            address
        }));
        proxies
    }

    /// Runs the proxy of one connection. Returns early if a task has already closed its side of the
    /// connection.
    fn forward_one_connection(&self, listener: &TcpListener, offered_address: SocketAddr) {
        let Ok((dialer_socket, _)) = listener.accept() else {
            return;
        };
        let Ok(acceptor_socket) = TcpStream::connect(offered_address) else {
            return;
        };
        let sockets = [dialer_socket, acceptor_socket];
        let clone_sockets = || {
            sockets
                .each_ref()
                .map(|socket| socket.try_clone().expect("a descriptor"))
        };
        self.0
            .lock()
            .expect("no panic under the lock")
            .extend(clone_sockets());
        for ([mut source, _], [_, mut sink]) in [
            (clone_sockets(), clone_sockets()),
            (reverse_pair(clone_sockets()), reverse_pair(clone_sockets())),
        ] {
            thread::spawn(move || {
                let _ = std::io::copy(&mut source, &mut sink);
                let _ = sink.shutdown(Shutdown::Both);
            });
        }
    }

    fn break_all(&self) {
        for socket in self.0.lock().expect("no panic under the lock").drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn reverse_pair([a, b]: [TcpStream; 2]) -> [TcpStream; 2] {
    [b, a]
}

/// Two communicating tasks with their fake daemon.
struct Exchange {
    fake: FakeDaemon,
    tasks: [Runtime; 2],
    proxies: Proxies,
    /// Number of messages that each task has received.
    received_counts: [AtomicU32; 2],
    is_stop_requested: AtomicBool,
    migration_count: AtomicU32,
}

/// Returns the body of a message: its number, followed by bytes derived from the number.
fn numbered_body(number: u32) -> Vec<u8> {
    let len = match number % 64 {
        63 => LARGE_BODY_BYTES,
        n if n % 3 == 0 => 4 + (number as usize * 7919) % 200_000,
        _ => 4 + number as usize % 200,
    };
    let mut body = vec![number as u8; len];
    body[..4].copy_from_slice(&number.to_le_bytes());
    body
}

impl Exchange {
    fn new(is_same_host: bool, automatic_routes: [bool; 2]) -> Self {
        let fake = FakeDaemon::start();
        fake.state().is_same_host = is_same_host;
        let enroll = |is_automatic| {
            if is_automatic {
                fake.enroll_with_automatic_routes()
            } else {
                fake.enroll()
            }
        };
        let (tasks, inserted_proxies) =
            (automatic_routes.map(enroll), Proxies::insert_proxies(&fake));
        let (counts, stop_flag, migration_counter) = (
            Default::default(),
            AtomicBool::new(false),
            AtomicU32::new(0),
        );
        Self {
            fake,
            tasks,
            proxies: inserted_proxies,
            received_counts: counts,
            is_stop_requested: stop_flag,
            migration_count: migration_counter,
        }
    }

    fn tid(&self, task_index: usize) -> Tid {
        self.tasks[task_index].tid()
    }

    /// Sends numbered messages until the test requests a stop. As in programs, small messages are
    /// sent inline if possible.
    fn send_until_stopped(&self, task_index: usize) {
        let (task, receiver) = (&self.tasks[task_index], self.tid(1 - task_index));
        let send_body = |tag: i32, body: Vec<u8>| {
            let is_small = body.len() <= INLINE_BODY_BYTES_MAX;
            if !(is_small
                && task.try_send_inline(
                    receiver,
                    encode_message_head(CTX_BASE, tag, 0, ENC_XDR),
                    &body,
                    false,
                ))
            {
                task.send(xdr_message(receiver, tag, body)).expect("sent");
            }
        };
        let mut number = 0;
        while !self.is_stop_requested.load(Ordering::Relaxed) {
            if number - self.received_counts[1 - task_index].load(Ordering::Relaxed)
                < UNRECEIVED_MESSAGES_MAX
            {
                send_body(NUMBER_TAG, numbered_body(number));
                number += 1;
            } else {
                thread::yield_now();
            }
        }
        send_body(END_TAG, number.to_le_bytes().to_vec());
    }

    /// Receives messages until the end message, and checks the number and body of each message.
    fn receive_until_end(&self, task_index: usize) {
        let (task, sender) = (&self.tasks[task_index], self.tid(1 - task_index));
        for number in 0u32.. {
            let take_from_sender =
                &mut |inbox: &mut Inbox| inbox.take_first(|m: &Message| m.src == sender);
            let message = task
                .wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), take_from_sender)
                .expect("connected");
            let message = message.unwrap_or_else(|| {
                panic!(
                    "message {number} did not come; {:?}",
                    current_route(task, sender)
                )
            });
            if message.tag == END_TAG {
                assert_eq!(
                    message.body[..],
                    number.to_le_bytes(),
                    "as many as were sent"
                );
                return;
            }
            assert_eq!(
                message.body[..4],
                number.to_le_bytes(),
                "once, and in order"
            );
            assert!(message.body[..] == numbered_body(number), "whole");
            self.received_counts[task_index].store(number + 1, Ordering::Relaxed);
        }
    }

    /// Waits until `message_count` more messages have been received in each direction.
    fn wait_for_messages(&self, message_count: u32) {
        let current_counts = || {
            self.received_counts
                .each_ref()
                .map(|received_count| received_count.load(Ordering::Relaxed))
        };
        let start_counts = current_counts();
        wait_until("messages", || {
            current_counts()
                .iter()
                .zip(start_counts)
                .all(|(current_count, start_counts)| *current_count >= start_counts + message_count)
                .then_some(())
        });
    }

    fn quiesce(&self, task_index: usize) -> u64 {
        let migration = u64::from(self.migration_count.fetch_add(1, Ordering::Relaxed)) + 1;
        self.fake.send_quiesce(self.tid(task_index), migration);
        migration
    }

    fn resume(&self, task_index: usize, migration: u64) {
        self.fake.write_resume_token(migration);
        wait_until("the return", || self.tasks[task_index].socket_fd());
    }

    fn notify_peer(&self, task_index: usize) {
        self.fake.send_control(
            self.tid(1 - task_index),
            ToTask::PeerMigrated {
                tid: self.tid(task_index),
            },
        );
    }

    fn apply_change(&self, change: RouteChange) {
        match change {
            RouteChange::RequestRoute(task_index) => {
                self.tasks[task_index].open_route_and_wait(self.tid(1 - task_index))
            }
            RouteChange::SetAcceptsRoutes(task_index, accepts_routes) => {
                self.tasks[task_index].set_accepts_routes(accepts_routes)
            }
            RouteChange::Migrate {
                task_index,
                same_host,
                notify_peer_first: notifies_first,
            } => {
                let migration = self.quiesce(task_index);
                self.fake
                    .wait_until_quiesced(self.tid(task_index), migration);
                self.fake.state().is_same_host = same_host;
                if notifies_first {
                    self.notify_peer(task_index);
                }
                self.resume(task_index, migration);
                if !notifies_first {
                    self.notify_peer(task_index);
                }
            }
            RouteChange::MigrateBoth {
                first_to_resume: first_index,
                same_host,
            } => {
                let migrations = [0, 1].map(|task_index| self.quiesce(task_index));
                (0..2).for_each(|task_index| {
                    self.fake
                        .wait_until_quiesced(self.tid(task_index), migrations[task_index])
                });
                self.fake.state().is_same_host = same_host;
                for task_index in [first_index, 1 - first_index] {
                    self.notify_peer(task_index);
                    self.resume(task_index, migrations[task_index]);
                }
            }
            RouteChange::BreakDirectConnections => self.proxies.break_all(),
        }
    }
}

/// Runs a script. Returns the route before each change and after the last change.
fn run_script(
    same_host: bool,
    automatic_routes: [bool; 2],
    script: &[(u32, RouteChange)],
) -> Vec<RouteKind> {
    let exchange = Exchange::new(same_host, automatic_routes);
    let mut routes = Vec::new();
    thread::scope(|scope| {
        for task_index in 0..2 {
            scope.spawn({
                let exchange = &exchange;
                move || exchange.send_until_stopped(task_index)
            });
            scope.spawn({
                let exchange = &exchange;
                move || exchange.receive_until_end(task_index)
            });
        }
        for (message_count, change) in script {
            exchange.wait_for_messages(*message_count);
            routes.push(current_route(&exchange.tasks[0], exchange.tid(1)));
            exchange.apply_change(*change);
        }
        exchange.wait_for_messages(MESSAGE_COUNTS_BETWEEN_CHANGES.end);
        routes.push(current_route(&exchange.tasks[0], exchange.tid(1)));
        exchange.is_stop_requested.store(true, Ordering::Relaxed);
    });
    for (task_index, task) in exchange.tasks.iter().enumerate() {
        let extra_message =
            task.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|m| (m.src, m.tag)));
        assert_eq!(extra_message, None, "something came twice to {task_index}");
    }
    routes
}

/// Two tasks lose, duplicate, damage and reorder no message on any route, also while the routes
/// change.
#[test]
fn route_changes_preserve_messages() {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(SCRIPT_COUNT_DEFAULT);
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 20,
        ..Config::default()
    };
    let script = (
        any::<bool>(),
        any::<[bool; 2]>(),
        prop::collection::vec(
            (MESSAGE_COUNTS_BETWEEN_CHANGES, route_change_strategy()),
            1..=CHANGES_MAX,
        ),
    );
    let routes_of_scripts = RefCell::new(Vec::new());
    let test_result = TestRunner::new(config).run(
        &script,
        |(is_same_host, automatic, script)| -> TestCaseResult {
            let routes = run_script(is_same_host, automatic, &script);
            routes_of_scripts.borrow_mut().push(routes);
            Ok(())
        },
    );
    test_result.unwrap_or_else(|error| panic!("{error}"));
    // The test is meaningful only if every route was used and the routes changed.
    let routes_of_scripts = routes_of_scripts.into_inner();
    for expected_route in [RouteKind::Daemon, RouteKind::Ring, RouteKind::Direct] {
        assert!(
            routes_of_scripts
                .iter()
                .flatten()
                .any(|route| *route == expected_route),
            "no {expected_route:?}: {routes_of_scripts:?}"
        );
    }
    for (old_route, new_route) in [
        (RouteKind::Ring, RouteKind::Daemon),
        (RouteKind::Daemon, RouteKind::Ring),
        (RouteKind::Daemon, RouteKind::Direct),
    ] {
        let has_changed = routes_of_scripts
            .iter()
            .flat_map(|routes| routes.windows(2))
            .any(|pair| pair == [old_route, new_route]);
        assert!(
            has_changed,
            "never from {old_route:?} to {new_route:?}: {routes_of_scripts:?}"
        );
    }
}
