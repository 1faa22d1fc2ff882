//! Jobs that run, or shall run, in another virtual machine with the same store.

use super::{JobScenario, is_listed};
use crate::tests::scenario::list_events;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::Micros;
use sempa_proto::checkpoint::{CheckpointSchedule, JobHolder, RestartFailure};
use sempa_proto::event::EventKind;
use sempa_proto::task::{Reply, Request};

fn other_holder() -> JobHolder {
    JobHolder {
        vm: "other".into(),
        host: "h9".into(),
        user: "root".into(),
        pid: 7,
        since: Micros(0),
    }
}

/// A job that another virtual machine has restarted is ended here, at any moment of its
/// checkpoints, and is neither checkpointed nor rolled back any more. Other tasks continue.
#[test]
fn taken_over_job_is_ended() {
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 4, 6);
        let bystander = super::spawn_children(&mut scenario.sim, scenario.console, 1)[0];
        scenario
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = scenario.sim.rng.below(400);
        scenario.exchange_messages(rounds);
        let job = scenario.job_tid();
        let is_waiting = seed % 2 == 0;
        let request = is_waiting.then(|| scenario.begin_checkpoint(None));
        let delay = Micros(scenario.sim.rng.below(100_000));
        scenario.sim.advance(delay);
        scenario.sim.take_over_job(job, other_holder());
        scenario.run_until_all_ended();
        scenario.sim.kill_host(host(3));
        scenario.sim.advance(Micros::from_secs(30));
        for tid in scenario.tids.clone() {
            assert!(!is_listed(&scenario.sim, tid), "{tid} runs (seed {seed})");
        }
        if scenario.sim.procs[scenario.sim.proc_of(bystander)].host != host(3) {
            assert!(is_listed(&scenario.sim, bystander), "seed {seed}");
        }
        assert_eq!(
            scenario.sim.image_store.leftover_counts(),
            (0, 0),
            "seed {seed}"
        );
        if let Some(request) = request {
            let replies = &scenario.sim.procs[scenario.console].replies;
            assert!(replies.contains_key(&request), "seed {seed}");
        }
        let events = list_events(&mut scenario.sim, scenario.console);
        let is_take_over = |event: &&EventKind| matches!(event, EventKind::JobTakenOver { .. });
        assert_eq!(events.iter().filter(is_take_over).count(), 1, "seed {seed}");
        let is_restart = |event: &EventKind| matches!(event, EventKind::Restarted { .. });
        assert!(!events.iter().any(is_restart), "seed {seed}");
    }
}

/// A restart of a job that runs elsewhere is refused with the other virtual machine. Nothing of it
/// runs, and the claim is not kept.
#[test]
fn restart_of_job_that_runs_elsewhere_is_refused() {
    for seed in seeds(10) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let checkpoint = scenario.checkpoint(None);
        let name = checkpoint
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        scenario.kill_all_tasks();
        scenario.sim.image_store.other_holder = Some(other_holder());
        let process_count = scenario.sim.procs.len();
        let failure = scenario.restart(&name, &[]).expect_err("it runs elsewhere");
        assert!(
            matches!(&failure, RestartFailure::RunsElsewhere { holder, .. } if *holder == other_holder()),
            "{failure}"
        );
        assert_eq!(scenario.sim.procs.len(), process_count, "seed {seed}");
        assert!(
            scenario.sim.image_store.claimed_jobs.is_empty(),
            "seed {seed}"
        );
        let request = Request::Restart {
            checkpoint: name,
            host_names: Vec::new(),
            wait_for_end: true,
            force: true,
        };
        let reply = scenario.sim.ask(scenario.console, request);
        assert!(matches!(&reply, Reply::Restarted(Ok(_))), "{reply:?}");
        scenario.run_until_all_connected();
    }
}

/// The store has a claim exactly while a job with checkpoints runs or shall run again.
#[test]
fn claim_is_kept_while_the_job_runs() {
    let has_claim = |sim: &Sim, job| sim.image_store.claimed_jobs.contains(&job);
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 4, 4);
        let job = scenario.job_tid();
        let checkpoint = scenario.checkpoint(Some(Micros::from_secs(1000)));
        let name = checkpoint
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        assert!(has_claim(&scenario.sim, job), "seed {seed}");
        // A rollback keeps the claim.
        let process_count = scenario.sim.procs.len();
        scenario.sim.kill_host(host(3));
        scenario.run_until_restarted(process_count);
        assert!(has_claim(&scenario.sim, job), "seed {seed}");
        // The end of the job releases it.
        scenario.kill_all_tasks();
        scenario.sim.advance(Micros::from_secs(15));
        scenario
            .sim
            .run_until("it is released", |sim| !has_claim(sim, job));
        scenario.restart_and_exchange(&name);
        assert!(has_claim(&scenario.sim, job), "seed {seed}");
        let request = Request::Checkpoint {
            job,
            schedule: None::<CheckpointSchedule>,
            end_job: true,
            wait_for_end: true,
        };
        let reply = scenario.sim.ask(scenario.console, request);
        assert!(matches!(&reply, Reply::Checkpointed(Ok(_))), "{reply:?}");
        assert!(!has_claim(&scenario.sim, job), "seed {seed}");
    }
}
