//! Further attempts of a dump that has failed or hung.

use crate::dump_attempt::{DumpAttempt, random_number, sleep_unless_cancelled};
use crate::supervisor::Supervisor;
use crate::task::{TaskPhase, to_micros};
use crate::workers::WorkerResult;
use checkpoint::engine::{CancelHandle, EngineFailure};
use sempa_proto::migration::Failure;
use sempa_proto::{MigrationId, Tid};
use std::time::Duration;

impl Supervisor {
    /// Schedules another attempt of a dump that failed only because it collided with another dump,
    /// or starts another attempt immediately if the first attempt hung. Returns false if there is
    /// no further attempt.
    pub(crate) fn retry_dump(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        root_pid: i32,
        failure: &Failure,
        mut attempt: DumpAttempt,
    ) -> bool {
        let Some(engine) = &self.migrations.engine else {
            return false;
        };
        if attempt.is_first && matches!(failure, Failure::Deadline { .. }) {
            return self.restart_dump(migration, tid, attempt);
        }
        if !engine.prepare_retry(root_pid, failure) {
            return false;
        }
        let Some(delay) = attempt.retry_backoff.next_delay(
            to_micros(attempt.first_started_at.elapsed()),
            random_number(),
        ) else {
            return false;
        };
        let (failure, cancel) = (failure.clone(), CancelHandle::new());
        let delay_worker = cancel
            .map_err(|e| Failure::Io(e.to_string()))
            .and_then(|cancel| {
                let worker_cancel = cancel.clone();
                self.migrations
                    .workers
                    .start_worker(&cancel, None, move || {
                        sleep_unless_cancelled(&worker_cancel, Duration::from_micros(delay.0));
                        WorkerResult::RetryDelayOver {
                            migration,
                            tid,
                            failure,
                        }
                    })
            });
        let Ok(worker_id) = delay_worker else {
            return false;
        };
        self.record_dump_start(migration, tid, worker_id, attempt);
        true
    }

    /// Handles the end of the delay before another dump attempt: starts the attempt, or reports
    /// `failure` if the delay was cancelled or the attempt cannot be started.
    pub(crate) fn on_retry_delay_over(
        &mut self,
        migration: MigrationId,
        tid: Tid,
        failure: Failure,
    ) {
        if let Some(task) = self.tasks.get_mut(&tid)
            && let TaskPhase::Dumping {
                migration: phase_migration,
                attempt,
                aborted: false,
                ..
            } = &task.phase
            && *phase_migration == migration
        {
            let attempt = attempt.clone();
            task.phase = TaskPhase::Stopped { migration };
            if self.restart_dump(migration, tid, attempt) {
                return;
            }
        }
        self.on_dumped(migration, tid, Err(failure.into()));
    }

    /// Starts another attempt of a dump, in an emptied directory. Returns false on failure.
    fn restart_dump(&mut self, migration: MigrationId, tid: Tid, attempt: DumpAttempt) -> bool {
        let attempt = DumpAttempt {
            is_first: false,
            ..attempt
        };
        let start_result = attempt
            .image_dir
            .clear()
            .map_err(EngineFailure::from)
            .and_then(|()| self.start_dump(migration, tid, &attempt));
        let Ok(worker_id) = start_result else {
            return false;
        };
        self.record_dump_start(migration, tid, worker_id, attempt);
        true
    }
}
