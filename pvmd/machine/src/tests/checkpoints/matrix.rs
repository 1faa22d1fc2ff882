//! Injects a fault of each kind into each party of a checkpoint and of a restart, before and after
//! each message that a daemon handles. The machines themselves enumerate the messages: a new one is
//! covered without a change here.

use super::services::rebuild_virtual_machine;
use super::{JobScenario, is_connected, is_listed};
use crate::HostId;
use crate::tests::sim::fault_injection::{Fault, LONG_OUTAGE, SHORT_OUTAGE, Victim};
use crate::tests::sim::message_faults::MessagePoint;
use crate::tests::sim::seeds;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, RequestId, Tid};
use std::collections::BTreeMap;

/// Number of runs per fault and point. Delays and the choice among equal messages are random.
const RUNS_PER_FAULT: u64 = 4;
/// Long enough that no periodic checkpoint begins.
const IDLE_INTERVAL: Micros = Micros::from_secs(100_000);
/// Number of tasks. Each task runs on a host of its own, the first one on the master.
const TASKS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// A checkpoint of a job that rolls back when it loses a host.
    Checkpoint,
    /// A restart of a job that does not roll back.
    Restart,
}

/// Victims: a host with a task of the job, its tasker and engine, and the master.
const VICTIMS: [Victim; 4] = [
    Victim::Source,
    Victim::Master,
    Victim::SourceTasker,
    Victim::SourceEngine,
];

type PlannedFault = (MessagePoint, usize, Victim, Fault);

/// A checkpoint or restart in progress.
struct Trial {
    scene: JobScenario,
    operation: Operation,
    /// Name of the checkpoint that existed before the operation.
    earlier_checkpoint: String,
    request: RequestId,
}

impl Trial {
    fn new(operation: Operation, seed: u64, fault: Option<PlannedFault>) -> Trial {
        let mut scene = JobScenario::new(seed, 4, TASKS);
        scene.exchange_messages(10);
        let every = (operation == Operation::Checkpoint).then_some(IDLE_INTERVAL);
        let earlier_checkpoint = scene
            .checkpoint(every)
            .unwrap_or_else(|why| panic!("{why} (seed {seed})"))
            .name;
        scene.exchange_messages(10);
        if operation == Operation::Restart {
            scene.kill_all();
        }
        scene.sim.count_points(fault);
        let request = match operation {
            Operation::Checkpoint => scene.begin_checkpoint(None),
            Operation::Restart => {
                let again = Request::Restart {
                    checkpoint: earlier_checkpoint.clone(),
                    host_names: Vec::new(),
                    wait: true,
                };
                scene.sim.request(scene.console, again)
            }
        };
        Trial {
            scene,
            operation,
            earlier_checkpoint,
            request,
        }
    }

    fn is_over(&self) -> bool {
        self.scene.sim.procs[self.scene.console]
            .replies
            .contains_key(&self.request)
    }

    /// Returns the number of times that each point is reached without a fault.
    fn reachable_points(what: Operation, seed: u64) -> BTreeMap<MessagePoint, usize> {
        let mut trial = Trial::new(what, seed, None);
        while !trial.is_over() {
            trial.scene.exchange_messages(1);
        }
        trial.scene.sim.message_faults.times_reached.clone()
    }

    fn run_until_fault(&mut self, case: &str) {
        for _ in 0..2000 {
            if self.scene.sim.injection.triggered {
                return self.scene.exchange_messages(10);
            }
            self.scene.exchange_messages(1);
        }
        panic!("the point was never reached: {case}");
    }

    fn all_run(&self) -> bool {
        self.scene
            .tids
            .iter()
            .all(|tid| is_connected(&self.scene.sim, *tid))
    }

    /// Waits until the request is answered and the victim has recovered or was removed. True if the
    /// request succeeded.
    fn run_until_settled(&mut self, case: &str) -> bool {
        let (console, asked) = (self.scene.console, self.request);
        self.scene
            .sim
            .run_until(case, |sim| sim.procs[console].replies.contains_key(&asked));
        self.scene.sim.advance(LONG_OUTAGE + Micros::from_secs(20));
        match &self.scene.sim.procs[console].replies[&asked] {
            Reply::Checkpointed(result) => result.is_ok(),
            Reply::Restarted(result) => result.is_ok(),
            other => panic!("{other:?}: {case}"),
        }
    }

    /// Lets all tasks exchange messages and asserts that no message is lost and no file is left.
    fn assert_continues(&mut self, case: &str) {
        assert!(
            self.all_run(),
            "not all run: {case}\n{}",
            self.scene.sim.history()
        );
        self.scene.exchange_messages(40);
        self.scene.run_until_all_received();
        self.scene.sim.advance(Micros::from_secs(2));
        let nodes = &self.scene.sim.nodes;
        let left = self
            .scene
            .sim
            .image_store
            .leftovers_on(|on| nodes[&on].is_alive);
        let (drafts, _) = self.scene.sim.image_store.leftovers();
        assert_eq!(
            (left, drafts, self.scene.sim.tokens_left()),
            (0, 0, 0),
            "something is left: {case}"
        );
    }

    /// Kills the job and restarts it from the newest checkpoint.
    fn assert_restarts(&mut self, case: &str) {
        let set = self.scene.sim.image_store.newest_name();
        self.scene.sim.replace_engines();
        self.scene.kill_all();
        self.scene
            .restart(&set, &[])
            .unwrap_or_else(|why| panic!("{why}: {case}\n{}", self.scene.sim.history()));
        self.scene.run_until_all_connected();
        self.assert_continues(case);
    }

    fn check(&mut self, victim: Victim, fault: Fault, case: &str) {
        let good = self.run_until_settled(case);
        let tasks_die = counts_as_lost(victim, fault)
            || (victim == Victim::SourceTasker && fault == Fault::Kill);
        match self.operation {
            Operation::Checkpoint => {
                // A checkpoint that was being sealed when the job rolled back is complete, too.
                let sets = self.scene.sim.image_store.count();
                assert!(
                    sets == 1 + usize::from(good) || tasks_die && sets == 2,
                    "{sets} sets: {case}"
                );
                self.assert_continues(case);
            }
            Operation::Restart if good && (self.all_run() || !tasks_die) => {
                self.assert_continues(case)
            }
            Operation::Restart => {
                let runs = |tid: &&Tid| is_listed(&self.scene.sim, **tid);
                let left: Vec<&Tid> = self.scene.tids.iter().filter(runs).collect();
                assert!(
                    good || left.is_empty(),
                    "{left:?} run: {case}\n{}",
                    self.scene.sim.history()
                );
            }
        }
        self.assert_restarts(case);
    }

    /// Checks the case that the virtual machine has ended with its master: the job is restarted
    /// from the store in a new virtual machine.
    fn check_without_master(mut self, case: &str) {
        self.scene.sim.advance(LONG_OUTAGE + Micros::from_secs(20));
        let nodes = &self.scene.sim.nodes;
        let left: Vec<HostId> = nodes
            .iter()
            .filter(|(_, n)| n.is_alive)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(left, [], "{case}");
        let (newest, count) = (
            self.scene.sim.image_store.newest_name(),
            self.scene.sim.image_store.count(),
        );
        assert!(
            count == 1 || self.operation == Operation::Checkpoint,
            "{count} sets: {case}"
        );
        assert!(count == 1 || newest != self.earlier_checkpoint, "{case}");
        let mut scene = rebuild_virtual_machine(self.scene);
        scene
            .restart(&newest, &[])
            .unwrap_or_else(|why| panic!("{why}: {case}"));
        scene.run_until_all_connected();
        scene.exchange_messages(40);
        scene.run_until_all_received();
    }
}

/// True if other hosts consider a host with this fault lost.
fn counts_as_lost(victim: Victim, fault: Fault) -> bool {
    let lasts = !matches!(
        fault,
        Fault::Stop(SHORT_OUTAGE) | Fault::Isolate(SHORT_OUTAGE)
    );
    matches!(victim, Victim::Source | Victim::Master) && lasts
}

fn try_all(operation: Operation) {
    let mut tried = 0;
    for (n, (point, times)) in Trial::reachable_points(operation, 1)
        .into_iter()
        .enumerate()
    {
        for victim in VICTIMS {
            for fault in victim.faults() {
                for seed in seeds(RUNS_PER_FAULT + 1) {
                    // With other delays a message may be handled less often.
                    let nth = (seed as usize - 1) * (times - 1) / 2 % times;
                    let case = format!(
                        "{operation:?}: {victim:?}, {fault:?}, {point:?} for the {nth}th time, seed {seed}"
                    );
                    let seed = seed * 1000 + n as u64;
                    let mut trial =
                        Trial::new(operation, seed, Some((point.clone(), nth, victim, fault)));
                    trial.run_until_fault(&case);
                    tried += 1;
                    if victim == Victim::Master && fault == Fault::Kill {
                        trial.check_without_master(&case);
                    } else {
                        trial.check(victim, fault, &case);
                    }
                }
            }
        }
    }
    assert!(tried > 200, "{tried} tried");
}

/// After any fault of any victim at any message of a checkpoint, the job continues and all
/// checkpoints are complete.
#[test]
fn job_survives_any_fault_during_checkpoint() {
    try_all(Operation::Checkpoint);
}

/// After any fault of any victim at any message of a restart, the job runs once or not at all and
/// can be restarted.
#[test]
fn job_runs_at_most_once_after_any_restart_fault() {
    try_all(Operation::Restart);
}
