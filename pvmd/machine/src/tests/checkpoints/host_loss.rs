//! Rollback of jobs after the loss of a host.

use super::JobScenario;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{HostId, Micros, Tid};

#[test]
fn lost_host_rolls_job_back() {
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 4, 6);
        scenario.exchange_messages(20);
        let first_checkpoint = scenario
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = 100 + scenario.sim.rng.below(700);
        scenario.exchange_messages(rounds);
        let process_count = scenario.sim.procs.len();
        let lost_host = host(2 + scenario.sim.rng.below(3) as u16);
        scenario.sim.kill_host(lost_host);
        scenario.sim.run_until("the job runs again", |sim| {
            sim.procs.len() >= process_count + 6
        });
        scenario.run_until_all_connected();
        let restarted_tids: Vec<Tid> = scenario.sim.procs[process_count..process_count + 6]
            .iter()
            .filter_map(|p| p.spawned_tid)
            .collect();
        assert!(
            first_checkpoint
                .tasks
                .iter()
                .all(|tid| restarted_tids.contains(tid)),
            "{restarted_tids:?} (seed {seed})"
        );
        scenario.exchange_messages(100);
        scenario.run_until_all_connected();
        scenario.run_until_all_received();
    }
}

/// A user restarts a job whose host is lost: the restart waits until the lease of the host is
/// over, because its tasks may still run there.
#[test]
fn requested_restart_waits_for_the_lease_of_a_lost_host() {
    for seed in seeds(30) {
        let mut scenario = JobScenario::new(seed, 3, 6);
        let checkpoint = scenario.checkpoint(None);
        let name = checkpoint
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        let lost_host = host(2);
        let outage = Micros::from_secs(60);
        scenario
            .sim
            .separate_hosts(HostId::MASTER, lost_host, outage);
        super::report_loss(&mut scenario.sim, lost_host);
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            if scenario.sim.procs[proc].host != lost_host {
                scenario.sim.exit_proc(proc, 9);
            }
        }
        let is_restarted = (0..50).any(|_| {
            scenario.sim.advance(Micros::from_millis(10));
            scenario.restart(&name, &[]).is_ok()
        });
        assert!(is_restarted, "seed {seed}");
        scenario.run_until_all_connected();
    }
}

/// A job continues after three host losses at random times of checkpoints and restarts.
#[test]
fn job_survives_host_losses_at_any_time() {
    for seed in seeds(80) {
        let mut scenario = JobScenario::new(seed, 5, 6);
        scenario
            .checkpoint(Some(Micros::from_millis(500)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut hosts: Vec<u16> = (2..=5).collect();
        for _ in 0..3 {
            let rounds = scenario.sim.rng.below(300);
            scenario.exchange_messages(rounds);
            let host_index = scenario.sim.rng.below(hosts.len() as u64) as usize;
            scenario.sim.kill_host(host(hosts.remove(host_index)));
        }
        let all_run = |sim: &Sim, tids: &[Tid]| {
            tids.iter().all(|tid| {
                let proc = &sim.procs[sim.proc_of(*tid)];
                !proc.exited && proc.conn.is_some() && sim.nodes[&proc.host].is_alive
            })
        };
        let tids = scenario.tids.clone();
        scenario
            .sim
            .run_until("all run again", |sim| all_run(sim, &tids));
        // The periodic checkpoints continue during this time, and the loss of a host may not be
        // known yet.
        scenario.sim.advance(Micros::from_secs(5));
        scenario
            .sim
            .run_until("all run again", |sim| all_run(sim, &tids));
        scenario.exchange_messages(60);
        let end = scenario.sim.now + Micros::from_secs(60);
        while !(all_run(&scenario.sim, &tids) && scenario.check_all_received()) {
            assert!(
                scenario.sim.now < end && scenario.sim.step(),
                "something was lost (seed {seed})\n{}",
                scenario.sim.state_report()
            );
        }
    }
}

/// A job that has ended is not restarted when a host is lost: its tasks have succeeded, were ended
/// by a user, or were killed long before the loss.
#[test]
fn ended_job_is_not_restarted_on_host_loss() {
    for seed in seeds(20) {
        let kill_all_early: fn(&mut JobScenario) = |scenario| {
            scenario.kill_all_tasks();
            scenario.sim.advance(Micros::from_secs(30));
        };
        let terminate_all: fn(&mut JobScenario) = |scenario| {
            for tid in scenario.tids.clone() {
                scenario.send_signal(tid, 9);
            }
            scenario.run_until_all_ended();
        };
        let finish_all: fn(&mut JobScenario) = |scenario| {
            for tid in scenario.tids.clone() {
                let proc = scenario.sim.proc_of(tid);
                scenario.sim.exit_proc(proc, 0);
            }
            scenario.run_until_all_ended();
        };
        for end_job in [kill_all_early, terminate_all, finish_all] {
            let mut scenario = JobScenario::new(seed, 4, 4);
            scenario
                .checkpoint(Some(Micros::from_secs(100)))
                .expect("nothing stands in the way");
            end_job(&mut scenario);
            let process_count = scenario.sim.procs.len();
            scenario.sim.kill_host(host(3));
            scenario.sim.advance(Micros::from_secs(20));
            assert_eq!(scenario.sim.procs.len(), process_count, "seed {seed}");
        }
    }
}

/// A job rolls back to its checkpoint even if the master is notified of task exits before the loss
/// of the tasks' host.
#[test]
fn task_deaths_before_host_loss_roll_job_back() {
    for seed in seeds(60) {
        let mut scenario = JobScenario::new(seed, 4, 6);
        scenario
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = scenario.sim.rng.below(300);
        scenario.exchange_messages(rounds);
        let process_count = scenario.sim.procs.len();
        let lost_host = host(2 + scenario.sim.rng.below(3) as u16);
        let procs: Vec<usize> = scenario
            .tids
            .iter()
            .map(|tid| scenario.sim.proc_of(*tid))
            .collect();
        let (procs_on_host, other_procs): (Vec<usize>, Vec<usize>) = procs
            .into_iter()
            .partition(|proc| scenario.sim.procs[*proc].host == lost_host);
        for proc in procs_on_host {
            scenario.sim.exit_proc(proc, 9);
        }
        let shutdown_delay = Micros(scenario.sim.rng.below(3_000_000));
        scenario.sim.advance(shutdown_delay);
        if seed % 2 == 0 {
            // These tasks run on other hosts and exit because their peers on the lost host have
            // exited.
            for proc in other_procs {
                scenario.sim.exit_proc(proc, 9 << 8);
            }
        }
        scenario.sim.kill_host(lost_host);
        scenario.run_until_restarted(process_count);
    }
}

/// A job rolls back to its checkpoint when one of its hosts is deleted. No task of the job runs
/// twice.
#[test]
fn deleted_host_rolls_job_back() {
    for seed in seeds(40) {
        let mut scenario = JobScenario::new(seed, 4, 6);
        scenario
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = scenario.sim.rng.below(300);
        scenario.exchange_messages(rounds);
        let process_count = scenario.sim.procs.len();
        let name = format!("h{}", 2 + scenario.sim.rng.below(3));
        let reply = scenario.sim.ask(
            scenario.console,
            Request::DelHosts {
                host_names: vec![name],
            },
        );
        assert!(
            matches!(reply, Reply::HostsDeleted(ref results) if results[0].is_ok()),
            "{reply:?}"
        );
        scenario.run_until_restarted(process_count);
    }
}
