//! Handles migration orders. This module implements the source: stop, dump, then continue or kill
//! the task. [`crate::target`] implements the target.
//!
//! The tasker makes no decisions. It guarantees that after any failure the task can continue at the
//! source and that no part of it remains at the target.

use crate::binary_hashing::BinaryHasher;
use crate::dump_attempt::{DumpAttempt, random_number, sleep_unless_cancelled};
use crate::engine_probe::EngineProbe;
use crate::feasibility::{self, Requester};
use crate::file_transfer;
use crate::image_manifest::ImageManifest;
use crate::memory_reservations::MemoryReservations;
use crate::namespace::Namespace;
use crate::nice;
use crate::post_copy::{self, PostCopies};
use crate::pre_copy::PreCopies;
use crate::stop::{self, TaskProcesses};
use crate::supervisor::Supervisor;
use crate::sys;
use crate::target::{IncomingTask, TargetStage};
use crate::task::{Task, TaskPhase, micros};
use crate::workers::{WorkerResult, Workers};
use checkpoint::engine::{CallLimits, CancelHandle, DumpJob, Engine, MemoryServer};
use checkpoint::facts::{self, HashCache};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::task::RedirectAddress;
use sempa_proto::tasker::{DumpReport, FromTasker, MemoryWrite, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for the processes of a task to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of a dump or restore of a task without memory.
const ENGINE_TIMEOUT_BASE: Duration = Duration::from_secs(10);
/// Number of image bytes for which the time limit of a dump or restore grows by one second. The
/// rate is low because memory that was never touched is slow on virtual machines.
const ENGINE_BYTES_PER_SECOND: u64 = 100 << 20;
/// Time limit of the first attempt to dump a task without memory.
///
/// CRIU waits forever for a thread that does not stop on request. The tracer
/// (`checkpoint/src/criu/ptrace_relay.rs`) handles the only known cause. A successful dump ends
/// long before this limit; the second attempt has the full time limit.
const FIRST_DUMP_TIMEOUT_BASE: Duration = Duration::from_secs(5);
/// Maximum number of orders that are deferred until the engine has been probed.
const DEFERRED_ORDERS_MAX: usize = 256;

/// Refusal of a migration if the tasker may not create PID namespaces.
pub(crate) const NO_NAMESPACES: &str = "the tasker may not create PID namespaces here, which requires root; run the \
                                        daemon as root, or let the task write its own checkpoint (SEMPA_ENGINE), \
                                        which requires no privileges";

/// Whether the engine can be used, as far as the tasker knows.
#[derive(Clone, Debug)]
pub(crate) enum EngineStatus {
    /// The engine can be executed, and a probe is running. The value is its version.
    Probing(String),
    /// A probe (dump and restore) was successful. The value is the engine's version.
    Usable(String),
    /// The engine cannot be used. The value is the reason, and how to install a working engine.
    Unusable(String),
    /// The engine could not be used, and another probe is running. The value is as for `Unusable`.
    Reprobing(String),
}

/// The state of all migrations in progress on this host, and of the engine.
pub(crate) struct Migrations {
    pub(crate) engine: Option<Arc<dyn Engine>>,
    pub(crate) engine_status: EngineStatus,
    pub(crate) workers: Workers,
    pub(crate) probe: Option<EngineProbe>,
    /// Number of consecutive failed probes.
    pub(crate) failed_probes: u32,
    pub(crate) targets: BTreeMap<MigrationId, IncomingTask>,
    /// Orders that wait until the engine has been probed.
    deferred_orders: Vec<ToTasker>,
    pub(crate) post_copies: PostCopies,
    pub(crate) pre_copies: PreCopies,
    pub(crate) hashes: Arc<HashCache>,
    pub(crate) binary_hasher: BinaryHasher,
    pub(crate) reservations: MemoryReservations,
}

impl Migrations {
    /// Finds the engine and queries its version. `namespaces` is true if the tasker may create PID
    /// namespaces; otherwise no engine can be used.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(crate) fn new(namespaces: bool) -> io::Result<Migrations> {
        let locate = || checkpoint::criu::Criu::locate(|name| std::env::var_os(name));
        let located = if namespaces {
            locate().map_err(|none| none.to_string())
        } else {
            Err(NO_NAMESPACES.into())
        };
        let probed = located.and_then(|criu| {
            let version = criu.probe().map_err(|why| why.to_string())?;
            Ok((version, criu))
        });
        let (engine, engine_status) = match probed {
            Ok((version, criu)) => (
                Some(Arc::new(criu) as Arc<dyn Engine>),
                EngineStatus::Probing(version),
            ),
            Err(why) => (None, EngineStatus::Unusable(why)),
        };
        let hashes = Arc::new(HashCache::default());
        Ok(Migrations {
            engine,
            engine_status,
            workers: Workers::new()?,
            probe: None,
            failed_probes: 0,
            targets: BTreeMap::new(),
            deferred_orders: Vec::new(),
            post_copies: PostCopies::new(),
            pre_copies: PreCopies::new(),
            binary_hasher: BinaryHasher::new(hashes.clone()),
            hashes,
            reservations: MemoryReservations::default(),
        })
    }

    /// Returns the engine's version, or the reason why it cannot be used.
    pub(crate) fn engine_state(&self) -> Result<String, String> {
        match &self.engine_status {
            EngineStatus::Probing(version) | EngineStatus::Usable(version) => Ok(version.clone()),
            EngineStatus::Unusable(why) | EngineStatus::Reprobing(why) => Err(why.clone()),
        }
    }

    /// Returns a descriptor that becomes readable when workers have results.
    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.workers.wake_fd()
    }

    /// Returns the restored tasks at this target that do not run yet. Each has a descriptor that
    /// becomes readable when the task dies.
    pub(crate) fn held_copies(&self) -> impl Iterator<Item = (MigrationId, BorrowedFd<'_>)> {
        self.targets
            .iter()
            .filter_map(|(migration, target)| match &target.stage {
                TargetStage::Restored { process, .. } => Some((*migration, process.pidfd.as_fd())),
                _ => None,
            })
    }

    /// True for a process that must not be reaped as an unowned child: an engine process, which its
    /// worker reaps, or the first process of a restored task that does not run yet.
    pub(crate) fn owns_process(&self, pid: i32) -> bool {
        let held = |target: &IncomingTask| match &target.stage {
            TargetStage::Restored { process, .. } => process.pid == pid,
            _ => false,
        };
        self.workers.has_engine(pid) || self.targets.values().any(held)
    }

    /// Returns the stage of a migration to this host; `None` if it does not exist or its task runs.
    pub(crate) fn stage_of(&mut self, migration: MigrationId) -> Option<&mut TargetStage> {
        self.targets
            .get_mut(&migration)
            .map(|target| &mut target.stage)
    }

    /// True if no worker is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.workers.is_idle()
    }

    /// Cancels all migrations and discards all restored tasks that do not run yet. Called when the
    /// tasker ends.
    pub(crate) fn cancel_all(&mut self) {
        self.post_copies.stop_serving_all();
        self.pre_copies.abort_all();
        self.workers.cancel_all();
        self.targets.clear();
        self.probe = None;
    }
}

/// Enters a span in which all lines name the migration.
fn enter_span(migration: MigrationId) -> tracing::span::EnteredSpan {
    tracing::info_span!("migration", id = %migration).entered()
}

/// Returns the migration that an order concerns.
fn order_migration(order: &ToTasker) -> Option<MigrationId> {
    match order {
        ToTasker::Inspect { migration, .. }
        | ToTasker::CheckSignal { migration, .. }
        | ToTasker::Prepare { migration, .. }
        | ToTasker::PreCopy { migration, .. }
        | ToTasker::StopPreCopy { migration }
        | ToTasker::ReceivePreCopy { migration, .. }
        | ToTasker::Stop { migration, .. }
        | ToTasker::Dump { migration, .. }
        | ToTasker::AbortMigration { migration, .. }
        | ToTasker::KillSource { migration, .. }
        | ToTasker::Restore { migration, .. }
        | ToTasker::PrepareRestart { migration, .. }
        | ToTasker::Run { migration, .. }
        | ToTasker::MemoryLost { migration, .. }
        | ToTasker::Discard { migration } => Some(*migration),
        _ => None,
    }
}

impl Supervisor {
    /// Handles an order that concerns a migration or a query.
    pub(crate) fn handle_migration_order(&mut self, order: ToTasker) {
        if matches!(self.migrations.engine_status, EngineStatus::Probing(_))
            && feasibility::needs_engine(&order)
            && self.migrations.deferred_orders.len() < DEFERRED_ORDERS_MAX
        {
            self.migrations.deferred_orders.push(order);
            return;
        }
        let _in_span = order_migration(&order).map(enter_span);
        match order {
            ToTasker::Inspect { migration, tid } => {
                self.inspect(Requester::Migration { migration, tid }, tid)
            }
            ToTasker::QueryInspect {
                query: question,
                tid,
            } => self.inspect(Requester::Query(question), tid),
            ToTasker::Prepare {
                migration,
                tid,
                facts,
            } => self.check_feasibility(Requester::Migration { migration, tid }, facts),
            ToTasker::QueryVerdict {
                query: question,
                facts,
            } => self.check_feasibility(Requester::Query(question), facts),
            ToTasker::PreCopy {
                migration,
                tid,
                memory_socket: memory_way,
            } => self.start_pre_copy_or_report(migration, tid, &memory_way),
            ToTasker::StopPreCopy { migration } => {
                self.migrations.pre_copies.abort_outgoing(migration)
            }
            ToTasker::ReceivePreCopy {
                migration,
                memory_socket: memory_way,
            } => self.receive_pre_copy(migration, &memory_way),
            ToTasker::Stop {
                migration,
                tid,
                memory_write: redirection,
            } => self.stop_task(migration, tid, redirection),
            ToTasker::Dump {
                migration,
                tid,
                dir,
                memory_socket: memory_way,
            } => self.dump_task(migration, tid, dir, memory_way.as_deref()),
            ToTasker::AbortMigration { migration, tid } => self.continue_task(migration, tid),
            ToTasker::KillSource { migration, tid } => self.kill_migrated(migration, tid),
            ToTasker::Restore {
                migration,
                tid,
                dir,
                memory_write: again,
                memory_socket: memory_way,
            } => {
                self.restore(migration, tid, &dir, again, memory_way.as_deref());
            }
            ToTasker::MemoryLost { migration, why } => self.on_memory_lost(migration, why),
            ToTasker::PrepareRestart { migration, start } => {
                self.start_stopped_program(migration, &start)
            }
            ToTasker::Run {
                migration,
                used,
                paused: held,
            } => self.run_restored_task(migration, used, held),
            ToTasker::Discard { migration } => self.discard(migration),
            ToTasker::Start(_)
            | ToTasker::Signal { .. }
            | ToTasker::RequestExit { .. }
            | ToTasker::CheckSignal { .. }
            | ToTasker::WithdrawExitRequest { .. }
            | ToTasker::Kill { .. }
            | ToTasker::Pause { .. }
            | ToTasker::ResumeToQuiesce { .. }
            | ToTasker::Resume { .. } => {}
        }
    }

    /// Handles the orders that were deferred until the engine was probed.
    pub(crate) fn handle_deferred_orders(&mut self) {
        for order in std::mem::take(&mut self.migrations.deferred_orders) {
            self.handle_migration_order(order);
        }
    }

    /// Handles the results of finished workers.
    pub(crate) fn drain_workers(&mut self) {
        for outcome in self.migrations.workers.take_results() {
            let _in_span = outcome.migration().map(enter_span);
            match outcome {
                WorkerResult::Dumped {
                    migration,
                    tid,
                    result,
                } => self.on_dumped(migration, tid, result),
                WorkerResult::RetryDelayOver {
                    migration,
                    tid,
                    failure,
                } => self.on_retry_delay_over(migration, tid, failure),
                WorkerResult::FilesPlaced { migration, result } => {
                    self.on_files_placed(migration, result)
                }
                WorkerResult::Restored { migration, result } => self.on_restored(migration, result),
                WorkerResult::JoinedCgroup {
                    migration,
                    succeeded: done,
                } => self.on_joined_group(migration, done),
                WorkerResult::Inspected { requester, result } => {
                    self.on_inspected(requester, result)
                }
                WorkerResult::Judged { requester, verdict } => self.on_verdict(requester, verdict),
                WorkerResult::PreCopied { migration, result } => {
                    self.on_pre_copied(migration, result)
                }
                WorkerResult::PreCopyReceived { migration, result } => {
                    self.on_pre_copy_received(migration, result)
                }
                WorkerResult::Served {
                    migration,
                    tid,
                    result,
                } => self.on_served(migration, tid, &result),
                WorkerResult::MemoryArrived { migration, result } => {
                    self.on_fetch_ended(migration, result)
                }
                WorkerResult::KilledProcessesGone => {}
                WorkerResult::ProbeChecked(result) => self.on_probe_checked(result),
                WorkerResult::ProbeDumped(result) => self.on_probe_dumped(result),
                WorkerResult::ProbeRestored(result) => self.on_probe_restored(result),
            }
        }
    }

    fn stop_task(&mut self, migration: MigrationId, tid: Tid, redirection: Option<MemoryWrite>) {
        let result = match self.tasks.get_mut(&tid) {
            None => Err(Failure::TaskEnded),
            Some(Task {
                namespace: None, ..
            }) => Err(Failure::Engine(NO_NAMESPACES.into())),
            Some(task) if !matches!(task.phase, TaskPhase::Running) => Err(Failure::Cancelled(
                "another migration of the task is in progress on this host".into(),
            )),
            Some(task) => {
                let signalled = task.hand_over_to_migration();
                task.redirection = redirection;
                task.phase = TaskPhase::Stopping {
                    migration,
                    deadline: Instant::now() + STOP_TIMEOUT,
                    signalled,
                };
                Ok(())
            }
        };
        match result {
            Ok(()) => self.check_stopping(),
            Err(why) => self.send(&FromTasker::Stopped {
                migration,
                result: Err(why),
            }),
        }
    }

    /// Checks whether the tasks that were ordered to stop have stopped, and reports those that
    /// have.
    pub(crate) fn check_stopping(&mut self) {
        let now = Instant::now();
        let mut stopped = Vec::new();
        for (tid, task) in &mut self.tasks {
            let (
                TaskPhase::Stopping {
                    migration,
                    deadline,
                    signalled,
                },
                Some(namespace),
            ) = (&mut task.phase, &task.namespace)
            else {
                continue;
            };
            let migration = *migration;
            if stop::stop_all(&TaskProcesses::Namespace(namespace), signalled)
                && !stop::continue_unfinished_forks(
                    &namespace.members(),
                    &task.already_stopped_pids,
                    signalled,
                )
            {
                let redirected = write_redirection(namespace, task.redirection.take());
                task.phase = TaskPhase::Stopped { migration };
                stopped.push((*tid, migration, redirected));
            } else if now >= *deadline {
                // The task remains in this phase until the daemon orders it to continue, as after
                // any failed migration.
                task.phase = TaskPhase::Stopped { migration };
                stopped.push((
                    *tid,
                    migration,
                    Err(Failure::Deadline {
                        allowed: micros(STOP_TIMEOUT),
                    }),
                ));
            }
        }
        for (tid, migration, result) in stopped {
            // No process of the task writes any more. Output that remained in the pipe would be in
            // the images, too, and would be delivered twice.
            self.drain_output(tid);
            self.send(&FromTasker::Stopped { migration, result });
        }
    }

    fn dump_task(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        dir: PathBuf,
        memory_socket: Option<&Path>,
    ) {
        let pre_copied = self.migrations.pre_copies.take_sent(migration);
        let started = prepare_image_dir(&dir).and_then(|()| {
            let (page_socket, sent) = match (memory_socket, pre_copied) {
                (Some(_), Some((stream, sent))) => (Some(stream), Some(sent)),
                (way, _) => (
                    way.map(post_copy::connect_memory_socket)
                        .transpose()?
                        .map(Arc::new),
                    None,
                ),
            };
            let attempt = DumpAttempt::first(dir, page_socket, sent);
            Ok((self.start_dump(migration, tid, &attempt)?, attempt))
        });
        match started {
            Ok((worker, attempt)) => self.set_dumping(migration, tid, worker, attempt),
            Err(why) => {
                self.migrations
                    .post_copies
                    .on_failure(Some(&why).filter(|_| memory_socket.is_some()));
                self.send(&FromTasker::Dumped {
                    migration,
                    result: Err(why),
                });
            }
        }
    }

    fn set_dumping(&mut self, migration: MigrationId, tid: Tid, worker: u64, attempt: DumpAttempt) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.phase = TaskPhase::Dumping {
                migration,
                worker,
                attempt,
                aborted: false,
            };
        }
    }

    fn start_dump(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        attempt: &DumpAttempt,
    ) -> Result<u64, Failure> {
        let task = self.tasks.get(&tid).ok_or(Failure::TaskEnded)?;
        let (
            TaskPhase::Stopped {
                migration: stopped_for,
            },
            Some(namespace),
        ) = (&task.phase, &task.namespace)
        else {
            return Err(Failure::Engine(format!(
                "{tid} is not stopped for a migration"
            )));
        };
        if *stopped_for != migration {
            return Err(Failure::Engine(format!(
                "{tid} is stopped for another migration, {stopped_for}"
            )));
        }
        let engine = self
            .migrations
            .engine
            .as_ref()
            .ok_or_else(|| self.engine_failure())?;
        let processes = namespace.pids();
        let memory = resident_bytes(&processes);
        let (output_and_stopped, root) = (
            (task.output.inode(), task.already_stopped_pids.clone()),
            task.process.pid,
        );
        let mut limits = engine_limits(memory)?;
        if attempt.is_first {
            limits.timeout -= ENGINE_TIMEOUT_BASE - FIRST_DUMP_TIMEOUT_BASE;
        }
        let dir = attempt.dir.clone();
        let page_socket = attempt
            .page_socket
            .as_ref()
            .map(|stream| stream.try_clone())
            .transpose();
        let job = DumpJob {
            pid: task.process.pid,
            processes: processes.clone(),
            dir: dir.clone(),
            pid_namespace: namespace.inode(),
            page_stream: page_socket.map_err(|e| Failure::Io(format!("no descriptor: {e}")))?,
            pre_copied: attempt.pre_copied.clone(),
        };
        let dumping = engine.start_dump(job)?;
        let (cancel, pid) = (limits.cancel.clone(), dumping.engine_pid());
        self.migrations.workers.start(&cancel, Some(pid), move || {
            let result = dumping.finish(&limits).and_then(|(report, serving)| {
                let files = file_transfer::copy_files_to_images(&dir, root, &processes)?;
                let (file_count, written) = (files.len() as u32, facts::written_files(&processes));
                let manifest = ImageManifest::describe(
                    &dir,
                    output_and_stopped.0,
                    output_and_stopped.1,
                    memory,
                    written,
                    files,
                )?;
                let described = manifest.write(&dir)?;
                let report = DumpReport {
                    bytes: manifest.image_bytes().max(report.bytes) + described,
                    files: report.files + 1 + file_count,
                };
                Ok((report, serving))
            });
            if result.is_err() {
                stop::wait_until_stopped(&processes);
            }
            WorkerResult::Dumped {
                migration,
                tid,
                result,
            }
        })
    }

    pub(crate) fn engine_failure(&self) -> Failure {
        Failure::Engine(
            self.migrations
                .engine_state()
                .err()
                .unwrap_or_else(|| "there is no dump engine".into()),
        )
    }

    fn on_dumped(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        result: Result<(DumpReport, Option<Box<dyn MemoryServer>>), Failure>,
    ) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return self.send(&FromTasker::Dumped {
                migration,
                result: Err(Failure::TaskEnded),
            });
        };
        let mut resume_task = false;
        if matches!(task.phase, TaskPhase::Dumping { migration: of, .. } if of == migration) {
            let phase = std::mem::replace(&mut task.phase, TaskPhase::Stopped { migration });
            if let (Err(_), Some(namespace)) = (&result, &task.namespace) {
                // An engine that died may have left the task in any state, so the task must be
                // stopped again.
                stop::stop_all(&TaskProcesses::Namespace(namespace), &mut BTreeSet::new());
            }
            if let TaskPhase::Dumping {
                attempt, aborted, ..
            } = phase
            {
                resume_task = aborted;
                let memory_follows = attempt.page_socket.is_some() && !aborted;
                let root = task.process.pid;
                let failure = result.as_ref().err().filter(|_| !aborted);
                if failure.is_some_and(|why| self.retry_dump(migration, tid, root, why, attempt)) {
                    return;
                }
                if memory_follows {
                    self.migrations
                        .post_copies
                        .on_failure(result.as_ref().err());
                }
            }
        }
        let result = result.and_then(|(report, serving)| {
            serving
                .map_or(Ok(()), |serving| self.serve_memory(migration, tid, serving))
                .map(|()| report)
        });
        self.send(&FromTasker::Dumped { migration, result });
        if resume_task {
            self.continue_task(migration, tid);
        }
    }

    /// Schedules another attempt if a dump has failed only because it collided with another dump or
    /// hung. Returns false if no attempt is scheduled.
    fn retry_dump(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        root: i32,
        failure: &Failure,
        mut attempt: DumpAttempt,
    ) -> bool {
        let Some(engine) = &self.migrations.engine else {
            return false;
        };
        if attempt.is_first && matches!(failure, Failure::Deadline { .. }) {
            return self.restart_dump(migration, tid, attempt);
        }
        if !engine.is_retryable(root, failure) {
            return false;
        }
        let Some(pause) = attempt
            .retry_backoff
            .next_delay(micros(attempt.first_started_at.elapsed()), random_number())
        else {
            return false;
        };
        let (failure, cancel) = (failure.clone(), CancelHandle::new());
        let resting = cancel
            .map_err(|e| Failure::Io(e.to_string()))
            .and_then(|cancel| {
                let cancelled = cancel.clone();
                self.migrations.workers.start(&cancel, None, move || {
                    sleep_unless_cancelled(&cancelled, Duration::from_micros(pause.0));
                    WorkerResult::RetryDelayOver {
                        migration,
                        tid,
                        failure,
                    }
                })
            });
        let Ok(worker) = resting else { return false };
        self.set_dumping(migration, tid, worker, attempt);
        true
    }

    /// Handles the end of the delay before another dump attempt, or its cancellation.
    fn on_retry_delay_over(&mut self, migration: MigrationId, tid: Tid, failure: Failure) {
        if let Some(task) = self.tasks.get_mut(&tid)
            && let TaskPhase::Dumping {
                migration: of,
                attempt,
                aborted: false,
                ..
            } = &task.phase
            && *of == migration
        {
            let attempt = attempt.clone();
            task.phase = TaskPhase::Stopped { migration };
            if self.restart_dump(migration, tid, attempt) {
                return;
            }
        }
        self.on_dumped(migration, tid, Err(failure));
    }

    /// Starts another attempt of a dump, in an emptied directory. Returns false on failure.
    fn restart_dump(&mut self, migration: MigrationId, tid: Tid, attempt: DumpAttempt) -> bool {
        let emptied = std::fs::remove_dir_all(&attempt.dir).map_err(|e| Failure::Io(e.to_string()));
        let attempt = DumpAttempt {
            is_first: false,
            ..attempt
        };
        let begun = emptied
            .and_then(|()| prepare_image_dir(&attempt.dir))
            .and_then(|()| self.start_dump(migration, tid, &attempt));
        let Ok(worker) = begun else { return false };
        self.set_dumping(migration, tid, worker, attempt);
        true
    }

    pub(crate) fn continue_task(&mut self, migration: MigrationId, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            match &mut task.phase {
                TaskPhase::Dumping {
                    worker, aborted, ..
                } => {
                    // The reply is sent when the engine has ended.
                    *aborted = true;
                    let worker = *worker;
                    return self.migrations.workers.cancel(worker);
                }
                TaskPhase::Serving {
                    worker, aborted, ..
                } => {
                    *aborted = true;
                    let worker = *worker;
                    return self.stop_serving(migration, worker);
                }
                TaskPhase::Stopping { migration: of, .. }
                | TaskPhase::Stopped { migration: of }
                    if *of == migration =>
                {
                    task.continue_running();
                }
                _ => {}
            }
        }
        self.send(&FromTasker::MigrationAborted { migration });
    }

    fn kill_migrated(&mut self, migration: MigrationId, tid: Tid) {
        match self.tasks.get_mut(&tid) {
            Some(task) => {
                if let TaskPhase::Dumping { worker, .. } = task.phase {
                    self.migrations.workers.cancel(worker);
                }
                let used = task
                    .usage_on_other_hosts
                    .plus(stop::resource_usage(task.process.pid));
                nice::deprioritize(&task.processes().pids());
                self.migrations.post_copies.keep_after_kill(migration);
                task.kill_all();
                self.forget_killed(migration, tid, used);
            }
            // The task has exited, and its exit was already reported.
            None => self.send(&FromTasker::SourceGone {
                migration,
                used: Usage::default(),
            }),
        }
    }

    /// Removes the state of a task that was killed while it was stopped, and reports the end of the
    /// source's copy.
    ///
    /// The task executes no further instruction. The tasker does not wait until the kernel has
    /// freed the task's memory, because that takes longer the more memory the task has.
    fn forget_killed(&mut self, migration: MigrationId, tid: Tid, used: Usage) {
        self.drain_output(tid);
        let Some(task) = self.tasks.remove(&tid) else {
            return;
        };
        self.send(&FromTasker::SourceGone { migration, used });
        if let Some(namespace) = task.namespace {
            self.kill_namespace(namespace, Vec::new());
        }
    }

    /// Ends the current migration step of a task that has exited while it was stopped, and sends
    /// the daemon a reply to the step.
    pub(crate) fn abandon_migration_of(&mut self, task: &Task) {
        self.migrations.pre_copies.on_task_exit(task.tid);
        match task.phase {
            TaskPhase::Stopping { migration, .. } => {
                self.send(&FromTasker::Stopped {
                    migration,
                    result: Err(Failure::TaskEnded),
                });
            }
            TaskPhase::Dumping { worker, .. } => self.migrations.workers.cancel(worker),
            TaskPhase::Serving {
                migration, worker, ..
            } => self.stop_serving(migration, worker),
            TaskPhase::Running | TaskPhase::Stopped { .. } => {}
        }
    }
}

/// Writes the redirection into the memory of a stopped task. The task's library reads it when the
/// task continues on another host.
pub(crate) fn write_redirection(
    namespace: &Namespace,
    redirection: Option<MemoryWrite>,
) -> Result<(), Failure> {
    let Some(MemoryWrite {
        address: RedirectAddress {
            pid: inner,
            address,
        },
        bytes,
    }) = redirection
    else {
        return Ok(());
    };
    let Some(pid) = namespace
        .pids()
        .into_iter()
        .find(|pid| checkpoint::proc::innermost_pid(*pid) == Some(inner))
    else {
        return Err(Failure::Engine(format!(
            "its process {inner}, whose library has quiesced, does not exist"
        )));
    };
    let failed = |e| {
        Failure::Engine(format!(
            "its new location cannot be written into its library: process {pid}: {e}"
        ))
    };
    sys::write_memory(pid, address, &bytes).map_err(failed)
}

/// Returns the time limit of a dump or restore of `bytes` bytes of memory, with a new cancellation
/// handle.
pub(crate) fn engine_limits(bytes: u64) -> Result<CallLimits, Failure> {
    let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(CallLimits {
        timeout: ENGINE_TIMEOUT_BASE + Duration::from_secs(bytes / ENGINE_BYTES_PER_SECOND),
        cancel,
    })
}

/// Creates an image directory with mode 0700, or checks that an existing one is empty.
pub(crate) fn prepare_image_dir(dir: &Path) -> Result<(), Failure> {
    let bad = |e: &dyn std::fmt::Display| {
        Failure::Io(format!(
            "cannot make the image directory {}: {e}",
            dir.display()
        ))
    };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let mut entries = std::fs::read_dir(dir).map_err(|e| bad(&e))?;
            if entries.next().is_some() {
                return Err(bad(&"it exists and is not empty"));
            }
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            std::fs::set_permissions(dir, mode).map_err(|e| bad(&e))
        }
        Err(e) => Err(bad(&e)),
    }
}

/// Returns the total memory of these processes in bytes, resident or swapped out.
pub(crate) fn resident_bytes(pids: &[i32]) -> u64 {
    pids.iter()
        .filter_map(|pid| checkpoint::facts::resident_bytes(*pid))
        .sum()
}
