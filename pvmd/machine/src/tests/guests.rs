//! Guests are paused while the owner of their host is present.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, list_events, list_tasks, migrate_request, send_numbered, spawn,
    spawn_on, stop_guests, stop_guests_until, welcome_guests, welcome_guests_with,
};
use super::sim::fault_injection::{Fault, LONG_OUTAGE, StepEdge, Victim};
use super::sim::{host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::owner::EvictionMode;
use sempa_proto::task::{Reply, Request, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// Guests pause within the time limit and lose, repeat and reorder no messages, however directives
/// and migrations overlap.
#[test]
fn guests_pause_in_time_and_lose_no_messages() {
    let (mut moved, mut eased) = (0, 0);
    // With seed 1884 a guest is resumed to quiesce for a migration, and the migration is refused
    // meanwhile.
    for seed in seeds(150).chain([1884]) {
        let mut scene = Scenario::with_faults(seed);
        for _ in 0..60 {
            scene.exchange_messages();
            let n = scene.sim.rng.below(3) as usize;
            match scene.sim.rng.below(10) {
                0 | 1 => scene.send_directive(n, stop_guests()),
                2 | 3 => scene.send_directive(n, welcome_guests()),
                4 => scene.migrate_one(),
                _ => {}
            }
            scene.assert_paused();
        }
        moved += scene.finish();
        eased += scene
            .procs
            .iter()
            .map(|p| scene.sim.procs[*p].quiesce_runs)
            .sum::<u64>();
    }
    assert!(
        moved > 100 && eased > 20,
        "{moved} moves, {eased} times one ran for the sake of a move"
    );
}

/// A guest that has quiesced migrates without running on the owner's host.
#[test]
fn quiesced_guest_leaves_without_running() {
    for seed in seeds(100) {
        let mut scene = Scenario::new(seed);
        scene.exchange_messages();
        scene.send_directive(1, stop_guests());
        scene.sim.advance(GUEST_PAUSE_MAX);
        scene.assert_paused();
        let console = scene.console;
        let theirs: Vec<usize> = scene.procs[2..4].to_vec();
        for (p, to) in theirs.iter().zip(["h1", "h3"]) {
            let tid = scene.sim.procs[*p].tid();
            // Messages sent meanwhile follow the task.
            for n in [0, 1, 4, 5] {
                send_numbered(&mut scene.sim, &mut scene.sent_counts, scene.procs[n], tid);
            }
            let done = scene.sim.ask(console, migrate_request(tid, to));
            assert!(
                matches!(done, Reply::Migrated(Ok(_))),
                "{done:?} (seed {seed})"
            );
            assert_eq!(
                scene.sim.procs[*p].quiesce_runs, 0,
                "it never ran there (seed {seed})"
            );
        }
        assert!(theirs.iter().all(|p| scene.sim.procs[*p].host != host(2)));
        assert!(
            list_tasks(&mut scene.sim, console)
                .iter()
                .all(|t| !t.paused && (t.host != host(2) || t.flags & 2 == 0))
        );
        scene.finish();
    }
}

/// A migration in pre-copy is listed as one, and is cancelled when the owner of its target arrives.
#[test]
fn owner_arrival_at_target_cancels_pre_copy() {
    let mut scene = Scenario::new(7);
    let (console, tid) = (scene.console, scene.tids[2]);
    scene.sim.injection.always_live_copies = true;
    // No memory arrives at the target meanwhile.
    scene.sim.plan_fault(
        (Step::PreCopy, StepEdge::Before),
        Victim::SourceTasker,
        Fault::Stop(LONG_OUTAGE),
    );
    let moving = scene.sim.request(console, migrate_request(tid, "h3"));
    scene.sim.run_until("the step", |s| s.injection.triggered);
    let list = list_tasks(&mut scene.sim, console);
    assert!(
        list.iter().all(|t| t.migrating == (t.tid == tid)),
        "{list:?}"
    );
    scene.send_directive(2, stop_guests());
    scene.sim.run_until("the end of the move", |s| {
        s.procs[console].replies.contains_key(&moving)
    });
    let refusal = Refusal::OwnerPresent {
        host: host(3),
        why: "olga is there".into(),
    };
    let Reply::Migrated(Err(error)) = &scene.sim.procs[console].replies[&moving] else {
        panic!("it moved")
    };
    assert_eq!(
        (error.step, &error.why),
        (Step::PreCopy, &Failure::Refused(vec![refusal]))
    );
    scene.send_directive(2, welcome_guests());
    scene.finish();
}

/// The task list, the event log and refusals report that guests are paused, and the reason.
#[test]
fn pause_is_visible_in_list_log_and_refusal() {
    let mut scene = Scenario::new(3);
    let (console, guests) = (scene.console, scene.tids[2..4].to_vec());
    scene.send_directive(1, stop_guests());
    scene.sim.advance(GUEST_PAUSE_MAX);
    let list = list_tasks(&mut scene.sim, console);
    let still: Vec<Tid> = list.iter().filter(|t| t.paused).map(|t| t.tid).collect();
    assert_eq!(still, guests);
    assert!(list.iter().all(|t| !t.migrating));
    let reply = scene.sim.ask(console, migrate_request(scene.tids[0], "h2"));
    let refusal = Refusal::OwnerPresent {
        host: host(2),
        why: "olga is there".into(),
    };
    let Reply::Migrated(Err(error)) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(
        (error.step, error.why),
        (Step::Prepare, Failure::Refused(vec![refusal]))
    );
    scene.send_directive(1, welcome_guests());
    scene.sim.advance(Micros::from_secs(1));
    let told: Vec<EventKind> = list_events(&mut scene.sim, console);
    let took = told.iter().find_map(|kind| match kind {
        EventKind::GuestsPaused {
            host: h,
            guests: g,
            duration: took,
            why,
        } if *h == host(2) && *g == guests => {
            assert_eq!(why, "olga is there");
            Some(*took)
        }
        _ => None,
    });
    assert!(took.expect("in the log") < GUEST_PAUSE_MAX);
    let on = EventKind::GuestsResumed {
        host: host(2),
        guests,
        why: "olga has left".into(),
    };
    assert!(told.contains(&on), "{told:?}");
    scene.finish();
}

#[test]
fn only_owner_agents_may_pause_guests() {
    let mut scene = Scenario::new(5);
    let guest = scene.procs[2];
    let reply = scene.sim.ask(guest, stop_guests());
    assert!(
        matches!(
            reply,
            Reply::Failed {
                error: PvmError::Denied,
                ..
            }
        ),
        "{reply:?}"
    );
    let pinned = spawn(
        &mut scene.sim,
        scene.console,
        SpawnRequest {
            flags: 1 | SPAWN_PINNED,
            ..spawn_on("h2", "child", 1)
        },
    )[0];
    let reply = scene.sim.ask(pinned, stop_guests());
    assert!(
        matches!(
            reply,
            Reply::Failed {
                error: PvmError::Denied,
                ..
            }
        ),
        "what a user pins is a guest: {reply:?}"
    );
    scene.send_directive(1, stop_guests());
    scene.sim.advance(GUEST_PAUSE_MAX);
    assert!(scene.sim.procs[pinned].is_frozen());
    scene.finish();
}

/// Guests are killed at the deadline if the owner wants that.
#[test]
fn guests_are_killed_at_owners_deadline() {
    let mut scene = Scenario::new(6);
    let stubborn = spawn(&mut scene.sim, scene.console, spawn_on("h2", "stubborn", 1))[0];
    let theirs: Vec<usize> = scene.procs[2..4]
        .iter()
        .copied()
        .chain([stubborn])
        .collect();
    let at = scene.sim.now + Micros::from_secs(2);
    scene.send_directive(1, stop_guests_until(Some(at), EvictionMode::Kill));
    scene.sim.advance(Micros::from_secs(1));
    // The owner extends the deadline.
    scene.send_directive(
        1,
        stop_guests_until(Some(at + Micros::from_secs(3)), EvictionMode::Kill),
    );
    scene.sim.advance(Micros::from_secs(2));
    assert!(
        theirs
            .iter()
            .all(|p| scene.sim.procs[*p].is_frozen() && !scene.sim.procs[*p].exited)
    );
    scene.sim.run_until("they have ended", |s| {
        theirs.iter().all(|p| s.procs[*p].exited)
    });
    assert!(scene.sim.now.since(at) < Micros::from_secs(4));
    scene.sim.advance(Micros::from_secs(1));
    let console = scene.console;
    assert!(
        list_events(&mut scene.sim, console)
            .iter()
            .any(|kind| match kind {
                EventKind::GuestsEnded { guests, .. } => guests.len() == 3,
                _ => false,
            })
    );
    assert_eq!(
        list_tasks(&mut scene.sim, console)
            .iter()
            .filter(|t| t.host == host(2) && t.flags & 2 != 0)
            .count(),
        0
    );
}

/// No task is started where guests must be paused; a task that may run anywhere runs elsewhere.
#[test]
fn spawn_avoids_hosts_with_paused_guests() {
    let mut scene = Scenario::new(7);
    scene.send_directive(1, stop_guests());
    let console = scene.console;
    let reply = scene
        .sim
        .ask(console, Request::Spawn(spawn_on("h2", "child", 2)));
    assert_eq!(reply, Reply::Spawned(vec![Err(PvmError::OutOfRes); 2]));
    let anywhere = SpawnRequest {
        file: "child".into(),
        count: 6,
        ..SpawnRequest::default()
    };
    let started = spawn(&mut scene.sim, console, anywhere.clone());
    assert_eq!(started.len(), 6);
    assert!(started.iter().all(|p| scene.sim.procs[*p].host != host(2)));
    for n in [0, 2] {
        scene.send_directive(n, stop_guests());
    }
    let reply = scene.sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            count: 2,
            ..anywhere
        }),
    );
    assert_eq!(reply, Reply::Spawned(vec![Err(PvmError::OutOfRes); 2]));
    scene.finish();
}

/// Returns the hosts of the tasks of a spawn, or the errors.
fn spawn_hosts(scene: &mut Scenario, request: SpawnRequest) -> Vec<Result<u16, PvmError>> {
    let console = scene.console;
    let Reply::Spawned(results) = scene.sim.ask(console, Request::Spawn(request)) else {
        panic!("no answer")
    };
    let host = |sim: &super::sim::Sim, tid: Tid| sim.procs[sim.proc_of(tid)].host.index();
    results
        .into_iter()
        .map(|one| one.map(|tid| host(&scene.sim, tid)))
        .collect()
}

/// A host enforces its owner's limits on tasks and programs without a resource manager.
#[test]
fn host_enforces_owner_limits() {
    let mut scene = Scenario::new(11);
    let limits = GuestLimits {
        guests_max: Some(3),
        programs: vec!["chi*".into()],
        ..GuestLimits::default()
    };
    // Each of the three hosts has two tasks.
    scene.send_directive(
        1,
        welcome_guests_with(GuestLimits {
            programs: Vec::new(),
            ..limits.clone()
        }),
    );
    scene.send_directive(2, welcome_guests_with(limits));
    let anywhere = |count| SpawnRequest {
        file: "child".into(),
        count,
        ..SpawnRequest::default()
    };
    let mut hosts = spawn_hosts(&mut scene, anywhere(6));
    hosts.sort_by_key(|host| host.ok());
    assert_eq!(
        hosts,
        [1, 1, 1, 1, 1, 2].map(Ok),
        "one more on h2, none on h3, the others where there is no limit"
    );
    assert_eq!(
        spawn_hosts(&mut scene, spawn_on("h2", "child", 1)),
        [Err(PvmError::OutOfRes)]
    );
    assert_eq!(
        spawn_hosts(&mut scene, spawn_on("h3", "child", 1)),
        [Err(PvmError::OutOfRes)]
    );
    assert_eq!(
        spawn_hosts(&mut scene, spawn_on("h3", "stubborn", 2)),
        [Ok(3), Err(PvmError::OutOfRes)],
        "this one is not blocked"
    );
    let console = scene.console;
    let told = list_events(&mut scene.sim, console);
    for why in [
        "its owner allows 3 tasks, and they are there",
        "its owner lets nobody run chi*",
    ] {
        let says =
            |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains(why));
        assert!(told.iter().any(says), "{told:?}");
    }
    scene.send_directive(1, welcome_guests());
    assert_eq!(
        spawn_hosts(&mut scene, spawn_on("h2", "child", 1)),
        [Ok(2)],
        "the limit is gone"
    );
}

/// A migration respects the limits of the target's owner, and no task is counted twice.
#[test]
fn migration_respects_owner_limits() {
    let mut scene = Scenario::new(12);
    let (console, first) = (scene.console, scene.tids[0]);
    let refused = |scene: &mut Scenario, why: &str| {
        let reply = scene.sim.ask(console, migrate_request(first, "h2"));
        let refusal = Refusal::OwnerLimits {
            host: host(2),
            why: why.into(),
        };
        let Reply::Migrated(Err(error)) = reply else {
            panic!("{reply:?}")
        };
        assert_eq!(
            (error.step, error.why),
            (Step::Prepare, Failure::Refused(vec![refusal]))
        );
    };
    scene.send_directive(
        1,
        welcome_guests_with(GuestLimits {
            guests_max: Some(2),
            ..GuestLimits::default()
        }),
    );
    refused(&mut scene, "its owner allows 2 tasks, and they are there");
    scene.send_directive(
        1,
        welcome_guests_with(GuestLimits {
            programs: vec!["child".into()],
            ..GuestLimits::default()
        }),
    );
    refused(&mut scene, "its owner lets nobody run child");
    scene.send_directive(
        1,
        welcome_guests_with(GuestLimits {
            guests_max: Some(3),
            ..GuestLimits::default()
        }),
    );
    assert!(
        matches!(
            scene.sim.ask(console, migrate_request(first, "h2")),
            Reply::Migrated(Ok(_))
        ),
        "there is room for one"
    );
    assert_eq!(
        spawn_hosts(&mut scene, spawn_on("h2", "child", 1)),
        [Err(PvmError::OutOfRes)],
        "not for two"
    );
    assert!(matches!(
        scene.sim.ask(console, migrate_request(first, "h3")),
        Reply::Migrated(Ok(_))
    ));
    assert_eq!(
        spawn_hosts(&mut scene, spawn_on("h2", "child", 1)),
        [Ok(2)],
        "one has left"
    );
    scene.finish();
}

/// Exits of guests, taskers and hosts during a pause are reported once.
#[test]
fn exits_during_pause_are_reported_once() {
    let (mut ends, mut taskers) = (0, 0);
    for seed in seeds(200) {
        let mut scene = Scenario::with_exit_notification(seed);
        scene.send_directive(1, stop_guests());
        scene.wait_randomly(60_000);
        match scene.sim.rng.below(3) {
            0 => {
                // A migration may have moved the task, but this is its end on any host.
                let victim = scene.procs[2];
                scene.sim.exit(victim, 9);
                ends += 1;
            }
            1 => {
                scene.sim.kill_tasker(host(2));
                taskers += 1;
            }
            _ => scene.sim.kill_host(host(2)),
        }
        scene.assert_exits_reported_once();
        if scene.sim.nodes[&host(2)].is_alive {
            scene.send_directive(1, welcome_guests());
            scene.assert_all_run();
        }
    }
    assert!(ends > 20 && taskers > 20, "{ends} ends, {taskers} taskers");
}
