//! The target of a migration: executes the outputs of its state machine.

use crate::restart_engine::WorldCall;
use crate::{Machine, Output};
use checkpoint_protocol::{Target, TargetEvent, TargetOutput};
use sempa_proto::engine::Engine;
use sempa_proto::migration::{Failure, FinalSourceState, MigrationCause, TaskFacts, Usage};
use sempa_proto::tasker::ToTasker;
use sempa_proto::{MigrationId, Tid};

impl Machine {
    pub(super) fn run_target_output(&mut self, id: MigrationId, output: TargetOutput) {
        let Some(migration) = self
            .migrations
            .targets
            .get(&id)
            .map(|t| t.migration().clone())
        else {
            return;
        };
        let tid = migration.tid;
        self.push_step_starting(tid, output.started_step());
        match output {
            TargetOutput::Report(report) => {
                self.push_step_ended(tid, &report);
                self.send_step_report(id, report);
            }
            TargetOutput::Prepare(facts) => self.prepare_target(id, facts),
            // Images from the store of this host need no transfer.
            TargetOutput::ExpectImages if migration.from == self.config.host => {}
            TargetOutput::ExpectImages => {
                self.outputs.push_back(Output::ExpectImages {
                    migration: id,
                    source: migration.from,
                });
                if self.uses_post_copy(id) {
                    self.outputs.push_back(Output::FetchMemory {
                        migration: id,
                        source: migration.from,
                    });
                }
            }
            TargetOutput::ReceivePreCopy => {
                let memory_socket = self.config.paths.memory_socket_path(id);
                self.send_to_tasker(ToTasker::ReceivePreCopy {
                    migration: id,
                    memory_socket_path: memory_socket,
                });
            }
            TargetOutput::Restore if migration.cause == MigrationCause::Restart => {
                self.outputs.push_back(Output::ReadPart { migration: id });
            }
            TargetOutput::Restore
                if self
                    .arrival_of(id)
                    .is_some_and(|arrival| arrival.restarts_program) =>
            {
                self.world_calls.push_back(WorldCall::PrepareProgram(id));
            }
            TargetOutput::Restore => {
                let dir = self.config.paths.image_dir(id);
                let memory_socket = self
                    .uses_post_copy(id)
                    .then(|| self.config.paths.memory_socket_path(id));
                self.send_to_tasker(ToTasker::Restore {
                    migration: id,
                    tid,
                    image_dir: dir,
                    memory_write: None,
                    memory_socket_path: memory_socket,
                });
            }
            TargetOutput::Run(FinalSourceState { usage, suspensions }) => {
                let now = self.now;
                let arrival = self.arrival_of(id).map(|arrival| {
                    arrival.record_run_order(now, suspensions);
                    arrival.restarts_program
                });
                match arrival {
                    Some(true) if migration.cause == MigrationCause::Restart => self
                        .outputs
                        .push_back(Output::InstallState { migration: id }),
                    _ => self.run_restored_task(id, usage),
                }
            }
            TargetOutput::WriteResumeToken => {
                // The library of a task that stays paused is not resumed. The record of such a task
                // may already belong to a task of this host.
                if self
                    .arrival_of(id)
                    .is_some_and(|arrival| !arrival.library_quiesced && !arrival.restarts_program)
                {
                    self.write_resume_token(id);
                }
            }
            TargetOutput::Discard => self.send_to_tasker(ToTasker::Discard { migration: id }),
            TargetOutput::DropImages => {
                self.outputs.push_back(Output::DropImages { migration: id })
            }
            TargetOutput::Done => self.finish_target(id, tid),
        }
    }

    /// Removes a finished target. A task that has arrived remains a task of this host.
    fn finish_target(&mut self, id: MigrationId, tid: Tid) {
        self.migrations.targets.remove(&id);
        self.migrations
            .arrivals
            .retain(|_, a| a.migration != id || a.is_located);
        if let Some(arrival) = self.arrival_of(id).filter(|a| !a.has_run) {
            arrival.mark_lost();
        }
        self.advance_arrival(tid);
    }

    /// Orders the tasker to run a restored task. The task stays paused while guests are paused or
    /// while the task is suspended.
    fn run_restored_task(&mut self, id: MigrationId, usage: Usage) {
        let mut is_paused = self.owner_control.pauses_guests();
        if let Some(arrival) = self.arrival_of(id) {
            is_paused |= arrival.suspension.is_some();
            (arrival.pause_ordered, arrival.library_quiesced) = (is_paused, is_paused);
            let tid = arrival.tid;
            if is_paused {
                self.owner_control.stopped_tasks.insert(tid);
            }
        }
        self.send_to_tasker(ToTasker::Run {
            migration: id,
            earlier_usage: usage,
            stays_paused: is_paused,
        });
    }

    /// Handles the result of giving the state files of a restarted program their final names.
    pub(crate) fn handle_state_installed(&mut self, id: MigrationId, result: Result<(), Failure>) {
        match result {
            // The tasker may have ended in the meantime, and the task died with the tasker.
            Ok(())
                if self
                    .migrations
                    .targets
                    .get(&id)
                    .is_some_and(Target::is_starting) =>
            {
                self.run_restored_task(id, Usage::default())
            }
            Ok(()) => {}
            Err(why) => self.pass_to_target(id, TargetEvent::RunCompleted(Err(why))),
        }
    }

    /// Starts to determine this host's verdict on a task that may migrate to this host. Refuses
    /// immediately if the host's owner does not permit the guest or if there is no tasker.
    fn prepare_target(&mut self, id: MigrationId, facts: TaskFacts) {
        let tid = self
            .migrations
            .targets
            .get(&id)
            .map_or(Tid::NONE, |target| target.migration().tid);
        let refusal = self
            .guest_refusal(tid, &facts.program)
            .or_else(|| self.no_tasker_refusal());
        match refusal {
            None => self
                .world_calls
                .push_back(WorldCall::MigrationVerdict(id, facts)),
            Some(refusal) => {
                let (verdict, engine) = (vec![refusal], Engine::Criu);
                self.pass_to_target(
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

    fn uses_post_copy(&self, id: MigrationId) -> bool {
        self.migrations
            .targets
            .get(&id)
            .is_some_and(Target::uses_post_copy)
    }
}
