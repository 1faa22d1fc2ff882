//! Spawns with placement leases, and the reports of their use.

use super::{error_of, home_indices, spawn_request, spawned_tids};
use crate::tests::sim::{Sim, host, seeds};
use crate::{Event, HostId, Output};
use sempa_proto::event::EventKind;
use sempa_proto::sm::{
    LEASE_HOSTS_MAX, LEASE_TASKS_MAX, PlacementLeaseUse, SM_PLACEMENT_LEASE_USED, SM_TASKX,
    unpack_placement_lease_use,
};
use sempa_proto::task::{LeasedSpawn, Reply, Request, RmServices, SpawnRequest, ToDaemon, ToTask};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Micros, PvmError, RequestId, Tid};

/// The use of a placement lease is reported to its resource manager and does not advance the
/// round-robin order.
#[test]
fn placement_lease_use_is_reported() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = sim.enrol(HostId::MASTER);
        sim.ask(
            rm,
            Request::RegisterRm(RmServices {
                spawn: true,
                other_requests: false,
                task_exits: true,
            }),
        );
        let giver = sim.procs[rm].tid();
        let granted = |n: u16, rm: Tid, request: SpawnRequest| Request::SpawnLeased {
            request,
            lease: LeasedSpawn {
                rm,
                wid: 40 + i32::from(n),
                hosts: vec![host(n)],
            },
        };
        let mut started = Vec::new();
        for n in [3, 3, 1] {
            let reply = sim.ask(console, granted(n, giver, spawn_request("child", 1)));
            started.push((n, spawned_tids(reply)[0].expect("started")));
        }
        assert_eq!(
            home_indices(sim.ask(console, Request::Spawn(spawn_request("child", 2)))),
            [2, 3],
            "seed {seed}"
        );
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == 3
        });
        let told = sim.procs[rm].notifications(SM_PLACEMENT_LEASE_USED);
        let by = sim.procs[console].tid();
        for ((n, tid), note) in started.iter().zip(told) {
            let taken = PlacementLeaseUse {
                spawner: by,
                tasks: vec![(host(*n), *tid)],
            };
            assert_eq!(
                (note.wid, unpack_placement_lease_use(note.body.clone())),
                (40 + i32::from(*n), Ok(taken))
            );
            assert_eq!(tid.birth_host(), Some(host(*n)));
        }
        let Reply::Events(log) = sim.ask(
            console,
            Request::Events {
                first_number: 0,
                limit: 1000,
            },
        ) else {
            panic!("no log")
        };
        let placed = log
            .iter()
            .filter(|entry| matches!(&entry.kind, EventKind::Placed { .. }))
            .count();
        assert_eq!(placed, 3, "seed {seed}");
        // Failures are reported only to the requester, which then asks the resource manager.
        assert_eq!(
            spawned_tids(sim.ask(console, granted(9, giver, spawn_request("child", 1)))),
            [Err(PvmError::NoHost)]
        );
        assert_eq!(
            spawned_tids(sim.ask(console, granted(2, giver, spawn_request("missing", 1)))),
            [Err(PvmError::NoFile)]
        );
        for wrong in [
            granted(2, by, spawn_request("child", 1)),
            granted(2, giver, spawn_request("child", 2)),
        ] {
            assert_eq!(error_of(sim.ask(console, wrong)), PvmError::Denied);
        }
        sim.close(rm);
        sim.run_until("its end", |s| s.procs[console].rm.is_none());
        assert_eq!(
            error_of(sim.ask(console, granted(2, giver, spawn_request("child", 1)))),
            PvmError::Denied
        );
        assert_eq!(
            sim.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len(),
            3,
            "seed {seed}"
        );
    }
}

/// The reply to a spawn precedes the order to the tasker and the log entry.
#[test]
fn spawn_reply_precedes_start_and_log() {
    let (mut sim, console) = Sim::cluster(1, 1);
    let (now, conn) = (sim.now, sim.procs[console].conn.expect("connected"));
    let entries = |sim: &Sim| {
        sim.nodes[&HostId::MASTER]
            .machine
            .master
            .as_ref()
            .expect("the master")
            .events
            .entries_since(0, 1000)
            .len()
    };
    let before = entries(&sim);
    let message = ToDaemon::Request {
        id: RequestId(77),
        request: Request::Spawn(spawn_request("child", 2)),
    };
    let outputs = sim.outputs_of(HostId::MASTER, now, Event::TaskControl { conn, message });
    let answer = |output: &Output| {
        matches!(
            output,
            Output::ToTask {
                message: ToTask::Reply { .. },
                ..
            }
        )
    };
    let order = |output: &Output| matches!(output, Output::ToTasker(ToTasker::Start(_)));
    let first = outputs.iter().position(order).expect("an order");
    assert!(outputs.iter().position(answer).expect("an answer") < first);
    assert_eq!(outputs.iter().filter(|output| order(output)).count(), 2);
    assert_eq!(entries(&sim), before);
    // Without another event, the log entry follows a moment later.
    let due = sim.nodes[&HostId::MASTER]
        .machine
        .next_wakeup()
        .expect("soon");
    assert!(due.since(now) <= Micros::from_millis(1));
    sim.outputs_of(HostId::MASTER, due, Event::Wake);
    assert_eq!(entries(&sim), before + 2);
}

/// One request uses several placement leases, one per task, and failures are reported to the
/// requester.
#[test]
fn one_request_uses_several_placement_leases() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = sim.enrol(HostId::MASTER);
        sim.ask(
            rm,
            Request::RegisterRm(RmServices {
                spawn: true,
                other_requests: false,
                task_exits: true,
            }),
        );
        let (giver, by) = (sim.procs[rm].tid(), sim.procs[console].tid());
        let granted = |sim: &mut Sim, hosts: &[u16], count: u32| {
            let grant = LeasedSpawn {
                rm: giver,
                wid: 7,
                hosts: hosts.iter().map(|n| host(*n)).collect(),
            };
            sim.ask(
                console,
                Request::SpawnLeased {
                    request: spawn_request("child", count),
                    lease: grant,
                },
            )
        };
        let first = spawned_tids(granted(&mut sim, &[3, 1, 3, 2], 4));
        let homes: Vec<_> = first
            .iter()
            .map(|tid| tid.expect("started").birth_host().expect("a home").index())
            .collect();
        assert_eq!(homes, [3, 1, 3, 2], "seed {seed}");
        let second = spawned_tids(granted(&mut sim, &[9, 2, 8], 3));
        assert_eq!([second[0], second[2]], [Err(PvmError::NoHost); 2]);
        assert_eq!(second[1].expect("started").birth_host(), Some(host(2)));
        assert_eq!(
            spawned_tids(granted(&mut sim, &[9, 8], 2)),
            [Err(PvmError::NoHost); 2]
        );
        let many = [2; LEASE_TASKS_MAX + 1];
        for (hosts, count) in [(&[2, 2][..], 3), (&[], 1), (&many[..], many.len() as u32)] {
            assert_eq!(error_of(granted(&mut sim, hosts, count)), PvmError::Denied);
        }
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == 2
        });
        let told = sim.procs[rm]
            .notifications(SM_PLACEMENT_LEASE_USED)
            .into_iter()
            .map(|note| unpack_placement_lease_use(note.body).expect("a word"));
        let at = |n: u16, tid: &Result<Tid, PvmError>| (host(n), tid.expect("started"));
        let all = [3, 1, 3, 2]
            .iter()
            .zip(&first)
            .map(|(n, tid)| at(*n, tid))
            .collect();
        let expected = [
            PlacementLeaseUse {
                spawner: by,
                tasks: all,
            },
            PlacementLeaseUse {
                spawner: by,
                tasks: vec![at(2, &second[1])],
            },
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected, "seed {seed}");
    }
}

/// Reports about the use of placement leases are batched and stay in order.
#[test]
fn lease_reports_are_batched_in_order() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let rm = sim.enrol(HostId::MASTER);
        sim.ask(
            rm,
            Request::RegisterRm(RmServices {
                spawn: true,
                other_requests: false,
                task_exits: false,
            }),
        );
        assert_eq!(
            sim.ask(rm, Request::Subscribe { ctx: 3, tag: 33 }),
            Reply::Done
        );
        let giver = sim.procs[rm].tid();
        let waited = |sim: &Sim| sim.nodes[&HostId::MASTER].machine.rm_batch.batched_total;
        let mut tids_taken = Vec::new();
        for n in 1..=LEASE_HOSTS_MAX {
            let grant = LeasedSpawn {
                rm: giver,
                wid: n as i32,
                hosts: vec![HostId::MASTER],
            };
            let reply = sim.ask(
                console,
                Request::SpawnLeased {
                    request: spawn_request("child", 1),
                    lease: grant,
                },
            );
            tids_taken.push(spawned_tids(reply)[0].expect("started"));
        }
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == LEASE_HOSTS_MAX
        });
        let told: Vec<_> = sim.procs[rm]
            .notifications(SM_PLACEMENT_LEASE_USED)
            .into_iter()
            .map(|note| unpack_placement_lease_use(note.body).expect("a word").tasks)
            .collect();
        let each: Vec<_> = tids_taken
            .iter()
            .map(|tid| vec![(HostId::MASTER, *tid)])
            .collect();
        assert_eq!(told, each, "seed {seed}");
        // Batched messages: one event per placement, one report per lease except at the end of each
        // half, and starts and exits during the test.
        let words = LEASE_HOSTS_MAX - 2;
        let expected = LEASE_HOSTS_MAX + words..=3 * LEASE_HOSTS_MAX + words;
        assert!(
            expected.contains(&waited(&sim)),
            "seed {seed}: {}",
            waited(&sim)
        );
        assert!(
            sim.procs[rm].notifications(SM_TASKX).is_empty(),
            "it has not asked for that"
        );

        sim.advance(Micros::from_secs(2));
        let before = waited(&sim);
        sim.ask(console, Request::Spawn(spawn_request("child", 1)));
        sim.advance(Micros::from_secs(1));
        assert_eq!(
            waited(&sim),
            before,
            "seed {seed}: nothing is granted any more"
        );
        let numbers: Vec<u64> = sim.procs[rm]
            .notifications(33)
            .iter()
            .map(|note| {
                sempa_proto::frame::from_bytes::<sempa_proto::event::Event>(&note.body)
                    .expect("an event")
                    .number
            })
            .collect();
        assert!(
            numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
            "seed {seed}: {numbers:?}"
        );
        assert!(numbers.len() > 8, "seed {seed}: {numbers:?}");
    }
}
