//! Hosts that accept no guests, because of their owner or a drain. Detects when the last guest has
//! left such a host. Selects the guests whose reason to stay was not reported yet.

use super::{HostState, Model, TaskState};
use crate::decide::{EvictionPlan, OwnerState, StayDecision};
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

impl HostState {
    /// True if the host accepts no guests.
    fn excludes_guests(&self) -> bool {
        self.owner.excludes_guests() || self.drain_requester.is_some()
    }

    /// Returns the owner's state as input of decisions. The result is a drain only if the host is
    /// being drained and its owner accepts guests.
    pub(super) fn effective_owner(&self) -> OwnerState {
        match self
            .drain_requester
            .filter(|_| !self.owner.excludes_guests())
        {
            Some(requester) => OwnerState::Drained { requester },
            None => self.owner.clone(),
        }
    }
}

impl Model {
    /// Returns the hosts that accept no guests and have no guest left. Returns a host once, and
    /// again only after guests have been on the host again or its drain has changed.
    pub fn newly_guest_free_hosts(&mut self) -> Vec<HostId> {
        // A task that migrates to a host counts as a guest there.
        let tasks = &self.tasks;
        self.migrating_tasks
            .retain(|tid| tasks.get(tid).is_some_and(|task| task.migration.is_some()));
        let mut guest_free_hosts = Vec::new();
        for id in std::mem::take(&mut self.guest_check_hosts) {
            let Some(host) = self.hosts.get(&id).filter(|host| host.excludes_guests()) else {
                continue;
            };
            let is_guest = |task: &TaskState| !task.pinned;
            let is_arriving = |tid: &Tid| {
                let migration = self
                    .tasks
                    .get(tid)
                    .filter(|task| is_guest(task))
                    .and_then(|task| task.migration);
                migration.is_some_and(|migration_status| migration_status.target == Some(id))
            };
            let has_leftovers = self.leftovers.iter().any(|(host, _)| *host == id);
            let is_guest_free = !has_leftovers
                && !self.tasks_on(id).any(|(_, task)| is_guest(task))
                && !self.migrating_tasks.iter().any(is_arriving);
            if is_guest_free && !host.guest_free_reported {
                guest_free_hosts.push(id);
            }
            self.hosts
                .get_mut(&id)
                .into_iter()
                .for_each(|host| host.guest_free_reported = is_guest_free);
        }
        guest_free_hosts
    }

    /// Records that an ended task has left processes on a host, or that these have ended. They are
    /// guests of the host.
    pub(super) fn record_leftover(&mut self, host: HostId, tid: Tid, is_present: bool) {
        let has_changed = match is_present {
            true => self.leftovers.insert((host, tid)),
            false => self.leftovers.remove(&(host, tid)),
        };
        if has_changed {
            self.guest_check_hosts.insert(host);
        }
    }

    /// Applies the leftovers in a list of all tasks.
    pub(super) fn set_leftovers(&mut self, tasks: &[TaskInfo]) {
        let listed = tasks.iter().filter(|task| task.is_leftover());
        let listed: BTreeSet<(HostId, Tid)> = listed.map(|task| (task.host, task.tid)).collect();
        let changes = self.leftovers.symmetric_difference(&listed);
        self.guest_check_hosts
            .extend(changes.map(|(host, _)| *host));
        self.leftovers = listed;
    }

    /// Starts the drain of a host at the request of task `requester`. `None` ends the drain.
    pub fn set_drain(&mut self, id: HostId, requester: Option<Tid>) {
        if let Some(host) = self.edit_host(id) {
            (host.drain_requester, host.guest_free_reported) = (requester, false);
        }
        for tid in self.tasks_by_host.get(&id).into_iter().flatten() {
            // The reported reasons no longer apply. The guests' reasons must be reported again.
            self.tasks
                .get_mut(tid)
                .into_iter()
                .for_each(|task| task.reported_stay_reason = None);
        }
    }

    /// Returns the hosts that are being drained, each with the task that requested its drain.
    pub fn drained_hosts(&self) -> impl Iterator<Item = (HostId, Tid)> {
        self.hosts
            .iter()
            .filter_map(|(id, host)| Some((*id, host.drain_requester?)))
    }

    pub fn is_drained(&self, id: HostId) -> bool {
        self.drain_requester(id).is_some()
    }

    /// Returns the task that requested the drain of a host; `None` if the host is not being
    /// drained.
    pub fn drain_requester(&self, id: HostId) -> Option<Tid> {
        self.hosts.get(&id)?.drain_requester
    }

    /// Returns the guests whose stay must be reported: those that stay although their host accepts
    /// no guests. Returns a guest again only if the kind of its reason has changed.
    pub fn unreported_stays<'m>(&mut self, plan: &'m EvictionPlan) -> Vec<&'m StayDecision> {
        let (mut unreported_decisions, snapshot) = (Vec::new(), &self.snapshot);
        for stay in plan
            .stays
            .iter()
            .filter(|stay| stay.is_logged(snapshot.now))
        {
            let reason_kind = Some(std::mem::discriminant(&stay.reason));
            let Some(task) = self
                .tasks
                .get_mut(&stay.tid)
                .filter(|t| t.reported_stay_reason != reason_kind)
            else {
                continue;
            };
            task.reported_stay_reason = reason_kind;
            unreported_decisions.push(stay);
        }
        unreported_decisions
    }
}
