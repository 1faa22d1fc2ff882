//! Checkpoints of jobs and restarts from them: the glue between the protocol, this daemon's tasks,
//! and the master's store.
//!
//! - A job is a task and everything that it and its descendants have spawned. The master finds the
//!   tasks by an inventory of all hosts, so it needs no resource manager. A member stays a member
//!   when its parent has ended.
//! - A checkpoint is taken on request, or repeatedly by a schedule. All tasks of the job are dumped
//!   at a consistent cut (a *snapshot*). Each task is one part of it. The store seals the
//!   checkpoint when it has all parts.
//! - If a host is lost, each job that has a schedule and had tasks on that host rolls back: the
//!   job's remaining tasks are killed before any task is notified of the loss. When none is left,
//!   the job is restarted from its newest checkpoint.

mod admission;
mod copies;
mod job_end;
mod last_messages;
mod recently_dead;
mod removal;
mod restart;
mod rollback;

pub use copies::{COPIES_MAX, CopyPolicy};
pub(super) use last_messages::KnownExits;

use super::rpc::RpcPurpose;
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
/// Largest number of attempts to checkpoint a job whose tasks change, and of attempts at the short
/// interval to restart a job after a rollback.
const ATTEMPTS_MAX: u32 = 10;
/// Interval between attempts at a checkpoint.
const RETRY_INTERVAL: Micros = Micros::from_millis(200);
/// Interval between attempts at a checkpoint while a program is still writing a checkpoint that was
/// requested earlier. All attempts together take as long as the default time limit of a program for
/// writing.
const WRITING_RETRY_INTERVAL: Micros = Micros::from_secs(6);
/// Interval between attempts to restart a job after a rollback. After [`ATTEMPTS_MAX`] attempts the
/// interval doubles with each attempt: there may be no user who restarts the job, and the missing
/// host may return days later.
const RESTART_RETRY_INTERVAL: Micros = Micros::from_secs(2);
/// Upper limit of the doubled interval between attempts to restart a job.
const RESTART_RETRY_INTERVAL_MAX: Micros = Micros::from_secs(600);
/// Largest number of restarted tasks whose incarnations are remembered.
const INCARNATIONS_MAX: usize = 1 << 20;
/// Delay of a restart after the loss of a host, so that all tasks on that host are dead. The daemon
/// of the host has exited after its own, shorter lease, and its tasker with it.
const LOST_HOST_RESTART_DELAY: Micros = Micros::from_secs(2);
/// Interval between checks whether the last tasks of a job are gone.
const EXIT_CHECK_INTERVAL: Micros = Micros::from_millis(20);
/// Largest number of checks whether the last tasks of a job are gone.
const EXIT_CHECKS_MAX: u32 = 1000;
/// Shortest time between the end of a checkpoint of a job and the start of the next one.
const CHECKPOINT_INTERVAL_MIN: Micros = Micros::from_millis(500);
const SIGKILL: i32 = 9;

/// The operation in progress for a job.
#[derive(Debug, Default, PartialEq)]
enum JobActivity {
    #[default]
    Idle,
    /// An inventory of the job's tasks is being taken, for a checkpoint.
    TakingInventory,
    /// A snapshot is being taken.
    TakingSnapshot(SnapshotId),
    /// The job rolls back to its newest checkpoint, and its remaining tasks are being killed. The
    /// restart waits until the lost host is out of the table and `not_before` has passed. `checks`
    /// is the number of checks for remaining tasks so far.
    RollingBack {
        lost: Option<HostId>,
        not_before: Micros,
        why: String,
        checks: u32,
    },
    /// The job's checkpoint is complete, and the job must end: its tasks are being killed. `checks`
    /// is the number of checks for remaining tasks so far.
    EndingJob {
        report: CheckpointReport,
        checks: u32,
    },
    /// The job is being restarted from a checkpoint.
    Restarting,
}

/// The master's checkpoint state of one job.
#[derive(Debug, Default)]
struct CheckpointedJob {
    activity: JobActivity,
    /// Schedule of the job's checkpoints; `None` if they are taken only on request.
    schedule: Option<CheckpointSchedule>,
    /// Start of the first attempt at the current checkpoint.
    started_at: Micros,
    waiters: Vec<(Tid, RequestId)>,
    /// The job must end when its checkpoint is complete.
    ends_after_checkpoint: bool,
    /// True if the resource manager requested that the job ends. The resource manager restarts the
    /// job when a host has room.
    ends_for_vacate: bool,
    /// A host of the job is being drained. The job's tasks on that host migrate when they have been
    /// dumped.
    is_draining: bool,
    /// True if the event log contains that the job's checkpoints take too long for the requested
    /// bound.
    lateness_reported: bool,
    /// Duration of the job's last checkpoint.
    last_duration: Micros,
    /// Time of the job's next check. Timers that fire earlier are ignored.
    next_check: Micros,
    attempts: u32,
    /// All tasks that ever belonged to the job.
    members: BTreeSet<Tid>,
    /// Members that have ended.
    ended_members: BTreeSet<Tid>,
    /// Members that may have died together with their host.
    recently_dead: recently_dead::RecentDeaths,
    /// Name of the job's newest checkpoint.
    newest_checkpoint: Option<String>,
    /// Name of the checkpoint from which the job was restarted.
    restarted_from: Option<String>,
    /// How the job's first task has ended.
    first_task_end: job_end::FirstTaskEnd,
    copies: copies::JobCopies,
}

impl CheckpointedJob {
    /// True if a requested checkpoint is not complete yet.
    fn has_open_request(&self) -> bool {
        self.ends_after_checkpoint || !self.waiters.is_empty()
    }

    /// True if the job is rolling back and an attempt to restart it has failed.
    fn is_stuck(&self) -> bool {
        matches!(self.activity, JobActivity::RollingBack { .. }) && self.attempts > 0
    }
}

/// Contents of a checkpoint in progress, in addition to the tasks' images. Groups, mailbox entries
/// and contexts are those of the moment when all tasks were stopped.
#[derive(Debug, Default)]
struct SnapshotContents {
    groups: Vec<SavedGroup>,
    mailbox: Vec<SavedMailboxEntry>,
    contexts: Vec<(i32, Tid)>,
    /// Tasks of the checkpoint that is being sealed.
    members: Vec<Tid>,
    /// Members that have written their own checkpoints.
    self_checkpointed: Vec<Tid>,
    /// Name and size in bytes of the sealed checkpoint; `None` before it is sealed.
    sealed: Option<(String, u64)>,
}

/// Tasks, and contexts with their owners, that hosts have reported.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    tasks: Vec<TaskInfo>,
    context_owners: Vec<(i32, Tid)>,
}

impl Inventory {
    pub(super) fn new(tasks: Vec<TaskInfo>, contexts: Vec<(i32, Tid)>) -> Inventory {
        Inventory {
            tasks,
            context_owners: contexts,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum InventoryPurpose {
    /// Begin a checkpoint of this job.
    BeginCheckpoint(Tid),
    /// All known tasks of this snapshot are stopped: find tasks that the job has spawned since the
    /// previous inventory.
    VerifySnapshot(SnapshotId),
    /// Check whether all tasks of this job are gone, because it rolls back or must end.
    CheckGone(Tid),
    /// Check that no task of this restart is alive. The number is the key of the restart in
    /// `open_restarts`.
    BeginRestart(u64),
    /// Check whether this job has ended: all its known tasks have.
    CheckEnded(Tid),
}

#[derive(Debug)]
struct OpenInventory {
    purpose: InventoryPurpose,
    missing_replies: usize,
    collected: Inventory,
    /// A host that has not replied, so that its tasks are unknown.
    silent_host: Option<HostId>,
}

/// A restart from a checkpoint that was requested or is in progress.
#[derive(Debug)]
struct OpenRestart {
    checkpoint: String,
    /// The job that rolls back. `None` if a task requested the restart.
    rollback_job: Option<Tid>,
    hosts: Vec<String>,
    waiter: Option<(Tid, RequestId)>,
    why: String,
    meta: Option<CheckpointMeta>,
    restart_id: Option<RestartId>,
    /// Contexts that were assigned to the restarted tasks.
    assigned_contexts: Vec<(i32, Tid)>,
}

/// The master's state of all checkpoints and restarts.
#[derive(Debug, Default)]
pub(super) struct JobCheckpoints {
    pub(super) snapshots: Snapshots,
    pub(super) restarts: Restarts,
    jobs: BTreeMap<Tid, CheckpointedJob>,
    inventories: BTreeMap<u64, OpenInventory>,
    last_inventory_number: u64,
    open_restarts: BTreeMap<u64, OpenRestart>,
    last_restart_number: u64,
    /// Parts that are being unpacked and sent to their hosts.
    parts_in_transfer: BTreeSet<MigrationId>,
    snapshot_contents: BTreeMap<SnapshotId, SnapshotContents>,
    /// The latest incarnation of any restarted task.
    latest_incarnation: u16,
    /// Incarnation of each restarted task.
    incarnations: BTreeMap<Tid, u16>,
    /// Creation time of this virtual machine, as time of day.
    created_at: Micros,
    /// Jobs whose known tasks have all ended.
    maybe_ended_jobs: Vec<Tid>,
    /// Tasks of the whole virtual machine that have ended recently.
    recent_exits: last_messages::RecentExits,
    copy_queue: copies::CopyQueue,
}

impl JobCheckpoints {
    /// Returns the time at which [`super::Event::Wake`] is needed, if at all.
    pub(super) fn next_wakeup(&self) -> Option<Micros> {
        self.snapshots
            .next_deadline()
            .into_iter()
            .chain(self.restarts.next_deadline())
            .min()
    }

    /// Sets the creation time of the virtual machine, if it is not set.
    pub(super) fn set_creation_time(&mut self, now: Micros) {
        if self.created_at == Micros(0) {
            self.created_at = now;
        }
    }

    /// Makes room for another job: if there are already [`JOBS_MAX`], forgets an idle one. False if
    /// no job is idle.
    fn make_room_for(&mut self, job: Tid) -> bool {
        if self.jobs.len() < JOBS_MAX || self.jobs.contains_key(&job) {
            return true;
        }
        let idle = |entry: &CheckpointedJob| {
            entry.schedule.is_none()
                && entry.activity == JobActivity::Idle
                && !entry.has_open_request()
        };
        let idle = self
            .jobs
            .iter()
            .find(|(_, entry)| idle(entry))
            .map(|(tid, _)| *tid);
        idle.is_some_and(|idle| self.jobs.remove(&idle).is_some())
    }

    fn job_of_snapshot(&self, snapshot: SnapshotId) -> Option<Tid> {
        self.jobs
            .iter()
            .find(|(_, job)| job.activity == JobActivity::TakingSnapshot(snapshot))
            .map(|(tid, _)| *tid)
    }

    fn open_restart_of(&self, restart: RestartId) -> Option<u64> {
        self.open_restarts
            .iter()
            .find(|(_, wanted)| wanted.restart_id == Some(restart))
            .map(|(number, _)| *number)
    }
}

impl Machine {
    /// Returns the highest task number of `host` that occurs in a stored checkpoint. New tasks get
    /// higher numbers.
    pub(super) fn reserved_ids_of(&self, host: HostId) -> u32 {
        // At least 1 if there are checkpoints, so that every host knows of them: they may contain
        // contexts of hosts without tasks.
        let least = u32::from(!self.config.reserved_ids_max.is_empty());
        self.config
            .reserved_ids_max
            .get(&host)
            .copied()
            .unwrap_or_default()
            .max(least)
    }

    fn job_checkpoints(&mut self) -> Option<&mut JobCheckpoints> {
        self.master.as_mut().map(|master| &mut master.checkpoints)
    }

    // ---- Requests for checkpoints

    pub(super) fn handle_checkpoint_request(
        &mut self,
        (tid, id): (Tid, RequestId),
        job: Tid,
        schedule: Option<CheckpointSchedule>,
        end: bool,
        wait: bool,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        if !job_checkpoints.make_room_for(job) {
            let reason =
                format!("{JOBS_MAX} jobs are checkpointed again and again already, the limit");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        let entry = job_checkpoints.jobs.entry(job).or_default();
        match schedule {
            Some(CheckpointSchedule::Never) => {
                entry.schedule = None;
                if entry.is_stuck() {
                    self.forget_job(job);
                }
                return self.reply(tid, id, Reply::Done);
            }
            Some(schedule) => (entry.schedule, entry.lateness_reported) = (Some(schedule), false),
            None => {}
        }
        // A request during an inventory gets the same checkpoint. A snapshot with stopped tasks may
        // be too old for a later request.
        let begins = match entry.activity {
            JobActivity::Idle => true,
            JobActivity::TakingInventory => false,
            JobActivity::TakingSnapshot(_)
            | JobActivity::RollingBack { .. }
            | JobActivity::EndingJob { .. }
            | JobActivity::Restarting => {
                return match wait {
                    true => self.reply(
                        tid,
                        id,
                        Reply::Checkpointed(Err(CheckpointFailure::InProgress)),
                    ),
                    false => self.reply_error(
                        tid,
                        id,
                        PvmError::Already,
                        CheckpointFailure::InProgress.to_string(),
                    ),
                };
            }
        };
        entry.ends_after_checkpoint |= end;
        entry.ends_for_vacate |= end && !wait;
        if wait {
            entry.waiters.push((tid, id));
        } else {
            self.reply(tid, id, Reply::Done);
        }
        if begins {
            self.begin_checkpoint(job);
        }
    }

    fn begin_checkpoint(&mut self, job: Tid) {
        let now = self.now;
        if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
            entry.activity = JobActivity::TakingInventory;
            if entry.attempts == 0 {
                entry.started_at = now;
            }
            self.take_inventory(InventoryPurpose::BeginCheckpoint(job));
        }
    }

    /// Takes an inventory: requests the tasks of all hosts.
    fn take_inventory(&mut self, purpose: InventoryPurpose) {
        let hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        job_checkpoints.last_inventory_number += 1;
        let number = job_checkpoints.last_inventory_number;
        job_checkpoints.inventories.insert(
            number,
            OpenInventory {
                purpose,
                missing_replies: hosts.len(),
                collected: Inventory::default(),
                silent_host: None,
            },
        );
        for host in hosts {
            self.call_host(
                host,
                HostRequest::Inventory,
                RpcPurpose::Inventory {
                    inventory: number,
                    host,
                },
            );
        }
    }

    /// Handles the reply of one host to an inventory request, or the loss of that host (`Err`).
    pub(super) fn handle_inventory(&mut self, number: u64, found: Result<Inventory, HostId>) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(count) = job_checkpoints.inventories.get_mut(&number) else {
            return;
        };
        match found {
            Ok(found) => {
                count.collected.tasks.extend(found.tasks);
                count.collected.context_owners.extend(found.context_owners);
            }
            Err(host) => count.silent_host = Some(host),
        }
        count.missing_replies -= 1;
        if count.missing_replies > 0 {
            return;
        }
        let Some(OpenInventory {
            purpose,
            collected: found,
            silent_host,
            ..
        }) = job_checkpoints.inventories.remove(&number)
        else {
            return;
        };
        match (purpose, silent_host) {
            (InventoryPurpose::BeginCheckpoint(job), None) => {
                self.begin_snapshot(job, &found.tasks)
            }
            // A checkpoint without the tasks of the silent host would be incomplete.
            (InventoryPurpose::BeginCheckpoint(job), Some(host)) => {
                self.handle_incomplete_inventory(job, host)
            }
            (InventoryPurpose::VerifySnapshot(cut), None) => self.verify_snapshot(cut, found),
            (InventoryPurpose::VerifySnapshot(cut), Some(host)) => {
                if let Some(job_checkpoints) = self.job_checkpoints() {
                    job_checkpoints
                        .snapshots
                        .on_count_failed(cut, CheckpointFailure::HostLost(host));
                }
            }
            (InventoryPurpose::CheckGone(job), None) => self.check_job_gone(job, &found.tasks),
            (InventoryPurpose::CheckGone(job), Some(_)) => {
                self.schedule_check(job, EXIT_CHECK_INTERVAL)
            }
            (InventoryPurpose::BeginRestart(wanted), None) => self.begin_restart(wanted, &found),
            (InventoryPurpose::BeginRestart(wanted), Some(host)) => {
                self.finish_restart(wanted, Err(RestartFailure::HostLost(host)));
            }
            (InventoryPurpose::CheckEnded(job), None) => self.check_job_ended(job, &found.tasks),
            // The silent host may have tasks of the job, so the job's checkpoints are retained.
            (InventoryPurpose::CheckEnded(_), Some(_)) => {}
        }
    }

    fn handle_incomplete_inventory(&mut self, job: Tid, host: HostId) {
        let counting = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job))
            .is_some_and(|job| job.activity == JobActivity::TakingInventory);
        if counting {
            self.finish_checkpoint(job, Err(CheckpointFailure::HostLost(host)));
        }
    }

    /// Schedules the next check of a job; it replaces a check that was scheduled earlier.
    fn schedule_check(&mut self, job: Tid, after: Micros) {
        let due = self.now + after;
        if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
            entry.next_check = due;
            self.set_timer(after, Timer::Job(job));
        }
    }

    // ---- Taking a checkpoint

    fn begin_snapshot(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let (now, lease) = (self.now, self.config.lease);
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let job_checkpoints = &mut master.checkpoints;
        let Some(entry) = job_checkpoints
            .jobs
            .get_mut(&job)
            .filter(|entry| entry.activity == JobActivity::TakingInventory)
        else {
            return;
        };
        if let Some(until) = entry
            .recently_dead
            .unknown_until(now, lease)
            .filter(|_| !entry.has_open_request() && !entry.is_draining)
        {
            // A checkpoint without the tasks that may be lost would be incomplete.
            entry.activity = JobActivity::Idle;
            return self.schedule_check(job, until.since(now));
        }
        let all = job_members(job, &mut entry.members, tasks);
        if all.is_empty() {
            return self.finish_checkpoint(job, Err(CheckpointFailure::NoSuchJob(job)));
        }
        if all.len() > CHECKPOINT_TASKS_MAX {
            return self.finish_checkpoint(
                job,
                Err(CheckpointFailure::TooManyTasks { tasks: all.len() }),
            );
        }
        let (coordinator, cuts) = (
            &mut master.migrations.coordinator,
            &job_checkpoints.snapshots,
        );
        if entry.has_open_request() && !all.iter().any(|task| cuts.part_of(task.tid).is_some()) {
            // A task whose migration is still queued has not started to migrate. It is dumped first
            // and may migrate afterwards.
            let tids = all.iter().map(|task| task.tid).collect();
            entry.is_draining |= coordinator.cancel_queued(&tids);
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
            return self.finish_checkpoint(
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
        let snapshot = job_checkpoints.snapshots.begin(now, &parts);
        if let Some(entry) = job_checkpoints.jobs.get_mut(&job) {
            entry.activity = JobActivity::TakingSnapshot(snapshot);
        }
        self.outputs
            .push_back(Output::BeginCheckpoint { snapshot, job });
    }

    /// Handles the store's reply to the start of a checkpoint. `Err` is the reason why the store
    /// refuses it.
    pub(super) fn handle_checkpoint_begun(
        &mut self,
        snapshot: SnapshotId,
        result: Result<(), String>,
    ) {
        let now = self.now;
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        if job_checkpoints.snapshots.is_active(snapshot) {
            job_checkpoints
                .snapshots
                .on_space_reserved(now, snapshot, result);
        } else {
            self.outputs
                .push_back(Output::AbandonCheckpoint { snapshot });
        }
    }

    fn verify_snapshot(&mut self, snapshot: SnapshotId, found: Inventory) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let job_checkpoints = &mut master.checkpoints;
        let Some(job) = job_checkpoints.job_of_snapshot(snapshot) else {
            return;
        };
        let Some(entry) = job_checkpoints.jobs.get_mut(&job) else {
            return;
        };
        let tids: Vec<Tid> = job_members(job, &mut entry.members, &found.tasks)
            .iter()
            .map(|task| task.tid)
            .collect();
        let mut ended = entry.ended_members.clone();
        if entry.newest_checkpoint.is_none() {
            // Before the first checkpoint the master does not know which ended tasks belonged to
            // the job, so every task that ended recently counts.
            ended.extend(job_checkpoints.recent_exits.tids(now));
            let lives: BTreeSet<Tid> = found.tasks.iter().map(|task| task.tid).collect();
            ended.retain(|tid| !lives.contains(tid));
        }
        let ended: Vec<Tid> = ended.into_iter().collect();
        let mailbox = match master.mailbox.entries_of(&tids) {
            Ok(mailbox) => mailbox,
            Err(bytes) => {
                return job_checkpoints
                    .snapshots
                    .on_count_failed(snapshot, CheckpointFailure::MailboxTooLarge { bytes });
            }
        };
        // While all tasks are stopped, none enters or leaves a group, and none arrives at a
        // barrier.
        let groups = master.groups.save(&tids);
        let members: BTreeSet<Tid> = tids.iter().copied().collect();
        let contexts = found
            .context_owners
            .into_iter()
            .filter(|(_, owner)| members.contains(owner))
            .collect();
        job_checkpoints.snapshot_contents.insert(
            snapshot,
            SnapshotContents {
                groups,
                mailbox,
                contexts,
                ..SnapshotContents::default()
            },
        );
        let mut open = BTreeMap::<Tid, Vec<RequestId>>::new();
        for (tid, id) in master
            .groups
            .open_requests()
            .chain(master.mailbox.waiting_requests())
        {
            open.entry(tid).or_default().push(id);
        }
        job_checkpoints
            .snapshots
            .on_tasks_counted(now, snapshot, &tids, &open, &ended);
    }

    /// Carries out the outputs of the protocols. True if there were any.
    pub(super) fn pump_checkpoints(&mut self) -> bool {
        let mut busy = self.check_maybe_ended_jobs();
        while let Some(output) = self.job_checkpoints().and_then(|k| k.snapshots.poll()) {
            busy = true;
            self.execute_snapshot_output(output);
        }
        while let Some(output) = self.job_checkpoints().and_then(|k| k.restarts.poll()) {
            busy = true;
            self.execute_restart_output(output);
        }
        busy
    }

    fn execute_snapshot_output(&mut self, output: SnapshotOutput) {
        let me = self.config.host;
        match output {
            SnapshotOutput::Order {
                host,
                part: of,
                order,
            } => self.send_migration_order(host, of, order),
            SnapshotOutput::CountTasks(cut) => {
                self.take_inventory(InventoryPurpose::VerifySnapshot(cut))
            }
            SnapshotOutput::ExpectImages(of) if of.from == me => {}
            SnapshotOutput::ExpectImages(of) => self.outputs.push_back(Output::ExpectImages {
                migration: of.id,
                from: of.from,
            }),
            SnapshotOutput::StoreImages { snapshot, part: of } => {
                self.outputs.push_back(Output::StorePart {
                    snapshot,
                    migration: of.id,
                    tid: of.tid,
                });
            }
            SnapshotOutput::Seal { snapshot, parts } => self.seal_checkpoint(snapshot, parts),
            SnapshotOutput::Abandon { snapshot, parts } => {
                for migration in parts {
                    self.outputs.push_back(Output::DropImages { migration });
                }
                self.outputs
                    .push_back(Output::AbandonCheckpoint { snapshot });
            }
            SnapshotOutput::Ended { snapshot, result } => {
                self.handle_snapshot_end(snapshot, result)
            }
        }
    }

    fn seal_checkpoint(&mut self, snapshot: SnapshotId, parts: Vec<(Tid, HostId, TaskFacts)>) {
        let name = |host: HostId| {
            self.table
                .get(host)
                .map(|entry| entry.name.clone())
                .unwrap_or_default()
        };
        let Some(lines) = self
            .master
            .as_ref()
            .map(|master| &master.checkpoints.incarnations)
        else {
            return;
        };
        let incarnation_of = |tid: Tid| lines.get(&tid).copied().unwrap_or_default();
        let part = |(tid, host, facts)| TaskMeta {
            tid,
            host: name(host),
            facts,
            incarnation: incarnation_of(tid),
        };
        let parts: Vec<TaskMeta> = parts.into_iter().map(part).collect();
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let Some(job) = master.checkpoints.job_of_snapshot(snapshot) else {
            return master
                .checkpoints
                .snapshots
                .on_sealed(snapshot, Err("the job goes back to an earlier one".into()));
        };
        let JobCheckpoints {
            latest_incarnation,
            created_at: vm,
            ..
        } = master.checkpoints;
        let members = parts.iter().map(|part| part.tid).collect();
        let self_checkpointed = parts
            .iter()
            .filter(|part| part.facts.restart_engine().is_some())
            .map(|part| part.tid)
            .collect();
        // Groups, mailbox entries and contexts move into the metadata of the checkpoint.
        let kept = SnapshotContents {
            members,
            self_checkpointed,
            ..SnapshotContents::default()
        };
        let known = master
            .checkpoints
            .snapshot_contents
            .insert(snapshot, kept)
            .unwrap_or_default();
        let SnapshotContents {
            groups,
            mailbox,
            contexts,
            ..
        } = known;
        let pace = master
            .checkpoints
            .jobs
            .get(&job)
            .and_then(|entry| entry.schedule);
        let (version, wire) = (CHECKPOINT_VERSION, WIRE_VERSION);
        let meta = CheckpointMeta {
            version,
            wire_version: wire,
            vm,
            job,
            latest_incarnation,
            tasks: parts,
            groups,
            mailbox,
            contexts,
            schedule: pace,
        };
        let protected = master.checkpoints.needed_checkpoints();
        self.outputs.push_back(Output::SealCheckpoint {
            snapshot,
            meta: Box::new(meta),
            protected,
        });
    }

    /// Handles the store's report on sealing a checkpoint: name and size in bytes, or the reason
    /// why it failed.
    pub(super) fn handle_checkpoint_sealed(
        &mut self,
        snapshot: SnapshotId,
        mut result: Result<(String, u64), String>,
    ) {
        let Some(job_checkpoints) = self
            .master
            .as_deref_mut()
            .map(|master| &mut master.checkpoints)
        else {
            return;
        };
        if let Ok((set, _)) = &result
            && job_checkpoints.job_of_snapshot(snapshot).is_none()
        {
            // The checkpoint was reported as failed, and the job rolls back to an earlier one,
            // whose files it restores.
            self.outputs.push_back(Output::DropCheckpoints {
                checkpoints: vec![set.clone()],
            });
            result = Err("its checkpoint was over before".into());
        }
        let contents = job_checkpoints.snapshot_contents.get_mut(&snapshot);
        let result =
            result.map(|sealed| contents.map_or((), |contents| contents.sealed = Some(sealed)));
        job_checkpoints.snapshots.on_sealed(snapshot, result);
    }

    fn handle_snapshot_end(
        &mut self,
        snapshot: SnapshotId,
        result: Result<Micros, CheckpointFailure>,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let SnapshotContents {
            members: tasks,
            self_checkpointed,
            sealed,
            ..
        } = job_checkpoints
            .snapshot_contents
            .remove(&snapshot)
            .unwrap_or_default();
        let Some(job) = job_checkpoints.job_of_snapshot(snapshot) else {
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
                self_checkpointed,
            })
        });
        self.finish_checkpoint(job, result);
    }

    /// Finishes a checkpoint that is complete, has failed or did not begin.
    fn finish_checkpoint(&mut self, job: Tid, result: Result<CheckpointReport, CheckpointFailure>) {
        let (now, lease) = (self.now, self.config.lease);
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        entry.activity = JobActivity::Idle;
        entry.attempts += 1;
        let unknown_until = entry
            .recently_dead
            .unknown_until(now, lease)
            .filter(|_| entry.schedule.is_some());
        if let Some(why) = result
            .as_ref()
            .err()
            .filter(|why| why.is_transient() && entry.attempts < ATTEMPTS_MAX)
        {
            return self.schedule_check(
                job,
                if why.is_self_checkpoint_pending() {
                    WRITING_RETRY_INTERVAL
                } else {
                    RETRY_INTERVAL
                },
            );
        }
        (entry.attempts, entry.is_draining) = (0, false);
        if result.is_ok() {
            entry.last_duration = now.since(entry.started_at);
        }
        let vacated = std::mem::take(&mut entry.ends_for_vacate) && entry.ends_after_checkpoint;
        let ends = std::mem::take(&mut entry.ends_after_checkpoint) && result.is_ok();
        if let (Ok(report), true) = (&result, ends) {
            // The request is answered when the job has ended.
            (entry.activity, entry.schedule) = (
                JobActivity::EndingJob {
                    report: report.clone(),
                    checks: 0,
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
            entry.newest_checkpoint = Some(report.name.clone());
            let ended = std::mem::take(&mut entry.ended_members);
            entry.members.retain(|tid| !ended.contains(tid));
            entry.recently_dead.retain_tasks(&report.tasks);
        } else if entry.activity == JobActivity::Idle && entry.has_only_ended_tasks() {
            let quiet = job;
            self.job_checkpoints()
                .into_iter()
                .for_each(|job_checkpoints| job_checkpoints.maybe_ended_jobs.push(quiet));
        }
        if let (Err(CheckpointFailure::NoSuchJob(_)), Some(until)) = (&result, unknown_until) {
            self.schedule_check(job, until.since(now));
        } else if matches!(result, Err(CheckpointFailure::NoSuchJob(_))) {
            self.handle_job_end(job);
            self.forget_job(job);
        } else {
            self.schedule_next_checkpoint(job, result.is_ok());
        }
        if ends {
            self.take_inventory(InventoryPurpose::CheckGone(job));
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
                vacated,
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
            self.queue_copy(job, &report.name);
        }
    }

    /// Schedules the next checkpoint of a job, if the job has a schedule. `is_complete` is true if
    /// the last checkpoint succeeded.
    fn schedule_next_checkpoint(&mut self, job: Tid, is_complete: bool) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let (took, Some(checkpoint_schedule)) = (entry.last_duration, entry.schedule) else {
            return;
        };
        let interval = checkpoint_interval(checkpoint_schedule, is_complete.then_some(took));
        let mut late = None;
        if let CheckpointSchedule::MaxLoss(bound) | CheckpointSchedule::Every(bound) =
            checkpoint_schedule
            && is_complete
            && took + took + interval > bound
            && !std::mem::replace(&mut entry.lateness_reported, true)
        {
            late = Some(bound);
        }
        self.schedule_check(job, interval);
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
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.jobs.remove(&job);
        }
    }

    /// Handles the timer of a job: begins the next checkpoint or attempt, or checks whether its
    /// last tasks are gone.
    pub(super) fn handle_job_timer(&mut self, job: Tid) {
        let now = self.now;
        let Some(entry) = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job))
            .filter(|job| job.next_check <= now)
        else {
            return;
        };
        match entry.activity {
            JobActivity::Idle if entry.schedule.is_some() || entry.has_open_request() => {
                self.begin_checkpoint(job)
            }
            JobActivity::RollingBack { .. } | JobActivity::EndingJob { .. } => {
                self.take_inventory(InventoryPurpose::CheckGone(job))
            }
            _ => {}
        }
    }

    // ---- On the host of a task

    /// Waits until a task that is being stopped for a checkpoint has received the replies to its
    /// requests. If `open` is given, all other tasks of the job are stopped as well, and only these
    /// requests may remain unanswered.
    pub(super) fn await_replies(
        &mut self,
        id: MigrationId,
        tid: Tid,
        open: Option<Vec<RequestId>>,
    ) {
        let Some(task) = self.tasks.get_mut(tid) else {
            return;
        };
        task.permitted_open_requests = open.map(|open| open.into_iter().collect());
        task.settling_part = Some(id);
        self.migrations
            .settled_parts
            .extend(task.take_settled_part());
    }

    /// Handles a task that has received all replies. Its state is saved immediately, because it
    /// must belong to the same moment as the memory of all tasks; the other tasks continue soon.
    pub(super) fn handle_part_settled(&mut self, id: MigrationId) {
        let tid = self
            .migrations
            .sources
            .get(&id)
            .map(|source| source.migration().tid);
        if let Some(task) = tid
            .and_then(|tid| self.tasks.get(tid))
            .filter(|task| task.permitted_open_requests.is_some())
        {
            if let Err(why) = self.check_last_messages_received(task) {
                return self.source_event(id, SourceEvent::Dumped(Err(why)));
            }
            let record = Box::new(self.saved_task(task));
            self.migrations.part_records.insert(id, record);
        }
        self.source_event(id, SourceEvent::RequestsSettled);
    }

    /// Removes the data that this host stores for the checkpoint of a task.
    pub(super) fn forget_part(&mut self, id: MigrationId, tid: Tid) {
        self.migrations.part_records.remove(&id);
        if let Some(task) = self.tasks.get_mut(tid) {
            (task.settling_part, task.permitted_open_requests) = (None, None);
            task.awaited_exits.clear();
        }
    }

    fn saved_task(&self, task: &Task) -> SavedTask {
        let left = task
            .respawning
            .as_ref()
            .map_or(0, |respawning| respawning.left_items);
        let is_saved = |(place, held): &(usize, &PendingItem)| match held {
            // Messages about routes and resource managers refer to the time of the checkpoint. The
            // restarted library is informed of the current resource manager.
            PendingItem::Control(ToTask::Route { .. } | ToTask::RmChanged { .. }) => false,
            PendingItem::Control(_) => true,
            // Link data is in the memory of the tasks, except for the items that an exited process
            // has left at the head of the inbox. Later frames may come from tasks that were already
            // dumped and have continued.
            PendingItem::Frame(_) => *place < left,
        };
        let waiting = task
            .inbox
            .queue
            .iter()
            .enumerate()
            .filter(is_saved)
            .map(|(_, held)| held.clone())
            .collect();
        SavedTask {
            version: CHECKPOINT_VERSION,
            record: self.task_record(task),
            waiting,
        }
    }

    /// Sends the images of a dumped task to the store. The task continues, or is about to be
    /// started again.
    pub(super) fn upload_part(&mut self, id: MigrationId) {
        let Some(record) = self.migrations.part_records.remove(&id) else {
            return;
        };
        let to = self.master.is_none().then_some(HostId::MASTER);
        if to.is_some() {
            self.migrations.uploading_parts.insert(id);
        }
        self.outputs.push_back(Output::UploadPart {
            migration: id,
            record,
            to,
        });
    }

    /// Handles the result of sending a part to the master.
    pub(super) fn handle_part_uploaded(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if self.migrations.uploading_parts.remove(&id) {
            self.outputs.push_back(Output::DropImages { migration: id });
            if let Err(why) = result {
                self.send_step_report(
                    id,
                    StepReport::Failed {
                        step: Step::Transfer,
                        why,
                    },
                );
            }
        }
    }

    // ---- On the master, which has the store

    /// True if `id` is a part of a snapshot in progress.
    pub(super) fn is_snapshot_part(&self, id: MigrationId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.checkpoints.snapshots.snapshot_of(id).is_some())
    }

    /// Handles the end of a transfer of a part's images to the master, successful or not.
    pub(super) fn handle_part_received(&mut self, id: MigrationId, result: Result<(), Failure>) {
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.snapshots.on_images_received(id, result);
        }
    }

    /// Handles the store's report that it has stored a part. `Err` is the reason why it could not.
    pub(super) fn handle_part_stored(&mut self, id: MigrationId, result: Result<(), String>) {
        let now = self.now;
        self.outputs.push_back(Output::DropImages { migration: id });
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.snapshots.on_images_stored(now, id, result);
        }
    }
}

/// Returns the time until the next checkpoint. The duration is that of the last checkpoint; `None`
/// if it failed.
fn checkpoint_interval(schedule: CheckpointSchedule, duration: Option<Micros>) -> Micros {
    let pause = match (schedule, duration) {
        // A loss is largest just before a checkpoint is stored: it includes all work since the
        // start of the previous checkpoint. Taking a checkpoint may last half as long again as the
        // last time.
        (CheckpointSchedule::MaxLoss(bound), Some(duration)) => {
            bound.since(Micros(duration.0.saturating_mul(5) / 2))
        }
        // As for `MaxLoss`, but with a minimum, so that the job does not spend all its time on
        // checkpoints.
        (CheckpointSchedule::Every(every), Some(duration)) => {
            checkpoint_interval(CheckpointSchedule::MaxLoss(every), Some(duration))
                .max(Micros(every.0 / 2))
        }
        (CheckpointSchedule::Every(every), None) => every,
        // Without a valid checkpoint all work is at risk, so the next attempt follows soon.
        (CheckpointSchedule::MaxLoss(_) | CheckpointSchedule::Never, _) => RETRY_INTERVAL,
    };
    pause.max(CHECKPOINT_INTERVAL_MIN)
}

/// Returns the time until the next attempt to restart a job after a rollback.
fn restart_retry_interval(tries: u32) -> Micros {
    // Further doublings change nothing.
    let doublings = tries.saturating_sub(ATTEMPTS_MAX).min(16);
    Micros(RESTART_RETRY_INTERVAL.0 << doublings).min(RESTART_RETRY_INTERVAL_MAX)
}

/// Returns the tasks of a job: its first task, known members, and everything that any of them has
/// spawned. Tasks that serve the virtual machine belong to no job.
fn job_members(job: Tid, known: &mut BTreeSet<Tid>, tasks: &[TaskInfo]) -> Vec<TaskInfo> {
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
