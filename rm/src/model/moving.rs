//! Applies the start, the completion and the failure of migrations to the model. After a failure,
//! excludes the target, or all migrations of the task, for some time.

use super::{Going, MOVES_MAX, Model, NOT_YET, REFUSED_MAX, REFUSED_MIN};
use crate::decide::{REST, SHIFTS_SPAN, Until};
use libpvm::MigrateError;
use sempa_proto::migration::{Failure, MigrationCause, Refusal};
use sempa_proto::{HostId, Micros, PvmError, Tid};

impl Model {
    pub(super) fn moved(
        &mut self,
        now: Micros,
        tid: Tid,
        to: HostId,
        cause: &MigrationCause,
        bytes: u64,
    ) {
        if self.ended.has(tid) {
            return;
        }
        let task = self.settle(now, tid, to);
        (task.moving, task.held, task.told) = (None, None, None);
        // State files written by the program itself are smaller than its memory, so they do not
        // determine the memory size.
        task.bytes = if bytes > 0 { bytes } else { task.bytes };
        task.refused.clear();
        task.named |= matches!(cause, MigrationCause::Requested { .. });
        if matches!(cause, MigrationCause::Load { .. }) {
            task.shifts.push_back(now);
            while task
                .shifts
                .front()
                .is_some_and(|at| now.since(*at) > SHIFTS_SPAN)
            {
                task.shifts.pop_front();
            }
        }
        if !matches!(cause, MigrationCause::Requested { .. }) {
            task.moves.push_back(now);
            while task.moves.len() > MOVES_MAX
                || task.moves.front().is_some_and(|at| now.since(*at) > REST)
            {
                task.moves.pop_front();
            }
        }
    }

    /// Records that a requested migration has begun.
    pub fn move_begun(&mut self, now: Micros, tid: Tid, to: HostId) {
        if let Some(task) = self.edit(tid) {
            task.moving = Some(Going {
                to: Some(to),
                at: now,
            });
        }
    }

    /// Records that the master refused to begin a requested migration.
    pub fn move_not_begun(&mut self, now: Micros, tid: Tid, to: HostId, error: &MigrateError) {
        let refused = match error {
            MigrateError::Failed(error) => return self.move_failed(now, tid, to, &error.why),
            MigrateError::Refused(error) => error,
        };
        match refused.code {
            PvmError::NoTask => self.task_ended(tid),
            PvmError::NoHost | PvmError::HostFail => {
                self.target_failed(now, tid, to, REFUSED_MIN, &refused.reason)
            }
            PvmError::Already => self.hold(tid, now + NOT_YET, &refused.reason),
            PvmError::OutOfRes => self.hold(tid, now + REFUSED_MIN, &refused.reason),
            PvmError::NotImpl | PvmError::SysErr | PvmError::DSysErr => {
                self.hold(tid, now + REFUSED_MAX, &refused.reason)
            }
            _ => self.target_failed(now, tid, to, REFUSED_MIN, &refused.reason),
        }
    }

    /// Records that a migration has failed. The task continues on its host.
    pub fn move_failed(&mut self, now: Micros, tid: Tid, to: HostId, why: &Failure) {
        let Some(task) = self.edit(tid) else { return };
        task.moving = None;
        let from = task.host;
        self.maybe_clean.insert(to);
        self.promises.dropped(tid);
        match why {
            // The event that reports the task's end follows.
            Failure::TaskEnded => self.hold(tid, now + NOT_YET, &why.to_string()),
            Failure::Refused(reasons) if reasons.is_empty() => {
                self.target_failed(now, tid, to, REFUSED_MIN, "it refused without a reason");
            }
            Failure::Refused(reasons) => reasons
                .iter()
                .for_each(|r| self.refused(now, tid, from, to, r)),
            Failure::HostLost(host) if *host == from => {
                self.hold(tid, now + REFUSED_MIN, &why.to_string())
            }
            other => self.target_failed(now, tid, to, REFUSED_MIN, &other.to_string()),
        }
    }

    fn refused(&mut self, now: Micros, tid: Tid, from: HostId, to: HostId, why: &Refusal) {
        let text = why.to_string();
        match why {
            Refusal::NoSuchTask => self.task_ended(tid),
            Refusal::NotSpawned | Refusal::Pinned => {
                if let Some(task) = self.edit(tid) {
                    task.pinned = true;
                }
            }
            // The model is out of date; a fresh list names the task's host.
            Refusal::AlreadyThere | Refusal::AlreadyMigrating(_) | Refusal::NoSuchHost => {
                self.stale = true;
                self.hold(tid, now + NOT_YET, &text);
            }
            Refusal::NotConnected => self.hold(tid, now + NOT_YET, &text),
            Refusal::TooManyMigrations { .. } => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::Suspended
            | Refusal::SelfCheckpointPending
            | Refusal::SignalNotHandled { .. } => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::UnsupportedResource { .. }
            | Refusal::OpenFilesRefused { .. }
            | Refusal::OpenFilesTooLarge { .. }
            | Refusal::NoCheckpointEngine { .. }
            | Refusal::NoStateFiles
            | Refusal::Debugged
            | Refusal::FilesTooMany { .. } => {
                self.hold(tid, now + REFUSED_MAX, &text);
            }
            Refusal::NoEngine { host, .. } if *host == from => {
                self.hold(tid, now + REFUSED_MAX, &text)
            }
            Refusal::NoEngine { host, .. } => match self.edit_host(*host) {
                Some(host) => {
                    host.no_moves = Some(Until {
                        at: now + REFUSED_MAX,
                        why: text,
                    })
                }
                None => self.target_failed(now, tid, to, REFUSED_MAX, &text),
            },
            Refusal::HostLost(host) if *host == from => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::HostLost(_)
            | Refusal::OwnerPresent { .. }
            | Refusal::OwnerLimits { .. }
            | Refusal::MemoryReserved { .. } => {
                self.target_failed(now, tid, to, REFUSED_MIN, &text);
            }
            Refusal::CpuFeatures { .. }
            | Refusal::KernelFeatures { .. }
            | Refusal::File { .. }
            | Refusal::Memory { .. }
            | Refusal::OtherUser { .. }
            | Refusal::Threads { .. } => {
                self.target_failed(now, tid, to, REFUSED_MAX, &text);
            }
        }
    }

    pub(super) fn hold(&mut self, tid: Tid, until: Micros, why: &str) {
        if let Some(task) = self.edit(tid) {
            task.held = Some(Until {
                at: until,
                why: why.to_string(),
            });
        }
    }

    /// Excludes a host as a target of the task for a time that doubles with each failure. A failure
    /// that is reported twice (as a reply and as an event) counts once.
    fn target_failed(&mut self, now: Micros, tid: Tid, to: HostId, first: Micros, why: &str) {
        let Some(task) = self.edit(tid) else { return };
        let tries = match task.refused.get(&to) {
            Some((until, _)) if until.at > now => return,
            Some((_, tries)) => tries + 1,
            None => 0,
        };
        let span = Micros((first.0 << tries.min(10)).min(REFUSED_MAX.0));
        task.refused.insert(
            to,
            (
                Until {
                    at: now + span,
                    why: why.to_string(),
                },
                tries,
            ),
        );
    }
}
