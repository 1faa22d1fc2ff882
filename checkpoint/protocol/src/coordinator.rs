//! Coordinates all migrations: decides the next step of each migration, whether it is aborted, and
//! when it is committed.
//!
//! [`Step`] lists the steps. The steps up to the restore have deadlines; the time in the admission
//! queue does not count. The commit and the later steps have no deadline: each ends when it is done
//! or when a host is lost.

use super::admission_queue::{QueueState, select_departures};
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{
    Failure, FinalSourceState, Migration, MigrationCause, MigrationOrder, Refusal, Step,
    StepReport, TaskFacts, Usage,
};
use sempa_proto::suspend::{self, Suspensions};
use sempa_proto::task::{MigrationError, MigrationReport};
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

/// Maximum number of migrations in progress. Further migrations are refused.
pub const MIGRATIONS_MAX: usize = 64;
/// Timeout of the steps that do not depend on the size of the task.
const STEP_TIMEOUT: Micros = Micros::from_secs(10);
/// Additional timeout for each GiB of memory, for the steps that depend on the size of the task.
const TIMEOUT_PER_GIB: Micros = Micros::from_secs(60);
/// Factor between the timeout of the pre-copy and the timeout of the other steps that depend on the
/// size of the task. The task runs during the pre-copy, and some memory is sent more than once.
const PRE_COPY_TIMEOUT_FACTOR: u64 = 10;

/// An instruction to the coordinator's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorOutput {
    /// Send this order to the source or the target.
    Order {
        host: HostId,
        migration: Migration,
        order: MigrationOrder,
    },
    /// Write the location record durably, then call [`Coordinator::on_location_recorded`]. The
    /// record commits the migration to `to`. If `to` equals `from`, the record reverses a commit,
    /// and no call is needed.
    RecordLocation(Migration),
    /// Announce the location `to` to every daemon under a new epoch. When all living daemons have
    /// acknowledged the location, call [`Coordinator::on_location_announced`].
    AnnounceLocation(Migration),
    LogEvent(EventKind),
    /// Answer the source or target that has forwarded a suspend request. The answer must not
    /// overtake the orders to that host.
    SuspendDecided {
        host: HostId,
        /// The migration that the forwarded request named.
        migration: MigrationId,
        /// The id that the forwarding host gave the request.
        request: RequestId,
        /// The suspensions in force. `None` if the host was not entitled to forward the request,
        /// because the migration is over or the other host is authoritative.
        suspensions: Option<Suspensions>,
    },
    Ended {
        id: MigrationId,
        result: Result<MigrationReport, MigrationError>,
    },
}

impl CoordinatorOutput {
    /// Returns the task and the step that starts with this output; `None` if no step starts. Steps
    /// that start with no output of the coordinator start at the source or the target.
    pub fn started_step(&self) -> Option<(Tid, Step)> {
        match self {
            // A record that reverses a commit starts no step.
            Self::RecordLocation(migration) if migration.to != migration.from => {
                Some((migration.tid, Step::Commit))
            }
            _ => None,
        }
    }
}

/// The coordinator's state of one migration in progress.
#[derive(Debug)]
struct ActiveMigration {
    migration: Migration,
    /// The step that is in progress, whose completion the coordinator awaits.
    step: Step,
    deadline: Option<Micros>,
    /// Timeout of the steps that depend on the size of the task.
    size_dependent_timeout: Micros,
    resume_token: PathBuf,
    /// The engine that the target has chosen; CRIU until the target has chosen.
    engine: Engine,
    step_bytes: u64,
    /// Time at which the source was ordered to start the pre-copy or the quiesce.
    departure_ordered_at: Option<Micros>,
    /// Duration of the pre-copy; 0 without pre-copy.
    pre_copy_time: Micros,
    stopped_at: Option<Micros>,
    /// Duration for which the task was stopped.
    stopped_duration: Micros,
    /// True if post-copy is used. Until the target's verdict, true if the source supports
    /// post-copy.
    uses_post_copy: bool,
    /// True if pre-copy precedes the dump.
    uses_pre_copy: bool,
    /// Time at which the task's copy on a lost source is considered dead.
    source_dead_at: Option<Micros>,
    /// True while the location record is on disk and the location is being announced to the
    /// daemons.
    is_announcing: bool,
    /// Suspensions of the task. The coordinator stores them because either host may be lost. The
    /// surviving host then continues with these suspensions.
    suspensions: Suspensions,
    /// True when the target has forwarded a suspend request. From then on requests from the source
    /// are refused, because they may be older.
    target_is_authoritative: bool,
    /// Resident memory of the task in bytes; `None` until the source has reported it.
    resident_bytes: Option<u64>,
    /// The time at which the inspected task was queued, and the task's facts; `None` if the task is
    /// not queued.
    queue_entry: Option<(Micros, TaskFacts)>,
}

impl ActiveMigration {
    /// Returns the time at which the target must run its copy although the source has not reported
    /// the end of its own copy; `None` if the migration waits for something else.
    fn run_at(&self) -> Option<Micros> {
        self.source_dead_at
            .filter(|_| self.step == Step::KillSource)
    }

    /// Returns the migration's state in the admission queue of its source host; `None` if the
    /// migration no longer occupies the network connection of this host.
    fn queue_state(&self) -> Option<QueueState> {
        match (self.resident_bytes, &self.queue_entry) {
            (None, _) => Some(QueueState::SizeUnknown),
            (Some(bytes), Some((queued_at, _))) => {
                let is_paused = matches!(self.migration.cause, MigrationCause::Owner { .. });
                Some(QueueState::Queued {
                    id: self.migration.id,
                    bytes,
                    queued_at: *queued_at,
                    is_paused,
                })
            }
            // Other engines than CRIU send no images.
            (Some(_), None) if self.engine != Engine::Criu => None,
            // Pre-copy shares the network connection like post-copy memory: paused tasks do not
            // wait for pre-copies.
            (Some(bytes), None) if self.step == Step::PreCopy => {
                Some(QueueState::SendingMemory { bytes })
            }
            (Some(bytes), None) if self.step <= Step::Transfer => {
                Some(QueueState::Departing { bytes })
            }
            // The remaining steps do not use the source's network connection, except for post-copy
            // memory.
            (Some(bytes), None) => self
                .uses_post_copy
                .then_some(QueueState::SendingMemory { bytes }),
        }
    }

    /// Returns the timeout of the step `step` of this migration, which depends on the engine and on
    /// the size of the task.
    fn timeout(&self, step: Step) -> Micros {
        match (step, self.engine.exit_request()) {
            (Step::PreCopy, _) => Micros(self.size_dependent_timeout.0 * PRE_COPY_TIMEOUT_FACTOR),
            (Step::Dump | Step::Transfer | Step::Restore, _) => self.size_dependent_timeout,
            // The program is asked to exit. The source reports a failure if the program does not
            // exit within `exit_secs` seconds.
            (Step::Quiesce | Step::Stop, Some((_, exit_secs))) => {
                STEP_TIMEOUT + Micros::from_secs(exit_secs.into())
            }
            _ => STEP_TIMEOUT,
        }
    }
}

/// All migrations of the virtual machine. This state machine runs on the master.
#[derive(Debug, Default)]
pub struct Coordinator {
    migrations: BTreeMap<MigrationId, ActiveMigration>,
    last_id: MigrationId,
    outputs: VecDeque<CoordinatorOutput>,
    /// Time at which the admission queues must be examined again although no event occurs.
    queue_check_at: Option<Micros>,
}

impl Coordinator {
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of migrations in progress.
    pub fn active_count(&self) -> usize {
        self.migrations.len()
    }

    /// Returns the migration of this task that is in progress; `None` if the task is not migrating.
    pub fn migration_of(&self, tid: Tid) -> Option<&Migration> {
        self.migrations
            .values()
            .map(|m| &m.migration)
            .find(|m| m.tid == tid)
    }

    /// True if the migration of the task `tid` away from `host` is committed, and some of the
    /// task's memory is still on `host` (post-copy).
    pub fn has_memory_on(&self, tid: Tid, host: HostId) -> bool {
        let memory_remains = |m: &ActiveMigration| {
            m.migration.tid == tid
                && m.migration.from == host
                && m.uses_post_copy
                && m.step >= Step::Commit
        };
        self.migrations.values().any(memory_remains)
    }

    /// Returns the time at which [`Coordinator::on_timer`] must be called; `None` if no call is
    /// needed.
    pub fn next_deadline(&self) -> Option<Micros> {
        let deadlines = self
            .migrations
            .values()
            .filter_map(|m| m.deadline.into_iter().chain(m.run_at()).min());
        deadlines.chain(self.queue_check_at).min()
    }

    /// Returns the next output that the daemon must execute; `None` if no output is pending.
    pub fn poll(&mut self) -> Option<CoordinatorOutput> {
        self.outputs.pop_front()
    }

    /// Returns a migration id that was never used.
    pub fn generate_id(&mut self) -> MigrationId {
        self.last_id = self.last_id.next();
        self.last_id
    }

    /// Starts a migration of the task `tid` from `from` to `to`.
    ///
    /// # Errors
    /// The migration is refused; nothing was started.
    pub fn begin_migration(
        &mut self,
        now: Micros,
        tid: Tid,
        from: HostId,
        to: HostId,
        cause: MigrationCause,
    ) -> Result<MigrationId, Refusal> {
        if from == to {
            return Err(Refusal::AlreadyThere);
        }
        if let Some(other_migration) = self.migration_of(tid) {
            return Err(Refusal::AlreadyMigrating(other_migration.id));
        }
        if self.migrations.len() >= MIGRATIONS_MAX {
            return Err(Refusal::TooManyMigrations {
                limit: MIGRATIONS_MAX,
            });
        }
        let migration = Migration {
            id: self.generate_id(),
            tid,
            from,
            to,
            cause,
        };
        self.send_order(from, &migration, MigrationOrder::Inspect);
        self.migrations.insert(
            migration.id,
            ActiveMigration {
                migration,
                step: Step::Inspect,
                deadline: Some(now + STEP_TIMEOUT),
                size_dependent_timeout: STEP_TIMEOUT,
                resume_token: PathBuf::new(),
                engine: Engine::Criu,
                step_bytes: 0,
                departure_ordered_at: None,
                pre_copy_time: Micros::default(),
                stopped_at: None,
                stopped_duration: Micros::default(),
                uses_post_copy: false,
                uses_pre_copy: false,
                source_dead_at: None,
                is_announcing: false,
                suspensions: Suspensions::default(),
                target_is_authoritative: false,
                resident_bytes: None,
                queue_entry: None,
            },
        );
        Ok(self.last_id)
    }

    /// Handles a report of the source or the target. Reports that do not match the current step
    /// belong to an aborted migration and are ignored.
    pub fn on_report(&mut self, now: Micros, host: HostId, id: MigrationId, report: StepReport) {
        let Some(m) = self.migrations.get(&id) else {
            return;
        };
        let step = report.step();
        let sender = match step {
            Step::Inspect
            | Step::PreCopy
            | Step::Quiesce
            | Step::Stop
            | Step::Dump
            | Step::KillSource => m.migration.from,
            Step::Prepare | Step::Restore | Step::Run | Step::Arrive => m.migration.to,
            Step::Transfer | Step::Commit => host,
        };
        if let StepReport::Failed { step, failure } = report {
            if host == m.migration.from && m.step == Step::KillSource {
                // The source was ordered to release the task, and its copy had already exited.
                // Other failures at the source, for example a missing acknowledgement of the
                // transfer, do not mean that the copy has ended; `SourceGone` follows.
                if (step, failure) == (Step::KillSource, Failure::TaskEnded) {
                    self.order_run(id, Usage::default());
                }
            } else if (host == m.migration.from && m.step < Step::KillSource)
                || host == m.migration.to
            {
                self.fail_migration(id, step, failure);
            }
        } else if host == sender {
            self.on_step_completed(now, id, step, report);
        }
        self.admit_queued(now);
    }

    fn on_step_completed(&mut self, now: Micros, id: MigrationId, step: Step, report: StepReport) {
        let Some(m) = self.migrations.get_mut(&id) else {
            return;
        };
        let migration = m.migration.clone();
        let next_step = match report {
            StepReport::Inspected {
                facts,
                suspensions,
                supports_post_copy,
                supports_pre_copy,
            } if m.step == Step::Inspect && m.queue_entry.is_none() => {
                m.suspensions = suspensions;
                let memory_gib = facts.memory_bytes >> 30;
                m.size_dependent_timeout =
                    STEP_TIMEOUT + Micros(TIMEOUT_PER_GIB.0 * (memory_gib + 1));
                m.uses_post_copy = supports_post_copy;
                let is_owner_waiting = matches!(migration.cause, MigrationCause::Owner { .. })
                    || suspensions.is_suspended();
                m.uses_pre_copy = supports_pre_copy && supports_post_copy && !is_owner_waiting;
                (m.resident_bytes, m.queue_entry, m.deadline) =
                    (Some(facts.memory_bytes), Some((now, facts)), None);
                return self.log_completed_step(id, step);
            }
            StepReport::Prepared {
                verdict,
                resume_token_path: resume_token,
                post_copy: uses_post_copy,
                engine,
            } if m.step == Step::Prepare => {
                if !verdict.is_empty() {
                    return self.fail_migration(id, Step::Prepare, Failure::Refused(verdict));
                }
                (m.resume_token, m.uses_post_copy, m.engine) =
                    (resume_token.clone(), uses_post_copy, engine);
                m.uses_pre_copy &= uses_post_copy && engine == Engine::Criu;
                m.departure_ordered_at = Some(now);
                let uses_pre_copy = m.uses_pre_copy;
                let order = MigrationOrder::Depart {
                    resume_token_path: resume_token,
                    post_copy: uses_post_copy,
                    pre_copy: uses_pre_copy,
                    engine,
                };
                self.order_departure(&migration, order, engine);
                if uses_pre_copy {
                    Step::PreCopy
                } else {
                    Step::Quiesce
                }
            }
            StepReport::PreCopied { sent_bytes } if m.step == Step::PreCopy => {
                m.step_bytes = sent_bytes;
                m.pre_copy_time = now.since(m.departure_ordered_at.unwrap_or(now));
                Step::Quiesce
            }
            // Source and target report over different connections. A report may overtake an earlier
            // report of the other host. A later report implies the earlier one.
            StepReport::Quiesced if m.step >= Step::PreCopy => Step::Stop,
            StepReport::Stopped if m.step >= Step::PreCopy => {
                m.stopped_at.get_or_insert(now);
                Step::Dump
            }
            StepReport::Dumped { image_bytes } | StepReport::Received { image_bytes }
                if m.step >= Step::PreCopy =>
            {
                m.step_bytes = image_bytes;
                if step == Step::Dump {
                    Step::Transfer
                } else {
                    Step::Restore
                }
            }
            StepReport::Restored if (Step::PreCopy..Step::Commit).contains(&m.step) => {
                self.outputs
                    .push_back(CoordinatorOutput::RecordLocation(migration.clone()));
                Step::Commit
            }
            StepReport::SourceKilled(used) if m.step == Step::KillSource => {
                return self.order_run(id, used);
            }
            StepReport::Running if m.step == Step::Run => {
                m.stopped_duration = now.since(m.stopped_at.unwrap_or(now));
                Step::Arrive
            }
            StepReport::Arrived if m.step == Step::Arrive => {
                return self.complete_migration(now, id);
            }
            _ => return,
        };
        self.advance_step(now, id, step, next_step);
    }

    /// Sends the source the order `order`, by which the departure of the task begins. Logs the
    /// engine if it is not CRIU.
    fn order_departure(&mut self, migration: &Migration, order: MigrationOrder, engine: Engine) {
        if engine != Engine::Criu {
            let Migration { id, tid, .. } = *migration;
            self.outputs
                .push_back(CoordinatorOutput::LogEvent(EventKind::MigrationEngine {
                    id,
                    tid,
                    engine,
                }));
        }
        self.send_order(migration.from, migration, order);
    }

    /// Completes the step `completed_step` and waits for `next_step`, unless a later step is
    /// already awaited.
    fn advance_step(
        &mut self,
        now: Micros,
        id: MigrationId,
        completed_step: Step,
        next_step: Step,
    ) {
        let m = self.migrations.get_mut(&id).expect("the caller found it");
        if next_step > m.step {
            m.step = next_step;
            m.deadline = match next_step {
                Step::Commit | Step::KillSource | Step::Run | Step::Arrive => None,
                _ => Some(now + m.timeout(next_step)),
            };
        }
        self.log_completed_step(id, completed_step);
    }

    /// Orders queued tasks to depart, within the limits of their hosts.
    fn admit_queued(&mut self, now: Micros) {
        let hosts: BTreeSet<HostId> = self
            .migrations
            .values()
            .filter(|m| m.queue_entry.is_some())
            .map(|m| m.migration.from)
            .collect();
        self.queue_check_at = None;
        for host in hosts {
            let states = self
                .migrations
                .values()
                .filter(|m| m.migration.from == host);
            let (admitted_ids, check_at) = select_departures(
                now,
                &states
                    .filter_map(ActiveMigration::queue_state)
                    .collect::<Vec<_>>(),
            );
            self.queue_check_at = self.queue_check_at.into_iter().chain(check_at).min();
            for id in admitted_ids {
                let Some(m) = self.migrations.get_mut(&id) else {
                    continue;
                };
                let Some((_, facts)) = m.queue_entry.take() else {
                    continue;
                };
                (m.step, m.deadline) = (Step::Prepare, Some(now + STEP_TIMEOUT));
                let (migration, suspensions, uses_pre_copy) =
                    (m.migration.clone(), m.suspensions, m.uses_pre_copy);
                let (restart_group, supports_post_copy) = (None, m.uses_post_copy);
                self.send_order(
                    migration.to,
                    &migration,
                    MigrationOrder::Prepare {
                        facts,
                        suspensions,
                        restart_group,
                        supports_post_copy,
                        pre_copy: uses_pre_copy,
                    },
                );
            }
        }
    }

    fn log_completed_step(&mut self, id: MigrationId, step: Step) {
        let m = &self.migrations[&id];
        let bytes = if matches!(step, Step::PreCopy | Step::Dump | Step::Transfer) {
            m.step_bytes
        } else {
            0
        };
        let Migration {
            id, tid, from, to, ..
        } = m.migration;
        self.outputs
            .push_back(CoordinatorOutput::LogEvent(EventKind::MigrationStep {
                id,
                tid,
                from,
                to,
                step,
                bytes,
            }));
    }

    /// Handles the result of [`CoordinatorOutput::RecordLocation`].
    pub fn on_location_recorded(&mut self, id: MigrationId, result: Result<(), Failure>) {
        let Some(m) = self
            .migrations
            .get_mut(&id)
            .filter(|m| m.step == Step::Commit)
        else {
            return;
        };
        match result {
            Ok(()) => {
                m.is_announcing = true;
                self.outputs
                    .push_back(CoordinatorOutput::AnnounceLocation(m.migration.clone()));
            }
            Err(failure) => self.fail_migration(id, Step::Commit, failure),
        }
    }

    /// Handles that every living daemon has acknowledged the new location.
    pub fn on_location_announced(&mut self, now: Micros, id: MigrationId) {
        let Some(m) = self
            .migrations
            .get_mut(&id)
            .filter(|m| m.step == Step::Commit && m.is_announcing)
        else {
            return;
        };
        let migration = m.migration.clone();
        let is_source_lost = m.source_dead_at.is_some();
        self.advance_step(now, id, Step::Commit, Step::KillSource);
        if !is_source_lost {
            self.send_order(migration.from, &migration, MigrationOrder::Release);
        }
    }

    /// Orders the target to run its copy of the task, after the source's copy has ended.
    /// `source_usage` are the resources that the source's copy had used.
    fn order_run(&mut self, id: MigrationId, source_usage: Usage) {
        let Some(m) = self.migrations.get_mut(&id) else {
            return;
        };
        m.step = Step::Run;
        m.source_dead_at = None;
        let final_state = FinalSourceState {
            usage: source_usage,
            suspensions: m.suspensions,
        };
        let migration = m.migration.clone();
        self.log_completed_step(id, Step::KillSource);
        self.send_order(migration.to, &migration, MigrationOrder::Run(final_state));
    }

    /// Handles a suspend or resume request that the source or the target has forwarded.
    ///
    /// From the inspection on, both hosts forward such requests before they acknowledge them, and
    /// apply the result.
    pub fn on_suspend_request(
        &mut self,
        host: HostId,
        migration: MigrationId,
        request: RequestId,
        order: &suspend::SuspendOrder,
    ) {
        let is_accepted = |m: &&mut ActiveMigration| {
            m.migration.tid == order.tid
                && (m.migration.to == host
                    || m.migration.from == host && !m.target_is_authoritative)
        };
        let suspensions = self
            .migrations
            .get_mut(&migration)
            .filter(is_accepted)
            .map(|m| {
                m.target_is_authoritative |= m.migration.to == host;
                let previous_suspensions = m.suspensions;
                m.suspensions = previous_suspensions.apply_order(order);
                self.outputs.extend(
                    previous_suspensions
                        .change_event(m.suspensions, order)
                        .map(CoordinatorOutput::LogEvent),
                );
                m.suspensions
            });
        self.outputs.push_back(CoordinatorOutput::SuspendDecided {
            host,
            migration,
            request,
            suspensions,
        });
    }

    /// Handles that a host has left or was lost. The tasks of the host are dead; the daemon handles
    /// the consequences for other tasks.
    ///
    /// Fails the migrations from and to the host, with two exceptions. If the location is already
    /// being recorded or the source is being killed, a migration from the host continues: the
    /// target runs its copy when the source's copy is considered dead. A migration from the host
    /// whose task already runs at the target is not affected.
    ///
    /// `source_dead_at` is the time from which no task can run on the lost host.
    pub fn on_host_lost(&mut self, now: Micros, host: HostId, source_dead_at: Micros) {
        let affected_ids: Vec<MigrationId> = self
            .migrations
            .values()
            .filter(|m| m.migration.from == host || m.migration.to == host)
            .map(|m| m.migration.id)
            .collect();
        for id in affected_ids {
            let m = self.migrations.get_mut(&id).expect("just listed");
            if m.migration.from == host && matches!(m.step, Step::Commit | Step::KillSource) {
                m.source_dead_at = Some(source_dead_at);
            } else if m.migration.from == host && m.step >= Step::Run {
                // Nothing fails: the source has finished, or the target reports that memory is
                // missing.
            } else {
                let step = m.step;
                self.fail_migration(id, step, Failure::HostLost(host));
            }
        }
        self.admit_queued(now);
    }

    /// Cancels a migration that is not committed yet.
    pub fn cancel(&mut self, id: MigrationId, reason: &str) {
        if let Some(m) = self.migrations.get(&id).filter(|m| m.step < Step::Commit) {
            let step = m.step;
            self.fail_migration(id, step, Failure::Cancelled(reason.to_string()));
        }
    }

    /// If every migration of these tasks is queued for departure from a host that is being drained,
    /// cancels these migrations, so that the job can be checkpointed first, and returns true.
    /// Otherwise does nothing and returns false.
    ///
    /// The cancelled migrations fail with [`Refusal::AlreadyMigrating`], like a migration that
    /// cannot start because of a checkpoint.
    pub fn cancel_if_all_queued(&mut self, tids: &BTreeSet<Tid>) -> bool {
        let migrations: Vec<&ActiveMigration> = self
            .migrations
            .values()
            .filter(|m| tids.contains(&m.migration.tid))
            .collect();
        let is_queued_for_drain = |m: &&ActiveMigration| {
            m.queue_entry.is_some() && matches!(m.migration.cause, MigrationCause::Drain { .. })
        };
        if migrations.is_empty() || !migrations.iter().all(is_queued_for_drain) {
            return false;
        }
        let cancelled_steps: Vec<(MigrationId, Step)> = migrations
            .iter()
            .map(|m| (m.migration.id, m.step))
            .collect();
        for (id, step) in cancelled_steps {
            self.fail_migration(
                id,
                step,
                Failure::Refused(vec![Refusal::AlreadyMigrating(id)]),
            );
        }
        true
    }

    /// Handles deadlines that have passed, and examines the admission queues. Must be called at the
    /// time that [`Coordinator::next_deadline`] has returned.
    pub fn on_timer(&mut self, now: Micros) {
        let ids: Vec<MigrationId> = self.migrations.keys().copied().collect();
        for id in ids {
            let m = &self.migrations[&id];
            if m.deadline.is_some_and(|deadline| deadline <= now) {
                let (step, timeout) = (m.step, m.timeout(m.step));
                self.fail_migration(id, step, Failure::Deadline { allowed: timeout });
            } else if m.run_at().is_some_and(|run_at| run_at <= now) {
                self.order_run(id, Usage::default());
            }
        }
        self.admit_queued(now);
    }

    /// Ends a migration as successful.
    fn complete_migration(&mut self, now: Micros, id: MigrationId) {
        let Some(m) = self.migrations.remove(&id) else {
            return;
        };
        let ActiveMigration {
            migration,
            step_bytes: bytes,
            stopped_duration,
            engine,
            ..
        } = m;
        let resident_bytes = m
            .resident_bytes
            .filter(|_| engine == Engine::Criu)
            .unwrap_or(0);
        let time_since_stop = m
            .stopped_at
            .filter(|_| m.uses_post_copy)
            .map_or(stopped_duration, |stopped_at| {
                now.since(stopped_at).max(stopped_duration)
            });
        let transfer_time = m.pre_copy_time + time_since_stop;
        let Migration {
            id,
            tid,
            from,
            to,
            cause,
        } = migration;
        self.outputs
            .push_back(CoordinatorOutput::LogEvent(EventKind::MigrationStep {
                id,
                tid,
                from,
                to,
                step: Step::Arrive,
                bytes: 0,
            }));
        let event = EventKind::Migrated {
            id,
            tid,
            from,
            to,
            cause,
            bytes,
            resident: resident_bytes,
            frozen: stopped_duration,
            transfer_time,
        };
        self.outputs.push_back(CoordinatorOutput::LogEvent(event));
        self.outputs.push_back(CoordinatorOutput::Ended {
            id,
            result: Ok(MigrationReport {
                id,
                image_bytes: bytes,
                frozen_time: stopped_duration,
                engine,
            }),
        });
    }

    /// Ends a migration as failed.
    ///
    /// Until the source is ordered to release the task, source and target are ordered to abort, and
    /// a commit that has begun is reversed. After the release the migration cannot be undone.
    fn fail_migration(&mut self, id: MigrationId, step: Step, failure: Failure) {
        let Some(m) = self.migrations.remove(&id) else {
            return;
        };
        if self
            .migrations
            .values()
            .any(|other_migration| other_migration.queue_entry.is_some())
        {
            // A queued task may be able to depart: request an immediate call of `on_timer`.
            self.queue_check_at = Some(Micros(0));
        }
        if m.step <= Step::Commit {
            if m.step == Step::Commit {
                let reversal = Migration {
                    to: m.migration.from,
                    ..m.migration.clone()
                };
                self.outputs
                    .push_back(CoordinatorOutput::RecordLocation(reversal.clone()));
                if m.is_announcing {
                    self.outputs
                        .push_back(CoordinatorOutput::AnnounceLocation(reversal));
                }
            }
            if m.step >= Step::PreCopy {
                self.send_order(
                    m.migration.from,
                    &m.migration,
                    MigrationOrder::Resume {
                        suspensions: m.suspensions,
                    },
                );
            }
            if m.step >= Step::Prepare {
                self.send_order(m.migration.to, &m.migration, MigrationOrder::Discard);
            }
        }
        let Migration {
            id,
            tid,
            from,
            to,
            cause,
        } = m.migration;
        self.outputs
            .push_back(CoordinatorOutput::LogEvent(EventKind::MigrationFailed {
                id,
                tid,
                from,
                to,
                cause,
                step,
                why: failure.clone(),
            }));
        self.outputs.push_back(CoordinatorOutput::Ended {
            id,
            result: Err(MigrationError { step, failure }),
        });
    }

    fn send_order(&mut self, host: HostId, migration: &Migration, order: MigrationOrder) {
        self.outputs.push_back(CoordinatorOutput::Order {
            host,
            migration: migration.clone(),
            order,
        });
    }
}

#[cfg(test)]
mod tests;
