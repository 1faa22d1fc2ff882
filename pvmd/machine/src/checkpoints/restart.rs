//! Restarts from checkpoints: the glue between the protocol, the store, and the hosts that rebuild
//! the tasks.

use super::completion::checkpoint_interval;
use super::job_end::FirstTaskEnd;
use super::recently_dead::RecentDeaths;
use super::{
    ATTEMPTS_MAX, CheckpointedJob, INCARNATIONS_MAX, Inventory, InventoryPurpose, JobActivity,
    OpenRestart, restart_retry_interval,
};
use crate::restart_engine::WorldCall as Again;
use crate::rpc::RpcPurpose;
use crate::{Machine, Output};
use checkpoint_protocol::{RestartOutput, RestartTask, TargetEvent};
use sempa_proto::checkpoint::{CHECKPOINT_VERSION, CheckpointMeta, RestartFailure, RestartReport};
use sempa_proto::event::EventKind;
use sempa_proto::host::SavedTask;
use sempa_proto::host::{HostRequest, PendingItem};
use sempa_proto::link::{LinkFrame, is_later_incarnation};
use sempa_proto::migration::{Failure, FileRequirement, RestartGroup, TaskFacts};
use sempa_proto::task::{Redirect, Reply, RestartInfo, ToTask};
use sempa_proto::tasker::{MemoryWrite, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid, WIRE_VERSION};
use std::collections::{BTreeMap, BTreeSet};

impl Machine {
    /// Master: handles a request to restart from a checkpoint.
    pub(crate) fn handle_restart_request(
        &mut self,
        (tid, id): (Tid, RequestId),
        set: String,
        hosts: Vec<String>,
        wait: bool,
    ) {
        let why = format!("requested by {tid}");
        self.restart_checkpoint(set, None, hosts, wait.then_some((tid, id)), why);
        if !wait {
            self.reply(tid, id, Reply::Done);
        }
    }

    pub(super) fn restart_checkpoint(
        &mut self,
        checkpoint: String,
        rollback_job: Option<Tid>,
        hosts: Vec<String>,
        waiter: Option<(Tid, RequestId)>,
        why: String,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        job_checkpoints.last_restart_number += 1;
        let restart = job_checkpoints.last_restart_number;
        let wanted = OpenRestart {
            checkpoint: checkpoint.clone(),
            rollback_job,
            hosts,
            waiter,
            why,
            meta: None,
            restart_id: None,
            assigned_contexts: Vec::new(),
        };
        job_checkpoints.open_restarts.insert(restart, wanted);
        self.outputs.push_back(Output::OpenCheckpoint {
            restart,
            checkpoint,
        });
    }

    /// Handles the store's report on an opened checkpoint.
    pub(crate) fn handle_checkpoint_opened(
        &mut self,
        number: u64,
        result: Result<CheckpointMeta, String>,
    ) {
        let Some(wanted) = self
            .job_checkpoints()
            .and_then(|k| k.open_restarts.get_mut(&number))
        else {
            return;
        };
        match result {
            Ok(meta) if (meta.wire_version, meta.version) != (WIRE_VERSION, CHECKPOINT_VERSION) => {
                let CheckpointMeta {
                    wire_version: wire,
                    version,
                    ..
                } = meta;
                let why = format!(
                    "the libraries in this checkpoint use protocol version {wire}, and its format is version \
                     {version}; this virtual machine uses {WIRE_VERSION} and {CHECKPOINT_VERSION}: restart it with \
                     the version that wrote it"
                );
                self.finish_restart(number, Err(RestartFailure::Store(why)));
            }
            Ok(meta) => {
                wanted.meta = Some(meta);
                self.take_inventory(InventoryPurpose::BeginRestart(number));
            }
            Err(why) => self.finish_restart(number, Err(RestartFailure::Store(why))),
        }
    }

    pub(super) fn begin_restart(&mut self, number: u64, found: &Inventory) {
        let now = self.now;
        let begun = self.plan_restart(number, found);
        let (job, group, candidates) = match begun {
            Ok(plan) => plan,
            Err(why) => return self.finish_restart(number, Err(why)),
        };
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
            .begin(now, group, candidates, || coordinator.next_id());
        if let Some(wanted) = job_checkpoints.open_restarts.get_mut(&number) {
            wanted.restart_id = Some(id);
        }
        let entry = job_checkpoints.jobs.entry(job).or_default();
        entry.activity = JobActivity::Restarting;
    }

    /// Plans a restart. Returns the job, the group of restarted tasks, and each task with its
    /// candidate hosts.
    ///
    /// # Errors
    /// The reason that prevents the restart.
    fn plan_restart(
        &self,
        number: u64,
        found: &Inventory,
    ) -> Result<(Tid, RestartGroup, Vec<RestartTask>), RestartFailure> {
        let gone = || RestartFailure::Store("the checkpoint is no longer open".into());
        let job_checkpoints = self
            .master
            .as_ref()
            .map(|master| &master.checkpoints)
            .ok_or_else(gone)?;
        let wanted = job_checkpoints
            .open_restarts
            .get(&number)
            .ok_or_else(gone)?;
        let meta = wanted.meta.as_ref().ok_or_else(gone)?;
        let job = job_checkpoints.jobs.get(&meta.job);
        let is_rollback = wanted.rollback_job.is_some();
        let free = |job: &CheckpointedJob| match job.activity {
            JobActivity::Idle => !job.has_open_request(),
            JobActivity::Restarting => is_rollback,
            _ => false,
        };
        if job.is_some_and(|job| !free(job)) {
            return Err(RestartFailure::InProgress);
        }
        // Two checkpoints have tasks in common if one job is part of the other.
        let busy = |tid: Tid| {
            job_checkpoints.restarts.is_restarting(tid)
                || job_checkpoints.snapshots.part_of(tid).is_some()
        };
        if meta.tasks.iter().any(|part| busy(part.tid)) {
            return Err(RestartFailure::InProgress);
        }
        let members: Vec<(Tid, u16)> = meta
            .tasks
            .iter()
            .map(|part| (part.tid, part.incarnation))
            .collect();
        self.check_conflicts(meta, found)?;
        let mut on = Vec::new();
        for name in &wanted.hosts {
            on.push(
                self.host_by_name(name)
                    .ok_or_else(|| RestartFailure::NoHost(name.clone()))?,
            );
        }
        let all: Vec<HostId> = self.table.hosts.iter().map(|host| host.id).collect();
        let mut candidates = Vec::new();
        for (index, part) in meta.tasks.iter().enumerate() {
            let mut hosts = if on.is_empty() {
                all.clone()
            } else {
                on.clone()
            };
            let many = hosts.len().max(1);
            hosts.rotate_left(index % many);
            let home = self
                .table
                .by_name(&part.host)
                .map(|entry| entry.id)
                .filter(|_| on.is_empty());
            hosts.sort_by_key(|host| Some(*host) != home);
            // A host may be listed repeatedly, to become the first choice of more tasks.
            let mut known = BTreeSet::new();
            hosts.retain(|host| known.insert(*host));
            candidates.push(RestartTask {
                tid: part.tid,
                facts: without_lengths(&part.facts),
                hosts,
            });
        }
        let line = job_checkpoints
            .latest_incarnation
            .max(meta.latest_incarnation)
            .wrapping_add(1)
            .max(1);
        Ok((
            meta.job,
            RestartGroup {
                incarnation: line,
                members,
                same_vm: meta.vm == job_checkpoints.created_at,
            },
            candidates,
        ))
    }

    /// Checks that the tasks, groups, mailbox entries and contexts of a checkpoint are not in use.
    fn check_conflicts(
        &self,
        meta: &CheckpointMeta,
        found: &Inventory,
    ) -> Result<(), RestartFailure> {
        let member = |tid: Tid| meta.tasks.iter().any(|part| part.tid == tid);
        let alive: Vec<Tid> = found
            .tasks
            .iter()
            .map(|task| task.tid)
            .filter(|tid| member(*tid))
            .collect();
        if !alive.is_empty() {
            return Err(RestartFailure::TasksAlive(alive));
        }
        let Some(master) = &self.master else {
            return Ok(());
        };
        let groups = master.groups.existing_names(&meta.groups);
        if !groups.is_empty() {
            return Err(RestartFailure::GroupsInUse(groups));
        }
        if !master.mailbox.has_room_for(&meta.mailbox) {
            return Err(RestartFailure::Store(
                "the mailbox has no room for the job's entries".into(),
            ));
        }
        let mailbox = master.mailbox.conflicts(&meta.mailbox);
        if !mailbox.is_empty() {
            return Err(RestartFailure::MailboxInUse(mailbox));
        }
        let given: BTreeMap<i32, Tid> = found.context_owners.iter().copied().collect();
        let other =
            |(ctx, owner): &&(i32, Tid)| given.get(ctx).is_some_and(|holder| holder != owner);
        let contexts: Vec<i32> = meta
            .contexts
            .iter()
            .filter(other)
            .map(|(ctx, _)| *ctx)
            .collect();
        if contexts.is_empty() {
            Ok(())
        } else {
            Err(RestartFailure::ContextsInUse(contexts))
        }
    }

    pub(super) fn execute_restart_output(&mut self, output: RestartOutput) {
        let me = self.config.host;
        match output {
            RestartOutput::Order {
                host,
                part: of,
                order,
            } => self.send_migration_order(host, of, order),
            RestartOutput::SendImages { restart, part: of } => {
                let Some(job_checkpoints) = self.job_checkpoints() else {
                    return;
                };
                let Some(number) = job_checkpoints.open_restart_of(restart) else {
                    return;
                };
                let to = (of.to != me).then_some(of.to);
                if to.is_some() {
                    job_checkpoints.parts_in_transfer.insert(of.id);
                }
                self.outputs.push_back(Output::SendPart {
                    restart: number,
                    migration: of.id,
                    tid: of.tid,
                    to,
                });
            }
            RestartOutput::AnnounceLocation(of) => {
                self.restore_shared_state(of.id);
                self.publish_location(&of);
            }
            RestartOutput::Ended { restart, result } => {
                let Some(number) = self
                    .job_checkpoints()
                    .and_then(|k| k.open_restart_of(restart))
                else {
                    return;
                };
                let result = result.map(|tasks| {
                    let set = self
                        .job_checkpoints()
                        .and_then(|k| k.open_restarts.get(&number))
                        .map(|w| w.checkpoint.clone());
                    RestartReport {
                        checkpoint: set.unwrap_or_default(),
                        tasks,
                    }
                });
                self.finish_restart(number, result);
            }
        }
    }

    /// Restores the groups, mailbox entries and contexts of the restarted tasks.
    fn restore_shared_state(&mut self, part: MigrationId) {
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let restart = master.checkpoints.restarts.restart_of(part);
        let number = restart.and_then(|restart| master.checkpoints.open_restart_of(restart));
        let wanted = number.and_then(|number| master.checkpoints.open_restarts.get_mut(&number));
        let Some(OpenRestart {
            meta: Some(meta),
            assigned_contexts,
            ..
        }) = wanted
        else {
            return;
        };
        assigned_contexts.extend(&meta.contexts);
        master.groups.restore(&std::mem::take(&mut meta.groups));
        let (mailbox, contexts) = (
            std::mem::take(&mut meta.mailbox),
            std::mem::take(&mut meta.contexts),
        );
        self.restore_mailbox(mailbox);
        let mut by_host = BTreeMap::<HostId, Vec<(i32, Tid)>>::new();
        for (ctx, owner) in contexts {
            by_host
                .entry(self.context_holder(ctx))
                .or_default()
                .push((ctx, owner));
        }
        for (host, contexts) in by_host {
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
        number: u64,
        result: Result<RestartReport, RestartFailure>,
    ) {
        self.outputs
            .push_back(Output::CloseCheckpoint { restart: number });
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(wanted) = job_checkpoints.open_restarts.remove(&number) else {
            return;
        };
        let OpenRestart {
            checkpoint,
            waiter,
            why,
            meta,
            restart_id,
            assigned_contexts,
            rollback_job: goes_back,
            ..
        } = wanted;
        let job = goes_back
            .or(meta.as_ref().map(|meta| meta.job))
            .unwrap_or_default();
        let members: BTreeSet<Tid> = meta
            .iter()
            .flat_map(|meta| &meta.tasks)
            .map(|part| part.tid)
            .collect();
        let mut next = None;
        // If the job is not being restarted any more, a host was lost and the job already rolls
        // back again.
        if let Some(entry) = job_checkpoints
            .jobs
            .get_mut(&job)
            .filter(|entry| entry.activity == JobActivity::Restarting)
        {
            entry.activity = JobActivity::Idle;
            entry.attempts += 1;
            if result.is_ok() {
                entry.schedule = entry
                    .schedule
                    .or(meta.as_ref().and_then(|meta| meta.schedule));
                (entry.restarted_from, entry.first_task_end) =
                    (Some(checkpoint.clone()), FirstTaskEnd::default());
                (entry.newest_checkpoint, next) = (
                    Some(checkpoint.clone()),
                    entry
                        .schedule
                        .map(|pace| checkpoint_interval(pace, Some(entry.last_duration))),
                );
                (entry.members, entry.ended_members) = (members.clone(), BTreeSet::new());
                entry.recently_dead = RecentDeaths::default();
                entry.attempts = 0;
            } else if goes_back.is_some()
                && (entry.schedule.is_some() || entry.attempts < ATTEMPTS_MAX)
            {
                // The obstacle may disappear, so the job tries again.
                entry.activity = JobActivity::RollingBack {
                    lost: None,
                    not_before: Micros(0),
                    why: why.clone(),
                    checks: 0,
                };
                next = Some(restart_retry_interval(entry.attempts));
            } else {
                job_checkpoints.jobs.remove(&job);
            }
        }
        if let Some(next) = next {
            self.schedule_check(job, next);
        }
        if result.is_ok() {
            // The job runs again, so its checkpoint must not be removed as that of an ended job.
            self.outputs.push_back(Output::MarkCheckpoints {
                checkpoints: vec![checkpoint.clone()],
                ended: false,
                protected: Vec::new(),
            });
        }
        if result.is_err() && restart_id.is_some() {
            self.undo_restart(&members, assigned_contexts);
        }
        self.record(restart_event(checkpoint, job, why, &result));
        if let Some((tid, id)) = waiter {
            self.reply(tid, id, Reply::Restarted(result));
        }
    }

    /// Ends the tasks of a failed restart and releases their contexts.
    fn undo_restart(&mut self, members: &BTreeSet<Tid>, assigned_contexts: Vec<(i32, Tid)>) {
        // The tasks may already be in their groups again. If all were ordered to run, some may
        // be running.
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
    /// host.
    pub(crate) fn handle_part_read(&mut self, id: MigrationId, result: Result<SavedTask, Failure>) {
        // The restart may have been aborted. Then no task must be rebuilt.
        if !self.migrations.is_restoring(id) {
            return;
        }
        match result.and_then(|part| self.prepare_restore(id, part)) {
            Ok(Some(order)) => self.send_to_tasker(order),
            Ok(None) => self.world_calls.push_back(Again::StageState(id)),
            Err(why) => self.target_event(id, TargetEvent::Restored(Err(why))),
        }
    }

    /// Prepares the record of a restarted task. Returns the order that restores its images; `None`
    /// if its program is started again.
    fn prepare_restore(
        &mut self,
        id: MigrationId,
        part: SavedTask,
    ) -> Result<Option<ToTasker>, Failure> {
        let bad = |why: &str| Failure::Images(format!("the record next to the images: {why}"));
        if part.version != CHECKPOINT_VERSION {
            return Err(bad(&format!(
                "it has version {}, but only {CHECKPOINT_VERSION} is supported",
                part.version
            )));
        }
        let place = self.config.paths.clone();
        let redirect = Redirect {
            migration: id,
            tokens: vec![place.resume_token(id)],
        };
        let bytes = redirect.encode().map_err(Failure::Engine)?;
        let SavedTask {
            mut record,
            mut waiting,
            ..
        } = part;
        let again = Some(MemoryWrite {
            address: record.redirect_address,
            bytes,
        });
        let (mut output, mut trace) = Default::default();
        self.apply_tracer_sinks(&mut output, &mut trace);
        let (hosts, epoch) = (
            self.table.hosts.iter().map(|host| host.id).collect(),
            self.table.epoch,
        );
        let arrival = self.arrival_of(id).ok_or(Failure::TaskEnded)?;
        let tid = arrival.tid;
        if record.tid != tid {
            return Err(bad(&format!("it is about {}, not about {tid}", record.tid)));
        }
        if arrival.by_restart != record.handoff.is_some() {
            return Err(bad(
                "it was written by another engine than the checkpoint names",
            ));
        }
        let timeline = arrival.restart_group.take().ok_or(Failure::TaskEnded)?;
        waiting.retain_mut(|held| keep_for_restart(tid, &timeline, held));
        let known = |tid: Tid| timeline.same_vm || timeline.incarnation_before(tid).is_some();
        if !known(record.output.tid) {
            record.output = output;
        }
        if !known(record.trace.tid) {
            record.trace = trace;
        }
        record
            .watermarks
            .retain(|mark| timeline.incarnation_before(mark.peer).is_some());
        (record.known_hosts, record.hosts_epoch, record.exit_rm) = (hosts, epoch, None);
        let mut open = std::mem::take(&mut record.requests);
        // The task was restarted before, and its library was not informed of that restart yet.
        open.extend(
            record
                .restart
                .take()
                .into_iter()
                .flat_map(|restart| restart.requests_to_repeat),
        );
        record.untimed_requests.clear();
        record.restart = Some(RestartInfo {
            group: timeline,
            requests_to_repeat: open,
        });
        arrival.set_saved_state(record, waiting);
        let order = ToTasker::Restore {
            migration: id,
            tid,
            dir: place.image_dir(id),
            memory_write: again,
            memory_socket: None,
        };
        Ok((!arrival.by_restart).then_some(order))
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
fn keep_for_restart(tid: Tid, group: &RestartGroup, item: &mut PendingItem) -> bool {
    let bytes = match item {
        PendingItem::Control(ToTask::Deliver {
            deliver_after: after,
            ..
        }) => {
            *after = after.filter(|mark| group.incarnation_before(mark.peer).is_some());
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
    let frame_line = frame.incarnation;
    let frame = LinkFrame {
        incarnation: group.incarnation,
        ..frame
    };
    *bytes = [&frame.encode_head()[..], &frame.payload].concat().into();
    // If the sender was restarted after this frame, but without this task, the frame is void.
    group
        .incarnation_before(frame.src)
        .is_some_and(|before| !is_later_incarnation(before, frame_line))
}

/// Returns the files that a restart requires, without their lengths. The task may have appended to
/// files since the checkpoint; these are truncated before the task is rebuilt. The engine then
/// checks the lengths of the other files.
fn without_lengths(facts: &TaskFacts) -> TaskFacts {
    let mut facts = facts.clone();
    for file in &mut facts.files {
        match file.requirement {
            FileRequirement::Length | FileRequirement::Exists => {
                (file.requirement, file.bytes) = (FileRequirement::Exists, 0)
            }
            FileRequirement::LengthOrCopied | FileRequirement::ExistsOrCopied => {
                (file.requirement, file.bytes) = (FileRequirement::ExistsOrCopied, 0);
            }
            FileRequirement::Content(_) | FileRequirement::Directory => {}
        }
    }
    facts
}
