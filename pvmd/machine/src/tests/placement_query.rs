//! Placement queries: which hosts would accept a task. Nothing changes on any host.

use super::scenario::{Scenario, migrate_request, stop_guests};
use super::sim::{Sim, host, seeds};
use sempa_proto::migration::{MigrationTargets, Refusal, Verdict};
use sempa_proto::task::{Reply, Request, SPAWN_DEBUG, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError, Tid};

fn can_migrate(tid: Tid, to: Option<&str>) -> Request {
    Request::FindMigrationTargets {
        tid,
        to: to.map(String::from),
    }
}

fn query(
    sim: &mut Sim,
    console: usize,
    tid: Tid,
    to: Option<&str>,
) -> Result<MigrationTargets, Refusal> {
    match sim.ask(console, can_migrate(tid, to)) {
        Reply::MigrationTargets(result) => result,
        other => panic!("{other:?}"),
    }
}

/// Spawns a task on h2 and waits until it has enrolled.
fn spawn_child(sim: &mut Sim, console: usize, flags: i32) -> Tid {
    let request = SpawnRequest {
        file: "child".into(),
        count: 1,
        place: "h2".into(),
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

fn missing_file(path: &str) -> Refusal {
    Refusal::File {
        path: path.into(),
        why: "it does not exist on the target".into(),
    }
}

/// A placement query returns the refusals of every host and the nearest host that accepts the task.
#[test]
fn query_lists_refusals_and_nearest_host() {
    let (mut sim, console) = Sim::cluster(1, 5);
    let tid = spawn_child(&mut sim, console, 0);
    let against: Verdict = vec![missing_file("/a"), Refusal::Memory { need: 2, have: 1 }];
    let no_engine = |host| Refusal::NoEngine {
        host,
        why: "none".into(),
    };
    sim.verdicts.insert(HostId::MASTER, against.clone());
    // A tasker does not know the host it runs on.
    sim.verdicts
        .insert(host(4), vec![no_engine(HostId::MASTER)]);
    let targets = query(&mut sim, console, tid, None).expect("it could move");
    assert_eq!(
        (targets.tid, targets.from, targets.resident_bytes),
        (tid, host(2), 4096)
    );
    let expected = [
        (HostId::MASTER, against.clone()),
        (host(3), vec![]),
        (host(4), vec![no_engine(host(4))]),
        (host(5), vec![]),
    ];
    assert_eq!(targets.verdicts, expected);
    assert_eq!(targets.nearest(), Some(host(3)));
    for (to, takes) in [("h1", false), ("h3", true), ("h4", false), ("h5", true)] {
        let one = query(&mut sim, console, tid, Some(to)).expect("it could move");
        assert_eq!(
            (one.verdicts.len(), one.nearest().is_some()),
            (1, takes),
            "{to}"
        );
        let moved = sim.ask(console, migrate_request(tid, to));
        assert_eq!(
            matches!(moved, Reply::Migrated(Ok(_))),
            takes,
            "{to}: {moved:?}"
        );
        sim.ask(console, migrate_request(tid, "h2"));
    }
    assert_eq!(
        query(&mut sim, console, tid, Some("h2"))
            .expect("it is there")
            .verdicts,
        []
    );
    // The order of the hosts after the task has migrated to the other network.
    sim.ask(console, migrate_request(tid, "h5"));
    let targets = query(&mut sim, console, tid, None).expect("it could move");
    let order: Vec<HostId> = targets.verdicts.iter().map(|(host, _)| *host).collect();
    assert_eq!(order, [host(4), HostId::MASTER, host(2), host(3)]);
}

#[test]
fn owner_presence_is_listed_as_refusal() {
    let mut scene = Scenario::new(5);
    scene.sim.verdicts.insert(host(2), vec![missing_file("/a")]);
    scene.send_directive(1, stop_guests());
    let (console, tid) = (scene.console, scene.tids[0]);
    let targets = query(&mut scene.sim, console, tid, Some("h2")).expect("it could move");
    let owner = Refusal::OwnerPresent {
        host: host(2),
        why: "olga is there".into(),
    };
    assert_eq!(
        targets.verdicts,
        [(host(2), vec![owner, missing_file("/a")])]
    );
}

/// A task that cannot migrate at all is refused by its own host.
#[test]
fn immovable_task_is_refused_by_its_host() {
    let (mut sim, console) = Sim::cluster(2, 3);
    let pinned = spawn_child(&mut sim, console, SPAWN_PINNED);
    let shell = sim.procs[console].tid();
    assert_eq!(
        query(&mut sim, console, shell, None),
        Err(Refusal::NotSpawned)
    );
    assert_eq!(query(&mut sim, console, pinned, None), Err(Refusal::Pinned));
    let debugged = spawn_child(&mut sim, console, SPAWN_DEBUG);
    assert_eq!(
        query(&mut sim, console, debugged, None),
        Err(Refusal::Debugged)
    );
    assert_eq!(
        query(&mut sim, console, Tid::from_raw(0x40999), None),
        Err(Refusal::NoSuchTask)
    );
    assert_eq!(
        query(&mut sim, console, host(2).tid(), None),
        Err(Refusal::NoSuchTask)
    );
    let nowhere = sim.ask(console, can_migrate(pinned, Some("h7")));
    assert!(
        matches!(
            nowhere,
            Reply::Failed {
                error: PvmError::NoHost,
                ..
            }
        ),
        "{nowhere:?}"
    );
}

/// The loss of a candidate host counts as its refusal; the loss of the task's host fails the query.
#[test]
fn lost_host_refuses_or_fails_the_query() {
    let (mut sim, console) = Sim::cluster(3, 4);
    let tid = spawn_child(&mut sim, console, 0);
    let with_dead = |sim: &mut Sim, dead: u16| {
        let asking = sim.request(console, can_migrate(tid, None));
        sim.kill_host(host(dead));
        sim.run_until("an answer", |s| {
            s.procs[console].replies.contains_key(&asking)
        });
        sim.procs[console].replies[&asking].clone()
    };
    let Reply::MigrationTargets(Ok(targets)) = with_dead(&mut sim, 3) else {
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
    let all = with_dead(&mut sim, 2);
    assert!(
        matches!(all, Reply::MigrationTargets(Err(Refusal::HostLost(lost))) if lost == host(2)),
        "{all:?}"
    );
}

/// Every placement query is answered, even if a host or a tasker dies or the task migrates
/// meanwhile.
#[test]
fn every_query_is_answered() {
    let (mut answered, mut refused) = (0, 0);
    for seed in seeds(300) {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let tid = spawn_child(&mut sim, console, 0);
        let from = host(1 + sim.rng.below(4) as u16);
        let asker = sim.enrol(from);
        let asking = sim.request(asker, can_migrate(tid, None));
        let wait = Micros(sim.rng.below(3_000));
        sim.advance(wait);
        let victim = host(2 + sim.rng.below(3) as u16);
        match sim.rng.below(3) {
            0 if sim.procs[asker].host != victim => sim.kill_host(victim),
            1 => sim.kill_tasker(victim),
            _ => drop(sim.request(console, migrate_request(tid, "h3"))),
        }
        sim.run_until("an answer", |s| {
            s.procs[asker].replies.contains_key(&asking)
        });
        match &sim.procs[asker].replies[&asking] {
            Reply::MigrationTargets(Ok(survey)) => {
                assert!(survey.verdicts.len() >= 2, "seed {seed}: {survey:?}");
                answered += 1;
            }
            Reply::MigrationTargets(Err(_)) => refused += 1,
            other => panic!("{other:?} (seed {seed})"),
        }
    }
    assert!(
        answered > 100 && refused > 20,
        "{answered} answered, {refused} refused"
    );
}
