//! Holds checkpoints and restarts at their points.
//!
//! All daemons must answer at three moments: before tasks are stopped, when all tasks are stopped,
//! and before a job is restarted. Therefore most operations are held first by the fake CRIU, which
//! leaves the daemons running. An operation that the fake CRIU need not hold starts when all others
//! are held; the daemon of its job stops itself at the point. Finally, operations with later points
//! continue from the engine to these points.

use super::fault_points::fake_criu_word;
use super::file_names;
use super::{
    CheckpointFaults, FaultPoint, HeldOperation, HoldMeans, HoldPoint, JOB_COUNT, JobOnHost,
    Operation, STEP_TIMEOUT,
};
use crate::fake_criu::{misbehaviours, set_behaviour, take_misbehaviours};
use crate::faults::{self, Breakpoint, Point, Role, is_stopped};
use crate::run::wait_for;
use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;

impl CheckpointFaults<'_> {
    /// Starts the operations of a round and holds each at its point. Returns them and the number of
    /// the first event after the start.
    pub(super) fn hold(&mut self, round: &[FaultPoint]) -> Result<(Vec<HeldOperation>, u64)> {
        let jobs = self.assign_jobs(round)?;
        let events = self.vm.events()?;
        let from = events.last().map_or(0, |entry| entry.number + 1);
        let mut all = Vec::new();
        for (point, job) in round.iter().copied().zip(jobs) {
            match fake_criu_word(&point) {
                Some(word) => {
                    let host = self.members[job].host_name();
                    take_misbehaviours(self.vm.bed(), &host);
                    set_behaviour(self.vm.bed(), &host, word);
                    all.push(self.start_operation(point, job)?);
                }
                None => {
                    // The next operation stops a daemon, which does not answer then. So the other
                    // operations must have reached their points before.
                    self.wait_for_held_engines(&mut all)?;
                    let breakpoint = self.breakpoint(point, job)?;
                    let mut held = self.start_operation(point, job)?;
                    self.wait_for_daemon(&mut held, &breakpoint)?;
                    all.push(held);
                }
            }
        }
        self.wait_for_held_engines(&mut all)?;
        for held in &mut all {
            self.hold_after_engine(held)?;
        }
        for held in &mut all {
            self.held_count += 1;
            // On a busy machine the time limit of an operation may have expired before the fault.
            if let Some(status) = held.console.poll()? {
                self.ended_early_count += 1;
                let (out, err) = (held.console.out_so_far()?, held.console.err_so_far()?);
                let point = held.point;
                eprintln!("{point:?} ended before the fault: {status} {out}{err}");
            }
        }
        Ok((all, from))
    }

    /// Starts an operation with the console.
    fn start_operation(&self, point: FaultPoint, job: usize) -> Result<HeldOperation> {
        let member = &self.members[job];
        let on = format!("h1,{}", member.host_name());
        let before = self.checkpoints(job)?;
        let newest = before.last().context("a checkpoint")?;
        let words = match point.0 {
            Operation::Checkpoint => ["--json", "checkpoint", &member.job.tid].to_vec(),
            Operation::Restart => ["restart", newest, "--on", &on].to_vec(),
        };
        let console = self.vm.start_pvm(&words)?;
        Ok(HeldOperation {
            point,
            job,
            holder: None,
            console,
            checkpoints_before: before,
        })
    }

    /// Assigns a job to each point. Jobs that need a restart are assigned first. Afterwards every
    /// job whose restart is tried has ended, and all others run on their own hosts.
    fn assign_jobs(&mut self, round: &[FaultPoint]) -> Result<Vec<usize>> {
        ensure!(round.len() <= JOB_COUNT, "more points than jobs: {round:?}");
        let mut free: Vec<usize> = (0..JOB_COUNT).collect();
        free.sort_by_key(|job| !self.members[*job].must_restart);
        let restarts = round
            .iter()
            .filter(|(operation, _)| *operation == Operation::Restart)
            .count();
        let mut ended = free[..restarts].to_vec();
        let mut others = free[restarts..].to_vec();
        others.truncate(round.len() - restarts);
        let strays = self.misplaced_jobs()?;
        let restarted: Vec<usize> = others
            .iter()
            .filter(|job| self.members[**job].must_restart || strays.contains(*job))
            .copied()
            .collect();
        self.end_jobs(&[&ended[..], &restarted[..]].concat())?;
        for job in restarted {
            self.restart(job)?;
        }
        let jobs = round.iter().map(|(operation, _)| {
            if *operation == Operation::Restart {
                ended.remove(0)
            } else {
                others.remove(0)
            }
        });
        Ok(jobs.collect())
    }

    /// Returns the running jobs that have a task on a wrong host.
    fn misplaced_jobs(&self) -> Result<Vec<usize>> {
        let tasks = self.vm.tasks()?;
        let is_on = |tid: &str, host: &str| {
            tasks
                .iter()
                .any(|task| task.tid == tid && task.host.as_deref() == Some(host))
        };
        let strays = |member: &JobOnHost| {
            !(is_on(&member.job.tid, "h1") && is_on(&member.worker_tid, &member.host_name()))
        };
        Ok((0..JOB_COUNT)
            .filter(|job| self.members[*job].runs && strays(&self.members[*job]))
            .collect())
    }

    /// Waits until `check` succeeds. Returns `None` if the console of the operation ends before.
    fn wait_while_console_runs<T>(
        held: &mut HeldOperation,
        mut check: impl FnMut() -> Result<T, String>,
    ) -> Result<Option<T>> {
        wait_for(STEP_TIMEOUT, || {
            let status = held.console.poll().map_err(|error| error.to_string())?;
            match check() {
                Ok(found) => Ok(Some(found)),
                Err(_) if status.is_some() => Ok(None),
                Err(missing) => Err(format!("{:?}: {missing}", held.point)),
            }
        })
    }

    /// Waits for the engines of all operations that are not held yet.
    fn wait_for_held_engines(&self, all: &mut [HeldOperation]) -> Result<()> {
        let bed = self.vm.bed();
        for held in all.iter_mut().filter(|held| held.holder.is_none()) {
            let member = &self.members[held.job];
            let (name, host) = (member.host_name(), bed.host(member.host));
            let called = Self::wait_while_console_runs(held, || match misbehaviours(bed, &name) {
                none if none.is_empty() => Err("no engine was called".to_string()),
                _ => Ok(HoldMeans::FakeCriu),
            })?;
            held.holder = called;
            if held.holder.is_some() && held.point.1 == HoldPoint::EngineWorks {
                let stopped = Self::wait_while_console_runs(held, || {
                    let mut engines = faults::processes_of(host, Role::Engine).into_iter();
                    engines
                        .find(|pid| is_stopped(*pid))
                        .ok_or("no engine is stopped".to_string())
                })?;
                held.holder = stopped.map(HoldMeans::Process);
            }
        }
        Ok(())
    }

    /// Lets an operation continue from the point where the engine holds it, to a later point.
    fn hold_after_engine(&self, held: &mut HeldOperation) -> Result<()> {
        if !matches!(held.holder, Some(HoldMeans::FakeCriu)) {
            return Ok(());
        }
        let (bed, host) = (self.vm.bed(), self.members[held.job].host_name());
        match held.point.1 {
            HoldPoint::At(..) => {
                let breakpoint = self.breakpoint(held.point, held.job)?;
                set_behaviour(bed, &host, "");
                self.wait_for_daemon(held, &breakpoint)
            }
            HoldPoint::Sealing => {
                let lock = self.lock_store()?;
                set_behaviour(bed, &host, "");
                let sealing = self.wait_for_seal(held)?;
                held.holder = sealing.then_some(HoldMeans::StoreLock(lock));
                Ok(())
            }
            HoldPoint::EngineWaits | HoldPoint::EngineWorks => Ok(()),
        }
    }

    fn lock_store(&self) -> Result<Flock<File>> {
        let path = self.store().join("lock");
        wait_for(STEP_TIMEOUT, || {
            let file = File::open(&path).map_err(|error| error.to_string())?;
            Flock::lock(file, FlockArg::LockExclusiveNonblock)
                .map_err(|(_, errno)| errno.to_string())
        })
    }

    /// Waits until a checkpoint is complete except for its final name. Returns false if the console
    /// ends before.
    fn wait_for_seal(&self, held: &mut HeldOperation) -> Result<bool> {
        let draft = format!(".draft-{}-", self.members[held.job].job.tid);
        let sealing = Self::wait_while_console_runs(held, || {
            let drafts = file_names(&self.store()).into_iter();
            let drafts = drafts.filter(|name| name.starts_with(&draft));
            let mut manifests = drafts.map(|name| self.store().join(name).join("manifest"));
            if manifests.any(|path| path.exists()) {
                Ok(())
            } else {
                Err("it is not being sealed".to_string())
            }
        })?;
        Ok(sealing.is_some())
    }

    fn breakpoint(&self, (_, hold): FaultPoint, job: usize) -> Result<Breakpoint> {
        let HoldPoint::At(step, edge) = hold else {
            bail!("no daemon is stopped at {hold:?}")
        };
        let point: Point = (step, edge);
        Breakpoint::new(&self.breakpoints, &self.members[job].worker_tid, point)
    }

    fn wait_for_daemon(&self, held: &mut HeldOperation, breakpoint: &Breakpoint) -> Result<()> {
        let host = self.vm.bed().host(self.members[held.job].host);
        let reached = Self::wait_while_console_runs(held, || {
            breakpoint
                .stopped_daemon(&[host])?
                .ok_or("no daemon has reached it".to_string())
        })?;
        if reached.is_none() {
            breakpoint.remove();
        }
        held.holder = reached.map(HoldMeans::Process);
        Ok(())
    }
}
