//! Hosts that accept no guests, because of their owner or a drain. Finds out when the last guest
//! has left such a host, and which guests stay for a reason that was not reported yet.

use super::{HostState, Model, TaskState};
use crate::decide::{EvictionPlan, OwnerState, StayDecision};
use sempa_proto::{HostId, Tid};

impl HostState {
    /// True if the host accepts no guests.
    fn excludes_guests(&self) -> bool {
        self.owner.excludes_guests() || self.drained_by.is_some()
    }

    /// Returns the owner's state as input of decisions. A drain appears in it only if the owner
    /// accepts guests.
    pub(super) fn effective_owner(&self) -> OwnerState {
        match self.drained_by.filter(|_| !self.owner.excludes_guests()) {
            Some(by) => OwnerState::Drained { by },
            None => self.owner.clone(),
        }
    }
}

impl Model {
    /// Returns the hosts that accept no guests and have none left. A host is returned once, and
    /// again only after guests have been on it again or its drain has changed.
    pub fn newly_clean_hosts(&mut self) -> Vec<HostId> {
        // A task that migrates to a host counts as a guest there.
        let tasks = &self.tasks;
        self.migrating
            .retain(|tid| tasks.get(tid).is_some_and(|task| task.migrating.is_some()));
        let mut clean = Vec::new();
        for id in std::mem::take(&mut self.maybe_clean) {
            let Some(host) = self.hosts.get(&id).filter(|host| host.excludes_guests()) else {
                continue;
            };
            let is_guest = |task: &TaskState| !task.pinned;
            let comes = |tid: &Tid| {
                let to = self
                    .tasks
                    .get(tid)
                    .filter(|task| is_guest(task))
                    .and_then(|task| task.migrating);
                to.is_some_and(|going| going.target == Some(id))
            };
            let is_clean = !self.tasks_on(id).any(|(_, task)| is_guest(task))
                && !self.migrating.iter().any(comes);
            if is_clean && !host.clean_reported {
                clean.push(id);
            }
            self.hosts
                .get_mut(&id)
                .into_iter()
                .for_each(|host| host.clean_reported = is_clean);
        }
        clean
    }

    /// Starts the drain of a host at the request of task `by`. `None` ends the drain.
    pub fn set_drain(&mut self, id: HostId, by: Option<Tid>) {
        if let Some(host) = self.edit_host(id) {
            (host.drained_by, host.clean_reported) = (by, false);
        }
        for tid in self.tasks_by_host.get(&id).into_iter().flatten() {
            // Reasons reported before do not apply any more, so new ones must be reported.
            self.tasks
                .get_mut(tid)
                .into_iter()
                .for_each(|task| task.reported_stay = None);
        }
    }

    /// Returns the hosts that are being drained, each with the task that requested its drain.
    pub fn drained_hosts(&self) -> impl Iterator<Item = (HostId, Tid)> {
        self.hosts
            .iter()
            .filter_map(|(id, host)| Some((*id, host.drained_by?)))
    }

    pub fn is_drained(&self, id: HostId) -> bool {
        self.drained_by(id).is_some()
    }

    /// Returns the task that requested the drain of a host; `None` if the host is not being
    /// drained.
    pub fn drained_by(&self, id: HostId) -> Option<Tid> {
        self.hosts.get(&id)?.drained_by
    }

    /// Returns the guests to report: those that stay although their host accepts no guests. A guest
    /// is returned again only when the kind of its reason has changed.
    pub fn unreported_stays<'m>(&mut self, moves: &'m EvictionPlan) -> Vec<&'m StayDecision> {
        let (mut news, snapshot) = (Vec::new(), &self.snapshot);
        for stay in moves
            .staying
            .iter()
            .filter(|stay| stay.is_logged(snapshot.now))
        {
            let kind = Some(std::mem::discriminant(&stay.reason));
            let Some(task) = self
                .tasks
                .get_mut(&stay.tid)
                .filter(|t| t.reported_stay != kind)
            else {
                continue;
            };
            task.reported_stay = kind;
            news.push(stay);
        }
        news
    }
}
