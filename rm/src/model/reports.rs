//! Translates the report of a load watcher into the owner's state and policy for guests. Also
//! records the memory promised to tasks that the report does not include yet.

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

/// Removes the promises that are so old that a report at `now` includes their memory.
pub(super) fn expire_promises(promises: &mut VecDeque<(Micros, u64)>, now: Micros) {
    promises.retain(|(promised_at, _)| now.since(*promised_at) < MEMORY_PROMISE_WINDOW);
}

impl Model {
    /// Records that tasks that need `bytes` of memory in total are being started on a host.
    pub fn promise_memory(&mut self, now: Micros, id: HostId, bytes: u64) {
        let Some(host) = self.edit_host(id) else {
            return;
        };
        let is_full = host.memory_promises.len() >= MEMORY_PROMISES_MAX;
        match host.memory_promises.back_mut().filter(|_| is_full) {
            Some(newest_promise) => *newest_promise = (now, newest_promise.1.saturating_add(bytes)),
            None => host.memory_promises.push_back((now, bytes)),
        }
    }
}

/// Returns the owner's state according to a report. `owner_left_at`: time when the last owner left;
/// `None` if no owner was seen.
pub(super) fn owner_from_report(report: &LoadReport, owner_left_at: Option<Micros>) -> OwnerState {
    match (&report.guest_access, &report.owner_verdict) {
        (_, OwnerVerdict::Present { .. }) => OwnerState::Present {
            why: report.owner_reason.clone(),
        },
        (GuestAccess::Paused { .. }, _) => OwnerState::Closed {
            why: report.access_reason.clone(),
        },
        (GuestAccess::Welcome, OwnerVerdict::Uncertain { .. }) => OwnerState::PossiblyPresent {
            why: report.owner_reason.clone(),
            idle_login: !report.logins.is_empty(),
        },
        (GuestAccess::Welcome, OwnerVerdict::Absent { .. }) => OwnerState::Absent {
            left_at: owner_left_at,
        },
    }
}

/// Returns the owner's policy for guests according to a report, with times on the model's clock.
/// Shares the limits with `previous_policy` if they are unchanged.
pub(super) fn guest_policy_from_report(
    now: Micros,
    report: &LoadReport,
    previous_policy: &GuestPolicy,
) -> GuestPolicy {
    let guest_leave_time = match report.guest_access {
        GuestAccess::Paused {
            eviction: EvictionMode::Kill,
            evict_at: Some(_),
        } => LeaveTime::Terminated,
        GuestAccess::Paused { evict_at: None, .. } => LeaveTime::Never,
        GuestAccess::Paused {
            evict_at: Some(eviction_time),
            ..
        } if eviction_time > report.at => LeaveTime::At(now + eviction_time.since(report.at)),
        GuestAccess::Paused { .. } | GuestAccess::Welcome => LeaveTime::Now,
    };
    let is_vacating = matches!(
        report.guest_access,
        GuestAccess::Paused {
            eviction: EvictionMode::Checkpoint,
            ..
        }
    );
    let is_unchanged = *previous_policy.limits == report.guest_limits;
    let limits = if is_unchanged {
        previous_policy.limits.clone()
    } else {
        Arc::new(report.guest_limits.clone())
    };
    GuestPolicy {
        leave_time: guest_leave_time,
        vacates_jobs: is_vacating,
        limits,
    }
}

/// True if the change of the owner's state must be recorded: the host now accepts guests and did
/// not before, or the reverse, or the host excludes guests for another kind of reason than before.
pub(super) fn is_recorded_change(previous_owner: &OwnerState, current_owner: &OwnerState) -> bool {
    let excludes_guests_now = current_owner.excludes_guests();
    previous_owner.excludes_guests() != excludes_guests_now
        || (excludes_guests_now
            && std::mem::discriminant(previous_owner) != std::mem::discriminant(current_owner))
}

/// Returns the event that records a change of the owner's state. `previous_owner`: the state before
/// the report.
pub(super) fn owner_change_event(previous_owner: &OwnerState, report: &LoadReport) -> EventKind {
    let (host, why) = (report.host, report.owner_reason.clone());
    match (&report.guest_access, &report.owner_verdict, previous_owner) {
        (_, OwnerVerdict::Present { since, detected_at }, _) => EventKind::OwnerPresent {
            host,
            since: *since,
            detected_at: *detected_at,
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
