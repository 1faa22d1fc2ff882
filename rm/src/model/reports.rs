//! What the report of a load watcher says of the owner of its host, and of the terms on which guests are there.

use super::Model;
use crate::decide::{Leaving, Owner, Terms};
use sempa_proto::event::EventKind;
use sempa_proto::load::{LoadReport, OwnerVerdict};
use sempa_proto::owner::{Guests, Leave};
use sempa_proto::{HostId, Micros};
use std::collections::VecDeque;
use std::sync::Arc;

/// A watcher reads how much memory is free every half a minute: a report may not know of tasks that began in the last one.
const MEMORY_AGE_MAX: Micros = Micros::from_secs(30);
/// Promises that are told apart; more count as the last one.
const PROMISES_MAX: usize = 256;

/// Promises that a report of this time knows of already are no more.
pub(super) fn keep_promises(promised: &mut VecDeque<(Micros, u64)>, now: Micros) {
    promised.retain(|(at, _)| now.since(*at) < MEMORY_AGE_MAX);
}

impl Model {
    /// Tasks that need so much memory are being started on a host.
    pub fn promise_memory(&mut self, now: Micros, id: HostId, bytes: u64) {
        let Some(host) = self.edit_host(id) else {
            return;
        };
        let full = host.promised.len() >= PROMISES_MAX;
        match host.promised.back_mut().filter(|_| full) {
            Some(last) => *last = (now, last.1.saturating_add(bytes)),
            None => host.promised.push_back((now, bytes)),
        }
    }
}

/// What a report makes of the owner; `left`: when the last one left.
pub(super) fn owner(report: &LoadReport, left: Option<Micros>) -> Owner {
    match (&report.guests, &report.owner) {
        (_, OwnerVerdict::Present { .. }) => Owner::Present {
            why: report.why.clone(),
        },
        (Guests::Stopped { .. }, _) => Owner::Closed {
            why: report.guests_why.clone(),
        },
        (Guests::Welcome, OwnerVerdict::Maybe { .. }) => Owner::Maybe {
            why: report.why.clone(),
            idle: !report.logins.is_empty(),
        },
        (Guests::Welcome, OwnerVerdict::Absent { .. }) => Owner::Absent { left },
    }
}

/// When guests leave, on the model's clock, and what they may have; limits that have not changed stay the same value.
pub(super) fn terms(now: Micros, report: &LoadReport, before: &Terms) -> Terms {
    let leaving = match report.guests {
        Guests::Stopped {
            then: Leave::Kill,
            leave_at: Some(_),
        } => Leaving::Ended,
        Guests::Stopped { leave_at: None, .. } => Leaving::Never,
        Guests::Stopped {
            leave_at: Some(at), ..
        } if at > report.at => Leaving::At(now + at.since(report.at)),
        Guests::Stopped { .. } | Guests::Welcome => Leaving::Now,
    };
    let parks = matches!(
        report.guests,
        Guests::Stopped {
            then: Leave::Checkpoint,
            ..
        }
    );
    let same = *before.limits == report.limits;
    let limits = if same {
        before.limits.clone()
    } else {
        Arc::new(report.limits.clone())
    };
    Terms {
        leaving,
        parks,
        limits,
    }
}

/// True when there is something to record: guests are not wanted any more, or are again, or for another kind of reason.
pub(super) fn is_news(was: &Owner, is: &Owner) -> bool {
    let unwanted = is.is_present();
    was.is_present() != unwanted
        || (unwanted && std::mem::discriminant(was) != std::mem::discriminant(is))
}

/// What is recorded then.
pub(super) fn came_or_went(was: &Owner, report: &LoadReport) -> EventKind {
    let (host, why) = (report.host, report.why.clone());
    match (&report.guests, &report.owner, was) {
        (_, OwnerVerdict::Present { since, seen }, _) => EventKind::OwnerPresent {
            host,
            since: *since,
            seen: *seen,
            why,
        },
        (Guests::Stopped { .. }, ..) => EventKind::HostClosed {
            host,
            why: report.guests_why.clone(),
        },
        (Guests::Welcome, _, Owner::Closed { .. }) => EventKind::HostOpened { host },
        (Guests::Welcome, ..) => EventKind::OwnerAbsent { host, why },
    }
}
