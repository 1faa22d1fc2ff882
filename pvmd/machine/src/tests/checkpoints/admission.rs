//! Migrations of tasks while their job is checkpointed.

use super::JobScenario;
use crate::HostId;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, MigrationCause, Refusal};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, RequestId, Tid};

/// True if a checkpoint in progress includes the task and no longer prevents its migration: the
/// task is dumped.
fn is_task_dumped(sim: &Sim, tid: Tid) -> bool {
    let master = sim.nodes[&HostId::MASTER]
        .machine
        .master
        .as_ref()
        .expect("it is the master");
    let snapshots = &master.checkpoints.snapshots;
    snapshots.part_of(tid).is_some() && snapshots.part_that_prevents_migration(tid).is_none()
}

/// True if a checkpoint in progress prevents a migration of the task.
fn is_migration_blocked(sim: &Sim, tid: Tid) -> bool {
    let master = sim.nodes[&HostId::MASTER]
        .machine
        .master
        .as_ref()
        .expect("it is the master");
    master
        .checkpoints
        .snapshots
        .part_that_prevents_migration(tid)
        .is_some()
}

/// True if a migration failed with the refusal [`Refusal::AlreadyMigrating`], as during a
/// checkpoint.
fn is_refused_for_checkpoint(why: &Failure) -> bool {
    matches!(why, Failure::Refused(refusals) if matches!(refusals[..], [Refusal::AlreadyMigrating(_)]))
}

/// Requests the migration of a task to the next of the hosts h1, h2, h3. Returns the request.
fn begin_migration(
    scenario: &mut JobScenario,
    tid: Tid,
    cause: Option<MigrationCause>,
) -> RequestId {
    let host_number = scenario.sim.procs[scenario.sim.proc_of(tid)].host.index();
    let target_name = format!("h{}", host_number % 3 + 1);
    scenario.sim.request(
        scenario.console,
        Request::Migrate {
            tid,
            target: target_name,
            cause,
            wait_for_end: true,
        },
    )
}

fn owner_cause() -> Option<MigrationCause> {
    Some(MigrationCause::Owner {
        why: "olga is there".into(),
    })
}

fn await_reply(scenario: &mut JobScenario, id: RequestId) -> Reply {
    let console = scenario.console;
    scenario.sim.run_until("an answer", |sim| {
        sim.procs[console].replies.contains_key(&id)
    });
    scenario.sim.procs[console].replies[&id].clone()
}

#[test]
fn written_task_may_migrate_before_checkpoint_ends() {
    let mut migrated_count = 0;
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 3, 6);
        scenario.exchange_messages(10);
        let checkpoint_request = scenario.begin_checkpoint(None);
        let tid = scenario.tids[1];
        let console = scenario.console;
        while !is_task_dumped(&scenario.sim, tid)
            && !scenario.sim.procs[console]
                .replies
                .contains_key(&checkpoint_request)
        {
            scenario.sim.step();
        }
        if !is_task_dumped(&scenario.sim, tid) {
            continue;
        }
        let migration_request = begin_migration(&mut scenario, tid, None);
        scenario.exchange_messages(20);
        let reply = await_reply(&mut scenario, migration_request);
        assert!(
            matches!(reply, Reply::Migrated(Ok(_))),
            "seed {seed}: {reply:?}"
        );
        let Reply::Checkpointed(Ok(report)) = await_reply(&mut scenario, checkpoint_request) else {
            panic!("no set (seed {seed})")
        };
        scenario.run_until_all_received();
        migrated_count += 1;
        // The checkpoint is consistent on any hosts on which its tasks run at the end.
        scenario.kill_all_tasks();
        scenario
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
    }
    assert!(migrated_count > 30, "{migrated_count} moved");
}

/// An eviction during a checkpoint succeeds; the checkpoint is then made or fails without effect on
/// the tasks.
#[test]
fn eviction_takes_precedence_over_checkpoint() {
    let (mut blocked_count, mut complete_count) = (0, 0);
    for seed in seeds(150) {
        let mut scenario = JobScenario::new(seed, 3, 5);
        scenario.exchange_messages(5);
        let checkpoint_request = scenario.begin_checkpoint(None);
        let delay = Micros(scenario.sim.rng.below(30_000));
        scenario.sim.advance(delay);
        let tid = scenario.random_task();
        blocked_count += u32::from(is_migration_blocked(&scenario.sim, tid));
        let migration_request = begin_migration(&mut scenario, tid, owner_cause());
        scenario.exchange_messages(5);
        let reply = await_reply(&mut scenario, migration_request);
        assert!(
            matches!(reply, Reply::Migrated(Ok(_))),
            "seed {seed}: {reply:?}"
        );
        let checkpoint_request = await_reply(&mut scenario, checkpoint_request);
        complete_count += u32::from(matches!(checkpoint_request, Reply::Checkpointed(Ok(_))));
        scenario.run_until_all_received();
        scenario.run_until_all_connected();
        assert_eq!(
            scenario.sim.image_store.leftover_counts(),
            (0, 0),
            "seed {seed}"
        );
    }
    assert!(
        blocked_count > 20 && complete_count > 120,
        "{blocked_count} were in the way, {complete_count} sets"
    );
}

/// A migration on a user's request is refused during a checkpoint. If the checkpoint ends the job,
/// evictions are refused, too.
#[test]
fn user_migration_is_refused_during_checkpoint() {
    let (mut user_count, mut owner_count) = (0, 0);
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 3, 5);
        scenario.exchange_messages(5);
        let ends_job = seed % 2 == 0;
        let job = scenario.job_tid();
        let checkpoint_request = scenario.sim.request(
            scenario.console,
            Request::Checkpoint {
                job,
                schedule: None,
                end_job: ends_job,
                wait_for_end: true,
            },
        );
        let tid = scenario.random_task();
        let console = scenario.console;
        while !is_migration_blocked(&scenario.sim, tid) {
            assert!(
                !scenario.sim.procs[console]
                    .replies
                    .contains_key(&checkpoint_request),
                "seed {seed}"
            );
            scenario.sim.step();
        }
        let migration_request =
            begin_migration(&mut scenario, tid, owner_cause().filter(|_| ends_job));
        let Reply::Migrated(Err(error)) = await_reply(&mut scenario, migration_request) else {
            panic!("it moved (seed {seed})")
        };
        if !is_refused_for_checkpoint(&error.failure) {
            // The checkpoint was complete before the request arrived.
            continue;
        }
        *if ends_job {
            &mut owner_count
        } else {
            &mut user_count
        } += 1;
        let checkpoint_request = await_reply(&mut scenario, checkpoint_request);
        assert!(
            matches!(checkpoint_request, Reply::Checkpointed(Ok(_))),
            "seed {seed}: {checkpoint_request:?}"
        );
        let events = crate::tests::scenario::list_events(&mut scenario.sim, console);
        assert!(
            !events
                .iter()
                .any(|event| matches!(event, EventKind::CheckpointFailed { .. })),
            "seed {seed}"
        );
    }
    assert!(
        user_count > 10 && owner_count > 10,
        "{user_count} asked, {owner_count} were leaving"
    );
}

/// A job with a checkpoint schedule is checkpointed before its tasks leave a drained host.
#[test]
fn drain_waits_for_checkpoint() {
    let mut wait_count = 0;
    for seed in seeds(40) {
        let mut scenario = JobScenario::new(seed, 3, 6);
        scenario
            .checkpoint(Some(Micros::from_secs(3600)))
            .expect("the first set");
        scenario.exchange_messages(20);
        let requester = scenario.sim.procs[scenario.console].tid();
        let is_on_h2 = |scenario: &JobScenario, tid: &Tid| {
            scenario.sim.procs[scenario.sim.proc_of(*tid)].host == host(2)
        };
        let tids_on_h2: Vec<Tid> = scenario
            .tids
            .iter()
            .filter(|tid| is_on_h2(&scenario, tid))
            .copied()
            .collect();
        let drain_event = EventKind::DrainStarted {
            host: host(2),
            requested_by: requester,
            deadline: None,
        };
        assert_eq!(
            scenario.sim.ask(
                scenario.console,
                Request::RecordEvent {
                    at: Micros(0),
                    kind: drain_event
                }
            ),
            Reply::Done
        );
        for tid in tids_on_h2 {
            // The resource manager repeats the request in the same way.
            loop {
                let migration_request = begin_migration(
                    &mut scenario,
                    tid,
                    Some(MigrationCause::Drain {
                        requested_by: requester,
                    }),
                );
                match await_reply(&mut scenario, migration_request) {
                    Reply::Migrated(Ok(_)) => break,
                    Reply::Migrated(Err(error)) => {
                        assert!(
                            is_refused_for_checkpoint(&error.failure),
                            "seed {seed}: {error:?}"
                        )
                    }
                    other => panic!("seed {seed}: {other:?}"),
                }
                wait_count += 1;
                scenario.sim.advance(Micros::from_millis(1));
            }
            assert!(
                scenario.sim.image_store.checkpoint_count() == 2
                    || is_task_dumped(&scenario.sim, tid),
                "it left before (seed {seed})"
            );
        }
        scenario
            .sim
            .run_until("the set", |sim| sim.image_store.checkpoint_count() == 2);
        scenario.run_until_all_received();
    }
    assert!(wait_count > 20, "{wait_count} times a task had to wait");
}
