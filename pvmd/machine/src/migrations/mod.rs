//! Connects the migration protocol to this daemon: its tasks, tasker, images and resume tokens.
//!
//! The protocol consists of three state machines: the coordinator on the master, and a source and a
//! target per migration on the two hosts. They do no I/O. This module
//!
//! - passes events to the state machines: orders, reports, messages of the tasker, connections and
//!   exits of tasks;
//! - executes the outputs of the state machines ([`Machine::run_protocol_outputs`]);
//! - queues a new migration until the previous migration of the same task has ended on this host;
//! - publishes the new location of a task to all hosts (master only).

mod exits;
mod locations;
mod target;
mod tasker_messages;
use super::io::{LogLevel, LogSubject};

use super::relocation::{ArrivingTask, ForwardedItems, Forwarding};
use super::restart_engine::WorldCall;
use super::suspension::TaskSuspension;
use super::tasks::{ConnectionPhase, Task};
use super::{Machine, Output};
use checkpoint_protocol::{
    Coordinator, CoordinatorOutput, Source, SourceEvent, SourceOutput, Target, TargetEvent,
};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::host::SavedTask;
use sempa_proto::migration::{
    Failure, Migration, MigrationCause, MigrationOrder, Refusal, Step, StepReport,
};
use sempa_proto::suspend;
use sempa_proto::table::TASK_SERVICE_FLAGS;
use sempa_proto::task::{MigrationError, Reply, SendWatermark, ToTask};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Epoch, HostId, MigrationId, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// State of the migrations in which this host is source or target.
#[derive(Debug, Default)]
pub(super) struct LocalMigrations {
    pub(super) sources: BTreeMap<MigrationId, Source>,
    /// Parts of checkpoints whose images are being uploaded to the master. Their tasks already run
    /// again.
    pub(super) uploading_parts: BTreeSet<MigrationId>,
    /// Parts of checkpoints whose tasks have received the replies to their requests.
    pub(super) settled_parts: Vec<MigrationId>,
    /// Record of the task of each snapshot part, saved while all tasks of the job were paused.
    pub(super) part_records: BTreeMap<MigrationId, Box<SavedTask>>,
    targets: BTreeMap<MigrationId, Target>,
    /// Migrations whose task has exited on this host while its images were being transferred. The
    /// coordinator has not decided yet whether the task has ended.
    undecided_exits: BTreeMap<MigrationId, Migration>,
    pub(super) arrivals: BTreeMap<Tid, ArrivingTask>,
    pub(super) forwarding: BTreeMap<Tid, Forwarding>,
    pub(super) unconfirmed_transfers: BTreeMap<Tid, ForwardedItems>,
    /// Hosts whose daemons have connected before.
    pub(super) known_hosts: BTreeSet<HostId>,
    /// For a task, the migration that waits until the task's previous migration has ended on this
    /// host.
    queued_migrations: BTreeMap<Tid, MigrationId>,
}

impl LocalMigrations {
    /// True while this host, as the target of the migration, restores the task.
    pub(super) fn is_restoring(&self, id: MigrationId) -> bool {
        self.targets.get(&id).is_some_and(Target::is_restoring)
    }
}

/// The master's state of all migrations.
#[derive(Debug, Default)]
pub(super) struct CoordinatedMigrations {
    pub(super) coordinator: Coordinator,
    /// Requests that are answered when the migration ends.
    waiters: BTreeMap<MigrationId, (Tid, RequestId)>,
    /// Tasks whose new locations have not been acknowledged by all hosts. Each value contains the
    /// task, the epoch of its new location, and the hosts whose acknowledgement is missing.
    unacknowledged_locations: BTreeMap<MigrationId, (Tid, Epoch, BTreeSet<HostId>)>,
}

impl Machine {
    // ---- on the master only

    /// Starts a migration that the task `requester` has requested. If `must_wait` is true, the
    /// requester gets the reply when the migration has ended, otherwise when it has started.
    pub(super) fn begin_migration(
        &mut self,
        requester: Tid,
        id: RequestId,
        tid: Tid,
        target: &str,
        cause: Option<MigrationCause>,
        must_wait: bool,
    ) {
        let begin_result = self
            .resolve_migration(tid, target)
            .and_then(|(source, target)| {
                let cause = cause.unwrap_or(MigrationCause::Requested {
                    requested_by: requester,
                });
                let now = self.now;
                self.admit_migration(tid, &cause)?;
                let master = self
                    .master
                    .as_mut()
                    .expect("requests to migrate are sent to the master");
                master
                    .migrations
                    .coordinator
                    .begin_migration(now, tid, source, target, cause)
            });
        match begin_result {
            Ok(migration) if must_wait => {
                if let Some(master) = &mut self.master {
                    master.migrations.waiters.insert(migration, (requester, id));
                }
            }
            Ok(migration) => self.reply(requester, id, Reply::MigrationStarted(migration)),
            Err(refusal) if must_wait => {
                let error = MigrationError {
                    step: Step::Inspect,
                    failure: Failure::Refused(vec![refusal]),
                };
                self.reply(requester, id, Reply::Migrated(Err(error)));
            }
            Err(refusal) => {
                let reason = format!("{tid} was not migrated to {target}: {refusal}");
                self.reply_error(requester, id, refusal_code(&refusal), reason);
            }
        }
    }

    fn resolve_migration(&self, tid: Tid, target: &str) -> Result<(HostId, HostId), Refusal> {
        let target = self.host_by_name(target).ok_or(Refusal::NoSuchHost)?;
        let source = self
            .location(tid)
            .filter(|host| tid.is_task() && self.table.get(*host).is_some());
        Ok((source.ok_or(Refusal::NoSuchTask)?, target))
    }

    /// Returns the host with this name, or with this host tid in hexadecimal.
    pub(super) fn host_by_name(&self, name: &str) -> Option<HostId> {
        let find_by_tid = || {
            let digits = name
                .strip_prefix('t')
                .or_else(|| name.strip_prefix("0x"))
                .unwrap_or(name);
            let tid = Tid::from_raw(i32::from_str_radix(digits, 16).ok()?);
            self.table.get(super::requests::named_host(tid)?)
        };
        self.table
            .find_by_name(name)
            .or_else(find_by_tid)
            .map(|host| host.id)
    }

    fn run_coordinator_output(&mut self, output: CoordinatorOutput) {
        if let Some((tid, step)) = output.started_step() {
            self.push_step_starting(tid, Some(step));
        }
        match output {
            CoordinatorOutput::Order {
                host,
                migration: ordered_migration,
                order,
            } => self.send_migration_order(host, ordered_migration, order),
            CoordinatorOutput::RecordLocation(Migration { id, tid, to, .. }) => {
                self.outputs.push_back(Output::RecordMigration {
                    migration: id,
                    tid,
                    target: to,
                });
            }
            CoordinatorOutput::AnnounceLocation(ordered_migration) => {
                self.publish_location(&ordered_migration)
            }
            CoordinatorOutput::LogEvent(kind) => {
                // Neither source nor target reports the commit step.
                if let EventKind::MigrationStep {
                    tid,
                    step: Step::Commit,
                    ..
                } = kind
                {
                    self.outputs.push_back(Output::StepEnded {
                        tid,
                        step: Step::Commit,
                    });
                }
                self.record_event(kind);
            }
            CoordinatorOutput::SuspendDecided {
                host,
                migration,
                request: id,
                suspensions,
            } if host == self.config.host => {
                self.handle_suspend_decision(migration, id, suspensions);
            }
            CoordinatorOutput::SuspendDecided {
                host,
                migration,
                request: id,
                suspensions,
            } => {
                self.send_to_host(
                    host,
                    HostMsg::SuspendDecided {
                        migration,
                        id,
                        suspensions,
                    },
                );
            }
            CoordinatorOutput::Ended { id, result } => {
                let waiter = self
                    .master
                    .as_mut()
                    .and_then(|master| master.migrations.waiters.remove(&id));
                if let Some((tid, request)) = waiter {
                    self.reply(tid, request, Reply::Migrated(result));
                }
            }
        }
    }

    /// Sends an order to the source or the target of a migration.
    pub(super) fn send_migration_order(
        &mut self,
        host: HostId,
        migration: Migration,
        order: MigrationOrder,
    ) {
        if host == self.config.host {
            self.handle_migration_order(migration, order);
        } else {
            self.send_to_host(host, HostMsg::MigrationOrder { migration, order });
        }
    }

    /// Notifies the coordinators of migrations, checkpoints and restarts that a host is lost.
    pub(super) fn notify_coordinators_of_lost_host(&mut self, host: HostId) {
        let (now, replacement_time) = (self.now, self.replacement_time(host));
        if self.master.is_some() {
            self.record_lost_lease(host);
        }
        let Some(master) = &mut self.master else {
            return;
        };
        let coordinator = &mut master.migrations.coordinator;
        coordinator.on_host_lost(now, host, replacement_time);
        master.checkpoints.snapshots.on_host_lost(host);
        master.checkpoints.restarts.on_host_lost(host);
        master
            .migrations
            .unacknowledged_locations
            .values_mut()
            .for_each(|(_, _, unacknowledged_hosts)| {
                unacknowledged_hosts.remove(&host);
            });
        self.complete_acknowledged_locations();
    }

    /// Passes the report of a source or a target to the coordinator of its migration, checkpoint or
    /// restart.
    pub(super) fn handle_step_report(
        &mut self,
        host: HostId,
        migration: MigrationId,
        report: StepReport,
    ) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let coordinator = &mut master.migrations.coordinator;
        if master
            .checkpoints
            .snapshots
            .snapshot_of(migration)
            .is_some()
        {
            master
                .checkpoints
                .snapshots
                .on_report(now, host, migration, report);
        } else if master.checkpoints.restarts.restart_of(migration).is_some() {
            master
                .checkpoints
                .restarts
                .on_report(now, host, migration, report, || coordinator.generate_id());
        } else {
            coordinator.on_report(now, host, migration, report);
        }
    }

    /// Passes a request of `host` to suspend or resume a migrating task to the coordinator, which
    /// decides on the request.
    pub(super) fn pass_suspend_to_coordinator(
        &mut self,
        host: HostId,
        id: MigrationId,
        request: RequestId,
        order: &suspend::SuspendOrder,
    ) {
        if let Some(master) = &mut self.master {
            master
                .migrations
                .coordinator
                .on_suspend_request(host, id, request, order);
        }
    }

    /// Handles the result of writing the commit record to disk.
    pub(super) fn handle_commit_recorded(
        &mut self,
        migration: MigrationId,
        result: Result<(), Failure>,
    ) {
        if let Some(master) = &mut self.master {
            master
                .migrations
                .coordinator
                .on_location_recorded(migration, result);
        }
    }

    // ---- on every host

    /// Executes all outputs of the protocols. Returns true if there were any.
    pub(super) fn run_protocol_outputs(&mut self) -> bool {
        let mut has_run = false;
        while let Some(output) = self
            .master
            .as_mut()
            .and_then(|m| m.migrations.coordinator.poll())
        {
            has_run = true;
            self.run_coordinator_output(output);
        }
        has_run |= self.run_checkpoint_outputs();
        for part_id in std::mem::take(&mut self.migrations.settled_parts) {
            has_run = true;
            self.handle_part_settled(part_id);
        }
        for id in self.migrations.sources.keys().copied().collect::<Vec<_>>() {
            while let Some(output) = self.migrations.sources.get_mut(&id).and_then(Source::poll) {
                has_run = true;
                self.run_source_output(id, output);
            }
        }
        for id in self.migrations.targets.keys().copied().collect::<Vec<_>>() {
            while let Some(output) = self.migrations.targets.get_mut(&id).and_then(Target::poll) {
                has_run = true;
                self.run_target_output(id, output);
            }
        }
        has_run
    }

    pub(super) fn send_step_report(&mut self, migration: MigrationId, report: StepReport) {
        if self.master.is_some() {
            self.handle_step_report(self.config.host, migration, report);
        } else {
            self.send_to_host(HostId::MASTER, HostMsg::StepReport { migration, report });
        }
    }

    fn push_step_starting(&mut self, tid: Tid, step: Option<Step>) {
        self.outputs
            .extend(step.map(|step| Output::StepStarting { tid, step }));
    }

    fn push_step_ended(&mut self, tid: Tid, report: &StepReport) {
        if !matches!(report, StepReport::Failed { .. }) {
            self.outputs.push_back(Output::StepEnded {
                tid,
                step: report.step(),
            });
        }
    }

    pub(super) fn handle_migration_order(&mut self, migration: Migration, order: MigrationOrder) {
        let id = migration.id;
        match order {
            MigrationOrder::Inspect => {
                self.migrations.sources.insert(id, Source::new(migration));
            }
            MigrationOrder::Prepare {
                facts,
                suspensions: source_suspensions,
                restart_group,
                supports_post_copy,
                pre_copy,
            } => {
                let token_path = self.config.paths.resume_token_path(id);
                let mut arrival = ArrivingTask::new(migration.tid, id, migration.from);
                arrival.restart_group = restart_group;
                arrival.suspension = TaskSuspension::update(None, self.now, source_suspensions);
                self.migrations.arrivals.insert(migration.tid, arrival);
                self.migrations.targets.insert(
                    id,
                    Target::new(migration, facts, token_path, supports_post_copy, pre_copy),
                );
            }
            MigrationOrder::Abort if self.migrations.uploading_parts.remove(&id) => {
                self.outputs.push_back(Output::DropImages { migration: id })
            }
            MigrationOrder::Pause | MigrationOrder::Dump { .. } | MigrationOrder::Abort => {
                match self.migrations.sources.get_mut(&id) {
                    Some(_) => self.pass_to_source(id, SourceEvent::Order(order)),
                    None if order == MigrationOrder::Abort => {}
                    None => self.send_step_report(
                        id,
                        StepReport::Failed {
                            step: Step::Quiesce,
                            failure: Failure::TaskEnded,
                        },
                    ),
                }
            }
            MigrationOrder::Depart { .. }
            | MigrationOrder::Resume { .. }
            | MigrationOrder::Release => match self.migrations.sources.get_mut(&id) {
                Some(_) => {
                    if let MigrationOrder::Resume { suspensions } = order {
                        self.apply_suspensions(migration.tid, suspensions);
                    }
                    self.pass_to_source(id, SourceEvent::Order(order));
                }
                None if self.migrations.undecided_exits.contains_key(&id) => {
                    self.resolve_deferred_exit(id, &order)
                }
                None if matches!(order, MigrationOrder::Resume { .. }) => {}
                None => {
                    let step = if order == MigrationOrder::Release {
                        Step::KillSource
                    } else {
                        Step::Quiesce
                    };
                    self.send_step_report(
                        id,
                        StepReport::Failed {
                            step,
                            failure: Failure::TaskEnded,
                        },
                    );
                }
            },
            MigrationOrder::Discard | MigrationOrder::Run { .. } => {
                match self.migrations.targets.get_mut(&id) {
                    Some(target) => target.handle(TargetEvent::Order(order)),
                    None if order == MigrationOrder::Discard => {}
                    None => {
                        let why = Failure::Cancelled("the target has discarded it".into());
                        self.send_step_report(
                            id,
                            StepReport::Failed {
                                step: Step::Run,
                                failure: why,
                            },
                        );
                    }
                }
            }
        }
    }

    fn run_source_output(&mut self, id: MigrationId, output: SourceOutput) {
        let Some(migration) = self
            .migrations
            .sources
            .get(&id)
            .map(|s| s.migration().clone())
        else {
            return;
        };
        let tid = migration.tid;
        if matches!(output, SourceOutput::Inspect) && self.must_wait_for_previous(&migration) {
            self.migrations.queued_migrations.insert(tid, id);
            return self.resume_to_quiesce(tid);
        }
        self.push_step_starting(tid, output.started_step());
        match output {
            SourceOutput::Report(report) => {
                self.push_step_ended(tid, &report);
                self.send_step_report(id, report);
            }
            SourceOutput::Inspect => self.inspect_for_migration(id, &migration),
            SourceOutput::BufferIncoming => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.holds_items = true;
                }
            }
            SourceOutput::Quiesce { resume_token } => {
                self.quiesce_for_migration(id, tid, resume_token)
            }
            SourceOutput::RequestExit { engine } => self.begin_graceful_exit(id, tid, engine),
            SourceOutput::Stop => self.stop_for_migration(id, tid),
            SourceOutput::AwaitReplies => self.begin_awaiting_replies(id, tid, None),
            SourceOutput::SaveTaskState {
                open_requests,
                ended_tasks,
            } => {
                self.begin_awaiting_exits(id, tid, ended_tasks);
                self.begin_awaiting_replies(id, tid, Some(open_requests));
            }
            SourceOutput::CopyStateFiles => self.world_calls.push_back(WorldCall::CollectState(id)),
            SourceOutput::ResumeTask => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.transferring_migration = None;
                }
                if !self.abort_graceful_exit(id, tid) {
                    self.send_to_tasker(ToTasker::AbortMigration { migration: id, tid });
                }
            }
            SourceOutput::WriteResumeToken => {
                if !self.resume_exiting_library(id, tid) && !self.resume_after_abort(id, tid) {
                    self.write_resume_token(id);
                }
            }
            SourceOutput::DeliverBuffered => self.release_inbox(tid),
            SourceOutput::KillSource => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.is_being_killed = true;
                }
                if !self.report_respawning_copy_killed(id, tid) {
                    self.send_to_tasker(ToTasker::KillSource { migration: id, tid });
                }
            }
            SourceOutput::TransferOwnership => self.transfer_ownership(&migration),
            SourceOutput::Done => {
                self.migrations.sources.remove(&id);
                self.forget_part(id, tid);
                self.outputs.push_back(Output::RemoveToken {
                    path: self.config.paths.resume_token_path(id),
                });
                self.start_queued_migration(tid);
            }
            SourceOutput::OpenMemoryStream
            | SourceOutput::PreCopy
            | SourceOutput::DiscardPreCopy
            | SourceOutput::Dump { .. }
            | SourceOutput::Upload
            | SourceOutput::StartSendingImages
            | SourceOutput::FinishSendingImages
            | SourceOutput::SendRecord
            | SourceOutput::DropImages => self.run_source_transfer(&migration, &output),
        }
    }

    /// Executes the outputs of the source that concern memory, images and the task's record.
    fn run_source_transfer(&mut self, migration: &Migration, output: &SourceOutput) {
        let Migration {
            id,
            tid,
            to: target,
            ..
        } = *migration;
        match output {
            SourceOutput::OpenMemoryStream => self.outputs.push_back(Output::ServeMemory {
                migration: id,
                target,
            }),
            SourceOutput::PreCopy => {
                let memory_socket = self.config.paths.memory_socket_path(id);
                self.send_to_tasker(ToTasker::PreCopy {
                    migration: id,
                    tid,
                    memory_socket_path: memory_socket,
                });
            }
            SourceOutput::DiscardPreCopy => {
                self.send_to_tasker(ToTasker::StopPreCopy { migration: id })
            }
            SourceOutput::Dump { post_copy } => {
                let dir = self.config.paths.image_dir(id);
                let memory_socket = post_copy.then(|| self.config.paths.memory_socket_path(id));
                self.send_to_tasker(ToTasker::Dump {
                    migration: id,
                    tid,
                    image_dir: dir,
                    memory_socket_path: memory_socket,
                });
            }
            SourceOutput::Upload => self.upload_part(id),
            SourceOutput::StartSendingImages => self.outputs.push_back(Output::SendImagesEarly {
                migration: id,
                target,
            }),
            SourceOutput::FinishSendingImages => {
                self.send_record(migration, false);
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.transferring_migration = Some(id);
                }
                self.outputs.push_back(Output::SendImages {
                    migration: id,
                    target,
                });
            }
            SourceOutput::SendRecord => self.send_task_without_process(migration),
            SourceOutput::DropImages => {
                self.outputs.push_back(Output::DropImages { migration: id })
            }
            _ => {}
        }
    }

    /// Inspects a task for a migration. The tasker inspects the task, unless the daemon already
    /// knows the result.
    fn inspect_for_migration(&mut self, id: MigrationId, migration: &Migration) {
        let tid = migration.tid;
        // This host may still have the source of an earlier migration that was aborted before the
        // source buffered items for the task. Such sources are removed.
        self.migrations.sources.retain(|source_id, s| {
            *source_id == id || s.migration().tid != tid || s.buffers_incoming()
        });
        let refusal = self.migration_refusal(tid).map(Err);
        match refusal.or_else(|| self.inspect_without_criu(tid, Some(&migration.cause))) {
            Some(result) => self.handle_inspection(id, tid, result, (false, false)),
            None => self.send_to_tasker(ToTasker::Inspect { migration: id, tid }),
        }
    }

    /// Requests a task's library to quiesce, unless it is already quiescing for a pause.
    fn quiesce_for_migration(
        &mut self,
        id: MigrationId,
        tid: Tid,
        extra_token_path: Option<PathBuf>,
    ) {
        let resume_token_paths: Vec<_> = std::iter::once(self.config.paths.resume_token_path(id))
            .chain(extra_token_path)
            .collect();
        if !self.quiesce_paused_guest(id, tid, &resume_token_paths)
            && let Some(conn) = self.tasks.get(tid).and_then(Task::conn)
        {
            let message = ToTask::Quiesce {
                migration: id,
                token_paths: resume_token_paths,
            };
            self.outputs.push_back(Output::SendToTask { conn, message });
        }
    }

    /// True while a new migration of the task must wait, for one of these reasons:
    ///
    /// - The task has migrated to this host, and its library has not connected yet.
    /// - An earlier migration was aborted, and the task is being resumed.
    /// - The library of a paused guest is reconnecting.
    /// - The task must be paused and its program has just been restarted.
    ///
    /// The deadline of the coordinator limits the wait.
    fn must_wait_for_previous(&self, migration: &Migration) -> bool {
        let is_resuming_after_abort = |s: &Source| {
            s.migration().tid == migration.tid
                && s.migration().id != migration.id
                && s.buffers_incoming()
        };
        let is_reconnecting = self
            .tasks
            .get(migration.tid)
            .is_some_and(|t| t.pause.as_ref().is_some_and(|pause| pause.is_resuming));
        let is_arriving = self
            .migrations
            .arrivals
            .get(&migration.tid)
            .is_some_and(|a| a.is_located);
        // A task that was not restarted may never connect.
        let awaits_restarted_program = |t: &Task| {
            t.connection_phase == ConnectionPhase::Expected
                && t.launch_info
                    .as_ref()
                    .is_some_and(|launch| launch.restart_count > 0)
        };
        let is_restarting_paused = self
            .tasks
            .get(migration.tid)
            .is_some_and(awaits_restarted_program)
            && self.must_pause(migration.tid);
        is_arriving
            || is_reconnecting
            || is_restarting_paused
            || self
                .migrations
                .sources
                .values()
                .any(is_resuming_after_abort)
    }

    /// Starts the queued migration of a task, if there is one. Called when the task's previous
    /// migration has ended.
    pub(super) fn start_queued_migration(&mut self, tid: Tid) {
        if let Some(id) = self.migrations.queued_migrations.remove(&tid) {
            self.run_source_output(id, SourceOutput::Inspect);
        }
    }

    /// Returns the reason why the task cannot migrate to any host; `None` if this daemon knows no
    /// such reason.
    pub(super) fn migration_refusal(&self, tid: Tid) -> Option<Refusal> {
        if let Some(refusal) = self.no_tasker_refusal() {
            return Some(refusal);
        }
        let Some(task) = self.tasks.get(tid) else {
            return Some(Refusal::NoSuchTask);
        };
        if !task.is_spawned() {
            Some(Refusal::NotSpawned)
        } else if task.pinned || task.flags & TASK_SERVICE_FLAGS != 0 {
            Some(Refusal::Pinned)
        } else if task.debugged {
            // A task counts as debugged even before its debugger attaches, and while the debugger
            // is detached.
            Some(Refusal::Debugged)
        } else if (task.conn().is_none() && !task.is_quiesced()) || task.exit_report.is_some() {
            Some(Refusal::NotConnected)
        } else {
            None
        }
    }

    /// Passes an event to the source of a migration. Has no effect if this host is not the source.
    pub(super) fn pass_to_source(&mut self, id: MigrationId, event: SourceEvent) {
        if let Some(source) = self.migrations.sources.get_mut(&id) {
            source.handle(event);
        }
    }

    /// Passes an event to the target of a migration. Has no effect if this host is not the target.
    pub(super) fn pass_to_target(&mut self, id: MigrationId, event: TargetEvent) {
        if let Some(target) = self.migrations.targets.get_mut(&id) {
            target.handle(event);
        }
    }

    pub(super) fn arrival_of(&mut self, migration: MigrationId) -> Option<&mut ArrivingTask> {
        self.migrations
            .arrivals
            .values_mut()
            .find(|a| a.migration == migration)
    }

    /// Handles the report of a library that it is quiesced. The library closes its socket next.
    pub(super) fn handle_library_quiesced(
        &mut self,
        tid: Tid,
        migration: MigrationId,
        watermarks: Vec<SendWatermark>,
    ) {
        let is_migrating = self
            .migrations
            .sources
            .get(&migration)
            .is_some_and(|s| s.migration().tid == tid);
        match self.tasks.get_mut(tid) {
            Some(task) if is_migrating || task.has_resume_id(migration) => {
                task.raise_watermarks(watermarks);
                task.has_quiesced = true;
            }
            _ => self.log_line(
                LogLevel::Warning,
                Some(LogSubject::Migration(migration)),
                format!("{tid} quiesced for {migration}, which is none of its migrations"),
            ),
        }
    }

    /// Handles the closed socket of a quiesced library.
    pub(super) fn handle_quiesce_completed(&mut self, tid: Tid) {
        // The library of a guest that is being resumed finds its token immediately. It reconnects
        // and then quiesces for the migration.
        if !self
            .tasks
            .get(tid)
            .is_some_and(|t| t.pause.as_ref().is_some_and(|pause| pause.is_resuming))
        {
            self.notify_sources(tid, SourceEvent::Quiesced);
        }
    }

    /// Notifies the sources of the task's migrations that its library has connected again.
    pub(super) fn notify_sources_reconnected(&mut self, tid: Tid) {
        self.notify_sources(tid, SourceEvent::Reconnected);
    }

    /// Notifies the sources of the task's migrations that its process continues after an abort.
    pub(super) fn notify_sources_continued(&mut self, tid: Tid) {
        self.notify_sources(tid, SourceEvent::TaskResumed);
    }

    /// Notifies the sources of the task's migrations that the task has ended or left the virtual
    /// machine, so that it cannot migrate any more.
    pub(super) fn notify_sources_ended(&mut self, tid: Tid) {
        self.notify_sources(tid, SourceEvent::TaskExited);
    }

    fn notify_sources(&mut self, tid: Tid, event: SourceEvent) {
        self.migrations
            .sources
            .values_mut()
            .filter(|s| s.migration().tid == tid)
            .for_each(|s| s.handle(event.clone()));
    }
}

fn refusal_code(refusal: &Refusal) -> PvmError {
    match refusal {
        Refusal::NoSuchTask => PvmError::NoTask,
        Refusal::NoSuchHost => PvmError::NoHost,
        Refusal::AlreadyMigrating(_) => PvmError::Already,
        Refusal::TooManyMigrations { .. } => PvmError::OutOfRes,
        _ => PvmError::Denied,
    }
}
