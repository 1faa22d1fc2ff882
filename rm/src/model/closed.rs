//! Hosts that accept no guests, because of their owner or a drain. Finds out when the last guest
//! has left such a host, and which guests stay for a reason that was not reported yet.

use super::{Host, Model, Task};
use crate::decide::{Moves, Owner, Stay};
use sempa_proto::{HostId, Tid};

impl Host {
    /// True if the host accepts no guests.
    fn is_closed(&self) -> bool {
        self.owner.is_present() || self.drained.is_some()
    }

    /// Returns the owner's state as input of decisions. A drain appears in it only if the owner
    /// accepts guests.
    pub(super) fn keeper(&self) -> Owner {
        match self.drained.filter(|_| !self.owner.is_present()) {
            Some(by) => Owner::Drained { by },
            None => self.owner.clone(),
        }
    }
}

impl Model {
    /// Returns the hosts that accept no guests and have none left. A host is returned once, and
    /// again only after guests have been on it again or its drain has changed.
    pub fn newly_clean(&mut self) -> Vec<HostId> {
        // A task that migrates to a host counts as a guest there.
        let tasks = &self.tasks;
        self.moving
            .retain(|tid| tasks.get(tid).is_some_and(|task| task.moving.is_some()));
        let mut clean = Vec::new();
        for id in std::mem::take(&mut self.maybe_clean) {
            let Some(host) = self.hosts.get(&id).filter(|host| host.is_closed()) else {
                continue;
            };
            let is_guest = |task: &Task| !task.pinned;
            let comes = |tid: &Tid| {
                let to = self
                    .tasks
                    .get(tid)
                    .filter(|task| is_guest(task))
                    .and_then(|task| task.moving);
                to.is_some_and(|going| going.to == Some(id))
            };
            let is_clean = !self.tasks_on(id).any(|(_, task)| is_guest(task))
                && !self.moving.iter().any(comes);
            if is_clean && !host.clean_told {
                clean.push(id);
            }
            self.hosts
                .get_mut(&id)
                .into_iter()
                .for_each(|host| host.clean_told = is_clean);
        }
        clean
    }

    /// Starts the drain of a host at the request of task `by`. `None` ends the drain.
    pub fn drain(&mut self, id: HostId, by: Option<Tid>) {
        if let Some(host) = self.edit_host(id) {
            (host.drained, host.clean_told) = (by, false);
        }
        for tid in self.on.get(&id).into_iter().flatten() {
            // Reasons reported before do not apply any more, so new ones must be reported.
            self.tasks
                .get_mut(tid)
                .into_iter()
                .for_each(|task| task.told = None);
        }
    }

    /// Returns the hosts that are being drained, each with the task that requested its drain.
    pub fn drained(&self) -> impl Iterator<Item = (HostId, Tid)> {
        self.hosts
            .iter()
            .filter_map(|(id, host)| Some((*id, host.drained?)))
    }

    pub fn is_drained(&self, id: HostId) -> bool {
        self.drained_by(id).is_some()
    }

    /// Returns the task that requested the drain of a host; `None` if the host is not being
    /// drained.
    pub fn drained_by(&self, id: HostId) -> Option<Tid> {
        self.hosts.get(&id)?.drained
    }

    /// Returns the guests to report: those that stay although their host accepts no guests. A guest
    /// is returned again only when the kind of its reason has changed.
    pub fn news<'m>(&mut self, moves: &'m Moves) -> Vec<&'m Stay> {
        let (mut news, snapshot) = (Vec::new(), &self.view);
        for stay in moves.stay.iter().filter(|stay| stay.is_news(snapshot.now)) {
            let kind = Some(std::mem::discriminant(&stay.why));
            let Some(task) = self.tasks.get_mut(&stay.tid).filter(|t| t.told != kind) else {
                continue;
            };
            task.told = kind;
            news.push(stay);
        }
        news
    }
}
