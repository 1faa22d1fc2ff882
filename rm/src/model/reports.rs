//! Translates the report of a load watcher into the state of the owner and the terms for guests.
//! Also records the memory promised to tasks that the report does not include yet.

use super::Model;
use crate::decide::{GuestPolicy, LeaveTime, OwnerState};
use sempa_proto::event::EventKind;
use sempa_proto::load::{LoadReport, OwnerVerdict};
use sempa_proto::owner::{EvictionMode, GuestAccess};
use sempa_proto::{HostId, Micros};
use std::collections::VecDeque;
use std::sync::Arc;

/// Interval at which a load watcher reads the free memory. A report may omit memory of tasks that
/// started within this interval.
const MEMORY_PROMISE_WINDOW: Micros = Micros::from_secs(30);
/// Maximum number of entries for promised memory per host. Further promises are added to the newest
/// entry.
const MEMORY_PROMISES_MAX: usize = 256;

/// Drops the promises that are so old that a report at `now` includes their memory.
pub(super) fn expire_promises(promised: &mut VecDeque<(Micros, u64)>, now: Micros) {
    promised.retain(|(at, _)| now.since(*at) < MEMORY_PROMISE_WINDOW);
}

impl Model {
    /// Records that tasks that need `bytes` of memory in total are being started on a host.
    pub fn promise_memory(&mut self, now: Micros, id: HostId, bytes: u64) {
        let Some(host) = self.edit_host(id) else {
            return;
        };
        let full = host.memory_promises.len() >= MEMORY_PROMISES_MAX;
        match host.memory_promises.back_mut().filter(|_| full) {
            Some(last) => *last = (now, last.1.saturating_add(bytes)),
            None => host.memory_promises.push_back((now, bytes)),
        }
    }
}

/// Returns the owner's state according to a report. `left_at`: time when the last owner
/// left.
pub(super) fn owner_from_report(report: &LoadReport, owner_left_at: Option<Micros>) -> OwnerState {
    match (&report.access, &report.owner_verdict) {
        (_, OwnerVerdict::Present { .. }) => OwnerState::Present {
            why: report.owner_reason.clone(),
        },
        (GuestAccess::Paused { .. }, _) => OwnerState::Closed {
            why: report.access_reason.clone(),
        },
        (GuestAccess::Welcome, OwnerVerdict::Maybe { .. }) => OwnerState::PossiblyPresent {
            why: report.owner_reason.clone(),
            idle_login: !report.logins.is_empty(),
        },
        (GuestAccess::Welcome, OwnerVerdict::Absent { .. }) => OwnerState::Absent {
            left_at: owner_left_at,
        },
    }
}

/// Returns the owner's terms for guests according to a report, with times on the model's clock.
/// Shares the limits with `before` if they are unchanged.
pub(super) fn guest_policy_from_report(
    now: Micros,
    report: &LoadReport,
    previous: &GuestPolicy,
) -> GuestPolicy {
    let leaving = match report.access {
        GuestAccess::Paused {
            eviction: EvictionMode::Kill,
            evict_at: Some(_),
        } => LeaveTime::Terminated,
        GuestAccess::Paused { evict_at: None, .. } => LeaveTime::Never,
        GuestAccess::Paused {
            evict_at: Some(at), ..
        } if at > report.at => LeaveTime::At(now + at.since(report.at)),
        GuestAccess::Paused { .. } | GuestAccess::Welcome => LeaveTime::Now,
    };
    let parks = matches!(
        report.access,
        GuestAccess::Paused {
            eviction: EvictionMode::Checkpoint,
            ..
        }
    );
    let same = *previous.limits == report.limits;
    let limits = if same {
        previous.limits.clone()
    } else {
        Arc::new(report.limits.clone())
    };
    GuestPolicy {
        leave_time: leaving,
        vacates_jobs: parks,
        limits,
    }
}

/// True if the change of the owner's state must be recorded: the host now accepts guests and did
/// not before, or vice versa, or excludes them for another kind of reason.
pub(super) fn is_recorded_change(was: &OwnerState, is: &OwnerState) -> bool {
    let unwanted = is.excludes_guests();
    was.excludes_guests() != unwanted
        || (unwanted && std::mem::discriminant(was) != std::mem::discriminant(is))
}

/// Returns the event that records a change of the owner's state. `was`: state before the report.
pub(super) fn owner_change_event(was: &OwnerState, report: &LoadReport) -> EventKind {
    let (host, why) = (report.host, report.owner_reason.clone());
    match (&report.access, &report.owner_verdict, was) {
        (
            _,
            OwnerVerdict::Present {
                since,
                detected_at: seen,
            },
            _,
        ) => EventKind::OwnerPresent {
            host,
            since: *since,
            detected_at: *seen,
            why,
        },
        (GuestAccess::Paused { .. }, ..) => EventKind::HostClosed {
            host,
            why: report.access_reason.clone(),
        },
        (GuestAccess::Welcome, _, OwnerState::Closed { .. }) => EventKind::HostOpened { host },
        (GuestAccess::Welcome, ..) => EventKind::OwnerAbsent { host, why },
    }
}
