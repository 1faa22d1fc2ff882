//! Runs a drain: polls the resource manager, prints progress, and checkpoints jobs in time.

use super::estimate::{
    ESTIMATE_MAX_AGE, MEMORY_QUERIES_TIMEOUT, WriteEstimate, can_leave_in_time, megabytes,
    write_time_with_margin,
};
use super::jobs::{
    Attempts, DepartureState, RemainingJob, RemainingTasks, job_of, job_state, jobs_of, loss_line,
    select_job,
};
use super::order::DrainOrder;
use super::progress::{DrainEnd, Progress};
use crate::clock::unix_micros;
use crate::commands::checkpoint::job_after_failure;
use crate::outcome::Outcome;
use crate::virtual_machine::{VirtualMachine, unexpected_reply};
use libpvm::Error;
use sempa_proto::checkpoint::{CheckpointFailure, CheckpointReport};
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, PvmError, Tid};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Interval for polling the resource manager.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Without a deadline, the time limit for the first task to leave, and then for each further task.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn unknown_host(command: &str, host: &str) -> Outcome {
    Outcome::error(format!(
        "{command}: the resource manager knows no host {host}; 'conf' lists them"
    ))
}

/// Unpacks a reply about a drain: true if the host is drained, the remaining tasks, and the number
/// of tasks that stay because they belong to the host or were started by hand. `None` means that
/// the host is unknown.
pub(crate) fn unpack_drain_reply(
    answer: RmReply,
) -> Result<Option<(bool, RemainingTasks, u32)>, Error> {
    match answer {
        RmReply::Drain {
            drained,
            tasks,
            staying: stay,
        } => Ok(Some((drained, tasks.into_iter().collect(), stay))),
        RmReply::NotFound => Ok(None),
        _ => Err(unexpected_reply()),
    }
}

/// State of a running drain.
struct DrainRun<'a> {
    machine: &'a dyn VirtualMachine,
    order: &'a DrainOrder,
    /// The console that requested the drain. Its children are checkpointed although the console is
    /// alive.
    console: Tid,
    show: &'a mut dyn FnMut(&str),
    started: Instant,
    /// Number of tasks to migrate at the start of the drain.
    initial_task_count: usize,
    remaining: RemainingTasks,
    departed: Vec<Tid>,
    /// Names of the checkpoints of jobs that this drain has ended.
    ended_checkpoints: Vec<String>,
    /// Name of the checkpoint of each job that continues.
    continued_checkpoints: BTreeMap<Tid, String>,
    attempts: BTreeMap<Tid, Attempts>,
    progress: Progress,
    estimate: WriteEstimate,
}

impl DrainRun<'_> {
    /// Waits until the host is empty or the time is over, and checkpoints jobs that are due.
    /// Returns false if the drain was cancelled or superseded.
    fn wait_until_empty(&mut self) -> Result<bool, Error> {
        let deadline = self.order.deadline;
        let mut until = self.started + deadline.unwrap_or(PROGRESS_TIMEOUT);
        while !self.remaining.is_empty() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
            let before = self.departed.len();
            if !self.poll()? {
                return Ok(false);
            }
            if deadline.is_none() && self.departed.len() > before {
                until = Instant::now() + PROGRESS_TIMEOUT;
            }
            if deadline.is_some()
                && let Some(job) =
                    self.next_due_job(until.saturating_duration_since(Instant::now()))?
            {
                self.checkpoint_job(&job, true)?;
            }
        }
        Ok(true)
    }

    /// Polls the resource manager and prints progress. Returns false if the drain was cancelled or
    /// superseded.
    fn poll(&mut self) -> Result<bool, Error> {
        let host = &self.order.host;
        let query = RmQuery::DrainStatus { host: host.clone() };
        let (drained, mut now) = match self.machine.ask_rm(&query) {
            // The drain continues without a resource manager: the next resource manager learns of
            // the drain, and checkpoints cannot wait for that.
            Err(error) if self.order.may_checkpoint() && is_rm_unavailable(&error) => {
                (true, self.remaining_without_rm()?)
            }
            answer => match unpack_drain_reply(answer?)? {
                Some((drained, now, _)) => (drained, now),
                None => return Ok(false),
            },
        };
        // The resource manager may not know yet that a job has ended after its checkpoint.
        now.retain(|tid, _| !self.departed.contains(tid));
        self.progress.read_events(self.machine)?;
        for tid in self.remaining.keys().filter(|tid| !now.contains_key(tid)) {
            self.departed.push(*tid);
            let (gone, all) = (self.departed.len(), self.initial_task_count);
            (self.show)(&format!(
                "{tid} has left ({gone} of {all}{})\n",
                self.progress.size_text(*tid)
            ));
        }
        self.remaining = now;
        let over = match self.progress.end {
            _ if !drained => Some(DrainEnd::Cancelled),
            // A drain that does not checkpoint only prints progress, so a later drain does not end
            // it.
            Some(DrainEnd::Superseded(_)) if !self.order.may_checkpoint() => None,
            over => over,
        };
        match over {
            Some(DrainEnd::Cancelled) => (self.show)(&format!(
                "{host} accepts tasks again: the drain was cancelled\n"
            )),
            Some(DrainEnd::Superseded(by)) => (self.show)(&format!(
                "a later drain of {host} by {by} replaces this one\n"
            )),
            None => {}
        }
        Ok(over.is_none())
    }

    /// Returns the tasks of the last poll that are still on the host. For the time in which no
    /// resource manager answers.
    fn remaining_without_rm(&self) -> Result<RemainingTasks, Error> {
        let all = self.machine.tasks(Tid::NONE)?;
        let is_there = |tid: &Tid| {
            let here = |task: &&TaskInfo| {
                task.tid == *tid && self.progress.host.is_none_or(|host| task.host == host)
            };
            all.iter().any(|task| here(&task))
        };
        Ok(self
            .remaining
            .iter()
            .filter(|(tid, _)| is_there(tid))
            .map(|(tid, why)| (*tid, why.clone()))
            .collect())
    }

    /// Returns the jobs that have tasks on the host and can be checkpointed, the job with most
    /// tasks first.
    fn remaining_jobs(&mut self) -> Result<Vec<RemainingJob>, Error> {
        let (machine, all) = (self.machine, parents(self.machine)?);
        let mut members = BTreeMap::<Tid, Vec<Tid>>::new();
        for tid in all
            .keys()
            .chain(self.remaining.keys().filter(|tid| !all.contains_key(tid)))
        {
            members
                .entry(job_of(*tid, &all, &self.remaining))
                .or_default()
                .push(*tid);
        }
        // A job that continues is checkpointed once. A checkpoint made by the daemons counts.
        let is_over = |job: &Tid| {
            !self.order.checkpoint
                && (self.continued_checkpoints.contains_key(job)
                    || self.progress.checkpoints.contains_key(job))
                || self
                    .attempts
                    .get(job)
                    .is_some_and(|tried| tried.is_permanent)
        };
        let jobs: Vec<Tid> = jobs_of(self.console, &all, &self.remaining)
            .into_iter()
            .filter(|job| !is_over(job))
            .collect();
        let (mut remaining, begun) = (Vec::new(), Instant::now());
        let ask = |tid: Tid| match begun.elapsed() < MEMORY_QUERIES_TIMEOUT {
            // After the time limit, further tasks are not queried.
            true => Some(
                machine
                    .can_migrate(tid, Some(&self.order.host))
                    .ok()?
                    .resident_bytes,
            ),
            false => None,
        };
        for job in jobs {
            let job_tasks = members.remove(&job).unwrap_or_default();
            let states = job_tasks
                .iter()
                .filter_map(|tid| Some((*tid, self.remaining.get(tid)?)));
            let states: Vec<DepartureState> = states
                .map(|(tid, why)| self.progress.departure_state(tid, why.as_ref()))
                .collect();
            let (bytes, at_stake) = (
                self.estimate.bytes(&job_tasks, ask),
                self.progress.unsaved_work(unix_micros(), job, &job_tasks),
            );
            remaining.push(RemainingJob {
                job,
                task_count: states.len(),
                unsaved_work: at_stake,
                bytes,
                state: job_state(&states),
            });
        }
        Ok(remaining)
    }

    /// Returns the job to checkpoint next, if the time `left` before the deadline does not exceed
    /// the time for checkpoints of all jobs.
    fn next_due_job(&mut self, left: Duration) -> Result<Option<RemainingJob>, Error> {
        if self
            .estimate
            .last_result
            .is_some_and(|(at, time)| at.elapsed() < ESTIMATE_MAX_AGE && left > time)
        {
            return Ok(None);
        }
        let jobs = self.remaining_jobs()?;
        let bytes = jobs
            .iter()
            .fold(0, |sum: u64, job| sum.saturating_add(job.bytes));
        let time = write_time_with_margin(jobs.len(), bytes, self.progress.transferred);
        let mut next = None;
        if left <= time {
            let movable: Vec<Tid> = self
                .remaining
                .iter()
                .filter(|(_, why)| why.is_none())
                .map(|(tid, _)| *tid)
                .collect();
            let bytes = self.estimate.bytes(&movable, |_| None);
            let queued_leave_in_time = can_leave_in_time(
                self.started.elapsed(),
                self.progress.departed_bytes,
                bytes,
                left,
            );
            next = select_job(
                jobs,
                queued_leave_in_time,
                self.progress.transferred,
                &self.attempts,
            );
        }
        // If no job is ready, the result is kept for [`ESTIMATE_MAX_AGE`]. Then jobs whose
        // checkpoint failed and tasks that may still leave are examined again.
        let time = if left <= time { Duration::ZERO } else { time };
        self.estimate.last_result = next.is_none().then(|| (Instant::now(), time));
        Ok(next)
    }

    /// Checkpoints a job and, with `--checkpoint`, ends it. `retry_later` is true if the caller
    /// tries again after a temporary failure.
    fn checkpoint_job(
        &mut self,
        remaining_job: &RemainingJob,
        retry_later: bool,
    ) -> Result<(), Error> {
        let (job, host, ends) = (remaining_job.job, &self.order.host, self.order.checkpoint);
        // The job may have got a checkpoint from its schedule during the estimate.
        self.progress.read_events(self.machine)?;
        if !ends && self.progress.checkpoints.contains_key(&job) {
            return Ok(());
        }
        if !self.attempts.contains_key(&job) {
            (self.show)(&format!(
                "job {job} is being checkpointed, {}\n",
                megabytes(remaining_job.bytes)
            ));
        }
        let result = request_checkpoint(self.machine, job, ends)?;
        let attempts = Attempts {
            count: 0,
            last_at: self.started,
            is_permanent: false,
            last_error: String::new(),
        };
        let attempts = self.attempts.entry(job).or_insert(attempts);
        (attempts.count, attempts.last_at) = (attempts.count + 1, Instant::now());
        match result {
            Ok(report) if ends => {
                (self.show)(&format!(
                    "job {job} has ended; 'restart {}' restarts it\n",
                    report.name
                ));
                self.remaining.retain(|tid, _| !report.tasks.contains(tid));
                self.departed.extend(report.tasks);
                self.ended_checkpoints.push(report.name);
            }
            Ok(CheckpointReport { name: set, .. }) => {
                let text = format!("job {job} is in the store as {set} and continues; ");
                (self.show)(&format!(
                    "{text}'restart {set}' restarts it if {host} leaves\n"
                ));
                self.continued_checkpoints.insert(job, set);
            }
            Err(why) => {
                // [`CheckpointFailure::InProgress`] is temporary: the other checkpoint or restart
                // of the job will end.
                attempts.is_permanent = !why.is_transient() && why != CheckpointFailure::InProgress;
                let retry_text = if retry_later && !attempts.is_permanent {
                    ", and will be tried again while there is time"
                } else {
                    ""
                };
                let error_text = format!(
                    "no checkpoint of job {job}: {why}{}{retry_text}\n",
                    job_after_failure(&why, "it")
                );
                if attempts.last_error != error_text {
                    (self.show)(&error_text);
                    attempts.last_error = error_text;
                }
            }
        }
        Ok(())
    }

    /// Checkpoints and ends all remaining jobs. Jobs with failed attempts get one more attempt,
    /// because the cause may be gone.
    fn checkpoint_all(&mut self) -> Result<(), Error> {
        self.attempts.clear();
        // Continues even if progress cannot be read.
        while self.poll().unwrap_or(true) {
            let jobs = self.remaining_jobs()?;
            let Some(job) = jobs
                .iter()
                .find(|job| !self.attempts.contains_key(&job.job))
            else {
                break;
            };
            self.checkpoint_job(job, false)?;
        }
        Ok(())
    }

    /// Prints what each remaining job would lose if the host left at this moment.
    fn warn_of_losses(&mut self) -> Result<(), Error> {
        if self.remaining.is_empty() || self.order.checkpoint {
            return Ok(());
        }
        // A store that cannot be read counts as empty.
        let checkpoints = match self.machine.ask(Request::ListCheckpoints)? {
            Reply::Checkpoints(checkpoints) => checkpoints.unwrap_or_default(),
            _ => return Err(unexpected_reply()),
        };
        for job in jobs_of(self.console, &parents(self.machine)?, &self.remaining) {
            (self.show)(&loss_line(
                &self.order.host,
                job,
                &checkpoints,
                self.continued_checkpoints
                    .get(&job)
                    .or(self.progress.checkpoints.get(&job)),
            ));
        }
        Ok(())
    }

    /// Prints the remaining tasks and returns the outcome. `stay` is the number of tasks that stay
    /// because they belong to the host or were started by hand.
    fn into_outcome(self, stay: u32) -> Outcome {
        let (host, tasks) = (&self.order.host, &self.remaining);
        let mut text = String::new();
        for (tid, why) in tasks {
            let why = why
                .clone()
                .unwrap_or_else(|| self.progress.migration_text(*tid));
            text.push_str(&format!("{tid} is still there: {why}\n"));
        }
        if tasks.is_empty() {
            text.push_str(&format!(
                "{host} is empty after {:.1} s\n",
                self.started.elapsed().as_secs_f64()
            ));
        }
        if stay > 0 {
            text.push_str(&format!(
                "{stay} tasks that belong to the host or were started there by hand stay until they end\n"
            ));
        }
        let names =
            |list: &mut dyn Iterator<Item = &Tid>| list.map(Tid::to_string).collect::<Vec<_>>();
        let still: Vec<_> = tasks
            .iter()
            .map(|(tid, why)| json!({ "tid": tid.to_string(), "why": why }))
            .collect();
        let gone = names(&mut self.departed.iter());
        let (sets, kept): (_, Vec<&String>) = (
            &self.ended_checkpoints,
            self.continued_checkpoints.values().collect(),
        );
        let value = json!({ "host": host, "left": gone, "still": still, "stay": stay, "sets": sets, "kept": kept });
        (self.show)(&text);
        Outcome::with_values(String::new(), value, !tasks.is_empty())
    }
}

/// Drains a host and waits until it is empty or the time is over. Calls `show` with each line of
/// progress. `console` is the console that requested the drain.
pub(super) fn drain(
    machine: &dyn VirtualMachine,
    order: &DrainOrder,
    console: Tid,
    show: &mut dyn FnMut(&str),
) -> Result<Outcome, Error> {
    let DrainOrder {
        host,
        deadline,
        checkpoint,
    } = order;
    let micros = deadline.map(|deadline| Micros(deadline.as_micros() as u64));
    let Some((_, tasks, stay)) = unpack_drain_reply(machine.ask_rm(&RmQuery::Drain {
        host: host.clone(),
        within: micros,
    })?)?
    else {
        return Ok(unknown_host("drain", host));
    };
    let all = tasks.len();
    show(&format!("{host} accepts no tasks; {all} must leave\n"));
    let (departed, ended_checkpoints, continued_checkpoints, attempts, estimate) =
        Default::default();
    let (started, progress) = (Instant::now(), Progress::new(machine.tid()));
    let mut run = DrainRun {
        machine,
        order,
        console,
        show,
        started,
        initial_task_count: all,
        remaining: tasks,
        departed,
        ended_checkpoints,
        continued_checkpoints,
        attempts,
        progress,
        estimate,
    };
    if run.wait_until_empty()? && *checkpoint {
        run.checkpoint_all()?;
    }
    run.warn_of_losses()?;
    Ok(run.into_outcome(stay))
}

/// True if no resource manager is running, or if it does not answer.
fn is_rm_unavailable(error: &Error) -> bool {
    matches!(error.code, PvmError::NoTask | PvmError::NotImpl)
}

/// Returns the parent of each task.
fn parents(machine: &dyn VirtualMachine) -> Result<BTreeMap<Tid, Tid>, Error> {
    Ok(machine
        .tasks(Tid::NONE)?
        .into_iter()
        .map(|task| (task.tid, task.parent))
        .collect())
}

/// Checkpoints a job and waits for the end of the checkpoint. If `ends` is true, the job then ends.
fn request_checkpoint(
    machine: &dyn VirtualMachine,
    job: Tid,
    ends: bool,
) -> Result<Result<CheckpointReport, CheckpointFailure>, Error> {
    // `wait` must be true. Otherwise the resource manager would be responsible for the restart.
    match machine.ask(Request::Checkpoint {
        job,
        schedule: None,
        end_job: ends,
        wait: true,
    })? {
        Reply::Checkpointed(result) => Ok(result),
        _ => Err(unexpected_reply()),
    }
}
