//! What a resource manager is told that need not wake it at once.
//!
//! A program that spawns by grants starts and ends hundreds of tasks a second, and its resource manager hears of each three times:
//! placed, up, gone. To wake it each time takes a processor from those whom it is about, just when they begin. Nobody waits
//! for what it does with that, as long as it learns of taken places before a grant is used up: requests that are decided one by one
//! are not granted. So while places are taken, such news waits for others, or for a message that is more than news; the
//! order of all that the resource manager gets stays what it was ([`Output::NewsToTask`]).

use super::{Machine, Output};
use sempa_proto::event::EventKind;
use sempa_proto::sm::{GRANT_HOSTS_MAX, SM_GRANT_TAKEN};
use sempa_proto::task::ToTask;
use sempa_proto::{Micros, Tid};

/// How long after a place was taken it is likely that another one will be; a grant holds no longer.
const TAKING_SPAN: Micros = Micros::from_secs(1);
/// Taken places of which a resource manager is not told at once: it gives others when half of a grant is taken.
const UNTOLD_MAX: usize = GRANT_HOSTS_MAX / 2;

/// Grants that are being used.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The resource manager that gave them, and until when more is to come.
    taking: Option<(Tid, Micros)>,
    /// Taken places of which it was not told at once, since it last was.
    untold: usize,
}

/// True for events of tasks that come and go.
pub(super) fn is_news(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Placed { .. } | EventKind::TaskStarted { .. } | EventKind::TaskEnded { .. })
}

impl Machine {
    /// True while this task's grants are being used.
    pub(super) fn hears_later(&self, dst: Tid) -> bool {
        self.news.taking.is_some_and(|(rm, until)| rm == dst && self.now < until)
    }

    /// True for a place that was taken, unless it is time to say so. Called once for each, on its way to the resource manager.
    pub(super) fn may_wait(&mut self, dst: Tid, item: &ToTask) -> bool {
        let ToTask::Deliver { message, .. } = item else { return false };
        if message.tag != SM_GRANT_TAKEN || !message.src.is_daemon() {
            return false;
        }
        self.news.taking = Some((dst, self.now + TAKING_SPAN));
        self.news.untold = (self.news.untold + 1) % UNTOLD_MAX;
        self.news.untold != 0
    }
}

/// The same output, for a message that may wait.
pub(super) fn in_its_time(output: Output) -> Output {
    match output {
        Output::ToTask { conn, message } => Output::NewsToTask { conn, message },
        other => other,
    }
}
