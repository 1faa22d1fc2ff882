//! Applies the start, the completion and the failure of migrations to the model. After a failure,
//! excludes the target, or all migrations of the task, for some time.

use super::{
    MigrationStatus, Model, NOT_CONNECTED_DELAY, RECENT_MIGRATIONS_MAX, TARGET_RETRY_MAX,
    TARGET_RETRY_MIN,
};
use crate::decide::{COOLDOWN, Obstacle, REBALANCES_WINDOW};
use libpvm::MigrateError;
use sempa_proto::migration::{Failure, MigrationCause, Refusal};
use sempa_proto::{HostId, Micros, PvmError, Tid};

impl Model {
    pub(super) fn migration_completed(
        &mut self,
        now: Micros,
        tid: Tid,
        to: HostId,
        cause: &MigrationCause,
        bytes: u64,
    ) {
        if self.ended_tasks.contains(tid) {
            return;
        }
        let task = self.set_task_host(now, tid, to);
        (task.migrating, task.obstacle, task.reported_stay) = (None, None, None);
        // State files written by the program itself are smaller than its memory, so they do not
        // determine the memory size.
        task.memory_bytes = if bytes > 0 { bytes } else { task.memory_bytes };
        task.refused_by.clear();
        task.host_named |= matches!(cause, MigrationCause::Requested { .. });
        if matches!(cause, MigrationCause::Load { .. }) {
            task.recent_rebalances.push_back(now);
            while task
                .recent_rebalances
                .front()
                .is_some_and(|at| now.since(*at) > REBALANCES_WINDOW)
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
                    .is_some_and(|at| now.since(*at) > COOLDOWN)
            {
                task.recent_migrations.pop_front();
            }
        }
    }

    /// Records that a requested migration has begun.
    pub fn migration_begun(&mut self, now: Micros, tid: Tid, to: HostId) {
        if let Some(task) = self.edit_task(tid) {
            task.migrating = Some(MigrationStatus {
                target: Some(to),
                heard_at: now,
            });
        }
    }

    /// Records that the master refused to begin a requested migration.
    pub fn migration_not_begun(&mut self, now: Micros, tid: Tid, to: HostId, error: &MigrateError) {
        let refused = match error {
            MigrateError::Failed(error) => return self.migration_failed(now, tid, to, &error.why),
            MigrateError::Refused(error) => error,
        };
        match refused.code {
            PvmError::NoTask => self.task_ended(tid),
            PvmError::NoHost | PvmError::HostFail => {
                self.block_target(now, tid, to, TARGET_RETRY_MIN, &refused.reason)
            }
            PvmError::Already => self.block_task(tid, now + NOT_CONNECTED_DELAY, &refused.reason),
            PvmError::OutOfRes => self.block_task(tid, now + TARGET_RETRY_MIN, &refused.reason),
            PvmError::NotImpl | PvmError::SysErr | PvmError::DSysErr => {
                self.block_task(tid, now + TARGET_RETRY_MAX, &refused.reason)
            }
            _ => self.block_target(now, tid, to, TARGET_RETRY_MIN, &refused.reason),
        }
    }

    /// Records that a migration has failed. The task continues on its host.
    pub fn migration_failed(&mut self, now: Micros, tid: Tid, to: HostId, why: &Failure) {
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        task.migrating = None;
        let from = task.host;
        self.maybe_clean.insert(to);
        self.predictions.discard(tid);
        match why {
            // The event that reports the task's end follows.
            Failure::TaskEnded => self.block_task(tid, now + NOT_CONNECTED_DELAY, &why.to_string()),
            Failure::Refused(reasons) if reasons.is_empty() => {
                self.block_target(
                    now,
                    tid,
                    to,
                    TARGET_RETRY_MIN,
                    "it refused without a reason",
                );
            }
            Failure::Refused(reasons) => reasons
                .iter()
                .for_each(|r| self.apply_refusal(now, tid, from, to, r)),
            Failure::HostLost(host) if *host == from => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &why.to_string())
            }
            other => self.block_target(now, tid, to, TARGET_RETRY_MIN, &other.to_string()),
        }
    }

    fn apply_refusal(&mut self, now: Micros, tid: Tid, from: HostId, to: HostId, why: &Refusal) {
        let text = why.to_string();
        match why {
            Refusal::NoSuchTask => self.task_ended(tid),
            Refusal::NotSpawned | Refusal::Pinned => {
                if let Some(task) = self.edit_task(tid) {
                    task.pinned = true;
                }
            }
            // The model is out of date; a fresh list names the task's host.
            Refusal::AlreadyThere | Refusal::AlreadyMigrating(_) | Refusal::NoSuchHost => {
                self.needs_refresh = true;
                self.block_task(tid, now + NOT_CONNECTED_DELAY, &text);
            }
            Refusal::NotConnected => self.block_task(tid, now + NOT_CONNECTED_DELAY, &text),
            Refusal::TooManyMigrations { .. } => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &text)
            }
            Refusal::Suspended
            | Refusal::SelfCheckpointPending
            | Refusal::SignalNotHandled { .. } => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &text)
            }
            Refusal::UnsupportedResource { .. }
            | Refusal::OpenFilesRefused { .. }
            | Refusal::OpenFilesTooLarge { .. }
            | Refusal::NoCheckpointEngine { .. }
            | Refusal::NoStateFiles
            | Refusal::Debugged
            | Refusal::FilesTooMany { .. } => {
                self.block_task(tid, now + TARGET_RETRY_MAX, &text);
            }
            Refusal::NoEngine { host, .. } if *host == from => {
                self.block_task(tid, now + TARGET_RETRY_MAX, &text)
            }
            Refusal::NoEngine { host, .. } => match self.edit_host(*host) {
                Some(host) => {
                    host.migration_obstacle = Some(Obstacle {
                        until: now + TARGET_RETRY_MAX,
                        reason: text,
                    })
                }
                None => self.block_target(now, tid, to, TARGET_RETRY_MAX, &text),
            },
            Refusal::HostLost(host) if *host == from => {
                self.block_task(tid, now + TARGET_RETRY_MIN, &text)
            }
            Refusal::HostLost(_)
            | Refusal::OwnerPresent { .. }
            | Refusal::OwnerLimits { .. }
            | Refusal::MemoryReserved { .. } => {
                self.block_target(now, tid, to, TARGET_RETRY_MIN, &text);
            }
            Refusal::CpuFeatures { .. }
            | Refusal::KernelFeatures { .. }
            | Refusal::File { .. }
            | Refusal::Memory { .. }
            | Refusal::OtherUser { .. }
            | Refusal::Threads { .. } => {
                self.block_target(now, tid, to, TARGET_RETRY_MAX, &text);
            }
        }
    }

    pub(super) fn block_task(&mut self, tid: Tid, until: Micros, why: &str) {
        if let Some(task) = self.edit_task(tid) {
            task.obstacle = Some(Obstacle {
                until,
                reason: why.to_string(),
            });
        }
    }

    /// Excludes a host as a target of the task for a time that doubles with each failure. A failure
    /// that is reported twice (as a reply and as an event) counts once.
    fn block_target(&mut self, now: Micros, tid: Tid, to: HostId, first: Micros, why: &str) {
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        let tries = match task.refused_by.get(&to) {
            Some((until, _)) if until.until > now => return,
            Some((_, tries)) => tries + 1,
            None => 0,
        };
        let span = Micros((first.0 << tries.min(10)).min(TARGET_RETRY_MAX.0));
        task.refused_by.insert(
            to,
            (
                Obstacle {
                    until: now + span,
                    reason: why.to_string(),
                },
                tries,
            ),
        );
    }
}
