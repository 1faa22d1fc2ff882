//! Placement queries: which hosts would accept a task. A query changes nothing on any host.

use super::scenario::{Scenario, migrate_request, stop_guests_request};
use super::sim::{Sim, host, seeds};
use sempa_proto::migration::{MigrationTargets, Refusal, Verdict};
use sempa_proto::task::{Reply, Request, SPAWN_DEBUG, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, Tid};

fn placement_query_request(tid: Tid, target_name: Option<&str>) -> Request {
    Request::FindMigrationTargets {
        tid,
        target: target_name.map(String::from),
    }
}

fn query_placement(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    target_name: Option<&str>,
) -> Result<MigrationTargets, Refusal> {
    match sim.ask(console, placement_query_request(tid, target_name)) {
        Reply::MigrationTargets(result) => result,
        other => panic!("{other:?}"),
    }
}

/// Spawns a task on h2 and waits until it has enrolled.
fn spawn_child(sim: &mut Sim, console: usize, flags: i32) -> Tid {
    let request = SpawnRequest {
        program: "child".into(),
        task_count: 1,
        where_arg: "h2".into(),
        flags: 1 | flags,
        ..Default::default()
    };
    let Reply::Spawned(results) = sim.ask(console, Request::Spawn(request)) else {
        panic!("no task")
    };
    let tid = results[0].expect("it starts");
    sim.run_until("it is there", |s| s.procs[s.proc_of(tid)].welcome.is_some());
    tid
}

fn missing_file_refusal(path: &str) -> Refusal {
    Refusal::File {
        path: path.into(),
        why: "it does not exist on the target".into(),
    }
}

/// A placement query returns the refusals of every host, and the nearest host that accepts the
/// task. A migration succeeds to the hosts that accept the task, and to no other host.
#[test]
fn query_lists_refusals_and_nearest_host() {
    let (mut sim, console) = Sim::cluster(1, 5);
    let tid = spawn_child(&mut sim, console, 0);
    let verdict: Verdict = vec![
        missing_file_refusal("/a"),
        Refusal::Memory { need: 2, have: 1 },
    ];
    let no_engine = |host| Refusal::NoEngine {
        host,
        why: "none".into(),
    };
    sim.verdicts.insert(HostId::MASTER, verdict.clone());
    // A tasker does not know its own host, so it reports any host.
    sim.verdicts
        .insert(host(4), vec![no_engine(HostId::MASTER)]);
    let targets = query_placement(&mut sim, console, tid, None).expect("it could move");
    assert_eq!(
        (targets.tid, targets.from, targets.memory_bytes),
        (tid, host(2), 4096)
    );
    let expected = [
        (HostId::MASTER, verdict.clone()),
        (host(3), vec![]),
        (host(4), vec![no_engine(host(4))]),
        (host(5), vec![]),
    ];
    assert_eq!(targets.verdicts, expected);
    assert_eq!(targets.nearest_host(), Some(host(3)));
    for (target_name, is_accepted) in [("h1", false), ("h3", true), ("h4", false), ("h5", true)] {
        let single_targets =
            query_placement(&mut sim, console, tid, Some(target_name)).expect("it could move");
        assert_eq!(
            (
                single_targets.verdicts.len(),
                single_targets.nearest_host().is_some()
            ),
            (1, is_accepted),
            "{target_name}"
        );
        let migration_reply = sim.ask(console, migrate_request(tid, target_name));
        assert_eq!(
            matches!(migration_reply, Reply::Migrated(Ok(_))),
            is_accepted,
            "{target_name}: {migration_reply:?}"
        );
        sim.ask(console, migrate_request(tid, "h2"));
    }
    assert_eq!(
        query_placement(&mut sim, console, tid, Some("h2"))
            .expect("it is there")
            .verdicts,
        []
    );
    // The task has migrated to the other network, so the hosts are listed in another order.
    sim.ask(console, migrate_request(tid, "h5"));
    let targets = query_placement(&mut sim, console, tid, None).expect("it could move");
    let host_order: Vec<HostId> = targets.verdicts.iter().map(|(host, _)| *host).collect();
    assert_eq!(host_order, [host(4), HostId::MASTER, host(2), host(3)]);
}

#[test]
fn owner_presence_is_listed_as_refusal() {
    let mut scenario = Scenario::new(5);
    scenario
        .sim
        .verdicts
        .insert(host(2), vec![missing_file_refusal("/a")]);
    scenario.send_directive(1, stop_guests_request());
    let (console, tid) = (scenario.console, scenario.tids[0]);
    let targets =
        query_placement(&mut scenario.sim, console, tid, Some("h2")).expect("it could move");
    let owner_refusal = Refusal::OwnerPresent {
        host: host(2),
        why: "olga is there".into(),
    };
    assert_eq!(
        targets.verdicts,
        [(host(2), vec![owner_refusal, missing_file_refusal("/a")])]
    );
}

/// If a task does not exist or cannot migrate to any host, a placement query returns the reason. A
/// query for an unknown host is an error.
#[test]
fn immovable_task_is_refused_by_its_host() {
    let (mut sim, console) = Sim::cluster(2, 3);
    let pinned_tid = spawn_child(&mut sim, console, SPAWN_PINNED);
    let console_tid = sim.procs[console].tid();
    assert_eq!(
        query_placement(&mut sim, console, console_tid, None),
        Err(Refusal::NotSpawned)
    );
    assert_eq!(
        query_placement(&mut sim, console, pinned_tid, None),
        Err(Refusal::Pinned)
    );
    let debugged_tid = spawn_child(&mut sim, console, SPAWN_DEBUG);
    assert_eq!(
        query_placement(&mut sim, console, debugged_tid, None),
        Err(Refusal::Debugged)
    );
    assert_eq!(
        query_placement(&mut sim, console, Tid::from_raw(0x40999), None),
        Err(Refusal::NoSuchTask)
    );
    assert_eq!(
        query_placement(&mut sim, console, host(2).tid(), None),
        Err(Refusal::NoSuchTask)
    );
    let unknown_host_reply = sim.ask(console, placement_query_request(pinned_tid, Some("h7")));
    assert!(
        matches!(
            unknown_host_reply,
            Reply::Failed {
                error: PvmError::NoHost,
                ..
            }
        ),
        "{unknown_host_reply:?}"
    );
}

/// If a candidate host is lost, the query lists it with a refusal. If the task's host is lost, the
/// query fails.
#[test]
fn lost_host_refuses_or_fails_the_query() {
    let (mut sim, console) = Sim::cluster(3, 4);
    let tid = spawn_child(&mut sim, console, 0);
    let query_with_lost_host = |sim: &mut Sim, lost_number: u16| {
        let query_request = sim.request(console, placement_query_request(tid, None));
        sim.kill_host(host(lost_number));
        sim.run_until("an answer", |s| {
            s.procs[console].replies.contains_key(&query_request)
        });
        sim.procs[console].replies[&query_request].clone()
    };
    let Reply::MigrationTargets(Ok(targets)) = query_with_lost_host(&mut sim, 3) else {
        panic!("it could move")
    };
    assert_eq!(
        targets.verdicts,
        [
            (HostId::MASTER, vec![]),
            (host(3), vec![Refusal::HostLost(host(3))]),
            (host(4), vec![])
        ]
    );
    let query_reply = query_with_lost_host(&mut sim, 2);
    assert!(
        matches!(query_reply, Reply::MigrationTargets(Err(Refusal::HostLost(refusing_host))) if refusing_host == host(2)),
        "{query_reply:?}"
    );
}

/// Every placement query is answered, even if a host or a tasker dies or the task migrates during
/// the query.
#[test]
fn every_query_is_answered() {
    let (mut success_count, mut refusal_count) = (0, 0);
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn_child(&mut sim, console, 0);
        let asking_host = host(1 + sim.rng.below(4) as u16);
        let asking_proc = sim.enrol(asking_host);
        let query_request = sim.request(asking_proc, placement_query_request(tid, None));
        let delay = Micros(sim.rng.below(3_000));
        sim.advance(delay);
        let victim = host(2 + sim.rng.below(3) as u16);
        match sim.rng.below(3) {
            0 if sim.procs[asking_proc].host != victim => sim.kill_host(victim),
            1 => sim.kill_tasker(victim),
            _ => drop(sim.request(console, migrate_request(tid, "h3"))),
        }
        sim.run_until("an answer", |s| {
            s.procs[asking_proc].replies.contains_key(&query_request)
        });
        match &sim.procs[asking_proc].replies[&query_request] {
            Reply::MigrationTargets(Ok(targets)) => {
                assert!(targets.verdicts.len() >= 2, "seed {seed}: {targets:?}");
                success_count += 1;
            }
            Reply::MigrationTargets(Err(_)) => refusal_count += 1,
            other => panic!("{other:?} (seed {seed})"),
        }
    }
    assert!(
        success_count > 100 && refusal_count > 20,
        "{success_count} answered, {refusal_count} refused"
    );
}
