//! The target of a migration: prepare, restore or restart, then run or discard the task.

use crate::file_transfer::PlacedFiles;
use crate::freezer;
use crate::image_manifest::ImageManifest;
use crate::migrations::{NO_NAMESPACES, engine_limits, write_redirection};
use crate::namespace::Namespace;
use crate::pause::Pause;
use crate::supervisor::Supervisor;
use crate::sys::{self, Child};
use crate::task::{self, Output, Task, TaskPhase};
use crate::workers::{WorkerResult, Workers};
use crate::written_files;
use checkpoint::engine::{CancelHandle, ExternalResources, RestoreJob};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::tasker::{FromTasker, MemoryWrite, StartTask};
use sempa_proto::{MigrationId, Tid};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Maximum number of migrations to this host that are prepared or further advanced. Further
/// migrations are refused.
const TARGETS_MAX: usize = 64;

/// A migration to this host.
pub(crate) struct IncomingTask {
    pub(crate) tid: Tid,
    /// `None` if the tasker may not create namespaces. Then only a program that is restarted can
    /// migrate to this host.
    namespace: Option<Namespace>,
    pub(crate) stage: TargetStage,
    /// Files that were transferred with the task.
    pub(crate) placed_files: PlacedFiles,
    /// True if most of the task's memory is post-copied.
    post_copy: bool,
}

pub(crate) enum TargetStage {
    /// The host has accepted the task and reserved a namespace for it.
    Prepared,
    /// Files that were transferred with the task are being written.
    PlacingFiles {
        dir: PathBuf,
        redirection: Option<MemoryWrite>,
        discard: bool,
    },
    /// The engine restores the task.
    Restoring {
        worker: u64,
        manifest: ImageManifest,
        output: Output,
        redirection: Option<MemoryWrite>,
        discard: bool,
        /// Why the post-copied memory will not arrive, if it is lost.
        lost_reason: Option<Failure>,
    },
    /// The task is restored and stopped. The engine has ended, so the end of the engine cannot kill
    /// the task when it is the only copy.
    Restored {
        process: Child,
        /// Processes that were already stopped before the migration stopped the task.
        stopped_before: Vec<i32>,
        output: Output,
        /// True while the processes are being added to the control group.
        joining_group: bool,
        /// Set if the task must run when its processes are in the control group: its resource usage
        /// on other hosts, and true if it must stay paused.
        pending_run: Option<(Usage, bool)>,
    },
}

impl TargetStage {
    /// Returns the reply for a restored task that was lost. If the task was ordered to run, the
    /// reply is that it does not run; otherwise that it was not restored.
    pub(crate) fn lost_reply(&self, migration: MigrationId, why: Failure) -> FromTasker {
        match self {
            TargetStage::Restored {
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
    pub(crate) fn reserve_target(
        &mut self,
        migration: MigrationId,
        tid: Tid,
    ) -> Result<(), Failure> {
        if self.migrations.targets.contains_key(&migration) {
            return Err(Failure::Engine(format!(
                "{migration} is prepared here already"
            )));
        }
        if self.migrations.targets.len() >= TARGETS_MAX {
            return Err(Failure::Engine(format!(
                "{TARGETS_MAX} migrations to this host are in progress, the limit"
            )));
        }
        if self.tasks.contains_key(&tid) {
            return Err(Failure::Engine(format!("{tid} runs here already")));
        }
        let namespace = match self.uses_namespaces {
            true => {
                let taken = self.spare_namespaces.take(self.freezer.as_mut().ok());
                Some(taken.map_err(|e| Failure::Io(format!("no process-id namespace: {e}")))?)
            }
            false => None,
        };
        let target = IncomingTask {
            tid,
            namespace,
            stage: TargetStage::Prepared,
            placed_files: PlacedFiles::default(),
            post_copy: false,
        };
        self.migrations.targets.insert(migration, target);
        Ok(())
    }

    pub(crate) fn restore(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        dir: &Path,
        redirection: Option<MemoryWrite>,
        memory_socket: Option<&Path>,
    ) {
        let reserved = match self.migrations.targets.get(&migration) {
            Some(IncomingTask {
                stage: TargetStage::Prepared,
                tid: of,
                ..
            }) if *of == tid => Ok(()),
            Some(_) => Err(Failure::Engine(format!(
                "{migration} is not waiting for the images of {tid}"
            ))),
            None => self.reserve_target(migration, tid),
        };
        if let Err(why) = reserved {
            return self.send(&FromTasker::Restored {
                migration,
                result: Err(why),
            });
        }
        let image_manifest = ImageManifest::read(dir);
        self.migrations.reservations.record_images(migration, dir);
        let reserved = image_manifest.as_ref().map_or(Ok(()), |image_manifest| {
            self.check_memory_for(migration, image_manifest.memory_bytes)
        });
        let fetches = reserved.and_then(|()| {
            memory_socket.map_or(Ok(()), |path| self.start_fetch(migration, dir, path))
        });
        if let Some(target) = self.migrations.targets.get_mut(&migration) {
            target.post_copy = memory_socket.is_some();
        }
        match (fetches, image_manifest) {
            (Err(why), _) => {
                self.migrations.post_copies.on_failure(Some(&why));
                self.remove_target(
                    migration,
                    vec![FromTasker::Restored {
                        migration,
                        result: Err(why),
                    }],
                );
            }
            (Ok(()), Ok(image_manifest)) if !image_manifest.transferred_files.is_empty() => {
                self.place_files(migration, dir, image_manifest, redirection)
            }
            // A defect of the manifest is reported when `build` reads it.
            _ => self.start_engine_restore(migration, dir, redirection),
        }
    }

    /// Starts the restore of a task by the engine. All other preparations must be complete.
    pub(crate) fn start_engine_restore(
        &mut self,
        migration: MigrationId,
        dir: &Path,
        redirection: Option<MemoryWrite>,
    ) {
        let started = self.start_restore(migration, dir, redirection);
        match (started, self.migrations.targets.get_mut(&migration)) {
            (Ok(stage), Some(target)) => target.stage = stage,
            (Ok(_), None) => {}
            (Err(why), _) => self.remove_target(
                migration,
                vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }],
            ),
        }
    }

    /// Starts a program from its beginning in place of a restore. The program stops before its
    /// exec.
    pub(crate) fn start_stopped_program(&mut self, migration: MigrationId, start: &StartTask) {
        let prepared = match self.migrations.targets.get(&migration) {
            Some(IncomingTask {
                stage: TargetStage::Prepared,
                ..
            }) => Ok(()),
            Some(_) => Err(Failure::Engine(format!("{migration} is held here already"))),
            None => self.reserve_target(migration, start.tid),
        };
        let built = prepared.and_then(|()| {
            let namespace = self
                .migrations
                .targets
                .get(&migration)
                .and_then(|target| target.namespace.as_ref());
            task::start_stopped_process(start, namespace, &self.inherited)
                .map_err(|why| Failure::Io(why.to_string()))
        });
        match (built, self.migrations.targets.get_mut(&migration)) {
            (Ok((process, output)), Some(target)) => {
                let pid = process.pid;
                target.stage = TargetStage::Restored {
                    process,
                    stopped_before: Vec::new(),
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
                self.remove_target(
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
        dir: &Path,
        redirection: Option<MemoryWrite>,
    ) -> Result<TargetStage, Failure> {
        let target = self
            .migrations
            .targets
            .get(&migration)
            .ok_or(Failure::TaskEnded)?;
        let namespace = target
            .namespace
            .as_ref()
            .ok_or_else(|| Failure::Engine(NO_NAMESPACES.into()))?;
        let memory_follows = target.post_copy;
        if memory_follows && !self.migrations.post_copies.is_arriving(migration) {
            return Err(Failure::Images(
                "the rest of its memory cannot be fetched".into(),
            ));
        }
        let engine = self
            .migrations
            .engine
            .as_ref()
            .ok_or_else(|| self.engine_failure())?;
        let manifest = ImageManifest::read(dir)?;
        // The images determine the rights of the restored processes, so they must belong to the
        // user of the tasker.
        checkpoint::criu::check_owner(dir, nix::unistd::geteuid().as_raw())?;
        if redirection.is_some() {
            written_files::truncate_grown(&manifest.written_files)?;
        }
        let io = |e: io::Error| Failure::Io(format!("cannot restore: {e}"));
        let (output, theirs) = Output::new().map_err(io)?;
        let limits = engine_limits(manifest.image_bytes())?;
        let job = RestoreJob {
            dir: dir.into(),
            external: ExternalResources {
                output_pipe: manifest.output_pipe,
            },
            pid_namespace: namespace.open().map_err(io)?,
            output: theirs,
            post_copy: memory_follows,
        };
        let restoring = engine.start_restore(job)?;
        let (cancel, pid) = (limits.cancel.clone(), restoring.engine_pid());
        // The images contain a stopped task, so the task remains stopped when the engine detaches.
        let build = move || {
            let built = restoring.wait_until_restored(&limits).and_then(|held| {
                let process = held.pid();
                held.release(&limits).map(|()| process)
            });
            WorkerResult::Restored {
                migration,
                result: built,
            }
        };
        let worker = self.migrations.workers.start(&cancel, Some(pid), build)?;
        Ok(TargetStage::Restoring {
            worker,
            manifest,
            output,
            redirection,
            discard: false,
            lost_reason: None,
        })
    }

    pub(crate) fn on_restored(&mut self, migration: MigrationId, result: Result<i32, Failure>) {
        let Some(target) = self.migrations.targets.get_mut(&migration) else {
            return;
        };
        let stage = std::mem::replace(&mut target.stage, TargetStage::Prepared);
        let TargetStage::Restoring {
            manifest,
            output,
            redirection,
            discard,
            lost_reason,
            ..
        } = stage
        else {
            return;
        };
        if target.post_copy && !discard && lost_reason.is_none() {
            self.migrations
                .post_copies
                .on_failure(result.as_ref().err());
        }
        let adopted = lost_reason.map_or(result, Err).and_then(|pid| {
            let pidfd = sys::pidfd_of(pid)
                .map_err(|e| Failure::Io(format!("no descriptor for process {pid}: {e}")))?;
            target.namespace.as_ref().map_or(Ok(()), |namespace| {
                write_redirection(namespace, redirection)
            })?;
            Ok(Child { pid, pidfd })
        });
        match adopted {
            Ok(process) if !discard => {
                let pid = process.pid;
                let namespace = target.namespace.as_ref();
                let joining_group = namespace.is_some_and(|n| {
                    start_joining_group(migration, n, &mut self.migrations.workers)
                });
                let stopped_before = manifest.already_stopped_pids;
                target.stage = TargetStage::Restored {
                    process,
                    stopped_before,
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
                let off = Err(Failure::Cancelled("the migration was cancelled".into()));
                let last = FromTasker::Restored {
                    migration,
                    result: off,
                };
                self.remove_target(migration, vec![last, FromTasker::Discarded { migration }]);
            }
            Err(why) => {
                let mut last = vec![FromTasker::Restored {
                    migration,
                    result: Err(why),
                }];
                last.extend(discard.then_some(FromTasker::Discarded { migration }));
                self.remove_target(migration, last);
            }
        }
    }

    /// Handles the death of a restored task that does not run yet, because another process has
    /// killed it.
    pub(crate) fn on_restored_task_killed(&mut self, migration: MigrationId) {
        let is_held = |target: &IncomingTask| matches!(target.stage, TargetStage::Restored { .. });
        if self.migrations.targets.get(&migration).is_some_and(is_held) {
            let why =
                Failure::Engine("the restored task was killed before it could continue".into());
            let reply = self.migrations.targets[&migration]
                .stage
                .lost_reply(migration, why);
            self.remove_target(migration, vec![reply]);
        }
    }

    pub(crate) fn on_joined_group(&mut self, migration: MigrationId, done: bool) {
        let Some(target) = self.migrations.targets.get_mut(&migration) else {
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
        if let Some(namespace) = target.namespace.as_ref().filter(|_| done) {
            namespace.set_in_group();
        }
        if let Some((used, held)) = pending_run.take() {
            self.run_restored_task(migration, used, held);
        }
    }

    pub(crate) fn run_restored_task(&mut self, migration: MigrationId, used: Usage, paused: bool) {
        if let Some(IncomingTask {
            stage:
                TargetStage::Restored {
                    joining_group: true,
                    pending_run,
                    ..
                },
            ..
        }) = self.migrations.targets.get_mut(&migration)
        {
            // A stopped task cannot fork, so no process is missed. The task runs after all its
            // processes are in the group.
            *pending_run = Some((used, paused));
            return;
        }
        let (tid, namespace, process, stopped_before, output) =
            match self.migrations.targets.remove(&migration) {
                Some(IncomingTask {
                    tid,
                    namespace,
                    stage:
                        TargetStage::Restored {
                            process,
                            stopped_before,
                            output,
                            ..
                        },
                    placed_files,
                    ..
                }) => {
                    placed_files.keep();
                    (tid, namespace, process, stopped_before, output)
                }
                other => {
                    self.migrations
                        .targets
                        .extend(other.map(|target| (migration, target)));
                    let not_held = Failure::Engine(format!("nothing is held here for {migration}"));
                    return self.send(&FromTasker::Running {
                        migration,
                        result: Err(not_held),
                    });
                }
            };
        let mut task = Task {
            tid,
            process,
            namespace,
            output,
            usage_on_other_hosts: used,
            phase: TaskPhase::Running,
            pause: if paused {
                Pause::Paused
            } else {
                Pause::NotPaused
            },
            already_stopped_pids: stopped_before,
            exit_requested_for: None,
            redirection: None,
            kept_signals: Vec::new(),
        };
        if !paused {
            task.continue_running();
        }
        self.tasks.insert(tid, task);
        self.send(&FromTasker::Running {
            migration,
            result: Ok(()),
        });
        self.on_restored_task_runs(migration, tid);
    }

    pub(crate) fn discard(&mut self, migration: MigrationId) {
        let Some(target) = self.migrations.targets.get_mut(&migration) else {
            return self.send(&FromTasker::Discarded { migration });
        };
        match &mut target.stage {
            TargetStage::Restoring {
                worker, discard, ..
            } => {
                *discard = true;
                let worker = *worker;
                self.migrations.workers.cancel(worker);
            }
            // The reply is sent when the files have been written and removed again.
            TargetStage::PlacingFiles { discard, .. } => *discard = true,
            TargetStage::Prepared | TargetStage::Restored { .. } => {
                self.remove_target(migration, vec![FromTasker::Discarded { migration }]);
            }
        }
    }

    /// Discards a migration to this host and kills the restored processes, if any. Sends
    /// `final_messages` when they have ended.
    pub(crate) fn remove_target(
        &mut self,
        migration: MigrationId,
        final_messages: Vec<FromTasker>,
    ) {
        self.cancel_fetch(migration);
        if let Some(target) = self.migrations.targets.remove(&migration) {
            match (target.namespace, target.stage) {
                (Some(namespace), _) => self.kill_namespace(namespace, final_messages),
                (None, stage) => {
                    if let TargetStage::Restored { process, .. } = stage {
                        // Without a namespace this is a program that was stopped before its exec,
                        // so it is a single process.
                        sys::kill_pidfd(process.pidfd.as_fd());
                    }
                    final_messages.iter().for_each(|reply| self.send(reply));
                }
            }
            // A restored task that has died is not reaped yet, and its namespace cannot end before
            // it is reaped.
            self.reap_unowned();
        }
    }
}

/// Starts a worker that adds the processes of a restored task to its control group. Returns false
/// if the task has no group or the worker cannot be started.
///
/// A worker is used because adding the processes takes longer than all other steps before the task
/// runs.
fn start_joining_group(
    migration: MigrationId,
    namespace: &Namespace,
    workers: &mut Workers,
) -> bool {
    let Some(procs_file) = namespace.group_to_join() else {
        return false;
    };
    let Ok(cancel) = CancelHandle::new() else {
        return false;
    };
    let pids = namespace.pids();
    let work = move || WorkerResult::JoinedCgroup {
        migration,
        succeeded: freezer::add_to_group(&procs_file, &pids).is_ok(),
    };
    // Without a worker, the task will be paused by signals, as without a freezer.
    workers.start(&cancel, None, work).is_ok()
}
