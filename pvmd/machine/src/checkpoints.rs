//! Checkpoints of jobs and restarts from them: the glue between the protocol, this daemon's tasks,
//! and the master's store.
//!
//! - A job is a task and everything that it and its descendants have spawned. The master finds the
//!   tasks by an inventory of all hosts, so it needs no resource manager. A member stays a member
//!   when its parent has ended.
//! - A checkpoint is taken on request, or repeatedly by a schedule. All tasks of the job are dumped
//!   at a consistent cut (a *snapshot*). Each task is one part of it. The store seals the
//!   checkpoint when it has all parts.
//! - If a host is lost, each job that has a schedule and had tasks there rolls back: its remaining
//!   tasks are killed before any task is notified of the loss. When none is left, the job is
//!   restarted from its newest checkpoint.

mod back;
mod copies;
mod ends;
mod fallen;
mod last_words;
mod restart;
mod unwanted;
mod way;

pub use copies::{COPIES_MAX, Copies};
pub(super) use last_words::Ends;

use super::asks::Asker;
use super::tasks::Task;
use super::{Machine, Output, Timer};
use checkpoint_protocol::{
    RestartId, Restarts, SnapshotId, SnapshotOutput, Snapshots, SourceEvent,
};
use sempa_proto::checkpoint::{
    CHECKPOINT_TASKS_MAX, CHECKPOINT_VERSION, CheckpointFailure, CheckpointMeta, CheckpointReport,
    CheckpointSchedule, RestartFailure, SavedGroup, SavedMailboxEntry, TaskMeta,
};
use sempa_proto::event::EventKind;
use sempa_proto::host::SavedTask;
use sempa_proto::host::{HostRequest, PendingItem};
use sempa_proto::migration::{Failure, Step, StepReport, TaskFacts};
use sempa_proto::table::{TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of jobs with checkpoints. If it is reached, an idle job is forgotten; if there is
/// none, the request is refused.
const JOBS_MAX: usize = 1024;
/// Largest number of attempts at a checkpoint of a job that is changing, and of attempts at short
/// intervals to restart a job after a rollback.
const TRIES_MAX: u32 = 10;
/// Interval between attempts at a checkpoint.
const TRY_PAUSE: Micros = Micros::from_millis(200);
/// The same while a program is still writing a checkpoint that was requested before. All attempts
/// together take as long as a program has for that by default.
const WRITING_PAUSE: Micros = Micros::from_secs(6);
/// Interval between attempts to restart a job after a rollback. After [`TRIES_MAX`] attempts it
/// doubles each time, up to the maximum: there may be no user who restarts the job, and the missing
/// host may come back days later.
const RESTART_PAUSE: Micros = Micros::from_secs(2);
const RESTART_PAUSE_MAX: Micros = Micros::from_secs(600);
/// Largest number of restarted tasks whose incarnations are remembered.
const LINES_MAX: usize = 1 << 20;
/// Margin for killing the tasks of a lost host. Its daemon has already exited after its own,
/// shorter lease, and the tasker with it.
const FENCE_TIME: Micros = Micros::from_secs(2);
/// Interval between checks whether the last tasks of a job are gone.
const GONE_PAUSE: Micros = Micros::from_millis(20);
/// Largest number of such checks.
const GONE_LOOKS_MAX: u32 = 1000;
/// Shortest time between the end of a checkpoint of a job and the start of the next one.
const PAUSE_MIN: Micros = Micros::from_millis(500);
const SIGKILL: i32 = 9;

/// What is in progress for a job.
#[derive(Debug, Default, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// An inventory of its tasks is being taken, for a checkpoint.
    Counting,
    /// A snapshot is being taken.
    Cutting(SnapshotId),
    /// The job rolls back to its newest checkpoint, and its remaining tasks are being killed. The
    /// restart waits until the lost host is out of the table and `not_before` has passed. `looks`
    /// counts the checks so far.
    Ending {
        lost: Option<HostId>,
        not_before: Micros,
        why: String,
        looks: u32,
    },
    /// Its checkpoint is complete, and its tasks are being killed. `looks` counts the checks so
    /// far.
    Leaving {
        report: CheckpointReport,
        looks: u32,
    },
    /// It is being restarted from a checkpoint.
    Restarting,
}

/// A job with checkpoints.
#[derive(Debug, Default)]
struct Job {
    doing: Doing,
    /// Schedule of its checkpoints; `None` if they are only taken on request.
    pace: Option<CheckpointSchedule>,
    /// Start of the first attempt at the current checkpoint.
    began: Micros,
    waiters: Vec<(Tid, RequestId)>,
    /// The job must end when its checkpoint is complete.
    ends: bool,
    /// The resource manager requested that, and will restart the job when there is room.
    parks: bool,
    /// One of its hosts is being drained. Its tasks leave when they have been dumped.
    drains: bool,
    /// The event log contains that its checkpoints take too long for the requested bound.
    said_late: bool,
    /// Duration of its last checkpoint.
    took: Micros,
    /// Time of the next check. Earlier timers are ignored.
    due: Micros,
    tries: u32,
    /// All tasks that ever belonged to it, and those of them that have ended.
    members: BTreeSet<Tid>,
    ended: BTreeSet<Tid>,
    /// Tasks that may have died with their host.
    fallen: fallen::Fallen,
    /// Name of its newest checkpoint.
    newest: Option<String>,
    /// Name of the checkpoint from which it was restarted.
    origin: Option<String>,
    /// How its first task has ended.
    end: ends::End,
    copied: copies::Copied,
}

impl Job {
    /// True if a requested checkpoint is not complete yet.
    fn is_wanted(&self) -> bool {
        self.ends || !self.waiters.is_empty()
    }

    /// True if no task of it runs and it could not be restarted.
    fn is_stuck(&self) -> bool {
        matches!(self.doing, Doing::Ending { .. }) && self.tries > 0
    }
}

/// Contents of a checkpoint in progress besides the tasks' images, as of the moment when all tasks
/// were stopped.
#[derive(Debug, Default)]
struct Contents {
    groups: Vec<SavedGroup>,
    mailbox: Vec<SavedMailboxEntry>,
    contexts: Vec<(i32, Tid)>,
    /// Tasks of the checkpoint that is being sealed.
    members: Vec<Tid>,
    /// Those of them that have written their own checkpoints.
    own: Vec<Tid>,
    /// Name and size in bytes, after sealing.
    sealed: Option<(String, u64)>,
}

/// Tasks, and contexts with their owners, that hosts have reported.
#[derive(Debug, Default)]
pub(super) struct Counted {
    tasks: Vec<TaskInfo>,
    contexts: Vec<(i32, Tid)>,
}

impl Counted {
    pub(super) fn new(tasks: Vec<TaskInfo>, contexts: Vec<(i32, Tid)>) -> Counted {
        Counted { tasks, contexts }
    }
}

/// Purpose of an inventory of all hosts.
#[derive(Clone, Debug, PartialEq)]
enum Purpose {
    /// Begin a checkpoint of this job.
    Begin(Tid),
    /// All known tasks are stopped: find those that the job has spawned meanwhile.
    Verify(SnapshotId),
    /// Check whether the last tasks of this job are gone.
    Gone(Tid),
    /// Check that none of the tasks to restart is alive.
    Restart(u64),
    /// Check whether this job has ended.
    Over(Tid),
}

#[derive(Debug)]
struct Count {
    purpose: Purpose,
    missing: usize,
    found: Counted,
    /// A host that has not replied, so that its tasks are unknown.
    mute: Option<HostId>,
}

/// A restart from a checkpoint that was requested or is in progress.
#[derive(Debug)]
struct Wanted {
    set: String,
    /// The job that rolls back. `None` if a task requested the restart.
    job: Option<Tid>,
    on: Vec<String>,
    waiter: Option<(Tid, RequestId)>,
    why: String,
    meta: Option<CheckpointMeta>,
    begun: Option<RestartId>,
    /// Contexts that were assigned to the restarted tasks.
    held: Vec<(i32, Tid)>,
}

/// The master's state of all checkpoints and restarts.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    pub(super) cuts: Snapshots,
    pub(super) restarts: Restarts,
    jobs: BTreeMap<Tid, Job>,
    counts: BTreeMap<u64, Count>,
    last_count: u64,
    wanted: BTreeMap<u64, Wanted>,
    last_wanted: u64,
    /// Parts that are being unpacked and sent to their hosts.
    unpacked: BTreeSet<MigrationId>,
    contents: BTreeMap<SnapshotId, Contents>,
    /// The latest incarnation, and that of each restarted task.
    line: u16,
    lines: BTreeMap<Tid, u16>,
    /// Creation time of this virtual machine, as time of day.
    founded: Micros,
    /// Jobs whose known tasks have all ended.
    quiet: Vec<Tid>,
    /// Tasks of the whole virtual machine that have ended recently.
    recent: last_words::Recent,
    copying: copies::Copying,
}

impl Keeping {
    /// Returns the time at which [`super::Event::Wake`] is needed, if at all.
    pub(super) fn next_wakeup(&self) -> Option<Micros> {
        self.cuts
            .next_deadline()
            .into_iter()
            .chain(self.restarts.next_deadline())
            .min()
    }

    /// Sets the creation time of the virtual machine, if it is not set.
    pub(super) fn found(&mut self, now: Micros) {
        if self.founded == Micros(0) {
            self.founded = now;
        }
    }

    /// Makes room for another job: forgets an idle one if there are too many. False if there is
    /// none.
    fn has_room_for(&mut self, job: Tid) -> bool {
        if self.jobs.len() < JOBS_MAX || self.jobs.contains_key(&job) {
            return true;
        }
        let idle = |entry: &Job| {
            entry.pace.is_none() && entry.doing == Doing::Nothing && !entry.is_wanted()
        };
        let idle = self
            .jobs
            .iter()
            .find(|(_, entry)| idle(entry))
            .map(|(tid, _)| *tid);
        idle.is_some_and(|idle| self.jobs.remove(&idle).is_some())
    }

    fn job_of_cut(&self, cut: SnapshotId) -> Option<Tid> {
        self.jobs
            .iter()
            .find(|(_, job)| job.doing == Doing::Cutting(cut))
            .map(|(tid, _)| *tid)
    }

    fn wanted_of(&self, restart: RestartId) -> Option<u64> {
        self.wanted
            .iter()
            .find(|(_, wanted)| wanted.begun == Some(restart))
            .map(|(number, _)| *number)
    }
}

impl Machine {
    /// Returns the highest task number of a host that occurs in a checkpoint.
    pub(super) fn spared_on(&self, host: HostId) -> u32 {
        // At least 1 if there are checkpoints, so that every host knows of them: they may contain
        // contexts of hosts without tasks.
        let least = u32::from(!self.config.spared.is_empty());
        self.config
            .spared
            .get(&host)
            .copied()
            .unwrap_or_default()
            .max(least)
    }

    fn keeping(&mut self) -> Option<&mut Keeping> {
        self.master.as_mut().map(|master| &mut master.keeping)
    }

    // ---- Requests for checkpoints

    /// Master: handles a request for a checkpoint.
    pub(super) fn checkpoint_wanted(
        &mut self,
        (tid, id): (Tid, RequestId),
        job: Tid,
        pace: Option<CheckpointSchedule>,
        end: bool,
        wait: bool,
    ) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        if !keeping.has_room_for(job) {
            let reason =
                format!("{JOBS_MAX} jobs are checkpointed again and again already, the limit");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        let entry = keeping.jobs.entry(job).or_default();
        match pace {
            Some(CheckpointSchedule::Never) => {
                entry.pace = None;
                if entry.is_stuck() {
                    self.forget_job(job);
                }
                return self.reply(tid, id, Reply::Done);
            }
            Some(pace) => (entry.pace, entry.said_late) = (Some(pace), false),
            None => {}
        }
        // A request during an inventory gets the same checkpoint. A snapshot with stopped tasks may
        // be too old for a later request.
        let begins = match entry.doing {
            Doing::Nothing => true,
            Doing::Counting => false,
            Doing::Cutting(_)
            | Doing::Ending { .. }
            | Doing::Leaving { .. }
            | Doing::Restarting => {
                return match wait {
                    true => self.reply(
                        tid,
                        id,
                        Reply::Checkpointed(Err(CheckpointFailure::InProgress)),
                    ),
                    false => self.fail(
                        tid,
                        id,
                        PvmError::Already,
                        CheckpointFailure::InProgress.to_string(),
                    ),
                };
            }
        };
        entry.ends |= end;
        entry.parks |= end && !wait;
        if wait {
            entry.waiters.push((tid, id));
        } else {
            self.reply(tid, id, Reply::Done);
        }
        if begins {
            self.begin_count(job);
        }
    }

    fn begin_count(&mut self, job: Tid) {
        let now = self.now;
        if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
            entry.doing = Doing::Counting;
            if entry.tries == 0 {
                entry.began = now;
            }
            self.count(Purpose::Begin(job));
        }
    }

    /// Takes an inventory: requests the tasks of all hosts.
    fn count(&mut self, purpose: Purpose) {
        let hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let Some(keeping) = self.keeping() else {
            return;
        };
        keeping.last_count += 1;
        let number = keeping.last_count;
        keeping.counts.insert(
            number,
            Count {
                purpose,
                missing: hosts.len(),
                found: Counted::default(),
                mute: None,
            },
        );
        for host in hosts {
            self.ask(
                host,
                HostRequest::Inventory,
                Asker::Count {
                    count: number,
                    host,
                },
            );
        }
    }

    /// Handles the inventory of one host, or the loss of that host.
    pub(super) fn counted(&mut self, number: u64, found: Result<Counted, HostId>) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        let Some(count) = keeping.counts.get_mut(&number) else {
            return;
        };
        match found {
            Ok(found) => {
                count.found.tasks.extend(found.tasks);
                count.found.contexts.extend(found.contexts);
            }
            Err(host) => count.mute = Some(host),
        }
        count.missing -= 1;
        if count.missing > 0 {
            return;
        }
        let Some(Count {
            purpose,
            found,
            mute,
            ..
        }) = keeping.counts.remove(&number)
        else {
            return;
        };
        match (purpose, mute) {
            (Purpose::Begin(job), None) => self.begin_cut(job, &found.tasks),
            // A checkpoint without the tasks of that host would be incomplete.
            (Purpose::Begin(job), Some(host)) => self.not_counted(job, host),
            (Purpose::Verify(cut), None) => self.verify_cut(cut, found),
            (Purpose::Verify(cut), Some(host)) => {
                if let Some(keeping) = self.keeping() {
                    keeping
                        .cuts
                        .on_count_failed(cut, CheckpointFailure::HostLost(host));
                }
            }
            (Purpose::Gone(job), None) => self.look_whether_gone(job, &found.tasks),
            (Purpose::Gone(job), Some(_)) => self.schedule(job, GONE_PAUSE),
            (Purpose::Restart(wanted), None) => self.begin_restart(wanted, &found),
            (Purpose::Restart(wanted), Some(host)) => {
                self.restart_over(wanted, Err(RestartFailure::HostLost(host)));
            }
            (Purpose::Over(job), None) => self.look_whether_over(job, &found.tasks),
            // That host may have tasks of the job, so its checkpoints stay.
            (Purpose::Over(_), Some(_)) => {}
        }
    }

    fn not_counted(&mut self, job: Tid, host: HostId) {
        let counting = self
            .keeping()
            .and_then(|k| k.jobs.get(&job))
            .is_some_and(|job| job.doing == Doing::Counting);
        if counting {
            self.cut_over(job, Err(CheckpointFailure::HostLost(host)));
        }
    }

    /// Schedules the next check of a job. It replaces earlier ones.
    fn schedule(&mut self, job: Tid, after: Micros) {
        let due = self.now + after;
        if let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) {
            entry.due = due;
            self.timer(after, Timer::Job(job));
        }
    }

    // ---- Taking a checkpoint

    fn begin_cut(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let (now, lease) = (self.now, self.config.lease);
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let keeping = &mut master.keeping;
        let Some(entry) = keeping
            .jobs
            .get_mut(&job)
            .filter(|entry| entry.doing == Doing::Counting)
        else {
            return;
        };
        if let Some(until) = entry
            .fallen
            .unknown_until(now, lease)
            .filter(|_| !entry.is_wanted() && !entry.drains)
        {
            // A checkpoint without the tasks that may be lost would be incomplete.
            entry.doing = Doing::Nothing;
            return self.schedule(job, until.since(now));
        }
        let all = members(job, &mut entry.members, tasks);
        if all.is_empty() {
            return self.cut_over(job, Err(CheckpointFailure::NoSuchJob(job)));
        }
        if all.len() > CHECKPOINT_TASKS_MAX {
            return self.cut_over(
                job,
                Err(CheckpointFailure::TooManyTasks { tasks: all.len() }),
            );
        }
        let (coordinator, cuts) = (&mut master.directing.coordinator, &keeping.cuts);
        if entry.is_wanted() && !all.iter().any(|task| cuts.part_of(task.tid).is_some()) {
            // A task whose migration is still queued has not started to migrate. It is dumped first
            // and may migrate afterwards.
            let tids = all.iter().map(|task| task.tid).collect();
            entry.drains |= coordinator.cancel_queued(&tids);
        }
        let other = |tid: Tid| {
            coordinator
                .migration_of(tid)
                .or_else(|| cuts.part_of(tid))
                .map(|of| of.id)
        };
        let moving = all
            .iter()
            .find_map(|task| Some((task.tid, other(task.tid)?)));
        if let Some((tid, id)) = moving {
            let why = Failure::Refused(vec![sempa_proto::migration::Refusal::AlreadyMigrating(id)]);
            return self.cut_over(
                job,
                Err(CheckpointFailure::Task {
                    tid,
                    step: Step::Inspect,
                    why,
                }),
            );
        }
        let parts: Vec<_> = all
            .iter()
            .map(|task| (coordinator.next_id(), task.tid, task.host))
            .collect();
        let cut = keeping.cuts.begin(now, &parts);
        if let Some(entry) = keeping.jobs.get_mut(&job) {
            entry.doing = Doing::Cutting(cut);
        }
        self.out.push_back(Output::BeginSet { cut, job });
    }

    /// Handles the store's reply whether it has room for a checkpoint.
    pub(super) fn set_begun(&mut self, cut: SnapshotId, result: Result<(), String>) {
        let now = self.now;
        let Some(keeping) = self.keeping() else {
            return;
        };
        if keeping.cuts.is_active(cut) {
            keeping.cuts.on_space_reserved(now, cut, result);
        } else {
            self.out.push_back(Output::AbandonSet { cut });
        }
    }

    fn verify_cut(&mut self, cut: SnapshotId, found: Counted) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let keeping = &mut master.keeping;
        let Some(job) = keeping.job_of_cut(cut) else {
            return;
        };
        let Some(entry) = keeping.jobs.get_mut(&job) else {
            return;
        };
        let tids: Vec<Tid> = members(job, &mut entry.members, &found.tasks)
            .iter()
            .map(|task| task.tid)
            .collect();
        let mut ended = entry.ended.clone();
        if entry.newest.is_none() {
            // Before the first checkpoint the master does not know which ended tasks belonged to
            // the job, so all recent ones count.
            ended.extend(keeping.recent.all(now));
            let lives: BTreeSet<Tid> = found.tasks.iter().map(|task| task.tid).collect();
            ended.retain(|tid| !lives.contains(tid));
        }
        let ended: Vec<Tid> = ended.into_iter().collect();
        let mailbox = match master.mailbox.saved(&tids) {
            Ok(mailbox) => mailbox,
            Err(bytes) => {
                return keeping
                    .cuts
                    .on_count_failed(cut, CheckpointFailure::MailboxTooLarge { bytes });
            }
        };
        // While all tasks are stopped, none enters or leaves a group, and none arrives at a
        // barrier.
        let groups = master.groups.saved(&tids);
        let members: BTreeSet<Tid> = tids.iter().copied().collect();
        let contexts = found
            .contexts
            .into_iter()
            .filter(|(_, owner)| members.contains(owner))
            .collect();
        keeping.contents.insert(
            cut,
            Contents {
                groups,
                mailbox,
                contexts,
                ..Contents::default()
            },
        );
        let mut open = BTreeMap::<Tid, Vec<RequestId>>::new();
        for (tid, id) in master.groups.open().chain(master.mailbox.open()) {
            open.entry(tid).or_default().push(id);
        }
        keeping
            .cuts
            .on_tasks_counted(now, cut, &tids, &open, &ended);
    }

    /// Carries out the outputs of the protocols. True if there were any.
    pub(super) fn pump_keeping(&mut self) -> bool {
        let mut busy = self.look_at_quiet();
        while let Some(output) = self.keeping().and_then(|k| k.cuts.poll()) {
            busy = true;
            self.cutter_does(output);
        }
        while let Some(output) = self.keeping().and_then(|k| k.restarts.poll()) {
            busy = true;
            self.restarter_does(output);
        }
        busy
    }

    fn cutter_does(&mut self, output: SnapshotOutput) {
        let me = self.config.host;
        match output {
            SnapshotOutput::Order {
                host,
                part: of,
                order,
            } => self.order_move(host, of, order),
            SnapshotOutput::CountTasks(cut) => self.count(Purpose::Verify(cut)),
            SnapshotOutput::ExpectImages(of) if of.from == me => {}
            SnapshotOutput::ExpectImages(of) => self.out.push_back(Output::ExpectImages {
                migration: of.id,
                from: of.from,
            }),
            SnapshotOutput::StoreImages { snapshot, part: of } => {
                self.out.push_back(Output::KeepPart {
                    cut: snapshot,
                    migration: of.id,
                    tid: of.tid,
                });
            }
            SnapshotOutput::Seal { snapshot, parts } => self.seal(snapshot, parts),
            SnapshotOutput::Abandon { snapshot, parts } => {
                for migration in parts {
                    self.out.push_back(Output::DropImages { migration });
                }
                self.out.push_back(Output::AbandonSet { cut: snapshot });
            }
            SnapshotOutput::Ended { snapshot, result } => self.cut_ended(snapshot, result),
        }
    }

    fn seal(&mut self, cut: SnapshotId, parts: Vec<(Tid, HostId, TaskFacts)>) {
        let name = |host: HostId| {
            self.table
                .get(host)
                .map(|entry| entry.name.clone())
                .unwrap_or_default()
        };
        let Some(lines) = self.master.as_ref().map(|master| &master.keeping.lines) else {
            return;
        };
        let line = |tid: Tid| lines.get(&tid).copied().unwrap_or_default();
        let part = |(tid, host, facts)| TaskMeta {
            tid,
            host: name(host),
            facts,
            incarnation: line(tid),
        };
        let parts: Vec<TaskMeta> = parts.into_iter().map(part).collect();
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let Some(job) = master.keeping.job_of_cut(cut) else {
            return master
                .keeping
                .cuts
                .on_sealed(cut, Err("the job goes back to an earlier one".into()));
        };
        let Keeping {
            line, founded: vm, ..
        } = master.keeping;
        let members = parts.iter().map(|part| part.tid).collect();
        let own = parts
            .iter()
            .filter(|part| part.facts.restart_engine().is_some())
            .map(|part| part.tid)
            .collect();
        // The rest becomes part of the checkpoint.
        let kept = Contents {
            members,
            own,
            ..Contents::default()
        };
        let known = master
            .keeping
            .contents
            .insert(cut, kept)
            .unwrap_or_default();
        let Contents {
            groups,
            mailbox,
            contexts,
            ..
        } = known;
        let pace = master.keeping.jobs.get(&job).and_then(|entry| entry.pace);
        let (version, wire) = (CHECKPOINT_VERSION, WIRE_VERSION);
        let meta = CheckpointMeta {
            version,
            wire_version: wire,
            vm,
            job,
            latest_incarnation: line,
            tasks: parts,
            groups,
            mailbox,
            contexts,
            schedule: pace,
        };
        let keep = master.keeping.needed();
        self.out.push_back(Output::SealSet {
            cut,
            meta: Box::new(meta),
            keep,
        });
    }

    /// Handles the store's report that a checkpoint is sealed, or why it is not.
    pub(super) fn set_sealed(
        &mut self,
        cut: SnapshotId,
        mut result: Result<(String, u64), String>,
    ) {
        let Some(keeping) = self.master.as_deref_mut().map(|master| &mut master.keeping) else {
            return;
        };
        if let Ok((set, _)) = &result
            && keeping.job_of_cut(cut).is_none()
        {
            // The checkpoint was reported as failed, and the job rolls back to an earlier one,
            // whose files it restores.
            self.out.push_back(Output::DropSets {
                sets: vec![set.clone()],
            });
            result = Err("its checkpoint was over before".into());
        }
        let contents = keeping.contents.get_mut(&cut);
        let result =
            result.map(|sealed| contents.map_or((), |contents| contents.sealed = Some(sealed)));
        keeping.cuts.on_sealed(cut, result);
    }

    fn cut_ended(&mut self, cut: SnapshotId, result: Result<Micros, CheckpointFailure>) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        let Contents {
            members: tasks,
            own,
            sealed,
            ..
        } = keeping.contents.remove(&cut).unwrap_or_default();
        let Some(job) = keeping.job_of_cut(cut) else {
            return;
        };
        let result = result.and_then(|frozen| {
            let (set, bytes) =
                sealed.ok_or_else(|| CheckpointFailure::Store("the set was lost".into()))?;
            Ok(CheckpointReport {
                name: set,
                job,
                tasks,
                bytes,
                frozen,
                self_checkpointed: own,
            })
        });
        self.cut_over(job, result);
    }

    /// Finishes a checkpoint that is complete, has failed or did not begin.
    fn cut_over(&mut self, job: Tid, result: Result<CheckpointReport, CheckpointFailure>) {
        let (now, lease) = (self.now, self.config.lease);
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        entry.doing = Doing::Nothing;
        entry.tries += 1;
        let unknown_until = entry
            .fallen
            .unknown_until(now, lease)
            .filter(|_| entry.pace.is_some());
        if let Some(why) = result
            .as_ref()
            .err()
            .filter(|why| why.is_transient() && entry.tries < TRIES_MAX)
        {
            return self.schedule(
                job,
                if why.is_self_checkpoint_pending() {
                    WRITING_PAUSE
                } else {
                    TRY_PAUSE
                },
            );
        }
        (entry.tries, entry.drains) = (0, false);
        if result.is_ok() {
            entry.took = now.since(entry.began);
        }
        let parked = std::mem::take(&mut entry.parks) && entry.ends;
        let ends = std::mem::take(&mut entry.ends) && result.is_ok();
        if let (Ok(report), true) = (&result, ends) {
            // The request is answered when the job has ended.
            (entry.doing, entry.pace) = (
                Doing::Leaving {
                    report: report.clone(),
                    looks: 0,
                },
                None,
            );
        }
        let waiters = if ends {
            Vec::new()
        } else {
            std::mem::take(&mut entry.waiters)
        };
        if let Ok(report) = &result {
            entry.newest = Some(report.name.clone());
            let ended = std::mem::take(&mut entry.ended);
            entry.members.retain(|tid| !ended.contains(tid));
            entry.fallen.forget_all_but(&report.tasks);
        } else if entry.doing == Doing::Nothing && entry.is_quiet() {
            let quiet = job;
            self.keeping()
                .into_iter()
                .for_each(|keeping| keeping.quiet.push(quiet));
        }
        if let (Err(CheckpointFailure::NoSuchJob(_)), Some(until)) = (&result, unknown_until) {
            self.schedule(job, until.since(now));
        } else if matches!(result, Err(CheckpointFailure::NoSuchJob(_))) {
            self.job_over(job);
            self.forget_job(job);
        } else {
            self.schedule_next(job, result.is_ok());
        }
        if ends {
            self.count(Purpose::Gone(job));
        }
        self.record(match &result {
            Ok(CheckpointReport {
                name: set,
                tasks,
                bytes,
                frozen,
                ..
            }) => EventKind::Checkpointed {
                checkpoint: set.clone(),
                job,
                tasks: u32::try_from(tasks.len()).unwrap_or(u32::MAX),
                bytes: *bytes,
                frozen: *frozen,
                vacated: parked,
            },
            Err(why) => EventKind::CheckpointFailed {
                job,
                why: why.to_string(),
            },
        });
        for (tid, id) in waiters {
            self.reply(tid, id, Reply::Checkpointed(result.clone()));
        }
        if let Ok(report) = &result {
            self.copy_wanted(job, &report.name);
        }
    }

    /// Schedules the next checkpoint of a job, if it has a schedule. `good`: the last one was
    /// complete.
    fn schedule_next(&mut self, job: Tid, good: bool) {
        let Some(entry) = self.keeping().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let (took, Some(pace)) = (entry.took, entry.pace) else {
            return;
        };
        let pause = pause(pace, good.then_some(took));
        let mut late = None;
        if let CheckpointSchedule::MaxLoss(bound) | CheckpointSchedule::Every(bound) = pace
            && good
            && took + took + pause > bound
            && !std::mem::replace(&mut entry.said_late, true)
        {
            late = Some(bound);
        }
        self.schedule(job, pause);
        if let Some(bound) = late {
            let text = format!(
                "a checkpoint of job {job} took {:.1} s: as often as it is made, more than {:.1} s of work may be lost",
                took.0 as f64 / 1e6,
                bound.0 as f64 / 1e6
            );
            self.record(EventKind::Note { text });
        }
    }

    fn forget_job(&mut self, job: Tid) {
        if let Some(keeping) = self.keeping() {
            keeping.jobs.remove(&job);
        }
    }

    /// Handles the timer of a job: begins the next checkpoint or attempt, or checks whether its
    /// last tasks are gone.
    pub(super) fn job_due(&mut self, job: Tid) {
        let now = self.now;
        let Some(entry) = self
            .keeping()
            .and_then(|k| k.jobs.get(&job))
            .filter(|job| job.due <= now)
        else {
            return;
        };
        match entry.doing {
            Doing::Nothing if entry.pace.is_some() || entry.is_wanted() => self.begin_count(job),
            Doing::Ending { .. } | Doing::Leaving { .. } => self.count(Purpose::Gone(job)),
            _ => {}
        }
    }

    // ---- Part of the task's host

    /// Waits until a task that is being stopped for a checkpoint has the replies to its requests.
    /// With `open` all other tasks of its job are stopped as well, and only these requests may
    /// remain open.
    pub(super) fn settle(&mut self, id: MigrationId, tid: Tid, open: Option<Vec<RequestId>>) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.closing = open.map(|open| open.into_iter().collect());
        task.settling = Some(id);
        self.moves.settled.extend(task.take_settled());
    }

    /// Handles a task that has all replies. Its state is saved now, because it belongs to the same
    /// moment as the memory of all tasks; other tasks continue soon.
    pub(super) fn part_settled(&mut self, id: MigrationId) {
        let tid = self
            .moves
            .sources
            .get(&id)
            .map(|source| source.migration().tid);
        if let Some(task) = tid
            .and_then(|tid| self.tasks.get(tid))
            .filter(|task| task.closing.is_some())
        {
            if let Err(why) = self.has_heard_the_dead(task) {
                return self.source_event(id, SourceEvent::Dumped(Err(why)));
            }
            let record = Box::new(self.part_of(task));
            self.moves.parts.insert(id, record);
        }
        self.source_event(id, SourceEvent::RequestsSettled);
    }

    /// Removes the state of a checkpoint from this host.
    pub(super) fn part_over(&mut self, id: MigrationId, tid: Tid) {
        self.moves.parts.remove(&id);
        if let Some(task) = self.tasks.get_mut(tid) {
            (task.settling, task.closing) = (None, None);
            task.awaits.clear();
        }
    }

    fn part_of(&self, task: &Task) -> SavedTask {
        let left = task.away.as_ref().map_or(0, |away| away.left);
        let keeps = |(place, held): &(usize, &PendingItem)| match held {
            // Messages about routes and resource managers refer to the time of the checkpoint. The
            // restarted library is informed of the current resource manager.
            PendingItem::Control(ToTask::Route { .. } | ToTask::RmChanged { .. }) => false,
            PendingItem::Control(_) => true,
            // Link data is in the memory of the tasks, or was left by an exited process. Tasks that
            // were dumped may already have continued and sent more.
            PendingItem::Frame(_) => *place < left,
        };
        let waiting = task
            .inbox
            .queue
            .iter()
            .enumerate()
            .filter(keeps)
            .map(|(_, held)| held.clone())
            .collect();
        SavedTask {
            version: CHECKPOINT_VERSION,
            record: self.record_of(task),
            waiting,
        }
    }

    /// Sends the images of a dumped task to the store. The task continues, or is about to be
    /// started again.
    pub(super) fn deposit(&mut self, id: MigrationId) {
        let Some(record) = self.moves.parts.remove(&id) else {
            return;
        };
        let to = self.master.is_none().then_some(HostId::MASTER);
        if to.is_some() {
            self.moves.deposits.insert(id);
        }
        self.out.push_back(Output::Deposit {
            migration: id,
            record,
            to,
        });
    }

    /// Handles the result of sending a part to the master.
    pub(super) fn deposited(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if self.moves.deposits.remove(&id) {
            self.out.push_back(Output::DropImages { migration: id });
            if let Err(why) = result {
                self.report(
                    id,
                    StepReport::Failed {
                        step: Step::Transfer,
                        why,
                    },
                );
            }
        }
    }

    // ---- Part of the store

    /// True for the images of a part of a snapshot in progress.
    pub(super) fn is_part_of_cut(&self, id: MigrationId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.keeping.cuts.snapshot_of(id).is_some())
    }

    /// Handles the images of a part that have arrived, or failed to.
    pub(super) fn part_received(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if let Some(keeping) = self.keeping() {
            keeping.cuts.on_images_received(id, result);
        }
    }

    /// Handles the store's report that it has a part, or why it has not.
    pub(super) fn part_kept(&mut self, id: MigrationId, result: Result<(), String>) {
        let now = self.now;
        self.out.push_back(Output::DropImages { migration: id });
        if let Some(keeping) = self.keeping() {
            keeping.cuts.on_images_stored(now, id, result);
        }
    }
}

/// Returns the time until the next checkpoint. `took` is the duration of the last one; `None` if it
/// failed.
fn pause(pace: CheckpointSchedule, took: Option<Micros>) -> Micros {
    let pause = match (pace, took) {
        // In the worst case, all work since the start of the last checkpoint is lost until the next
        // one is stored, which may take half as long again.
        (CheckpointSchedule::MaxLoss(bound), Some(took)) => {
            bound.since(Micros(took.0.saturating_mul(5) / 2))
        }
        // The same, but the job must not spend all its time on checkpoints.
        (CheckpointSchedule::Every(every), Some(took)) => {
            pause(CheckpointSchedule::MaxLoss(every), Some(took)).max(Micros(every.0 / 2))
        }
        (CheckpointSchedule::Every(every), None) => every,
        // Work is at risk while there is no checkpoint.
        (CheckpointSchedule::MaxLoss(_) | CheckpointSchedule::Never, _) => TRY_PAUSE,
    };
    pause.max(PAUSE_MIN)
}

/// Returns the time until the next attempt to restart a job after a rollback.
fn restart_pause(tries: u32) -> Micros {
    // Further doublings change nothing.
    let doublings = tries.saturating_sub(TRIES_MAX).min(16);
    Micros(RESTART_PAUSE.0 << doublings).min(RESTART_PAUSE_MAX)
}

/// Returns the tasks of a job: its first task, known members, and everything that any of them has
/// spawned. Tasks that serve the virtual machine belong to no job.
fn members(job: Tid, known: &mut BTreeSet<Tid>, tasks: &[TaskInfo]) -> Vec<TaskInfo> {
    known.insert(job);
    loop {
        let before = known.len();
        let children = tasks
            .iter()
            .filter(|task| known.contains(&task.parent))
            .map(|task| task.tid);
        let children: Vec<Tid> = children.collect();
        known.extend(children);
        if known.len() == before {
            break;
        }
    }
    let mut all: Vec<TaskInfo> = tasks
        .iter()
        .filter(|task| known.contains(&task.tid) && task.flags & TASK_SERVICE_FLAGS == 0)
        .cloned()
        .collect();
    // During a migration both hosts may report the task.
    all.sort_by_key(|task| (task.tid, task.migrating));
    all.dedup_by_key(|task| task.tid);
    all
}
