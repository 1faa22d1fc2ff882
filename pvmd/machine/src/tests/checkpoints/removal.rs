//! Removal of checkpoints by a user, and checkpoints of jobs that have ended.

use super::*;
use sempa_proto::checkpoint::{CheckpointEntry, RemovalRefusal, RemovalResults, RemovalSelection};
use sempa_proto::event::EventKind;

impl JobScenario {
    pub(super) fn remove_checkpoints(&mut self, selection: RemovalSelection) -> RemovalResults {
        let reply = self.sim.ask(
            self.console,
            Request::RemoveCheckpoints {
                selection,
                include_foreign: false,
            },
        );
        let Reply::CheckpointsRemoved(Ok(results)) = reply else {
            panic!("{reply:?}")
        };
        results
    }

    fn remove_checkpoint(&mut self, checkpoint_name: &str) -> Result<u64, RemovalRefusal> {
        self.remove_checkpoints(RemovalSelection::Checkpoints(vec![checkpoint_name.into()]))
            .remove(0)
            .1
    }

    pub(super) fn list_checkpoints(&mut self) -> Vec<CheckpointEntry> {
        let reply = self.sim.ask(self.console, Request::ListCheckpoints);
        let Reply::Checkpoints(Ok(entries)) = reply else {
            panic!("{reply:?}")
        };
        entries
    }

    pub(super) fn make_checkpoint(&mut self, schedule: Option<CheckpointSchedule>) -> String {
        let reply = self.sim.ask(
            self.console,
            Request::Checkpoint {
                job: self.job_tid(),
                schedule,
                end_job: false,
                wait_for_end: true,
            },
        );
        let Reply::Checkpointed(Ok(report)) = reply else {
            panic!("{reply:?} (seed {})", self.sim.seed)
        };
        report.name
    }

    /// Ends all tasks, the first task last, with the wait statuses `first_status` and
    /// `other_status`. Returns true if the store was notified that the job has ended.
    pub(super) fn exit_all_tasks(&mut self, first_status: i32, other_status: i32) -> bool {
        for tid in self.tids.clone().into_iter().rev() {
            let (proc, status) = (
                self.sim.proc_of(tid),
                if tid == self.job_tid() {
                    first_status
                } else {
                    other_status
                },
            );
            self.sim.exit_proc(proc, status);
        }
        self.await_job_end()
    }

    fn await_job_end(&mut self) -> bool {
        let tids = self.tids.clone();
        self.sim.run_until("all have ended", |sim| {
            tids.iter().all(|tid| !is_listed(sim, *tid))
        });
        self.sim.advance(Micros::from_secs(2));
        let ended_checkpoints = self.sim.image_store.checkpoints_of_ended_jobs();
        assert!(
            ended_checkpoints.is_empty()
                || ended_checkpoints.len() == self.sim.image_store.checkpoint_count(),
            "all sets of it (seed {})",
            self.sim.seed
        );
        !ended_checkpoints.is_empty()
    }
}

/// Checkpoints are removed by name and by job, except the newest checkpoint of a job that may still
/// roll back.
#[test]
fn unneeded_checkpoints_can_be_removed() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let (a, b, c) = (
            scenario.make_checkpoint(None),
            scenario.make_checkpoint(None),
            scenario.make_checkpoint(None),
        );
        assert_eq!(scenario.remove_checkpoint(&a), Ok(1));
        assert_eq!(
            scenario.remove_checkpoint(&a),
            Err(RemovalRefusal::NoSuchCheckpoint)
        );
        let listed_names: Vec<String> = scenario
            .list_checkpoints()
            .into_iter()
            .map(|entry| entry.name)
            .collect();
        assert!(
            listed_names.len() == 2 && listed_names.contains(&b) && listed_names.contains(&c),
            "{listed_names:?}"
        );
        let job = scenario.job_tid();
        let schedule = Some(CheckpointSchedule::Interval(Micros::from_secs(3600)));
        let newest_name = scenario.make_checkpoint(schedule);
        let mut removal_results = scenario.remove_checkpoints(RemovalSelection::Job(job));
        removal_results.sort_by_key(|(entry, _)| *entry == newest_name);
        assert_eq!(removal_results.len(), 3);
        assert_eq!(
            removal_results[2],
            (
                newest_name.clone(),
                Err(RemovalRefusal::OnlyRestartPoint(job))
            ),
            "it goes back to it"
        );
        assert!(
            removal_results[..2]
                .iter()
                .all(|(_, result)| *result == Ok(1)),
            "{removal_results:?}"
        );
        let cancel_request = Request::Checkpoint {
            job,
            schedule: Some(CheckpointSchedule::Disabled),
            end_job: false,
            wait_for_end: true,
        };
        assert_eq!(
            scenario.sim.ask(scenario.console, cancel_request),
            Reply::Done
        );
        assert_eq!(scenario.remove_checkpoint(&newest_name), Ok(1));
        assert_eq!(scenario.remove_checkpoints(RemovalSelection::Job(job)), []);
        let events = scenario.sim.ask(
            scenario.console,
            Request::Events {
                first_number: 0,
                events_max: 1000,
            },
        );
        let Reply::Events(events) = events else {
            panic!("{events:?}")
        };
        let removal_events = events.iter().filter_map(|event| match &event.kind {
            EventKind::CheckpointsRemoved { checkpoints, .. } => Some(checkpoints.len()),
            _ => None,
        });
        assert_eq!(
            removal_events.collect::<Vec<_>>(),
            [1, 2, 1],
            "and the log tells"
        );
    }
}

/// A checkpoint is not removed while a job is restarted from it.
#[test]
fn checkpoint_in_use_is_not_removed() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        let checkpoint_name = scenario.make_checkpoint(None);
        scenario.kill_all_tasks();
        let restart_request = scenario.sim.request(
            scenario.console,
            Request::Restart {
                checkpoint: checkpoint_name.clone(),
                host_names: Vec::new(),
                wait_for_end: true,
                force: false,
            },
        );
        assert_eq!(
            scenario.remove_checkpoint(&checkpoint_name),
            Err(RemovalRefusal::InUse),
            "seed {seed}"
        );
        let console = scenario.console;
        scenario.sim.run_until("it runs", |sim| {
            sim.procs[console].replies.contains_key(&restart_request)
        });
        assert!(
            matches!(
                scenario.sim.procs[console].replies[&restart_request],
                Reply::Restarted(Ok(_))
            ),
            "seed {seed}"
        );
        assert_eq!(
            scenario.remove_checkpoint(&checkpoint_name),
            Ok(1),
            "seed {seed}"
        );
    }
}

/// The checkpoints of a job are marked as ended if the job succeeded or a user killed it.
#[test]
fn success_or_kill_ends_need_for_checkpoints() {
    for seed in seeds(30) {
        for schedule in [
            None,
            Some(CheckpointSchedule::Interval(Micros::from_secs(1))),
        ] {
            let mut scenario = JobScenario::new(seed, 3, 4);
            scenario.make_checkpoint(schedule);
            assert!(
                scenario.exit_all_tasks(0, 0x100),
                "its first task has succeeded (seed {seed})"
            );
            let mut scenario = JobScenario::new(seed, 3, 4);
            scenario.make_checkpoint(schedule);
            scenario.exchange_messages(30);
            for tid in scenario.tids.clone() {
                scenario.send_signal(tid, 15);
            }
            assert!(scenario.await_job_end(), "it was killed (seed {seed})");
        }
    }
}

/// The checkpoints of a job are not marked as ended if the job crashed, was killed from outside the
/// virtual machine, lost a host or ended with its checkpoint.
#[test]
fn crashed_or_lost_job_keeps_checkpoints() {
    for seed in seeds(30) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        scenario.make_checkpoint(None);
        assert!(!scenario.exit_all_tasks(11, 0), "it crashed (seed {seed})");
        let mut scenario = JobScenario::new(seed, 3, 4);
        scenario.make_checkpoint(None);
        assert!(
            !scenario.exit_all_tasks(15, 0),
            "somebody outside has killed it (seed {seed})"
        );
        let mut scenario = JobScenario::new(seed, 3, 4);
        scenario.make_checkpoint(None);
        scenario.send_signal(scenario.job_tid(), 10);
        assert!(
            !scenario.exit_all_tasks(10, 0),
            "no signal to end (seed {seed})"
        );
        let mut scenario = JobScenario::new(seed, 3, 4);
        let end_request = Request::Checkpoint {
            job: scenario.job_tid(),
            schedule: None,
            end_job: true,
            wait_for_end: true,
        };
        let reply = scenario.sim.ask(scenario.console, end_request);
        assert!(
            matches!(reply, Reply::Checkpointed(Ok(_))),
            "{reply:?} (seed {seed})"
        );
        assert!(
            !scenario.await_job_end(),
            "it is to be started again (seed {seed})"
        );
        let mut scenario = JobScenario::new(seed, 3, 6);
        scenario.make_checkpoint(None);
        let task_hosts = scenario
            .tids
            .iter()
            .map(|tid| scenario.sim.procs[scenario.sim.proc_of(*tid)].host);
        let lost_host = task_hosts
            .into_iter()
            .find(|host_id| *host_id != HostId::MASTER)
            .expect("they are spread");
        scenario.sim.kill_host(lost_host);
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            if scenario.sim.nodes[&scenario.sim.procs[proc].host].is_alive {
                scenario.sim.exit_proc(proc, 0);
            }
        }
        scenario.sim.advance(Micros::from_secs(60));
        assert_eq!(
            scenario.sim.image_store.checkpoints_of_ended_jobs(),
            [""; 0],
            "some of it were lost with their host (seed {seed})"
        );
    }
}

/// The end of tasks because of a halt does not mark the checkpoints of their job as ended.
#[test]
fn halt_does_not_end_jobs() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 2);
        scenario.make_checkpoint(None);
        assert_eq!(
            scenario.sim.ask(scenario.console, Request::Halt),
            Reply::Done
        );
        // Each task exits successfully when it gets SIGTERM.
        for tid in scenario.tids.clone() {
            let proc = scenario.sim.proc_of(tid);
            scenario.sim.exit_proc(proc, 0);
        }
        scenario.sim.advance(Micros::from_secs(10));
        assert_eq!(
            scenario.sim.image_store.checkpoints_of_ended_jobs(),
            [""; 0],
            "seed {seed}"
        );
    }
}

/// A restart removes the mark that a job has ended from its checkpoints; the end of the restarted
/// job sets the mark again.
#[test]
fn restarted_job_needs_its_checkpoints_again() {
    for seed in seeds(20) {
        let mut scenario = JobScenario::new(seed, 3, 4);
        scenario.make_checkpoint(None);
        let second_name = scenario.make_checkpoint(None);
        assert!(scenario.exit_all_tasks(0, 0), "seed {seed}");
        assert!(
            scenario
                .list_checkpoints()
                .iter()
                .all(|entry| entry.job_ended_at.is_some()),
            "and the list tells"
        );
        scenario
            .restart(&second_name, &[])
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"));
        scenario.run_until_all_connected();
        assert_eq!(
            scenario.sim.image_store.checkpoints_of_ended_jobs(),
            [""; 0],
            "seed {seed}"
        );
        scenario.make_checkpoint(None);
        assert!(scenario.exit_all_tasks(0, 0), "seed {seed}");
        assert_eq!(
            scenario.sim.image_store.checkpoints_of_ended_jobs().len(),
            3,
            "seed {seed}"
        );
    }
}
