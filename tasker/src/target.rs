//! The target of a migration: reserves a namespace, restores the task or restarts its program, then
//! runs or discards the task.

use crate::census::{Census, ProcessTree};
use crate::file_transfer::PlacedFiles;
use crate::host_account::ClaimError;
use crate::idle_engines::{self, EnginePlace, IdleRestoreWithOutput};
use crate::image_manifest::ImageManifest;
use crate::image_vault::ImageDir;
use crate::migrations::{engine_limits, no_namespaces_reason, write_redirect};
use crate::namespace::Namespace;
use crate::pause::Pause;
use crate::process_settings;
use crate::supervisor::{Supervisor, TASKS_MAX};
use crate::sys::{self, Child};
use crate::task::{self, Output, Task, TaskPhase};
use crate::task_user::{TaskUser, with_own_file_rights};
use crate::workers::WorkerResult;
use crate::written_files;
use checkpoint::engine::{
    CallLimits, EngineFailure, ExternalResources, FailedPart, RestoreParams, RunningRestore,
};
use checkpoint::facts::{self, ThisHost};
use sempa_proto::migration::{Failure, Refusal, RequiredFile, Usage};
use sempa_proto::tasker::{FromTasker, MemoryWrite, TaskStart};
use sempa_proto::{MigrationId, Tid};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Maximum number of migrations to this host that have been accepted and whose task does not run
/// yet. Further migrations are refused.
const INCOMING_TASKS_MAX: usize = 64;

/// A migration to this host, until its task runs or is discarded.
pub(crate) struct IncomingTask {
    pub(crate) tid: Tid,
    /// The namespace for the task. `None` if the tasker may not create namespaces; then only a
    /// restarted program can migrate to this host.
    pub(crate) namespace: Option<Namespace>,
    /// The engine that waits for the restore.
    pub(crate) idle_restore: Option<IdleRestoreWithOutput>,
    pub(crate) stage: TargetStage,
    /// Files that were transferred with the task and written at this host.
    pub(crate) placed_files: PlacedFiles,
    /// The directory of the images, once they have arrived.
    image_dir: Option<ImageDir>,
    /// True if most of the task's memory is post-copied.
    uses_post_copy: bool,
}

pub(crate) enum TargetStage {
    /// The host has accepted the task and reserved a namespace for it.
    Prepared,
    /// The seal of the images is being checked.
    TakingImagesIn {
        redirect: Option<MemoryWrite>,
        memory_socket: Option<PathBuf>,
        must_discard: bool,
    },
    /// Files that were transferred with the task are being written.
    PlacingFiles {
        image_dir: ImageDir,
        redirect: Option<MemoryWrite>,
        must_discard: bool,
    },
    /// The engine restores the task.
    Restoring {
        worker_id: u64,
        manifest: ImageManifest,
        output: Output,
        redirect: Option<MemoryWrite>,
        /// True if the restored processes will be members of the task's control group.
        is_in_group: bool,
        must_discard: bool,
        /// Why the post-copied memory will not arrive; `None` if no memory is lost.
        lost_reason: Option<Failure>,
    },
    /// The task is restored and stopped. The engine has ended before, so a death of the engine
    /// cannot kill the task when this copy of the task is the only one.
    Restored {
        process: Child,
        /// PIDs, in the task's namespace, of processes that were already stopped before the
        /// migration stopped the task.
        already_stopped_pids: Vec<i32>,
        /// Describes the processes of a task without a namespace.
        tree: ProcessTree,
        output: Output,
        /// True while the processes are being added to the control group.
        joining_group: bool,
        /// Set if the task must run as soon as its processes are in the control group. Contains the
        /// task's resource usage on other hosts, and true if the task must stay paused.
        pending_run: Option<(Usage, bool)>,
    },
}

impl TargetStage {
    /// Returns the reply to the daemon if the restored task was lost. If the task was already
    /// ordered to run, the reply is that it does not run; otherwise the reply is that the task was
    /// not restored.
    pub(crate) fn lost_reply(&self, migration: MigrationId, why: Failure) -> FromTasker {
        match self {
            Self::Restored {
                pending_run: Some(_),
                ..
            } => FromTasker::Running {
                migration,
                result: Err(why),
            },
            _ => FromTasker::Restored {
                migration,
                result: Err(why),
            },
        }
    }
}

impl Supervisor {
    pub(crate) fn prepare_target(
        &mut self,
        migration: MigrationId,
        tid: Tid,
    ) -> Result<(), Failure> {
        if self.migrations.incoming_tasks.contains_key(&migration) {
            return Err(Failure::Engine(format!(
                "{migration} is prepared here already"
            )));
        }
        if self.migrations.incoming_tasks.len() >= INCOMING_TASKS_MAX {
            return Err(Failure::Engine(format!(
                "{INCOMING_TASKS_MAX} migrations to this host are in progress, the limit"
            )));
        }
        if self.tasks.contains_key(&tid) {
            return Err(Failure::Engine(format!("{tid} runs here already")));
        }
        if self.tasks.len() + self.migrations.incoming_tasks.len() >= TASKS_MAX {
            return Err(Failure::Engine(format!(
                "this host has {TASKS_MAX} tasks of one virtual machine, the limit"
            )));
        }
        self.claim_arrival(migration).map_err(claim_failure)?;
        let namespace = match self.uses_namespaces() {
            true => {
                let namespace_result = self
                    .spare_namespaces
                    .take_or_create(self.freezer.as_mut().ok());
                Some(
                    namespace_result
                        .map_err(|e| Failure::Io(format!("no process-id namespace: {e}")))?,
                )
            }
            false => None,
        };
        let target = IncomingTask {
            tid,
            namespace,
            idle_restore: None,
            stage: TargetStage::Prepared,
            placed_files: PlacedFiles::default(),
            image_dir: None,
            uses_post_copy: false,
        };
        self.migrations.incoming_tasks.insert(migration, target);
        Ok(())
    }

    pub(crate) fn start_restore_or_report(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        dir: &Path,
        redirect: Option<MemoryWrite>,
        memory_socket: Option<&Path>,
    ) {
        let check_result = match self.migrations.incoming_tasks.get(&migration) {
            Some(IncomingTask {
                stage: TargetStage::Prepared,
                tid: prepared_tid,
                ..
            }) if *prepared_tid == tid => Ok(()),
            Some(_) => Err(Failure::Engine(format!(
                "{migration} is not waiting for the images of {tid}"
            ))),
            None => self.prepare_target(migration, tid),
        };
        if let Err(why) = check_result {
            return self.send(&FromTasker::Restored {
                migration,
                result: Err(why),
            });
        }
        let start_result = match self.engine_dir(tid, dir) {
            Ok(image_dir @ ImageDir::OfDaemon(_)) => {
                return self.restore_from(migration, image_dir, redirect, memory_socket);
            }
            Ok(image_dir) => self.start_uncancellable(move || WorkerResult::ImagesTakenIn {
                migration,
                result: image_dir.take_in().map(|()| image_dir),
            }),
            Err(why) => Err(why),
        };
        match (
            start_result,
            self.migrations.incoming_tasks.get_mut(&migration),
        ) {
            (Ok(_), Some(target)) => {
                target.stage = TargetStage::TakingImagesIn {
                    redirect,
                    memory_socket: memory_socket.map(Path::to_path_buf),
                    must_discard: false,
                }
            }
            (Ok(_), None) => {}
            (Err(why), _) => self.fail_restore(migration, why),
        }
    }

    /// Discards a migration to this host whose restore has failed, and reports the failure.
    fn fail_restore(&mut self, migration: MigrationId, why: Failure) {
        self.remove_incoming_task(
            migration,
            vec![FromTasker::Restored {
                migration,
                result: Err(why),
            }],
        );
    }

    /// Handles the end of the check of the images' seal.
    pub(crate) fn on_images_taken_in(
        &mut self,
        migration: MigrationId,
        result: Result<ImageDir, Failure>,
    ) {
        let Some(target) = self.migrations.incoming_tasks.get_mut(&migration) else {
            return;
        };
        let stage = std::mem::replace(&mut target.stage, TargetStage::Prepared);
        let TargetStage::TakingImagesIn {
            redirect,
            memory_socket,
            must_discard,
        } = stage
        else {
            target.stage = stage;
            return;
        };
        match result {
            _ if must_discard => {
                let cancelled = Failure::Cancelled("the migration was cancelled".into());
                let restored = FromTasker::Restored {
                    migration,
                    result: Err(cancelled),
                };
                let final_messages = vec![restored, FromTasker::Discarded { migration }];
                self.remove_incoming_task(migration, final_messages);
            }
            Ok(image_dir) => {
                self.restore_from(migration, image_dir, redirect, memory_socket.as_deref());
            }
            Err(why) => self.fail_restore(migration, why),
        }
    }

    /// Starts the restore of a task from complete images.
    fn restore_from(
        &mut self,
        migration: MigrationId,
        image_dir: ImageDir,
        redirect: Option<MemoryWrite>,
        memory_socket: Option<&Path>,
    ) {
        let dir = image_dir.path();
        let image_manifest = with_own_file_rights(|| ImageManifest::read(dir));
        self.migrations
            .reservations
            .record_image_arrival(migration, dir);
        let check_result = image_manifest.as_ref().map_or(Ok(()), |image_manifest| {
            self.check_grown_memory(migration, image_manifest.memory_bytes)
        });
        let fetch_result = check_result.map_err(EngineFailure::from).and_then(|()| {
            memory_socket
                .map_or(Ok(()), |path| self.start_fetch(migration, &image_dir, path))
                .map_err(EngineFailure::missing_memory)
        });
        if let Some(target) = self.migrations.incoming_tasks.get_mut(&migration) {
            target.uses_post_copy = memory_socket.is_some();
            target.image_dir = Some(image_dir.clone());
        }
        match (fetch_result, image_manifest) {
            (Err(why), _) => {
                self.migrations
                    .post_copies
                    .back_off_after_failure(Some(&why));
                self.remove_incoming_task(
                    migration,
                    vec![FromTasker::Restored {
                        migration,
                        result: Err(why.failure),
                    }],
                );
            }
            (Ok(()), Ok(image_manifest)) if !image_manifest.transferred_files.is_empty() => {
                self.start_placing_files(migration, image_dir, image_manifest, redirect)
            }
            // A defect of the manifest is reported when `start_restore` reads it.
            _ => self.start_engine_restore(migration, image_dir, redirect),
        }
    }

    /// Starts the restore of a task by the engine. The task's files must have been written before,
    /// and the fetch of its memory started.
    pub(crate) fn start_engine_restore(
        &mut self,
        migration: MigrationId,
        image_dir: ImageDir,
        redirect: Option<MemoryWrite>,
    ) {
        let start_result = self.start_restore(migration, &image_dir, redirect);
        match (
            start_result,
            self.migrations.incoming_tasks.get_mut(&migration),
        ) {
            (Ok(stage), Some(target)) => target.stage = stage,
            (Ok(_), None) => {}
            (Err(why), _) => self.remove_incoming_task(
                migration,
                vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }],
            ),
        }
    }

    /// Starts a program from its beginning, for a migration without images. The program stops
    /// before its exec.
    pub(crate) fn start_stopped_program(&mut self, migration: MigrationId, order: &TaskStart) {
        let stage_check = match self.migrations.incoming_tasks.get(&migration) {
            Some(IncomingTask {
                stage: TargetStage::Prepared,
                ..
            }) => Ok(()),
            Some(_) => Err(Failure::Engine(format!("{migration} is held here already"))),
            None => self.prepare_target(migration, order.tid),
        };
        let first_pid = self.first_pid(order.tid);
        let start_result = stage_check.and_then(|()| {
            let namespace = self
                .migrations
                .incoming_tasks
                .get(&migration)
                .and_then(|target| target.namespace.as_ref())
                .map(|namespace| (namespace, first_pid));
            let limit = self.exec_time_limit();
            task::start_stopped_process(order, namespace, &self.task_start_state, limit)
                .map_err(|why| Failure::Io(why.to_string()))
        });
        match (
            start_result,
            self.migrations.incoming_tasks.get_mut(&migration),
        ) {
            (Ok((process, output)), Some(target)) => {
                let pid = process.pid;
                target.stage = TargetStage::Restored {
                    tree: ProcessTree::new(pid, &order.env),
                    process,
                    already_stopped_pids: Vec::new(),
                    output,
                    joining_group: false,
                    pending_run: None,
                };
                self.send(&FromTasker::Restored {
                    migration,
                    result: Ok(pid),
                });
            }
            (Ok(_), None) => {}
            (Err(why), None) => self.send(&FromTasker::Restored {
                migration,
                result: Err(why),
            }),
            (Err(why), Some(_)) => {
                self.remove_incoming_task(
                    migration,
                    vec![FromTasker::Restored {
                        migration,
                        result: Err(why),
                    }],
                );
            }
        }
    }

    fn start_restore(
        &mut self,
        migration: MigrationId,
        image_dir: &ImageDir,
        redirect: Option<MemoryWrite>,
    ) -> Result<TargetStage, Failure> {
        let dir = image_dir.path();
        let idle_restore = self
            .migrations
            .incoming_tasks
            .get_mut(&migration)
            .and_then(|target| target.idle_restore.take())
            .filter(|idle| !idle.engine.has_ended());
        let target = self
            .migrations
            .incoming_tasks
            .get(&migration)
            .ok_or(Failure::TaskEnded)?;
        let namespace = target
            .namespace
            .as_ref()
            .ok_or_else(|| Failure::Engine(no_namespaces_reason().into()))?;
        let uses_post_copy = target.uses_post_copy;
        if uses_post_copy && !self.migrations.post_copies.is_memory_arriving(migration) {
            return Err(Failure::Images(
                "the rest of its memory cannot be fetched".into(),
            ));
        }
        let engine = self
            .migrations
            .engine
            .as_ref()
            .ok_or_else(|| self.engine_failure())?;
        let manifest = self.read_own_images(dir)?;
        if redirect.is_some() {
            written_files::truncate_grown_files(&manifest.written_files)?;
        }
        let IdleRestoreWithOutput {
            engine: idle_restore,
            output,
            is_in_group,
        } = match idle_restore {
            Some(idle_restore) => idle_restore,
            None => idle_engines::start_restore_engine(
                engine.as_ref(),
                &EnginePlace {
                    namespace,
                    vault: self.image_vault.as_ref(),
                    pid_numbering: self.pid_numbering,
                },
            )?,
        };
        // After the start of the engine, which has PIDs of its own inside the namespace.
        self.prepare_pids(namespace, dir)?;
        let limits = engine_limits(manifest.image_bytes())?;
        let restore_params = RestoreParams {
            dir: dir.into(),
            external_resources: ExternalResources {
                output_pipe: manifest.output_pipe_inode,
            },
            post_copy: uses_post_copy,
        };
        let running_restore = with_own_file_rights(|| idle_restore.start(restore_params))?;
        let (cancel, engine_pid) = (limits.cancel.clone(), running_restore.engine_pid());
        let open_files = manifest.open_files.clone();
        let host = ThisHost::new(self.migrations.hash_cache.clone(), 0, u32::MAX);
        // The images contain a stopped task. Therefore the task remains stopped when the engine
        // detaches.
        let work = move || {
            let restore_result = wait_and_complete(running_restore, &limits);
            WorkerResult::Restored {
                migration,
                result: restore_result.map_err(|failure| EngineFailure {
                    failure: explain_failed_restore(failure.failure, &open_files, &host),
                    ..failure
                }),
            }
        };
        let restore_worker_id =
            self.migrations
                .workers
                .start_worker(&cancel, Some(engine_pid), work)?;
        Ok(TargetStage::Restoring {
            worker_id: restore_worker_id,
            manifest,
            output,
            redirect,
            is_in_group,
            must_discard: false,
            lost_reason: None,
        })
    }

    /// Reads the manifest of images that belong to the user of the tasks: they determine the rights
    /// of the restored processes.
    fn read_own_images(&self, dir: &Path) -> Result<ImageManifest, Failure> {
        let user = self.task_start_state.user();
        let uid = user.map_or_else(|| nix::unistd::geteuid().as_raw(), TaskUser::uid);
        with_own_file_rights(|| {
            let manifest = ImageManifest::read(dir)?;
            checkpoint::criu::check_owner(dir, uid)?;
            Ok(manifest)
        })
    }

    /// Checks that the namespace allows the PIDs in the images. Makes the PIDs of future processes
    /// of the task follow the highest of them, as they would have at the source.
    fn prepare_pids(&self, namespace: &Namespace, dir: &Path) -> Result<(), Failure> {
        let highest_pid = with_own_file_rights(|| checkpoint::criu::highest_pid(dir))?;
        if let Some(pid_limit) = self.pid_numbering.map(|numbering| numbering.pid_limit)
            && highest_pid >= pid_limit
        {
            return Err(Failure::Refused(vec![Refusal::ProcessIds {
                highest: highest_pid,
                limit: pid_limit,
            }]));
        }
        // If the kernel does not permit it, future processes have the first PIDs of the namespace.
        let _ = namespace.set_last_pid(highest_pid.cast_signed());
        Ok(())
    }

    pub(crate) fn on_restored(
        &mut self,
        migration: MigrationId,
        result: Result<i32, EngineFailure>,
    ) {
        let Some(target) = self.migrations.incoming_tasks.get_mut(&migration) else {
            return;
        };
        let stage = std::mem::replace(&mut target.stage, TargetStage::Prepared);
        let TargetStage::Restoring {
            manifest,
            output,
            redirect: redirection,
            is_in_group,
            must_discard: is_discarded,
            lost_reason,
            ..
        } = stage
        else {
            return;
        };
        let result = first_failure(result, lost_reason);
        if target.uses_post_copy && !is_discarded {
            self.migrations
                .post_copies
                .back_off_after_failure(result.as_ref().err());
        }
        let process_result = result.map_err(Failure::from).and_then(|pid| {
            let pidfd = sys::pidfd_of(pid)
                .map_err(|e| Failure::Io(format!("no descriptor for process {pid}: {e}")))?;
            if let Some(namespace) = &target.namespace {
                process_settings::write_differing(&manifest.process_settings, || namespace.pids())?;
                write_redirect(namespace, redirection)?;
            }
            Ok(Child { pid, pidfd })
        });
        match process_result {
            Ok(process) if !is_discarded => {
                let pid = process.pid;
                let namespace = target.namespace.as_ref();
                if let Some(namespace) = namespace.filter(|_| is_in_group) {
                    namespace.record_group_membership();
                }
                let joining_group = namespace.is_some_and(|namespace| {
                    idle_engines::start_joining_group(
                        namespace,
                        namespace.pids(),
                        &mut self.migrations.workers,
                        move |succeeded| WorkerResult::JoinedControlGroup {
                            migration,
                            succeeded,
                        },
                    )
                });
                let initially_stopped_pids = manifest.already_stopped_pids;
                target.stage = TargetStage::Restored {
                    // A restored task always has a namespace.
                    tree: ProcessTree::new(process.pid, &[]),
                    process,
                    already_stopped_pids: initially_stopped_pids,
                    output,
                    joining_group,
                    pending_run: None,
                };
                self.send(&FromTasker::Restored {
                    migration,
                    result: Ok(pid),
                });
            }
            Ok(_) => {
                let cancelled_result =
                    Err(Failure::Cancelled("the migration was cancelled".into()));
                let final_messages = FromTasker::Restored {
                    migration,
                    result: cancelled_result,
                };
                self.remove_incoming_task(
                    migration,
                    vec![final_messages, FromTasker::Discarded { migration }],
                );
            }
            Err(why) => {
                let mut final_messages = vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }];
                final_messages.extend(is_discarded.then_some(FromTasker::Discarded { migration }));
                self.remove_incoming_task(migration, final_messages);
            }
        }
    }

    /// Handles the end of a restored task that does not run yet: another process has killed it.
    pub(crate) fn on_restored_task_ended(&mut self, migration: MigrationId) {
        let is_restored =
            |target: &IncomingTask| matches!(target.stage, TargetStage::Restored { .. });
        if self
            .migrations
            .incoming_tasks
            .get(&migration)
            .is_some_and(is_restored)
        {
            let why =
                Failure::Engine("the restored task was killed before it could continue".into());
            let reply = self.migrations.incoming_tasks[&migration]
                .stage
                .lost_reply(migration, why);
            self.remove_incoming_task(migration, vec![reply]);
        }
    }

    pub(crate) fn on_joined_group(&mut self, migration: MigrationId, succeeded: bool) {
        let Some(target) = self.migrations.incoming_tasks.get_mut(&migration) else {
            return;
        };
        let TargetStage::Restored {
            joining_group,
            pending_run,
            ..
        } = &mut target.stage
        else {
            return;
        };
        *joining_group = false;
        if let Some(namespace) = target.namespace.as_ref().filter(|_| succeeded) {
            namespace.record_group_membership();
        }
        if let Some((used_resources, must_stay_paused)) = pending_run.take() {
            self.run_restored_task(migration, used_resources, must_stay_paused);
        }
    }

    pub(crate) fn run_restored_task(&mut self, migration: MigrationId, usage: Usage, paused: bool) {
        if let Some(IncomingTask {
            stage:
                TargetStage::Restored {
                    joining_group: true,
                    pending_run,
                    ..
                },
            ..
        }) = self.migrations.incoming_tasks.get_mut(&migration)
        {
            // A stopped task cannot fork, so the group will contain all its processes. The task
            // runs when they are in the group.
            *pending_run = Some((usage, paused));
            return;
        }
        let (tid, namespace, process, tree, initially_stopped_pids, output) =
            match self.migrations.incoming_tasks.remove(&migration) {
                Some(IncomingTask {
                    tid,
                    namespace,
                    stage:
                        TargetStage::Restored {
                            process,
                            already_stopped_pids: initially_stopped_pids,
                            tree,
                            output,
                            ..
                        },
                    placed_files,
                    ..
                }) => {
                    placed_files.keep_files();
                    (
                        tid,
                        namespace,
                        process,
                        tree,
                        initially_stopped_pids,
                        output,
                    )
                }
                other => {
                    self.migrations
                        .incoming_tasks
                        .extend(other.map(|target| (migration, target)));
                    let missing_failure =
                        Failure::Engine(format!("nothing is held here for {migration}"));
                    return self.send(&FromTasker::Running {
                        migration,
                        result: Err(missing_failure),
                    });
                }
            };
        // While the lease permits no task to run, the task runs when the lease is renewed.
        let is_held = !paused && self.lease.is_frozen();
        let stays_stopped = paused || is_held;
        let mut task = Task {
            tid,
            process,
            namespace,
            tree,
            output,
            is_pinned: false,
            usage_on_other_hosts: usage,
            phase: TaskPhase::Running,
            pause: if stays_stopped {
                Pause::Paused
            } else {
                Pause::NotPaused
            },
            is_held,
            already_stopped_pids: initially_stopped_pids,
            exit_requested_for: None,
            pending_redirect: None,
            deferred_signals: Vec::new(),
        };
        if !stays_stopped {
            task.continue_after_migration(&Census::default());
        }
        self.tasks.insert(tid, task);
        self.send(&FromTasker::Running {
            migration,
            result: Ok(()),
        });
        self.on_restored_task_runs(migration, tid);
    }

    pub(crate) fn discard_incoming_task(&mut self, migration: MigrationId) {
        let Some(target) = self.migrations.incoming_tasks.get_mut(&migration) else {
            return self.send(&FromTasker::Discarded { migration });
        };
        match &mut target.stage {
            TargetStage::Restoring {
                worker_id: active_worker_id,
                must_discard: is_discarded,
                ..
            } => {
                *is_discarded = true;
                let active_worker_id = *active_worker_id;
                self.migrations.workers.cancel_worker(active_worker_id);
            }
            // The reply is sent after the worker has finished and the files have been removed.
            TargetStage::PlacingFiles {
                must_discard: is_discarded,
                ..
            }
            | TargetStage::TakingImagesIn {
                must_discard: is_discarded,
                ..
            } => *is_discarded = true,
            TargetStage::Prepared | TargetStage::Restored { .. } => {
                self.remove_incoming_task(migration, vec![FromTasker::Discarded { migration }]);
            }
        }
    }

    /// Discards a migration to this host and kills the restored processes, if any. Sends
    /// `final_messages` when they have ended.
    pub(crate) fn remove_incoming_task(
        &mut self,
        migration: MigrationId,
        final_messages: Vec<FromTasker>,
    ) {
        self.cancel_fetch(migration);
        if let Some(target) = self.migrations.incoming_tasks.remove(&migration) {
            match (target.namespace, target.stage) {
                (Some(namespace), _) => self.kill_namespace(namespace, final_messages),
                (None, stage) => {
                    if let TargetStage::Restored { process, .. } = stage {
                        // Without a namespace the task is a program that was stopped before its
                        // exec. Such a program has a single process.
                        sys::kill_pidfd(process.pidfd.as_fd());
                    }
                    final_messages.iter().for_each(|reply| self.send(reply));
                }
            }
            // A namespace ends only after its restored processes are reaped. A process that has
            // died may not be reaped yet.
            self.reap_unowned();
        }
    }
}

/// Returns the failure of a migration that a limit of this host excludes.
pub(crate) fn claim_failure(error: ClaimError) -> Failure {
    match error {
        ClaimError::Limit(limit) => Failure::Refused(vec![Refusal::HostLimit(limit)]),
        error @ ClaimError::Account(_) => Failure::Io(error.to_string()),
    }
}

/// Returns the failure that has caused the other, if both the restore and the fetch of the missing
/// memory have failed. `lost_reason` is the failure of the fetch.
///
/// The fetch ends when the engine that restores the task ends, and the restore is canceled when the
/// fetch has failed. So a restore that failed by itself, and not for lack of memory, is the cause.
fn first_failure(
    restore_result: Result<i32, EngineFailure>,
    lost_reason: Option<Failure>,
) -> Result<i32, EngineFailure> {
    let failed_by_itself = restore_result.as_ref().is_err_and(|why| {
        why.failed_part == FailedPart::Other && !matches!(why.failure, Failure::Cancelled(_))
    });
    match lost_reason {
        Some(lost_reason) if !failed_by_itself => Err(EngineFailure::missing_memory(lost_reason)),
        _ => restore_result,
    }
}

/// Waits for the engine. Returns the PID of the restored task, which is still stopped.
fn wait_and_complete(
    running_restore: Box<dyn RunningRestore>,
    limits: &CallLimits,
) -> Result<i32, EngineFailure> {
    let restored_task = running_restore.wait_until_restored(limits)?;
    let process = restored_task.pid();
    restored_task.complete_restore(limits)?;
    Ok(process)
}

/// Replaces the failure of an engine by the files that the task had open and that this host lacks,
/// if there are any: the task may have opened a file after this host had accepted it.
fn explain_failed_restore(
    failure: Failure,
    open_files: &[RequiredFile],
    host: &ThisHost,
) -> Failure {
    let Failure::Engine(engine_text) = &failure else {
        return failure;
    };
    let verdict = facts::refused_open_files(open_files, host);
    if verdict.is_empty() {
        return failure;
    }
    tracing::warn!("the restore failed because files are missing: {engine_text}");
    Failure::Refused(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the engine fails, the fetch of the memory ends as well, but is not the cause. If the
    /// fetch fails, the restore is canceled.
    #[test]
    fn first_failure_is_the_cause() {
        let lost = || Some(Failure::Engine("the fetch has ended".into()));
        let cause = |restore_result, lost_reason| {
            first_failure(restore_result, lost_reason)
                .map_err(|why| (why.failure.to_string(), why.failed_part))
        };
        let traced = Failure::Engine("the namespace's init is traced".into());
        assert_eq!(
            cause(Err(traced.clone().into()), lost()),
            Err((traced.to_string(), FailedPart::Other))
        );
        let lost_text = lost().map(|why| why.to_string()).unwrap_or_default();
        for restore_result in [
            Ok(1),
            Err(Failure::Cancelled("by the fetch".into()).into()),
            Err(EngineFailure::missing_memory(traced)),
        ] {
            assert_eq!(
                cause(restore_result, lost()),
                Err((lost_text.clone(), FailedPart::MissingMemory))
            );
        }
        assert_eq!(cause(Ok(1), None), Ok(1));
    }
}
