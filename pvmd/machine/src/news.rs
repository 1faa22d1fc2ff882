//! What a resource manager is told that need not wake it at once.
//!
//! A program that spawns by grants starts and ends hundreds of tasks a second, and its resource manager hears of each three times:
//! placed, up, gone. To wake it each time takes a processor from those whom it is about, just when they begin, and to pack each
//! entry of the log for it delays the answers that are next. Nobody waits for what it does with that, as long as it learns of taken
//! places before a grant is used up: requests that are decided one by one are not granted. So while places are taken, such news
//! waits, unpacked, for others or for a message that is more than news; the order of all that the resource manager gets stays what
//! it was.

use super::{Machine, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::Held;
use sempa_proto::sm::{GRANT_HOSTS_MAX, SM_GRANT_TAKEN, unpack_taken};
use sempa_proto::task::ToTask;
use sempa_proto::{Micros, Tid};

/// How long after a place was taken it is likely that another one will be.
const TAKING_SPAN: Micros = Micros::from_secs(1);
/// Taken places of which a resource manager is not told at once: it gives others when half of a grant is taken.
const UNTOLD_MAX: usize = GRANT_HOSTS_MAX / 2;
/// How long news waits.
const NEWS_PAUSE: Micros = Micros::from_millis(100);
/// News that waits at most.
const NEWS_MAX: usize = 256;

/// Something that waits.
#[derive(Debug)]
enum Waiting {
    /// The entry of the log with this number.
    Event(u64),
    /// A word of a daemon.
    Word(ToTask),
}

/// Grants that are being used, and what their resource manager is not told yet.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The resource manager that gave them, and until when more is to come.
    taking: Option<(Tid, Micros)>,
    /// Taken places of which it was not told at once, since it last was.
    untold: usize,
    /// For whom news waits, and what.
    whom: Tid,
    waiting: Vec<Waiting>,
    /// It will be looked at in time.
    timed: bool,
    /// How much has waited so far.
    #[cfg(test)]
    pub(super) waited: usize,
}

/// True for events of tasks that come and go.
pub(super) fn is_news(kind: &EventKind) -> bool {
    matches!(
        kind,
        EventKind::Placed { .. } | EventKind::TaskStarted { .. } | EventKind::TaskEnded { .. }
    )
}

/// How many places of a grant were taken, by a daemon's word for its giver.
fn taken_places(item: &ToTask) -> Option<usize> {
    let ToTask::Deliver { message, .. } = item else {
        return None;
    };
    let is_taken = message.tag == SM_GRANT_TAKEN && message.src.is_daemon();
    is_taken
        .then(|| unpack_taken(message.body.clone()).ok())
        .flatten()
        .map(|taken| taken.tasks.len())
}

impl Machine {
    /// True while grants of this task, which runs here, are being used.
    pub(super) fn hears_later(&self, dst: Tid) -> bool {
        self.news
            .taking
            .is_some_and(|(rm, until)| rm == dst && self.now < until)
            && self.tasks.get(dst).is_some()
    }

    /// An entry of the log is told in its time.
    pub(super) fn event_later(&mut self, dst: Tid, number: u64) {
        self.wait_with(dst, Waiting::Event(number));
    }

    /// Keeps a taken place for a moment, unless it is time to say so; anything else, for which what waits has to be told first, is
    /// given back.
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

    /// The first of what waits may have waited for long enough.
    pub(super) fn news_due(&mut self) {
        self.news.timed = false;
        self.tell_news();
    }

    /// Tells what waits. Whoever has ended meanwhile needs none of it.
    fn tell_news(&mut self) {
        let whom = self.news.whom;
        for waiting in std::mem::take(&mut self.news.waiting) {
            let item = match waiting {
                Waiting::Word(item) => Some(item),
                Waiting::Event(number) => self.told_event(whom, number),
            };
            if let Some(item) = item {
                self.route(whom, Held::Item(item));
            }
        }
    }
}
