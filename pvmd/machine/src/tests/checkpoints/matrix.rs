//! Injects a fault of each kind into each party of a checkpoint and of a restart, before and after
//! each message that a daemon handles. A run without a fault records the names of these messages,
//! so a new message is covered without a change here.

use super::services::rebuild_virtual_machine;
use super::{JobScenario, is_connected, is_listed};
use crate::HostId;
use crate::tests::sim::fault_injection::{Fault, LONG_OUTAGE, SHORT_OUTAGE, Victim};
use crate::tests::sim::message_faults::MessagePoint;
use crate::tests::sim::seeds;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// Number of runs for each fault and point. Delays and the choice among messages with the same name
/// are random.
const RUNS_PER_FAULT: u64 = 4;
/// Interval in which no periodic checkpoint begins during a trial.
const IDLE_INTERVAL: Micros = Micros::from_secs(100_000);
/// Number of tasks. Each task runs on its own host; the first task runs on the master.
const TASK_COUNT: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// A checkpoint. The job has a checkpoint schedule, so it rolls back when a host is lost.
    Checkpoint,
    /// A restart. The job has no checkpoint schedule, so it does not roll back when a host is lost.
    Restart,
}

/// Victims: a host with a task of the job, its tasker, its engine, and the master.
const VICTIMS: [Victim; 4] = [
    Victim::Source,
    Victim::Master,
    Victim::SourceTasker,
    Victim::SourceEngine,
];

type PlannedFault = (MessagePoint, usize, Victim, Fault);

/// A checkpoint or restart of one job in progress.
struct Trial {
    scenario: JobScenario,
    operation: Operation,
    /// Name of the checkpoint that existed before the operation.
    earlier_checkpoint: String,
    operation_request: RequestId,
}

impl Trial {
    fn new(operation: Operation, seed: u64, fault: Option<PlannedFault>) -> Self {
        let mut scenario = JobScenario::new(seed, 4, TASK_COUNT);
        scenario.exchange_messages(10);
        let interval = (operation == Operation::Checkpoint).then_some(IDLE_INTERVAL);
        let earlier_checkpoint = scenario
            .checkpoint(interval)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        scenario.exchange_messages(10);
        if operation == Operation::Restart {
            scenario.kill_all_tasks();
        }
        scenario.sim.start_counting_points(fault);
        let operation_request = match operation {
            Operation::Checkpoint => scenario.begin_checkpoint(None),
            Operation::Restart => {
                let restart_request = Request::Restart {
                    checkpoint: earlier_checkpoint.clone(),
                    host_names: Vec::new(),
                    wait_for_end: true,
                    force: false,
                };
                scenario.sim.request(scenario.console, restart_request)
            }
        };
        Self {
            scenario,
            operation,
            earlier_checkpoint,
            operation_request,
        }
    }

    fn is_over(&self) -> bool {
        self.scenario.sim.procs[self.scenario.console]
            .replies
            .contains_key(&self.operation_request)
    }

    /// Runs an operation without a fault. Returns the number of times that each point was reached.
    fn reachable_points(operation: Operation, seed: u64) -> BTreeMap<MessagePoint, usize> {
        let mut trial = Self::new(operation, seed, None);
        while !trial.is_over() {
            trial.scenario.exchange_messages(1);
        }
        trial.scenario.sim.message_faults.times_reached.clone()
    }

    fn run_until_fault(&mut self, case: &str) {
        for _ in 0..2000 {
            if self.scenario.sim.injection.has_triggered {
                return self.scenario.exchange_messages(10);
            }
            self.scenario.exchange_messages(1);
        }
        panic!("the point was never reached: {case}");
    }

    fn are_all_running(&self) -> bool {
        self.scenario
            .tids
            .iter()
            .all(|tid| is_connected(&self.scenario.sim, *tid))
    }

    /// Waits until the request is answered and the victim has recovered or was removed. Returns
    /// true if the request succeeded.
    fn run_until_settled(&mut self, case: &str) -> bool {
        let (console, operation_request) = (self.scenario.console, self.operation_request);
        self.scenario.sim.run_until(case, |sim| {
            sim.procs[console].replies.contains_key(&operation_request)
        });
        self.scenario
            .sim
            .advance(LONG_OUTAGE + Micros::from_secs(20));
        match &self.scenario.sim.procs[console].replies[&operation_request] {
            Reply::Checkpointed(result) => result.is_ok(),
            Reply::Restarted(result) => result.is_ok(),
            other => panic!("{other:?}: {case}"),
        }
    }

    /// Lets all tasks exchange messages. Asserts that no message is lost and that no images, drafts
    /// or resume tokens remain.
    fn assert_continues(&mut self, case: &str) {
        assert!(
            self.are_all_running(),
            "not all run: {case}\n{}",
            self.scenario.sim.state_report()
        );
        self.scenario.exchange_messages(40);
        self.scenario.run_until_all_received();
        self.scenario.sim.advance(Micros::from_secs(2));
        let nodes = &self.scenario.sim.nodes;
        let remaining_images = self
            .scenario
            .sim
            .image_store
            .leftover_count_on(|host_id| nodes[&host_id].is_alive);
        let (drafts, _) = self.scenario.sim.image_store.leftover_counts();
        assert_eq!(
            (
                remaining_images,
                drafts,
                self.scenario.sim.resume_token_count()
            ),
            (0, 0, 0),
            "something is left: {case}"
        );
    }

    /// Kills the job and restarts it from the newest checkpoint.
    fn assert_restarts(&mut self, case: &str) {
        let checkpoint_name = self.scenario.sim.image_store.newest_name();
        self.scenario.sim.replace_engines();
        self.scenario.kill_all_tasks();
        self.scenario
            .restart(&checkpoint_name, &[])
            .unwrap_or_else(|why| panic!("{why}: {case}\n{}", self.scenario.sim.state_report()));
        self.scenario.run_until_all_connected();
        self.assert_continues(case);
    }

    fn check_outcome(&mut self, victim: Victim, fault: Fault, case: &str) {
        let has_succeeded = self.run_until_settled(case);
        let do_tasks_die =
            is_host_lost(victim, fault) || (victim == Victim::SourceTasker && fault == Fault::Kill);
        match self.operation {
            Operation::Checkpoint => {
                // If the job rolled back while a second checkpoint was being sealed, that
                // checkpoint may be complete, too.
                let checkpoint_count = self.scenario.sim.image_store.checkpoint_count();
                assert!(
                    checkpoint_count == 1 + usize::from(has_succeeded)
                        || do_tasks_die && checkpoint_count == 2,
                    "{checkpoint_count} sets: {case}"
                );
                self.assert_continues(case);
            }
            Operation::Restart if has_succeeded && (self.are_all_running() || !do_tasks_die) => {
                self.assert_continues(case)
            }
            Operation::Restart => {
                let is_running = |tid: &&Tid| is_listed(&self.scenario.sim, **tid);
                let running_tids: Vec<&Tid> =
                    self.scenario.tids.iter().filter(is_running).collect();
                assert!(
                    has_succeeded || running_tids.is_empty(),
                    "{running_tids:?} run: {case}\n{}",
                    self.scenario.sim.state_report()
                );
            }
        }
        self.assert_restarts(case);
    }

    /// Asserts that the virtual machine has ended with its master. Then restarts the job from the
    /// store in a new virtual machine.
    fn check_without_master(mut self, case: &str) {
        self.scenario
            .sim
            .advance(LONG_OUTAGE + Micros::from_secs(20));
        let nodes = &self.scenario.sim.nodes;
        let live_hosts: Vec<HostId> = nodes
            .iter()
            .filter(|(_, n)| n.is_alive)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(live_hosts, [], "{case}");
        let (newest_name, checkpoint_count) = (
            self.scenario.sim.image_store.newest_name(),
            self.scenario.sim.image_store.checkpoint_count(),
        );
        assert!(
            checkpoint_count == 1 || self.operation == Operation::Checkpoint,
            "{checkpoint_count} sets: {case}"
        );
        assert!(
            checkpoint_count == 1 || newest_name != self.earlier_checkpoint,
            "{case}"
        );
        let mut scenario = rebuild_virtual_machine(self.scenario);
        scenario
            .restart(&newest_name, &[])
            .unwrap_or_else(|why| panic!("{why}: {case}"));
        scenario.run_until_all_connected();
        scenario.exchange_messages(40);
        scenario.run_until_all_received();
    }
}

/// True if other hosts consider the victim's host lost because of this fault.
fn is_host_lost(victim: Victim, fault: Fault) -> bool {
    let outlasts_lease = !matches!(
        fault,
        Fault::Stop(SHORT_OUTAGE) | Fault::Isolate(SHORT_OUTAGE)
    );
    matches!(victim, Victim::Source | Victim::Master) && outlasts_lease
}

fn try_all_faults(operation: Operation) {
    let mut trial_count = 0;
    for (n, (point, times_reached)) in Trial::reachable_points(operation, 1)
        .into_iter()
        .enumerate()
    {
        for victim in VICTIMS {
            for fault in victim.faults() {
                for seed in seeds(RUNS_PER_FAULT + 1) {
                    // With other delays a daemon may handle the message fewer times.
                    let nth = (seed as usize - 1) * (times_reached - 1) / 2 % times_reached;
                    let case = format!(
                        "{operation:?}: {victim:?}, {fault:?}, {point:?} for the {nth}th time, seed {seed}"
                    );
                    let seed = seed * 1000 + n as u64;
                    let mut trial =
                        Trial::new(operation, seed, Some((point.clone(), nth, victim, fault)));
                    trial.run_until_fault(&case);
                    trial_count += 1;
                    if victim == Victim::Master && fault == Fault::Kill {
                        trial.check_without_master(&case);
                    } else {
                        trial.check_outcome(victim, fault, &case);
                    }
                }
            }
        }
    }
    assert!(trial_count > 200, "{trial_count} tried");
}

/// After any fault of any victim at any message of a checkpoint, the job continues and all
/// checkpoints are complete.
#[test]
fn job_survives_any_fault_during_checkpoint() {
    try_all_faults(Operation::Checkpoint);
}

/// After any fault of any victim at any message of a restart, each task of the job runs at most
/// once, and the job can be restarted.
#[test]
fn job_runs_at_most_once_after_any_restart_fault() {
    try_all_faults(Operation::Restart);
}
