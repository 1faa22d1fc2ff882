//! Batches messages to a resource manager that need not wake it immediately.
//!
//! A program that spawns by placement leases starts and ends hundreds of tasks a second, and each
//! task causes three messages to the resource manager: slot used, task started, task ended. Waking
//! the resource manager for each of them would take processor time from the tasks that are being
//! started, and encoding each event would delay the daemon's next replies.
//!
//! No request waits for these messages. It suffices that the resource manager learns of used slots
//! before a lease is exhausted, because requests that are decided one by one use no lease. While
//! slots of a lease are being used, the messages are therefore kept, not yet encoded, until one of
//! these happens:
//!
//! - `NEWS_PAUSE` has passed since the first one.
//! - `NEWS_MAX` of them are waiting.
//! - `UNTOLD_MAX` used slots have not been reported.
//! - Any other message to the resource manager is due. Batching never changes the order of its
//!   messages.

use super::{Machine, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::PendingItem;
use sempa_proto::sm::{LEASE_HOSTS_MAX, SM_PLACEMENT_LEASE_USED, unpack_placement_lease_use};
use sempa_proto::task::ToTask;
use sempa_proto::{Micros, Tid};

/// Time after the use of a leased slot during which another use is likely.
const TAKING_SPAN: Micros = Micros::from_secs(1);
/// Largest number of used slots that may be unreported. A resource manager issues a new lease when
/// half of one is used.
const UNTOLD_MAX: usize = LEASE_HOSTS_MAX / 2;
/// Longest delay of a batched message.
const NEWS_PAUSE: Micros = Micros::from_millis(100);
/// Largest number of messages in a batch.
const NEWS_MAX: usize = 256;

#[derive(Debug)]
enum Waiting {
    /// The event with this number in the event log.
    Event(u64),
    /// A control message of a daemon.
    Word(ToTask),
}

/// The batch, and the use of leases that keeps batching enabled.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The resource manager whose lease was used last, and the end of the batching window.
    taking: Option<(Tid, Micros)>,
    /// Used slots that were batched since the last report that was not delayed.
    untold: usize,
    /// Receiver of the batched messages.
    whom: Tid,
    waiting: Vec<Waiting>,
    /// A timer for the batch is running.
    timed: bool,
    /// Total number of messages batched so far.
    #[cfg(test)]
    pub(super) waited: usize,
}

/// True for events about single tasks, which may be batched.
pub(super) fn is_news(kind: &EventKind) -> bool {
    matches!(
        kind,
        EventKind::Placed { .. } | EventKind::TaskStarted { .. } | EventKind::TaskEnded { .. }
    )
}

/// Returns the number of used slots that a daemon reports to the issuer of a lease, if the item is
/// such a report.
fn taken_places(item: &ToTask) -> Option<usize> {
    let ToTask::Deliver { message, .. } = item else {
        return None;
    };
    let is_taken = message.tag == SM_PLACEMENT_LEASE_USED && message.src.is_daemon();
    is_taken
        .then(|| unpack_placement_lease_use(message.body.clone()).ok())
        .flatten()
        .map(|taken| taken.tasks.len())
}

impl Machine {
    /// True while events for this task, a resource manager on this host, are batched.
    pub(super) fn hears_later(&self, dst: Tid) -> bool {
        self.news
            .taking
            .is_some_and(|(rm, until)| rm == dst && self.now < until)
            && self.tasks.get(dst).is_some()
    }

    /// Adds an event to the batch.
    pub(super) fn event_later(&mut self, dst: Tid, number: u64) {
        self.wait_with(dst, Waiting::Event(number));
    }

    /// Adds a report of used slots to the batch, unless too many are unreported. Returns any item
    /// that must be sent now; the batch for its receiver has been sent before it.
    pub(super) fn unless_news(&mut self, dst: Tid, item: ToTask) -> Option<ToTask> {
        if let Some(places) = taken_places(&item).filter(|_| self.tasks.get(dst).is_some()) {
            self.news.taking = Some((dst, self.now + TAKING_SPAN));
            self.news.untold += places;
            if self.news.untold < UNTOLD_MAX {
                self.wait_with(dst, Waiting::Word(item));
                return None;
            }
            self.news.untold = 0;
        }
        if dst == self.news.whom {
            self.tell_news();
        }
        Some(item)
    }

    fn wait_with(&mut self, dst: Tid, what: Waiting) {
        if dst != self.news.whom {
            self.tell_news();
            self.news.whom = dst;
        }
        self.news.waiting.push(what);
        #[cfg(test)]
        {
            self.news.waited += 1;
        }
        if self.news.waiting.len() >= NEWS_MAX {
            self.tell_news();
        } else if !std::mem::replace(&mut self.news.timed, true) {
            self.timer(NEWS_PAUSE, Timer::News);
        }
    }

    /// The delay of the first batched message has expired.
    pub(super) fn news_due(&mut self) {
        self.news.timed = false;
        self.tell_news();
    }

    /// Sends the batch. Events for a receiver that has ended meanwhile are dropped.
    fn tell_news(&mut self) {
        let whom = self.news.whom;
        for waiting in std::mem::take(&mut self.news.waiting) {
            let item = match waiting {
                Waiting::Word(item) => Some(item),
                Waiting::Event(number) => self.told_event(whom, number),
            };
            if let Some(item) = item {
                self.route(whom, PendingItem::Control(item));
            }
        }
    }
}
