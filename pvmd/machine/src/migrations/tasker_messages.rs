//! Messages of the tasker about migrations, and the end of the tasker.

use crate::Machine;
use checkpoint_protocol::{SourceEvent, TargetEvent};
use sempa_proto::engine::Engine;
use sempa_proto::migration::{Failure, Migration, Refusal};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{MigrationId, Tid};

impl Machine {
    /// Returns the reason for which this host, without a tasker, refuses all migrations; `None` if
    /// this host has a tasker.
    pub(crate) fn no_tasker_refusal(&self) -> Option<Refusal> {
        let why = || "its tasker has ended".into();
        self.tasker_has_ended.then(|| Refusal::NoEngine {
            host: self.config.host,
            why: why(),
        })
    }

    /// Sets the host in a refusal of the tasker, which does not know its host.
    pub(crate) fn set_refusal_host(&self, refusal: Refusal) -> Refusal {
        match refusal {
            Refusal::NoEngine { why, .. } => Refusal::NoEngine {
                host: self.config.host,
                why,
            },
            other => other,
        }
    }

    pub(crate) fn handle_tasker_migration_message(&mut self, message: FromTasker) {
        match message {
            FromTasker::Inspected {
                migration,
                result,
                supports_post_copy,
                supports_pre_copy,
            } => {
                let Some(Migration { tid, cause, .. }) = self
                    .migrations
                    .sources
                    .get(&migration)
                    .map(|s| s.migration().clone())
                else {
                    return;
                };
                let result = result.map_err(|refusal| self.set_refusal_host(refusal));
                let ignores_signal = self
                    .tasks
                    .get(tid)
                    .is_some_and(|task| task.ignores_checkpoint_signal == Some(migration));
                let result = match ignores_signal {
                    true => result,
                    false => self.merge_criu_facts(tid, Some(&cause), result),
                };
                self.handle_inspection(
                    migration,
                    tid,
                    result,
                    (supports_post_copy, supports_pre_copy),
                );
            }
            FromTasker::SignalChecked {
                migration,
                handles_signal,
            } => self.handle_signal_check(migration, handles_signal),
            FromTasker::PreCopied { migration, result } => {
                self.pass_to_source(migration, SourceEvent::PreCopied(result))
            }
            FromTasker::PreCopyLost {
                migration,
                failure: why,
            } => self.pass_to_target(migration, TargetEvent::PreCopyLost(why)),
            FromTasker::Stopped { migration, result } => {
                self.handle_stopped_for_migration(migration, &result);
                self.pass_to_source(migration, SourceEvent::Stopped(result));
            }
            FromTasker::Dumped { migration, result } => {
                self.pass_to_source(migration, SourceEvent::Dumped(result))
            }
            FromTasker::MigrationAborted { migration } => {
                self.pass_to_source(migration, SourceEvent::TaskResumed)
            }
            FromTasker::SourceKilled { migration, usage } => {
                self.pass_to_source(migration, SourceEvent::Killed(usage))
            }
            // The migration was aborted before the tasker began its preparations. The tasker must
            // discard them.
            FromTasker::Prepared { migration, .. }
                if !self.migrations.targets.contains_key(&migration) =>
            {
                self.send_to_tasker(ToTasker::Discard { migration });
            }
            FromTasker::Prepared {
                migration,
                verdict,
                supports_post_copy,
            } => {
                let verdict = verdict
                    .into_iter()
                    .map(|refusal| self.set_refusal_host(refusal))
                    .collect();
                self.handle_criu_verdict(migration, verdict, supports_post_copy);
            }
            FromTasker::Restored { migration, result } => {
                if let (Ok(pid), Some(arrival)) = (&result, self.arrival_of(migration)) {
                    arrival.pid = *pid;
                }
                self.pass_to_target(migration, TargetEvent::Restored(result.map(|_| ())));
            }
            FromTasker::Running { migration, result } => {
                self.handle_run_completed(migration, result)
            }
            FromTasker::MemoryArrived { migration, result } => {
                self.pass_to_target(migration, TargetEvent::MemoryArrived(result))
            }
            FromTasker::Discarded { migration } => {
                self.pass_to_target(migration, TargetEvent::Discarded)
            }
            _ => {}
        }
    }

    fn handle_run_completed(&mut self, migration: MigrationId, result: Result<(), Failure>) {
        if let Some(arrival) = self.arrival_of(migration) {
            arrival.has_run = true;
            if result.is_err() {
                arrival.mark_lost();
            }
        }
        self.pass_to_target(migration, TargetEvent::RunCompleted(result));
        // The target handles the event first: its output writes the resume token of the library.
        let tids: Vec<Tid> = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.migration == migration)
            .map(|a| a.tid)
            .collect();
        tids.into_iter().for_each(|tid| self.advance_arrival(tid));
    }

    /// Cancels all pre-copies to this host, because arriving guests would be paused immediately.
    pub(crate) fn cancel_pre_copies(&mut self, why: &str) {
        let refusal = Refusal::OwnerPresent {
            host: self.config.host,
            why: why.to_string(),
        };
        for target in self.migrations.targets.values_mut() {
            target.handle(TargetEvent::PreCopyLost(Failure::Refused(vec![
                refusal.clone(),
            ])));
        }
    }

    /// Fails the migrations to this host after the end of the tasker. All tasks that the tasker was
    /// restoring or holding for these migrations are dead.
    pub(crate) fn fail_incoming_migrations(&mut self, why: &str) {
        let tasker_failure = || Failure::Engine(format!("the tasker has ended: {why}"));
        let host = self.config.host;
        for target in self.migrations.targets.values_mut() {
            // The tasker will not send a verdict. With this verdict the requester can try another
            // host immediately.
            let verdict = vec![Refusal::NoEngine {
                host,
                why: format!("its tasker has ended: {why}"),
            }];
            target.handle(TargetEvent::Prepared {
                verdict,
                supports_post_copy: false,
                engine: Engine::Criu,
            });
            // Everything that the tasker was ordered to discard has ended with the tasker.
            target.handle(TargetEvent::Discarded);
            target.handle(TargetEvent::PreCopyLost(tasker_failure()));
            target.handle(TargetEvent::Restored(Err(tasker_failure())));
            target.handle(TargetEvent::RunCompleted(Err(tasker_failure())));
            target.handle(TargetEvent::MemoryArrived(Err(tasker_failure())));
        }
        let running_tasks: Vec<Tid> = self
            .migrations
            .arrivals
            .values()
            .filter(|a| a.run_ordered)
            .map(|a| a.tid)
            .collect();
        for tid in running_tasks {
            if let Some(arrival) = self.migrations.arrivals.get_mut(&tid) {
                arrival.mark_lost();
            }
            self.advance_arrival(tid);
        }
    }
}
