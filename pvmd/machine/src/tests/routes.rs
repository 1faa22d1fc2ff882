//! Messages by which tasks set up direct routes, and notifications when such a route ends.

use super::sim::{Sim, host, seeds};
use crate::Event;
use crate::io::Descriptors;
use crate::ring_peers::RING_PEERS_MAX;
use sempa_proto::route::{OFFER_ADDRESSES_MAX, OfferId, RouteMsg};
use sempa_proto::task::{Reply, Request, SpawnRequest, ToTask};
use sempa_proto::{Micros, Tid};
use std::fs::File;

/// Sends a route message with the number of descriptors that it announces.
fn send_route_message(sim: &mut Sim, proc: usize, to: Tid, message: RouteMsg) {
    let Some(conn) = sim.procs[proc].conn else {
        return;
    };
    let null = || File::open("/dev/null").expect("there is one").into();
    let descriptors = Descriptors::new((0..message.fd_count()).map(|_| null()).collect());
    let on = sim.procs[proc].host;
    sim.send_from_proc(
        conn,
        on,
        Event::TaskRoute {
            conn,
            to,
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
    }
}

fn route_message(from: Tid, near: bool, word: RouteMsg) -> ToTask {
    ToTask::Route {
        from,
        same_host: near,
        message: word,
    }
}

/// Waits until the process has received `count` messages of its daemon. Returns all messages.
fn await_messages(sim: &mut Sim, proc: usize, count: usize) -> Vec<ToTask> {
    sim.run_until("words", |s| s.procs[proc].daemon_messages.len() >= count);
    sim.procs[proc].daemon_messages.clone()
}

/// Spawns a child on each of `places`. Returns the simulation, the console, and the processes and
/// tids of the children, which are all connected.
fn spawn_tasks(seed: u64, hosts: usize, places: &[&str]) -> (Sim, usize, Vec<usize>, Vec<Tid>) {
    let (mut sim, console) = Sim::cluster(seed, hosts);
    let mut tids = Vec::new();
    for place in places {
        let request = SpawnRequest {
            file: "child".into(),
            count: 1,
            flags: 1,
            place: (*place).into(),
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

/// Makes two tasks share rings.
fn pair_up(sim: &mut Sim, (a, b): (usize, usize), id: u64) {
    let (a_tid, b_tid) = (sim.procs[a].tid(), sim.procs[b].tid());
    let (a_told, b_told) = (
        sim.procs[a].daemon_messages.len(),
        sim.procs[b].daemon_messages.len(),
    );
    send_route_message(sim, a, b_tid, ring_offer(id));
    assert_eq!(
        await_messages(sim, b, b_told + 1)[b_told],
        route_message(a_tid, true, ring_offer(id))
    );
    send_route_message(sim, b, a_tid, ring_accept(id));
    assert_eq!(
        await_messages(sim, a, a_told + 1)[a_told],
        route_message(b_tid, true, ring_accept(id))
    );
}

fn migrate_request(tid: Tid, to: &str) -> Request {
    Request::Migrate {
        tid,
        to: to.into(),
        cause: None,
        wait: true,
    }
}

/// A ring offer reaches a task of the same host and is refused for a task on another host.
#[test]
fn ring_offer_is_refused_across_hosts() {
    let (mut sim, _, procs, tids) = spawn_tasks(1, 2, &["h1", "h1", "h2"]);
    pair_up(&mut sim, (procs[0], procs[1]), 1);
    send_route_message(&mut sim, procs[0], tids[2], ring_offer(2));
    let refused = route_message(tids[2], false, RouteMsg::RingRefuse { id: OfferId(2) });
    assert_eq!(await_messages(&mut sim, procs[0], 2)[1], refused);
    // To the task itself, and to a tid without a task.
    send_route_message(&mut sim, procs[0], tids[0], ring_offer(3));
    send_route_message(&mut sim, procs[0], Tid::from_raw(0x4_7777), ring_offer(4));
    let ids = [3, 4].map(|id| RouteMsg::RingRefuse { id: OfferId(id) });
    let refused = [
        route_message(tids[0], true, ids[0].clone()),
        route_message(Tid::from_raw(0x4_7777), false, ids[1].clone()),
    ];
    assert_eq!(await_messages(&mut sim, procs[0], 4)[2..], refused);
    assert_eq!(sim.procs[procs[2]].daemon_messages, []);
}

/// A ring offer to a task that is arriving is refused as if it already were a task of this host.
#[test]
fn ring_offer_to_arriving_task_is_refused_locally() {
    let (mut sim, console, procs, tids) = spawn_tasks(5, 2, &["h1", "h2"]);
    // The message makes the sender's daemon notify it of the migration.
    sim.send_message(procs[0], tids[1], b"hello");
    sim.request(console, migrate_request(tids[1], "h1"));
    let moved = ToTask::PeerMigrated { tid: tids[1] };
    sim.run_until("it moves here", |s| {
        s.procs[procs[0]].daemon_messages.contains(&moved)
    });
    send_route_message(&mut sim, procs[0], tids[1], ring_offer(1));
    let refused = |near| route_message(tids[1], near, RouteMsg::RingRefuse { id: OfferId(1) });
    let answers = [true, false].map(refused);
    sim.run_until("an answer", |s| {
        s.procs[procs[0]]
            .daemon_messages
            .iter()
            .any(|told| answers.contains(told))
    });
    assert!(sim.procs[procs[0]].daemon_messages.contains(&answers[0]));
}

/// Route messages without descriptors reach their task on any host and state whether the sender is
/// on the same host.
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
    let moved = sim.ask(console, migrate_request(tids[2], "h3"));
    assert!(matches!(moved, Reply::Migrated(Ok(_))), "{moved:?}");
    send_route_message(
        &mut sim,
        procs[1],
        tids[2],
        RouteMsg::DirectRefuse { id: OfferId(9) },
    );
    let refuse = route_message(tids[1], false, RouteMsg::DirectRefuse { id: OfferId(9) });
    sim.run_until("the word at its new place", |s| {
        s.procs[s.proc_of(tids[2])]
            .daemon_messages
            .contains(&refuse)
    });
}

/// A route message to a task that has ended is answered by a notification of its end.
#[test]
fn route_message_to_dead_task_is_answered() {
    let (mut sim, _, procs, tids) = spawn_tasks(3, 2, &["h1", "h1", "h2"]);
    for gone in [1, 2] {
        sim.exit(procs[gone], 0);
    }
    sim.advance(Micros::from_secs(5));
    for gone in [1, 2] {
        send_route_message(&mut sim, procs[0], tids[gone], direct_offer(1));
        assert_eq!(
            await_messages(&mut sim, procs[0], gone)[gone - 1],
            ToTask::PeerGone { tid: tids[gone] }
        );
    }
}

/// The ring peers of a task that ends or migrates are notified once, and other tasks are not.
#[test]
fn only_ring_peers_are_notified_of_exit_or_migration() {
    for seed in seeds(20) {
        let (mut sim, console, procs, tids) = spawn_tasks(seed, 2, &["h1", "h1", "h1", "h1"]);
        pair_up(&mut sim, (procs[0], procs[1]), 1);
        pair_up(&mut sim, (procs[2], procs[0]), 2);
        let before = |s: &Sim, n: usize| s.procs[procs[n]].daemon_messages.len();
        let (one, two) = (before(&sim, 1), before(&sim, 2));
        sim.exit(procs[1], 0);
        let gone = |s: &Sim| {
            s.procs[procs[0]]
                .daemon_messages
                .iter()
                .filter(|m| **m == ToTask::PeerGone { tid: tids[1] })
                .count()
        };
        sim.run_until("word of the end", |s| gone(s) == 1);
        let moved = sim.ask(console, migrate_request(tids[0], "h2"));
        assert!(
            matches!(moved, Reply::Migrated(Ok(_))),
            "{moved:?} (seed {seed})"
        );
        assert_eq!(
            await_messages(&mut sim, procs[2], two + 1)[two..],
            [ToTask::PeerMigrated { tid: tids[0] }],
            "seed {seed}"
        );
        sim.exit(procs[2], 0);
        sim.advance(Micros::from_secs(5));
        assert_eq!(
            (gone(&sim), before(&sim, 1), before(&sim, 3)),
            (1, one, 0),
            "seed {seed}"
        );
        assert!(
            sim.nodes.values().all(|n| n.machine.ring_peers.is_empty()),
            "seed {seed}"
        );
    }
}

/// A task that accepts a ring offer is notified of the migration if the offering task has migrated
/// since the offer; it is not notified of an end.
#[test]
fn failed_ring_acceptance_is_reported() {
    let (mut sim, console, procs, tids) = spawn_tasks(4, 2, &["h1", "h1"]);
    send_route_message(&mut sim, procs[0], tids[1], ring_offer(1));
    await_messages(&mut sim, procs[1], 1);
    let moved = sim.ask(console, migrate_request(tids[0], "h2"));
    assert!(matches!(moved, Reply::Migrated(Ok(_))), "{moved:?}");
    send_route_message(&mut sim, procs[1], tids[0], ring_accept(1));
    // A notification that the peer has ended would make the library drop its later messages.
    assert_eq!(
        await_messages(&mut sim, procs[1], 2)[1],
        ToTask::PeerMigrated { tid: tids[0] }
    );
    assert!(sim.procs[sim.proc_of(tids[0])].daemon_messages.is_empty());
}

/// A task whose offer is unanswered is notified when the receiver exits.
#[test]
fn unanswered_offer_is_reported_on_exit() {
    let (mut sim, _, procs, tids) = spawn_tasks(7, 2, &["h1", "h1", "h1", "h2"]);
    send_route_message(&mut sim, procs[1], tids[0], ring_offer(1));
    send_route_message(&mut sim, procs[2], tids[0], direct_offer(1));
    send_route_message(&mut sim, procs[3], tids[0], direct_offer(1));
    await_messages(&mut sim, procs[0], 3);
    // One of the offers is answered, so its sender needs no notification.
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
    for waits in [1, 3] {
        assert_eq!(
            await_messages(&mut sim, procs[waits], 1),
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

/// A task with the maximum number of ring peers gets no new ring offers.
#[test]
fn ring_peer_limit_refuses_new_offers() {
    let (mut sim, _, procs, tids) = spawn_tasks(6, 1, &["h1", "h1", "h1"]);
    pair_up(&mut sim, (procs[0], procs[1]), 1);
    let pairs = &mut sim
        .nodes
        .get_mut(&host(1))
        .expect("the master")
        .machine
        .ring_peers;
    (1..RING_PEERS_MAX as i32).for_each(|n| pairs.add_pair(tids[0], Tid::from_raw(0x8_0000 + n)));
    send_route_message(&mut sim, procs[2], tids[0], ring_offer(2));
    assert_eq!(
        await_messages(&mut sim, procs[2], 1),
        [route_message(
            tids[0],
            true,
            RouteMsg::RingRefuse { id: OfferId(2) }
        )]
    );
    // An existing pair may replace its rings.
    pair_up(&mut sim, (procs[0], procs[1]), 3);
}

/// Route messages between tasks that migrate at random arrive once and in order.
#[test]
fn route_messages_survive_random_migrations() {
    for seed in seeds(30) {
        let (mut sim, console, procs, tids) = spawn_tasks(seed, 3, &["h1", "h1", "h2", "h3"]);
        let (mut sent, mut open) = (0, Vec::new());
        for round in 0..120u64 {
            let (from, to) = (sim.rng.below(4) as usize, sim.rng.below(4) as usize);
            // A quiesced library would send the message after it has resumed; this test skips it.
            let speaker = &sim.procs[procs[from]];
            if from != to
                && speaker.conn.is_some()
                && speaker.welcome.is_some()
                && !speaker.has_quiesced()
            {
                let rings = sim.rng.below(3) == 0;
                send_route_message(
                    &mut sim,
                    procs[from],
                    tids[to],
                    if rings {
                        ring_offer(round)
                    } else {
                        direct_offer(round)
                    },
                );
                sent += usize::from(!rings);
            }
            if round % 12 == 0 {
                let (tid, to) = (tids[sim.rng.below(4) as usize], 1 + sim.rng.below(3));
                open.push(sim.request(console, migrate_request(tid, &format!("h{to}"))));
            }
            let wait = Micros(sim.rng.below(10_000));
            sim.advance(wait);
        }
        sim.run_until("all moves", |s| {
            open.iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        sim.advance(Micros::from_secs(5));
        let mut came = 0;
        for proc in &procs {
            let mut last = [None; 4];
            for message in &sim.procs[*proc].daemon_messages {
                let ToTask::Route {
                    from,
                    message: RouteMsg::DirectOffer { id, .. },
                    ..
                } = message
                else {
                    continue;
                };
                let from = tids.iter().position(|t| t == from).expect("one of them");
                assert!(
                    last[from] < Some(*id),
                    "{id:?} after {:?} (seed {seed})",
                    last[from]
                );
                last[from] = Some(*id);
                came += 1;
            }
        }
        assert_eq!(came, sent, "seed {seed}");
    }
}
