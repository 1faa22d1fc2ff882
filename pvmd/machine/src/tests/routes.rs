//! Messages by which tasks set up direct routes and rings, and notifications about the ends of
//! these routes.

use super::sim::{Sim, host, seeds};
use crate::Event;
use crate::io::Descriptors;
use crate::ring_peers::RING_PEERS_MAX;
use sempa_proto::route::{OFFER_ADDRESSES_MAX, OfferId, RouteMsg};
use sempa_proto::task::{Reply, Request, SpawnRequest, ToTask};
use sempa_proto::{Micros, Tid};
use std::fs::File;

/// Sends a route message of a connected process, with the number of descriptors that the message
/// announces.
fn send_route_message(sim: &mut Sim, proc: usize, receiver_tid: Tid, message: RouteMsg) {
    let Some(conn) = sim.procs[proc].conn else {
        return;
    };
    let open_null = || File::open("/dev/null").expect("there is one").into();
    let descriptors = Descriptors::new((0..message.fd_count()).map(|_| open_null()).collect());
    let host_id = sim.procs[proc].host;
    sim.send_from_proc(
        conn,
        host_id,
        Event::TaskRoute {
            conn,
            dst: receiver_tid,
            message,
            descriptors,
        },
    );
}

fn ring_offer(id: u64) -> RouteMsg {
    RouteMsg::RingOffer {
        id: OfferId(id),
        slot: 1,
    }
}

fn ring_accept(id: u64) -> RouteMsg {
    RouteMsg::RingAccept {
        id: OfferId(id),
        slot: 2,
    }
}

fn direct_offer(id: u64) -> RouteMsg {
    RouteMsg::DirectOffer {
        id: OfferId(id),
        addresses: vec![],
        fingerprint: [7; 32],
        incarnation: 0,
        is_automatic: false,
    }
}

fn route_message(sender: Tid, is_same_host: bool, message: RouteMsg) -> ToTask {
    ToTask::Route {
        sender,
        same_host: is_same_host,
        message,
    }
}

/// Waits until the process has received at least `count` messages of its daemon. Returns all
/// messages received.
fn await_messages(sim: &mut Sim, proc: usize, count: usize) -> Vec<ToTask> {
    sim.run_until("words", |s| s.procs[proc].daemon_messages.len() >= count);
    sim.procs[proc].daemon_messages.clone()
}

/// Spawns one child on each host in `host_names`. Returns the simulation, the console, and the
/// processes and tids of the children, which are all connected.
fn spawn_tasks(seed: u64, hosts: usize, host_names: &[&str]) -> (Sim, usize, Vec<usize>, Vec<Tid>) {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let mut tids = Vec::new();
    for host_name in host_names {
        let request = SpawnRequest {
            program: "child".into(),
            task_count: 1,
            flags: 1,
            where_arg: (*host_name).into(),
            ..SpawnRequest::default()
        };
        let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
            panic!("no tasks")
        };
        tids.extend(results.into_iter().flatten());
    }
    sim.run_until("all are there", |s| {
        tids.iter()
            .all(|t| s.procs[s.proc_of(*t)].welcome.is_some())
    });
    let procs = tids.iter().map(|t| sim.proc_of(*t)).collect();
    (sim, console, procs, tids)
}

/// Makes two tasks share rings by an offer and its acceptance.
fn share_rings(sim: &mut Sim, (a, b): (usize, usize), id: u64) {
    let (a_tid, b_tid) = (sim.procs[a].tid(), sim.procs[b].tid());
    let (a_message_count, b_message_count) = (
        sim.procs[a].daemon_messages.len(),
        sim.procs[b].daemon_messages.len(),
    );
    send_route_message(sim, a, b_tid, ring_offer(id));
    assert_eq!(
        await_messages(sim, b, b_message_count + 1)[b_message_count],
        route_message(a_tid, true, ring_offer(id))
    );
    send_route_message(sim, b, a_tid, ring_accept(id));
    assert_eq!(
        await_messages(sim, a, a_message_count + 1)[a_message_count],
        route_message(b_tid, true, ring_accept(id))
    );
}

fn migrate_request(tid: Tid, target_name: &str) -> Request {
    Request::Migrate {
        tid,
        target: target_name.into(),
        cause: None,
        wait_for_end: true,
    }
}

/// A ring offer is delivered to a task on the same host. An offer to a task on another host is
/// refused.
#[test]
fn ring_offer_is_refused_across_hosts() {
    let (mut sim, _, procs, tids) = spawn_tasks(1, 2, &["h1", "h1", "h2"]);
    share_rings(&mut sim, (procs[0], procs[1]), 1);
    send_route_message(&mut sim, procs[0], tids[2], ring_offer(2));
    let expected_refusal = route_message(tids[2], false, RouteMsg::RingRefuse { id: OfferId(2) });
    assert_eq!(await_messages(&mut sim, procs[0], 2)[1], expected_refusal);
    // Offers to the sender itself and to a tid without a task are refused.
    send_route_message(&mut sim, procs[0], tids[0], ring_offer(3));
    send_route_message(&mut sim, procs[0], Tid::from_raw(0x4_7777), ring_offer(4));
    let ids = [3, 4].map(|id| RouteMsg::RingRefuse { id: OfferId(id) });
    let expected_refusal = [
        route_message(tids[0], true, ids[0].clone()),
        route_message(Tid::from_raw(0x4_7777), false, ids[1].clone()),
    ];
    assert_eq!(await_messages(&mut sim, procs[0], 4)[2..], expected_refusal);
    assert_eq!(sim.procs[procs[2]].daemon_messages, []);
}

/// A ring offer to a task that migrates to this host is refused as if the task were already on this
/// host.
#[test]
fn ring_offer_to_arriving_task_is_refused_locally() {
    let (mut sim, console, procs, tids) = spawn_tasks(5, 2, &["h1", "h2"]);
    // The message makes the daemon of the sender notify the sender of the migration.
    sim.send_message(procs[0], tids[1], b"hello");
    sim.request(console, migrate_request(tids[1], "h1"));
    let migration_message = ToTask::PeerMigrated { tid: tids[1] };
    sim.run_until("it moves here", |s| {
        s.procs[procs[0]]
            .daemon_messages
            .contains(&migration_message)
    });
    send_route_message(&mut sim, procs[0], tids[1], ring_offer(1));
    let refusal = |is_same_host| {
        route_message(
            tids[1],
            is_same_host,
            RouteMsg::RingRefuse { id: OfferId(1) },
        )
    };
    let answers = [true, false].map(refusal);
    sim.run_until("an answer", |s| {
        s.procs[procs[0]]
            .daemon_messages
            .iter()
            .any(|message| answers.contains(message))
    });
    assert!(sim.procs[procs[0]].daemon_messages.contains(&answers[0]));
}

/// A route message without descriptors is delivered on any host. The message states whether its
/// sender is on the same host.
#[test]
fn route_messages_reach_any_host() {
    let (mut sim, console, procs, tids) = spawn_tasks(2, 3, &["h1", "h1", "h2"]);
    send_route_message(&mut sim, procs[0], tids[1], direct_offer(1));
    send_route_message(&mut sim, procs[0], tids[2], direct_offer(2));
    assert_eq!(
        await_messages(&mut sim, procs[1], 1),
        [route_message(tids[0], true, direct_offer(1))]
    );
    assert_eq!(
        await_messages(&mut sim, procs[2], 1),
        [route_message(tids[0], false, direct_offer(2))]
    );
    let migration_reply = sim.ask(console, migrate_request(tids[2], "h3"));
    assert!(
        matches!(migration_reply, Reply::Migrated(Ok(_))),
        "{migration_reply:?}"
    );
    send_route_message(
        &mut sim,
        procs[1],
        tids[2],
        RouteMsg::DirectRefuse { id: OfferId(9) },
    );
    let expected_message = route_message(tids[1], false, RouteMsg::DirectRefuse { id: OfferId(9) });
    sim.run_until("the word at its new place", |s| {
        s.procs[s.proc_of(tids[2])]
            .daemon_messages
            .contains(&expected_message)
    });
}

/// The sender of a route message to an ended task is notified that the task has ended.
#[test]
fn route_message_to_dead_task_is_answered() {
    let (mut sim, _, procs, tids) = spawn_tasks(3, 2, &["h1", "h1", "h2"]);
    for index in [1, 2] {
        sim.exit_proc(procs[index], 0);
    }
    sim.advance(Micros::from_secs(5));
    for index in [1, 2] {
        send_route_message(&mut sim, procs[0], tids[index], direct_offer(1));
        assert_eq!(
            await_messages(&mut sim, procs[0], index)[index - 1],
            ToTask::PeerGone { tid: tids[index] }
        );
    }
}

/// When a task ends or migrates, its ring peers are notified once. Other tasks are not notified.
#[test]
fn only_ring_peers_are_notified_of_exit_or_migration() {
    for seed in seeds(20) {
        let (mut sim, console, procs, tids) = spawn_tasks(seed, 2, &["h1", "h1", "h1", "h1"]);
        share_rings(&mut sim, (procs[0], procs[1]), 1);
        share_rings(&mut sim, (procs[2], procs[0]), 2);
        let message_count = |s: &Sim, n: usize| s.procs[procs[n]].daemon_messages.len();
        let (peer_count, other_count) = (message_count(&sim, 1), message_count(&sim, 2));
        sim.exit_proc(procs[1], 0);
        let count_exit_messages = |s: &Sim| {
            s.procs[procs[0]]
                .daemon_messages
                .iter()
                .filter(|m| **m == ToTask::PeerGone { tid: tids[1] })
                .count()
        };
        sim.run_until("word of the end", |s| count_exit_messages(s) == 1);
        let migration_reply = sim.ask(console, migrate_request(tids[0], "h2"));
        assert!(
            matches!(migration_reply, Reply::Migrated(Ok(_))),
            "{migration_reply:?} (seed {seed})"
        );
        assert_eq!(
            await_messages(&mut sim, procs[2], other_count + 1)[other_count..],
            [ToTask::PeerMigrated { tid: tids[0] }],
            "seed {seed}"
        );
        sim.exit_proc(procs[2], 0);
        sim.advance(Micros::from_secs(5));
        assert_eq!(
            (
                count_exit_messages(&sim),
                message_count(&sim, 1),
                message_count(&sim, 3)
            ),
            (1, peer_count, 0),
            "seed {seed}"
        );
        assert!(
            sim.nodes.values().all(|n| n.machine.ring_peers.is_empty()),
            "seed {seed}"
        );
    }
}

/// A task accepts a ring offer of a task that has migrated since the offer. The accepting task is
/// notified of the migration, not of an end of the other task.
#[test]
fn failed_ring_acceptance_is_reported() {
    let (mut sim, console, procs, tids) = spawn_tasks(4, 2, &["h1", "h1"]);
    send_route_message(&mut sim, procs[0], tids[1], ring_offer(1));
    await_messages(&mut sim, procs[1], 1);
    let migration_reply = sim.ask(console, migrate_request(tids[0], "h2"));
    assert!(
        matches!(migration_reply, Reply::Migrated(Ok(_))),
        "{migration_reply:?}"
    );
    send_route_message(&mut sim, procs[1], tids[0], ring_accept(1));
    // After a notification of the peer's end, the library would drop the peer's later messages.
    assert_eq!(
        await_messages(&mut sim, procs[1], 2)[1],
        ToTask::PeerMigrated { tid: tids[0] }
    );
    assert!(sim.procs[sim.proc_of(tids[0])].daemon_messages.is_empty());
}

/// A task with an unanswered offer is notified when the receiver of the offer exits.
#[test]
fn unanswered_offer_is_reported_on_exit() {
    let (mut sim, _, procs, tids) = spawn_tasks(7, 2, &["h1", "h1", "h1", "h2"]);
    send_route_message(&mut sim, procs[1], tids[0], ring_offer(1));
    send_route_message(&mut sim, procs[2], tids[0], direct_offer(1));
    send_route_message(&mut sim, procs[3], tids[0], direct_offer(1));
    await_messages(&mut sim, procs[0], 3);
    // This offer is answered, so its sender needs no notification.
    send_route_message(
        &mut sim,
        procs[0],
        tids[2],
        RouteMsg::DirectRefuse { id: OfferId(1) },
    );
    await_messages(&mut sim, procs[2], 1);
    assert_eq!(
        sim.ask(procs[0], Request::Exit { watermarks: vec![] }),
        Reply::Done
    );
    for sender_index in [1, 3] {
        assert_eq!(
            await_messages(&mut sim, procs[sender_index], 1),
            [ToTask::PeerGone { tid: tids[0] }]
        );
    }
    sim.advance(Micros::from_secs(1));
    assert_eq!(sim.procs[procs[2]].daemon_messages.len(), 1);
    assert!(sim.nodes.values().all(|n| n.machine.ring_peers.is_empty()));
}

#[test]
fn offer_with_too_many_addresses_is_dropped() {
    let (mut sim, _, procs, tids) = spawn_tasks(5, 1, &["h1", "h1"]);
    let addresses = vec!["127.0.0.1:1".parse().expect("an address"); OFFER_ADDRESSES_MAX + 1];
    let offer = RouteMsg::DirectOffer {
        id: OfferId(1),
        addresses,
        fingerprint: [0; 32],
        incarnation: 0,
        is_automatic: false,
    };
    send_route_message(&mut sim, procs[0], tids[1], offer);
    send_route_message(&mut sim, procs[0], tids[1], direct_offer(2));
    assert_eq!(
        await_messages(&mut sim, procs[1], 1),
        [route_message(tids[0], true, direct_offer(2))]
    );
    assert!(
        sim.nodes[&host(1)]
            .log
            .iter()
            .any(|line| line.contains("17 addresses")),
        "{:?}",
        sim.nodes[&host(1)].log
    );
}

/// A new ring offer to a task with the maximum number of ring peers is refused.
#[test]
fn ring_peer_limit_refuses_new_offers() {
    let (mut sim, _, procs, tids) = spawn_tasks(6, 1, &["h1", "h1", "h1"]);
    share_rings(&mut sim, (procs[0], procs[1]), 1);
    let ring_peers = &mut sim
        .nodes
        .get_mut(&host(1))
        .expect("the master")
        .machine
        .ring_peers;
    (1..RING_PEERS_MAX as i32)
        .for_each(|n| ring_peers.add_pair(tids[0], Tid::from_raw(0x8_0000 + n)));
    send_route_message(&mut sim, procs[2], tids[0], ring_offer(2));
    assert_eq!(
        await_messages(&mut sim, procs[2], 1),
        [route_message(
            tids[0],
            true,
            RouteMsg::RingRefuse { id: OfferId(2) }
        )]
    );
    // Two tasks that already share rings may replace the rings.
    share_rings(&mut sim, (procs[0], procs[1]), 3);
}

/// Route messages between tasks that migrate at random arrive once and in order.
#[test]
fn route_messages_survive_random_migrations() {
    for seed in seeds(30) {
        let (mut sim, console, procs, tids) = spawn_tasks(seed, 3, &["h1", "h1", "h2", "h3"]);
        let (mut sent_count, mut open_requests) = (0, Vec::new());
        for round in 0..120u64 {
            let (from, to) = (sim.rng.below(4) as usize, sim.rng.below(4) as usize);
            // A quiesced library would send the message after it has resumed. The test does not
            // send it.
            let sender = &sim.procs[procs[from]];
            if from != to
                && sender.conn.is_some()
                && sender.welcome.is_some()
                && !sender.has_quiesced()
            {
                let uses_rings = sim.rng.below(3) == 0;
                send_route_message(
                    &mut sim,
                    procs[from],
                    tids[to],
                    if uses_rings {
                        ring_offer(round)
                    } else {
                        direct_offer(round)
                    },
                );
                sent_count += usize::from(!uses_rings);
            }
            if round % 12 == 0 {
                let (tid, to) = (tids[sim.rng.below(4) as usize], 1 + sim.rng.below(3));
                open_requests.push(sim.request(console, migrate_request(tid, &format!("h{to}"))));
            }
            let delay = Micros(sim.rng.below(10_000));
            sim.advance(delay);
        }
        sim.run_until("all moves", |s| {
            open_requests
                .iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        sim.advance(Micros::from_secs(5));
        let mut arrived_count = 0;
        for proc in &procs {
            let mut last_ids = [None; 4];
            for message in &sim.procs[*proc].daemon_messages {
                let ToTask::Route {
                    sender: from,
                    message: RouteMsg::DirectOffer { id, .. },
                    ..
                } = message
                else {
                    continue;
                };
                let from = tids.iter().position(|t| t == from).expect("one of them");
                assert!(
                    last_ids[from] < Some(*id),
                    "{id:?} after {:?} (seed {seed})",
                    last_ids[from]
                );
                last_ids[from] = Some(*id);
                arrived_count += 1;
            }
        }
        assert_eq!(arrived_count, sent_count, "seed {seed}");
    }
}
