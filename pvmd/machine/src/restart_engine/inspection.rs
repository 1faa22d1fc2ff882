//! Inspection of a task, and the verdict of this host, for restart engines and for the choice
//! between a restart engine and CRIU.

use super::{RestartVerdict, choose_engine, lacks_dir};
use crate::rpc::ReplyAddress;
use crate::{Machine, World};
use checkpoint_protocol::{InspectedTask, SourceEvent, TargetEvent};
use sempa_proto::engine::Engine;
use sempa_proto::migration::{MigrationCause, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{MigrationId, PvmError, Tid};

impl Machine {
    /// Returns the properties of a task of this host if no question to the tasker is necessary,
    /// because the task does not permit CRIU or must not use CRIU now. Returns `None` if the tasker
    /// must inspect the task.
    pub(crate) fn inspect_without_criu(
        &self,
        tid: Tid,
        cause: Option<&MigrationCause>,
    ) -> Option<Result<TaskFacts, Refusal>> {
        let task = self.tasks.get(tid)?;
        // CRIU must not migrate a task that may still exit because of an earlier request. The
        // target would not expect that exit.
        let launch = task.launch_info.as_ref()?;
        let criu_is_allowed = launch.allows_criu() && task.graceful_exit.is_none();
        if cause != Some(&MigrationCause::Checkpoint) {
            return (!criu_is_allowed).then(|| {
                self.inspect_for_restart(tid)
                    .unwrap_or(Err(Refusal::NoSuchTask))
            });
        }
        if task.graceful_exit.is_some() {
            return Some(Err(Refusal::SelfCheckpointPending));
        }
        let prefers_self_checkpoint = launch.prefers_self_checkpoint();
        match self.inspect_self_checkpoint(tid)? {
            Err(_) if criu_is_allowed => None,
            result => (prefers_self_checkpoint || !criu_is_allowed).then_some(result),
        }
    }

    /// Returns the properties of a task whose program writes its own checkpoint, or the reason why
    /// the program cannot write one; `None` if the task permits only CRIU.
    fn inspect_self_checkpoint(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut launch = self.tasks.get(tid)?.launch_info.clone()?;
        let Some(self_checkpoint) = launch.self_checkpoint() else {
            return Some(Err(Refusal::NoCheckpointEngine {
                engine: launch.restart_engine()?,
            }));
        };
        launch.engines = vec![self_checkpoint];
        Some(if launch.state_files.is_empty() {
            Err(Refusal::NoStateFiles)
        } else if self.suspensions_of(tid).is_suspended() {
            // The program must run to write its checkpoint.
            Err(Refusal::Suspended)
        } else {
            Ok(TaskFacts {
                uid: self.config.uid,
                launch: Some(launch),
                ..TaskFacts::default()
            })
        })
    }

    /// Combines the result of the tasker's inspection for CRIU with the restart engines that the
    /// task permits.
    pub(crate) fn merge_criu_facts(
        &self,
        tid: Tid,
        cause: Option<&MigrationCause>,
        criu_result: Result<TaskFacts, Refusal>,
    ) -> Result<TaskFacts, Refusal> {
        if cause == Some(&MigrationCause::Checkpoint) {
            return criu_result.or_else(|refusal| match self.inspect_self_checkpoint(tid) {
                Some(Ok(facts)) => Ok(facts),
                // The user can add a list of state files, so its absence is the more useful reason.
                Some(Err(Refusal::NoStateFiles)) if matches!(refusal, Refusal::NoEngine { .. }) => {
                    Err(Refusal::NoStateFiles)
                }
                _ => Err(refusal),
            });
        }
        match (criu_result, self.inspect_for_restart(tid)) {
            (
                Ok(facts),
                Some(Ok(TaskFacts {
                    launch: Some(mut launch),
                    ..
                })),
            ) => {
                let task_launch = self
                    .tasks
                    .get(tid)
                    .and_then(|task| task.launch_info.as_ref());
                let task_launch = task_launch
                    .map(|task_launch| task_launch.engines.clone())
                    .unwrap_or_default();
                launch.engines = task_launch
                    .into_iter()
                    .filter(|e| *e == Engine::Criu || launch.engines.contains(e))
                    .collect();
                Ok(TaskFacts {
                    launch: Some(launch),
                    ..facts
                })
            }
            (Err(_), Some(Ok(facts))) => Ok(facts),
            (criu_result, _) => criu_result,
        }
    }

    /// Returns the properties of a task for the restart engines that the task permits, or a refusal
    /// if all of them are impossible because the task is suspended. Returns `None` if the task
    /// permits only CRIU.
    fn inspect_for_restart(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut launch = self.tasks.get(tid)?.launch_info.clone()?;
        let is_suspended = self.suspensions_of(tid).is_suspended();
        launch.engines.retain(|engine| match engine {
            Engine::Criu => false,
            // The program must run to write its checkpoint.
            Engine::SelfCheckpoint { .. } => !is_suspended,
            Engine::Restart { .. } => true,
        });
        Some(match launch.engines.is_empty() {
            true => Err(Refusal::Suspended),
            false => Ok(TaskFacts {
                uid: self.config.uid,
                launch: Some(launch),
                ..TaskFacts::default()
            }),
        })
    }

    /// Handles the properties of a task that will be migrated or dumped. If the program will write
    /// its own checkpoint on a signal, the tasker first checks whether the program handles that
    /// signal. No other task of the job is asked before this check.
    pub(crate) fn handle_inspection(
        &mut self,
        id: MigrationId,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
        memory_support: (bool, bool),
    ) {
        let cause = self
            .migrations
            .sources
            .get(&id)
            .map(|source| &source.migration().cause);
        let signal = result
            .as_ref()
            .ok()
            .filter(|_| cause == Some(&MigrationCause::Checkpoint))
            .and_then(TaskFacts::checkpoint_signal);
        match signal {
            Some(signal) => self.send_to_tasker(ToTasker::CheckSignal {
                migration: id,
                tid,
                signal,
            }),
            None => self.finish_inspection(id, tid, result, memory_support),
        }
    }

    /// Handles the tasker's report whether the program handles the signal that asks for its own
    /// checkpoint. If the program does not handle the signal, CRIU dumps the task if the task
    /// permits this; otherwise the inspection fails.
    pub(crate) fn handle_signal_check(&mut self, id: MigrationId, is_handled: bool) {
        let Some(tid) = self
            .migrations
            .sources
            .get(&id)
            .map(|source| source.migration().tid)
        else {
            return;
        };
        let facts = self
            .inspect_self_checkpoint(tid)
            .unwrap_or(Err(Refusal::NoSuchTask));
        let signal = facts
            .as_ref()
            .ok()
            .and_then(TaskFacts::checkpoint_signal)
            .filter(|_| !is_handled);
        let Some(signal) = signal else {
            return self.finish_inspection(id, tid, facts, (false, false));
        };
        match self
            .tasks
            .get_mut(tid)
            .is_some_and(|task| task.fall_back_to_criu(id))
        {
            true => self.send_to_tasker(ToTasker::Inspect { migration: id, tid }),
            false => self.finish_inspection(
                id,
                tid,
                Err(Refusal::SignalNotHandled { signal }),
                (false, false),
            ),
        }
    }

    fn finish_inspection(
        &mut self,
        id: MigrationId,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
        (supports_post_copy, supports_pre_copy): (bool, bool),
    ) {
        let suspensions = self.suspensions_of(tid);
        let inspected_task = |facts| InspectedTask {
            facts,
            suspensions,
            supports_post_copy,
            supports_pre_copy,
        };
        let result = self.add_program_name(tid, result).map(inspected_task);
        self.pass_to_source(id, SourceEvent::Inspected(result));
    }

    pub(super) fn start_migration_verdict(
        &mut self,
        world: &dyn World,
        id: MigrationId,
        facts: TaskFacts,
    ) {
        let Some(arrival) = self.arrival_of(id) else {
            return;
        };
        let tid = arrival.tid;
        match restart_verdict(world, &facts) {
            Some((engine, verdict)) if needs_no_tasker_verdict(&facts, &verdict) => {
                self.report_verdict(id, verdict, false, engine)
            }
            restart_verdict => {
                arrival.restart_verdict = restart_verdict;
                let facts = TaskFacts {
                    launch: None,
                    ..facts
                };
                self.send_to_tasker(ToTasker::Prepare {
                    migration: id,
                    tid,
                    facts,
                });
            }
        }
    }

    /// Handles the tasker's verdict on a migrating task: chooses the engine and passes the verdict
    /// of this host to the target.
    pub(crate) fn handle_criu_verdict(
        &mut self,
        id: MigrationId,
        criu_verdict: Verdict,
        supports_post_copy: bool,
    ) {
        let restart_verdict = self
            .arrival_of(id)
            .and_then(|arrival| arrival.restart_verdict.take());
        let (verdict, engine) = choose_engine(criu_verdict, restart_verdict);
        self.report_verdict(id, verdict, supports_post_copy, engine);
    }

    fn report_verdict(
        &mut self,
        id: MigrationId,
        verdict: Verdict,
        supports_post_copy: bool,
        engine: Engine,
    ) {
        if let Some(arrival) = self.arrival_of(id) {
            arrival.restarts_program = verdict.is_empty() && engine != Engine::Criu;
        }
        self.pass_to_target(
            id,
            TargetEvent::Prepared {
                verdict,
                supports_post_copy,
                engine,
            },
        );
    }

    pub(super) fn continue_query_verdict(
        &mut self,
        world: &dyn World,
        reply_to: ReplyAddress,
        objections: Verdict,
        facts: TaskFacts,
    ) {
        match restart_verdict(world, &facts) {
            Some((engine, verdict)) if needs_no_tasker_verdict(&facts, &verdict) => {
                self.answer_verdict(
                    reply_to,
                    objections.into_iter().chain(verdict).collect(),
                    engine,
                );
            }
            restart_verdict => self.request_tasker_verdict(
                reply_to,
                objections,
                restart_verdict,
                TaskFacts {
                    launch: None,
                    ..facts
                },
            ),
        }
    }
}

/// Returns this host's verdict on starting the program of a task with these properties; `None` if
/// the task permits only CRIU.
fn restart_verdict(world: &dyn World, facts: &TaskFacts) -> RestartVerdict {
    let launch = facts.launch.as_ref()?;
    let engine = launch.restart_engine()?;
    let mut verdict = Verdict::new();
    if let Err(PvmError::NoFile) = crate::spawn::find_program(world, &launch.request) {
        let why = "this host has no such program in the search path of spawned tasks".into();
        verdict.push(Refusal::File {
            path: (&launch.request.program).into(),
            why,
        });
    }
    if let Some(dir) = launch.working_dir().filter(|dir| lacks_dir(world, dir)) {
        let why = "this host has no such directory that can be entered; it must contain what the program needs".into();
        verdict.push(Refusal::File {
            path: dir.into(),
            why,
        });
    }
    Some((engine, verdict))
}

/// True if no verdict of the tasker is necessary: the task does not permit CRIU, or the task's
/// first engine is a restart engine that is possible on this host.
fn needs_no_tasker_verdict(facts: &TaskFacts, verdict: &Verdict) -> bool {
    let first_engine = facts
        .launch
        .as_ref()
        .and_then(|launch| launch.engines.first());
    !facts.allows_criu() || verdict.is_empty() && first_engine != Some(&Engine::Criu)
}
