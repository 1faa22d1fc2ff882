//! Injects a fault of each kind into each party of a migration, before and after each step. The
//! list of steps is [`Step::ALL`], and the machines report the edges of the steps, so a new step is
//! covered without a change here.

use super::scenario::{
    assert_in_order, list_events, migrate_request, send_number_if_running, spawn, spawn_on,
};
use super::sim::fault_injection::{Fault, FaultPoint, LONG_OUTAGE, SHORT_OUTAGE, StepEdge, Victim};
use super::sim::{Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request, RmServices};
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Number of runs for each fault and point. Delays and the use of post-copy are random.
const RUNS_PER_FAULT: u64 = 4;

fn all_fault_points() -> Vec<FaultPoint> {
    Step::ALL
        .into_iter()
        .flat_map(|step| [(step, StepEdge::Start), (step, StepEdge::End)])
        .collect()
}

/// A migration from h2 to h3 of a task that exchanges messages with a task on h4 and with the
/// console. The console is notified of the task's exit with tag 1. The virtual machine has a
/// resource manager.
struct Trial {
    sim: Sim,
    console: usize,
    task_proc: usize,
    peer_proc: usize,
    sent_counts: BTreeMap<(usize, Tid), u32>,
    migration_request: RequestId,
}

impl Trial {
    fn new(seed: u64, fault: Option<(FaultPoint, Victim, Fault)>) -> Self {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let rm_proc = spawn(&mut sim, console, spawn_on("h1", "rm", 1))[0];
        sim.ask(
            rm_proc,
            Request::RegisterRm(RmServices {
                placement: false,
                vm_requests: false,
                task_exits: false,
            }),
        );
        sim.injection.resource_manager_proc = Some(rm_proc);
        // The step `PreCopy` occurs only in a migration with pre-copy.
        sim.injection.always_live_copies =
            fault.is_none_or(|((step, _), ..)| step == Step::PreCopy);
        let task_proc = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
        let peer_proc = spawn(&mut sim, console, spawn_on("h4", "child", 1))[0];
        let tid = sim.procs[task_proc].tid();
        let subjects = NotifySubjects::TaskExit(vec![tid]);
        sim.ask(
            console,
            Request::Notify(NotifyRequest {
                subjects,
                ctx: 0,
                tag: 1,
                is_cancellation: false,
            }),
        );
        if let Some((point, victim, planned_fault)) = fault {
            sim.plan_fault(point, victim, planned_fault);
        }
        let migration_request = sim.request(console, migrate_request(tid, "h3"));
        Self {
            sim,
            console,
            task_proc,
            peer_proc,
            sent_counts: BTreeMap::new(),
            migration_request,
        }
    }

    fn tid(&self) -> Tid {
        self.sim.procs[self.task_proc].tid()
    }

    /// Sends a message from each of the three processes to the other two processes, if the sender
    /// runs. Then advances the time by less than 3 ms.
    fn exchange_messages(&mut self) {
        let all_procs = [self.console, self.task_proc, self.peer_proc];
        for from in all_procs {
            for to in all_procs.into_iter().filter(|to| *to != from) {
                let to = self.sim.procs[to].tid();
                send_number_if_running(&mut self.sim, &mut self.sent_counts, from, to);
            }
        }
        let delay = Micros(self.sim.rng.below(3_000));
        self.sim.advance(delay);
    }

    /// Exchanges messages until the fault has been injected, and for 20 rounds more. Panics if the
    /// fault's point is not reached within 1000 rounds.
    fn run_until_fault(&mut self, case: &str) {
        let mut rounds_after_fault = 0;
        for _ in 0..1000 {
            self.exchange_messages();
            rounds_after_fault += u32::from(self.sim.injection.has_triggered);
            if rounds_after_fault > 20 {
                return;
            }
        }
        panic!("the point was never reached: {case}");
    }

    fn is_over(&self) -> bool {
        self.sim.procs[self.console]
            .replies
            .contains_key(&self.migration_request)
    }

    /// Returns the task's entries in the task list, and the number of exit notifications.
    fn list_entries_and_exits(&mut self) -> (Vec<TaskInfo>, usize) {
        let tasks = match self.sim.ask(
            self.console,
            Request::Tasks {
                selector: self.tid(),
            },
        ) {
            Reply::Tasks(tasks) => tasks,
            // The task was on a host that is lost.
            Reply::Failed {
                error: PvmError::NoHost,
                ..
            } => Vec::new(),
            other => panic!("no list: {other:?}"),
        };
        (tasks, self.sim.procs[self.console].notifications(1).len())
    }

    /// Waits until the migration has ended and all hosts know the result, and checks the outcome.
    /// If `may_be_lost` is false, the task must live. Returns true if the task lives.
    fn check_outcome(&mut self, may_be_lost: bool, case: &str) -> bool {
        let (console, migration_request) = (self.console, self.migration_request);
        self.sim.run_until(case, |s| {
            s.procs[console].replies.contains_key(&migration_request)
        });
        self.sim.advance(LONG_OUTAGE + Micros::from_secs(20));
        let (tasks, exit_count) = self.list_entries_and_exits();
        assert_eq!(
            tasks.len() + exit_count,
            1,
            "{tasks:?}, told of its end {exit_count} times: {case}"
        );
        let all_procs = [self.console, self.task_proc, self.peer_proc];
        let tid = self.tid();
        let is_end_of_migration = |event: &&EventKind| match event {
            EventKind::Migrated { tid: event_tid, .. }
            | EventKind::MigrationFailed { tid: event_tid, .. } => *event_tid == tid,
            _ => false,
        };
        let event_log = list_events(&mut self.sim, console);
        assert_eq!(
            event_log.iter().filter(is_end_of_migration).count(),
            1,
            "the log says how the move ended: {case}"
        );
        if exit_count > 0 {
            assert!(
                may_be_lost,
                "it is lost: {case}\n{}",
                self.sim.state_report()
            );
            let explains_loss = |event: &EventKind| {
                matches!(event, EventKind::TaskEnded { tid: event_tid, .. } if *event_tid == tid)
                    || matches!(event, EventKind::HostGone { .. })
            };
            assert!(
                event_log.iter().any(explains_loss),
                "the log says why it is gone: {case}"
            );
            let proc = &self.sim.procs[self.task_proc];
            let is_dead =
                proc.exited || (proc.is_frozen() && self.sim.injection.source_was_killed());
            assert!(
                is_dead,
                "the task is reported dead but a process is left: {case}"
            );
            assert_in_order(&self.sim, &all_procs);
            return false;
        }
        let proc = &self.sim.procs[self.task_proc];
        assert!(
            !tasks[0].migrating && proc.conn.is_some() && !proc.is_frozen(),
            "it has not arrived: {case}"
        );
        assert_eq!(tasks[0].host, proc.host, "{case}");
        self.exchange_messages();
        let message_count = self.sent_counts.values().sum::<u32>();
        self.sim
            .run_until(case, |s| assert_in_order(s, &all_procs) == message_count);
        self.sim.advance(Micros::from_secs(3));
        assert_eq!(self.sim.resume_token_count(), 0, "{case}");
        true
    }

    /// Asserts that all hosts have ended with their master and that no task runs.
    fn check_without_master(&mut self, case: &str) {
        self.sim.advance(LONG_OUTAGE + Micros::from_secs(20));
        let live_hosts: Vec<HostId> = self
            .sim
            .nodes
            .iter()
            .filter(|(_, n)| n.is_alive)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(live_hosts, [], "{case}");
        assert!(self.sim.procs[self.task_proc].exited, "{case}");
        assert_in_order(&self.sim, &[self.console, self.task_proc, self.peer_proc]);
    }
}

/// True if other hosts consider the victim lost because of this fault.
fn is_victim_lost(victim: Victim, fault: Fault) -> bool {
    match victim {
        Victim::Source | Victim::Target | Victim::Master => !matches!(
            fault,
            Fault::Stop(SHORT_OUTAGE) | Fault::Isolate(SHORT_OUTAGE)
        ),
        Victim::SourceTasker | Victim::TargetTasker => fault == Fault::Kill,
        _ => false,
    }
}

/// True if this fault at this point may end the task, according to the table in MIGRATION.md.
fn may_be_lost((step, edge): FaultPoint, victim: Victim, fault: Fault) -> bool {
    let point = (step, edge);
    // Post-copy memory is complete when the step `Arrive` ends.
    let is_memory_incomplete = point < (Step::Arrive, StepEdge::End);
    match victim {
        Victim::Source | Victim::SourceTasker => {
            is_victim_lost(victim, fault) && is_memory_incomplete
        }
        Victim::Target | Victim::TargetTasker => {
            is_victim_lost(victim, fault) && point >= (Step::Restore, StepEdge::End)
        }
        Victim::Master => is_victim_lost(victim, fault),
        // The engines transfer the post-copy memory.
        Victim::SourceEngine => fault == Fault::Kill && point >= (Step::Dump, StepEdge::End),
        Victim::TargetEngine => fault == Fault::Kill && point >= (Step::Restore, StepEdge::End),
        Victim::Session => {
            !matches!(fault, Fault::Stop(_)) && point >= (Step::Transfer, StepEdge::End)
        }
        Victim::ResourceManager => false,
    }
}

/// The machines report the begin and the end of every step of a migration once.
#[test]
fn every_step_begins_and_ends_once() {
    for seed in seeds(10) {
        let mut trial = Trial::new(seed, None);
        while !trial.is_over() {
            trial.exchange_messages();
        }
        assert!(trial.check_outcome(false, "no fault"));
        let mut reached_points = trial.sim.injection.reached_points.clone();
        reached_points.sort_unstable();
        assert_eq!(reached_points, all_fault_points(), "seed {seed}");
    }
}

/// After any fault of any victim before or after any step, the task runs once and no message is
/// lost. The task may be lost where the table in MIGRATION.md allows that.
#[test]
fn task_survives_any_fault_at_any_step() {
    let (mut survival_count, mut loss_count) = (0, 0);
    for (n, point) in all_fault_points().into_iter().enumerate() {
        for victim in Victim::ALL {
            for fault in victim.faults() {
                for seed in seeds(RUNS_PER_FAULT + 1) {
                    let case = format!("{victim:?}, {fault:?}, {point:?}, seed {seed}");
                    let mut trial =
                        Trial::new(seed * 1000 + n as u64, Some((point, victim, fault)));
                    trial.run_until_fault(&case);
                    if victim == Victim::Master && fault == Fault::Kill {
                        trial.check_without_master(&case);
                    } else if trial.check_outcome(may_be_lost(point, victim, fault), &case) {
                        survival_count += 1;
                    } else {
                        loss_count += 1;
                    }
                }
            }
        }
    }
    assert!(
        survival_count > 1000 && loss_count > 300,
        "{survival_count} lived, {loss_count} were lost"
    );
}

/// A commit that the master cannot record leaves the task at the source.
#[test]
fn failed_commit_leaves_task_at_source() {
    let (mut stay_count, mut migrated_count) = (0, 0);
    for seed in seeds(60) {
        let mut trial = Trial::new(seed, None);
        while !trial
            .sim
            .injection
            .reached_points
            .contains(&(Step::Restore, StepEdge::End))
        {
            trial.sim.step();
        }
        trial.sim.random_faults.failed_steps_percent = 50;
        while !trial.is_over() {
            trial.exchange_messages();
        }
        trial.sim.random_faults.failed_steps_percent = 0;
        assert!(trial.check_outcome(false, &format!("seed {seed}")));
        let task_host = trial.sim.procs[trial.task_proc].host;
        *if task_host == host(2) {
            &mut stay_count
        } else {
            &mut migrated_count
        } += 1;
    }
    assert!(
        stay_count > 10 && migrated_count > 10,
        "{stay_count} stayed, {migrated_count} moved"
    );
}
