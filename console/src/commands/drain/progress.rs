//! Progress of a drain as read from the event log: the migration step of each task, the rate of
//! migrations, and the work that jobs would lose.

use super::estimate::{TransferTotals, megabytes};
use super::jobs::DepartureState;
use crate::virtual_machine::VirtualMachine;
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

/// Events fetched by one request.
const EVENTS_BATCH_MAX: u32 = 4096;
/// Minimum bytes of a migration that is used to measure the rate.
const RATE_SAMPLE_BYTES_MIN: u64 = 16 << 20;

/// Why a drain ended or was superseded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainEnd {
    /// The drain was cancelled.
    Cancelled,
    /// A later drain with a deadline replaced this one. The tid is the console that requested the
    /// later drain.
    Superseded(Tid),
}

/// State accumulated from the event log.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The console that requested the drain.
    requester: Tid,
    /// Number of the next event to read.
    next_event: u64,
    /// Last completed step of each running migration.
    steps: BTreeMap<Tid, Step>,
    /// Bytes of the last migration of each task.
    image_bytes: BTreeMap<Tid, u64>,
    /// Sums over all migrations with at least [`RATE_SAMPLE_BYTES_MIN`].
    pub(super) transferred: TransferTotals,
    /// The host that is being drained.
    pub(super) host: Option<HostId>,
    /// Bytes of the tasks that have left the host since the drain started.
    pub(super) departed_bytes: u64,
    /// Name of the newest checkpoint of each job, if it was completed since the drain started.
    pub(super) checkpoints: BTreeMap<Tid, String>,
    /// Why this drain ended; `None` while it lasts. After the end the host may still be drained by
    /// another request.
    pub(super) end: Option<DrainEnd>,
    /// Time of the oldest event in the log, in microseconds since the Unix epoch.
    log_start: Option<Micros>,
    /// Start time of each running task whose start is in the log, in microseconds since the Unix
    /// epoch.
    started_at: BTreeMap<Tid, Micros>,
    /// Completion time of each job's newest checkpoint, also if it is older than the drain, in
    /// microseconds since the Unix epoch.
    checkpointed_at: BTreeMap<Tid, Micros>,
}

impl Progress {
    /// Creates the state for a drain requested by this console.
    pub(super) fn new(requester: Tid) -> Progress {
        Progress {
            requester,
            ..Progress::default()
        }
    }

    /// Reads all new events.
    pub(super) fn read_events(&mut self, machine: &dyn VirtualMachine) -> Result<(), Error> {
        loop {
            let events = machine.events(self.next_event, EVENTS_BATCH_MAX)?;
            let Some(last) = events.last() else {
                return Ok(());
            };
            self.next_event = last.number + 1;
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
                requested_by: by,
                ..
            } if *by == self.requester => {
                (self.host, self.departed_bytes, self.checkpoints, self.end) =
                    (Some(*host), 0, BTreeMap::new(), None);
            }
            // The resource manager keeps only the newest deadline of a host.
            EventKind::DrainStarted {
                host,
                requested_by: by,
                deadline: Some(_),
            } if self.host == Some(*host) => {
                self.end.get_or_insert(DrainEnd::Superseded(*by));
            }
            EventKind::DrainEnded { host, .. } if self.host == Some(*host) => {
                self.end = Some(DrainEnd::Cancelled)
            }
            EventKind::TaskStarted { tid, .. } => drop(self.started_at.insert(*tid, at)),
            EventKind::TaskEnded { tid, .. } => drop(self.started_at.remove(tid)),
            EventKind::Checkpointed {
                checkpoint: set,
                job,
                ..
            } => {
                self.checkpoints.insert(*job, set.clone());
                self.checkpointed_at.insert(*job, at);
            }
            EventKind::MigrationStep { tid, step, .. } => drop(self.steps.insert(*tid, *step)),
            EventKind::Migrated {
                tid,
                from,
                bytes,
                resident,
                transfer_time: whole,
                ..
            } => {
                self.steps.remove(tid);
                let bytes = *bytes.max(resident);
                self.image_bytes.insert(*tid, bytes);
                if self.host == Some(*from) {
                    self.departed_bytes = self.departed_bytes.saturating_add(bytes);
                }
                if bytes >= RATE_SAMPLE_BYTES_MIN {
                    self.transferred = (
                        self.transferred.0.saturating_add(bytes),
                        self.transferred.1 + *whole,
                    );
                }
            }
            EventKind::MigrationFailed { tid, .. } => drop(self.steps.remove(tid)),
            _ => {}
        }
    }

    /// Returns the work that a job with these tasks would lose at time `now`: the sum, over the
    /// tasks, of the time since the later of the task's start and the job's newest checkpoint.
    pub(super) fn unsaved_work(&self, now: Micros, job: Tid, tasks: &[Tid]) -> Micros {
        let (first, written) = (
            self.log_start.unwrap_or(now),
            self.checkpointed_at.get(&job).copied().unwrap_or_default(),
        );
        let since = |tid: &Tid| {
            self.started_at
                .get(tid)
                .copied()
                .unwrap_or(first)
                .max(written)
        };
        Micros(tasks.iter().fold(0, |sum: u64, tid| {
            sum.saturating_add(now.since(since(tid)).0)
        }))
    }

    /// Returns a clause about the migration of a task that can leave.
    pub(super) fn migration_text(&self, tid: Tid) -> String {
        match self.steps.get(&tid) {
            None => "it is migrating".into(),
            // The coordinator limits concurrent migrations, so the task is queued.
            Some(Step::Inspect) => "it is queued; the smallest tasks migrate first".into(),
            Some(step) => format!("it is migrating, {step} done"),
        }
    }

    /// Returns the state of a task; `why` is the reason why it cannot leave, if there is one.
    pub(super) fn departure_state(&self, tid: Tid, why: Option<&String>) -> DepartureState {
        match (why, self.steps.get(&tid)) {
            (Some(_), _) => DepartureState::Stuck,
            (None, Some(Step::Inspect)) => DepartureState::Queued,
            (None, _) => DepartureState::Migrating,
        }
    }

    /// Returns the size of the last migration of a task for the progress line. Empty if the size is
    /// unknown.
    pub(super) fn size_text(&self, tid: Tid) -> String {
        self.image_bytes
            .get(&tid)
            .map(|bytes| format!(", {}", megabytes(*bytes)))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::MigrationId;
    use sempa_proto::migration::{MigrationCause, Usage};

    /// The clause about a migrating task follows from the event log.
    #[test]
    fn progress_text_follows_log() {
        let (tid, host) = (Tid::from_raw(0x40001), HostId::MASTER);
        let moving = |step| EventKind::MigrationStep {
            id: MigrationId(1),
            tid,
            from: host,
            to: host,
            step,
            bytes: 0,
        };
        let mut heard = Progress::default();
        assert_eq!(
            (
                heard.migration_text(tid).as_str(),
                heard.size_text(tid).as_str()
            ),
            ("it is migrating", "")
        );
        heard.apply_event(Micros(1), &moving(Step::Inspect));
        assert_eq!(
            heard.migration_text(tid),
            "it is queued; the smallest tasks migrate first"
        );
        heard.apply_event(Micros(1), &moving(Step::Dump));
        assert_eq!(
            heard.migration_text(tid),
            format!("it is migrating, {} done", Step::Dump)
        );
        let (cause, frozen) = (MigrationCause::Drain { requested_by: tid }, Micros(1));
        heard.apply_event(
            Micros(1),
            &EventKind::Migrated {
                id: MigrationId(1),
                tid,
                from: host,
                to: host,
                cause,
                bytes: 200_000,
                resident: 12_340_000,
                frozen,
                transfer_time: frozen,
            },
        );
        assert_eq!(
            (
                heard.migration_text(tid).as_str(),
                heard.size_text(tid).as_str()
            ),
            ("it is migrating", ", 12.3 MB")
        );
    }

    /// Departed bytes and checkpoints count from the start of the drain.
    #[test]
    fn totals_count_from_start_of_drain() {
        let [me, other, job] = [1, 2, 3].map(|n| Tid::from_raw(0x40000 + n));
        let (host, elsewhere, time) = (HostId::new(2).expect("a host"), HostId::MASTER, Micros(1));
        let begun = |by| EventKind::DrainStarted {
            host,
            requested_by: by,
            deadline: None,
        };
        let written = |set: &str| EventKind::Checkpointed {
            checkpoint: set.into(),
            job,
            tasks: 1,
            bytes: 1,
            frozen: time,
            vacated: false,
        };
        let moved = |from| EventKind::Migrated {
            id: MigrationId(1),
            tid: job,
            from,
            to: elsewhere,
            cause: MigrationCause::Drain { requested_by: me },
            bytes: 7,
            resident: 5,
            frozen: time,
            transfer_time: time,
        };
        let mut heard = Progress::new(me);
        let mut hear = |kinds: &[EventKind]| {
            kinds
                .iter()
                .for_each(|kind| heard.apply_event(Micros(1), kind));
            (heard.departed_bytes, heard.checkpoints.get(&job).cloned())
        };
        assert_eq!(hear(&[written("a"), moved(host), begun(me)]), (0, None));
        assert_eq!(
            hear(&[moved(host), written("b"), moved(elsewhere), written("c")]),
            (7, Some("c".into()))
        );
        assert_eq!(
            hear(&[begun(other)]),
            (7, Some("c".into())),
            "it has no time of its own"
        );
    }

    /// A drain is over if it is cancelled or a later order has a deadline.
    #[test]
    fn cancel_or_later_deadline_ends_drain() {
        let [me, other] = [1, 2].map(|n| Tid::from_raw(0x40000 + n));
        let (host, elsewhere) = (HostId::new(2).expect("a host"), HostId::MASTER);
        let begun = |by, host, until: Option<u64>| EventKind::DrainStarted {
            host,
            requested_by: by,
            deadline: until.map(Micros),
        };
        let ended = |host| EventKind::DrainEnded {
            host,
            requested_by: other,
        };
        let mut heard = Progress::new(me);
        let mut hear = |kinds: &[EventKind]| {
            kinds
                .iter()
                .for_each(|kind| heard.apply_event(Micros(1), kind));
            heard.end
        };
        assert_eq!(
            hear(&[
                begun(other, host, Some(9)),
                ended(host),
                begun(me, host, None)
            ]),
            None,
            "it was before"
        );
        assert_eq!(
            hear(&[
                begun(other, elsewhere, Some(9)),
                ended(elsewhere),
                begun(other, host, None)
            ]),
            None
        );
        assert_eq!(
            hear(&[begun(other, host, Some(9))]),
            Some(DrainEnd::Superseded(other))
        );
        assert_eq!(
            hear(&[ended(host), begun(other, host, Some(9))]),
            Some(DrainEnd::Cancelled),
            "that comes too late"
        );
    }

    /// Unsaved work counts from a task's start or its job's newest checkpoint.
    #[test]
    fn unsaved_work_counts_from_start_or_checkpoint() {
        let [job, child, other] = [1, 2, 3].map(|n| Tid::from_raw(0x40000 + n));
        let start = |tid| EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: "w".into(),
            user: 1,
        };
        let (set, tasks, bytes, frozen, parked) = ("a".to_string(), 2, 1, Micros(1), false);
        let written = EventKind::Checkpointed {
            checkpoint: set,
            job,
            tasks,
            bytes,
            frozen,
            vacated: parked,
        };
        let mut heard = Progress::default();
        heard.apply_event(Micros(100), &start(child));
        let stake = |heard: &Progress, tids: &[Tid]| heard.unsaved_work(Micros(1000), job, tids).0;
        assert_eq!(
            stake(&heard, &[job, child]),
            1800,
            "a task whose start is not in the log counts from the oldest event"
        );
        heard.apply_event(Micros(300), &start(other));
        heard.apply_event(Micros(400), &written);
        heard.apply_event(Micros(900), &start(child));
        assert_eq!((stake(&heard, &[job, child]), stake(&heard, &[])), (700, 0));
        assert_eq!(
            heard.unsaved_work(Micros(1000), other, &[other]),
            Micros(700),
            "the set is of another job"
        );
        heard.apply_event(
            Micros(950),
            &EventKind::TaskEnded {
                tid: other,
                status: 0,
                used: Usage::default(),
            },
        );
        assert!(
            !heard.started_at.contains_key(&other)
                && heard.unsaved_work(Micros(1), job, &[child]) == Micros(0)
        );
    }
}
