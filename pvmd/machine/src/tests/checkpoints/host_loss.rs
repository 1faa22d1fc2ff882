//! Rollback of jobs after the loss of a host.

use super::JobScenario;
use crate::tests::sim::{Sim, host, seeds};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, Tid};

/// A job rolls back to its newest checkpoint when a host is lost.
#[test]
fn lost_host_rolls_job_back() {
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 4, 6);
        scene.exchange_messages(20);
        let first = scene
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = 100 + scene.sim.rng.below(700);
        scene.exchange_messages(rounds);
        let before = scene.sim.procs.len();
        let lost = host(2 + scene.sim.rng.below(3) as u16);
        scene.sim.kill_host(lost);
        scene
            .sim
            .run_until("the job runs again", |sim| sim.procs.len() >= before + 6);
        scene.run_until_all_connected();
        let restarted: Vec<Tid> = scene.sim.procs[before..before + 6]
            .iter()
            .filter_map(|p| p.spawned_tid)
            .collect();
        assert!(
            first.tasks.iter().all(|tid| restarted.contains(tid)),
            "{restarted:?} (seed {seed})"
        );
        scene.exchange_messages(100);
        scene.run_until_all_connected();
        scene.run_until_all_received();
    }
}

/// A job continues after hosts are lost at any moment of a checkpoint or a restart.
#[test]
fn job_survives_host_losses_at_any_time() {
    for seed in seeds(80) {
        let mut scene = JobScenario::new(seed, 5, 6);
        scene
            .checkpoint(Some(Micros::from_millis(500)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let mut hosts: Vec<u16> = (2..=5).collect();
        for _ in 0..3 {
            let rounds = scene.sim.rng.below(300);
            scene.exchange_messages(rounds);
            let which = scene.sim.rng.below(hosts.len() as u64) as usize;
            scene.sim.kill_host(host(hosts.remove(which)));
        }
        let all = |sim: &Sim, tids: &[Tid]| {
            tids.iter().all(|tid| {
                let proc = &sim.procs[sim.proc_of(*tid)];
                !proc.exited && proc.conn.is_some() && sim.nodes[&proc.host].is_alive
            })
        };
        let tids = scene.tids.clone();
        scene.sim.run_until("all run again", |sim| all(sim, &tids));
        // Checkpoints continue meanwhile, and the loss of a host may not be known yet.
        scene.sim.advance(Micros::from_secs(5));
        scene.sim.run_until("all run again", |sim| all(sim, &tids));
        scene.exchange_messages(60);
        let end = scene.sim.now + Micros::from_secs(60);
        while !(all(&scene.sim, &tids) && scene.all_received()) {
            assert!(
                scene.sim.now < end && scene.sim.step(),
                "something was lost (seed {seed})\n{}",
                scene.sim.history()
            );
        }
    }
}

/// A job that has ended is not restarted when a host is lost.
#[test]
fn ended_job_is_not_restarted_on_host_loss() {
    for seed in seeds(20) {
        let killed_long_ago: fn(&mut JobScenario) = |scene| {
            scene.kill_all();
            scene.sim.advance(Micros::from_secs(30));
        };
        let told: fn(&mut JobScenario) = |scene| {
            for tid in scene.tids.clone() {
                scene.signal(tid, 9);
            }
            scene.run_until_all_ended();
        };
        let done: fn(&mut JobScenario) = |scene| {
            for tid in scene.tids.clone() {
                let proc = scene.sim.proc_of(tid);
                scene.sim.exit(proc, 0);
            }
            scene.run_until_all_ended();
        };
        for ends in [killed_long_ago, told, done] {
            let mut scene = JobScenario::new(seed, 4, 4);
            scene
                .checkpoint(Some(Micros::from_secs(100)))
                .expect("nothing stands in the way");
            ends(&mut scene);
            let before = scene.sim.procs.len();
            scene.sim.kill_host(host(3));
            scene.sim.advance(Micros::from_secs(20));
            assert_eq!(scene.sim.procs.len(), before, "seed {seed}");
        }
    }
}

/// A job rolls back to its checkpoint even if the deaths of its tasks are known before the loss of
/// their host.
#[test]
fn task_deaths_before_host_loss_roll_job_back() {
    for seed in seeds(60) {
        let mut scene = JobScenario::new(seed, 4, 6);
        scene
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = scene.sim.rng.below(300);
        scene.exchange_messages(rounds);
        let before = scene.sim.procs.len();
        let lost = host(2 + scene.sim.rng.below(3) as u16);
        let procs: Vec<usize> = scene
            .tids
            .iter()
            .map(|tid| scene.sim.proc_of(*tid))
            .collect();
        let (there, elsewhere): (Vec<usize>, Vec<usize>) = procs
            .into_iter()
            .partition(|proc| scene.sim.procs[*proc].host == lost);
        for proc in there {
            scene.sim.exit(proc, 9);
        }
        let while_it_goes_down = Micros(scene.sim.rng.below(3_000_000));
        scene.sim.advance(while_it_goes_down);
        if seed % 2 == 0 {
            // These tasks exit because the tasks on the lost host are gone.
            for proc in elsewhere {
                scene.sim.exit(proc, 9 << 8);
            }
        }
        scene.sim.kill_host(lost);
        scene.run_until_restarted(before);
    }
}

/// A job rolls back to its checkpoint when one of its hosts is deleted, and never runs twice.
#[test]
fn deleted_host_rolls_job_back() {
    for seed in seeds(40) {
        let mut scene = JobScenario::new(seed, 4, 6);
        scene
            .checkpoint(Some(Micros::from_millis(600)))
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        let rounds = scene.sim.rng.below(300);
        scene.exchange_messages(rounds);
        let before = scene.sim.procs.len();
        let name = format!("h{}", 2 + scene.sim.rng.below(3));
        let reply = scene
            .sim
            .ask(scene.console, Request::DelHosts { names: vec![name] });
        assert!(
            matches!(reply, Reply::HostsDeleted(ref all) if all[0].is_ok()),
            "{reply:?}"
        );
        scene.run_until_restarted(before);
    }
}
