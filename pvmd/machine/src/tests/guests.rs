//! Pauses of guests while the owner of their host is present.

use super::scenario::{
    GUEST_PAUSE_MAX, Scenario, evict_guests_request, limit_guests_request, list_events, list_tasks,
    migrate_request, send_number_if_running, spawn, spawn_on, stop_guests_request,
    welcome_guests_request,
};
use super::sim::fault_injection::{Fault, LONG_OUTAGE, StepEdge, Victim};
use super::sim::{host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::load::GuestLimits;
use sempa_proto::migration::{Failure, Refusal, Step};
use sempa_proto::owner::EvictionMode;
use sempa_proto::task::{Reply, Request, SPAWN_PINNED, SpawnRequest};
use sempa_proto::{Micros, PvmError, Tid};

/// Guests pause within the time limit, and no message is lost, repeated or reordered, even if
/// directives and migrations overlap.
#[test]
fn guests_pause_in_time_and_lose_no_messages() {
    let (mut migrated_count, mut quiesce_run_count) = (0, 0);
    // With seed 1884, a guest is resumed to quiesce for a migration, and the migration is refused
    // before the guest has quiesced.
    for seed in seeds(150).chain([1884]) {
        let mut scenario = Scenario::with_faults(seed);
        for _ in 0..60 {
            scenario.exchange_messages();
            let n = scenario.sim.rng.below(3) as usize;
            match scenario.sim.rng.below(10) {
                0 | 1 => scenario.send_directive(n, stop_guests_request()),
                2 | 3 => scenario.send_directive(n, welcome_guests_request()),
                4 => scenario.request_random_migration(),
                _ => {}
            }
            scenario.assert_paused();
        }
        migrated_count += scenario.resume_all_and_check();
        quiesce_run_count += scenario
            .procs
            .iter()
            .map(|p| scenario.sim.procs[*p].quiesce_runs)
            .sum::<u64>();
    }
    assert!(
        migrated_count > 100 && quiesce_run_count > 20,
        "{migrated_count} moves, {quiesce_run_count} times one ran for the sake of a move"
    );
}

/// A guest that has quiesced migrates without running on the owner's host.
#[test]
fn quiesced_guest_leaves_without_running() {
    for seed in seeds(100) {
        let mut scenario = Scenario::new(seed);
        scenario.exchange_messages();
        scenario.send_directive(1, stop_guests_request());
        scenario.sim.advance(GUEST_PAUSE_MAX);
        scenario.assert_paused();
        let console = scenario.console;
        let guest_procs: Vec<usize> = scenario.procs[2..4].to_vec();
        for (p, target_name) in guest_procs.iter().zip(["h1", "h3"]) {
            let tid = scenario.sim.procs[*p].tid();
            // Messages that are sent before the migration arrive at the target.
            for n in [0, 1, 4, 5] {
                send_number_if_running(
                    &mut scenario.sim,
                    &mut scenario.sent_counts,
                    scenario.procs[n],
                    tid,
                );
            }
            let migration_reply = scenario.sim.ask(console, migrate_request(tid, target_name));
            assert!(
                matches!(migration_reply, Reply::Migrated(Ok(_))),
                "{migration_reply:?} (seed {seed})"
            );
            assert_eq!(
                scenario.sim.procs[*p].quiesce_runs, 0,
                "it never ran there (seed {seed})"
            );
        }
        assert!(
            guest_procs
                .iter()
                .all(|p| scenario.sim.procs[*p].host != host(2))
        );
        assert!(
            list_tasks(&mut scenario.sim, console)
                .iter()
                .all(|t| !t.paused && (t.host != host(2) || t.flags & 2 == 0))
        );
        scenario.resume_all_and_check();
    }
}

/// The task list shows a migration in pre-copy. The migration is cancelled when the owner of its
/// target arrives.
#[test]
fn owner_arrival_at_target_cancels_pre_copy() {
    let mut scenario = Scenario::new(7);
    let (console, tid) = (scenario.console, scenario.tids[2]);
    scenario.sim.injection.always_live_copies = true;
    // The fault stops the transfer, so no memory arrives at the target for the time of the test.
    scenario.sim.plan_fault(
        (Step::PreCopy, StepEdge::Start),
        Victim::SourceTasker,
        Fault::Stop(LONG_OUTAGE),
    );
    let migration_request = scenario.sim.request(console, migrate_request(tid, "h3"));
    scenario
        .sim
        .run_until("the step", |s| s.injection.has_triggered);
    let tasks = list_tasks(&mut scenario.sim, console);
    assert!(
        tasks.iter().all(|t| t.migrating == (t.tid == tid)),
        "{tasks:?}"
    );
    scenario.send_directive(2, stop_guests_request());
    scenario.sim.run_until("the end of the move", |s| {
        s.procs[console].replies.contains_key(&migration_request)
    });
    let refusal = Refusal::OwnerPresent {
        host: host(3),
        why: "olga is there".into(),
    };
    let Reply::Migrated(Err(error)) = &scenario.sim.procs[console].replies[&migration_request]
    else {
        panic!("it moved")
    };
    assert_eq!(
        (error.step, &error.failure),
        (Step::PreCopy, &Failure::Refused(vec![refusal]))
    );
    scenario.send_directive(2, welcome_guests_request());
    scenario.resume_all_and_check();
}

/// The task list, the event log and refusals report that guests are paused, and why.
#[test]
fn pause_is_visible_in_list_log_and_refusal() {
    let mut scenario = Scenario::new(3);
    let (console, guests) = (scenario.console, scenario.tids[2..4].to_vec());
    scenario.send_directive(1, stop_guests_request());
    scenario.sim.advance(GUEST_PAUSE_MAX);
    let tasks = list_tasks(&mut scenario.sim, console);
    let paused_tids: Vec<Tid> = tasks.iter().filter(|t| t.paused).map(|t| t.tid).collect();
    assert_eq!(paused_tids, guests);
    assert!(tasks.iter().all(|t| !t.migrating));
    let reply = scenario
        .sim
        .ask(console, migrate_request(scenario.tids[0], "h2"));
    let refusal = Refusal::OwnerPresent {
        host: host(2),
        why: "olga is there".into(),
    };
    let Reply::Migrated(Err(error)) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(
        (error.step, error.failure),
        (Step::Prepare, Failure::Refused(vec![refusal]))
    );
    scenario.send_directive(1, welcome_guests_request());
    scenario.sim.advance(Micros::from_secs(1));
    let events: Vec<EventKind> = list_events(&mut scenario.sim, console);
    let duration = events.iter().find_map(|event| match event {
        EventKind::GuestsPaused {
            host: event_host,
            guests: event_guests,
            duration,
            why,
            ..
        } if *event_host == host(2) && *event_guests == guests => {
            assert_eq!(why, "olga is there");
            Some(*duration)
        }
        _ => None,
    });
    assert!(duration.expect("in the log") < GUEST_PAUSE_MAX);
    let resumed_event = EventKind::GuestsResumed {
        host: host(2),
        guests,
        why: "olga has left".into(),
    };
    assert!(events.contains(&resumed_event), "{events:?}");
    scenario.resume_all_and_check();
}

#[test]
fn only_owner_agents_may_pause_guests() {
    let mut scenario = Scenario::new(5);
    let guest = scenario.procs[2];
    let reply = scenario.sim.ask(guest, stop_guests_request());
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
    let pinned_proc = spawn(
        &mut scenario.sim,
        scenario.console,
        SpawnRequest {
            flags: 1 | SPAWN_PINNED,
            ..spawn_on("h2", "child", 1)
        },
    )[0];
    let reply = scenario.sim.ask(pinned_proc, stop_guests_request());
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
    scenario.send_directive(1, stop_guests_request());
    scenario.sim.advance(GUEST_PAUSE_MAX);
    assert!(scenario.sim.procs[pinned_proc].is_frozen());
    scenario.resume_all_and_check();
}

/// Guests are killed at the deadline if the owner's directive requires that.
#[test]
fn guests_are_killed_at_owners_deadline() {
    let mut scenario = Scenario::new(6);
    let stubborn_proc = spawn(
        &mut scenario.sim,
        scenario.console,
        spawn_on("h2", "stubborn", 1),
    )[0];
    let guest_procs: Vec<usize> = scenario.procs[2..4]
        .iter()
        .copied()
        .chain([stubborn_proc])
        .collect();
    let deadline = scenario.sim.now + Micros::from_secs(2);
    scenario.send_directive(1, evict_guests_request(Some(deadline), EvictionMode::Kill));
    scenario.sim.advance(Micros::from_secs(1));
    // The owner extends the deadline by 3 s.
    scenario.send_directive(
        1,
        evict_guests_request(Some(deadline + Micros::from_secs(3)), EvictionMode::Kill),
    );
    scenario.sim.advance(Micros::from_secs(2));
    assert!(
        guest_procs
            .iter()
            .all(|p| scenario.sim.procs[*p].is_frozen() && !scenario.sim.procs[*p].exited)
    );
    scenario.sim.run_until("they have ended", |s| {
        guest_procs.iter().all(|p| s.procs[*p].exited)
    });
    assert!(scenario.sim.now.since(deadline) < Micros::from_secs(4));
    scenario.sim.advance(Micros::from_secs(1));
    let console = scenario.console;
    assert!(
        list_events(&mut scenario.sim, console)
            .iter()
            .any(|event| match event {
                EventKind::GuestsEnded { guests, .. } => guests.len() == 3,
                _ => false,
            })
    );
    assert_eq!(
        list_tasks(&mut scenario.sim, console)
            .iter()
            .filter(|t| t.host == host(2) && t.flags & 2 != 0)
            .count(),
        0
    );
}

/// No task is started on a host where guests must be paused. A task that may run on any host is
/// started on another host.
#[test]
fn spawn_avoids_hosts_with_paused_guests() {
    let mut scenario = Scenario::new(7);
    scenario.send_directive(1, stop_guests_request());
    let console = scenario.console;
    let reply = scenario
        .sim
        .ask(console, Request::Spawn(spawn_on("h2", "child", 2)));
    assert_eq!(reply, Reply::Spawned(vec![Err(PvmError::OutOfRes); 2]));
    let request = SpawnRequest {
        program: "child".into(),
        task_count: 6,
        ..SpawnRequest::default()
    };
    let started_procs = spawn(&mut scenario.sim, console, request.clone());
    assert_eq!(started_procs.len(), 6);
    assert!(
        started_procs
            .iter()
            .all(|p| scenario.sim.procs[*p].host != host(2))
    );
    for n in [0, 2] {
        scenario.send_directive(n, stop_guests_request());
    }
    let reply = scenario.sim.ask(
        console,
        Request::Spawn(SpawnRequest {
            task_count: 2,
            ..request
        }),
    );
    assert_eq!(reply, Reply::Spawned(vec![Err(PvmError::OutOfRes); 2]));
    scenario.resume_all_and_check();
}

/// Returns the host index or the error of each task of a spawn.
fn spawn_hosts(scenario: &mut Scenario, request: SpawnRequest) -> Vec<Result<u16, PvmError>> {
    let console = scenario.console;
    let Reply::Spawned(results) = scenario.sim.ask(console, Request::Spawn(request)) else {
        panic!("no answer")
    };
    let host_index = |sim: &super::sim::Sim, tid: Tid| sim.procs[sim.proc_of(tid)].host.index();
    results
        .into_iter()
        .map(|result| result.map(|tid| host_index(&scenario.sim, tid)))
        .collect()
}

/// Without a resource manager, a host enforces its owner's limits on tasks and programs.
#[test]
fn host_enforces_owner_limits() {
    let mut scenario = Scenario::new(11);
    let limits = GuestLimits {
        guests_max: Some(3),
        blocked_programs: vec!["chi*".into()],
        ..GuestLimits::default()
    };
    // Each of the three hosts has two tasks.
    scenario.send_directive(
        1,
        limit_guests_request(GuestLimits {
            blocked_programs: Vec::new(),
            ..limits.clone()
        }),
    );
    scenario.send_directive(2, limit_guests_request(limits));
    let spawn_request = |count| SpawnRequest {
        program: "child".into(),
        task_count: count,
        ..SpawnRequest::default()
    };
    let mut hosts = spawn_hosts(&mut scenario, spawn_request(6));
    hosts.sort_by_key(|host| host.ok());
    assert_eq!(
        hosts,
        [1, 1, 1, 1, 1, 2].map(Ok),
        "one more on h2, none on h3, the others where there is no limit"
    );
    assert_eq!(
        spawn_hosts(&mut scenario, spawn_on("h2", "child", 1)),
        [Err(PvmError::OutOfRes)]
    );
    assert_eq!(
        spawn_hosts(&mut scenario, spawn_on("h3", "child", 1)),
        [Err(PvmError::OutOfRes)]
    );
    assert_eq!(
        spawn_hosts(&mut scenario, spawn_on("h3", "stubborn", 2)),
        [Ok(3), Err(PvmError::OutOfRes)],
        "this one is not blocked"
    );
    let console = scenario.console;
    let events = list_events(&mut scenario.sim, console);
    for why in [
        "its owner allows 3 tasks, and as many are present",
        "its owner does not allow chi*",
    ] {
        let names_reason = |event: &EventKind| matches!(event, EventKind::SpawnRefused { why: text, .. } if text.contains(why));
        assert!(events.iter().any(names_reason), "{events:?}");
    }
    scenario.send_directive(1, welcome_guests_request());
    assert_eq!(
        spawn_hosts(&mut scenario, spawn_on("h2", "child", 1)),
        [Ok(2)],
        "the limit is gone"
    );
}

/// A migration respects the limits of the target's owner. No task counts twice against a limit.
#[test]
fn migration_respects_owner_limits() {
    let mut scenario = Scenario::new(12);
    let (console, migrating_tid) = (scenario.console, scenario.tids[0]);
    let assert_refused = |scenario: &mut Scenario, why: &str| {
        let reply = scenario
            .sim
            .ask(console, migrate_request(migrating_tid, "h2"));
        let refusal = Refusal::OwnerLimits {
            host: host(2),
            why: why.into(),
        };
        let Reply::Migrated(Err(error)) = reply else {
            panic!("{reply:?}")
        };
        assert_eq!(
            (error.step, error.failure),
            (Step::Prepare, Failure::Refused(vec![refusal]))
        );
    };
    scenario.send_directive(
        1,
        limit_guests_request(GuestLimits {
            guests_max: Some(1),
            other_guests: 1,
            ..GuestLimits::default()
        }),
    );
    assert_refused(
        &mut scenario,
        "its owner allows 2 tasks, and as many are present",
    );
    scenario.send_directive(
        1,
        limit_guests_request(GuestLimits {
            blocked_programs: vec!["child".into()],
            ..GuestLimits::default()
        }),
    );
    assert_refused(&mut scenario, "its owner does not allow child");
    scenario.send_directive(
        1,
        limit_guests_request(GuestLimits {
            guests_max: Some(3),
            ..GuestLimits::default()
        }),
    );
    assert!(
        matches!(
            scenario
                .sim
                .ask(console, migrate_request(migrating_tid, "h2")),
            Reply::Migrated(Ok(_))
        ),
        "there is room for one"
    );
    assert_eq!(
        spawn_hosts(&mut scenario, spawn_on("h2", "child", 1)),
        [Err(PvmError::OutOfRes)],
        "not for two"
    );
    assert!(matches!(
        scenario
            .sim
            .ask(console, migrate_request(migrating_tid, "h3")),
        Reply::Migrated(Ok(_))
    ));
    assert_eq!(
        spawn_hosts(&mut scenario, spawn_on("h2", "child", 1)),
        [Ok(2)],
        "one has left"
    );
    scenario.resume_all_and_check();
}

/// Exits of guests, and the loss of their tasker or host during a pause, are reported once.
#[test]
fn exits_during_pause_are_reported_once() {
    let (mut exit_count, mut tasker_kill_count) = (0, 0);
    for seed in seeds(200) {
        let mut scenario = Scenario::with_exit_notification(seed);
        scenario.send_directive(1, stop_guests_request());
        scenario.wait_and_maybe_migrate(60_000);
        match scenario.sim.rng.below(3) {
            0 => {
                // The process ends on the host where it runs; it may have migrated before.
                let victim = scenario.procs[2];
                scenario.sim.exit_proc(victim, 9);
                exit_count += 1;
            }
            1 => {
                scenario.sim.kill_tasker(host(2));
                tasker_kill_count += 1;
            }
            _ => scenario.sim.kill_host(host(2)),
        }
        scenario.assert_exits_reported_once();
        if scenario.sim.nodes[&host(2)].is_alive {
            scenario.send_directive(1, welcome_guests_request());
            scenario.assert_all_run();
        }
    }
    assert!(
        exit_count > 20 && tasker_kill_count > 20,
        "{exit_count} ends, {tasker_kill_count} taskers"
    );
}
