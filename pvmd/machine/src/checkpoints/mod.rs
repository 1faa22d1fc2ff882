//! Checkpoints of jobs and restarts from them. This module connects the checkpoint protocol to this
//! daemon's tasks and to the master's store.
//!
//! - A job is a task and everything that it and its descendants have spawned. The master finds the
//!   tasks by an inventory of all hosts, so it needs no resource manager. A member stays a member
//!   when its parent has ended.
//! - A checkpoint is taken on request, or repeatedly by a schedule. All tasks of the job are dumped
//!   at a consistent cut (a *snapshot*). Each dumped task is a part of the snapshot. The store
//!   seals the checkpoint when it has all parts.
//! - If a host is lost, each job that has a schedule and had tasks on that host rolls back: the
//!   job's remaining tasks are killed before any task is notified of the loss. When no task of the
//!   job remains, the job is restarted from its newest checkpoint. If the store finds that this
//!   checkpoint is damaged, the one before it is used.

mod admission;
mod claims;
mod completion;
mod copies;
mod damage;
mod inventory;
mod job_end;
mod last_messages;
mod parts;
mod recently_dead;
mod removal;
mod restart;
mod rollback;
mod taken_over;

pub use copies::{COPIES_MAX, CopyPolicy};
pub(super) use last_messages::KnownExits;

use super::{Machine, Output, Timer};
use checkpoint_protocol::{RestartId, Restarts, SnapshotId, SnapshotOutput, Snapshots};
use inventory::job_members;
use sempa_proto::checkpoint::{
    CHECKPOINT_TASKS_MAX, CHECKPOINT_VERSION, CheckpointFailure, CheckpointMeta, CheckpointReport,
    CheckpointSchedule, ClaimKey, SavedGroup, SavedMailboxEntry, StoreFailure, TaskMeta,
};
use sempa_proto::migration::{Failure, Step, TaskFacts};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, MigrationId, PvmError, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of jobs with checkpoints. A request for a further job makes the master forget an
/// idle job. If no job is idle, the request is refused.
const JOBS_MAX: usize = 1024;
/// Largest number of attempts to checkpoint a job whose tasks change. After the same number of
/// attempts to restart a job, the interval between restart attempts grows.
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
/// Interval between checks whether the last tasks of a job have ended.
const EXIT_CHECK_INTERVAL: Micros = Micros::from_millis(20);
/// Largest number of checks whether the last tasks of a job have ended.
const EXIT_CHECKS_MAX: u32 = 1000;
/// Shortest time between the end of a checkpoint of a job and the start of its next checkpoint.
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
    /// restart begins when the lost host, if there is one, has left the host table and its lease is
    /// over. The checks for remaining tasks are counted.
    RollingBack {
        lost_host: Option<HostId>,
        why: String,
        check_count: u32,
    },
    /// The job's checkpoint is complete, and the job must end: its tasks are being killed. The
    /// checks for remaining tasks are counted.
    EndingJob {
        report: CheckpointReport,
        check_count: u32,
    },
    /// The job is being restarted from a checkpoint, by the restart with this number.
    Restarting(u64),
    /// Another virtual machine has restarted the job: its tasks here are being killed. The checks
    /// for remaining tasks are counted.
    TakenOver { check_count: u32 },
}

/// The master's checkpoint state of one job.
#[derive(Debug, Default)]
struct CheckpointedJob {
    activity: JobActivity,
    /// Schedule of the job's checkpoints; `None` if they are taken only on request.
    schedule: Option<CheckpointSchedule>,
    /// Time at which the first attempt at the current checkpoint started.
    started_at: Micros,
    waiters: Vec<(Tid, RequestId)>,
    /// True if the job must end when its checkpoint is complete.
    ends_after_checkpoint: bool,
    /// True if the resource manager requested the end of the job. The resource manager restarts the
    /// job when a host has room.
    ends_for_vacate: bool,
    /// True while a host of the job is being drained. The job's tasks on that host migrate when
    /// they have been dumped.
    is_draining: bool,
    /// True if the event log already reports that the job's checkpoints take too long for the
    /// requested bound.
    has_reported_lateness: bool,
    /// Duration of the job's last checkpoint.
    last_duration: Micros,
    /// Time of the job's next check. The handler ignores timers that fire earlier.
    next_check_time: Micros,
    attempt_count: u32,
    /// Tasks of the job. Tasks that ended before the newest checkpoint are not included.
    members: BTreeSet<Tid>,
    /// Members that have ended.
    ended_members: BTreeSet<Tid>,
    /// Members that may have died together with their host.
    recent_deaths: recently_dead::RecentDeaths,
    /// Name of the job's newest checkpoint.
    newest_checkpoint: Option<String>,
    /// True if the store did not contain the newest checkpoint at the last attempt to restart.
    is_newest_missing: bool,
    /// Name of the checkpoint from which the job was restarted.
    restart_checkpoint: Option<String>,
    /// How the job's first task has ended.
    first_task_end: job_end::FirstTaskEnd,
    copies: copies::JobCopies,
    /// True if this virtual machine may have the claim of the job in the store.
    may_have_claim: bool,
}

impl CheckpointedJob {
    /// True if a task waits for a checkpoint of the job, or if the job must end after its
    /// checkpoint.
    fn has_open_request(&self) -> bool {
        self.ends_after_checkpoint || !self.waiters.is_empty()
    }

    /// True if the job is rolling back and an attempt to restart it has failed.
    fn is_stuck(&self) -> bool {
        matches!(self.activity, JobActivity::RollingBack { .. }) && self.attempt_count > 0
    }
}

/// Contents of a checkpoint in progress, in addition to the tasks' images. Groups, mailbox entries
/// and contexts are those at the time when all tasks were stopped.
#[derive(Debug, Default)]
struct SnapshotContents {
    groups: Vec<SavedGroup>,
    mailbox: Vec<SavedMailboxEntry>,
    contexts: Vec<(i32, Tid)>,
    /// Tasks of the checkpoint that is being sealed.
    members: Vec<Tid>,
    /// Members that have written their own checkpoints.
    self_checkpointed_members: Vec<Tid>,
    /// Name of the sealed checkpoint, and its size in bytes; `None` before the checkpoint is
    /// sealed.
    sealed_checkpoint: Option<(String, u64)>,
}

/// Lists that hosts have reported: tasks, and contexts with their owners.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    tasks: Vec<TaskInfo>,
    context_owners: Vec<(i32, Tid)>,
}

impl Inventory {
    pub(super) fn new(tasks: Vec<TaskInfo>, contexts: Vec<(i32, Tid)>) -> Self {
        Self {
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
    /// Check whether all tasks of this job have ended, because the job rolls back or must end.
    CheckTasksEnded(Tid),
    /// Begin this restart if none of its tasks is alive. The number is the key of the restart in
    /// `open_restarts`.
    BeginRestart(u64),
    /// Check whether this job has ended. All its known tasks have ended.
    CheckJobEnded(Tid),
    /// Check which jobs with unreleased claims have ended.
    ReleaseClaims,
}

#[derive(Debug)]
struct OpenInventory {
    purpose: InventoryPurpose,
    missing_reply_count: usize,
    inventory: Inventory,
    /// A host that is lost and has not replied, so its tasks are unknown; `None` if there is none.
    silent_host: Option<HostId>,
}

/// The reason why the store cannot provide the checkpoint of a restart.
#[derive(Debug)]
struct Damage {
    why: String,
    /// True if the store does not contain the checkpoint.
    is_missing: bool,
}

/// A restart from a checkpoint that was requested or is in progress.
#[derive(Debug)]
struct OpenRestart {
    checkpoint: String,
    /// The job that rolls back; `None` if a task requested the restart.
    rollback_job: Option<Tid>,
    host_names: Vec<String>,
    waiter: Option<(Tid, RequestId)>,
    why: String,
    meta: Option<CheckpointMeta>,
    restart_id: Option<RestartId>,
    /// Contexts that were assigned to the restarted tasks.
    assigned_contexts: Vec<(i32, Tid)>,
    /// How the store has detected that the checkpoint is damaged; `None` if it has not.
    damage: Option<Damage>,
    /// True if what the earlier tasks have left behind was ordered to be killed.
    has_killed_leftovers: bool,
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
    /// Parts of checkpoints that are being unpacked and sent to their hosts.
    parts_in_transfer: BTreeSet<MigrationId>,
    snapshot_contents: BTreeMap<SnapshotId, SnapshotContents>,
    /// Checkpoints that the store is completing, with the claims of their jobs.
    seals_in_progress: BTreeMap<SnapshotId, ClaimKey>,
    unreleased_claims: claims::UnreleasedClaims,
    /// The latest incarnation of any restarted task.
    latest_incarnation: u16,
    /// Incarnation of each restarted task.
    incarnations: BTreeMap<Tid, u16>,
    /// Origins of the restarted jobs that were first checkpointed in other virtual machines; see
    /// [`CheckpointMeta::origin`]. At most [`INCARNATIONS_MAX`].
    origins: BTreeMap<Tid, Micros>,
    /// Creation time of this virtual machine, as time of day; 0 before the first event.
    created_at: Micros,
    /// Jobs whose known tasks have all ended and for which an inventory must be taken.
    maybe_ended_jobs: Vec<Tid>,
    /// Tasks of the whole virtual machine that have ended recently.
    recent_exits: last_messages::RecentExits,
    copy_queue: copies::CopyQueue,
}

impl JobCheckpoints {
    /// Returns the time at which [`super::Event::Wake`] is needed; `None` if no deadline is set.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
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

    /// Returns the creation time of the virtual machine.
    pub(super) fn created_at(&self) -> Micros {
        self.created_at
    }

    /// Returns the job that must be forgotten to make room for another job: an idle one, if there
    /// are already [`JOBS_MAX`] jobs.
    ///
    /// # Errors
    /// [`PvmError::OutOfRes`] if no job is idle.
    fn job_to_forget_for(&self, job: Tid) -> Result<Option<Tid>, PvmError> {
        if self.jobs.len() < JOBS_MAX || self.jobs.contains_key(&job) {
            return Ok(None);
        }
        let idle_job = |entry: &CheckpointedJob| {
            entry.schedule.is_none()
                && entry.activity == JobActivity::Idle
                && !entry.has_open_request()
        };
        let idle_job = self
            .jobs
            .iter()
            .find(|(_, entry)| idle_job(entry))
            .map(|(tid, _)| *tid);
        idle_job.map(Some).ok_or(PvmError::OutOfRes)
    }

    fn job_of_snapshot(&self, snapshot: SnapshotId) -> Option<Tid> {
        self.jobs
            .iter()
            .find(|(_, job)| job.activity == JobActivity::TakingSnapshot(snapshot))
            .map(|(tid, _)| *tid)
    }

    fn restart_number_of(&self, restart: RestartId) -> Option<u64> {
        self.open_restarts
            .iter()
            .find(|(_, open_restart)| open_restart.restart_id == Some(restart))
            .map(|(restart_number, _)| *restart_number)
    }
}

impl Machine {
    /// Returns the highest task number of `host` that occurs in a stored checkpoint. New tasks get
    /// higher numbers.
    pub(super) fn reserved_ids_max_of(&self, host: HostId) -> u32 {
        // At least 1 if there are checkpoints, even without tasks of this host: the host must not
        // assign contexts again that a checkpoint may contain.
        let lower_bound = u32::from(!self.config.reserved_ids_max.is_empty());
        self.config
            .reserved_ids_max
            .get(&host)
            .copied()
            .unwrap_or_default()
            .max(lower_bound)
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
        must_end_job: bool,
        must_wait: bool,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        match job_checkpoints.job_to_forget_for(job) {
            Ok(None) => {}
            Ok(Some(idle_job)) => self.forget_job(idle_job),
            Err(error) => {
                let reason =
                    format!("{JOBS_MAX} jobs have scheduled checkpoints already, the limit");
                return self.reply_error(tid, id, error, reason);
            }
        }
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let entry = job_checkpoints.jobs.entry(job).or_default();
        match schedule {
            Some(CheckpointSchedule::Disabled) => {
                entry.schedule = None;
                if let JobActivity::RollingBack { why, .. } = &entry.activity
                    && entry.is_stuck()
                {
                    let cause = why.clone();
                    self.give_up_rollback(job, cause, "its periodic checkpoints were switched off");
                }
                return self.reply(tid, id, Reply::Done);
            }
            Some(schedule) => {
                (entry.schedule, entry.has_reported_lateness) = (Some(schedule), false)
            }
            None => {}
        }
        // A request during an inventory is answered with the checkpoint that is being taken. During
        // a snapshot, tasks may already be stopped, and their state may be too old for a later
        // request.
        let must_begin = match entry.activity {
            JobActivity::Idle => true,
            JobActivity::TakingInventory => false,
            JobActivity::TakingSnapshot(_)
            | JobActivity::RollingBack { .. }
            | JobActivity::EndingJob { .. }
            | JobActivity::TakenOver { .. }
            | JobActivity::Restarting(_) => {
                return match must_wait {
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
        entry.ends_after_checkpoint |= must_end_job;
        entry.ends_for_vacate |= must_end_job && !must_wait;
        if must_wait {
            entry.waiters.push((tid, id));
        } else {
            self.reply(tid, id, Reply::Done);
        }
        if must_begin {
            self.begin_checkpoint(job);
        }
    }

    fn begin_checkpoint(&mut self, job: Tid) {
        let now = self.now;
        if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
            entry.activity = JobActivity::TakingInventory;
            if entry.attempt_count == 0 {
                entry.started_at = now;
            }
            self.request_inventory(InventoryPurpose::BeginCheckpoint(job));
        }
    }

    /// Schedules the next check of a job, which replaces any scheduled check.
    fn schedule_check(&mut self, job: Tid, delay: Micros) {
        let check_time = self.now + delay;
        if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
            entry.next_check_time = check_time;
            self.set_timer(delay, Timer::JobCheckDue(job));
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
        if let Some(uncertainty_end) = entry
            .recent_deaths
            .uncertainty_end(now, lease)
            .filter(|_| !entry.has_open_request() && !entry.is_draining)
        {
            // Tasks of the job may have been lost with a host. A checkpoint without them would be
            // incomplete.
            entry.activity = JobActivity::Idle;
            return self.schedule_check(job, uncertainty_end.since(now));
        }
        let job_tasks = job_members(job, &mut entry.members, tasks);
        if job_tasks.is_empty() {
            return self.finish_checkpoint(job, Err(CheckpointFailure::NoSuchJob(job)));
        }
        if job_tasks.len() > CHECKPOINT_TASKS_MAX {
            return self.finish_checkpoint(
                job,
                Err(CheckpointFailure::TooManyTasks {
                    task_count: job_tasks.len(),
                }),
            );
        }
        let (coordinator, snapshots) = (
            &mut master.migrations.coordinator,
            &job_checkpoints.snapshots,
        );
        if entry.has_open_request()
            && !job_tasks
                .iter()
                .any(|task| snapshots.part_of(task.tid).is_some())
        {
            // A task whose migration is still queued has not started to migrate. The task is dumped
            // first and may migrate afterwards.
            let tids = job_tasks.iter().map(|task| task.tid).collect();
            entry.is_draining |= coordinator.cancel_if_all_queued(&tids);
        }
        let other_migration_id = |tid: Tid| {
            coordinator
                .migration_of(tid)
                .or_else(|| snapshots.part_of(tid))
                .map(|other_migration| other_migration.id)
        };
        let migrating_task = job_tasks
            .iter()
            .find_map(|task| Some((task.tid, other_migration_id(task.tid)?)));
        if let Some((tid, id)) = migrating_task {
            let why = Failure::Refused(vec![sempa_proto::migration::Refusal::AlreadyMigrating(id)]);
            return self.finish_checkpoint(
                job,
                Err(CheckpointFailure::Task {
                    tid,
                    step: Step::Inspect,
                    failure: why,
                }),
            );
        }
        let parts: Vec<_> = job_tasks
            .iter()
            .map(|task| (coordinator.generate_id(), task.tid, task.host))
            .collect();
        let snapshot = job_checkpoints.snapshots.begin_snapshot(now, &parts);
        if let Some(entry) = job_checkpoints.jobs.get_mut(&job) {
            entry.activity = JobActivity::TakingSnapshot(snapshot);
        }
        self.outputs
            .push_back(Output::BeginCheckpoint { snapshot, job });
    }

    /// Handles the store's reply to the start of a checkpoint. `Err` contains the reason why the
    /// store refuses the checkpoint.
    pub(super) fn handle_checkpoint_begun(
        &mut self,
        snapshot: SnapshotId,
        result: Result<(), StoreFailure>,
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

    fn verify_snapshot(&mut self, snapshot: SnapshotId, inventory: Inventory) {
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
        let tids: Vec<Tid> = job_members(job, &mut entry.members, &inventory.tasks)
            .iter()
            .map(|task| task.tid)
            .collect();
        let mut ended_tasks = entry.ended_members.clone();
        if entry.newest_checkpoint.is_none() {
            // Before the first checkpoint the master does not know which ended tasks belonged to
            // the job, so it includes every task that has ended recently.
            ended_tasks.extend(job_checkpoints.recent_exits.recent_tids(now));
            let live_tids: BTreeSet<Tid> = inventory.tasks.iter().map(|task| task.tid).collect();
            ended_tasks.retain(|tid| !live_tids.contains(tid));
        }
        let ended_tasks: Vec<Tid> = ended_tasks.into_iter().collect();
        let mailbox = match master.mailbox.entries_of(&tids) {
            Ok(mailbox) => mailbox,
            Err(bytes) => {
                return job_checkpoints
                    .snapshots
                    .on_count_failed(snapshot, CheckpointFailure::MailboxTooLarge { bytes });
            }
        };
        // While all tasks are stopped, no task joins or leaves a group, and no task arrives at a
        // barrier.
        let groups = master.groups.saved_groups(&tids);
        let members: BTreeSet<Tid> = tids.iter().copied().collect();
        let contexts = inventory
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
        let mut open_requests = BTreeMap::<Tid, Vec<RequestId>>::new();
        for (tid, id) in master
            .groups
            .open_requests()
            .chain(master.mailbox.waiting_requests())
        {
            open_requests.entry(tid).or_default().push(id);
        }
        job_checkpoints.snapshots.on_tasks_counted(
            now,
            snapshot,
            &tids,
            &open_requests,
            &ended_tasks,
        );
    }

    /// Executes the outputs of the checkpoint protocols. Returns true if there were any.
    pub(super) fn run_checkpoint_outputs(&mut self) -> bool {
        let mut has_run = self.check_maybe_ended_jobs();
        while let Some(output) = self.job_checkpoints().and_then(|k| k.snapshots.poll()) {
            has_run = true;
            self.execute_snapshot_output(output);
        }
        while let Some(output) = self.job_checkpoints().and_then(|k| k.restarts.poll()) {
            has_run = true;
            self.execute_restart_output(output);
        }
        has_run
    }

    fn execute_snapshot_output(&mut self, output: SnapshotOutput) {
        let own_host = self.config.host;
        match output {
            SnapshotOutput::Order { host, part, order } => {
                self.send_migration_order(host, part, *order)
            }
            SnapshotOutput::CountTasks(counted_snapshot) => {
                self.request_inventory(InventoryPurpose::VerifySnapshot(counted_snapshot))
            }
            SnapshotOutput::ExpectImages(part) if part.from == own_host => {}
            SnapshotOutput::ExpectImages(part) => self.outputs.push_back(Output::ExpectImages {
                migration: part.id,
                source: part.from,
            }),
            SnapshotOutput::StoreImages { snapshot, part } => {
                self.outputs.push_back(Output::StorePart {
                    snapshot,
                    migration: part.id,
                    tid: part.tid,
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
            SnapshotOutput::SnapshotEnded { snapshot, result } => {
                self.handle_snapshot_end(snapshot, result)
            }
        }
    }

    fn seal_checkpoint(&mut self, snapshot: SnapshotId, parts: Vec<(Tid, HostId, TaskFacts)>) {
        let host_name = |host: HostId| {
            self.table
                .get(host)
                .map(|entry| entry.name.clone())
                .unwrap_or_default()
        };
        let Some(incarnations) = self
            .master
            .as_ref()
            .map(|master| &master.checkpoints.incarnations)
        else {
            return;
        };
        let incarnation_of = |tid: Tid| incarnations.get(&tid).copied().unwrap_or_default();
        let task_meta = |(tid, host, facts)| TaskMeta {
            tid,
            host_name: host_name(host),
            facts,
            incarnation: incarnation_of(tid),
        };
        let parts: Vec<TaskMeta> = parts.into_iter().map(task_meta).collect();
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let Some(job) = master.checkpoints.job_of_snapshot(snapshot) else {
            return master.checkpoints.snapshots.on_sealed(
                snapshot,
                Err(StoreFailure("the job rolls back to an earlier one".into())),
            );
        };
        let JobCheckpoints {
            latest_incarnation,
            created_at: vm_created_at,
            ..
        } = master.checkpoints;
        let members = parts.iter().map(|task_meta| task_meta.tid).collect();
        let self_checkpointed_members = parts
            .iter()
            .filter(|task_meta| task_meta.facts.restart_engine().is_some())
            .map(|task_meta| task_meta.tid)
            .collect();
        // Groups, mailbox entries and contexts are moved into the metadata of the checkpoint.
        let sealed_contents = SnapshotContents {
            members,
            self_checkpointed_members,
            ..SnapshotContents::default()
        };
        let stored_contents = master
            .checkpoints
            .snapshot_contents
            .insert(snapshot, sealed_contents)
            .unwrap_or_default();
        let SnapshotContents {
            groups,
            mailbox,
            contexts,
            ..
        } = stored_contents;
        let mut schedule = None;
        if let Some(entry) = master.checkpoints.jobs.get_mut(&job) {
            (schedule, entry.may_have_claim) = (entry.schedule, true);
        }
        let key = master.checkpoints.claim_key(job);
        master.checkpoints.seals_in_progress.insert(snapshot, key);
        let (version, wire_version) = (CHECKPOINT_VERSION, WIRE_VERSION);
        let meta = CheckpointMeta {
            version,
            wire_version,
            vm_start_time: vm_created_at,
            job,
            latest_incarnation,
            tasks: parts,
            groups,
            mailbox_entries: mailbox,
            contexts,
            schedule,
            origin: key.origin,
        };
        let protected_checkpoints = master.checkpoints.needed_checkpoints();
        self.outputs.push_back(Output::SealCheckpoint {
            snapshot,
            meta: Box::new(meta),
            protected_checkpoints,
        });
    }

    /// Handles the store's report on sealing a checkpoint. `Ok` contains the checkpoint's name and
    /// its size in bytes, `Err` the reason why sealing failed.
    pub(super) fn handle_checkpoint_sealed(
        &mut self,
        snapshot: SnapshotId,
        mut result: Result<(String, u64), StoreFailure>,
    ) {
        let Some(job_checkpoints) = self
            .master
            .as_deref_mut()
            .map(|master| &mut master.checkpoints)
        else {
            return;
        };
        let key = job_checkpoints.seals_in_progress.remove(&snapshot);
        if let Ok((checkpoint, _)) = &result
            && job_checkpoints.job_of_snapshot(snapshot).is_none()
        {
            // The checkpoint was reported as failed, and the job rolls back to an earlier
            // checkpoint. The sealed checkpoint must not be used.
            self.outputs.push_back(Output::DropCheckpoints {
                checkpoints: vec![checkpoint.clone()],
            });
            result = Err(StoreFailure("its checkpoint had ended before".into()));
        }
        let contents = job_checkpoints.snapshot_contents.get_mut(&snapshot);
        let result = result.map(|sealed_checkpoint| {
            contents.map_or((), |contents| {
                contents.sealed_checkpoint = Some(sealed_checkpoint)
            })
        });
        job_checkpoints.snapshots.on_sealed(snapshot, result);
        // The store has claimed the job. The master may have forgotten the job meanwhile.
        let job = key.and_then(|key| job_checkpoints.jobs.get(&key.job));
        if let Some(key) = key
            && job.is_none_or(|entry| !entry.may_have_claim)
        {
            self.release_when_ended(key, BTreeSet::new());
        }
    }

    /// Forgets a job. Its claim is released when its tasks have ended.
    fn forget_job(&mut self, job: Tid) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let key = job_checkpoints.claim_key(job);
        let entry = job_checkpoints.jobs.remove(&job);
        if let Some(entry) = entry.filter(|entry| entry.may_have_claim) {
            self.release_when_ended(key, entry.members);
        }
    }

    /// Handles the timer of a job: begins the next checkpoint or attempt, or checks whether the
    /// job's last tasks have ended.
    pub(super) fn handle_job_timer(&mut self, job: Tid) {
        let now = self.now;
        let Some(entry) = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job))
            .filter(|job| job.next_check_time <= now)
        else {
            return;
        };
        match entry.activity {
            JobActivity::Idle if entry.schedule.is_some() || entry.has_open_request() => {
                self.begin_checkpoint(job)
            }
            JobActivity::RollingBack { .. }
            | JobActivity::EndingJob { .. }
            | JobActivity::TakenOver { .. } => {
                self.request_inventory(InventoryPurpose::CheckTasksEnded(job))
            }
            _ => {}
        }
    }
}

/// Returns the time until the next attempt to restart a job after a rollback, if `attempt_count`
/// attempts have failed.
fn restart_retry_interval(attempt_count: u32) -> Micros {
    // [`RESTART_RETRY_INTERVAL_MAX`] is reached after fewer than 16 doublings, so a larger number
    // changes nothing.
    let doublings = attempt_count.saturating_sub(ATTEMPTS_MAX).min(16);
    Micros(RESTART_RETRY_INTERVAL.0 << doublings).min(RESTART_RETRY_INTERVAL_MAX)
}
