//! The leases of the simulated taskers: they freeze and end their processes by themselves.

use super::{Sim, SimEvent};
use sempa_proto::lease;
use sempa_proto::tasker::FromTasker;
use sempa_proto::{HostId, Micros};

/// The lease of one tasker.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TaskerLease {
    /// Times at which the processes are frozen and ended; `None` before the first lease and after
    /// the end of the lease.
    deadlines: Option<(Micros, Micros)>,
    /// Time since which no process may run; `None` while processes may run.
    frozen_since: Option<Micros>,
    /// True if an event that checks the lease is in the queue.
    is_check_scheduled: bool,
}

impl Sim {
    /// True while the lease of this host's tasker permits no process to run.
    pub(in crate::tests) fn is_lease_frozen(&self, host_id: HostId) -> bool {
        self.nodes[&host_id].tasker_lease.frozen_since.is_some()
    }

    /// Renews the lease of a tasker, and lets the held processes run.
    pub(super) fn renew_tasker_lease(
        &mut self,
        host_id: HostId,
        freeze_at: Micros,
        kill_at: Micros,
    ) {
        let now = self.now;
        let lease = &mut self
            .nodes
            .get_mut(&host_id)
            .expect("it speaks")
            .tasker_lease;
        lease.deadlines = Some((freeze_at, kill_at));
        let mut frozen_time = Micros(0);
        if now < freeze_at
            && let Some(frozen_since) = lease.frozen_since.take()
        {
            frozen_time = now.since(frozen_since);
            for proc in 0..self.procs.len() {
                if self.procs[proc].host == host_id && std::mem::take(&mut self.procs[proc].is_held)
                {
                    self.resume_proc(proc);
                }
            }
        }
        self.send_from_tasker(host_id, FromTasker::LeaseRenewed { frozen_time });
        self.schedule_lease_check(host_id, freeze_at);
    }

    fn schedule_lease_check(&mut self, host_id: HostId, at: Micros) {
        let node = self.nodes.get_mut(&host_id).expect("it is there");
        if !std::mem::replace(&mut node.tasker_lease.is_check_scheduled, true) {
            self.schedule(at.max(self.now), SimEvent::LeaseCheck(host_id));
        }
    }

    /// Enforces the lease of a tasker. A stopped tasker enforces its lease when it resumes.
    pub(super) fn check_tasker_lease(&mut self, host_id: HostId) {
        let now = self.now;
        let node = self.nodes.get_mut(&host_id).expect("it is there");
        node.tasker_lease.is_check_scheduled = false;
        let Some((freeze_at, kill_at)) = node.tasker_lease.deadlines else {
            return;
        };
        if !node.is_alive || node.is_tasker_dead || node.deferred_orders.is_some() {
            return;
        }
        if now < freeze_at {
            return self.schedule_lease_check(host_id, freeze_at);
        }
        node.tasker_lease.frozen_since.get_or_insert(now);
        if now < kill_at {
            self.hold_procs(host_id);
            if kill_at < lease::NEVER {
                self.schedule_lease_check(host_id, kill_at);
            }
            return;
        }
        node.tasker_lease.deadlines = None;
        self.kill_tasker(host_id);
    }

    /// Holds the processes of a host if its lease permits no process to run.
    pub(super) fn hold_procs(&mut self, host_id: HostId) {
        if self.is_lease_frozen(host_id) {
            self.procs
                .iter_mut()
                .filter(|p| p.host == host_id && p.spawned_tid.is_some() && !p.exited)
                .for_each(|p| p.is_held = true);
        }
    }
}
