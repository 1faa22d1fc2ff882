//! `drain` and `undrain`: empties a host, for maintenance or before it leaves, and lets it accept
//! tasks again.
//!
//! The resource manager migrates the tasks away; the console polls it and prints progress. If a
//! deadline or `--checkpoint` is given, the console also checkpoints jobs that would not leave in
//! time:
//!
//! 1. It estimates from the jobs' memory how long checkpoints of all remaining jobs would take.
//! 2. When only that time is left before the deadline, it checkpoints jobs, one at a time, in the
//!    order of [`select_job`].
//! 3. With `--checkpoint`, a checkpointed job ends, and at the end every remaining job is
//!    checkpointed and ended. Without it, checkpointed jobs continue.
//! 4. At the end it prints what each remaining job would lose if the host left at that moment.

mod progress;

use self::progress::{DrainEnd, Progress, TransferTotals, megabytes};
use crate::checkpoint::job_after_failure;
use crate::clock::unix_micros;
use crate::parse::ParseError;
use crate::session::Outcome;
use crate::virtual_machine::{VirtualMachine, unexpected_reply};
use crate::words::{option_value, parse_duration};
use libpvm::Error;
use sempa_proto::checkpoint::{CheckpointEntry, CheckpointFailure, CheckpointReport};
use sempa_proto::rm::{RmQuery, RmReply};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, PvmError, Tid};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Interval for polling the resource manager.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Without a deadline, time to wait for the first task to leave, and for each further one.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// Seconds a checkpoint of a job takes in addition to the time for its bytes.
const JOB_OVERHEAD_SECONDS: f64 = 2.0;
/// Largest rate at which memory is written to the store: to disk, encrypted and flushed. Slower if
/// migrations are slower.
const WRITE_BYTES_PER_SECOND_MAX: f64 = 50e6;
/// Factor on the estimated write time, because disks are shared, and lower limit of the result.
const WRITE_TIME_FACTOR: f64 = 1.5;
const WRITE_TIME_MIN: Duration = Duration::from_secs(5);
/// Age at which the estimate is computed again. It queries all hosts.
const ESTIMATE_MAX_AGE: Duration = Duration::from_secs(1);
/// Number of tasks whose memory is queried, and time limit for the queries of one estimate.
const MEMORY_QUERIES_MAX: usize = 256;
const MEMORY_QUERIES_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest accepted deadline; a longer one is a typing error.
const DEADLINE_MAX: Duration = Duration::from_secs(24 * 3600);

/// A parsed `drain` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DrainCommand {
    pub(crate) host: String,
    /// Time within which the host must be empty.
    pub(crate) deadline: Option<Duration>,
    /// True if checkpointed jobs end, and all jobs that remain at the end are checkpointed and
    /// ended. False if checkpointed jobs continue.
    pub(crate) checkpoint: bool,
}

impl DrainCommand {
    /// True if the drain may checkpoint jobs. Only the process that runs the drain does so.
    pub(crate) fn may_checkpoint(&self) -> bool {
        self.deadline.is_some() || self.checkpoint
    }

    /// Returns the words of the command.
    pub(crate) fn to_words(&self) -> Vec<String> {
        let mut words = vec!["drain".to_string(), self.host.clone()];
        words.extend(
            self.deadline
                .iter()
                .flat_map(|within| ["--deadline".to_string(), format!("{}s", within.as_secs())]),
        );
        words.extend(self.checkpoint.then(|| "--checkpoint".to_string()));
        words
    }
}

/// Parses the words after the command.
pub(crate) fn parse(args: &[String]) -> Result<DrainCommand, ParseError> {
    let (mut host, mut deadline, mut checkpoint) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option_value("drain", "--deadline", arg, &mut rest)? {
            Some(value) => {
                let wanted = "a time such as 30s or 5m";
                let not = || ParseError::WrongType {
                    command: "drain",
                    word: value.into(),
                    expected: wanted,
                };
                deadline = Some(
                    parse_duration(value)
                        .filter(|span| *span <= DEADLINE_MAX)
                        .ok_or_else(not)?,
                );
            }
            None if arg == "--checkpoint" => checkpoint = true,
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(
                    arg.trim_start_matches('-').to_string(),
                ));
            }
            None if host.is_none() => host = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs("drain")),
        }
    }
    Ok(DrainCommand {
        host: host.ok_or(ParseError::WrongArgs("drain"))?,
        deadline,
        checkpoint,
    })
}

fn unknown_host(command: &str, host: &str) -> Outcome {
    Outcome::error(format!(
        "{command}: the resource manager knows no host {host}; 'conf' lists them"
    ))
}

/// Tasks that remain on a host, each with the reason why it cannot leave, if there is one.
type RemainingTasks = BTreeMap<Tid, Option<String>>;

/// Unpacks an answer about a drain: whether the host is drained, the remaining tasks, and the
/// number of tasks that cannot leave. `None` means that the host is unknown.
fn unpack_answer(answer: RmReply) -> Result<Option<(bool, RemainingTasks, u32)>, Error> {
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

/// State of a task that is still on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DepartureState {
    /// No other host accepts it.
    Stuck,
    /// It is queued for migration.
    Queued,
    /// It is migrating. Its job cannot be checkpointed meanwhile.
    Migrating,
}

/// A job that has tasks on the host and can be checkpointed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RemainingJob {
    job: Tid,
    /// Number of its tasks on the host.
    task_count: usize,
    /// Work that would be lost with the job: the time that its tasks, on all hosts, have run since
    /// its newest checkpoint, summed.
    unsaved_work: Micros,
    /// Bytes of memory of all its tasks, on all hosts.
    bytes: u64,
    state: DepartureState,
}

impl RemainingJob {
    /// Returns the microseconds of work saved per second of checkpointing.
    fn saved_per_second(&self, moved: TransferTotals) -> u64 {
        (self.unsaved_work.0 as f64 / write_seconds(1, self.bytes, moved)) as u64
    }
}

/// Attempts to checkpoint a job.
#[derive(Debug)]
struct Attempts {
    count: u32,
    last: Instant,
    /// Another attempt would fail, too.
    is_hopeless: bool,
    /// The error line that was printed last.
    last_error: String,
}

/// State of a running drain.
struct DrainRun<'a, M> {
    machine: &'a M,
    command: &'a DrainCommand,
    /// The console that requested the drain. Its children are checkpointed although it is alive.
    console: Tid,
    show: &'a mut dyn FnMut(&str),
    started: Instant,
    /// Number of tasks at the start.
    initial_count: usize,
    remaining: RemainingTasks,
    departed: Vec<Tid>,
    /// Checkpoints of jobs that were ended.
    ended_checkpoints: Vec<String>,
    /// Checkpoints of jobs that continue.
    continued_checkpoints: BTreeMap<Tid, String>,
    attempts: BTreeMap<Tid, Attempts>,
    progress: Progress,
    estimate: WriteEstimate,
}

impl<M: VirtualMachine> DrainRun<'_, M> {
    /// Waits until the host is empty or the time is over. Returns false if the drain was cancelled
    /// or superseded.
    fn wait_until_empty(&mut self) -> Result<bool, Error> {
        let deadline = self.command.deadline;
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
                && let Some(rest) = self.due_job(until.saturating_duration_since(Instant::now()))?
            {
                self.checkpoint_job(&rest, true)?;
            }
        }
        Ok(true)
    }

    /// Polls the resource manager and prints progress. Returns false if the drain was cancelled or
    /// superseded.
    fn poll(&mut self) -> Result<bool, Error> {
        let host = &self.command.host;
        let question = RmQuery::DrainStatus { host: host.clone() };
        let (drained, mut now) = match self.machine.ask_rm(&question) {
            // The drain continues without a resource manager: its successor knows the order, and
            // checkpoints cannot wait for it.
            Err(error) if self.command.may_checkpoint() && is_rm_unavailable(&error) => {
                (true, self.remaining_without_rm()?)
            }
            answer => match unpack_answer(answer?)? {
                Some((drained, now, _)) => (drained, now),
                None => return Ok(false),
            },
        };
        // The resource manager may not know yet that a job has ended after its checkpoint.
        now.retain(|tid, _| !self.departed.contains(tid));
        self.progress.read_events(self.machine)?;
        for tid in self.remaining.keys().filter(|tid| !now.contains_key(tid)) {
            self.departed.push(*tid);
            let (gone, all) = (self.departed.len(), self.initial_count);
            (self.show)(&format!(
                "{tid} has left ({gone} of {all}{})\n",
                self.progress.size_text(*tid)
            ));
        }
        self.remaining = now;
        let over = match self.progress.end {
            _ if !drained => Some(DrainEnd::Cancelled),
            // A drain that does not checkpoint only prints progress, so a later order does not end
            // it.
            Some(DrainEnd::Superseded(_)) if !self.command.may_checkpoint() => None,
            over => over,
        };
        match over {
            Some(DrainEnd::Cancelled) => (self.show)(&format!(
                "{host} takes tasks again: somebody has called it off\n"
            )),
            Some(DrainEnd::Superseded(by)) => (self.show)(&format!(
                "a later order to empty {host} counts, that of {by}\n"
            )),
            None => {}
        }
        Ok(over.is_none())
    }

    /// Returns the last known tasks that are still on the host, while no resource manager answers.
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
            !self.command.checkpoint
                && (self.continued_checkpoints.contains_key(job)
                    || self.progress.checkpoints.contains_key(job))
                || self
                    .attempts
                    .get(job)
                    .is_some_and(|tried| tried.is_hopeless)
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
                    .can_migrate(tid, Some(&self.command.host))
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

    /// Returns the job to checkpoint next, if no more than the time for checkpoints is left.
    fn due_job(&mut self, left: Duration) -> Result<Option<RemainingJob>, Error> {
        if self
            .estimate
            .computed
            .is_some_and(|(at, time)| at.elapsed() < ESTIMATE_MAX_AGE && left > time)
        {
            return Ok(None);
        }
        let jobs = self.remaining_jobs()?;
        let bytes = jobs
            .iter()
            .fold(0, |sum: u64, rest| sum.saturating_add(rest.bytes));
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
            let leave = can_leave_in_time(
                self.started.elapsed(),
                self.progress.departed_bytes,
                bytes,
                left,
            );
            next = select_job(jobs, leave, self.progress.transferred, &self.attempts);
        }
        // If no job is ready, the result is kept for [`ESTIMATE_MAX_AGE`]: jobs whose checkpoint
        // failed and tasks that may still leave are examined again after that.
        let time = if left <= time { Duration::ZERO } else { time };
        self.estimate.computed = next.is_none().then(|| (Instant::now(), time));
        Ok(next)
    }

    /// Checkpoints a job and, with `--checkpoint`, ends it. `again` is true if a temporary failure
    /// is tried again later.
    fn checkpoint_job(&mut self, remaining_job: &RemainingJob, again: bool) -> Result<(), Error> {
        let (job, host, ends) = (
            remaining_job.job,
            &self.command.host,
            self.command.checkpoint,
        );
        // The daemons may have checkpointed the job during the estimate.
        self.progress.read_events(self.machine)?;
        if !ends && self.progress.checkpoints.contains_key(&job) {
            return Ok(());
        }
        if !self.attempts.contains_key(&job) {
            (self.show)(&format!(
                "job {job} is being written, {}\n",
                megabytes(remaining_job.bytes)
            ));
        }
        let result = request_checkpoint(self.machine, job, ends)?;
        let attempts = Attempts {
            count: 0,
            last: self.started,
            is_hopeless: false,
            last_error: String::new(),
        };
        let attempts = self.attempts.entry(job).or_insert(attempts);
        (attempts.count, attempts.last) = (attempts.count + 1, Instant::now());
        match result {
            Ok(report) if ends => {
                (self.show)(&format!(
                    "job {job} has ended; 'restart {}' starts it again\n",
                    report.name
                ));
                self.remaining.retain(|tid, _| !report.tasks.contains(tid));
                self.departed.extend(report.tasks);
                self.ended_checkpoints.push(report.name);
            }
            Ok(CheckpointReport { name: set, .. }) => {
                let text = format!("job {job} is in the store as {set} and goes on; ");
                (self.show)(&format!(
                    "{text}'restart {set}' starts it again if {host} leaves\n"
                ));
                self.continued_checkpoints.insert(job, set);
            }
            Err(why) => {
                // Another checkpoint or restart of the job that is in progress will end; that
                // failure is not permanent.
                attempts.is_hopeless = !why.is_transient() && why != CheckpointFailure::InProgress;
                let again = if again && !attempts.is_hopeless {
                    ", and is tried again while there is time"
                } else {
                    ""
                };
                let error_text = format!(
                    "no checkpoint of job {job}: {why}{}{again}\n",
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

    /// Checkpoints and ends all remaining jobs. Each gets one more attempt, because earlier
    /// obstacles may be gone.
    fn checkpoint_all(&mut self) -> Result<(), Error> {
        self.attempts.clear();
        // Continues even if progress cannot be read.
        while self.poll().unwrap_or(true) {
            let rests = self.remaining_jobs()?;
            let Some(rest) = rests
                .iter()
                .find(|rest| !self.attempts.contains_key(&rest.job))
            else {
                break;
            };
            self.checkpoint_job(rest, false)?;
        }
        Ok(())
    }

    /// Prints what each remaining job would lose if the host left at this moment.
    fn warn_of_losses(&mut self) -> Result<(), Error> {
        if self.remaining.is_empty() || self.command.checkpoint {
            return Ok(());
        }
        // A store that cannot be read counts as empty.
        let checkpoints = match self.machine.ask(Request::ListCheckpoints)? {
            Reply::Checkpoints(checkpoints) => checkpoints.unwrap_or_default(),
            _ => return Err(unexpected_reply()),
        };
        for job in jobs_of(self.console, &parents(self.machine)?, &self.remaining) {
            (self.show)(&loss_line(
                &self.command.host,
                job,
                &checkpoints,
                self.continued_checkpoints
                    .get(&job)
                    .or(self.progress.checkpoints.get(&job)),
            ));
        }
        Ok(())
    }

    /// Prints what remains and returns the outcome.
    fn into_outcome(self, stay: u32) -> Outcome {
        let (host, tasks) = (&self.command.host, &self.remaining);
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
                "{stay} that belong to the host, or were started there by hand, stay until they end\n"
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
/// progress.
pub(crate) fn drain<M: VirtualMachine>(
    machine: &M,
    command: &DrainCommand,
    console: Tid,
    show: &mut dyn FnMut(&str),
) -> Result<Outcome, Error> {
    let DrainCommand {
        host,
        deadline,
        checkpoint,
    } = command;
    let micros = deadline.map(|deadline| Micros(deadline.as_micros() as u64));
    let Some((_, tasks, stay)) = unpack_answer(machine.ask_rm(&RmQuery::Drain {
        host: host.clone(),
        within: micros,
    })?)?
    else {
        return Ok(unknown_host("drain", host));
    };
    let all = tasks.len();
    show(&format!(
        "{host} takes no tasks; {all} {} to leave\n",
        if all == 1 { "is" } else { "are" }
    ));
    let (departed, ended_checkpoints, continued_checkpoints, attempts, writing) =
        Default::default();
    let (started, progress) = (Instant::now(), Progress::new(machine.tid()));
    let mut run = DrainRun {
        machine,
        command,
        console,
        show,
        started,
        initial_count: all,
        remaining: tasks,
        departed,
        ended_checkpoints,
        continued_checkpoints,
        attempts,
        progress,
        estimate: writing,
    };
    if run.wait_until_empty()? && *checkpoint {
        run.checkpoint_all()?;
    }
    run.warn_of_losses()?;
    Ok(run.into_outcome(stay))
}

/// True if no resource manager is running, or it does not answer.
fn is_rm_unavailable(error: &Error) -> bool {
    matches!(error.code, PvmError::NoTask | PvmError::NotImpl)
}

/// Returns the line about what a job loses if the host leaves. The last argument is the checkpoint
/// that this drain caused, if there is one.
fn loss_line(
    host: &str,
    job: Tid,
    checkpoints: &[CheckpointEntry],
    kept: Option<&String>,
) -> String {
    let newest = checkpoints
        .iter()
        .filter(|set| set.job == job && set.unusable_reason.is_none())
        .max_by_key(|set| set.created);
    let lost = newest.map_or("all that it has done".into(), |set| {
        format!("what it has done since {}", set.name)
    });
    let more = match newest.is_some_and(|set| Some(&set.name) == kept) {
        true => String::new(),
        false => format!("; 'drain {host} --checkpoint' writes it"),
    };
    format!("job {job} loses {lost} if {host} leaves now{more}\n")
}

/// Returns the state of a job with these tasks on the host.
fn job_state(states: &[DepartureState]) -> DepartureState {
    let stuck = states
        .iter()
        .find(|standing| **standing == DepartureState::Stuck);
    stuck
        .or(states.iter().max())
        .copied()
        .unwrap_or(DepartureState::Migrating)
}

/// Selects the job to checkpoint next.
///
/// Jobs that no host accepts come first, the one that saves most work per second of writing before
/// the others. Queued jobs follow, the largest first, because it would leave last; they are left
/// out if `leave` says that they leave in time. Jobs with failed attempts come after those without.
fn select_job(
    mut jobs: Vec<RemainingJob>,
    leave: bool,
    rate: TransferTotals,
    attempts: &BTreeMap<Tid, Attempts>,
) -> Option<RemainingJob> {
    jobs.retain(|rest| match rest.state {
        DepartureState::Stuck => true,
        DepartureState::Queued => !leave,
        DepartureState::Migrating => false,
    });
    jobs.retain(|rest| {
        attempts
            .get(&rest.job)
            .is_none_or(|attempts| attempts.last.elapsed() >= ESTIMATE_MAX_AGE)
    });
    jobs.into_iter().min_by_key(|rest| {
        let worth = if rest.state == DepartureState::Stuck {
            rest.saved_per_second(rate)
        } else {
            rest.bytes
        };
        (
            attempts.get(&rest.job).map_or(0, |attempts| attempts.count),
            rest.state,
            Reverse((worth, rest.task_count)),
            rest.job,
        )
    })
}

/// True if `bytes` can leave in the time `left` at the rate of those that have left so far. If none
/// has left yet, true during the first quarter of the whole time.
fn can_leave_in_time(elapsed: Duration, departed_bytes: u64, bytes: u64, left: Duration) -> bool {
    match departed_bytes {
        0 => elapsed < left / 3,
        departed_bytes => {
            elapsed.as_secs_f64() * bytes as f64 <= left.as_secs_f64() * departed_bytes as f64
        }
    }
}

/// Estimate of the time for checkpoints.
#[derive(Debug, Default)]
struct WriteEstimate {
    /// Memory of tasks that answered a query, in bytes.
    memory: BTreeMap<Tid, u64>,
    /// When the estimate was computed, and its result.
    computed: Option<(Instant, Duration)>,
}

impl WriteEstimate {
    /// Returns the bytes of these tasks. Calls `ask` for unknown ones, up to [`MEMORY_QUERIES_MAX`]
    /// tasks in total; those that stay unknown count with the mean of the others.
    fn bytes(&mut self, tasks: &[Tid], ask: impl Fn(Tid) -> Option<u64>) -> u64 {
        for tid in tasks {
            if self.memory.len() < MEMORY_QUERIES_MAX && !self.memory.contains_key(tid) {
                self.memory.extend(ask(*tid).map(|bytes| (*tid, bytes)));
            }
        }
        let sum = self
            .memory
            .values()
            .fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let mean = sum / self.memory.len().max(1) as u64;
        let bytes = tasks
            .iter()
            .map(|tid| self.memory.get(tid).copied().unwrap_or(mean));
        bytes.fold(0, u64::saturating_add)
    }
}

/// Returns the seconds that checkpoints of this number of jobs take, given their total bytes and
/// the measured migrations.
fn write_seconds(jobs: usize, bytes: u64, transferred: TransferTotals) -> f64 {
    let measured = transferred.0 as f64 / (transferred.1.0 as f64 / 1e6);
    let rate = if transferred.1.0 > 0 {
        measured.clamp(1.0, WRITE_BYTES_PER_SECOND_MAX)
    } else {
        WRITE_BYTES_PER_SECOND_MAX
    };
    JOB_OVERHEAD_SECONDS * jobs as f64 + bytes as f64 / rate
}

/// Returns the same time with the margin for shared disks.
fn write_time_with_margin(jobs: usize, bytes: u64, rate: TransferTotals) -> Duration {
    // Limits the result to a year, which exceeds any deadline.
    let time =
        Duration::from_secs_f64((write_seconds(jobs, bytes, rate) * WRITE_TIME_FACTOR).min(3e7));
    time.max(WRITE_TIME_MIN)
}

/// Returns the parent of each task.
fn parents(machine: &impl VirtualMachine) -> Result<BTreeMap<Tid, Tid>, Error> {
    Ok(machine
        .tasks(Tid::NONE)?
        .into_iter()
        .map(|task| (task.tid, task.parent))
        .collect())
}

/// Returns the job of a task. Tasks on the host count as spawned even if their parent is gone.
fn job_of(tid: Tid, parents: &BTreeMap<Tid, Tid>, tasks: &RemainingTasks) -> Tid {
    let spawned = |tid: &Tid| {
        tasks.contains_key(tid) || parents.get(tid).is_some_and(|parent| parent.is_task())
    };
    topmost_spawned(tid, parents, spawned)
}

/// Returns the jobs of these tasks, the one with most tasks first, because one checkpoint covers
/// all of them. The first argument is the console.
fn jobs_of(console: Tid, parents: &BTreeMap<Tid, Tid>, tasks: &RemainingTasks) -> Vec<Tid> {
    let mut jobs = BTreeMap::<Tid, usize>::new();
    for tid in tasks.keys() {
        *jobs.entry(job_of(*tid, parents, tasks)).or_default() += 1;
    }
    // Leaves out jobs whose parent was started by hand and is alive: it cannot be checkpointed
    // itself and would see its children end.
    jobs.retain(|job, _| {
        parents
            .get(job)
            .is_none_or(|by| *by == console || !parents.contains_key(by))
    });
    let mut jobs: Vec<(Tid, usize)> = jobs.into_iter().collect();
    jobs.sort_by_key(|(job, many)| (Reverse(*many), *job));
    jobs.into_iter().map(|(job, _)| job).collect()
}

/// Checkpoints a job; with `ends`, the job ends after it.
fn request_checkpoint(
    machine: &impl VirtualMachine,
    job: Tid,
    ends: bool,
) -> Result<Result<CheckpointReport, CheckpointFailure>, Error> {
    // Must wait: without waiting, the resource manager would be responsible for restarting the job.
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

/// Returns the first task of the job of `tid`: the topmost ancestor that was spawned.
fn topmost_spawned(tid: Tid, parents: &BTreeMap<Tid, Tid>, spawned: impl Fn(&Tid) -> bool) -> Tid {
    let mut top = tid;
    // Bounded by the number of tasks, in case a daemon reports a cycle.
    for _ in 0..parents.len() {
        match parents
            .get(&top)
            .filter(|parent| parents.contains_key(parent) && spawned(parent))
        {
            Some(parent) => top = *parent,
            None => break,
        }
    }
    top
}

/// Lets a host accept tasks again.
pub(crate) fn undrain(machine: &impl VirtualMachine, host: &str) -> Result<Outcome, Error> {
    let Some((drained, ..)) = unpack_answer(machine.ask_rm(&RmQuery::Undrain {
        host: host.to_string(),
    })?)?
    else {
        return Ok(unknown_host("undrain", host));
    };
    Ok(Outcome::with_values(
        format!("{host} takes tasks\n"),
        json!({ "host": host, "drained": drained }),
        false,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<DrainCommand, ParseError> {
        parse(
            &line
                .split(' ')
                .filter(|word| !word.is_empty())
                .map(String::from)
                .collect::<Vec<_>>(),
        )
    }

    /// Host and options of `drain` are accepted in any order.
    #[test]
    fn drain_arguments_parse_in_any_order() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(
            words("h2"),
            Ok(DrainCommand {
                host: "h2".into(),
                deadline: None,
                checkpoint: false
            })
        );
        assert_eq!(
            words("h2 --deadline 30s"),
            Ok(DrainCommand {
                host: "h2".into(),
                deadline: seconds(30),
                checkpoint: false
            })
        );
        assert_eq!(
            DrainCommand {
                host: "h2".into(),
                deadline: None,
                checkpoint: false
            }
            .to_words(),
            ["drain", "h2"]
        );
        let both = words("h2 --deadline 5m --checkpoint").expect("a drain");
        assert_eq!(
            (parse(&both.to_words()[1..]), both.may_checkpoint()),
            (Ok(both.clone()), true),
            "so it is said once more"
        );
        assert_eq!(
            words("--deadline=5m h2"),
            Ok(DrainCommand {
                host: "h2".into(),
                deadline: seconds(300),
                checkpoint: false
            })
        );
        assert!(words("h2 --checkpoint --deadline 30s").is_ok_and(|drain| drain.checkpoint));
        for line in ["", "h2 h3", "--deadline 3s", "h2 --deadline"] {
            assert_eq!(words(line), Err(ParseError::WrongArgs("drain")), "{line}");
        }
        assert_eq!(words("-x h2"), Err(ParseError::UnknownFlag("x".into())));
        for time in ["0s", "x", "3", "2d"] {
            let error = words(&format!("h2 --deadline {time}"))
                .expect_err(time)
                .to_string();
            assert_eq!(
                error,
                format!("drain: {time} is not a time such as 30s or 5m")
            );
        }
    }

    /// The estimated time for checkpoints follows from the jobs' memory and the rate of migrations.
    #[test]
    fn write_time_depends_on_memory_and_rate() {
        let seconds = |jobs, bytes, moved| write_time_with_margin(jobs, bytes, moved).as_secs();
        assert_eq!(
            seconds(1, 1 << 20, (0, Micros(0))),
            5,
            "never later than that"
        );
        assert_eq!(seconds(2, 1_000_000_000, (0, Micros(0))), 36);
        assert_eq!(
            seconds(2, 1_000_000_000, (900_000_000, Micros::from_secs(1))),
            36,
            "a disk is not as fast as a network"
        );
        assert_eq!(
            seconds(2, 1_000_000_000, (30_000_000, Micros::from_secs(3))),
            156,
            "tasks leave slowly"
        );
        assert!(seconds(1, u64::MAX, (1, Micros::from_secs(9))) > DEADLINE_MAX.as_secs());
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let (mut writing, asked) = (WriteEstimate::default(), std::cell::Cell::new(0));
        let ask = |_| {
            asked.set(asked.get() + 1);
            Some(10)
        };
        let tids = |many| (1..=many).map(tid).collect::<Vec<Tid>>();
        assert_eq!(writing.bytes(&tids(3), ask), 30);
        assert_eq!(
            (writing.bytes(&tids(4), ask), asked.get()),
            (40, 4),
            "each is asked for once"
        );
        assert_eq!(
            writing.bytes(&tids(6), |_| None),
            60,
            "who says nothing is taken for one of them"
        );
        let many = 2 * MEMORY_QUERIES_MAX as i32;
        assert_eq!(writing.bytes(&tids(many), ask), 10 * many as u64);
        assert!(asked.get() <= MEMORY_QUERIES_MAX);
        assert_eq!(WriteEstimate::default().bytes(&[], ask), 0);
    }

    /// Jobs that no host accepts are checkpointed before queued ones; migrating ones are not
    /// checkpointed.
    #[test]
    fn stuck_jobs_are_checkpointed_before_queued_ones() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let rest = |n, tasks, bytes, standing| RemainingJob {
            job: tid(n),
            task_count: tasks,
            unsaved_work: Micros(9),
            bytes,
            state: standing,
        };
        use DepartureState::{Migrating, Queued, Stuck};
        let rests = || {
            vec![
                rest(1, 9, 90, Migrating),
                rest(2, 1, 50, Queued),
                rest(3, 2, 60, Queued),
                rest(4, 1, 99, Stuck),
                rest(5, 2, 1, Stuck),
            ]
        };
        let mut tried = BTreeMap::new();
        let order = |leave, tried: &mut BTreeMap<Tid, Attempts>| -> Vec<i32> {
            let mut rests = rests();
            let next = std::iter::from_fn(|| {
                let next = select_job(rests.clone(), leave, TransferTotals::default(), tried)?;
                rests.retain(|rest| rest.job != next.job);
                (1..=5).find(|n| tid(*n) == next.job)
            });
            next.collect()
        };
        assert_eq!(order(false, &mut tried), [5, 4, 3, 2]);
        assert_eq!(
            order(true, &mut tried),
            [5, 4],
            "the others get there by themselves"
        );
        let mut failed = |n, at| {
            tried.insert(
                tid(n),
                Attempts {
                    count: 1,
                    last: at,
                    is_hopeless: false,
                    last_error: String::new(),
                },
            );
            order(false, &mut tried)
        };
        let before = Instant::now()
            .checked_sub(ESTIMATE_MAX_AGE)
            .expect("the machine runs for longer");
        assert_eq!(
            failed(5, before),
            [4, 3, 2, 5],
            "nobody waits for one that cannot be written yet"
        );
        assert_eq!(
            failed(4, Instant::now()),
            [3, 2, 5],
            "nor is it tried at once"
        );
        assert_eq!(
            [
                job_state(&[Queued, Migrating]),
                job_state(&[Migrating, Stuck]),
                job_state(&[Queued])
            ],
            [Migrating, Stuck, Queued]
        );
    }

    /// Of the jobs that no host accepts, the one that saves most work per second of writing comes
    /// first.
    #[test]
    fn job_saving_most_work_per_second_is_first() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let rest = |n, tasks, hours: u64, bytes| {
            let at_stake = Micros::from_secs(3600 * hours);
            RemainingJob {
                job: tid(n),
                task_count: tasks,
                unsaved_work: at_stake,
                bytes,
                state: DepartureState::Stuck,
            }
        };
        let first = |rests: &[RemainingJob]| {
            let next = select_job(rests.to_vec(), false, (0, Micros(0)), &BTreeMap::new());
            next.expect("there is one").job
        };
        // Many tasks with a recent checkpoint, and one task that has run for a month.
        assert_eq!(
            first(&[rest(1, 60, 1, 1 << 20), rest(2, 1, 720, 1 << 20)]),
            tid(2)
        );
        // 10 GB take 200 seconds: a hundred other jobs can be saved in that time.
        assert_eq!(
            first(&[rest(1, 1, 20, 1 << 20), rest(2, 1, 720, 10_000_000_000)]),
            tid(1)
        );
        assert_eq!(
            first(&[rest(1, 1, 5, 1 << 20), rest(2, 2, 5, 1 << 20)]),
            tid(2)
        );
    }

    /// Whether tasks leave in time is extrapolated from those that have left.
    #[test]
    fn leave_in_time_extrapolates_rate() {
        let leave = |over, gone, bytes, left| {
            can_leave_in_time(
                Duration::from_secs(over),
                gone,
                bytes,
                Duration::from_secs(left),
            )
        };
        assert!(
            leave(9, 0, 1 << 40, 30) && !leave(10, 0, 1, 30),
            "as long as none has left nobody knows"
        );
        assert!(leave(10, 50, 100, 20) && !leave(10, 50, 101, 20));
        assert!(!leave(u64::from(u32::MAX), 1, u64::MAX, 1) && leave(1, 1, 0, 0));
    }

    /// A job would lose its work since its newest checkpoint that is usable.
    #[test]
    fn loss_counts_from_newest_usable_checkpoint() {
        let (job, other) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let entry = |set: &str, job, made, broken: Option<&str>| CheckpointEntry {
            name: set.into(),
            job,
            created: Micros(made),
            tasks: 1,
            bytes: 1,
            unusable_reason: broken.map(String::from),
            job_ended_at: None,
            copy_hosts: Vec::new(),
        };
        let sets = [
            entry("a", job, 1, None),
            entry("b", job, 2, None),
            entry("c", job, 3, Some("cut short")),
        ];
        assert_eq!(
            loss_line("h2", job, &sets, None),
            "job t40001 loses what it has done since b if h2 leaves now; 'drain h2 --checkpoint' writes it\n"
        );
        let kept = |set: &str| loss_line("h2", job, &sets, Some(&set.into()));
        assert_eq!(
            kept("b"),
            "job t40001 loses what it has done since b if h2 leaves now\n"
        );
        assert_eq!(
            kept("c"),
            loss_line("h2", job, &sets, None),
            "it is not whole"
        );
        let all = loss_line("h2", other, &sets, None);
        assert!(all.starts_with("job t40002 loses all that it has done if h2 leaves now;"));
    }

    /// The first task of a job is the topmost ancestor that was spawned.
    #[test]
    fn job_starts_at_topmost_spawned_ancestor() {
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        // A console, its child and its grandchild; a task whose parent has ended; two tasks that a
        // faulty daemon reports as parents of each other.
        let parents = BTreeMap::from([
            (tid(1), Tid::NONE),
            (tid(2), tid(1)),
            (tid(3), tid(2)),
            (tid(4), tid(9)),
            (tid(5), tid(6)),
            (tid(6), tid(5)),
        ]);
        let job = |of: i32| {
            topmost_spawned(tid(of), &parents, |tid| {
                parents.get(tid).is_some_and(|parent| parent.is_task())
            })
        };
        assert_eq!([job(3), job(2), job(4)], [tid(2), tid(2), tid(4)]);
        assert!([tid(5), tid(6)].contains(&job(5)));
    }
}
