//! Tasks that migrate while their job is checkpointed.

use super::JobScenario;
use crate::HostId;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, MigrationCause, Refusal};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, RequestId, Tid};

/// True if the task is dumped and the checkpoint of its job is not complete.
fn is_written(sim: &Sim, tid: Tid) -> bool {
    let master = sim.nodes[&HostId::MASTER]
        .machine
        .master
        .as_ref()
        .expect("it is the master");
    let cuts = &master.checkpoints.snapshots;
    cuts.part_of(tid).is_some() && cuts.part_that_prevents_migration(tid).is_none()
}

/// True if a checkpoint in progress prevents a migration of the task.
fn may_not_migrate(sim: &Sim, tid: Tid) -> bool {
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

/// True if the migration was refused because of a checkpoint.
fn refused_for_checkpoint(why: &Failure) -> bool {
    matches!(why, Failure::Refused(all) if matches!(all[..], [Refusal::AlreadyMigrating(_)]))
}

/// Requests the migration of a task to another host.
fn begin_migration(scene: &mut JobScenario, tid: Tid, cause: Option<MigrationCause>) -> RequestId {
    let at = scene.sim.procs[scene.sim.proc_of(tid)].host.index();
    let to = format!("h{}", at % 3 + 1);
    scene.sim.request(
        scene.console,
        Request::Migrate {
            tid,
            to,
            cause,
            wait: true,
        },
    )
}

fn owner_cause() -> Option<MigrationCause> {
    Some(MigrationCause::Owner {
        why: "olga is there".into(),
    })
}

fn await_reply(scene: &mut JobScenario, id: RequestId) -> Reply {
    let console = scene.console;
    scene.sim.run_until("an answer", |sim| {
        sim.procs[console].replies.contains_key(&id)
    });
    scene.sim.procs[console].replies[&id].clone()
}

/// A task that is dumped may migrate before the checkpoint of its job is complete.
#[test]
fn written_task_may_migrate_before_checkpoint_ends() {
    let mut moved = 0;
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 3, 6);
        scene.exchange_messages(10);
        let set = scene.begin_checkpoint(None);
        let tid = scene.tids[1];
        let console = scene.console;
        while !is_written(&scene.sim, tid) && !scene.sim.procs[console].replies.contains_key(&set) {
            scene.sim.step();
        }
        if !is_written(&scene.sim, tid) {
            continue;
        }
        let moving = begin_migration(&mut scene, tid, None);
        scene.exchange_messages(20);
        let reply = await_reply(&mut scene, moving);
        assert!(
            matches!(reply, Reply::Migrated(Ok(_))),
            "seed {seed}: {reply:?}"
        );
        let Reply::Checkpointed(Ok(report)) = await_reply(&mut scene, set) else {
            panic!("no set (seed {seed})")
        };
        scene.run_until_all_received();
        moved += 1;
        // The checkpoint is consistent, wherever its tasks run at the end.
        scene.kill_all();
        scene
            .restart(&report.name, &[])
            .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        scene.run_until_all_connected();
        scene.run_until_all_received();
    }
    assert!(moved > 30, "{moved} moved");
}

/// A task that an owner evicts migrates during a checkpoint, and the checkpoint is made afterwards.
#[test]
fn eviction_takes_precedence_over_checkpoint() {
    let (mut in_the_way, mut sets) = (0, 0);
    for seed in seeds(150) {
        let mut scene = JobScenario::new(seed, 3, 5);
        scene.exchange_messages(5);
        let set = scene.begin_checkpoint(None);
        let wait = Micros(scene.sim.rng.below(30_000));
        scene.sim.advance(wait);
        let tid = scene.random_task();
        in_the_way += u32::from(may_not_migrate(&scene.sim, tid));
        let moving = begin_migration(&mut scene, tid, owner_cause());
        scene.exchange_messages(5);
        let reply = await_reply(&mut scene, moving);
        assert!(
            matches!(reply, Reply::Migrated(Ok(_))),
            "seed {seed}: {reply:?}"
        );
        let set = await_reply(&mut scene, set);
        sets += u32::from(matches!(set, Reply::Checkpointed(Ok(_))));
        scene.run_until_all_received();
        scene.run_until_all_connected();
        assert_eq!(scene.sim.image_store.leftovers(), (0, 0), "seed {seed}");
    }
    assert!(
        in_the_way > 20 && sets > 120,
        "{in_the_way} were in the way, {sets} sets"
    );
}

/// A migration requested by a user is refused during a checkpoint; so is an eviction when the job
/// ends with the checkpoint.
#[test]
fn user_migration_is_refused_during_checkpoint() {
    let (mut asked, mut parting) = (0, 0);
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 3, 5);
        scene.exchange_messages(5);
        let ends = seed % 2 == 0;
        let job = scene.job();
        let set = scene.sim.request(
            scene.console,
            Request::Checkpoint {
                job,
                schedule: None,
                end_job: ends,
                wait: true,
            },
        );
        let tid = scene.random_task();
        let console = scene.console;
        while !may_not_migrate(&scene.sim, tid) {
            assert!(
                !scene.sim.procs[console].replies.contains_key(&set),
                "seed {seed}"
            );
            scene.sim.step();
        }
        let moving = begin_migration(&mut scene, tid, owner_cause().filter(|_| ends));
        let Reply::Migrated(Err(error)) = await_reply(&mut scene, moving) else {
            panic!("it moved (seed {seed})")
        };
        if !refused_for_checkpoint(&error.why) {
            // The request arrived when the checkpoint was complete.
            continue;
        }
        *if ends { &mut parting } else { &mut asked } += 1;
        let set = await_reply(&mut scene, set);
        assert!(
            matches!(set, Reply::Checkpointed(Ok(_))),
            "seed {seed}: {set:?}"
        );
        let events = crate::tests::scenario::list_events(&mut scene.sim, console);
        assert!(
            !events
                .iter()
                .any(|kind| matches!(kind, EventKind::CheckpointFailed { .. })),
            "seed {seed}"
        );
    }
    assert!(
        asked > 10 && parting > 10,
        "{asked} asked, {parting} were leaving"
    );
}

/// A job with a checkpoint schedule is checkpointed before its tasks leave a drained host.
#[test]
fn drain_waits_for_checkpoint() {
    let mut waited = 0;
    for seed in seeds(40) {
        let mut scene = JobScenario::new(seed, 3, 6);
        scene
            .checkpoint(Some(Micros::from_secs(3600)))
            .expect("the first set");
        scene.exchange_messages(20);
        let by = scene.sim.procs[scene.console].tid();
        let on_h2 = |scene: &JobScenario, tid: &Tid| {
            scene.sim.procs[scene.sim.proc_of(*tid)].host == host(2)
        };
        let there: Vec<Tid> = scene
            .tids
            .iter()
            .filter(|tid| on_h2(&scene, tid))
            .copied()
            .collect();
        let begun = EventKind::DrainStarted {
            host: host(2),
            requested_by: by,
            deadline: None,
        };
        assert_eq!(
            scene.sim.ask(
                scene.console,
                Request::RecordEvent {
                    at: Micros(0),
                    kind: begun
                }
            ),
            Reply::Done
        );
        for tid in there {
            // Repeats the request as the resource manager does.
            loop {
                let moving = begin_migration(
                    &mut scene,
                    tid,
                    Some(MigrationCause::Drain { requested_by: by }),
                );
                match await_reply(&mut scene, moving) {
                    Reply::Migrated(Ok(_)) => break,
                    Reply::Migrated(Err(error)) => {
                        assert!(refused_for_checkpoint(&error.why), "seed {seed}: {error:?}")
                    }
                    other => panic!("seed {seed}: {other:?}"),
                }
                waited += 1;
                scene.sim.advance(Micros::from_millis(1));
            }
            assert!(
                scene.sim.image_store.count() == 2 || is_written(&scene.sim, tid),
                "it left before (seed {seed})"
            );
        }
        scene
            .sim
            .run_until("the set", |sim| sim.image_store.count() == 2);
        scene.run_until_all_received();
    }
    assert!(waited > 20, "{waited} times a task had to wait");
}
