//! The start of the new process: its state files, its launch order, and its first connection.

use super::{NOT_STARTED_STATUS, WorldCall, lacks_dir};
use crate::tasks::ConnectionPhase;
use crate::{Machine, Output, World};
use checkpoint_protocol::{SourceEvent, TargetEvent};
use sempa_proto::engine::{LaunchInfo, RESTART_COUNT_ENV, STATE_ENV};
use sempa_proto::event::EventKind;
use sempa_proto::migration::Failure;
use sempa_proto::tasker::{DumpReport, TaskStart, ToTasker};
use sempa_proto::{MigrationId, PvmError, Tid};
use thiserror::Error;

impl Machine {
    pub(super) fn restart_program(&mut self, world: &mut dyn World, tid: Tid) {
        let is_shutting_down = self.shutdown.is_some();
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.respawn_state.is_some() && !is_shutting_down)
        else {
            return;
        };
        task.respawn_state = None;
        let launch = task.launch_info.clone().unwrap_or_default();
        match self.launch_order(world, tid, &launch) {
            Ok((start, spawn_token)) => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    (
                        task.spawn_token,
                        task.connection_phase,
                        task.awaits_restarted_process,
                    ) = (Some(spawn_token), ConnectionPhase::Expected, true);
                }
                self.tasks.tids_by_spawn_token.insert(spawn_token, tid);
                self.send_to_tasker(ToTasker::Start(start));
                self.log_and_record(format!(
                    "{tid} is restarted on this host ({} times so far)",
                    launch.restart_count
                ));
                self.pause_if_required(tid);
            }
            Err(why) => {
                self.log_warning_and_record(format!("{tid} could not be restarted: {why}"));
                let usage = self
                    .tasks
                    .get(tid)
                    .map(|task| task.earlier_usage)
                    .unwrap_or_default();
                self.end_task(tid, NOT_STARTED_STATUS, usage);
            }
        }
        self.notify_sources_continued(tid);
    }

    /// Handles the connection of a program that was started again on this host.
    pub(crate) fn handle_respawn_connected(&mut self, tid: Tid) {
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.awaits_restarted_process)
        else {
            return;
        };
        task.awaits_restarted_process = false;
        if !self.must_pause(tid)
            && let Some(task) = self.tasks.get_mut(tid)
        {
            task.pause = None;
        }
        self.notify_sources_reconnected(tid);
        self.release_inbox(tid);
        self.start_queued_migration(tid);
    }

    /// Collects the state files that a program has written before its exit. The program is started
    /// again afterwards.
    pub(super) fn collect_state(&mut self, world: &dyn World, id: MigrationId) {
        let Some(tid) = self
            .migrations
            .sources
            .get(&id)
            .map(|source| source.migration().tid)
        else {
            return;
        };
        let Some(launch) = self
            .tasks
            .get(tid)
            .and_then(|task| task.launch_info.as_ref())
        else {
            return;
        };
        if let Some(dir) = launch.working_dir().filter(|dir| lacks_dir(world, dir)) {
            let why = format!(
                "its working directory {dir} cannot be entered any more, so its state files cannot be found"
            );
            return self.pass_to_source(id, SourceEvent::Dumped(Err(Failure::Io(why))));
        }
        let (files, dir) = (
            launch.state_paths(tid),
            world.work_dir(launch.working_dir()),
        );
        self.outputs.push_back(Output::CollectState {
            migration: id,
            files,
            dir,
        });
    }

    /// Handles the result of collecting state files, and passes it to the source of the migration.
    /// If no file exists, an entry of the event log reports this.
    pub(crate) fn handle_state_collected(
        &mut self,
        id: MigrationId,
        result: Result<DumpReport, Failure>,
    ) {
        let tid = self
            .migrations
            .sources
            .get(&id)
            .map(|source| source.migration().tid);
        if let (Some(tid), Ok(DumpReport { image_files: 0, .. })) = (tid, &result) {
            let text = format!(
                "{tid} reported that it wrote its own checkpoint, but none of the files in {STATE_ENV} exists: from \
                 this checkpoint it starts at its beginning"
            );
            self.record_event(EventKind::Note { text });
        }
        self.pass_to_source(id, SourceEvent::Dumped(result));
    }

    /// Copies the state files of a task that is restarted from a checkpoint to their directories.
    pub(super) fn stage_state(&mut self, world: &dyn World, id: MigrationId) {
        let Some((tid, Some(launch))) = self.restoring_launch(id) else {
            return;
        };
        self.outputs.push_back(Output::StageState {
            migration: id,
            files: launch.state_paths(tid),
            dir: world.work_dir(launch.working_dir()),
        });
    }

    /// Returns the tid of the task that is being restored, and the launch information of its
    /// program; `None` if the target has ended. The launch information is `None` before the task's
    /// record has arrived.
    fn restoring_launch(&mut self, id: MigrationId) -> Option<(Tid, Option<Box<LaunchInfo>>)> {
        if !self.migrations.is_restoring(id) {
            return None;
        }
        let arrival = self.arrival_of(id)?;
        let record = arrival.record.as_ref();
        Some((arrival.tid, record.and_then(|record| record.launch.clone())))
    }

    /// Starts the program when its state files are staged. The files get their final names when the
    /// task runs.
    pub(crate) fn handle_state_staged(&mut self, id: MigrationId, result: Result<(), Failure>) {
        match result {
            Ok(()) => self.world_calls.push_back(WorldCall::PrepareProgram(id)),
            Err(why) => self.pass_to_target(id, TargetEvent::Restored(Err(why))),
        }
    }

    pub(super) fn prepare_program(&mut self, world: &mut dyn World, id: MigrationId) {
        let Some((tid, launch)) = self.restoring_launch(id) else {
            return;
        };
        match self.launch_order(world, tid, &launch.unwrap_or_default()) {
            Ok((start, spawn_token)) => {
                if let Some(arrival) = self.arrival_of(id) {
                    arrival.spawn_token = Some(spawn_token);
                }
                self.send_to_tasker(ToTasker::PrepareRestart {
                    migration: id,
                    start,
                });
            }
            Err(why) => {
                self.pass_to_target(id, TargetEvent::Restored(Err(Failure::Io(why.to_string()))))
            }
        }
    }

    /// Returns the order that starts the program again in the way a spawn on this host would, and
    /// the spawn token by which the process claims its tid.
    fn launch_order(
        &self,
        world: &mut dyn World,
        tid: Tid,
        launch: &LaunchInfo,
    ) -> Result<(TaskStart, i32), ProgramNotFound> {
        let (path, argv) =
            crate::spawn::find_program(world, &launch.request).map_err(|source| {
                ProgramNotFound {
                    file: launch.request.program.clone(),
                    source,
                }
            })?;
        let mut env = self.task_environment(world, &launch.request);
        let restart_count_prefix = [RESTART_COUNT_ENV.as_bytes(), b"="].concat();
        env.retain(|entry| !entry.starts_with(&restart_count_prefix));
        let spawn_token = std::iter::repeat_with(|| world.random_secret())
            .find(|spawn_token| !self.tasks.tids_by_spawn_token.contains_key(spawn_token));
        let spawn_token = spawn_token.unwrap_or_default();
        env.push(format!("PVMEPID={spawn_token}").into_bytes());
        env.push(format!("{RESTART_COUNT_ENV}={}", launch.restart_count).into_bytes());
        let is_pinned = false;
        Ok((
            TaskStart {
                tid,
                path,
                argv,
                env,
                working_dir: world.work_dir(launch.working_dir()),
                pinned: is_pinned,
            },
            spawn_token,
        ))
    }
}

/// Error: the program of a task does not exist on this host. Nothing was started.
#[derive(Debug, Error)]
#[error("{file}: {source}")]
struct ProgramNotFound {
    file: String,
    source: PvmError,
}
