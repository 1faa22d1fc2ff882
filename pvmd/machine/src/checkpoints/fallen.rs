//! Tasks that may have been lost with their host before anybody knew of it.
//!
//! A machine that goes down ends its processes one after the other, and the daemon may be the last: then it reports tasks that were
//! killed, and a moment later it is gone. A task whose memory was still on a host that dies is killed where it is, and that may be
//! known before the loss. Neither has ended by itself: if the host turns out to be lost, the job goes back as if they had been there.

use super::ends::ENDING;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// A host that goes down may live for so long after it has killed a task.
const GOING_DOWN: Micros = Micros::from_secs(10);

/// Those of a job's tasks.
#[derive(Debug, Default)]
pub(super) struct Fallen {
    /// With which host each may have been lost, and since when that is so. Up to two hosts for a task: the one where it was
    /// killed, and the one that had its memory.
    with: BTreeMap<(Tid, HostId), Micros>,
    /// Somebody here has told them to end: that is no sign of anything.
    told: BTreeSet<Tid>,
}

impl Fallen {
    /// Somebody here has told this member of the job to end.
    pub(super) fn told(&mut self, tid: Tid) {
        self.told.insert(tid);
    }

    /// Something happened on this host to a member of the job.
    pub(super) fn happened(&mut self, now: Micros, host: HostId, kind: &EventKind) {
        let (tid, with) = match kind {
            EventKind::TaskEnded { tid, status, .. }
                if ENDING.contains(&(status & 0x7f)) && !self.told.contains(tid) =>
            {
                (*tid, host)
            }
            EventKind::MoveFailed {
                tid,
                from,
                step: Step::Arrive,
                ..
            } => (*tid, *from),
            _ => return,
        };
        // Whoever reads this would be lost with it.
        if with != HostId::MASTER {
            self.with.insert((tid, with), now);
        }
    }

    /// True if any of them would have been lost with this host. Who is lost has been silent for `lease`.
    pub(super) fn any_with(&self, now: Micros, lease: Micros, host: HostId) -> bool {
        self.with
            .iter()
            .any(|((_, with), since)| *with == host && now < *since + lease + GOING_DOWN)
    }

    /// Until when it is not known whether they were lost with their hosts, if there are any.
    pub(super) fn unknown_until(&self, now: Micros, lease: Micros) -> Option<Micros> {
        self.with
            .values()
            .map(|since| *since + lease + GOING_DOWN)
            .filter(|until| now < *until)
            .max()
    }

    /// The job has a set with these tasks: who is not in it does not come back by it.
    pub(super) fn forget_all_but(&mut self, tasks: &[Tid]) {
        self.with.retain(|(tid, _), _| tasks.contains(tid));
        self.told.retain(|tid| tasks.contains(tid));
    }
}
