//! Limits that owners set for guests, while a job is checkpointed and when it is restarted.

use super::*;
use crate::tests::scenario::{spawn_on, welcome_guests, welcome_guests_with};
use sempa_proto::PvmError;
use sempa_proto::load::GuestLimits;

const HOSTS: u16 = 3;

/// Creates a job, and an owner agent on each host. Returns also the processes of the owner agents.
fn job_with_owner_agents(seed: u64) -> (JobScenario, Vec<usize>) {
    let mut scene = JobScenario::new(seed, usize::from(HOSTS), 4);
    let speakers = (1..=HOSTS).map(|n| scene.sim.enrol(host(n))).collect();
    (scene, speakers)
}

fn set_core_limit(scene: &mut JobScenario, agent: usize, core_limit: u32) {
    let limits = GuestLimits {
        guests_max: Some(core_limit),
        ..GuestLimits::default()
    };
    assert_eq!(
        scene.sim.ask(agent, welcome_guests_with(limits)),
        Reply::Done
    );
}

/// A task that is being dumped for a checkpoint keeps its guest slot.
#[test]
fn task_in_checkpoint_keeps_its_slot() {
    let mut tried = 0;
    for seed in seeds(20) {
        let (mut scene, speakers) = job_with_owner_agents(seed);
        for (n, speaker) in (1..=HOSTS).zip(speakers) {
            let there = |tid: &&Tid| scene.sim.procs[scene.sim.proc_of(**tid)].host == host(n);
            let most = scene.tids.iter().filter(there).count();
            set_core_limit(&mut scene, speaker, u32::try_from(most).expect("few"));
        }
        let (asked, console) = (scene.begin_checkpoint(None), scene.console);
        let mut spawns: Vec<RequestId> = Vec::new();
        while !scene.sim.procs[console].replies.contains_key(&asked) {
            (0..20).for_each(|_| assert!(scene.sim.step()));
            let at = format!("h{}", 1 + spawns.len() % usize::from(HOSTS));
            spawns.push(
                scene
                    .sim
                    .request(console, Request::Spawn(spawn_on(&at, "child", 1))),
            );
        }
        scene
            .await_checkpoint(asked)
            .expect("nothing stands in its way");
        scene.sim.run_until("all are answered", |s| {
            spawns
                .iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        for id in &spawns {
            let reply = &scene.sim.procs[console].replies[id];
            assert_eq!(
                *reply,
                Reply::Spawned(vec![Err(PvmError::OutOfRes)]),
                "seed {seed}"
            );
        }
        tried += spawns.len();
        scene.run_until_all_connected();
    }
    assert!(tried > 50, "{tried} spawns");
}

/// A job is restarted only on hosts whose owners allow all of its tasks.
#[test]
fn restart_respects_owner_limits() {
    for seed in seeds(20) {
        let (mut scene, speakers) = job_with_owner_agents(seed);
        let set = scene.checkpoint(None).expect("a set").name;
        scene.kill_all();
        for speaker in &speakers {
            set_core_limit(&mut scene, *speaker, 1);
        }
        let why = scene
            .restart(&set, &[])
            .expect_err("four tasks have no place on three hosts that take one each");
        assert!(
            why.to_string()
                .contains("its owner allows one task, and one is present"),
            "{why} (seed {seed})"
        );
        // After this time no part of the job counts against a limit.
        scene.sim.advance(Micros::from_secs(2));
        let three = SpawnRequest {
            file: "child".into(),
            count: 3,
            ..SpawnRequest::default()
        };
        let reply = scene.sim.ask(scene.console, Request::Spawn(three));
        assert!(
            matches!(&reply, Reply::Spawned(all) if all.iter().all(Result::is_ok)),
            "{reply:?} (seed {seed})"
        );
        assert_eq!(scene.sim.ask(speakers[1], welcome_guests()), Reply::Done);
        let places = scene
            .restart(&set, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            places.iter().all(|(_, at)| *at == host(2)),
            "{places:?} (seed {seed})"
        );
        scene.run_until_all_connected();
    }
}
