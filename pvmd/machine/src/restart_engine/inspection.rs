//! Inspection of a task and the verdict of a host, for restart engines and for the choice between
//! them and CRIU.

use super::{RestartVerdict, choose_engine, lacks_dir};
use crate::rpc::ReplyAddress;
use crate::{Machine, World};
use checkpoint_protocol::{InspectedTask, SourceEvent, TargetEvent};
use sempa_proto::engine::Engine;
use sempa_proto::migration::{MigrationCause, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{MigrationId, PvmError, Tid};

impl Machine {
    /// Returns the properties of a task of this host if the tasker need not be asked, because the
    /// task does not permit CRIU or must not use it now. `None` if the tasker must be asked.
    pub(crate) fn inspect_without_criu(
        &self,
        tid: Tid,
        cause: Option<&MigrationCause>,
    ) -> Option<Result<TaskFacts, Refusal>> {
        let task = self.tasks.get(tid)?;
        // CRIU must not migrate a task that may still exit by an earlier request, because the
        // target would not expect that exit.
        let begin = task.launch.as_ref()?;
        let by_criu = begin.allows_criu() && task.graceful_exit.is_none();
        if cause != Some(&MigrationCause::Checkpoint) {
            return (!by_criu).then(|| {
                self.inspect_for_restart(tid)
                    .unwrap_or(Err(Refusal::NoSuchTask))
            });
        }
        if task.graceful_exit.is_some() {
            return Some(Err(Refusal::SelfCheckpointPending));
        }
        let own_first = begin.prefers_self_checkpoint();
        match self.inspect_self_checkpoint(tid)? {
            Err(_) if by_criu => None,
            result => (own_first || !by_criu).then_some(result),
        }
    }

    /// Returns the properties of a task whose program writes its own checkpoint.
    fn inspect_self_checkpoint(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut begin = self.tasks.get(tid)?.launch.clone()?;
        let Some(own) = begin.self_checkpoint() else {
            return Some(Err(Refusal::NoCheckpointEngine {
                engine: begin.restart_engine()?,
            }));
        };
        begin.engines = vec![own];
        Some(if begin.state_files.is_empty() {
            Err(Refusal::NoStateFiles)
        } else if self.suspensions_of(tid).is_suspended() {
            // The program must run to write its checkpoint.
            Err(Refusal::Suspended)
        } else {
            Ok(TaskFacts {
                uid: self.config.uid,
                launch: Some(begin),
                ..TaskFacts::default()
            })
        })
    }

    /// Combines the properties that the tasker has found for CRIU with the restart engines that the
    /// task permits.
    pub(crate) fn merge_criu_facts(
        &self,
        tid: Tid,
        cause: Option<&MigrationCause>,
        result: Result<TaskFacts, Refusal>,
    ) -> Result<TaskFacts, Refusal> {
        if cause == Some(&MigrationCause::Checkpoint) {
            return result.or_else(|refusal| match self.inspect_self_checkpoint(tid) {
                Some(Ok(facts)) => Ok(facts),
                // The missing list of files is the more useful reason, because the user can add it.
                Some(Err(Refusal::NoStateFiles)) if matches!(refusal, Refusal::NoEngine { .. }) => {
                    Err(Refusal::NoStateFiles)
                }
                _ => Err(refusal),
            });
        }
        match (result, self.inspect_for_restart(tid)) {
            (
                Ok(facts),
                Some(Ok(TaskFacts {
                    launch: Some(mut begin),
                    ..
                })),
            ) => {
                let wanted = self.tasks.get(tid).and_then(|task| task.launch.as_ref());
                let wanted = wanted
                    .map(|wanted| wanted.engines.clone())
                    .unwrap_or_default();
                begin.engines = wanted
                    .into_iter()
                    .filter(|e| *e == Engine::Criu || begin.engines.contains(e))
                    .collect();
                Ok(TaskFacts {
                    launch: Some(begin),
                    ..facts
                })
            }
            (Err(_), Some(Ok(facts))) => Ok(facts),
            (result, _) => result,
        }
    }

    /// Returns the properties of a task for the restart engines that it permits.
    fn inspect_for_restart(&self, tid: Tid) -> Option<Result<TaskFacts, Refusal>> {
        let mut begin = self.tasks.get(tid)?.launch.clone()?;
        let suspended = self.suspensions_of(tid).is_suspended();
        begin.engines.retain(|engine| match engine {
            Engine::Criu => false,
            // The program must run to write its checkpoint.
            Engine::SelfCheckpoint { .. } => !suspended,
            Engine::Restart { .. } => true,
        });
        Some(match begin.engines.is_empty() {
            true => Err(Refusal::Suspended),
            false => Ok(TaskFacts {
                uid: self.config.uid,
                launch: Some(begin),
                ..TaskFacts::default()
            }),
        })
    }

    /// Handles the properties of a task that will be migrated or dumped. If the program will write
    /// its own checkpoint, the tasker first checks the signal for that, before other tasks of the
    /// job are asked.
    pub(crate) fn handle_inspection(
        &mut self,
        id: MigrationId,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
        memory: (bool, bool),
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
            None => self.finish_inspection(id, tid, result, memory),
        }
    }

    /// Handles the tasker's answer whether a program handles the signal that asks for its own
    /// checkpoint.
    pub(crate) fn handle_signal_check(&mut self, id: MigrationId, handled: bool) {
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
            .filter(|_| !handled);
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
        (memory_can_follow, can_pre_copy): (bool, bool),
    ) {
        let suspended = self.suspensions_of(tid);
        let inspected = |facts| InspectedTask {
            facts,
            suspensions: suspended,
            supports_post_copy: memory_can_follow,
            supports_pre_copy: can_pre_copy,
        };
        let result = self.add_program_name(tid, result).map(inspected);
        self.source_event(id, SourceEvent::Inspected(result));
    }

    pub(super) fn judge_migration(&mut self, world: &dyn World, id: MigrationId, facts: TaskFacts) {
        let Some(arrival) = self.arrival_of(id) else {
            return;
        };
        let tid = arrival.tid;
        match judge_restart(world, &facts) {
            Some((engine, verdict)) if is_decided(&facts, &verdict) => {
                self.report_verdict(id, verdict, false, engine)
            }
            other => {
                arrival.restart_verdict = other;
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

    /// Handles the tasker's verdict on a migrating task.
    pub(crate) fn handle_criu_verdict(
        &mut self,
        id: MigrationId,
        criu: Verdict,
        supports_post_copy: bool,
    ) {
        let other = self
            .arrival_of(id)
            .and_then(|arrival| arrival.restart_verdict.take());
        let (verdict, engine) = choose_engine(criu, other);
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
            arrival.by_restart = verdict.is_empty() && engine != Engine::Criu;
        }
        self.target_event(
            id,
            TargetEvent::Prepared {
                verdict,
                supports_post_copy,
                engine,
            },
        );
    }

    pub(super) fn judge_query(
        &mut self,
        world: &dyn World,
        back: ReplyAddress,
        known: Verdict,
        facts: TaskFacts,
    ) {
        match judge_restart(world, &facts) {
            Some((engine, verdict)) if is_decided(&facts, &verdict) => {
                self.answer_verdict(back, known.into_iter().chain(verdict).collect(), engine);
            }
            other => self.request_tasker_verdict(
                back,
                known,
                other,
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
fn judge_restart(world: &dyn World, facts: &TaskFacts) -> RestartVerdict {
    let begin = facts.launch.as_ref()?;
    let engine = begin.restart_engine()?;
    let mut verdict = Verdict::new();
    if let Err(PvmError::NoFile) = crate::spawn::find_program(world, &begin.request) {
        let why = "this host has no such program in the search path of spawned tasks".into();
        verdict.push(Refusal::File {
            path: (&begin.request.file).into(),
            why,
        });
    }
    if let Some(dir) = begin.working_dir().filter(|dir| lacks_dir(world, dir)) {
        let why = "this host has no such directory that can be entered; it must contain what the program needs".into();
        verdict.push(Refusal::File {
            path: dir.into(),
            why,
        });
    }
    Some((engine, verdict))
}

/// True if the tasker need not be asked: the task's first engine is a restart engine that is
/// possible on this host, or the task does not permit CRIU.
fn is_decided(facts: &TaskFacts, verdict: &Verdict) -> bool {
    let first = facts
        .launch
        .as_ref()
        .and_then(|begin| begin.engines.first());
    !facts.allows_criu() || verdict.is_empty() && first != Some(&Engine::Criu)
}
