//! Copies of checkpoints in the stores of other hosts.

use super::*;
use crate::CopyPolicy;
use crate::tests::scenario::list_events;
use sempa_proto::checkpoint::RemovalSelection;
use sempa_proto::event::EventKind;

impl JobScenario {
    fn with_copies(seed: u64, hosts: usize, copies: CopyPolicy) -> JobScenario {
        JobScenario::with(seed, hosts, 4, |config| config.copies = copies.clone())
    }

    /// Makes a checkpoint and waits for its copies. Returns its name, the hosts with a copy, the
    /// number of missing copies, and the reason.
    fn checkpoint_with_copies(&mut self) -> (String, Vec<HostId>, u32, String) {
        let set = self.make_checkpoint(None);
        let became = self.await_copies(&set);
        (set, became.0, became.1, became.2)
    }

    fn await_copies(&mut self, set: &str) -> (Vec<HostId>, u32, String) {
        for _ in 0..3000 {
            self.sim.advance(Micros::from_millis(10));
            let report = list_events(&mut self.sim, self.console)
                .into_iter()
                .rev()
                .find_map(|kind| match kind {
                    EventKind::CheckpointCopied {
                        checkpoint: of,
                        hosts,
                        missing,
                        why,
                        ..
                    } if of == set => Some((hosts, missing, why)),
                    _ => None,
                });
            if let Some(report) = report {
                // Copies that must be removed are removed within this time.
                self.sim.advance(Micros::from_millis(100));
                return report;
            }
        }
        panic!(
            "nothing was said of copies of {set} (seed {})",
            self.sim.seed
        );
    }

    /// Returns all copies and their hosts.
    fn copies(&self) -> Vec<(HostId, String)> {
        self.sim.image_store.copies()
    }
}

/// A checkpoint is copied to the configured number of hosts, and the copies of the previous
/// checkpoint are removed.
#[test]
fn copies_are_made_and_older_ones_removed() {
    for seed in seeds(20) {
        let mut scene = JobScenario::with_copies(seed, 5, CopyPolicy::Count(2));
        let (first, hosts, missing, why) = scene.checkpoint_with_copies();
        assert_eq!(
            (hosts.len(), missing, why.as_str()),
            (2, 0, ""),
            "seed {seed}"
        );
        assert!(
            !hosts.contains(&HostId::MASTER) && hosts[0] != hosts[1],
            "{hosts:?}"
        );
        let mut there = hosts.clone();
        there.sort();
        assert_eq!(
            scene.copies(),
            there
                .iter()
                .map(|at| (*at, first.clone()))
                .collect::<Vec<_>>()
        );
        let listed = scene.list_checkpoints();
        assert_eq!(listed[0].copy_hosts.len(), 2, "{listed:?}");
        let (second, again, ..) = scene.checkpoint_with_copies();
        assert_eq!(
            scene.copies(),
            there
                .iter()
                .map(|at| (*at, second.clone()))
                .collect::<Vec<_>>(),
            "seed {seed}"
        );
        assert_eq!(again.len(), 2);
    }
}

/// Only the named hosts get copies, and a host that cannot store a copy is reported.
#[test]
fn only_named_hosts_get_copies() {
    for seed in seeds(10) {
        let names = CopyPolicy::Hosts(vec!["h3".into(), "h9".into(), "h1".into()]);
        let mut scene = JobScenario::with_copies(seed, 3, names);
        let (set, hosts, missing, why) = scene.checkpoint_with_copies();
        assert_eq!((hosts, missing), (vec![host(3)], 2));
        assert_eq!(
            why,
            "h9: it is not in the virtual machine; h1: it is the master's host"
        );
        assert_eq!(scene.copies(), [(host(3), set)]);
    }
}

/// Without configuration no checkpoint is copied.
#[test]
fn no_copies_by_default() {
    let mut scene = JobScenario::new(1, 3, 4);
    scene.make_checkpoint(None);
    scene.sim.advance(Micros::from_secs(5));
    assert_eq!(scene.copies(), []);
    let said = list_events(&mut scene.sim, scene.console);
    assert!(
        !said
            .iter()
            .any(|kind| matches!(kind, EventKind::CheckpointCopied { .. }))
    );
}

/// A host whose owner is present gets no new copy; another host gets it.
#[test]
fn present_owner_gets_no_new_copy() {
    for seed in seeds(10) {
        let mut scene = JobScenario::with_copies(seed, 3, CopyPolicy::Count(1));
        let (set, hosts, ..) = scene.checkpoint_with_copies();
        let (owned, other) = if hosts[0] == host(2) {
            (host(2), host(3))
        } else {
            (host(3), host(2))
        };
        let speaker = scene.sim.enrol(owned);
        assert_eq!(
            scene
                .sim
                .ask(speaker, stop_guests_until(None, EvictionMode::Move)),
            Reply::Done
        );
        assert_eq!(scene.copies(), [(owned, set)], "what is there stays");
        // Tasks that are paused for their owner can still be dumped.
        let (next, hosts, missing, why) = scene.checkpoint_with_copies();
        assert_eq!((hosts, missing), (vec![other], 0), "seed {seed}");
        assert!(
            why.contains("its owner admits no guests at present"),
            "{why}"
        );
        assert_eq!(
            scene.copies(),
            [(other, next)],
            "and the one before goes (seed {seed})"
        );
    }
}

/// A copy is cancelled when the owner of its host arrives during the transfer.
#[test]
fn owner_arrival_cancels_copy() {
    let mut seen = 0;
    for seed in seeds(40) {
        let mut scene = JobScenario::with_copies(seed, 3, CopyPolicy::Hosts(vec!["h2".into()]));
        let speaker = scene.sim.enrol(host(2));
        scene.make_checkpoint(None);
        scene
            .sim
            .request(speaker, stop_guests_until(None, EvictionMode::Move));
        let set = scene.sim.image_store.newest_name();
        let (hosts, missing, why) = scene.await_copies(&set);
        assert_eq!(hosts.len() as u32 + missing, 1);
        if missing == 1 {
            assert!(
                why.contains("olga is there") || why.contains("admits no guests at present"),
                "{why}"
            );
            assert_eq!(scene.copies(), [], "seed {seed}");
            seen += usize::from(why.contains("olga is there"));
        }
    }
    assert!(seen > 0, "the owner never came in between");
}

/// A copy on a lost host is replaced on another host, and a missing copy is made when a host joins.
#[test]
fn lost_copies_are_replaced() {
    for seed in seeds(20) {
        let mut scene = JobScenario::with_copies(seed, 4, CopyPolicy::Count(1));
        let (set, hosts, ..) = scene.checkpoint_with_copies();
        let lost = hosts[0];
        // Depending on the seed, a host is lost before its loss is known, during another
        // checkpoint, or while idle.
        scene.sim.kill_host(lost);
        scene.sim.run_until("its loss is known", |sim| {
            sim.nodes[&HostId::MASTER]
                .machine
                .table()
                .get(lost)
                .is_none()
        });
        scene.sim.advance(Micros::from_secs(2));
        let now: Vec<HostId> = scene
            .copies()
            .into_iter()
            .filter(|(at, _)| *at != lost)
            .map(|(at, _)| at)
            .collect();
        assert_eq!(now.len(), 1, "seed {seed}");
        assert_eq!(scene.list_checkpoints()[0].copy_hosts.len(), 1, "of {set}");
    }
    for seed in seeds(10) {
        let mut scene = JobScenario::with_copies(seed, 2, CopyPolicy::Count(2));
        let (set, hosts, missing, _) = scene.checkpoint_with_copies();
        assert_eq!((hosts, missing), (vec![host(2)], 1));
        let reply = scene.sim.ask(
            scene.console,
            Request::AddHosts {
                lines: vec!["h3".into()],
            },
        );
        assert!(matches!(reply, Reply::HostsAdded(_)));
        scene.sim.advance(Micros::from_secs(2));
        assert_eq!(
            scene.copies(),
            [(host(2), set.clone()), (host(3), set)],
            "seed {seed}"
        );
    }
}

/// Copies are removed with their checkpoint and when the job has ended for good.
#[test]
fn copies_are_removed_with_checkpoint_or_job() {
    for seed in seeds(20) {
        let mut scene = JobScenario::with_copies(seed, 3, CopyPolicy::Count(1));
        let (set, ..) = scene.checkpoint_with_copies();
        assert_eq!(
            scene.remove(RemovalSelection::Checkpoints(vec![set])).len(),
            1
        );
        scene.sim.advance(Micros::from_secs(1));
        assert_eq!(scene.copies(), [], "it was removed (seed {seed})");
        // A checkpoint is removed while it waits for the copy of another checkpoint.
        let (first, next) = (scene.make_checkpoint(None), scene.make_checkpoint(None));
        scene.remove(RemovalSelection::Checkpoints(vec![first, next]));
        scene.sim.advance(Micros::from_secs(1));
        assert_eq!(scene.copies(), [], "seed {seed}");
        // A checkpoint is removed at any moment of its copy.
        let set = scene.make_checkpoint(None);
        let wait = Micros(scene.sim.rng.below(20_000));
        scene.sim.advance(wait);
        scene.remove(RemovalSelection::Checkpoints(vec![set]));
        scene.sim.advance(Micros::from_secs(1));
        assert_eq!(scene.copies(), [], "seed {seed}");
        scene.make_checkpoint(None);
        let wait = Micros(scene.sim.rng.below(20_000));
        scene.sim.advance(wait);
        assert!(scene.exit_all(0, 0), "it has ended well");
        assert_eq!(scene.copies(), [], "seed {seed}");
    }
}

/// The target reports why a copy failed; the sender's reason is used only if the target does not
/// report.
#[test]
fn target_reports_why_copy_failed() {
    for seed in seeds(20) {
        for silent in [false, true] {
            let mut scene = JobScenario::with_copies(seed, 3, CopyPolicy::Count(2));
            scene.make_checkpoint(None);
            scene.sim.random_faults.failed_steps_percent = 100;
            scene.sim.image_store.hides_copy_errors = silent;
            let set = scene.sim.image_store.newest_name();
            let (hosts, missing, why) = scene.await_copies(&set);
            // A copy may have arrived earlier.
            assert_eq!(hosts.len() as u32 + missing, 2, "{why} (seed {seed})");
            let (by_host, by_sender) = (
                why.matches("thrown").count(),
                why.matches("nothing more was taken").count(),
            );
            let said = if silent {
                (0, missing as usize)
            } else {
                (missing as usize, 0)
            };
            assert_eq!((by_host, by_sender), said, "{why} (seed {seed})");
        }
    }
}

/// A copy that fails because its target dies is made on another host.
#[test]
fn failed_copy_goes_to_next_host() {
    for seed in seeds(40) {
        let mut scene = JobScenario::with_copies(seed, 4, CopyPolicy::Count(1));
        scene.make_checkpoint(None);
        let wait = Micros(scene.sim.rng.below(5_000));
        scene.sim.advance(wait);
        let victim = host(2 + scene.sim.rng.below(3) as u16);
        scene.sim.kill_host(victim);
        let set = scene.sim.image_store.newest_name();
        scene.sim.advance(Micros::from_secs(30));
        let living: Vec<(HostId, String)> = scene
            .copies()
            .into_iter()
            .filter(|(at, _)| *at != victim)
            .collect();
        assert_eq!(living.len(), 1, "seed {seed}");
        assert_eq!(living[0].1, set);
    }
}
