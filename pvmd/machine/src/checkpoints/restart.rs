//! Restarts from checkpoints. This module connects the restart protocol, the store, and the hosts
//! that rebuild the tasks.

use super::completion::checkpoint_interval;
use super::{
    ATTEMPTS_MAX, CheckpointedJob, INCARNATIONS_MAX, Inventory, InventoryPurpose, JobActivity,
    JobCheckpoints, OpenRestart, restart_retry_interval,
};
use crate::restart_engine::WorldCall as Again;
use crate::rpc::RpcPurpose;
use crate::{Machine, Output, Timer};
use checkpoint_protocol::{RestartOutput, RestartTask, TargetEvent};
use sempa_proto::checkpoint::{
    CHECKPOINT_VERSION, CheckpointMeta, CheckpointSchedule, RestartFailure, RestartReport,
    StoreFailure, WriterVersion,
};
use sempa_proto::event::EventKind;
use sempa_proto::host::SavedTask;
use sempa_proto::host::{HostRequest, PendingItem};
use sempa_proto::link::{LinkFrame, is_later_incarnation};
use sempa_proto::migration::{Failure, FileRequirement, RestartGroup, TaskFacts};
use sempa_proto::task::{Redirect, Reply, RestartInfo, ToTask};
use sempa_proto::tasker::{MemoryWrite, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};

impl CheckpointedJob {
    /// Updates the job after its restart from a checkpoint. `schedule` is the schedule in the
    /// checkpoint, which applies if the job has no other one. Returns the time until the next
    /// checkpoint, if the job has a schedule.
    fn continue_from(
        &mut self,
        checkpoint: &str,
        members: &BTreeSet<Tid>,
        schedule: Option<CheckpointSchedule>,
    ) -> Option<Micros> {
        self.schedule = self.schedule.or(schedule);
        (self.restart_checkpoint, self.newest_checkpoint) =
            (Some(checkpoint.into()), Some(checkpoint.into()));
        (self.members, self.ended_members) = (members.clone(), BTreeSet::new());
        (self.first_task_end, self.recent_deaths) = Default::default();
        self.attempt_count = 0;
        self.schedule
            .map(|schedule| checkpoint_interval(schedule, Some(self.last_duration)))
    }
}

impl JobCheckpoints {
    /// Records the origin of a restarted job that was first checkpointed in another virtual
    /// machine.
    fn record_origin(&mut self, meta: &CheckpointMeta) {
        if meta.origin == self.created_at {
            self.origins.remove(&meta.job);
            return;
        }
        self.origins.insert(meta.job, meta.origin);
        while self.origins.len() > INCARNATIONS_MAX {
            self.origins.pop_first();
        }
    }
}

/// What the end of a restart means for the entry of its job, with the time until the job's next
/// check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ActivityEnd {
    /// The activity belongs to another restart, which continues, or another virtual machine has
    /// taken over the job.
    Unchanged,
    /// The job runs again.
    Idle(Option<Micros>),
    /// The restart is tried again; without a time, when the store has named an older checkpoint.
    RollsBack(Option<Micros>),
    /// The job has no entry any more.
    Forgotten,
}

impl JobCheckpoints {
    /// Updates the entry of a job after the end of a restart that has set the job's activity.
    /// `rollback` has the reason of a rollback, and is true if its checkpoint is damaged.
    fn end_activity(
        &mut self,
        (job, restart_number): (Tid, u64),
        failure: Option<&RestartFailure>,
        rollback: Option<(String, bool)>,
        (checkpoint, members, schedule): (&str, &BTreeSet<Tid>, Option<CheckpointSchedule>),
    ) -> ActivityEnd {
        let entry = self.jobs.get_mut(&job);
        let Some(entry) =
            entry.filter(|entry| entry.activity == JobActivity::Restarting(restart_number))
        else {
            return ActivityEnd::Unchanged;
        };
        entry.activity = JobActivity::Idle;
        entry.attempt_count += 1;
        let Some(failure) = failure else {
            return ActivityEnd::Idle(entry.continue_from(checkpoint, members, schedule));
        };
        // Any other obstacle may disappear, so the restart is tried again later.
        let runs_elsewhere = matches!(failure, RestartFailure::RunsElsewhere { .. });
        let may_retry = entry.schedule.is_some() || entry.attempt_count < ATTEMPTS_MAX;
        match rollback {
            Some((why, is_damaged)) if may_retry && !runs_elsewhere => {
                entry.activity = JobActivity::RollingBack {
                    lost_host: None,
                    why,
                    check_count: 0,
                };
                // A damaged checkpoint is not tried again. The restart continues when the store has
                // named an older checkpoint.
                let delay = restart_retry_interval(entry.attempt_count);
                ActivityEnd::RollsBack((!is_damaged).then_some(delay))
            }
            _ => {
                self.jobs.remove(&job);
                ActivityEnd::Forgotten
            }
        }
    }
}

impl Machine {
    /// Master: handles a request to restart from a checkpoint.
    pub(crate) fn handle_restart_request(
        &mut self,
        (tid, id): (Tid, RequestId),
        checkpoint: String,
        host_names: Vec<String>,
        must_wait: bool,
        force: bool,
    ) {
        let why = format!("requested by {tid}");
        self.restart_checkpoint(
            checkpoint,
            None,
            host_names,
            must_wait.then_some((tid, id)),
            why,
            force,
        );
        if !must_wait {
            self.reply(tid, id, Reply::Done);
        }
    }

    /// Begins a restart. Returns its number.
    pub(super) fn restart_checkpoint(
        &mut self,
        checkpoint: String,
        rollback_job: Option<Tid>,
        host_names: Vec<String>,
        waiter: Option<(Tid, RequestId)>,
        why: String,
        force: bool,
    ) -> Option<u64> {
        let job_checkpoints = self.job_checkpoints()?;
        let vm_created_at = job_checkpoints.created_at;
        job_checkpoints.last_restart_number += 1;
        let restart_number = job_checkpoints.last_restart_number;
        let open_restart = OpenRestart {
            checkpoint: checkpoint.clone(),
            rollback_job,
            host_names,
            waiter,
            why,
            meta: None,
            restart_id: None,
            assigned_contexts: Vec::new(),
            damage: None,
            has_killed_leftovers: false,
        };
        job_checkpoints
            .open_restarts
            .insert(restart_number, open_restart);
        self.outputs.push_back(Output::OpenCheckpoint {
            restart_number,
            checkpoint,
            vm_created_at,
            force,
        });
        Some(restart_number)
    }

    /// Handles the store's report on an opened checkpoint: requests an inventory for the restart.
    /// The restart fails if the store could not open the checkpoint, if the job runs in another
    /// virtual machine, or if the checkpoint has another version.
    pub(crate) fn handle_checkpoint_opened(
        &mut self,
        restart_number: u64,
        result: Result<CheckpointMeta, RestartFailure>,
    ) {
        let Some(open_restart) = self
            .job_checkpoints()
            .and_then(|k| k.open_restarts.get_mut(&restart_number))
        else {
            return;
        };
        match result {
            Ok(meta) if (meta.wire_version, meta.version) != (WIRE_VERSION, CHECKPOINT_VERSION) => {
                let writer = WriterVersion {
                    format: meta.version,
                    wire: meta.wire_version,
                };
                self.finish_restart(restart_number, Err(RestartFailure::OtherVersion(writer)));
            }
            Ok(meta) => {
                open_restart.meta = Some(meta);
                self.request_inventory(InventoryPurpose::BeginRestart(restart_number));
            }
            Err(why) => self.finish_restart(restart_number, Err(why)),
        }
    }

    pub(super) fn begin_restart(&mut self, restart_number: u64, inventory: &Inventory) {
        let now = self.now;
        let plan_result = self.plan_restart(restart_number, inventory);
        let (job, group, candidates) = match plan_result {
            Ok(plan) => plan,
            Err(why) => return self.finish_restart(restart_number, Err(why)),
        };
        // Tasks of the job may run on a lost host, which no inventory contains.
        if let Some(wait) = self.lost_tasks_wait() {
            return self.set_timer(wait, Timer::RestartDue(restart_number));
        }
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let (job_checkpoints, coordinator) =
            (&mut master.checkpoints, &mut master.migrations.coordinator);
        job_checkpoints.latest_incarnation = group.incarnation;
        job_checkpoints.incarnations.extend(
            group
                .members
                .iter()
                .map(|(tid, _)| (*tid, group.incarnation)),
        );
        while job_checkpoints.incarnations.len() > INCARNATIONS_MAX {
            job_checkpoints.incarnations.pop_first();
        }
        let id = job_checkpoints
            .restarts
            .begin_restart(now, group, candidates, || coordinator.generate_id());
        if let Some(open_restart) = job_checkpoints.open_restarts.get_mut(&restart_number) {
            open_restart.restart_id = Some(id);
        }
        let entry = job_checkpoints.jobs.entry(job).or_default();
        (entry.activity, entry.may_have_claim) = (JobActivity::Restarting(restart_number), true);
    }

    /// Continues a restart that has waited for the end of a lost host's lease.
    pub(crate) fn retry_begin_restart(&mut self, restart_number: u64) {
        let is_open = self
            .job_checkpoints()
            .is_some_and(|k| k.open_restarts.contains_key(&restart_number));
        if is_open {
            self.request_inventory(InventoryPurpose::BeginRestart(restart_number));
        }
    }

    /// Plans a restart. Returns the job, the group of restarted tasks, and each task with its
    /// candidate hosts.
    ///
    /// # Errors
    /// The reason that prevents the restart, for example a task or group that is in use.
    fn plan_restart(
        &self,
        restart_number: u64,
        inventory: &Inventory,
    ) -> Result<(Tid, RestartGroup, Vec<RestartTask>), RestartFailure> {
        let closed_error =
            || RestartFailure::Store(StoreFailure("the checkpoint is no longer open".into()));
        let job_checkpoints = self
            .master
            .as_ref()
            .map(|master| &master.checkpoints)
            .ok_or_else(closed_error)?;
        let open_restart = job_checkpoints
            .open_restarts
            .get(&restart_number)
            .ok_or_else(closed_error)?;
        let meta = open_restart.meta.as_ref().ok_or_else(closed_error)?;
        let job = job_checkpoints.jobs.get(&meta.job);
        let may_restart = |job: &CheckpointedJob| match job.activity {
            JobActivity::Idle => !job.has_open_request(),
            JobActivity::Restarting(number) => number == restart_number,
            _ => false,
        };
        if job.is_some_and(|job| !may_restart(job)) {
            return Err(RestartFailure::InProgress);
        }
        // Several checkpoints may contain the same task, because one job may be part of another
        // job.
        let is_in_use = |tid: Tid| {
            job_checkpoints.restarts.is_restarting(tid)
                || job_checkpoints.snapshots.part_of(tid).is_some()
        };
        if meta.tasks.iter().any(|task_meta| is_in_use(task_meta.tid)) {
            return Err(RestartFailure::InProgress);
        }
        let members: Vec<(Tid, u16)> = meta
            .tasks
            .iter()
            .map(|task_meta| (task_meta.tid, task_meta.incarnation))
            .collect();
        self.check_conflicts(meta, inventory)?;
        let mut selected_hosts = Vec::new();
        for name in &open_restart.host_names {
            selected_hosts.push(
                self.host_by_name(name)
                    .ok_or_else(|| RestartFailure::NoHost(name.clone()))?,
            );
        }
        let all_hosts: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let mut candidates = Vec::new();
        for (index, task_meta) in meta.tasks.iter().enumerate() {
            let mut hosts = if selected_hosts.is_empty() {
                all_hosts.clone()
            } else {
                selected_hosts.clone()
            };
            let host_count = hosts.len().max(1);
            hosts.rotate_left(index % host_count);
            let previous_host = self
                .table
                .find_by_name(&task_meta.host_name)
                .map(|entry| entry.id)
                .filter(|_| selected_hosts.is_empty());
            hosts.sort_by_key(|host| Some(*host) != previous_host);
            // The user may list a host repeatedly, so that the host becomes the first choice of
            // more tasks.
            let mut listed_hosts = BTreeSet::new();
            hosts.retain(|host| listed_hosts.insert(*host));
            candidates.push(RestartTask {
                tid: task_meta.tid,
                facts: without_lengths(&task_meta.facts),
                hosts,
            });
        }
        let incarnation = job_checkpoints
            .latest_incarnation
            .max(meta.latest_incarnation)
            .wrapping_add(1)
            .max(1);
        Ok((
            meta.job,
            RestartGroup {
                incarnation,
                members,
                same_vm: meta.vm_start_time == job_checkpoints.created_at,
            },
            candidates,
        ))
    }

    /// Checks that the tasks, groups, mailbox entries and contexts of a checkpoint are not in use.
    fn check_conflicts(
        &self,
        meta: &CheckpointMeta,
        inventory: &Inventory,
    ) -> Result<(), RestartFailure> {
        let is_member = |tid: Tid| meta.tasks.iter().any(|task_meta| task_meta.tid == tid);
        let live_members: Vec<Tid> = inventory
            .tasks
            .iter()
            .map(|task| task.tid)
            .filter(|tid| is_member(*tid))
            .collect();
        if !live_members.is_empty() {
            return Err(RestartFailure::TasksAlive(live_members));
        }
        let Some(master) = &self.master else {
            return Ok(());
        };
        let group_names = master.groups.existing_names(&meta.groups);
        if !group_names.is_empty() {
            return Err(RestartFailure::GroupsInUse(group_names));
        }
        if !master.mailbox.has_room_for(&meta.mailbox_entries) {
            return Err(RestartFailure::Store(StoreFailure(
                "the mailbox has no room for the job's entries".into(),
            )));
        }
        let mailbox_conflicts = master.mailbox.conflicting_entries(&meta.mailbox_entries);
        if !mailbox_conflicts.is_empty() {
            return Err(RestartFailure::MailboxInUse(mailbox_conflicts));
        }
        let context_owners: BTreeMap<i32, Tid> = inventory.context_owners.iter().copied().collect();
        let has_other_owner = |(ctx, owner): &&(i32, Tid)| {
            context_owners
                .get(ctx)
                .is_some_and(|current_owner| current_owner != owner)
        };
        let used_contexts: Vec<i32> = meta
            .contexts
            .iter()
            .filter(has_other_owner)
            .map(|(ctx, _)| *ctx)
            .collect();
        if used_contexts.is_empty() {
            Ok(())
        } else {
            Err(RestartFailure::ContextsInUse(used_contexts))
        }
    }

    pub(super) fn execute_restart_output(&mut self, output: RestartOutput) {
        let own_host = self.config.host;
        match output {
            RestartOutput::Order { host, part, order } => {
                self.send_migration_order(host, part, order)
            }
            RestartOutput::SendImages { restart, part } => {
                let Some(job_checkpoints) = self.job_checkpoints() else {
                    return;
                };
                let Some(restart_number) = job_checkpoints.restart_number_of(restart) else {
                    return;
                };
                let receiver = (part.to != own_host).then_some(part.to);
                if receiver.is_some() {
                    job_checkpoints.parts_in_transfer.insert(part.id);
                }
                self.outputs.push_back(Output::SendPart {
                    restart_number,
                    migration: part.id,
                    tid: part.tid,
                    receiver,
                });
            }
            RestartOutput::AnnounceLocation(part) => {
                self.kill_leftovers_of_restart(part.id);
                self.restore_shared_state(part.id);
                self.publish_location(&part);
            }
            RestartOutput::RestartEnded { restart, result } => {
                let Some(restart_number) = self
                    .job_checkpoints()
                    .and_then(|k| k.restart_number_of(restart))
                else {
                    return;
                };
                let result = result.map(|tasks| {
                    let checkpoint = self
                        .job_checkpoints()
                        .and_then(|k| k.open_restarts.get(&restart_number))
                        .map(|w| w.checkpoint.clone());
                    RestartReport {
                        checkpoint: checkpoint.unwrap_or_default(),
                        tasks,
                    }
                });
                self.finish_restart(restart_number, result);
            }
        }
    }

    /// Orders all hosts to kill what the earlier processes of a job have left behind, before the
    /// first location of the restarted tasks is announced: the restarted tasks have their children
    /// again, so these would be second copies. Each daemon acknowledges a location after it has
    /// passed on the order, and the tasks run after the acknowledgements.
    fn kill_leftovers_of_restart(&mut self, part_id: MigrationId) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let restart = job_checkpoints.restarts.restart_of(part_id);
        let restart_number = restart.and_then(|restart| job_checkpoints.restart_number_of(restart));
        let open_restart = restart_number
            .and_then(|restart_number| job_checkpoints.open_restarts.get_mut(&restart_number));
        let Some(open_restart) = open_restart else {
            return;
        };
        if std::mem::replace(&mut open_restart.has_killed_leftovers, true) {
            return;
        }
        let tasks = open_restart.meta.iter().flat_map(|meta| &meta.tasks);
        let tids: Vec<Tid> = tasks.map(|task_meta| task_meta.tid).collect();
        for tid in tids {
            self.order_leftovers_killed(tid);
        }
    }

    /// Restores the groups, mailbox entries and contexts of the restarted tasks.
    fn restore_shared_state(&mut self, part_id: MigrationId) {
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let restart = master.checkpoints.restarts.restart_of(part_id);
        let restart_number =
            restart.and_then(|restart| master.checkpoints.restart_number_of(restart));
        let open_restart = restart_number
            .and_then(|restart_number| master.checkpoints.open_restarts.get_mut(&restart_number));
        let Some(OpenRestart {
            meta: Some(meta),
            assigned_contexts,
            ..
        }) = open_restart
        else {
            return;
        };
        assigned_contexts.extend(&meta.contexts);
        master
            .groups
            .restore_groups(&std::mem::take(&mut meta.groups));
        let (mailbox, contexts) = (
            std::mem::take(&mut meta.mailbox_entries),
            std::mem::take(&mut meta.contexts),
        );
        self.restore_mailbox(mailbox);
        let mut contexts_by_host = BTreeMap::<HostId, Vec<(i32, Tid)>>::new();
        for (ctx, owner) in contexts {
            contexts_by_host
                .entry(self.context_holder(ctx))
                .or_default()
                .push((ctx, owner));
        }
        for (host, contexts) in contexts_by_host {
            self.call_host(
                host,
                HostRequest::ReserveContexts(contexts),
                RpcPurpose::Ignored,
            );
        }
    }

    /// True if the images of this part are being unpacked by the store or sent to a host.
    pub(crate) fn is_part_in_transfer(&self, id: MigrationId) -> bool {
        self.master
            .as_ref()
            .is_some_and(|master| master.checkpoints.parts_in_transfer.contains(&id))
    }

    /// Handles the result of sending a part to its host.
    pub(crate) fn handle_part_sent(&mut self, id: MigrationId, result: Result<(), Failure>) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        job_checkpoints.parts_in_transfer.remove(&id);
        if let Err(why) = result {
            job_checkpoints.restarts.on_send_failed(id, why);
        }
        self.outputs.push_back(Output::DropImages { migration: id });
    }

    /// Finishes a restart that is complete, has failed or did not begin.
    pub(super) fn finish_restart(
        &mut self,
        restart_number: u64,
        result: Result<RestartReport, RestartFailure>,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(open_restart) = job_checkpoints.open_restarts.remove(&restart_number) else {
            return;
        };
        let OpenRestart {
            checkpoint,
            waiter,
            why,
            meta,
            restart_id,
            assigned_contexts,
            rollback_job,
            damage,
            ..
        } = open_restart;
        let damage = damage.filter(|_| result.is_err());
        let job = rollback_job
            .or(meta.as_ref().map(|meta| meta.job))
            .unwrap_or_default();
        let members: BTreeSet<Tid> = meta
            .iter()
            .flat_map(|meta| &meta.tasks)
            .map(|task_meta| task_meta.tid)
            .collect();
        let key = meta
            .as_ref()
            .map_or_else(|| job_checkpoints.claim_key(job), CheckpointMeta::claim_key);
        if let (Ok(_), Some(meta)) = (&result, &meta) {
            job_checkpoints.record_origin(meta);
        }
        let has_begun = restart_id.is_some();
        let schedule = meta.as_ref().and_then(|meta| meta.schedule);
        let end = job_checkpoints.end_activity(
            (job, restart_number),
            result.as_ref().err(),
            rollback_job.map(|_| (why.clone(), damage.is_some())),
            (&checkpoint, &members, schedule),
        );
        let (is_retried, is_forgotten) = (
            matches!(end, ActivityEnd::RollsBack(_)),
            end == ActivityEnd::Forgotten,
        );
        // A restart that has begun may have tasks to end before the claim is released.
        self.outputs.push_back(Output::CloseCheckpoint {
            restart_number,
            keeps_claim: result.is_ok() || has_begun || is_retried,
        });
        if let ActivityEnd::Idle(Some(delay)) | ActivityEnd::RollsBack(Some(delay)) = end {
            self.schedule_check(job, delay);
        }
        if result.is_ok() {
            // The job runs again, so its checkpoint must no longer be marked as that of an ended
            // job.
            self.outputs.push_back(Output::MarkCheckpoints {
                checkpoints: vec![checkpoint.clone()],
                has_ended: false,
                protected_checkpoints: Vec::new(),
            });
            self.keep_claim(key);
        }
        if result.is_err() && has_begun {
            self.undo_restart(&members, assigned_contexts);
        }
        if is_forgotten || (result.is_err() && has_begun && !is_retried) {
            self.release_when_ended(key, members);
        }
        if let Some(damage) = damage {
            self.condemn_checkpoint(&checkpoint, job, rollback_job, damage);
        }
        self.record_event(restart_event(checkpoint, job, why, &result));
        if let Some((tid, id)) = waiter {
            self.reply(tid, id, Reply::Restarted(result));
        }
    }

    /// Ends the tasks of a failed restart, removes them from their groups and other services, and
    /// releases their contexts.
    fn undo_restart(&mut self, members: &BTreeSet<Tid>, assigned_contexts: Vec<(i32, Tid)>) {
        // The tasks may already be in their groups again, and some tasks may already run.
        for tid in members {
            self.kill_task(*tid);
            self.remove_from_services(*tid);
        }
        for (ctx, owner) in assigned_contexts {
            self.call_host(
                self.context_holder(ctx),
                HostRequest::FreeContext { owner, ctx },
                RpcPurpose::Ignored,
            );
        }
    }

    /// Handles the record that was stored next to the images of a task that is restarted on this
    /// host. Then restores the images or, if the program is started again instead, prepares its
    /// files.
    pub(crate) fn handle_part_read(&mut self, id: MigrationId, result: Result<SavedTask, Failure>) {
        // The restart may have been aborted. The task must then not be rebuilt.
        if !self.migrations.is_restoring(id) {
            return;
        }
        match result.and_then(|saved_task| self.prepare_restore(id, saved_task)) {
            Ok(Some(order)) => self.send_to_tasker(order),
            Ok(None) => self.world_calls.push_back(Again::StageState(id)),
            Err(why) => self.pass_to_target(id, TargetEvent::Restored(Err(why))),
        }
    }

    /// Prepares the record of a restarted task. Returns the order that restores the task's images;
    /// `None` if the program is started again instead.
    fn prepare_restore(
        &mut self,
        id: MigrationId,
        saved_task: SavedTask,
    ) -> Result<Option<ToTasker>, Failure> {
        let record_error =
            |why: &str| Failure::Images(format!("the record next to the images: {why}"));
        if saved_task.version != CHECKPOINT_VERSION {
            return Err(record_error(&format!(
                "it has version {}, but only {CHECKPOINT_VERSION} is supported",
                saved_task.version
            )));
        }
        let paths = self.config.paths.clone();
        let redirect = Redirect {
            migration: id,
            token_paths: vec![paths.resume_token_path(id)],
        };
        let bytes = redirect.encode().map_err(Failure::Engine)?;
        let SavedTask {
            mut record,
            waiting_items: mut saved_items,
            ..
        } = saved_task;
        let redirect_write = Some(MemoryWrite {
            address: record.redirect_address,
            bytes,
        });
        let (mut tracer_output_sink, mut tracer_trace_sink) = Default::default();
        self.apply_tracer_sinks(&mut tracer_output_sink, &mut tracer_trace_sink);
        let (hosts, epoch) = (
            self.table.hosts.iter().map(|host| host.id).collect(),
            self.table.epoch,
        );
        let arrival = self.arrival_of(id).ok_or(Failure::TaskEnded)?;
        let tid = arrival.tid;
        if record.tid != tid {
            return Err(record_error(&format!(
                "it is about {}, not about {tid}",
                record.tid
            )));
        }
        if arrival.restarts_program != record.handoff.is_some() {
            return Err(record_error(
                "it was written by another engine than the checkpoint names",
            ));
        }
        let group = arrival.restart_group.take().ok_or(Failure::TaskEnded)?;
        saved_items.retain_mut(|item| adapt_for_restart(tid, &group, item));
        let is_known = |tid: Tid| group.same_vm || group.incarnation_at_checkpoint(tid).is_some();
        if !is_known(record.output_sink.tid) {
            record.output_sink = tracer_output_sink;
        }
        if !is_known(record.trace_sink.tid) {
            record.trace_sink = tracer_trace_sink;
        }
        record
            .watermarks
            .retain(|watermark| group.incarnation_at_checkpoint(watermark.peer).is_some());
        (record.known_hosts, record.hosts_epoch, record.exit_rm) = (hosts, epoch, None);
        let mut open_requests = std::mem::take(&mut record.open_requests);
        // These requests come from an earlier restart of the task. The task's library was not
        // informed of that restart yet.
        open_requests.extend(
            record
                .restart_info
                .take()
                .into_iter()
                .flat_map(|restart| restart.requests_to_repeat),
        );
        record.untimed_requests.clear();
        record.restart_info = Some(RestartInfo {
            restart_group: group,
            requests_to_repeat: open_requests,
        });
        arrival.set_saved_state(record, saved_items);
        let order = ToTasker::Restore {
            migration: id,
            tid,
            image_dir: paths.image_dir(id),
            memory_write: redirect_write,
            memory_socket_path: None,
        };
        Ok((!arrival.restarts_program).then_some(order))
    }
}

/// Returns the event log entry for the end of a restart. `why` is the reason of the restart.
fn restart_event(
    checkpoint: String,
    job: Tid,
    why: String,
    result: &Result<RestartReport, RestartFailure>,
) -> EventKind {
    match result {
        Ok(report) => EventKind::Restarted {
            checkpoint,
            job,
            tasks: report.tasks.clone(),
            why,
        },
        Err(failure) => EventKind::RestartFailed {
            checkpoint,
            cause: why,
            why: failure.to_string(),
        },
    }
}

/// True if a restarted task must receive this item. The item is adapted:
///
/// - A partial message of a member of the restart group gets the new incarnation of the group.
///   Partial messages of other tasks are dropped.
/// - A notification does not wait for the last messages of a task outside the group.
fn adapt_for_restart(tid: Tid, group: &RestartGroup, item: &mut PendingItem) -> bool {
    let bytes = match item {
        PendingItem::Control(ToTask::Deliver { deliver_after, .. }) => {
            *deliver_after = deliver_after
                .filter(|watermark| group.incarnation_at_checkpoint(watermark.peer).is_some());
            return true;
        }
        PendingItem::Control(_) => return true,
        PendingItem::Frame(bytes) => bytes,
    };
    let Some(frame) = LinkFrame::decode(bytes.clone()) else {
        return false;
    };
    if frame.src == tid {
        return true;
    }
    let frame_incarnation = frame.incarnation;
    let frame = LinkFrame {
        incarnation: group.incarnation,
        ..frame
    };
    *bytes = [&frame.encode_head()[..], &frame.payload].concat().into();
    // If the sender was restarted after it sent this frame, and the receiver was not restarted with
    // it, the frame is void.
    group
        .incarnation_at_checkpoint(frame.src)
        .is_some_and(|sender_incarnation| {
            !is_later_incarnation(sender_incarnation, frame_incarnation)
        })
}

/// Returns the facts without the lengths of files to which the task may have appended since the
/// checkpoint. Such files are truncated before the task is rebuilt.
fn without_lengths(facts: &TaskFacts) -> TaskFacts {
    let mut facts = facts.clone();
    for file in &mut facts.files {
        match file.requirement {
            FileRequirement::Length | FileRequirement::Exists => {
                (file.requirement, file.bytes) = (FileRequirement::Exists, 0)
            }
            FileRequirement::LengthOrCopy | FileRequirement::ExistsOrCopy => {
                (file.requirement, file.bytes) = (FileRequirement::ExistsOrCopy, 0);
            }
            FileRequirement::Content(_) | FileRequirement::Directory => {}
        }
    }
    facts
}
