//! Handles migration orders. This module implements the source: stop and dump the task, then
//! continue or kill it. [`crate::target`] implements the target.
//!
//! The tasker makes no decisions. It guarantees that after any failure the task can continue at the
//! source and that no process of the task remains at the target.

use crate::binary_hashing::BinaryHasher;
use crate::census::Census;
use crate::dump_attempt::DumpAttempt;
use crate::dump_work::{DumpWork, DumpedTask};
use crate::engine_probe::EngineProbe;
use crate::feasibility::{self, Requester};
use crate::idle_engines::IdleDumps;
use crate::image_manifest::prepare_image_dir;
use crate::image_vault::{ImageDir, ImageVault};
use crate::memory_reservations::MemoryReservations;
use crate::namespace::Namespace;
use crate::nice;
use crate::post_copy::{self, PostCopies};
use crate::pre_copy::PreCopies;
use crate::stop::{self, TaskProcesses, VforkRule};
use crate::supervisor::Supervisor;
use crate::sys;
use crate::target::{IncomingTask, TargetStage};
use crate::task::{Task, TaskPhase, to_micros};
use crate::task_user::with_own_file_rights;
use crate::workers::{WorkerResult, Workers};
use checkpoint::engine::{
    CallLimits, CancelHandle, Engine, EngineFailure, MemoryServer, TaskNamespaces,
};
use checkpoint::facts::{self, HashCache};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::task::RedirectAddress;
use sempa_proto::tasker::{DumpReport, EngineUnavailable, FromTasker, MemoryWrite, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for all processes of a task to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of a dump or restore of a task without memory.
const ENGINE_TIMEOUT_BASE: Duration = Duration::from_secs(10);
/// Number of image bytes for which the time limit of a dump or restore grows by one second. The
/// rate is low, because the first access to memory is slow on virtual machines.
const ENGINE_BYTES_PER_SECOND_MIN: u64 = 100 << 20;
/// Time limit of the first attempt to dump a task without memory.
///
/// CRIU waits forever for a thread that does not stop on request. The tracer
/// (`checkpoint/src/criu/ptrace_relay.rs`) handles the only known cause. A successful dump ends
/// long before this limit. The second attempt has the full time limit.
const FIRST_DUMP_TIMEOUT_BASE: Duration = Duration::from_secs(5);
/// Maximum number of orders that are deferred until the engine has been probed.
const DEFERRED_ORDERS_MAX: usize = 256;

/// Returns the reason why migrations are refused if the tasker may not create PID namespaces.
pub(crate) fn no_namespaces_reason() -> &'static str {
    match nix::unistd::geteuid().is_root() {
        true => {
            "the tasker may not create PID namespaces here, for which root needs CAP_SYS_ADMIN; a task that writes its \
             own checkpoint (SEMPA_ENGINE) needs no privileges"
        }
        false => {
            "tasks of ordinary users need the service pvm-taskerd on this host, or run the daemon as root; a task that \
             writes its own checkpoint (SEMPA_ENGINE) needs neither"
        }
    }
}

/// Result of the last probe of the engine.
#[derive(Clone, Debug)]
pub(crate) enum EngineStatus {
    /// The engine can be executed, and its first probe has not ended. The value is the engine's
    /// version.
    Probing(String),
    /// A probe (dump and restore) was successful. The value is the engine's version.
    Usable(String),
    /// The engine cannot be used. The value is the reason, with advice on how to install a working
    /// engine.
    Unusable(String),
    /// The engine could not be used, and another probe is running. The value is the reason of the
    /// previous failure.
    Reprobing(String),
}

/// The state of all migrations in progress on this host, and of the engine.
pub(crate) struct Migrations {
    pub(crate) engine: Option<Arc<dyn Engine>>,
    pub(crate) engine_status: EngineStatus,
    pub(crate) workers: Workers,
    pub(crate) running_probe: Option<EngineProbe>,
    /// Number of consecutive failed probes.
    pub(crate) consecutive_probe_failures: u32,
    pub(crate) incoming_tasks: BTreeMap<MigrationId, IncomingTask>,
    /// Engines that wait for the dump of a task.
    pub(crate) idle_dumps: IdleDumps,
    /// Orders that wait until the first probe of the engine has ended.
    deferred_orders: Vec<ToTasker>,
    pub(crate) post_copies: PostCopies,
    pub(crate) pre_copies: PreCopies,
    pub(crate) hash_cache: Arc<HashCache>,
    pub(crate) binary_hasher: BinaryHasher,
    pub(crate) reservations: MemoryReservations,
}

impl Migrations {
    /// Locates the engine and queries its version. `namespaces_allowed` is true if the tasker may
    /// create PID namespaces; otherwise the engine is not used. The engine is not used either if
    /// `image_vault` has no keys.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(crate) fn new(
        namespaces_allowed: bool,
        image_vault: Option<&ImageVault>,
    ) -> io::Result<Self> {
        let locate_engine = || checkpoint::criu::Criu::locate(|name| std::env::var_os(name));
        let located_engine = if namespaces_allowed {
            locate_engine().map_err(|no_engine| no_engine.to_string())
        } else {
            Err(no_namespaces_reason().into())
        };
        let key_result = image_vault.map_or(Ok(()), ImageVault::check_keys);
        let probe_result = key_result.and(located_engine).and_then(|criu| {
            let version = criu.query_version().map_err(|why| why.to_string())?;
            Ok((version, criu))
        });
        let (engine, engine_status) = match probe_result {
            Ok((version, criu)) => (
                Some(Arc::new(criu) as Arc<dyn Engine>),
                EngineStatus::Probing(version),
            ),
            Err(why) => (None, EngineStatus::Unusable(why)),
        };
        let hashes = Arc::new(HashCache::default());
        Ok(Self {
            engine,
            engine_status,
            workers: Workers::new()?,
            running_probe: None,
            consecutive_probe_failures: 0,
            incoming_tasks: BTreeMap::new(),
            idle_dumps: IdleDumps::default(),
            deferred_orders: Vec::new(),
            post_copies: PostCopies::new(),
            pre_copies: PreCopies::new(),
            binary_hasher: BinaryHasher::new(hashes.clone()),
            hash_cache: hashes,
            reservations: MemoryReservations::default(),
        })
    }

    /// Returns the engine's version, or the reason why the engine cannot be used.
    pub(crate) fn engine_state(&self) -> Result<String, EngineUnavailable> {
        match &self.engine_status {
            EngineStatus::Probing(version) | EngineStatus::Usable(version) => Ok(version.clone()),
            EngineStatus::Unusable(why) | EngineStatus::Reprobing(why) => {
                Err(EngineUnavailable(why.clone()))
            }
        }
    }

    /// Returns a descriptor that becomes readable when a worker has a result.
    pub(crate) fn worker_results_fd(&self) -> BorrowedFd<'_> {
        self.workers.results_fd()
    }

    /// Returns the restored tasks at this target that do not run yet. Each has a descriptor that
    /// becomes readable when the task's first process ends.
    pub(crate) fn restored_tasks(&self) -> impl Iterator<Item = (MigrationId, BorrowedFd<'_>)> {
        self.incoming_tasks
            .iter()
            .filter_map(|(migration, target)| match &target.stage {
                TargetStage::Restored { process, .. } => Some((*migration, process.pidfd.as_fd())),
                _ => None,
            })
    }

    /// True for a process that must not be reaped as an unowned child: an engine process, which its
    /// worker or its owner here reaps, or the first process of a restored task that does not run
    /// yet.
    pub(crate) fn owns_process(&self, pid: i32) -> bool {
        let is_owned = |target: &IncomingTask| match &target.stage {
            TargetStage::Restored { process, .. } => process.pid == pid,
            _ => target
                .idle_restore
                .as_ref()
                .is_some_and(|idle| idle.engine.engine_pid() == pid),
        };
        self.workers.owns_engine(pid)
            || self.idle_dumps.owns(pid)
            || self.incoming_tasks.values().any(is_owned)
    }

    /// Returns the stage of a migration to this host; `None` if no such migration exists, or if its
    /// task already runs.
    pub(crate) fn incoming_stage(&mut self, migration: MigrationId) -> Option<&mut TargetStage> {
        self.incoming_tasks
            .get_mut(&migration)
            .map(|target| &mut target.stage)
    }

    /// True while the engine restores the task of a migration to this host.
    pub(crate) fn is_restoring(&self, migration: MigrationId) -> bool {
        self.incoming_tasks
            .get(&migration)
            .is_some_and(|target| matches!(target.stage, TargetStage::Restoring { .. }))
    }

    /// True if no worker is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.workers.is_idle()
    }

    /// Cancels all migrations and ends all restored tasks that do not run yet. Called when the
    /// tasker ends. Returns the running probe: the caller must drop the probe after its engine has
    /// ended, because the engine may still write to the probe's directory.
    pub(crate) fn cancel_all(&mut self) -> Option<EngineProbe> {
        self.post_copies.stop_serving_all();
        self.pre_copies.abort_all();
        self.workers.cancel_all();
        self.incoming_tasks.clear();
        self.idle_dumps.end_all();
        self.running_probe.take()
    }
}

/// Enters a log span: all log lines contain the migration's id until the returned value is dropped.
fn enter_span(migration_id: MigrationId) -> tracing::span::EnteredSpan {
    tracing::info_span!("migration", id = %migration_id).entered()
}

/// Returns the migration to which an order belongs; `None` if the order belongs to a query or a
/// task.
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
            && feasibility::depends_on_probe(&order)
            && self.migrations.deferred_orders.len() < DEFERRED_ORDERS_MAX
        {
            self.migrations.deferred_orders.push(order);
            return;
        }
        let _in_span = order_migration(&order).map(enter_span);
        match order {
            ToTasker::Inspect { migration, tid } => {
                self.start_inspection(Requester::Migration { migration, tid }, tid)
            }
            ToTasker::QueryInspect { query, tid } => {
                self.start_inspection(Requester::Query(query), tid)
            }
            ToTasker::Prepare {
                migration,
                tid,
                facts,
            } => self.start_feasibility_check(Requester::Migration { migration, tid }, facts),
            ToTasker::QueryVerdict { query, facts } => {
                self.start_feasibility_check(Requester::Query(query), facts)
            }
            ToTasker::PreCopy {
                migration,
                tid,
                memory_socket_path: memory_socket,
            } => self.start_pre_copy_or_report(migration, tid, &memory_socket),
            ToTasker::StopPreCopy { migration } => {
                self.migrations.pre_copies.abort_outgoing(migration)
            }
            ToTasker::ReceivePreCopy {
                migration,
                memory_socket_path: memory_socket,
            } => self.receive_pre_copy(migration, &memory_socket),
            ToTasker::Stop {
                migration,
                tid,
                memory_write: redirect,
            } => self.stop_task(migration, tid, redirect),
            ToTasker::Dump {
                migration,
                tid,
                image_dir: dir,
                memory_socket_path: memory_socket,
            } => self.dump_task(migration, tid, dir, memory_socket.as_deref()),
            ToTasker::AbortMigration { migration, tid } => self.continue_task(migration, tid),
            ToTasker::KillSource { migration, tid } => self.kill_source_copy(migration, tid),
            ToTasker::Restore {
                migration,
                tid,
                image_dir: dir,
                memory_write: repeated_redirect,
                memory_socket_path: memory_socket,
            } => {
                self.start_restore_or_report(
                    migration,
                    tid,
                    &dir,
                    repeated_redirect,
                    memory_socket.as_deref(),
                );
            }
            ToTasker::MemoryLost {
                migration,
                reason: why,
            } => self.on_memory_lost(migration, why),
            ToTasker::PrepareRestart { migration, start } => {
                self.start_stopped_program(migration, &start)
            }
            ToTasker::Run {
                migration,
                earlier_usage: used_resources,
                stays_paused: must_stay_paused,
            } => self.run_restored_task(migration, used_resources, must_stay_paused),
            ToTasker::Discard { migration } => self.discard_incoming_task(migration),
            // All other orders concern no migration, and the main loop handles them.
            _ => {}
        }
    }

    /// Handles the orders that were deferred until the end of the engine's first probe.
    pub(crate) fn handle_deferred_orders(&mut self) {
        for order in std::mem::take(&mut self.migrations.deferred_orders) {
            self.handle_migration_order(order);
        }
    }

    /// Handles the results of finished workers.
    pub(crate) fn handle_worker_results(&mut self) {
        for worker_result in self.migrations.workers.take_results() {
            let _in_span = worker_result.migration_id().map(enter_span);
            match worker_result {
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
                WorkerResult::ImagesTakenIn { migration, result } => {
                    self.on_images_taken_in(migration, result)
                }
                WorkerResult::FilesPlaced { migration, result } => {
                    self.on_files_placed(migration, result)
                }
                WorkerResult::Restored { migration, result } => self.on_restored(migration, result),
                WorkerResult::JoinedControlGroup {
                    migration,
                    succeeded: was_successful,
                } => self.on_joined_group(migration, was_successful),
                WorkerResult::EngineJoinedGroup {
                    migration,
                    succeeded,
                } => self.on_engine_joined_group(migration, succeeded),
                WorkerResult::Inspected { requester, result } => {
                    self.on_inspected(requester, result)
                }
                WorkerResult::FeasibilityChecked { requester, verdict } => {
                    self.on_verdict(requester, verdict)
                }
                WorkerResult::PreCopied { migration, result } => {
                    self.on_pre_copied(migration, result)
                }
                WorkerResult::PreCopyReceived { migration, result } => {
                    self.on_pre_copy_received(migration, result)
                }
                WorkerResult::MemoryServed {
                    migration,
                    tid,
                    result,
                } => self.on_memory_served(migration, tid, &result),
                WorkerResult::MemoryArrived { migration, result } => {
                    self.on_fetch_ended(migration, result)
                }
                WorkerResult::KilledProcessesEnded => {}
                WorkerResult::ProbeChecked(result) => self.on_probe_checked(result),
                WorkerResult::ProbeDumped(result) => self.on_probe_dumped(result),
                WorkerResult::ProbeRestored(result) => self.on_probe_restored(result),
            }
        }
    }

    fn stop_task(&mut self, migration: MigrationId, tid: Tid, redirect: Option<MemoryWrite>) {
        let result = match self.tasks.get_mut(&tid) {
            None => Err(Failure::TaskEnded),
            Some(Task {
                namespace: None, ..
            }) => Err(Failure::Engine(no_namespaces_reason().into())),
            Some(task) if !matches!(task.phase, TaskPhase::Running) => Err(Failure::Cancelled(
                "another migration of the task is in progress on this host".into(),
            )),
            Some(task) => {
                let signalled_pids = task.end_pause_for_migration();
                task.pending_redirect = redirect;
                task.phase = TaskPhase::Stopping {
                    migration,
                    deadline: Instant::now() + STOP_TIMEOUT,
                    signalled_pids,
                };
                Ok(())
            }
        };
        match result {
            Ok(()) => self.report_stopped_tasks(),
            Err(why) => self.send(&FromTasker::Stopped {
                migration,
                result: Err(why),
            }),
        }
    }

    /// Checks which of the tasks that are being stopped have stopped or exceeded [`STOP_TIMEOUT`],
    /// and reports them.
    pub(crate) fn report_stopped_tasks(&mut self) {
        let now = Instant::now();
        let census = Census::default();
        let mut seen_stopped = BTreeMap::new();
        for (tid, task) in &mut self.tasks {
            if let (TaskPhase::Stopping { signalled_pids, .. }, Some(namespace)) =
                (&mut task.phase, &task.namespace)
            {
                let seen = stop::signal_running(
                    &TaskProcesses::Namespace(namespace),
                    &census,
                    signalled_pids,
                    VforkRule::ChildRuns,
                );
                seen_stopped.insert(*tid, seen);
            }
        }
        let later_census = Census::default();
        let mut stop_results = Vec::new();
        for (tid, seen) in seen_stopped {
            let Some(task) = self.tasks.get_mut(&tid) else {
                continue;
            };
            let (
                TaskPhase::Stopping {
                    migration,
                    deadline,
                    signalled_pids,
                },
                Some(namespace),
            ) = (&mut task.phase, &task.namespace)
            else {
                continue;
            };
            let migration = *migration;
            let processes = TaskProcesses::Namespace(namespace);
            if seen.is_some_and(|seen| seen.are_all(&processes, &later_census))
                && !stop::continue_unfinished_forks(
                    &namespace.member_pids(),
                    &task.already_stopped_pids,
                    signalled_pids,
                )
            {
                let redirect_result = write_redirect(namespace, task.pending_redirect.take());
                task.phase = TaskPhase::Stopped { migration };
                stop_results.push((tid, migration, redirect_result));
            } else if now >= *deadline {
                // The task stays in this phase until the daemon orders it to continue, as after any
                // failed migration.
                task.phase = TaskPhase::Stopped { migration };
                stop_results.push((
                    tid,
                    migration,
                    Err(Failure::Deadline {
                        allowed: to_micros(STOP_TIMEOUT),
                    }),
                ));
            }
        }
        for (tid, migration, result) in stop_results {
            // Unless the time limit has passed, no process of the task runs any more. The output
            // must be read completely before the dump: the images would contain the rest, which
            // would be delivered twice.
            self.forward_all_output(tid);
            self.send(&FromTasker::Stopped { migration, result });
        }
    }

    fn dump_task(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        image_dir: PathBuf,
        memory_socket: Option<&Path>,
    ) {
        let completed_pre_copy = self.migrations.pre_copies.take_sent_pages(migration);
        let image_dir_result = prepare_image_dir(&image_dir)
            .and_then(|()| self.engine_dir(tid, &image_dir))
            .map_err(EngineFailure::from);
        let start_result = image_dir_result.and_then(|image_dir| {
            let (page_socket, sent_pages) = match (memory_socket, completed_pre_copy) {
                (Some(_), Some((stream, sent_pages))) => (Some(stream), Some(sent_pages)),
                (way, _) => (
                    way.map(post_copy::connect_memory_socket)
                        .transpose()
                        .map_err(EngineFailure::missing_memory)?
                        .map(Arc::new),
                    None,
                ),
            };
            let attempt = DumpAttempt::new_first(image_dir, page_socket, sent_pages);
            Ok((self.start_dump(migration, tid, &attempt)?, attempt))
        });
        match start_result {
            Ok((worker_id, attempt)) => self.record_dump_start(migration, tid, worker_id, attempt),
            Err(why) => {
                self.migrations
                    .post_copies
                    .back_off_after_failure(Some(&why));
                self.send(&FromTasker::Dumped {
                    migration,
                    result: Err(why.failure),
                });
            }
        }
    }

    pub(crate) fn record_dump_start(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        worker_id: u64,
        attempt: DumpAttempt,
    ) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.phase = TaskPhase::Dumping {
                migration,
                worker_id,
                attempt,
                aborted: false,
            };
        }
    }

    /// Returns the task and its namespace. Fails unless the task is stopped for this migration.
    fn stopped_task(
        &self,
        migration: MigrationId,
        tid: Tid,
    ) -> Result<(&Task, &Namespace), Failure> {
        let task = self.tasks.get(&tid).ok_or(Failure::TaskEnded)?;
        let (
            TaskPhase::Stopped {
                migration: stop_migration,
            },
            Some(namespace),
        ) = (&task.phase, &task.namespace)
        else {
            return Err(Failure::Engine(format!(
                "{tid} is not stopped for a migration"
            )));
        };
        if *stop_migration != migration {
            return Err(Failure::Engine(format!(
                "{tid} is stopped for another migration, {stop_migration}"
            )));
        }
        Ok((task, namespace))
    }

    pub(crate) fn start_dump(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        attempt: &DumpAttempt,
    ) -> Result<u64, EngineFailure> {
        let (task, namespace) = self.stopped_task(migration, tid)?;
        let engine = self
            .migrations
            .engine
            .clone()
            .ok_or_else(|| self.engine_failure())?;
        let processes = namespace.pids();
        let memory_bytes = total_memory_bytes(&processes);
        let (output_pipe, root_pid) = (task.output.pipe_inode(), task.process.pid);
        let already_stopped_pids = task.already_stopped_pids.clone();
        let mut limits = engine_limits(memory_bytes)?;
        if attempt.is_first {
            limits.timeout -= ENGINE_TIMEOUT_BASE - FIRST_DUMP_TIMEOUT_BASE;
        }
        let inside = self.engine_place(namespace)?;
        let dump_params = attempt.dump_params(
            root_pid,
            processes.clone(),
            namespace.namespace_inode(),
            inside,
        )?;
        let idle_dump = self.migrations.idle_dumps.take(migration);
        let running_dump = with_own_file_rights(|| match idle_dump {
            Some(idle_dump) => idle_dump.start(dump_params),
            None => engine.start_dump(dump_params),
        })?;
        let (cancel, engine_pid) = (limits.cancel.clone(), running_dump.engine_pid());
        let work = DumpWork {
            running_dump,
            limits,
            task: DumpedTask {
                image_dir: attempt.image_dir.clone(),
                root_pid,
                processes,
                output_pipe,
                already_stopped_pids,
                memory_bytes,
            },
            engine_place: self.task_start_state.engine_place(),
            hashes: self.migrations.hash_cache.clone(),
        };
        let worker_id =
            self.migrations
                .workers
                .start_worker(&cancel, Some(engine_pid), move || WorkerResult::Dumped {
                    migration,
                    tid,
                    result: work.run(),
                })?;
        Ok(worker_id)
    }

    /// Returns the directory for the images of the task `tid`. `dir` is the image directory of the
    /// daemon.
    ///
    /// # Errors
    /// The tasker's own directory cannot be created, or there are no keys.
    pub(crate) fn engine_dir(&self, tid: Tid, dir: &Path) -> Result<ImageDir, Failure> {
        self.image_vault.as_ref().map_or_else(
            || Ok(ImageDir::OfDaemon(dir.to_path_buf())),
            |vault| vault.new_image_dir(tid, dir),
        )
    }

    /// Returns the namespaces inside which the engine handles a task; `None` if it runs outside.
    ///
    /// # Errors
    /// The namespace has ended.
    pub(crate) fn engine_place(
        &self,
        namespace: &Namespace,
    ) -> Result<Option<TaskNamespaces>, Failure> {
        let vault = self.image_vault.as_ref();
        vault
            .map(|vault| vault.task_namespaces(namespace))
            .transpose()
            .map_err(|e| Failure::Io(format!("the namespaces of the task: {e}")))
    }

    pub(crate) fn engine_failure(&self) -> Failure {
        Failure::Engine(
            self.migrations
                .engine_state()
                .err()
                .map_or_else(|| "there is no dump engine".into(), |e| e.0),
        )
    }

    pub(crate) fn on_dumped(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        result: Result<(DumpReport, Option<Box<dyn MemoryServer>>), EngineFailure>,
    ) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            self.stop_leftover_stragglers(tid);
            return self.send(&FromTasker::Dumped {
                migration,
                result: Err(Failure::TaskEnded),
            });
        };
        let mut must_continue = false;
        if matches!(task.phase, TaskPhase::Dumping { migration: phase_migration, .. } if phase_migration == migration)
        {
            let phase = std::mem::replace(&mut task.phase, TaskPhase::Stopped { migration });
            if let (Err(_), Some(namespace)) = (&result, &task.namespace) {
                // If the engine died, some processes of the task may run, so the task must be
                // stopped again.
                stop::signal_and_check_stopped(
                    &TaskProcesses::Namespace(namespace),
                    &mut BTreeSet::new(),
                    VforkRule::ChildRuns,
                );
            }
            if let TaskPhase::Dumping {
                attempt, aborted, ..
            } = phase
            {
                must_continue = aborted;
                let root_pid = task.process.pid;
                let failure = result.as_ref().err().filter(|_| !aborted);
                if failure.is_some_and(|why| {
                    self.retry_dump(migration, tid, root_pid, &why.failure, attempt)
                }) {
                    return;
                }
                self.migrations.post_copies.back_off_after_failure(failure);
            }
        }
        let result = result
            .map_err(Failure::from)
            .and_then(|(report, memory_server)| {
                memory_server
                    .map_or(Ok(()), |memory_server| {
                        self.serve_memory(migration, tid, memory_server)
                    })
                    .map(|()| report)
            });
        self.send(&FromTasker::Dumped { migration, result });
        if must_continue {
            self.continue_task(migration, tid);
        }
    }

    pub(crate) fn continue_task(&mut self, migration: MigrationId, tid: Tid) {
        drop(self.migrations.idle_dumps.take(migration));
        if let Some(task) = self.tasks.get_mut(&tid) {
            match &mut task.phase {
                TaskPhase::Dumping {
                    worker_id: active_worker_id,
                    aborted,
                    ..
                } => {
                    // The reply is sent when the worker has finished.
                    *aborted = true;
                    let active_worker_id = *active_worker_id;
                    return self.migrations.workers.cancel_worker(active_worker_id);
                }
                TaskPhase::ServingMemory {
                    worker_id: active_worker_id,
                    aborted,
                    ..
                } => {
                    *aborted = true;
                    let active_worker_id = *active_worker_id;
                    return self.stop_serving(migration, active_worker_id);
                }
                TaskPhase::Stopping {
                    migration: phase_migration,
                    ..
                }
                | TaskPhase::Stopped {
                    migration: phase_migration,
                } if *phase_migration == migration => {
                    task.continue_after_migration(&Census::default());
                }
                _ => {}
            }
        }
        self.send(&FromTasker::MigrationAborted { migration });
    }

    fn kill_source_copy(&mut self, migration: MigrationId, tid: Tid) {
        match self.tasks.get_mut(&tid) {
            Some(task) => {
                if let TaskPhase::Dumping {
                    worker_id: worker, ..
                } = task.phase
                {
                    self.migrations.workers.cancel_worker(worker);
                }
                let usage = task
                    .usage_on_other_hosts
                    .merged_with(stop::resource_usage(task.process.pid));
                // The task is stopped and creates no process, so one census is enough.
                let census = Census::default();
                nice::deprioritize(&task.processes().pids_in(&census));
                self.migrations
                    .post_copies
                    .keep_memory_after_kill(migration);
                task.kill_immediately(&census);
                self.remove_killed_task(migration, tid, usage);
            }
            // The task has exited, and its exit was already reported. Copies of what it has left
            // behind run at the target.
            None => {
                self.kill_leftovers(tid);
                self.send(&FromTasker::SourceKilled {
                    migration,
                    usage: Usage::default(),
                });
            }
        }
    }

    /// Removes the state of a task that was killed while it was stopped, and reports the end of the
    /// source's copy.
    ///
    /// The task executes no further instruction. The tasker does not wait until the kernel has
    /// freed the task's memory, because that may take long.
    fn remove_killed_task(&mut self, migration: MigrationId, tid: Tid, usage: Usage) {
        self.forward_all_output(tid);
        let Some(task) = self.tasks.remove(&tid) else {
            return;
        };
        self.send(&FromTasker::SourceKilled { migration, usage });
        if let Some(namespace) = task.namespace {
            self.kill_namespace(namespace, Vec::new());
        }
    }

    /// Ends the current migration step of a task that has exited while it was stopped, and reports
    /// the failed step to the daemon.
    pub(crate) fn end_migration_step_of_exited(&mut self, task: &Task) {
        self.migrations.pre_copies.on_task_exit(task.tid);
        match task.phase {
            TaskPhase::Stopping { migration, .. } => {
                self.send(&FromTasker::Stopped {
                    migration,
                    result: Err(Failure::TaskEnded),
                });
            }
            TaskPhase::Dumping {
                worker_id: active_worker_id,
                ..
            } => self.migrations.workers.cancel_worker(active_worker_id),
            TaskPhase::ServingMemory {
                migration,
                worker_id: active_worker_id,
                ..
            } => self.stop_serving(migration, active_worker_id),
            TaskPhase::Running | TaskPhase::Stopped { .. } => {}
        }
    }
}

/// Writes the redirect, if any, into the memory of a stopped task. The task's library reads the
/// redirect when the task continues on another host.
pub(crate) fn write_redirect(
    namespace: &Namespace,
    redirect: Option<MemoryWrite>,
) -> Result<(), Failure> {
    let Some(MemoryWrite {
        address: RedirectAddress {
            pid: namespace_pid,
            address,
        },
        bytes,
    }) = redirect
    else {
        return Ok(());
    };
    let Some(pid) = namespace
        .pids()
        .into_iter()
        .find(|pid| checkpoint::proc::innermost_pid(*pid) == Some(namespace_pid))
    else {
        return Err(Failure::Engine(format!(
            "its process {namespace_pid}, whose library has quiesced, does not exist"
        )));
    };
    let write_failure = |e| {
        Failure::Engine(format!(
            "its new location cannot be written into its library: process {pid}: {e}"
        ))
    };
    sys::write_memory(pid, address, &bytes).map_err(write_failure)
}

/// Returns the limits of a dump or restore of `memory_bytes` bytes of memory: the time limit and a
/// new cancellation handle.
pub(crate) fn engine_limits(memory_bytes: u64) -> Result<CallLimits, Failure> {
    let cancel = CancelHandle::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
    Ok(CallLimits {
        timeout: ENGINE_TIMEOUT_BASE
            + Duration::from_secs(memory_bytes / ENGINE_BYTES_PER_SECOND_MIN),
        cancel,
    })
}

/// Returns the total memory of these processes in bytes, resident or swapped out.
pub(crate) fn total_memory_bytes(pids: &[i32]) -> u64 {
    pids.iter()
        .filter_map(|pid| facts::process_memory_bytes(*pid))
        .sum()
}
