//! Jobs that run, or shall run, in another virtual machine with the same store.

use super::{JobScenario, is_listed};
use crate::tests::scenario::list_events;
use crate::tests::sim::{LEASE, Sim, host, seeds};
use sempa_proto::checkpoint::{CheckpointSchedule, ClaimKey, JobHolder, RestartFailure};
use sempa_proto::event::EventKind;
use sempa_proto::lease::{heartbeat_interval, replacement_delay};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, RequestId};

fn other_holder() -> JobHolder {
    JobHolder {
        vm: "other".into(),
        host: "h9".into(),
        user: "root".into(),
        pid: 7,
        since: Micros(0),
    }
}

fn has_claim(sim: &Sim, key: ClaimKey) -> bool {
    sim.image_store.own_claims.contains(key)
}

/// Makes a checkpoint of the job. Returns its name and the key of the job.
fn claim_job(scenario: &mut JobScenario, interval: Option<Micros>) -> (String, ClaimKey) {
    let result = scenario.checkpoint(interval);
    let seed = scenario.sim.seed;
    let name = result
        .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
        .name;
    let key = scenario.sim.image_store.claim_key(&name);
    assert!(has_claim(&scenario.sim, key), "seed {seed}");
    (name, key)
}

fn restart_request(checkpoint: &str) -> Request {
    Request::Restart {
        checkpoint: checkpoint.into(),
        host_names: Vec::new(),
        wait_for_end: true,
        force: false,
    }
}

/// A job that another virtual machine has restarted is ended here, at any moment of its
/// checkpoints, and is neither checkpointed nor rolled back any more. Other tasks continue.
#[test]
fn taken_over_job_is_ended() {
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 4, 6);
        let bystander = super::spawn_children(&mut scenario.sim, scenario.console, 1)[0];
        let (_, key) = claim_job(&mut scenario, Some(Micros::from_millis(600)));
        let rounds = scenario.sim.rng.below(400);
        scenario.exchange_messages(rounds);
        let is_waiting = seed % 2 == 0;
        let request = is_waiting.then(|| scenario.begin_checkpoint(None));
        let delay = Micros(scenario.sim.rng.below(100_000));
        scenario.sim.advance(delay);
        scenario.sim.take_over_job(key, other_holder());
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

/// A job that another virtual machine takes over while it is restarted here does not run here,
/// whatever the restart has reached.
#[test]
fn job_taken_over_during_its_restart_does_not_run() {
    let mut failure_count = 0;
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (name, key) = claim_job(&mut scenario, None);
        scenario.kill_all_tasks();
        let request = scenario
            .sim
            .request(scenario.console, restart_request(&name));
        scenario
            .sim
            .run_until("it is claimed", |sim| has_claim(sim, key));
        // The store reports the claim after a millisecond.
        let delay = Micros(1_001 + scenario.sim.rng.below(30_000));
        scenario.sim.advance(delay);
        scenario.sim.take_over_job(key, other_holder());
        scenario.sim.advance(Micros::from_secs(40));
        let reply = &scenario.sim.procs[scenario.console].replies[&request];
        failure_count += usize::from(matches!(reply, Reply::Restarted(Err(_))));
        for tid in scenario.tids.clone() {
            assert!(!is_listed(&scenario.sim, tid), "{tid} runs (seed {seed})");
        }
        assert!(!has_claim(&scenario.sim, key), "seed {seed}");
    }
    assert!(failure_count > 10, "{failure_count} were cancelled");
}

/// A restart of a job that runs elsewhere is refused with the other virtual machine. Nothing of it
/// runs, and the claim is not kept.
#[test]
fn restart_of_job_that_runs_elsewhere_is_refused() {
    for seed in seeds(10) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (name, key) = claim_job(&mut scenario, None);
        scenario.kill_all_tasks();
        let foreign_claims = &mut scenario.sim.image_store.foreign_claims;
        foreign_claims.insert(key, other_holder());
        let process_count = scenario.sim.procs.len();
        let failure = scenario.restart(&name, &[]).expect_err("it runs elsewhere");
        assert!(
            matches!(&failure, RestartFailure::RunsElsewhere { holder, .. } if *holder == other_holder()),
            "{failure}"
        );
        assert_eq!(scenario.sim.procs.len(), process_count, "seed {seed}");
        assert!(
            scenario.sim.image_store.own_claims.is_empty(),
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

/// Two virtual machines with one store number their jobs alike. Neither a refused restart of the
/// other one's job nor its take-over affects the job of the same number that runs here, and a job
/// of the other one that is restarted here is claimed as such.
#[test]
fn job_of_the_same_number_runs_elsewhere() {
    for seed in seeds(20) {
        let mut other_scenario = JobScenario::new(seed + 1000, 3, 4);
        claim_job(&mut other_scenario, None);
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (_, own_key) = claim_job(&mut scenario, None);
        let origin = Micros(own_key.origin.0 + 1);
        let image_store = &mut scenario.sim.image_store;
        let names = image_store.add_foreign_checkpoints(other_scenario.sim.image_store, origin);
        let foreign_key = image_store.claim_key(&names[0]);
        assert_eq!(foreign_key.job, own_key.job);
        image_store
            .foreign_claims
            .insert(foreign_key, other_holder());
        let failure = scenario.restart(&names[0], &[]).expect_err("it runs there");
        assert!(
            matches!(failure, RestartFailure::RunsElsewhere { .. }),
            "{failure}"
        );
        scenario.sim.image_store.foreign_claims.clear();
        let failure = scenario
            .restart(&names[0], &[])
            .expect_err("the own job runs");
        assert!(
            matches!(failure, RestartFailure::TasksAlive(_)),
            "{failure}"
        );
        scenario.sim.take_over_job(foreign_key, other_holder());
        scenario.sim.advance(Micros::from_secs(2));
        scenario.run_until_all_connected();
        assert!(has_claim(&scenario.sim, own_key), "seed {seed}");
        assert!(!has_claim(&scenario.sim, foreign_key), "seed {seed}");

        scenario.kill_all_tasks();
        scenario
            .sim
            .run_until("it is released", |sim| !has_claim(sim, own_key));
        scenario.sim.image_store.foreign_claims.clear();
        let restart_result = scenario.restart(&names[0], &[]);
        restart_result.unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        assert!(has_claim(&scenario.sim, foreign_key), "seed {seed}");
        scenario.sim.take_over_job(own_key, other_holder());
        scenario.sim.advance(Micros::from_secs(2));
        scenario.run_until_all_connected();
        let (_, next_key) = claim_job(&mut scenario, None);
        assert_eq!(next_key, foreign_key, "seed {seed}");
        scenario.sim.take_over_job(foreign_key, other_holder());
        scenario.run_until_all_ended();
    }
}

/// A second restart of a job is refused while the first one is in progress, and does not affect
/// it: the job keeps its claim, and is not restarted a third time.
#[test]
fn refused_second_restart_changes_nothing() {
    let mut refused_count = 0;
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (name, key) = claim_job(&mut scenario, Some(Micros::from_secs(1000)));
        scenario.kill_all_tasks();
        scenario
            .sim
            .run_until("it is released", |sim| !has_claim(sim, key));
        let console = scenario.console;
        let process_count = scenario.sim.procs.len();
        let requests: Vec<_> = (0..3)
            .map(|_| {
                let delay = Micros(scenario.sim.rng.below(30_000));
                scenario.sim.advance(delay);
                scenario.sim.request(console, restart_request(&name))
            })
            .collect();
        scenario.sim.run_until("all are answered", |sim| {
            let replies = &sim.procs[console].replies;
            requests.iter().all(|id| replies.contains_key(id))
        });
        let replies = &scenario.sim.procs[console].replies;
        let is_success = |id: &&RequestId| matches!(replies[*id], Reply::Restarted(Ok(_)));
        let success_count = requests.iter().filter(is_success).count();
        let is_in_progress = |id: &&RequestId| {
            matches!(
                replies[*id],
                Reply::Restarted(Err(RestartFailure::InProgress))
            )
        };
        refused_count += requests.iter().filter(is_in_progress).count();
        assert_eq!(success_count, 1, "seed {seed}");
        assert!(has_claim(&scenario.sim, key), "seed {seed}");
        scenario.run_until_all_connected();
        let expected_count = process_count + scenario.tids.len();
        assert_eq!(scenario.sim.procs.len(), expected_count, "seed {seed}");
        // The job is still known: it rolls back.
        let process_count = scenario.sim.procs.len();
        scenario.sim.kill_host(host(3));
        scenario.run_until_restarted(process_count);
        assert!(has_claim(&scenario.sim, key), "seed {seed}");
    }
    assert!(refused_count > 30, "{refused_count} were refused");
}

/// The store has a claim exactly while a job with checkpoints runs or shall run again.
#[test]
fn claim_is_kept_while_the_job_runs() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 4, 4);
        let job = scenario.job_tid();
        let (name, key) = claim_job(&mut scenario, Some(Micros::from_secs(1000)));
        // A rollback keeps the claim.
        let process_count = scenario.sim.procs.len();
        scenario.sim.kill_host(host(3));
        scenario.run_until_restarted(process_count);
        assert!(has_claim(&scenario.sim, key), "seed {seed}");
        // The end of the job releases it.
        scenario.kill_all_tasks();
        scenario.sim.advance(Micros::from_secs(15));
        scenario
            .sim
            .run_until("it is released", |sim| !has_claim(sim, key));
        scenario.restart_and_exchange(&name);
        assert!(has_claim(&scenario.sim, key), "seed {seed}");
        let request = Request::Checkpoint {
            job,
            schedule: None::<CheckpointSchedule>,
            end_job: true,
            wait_for_end: true,
        };
        let reply = scenario.sim.ask(scenario.console, request);
        assert!(matches!(&reply, Reply::Checkpointed(Ok(_))), "{reply:?}");
        assert!(!has_claim(&scenario.sim, key), "seed {seed}");
    }
}

/// The claim of a job that does not roll back is released after the loss of a host, but not before
/// the lease of the host is over.
#[test]
fn claim_is_released_after_the_lease_of_a_lost_host() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (_, key) = claim_job(&mut scenario, None);
        let lost_host = host(2 + (seed % 2) as u16);
        scenario.sim.kill_host(lost_host);
        super::report_loss(&mut scenario.sim, lost_host);
        let killed_at = scenario.sim.now;
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            scenario.sim.exit_proc(proc, 0);
        }
        scenario
            .sim
            .run_until("it is released", |sim| !has_claim(sim, key));
        // The last heartbeat may have been in transit.
        let earliest = replacement_delay(LEASE).since(Micros(2 * heartbeat_interval(LEASE).0));
        let delay = scenario.sim.now.since(killed_at);
        assert!(delay >= earliest, "{delay:?} (seed {seed})");
    }
}

/// A claim is kept while processes that the job's tasks have left behind run: a restart in another
/// virtual machine would start copies of them.
#[test]
fn claim_is_kept_while_leftovers_run() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (_, key) = claim_job(&mut scenario, None);
        let tids = scenario.tids.clone();
        for tid in &tids {
            let proc = scenario.sim.proc_of(*tid);
            scenario.sim.exit_and_leave_processes(proc, 1);
        }
        scenario.run_until_all_ended();
        scenario.sim.advance(Micros::from_secs(30));
        assert!(has_claim(&scenario.sim, key), "seed {seed}");
        for tid in tids {
            let request = Request::KillLeftovers { tid };
            let console = scenario.console;
            assert_eq!(scenario.sim.ask(console, request), Reply::Done);
        }
        scenario
            .sim
            .run_until("it is released", |sim| !has_claim(sim, key));
    }
}

/// The processes that tasks of a taken-over job have left behind here are killed.
#[test]
fn leftovers_of_taken_over_job_are_killed() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (_, key) = claim_job(&mut scenario, Some(Micros::from_millis(600)));
        let proc = scenario.sim.proc_of(scenario.tids[1]);
        scenario.sim.exit_and_leave_processes(proc, 2);
        scenario.sim.advance(Micros::from_secs(1));
        assert_eq!(scenario.sim.leftovers.len(), 1, "seed {seed}");
        scenario.sim.take_over_job(key, other_holder());
        scenario.run_until_all_ended();
        scenario
            .sim
            .run_until("nothing is left", |sim| sim.leftovers.is_empty());
    }
}

/// A claim is released if the master forgets a job that does not run: it waits for a restart, and
/// its checkpoints are cancelled.
#[test]
fn claim_of_cancelled_job_is_released() {
    let (mut scenario, _) = super::stuck::unplaceable_job(1);
    let job = scenario.job_tid();
    let name = scenario.sim.image_store.newest_name();
    let key = scenario.sim.image_store.claim_key(&name);
    scenario.sim.advance(Micros::from_secs(60));
    assert!(has_claim(&scenario.sim, key), "it shall run again");
    super::stuck::cancel_checkpointing(&mut scenario, job);
    scenario.sim.advance(Micros::from_secs(20));
    assert!(!has_claim(&scenario.sim, key));
}
