//! Events of the virtual machine that concern a run.

use crate::master::MasterEvent;
use crate::vm_master::worker_of;
use libpvm::proto::event::EventKind;
use libpvm::proto::{HostId, Tid};
use sempa_work_dispatch::{LossReason, PauseCause};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time for which the end of a worker waits for the event with its reason.
const REASON_PATIENCE: Duration = Duration::from_millis(500);
/// Reasons that are kept for notices that have not arrived.
const REASONS_MAX: usize = 10_000;

/// Returns what an event means for the master. Updates the names of the hosts.
pub(crate) fn translate_event(
    event: &EventKind,
    hosts: &mut BTreeMap<HostId, String>,
) -> Vec<MasterEvent> {
    let pause = |cause| move |tid: &Tid| MasterEvent::WorkerPaused(worker_of(*tid), cause);
    let resume = |tid: &Tid| MasterEvent::WorkerResumed(worker_of(*tid));
    match event {
        EventKind::HostAdded { host, name } => {
            hosts.insert(*host, name.clone());
            vec![MasterEvent::HostAdded(name.as_str().into())]
        }
        EventKind::HostGone { host, name, .. } => {
            hosts.remove(host);
            vec![MasterEvent::HostLost(name.as_str().into())]
        }
        EventKind::GuestsPaused { guests, .. } => {
            guests.iter().map(pause(PauseCause::Owner)).collect()
        }
        EventKind::GuestsResumed { guests, .. } => {
            let mut events: Vec<MasterEvent> = guests.iter().map(resume).collect();
            events.push(MasterEvent::HostAvailable);
            events
        }
        EventKind::Suspended { tid, .. } => vec![pause(PauseCause::Suspended)(tid)],
        EventKind::Resumed { tid, .. } => vec![resume(tid)],
        EventKind::Migrated { tid, to, .. } => {
            let host = hosts
                .get(to)
                .map_or_else(|| "unknown".into(), |name| name.as_str().into());
            // A paused guest that has left the owner's host computes again.
            vec![
                MasterEvent::WorkerMigrated(worker_of(*tid), host),
                resume(tid),
            ]
        }
        EventKind::OwnerAbsent { .. }
        | EventKind::HostOpened { .. }
        | EventKind::DrainEnded { .. } => vec![MasterEvent::HostAvailable],
        _ => Vec::new(),
    }
}

/// Returns the reason that a process's wait status shows.
fn reason_of_status(status: i32) -> LossReason {
    match status & 0x7f {
        0 => LossReason::Ended {
            status: (status >> 8) & 0xff,
        },
        signal => LossReason::Killed { signal },
    }
}

/// Reasons of workers' ends. The notice that a worker has ended and the event with the reason
/// arrive in either order.
#[derive(Debug, Default)]
pub(crate) struct LossReasons {
    reasons: BTreeMap<Tid, LossReason>,
    /// Ended workers without a reason, and the times at which they are lost without one.
    ended: BTreeMap<Tid, Instant>,
}

impl LossReasons {
    /// Notes the reasons in an event.
    pub(crate) fn note(&mut self, event: &EventKind) {
        if self.reasons.len() >= REASONS_MAX {
            self.reasons.clear();
        }
        match event {
            // An owner's reason comes before the end of the process.
            EventKind::TaskEnded { tid, status, .. } => {
                self.reasons
                    .entry(*tid)
                    .or_insert(reason_of_status(*status));
            }
            EventKind::GuestsEnded { guests, .. } => {
                self.reasons
                    .extend(guests.iter().map(|tid| (*tid, LossReason::Owner)));
            }
            EventKind::HostGone { lost_tasks, .. } => {
                let lost = lost_tasks.named.iter();
                self.reasons
                    .extend(lost.map(|(tid, _)| (*tid, LossReason::HostLost)));
            }
            _ => {}
        }
    }

    /// Notes that a worker has ended.
    pub(crate) fn end(&mut self, tid: Tid, now: Instant) {
        self.ended.insert(tid, now + REASON_PATIENCE);
    }

    /// Returns the ended workers whose reasons are known, or whose reasons did not arrive in time.
    pub(crate) fn due(&mut self, now: Instant) -> Vec<(Tid, LossReason)> {
        let mut due = Vec::new();
        let reasons = &mut self.reasons;
        self.ended.retain(|tid, deadline| {
            // Only tasks without a tasker, or those of a lost host, end without an event.
            let default = (now >= *deadline).then_some(LossReason::HostLost);
            let reason = reasons.remove(tid).or(default);
            due.extend(reason.map(|reason| (*tid, reason)));
            reason.is_none()
        });
        due
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.ended.values().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use libpvm::proto::migration::Usage;

    fn ended(tid: Tid, status: i32) -> EventKind {
        EventKind::TaskEnded {
            tid,
            status,
            used: Usage::default(),
        }
    }

    #[test]
    fn reason_and_notice_arrive_in_either_order() {
        let (first, second, third) = (Tid::from_raw(1), Tid::from_raw(2), Tid::from_raw(3));
        let mut losses = LossReasons::default();
        let now = Instant::now();
        losses.note(&ended(first, 11));
        losses.end(first, now);
        losses.end(second, now);
        losses.end(third, now);
        assert_eq!(
            losses.due(now),
            [(first, LossReason::Killed { signal: 11 })]
        );
        losses.note(&ended(second, 3 << 8));
        assert_eq!(losses.due(now), [(second, LossReason::Ended { status: 3 })]);
        let later = losses.next_deadline().expect("a deadline");
        assert_eq!(losses.due(later), [(third, LossReason::HostLost)]);
        assert_eq!(losses.next_deadline(), None);
    }

    #[test]
    fn end_by_an_owner_does_not_count_as_a_kill() {
        let tid = Tid::from_raw(1);
        let mut losses = LossReasons::default();
        losses.note(&EventKind::GuestsEnded {
            host: Tid::from_raw(0x4_0000).birth_host().expect("a host"),
            guests: vec![tid],
            why: String::new(),
        });
        losses.note(&ended(tid, 9));
        losses.end(tid, Instant::now());
        assert_eq!(losses.due(Instant::now()), [(tid, LossReason::Owner)]);
    }
}
