//! Copies of checkpoints in the stores of other hosts.

use super::*;
use crate::CopyPolicy;
use crate::tests::scenario::list_events;
use sempa_proto::checkpoint::RemovalSelection;
use sempa_proto::event::EventKind;

impl JobScenario {
    fn with_copies(seed: u64, hosts: usize, copies: CopyPolicy) -> Self {
        Self::with_config(seed, hosts, 4, |config| config.copy_policy = copies.clone())
    }

    /// Makes a checkpoint and waits for its copies. Returns the checkpoint's name, the hosts with a
    /// copy, the number of missing copies, and the reason for missing copies.
    fn checkpoint_with_copies(&mut self) -> (String, Vec<HostId>, u32, String) {
        let checkpoint_name = self.make_checkpoint(None);
        let copies_report = self.await_copies(&checkpoint_name);
        (
            checkpoint_name,
            copies_report.0,
            copies_report.1,
            copies_report.2,
        )
    }

    fn await_copies(&mut self, checkpoint_name: &str) -> (Vec<HostId>, u32, String) {
        for _ in 0..3000 {
            self.sim.advance(Micros::from_millis(10));
            let report = list_events(&mut self.sim, self.console)
                .into_iter()
                .rev()
                .find_map(|event| match event {
                    EventKind::CheckpointCopied {
                        checkpoint,
                        hosts,
                        missing: missing_count,
                        why,
                        ..
                    } if checkpoint == checkpoint_name => Some((hosts, missing_count, why)),
                    _ => None,
                });
            if let Some(report) = report {
                // The master removes superfluous copies within this time.
                self.sim.advance(Micros::from_millis(100));
                return report;
            }
        }
        panic!(
            "nothing was said of copies of {checkpoint_name} (seed {})",
            self.sim.seed
        );
    }

    /// Returns all copies: the host with the copy and the name of the checkpoint.
    fn copies(&self) -> Vec<(HostId, String)> {
        self.sim.image_store.copies()
    }
}

/// A checkpoint is copied to the configured number of hosts, and the copies of the previous
/// checkpoint are removed.
#[test]
fn copies_are_made_and_older_ones_removed() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::with_copies(seed, 5, CopyPolicy::Count(2));
        let (first_name, hosts, missing_count, why) = scenario.checkpoint_with_copies();
        assert_eq!(
            (hosts.len(), missing_count, why.as_str()),
            (2, 0, ""),
            "seed {seed}"
        );
        assert!(
            !hosts.contains(&HostId::MASTER) && hosts[0] != hosts[1],
            "{hosts:?}"
        );
        let mut expected_copies = hosts.clone();
        expected_copies.sort();
        assert_eq!(
            scenario.copies(),
            expected_copies
                .iter()
                .map(|host_id| (*host_id, first_name.clone()))
                .collect::<Vec<_>>()
        );
        let entries = scenario.list_checkpoints();
        assert_eq!(entries[0].copy_hosts.len(), 2, "{entries:?}");
        let (second_name, new_hosts, ..) = scenario.checkpoint_with_copies();
        assert_eq!(
            scenario.copies(),
            expected_copies
                .iter()
                .map(|host_id| (*host_id, second_name.clone()))
                .collect::<Vec<_>>(),
            "seed {seed}"
        );
        assert_eq!(new_hosts.len(), 2);
    }
}

/// Only the named hosts get copies, and a host that cannot store a copy is reported.
#[test]
fn only_named_hosts_get_copies() {
    for seed in seeds(10) {
        let names = CopyPolicy::Hosts(vec!["h3".into(), "h9".into(), "h1".into()]);
        let mut scenario = JobScenario::with_copies(seed, 3, names);
        let (checkpoint_name, hosts, missing_count, why) = scenario.checkpoint_with_copies();
        assert_eq!((hosts, missing_count), (vec![host(3)], 2));
        assert_eq!(
            why,
            "h9: it is not in the virtual machine; h1: it is the master's host"
        );
        assert_eq!(scenario.copies(), [(host(3), checkpoint_name)]);
    }
}

/// By default, a checkpoint is not copied, and the event log contains no entry about copies.
#[test]
fn no_copies_by_default() {
    let mut scenario = JobScenario::new(1, 3, 4);
    scenario.make_checkpoint(None);
    scenario.sim.advance(Micros::from_secs(5));
    assert_eq!(scenario.copies(), []);
    let events = list_events(&mut scenario.sim, scenario.console);
    assert!(
        !events
            .iter()
            .any(|event| matches!(event, EventKind::CheckpointCopied { .. }))
    );
}

#[test]
fn present_owner_gets_no_new_copy() {
    for seed in seeds(10) {
        let mut scenario = JobScenario::with_copies(seed, 3, CopyPolicy::Count(1));
        let (checkpoint_name, hosts, ..) = scenario.checkpoint_with_copies();
        let (owner_host, other_host) = if hosts[0] == host(2) {
            (host(2), host(3))
        } else {
            (host(3), host(2))
        };
        let owner_agent = scenario.sim.enrol(owner_host);
        assert_eq!(
            scenario
                .sim
                .ask(owner_agent, evict_guests_request(None, EvictionMode::Move)),
            Reply::Done
        );
        assert_eq!(
            scenario.copies(),
            [(owner_host, checkpoint_name)],
            "what is there stays"
        );
        // Guests that are paused for their owner can still be dumped.
        let (next_name, hosts, missing_count, why) = scenario.checkpoint_with_copies();
        assert_eq!((hosts, missing_count), (vec![other_host], 0), "seed {seed}");
        assert!(
            why.contains("its owner admits no guests at present"),
            "{why}"
        );
        assert_eq!(
            scenario.copies(),
            [(other_host, next_name)],
            "and the one before goes (seed {seed})"
        );
    }
}

/// A copy is cancelled when the owner of its host arrives during the transfer.
#[test]
fn owner_arrival_cancels_copy() {
    let mut cancel_count = 0;
    for seed in seeds(40) {
        let mut scenario = JobScenario::with_copies(seed, 3, CopyPolicy::Hosts(vec!["h2".into()]));
        let owner_agent = scenario.sim.enrol(host(2));
        scenario.make_checkpoint(None);
        scenario
            .sim
            .request(owner_agent, evict_guests_request(None, EvictionMode::Move));
        let checkpoint_name = scenario.sim.image_store.newest_name();
        let (hosts, missing_count, why) = scenario.await_copies(&checkpoint_name);
        assert_eq!(hosts.len() as u32 + missing_count, 1);
        if missing_count == 1 {
            assert!(
                why.contains("olga is there") || why.contains("admits no guests at present"),
                "{why}"
            );
            assert_eq!(scenario.copies(), [], "seed {seed}");
            cancel_count += usize::from(why.contains("olga is there"));
        }
    }
    assert!(cancel_count > 0, "the owner never came in between");
}

/// A copy on a lost host is replaced by a copy on another host. A missing copy is made when a host
/// joins.
#[test]
fn lost_copies_are_replaced() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::with_copies(seed, 4, CopyPolicy::Count(1));
        let (checkpoint_name, hosts, ..) = scenario.checkpoint_with_copies();
        let lost_host = hosts[0];
        // The copy is replaced when the master knows that the host is lost.
        scenario.sim.kill_host(lost_host);
        scenario.sim.run_until("its loss is known", |sim| {
            sim.nodes[&HostId::MASTER]
                .machine
                .host_table()
                .get(lost_host)
                .is_none()
        });
        scenario.sim.advance(Micros::from_secs(2));
        let current_hosts: Vec<HostId> = scenario
            .copies()
            .into_iter()
            .filter(|(copy_host, _)| *copy_host != lost_host)
            .map(|(copy_host, _)| copy_host)
            .collect();
        assert_eq!(current_hosts.len(), 1, "seed {seed}");
        assert_eq!(
            scenario.list_checkpoints()[0].copy_hosts.len(),
            1,
            "of {checkpoint_name}"
        );
    }
    for seed in seeds(10) {
        let mut scenario = JobScenario::with_copies(seed, 2, CopyPolicy::Count(2));
        let (checkpoint_name, hosts, missing_count, _) = scenario.checkpoint_with_copies();
        assert_eq!((hosts, missing_count), (vec![host(2)], 1));
        let reply = scenario.sim.ask(
            scenario.console,
            Request::AddHosts {
                host_file_lines: vec!["h3".into()],
            },
        );
        assert!(matches!(reply, Reply::HostsAdded(_)));
        scenario.sim.advance(Micros::from_secs(2));
        assert_eq!(
            scenario.copies(),
            [
                (host(2), checkpoint_name.clone()),
                (host(3), checkpoint_name)
            ],
            "seed {seed}"
        );
    }
}

/// The copies of a checkpoint are removed with the checkpoint, and when its job has ended for good.
#[test]
fn copies_are_removed_with_checkpoint_or_job() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::with_copies(seed, 3, CopyPolicy::Count(1));
        let (checkpoint_name, ..) = scenario.checkpoint_with_copies();
        assert_eq!(
            scenario
                .remove_checkpoints(RemovalSelection::Checkpoints(vec![checkpoint_name]))
                .len(),
            1
        );
        scenario.sim.advance(Micros::from_secs(1));
        assert_eq!(scenario.copies(), [], "it was removed (seed {seed})");
        // A checkpoint is removed while it waits for the copy of another checkpoint.
        let (first_name, next_name) = (
            scenario.make_checkpoint(None),
            scenario.make_checkpoint(None),
        );
        scenario.remove_checkpoints(RemovalSelection::Checkpoints(vec![first_name, next_name]));
        scenario.sim.advance(Micros::from_secs(1));
        assert_eq!(scenario.copies(), [], "seed {seed}");
        // A checkpoint is removed at a random time of its copy.
        let checkpoint_name = scenario.make_checkpoint(None);
        let delay = Micros(scenario.sim.rng.below(20_000));
        scenario.sim.advance(delay);
        scenario.remove_checkpoints(RemovalSelection::Checkpoints(vec![checkpoint_name]));
        scenario.sim.advance(Micros::from_secs(1));
        assert_eq!(scenario.copies(), [], "seed {seed}");
        scenario.make_checkpoint(None);
        let delay = Micros(scenario.sim.rng.below(20_000));
        scenario.sim.advance(delay);
        assert!(scenario.exit_all_tasks(0, 0), "it has ended well");
        assert_eq!(scenario.copies(), [], "seed {seed}");
    }
}

/// The log contains the target's reason for a failed copy. It contains the sender's reason only if
/// the target does not report one.
#[test]
fn target_reports_why_copy_failed() {
    for seed in seeds(20) {
        for hides_errors in [false, true] {
            let mut scenario = JobScenario::with_copies(seed, 3, CopyPolicy::Count(2));
            scenario.make_checkpoint(None);
            scenario.sim.random_faults.failed_steps_percent = 100;
            scenario.sim.image_store.hides_copy_errors = hides_errors;
            let checkpoint_name = scenario.sim.image_store.newest_name();
            let (hosts, missing_count, why) = scenario.await_copies(&checkpoint_name);
            // Some copies may have arrived before the failure.
            assert_eq!(hosts.len() as u32 + missing_count, 2, "{why} (seed {seed})");
            let (target_reason_count, sender_reason_count) = (
                why.matches("thrown").count(),
                why.matches("nothing more was taken").count(),
            );
            let expected_reporters = if hides_errors {
                (0, missing_count as usize)
            } else {
                (missing_count as usize, 0)
            };
            assert_eq!(
                (target_reason_count, sender_reason_count),
                expected_reporters,
                "{why} (seed {seed})"
            );
        }
    }
}

#[test]
fn failed_copy_goes_to_next_host() {
    for seed in seeds(40) {
        let mut scenario = JobScenario::with_copies(seed, 4, CopyPolicy::Count(1));
        scenario.make_checkpoint(None);
        let delay = Micros(scenario.sim.rng.below(5_000));
        scenario.sim.advance(delay);
        let victim = host(2 + scenario.sim.rng.below(3) as u16);
        scenario.sim.kill_host(victim);
        let checkpoint_name = scenario.sim.image_store.newest_name();
        scenario.sim.advance(Micros::from_secs(30));
        let live_copies: Vec<(HostId, String)> = scenario
            .copies()
            .into_iter()
            .filter(|(copy_host, _)| *copy_host != victim)
            .collect();
        assert_eq!(live_copies.len(), 1, "seed {seed}");
        assert_eq!(live_copies[0].1, checkpoint_name);
    }
}
