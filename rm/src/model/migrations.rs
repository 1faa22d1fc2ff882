//! Applies the start, the completion and the failure of migrations to the model. After a failure,
//! excludes the target, or all migrations of the task, for some time.

use super::{
    MigrationStatus, Model, NOT_CONNECTED_DELAY, NOT_CONNECTED_DELAY_MAX, RECENT_MIGRATIONS_MAX,
    TARGET_RETRY_MAX, TARGET_RETRY_MIN,
};
use crate::decide::{COOLDOWN, MigrationSample, Obstacle, REBALANCES_WINDOW};
use libpvm::MigrateError;
use sempa_proto::migration::{Failure, MigrationCause, Refusal};
use sempa_proto::{HostId, Micros, PvmError, Tid};

impl Model {
    /// Records a completed migration: learns from its measurements, updates the task's state, and
    /// records the task's arrival and the actual cost for a comparison with the prediction.
    pub(super) fn record_measured_migration(
        &mut self,
        now: Micros,
        tid: Tid,
        target: HostId,
        cause: &MigrationCause,
        sample: &MigrationSample,
    ) {
        self.snapshot.estimates.record_migration(sample);
        self.record_migration(now, tid, target, cause, sample.resident_bytes);
        if let Some(task) = self.tasks.get(&tid) {
            let cost = self
                .snapshot
                .estimates
                .actual_cost(sample.resident_bytes, sample.time_until_complete);
            self.pending_predictions
                .record_arrival(now, tid, target, (task.work_done, cost));
        }
    }

    fn record_migration(
        &mut self,
        now: Micros,
        tid: Tid,
        target: HostId,
        cause: &MigrationCause,
        resident_bytes: u64,
    ) {
        if self.ended_tasks.contains(tid) {
            return;
        }
        let task = self.set_task_host(now, tid, target);
        (
            task.migration,
            task.migration_obstacle,
            task.reported_stay_reason,
        ) = (None, None, None);
        // State files written by the program itself are smaller than its memory, so they do not
        // determine the memory size.
        task.memory_bytes = if resident_bytes > 0 {
            resident_bytes
        } else {
            task.memory_bytes
        };
        task.target_obstacles.clear();
        task.host_named |= matches!(cause, MigrationCause::Requested { .. });
        if matches!(cause, MigrationCause::Load { .. }) {
            task.recent_rebalances.push_back(now);
            while task
                .recent_rebalances
                .front()
                .is_some_and(|migrated_at| now.since(*migrated_at) > REBALANCES_WINDOW)
            {
                task.recent_rebalances.pop_front();
            }
        }
        if !matches!(cause, MigrationCause::Requested { .. }) {
            task.recent_migrations.push_back(now);
            while task.recent_migrations.len() > RECENT_MIGRATIONS_MAX
                || task
                    .recent_migrations
                    .front()
                    .is_some_and(|migrated_at| now.since(*migrated_at) > COOLDOWN)
            {
                task.recent_migrations.pop_front();
            }
        }
    }

    /// Records that a requested migration has started.
    pub fn record_migration_start(&mut self, now: Micros, tid: Tid, target_host: HostId) {
        if let Some(task) = self.edit_task(tid) {
            task.migration = Some(MigrationStatus {
                target: Some(target_host),
                last_event_at: now,
            });
        }
    }

    /// Records that the master refused to start a requested migration, or that the start failed.
    pub fn record_start_error(
        &mut self,
        now: Micros,
        tid: Tid,
        target: HostId,
        error: &MigrateError,
    ) {
        let refusal = match error {
            MigrateError::Failed(error) => {
                return self.record_migration_failure(now, tid, target, &error.failure);
            }
            MigrateError::Refused(error) => error,
        };
        match refusal.code {
            PvmError::NoTask => self.record_task_end(tid),
            PvmError::NoHost | PvmError::HostFail => {
                self.block_target(now, tid, target, TARGET_RETRY_MIN, &refusal.reason)
            }
            PvmError::Already => self.block_task(tid, now + NOT_CONNECTED_DELAY, &refusal.reason),
            PvmError::OutOfRes => self.block_task(tid, now + TARGET_RETRY_MIN, &refusal.reason),
            PvmError::NotImpl | PvmError::SysErr | PvmError::DSysErr => {
                self.block_task(tid, now + TARGET_RETRY_MAX, &refusal.reason)
            }
            _ => self.block_target(now, tid, target, TARGET_RETRY_MIN, &refusal.reason),
        }
    }

    /// Records that a migration has failed; the task continues on its source.
    pub fn record_migration_failure(
        &mut self,
        now: Micros,
        tid: Tid,
        target: HostId,
        failure: &Failure,
    ) {
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        task.migration = None;
        let source = task.host;
        self.guest_check_hosts.insert(target);
        self.pending_predictions.discard_prediction(tid);
        match failure {
            // The event that reports the task's end follows.
            Failure::TaskEnded => {
                self.block_task(tid, now + NOT_CONNECTED_DELAY, &failure.to_string())
            }
            Failure::Refused(reasons) if reasons.is_empty() => {
                self.block_target(
                    now,
                    tid,
                    target,
                    TARGET_RETRY_MIN,
                    "it refused without a reason",
                );
            }
            Failure::Refused(reasons) => reasons
                .iter()
                .for_each(|refusal| self.apply_refusal(now, tid, source, target, refusal)),
            Failure::HostLost(host) if *host == source => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &failure.to_string())
            }
            other => self.block_target(now, tid, target, TARGET_RETRY_MIN, &other.to_string()),
        }
    }

    fn apply_refusal(
        &mut self,
        now: Micros,
        tid: Tid,
        source: HostId,
        target: HostId,
        refusal: &Refusal,
    ) {
        let reason_text = refusal.to_string();
        match refusal {
            Refusal::NoSuchTask => self.record_task_end(tid),
            Refusal::NotSpawned | Refusal::Pinned => {
                if let Some(task) = self.edit_task(tid) {
                    task.pinned = true;
                }
            }
            // The model is out of date. A new task list contains the task's current host.
            Refusal::AlreadyThere | Refusal::AlreadyMigrating(_) | Refusal::NoSuchHost => {
                self.needs_refresh = true;
                self.block_task(tid, now + NOT_CONNECTED_DELAY, &reason_text);
            }
            Refusal::NotConnected => {
                let age = self
                    .tasks
                    .get(&tid)
                    .map_or(Micros(0), |task| now.since(task.started_at));
                self.block_task(tid, now + not_connected_delay(age), &reason_text);
            }
            Refusal::TooManyMigrations { .. } => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &reason_text)
            }
            Refusal::Suspended
            | Refusal::SelfCheckpointPending
            | Refusal::SignalNotHandled { .. } => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &reason_text)
            }
            Refusal::UnsupportedResource { .. }
            | Refusal::OpenFilesRefused { .. }
            | Refusal::OpenFilesTooLarge { .. }
            | Refusal::NoCheckpointEngine { .. }
            | Refusal::NoStateFiles
            | Refusal::Debugged
            | Refusal::FilesTooMany { .. } => {
                self.block_task(tid, now + TARGET_RETRY_MAX, &reason_text);
            }
            Refusal::NoEngine { host, .. } if *host == source => {
                self.block_task(tid, now + TARGET_RETRY_MAX, &reason_text)
            }
            Refusal::NoEngine { host, .. } => match self.edit_host(*host) {
                Some(host) => {
                    host.migration_obstacle = Some(Obstacle {
                        until: now + TARGET_RETRY_MAX,
                        reason: reason_text,
                    })
                }
                None => self.block_target(now, tid, target, TARGET_RETRY_MAX, &reason_text),
            },
            Refusal::HostLost(host) if *host == source => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &reason_text)
            }
            Refusal::HostLost(_)
            | Refusal::OwnerPresent { .. }
            | Refusal::OwnerLimits { .. }
            | Refusal::HostLimit(_)
            | Refusal::MemoryReserved { .. }
            | Refusal::Unreadable { .. } => {
                self.block_target(now, tid, target, TARGET_RETRY_MIN, &reason_text);
            }
            Refusal::CpuFeatures { .. }
            | Refusal::KernelFeatures { .. }
            | Refusal::File { .. }
            | Refusal::Address { .. }
            | Refusal::Memory { .. }
            | Refusal::OtherUser { .. }
            | Refusal::ForbiddenImages { .. }
            | Refusal::ProcessIds { .. }
            | Refusal::Threads { .. } => {
                self.block_target(now, tid, target, TARGET_RETRY_MAX, &reason_text);
            }
        }
    }

    pub(super) fn block_task(&mut self, tid: Tid, until: Micros, reason_text: &str) {
        if let Some(task) = self.edit_task(tid) {
            task.migration_obstacle = Some(Obstacle {
                until,
                reason: reason_text.to_string(),
            });
        }
    }

    /// Excludes a host as a target of the task. The time of exclusion doubles with each failure,
    /// from `first_delay` up to [`TARGET_RETRY_MAX`]. A failure that is reported twice (in a reply
    /// and in an event) is counted once.
    fn block_target(
        &mut self,
        now: Micros,
        tid: Tid,
        target: HostId,
        first_delay: Micros,
        reason_text: &str,
    ) {
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        let failure_count = match task.target_obstacles.get(&target) {
            Some((obstacle, _)) if obstacle.until > now => return,
            Some((_, failure_count)) => failure_count + 1,
            None => 0,
        };
        let delay = Micros((first_delay.0 << failure_count.min(10)).min(TARGET_RETRY_MAX.0));
        task.target_obstacles.insert(
            target,
            (
                Obstacle {
                    until: now + delay,
                    reason: reason_text.to_string(),
                },
                failure_count,
            ),
        );
    }
}

/// Returns the delay before the next attempt to migrate a task that started `age` ago and is not
/// connected.
fn not_connected_delay(age: Micros) -> Micros {
    Micros(age.0 / 4).clamp(NOT_CONNECTED_DELAY, NOT_CONNECTED_DELAY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task that has just started is tried again soon, a program that never connects rarely.
    #[test]
    fn attempts_become_rarer_with_the_age_of_the_task() {
        let delays = [0, 2, 12, 3600].map(|age| not_connected_delay(Micros::from_secs(age)));
        let expected = [500, 500, 3000, 8000].map(Micros::from_millis);
        assert_eq!(delays, expected);
    }
}
