//! Checkpoints that a user removes, and checkpoints whose jobs have ended.

use super::*;
use sempa_proto::checkpoint::{CheckpointEntry, RemovalRefusal, RemovalResults, RemovalSelection};
use sempa_proto::event::EventKind;

impl JobScenario {
    pub(super) fn remove(&mut self, which: RemovalSelection) -> RemovalResults {
        let reply = self.sim.ask(
            self.console,
            Request::RemoveCheckpoints {
                selection: which,
                include_foreign: false,
            },
        );
        let Reply::CheckpointsRemoved(Ok(removed)) = reply else {
            panic!("{reply:?}")
        };
        removed
    }

    fn remove_set(&mut self, set: &str) -> Result<u64, RemovalRefusal> {
        self.remove(RemovalSelection::Checkpoints(vec![set.into()]))
            .remove(0)
            .1
    }

    pub(super) fn list_checkpoints(&mut self) -> Vec<CheckpointEntry> {
        let reply = self.sim.ask(self.console, Request::ListCheckpoints);
        let Reply::Checkpoints(Ok(sets)) = reply else {
            panic!("{reply:?}")
        };
        sets
    }

    pub(super) fn make_checkpoint(&mut self, pace: Option<CheckpointSchedule>) -> String {
        let reply = self.sim.ask(
            self.console,
            Request::Checkpoint {
                job: self.job(),
                schedule: pace,
                end_job: false,
                wait: true,
            },
        );
        let Reply::Checkpointed(Ok(report)) = reply else {
            panic!("{reply:?} (seed {})", self.sim.seed)
        };
        report.name
    }

    /// Ends all tasks with these wait statuses, the first task last. True if the store was notified
    /// that the job has ended.
    pub(super) fn exit_all(&mut self, first: i32, others: i32) -> bool {
        for tid in self.tids.clone().into_iter().rev() {
            let (proc, status) = (
                self.sim.proc_of(tid),
                if tid == self.job() { first } else { others },
            );
            self.sim.exit(proc, status);
        }
        self.await_end()
    }

    fn await_end(&mut self) -> bool {
        let tids = self.tids.clone();
        self.sim.run_until("all have ended", |sim| {
            tids.iter().all(|tid| !is_listed(sim, *tid))
        });
        self.sim.advance(Micros::from_secs(2));
        let ended = self.sim.image_store.ended();
        assert!(
            ended.is_empty() || ended.len() == self.sim.image_store.count(),
            "all sets of it (seed {})",
            self.sim.seed
        );
        !ended.is_empty()
    }
}

/// Checkpoints are removed by name and by job unless they are needed.
#[test]
fn unneeded_checkpoints_can_be_removed() {
    for seed in seeds(20) {
        let mut scene = JobScenario::new(seed, 3, 4);
        let (a, b, c) = (
            scene.make_checkpoint(None),
            scene.make_checkpoint(None),
            scene.make_checkpoint(None),
        );
        assert_eq!(scene.remove_set(&a), Ok(1));
        assert_eq!(scene.remove_set(&a), Err(RemovalRefusal::Unknown));
        let listed: Vec<String> = scene
            .list_checkpoints()
            .into_iter()
            .map(|set| set.name)
            .collect();
        assert!(
            listed.len() == 2 && listed.contains(&b) && listed.contains(&c),
            "{listed:?}"
        );
        let job = scene.job();
        let every = Some(CheckpointSchedule::Every(Micros::from_secs(3600)));
        let newest = scene.make_checkpoint(every);
        let mut gone = scene.remove(RemovalSelection::Job(job));
        gone.sort_by_key(|(set, _)| *set == newest);
        assert_eq!(gone.len(), 3);
        assert_eq!(
            gone[2],
            (newest.clone(), Err(RemovalRefusal::OnlyRestartPoint(job))),
            "it goes back to it"
        );
        assert!(
            gone[..2].iter().all(|(_, became)| *became == Ok(1)),
            "{gone:?}"
        );
        let stop = Request::Checkpoint {
            job,
            schedule: Some(CheckpointSchedule::Never),
            end_job: false,
            wait: true,
        };
        assert_eq!(scene.sim.ask(scene.console, stop), Reply::Done);
        assert_eq!(scene.remove_set(&newest), Ok(1));
        assert_eq!(scene.remove(RemovalSelection::Job(job)), []);
        let events = scene.sim.ask(
            scene.console,
            Request::Events {
                first_number: 0,
                limit: 1000,
            },
        );
        let Reply::Events(events) = events else {
            panic!("{events:?}")
        };
        let removed = events.iter().filter_map(|event| match &event.kind {
            EventKind::CheckpointsRemoved {
                checkpoints: sets, ..
            } => Some(sets.len()),
            _ => None,
        });
        assert_eq!(removed.collect::<Vec<_>>(), [1, 2, 1], "and the log tells");
    }
}

/// A checkpoint from which a job is being restarted is not removed.
#[test]
fn checkpoint_in_use_is_not_removed() {
    for seed in seeds(20) {
        let mut scene = JobScenario::new(seed, 3, 4);
        let set = scene.make_checkpoint(None);
        scene.kill_all();
        let asked = scene.sim.request(
            scene.console,
            Request::Restart {
                checkpoint: set.clone(),
                host_names: Vec::new(),
                wait: true,
            },
        );
        assert_eq!(
            scene.remove_set(&set),
            Err(RemovalRefusal::InUse),
            "seed {seed}"
        );
        let console = scene.console;
        scene.sim.run_until("it runs", |sim| {
            sim.procs[console].replies.contains_key(&asked)
        });
        assert!(
            matches!(
                scene.sim.procs[console].replies[&asked],
                Reply::Restarted(Ok(_))
            ),
            "seed {seed}"
        );
        assert_eq!(scene.remove_set(&set), Ok(1), "seed {seed}");
    }
}

/// The checkpoints of a job that succeeded or was killed by a user are marked as ended.
#[test]
fn success_or_kill_ends_need_for_checkpoints() {
    for seed in seeds(30) {
        for every in [None, Some(CheckpointSchedule::Every(Micros::from_secs(1)))] {
            let mut scene = JobScenario::new(seed, 3, 4);
            scene.make_checkpoint(every);
            assert!(
                scene.exit_all(0, 0x100),
                "its first task has succeeded (seed {seed})"
            );
            let mut scene = JobScenario::new(seed, 3, 4);
            scene.make_checkpoint(every);
            scene.exchange_messages(30);
            for tid in scene.tids.clone() {
                scene.signal(tid, 15);
            }
            assert!(scene.await_end(), "it was killed (seed {seed})");
        }
    }
}

/// The checkpoints of a job that crashed, lost a host or ended with its checkpoint are kept.
#[test]
fn crashed_or_lost_job_keeps_checkpoints() {
    for seed in seeds(30) {
        let mut scene = JobScenario::new(seed, 3, 4);
        scene.make_checkpoint(None);
        assert!(!scene.exit_all(11, 0), "it crashed (seed {seed})");
        let mut scene = JobScenario::new(seed, 3, 4);
        scene.make_checkpoint(None);
        assert!(
            !scene.exit_all(15, 0),
            "somebody outside has killed it (seed {seed})"
        );
        let mut scene = JobScenario::new(seed, 3, 4);
        scene.make_checkpoint(None);
        scene.signal(scene.job(), 10);
        assert!(!scene.exit_all(10, 0), "no signal to end (seed {seed})");
        let mut scene = JobScenario::new(seed, 3, 4);
        let ends = Request::Checkpoint {
            job: scene.job(),
            schedule: None,
            end_job: true,
            wait: true,
        };
        let reply = scene.sim.ask(scene.console, ends);
        assert!(
            matches!(reply, Reply::Checkpointed(Ok(_))),
            "{reply:?} (seed {seed})"
        );
        assert!(
            !scene.await_end(),
            "it is to be started again (seed {seed})"
        );
        let mut scene = JobScenario::new(seed, 3, 6);
        scene.make_checkpoint(None);
        let away = scene
            .tids
            .iter()
            .map(|tid| scene.sim.procs[scene.sim.proc_of(*tid)].host);
        let lost = away
            .into_iter()
            .find(|at| *at != HostId::MASTER)
            .expect("they are spread");
        scene.sim.kill_host(lost);
        for tid in scene.tids.clone() {
            let proc = scene.sim.proc_of(tid);
            if scene.sim.nodes[&scene.sim.procs[proc].host].is_alive {
                scene.sim.exit(proc, 0);
            }
        }
        scene.sim.advance(Micros::from_secs(60));
        assert_eq!(
            scene.sim.image_store.ended(),
            [""; 0],
            "some of it were lost with their host (seed {seed})"
        );
    }
}

/// A job does not count as ended because the virtual machine halts.
#[test]
fn halt_does_not_end_jobs() {
    for seed in seeds(20) {
        let mut scene = JobScenario::new(seed, 3, 2);
        scene.make_checkpoint(None);
        assert_eq!(scene.sim.ask(scene.console, Request::Halt), Reply::Done);
        // Tasks exit successfully when they are asked to.
        for tid in scene.tids.clone() {
            let proc = scene.sim.proc_of(tid);
            scene.sim.exit(proc, 0);
        }
        scene.sim.advance(Micros::from_secs(10));
        assert_eq!(scene.sim.image_store.ended(), [""; 0], "seed {seed}");
    }
}

/// A restarted job needs its checkpoints again; when it has ended, they are marked as ended.
#[test]
fn restarted_job_needs_its_checkpoints_again() {
    for seed in seeds(20) {
        let mut scene = JobScenario::new(seed, 3, 4);
        scene.make_checkpoint(None);
        let second = scene.make_checkpoint(None);
        assert!(scene.exit_all(0, 0), "seed {seed}");
        assert!(
            scene
                .list_checkpoints()
                .iter()
                .all(|set| set.job_ended_at.is_some()),
            "and the list tells"
        );
        scene
            .restart(&second, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scene.run_until_all_connected();
        assert_eq!(scene.sim.image_store.ended(), [""; 0], "seed {seed}");
        scene.make_checkpoint(None);
        assert!(scene.exit_all(0, 0), "seed {seed}");
        assert_eq!(scene.sim.image_store.ended().len(), 3, "seed {seed}");
    }
}
