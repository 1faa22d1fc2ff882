//! Injects a fault of each kind into each party of a migration, before and after each step. The
//! steps are those of the protocol, and the machines report where they begin and end: a new step is
//! covered without a change here.

use super::scenario::{
    assert_in_order, list_events, migrate_request, send_numbered, spawn, spawn_on,
};
use super::sim::fault_injection::{Fault, FaultPoint, LONG_OUTAGE, SHORT_OUTAGE, StepEdge, Victim};
use super::sim::{Sim, host, seeds};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{NotifyRequest, NotifySubjects, Reply, Request, RmServices};
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Number of runs per fault and point. Delays and the use of post-copy are random.
const RUNS_PER_FAULT: u64 = 4;

fn all_points() -> Vec<FaultPoint> {
    Step::ALL
        .into_iter()
        .flat_map(|step| [(step, StepEdge::Before), (step, StepEdge::After)])
        .collect()
}

/// A task migrates from h2 to h3 while it exchanges messages with a task on h4 and with the
/// console. The console is notified of the task's exit with tag 1. There is a resource manager.
struct Trial {
    sim: Sim,
    console: usize,
    task_proc: usize,
    peer: usize,
    sent_counts: BTreeMap<(usize, Tid), u32>,
    request: RequestId,
}

impl Trial {
    fn new(seed: u64, fault: Option<(FaultPoint, Victim, Fault)>) -> Trial {
        let (mut sim, console) = Sim::cluster(seed, 4);
        let manager = spawn(&mut sim, console, spawn_on("h1", "rm", 1))[0];
        sim.ask(
            manager,
            Request::RegisterRm(RmServices {
                spawn: false,
                other_requests: false,
                task_exits: false,
            }),
        );
        sim.injection.resource_manager = Some(manager);
        // Without pre-copy the step `PreCopy` would not occur.
        sim.injection.always_live_copies =
            fault.is_none_or(|((step, _), ..)| step == Step::PreCopy);
        let mover = spawn(&mut sim, console, spawn_on("h2", "child", 1))[0];
        let peer = spawn(&mut sim, console, spawn_on("h4", "child", 1))[0];
        let tid = sim.procs[mover].tid();
        let what = NotifySubjects::TaskExit(vec![tid]);
        sim.ask(
            console,
            Request::Notify(NotifyRequest {
                subjects: what,
                ctx: 0,
                tag: 1,
                cancel: false,
            }),
        );
        if let Some((point, party, blow)) = fault {
            sim.plan_fault(point, party, blow);
        }
        let request = sim.request(console, migrate_request(tid, "h3"));
        Trial {
            sim,
            console,
            task_proc: mover,
            peer,
            sent_counts: BTreeMap::new(),
            request,
        }
    }

    fn tid(&self) -> Tid {
        self.sim.procs[self.task_proc].tid()
    }

    /// Sends a message from every process that can send to each of the other processes.
    fn exchange_messages(&mut self) {
        let all = [self.console, self.task_proc, self.peer];
        for from in all {
            for to in all.into_iter().filter(|to| *to != from) {
                let to = self.sim.procs[to].tid();
                send_numbered(&mut self.sim, &mut self.sent_counts, from, to);
            }
        }
        let wait = Micros(self.sim.rng.below(3_000));
        self.sim.advance(wait);
    }

    /// Runs until the fault has been injected, and for a while after that.
    fn run_until_fault(&mut self, case: &str) {
        let mut after = 0;
        for _ in 0..1000 {
            self.exchange_messages();
            after += u32::from(self.sim.injection.triggered);
            if after > 20 {
                return;
            }
        }
        panic!("it never came there: {case}");
    }

    fn is_over(&self) -> bool {
        self.sim.procs[self.console]
            .replies
            .contains_key(&self.request)
    }

    /// Returns the task's list entries and the number of exit notifications.
    fn state(&mut self) -> (Vec<TaskInfo>, usize) {
        let list = match self.sim.ask(
            self.console,
            Request::Tasks {
                selector: self.tid(),
            },
        ) {
            Reply::Tasks(list) => list,
            // The host is lost, and the task with it.
            Reply::Failed {
                error: PvmError::NoHost,
                ..
            } => Vec::new(),
            other => panic!("no list: {other:?}"),
        };
        (list, self.sim.procs[self.console].notifications(1).len())
    }

    /// Waits until the migration has ended and its consequences are known, and checks the outcome.
    /// True if the task lives.
    fn check(&mut self, may_be_lost: bool, case: &str) -> bool {
        let (console, moving) = (self.console, self.request);
        self.sim
            .run_until(case, |s| s.procs[console].replies.contains_key(&moving));
        self.sim.advance(LONG_OUTAGE + Micros::from_secs(20));
        let (list, dead) = self.state();
        assert_eq!(
            list.len() + dead,
            1,
            "{list:?}, told of its end {dead} times: {case}"
        );
        let all = [self.console, self.task_proc, self.peer];
        let tid = self.tid();
        let ends = |event: &&EventKind| match event {
            EventKind::Migrated { tid: of, .. } | EventKind::MigrationFailed { tid: of, .. } => {
                *of == tid
            }
            _ => false,
        };
        let event_log = list_events(&mut self.sim, console);
        assert_eq!(
            event_log.iter().filter(ends).count(),
            1,
            "the log says how the move ended: {case}"
        );
        if dead > 0 {
            assert!(may_be_lost, "it is lost: {case}\n{}", self.sim.history());
            let why = |event: &EventKind| {
                matches!(event, EventKind::TaskEnded { tid: of, .. } if *of == tid)
                    || matches!(event, EventKind::HostGone { .. })
            };
            assert!(
                event_log.iter().any(why),
                "the log says why it is gone: {case}"
            );
            let proc = &self.sim.procs[self.task_proc];
            let is_dead =
                proc.exited || (proc.is_frozen() && self.sim.injection.source_was_killed());
            assert!(
                is_dead,
                "it is said to be dead, and something of it is left: {case}"
            );
            assert_in_order(&self.sim, &all);
            return false;
        }
        let proc = &self.sim.procs[self.task_proc];
        assert!(
            !list[0].migrating && proc.conn.is_some() && !proc.is_frozen(),
            "it has not arrived: {case}"
        );
        assert_eq!(list[0].host, proc.host, "{case}");
        self.exchange_messages();
        let total = self.sent_counts.values().sum::<u32>();
        self.sim
            .run_until(case, |s| assert_in_order(s, &all) == total);
        self.sim.advance(Micros::from_secs(3));
        assert_eq!(self.sim.tokens_left(), 0, "{case}");
        true
    }

    /// Asserts that all hosts have ended with their master and that no task runs.
    fn check_without_master(&mut self, case: &str) {
        self.sim.advance(LONG_OUTAGE + Micros::from_secs(20));
        let left: Vec<HostId> = self
            .sim
            .nodes
            .iter()
            .filter(|(_, n)| n.is_alive)
            .map(|(id, _)| *id)
            .collect();
        assert_eq!(left, [], "{case}");
        assert!(self.sim.procs[self.task_proc].exited, "{case}");
        assert_in_order(&self.sim, &[self.console, self.task_proc, self.peer]);
    }
}

/// True if other hosts consider a victim of this fault lost.
fn counts_as_lost(victim: Victim, fault: Fault) -> bool {
    match victim {
        Victim::Source | Victim::Target | Victim::Master => !matches!(
            fault,
            Fault::Stop(SHORT_OUTAGE) | Fault::Isolate(SHORT_OUTAGE)
        ),
        Victim::SourceTasker | Victim::TargetTasker => fault == Fault::Kill,
        _ => false,
    }
}

/// True if this fault at this point may end the task, as the table in MIGRATION.md says.
fn may_be_lost((step, edge): FaultPoint, victim: Victim, fault: Fault) -> bool {
    let at = (step, edge);
    // Post-copy memory may still be missing. It is complete when the last step ends.
    let memory_incomplete = at < (Step::Arrive, StepEdge::After);
    match victim {
        Victim::Source | Victim::SourceTasker => counts_as_lost(victim, fault) && memory_incomplete,
        Victim::Target | Victim::TargetTasker => {
            counts_as_lost(victim, fault) && at >= (Step::Restore, StepEdge::After)
        }
        Victim::Master => counts_as_lost(victim, fault),
        // The engines transfer post-copy memory.
        Victim::SourceEngine => fault == Fault::Kill && at >= (Step::Dump, StepEdge::After),
        Victim::TargetEngine => fault == Fault::Kill && at >= (Step::Restore, StepEdge::After),
        Victim::Session => {
            !matches!(fault, Fault::Stop(_)) && at >= (Step::Transfer, StepEdge::After)
        }
        Victim::ResourceManager => false,
    }
}

/// Every step of a migration begins and ends once, and the machines report both.
#[test]
fn every_step_begins_and_ends_once() {
    for seed in seeds(10) {
        let mut trial = Trial::new(seed, None);
        while !trial.is_over() {
            trial.exchange_messages();
        }
        assert!(trial.check(false, "no fault"));
        let mut reached = trial.sim.injection.reached_points.clone();
        reached.sort_unstable();
        assert_eq!(reached, all_points(), "seed {seed}");
    }
}

/// After any fault of any victim before or after any step, the task runs once and no message is
/// lost, except where the table allows its loss.
#[test]
fn task_survives_any_fault_at_any_step() {
    let (mut lived, mut lost) = (0, 0);
    for (n, point) in all_points().into_iter().enumerate() {
        for victim in Victim::ALL {
            for fault in victim.faults() {
                for seed in seeds(RUNS_PER_FAULT + 1) {
                    let case = format!("{victim:?}, {fault:?}, {point:?}, seed {seed}");
                    let mut trial =
                        Trial::new(seed * 1000 + n as u64, Some((point, victim, fault)));
                    trial.run_until_fault(&case);
                    if victim == Victim::Master && fault == Fault::Kill {
                        trial.check_without_master(&case);
                    } else if trial.check(may_be_lost(point, victim, fault), &case) {
                        lived += 1;
                    } else {
                        lost += 1;
                    }
                }
            }
        }
    }
    assert!(
        lived > 1000 && lost > 300,
        "{lived} lived, {lost} were lost"
    );
}

/// A commit that cannot be recorded leaves the task at the source.
#[test]
fn failed_commit_leaves_task_at_source() {
    let (mut stayed, mut moved) = (0, 0);
    for seed in seeds(60) {
        let mut trial = Trial::new(seed, None);
        while !trial
            .sim
            .injection
            .reached_points
            .contains(&(Step::Restore, StepEdge::After))
        {
            trial.sim.step();
        }
        trial.sim.random_faults.failed_steps_percent = 50;
        while !trial.is_over() {
            trial.exchange_messages();
        }
        trial.sim.random_faults.failed_steps_percent = 0;
        assert!(trial.check(false, &format!("seed {seed}")));
        let at = trial.sim.procs[trial.task_proc].host;
        *if at == host(2) {
            &mut stayed
        } else {
            &mut moved
        } += 1;
    }
    assert!(stayed > 10 && moved > 10, "{stayed} stayed, {moved} moved");
}
