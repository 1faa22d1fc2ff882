//! Runs a drain: polls the resource manager, prints progress, and checkpoints jobs in time.

use super::estimate::{
    ESTIMATE_AGE_MAX, MEMORY_QUERIES_TIMEOUT, WriteEstimate, can_leave_in_time, megabytes_text,
    write_time_with_margin,
};
use super::jobs::{
    CheckpointAttempts, DepartureState, RemainingJob, RemainingTasks, find_job, find_jobs,
    job_state, loss_line, select_job,
};
use super::order::DrainRequest;
use super::progress::{DrainEndReason, DrainProgress};
use crate::clock::unix_micros;
use crate::commands::checkpoint::job_state_clause;
use crate::outcome::Outcome;
use crate::virtual_machine::{VirtualMachine, unexpected_reply_error};
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
/// A drain without a deadline ends when no task has left for this time.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn unknown_host_outcome(command: &str, host: &str) -> Outcome {
    Outcome::from_error(format!(
        "{command}: the resource manager knows no host {host}; 'conf' lists them"
    ))
}

/// Returns the content of a reply about a drain: true if the host is drained, the remaining tasks,
/// and the number of tasks that stay because they belong to the host or were started by hand.
/// `None` means that the host is unknown.
pub(crate) fn unpack_drain_reply(
    reply: RmReply,
) -> Result<Option<(bool, RemainingTasks, u32)>, Error> {
    match reply {
        RmReply::Drain {
            is_drained: drained,
            tasks,
            bound_tasks: staying_count,
        } => Ok(Some((drained, tasks.into_iter().collect(), staying_count))),
        RmReply::NotFound => Ok(None),
        _ => Err(unexpected_reply_error()),
    }
}

/// State of a running drain.
struct DrainRun<'a> {
    machine: &'a dyn VirtualMachine,
    request: &'a DrainRequest,
    /// The console that requested the drain. Its children are checkpointed although the console is
    /// alive.
    console: Tid,
    print_line: &'a mut dyn FnMut(&str),
    started_at: Instant,
    /// Number of tasks to migrate at the start of the drain.
    initial_task_count: usize,
    remaining_tasks: RemainingTasks,
    departed_tasks: Vec<Tid>,
    /// Names of the checkpoints of jobs that this drain has ended.
    ended_checkpoints: Vec<String>,
    /// Name of the checkpoint of each job that this drain has checkpointed and not ended.
    continued_checkpoints: BTreeMap<Tid, String>,
    attempts: BTreeMap<Tid, CheckpointAttempts>,
    progress: DrainProgress,
    estimate: WriteEstimate,
}

impl DrainRun<'_> {
    /// Waits until the host is empty or the time limit is reached, and checkpoints jobs that are
    /// due. Returns false if the drain was cancelled or superseded.
    fn wait_until_empty(&mut self) -> Result<bool, Error> {
        let deadline = self.request.deadline;
        let mut wait_end = self.started_at + deadline.unwrap_or(PROGRESS_TIMEOUT);
        while !self.remaining_tasks.is_empty() && Instant::now() < wait_end {
            std::thread::sleep(POLL_INTERVAL);
            let departed_count = self.departed_tasks.len();
            if !self.poll_rm()? {
                return Ok(false);
            }
            if deadline.is_none() && self.departed_tasks.len() > departed_count {
                wait_end = Instant::now() + PROGRESS_TIMEOUT;
            }
            if deadline.is_some()
                && let Some(job) =
                    self.next_due_job(wait_end.saturating_duration_since(Instant::now()))?
            {
                self.checkpoint_job(&job, true)?;
            }
        }
        Ok(true)
    }

    /// Polls the resource manager and prints progress. Returns false if the drain was cancelled or
    /// superseded.
    fn poll_rm(&mut self) -> Result<bool, Error> {
        let host = &self.request.host;
        let query = RmQuery::DrainStatus { host: host.clone() };
        let (is_drained, mut polled_tasks) = match self.machine.ask_rm(&query) {
            // The drain continues without a resource manager, because checkpoints must not be late.
            // The next resource manager learns of the drain.
            Err(error) if self.request.may_checkpoint() && is_rm_unavailable(&error) => {
                (true, self.remaining_without_rm()?)
            }
            reply => match unpack_drain_reply(reply?)? {
                Some((is_drained, polled_tasks, _)) => (is_drained, polled_tasks),
                None => return Ok(false),
            },
        };
        // The resource manager may not know yet that a job has ended after its checkpoint.
        polled_tasks.retain(|tid, _| !self.departed_tasks.contains(tid));
        self.progress.read_events(self.machine)?;
        for tid in self
            .remaining_tasks
            .keys()
            .filter(|tid| !polled_tasks.contains_key(tid))
        {
            self.departed_tasks.push(*tid);
            let (departed_count, total_count) =
                (self.departed_tasks.len(), self.initial_task_count);
            (self.print_line)(&format!(
                "{tid} has left ({departed_count} of {total_count}{})\n",
                self.progress.size_text(*tid)
            ));
        }
        self.remaining_tasks = polled_tasks;
        let end_reason = match self.progress.end_reason {
            _ if !is_drained => Some(DrainEndReason::Cancelled),
            // A drain that does not checkpoint only prints progress, so a later drain does not end
            // the former.
            Some(DrainEndReason::Superseded(_)) if !self.request.may_checkpoint() => None,
            end_reason => end_reason,
        };
        match end_reason {
            Some(DrainEndReason::Cancelled) => (self.print_line)(&format!(
                "{host} accepts tasks again: the drain was cancelled\n"
            )),
            Some(DrainEndReason::Superseded(requester)) => (self.print_line)(&format!(
                "a later drain of {host} by {requester} replaces this one\n"
            )),
            None => {}
        }
        Ok(end_reason.is_none())
    }

    /// Returns the tasks of the last poll that are still on the host. Used while no resource
    /// manager answers.
    fn remaining_without_rm(&self) -> Result<RemainingTasks, Error> {
        let all_tasks = self.machine.tasks(Tid::NONE)?;
        let is_on_host = |tid: &Tid| {
            let matches_task = |task: &&TaskInfo| {
                task.tid == *tid
                    && self
                        .progress
                        .drained_host
                        .is_none_or(|host| task.host == host)
            };
            all_tasks.iter().any(|task| matches_task(&task))
        };
        Ok(self
            .remaining_tasks
            .iter()
            .filter(|(tid, _)| is_on_host(tid))
            .map(|(tid, reason)| (*tid, reason.clone()))
            .collect())
    }

    /// Returns the jobs that have tasks on the host and can be checkpointed, the job with most
    /// tasks first. Omits jobs that need no further checkpoint, and jobs whose checkpoint has
    /// failed permanently.
    fn remaining_jobs(&mut self) -> Result<Vec<RemainingJob>, Error> {
        let (machine, parent_tids) = (self.machine, task_parents(self.machine)?);
        let mut tasks_by_job = BTreeMap::<Tid, Vec<Tid>>::new();
        for tid in parent_tids.keys().chain(
            self.remaining_tasks
                .keys()
                .filter(|tid| !parent_tids.contains_key(tid)),
        ) {
            tasks_by_job
                .entry(find_job(*tid, &parent_tids, &self.remaining_tasks))
                .or_default()
                .push(*tid);
        }
        // A job that continues is checkpointed once. A checkpoint that the daemons made by schedule
        // counts, too.
        let needs_no_checkpoint = |job: &Tid| {
            !self.request.checkpoints_all
                && (self.continued_checkpoints.contains_key(job)
                    || self.progress.drain_checkpoints.contains_key(job))
                || self
                    .attempts
                    .get(job)
                    .is_some_and(|attempts| attempts.failure_is_permanent)
        };
        let jobs: Vec<Tid> = find_jobs(self.console, &parent_tids, &self.remaining_tasks)
            .into_iter()
            .filter(|job| !needs_no_checkpoint(job))
            .collect();
        let (mut remaining_jobs, query_start) = (Vec::new(), Instant::now());
        let query_bytes = |tid: Tid| match query_start.elapsed() < MEMORY_QUERIES_TIMEOUT {
            // After the time limit, further tasks are not queried.
            true => Some(
                machine
                    .can_migrate(tid, Some(&self.request.host))
                    .ok()?
                    .memory_bytes,
            ),
            false => None,
        };
        for job in jobs {
            let job_tasks = tasks_by_job.remove(&job).unwrap_or_default();
            let (tasks_on_host, states): (Vec<Tid>, Vec<DepartureState>) = job_tasks
                .iter()
                .filter_map(|tid| {
                    let reason = self.remaining_tasks.get(tid)?.as_ref();
                    Some((*tid, self.progress.departure_state(*tid, reason)))
                })
                .unzip();
            let (bytes, lost_work) = (
                self.estimate.total_bytes(&job_tasks, query_bytes),
                self.progress.unsaved_work(unix_micros(), job, &job_tasks),
            );
            remaining_jobs.push(RemainingJob {
                job,
                tasks_on_host,
                unsaved_work: lost_work,
                memory_bytes: bytes,
                state: job_state(&states),
            });
        }
        Ok(remaining_jobs)
    }

    /// Returns the job to checkpoint next. Returns `None` if no job is ready, or if the time
    /// `remaining_time` before the deadline exceeds the time for checkpoints of all jobs.
    fn next_due_job(&mut self, remaining_time: Duration) -> Result<Option<RemainingJob>, Error> {
        if self
            .estimate
            .last_estimate
            .is_some_and(|(computed_at, write_time)| {
                computed_at.elapsed() < ESTIMATE_AGE_MAX && remaining_time > write_time
            })
        {
            return Ok(None);
        }
        let jobs = self.remaining_jobs()?;
        let bytes = jobs
            .iter()
            .fold(0, |sum: u64, job| sum.saturating_add(job.memory_bytes));
        let write_time = write_time_with_margin(jobs.len(), bytes, self.progress.transfer_totals);
        let mut next_job = None;
        if remaining_time <= write_time {
            let movable_tids: Vec<Tid> = self
                .remaining_tasks
                .iter()
                .filter(|(_, reason)| reason.is_none())
                .map(|(tid, _)| *tid)
                .collect();
            let bytes = self.estimate.total_bytes(&movable_tids, |_| None);
            let queued_leave_in_time = can_leave_in_time(
                self.started_at.elapsed(),
                self.progress.departed_bytes,
                bytes,
                remaining_time,
            );
            next_job = select_job(
                jobs,
                queued_leave_in_time,
                self.progress.transfer_totals,
                &self.attempts,
            );
        }
        // If no job is ready, the result is used for [`ESTIMATE_AGE_MAX`]. After that, jobs whose
        // checkpoint failed and tasks that may still leave are examined again.
        let write_time = if remaining_time <= write_time {
            Duration::ZERO
        } else {
            write_time
        };
        self.estimate.last_estimate = next_job.is_none().then(|| (Instant::now(), write_time));
        Ok(next_job)
    }

    /// Checkpoints a job and, with `--checkpoint`, ends the job. Prints the result. `retry_later`
    /// is true if the caller tries again after a temporary failure.
    fn checkpoint_job(
        &mut self,
        remaining_job: &RemainingJob,
        retry_later: bool,
    ) -> Result<(), Error> {
        let (job, host, ends_job) = (
            remaining_job.job,
            &self.request.host,
            self.request.checkpoints_all,
        );
        // The job's schedule may have caused a checkpoint during the estimate.
        self.progress.read_events(self.machine)?;
        if !ends_job && self.progress.drain_checkpoints.contains_key(&job) {
            return Ok(());
        }
        let attempts = CheckpointAttempts {
            count: 0,
            last_attempt_at: self.started_at,
            failure_is_permanent: false,
            last_error: String::new(),
        };
        let attempts = self.attempts.entry(job).or_insert(attempts);
        (attempts.count, attempts.last_attempt_at) = (attempts.count + 1, Instant::now());
        // The last tasks of the job may have migrated during the estimate.
        if (remaining_job.tasks_on_host.iter()).all(|tid| self.progress.has_migrated(*tid)) {
            return Ok(());
        }
        if attempts.count == 1 {
            (self.print_line)(&format!(
                "job {job} is being checkpointed, {}\n",
                megabytes_text(remaining_job.memory_bytes)
            ));
        }
        let result = request_checkpoint(self.machine, job, ends_job)?;
        attempts.last_attempt_at = Instant::now();
        match result {
            Ok(report) if ends_job => {
                (self.print_line)(&format!(
                    "job {job} has ended; 'restart {}' restarts it\n",
                    report.name
                ));
                self.remaining_tasks
                    .retain(|tid, _| !report.tasks.contains(tid));
                self.departed_tasks.extend(report.tasks);
                self.ended_checkpoints.push(report.name);
            }
            Ok(CheckpointReport {
                name: checkpoint_name,
                ..
            }) => {
                let text =
                    format!("job {job} is in the store as {checkpoint_name} and continues; ");
                (self.print_line)(&format!(
                    "{text}'restart {checkpoint_name}' restarts it if {host} leaves\n"
                ));
                self.continued_checkpoints.insert(job, checkpoint_name);
            }
            Err(failure) => {
                // [`CheckpointFailure::InProgress`] is temporary: the other checkpoint or restart
                // of the job will end.
                attempts.failure_is_permanent =
                    !failure.is_transient() && failure != CheckpointFailure::InProgress;
                let retry_text = if retry_later && !attempts.failure_is_permanent {
                    ", and will be tried again while there is time"
                } else {
                    ""
                };
                let error_text = format!(
                    "no checkpoint of job {job}: {failure}{}{retry_text}\n",
                    job_state_clause(&failure, "it")
                );
                if attempts.last_error != error_text {
                    (self.print_line)(&error_text);
                    attempts.last_error = error_text;
                }
            }
        }
        Ok(())
    }

    /// Checkpoints and ends all remaining jobs. Jobs with failed attempts get one more attempt,
    /// because the cause of the failure may have ended.
    fn checkpoint_all(&mut self) -> Result<(), Error> {
        self.attempts.clear();
        // Continues even if progress cannot be read.
        while self.poll_rm().unwrap_or(true) {
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

    /// Prints the work that each remaining job would lose if the host left at this moment.
    fn print_losses(&mut self) -> Result<(), Error> {
        if self.remaining_tasks.is_empty() || self.request.checkpoints_all {
            return Ok(());
        }
        // A store that cannot be read counts as empty.
        let checkpoints = match self.machine.ask(Request::ListCheckpoints)? {
            Reply::Checkpoints(checkpoints) => checkpoints.unwrap_or_default(),
            _ => return Err(unexpected_reply_error()),
        };
        for job in find_jobs(
            self.console,
            &task_parents(self.machine)?,
            &self.remaining_tasks,
        ) {
            (self.print_line)(&loss_line(
                &self.request.host,
                job,
                &checkpoints,
                self.continued_checkpoints
                    .get(&job)
                    .or(self.progress.drain_checkpoints.get(&job)),
            ));
        }
        Ok(())
    }

    /// Prints the remaining tasks and returns the outcome. `staying_count` is the number of tasks
    /// that stay because they belong to the host or were started by hand.
    fn into_outcome(self, staying_count: u32) -> Outcome {
        let (host, tasks) = (&self.request.host, &self.remaining_tasks);
        let mut text = String::new();
        for (tid, reason) in tasks {
            let reason = reason
                .clone()
                .unwrap_or_else(|| self.progress.migration_text(*tid));
            text.push_str(&format!("{tid} is still there: {reason}\n"));
        }
        if tasks.is_empty() {
            text.push_str(&format!(
                "{host} is empty after {:.1} s\n",
                self.started_at.elapsed().as_secs_f64()
            ));
        }
        if staying_count > 0 {
            text.push_str(&format!(
                "{staying_count} tasks that belong to the host or were started there by hand stay until they end\n"
            ));
        }
        let tid_texts =
            |tids: &mut dyn Iterator<Item = &Tid>| tids.map(Tid::to_string).collect::<Vec<_>>();
        let remaining_json: Vec<_> = tasks
            .iter()
            .map(|(tid, reason)| json!({ "tid": tid.to_string(), "why": reason }))
            .collect();
        let departed_texts = tid_texts(&mut self.departed_tasks.iter());
        let (ended_names, continued_names): (_, Vec<&String>) = (
            &self.ended_checkpoints,
            self.continued_checkpoints.values().collect(),
        );
        let json_output = json!({ "host": host, "left": departed_texts, "still": remaining_json, "stay": staying_count, "sets": ended_names, "kept": continued_names });
        (self.print_line)(&text);
        Outcome::with_json(String::new(), json_output, !tasks.is_empty())
    }
}

/// Drains a host and waits until the host is empty or the time limit is reached; with
/// `--checkpoint`, then checkpoints and ends the remaining jobs. Calls `print_line` with each line
/// of progress. Returns the outcome, which has failed if tasks remain. `console` is the console
/// that requested the drain.
pub(super) fn drain(
    machine: &dyn VirtualMachine,
    request: &DrainRequest,
    console: Tid,
    print_line: &mut dyn FnMut(&str),
) -> Result<Outcome, Error> {
    let DrainRequest {
        host,
        deadline,
        checkpoints_all: ends_jobs,
    } = request;
    let deadline_us = deadline.map(|deadline| Micros(deadline.as_micros() as u64));
    let Some((_, tasks, staying_count)) = unpack_drain_reply(machine.ask_rm(&RmQuery::Drain {
        host: host.clone(),
        time_limit: deadline_us,
    })?)?
    else {
        return Ok(unknown_host_outcome("drain", host));
    };
    let task_count = tasks.len();
    print_line(&format!(
        "{host} accepts no tasks; {task_count} must leave\n"
    ));
    let (departed_tids, ended_checkpoints, continued_checkpoints, attempts, estimate) =
        Default::default();
    let (started_at, progress) = (Instant::now(), DrainProgress::new(machine.tid()));
    let mut drain_run = DrainRun {
        machine,
        request,
        console,
        print_line,
        started_at,
        initial_task_count: task_count,
        remaining_tasks: tasks,
        departed_tasks: departed_tids,
        ended_checkpoints,
        continued_checkpoints,
        attempts,
        progress,
        estimate,
    };
    if drain_run.wait_until_empty()? && *ends_jobs {
        drain_run.checkpoint_all()?;
    }
    drain_run.print_losses()?;
    Ok(drain_run.into_outcome(staying_count))
}

/// True if no resource manager is running, or if the resource manager does not answer.
fn is_rm_unavailable(error: &Error) -> bool {
    matches!(error.code, PvmError::NoTask | PvmError::NotImpl)
}

/// Returns the parent of each task.
fn task_parents(machine: &dyn VirtualMachine) -> Result<BTreeMap<Tid, Tid>, Error> {
    Ok(machine
        .tasks(Tid::NONE)?
        .into_iter()
        .map(|task| (task.tid, task.parent))
        .collect())
}

/// Checkpoints a job and waits for the end of the checkpoint. If `ends_job` is true, the job then
/// ends.
fn request_checkpoint(
    machine: &dyn VirtualMachine,
    job: Tid,
    ends_job: bool,
) -> Result<Result<CheckpointReport, CheckpointFailure>, Error> {
    // `wait_for_end` must be true. Otherwise the resource manager would be responsible for the
    // restart.
    match machine.ask(Request::Checkpoint {
        job,
        schedule: None,
        end_job: ends_job,
        wait_for_end: true,
    })? {
        Reply::Checkpointed(result) => Ok(result),
        _ => Err(unexpected_reply_error()),
    }
}
