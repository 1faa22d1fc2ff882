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

/// Enrols a resource manager that places tasks, on the master. Returns its process.
/// `learns_task_exits` is true if the resource manager is notified of all exits of tasks.
fn enrol_placement_rm(sim: &mut Sim, learns_task_exits: bool) -> usize {
    let rm = sim.enrol(HostId::MASTER);
    sim.ask(
        rm,
        Request::RegisterRm(RmServices {
            placement: true,
            vm_requests: false,
            task_exits: learns_task_exits,
        }),
    );
    rm
}

/// The use of a placement lease is reported to the resource manager that granted it. The use does
/// not advance the round-robin order.
#[test]
fn placement_lease_use_is_reported() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = enrol_placement_rm(&mut sim, true);
        let rm_tid = sim.procs[rm].tid();
        let leased_spawn = |n: u16, rm: Tid, request: SpawnRequest| Request::SpawnLeased {
            request,
            lease: LeasedSpawn {
                rm,
                lease_wid: 40 + i32::from(n),
                hosts: vec![host(n)],
            },
        };
        let mut started_tasks = Vec::new();
        for n in [3, 3, 1] {
            let reply = sim.ask(console, leased_spawn(n, rm_tid, spawn_request("child", 1)));
            started_tasks.push((n, spawned_tids(reply)[0].expect("started")));
        }
        assert_eq!(
            home_indices(sim.ask(console, Request::Spawn(spawn_request("child", 2)))),
            [2, 3],
            "seed {seed}"
        );
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == 3
        });
        let use_reports = sim.procs[rm].notifications(SM_PLACEMENT_LEASE_USED);
        let spawner = sim.procs[console].tid();
        for ((n, tid), notification) in started_tasks.iter().zip(use_reports) {
            let expected_use = PlacementLeaseUse {
                spawner,
                tasks: vec![(host(*n), *tid)],
            };
            assert_eq!(
                (
                    notification.wid,
                    unpack_placement_lease_use(notification.body.clone())
                ),
                (40 + i32::from(*n), Ok(expected_use))
            );
            assert_eq!(tid.birth_host(), Some(host(*n)));
        }
        let Reply::Events(entries) = sim.ask(
            console,
            Request::Events {
                first_number: 0,
                events_max: 1000,
            },
        ) else {
            panic!("no log")
        };
        let placed_event_count = entries
            .iter()
            .filter(|entry| matches!(&entry.kind, EventKind::Placed { .. }))
            .count();
        assert_eq!(placed_event_count, 3, "seed {seed}");
        // A failed spawn is reported only to the requester, which then asks the resource manager.
        assert_eq!(
            spawned_tids(sim.ask(console, leased_spawn(9, rm_tid, spawn_request("child", 1)))),
            [Err(PvmError::NoHost)]
        );
        assert_eq!(
            spawned_tids(sim.ask(
                console,
                leased_spawn(2, rm_tid, spawn_request("missing", 1))
            )),
            [Err(PvmError::NoFile)]
        );
        for wrong_request in [
            leased_spawn(2, spawner, spawn_request("child", 1)),
            leased_spawn(2, rm_tid, spawn_request("child", 2)),
        ] {
            assert_eq!(error_of(sim.ask(console, wrong_request)), PvmError::Denied);
        }
        sim.close_connection(rm);
        sim.run_until("its end", |s| s.procs[console].rm_info.is_none());
        assert_eq!(
            error_of(sim.ask(console, leased_spawn(2, rm_tid, spawn_request("child", 1)))),
            PvmError::Denied
        );
        assert_eq!(
            sim.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len(),
            3,
            "seed {seed}"
        );
    }
}

/// The reply to a spawn request precedes the orders to the tasker and the log entries.
#[test]
fn spawn_reply_precedes_start_and_log() {
    let (mut sim, console) = Sim::cluster(1, 1);
    let (now, conn) = (sim.now, sim.procs[console].conn.expect("connected"));
    let count_entries = |sim: &Sim| {
        sim.nodes[&HostId::MASTER]
            .machine
            .master
            .as_ref()
            .expect("the master")
            .events
            .entries_since(0, 1000)
            .len()
    };
    let entry_count = count_entries(&sim);
    let message = ToDaemon::Request {
        id: RequestId(77),
        request: Request::Spawn(spawn_request("child", 2)),
    };
    let outputs =
        sim.handle_without_outputs(HostId::MASTER, now, Event::TaskControl { conn, message });
    let is_reply = |output: &Output| {
        matches!(
            output,
            Output::SendToTask {
                message: ToTask::Reply { .. },
                ..
            }
        )
    };
    let is_start = |output: &Output| matches!(output, Output::SendToTasker(ToTasker::Start(_)));
    let start_position = outputs.iter().position(is_start).expect("an order");
    assert!(outputs.iter().position(is_reply).expect("an answer") < start_position);
    assert_eq!(outputs.iter().filter(|output| is_start(output)).count(), 2);
    assert_eq!(count_entries(&sim), entry_count);
    // If no other event arrives, the log entries follow at most 1 ms later.
    let wakeup_time = sim.nodes[&HostId::MASTER]
        .machine
        .next_wakeup_time()
        .expect("soon");
    assert!(wakeup_time.since(now) <= Micros::from_millis(1));
    sim.handle_without_outputs(HostId::MASTER, wakeup_time, Event::Wake);
    assert_eq!(count_entries(&sim), entry_count + 2);
}

/// One request may use several hosts of a placement lease, one for each task. Tasks on hosts that
/// are not in the table fail. A request whose number of tasks differs from the number of hosts, or
/// exceeds the limit, is refused.
#[test]
fn one_request_uses_several_placement_leases() {
    for seed in seeds(10) {
        let (mut sim, console) = Sim::cluster(seed, 3);
        let rm = enrol_placement_rm(&mut sim, true);
        let (rm_tid, spawner) = (sim.procs[rm].tid(), sim.procs[console].tid());
        let spawn_leased = |sim: &mut Sim, hosts: &[u16], count: u32| {
            let leased_spawn = LeasedSpawn {
                rm: rm_tid,
                lease_wid: 7,
                hosts: hosts.iter().map(|n| host(*n)).collect(),
            };
            sim.ask(
                console,
                Request::SpawnLeased {
                    request: spawn_request("child", count),
                    lease: leased_spawn,
                },
            )
        };
        let first_tids = spawned_tids(spawn_leased(&mut sim, &[3, 1, 3, 2], 4));
        let home_indices: Vec<_> = first_tids
            .iter()
            .map(|tid| tid.expect("started").birth_host().expect("a home").index())
            .collect();
        assert_eq!(home_indices, [3, 1, 3, 2], "seed {seed}");
        let second_tids = spawned_tids(spawn_leased(&mut sim, &[9, 2, 8], 3));
        assert_eq!([second_tids[0], second_tids[2]], [Err(PvmError::NoHost); 2]);
        assert_eq!(second_tids[1].expect("started").birth_host(), Some(host(2)));
        assert_eq!(
            spawned_tids(spawn_leased(&mut sim, &[9, 8], 2)),
            [Err(PvmError::NoHost); 2]
        );
        let too_many_hosts = [2; LEASE_TASKS_MAX + 1];
        for (hosts, count) in [
            (&[2, 2][..], 3),
            (&[], 1),
            (&too_many_hosts[..], too_many_hosts.len() as u32),
        ] {
            assert_eq!(
                error_of(spawn_leased(&mut sim, hosts, count)),
                PvmError::Denied
            );
        }
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == 2
        });
        let use_reports = sim.procs[rm]
            .notifications(SM_PLACEMENT_LEASE_USED)
            .into_iter()
            .map(|notification| unpack_placement_lease_use(notification.body).expect("a word"));
        let placed_task = |n: u16, tid: &Result<Tid, PvmError>| (host(n), tid.expect("started"));
        let first_tasks = [3, 1, 3, 2]
            .iter()
            .zip(&first_tids)
            .map(|(n, tid)| placed_task(*n, tid))
            .collect();
        let expected = [
            PlacementLeaseUse {
                spawner,
                tasks: first_tasks,
            },
            PlacementLeaseUse {
                spawner,
                tasks: vec![placed_task(2, &second_tids[1])],
            },
        ];
        assert_eq!(use_reports.collect::<Vec<_>>(), expected, "seed {seed}");
    }
}

/// Reports about the use of placement leases are batched and stay in order.
#[test]
fn lease_reports_are_batched_in_order() {
    for seed in seeds(20) {
        let (mut sim, console) = Sim::cluster(seed, 2);
        let rm = enrol_placement_rm(&mut sim, false);
        assert_eq!(
            sim.ask(rm, Request::Subscribe { ctx: 3, tag: 33 }),
            Reply::Done
        );
        let rm_tid = sim.procs[rm].tid();
        let batched_total = |sim: &Sim| {
            sim.nodes[&HostId::MASTER]
                .machine
                .rm_batch
                .batched_item_count
        };
        let mut leased_tids = Vec::new();
        for n in 1..=LEASE_HOSTS_MAX {
            let leased_spawn = LeasedSpawn {
                rm: rm_tid,
                lease_wid: n as i32,
                hosts: vec![HostId::MASTER],
            };
            let reply = sim.ask(
                console,
                Request::SpawnLeased {
                    request: spawn_request("child", 1),
                    lease: leased_spawn,
                },
            );
            leased_tids.push(spawned_tids(reply)[0].expect("started"));
        }
        sim.run_until("the giver knows", |s| {
            s.procs[rm].notifications(SM_PLACEMENT_LEASE_USED).len() == LEASE_HOSTS_MAX
        });
        let reported_tasks: Vec<_> = sim.procs[rm]
            .notifications(SM_PLACEMENT_LEASE_USED)
            .into_iter()
            .map(|notification| {
                unpack_placement_lease_use(notification.body)
                    .expect("a word")
                    .tasks
            })
            .collect();
        let expected_tasks: Vec<_> = leased_tids
            .iter()
            .map(|tid| vec![(HostId::MASTER, *tid)])
            .collect();
        assert_eq!(reported_tasks, expected_tasks, "seed {seed}");
        // Expected number of batched messages: one event for each placement, one report for each
        // lease except at the end of each half, and messages about starts and exits.
        let report_count_min = LEASE_HOSTS_MAX - 2;
        let expected = LEASE_HOSTS_MAX + report_count_min..=3 * LEASE_HOSTS_MAX + report_count_min;
        assert!(
            expected.contains(&batched_total(&sim)),
            "seed {seed}: {}",
            batched_total(&sim)
        );
        assert!(
            sim.procs[rm].notifications(SM_TASKX).is_empty(),
            "it has not asked for that"
        );

        sim.advance(Micros::from_secs(2));
        let batched_count_before = batched_total(&sim);
        sim.ask(console, Request::Spawn(spawn_request("child", 1)));
        sim.advance(Micros::from_secs(1));
        assert_eq!(
            batched_total(&sim),
            batched_count_before,
            "seed {seed}: nothing is granted any more"
        );
        let event_numbers: Vec<u64> = sim.procs[rm]
            .notifications(33)
            .iter()
            .map(|notification| {
                sempa_proto::frame::from_bytes::<sempa_proto::event::Event>(&notification.body)
                    .expect("an event")
                    .number
            })
            .collect();
        assert!(
            event_numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
            "seed {seed}: {event_numbers:?}"
        );
        assert!(event_numbers.len() > 8, "seed {seed}: {event_numbers:?}");
    }
}
