//! Owners' limits for guests while a job is checkpointed and when it is restarted.

use super::*;
use crate::tests::scenario::{limit_guests_request, spawn_on, welcome_guests_request};
use sempa_proto::PvmError;
use sempa_proto::load::GuestLimits;

const HOST_COUNT: u16 = 3;

/// Creates a job and an owner agent on each host. Returns the job and the processes of the owner
/// agents.
fn job_with_owner_agents(seed: u64) -> (JobScenario, Vec<usize>) {
    let mut scenario = JobScenario::new(seed, usize::from(HOST_COUNT), 4);
    let owner_agents = (1..=HOST_COUNT)
        .map(|n| scenario.sim.enrol(host(n)))
        .collect();
    (scenario, owner_agents)
}

fn set_guests_max(scenario: &mut JobScenario, owner_agent: usize, guests_max: u32) {
    let limits = GuestLimits {
        guests_max: Some(guests_max),
        ..GuestLimits::default()
    };
    assert_eq!(
        scenario.sim.ask(owner_agent, limit_guests_request(limits)),
        Reply::Done
    );
}

/// A task that is being dumped for a checkpoint keeps its guest slot.
#[test]
fn task_in_checkpoint_keeps_its_slot() {
    let mut try_count = 0;
    for seed in seeds(20) {
        let (mut scenario, owner_agents) = job_with_owner_agents(seed);
        for (n, owner_agent) in (1..=HOST_COUNT).zip(owner_agents) {
            let is_on_host =
                |tid: &&Tid| scenario.sim.procs[scenario.sim.proc_of(**tid)].host == host(n);
            let task_count = scenario.tids.iter().filter(is_on_host).count();
            set_guests_max(
                &mut scenario,
                owner_agent,
                u32::try_from(task_count).expect("few"),
            );
        }
        let (checkpoint_request, console) = (scenario.begin_checkpoint(None), scenario.console);
        let mut spawn_requests: Vec<RequestId> = Vec::new();
        while !scenario.sim.procs[console]
            .replies
            .contains_key(&checkpoint_request)
        {
            (0..20).for_each(|_| assert!(scenario.sim.step()));
            let host_name = format!("h{}", 1 + spawn_requests.len() % usize::from(HOST_COUNT));
            spawn_requests.push(
                scenario
                    .sim
                    .request(console, Request::Spawn(spawn_on(&host_name, "child", 1))),
            );
        }
        scenario
            .await_checkpoint(checkpoint_request)
            .expect("nothing stands in its way");
        scenario.sim.run_until("all are answered", |s| {
            spawn_requests
                .iter()
                .all(|id| s.procs[console].replies.contains_key(id))
        });
        for id in &spawn_requests {
            let reply = &scenario.sim.procs[console].replies[id];
            assert_eq!(
                *reply,
                Reply::Spawned(vec![Err(PvmError::OutOfRes)]),
                "seed {seed}"
            );
        }
        try_count += spawn_requests.len();
        scenario.run_until_all_connected();
    }
    assert!(try_count > 50, "{try_count} spawns");
}

/// A restart respects the limits of the owners: it fails if the hosts together do not allow all
/// tasks of the job.
#[test]
fn restart_respects_owner_limits() {
    for seed in seeds(20) {
        let (mut scenario, owner_agents) = job_with_owner_agents(seed);
        let checkpoint_name = scenario.checkpoint(None).expect("a set").name;
        scenario.kill_all_tasks();
        for owner_agent in &owner_agents {
            set_guests_max(&mut scenario, *owner_agent, 1);
        }
        let why = scenario
            .restart(&checkpoint_name, &[])
            .expect_err("four tasks have no place on three hosts that take one each");
        assert!(
            why.to_string()
                .contains("its owner allows one task, and one is present"),
            "{why} (seed {seed})"
        );
        // After this time the ended tasks no longer count against a limit.
        scenario.sim.advance(Micros::from_secs(2));
        let spawn_request = SpawnRequest {
            program: "child".into(),
            task_count: 3,
            ..SpawnRequest::default()
        };
        let reply = scenario
            .sim
            .ask(scenario.console, Request::Spawn(spawn_request));
        assert!(
            matches!(&reply, Reply::Spawned(results) if results.iter().all(Result::is_ok)),
            "{reply:?} (seed {seed})"
        );
        assert_eq!(
            scenario.sim.ask(owner_agents[1], welcome_guests_request()),
            Reply::Done
        );
        let task_hosts = scenario
            .restart(&checkpoint_name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(
            task_hosts.iter().all(|(_, host_id)| *host_id == host(2)),
            "{task_hosts:?} (seed {seed})"
        );
        scenario.run_until_all_connected();
    }
}
