//! Connects the migration protocol to this daemon: its tasks, tasker, images and resume tokens.
//!
//! The protocol consists of three state machines: the coordinator on the master, and a source and a
//! target per migration on the two hosts. They do no I/O. This module
//!
//! - passes events to them: orders, reports, messages of the tasker, connections and exits of
//!   tasks;
//! - executes their outputs ([`Machine::pump_moves`]);
//! - keeps a new migration waiting until the previous one of the same task is over on this host;
//! - makes the new location of a task known to all hosts (master only).

use super::engines::Job;
use super::handover::{Arrival, Departed, HandedOver};
use super::suspend::Suspended;
use super::tasks::{Phase, Task};
use super::{Machine, Output};
use checkpoint_protocol::{
    Coordinator, CoordinatorOutput, Source, SourceEvent, SourceOutput, Target, TargetEvent,
    TargetOutput,
};
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::host::SavedTask;
use sempa_proto::host::{HostMsg, Location};
use sempa_proto::migration::{
    Failure, FinalSourceState, Migration, MigrationCause, MigrationOrder, Refusal, Step,
    StepReport, TaskFacts, Usage,
};
use sempa_proto::suspend;
use sempa_proto::table::TASK_SERVICE_FLAGS;
use sempa_proto::task::{MigrationError, Reply, SendWatermark, ToTask};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{Epoch, HostId, MigrationId, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// State of the migrations in which this host is source or target.
#[derive(Debug, Default)]
pub(super) struct Moves {
    pub(super) sources: BTreeMap<MigrationId, Source>,
    /// Images of checkpoints that are being uploaded to the master. Their tasks run again already.
    pub(super) deposits: BTreeSet<MigrationId>,
    /// Parts of checkpoints whose tasks have received the replies to their requests.
    pub(super) settled: Vec<MigrationId>,
    /// Records of tasks, taken while all tasks of their jobs were paused.
    pub(super) parts: BTreeMap<MigrationId, Box<SavedTask>>,
    targets: BTreeMap<MigrationId, Target>,
    /// Migrations whose task has exited here while its images were being transferred. The
    /// coordinator has not decided yet whether the task has ended.
    open_ends: BTreeMap<MigrationId, Migration>,
    pub(super) arrivals: BTreeMap<Tid, Arrival>,
    pub(super) departed: BTreeMap<Tid, Departed>,
    pub(super) handed_over: BTreeMap<Tid, HandedOver>,
    /// Hosts whose daemons have connected before.
    pub(super) heard: BTreeSet<HostId>,
    /// Migrations that wait until the previous one of the same task is over on this host.
    next: BTreeMap<Tid, MigrationId>,
}

impl Moves {
    /// True while the task is being restored here.
    pub(super) fn is_restoring(&self, id: MigrationId) -> bool {
        self.targets.get(&id).is_some_and(Target::is_restoring)
    }
}

/// The master's state of all migrations.
#[derive(Debug, Default)]
pub(super) struct Directing {
    pub(super) coordinator: Coordinator,
    /// Requests that are answered when the migration ends.
    waiters: BTreeMap<MigrationId, (Tid, RequestId)>,
    /// The task, the epoch and the hosts that have not acknowledged its new location.
    locating: BTreeMap<MigrationId, (Tid, Epoch, BTreeSet<HostId>)>,
}

impl Machine {
    // ---- on the master only

    /// Starts a migration that a task has requested.
    pub(super) fn begin_move(
        &mut self,
        by: Tid,
        id: RequestId,
        tid: Tid,
        to: &str,
        cause: Option<MigrationCause>,
        wait: bool,
    ) {
        let begun = self.check_move(tid, to).and_then(|(from, to)| {
            let cause = cause.unwrap_or(MigrationCause::Requested { requested_by: by });
            let now = self.now;
            self.make_way(tid, &cause)?;
            let master = self
                .master
                .as_mut()
                .expect("requests to move come to the master");
            master
                .directing
                .coordinator
                .begin(now, tid, from, to, cause)
        });
        match begun {
            Ok(migration) if wait => {
                if let Some(master) = &mut self.master {
                    master.directing.waiters.insert(migration, (by, id));
                }
            }
            Ok(migration) => self.reply(by, id, Reply::MigrationStarted(migration)),
            Err(refusal) if wait => {
                let error = MigrationError {
                    step: Step::Inspect,
                    why: Failure::Refused(vec![refusal]),
                };
                self.reply(by, id, Reply::Migrated(Err(error)));
            }
            Err(refusal) => {
                let reason = format!("{tid} was not moved to {to}: {refusal}");
                self.fail(by, id, code_of(&refusal), reason);
            }
        }
    }

    fn check_move(&self, tid: Tid, to: &str) -> Result<(HostId, HostId), Refusal> {
        let to = self.host_named(to).ok_or(Refusal::NoSuchHost)?;
        let from = self
            .location(tid)
            .filter(|host| tid.is_task() && self.table.get(*host).is_some());
        Ok((from.ok_or(Refusal::NoSuchTask)?, to))
    }

    /// Returns the host with this name or host tid.
    pub(super) fn host_named(&self, name: &str) -> Option<HostId> {
        let by_tid = || {
            let digits = name
                .strip_prefix('t')
                .or_else(|| name.strip_prefix("0x"))
                .unwrap_or(name);
            let tid = Tid::from_raw(i32::from_str_radix(digits, 16).ok()?);
            self.table.get(super::requests::host_of(tid)?)
        };
        self.table.by_name(name).or_else(by_tid).map(|host| host.id)
    }

    fn coordinate(&mut self, output: CoordinatorOutput) {
        if let Some((tid, step)) = output.started_step() {
            self.step_begins(tid, Some(step));
        }
        match output {
            CoordinatorOutput::Order {
                host,
                migration: of,
                order,
            } => self.order_move(host, of, order),
            CoordinatorOutput::RecordLocation(Migration { id, tid, to, .. }) => {
                self.out.push_back(Output::RecordMove {
                    migration: id,
                    tid,
                    to,
                });
            }
            CoordinatorOutput::AnnounceLocation(of) => self.locate(&of),
            CoordinatorOutput::LogEvent(kind) => {
                // Neither end reports this step.
                if let EventKind::MigrationStep {
                    tid,
                    step: Step::Commit,
                    ..
                } = kind
                {
                    self.out.push_back(Output::StepEnded {
                        tid,
                        step: Step::Commit,
                    });
                }
                self.record(kind);
            }
            CoordinatorOutput::SuspendDecided {
                host,
                migration,
                request: id,
                suspensions: suspended,
            } if host == self.config.host => {
                self.suspend_decided(migration, id, suspended);
            }
            CoordinatorOutput::SuspendDecided {
                host,
                migration,
                request: id,
                suspensions: suspended,
            } => {
                self.tell_host(
                    host,
                    HostMsg::SuspendDecided {
                        migration,
                        id,
                        suspensions: suspended,
                    },
                );
            }
            CoordinatorOutput::Ended { id, result } => {
                let waiter = self
                    .master
                    .as_mut()
                    .and_then(|master| master.directing.waiters.remove(&id));
                if let Some((tid, request)) = waiter {
                    self.reply(tid, request, Reply::Migrated(result));
                }
            }
        }
    }

    /// Sends an order to one end of a migration.
    pub(super) fn order_move(&mut self, host: HostId, of: Migration, order: MigrationOrder) {
        if host == self.config.host {
            self.move_order(of, order);
        } else {
            self.tell_host(
                host,
                HostMsg::MigrationOrder {
                    migration: of,
                    order,
                },
            );
        }
    }

    /// Makes the new location of a task known to all hosts.
    pub(super) fn locate(&mut self, of: &Migration) {
        let epoch = self.next_epoch();
        let from = if of.to == of.from {
            self.location(of.tid).unwrap_or(of.from)
        } else {
            of.from
        };
        // No daemon has anything in flight to the previous location of a task from a checkpoint.
        let from = if of.cause == MigrationCause::Restart {
            of.to
        } else {
            from
        };
        let location = Location {
            tid: of.tid,
            host: of.to,
            from,
            epoch,
        };
        let mut waiting: BTreeSet<HostId> = self.other_hosts().into_iter().collect();
        if let Some(master) = &mut self.master {
            waiting.extend(master.hosts.joining());
            master
                .directing
                .locating
                .insert(of.id, (of.tid, epoch, waiting.clone()));
        }
        for host in waiting {
            self.tell_host(host, HostMsg::TaskLocation(location));
        }
        self.apply_location(location);
        self.locating_step();
    }

    /// A host has acknowledged the new location of a task.
    pub(super) fn located_heard(&mut self, host: HostId, tid: Tid, epoch: Epoch) {
        let Some(master) = &mut self.master else {
            return;
        };
        for (who, when, waiting) in master.directing.locating.values_mut() {
            if (*who, *when) == (tid, epoch) {
                waiting.remove(&host);
            }
        }
        self.locating_step();
    }

    fn locating_step(&mut self) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let (
            Directing {
                coordinator,
                locating,
                ..
            },
            keeping,
        ) = (&mut master.directing, &mut master.keeping);
        locating.retain(|id, (_, _, waiting)| {
            if waiting.is_empty() {
                coordinator.on_location_announced(now, *id);
                keeping.restarts.on_location_announced(now, *id);
            }
            !waiting.is_empty()
        });
    }

    /// Notifies the coordinators of migrations, checkpoints and restarts that a host is lost.
    pub(super) fn coordinator_lost(&mut self, host: HostId) {
        let now = self.now;
        let Some(master) = &mut self.master else {
            return;
        };
        master.directing.coordinator.on_host_lost(now, host);
        master.keeping.cuts.on_host_lost(host);
        master.keeping.restarts.on_host_lost(host);
        master
            .directing
            .locating
            .values_mut()
            .for_each(|(_, _, waiting)| {
                waiting.remove(&host);
            });
        self.locating_step();
    }

    /// Passes the report of one end to the coordinator of its migration, checkpoint or restart.
    pub(super) fn move_reported(
        &mut self,
        host: HostId,
        migration: MigrationId,
        report: StepReport,
    ) {
        let now = self.now;
        let Some(master) = self.master.as_deref_mut() else {
            return;
        };
        let coordinator = &mut master.directing.coordinator;
        if master.keeping.cuts.snapshot_of(migration).is_some() {
            master.keeping.cuts.on_report(now, host, migration, report);
        } else if master.keeping.restarts.restart_of(migration).is_some() {
            master
                .keeping
                .restarts
                .on_report(now, host, migration, report, || coordinator.next_id());
        } else {
            coordinator.on_report(now, host, migration, report);
        }
    }

    /// Passes a request to suspend or resume a migrating task to the coordinator, which decides. It
    /// was made at the host `host`.
    pub(super) fn coordinate_suspend(
        &mut self,
        host: HostId,
        id: MigrationId,
        number: RequestId,
        order: &suspend::SuspendOrder,
    ) {
        if let Some(master) = &mut self.master {
            master
                .directing
                .coordinator
                .on_suspend_request(host, id, number, order);
        }
    }

    /// The commit record was written to disk, or could not be written.
    pub(super) fn move_recorded(&mut self, migration: MigrationId, result: Result<(), Failure>) {
        if let Some(master) = &mut self.master {
            master
                .directing
                .coordinator
                .on_location_recorded(migration, result);
        }
    }

    // ---- on every host

    /// Executes all outputs of the protocol. Returns true if there were any.
    pub(super) fn pump_moves(&mut self) -> bool {
        let mut busy = false;
        while let Some(output) = self
            .master
            .as_mut()
            .and_then(|m| m.directing.coordinator.poll())
        {
            busy = true;
            self.coordinate(output);
        }
        busy |= self.pump_keeping();
        for part in std::mem::take(&mut self.moves.settled) {
            busy = true;
            self.part_settled(part);
        }
        for id in self.moves.sources.keys().copied().collect::<Vec<_>>() {
            while let Some(output) = self.moves.sources.get_mut(&id).and_then(Source::poll) {
                busy = true;
                self.source_does(id, output);
            }
        }
        for id in self.moves.targets.keys().copied().collect::<Vec<_>>() {
            while let Some(output) = self.moves.targets.get_mut(&id).and_then(Target::poll) {
                busy = true;
                self.target_does(id, output);
            }
        }
        busy
    }

    pub(super) fn report(&mut self, migration: MigrationId, report: StepReport) {
        if self.master.is_some() {
            self.move_reported(self.config.host, migration, report);
        } else {
            self.tell_host(HostId::MASTER, HostMsg::StepReport { migration, report });
        }
    }

    fn step_begins(&mut self, tid: Tid, step: Option<Step>) {
        self.out
            .extend(step.map(|step| Output::StepBegins { tid, step }));
    }

    fn step_ended(&mut self, tid: Tid, report: &StepReport) {
        if !matches!(report, StepReport::Failed { .. }) {
            self.out.push_back(Output::StepEnded {
                tid,
                step: report.step(),
            });
        }
    }

    /// Handles an order of the coordinator.
    pub(super) fn move_order(&mut self, of: Migration, order: MigrationOrder) {
        let id = of.id;
        match order {
            MigrationOrder::Inspect => {
                self.moves.sources.insert(id, Source::new(of));
            }
            MigrationOrder::Prepare {
                facts,
                suspensions: suspended,
                restart_group: timeline,
                supports_post_copy: memory_can_follow,
                pre_copy: pre_copies,
            } => {
                let token = self.config.place.resume_token(id);
                let mut arrival = Arrival::new(of.tid, id, of.from);
                arrival.begins = timeline;
                arrival.suspended = Suspended::from(None, self.now, suspended);
                self.moves.arrivals.insert(of.tid, arrival);
                self.moves.targets.insert(
                    id,
                    Target::new(of, facts, token, memory_can_follow, pre_copies),
                );
            }
            MigrationOrder::Abort if self.moves.deposits.remove(&id) => {
                self.out.push_back(Output::DropImages { migration: id })
            }
            MigrationOrder::Pause | MigrationOrder::Dump { .. } | MigrationOrder::Abort => {
                match self.moves.sources.get_mut(&id) {
                    Some(_) => self.source_event(id, SourceEvent::Order(order)),
                    None if order == MigrationOrder::Abort => {}
                    None => self.report(
                        id,
                        StepReport::Failed {
                            step: Step::Quiesce,
                            why: Failure::TaskEnded,
                        },
                    ),
                }
            }
            MigrationOrder::Depart { .. }
            | MigrationOrder::Resume { .. }
            | MigrationOrder::Release => match self.moves.sources.get_mut(&id) {
                Some(_) => {
                    if let MigrationOrder::Resume { suspensions } = order {
                        self.hold_as(of.tid, suspensions);
                    }
                    self.source_event(id, SourceEvent::Order(order));
                }
                None if self.moves.open_ends.contains_key(&id) => self.close_end(id, &order),
                None if matches!(order, MigrationOrder::Resume { .. }) => {}
                None => {
                    let step = if order == MigrationOrder::Release {
                        Step::KillSource
                    } else {
                        Step::Quiesce
                    };
                    self.report(
                        id,
                        StepReport::Failed {
                            step,
                            why: Failure::TaskEnded,
                        },
                    );
                }
            },
            MigrationOrder::Discard | MigrationOrder::Run { .. } => {
                match self.moves.targets.get_mut(&id) {
                    Some(target) => target.handle(TargetEvent::Order(order)),
                    None if order == MigrationOrder::Discard => {}
                    None => {
                        let why = Failure::Cancelled("the target has thrown it away".into());
                        self.report(
                            id,
                            StepReport::Failed {
                                step: Step::Run,
                                why,
                            },
                        );
                    }
                }
            }
        }
    }

    fn source_does(&mut self, id: MigrationId, output: SourceOutput) {
        let Some(of) = self.moves.sources.get(&id).map(|s| s.migration().clone()) else {
            return;
        };
        let tid = of.tid;
        if matches!(output, SourceOutput::Inspect) && self.is_settling(&of) {
            self.moves.next.insert(tid, id);
            return self.ease(tid);
        }
        self.step_begins(tid, output.started_step());
        match output {
            SourceOutput::Report(report) => {
                self.step_ended(tid, &report);
                self.report(id, report);
            }
            SourceOutput::Inspect => self.inspect(id, &of),
            SourceOutput::BufferIncoming => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.hold = true;
                }
            }
            SourceOutput::Quiesce { resume_token } => self.quiesce_for_move(id, tid, resume_token),
            SourceOutput::RequestExit { engine } => self.end_for_move(id, tid, engine),
            SourceOutput::Stop => self.stop_for_move(id, tid),
            SourceOutput::AwaitReplies => self.settle(id, tid, None),
            SourceOutput::SaveTaskState {
                open_requests: open,
                ended_tasks: ended,
            } => {
                self.await_ends(id, tid, ended);
                self.settle(id, tid, Some(open));
            }
            SourceOutput::CopyStateFiles => self.beginnings.push_back(Job::Collect(id)),
            SourceOutput::ResumeTask => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.leaving = None;
                }
                if !self.end_called_off(id, tid) {
                    self.tell_tasker(ToTasker::AbortMigration { migration: id, tid });
                }
            }
            SourceOutput::WriteResumeToken => {
                if !self.never_let_go(id, tid) && !self.wake_guest(id, tid) {
                    self.write_token(id);
                }
            }
            SourceOutput::DeliverBuffered => self.release(tid),
            SourceOutput::KillSource => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.killing = true;
                }
                if !self.has_no_copy(id, tid) {
                    self.tell_tasker(ToTasker::KillSource { migration: id, tid });
                }
            }
            SourceOutput::TransferOwnership => self.hand_task_over(&of),
            SourceOutput::Done => {
                self.moves.sources.remove(&id);
                self.part_over(id, tid);
                self.out.push_back(Output::RemoveToken {
                    path: self.config.place.resume_token(id),
                });
                self.settled(tid);
            }
            SourceOutput::OpenMemoryStream
            | SourceOutput::PreCopy
            | SourceOutput::DiscardPreCopy
            | SourceOutput::Dump { .. }
            | SourceOutput::Upload
            | SourceOutput::StartSendingImages
            | SourceOutput::FinishSendingImages
            | SourceOutput::SendRecord
            | SourceOutput::DropImages => self.source_writes(&of, &output),
        }
    }

    /// Executes the outputs of the source that concern memory and images.
    fn source_writes(&mut self, of: &Migration, output: &SourceOutput) {
        let Migration { id, tid, to, .. } = *of;
        match output {
            SourceOutput::OpenMemoryStream => {
                self.out.push_back(Output::LendMemory { migration: id, to })
            }
            SourceOutput::PreCopy => {
                let memory_way = self.config.place.memory_socket(id);
                self.tell_tasker(ToTasker::PreCopy {
                    migration: id,
                    tid,
                    memory_socket: memory_way,
                });
            }
            SourceOutput::DiscardPreCopy => {
                self.tell_tasker(ToTasker::StopPreCopy { migration: id })
            }
            SourceOutput::Dump { post_copy } => {
                let dir = self.config.place.image_dir(id);
                let memory_way = post_copy.then(|| self.config.place.memory_socket(id));
                self.tell_tasker(ToTasker::Dump {
                    migration: id,
                    tid,
                    dir,
                    memory_socket: memory_way,
                });
            }
            SourceOutput::Upload => self.deposit(id),
            SourceOutput::StartSendingImages => {
                self.out.push_back(Output::SendAhead { migration: id, to })
            }
            SourceOutput::FinishSendingImages => {
                self.send_record(of, false);
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.leaving = Some(id);
                }
                self.out.push_back(Output::SendImages { migration: id, to });
            }
            SourceOutput::SendRecord => self.send_away(of),
            SourceOutput::DropImages => self.out.push_back(Output::DropImages { migration: id }),
            _ => {}
        }
    }

    /// Inspects a task for a migration, by itself or through the tasker.
    fn inspect(&mut self, id: MigrationId, of: &Migration) {
        let tid = of.tid;
        // The source of a migration that was aborted before it held the task has not been removed.
        self.moves
            .sources
            .retain(|other, s| *other == id || s.migration().tid != tid || s.buffers_incoming());
        let known = self.cannot_move(tid).map(Err);
        match known.or_else(|| self.facts_without_criu(tid, Some(&of.cause))) {
            Some(result) => self.inspected(id, tid, result, (false, false)),
            None => self.tell_tasker(ToTasker::Inspect { migration: id, tid }),
        }
    }

    /// Quiesces the library of a task for a migration.
    fn quiesce_for_move(&mut self, id: MigrationId, tid: Tid, token: Option<PathBuf>) {
        let tokens: Vec<_> = std::iter::once(self.config.place.resume_token(id))
            .chain(token)
            .collect();
        if !self.quiesce_guest(id, tid, &tokens)
            && let Some(conn) = self.tasks.get(tid).and_then(Task::conn)
        {
            let message = ToTask::Quiesce {
                migration: id,
                tokens,
            };
            self.out.push_back(Output::ToTask { conn, message });
        }
    }

    /// True while a new migration of the task must wait, for one of these reasons:
    ///
    /// - The task has migrated here, and its library has not connected yet.
    /// - An earlier migration was aborted, and the task is being resumed.
    /// - The library of a paused guest is reconnecting.
    /// - The task must be paused and its program has just been restarted.
    ///
    /// The coordinator's deadline bounds the wait.
    fn is_settling(&self, of: &Migration) -> bool {
        let staying = |s: &Source| {
            s.migration().tid == of.tid && s.migration().id != of.id && s.buffers_incoming()
        };
        let comes_back = self
            .tasks
            .get(of.tid)
            .is_some_and(|t| t.still.as_ref().is_some_and(|still| still.waking));
        let comes = self.moves.arrivals.get(&of.tid).is_some_and(|a| a.located);
        // Other tasks in this phase may never connect.
        let again = |t: &Task| {
            t.phase == Phase::Expected
                && t.begin
                    .as_ref()
                    .is_some_and(|begin| begin.restart_count > 0)
        };
        let begins = self.tasks.get(of.tid).is_some_and(again) && self.has_to_stand(of.tid);
        comes || comes_back || begins || self.moves.sources.values().any(staying)
    }

    /// The previous migration of the task is over: starts the one that waits.
    pub(super) fn settled(&mut self, tid: Tid) {
        if let Some(id) = self.moves.next.remove(&tid) {
            self.source_does(id, SourceOutput::Inspect);
        }
    }

    /// Returns why the task cannot migrate at all, as far as its daemon knows.
    pub(super) fn cannot_move(&self, tid: Tid) -> Option<Refusal> {
        if let Some(refusal) = self.no_tasker() {
            return Some(refusal);
        }
        let Some(task) = self.tasks.get(tid) else {
            return Some(Refusal::NoSuchTask);
        };
        if !task.spawned() {
            Some(Refusal::NotSpawned)
        } else if task.pinned || task.flags & TASK_SERVICE_FLAGS != 0 {
            Some(Refusal::Pinned)
        } else if task.debugged {
            // Even before its debugger attaches, and while the debugger is detached.
            Some(Refusal::Debugged)
        } else if (task.conn().is_none() && !task.has_let_go()) || task.exited.is_some() {
            Some(Refusal::NotConnected)
        } else {
            None
        }
    }

    fn target_does(&mut self, id: MigrationId, output: TargetOutput) {
        let Some(of) = self.moves.targets.get(&id).map(|t| t.migration().clone()) else {
            return;
        };
        let tid = of.tid;
        self.step_begins(tid, output.started_step());
        match output {
            TargetOutput::Report(report) => {
                self.step_ended(tid, &report);
                self.report(id, report);
            }
            TargetOutput::Prepare(facts) => self.prepare_move(id, facts),
            // Images from the store of this host need no transfer.
            TargetOutput::ExpectImages if of.from == self.config.host => {}
            TargetOutput::ExpectImages => {
                self.out.push_back(Output::ExpectImages {
                    migration: id,
                    from: of.from,
                });
                if self.memory_follows(id) {
                    self.out.push_back(Output::ExpectMemory {
                        migration: id,
                        from: of.from,
                    });
                }
            }
            TargetOutput::ReceivePreCopy => {
                let memory_way = self.config.place.memory_socket(id);
                self.tell_tasker(ToTasker::ReceivePreCopy {
                    migration: id,
                    memory_socket: memory_way,
                });
            }
            TargetOutput::Restore if of.cause == MigrationCause::Restart => {
                self.out.push_back(Output::ReadPart { migration: id });
            }
            TargetOutput::Restore if self.arrival_of(id).is_some_and(|arrival| arrival.anew) => {
                self.beginnings.push_back(Job::Build(id));
            }
            TargetOutput::Restore => {
                let dir = self.config.place.image_dir(id);
                let memory_way = self
                    .memory_follows(id)
                    .then(|| self.config.place.memory_socket(id));
                self.tell_tasker(ToTasker::Restore {
                    migration: id,
                    tid,
                    dir,
                    memory_write: None,
                    memory_socket: memory_way,
                });
            }
            TargetOutput::Run(FinalSourceState { used, suspensions }) => {
                let now = self.now;
                let arrival = self.arrival_of(id).map(|arrival| {
                    arrival.may_run(now, suspensions);
                    arrival.anew
                });
                match arrival {
                    Some(true) if of.cause == MigrationCause::Restart => {
                        self.out.push_back(Output::NameState { migration: id })
                    }
                    _ => self.run(id, used),
                }
            }
            TargetOutput::WriteResumeToken => {
                // The library of a paused task is not woken. Such a task may have become a task of
                // this host already.
                if self
                    .arrival_of(id)
                    .is_some_and(|arrival| !arrival.waits && !arrival.anew)
                {
                    self.write_token(id);
                }
            }
            TargetOutput::Discard => self.tell_tasker(ToTasker::Discard { migration: id }),
            TargetOutput::DropImages => self.out.push_back(Output::DropImages { migration: id }),
            TargetOutput::Done => {
                self.moves.targets.remove(&id);
                self.moves
                    .arrivals
                    .retain(|_, a| a.migration != id || a.located);
                if let Some(arrival) = self.arrival_of(id).filter(|a| !a.ran) {
                    arrival.lose();
                }
                self.arrival_step(tid);
            }
        }
    }

    /// Requests the tasker to run a restored task. It stays paused while guests are paused or while
    /// it is suspended.
    fn run(&mut self, id: MigrationId, used: Usage) {
        let mut held = self.hosting.is_stopped();
        if let Some(arrival) = self.arrival_of(id) {
            held |= arrival.suspended.is_some();
            (arrival.held, arrival.waits) = (held, held);
        }
        self.tell_tasker(ToTasker::Run {
            migration: id,
            used,
            paused: held,
        });
    }

    /// The state files of a restarted program were installed under their names, or this failed.
    pub(super) fn state_named(&mut self, id: MigrationId, result: Result<(), Failure>) {
        match result {
            // The tasker may have ended in the meantime, and the task with it.
            Ok(()) if self.moves.targets.get(&id).is_some_and(Target::is_starting) => {
                self.run(id, Usage::default())
            }
            Ok(()) => {}
            Err(why) => self.target_event(id, TargetEvent::RunCompleted(Err(why))),
        }
    }

    /// Obtains this host's verdict on a task that is to migrate here. Refuses immediately if the
    /// host's owner does not permit the guest or if there is no tasker.
    fn prepare_move(&mut self, id: MigrationId, facts: TaskFacts) {
        let tid = self
            .moves
            .targets
            .get(&id)
            .map_or(Tid::NONE, |target| target.migration().tid);
        let refusal = self
            .no_guest(tid, &facts.program)
            .or_else(|| self.no_tasker());
        match refusal {
            None => self.beginnings.push_back(Job::JudgeMove(id, facts)),
            Some(refusal) => {
                let (verdict, engine) = (vec![refusal], Engine::Criu);
                self.target_event(
                    id,
                    TargetEvent::Prepared {
                        verdict,
                        supports_post_copy: false,
                        engine,
                    },
                );
            }
        }
    }

    fn memory_follows(&self, id: MigrationId) -> bool {
        self.moves
            .targets
            .get(&id)
            .is_some_and(Target::uses_post_copy)
    }

    /// Passes an event to a migration whose source is this host.
    pub(super) fn source_event(&mut self, id: MigrationId, event: SourceEvent) {
        if let Some(source) = self.moves.sources.get_mut(&id) {
            source.handle(event);
        }
    }

    /// Passes an event to a migration whose target is this host.
    pub(super) fn target_event(&mut self, id: MigrationId, event: TargetEvent) {
        if let Some(target) = self.moves.targets.get_mut(&id) {
            target.handle(event);
        }
    }

    /// Returns the refusal of all migrations from and to this host if its tasker has ended.
    pub(super) fn no_tasker(&self) -> Option<Refusal> {
        let why = || "its tasker has ended".into();
        self.tasker_gone.then(|| Refusal::NoEngine {
            host: self.config.host,
            why: why(),
        })
    }

    /// Sets the host in a refusal of the tasker, which does not know its host.
    pub(super) fn named(&self, refusal: Refusal) -> Refusal {
        match refusal {
            Refusal::NoEngine { why, .. } => Refusal::NoEngine {
                host: self.config.host,
                why,
            },
            other => other,
        }
    }

    /// Handles a message of the tasker about a migration.
    pub(super) fn tasker_on_move(&mut self, message: FromTasker) {
        match message {
            FromTasker::Inspected {
                migration,
                result,
                supports_post_copy: memory_can_follow,
                supports_pre_copy: can_pre_copy,
            } => {
                let Some(Migration { tid, cause, .. }) = self
                    .moves
                    .sources
                    .get(&migration)
                    .map(|s| s.migration().clone())
                else {
                    return;
                };
                let result = result.map_err(|refusal| self.named(refusal));
                let unheeding = self
                    .tasks
                    .get(tid)
                    .is_some_and(|task| task.unheeding == Some(migration));
                let result = match unheeding {
                    true => result,
                    false => self.facts_with_criu(tid, Some(&cause), result),
                };
                self.inspected(migration, tid, result, (memory_can_follow, can_pre_copy));
            }
            FromTasker::SignalChecked {
                migration,
                handles_signal,
            } => self.signal_looked_at(migration, handles_signal),
            FromTasker::PreCopied { migration, result } => {
                self.source_event(migration, SourceEvent::PreCopied(result))
            }
            FromTasker::PreCopyLost { migration, why } => {
                self.target_event(migration, TargetEvent::PreCopyLost(why))
            }
            FromTasker::Stopped { migration, result } => {
                self.stopped_for_move(migration, &result);
                self.source_event(migration, SourceEvent::Stopped(result));
            }
            FromTasker::Dumped { migration, result } => {
                self.source_event(migration, SourceEvent::Dumped(result))
            }
            FromTasker::MigrationAborted { migration } => {
                self.source_event(migration, SourceEvent::Continued)
            }
            FromTasker::SourceGone { migration, used } => {
                self.source_event(migration, SourceEvent::Killed(used))
            }
            // The migration was aborted before the tasker started to prepare it. The tasker must
            // discard the preparations.
            FromTasker::Prepared { migration, .. }
                if !self.moves.targets.contains_key(&migration) =>
            {
                self.tell_tasker(ToTasker::Discard { migration });
            }
            FromTasker::Prepared {
                migration,
                verdict,
                supports_post_copy: memory_can_follow,
            } => {
                let verdict = verdict
                    .into_iter()
                    .map(|refusal| self.named(refusal))
                    .collect();
                self.prepared(migration, verdict, memory_can_follow);
            }
            FromTasker::Restored { migration, result } => {
                if let (Ok(pid), Some(arrival)) = (&result, self.arrival_of(migration)) {
                    arrival.pid = *pid;
                }
                self.target_event(migration, TargetEvent::Restored(result.map(|_| ())));
            }
            FromTasker::Running { migration, result } => self.ran(migration, result),
            FromTasker::MemoryArrived { migration, result } => {
                self.target_event(migration, TargetEvent::MemoryArrived(result))
            }
            FromTasker::Discarded { migration } => {
                self.target_event(migration, TargetEvent::Discarded)
            }
            _ => {}
        }
    }

    fn ran(&mut self, migration: MigrationId, result: Result<(), Failure>) {
        if let Some(arrival) = self.arrival_of(migration) {
            arrival.ran = true;
            if result.is_err() {
                arrival.lose();
            }
        }
        self.target_event(migration, TargetEvent::RunCompleted(result));
        // The target handles the event first: its output writes the token that wakes the library.
        let tids: Vec<Tid> = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.migration == migration)
            .map(|a| a.tid)
            .collect();
        tids.into_iter().for_each(|tid| self.arrival_step(tid));
    }

    /// Cancels all pre-copies to this host: arriving guests would be paused immediately.
    pub(super) fn call_off_pre_copies(&mut self, why: &str) {
        let refusal = Refusal::OwnerPresent {
            host: self.config.host,
            why: why.to_string(),
        };
        for target in self.moves.targets.values_mut() {
            target.handle(TargetEvent::PreCopyLost(Failure::Refused(vec![
                refusal.clone(),
            ])));
        }
    }

    /// The tasker has ended, and with it everything that it was restoring or holding for migrations
    /// to this host.
    pub(super) fn moves_tasker_gone(&mut self, why: &str) {
        let failed = || Failure::Engine(format!("the tasker has ended: {why}"));
        let host = self.config.host;
        for target in self.moves.targets.values_mut() {
            // No other verdict will come. The requester can try the next host immediately.
            let verdict = vec![Refusal::NoEngine {
                host,
                why: format!("its tasker has ended: {why}"),
            }];
            target.handle(TargetEvent::Prepared {
                verdict,
                supports_post_copy: false,
                engine: Engine::Criu,
            });
            // The tasker's end has discarded everything that it was ordered to discard.
            target.handle(TargetEvent::Discarded);
            target.handle(TargetEvent::PreCopyLost(failed()));
            target.handle(TargetEvent::Restored(Err(failed())));
            target.handle(TargetEvent::RunCompleted(Err(failed())));
            target.handle(TargetEvent::MemoryArrived(Err(failed())));
        }
        let running: Vec<Tid> = self
            .moves
            .arrivals
            .values()
            .filter(|a| a.run_ordered)
            .map(|a| a.tid)
            .collect();
        for tid in running {
            if let Some(arrival) = self.moves.arrivals.get_mut(&tid) {
                arrival.lose();
            }
            self.arrival_step(tid);
        }
    }

    pub(super) fn arrival_of(&mut self, migration: MigrationId) -> Option<&mut Arrival> {
        self.moves
            .arrivals
            .values_mut()
            .find(|a| a.migration == migration)
    }

    /// The library has reported that it is quiesced; its socket closes next.
    pub(super) fn task_quiesced(
        &mut self,
        tid: Tid,
        migration: MigrationId,
        marks: Vec<SendWatermark>,
    ) {
        let moving = self
            .moves
            .sources
            .get(&migration)
            .is_some_and(|s| s.migration().tid == tid);
        match self.tasks.get_mut(tid) {
            Some(task) if moving || task.waits_for(migration) => {
                task.mark(marks);
                task.quiesced = true;
            }
            _ => self.log(format!(
                "{tid} let go for {migration}, which is none of its moves"
            )),
        }
    }

    /// The socket of a quiesced library has closed.
    pub(super) fn task_let_go(&mut self, tid: Tid) {
        // A guest that is being resumed finds its token immediately. It reconnects and then
        // quiesces for the migration.
        if !self
            .tasks
            .get(tid)
            .is_some_and(|t| t.still.as_ref().is_some_and(|still| still.waking))
        {
            self.each_source(tid, SourceEvent::Quiesced);
        }
    }

    /// The library has connected again.
    pub(super) fn move_task_came_back(&mut self, tid: Tid) {
        self.each_source(tid, SourceEvent::Reconnected);
    }

    /// A migration of the task was aborted, and its process continues.
    pub(super) fn move_task_continued(&mut self, tid: Tid) {
        self.each_source(tid, SourceEvent::Continued);
    }

    /// A task has ended or left, so that it cannot migrate any more.
    pub(super) fn move_task_ended(&mut self, tid: Tid) {
        self.each_source(tid, SourceEvent::TaskExited);
    }

    /// Handles the exit of a task whose images are being transferred. If the migration is
    /// committed, the task continues at the target; if not, it has ended. Only the coordinator
    /// knows. Returns true if its decision must be awaited.
    pub(super) fn defer_end(&mut self, tid: Tid, status: i32, used: Usage) -> bool {
        let stopping = self.stop.is_some();
        let Some(task) = self.tasks.get_mut(tid) else {
            return false;
        };
        let Some(id) = task.leaving.filter(|_| !stopping) else {
            return false;
        };
        task.exited = Some((status, used));
        let Some(source) = self.moves.sources.get_mut(&id) else {
            return self.moves.open_ends.contains_key(&id);
        };
        if task.killing {
            source.handle(SourceEvent::Killed(used));
        } else {
            let of = source.migration().clone();
            source.handle(SourceEvent::TaskExited);
            self.moves.open_ends.insert(id, of);
        }
        true
    }

    /// The coordinator has decided whether the migration of a task that has exited here continues.
    fn close_end(&mut self, id: MigrationId, order: &MigrationOrder) {
        let Some(of) = self.moves.open_ends.remove(&id) else {
            return;
        };
        let Some(task) = self.tasks.get_mut(of.tid) else {
            return;
        };
        let (status, used) = task.exited.unwrap_or_default();
        task.leaving = None;
        if *order == MigrationOrder::Release {
            self.report(id, StepReport::SourceGone(used));
            self.hand_task_over(&of);
        } else {
            self.end_task(of.tid, status, used);
        }
    }

    fn each_source(&mut self, tid: Tid, event: SourceEvent) {
        self.moves
            .sources
            .values_mut()
            .filter(|s| s.migration().tid == tid)
            .for_each(|s| s.handle(event.clone()));
    }
}

fn code_of(refusal: &Refusal) -> PvmError {
    match refusal {
        Refusal::NoSuchTask => PvmError::NoTask,
        Refusal::NoSuchHost => PvmError::NoHost,
        Refusal::AlreadyMigrating(_) => PvmError::Already,
        Refusal::TooManyMigrations { .. } => PvmError::OutOfRes,
        _ => PvmError::Denied,
    }
}
