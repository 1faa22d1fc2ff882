//! Progress of a drain as read from the event log: the migration step of each task, the rate of
//! migrations, and the work that jobs would lose.

use super::estimate::{TransferTotals, megabytes_text};
use super::jobs::DepartureState;
use crate::virtual_machine::VirtualMachine;
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of events in the reply to one request.
const EVENTS_BATCH_MAX: u32 = 4096;
/// Minimum bytes of a migration from which the transfer rate is measured.
const RATE_SAMPLE_BYTES_MIN: u64 = 16 << 20;

/// Reason why a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainEndReason {
    /// The drain was cancelled.
    Cancelled,
    /// A later drain with a deadline replaced this one. The tid is the console that requested the
    /// later drain.
    Superseded(Tid),
}

/// State of a drain, accumulated from the event log.
#[derive(Debug, Default)]
pub(super) struct DrainProgress {
    /// The console that requested the drain.
    requester: Tid,
    /// Number of the next event to read.
    next_event: u64,
    /// Last completed step of the running migration of each task.
    last_steps: BTreeMap<Tid, Step>,
    /// The larger of the transferred and the resident bytes of the last migration of each task.
    image_bytes: BTreeMap<Tid, u64>,
    /// Sums over all migrations with at least [`RATE_SAMPLE_BYTES_MIN`].
    pub(super) transfer_totals: TransferTotals,
    /// The host that is being drained. `None` until the start of the drain has been read.
    pub(super) drained_host: Option<HostId>,
    /// Bytes of the tasks that have left the host since the drain started.
    pub(super) departed_bytes: u64,
    /// Tasks that have migrated from the host since the drain started.
    migrated_tasks: BTreeSet<Tid>,
    /// Name of the newest checkpoint of each job, if that checkpoint was completed since the drain
    /// started.
    pub(super) drain_checkpoints: BTreeMap<Tid, String>,
    /// Reason why this drain ended; `None` while the drain runs. After the end the host may still
    /// be drained by another request.
    pub(super) end_reason: Option<DrainEndReason>,
    /// Time of the oldest event in the log, in microseconds since the Unix epoch.
    log_start: Option<Micros>,
    /// Start time of each running task whose start is in the log, in microseconds since the Unix
    /// epoch.
    start_times: BTreeMap<Tid, Micros>,
    /// Completion time of each job's newest checkpoint, also if that checkpoint is older than the
    /// drain, in microseconds since the Unix epoch.
    checkpoint_times: BTreeMap<Tid, Micros>,
}

impl DrainProgress {
    /// Creates the state of a drain that `requester` requested.
    pub(super) fn new(requester: Tid) -> Self {
        Self {
            requester,
            ..Self::default()
        }
    }

    /// Reads all events that have been added since the last call.
    pub(super) fn read_events(&mut self, machine: &dyn VirtualMachine) -> Result<(), Error> {
        loop {
            let events = machine.events(self.next_event, EVENTS_BATCH_MAX)?;
            let Some(last_event) = events.last() else {
                return Ok(());
            };
            self.next_event = last_event.number + 1;
            events
                .iter()
                .for_each(|event| self.apply_event(event.at, &event.kind));
        }
    }

    fn apply_event(&mut self, at: Micros, kind: &EventKind) {
        self.log_start.get_or_insert(at);
        match kind {
            EventKind::DrainStarted {
                host,
                requested_by: requester,
                ..
            } if *requester == self.requester => {
                (
                    self.drained_host,
                    self.departed_bytes,
                    self.drain_checkpoints,
                    self.end_reason,
                ) = (Some(*host), 0, BTreeMap::new(), None);
                self.migrated_tasks.clear();
            }
            // The resource manager keeps only the newest deadline of a host.
            EventKind::DrainStarted {
                host,
                requested_by: requester,
                deadline: Some(_),
            } if self.drained_host == Some(*host) => {
                self.end_reason
                    .get_or_insert(DrainEndReason::Superseded(*requester));
            }
            EventKind::DrainEnded { host, .. } if self.drained_host == Some(*host) => {
                self.end_reason = Some(DrainEndReason::Cancelled)
            }
            EventKind::TaskStarted { tid, .. } => drop(self.start_times.insert(*tid, at)),
            EventKind::TaskEnded { tid, .. } => drop(self.start_times.remove(tid)),
            EventKind::Checkpointed {
                checkpoint: checkpoint_name,
                job,
                ..
            } => {
                self.drain_checkpoints.insert(*job, checkpoint_name.clone());
                self.checkpoint_times.insert(*job, at);
            }
            EventKind::MigrationStep { tid, step, .. } => drop(self.last_steps.insert(*tid, *step)),
            EventKind::Migrated {
                tid,
                from,
                bytes,
                resident,
                transfer_time: duration,
                ..
            } => {
                self.last_steps.remove(tid);
                let bytes = *bytes.max(resident);
                self.image_bytes.insert(*tid, bytes);
                if self.drained_host == Some(*from) {
                    self.migrated_tasks.insert(*tid);
                    self.departed_bytes = self.departed_bytes.saturating_add(bytes);
                }
                if bytes >= RATE_SAMPLE_BYTES_MIN {
                    self.transfer_totals = (
                        self.transfer_totals.0.saturating_add(bytes),
                        self.transfer_totals.1 + *duration,
                    );
                }
            }
            EventKind::MigrationFailed { tid, .. } => drop(self.last_steps.remove(tid)),
            _ => {}
        }
    }

    /// True if the task has migrated from the host since the drain started.
    pub(super) fn has_migrated(&self, tid: Tid) -> bool {
        self.migrated_tasks.contains(&tid)
    }

    /// Returns the work that a job with these tasks would lose at time `now`: the sum, over the
    /// tasks, of the time since the later of the task's start and the job's newest checkpoint.
    pub(super) fn unsaved_work(&self, now: Micros, job: Tid, tasks: &[Tid]) -> Micros {
        let (oldest_event_time, checkpoint_time) = (
            self.log_start.unwrap_or(now),
            self.checkpoint_times.get(&job).copied().unwrap_or_default(),
        );
        let unsaved_since = |tid: &Tid| {
            self.start_times
                .get(tid)
                .copied()
                .unwrap_or(oldest_event_time)
                .max(checkpoint_time)
        };
        Micros(tasks.iter().fold(0, |sum: u64, tid| {
            sum.saturating_add(now.since(unsaved_since(tid)).0)
        }))
    }

    /// Returns a clause about the migration of a task that can leave.
    pub(super) fn migration_text(&self, tid: Tid) -> String {
        match self.last_steps.get(&tid) {
            None => "it is migrating".into(),
            // The coordinator limits concurrent migrations, so a task waits after the inspection.
            Some(Step::Inspect) => "it is queued; the smallest tasks migrate first".into(),
            Some(step) => format!("it is migrating, {step} done"),
        }
    }

    /// Returns the state of a task. `stuck_reason` is the reason why the task cannot leave, or
    /// `None` if the task can leave.
    pub(super) fn departure_state(
        &self,
        tid: Tid,
        stuck_reason: Option<&String>,
    ) -> DepartureState {
        match (stuck_reason, self.last_steps.get(&tid)) {
            (Some(_), _) => DepartureState::Stuck,
            (None, Some(Step::Inspect)) => DepartureState::Queued,
            (None, _) => DepartureState::Migrating,
        }
    }

    /// Returns the size of the last migration of a task for the progress line. The text is empty if
    /// the size is unknown.
    pub(super) fn size_text(&self, tid: Tid) -> String {
        self.image_bytes
            .get(&tid)
            .map(|bytes| format!(", {}", megabytes_text(*bytes)))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::MigrationId;
    use sempa_proto::migration::{MigrationCause, Usage};

    #[test]
    fn progress_text_follows_log() {
        let (tid, host) = (Tid::from_raw(0x40001), HostId::MASTER);
        let migration_step = |step| EventKind::MigrationStep {
            id: MigrationId(1),
            tid,
            from: host,
            to: host,
            step,
            bytes: 0,
        };
        let mut progress = DrainProgress::default();
        assert_eq!(
            (
                progress.migration_text(tid).as_str(),
                progress.size_text(tid).as_str()
            ),
            ("it is migrating", "")
        );
        progress.apply_event(Micros(1), &migration_step(Step::Inspect));
        assert_eq!(
            progress.migration_text(tid),
            "it is queued; the smallest tasks migrate first"
        );
        progress.apply_event(Micros(1), &migration_step(Step::Dump));
        assert_eq!(
            progress.migration_text(tid),
            format!("it is migrating, {} done", Step::Dump)
        );
        let (cause, frozen_duration) = (MigrationCause::Drain { requested_by: tid }, Micros(1));
        progress.apply_event(
            Micros(1),
            &EventKind::Migrated {
                id: MigrationId(1),
                tid,
                from: host,
                to: host,
                cause,
                bytes: 200_000,
                resident: 12_340_000,
                frozen: frozen_duration,
                transfer_time: frozen_duration,
            },
        );
        assert_eq!(
            (
                progress.migration_text(tid).as_str(),
                progress.size_text(tid).as_str()
            ),
            ("it is migrating", ", 12.3 MB")
        );
    }

    /// Only migrations and checkpoints after the start of the drain are counted.
    #[test]
    fn totals_count_from_start_of_drain() {
        let [console, other_console, job] = [1, 2, 3].map(|n| Tid::from_raw(0x40000 + n));
        let (host, other_host, event_time) =
            (HostId::new(2).expect("a host"), HostId::MASTER, Micros(1));
        let drain_started_event = |requester| EventKind::DrainStarted {
            host,
            requested_by: requester,
            deadline: None,
        };
        let checkpointed_event = |checkpoint_name: &str| EventKind::Checkpointed {
            checkpoint: checkpoint_name.into(),
            job,
            tasks: 1,
            bytes: 1,
            frozen: event_time,
            vacated: false,
        };
        let migrated_event = |source| EventKind::Migrated {
            id: MigrationId(1),
            tid: job,
            from: source,
            to: other_host,
            cause: MigrationCause::Drain {
                requested_by: console,
            },
            bytes: 7,
            resident: 5,
            frozen: event_time,
            transfer_time: event_time,
        };
        let mut progress = DrainProgress::new(console);
        let mut totals_after = |kinds: &[EventKind]| {
            kinds
                .iter()
                .for_each(|kind| progress.apply_event(Micros(1), kind));
            (
                progress.departed_bytes,
                progress.drain_checkpoints.get(&job).cloned(),
                progress.has_migrated(job),
            )
        };
        assert_eq!(
            totals_after(&[
                checkpointed_event("a"),
                migrated_event(host),
                drain_started_event(console),
                migrated_event(other_host),
            ]),
            (0, None, false)
        );
        assert_eq!(
            totals_after(&[
                migrated_event(host),
                checkpointed_event("b"),
                migrated_event(other_host),
                checkpointed_event("c")
            ]),
            (7, Some("c".into()), true)
        );
        assert_eq!(
            totals_after(&[drain_started_event(other_console)]),
            (7, Some("c".into()), true),
            "it has no time of its own"
        );
    }

    /// A drain of another host, or a later drain without a deadline, does not end this drain.
    #[test]
    fn cancel_or_later_deadline_ends_drain() {
        let [console, other_console] = [1, 2].map(|n| Tid::from_raw(0x40000 + n));
        let (host, other_host) = (HostId::new(2).expect("a host"), HostId::MASTER);
        let drain_started_event =
            |requester, host, deadline_us: Option<u64>| EventKind::DrainStarted {
                host,
                requested_by: requester,
                deadline: deadline_us.map(Micros),
            };
        let drain_ended_event = |host| EventKind::DrainEnded {
            host,
            requested_by: other_console,
        };
        let mut progress = DrainProgress::new(console);
        let mut end_after = |kinds: &[EventKind]| {
            kinds
                .iter()
                .for_each(|kind| progress.apply_event(Micros(1), kind));
            progress.end_reason
        };
        assert_eq!(
            end_after(&[
                drain_started_event(other_console, host, Some(9)),
                drain_ended_event(host),
                drain_started_event(console, host, None)
            ]),
            None,
            "it was before"
        );
        assert_eq!(
            end_after(&[
                drain_started_event(other_console, other_host, Some(9)),
                drain_ended_event(other_host),
                drain_started_event(other_console, host, None)
            ]),
            None
        );
        assert_eq!(
            end_after(&[drain_started_event(other_console, host, Some(9))]),
            Some(DrainEndReason::Superseded(other_console))
        );
        assert_eq!(
            end_after(&[
                drain_ended_event(host),
                drain_started_event(other_console, host, Some(9))
            ]),
            Some(DrainEndReason::Cancelled),
            "that comes too late"
        );
    }

    #[test]
    fn unsaved_work_counts_from_start_or_checkpoint() {
        let [job, child, other_job] = [1, 2, 3].map(|n| Tid::from_raw(0x40000 + n));
        let task_started_event = |tid| EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: "w".into(),
            user: 1,
        };
        let (checkpoint_name, tasks, bytes, frozen_time, is_vacated) =
            ("a".to_string(), 2, 1, Micros(1), false);
        let checkpointed_event = EventKind::Checkpointed {
            checkpoint: checkpoint_name,
            job,
            tasks,
            bytes,
            frozen: frozen_time,
            vacated: is_vacated,
        };
        let mut progress = DrainProgress::default();
        progress.apply_event(Micros(100), &task_started_event(child));
        let unsaved_us = |progress: &DrainProgress, tids: &[Tid]| {
            progress.unsaved_work(Micros(1000), job, tids).0
        };
        assert_eq!(
            unsaved_us(&progress, &[job, child]),
            1800,
            "a task whose start is not in the log counts from the oldest event"
        );
        progress.apply_event(Micros(300), &task_started_event(other_job));
        progress.apply_event(Micros(400), &checkpointed_event);
        progress.apply_event(Micros(900), &task_started_event(child));
        assert_eq!(
            (
                unsaved_us(&progress, &[job, child]),
                unsaved_us(&progress, &[])
            ),
            (700, 0)
        );
        assert_eq!(
            progress.unsaved_work(Micros(1000), other_job, &[other_job]),
            Micros(700),
            "the set is of another job"
        );
        progress.apply_event(
            Micros(950),
            &EventKind::TaskEnded {
                tid: other_job,
                status: 0,
                used: Usage::default(),
            },
        );
        assert!(
            !progress.start_times.contains_key(&other_job)
                && progress.unsaved_work(Micros(1), job, &[child]) == Micros(0)
        );
    }
}
